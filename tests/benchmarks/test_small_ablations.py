"""The ablations that train small models run from end to end at tiny sizes, and print their tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from memeff_compile.kernels.ternary_linear import Quantizer, reference
from tests.support.scripts import script

transformers = pytest.importorskip("transformers", reason="the small model is a Llama of it")

ROOT = Path(__file__).resolve().parents[2]
SLICES = [f"{name}-{split}" for name in ("python", "other") for split in ("train", "validation")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tokens that have something to learn, and a tokenizer."""
    from tokenizers import ByteLevelBPETokenizer

    folder: Path = tmp_path_factory.mktemp("text")
    draw = numpy.random.default_rng(0)
    for name in SLICES:
        steps = draw.integers(1, 4, size=4000)
        (folder / f"{name}.u16").write_bytes((steps.cumsum() % 511 + 1).astype("uint16").tobytes())
    facts = {"slices": {name: {"digest": "0" * 32} for name in SLICES}}
    (folder / "corpus.json").write_text(json.dumps(facts))
    tokenizer = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(["key " * 9], 300, special_tokens=special, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def drawn() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 48, generator=generator) * torch.rand(64, 1, generator=generator)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp4", "topk8"])
def test_references_round_as_the_op_does(kind: str) -> None:
    from benchmarks.ablations import reference_quantizers

    x = drawn()
    codes, scale = reference.codes_and_scale(x, Quantizer(kind))
    found = reference_quantizers.QUANTIZERS[kind](x)
    torch.testing.assert_close(found, codes / scale[:, None], rtol=1e-5, atol=1e-7)


def test_e1m2_is_int4_by_the_largest_value() -> None:
    from benchmarks.ablations import reference_quantizers

    x = drawn()
    largest = x.abs().amax(-1, keepdim=True)
    one, other = (reference_quantizers.QUANTIZERS[k](x) for k in ("fp4-e1m2", "int4-absmax"))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    steps = one / largest * 7
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)


def test_reference_linears_hand_every_gradient_on() -> None:
    from benchmarks.ablations import reference_quantizers

    dense = torch.nn.Linear(48, 8, bias=False)
    linear = reference_quantizers.ReferenceLinear.of(dense, "int4-2mean")
    assert linear.weight is dense.weight
    x = drawn().requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None
    wanted = reference_quantizers.ternary(dense.weight.detach()).sum(0).expand_as(x)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-6)


def qat(text: Path, out: Path, *arguments: str, inner: str = "none") -> str:
    given = ["run", "--size", "tiny", "--inner", inner, "--folder", str(text), "--out", str(out)]
    return script("ternary_ablation", *given, *arguments)


@pytest.mark.slow
def test_ternary_runs_share_their_first_stage_and_fill_the_tables(
    text: Path, tmp_path: Path
) -> None:
    from benchmarks.ablations import ternary_ablation
    from benchmarks.models import convergence

    out = tmp_path / "curves.jsonl"
    chosen = ["a4.8", "q4 kv3", "all int4", "full precision"]
    assert "4 complete; failed: []" in qat(text, out, "--only", *chosen)
    curves = convergence.read_curves(out)
    before = {
        name: ternary_ablation.at_switch(lines)[0]
        for name, lines in curves.items()
        if ternary_ablation.VARIANTS[name[:-2]].stages
    }
    assert len(before) == 2
    assert max(before.values()) - min(before.values()) < 1e-4, "all start from one state"
    before_switch, after, _ = ternary_ablation.at_switch(curves["q4 kv3/0"])
    assert before_switch != after, "other quantisers give another loss at once"
    zeros = curves["a4.8/0"][-1]["zeros"]
    assert zeros["out"] == pytest.approx(0.5, abs=0.05)
    assert 0.05 < zeros["qkv"] < 0.25
    assert zeros["up"] > zeros["gate"]
    assert curves["full precision/0"][-1]["zeros"]["overall"] == 0
    assert curves["full precision/0"][-1]["python"]["loss"] < math.log(512)
    stamp = out.read_text()
    qat(text, out, "--only", "all int4")
    assert out.read_text() == stamp, "what is complete is left out"
    table = script("ternary_ablation", "table", "--out", str(out))
    assert "Table 2: zeros" in table
    assert table.count("| a4.8 |") == 5


