"""The tables of compressed weights on a tiny model, and the published formats they compare with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny() -> Any:
    """Return a language model of one layer and random text."""
    from benchmarks.ablations import attention_subjects
    from benchmarks.models.causal_attention import use_causal_attention

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation(use_causal_attention())
    for parameter in model.parameters():
        parameter.data.mul_(4.0)  # or a new model gives random answers
    tokens, others = torch.randint(0, 61, (2, 2, 24))
    return attention_subjects.LanguageModel("a model", model, "loss", 1, tokens, others, 2)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    from benchmarks.ablations import weights_ablation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_ablation, "BLOCKS", (32, 512))
        patch.setattr(weights_ablation, "CODECS", ("win4", "tier"))
        patch.setattr(weights_ablation, "KEPT", (0, 3))
        patch.setattr(weights_ablation, "methods", without_rans(weights_ablation.methods))
        timed = weights_ablation.times(tiny(), 1)
        return [*weights_ablation.perplexities(tiny()), *timed]


def without_rans(methods: Any) -> Any:
    """Return the methods that are fast on a CPU."""
    return lambda: (row for row in methods() if row.get("codec") != "rans")


def measured(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with a perplexity."""
    return [row for row in found if row["part"] == "perplexity"]


@pytest.mark.slow
def test_lossless_codes_change_nothing_and_are_smaller(found: list[dict[str, Any]]) -> None:
    exact = [row for row in measured(found) if row.get("mantissa") == 7]
    assert len(exact) == 2
    for row in exact:
        assert row["is_same_loss"]
        assert row["against_dense"] == 1.0
        assert row["bits"] < 14.0
        assert row["model_mib"] < found[0]["model_mib"]


@pytest.mark.slow
def test_fewer_bits_cost_more_accuracy(found: list[dict[str, Any]]) -> None:
    by_name = {row["method"]: row for row in measured(found) if row.get("emulated")}
    assert list(by_name) == ["int8", "fp4", "fp4 double", "nf4", "nf4 double"]
    damage = {name: abs(row["against_dense"] - 1.0) for name, row in by_name.items()}
    assert 0.0 < damage["int8"] < damage["nf4"]
    assert by_name["nf4"]["bits"] == 4.5
    assert 4.1 < by_name["nf4 double"]["bits"] < 4.14
    kept = {row["mantissa"]: row for row in measured(found) if row.get("block") == 512}
    assert abs(kept[3]["against_dense"] - 1.0) < abs(kept[0]["against_dense"] - 1.0)
    assert kept[0]["bits"] < kept[3]["bits"]


@pytest.mark.slow
def test_times_are_given_only_for_what_runs_as_it_would(found: list[dict[str, Any]]) -> None:
    timed = [row for row in found if row["part"] == "times"]
    assert not [row for row in timed if row.get("emulated")]
    assert {row.get("block", 512) for row in timed} == {512}
    assert len(timed) == 1 + 2 + 4
    assert all(row["ms"]["median"] > 0 for row in timed)


@pytest.mark.slow
def test_tables_hold_every_method_and_block(found: list[dict[str, Any]]) -> None:
    from benchmarks.ablations import ablation_tables

    shown = ablation_tables.weights(found)
    assert sum("bits kept, blocks of 512" in line for line in shown) == 4
    assert sum(line.startswith("| dense | 16.00 |") for line in shown) == 1
    (head,) = (line for line in shown if line.startswith("| bits kept: perplexity"))
    assert head.endswith("| 32 | 512 |")


def test_codes_keep_what_the_papers_formula_keeps() -> None:
    from benchmarks import registry
    from benchmarks.ablations import weights_ablation

    torch.manual_seed(0)
    weight = registry.weight_of("trained", (64, 512), "cpu")
    assert torch.equal(weights_ablation.through_codes(weight, "win4"), weight)
    coded = weights_ablation.through_codes(weight, "win4:k1:b512")
    ours, formula = (
        weights_ablation.relative([(weight, each)])["relative_l2"]
        for each in (coded, weights_ablation.published(weight, 1, 512))
    )
    assert ours == pytest.approx(formula, rel=0.01)
    assert formula == pytest.approx(0.103, rel=0.1)


