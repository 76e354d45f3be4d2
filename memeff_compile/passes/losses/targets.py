"""Recognize how a loss that is written in basic operations selects its target classes: by indexing
with row positions, or by one-hot tensors.

- By position: `x[arange(rows), targets]`.
- By a one-hot tensor: `one_hot(targets, V)` or `full(rows, V).scatter(-1, targets, number)`. The
  graph may also fill and write this tensor in place, by `fill_` and `scatter_`. The graph may cast
  the one-hot tensor, multiply it by a number, and add a number to it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ..graph.canonical import aten, call_of, named, read_one
from ..graph.graph_info import GraphInfo, node_name, same_shape

INDICES = torch.int64, torch.int32
NUMBERS = range, list, tuple  # Python's own sequences of row positions


def indexed_by_numbers(node: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """If a node is `x[range(rows), targets]`, return the tensor `x` and the indices
    `targets`, otherwise return None.
    """
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    source, indices = node.args[0], node.args[1]
    if not isinstance(indices, tuple) or not any(isinstance(i, NUMBERS) for i in indices):
        return None
    return source, indices


def counts_up(info: GraphInfo, index: Any, dim: int, rows: Sequence[Any], reader: Node) -> bool:
    """Return whether `index` contains each row's own position along `dim` (0, 1, 2 and so on)
    when `reader` reads it."""
    if isinstance(index, NUMBERS):  # which broadcast along the last of the dimensions only
        size = compat.known_size(rows[dim])
        is_last = dim == len(rows) - 1
        return is_last and size is not None and list(index) == list(range(size))
    value = info.tensor(index)
    wanted = [1] * len(rows)
    wanted[dim] = rows[dim]
    if value is None or value.dtype not in INDICES:
        return False
    if not same_shape((*[1] * (len(rows) - value.dim()), *value.shape), wanted):
        return False
    way = [index]
    while (call := call_of(index, *_POSITION_MOVES)) is not None:
        index = call.args["self"]
        way.append(index)
    made = call_of(index, *_ARANGES)
    numbers = info.tensor(index)
    if made is None or numbers is None or numbers.dtype not in INDICES:
        return False
    # A view of fewer numbers than rows repeats them.
    is_whole = same_shape(numbers.shape, (rows[dim],))
    starts = (made.args.get("start", 0), made.args.get("step", 1)) == (0, 1)
    return is_whole and starts and not _written(info, way, index, reader)


_ARANGES = aten.arange.default, aten.arange.start, aten.arange.start_step
_POSITION_MOVES = named(
    "unsqueeze.default view.default reshape.default to.dtype alias.default expand.default "
    "contiguous.default clone.default"
)


@dataclass(frozen=True)
class OneHot:
    """A one-hot target with the value `base + peak` at the class `index`, and `base` at all other
    classes."""

    index: Node
    base: float
    peak: float
    nodes: tuple[Node, ...]  # the nodes that compute the one-hot tensor

    def times(self, factor: float, node: Node) -> OneHot:
        return replace(
            self, base=self.base * factor, peak=self.peak * factor, nodes=(*self.nodes, node)
        )

    def plus(self, number: float, node: Node) -> OneHot:
        return replace(self, base=self.base + number, nodes=(*self.nodes, node))


def read_one_hot(info: GraphInfo, node: Node, reader: Node) -> OneHot | None:
    """Return `node` as a one-hot tensor, if `reader` is the only node that reads it."""
    found = _one_hot(info, node, reader)
    if found is None or not all(
        user in found.nodes or user is reader for each in found.nodes for user in each.users
    ):
        return None
    first = min(found.nodes, key=info.positions.__getitem__)
    return None if _written(info, (found.index,), first, reader) else found


def _one_hot(info: GraphInfo, node: Node, reader: Node) -> OneHot | None:
    value = info.tensor(node)
    if value is None or value.dim() == 0:
        return None
    if (writes := _writes_of(info, node, reader)) is not None:
        return _written_one_hot(info, writes)
    if node_name(node) == "one_hot" and node.args and isinstance(node.args[0], Node):
        index = node.args[0]
        is_known = same_shape((*info.value(index).shape, value.shape[-1]), value.shape)
        return OneHot(index, 0.0, 1.0, (node,)) if is_known else None
    call = read_one(node)
    if call is None:
        return None
    a = call.args
    if call.op is aten.scatter.value:
        base = _constant(a["self"])
        return None if base is None else _scattered(info, node, a, base, (a["self"], node))
    inner = a.get("self")
    if call.op is aten.alias.default and isinstance(inner, Node):
        found = _one_hot(info, inner, node)
        return found and replace(found, nodes=(*found.nodes, node))
    found = _one_hot(info, inner, node) if isinstance(inner, Node) else None
    if found is None:
        return None
    other = a.get("other")
    number = float(other) if isinstance(other, (int, float)) else None
    if call.op is aten.to.dtype:
        is_exact = value.is_floating_point() or not info.value(inner).is_floating_point()
        is_exact = is_exact and value.dtype != torch.bool
        return replace(found, nodes=(*found.nodes, node)) if is_exact else None
    if call.op is aten.neg.default:
        return found.times(-1.0, node)
    if number is None or not (value.is_floating_point() or call.op in _WHOLE):
        return None
    if call.op in (aten.mul.Tensor, aten.mul.Scalar):
        return found.times(number, node)
    if call.op in (aten.div.Tensor, aten.div.Scalar):
        return found.times(1.0 / number, node) if number else None
    if call.op in (aten.add.Tensor, aten.add.Scalar) and a["alpha"] == 1:
        return found.plus(number, node)
    if call.op in (aten.sub.Tensor, aten.sub.Scalar) and a["alpha"] == 1:
        return found.plus(-number, node)
    if call.op is aten.rsub.Scalar and a["alpha"] == 1:
        return found.times(-1.0, node).plus(number, node)
    return None


# Integer operands give integer results here.
_WHOLE = named("mul.Tensor mul.Scalar add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar")


def _constant(node: Any) -> float | None:
    """Return the number with which a node fills a new tensor, or None for other nodes."""
    name = node_name(node) if isinstance(node, Node) else ""
    if name in _FILLED:
        return _FILLED[name]
    if name not in ("full", "full_like", "new_full"):
        return None
    place = 2 if name == "new_full" else 1
    number = node.args[place] if len(node.args) > place else node.kwargs.get("fill_value")
    return float(number) if isinstance(number, (int, float)) else None


_FILLED = dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0.0)
_FILLED |= dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0)


def _scattered(
    info: GraphInfo, node: Node, a: Any, base: float, nodes: tuple[Node, ...]
) -> OneHot | None:
    """Recognize a scatter that writes one number per row at the row's target."""
    value, index, number = info.tensor(node), a["index"], a["value"]
    places = info.tensor(index)
    if value is None or places is None or not isinstance(number, (int, float)):
        return None
    if not value.is_floating_point() and not (base.is_integer() and float(number).is_integer()):
        return None
    if a["dim"] % value.dim() != value.dim() - 1:
        return None
    if not same_shape(places.shape, (*value.shape[:-1], 1)):
        return None
    return OneHot(index, base, float(number) - base, nodes)


