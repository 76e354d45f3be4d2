"""Vocabulary sorting: columns of like mean logit share tiles, so that more tiles can be left out.

Cut Cross-Entropy (section 4.3 of arXiv 2411.09009) sorts by the mean logit of a batch. The mean
over rows of hidden @ weight.T is the mean hidden state times weight.T, one product of a vector.
The weight is copied in that order, and its gradient copied back: V x D twice over, which is why
this is an option for studies and no default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import fused
from .call import Gradients, Kept, Knobs, Operands, RowGradients, Rows
from .filters import LeftOut


def forward(given: Operands, knobs: Knobs) -> tuple[Rows, LeftOut]:
    """Compute `fused.forward` over the sorted vocabulary. Arguments and results as there."""
    return fused.forward(*_sorted(column_order(given, knobs), given, knobs))


def backward(
    grads: RowGradients, given: Operands, kept: Kept, knobs: Knobs, output_mask: Sequence[bool]
) -> Gradients:
    """Compute `fused.backward` over the sorted vocabulary, and undo the sorting."""
    order = column_order(given, knobs)
    moved, knobs = _sorted(order, given, knobs)
    of_hidden, of_weight, of_bias = fused.backward(grads, moved, kept, knobs, output_mask)
    if of_weight is not None:
        of_weight = torch.empty_like(given.weight).index_copy_(0, order, of_weight)
    if of_bias is not None:
        of_bias = torch.empty_like(of_bias).index_copy_(0, order, of_bias)
    return of_hidden, of_weight, of_bias


def column_order(given: Operands, knobs: Knobs) -> Tensor:
    """Return the columns by descending mean logit, (V,) int64."""
    hidden, weight, bias, *_ = given
    mean = hidden.float().mean(0).to(hidden.dtype)
    logits = (weight @ mean).float()
    if bias is not None:
        logits = logits + bias.float()
    return torch.argsort(logits * knobs.scale, descending=True, stable=True)


# No column has this number, so no target is moved onto it.
_IGNORED = -1


def _sorted(order: Tensor, given: Operands, knobs: Knobs) -> tuple[Operands, Knobs]:
    hidden, weight, bias, target, column_weight = given
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), device=order.device)
    )
    moved = places[target.long().clamp(0, order.numel() - 1)]
    if knobs.ignore_index is not None:
        moved = moved.masked_fill(target == knobs.ignore_index, _IGNORED)
        knobs = knobs._replace(ignore_index=_IGNORED)
    bias = None if bias is None else bias[order]
    column_weight = None if column_weight is None else column_weight[order]
    return Operands(hidden, weight[order], bias, moved.to(target.dtype), column_weight), knobs
