"""Reads probabilities and log-probabilities back to the logits they come from.

    logits -> log_softmax | x - logsumexp(x) | log(softmax) -> {view, slice, cast, detach}*
    logits -> softmax | exp(log-probabilities)              -> {view, slice, cast, detach}*
    logits -> logsumexp | log(sum(exp(x))), where x may be the logits minus their maximum

Row moves behind a softmax give what the same moves before it give, so they join the chain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ..graph.base import Decline
from ..graph.canonical import Call, aten, back_over, call_of, named, read_one
from ..graph.graph_info import GraphInfo, node_name, same_shape
from .head import Chain, HeadReader

_MAX_LINKS = 24
# What may stand behind a softmax: its values stay the same numbers, in another order.
_TRANSPARENT = ("rows", "reshape", "same", "move", "detach", "to")


@dataclass(frozen=True)
class Soft:
    """Probabilities or their logarithms: the logits, moved alike, and the nodes on the way."""

    chain: Chain
    through: tuple[Node, ...]


@dataclass(frozen=True)
class Total:
    """A log-sum-exp over the classes, less ``shift``: the maximum that was taken off the logits."""

    chain: Chain
    shift: Node | None
    keepdim: bool
    through: tuple[Node, ...]


class SoftmaxReader:
    """Reads one graph; asks `HeadReader` only where a softmax was found, since that may trace."""

    def __init__(self, info: GraphInfo, reader: HeadReader) -> None:
        self.info, self.reader = info, reader

    def log_probs(self, node: Any) -> Soft | Decline | None:
        """Read log-probabilities over the classes: None if none, a Decline of what no head made."""
        return self._read(node, self._start_of_log_probs)

    def probs(self, node: Any) -> Soft | None:
        """Read probabilities over the class dimension; None when ``node`` is none."""
        soft = self._read(node, self._start_of_probs)
        return soft if isinstance(soft, Soft) else None

    def _read(
        self, node: Any, start: Callable[[Node], Soft | Decline | None]
    ) -> Soft | Decline | None:
        """Walk up over what only moves rows to the node in which ``start`` reads a softmax."""
        links: list[Node] = []
        while isinstance(node, Node) and len(links) < _MAX_LINKS:
            found = start(node)
            if found is not None:
                return self._moved(found, links) if isinstance(found, Soft) else found
            onward = self._same_values(node) or self.reader.row_operand(node)
            if onward is None:
                return None
            links.append(node)
            node = onward
        return None

    def _moved(self, soft: Soft, links: Sequence[Node]) -> Soft | None:
        moves = [link for link in reversed(links) if self._same_values(link) is None]
        chain = self.reader.extend(soft.chain, moves, _TRANSPARENT)
        if isinstance(chain, Decline):
            return None
        joined = [link.args[0] for link in links if broadcast_operand(link) is not None]
        opened = [node for node in joined if isinstance(node, Node)]
        return Soft(chain, (*soft.through, *reversed(links), *opened))

    def _start_of_log_probs(self, node: Node) -> Soft | Decline | None:
        call = read_one(node)
        if call is None:
            return None
        if call.op is aten.log_softmax.int and self._keeps_precision(call):
            return self._over(call.args["self"], call.args["dim"], (node,))
        if call.op is aten.log.default:
            return _with(self.probs(call.args["self"]), node)
        is_difference = call.op is aten.sub.Tensor and call.args["alpha"] == 1
        other: Any = call.args["other"] if is_difference else None
        plain = call_of(other, aten.logsumexp.default)
        if plain is not None and plain.args["keepdim"] and plain.args["self"] is call.args["self"]:
            return self._over(call.args["self"], plain.args["dim"], (other, node))
        total = self.total(other)
        if total is None or not total.keepdim:
            return None
        logits, shift, way = self._shifted(call.args["self"])
        if logits is not total.chain.node or shift is not total.shift:
            return None
        return Soft(total.chain, (*total.through, *way, other, node))

    def total(self, node: Any) -> Total | None:
        """Read a log-sum-exp over the classes, written with its maximum taken off or without."""
        call = call_of(node, aten.log.default, aten.add.Tensor, aten.logsumexp.default)
        if call is None:
            return None
        if call.op is aten.add.Tensor:
            pairs = (call.args["self"], call.args["other"]), (call.args["other"], call.args["self"])
            for inner, other in pairs:
                if call.args["alpha"] != 1 or call_of(inner, aten.add.Tensor) is not None:
                    continue
                found, (peak, way) = self.total(inner), self._peak(other)
                if found is not None and found.shift is not None and found.shift is peak:
                    return replace(found, shift=None, through=(*found.through, inner, *way))
            return None
        source, way = call.args["self"], ()
        if call.op is aten.log.default:
            added = call_of(source, aten.sum.dim_IntList)
            powers = None if added is None else call_of(added.args["self"], aten.exp.default)
            if added is None or powers is None or not self._keeps_precision(added):
                return None
            dims, keepdim = added.args["dim"], added.args["keepdim"]
            way, source = (added.args["self"], source), powers.args["self"]
        else:
            given, keepdim = call.args["dim"], call.args["keepdim"]
            dims = given if isinstance(given, (list, tuple)) else [given]
        logits, shift, before = self._shifted(source)
        chain, value = self.reader.chain(logits), self.info.tensor(logits)
        if isinstance(chain, Decline) or value is None or value.dim() == 0 or not dims:
            return None
        if len(dims) != 1 or dims[0] % value.dim() != class_position(chain, value.dim()):
            return None
        return Total(chain, shift, keepdim, (*before, *way))

    def _shifted(self, node: Any) -> tuple[Any, Node | None, tuple[Node, ...]]:
        """Return the logits of which ``node`` is the rest after their maximum was taken off, the
        maximum, and the nodes in between; or the node itself.
        """
        call = call_of(node, aten.sub.Tensor)
        if call is None or call.args["alpha"] != 1:
            return node, None, ()
        logits = call.args["self"]
        peak, way = self._peak(call.args["other"])
        before, after = self.info.tensor(logits), self.info.tensor(node)
        if peak is None or before is None or after is None:
            return node, None, ()
        source = back_over(_of_maximum(peak), (aten.detach.default,))
        if source is not logits or not same_shape(before.shape, after.shape):
            return node, None, ()
        return logits, peak, (*way, node)

    def _peak(self, node: Any) -> tuple[Node | None, tuple[Node, ...]]:
        """Return the maximum over the last dimension that ``node`` holds, and the nodes on the way.

        What is taken off all logits of a row is added again, so its value does not matter.
        """
        way: list[Node] = []
        while (call := call_of(node, *_PEAK_MOVES)) is not None:
            way.append(node)
            node = call.args["self"]
        source = _of_maximum(node)
        value = self.info.tensor(source)
        if source is None or value is None:
            return None, ()
        pair = node.args[0] if node.target is operator.getitem else None
        others = [pair] if isinstance(pair, Node) else []
        detached: list[Node] = []
        back_over(source, (aten.detach.default,), detached)
        return node, (*way, node, *others, *detached)

    def _start_of_probs(self, node: Node) -> Soft | Decline | None:
        call = call_of(node, aten.softmax.int, aten.exp.default)
        if call is not None and call.op is aten.exp.default:
            return _with(self.log_probs(call.args["self"]), node)
        if call is None or not self._keeps_precision(call):
            return None
        return self._over(call.args["self"], call.args["dim"], (node,))

    def _over(self, logits: Node, dim: Any, through: tuple[Node, ...]) -> Soft | Decline | None:
        """Read a softmax of ``logits``, which may be log-probabilities themselves."""
        chain = self.reader.chain(logits)
        if isinstance(chain, Decline):
            inner = self.log_probs(logits)
            if not isinstance(inner, Soft):
                return chain
            chain, through = inner.chain, (*inner.through, *through)
        value = self.info.tensor(logits)
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        if value is None or len(dims) != 1:
            return None
        rank = max(value.dim(), 1)
        return Soft(chain, through) if dims[0] % rank == class_position(chain, rank) else None

    def _keeps_precision(self, call: Call) -> bool:
        value, dtype = self.info.tensor(call.args["self"]), call.args["dtype"]
        return value is not None and (dtype is None or dtype.itemsize >= value.dtype.itemsize)

    def _same_values(self, node: Node) -> Node | None:
        """Return x behind ``x.clamp(min=finfo.min)`` and behind a broadcast to x's own shape."""
        operand = broadcast_operand(node)
        if operand is not None:
            before, after = self.info.tensor(operand), self.info.tensor(node)
            if before is None or after is None or not same_shape(before.shape, after.shape):
                return None
            return operand
        call, value = call_of(node, aten.clamp.default), self.info.tensor(node)
        if call is None or value is None or not value.dtype.is_floating_point:
            return None
        is_whole = call.args["max"] is None and call.args["min"] == torch.finfo(value.dtype).min
        return call.args["self"] if is_whole else None


