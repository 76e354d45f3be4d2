"""Unmodified transformers models: attention is recovered where it can be, and stays the same.

"The same attention": the rewritten model differs from the model by no more than 1.5 times the
difference between sdpa and eager attention, or by rounding of the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.report import Record
from tests.support.zoo import FAMILIES, VOCABULARY, build, inputs

transformers = pytest.importorskip("transformers", reason="the zoo is built from its configs")

BY_NAME = {family.name: family for family in FAMILIES}
NAME = "recover_attention"
LENGTH = 12
ROUNDING = 2e-6


def compiled(model: nn.Module, inner: str = "eager") -> Any:
    torch._dynamo.reset()
    memeff_compile.reset()
    return torch.compile(model, backend="memeff", options={"memeff.inner": inner})


def records() -> list[Record]:
    return [r for r in memeff_compile.last_report().records if r.pass_name == NAME]


def answers() -> set[str]:
    """Return each rewrite or the reason against it, in one word."""
    return {r.code if r.action == "declined" else "rewrote" for r in records()}


def padding(side: str, ids: Tensor) -> dict[str, Tensor]:
    if side == "none":
        return {}
    mask = torch.ones_like(ids)
    mask[0, (slice(0, 3) if side == "left" else slice(-3, None))] = 0
    return {"attention_mask": mask}


def model_of(name: str, attention: str) -> nn.Module:
    overrides: dict[str, Any] = {"sliding_window": 4} if name == "gemma2" else {}
    try:
        return build(BY_NAME[name], attn_implementation=attention, **overrides)
    except ValueError as error:
        pytest.skip(f"this transformers has no such attention for {name}: {error}")


@dataclass(frozen=True)
class Scenario:
    """How a decoder is called, beyond its ids."""

    name: str

    def call(self, run: Any, model: Any, ids: Tensor, extra: dict[str, Tensor]) -> Tensor:
        """Return the logits of the last call."""
        if self.name == "train":
            return run(input_ids=ids, labels=ids, **extra).logits + 0
        if self.name == "train without cache":
            return run(input_ids=ids, labels=ids, use_cache=False, **extra).logits + 0
        with torch.no_grad():
            if self.name == "prefill":
                return run(input_ids=ids, **extra).logits
            cache = self.cache(model)
            model(input_ids=ids[:, :-1], past_key_values=cache, **_shortened(extra))
            return run(input_ids=ids[:, -1:], past_key_values=cache, **extra).logits

    def cache(self, model: Any) -> Any:
        if self.name == "static decode":
            return transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 4)
        return transformers.DynamicCache(config=model.config)


def _shortened(extra: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:, :-1] for name, value in extra.items()}


SCENARIOS = [
    Scenario(name)
    for name in ("train", "train without cache", "prefill", "dynamic decode", "static decode")
]


def assert_same_attention(name: str, attention: str, scenario: Scenario, side: str) -> None:
    model, other = model_of(name, attention), None
    for different in ("eager", "sdpa"):
        if different != attention and name != "gemma2":  # its sdpa has no softcap
            other = model_of(name, different)
            other.load_state_dict(model.state_dict())
    ids = inputs(BY_NAME[name], length=LENGTH)["input_ids"]
    extra = padding(side, ids)
    expected = scenario.call(model, model, ids, extra)
    found = scenario.call(compiled(model), model, ids, extra)
    allowed = ROUNDING * float(expected.detach().abs().max())
    if other is not None:
        between = (scenario.call(other, other, ids, extra) - expected)[kept(extra, expected)]
        allowed += 1.5 * float(between.detach().abs().max())
    difference = (found - expected)[kept(extra, expected)]
    assert float(difference.detach().abs().max()) <= allowed
    assert not [r for r in memeff_compile.last_report().records if r.action == "internal_error"]


def kept(extra: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Return which tokens are not padding: for padding the two attentions differ anyway."""
    mask = extra.get("attention_mask")
    if mask is None:
        return torch.ones(logits.shape[:2], dtype=torch.bool)
    return mask[:, -logits.shape[1] :].bool()


