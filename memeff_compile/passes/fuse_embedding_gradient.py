"""embedding -> memeff::embedding_tied: the rows' gradient goes straight into the head's.

    before: x = embedding(ids, W);          nll, .. = memeff.linear_cross_entropy(h, W, y)
    after:  x, C = memeff.embedding_tied(W, ids, -1)
                                            nll, .. = memeff.linear_cross_entropy(h, C, y)

C is W itself, a view. Because the lookup hands it out, autograd gives the lookup's backward the
head's gradient of W together with the rows', and the second is added into the first in place. What
is saved is an fp32 buffer as large as the table (V x D), which Inductor scatters into.

Several lookups in one table (encoder and decoder) are chained: each takes the table from the one
before. A table that is used otherwise, too, gets those gradients from autograd as ever.

A large 16-bit table without a fused head in the same graph becomes memeff::embedding, whose
backward writes the 16-bit gradient without the fp32 buffer. Tables in fp32 are left alone there:
the buffer that Inductor scatters into is the gradient it returns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import compat
from ..kernels import embedding as op_folder
from ..kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_total
from .graph.base import Decline, Done, Gain, GraphPass, mutated
from .graph.canonical import Call, aten, call_of, read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among

# An fp32 buffer below this size is not worth an op of its own in the backward pass.
MIN_BYTES = 16 << 20
# What the sums may take beyond the buffer they save: a tiny table's, under a long batch, do.
SLACK_BYTES = 1 << 20

_WEIGHT_ARGUMENT = 1  # of memeff::linear_cross_entropy(hidden, weight, ...)


@dataclass
class Table:
    """A weight that is looked up, and what reads it: lookups, and the heads behind all of them."""

    weight: Node
    lookups: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    heads: list[Node] = field(default_factory=list)


class FuseEmbeddingGradient(GraphPass):
    name = "fuse_embedding_gradient"

    def enabled(self, info: GraphInfo) -> bool:
        """Return whether memeff.embedding is on and a backward may follow."""
        return super().enabled(info) and info.region.grad

    def find(self, info: GraphInfo) -> Iterable[Table | Decline]:
        """Yield one table per looked-up weight with something to gain."""
        tables: dict[Node, Table] = {}
        unread: dict[Node, list[Node]] = defaultdict(list)
        for node in info.visit(info.gm.graph.nodes):
            weight = _arguments(node).get("weight")
            if not isinstance(weight, Node) or not _trains(info, node, weight):
                continue
            call = read_one(node)
            if call is None or _unserved_setting(node, call):
                unread[weight].append(node)
                continue
            table = tables.setdefault(weight, Table(weight))
            table.lookups.append(node)
            table.calls.append(call)
        for weight in info.visit(unread):
            nodes = unread[weight]
            if _heads(info, weight, nodes[0]) or _is_large(info, weight):
                yield from (_unread(node) for node in nodes)
        for weight in info.visit(tables):
            table = tables[weight]
            table.heads = _heads(info, table.weight, table.lookups[-1])
            if (table.heads or _is_large(info, table.weight)) and self._pays(info, table):
                yield table

    def _pays(self, info: GraphInfo, table: Table) -> bool:
        weight = info.tensor(table.weight)
        if weight is None or not weight.is_floating_point():
            return True  # the check says why it is not served
        gain = self.gain(info, table)
        saved = gain.before - gain.after
        return bool(saved.subs({s: gain.sizes[s.name] for s in saved.free_symbols}) >= -SLACK_BYTES)

    def check(self, info: GraphInfo, match: Table) -> Decline | None:
        weight, kind = info.value(match.weight), kind_among((match.weight,))
        anchor = match.lookups[0]
        if kind:
            said = f"the embedding's weight is a {kind}, which this op does not take"
            hint = "gather or dequantise the embedding"
            return Decline(f"subclass_weight({kind})", said, hint, anchor)
        for call in match.calls:
            ids = info.tensor(call.args["indices"])
            sentence = "the ids are not a tensor" if ids is None else None
            sentence = sentence or op_folder.supports(weight, ids)  # type: ignore[arg-type]
            if sentence:
                return Decline("unsupported", sentence, node=anchor)
        for write in info.writes:
            if info.may_write(write, (match.weight,)):
                return mutated(write.node, "the embedding's weight inside the graph", anchor)
        return None

    def gain(self, info: GraphInfo, match: Table) -> Gain:
        """Return the formula for the table-sized buffers, before and after."""
        weight = info.value(match.weight)
        n, d, v, b = sympy.symbols("N D V B", integer=True, positive=True)
        compiled = info.options.inner == "inductor"
        before = op_folder.bytes_before(v, d, dtype=weight.dtype, compiled=compiled)
        engine = op_folder.engine_for(weight.device, weight.dtype)
        call: dict[str, Any] = {"dtype": weight.dtype, "engine": engine}
        sizes = {
            "N": max(_tokens(info, call) for call in match.calls),
            "D": compat.size_hint(weight.shape[1]),
            "V": compat.size_hint(weight.shape[0]),
        }
        sizes["B"] = int(op_folder.piece_bytes(sizes["N"], sizes["D"], **call))
        return Gain(before, op_folder.bytes_after(n, d, **call, pieces=b), sizes)

    def places(self, match: Table) -> Sequence[Node]:
        return [*match.lookups, *match.heads]

    def rewrite(self, info: GraphInfo, match: Table, editor: Editor) -> Done:
        """Replace the lookups; let the heads read the table from the last one."""
        table = match.weight
        for node, call in zip(match.lookups, match.calls, strict=True):
            operands = (table, call.args["indices"], call.args["padding_idx"])
            with editor.at(node):
                if match.heads:
                    both = editor.call(op_folder.embedding_tied, *operands)
                    rows, table = editor.item(both, 0), editor.item(both, 1)
                else:
                    rows = editor.call(op_folder.embedding, *operands)
            editor.replace(node, rows)
        if match.heads:
            editor.reroute(match.heads, match.weight, table)
        return Done(match.lookups[0], _sentence(info, match))

    def dead(self, match: Table) -> Sequence[Node]:
        return match.lookups


_LOOKUPS: dict[Any, str] = {
    F.embedding: "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    torch.embedding: "weight indices padding_idx scale_grad_by_freq sparse",
    aten.embedding.default: "weight indices padding_idx scale_grad_by_freq sparse",
}


def _arguments(node: Node) -> dict[str, Any]:
    """Return a lookup's arguments by name; nothing for any other node."""
    names = next((names for op, names in _LOOKUPS.items() if node.target is op), "")
    return {**dict(zip(names.split(), node.args, strict=False)), **node.kwargs} if names else {}


