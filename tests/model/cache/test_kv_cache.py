"""KVCache in models of transformers: eager's numbers, generate(), beams, crop, batches, refusals."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache, StaticCache

import memeff_compile
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import bytes_after, op
from memeff_compile.model import use_low_bit_heads_
from memeff_compile.model.cache import kv_cache
from memeff_compile.model.cache.kv_cache import KVCache, use_kv_cache_
from memeff_compile.model.cache.layers import (
    CACHE_NAME,
    OLDER_CACHE_NAME,
    CodedLayer,
    ExactLayer,
)
from tests.support.cached_models import logits, make, prompt

NAME = "compress_kv_cache"
LAYERS = 2
LENGTH = 96
SHORT = {"group": 32, "recent": 16}


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


def fired() -> list[tuple[str, str]]:
    found = memeff_compile.last_report().records
    assert not [r for r in found if r.action in ("internal_error", "failed")], str(found)
    return [(r.action, r.code) for r in found if r.pass_name == NAME]


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", pytest.param("Qwen3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kept", [{"bits": 16}, {"bits": 4, "recent": 128}], ids=["16", "window"])
def test_what_is_kept_exact_equals_a_static_cache(family: str, kept: dict[str, Any]) -> None:
    model, ids = make(family), prompt(tokens=70)
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 60)
    found = logits(model, model, KVCache(model.config, LENGTH, **kept), ids, 60)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("scheme", ["kivi", "per_head"])
def test_fewer_bits_come_near_a_static_cache(model: Any, bits: int, scheme: str) -> None:
    ids = prompt(tokens=75)
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 70)
    cache = KVCache(model.config, LENGTH, bits, scheme=scheme, **SHORT)
    found = logits(model, model, cache, ids, 70)
    error = float((found - expected).norm() / expected.norm())
    bound = {8: 1e-3, 4: 2e-2, 3: 4e-2, 2: 1.2e-1}[bits] * (2 if scheme == "per_head" else 1)
    assert 0 < error < bound


def test_compiled_decoding_reads_codes_and_equals_eager(model: Any) -> None:
    """One graph for two caches and many steps; none builds the dense view."""
    compiled = torch.compile(
        model, backend="memeff", options={"memeff.inner": "eager"}, fullgraph=True
    )
    ids = prompt(tokens=70)
    expected = logits(model, model, KVCache(model.config, LENGTH, 4, **SHORT), ids, 60)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            cache = KVCache(model.config, LENGTH, 4, **SHORT)
            with torch.no_grad():
                model(input_ids=ids[:, :60], past_key_values=cache)
            layer = cache.layers[0]
            before = [t.data_ptr() for t in layer.pool()]
            with mock.patch.object(op.reference, "view", wraps=op.reference.view) as views:
                parts = []
                for t in range(60, 70):
                    with torch.no_grad():
                        out = compiled(input_ids=ids[:, t : t + 1], past_key_values=cache)
                    parts.append(out.logits)
            found = torch.cat(parts, 1)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert [t.data_ptr() for t in layer.pool()] == before
            # The reference's attention decodes the filled part, never the whole length.
            assert all(call.args[3] <= 70 for call in views.call_args_list)
    assert fired() == [("rewrote", "rewrote")] * LAYERS
    assert "coded_kv_cache_view(" not in memeff_compile.graphs()[-1].after


@pytest.mark.parametrize(
    "more",
    [[], pytest.param([(LENGTH, {"bits": 8, **SHORT})], marks=pytest.mark.slow)],
    ids=["4, 2 and 3", "8, too"],
)
def test_one_compiled_model_reads_codes_of_any_bits(
    model: Any, more: list[tuple[int, dict[str, Any]]]
) -> None:
    """Dynamo makes a symbol of values that differ in a second cache: its bits, lengths and
    windows.
    """
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    ids = prompt(tokens=70)
    for length, settings in (
        (LENGTH, {"bits": 4, **SHORT}),
        *more,
        (128, {"bits": 2, "group": 64, "recent": 32}),
        (LENGTH, {"bits": 3, "scheme": "per_head", **SHORT}),
    ):
        memeff_compile.report.clear()
        expected = logits(model, model, KVCache(model.config, length, **settings), ids, 66)
        found = logits(model, compiled, KVCache(model.config, length, **settings), ids, 66)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert set(fired()) == {("rewrote", "rewrote")}, settings
        sentences = [r.sentence for r in memeff_compile.last_report().records]
        assert all(f"{length} tokens in codes of {settings['bits']} bits" in s for s in sentences)


KINDS: dict[str, dict[str, Any]] = {
    "exact": {"bits": 16},
    "codes": {"bits": 4, **SHORT},
    "merged": {"bits": 4, "merge": memeff_compile.MiniCache(start_layer=0), **SHORT},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_cache_cannot_take_is_said_and_changes_nothing(model: Any, kind: str) -> None:
    """Another batch after reset(), another dtype, a prompt longer than the cache."""
    ids = prompt(tokens=30)
    cache = KVCache(model.config, 48, **KINDS[kind])

    @torch.no_grad()
    def give(given: Tensor) -> None:
        model(input_ids=given, past_key_values=cache)

    with pytest.raises(
        UnsupportedInputError, match=r"60 tokens .* max_cache_len=48. Make a longer"
    ):
        give(prompt(tokens=60))
    give(ids)
    cache.reset()
    with pytest.raises(UnsupportedInputError, match="make a new cache for another batch"):
        give(ids[:1])
    other = ids.new_zeros(1, 2, 4, 16, dtype=torch.float64)
    with pytest.raises(UnsupportedInputError, match="in float64 on cpu were given to a cache of"):
        cache.layers[0].update(other, other)
    before = [t.clone() for layer in cache.layers for _, t in layer.tensors()]
    assert int(cache.get_seq_length()) == 0
    give(ids)
    after = [t for layer in cache.layers for _, t in layer.tensors()]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("given", ["model", "dict", None])
def test_what_is_no_config_is_said(model: Any, given: str | None) -> None:
    config = {"model": torch.nn.Linear(2, 2), "dict": model.config.to_dict(), None: None}[given]
    with pytest.raises(UnsupportedInputError, match=r"was given as config; model\.config"):
        KVCache(config, 48)


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).eval()


def test_an_encoder_decoder_is_refused_and_takes_a_cache_by_hand() -> None:
    model, ids = t5(), prompt(tokens=13)
    for refused in (
        lambda: use_kv_cache_(model, 4),
        lambda: memeff_compile.compile(model, kv_cache="static"),
        lambda: memeff_compile.compile(model, weights="win4", kv_cache=4),
    ):
        with pytest.raises(UnsupportedInputError, match="EncoderDecoderCache"):
            refused()
    assert model._compiled_call_impl is None
    expected = model.generate(ids, max_new_tokens=5)
    by_hand = EncoderDecoderCache(KVCache(model.config, LENGTH, 16), DynamicCache())
    assert torch.equal(model.generate(ids, max_new_tokens=5, past_key_values=by_hand), expected)


def test_a_model_with_a_state_of_its_own_is_refused_and_still_generates() -> None:
    config = transformers.RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=32
    )
    model = transformers.RwkvForCausalLM(config).eval()
    for bits in (16, 4):
        with pytest.raises(
            UnsupportedInputError, match="RwkvForCausalLM brings its own state or cache"
        ):
            use_kv_cache_(model, bits)
    assert model.generate(prompt(tokens=5), max_new_tokens=2).shape[1] == 7


def test_a_refused_cache_leaves_the_weights_dense() -> None:
    model = make()
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(torch.randn(1024, 1024, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedInputError, match="bits is 5"):
        memeff_compile.compile(model, weights="win4", kv_cache=5)
    assert type(linear.weight) is torch.nn.Parameter
    memeff_compile.compile(model, weights="win4", kv_cache=4)
    assert type(linear.weight) is not torch.nn.Parameter


def test_a_step_behind_the_end_of_an_exact_cache_is_refused(model: Any) -> None:
    cache, ids = KVCache(model.config, 30, 16), prompt(tokens=30)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(UnsupportedInputError, match="30 tokens and 1 more were given"):
            model(input_ids=ids[:, :1], past_key_values=cache)
    assert int(cache.get_seq_length()) == 30


def test_queries_of_few_bits_read_codes_too(model: Any) -> None:
    """BitNet a4.8's smallest heads: 4-bit queries, 3-bit keys and values, the first token apart."""
    settings = {"bits": 3, "scheme": "per_head", "keep_first": 1, **SHORT}
    ids = prompt(tokens=70)
    plain = logits(model, model, KVCache(model.config, LENGTH, **settings), ids, 60)
    with use_low_bit_heads_(model, query=4, key_value=16):
        compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
        expected = logits(model, model, KVCache(model.config, LENGTH, **settings), ids, 60)
        found = logits(model, compiled, KVCache(model.config, LENGTH, **settings), ids, 60)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert fired() == [("rewrote", "rewrote")] * LAYERS
    assert 0 < float((expected - plain).norm() / plain.norm()) < 0.1


