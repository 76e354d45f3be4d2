"""Reads a mask's part of the graph as a formula: an abstract interpreter, one rule per ATen op.

What an op does is read through :mod:`canonical`; a node that no rule can read becomes a read of
that node's own value, which is always true of it. Memory that anything in the graph writes to is
never taken for what it was computed as.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...compat import OpOverload
from ..graph.canonical import PREVIOUS, Call, aten, read, read_one
from ..graph.graph_info import GraphInfo, same_shape
from . import mask_algebra as algebra
from .mask_algebra import Cases, Flag, Formula, Linear, Magnitude, Scalar, Size, Unknown
from .mask_forms import by_index, reads_in

_INTEGERS = (torch.int64, torch.int32)


class CannotRead(Exception):
    """No rule reads this."""


@dataclass(frozen=True)
class Value:
    """A tensor as a function of its own index."""

    shape: tuple[Size, ...]
    scalar: Scalar

    def scalar_at(self, index: Sequence[Linear]) -> Scalar:
        """Return the scalar at an index given as sums."""
        result: Scalar = algebra.substituted(self.scalar, dict(enumerate(index)))
        return result


@dataclass(frozen=True)
class Mask:
    """Which keys a mask lets through, and what it adds to the scores of the others.

    Args:
        formula: Which keys count.
        added: The numbers; empty for a mask of truth values.
    """

    formula: Formula
    added: frozenset[float] = frozenset()


class MaskReader:
    """Reads the nodes of one level of a graph, each once."""

    def __init__(self, info: GraphInfo, parent: MaskReader | None = None) -> None:
        self.info, self.parent = info, parent
        self._values: dict[Node, Value] = {}

    def read(self, node: Node) -> Value:
        """Return what is known of a tensor's node."""
        for ancestor in _in_order(node, self._values):
            self._values[ancestor] = self._read_node(ancestor)
        return self._values[node]

    def formula(self, node: Node, shape: Sequence[Size]) -> Formula | None:
        """Return which keys a mask lets through, over the axes of the scores; as `mask` does."""
        found = self.mask(node, shape)
        return None if found is None else found.formula

    def mask(self, node: Node, shape: Sequence[Size]) -> Mask | None:
        """Return which keys a mask lets through, over the axes of the scores.

        Args:
            node: The mask.
            shape: The sizes of the scores, which the mask broadcasts to.

        Returns:
            None for a mask that is (or may be) a bias.
        """
        try:
            scalar = broadcast(self.read(node), tuple(shape))
            formula = algebra.allowed_by(scalar)
            if formula is None:
                return None
            found = by_index(formula, self._positions(formula), len(shape))
        except (CannotRead, algebra.TooLarge):
            return None
        return Mask(found, algebra.values_taken(scalar))

    # --- runs of positions ------------------------------------------------------------------------

    def _positions(self, formula: Formula) -> dict[algebra.Read, Linear]:
        """Return, for each read of ids that count the breaks in positions, the position there."""
        found: dict[algebra.Read, Linear] = {}
        for read_of_ids in reads_in(formula):
            positions = self._counted_breaks(read_of_ids.node)
            if positions is None or len(positions.shape) != len(read_of_ids.at):
                continue
            at = positions.scalar_at(read_of_ids.at)
            if isinstance(at, Linear):
                found[read_of_ids] = at
        return found

    def _counted_breaks(self, node: Node) -> Value | None:
        """Return P where ``node`` is ``(diff(P, prepend=..) != 1).cumsum(-1)``: equal ids in a row
        mean that P goes up by one from each to the next.
        """
        if node.graph is not self.info.gm.graph:
            return None if self.parent is None else self.parent._counted_breaks(node)
        counted = _single(node, aten.cumsum.default)
        breaks = None if counted is None else _single(counted.args["self"], aten.ne.Scalar)
        steps = None if breaks is None else _single(breaks.args["self"], aten.diff.default)
        if counted is None or breaks is None or steps is None or breaks.args["other"] != 1:
            return None
        positions, before = steps.args["self"], steps.args["prepend"]
        tensor, result = self.info.tensor(positions), self.info.tensor(node)
        first = self.info.tensor(before)
        if tensor is None or result is None or first is None:
            return None
        chain = (node, counted.args["self"], breaks.args["self"], positions)
        if any(self.info.may_be_written(n) for n in chain) or tensor.dtype not in _INTEGERS:
            return None
        last = {-1, tensor.dim() - 1}
        if counted.args["dim"] not in last or steps.args["dim"] not in last:
            return None
        if steps.args["n"] != 1 or steps.args["append"] is not None:
            return None
        if not compat.statically_true(first.shape[-1] == 1):
            return None
        return self.read(positions) if result.dtype in _INTEGERS else None

    # --- nodes ------------------------------------------------------------------------------------

    def _read_node(self, node: Node) -> Value:
        tensor = self.info.tensor(node)
        assert tensor is not None
        if self.info.may_be_written(node):
            return leaf(node, tensor)
        if node.op == "placeholder":
            return self._from_outside(node) or leaf(node, tensor)
        reading = read(node)
        if reading is None:
            return leaf(node, tensor)
        try:
            value: Value | None = None
            for call in reading:
                value = _RULES[call.op.overloadpacket](_Operands(self, node, call, value))
        except (CannotRead, algebra.TooLarge, KeyError):
            return leaf(node, tensor)
        if value is None or not same_shape(value.shape, tensor.shape):
            return leaf(node, tensor)
        if not _fits(value.scalar, tensor.dtype):
            return leaf(node, tensor)
        scalar = _rounded(value.scalar, tensor.dtype)
        return Value(tuple(tensor.shape), _without_single_axes(scalar, tensor.shape))

    def _from_outside(self, node: Node) -> Value | None:
        """Read what a checkpoint's body is given by the graph around it."""
        given = self.info.argument_of(node) if self.parent is not None else None
        if given is None or self.parent is None or self.parent.info.tensor(given) is None:
            return None
        return self.parent.read(given)

    def operand(self, node: Node, reader: Node) -> Value:
        """Return an operand of ``reader``; memory that changes is known for that moment only."""
        value = self._values[node]
        if not self.info.may_be_written(node):
            return value
        tensor = self.info.tensor(node)
        assert tensor is not None
        return leaf(node, tensor, moment=1 + self.info.positions[reader])


