"""fidelity_report: an exact cache scores perfectly, a lossy one as measured by hand."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import memeff_compile
from memeff_compile import MiniCache, fidelity_report
from memeff_compile.errors import CalibrationError
from memeff_compile.model.cache.fidelity import FidelityReport

LAYERS = 4
SHORT: dict[str, Any] = {"group": 32, "recent": 16, "steps": 8}


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def ids(tokens: int = 70) -> Tensor:
    return torch.randint(2, 64, (2, tokens), generator=torch.Generator().manual_seed(1))


def test_an_exact_cache_changes_nothing(model: Any) -> None:
    report = fidelity_report(model, ids(), bits=16, merge=None, **SHORT)
    assert report.logits["kl"] == pytest.approx(0.0, abs=1e-7)
    assert report.logits["agreement"] == 1.0
    assert report.logits["loss"] == pytest.approx(report.logits["loss_exact"], abs=1e-6)
    assert len(report.attention) == LAYERS
    assert min(line["worst"] for line in report.attention) > 0.9999
    assert report.memory["ratio"] == 1.0
    assert report.merged == []


def test_numbers_are_those_computed_by_hand(model: Any, tmp_path: Path) -> None:
    merge = MiniCache(start_layer=0, retained=0.05)
    report = fidelity_report(model, [ids(), {"input_ids": ids()}], bits=4, merge=merge, **SHORT)
    cache = memeff_compile.KVCache(model.config, 70, 4, merge=merge, group=32, recent=16)
    with torch.no_grad():
        out = model(input_ids=ids(), use_cache=True)
        model(input_ids=ids()[:, :62], past_key_values=cache)
        found = model(input_ids=ids()[:, 62:], past_key_values=cache).logits
    kl = torch.nn.functional.kl_div(
        found.log_softmax(-1), out.logits[:, 62:].log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert report.logits["kl"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert report.logits["kl_worst"] == pytest.approx(float(kl.max()), rel=1e-4)
    assert 0 < report.logits["kl"] < 0.1
    layers = out.past_key_values.layers
    for pair in report.pairs:
        a, b = pair["layers"]
        for kind in ("keys", "values"):
            one, other = getattr(layers[a], kind), getattr(layers[b], kind)
            cosine = torch.cosine_similarity(one, other, dim=-1)
            assert pair[kind]["mean"] == pytest.approx(float(cosine.mean()), abs=1e-5)
            assert sum(pair[kind]["histogram"]) == 2 * cosine.numel()
            assert pair[kind]["low"] < pair[kind]["mean"] < pair[kind]["high"]
    assert [line["layers"] for line in report.merged] == [(0, 1), (2, 3)]
    assert report.memory["bytes"] == 2 * cache.nbytes
    assert min(line["mean"] for line in report.attention) < 0.9999
    assert "KL" in str(report)
    assert "0-1" in str(report)
    assert json.loads(report.to_json())["settings"]["merge"]["start_layer"] == 0
    report.plot(tmp_path / "layers.svg")
    drawn = (tmp_path / "layers.svg").read_text()
    names = ["-".join(map(str, pair["layers"])) for pair in report.pairs]
    assert len(names) == LAYERS - 1
    assert all(f">{name}</text>" in drawn for name in (*names, "keys", "values"))


def test_padding_is_left_out(model: Any) -> None:
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :10] = 0
    given = {"input_ids": ids(), "attention_mask": mask}
    report = fidelity_report(model, given, bits=16, merge=None, **SHORT)
    assert sum(report.pairs[0]["keys"]["histogram"]) == 2 * (140 - 10)
    assert report.logits["kl"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "no inputs"),
        (torch.ones(1, 8, dtype=torch.long), r"\(1, 8\)"),
        ("a text", "inputs is 'a text'; token ids"),
        (None, "inputs is None"),
        ([1, 2], "are a int; a tensor of whole numbers"),
        ({"ids": ids()}, "are a NoneType; .* as input_ids"),
        (torch.rand(1, 70), "a tensor of torch.float32"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: Any, inputs: Any, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        fidelity_report(model, inputs, **SHORT)


@pytest.mark.parametrize("inputs", [ids(), torch.ones(1, 8, dtype=torch.long)], ids=["", "raises"])
def test_a_model_in_training_is_measured_without_dropout_and_left_as_it_was(
    model: Any, inputs: Tensor
) -> None:
    expected = fidelity_report(model, ids(), bits=16, merge=None, **SHORT)
    trained = copy.deepcopy(model)
    for layer in trained.model.layers:
        layer.self_attn.attention_dropout = 0.5
    trained.train()
    trained.model.layers[1].eval()
    before = {name: module.training for name, module in trained.named_modules()}
    if inputs.shape[1] > SHORT["steps"]:
        found = fidelity_report(trained, inputs, bits=16, merge=None, **SHORT)
        assert found.logits == expected.logits
    else:
        with pytest.raises(CalibrationError):
            fidelity_report(trained, inputs, **SHORT)
    assert {name: module.training for name, module in trained.named_modules()} == before


@pytest.mark.parametrize("steps", [1, 0])
def test_too_few_steps_are_refused(model: Any, steps: int) -> None:
    with pytest.raises(CalibrationError, match=f"steps is {steps}; 2 at least"):
        fidelity_report(model, ids(), **{**SHORT, "steps": steps})
    assert fidelity_report(model, ids(), **{**SHORT, "steps": 2}).logits["loss"] > 0


def alike(keys: float, values: float, pairs: Any = ((0, 1), (2, 3))) -> Any:
    """Return a report of layers so alike."""
    means = {"keys": {"mean": 0.1}, "values": {"mean": 0.1}}  # as they are
    found = [
        {"layers": list(pair), **copy.deepcopy(means), "aligned": {"keys": keys, "values": values}}
        for pair in pairs
    ]
    return FidelityReport({}, found, [], {}, {}, [])


def merged(model: Any, **settings: Any) -> Any:
    merge = MiniCache(start_layer=0, **settings)
    return memeff_compile.KVCache(model.config, 70, 4, merge=merge, group=32, recent=16)


def test_merging_without_a_report_warns_and_names_the_way(model: Any) -> None:
    with pytest.warns(UserWarning, match=r"fidelity_report.*MiniCache\(fidelity=report\)"):
        merged(model)
    with pytest.warns(UserWarning, match="not measured"):
        memeff_compile.KVCache(model.config, 70, 4, merge="minicache")


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (alike(0.49, 0.9), r"keys of layers 0-1, 2-3.*0\.49.*0\.5 at least.*force=True"),
        (alike(0.9, 0.1), r"values of layers 0-1, 2-3.*0\.10"),
        (alike(float("nan"), 0.9), "keys of layers"),
        (alike(0.9, 0.9, [(0, 1)]), "no figures of layers 2-3"),
    ],
)
def test_layers_that_are_not_alike_are_refused(model: Any, report: Any, words: str) -> None:
    with pytest.raises(memeff_compile.UnsupportedInputError, match=words):
        merged(model, fidelity=report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert merged(model, fidelity=report, force=True).merged()


def test_one_pair_that_is_not_alike_is_not_made_up_for_by_others(model: Any) -> None:
    report = alike(0.95, 0.95)
    report.pairs[1]["aligned"]["values"] = 0.2
    with pytest.raises(memeff_compile.UnsupportedInputError, match=r"layers 2-3, which.*0\.20"):
        merged(model, fidelity=report)
    (line,) = merged(model, fidelity=report, end_layer=2).merged()
    assert tuple(line["layers"]) == (0, 1)


def test_layers_that_are_alike_are_merged_without_a_word(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert merged(model, fidelity=alike(0.5, 0.8)).merged()


def test_layers_that_are_not_aligned_are_judged_as_they_are(model: Any) -> None:
    report = alike(0.9, 0.9)
    with pytest.raises(memeff_compile.UnsupportedInputError, match=r"the keys of .* 0\.10"):
        merged(model, fidelity=report, align="none")
    with pytest.warns(UserWarning, match="no neighbouring layers are alike as they are"):
        merged(model, align="none")
    with pytest.warns(UserWarning, match="aligned layers from half on cost 5 to 9 %"):
        merged(model)


def test_aligned_cosines_are_those_of_layers_without_means_and_rotations(model: Any) -> None:
    """A second layer whose keys and values are the first's, turned: alike only when aligned."""
    from memeff_compile.kernels.coded_kv_cache import cosines
    from tests.support.merged_caches import aligned_rows

    rows = aligned_rows(2, 3, 80, 16, torch.float32)
    counted = torch.ones(2, 80, dtype=torch.bool)
    for at, found in enumerate(cosines(rows, counted)):
        plain = torch.cosine_similarity(rows[at], rows[at + 2], dim=-1)
        assert float(plain.mean()) < 0.5
        assert float(found.mean()) > 0.99
    report = fidelity_report(model, ids(), merge=None, **SHORT)
    assert all(0 < pair["aligned"]["keys"] <= 1 for pair in report.pairs)


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ([(3, 0.02, 4.5), (2, 0.2, 6.2)], "if 3 bits without merging .* is too large"),
        ([(3, 0.02, 7.0), (2, 0.2, 8.0)], "Use 3 bits without merging .* instead"),
        ([(3, 0.5, 4.0)], "No cache of 3 bits loses as little"),
        ([], "^$"),
    ],
)
def test_the_advice_is_the_cache_that_is_small_and_loses_little(codes: Any, words: str) -> None:
    named = [dict(zip(("bits", "kl", "ratio"), each, strict=True)) for each in codes]
    report = FidelityReport({}, [], [], {"kl": 0.1}, {"ratio": 6.5}, [], named)
    assert re.search(words, report.advice())


