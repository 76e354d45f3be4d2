"""Sizes of buffers as formulas in the dynamic dimensions, with their values at a few points.

A graph has thousands of buffers, so sums are of numbers at those points; the formula of a sum is
built only for the moments that matter.
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


@dataclass(frozen=True)
class Sizes:
    """Batch (per GPU) and length of a call; the length is 1 where inputs have one dimension."""

    batch: int
    length: int


@dataclass(frozen=True)
class Size:
    """Bytes: the formula, and its value at each point of the scale."""

    formula: sympy.Expr
    values: Values


@dataclass
class Scale:
    """The points at which sizes are compared, and the names that the formulas use."""

    names: Mapping[sympy.Symbol, sympy.Symbol]  # dynamo's symbol -> ours (B, L)
    # where to look for the largest moment; the first one is the user's own sizes
    points: Sequence[Point]
    _known: dict[sympy.Expr, Size] = field(default_factory=dict)

    def of(self, formula: sympy.Expr | int) -> Size:
        """Return a size with its values."""
        expression = sympy.sympify(formula).xreplace(self.names)
        if expression not in self._known:
            values = tuple(int(expression.xreplace(dict(p))) for p in self.points)
            self._known[expression] = Size(expression, values)
        return self._known[expression]

    def elements(self, tensor: torch.Tensor) -> sympy.Expr:
        """Return the number of elements as a formula."""
        return math.prod(map(self._dimension, tensor.shape), start=sympy.Integer(1))

    def rows(self, tensor: torch.Tensor) -> sympy.Expr:
        """Return the number of rows: the elements of all dimensions but the last."""
        return math.prod(map(self._dimension, tensor.shape[:-1]), start=sympy.Integer(1))

    def _dimension(self, size: int | torch.SymInt) -> sympy.Expr:
        """Return a size; one that depends on data is taken to be as large as the batch's tokens."""
        formula = compat.size_formula(size).xreplace(self.names)
        if formula.free_symbols <= {BATCH, LENGTH}:
            return formula
        return sympy.Integer(compat.size_hint(size)) or BATCH * LENGTH

    def bytes_of(self, value: object) -> Size:
        """Return the bytes of a tensor, or of every tensor in a tuple."""
        found = tensors_in(value)
        return self.of(sum((self.elements(t) * t.element_size() for t in found), sympy.Integer(0)))

    @property
    def zero(self) -> Values:
        """Nothing, at every point."""
        return (0,) * len(self.points)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors that a node's value consists of."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def added(first: Values, second: Iterable[int]) -> Values:
    """Return the sum, point by point."""
    return tuple(a + b for a, b in zip(first, second, strict=True))


def taken(first: Values, second: Iterable[int]) -> Values:
    """Return the difference, point by point."""
    return tuple(a - b for a, b in zip(first, second, strict=True))


def points_around(batch: int, length: int) -> list[Point]:
    """Return sizes around the user's own, which come first."""
    wide = {max(1, math.ceil(batch * f)) for f in (1 / batch, 1, 8, 64)}
    long = {max(2, math.ceil(length * f)) for f in (1 / 4, 1, 4)}
    others = [(b, n) for b in sorted(wide) for n in sorted(long) if (b, n) != (batch, length)]
    return [{BATCH: b, LENGTH: n} for b, n in [(batch, length), *others]]