def _writes_of(info: GraphInfo, node: Node, reader: Node) -> list[Node] | None:
    """Return the node that creates the tensor of `node`, and all writes to this tensor before
    `reader`.

    If the graph does not write to the tensor before `reader`, return None."""
    nodes = [node]
    while nodes[0].op == "call_method" and str(nodes[0].target) in ("fill_", "scatter_", "zero_"):
        given = nodes[0].args[0]
        if not isinstance(given, Node):
            return None
        nodes.insert(0, given)
    last = info.positions[reader]
    writers = [
        write.node
        for write in info.writes
        if write.position <= last and info.may_write(write, nodes[:1])
    ]
    if not writers:
        return None
    return [nodes[0], *writers] if all(each in writers for each in nodes[1:]) else []


def _written_one_hot(info: GraphInfo, nodes: Sequence[Node]) -> OneHot | None:
    """Recognize a one-hot tensor that the graph fills and then writes at the targets.

    The graph fills a new tensor with one number, and then writes another number at the targets."""
    if not nodes:
        return None
    made, *writers = nodes
    # A tensor made without reading values (`empty_like`) has none until it is filled.
    base, found = _constant(made), None
    for writer in writers:
        if writer.op != "call_method" or writer.args[0] not in nodes or found is not None:
            return None
        name, args = str(writer.target), writer.args
        if name == "zero_" and len(args) == 1 and not writer.kwargs:
            base = 0.0
        elif name == "fill_" and len(args) == 2 and isinstance(args[1], (int, float)):
            base = float(args[1])
        elif name == "scatter_" and base is not None and _is_plain_scatter(writer):
            names = ("dim", "index", "value")
            a = {**dict(zip(names, args[1:], strict=False)), **writer.kwargs}
            found = _scattered(info, made, a, base, tuple(nodes))
            if found is None:
                return None
        else:
            return None
    return found


def _is_plain_scatter(node: Node) -> bool:
    given = {*("dim", "index", "value")[: len(node.args) - 1], *node.kwargs}
    return given == {"dim", "index", "value"} and len(node.args) <= 4


def _written(info: GraphInfo, nodes: Sequence[Node], first: Node, last: Node) -> bool:
    """Return whether any node between two given nodes may write to the memory of `nodes`."""
    return info.written_between(nodes, first, last) is not None
