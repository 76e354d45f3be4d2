"""KVCache that merges layers of a model with windows: pairs are further apart, as in Gemma 3."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import memeff_compile
from memeff_compile import KVCache, MiniCache, fidelity_report
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.model.cache.fidelity import FidelityReport
from memeff_compile.model.cache.minicache import pairs_of
from memeff_compile.model.cache.rotary import angles_of
from tests.support import cached_models
from tests.support.cached_models import logits, prompt

TYPES = ["sliding_attention", "full_attention"] * 3
LENGTH = 96
SHORT: dict[str, Any] = {"group": 32, "recent": 16}
FORCED: dict[str, Any] = {"start_layer": 2, "force": True}
MERGES = {
    "aligned": MiniCache(retained=0.05, **FORCED),
    "unaligned": MiniCache(retained=0.05, align="none", **FORCED),
    "values": MiniCache(values_only=True, **FORCED),
}
WINDOW = 8
FAR = (3, 5)


def make(types: list[str] = TYPES, **settings: Any) -> Any:
    """Build a small Gemma 3 with layers 1, 3 and 5 that attend to all tokens."""
    given = {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": types}
    return cached_models.make("Gemma3Text", num_hidden_layers=len(types), **(given | settings))


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


def cache_of(model: Any, merge: MiniCache, bits: int = 4, length: int = LENGTH) -> Any:
    return KVCache(model.config, length, bits, merge=merge, **SHORT)


def fill(model: Any, cache: Any, tokens: int = 60) -> Any:
    with torch.no_grad():
        model(input_ids=prompt(2, tokens), past_key_values=cache)
    return cache


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "start", "end", "pairs"),
    [
        ([None, 1, None, 1, None, 1], 0, None, [(1, 3)]),
        ([None, 1, None, 1, None, 1], 2, None, [(3, 5)]),
        ([None, 1, None, 1, None, 1], 0, 3, []),
        ([1, None, 1, 1, 1], 0, None, [(0, 2), (3, 4)]),
        ([1, None, 0, 0, 1], 0, None, [(2, 3)]),
        ([1, 1, 0, 0, 1], 1, None, [(2, 3)]),
        ([1] * 6, 1, 5, [(1, 2), (3, 4)]),
    ],
)
def test_pairs_follow_each_other_among_the_layers_that_attend_to_all_tokens(
    kinds: list[int | None], start: int, end: int | None, pairs: list[tuple[int, int]]
) -> None:
    assert pairs_of(kinds, start, end) == pairs


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_windows_between_the_layers_of_a_pair_stay_exact(model: Any, merge: MiniCache) -> None:
    """Rows of the other layers are those of the same cache without merging, bit by bit."""
    cache, apart = (
        fill(model, each)
        for each in (cache_of(model, merge), KVCache(model.config, LENGTH, 4, **SHORT))
    )
    name = "ValuesLayer" if merge.values_only else "MergedLayer"
    wanted = ["WindowLayer", "CodedLayer", "WindowLayer", name, "WindowLayer", name]
    assert [type(layer).__name__ for layer in cache.layers] == wanted
    assert [line["layers"] for line in cache.merged()] == [FAR]
    assert [line["merged"] for line in cache.merged()] == [32]
    for place in (0, 2, 4):
        for kind in ("keys", "values"):
            ours, theirs = (getattr(each.layers[place], kind) for each in (cache, apart))
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(cache.layers[1]._view(), apart.layers[1]._view(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_a_pair_stores_the_bits_that_two_neighbours_with_its_keys_would(
    model: Any, merge: MiniCache
) -> None:
    """A prompt, and tokens one by one, given to a cache of two layers without windows."""
    cache = cache_of(model, merge)
    ids = prompt(2, 75)
    given: list[list[tuple[Tensor, Tensor]]] = []
    update = KVCache.update

    def recorded(self: Any, keys: Tensor, values: Tensor, place: int, *args: Any) -> Any:
        if place in FAR:
            given.append([(keys.clone(), values.clone())])
        return update(self, keys, values, place, *args)

    with mock.patch.object(KVCache, "update", recorded):
        logits(model, model, cache, ids, 60)
    rope = model.config.rope_parameters["full_attention"]
    config = cached_models.make("Llama", rope_parameters=rope).config
    near: Any = KVCache(
        config, LENGTH, 4, merge=MiniCache(**{**vars(merge), "start_layer": 0}), **SHORT
    )
    for number, ((keys, values),) in enumerate(given):
        with torch.no_grad():
            near.update(keys, values, number % 2)
    for place, far in enumerate(FAR):
        views = cache.layers[far]._view(), near.layers[place]._view()
        for ours, theirs in zip(*views, strict=True):
            assert torch.equal(ours[:, :, :75], theirs[:, :, :75])
    assert [line["merged"] for line in cache.merged()] == [32]


def test_a_cache_that_keeps_every_row_equals_a_static_cache(model: Any) -> None:
    merge = MiniCache(gamma=1.0, retained=1.0, **FORCED)
    ids = prompt(2, 75)
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 60)
    found = logits(model, model, cache_of(model, merge, 16), ids, 60)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("types", [TYPES, ["full_attention", *["sliding_attention"] * 3]])
def test_bytes_are_those_that_explain_cache_computes(types: list[str]) -> None:
    model = make(types * (8 // len(types)))
    merge = MiniCache(start_layer=0, force=True)
    (mode,) = (
        each
        for each in memeff_compile.explain_cache(
            model, memory="1GB", batch=2, length=256, merge=merge, **SHORT
        ).modes
        if each.bits == 4
    )
    cache = fill(model, cache_of(model, merge, length=256))
    windows = sum(layer.nbytes for layer in cache.windows())
    bounded = sum(min(layer.max_cache_len, 256) for layer in cache.windows())
    assert windows == 2 * 2 * 2 * 16 * 4 * bounded
    assert [line["layers"] for line in cache.merged()] == [(0, 4)] if len(types) == 4 else [(1, 3)]
    assert cache.nbytes == mode.total


def test_the_angles_are_those_of_the_layers_that_attend_to_all_tokens() -> None:
    """Gemma 3's larger models scale the angles of these layers alone."""
    scaled = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    for model in (make(), make(rope_parameters=scaled)):
        found = angles_of(model.config, 16)
        assert found is not None
        torch.testing.assert_close(found, model.model.rotary_emb.full_attention_inv_freq)


