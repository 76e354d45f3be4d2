"""memeff::linear_cross_entropy_total: one number for all rows, and its gradients in the forward.

Where a loss is one number, the gradients of hidden states and weight are known up to a factor as
soon as a row's logits are: three products make a step, where a backward that recomputes the logits
makes four. The op returns

    total = sum over rows that count of row_weight_i * nll_i, over norm

and the gradients of that number. Its backward multiplies them by the loss's own gradient: in place
where nothing can read them again, else in a copy. What is held from the forward to the backward are
the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from ... import compat
from .. import library
from ..checks import require
from ..device import kernels_serve, tuned, where_it_runs, without_autocast
from ..sizes import Size
from . import op as rows_op
from . import total_fused, total_reference
from .ranks import Ranks, counted_first, own_columns
from .shapes import is_minimal
from .total_reference import Loss, Totals, total_of

GRADIENTS = "linear_cross_entropy.gradients"
"""The decision in which pass the gradients of a loss that is one number are made."""


class _Gradients(NamedTuple):
    """What `linear_cross_entropy_total_backward` is called with."""

    grad_total: Tensor
    parts: Sequence[Tensor]  # the gradients of the total
    operands: Sequence[Tensor | None]  # what they are of


def called_back(grad_total: Tensor, *tensors: Any) -> _Gradients:
    """Sort what a backward is called with: gradients, then as many operands."""
    count = len(tensors) // 2
    return _Gradients(grad_total, tensors[:count], tensors[count:])


@compat.constant_in_traces
def makes_gradients_in_forward(
    device: torch.device,  # of the hidden states
    dtype: torch.dtype,  # likewise
    depth: int,  # likewise
    *,
    gradient_filter: str = "exact",  # as for `linear_cross_entropy`
    filter_parts: str = "both",  # likewise
    workspace: int = 0,  # likewise
) -> bool:
    """Say whether a loss that is one number is best served with its gradients in the forward.

    A filter of one gradient alone and the minimal workspace belong to engines that recompute the
    logits. fp16 has not the range for gradients that are scaled afterwards.
    """
    if filter_parts != "both" or is_minimal(workspace) or dtype == torch.float16:
        return False
    has_kernels = kernels_serve(device, dtype)
    if gradient_filter != "exact" and not has_kernels:
        return False
    usual = "forward" if has_kernels else "backward"
    if tuned(where_it_runs(device), GRADIENTS, usual) != "forward":
        return False
    return not has_kernels or _fused_serves(device, dtype, depth)


def _fused_serves(device: torch.device, dtype: torch.dtype, depth: int) -> bool:
    return dtype in total_fused.DTYPES and rows_op.engine_for(device, dtype, depth) == "fused"


# Losses, factors, orders of rows and the like; a bound.
TOTAL_BYTES_PER_ROW = 64


def total_bytes(
    rows: Size,  # n as a symbol or number, D, V
    depth: int,  # likewise
    vocab: int,  # likewise
    *,
    dtype: torch.dtype,  # of hidden states and weight
    device: torch.device,  # likewise
    workspace: int = 0,  # as for the op
    has_softcap: bool = False,  # likewise
    gradient_filter: str = "exact",  # likewise
) -> sympy.Expr:
    """Return a bound of what a call holds beside inputs, gradients and 64 bytes per row.

    On a GPU: X, the statistics of its tiles and the rows times their scale. In plain PyTorch: a
    piece of logits, two more with a softcap, the rows that count and, for 16-bit inputs, the fp32
    sums of the weight's gradient and a piece of the weight.
    """
    n, wide = sympy.sympify(rows), max(dtype.itemsize, 4)
    if kernels_serve(device, dtype):
        return total_fused.bytes_held(
            *(n, depth, vocab, workspace),
            is_plain=not has_softcap,
            gradient_filter=gradient_filter,
        )
    height = total_reference.rows_per_piece(
        n, vocab, wide * (1 + has_softcap), workspace, where_it_runs(device).type
    )
    held = wide * height * (vocab * (1 + 2 * has_softcap) + 3 * depth) + dtype.itemsize * depth * n
    if dtype.itemsize < wide:
        held += wide * (height * vocab + total_reference.MIN_ROWS * depth + vocab * depth)
    return held


def require_support(given: Loss) -> None:
    _, _, _, target, row_weight, norm, *_ = given
    sentence = rows_op.supports(
        *given.operands,
        softcap=given.softcap,
        workspace=given.workspace,
        gradient_filter=given.gradient_filter,
        filter_level=given.filter_level,
    )
    if sentence is None and row_weight is not None and row_weight.dim() != target.dim():
        sentence = (
            f"row_weight has {row_weight.dim()} dimensions and target {target.dim()}; one number "
            "per target is needed."
        )
    if sentence is None and norm is not None and norm.dim() != 0:
        sentence = f"norm has {norm.dim()} dimensions; a single number is needed."
    for name, factor in (("row_weight", row_weight), ("norm", norm)):
        if sentence is None and factor is not None and factor.requires_grad:
            sentence = f"{name} requires a gradient, which the op does not give. Detach it."
    require("linear_cross_entropy_total", sentence)


def _forward(given: Loss) -> tuple[Tensor, ...]:
    require_support(given)
    flat = flattened(given)
    with without_autocast(given.hidden.device.type):
        return results(compute(flat), given)


def flattened(given: Loss) -> Loss:
    """Return a call with all rows in one axis, as engines take it."""
    row_weight, flat = given.row_weight, given.operands.flat()
    asked = zip(given.output_mask, flat.trained, strict=True)
    return given._replace(
        hidden=flat.hidden,
        target=flat.target,
        row_weight=None if row_weight is None else row_weight.reshape(flat.target.numel()),
        low=flat.low,
        output_mask=tuple(wanted and part is not None for wanted, part in asked),
    )


def compute(given: Loss) -> Totals:
    """Have an engine compute a flat call; of one over ranks, targets have been checked."""
    hidden, weight = given.hidden, given.weight
    if hidden.shape[0] == 0:
        # A total of 0, or nan where a mean of no rows is asked for.
        total = total_of(hidden.new_zeros(0, dtype=given.wide), given.row_weight, given.norm)
        return Totals(total, *rows_op.zero_gradients(given[:3], given.output_mask))
    fits = _fused_serves(hidden.device, hidden.dtype, hidden.shape[-1])
    is_fused = fits and total_fused.serves(weight)
    if not is_fused and kernels_serve(hidden.device, hidden.dtype):
        return by_recomputing(given)
    if given.ranks is None:
        rows_op.check_range(given.target, weight.shape[0], given.ignore_index)
    return total_fused.run(given) if is_fused else total_reference.run(given)


def results(found: Totals, given: Loss) -> tuple[Tensor, ...]:
    """Return what an engine found as the op does."""
    return (found.total, *rows_op.as_results(found[1:], given.operands))


def by_recomputing(given: Loss) -> Totals:
    """Run an engine's forward and its backward behind it, where none makes both at once.

    Ranks with other classes are met in between, as often as where one does.
    """
    settings, ranks, target = given.knobs._asdict(), given.ranks, given.target
    if ranks is not None:
        target, here, elsewhere = own_columns(target)
    operands = (*given[:3], target, None)
    nll, lse, nothing, entropy, _ = rows_op.linear_cross_entropy(*operands, **settings)
    of_rows = (given.row_gradients(nll.dtype), torch.zeros_like(lse), nothing, entropy)
    if ranks is not None:
        of_nll = of_rows[0]
        # What pulls a target elsewhere up is another rank's; what pushes all classes down is not.
        of_rows = (of_nll.where(here, 0), of_nll.where(elsewhere, 0), nothing, entropy)
        met = _met(ranks, lse, nll.where(here, 0), counted_first(given.target))
        lse, nll = (each.where(here | elsewhere, 0) for each in met)
    kept = (lse, entropy)
    mask = list(given.output_mask)
    gradients = rows_op.linear_cross_entropy_backward(
        *of_rows, *operands, *kept, **settings, output_mask=mask
    )
    wanted = [part if asked else None for part, asked in zip(gradients, mask, strict=True)]
    return Totals(total_of(nll, given.row_weight, given.norm), *wanted)


def _met(ranks: Ranks, lse: Tensor, nll: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps and losses of the whole head, met piece by piece in an order of rows."""
    whole = torch.empty_like(lse), torch.empty_like(nll)
    for at in order.split(ranks.height):
        whole[0][at], whole[1][at] = ranks.meet(lse[at], nll[at], ranks.owner[at], len(at))
    return whole


