"""A gradient filter on a piece of X: products of the tiles that count, of columns gathered.

Where a piece of R rows meets the whole vocabulary and X stands in memory, what a column holds is
known exactly. Rows are ranked, those with much of their mass in light tiles last, and taken 128 at
a time. `block` keeps a column in a block if one of its |p - 1(target)| reaches eps; `mass` keeps it
where their sum over the block is above the highest level at which every row loses at most tau.
What rows lose is one product of X, as it lies, and of which columns a level drops: a row of X has
one sign but for its target's. It is put on the columns that stay, in proportion: but for its target
a row sums to what it did. Classes that no step pushes down would rise, one by one too little to see
and after a hundred steps enough to raise the loss.
Columns are then ordered by the blocks that they count in, so that tiles of 128 x 128 are full or
empty whatever the ids are: an order is V numbers, and rows of the weight and of its gradient are
read and written in place. Tiles are packed turned, a column of a block being one run of memory.
Bias gradients are exact. Where more than `DENSE_SHARE` of the tiles count, nothing is left out and
the products of engine T run; that is decided on the GPU.

|p - 1(target)| is what stands in a row of X over what the gradient of its loss is times: with a
softcap, times the cap's slope; where lse has a gradient of its own, over the larger of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor

from .._triton.launch import run_kernel
from .rows import Selection, row_block
from .shapes import Shapes

if TYPE_CHECKING:
    from .total_fused import Walk

# eps of `block`, as the paper's code chooses it: the spacing of bf16 at 1, over 32.
BLOCK_EPS = 2.0**-12
# tau of `mass`: at most 1/64 of a row's softmax.
MASS_TAU = 2.0**-6
# Where rows of the weight are shorter, finding tiles takes longer than the products it saves; where
# classes are many, launches weigh less, and shorter rows will do.
LEAST_DEPTH, LEAST_DEPTH_OF_MANY, MANY_CLASSES = 2048, 896, 1 << 17
# Row blocks of a piece: a bit each of a word of 16.
BLOCKS = 16
# Share of tiles that may count; the packed ones take as much of the bytes of X.
DENSE_SHARE = 0.5
# Levels that `mass` tries, from its tau down to a thousandth of that; `block` has one. The last is
# above everything, and says what a row sums to.
LEVELS, STEP, LEAST_LEVELS = 32, 0.3125, 16
# Sums of dropped mass are of numbers that were rounded to bf16; the bound allows for that.
ROUNDING = 1.0 - 2.0**-8
# Columns of a step of a program that scores, its stages and warps, and how many of them share a
# multiprocessor: of `mass` and, with more registers, of `block`.
STRIP, SCORE_STAGES, SCORE_WARPS, SCORE_PROGRAMS = 64, 3, 4, (4, 3)
# Rows that a program ranks; levels and chunks that one sums at a time; tiles that one lists; rows
# that one restores.
RANKED, SOME, CHUNKS, LISTED, RESTORED = 16, 8, 8, 512, 8
# Columns of a strip that is packed, strips of a program, and its warps.
PACKED, STRIPS, PACK_WARPS = 64, 4, 4
# Bytes of the sums of what levels drop, on any GPU, and of dE's shares; shares of tiles a program.
LEVELS_BYTES = 16 << 20
SHARES_BYTES = 64 << 20
ITEMS = 4
# Tiles of the products: two programs share a multiprocessor, so that one multiplies while the other
# reads and writes its dC. Each sums a few blocks of rows only.
COLUMNS, WARPS, STAGES, PROGRAMS = 128, 4, 5, 2


def filter_level(gradient_filter: str, level: float) -> float:
    """Return the eps or tau that a filter goes by: the caller's, or for 0 the automatic one."""
    if level > 0:
        return level
    return MASS_TAU if gradient_filter == "mass" else BLOCK_EPS


def leaves_out(gradient_filter: str, depth: int, vocab: int, workspace: int) -> bool:
    """Say whether a filter leaves anything out of rows of so many features and classes, in bf16.

    In a workspace of the caller's there is no room for what it holds.
    """
    least = min(LEAST_DEPTH, LEAST_DEPTH_OF_MANY) if vocab >= MANY_CLASSES else LEAST_DEPTH
    return gradient_filter != "exact" and depth >= least and workspace == 0


def all_rows(selection: Selection) -> Selection:
    """Return a selection with an order, whichever rows count."""
    if selection.kept is not None:
        return selection
    rows = torch.arange(len(selection.target), device=selection.target.device, dtype=torch.int32)
    return Selection(selection.target, rows, rows, rows.new_full((1,), len(rows)))


