"""Finds what reads logits: losses, gathered log-probabilities, log-sum-exps, metrics.

A *tail* is one consumer of logits that memeff::linear_cross_entropy can serve; a *site* is a head
and all its tails. What looks like a loss and cannot be read is a Decline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...compat import OpOverload
from ...logits.recipe import Modifiers
from ..graph.base import Decline
from ..graph.canonical import Call, aten, back_over, call_of, named, read_one
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
    ``mean_logit`` (the sum of p times the logits), ``log_prob_sum`` or ``logit_sum`` (over the
    classes).
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
    negated: bool = False  # the node is minus the value of its kind
    is_mean: bool = False  # a sum over the classes is divided by their number
    aside: tuple[Node, ...] = ()  # nodes of a one-hot form of the targets, which nothing else reads

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


ENTROPIES = ("entropy", "neg_entropy", "mean_logit")
SUMS = ("log_prob_sum", "logit_sum")
STATISTICS = ("lse", "top", *ENTROPIES, *SUMS)
METRICS = ("top", *ENTROPIES)
# The kinds that make a site worth a rewrite; an argmax alone does not.
LOSSES = ("loss", "log_prob", "entropy", "neg_entropy", "log_prob_sum")


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
    "linear_cross_entropy argmax getitem __getitem__ index sum mean log add sub kl_div".split()
)


class TailReader:
    """Reads what nodes of one graph take from logits."""

    def __init__(self, info: GraphInfo, reader: HeadReader) -> None:
        self.info, self.reader = info, reader
        self.softmax = SoftmaxReader(info, reader)
        # Sums and means stand everywhere in a model: where they read no head, nothing is traced.
        self.untraced = HeadReader(info, tracing=False)

    def tails(self, node: Node) -> Iterable[Tail | Decline]:
        """Yield what ``node`` reads from logits, or why it cannot be served."""
        name = node_name(node)
        if node.op not in ("call_function", "call_method") or name not in _TAIL_NAMES:
            return
        if name in ("getitem", "__getitem__", "index"):
            yield from self._chosen(node)
            yield from self._indexed(node)
        elif name == "kl_div":
            yield from self._divergence(node)
        elif (call := read_one(node)) is not None:
            read = _READERS.get(call.op)
            yield from () if read is None else read(self, node, call.args)
        elif "cross_entropy" in name or "nll_loss" in name:
            said = f"`{name}` is called with arguments this pass does not read"
            hint = "call cross_entropy or nll_loss of torch.nn.functional, with plain numbers"
            yield Decline("unreadable_loss", said, hint, node)

    def _lse(self, node: Node, a: Any) -> Iterable[Tail]:
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        value = self.info.tensor(a["self"])
        if value is None or value.dim() == 0 or len(dims) != 1:
            return
        if dims[0] % value.dim() != value.dim() - 1:
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
        source, sign, signs = _unsigned(a["self"])
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
            wraps, through = "indices" in a, (*through, *opened, *signs)
            how = {"target": index, "through": through, "wraps": wraps, "negated": sign < 0}
            yield Tail(node, kind, chain, **how)

    def _indexed(self, node: Node) -> Iterable[Tail | Decline]:
        """Read ``x[arange(rows), targets]``: of each row, the entry of its target."""
        call = call_of(node, aten.index.Tensor)
        value = None if call is None else self.info.tensor(call.args["self"])
        if call is None or value is None or value.dim() < 2:
            return
        indices = call.args["indices"]
        if len(indices) != value.dim() or not all(isinstance(each, Node) for each in indices):
            return
        *places, index = indices
        rows, target = value.shape[:-1], self.info.tensor(index)
        if target is None or target.dtype not in (torch.int64, torch.int32):
            return
        if not same_shape(target.shape, rows):
            return
        if not all(_counts_up(self.info, each, dim, rows) for dim, each in enumerate(places)):
            return
        source, sign, signs = _unsigned(call.args["self"])
        soft = self.softmax.log_probs(source)
        if isinstance(soft, Decline):
            yield replace(soft, node=node)
            return
        chain = self.reader.chain(source) if soft is None else soft.chain
        if isinstance(chain, Decline):
            return
        kind, through = ("logit", ()) if soft is None else ("log_prob", soft.through)
        # An index may be negative, and then counts from the end.
        how = {"target": index, "wraps": True, "negated": sign < 0}
        yield Tail(node, kind, chain, through=(*through, *signs), **how)

    def _divergence(self, node: Node) -> Iterable[Decline]:
        """Name a divergence of a head's log-probabilities from others, which no op serves."""
        given = node.args[0] if node.args else node.kwargs.get("input")
        soft = self.softmax.log_probs(given)
        if isinstance(soft, Soft):
            said = "`kl_div` compares the probabilities of all classes with others"
            hint = "a loss on class indices, from logits that nothing else reads, is fused"
            yield Decline("divergence", said, hint, node)

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

    def _sum(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        """Read a sum over the classes: an entropy, or of log-probabilities, weighted or not."""
        if not self._is_over_a_dimension(a):
            return
        term, sign, between = _unsigned(a["self"])
        call = call_of(term, aten.special_entr.default, aten.mul.Tensor)
        if call is None:
            yield from self._class_sum(node, a, False)
            return
        entropies = list(self._entropy(node, a, term, sign, between, call))
        yield from entropies
        if not entropies and call.op is aten.mul.Tensor:
            yield from self._by_targets(node, a, term, sign, between, call)

    def _mean(self, node: Node, a: Any) -> Iterable[Tail]:
        """Read a mean over the classes of log-probabilities or logits."""
        if self._is_over_a_dimension(a):
            yield from self._class_sum(node, a, True)

    def _is_over_a_dimension(self, a: Any) -> bool:
        value, dims = self.info.tensor(a["self"]), a["dim"]
        if value is None or value.dim() == 0 or dims is None or len(dims) != 1:
            return False
        return a["dtype"] is None or a["dtype"].itemsize >= value.dtype.itemsize

    def _class_sum(self, node: Node, a: Any, is_mean: bool) -> Iterable[Tail]:
        source, sign, signs = _unsigned(a["self"])
        value = self.info.value(source)
        soft = self.softmax.log_probs(source)
        chain = self.untraced.chain(source) if soft is None else getattr(soft, "chain", None)
        if not isinstance(chain, Chain):
            return
        if a["dim"][0] % value.dim() != class_position(chain, value.dim()):
            return
        kind, through = ("logit_sum", ()) if soft is None else ("log_prob_sum", soft.through)
        how = {"keepdim": a["keepdim"], "negated": sign < 0, "is_mean": is_mean}
        yield Tail(node, kind, chain, through=(*through, *signs), **how)

    def _by_targets(
        self, node: Node, a: Any, term: Node, sign: int, between: tuple[Node, ...], call: Call
    ) -> Iterable[Tail | Decline]:
        """Read a sum over the classes of log-probabilities times targets: one-hot, or any."""
        left, right = _unsigned(call.args["self"]), _unsigned(call.args["other"])
        for (logs, minus, nodes), (targets, also, more) in ((left, right), (right, left)):
            soft = self.softmax.log_probs(logs)
            value, given = self.info.tensor(logs), self.info.tensor(targets)
            if not isinstance(soft, Soft) or value is None or given is None:
                continue
            last = value.dim() - 1
            if soft.chain.moved or a["dim"][0] % value.dim() != last:
                return
            if not same_shape(given.shape, value.shape):
                return
            index, aside = _one_hot(self.info, targets)
            if index is None:
                said = "the targets are weights of all classes, not class indices"
                hint = "pass integer class indices to use the fused loss"
                yield Decline("prob_targets", said, hint, node)
                return
            through = (*soft.through, *nodes, term, *between)
            how = {"keepdim": a["keepdim"], "negated": sign * minus * also < 0}
            aside = (*more, *aside)
            yield Tail(
                node, "log_prob", soft.chain, target=index, through=through, aside=aside, **how
            )
            return

    def _by_hand(self, node: Node, a: Any) -> Iterable[Tail]:
        """Read a log-sum-exp that is written out, with or without its maximum taken off."""
        total = self.softmax.total(node)
        if total is not None and total.shift is None and not total.chain.moved:
            yield Tail(node, "lse", total.chain, through=total.through, keepdim=total.keepdim)

    def _entropy(
        self, node: Node, a: Any, term: Node, sign: int, between: tuple[Node, ...], call: Call
    ) -> Iterable[Tail]:
        """Read a sum over the classes of p log p, p times the logits, or entr(p)."""
        value, dims = self.info.value(a["self"]), a["dim"]
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
    aten.sum.dim_IntList: TailReader._sum,
    aten.mean.dim: TailReader._mean,
    aten.log.default: TailReader._by_hand,
    aten.add.Tensor: TailReader._by_hand,
}


