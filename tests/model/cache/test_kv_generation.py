"""Generation with a StaticCache of transformers: rewrites, eager's logits, cache and tokens.

On the CPU the pass asks for copies of a size that tiny models do not have; the limit is lowered.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CompileConfig, StaticCache

import memeff_compile
from memeff_compile.passes import rewrite_kv_update

NAME = "rewrite_kv_update"
LAYERS = 2
LENGTH = 24


@pytest.fixture(autouse=True)
def _any_copy_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite_kv_update, "MIN_COPIED_BYTES", 0)


def make(family: str, layers: int = LAYERS, **settings: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def records() -> list[tuple[str, str]]:
    found = memeff_compile.last_report().records
    assert not [r for r in found if r.action == "internal_error"], str(found)
    return [(r.action, r.code) for r in found if r.pass_name == NAME]


FIRED = [("rewrote", "rewrote")] * LAYERS


@torch.no_grad()
def decode(model: Any, step: Any, prompt: Tensor, steps: int) -> tuple[Tensor, StaticCache]:
    """Fill a cache eagerly, then decode greedily with `step`; return all logits and the cache."""
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    out = model(input_ids=prompt, past_key_values=cache)
    logits = []
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        out = step(input_ids=token, past_key_values=cache)
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("family", ["Llama", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_decoding_equals_eager_in_logits_and_cache(family: str) -> None:
    model = make(family)
    prompt = torch.randint(2, 64, (3, 5), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(
        model, backend="memeff", options={"memeff.inner": "eager"}, fullgraph=True
    )
    expected, cache = decode(model, model, prompt, 4)
    found, ours = decode(model, compiled, prompt, 4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    for layer, (a, b) in enumerate(zip(ours.layers, cache.layers, strict=True)):
        # After the first attention, written values differ by rounding order.
        tolerance = {"rtol": 0, "atol": 0} if layer == 0 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(a.keys, b.keys, **tolerance)
        torch.testing.assert_close(a.values, b.values, **tolerance)
        assert int(a.cumulative_length) == int(b.cumulative_length) == 9
        assert a.keys[:, :, 9:].count_nonzero() == 0
    assert records()[:LAYERS] == FIRED
    assert set(records()) == set(FIRED)
    assert "scaled_dot_product" not in memeff_compile.graphs()[-1].after


def test_several_tokens_in_one_step_are_served() -> None:
    """As in assisted decoding: more than one query, on a filled cache."""
    model = make("Llama", layers=1)
    ids = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    logits = []
    for step in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        with torch.no_grad():
            model(input_ids=ids[:, :5], past_key_values=cache)
            logits.append(step(input_ids=ids[:, 5:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)
    assert records() == FIRED[:1]


@pytest.mark.parametrize(
    "padded",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["no padding", "left padding"],
)
def test_generate_gives_the_same_tokens(padded: bool) -> None:
    """generate() builds its mask outside of the graph; the op takes it as it is."""
    model = make("Llama")
    ids = torch.randint(2, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)
    if padded:
        ids[0, :2], seen[0, :2] = 0, 0
    settings = CompileConfig(
        backend="memeff", options={"memeff.inner": "eager"}, mode=None, fullgraph=True
    )
    settings._compile_all_devices = True
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": seen}
    expected = model.generate(ids, **given)
    found = model.generate(ids, cache_implementation="static", compile_config=settings, **given)
    assert torch.equal(found, expected)
    assert records() == FIRED
    assert memeff_compile.graphs()[-1].after.count("memeff.kv_cache_last(") == 1


def test_eager_attention_is_left_alone() -> None:
    model = make("Llama", layers=1, attn_implementation="eager")
    prompt = torch.randint(2, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    expected, _ = decode(model, model, prompt, 2)
    found, _ = decode(model, compiled, prompt, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert records() == []


def test_training_beside_it_is_left_alone() -> None:
    model = make("Llama", layers=1).train()
    ids = torch.randint(2, 64, (2, 8))
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    compiled(input_ids=ids, labels=ids).loss.backward()
    assert records() == []


@pytest.mark.slow
def test_a_sliding_window_gives_the_same_tokens() -> None:
    """Its layers keep only their last tokens; how they move them does not matter."""
    model = make("Mistral", sliding_window=8)
    prompt = torch.randint(2, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    expected, _ = decode(model, model, prompt, 8)
    found, _ = decode(model, compiled, prompt, 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert set(records()) == set(FIRED)