def bytes_held(height: sympy.Expr, depth: int, vocab: int) -> sympy.Expr:
    """Return a bound of what a filter holds: packed tiles, scores, orders, sums, shares of dE."""
    tiles = height * vocab * 5 / 4 + 128 * (vocab + height)
    sums = SHARES_BYTES + 4 * height * depth
    # Of every level, in fp32, for each strip of a row at most.
    sums += sympy.Min(LEVELS_BYTES, 4 * LEVELS * height * (vocab / STRIP + 1))
    sums += 4 * height * (vocab / (PACKED * STRIPS) + 4)  # what stays of rows
    return tiles + 64 * vocab + 2 * height * depth + sums


def products_shapes(shapes: Shapes) -> Shapes:
    """Return the tiles of the products on a GPU where those of engine T are given."""
    if shapes.is_interpreted:
        return shapes
    return shapes._replace(
        columns=COLUMNS, warps=WARPS, stages=STAGES, programs=PROGRAMS * shapes.programs
    )


def products_constants(shapes: Shapes) -> dict[str, Any]:
    """Return the constants of the products, and their launch."""
    constants = shapes.constants(shapes.columns)
    parts = 4 if shapes.columns >= 256 else 2
    return {**constants, "TILE": shapes.rows, "PARTS": parts}