def _counts_up(info: GraphInfo, index: Node, dim: int, rows: Sequence[Any]) -> bool:
    """Return whether ``index``, broadcast to ``rows``, is each row's own position along ``dim``."""
    value = info.tensor(index)
    wanted = [1] * len(rows)
    wanted[dim] = rows[dim]
    if value is None or not same_shape((*[1] * (len(rows) - value.dim()), *value.shape), wanted):
        return False
    while (call := call_of(index, *_INDEX_MOVES)) is not None:
        if call.args.get("dtype", torch.int64) not in (torch.int64, torch.int32):
            return False
        index = call.args["self"]
    names = aten.arange.default, aten.arange.start, aten.arange.start_step
    made = call_of(index, *names)
    if made is None or made.args.get("dtype") not in (None, torch.int64, torch.int32):
        return False
    return (made.args.get("start", 0), made.args.get("step", 1)) == (0, 1)


_INDEX_MOVES = named(
    "unsqueeze.default view.default reshape.default to.dtype alias.default expand.default"
)


def _one_hot(info: GraphInfo, node: Node) -> tuple[Node | None, tuple[Node, ...]]:
    """Return the class indices of which ``node`` is the one-hot form, and the nodes in between."""
    way: list[Node] = []
    node = back_over(node, (aten.to.dtype,), way)
    if node_name(node) != "one_hot" or not node.args:
        return None, ()
    index: Any = node.args[0]
    value = info.tensor(index)
    return (index if value is not None else None), (*way, node)


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
    while (call := call_of(node, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar)) is not None:
        if call.op is not aten.neg.default and call.args["other"] not in (-1, -1.0):
            break
        taken.append(node)
        sign, node = -sign, call.args["self"]
    return node, sign, tuple(taken)


def _same_logits(a: Chain, b: Chain) -> bool:
    """Return whether two chains are the same numbers in the same places, gradients aside."""
    left, right = fold(a), fold(b)
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
