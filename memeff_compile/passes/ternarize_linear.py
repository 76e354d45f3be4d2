"""Rewrite linear layers with quantised inputs and a ternary weight into memeff::ternary_linear.

The op multiplies the integer codes of input and weight, and adds up the products as integers. In
training, three ops do the work of memeff::ternary_linear, as in this example:

    before: s = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
            a = 1 / w.abs().mean().clamp(min=1e-5)
            y = linear(x + ((x * s).round().clamp(-128, 127) / s - x).detach(),
                       w + ((w * a).round().clamp(-1, 1) / a - w).detach())
    after:  codes, scale, sums = memeff.ternary_linear_quantize(x)
            packed = memeff.ternary_linear_pack(w, a)
            (y,) = memeff.ternary_linear_product(x, [w], codes, scale, sums, [packed], [a], ...)

Here, `sums` has the sum of each token's codes. The codes of inputs and weights equal those that the
model's own operations compute. The ops sum the products of codes exactly. A dense linear layer
first rounds both dequantised operands to the layer's dtype, such as bf16. In training,
memeff::ternary_linear_product saves the codes for the backward pass (two bits per weight and eight
per input element) instead of two full tensors. The backward pass decodes the codes to the values
that the model itself would multiply. Layers with the same input share the codes of that input. If
no gradient is needed, the single op memeff::ternary_linear quantises the input and multiplies the
input by the packed weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..kernels import ternary_linear as op_folder
from .graph.base import Decline, Done, Gain, GraphPass, mutated
from .graph.canonical import aten, call_of
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among, node_name
from .ternary.chains import (
    Quantized,
    Unread,
    are_codes,
    may_round,
    other_user,
    read_quantized,
    rounds,
)
from .ternary.neighbours import Entering, is_computed, read_added, read_entering, read_gate
from .ternary.products import Product, read_product


@dataclass(frozen=True)
class Site:
    """A linear layer whose two operands were recognized as quantised, or the reason why one of them
    was not.
    """

    linear: Node
    bias: Node | None
    tokens: Quantized | Unread
    weight: Quantized | Unread | None  # None: the value is not rounded

    @property
    def both(self) -> tuple[Quantized, Quantized]:
        """Return the quantised weight and the quantised input of a linear layer, if both were
        recognized."""
        assert isinstance(self.weight, Quantized)
        assert isinstance(self.tokens, Quantized)
        return self.weight, self.tokens


@dataclass
class Group:
    """Linear layers with the same input, which the model quantises in the same way for all these
    layers.
    """

    sites: list[Site]
    owned: list[Node] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)  # set if they are already calls of the op


@dataclass
class Calls:
    """Calls of `memeff::ternary_linear` that have the same input; modules with packed weights make
    such calls.
    """

    nodes: list[Node]  # the calls
    entering: Entering  # the ops before them that can be part of one call
    added: tuple[Node, Node] | None = None  # the sum after the only result, and the added node
    is_early: bool = False  # a kernel of this graph runs before, and no node writes to the weights
    owned: list[Node] = field(default_factory=list)  # nodes to erase in the end


class TernarizeLinear(GraphPass):
    name = "ternarize_linear"

    def find(self, info: GraphInfo) -> Iterable[Group | Calls]:
        """Yield linear layers with a rounded weight or a rounded input.

        Then yield calls of memeff::ternary_linear that have packed weights and share an input, if
        one call can replace them.
        """
        groups: dict[Any, Group] = {}
        for node in info.visit(info.gm.graph.nodes if may_round(info.gm) else ()):
            site = _site(node)
            if site is None:
                continue
            key: Any = node
            if self._check_site(info, site) is None and not self.skipped(info, site.linear):
                _, tokens = site.both
                key = (tokens.source, tokens.quantizer, _is_trained(info, site))
            if key in groups and _can_join(info, groups[key], site):
                groups[key].sites.append(site)
            else:
                groups[key if key not in groups else node] = Group([site])
        yield from groups.values()
        yield from self._products(info)
        yield from self._mergeable(info)

    def _products(self, info: GraphInfo) -> Iterable[Group]:
        """Yield groups of calls of `ternary_linear_product` that one call can replace.

        The calls of a group have the same input, and each call has one packed weight."""
        groups: dict[Any, Group] = {}
        for node in info.visit(info.gm.graph.nodes):
            product = read_product(info, node)
            if product is None or self.skipped(info, product.result):
                continue
            site = Site(product.result, product.bias, product.tokens, product.weight)
            key = (product.tokens.source, product.tokens.quantizer)
            if key in groups and _can_join(info, groups[key], site):
                groups[key].sites.append(site)
                groups[key].products.append(product)
            elif key not in groups:
                groups[key] = Group([site], products=[product])
        yield from (group for group in groups.values() if len(group.sites) > 1)

    def _mergeable(self, info: GraphInfo) -> Iterable[Calls]:
        """Yield calls of memeff::ternary_linear on packed weights that can become one call, or
        whose kernel can include the operations before or after them."""
        found: dict[Any, list[Node]] = {}
        for node in info.visit(info.gm.graph.nodes):
            if node.target is op_folder.ternary_linear and not node.kwargs:
                given: Any = node.args
                x, packed, scales, biases, *rest = given
                operands = [n for n in (*packed, *scales, *biases) if isinstance(n, Node)]
                is_mine = not self.skipped(info, node)
                if is_mine and all(n.op in ("placeholder", "get_attr") for n in operands):
                    found.setdefault((x, tuple(rest)), []).append(node)
        by_first = {nodes[0]: (x, nodes) for (x, _), nodes in found.items()}
        for first in info.visit(by_first):
            x, nodes = by_first[first]
            if any(map(info.may_be_written, _weights(nodes))):
                continue
            is_written = info.written_between([x], nodes[0], nodes[-1]) is not None
            for together in [[node] for node in nodes] if is_written else [nodes]:
                calls = _with_neighbours(info, x, together)
                if len(together) > 1 or calls.entering.chain or calls.added is not None:
                    yield calls

    def check(self, info: GraphInfo, match: Group | Calls) -> Decline | None:
        if isinstance(match, Calls):
            return None
        for site in match.sites:
            found = self._check_site(info, site)
            if found is not None:
                return found.counted(site.linear)
        return None

    def _check_site(self, info: GraphInfo, site: Site) -> Decline | None:
        return _unread(site) or _without_estimator(info, site) or _unserved(info, site)

    def gain(self, info: GraphInfo, match: Group | Calls) -> Gain | None:
        """Return the bytes of the tensors that autograd saves, before and after the rewrite.

        Return None if autograd saves no tensors for the backward pass."""
        if isinstance(match, Calls) or match.products or info.called_by is not None:
            return None
        if self.check(info, match) is not None or not _is_trained(info, match.sites[0]):
            return None
        n, k, m = sympy.symbols("N K M", integer=True, positive=True)
        every = [_sizes(info, site) for site in match.sites]
        tokens, _, columns = every[-1]
        sizes = {"N": sum(rows for _, rows, _ in every), "K": columns, "M": tokens}
        value = info.value(match.sites[0].linear)
        before = op_folder.saved_before(n, k, m, dtype=value.dtype)
        return Gain(before, op_folder.saved_after(n, k, m), sizes)

    def places(self, match: Group | Calls) -> Sequence[Node]:
        if isinstance(match, Calls):
            return match.nodes
        return [site.linear for site in match.sites]

    def parts(self, match: Group | Calls) -> Sequence[Group]:
        """Return a separate match for each linear layer of a match that combines several layers.

        For a match of calls of memeff::ternary_linear or memeff::ternary_linear_product, return no
        separate matches. If the rewrite fails, these calls stay in the graph unchanged."""
        if isinstance(match, Calls) or match.products:
            return []
        return [Group([site]) for site in match.sites]

    def rewrite(self, info: GraphInfo, match: Group | Calls, editor: Editor) -> Done:
        if isinstance(match, Calls):
            return _merge(info, match, editor)
        if match.products:
            _emit(info, match, editor, is_trained=True)
            match.owned += [node for product in match.products for node in product.owned]
            count = len(match.sites)
            sentence = f"{count} ternary products of one input -> one, which quantises it once"
            return Done(match.sites[0].linear, sentence, sites=count)
        is_trained = _is_trained(info, match.sites[0])
        sentence = _sentence(info, match, is_trained=is_trained)
        for site in match.sites:
            match.owned.append(site.linear)
            for found in site.both:
                match.owned += found.chain
                for number in found.numbers:  # compile again if a number that was read changes
                    compat.hold_constant(number)
        _emit(info, match, editor, is_trained=is_trained)
        return Done(match.sites[0].linear, sentence, sites=len(match.sites))

    def dead(self, match: Group | Calls) -> Sequence[Node]:
        """Return the nodes that no node reads after the rewrite, including unused second results of
        reductions.
        """
        items = [user for node in match.owned for user in node.users if not user.users]
        return [*match.owned, *(user for user in items if user.op == "call_function")]


def _site(node: Node) -> Site | None:
    """Return the description of a node that is a linear layer with a quantised operand, or None."""
    if (call := call_of(node, aten.linear.default)) is None:
        return None
    tokens, weight = call.args["input"], call.args["weight"]
    read_weight = read_quantized(weight) if rounds(weight) else None
    if read_weight is None and not rounds(tokens):
        return None
    read_tokens = read_quantized(tokens)
    # Rounding in earlier layers does not matter here.
    is_fake = isinstance(read_tokens, Quantized) and not read_tokens.is_weight
    if read_weight is None and not is_fake and not are_codes(tokens):
        return None
    return Site(node, call.args["bias"], read_tokens, read_weight)


def _is_trained(info: GraphInfo, site: Site) -> bool:
    value = info.tensor(site.linear)
    return value is not None and value.requires_grad


def _can_join(info: GraphInfo, group: Group, site: Site) -> bool:
    """Return whether the operands of a layer are computed before the first layer of the group."""
    first, (weight, tokens) = group.sites[0], site.both
    needed = [weight.source, *([site.bias] if site.bias is not None else [])]
    mine, theirs = info.tensor(site.linear), info.tensor(first.linear)
    if mine is None or theirs is None or mine.dtype != theirs.dtype:
        return False
    begin, end = info.positions[first.linear], info.positions[site.linear]
    has_form = first.both[0].quantizer.is_step == weight.quantizer.is_step
    if not has_form or not all(info.positions[node] < begin for node in needed):
        return False
    # The codes are those of the first linear; in between no node may write to their source.
    moved = [tokens.source, *tokens.chain[:1], *needed]
    read = [found for each in (*group.sites, site) for found in each.both]
    # these write only to values that they made
    ours = {node for found in read for node in found.chain}
    between = (w for w in info.writes if begin < w.position <= end and w.node not in ours)
    return not any(info.may_write(write, moved) for write in between)


def _sizes(info: GraphInfo, site: Site) -> tuple[int, int, int]:
    """Return the number of tokens in the call for which the graph is compiled, and the numbers of
    rows and columns of the weight.
    """
    weight, _ = site.both
    tokens = math.prod(map(compat.size_hint, info.value(site.linear).shape[:-1]))
    rows, columns = map(compat.size_hint, info.value(weight.source).shape)
    return tokens, rows, columns


_FLOATING = (torch.bfloat16, torch.float16, torch.float32)


def _unread(site: Site) -> Decline | None:
    if site.weight is None:
        return Decline(
            "weight_values",
            "the tokens are quantised as for ternary weights, and the weight comes as it is: "
            "whether its values are -1, 0 and 1 is not known when compiling",
            "memeff_compile.pack_ternary_(model) looks at them and packs them",
        )
    for name, found in (("weight", site.weight), ("input", site.tokens)):
        if isinstance(found, Unread):
            return replace(found, sentence=f"the {name} of the linear: {found.sentence}")
    weight, tokens = site.both
    if weight.is_weight and not tokens.is_weight:
        return None
    return Decline("operands", "the weight is quantised like tokens, or the input like a weight")


def _without_estimator(info: GraphInfo, site: Site) -> Decline | None:
    if not _is_trained(info, site):
        return None
    for name, found in zip(("weight", "input"), site.both, strict=True):
        source = info.tensor(found.source)
        result = info.tensor(found.chain[0]) if found.chain else None
        if source is None or not source.requires_grad:
            continue
        if result is not None and not result.requires_grad:
            return Decline(
                "no_straight_through",
                f"the {name} of the linear is cut off from its gradient, and the op would hand "
                "one on",
                "quantise under no_grad only what the estimator adds back",
            )
        if not found.is_straight:
            return Decline(
                "no_straight_through",
                f"the {name} of the linear is quantised without a straight-through estimator: its "
                "gradient is that of the scale alone",
                "write x + (quantised - x).detach()",
            )
    return None


def _unserved(info: GraphInfo, site: Site) -> Decline | None:
    """Return the reason why memeff::ternary_linear does not support a linear layer, would change
    its result or would save nothing. Return None if none of these reasons applies.
    """
    kind = kind_among((*(found.source for found in site.both), site.bias))
    if kind:
        said = f"an operand of the linear is a {kind}: the scale would be that of a part of it"
        return Decline(f"subclass_weight({kind})", said, "gather the weight before the linear")
    users = (other_user(found.chain, found.chain[0]) for found in site.both if found.chain)
    user = next(filter(None, users), None)
    if user is not None:
        return Decline(
            f"chain_reused({node_name(user)})",
            f"`{node_name(user)}` also uses a value on the way to the codes, so that it has to be "
            "computed all the same",
            "compute that from the input of the linear",
        )
    weight, tokens = site.both
    bias, out = info.tensor(site.bias), info.value(site.linear)
    sentence = op_folder.supports(info.value(tokens.source), info.tensor(weight.source), bias)
    if sentence is None and out.dtype not in _FLOATING:
        sentence = f"the result is {out.dtype}; bfloat16, float16 or float32 is needed"
    if sentence:
        return Decline("unsupported", sentence)
    for found in site.both:
        first = min((info.positions[node] for node in found.chain), default=0)
        for write in info.writes if found.chain else ():
            is_between = first < write.position <= info.positions[site.linear]
            # The quantised tensors, and the operands of the linear.
            read = (found.source, found.chain[0])
            if is_between and write.node not in found.chain and info.may_write(write, read):
                return mutated(write.node, "an operand between its quantisation and the linear")
    if _is_trained(info, site) or op_folder.engine_for(out.device, out.dtype) != "reference":
        return None
    return Decline(
        "no_gain",
        "nothing is kept for a backward, and this device has no kernel for packed weights",
        "memeff_compile.pack_ternary_(model) holds them in an eighth of the memory of bf16",
    )


def _emit(info: GraphInfo, match: Group, editor: Editor, *, is_trained: bool) -> None:
    """Insert the ops that compute all linear layers of the group, before the first of them.

    For each weight, one op packs the weight. In training, a second op quantises the input, and a
    third op multiplies the input by all packed weights. Without gradients, a single op quantises
    and multiplies the input.
    """
    first, weights = match.sites[0], [site.both[0] for site in match.sites]
    first_weight, tokens = first.both
    is_step, quantizer = first_weight.quantizer.is_step, tokens.quantizer
    source, dtype = info.current(tokens.source), info.value(first.linear).dtype
    with editor.at(first.linear):
        if is_trained:
            detached, how = editor.call(aten.detach.default, source), quantizer.arguments()
            quantized = editor.call(op_folder.ternary_linear_quantize, detached, *how)
        packed = [_packed(info, editor, weight) for weight in weights]
        held, scales = [codes for codes, _ in packed], [scale for _, scale in packed]
        operands: list[Any]
        if is_trained:
            op = op_folder.ternary_linear_product
            codes = [editor.item(quantized, place) for place in range(3)]
            biases = {p: site.bias for p, site in enumerate(match.sites) if site.bias is not None}
            operands = [[info.current(w.source) for w in weights], *codes, held, scales]
            operands += [list(biases.values()), list(biases), dtype, quantizer.is_step, is_step]
        else:
            op = op_folder.ternary_linear
            every = [site.bias for site in match.sites]
            operands = [held, scales, every, dtype, is_step, *quantizer.arguments()]
        result = editor.call(op, source, *operands)
        outputs = [editor.item(result, place) for place in range(len(weights))]
    gate = _made_again(info, match) if is_trained else None
    for node in [] if gate is None else [result, *gate]:
        compat.recompute_in_backward(node)
    for site, out in zip(match.sites, outputs, strict=True):
        editor.replace(site.linear, out)


def _made_again(info: GraphInfo, match: Group) -> list[Node] | None:
    """Return the activation functions that follow a gate and an up projection.

    The caller makes the backward pass recompute the results of both projections and of these
    functions. Return None if the group is no such pair of projections, or if the option
    `memeff.ternary_gate` is "keep". Inside a checkpoint, also return None, because the checkpoint
    recomputes the results anyway.
    """
    if info.options.ternary_gate != "recompute" or info.parent is not None:
        return None
    return read_gate([site.linear for site in match.sites])


def _with_neighbours(info: GraphInfo, x: Node, nodes: list[Node]) -> Calls:
    """Return calls of `memeff::ternary_linear`, with the operations before or after them that their
    kernel can include.

    If the kernel can include no operation, the result contains only the calls.
    """
    value = info.tensor(x)
    has_more = len(nodes[0].args) > FIRST_NEIGHBOUR or (value is not None and value.requires_grad)
    if value is None or has_more or op_folder.engine_for(value.device, value.dtype) == "reference":
        return Calls(nodes, Entering(x))
    entering = read_entering(x, nodes)
    if entering.chain:
        read = [n for n in (entering.source, entering.up, entering.norm) if n is not None]
        first = min(entering.chain, key=info.positions.__getitem__)
        if info.written_between(read, first, nodes[0]) is not None:
            entering = Entering(x)
    return Calls(nodes, entering, _added(info, nodes), is_computed(entering.source))


# Place of the first argument of `ternary_linear` that is about neighbours.
FIRST_NEIGHBOUR = 6 + len(op_folder.Quantizer().arguments())


def _added(info: GraphInfo, nodes: Sequence[Node]) -> tuple[Node, Node] | None:
    """Return the addition after a call of `memeff::ternary_linear`, and the addition's other
    operand.

    If `nodes` has several calls, or the call has several results, return None. Also return None if
    the call cannot include the addition, for example because the other operand is computed after
    the call."""
    items, (first, *others) = list(nodes[0].users), nodes
    packed: Any = first.args[1]
    found = None if others or len(items) != 1 or len(packed) != 1 else read_added(items[0])
    if found is None or info.positions[found[1]] > info.positions[first]:
        return None
    value = info.tensor(found[0])
    if value is None or value.requires_grad:
        return None
    return found if info.written_between([found[1]], first, found[0]) is None else None


def _merge(info: GraphInfo, match: Calls, editor: Editor) -> Done:
    """Insert one call of `memeff::ternary_linear` in place of all calls of the match, at the
    position of the first call."""
    first, entering, added = match.nodes[0], match.entering, match.added
    lists = [list(chain(*held)) for held in zip(*map(_lists, match.nodes), strict=True)]
    settings = list(first.args[4:])
    if entering.chain or added is not None:
        whole = (torch.float32, False, *op_folder.Quantizer().arguments())
        settings += whole[len(settings) :]
        around = (entering.up, entering.norm, None if added is None else added[1])
        up, norm, sum_ = (None if n is None else info.current(n) for n in around)
        compat.hold_constant(entering.eps)
        settings += [up, norm, compat.known_number(entering.eps), sum_, match.is_early]
    with editor.at(first):
        source = info.current(entering.source)
        found = editor.call(op_folder.ternary_linear, source, *lists, *settings)
        outputs = iter([editor.item(found, place) for place in range(len(lists[0]))])
    for node in match.nodes:
        packed: Any = node.args[1]
        news = [next(outputs) for _ in packed]
        for item in list(node.users):
            place: Any = item.args[1]
            editor.replace(item if added is None else added[0], news[place])
            match.owned += [item] if added is None else [added[0], item]
        match.owned.append(node)
    match.owned += entering.chain
    return Done(first, _sentence_of_calls(match), sites=len(match.nodes))


def _sentence_of_calls(match: Calls) -> str:
    subject, once = "a linear on packed weights", ""
    if len(match.nodes) > 1:
        subject, once = f"{len(match.nodes)} linears on packed weights with one input", " once"
    said = {
        "gates": match.entering.up is not None,
        "normalises": match.entering.norm is not None,
        f"quantises the input{once}": True,
        "adds the residual": match.added is not None,
    }
    *parts, last = (what for what, holds in said.items() if holds)
    return f"{subject} -> one call, which {', '.join(parts)}{' and ' if parts else ''}{last}"


def _weights(nodes: Sequence[Node]) -> list[Node]:
    given = (operand for node in nodes for held in _lists(node) for operand in held)
    return [operand for operand in given if isinstance(operand, Node)]


def _lists(call: Node) -> list[Sequence[Node | None]]:
    lists: Any = call.args[1:4]
    return list(lists)


def _packed(info: GraphInfo, editor: Editor, weight: Quantized) -> tuple[Node, Node]:
    """Insert the scale of a weight, computed as in the model, and the weight's packed codes."""
    how = weight.quantizer
    detached = editor.call(aten.detach.default, info.current(weight.source))
    wide = detached if how.is_native else editor.cast(detached, torch.float32)
    mean = editor.call(aten.mean.default, editor.call(aten.abs.default, wide))
    bounded = editor.call(aten.add.Tensor if how.adds_eps else aten.clamp.default, mean, how.eps)
    scale = bounded if how.is_step else editor.call(aten.reciprocal.default, bounded)
    packed = editor.call(op_folder.ternary_linear_pack, detached, scale, how.is_step, how.is_native)
    return packed, scale


def _sentence(info: GraphInfo, match: Group, *, is_trained: bool) -> str:
    value, (_, tokens) = info.value(match.sites[0].linear), match.sites[0].both
    kind = op_folder.KINDS[tokens.quantizer.kind]
    engine = op_folder.engine_for(value.device, value.dtype)
    op = "memeff::ternary_linear_product" if is_trained else "memeff::ternary_linear"
    held = "in the input's dtype" if tokens.quantizer.is_native else "in float32"
    shared = f", {len(match.sites)} linears share the codes" if len(match.sites) > 1 else ""
    after = (
        "two bits per weight and eight per input are kept for the backward, which saves memory; "
        "on an H200 whole steps took longer than Inductor's, and less with CUDA graphs "
        "(mode='reduce-overhead')"
        if is_trained
        else "packing reads the weights again in each call; memeff_compile.pack_ternary_(model) "
        "does it once"
    )
    return (
        f"linear with ternary weight and {kind.text} tokens (quantised {held}{shared}) -> {op}; "
        f"engine {engine}: {op_folder.ENGINES[engine]}; {after}"
    )
