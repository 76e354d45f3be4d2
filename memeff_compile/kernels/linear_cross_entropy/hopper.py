"""The implementation `hopper`: Triton kernels for every product of the output projection, on GPUs
of compute capability 9.0.

Below, E is the hidden states (N x D, one row per token) and C the weight (V x D, one row per
class). Their gradients are dE and dC. A "row" without a matrix is a row of E, that is, a token. The
forward pass reduces each tile of logits to a maximum and a sum of exponentials per row, and merges
these numbers in a fixed order. The tile that contains a row's target also stores the target's
logit. No other logit is written to memory.

The backward pass usually processes blocks of R rows one after another. For each block, the kernels
compute the logits again and write their gradient, G = dloss/dlogits, in 16 bits for the whole
vocabulary. From G, the kernels compute the hidden-state gradient dE of these rows, and add the
block's contribution to the weight gradient dC. Until the last block, the weight's gradient (dC) is
stored in fp16, because its sums need three more bits than bf16 has. Each row of dC is divided into
slices of SLICE (64) neighbouring numbers. Each slice has one scale, which is a power of two.

A backward pass by blocks of W classes takes less memory than one by blocks of rows, and supports
fp16 and a workspace limit. For each block of classes, the kernels write the weight's gradient for
these classes once. The hidden states' gradient is summed in fp32; each launch adds to each element
once. A very small workspace limit selects the mode with the least temporary memory. Then the
logits' gradient and the fp32 sums use rows of the weight gradient's memory that are not yet
written.

Usually, a scalar loss and its gradients are computed together, with three matrix products for each
block of rows. The backward pass then computes no logits. The first product writes a matrix X, which
contains the softmax probabilities up to one factor per row. X is in 16 bits and takes 2RV bytes for
R rows and V classes. For each tile of logits, the same product computes each row's largest logit
and sum of exponentials, in fp32. Later kernels add up each row's sums over all tiles. With the
total sum, these kernels compute the row's loss and factor. The products that compute dE and dC
multiply X by operands that contain this factor. X contains exponentials of the logits minus a
number per row, usually the logit of the row's target. If a row's largest logit is far from this
number, that logit replaces the number. All logits of the block of rows are then computed again.

The GPU permutes the rows so that all products leave out the ignored rows. The CPU never waits for
the GPU or reads a value from it. This implementation needs bf16 or fp16 (blocks of rows need bf16),
a hidden size that is a multiple of 8, and a contiguous weight.

In 16 bits, matrix products on an H200 reach at most 790e12 operations per second. The predicted
times below assume 700e12 operations, and 4.28e12 bytes read or written, per second. Consider a loss
that returns one number per row, with a backward pass by blocks of classes. On an H200, the forward
plus backward pass of this loss should take 4 * 2NDV / 700e12 + 8ND * blocks / 4.28e12 seconds. The
first term is the time of four matrix products. The second term is the time to read and write the
hidden states' gradient (dE) once per block. A scalar loss should take 3 * 2NDV / 700e12 seconds,
and additional time for the exponentials of the logits. A lower bound of this time is 3 * 2NDV /
790e12 seconds, at the highest rate. The lower bounds and the predicted times of a scalar loss are:

- for N, D, V = 8192, 4096, 128256: at least 32.7 ms, and 38 ms predicted;
- for N, D, V = 8192, 2304, 256000: at least 36.7 ms, and 45 ms predicted;
- for N, D, V = 16384, 2048, 128256: at least 32.7 ms, and 39 ms predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._head_loss.call import (
    Gradients,
    LossAndGradients,
    Operands,
    RowGradients,
    RowResults,
    Saved,
    ScalarLoss,
    Settings,
    vector,
)
from .._head_loss.ranks import Ranks
from .._head_loss.row_walks import RowWalk
from .._head_loss.rows import Selection, aligned, copy_rows, row_values, select_rows, tiles_of
from .._head_loss.shapes import row_block, spans
from .._head_loss.walks import Block, Differentiating, Statistics
from .._triton import compat as triton_compat
from .._triton.launch import start
from . import hopper_kernels as kernels
from .shapes import (
    GROUP,
    ROWS,
    SLICE,
    SUMMED_COLUMNS,
    SUMMED_ROWS,
    TILES,
    forward_rows,
    hopper_columns,
    hopper_rows,
    is_minimal,
    product_tile,
    room_inside,
    shapes_for,
    slices_of,
    splits_of,
)


class Forward(Statistics):
    """The forward pass over all rows (tokens): for each tile of logits, it computes statistics such
    as maxima, and merges them."""

    def __init__(self, given: Operands, settings: Settings) -> None:
        self.given = given._replace(
            hidden=aligned(given.hidden),
            bias=vector(given.bias, None),
            column_weight=vector(given.column_weight, torch.float32),
        )
        hidden, weight, self.settings = self.given.hidden, given.weight, settings
        (self.extent, depth), self.shapes = hidden.shape, shapes_for(hidden.device)
        self.selection = select_rows(given.target, settings)
        self.tiles = -(-len(weight) // self.shapes.columns)
        planes = 2 + settings.with_logit_sum + settings.with_entropy
        self.is_compact = self.selection.kept is not None
        bytes_per_row = 4 * planes * self.tiles + (2 * depth if self.is_compact else 0)
        self.step = forward_rows(self.extent, bytes_per_row, self.shapes)
        self.stats = hidden.new_empty((planes, self.tiles, self.step), dtype=torch.float32)
        self.gathered = hidden.new_empty((self.step, depth)) if self.is_compact else hidden
        # Ignored rows, which no kernel writes, are zero.
        self.found = RowResults.new(hidden, (self.extent,), settings, of_zeros=self.is_compact)
        self.target_logit = torch.full((self.extent,), float("nan"), device=hidden.device)
        self.hidden_desc = tiles_of(self.gathered, self.shapes.rows, self.shapes.step)
        self.weight_desc = tiles_of(weight, self.shapes.columns, self.shapes.step)

    def statistics(self, block: Block) -> None:
        given, settings, shapes, found = self.given, self.settings, self.shapes, self.found
        selection, first, here = self.selection, block.first, block.stop - block.first
        if self.is_compact:
            out, order, kept = self.gathered[:here], selection.order, selection.kept
            copy_rows(given.hidden, out, shapes, order, kept, first=first)
        start(
            kernels._linear_cross_entropy_hopper_statistics_kernel,
            (shapes.programs,),
            *(self.hidden_desc, self.weight_desc, given.bias, given.column_weight),
            *(selection.target, selection.kept, self.stats, self.target_logit),
            *(first, 0 if self.is_compact else first, here, *given.weight.shape),
            *(settings.scale, settings.softcap),
            **given.flags(settings),
            HAS_KEPT=self.is_compact,
            FLATTEN=shapes.flatten,
            **shapes.constants(shapes.columns),
        )
        start(
            kernels._linear_cross_entropy_hopper_merge_kernel,
            (-(-here // ROWS),),
            *(self.stats, self.target_logit, selection.target, selection.order, selection.kept),
            *(found.nll, found.lse, found.logit_sum if settings.with_logit_sum else None),
            *(found.entropy if settings.with_entropy else None, first, here, self.tiles),
            HAS_KEPT=self.is_compact,
            WITH_LOGIT_SUM=settings.with_logit_sum,
            WITH_ENTROPY=settings.with_entropy,
            ROWS=ROWS,
            TILES=TILES,
            num_warps=4,
        )

    def results(self) -> RowResults:
        return self.found


class _Gradient:
    """A kernel launch that writes the logits' gradient G for some rows and classes, from known
    statistics of the rows."""

    def __init__(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        selection: Selection,
    ) -> None:
        self.settings, self.selection, self.weight = settings, selection, given.weight
        self.values = row_values(grads, saved, selection, settings)
        column_weight = vector(given.column_weight, torch.float32)
        self.vectors = (vector(given.bias, None), column_weight, selection.target, self.values)
        self.flags, self.shapes = given.flags(settings), shapes_for(given.hidden.device)
        self.columns = self.shapes.gradient_columns(is_plain=_is_plain(given.bias, settings))

    def write(
        self,
        hidden: Tensor | None,  # gathered rows of the hidden states, or None
        g: Tensor,  # written
        columns: int,  # of a tile of G
        at: tuple[int, int, int, int],  # first row of G, rows, first column, columns
        *,
        # hidden states that are not gathered, the order of their rows, and the stride of rows
        where: tuple[Tensor | None, Tensor | None, int] = (None, None, 0),
    ) -> None:
        """Compute the logits of some rows and classes again, and write their gradient into `g`."""
        shapes, settings, kept = self.shapes, self.settings, self.selection.kept
        start(
            kernels._linear_cross_entropy_hopper_gradient_kernel,
            (shapes.programs,),
            *(tiles_of(hidden, shapes.rows, shapes.step), *where),
            *(tiles_of(self.weight, columns, shapes.step), tiles_of(g, shapes.rows, columns // 4)),
            *(self.vectors, kept, *at, self.values.shape[1], *self.weight.shape),
            (settings.scale, settings.softcap),
            GATHER=hidden is None,
            HAS_KEPT=kept is not None,
            GROUP=GROUP,
            FLATTEN=shapes.flatten and hidden is not None,
            **shapes.constants(columns),
            **self.flags,
        )


class BackwardByClasses(Differentiating):
    """The fused loss's backward pass by blocks of classes.

    Each block completes its rows of the weight's gradient (dC). Each block also adds its
    contribution to the hidden states' gradient (dE) in fp32."""

    def __init__(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        output_mask: Sequence[bool],
    ) -> None:
        hidden, self.weight = aligned(given.hidden), given.weight
        shapes = self.shapes = shapes_for(hidden.device)
        (self.rows, self.depth), self.extent = hidden.shape, len(given.weight)
        of_hidden, of_weight, of_bias = output_mask[:3]
        self.selection = select_rows(given.target, settings)
        self.grad_weight = torch.empty_like(given.weight) if of_weight else None
        self.bias = given.bias
        self.bias_sums: Tensor | None = None
        if of_bias and given.bias is not None:
            self.bias_sums = hidden.new_zeros(self.extent, dtype=torch.float32)
        # The hidden gradient's own memory holds the gathered rows until it is written.
        self.original = self.hidden = hidden
        if self.selection.kept is not None:
            self.hidden = hidden.new_empty(hidden.shape)
            order, kept = self.selection.order, self.selection.kept
            copy_rows(hidden, self.hidden, shapes, order, kept)
        self.gradient = _Gradient(grads, given, saved, settings, self.selection)
        size = (self.rows, self.depth, self.extent)
        self.step = hopper_columns(*size, settings.workspace, shapes)
        self.inside = None
        if is_minimal(settings.workspace) and self.grad_weight is not None:
            self.inside = room_inside(*size, shapes, needs_hidden=of_hidden)
        # fp32 sums of the hidden gradient
        self.sums: Tensor | None = None
        if self.inside is not None and self.grad_weight is not None:
            room = self.grad_weight.view(-1)[self.inside.first_column * self.depth :]
            if of_hidden:
                self.sums = room[: 2 * hidden.numel()].view(torch.float32).view(hidden.shape)
            self.buffer = room[2 * hidden.numel() if of_hidden else 0 :]
        else:
            if of_hidden:
                self.sums = hidden.new_empty(hidden.shape, dtype=torch.float32)
            self.buffer = hidden.new_empty(self.rows * self.step)
        self.adds = self.gathers = False
        self.writes_weight = True
        self.grad_hidden: Tensor | None = None

    def blocks(self) -> Iterator[Block]:
        if self.inside is not None:
            yield from self._blocks_inside()
            return
        for block in super().blocks():
            yield block
            self.adds = True
        self._finish_hidden()

    def _blocks_inside(self) -> Iterator[Block]:
        """Use the last rows of the weight's gradient as temporary memory, and compute the values of
        these rows last.

        Each row of the weight's gradient belongs to a class. First, the classes of the last rows
        contribute to the hidden states' gradient. Their own rows of the weight's gradient cannot be
        written yet. The memory of these rows contains the logits' gradient G and the fp32 sums of
        the hidden states' gradient. So the logits of the last classes are computed twice: for the
        hidden states' gradient, and later for the weight's gradient. The fp32 sums of the hidden
        states' gradient are freed when this gradient is complete. From then on, the logits'
        gradient G is stored in the weight gradient's memory: only in rows that are not yet written.
        When too few of these rows are left, G is stored in a spare buffer.
        """
        room = self.inside
        assert room is not None
        assert self.grad_weight is not None
        if self.sums is not None:
            self.writes_weight = False
            for first, stop in spans(room.first_column, self.extent, room.width):
                yield Block(0, first, stop)
                self.adds = True
            self.writes_weight = True
        for first, stop in spans(0, room.first_column, room.width):
            yield Block(0, first, stop)
            self.adds = True
        self._finish_hidden()
        self.sums, self.adds = None, False
        flat, first = self.grad_weight.view(-1), room.first_column
        spare = flat.new_empty(self.rows * room.spare_width)
        # From here on the hidden gradient overwrites the gathered rows.
        self.gathers = self.selection.kept is not None
        while first < self.extent:
            width = room.retreating_width(first)
            if width:
                self.buffer = flat[-self.rows * width :]
            else:
                width, self.buffer = room.spare_width, spare
            yield Block(0, first, min(first + width, self.extent))
            first += width

    def _finish_hidden(self) -> None:
        """Round the fp32 sums of the hidden states' gradient to the dtype of the hidden states."""
        if self.sums is None:
            return
        if self.selection.place is None:
            self.grad_hidden = self.sums.to(self.hidden.dtype)
            return
        copy_rows(self.sums, self.hidden, self.shapes, self.selection.place)
        self.grad_hidden = self.hidden

    def gradients(self, block: Block) -> None:
        _, first, stop = block
        shapes, selection, gathers = self.shapes, self.selection, self.gathers
        tile, columns, step = shapes.rows, shapes.columns, shapes.step
        width = -(-(stop - first) // columns) * columns
        g = self.buffer[: self.rows * width].view(self.rows, width)
        where = (
            self.original if gathers else None,
            selection.order if gathers else None,
            self.original.stride(0),
        )
        hidden = None if gathers else self.hidden
        g_columns = shapes.rows if gathers else self.gradient.columns
        grad_weight = self.grad_weight if self.writes_weight else None
        at = (0, self.rows, first, width)
        self.gradient.write(hidden, g, g_columns, at, where=where)
        if self.sums is not None or grad_weight is not None:
            start(
                kernels._linear_cross_entropy_hopper_class_products_kernel,
                (shapes.programs,),
                *(tiles_of(g, step, tile), tiles_of(g, tile, step)),
                *(tiles_of(hidden, step, columns), *where, tiles_of(self.weight, step, columns)),
                tiles_of(grad_weight, tile, columns // 4),
                *(tiles_of(self.sums, tile, columns // 4), selection.kept, first, width),
                *(self.rows, self.depth),
                NEEDS_WEIGHT=grad_weight is not None,
                NEEDS_HIDDEN=self.sums is not None,
                ADD=self.adds,
                GATHER=gathers,
                **shapes.constants(columns),
                HAS_KEPT=selection.kept is not None,
            )
        if self.bias_sums is not None and self.writes_weight:
            of_block = (0, self.rows, first, width, stop)
            add_columns(g, None, self.bias_sums, selection.kept, of_block, start)

    def results(self) -> Gradients:
        of_bias = None if self.bias_sums is None else self.bias_sums.to(self.bias)
        return Gradients(self.grad_hidden, self.grad_weight, of_bias)


class ByRows(RowWalk):
    """A loop over blocks of rows (tokens) that computes the logits' gradients, and from them the
    gradients of hidden states, weight and bias.

    The matrix X is the logits' gradient of a block up to a factor per row. X has R rows, and one
    column per class, padded to whole tiles. The attribute `step` is R, `columns` is the width of a
    tile of X, and `tiles` is the number of tiles.
    """

    def __init__(
        self, given: Operands, settings: Settings, output_mask: Sequence[bool], *, height: int = 0
    ) -> None:
        """Allocate the buffers that all blocks of rows (tokens) share.

        If `height` is not 0, it is the number of rows per block that all ranks use, a multiple of
        the tile height.
        """
        self.shapes = shapes = shapes_for(given.hidden.device)
        super().__init__(given, settings, output_mask, shapes)
        hidden, (of_hidden, of_weight) = self.hidden, output_mask[:2]
        sizes = self.depth, self.vocab, settings.workspace
        self.columns = shapes.gradient_columns(is_plain=_is_plain(self.bias, settings))
        self.step = height or hopper_rows(self.extent, *sizes, shapes)
        self.tiles = -(-self.vocab // self.columns)
        self.width = self.tiles * self.columns
        self.x = hidden.new_empty((self.step, self.width))
        self.row_scale = self.floats(self.step)
        blocks = -(-self.extent // self.step)
        self.has_gluon = not shapes.is_interpreted and triton_compat.has_gluon()
        self.tile = shapes.rows, shapes.columns
        if self.has_gluon:
            self.tile = product_tile(self.depth, shapes)
        tiles = -(-self.step // self.tile[0]) * -(-self.depth // self.tile[1])
        # Exponents of dC between blocks, if it is in fp16 then.
        self.scales: Tensor | None = None
        if self.has_gluon and of_weight and blocks > 1:
            slices = slices_of(self.depth, shapes)
            self.scales = hidden.new_empty((slices, self.width), dtype=torch.uint8)
        self.splits, self.parts = 1, None
        if self.has_gluon and of_hidden:
            sizes = self.step, self.depth, self.vocab
            self.splits = splits_of(*sizes, shapes, needs_weight=of_weight)
        if self.splits > 1:
            self.parts = self.floats(self.splits - 1, self.step, self.depth)
        # For each block: a counter for the products' tiles, and a flag that says whether a base was
        # far off. Each block has a multiple of 16 bytes, so that all use the same compiled kernels.
        self.counters = hidden.new_zeros((2, blocks, 4 + tiles // 4 * 4), dtype=torch.int32)

    def add_products(self, block: Block, factor: Tensor | None) -> None:
        """Compute what one block of rows (tokens) contributes to the gradients of hidden states,
        weight and bias.

        The block's matrix X is the logits' gradient up to a factor per row. The method writes the
        block's rows of the hidden states' gradient. For the weight and the bias, the method adds to
        the gradients of earlier blocks.

        For the hidden states' gradient (dE), X is multiplied by the weight. For the weight's
        gradient (dC), X is multiplied by the matrix `factor`. The rows of `factor` are the block's
        hidden states, each multiplied by its row's factor. Rows of `factor` after the block's last
        row are zero or do not exist. For these products, the method uses a Gluon kernel if the
        installed Triton version has Gluon. Otherwise the method uses a kernel in plain Triton.
        """
        if self.grad_hidden is not None or self.grad_weight is not None:
            self._multiply(block, factor)
        if self.bias_sums is not None:
            at = (block.first, block.stop - block.first, 0, self.width, self.vocab)
            sums, kept = self.bias_sums, self.selection.kept
            add_columns(self.x, self.row_scale, sums, kept, at, self.launch)

    def _multiply(self, block: Block, factor: Tensor | None) -> None:
        needs_hidden, needs_weight = self.grad_hidden is not None, self.grad_weight is not None
        shapes, selection = self.shapes, self.selection
        (rows, columns), step = self.tile, shapes.step
        kernel: Any = kernels._linear_cross_entropy_hopper_products_kernel
        describe: Any = tiles_of
        parts, splits, constants, slices = [], [], shapes.constants(columns), columns // 4
        if self.has_gluon:
            from .._triton import specialized_products_kernels as specialized
            from .._triton.gluon import tiles_of as describe

            kernel = specialized._linear_cross_entropy_hopper_specialized_products_kernel
            parts, splits, slices = [self.scales, self.parts], [self.splits], SLICE
            del constants["num_stages"]  # the kernel itself chooses the number of pipeline stages
            constants |= {"BM": rows, "HAS_SCALES": self.scales is not None}
            constants["LAST"] = block.stop == self.extent
        # Arguments of gradients that are not requested are never read, but some tensor must be
        # passed.

        may_rest = block.number > 0
        if self.scales is not None and block.stop == self.extent:
            may_rest = False  # the sums must be converted to bf16
        scaled = self.weight if factor is None else factor
        written = self.x if self.grad_weight is None else self.grad_weight
        wide = step, columns
        self.launch(
            kernel,
            (shapes.programs,),
            self.tiles_of(self.x, step, rows, describe),
            self.tiles_of(self.x, rows, step, describe),
            self.tiles_of(scaled, *wide, describe),
            self.tiles_of(self.weight, *wide, describe),
            self.tiles_of(written, rows, slices, describe),
            *(self.grad_hidden, *parts, selection.order, selection.kept, self.row_scale),
            *(self.counters[0, block.number], block.first, block.stop - block.first),
            *(self.width, self.vocab, self.depth, *splits),
            ADD=block.number > 0,
            MAY_REST=may_rest,
            HAS_PARTS=self.parts is not None,
            NEEDS_WEIGHT=needs_weight,
            NEEDS_HIDDEN=needs_hidden,
            STAGES=shapes.stages,
            WARPS=shapes.warps,
            **constants,
            **self.flags,
        )


class BackwardByRows(ByRows):
    """The fused loss's backward pass by blocks of rows (tokens).

    A `ByRows` loop computes a matrix X that is the logits' gradient G up to a factor per row. Here,
    X is G itself, so each factor is 1.
    """

    def __init__(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        output_mask: Sequence[bool],
    ) -> None:
        super().__init__(given, settings, output_mask)
        self.gradient = _Gradient(grads, given, saved, settings, self.selection)
        self.row_scale.fill_(1.0)
        self.gathered: Tensor | None = None
        if self.is_compact:
            self.gathered = self.hidden.new_empty((self.step, self.depth))

    def gradients(self, block: Block) -> None:
        first, here = block.first, block.stop - block.first
        hidden = self.hidden[first : block.stop]
        if self.gathered is not None:
            hidden = self.gathered[:here]
            self.copy(self.hidden, hidden, self.selection.order, first=first)
        self.gradient.write(hidden, self.x, self.columns, (first, here, 0, self.width))
        # Rows after the last are zero in G, and after the end of the matrix that it is multiplied
        # with.
        self.add_products(block, hidden)

    def results(self) -> Gradients:
        return self.made()


class Total(ByRows, Statistics):
    """The computation of a scalar loss and its gradients.

    The logits of a block of rows (tokens) are usually computed once. Before the exponential, a
    number per row is subtracted from the logits, usually the target's logit. If a row's largest
    logit is far from this number, that logit replaces the number. All logits of the block are then
    computed again."""

    def __init__(self, given: ScalarLoss) -> None:
        self.given, self.ranks = given, given.ranks
        height = 0 if self.ranks is None else self.ranks.height
        operands = Operands(*given[:4])
        super().__init__(operands, given.settings, given.output_mask, height=height)
        self.factor = given.row_gradients(torch.float32)
        self.nll = self.of_rows(self.hidden[:, 0], torch.float32)
        self.stats = self.floats(2, self.tiles, self.step)
        self.base, self.target_logit = self.floats(self.step), self.floats(self.step)
        self.scaled: Tensor | None = None
        if self.grad_weight is not None or self.is_compact:
            self.scaled = self.hidden.new_empty((self.step, self.depth))
        self.own = None if self.ranks is None else self.floats(2 * self.step)

    def statistics(self, block: Block) -> None:
        index, first, here = block.number, block.first, block.stop - block.first
        selection, again = self.selection, self.counters[1, index]
        self.rows_here = self.hidden[first : first + here]
        if self.is_compact:
            assert self.scaled is not None
            self.rows_here = self.scaled[:here]
            self.copy(self.hidden, self.rows_here, selection.order, first=first)
        self.launch(
            kernels._linear_cross_entropy_hopper_base_kernel,
            (here,),
            *(self.rows_here, self.rows_here.stride(0), self.weight, self.bias),
            *(selection.target, selection.kept),
            *(self.base, first, here, self.vocab, self.depth, *self.cap),
            BLOCK=row_block(self.depth, self.shapes),
            HAS_RANKS=self.ranks is not None,
            **self.flags,
        )
        self._logits(first, here, None)
        self._losses(first, here, again, is_final=False)
        self._logits(first, here, again)
        self._losses(first, here, again, is_final=True)

    def _logits(self, first: int, here: int, again: Tensor | None) -> None:
        shapes, selection = self.shapes, self.selection
        gathered = self.scaled if self.is_compact else self.hidden
        assert gathered is not None
        self.launch(
            kernels._linear_cross_entropy_hopper_logits_kernel,
            (shapes.programs,),
            self.tiles_of(gathered, shapes.rows, shapes.step),
            self.tiles_of(self.weight, self.columns, shapes.step),
            self.tiles_of(self.x, shapes.rows, self.columns // 4),
            *(self.bias, selection.target, selection.kept, again),
            *(self.base, self.stats, self.target_logit),
            *(first, 0 if self.is_compact else first, here, self.vocab, self.depth, *self.cap),
            HAS_AGAIN=again is not None,
            GROUP=GROUP,
            FLATTEN=shapes.flatten,
            **shapes.constants(self.columns),
            **self.flags,
        )

    def _losses(self, first: int, here: int, again: Tensor, *, is_final: bool) -> None:
        selection = self.selection
        self.launch(
            kernels._linear_cross_entropy_hopper_loss_kernel,
            (-(-here // ROWS),),
            *(self.stats, self.target_logit, selection.target, selection.order, selection.kept),
            *(self.factor, self.base, again, self.row_scale, self.x, self.nll, self.own),
            *(first, here, self.tiles, self.width, self.vocab, *self.cap),
            FINAL=is_final,
            HAS_RANKS=self.ranks is not None,
            ROWS=ROWS,
            TILES=TILES,
            num_warps=4,
            **self.flags,
        )

    def meet(self, block: Block, ranks: Ranks) -> None:
        """Exchange the statistics of a block's rows (tokens) with other ranks, and compute the
        rows' losses from the statistics of all ranks.

        The statistics of a row are its log-sum-exp and its loss over the classes of one rank. A
        rank that does not have the class of a row's target sends the loss 0 for this row."""
        assert self.own is not None
        first, here, selection = block.first, block.stop - block.first, self.selection
        every = ranks.gather(self.own[: 2 * here].view(2, here))
        self.launch(
            kernels._linear_cross_entropy_hopper_ranks_kernel,
            (-(-here // ROWS),),
            *(every, self.target_logit, selection.target, ranks.owner, selection.order),
            *(selection.kept, self.factor, self.row_scale, self.x, self.nll),
            *(first, here, self.width, ranks.rank, ranks.ranks, *self.cap),
            ROWS=ROWS,
            num_warps=4,
            **self.flags,
        )

    def gradients(self, block: Block) -> None:
        first, here = block.first, block.stop - block.first
        if self.grad_weight is not None:
            assert self.scaled is not None
            at = {"first": first, "rows": here, "scale": self.row_scale}
            self.copy(self.rows_here, self.scaled, None, **at)
        self.add_products(block, self.scaled)

    def results(self) -> LossAndGradients:
        return LossAndGradients(self.given.total_of(self.nll), *self.made())


def backward(
    grads: RowGradients,
    given: Operands,
    saved: Saved,
    settings: Settings,
    output_mask: Sequence[bool],
) -> BackwardByRows | BackwardByClasses:
    """Return the fused loss's backward pass, for the gradients that `output_mask` requests.

    A backward pass by blocks of rows is faster than one by blocks of classes but takes more memory.
    Blocks of rows are used only if `settings.workspace`, the caller's limit of temporary memory, is
    not set.
    """
    is_by_rows = triton_compat.has_gluon() and not settings.workspace
    if is_by_rows and given.hidden.dtype == torch.bfloat16:
        return BackwardByRows(grads, given, saved, settings, output_mask)
    return BackwardByClasses(grads, given, saved, settings, output_mask)


forward, total = Forward, Total


def add_columns(
    x: Tensor,  # (R, W)
    row_scale: Tensor | None,  # (R,) fp32
    sums: Tensor,  # (V,) fp32
    kept: Tensor | None,
    at: tuple[int, int, int, int, int],  # first row, rows, first column, width and last column
    launch: Any,
) -> None:
    """Add X's column sums to the bias's gradient, where X is the logits' gradient up to a factor
    per row.

    If `row_scale` is given, each row of X is first multiplied by its number in `row_scale`."""
    launch(
        kernels._linear_cross_entropy_hopper_bias_kernel,
        (-(-x.shape[1] // SUMMED_COLUMNS),),
        *(x, row_scale, sums, kept, *at),
        BLOCK=SUMMED_COLUMNS,
        ROWS=SUMMED_ROWS,
        HAS_SCALE=row_scale is not None,
        HAS_KEPT=kept is not None,
    )


def _is_plain(bias: Tensor | None, settings: Settings) -> bool:
    """Return whether a loss has no bias and no softcap, and returns no sum of each row's logits.

    With a bias, a softcap or the sum of logits, tiles of the logits' gradient G have fewer columns.
    These three terms need registers.
    """
    return bias is None and not (settings.softcap or settings.with_logit_sum)
