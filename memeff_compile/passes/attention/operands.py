"""Describe an operand of attention by a graph node, and by views to apply to the node's tensor.

The views give the tensor the shape that the inserted attention call needs. In attention that is
written as matrix products:

- operands may have their axes in any order;
- batch and heads may be joined to one axis;
- keys may have no axis of heads.

scaled_dot_product_attention and memeff::attention need the axes batch, heads, length and depth. The
views are inserted only when the attention is rewritten. Before that, only their shapes are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ... import compat
from ...compat import OpOverload
from ..graph.canonical import aten, call_of
from ..graph.editor import Editor
from ..graph.graph_info import GraphInfo, same_shape

# The axes of attention: batch, heads, queries, keys, depth, depth of the values; and batch and
# heads in one.
BATCH, HEADS, FOLDED = "b", "h", "x"
SCORES = {4: "bhqk", 3: "xqk"}
Step = tuple[OpOverload, tuple[Any, ...]]


@dataclass(frozen=True)
class Operand:
    """A node, and the views that turn the node's tensor into an argument of an attention call."""

    node: Node
    steps: tuple[Step, ...] = ()

    @cached_property
    def value(self) -> torch.Tensor:
        """Return the fake tensor that an attention call would receive for this operand.

        This is the tensor of `node` after all views in `steps`."""
        value = compat.example_value(self.node)
        with torch.no_grad():
            for op, args in self.steps:
                value = op(value, *args)
        assert isinstance(value, torch.Tensor)
        return value

    def then(self, op: OpOverload, *args: Any) -> Operand:
        """Return the operand with one more view applied."""
        return replace(self, steps=(*self.steps, (op, args)))

    @property
    def sizes(self) -> list[Any]:
        """Return all numbers in list arguments, such as target shapes, of this operand's view
        operations."""
        lists = [each for _, args in self.steps for each in args if isinstance(each, list)]
        return [size for each in lists for size in each]

    @property
    def unexpanded(self) -> Operand | None:
        """Return the operand without the expansion of its single head to all heads, or None if
        there is no such expansion."""
        if not self.steps or self.steps[-1][0] is not aten.expand.default:
            return None
        before = replace(self, steps=self.steps[:-1])
        return before if same_shape(before.value.shape[:1], self.value.shape[:1]) else None

    def written(self, editor: Editor) -> Node:
        """Insert nodes for the views that turn this operand's node into an argument of an attention
        call, and return the last of these nodes."""
        return written(editor, editor.info.current(self.node), self.steps)


def written(editor: Editor, node: Node, steps: Sequence[Step]) -> Node:
    """Insert nodes that apply views (such as permutations) to a node's result, and return the last
    of these nodes."""
    for op, args in steps:
        node = editor.call(op, node, *(_argument(editor, each) for each in args))
    return node


def _argument(editor: Editor, given: Any) -> Any:
    if isinstance(given, list):
        return [_argument(editor, each) for each in given]
    return editor.size(given) if isinstance(given, torch.SymInt) else given


class Given(NamedTuple):
    """A query, key or value of attention that a model writes as matrix products and softmax.

    The fields are the node, its axes, and the order of axes that an attention call needs."""

    node: Node
    axes: str
    wanted: str


@dataclass
class Placed:
    """The arguments of an attention call that replaces matrix products and a softmax."""

    operands: tuple[Operand, ...]
    result_steps: tuple[Step, ...]  # views that turn a call's result into the chain's result
    moved: list[Node]  # nodes that only moved the axes of operands
    has_one_head: bool  # whether batch and heads in one are taken for a batch of one head


def placed(
    info: GraphInfo, given: Sequence[Given], result: str, sizes: dict[str, Any], *, may_split: bool
) -> Placed | None:
    """Return query, key and value as arguments of an attention call, or None if sizes mismatch.

    Args:
        given: query, key and value.
        result: the axes of the attention result.
        sizes: the size of each axis of the scores, by the axis's letter. If any tensor between the
            attention's two matrix products has separate axes for batch and heads, `sizes` contains
            both axes. Otherwise `sizes` contains one joined axis for batch and heads.
        may_split: whether the joined axis may be split into batch and heads. The axis is split only
            if views had joined the two axes in query, key and value.
    """
    known, moved, found = dict(sizes), list[Node](), list[Given]()
    for each in given:
        node, axes, way = _unmoved(each)
        found.append(Given(node, axes, each.wanted))
        moved += way
        for axis, size in zip(axes, info.value(node).shape, strict=True):
            is_along = axis in (BATCH, HEADS, FOLDED) and compat.statically_true(size == 1)
            if not same_shape([known.setdefault(axis, size)], [size]) and not is_along:
                return None
    apart = [_unfolded(info, each) for each in found]
    if BATCH not in known and may_split:
        shapes = [info.value(node).shape[:2] for node in apart if node is not None]
        if len(shapes) == len(found) and all(same_shape(shape, shapes[0]) for shape in shapes):
            known.update(zip((BATCH, HEADS), shapes[0], strict=True))
    operands = []
    for each, base in zip(found, apart, strict=True):
        operand, is_base = _placed(info, each, base, known)
        operands.append(operand)
        moved += [each.node] if is_base else []
    steps = _result_steps(result, is_split=BATCH in known)
    if not all(info.says(size) for operand in operands for size in operand.sizes):
        return None
    return Placed(tuple(operands), steps, moved, BATCH not in known)