def fake_forward(given: Loss) -> tuple[Tensor, ...]:
    require_support(given)
    rows_op.check_sizes(given.operands)
    total = given.hidden.new_empty((), dtype=given.wide)
    return (total, *rows_op.fake_gradients(given.operands, given.output_mask))


def _scaled(gradient: Tensor, by: Tensor) -> Tensor:
    """Multiply a gradient by a number, in the wider of the two dtypes, into a tensor of its own."""
    return (gradient.to(by.dtype) * by).to(gradient.dtype)


# Elements that are widened at a time where a gradient is scaled outside a compiled graph.
CHUNK = 1 << 22


def _scale_into(gradient: Tensor, by: Tensor, out: Tensor) -> None:
    """Write gradient * by to `out`, which may be `gradient`, without a wide copy of all of it."""
    if (
        gradient.is_cuda
        and total_fused.scales(gradient, by, out)
        and kernels_serve(gradient.device, gradient.dtype)
    ):
        total_fused.scale_into(gradient, by, out)
        return
    if gradient.dim() == 0 or gradient.dtype == by.dtype:
        torch.mul(gradient, by, out=out)
        return
    rows = max(1, CHUNK // max(1, gradient[0].numel())) if gradient.shape[0] else 1
    for source, target in zip(gradient.split(rows), out.split(rows), strict=True):
        target.copy_(source.to(by.dtype) * by)


def backward(given: _Gradients) -> tuple[Tensor, ...]:
    """Return the gradients of a total, each times that of the loss."""
    scaled = fake_backward(given)
    for part, out in zip(given.parts, scaled, strict=True):
        _scale_into(part, given.grad_total, out)
    return scaled


def fake_backward(given: _Gradients) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(part) for part in given.parts)