_PEAK_MOVES = named("detach.default squeeze.dim unsqueeze.default alias.default")


def _of_maximum(node: Any) -> Any:
    """Return the tensor over whose last dimension ``node`` is the maximum, else None."""
    call, is_values = call_of(node, aten.amax.default), True
    if call is None and isinstance(node, Node) and node.target is operator.getitem:
        pair, index = node.args
        call, is_values = call_of(pair, aten.max.dim), index == 0
    if call is None or not is_values:
        return None
    dims = call.args["dim"] if isinstance(call.args["dim"], (list, tuple)) else [call.args["dim"]]
    value: Any = compat.example_value(call.args["self"])
    return call.args["self"] if list(dims) in ([-1], [value.dim() - 1]) else None


def is_shift(node: Node) -> bool:
    """Return whether a node serves only to take a maximum off the logits: its gradient cancels."""
    if call_of(node, aten.detach.default) is not None and node.users:
        users = (call_of(user, aten.amax.default, aten.max.dim) for user in node.users)
        if all(user is not None for user in users):
            return True
    return _of_maximum(back_over(node, _PEAK_MOVES)) is not None


def _with(soft: Soft | Decline | None, node: Node) -> Soft | None:
    return Soft(soft.chain, (*soft.through, node)) if isinstance(soft, Soft) else None


def broadcast_operand(node: Node) -> Node | None:
    """Return what ``broadcast_tensors(..)[i]`` is the broadcast of."""
    joined, index = node.args if node.target is operator.getitem else (None, None)
    if not isinstance(joined, Node) or not isinstance(index, int):
        return None
    if node_name(joined) != "broadcast_tensors" or joined.kwargs:
        return None
    first = joined.args[0] if len(joined.args) == 1 else None
    operands = first if isinstance(first, (list, tuple)) else joined.args
    operand = operands[index] if -len(operands) <= index < len(operands) else None
    return operand if isinstance(operand, Node) else None


def class_position(chain: Chain, rank: int) -> int:
    """Return the dimension in which a chain's result of this rank has its classes."""
    return 1 if chain.moved and rank > 1 else max(rank, 1) - 1
