"""Bytes before and after, as formulas in N (rows) and V (classes).

They count the dominant buffers in addition to the inputs and the returned gradients.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size
from .call import (
    CHUNK,
    REFERENCE_BLOCKS,
    ROW_STEP,
    Slots,
    kept_bytes,
    reference_rows,
    slots_for,
    strip_bytes,
)

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
    """Return the peak bytes of N x V buffers that a divergence takes without this op.

    Inductor keeps the logits of both sides and writes the gradient over one of them. Eager also has
    both log-probabilities, the divergence of every class, and in the backward pass its gradients.
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
) -> sympy.Expr:
    """Return the bytes of the blocks that exist at one time; for symbolic rows an upper bound."""
    itemsize = dtype.itemsize
    if engine == "reference":
        height = reference_rows(rows, vocab, workspace, itemsize)
        return REFERENCE_BLOCKS * max(itemsize, 4) * vocab * height
    sums = 4 * vocab if training else 0
    if isinstance(rows, int):
        return sympy.Integer(_slot_bytes(rows, vocab, workspace, itemsize) + sums)
    most = _slot_bytes(2**40, vocab, workspace, itemsize)
    per_row = vocab * kept_bytes(itemsize) + strip_bytes(1, vocab) + 16 * -(-vocab // CHUNK)
    # a slot more than blocks, of whole tiles
    return sympy.Min(most, per_row * (sympy.Rational(5, 4) * rows + 5 * ROW_STEP)) + sums


def _slot_bytes(rows: int, vocab: int, workspace: int, itemsize: int) -> int:
    slots: Slots = slots_for(rows, vocab, workspace, itemsize)
    kept = slots.number * slots.rows * vocab * kept_bytes(itemsize)
    return kept + strip_bytes(slots.rows, vocab) + 16 * slots.rows * -(-vocab // CHUNK)


def bytes_after(rows: Size, held: Size) -> sympy.Expr:
    """Return the op's bytes, given the result of `temporary_bytes`."""
    return sympy.sympify(held) + BYTES_PER_ROW * sympy.sympify(rows)
