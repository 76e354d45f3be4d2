"""Finds what reads logits: losses, gathered log-probabilities, log-sum-exps.

A *tail* is one consumer of logits that memeff::linear_cross_entropy can serve; a *site* is a head
and all its tails. What looks like a loss and cannot be read is a Decline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from .. import compat
from .base import Decline
from .canonical import aten, read_one
from .defer_logits import LogitsOutput, is_deferrable, returned_logits
from .graph_info import GraphInfo, node_name
from .linear_head import Chain, Head, HeadReader


@dataclass(frozen=True)
class Tail:
    """One consumer of logits that the op can serve.

    kind is ``loss`` (cross_entropy or nll_loss), ``log_prob`` (gather on log_softmax), ``lse``
    (logsumexp) or ``logit`` (gather on the logits themselves).
    """

    node: Node
    kind: str
    chain: Chain
    target: Node | None = None
    class_weight: Node | None = None
    reduction: int = 0
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    through: Node | None = None  # the log_softmax between
    symbols: tuple[Node, ...] = ()  # settings that dynamic=True made symbols of

    @property
    def operands(self) -> tuple[Node, ...]:
        """The tensors the loss reads beside the logits."""
        return tuple(n for n in (self.target, self.class_weight) if n is not None)


@dataclass
class Site:
    """A head, its tails, and the outputs that return its logits."""

    head: Head
    tails: list[Tail]
    outputs: list[LogitsOutput] = field(default_factory=list)
    covered: list[Node] = field(default_factory=list)


_TAIL_NAMES = frozenset(
    "cross_entropy cross_entropy_loss nll_loss nll_loss_nd gather take_along_dim logsumexp "
    "linear_cross_entropy".split()
)


def tails_of(info: GraphInfo, reader: HeadReader, node: Node) -> Iterable[Tail | Decline]:
    if node.op not in ("call_function", "call_method") or node_name(node) not in _TAIL_NAMES:
        return
    call = read_one(node)
    if call is None:
        if "cross_entropy" in node_name(node) or "nll_loss" in node_name(node):
            yield Decline(
                "unreadable_loss",
                f"`{node_name(node)}` is called with arguments this pass does not read",
                node=node,
            )
        return
    a = call.args
    if call.op is aten.cross_entropy_loss.default:
        yield from _loss_tail(info, reader, node, a["self"], a, a["label_smoothing"], None)
    elif call.op is aten.nll_loss_nd.default:
        soft = _log_softmax_operand(info, a["self"], class_dim=1)
        if soft is None:
            if not _is_plain_loss_input(info, a["self"]):
                yield Decline(
                    "not_log_softmax",
                    "nll_loss does not read a log_softmax over its classes directly",
                    "use cross_entropy, or take log_softmax after the logits are reshaped",
                    node=node,
                )
            return
        yield from _loss_tail(info, reader, node, soft, a, 0.0, a["self"])
    elif call.op in (aten.gather.default, aten.take_along_dim.default):
        yield from _gather_tail(info, reader, node, call.args)
    elif call.op is aten.logsumexp.default:
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        value = info.tensor(a["self"])
        if value is None or len(dims) != 1 or dims[0] % value.dim() != value.dim() - 1:
            return
        chain = reader.chain(a["self"])
        if isinstance(chain, Chain) and not chain.detached:
            yield Tail(node, "lse", chain)


def _loss_tail(
    info: GraphInfo,
    reader: HeadReader,
    node: Node,
    logits: Node,
    a: Any,
    label_smoothing: Any,
    through: Node | None,
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
    chain = reader.chain(logits)
    if isinstance(chain, Decline):
        yield Decline(chain.code, chain.sentence, chain.hint, node)
        return
    settings = (a["reduction"], a["ignore_index"], label_smoothing)
    reduction, ignore_index, smoothing = map(compat.known_number, settings)
    if reduction is None or ignore_index is None or smoothing is None:
        yield Decline(
            "setting_not_constant",
            f"`{node_name(node)}` gets an ignore_index or label_smoothing that varies "
            f"from call to call",
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
    source, index = a["self"], a.get("index", a.get("indices"))
    value, index_value = info.tensor(source), info.tensor(index)
    if value is None or index_value is None or a["dim"] is None or value.dim() == 0:
        return
    if a["dim"] % value.dim() != value.dim() - 1 or index_value.dim() != value.dim():
        return
    if a.get("sparse_grad") or not compat.statically_true(index_value.shape[-1] == 1):
        return
    same_rows = all(
        compat.statically_true(i == s)
        for i, s in zip(index_value.shape[:-1], value.shape[:-1], strict=True)
    )
    soft = _log_softmax_operand(info, source, class_dim=-1)
    chain = reader.chain(soft if soft is not None else source)
    if isinstance(chain, Decline):
        if soft is not None:
            yield Decline(chain.code, chain.sentence, chain.hint, node)
        return
    if not same_rows:
        if soft is not None:
            yield Decline(
                "rows_differ",
                "the gathered index may have fewer rows than the log-probabilities",
                "slice the hidden states to the rows that are gathered; sizes that are "
                "always equal "
                "but marked dynamic one by one are best marked by dynamic=True",
                node,
            )
        return
    kind = "logit" if soft is None else "log_prob"
    yield Tail(node, kind, chain, target=index, through=source if soft is not None else None)


def _log_softmax_operand(info: GraphInfo, node: Any, class_dim: int) -> Node | None:
    """Return x when ``node`` is log_softmax(x) over ``class_dim`` (the only one of a vector)."""
    if not isinstance(node, Node):
        return None
    call = read_one(node)
    if call is None or call.op is not aten.log_softmax.int:
        return None
    value = info.tensor(call.args["self"])
    if value is None:
        return None
    rank = max(value.dim(), 1)
    dtype = call.args["dtype"]
    if dtype is not None and dtype.itemsize < value.dtype.itemsize:
        return None
    source: Node = call.args["self"]
    return source if call.args["dim"] % rank == min(class_dim % rank, rank - 1) else None


def _is_plain_loss_input(info: GraphInfo, node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def loss_outside(info: GraphInfo) -> Iterable[Decline]:
    """Say so when a training graph returns logits, no loss reads them and they stay as they are."""
    for match in returned_logits(info):
        if is_deferrable(info, match):
            continue
        weight = info.tensor(match.outputs[0].chain.head.weight)
        assert weight is not None
        head = match.outputs[0].chain.head
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


def has_pair(tails: Sequence[Tail]) -> bool:
    """Return whether a gather on the logits has its logsumexp over the same rows."""
    keys = {t.chain.row_key for t in tails if t.kind == "lse"}
    return any(t.kind == "logit" and t.chain.row_key in keys for t in tails)
