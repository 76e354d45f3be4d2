"""Let activation checkpoints save results that are expensive to recompute.

The option memeff.recompute determines which results the checkpoints may save.

- Before: the backward pass recomputes the whole block of `checkpoint(block)`.
- After: `checkpoint(block)` saves results of attention, and the backward pass recomputes the rest.
  The checkpoint may also save results of linear layers, up to a number of bytes.

The pass changes neither results nor nodes: it gives the checkpoint a policy, like the argument
`context_fn` of `torch.utils.checkpoint`. The checkpoint then saves results of fused attention
(with their log-sum-exps) and of linear layers. Everything else is recomputed as before. The
backward pass may read values that linear steps, such as the rotary embedding, compute from a
linear layer's result. If the backward pass does not read the result itself, the checkpoint saves
the values of the linear steps instead. The backward pass then does not recompute the linear steps
either. If the values of the linear steps are larger than the linear layer's result, the checkpoint
saves the layer's result.

With a limit in bytes, the checkpoint saves the results whose recomputation would take the most time
per byte. Among results with equal time per byte, those of later blocks come first. A linear layer's
result is not saved in these cases:

- the backward pass does not read the result, because it is only added to the residual and leaves
  the block;
- `memeff::gated_linear` overwrites the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from .. import compat, system
from ..kernels import attention as attention_folder
from ..kernels import gated_linear as gated_folder
from ..kernels.device import where_it_runs
from ..report import format_bytes
from .graph.base import Decline, Done, GraphPass
from .graph.canonical import Call, aten, named, read, read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo

_ATTENTION = {
    aten.scaled_dot_product_attention.default: ("query", "key"),
    attention_folder.attention: ("q", "k"),
    **{
        getattr(torch.ops.memeff, name).default: operands
        for each in system.systems()
        for name, operands in each.attention_ops.items()
    },
}
_LINEARS = {
    aten.linear.default: "input",
    aten.addmm.default: "mat1",
    aten.mm.default: "self",
    aten.matmul.default: "self",
    gated_folder.gated_linear: "gate",
}
_PASSED_ON = named(
    "add.Tensor view.default reshape.default transpose.int to.dtype alias.default "
    "contiguous.default dropout.default"
)
"""Ops whose backward pass reads none of their operands."""

_MOVES = named(
    "view.default reshape.default flatten.using_ints unflatten.int transpose.int permute.default "
    "unsqueeze.default squeeze.dim expand.default alias.default contiguous.default clone.default "
    "slice.Tensor select.int split.Tensor split.sizes split_with_sizes.default chunk.default "
    "unbind.int"
)
_STEPS = _MOVES | named(
    "neg.default cat.default stack.default to.dtype add.Tensor add.Scalar sub.Tensor sub.Scalar "
    "mul.Tensor mul.Scalar div.Scalar"
)
"""Ops that are linear in one operand if the other needs no gradient."""

# Throughput of an H200 per second for products, for attention, and in bytes for other kernels. Only
# the ratios matter.
_PRODUCTS = 650e12
_ATTENTIONS = 330e12
_MOVED = 3e12


@dataclass(frozen=True)
class Product:
    """A result that a checkpoint could save, with its size in bytes.

    `seconds` estimates the time of the recomputation that saving the result would avoid."""

    nodes: tuple[Node, ...]  # whose results are kept
    bytes: int
    seconds: float
    kind: str  # "attention", "linear" or "rotated linear"


Products = tuple[Product, ...]  # results in one checkpoint body


class KeepActivations(GraphPass):
    """The pass that chooses the results which activation checkpoints save.

    A match is one checkpoint whose body has results to save.
    """

    name = "keep_activations"

    def find(self, info: GraphInfo) -> Iterable[Products | Decline]:
        """Yield one match: results of attention and linear layers that a checkpoint should save.

        `info` is the graph of an activation checkpoint's body. For any other graph, yield no match.
        Also yield a Decline (the reason) for each attention call whose result cannot be saved.
        """
        if info.called_by is None or not info.region.grad:
            return
        every = [_product(info, node) for node in info.visit(info.gm.graph.nodes)]
        yield from (found for found in every if isinstance(found, Decline))
        found = [product for product in every if isinstance(product, Product)]
        if info.options.recompute == "attention" or _unserved(info) is not None:
            found = [product for product in found if product.kind == "attention"]
        elif not self._is_skipped(info, found):
            chosen = self._chosen(info)
            found = [product for product in found if product.nodes[0] in chosen]
        if found:
            yield tuple(found)

    def _is_skipped(self, info: GraphInfo, products: Iterable[Product]) -> bool:
        return any(self.skipped(info, product.nodes[0]) for product in products)

    def _chosen(self, info: GraphInfo) -> Collection[Node]:
        """Return the results that the activation checkpoints of the graph save.

        The option memeff.recompute limits the bytes that all these checkpoints save together.
        """
        *_, root = info.outward()
        if "kept" not in root.notes:
            _, *bodies = root.inward()
            served: list[Product] = []
            for body in reversed(bodies):
                products = list(_readable(body))
                if _unserved(body) is None and not self._is_skipped(body, products):
                    served += products
            limit = cast("int", root.options.recompute)
            root.notes["kept"] = set(_within(served, limit))
        chosen: set[Node] = root.notes["kept"]
        return chosen

    def check(self, info: GraphInfo, match: Products) -> Decline | None:
        found = _unserved(info)
        return None if found is None else found.counted(match[0].nodes[0])

    def places(self, match: Products) -> Sequence[Node]:
        """Return the nodes whose results the checkpoint saves for the backward pass."""
        return [node for product in match for node in product.nodes]

    def rewrite(self, info: GraphInfo, match: Products, editor: Editor) -> Done:
        """Give the activation checkpoint a policy that saves results of attention and linear
        layers.

        `match` lists these results. Instead of a linear layer's result, `match` may list values
        computed from the result, such as its rotary embedding."""
        editor.keep({node: _mark(product, node) for product in match for node in product.nodes})
        kept = sum(product.bytes for product in match)
        kinds = [product.kind for product in match]
        *others, last = (
            f"{count} {kind}{'s' * (count > 1 and kind != 'attention')}"
            for kind in ("attention", "linear", "rotated linear")
            if (count := kinds.count(kind))
        )
        what = " and ".join([", ".join(others), last] if others else [last])
        sentence = (
            f"the checkpoint keeps the results of {what} for the backward, {format_bytes(kept)} a "
            "call, and computes the rest again"
        )
        return Done(match[0].nodes[0], sentence, sites=1)

    def dead(self, match: Products) -> Sequence[Node]:
        return ()  # no node is replaced


def _mark(product: Product, node: Node) -> str:
    """Return which op's result the activation checkpoint saves for the call `node`.

    One call may run several ops. `compat.keep_in_checkpoint` explains the returned strings.
    """
    call = read_one(node)
    if product.kind == "attention" or call is None:
        return "attention"
    if product.kind == "linear" and call.op is not gated_folder.gated_linear:
        return "product"
    return "aten::_to_copy" if call.op is aten.to.dtype else call.op.name().partition(".")[0]


def _unserved(info: GraphInfo) -> Decline | None:
    if info.has_checkpoint_policy:
        return Decline(
            "selective_checkpoint",
            "the checkpoint, or one around it, already has a policy (context_fn)",
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
            hint = "checkpoint its neighbours separately, or leave memeff.recompute at 'as_written'"
            return Decline("higher_order", said, hint)
    return None


def _readable(info: GraphInfo) -> Iterator[Product]:
    """Yield the results that a graph, such as a checkpoint's body, could save.

    This function skips a node if analysing the node raises an error. When the method `find`
    searches the graph, the same error is raised and reported.
    """
    for node in info.gm.graph.nodes:
        with suppress(Exception):
            product = _product(info, node)
            if isinstance(product, Product):
                yield product


def _within(products: Iterable[Product], limit: int) -> Iterator[Node]:
    """Yield nodes whose results, saved by checkpoints, together fit into `limit` bytes.

    Results whose recomputation would take the most time per byte come first. Among results with
    equal time per byte, those of later blocks come first. The backward pass frees their memory
    before most of the weights' gradients exist. Results whose size depends on the values of tensors
    are not included, because they could exceed any limit.
    """
    left = limit
    known = (product for product in products if product.bytes)
    for product in sorted(known, key=lambda p: -p.seconds / p.bytes):
        if product.bytes <= left:
            left -= product.bytes
            yield product.nodes[0]


def _product(info: GraphInfo, node: Node) -> Product | Decline | None:
    """Return a linear layer or an attention call whose result a checkpoint could save.

    Return the reason if the result cannot be saved, and None for all other nodes."""
    call = read_one(node)
    if call is None or not _has_gradient(node):
        return None
    if call.op in _ATTENTION:
        return _attention(info, node, call)
    return _linear(info, node, call) if call.op in _LINEARS else None


def _attention(info: GraphInfo, node: Node, call: Call) -> Product | Decline:
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
    return Product((node,), held, operations / _ATTENTIONS, "attention")


def _linear(info: GraphInfo, node: Node, call: Call) -> Product | None:
    readers = _readers(node)
    if not readers:
        return None
    value, rows_of = info.value(node), info.value(call.args[_LINEARS[call.op]])
    held, depth = _count(value.shape) * value.itemsize, compat.size_hint(rows_of.shape[-1])
    seconds = 2 * _count(value.shape) * depth / _PRODUCTS
    if call.op is gated_folder.gated_linear:
        seconds += 3 * _count(rows_of.shape) * rows_of.itemsize / _MOVED
    moved = sum(_count(info.value(at).shape) * info.value(at).itemsize for at in readers)
    if node in readers or moved > held:
        return Product((node,), held, seconds, "linear")
    return Product(tuple(readers), moved, seconds + (held + moved) / _MOVED, "rotated linear")


def _readers(linear: Node) -> list[Node]:
    """Return the nodes whose values the backward pass reads, among the linear layer itself and the
    linear steps (such as scales) that follow it.

    The backward pass does not read a result that is only added and returned. If
    `memeff::gated_linear` reads the result of the linear layer or of a linear step, return no
    nodes, because that op overwrites this result.
    """
    made, ways = dict.fromkeys([linear]), [linear]
    while ways:
        steps = [user for user in ways.pop().users if user not in made and _is_step(user, made)]
        made.update(dict.fromkeys(steps))
        ways += steps
    readers = {node: node.users.keys() - made.keys() for node in made}
    ends = {node: [end for user in readers[node] for end in _ends(user)] for node in made}
    if any(gated_folder.gated_linear in each for each in ends.values()):
        return []
    return list(dict.fromkeys(_without_moves(node, linear) for node in made if ends[node]))


def _is_step(node: Node, made: Collection[Node]) -> bool:
    """Return whether `node` is a linear step: a linear function of values in `made`.

    `made` contains a linear layer's result and the linear steps that are already known. The
    backward pass of a linear step does not read the values in `made` from which the step is
    computed.
    """
    calls = read(node)
    if calls is None or any(call.op not in _STEPS for call in calls):
        return False
    given = [each for each in node.all_input_nodes if each in made or _has_gradient(each)]
    if calls[0].op is aten.mul.Tensor:
        return len(given) == 1 and calls[0].args["self"] is not calls[0].args["other"]
    return all(each in made for each in given)


def _ends(node: Node) -> list[Any]:
    """Return the ops whose backward pass may read a value that `node` reads or passes on.

    Usually this is only the node's own op. The backward pass of a reshape or an addition (an op in
    `_PASSED_ON`) reads no operand. But the backward pass of a node that uses the result may read
    the result. So for a reshape or an addition, return the ops of its users instead.
    """
    found: list[Any] = []
    ways, seen = [node], {node}
    while ways:
        node = ways.pop()
        call = read_one(node)
        if call is not None and call.op in _PASSED_ON:
            ways += node.users.keys() - seen
            seen.update(node.users)
        elif node.op != "output":
            found.append(None if call is None else call.op)
    return found


def _without_moves(node: Node, linear: Node) -> Node:
    """Return the earliest node, from `linear` on, that contains all values of `node`.

    The nodes after the returned node, up to `node`, only move or select values, or are casts to the
    dtype that the values already have.
    """
    while node is not linear:
        calls, source = read(node), node.all_input_nodes[0]
        is_move = calls is not None and all(call.op in _MOVES for call in calls)
        if not is_move and _first(source).dtype == _first(node).dtype:
            is_move = calls is not None and calls[0].op is aten.to.dtype
        if not is_move:
            break
        node = source
    return node


def _is_made_op_by_op(value: torch.Tensor) -> bool:
    """Return whether an attention result comes from PyTorch's unfused implementation, which ends in
    a plain matrix product.

    PyTorch chooses the kernel of an attention call when Dynamo traces the call. A surrounding
    `sdpa_kernel` context, for example, restricts the choice. If the passes plan for a GPU that this
    machine does not have, the kernel that PyTorch would choose is unknown.
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
    return value[0] if isinstance(value, (tuple, list)) and value else value


def _count(shape: Iterable[object]) -> int:
    return math.prod(compat.size_hint(size) for size in shape)
