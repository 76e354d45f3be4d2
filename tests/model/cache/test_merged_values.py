"""KVCache with layers that share values alone: eager's numbers, the backend, generate(), batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import memeff_compile
from memeff_compile import KVCache, MiniCache
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import (
    Layout,
    bytes_after,
    map_bytes,
    value_pair_bytes,
)
from memeff_compile.model.cache.merged_values import ValuesLayer
from tests.support import cached_models
from tests.support.cached_models import logits, prompt
from tests.support.merged_decoding import assert_compiled_steps_equal_eager

LAYERS = 3
LENGTH = 96
SHARED = MiniCache(start_layer=1, values_only=True, force=True)
SETTINGS: dict[str, Any] = {"bits": 3, "value_bits": 2, "group": 32, "recent": 16}
MERGED: dict[str, Any] = {**SETTINGS, "merge": SHARED}


def make(**settings: Any) -> Any:
    return cached_models.make("Llama", **{"num_hidden_layers": LAYERS, **settings})


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


def cache_of(model: Any, **settings: Any) -> Any:
    return KVCache(model.config, LENGTH, **{**MERGED, **settings})


def fill(model: Any, cache: Any, tokens: int = 60, batch: int = 2) -> Any:
    with torch.no_grad():
        model(input_ids=prompt(batch, tokens), past_key_values=cache)
    return cache


def dense(cache: Any) -> list[Tensor]:
    return [part for layer in cache.layers for part in layer._view()]


def maps_of(cache: Any) -> list[Tensor]:
    return [x.clone() for x in cache.layers[1].pair.maps()]


# --- numbers --------------------------------------------------------------------------------------


def test_keys_are_those_of_an_unmerged_cache_and_values_nearly_so(model: Any) -> None:
    exact = fill(model, DynamicCache(config=model.config))
    apart = fill(model, KVCache(model.config, LENGTH, **SETTINGS))
    cache = fill(model, cache_of(model, value_bits=8))
    assert [type(layer).__name__ for layer in cache.layers] == ["CodedLayer", *["ValuesLayer"] * 2]
    for place in (1, 2):
        (keys, values), (other, _) = cache.layers[place]._view(), apart.layers[place]._view()
        came = exact.layers[place].values
        assert torch.equal(keys, other)
        exact_rows = [0, 1, 2, 3, *range(32, 60)]
        assert torch.equal(values[:, :, exact_rows], came[:, :, exact_rows])
        assert not torch.equal(values[:, :, 4:32], came[:, :, 4:32])
        spread = (came - came.mean(2, keepdim=True)).norm()
        assert float((values[:, :, :60] - came).norm() / spread) < 0.9


def test_less_is_lost_than_with_keys_merged_too(model: Any) -> None:
    ids = prompt(tokens=75)
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 70)

    def error(bits: int, merge: MiniCache | None) -> float:
        cache = KVCache(model.config, LENGTH, bits, group=32, recent=16, merge=merge)
        found = logits(model, model, cache, ids, 70)
        return float((found - expected).norm() / expected.norm())

    both = MiniCache(start_layer=1, gamma=0.0, retained=0.0, force=True)
    assert 0 < error(4, None) < error(4, SHARED) < error(4, both)


def test_bits_of_values_apart_from_those_of_keys(model: Any) -> None:
    """Keys of one cache and values of the other, to the bit."""
    found = fill(model, KVCache(model.config, LENGTH, **SETTINGS))
    three, two = (
        fill(model, KVCache(model.config, LENGTH, bits, group=32, recent=16)) for bits in (3, 2)
    )
    for mine, of_keys, of_values in zip(found.layers, three.layers, two.layers, strict=True):
        keys, values = mine._view()
        assert torch.equal(keys, of_keys._view()[0])
        assert torch.equal(values, of_values._view()[1])
    assert "bits=3, value_bits=2" in repr(found)
    layout = Layout(16, 3, group=32, recent=16, value_bits=2)
    places = 2 * 2 * 4 * 4  # of first tokens, stored once
    each = bytes_after(layout, 2, 2, LENGTH, 4) - places
    assert found.nbytes == LAYERS * each + places


def test_tokens_in_pieces_are_kept_as_tokens_one_by_one(model: Any) -> None:
    """Both leave one cache, but for the codes that later tokens were computed from."""
    ids = prompt(tokens=90)
    caches = [cache_of(model, bits=8, value_bits=8) for _ in range(2)]
    for cache, ends in zip(caches, ((40, 75, 76, 90), (40, *range(41, 91))), strict=True):
        with torch.no_grad():
            for start, end in zip((0, *ends), ends, strict=False):
                model(input_ids=ids[:, start:end], past_key_values=cache)
        assert [line["merged"] for line in cache.merged()] == [64]
    assert all(map(torch.equal, *map(maps_of, caches)))
    for found, other in zip(*map(dense, caches), strict=True):
        assert float((found - other).norm() / other.norm()) < 0.02


def test_compiled_decoding_reads_the_shared_store_and_equals_eager(model: Any) -> None:
    assert_compiled_steps_equal_eager(model, lambda: cache_of(model))
    report = memeff_compile.last_report()
    fired = [r.action for r in report.records if r.pass_name == "compress_kv_cache"]
    assert fired == ["rewrote"] * LAYERS
    said = " ".join(report.details().split())
    assert "aligned directions of values two layers share, in codes of 3 bits, values of 2" in said
    assert "coded_kv_cache_view(" not in memeff_compile.graphs()[-1].after


# --- generate(), batches --------------------------------------------------------------------------


def test_generate_takes_it_by_name_with_left_padding(model: Any) -> None:
    """Padding changes no token: of a padded batch, each row is what it is alone."""
    ids, seen = prompt(2, 40), torch.ones(2, 40, dtype=torch.long)
    ids[0, :4], seen[0, :4] = 0, 0
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    given["return_dict_in_generate"] = given["output_logits"] = True
    how = {**MERGED, "max_cache_len": LENGTH}
    with memeff_compile.use_kv_cache_(model, **how):
        both = model.generate(input_ids=ids, attention_mask=seen, **given)
        alone = model.generate(input_ids=ids[1:], **given)
    assert sum(isinstance(layer, ValuesLayer) for layer in both.past_key_values.layers) == 2
    assert torch.equal(both.sequences[1:], alone.sequences)
    for a, b in zip(both.logits, alone.logits, strict=True):
        torch.testing.assert_close(a[1:], b, rtol=1e-3, atol=1e-4)
    mean = both.past_key_values.layers[1].pair.lower_means[0]
    came = fill_padded(model, ids, seen)
    torch.testing.assert_close(mean[:, 0], came[0, :, 8:].mean(1), rtol=1e-4, atol=1e-5)


def fill_padded(model: Any, ids: Tensor, seen: Tensor) -> Tensor:
    """Return the values of layer 1 for a padded prompt."""
    cache = DynamicCache(config=model.config)
    position = (seen.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        model(ids, attention_mask=seen, position_ids=position, past_key_values=cache)
    values: Tensor = cache.layers[1].values
    return values


@pytest.mark.slow
def test_a_compiled_model_generates_with_it() -> None:
    model = make()
    ids = prompt(2, 40)
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, past_key_values=cache_of(model), **given)
    compiled = memeff_compile.compile(
        model,
        kv_cache={**MERGED, "max_cache_len": LENGTH},
        options={"memeff.inner": "eager"},
        fullgraph=False,
    )
    assert torch.equal(compiled.generate(ids, **given), expected)


def test_sequences_are_reordered_repeated_and_selected(model: Any) -> None:
    cache = fill(model, cache_of(model), batch=3)
    before = [t.clone() for t in dense(cache)]
    held = [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert held == [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    for found, old in zip(dense(cache), before, strict=True):
        assert torch.equal(found, old[[2, 0, 0]])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    for found, old in zip(dense(cache), before, strict=True):
        assert torch.equal(found, old[[2, 0]])
    with torch.no_grad():
        model(input_ids=prompt(2, 1), past_key_values=cache)
    assert int(cache.get_seq_length()) == 61


def test_a_reset_or_a_crop_of_all_tokens_forgets_the_maps(model: Any) -> None:
    ids = prompt(tokens=70)
    cache = cache_of(model)
    expected = logits(model, model, cache, ids, 60)
    first = maps_of(cache)
    turns = first[2]
    eye = torch.eye(16).expand_as(turns)
    assert turns.shape == (2, 2, 1, 16, 16)
    assert float((turns - eye).abs().max()) > 0.1
    torch.testing.assert_close(turns @ turns.mT, eye, rtol=0, atol=1e-5)
    cache.reset()
    assert torch.equal(maps_of(cache)[2], eye)
    assert torch.equal(logits(model, model, cache, ids, 60), expected)
    assert all(map(torch.equal, maps_of(cache), first))
    cache.crop(-3)
    with pytest.raises(UnsupportedInputError, match="are not yet in codes"):
        cache.crop(-60)
    short = cache_of(model)
    fill(model, short, 30)
    short.crop(-30)
    assert torch.equal(maps_of(short)[2], eye)


def test_a_chunk_that_ended_between_two_layers_is_noticed(model: Any) -> None:
    cache = fill(model, cache_of(model))
    new = torch.randn(2, 2, 10, 16)
    cache.layers[1].update(new, new)
    with pytest.raises(UnsupportedInputError, match="between layers 1 and 2"):
        fill(model, cache, 10)
    cache.reset()
    fill(model, cache)


# --- memory, reports, refusals --------------------------------------------------------------------


def test_bytes_are_those_of_the_formula(model: Any) -> None:
    cache = fill(model, cache_of(model))
    layout = Layout(16, 3, group=32, recent=16, value_bits=2)
    expected = bytes_after(layout, 2, 2, LENGTH, 4) + value_pair_bytes(layout, 2, 2, LENGTH, 4)
    assert cache.nbytes == expected + map_bytes(layout, 2, 2, 4, 1)


@pytest.mark.parametrize("depth", [128, 64])
def test_keys_of_three_bits_take_no_more_than_a_cache_of_two(depth: int) -> None:
    """32,768 tokens, all layers merged; lengths weigh more where rows are short."""
    layout, plain = Layout(depth, 3, value_bits=2), Layout(depth, 2)
    sizes = (1, 8, 32768, 2)
    merged = value_pair_bytes(layout, *sizes) + map_bytes(layout, 1, 8, 2, 1)
    two = 2 * bytes_after(plain, *sizes)
    assert merged / two < (0.99 if depth == 128 else 1.01)


@pytest.mark.parametrize("depth", [128, 64])
def test_groups_of_128_leave_a_quarter_of_the_layers_apart_in_the_same_memory(depth: int) -> None:
    layout, plain = Layout(depth, 3, group=128, value_bits=2), Layout(depth, 2)
    sizes = (1, 8, 32768, 2)
    pairs, apart = 12, 8  # of 32 layers
    merged = value_pair_bytes(layout, *sizes) + map_bytes(layout, 1, 8, 2, 1)
    total = pairs * merged + apart * bytes_after(layout, *sizes)
    assert total < (2 * pairs + apart) * bytes_after(plain, *sizes)


def test_a_report_judges_the_values_alone(model: Any) -> None:
    merge = MiniCache(start_layer=1, values_only=True)
    report = memeff_compile.fidelity_report(model, prompt(2, 90), merge=merge, steps=8, **SETTINGS)
    assert [line["merged"] for line in report.merged] == [64]
    assert {tuple(sorted(each)) for each in report.codes} >= {("bits", "kl", "ratio")}
    assert "values_only" in str(report)
    pair = next(pair for pair in report.pairs if pair["layers"] == [1, 2])
    pair["aligned"]["keys"] = 0.0  # nothing that this cache merges
    pair["aligned"]["values"] = 0.9
    known = MiniCache(start_layer=1, values_only=True, fidelity=report)
    cache = cache_of(model, merge=known)
    with torch.no_grad():
        model(input_ids=prompt(2, 1), past_key_values=cache)
    turns, slots = report.maps[1, 2]
    pair_held = cache.layers[1].pair
    torch.testing.assert_close(pair_held.turns[:, :, 0], turns[:, 1].expand(2, -1, -1, -1))
    assert torch.equal(pair_held.slots[0], slots.int())
    pair["aligned"]["values"] = 0.1
    with pytest.raises(UnsupportedInputError, match="the aligned values of layers 1-2"):
        cache_of(model, merge=known)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bits": 16, "value_bits": None}, "values alone are merged in codes"),
        ({"bits": 16, "merge": None}, "both are one of 8, 4, 3, 2"),
        ({"value_bits": 5}, "both are one of 8, 4, 3, 2"),
        ({"merge": "minicache"}, "give both the same, or merge values alone"),
        ({"scheme": "per_head"}, "merge goes with scheme='kivi'"),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused(
    model: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedInputError, match=words):
        cache_of(model, **given)


def test_values_alone_are_aligned() -> None:
    with pytest.raises(UnsupportedInputError, match="values alone are merged aligned"):
        MiniCache(values_only=True, align="none")
    with pytest.raises(UnsupportedInputError, match="True or False is needed"):
        MiniCache(values_only=1)  # type: ignore[arg-type]
