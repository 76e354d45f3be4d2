"""Turn the nodes that compute a mask into a formula, with one rule per ATen op (abstract
interpretation).

The module :mod:`canonical` first turns each node into ATen ops. If there is no rule for a node, the
formula contains the node's value as an unknown, which is always correct. If the graph writes to a
tensor, the tensor is an unknown too. Such a tensor is never replaced by the formula of the node
that created it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ..graph.canonical import PREVIOUS, Call, aten, call_of, named, read
from ..graph.graph_info import GraphInfo, kind_among, same_shape, storage_of
from . import mask_algebra as algebra
from .mask_algebra import Cases, Flag, Formula, Linear, Magnitude, Scalar, Size, Unknown
from .mask_forms import by_index

_INTEGERS = (torch.int64, torch.int32)


class CannotRead(Exception):
    """The error for a graph node that the mask reader cannot turn into a formula.

    The mask reader (`MaskReader`) describes an attention mask as a formula over tensor indices.
    The reader has rules for ATen ops, and no rule applies to this node.
    """


def _require(holds: bool) -> None:
    if not holds:
        raise CannotRead


@dataclass(frozen=True)
class Value:
    """A tensor described by a function of its index."""

    shape: tuple[Size, ...]
    scalar: Scalar

    def scalar_at(self, index: Sequence[Linear]) -> Scalar:
        """Return the formula of the tensor's element at `index`.

        For each axis of this tensor, `index` has a `Linear`: a sum of axis indices, sizes and
        tensor elements. The axis indices may be those of another tensor. Example: the index in a
        slice plus the slice's start.
        """
        result: Scalar = algebra.substituted(self.scalar, dict(enumerate(index)))
        return result

    def over(self, index: Sequence[Linear], shape: Sequence[Size] | None = None) -> Value:
        """Describe, as a `Value`, a tensor whose elements are this tensor's elements at `index`.

        For each axis of this tensor, `index` has a sum (`Linear`) that gives the position along the
        axis. The sum consists of axis indices of the described tensor, sizes and tensor elements.
        `shape` is the shape of the described tensor, by default the shape of this tensor.
        """
        return Value(self.shape if shape is None else tuple(shape), self.scalar_at(index))


@dataclass(frozen=True)
class Mask:
    """The keys that a mask makes visible, and the number that the mask adds to the scores of all
    other keys."""

    formula: Formula  # which keys count
    added: frozenset[float] = frozenset()  # the numbers; empty for a mask of truth values


class MaskReader:
    """Turns the nodes of one graph into formulas; each nested graph has a separate reader. Each
    node is read once.
    """

    def __init__(self, info: GraphInfo, parent: MaskReader | None = None) -> None:
        self.info, self.parent = info, parent
        self._values: dict[Node, Value] = {}

    def read(self, node: Node) -> Value:
        """Return the `Value` (shape and formula of the elements) of a node's tensor.

        In the formula, elements of nodes for which the reader has no rule are unknowns.
        """
        for ancestor in _in_order(node, self._values):
            self._values[ancestor] = self._read_node(ancestor)
        return self._values[node]

    def mask(self, node: Node, shape: Sequence[Size]) -> Mask | None:
        """Return which keys a mask makes visible, as a formula over the axes of the scores.

        Return None if the mask may add other numbers than zero to visible keys, as a bias does."""
        try:
            scalar = broadcast(self.read(node), tuple(shape))
            formula = algebra.allowed_by(scalar)
            if formula is None:
                return None
            found = by_index(formula, self._positions(formula), len(shape))
        except (CannotRead, algebra.TooLarge):
            return None
        return Mask(found, algebra.values_taken(scalar))

    def _positions(self, formula: Formula) -> dict[algebra.Read, Linear]:
        """For each token's sequence id that the mask's formula reads, return this token's position.

        The graph computed the ids from these positions: an id increases by one where the position
        does not increase by one. Ids that the graph computed otherwise are left out.
        """
        found: dict[algebra.Read, Linear] = {}
        for read_of_ids in algebra.reads_in(formula):
            positions = self._counted_breaks(read_of_ids.node)
            if positions is None or len(positions.shape) != len(read_of_ids.at):
                continue
            at = positions.scalar_at(read_of_ids.at)
            if isinstance(at, Linear):
                found[read_of_ids] = at
        return found

    def _counted_breaks(self, node: Node) -> Value | None:
        """Return P if `node` is `(diff(P, prepend=..) != 1).cumsum(-1)`, otherwise None.

        `node` then contains ids of sequences: where two neighbouring ids are equal, P increases
        by one.
        """
        if node.graph is not self.info.gm.graph:
            return None if self.parent is None else self.parent._counted_breaks(node)
        counted = call_of(node, aten.cumsum.default)
        breaks = None if counted is None else call_of(counted.args["self"], aten.ne.Scalar)
        steps = None if breaks is None else call_of(breaks.args["self"], aten.diff.default)
        if counted is None or breaks is None or steps is None or breaks.args["other"] != 1:
            return None
        positions = steps.args["self"]
        tensor, result = self.info.tensor(positions), self.info.tensor(node)
        first = self.info.tensor(steps.args["prepend"])
        if tensor is None or result is None or first is None:
            return None
        chain = (node, counted.args["self"], breaks.args["self"], positions)
        if any(self.info.may_be_written(n) for n in chain):
            return None
        last = {-1, tensor.dim() - 1}
        is_along = counted.args["dim"] in last and steps.args["dim"] in last
        is_step = steps.args["n"] == 1 and steps.args["append"] is None and _is_one(first.shape[-1])
        are_integers = tensor.dtype in _INTEGERS and result.dtype in _INTEGERS
        return self.read(positions) if is_along and is_step and are_integers else None

    def _read_node(self, node: Node) -> Value:
        tensor = self.info.value(node)
        value: Value | None = None
        if self.info.may_be_written(node):
            return leaf(node, tensor)
        if node.op == "placeholder":
            return self._from_outside(node) or leaf(node, tensor)
        try:
            for call in read(node) or ():
                value = _RULES[call.op.overloadpacket](_Operands(self, node, call, value))
        except (CannotRead, algebra.TooLarge, KeyError):
            return leaf(node, tensor)
        is_read = value is not None and same_shape(value.shape, tensor.shape)
        if value is None or not is_read or not _fits(value.scalar, tensor.dtype):
            return leaf(node, tensor)
        scalar = _rounded(value.scalar, tensor.dtype)
        return Value(tuple(tensor.shape), scalar).over(_index_of(tensor.shape))

    def _from_outside(self, node: Node) -> Value | None:
        """Return the `Value` (shape and formula of the elements) of a graph input, or None.

        The formula comes from another graph, which computes the input. The other graph contains
        the current one as the body of an activation checkpoint, or is an earlier graph partition.
        Return None if the other graph gives no formula.
        """
        if self.parent is None:
            return handed_over(node)
        given = self.info.argument_of(node)
        if given is None or self.parent.info.tensor(given) is None:
            return None
        return self.parent.read(given)

    def operand(self, node: Node, reader: Node) -> Value:
        """Return the value that `node` has when the node `reader` reads it.

        If the graph writes to the memory of `node`, this may be another value than `node`
        computed.
        """
        if not self.info.may_be_written(node):
            return self._values[node]
        return leaf(node, self.info.value(node), moment=1 + self.info.positions[reader])


def _in_order(node: Node, known: dict[Node, Value]) -> list[Node]:
    """Return `node` and the nodes on which it depends, except those already read; each node comes
    after its operands.
    """
    found: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False)]
    while stack:
        current, is_done = stack.pop()
        if is_done:
            found.append(current)
            continue
        is_tensor = isinstance(compat.example_value(current), torch.Tensor)
        if current in seen or current in known or not is_tensor:
            continue
        seen.add(current)
        stack.append((current, True))
        if current.op in ("call_function", "call_method") and _is_worth_reading(current):
            stack.extend((operand, False) for operand in current.all_input_nodes)
    return found


def _is_worth_reading(node: Node) -> bool:
    """Return whether the mask reader has rules for all ATen ops of a node.

    The mask reader turns the nodes that compute an attention mask into a formula. A rule computes
    the formula of an op's result from the formulas of its operands. If a rule is missing for a
    node, the mask's formula contains the node's value as an unknown. The reader then need not visit
    the nodes from which this node is computed, which may be most of the model.
    """
    reading = read(node)
    return reading is not None and all(call.op.overloadpacket in _RULES for call in reading)


def leaf(node: Node, tensor: torch.Tensor, moment: int = 0) -> Value:
    """Return a description of a node's tensor in which all elements are unknowns."""
    shape = tuple(tensor.shape)
    found = algebra.Read(node, tuple(_index_of(shape)), moment)
    if tensor.dtype == torch.bool:
        return Value(shape, Flag(found))
    if tensor.dtype in _INTEGERS:
        return Value(shape, Linear(0, {found: 1}))
    return Value(shape, Unknown(found))