def joins(
    trained: Sequence[int],  # places among the arguments of what has gradients
    second: Callable[..., Any],  # the op's backward as an op, where it may be differentiated
) -> tuple[library.Function, library.Function]:
    """Return how autograd sees an op that returns a total and its gradients, and how it goes on."""

    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        keyword_only_inputs: dict[str, Any],
        output: tuple[Tensor, ...],
    ) -> None:
        _, *gradients = output
        ctx.mark_non_differentiable(*gradients)
        # Else autograd makes zeros as large as the gradients for results nobody differentiates.
        ctx.set_materialize_grads(False)
        ctx.is_alone = not compat.packs_saved_tensors()
        # The inputs are what a second derivative would be taken of, which is refused.
        ctx.save_for_backward(*gradients, *(inputs[place] for place in trained))

    def link(
        ctx: Any, grad_total: Tensor | None, *without_gradient: None
    ) -> tuple[Tensor | None, ...]:
        wanted: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad_total is None:
            return tuple(wanted)
        gradients = list(ctx.saved_tensors[: len(trained)])
        if torch.is_grad_enabled():
            found = second(grad_total, *ctx.saved_tensors)
        elif compat.is_traced(grad_total, *gradients):
            # Plain operations in a graph: the compiler fuses them and knows what it may overwrite.
            found = [_scaled(part, grad_total) for part in gradients]
        else:
            # Another backward, or a hook that packed these tensors, may read them again.
            is_last = ctx.is_alone and compat.frees_saved_tensors()
            found = gradients if is_last else [torch.empty_like(part) for part in gradients]
            for part, out in zip(gradients, found, strict=True):
                _scale_into(part, grad_total, out)
        for place, part in zip(trained, found, strict=True):
            wanted[place] = part if ctx.needs_input_grad[place] else None
        return tuple(wanted)

    return setup_context, link


def _second(*given: Any) -> Any:
    return linear_cross_entropy_total_backward(*given)


setup_context, link = joins((0, 1, 2), _second)
linear_cross_entropy_total = library.op(
    "linear_cross_entropy_total(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? row_weight, Tensor? norm, *, int? ignore_index, float scale, float softcap, "
    "int workspace, bool[3] output_mask, "
    'str gradient_filter="exact", float filter_level=0.0, bool sort_vocabulary=False) -> '
    "(Tensor total, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    *library.taking(Loss, _forward, fake_forward),
    backward=link,
    setup_context=setup_context,
)
linear_cross_entropy_total_backward: Any = library.op(
    "linear_cross_entropy_total_backward(Tensor grad_total, Tensor grad_hidden, "
    "Tensor grad_weight, Tensor grad_bias, Tensor hidden, Tensor weight, Tensor? bias) -> "
    "(Tensor, Tensor, Tensor)",
    *library.taking(called_back, backward, fake_backward),
    backward=rows_op.refuse_double_backward,
)
