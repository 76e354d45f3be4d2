"""Engine T: the total and its gradients from one walk over the rows, in three products.

Pieces of R rows meet the whole vocabulary. A product in Triton writes X, probabilities up to a
factor per row, in 16 bits with fp32 statistics from the same registers; once a row's log-sum-exp is
known, its factor goes into what X is multiplied with, and X gives dE of its rows, complete, and one
summand of dC. X costs 2RV bytes and nothing of it is rounded twice; dC is rounded once per piece.
Rows whose logits lie far from where they were expected are computed again, which the GPU decides.

No call waits for the GPU or reads a value on the host; ignored rows are left out as in engine F.
bf16 with a depth that is a multiple of 8 and a contiguous weight, compute capability 9.0.

Expected time on an H200: 3 * 2NDV / 700e12, and what the logits' exponentials take beside their
product. Floors at 790e12 and predictions: N, D, V = 8192, 4096, 128256: 32.7 and 38 ms; 8192, 2304,
256000: 36.7 and 45 ms; 16384, 2048, 128256: 32.7 and 39 ms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor

from .._triton import compat as triton_compat
from .._triton.launch import run_kernel
from ..device import DEFAULT_PROCESSORS, on_device, processors
from . import fused, selected
from .call import Gradients, Knobs, Operands
from .pieces import MIB, spans
from .ranks import Ranks
from .rows import gather, row_block, select_rows
from .shapes import Shapes, shapes_for, shapes_for_programs
from .total_reference import Loss, Totals, total_of

DTYPES = (torch.bfloat16,)
serves = fused.serves

# Automatic workspace: three sixteenths of what all logits would take (X and what stands beside it
# are then under a fifth of them), up to AUTO_BYTES or, where that is more, an eighth: dC is rounded
# once per piece, and its error is 3.6e-3 at most over eight. Every piece reads and writes dC once
# more, so pieces of TALL_ROWS are taken where they are at most a sixth of all rows, or a quarter
# that fits AUTO_BYTES, and of few rows half are taken, up to LEAST_BYTES. On an H200 in pieces of
# 1024 and 2048 rows: 39.9 and 38.6 ms at 8192 x 4096 x 128256, 41.1 and 38.8 at 16384 x 2048. The
# backward of engine F, which reads dC as often and a head that is recomputed, takes a quarter up to
# AGAIN_BYTES: 62.5 and 61.7 ms at 8192 x 4096 x 151936. So does a filter, whose pieces have two
# dozen launches each.
AUTO_BYTES = 544 * MIB
AGAIN_BYTES = 608 * MIB
LEAST_BYTES = 160 * MIB
AUTO_SHARE = (3, 16)
AUTO_PIECES = 8
TALL_ROWS = 2048

# A sum is shared by at most so many programs, in pieces of at most so many rows, and at most so
# many bytes of it are kept; what stands around the sum of a tile takes as long as some steps of it.
MOST_SPLITS = 4
PARTS_BYTES = 32 * MIB
TALLEST_SPLIT = 2048
TILE_STEPS = 3

# Rows and tiles of statistics that one program merges at a time.
ROWS = 8
TILES = 128

# Elements that a program scales at a time, and programs per multiprocessor.
SCALED = 4096
SCALING_PROGRAMS = 8


def auto_bytes(rows: sympy.Expr, width: int, tallest: int) -> sympy.Expr:
    """Return the bytes that X may take by itself, for N rows of `width` logits.

    A quarter of all rows may be a piece of TALL_ROWS where that takes at most `tallest` bytes.
    """
    logits = 2 * rows * width
    most = sympy.Max(AUTO_BYTES, logits / AUTO_PIECES)
    least = sympy.Min(LEAST_BYTES, logits / 2)
    usual = sympy.Max(least, sympy.Min(most, logits * sympy.Rational(*AUTO_SHARE)))
    tall = 2 * TALL_ROWS * width
    many = (4 if tall <= tallest else 6) * TALL_ROWS
    return sympy.Piecewise((sympy.Max(usual, tall), rows >= many), (usual, True))


@lru_cache(maxsize=1024)
def piece_rows(
    rows: int,
    vocab: int,
    workspace: int,  # 0 is automatic
    tile: int,  # rows of a tile of logits
    columns: int,  # of that
    *,
    blocks: int = 0,  # at most so many to a piece, if not 0
    tallest: int = AUTO_BYTES,
) -> int:
    """Return how many rows a piece has: whole blocks, in even shares."""
    width = -(-vocab // columns) * columns
    budget = workspace or int(auto_bytes(sympy.Integer(rows), width, tallest))
    fitting = max(budget // (2 * width) // tile, 1)
    fitting = min(fitting, blocks or fitting)
    blocks = -(-rows // tile)
    return -(-blocks // -(-blocks // fitting)) * tile


@lru_cache(maxsize=1024)
def splits_of(rows: int, depth: int, vocab: int, shapes: Shapes, *, needs_weight: bool) -> int:
    """Return over how many programs the sum of a tile of dE is shared.

    A tile of dE sums over the vocabulary, and a piece of few rows has few of them: one program
    would be at its tile when all others are done with dC.
    """
    if rows > TALLEST_SPLIT:
        return 1
    columns = -(-depth // shapes.columns)
    hidden_tiles = -(-rows // shapes.rows) * columns
    hidden_steps = -(-vocab // shapes.step)
    weight_tiles = -(-vocab // shapes.rows) * columns if needs_weight else 0
    # What stands around the sum of a tile takes as long as some steps of it.
    weight_steps = weight_tiles * (-(-rows // shapes.step) + TILE_STEPS)

    def time(splits: int) -> float:
        longest = -(-hidden_tiles * splits // shapes.programs) * -(-hidden_steps // splits)
        all_steps = hidden_tiles * (hidden_steps + splits * TILE_STEPS) + weight_steps
        return max(longest, all_steps / shapes.programs)

    fitting = [n for n in range(1, MOST_SPLITS + 1) if 4 * (n - 1) * rows * depth <= PARTS_BYTES]
    return min(fitting, key=time)


def parts_bytes(
    rows: sympy.Expr, depth: int, vocab: int, workspace: int, tallest: int
) -> sympy.Expr:
    """Return a bound of the bytes of what is kept of dE; of any number of rows if N is a symbol."""
    shapes = shapes_for_programs(DEFAULT_PROCESSORS)
    heights = range(shapes.rows, TALLEST_SPLIT + 1, shapes.rows)
    if rows.is_number:
        height = piece_rows(
            int(rows), vocab, workspace, shapes.rows, shapes.columns, tallest=tallest
        )
        heights = range(height, height + 1)
    return max(
        4 * (splits_of(height, depth, vocab, shapes, needs_weight=needs) - 1) * height * depth
        for height in heights
        for needs in (False, True)
    )


def bytes_held(
    rows: sympy.Expr,
    depth: int,
    vocab: int,
    workspace: int,
    *,
    is_plain: bool,
    gradient_filter: str = "exact",
    tallest: int = AUTO_BYTES,
) -> sympy.Expr:
    """Return a bound of the bytes of X, its statistics and the scaled rows of one piece.

    A filter holds the tiles that count besides.
    """
    shapes = shapes_for_programs(DEFAULT_PROCESSORS)
    columns = shapes.gradient_columns(is_plain=is_plain)
    width = -(-vocab // shapes.columns) * shapes.columns
    is_filtered = selected.leaves_out(gradient_filter, depth, vocab, workspace)
    tallest = AGAIN_BYTES if is_filtered else tallest
    budget = workspace or auto_bytes(rows, width, tallest)
    height = sympy.Max(budget / (2 * width), shapes.rows)
    if is_filtered:
        height = sympy.Min(height, selected.BLOCKS * shapes.rows)
    held = height * (2 * width + 8 * -(-vocab // columns) + 2 * depth)
    if is_filtered:
        # A selection has an order of rows, and every one of them may be copied in it.
        held += selected.bytes_held(height, depth, vocab) + 12 * rows
    return held + parts_bytes(rows, depth, vocab, workspace, tallest)


def scales(gradient: Tensor, by: Tensor, out: Tensor) -> bool:
    """Say whether `scale_into` can serve these tensors, on a device with kernels."""
    return by.dtype == torch.float32 and gradient.is_contiguous() and out.is_contiguous()


def scale_into(gradient: Tensor, by: Tensor, out: Tensor) -> None:
    """Write gradient * by, in fp32 and rounded once, to `out`, which may be `gradient`.

    The number is read on the GPU; all are contiguous. In place, a factor of 1 costs a launch.
    """
    from . import total_kernels as kernels

    count, is_in_place = gradient.numel(), out is gradient
    if not count:
        return
    programs = min(-(-count // SCALED), SCALING_PROGRAMS * processors(gradient.device))
    with on_device(gradient):
        run_kernel(
            kernels._linear_cross_entropy_total_scale_kernel,
            (programs,),
            *(gradient, by, out, count),
            IN_PLACE=is_in_place,
            BLOCK=SCALED,
            num_warps=4,
        )
    torch.autograd.graph.increment_version(out)


def run(given: Loss) -> Totals:
    """Compute the total and the gradients asked for, in bf16 and of a contiguous weight."""
    with on_device(given.hidden):
        walk = _Total(given)
        for index, (first, stop) in enumerate(spans(0, walk.rows, walk.height)):
            walk.piece(index, first, stop - first)
        total = total_of(walk.nll, given.row_weight, given.norm)
        return Totals(total, *walk.gradients())


class Walk(ABC):
    """A walk over pieces of R rows: X of a piece, and the products that make gradients of it.

    X, R by the vocabulary in whole tiles, is what the gradients of the piece's logits are but for a
    factor per row. `height` is R, `columns` the width of a tile of X and `tiles` their number.
    """

    tallest = AUTO_BYTES

    def __init__(
        self, given: Operands, knobs: Knobs, output_mask: Sequence[bool], *, height: int = 0
    ) -> None:
        """Allocate what the walk needs. A height that is given is whole tiles, as ranks agreed."""
        hidden, weight, bias, target, *_ = given
        hidden = fused.aligned(hidden)
        self.hidden, self.weight, self.knobs = hidden, weight, knobs
        self.bias = None if bias is None else bias.contiguous()
        (self.rows, self.depth), self.vocab = hidden.shape, weight.shape[0]
        self.shapes: Shapes = shapes_for(hidden.device)
        needs_hidden, needs_weight, needs_bias = output_mask
        self.described: dict[tuple[Any, ...], Any] = {}
        self.selection = select_rows(target, knobs)
        sizes = self.depth, self.vocab, knobs.workspace
        is_filtered = selected.leaves_out(knobs.gradient_filter, *sizes)
        self.is_compact = self.selection.kept is not None
        if is_filtered:
            self.selection = selected.all_rows(self.selection)
        self.filter: selected.Filter | None = None
        self.cap = (knobs.scale, knobs.softcap)
        self.flags = {
            "HAS_BIAS": bias is not None,
            "HAS_KEPT": self.selection.kept is not None,
            "HAS_SOFTCAP": knobs.softcap > 0,
        }
        tile = self.shapes.rows
        self.columns = self.shapes.gradient_columns(is_plain=fused.is_plain(bias, knobs))
        self.height = height or piece_rows(
            *(self.rows, self.vocab, knobs.workspace, tile, self.shapes.columns),
            blocks=selected.BLOCKS if is_filtered else 0,
            tallest=AGAIN_BYTES if is_filtered else self.tallest,
        )
        self.tiles = -(-self.vocab // self.columns)
        self.width = self.tiles * self.columns

        # Ignored rows, which no kernel writes, have a gradient of zero.
        new = torch.zeros_like if self.is_compact else torch.empty_like
        self.grad_hidden = new(hidden) if needs_hidden else None
        self.grad_weight = torch.empty_like(weight) if needs_weight else None
        self.bias_sums = None
        if needs_bias:
            self.bias_sums = hidden.new_zeros(self.vocab, dtype=torch.float32)
        self.x = hidden.new_empty((self.height, self.width))
        self.row_scale = self.floats(self.height)
        pieces = -(-self.rows // self.height)
        tiles = -(-self.height // tile) * -(-self.depth // self.shapes.columns)
        self.has_gluon = not self.shapes.is_interpreted and triton_compat.has_gluon()
        self.splits, self.parts = 1, None
        if self.has_gluon and needs_hidden:
            self.splits = splits_of(
                self.height, self.depth, self.vocab, self.shapes, needs_weight=needs_weight
            )
        if self.splits > 1:
            self.parts = self.floats(self.splits - 1, self.height, self.depth)
        # Two launches of products a piece, a filter's, and whether a base was far off; multiples of
        # 16 bytes, so that every piece's launches are compiled alike.
        self.counters = self.marks(4, pieces, 4 + tiles // 4 * 4)
        if is_filtered:
            self.filter = selected.Filter(self, pieces)

    def floats(self, *sizes: int) -> Tensor:
        """Return memory for numbers in fp32."""
        return self.hidden.new_empty(sizes, dtype=torch.float32)

    def ints(self, *sizes: int) -> Tensor:
        """Return memory for whole numbers."""
        return self.hidden.new_empty(sizes, dtype=torch.int32)

    def marks(self, *sizes: int) -> Tensor:
        """Return zeros that kernels write to."""
        return self.hidden.new_zeros(sizes, dtype=torch.int32)

    def tiles_of(
        self, matrix: Tensor, rows: int, columns: int, describe: Any = fused.tiles_of
    ) -> Any:
        """Describe a matrix to the kernels as tiles of this shape, once for all pieces."""
        key = id(matrix), rows, columns, describe
        if key not in self.described:
            self.described[key] = describe(matrix, rows, columns)  # it holds the matrix
        return self.described[key]

    @abstractmethod
    def weigh(
        self, inverse: Tensor, light: Tensor, rows_here: Tensor, first: int, here: int
    ) -> None:
        """Tell a filter what X of a row is times, what is light in it, and how many rows count."""

    def gradients(self) -> Gradients:
        """Return what was asked for, behind the last piece."""
        sums = self.bias_sums
        return self.grad_hidden, self.grad_weight, None if sums is None else sums.to(self.bias)

    def add_products(self, index: int, first: int, here: int, factor: Tensor | None) -> None:
        """Sum what X gives to the gradients, by the kernels that this Triton has.

        A piece has a number, a first compact row, and may have so many. For dC X is multiplied with
        the factor, (R, D), which is zero behind the last row. A filter leaves out what it may.
        """
        from . import total_kernels as kernels

        needs = self.grad_hidden is not None, self.grad_weight is not None
        if self.filter is not None and any(needs):
            filtered = self.filter.add_products(self, index, first, here)
            whole = needs[0] and not filtered[0], needs[1] and not filtered[1]
            self._multiply((index, 0), first, here, factor, filtered, self.filter.dense_kept[index])
        else:
            whole = needs
        if any(whole):
            self._multiply((index, 1), first, here, factor, whole, self.selection.kept)
        if self.bias_sums is not None:
            run_kernel(
                kernels._linear_cross_entropy_total_bias_kernel,
                (-(-self.vocab // 128),),
                *(self.x, self.row_scale, self.bias_sums, self.selection.kept),
                *(first, here, self.width, self.vocab),
                BLOCK=128,
                ROWS=64,
                **self.flags,
            )

    def _multiply(
        self,
        number: tuple[int, int],  # of the piece, and which launch of it this is
        first: int,
        here: int,
        factor: Tensor | None,
        needs: tuple[bool, bool],  # which gradients are asked for, of hidden states and weight
        kept: Tensor | None,  # how many rows count
    ) -> None:
        needs_hidden, needs_weight = needs
        shapes, selection = self.shapes, self.selection
        rows, columns, step = shapes.rows, shapes.columns, shapes.step
        kernel: Any
        describe: Any = fused.tiles_of
        parts, splits, constants = [], [], shapes.constants(columns)
        if self.has_gluon:
            from .._triton.gluon import tiles_of as describe
            from . import total_products_kernels

            kernel = total_products_kernels._linear_cross_entropy_total_specialized_products_kernel
            parts, splits = [self.parts], [self.splits]
            del constants["num_stages"]  # it has stages of its own
        else:
            from . import total_kernels

            kernel = total_kernels._linear_cross_entropy_total_products_kernel
        # What is not asked for is not read; something has to stand there.
        scaled = self.weight if factor is None else factor
        written = self.x if self.grad_weight is None else self.grad_weight
        wide = step, columns
        run_kernel(
            kernel,
            (shapes.programs,),
            self.tiles_of(self.x, step, rows, describe),
            self.tiles_of(self.x, rows, step, describe),
            self.tiles_of(scaled, *wide, describe),
            self.tiles_of(self.weight, *wide, describe),
            self.tiles_of(written, rows, columns // 4, describe),
            *(self.grad_hidden, *parts, selection.order, kept, self.row_scale),
            *(self.counters[number[1], number[0]], first, here),
            *(self.width, self.vocab, self.depth, *splits),
            ADD=number[0] > 0,
            MAY_REST=number[0] > 0 or kept is not self.selection.kept,
            HAS_PARTS=self.parts is not None,
            NEEDS_WEIGHT=needs_weight,
            NEEDS_HIDDEN=needs_hidden,
            STAGES=shapes.stages,
            WARPS=shapes.warps,
            **constants,
            **self.flags,
        )


class _Total(Walk):
    """The walk of engine T: logits once, and their gradients from them."""

    def __init__(self, given: Loss) -> None:
        self.ranks = given.ranks
        height = 0 if self.ranks is None else self.ranks.height
        super().__init__(Operands(*given[:4]), given.knobs, given.output_mask, height=height)
        self.factor = given.row_gradients(torch.float32)
        # Ignored rows, which no kernel writes, have a loss of zero.
        new = torch.zeros_like if self.is_compact else torch.empty_like
        self.nll = new(self.hidden[:, 0], dtype=torch.float32)
        self.stats = self.floats(2, self.tiles, self.height)
        self.base, self.target_logit = self.floats(self.height), self.floats(self.height)
        self.scaled: Tensor | None = None
        if self.grad_weight is not None or self.is_compact:
            self.scaled = self.hidden.new_empty((self.height, self.depth))
        self.said = None if self.ranks is None else self.floats(2 * self.height)

    def piece(self, index: int, first: int, here: int) -> None:
        """Compute the losses of these rows, their dE and what they give to dC."""
        from . import total_kernels as kernels

        selection, again, rows = self.selection, self.counters[3, index], self.shapes.rows
        hidden, block = self.hidden[first : first + here], row_block(self.depth, self.shapes)
        if self.is_compact:
            assert self.scaled is not None
            hidden = self.scaled[:here]
            gather(self.hidden, hidden, selection, first, self.shapes)
        run_kernel(
            kernels._linear_cross_entropy_total_base_kernel,
            (here,),
            *(hidden, hidden.stride(0), self.weight, self.bias, selection.target, selection.kept),
            *(self.base, first, here, self.vocab, self.depth, *self.cap),
            BLOCK=block,
            HAS_RANKS=self.ranks is not None,
            **self.flags,
        )
        self._logits(first, here, None)
        self._rows(first, here, again, is_final=False)
        self._logits(first, here, again)
        self._rows(first, here, again, is_final=True)
        if self.ranks is not None:
            self._meet(self.ranks, first, here)
        if self.filter is not None:
            self.filter.choose(self, hidden, index, first, here)
        if self.grad_weight is not None:
            assert self.scaled is not None
            run_kernel(
                kernels._linear_cross_entropy_total_scale_rows_kernel,
                (min(-(-here // rows) * rows, self.height),),
                *(hidden, hidden.stride(0), self.row_scale, selection.kept, self.scaled),
                *(first, here, self.depth),
                PAD=rows,
                BLOCK=block,
                **self.flags,
            )
        self.add_products(index, first, here, self.scaled)

    def weigh(
        self, inverse: Tensor, light: Tensor, rows_here: Tensor, first: int, here: int
    ) -> None:
        from . import selected_kernels as kernels

        run_kernel(
            kernels._linear_cross_entropy_selected_weigh_kernel,
            (-(-here // ROWS),),
            *(self.stats, self.base, self.selection.kept, inverse, light, rows_here),
            *(first, here, self.tiles, self.knobs.scale),
            HAS_KEPT=True,
            ROWS=ROWS,
            TILES=TILES,
        )

    def _logits(self, first: int, here: int, again: Tensor | None) -> None:
        from . import total_kernels as kernels

        shapes, selection = self.shapes, self.selection
        gathered = self.scaled if self.is_compact else self.hidden
        assert gathered is not None
        run_kernel(
            kernels._linear_cross_entropy_total_logits_kernel,
            (shapes.programs,),
            self.tiles_of(gathered, shapes.rows, shapes.step),
            self.tiles_of(self.weight, self.columns, shapes.step),
            self.tiles_of(self.x, shapes.rows, self.columns // 4),
            *(self.bias, selection.target, selection.kept, again),
            *(self.base, self.stats, self.target_logit),
            *(first, 0 if self.is_compact else first, here, self.vocab, self.depth, *self.cap),
            HAS_AGAIN=again is not None,
            FLATTEN=shapes.flatten,
            **shapes.constants(self.columns),
            **self.flags,
        )

    def _rows(self, first: int, here: int, again: Tensor, *, is_final: bool) -> None:
        from . import total_kernels as kernels

        selection = self.selection
        run_kernel(
            kernels._linear_cross_entropy_total_rows_kernel,
            (-(-here // ROWS),),
            *(self.stats, self.target_logit, selection.target, selection.order, selection.kept),
            *(self.factor, self.base, again, self.row_scale, self.x, self.nll, self.said),
            *(first, here, self.tiles, self.width, self.vocab, *self.cap),
            FINAL=is_final,
            HAS_RANKS=self.ranks is not None,
            ROWS=ROWS,
            TILES=TILES,
            num_warps=4,
            **self.flags,
        )

    def _meet(self, ranks: Ranks, first: int, here: int) -> None:
        """Tell the other ranks what these rows have here, and finish them with what those say."""
        from . import total_kernels as kernels

        assert self.said is not None
        every, selection = ranks.gather(self.said[: 2 * here].view(2, here)), self.selection
        run_kernel(
            kernels._linear_cross_entropy_total_ranks_kernel,
            (-(-here // ROWS),),
            *(every, self.target_logit, selection.target, ranks.owner, selection.order),
            *(selection.kept, self.factor, self.row_scale, self.x, self.nll),
            *(first, here, self.width, ranks.rank, ranks.ranks, *self.cap),
            ROWS=ROWS,
            num_warps=4,
            **self.flags,
        )
