"""Find the original tensor of keys or values whose heads were repeated to match the number of query
heads."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph.canonical import aten, call_of, read_one
from ..graph.graph_info import GraphInfo, same_shape

_MERGES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
# Ops that return their operand; the result of index_copy_ is the cache it wrote to.
_SAME = (aten.index_copy_.default, aten.contiguous.default, aten.alias.default)
REPEATS = (aten.repeat_interleave.self_int, *_MERGES)  # the last op of a chain that repeats heads


def without_repeat(info: GraphInfo, node: Node) -> tuple[list[Node], Node, Any] | None:
    """Return the nodes up to `node` that repeat heads, the node before these nodes, and how often
    each head is repeated.
    """
    call = read_one(node)
    if call is None:
        return None
    source = call.args.get("self")
    before = info.tensor(source)
    if before is None or not isinstance(source, Node):
        return None
    if call.op in _SAME:
        return [node], source, 1
    if call.op is aten.repeat_interleave.self_int:
        times, dim = call.args["repeats"], call.args["dim"]
        is_heads = isinstance(dim, int) and before.dim() == 4 and dim % 4 == 1
        return ([node], source, times) if is_heads and isinstance(times, int) else None
    if call.op in _MERGES:
        return _without_expand(info, node, source)
    return None


def _without_expand(info: GraphInfo, node: Node, wide: Node) -> tuple[list[Node], Node, Any] | None:
    """Recognize `cache[:, :, None].expand(B, G, r, N, D).reshape(B, G * r, N, D)` as a repetition
    of heads."""
    expand = call_of(wide, aten.expand.default)
    added = None if expand is None else call_of(expand.args["self"], aten.unsqueeze.default)
    if expand is None or added is None or added.args["dim"] not in (2, -3):
        return None
    narrow, source = expand.args["self"], added.args["self"]
    cache, spread, whole = (info.tensor(n) for n in (source, wide, node))
    if cache is None or spread is None or whole is None or cache.dim() != 4 or spread.dim() != 5:
        return None
    b, g, n, d = cache.shape
    times = spread.shape[2]
    is_repeat = same_shape(spread.shape, (b, g, times, n, d)) and same_shape(
        whole.shape, (b, g * times, n, d)
    )
    return ([node, wide, narrow], source, times) if is_repeat else None
