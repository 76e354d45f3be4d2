"""KVCache with layers that share directions: eager's numbers, the backend, generate(), batches."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

import memeff_compile
from memeff_compile import KVCache, MiniCache
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import (
    Layout,
    alignment,
    bytes_after,
    map_bytes,
    pair_bytes,
)
from memeff_compile.kernels.coded_kv_cache.layout import Maps
from memeff_compile.kernels.device import planned_for
from memeff_compile.model.cache.layers import CodedLayer, ExactLayer
from memeff_compile.model.cache.merged_layers import MergedLayer
from memeff_compile.model.cache.rotary import angles_of
from tests.support import cached_models, merged_caches
from tests.support.cached_models import logits, prompt
from tests.support.merged_caches import aligned_rows
from tests.support.merged_decoding import assert_compiled_steps_equal_eager

LAYERS = 3
LENGTH = 96
SHORT: dict[str, Any] = {"group": 32, "recent": 16}
ALL_KEPT = MiniCache(start_layer=1, gamma=1.0, retained=1.0)
LOSSY = MiniCache(start_layer=1, retained=0.05)
UNALIGNED = MiniCache(start_layer=1, retained=0.05, align="none")


def make(family: str = "Llama", **settings: Any) -> Any:
    return cached_models.make(family, **{"num_hidden_layers": LAYERS, **settings})


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


def fill(model: Any, cache: Any, tokens: int = 60, batch: int = 2) -> Any:
    with torch.no_grad():
        model(input_ids=prompt(batch, tokens), past_key_values=cache)
    return cache


def dense(cache: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, MergedLayer):
            found += layer._view()
        elif isinstance(layer, ExactLayer):
            found += [layer.keys, layer.values]
    return found


def kinds(cache: Any) -> list[str]:
    return [type(layer).__name__ for layer in cache.layers]


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 4])
def test_a_cache_that_keeps_every_row_equals_a_static_cache(model: Any, bits: int) -> None:
    """Kept rows come back bit for bit, so merging without merged rows changes no result."""
    ids = prompt(tokens=90)
    settings: dict[str, Any] = {**SHORT, "merge": ALL_KEPT} if bits == 16 else {"merge": ALL_KEPT}
    cache = KVCache(model.config, LENGTH, bits, **settings)
    assert kinds(cache)[1:] == ["MergedLayer"] * 2
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 60)
    assert torch.equal(logits(model, model, cache, ids, 60), expected)
    if bits == 16:
        assert [line["merged"] for line in cache.merged()] == [64]
        assert [line["kept"] for line in cache.merged()] == [60.0]


@pytest.mark.parametrize("bits", [16, 4])
def test_what_is_restored_has_the_length_of_what_came(model: Any, bits: int) -> None:
    """Lengths are kept whatever the direction; kept rows and recent ones are the same bits."""
    exact = fill(model, DynamicCache(config=model.config))
    cache = fill(model, KVCache(model.config, LENGTH, bits, merge=UNALIGNED, **SHORT))
    for place in (1, 2):
        layer = cache.layers[place]
        for held, came in zip(
            layer._view(), (exact.layers[place].keys, exact.layers[place].values), strict=True
        ):
            found = held[:, :, :60]
            torch.testing.assert_close(
                found[:, :, :32].norm(dim=-1), came[:, :, :32].norm(dim=-1), rtol=1e-5, atol=1e-6
            )
            assert torch.equal(found[:, :, 32:], came[:, :, 32:])
            assert not torch.equal(found[:, :, :32], came[:, :, :32])
            for b in range(2):
                for h in range(2):
                    row = layer.pair.places[b, h]
                    row = row[row >= 0].long()
                    assert row.numel() >= 5, "four first tokens and the most distinct"
                    assert torch.equal(found[b, h, row], came[b, h, row])


def test_less_is_lost_with_more_bits_and_more_rows(model: Any) -> None:
    ids = prompt(tokens=75)
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 70)

    def error(bits: int, merge: MiniCache | None) -> float:
        cache = KVCache(model.config, LENGTH, bits, merge=merge, **SHORT)
        found = logits(model, model, cache, ids, 70)
        return float((found - expected).norm() / expected.norm())

    plain = error(4, None)
    kept = error(16, MiniCache(start_layer=1, gamma=1.0, retained=0.15))
    bare = error(16, MiniCache(start_layer=1, gamma=0.0))
    assert 0 < plain < bare
    assert 0 < kept < bare < 0.5


@pytest.mark.parametrize("bits", [16, 4])
def test_tokens_in_pieces_are_kept_as_tokens_one_by_one(model: Any, bits: int) -> None:
    """The lower layer's tokens wait for the upper's; no token is lost, and windows are the same."""
    merge = MiniCache(start_layer=1, gamma=1.0, retained=1.0)
    ids = prompt(tokens=90)
    caches = [KVCache(model.config, LENGTH, bits, merge=merge, **SHORT) for _ in range(2)]
    with torch.no_grad():
        for start, end in ((0, 40), (40, 75), (75, 76), (76, 90)):
            out = model(input_ids=ids[:, start:end], past_key_values=caches[0])
    expected = logits(model, model, caches[1], ids, 40)[:, -14:]
    torch.testing.assert_close(out.logits, expected, rtol=1e-3, atol=5e-3 if bits == 4 else 1e-5)
    for found, other in zip(dense(caches[0]), dense(caches[1]), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-2, atol=1e-2 if bits == 4 else 1e-5)


@pytest.mark.parametrize("bits", [pytest.param(16, marks=pytest.mark.slow), 4])
def test_compiled_decoding_reads_the_shared_store_and_equals_eager(model: Any, bits: int) -> None:
    """One graph for two caches and the steps at which groups are merged; no dense view."""
    settings: dict[str, Any] = {**SHORT, "merge": LOSSY}
    assert_compiled_steps_equal_eager(
        model, lambda: KVCache(model.config, LENGTH, bits, **settings)
    )
    records = memeff_compile.last_report().records
    fired = [r for r in records if r.pass_name == "compress_kv_cache"]
    assert [r.action for r in fired] == ["rewrote"] * (2 if bits == 16 else LAYERS)
    said = " ".join(memeff_compile.last_report().details().split())
    assert "aligned directions two layers share" in said
    assert "Merging layers saves memory, not time" in said
    assert "coded_kv_cache_view(" not in memeff_compile.graphs()[-1].after


@pytest.mark.parametrize(("bits", "dtype"), [(3, "float16"), (3, "bfloat16")])
def test_a_gpu_reads_merged_layers_of_few_bits_in_bfloat16_alone(bits: int, dtype: str) -> None:
    model = make(head_dim=64).to(getattr(torch, dtype))
    cache = fill(model, KVCache(model.config, LENGTH, bits, merge=LOSSY, **SHORT))
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    with torch.no_grad(), planned_for(torch.device("cuda", 0)):
        compiled(input_ids=prompt(2, 1), past_key_values=cache)
    records = memeff_compile.last_report().records
    found = [r for r in records if r.pass_name == "compress_kv_cache"]
    is_served = (bits, dtype) != (3, "float16")
    assert [r.action for r in found] == ["rewrote" if is_served else "declined"] * LAYERS
    if not is_served:
        assert all("3 bits serve float16; there 4 and 8 bits" in str(r) for r in found)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_two_hundred_steps_recompile_nothing_and_write_in_place(model: Any, inner: str) -> None:
    options = {"memeff.inner": inner} if inner != "inductor" else {}
    compiled = torch.compile(model, backend="memeff", options=options, fullgraph=True)
    ids = prompt(tokens=240)
    settings: dict[str, Any] = {**SHORT, "merge": LOSSY}
    expected = logits(model, model, KVCache(model.config, 256, 4, **settings), ids, 40)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = logits(model, compiled, KVCache(model.config, 256, 4, **settings), ids, 40)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- generate(), batches --------------------------------------------------------------------------


def padded(batch: int = 2, tokens: int = 40) -> dict[str, Tensor]:
    ids, seen = prompt(batch, tokens), torch.ones(batch, tokens, dtype=torch.long)
    ids[0, :4], seen[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": seen}


def test_generate_with_left_padding_gives_the_same_tokens(model: Any) -> None:
    """Every row is kept, so that greedy tokens are those of the model's own cache."""
    given = padded()
    expected = model.generate(**given, max_new_tokens=30, do_sample=False)
    cache = KVCache(
        model.config, 80, 16, attention_mask=given["attention_mask"], merge=ALL_KEPT, **SHORT
    )
    settings = CompileConfig(
        backend="memeff", options={"memeff.inner": "eager"}, mode=None, fullgraph=True
    )
    settings._compile_all_devices = True
    found = model.generate(
        **given, max_new_tokens=30, do_sample=False, past_key_values=cache, compile_config=settings
    )
    assert torch.equal(found, expected)
    assert cache.layers[1].pair.places[:, 0, :4].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_padding_has_no_say_in_what_is_kept(model: Any) -> None:
    given = padded(tokens=56)
    merge = MiniCache(start_layer=1, gamma=0.5, retained=0.05)
    settings: dict[str, Any] = {"merge": merge, **SHORT}
    cache = KVCache(model.config, LENGTH, 4, attention_mask=given["attention_mask"], **settings)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    places = cache.layers[1].pair.places[0]
    assert bool((places >= 4).sum() > 8)
    assert not bool(((places >= 0) & (places < 4)).any())


