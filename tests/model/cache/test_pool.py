"""Caches that generate() gets again: sizes in buckets, allocated at once, never one that is held."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import transformers

import memeff_compile
from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.model.cache import pool
from memeff_compile.model.cache.kv_cache import KVCache, for_any_length, use_kv_cache_
from memeff_compile.model.cache.layers import CACHE_NAME
from tests.support.cached_models import make, prompt


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(1, 256), (256, 256), (257, 512), (2049, 2304), (4097, 4608), (12096, 12288), (16385, 18432)],
)
def test_buckets_are_an_eighth_larger_at_most(tokens: int, length: int) -> None:
    assert pool.bucket(tokens) == length
    assert pool.bucket(length) == length
    assert length <= max(256, tokens * 1.125 + 256)


def generated(model: Any, tokens: int = 20, batch: int = 2, **settings: Any) -> Any:
    given = {"max_new_tokens": 4, "do_sample": False, **settings}
    return model.generate(prompt(batch, tokens), **given)


def pool_of(undo: Any) -> pool.Pool:
    return undo.undo.__self__.pool


def kept(undo: Any) -> list[Any]:
    return pool_of(undo)._kept


@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 16}, {"bits": 4, "merge": "minicache"}])
def test_a_cache_is_used_again_and_says_the_same(settings: dict[str, Any]) -> None:
    model = make(num_hidden_layers=4)
    expected = []
    for length in (20, 31, 20):
        with use_kv_cache_(model, **settings):  # type: ignore[attr-defined]
            expected.append(generated(model, length))
    undo = use_kv_cache_(model, **settings)
    addresses = set()
    for length, tokens in zip((20, 31, 20), expected, strict=True):
        assert torch.equal(generated(model, length), tokens)
        (one,) = kept(undo)
        addresses.add(tuple(t.data_ptr() for layer in one.cache.layers for _, t in layer.tensors()))
    assert len(addresses) == 1
    undo()


def test_padding_of_one_call_is_not_that_of_the_next() -> None:
    model = make()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    with use_kv_cache_(model):  # type: ignore[attr-defined]
        padded = generated(model, attention_mask=mask)
    plain = make()
    with use_kv_cache_(plain):  # type: ignore[attr-defined]
        expected = generated(plain)
    with use_kv_cache_(model):  # type: ignore[attr-defined]
        assert torch.equal(generated(model, attention_mask=mask), padded)
        assert torch.equal(generated(model), expected)
        assert torch.equal(generated(model, attention_mask=mask), padded)


def test_a_cache_that_the_caller_has_is_not_touched() -> None:
    model = make()
    undo = use_kv_cache_(model, bits=16)
    held = generated(model, return_dict_in_generate=True).past_key_values
    before = [layer.keys.clone() for layer in held.layers]
    generated(model, 25)
    assert kept(undo)[0].cache.layers[0].keys.data_ptr() != held.layers[0].keys.data_ptr()
    for layer, keys in zip(held.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    undo()


def test_a_cache_in_use_is_not_handed_out() -> None:
    taken = pool.Pool()
    model = make(num_hidden_layers=1)

    def make_one() -> Any:
        return KVCache(model.config, 256, 4)

    first = taken.take("kind", range(256, 257), None, make_one)
    second = taken.take("kind", range(256, 257), None, make_one)
    assert first.layers[0] is not second.layers[0]
    layers = first.layers
    del first
    assert taken.take("kind", range(256, 257), None, make_one).layers is layers
    assert taken.take("other", range(256, 257), None, make_one).layers is not layers
    assert len(taken._kept) == pool.KEPT


def test_threads_get_caches_of_their_own() -> None:
    model, plain = make(num_hidden_layers=1), make(num_hidden_layers=1)
    undo = use_kv_cache_(model)
    lengths = (20, 24, 28)
    with use_kv_cache_(plain):  # type: ignore[attr-defined]
        expected = {length: generated(plain, length) for length in lengths}
    wrong = []

    def work(length: int) -> None:
        for _ in range(3):
            if not torch.equal(generated(model, length), expected[length]):
                wrong.append(length)

    threads = [threading.Thread(target=work, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    undo()


def test_a_reset_frees_what_is_kept() -> None:
    model = make(num_hidden_layers=1)
    undo = use_kv_cache_(model)
    expected = generated(model)
    memeff_compile.reset()
    assert not kept(undo)
    assert torch.equal(generated(model), expected)
    assert len(kept(undo)) == 1
    undo()


def test_copies_of_a_model_have_no_caches_of_the_first() -> None:
    model = make(num_hidden_layers=1)
    undo = use_kv_cache_(model)
    generated(model)
    assert kept(undo)
    assert not copy.deepcopy(pool_of(undo))._kept
    assert not pickle.loads(pickle.dumps(pool_of(undo)))._kept
    undo()


def test_the_tensors_are_there_before_the_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    seen = []
    forward = type(model).forward

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs[CACHE_NAME]
        seen.append(all(layer.is_initialized for layer in cache.layers))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", watched)
    with use_kv_cache_(model):  # type: ignore[attr-defined]
        generated(model, num_beams=2)
    assert seen[0]


def test_sizes_of_heads_come_from_the_model_where_transformers_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make()
    expected = tuple(model._get_static_cache_init_shape())
    monkeypatch.delattr(transformers.GenerationMixin, "_get_static_cache_init_shape")
    assert pool.head_shapes(model) == expected == (2, 16)
    model.config.head_dim = 8
    assert pool.head_shapes(model) is None


# --- the door -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kv_cache",
    [
        pytest.param("static", marks=pytest.mark.slow),  # the doctor's own test is of it
        pytest.param(4, marks=pytest.mark.slow),
        {"bits": 3, "recent": 32},
    ],
)
def test_one_line_compiles_generation(kv_cache: Any) -> None:
    model, plain = make(num_hidden_layers=1), make(num_hidden_layers=1)
    settings = {"bits": 16} if kv_cache == "static" else kv_cache
    settings = settings if isinstance(settings, dict) else {"bits": settings}
    lengths = 20, 31, 1, 2, 300  # a prompt of one token is a step; the last has a longer cache
    with use_kv_cache_(plain, **settings):  # type: ignore[attr-defined]
        expected = [generated(plain, length) for length in lengths]
    compiled = memeff_compile.compile(model, kv_cache=kv_cache, inner="eager")
    assert compiled is model
    for length, tokens in zip(lengths, expected, strict=True):
        assert torch.equal(generated(model, length), tokens)
    assert len(memeff_compile.graphs()) == 2
    # So few tokens are not coded yet: the result of a model without memeff's caches.
    assert torch.equal(expected[2], generated(make(num_hidden_layers=1), 1))


def test_merged_caches_of_any_length_are_served_by_two_graphs() -> None:
    settings = {"bits": 4, "merge": memeff_compile.MiniCache(start_layer=0, force=True)}
    plain, model = make(), memeff_compile.compile(make(), kv_cache=settings, inner="eager")
    with use_kv_cache_(plain, **settings):  # type: ignore[attr-defined]
        for length, new in ((20, 4), (300, 12), (31, 4), (600, 4)):
            expected = generated(plain, length, max_new_tokens=new)
            assert torch.equal(generated(model, length, max_new_tokens=new), expected)
    found = [[record.pass_name for record in graph.records] for graph in memeff_compile.graphs()]
    assert [passes.count("compress_kv_cache") for passes in found] == [0, 2]


@pytest.mark.slow
def test_a_long_cache_behind_a_short_one_is_asked_anew_what_pays() -> None:
    model = memeff_compile.compile(make(num_hidden_layers=1), kv_cache="static", inner="eager")
    for length, has_op in ((20, False), (900, True)):
        generated(model, length, batch=8)
        assert ("memeff.kv_cache_attention" in memeff_compile.graphs()[-1].after) is has_op
    assert len(memeff_compile.graphs()) == 3  # the prompt, and two steps


def test_one_token_is_a_step_only_where_a_mask_says_what_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_compileable in (True, False):
        cache = KVCache(make(num_hidden_layers=1).config, 64, bits=16)
        cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
        monkeypatch.setattr(KVCache, "is_compileable", is_compileable)
        cache.begin_with_a_step()
        assert cache.is_empty == (not is_compileable)


def test_what_the_door_cannot_do_is_said() -> None:
    with pytest.raises(OptionError, match="kv_cache is 'kivi4'"):
        memeff_compile.compile(make(num_hidden_layers=1), kv_cache="kivi4")
    with pytest.raises(OptionError, match="models of transformers"):
        memeff_compile.compile(len, kv_cache=4)
    with pytest.raises(UnsupportedInputError, match="bits is 5"):
        memeff_compile.compile(make(num_hidden_layers=1), kv_cache=5)
    with pytest.raises(UnsupportedInputError, match="no generate"):
        memeff_compile.compile(torch.nn.Linear(2, 2), kv_cache=4)
    with pytest.raises(OptionError, match=r"no setting 'bit'; it takes bits, group"):
        memeff_compile.compile(make(num_hidden_layers=1), kv_cache={"bit": 4})
    with pytest.raises(OptionError, match=r"memeff_compile.compile\(model, kv_cache=...\)"):
        memeff_compile.Options.parse(None, {"memeff.kv_cache": 4})


@pytest.mark.parametrize("ids", [torch.arange(3), torch.zeros(2, 1, dtype=torch.int64), None])
def test_a_call_that_is_no_prompt_reaches_the_model_as_it_is(ids: torch.Tensor | None) -> None:
    given = {"input_ids": ids, "past_key_values": KVCache(make().config, 8, bits=16)}
    assert for_any_length(lambda **kwargs: kwargs)(**given) == given
