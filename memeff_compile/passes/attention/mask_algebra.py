"""Describe an attention mask as a formula over batch, query and key index.

A tensor is described by its shape and one formula, which gives the element at any index. Here, such
a formula is called a scalar. The kinds of scalars:

- integer: a sum of axis indices, sizes and elements of other tensors (:class:`Linear`);
- boolean: a formula over such sums;
- floating point: a list of cases, each with a condition and a number.

To describe a view, a broadcast or a gather, this module replaces axis indices in the formula by
sums (:class:`Linear`). The module never reads the elements of a tensor.

A condition is replaced by true or false only if this is proved for all sizes, including symbolic
ones. The module :mod:`mask_forms` recognises known masks by their formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ... import compat

Size: TypeAlias = "int | torch.SymInt"

# A number of at most this size, added to a score, masks it: the lowest number of float16.
MASKED = -65504.0

MOST_CASES = 6
MOST_PARTS = 40


@dataclass(frozen=True)
class Axis:
    """The index along one axis of the tensor that a formula describes."""

    place: int


@dataclass(frozen=True)
class Read:
    """The element of a graph node's tensor at an index; an unknown in formulas.

    Two reads of the same element with different `moment` may have different values: the graph
    writes to the tensor's memory between the two moments.
    """

    node: Node
    at: tuple[Linear, ...]
    moment: int = 0


Term: TypeAlias = "Axis | Read"


@dataclass(frozen=True, eq=False)
class Linear:
    """A sum: a constant plus integer multiples of axis indices, sizes and reads (elements of
    tensors).

    Two objects of this class are equal if they print as the same text.
    """

    constant: Size = 0
    terms: Mapping[Term, int] = field(default_factory=dict)

    def _key(self) -> tuple[Any, ...]:
        return str(self.constant), frozenset(self.terms.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Linear) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __add__(self, other: Linear | Size) -> Linear:
        if not isinstance(other, Linear):
            return Linear(self.constant + other, self.terms)
        terms = dict(self.terms)
        for term, times in other.terms.items():
            terms[term] = terms.get(term, 0) + times
        kept = {term: times for term, times in terms.items() if times}
        return Linear(self.constant + other.constant, kept)

    def __neg__(self) -> Linear:
        return self.times(-1)

    def __sub__(self, other: Linear | Size) -> Linear:
        return self + (-other)

    def times(self, factor: int) -> Linear:
        """Return this sum of axis indices, sizes and tensor elements, multiplied by an integer."""
        if factor == 0:
            return Linear()
        terms = {term: times * factor for term, times in self.terms.items()}
        return Linear(self.constant * factor, terms)

    @property
    def is_constant(self) -> bool:
        """Return whether this sum has the same value at every index of a tensor, because it
        contains no axis index and no tensor element."""
        return not self.terms

    def lowest(self, shape: Sequence[Size]) -> Size | None:
        """Return the smallest value of this sum of axis indices over a tensor of shape `shape`.
        Return None if the value depends on an element of a tensor."""
        return self._bound(shape, lambda times: times < 0)

    def highest(self, shape: Sequence[Size]) -> Size | None:
        """Return the largest value of this sum of axis indices over a tensor of shape `shape`.
        Return None if the value depends on an element of a tensor."""
        return self._bound(shape, lambda times: times > 0)

    def _bound(self, shape: Sequence[Size], reaches_end: Callable[[int], bool]) -> Size | None:
        value = self.constant
        for term, times in self.terms.items():
            if not isinstance(term, Axis):
                return None
            if reaches_end(times):
                value = value + (shape[term.place] - 1) * times
        return value


def axis(place: int) -> Linear:
    """Return the index along an axis as a sum (`Linear`) of one term."""
    return Linear(0, {Axis(place): 1})


@dataclass(frozen=True)
class _OfSum:
    sum: Linear


@dataclass(frozen=True)
class _OfRead:
    read: Read


@dataclass(frozen=True)
class _OfParts:
    parts: frozenset[Formula]


@dataclass(frozen=True)
class Fixed:
    """A constant condition: true at every index of a tensor, or false at every index."""

    value: bool


class AtLeastZero(_OfSum):
    """The condition `sum >= 0` on a sum of axis indices, sizes and tensor elements (`Linear`)."""


class IsZero(_OfSum):
    """The condition `sum == 0` on a sum of axis indices, sizes and tensor elements (`Linear`)."""


class Flag(_OfRead):
    """A boolean value read from a tensor."""


@dataclass(frozen=True)
class Not:
    """The negation of a boolean that is read from a tensor (`Flag`), or of an equality (`IsZero`).
    To negate any other formula, `negated` negates its subformulas."""

    part: Formula


class All(_OfParts):
    """The condition that holds at a tensor's index if all conditions in `parts` hold there."""