@pytest.mark.slow
def test_the_papers_formula_is_what_the_codes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.ablations import weights_ablation

    monkeypatch.setattr(weights_ablation, "BLOCKS", (32, 512))
    rows = list(weights_ablation.errors(tiny(), 128))
    wanted = {(0, 512): 0.195, (1, 512): 0.103, (3, 512): 0.026, (7, 512): 0.0012}
    normal = {(r["mantissa"], r["block"]): r for r in rows if r["weights"] == "normal"}
    for row in rows:
        if row["mantissa"] < 7:
            ours, formula = row["memeff"]["relative_l2"], row["formula"]["relative_l2"]
            assert ours == pytest.approx(formula, rel=0.01)
    for key, error in wanted.items():
        assert normal[key]["formula"]["relative_l2"] == pytest.approx(error, rel=0.04)
    for kept in (0, 1, 3):  # a normaliser for fewer weights: less error, more bits
        small, large = normal[kept, 32], normal[kept, 512]
        assert small["formula"]["relative_l2"] < large["formula"]["relative_l2"]
        assert small["entropy_bits"] > large["entropy_bits"]


def test_nf4_and_fp4_are_the_published_numbers() -> None:
    from benchmarks.ablations import weights_ablation

    numbers = weights_ablation.normal_floats()
    assert numbers.numel() == 16
    assert numbers[[0, 1, 7, 8, 15]].tolist() == pytest.approx(
        [-1, -0.69619, 0, 0.07958, 1], abs=1e-4
    )
    floats = weights_ablation.four_bit_floats()
    assert floats.numel() == 15
    assert floats[8:].tolist() == pytest.approx([1 / 192, 1 / 6, 0.25, 1 / 3, 0.5, 2 / 3, 1.0])


@pytest.mark.parametrize("name", ["normal_floats", "four_bit_floats"])
def test_four_bits_take_the_nearest_number_of_a_block(name: str) -> None:
    from benchmarks.ablations import weights_ablation

    numbers = getattr(weights_ablation, name)()
    torch.manual_seed(0)
    weight = torch.randn(4, 64)
    found, _ = weights_ablation.in_four_bits(weight, numbers, False)
    scale = weight.abs().amax(1, keepdim=True)
    distance = (weight[:, :, None] - numbers * scale[:, None]).abs().amin(-1)
    assert torch.allclose((found - weight).abs(), distance, atol=1e-6)
    doubled, _ = weights_ablation.in_four_bits(weight, numbers, True)
    assert not torch.equal(doubled, found)
    assert (doubled - found).abs().max() < 0.1 * scale.max()


def test_peers_of_one_token_multiply_what_their_formats_hold() -> None:
    from benchmarks.ablations import weights_ablation
    from benchmarks.ops.plain_formats import PlainFormat

    torch.manual_seed(0)
    weight, x = torch.randn(48, 256), torch.randn(1, 256)
    numbers = weights_ablation.normal_floats()
    scale = weight.abs().amax(1, keepdim=True) / 127
    held = {
        "int8": ((weight / scale).round() * scale, 8 + 16 / 256),
        "nf4": (weights_ablation.in_four_bits(weight, numbers, double=False)[0], 4.25),
    }
    for name, (decoded, bits) in held.items():
        peer = PlainFormat(weight, name)
        wanted = x @ decoded.float().t()
        off = (peer(x) - wanted).norm() / wanted.norm()
        assert off < {"int8": 4e-3, "nf4": 4e-2}[name], "scales in bf16 move some numbers"
        assert peer.bits == pytest.approx(bits, abs=0.05)


def test_int8_linears_take_large_inputs_in_16_bits() -> None:
    from benchmarks.ablations import weights_ablation

    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 32).to(torch.bfloat16)
    coded = weights_ablation.Int8Linear(copy.deepcopy(linear))
    x = torch.randn(2, 5, 128, dtype=torch.bfloat16)
    x[..., 3] *= 100.0
    with torch.no_grad():
        wanted = linear(x).float()
        error = (coded(x).float() - wanted).norm() / wanted.norm()
        weights_ablation.LARGE_INPUT, kept = 1e9, weights_ablation.LARGE_INPUT
        try:
            without = (coded(x).float() - wanted).norm() / wanted.norm()
        finally:
            weights_ablation.LARGE_INPUT = kept
    assert error < 0.01 < without
