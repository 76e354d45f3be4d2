"""memeff::linear_cross_entropy_adapted: a head with a low-rank part, as of a LoRA adapter.

The logits are those of a sum of two products, and neither the sum nor a copy of the head is built:

    s = hidden @ weight.T + low @ up.T + bias

with low (..., R), such as u = h A^T times the adapter's scale, and up (V, R), its B. Everything
else is as in `linear_cross_entropy`: settings, results, and gradients, of which there are two more,

    grad_low = G @ up        grad_up = G.T @ low

Where low and up are in fp32 beside a 16-bit head, as PEFT keeps adapters, their products are taken
in fp32, of G unrounded. The engines are `hybrid` and `reference`, which make their products apart
from what they do with the logits; the gradient of a frozen weight costs nothing in either.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import library
from . import op as rows_op


def _link(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    mask = [ctx.needs_input_grad[place] for place in _TRAINED]
    gradients = linear_cross_entropy_adapted_backward(
        *grads[:4],  # behind them are indices
        *ctx.saved_tensors,
        **ctx.settings,
        output_mask=mask,
    )
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for place, gradient, wanted in zip(_TRAINED, gradients, mask, strict=True):
        found[place] = gradient if wanted else None
    return tuple(found)


_TRAINED = (0, 1, 2, 5, 6)  # hidden, weight, bias, low and up
_TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? column_weight, Tensor low, "
    "Tensor up"
)
linear_cross_entropy_adapted = library.op(
    f"linear_cross_entropy_adapted({_TENSORS}, *, {rows_op.KNOBS}) -> {rows_op.RESULTS}",
    *library.taking(rows_op.called, rows_op.forward, rows_op.fake_forward),
    backward=_link,
    setup_context=rows_op.setup_context,
)
linear_cross_entropy_adapted_backward = library.op(
    "linear_cross_entropy_adapted_backward(Tensor grad_nll, Tensor grad_lse, "
    f"Tensor grad_logit_sum, Tensor grad_entropy, {_TENSORS}, Tensor lse, Tensor entropy, "
    f"*, {rows_op.KNOBS}, bool[5] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    *library.taking(rows_op.called_back, rows_op.backward, rows_op.fake_backward),
    backward=rows_op.refuse_double_backward,
)
