"""Decodings of a compiled graph, several in one launch.

    before: q = decode(Q, at=x); y = mm(x, q); k = decode(K, at=x); z = mm(x, k)
    after:  q, k = decode_together([Q, K], at=[x]); y = mm(x, q); z = mm(x, k)

The GPU decodes a small weight in less time than the host takes to launch anything. So decodings are
gathered where none needs what comes of another, a few MiB of them: what is decoded early is memory.
This works on what AOTAutograd made, forward and backward, and not on what Dynamo captured: there
the decodings of the backward are not to be seen.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Graph, Node

from ... import compat
from ...kernels.coded_weight import (
    MOST_TOGETHER,
    coded_weight_decode,
    coded_weight_decode_together,
)

MOST_BYTES = 32 << 20
"""Of decoded weights that come of one launch; larger ones keep the GPU busy for long enough."""


def gather(graph: Graph) -> None:
    """Gather the decodings of a graph of AOTAutograd's."""
    for group in _groups(graph):
        if len(group) > 1:
            _replace(graph, group)
    compat.sort_graph(graph)


def _groups(graph: Graph) -> list[list[Node]]:
    """Return decodings that need nothing of each other, in order."""
    found: list[list[Node]] = []
    group: list[Node] = []
    behind: set[Node] = set()  # what needs anything of the group
    taken = 0
    for node in graph.nodes:
        size = _bytes(node)
        if size:
            fits = len(group) < MOST_TOGETHER and taken + size <= MOST_BYTES
            if not group or not fits or behind.intersection(node.all_input_nodes):
                group, behind, taken = [], set(), 0
                found.append(group)
            group.append(node)
            behind.add(node)
            taken += size
        elif behind.intersection(node.all_input_nodes):
            behind.add(node)
    return found


def _bytes(node: Node) -> int:
    """Return the bytes that a decoding of a weight in one piece makes, 0 of any other node."""
    if node.target is not coded_weight_decode:
        return 0
    parts, _, size, *_ = node.args
    assert isinstance(parts, Sequence)
    if len(parts) != 1 or not isinstance(size, Sequence) or len(size) != 2:
        return 0
    return compat.size_hint(size[0]) * compat.size_hint(size[1]) * 2


def _replace(graph: Graph, group: Sequence[Node]) -> None:
    pieces = [each for node in group for each in node.args[0]]  # type: ignore[union-attr]
    sizes = [each for node in group for each in node.args[2]]  # type: ignore[union-attr]
    at = list(dict.fromkeys(each for node in group for each in node.args[3:]))
    at += [each for node in group for each in node.kwargs.values() if each not in at]
    with graph.inserting_before(group[0]):
        several = graph.call_function(
            coded_weight_decode_together, (pieces, group[0].args[1], sizes, at)
        )
        several.meta = {"val": [node.meta["val"] for node in group]}
        for place, node in enumerate(group):
            one = graph.call_function(operator.getitem, (several, place))
            one.meta = dict(node.meta)
            node.replace_all_uses_with(one)
    for node in group:
        graph.erase_node(node)
