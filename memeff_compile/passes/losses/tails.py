"""Finds what reads logits: losses, gathered log-probabilities, log-sum-exps, metrics.

A *tail* is one consumer of logits that memeff::linear_cross_entropy can serve; a *site* is a head
and all its tails. What looks like a loss and cannot be read is a Decline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from ... import compat
from ...compat import OpOverload
from ...logits.recipe import Modifiers
from ..graph.base import Decline
from ..graph.canonical import aten, call_of, read_one
from ..graph.graph_info import GraphInfo, node_name, same_shape
from .head import Chain, Head, HeadReader, fold
from .outputs import LogitsOutput, is_deferrable, returned_logits
from .softmax import Soft, SoftmaxReader, broadcast_operand, class_position


@dataclass(frozen=True)
class Tail:
    """One consumer of logits that the op can serve.

    kind is, with a target, ``loss`` (cross_entropy or nll_loss), ``log_prob`` (gather on
    log-probabilities) or ``logit`` (gather on the logits themselves); without one, ``lse``
    (logsumexp), ``top`` (argmax), ``entropy``, ``neg_entropy`` (the sum of p log p) or
    ``mean_logit`` (the sum of p times the logits).
    """

    node: Node
    kind: str
    chain: Chain
    target: Node | None = None
    class_weight: Node | None = None
    reduction: int = 0
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    through: tuple[Node, ...] = ()  # the nodes between the chain and this one
    symbols: tuple[Node, ...] = ()  # settings that dynamic=True made symbols of
    keepdim: bool = False  # a statistic without a target keeps the class dimension, of size 1
    factors: tuple[Node, ...] = ()  # what an entropy multiplies
    wraps: bool = False  # targets count modulo the classes, as in take_along_dim

    @property
    def operands(self) -> tuple[Node, ...]:
        """The tensors the loss reads beside the logits."""
        return tuple(n for n in (self.target, self.class_weight) if n is not None)

    @property
    def name(self) -> str:
        """What a reader calls it."""
        if self.kind in ENTROPIES:
            return "entropy"
        return "argmax" if self.kind == "top" else node_name(self.node)


STATISTICS = ("lse", "top", "entropy", "neg_entropy", "mean_logit")
ENTROPIES = ("entropy", "neg_entropy", "mean_logit")
METRICS = ("top", *ENTROPIES)
# What makes a site worth a rewrite; an argmax alone does not.
LOSSES = ("loss", "log_prob", "entropy", "neg_entropy")


def is_silent(info: GraphInfo, tail: Tail) -> bool:
    """Return whether no gradient flows back through ``tail``: detached, under no_grad, an index."""
    value = info.tensor(tail.node)
    return value is None or not value.requires_grad


@dataclass
class Site:
    """A head, its tails, and the outputs that return its logits."""

    head: Head
    tails: list[Tail]
    outputs: list[LogitsOutput] = field(default_factory=list)
    covered: list[Node] = field(default_factory=list)


_TAIL_NAMES = frozenset(
    "cross_entropy cross_entropy_loss nll_loss nll_loss_nd gather take_along_dim logsumexp "
    "linear_cross_entropy argmax getitem sum".split()
)


class TailReader:
    """Reads what nodes of one graph take from logits."""

    def __init__(self, info: GraphInfo, reader: HeadReader) -> None:
        self.info, self.reader = info, reader
        self.softmax = SoftmaxReader(info, reader)

    def tails(self, node: Node) -> Iterable[Tail | Decline]:
        """Yield what ``node`` reads from logits, or why it cannot be served."""
        name = node_name(node)
        if node.op not in ("call_function", "call_method") or name not in _TAIL_NAMES:
            return
        if name == "getitem":
            yield from self._chosen(node)
        elif (call := read_one(node)) is not None:
            read = _READERS.get(call.op)
            yield from () if read is None else read(self, node, call.args)
        elif "cross_entropy" in name or "nll_loss" in name:
            said = f"`{name}` is called with arguments this pass does not read"
            yield Decline("unreadable_loss", said, node=node)

    def _lse(self, node: Node, a: Any) -> Iterable[Tail]:
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        value = self.info.tensor(a["self"])
        if value is None or len(dims) != 1 or dims[0] % value.dim() != value.dim() - 1:
            return
        chain = self.reader.chain(a["self"])
        if isinstance(chain, Chain) and not chain.moved:
            yield Tail(node, "lse", chain, keepdim=a["keepdim"])

    def _cross_entropy(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        return self._loss(node, self.reader.chain(a["self"]), a, a["label_smoothing"])

    def _nll(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        soft = self.softmax.log_probs(a["self"])
        if isinstance(soft, Decline):
            yield replace(soft, node=node)
        elif soft is not None:
            yield from self._loss(node, soft.chain, a, 0.0, soft.through)
        elif a["self"].op != "placeholder":
            said = "nll_loss does not read a log_softmax over its classes"
            hint = "use cross_entropy, or take log_softmax of the logits over their classes"
            yield Decline("not_log_softmax", said, hint, node)

    def _loss(
        self,
        node: Node,
        chain: Chain | Decline,
        a: Any,
        label_smoothing: Any,
        through: tuple[Node, ...] = (),
    ) -> Iterable[Tail | Decline]:
        target = self.info.tensor(a["target"])
        if target is None or target.dtype.is_floating_point:
            said = "the targets are class probabilities, not class indices"
            hint = "pass integer class indices to use the fused loss"
            yield Decline("prob_targets", said, hint, node)
            return
        if isinstance(chain, Decline):
            yield replace(chain, node=node)
            return
        settings = (a["reduction"], a["ignore_index"], label_smoothing)
        reduction, ignore_index, smoothing = map(compat.known_number, settings)
        if reduction is None or ignore_index is None or smoothing is None:
            said = f"`{node_name(node)}` gets an ignore_index or label_smoothing that varies from "
            hint = "give it a fixed number"
            yield Decline("setting_not_constant", f"{said}call to call", hint, node)
            return
        yield Tail(
            node,
            "loss",
            chain,
            target=a["target"],
            class_weight=a["weight"],
            reduction=int(reduction),
            ignore_index=int(ignore_index),
            label_smoothing=float(smoothing),
            through=through,
            symbols=tuple(s for s in settings if isinstance(s, Node)),
        )

    def _gather(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        source = a["self"]
        index, opened = _plain_index(self.info, a.get("index", a.get("indices")))
        value, index_value = self.info.tensor(source), self.info.tensor(index)
        if value is None or index_value is None or a["dim"] is None or value.dim() == 0:
            return
        if a["dim"] % value.dim() != value.dim() - 1 or index_value.dim() != value.dim():
            return
        if "indices" in a and compat.known_size(value.shape[-1]) is None:
            return
        if a.get("sparse_grad") or not compat.statically_true(index_value.shape[-1] == 1):
            return
        soft = self.softmax.log_probs(source)
        if isinstance(soft, Decline):
            yield replace(soft, node=node)
            return
        chain = self.reader.chain(source) if soft is None else soft.chain
        if isinstance(chain, Decline):
            if node_name(source) == "log_softmax":
                said = f"`{node_name(node)}` reads a log_softmax over another dimension than the "
                yield Decline("unknown_step", f"{said}classes", node=node)
            return
        has_same_rows = same_shape(index_value.shape[:-1], value.shape[:-1])
        if not has_same_rows and soft is not None:
            yield Decline(
                "rows_differ",
                "the gathered index may have fewer rows than the log-probabilities",
                "slice the hidden states to the rows that are gathered; sizes that are always "
                "equal but marked dynamic one by one are best marked by dynamic=True",
                node,
            )
        if has_same_rows:
            kind, through = ("logit", ()) if soft is None else ("log_prob", soft.through)
            wraps, through = "indices" in a, (*through, *opened)
            yield Tail(node, kind, chain, target=index, through=through, wraps=wraps)

    def _chosen(self, node: Node) -> Iterable[Tail]:
        """Read ``max(x, -1)[1]`` and ``topk(x, 1)[1]``, if nobody uses the values."""
        pair, index = node.args
        call = call_of(pair, aten.max.dim, aten.topk.default) if index in (1, -1) else None
        if call is None or not isinstance(pair, Node):
            return
        others = [user for user in pair.users if user.args[1:] != node.args[1:]]
        is_first = call.op is aten.max.dim or (call.args["k"] == 1 and call.args["largest"])
        if is_first and not any(user.users for user in others):
            yield from self._top(node, {"keepdim": True, **call.args}, (pair, *others))

    def _top(self, node: Node, a: Any, through: tuple[Node, ...] = ()) -> Iterable[Tail]:
        """Read an argmax over the classes of logits, or of their probabilities in any form."""
        source = a["self"]
        value = self.info.tensor(source)
        if value is None or value.dim() == 0 or not isinstance(a["dim"], int):
            return
        soft = self.softmax.probs(source) or self.softmax.log_probs(source)
        chain = soft.chain if isinstance(soft, Soft) else self.reader.chain(source)
        if isinstance(chain, Decline):
            return
        if a["dim"] % value.dim() == class_position(chain, value.dim()):
            before = soft.through if isinstance(soft, Soft) else ()
            yield Tail(node, "top", chain, through=(*before, *through), keepdim=a["keepdim"])

    def _entropy(self, node: Node, a: Any) -> Iterable[Tail]:
        """Read a sum over the classes of p log p, p times the logits, or entr(p)."""
        value, dims = self.info.tensor(a["self"]), a["dim"]
        if value is None or value.dim() == 0 or dims is None or len(dims) != 1:
            return
        if a["dtype"] is not None and a["dtype"].itemsize < value.dtype.itemsize:
            return
        term, sign, between = _unsigned(a["self"])
        call = call_of(term, aten.special_entr.default, aten.mul.Tensor)
        if call is None:
            return
        if call.op is aten.mul.Tensor:
            left, right = _unsigned(call.args["self"]), _unsigned(call.args["other"])
            factors: tuple[Node, ...] = (left[0], right[0])
            found = self._weighted(*factors)
            sign *= left[1] * right[1]
            between = (*between, *left[2], *right[2])
        else:
            factors = (call.args["self"],)
            probs = self.softmax.probs(*factors)
            found = None if probs is None else ("entropy", probs)
        if found is None:
            return
        kind, soft = found
        if dims[0] % value.dim() != class_position(soft.chain, value.dim()):
            return
        if sign < 0:
            kind = {"entropy": "neg_entropy", "neg_entropy": "entropy"}.get(kind, "")
        if kind:
            through = (*soft.through, term, *between)
            how = {"keepdim": a["keepdim"], "factors": factors}
            yield Tail(node, kind, soft.chain, through=through, **how)

    def _weighted(self, left: Any, right: Any) -> tuple[str, Soft] | None:
        """Read p times log p, or p times the logits, in either order."""
        for first, second in ((left, right), (right, left)):
            probs = self.softmax.probs(first)
            if probs is None:
                continue
            logs = self.softmax.log_probs(second)
            if isinstance(logs, Soft):
                if _same_logits(probs.chain, logs.chain):
                    return "neg_entropy", Soft(probs.chain, (*probs.through, *logs.through))
                return None
            chain = self.reader.chain(second) if isinstance(second, Node) else None
            if isinstance(chain, Chain) and _same_logits(probs.chain, chain):
                return "mean_logit", probs
        return None


_READERS: dict[OpOverload, Callable[[TailReader, Node, Any], Iterable[Tail | Decline]]] = {
    aten.cross_entropy_loss.default: TailReader._cross_entropy,
    aten.nll_loss_nd.default: TailReader._nll,
    aten.gather.default: TailReader._gather,
    aten.take_along_dim.default: TailReader._gather,
    aten.logsumexp.default: TailReader._lse,
    aten.argmax.default: TailReader._top,
    aten.sum.dim_IntList: TailReader._entropy,
}


def _plain_index(info: GraphInfo, index: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the index behind ``broadcast_tensors(index, logits)[0][..., :1]``, by which
    torch.distributions gathers log-probabilities, and what it was: the broadcast reads the logits.
    """
    if (call := call_of(index, aten.slice.Tensor)) is None:
        return index, ()
    broadcast: Node = call.args["self"]
    source = broadcast_operand(broadcast)
    if source is None:
        return index, ()
    before, after = info.tensor(source), info.tensor(index)
    if before is None or after is None or not same_shape(before.shape, after.shape):
        return index, ()
    joined: Any = broadcast.args[0]
    return source, (joined, broadcast, index)


