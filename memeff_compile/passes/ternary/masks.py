"""Recognize the mask that selects the half of each token's elements with the largest magnitudes.

The mask is x.abs() >= the (K / 2)-th largest magnitude."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from ... import compat
from ..graph.canonical import aten, call_of, read_one


def read_larger_half(node: Node) -> tuple[Node, list[Node]] | None:
    """Recognize `x.abs() >= x.abs().topk(K // 2).values[..., -1:]`.

    The graph may cast this mask to another dtype, and may cast x to a wider dtype before `abs`. For
    such a mask, return x and the nodes of the mask; for any other node, return None. A mask
    made by scattering the indices of topk is not recognized, because such a mask selects other
    elements if magnitudes are equal.
    """
    chain: list[Node] = []
    node = _without_casts(node, chain)
    if (call := call_of(node, aten.ge.Tensor)) is None:
        return None
    size, least = call.args["self"], call.args["other"]
    chain.append(node)
    source = _absolute(size, chain)
    least_of = _least(least, chain)
    if source is None or least_of is None:
        return None
    values, is_by_place = least_of
    top = behind_item(values)
    if (ranked := call_of(top, aten.topk.default)) is None:
        return None
    chain += dict.fromkeys((values, top))
    columns = compat.example_value(source).shape[-1]
    count = compat.known_number(ranked.args["k"])
    is_half = isinstance(columns, int) and count == max(1, columns // 2)
    is_whole = _is_last(ranked.args["dim"], source) and ranked.args["largest"]
    if is_by_place and not ranked.args["sorted"]:  # any of them may be last
        return None
    if not is_half or not is_whole or _absolute(ranked.args["self"], chain) is not source:
        return None
    return source, chain


def _least(node: Node, chain: list[Node]) -> tuple[Node, bool] | None:
    """Recognize a node that selects the last or the smallest value along the last axis, with
    keepdim.

    Return the tensor from which the node selects, and whether the node selects the last value. The
    last value is the smallest one only if the tensor is sorted.
    """
    call = read_one(node)
    if call is None:
        return None
    chain.append(node)
    values: Node = call.args["self"]
    if call.op is aten.slice.Tensor:
        count = compat.example_value(values).shape[-1]
        is_end = call.args["end"] is None or call.args["end"] >= (1 << 31)
        is_last = call.args["start"] in (-1, count - 1) and is_end and call.args["step"] == 1
        return (values, True) if is_last and _is_last(call.args["dim"], values) else None
    if call.op is aten.amin.default and call.args["keepdim"]:
        axes = call.args["dim"]
        return (values, False) if len(axes) == 1 and _is_last(axes[0], values) else None
    return None


def _absolute(node: Node, chain: list[Node]) -> Node | None:
    if (call := call_of(node, aten.abs.default)) is None:
        return None
    if node not in chain:
        chain.append(node)
    return _without_casts(call.args["self"], chain, to_wider=True)


def _without_casts(node: Node, chain: list[Node], *, to_wider: bool = False) -> Node:
    """Go back from a node through casts, and return the node that is cast; with `to_wider`, go only
    through casts that preserve all values.
    """
    while (call := call_of(node, aten.to.dtype)) is not None:
        source: Node = call.args["self"]
        before, after = (compat.example_value(n).dtype for n in (source, node))
        if to_wider and after != before and after.itemsize <= before.itemsize:
            break
        if node not in chain:
            chain.append(node)
        node = source
    return node


def behind_item(node: Node) -> Node:
    """If `node` takes the first of several results of a call, return the call, otherwise `node`
    itself."""
    is_first = node.target is operator.getitem and node.args[1] == 0
    whole = node.args[0] if is_first else node
    return whole if isinstance(whole, Node) else node


def _is_last(axis: Any, node: Node) -> bool:
    return axis in (-1, compat.example_value(node).dim() - 1)
