"""Functions that list the rows (tokens) that a loss does not ignore, and copy these rows.

Another function gathers the numbers from which the gradients of a row's logits are computed.
Ignored rows are left out before any matrix product. No function here waits for the GPU or copies a
value from the GPU to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat import is_aligned
from .._triton.compat import described
from .._triton.launch import run_kernel, start
from . import rows_kernels as kernels
from .call import RowGradients, Saved, Settings
from .shapes import GATHERED, LISTED, Tiles, row_block


class Selection(NamedTuple):
    """The rows (tokens) that a loss does not ignore, as index tensors for kernels.

    The compact rows are the rows that are not ignored, numbered from 0. `order` contains the
    original row of each compact row. `place` contains the compact row of each original row. `kept`
    is the number of compact rows. These three fields are None if the call has no `ignore_index`, or
    also computes ignored rows.
    """

    target: Tensor  # (N,) int32, compact, -1 for a row without a target
    order: Tensor | None = None  # (N,) int32: original row of each compact row
    place: Tensor | None = None  # (N,) int32: compact row of each original row, or -1
    kept: Tensor | None = None  # (1,) int32


def select_rows(target: Tensor, settings: Settings, launch: Any = run_kernel) -> Selection:
    """Return the rows that a call computes: those that are not ignored.

    If a result other than the loss needs ignored rows, return all rows.
    """
    target = target.contiguous()
    rows, ignore_index = target.numel(), settings.ignore_index
    if ignore_index is None or settings.keeps_ignored_rows:
        if ignore_index is not None:
            target = target.masked_fill(target == ignore_index, -1)
        return Selection(target.to(torch.int32))
    compact, order, place = (target.new_empty(rows, dtype=torch.int32) for _ in range(3))
    kept = target.new_empty(1, dtype=torch.int32)
    launch(
        kernels._head_loss_rows_compact_kernel,
        (1,),
        *(target, order, place, compact, kept, rows, ignore_index),
        BLOCK=LISTED,
        num_warps=8,
    )
    return Selection(compact, order, place, kept)


def copy_rows(
    source: Tensor,
    out: Tensor,  # contiguous
    shapes: Tiles,  # rows after the last one that is not ignored become zero, up to a whole tile
    order: Tensor | None = None,  # which row of the source each row is, or -1
    kept: Tensor | None = None,  # how many rows of the call are not ignored; None for all
    *,
    first: int = 0,  # compact row where `out` starts
    rows: int = 0,  # to write; 0 for all of `out`, whose rows after them may be padding
    scale: Tensor | None = None,  # of each row
    launch: Any = run_kernel,
) -> None:
    """Copy the hidden states of rows (tokens) into `out`, optionally in another order and
    multiplied by a factor (`scale`) per row."""
    (height, depth), pad = out.shape, max(shapes.rows, shapes.step)
    rows = rows or height
    launch(
        kernels._head_loss_rows_copy_kernel,
        (min(-(-rows // pad) * pad, height),),
        *(source, source.stride(0), out, order, scale, kept, first, rows, depth),
        HAS_ORDER=order is not None,
        HAS_SCALE=scale is not None,
        HAS_KEPT=kept is not None,
        PAD=pad,
        BLOCK=row_block(depth, shapes),
    )


def row_values(
    grads: RowGradients, saved: Saved, selection: Selection, settings: Settings
) -> Tensor:
    """Return the five numbers from which kernels compute a row of G (the logits' gradient), for
    each row that is not ignored.

    The result is (5, N) fp32. Column i of the result belongs to the i-th row that is not ignored.
    The numbers of a row are:

    - the row's log-sum-exp, in base 2;
    - the factor of p, the softmax of the logits;
    - the number that is subtracted at the target class;
    - the factor of the class weights, if the sum of logits was requested;
    - the factor of p log2 p, if the entropy was requested.
    """
    rows = saved.lse.numel()
    values = saved.lse.new_empty((5, rows))
    start(
        kernels._head_loss_rows_cotangents_kernel,
        (-(-rows // GATHERED),),
        *(selection.order, selection.kept, selection.target, saved.lse.contiguous()),
        *(grads.nll.contiguous(), grads.lse.contiguous()),
        grads.logit_sum.contiguous() if settings.with_logit_sum else None,
        grads.entropy.contiguous() if settings.with_entropy else None,
        *(saved.entropy.contiguous() if settings.with_entropy else None, values, rows),
        HAS_KEPT=selection.kept is not None,
        WITH_LOGIT_SUM=settings.with_logit_sum,
        WITH_ENTROPY=settings.with_entropy,
        BLOCK=GATHERED,
    )
    return values


def tiles_of(matrix: Tensor | None, rows: int, columns: int) -> Any:
    """Return a tensor descriptor, with which kernels load tiles of a given shape from a matrix."""
    return None if matrix is None else described(matrix, (rows, columns))


def aligned(hidden: Tensor) -> Tensor:
    """Return hidden states that kernels can read tile by tile, as an N x D copy if necessary."""
    hidden = hidden.contiguous()
    return hidden if is_aligned(hidden) else hidden.clone()