def test_beams_equal_those_of_a_dynamic_cache(model: Any) -> None:
    given: dict[str, Any] = {**padded(), "max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    expected = model.generate(**given, past_key_values=DynamicCache(config=model.config))
    cache = KVCache(model.config, LENGTH, 16, merge=ALL_KEPT, **SHORT)
    assert torch.equal(model.generate(**given, past_key_values=cache), expected)


def test_every_later_generate_merges_until_undone(model: Any) -> None:
    given: dict[str, Any] = {**padded(), "max_new_tokens": 4, "do_sample": False}
    with memeff_compile.use_kv_cache_(model, bits=4, merge="minicache"):  # type: ignore[attr-defined]
        found = model.generate(**given, return_dict_in_generate=True).past_key_values
    assert kinds(found) == ["CodedLayer", "MergedLayer", "MergedLayer"]
    assert "2 of them share directions" in repr(found)


@pytest.mark.slow
def test_a_compiled_model_generates_with_a_cache_that_merges() -> None:
    """The request names bits and merging; the tokens are those of the same cache without it."""
    model = make()
    ids = prompt(2, 40)
    settings: dict[str, Any] = {**SHORT, "merge": LOSSY}
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    cache = KVCache(model.config, LENGTH, 3, **settings)
    expected = model.generate(ids, past_key_values=cache, **given)
    how = {"bits": 3, "max_cache_len": LENGTH, **settings}
    compiled = memeff_compile.compile(
        model, kv_cache=how, options={"memeff.inner": "eager"}, fullgraph=False
    )
    found = compiled.generate(ids, return_dict_in_generate=True, **given)
    assert kinds(found.past_key_values) == ["CodedLayer", "MergedLayer", "MergedLayer"]
    assert torch.equal(found.sequences, expected)
    assert [line["merged"] for line in found.past_key_values.merged()] == [32]


def test_a_second_prompt_in_a_cache_goes_through_the_maps_of_the_first(model: Any) -> None:
    """A conversation: prompt, answer, prompt, answer. Both ways of giving it leave one cache."""
    ids = prompt(2, 90)
    caches = []
    for ends in ((40, 44, 84, 90), (40, 41, 42, 43, 44, 90)):
        cache = KVCache(model.config, LENGTH, 4, merge=LOSSY, **SHORT)
        with torch.no_grad():
            for start, end in zip((0, *ends), ends, strict=False):
                model(input_ids=ids[:, start:end], past_key_values=cache)
        caches.append(cache)
    first, second = caches
    assert [line["merged"] for line in first.merged()] == [64]
    for mine, theirs in zip(maps_of(first), maps_of(second), strict=True):
        assert torch.equal(mine, theirs)
    off = [
        float((a - b).norm() / b.norm()) for a, b in zip(dense(first), dense(second), strict=True)
    ]
    assert max(off) < 0.05, off


@pytest.mark.parametrize("bits", [16, 4])
def test_reordering_is_in_place_and_twice_is_the_product(model: Any, bits: int) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, bits, merge=LOSSY, **SHORT), batch=3)
    before = [t.clone() for t in dense(cache)]
    held = [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    assert held == [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    for found, old in zip(dense(cache), before, strict=True):
        assert torch.equal(found, old[[0, 2, 0]])


def test_sequences_are_repeated_and_selected(model: Any) -> None:
    mask = torch.ones(2, 60)
    mask[0, :3] = 0
    cache = KVCache(model.config, LENGTH, 4, attention_mask=mask, merge=LOSSY, **SHORT)
    before = [t.clone() for t in dense(fill(model, cache))]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    for found, old in zip(dense(cache), before, strict=True):
        assert torch.equal(found, old)
    cache.batch_select_indices(torch.tensor([1]))
    with torch.no_grad():
        model(input_ids=prompt(1, 1), past_key_values=cache)
    assert int(cache.get_seq_length()) == 61


def test_cropped_tokens_are_written_anew_and_merged_ones_refused(model: Any) -> None:
    ids = prompt(tokens=70)
    settings: dict[str, Any] = {"merge": LOSSY, **SHORT}
    expected = logits(model, model, KVCache(model.config, LENGTH, 4, **settings), ids, 60)
    cache = KVCache(model.config, LENGTH, 4, **settings)
    logits(model, model, cache, torch.cat([ids[:, :60], ids[:, :3] * 0 + 3], 1), 60)
    cache.crop(-3)
    with torch.no_grad():
        parts = [
            model(input_ids=ids[:, t : t + 1], past_key_values=cache).logits for t in range(60, 70)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedInputError, match="are not yet in codes"):
        cache.crop(-60)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_reset_cache_is_as_good_as_new(model: Any, bits: int) -> None:
    ids = prompt(tokens=70)
    cache = KVCache(model.config, LENGTH, bits, merge=LOSSY, **SHORT)
    expected = logits(model, model, cache, ids, 60)
    held = [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, model, cache, ids, 60), expected)
    assert held == [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]


def maps_of(cache: Any) -> list[Tensor]:
    return [x.clone() for x in cache.layers[1].pair.maps()]


def test_maps_are_fitted_on_the_first_tokens_of_an_empty_cache(model: Any) -> None:
    """Later prompts are merged with these maps; a crop of all tokens, or a reset, forgets them."""
    ids = prompt(tokens=90)
    cache = KVCache(model.config, LENGTH, 16, merge=LOSSY, **SHORT)

    def put(start: int, end: int) -> list[Tensor]:
        with torch.no_grad():
            model(input_ids=ids[:, start:end], past_key_values=cache)
        return maps_of(cache)

    first = put(0, 30)
    turns, slots = first[2], first[3]
    eye = torch.eye(16).expand_as(turns)
    assert float((turns - eye).abs().max()) > 0.1
    torch.testing.assert_close(turns @ turns.mT, eye, rtol=0, atol=1e-5)
    assert slots.sort(1).values.tolist() == [[0, 1]] * 2
    assert all(map(torch.equal, put(30, 70), first))
    assert [line["merged"] for line in cache.merged()] == [32]
    cache.reset()
    assert torch.equal(maps_of(cache)[2], eye)
    second = put(20, 50)
    assert not torch.equal(second[2], first[2])
    cache.crop(-30)
    assert all(map(torch.equal, put(0, 30), first))


@pytest.mark.parametrize(
    ("family", "is_known"), [("Llama", True), ("Qwen2", True), ("Cohere", False), ("Phi", False)]
)
def test_angles_of_keys_are_known_where_halves_of_their_channels_turn(
    family: str, is_known: bool
) -> None:
    model = make(family)
    found = angles_of(model.config, 16)
    assert (found is not None) == is_known
    if found is not None:
        torch.testing.assert_close(found, model.model.rotary_emb.inv_freq)


def test_maps_of_keys_serve_later_positions(model: Any) -> None:
    """The same tokens again, later: the turn and the means that a short prompt gives fit them."""
    rows = aligned_rows(1, 2, 60, 16, torch.float32)
    angles = 0.02 / torch.arange(1.0, 9.0) ** 2

    def at(keys: Tensor, shift: int) -> Tensor:
        a, b = keys.chunk(2, -1)
        turn = angles * (torch.arange(60)[:, None] + shift)
        cosine, sine = turn.cos(), turn.sin()
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    off = []
    for given, span in ((None, 0), (angles, 180)):
        pair = merged_caches.Pair(Layout(16, 4), 1, 2, 300, torch.float32, align=True)
        maps = Maps(*pair.maps)
        counted = torch.ones(1, 60, dtype=torch.bool)
        first, later = (
            [at(x, shift) if n % 2 == 0 else x for n, x in enumerate(rows)] for shift in (0, 160)
        )
        alignment.fit(maps, first, counted, None, given, span)
        found = alignment.aligned(later, maps)
        off.append(float((found[0] / found[0].norm() - found[2] / found[2].norm()).norm()))
    assert off[1] < 0.8 * off[0], off


def test_layers_that_are_not_aligned_have_no_maps_and_take_no_memory_for_them(model: Any) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, 4, merge=UNALIGNED, **SHORT))
    aligned = fill(model, KVCache(model.config, LENGTH, 4, merge=LOSSY, **SHORT))
    assert cache.layers[1].maps() == cache.layers[2].maps() == ()
    assert [len(aligned.layers[at].maps()) for at in (1, 2)] == [1, 3]
    assert aligned.nbytes - cache.nbytes == map_bytes(cache.layers[1].layout, 2, 2, 4)