FAST = {"train without cache", "static decode"}


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, marks=() if s.name in FAST else pytest.mark.slow) for s in SCENARIOS],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_attends_as_before(attention: str, scenario: Scenario) -> None:
    assert_same_attention("llama", attention, scenario, "none")
    is_left = scenario.name == "static decode"
    if is_left:
        assert answers() <= {"cache_length"}  # rewrite_kv_update takes such sites where it pays
    elif attention == "eager" or scenario.name == "train without cache":
        assert answers() == {"rewrote"}  # on every stack
    else:
        assert answers() <= {"rewrote"}  # no rewrite is needed from transformers 5.20 on
    if not is_left:
        assert "enable_gqa=True" in memeff_compile.graphs()[-1].after


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_padding_is_named_and_left_alone(side: str) -> None:
    assert_same_attention("llama", "sdpa", Scenario("train"), side)
    assert answers() == {"padding_mask"}
    graph = memeff_compile.graphs()[-1]
    assert "enable_gqa=True" not in graph.after


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gemma2_names_what_it_has_beyond_a_causal_mask(attention: str) -> None:
    assert_same_attention("gemma2", attention, Scenario("train"), "none")
    expected = {"softcap"} if attention == "eager" else {"rewrote", "window_mask"}
    assert answers() == expected


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "gpt2"])
def test_other_decoders_attend_as_before(name: str) -> None:
    assert_same_attention(name, "eager", Scenario("train"), "none")
    assert answers() == {"rewrote"}


@pytest.mark.parametrize("side", ["none", pytest.param("right", marks=pytest.mark.slow)])
def test_encoders_attend_as_before(side: str) -> None:
    assert_same_attention("bert", "eager", Scenario("train"), side)
    assert answers() == ({"rewrote"} if side == "none" else {"padding_mask"})


@pytest.mark.slow
def test_whisper_attends_as_before() -> None:
    """Encoder, decoder and cross attention: three sites in one model."""
    model = model_of("whisper", "eager")
    batch = inputs(BY_NAME["whisper"])
    expected = model(**batch).logits
    torch.testing.assert_close(compiled(model)(**batch).logits + 0, expected, rtol=1e-5, atol=1e-5)
    assert sum(r.sites for r in records() if r.action == "rewrote") >= 2
    assert answers() <= {"rewrote", "mask_is_bias"}  # a mask from another graph is not known


def test_an_image_encoder_attends_as_before() -> None:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        attn_implementation="eager",
    )
    model = transformers.ViTModel(config).eval()
    pixels = torch.randn(2, 3, 16, 16)
    expected = model(pixels).last_hidden_state
    found = compiled(model)(pixels).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert answers() == {"rewrote"}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "left"])
def test_generation_gives_the_same_tokens(side: str) -> None:
    model = model_of("llama", "eager").eval()
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    extra = padding(side, ids)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **extra, **settings)
    model.forward = compiled(model.forward, "eager")
    assert torch.equal(model.generate(ids, **extra, **settings), expected)
    assert "internal_error" not in {r.code for r in memeff_compile.last_report().records}


def test_bf16_under_autocast_attends_as_before() -> None:
    model = model_of("llama", "eager")
    ids = inputs(BY_NAME["llama"])["input_ids"]
    exact = model(input_ids=ids).logits
    run = compiled(model, "aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(input_ids=ids).logits
        found = run(input_ids=ids).logits + 0
    assert found.dtype == rounded.dtype
    ours, theirs = ((t.float() - exact).norm().item() for t in (found, rounded))
    assert ours <= 1.5 * theirs
    assert answers() == {"rewrote"}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_every_decoder_in_every_scenario(name: str, attention: str, side: str) -> None:
    for scenario in SCENARIOS:
        assert_same_attention(name, attention, scenario, side)