def test_keys_of_layers_further_apart_merge_only_with_a_report_or_by_force(model: Any) -> None:
    words = r"between the layers 3-5, .*perplexity by 70 %.*values_only=True.*force=True"
    for merge in ("minicache", MiniCache(start_layer=2)):
        with pytest.raises(UnsupportedInputError, match=words):
            KVCache(model.config, LENGTH, 4, merge=merge, **SHORT)
    with pytest.warns(UserWarning, match="values merged from half on cost up to 3 %"):
        cache_of(model, MiniCache(start_layer=2, values_only=True))
    means = {"keys": 0.9, "values": 0.9}
    found = {"layers": list(FAR), "keys": {"mean": 0.1}, "values": {"mean": 0.1}, "aligned": means}
    report = FidelityReport({}, [found], [], {}, {}, [])
    assert cache_of(model, MiniCache(start_layer=2, fidelity=report)).merged()


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_generate_with_compiled_steps_gives_the_tokens_of_eager_ones(
    model: Any, merge: MiniCache
) -> None:
    """Windows fill and move between the write of a lower layer and the merge of its upper layer."""
    ids, mask = prompt(2, 40), torch.ones(2, 40, dtype=torch.long)
    ids[0, :4], mask[0, :4] = 0, 0
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    settings = {**SHORT, "merge": merge}
    cache = KVCache(model.config, LENGTH, 4, attention_mask=mask, **settings)
    expected = model.generate(ids, past_key_values=cache, **given)
    how = {"bits": 4, "max_cache_len": LENGTH, **settings}
    compiled = memeff_compile.compile(make(), kv_cache=how, inner="eager")
    for _ in range(2):
        found = compiled.generate(ids, return_dict_in_generate=True, **given)
        assert torch.equal(found.sequences, expected)
        assert [line["merged"] for line in found.past_key_values.merged()] == [32]
    assert "coded_kv_cache_view(" not in memeff_compile.graphs()[-1].after