def _fits(scalar: Scalar, dtype: torch.dtype) -> bool:
    """Return whether a tensor of a dtype can contain elements of the kind of `scalar`.

    `scalar` is the formula of a tensor's element. The kinds are integer, boolean and floating
    point."""
    if isinstance(scalar, (Linear, Magnitude)):
        return dtype in _INTEGERS
    if isinstance(scalar, Cases):
        return dtype.is_floating_point or dtype in _INTEGERS
    if isinstance(scalar, Unknown):
        return dtype != torch.bool
    return dtype == torch.bool


def _rounded(scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """Return the formula of a tensor's element, with the element's values rounded to a dtype.

    Only `Cases` (values with conditions) are rounded, and only to a floating-point dtype."""
    if not isinstance(scalar, Cases) or not dtype.is_floating_point:
        return scalar
    with compat.outside_dispatch_modes():
        return algebra.cases(
            (condition, torch.tensor(value, dtype=dtype).item())
            for condition, value in scalar.cases
        )


def _is_one(size: Size) -> bool:
    return compat.statically_true(size == 1)


def _index_of(shape: Sequence[Size]) -> list[Linear]:
    """Return the index at which a broadcast tensor is read: zero along each axis of size one."""
    return [Linear() if _is_one(size) else algebra.axis(p) for p, size in enumerate(shape)]


class _Operands:
    """The arguments of one ATen call: sizes, plain Python objects, and descriptions of tensors.

    A `Value` object describes a tensor by its shape and the formula of its elements."""

    def __init__(self, reader: MaskReader, node: Node, call: Call, previous: Value | None) -> None:
        self._reader, self._node, self._call, self._previous = reader, node, call, previous
        result = reader.info.value(node)
        self.dtype: torch.dtype = result.dtype
        self.shape: tuple[Size, ...] = tuple(result.shape)

    def given(self, name: str) -> Any:
        """Return the argument `name` of the ATen call as the graph passes it."""
        return self._call.args[name]

    def plain(self, name: str) -> Any:
        """Return the argument `name` of the ATen call, with numbers in place of graph nodes.

        Symbolic sizes stay symbolic."""
        return torch.fx.node.map_arg(self.given(name), _size_of)

    def has(self, name: str) -> bool:
        """Return whether the ATen call has an argument `name` that is not None."""
        return self._call.args.get(name) is not None

    def value(self, name: str = "self") -> Value:
        """Return the argument `name` of the ATen call as a `Value` (shape and element formula).

        A Python number becomes a `Value` without axes."""
        return self.as_value(self.given(name))

    def as_value(self, given: Any) -> Value:
        """Return the `Value` (shape and element formula) of an argument: a node or a number."""
        if given is PREVIOUS and self._previous is not None:
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
        """Return the argument `name`, an axis of a tensor with `rank` axes, as a number from 0."""
        place = self.plain(name)
        _require(isinstance(place, int))
        return int(place % rank) if rank else 0


def _size_of(node: Node) -> Any:
    value = compat.example_value(node)
    if not isinstance(value, (int, float, torch.SymInt)):
        raise CannotRead
    return value


def broadcast(value: Value, shape: tuple[Size, ...]) -> Scalar:
    """Return the formula that gives a tensor's element for each index of the larger `shape`.

    The tensor, `value`, is broadcast to this shape."""
    lead = len(shape) - len(value.shape)
    _require(lead >= 0)
    index = []
    for place, size in enumerate(value.shape, lead):
        _require(_is_one(size) or compat.statically_true(size == shape[place]))
        index.append(Linear() if _is_one(size) else algebra.axis(place))
    return value.scalar_at(index)


def _filled(fill: Any, given: _Operands) -> Value:
    if given.dtype == torch.bool:
        return Value(given.shape, algebra.Fixed(bool(fill)))
    if given.dtype in _INTEGERS and isinstance(fill, (int, torch.SymInt)):
        return Value(given.shape, Linear(int(fill) if isinstance(fill, bool) else fill))
    if given.dtype.is_floating_point and isinstance(fill, (int, float)):
        return Value(given.shape, algebra.number(float(fill)))
    raise CannotRead


def _fill(fill: Any = None) -> Callable[[_Operands], Value]:
    """Return the mask reader's rule for an op that fills a tensor with one number.

    If `fill` is None, the number is an argument of the call."""
    return lambda given: _filled(given.plain("fill_value") if fill is None else fill, given)


def _arange(given: _Operands) -> Value:
    start = given.plain("start") if given.has("start") else 0
    step = given.plain("step") if given.has("step") else 1
    _require(isinstance(step, int) and isinstance(start, (int, torch.SymInt)))
    return Value(given.shape, algebra.axis(0).times(step) + start)


def _cast(given: _Operands) -> Value:
    value = given.value()
    return Value(value.shape, as_dtype(value.scalar, given.dtype))


def as_dtype(scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """Return the formula of a tensor's element after a cast of the tensor to a dtype."""
    if _fits(scalar, dtype):
        _require(not isinstance(scalar, (Unknown, Magnitude)))
        _require(dtype.is_floating_point or not isinstance(scalar, Cases))
        return scalar
    if dtype == torch.bool:
        return as_condition(scalar)
    if isinstance(scalar, (Linear, Unknown, Cases, Magnitude)):
        return algebra.number(_whole_number(scalar))
    if dtype in _INTEGERS and isinstance(scalar, algebra.Fixed):
        return Linear(int(scalar.value))
    return _one_where(scalar)


def as_condition(scalar: Scalar) -> Formula:
    """Return the condition under which a tensor's element is not zero.

    `scalar` is the formula that gives the element for each index of the tensor."""
    if isinstance(scalar, Linear):
        return algebra.negated(algebra.is_zero(scalar))
    if isinstance(scalar, Cases):
        return algebra.holds_where(scalar, lambda value: value != 0)
    if isinstance(scalar, (Unknown, Magnitude)):
        raise CannotRead
    return scalar


def _expand(given: _Operands) -> Value:
    return Value(given.shape, broadcast(given.value(), given.shape))


def _repeat(given: _Operands) -> Value:
    """Describe the result of `repeat` along axes of size one. Repetition of a longer axis is not
    supported, because its index would wrap around.
    """
    value, repeats = given.value(), list(given.plain("repeats"))
    sizes = [1] * (len(repeats) - len(value.shape)) + list(value.shape)
    _require(all(_is_one(a) or _is_one(b) for a, b in zip(sizes, repeats, strict=True)))
    return _expand(given)


def _unsqueeze(given: _Operands) -> Value:
    value = given.value()
    rank = len(value.shape)
    place = given.axis("dim", rank + 1)
    shape = (*value.shape[:place], 1, *value.shape[place:])
    return value.over([algebra.axis(p + (p >= place)) for p in range(rank)], shape)


def _reshape(given: _Operands) -> Value:
    """Describe the result of a view that only inserts or removes axes of size one."""
    value, shape = given.value(), given.shape
    old = [p for p, size in enumerate(value.shape) if not _is_one(size)]
    new = [p for p, size in enumerate(shape) if not _is_one(size)]
    _require(same_shape([value.shape[p] for p in old], [shape[p] for p in new]))
    moved = dict(zip(old, new, strict=True))
    index = [algebra.axis(moved[p]) if p in moved else Linear() for p in range(len(value.shape))]
    return value.over(index, shape)


def _permuted(value: Value, order: Sequence[int]) -> Value:
    index = [Linear()] * len(order)
    for new, old in enumerate(order):
        index[old] = algebra.axis(new)
    return value.over(index, [value.shape[p] for p in order])


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
    _require(isinstance(step, int) and step == 1 and compat.statically_true(start >= 0))
    end = size if end is None or compat.statically_true(end >= size) else end
    end = size + end if compat.statically_true(end < 0) else end
    _require(compat.statically_true(end >= start) and compat.statically_true(end <= size))
    shape = (*value.shape[:place], end - start, *value.shape[place + 1 :])
    index = [algebra.axis(p) for p in range(len(shape))]
    index[place] = index[place] + start
    return value.over(index, shape)


def _select(given: _Operands) -> Value:
    value = given.value()
    place = given.axis("dim", len(value.shape))
    at = given.plain("index")
    size = value.shape[place]
    if compat.statically_true(at < 0):
        at = size + at
    else:
        _require(compat.statically_true(at >= 0))
    index = [algebra.axis(p - (p > place)) for p in range(len(value.shape))]
    index[place] = Linear(at)
    return value.over(index, (*value.shape[:place], *value.shape[place + 1 :]))


def _index(given: _Operands) -> Value:
    """Describe the result of indexing by tensors, along the leading axes or along one axis."""
    value = given.value()
    chosen = given.given("indices")
    places = [p for p, index in enumerate(chosen) if index is not None]
    first, last = places[0], places[-1]
    _require(last - first + 1 == len(places))
    indices = [given.as_value(chosen[p]) for p in places]
    shape = _common_shape([index.shape for index in indices])
    pairs = zip(indices, value.shape[first:], strict=False)
    gathered = [_gathered(index, shape, first, size) for index, size in pairs]
    before, after = value.shape[:first], value.shape[last + 1 :]
    behind = [algebra.axis(first + len(shape) + place) for place in range(len(after))]
    at = [*map(algebra.axis, range(first)), *gathered, *behind]
    return value.over(at, (*before, *shape, *after))


def _gathered(index: Value, shape: tuple[Size, ...], shift: int, size: Size) -> Linear:
    """Return the formula of an index tensor's element: a sum (`Linear`) of indices along axes.

    The axes are those of the indexing op's result. The index tensor's elements must not be
    negative, that is, must not count from the end."""
    total = _sum(broadcast(index, shape))
    low, high = total.lowest(shape), total.highest(shape)
    _require(low is not None and compat.statically_true(low >= 0))
    _require(high is not None and compat.statically_true(high < size))
    by = {place: algebra.axis(place + shift) for place in range(len(shape))}
    moved: Linear = algebra.substituted(total, by)
    return moved


def _common_shape(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    rank = max(map(len, shapes))
    result: list[Size] = []
    for place in range(-rank, 0):
        sizes = [shape[place] for shape in shapes if len(shape) >= -place]
        wide = [size for size in sizes if not _is_one(size)]
        _require(all(compat.statically_true(size == wide[0]) for size in wide))
        result.append(wide[0] if wide else 1)
    return tuple(result)


def _pair(given: _Operands) -> tuple[tuple[Size, ...], Scalar, Scalar]:
    left, right = given.value("self"), given.value("other")
    shape = _common_shape([left.shape, right.shape])
    return shape, broadcast(left, shape), broadcast(right, shape)


def _comparison(
    of_sums: Callable[[Linear], Formula], of_numbers: Callable[[float, float], bool]
) -> Callable[[_Operands], Value]:
    """Return the mask reader's rule for a comparison operator.

    An operand is a tensor, described by the formula of its elements. If both formulas are sums
    (`Linear`) of axis indices, sizes and tensor elements, `of_sums` returns the result as a
    condition on the difference `left - right`. `of_numbers` compares two numbers.
    """

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
    """Return the formula of a comparison in which one operand is a magnitude `|x|` and the other
    a sum.

    `|x|` is less than the sum if x and -x are both less than it, and greater if x or -x is
    greater.
    """
    _require(of_numbers(0, 1) != of_numbers(1, 0))  # as for equal and different
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
    return Value(value.shape, Magnitude(_sum(value.scalar)))


def _sum(scalar: Scalar) -> Linear:
    if not isinstance(scalar, Linear):
        raise CannotRead
    return scalar


def _as_cases(scalar: Scalar) -> Cases:
    if isinstance(scalar, Cases):
        return scalar
    if isinstance(scalar, Linear):
        return algebra.number(_whole_number(scalar))
    if isinstance(scalar, (Unknown, Magnitude)):
        raise CannotRead
    return _one_where(scalar)


def _one_where(condition: Formula) -> Cases:
    return algebra.cases([(condition, 1.0), (algebra.negated(condition), 0.0)])


def _whole_number(scalar: Scalar) -> int:
    """Return the integer for which a scalar (the formula of a tensor's element) stands.

    Raise CannotRead if the formula is not a known integer, the same at every index of the tensor.
    """
    total = _sum(scalar)
    if not total.is_constant or not isinstance(total.constant, int):
        raise CannotRead
    return total.constant


def _sum_of(sign: int) -> Callable[[_Operands], Value]:
    def rule(given: _Operands) -> Value:
        _require(not given.has("alpha") or given.plain("alpha") == 1)
        shape, left, right = _pair(given)
        if isinstance(left, Linear) and isinstance(right, Linear):
            return Value(shape, left + right.times(sign))
        _require(given.dtype.is_floating_point)
        total = algebra.combined(_as_cases(left), _as_cases(right), lambda a, b: a + sign * b)
        return Value(shape, total)

    return rule


def _product(given: _Operands) -> Value:
    shape, left, right = _pair(given)
    if given.dtype == torch.bool:
        return Value(shape, algebra.both(as_condition(left), as_condition(right)))
    if isinstance(left, Linear) and isinstance(right, Linear):
        for total, factor in ((left, right), (right, left)):
            if factor.is_constant and isinstance(factor.constant, int):
                return Value(shape, total.times(factor.constant))
    _require(given.dtype.is_floating_point)
    return Value(shape, algebra.combined(_as_cases(left), _as_cases(right), lambda a, b: a * b))


def _minus(value: Value) -> Value:
    if isinstance(value.scalar, Linear):
        return Value(value.shape, -value.scalar)
    if isinstance(value.scalar, Cases):
        return Value(value.shape, algebra.cases((c, -v) for c, v in value.scalar.cases))
    raise CannotRead


def _logical(join: Callable[..., Formula], *, only_truth: bool) -> Callable[[_Operands], Value]:
    def rule(given: _Operands) -> Value:
        _require(not only_truth or given.dtype == torch.bool)  # and no bits of integers
        shape, left, right = _pair(given)
        return Value(shape, join(as_condition(left), as_condition(right)))

    return rule


def _exclusive(first: Formula, second: Formula) -> Formula:
    return algebra.either(
        algebra.both(first, algebra.negated(second)), algebra.both(algebra.negated(first), second)
    )


def _negation(*, only_truth: bool) -> Callable[[_Operands], Value]:
    def rule(given: _Operands) -> Value:
        _require(not only_truth or given.dtype == torch.bool)
        value = given.value()
        return Value(value.shape, algebra.negated(as_condition(value.scalar)))

    return rule


def _chosen(condition: Formula, then: Scalar, other: Scalar) -> Scalar:
    if then == other:
        return then
    if isinstance(then, Linear) or isinstance(other, Linear):
        then, other = _as_cases(then), _as_cases(other)
    refused = algebra.negated(condition)
    if isinstance(then, Cases) and isinstance(other, Cases):
        return algebra.cases(
            [(algebra.both(condition, c), v) for c, v in then.cases]
            + [(algebra.both(refused, c), v) for c, v in other.cases]
        )
    if isinstance(then, (Cases, Unknown, Magnitude)):
        raise CannotRead
    if isinstance(other, (Cases, Unknown, Magnitude)):
        raise CannotRead
    return algebra.either(algebra.both(condition, then), algebra.both(refused, other))


def _where(given: _Operands) -> Value:
    _require(given.has("self"))  # where(condition): the places
    return _selection(given, ("condition", "self", "other"))


def _selection(given: _Operands, names: tuple[str, str, str]) -> Value:
    """Describe the result of an op that selects between two values.

    `names` are the names of the op's arguments: the condition, and the values for true and false.
    """
    condition, then, other = map(given.value, names)
    shape = _common_shape([condition.shape, then.shape, other.shape])
    where = as_condition(broadcast(condition, shape))
    scalars = [broadcast(value, shape) for value in (then, other)]
    # A plain number becomes the kind of scalar that the result's dtype holds.
    fit = [s if _fits(s, given.dtype) else as_dtype(s, given.dtype) for s in scalars]
    return Value(shape, _chosen(where, *fit))


def _triangle(sign: int) -> Callable[[_Operands], Value]:
    """Return the mask reader's rule for tril (sign 1) or triu (sign -1)."""

    def rule(given: _Operands) -> Value:
        value = given.value()
        diagonal = given.plain("diagonal")
        rank = len(value.shape)
        _require(rank >= 2)
        difference = algebra.axis(rank - 2) - algebra.axis(rank - 1) + diagonal
        kept = algebra.at_least_zero(difference.times(sign))
        zero: Scalar = algebra.FALSE if given.dtype == torch.bool else algebra.number(0.0)
        return Value(value.shape, _chosen(kept, value.scalar, zero))

    return rule


def _cumsum(given: _Operands) -> Value:
    """Describe the result of a cumulative sum whose input has the same value at every index, such
    as a tensor of ones.
    """
    value = given.value()
    place = given.axis("dim", len(value.shape))
    scalar = value.scalar
    if isinstance(scalar, algebra.Fixed):
        scalar = Linear(int(scalar.value))
    _require(given.dtype in _INTEGERS)
    return Value(value.shape, (algebra.axis(place) + 1).times(_whole_number(scalar)))


def _diff(given: _Operands) -> Value:
    """Describe the result of `diff` with a prepended value, if the differences of neighbouring
    elements are the same at every index.
    """
    value = given.value()
    place = given.axis("dim", len(value.shape))
    _require(given.plain("n") == 1 and not given.has("append"))
    index = [algebra.axis(p) for p in range(len(value.shape))]
    index[place] = index[place] + 1
    step = _sum(value.scalar_at(index)) - _sum(value.scalar)
    _require(step.is_constant)
    if given.has("prepend"):
        before = given.value("prepend")
        _require(_is_one(before.shape[place]))
        index[place] = Linear()
        _require(_sum(value.scalar_at(index)) - _sum(before.scalar_at(index)) == step)
    return Value(given.shape, step)


_RULES: dict[Any, Callable[[_Operands], Value]] = {
    **dict.fromkeys(named("alias clone contiguous detach"), _Operands.value),
    aten.to: _cast,
    aten.arange: _arange,
    **dict.fromkeys(named("ones new_ones ones_like"), _fill(1)),
    **dict.fromkeys(named("zeros new_zeros zeros_like"), _fill(0)),
    **dict.fromkeys(named("full new_full full_like"), _fill()),
    **dict.fromkeys(named("expand expand_as broadcast_to"), _expand),
    aten.repeat: _repeat,
    aten.unsqueeze: _unsqueeze,
    **dict.fromkeys(named("squeeze view reshape view_as flatten"), _reshape),
    **dict.fromkeys(named("transpose t"), _transpose),
    aten.permute: _permute,
    aten.slice: _slice,
    aten.select: _select,
    aten.index: _index,
    aten.le: _comparison(lambda d: algebra.at_least_zero(-d), lambda a, b: a <= b),
    aten.lt: _comparison(lambda d: algebra.at_least_zero(-d - 1), lambda a, b: a < b),
    aten.ge: _comparison(algebra.at_least_zero, lambda a, b: a >= b),
    aten.gt: _comparison(lambda d: algebra.at_least_zero(d - 1), lambda a, b: a > b),
    aten.eq: _comparison(algebra.is_zero, lambda a, b: a == b),
    aten.ne: _comparison(lambda d: algebra.negated(algebra.is_zero(d)), lambda a, b: a != b),
    aten.add: _sum_of(1),
    aten.sub: _sum_of(-1),
    aten.rsub: lambda given: _minus(_sum_of(-1)(given)),
    aten.mul: _product,
    aten.neg: lambda given: _minus(given.value()),
    aten.abs: _magnitude,
    **dict.fromkeys(named("bitwise_and __and__"), _logical(algebra.both, only_truth=True)),
    **dict.fromkeys(named("bitwise_or __or__"), _logical(algebra.either, only_truth=True)),
    **dict.fromkeys(named("bitwise_xor __xor__"), _logical(_exclusive, only_truth=True)),
    aten.bitwise_not: _negation(only_truth=True),
    aten.logical_and: _logical(algebra.both, only_truth=False),
    aten.logical_or: _logical(algebra.either, only_truth=False),
    aten.logical_xor: _logical(_exclusive, only_truth=False),
    aten.logical_not: _negation(only_truth=False),
    aten.where: _where,
    aten.masked_fill: lambda given: _selection(given, ("mask", "value", "self")),
    aten.tril: _triangle(1),
    aten.triu: _triangle(-1),
    aten.cumsum: _cumsum,
    aten.diff: _diff,
}


def reader_of(info: GraphInfo) -> MaskReader:
    """Return the mask reader of a graph. Each graph has one reader, so that a mask that many layers
    use is read once."""
    reader: MaskReader | None = info.notes.get("mask_reader")
    if reader is None:
        parent = None if info.parent is None else reader_of(info.parent)
        reader = info.notes["mask_reader"] = MaskReader(info, parent)
    return reader


def handed_over(node: Node) -> Value | None:
    """Return the `Value` (shape and formula of the elements) of a graph input, or None.

    DDP splits a graph into partitions. If an earlier partition computed this input, the earlier
    partition may have recorded the `Value`. Return None if no `Value` is recorded.
    """
    notes = compat.notes_between_pieces()
    value: Value | None = None if notes is None else notes.get(compat.example_value(node))
    return value


def hand_over(info: GraphInfo) -> None:
    """Record formulas for the elements of the tensors that this graph partition returns.

    DDP splits a graph into partitions. Later partitions use the formulas to read masks. Formulas of
    tensors to whose memory this partition may write are dropped. If recording fails, all formulas
    are dropped.
    """
    notes = compat.notes_between_pieces()
    if notes is None:
        return
    known = list(notes.items())
    notes.clear()
    targets = [info.tensor(target) for write in info.writes for target in write.targets]
    written = {None if target is None else storage_of(target) for target in targets}
    if None not in written:
        notes.update((each, said) for each, said in known if storage_of(each) not in written)
    for node in info.output.all_input_nodes:
        value = info.tensor(node)
        if value is None or value.requires_grad or kind_among([node]):
            continue
        said = reader_of(info).read(node)
        if not algebra.reads_in(said.scalar):
            notes[value] = said
