"""Compute a loss's gradients under a gradient filter, which drops unlikely classes.

The logits of the dropped classes are not stored.

The filters `mass` and `block` first compute the logits of a sample of classes. From these logits,
the filters estimate each row's (token's) probability mass in unlikely classes. Rows are sorted by
this estimate, and 128 consecutive rows form a group.

One pass over all classes computes each row's largest logit and sum of exponentials. For each group
of rows, the same pass gives each class a score that decides whether the filter drops the class. For
`mass`, the score is the sum of the class's probabilities over the group's rows. For `block`, the
score is the maximum. The filter drops the classes whose score is below a threshold, called a level.
For each row and each of 31 levels, the pass over all classes sums the probabilities that the row
would lose at this level. For each group, `mass` uses the highest level at which no row loses more
mass than the setting tau. `block` has only one level, the setting eps. The filter always keeps the
target classes of the group's rows.

Classes are then sorted by the set of row groups in which the filter keeps them. In most tiles (128
rows x 128 classes), the filter therefore keeps all classes or none. For the tiles with kept
classes, the kernels compute the logits again and turn them into gradients. The kernels then
multiply these gradients by the weight and by the hidden states. The size of the workspace limits
how many tiles are processed at a time. Let a be the fraction of tiles that the filter keeps. The
pass over all classes and the gradients together take as long as 1 + 3a matrix products over all
classes. The sorted order of the V classes is a list of V numbers. The weight and its gradient are
not reordered in memory.

The probability mass that a row loses is distributed over the row's kept classes, in proportion to
their probabilities. So the sum of the gradients of the row's logits (without the target's logit)
does not change. Without this redistribution, the logits of dropped classes would rise a little in
each optimizer step, because no gradient lowers them. In a fine-tuning test of 100 steps, the final
loss was higher without the redistribution than with it.

`published` is the filter of the Cut Cross-Entropy paper. Rows keep their order, classes are sorted
by their mean logits, and no mass is redistributed. Let p be the probability of a class in a row.
Let 1(target) be 1 for the row's target, and 0 for other classes. The filter drops a tile if, for
all its elements, |p - 1(target)| is below eps. The filter `published` needs each row's log-sum-exp
before it can choose tiles.

The kernels use only features that all supported GPUs have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._head_loss.call import (
    Gradients,
    LossAndGradients,
    Operands,
    RowGradients,
    Saved,
    ScalarLoss,
    Settings,
)
from .._head_loss.row_walks import RowWalk
from .._head_loss.rows import Selection, row_values, select_rows
from .._head_loss.shapes import row_block
from .._head_loss.walks import Block, Differentiating, Statistics
from . import filtered_kernels as kernels
from .levels import LEVELS, ROUNDING, STEP, filter_level
from .shapes import (
    CHECKED,
    LIKELY,
    LISTED,
    SAMPLED_ROWS,
    SPREAD,
    SUMMED,
    WORDS,
    FilterShapes,
    filter_capacity,
    filter_rows,
    filter_shapes_for,
    filter_splits,
)


class Filtered(RowWalk):
    """A loop over blocks of rows (tokens) that drops unlikely classes from a loss's gradients.

    A gradient filter chooses these classes. The filter `mass` limits the total probability of a
    row's dropped classes. The filters `block` and `published` compare probabilities with a
    threshold. The object contains the loop's buffers, and launches the kernels for each block.
    """

    def __init__(
        self,
        given: Operands,
        settings: Settings,
        output_mask: Sequence[bool],
        values: Tensor | None = None,  # (5, N), compact, for a call whose log-sum-exps are known
    ) -> None:
        self.shapes: FilterShapes = filter_shapes_for(given.hidden.device)
        super().__init__(given, settings, output_mask, self.shapes)
        hidden, (of_hidden, of_weight) = self.hidden, output_mask[:2]
        self.flags["HAS_KEPT"] = True
        self.block = row_block(self.depth, self.shapes)
        tile = self.shapes.rows
        self.step = filter_rows(self.extent, tile)
        self.groups, self.tiles = self.step // tile, -(-self.vocab // tile)
        column_tiles = -(-self.vocab // self.shapes.columns)
        chunks = max(self.shapes.programs // self.groups, 1)
        self.tiles_here = -(-column_tiles // chunks)
        self.chunks = -(-column_tiles // self.tiles_here)
        self.splits = filter_splits(self.step, self.depth, self.groups, self.shapes)
        size = self.step, self.depth, self.vocab, hidden.element_size()
        self.capacity = filter_capacity(*size, settings.workspace, self.splits, tile)
        self.passes = -(-self.groups * self.tiles // self.capacity)
        self.slots = self.capacity + self.groups

        mode = settings.gradient_filter
        self.is_mass, level = mode == "mass", filter_level(mode, settings.filter_level)
        self.is_published = mode == "published"
        self.level, self.limit = level, level * ROUNDING if self.is_mass else float("inf")
        self.levels: dict[str, Any] = {"TILE": tile, "LEVELS": LEVELS, "STEP": STEP}
        if not self.is_mass:
            self.levels |= {"LEVELS": 16, "STEP": 0.0}
        self.has_lse = values is not None
        self.base = self.floats(self.extent)
        self.share: Tensor | None = None
        self.factor: Tensor | None = None
        self.selection = self._ranked(self.selection, given.target, values)

        levels, floats, ints = self.levels["LEVELS"], self.floats, self.ints
        self.rows = hidden.new_empty((self.step, self.depth))
        self.scaled = torch.empty_like(self.rows) if of_weight else None
        self.score = floats(self.groups, self.vocab)
        self.bias_part = None if self.bias_sums is None else torch.empty_like(self.score)
        self.part = floats(self.groups, self.chunks, levels, tile)
        self.stats = floats(2, self.chunks, self.step)
        self.target_logit, self.scale = floats(self.step), floats(self.step)
        self.at_target, self.group_level = floats(self.step), floats(self.groups)
        self.word = hidden.new_empty(self.vocab, dtype=torch.int16)
        self.column_order: Tensor | None = None
        self.tile_word, self.tile_start = ints(self.tiles), ints(self.tiles + 1)
        # Each pass and block has multiples of 16 bytes, so that all use the same compiled kernel.
        self.group_start = ints(self.passes, -(-(self.groups + 1) // 4) * 4)
        self.pass_tile = ints(self.passes, 4)
        self.slots = -(-self.slots // 4) * 4
        self.slot_tile = ints(self.passes, self.slots)
        self.tile_slot, self.tile_group = ints(2, self.groups * self.tiles)
        self.slot_column = ints(self.slots * tile)
        self.packed = hidden.new_empty((self.slots * tile, tile))
        self.sums = floats(self.splits, self.step, self.depth) if of_hidden else None
        blocks = -(-self.extent // self.step)
        self.active = ints(blocks, 4)
        self.counters = hidden.new_zeros((blocks, self.passes + 1, 4), dtype=torch.int32)
        self.dropped = hidden.new_zeros(self.extent, dtype=torch.float32)
        self.nll: Tensor | None = None
        self.factors: Tensor | None = None

    def run(self, name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch a kernel of the gradient filter, which drops unlikely classes from gradients.

        `name` is a part of the kernel's name, such as "score".
        """
        kernel = getattr(kernels, f"_gradient_filter_{name}_kernel")
        self.launch(kernel, grid, *arguments, **constants)

    def ints(self, *sizes: int) -> Tensor:
        """Return an uninitialized int32 tensor of the given sizes."""
        return self.hidden.new_empty(sizes, dtype=torch.int32)

    def _ranked(self, compact: Selection, target: Tensor, values: Tensor | None) -> Selection:
        """Return the rows (tokens) that are not ignored, in the order that the gradient filter
        needs.

        The filter drops unlikely classes from the loss's gradients. The filters `mass` and `block`
        need rows sorted by their estimated probability mass in such classes. `published`, the
        filter of the Cut Cross-Entropy paper, keeps the rows' order.

        The function also writes one number per row, the row's base, to `self.base`. These numbers
        have the order of the returned rows. For `mass`, the base is an estimate of the row's
        log-sum-exp. For `block`, the base is an estimate of the row's largest logit. In a backward
        pass, `values` is given, and the bases are the log-sum-exps of the forward pass.
        """
        rows, vocab, depth = self.extent, self.vocab, self.depth
        as_given = torch.arange(rows, device=target.device) if self.is_published else None
        if as_given is not None and values is not None:
            return self._selected(compact, as_given, values[0], values)
        likely, spread = min(LIKELY, rows), min(SPREAD, vocab)
        sample = self.hidden.new_empty((likely + spread, depth))
        classes = self.ints(likely + spread)
        self.run(
            "sample",
            (likely + spread,),
            *(self.weight, target.contiguous(), sample, classes),
            *(rows, vocab, depth, likely, spread),
            BLOCK=self.block,
        )
        place = compact.place
        if place is None:
            place = torch.arange(rows, device=target.device, dtype=torch.int32)
        base = self.floats(rows) if values is None else values[0]
        light = self.floats(rows).fill_(float("inf"))
        for first in range(0, rows, SAMPLED_ROWS):
            part = self.hidden[first : first + SAMPLED_ROWS]
            self.run(
                "estimate",
                (len(part),),
                *(part @ sample.t(), self.hidden, self.hidden.stride(0), self.weight, self.bias),
                *(classes, compact.target, place, base, light),
                *(first, vocab, depth, likely, spread, *self.cap),
                SAMPLE=1 << (likely + spread - 1).bit_length(),
                HAS_LSE=values is not None,
                SUMS=self.is_mass,
                BLOCK=self.block,
                num_warps=8,
                **self.flags,
            )
        rank = light.sort(stable=True).indices if as_given is None else as_given
        return self._selected(compact, rank, base, values)

    def _selected(
        self, compact: Selection, rank: Tensor, base: Tensor, values: Tensor | None
    ) -> Selection:
        """Return the rows (tokens) that the call computes, in the order `rank`.

        `compact` has these rows in their original order. Row i of the result is row `rank[i]` of
        `compact`.

        A row's base is its log-sum-exp, or an estimate of its log-sum-exp or of its largest logit.
        The function writes the bases to `self.base`, in the order `rank`. Without `values`, the
        bases are the estimates in `base`, which has the order of `compact`.

        In a backward pass, `values` contains five numbers of each row (`row_values`). The first
        number, the row's log-sum-exp, is then the base. The second and third determine the
        gradients of the row's logits. The second is the factor of the softmax p. The third is
        subtracted at the target class. The function writes these two numbers to `self.factor`.
        `self.share` gets the magnitude of the second, divided by the larger of both magnitudes.
        """
        rows, kept = self.extent, compact.kept
        if kept is None:
            kept = compact.target.new_full((1,), rows)
        order = rank.to(torch.int32) if compact.order is None else compact.order[rank]
        if values is None:
            self.base = base[rank]
        else:
            self.share, self.factor = self.floats(rows), self.floats(2, rows)
            self.run(
                "share",
                (-(-rows // WORDS),),
                *(values, rank, kept, self.base, self.share, self.factor, rows),
                BLOCK=WORDS,
            )
        return Selection(compact.target[rank], order, None, kept)

    def choose(self, block: Block) -> None:
        """Choose the classes that the gradient filter keeps in each group of 128 rows (tokens).

        The filter drops unlikely classes: later kernels compute gradients only for tiles with kept
        classes. For a scalar loss, the method also computes the losses of the block's rows.
        """
        first, here = block.first, block.stop - block.first
        self.copy(self.hidden, self.rows, self.selection.order, first=first)
        again = self.counters[block.number, self.passes]
        self._score(first, None)
        if not self.has_lse:
            self.run(
                "check",
                (-(-here // CHECKED),),
                *(self.stats, self.base, again, self.selection.kept, first, self.step, self.chunks),
                ROWS=CHECKED,
                **self.flags,
            )
            self._score(first, again)
        factor = self.factors if self.factor is None else self.factor
        self.run(
            "level",
            (self.groups,),
            *(self.part, self.stats, self.base, self.target_logit, self.selection.target),
            *(self.selection.order, self.selection.kept, factor, self.group_level),
            *(self.scale, self.at_target, self.nll, self.dropped),
            *(first, self.step, self.extent, self.chunks, self.vocab, self.level, self.limit),
            *self.cap,
            HAS_LSE=self.has_lse,
            RESTORE=not self.is_published,
            **self.levels,
            **self.flags,
        )
        if self.bias_sums is not None and self.bias_part is not None:
            groups = -(-here // self.shapes.rows)
            rows_here = self.selection.kept
            assert rows_here is not None
            counted = torch.arange(groups, device=rows_here.device) * self.shapes.rows + first
            part = self.bias_part[:groups]
            is_group = (counted < rows_here)[:, None]
            self.bias_sums += part.where(is_group, torch.zeros_like(part)).sum(0)

    def _score(self, first: int, again: Tensor | None) -> None:
        shapes = self.shapes
        self.run(
            "score",
            (self.groups, self.chunks),
            self.tiles_of(self.rows, shapes.rows, shapes.step),
            self.tiles_of(self.weight, shapes.columns, shapes.step),
            *(self.bias, self.selection.target, self.selection.kept, again, self.base),
            *(self.share, self.factor if self.bias_part is not None else None),
            *(self.score, self.part, self.stats, self.target_logit, self.bias_part),
            *(first, self.step, self.vocab, self.depth, self.extent, self.tiles_here, self.level),
            *self.cap,
            SUMS=self.is_mass,
            HAS_AGAIN=again is not None,
            HAS_SHARE=self.share is not None,
            NEEDS_BIAS=self.bias_part is not None,
            WHOLE=self.is_published,
            **self.levels,
            **self.flags,
            **shapes.scoring(),
        )

    def gradients(self, block: Block) -> None:
        """Compute the gradients of hidden states and weight under the gradient filter.

        The filter drops unlikely classes. It keeps a tile (128 rows x 128 classes) if it keeps at
        least one of the tile's classes for these rows. The method lists the kept tiles, and
        computes their logits' gradients. It multiplies these gradients by the weight and by the
        hidden states, and adds the products to the results.
        """
        self._list(block.number)
        first, here = block.first, block.stop - block.first
        scaled = self.scaled
        if scaled is not None:
            self.copy(self.rows, scaled, None, first=first, rows=here, scale=self.scale)
        if self.grad_hidden is None and self.grad_weight is None:
            return
        for number in range(self.passes):
            self._fill(first, number)
            self._multiply(block, number)
        if self.sums is not None:
            self.run(
                "rows",
                (here,),
                *(self.sums, self.grad_hidden, self.selection.order, self.selection.kept),
                *(self.scale, first, self.step, self.splits, self.depth),
                BLOCK=min(SUMMED, self.block),
                HAS_KEPT=True,
            )

    def _list(self, number: int) -> None:
        self.run(
            "word",
            (-(-self.vocab // WORDS),),
            *(self.score, self.group_level, self.word, self.groups, self.vocab),
            BLOCK=WORDS,
        )
        self.words = self.word
        if self.is_published and self.settings.sort_vocabulary:
            if self.column_order is None:
                self.column_order = self._by_mean_logit()
            self.words = self.word[self.column_order]
        elif self.settings.sort_vocabulary:
            self.words, self.column_order = torch.sort(self.word, stable=True)
        elif self.column_order is None:
            self.column_order = torch.arange(self.vocab, device=self.word.device)
        self.run(
            "tile",
            (self.tiles,),
            *(self.words, self.tile_word, self.vocab),
            TILE=self.shapes.rows,
            num_warps=1,
        )
        self.run(
            "list",
            (self.groups, self.passes),
            *(self.tile_word, self.active[number], self.group_start, self.slot_tile),
            *(self.pass_tile, self.tile_start, self.tile_slot, self.tile_group),
            *(self.tiles, self.capacity, self.slots, self.group_start.shape[1]),
            BLOCK=LISTED,
        )

    def _by_mean_logit(self) -> Tensor:
        """Return the classes' order by mean logit; the logits are taken before a softcap."""
        logits = self.weight @ self.hidden.mean(0)
        if self.bias is not None:
            logits = logits + self.bias
        return logits.sort(stable=True).indices

    def _fill(self, first: int, number: int) -> None:
        shapes = self.shapes
        self.run(
            "fill",
            (shapes.programs * shapes.per_processor,),
            self.tiles_of(self.rows, shapes.rows, shapes.step),
            *(self.weight, self.bias, self.packed, self.slot_column),
            *(self.words, self.column_order, self.pass_tile[number], self.tile_start),
            *(self.slot_tile[number], self.tile_slot, self.tile_group),
            *(self.base, self.share, self.at_target, self.selection.target, self.selection.kept),
            *(first, self.step, self.vocab, self.depth, *self.cap),
            TILE=shapes.rows,
            HAS_SHARE=self.share is not None,
            WHOLE=self.is_published,
            **self.flags,
            **shapes.filling(),
        )

    def _multiply(self, block: Block, number: int) -> None:
        shapes = self.shapes
        tile, columns, step = shapes.rows, shapes.product_columns, shapes.step
        ranked = self.rows if self.scaled is None else self.scaled
        self.run(
            "products",
            (shapes.programs * shapes.per_processor,),
            *(self.tiles_of(self.packed, tile, step), self.tiles_of(self.packed, step, tile)),
            self.tiles_of(ranked, step, columns),
            *(self.weight, self.grad_weight, self.sums, self.slot_column, self.column_order),
            *(self.group_start[number], self.pass_tile[number], self.tile_start),
            *(self.tile_slot, self.tile_group, self.counters[block.number, number]),
            *(block.first, number, self.groups, self.splits, self.step, self.vocab, self.depth),
            TILE=tile,
            NEEDS_HIDDEN=self.grad_hidden is not None,
            NEEDS_WEIGHT=self.grad_weight is not None,
            **shapes.multiplying(),
        )


class FilteredTotal(Filtered, Statistics):
    """A loop over blocks of rows (tokens) that computes a scalar loss and its gradients.

    The loop first estimates each row's log-sum-exp or largest logit. With the estimate, the
    gradient filter chooses unlikely classes, which are dropped from the gradients. The loop also
    computes each row's log-sum-exp exactly, for the loss.
    """

    def __init__(self, given: ScalarLoss) -> None:
        super().__init__(Operands(*given[:4]), given.settings, given.output_mask)
        self.given, self.factors = given, given.row_gradients(torch.float32)
        self.nll = self.of_rows(self.hidden[:, 0], torch.float32)

    def statistics(self, block: Block) -> None:
        self.choose(block)

    def results(self) -> LossAndGradients:
        assert self.nll is not None
        return LossAndGradients(self.given.total_of(self.nll), *self.made())


class FilteredBackward(Filtered):
    """A loop over blocks of rows (tokens) that computes the gradients in a backward pass.

    The gradient filter drops unlikely classes from these gradients. The loop gets the rows'
    log-sum-exps from the forward pass.
    """

    def __init__(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        output_mask: Sequence[bool],
    ) -> None:
        selection = select_rows(given.target, settings)
        values = row_values(grads, saved, selection, settings)
        super().__init__(given, settings, output_mask, values)

    def gradients(self, block: Block) -> None:
        self.choose(block)
        super().gradients(block)

    def results(self) -> Gradients:
        return self.made()


class Both(Differentiating):
    """Two loops that run one after the other, and compute different gradients of a loss.

    A gradient filter drops unlikely classes. Only one loop has a filter. This loop runs over blocks
    of rows (tokens), and computes the hidden states' or the weight's gradient. The loop without a
    filter computes the other gradients exactly.
    """

    def __init__(self, *walks: Any) -> None:
        self.walks = walks

    def blocks(self) -> Iterator[Block]:
        for walk in self.walks:
            self.now = walk
            yield from walk.blocks()

    def gradients(self, block: Block) -> None:
        self.now.gradients(block)

    def results(self) -> Gradients:
        found = [walk.results() for walk in self.walks]
        every = zip(*found, strict=True)
        return Gradients(*(next((g for g in each if g is not None), None) for each in every))


class Walks(NamedTuple):
    """The loops of the fused loss op for calls that drop unlikely classes from the gradients.

    A gradient filter chooses these classes. Each loop runs over blocks of rows (tokens) or of
    classes. Like each module that implements the op without a filter, the class has the functions
    `forward`, `total` and `backward`.
    """

    exact: Any  # the engine's module

    @property
    def forward(self) -> Any:
        """Return the fused loss op's ordinary `forward`, which no gradient filter changes.

        A gradient filter drops unlikely classes only from gradients.
        """
        return self.exact.forward

    @property
    def total(self) -> type[FilteredTotal]:
        """Return the class that computes a scalar loss and its gradients in blocks of tokens."""
        return FilteredTotal

    def backward(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        output_mask: Sequence[bool],
    ) -> Differentiating:
        """Return one or two loops over blocks of tokens or classes, for the loss's gradients.

        The gradient filter drops unlikely classes from the hidden states' gradient, from the
        weight's gradient, or from both gradients.
        """
        parts, rest = settings.filter_parts, list(output_mask[:3])
        if parts == "both":
            return FilteredBackward(grads, given, saved, settings, output_mask)
        place = ("hidden", "weight").index(parts)
        mask = [wanted and at == place for at, wanted in enumerate(rest)]
        rest[place] = False
        walks = [FilteredBackward(grads, given, saved, settings, mask)] if any(mask) else []
        if any(rest):
            walks.append(self.exact.backward(grads, given, saved, settings, rest))
        return Both(*walks)
