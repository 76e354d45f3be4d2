"""memeff::linear_cross_entropy_adapted_total: an adapted head, and its gradients in the forward.

What `linear_cross_entropy_total` is to `linear_cross_entropy`, this is to
`linear_cross_entropy_adapted`. On a GPU, of a frozen head, two large products make a step where a
backward that recomputes the logits makes three; elsewhere the one follows the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import compat
from .. import library
from ..device import kernels_serve, tuned, where_it_runs, without_autocast
from . import op as rows_op
from . import total, total_hybrid
from .adapted import linear_cross_entropy_adapted, linear_cross_entropy_adapted_backward
from .call import Gradients
from .shapes import is_minimal
from .total_reference import Loss, total_of


@compat.constant_in_traces
def makes_gradients_in_forward_adapted(
    device: torch.device,  # of the hidden states
    dtype: torch.dtype,  # likewise
    *,
    trains_weight: bool,  # whether the head's own weight has a gradient
    workspace: int = 0,  # as for the op
) -> bool:
    """Say whether a loss that is one number is best served with its gradients in the forward.

    A head's gradient would be rounded once per piece, or kept in fp32. fp16 has not the range for
    gradients that are scaled afterwards.
    """
    if trains_weight or is_minimal(workspace) or dtype == torch.float16:
        return False
    usual = "forward" if kernels_serve(device, dtype) else "backward"
    return tuned(where_it_runs(device), total.GRADIENTS, usual) == "forward"


def _called(*tensors: Any, **settings: Any) -> Loss:
    *others, low, up = tensors
    return Loss(*others, **settings)._replace(low=low, up=up)


def _forward(given: Loss) -> tuple[Tensor, ...]:
    total.require_support(given)
    flat = total.flattened(given)
    with without_autocast(given.hidden.device.type):
        found, gradients = _computed(flat)
    return (found, *rows_op.as_results(gradients, given.operands))


def _computed(given: Loss) -> tuple[Tensor, Gradients]:
    """Have an engine compute a flat call."""
    hidden, needs_weight = given.hidden, given.output_mask[1]
    if not kernels_serve(hidden.device, hidden.dtype) or needs_weight or not hidden.shape[0]:
        return by_recomputing(given)
    rows_op.check_range(given.target, given.weight.shape[0], given.ignore_index)
    return total_hybrid.run(given)


def by_recomputing(given: Loss) -> tuple[Tensor, Gradients]:
    """Run an engine's forward and its backward behind it."""
    settings, mask = given.knobs._asdict(), list(given.output_mask)
    nll, lse, nothing, entropy, _ = linear_cross_entropy_adapted(*given.operands, **settings)
    of_rows = (given.row_gradients(nll.dtype), torch.zeros_like(lse), nothing, entropy)
    gradients = linear_cross_entropy_adapted_backward(
        *of_rows, *given.operands, lse, entropy, **settings, output_mask=mask
    )
    wanted = [part if asked else None for part, asked in zip(gradients, mask, strict=True)]
    return total_of(nll, given.row_weight, given.norm), tuple(wanted)


def _second(*given: Any) -> Any:
    return linear_cross_entropy_adapted_total_backward(*given)


_setup_context, _link = total.joins((0, 1, 2, 6, 7), _second)
_PARTS = "Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor grad_low, Tensor grad_up"
linear_cross_entropy_adapted_total = library.op(
    "linear_cross_entropy_adapted_total(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? row_weight, Tensor? norm, Tensor low, Tensor up, *, int? ignore_index, float scale, "
    f"float softcap, int workspace, bool[5] output_mask) -> (Tensor total, {_PARTS})",
    *library.taking(_called, _forward, total.fake_forward),
    backward=_link,
    setup_context=_setup_context,
)
linear_cross_entropy_adapted_total_backward: Any = library.op(
    f"linear_cross_entropy_adapted_total_backward(Tensor grad_total, {_PARTS}, Tensor hidden, "
    "Tensor weight, Tensor? bias, Tensor low, Tensor up) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    *library.taking(total.called_back, total.backward, total.fake_backward),
    backward=rows_op.refuse_double_backward,
)
