"""Finds what reads logits: losses, gathered log-probabilities, log-sum-exps, metrics.

A *tail* is one consumer of logits that memeff::linear_cross_entropy can serve; a *site* is a head
and all its tails. What looks like a loss and cannot be read is a Decline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from ... import compat
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


def tails_of(info: GraphInfo, reader: HeadReader, node: Node) -> Iterable[Tail | Decline]:
    """Yield what ``node`` reads from logits, or why it cannot be served."""
    if node.op not in ("call_function", "call_method") or node_name(node) not in _TAIL_NAMES:
        return
    if node_name(node) == "getitem":
        yield from _chosen_tail(info, reader, node)
        return
    call = read_one(node)
    if call is None:
        if "cross_entropy" in node_name(node) or "nll_loss" in node_name(node):
            said = f"`{node_name(node)}` is called with arguments this pass does not read"
            yield Decline("unreadable_loss", said, node=node)
        return
    a = call.args
    if call.op is aten.cross_entropy_loss.default:
        chain = reader.chain(a["self"])
        yield from _loss_tail(info, reader, node, chain, a, a["label_smoothing"], ())
    elif call.op is aten.nll_loss_nd.default:
        yield from _nll_tail(info, reader, node, a)
    elif call.op in (aten.gather.default, aten.take_along_dim.default):
        yield from _gather_tail(info, reader, node, call.args)
    elif call.op is aten.logsumexp.default:
        yield from _lse_tail(info, reader, node, a)
    elif call.op is aten.argmax.default:
        yield from _top_tail(info, reader, node, a, ())
    elif call.op is aten.sum.dim_IntList:
        yield from _entropy_tail(info, reader, node, a)


def _lse_tail(info: GraphInfo, reader: HeadReader, node: Node, a: Any) -> Iterable[Tail]:
    dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
    value = info.tensor(a["self"])
    if value is None or len(dims) != 1 or dims[0] % value.dim() != value.dim() - 1:
        return
    chain = reader.chain(a["self"])
    if isinstance(chain, Chain) and not chain.moved:
        yield Tail(node, "lse", chain, keepdim=a["keepdim"])


def _nll_tail(info: GraphInfo, reader: HeadReader, node: Node, a: Any) -> Iterable[Tail | Decline]:
    soft = SoftmaxReader(info, reader).log_probs(a["self"])
    if isinstance(soft, Decline):
        yield replace(soft, node=node)
    elif soft is not None:
        yield from _loss_tail(info, reader, node, soft.chain, a, 0.0, soft.through)
    elif a["self"].op != "placeholder":
        yield Decline(
            "not_log_softmax",
            "nll_loss does not read a log_softmax over its classes",
            "use cross_entropy, or take log_softmax of the logits over their classes",
            node=node,
        )


def _loss_tail(
    info: GraphInfo,
    reader: HeadReader,
    node: Node,
    chain: Chain | Decline,
    a: Any,
    label_smoothing: Any,
    through: tuple[Node, ...],
) -> Iterable[Tail | Decline]:
    target = info.tensor(a["target"])
    if target is None or target.dtype.is_floating_point:
        yield Decline(
            "prob_targets",
            "the targets are class probabilities, not class indices",
            "pass integer class indices to use the fused loss",
            node,
        )
        return
    if isinstance(chain, Decline):
        yield replace(chain, node=node)
        return
    settings = (a["reduction"], a["ignore_index"], label_smoothing)
    reduction, ignore_index, smoothing = map(compat.known_number, settings)
    if reduction is None or ignore_index is None or smoothing is None:
        yield Decline(
            "setting_not_constant",
            f"`{node_name(node)}` gets an ignore_index or label_smoothing that varies from call to "
            "call",
            "give it a fixed number",
            node,
        )
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


def _gather_tail(
    info: GraphInfo, reader: HeadReader, node: Node, a: Any
) -> Iterable[Tail | Decline]:
    source = a["self"]
    index, opened = _plain_index(info, a.get("index", a.get("indices")))
    value, index_value = info.tensor(source), info.tensor(index)
    if value is None or index_value is None or a["dim"] is None or value.dim() == 0:
        return
    if a["dim"] % value.dim() != value.dim() - 1 or index_value.dim() != value.dim():
        return
    if a.get("sparse_grad") or not compat.statically_true(index_value.shape[-1] == 1):
        return
    same_rows = same_shape(index_value.shape[:-1], value.shape[:-1])
    soft = SoftmaxReader(info, reader).log_probs(source)
    if isinstance(soft, Decline):
        yield replace(soft, node=node)
        return
    chain = reader.chain(source) if soft is None else soft.chain
    if isinstance(chain, Decline):
        if node_name(source) == "log_softmax":
            said = (
                f"`{node_name(node)}` reads a log_softmax over another dimension than the classes"
            )
            yield Decline("unknown_step", said, node=node)
        return
    if not same_rows:
        if soft is not None:
            yield Decline(
                "rows_differ",
                "the gathered index may have fewer rows than the log-probabilities",
                "slice the hidden states to the rows that are gathered; sizes that are always "
                "equal but marked dynamic one by one are best marked by dynamic=True",
                node,
            )
        return
    kind, through = ("logit", ()) if soft is None else ("log_prob", soft.through)
    yield Tail(node, kind, chain, target=index, through=(*through, *opened))


def _plain_index(info: GraphInfo, index: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the index behind ``broadcast_tensors(index, logits)[0][..., :1]``, and what it was.

    That is how torch.distributions gathers log-probabilities; the broadcast reads the logits.
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
    joined = broadcast.args[0]
    assert isinstance(joined, Node)
    return source, (joined, broadcast, index)


def _chosen_tail(info: GraphInfo, reader: HeadReader, node: Node) -> Iterable[Tail]:
    """Read ``max(x, -1)[1]`` and ``topk(x, 1)[1]``, if nobody uses the values."""
    pair, index = node.args
    if index not in (1, -1) or not isinstance(pair, Node) or node_name(pair) not in ("max", "topk"):
        return
    call = read_one(pair)
    others = [user for user in pair.users if user.args[1:] != node.args[1:]]
    if call is None or any(user.users for user in others):
        return
    if call.op is aten.max.dim:
        yield from _top_tail(info, reader, node, call.args, (pair, *others))
    elif call.op is aten.topk.default and call.args["k"] == 1 and call.args["largest"]:
        yield from _top_tail(info, reader, node, {**call.args, "keepdim": True}, (pair, *others))


def _top_tail(
    info: GraphInfo, reader: HeadReader, node: Node, a: Any, through: tuple[Node, ...]
) -> Iterable[Tail]:
    """Read an argmax over the classes of logits, or of their probabilities in any form."""
    source = a["self"]
    value = info.tensor(source)
    if value is None or value.dim() == 0 or not isinstance(a["dim"], int):
        return
    softmax = SoftmaxReader(info, reader)
    soft = softmax.probs(source) or softmax.log_probs(source)
    chain = soft.chain if isinstance(soft, Soft) else reader.chain(source)
    if isinstance(chain, Decline):
        return
    if a["dim"] % value.dim() != class_position(chain, value.dim()):
        return
    before = soft.through if isinstance(soft, Soft) else ()
    yield Tail(node, "top", chain, through=(*before, *through), keepdim=a["keepdim"])


def _entropy_tail(info: GraphInfo, reader: HeadReader, node: Node, a: Any) -> Iterable[Tail]:
    """Read a sum over the classes of p log p, p times the logits, or entr(p)."""
    value = info.tensor(a["self"])
    dims = a["dim"]
    if value is None or value.dim() == 0 or dims is None or len(dims) != 1:
        return
    if a["dtype"] is not None and a["dtype"].itemsize < value.dtype.itemsize:
        return
    term, sign, between = _unsigned(a["self"])
    call = read_one(term)
    if call is None:
        return
    softmax = SoftmaxReader(info, reader)
    found: tuple[str, Soft] | None = None
    factors: tuple[Node, ...] = ()
    if call.op is aten.special_entr.default:
        probs = softmax.probs(call.args["self"])
        factors = (call.args["self"],)
        found = None if probs is None else ("entropy", probs)
    elif call.op is aten.mul.Tensor:
        left, right = _unsigned(call.args["self"]), _unsigned(call.args["other"])
        found = _weighted(reader, softmax, left[0], right[0])
        factors = (left[0], right[0])
        sign *= left[1] * right[1]
        between = (*between, *left[2], *right[2])
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


def _unsigned(node: Any) -> tuple[Node, int, tuple[Node, ...]]:
    """Take minus signs off ``node``: what is below, their product, and the nodes they were."""
    sign = 1
    taken: tuple[Node, ...] = ()
    while isinstance(node, Node):
        call = read_one(node)
        is_minus = call is not None and (
            call.op is aten.neg.default
            or (call.op is aten.mul.Tensor and call.args["other"] in (-1, -1.0))
        )
        if call is None or not is_minus:
            break
        sign, taken, node = -sign, (*taken, node), call.args["self"]
    return node, sign, taken


def _weighted(
    reader: HeadReader, softmax: SoftmaxReader, left: Any, right: Any
) -> tuple[str, Soft] | None:
    """Read p times log p, or p times the logits, in either order."""
    for first, second in ((left, right), (right, left)):
        probs = softmax.probs(first)
        if probs is None:
            continue
        logs = softmax.log_probs(second)
        if isinstance(logs, Soft):
            if _same_logits(probs.chain, logs.chain):
                return "neg_entropy", Soft(probs.chain, (*probs.through, *logs.through))
            return None
        chain = reader.chain(second) if isinstance(second, Node) else None
        if isinstance(chain, Chain) and _same_logits(probs.chain, chain):
            return "mean_logit", probs
    return None


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
    """Leave out what only other tails read, such as the logsumexp inside a normalisation.

    Losses come first: they name the site in the report.
    """
    inner = {node for tail in tails for node in tail.through}
    known = inner | {tail.node for tail in tails}
    kept = [t for t in tails if t.node not in inner or not known.issuperset(t.node.users)]
    return sorted(kept, key=lambda tail: tail.kind not in LOSSES)


def has_sum(tail: Tail, tails: Sequence[Tail]) -> bool:
    """Return whether a gather on the logits has their logsumexp, over its rows or parts of them.

    A loop over the sequences takes the logsumexp of each.
    """
    return any(other.kind == "lse" and other.chain.is_of(tail.chain) for other in tails)


def has_pair(tails: Sequence[Tail]) -> bool:
    """Return whether a gather on the logits has their logsumexp."""
    return any(t.kind == "logit" and has_sum(t, tails) for t in tails)