def test_the_advice_names_values_of_fewer_bits_that_are_merged() -> None:
    codes = {"bits": 3, "value_bits": 2, "values_merged": True, "kl": 0.05, "ratio": 6.6}
    report = FidelityReport({}, [], [], {"kl": 0.1}, {"ratio": 6.5}, [], [codes])
    words = "Use 3 bits, 2 for values, with values alone merged (6.60 times smaller, KL 5.0e-02)"
    assert words in report.advice()


def test_merging_is_compared_with_codes_alone(model: Any) -> None:
    merge = MiniCache(start_layer=0, retained=0.05)
    report = fidelity_report(model, ids(), bits=4, merge=merge, **SHORT)
    assert [each["bits"] for each in report.codes] == [2, 3, 4, 3, 3]
    for each in report.codes:
        values = MiniCache(start_layer=0, values_only=True) if "values_merged" in each else None
        given = {"value_bits": each.get("value_bits"), "merge": values, **SHORT}
        alone = fidelity_report(model, ids(), bits=each["bits"], **given)
        assert each["kl"] == pytest.approx(alone.logits["kl"])
        assert each["ratio"] == alone.memory["ratio"]
    assert report.advice() in str(report)


def test_each_pair_merged_alone_shows_where_merging_costs_least(model: Any) -> None:
    merge = MiniCache(start_layer=2, retained=0.05)
    report = fidelity_report(model, ids(), bits=4, merge=merge, each_pair=True, **SHORT)
    for pair in report.pairs:
        start, end = pair["layers"][0], pair["layers"][1] + 1
        single = MiniCache(start_layer=start, end_layer=end, retained=0.05)
        alone = fidelity_report(model, ids(), bits=4, merge=single, **SHORT)
        assert pair["kl"] == pytest.approx(alone.logits["kl"])
        assert f"KL {pair['kl']:.1e}" in str(report)
    assert "kl" not in alone.pairs[0]