@pytest.mark.slow
def test_two_hundred_steps_recompile_nothing(model: Any) -> None:
    compiled = torch.compile(
        model, backend="memeff", options={"memeff.inner": "aot_eager"}, fullgraph=True
    )
    ids = prompt(tokens=250)
    expected = logits(model, model, KVCache(model.config, 256, 4, **SHORT), ids, 40)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = logits(model, compiled, KVCache(model.config, 256, 4, **SHORT), ids, 40)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inductor_writes_to_the_cache_in_place(model: Any) -> None:
    compiled = torch.compile(model, backend="memeff", fullgraph=True)
    ids = prompt(tokens=66)
    expected = logits(model, model, KVCache(model.config, LENGTH, 4, **SHORT), ids, 60)
    cache = KVCache(model.config, LENGTH, 4, **SHORT)
    seen: set[int] = set()
    plain = op.reference.append

    def note(pool: Any, *rest: Any) -> None:
        seen.add(pool[0].data_ptr())
        plain(pool, *rest)

    with mock.patch.object(op.reference, "append", note):
        found = logits(model, compiled, cache, ids, 60)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert seen == {layer.k_codes.data_ptr() for layer in cache.layers}


def test_a_prompt_in_pieces_and_several_tokens_at_once(model: Any) -> None:
    ids = prompt(tokens=80)
    whole, pieces = (KVCache(model.config, LENGTH, 16) for _ in range(2))
    coded = KVCache(model.config, LENGTH, 8, **SHORT)
    with torch.no_grad():
        expected = model(input_ids=ids, past_key_values=whole).logits[:, -10:]
        for cache, tolerance in ((pieces, 1e-5), (coded, 1e-3)):
            for start, end in ((0, 50), (50, 70), (70, 80)):
                out = model(input_ids=ids[:, start:end], past_key_values=cache)
            torch.testing.assert_close(out.logits, expected, rtol=0, atol=tolerance)
            assert int(cache.get_seq_length()) == 80


