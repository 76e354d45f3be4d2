"""Reads probabilities and log-probabilities back to the logits they come from.

    logits -> log_softmax | x - logsumexp(x) | log(softmax) -> {view, slice, cast, detach}*
    logits -> softmax | exp(log-probabilities)              -> {view, slice, cast, detach}*

Row moves behind a softmax give what the same moves before it give, so they join the chain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph.base import Decline
from ..graph.canonical import Call, aten, call_of, read_one
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
        total = call_of(other, aten.logsumexp.default)
        if total is None or not total.args["keepdim"]:
            return None
        is_own = total.args["self"] is call.args["self"]
        return self._over(call.args["self"], total.args["dim"], (other, node)) if is_own else None

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
