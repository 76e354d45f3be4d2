"""The quantisers of activations: a fixed list that graph passes and modules share.

A quantiser computes the maximum or mean of each token's absolute values, derives a scale from it,
and rounds the token's numbers to codes. Depending on the model, a value is code / `scale` or code *
`scale`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SQRT7 = math.sqrt(7.0)
PER_WORD = 16
"""Codes of two bits in a word of 32."""


@dataclass(frozen=True)
class Kind:
    """A way to quantise a token: its number format, its range of codes, and how the scale is
    chosen.
    """

    levels: float  # the code that the statistic is mapped to
    low: int  # the range of the codes
    high: int  # likewise
    is_mean: bool = False  # the statistic is the mean of the absolute values, else their maximum
    is_float: bool = False  # codes are twice the eight magnitudes of E2M1, not every integer
    keeps_half: bool = False  # the smaller half of a token, by absolute value, becomes zero first
    text: str = ""  # its name in reports and error messages


KINDS = {
    "int8": Kind(127.0, -128, 127, text="INT8 absmax"),
    "int4": Kind(SQRT7, -8, 7, is_mean=True, text="INT4 absmean"),
    "fp4": Kind(12.0, -12, 12, is_float=True, text="FP4 E2M1 absmax"),
    "topk8": Kind(127.0, -128, 127, keeps_half=True, text="top 50 %, then INT8 absmax"),
}

FP4_THRESHOLDS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
"""The boundaries between the codes 0, 1, 2, 3, 4, 6, 8, 12; ties go to the code with an even last
bit."""
FP4_CODES = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Quantizer:
    """A quantiser of one kind, and the details in which models implement this kind differently."""

    kind: str = "int8"  # a key of `KINDS`
    eps: float = 1e-5  # keeps the statistic above zero
    adds_eps: bool = False  # eps is added to the statistic; otherwise eps is its lower bound
    # the scale is the size of a step, statistic / levels, and x is divided by it; otherwise it is
    # levels / statistic, and x is multiplied by it
    is_step: bool = False
    is_native: bool = False  # computed in the dtype of x, each step rounded; otherwise in float32

    def arguments(self) -> tuple[str, float, bool, bool, bool]:
        """Return the fields of this quantiser in the order in which the `ternary_linear` ops take
        them."""
        return self.kind, self.eps, self.adds_eps, self.is_step, self.is_native


@dataclass(frozen=True)
class Entry:
    """The operations that a ternary linear layer applies to its input x before quantisation.

    A row of x contains the features of one token.
    """

    # if given, x becomes relu(x) ** 2 * up, the gate of a squared-ReLU GLU
    up: torch.Tensor | None = None
    # if given, the weight of an RMS norm that follows, computed in float32
    norm: torch.Tensor | None = None
    norm_eps: float = 0.0  # of that norm


NO_ENTRY = Entry()


def words_for(columns: int) -> int:
    """Return how many 32-bit words a row of `columns` codes takes."""
    return -(-columns // PER_WORD)


def kept(columns: int) -> int:
    """Return how many of a token's elements remain if half of the elements are set to zero.

    More elements remain if several elements are as large as the smallest one that remains.
    """
    return max(1, columns // 2)


def compute_dtype(dtype: torch.dtype, *, is_native: bool) -> torch.dtype:
    """Return the dtype in which a quantiser computes, given the dtype of its input."""
    return dtype if is_native else torch.float32