# --- generate() -----------------------------------------------------------------------------------


def padded(batch: int = 2, tokens: int = 12) -> dict[str, Tensor]:
    ids, seen = prompt(batch, tokens), torch.ones(batch, tokens, dtype=torch.long)
    ids[0, :4], seen[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": seen}


def test_generate_with_left_padding_gives_the_same_tokens(model: Any) -> None:
    given = padded()
    expected = model.generate(**given, max_new_tokens=20, do_sample=False)
    cache = KVCache(model.config, 40, 8, attention_mask=given["attention_mask"], **SHORT)
    settings = CompileConfig(
        backend="memeff", options={"memeff.inner": "eager"}, mode=None, fullgraph=True
    )
    settings._compile_all_devices = True
    found = model.generate(
        **given, max_new_tokens=20, do_sample=False, past_key_values=cache, compile_config=settings
    )
    assert torch.equal(found, expected)
    assert fired() == [("rewrote", "rewrote")] * LAYERS
    places = cache.layers[0].pool()[8]
    assert places[:, 0].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("bits", [16, 4])
def test_beams_equal_those_of_a_dynamic_cache(model: Any, bits: int) -> None:
    given: dict[str, Any] = {**padded(), "max_new_tokens": 10, "num_beams": 3, "do_sample": False}
    expected = model.generate(**given, past_key_values=DynamicCache(config=model.config))
    found = model.generate(**given, past_key_values=KVCache(model.config, LENGTH, bits))
    assert torch.equal(found, expected)


def test_every_later_generate_uses_the_cache_until_undone(model: Any) -> None:
    given: dict[str, Any] = {**padded(), "max_new_tokens": 8, "do_sample": False}
    given["return_dict_in_generate"] = True
    cache = KVCache(model.config, 256, 4, attention_mask=given["attention_mask"])
    expected = model.generate(**given, past_key_values=cache)
    undo = use_kv_cache_(model, bits=4)
    try:
        found = model.generate(**given)
        assert isinstance(found.past_key_values, KVCache)
        assert torch.equal(found.sequences, expected.sequences)
        assert found.past_key_values.nbytes == cache.nbytes
        for name in (CACHE_NAME, OLDER_CACHE_NAME):
            named = model.generate(**given, **{name: DynamicCache(config=model.config)})
            assert isinstance(named.past_key_values, DynamicCache)
        assert model.generate(**given, use_cache=False).past_key_values is None
    finally:
        undo()
    assert not isinstance(model.generate(**given).past_key_values, KVCache)
    undo()  # twice is once


def test_generate_has_the_cache_under_the_name_that_its_models_know(model: Any) -> None:
    """Under the older one it renames it in every step, with a warning."""
    with use_kv_cache_(model), warnings.catch_warnings():  # type: ignore[attr-defined]
        warnings.simplefilter("error", FutureWarning)
        assert model.generate(prompt(1, 4), max_new_tokens=3).shape == (1, 7)


def bits_used(model: Any) -> int:
    """Return the bits of the cache that generate() makes now; 0: of transformers."""
    found = model.generate(prompt(1, 4), max_new_tokens=2, return_dict_in_generate=True)
    return getattr(found.past_key_values, "bits", 0)


def test_uses_nest_and_an_undone_one_does_not_come_back(model: Any) -> None:
    with use_kv_cache_(model, bits=4):  # type: ignore[attr-defined]
        with use_kv_cache_(model, bits=2):  # type: ignore[attr-defined]
            assert bits_used(model) == 2
        assert bits_used(model) == 4
    assert bits_used(model) == 0
    stale = use_kv_cache_(model, bits=4)
    with use_kv_cache_(model, bits=2):  # type: ignore[attr-defined]
        stale()
        assert bits_used(model) == 2
    assert "_prepare_cache_for_generation" not in vars(model)


def test_a_copy_of_a_model_has_a_use_of_its_own() -> None:
    model = make(num_hidden_layers=1)
    with use_kv_cache_(model, bits=4):  # type: ignore[attr-defined]
        copied = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (copied, loaded):
        assert vars(other)["_prepare_cache_for_generation"].model is other
        assert bits_used(other) == 4
    assert bits_used(model) == 0


def test_adapters_and_compiled_models_are_looked_into() -> None:
    peft = pytest.importorskip("peft")
    model = make(num_hidden_layers=1)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    )
    compiled = torch.compile(make(num_hidden_layers=1), backend="eager")
    for given in (adapted, compiled):
        with use_kv_cache_(given, bits=4):  # type: ignore[attr-defined]
            ids = prompt(1, 4)
            found = given.generate(input_ids=ids, max_new_tokens=2, return_dict_in_generate=True)
            assert found.past_key_values.bits == 4
        found = given.generate(input_ids=ids, max_new_tokens=2, return_dict_in_generate=True)
        assert not isinstance(found.past_key_values, KVCache)


