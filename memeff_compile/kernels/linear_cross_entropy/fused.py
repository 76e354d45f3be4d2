"""The engine `fused`: every product of the head in Triton, with its neighbours in the epilogue.

Forward: tiles of logits become a maximum and a sum per row and tile, merged in a fixed order;
the tile that holds a row's target hands out its logit. Backward, per piece of W columns: tiles
of logits again, this time written as G = dloss/dlogits in 16 bits; then dC of those columns
complete in one write, and dE += G C in fp32, by one reduction per element and launch, so that
nothing depends on the order in which programs run.

Ignored rows are left out before anything is computed, by an order of rows built on the GPU
(`rows.py`). A filter is a matter of pieces of rows (`row_pieces.py`).

No call waits for the GPU or reads a value on the host. 16-bit inputs with a depth that is a
multiple of 8; the engine `hybrid` serves the rest.

Expected time on an H200, forward plus backward: 4 * 2NDV / 700e12 plus 8ND * pieces / 4.28e12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._triton.compat import described
from .._triton.launch import start
from ..device import on_device
from .call import Gradients, Kept, Knobs, Operands, RowGradients, Rows, vector
from .pieces import spans
from .rows import Selection, gather, row_block, select_rows
from .shapes import (
    FORWARD_BYTES,
    Room,
    is_minimal,
    piece_width,
    room_inside,
    row_groups,
    shapes_for,
)

DTYPES = (torch.bfloat16, torch.float16)


def serves(weight: Tensor) -> bool:
    """Say whether a weight of a fitting dtype and depth can be read tile by tile, where it lies."""
    return (
        weight.stride() == (weight.shape[1], 1)
        and weight.data_ptr() % 16 == 0
        and weight.shape[0] < 2**30
    )


def forward(given: Operands, knobs: Knobs) -> Rows:
    """Compute what is asked for of every row.

    Hidden states are bf16 or fp16, the weight is contiguous, and top is not asked for.
    """
    from . import fused_kernels as kernels

    hidden, weight, bias, target, column_weight, *_ = given
    (rows, depth), vocab = hidden.shape, weight.shape[0]
    shapes = shapes_for(hidden.device)
    bias, column_weight = vector(bias, None), vector(column_weight, torch.float32)
    with on_device(hidden):
        hidden = aligned(hidden)
        selection = select_rows(target, knobs)
        tiles = -(-vocab // shapes.columns)
        planes = 2 + knobs.with_logit_sum + knobs.with_entropy
        is_compact = selection.kept is not None
        bytes_per_row = 4 * planes * tiles + (2 * depth if is_compact else 0)
        groups = row_groups(rows, FORWARD_BYTES // bytes_per_row, shapes)
        stats = hidden.new_empty((planes, tiles, groups.size), dtype=torch.float32)
        gathered = hidden.new_empty((groups.size, depth)) if is_compact else hidden
        # Ignored rows, which no kernel writes, are zero.
        found = Rows.new(hidden, (rows,), knobs, of_zeros=is_compact)
        target_logit = torch.full((rows,), float("nan"), device=hidden.device)
        hidden_desc = tiles_of(gathered, shapes.rows, shapes.step)
        weight_desc = tiles_of(weight, shapes.columns, shapes.step)
        for first, stop in spans(0, rows, groups.size):
            here = stop - first
            if is_compact:
                gather(hidden, gathered[:here], selection, first, shapes)
            start(
                kernels._linear_cross_entropy_forward_kernel,
                (shapes.programs,),
                *(hidden_desc, weight_desc, bias, column_weight, selection.target, selection.kept),
                *(stats, target_logit, first, 0 if is_compact else first, here, vocab, depth),
                *(knobs.scale, knobs.softcap),
                **given.flags(knobs),
                HAS_KEPT=is_compact,
                FLATTEN=shapes.flatten,
                **shapes.constants(shapes.columns),
            )
            start(
                kernels._linear_cross_entropy_rows_kernel,
                (-(-here // ROWS),),
                *(stats, target_logit, selection.target, selection.order, selection.kept),
                *(found.nll, found.lse, found.logit_sum if knobs.with_logit_sum else None),
                *(found.entropy if knobs.with_entropy else None, first, here, tiles),
                HAS_KEPT=is_compact,
                WITH_LOGIT_SUM=knobs.with_logit_sum,
                WITH_ENTROPY=knobs.with_entropy,
                ROWS=ROWS,
                TILES=TILES,
                num_warps=4,
            )
        return found


# Row blocks whose tiles of G are computed side by side.
GROUP = 16
# Rows and tiles that one program merges at a time.
ROWS = 8
TILES = 128


def backward(
    grads: RowGradients, given: Operands, kept: Kept, knobs: Knobs, output_mask: Sequence[bool]
) -> Gradients:
    """Compute the gradients of hidden, weight and bias that `output_mask` asks for."""
    with on_device(given.hidden):
        return _Backward(grads, given, kept, knobs, output_mask).run()


class _Backward:
    """One backward pass: its buffers, and the launches over them."""

    def __init__(
        self,
        grads: RowGradients,
        given: Operands,
        kept: Kept,
        knobs: Knobs,
        output_mask: Sequence[bool],
    ) -> None:
        hidden, weight, bias, target, column_weight, *_ = given
        hidden = aligned(hidden)
        self.shapes = shapes_for(hidden.device)
        self.knobs, self.weight = knobs, weight
        self.rows, self.depth = hidden.shape
        self.vocab = weight.shape[0]
        self.bias, self.column_weight = vector(bias, None), vector(column_weight, torch.float32)
        self.is_plain = is_plain(bias, knobs)
        needs_hidden, needs_weight, needs_bias = output_mask
        self.selection = select_rows(target, knobs)
        self.grad_weight = torch.empty_like(weight) if needs_weight else None
        self.grad_bias = torch.empty_like(bias) if needs_bias and bias is not None else None
        # The hidden gradient's own memory holds the gathered rows until it is written.
        self.original = self.hidden = hidden
        if self.selection.kept is not None:
            self.hidden = hidden.new_empty(hidden.shape)
            gather(hidden, self.hidden, self.selection, 0, self.shapes)
        self.row_values = row_values(grads, kept, self.selection, knobs)

        self.given = (self.bias, self.column_weight, self.selection.target, self.row_values)
        self.asked = given.flags(knobs)

        self.width = piece_width(self.rows, self.depth, self.vocab, knobs.workspace, self.shapes)
        elements = self.rows * self.width
        self.inside: Room | None = None
        if is_minimal(knobs.workspace) and self.grad_weight is not None:
            self.inside = room_inside(
                self.rows, self.depth, self.vocab, self.shapes, needs_hidden=needs_hidden
            )
        # fp32 sums of the hidden gradient
        self.sums: Tensor | None = None
        if self.inside is not None and self.grad_weight is not None:
            room = self.grad_weight.view(-1)[self.inside.first_column * self.depth :]
            if needs_hidden:
                self.sums = room[: 2 * hidden.numel()].view(torch.float32).view(hidden.shape)
            self.piece = room[2 * hidden.numel() if needs_hidden else 0 :]
        else:
            if needs_hidden:
                self.sums = hidden.new_empty(hidden.shape, dtype=torch.float32)
            self.piece = hidden.new_empty(elements)

    def run(self) -> Gradients:
        if self.inside is not None:
            grad_hidden = self._run_inside(self.inside)
        else:
            for first, stop in spans(0, self.vocab, self.width):
                self._dense(first, stop, adds=first > 0)
            grad_hidden = self._grad_hidden()
        return grad_hidden, self.grad_weight, self.grad_bias

    def _run_inside(self, room: Room) -> Tensor | None:
        """Work in the last rows of the weight gradient, and compute those rows last.

        Their part of the hidden gradient comes first, before they are anything but scratch; so
        their logits are computed twice. When the hidden gradient is done, its sums make room, and
        G retreats before the rows that are being written.
        """
        adds = False
        if self.sums is not None:
            for first, stop in spans(room.first_column, self.vocab, room.width):
                self._dense(first, stop, adds=adds, needs_weight=False)
                adds = True
        for first, stop in spans(0, room.first_column, room.width):
            self._dense(first, stop, adds=adds)
            adds = True
        grad_hidden = self._grad_hidden()
        self.sums = None
        assert self.grad_weight is not None
        flat, first = self.grad_weight.view(-1), room.first_column
        spare = flat.new_empty(self.rows * room.spare_width)
        # From here on the gathered rows are gone: the hidden gradient lies where they were.
        gathers = self.selection.kept is not None
        while first < self.vocab:
            width = room.retreating_width(first)
            if width:
                self.piece = flat[-self.rows * width :]
            else:
                width, self.piece = room.spare_width, spare
            self._dense(first, min(first + width, self.vocab), adds=False, gathers=gathers)
            first += width
        return grad_hidden

    def _grad_hidden(self) -> Tensor | None:
        if self.sums is None:
            return None
        if self.selection.place is None:
            return self.sums.to(self.hidden.dtype)
        from . import fused_kernels as kernels

        kernels._linear_cross_entropy_scatter_kernel[(self.rows,)](
            *(self.sums, self.hidden, self.selection.place, self.depth),
            BLOCK=row_block(self.depth, self.shapes),
        )
        return self.hidden

    def _dense(
        self, first: int, stop: int, *, adds: bool, needs_weight: bool = True, gathers: bool = False
    ) -> None:
        """Compute G of these columns, and from it what they give to each gradient."""
        from . import fused_kernels as kernels

        shapes = self.shapes
        tile, columns, step = shapes.rows, shapes.columns, shapes.step
        width = -(-(stop - first) // columns) * columns
        g = self.piece[: self.rows * width].view(self.rows, width)
        rows_are = {"HAS_KEPT": self.selection.kept is not None}
        where = (
            self.original if gathers else None,
            self.selection.order if gathers else None,
            self.original.stride(0),
        )
        hidden = None if gathers else self.hidden
        g_columns = shapes.gradient_columns(is_plain=self.is_plain and not gathers)
        grad_weight = self.grad_weight if needs_weight else None
        at = (0, self.rows, first, width)
        write_gradient(self, hidden, g, g_columns, at, where=where)
        if self.sums is not None or grad_weight is not None:
            start(
                kernels._linear_cross_entropy_dense_products_kernel,
                (shapes.programs,),
                *(tiles_of(g, step, tile), tiles_of(g, tile, step)),
                *(tiles_of(hidden, step, columns), *where, tiles_of(self.weight, step, columns)),
                tiles_of(grad_weight, tile, columns // 4),
                *(tiles_of(self.sums, tile, columns // 4), self.selection.kept, first, width),
                *(self.rows, self.depth),
                NEEDS_WEIGHT=grad_weight is not None,
                NEEDS_HIDDEN=self.sums is not None,
                ADD=adds,
                GATHER=gathers,
                **shapes.constants(columns),
                **rows_are,
            )
        if self.grad_bias is not None and needs_weight:
            kernels._linear_cross_entropy_column_sums_kernel[(-(-width // 128),)](
                *(g, self.grad_bias, self.selection.kept, first, width, stop, self.rows),
                **rows_are,
                BLOCK=128,
                ROWS=64,
            )


def write_gradient(
    walk: Any,  # one of a backward: its sizes, what it is given, and what is asked for
    hidden: Tensor | None,  # rows of the hidden states, or None where they are not gathered
    g: Tensor,  # written
    columns: int,  # of a tile of G
    at: tuple[int, int, int, int],  # first row of G, rows, first column, columns
    *,
    # where hidden states lie that are not gathered, their order, and from one to the next
    where: tuple[Tensor | None, Tensor | None, int] = (None, None, 0),
) -> None:
    """Compute logits again and write their gradient."""
    from . import fused_kernels as kernels

    shapes, kept = walk.shapes, walk.selection.kept
    start(
        kernels._linear_cross_entropy_dense_gradient_kernel,
        (shapes.programs,),
        *(tiles_of(hidden, shapes.rows, shapes.step), *where),
        *(tiles_of(walk.weight, columns, shapes.step), tiles_of(g, shapes.rows, columns // 4)),
        *(walk.given, kept, *at, walk.rows, walk.vocab, walk.depth),
        (walk.knobs.scale, walk.knobs.softcap),
        GATHER=hidden is None,
        HAS_KEPT=kept is not None,
        GROUP=GROUP,
        FLATTEN=shapes.flatten and hidden is not None,
        **shapes.constants(columns),
        **walk.asked,
    )


def is_plain(bias: Tensor | None, knobs: Knobs) -> bool:
    """Say whether a tile of G needs no registers beyond those of the plain loss."""
    return bias is None and not (knobs.softcap or knobs.with_logit_sum)


def row_values(grads: RowGradients, kept: Kept, selection: Selection, knobs: Knobs) -> Tensor:
    """Gather what a row of G needs of the rows that count, (5, N) fp32 in compact order."""
    from . import fused_kernels as kernels

    rows = kept.lse.numel()
    values = kept.lse.new_empty((5, rows))
    block = 512
    kernels._linear_cross_entropy_cotangents_kernel[(-(-rows // block),)](
        *(selection.order, selection.kept, selection.target, kept.lse.contiguous()),
        *(grads.nll.contiguous(), grads.lse.contiguous()),
        grads.logit_sum.contiguous() if knobs.with_logit_sum else None,
        grads.entropy.contiguous() if knobs.with_entropy else None,
        *(kept.entropy.contiguous() if knobs.with_entropy else None, values, rows),
        HAS_KEPT=selection.kept is not None,
        WITH_LOGIT_SUM=knobs.with_logit_sum,
        WITH_ENTROPY=knobs.with_entropy,
        BLOCK=block,
    )
    return values


def tiles_of(matrix: Tensor | None, rows: int, columns: int) -> Any:
    """Describe a matrix to the kernels as tiles of this shape."""
    return None if matrix is None else described(matrix, (rows, columns))


def aligned(hidden: Tensor) -> Tensor:
    """Copy hidden states that cannot be read tile by tile: N x D, once."""
    hidden = hidden.contiguous()
    return hidden if hidden.data_ptr() % 16 == 0 else hidden.clone()