def test_a_pass_that_ended_between_two_layers_is_noticed(model: Any) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, 4, merge=LOSSY, **SHORT))
    one = torch.zeros(2, 2, 1, 16)
    cache.layers[1].update(one, one)
    with pytest.raises(RuntimeError, match="ended between the two"), torch.no_grad():
        model(input_ids=prompt(2, 1), past_key_values=cache)


def lengths(cache: Any) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]


@pytest.mark.parametrize("start", [0, 60])
@pytest.mark.parametrize("next_tokens", [10, 1])
def test_a_chunk_that_ended_between_two_layers_is_noticed(
    model: Any, start: int, next_tokens: int
) -> None:
    cache = KVCache(model.config, LENGTH, 4, merge=LOSSY, **SHORT)
    ids = prompt(2, 70)
    if start:
        fill(model, cache, start)
    stop = mock.Mock(side_effect=RuntimeError("stop"))
    with (
        mock.patch.object(model.model.layers[2], "forward", stop),
        pytest.raises(RuntimeError, match="stop"),
        torch.no_grad(),
    ):
        model(input_ids=ids[:, start : start + 10], past_key_values=cache)
    words = r"ended between layers 1 and 2.* reset\(\)"
    again = ids[:, start : start + next_tokens]
    with pytest.raises(UnsupportedInputError, match=words), torch.no_grad():
        model(input_ids=again, past_key_values=cache)
    with pytest.raises(UnsupportedInputError, match=words):
        cache.crop(-1)
    cache.reset()
    assert lengths(fill(model, cache)) == [60, 60, 60]