def test_on_a_gpu_generate_compiles_with_the_backend_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = make(num_hidden_layers=1)
    monkeypatch.setattr(type(mine), "device", torch.device("cuda"))
    config = transformers.GenerationConfig()
    with use_kv_cache_(mine):  # type: ignore[attr-defined]
        for asked in (None, CompileConfig(backend="inductor")):
            config.compile_config = asked
            mine._prepare_cache_for_generation(config, {}, None, 1, 10)
            wanted = "memeff" if asked is None else "inductor"
            assert config.compile_config.backend == wanted
        mine.compile(backend="eager")
        config.compile_config = None
        mine._prepare_cache_for_generation(config, {}, None, 1, 10)
        assert config.compile_config is None
        assert config.disable_compile


def test_a_pipeline_gives_the_tokens_of_the_cache_itself(model: Any) -> None:
    """A stock text-generation pipeline, with a tokenizer of one token per letter."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<pad>": 0, "<s>": 1, **{chr(97 + i): 2 + i for i in range(26)}}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", bos_token="<s>"
    )
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    ids = tokenizer("memory", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, past_key_values=KVCache(model.config, 256, 4), **given)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    with use_kv_cache_(model, bits=4):  # type: ignore[attr-defined]
        found = pipe("memory", return_tensors=True, **given)
    assert found[0]["generated_token_ids"] == expected[0].tolist()


# --- the cache ------------------------------------------------------------------------------------


def fill(model: Any, cache: Any, tokens: int = 60, batch: int = 2) -> Any:
    with torch.no_grad():
        model(input_ids=prompt(batch, tokens), past_key_values=cache)
    return cache


def dense(cache: Any) -> list[Tensor]:
    from memeff_compile.kernels.coded_kv_cache import coded_kv_cache_view

    found: list[Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, CodedLayer):
            bits = layer.settings["bits"]
            found += coded_kv_cache_view(*layer.pool(), None, None, bits, LENGTH)
        else:
            found += [layer.keys, layer.values]
    return found


@pytest.mark.parametrize("bits", [16, 4])
def test_reordering_is_in_place_and_twice_is_the_product(model: Any, bits: int) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, bits, **SHORT), batch=3)
    before = [t.clone() for t in dense(cache)]
    held = [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    assert held == [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    for found, old in zip(dense(cache), before, strict=True):
        assert torch.equal(found, old[[0, 2, 0]])


@pytest.mark.parametrize("bits", [16, 4])
def test_sequences_are_repeated_and_selected(model: Any, bits: int) -> None:
    mask = torch.ones(2, 60)
    mask[0, :3] = 0
    cache = KVCache(model.config, LENGTH, bits, attention_mask=mask, **SHORT)
    fill(model, cache)
    before = [t.clone() for t in dense(cache)]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    for found, old in zip(dense(cache), before, strict=True):
        assert torch.equal(found, old)
    cache.batch_select_indices(torch.tensor([1]))
    with torch.no_grad():
        model(input_ids=prompt(1, 1), past_key_values=cache)
    assert int(cache.get_seq_length()) == 61


@torch.no_grad()
def test_sequences_of_windows_are_repeated_and_selected() -> None:
    model = make("Mistral", sliding_window=8)
    ids = prompt(tokens=12)
    cache, plain = KVCache(model.config, LENGTH), DynamicCache(config=model.config)
    for each in (cache, plain):
        model(input_ids=ids, past_key_values=each)
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([3, 0]))
    step = prompt(tokens=1)
    found, expected = (model(step, past_key_values=each).logits for each in (cache, plain))
    assert torch.allclose(found, expected, atol=1e-5)


def test_sequences_of_layers_that_are_not_known_are_refused_before_any_is_changed() -> None:
    model = make("Mistral", sliding_window=8)
    cache = fill(model, KVCache(model.config, LENGTH, 16))
    cache.layers.append(SimpleNamespace())  # of a model that keeps other states
    before = cache.layers[0].keys
    for call in (cache.batch_repeat_interleave, cache.batch_select_indices):
        with pytest.raises(UnsupportedInputError, match="cannot be repeated or selected"):
            call(torch.tensor([1]))
    assert cache.layers[0].keys is before


@pytest.mark.parametrize("bits", [16, 4])
def test_cropped_tokens_are_written_anew(model: Any, bits: int) -> None:
    ids = prompt(tokens=70)
    expected = logits(model, model, KVCache(model.config, LENGTH, bits, **SHORT), ids, 60)
    cache = KVCache(model.config, LENGTH, bits, **SHORT)
    wrong = torch.cat([ids[:, :60], ids[:, :5] * 0 + 3], 1)
    logits(model, model, cache, wrong, 60)
    cache.crop(-5)
    with torch.no_grad():
        parts = [
            model(input_ids=ids[:, t : t + 1], past_key_values=cache).logits for t in range(60, 70)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-6)


def test_a_crop_into_the_codes_is_refused_with_the_number_that_goes(model: Any) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, 4, **SHORT))
    with pytest.raises(UnsupportedInputError, match="remove 29 tokens, and 28 of 60 are not yet"):
        cache.crop(-29)
    with pytest.raises(ValueError, match="a negative number is needed"):
        cache.crop(5)
    cache.crop(0)
    cache.crop(-28)
    assert int(cache.get_seq_length()) == 32
    assert not cache.is_croppable


@pytest.mark.parametrize("bits", [16, 4])
def test_a_reset_cache_is_as_good_as_new(model: Any, bits: int) -> None:
    ids = prompt(tokens=70)
    cache = KVCache(model.config, LENGTH, bits, **SHORT)
    expected = logits(model, model, cache, ids, 60)
    held = [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, model, cache, ids, 60), expected)
    assert held == [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]


def test_a_reset_forgets_the_padding_of_the_sequences_before(model: Any) -> None:
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :50] = 0
    settings: dict[str, Any] = {"recent": 16, "group": 32, "max_cache_len": LENGTH}
    used = KVCache(model.config, attention_mask=mask, **settings)
    fill(model, used)
    used.reset()
    fresh = KVCache(model.config, **settings)
    for ours, theirs in zip(dense(fill(model, used)), dense(fill(model, fresh)), strict=True):
        assert torch.equal(ours, theirs)
    used.reset(mask)
    padded = KVCache(model.config, attention_mask=mask, **settings)
    for ours, theirs in zip(dense(fill(model, used)), dense(fill(model, padded)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_prompt_longer_than_the_cache_is_refused_on_every_device(model: Any) -> None:
    cache = KVCache(model.config, max_cache_len=64, recent=16, group=32)
    with pytest.raises(UnsupportedInputError, match="65 tokens were given"):
        fill(model, cache, tokens=65)
    assert cache.get_seq_length() == 0


def test_too_many_tokens_raise(model: Any) -> None:
    cache = fill(model, KVCache(model.config, 60, 4, **SHORT))
    with pytest.raises(IndexError, match="holds 60 tokens"), torch.no_grad():
        model(input_ids=prompt(2, 1), past_key_values=cache)


def test_bytes_are_those_of_the_formula(model: Any) -> None:
    cache = fill(model, KVCache(model.config, 4096, 4))
    layout = cache.layers[0].layout
    places = cache.layers[0].pool()[8].nbytes
    expected = LAYERS * (bytes_after(layout, 2, 2, 4096, 4) - places) + places
    assert cache.nbytes == expected
    assert "bits=4" in repr(cache)
    assert "2 of 2 layers in codes" in repr(cache)


def test_layers_that_see_a_window_stay_exact() -> None:
    model = make(
        "Qwen2",
        sliding_window=8,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    )
    cache = KVCache(model.config, LENGTH, 8, **SHORT)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["WindowLayer", "CodedLayer"]
    ids = prompt(tokens=75)
    expected = logits(model, model, StaticCache(model.config, LENGTH), ids, 70)
    found = logits(model, model, cache, ids, 70)
    assert float((found - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.parametrize("bits", [16, 4])
def test_first_layers_draft_for_a_model_with_windows(bits: int) -> None:
    """transformers lowers the number of layers while it drafts, and rejects most of the tokens."""
    settings: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 8}
    settings |= {"use_sliding_window": True}
    settings |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    model, plain = make("Qwen2", **settings), make("Qwen2", **settings)
    ids, how = prompt(1, 12), {"max_new_tokens": 60, "do_sample": False}
    expected = plain.generate(ids, **how)
    for each in (model, plain):
        each.generation_config.num_assistant_tokens = 5
        each.generation_config.assistant_confidence_threshold = 0
    use_kv_cache_(model, bits)
    assert torch.equal(model.generate(ids, assistant_early_exit=2, **how), expected)
    assert model.config.num_hidden_layers == 4
    assert torch.equal(model.generate(ids, **how), expected)


WINDOWS = (
    "4 bits have no effect on this model: all of its 2 layers that keep keys and values see a "
)


@pytest.fixture
def warns_again() -> Iterator[None]:
    kv_cache._warn_once.cache_clear()
    yield
    kv_cache._warn_once.cache_clear()


def make_windows() -> Any:
    return make("Mistral", sliding_window=8)


def generate_twice(model: Any) -> str:
    undo = use_kv_cache_(model, 4)
    for _ in range(2):
        model.generate(prompt(tokens=12), max_new_tokens=2, do_sample=False)
        KVCache(model.config, LENGTH, 4)
    return str(undo)


def test_few_bits_of_a_model_of_windows_warn_once(warns_again: None) -> None:
    model = make_windows()
    with pytest.warns(UserWarning, match=f"{WINDOWS}window of 8 tokens and stay exact") as seen:
        assert WINDOWS in generate_twice(model)
    assert len(seen) == 1


def test_layers_with_attention_and_a_state_are_not_said_to_have_a_window(warns_again: None) -> None:
    state = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16}
    config = transformers.FalconH1Config(num_hidden_layers=2, **state)
    said = (
        "all of its 2 layers that keep keys and values are of a kind that KVCache does not encode"
    )
    with pytest.warns(UserWarning, match=said) as seen:
        cache = KVCache(config, LENGTH, 4)
    assert "window" not in str(seen[0].message)
    assert f"max_cache_len={LENGTH}," in repr(cache)


def test_compile_with_few_bits_of_a_model_of_windows_warns_once(warns_again: None) -> None:
    with pytest.warns(UserWarning, match=WINDOWS) as seen:
        memeff_compile.compile(make_windows(), kv_cache=4, options={"memeff.inner": "eager"})
    assert len(seen) == 1


@pytest.mark.parametrize("bits", [16, 4])
def test_a_request_with_an_effect_does_not_warn(bits: int, warns_again: None) -> None:
    model = make_windows() if bits == 16 else make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = KVCache(model.config, LENGTH, bits)
        with use_kv_cache_(model, bits) as undo:
            assert "layer" not in str(undo)
    assert not cache.kept_exact


def step_of(model: Any, cache: KVCache, **options: Any) -> list[Any]:
    """Compile one step; return the report's records about layers that stay exact."""
    compiled = torch.compile(
        model, backend="memeff", options={"memeff.inner": "eager", **options}, fullgraph=True
    )
    logits(model, compiled, cache, prompt(tokens=13), 12)
    return [r for r in memeff_compile.last_report().records if r.code == "exact_layers"]


