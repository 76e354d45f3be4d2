"""The bytes that a divergence needs without and with this package's op, as formulas in N (rows) and
V (classes).

The formulas count the largest buffers, except the inputs and the returned gradients.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from ..sizes import Size
from .call import (
    REFERENCE_BLOCKS,
    ROW_STEP,
    TILE,
    TILE_WITH_BIAS,
    Slots,
    columns_of,
    kept_bytes,
    lent_rows,
    reference_rows,
    slots_for,
    strip_bytes,
)

# for this many rows of 128256 and 131072 classes, the op took 1.03 times as long as Inductor's
# code; for 1024 rows, 1.09 times
FEW_ROWS = 2048
BYTES_PER_ROW = 64  # an upper bound for results, factors and masks


def bytes_before(
    rows: Size,
    vocab: Size,
    *,
    dtype: torch.dtype,  # of the student's logits
    teacher_bytes: int,  # of a teacher's logit that is computed for this loss, else 0
    training: bool = True,
    compiled: bool = True,  # Inductor if true, eager otherwise
) -> sympy.Expr:
    """Return the peak bytes of the N x V buffers that a divergence needs without the op
    `memeff::linear_divergence`.

    Inductor keeps the logits of student and teacher, and overwrites one of these two tensors with
    the gradient. Eager PyTorch also keeps the log-probabilities of student and teacher, and the
    divergence of every class. If `training` is true, the formula for eager PyTorch counts one more
    N x V tensor, for gradients.
    """
    per_logit = dtype.itemsize + teacher_bytes
    if not compiled:
        per_logit += (4 if training else 3) * max(dtype.itemsize, 4)
    return per_logit * sympy.sympify(rows) * sympy.sympify(vocab)


def temporary_bytes(
    rows: Size,
    vocab: int,
    *,
    dtype: torch.dtype,
    engine: str,
    workspace: int,
    training: bool = True,
    depth: int = 0,  # of a weight whose gradient is computed, and may lend its memory; 0 for none
) -> sympy.Expr:
    """Return the bytes of the temporary buffers of one call of `memeff::linear_divergence`.

    The buffers contain mainly logits and their gradients.

    `workspace` is the memory limit in bytes, or 0 for a default limit. The limit determines how
    many rows (tokens) have logits in memory at one time. If the number of rows is symbolic, return
    an upper bound."""
    itemsize = dtype.itemsize
    if engine == "reference":
        height = reference_rows(rows, vocab, workspace, itemsize)
        return REFERENCE_BLOCKS * max(itemsize, 4) * vocab * height
    sums = 4 * vocab if training else 0
    how: dict[str, Any] = {"training": training, "depth": depth}
    if isinstance(rows, int):
        return sympy.Integer(_slot_bytes(rows, vocab, workspace, itemsize, **how) + sums)
    most = _slot_bytes(2**40, vocab, workspace, itemsize, **how)
    columns = columns_of(vocab, TILE)
    per_row = (
        columns * kept_bytes(itemsize) + strip_bytes(1, vocab) + 16 * columns // TILE_WITH_BIAS
    )
    # a slot more than blocks, of whole tiles
    return sympy.Min(most, per_row * (sympy.Rational(5, 4) * rows + 5 * ROW_STEP)) + sums


def _slot_bytes(
    rows: int, vocab: int, workspace: int, itemsize: int, *, training: bool, depth: int
) -> int:
    columns = columns_of(vocab, TILE)
    lent = lent_rows((vocab, depth), columns, TILE, itemsize)
    slots: Slots = slots_for(rows, columns, workspace, itemsize, trains=training, lent=lent)
    kept = slots.allocated * columns * kept_bytes(itemsize)
    # for GPUs on which the kernel of the matrix product does not store the logits itself
    kept += strip_bytes(slots.rows, vocab)
    return kept if slots.is_lent else kept + 16 * slots.rows * columns // TILE


def bytes_after(rows: Size, held: Size) -> sympy.Expr:
    """Return the bytes that a divergence needs with the op `memeff::linear_divergence`.

    `held` is the size of the op's temporary buffers, as `temporary_bytes` returns it. The function
    adds BYTES_PER_ROW for each row (token).
    """
    return sympy.sympify(held) + BYTES_PER_ROW * sympy.sympify(rows)


def cost_of_few_rows(rows: int) -> str:
    """Return a remark for memeff_compile's report of rewrites, or "" for more than FEW_ROWS rows.

    If a divergence loss had at most FEW_ROWS rows (tokens), the fused op was slower than Inductor's
    code on an H200.

    The probable cause is a kernel that Inductor's code does not need. The kernel multiplies the
    weight's gradient by a single number: the gradient that autograd passes in for the loss. At 2048
    rows, this kernel takes 0.7 ms of the 17.8 ms that all kernels of the loss take together. These
    times are for a direct call of the loss function. The loss in a compiled graph was not profiled.
    """
    if rows > FEW_ROWS:
        return ""
    return f"; {FEW_ROWS} rows or fewer take 1.03 to 1.09 times Inductor's time on an H200"
