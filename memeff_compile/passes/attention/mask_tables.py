"""Write a mask's conditions on keys or queries as small tensors (tables) with one row per sequence.

A mask has queries x keys elements, whereas a table of keys has one element per key. The inserted
nodes compute a table once for all layers, right after the last input of the mask is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ..graph.canonical import aten
from ..graph.editor import Editor
from ..graph.graph_info import GraphInfo, same_shape
from . import mask_algebra as algebra
from .mask_algebra import Axis, Formula, Linear, Read, Size


@dataclass(frozen=True)
class Table:
    """A table: one boolean or number for each sequence and each key (or each query)."""

    content: Formula | Linear  # a formula for truth values, a sum for integers
    along: int  # the axis of the scores along which the table runs: queries or keys
    sizes: tuple[Size, Size]  # the sizes of the batch and of that axis
    device: torch.device  # the device of the table
    anchor: Node | None  # the node after which it is written; None for the beginning of the graph
    level: GraphInfo  # the graph it is written in
    dtype: torch.dtype = torch.bool  # the dtype of its numbers

    def written(self, editor: Editor) -> Node:
        """Return the node that computes this table in the editor's graph.

        A table is the mask's condition on each key or query. The node is inserted once for all its
        users.
        """
        sizes = tuple(map(str, self.sizes))
        key = (self.content, self.along, sizes, self.device, self.anchor, self.dtype)
        owner = editor
        while owner.info is not self.level:
            owner = owner.around()
        return editor.bring_in(owner.shared(key, lambda: self._write(owner)))

    def _write(self, editor: Editor) -> Node:
        with editor.at(behind(editor, self.anchor)):
            return _Writer(editor, self).write()


def place_for(info: GraphInfo, content: Formula | Linear) -> tuple[Node | None, GraphInfo] | None:
    """Return the node after which a mask's condition on each key or query can be computed.

    Also return the graph of this node. A table is a small tensor with the result of the condition.
    The returned node is the last of the nodes that the table reads, or None if the table reads no
    node. If the table cannot be computed, return None instead of the pair of node and graph. The
    table cannot be computed if it reads a node outside of the graph of `info` and the graphs around
    that graph. The table's nodes may read a tensor later than the mask's nodes did. If the graph
    may write to this tensor in between, the table cannot be computed either.
    """
    reads = sorted(algebra.reads_in(content), key=str)
    level = info
    while reads and not any(read.node.graph is level.gm.graph for read in reads):
        if level.parent is None:
            return None
        level = level.parent
    moments: dict[Read, int] = {}
    for read in reads:
        home = next((each for each in level.outward() if read.node.graph is each.gm.graph), None)
        if home is None:
            return None
        if (home is not level or not read.moment) and home.may_be_written(read.node):
            return None
        if home is level:
            moments[read] = read.moment - 1 if read.moment else level.positions[read.node]
    last = max(moments.values(), default=-1)
    if any(level.written_alike(read.node, first - 1, last) for read, first in moments.items()):
        return None
    anchor = None if last < 0 else next(n for n, at in level.positions.items() if at == last)
    return anchor, level


def behind(editor: Editor, anchor: Node | None) -> Node:
    """Return the node before which new nodes must be inserted so that they follow `anchor`."""
    node = anchor.next if anchor is not None else next(iter(editor.graph.nodes))
    while node.op in ("placeholder", "get_attr"):
        node = node.next
    return node


class _Writer:
    """Inserts the nodes that compute one table: a boolean or integer for each key, or each query,
    of each sequence. All intermediate tensors have the shape (batch or 1, length or 1)."""

    def __init__(self, editor: Editor, table: Table) -> None:
        self.editor, self.table = editor, table
        self.row, self.column = Axis(0), Axis(table.along)
        self.batch, self.length = table.sizes

    def write(self) -> Node:
        """Insert all nodes that compute the table (the mask's condition on each key or query).

        Return the last node, a new contiguous tensor of shape (batch or 1, length)."""
        content = self.table.content
        node = self.sum(content) if isinstance(content, Linear) else self.truth(content)
        node = self.editor.cast(node, self.table.dtype)
        rows = self.batch if self.row in algebra.axes_in(content) else 1
        if not same_shape(compat.example_value(node).shape, (rows, self.length)):
            shape = [self.editor.size(rows), self.editor.size(self.length)]
            node = self.editor.call(aten.expand.default, node, shape)
        return self.editor.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def truth(self, formula: Formula) -> Node:
        """Insert the nodes that compute a condition of the mask (a boolean formula)."""
        call = self.editor.call
        match formula:
            case algebra.Fixed(value):
                return self._full(value, torch.bool)
            case algebra.AtLeastZero(total):
                return call(aten.ge.Scalar, self.sum(total), 0)
            case algebra.IsZero(total):
                return call(aten.eq.Scalar, self.sum(total), 0)
            case algebra.Not(algebra.IsZero(total)):
                return call(aten.ne.Scalar, self.sum(total), 0)
            case algebra.Flag(read):
                return self.read(read)
            case algebra.Not(part):
                return call(aten.logical_not.default, self.truth(part))
            case algebra.All(parts):
                return self._joined(aten.logical_and.default, parts)
            case algebra.Some(parts):
                return self._joined(aten.logical_or.default, parts)
        raise AssertionError(formula)

    def _joined(self, op: Any, parts: frozenset[Formula]) -> Node:
        values = [self.truth(part) for part in sorted(parts, key=str)]
        return reduce(partial(self.editor.call, op), values)

    def _full(self, value: bool | int, dtype: torch.dtype) -> Node:
        how = {"dtype": dtype, "device": self.table.device}
        return self.editor.call(aten.full.default, [1, 1], value, **how)

    def sum(self, total: Linear) -> Node:
        """Insert the nodes that compute `total`, an integer sum (`Linear`), in 64 bits."""
        call = self.editor.call
        found: Node | None = None
        for term, times in sorted(total.terms.items(), key=str):
            node = self.index(term) if isinstance(term, Axis) else self.read(term)
            if times != 1:
                node = call(aten.mul.Scalar, node, times)
            found = node if found is None else call(aten.add.Tensor, found, node)
        constant = self.editor.size(total.constant)
        if found is None and isinstance(constant, int):
            return self._full(constant, torch.int64)
        found = found or self._full(0, torch.int64)
        is_zero = isinstance(constant, int) and constant == 0
        return found if is_zero else call(aten.add.Scalar, found, constant)

    def index(self, axis: Axis) -> Node:
        """Insert nodes that compute the indices along an axis of the table.

        The table has one element for each key (or each query) of each sequence. The axis is that of
        the sequences, or that of the keys or queries."""
        size = self.editor.size(self.batch if axis == self.row else self.length)
        how = {"dtype": torch.int64, "device": self.table.device}
        line = self.editor.call(aten.arange.default, size, **how)
        return self.editor.call(aten.unsqueeze.default, line, 1 if axis == self.row else 0)

    def read(self, read: Read) -> Node:
        """Insert nodes that load elements of a tensor, and return the node of these elements.

        `read` names the tensor's node, and an index for each axis of the tensor. If the
        elements are integers, they are cast to 64 bits.
        """
        node = self.editor.bring_in(self.editor.info.current(read.node))
        node, at = self._selected(node, read.at)
        found = self._as_it_lies(node, at) or self._gathered(node, at)
        is_truth = compat.example_value(found).dtype == torch.bool
        return found if is_truth else self.editor.cast(found, torch.int64)

    def _selected(self, node: Node, at: Sequence[Linear]) -> tuple[Node, list[Linear]]:
        """Insert a selection for each axis of `node` whose index in `at` is a constant integer.

        Each selection removes its axis. Return the last node, and the indices of the axes that
        remain.
        """
        left: list[Linear] = []
        for place in reversed(range(len(at))):
            constant = at[place].constant
            if at[place].is_constant and isinstance(constant, int):
                node = self.editor.call(aten.select.int, node, place, constant)
            else:
                left.insert(0, at[place])
        return node, left

    def _as_it_lies(self, node: Node, at: Sequence[Linear]) -> Node | None:
        """Insert slices that read elements of `node` at the indices `at`, and return the last node.

        The last node's tensor can be broadcast to the table: the mask's condition on each key or
        query of each sequence. Return None if slices cannot read these elements. Slices can read
        them if each index is the index of a table axis plus a constant. The axes of `node` must
        also have the table's order.
        """
        sizes_of: dict[Any, Size] = {self.row: self.batch, self.column: self.length}
        axes = tuple(term for index in at for term in index.terms)
        plain = all(index.terms == {axis: 1} for index, axis in zip(at, axes, strict=False))
        if not plain or len(axes) != len(at) or axes != tuple(a for a in sizes_of if a in axes):
            return None
        sizes = [sizes_of[axis] for axis in axes]
        for place, (size, index) in enumerate(zip(sizes, at, strict=True)):
            known = compat.example_value(node).shape[place]
            is_zero = isinstance(index.constant, int) and index.constant == 0
            if not (is_zero and compat.statically_true(known == size)):
                start = self.editor.size(index.constant)
                end = self.editor.size(index.constant + size)
                node = self.editor.call(aten.slice.Tensor, node, place, start, end)
        if not axes:
            return self.editor.call(aten.expand.default, node, [1, 1])
        if len(axes) == 1:
            node = self.editor.call(aten.unsqueeze.default, node, 1 if axes == (self.row,) else 0)
        return node

    def _gathered(self, node: Node, at: Sequence[Linear]) -> Node:
        return self.editor.call(aten.index.Tensor, node, [self.sum(index) for index in at])
