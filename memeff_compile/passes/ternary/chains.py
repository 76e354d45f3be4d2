"""Recognize the nodes that quantise an operand of a linear layer, as ternary training code does.

    x -> abs -> max or mean -> lower bound -> a scale; x * scale -> round -> clamp -> / scale

The max or mean is over one token (the last axis) or over a whole weight. A straight-through
estimator may surround these nodes, in one of these forms:

- `x + (q - x).detach()` or `(q + x) - x.detach()`;
- the same with q computed under no_grad;
- an autograd Function whose backward pass returns its gradient unchanged.

If this module recognizes all nodes that quantise the operand, the caller gets a description of the
quantisation. Otherwise the caller gets a sentence about the first node that does not fit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from ... import compat
from ...kernels.checks import short
from ...kernels.ternary_linear import KINDS, Quantizer
from ..graph.base import Decline
from ..graph.canonical import PREVIOUS, Call, aten, back_over, call_of, read, read_one
from ..graph.graph_info import node_name
from .masks import behind_item, read_larger_half

_STEPS = 16  # how many nodes back the search for a rounding goes
Unread: TypeAlias = Decline  # why a chain cannot be served


@dataclass(frozen=True)
class Quantized:
    """A value that the graph computes by quantising and dequantising another tensor."""

    source: Node  # the quantised tensor
    quantizer: Quantizer  # how tokens are quantised; for a weight, only eps and details matter
    is_weight: bool  # the scale is one for the whole tensor and the codes are -1, 0, 1
    is_straight: bool  # the gradient passes through unchanged
    chain: tuple[Node, ...]  # nodes between the source and the value, the value included
    numbers: tuple[Node, ...] = ()  # nodes of numbers that must not change


@dataclass
class _Chain:
    """The nodes that quantise a tensor, in the order from the last node to the first.

    The object also has the nodes that compute the numbers, such as scales, with which these nodes
    quantise.
    """

    nodes: list[Node] = field(default_factory=list)
    numbers: list[Node] = field(default_factory=list)

    def take(self, node: Node) -> Node:
        if node not in self.nodes:
            self.nodes.append(node)
        return node

    def number(self, value: Any) -> float:
        """Return a value as a number.

        For a symbol, return its value in the call for which the graph is compiled."""
        found = compat.known_number(value)
        if found is None:
            raise _Misfit("learned_scale", "one of its constants is computed")
        if isinstance(value, Node):
            self.numbers.append(value)
        return float(found)


class _Misfit(Exception):
    """The error that is raised if the nodes that quantise a tensor have an unsupported form."""

    def __init__(self, code: str, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.found = Unread(code, sentence, hint)


def _learned(sentence: str, which: str = "learned and running scales are") -> _Misfit:
    return _Misfit("learned_scale", sentence, f"{which} not served")


_ROUNDING = ("round", "sign")


def may_round(gm: GraphModule) -> bool:
    """Return whether any node of a graph or nested graph rounds a value or takes its sign."""
    graphs = (each.graph for each in gm.modules() if isinstance(each, GraphModule))
    return any(node_name(n).rstrip("_") in _ROUNDING for graph in graphs for n in graph.nodes)


def rounds(node: Any) -> bool:
    """Return whether a node, or a node from which its value is computed, rounds a value or takes
    its sign.

    The search goes at most `_STEPS` nodes back along each path. The search stops at `linear`,
    `matmul`, `embedding` and `scaled_dot_product_attention`. At an autograd Function, the search
    looks for `round` in the forward pass and goes no further back."""
    pending, seen = [(node, 0)], set()
    while pending:
        current, depth = pending.pop()
        if not isinstance(current, Node) or current in seen or depth > _STEPS:
            continue
        seen.add(current)
        name = node_name(current).rstrip("_")
        if current.op in ("call_function", "call_method") and name in _ROUNDING:
            return True
        if _is_function(current):
            body = _body(current, 0)
            if body is not None and any(node_name(n).rstrip("_") == "round" for n in body.nodes):
                return True
            continue
        if name in ("linear", "matmul", "embedding", "scaled_dot_product_attention"):
            continue
        pending += [(operand, depth + 1) for operand in current.all_input_nodes]
    return False


def read_quantized(node: Node) -> Quantized | Unread:
    """Return a description of the nodes that quantise a tensor and end in `node`."""
    try:
        return _read(node)
    except _Misfit as misfit:
        return misfit.found


def _read(node: Node) -> Quantized:
    chain = _Chain()
    value = _without_casts(chain, node)
    if _is_function(behind_item(value)):
        return _through_function(chain, value)
    for source, other in both(_call_of(value, "add")):
        found = _added_difference(chain, value, source, other)
        if found is not None:
            return found
    difference = _call_of(value, "sub")
    found = None if difference is None else _sum_less_source(chain, value, difference)
    if found is not None:
        return found
    source, quantizer, is_weight = _fake_quantized(chain, value)
    return Quantized(source, quantizer, is_weight, False, tuple(chain.nodes), tuple(chain.numbers))


def read_weight_scale(scale: Node) -> Quantized | Unread:
    """Recognize the scale of a whole weight, and return its description.

    The description has the weight from which the graph computes the scale. The description also
    says whether the graph multiplies or divides by the scale to get codes.
    """
    chain = _Chain()
    try:
        reading = read(scale)
        is_step = not reading or _base(reading[0]) != "reciprocal"
        statistic, levels = _scale(chain, scale, is_step=is_step)
        eps, adds_eps, reduced = _bounded(chain, statistic)
        is_mean, is_whole, measured = _statistic(chain, reduced)
        source, is_native = _source(chain, measured, measured)
    except _Misfit as misfit:
        return misfit.found
    if not is_mean or not is_whole or levels != 1.0 or chain.numbers:
        return Unread("unknown_range", "the scale is not one over the mean of the whole weight")
    how = Quantizer("int8", eps, adds_eps, is_step, is_native)
    return Quantized(source, how, True, True, tuple(chain.nodes))


def _added_difference(chain: _Chain, value: Node, source: Node, other: Node) -> Quantized | None:
    """Recognize `x + (q - x).detach()`, or the same without the detach if no operand has a
    gradient."""
    kept = list(chain.nodes)
    chain.take(value)
    difference = _without_detach(chain, other)
    call = _call_of(difference, "sub")
    if call is not None and call.args.get("alpha", 1) == 1:
        quantized, taken = call.args["self"], call.args["other"]
        is_cut = difference is not other or not _requires_grad(difference)
        if _is_same(taken, source) and isinstance(quantized, Node) and is_cut:
            chain.take(difference)
            return _straight(chain, quantized, source)
    chain.nodes = kept
    return None


def _sum_less_source(chain: _Chain, value: Node, call: Call) -> Quantized | None:
    """Recognize `(q + x) - x.detach()`, in which q has no gradient."""
    total, taken = call.args["self"], call.args["other"]
    if not isinstance(taken, Node) or call.args.get("alpha", 1) != 1:
        return None
    cut = _without_detach(_Chain(), taken)
    for source, quantized in both(_call_of(total, "add")):
        if _is_same(cut, source) and not _requires_grad(quantized) and not _requires_grad(taken):
            chain.take(value)
            chain.take(total)
            _without_detach(chain, taken)
            return _straight(chain, quantized, source)
    return None


def _straight(chain: _Chain, quantized: Node, source: Node) -> Quantized:
    """Recognize the nodes that quantise a tensor inside a straight-through estimator.

    The tensor to which the quantisation is applied must be the tensor x that the estimator adds.
    """
    end = _without_casts(chain, quantized)
    found, quantizer, is_weight = _fake_quantized(chain, end, source)
    if not _is_same(found, source):
        said = "what is quantised is not what the straight-through estimator adds back"
        raise _Misfit("other_source", said)
    return Quantized(source, quantizer, is_weight, True, tuple(chain.nodes), tuple(chain.numbers))


def _is_function(node: Any) -> bool:
    return (
        isinstance(node, Node)
        and isinstance(node.target, compat.HigherOrderOperator)
        and node.target.name() == "autograd_function_apply"
    )


def _body(node: Node, place: int) -> Any:
    """Return the graph of the forward pass (0) or backward pass (1) of an autograd Function's
    call."""
    named = node.args[place] if len(node.args) > place else None
    root = node.graph.owning_module
    if not isinstance(named, Node) or named.op != "get_attr" or root is None:
        return None
    body = getattr(root, str(named.target), None)
    return body.graph if isinstance(body, GraphModule) else None


def _through_function(chain: _Chain, item: Node) -> Quantized:
    """Recognize an autograd Function whose forward pass quantises and whose backward pass returns
    its gradient unchanged."""
    call = behind_item(item)
    forward, backward = _body(call, 0), _body(call, 1)
    operands = call.args[2:]
    other_form = "an autograd Function of another form quantises it"
    if forward is None or backward is None or len(operands) != 1 or len(call.users) != 1:
        raise _Misfit("autograd_function", other_form)
    if any(call.kwargs.get(name) for name in ("saved_for_backward_idx", "dirty_idx")):
        said = "the autograd Function that quantises it saves or writes tensors"
        raise _Misfit("autograd_function", said)
    if not _hands_gradient_on(backward):
        raise _Misfit(
            "backward_form",
            "the backward of the function that quantises it does more than pass the gradient on",
            "return grad_output itself, or its clone",
        )
    result: Any = forward.output_node().args[0]
    end = result[0][0] if isinstance(result, tuple) and len(result) == 2 else None
    if not isinstance(end, Node) or result[1]:
        raise _Misfit("autograd_function", other_form)
    inner = _Chain()
    source, quantizer, is_weight = _fake_quantized(inner, _without_casts(inner, end))
    if source.op != "placeholder":
        raise _Misfit("autograd_function", "the function quantises something computed inside it")
    user = other_user(inner.nodes, end)
    if user is not None:
        raise _Misfit("chain_reused", f"`{node_name(user)}` also uses a value of the chain")
    chain.take(item)
    chain.take(call)
    given: Any = operands[0]
    return Quantized(given, quantizer, is_weight, True, tuple(chain.nodes), tuple(inner.numbers))


def _hands_gradient_on(graph: Any) -> bool:
    """Return whether a backward graph only returns its argument, or a copy of it."""
    result = graph.output_node().args[0]
    while isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return placeholders[:1] == [back_over(result, (aten.clone.default, aten.alias.default))]


def _fake_quantized(
    chain: _Chain, end: Node, wanted: Node | None = None
) -> tuple[Node, Quantizer, bool]:
    """Recognize `clamp(round(x * s)) / s`; return x, its quantisation, and whether x is a weight.

    A mask that keeps the half of a token's elements with the largest magnitudes may be applied
    before or after the quantisation. If the graph quantises a masked tensor, x is usually the
    tensor without the mask. `wanted` is the tensor that the caller expects as x. If `wanted` is the
    masked tensor, x is the masked tensor.
    """
    kept, end = _without_mask(chain, end)
    source, how, is_weight = _rounded_and_scaled_back(chain, end)
    if kept is None and (wanted is None or not _is_same(source, wanted)):
        kept, source = _without_mask(chain, source)
    if kept is None:
        return source, how, is_weight
    if is_weight or how.kind != "int8":
        raise _Misfit("unknown_range", "the larger half is kept of values that are not INT8 tokens")
    if not _is_same(_behind_exact_casts(chain, source), _behind_exact_casts(chain, kept)):
        raise _Misfit("other_source", "the half that is kept is that of another tensor")
    return source, replace(how, kind="topk8"), False


def _without_mask(chain: _Chain, node: Node) -> tuple[Node | None, Node]:
    """Recognize `x * mask` or `where(mask, x, 0)`, with a mask that `read_larger_half` recognizes.

    Such a mask selects the half of each token's elements with the largest magnitudes. Return two
    tensors: the one from which the mask is computed, and the x to which the mask is applied. For
    any other node, return None and the node."""
    call = read_one(node)
    pairs: list[tuple[Any, Any]] = []
    if call is not None and call.op is aten.where.ScalarOther and call.args["other"] == 0:
        pairs = [(call.args["condition"], call.args["self"])]
    else:
        pairs = list(both(_call_of(node, "mul")))
    for mask, value in pairs:
        found = read_larger_half(mask)
        if found is not None:
            for part in (node, *found[1]):
                chain.take(part)
            return found[0], value
    return None, node


def _rounded_and_scaled_back(chain: _Chain, end: Node) -> tuple[Node, Quantizer, bool]:
    outer = _one(end, ("div", "mul"), "codes that are scaled back")
    chain.take(end)
    is_step = _base(outer) == "mul"
    codes, scale = _tensors(outer)
    if is_step and not _looks_clamped(codes):
        codes, scale = scale, codes
    low, high, scaled = _clamped(chain, codes)
    inner = _one(scaled, ("mul", "div"), "a value times or over its scale")
    if (_base(inner) == "div") != is_step:
        raise _Misfit("scale_form", "it is scaled in one way and scaled back in another")
    chain.take(scaled)
    value, again = _tensors(inner)
    if not is_step and again is not scale:
        value, again = again, value
    if again is not scale:
        raise _Misfit("scale_form", "it is scaled back by another scale than it was scaled by")
    statistic, levels = _scale(chain, scale, is_step=is_step)
    eps, adds_eps, reduced = _bounded(chain, statistic)
    is_mean, is_whole, measured = _statistic(chain, reduced)
    source, is_native = _source(chain, value, measured)
    _require_one_dtype(value, scaled, *([] if is_whole else [scale]))
    how = Quantizer("int8", eps, adds_eps, is_step, is_native)
    if is_whole:
        if not is_mean or (low, high) != (-1, 1) or levels != 1.0:
            raise _Misfit(
                "unknown_range",
                f"the weight is rounded to {low} .. {high} by a scale of the whole matrix; "
                "-1 .. 1 by the mean of the absolute values is needed",
            )
        return source, how, True
    for name, kind in KINDS.items():
        if kind.is_float or kind.keeps_half or kind.is_mean != is_mean:
            continue
        if (low, high) == (kind.low, kind.high) and abs(levels - kind.levels) < 1e-6:
            return source, replace(how, kind=name), False
    if (low, high) == (-1, 1):
        said = (
            "its codes are -1, 0, 1 with a scale per row, where one for all of a weight is served"
        )
        raise _Misfit("per_channel_scale", said, "take the mean of the whole matrix")
    statistic_name = "mean" if is_mean else "maximum"
    raise _Misfit(
        "unknown_range",
        f"it is rounded to {low} .. {high}, the {statistic_name} of the absolute values mapped to "
        f"{levels:g}; INT8 absmax (-128 .. 127, 127) and INT4 absmean (-8 .. 7, sqrt 7) are served",
    )


def are_codes(node: Node) -> bool:
    """Return whether a value is rounded and clamped, but not yet dequantised."""
    try:
        return _looks_clamped(node)
    except _Misfit:
        return False


def _looks_clamped(node: Node) -> bool:
    node = _without_casts(_Chain(), node, (*_FLOATS, *_SIGNED))
    is_sign = node_name(node).rstrip("_") == "sign"
    return is_sign or _call_of(node, "clamp", "round") is not None


def _clamped(chain: _Chain, node: Node) -> tuple[float, float, Node]:
    """Recognize a value that is rounded and clamped, in either order; return the bounds, and the
    value before both operations."""
    node = _without_casts(chain, node, (*_FLOATS, *_SIGNED))
    if node_name(node).rstrip("_") == "sign":
        raise _Misfit(
            "binary_weight",
            "it is reduced to its sign: two values, where ternary weights have three",
            "use round(w / mean(abs(w))).clamp(-1, 1)",
        )
    first = _one(node, ("clamp", "round"), "rounded and clamped codes")
    chain.take(node)
    inside = first.args["self"]
    if _base(first) == "clamp":  # values already rounded survive a cast; others do not
        inside = _without_casts(chain, inside)
    second = _one(inside, ("clamp", "round"), "rounded and clamped codes")
    chain.take(inside)
    by_name = {_base(call): call for call in (first, second)}
    if set(by_name) != {"clamp", "round"} or by_name["round"].args.get("decimals", 0):
        raise _Misfit("chain_form", "rounding and clamping of another form stand before it")
    low, high = (chain.number(by_name["clamp"].args[name]) for name in ("min", "max"))
    if not low.is_integer() or not high.is_integer():
        raise _Misfit("unknown_range", f"codes are clamped to {low:g} .. {high:g}, no integers")
    return low, high, second.args["self"]


def _scale(chain: _Chain, scale: Node, *, is_step: bool) -> tuple[Node, float]:
    """Recognize a scale `levels / t` or, with `is_step`, `t / levels`; return t and `levels`.

    The caller checks that t is the maximum or mean of absolute values, with a lower bound. The
    quantisation maps t to the number `levels`. With `is_step`, the graph divides by the scale
    instead of multiplying by the scale."""
    if is_step:
        call = _call_of(scale, "div")
        if call is None:
            return scale, 1.0
        if call.args.get("rounding_mode") is not None:
            raise _Misfit("chain_form", "a division that rounds stands before it")
        chain.take(scale)
        return call.args["self"], chain.number(call.args["other"])
    reading = read(scale) or ()
    names = [_base(call) for call in reading]
    if names[:1] != ["reciprocal"] or names[1:] not in ([], ["mul"]):
        raise _learned("its scale is not computed from the tensor itself")
    chain.take(scale)
    levels = 1.0
    if len(reading) == 2:
        if reading[1].args["self"] is not PREVIOUS:
            raise _Misfit("chain_form", "a scale of another form stands before it")
        levels = chain.number(reading[1].args["other"])
    return reading[0].args["self"], levels


def _bounded(chain: _Chain, node: Node) -> tuple[float, bool, Node]:
    """Recognize `t.clamp(min=eps)` or `t + eps`; return eps, whether eps is added, and t."""
    call = _call_of(node, "clamp", "clamp_min", "add")
    if call is None:
        said = "its scale is not a bounded maximum or mean of absolute values"
        raise _learned(said, "learned and running scales, and scales that may be zero, are")
    chain.take(node)
    if _base(call) == "add":
        if call.args.get("alpha", 1) != 1:
            raise _Misfit("chain_form", "a scale of another form stands before it")
        return chain.number(call.args["other"]), True, call.args["self"]
    if call.args.get("max") is not None:
        raise _Misfit("chain_form", "the scale is bounded above as well")
    return chain.number(call.args["min"]), False, call.args["self"]


def _statistic(chain: _Chain, node: Node) -> tuple[bool, bool, Node]:
    """Recognize a max or mean; return whether the node is a mean, whether it is over all elements,
    and its operand.
    """
    reduced = behind_item(node)
    chain.take(node)
    call = _call_of(reduced, "max", "amax", "mean")
    if call is None or (call.op is aten.max.dim) != (reduced is not node):
        raise _learned("its scale does not come from a maximum or mean")
    is_mean = _base(call) == "mean"
    chain.take(reduced)
    magnitude = _call_of(call.args["self"], "abs")
    if magnitude is None:
        raise _Misfit("chain_form", "its scale is not that of absolute values")
    chain.take(call.args["self"])
    axes = call.args.get("dim")
    axes = list(axes) if isinstance(axes, (list, tuple)) else axes
    measured: Node = magnitude.args["self"]
    is_whole = is_mean and axes in (None, [])
    last = compat.example_value(measured).dim() - 1
    axis = axes[0] if isinstance(axes, list) and len(axes) == 1 else axes
    if not is_whole and (axis not in (-1, last) or not call.args.get("keepdim")):
        said = "its scales are not one per token (last axis, kept) or one for the whole weight"
        raise _Misfit("other_axis", said)
    if call.args.get("dtype") is not None:
        raise _Misfit("chain_form", "the mean is taken in another dtype")
    return is_mean, is_whole, measured


def _source(chain: _Chain, value: Node, measured: Node) -> tuple[Node, bool]:
    """Return the tensor that is quantised, and whether it is quantised in its own dtype rather than
    in float32.
    """
    ends = [_behind_exact_casts(chain, node) for node in (value, measured)]
    if ends[0] is not ends[1]:
        said = "its scale is computed from another tensor than the quantised one"
        raise _Misfit("other_source", said)
    dtypes = [compat.example_value(n).dtype for n in (value, measured)]
    held = compat.example_value(ends[0]).dtype
    if dtypes[0] != dtypes[1] or dtypes[0] not in (held, torch.float32):
        raise _Misfit("chain_form", f"it is quantised in {dtypes[0]}, its own dtype is {held}")
    return ends[0], dtypes[0] == held and held != torch.float32


def _behind_exact_casts(chain: _Chain, node: Node) -> Node:
    """Go back from a node through detaches, and casts that preserve every value; return the node
    that is reached.
    """
    while (call := call_of(node, aten.to.dtype, aten.detach.default)) is not None:
        held, cast = (compat.example_value(each).dtype for each in (call.args["self"], node))
        if cast not in (held, torch.float32) or held == torch.float64 != cast:
            break  # to anything but float32 or the dtype there was, values may change
        chain.take(node)
        node = call.args["self"]
    return node


def _require_one_dtype(*nodes: Node) -> None:
    """Raise an error unless the nodes that quantise a tensor all compute in one dtype.

    Autocast can cause this error, because autocast runs some of these nodes in float32."""
    dtypes = {compat.example_value(node).dtype for node in nodes}
    if len(dtypes) != 1:
        names = " and ".join(sorted(map(short, dtypes)))
        raise _Misfit(
            "chain_form",
            f"it is computed in {names}, as autocast does",
            "cast to float32 before quantising, as transformers' layers do",
        )


def _base(call: Call) -> str:
    """Return the name of an op; for an in-place op, return the name of the corresponding
    out-of-place op."""
    return str(compat.schema(call.op).name.split("::")[-1]).rstrip("_")


def _call_of(node: Any, *names: str) -> Call | None:
    """Return the ATen call of a node if its op has one of the given names, or None."""
    call = read_one(node)
    return call if call is not None and _base(call) in names else None


def _one(node: Any, names: tuple[str, ...], what: str) -> Call:
    call = _call_of(node, *names)
    if call is None:
        found = node_name(node) if isinstance(node, Node) else repr(node)
        raise _Misfit("chain_form", f"`{found}` stands where {what} would be read")
    if call.args.get("rounding_mode") is not None:
        raise _Misfit("chain_form", "a division that rounds stands before it")
    return call


def _tensors(call: Call) -> tuple[Node, Node]:
    """Return both operands of a node, which must be tensors."""
    left, right = call.args["self"], call.args["other"]
    if not isinstance(left, Node) or not isinstance(right, Node):
        raise _learned("it is scaled by a number", "learned and fixed scales are")
    return left, right


def both(call: Call | None) -> Iterator[tuple[Node, Node]]:
    """Yield the operands of a product, or of a sum without a factor (`alpha`), in both orders."""
    given = {} if call is None or call.args.get("alpha", 1) != 1 else call.args
    left, right = given.get("self"), given.get("other")
    if isinstance(left, Node) and isinstance(right, Node):
        yield left, right
        yield right, left


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def _without_casts(chain: _Chain, node: Node, dtypes: tuple[torch.dtype, ...] = _FLOATS) -> Node:
    """Go back from a node through casts to the given dtypes, and through aliases; return the node
    that is reached.
    """
    while (call := call_of(node, aten.to.dtype, aten.alias.default)) is not None:
        if compat.example_value(node).dtype not in dtypes:
            raise _Misfit("chain_form", f"a cast to {compat.example_value(node).dtype} changes it")
        chain.take(node)
        node = call.args["self"]
    return node


def _without_detach(chain: _Chain, node: Node) -> Node:
    source: Node = back_over(node, (aten.detach.default,), chain.nodes)
    return source


def _is_same(a: Any, b: Node) -> bool:
    """Return whether two nodes are the same node, apart from aliases and detaches."""
    sides = (aten.detach.default, aten.alias.default)
    return back_over(a, sides) is back_over(b, sides)


def _requires_grad(node: Node) -> bool:
    value = compat.example_value(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def other_user(chain: list[Node] | tuple[Node, ...], end: Node) -> Node | None:
    """Return a node outside of `chain` that uses an intermediate value of `chain`, or None.

    `chain` contains the nodes that compute `end`, such as nodes that quantise a tensor. Users of
    `end` do not count. Graph outputs do not count either, because Dynamo returns every value of an
    autograd Function's body, whether used or not.
    """
    inside = set(chain) | {end}
    for node in chain:
        for user in node.users if node is not end else ():
            is_item = user.target is operator.getitem
            is_result = is_item and all(after.op == "output" for after in user.users)
            if user not in inside and user.op != "output" and not is_result:
                return user
    return None
