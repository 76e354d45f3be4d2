"""Recognize the operations around linear layers with packed ternary weights: a gate and a norm
before them, an addition after them.

    relu(gate) ** 2 * up -> x * rsqrt(mean(x ** 2) + eps) * weight -> ternary_linear -> + residual

Each of these operations would be a separate small kernel, and small kernels dominate the time of a
decoding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ..graph.canonical import Call, aten, call_of, read_one
from ..graph.graph_info import same_shape
from .chains import both, other_user


@dataclass(frozen=True)
class Entering:
    """The nodes that compute a linear layer's input: a gate, an RMS norm, both or neither.

    The gate is the product `relu(source) ** 2 * up` in a gated MLP with squared ReLU."""

    source: Node  # the input: x, or the gate where `up` is given
    up: Node | None = None  # the other factor of a squared-ReLU gate, or None
    norm: Node | None = None  # the weight of an RMS norm, or None
    eps: Any = 0.0  # the norm's eps as in the graph: a number, or the node of one
    chain: tuple[Node, ...] = ()  # nodes from the linear's input backwards, starting with the input


def read_entering(node: Node, users: Sequence[Node]) -> Entering:
    """Recognize the norm and the gate that precede `node`; all users of `node` are in `users`.

    If a node of the norm or gate has other users, the graph must compute this node anyway, so the
    node is not included.
    """
    found = Entering(node)
    norm = _norm(node)
    if norm is not None and set(node.users) <= set(users):
        source, weight, eps, chain = norm
        if other_user(chain, node) is None:
            found = Entering(source, None, weight, eps, tuple(chain))
    gate = _gate(found.source)
    if gate is not None and set(found.source.users) <= {*found.chain, *users}:
        source, up, chain = gate
        if other_user(chain, found.source) is None:
            found = replace(found, source=source, up=up, chain=(*found.chain, *chain))
    return found


def _norm(node: Node) -> tuple[Node, Node, Any, list[Node]] | None:
    """Recognize `weight * (x.float() * rsqrt(mean(x ** 2) + eps)).to(x.dtype)`."""
    value = compat.example_value(node)
    for weight, normed in _factors(node):
        held = compat.example_value(weight)
        is_given = weight.op in ("placeholder", "get_attr")
        if not is_given or not same_shape(held.shape, value.shape[-1:]):
            continue
        chain = [node]
        scaled = _without_cast(normed, chain)
        for wide, factor in _factors(scaled):
            source = _without_cast(wide, branch := [scaled])
            eps = _inverse_root(factor, source, branch)
            ends = (node, weight, normed, source)  # a cast of `normed` may round further than these
            kinds = {compat.example_value(end).dtype for end in ends}
            if eps is not None and len(kinds) == 1 and _are_float32(scaled, wide, factor):
                return source, weight, eps, [*chain, *branch]
    return None


def _inverse_root(node: Node, source: Node, chain: list[Node]) -> Any:
    """Recognize `rsqrt(source.float().pow(2).mean(-1, keepdim=True) + eps)`; return eps."""
    if (root := call_of(node, aten.rsqrt.default)) is None:
        return None
    total = root.args["self"]
    sum_ = read_one(total)
    if sum_ is None or _name(sum_) != "add" or sum_.args.get("alpha", 1) != 1:
        return None
    mean, eps = sum_.args["self"], sum_.args["other"]
    reduced = read_one(mean)
    if reduced is None or _name(reduced) != "mean" or compat.known_number(eps) is None:
        return None
    squared = reduced.args["self"]
    axes, rank = reduced.args.get("dim"), compat.example_value(squared).dim()
    is_last = axes in ([-1], (-1,), [rank - 1], (rank - 1,))
    if not is_last or not reduced.args.get("keepdim") or reduced.args.get("dtype") is not None:
        return None
    base = _squared(squared)
    if base is None or not _are_float32(base, squared, mean, total):
        return None
    chain += [node, total, mean, squared]
    return eps if _without_cast(base, chain) is source else None


def _gate(node: Node) -> tuple[Node, Node, list[Node]] | None:
    """Recognize `relu(gate) ** 2 * up`, in which both tensors have the same shape and dtype."""
    for left, up in _factors(node):
        base = _squared(left)
        active = None if base is None else read_one(base)
        if base is None or active is None or active.op is not aten.relu.default:
            continue
        values = [compat.example_value(n) for n in (active.args["self"], up, node)]
        if _are_alike(values):
            return active.args["self"], up, [node, left, base]
    return None


def _squared(node: Node) -> Node | None:
    """Return the operand of `node` if the node is a square, or None."""
    call = read_one(node)
    if call is None:
        return None
    base = call.args.get("self")
    is_square = (
        call.op is aten.square.default
        or (_name(call) == "pow" and call.args.get("exponent") == 2)
        or (_name(call) == "mul" and call.args.get("other") is base)
    )
    return base if is_square and isinstance(base, Node) else None


def _factors(node: Node) -> list[tuple[Node, Node]]:
    """Return the operands of a product of two tensors, in both orders."""
    call = read_one(node)
    return list(both(call)) if call is not None and call.op is aten.mul.Tensor else []


def _are_alike(values: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are known to have the same shape and dtype."""
    first, *others = values
    return all(v.dtype == first.dtype and same_shape(v.shape, first.shape) for v in others)


