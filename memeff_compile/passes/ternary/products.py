"""Recognize the calls of `memeff::ternary_linear_product` in linear layers that `ternarize_`
converted.

Each of these layers quantises its own input; layers with the same input can share one call.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ...kernels import ternary_linear as op_folder
from ..graph.canonical import aten, back_over
from ..graph.graph_info import GraphInfo
from .chains import Quantized, read_weight_scale


@dataclass(frozen=True)
class Product:
    """A product with one ternary weight: its result, its operands, and the nodes that only this
    product needs."""

    result: Node
    bias: Node | None
    tokens: Quantized
    weight: Quantized
    owned: tuple[Node, ...]


def read_product(info: GraphInfo, node: Node) -> Product | None:
    """Recognize a product with one ternary weight, and all nodes that compute the codes of its
    input and weight."""
    if node.target is not op_folder.ternary_linear_product or node.kwargs or len(node.args) < 10:
        return None
    x, weights, codes, scale, sums, packed, scales, biases, _, _, *steps = node.args
    lists: list[Any] = [weights, packed, scales, biases]
    if len(lists[0]) != 1 or len(node.users) != 1:
        return None
    (weight,), (held,), (by_weight,), bias = lists
    quantize = _quantize_of([codes, scale, sums])
    if quantize is None or held.target is not op_folder.ternary_linear_pack:
        return None
    sources = [back_over(each.args[0], (aten.detach.default,)) for each in (quantize, held)]
    if sources[0] is not x or sources[1] is not weight:
        return None
    found = read_weight_scale(by_weight) if held.args[1] is by_weight else None
    if not isinstance(found, Quantized) or found.source is not weight:
        return None
    details = (*held.args[2:], False, False)[:2]
    if details != (found.quantizer.is_step, found.quantizer.is_native):
        return None
    given: tuple[Any, ...] = quantize.args[1:]
    quantizer = op_folder.Quantizer(*given)
    wanted = (quantizer.is_step, found.quantizer.is_step)
    if (*steps, False, False)[:2] != wanted or not isinstance(x, Node):
        return None
    (result,) = node.users
    tokens = Quantized(x, quantizer, False, True, ())
    whole = Quantized(weight, found.quantizer, True, True, ())
    items = [item for item in (codes, scale, sums) if isinstance(item, Node)]
    owned = (result, node, *items, quantize, held, *found.chain)
    first = min(owned, key=info.positions.__getitem__)
    if info.written_between([x, weight], first, node) is not None:
        return None
    return Product(result, bias[0] if bias else None, tokens, whole, owned)


def _quantize_of(items: list[Any]) -> Node | None:
    """If `items` are the three results of one call of memeff::ternary_linear_quantize, return the
    call, otherwise None.

    This op quantises a linear layer's input. Its results are codes, scales and sums."""
    calls = set()
    for place, item in enumerate(items):
        is_item = isinstance(item, Node) and item.target is operator.getitem
        if not is_item or item.args[1] != place:
            return None
        calls.add(item.args[0])
    call = calls.pop()
    is_ours = not calls and call.target is op_folder.ternary_linear_quantize and not call.kwargs
    return call if is_ours else None
