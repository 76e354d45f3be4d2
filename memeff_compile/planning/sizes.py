"""Describe sizes of buffers by formulas in batch size and length, and by the formulas' values.

The values are computed at a few batch sizes and lengths. A graph has thousands of buffers, and
sums of formulas are slow. So this module adds up the values, and builds the formula of a sum only
for moments at which memory can be largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from .. import compat

Point = Mapping[sympy.Symbol, int]
Values = tuple[int, ...]

BATCH, LENGTH = sympy.symbols("B L", integer=True, positive=True)

NEAR = (-1, 1, -2, 2)
"""The most by which a derived tensor can be longer than a sequence: shifted targets, one more
token."""

LEAST_BATCH, LEAST_LENGTH = 11, 13
"""The smallest batch and length; smaller ones would divide numbers of heads and of experts."""


@dataclass(frozen=True)
class Sizes:
    """Batch size (per GPU) and sequence length of a model call; the length of 1-d inputs is 1."""

    batch: int
    length: int


@dataclass(frozen=True)
class Told:
    """A batch size and a length that are easy to recognise as factors of a buffer's size.

    No other size of the model is a multiple of either. So the factors of a buffer's size show how
    this size depends on batch size and length. If the batch size is 11 and the length 2039, the
    size 11 x 2039 can only be batch size x length.
    """

    batch: int | None = None  # None: sizes do not show how they grow with it
    length: int | None = None  # likewise
    near: tuple[int, ...] = NEAR  # how much longer than the length something of its kind can be

    @staticmethod
    def apart(sizes: Sizes, constants: Iterable[int]) -> Told:
        """Return a batch size and a length that differ from all constants of the model.

        The length is about three quarters of the sequence length in the user's call, which `sizes`
        contains. A model may round lengths up to whole chunks. If the call's length is a whole
        number of chunks, only another length shows the rounding. A shorter length is within the
        model's position tables.
        """
        others = {size for size in constants if size > 1}
        batch = _prime(max(LEAST_BATCH, sizes.batch), others, (0,))
        if sizes.length == 1:
            return Told(batch)
        length = _prime(max(LEAST_LENGTH, 3 * sizes.length // 4), {*others, batch}, (0, *NEAR))
        return Told(batch, length)

    def formula(self, size: int) -> sympy.Expr:
        """Return a size as a formula in batch size and length, or as a number if it depends on
        neither."""
        if size < 2:
            return sympy.Integer(size)
        rest, found = size, sympy.Integer(1)
        for told, symbol in ((self.batch, BATCH), (self.length, LENGTH)):
            while told is not None and rest % told == 0:
                rest, found = rest // told, found * symbol
        if self.length is None or found.has(LENGTH):
            return found * rest
        for near in self.near:
            times, left = divmod(rest, self.length + near)
            if not left and times and (times <= 2 or found != 1):
                return found * times * (LENGTH + near)
        for near in (-1, 1):
            if rest == 2 * self.length + near:
                return found * (2 * LENGTH + near)
        if found == 1 and self.batch is not None:
            for near in NEAR:
                if size - near == self.batch * self.length:
                    return BATCH * LENGTH + near
        return found * rest


def _prime(near: int, others: set[int], apart_by: Sequence[int]) -> int:
    """Return a prime number, for a batch size or length, that divides none of the model's sizes.

    `others` contains the model's sizes. The prime also divides no number that differs from such a
    size by an offset in `apart_by`. If possible, the prime is not larger than `near`.
    """

    def fits(number: int) -> bool:
        if any(number % d == 0 for d in range(2, math.isqrt(number) + 1)):
            return False
        return not any(
            o % (number + by) == 0 or (o > number // 2 and o % number == by % number)
            for by in apart_by
            for o in others
        )

    below = range(near, max(LEAST_BATCH, near // 2), -1)
    return next(n for candidates in (below, range(near, 1 << 40)) for n in candidates if fits(n))


@dataclass(frozen=True)
class Size:
    """A size in bytes: its formula in batch size and length, and the formula's values at several
    pairs of batch size and length.

    A `Scale` creates sizes and has the list of these pairs.
    """

    formula: sympy.Expr
    values: Values


@dataclass
class Scale:
    """Converts sizes of traced tensors to formulas in batch size and length, and computes the
    formulas at several points (pairs of batch size and length)."""

    told: Told  # the batch and the length in the graphs
    # where to look for the largest moment; the first one is the user's own sizes
    points: Sequence[Point]
    _known: dict[sympy.Expr, Size] = field(default_factory=dict)
    _read: dict[int, sympy.Expr] = field(default_factory=dict)

    def of(self, formula: sympy.Expr | int) -> Size:
        """Return a formula for bytes as a `Size`, which also has the formula's value at each pair
        of batch size and length in `self.points`."""
        expression = sympy.sympify(formula)
        if expression not in self._known:
            values = tuple(int(expression.xreplace(dict(p))) for p in self.points)
            self._known[expression] = Size(expression, values)
        return self._known[expression]

    def elements(self, tensor: torch.Tensor) -> sympy.Expr:
        """Return the number of elements of a tensor as a formula."""
        return math.prod(map(self.dimension, tensor.shape), start=sympy.Integer(1))

    def rows(self, tensor: torch.Tensor) -> sympy.Expr:
        """Return the number of rows of a tensor, which is the product of all dimensions except the
        last."""
        return math.prod(map(self.dimension, tensor.shape[:-1]), start=sympy.Integer(1))

    def dimension(self, size: int | torch.SymInt) -> sympy.Expr:
        """Return the size of one dimension as a formula.

        A size that depends on data is assumed to equal the number of tokens in the batch.
        """
        if not isinstance(size, int):
            size = compat.size_hint(size) or math.prod(self._tokens)
        if size not in self._read:
            self._read[size] = self.told.formula(size)
        return self._read[size]

    @property
    def _tokens(self) -> tuple[int, int]:
        own = self.points[0]
        return self.told.batch or own[BATCH], self.told.length or own[LENGTH]

    def is_per_token(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has one row per token of the batch, or one row fewer per sequence
        (as shifted labels have)."""
        rows = self.rows(tensor)
        if rows.free_symbols or self.told != Told():
            return bool(rows.free_symbols)
        batch, length = self._tokens
        return bool(rows >= batch * max(length - 1, 1))

    def bytes_of(self, value: object) -> Size:
        """Return the number of bytes of a tensor, or of all tensors in a tuple together."""
        found = tensors_in(value)
        return self.of(sum((self.elements(t) * t.element_size() for t in found), sympy.Integer(0)))

    @property
    def zero(self) -> Values:
        """Return a size of zero bytes, at every batch and length."""
        return (0,) * len(self.points)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors that a node's value contains."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def added(first: Values, second: Iterable[int]) -> Values:
    """Return the sum of two sizes in bytes, for each pair of batch size and length."""
    return tuple(a + b for a, b in zip(first, second, strict=True))


def taken(first: Values, second: Iterable[int]) -> Values:
    """Return the difference of two sizes in bytes, for each pair of batch size and length."""
    return tuple(a - b for a, b in zip(first, second, strict=True))


def points_around(batch: int, length: int, told: Told) -> list[Point]:
    """Return several pairs of batch size and length near the user's pair, which comes first.

    `told` has the batch size and the length of the traced graphs. `told.batch` is None if the
    graphs do not show how the sizes of their buffers grow with the batch size. In this case, all
    pairs have the user's batch size. The same applies to `told.length` and the user's length.
    """
    wide = {max(1, math.ceil(batch * f)) for f in (1 / batch, 1, 8, 64) if told.batch or f == 1}
    long = {max(2, math.ceil(length * f)) for f in (1 / 4, 1, 4) if told.length}
    long |= {length}
    others = [(b, n) for b in sorted(wide) for n in sorted(long) if (b, n) != (batch, length)]
    return [{BATCH: b, LENGTH: n} for b, n in [(batch, length), *others]]