@pytest.mark.parametrize(
    ("costs", "count", "found"),
    [
        ([0.3, 0.0, 0.1, 0.2, 0.1], 2, (1, 5)),
        ([0.3, 0.0, 0.1, 0.2, 0.1], 1, (1, 3)),
        ([0.1, 0.0, 0.1, 0.9, 0.1], 3, (0, 6)),
        ([0.3, 0.0], 3, None),
        ([], 1, None),
        ([0.3], 0, None),
    ],
)
def test_the_cheapest_pairs_in_a_row_are_found(costs: Any, count: int, found: Any) -> None:
    pairs = [{"layers": [at, at + 1], "kl": kl} for at, kl in enumerate(costs)]
    merged = [{"layers": (4 + 2 * place, 5 + 2 * place)} for place in range(count)]
    codes = [{"bits": 3, "kl": 0.02, "ratio": 4.5}]
    report = FidelityReport({}, pairs, [], {"kl": 0.1}, {"ratio": 6.5}, merged, codes)
    assert report.cheapest(count) == found
    named = "" if found is None else f"MiniCache(start_layer={found[0]}, end_layer={found[1]})"
    assert named in report.advice()
    assert ("MiniCache" in report.advice()) == (found is not None)


def test_a_report_measured_here_decides(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fidelity_report(model, ids(), merge=MiniCache(start_layer=0), **SHORT)
    assert "force" not in str(report)
    with pytest.raises(memeff_compile.UnsupportedInputError, match="mean cosine"):
        merged(model, fidelity=report, align="none")
    means = [m for line in report.pairs[::2] for m in line["aligned"].values()]
    assert min(means) >= 0.5, "few tokens: maps are fitted on them"
    assert merged(model, fidelity=report).merged()


def test_a_cache_with_a_report_begins_with_its_maps_also_after_a_reset(model: Any) -> None:
    report = fidelity_report(model, [ids(), ids(40)], merge=None, **SHORT)
    assert sorted(report.maps) == [(0, 1), (1, 2), (2, 3)]
    assert "maps" not in json.loads(report.to_json())
    cache = merged(model, fidelity=report, force=True)
    first = cache.layers[0]
    with torch.no_grad():
        model(input_ids=ids(30), past_key_values=cache)
        fitted = first.pair.turns.clone()
        cache.reset()
    turns, slots = report.maps[0, 1]
    eye = torch.eye(16).expand_as(turns)
    torch.testing.assert_close(turns @ turns.mT, eye, rtol=0, atol=1e-4)
    assert torch.equal(first.pair.turns, turns.expand(2, -1, -1, -1, -1))
    assert torch.equal(first.pair.slots, slots.expand(2, -1).to(torch.int32))
    assert not torch.equal(fitted, first.pair.turns)


def test_a_report_of_another_model_is_refused(model: Any) -> None:
    report = fidelity_report(model, ids(), merge=None, **SHORT)
    report.maps[0, 1] = (torch.zeros(3, 2, 16, 16), torch.zeros(3))
    cache = merged(model, fidelity=report, force=True)
    with torch.no_grad(), pytest.raises(memeff_compile.UnsupportedInputError, match="another"):
        model(input_ids=ids(), past_key_values=cache)
