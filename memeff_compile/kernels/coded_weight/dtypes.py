"""Compress fp32 and fp16 weights: their upper bits are encoded like bf16 weights, and the other
bits are stored unchanged.

The upper 16 bits of an fp32 number form a bf16 number. An fp16 number has 5 exponent bits and 10
mantissa bits. Its sign, its exponent and its upper 7 mantissa bits form a bf16 number with a small
exponent. So codecs only have to encode bf16 weights, and decoding restores every bit of the fp32 or
fp16 weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Format

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
LEFT = 3
"""Bits of an fp16 mantissa that are not coded; eight weights store them in three bytes."""
RUN = 1 << 23
"""Weights whose bits are packed at a time."""


def dtype_of(form: Format) -> torch.dtype:
    """Return the dtype that a weight has after decoding."""
    return DTYPES[form.dtype]


def split(weight: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Split an fp32 or fp16 weight into a bf16 weight, which a codec encodes, and the other bits.

    The other bits are the lower 16 bits of each fp32 number, or the lowest 3 of each fp16 number.
    """
    flat = weight.detach().contiguous().reshape(-1)
    if form.dtype == "fp32":
        halves = flat.view(torch.int16).view(-1, 2)  # the lower bits come first
        upper, rest = halves[:, 1].contiguous(), halves[:, 0].contiguous()
    else:
        bits = flat.view(torch.int16)
        upper = (bits & -0x8000) | ((bits & 0x7FFF) >> LEFT)
        rest = torch.cat([_packed(bits[run]) for run in _runs(bits.numel())])
    return upper.view(torch.bfloat16).view(weight.shape), rest


def join(upper: Tensor, rest: Tensor, form: Format, shape: Sequence[int]) -> Tensor:
    """Rebuild the original weight from the two tensors that `split` returned."""
    patterns = upper.reshape(-1).view(torch.int16)
    count = math.prod(shape)
    if form.dtype == "fp32":
        halves = torch.stack([rest[:count], patterns], 1)
        return halves.view(torch.float32).view(*shape)
    bits = (patterns & -0x8000) | ((patterns & 0x0FFF) << LEFT)
    for run in _runs(count):
        bits[run] |= _unpacked(rest[run.start // 8 * LEFT :], run.stop - run.start)
    return bits.view(torch.float16).view(*shape)


def _runs(count: int) -> Iterator[slice]:
    return (slice(start, min(start + RUN, count)) for start in range(0, count, RUN))


def _places(like: Tensor) -> Tensor:
    return LEFT * torch.arange(8, dtype=torch.int32, device=like.device)


def _packed(bits: Tensor) -> Tensor:
    low = F.pad((bits & 7).int(), (0, -bits.numel() % 8)).view(-1, 8)
    words = (low << _places(bits)).sum(1, dtype=torch.int32)
    return torch.stack([words, words >> 8, words >> 16], 1).to(torch.uint8).view(-1)


def _unpacked(rest: Tensor, count: int) -> Tensor:
    groups = -(-count // 8)
    low, middle, high = rest[: LEFT * groups].view(-1, LEFT).int().unbind(1)
    words = low | (middle << 8) | (high << 16)
    return ((words[:, None] >> _places(rest)) & 7).view(-1)[:count].to(torch.int16)
