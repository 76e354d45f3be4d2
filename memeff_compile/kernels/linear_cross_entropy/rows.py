"""Which rows count: an order of them that is built on the GPU, and rows gathered by it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._triton.launch import run_kernel
from .call import Knobs
from .shapes import Shapes


class Selection(NamedTuple):
    """The rows that count, in order, as the kernels read them.

    `order`, `place` and `kept` are None where every row counts.
    """

    target: Tensor  # (N,) int32, compact, -1 for a row without a target
    order: Tensor | None = None  # (N,) int32: original row of each compact row
    place: Tensor | None = None  # (N,) int32: compact row of each original row, or -1
    kept: Tensor | None = None  # (1,) int32


def select_rows(target: Tensor, knobs: Knobs) -> Selection:
    """Leave out the rows whose target is ignored, unless something else of them counts."""
    target = target.contiguous()
    rows, ignore_index = target.numel(), knobs.ignore_index
    drops = ignore_index is not None and not knobs.keeps_ignored_rows
    if not drops:
        if ignore_index is not None:
            target = target.masked_fill(target == ignore_index, -1)
        return Selection(target.to(torch.int32))
    from . import fused_kernels as kernels

    compact, order, place = (target.new_empty(rows, dtype=torch.int32) for _ in range(3))
    kept = target.new_empty(1, dtype=torch.int32)
    run_kernel(
        kernels._linear_cross_entropy_compact_kernel,
        (1,),
        *(target, order, place, compact, kept, rows, ignore_index),
        BLOCK=2048,
        num_warps=8,
    )
    return Selection(compact, order, place, kept)


def gather(hidden: Tensor, out: Tensor, selection: Selection, first: int, shapes: Shapes) -> None:
    """Copy the compact rows from `first` on into `out`."""
    from . import fused_kernels as kernels

    rows, depth = out.shape
    run_kernel(
        kernels._linear_cross_entropy_gather_kernel,
        (rows,),
        *(hidden, hidden.stride(0), out, selection.order, selection.kept, first, depth),
        PAD=max(shapes.rows, shapes.step),
        BLOCK=row_block(depth, shapes),
    )


def row_block(depth: int, shapes: Shapes) -> int:
    """Return how many features of a row a program copies at a time."""
    return 16 if shapes.is_interpreted else min(4096, 1 << (depth - 1).bit_length())
