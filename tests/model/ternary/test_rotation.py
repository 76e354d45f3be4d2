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
from memeff_compile.model.ternary.rotation import CONSTANT, rotation
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


def inputs(model: Any, name: str) -> list[Tensor]:
    """Return the inputs of all linears of a name, one row for each token."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: found.append(given[0].flatten(0, -2)))
        for path, module in model.named_modules()
        if path.endswith(name)
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    return found


def int4_error(rows: Tensor) -> float:
    """Return the error of INT4, next to the part of the rows that differs between tokens."""
    unit = rows.abs().mean(-1, keepdim=True) / 7**0.5
    error = (rows / unit).round().clamp(-8, 7) * unit - rows
    return float(error.norm() / (rows - rows.mean(0)).norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", [None, prompt()], ids=["without text", "with text"])
def test_logits_stay(family: str, text: Tensor | None) -> None:
    model = trained(family).train()
    wanted = logits(model.eval())
    model.train()
    parameters = dict(model.named_parameters())
    assert rotate_hidden_states_(model, text) is model
    assert model.training
    now = dict(model.named_parameters())
    assert all(now[name] is weight for name, weight in parameters.items())
    torch.testing.assert_close(logits(model.eval()), wanted, rtol=1e-3, atol=1e-3)


def test_the_constant_part_is_small_and_four_bits_lose_less() -> None:
    plain, turned = trained("Llama"), trained("Llama")
    rotate_hidden_states_(plain)
    rotate_hidden_states_(turned, prompt())
    for name in ("v_proj", "up_proj"):
        for before, after in zip(inputs(plain, name), inputs(turned, name), strict=True):
            rest = after[:, CONSTANT:].abs().mean()
            assert after[:, :CONSTANT].mean(0).abs().amax() < 2.5 * rest
            assert int4_error(after[:, CONSTANT:]) < int4_error(before)


def test_tied_weights_part_and_the_model_saves_and_loads(tmp_path: Path) -> None:
    model = trained("Qwen2")
    wanted = logits(rotate_hidden_states_(model, prompt()))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    said = str(memeff_compile.verb_report(model))
    assert said.startswith("rotate_hidden_states_: hidden states of 2 layers rotated")
    assert "no longer tied" in said
    assert "constant part of the norms' outputs is in 16 channels" in said
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), wanted)


def test_undo_says_that_a_rotated_model_stays_rotated() -> None:
    model = rotate_hidden_states_(trained("Llama"))
    memeff_compile.ternarize_(model, "a4.8")
    said = memeff_compile.undo(model)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert "stay rotated" in said.left["(model)"]


def test_weights_of_16_bits_and_compiled_wrappers_are_rotated() -> None:
    model = trained("Llama").bfloat16()
    wanted = logits(model)
    rotate_hidden_states_(cast("nn.Module", torch.compile(model, backend="eager")), prompt())
    error = (logits(model) - wanted).float().norm() / wanted.float().norm()
    assert 0 < error < 0.05
    assert memeff_compile.verb_report(model) is not None


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
        rotate_hidden_states_(model, prompt())
    now = dict(model.named_parameters())
    assert now.keys() == before.keys()
    assert all(now[path] is weight for path, (weight, _) in before.items())
    assert all(torch.equal(now[path], copy) for path, (_, copy) in before.items())
    assert getattr(getattr(model, "config", None), "tie_word_embeddings", None) == tied
    assert memeff_compile.verb_report(model, "rotate_hidden_states_") is None


def test_text_and_sizes_are_checked() -> None:
    model = make(hidden_size=24, num_attention_heads=4, head_dim=6, num_key_value_heads=2)
    with pytest.raises(OptionError, match="token ids of shape"):
        rotate_hidden_states_(model, torch.ones(4))
    with pytest.raises(OptionError, match="without text"):
        rotate_hidden_states_(model, prompt())
    wanted = logits(model)
    rotate_hidden_states_(model)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-3, atol=1e-4)


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
    first = torch.linalg.qr(torch.randn(size, 2, dtype=torch.float64)).Q.t()
    for found in (rotation(size), rotation(size, 1, first)):
        torch.testing.assert_close(found.t() @ found, one)
    parts = (first @ rotation(size, 1, first)).square()
    torch.testing.assert_close(parts[:, CONSTANT:].sum(), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(parts.sum(-1), torch.ones(2, dtype=torch.float64))
