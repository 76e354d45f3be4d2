"""Report each output projection of a training graph whose loss was not fused.

To distinguish an output projection from a wide layer inside a model, this module looks at how the
graph uses the layer's result. The result of an inner layer is an operand of another matrix product.
The result of an output projection is an output of the graph, or the graph reduces this result over
the classes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from torch.fx import Node

from ... import compat
from ..graph.base import Decline
from ..graph.canonical import is_several
from ..graph.graph_info import GraphInfo, node_name
from . import outputs
from .head import Chain, Head, HeadReader

LARGE_VOCABULARY = 8192  # least number of classes for which an unfused loss is reported
TRL_LOSS = "trl/kernels/chunked_logprob.py"  # where its trainers compute log-probabilities
_MAX_NODES = 256
_FEWER = 16  # a tensor with 16 times fewer elements than a product no longer has the classes

_HINT = (
    "compute the loss by F.cross_entropy, or by log_softmax and gather of one class per row, from "
    "logits that nothing else reads"
)
_NAMES = (
    "linear matmul mm bmm addmm baddbmm mv einsum scaled_dot_product_attention bilinear tensordot "
    "embedding embedding_bag flex_attention imatmul rmatmul multi_head_attention_forward "
    "conv1d conv2d conv3d"
)
_PRODUCTS = frozenset(_NAMES.split())


def unfused_heads(
    info: GraphInfo, reader: HeadReader, judged: Collection[Node]
) -> Iterable[Decline]:
    """Yield a Decline (the reason for no rewrite) for each trained output projection whose loss was
    not fused.

    The compilation report shows each Decline. The projection must have at least 8,192 classes.
    `judged` contains the projections and nodes for which a pass has already reported a change or a
    decline. These projections are skipped.
    """
    if not info.needs_grad:
        return
    for node in info.gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or not info.regions[node].grad:
            continue
        if (said := _own_function(info, node)) is not None:
            yield said
        elif (head := _large_head(info, reader, node)) is not None and node not in judged:
            ends = _ends(info, node, judged)
            if ends is not None and (answer := _answer(info, reader, head, ends)) is not None:
                yield answer
    yield from _cut_inside_a_loss(info)


def _large_head(info: GraphInfo, reader: HeadReader, node: Node) -> Head | None:
    """If a node is a matrix product with at least 8,192 classes and a gradient, return it as an
    output projection (`Head`)."""
    value = info.tensor(node)
    if node_name(node) not in _PRODUCTS or value is None or not value.requires_grad:
        return None
    if value.dim() < 1 or compat.size_hint(value.shape[-1]) < LARGE_VOCABULARY:
        return None
    return reader.product(node)


def _ends(info: GraphInfo, product: Node, judged: Collection[Node]) -> list[Node] | None:
    """Return the nodes that reduce the class dimension of a product's result.

    Return None in these cases:

    - another matrix product uses the result, unless that other product is a weighted sum over the
      classes;
    - a pass has already reported on a node that uses the result (such nodes are in `judged`);
    - the result has too many users to follow.
    """
    classes, elements = info.value(product).shape[-1], _elements(info, product)
    queue, seen, ends = [product], {product}, list[Node]()
    while queue:
        for user in queue.pop().users:
            if user in judged or len(seen) > _MAX_NODES:
                return None
            if node_name(user) in _PRODUCTS and not _weighs_classes(info, user, product):
                return None
            if user in seen:
                continue
            seen.add(user)
            value = info.tensor(user)
            sizes = () if value is None else value.shape
            is_wide = any(compat.statically_true(s == classes) for s in sizes)
            # Halves of the classes, such as a gate and its other operand, are followed too.
            if is_wide or is_several(user) or _elements(info, user) * _FEWER >= elements:
                queue.append(user)
            else:
                ends.append(user)
    return ends


def _weighs_classes(info: GraphInfo, node: Node, logits: Node) -> bool:
    """Return whether a product is a weighted sum over the classes, with weights that differ between
    rows, as in a loss.

    An inner layer multiplies all rows by the same weights.
    """
    classes = compat.size_hint(info.value(logits).shape[-1])
    wanted = _elements(info, logits)
    are_as_large = all(_elements(info, each) == wanted for each in node.all_input_nodes)
    return are_as_large and _elements(info, node) * classes <= wanted


def _elements(info: GraphInfo, node: Node) -> int:
    value = info.tensor(node)
    return 0 if value is None else math.prod(map(compat.size_hint, value.shape))


def _answer(info: GraphInfo, reader: HeadReader, head: Head, ends: list[Node]) -> Decline | None:
    """Return the reason (a `Decline`) why the loss of an output projection was not fused, or None.

    The reason names the op that reads the logits. If the graph returns the logits, the reason says
    why they cannot be deferred (computed when first read). Return None if no such reason is found.
    """
    classes = compat.size_hint(info.value(head.node).shape[-1])
    for node in ends:
        value = info.tensor(node)
        if value is not None and value.requires_grad:
            said = f"the logits over {classes} classes end in `{node_name(node)}`, and no loss "
            said += "that this pass reads is made of them"
            return Decline("loss_not_read", said, _HINT, node)
    is_returned = info.output in ends and info.parent is None
    if not is_returned or compat.feeds_resumed_code(info.gm):
        return None
    for node in info.output.all_input_nodes:
        chain = reader.chain(node)
        if isinstance(chain, Chain):
            if reader.input_in_weight(head) is not None and reader.masks_parameter(head):
                return _given_in_weight(head, classes)
            continue
        if chain.node is None or not reader.is_wide(head):
            continue
        if chain.code != "no_linear_head" and head.node in _before(chain.node):
            said = f"this graph returns logits over {classes} classes and no loss, and they "
            said += f"cannot be deferred: {chain.sentence}"
            return replace(chain, code="logits_not_deferrable", sentence=said)
    return None


def _given_in_weight(head: Head, classes: int) -> Decline:
    """Return the reason (a `Decline`) why logits that a graph returns cannot be deferred.

    Deferred logits are computed when first read. The output projection that computes the returned
    logits has a weight that is computed from a graph input. This input is neither a parameter nor a
    buffer.
    """
    said = f"this graph returns logits over {classes} classes and no loss, and they cannot be "
    said += (
        f"deferred: `{node_name(head.weight)}` computes the head's weight from a tensor that is "
    )
    said += "neither a parameter nor a buffer"
    hint = "compute the loss inside the compiled function (pass labels=)"
    return Decline("logits_not_deferrable", said, hint, head.node)


def _before(node: Node) -> set[Node]:
    """Return a node and the earlier nodes from which it is computed, up to a limited number."""
    found, queue = {node}, [node]
    while queue and len(found) < _MAX_NODES:
        fresh = [n for n in queue.pop().all_input_nodes if n not in found]
        found.update(fresh)
        queue += fresh
    return found


def _own_function(info: GraphInfo, node: Node) -> Decline | None:
    """Return a Decline (the reason for no rewrite) for a custom `torch.autograd.Function` that
    takes hidden states and an output projection's weight."""
    if node_name(node) != "autograd_function_apply":
        return None
    values = [value for value in map(info.tensor, node.all_input_nodes) if value is not None]
    trained = [value for value in values if value.is_floating_point() and value.dim() >= 2]
    for weight in trained:
        rows, features = compat.size_hint(weight.shape[0]), weight.shape[-1]
        if weight.dim() != 2 or rows < LARGE_VOCABULARY:
            continue
        others = [v for v in trained if v is not weight]
        if any(compat.statically_true(v.shape[-1] == features) for v in others):
            said = f"an autograd function takes hidden states and a weight of {rows} classes, and "
            said += "computes their loss by itself, as chunked losses do"
            hint = (
                "compute the loss by the head and F.cross_entropy, which needs no chunks here; in "
            )
            hint += "TRL, memeff_compile.integrations.transformers.MemeffCallback() does that"
            return Decline("own_loss_function", said, hint, node)
    return None