def _are_float32(*nodes: Node) -> bool:
    return all(compat.example_value(node).dtype == torch.float32 for node in nodes)


def _name(call: Call) -> str:
    return str(compat.schema(call.op).name.split("::")[-1])


def _without_cast(node: Node, chain: list[Node]) -> Node:
    """If `node` is a cast, record the cast and return its operand; otherwise return the node."""
    if (call := call_of(node, aten.to.dtype)) is None:
        return node
    if node not in chain:
        chain.append(node)
    source: Node = call.args["self"]
    return source


_ACTIVATIONS = "relu silu gelu sigmoid square pow mul to".split()
_MOST_ACTIVATIONS = 4


def read_gate(results: Sequence[Node]) -> list[Node] | None:
    """Return the activation functions after two linear layers (gate and up) whose results are
    multiplied.

    The list does not contain the multiplication. Return None if the graph has another form, or if
    another node reads the results of the linear layers or of the activation functions.
    """
    if len(results) != 2:
        return None
    chains = [_activations(node) for node in results]
    ends = [chain[-1] for chain in chains]
    users = [list(end.users) for end in ends]
    if any(len(found) != 1 for found in users) or users[0] != users[1] or ends[0] is ends[1]:
        return None
    if (call := call_of(users[0][0], aten.mul.Tensor)) is None:
        return None
    if {call.args["self"], call.args["other"]} != set(ends):
        return None
    return [node for chain in chains for node in chain[1:]]


def _activations(node: Node) -> list[Node]:
    """Return a node, followed by the activation functions that are applied to its value in turn.

    The list ends before a function that has a second operand, or whose operand another node also
    reads.
    """
    found = [node]
    for _ in range(_MOST_ACTIVATIONS):
        users = list(found[-1].users)
        call = read_one(users[0]) if len(users) == 1 else None
        if call is None or _name(call) not in _ACTIVATIONS:
            break
        if any(other is not found[-1] for other in users[0].all_input_nodes):
            break
        found.append(users[0])
    return found


def read_added(item: Node) -> tuple[Node, Node] | None:
    """Return the addition that is the only user of a result, and the addition's other operand; or
    None."""
    users: list[Any] = list(item.users)
    call = read_one(users[0]) if len(users) == 1 else None
    if call is None or call.op is not aten.add.Tensor or call.args.get("alpha", 1) != 1:
        return None
    left, right = call.args["self"], call.args["other"]
    other = right if left is item else left
    if not isinstance(other, Node) or other is item:
        return None
    values = [compat.example_value(node) for node in (item, other, users[0])]
    return (users[0], other) if _are_alike(values) else None


_VIEWS = "view reshape transpose slice unsqueeze squeeze expand permute contiguous clone to alias"
_COMPUTED = "add mul embedding linear ternary_linear kv_cache_attention"


def is_computed(node: Node) -> bool:
    """Return whether it is certain that a kernel of this graph computes the value of a node.

    The node must be neither an input nor a view of an input.
    """
    for _ in range(16):
        if node.op in ("placeholder", "get_attr") or not node.all_input_nodes:
            return False
        call = read_one(node)
        name = _name(call) if call is not None else getattr(node.target, "__name__", "")
        if name.split(".")[0] in (*_COMPUTED.split(), "scaled_dot_product_attention"):
            return True
        if name not in (_VIEWS.split() if call is not None else ("getitem",)):
            return False
        node = node.all_input_nodes[0]
    return False