class Some(_OfParts):
    """The condition that holds at a tensor's index if any condition in `parts` holds there."""


Formula: TypeAlias = "Fixed | AtLeastZero | IsZero | Flag | Not | All | Some"

TRUE, FALSE = Fixed(True), Fixed(False)


class TooLarge(Exception):
    """The error for a formula that has become too large to analyze."""


def at_least_zero(total: Linear) -> Formula:
    """Return the condition `total >= 0` on a sum of axis indices, sizes and tensor elements.

    If the sum has only numbers and sizes, and the result is proved for all sizes, return TRUE or
    FALSE.
    """
    return _settled(AtLeastZero(total), total.constant >= 0, total.constant < 0)


def is_zero(total: Linear) -> Formula:
    """Return the condition `total == 0` on a sum of axis indices, sizes and tensor elements.

    If the sum has only numbers and sizes, and the result is proved for all sizes, return TRUE or
    FALSE.
    """
    return _settled(IsZero(total), total.constant == 0, total.constant != 0)


def _settled(formula: AtLeastZero | IsZero, holds: Any, fails: Any) -> Formula:
    if formula.sum.is_constant and compat.statically_true(holds):
        return TRUE
    return FALSE if formula.sum.is_constant and compat.statically_true(fails) else formula


def both(*parts: Formula) -> Formula:
    """Return the condition that holds at an index if all given conditions hold there."""
    return _joined(All, parts, TRUE, FALSE)


def either(*parts: Formula) -> Formula:
    """Return the condition that holds at an index if at least one given condition holds there."""
    return _joined(Some, parts, FALSE, TRUE)


def _joined(
    join: type[All | Some], parts: Sequence[Formula], neutral: Formula, decides: Formula
) -> Formula:
    flat = (part.parts if isinstance(part, join) else {part} for part in parts)
    found = frozenset[Formula]().union(*flat) - {neutral}
    if len(found) > MOST_PARTS:
        raise TooLarge
    if decides in found or any(negated(part) in found for part in found):
        return decides
    return join(found) if len(found) > 1 else next(iter(found), neutral)


def negated(formula: Formula) -> Formula:
    """Return the negation of a formula; in the result, `Not` surrounds only booleans read from
    tensors (`Flag`) and equalities (`IsZero`)."""
    match formula:
        case Fixed(value):
            return Fixed(not value)
        case AtLeastZero(total):
            return at_least_zero(-total - 1)
        case Not(part):
            return part
        case All(parts):
            return either(*(negated(part) for part in parts))
        case Some(parts):
            return both(*(negated(part) for part in parts))
    return Not(formula)


def decided(formula: Formula, shape: Sequence[Size]) -> Formula:
    """Simplify a formula for tensors of shape `shape`, without changing its value at any index.

    TRUE replaces each condition that is proved to hold at every index. FALSE replaces each
    condition that is proved to hold at no index.
    """
    match formula:
        case AtLeastZero(total) | IsZero(total):
            low, high = total.lowest(shape), total.highest(shape)
            if high is not None and compat.statically_true(high < 0):
                return FALSE
            is_bound = isinstance(formula, AtLeastZero)
            if low is not None and compat.statically_true(low >= 0 if is_bound else low > 0):
                return TRUE if is_bound else FALSE
        case Not() | All() | Some():
            found: Formula = rebuilt(formula, lambda part: decided(part, shape))
            return found
    return formula


@dataclass(frozen=True)
class Cases:
    """The elements of a tensor, as a function of their index: a few values, each with a condition.

    At every index, exactly one of the conditions holds."""

    cases: tuple[tuple[Formula, float], ...]


class Unknown(_OfRead):
    """A number read from a tensor, whose value is unknown."""


class Magnitude(_OfSum):
    """The absolute value of an integer sum."""


Scalar: TypeAlias = "Linear | Formula | Cases | Unknown | Magnitude"


def number(value: float) -> Cases:
    """Return a number as `Cases` (values with conditions) whose only condition is always true."""
    return Cases(((TRUE, float(value)),))


def cases(found: Iterable[tuple[Formula, float]]) -> Cases:
    """Return a number that depends on a tensor's index, as `Cases`: values, each with a condition.

    `found` contains pairs: a condition on the index, and the value of the number where this
    condition holds. Join the conditions of equal values, and remove values whose condition is
    FALSE."""
    by_value: dict[str, tuple[Formula, float]] = {}
    for condition, value in found:
        if condition == FALSE:
            continue
        before, _ = by_value.get(repr(value), (FALSE, value))
        by_value[repr(value)] = (either(before, condition), value)
    if len(by_value) > MOST_CASES:
        raise TooLarge
    return Cases(tuple(by_value.values()))