def test_the_report_says_that_few_bits_have_no_effect() -> None:
    model = make_windows()
    (record,) = step_of(model, KVCache(model.config, LENGTH, 4))
    assert (record.pass_name, record.action) == (NAME, "declined")
    assert record.sentence == f"{WINDOWS}window of 8 tokens and stay exact."
    assert "do not ask for few bits" in str(memeff_compile.last_report()).lower()
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="4 bits have no effect"):
        step_of(model, KVCache(model.config, LENGTH, 4), **{"memeff.strict": NAME})


def test_the_report_says_which_layers_stay_exact() -> None:
    model = make(
        "Qwen2",
        sliding_window=8,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    )
    cache = KVCache(model.config, LENGTH, 4, **SHORT)
    (record,) = step_of(model, cache, **{"memeff.strict": NAME})
    assert (record.pass_name, record.action) == (NAME, "note")
    said = "n 4 bits: 1 layer (1); exact, with a window of 8 tokens: 1 layer (0)."
    assert record.sentence == f"I{said}"
    undo = use_kv_cache_(model, 4)
    assert said.rstrip(".") in str(undo)
    undo()


def test_a_graph_without_the_cache_is_not_told_of_it() -> None:
    model = make_windows()
    cache = fill(model, KVCache(model.config, LENGTH, 4))
    plain = DynamicCache(config=model.config)
    assert step_of(model, plain) == []
    assert cache.exact_tensors()


