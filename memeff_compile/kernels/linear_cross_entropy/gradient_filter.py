"""The gradient filter: choose the columns of X that count, and multiply only tiles that have any.

X holds R rows of the whole vocabulary, so every column can be judged exactly. A light tile is one
with little probability mass. Rows are sorted by the mass that they have in light tiles, in
ascending order, and processed 128 at a time. The filter `block` keeps a column for 128 rows if one
of its |p - 1(target)| reaches eps. The filter `mass` keeps a column if its sum over the rows is
above a level. The level is the highest one at which every row loses at most tau. One matrix product
computes the mass that rows lose: X times a 0/1 matrix of the columns that each level drops. (All
elements of a row of X except its target's have one sign.) The mass is redistributed over the kept
columns in proportion, so each row's sum (target excluded) is unchanged. Otherwise the logits of
dropped classes would rise, because no step pushes them down. Each would rise by little, but
together they would raise the loss after a hundred steps.

Columns are then ordered by the row tiles that they count in, so that most tiles of 128 x 128 are
either full or empty, whatever the token ids. The order takes V numbers; rows of the weight and its
gradient are read and written in place. Packed tiles are transposed: a column of 128 rows is
contiguous. Bias gradients are exact. If more than `DENSE_SHARE` of the tiles count, the filter
drops no tile and the dense products run; the GPU decides that.

|p - 1(target)| is an element of a row of X divided by the factor of its loss (by the larger of both
factors, if lse has a gradient too); with a softcap it includes the cap's slope.
"""

from __future__ import annotations

from typing import Any, Protocol

import sympy
import torch
from torch import Tensor

from .._triton.launch import run_kernel
from .call import Settings
from .shapes import (
    CHUNKS,
    DENSE_SHARE,
    ITEMS,
    LEVELS_BYTES,
    LISTED,
    PACK_WARPS,
    PACKED,
    RANKED,
    RESTORED,
    SCORE_PROGRAMS,
    SCORE_STAGES,
    SCORE_WARPS,
    SHARES_BYTES,
    SOME,
    STRIP,
    STRIPS,
    Shapes,
    filter_constants,
    filter_shapes,
    row_block,
)

# eps of `block`, as the paper's code chooses it: the spacing of bf16 at 1, over 32.
BLOCK_EPS = 2.0**-12
# tau of `mass`: at most 1/64 of a row's softmax.
MASS_TAU = 2.0**-6
# If rows of the weight are shorter, the filter takes longer than the products that it saves. With
# many classes, launches take a smaller share of the time, and shorter rows are enough.
LEAST_DEPTH, LEAST_DEPTH_OF_MANY, MANY_CLASSES = 2048, 896, 1 << 17
# Levels that `mass` tries, from its tau down to a thousandth of that; `block` has one. The last is
# above everything, and gives the sum of a row.
LEVELS, STEP, LEAST_LEVELS = 32, 0.3125, 16
# The summed numbers were rounded to bf16; this factor of the bound allows for the rounding error.
ROUNDING = 1.0 - 2.0**-8


def filter_level(gradient_filter: str, level: float) -> float:
    """Return the eps or tau of a filter: `level`, or the default of the filter if `level` is 0."""
    if level > 0:
        return level
    return MASS_TAU if gradient_filter == "mass" else BLOCK_EPS


def leaves_out(gradient_filter: str, depth: int, vocab: int, workspace: int) -> bool:
    """Return whether a filter can drop tiles for this depth and vocabulary, in bf16.

    The answer is no if the caller limits the workspace, because the filter's buffers would not fit.
    """
    least = min(LEAST_DEPTH, LEAST_DEPTH_OF_MANY) if vocab >= MANY_CLASSES else LEAST_DEPTH
    return gradient_filter != "exact" and depth >= least and workspace == 0


def filter_bytes(height: sympy.Expr, depth: int, vocab: int) -> sympy.Expr:
    """Return a bound of a filter's bytes: packed tiles, scores, orders, and sums."""
    tiles = height * vocab * 5 / 4 + 128 * (vocab + height)
    sums = SHARES_BYTES + 4 * height * depth
    # Of every level, in fp32, for each strip of a row at most.
    sums += sympy.Min(LEVELS_BYTES, 4 * LEVELS * height * (vocab / STRIP + 1))
    sums += 4 * height * (vocab / (PACKED * STRIPS) + 4)  # sums of the kept elements per row
    return tiles + 64 * vocab + 2 * height * depth + sums


