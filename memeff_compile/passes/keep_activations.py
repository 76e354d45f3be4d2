"""Activation checkpoints keep what is dear to compute again, as much as memeff.recompute says.

    before: checkpoint(block): all of it is computed again for the backward
    after:  checkpoint(block), which keeps what attention returned (and linears, up to some bytes)

No number changes and no node either: the body of a checkpoint gets a policy, as the `context_fn` of
`torch.utils.checkpoint` would give it one. Kept is what a fused attention returned, its
log-sum-exps among it, and what a linear returned; the rest is computed again as before.

With a number of bytes, those are kept that save the most time a byte. A linear whose result the
backward does not read (it is added to the residual and leaves the block) is not among them, nor is
one whose result `memeff::gated_linear` writes over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from .. import compat
from ..kernels import attention as attention_folder
from ..kernels import gated_linear as gated_folder
from ..kernels import quantized_attention as quantized_folder
from ..kernels.device import where_it_runs
from ..report import format_bytes
from .graph.base import Decline, Done, GraphPass
from .graph.canonical import aten, named, read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo

_ATTENTION = {
    aten.scaled_dot_product_attention.default: ("query", "key"),
    attention_folder.attention: ("q", "k"),
    quantized_folder.quantized_attention: ("q", "k"),
    quantized_folder.quantized_attention_by_call: ("q", "k"),
}
_LINEARS = {
    aten.linear.default: "input",
    aten.addmm.default: "mat1",
    aten.mm.default: "self",
    aten.matmul.default: "self",
}
_PASSED_ON = named(
    "add.Tensor view.default reshape.default transpose.int to.dtype alias.default "
    "contiguous.default dropout.default"
)
"""Ops whose backward reads none of what they are given."""


@dataclass(frozen=True)
class Product:
    """A call that could be kept: its bytes, and the floating-point operations that this saves."""

    node: Node
    bytes: int
    operations: int
    is_attention: bool


Products = tuple[Product, ...]  # of one body


class KeepActivations(GraphPass):
    """The pass, which has one match for each checkpoint."""

    name = "keep_activations"

    def find(self, info: GraphInfo) -> Iterable[Products | Decline]:
        """Yield what is kept of this body."""
        if info.called_by is None or not info.region.grad:
            return
        every = [_product(info, node) for node in info.visit(info.gm.graph.nodes)]
        yield from (found for found in every if isinstance(found, Decline))
        found = [product for product in every if isinstance(product, Product)]
        if info.options.recompute == "attention" or _unserved(info) is not None:
            found = [product for product in found if product.is_attention]
        elif not self._is_skipped(info, found):
            chosen = self._chosen(info)
            found = [product for product in found if product.node in chosen]
        if found:
            yield tuple(found)

    def _is_skipped(self, info: GraphInfo, products: Iterable[Product]) -> bool:
        return any(self.skipped(info, product.node) for product in products)

    def _chosen(self, info: GraphInfo) -> Collection[Node]:
        """Return what is kept within a number of bytes, in all checkpoints of the graph."""
        *_, root = info.outward()
        if "kept" not in root.notes:
            _, *bodies = root.inward()
            served: list[Product] = []
            for body in bodies:
                products = list(_readable(body))
                if _unserved(body) is None and not self._is_skipped(body, products):
                    served += products
            limit = cast("int", root.options.recompute)
            root.notes["kept"] = set(_within(served, limit))
        chosen: set[Node] = root.notes["kept"]
        return chosen

    def check(self, info: GraphInfo, match: Products) -> Decline | None:
        found = _unserved(info)
        return None if found is None else found.counted(match[0].node)

    def places(self, match: Products) -> Sequence[Node]:
        """Return what is kept."""
        return [product.node for product in match]

    def rewrite(self, info: GraphInfo, match: Products, editor: Editor) -> Done:
        """Give the body its policy."""
        editor.keep({product.node: product.is_attention for product in match})
        kept = sum(product.bytes for product in match)
        attentions = sum(product.is_attention for product in match)
        linears = len(match) - attentions
        counted = ((attentions, "attention"), (linears, "linear" if linears == 1 else "linears"))
        what = " and ".join(f"{count} {name}" for count, name in counted if count)
        sentence = (
            f"the checkpoint keeps what {what} returned for the backward, {format_bytes(kept)} a "
            "call, and computes the rest again"
        )
        return Done(match[0].node, sentence, sites=1)

    def dead(self, match: Products) -> Sequence[Node]:
        """Return nothing: no node is replaced."""
        del match
        return ()


def _unserved(info: GraphInfo) -> Decline | None:
    if info.has_checkpoint_policy:
        return Decline(
            "selective_checkpoint",
            "the checkpoint, or one around it, has a policy (context_fn) of its own",
            "leave context_fn out, or memeff.recompute at 'as_written'",
        )
    if info.writes:
        return Decline(
            "mutated",
            f"`{info.writes[0].node}` writes in place inside the checkpoint, and PyTorch's "
            "policies need calls that do not",
            "use the out-of-place form",
        )
    for node in info.gm.graph.nodes:
        if not compat.may_be_under_policy(node.target):
            said = f"`{node.name}` is an operation on graphs, which PyTorch's policies do not serve"
            hint = "checkpoint what is around it apart, or leave memeff.recompute at 'as_written'"
            return Decline("higher_order", said, hint)
    return None


def _readable(info: GraphInfo) -> Iterator[Product]:
    """Yield the products of a level; what fails is said where that level itself is searched."""
    for node in info.gm.graph.nodes:
        with suppress(Exception):
            product = _product(info, node)
            if isinstance(product, Product):
                yield product


def _within(products: Iterable[Product], limit: int) -> Iterator[Node]:
    """Yield what fits into so many bytes, those first that save the most time a byte.

    Those of a size that depends on values have none here, and may be larger than any limit. An
    operation of attention takes twice the time of a linear's (an H200: 330 and 650 TFLOP/s).
    """
    left = limit
    known = (product for product in products if product.bytes)
    for product in sorted(known, key=lambda p: -p.operations * (1 + p.is_attention) / p.bytes):
        if product.bytes <= left:
            left -= product.bytes
            yield product.node


def _product(info: GraphInfo, node: Node) -> Product | Decline | None:
    """Read a node as a call that could be kept, or return None, or why its result cannot."""
    call = read_one(node)
    if call is None or not _has_gradient(node):
        return None
    if call.op in _ATTENTION:
        query, key = (info.value(call.args[name]) for name in _ATTENTION[call.op])
        value = _first(node)  # as deep as values are, which queries need not be
        if _is_made_op_by_op(value):
            sentence = "PyTorch runs this attention op by op: there is no fused call to keep"
            hint = "on a CPU it fuses four dimensions, no dropout, values as deep as queries"
            return Decline("op_by_op", sentence, hint).counted(node)
        rows, depth = _count(value.shape[:-1]), compat.size_hint(value.shape[-1])
        is_half = bool(call.args.get("is_causal")) or call.args.get("ahead") is not None
        keys, both = compat.size_hint(key.shape[-2]), compat.size_hint(query.shape[-1]) + depth
        operations = 2 * rows * keys * both // (1 + is_half)
        held = rows * (depth * value.itemsize + max(4, value.itemsize))  # with log-sum-exps
        return Product(node, held, operations, is_attention=True)
    if call.op in _LINEARS and _is_read_again(node):
        value, rows_of = info.value(node), info.value(call.args[_LINEARS[call.op]])
        operations = 2 * _count(value.shape) * compat.size_hint(rows_of.shape[-1])
        return Product(node, _count(value.shape) * value.itemsize, operations, is_attention=False)
    return None


def _is_made_op_by_op(value: torch.Tensor) -> bool:
    """Return whether PyTorch chose its form of attention that ends in a plain product.

    Dynamo's own run of the call chose, as `sdpa_kernel` says; of a planned GPU it says nothing.
    """
    made = value.grad_fn if where_it_runs(value.device).type == value.device.type else None
    while made is not None and any(each in made.name() for each in ("View", "ToCopy")):
        made = made.next_functions[0][0]
    return made is not None and made.name() in ("BmmBackward0", "MmBackward0")


def _has_gradient(node: Node) -> bool:
    first = _first(node)
    return isinstance(first, torch.Tensor) and first.requires_grad


def _first(node: Node) -> Any:
    value = compat.example_value(node)
    return value[0] if isinstance(value, tuple) and value else value


def _is_read_again(node: Node) -> bool:
    """Return whether the backward has to compute a linear again, for somebody reads it there."""
    is_read, ways, seen = False, [node], {node}
    while ways:
        for user in ways.pop().users.keys() - seen:
            seen.add(user)
            call = read_one(user)
            if call is not None and call.op is gated_folder.gated_linear:
                return False
            if call is not None and call.op in _PASSED_ON:
                ways.append(user)
            elif user.op != "output":
                is_read = True
    return is_read


def _count(shape: Iterable[object]) -> int:
    return math.prod(compat.size_hint(size) for size in shape)
