"""Rewrite linear(act(gate) * up) into memeff::gated_linear.

The backward pass of this op overwrites gate and up with their gradients.

    before: out = linear(silu(gate) * up, W)        after: out = memeff.gated_linear(gate, up, W)

In the backward pass of a gated MLP, one kernel of Inductor recomputes the product and computes the
gradients of gate and up. This kernel reads three tensors of size (tokens, intermediate size) and
writes three, so six such tensors exist at once. At this time, a training step with checkpoints uses
the most memory. The kernel of memeff::gated_linear writes to the memory of its inputs. So only
three tensors of size (tokens, intermediate size) exist at once, instead of six.

The pass changes only graphs inside activation checkpoints. In a checkpoint, gate and up are
recomputed for the backward pass and have no other reader. So memeff::gated_linear may overwrite
gate and up. Outside of checkpoints, the backward pass reads saved tensors, which
memeff::gated_linear would have to copy first. So the pass does not rewrite linear layers outside of
checkpoints, and the compilation report does not mention these layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy
from torch.fx import Node

from .. import compat
from ..kernels import gated_linear as op_folder
from ..report import format_bytes
from .graph.base import Decline, Done, GraphPass, mutated
from .graph.canonical import Call, aten, call_of, named, read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among, node_name


@dataclass(frozen=True)
class Gated:
    """A linear layer whose input is a gated product, `act(gate) * up`."""

    linear: Node
    product: Node
    activated: Node
    gate: Node
    up: Node
    weight: Node
    bias: Node | None
    activation: str


class FuseGatedLinear(GraphPass):
    """The pass that rewrites the last linear layer (the down projection) of gated MLPs into
    memeff::gated_linear, inside activation checkpoints.

    The compilation report shows the bytes saved in one block of the model, not a sum, because the
    backward passes of the blocks run one after another.
    """

    name = "fuse_gated_linear"

    def enabled(self, info: GraphInfo) -> bool:
        """Return whether the option memeff.gated_linear is on and the graph is the body of a
        checkpoint in training."""
        return super().enabled(info) and info.called_by is not None and info.region.grad

    def find(self, info: GraphInfo) -> Iterable[Gated]:
        """Yield every linear layer whose input is a gated product, `act(gate) * up`, if gate and up
        are computed inside the same activation checkpoint as the layer.
        """
        for node in info.visit(info.gm.graph.nodes):
            match = _read(node)
            if match is not None and _gains(info, match):
                yield match

    def check(self, info: GraphInfo, match: Gated) -> Decline | None:
        found = _unserved(info, match)
        return None if found is None else found.counted(match.linear)

    def places(self, match: Gated) -> Sequence[Node]:
        """Return the down projection and the nodes that compute its input, `act(gate) * up`."""
        return (match.linear, match.product, match.activated)

    def rewrite(self, info: GraphInfo, match: Gated, editor: Editor) -> Done:
        dtype = info.value(match.gate).dtype
        with editor.at(match.linear):  # weight and bias are cast as autocast would have
            weight = editor.cast(match.weight, dtype)
            bias = None if match.bias is None else editor.cast(match.bias, dtype)
            operands = (match.gate, match.up, weight, bias, match.activation)
            new = editor.call(op_folder.gated_linear, *operands)
        editor.replace(match.linear, new)
        return Done(new, _sentence(info, match), sites=1)


def _read(node: Node) -> Gated | None:
    """Return `node` as a linear layer whose input is a gated product, `act(gate) * up`, or None
    for any other node."""
    if (call := call_of(node, aten.linear.default)) is None:
        return None
    product, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if (factors := call_of(product, aten.mul.Tensor)) is None:
        return None
    left, right = factors.args["self"], factors.args["other"]
    for activated, up in ((left, right), (right, left)):
        if not isinstance(activated, Node) or not isinstance(up, Node):
            return None
        inner = read_one(activated)
        name = "" if inner is None else _activation(inner)
        if name and inner is not None:
            gate = inner.args["self"]
            return Gated(node, product, activated, gate, up, weight, bias, name)
    return None


def _activation(call: Call) -> str:
    """Return the name that memeff::gated_linear uses for an activation function, or an empty string
    if the op does not support this function.
    """
    if call.op is aten.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(call.args["approximate"], "")
    return {aten.silu.default: "silu", aten.relu.default: "relu"}.get(call.op, "")


def _gains(info: GraphInfo, match: Gated) -> bool:
    """Return whether the backward pass of memeff::gated_linear could write to the memory of gate
    and up.

    The input of the linear layer is `act(gate) * up`. The result of the linear layer must require a
    gradient. The activation checkpoint must recompute gate and up by ops that do not save their
    results. Gate and up must not share memory, and must have the dtype of the linear layer's
    result. `_unserved` checks that no other node reads gate and up."""
    out, gate, up = (info.tensor(n) for n in (match.linear, match.gate, match.up))
    if out is None or gate is None or up is None:
        return False
    if not out.requires_grad or not info.regions[match.linear].grad:
        return False
    is_rounded = gate.dtype != out.dtype or up.dtype != out.dtype
    if is_rounded or info.may_share_memory(match.gate, match.up):  # halves of one tensor
        return False
    return _is_computed_here(match.gate) and _is_computed_here(match.up)


_MADE_BY_PRODUCTS = named(
    "linear.default matmul.default mm.default addmm.default add.Tensor sub.Tensor mul.Tensor"
)
"""Ops that do not save their result for the backward pass, so it may be overwritten."""

_VIEWS = named("view.default reshape.default to.dtype alias.default")


def _is_computed_here(node: Node) -> bool:
    """Return whether an op in the graph, the body of an activation checkpoint, computes the value
    of `node` without saving it for the backward pass.

    Views may lie between the op and `node`, if no other node reads the op's result.
    """
    while (call := call_of(node, *_VIEWS)) is not None:
        node = call.args["self"]
        if len(node.users) != 1:
            return False
    return call_of(node, *_MADE_BY_PRODUCTS) is not None


def _unserved(info: GraphInfo, match: Gated) -> Decline | None:
    if info.has_checkpoint_policy:
        return Decline(
            "selective_checkpoint",
            "the checkpoint has a policy (context_fn) that may keep gate or up for the backward, "
            "where they would be copied before they are written over",
            "leave context_fn out to have everything in the block computed again",
        )
    parts = (match.gate, match.up, match.activated, match.product)
    onward = (match.activated, match.product, match.product, match.linear)
    users = ((user, only) for node, only in zip(parts, onward, strict=True) for user in node.users)
    other = next((user for user, only in users if user is not only), None)
    if other is not None:
        return Decline(
            f"gate_reused({node_name(other)})",
            f"gate, up or their product is also used by `{node_name(other)}`, so that it has to be "
            "kept as it is",
            "compute that from the linear's result, or outside the checkpoint",
        )
    is_decoded = getattr(type(info.value(match.weight)), "decodes_for_ops", False)
    plain = (match.bias, match.gate, match.up)
    kind = kind_among(plain if is_decoded else (match.weight, *plain))
    if kind:
        said = f"an operand of the linear is a {kind}, which this op does not take"
        return Decline(f"subclass_weight({kind})", said, "gather or dequantise the weight")
    gate, up, weight = map(info.value, (match.gate, match.up, match.weight))
    bias = info.tensor(match.bias)
    # Under autocast the linear casts its weight; so does the rewrite.
    weight, bias = weight.to(gate.dtype), None if bias is None else bias.to(gate.dtype)
    sentence = op_folder.supports(gate, up, weight, bias, match.activation)
    if sentence:
        return Decline("unsupported", sentence)
    nodes = [*parts, match.weight, *([] if match.bias is None else [match.bias])]
    first = min((match.gate, match.up), key=lambda n: info.positions[n])
    writer = info.written_between(nodes, first, match.linear)
    what = "an operand between gate or up and the linear"
    return None if writer is None else mutated(writer, what)


def _sentence(info: GraphInfo, match: Gated) -> str:
    gate = info.value(match.gate)
    n, i = sympy.symbols("N I", integer=True, positive=True)
    sizes = {
        n: math.prod(compat.size_hint(size) for size in gate.shape[:-1]),
        i: compat.size_hint(gate.shape[-1]),
    }
    before = op_folder.bytes_before(n, i, dtype=gate.dtype)
    after = op_folder.bytes_after(n, i, dtype=gate.dtype)
    held, was = (format_bytes(int(formula.subs(sizes))) for formula in (after, before))
    name = op_folder.engine_for(gate.device, gate.dtype)
    return (
        f"linear({match.activation}(gate) * up) -> memeff::gated_linear, whose backward writes the "
        f"gradients over gate and up; engine {name}: {op_folder.ENGINES[name]}. While a block's "
        f"gradients are computed, it holds {held} instead of {was}: {after} bytes instead of "
        f"{before}, with N = {sizes[n]}, I = {sizes[i]}; one block at a time"
    )
