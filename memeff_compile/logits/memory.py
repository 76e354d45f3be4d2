"""Represent the memory that eager PyTorch would allocate for logits.

Deferred logits (logits that are computed when first read) and all their views share one `Memory`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from memeff_compile.logits.recipe import LogitsRecipe
from memeff_compile.logits.source import LogitsSource

# A product of fewer rows costs as much as one of this many: reading the head dominates.
_LEAST_ROWS = 64

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset of a view in its memory: as `as_strided` takes it."""


class Part(Protocol):
    """The interface through which `Memory` uses deferred logits (computed when first read).

    A `Memory` represents the memory that eager PyTorch would allocate for the logits. Each deferred
    tensor is a view of one `Memory`.
    """

    own: Tensor | None  # the view's values while the memory has none

    @property
    def rows(self) -> Tensor:
        """Return the hidden states for the rows (tokens) of this view of the logits."""

    @property
    def place(self) -> Place:
        """Return the size, strides and offset of this view in the memory of the whole logits."""

    @property
    def window(self) -> tuple[Part, Callable[[Tensor], Tensor]] | None:
        """Return the view of the logits from which this view was created (its base), and a
        function that computes this view's values from the base's values.

        Return None if this view consists of whole rows, that is, of all classes of some tokens.
        """

    def from_rows(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `function` to the hidden states of the rows (tokens) of this view of the logits.

        `function` gets the rows in their order in memory. Return the function's result, with its
        dimensions in the same order as those of the view.
        """


class Statistics(NamedTuple):
    """The log-sum-exp, and optionally the sum, of each row (token) of one view of a logits tensor.

    A view, such as `logits[:, -1]`, shares the memory of the whole logits. The field `place`
    contains the view's size, strides and offset.
    """

    place: Place
    lse: Tensor
    logit_sum: Tensor | None

    def of(self, view: Part) -> tuple[Tensor, Tensor | None] | None:
        """Return the log-sum-exp and the sum of each row of `view`, or None if not computed.

        This object has these statistics of one view of the logits only, the stored view. The
        statistics apply to `view` too if `view` has the same rows as the stored view, or is
        `stored[i]` for an index i.
        """
        (size, stride, offset), (sizes, strides, start) = view.place, self.place
        if view.place == self.place:
            return self.lse, self.logit_sum
        if (size, stride) != (sizes[1:], strides[1:]) or len(size) < 2:
            return None
        index, rest = divmod(offset - start, strides[0])
        if rest or not 0 <= index < sizes[0]:
            return None
        return self.lse[index], None if self.logit_sum is None else self.logit_sum[index]


@dataclass(eq=False)
class Memory:
    """The memory that eager PyTorch would allocate for a logits tensor and all its views.

    Once all rows are computed, this object stores their values, and every view reads the stored
    values. Before that, reading a view of some rows computes only these rows, in a separate
    read-only tensor. A write first computes all rows. Creating a plain tensor that shares this
    memory also computes all rows, because code could write to that tensor.
    """

    source: LogitsSource
    recipe: LogitsRecipe
    rows: Tensor
    shape: tuple[int, ...]
    origin: Callable[[], Tensor | None] | None = None
    value: Tensor | None = None
    rows_computed: int = 0
    # views with private values
    parts: list[weakref.ref[Part]] = field(default_factory=list)
    is_open: bool = False  # a caller has written, or may write unnoticed
    _statistics: Statistics | None = None

    def read(self, view: Part) -> Tensor:
        """Return the values of `view`, a view of the logits.

        Compute only the rows of `view` if that is less work than computing all rows.
        """
        if self.value is None and view.window is not None:
            base, take = view.window
            return take(self.read(base))
        if self.value is not None or (view.own is None and not self._is_less_work(view)):
            return self.link(view)
        if view.own is None:
            # Cut classes are a slice of the product, in which other views cannot be taken.
            view.own = view.from_rows(
                lambda rows: self.source.compute(self.recipe, rows).contiguous()
            )
            self.parts.append(weakref.ref(view))
            self.rows_computed += max(_row_count(view), _LEAST_ROWS)
        return view.own

    def link(self, view: Part) -> Tensor:
        """Return a tensor that shares the memory of `view`, a view of the logits.

        Compute the values of the whole memory first if necessary.
        """
        if self.value is None:
            value = None if self.origin is None else self.origin()
            value = self.source.compute(self.recipe, self.rows) if value is None else value
            self.value = value.contiguous()
            with torch.inference_mode(self.source.is_inference), torch.no_grad():
                for part in (reference() for reference in self.parts):
                    # rows that were read keep their exact bits
                    if part is not None and part.own is not None:
                        self.value.as_strided(*part.place).copy_(part.own)
            self.parts.clear()
        view.own = None
        # Equal sizes do not mean the whole memory: transposed square logits have its size.
        return self.value.as_strided(*view.place)

    def write(self, view: Part) -> Tensor:
        """Return a tensor that shares the memory of `view`, a view of the logits.

        The caller's later writes to the tensor cannot be detected.
        """
        self.is_open = True
        return self.link(view)

    def statistics(self, view: Part) -> tuple[Tensor, Tensor | None] | None:
        """Return the log-sum-exp and the sum of each row of `view`, a view of the logits.

        Return None if the latest loss did not compute these statistics.
        """
        return None if self._statistics is None else self._statistics.of(view)

    def keep_statistics(self, view: Part, lse: Tensor, logit_sum: Tensor | None) -> None:
        """Record the log-sum-exp and the sum that a loss computed for each row of `view`.

        `view` is a view of the logits, and a row is one token.
        """
        self._statistics = Statistics(view.place, lse, logit_sum)

    def snapshot(
        self, view: Part, function: Callable[[Tensor], Tensor]
    ) -> Callable[[], Tensor | None]:
        """Return a function that later applies `function` to the values that `view` then has, and
        returns a new tensor.

        The returned function has no arguments. It does not keep this `Memory`, which stores the
        logits' values, alive. It returns None if the values are not computed at the time of its
        call, or if user code may have written to the values.
        """
        reference, origin, place = weakref.ref(self), self.origin, view.place
        is_inference = self.source.is_inference

        def copy() -> Tensor | None:
            memory = reference()
            if memory is not None and memory.is_open:
                return None
            value = None if memory is None else memory.value
            value = origin() if value is None and origin is not None else value
            if value is None:
                return None
            with torch.inference_mode(is_inference), torch.no_grad():
                part = value.as_strided(*place)
                result = function(part)
                is_apart = result is not part and result.is_contiguous()
                return result if is_apart else result.clone(memory_format=torch.contiguous_format)

        return copy

    def _is_less_work(self, view: Part) -> bool:
        """Return whether computing only the logits' rows in `view` is cheaper than computing all.

        A row is a token. A read of a view, such as `logits[:, -1]`, may compute only the view's
        rows. Once these reads have computed as many rows as the logits have, the result is false.
        """
        rows = prod(self.shape[:-1])
        return _row_count(view) < rows and self.rows_computed < rows


def _row_count(view: Part) -> int:
    return prod(view.rows.shape[:-1])
