"""Recognize gathers of log-probabilities, probabilities or logits of several classes per row.

Losses on a teacher's top k classes use such gathers. The graph calls gather or take_along_dim to
compute one of these results:

    log_softmax(z)[..., i]
    softmax(z)[..., i]
    z[..., i]

A gather of one class per row is recognized by `losses/tails.py` instead, and
memeff::linear_cross_entropy computes its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ... import compat
from ..graph.base import Decline
from ..graph.canonical import aten, read_one
from ..graph.graph_info import GraphInfo, node_name, same_shape
from .divergences import Side
from .head import HeadReader
from .softmax import Soft, SoftmaxReader

GATHERS = ("gather", "take_along_dim")


@dataclass
class Classes:
    """The log-probabilities, probabilities or logits of k classes per row that a graph gathers."""

    node: Node  # the gather, which is replaced
    student: Side
    index: Node  # (..., k) int64
    kind: str  # "log p", "p" or "z", logits
    counts_from_end: bool  # negative indices are from the last class
    covered: list[Node] = field(default_factory=list)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Return a tuple with one `Side`, the description of the logits whose classes are gathered.

        `node` gathers k classes per row (token) from the logits, or from their probabilities or
        log-probabilities."""
        return (self.student,)


def read_classes(
    info: GraphInfo,
    reader: HeadReader,
    softmax: SoftmaxReader,
    node: Node,
    side_of: Callable[[Soft, Node], Side],
) -> Classes | None:
    """If `node` gathers several classes per row (token), return the match, a `Classes` object.

    `node` may gather from logits, probabilities or log-probabilities of an output projection. For
    other nodes, return None."""
    call = read_one(node) if node_name(node) in GATHERS else None
    if call is None or call.op not in (aten.gather.default, aten.take_along_dim.default):
        return None
    a: Any = call.args
    source, index, from_end = a["self"], a.get("index", a.get("indices")), "indices" in a
    value, chosen = info.tensor(source), info.tensor(index)
    if value is None or chosen is None or a["dim"] is None or value.dim() < 2:
        return None
    if a["dim"] % value.dim() != value.dim() - 1 or a.get("sparse_grad"):
        return None
    if not same_shape(value.shape[:-1], chosen.shape[:-1]) or chosen.dtype.itemsize != 8:
        return None
    if (compat.known_size(chosen.shape[-1]) or 0) < 2 or not value.is_floating_point():
        return None
    soft, kind = softmax.log_probs(source), "log p"
    if not isinstance(soft, Soft):
        soft, kind = softmax.probs(source), "p"
    if not isinstance(soft, Soft):
        chain = reader.chain(source)
        soft, kind = (None if isinstance(chain, Decline) else Soft(chain, ())), "z"
    if soft is None or soft.chain.moved or _comes_from(info, index, soft.chain.head.node):
        return None
    side = side_of(soft, source)
    covered = [*side.nodes, *soft.through, *(step.node for step in soft.chain.steps), node]
    return Classes(node, side, index, kind, from_end, [*dict.fromkeys(covered)])


def _comes_from(info: GraphInfo, index: Node, head: Node) -> bool:
    """Return whether the class indices of a gather are computed from the logits that it reads, as
    in a router that chooses experts."""
    seen, queue, first = set[Node](), [index], info.positions[head]
    while queue:
        node = queue.pop()
        if node is head:
            return True
        if node not in seen and info.positions[node] > first:
            seen.add(node)
            queue += node.all_input_nodes
    return False
