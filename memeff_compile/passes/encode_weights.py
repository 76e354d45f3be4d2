"""Rewrite linear layers with a compressed weight into memeff::coded_weight_linear.

The op keeps no decoded weight for the backward pass.

    before: out = linear(x, W, b)       after: out = memeff.coded_weight_linear(x, W, b)

W is a `CodedWeight`, which `memeff_compile.compress_` puts in place of a dense weight. Without
this pass, each linear layer would decode W. Autograd would keep every layer's decoded weight for
the backward pass, so compression would save no memory. The op memeff::coded_weight_linear saves the
compressed weight, and its backward pass decodes the weight again. The pass runs before autograd
traces the graph. It also rewrites the linear layers inside activation checkpoints.

In inference, two or three linear layers with the same input, such as those of queries, keys and
values, become a single op. This op launches only one kernel if the input is one token:

    before: q, k, v = linear(x, Q), linear(x, K), linear(x, V)
    after:  q, k, v = memeff.coded_weight_linears(x, [Q, K, V], [None, None, None])

If another operation (such as an embedding or an explicit matrix product) reads a compressed weight,
the weight is decoded before the operation. The result is correct, but the decoded weight takes
memory. The compilation report (`last_report()`) names the operation that reads the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..compat import HigherOrderOperator
from ..kernels import coded_weight as op_folder
from ..kernels.checks import short
from ..kernels.gated_linear import gated_linear
from ..report import format_bytes
from .graph.base import Decline, Done, GraphPass
from .graph.canonical import aten, call_of
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among, node_name


@dataclass(frozen=True)
class Coded:
    """A linear layer with a compressed weight, or another node that reads a compressed weight."""

    node: Node
    weight: Node
    x: Node | None = None
    bias: Node | None = None


@dataclass(frozen=True)
class Several:
    """Linear layers that have the same input, in graph order.

    `split` is the reason why further linear layers with the same input are not included.
    """

    sites: tuple[Coded, ...]
    split: str = ""


class EncodeWeights(GraphPass):
    """The pass that makes linear layers compute with compressed weights directly.

    The compilation report merges entries that differ only in their locations, such as entries of
    equal layers. So the bytes in an entry's text are those that one layer saves.
    """

    name = "encode_weights"

    def find(self, info: GraphInfo) -> list[Several]:
        """Group the nodes that read a compressed weight into matches.

        Linear layers with the same input form one match, and every other node forms a match alone.
        """
        found: list[Several] = []
        open_groups: dict[Node | None, int] = {}
        for node in info.visit(info.gm.graph.nodes):
            weights = [n for n in node.all_input_nodes if _coded(n) is not None]
            # A nested graph only receives the weight; a gated linear decodes the weight twice.
            is_call = node.op in ("call_function", "call_method") and _whole(node) is node
            is_left = isinstance(node.target, HigherOrderOperator) or node.target is gated_linear
            if not weights or not is_call or is_left:
                continue
            site = _read(node) or Coded(node, weights[0])
            at = open_groups.get(site.x)
            why = "" if at is None else self._why_apart(info, found[at].sites, site)
            if at is not None and not why:
                found[at] = replace(found[at], sites=(*found[at].sites, site))
                continue
            if self._check_site(info, site) is None and not self.skipped(info, site.node):
                open_groups[site.x] = len(found)
            found.append(Several((site,), why))
        return found

    def _why_apart(self, info: GraphInfo, group: Sequence[Coded], site: Coded) -> str:
        """Return the reason why a linear layer cannot share one op with the layers in `group`, or
        "".

        All these layers have the same input.
        """
        first = group[0]
        codecs = [w.codec for each in (first, site) if (w := _coded(each.weight)) is not None]
        needed = [_whole(n) for n in (site.x, site.weight, site.bias) if n is not None]
        outs = [info.tensor(each.node) for each in (first, site)]
        if self._check_site(info, site) is not None or self.skipped(info, site.node):
            return "it is declined or skipped"
        if codecs[0] != codecs[1]:
            return f"one is coded as {codecs[0]}, the other as {codecs[1]}"
        if op_folder.parse(codecs[0]).family != "win4":
            return f"{codecs[0]} is not multiplied while it is decoded"
        if any(out is None or out.requires_grad for out in outs):
            return "they are trained, or an earlier layer is"
        if len(group) == op_folder.MAX_TOGETHER:
            return f"one launch serves {op_folder.MAX_TOGETHER}"
        if not all(info.positions[n] < info.positions[first.node] for n in needed):
            return "its weight or bias is computed in between"
        if info.written_between(needed, first.node, site.node) is not None:
            return "an operand is written to in between"
        return ""

    def check(self, info: GraphInfo, match: Several) -> Decline | None:
        for site in match.sites:
            found = self._check_site(info, site)
            if found is not None:
                return found.counted(site.node)
        return None

    def _check_site(self, info: GraphInfo, site: Coded) -> Decline | None:
        if site.x is None:
            return Decline(
                "not_a_linear",
                f"`{node_name(site.node)}` reads a compressed weight and is not a linear, so that "
                "the weight is decoded there, and kept decoded if the backward needs it",
                "leave this weight out of compress_ with its skip argument",
            )
        if compat.is_dtensor(compat.example_value(site.weight)):
            return Decline(
                "distributed_linear",
                "the operands are DTensors: PyTorch decodes this process's part of the weight in "
                "each call, and keeps it decoded if the backward needs it",
                "split the model by transformers' DistributedConfig(tp_size=), whose linears use "
                "plain tensors if the model is not trained",
            )
        kind = kind_among((site.x, site.bias))
        if kind:
            said = f"an operand of the linear is a {kind}, which this op does not take"
            return Decline(f"subclass_operand({kind})", said, "pass a plain tensor to the linear")
        dtype, own = info.value(site.node).dtype, _dtype(site)
        if dtype == own:
            return None
        said = "autocast runs this linear in another dtype than the weight was compressed from"
        remedy = "use autocast with torch.bfloat16"
        if own != torch.bfloat16:
            remedy = f"leave autocast off, or use it with {own}"
        return Decline(f"other_dtype({short(dtype)})", said, remedy)

    def places(self, match: Several) -> Sequence[Node]:
        return [site.node for site in match.sites]

    def parts(self, match: Several) -> Sequence[Several]:
        return [Several((site,), match.split) for site in match.sites]

    def rewrite(self, info: GraphInfo, match: Several, editor: Editor) -> Done:
        first = match.sites[0]
        sentence = _sentence(info, match)
        with editor.at(first.node):
            # In the dtype of coded weights, as autocast would hand them over. Matches are found
            # before any edit: one linear's input may be another's result.
            x, *biases = (
                None if node is None else editor.cast(info.current(node), _dtype(first))
                for node in (first.x, *(site.bias for site in match.sites))
            )
            if len(match.sites) == 1:
                trains = info.value(first.node).requires_grad
                operands = (x, first.weight, biases[0], trains)
                news = [editor.call(op_folder.coded_weight_linear, *operands)]
            else:
                weights = [
                    w if info.positions[w] < info.positions[first.node] else editor.copy(w, {})
                    for w in (site.weight for site in match.sites)
                ]
                op = editor.call(op_folder.coded_weight_linears, x, weights, biases)
                news = [editor.item(op, place) for place in range(len(weights))]
        for site, new in zip(match.sites, news, strict=True):
            editor.replace(site.node, new)
        return Done(news[0], sentence, sites=len(match.sites))


def _coded(node: Node) -> op_folder.CodedWeight | None:
    value = compat.local_part(compat.example_value(node))
    return value if isinstance(value, op_folder.CodedWeight) else None


def _dtype(site: Coded) -> torch.dtype:
    """Return the dtype that the weight of a match had before compression."""
    weight = _coded(site.weight)
    return torch.bfloat16 if weight is None else weight.dtype


def _whole(node: Node) -> Node:
    """If `node` is this rank's shard of a graph input, return that input, otherwise return the
    node itself.
    """
    if node.target != "to_local" or node.kwargs or len(node.args) != 1:
        return node
    (whole,) = node.args
    return whole if isinstance(whole, Node) and whole.op == "placeholder" else node


def _read(node: Node) -> Coded | None:
    if (call := call_of(node, aten.linear.default)) is None:
        return None
    x, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if _coded(weight) is None or any(_coded(n) is not None for n in (x, bias) if n is not None):
        return None
    return Coded(node, weight, x, bias)


def _sentence(info: GraphInfo, match: Several) -> str:
    site = match.sites[0]
    weight = _coded(site.weight)
    assert weight is not None
    name = op_folder.engine_for(weight.device)
    engine = f"engine {name}: {op_folder.ENGINES[name]}"
    if len(match.sites) > 1:
        return (
            f"{len(match.sites)} linears of one input -> memeff::coded_weight_linears on weights "
            f"coded as {weight.codec}; {engine}. One token is one launch"
        )
    apart = f"; apart from another linear of its input: {match.split}" if match.split else ""
    said = f"linear -> memeff::coded_weight_linear on a weight coded as {weight.codec}; "
    said += f"{engine}{apart}"
    out = info.tensor(site.node)
    if out is None or not out.requires_grad or not info.regions[site.node].grad:
        return said
    rows, columns = weight.shape
    n, k = sympy.symbols("N K", integer=True, positive=True)
    before = op_folder.bytes_before(n, k, weight.dtype.itemsize)
    kept = format_bytes(int(before.subs({n: rows, k: columns})))
    return (
        f"{said}. The backward decodes again: {kept} "
        f"of decoded weight ({before} bytes with N = {rows}, K = {columns}) are not kept for it"
    )
