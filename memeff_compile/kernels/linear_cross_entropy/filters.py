"""Which tiles of the gradient may be left out, and what each row loses by that.

`block` is the rule of Cut Cross-Entropy: a tile is left out if every |p_ij - 1(j = t_i)| in it is
under eps. What a row loses in all is measured, not bounded.

`mass` bounds it: a row never loses more than tau of sum_j |p_ij - 1(j = t_i)|. A tile is left out
if that sum over the tile is under a level for each of its rows; the level is the highest of a
geometric list at which every row of the block stays under tau. The list starts at an eighth of an
even share of the columns, so a flat softmax, where no tile is lighter than that, loses nothing.

Where lse has a gradient of its own, as with a z-loss, tiles that hold a target are always kept. The
op knows by `with_lse`: whoever filters and differentiates lse has to set it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._triton.launch import start
from .shapes import TILE

if TYPE_CHECKING:
    from .call import Knobs
    from .rows import Selection
    from .shapes import Shapes

Size: TypeAlias = int | torch.SymInt

# eps of `block`, as the paper's code chooses it: the spacing of the dtype at 1, over 32.
BLOCK_EPS = {torch.bfloat16: 2.0**-12, torch.float16: 2.0**-15}
# tau of `mass`: at most 1/64 of a row's softmax.
MASS_TAU = 2.0**-6
# Levels that `mass` tries, each half of the one before.
MASS_LEVELS = 16
# The sums of dropped mass are rounded; the bound allows for that.
_ROUNDING = 1.0 - 2.0**-10
# Share of active tiles from which the dense kernels are faster. Measured on an H200: 530 to 570
# TFLOP/s in the sparse products against 660 to 720 in the dense ones.
DENSE_SHARE = 0.75
# Tiles that one program scores at a time.
CHUNK = 64


class LeftOut(NamedTuple):
    """What a filter decided in forward; each (0,) where it decides nothing."""

    dropped: Tensor  # (N,) fp32: what each row loses
    active: Tensor  # (row blocks, T) uint8
    row_order: Tensor  # (N,) int32: the row that stands at each place of the row blocks


DTYPES = (torch.float32, torch.uint8, torch.int32)


def found_shapes(
    rows: Size, vocab: Size, gradient_filter: str
) -> tuple[tuple[Size, ...], tuple[Size, ...], tuple[Size, ...]]:
    """Return the shapes of a `LeftOut`."""
    if gradient_filter == "exact":
        return (0,), (0,), (0,)
    blocks, tiles = (rows + TILE - 1) // TILE, (vocab + TILE - 1) // TILE
    return (rows,), (blocks, tiles), (rows if gradient_filter == "mass" else 0,)


def nothing_left_out(hidden: Tensor, shapes: tuple[tuple[Size, ...], ...]) -> LeftOut:
    """Return the decision to compute every tile."""
    dropped, active, order = shapes
    return LeftOut(
        hidden.new_zeros(dropped, dtype=torch.float32),
        hidden.new_ones(active, dtype=torch.uint8),
        torch.arange(int(order[0]), device=hidden.device, dtype=torch.int32),
    )


def filter_level(gradient_filter: str, level: float, dtype: torch.dtype) -> float:
    """Return the eps or tau that a filter goes by: the caller's, or for 0 the automatic one."""
    if level > 0:
        return level
    return MASS_TAU if gradient_filter == "mass" else BLOCK_EPS[dtype]


class Chooser:
    """Chooses the active tiles of one call from forward's statistics, given group by group."""

    def __init__(
        self, hidden: Tensor, vocab: int, shapes: Shapes, selection: Selection, knobs: Knobs
    ) -> None:
        self.tile, self.selection = shapes.rows, selection
        self.rows = hidden.shape[0]
        self.blocks = -(-self.rows // self.tile)
        self.tiles = -(-vocab // self.tile)
        self.chunks = -(-self.tiles // CHUNK)
        new = hidden.new_empty
        self.compact_lse = new(self.rows, dtype=torch.float32)
        self.score = new((self.blocks, self.tiles), dtype=torch.float32)
        self.by_mass = knobs.gradient_filter == "mass"
        self.keeps_targets = knobs.with_lse
        level = filter_level(knobs.gradient_filter, knobs.filter_level, hidden.dtype)
        if self.by_mass:
            self.threshold = min(1.0 / (8 * self.tiles), level)
            self.limit, self.levels = level * _ROUNDING, MASS_LEVELS
            self.code = new((self.rows, self.tiles), dtype=torch.uint8)
            self.light = new((self.chunks, self.rows), dtype=torch.float32)
        else:
            self.threshold, self.limit, self.levels = level, float("inf"), 1
        self.part = new((self.blocks, self.chunks, self.levels, self.tile), dtype=torch.float32)

    def see(self, stats: Tensor, target_logit: Tensor, first: int, rows: int) -> None:
        """Read the statistics of the rows first .. first + rows."""
        from . import sparse_kernels as kernels

        grid = (-(-rows // self.tile), self.chunks)
        given = (stats, self.compact_lse, target_logit, self.selection.target)
        flags = {
            "HAS_KEPT": self.selection.kept is not None,
            "KEEP_TARGETS": self.keeps_targets,
            "TILE": self.tile,
            "CHUNK": CHUNK,
        }
        kernel: Any = kernels._linear_cross_entropy_block_score_kernel
        made: tuple[Any, ...] = (self.score, self.part, (first, rows))
        if self.by_mass:
            kernel = kernels._linear_cross_entropy_mass_code_kernel
            made = (self.code, self.light, (first, rows), self.rows)
        counts = (stats.shape[1], self.tiles)
        operands = (given, self.selection.kept, *made, counts, self.threshold)
        start(kernel, grid, *operands, **flags, num_warps=8)

    def decide(self) -> LeftOut:
        """Decide, once every group was seen."""
        from . import sparse_kernels as kernels

        order, kept = self.selection.order, self.selection.kept
        if self.by_mass:
            if kept is None:
                kept = torch.full((1,), self.rows, dtype=torch.int32, device=self.score.device)
            rank = self._rank(kept)
            order = rank if order is None else order[rank.long()]
            start(
                kernels._linear_cross_entropy_mass_score_kernel,
                (self.blocks, self.chunks),
                *(self.code, rank, kept, self.score, self.part, self.tiles, self.threshold),
                LEVELS=self.levels,
                TILE=self.tile,
                CHUNK=CHUNK,
                num_warps=8,
            )
        found = LeftOut(
            dropped=self.score.new_zeros(self.rows),
            active=self.score.new_empty((self.blocks, self.tiles), dtype=torch.uint8),
            row_order=order
            if order is not None and self.by_mass
            else self.score.new_empty(0, dtype=torch.int32),
        )
        start(
            kernels._linear_cross_entropy_select_kernel,
            (self.blocks,),
            *(self.score, self.part, order, kept, found.active, found.dropped),
            *(self.rows, self.tiles, self.chunks, self.threshold, self.limit),
            HAS_KEPT=kept is not None,
            LEVELS=self.levels,
            TILE=self.tile,
            CHUNK=256,
        )
        return found

    def _rank(self, kept: Tensor) -> Tensor:
        """Put rows that would lose too much last, the worst at the end; the others stay in order.

        One such row keeps the tiles of its whole block, so they had better share blocks.
        """
        light = self.light.sum(0)
        key = torch.where(light > self.limit, light, 0.0)
        is_row = torch.arange(self.rows, device=key.device) < kept
        key = torch.where(is_row, key, float("inf"))
        return torch.argsort(key, stable=True).to(torch.int32)