def test_a_crop_that_one_layer_refuses_changes_none(model: Any) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, 16, merge=LOSSY, **SHORT))
    words = "remove 40 tokens, and 28 of 60 are not yet merged.* Layer 1 .* no layer was changed"
    with pytest.raises(UnsupportedInputError, match=words):
        cache.crop(-40)
    assert lengths(cache) == [60, 60, 60]
    cache.crop(-28)
    assert lengths(cache) == [32, 32, 32]


@pytest.mark.parametrize("start_layer", [0, 1])
@pytest.mark.parametrize("mask", [torch.ones(3, 10), torch.ones(2)], ids=["rows", "dimensions"])
def test_a_reset_that_is_refused_changes_nothing(start_layer: int, mask: Tensor) -> None:
    model = make(num_hidden_layers=2 + start_layer)
    merge = MiniCache(start_layer=start_layer)
    settings: dict[str, Any] = {"merge": merge, **SHORT}
    padding = torch.ones(2, 60, dtype=torch.long)
    padding[0, :9] = 0
    cache, other = (
        fill(model, KVCache(model.config, LENGTH, 4, attention_mask=padding, **settings))
        for _ in range(2)
    )
    with pytest.raises(UnsupportedInputError, match="attention_mask has"):
        cache.reset(attention_mask=mask)
    assert set(lengths(cache)) == {60}
    assert all(map(torch.equal, dense(cache), dense(other)))
    assert cache._starts.first.tolist() == [9, 0]
    cache.reset(attention_mask=padding)
    assert set(lengths(cache)) == {0}


