"""The settings of quantised attention, and the groups of queries or keys that share a scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Keys that share a scale by default, and queries that share a subtracted mean."""

QUERY_ROWS = 64
"""Queries that are encoded together, if no mean is subtracted."""

MOST_CODE = 127
"""The largest code of 8 bits."""

TURNED = {
    "small": {64: (8, 8), 128: (8, 8), 256: (8, 8)},
    "8 bits": {64: (4, 8), 128: (1, 1), 256: (8, 1)},
}
"""Channels of a padded head that are Hadamard transformed together: equally far apart, and next to
each other. A thread loads eight neighbours. With 8-bit codes, a transform of more channels would
take too much time for what it gains, and so would any for heads of 128.
"""

MOST_SMALL = 7
"""The largest code of 4 bits with the paper's groups, which use 15 of the 16 codes."""

MOST_ODD = 15
"""The largest code of 4 bits by default: all 16 are odd numbers, and no code is zero."""

MOST_START = 14 << 18
"""The largest score of a mean, in steps of the product, from which an int32 sum starts. The sum
with the products of 256 codes stays below 2^22, so its bits can be read as those of a float.
"""

NARROWEST = 64
"""The fewest channels of a tile of codes."""

WIDEST_E4M3 = 128
"""The most channels of a head whose values are in E4M3.

Products of E4M3 numbers are summed apart from the sums of earlier tiles, and with wider heads there
are not enough registers for both. Products of fp16 numbers are added in the tensor cores, which is
faster for such heads and more accurate.
"""

MOST_SAMPLES = 8
"""The most blocks of `QUERY_ROWS` queries per head that are sampled for their mean."""

LEVELS = {
    "8b": "int8 scores, weights and values in E4M3; keys and values without their means",
    "8b+f16": "int8 scores, weights and values in fp16; keys and values without their means",
    "4b": "scores of 4-bit codes in int8, weights and values in E4M3; queries, keys and values "
    "without their means, heads turned",
}

PRECISION = ("4b", "8b", "8b+f16", "exact")
"""The levels, least precise first, then "exact"."""

GRANULARITIES = ("row", "token", "thread", "warp", "block", "tensor")
"""Which numbers share a scale: by default each query has one, and each block of keys; the other
choices are the paper's.
"""

SMOOTHABLE = "qkv"