def _cut_inside_a_loss(info: GraphInfo) -> Iterable[Decline]:
    """Yield a Decline (the reason for no rewrite) for a loss that contains a graph break.

    Because of the break, no graph contains both the loss and its output projection."""
    if info.parent is None and compat.is_cut_in(info.gm, TRL_LOSS):
        said = (
            "TRL computes this loss by its own head (fused_lm_head=True), inside of which Dynamo "
        )
        said += "cuts the function; no graph has head and loss"
        hint = (
            "give the trainer memeff_compile.integrations.transformers.MemeffCallback(), which "
            "hands that head to this backend, or call "
            "memeff_compile.integrations.trl.hand_over_head() before training"
        )
        yield Decline("graph_break_in_loss", said, hint, info.output)
        return
    name = compat.cut_inside(info.gm)
    if info.parent is None and "cross_entropy" in name and not _has_loss(info):
        said = f"Dynamo cuts the function inside of `{name}`, which then runs outside of any graph"
        hint = "call F.linear_cross_entropy, or F.cross_entropy of the logits"
        yield Decline("graph_break_in_loss", said, hint, info.output)


def _has_loss(info: GraphInfo) -> bool:
    return any("cross_entropy" in node_name(node) for node in info.gm.graph.nodes)


def narrow_heads(info: GraphInfo) -> Iterable[Decline]:
    """Yield a Decline (the reason for no rewrite) for each narrow linear layer whose result the
    graph returns.

    Such a layer is too narrow to tell whether it is an output projection or a layer inside a model.
    """
    if info.options.switched_off(outputs.NAME) or compat.feeds_resumed_code(info.gm):
        return
    for match in outputs.returned_logits(info, narrow=True):
        head = match.outputs[0].chain.head
        weight = info.value(head.weight)
        classes = compat.size_hint(weight.shape[1 if head.transposed else 0])
        said = (
            f"this graph returns the results of a linear layer of {classes} features and no loss; "
        )
        said += (
            "these are at most four times the features of its input, as in layers inside a model, "
        )
        said += "so the layer is not taken for a head"
        hint = "if these are logits, compute the loss inside the compiled function (pass labels=)"
        yield Decline("head_narrow", said, hint, head.node, action="note")