class Filtered(Protocol):
    """The members of a walk over rows that its filter uses: X, the products and the sizes."""

    selection: Any  # the rows that count, with an order
    shapes: Shapes
    settings: Settings
    step: int  # rows of a block
    extent: int  # number of all rows
    vocab: int
    depth: int
    width: int  # of X
    hidden: Tensor
    weight: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    x: Tensor
    row_scale: Tensor
    counters: Tensor

    def floats(self, *sizes: int) -> Tensor:
        """Return an uninitialised fp32 tensor of these sizes."""

    def tiles_of(self, matrix: Tensor, rows: int, columns: int) -> Any:
        """Return a descriptor with which kernels load tiles of `rows` x `columns` of a matrix."""

    def weigh(
        self, inverse: Tensor, light: Tensor, rows_here: Tensor, first: int, here: int
    ) -> None:
        """Write the factor that turns |X| into |p - 1(target)|, each row's light mass, and the row
        count.
        """


class Filter:
    """The buffers of a walk under a filter, and the launches for each of its blocks.

    A filter has no reference to its walk, which refers to the filter. A cycle would keep both alive
    until garbage collection, and the returned gradients would be copied as if they were still in
    use.
    """

    def __init__(self, walk: Filtered, blocks: int) -> None:
        self.tile, settings = walk.shapes.rows, walk.settings
        self.shapes = filter_shapes(walk.shapes)
        self.blocks, self.tiles = walk.step // self.tile, -(-walk.vocab // self.tile)
        level = filter_level(settings.gradient_filter, settings.filter_level)
        self.is_mass = settings.gradient_filter == "mass"
        self.level = level
        self.limit = level * ROUNDING if self.is_mass else float("inf")
        self.levels: dict[str, Any] = {
            "TILE": self.tile,
            "LEVELS": LEVELS if self.is_mass else LEAST_LEVELS,
            "STEP": STEP if self.is_mass else 0.0,
        }
        # All programs of the kernel that scores run at the same time.
        self.strip = min(STRIP, self.tile)
        programs = SCORE_PROGRAMS[0 if self.is_mass else 1] * walk.shapes.programs
        chunks = max(programs // self.blocks, 1)
        self.chunk = -(-walk.vocab // (chunks * self.strip)) * self.strip
        self.chunks = -(-walk.vocab // self.chunk)
        self.capacity = max(int(DENSE_SHARE * self.blocks * self.tiles), 1)
        items = self.blocks * -(-walk.depth // self.shapes.columns)
        fitting = SHARES_BYTES // (4 * walk.step * walk.depth)
        self.splits = max(1, min(-(-ITEMS * walk.shapes.programs // items), fitting))

        floats, slots = walk.floats, self.blocks * self.tiles

        def ints(*sizes: int) -> Tensor:
            return walk.hidden.new_empty(sizes, dtype=torch.int32)

        levels = self.levels["LEVELS"]
        self.inverse, self.light = floats(walk.step), floats(walk.step)
        self.rank, self.here = ints(walk.step), ints(1)
        self.score = floats(self.blocks, walk.vocab)
        self.part = floats(self.blocks, self.chunks, levels, self.tile)
        self.lost = floats(self.blocks, levels, self.tile)
        self.fits = ints(self.blocks, levels)
        self.word = walk.hidden.new_empty(walk.vocab, dtype=torch.int16)
        self.place = ints(self.tiles * self.tile)
        self.tile_word, self.tile_start = ints(self.tiles), ints(self.tiles + 1)
        self.block_start, self.slot_at = ints(self.blocks + 1), ints(slots)
        self.tile_slot, self.tile_block = ints(slots), ints(slots)
        self.packed = walk.hidden.new_empty((self.capacity * self.tile, self.tile))
        self.slot_column = ints(self.capacity * self.tile)
        self.ranked = walk.hidden.new_empty((walk.step, walk.depth))
        parts = settings.filter_parts
        self.needs_weight = walk.grad_weight is not None and parts != "hidden"
        self.needs_hidden = walk.grad_hidden is not None and parts != "weight"
        self.sums = None
        if self.needs_hidden:
            self.sums = floats(self.splits, walk.step, walk.depth)
        self.strips = min(PACKED, self.tile) * STRIPS  # columns of a program that packs
        self.parts = -(-self.tiles * self.tile // self.strips)
        self.stays = floats(self.parts, walk.step)
        self.rest, self.restore = floats(self.blocks, self.tile), floats(walk.step)
        self.column_order: Tensor | None = None
        # Each block has multiples of 16 bytes, so that all blocks use the same compiled kernel.
        self.is_sparse, self.dense_kept, self.active = ints(3, blocks, 4)
        self.dropped = walk.hidden.new_zeros(walk.extent, dtype=torch.float32)

    def choose(self, walk: Filtered, hidden: Tensor, index: int, first: int, here: int) -> None:
        """Find the tiles that count in a block of rows, and pack them.

        `hidden` has the block's rows of hidden states, from which dC is computed.
        """
        tile, blocks, tiles = self.tile, self.blocks, self.tiles
        kept, order, levels = walk.selection.kept, walk.selection.order, self.levels
        is_sparse, dense_kept = self.is_sparse[index], self.dense_kept[index]
        walk.weigh(self.inverse, self.light, self.here, first, here)
        run_filter(
            "rank",
            (-(-here // RANKED),),
            *(self.light, self.here, self.rank),
            BLOCK=RANKED,
            OTHERS=256,
        )
        run_filter(
            "score",
            (blocks, self.chunks),
            *(walk.x, self.rank, self.here, self.inverse, self.score, self.part),
            *(walk.vocab, walk.width, self.chunk, self.level),
            BLOCK=self.strip,
            STAGES=SCORE_STAGES,
            SUMS=self.is_mass,
            UPCAST=walk.shapes.is_interpreted,
            num_warps=SCORE_WARPS,
            **levels,
        )
        run_filter(
            "level",
            (blocks, levels["LEVELS"] // SOME),
            *(self.part, walk.x, self.score, self.inverse, self.rank, walk.selection.target),
            *(self.here, self.lost, self.fits, self.rest, first, self.chunks),
            *(walk.vocab, walk.width, self.level, self.limit),
            SOME=SOME,
            CHUNKS=CHUNKS,
            **levels,
        )
        run_filter(
            "word",
            (max(-(-walk.vocab // 512), blocks),),
            *(self.score, self.fits, self.lost, self.rank, order, self.here, self.dropped),
            *(self.word, first, blocks, walk.vocab, self.level),
            BLOCK=512,
            **levels,
        )
        words = self.word
        if walk.settings.sort_vocabulary:
            words, self.column_order = torch.sort(words, stable=True)
        elif self.column_order is None:
            self.column_order = torch.arange(walk.vocab, device=words.device)
        run_filter(
            "tile",
            (tiles,),
            *(words, self.column_order, self.tile_word, self.place, walk.vocab),
            TILE=tile,
            num_warps=1,
        )
        run_filter(
            "list",
            (blocks,),
            *(self.tile_word, kept, self.active[index], is_sparse, dense_kept),
            *(self.block_start, self.slot_at, self.tile_start),
            *(self.tile_slot, self.tile_block, tiles, self.capacity),
            BLOCK=LISTED,
        )
        run_filter(
            "pack",
            (self.parts, blocks),
            *(walk.x, self.packed, self.slot_column, self.stays, self.rank, self.here, self.place),
            *(self.tile_word, self.slot_at, is_sparse, walk.step, tiles, walk.width),
            TILE=tile,
            BLOCK=min(PACKED, tile),
            STRIPS=STRIPS,
            num_warps=PACK_WARPS,
        )
        run_filter(
            "restore",
            (-(-here // tile) * tile // RESTORED,),
            *(hidden, hidden.stride(0), walk.row_scale, self.stays, self.rest, self.inverse),
            *(self.rank, walk.selection.target, self.here, self.place, self.tile_word),
            *(self.slot_at, is_sparse, self.packed, self.restore),
            self.ranked if self.needs_weight else None,
            *(first, walk.step, self.parts, tiles, walk.vocab, walk.depth),
            TILE=tile,
            ROWS=RESTORED,
            PARTS=128,
            BLOCK=min(256, row_block(walk.depth, walk.shapes)),
        )

    def add_products(self, walk: Filtered, index: int, first: int, here: int) -> tuple[bool, bool]:
        """Add the products of the packed tiles to dE and dC; return which of the two it added to.

        A dense block has no packed tiles; the dense products then process `dense_kept` rows.
        """
        shapes = self.shapes
        tile, columns, step = shapes.rows, shapes.columns, shapes.step
        run_filter(
            "products",
            (shapes.programs,),
            *(walk.tiles_of(self.packed, step, tile), walk.tiles_of(self.packed, tile, step)),
            walk.tiles_of(self.ranked, step, columns),
            *(walk.weight, walk.grad_weight, self.sums, self.slot_column, self.column_order),
            *(self.is_sparse[index], self.block_start, self.slot_at, self.tile_start),
            *(self.tile_slot, self.tile_block, walk.counters[2, index], first),
            *(self.blocks, self.tiles, self.splits, walk.step, walk.vocab, walk.depth),
            NEEDS_HIDDEN=self.needs_hidden,
            NEEDS_WEIGHT=self.needs_weight,
            **filter_constants(shapes),
        )
        if self.sums is not None:
            block = 16 if shapes.is_interpreted else min(1024, 1 << (walk.depth - 1).bit_length())
            run_filter(
                "rows",
                (here,),
                *(self.sums, walk.grad_hidden, self.rank, walk.selection.order, self.here),
                *(self.is_sparse[index], walk.row_scale, self.restore, first, walk.step),
                *(self.splits, walk.depth),
                BLOCK=block,
            )
        return self.needs_hidden, self.needs_weight


def run_filter(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch the filter's kernel of a step.

    Kernels are looked up by name, because a block has a dozen launches.
    """
    from . import gradient_filter_kernels

    kernel = getattr(gradient_filter_kernels, f"_linear_cross_entropy_filter_{name}_kernel")
    run_kernel(kernel, grid, *arguments, **constants)