def _placed(
    info: GraphInfo, given: Given, base: Node | None, sizes: dict[str, Any]
) -> tuple[Operand, bool]:
    """Return query, key or value as an attention call's argument, and whether the argument is
    `base`, the tensor before a view.

    If a view joined batch and heads of the query, key or value, `base` is the 4D tensor before this
    view. Otherwise `base` is None.
    """
    node, axes, wanted = given
    if FOLDED not in axes:
        return _arranged(Operand(node), axes, sizes, wanted), False
    wanted = wanted.replace(BATCH + HEADS, FOLDED)
    if BATCH not in sizes:
        folded = _arranged(Operand(node), axes, sizes, wanted)
        return folded.then(aten.unsqueeze.default, 1), False
    split = [sizes[BATCH], sizes[HEADS]]
    if base is not None and axes == wanted and same_shape(info.value(base).shape[:2], split):
        return Operand(base), True
    folded = _arranged(Operand(node), axes, {FOLDED: split[0] * split[1]}, wanted)
    return folded.then(aten.unflatten.int, 0, split), False


def _arranged(operand: Operand, axes: str, sizes: dict[str, Any], wanted: str) -> Operand:
    """Return an operand with the axes that an attention call needs (`wanted`); missing axes, and
    axes of size one, are expanded."""
    present = "".join(axis for axis in wanted if axis in axes)
    if present != axes:
        operand = operand.then(aten.permute.default, [axes.index(axis) for axis in present])
    for place, axis in enumerate(wanted):
        if axis not in axes:
            operand = operand.then(aten.unsqueeze.default, place)
    shape = operand.value.shape
    whole = [sizes.get(axis, size) for axis, size in zip(wanted, shape, strict=True)]
    to = [-1 if same_shape([a], [b]) else b for a, b in zip(shape, whole, strict=True)]
    is_whole = all(isinstance(size, int) and size == -1 for size in to)
    return operand if is_whole else operand.then(aten.expand.default, to)


def _result_steps(result: str, *, is_split: bool) -> tuple[Step, ...]:
    steps: list[Step] = []
    axes = "bhqe"
    if FOLDED in result:
        axes = "xqe"
        fold = (aten.flatten.using_ints, (0, 1)) if is_split else (aten.squeeze.dim, (1,))
        steps.append(fold)
    if result != axes:
        steps.append((aten.permute.default, ([axes.index(axis) for axis in result],)))
    return tuple(steps)


def _unmoved(given: Given) -> tuple[Node, str, list[Node]]:
    """Go back from an operand through its transposes, to the node whose axes are in the order that
    an attention call needs (`given.wanted`).

    Return the node, its axes, and the transposes. If no earlier node has that order, return the
    operand unchanged.
    """
    node, axes, way = given.node, given.axes, list[Node]()
    wanted = given.wanted.replace(BATCH + HEADS, FOLDED) if FOLDED in axes else given.wanted
    wanted = "".join(axis for axis in wanted if axis in axes)
    while axes != wanted:
        order = permutation(node, len(axes))
        if order is None:
            return given.node, given.axes, []
        before = dict(zip(order, axes, strict=True))
        axes = "".join(before[place] for place in range(len(axes)))
        way.append(node)
        node = node.all_input_nodes[0]
    return node, axes, way


def permutation(node: Any, rank: int) -> list[int] | None:
    """Return, for each axis of a transposed tensor, the position of the axis before the transpose.

    Return None if a node is no transpose.
    """
    call = call_of(node, aten.transpose.int, aten.permute.default)
    if call is None:
        return None
    if call.op is aten.permute.default:
        return [dim % rank for dim in call.args["dims"]]
    order = list(range(rank))
    first, second = call.args["dim0"] % rank, call.args["dim1"] % rank
    order[first], order[second] = second, first
    return order


def _unfolded(info: GraphInfo, given: Given) -> Node | None:
    """If a node is a view that joins the first two axes of a 4D tensor, return this 4D tensor,
    otherwise None."""
    if FOLDED not in given.axes:
        return None
    call = call_of(given.node, *_VIEWS)
    base = None if call is None else call.args["self"]
    return base if folds(info.tensor(base), info.tensor(given.node)) else None


_VIEWS = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)


def folds(wide: torch.Tensor | None, narrow: torch.Tensor | None) -> bool:
    """Return whether joining the first two axes of the first tensor gives the second tensor."""
    if wide is None or narrow is None or (wide.dim(), narrow.dim()) != (4, 3):
        return False
    batch, heads, *rest = wide.shape
    return same_shape(narrow.shape, (batch * heads, *rest))
