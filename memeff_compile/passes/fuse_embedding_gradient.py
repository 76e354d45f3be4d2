"""Rewrite an embedding that shares its weight with an output projection into
memeff::embedding_tied.

The op adds the embedding's gradient to the output projection's gradient of the weight, in place.

    before: x = embedding(ids, W);          nll, .. = memeff.linear_cross_entropy(h, W, y)
    after:  x, C = memeff.embedding_tied(W, ids, -1)
                                            nll, .. = memeff.linear_cross_entropy(h, C, y)

C is a view of the table W (the weight). memeff::embedding_tied returns both C and the looked-up
rows x. So the op's backward pass gets the gradient of x and the output projection's gradient of C.
The backward pass adds the gradient of x to the rows of the gradient of C, in place. Inductor would
instead scatter the gradient of x to an fp32 buffer as large as the table (V x D). The in-place
addition needs no such buffer.

Several lookups in one table (encoder and decoder) form a chain: each lookup takes the table that
the previous lookup returned. If other nodes use the table, autograd adds the gradients of these
uses as usual.

If a large 16-bit table has no fused output projection in the same graph, its lookup becomes
memeff::embedding. The backward pass of this op writes the 16-bit gradient directly, without an fp32
buffer as large as the table. The lookup of an fp32 table without a fused output projection is not
rewritten: the buffer to which Inductor scatters is already the gradient.

If DTensor splits a table over ranks by rows, DTensor builds the gradient of the whole table, in the
table's dtype, on every rank. So the pass rewrites the lookup of every large split table. Each rank
looks up the rows of its own shard, and `over_ranks` makes a DTensor of the results. The ranks'
results are summed as before:

    before: x = embedding(ids, W).redistribute(...)  # with W: Shard(0)
    after:  W_r = part_of_rank(W)
            x = over_ranks(memeff.embedding(W_r, ids, -1, first_row), W, ids).redistribute(...)
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
from ..kernels.linear_cross_entropy import (
    layout,
    linear_cross_entropy,
    linear_cross_entropy_over_ranks,
    linear_cross_entropy_total,
    linear_cross_entropy_total_over_ranks,
    part_of_rank,
)
from .graph.base import Decline, Done, Gain, GraphPass, mutated
from .graph.canonical import Call, aten, call_of, read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among, node_name, written_by

# An fp32 buffer below this size does not justify a separate op in the backward pass.
MIN_BYTES = 16 << 20
# How many bytes the sums may exceed the saved buffer by; a tiny table with a long batch exceeds it.
SLACK_BYTES = 1 << 20

_WEIGHT_ARGUMENT = 1  # of memeff::linear_cross_entropy(hidden, weight, ...)
_HEADS = (
    linear_cross_entropy,
    linear_cross_entropy_total,
    linear_cross_entropy_over_ranks,
    linear_cross_entropy_total_over_ranks,
)


@dataclass
class Table:
    """An embedding's weight, its lookups, and the output projections that use the weight after all
    lookups."""

    weight: Node
    lookups: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    heads: list[Node] = field(default_factory=list)


class FuseEmbeddingGradient(GraphPass):
    name = "fuse_embedding_gradient"

    def enabled(self, info: GraphInfo) -> bool:
        """Return whether the option memeff.embedding is on and a backward pass may follow."""
        return super().enabled(info) and info.region.grad

    def find(self, info: GraphInfo) -> Iterable[Table | Decline]:
        """Yield each looked-up weight for which the rewrite would save memory."""
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
            if _heads_of_all(info, weight, nodes[0]) or _is_large(info, weight):
                yield from (_unread(node) for node in nodes)
        for weight in info.visit(tables):
            table = tables[weight]
            table.heads = _heads_of_all(info, table.weight, table.lookups[-1])
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
        is_spread = compat.is_dtensor(weight)
        if kind and not is_spread:
            said = f"the embedding's weight is a {kind}, which this op does not take"
            hint = "gather or dequantise the embedding"
            return Decline(f"subclass_weight({kind})", said, hint, anchor)
        for call in match.calls:
            ids = info.tensor(call.args["indices"])
            if ids is None:
                return Decline("unsupported", "the ids are not a tensor", node=anchor)
            sentence = op_folder.supports(compat.local_part(weight), compat.local_part(ids))
            if sentence:
                return Decline("unsupported", sentence, node=anchor)
            if is_spread and (answer := _unserved_layout(weight, ids, match)):
                return answer
        for write in info.writes:
            if info.may_write(write, (match.weight,)):
                return mutated(write.node, "the embedding's weight inside the graph", anchor)
        return None

    def gain(self, info: GraphInfo, match: Table) -> Gain:
        """Return formulas for the bytes that the embedding's gradient needs, before and after the
        rewrite.

        Without the rewrite, the gradient needs buffers with the shape of the embedding's weight.
        """
        weight = info.value(match.weight)
        n, d, v, b, held = sympy.symbols("N D V B V_r", integer=True, positive=True)
        parts = op_folder.parts_of(weight)[0]
        sizes = {"N": max(_tokens(info, call) for call in match.calls), **_sizes(weight)}
        returned = {}
        if parts > 1 and not match.heads:
            returned["held"], sizes["V_r"] = held, -(-sizes["V"] // parts)
        compiled = _is_compiled(info)
        before = op_folder.bytes_before(v, d, dtype=weight.dtype, compiled=compiled, **returned)
        engine = op_folder.engine_for(weight.device, weight.dtype)
        call: dict[str, Any] = {"dtype": weight.dtype, "engine": engine}
        sizes["B"] = int(op_folder.piece_bytes(sizes["N"], sizes["D"], **call))
        return Gain(before, op_folder.bytes_after(n, d, **call, pieces=b), sizes)

    def places(self, match: Table) -> Sequence[Node]:
        return [*match.lookups, *match.heads]

    def rewrite(self, info: GraphInfo, match: Table, editor: Editor) -> Done:
        """Replace each lookup in a table (an embedding's weight) by one op.

        If output projections use the table as their weight, the op is memeff::embedding_tied, which
        also returns the table. Each following lookup takes the table that the previous op returned.
        The output projections then read the table that the last op returns. Without such output
        projections, the op is memeff::embedding.
        """
        table, sources = match.weight, _sources(match.weight)
        parts: dict[Node, Node] = {}
        for node, call in zip(match.lookups, match.calls, strict=True):
            ids = call.args["indices"]
            operands: tuple[Any, ...] = (ids, call.args["padding_idx"])
            place = _layout(info, match.weight, ids)
            with editor.at(node):
                if place is not None:
                    if table is match.weight or not match.heads:
                        table = editor.call(part_of_rank, match.weight, place.summed)
                    local = ids
                    if compat.is_dtensor(info.value(ids)):
                        local = editor.call(part_of_rank, ids)
                    operands = (local, operands[1])
                    if place.is_by_rows:
                        operands += (op_folder.first_row_of(info.value(match.weight)),)
                if match.heads:
                    both = editor.call(op_folder.embedding_tied, table, *operands)
                    rows, table = editor.item(both, 0), editor.item(both, 1)
                else:
                    rows = editor.call(op_folder.embedding, table, *operands)
                if place is not None:
                    rows = editor.call(op_folder.over_ranks, rows, match.weight, ids)
            if place is not None and place.is_by_rows:
                parts[node] = rows
            else:
                editor.replace(node, rows)
        _hand_over(editor, parts)
        for source in sources if match.heads else ():
            if heads := [head for head in match.heads if source in head.all_input_nodes]:
                editor.reroute(heads, source, table)
        return Done(match.lookups[0], _sentence(info, match))

    def joins_ranks(self, info: GraphInfo, match: Table) -> bool:
        """Return whether the table (the embedding's weight) is a DTensor.

        The nodes that replace the lookup may then exchange looked-up rows or gradients between
        ranks. So either all ranks must insert these nodes, or no rank may insert them.
        """
        return compat.is_dtensor(info.value(match.weight))

    def dead(self, match: Table) -> Sequence[Node]:
        return [*match.lookups, *(user for node in match.lookups for user in node.users)]


_LOOKUPS: dict[Any, str] = {
    F.embedding: "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    torch.embedding: "weight indices padding_idx scale_grad_by_freq sparse",
    aten.embedding.default: "weight indices padding_idx scale_grad_by_freq sparse",
}


def _arguments(node: Node) -> dict[str, Any]:
    """Return a lookup's arguments by name, or an empty dict for any other node."""
    names = next((names for op, names in _LOOKUPS.items() if node.target is op), "")
    return {**dict(zip(names.split(), node.args, strict=False)), **node.kwargs} if names else {}


def _trains(info: GraphInfo, node: Node, weight: Node) -> bool:
    tensors = [info.tensor(each) for each in (weight, node)]
    has_gradient = all(tensor is not None and tensor.requires_grad for tensor in tensors)
    return has_gradient and info.regions[node].grad


def _unserved_setting(node: Node, call: Call | None = None) -> str:
    """Return the setting of a lookup that this package's embedding ops do not support, or an empty
    string if the ops support all settings.
    """
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


def _sources(weight: Node) -> list[Node]:
    """Return a weight and the nodes that take this rank's shard of it.

    A fused output projection may use any of these nodes as its weight."""
    parts = (user for user in weight.users if user.target is part_of_rank)
    return [weight, *(part for part in parts if all(summed is None for summed in part.args[1:]))]


def _heads_of_all(info: GraphInfo, weight: Node, last: Node) -> list[Node]:
    return [head for source in _sources(weight) for head in _heads(info, source, last)]


def _heads(info: GraphInfo, weight: Node, last: Node) -> list[Node]:
    """Return the nodes after `last` that read `weight` as the weight of an output projection.

    Such a node is a fused loss op, or a cast or slice of `weight` that only fused loss ops read. A
    slice takes the weight's rows of some classes. The function does not return casts of `weight` to
    a narrower dtype. If it returned such a cast, the gradient would be stored in the wider dtype of
    `weight` during the whole backward pass.
    """
    later = [user for user in weight.users if info.positions[user] >= info.positions[last]]
    trained = [user for user in later if info.regions[user].grad]
    readers = (_is_head(u, weight) or _is_made_for_heads(info, u, weight) for u in trained)
    return [user for user, is_reader in zip(trained, readers, strict=True) if is_reader]


def _is_head(node: Node, weight: Node) -> bool:
    return (
        node.target in _HEADS
        and node.args[_WEIGHT_ARGUMENT] is weight
        and sum(operand is weight for operand in node.args) == 1
    )


def _is_made_for_heads(info: GraphInfo, node: Node, weight: Node) -> bool:
    is_for_heads = bool(node.users) and all(_is_head(user, node) for user in node.users)
    cut = call_of(node, aten.slice.Tensor)
    if cut is not None and cut.args["self"] is weight and cut.args["dim"] == 0:
        return is_for_heads
    before, after = info.tensor(weight), info.tensor(node)
    if call_of(node, aten.to.dtype) is None or before is None or after is None:
        return False
    if before.dtype == after.dtype or after.dtype.itemsize < before.dtype.itemsize:
        return False
    return is_for_heads


def _is_large(info: GraphInfo, weight: Node) -> bool:
    """Return whether the buffer that the pass avoids is large enough to be worth a rewrite.

    For a 16-bit table, the buffer is the fp32 tensor to which Inductor scatters the gradient. For a
    table that is split over ranks, it is the gradient of the whole table.
    """
    value = info.tensor(weight)
    if value is None or value.dim() != 2:
        return False
    is_widened = _is_compiled(info) and value.dtype.itemsize == 2
    if not is_widened and op_folder.parts_of(value)[0] == 1:
        return False
    given = _sizes(value).values()
    before = op_folder.bytes_before(*given, dtype=value.dtype, compiled=_is_compiled(info))
    return bool(before >= MIN_BYTES)


def _is_compiled(info: GraphInfo) -> bool:
    return info.options.inner == "inductor"


def _sizes(weight: torch.Tensor) -> dict[str, int]:
    """Return the sizes (shape) of the gradient buffer that the pass avoids; the sizes are the same
    on every rank.
    """
    rows, columns = map(compat.size_hint, weight.shape)
    return {"V": rows, "D": -(-columns // op_folder.parts_of(weight)[1])}


def _layout(info: GraphInfo, weight: Node, ids: Node) -> op_folder.Layout | None:
    """Return how a table is split over ranks, or None if it is a plain tensor."""
    table = info.value(weight)
    return op_folder.layout_of(table, info.value(ids)) if compat.is_dtensor(table) else None


def _unserved_layout(weight: torch.Tensor, ids: torch.Tensor, match: Table) -> Decline | None:
    """Return the reason why the ranks cannot each look up rows in their own shard of a split table,
    or None."""
    anchor, found = match.lookups[0], None
    if all(compat.known_size(size) is not None for size in weight.shape):
        found = op_folder.layout_of(weight, ids)
    if found is None:
        said = f"the table of the embedding is laid out as {layout(weight)}"
        said += f" and the ids as {layout(ids)}" if compat.is_dtensor(ids) else ""
        return _spread(said, anchor)
    if found.summed is not None and match.heads:
        return _spread(
            "a head reads the table of the embedding, and each rank has a part of the ids", anchor
        )
    if not found.is_by_rows:
        return None
    users = (user for lookup in match.lookups for user in lookup.users)
    reader = next((user for user in users if not _reads_sums(user)), None)
    if reader is None:
        return None
    what = f"`{node_name(reader)}` reads the rows of the embedding before ranks have added them up"
    return _spread(what, anchor)


def _reads_sums(user: Node) -> bool:
    """Return whether the node `user` adds up looked-up rows over the ranks.

    Before the addition, the rows on one rank may be partial sums. After the addition, every rank
    has the complete rows.
    """
    if node_name(user) in _MOVES:
        return True
    found = compat.example_value(user)
    places = getattr(found, "placements", ())
    is_whole = compat.is_dtensor(found) and all(place.is_replicate() for place in places)
    return is_whole and not written_by(user)


def _hand_over(editor: Editor, parts: dict[Node, Node]) -> None:
    """Replace looked-up rows, in the nodes that read them, by the DTensors that the rewritten
    lookups return."""
    added: dict[Node, Node] = {}
    for user in dict.fromkeys(user for node in parts for user in node.users):
        moves = node_name(user) in _MOVES
        for node in () if moves else user.all_input_nodes:
            if node not in parts or node in added:
                continue
            with editor.at(node):
                added[node] = editor.call(op_folder.added_up, parts[node])
        with editor.at(user):
            editor.replace(user, editor.copy(user, parts if moves else added))


_MOVES = ("redistribute", "prim_redistribute")  # the second before torch 2.13


def _spread(said: str, node: Node) -> Decline:
    hint = "cut the embedding by RowwiseParallel or ColwiseParallel, with ids that every rank has"
    return Decline("tensor_parallel_embedding", said, hint, node)


def _tokens(info: GraphInfo, call: Call) -> int:
    ids = info.value(call.args["indices"])
    return max(math.prod(compat.size_hint(size) for size in ids.shape), 1)


def _sentence(info: GraphInfo, match: Table) -> str:
    weight = info.value(match.weight)
    name = op_folder.engine_for(weight.device, weight.dtype)
    engine = f"engine {name}: {op_folder.ENGINES[name]}"
    is_by_rows, here = op_folder.parts_of(weight)[0] > 1, ""
    if is_by_rows:
        first, count = op_folder.first_row_of(weight), compat.local_part(weight).shape[0]
        rows = f"rows {first} to {first + count - 1}" if count else "none"
        here = f" on several ranks, {rows} of {weight.shape[0]} here,"
    if match.heads:
        return (
            f"embedding and head share their weight{here} -> memeff::embedding_tied, which adds "
            f"the embedding's gradient into the head's; {engine}"
        )
    what = "is of these alone" if is_by_rows else "has no fp32 copy"
    return f"embedding{here} -> memeff::embedding, whose gradient {what}; {engine}"