def test_a_crop_of_a_model_with_a_window_is_refused_before_any_layer_changes() -> None:
    model = make(
        "Qwen2",
        sliding_window=8,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"],
    )
    cache = fill(model, KVCache(model.config, LENGTH, 4, **SHORT))
    cache.crop(0)
    words = "window of 8 can remove 17, .* reset.* Layer 1 .* no layer was changed"
    with pytest.raises(UnsupportedInputError, match=words):
        cache.crop(-18)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [60, 60]


@torch.no_grad()
@pytest.mark.parametrize(
    "pieces",
    [
        (12, 1, 1, 1),  # a prompt longer than the window of 8, shorter than its room of 24
        (30, 1, 1),
        (3, 1, 2, 1, 1, 5, 1, 9, 1, 1, 1, 1, 1),
        (1, 23, 1, 1),
        (20, 5, 17, 18, 40, 1, 24, 3),  # blocks that do not fit after the window
        (5, 60, 1),
        tuple([2] + [1] * 60),
    ],
)
@pytest.mark.parametrize("padding", [0, 4])
def test_a_window_says_what_one_that_forgets_nothing_says(
    pieces: tuple[int, ...], padding: int
) -> None:
    """In whatever pieces tokens come, and where some are taken back."""
    model = make("Mistral", sliding_window=8)
    cache, plain = KVCache(model.config, 256, 16), DynamicCache()
    ids, start = prompt(2, sum(pieces)), 0
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    for new in pieces:
        told = {"input_ids": ids[:, start : start + new], "attention_mask": mask[:, : start + new]}
        found = model(**told, past_key_values=cache).logits
        expected = model(**told, past_key_values=plain).logits
        is_token = mask[:, start : start + new].bool()
        torch.testing.assert_close(found[is_token], expected[is_token], rtol=1e-4, atol=1e-5)
        start += new
        assert cache.get_seq_length() == start
        if 2 < new < 17:  # the last ones again
            cache.crop(-2)
            plain.crop(-2)
            start -= 2
            assert cache.get_seq_length() == start