def combined(left: Cases, right: Cases, operation: Callable[[float, float], float]) -> Cases:
    """Apply an operation to two numbers that are given as `Cases` (values with conditions).

    The result combines each case of `left` with each case of `right`.
    """
    return cases(
        (both(first, second), operation(a, b))
        for first, a in left.cases
        for second, b in right.cases
    )


def holds_where(given: Cases, wanted: Callable[[float], bool]) -> Formula:
    """Return the condition under which a number, given as `Cases`, satisfies `wanted`.

    The number depends on a tensor's index. `given` has each of its values, with a condition."""
    return either(*(condition for condition, value in given.cases if wanted(value)))


def allowed_by(scalar: Scalar) -> Formula | None:
    """Return the condition under which a mask makes a key visible to a query.

    A boolean mask is true for visible keys, and a floating-point mask adds zero to their scores. A
    floating-point mask must add `MASKED` (-65504) or a lower number to the score of every other
    key. Return None if the mask adds other or unknown numbers to scores, as a bias does.
    """
    if isinstance(scalar, Cases):
        if any(v != 0 and not v <= MASKED for _, v in scalar.cases):
            return None
        return holds_where(scalar, lambda value: value == 0)
    if isinstance(scalar, (Linear, Unknown, Magnitude)):
        return None
    return scalar


def values_taken(scalar: Scalar) -> frozenset[float]:
    """Return the numbers that a mask adds to the scores of hidden keys; for a boolean mask, return
    an empty set."""
    if not isinstance(scalar, Cases):
        return frozenset()
    return frozenset(value for _, value in scalar.cases if value != 0)


def rebuilt(scalar: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each part of the formula `scalar`, and return the simplified result.

    A part is a subformula, a sum (`Linear`) of axis indices and tensor elements, one such element
    (`Read`), or an index of this element."""
    match scalar:
        case Read():
            return replace(scalar, at=tuple(map(change, scalar.at)))
        case AtLeastZero(total):
            return at_least_zero(change(total))
        case IsZero(total):
            return is_zero(change(total))
        case Flag(inner) | Unknown(inner) | Magnitude(inner):
            return type(scalar)(change(inner))
        case Not(part):
            return negated(change(part))
        case All(parts):
            return both(*map(change, parts))
        case Some(parts):
            return either(*map(change, parts))
        case Cases(found):
            return cases((change(condition), value) for condition, value in found)
    return scalar


def substituted(scalar: Any, by: Mapping[int, Linear]) -> Any:
    """Return a formula in which each axis index is replaced by a sum, such as an index plus one.

    The argument `scalar` is the formula of a tensor's element. The argument may also be a sum
    (`Linear`) or a tensor's element (`Read`) in such a formula. The dictionary `by` maps the number
    of each axis to the sum that replaces the index along this axis.
    """
    if not isinstance(scalar, Linear):
        return rebuilt(scalar, lambda part: substituted(part, by))
    total = Linear(scalar.constant)
    for term, times in scalar.terms.items():
        one = by[term.place] if isinstance(term, Axis) else Linear(0, {substituted(term, by): 1})
        total = total + one.times(times)
    return total


def _parts_of(scalar: Any) -> Iterable[Any]:
    match scalar:
        case Linear():
            return scalar.terms
        case Read():
            return scalar.at
        case Cases(found):
            return [condition for condition, _ in found]
        case All(parts) | Some(parts):
            return parts
        case AtLeastZero(it) | IsZero(it) | Magnitude(it) | Flag(it) | Unknown(it) | Not(it):
            return (it,)
    return ()


def axes_in(scalar: Any) -> set[Axis]:
    """Return the axes whose indices occur in the expression `scalar`.

    The argument `scalar` is a formula, or a sum (`Linear`) or a tensor's element (`Read`) in a
    formula. The value of `scalar` depends on the index along each of the returned axes."""
    own = {scalar} if isinstance(scalar, Axis) else set[Axis]()
    return own.union(*map(axes_in, _parts_of(scalar)))


def reads_in(scalar: Any) -> set[Read]:
    """Return each `Read` (an element of a tensor) on which the formula `scalar` depends.

    An element that is used as an index of another tensor counts, too."""
    own = {scalar} if isinstance(scalar, Read) else set[Read]()
    return own.union(*map(reads_in, _parts_of(scalar)))


def same_axes(rank: int) -> dict[int, Linear]:
    """Return the substitution that replaces the index along each of `rank` axes by itself.

    A substitution is the argument `by` of `substituted`. This dictionary maps the number of each
    axis to the sum (`Linear`) that replaces the index along the axis.
    """
    return {place: axis(place) for place in range(rank)}
