"""Quantise query, key and value heads to few bits, for models that train with such heads.

Each token and head has one scale, and codes are symmetric around zero, as in a `KVCache` with
scheme "per_head". The backward pass treats the rounding as the identity (straight-through
gradient). Table 3 of BitNet a4.8 has three settings. The first has 4-bit keys and values, the
second 4-bit queries, keys and values. The third has 4-bit queries with 3-bit keys and values, where
the first token keeps 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import UnsupportedInputError
from ..checks import wide
from .layout import BITS


def require_bits(name: str, bits: int) -> int:
    """Return the number of bits if it is supported, otherwise raise an error."""
    if bits not in BITS:
        raise UnsupportedInputError(
            f"{name} is {bits!r}; one of {', '.join(map(str, BITS))} is needed."
        )
    return bits


def quantized_heads(
    x: Tensor,  # (B, H, N, D) floating
    bits: int,  # of a code: 8, 4, 3 or 2
    *,
    first: int = 0,  # the tokens before this position get `first_bits` instead
    first_bits: int = 4,  # as bits
) -> Tensor:
    """Return the heads of queries, keys or values after encoding and decoding.

    The backward pass passes the gradient on unchanged.
    """
    require_bits("bits", bits)
    values = x.to(wide(x.dtype))
    found = _rounded(values.detach(), bits, x.dtype)
    if first:
        require_bits("first_bits", first_bits)
        others = _rounded(values[:, :, :first].detach(), first_bits, x.dtype)
        found = torch.cat([others, found[:, :, first:]], 2)
    if torch.is_grad_enabled() and x.requires_grad:
        found = values + (found - values).detach()
    return found.to(x.dtype)


def _rounded(values: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return vectors of queries, keys or values, (B, H, N, D), after encoding and decoding.

    The result is code * step, with one quantisation step per token and head. The step is rounded to
    `dtype`, in which a cache stores it.
    """
    top = 2 ** (bits - 1) - 1
    step = (values.abs().amax(-1, keepdim=True) / values.new_full((1,), top)).to(dtype)
    step = step.masked_fill(step == 0, 1.0).to(values.dtype)
    return (values / step + 0.5).floor().clamp(-top, top) * step