def test_too_many_tokens_raise(model: Any) -> None:
    cache = fill(model, KVCache(model.config, 60, 4, merge=LOSSY, **SHORT))
    with pytest.raises(IndexError, match="holds 60 tokens"), torch.no_grad():
        model(input_ids=prompt(2, 1), past_key_values=cache)


# --- memory, pairs, refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 4])
def test_bytes_are_those_of_the_formula(model: Any, bits: int) -> None:
    merge = MiniCache(start_layer=1, retained=0.01)
    cache = fill(model, KVCache(model.config, 4096, bits, merge=merge))
    lower = cache.layers[1]
    assert lower.layout.kept == 4 + 41
    expected = pair_bytes(lower.layout, 2, 2, 4096, 4) + map_bytes(lower.layout, 2, 2, 4)
    if bits == 16:
        expected += cache.layers[0].nbytes
    else:
        expected += bytes_after(cache.layers[0].layout, 2, 2, 4096, 4)
    assert cache.nbytes == expected


def test_a_cache_that_nobody_holds_is_gone_at_once(model: Any) -> None:
    """No cycle keeps its memory until the next collection of garbage."""
    cache = fill(model, KVCache(model.config, LENGTH, 4, merge=LOSSY, **SHORT))
    held = [weakref.ref(tensor) for layer in cache.layers for _, tensor in layer.tensors()]
    gc.disable()
    try:
        del cache
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_layers_that_see_a_window_are_never_paired() -> None:
    types = ["full_attention", "sliding_attention", *["full_attention"] * 3]
    model = make(
        "Qwen2",
        sliding_window=8,
        use_sliding_window=True,
        layer_types=types,
        num_hidden_layers=5,
    )
    cache = KVCache(model.config, LENGTH, 8, merge=MiniCache(start_layer=0, force=True), **SHORT)
    assert kinds(cache) == ["MergedLayer", "WindowLayer", *["MergedLayer"] * 3]
    assert [line["layers"] for line in cache.merged()] == [(0, 2), (3, 4)]
    ids = prompt(tokens=75)
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 70)
    found = logits(model, model, cache, ids, 70)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.5


