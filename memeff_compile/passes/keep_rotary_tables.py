"""Make Inductor compute the cosines and sines of positions (rotary tables) only once.

Otherwise the kernels of every layer would compute them again.

    before: c = to(cos(angles)); layer 1: q * c + ..; layer 2: q * c + ..
    after:  c = as_strided(to(cos(angles)), ..); layer 1: q * c + ..; layer 2: q * c + ..

The pass does not change any result. A cosine table is a pointwise function of the positions, and
Inductor recomputes pointwise values in every kernel that reads them. So each layer, forward and
backward, would compute the cosine of each angle once per head. If a node depends on the strides of
a tensor, Inductor must store the tensor in memory. So the pass inserts a view (as_strided) that
depends on the strides. The view has the same sizes and strides as the table, so it takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch.fx import Node

from .. import compat
from ..kernels.device import where_it_runs
from .graph.base import Decline, Done, GraphPass
from .graph.canonical import aten, named, read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo

FEWEST_READERS = 3  # with fewer layers the gain is too small to report
# Computing smaller tables, as in a decoding step, takes less time than reading them.
FEWEST_NUMBERS = 1 << 16

_WAVES = named("cos.default sin.default")
_MAX_STEPS = 6

Tables: TypeAlias = "tuple[Node, ...]"  # the tables of a graph


class KeepRotaryTables(GraphPass):
    name = "keep_rotary_tables"

    def enabled(self, info: GraphInfo) -> bool:
        """Return whether the option memeff.rotary_tables is on, and Inductor compiles the graph.

        Without this pass, Inductor computes the tables of cosines and sines again in every kernel
        that reads them."""
        return super().enabled(info) and info.options.inner == "inductor"

    def find(self, info: GraphInfo) -> Iterable[Tables | Decline]:
        """Yield all tables of cosines and sines in the graph as one match."""
        found = dict.fromkeys(
            table
            for node in info.visit(info.gm.graph.nodes)
            if _is_wave(info, node) and (table := _table(info, node)) is not None
        )
        if found:
            yield tuple(found)

    def places(self, match: Tables) -> Sequence[Node]:
        return match

    def parts(self, match: Tables) -> Sequence[Tables]:
        return [(table,) for table in match]

    def rewrite(self, info: GraphInfo, match: Tables, editor: Editor) -> Done:
        """Insert a view of each table, and make the nodes that read the table read the view.

        The view has the same layout as the table."""
        readers = 0
        for table in match:
            users = _readers(table)
            value = info.value(table)
            with editor.at(table.next, like=table):
                sizes = [editor.size(size) for size in value.shape]
                strides = [editor.size(stride) for stride in value.stride()]
                kept = editor.call(aten.as_strided.default, table, sizes, strides)
            editor.reroute(users, table, kept)
            readers = max(readers, len(users))
        sentence = (
            f"cosines and sines of positions are kept in memory for their {readers} readers, "
            "instead of being computed by each"
        )
        return Done(match[0], sentence, sites=len(match))

    def dead(self, match: Tables) -> Sequence[Node]:
        return ()  # all that was there is still read


def _is_wave(info: GraphInfo, node: Node) -> bool:
    """Return whether `node` computes cosines or sines on a GPU, from a value without a
    gradient."""
    call = read_one(node) if node.op in ("call_function", "call_method") else None
    value = info.tensor(node)
    if call is None or call.op not in _WAVES or value is None or value.requires_grad:
        return False
    angles = info.tensor(call.args["self"])
    has_gradient = angles is None or angles.requires_grad
    return not has_gradient and where_it_runs(value.device).type == "cuda"


def _table(info: GraphInfo, wave: Node) -> Node | None:
    """Return the node from which layers read a table of cosines or sines.

    This is the node that computes the table, or the scale or cast that follows this node. If too
    few layers read the node, return None.
    """
    table = wave
    for _ in range(_MAX_STEPS):
        users = _readers(table)
        if len(users) != 1:
            break
        if not _is_pointwise(users[0]):
            return None
        table = users[0]
    value = info.tensor(table)
    if value is None or not compat.is_fake(value) or value.requires_grad:
        return None
    numbers = math.prod(compat.size_hint(size) for size in value.shape)
    is_large = numbers >= FEWEST_NUMBERS and value.is_contiguous()
    is_written = any(info.may_write(write, (table,)) for write in info.writes)
    return table if len(_readers(table)) >= FEWEST_READERS and is_large and not is_written else None


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read `node`, without the graph's output node.

    The pass does not change the output node."""
    return [user for user in node.users if user.op != "output"]


def _is_pointwise(node: Node) -> bool:
    """Return whether a node casts its operand, or multiplies it by a number."""
    call = read_one(node)
    if call is None:
        return False
    if call.op.overloadpacket is aten.to:
        return True
    factor = call.args.get("other")
    is_tensor = isinstance(factor, Node) and isinstance(compat.example_value(factor), torch.Tensor)
    return call.op.overloadpacket is aten.mul and not is_tensor
