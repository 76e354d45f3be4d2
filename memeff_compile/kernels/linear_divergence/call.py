"""The request that both engines take, its results, and the sizes of blocks.

Axis letters: N rows (tokens), D and K features of student and teacher, V classes, R rows of a
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sympy
import torch
from torch import Tensor

from ..checks import wide
from ..sizes import Size

MIB = 2**20


class Coefficients(NamedTuple):
    """The factors of the six sums over the classes, and the teacher's share in the mixture."""

    q_log_q: float = 0.0
    q_log_p: float = 0.0
    p_log_p: float = 0.0
    p_log_q: float = 0.0
    q_log_m: float = 0.0
    p_log_m: float = 0.0
    share: float = 0.0

    @property
    def has_mixture(self) -> bool:
        """Return whether a sum reads the mixture."""
        return self.q_log_m != 0 or self.p_log_m != 0

    @property
    def has_centre(self) -> bool:
        """Return whether a row's gradient subtracts a sum over its classes."""
        return self.has_mixture or self.p_log_p != 0 or self.p_log_q != 0

    def settled(self) -> Coefficients:
        """Return equal coefficients in which the mixture is neither p nor q."""
        a1, a2, a3, a4, a5, a6, share = self
        if share == 0:  # m is p
            return Coefficients(a1, a2 + a5, a3 + a6, a4)
        if share == 1:  # m is q
            return Coefficients(a1 + a5, a2, a3, a4 + a6)
        return self if self.has_mixture else self._replace(share=0.0)


class Request(NamedTuple):
    """The tensors and settings of a call; rows are one axis."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    teacher: Tensor  # (N, K), or (N, V) logits if there is no weight
    teacher_weight: Tensor | None  # (V, K)
    teacher_bias: Tensor | None  # (V,)
    coefficients: Coefficients
    scale: float
    teacher_scale: float
    workspace: int  # in bytes; 0 is automatic

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:
        """Return the number of classes."""
        return self.weight.shape[0]

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of the results per row."""
        return wide(self.hidden.dtype)


class Found(NamedTuple):
    """A number per row, and the gradients that were asked for."""

    rows: Tensor  # (N,) fp32 or fp64
    hidden: Tensor | None = None  # (N, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)


def wanted(given: Request, factors: Tensor | None, mask: Sequence[bool]) -> tuple[bool, ...]:
    """Return which gradients are computed: none without factors of the rows."""
    return tuple(
        each and factors is not None and (place < 2 or given.bias is not None)
        for place, each in enumerate(mask)
    )


# The engine `reference`: two blocks of wide logits, log-probabilities in place, and up to three
# more while the gradient is formed.
REFERENCE_BLOCKS = 5
REFERENCE_AUTO_BYTES = 32 * MIB
REFERENCE_MIN_ROWS = 16


def reference_rows(rows: Size, vocab: Size, workspace: int, itemsize: int) -> sympy.Expr:
    """Return how many rows of logits the engine `reference` has at once."""
    per_row = REFERENCE_BLOCKS * max(itemsize, 4) * sympy.sympify(vocab)
    budget = workspace or REFERENCE_AUTO_BYTES
    fitting = sympy.Max(sympy.floor(budget / per_row), 1 if workspace else REFERENCE_MIN_ROWS)
    return sympy.Min(fitting, sympy.Max(sympy.sympify(rows), 1))


# The engine `kept_logits`. A chunk is the columns whose logits one program reads, and keeps
# relative to their maximum. A strip is the columns of one product in fp32: eight chunks, which are
# 128 tiles of 128 x 256 at 512 rows, about a wave of 132 processors, and stay in the L2 cache.
CHUNK = 2048
TILE = 256
STRIP = 8 * CHUNK
# Slots of R rows of kept logits. The student's logits of one block go to slot k and become their
# gradient there, the teacher's to slot k + 1, which is free again afterwards. So four blocks leave
# their gradients next to each other, and one product adds all of them to the weight's gradient,
# which is read, rounded and written a fourth as often.
SLOTS = 5
ROW_STEP = 128  # rows of a tile of cuBLAS
HEIGHT = 512  # rows of a block at which its products are fast, and multiples of it
AUTO_BYTES = 640 * MIB


class Slots(NamedTuple):
    """Rows of a slot, the number of slots, and whether the weight's gradient lends the last."""

    rows: int
    number: int
    is_lent: bool = False

    @property
    def blocks(self) -> int:
        """Return the slots that are allocated."""
        return self.number - self.is_lent

    @property
    def together(self) -> int:
        """Return the rows whose gradients are multiplied together."""
        return self.rows * (self.number - 1)


def slots_for(rows: int, vocab: int, workspace: int, itemsize: int) -> Slots:
    """Choose the slots within the workspace, and no more than the rows need.

    Blocks of 512 rows come before more slots. Which is faster for a large vocabulary was not timed
    side by side.
    """
    rows = max(rows, 1)
    fitting = (workspace or AUTO_BYTES) // (vocab * kept_bytes(itemsize))  # rows of all slots
    height = max(fitting // SLOTS // HEIGHT * HEIGHT, HEIGHT)
    if fitting < 2 * HEIGHT:
        height = max(fitting // 2 // ROW_STEP * ROW_STEP, min(fitting // 2, ROW_STEP), 1)
    if rows < height:
        height = min(height, -(-rows // ROW_STEP) * ROW_STEP)
    number = min(SLOTS, fitting // height, -(-rows // height) + 1)
    return Slots(height, max(number, 2))


def kept_bytes(itemsize: int) -> int:
    """Return the bytes of a kept logit: fp16 for inputs of 16 bits, else fp32."""
    return min(itemsize, 4)


def strip_bytes(rows: int, vocab: int) -> int:
    """Return the bytes of a strip of products."""
    return 4 * rows * min(STRIP, vocab)


def spans(stop: int, width: int) -> list[tuple[int, int]]:
    """Cut [0, stop) into spans of `width`; the last one may be shorter."""
    return [(first, min(first + width, stop)) for first in range(0, stop, width)]