@pytest.mark.slow
def test_the_published_spelling_is_found_by_the_pass(text: Path, tmp_path: Path) -> None:
    from benchmarks.models import convergence

    out = tmp_path / "curves.jsonl"
    qat(text, out, "--only", "spelled", "b1.58 relu2", inner="aot_eager")
    curves = convergence.read_curves(out)
    assert curves["spelled/0"][-1]["rewrites"] == {
        "fuse_linear_cross_entropy": 1,
        "ternarize_linear": 14,
    }
    losses = [curves[name][-1]["python"]["loss"] for name in ("spelled/0", "b1.58 relu2/0")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def kv(text: Path, folder: Path, action: str, *arguments: str, inner: str = "none") -> str:
    given = [action, "--size", "tiny", "--inner", inner, "--folder", str(text)]
    given += ["--model", str(folder / "model"), "--out", str(folder / "kv.jsonl")]
    return script("kv_ablation", *given, *arguments)


@pytest.fixture(scope="module")
def kv_rows(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny model and measure its caches."""
    folder: Path = tmp_path_factory.mktemp("kv")
    kv(text, folder, "train")
    kv(text, folder, "measure")
    return folder


@pytest.mark.slow
def test_caches_of_few_bits_are_compared_with_an_exact_one(text: Path, kv_rows: Path) -> None:
    from benchmarks import rows
    from benchmarks.ablations import kv_ablation
    from benchmarks.models import training

    found = [r for r in rows.read(kv_rows / "kv.jsonl") if r["kind"] == "kv quality"]
    assert len(found) == 9
    exact = found[0]
    recipe, plan = kv_ablation.RECIPES["tiny"], kv_ablation.PLANS["tiny"]
    model = transformers.LlamaForCausalLM.from_pretrained(kv_rows / "model", dtype=torch.float32)
    held = training.Tokens(text, "python-validation", recipe, "cpu")[slice(0, plan.sequences)]
    with torch.no_grad():
        logits = model(input_ids=held).logits[:, plan.counted_from - 1 : -1]
    whole = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), held[:, plan.counted_from :].flatten()
    )
    assert exact["text"]["python"]["loss"] == pytest.approx(float(whole), abs=1e-5)
    by_bits = {r["bits"]: r["text"]["python"] for r in found[1:5]}
    assert by_bits[2]["bytes"] < by_bits[4]["bytes"] < exact["text"]["python"]["bytes"]
    assert by_bits[8]["loss"] == pytest.approx(float(whole), abs=1e-4)
    assert by_bits[2]["loss"] != by_bits[8]["loss"]
    assert all(0 <= r["passkey"]["keys"] <= r["passkey"]["tokens"] <= 1 for r in found)
    table = kv(text, kv_rows, "table")
    assert table.count("per_head") == 4


def test_pass_keys_stand_where_they_are_asked_for(text: Path) -> None:
    from benchmarks.ablations import kv_ablation

    recipe, plan = kv_ablation.RECIPES["tiny"], kv_ablation.PLANS["tiny"]
    copying = kv_ablation.Copying(plan, recipe, text, "cpu")
    zeros = torch.zeros(3, 128, dtype=torch.int64)
    assert copying.batch(zeros, step=0)[2].all(), "no text in the first steps"
    told, repeated, plain = copying.batch(zeros, step=plan.without_text)
    assert any(torch.equal(repeated[p : 2 * p], repeated[:p]) for p in range(8, 33))
    assert 0 < repeated.min() <= repeated.max() <= plan.alphabet
    pattern = told[-len(copying.phrase) - plan.key :]
    assert torch.equal(pattern[: len(copying.phrase)], copying.phrase)
    windows = told.unfold(0, len(pattern), 1)
    assert int((windows == pattern).all(1).sum()) == 1 + plan.questions
    assert not plain.any()


@pytest.mark.slow
def test_single_steps_over_codes_agree_with_pieces(text: Path, kv_rows: Path) -> None:
    from benchmarks import rows

    kv(text, kv_rows, "decode", inner="aot_eager")
    found = [r for r in rows.read(kv_rows / "kv.jsonl") if r["kind"] == "kv decode"]
    assert [row["rewrites"].get("compress_kv_cache", 0) for row in found] == [0, 2, 2, 2, 2]
    assert all(row["loss"] == pytest.approx(row["loss_in_pieces"], abs=1e-2) for row in found)


def test_settings_name_every_scheme_and_width() -> None:
    from benchmarks.ablations import kv_ablation

    def widths(scheme: str) -> set[int]:
        chosen: list[Any] = list(kv_ablation.settings(kv_ablation.PLANS["full"]))
        return {bits for bits, kind, _, _ in chosen if kind == scheme}

    assert widths("kivi") == {16, 8, 4, 3, 2}
    assert widths("per_head") == {8, 4, 3, 2}
