"""The backward pass of losses whose forward pass already computes the operands' gradients.

An op with such a forward pass returns the total loss and the total's gradients with respect to the
operands. The op's backward pass only multiplies these gradients by the gradient that it receives
for the total loss. The product is written in place if no other code can read the gradients,
otherwise into new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import compat
from .. import library
from .._triton.launch import run_kernel
from ..device import kernels_serve, on_device, processors
from .shapes import CHUNK, SCALED, SCALING_PROGRAMS


def total_joins(trained: Sequence[int], refusal: str) -> tuple[library.Function, library.Function]:
    """Return the autograd functions `setup_context` and `backward` of an op that returns a total
    loss and its gradients.

    - `trained`: the positions, among the op's arguments, of the operands that these gradients
      belong to.
    - `refusal`: the message of the error if a second derivative is requested.
    """
    count = len(trained)

    def of_first_order(by: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        gradients = [each for each in tensors[:count] if each is not None]
        return tuple(scaled_gradients(gradients, by, [True] * count, in_place=False))

    once = library.only_first(of_first_order, refusal)

    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        keyword_only_inputs: dict[str, Any],
        output: tuple[Tensor, ...],
    ) -> None:
        _, *gradients = output
        ctx.mark_non_differentiable(*gradients)
        # Otherwise autograd allocates zeros, as large as the gradients, for results without a
        # derivative.
        ctx.set_materialize_grads(False)
        ctx.is_alone = not compat.packs_saved_tensors()
        # Inputs of the refused second derivative.
        ctx.save_for_backward(*gradients[:count], *(inputs[place] for place in trained))

    def link(
        ctx: Any, grad_total: Tensor | None, *without_gradient: None
    ) -> tuple[Tensor | None, ...]:
        mask, saved = asked(ctx, trained), ctx.saved_tensors
        if grad_total is None:
            return (None,) * len(ctx.needs_input_grad)
        gradients = list(saved[:count])
        if torch.is_grad_enabled():
            found = once(grad_total, *saved)
        elif compat.is_traced(grad_total, *gradients):
            # Plain operations in a graph: the compiler fuses them and knows which memory it may
            # overwrite.
            pairs = zip(gradients, mask, strict=True)
            found = [_scaled(part, grad_total) if wanted else part for part, wanted in pairs]
        else:
            # Another backward, or a hook that packed these tensors, may read them again.
            is_last = ctx.is_alone and compat.frees_saved_tensors()
            found = scaled_gradients(gradients, grad_total, mask, in_place=is_last)
        return at_arguments(ctx, trained, found, mask)

    return setup_context, link


def asked(ctx: Any, places: Sequence[int]) -> list[bool]:
    """Return, for each of an op's arguments at the positions `places`, whether it requires a
    gradient.

    A position beyond the arguments that autograd saw belongs to an argument that is None, because
    PyTorch's dispatcher omits trailing arguments that are None.
    """
    needs = ctx.needs_input_grad
    return [place < len(needs) and needs[place] for place in places]


def at_arguments(
    ctx: Any, places: Sequence[int], gradients: Sequence[Tensor], mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return gradients as autograd expects them: one gradient, or None, per argument of the op."""
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for place, gradient, wanted in zip(places, gradients, mask, strict=False):
        if wanted:
            found[place] = gradient
    return tuple(found)


def scaled_gradients(
    gradients: Sequence[Tensor], by: Tensor, mask: Sequence[bool], *, in_place: bool
) -> list[Tensor]:
    """Multiply the gradients of a total loss by `by`, for the operands that `mask` selects.

    - `gradients`: the gradients that the forward pass computed.
    - `by`: the gradient that the backward pass receives for the total loss.
    - `mask`: which of the gradients are needed.
    - `in_place`: whether the gradients' memory may be overwritten.
    """
    found = list(gradients) if in_place else [torch.empty_like(part) for part in gradients]
    for part, out, wanted in zip(gradients, found, mask, strict=True):
        if wanted:
            _scale_into(part, by, out)
    return found


def _scaled(gradient: Tensor, by: Tensor) -> Tensor:
    """Return a gradient multiplied by a number, as a new tensor.

    The product is computed in the wider one of the gradient's dtype and the number's dtype.
    """
    return (gradient.to(by.dtype) * by).to(gradient.dtype)


def _scale_into(gradient: Tensor, by: Tensor, out: Tensor) -> None:
    """Write `gradient * by` to `out`, which may be `gradient` itself, without a full fp32 copy."""
    if (
        gradient.is_cuda
        and has_kernel(gradient, by, out)
        and kernels_serve(gradient.device, gradient.dtype)
    ):
        run_scaling(gradient, by, out)
        return
    if gradient.dim() == 0 or gradient.dtype == by.dtype:
        torch.mul(gradient, by, out=out)
        return
    rows = max(1, CHUNK // max(1, gradient[0].numel())) if gradient.shape[0] else 1
    for source, target in zip(gradient.split(rows), out.split(rows), strict=True):
        target.copy_(source.to(by.dtype) * by)


def has_kernel(gradient: Tensor, by: Tensor, out: Tensor) -> bool:
    """Return whether the kernel that scales gradients supports the given tensors on their
    device."""
    return by.dtype == torch.float32 and gradient.is_contiguous() and out.is_contiguous()


def run_scaling(gradient: Tensor, by: Tensor, out: Tensor) -> None:
    """Write gradient * by, computed in fp32 and rounded once, to `out`, which may be `gradient`
    itself.

    A kernel reads the number `by` from GPU memory; all tensors must be contiguous. If `out` is
    `gradient` and `by` is 1, the kernel returns immediately.
    """
    from .scaling_kernels import _head_loss_scaling_scale_kernel

    count, is_in_place = gradient.numel(), out is gradient
    if not count:
        return
    programs = min(-(-count // SCALED), SCALING_PROGRAMS * processors(gradient.device))
    with on_device(gradient):
        run_kernel(
            _head_loss_scaling_scale_kernel,
            (programs,),
            *(gradient, by, out, count),
            IN_PLACE=is_in_place,
            BLOCK=SCALED,
            num_warps=4,
        )
    torch.autograd.graph.increment_version(out)