class Filter:
    """What a walk under a filter holds, and its launches for each of so many pieces.

    It does not hold the walk, which holds it: both would live until Python looks for cycles, and
    the gradients that the walk returned would be copied as if somebody still read them.
    """

    def __init__(self, walk: Walk, pieces: int) -> None:
        self.tile, knobs = walk.shapes.rows, walk.knobs
        self.shapes = products_shapes(walk.shapes)
        self.blocks, self.tiles = walk.height // self.tile, -(-walk.vocab // self.tile)
        level = filter_level(knobs.gradient_filter, knobs.filter_level)
        self.is_mass = knobs.gradient_filter == "mass"
        self.level = level
        self.limit = level * ROUNDING if self.is_mass else float("inf")
        self.levels: dict[str, Any] = {
            "TILE": self.tile,
            "LEVELS": LEVELS if self.is_mass else LEAST_LEVELS,
            "STEP": STEP if self.is_mass else 0.0,
        }
        # All programs that score run at once.
        self.strip = min(STRIP, self.tile)
        programs = SCORE_PROGRAMS[0 if self.is_mass else 1] * walk.shapes.programs
        chunks = max(programs // self.blocks, 1)
        self.chunk = -(-walk.vocab // (chunks * self.strip)) * self.strip
        self.chunks = -(-walk.vocab // self.chunk)
        self.capacity = max(int(DENSE_SHARE * self.blocks * self.tiles), 1)
        items = self.blocks * -(-walk.depth // self.shapes.columns)
        fitting = SHARES_BYTES // (4 * walk.height * walk.depth)
        self.splits = max(1, min(-(-ITEMS * walk.shapes.programs // items), fitting))

        floats, ints, slots = walk.floats, walk.ints, self.blocks * self.tiles
        levels = self.levels["LEVELS"]
        self.inverse, self.light = floats(walk.height), floats(walk.height)
        self.rank, self.here = ints(walk.height), ints(1)
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
        self.ranked = walk.hidden.new_empty((walk.height, walk.depth))
        parts = knobs.filter_parts
        self.needs_weight = walk.grad_weight is not None and parts != "hidden"
        self.needs_hidden = walk.grad_hidden is not None and parts != "weight"
        self.sums = None
        if self.needs_hidden:
            self.sums = floats(self.splits, walk.height, walk.depth)
        self.strips = min(PACKED, self.tile) * STRIPS  # columns of a program that packs
        self.parts = -(-self.tiles * self.tile // self.strips)
        self.stays = floats(self.parts, walk.height)
        self.rest, self.restore = floats(self.blocks, self.tile), floats(walk.height)
        self.column_order: Tensor | None = None
        # Of each piece: multiples of 16 bytes, so that its launches are compiled alike.
        self.is_sparse, self.dense_kept, self.active = ints(3, pieces, 4)
        self.dropped = walk.hidden.new_zeros(walk.rows, dtype=torch.float32)

    def choose(self, walk: Walk, hidden: Tensor, index: int, first: int, here: int) -> None:
        """Find the tiles that count in a piece, as `add_products` has it, and pack them.

        `hidden` has the piece's rows, of which dC is made.
        """
        tile, blocks, tiles = self.tile, self.blocks, self.tiles
        kept, order, levels = walk.selection.kept, walk.selection.order, self.levels
        is_sparse, dense_kept = self.is_sparse[index], self.dense_kept[index]
        walk.weigh(self.inverse, self.light, self.here, first, here)
        _run(
            "rank",
            (-(-here // RANKED),),
            *(self.light, self.here, self.rank),
            BLOCK=RANKED,
            OTHERS=256,
        )
        _run(
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
        _run(
            "level",
            (blocks, levels["LEVELS"] // SOME),
            *(self.part, walk.x, self.score, self.inverse, self.rank, walk.selection.target),
            *(self.here, self.lost, self.fits, self.rest, first, self.chunks),
            *(walk.vocab, walk.width, self.level, self.limit),
            SOME=SOME,
            CHUNKS=CHUNKS,
            **levels,
        )
        _run(
            "word",
            (max(-(-walk.vocab // 512), blocks),),
            *(self.score, self.fits, self.lost, self.rank, order, self.here, self.dropped),
            *(self.word, first, blocks, walk.vocab, self.level),
            BLOCK=512,
            **levels,
        )
        words = self.word
        if walk.knobs.sort_vocabulary:
            words, self.column_order = torch.sort(words, stable=True)
        elif self.column_order is None:
            self.column_order = torch.arange(walk.vocab, device=words.device)
        _run(
            "tile",
            (tiles,),
            *(words, self.column_order, self.tile_word, self.place, walk.vocab),
            TILE=tile,
            num_warps=1,
        )
        _run(
            "list",
            (blocks,),
            *(self.tile_word, kept, self.active[index], is_sparse, dense_kept),
            *(self.block_start, self.slot_at, self.tile_start),
            *(self.tile_slot, self.tile_block, tiles, self.capacity),
            BLOCK=LISTED,
        )
        _run(
            "pack",
            (self.parts, blocks),
            *(walk.x, self.packed, self.slot_column, self.stays, self.rank, self.here, self.place),
            *(self.tile_word, self.slot_at, is_sparse, walk.height, tiles, walk.width),
            TILE=tile,
            BLOCK=min(PACKED, tile),
            STRIPS=STRIPS,
            num_warps=PACK_WARPS,
        )
        _run(
            "restore",
            (-(-here // tile) * tile // RESTORED,),
            *(hidden, hidden.stride(0), walk.row_scale, self.stays, self.rest, self.inverse),
            *(self.rank, walk.selection.target, self.here, self.place, self.tile_word),
            *(self.slot_at, is_sparse, self.packed, self.restore),
            self.ranked if self.needs_weight else None,
            *(first, walk.height, self.parts, tiles, walk.vocab, walk.depth),
            TILE=tile,
            ROWS=RESTORED,
            PARTS=128,
            BLOCK=min(256, row_block(walk.depth, walk.shapes)),
        )

    def add_products(self, walk: Walk, index: int, first: int, here: int) -> tuple[bool, bool]:
        """Sum what the packed tiles give to the gradients; return to which of the two.

        A dense piece finds no work here: then `dense_kept` rows are left to others, else none.
        """
        from . import selected_kernels as kernels

        shapes = self.shapes
        tile, columns, step = shapes.rows, shapes.columns, shapes.step
        run_kernel(
            kernels._linear_cross_entropy_selected_products_kernel,
            (shapes.programs,),
            *(walk.tiles_of(self.packed, step, tile), walk.tiles_of(self.packed, tile, step)),
            walk.tiles_of(self.ranked, step, columns),
            *(walk.weight, walk.grad_weight, self.sums, self.slot_column, self.column_order),
            *(self.is_sparse[index], self.block_start, self.slot_at, self.tile_start),
            *(self.tile_slot, self.tile_block, walk.counters[2, index], first),
            *(self.blocks, self.tiles, self.splits, walk.height, walk.vocab, walk.depth),
            NEEDS_HIDDEN=self.needs_hidden,
            NEEDS_WEIGHT=self.needs_weight,
            **products_constants(shapes),
        )
        if self.sums is not None:
            block = 16 if shapes.is_interpreted else min(1024, 1 << (walk.depth - 1).bit_length())
            _run(
                "rows",
                (here,),
                *(self.sums, walk.grad_hidden, self.rank, walk.selection.order, self.here),
                *(self.is_sparse[index], walk.row_scale, self.restore, first, walk.height),
                *(self.splits, walk.depth),
                BLOCK=block,
            )
        return self.needs_hidden, self.needs_weight


def _run(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel of `selected_kernels`, which is looked up: a piece has a dozen launches."""
    from . import selected_kernels

    kernel = getattr(selected_kernels, f"_linear_cross_entropy_selected_{name}_kernel")
    run_kernel(kernel, grid, *arguments, **constants)
