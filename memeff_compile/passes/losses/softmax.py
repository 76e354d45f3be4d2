"""Trace probabilities and log-probabilities back to the logits from which they are computed.

The module recognizes these results of logits x:

- Log-probabilities: `log_softmax(x)`, `x - logsumexp(x)` or `log(softmax(x))`.
- Probabilities: `softmax(x)`, or `exp` of log-probabilities.
- Log-sum-exps: `logsumexp(x)` or `log(sum(exp(x)))`, also of logits minus their maximum.

Views, slices, casts and detaches may follow the probabilities or log-probabilities.

Reordering or selecting rows gives the same result before and after a softmax. So such row moves
after the softmax count as steps that are applied to the logits.
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
# Ops that may follow a softmax: they keep its values and change their order only.
_TRANSPARENT = ("rows", "reshape", "same", "move", "detach", "to")


@dataclass(frozen=True)
class Soft:
    """Probabilities or log-probabilities that the graph computes from logits.

    A `Soft` contains the nodes from the logits to the probabilities, and the `Chain` of the logits
    (output projection and later steps). The chain also includes the row moves (reorderings and
    selections of rows) that the graph applies to the probabilities.
    """

    chain: Chain
    through: tuple[Node, ...]
    sign: int = 1  # -1 for negative log-probabilities, if the caller accepts them


@dataclass(frozen=True)
class Peak:
    """The maximum of each row's logits, which the graph subtracts from the logits or adds again.

    If the maximum is subtracted and later added again, its value does not matter, and the gradients
    of subtraction and addition cancel.
    """

    logits: Node
    node: Node  # the node that computes the maximum
    trains: bool
    dim: int  # dimension of the logits over which the maximum is computed
    through: tuple[Node, ...]

    def is_over(self, dim: Any) -> bool:
        """Return whether this maximum is over the dimension `dim`, over which a softmax is
        computed."""
        rank = compat.example_value(self.logits).dim()
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        return len(dims) == 1 and dims[0] % rank == self.dim

    def is_that_of(self, other: Peak | None) -> bool:
        """Return whether `other` is the same maximum of the logits, so that the two cancel.

        For example, a maximum m of logits x cancels in `(x - m) - logsumexp(x - m)`. The gradients
        cancel only if both maxima require a gradient, or neither does.
        """
        return other is not None and (self.node, self.trains) == (other.node, other.trains)


@dataclass(frozen=True)
class Total:
    """A log-sum-exp of logits over the classes; if the graph subtracted the maximum from the logits
    first, this log-sum-exp is smaller by the maximum.
    """

    chain: Chain
    peak: Peak | None
    keepdim: bool
    through: tuple[Node, ...]


class SoftmaxReader:
    """Finds the softmaxes in one graph.

    The class uses `HeadReader` to find the output projection before a softmax. `HeadReader` may run
    nodes on fake tensors, which is slow. So the class looks for a softmax first.
    """

    def __init__(self, info: GraphInfo, reader: HeadReader) -> None:
        self.info, self.reader = info, reader

    def log_probs(self, node: Any) -> Soft | Decline | None:
        """If a node computes log-probabilities over the classes, return them as a `Soft`.

        The `Soft` contains the nodes from the output projection to the log-probabilities. For other
        nodes, return None. If the log-probabilities come from no output projection, return a
        Decline (the reason).
        """
        return self._read(node, self._start_of_log_probs)

    def signed_log_probs(self, node: Any) -> Soft | Decline | None:
        """If a node computes log-probabilities, negated or not, return them as a `Soft`.

        The `Soft` contains the nodes from the output projection to the log-probabilities. Nodes
        that reorder, select or regroup rows may come before or after the negation."""
        return self._read(node, self._start_of_log_probs, signed=True)

    def probs(self, node: Any) -> Soft | None:
        """If a node computes probabilities over the classes, return them as a `Soft`.

        The `Soft` contains the nodes from the output projection to the probabilities. For other
        nodes, return None."""
        soft = self._read(node, self._start_of_probs)
        return soft if isinstance(soft, Soft) else None

    def _read(
        self,
        node: Any,
        start: Callable[[Node], Soft | Decline | None],
        *,
        signed: bool = False,
    ) -> Soft | Decline | None:
        """Return the probabilities or log-probabilities in `node` as a `Soft`.

        The function `start` recognizes the node that computes the probabilities or
        log-probabilities. The nodes from there to `node` may only move, cast or detach values. With
        `signed`, they may also negate the values. If `start` returns a Decline (the reason for no
        rewrite), return it. For other nodes, return None.
        """
        links, signs = list[Node](), list[Node]()
        while isinstance(node, Node) and len(links) < _MAX_LINKS:
            found = start(node)
            if found is not None:
                return self._moved(found, links, signs) if isinstance(found, Soft) else found
            onward = self._same_values(node) or self.reader.row_operand(node)
            if onward is None and signed and (onward := negated(node)) is not None:
                signs.append(node)
            if onward is None:
                return None
            links.append(node)
            node = onward
        return None

    def _moved(self, soft: Soft, links: Sequence[Node], signs: Sequence[Node]) -> Soft | None:
        still = [link for link in links if link in signs or self._same_values(link) is not None]
        moves = [link for link in reversed(links) if link not in still]
        chain = self.reader.extend(soft.chain, moves, _TRANSPARENT)
        if isinstance(chain, Decline):
            return None
        joined = [link.args[0] for link in links if broadcast_operand(link) is not None]
        opened = [node for node in joined if isinstance(node, Node)]
        sign = -soft.sign if len(signs) % 2 else soft.sign
        return Soft(chain, (*soft.through, *reversed(links), *opened), sign)

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
        peak = self.peak_taken_off(call.args["self"])
        logits = call.args["self"] if peak is None else peak.logits
        is_alike = total.peak is peak is None or (peak is not None and peak.is_that_of(total.peak))
        if logits is not total.chain.node or not is_alike:
            return None
        way = () if peak is None else (*peak.through, call.args["self"])
        return Soft(total.chain, (*total.through, *way, other, node))

    def total(self, node: Any) -> Total | None:
        """If a node computes a log-sum-exp over the classes, with or without subtracting the
        maximum, return it as a `Total`."""
        call = call_of(node, *_TOTALS)
        if call is None:
            return None
        if call.op is aten.squeeze.dim:
            inner, value = self.total(call.args["self"]), self.info.tensor(call.args["self"])
            if inner is None or value is None or not inner.keepdim:
                return None
            if call.args["dim"] % value.dim() != class_position(inner.chain, value.dim()):
                return None
            return replace(inner, keepdim=False, through=(*inner.through, call.args["self"]))
        if call.op is aten.add.Tensor:
            return self._peak_added(call)
        source, way = call.args["self"], tuple[Node, ...]()
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
        peak = self.peak_taken_off(source)
        logits = source if peak is None else peak.logits
        chain, value = self.reader.chain(logits), self.info.tensor(logits)
        if isinstance(chain, Decline) or value is None or value.dim() == 0 or not dims:
            return None
        position = class_position(chain, value.dim())
        if len(dims) != 1 or dims[0] % value.dim() != position:
            return None
        if peak is not None and peak.dim != position:
            return None
        before = () if peak is None else (*peak.through, source)
        return Total(chain, peak, keepdim, (*before, *way))

    def _peak_added(self, call: Call) -> Total | None:
        """Recognize a log-sum-exp to which the graph adds the maximum that it had subtracted."""
        pairs = (call.args["self"], call.args["other"]), (call.args["other"], call.args["self"])
        for inner, other in pairs if call.args["alpha"] == 1 else ():
            left, right = self.info.tensor(inner), self.info.tensor(other)
            if call_of(inner, aten.add.Tensor) is not None or left is None or right is None:
                continue
            peak = self._peak(other) if same_shape(left.shape, right.shape) else None
            found = None if peak is None else self.total(inner)
            if found is not None and peak is not None and peak.is_that_of(found.peak):
                way = (*found.through, inner, *peak.through)
                return replace(found, peak=None, through=way)
        return None

    def peak_taken_off(self, node: Any) -> Peak | None:
        """Return the maximum that the graph subtracted from the logits, if `node` is the
        difference."""
        call = call_of(node, aten.sub.Tensor)
        if call is None or call.args["alpha"] != 1:
            return None
        logits, peak = call.args["self"], self._peak(call.args["other"])
        value, taken = self.info.tensor(logits), self.info.tensor(call.args["other"])
        if peak is None or value is None or taken is None or peak.logits is not logits:
            return None
        wanted = [1 if dim == peak.dim else size for dim, size in enumerate(value.shape)]
        return peak if same_shape(taken.shape, wanted) else None

    def _peak(self, node: Any) -> Peak | None:
        """Recognize a maximum over one dimension of the logits; the result includes the nodes
        between the logits and the maximum."""
        value, way = self.info.tensor(node), list[Node]()
        while (call := call_of(node, *_PEAK_MOVES)) is not None:
            way.append(node)
            node = call.args["self"]
        source, dim = _of_maximum(node)
        if source is None or value is None:
            return None
        pair = node.args[0] if node.target is operator.getitem else None
        others = [pair, *(u for u in pair.users if not u.users)] if isinstance(pair, Node) else []
        detached: list[Node] = []
        logits = back_over(source, (aten.detach.default,), detached)
        through = (*way, node, *others, *detached)
        return Peak(logits, node, value.requires_grad, dim, through)

    def _start_of_probs(self, node: Node) -> Soft | Decline | None:
        call = call_of(node, aten.softmax.int, aten.exp.default, aten.div.Tensor)
        if call is not None and call.op is aten.exp.default:
            return _with(self.log_probs(call.args["self"]), node)
        if call is not None and call.op is aten.div.Tensor:
            return self._share(node, call)
        if call is None or not self._keeps_precision(call):
            return None
        return self._over(call.args["self"], call.args["dim"], (node,))

    def _share(self, node: Node, call: Call) -> Soft | None:
        """Recognize `e / e.sum(-1, keepdim=True)` of `e = exp(logits)`, in which the maximum
        may be subtracted from the logits.
        """
        powers, added = call.args["self"], call_of(call.args["other"], aten.sum.dim_IntList)
        raised = call_of(powers, aten.exp.default)
        if added is None or raised is None or added.args["self"] is not powers:
            return None
        if not added.args["keepdim"] or not self._keeps_precision(added):
            return None
        way = (powers, call.args["other"], node)
        found = self._over(raised.args["self"], added.args["dim"], way)
        return found if isinstance(found, Soft) else None

    def _over(self, logits: Node, dim: Any, through: tuple[Node, ...]) -> Soft | Decline | None:
        """Recognize a softmax of `logits`, which may themselves be log-probabilities."""
        peak = self.peak_taken_off(logits)
        if peak is not None and peak.is_over(dim):
            logits, through = peak.logits, (*peak.through, logits, *through)
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
        """Return x if a node broadcasts its input x to the shape that x already has."""
        operand = broadcast_operand(node)
        if operand is None:
            return None
        before, after = self.info.tensor(operand), self.info.tensor(node)
        if before is None or after is None or not same_shape(before.shape, after.shape):
            return None
        return operand

    def finite(self, node: Any) -> Any:
        """Return x if a node is `x.clamp(min=finfo.min)`, which changes -inf only; otherwise return
        the node.
        """
        call, value = call_of(node, aten.clamp.default), self.info.tensor(node)
        if call is None or value is None or not value.dtype.is_floating_point:
            return node
        is_whole = call.args["max"] is None and call.args["min"] == torch.finfo(value.dtype).min
        return call.args["self"] if is_whole else node


_PEAK_MOVES = named("detach.default squeeze.dim unsqueeze.default alias.default")
_TOTALS = named("log.default add.Tensor logsumexp.default squeeze.dim")


def negated(node: Node) -> Node | None:
    """Return the tensor of which `node` is the negative."""
    call = call_of(node, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar)
    if call is None or (call.op is not aten.neg.default and call.args["other"] not in (-1, -1.0)):
        return None
    source: Node = call.args["self"]
    return source


def _of_maximum(node: Any) -> tuple[Any, int]:
    """Return the tensor of which `node` is the maximum over one dimension, and that dimension.

    Return None as the tensor if `node` is not such a maximum.
    """
    call = call_of(node, aten.amax.default)
    is_values = True
    if call is None and isinstance(node, Node) and node.target is operator.getitem:
        pair, index = node.args
        call, is_values = call_of(pair, aten.max.dim), bool(index == 0)
    if call is None or not is_values:
        return None, 0
    dims = call.args["dim"] if isinstance(call.args["dim"], (list, tuple)) else [call.args["dim"]]
    rank = compat.example_value(call.args["self"]).dim()
    return (call.args["self"], dims[0] % rank) if len(dims) == 1 and rank else (None, 0)


def is_shift(node: Node) -> bool:
    """Return whether a node is used only for the row maximum that a numerically stable softmax
    subtracts.

    The maximum does not change the softmax, so its gradient may be omitted.
    """
    if call_of(node, aten.detach.default) is not None and node.users:
        users = (call_of(user, aten.amax.default, aten.max.dim) for user in node.users)
        if all(user is not None for user in users):
            return True
    return _of_maximum(back_over(node, _PEAK_MOVES))[0] is not None


def _with(soft: Soft | Decline | None, node: Node) -> Soft | None:
    return Soft(soft.chain, (*soft.through, node)) if isinstance(soft, Soft) else None


def broadcast_operand(node: Node) -> Node | None:
    """Return the operand that `broadcast_tensors(..)[i]` broadcasts."""
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
    """Return the position of the class dimension in logits with `rank` dimensions.

    `chain` has the output projection that computes the logits, and the nodes that follow it. One of
    these nodes may move the classes from the last dimension to position 1."""
    return 1 if chain.moved and rank > 1 else max(rank, 1) - 1