def test_beams_equal_those_of_a_dynamic_cache(model: Any) -> None:
    given: dict[str, Any] = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    ids = prompt(2, 40)
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **given)
    cache = cache_of(model, MiniCache(gamma=1.0, retained=1.0, **FORCED), 16)
    assert torch.equal(model.generate(ids, past_key_values=cache, **given), expected)


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_cropped_tokens_can_be_written_again(merge: MiniCache) -> None:
    """Windows as long as the cache keep all tokens, so all layers can remove the last ones."""
    model = make(sliding_window=LENGTH)
    ids = prompt(2, 70)
    expected = logits(model, model, cache_of(model, merge), ids, 60)
    cache = cache_of(model, merge)
    logits(model, model, cache, ids[:, :66], 60)
    cache.crop(-6)
    with torch.no_grad():
        found = [
            model(input_ids=ids[:, t : t + 1], past_key_values=cache).logits for t in range(60, 70)
        ]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    cache.reset()
    again = logits(model, model, cache, ids, 60)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [4, 5])
def test_a_pass_that_ended_between_the_layers_of_a_pair_is_noticed(place: int) -> None:
    """The layer with a window between them may have its tokens already."""
    model = make()
    cache = cache_of(model, MERGES["aligned"])
    layer = model.model.layers[place]
    fails = mock.patch.object(layer, "forward", side_effect=RuntimeError("out of memory"))
    with fails, pytest.raises(RuntimeError, match="out of memory"):
        fill(model, cache, 30)
    with pytest.raises(UnsupportedInputError, match="between layers 3 and 5, which are merged"):
        fill(model, cache, 30)
    cache.reset()
    wanted = fill(model, cache_of(model, MERGES["aligned"]))
    fill(model, cache)
    for far in FAR:
        for ours, theirs in zip(cache.layers[far]._view(), wanted.layers[far]._view(), strict=True):
            assert torch.equal(ours, theirs)


def test_sequences_are_repeated_and_selected(model: Any) -> None:
    cache = fill(model, cache_of(model, MERGES["aligned"]))
    before = [part.clone() for far in FAR for part in cache.layers[far]._view()]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    after = [part for far in FAR for part in cache.layers[far]._view()]
    assert all(torch.equal(a.flip(0), b) for a, b in zip(before, after, strict=True))


# --- reports --------------------------------------------------------------------------------------


def test_a_report_judges_the_pairs_that_a_cache_would_merge(model: Any) -> None:
    merge = MiniCache(start_layer=0, values_only=True)
    given: dict[str, Any] = {"steps": 8, **SHORT}
    report = fidelity_report(model, prompt(2, 70), merge=merge, each_pair=True, **given)
    pairs = {tuple(pair["layers"]): pair for pair in report.pairs}
    assert [pair for pair, found in pairs.items() if not found["has_window"]] == [(1, 3), FAR]
    assert [pair for pair, found in pairs.items() if "kl" in found] == [(1, 3), FAR]
    assert all(pair in report.maps for pair in pairs)
    single = MiniCache(start_layer=3, end_layer=6, values_only=True)
    alone = fidelity_report(model, prompt(2, 70), merge=single, **given)
    assert pairs[FAR]["kl"] == pytest.approx(alone.logits["kl"])
    best = min(((1, 3), FAR), key=lambda pair: pairs[pair]["kl"])
    assert report.cheapest(1) == (best[0], best[1] + 1)
    assert report.cheapest(2) is None
    assert "3-5 " in str(report)
    measured = MiniCache(start_layer=2, values_only=True, fidelity=report)
    if pairs[FAR]["aligned"]["values"] >= 0.5:
        assert [line["layers"] for line in cache_of(model, measured).merged()] == [FAR]
    else:
        with pytest.raises(UnsupportedInputError, match="values of layers 3-5, which are merged"):
            cache_of(model, measured)


@pytest.mark.parametrize(
    ("types", "settings", "words"),
    [
        (TYPES[:2], {}, "no two consecutive layers, of those that attend to all tokens"),
        (TYPES, {"start_layer": 4}, r"no two layers from layer 4 on.*are 3 layers \(1, 3, 5\)"),
        (TYPES, {"start_layer": 1, "end_layer": 3}, "from layer 1 on and before layer 3"),
    ],
)
def test_a_model_or_a_range_with_no_two_such_layers_is_refused(
    types: list[str], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedInputError, match=words):
        cache_of(make(types), MiniCache(**settings))