def test_a_model_without_two_layers_that_attend_to_all_tokens_merges_none() -> None:
    """The report says of each pair that it never merges, and a cache refuses."""
    types = ["full_attention", *["sliding_attention"] * 3]
    windows = {"use_sliding_window": True, "sliding_window": 200, "layer_types": types}
    model = make("Qwen2", num_hidden_layers=4, **windows)
    with pytest.raises(
        UnsupportedInputError, match=r"no two consecutive layers.*fewer bits for a smaller"
    ):
        KVCache(model.config, LENGTH, 4, merge=MiniCache(start_layer=2), **SHORT)
    report = memeff_compile.fidelity_report(model, prompt(tokens=75), merge=None, steps=8, **SHORT)
    assert [pair["has_window"] for pair in report.pairs] == [True] * 3
    assert str(report).count("never: a window") == 3
    with pytest.raises(UnsupportedInputError, match="no two consecutive layers"):
        memeff_compile.fidelity_report(model, prompt(tokens=75), steps=8, **SHORT)


@pytest.mark.parametrize(
    ("start", "end", "pairs"),
    [(0, None, [(0, 1), (2, 3), (4, 5)]), (0, 5, [(0, 1), (2, 3)]), (1, 5, [(1, 2), (3, 4)])],
)
def test_layers_from_the_end_on_stay_apart(
    start: int, end: int | None, pairs: list[tuple[int, int]]
) -> None:
    config = make(num_hidden_layers=6).config
    cache = KVCache(config, LENGTH, 4, merge=MiniCache(start, end), **SHORT)
    assert [line["layers"] for line in cache.merged()] == pairs