def _single(node: Any, op: OpOverload) -> Call | None:
    """Return the one call of ``op`` that a node stands for, or None."""
    call = read_one(node) if isinstance(node, Node) else None
    return call if call is not None and call.op is op else None


def _in_order(node: Node, known: dict[Node, Value]) -> list[Node]:
    """Return ``node`` and the tensors it is computed from, operands first, without known ones."""
    found: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False)]
    while stack:
        current, is_done = stack.pop()
        if is_done:
            found.append(current)
            continue
        if current in seen or current in known:
            continue
        seen.add(current)
        if not isinstance(compat.example_value(current), torch.Tensor):
            continue
        stack.append((current, True))
        if current.op in ("call_function", "call_method") and _is_worth_reading(current):
            stack.extend((operand, False) for operand in current.all_input_nodes)
    return found


def _is_worth_reading(node: Node) -> bool:
    """Return whether a rule may read the node: masks hang on whole models through their inputs."""
    reading = read(node)
    return reading is not None and all(call.op.overloadpacket in _RULES for call in reading)


def leaf(node: Node, tensor: torch.Tensor, moment: int = 0) -> Value:
    """Return a tensor as a read of itself."""
    shape = tuple(tensor.shape)
    at = tuple(
        Linear() if compat.statically_true(size == 1) else algebra.axis(place)
        for place, size in enumerate(shape)
    )
    found = algebra.Read(node, at, moment)
    if tensor.dtype == torch.bool:
        return Value(shape, Flag(found))
    if tensor.dtype in _INTEGERS:
        return Value(shape, Linear(0, {found: 1}))
    return Value(shape, Unknown(found))