def _unsigned(node: Any) -> tuple[Node, int, tuple[Node, ...]]:
    """Take minus signs off ``node``: what is below, their product, and the nodes they were."""
    sign, taken = 1, list[Node]()
    while (call := call_of(node, aten.neg.default, aten.mul.Tensor)) is not None:
        if call.op is aten.mul.Tensor and call.args["other"] not in (-1, -1.0):
            break
        taken.append(node)
        sign, node = -sign, call.args["self"]
    return node, sign, tuple(taken)


def _same_logits(a: Chain, b: Chain) -> bool:
    """Return whether two chains are the same numbers in the same places, gradients aside."""
    left, right = fold(a.steps), fold(b.steps)
    return (
        a.head.node is b.head.node
        and a.moved == b.moved
        and [s.effect for s in a.row_steps] == [s.effect for s in b.row_steps]
        and isinstance(left, Modifiers)
        and left == right
    )


def loss_outside(info: GraphInfo) -> Iterable[Decline]:
    """Say so when a training graph returns logits, no loss reads them and they stay as they are."""
    for match in returned_logits(info):
        if is_deferrable(info, match):
            continue
        head = match.outputs[0].chain.head
        weight = info.value(head.weight)
        vocabulary = compat.size_hint(weight.shape[1 if head.transposed else 0])
        yield Decline(
            "graph_break_between",
            f"this graph returns logits over {vocabulary} classes and no loss: the loss is "
            "computed in another graph or outside the compiled function",
            "compute the loss inside the compiled function (pass labels=), and compile with "
            "fullgraph=True to see what splits it",
            head.node,
        )
        return


def without_parts(tails: Sequence[Tail]) -> list[Tail]:
    """Leave out what only other tails read, such as a normalisation's logsumexp; losses first."""
    inner = {node for tail in tails for node in tail.through}
    known = inner | {tail.node for tail in tails}
    kept = [t for t in tails if t.node not in inner or not known.issuperset(t.node.users)]
    return sorted(kept, key=lambda tail: tail.kind not in LOSSES)


def has_sum(tail: Tail, tails: Sequence[Tail]) -> bool:
    """Return whether a gather on logits has their logsumexp, over its rows or, in loops, parts."""
    return any(other.kind == "lse" and other.chain.is_of(tail.chain) for other in tails)