def _trains(info: GraphInfo, node: Node, weight: Node) -> bool:
    tensors = [info.tensor(each) for each in (weight, node)]
    has_gradient = all(tensor is not None and tensor.requires_grad for tensor in tensors)
    return has_gradient and info.regions[node].grad


def _unserved_setting(node: Node, call: Call | None = None) -> str:
    """Return the setting of a lookup that the op does not have, or an empty string."""
    given = _arguments(node)
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if given.get(name):
            return name
    padding = given.get("padding_idx")
    if padding is not None and not isinstance(padding, int):
        return "padding_idx"
    return "" if call is not None else "padding_idx"


def _unread(node: Node) -> Decline:
    setting = _unserved_setting(node, read_one(node))
    why = {
        "max_norm": "which rescales rows of the table in place",
        "scale_grad_by_freq": "which divides gradients by the ids' counts",
        "sparse": "whose gradient is a sparse tensor",
        "padding_idx": "which is negative or varies from call to call",
    }[setting]
    hint = f"leave {setting} out, if it is not needed"
    if setting == "padding_idx":
        hint = "give padding_idx as a number from 0 on"
    said = f"the embedding is used with {setting}, {why}"
    return Decline(f"embedding_setting({setting})", said, hint, node)


def _heads(info: GraphInfo, weight: Node, last: Node) -> list[Node]:
    """Return what reads ``weight`` for fused heads behind ``last``: the ops, or a cast. Not a cast
    to a narrower dtype: its gradient would be held wide through the whole backward pass.
    """
    later = [user for user in weight.users if info.positions[user] >= info.positions[last]]
    trained = [user for user in later if info.regions[user].grad]
    return [u for u in trained if _is_head(u, weight) or _is_cast_for_heads(info, u, weight)]


def _is_head(node: Node, weight: Node) -> bool:
    return (
        node.target in (linear_cross_entropy, linear_cross_entropy_total)
        and node.args[_WEIGHT_ARGUMENT] is weight
        and sum(operand is weight for operand in node.args) == 1
    )


def _is_cast_for_heads(info: GraphInfo, node: Node, weight: Node) -> bool:
    before, after = info.tensor(weight), info.tensor(node)
    if call_of(node, aten.to.dtype) is None or before is None or after is None:
        return False
    if before.dtype == after.dtype or after.dtype.itemsize < before.dtype.itemsize:
        return False
    return bool(node.users) and all(_is_head(user, node) for user in node.users)


def _is_large(info: GraphInfo, weight: Node) -> bool:
    """Return whether Inductor would scatter into an fp32 copy that is worth avoiding."""
    value = info.tensor(weight)
    if value is None or info.options.inner != "inductor" or value.dtype.itemsize != 2:
        return False
    return 4 * math.prod(compat.size_hint(size) for size in value.shape) >= MIN_BYTES


def _tokens(info: GraphInfo, call: Call) -> int:
    ids = info.value(call.args["indices"])
    return max(math.prod(compat.size_hint(size) for size in ids.shape), 1)


def _sentence(info: GraphInfo, match: Table) -> str:
    weight = info.value(match.weight)
    name = op_folder.engine_for(weight.device, weight.dtype)
    engine = f"engine {name}: {op_folder.ENGINES[name]}"
    if match.heads:
        return (
            "embedding and head share their weight -> memeff::embedding_tied, which adds the "
            f"embedding's gradient into the head's; {engine}"
        )
    return f"embedding -> memeff::embedding, whose gradient has no fp32 copy; {engine}"
