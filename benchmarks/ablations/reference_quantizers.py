"""Quantisers of BitNet a4.8's ablations, as published, and a linear that trains with them.

They are references for tables: plain PyTorch with straight-through gradients. `ternarize_` offers
those that the paper keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5
SQRT7 = 7**0.5


def _bounded(statistic: Tensor) -> Tensor:
    return statistic.clamp(min=EPS)


def int8(x: Tensor) -> Tensor:
    """INT8 by the largest absolute value (equation 3)."""
    scale = 127.0 / _bounded(x.abs().amax(-1, keepdim=True))
    return (x * scale).round().clamp(-128, 127) / scale


def int4(x: Tensor) -> Tensor:
    """INT4 by the mean absolute value (equation 7)."""
    scale = SQRT7 / _bounded(x.abs().mean(-1, keepdim=True))
    return (x * scale).round().clamp(-8, 7) / scale


def int4_twice_mean(x: Tensor) -> Tensor:
    """INT4 by twice the mean, for the wide tails before the down projection (figures 4 and 5)."""
    scale = SQRT7 / _bounded(2 * x.abs().mean(-1, keepdim=True))
    return (x * scale).round().clamp(-8, 7) / scale


def int4_absmax(x: Tensor) -> Tensor:
    """INT4 by the largest absolute value (figure 6)."""
    scale = 7.0 / _bounded(x.abs().amax(-1, keepdim=True))
    return (x * scale).round().clamp(-8, 7) / scale


def floating(x: Tensor, exponent: int, mantissa: int) -> Tensor:
    """Floating point of few bits whose largest number is the token's (equations 8 and 9)."""
    largest = _bounded(x.abs().amax(-1, keepdim=True))
    bias = ((2 - 2**-mantissa) / largest).log2() + 2**exponent - 1
    above_zero = x.abs().clamp(min=torch.finfo(torch.float32).tiny)
    gamma = (above_zero.log2() + bias).floor().clamp(min=1)
    step = (gamma - mantissa - bias).exp2()
    return step * (x / step).round()


def fp4(x: Tensor) -> Tensor:
    """E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times the sixth of the largest."""
    return floating(x, 2, 1)


def fp4_e1m2(x: Tensor) -> Tensor:
    """E1M2: eight even steps up to the largest, the same numbers as `int4_absmax`."""
    return floating(x, 1, 2)


def topk8(x: Tensor) -> Tensor:
    """The larger half of a token in INT8 (equation 1); entries equal to the least of it stay."""
    size = x.abs()
    least = size.topk(max(1, x.shape[-1] // 2), dim=-1).values[..., -1:]
    return int8(x) * (size >= least)


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": int8,
    "int4": int4,
    "int4-2mean": int4_twice_mean,
    "int4-absmax": int4_absmax,
    "fp4": fp4,
    "fp4-e1m2": fp4_e1m2,
    "topk8": topk8,
}


def ternary(weight: Tensor) -> Tensor:
    """Round a weight to -1, 0, 1 times its mean absolute value (equation 2)."""
    scale = 1.0 / _bounded(weight.abs().mean())
    return (weight * scale).round().clamp(-1, 1) / scale


class ReferenceLinear(nn.Linear):
    """A linear in the published spelling: x + (q(x) - x).detach(), quantised in float32."""

    kind: str

    @classmethod
    def of(cls, linear: nn.Linear, kind: str) -> ReferenceLinear:
        """Return one with the very parameters of a dense linear."""
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight, new.bias, new.kind = linear.weight, linear.bias, kind
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features)."""
        x, w = input, self.weight
        x = x + (QUANTIZERS[self.kind](x.float()).to(x.dtype) - x).detach()
        return F.linear(x, w + (ternary(w) - w).detach(), self.bias)


def decibels(x: Tensor, quantizer: str) -> float:
    """Return the signal-to-noise ratio of a quantiser on some tokens."""
    noise = (QUANTIZERS[quantizer](x) - x).square().mean()
    return float(10 * math.log10(float(x.square().mean() / noise)))
