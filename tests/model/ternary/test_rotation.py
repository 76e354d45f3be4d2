"""The rotation of hidden states keeps a model's logits, and leaves a model that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.errors import OptionError
from memeff_compile.model import rotate_hidden_states_
from memeff_compile.model.ternary.rotation import rotation
from tests.support.cached_models import make, prompt

FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Mistral": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": False},
}


def trained(family: str) -> Any:
    """Return a model whose hidden states have a large constant channel, and whose norms and biases
    have weights like a trained model's."""
    model = make(family, **FAMILIES[family])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                weight.copy_(torch.rand_like(weight) + 0.2)
            elif "self_attn" in name:
                weight.mul_(8)
        model.model.embed_tokens.weight[:, 3] = 0.5
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(prompt()).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay(family: str) -> None:
    model = trained(family).train()
    wanted = logits(model.eval())
    model.train()
    parameters = dict(model.named_parameters())
    assert rotate_hidden_states_(model) is model
    assert model.training
    now = dict(model.named_parameters())
    assert all(now[name] is weight for name, weight in parameters.items())
    torch.testing.assert_close(logits(model.eval()), wanted, rtol=1e-3, atol=1e-3)


def test_tied_weights_part_and_the_model_saves_and_loads(tmp_path: Path) -> None:
    model = trained("Qwen2")
    wanted = logits(rotate_hidden_states_(model))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    said = str(memeff_compile.verb_report(model))
    assert said.startswith("rotate_hidden_states_: hidden states of 2 layers rotated")
    assert "no longer tied" in said
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), wanted)


def test_undo_says_that_a_rotated_model_stays_rotated() -> None:
    model = rotate_hidden_states_(trained("Llama"))
    memeff_compile.ternarize_(model, "a4.8")
    said = memeff_compile.undo(model)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert "stay rotated" in said.left["(model)"]
    assert "stay rotated" in memeff_compile.undo(nn.Sequential(model)).left["(model)"]


def test_weights_of_16_bits_and_compiled_wrappers_are_rotated() -> None:
    model = trained("Llama").bfloat16()
    wanted = logits(model)
    rotate_hidden_states_(cast("nn.Module", torch.compile(model, backend="eager")))
    error = (logits(model) - wanted).float().norm() / wanted.float().norm()
    assert 0 < error < 0.05
    assert memeff_compile.verb_report(model) is not None


def test_autocast_and_attention_of_16_bits_alone_do_not_affect_the_check() -> None:
    model = trained("Llama")
    wanted = logits(model)
    chosen: list[str] = []

    def choose(name: str) -> None:
        chosen.append(name)
        model.config._attn_implementation = name

    model.set_attn_implementation = choose
    choose("flash_attention_2")
    with torch.autocast("cpu", torch.bfloat16):
        rotate_hidden_states_(model)
    assert chosen == ["flash_attention_2", "sdpa", "flash_attention_2"]
    choose("sdpa")
    torch.testing.assert_close(logits(model), wanted, rtol=1e-3, atol=1e-3)


def test_logits_of_16_bit_models_are_compared_in_float32() -> None:
    model = trained("Llama").bfloat16()  # large channels alone make such logits inexact
    seen: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    rotate_hidden_states_(model)
    assert seen == [torch.float32] * 2
    assert model.lm_head.weight.dtype == torch.bfloat16


def wrapped_linear(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj = nn.Sequential(model.model.layers[1].mlp.gate_proj)


def shared_linear(model: Any) -> None:
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def changed_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: before(x).abs()  # no rotation passes through abs


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Gemma": (lambda: make("Gemma"), "GemmaTextScaledWordEmbedding|Gemma.*RMSNorm is not"),
    "Gemma 3": (lambda: make("Gemma3Text"), "also has post_feedforward|also has pre_feedforward"),
    "GPT-2": (lambda: gpt2(), "GPT2LMHeadModel has no model"),
    "Phi-3": (lambda: make("Phi3"), "has no k_proj, q_proj, v_proj"),
    "no language model": (lambda: nn.Sequential(nn.Linear(4, 4)), "Sequential has no lm_head"),
    "an adapter": (lambda: broken(wrapped_linear), "gate_proj is a Sequential"),
    "a shared weight": (lambda: broken(shared_linear), "share a weight"),
    "another forward": (lambda: broken(changed_forward), "logits would change"),
    "ternary": (lambda: memeff_compile.ternarize_(make()), "q_proj is a TernaryLinear"),
}


def broken(change: Any) -> Any:
    model = make(tie_word_embeddings=True)
    change(model)
    return model


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_refused_stays_as_it_was(name: str) -> None:
    build, why = REFUSED[name]
    model = build()
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", None)
    before = {path: (weight, weight.clone()) for path, weight in model.named_parameters()}
    with pytest.raises(OptionError, match=why):
        rotate_hidden_states_(model)
    now = dict(model.named_parameters())
    assert now.keys() == before.keys()
    assert all(now[path] is weight for path, (weight, _) in before.items())
    assert all(torch.equal(now[path], copy) for path, (_, copy) in before.items())
    assert getattr(getattr(model, "config", None), "tie_word_embeddings", None) == tied
    assert memeff_compile.verb_report(model, "rotate_hidden_states_") is None


def test_a_large_channel_is_spread_over_all_channels() -> None:
    model = make()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 100
    before = model.model.embed_tokens.weight.clone()
    rows = rotate_hidden_states_(model).model.embed_tokens.weight
    torch.testing.assert_close(rows.norm(dim=-1), before.norm(dim=-1))
    assert rows.abs().amax() < before.abs().amax() / 2


@pytest.mark.parametrize("size", [24, 32, 36])
def test_rotations_are_orthogonal(size: int) -> None:
    one = torch.eye(size, dtype=torch.float64)
    found = rotation(size, 1)
    torch.testing.assert_close(found.t() @ found, one)