@torch.no_grad()
@pytest.mark.parametrize("tokens", [12, 30])
@pytest.mark.parametrize("settings", [{"sliding_window": 8}, {"sliding_window": None}], ids=str)
def test_tokens_under_autocast_are_kept_in_the_dtypes_they_come_in(
    settings: dict[str, Any], tokens: int
) -> None:
    """There keys are turned in fp32, and values come in 16 bits."""
    model = make("Mistral", **settings)
    cache, ids = KVCache(model.config, LENGTH, 16), prompt(2, tokens + 2)
    parts = ids[:, :tokens], ids[:, tokens : tokens + 1], ids[:, tokens + 1 :]
    with torch.autocast("cpu", torch.bfloat16):
        found = [model(input_ids=part, past_key_values=cache).logits for part in parts]
        assert torch.equal(found[0], model(input_ids=parts[0], use_cache=False).logits)
        expected = model(input_ids=ids, use_cache=False).logits[:, tokens:]
    assert (torch.cat(found[1:], 1) - expected).abs().max() <= 0.01 * expected.abs().max()
    for layer in cache.layers:
        assert (layer.keys.dtype, layer.values.dtype) == (torch.float32, torch.bfloat16)


@torch.no_grad()
def test_a_window_that_was_moved_beforehand_says_the_same() -> None:
    model = make("Mistral", sliding_window=8)
    ids, found = prompt(2, 90), []
    for is_moved in (False, True):
        cache = KVCache(model.config, 256, 16)
        logits = [model(input_ids=ids[:, :30], past_key_values=cache).logits]
        for place in range(30, 90):
            if is_moved:
                for layer in cache.windows():
                    layer.make_room(1)
                    assert layer.here < layer.room
            step = ids[:, place : place + 1]
            logits.append(model(input_ids=step, past_key_values=cache).logits)
        found.append(torch.cat(logits, 1))
    assert torch.equal(*found)


# --- refusals -------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_window_as_long_as_the_cache_forgets_nothing_and_refuses_what_does_not_fit() -> None:
    model = make("Mistral", sliding_window=64)
    cache = KVCache(model.config, 40, 16)
    assert [(layer.holds_all, layer.is_croppable) for layer in cache.windows()] == [
        (True, True)
    ] * 2
    fill(model, cache, 38)
    cache.crop(-8)
    assert cache.get_seq_length() == 30
    fill(model, cache, 10)
    with pytest.raises(UnsupportedInputError, match="40 tokens and 1 more were given to a"):
        fill(model, cache, 1)
    cache.reset()
    with pytest.raises(UnsupportedInputError, match="41 tokens were given to a cache"):
        fill(model, cache, 41)


