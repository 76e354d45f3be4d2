"""linear with a compressed weight -> memeff::coded_weight_linear: nothing decoded is kept.

    before: out = linear(x, W, b)       after: out = memeff.coded_weight_linear(x, W, b)

W is a `CodedWeight`, which `memeff_compile.compress_` puts where a dense weight was. Left alone,
the linear would decode it, and autograd would keep the decoded weight of every layer for the
backward: all that was saved, and the time of decoding on top. The op keeps the compressed weight
and decodes again. That has to happen before autograd is traced, and so it does here; inside
checkpoints too.

A compressed weight that something else reads (an embedding, a product by hand) is decoded there,
which is right and not small; it is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch._ops import HigherOrderOperator
from torch.fx import Node

from .. import compat
from ..kernels import coded_weight as op_folder
from ..report import format_bytes
from .base import Decline, Done
from .canonical import aten, read_one
from .editor import Editor
from .graph_info import GraphInfo, node_name


@dataclass(frozen=True)
class Coded:
    """A linear with a compressed weight, or another reader of one."""

    node: Node
    weight: Node
    x: Node | None = None
    bias: Node | None = None


class EncodeWeights:
    """The pass."""

    name = "encode_weights"
    version = 1
    tier = "exact"

    def enabled(self, info: GraphInfo) -> bool:
        """Return whether memeff.weights is on."""
        return info.options.weights != "off"

    # --- find -------------------------------------------------------------------------------------

    def find(self, info: GraphInfo) -> Iterable[Coded]:
        """Yield every reader of a compressed weight."""
        for node in info.gm.graph.nodes:
            if node.op not in ("call_function", "call_method") or _is_region(node):
                continue
            weights = [n for n in node.all_input_nodes if _coded(n) is not None]
            if weights:
                yield _read(node) or Coded(node, weights[0])

    # --- check ------------------------------------------------------------------------------------

    def check(self, info: GraphInfo, match: Coded) -> Decline | None:
        """Return why the place must be left alone, or None."""
        found = _other_reader(match) or _subclass(match) or _cast(info, match)
        # Blocks are alike: equal answers are one record, with their count.
        return None if found is None else replace(found, node=match.node, sites=1)

    def gain(self, info: GraphInfo, match: Coded) -> None:
        """Return None: a layer's saving is said in the sentence, where equal layers are counted."""

    def anchor(self, match: Coded) -> Node:
        """Return the linear."""
        return match.node

    def places(self, match: Coded) -> Iterable[Node]:
        """Return the linear."""
        return (match.node,)

    # --- rewrite ----------------------------------------------------------------------------------

    def rewrite(self, info: GraphInfo, match: Coded, editor: Editor) -> Done:
        """Replace the linear by the op."""
        weight = _coded(match.weight)
        assert weight is not None
        with editor.at(match.node):
            x, bias = (
                node
                if node is None or _dtype(info, node) == weight.dtype
                else editor.call(aten.to.dtype, node, weight.dtype)
                # Matches are found before any edit: one linear's input may be another's result.
                for node in (n and info.current(n) for n in (match.x, match.bias))
            )
            out = info.tensor(match.node)
            trains = out is None or out.requires_grad
            new = editor.call(op_folder.coded_weight_linear, x, match.weight, bias, trains)
        editor.replace(match.node, new)
        return Done(new, _sentence(info, match, weight), sites=1)

    def dead(self, match: Coded) -> Sequence[Node]:
        """Return what nobody reads any more."""
        return (match.node,)


# --- reading --------------------------------------------------------------------------------------


def _coded(node: Node) -> op_folder.CodedWeight | None:
    value = compat.example_value(node)
    return value if isinstance(value, op_folder.CodedWeight) else None


def _is_region(node: Node) -> bool:
    """Return whether the node only hands the weight to a graph inside this one."""
    return isinstance(node.target, HigherOrderOperator)


def _read(node: Node) -> Coded | None:
    call = read_one(node)
    if call is None or call.op is not aten.linear.default:
        return None
    x, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if _coded(weight) is None or any(_coded(n) is not None for n in (x, bias) if n is not None):
        return None
    return Coded(node, weight, x, bias)


# --- conditions -----------------------------------------------------------------------------------


def _other_reader(match: Coded) -> Decline | None:
    if match.x is not None:
        return None
    return Decline(
        "not_a_linear",
        f"`{node_name(match.node)}` reads a compressed weight and is not a linear, so that the "
        "weight is decoded there, and kept decoded if the backward needs it",
        "leave this weight out of compress_ with its skip argument",
    )


def _subclass(match: Coded) -> Decline | None:
    for node in (match.x, match.bias):
        value = None if node is None else compat.example_value(node)
        if value is not None and not compat.is_fake(value):
            kind = type(value).__name__
            return Decline(
                f"subclass_operand({kind})",
                f"an operand of the linear is a {kind}, which this op does not take",
                "hand the linear a plain tensor",
            )
    return None


def _cast(info: GraphInfo, match: Coded) -> Decline | None:
    out = info.tensor(match.node)
    assert out is not None
    if out.dtype == torch.bfloat16:
        return None
    return Decline(
        f"other_dtype({str(out.dtype).removeprefix('torch.')})",
        "autocast runs this linear in another dtype than the weight was compressed from",
        "use autocast with torch.bfloat16",
    )


def _dtype(info: GraphInfo, node: Node) -> torch.dtype:
    value = info.tensor(node)
    assert value is not None
    return value.dtype


# --- saying it ------------------------------------------------------------------------------------


def _sentence(info: GraphInfo, match: Coded, weight: op_folder.CodedWeight) -> str:
    name = op_folder.engine_for(weight.device)
    said = (
        f"linear -> memeff::coded_weight_linear on a weight coded as {weight.codec}; engine "
        f"{name}: {op_folder.ENGINES[name]}"
    )
    out = info.tensor(match.node)
    if out is None or not out.requires_grad or not info.regions[match.node].grad:
        return said
    n, k = sympy.symbols("N K", integer=True, positive=True)
    kept = int(op_folder.bytes_before(n, k).subs({n: weight.shape[0], k: weight.shape[1]}))
    return (
        f"{said}. The backward decodes again: {format_bytes(kept)} of decoded weight "
        f"({op_folder.bytes_before(n, k)} bytes with N = {weight.shape[0]}, "
        f"K = {weight.shape[1]}) are not kept for it"
    )