def _fits(scalar: Scalar, dtype: torch.dtype) -> bool:
    """Return whether a scalar is of the kind that tensors of this dtype hold."""
    if isinstance(scalar, (Linear, Magnitude)):
        return dtype in _INTEGERS
    if isinstance(scalar, Cases):
        return dtype.is_floating_point or dtype in _INTEGERS
    if isinstance(scalar, Unknown):
        return dtype != torch.bool
    return dtype == torch.bool


def _rounded(scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """Return numbers as a tensor of this dtype holds them."""
    if not isinstance(scalar, Cases) or not dtype.is_floating_point:
        return scalar
    with compat.outside_dispatch_modes():
        return algebra.cases(
            (condition, torch.tensor(value, dtype=dtype).item())
            for condition, value in scalar.cases
        )


def _without_single_axes(scalar: Scalar, shape: Sequence[Size]) -> Scalar:
    by = {
        place: Linear() if compat.statically_true(size == 1) else algebra.axis(place)
        for place, size in enumerate(shape)
    }
    result: Scalar = algebra.substituted(scalar, by)
    return result


# --- operands -------------------------------------------------------------------------------------


class _Operands:
    """The arguments of one call, as values, sizes and plain Python."""

    def __init__(self, reader: MaskReader, node: Node, call: Call, previous: Value | None) -> None:
        self._reader, self._node, self._call, self._previous = reader, node, call, previous

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the node's result."""
        dtype: torch.dtype = compat.example_value(self._node).dtype
        return dtype

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the node's result."""
        return tuple(compat.example_value(self._node).shape)

    def plain(self, name: str) -> Any:
        """Return an argument as Python data; sizes stay symbolic."""
        value = self._call.args[name]
        return torch.fx.node.map_arg(value, _size_of)

    def has(self, name: str) -> bool:
        """Whether an argument is given."""
        return self._call.args.get(name) is not None

    def value(self, name: str = "self") -> Value:
        """Return an argument as a value; Python numbers are tensors without axes."""
        return self.as_value(self._call.args[name])

    def as_value(self, given: Any) -> Value:
        """Return anything that stands where a tensor may stand."""
        if given is PREVIOUS:
            assert self._previous is not None
            return self._previous
        if isinstance(given, Node):
            known = compat.example_value(given)
            if isinstance(known, torch.Tensor):
                return self._reader.operand(given, self._node)
            given = known
        if isinstance(given, bool):
            return Value((), algebra.Fixed(given))
        if isinstance(given, (int, torch.SymInt)):
            return Value((), Linear(given))
        if isinstance(given, float):
            return Value((), algebra.number(given))
        raise CannotRead

    def axis(self, name: str, rank: int) -> int:
        """Return an axis counted from the front."""
        place = self.plain(name)
        if not isinstance(place, int):
            raise CannotRead
        return place % rank if rank else 0


def _size_of(node: Node) -> Any:
    value = compat.example_value(node)
    if not isinstance(value, (int, float, torch.SymInt)):
        raise CannotRead
    return value


def broadcast(value: Value, shape: tuple[Size, ...]) -> Scalar:
    """Return the scalar of a value over the axes of a shape it broadcasts to."""
    lead = len(shape) - len(value.shape)
    if lead < 0:
        raise CannotRead
    index = []
    for place, size in enumerate(value.shape):
        if compat.statically_true(size == 1):
            index.append(Linear())
        elif compat.statically_true(size == shape[place + lead]):
            index.append(algebra.axis(place + lead))
        else:
            raise CannotRead
    return value.scalar_at(index)


# --- rules: values --------------------------------------------------------------------------------


def _filled(fill: Any, shape: Sequence[Size], dtype: torch.dtype) -> Value:
    if dtype == torch.bool:
        return Value(tuple(shape), algebra.Fixed(bool(fill)))
    if dtype in _INTEGERS and isinstance(fill, (int, torch.SymInt)):
        return Value(tuple(shape), Linear(int(fill) if isinstance(fill, bool) else fill))
    if dtype.is_floating_point and isinstance(fill, (int, float)):
        return Value(tuple(shape), algebra.number(float(fill)))
    raise CannotRead


def _fill(fill: Any) -> Callable[[_Operands], Value]:
    return lambda given: _filled(fill, given.shape, given.dtype)


def _full(given: _Operands) -> Value:
    return _filled(given.plain("fill_value"), given.shape, given.dtype)


def _arange(given: _Operands) -> Value:
    arguments = given._call.args
    start = given.plain("start") if "start" in arguments else 0
    step = given.plain("step") if "step" in arguments else 1
    if not isinstance(step, int) or not isinstance(start, (int, torch.SymInt)):
        raise CannotRead
    return Value(given.shape, algebra.axis(0).times(step) + start)


def _cast(given: _Operands) -> Value:
    value = given.value()
    return Value(value.shape, as_dtype(value.scalar, given.dtype))


def as_dtype(scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """Return a scalar as it is after a cast."""
    if _fits(scalar, dtype):
        if isinstance(scalar, (Unknown, Magnitude)):
            raise CannotRead
        if isinstance(scalar, Cases) and not dtype.is_floating_point:
            raise CannotRead
        return scalar
    if dtype == torch.bool:
        return as_condition(scalar)
    if isinstance(scalar, (Linear, Unknown, Cases, Magnitude)):
        if isinstance(scalar, Linear) and isinstance(scalar.constant, int) and scalar.is_constant:
            return algebra.number(scalar.constant)
        raise CannotRead
    if dtype in _INTEGERS and isinstance(scalar, algebra.Fixed):
        return Linear(int(scalar.value))
    return algebra.cases([(scalar, 1.0), (algebra.negated(scalar), 0.0)])


def as_condition(scalar: Scalar) -> Formula:
    """Return where a scalar is not zero."""
    if isinstance(scalar, Linear):
        return algebra.negated(algebra.is_zero(scalar))
    if isinstance(scalar, Cases):
        return algebra.holds_where(scalar, lambda value: value != 0)
    if isinstance(scalar, (Unknown, Magnitude)):
        raise CannotRead
    return scalar


# --- rules: views ---------------------------------------------------------------------------------


def _same(given: _Operands) -> Value:
    return given.value()


def _expand(given: _Operands) -> Value:
    return Value(given.shape, broadcast(given.value(), given.shape))


def _repeat(given: _Operands) -> Value:
    """Read repetitions of axes of size one: of others, an index would wrap around."""
    value, repeats = given.value(), list(given.plain("repeats"))
    sizes = [1] * (len(repeats) - len(value.shape)) + list(value.shape)
    for size, times in zip(sizes, repeats, strict=True):
        if not compat.statically_true(size == 1) and not compat.statically_true(times == 1):
            raise CannotRead
    return _expand(given)


def _unsqueeze(given: _Operands) -> Value:
    value = given.value()
    rank = len(value.shape)
    place = given.axis("dim", rank + 1)
    shape = (*value.shape[:place], 1, *value.shape[place:])
    return Value(shape, value.scalar_at([algebra.axis(p + (p >= place)) for p in range(rank)]))


def _reshape(given: _Operands) -> Value:
    """Read a view that only puts in or takes out axes of size one."""
    value, shape = given.value(), given.shape
    old = [p for p, size in enumerate(value.shape) if not compat.statically_true(size == 1)]
    new = [p for p, size in enumerate(shape) if not compat.statically_true(size == 1)]
    if not same_shape([value.shape[p] for p in old], [shape[p] for p in new]):
        raise CannotRead
    moved = dict(zip(old, new, strict=True))
    index = [algebra.axis(moved[p]) if p in moved else Linear() for p in range(len(value.shape))]
    return Value(shape, value.scalar_at(index))


def _permuted(value: Value, order: Sequence[int]) -> Value:
    index = [Linear()] * len(order)
    for new, old in enumerate(order):
        index[old] = algebra.axis(new)
    return Value(tuple(value.shape[p] for p in order), value.scalar_at(index))


def _transpose(given: _Operands) -> Value:
    value = given.value()
    rank = len(value.shape)
    order = list(range(rank))
    if rank:
        first = given.axis("dim0", rank) if given.has("dim0") else 0
        second = given.axis("dim1", rank) if given.has("dim1") else rank - 1
        order[first], order[second] = order[second], order[first]
    return _permuted(value, order)


def _permute(given: _Operands) -> Value:
    value = given.value()
    return _permuted(value, [place % len(value.shape) for place in given.plain("dims")])


def _slice(given: _Operands) -> Value:
    value = given.value()
    place = given.axis("dim", len(value.shape))
    start, end, step = (given.plain(name) for name in ("start", "end", "step"))
    size = value.shape[place]
    start = 0 if start is None else start
    if not isinstance(step, int) or step != 1 or not compat.statically_true(start >= 0):
        raise CannotRead
    end = size if end is None or compat.statically_true(end >= size) else end
    if compat.statically_true(end < 0):
        end = size + end
    if not compat.statically_true(end >= start) or not compat.statically_true(end <= size):
        raise CannotRead
    shape = (*value.shape[:place], end - start, *value.shape[place + 1 :])
    index = [algebra.axis(p) for p in range(len(shape))]
    index[place] = index[place] + start
    return Value(shape, value.scalar_at(index))


def _select(given: _Operands) -> Value:
    value = given.value()
    place = given.axis("dim", len(value.shape))
    at = given.plain("index")
    size = value.shape[place]
    if compat.statically_true(at < 0):
        at = size + at
    elif not compat.statically_true(at >= 0):
        raise CannotRead
    index = [algebra.axis(p - (p > place)) for p in range(len(value.shape))]
    index[place] = Linear(at)
    return Value((*value.shape[:place], *value.shape[place + 1 :]), value.scalar_at(index))


def _index(given: _Operands) -> Value:
    """Read a gather by tensors of indices along leading axes, or along one axis."""
    value = given.value()
    chosen = given._call.args["indices"]
    places = [p for p, index in enumerate(chosen) if index is not None]
    first, last = places[0], places[-1]
    if last - first + 1 != len(places):
        raise CannotRead
    indices = [given.as_value(chosen[p]) for p in places]
    if any(not isinstance(index.scalar, Linear) for index in indices):
        raise CannotRead
    shape = _common_shape([index.shape for index in indices])
    rank = len(shape)
    at: list[Linear] = []
    for place in range(len(value.shape)):
        if place < first:
            at.append(algebra.axis(place))
        elif place > last:
            at.append(algebra.axis(place - len(places) + rank))
        else:
            at.append(_gathered(indices[place - first], shape, first, value.shape[place]))
    result = (*value.shape[:first], *shape, *value.shape[last + 1 :])
    return Value(result, value.scalar_at(at))


def _gathered(index: Value, shape: tuple[Size, ...], shift: int, size: Size) -> Linear:
    """Return an index as a sum over the result's axes; it must not count from the end."""
    total = broadcast(index, shape)
    assert isinstance(total, Linear)
    low, high = total.lowest(shape), total.highest(shape)
    if low is None or not compat.statically_true(low >= 0):
        raise CannotRead
    if high is None or not compat.statically_true(high < size):
        raise CannotRead
    moved: Linear = algebra.substituted(
        total, {place: algebra.axis(place + shift) for place in range(len(shape))}
    )
    return moved


def _common_shape(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    rank = max(map(len, shapes))
    result: list[Size] = []
    for place in range(-rank, 0):
        sizes = [shape[place] for shape in shapes if len(shape) >= -place]
        wide = [size for size in sizes if not compat.statically_true(size == 1)]
        if any(not compat.statically_true(size == wide[0]) for size in wide):
            raise CannotRead
        result.append(wide[0] if wide else 1)
    return tuple(result)


# --- rules: two operands --------------------------------------------------------------------------


def _pair(given: _Operands) -> tuple[tuple[Size, ...], Scalar, Scalar]:
    left, right = given.value("self"), given.value("other")
    shape = _common_shape([left.shape, right.shape])
    return shape, broadcast(left, shape), broadcast(right, shape)


def _comparison(
    of_sums: Callable[[Linear], Formula], of_numbers: Callable[[float, float], bool]
) -> Callable[[_Operands], Value]:
    """Make the rule of a comparison from what it says of ``left - right``."""

    def rule(given: _Operands) -> Value:
        shape, left, right = _pair(given)
        if isinstance(left, Linear) and isinstance(right, Linear):
            return Value(shape, of_sums(left - right))
        if isinstance(left, Magnitude) or isinstance(right, Magnitude):
            return Value(shape, _compared_magnitudes(of_sums, of_numbers, left, right))
        first, second = _as_cases(left), _as_cases(right)
        compared = algebra.combined(first, second, lambda a, b: float(of_numbers(a, b)))
        return Value(shape, algebra.holds_where(compared, bool))

    return rule


def _compared_magnitudes(
    of_sums: Callable[[Linear], Formula],
    of_numbers: Callable[[float, float], bool],
    left: Scalar,
    right: Scalar,
) -> Formula:
    """Compare ``|x|`` with a sum: below it are both x and -x, above it one of them."""
    if of_numbers(0, 1) == of_numbers(1, 0):  # equal, different
        raise CannotRead
    is_below = of_numbers(0, 1)
    if isinstance(left, Magnitude) and isinstance(right, Linear):
        join = algebra.both if is_below else algebra.either
        return join(of_sums(left.sum - right), of_sums(-left.sum - right))
    if isinstance(right, Magnitude) and isinstance(left, Linear):
        join = algebra.either if is_below else algebra.both
        return join(of_sums(left - right.sum), of_sums(left + right.sum))
    raise CannotRead


def _magnitude(given: _Operands) -> Value:
    value = given.value()
    if not isinstance(value.scalar, Linear):
        raise CannotRead
    return Value(value.shape, Magnitude(value.scalar))


def _as_cases(scalar: Scalar) -> Cases:
    if isinstance(scalar, Cases):
        return scalar
    if isinstance(scalar, Linear):
        if not scalar.is_constant or not isinstance(scalar.constant, int):
            raise CannotRead
        return algebra.number(scalar.constant)
    if isinstance(scalar, (Unknown, Magnitude)):
        raise CannotRead
    return algebra.cases([(scalar, 1.0), (algebra.negated(scalar), 0.0)])


def _sum_of(sign: int) -> Callable[[_Operands], Value]:
    def rule(given: _Operands) -> Value:
        if given.has("alpha") and given.plain("alpha") != 1:
            raise CannotRead
        shape, left, right = _pair(given)
        if isinstance(left, Linear) and isinstance(right, Linear):
            return Value(shape, left + right.times(sign))
        if not given.dtype.is_floating_point:
            raise CannotRead
        total = algebra.combined(_as_cases(left), _as_cases(right), lambda a, b: a + sign * b)
        return Value(shape, total)

    return rule


def _reversed_difference(given: _Operands) -> Value:
    value = _sum_of(-1)(given)
    scalar = value.scalar
    if isinstance(scalar, Linear):
        return Value(value.shape, -scalar)
    if isinstance(scalar, Cases):
        return Value(value.shape, algebra.cases((c, -v) for c, v in scalar.cases))
    raise CannotRead


def _product(given: _Operands) -> Value:
    shape, left, right = _pair(given)
    if given.dtype == torch.bool:
        return Value(shape, algebra.both(as_condition(left), as_condition(right)))
    if isinstance(left, Linear) and isinstance(right, Linear):
        for total, factor in ((left, right), (right, left)):
            if factor.is_constant and isinstance(factor.constant, int):
                return Value(shape, total.times(factor.constant))
        raise CannotRead
    if not given.dtype.is_floating_point:
        raise CannotRead
    return Value(shape, algebra.combined(_as_cases(left), _as_cases(right), lambda a, b: a * b))


def _negative(given: _Operands) -> Value:
    value = given.value()
    if isinstance(value.scalar, Linear):
        return Value(value.shape, -value.scalar)
    if isinstance(value.scalar, Cases):
        return Value(value.shape, algebra.cases((c, -v) for c, v in value.scalar.cases))
    raise CannotRead


def _logical(join: Callable[..., Formula], *, only_truth: bool) -> Callable[[_Operands], Value]:
    def rule(given: _Operands) -> Value:
        if only_truth and given.dtype != torch.bool:
            raise CannotRead  # bits of integers
        shape, left, right = _pair(given)
        return Value(shape, join(as_condition(left), as_condition(right)))

    return rule


def _exclusive(first: Formula, second: Formula) -> Formula:
    return algebra.either(
        algebra.both(first, algebra.negated(second)), algebra.both(algebra.negated(first), second)
    )


def _negation(*, only_truth: bool) -> Callable[[_Operands], Value]:
    def rule(given: _Operands) -> Value:
        if only_truth and given.dtype != torch.bool:
            raise CannotRead
        value = given.value()
        return Value(value.shape, algebra.negated(as_condition(value.scalar)))

    return rule


# --- rules: choices -------------------------------------------------------------------------------


def _chosen(condition: Formula, then: Scalar, other: Scalar) -> Scalar:
    if then == other:
        return then
    if isinstance(then, Magnitude) or isinstance(other, Magnitude):
        raise CannotRead
    if isinstance(then, Linear) or isinstance(other, Linear):
        then, other = _as_cases(then), _as_cases(other)
    if isinstance(then, Cases) and isinstance(other, Cases):
        refused = algebra.negated(condition)
        return algebra.cases(
            [(algebra.both(condition, c), v) for c, v in then.cases]
            + [(algebra.both(refused, c), v) for c, v in other.cases]
        )
    if isinstance(then, (Cases, Unknown)) or isinstance(other, (Cases, Unknown)):
        raise CannotRead
    return algebra.either(
        algebra.both(condition, then), algebra.both(algebra.negated(condition), other)
    )


def _where(given: _Operands) -> Value:
    if not given.has("self"):
        raise CannotRead  # where(condition): the places
    condition, then, other = (given.value(name) for name in ("condition", "self", "other"))
    return _selection(given, condition, then, other)


def _masked_fill(given: _Operands) -> Value:
    return _selection(given, given.value("mask"), given.value("value"), given.value("self"))


def _selection(given: _Operands, condition: Value, then: Value, other: Value) -> Value:
    shape = _common_shape([condition.shape, then.shape, other.shape])
    where = as_condition(broadcast(condition, shape))
    operands = [_number_as(broadcast(value, shape), given.dtype) for value in (then, other)]
    return Value(shape, _chosen(where, *operands))


def _number_as(scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """Return a plain number as the kind of scalar that the result's dtype holds."""
    return scalar if _fits(scalar, dtype) else as_dtype(scalar, dtype)


def _triangle(sign: int) -> Callable[[_Operands], Value]:
    """Make the rule of tril (1) or triu (-1)."""

    def rule(given: _Operands) -> Value:
        value = given.value()
        diagonal = given.plain("diagonal")
        rank = len(value.shape)
        if rank < 2:
            raise CannotRead
        difference = algebra.axis(rank - 2) - algebra.axis(rank - 1) + diagonal
        kept = algebra.at_least_zero(difference.times(sign))
        zero: Scalar = algebra.FALSE if given.dtype == torch.bool else algebra.number(0.0)
        return Value(value.shape, _chosen(kept, value.scalar, zero))

    return rule


# --- rules: along an axis -------------------------------------------------------------------------


def _cumsum(given: _Operands) -> Value:
    """Read the running sum of something that is the same everywhere."""
    value = given.value()
    place = given.axis("dim", len(value.shape))
    scalar = value.scalar
    if isinstance(scalar, algebra.Fixed):
        scalar = Linear(int(scalar.value))
    if not isinstance(scalar, Linear) or not isinstance(scalar.constant, int):
        raise CannotRead
    if not scalar.is_constant or given.dtype not in _INTEGERS:
        raise CannotRead
    return Value(value.shape, (algebra.axis(place) + 1).times(scalar.constant))


def _diff(given: _Operands) -> Value:
    """Read differences of neighbours that are the same everywhere, a prepended one included."""
    value = given.value()
    place = given.axis("dim", len(value.shape))
    scalar = value.scalar
    if given.plain("n") != 1 or given.has("append") or not isinstance(scalar, Linear):
        raise CannotRead
    index = [algebra.axis(p) for p in range(len(value.shape))]
    index[place] = index[place] + 1
    step = algebra.substituted(scalar, dict(enumerate(index))) - scalar
    if not step.is_constant:
        raise CannotRead
    if given.has("prepend"):
        before = given.value("prepend")
        if not compat.statically_true(before.shape[place] == 1):
            raise CannotRead
        index[place] = Linear()
        start = value.scalar_at(index)
        earlier = before.scalar_at(index)
        if not isinstance(start, Linear) or not isinstance(earlier, Linear):
            raise CannotRead
        if start - earlier != step:
            raise CannotRead
    return Value(given.shape, step)


def _differs(total: Linear) -> Formula:
    return algebra.negated(algebra.is_zero(total))


_RULES: dict[Any, Callable[[_Operands], Value]] = {
    aten.alias: _same,
    aten.clone: _same,
    aten.contiguous: _same,
    aten.detach: _same,
    aten.to: _cast,
    aten.arange: _arange,
    aten.ones: _fill(1),
    aten.zeros: _fill(0),
    aten.new_ones: _fill(1),
    aten.new_zeros: _fill(0),
    aten.ones_like: _fill(1),
    aten.zeros_like: _fill(0),
    aten.full: _full,
    aten.new_full: _full,
    aten.full_like: _full,
    aten.expand: _expand,
    aten.expand_as: _expand,
    aten.broadcast_to: _expand,
    aten.repeat: _repeat,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _reshape,
    aten.view: _reshape,
    aten.reshape: _reshape,
    aten.view_as: _reshape,
    aten.flatten: _reshape,
    aten.transpose: _transpose,
    aten.t: _transpose,
    aten.permute: _permute,
    aten.slice: _slice,
    aten.select: _select,
    aten.index: _index,
    aten.le: _comparison(lambda d: algebra.at_least_zero(-d), lambda a, b: a <= b),
    aten.lt: _comparison(lambda d: algebra.at_least_zero(-d - 1), lambda a, b: a < b),
    aten.ge: _comparison(algebra.at_least_zero, lambda a, b: a >= b),
    aten.gt: _comparison(lambda d: algebra.at_least_zero(d - 1), lambda a, b: a > b),
    aten.eq: _comparison(algebra.is_zero, lambda a, b: a == b),
    aten.ne: _comparison(_differs, lambda a, b: a != b),
    aten.add: _sum_of(1),
    aten.sub: _sum_of(-1),
    aten.rsub: _reversed_difference,
    aten.mul: _product,
    aten.neg: _negative,
    aten.abs: _magnitude,
    aten.bitwise_and: _logical(algebra.both, only_truth=True),
    aten.bitwise_or: _logical(algebra.either, only_truth=True),
    aten.bitwise_xor: _logical(_exclusive, only_truth=True),
    aten.bitwise_not: _negation(only_truth=True),
    aten.__and__: _logical(algebra.both, only_truth=True),
    aten.__or__: _logical(algebra.either, only_truth=True),
    aten.__xor__: _logical(_exclusive, only_truth=True),
    aten.logical_and: _logical(algebra.both, only_truth=False),
    aten.logical_or: _logical(algebra.either, only_truth=False),
    aten.logical_xor: _logical(_exclusive, only_truth=False),
    aten.logical_not: _negation(only_truth=False),
    aten.where: _where,
    aten.masked_fill: _masked_fill,
    aten.tril: _triangle(1),
    aten.triu: _triangle(-1),
    aten.cumsum: _cumsum,
    aten.diff: _diff,
}


_READER = "mask_reader"


def reader_of(info: GraphInfo) -> MaskReader:
    """Return the one reader of this level of the graph: a mask shared by layers is read once."""
    reader = info.notes.get(_READER)
    if reader is None:
        parent = None if info.parent is None else reader_of(info.parent)
        reader = info.notes[_READER] = MaskReader(info, parent)
    found: MaskReader = reader
    return found
