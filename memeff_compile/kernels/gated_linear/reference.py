"""The reference implementation: compute the gated product and its gradients, a few thousand numbers
at a time.

This implementation works on any device, computes in fp32 (fp64 for fp64 inputs), and rounds each
result once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 1 << 16
"""Numbers that are computed at a time: about ten fp32 tensors of this size exist at once."""


def product(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    """Write act(gate) * up to the separate buffer `out`.

    All three tensors are (n,) of one floating dtype."""
    for first in range(0, gate.numel(), PIECE):
        part = slice(first, first + PIECE)
        out[part] = _value(_wide(gate[part]), activation) * _wide(up[part])


def gradients(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> None:
    """Overwrite `gate` with its gradient, `up` with its gradient, and `grad` with the product
    act(gate) * up.

    All three tensors are (n,) of one floating dtype. At first, `grad` is the gradient of
    act(gate) * up.
    """
    for first in range(0, gate.numel(), PIECE):
        part = slice(first, first + PIECE)
        g, u, d = _wide(gate[part]), _wide(up[part]), _wide(grad[part])
        value = _value(g, activation)
        grad_gate, grad_up, again = _times_slope(d * u, g, activation), d * value, value * u
        gate[part], up[part], grad[part] = grad_gate, grad_up, again


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _value(g: Tensor, activation: str) -> Tensor:
    """Return the activation function's value act(g)."""
    if activation == "silu":
        return g * torch.sigmoid(g)
    if activation == "gelu":
        return 0.5 * g * (1 + torch.erf(g * math.sqrt(0.5)))
    if activation == "gelu_tanh":
        return 0.5 * g * (1 + _tanh_inner(g))
    return torch.relu(g)


def _times_slope(grad: Tensor, g: Tensor, activation: str) -> Tensor:
    """Return grad times the activation function's derivative act'(g)."""
    if activation == "silu":
        s = torch.sigmoid(g)
        return grad * (s * (1 + g * (1 - s)))
    if activation == "gelu":
        density = torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))
        return grad * (0.5 * (1 + torch.erf(g * math.sqrt(0.5))) + g * density)
    if activation == "gelu_tanh":
        t = _tanh_inner(g)
        inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * g * g)
        return grad * (0.5 * (1 + t) + 0.5 * g * (1 - t * t) * inner_slope)
    return torch.where(g <= 0, torch.zeros_like(grad), grad)


def _tanh_inner(g: Tensor) -> Tensor:
    return torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g * g * g))