@dataclass(frozen=True)
class Settings:
    """The settings of the arithmetic in one call of quantised attention: bits, scales and
    transforms."""

    limit: int = 127  # the largest code of queries and keys, 127, 15 (odd numbers only) or 7
    values: str = "e4m3"  # number format of weights and values, a key of `VALUES`
    granularity: str = "row"  # one of `GRANULARITIES`
    smooth: str = "kv"  # which of q, k and v have their means subtracted before coding
    with_lse: bool = True  # whether the logarithms of the sums are requested

    @property
    def aligns(self) -> bool:
        """Return whether keys are rounded so that their errors hardly change the scores with the
        mean query; SageAttention2 does not do this."""
        return self.granularity == "row" and "q" not in self.smooth

    @property
    def evens(self) -> bool:
        """Return whether queries and keys are scaled to the same energy (sum of squares) in each
        channel; SageAttention2 does not do this."""
        return self.granularity == "row"

    @property
    def turns(self) -> bool:
        """Return whether queries and keys get a Hadamard transform before they are rounded to
        codes.

        The Hadamard transform does not change the scores. The transform spreads a large number in
        one channel over several channels, so that quantisation steps become finer. The method
        `turned` returns how many channels the transform combines.
        """
        return self.granularity == "row"

    def turned(self, channels: int) -> tuple[int, int]:
        """Return how many groups of channels one Hadamard transform combines, and how many channels
        a group has.

        A group consists of neighbouring channels. The groups start at equal distances: `channels`
        divided by the number of groups.
        """
        return TURNED["small" if self.is_small else "8 bits"][channels]

    @property
    def is_small(self) -> bool:
        """Return whether codes have 4 bits (otherwise 8)."""
        return self.limit <= MOST_ODD

    @property
    def is_odd(self) -> bool:
        """Return whether all codes are odd integers, so that 4-bit codes use all 16 values."""
        return self.limit == MOST_ODD

    @property
    def widest(self) -> int:
        """Return the largest magnitude of a number, divided by its scale, before it is rounded.

        The scale is chosen so that no number exceeds this magnitude. If the codes are the odd
        integers from -15 to 15, the magnitude is 16: half of the step (2) more than the largest
        code. Otherwise the magnitude is the largest code.
        """
        return self.limit + self.is_odd

    @property
    def steps(self) -> int:
        """Return the largest factor by which a key's quantisation step may exceed the quantisation
        step of the key's block.

        The matrix product takes int8 operands, and a 4-bit code times this factor still fits into
        int8. So the kernel that writes the codes can multiply all codes of a key by an integer up
        to this factor. The kernel chooses this integer for each key. Each key then has its own
        quantisation step, although the attention kernel reads only one scale per block.
        """
        return max(1, MOST_CODE // self.limit) if self.granularity == "row" else 1

    @property
    def starts(self) -> bool:
        """Return whether the int32 sums of q k^T start from products of the keys with means of
        queries, not from zero.

        If the field `smooth` contains q, the mean of each block of queries is subtracted before
        rounding. The mean's products with the keys must then be added to the scores of the block's
        queries. For 8-bit codes, the result is false. Counted in units of the quantisation steps
        of 8-bit codes, the mean's products may be too large for the int32 sums.
        """
        return self.granularity == "row" and "q" in self.smooth and self.is_small

    @property
    def restores(self) -> bool:
        """Return whether the values' mean rounding error is added to attention's output."""
        return self.granularity == "row" and "v" in self.smooth and self.values == "e4m3"


@dataclass(frozen=True)
class Values:
    """A number format for softmax weights and values."""

    dtype: torch.dtype | None  # the format; None for fp32, which does not round
    top: float  # the largest weight of a tile, and of a channel of v, is scaled to this

    @property
    def offset(self) -> float:
        """Return the number that is subtracted from the running maximum of the scores.

        The running maximum minus this offset is subtracted from every score. A softmax weight is 2
        to the power of the result. So no softmax weight is larger than the field `top` of the
        number format (448 for E4M3).
        """
        return math.floor(1000.0 * math.log2(self.top)) / 1000.0

    def rounded(self, x: Tensor) -> Tensor:
        """Return `x`, rounded to this number format.

        `x` contains softmax weights or values in fp32. They are scaled so that no absolute value is
        larger than the field `top` of the number format (448 for E4M3).
        """
        if self.dtype is None:
            return x
        if self.dtype == torch.int8:
            return x.round()
        return x.to(self.dtype).to(x.dtype)


VALUES = {
    "e4m3": Values(torch.float8_e4m3fn, 448.0),
    "f16": Values(torch.float16, 448.0),
    "e5m2": Values(torch.float8_e5m2, 57344.0),
    "int8": Values(torch.int8, 127.0),
    "exact": Values(None, 1.0),
}
"""The formats of the op, `e4m3` and `f16`, and those that the reference compares them with."""


def settings_for(
    level: str,  # a key of `LEVELS`
    granularity: str = "row",  # one of `GRANULARITIES`
    smooth: str | None = None,  # some of the letters q, k and v; None for those of the level
    *,
    with_lse: bool = True,  # whether the logarithms of the sums are wanted
    has_fp8: bool = True,  # whether the device multiplies E4M3; if not, fp16 replaces it
    depth: int = NARROWEST,  # the head dimension
) -> Settings:
    """Return the arithmetic settings of a precision level."""
    small = MOST_ODD if granularity == "row" else MOST_SMALL
    limit = small if level == "4b" else MOST_CODE
    has_e4m3 = has_fp8 and level != "8b+f16" and depth <= WIDEST_E4M3
    values = "e4m3" if has_e4m3 else "f16"
    own = "qkv" if level == "4b" else "kv"
    return Settings(limit, values, granularity, own if smooth is None else smooth, with_lse)


def sampled_queries(queries: int) -> tuple[int, int, int]:
    """Return the stride between the sampled blocks of `QUERY_ROWS` queries, the number of sampled
    blocks, and the number of queries in these blocks."""
    blocks = -(-queries // QUERY_ROWS)
    stride = max(1, -(-blocks // MOST_SAMPLES))
    samples = -(-blocks // stride)
    last = (samples - 1) * stride * QUERY_ROWS
    return stride, samples, (samples - 1) * QUERY_ROWS + min(QUERY_ROWS, queries - last)


_SHARED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "row": (lambda at: at, lambda at: at // BLOCK),
    "token": (lambda at: at, lambda at: at),
    "thread": (lambda at: at // 32 * 8 + at % 8, lambda at: at // 64 * 4 + at % 8 // 2),
    "warp": (lambda at: at // 32, lambda at: at // 64),
    "block": (lambda at: at // 128, lambda at: at // 64),
    "tensor": (lambda at: at * 0, lambda at: at * 0),
}
"""For queries and keys: the group of rows with which a row shares its scale, by the row's
position."""


def groups_of(granularity: str, queries: Tensor, keys: Tensor) -> list[Tensor]:
    """Return two int64 tensors: the group index of each query, and the group index of each key.

    All queries of a group share one quantisation scale, and so do all keys of a group.
    """
    rules = zip(_SHARED[granularity], (queries, keys), strict=True)
    return [rule(torch.arange(rows.shape[2], device=rows.device)) for rule, rows in rules]