def test_a_model_that_keeps_no_keys_is_refused() -> None:
    config = transformers.MambaConfig(num_hidden_layers=1)
    with pytest.raises(UnsupportedInputError, match="no layer of this model keeps keys"):
        KVCache(config, LENGTH)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bits": 5}, "bits is 5; one of 16, 8, 4, 3, 2"),
        ({"bits": 4.0}, r"bits is 4\.0; one of 16, 8, 4, 3, 2"),
        ({"group": 64.0}, r"group is 64\.0"),
        ({"scheme": "awq"}, "scheme is 'awq'"),
        ({"group": 48}, "group is 48"),
        ({"recent": 10}, "recent is 10; a multiple of 16"),
        ({"keep_first": -1}, "keep_first is -1"),
        ({"max_cache_len": 0}, "max_cache_len is 0"),
        ({"attention_mask": torch.ones(2, 1, 3)}, "attention_mask has 3 dimensions"),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused(
    model: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedInputError, match=words):
        KVCache(model.config, **{"max_cache_len": LENGTH, **given})


def test_a_crop_of_a_cache_that_was_given_too_much_is_refused(model: Any) -> None:
    """On a GPU such a cache goes on, with keys that are not numbers; here they are put there."""
    cache = fill(model, KVCache(model.config, LENGTH, 4, **SHORT))
    cache.layers[0].k_window[:, :, 59 % 48] = torch.nan
    with pytest.raises(UnsupportedInputError, match="more tokens than max_cache_len=96"):
        cache.crop(-2)
    cache.reset()
    assert fill(model, cache).get_seq_length() == 60


def test_training_and_offloading_are_refused(model: Any) -> None:
    cache = KVCache(model.config, LENGTH, 4)
    with pytest.raises(UnsupportedInputError, match="require gradients"):
        model(input_ids=prompt(), past_key_values=cache)
    with pytest.raises(UnsupportedInputError, match="offloading"):
        cache.layers[0].offload()


def test_another_number_of_sequences_is_refused(model: Any) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, 4, **SHORT))
    before = [tensor.clone() for tensor in cache.layers[0].pool()]
    ids, wanted = prompt(tokens=3)[:1].repeat(3, 1), "keys of 3 sequences, .* new cache"
    with pytest.raises(UnsupportedInputError, match=wanted), torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    for found, held in zip(cache.layers[0].pool(), before, strict=True):
        assert torch.equal(found, held)


def test_a_model_of_more_layers_is_refused(model: Any) -> None:
    layers = model.config.num_hidden_layers
    config = copy.deepcopy(model.config)
    config.num_hidden_layers -= 1
    with pytest.raises(UnsupportedInputError, match=f"a cache of {layers - 1} layers"):
        fill(model, KVCache(config, LENGTH, 4, **SHORT))


def test_a_mask_of_other_sequences_is_refused(model: Any) -> None:
    cache = KVCache(model.config, LENGTH, 4, attention_mask=torch.ones(3, 60))
    with pytest.raises(UnsupportedInputError, match="attention_mask has 3 rows and the keys 2"):
        fill(model, cache)


def test_a_head_dimension_that_is_not_served_is_refused() -> None:
    model = make(head_dim=24)
    with pytest.raises(UnsupportedInputError, match="the head dimension is 24"):
        fill(model, KVCache(model.config, LENGTH, 4))
    fill(model, KVCache(model.config, LENGTH, 16))


def test_a_model_that_does_not_generate_is_refused() -> None:
    with pytest.raises(UnsupportedInputError, match="no generate"):
        use_kv_cache_(torch.nn.Linear(2, 2))


def test_a_cache_too_short_for_a_call_is_refused(model: Any) -> None:
    with use_kv_cache_(model, max_cache_len=10):  # type: ignore[attr-defined] # noqa: SIM117
        with pytest.raises(UnsupportedInputError, match="needs room for"):
            model.generate(prompt(1, 8), max_new_tokens=10)


@pytest.fixture(autouse=True)
def _no_hook_left(model: Any) -> Iterator[None]:
    yield
    assert "_prepare_cache_for_generation" not in vars(model)


def test_exact_layers_are_what_16_bits_are(model: Any) -> None:
    cache = fill(model, KVCache(model.config, LENGTH, 16))
    assert all(isinstance(layer, ExactLayer) for layer in cache.layers)
    assert cache.is_croppable
