"""Finds attention in a graph: calls of scaled_dot_product_attention, and chains that spell it out.

    scores = matmul(q, k.transpose(-1, -2)) * scale
    scores = tanh(scores / softcap) * softcap [+ mask]
    out = matmul(dropout(softmax(scores, -1).to(dtype), 0.0), v)

A chain is taken whole: nothing else may use what stands between its two products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ... import compat
from ..graph.base import Decline, mutated
from ..graph.canonical import Call, aten, call_of, named, read_one
from ..graph.graph_info import GraphInfo, node_name, same_shape
from .mask_algebra import MASKED

MAX_STEPS = 10


@dataclass
class Site:
    """One attention: what goes in, how it is masked and scaled, and the nodes that spell it."""

    node: Node  # the node that has the result
    query: Node
    key: Node
    value: Node
    mask: Node | None = None
    takes_away: bool = False  # whether it is true where a key is taken away, as in ``masked_fill``
    # what takes the place of masked scores; None where the mask is added or a call's own
    fill: float | None = None
    masked_in: torch.dtype | None = None  # the dtype in which a chain adds its mask or fills it in
    softcap: float = 0.0  # what caps the scores; 0 for nothing
    causal: bool = False
    scale: Any = None
    grouped: bool = False
    between: list[Node] = field(default_factory=list)  # operands and result; empty for a call
    # nodes of symbols that were taken for the numbers they stand for: under ``dynamic=True`` the
    # scale, the softcap and the dropout of a config are symbols
    numbers: list[Node] = field(default_factory=list)

    @property
    def operands(self) -> tuple[Node, Node, Node]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def inputs(self) -> list[Node]:
        """The operands, and the mask where there is one."""
        return [*self.operands, *_nodes(self.mask)]


def find_sites(info: GraphInfo) -> Iterator[Site | Decline]:
    """Yield every attention of a graph, and what looks like one and cannot be served."""
    for node in info.visit(info.gm.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        found: Site | Decline | None = None
        if node_name(node) == "scaled_dot_product_attention":
            found = _single_call(info, node)
        elif node_name(node) in ("softmax", "_softmax"):
            found = _chain(info, node)
        if found is not None:
            yield found


def _single_call(info: GraphInfo, node: Node) -> Site | Decline | None:
    if (call := call_of(node, aten.scaled_dot_product_attention.default)) is None:
        return None
    given = call.args
    if any(info.tensor(given[name]) is None for name in ("query", "key", "value")):
        return None
    if compat.known_number(given["dropout_p"]) != 0:
        return dropout_active(node) if given["attn_mask"] is not None else None
    scale = compat.known_number(given["scale"])
    return Site(
        node,
        given["query"],
        given["key"],
        given["value"],
        given["attn_mask"],
        causal=given["is_causal"],
        scale=given["scale"] if scale is None else scale,
        grouped=given["enable_gqa"],
        numbers=_nodes(given["dropout_p"], *([] if scale is None else [given["scale"]])),
    )


def _nodes(*values: Any) -> list[Node]:
    return [value for value in values if isinstance(value, Node)]


def dropout_active(node: Node | None, hint: str = "") -> Decline:
    """Return the answer where weights are dropped."""
    said = "attention dropout is active, and another kernel would drop other weights"
    return Decline("dropout_active", said, hint or "train with an attention dropout of 0", node)


@dataclass
class _Weights:
    """What becomes of the softmax: the product with the values."""

    product: Node
    value: Node
    steps: list[Node]
    numbers: list[Node]


@dataclass
class _Scores:
    """What the softmax is of: the product of queries and keys, scaled and masked."""

    product: Node
    query: Node
    key: Node
    scale: float
    softcap: float
    masking: _Masking
    steps: list[Node]
    numbers: list[Node]


class _Masking(NamedTuple):
    """How a chain masks its scores."""

    mask: Node | None = None
    takes_away: bool = False
    fill: float | None = None
    dtype: torch.dtype | None = None


def _chain(info: GraphInfo, softmax: Node) -> Site | Decline | None:
    call, tensor = read_one(softmax), info.tensor(softmax)
    if call is None or call.op is not aten.softmax.int or tensor is None or tensor.dim() != 4:
        return None
    if call.args["dim"] not in (-1, 3):
        return None
    weights = _follow_weights(softmax)
    if weights is None:
        return None
    scores = _follow_scores(info, call.args["self"], call.args["dtype"])
    if scores is None:
        return None
    if isinstance(scores, Decline):
        return _at(scores, softmax)
    if isinstance(weights, Decline):
        return _at(weights, softmax)
    for step in weights.steps:
        if node_name(step) in ("getitem", "slice", "narrow"):
            return _at(_unknown_step(step), softmax)
    key = _untransposed(scores.key)
    if key is None or not _shapes_agree(info, scores.query, key, weights.value):
        return None
    site = Site(
        weights.product,
        scores.query,
        key,
        weights.value,
        *scores.masking,
        scores.softcap,
        scale=scores.scale,
        between=[scores.key, scores.product, *scores.steps, softmax, *weights.steps],
        numbers=[*scores.numbers, *weights.numbers],
    )
    return _reason_against(info, site, scores) or site


def _at(decline: Decline, softmax: Node) -> Decline:
    return replace(decline, node=decline.node or softmax)


def _product(node: Any) -> tuple[Node, Node] | None:
    if (call := call_of(node, aten.matmul.default)) is None:
        return None
    left, right = call.args["self"], call.args["other"]
    return (left, right) if isinstance(left, Node) and isinstance(right, Node) else None


_PASSES_ON = named("to dropout contiguous clone alias slice")


def _follow_weights(softmax: Node) -> _Weights | Decline | None:
    current, steps, others = softmax, list[Node](), list[Node]()
    for _ in range(MAX_STEPS):
        forward = [user for user in current.users if _passes_on(user, current)]
        multiplied = ((user, _multiplied(user, current)) for user in current.users)
        products = [(user, value) for user, value in multiplied if value is not None]
        onward = next(iter([*(user for user, _ in products), *forward]), None)
        if onward is None:
            return None
        others += [user for user in current.users if user is not onward]
        if products and others:
            return weights_used(others[0], "do not ask for attention weights (output_attentions)")
        if products:
            rates = {step: rate for step in steps if (rate := _dropout(step)) is not None}
            active = (step for step, rate in rates.items() if compat.known_number(rate) != 0)
            step = next(active, None)
            weights = _Weights(*products[0], steps, _nodes(*rates.values()))
            return weights if step is None else dropout_active(step)
        current = onward
        steps.append(current)
    return None


def _passes_on(node: Node, weights: Node) -> bool:
    call = read_one(node)
    if call is None or call.op.overloadpacket not in _PASSES_ON or not _is_floating(node):
        return False
    return call.args.get("self", call.args.get("input")) is weights


def _is_floating(node: Node) -> bool:
    value = compat.example_value(node)
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _multiplied(node: Node, weights: Node) -> Node | None:
    """Return what the weights are multiplied with in this node, or None."""
    left, right = _product(node) or (None, None)
    return right if left is weights and right is not weights else None


def _dropout(node: Node) -> Any:
    """Return the rate of an active dropout; None for any other node."""
    call = read_one(node)
    if call is None or call.op.overloadpacket is not aten.dropout or call.args["train"] is False:
        return None
    return call.args["p"]


def weights_used(user: Node, hint: str) -> Decline:
    """Return the answer where something else than the product with the values reads weights."""
    said = f"the attention weights are also used by `{node_name(user)}`, so they have to be there"
    return Decline(f"weights_used({node_name(user)})", said, hint)


def _follow_scores(
    info: GraphInfo, scores: Any, dtype: torch.dtype | None
) -> _Scores | Decline | None:
    """Read what a softmax, which may compute in another dtype, is of."""
    if not _leads_to_product(scores):
        return None
    current, steps, numbers = scores, list[Node](), list[Node]()
    masking, factors = _Masking(), _Factors()
    casts = [] if dtype is None else [dtype]
    for _ in range(MAX_STEPS):
        extra = list(current.users)[1:]
        if extra:
            name = node_name(extra[0])
            said = f"the attention scores are also used by `{name}`, so they have to be there"
            return Decline(f"scores_used({name})", said)
        operands = _product(current)
        if operands is not None:
            scale, softcap = factors.result()
            return _Scores(current, *operands, scale, softcap, masking, steps, numbers)
        steps.append(current)
        call = read_one(current)
        assert call is not None  # it leads to a product
        op, given = call.op.overloadpacket, call.args
        if op in (aten.mul, aten.div):
            factor = compat.known_number(given["other"])
            if factor is None or not factor > 0:
                what = f"`{node_name(current)}` scales the scores by something else than a "
                hint = "scale by a Python number"
                return Decline("scale_not_constant", f"{what}positive number", hint)
            numbers += _nodes(given["other"])
            factors.add(factor, is_division=op is aten.div)
        elif op is aten.tanh:
            if factors.cap is not None:
                return _unknown_step(current)
            factors = _Factors(cap=factors.product())
        elif op in (aten.add, aten.masked_fill, aten.where):
            found = _masking(info, call, current)
            if found is None or masking.mask is not None or factors != _Factors():
                return _unknown_step(current)
            masking = _seen_through(found, casts)
        elif op is not aten.to or not _is_floating(current):
            return _unknown_step(current)
        elif masking.mask is None:
            casts.append(compat.example_value(current).dtype)
        current = _scores_operand(call)
    return None


@dataclass
class _Factors:
    """The numbers between a product and its mask, read backwards: cap, tanh, and the scale."""

    multiplied: list[float] = field(default_factory=list)
    divided: list[float] = field(default_factory=list)
    cap: float | None = None

    def add(self, factor: float, *, is_division: bool) -> None:
        """Note one more factor."""
        (self.divided if is_division else self.multiplied).append(float(factor))

    def result(self) -> tuple[float, float]:
        """Return the scale of the products and the softcap, 0 for none."""
        if self.cap is None:
            return self.product(), 0.0
        if self.cap in self.divided:  # divided by the cap: what is left is the scale, unrounded
            self.divided.remove(self.cap)
            return self.product(), self.cap
        return self.product() * self.cap, self.cap

    def product(self) -> float:
        """Return what is multiplied by so far; under a tanh that is the cap."""
        return math.prod(self.multiplied) / math.prod(self.divided)


def _leads_to_product(node: Any) -> bool:
    for _ in range(MAX_STEPS):
        if _product(node) is not None:
            return True
        call = read_one(node)
        if call is None or call.op.overloadpacket not in _STEPS:
            return False
        node = _scores_operand(call)
    return False


_STEPS = named("to mul div add tanh masked_fill where cat sub")


def _scores_operand(call: Call) -> Any:
    """Return the operand of a step that the scores come from."""
    given = call.args
    if call.op.overloadpacket is aten.cat:
        return given["tensors"][0]
    if call.op.overloadpacket is aten.add and not _leads_to_product(given["self"]):
        return given["other"]
    return given["self"]


def _masking(info: GraphInfo, call: Call, step: Node) -> _Masking | None:
    given, op = call.args, call.op.overloadpacket
    dtype = compat.example_value(step).dtype
    if op is aten.add:
        mask = given["other"] if _scores_operand(call) is given["self"] else given["self"]
        tensor = info.tensor(mask)
        is_number = tensor is not None and tensor.dtype.is_floating_point
        return _Masking(mask, dtype=dtype) if is_number and given["alpha"] == 1 else None
    mask = given["mask" if op is aten.masked_fill else "condition"]
    fill = given["value" if op is aten.masked_fill else "other"]
    if not isinstance(fill, (int, float)) or not fill <= MASKED:
        return None
    number = float(fill) if fill >= torch.finfo(dtype).min else -math.inf
    return _Masking(mask, op is aten.masked_fill, number, dtype)


def _seen_through(masking: _Masking, casts: list[torch.dtype]) -> _Masking:
    """Return how scores are masked, without the dtype where later casts make it infinite."""
    assert masking.dtype is not None
    reach = torch.finfo(masking.dtype).max
    is_seen = all(torch.finfo(dtype).max >= reach for dtype in casts)
    return masking if is_seen else masking._replace(dtype=None)


def _unknown_step(node: Node) -> Decline:
    name = node_name(node)
    if name == "cat":
        return Decline("sinks", "the softmax has more columns than there are keys (sinks)")
    said = f"`{name}` between the two products is not a known scale, mask or cast"
    return Decline(f"unknown_step({name})", said)


def _untransposed(node: Node) -> Node | None:
    """Return the keys behind ``keys.transpose(-1, -2)``."""
    if (call := call_of(node, aten.transpose.int, aten.permute.default)) is None:
        return None
    if call.op is aten.transpose.int:
        is_last_two = {call.args["dim0"] % 4, call.args["dim1"] % 4} == {2, 3}
    else:
        is_last_two = [dim % 4 for dim in call.args["dims"]] == [0, 1, 3, 2]
    return call.args["self"] if is_last_two else None


def subclass(kind: str, node: Node | None = None) -> Decline:
    """Return the answer where an operand is a subclass of tensors."""
    if kind == "Tensor":  # neither a subclass nor fake: one that torch.func has wrapped
        said = (
            "torch.func (vmap, grad, jvp) transforms this attention; this pass has no rule for it"
        )
        hint = "give the operands a batch dimension in the place of vmap, and call backward()"
        return Decline("torch_func", said, hint, node)
    what = f"an operand of the attention is a {kind}, which this pass does not look into"
    return Decline(f"subclass_operand({kind})", what, node=node)


def have_one_size(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether all have four axes, one batch, and heads of one size."""
    q, k, v = query.shape, key.shape, value.shape
    return len(q) == len(k) == 4 and same_shape((*k, q[0], q[3]), (*v, k[0], k[3]))


def _shapes_agree(info: GraphInfo, query: Node, key: Node, value: Node) -> bool:
    tensors = [info.tensor(node) for node in (query, key, value)]
    q, k, v = (() if tensor is None else tuple(tensor.shape) for tensor in tensors)
    is_four = len(q) == len(k) == len(v) == 4
    return is_four and same_shape((*q[:2], q[3], *k[:3]), (*k[:2], k[3], *v[:3]))


def _reason_against(info: GraphInfo, site: Site, scores: _Scores) -> Decline | None:
    product, result = info.value(scores.product), info.value(site.node)
    if product.dtype != result.dtype or not result.dtype.is_floating_point:
        said = f"the first product is in {product.dtype} and the second in {result.dtype}"
        return Decline("dtype_changes", said, node=site.node)
    if info.regions[scores.product] != info.regions[site.node]:
        said = "gradients or autocast are switched between the two products"
        return Decline("region_mismatch", said, node=site.node)
    write = info.written_between(site.inputs, scores.product, site.node)
    what = "queries, keys, values or mask"
    return None if write is None else mutated(write, what, site.node)