def test_layers_without_rotary_embeddings_are_not_paired_with_others() -> None:
    config = make(num_hidden_layers=5).config
    config.no_rope_layers = [1, 1, 0, 0, 1]
    cache = KVCache(config, LENGTH, 4, merge=MiniCache(start_layer=1), **SHORT)
    assert [line["layers"] for line in cache.merged()] == [(2, 3)]
    assert isinstance(cache.layers[1], CodedLayer)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"merge": "average"}, "merge is 'average'; None, 'minicache' or a MiniCache"),
        ({"merge": "minicache", "scheme": "per_head"}, "merge goes with scheme='kivi'"),
        ({"merge": MiniCache(start_layer=2)}, "no two layers from layer 2 on attend"),
        (
            {"merge": MiniCache(start_layer=1, end_layer=2)},
            "no two layers from layer 1 on and before layer 2 attend",
        ),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused(
    model: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedInputError, match=words):
        KVCache(model.config, LENGTH, 4, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rule": "mean"}, "rule is 'mean'; 'slerp', 'average', 'max_norm' is needed"),
        ({"reading": "both"}, "reading is 'both'"),
        ({"align": "all"}, "align is 'all'; 'heads', 'none' is needed.*each head would read"),
        ({"scale": 2}, "scale is 2"),
        ({"t": 1.5}, "t is 1.5; a number from 0 to 1"),
        ({"gamma": -0.1}, "gamma is -0.1"),
        ({"retained": 2}, "retained is 2"),
        ({"start_layer": -1}, "start_layer is -1"),
        ({"end_layer": 1.5}, "end_layer is 1.5; the number of a layer"),
    ],
)
def test_a_merge_that_cannot_be_served_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedInputError, match=words):
        MiniCache(**given)


def test_training_is_refused(model: Any) -> None:
    cache = KVCache(model.config, LENGTH, 4, merge=ALL_KEPT)
    with pytest.raises(UnsupportedInputError, match="require gradients"):
        model(input_ids=prompt(), past_key_values=cache)


@pytest.mark.slow
def test_a_compiled_prompt_fills_the_cache_as_an_eager_one(model: Any) -> None:
    """The lower layer's keys wait inside the graph, and no longer after it.

    The prompt is one graph: a break in each layer makes Dynamo give up after eight of them.
    """
    compiled = torch.compile(
        model, backend="memeff", options={"memeff.inner": "eager"}, fullgraph=True
    )
    caches = [KVCache(model.config, LENGTH, 4, merge=LOSSY, **SHORT) for _ in range(2)]
    ids = prompt(tokens=66)
    expected = logits(model, model, caches[0], ids, 60)
    with torch.no_grad():
        compiled(input_ids=ids[:, :60], past_key_values=caches[1])
    assert caches[1].layers[1].pair.parked is None
    assert [line["merged"] for line in caches[1].merged()] == [32]
    parts = []
    with torch.no_grad():
        for t in range(60, 66):
            out = compiled(input_ids=ids[:, t : t + 1], past_key_values=caches[1])
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
