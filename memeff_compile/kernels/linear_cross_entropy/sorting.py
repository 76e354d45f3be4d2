"""Vocabulary sorting: columns of like mean logit share tiles, so that more tiles can be left out.

Cut Cross-Entropy (section 4.3 of arXiv 2411.09009) sorts by the mean logit of a batch. The mean
over rows of hidden @ weight.T is the mean hidden state times weight.T, one product of a vector.
The weight is copied in that order, and its gradient copied back: V x D twice over, which is why
this is an option for studies and no default.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fused
from .filters import LeftOut
from .pieces import Knobs, RowGradients, Rows


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    knobs: Knobs,
) -> tuple[Rows, LeftOut]:
    """Compute `fused.forward` over the sorted vocabulary. Arguments and results as there."""
    order = column_order(hidden, weight, bias, knobs)
    return fused.forward(hidden, *_sorted(order, weight, bias, target, column_weight, knobs))


def backward(
    grads: RowGradients,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    left_out: LeftOut,
    knobs: Knobs,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute `fused.backward` over the sorted vocabulary, and undo the sorting."""
    order = column_order(hidden, weight, bias, knobs)
    sorted_weight, bias, target, column_weight, knobs = _sorted(
        order, weight, bias, target, column_weight, knobs
    )
    grad_hidden, grad_weight, grad_bias = fused.backward(
        grads, hidden, sorted_weight, bias, target, column_weight, lse, entropy, left_out, knobs,
        output_mask,
    )  # fmt: skip
    if grad_weight is not None:
        grad_weight = torch.empty_like(weight).index_copy_(0, order, grad_weight)
    if grad_bias is not None:
        grad_bias = torch.empty_like(grad_bias).index_copy_(0, order, grad_bias)
    return grad_hidden, grad_weight, grad_bias


def column_order(hidden: Tensor, weight: Tensor, bias: Tensor | None, knobs: Knobs) -> Tensor:
    """Return the columns by descending mean logit, (V,) int64."""
    mean = hidden.float().mean(0).to(hidden.dtype)
    logits = (weight @ mean).float()
    if bias is not None:
        logits = logits + bias.float()
    return torch.argsort(logits * knobs.scale, descending=True, stable=True)


# No column has this number, so no target is moved onto it.
_IGNORED = -1


def _sorted(
    order: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    knobs: Knobs,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Knobs]:
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), device=order.device)
    )
    moved = places[target.long().clamp(0, order.numel() - 1)]
    if knobs.ignore_index is not None:
        moved = moved.masked_fill(target == knobs.ignore_index, _IGNORED)
        knobs = knobs._replace(ignore_index=_IGNORED)
    return (
        weight[order],
        None if bias is None else bias[order],
        moved.to(target.dtype),
        None if column_weight is None else column_weight[order],
        knobs,
    )
