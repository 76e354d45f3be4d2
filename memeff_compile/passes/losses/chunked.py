"""Recognize the op that PyTorch's `F.linear_cross_entropy(options=...)` calls.

This op is an output projection and its loss in one node. The reduction determines the op's name:

- With reduction "mean" or "sum": `loss, *_ = _linear_cross_entropy_batch_chunked(h, W, y, ...)`.
- With reduction "none": `losses = _linear_cross_entropy_batch_chunked_no_reduction(h, W, y, ...)`.

The options of `F.linear_cross_entropy` choose how many rows a chunk has and the precision of
sums. These options do not change the mathematical result, so the pass ignores these options. The op
memeff::linear_cross_entropy computes sums at least as precisely as PyTorch's function.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ..graph.base import Decline
from ..graph.canonical import read_one
from ..graph.graph_info import GraphInfo, node_name
from .head import Chain, Head
from .tails import PROB_HINT, Tail

CHUNKED = "_linear_cross_entropy_batch_chunked"
CHUNKED_NAMES = (CHUNKED, f"{CHUNKED}_no_reduction")
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def is_chunked(tail: Tail) -> bool:
    """Return whether one call of PyTorch's chunked op computes the loss and its output projection.

    This op computes the logits in chunks of rows, so it does not store all N x V logits at once."""
    return tail.node is tail.chain.head.node


def read_chunked(info: GraphInfo, node: Node) -> Tail | Decline:
    """Describe a call of `_linear_cross_entropy_batch_chunked` as an output projection and a loss.

    `node` calls this op of PyTorch or its variant `_no_reduction`. The op computes the logits in
    chunks of rows. In the returned Tail (the description of the loss), the same node stands for the
    projection and for the loss. The value of this node is the op's loss. If the pass does not
    support the call, return the reason as a Decline.
    """
    call = read_one(node)
    if call is None:
        said = f"`{node_name(node)}` is called with arguments this pass does not read"
        return Decline("unreadable_loss", said, "call F.linear_cross_entropy", node)
    a, result, products = call.args, node, tuple[Node, ...]()
    reduction = _REDUCTIONS.get(a.get("reduction", "none"))
    if node_name(node) == CHUNKED:
        firsts = [user for user in node.users if user.target is operator.getitem]
        if len(firsts) != 1 or len(node.users) != 1 or firsts[0].args[1] != 0:
            said = f"`{node_name(node)}` is read for its gradients, not for its loss alone"
            return Decline("unreadable_loss", said, "call F.linear_cross_entropy", node)
        result, products = firsts[0], (node,)
    target = info.tensor(a["target"])
    if target is not None and target.dtype.is_floating_point:
        said = "the targets are class probabilities, not class indices"
        return Decline("prob_targets", said, PROB_HINT, node)
    ignored = compat.known_number(a["ignore_index"])
    if reduction is None or ignored is None or a.get("label_smoothing", 0.0) != 0.0:
        said = f"`{node_name(node)}` gets a reduction, ignore_index or label_smoothing that this "
        hint = "call F.linear_cross_entropy with plain numbers"
        return Decline("unreadable_loss", f"{said}pass does not read", hint, node)
    refusal = _shape_fault(info, node, a) or _dtype_fault(info, node, a)
    if refusal is not None:
        return refusal
    operands = a["input"], a["linear_weight"], False, a["linear_bias"]
    head = Head(result, *operands, info.value(a["input"]).dtype, summed=products)
    return Tail(
        result,
        "loss",
        Chain(head, (), result),
        target=a["target"],
        class_weight=a["weight"],
        reduction=reduction,
        ignore_index=int(ignored),
        symbols=tuple(s for s in (a["ignore_index"],) if isinstance(s, Node)),
    )


def _shape_fault(info: GraphInfo, node: Node, a: Any) -> Decline | None:
    """Return a Decline (the reason for no rewrite) if the operands' shapes do not fit together.

    `a` contains the operands of PyTorch's chunked loss op `node`. PyTorch's op reports such an
    error only when it runs."""
    hidden, head = (info.value(a[name]) for name in ("input", "linear_weight"))
    if head.dim() != 2:
        return None  # declined with the other heads of this form
    wanted = {"target": hidden.shape[:-1], "linear_bias": head.shape[:1], "weight": head.shape[:1]}
    for name, shape in wanted.items():
        given = info.tensor(a[name])
        if given is not None and _differ(given.shape, shape):
            said = f"`{name}` has the shape {tuple(given.shape)} where {tuple(shape)} is needed"
            hint = f"give `{name}` the shape {tuple(shape)}; PyTorch's op fails with this one, too"
            return Decline("unreadable_loss", said, hint, node)
    return None


def _differ(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Return whether two shapes are known to differ."""
    return len(shape) != len(wanted) or any(
        compat.statically_true(a != b) for a, b in zip(shape, wanted, strict=True)
    )


def _dtype_fault(info: GraphInfo, node: Node, a: Any) -> Decline | None:
    """Return a Decline (the reason for no rewrite) if the operands' dtypes differ, or `acc_dtype`
    does not fit them.

    PyTorch's chunked loss op `node` sums in `acc_dtype`. `acc_dtype` must be the operands' dtype,
    or fp32 for 16-bit operands. Otherwise `node` rounds sums differently from
    memeff::linear_cross_entropy."""
    given = [info.tensor(a[name]) for name in ("input", "linear_weight", "linear_bias")]
    dtypes = {value.dtype for value in given if value is not None}
    served = {*dtypes, torch.float32} if min(d.itemsize for d in dtypes) < 4 else dtypes
    if len(dtypes) == 1 and a["acc_dtype"] in served:
        return None
    names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    said = f"the loss of {names} operands is summed in {a['acc_dtype']}"
    hint = "give hidden states, weight and bias one dtype, and leave acc_dtype to PyTorch"
    return Decline("dtype_unsupported", said, hint, node)
