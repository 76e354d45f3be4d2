"""Linears of ternary training as they are published, and a model of each."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def tokens_int8(x: Tensor) -> Tensor:
    """Quantise tokens and scale them back: INT8 by the largest absolute value."""
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127) / scale


def tokens_int4(x: Tensor) -> Tensor:
    """INT4 by the mean of the absolute values, as in BitNet a4.8."""
    scale = 7**0.5 / (x.abs().mean(dim=-1, keepdim=True) + 1e-5)
    return (x * scale).round().clamp(-8, 7) / scale


def tokens_by_step(x: Tensor) -> Tensor:
    """INT8, written with the size of a step."""
    step = torch.amax(x.abs(), -1, keepdim=True).clamp_min(1e-5) / 127
    return torch.clamp(torch.round(x / step), -128, 127) * step


def tokens_wide(x: Tensor) -> Tensor:
    """INT8 in float32, whatever comes in."""
    return tokens_int8(x.float()).to(x.dtype)


def weights(w: Tensor) -> Tensor:
    """Round weights to -1, 0, 1 times their mean absolute value."""
    scale = 1.0 / w.abs().mean().clamp_(min=1e-5)
    return (w * scale).round().clamp_(-1, 1) / scale


def weights_by_step(w: Tensor) -> Tensor:
    """The same, written with the size of a step."""
    step = w.abs().mean().clamp(min=1e-5)
    return (w / step).round().clamp(-1, 1) * step


def weights_wide(w: Tensor) -> Tensor:
    """The same in float32."""
    return weights(w.float()).to(w.dtype)


class Detached(nn.Linear):
    """x + (q - x).detach()."""

    tokens = staticmethod(tokens_int8)
    weights = staticmethod(weights)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        x_quant = x + (self.tokens(x) - x).detach()
        return F.linear(x_quant, w + (self.weights(w) - w).detach(), self.bias)


class Int4(Detached):
    tokens = staticmethod(tokens_int4)


class ByStep(Detached):
    tokens = staticmethod(tokens_by_step)
    weights = staticmethod(weights_by_step)


class Wide(Detached):
    tokens = staticmethod(tokens_wide)
    weights = staticmethod(weights_wide)


class Summed(nn.Linear):
    """(q + x) - x.detach()."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        x_quant = (tokens_int8(x.detach()) + x) - x.detach()
        return F.linear(x_quant, (weights(w.detach()) + w) - w.detach(), self.bias)


class WithoutGrad(nn.Linear):
    """The rounding under no_grad, the sum outside."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        with torch.no_grad():
            x_rest, w_rest = tokens_int8(x) - x, weights(w) - w
        return F.linear(x + x_rest, w + w_rest, self.bias)


class Plain(nn.Linear):
    """No estimator: for inference."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(tokens_int8(x), weights(self.weight), self.bias)


class HandOn(torch.autograd.Function):
    """Quantise tokens; hand the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return tokens_wide(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ByFunction(nn.Linear):
    """A custom autograd Function for the tokens, a detach for the weight."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return F.linear(HandOn.apply(x), w + (weights_wide(w) - w).detach(), self.bias)


LAYERS: list[type[nn.Linear]] = [
    Detached,
    Int4,
    ByStep,
    Wide,
    Summed,
    WithoutGrad,
    ByFunction,
]


def online_layer() -> type[nn.Linear]:
    """Return transformers' AutoBitLinear, quantising online."""
    from transformers.integrations.bitnet import AutoBitLinear

    class Online(AutoBitLinear):  # type: ignore[misc]
        def __init__(self, columns: int, rows: int, bias: bool = True) -> None:
            super().__init__(columns, rows, bias, online_quant=True)

    return Online


class Block(nn.Module):
    """An embedding-like dense layer, two linears of one input, a squared-ReLU gate, one linear."""

    def __init__(self, layer: type[nn.Linear], width: int = 32, inner: int = 40) -> None:
        super().__init__()
        self.enter = nn.Linear(20, width)
        self.gate = layer(width, inner, bias=False)
        self.up = layer(width, inner, bias=True)
        self.down = layer(inner, 20, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        return self.down(F.relu(self.gate(x)).square() * self.up(x))


def tiny_bitnet(seed: int = 0) -> nn.Module:
    """Return a BitNet model of transformers with every projection quantising online."""
    from transformers import BitNetConfig, BitNetForCausalLM

    torch.manual_seed(seed)
    config = BitNetConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = BitNetForCausalLM(config)
    layer = online_layer()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            new = layer(module.in_features, module.out_features, module.bias is not None)
            new.load_state_dict(copy.deepcopy(module.state_dict()))
            model.set_submodule(name, new)
    return model
