"""Round weights to few mantissa bits so that products of weights and inputs have small errors.

Rounding each weight to the nearest number with few mantissa bits minimises the error of the
weights. A model's quality, however, depends on the error of the products of weights and inputs. So
after rounding a column of the weight, this module changes the columns that are not rounded yet.
These columns then compensate the rounding error. The changes are computed with the inverse of the
inputs' Gram matrix, as in GPTQ (arXiv 2210.17323). Each number of the rounded weight has the
requested number of mantissa bits, so encoding the weight loses nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memeff_compile.model.runs import call, evaluating

DAMPED = 0.01
"""The number added to the diagonal of a Gram matrix, relative to the diagonal's mean."""

FRACTION = 23
"""Bits of mantissa of fp32."""

AT_ONCE = 64
"""Columns whose errors are compensated in later columns in one step."""

GRAM_BYTES = 2 << 30
"""The bytes of Gram matrices in memory at a time; for more, the model runs again."""


def gram_groups(widths: Iterable[int]) -> Iterator[int]:
    """Yield the number of weights in each group whose Gram matrices are computed together.

    The model runs on all example inputs once per group. Each Gram matrix is computed from the
    inputs of the linear layers that use one weight. `widths` are these layers' input widths, one
    per weight.
    """
    count = held = 0
    for width in widths:
        if count and held + 4 * width * width > GRAM_BYTES:
            yield count
            count = held = 0
        count, held = count + 1, held + 4 * width * width
    if count:
        yield count


@torch.no_grad()
def grams(
    model: nn.Module, linears: Mapping[str, Sequence[nn.Module]], runs: Iterable[Any]
) -> dict[str, Tensor]:
    """Return for each weight the fp32 Gram matrix (D, D) of the inputs that its linear layers get.

    `linears` maps the name of each weight to the linear layers that use the weight. The result
    contains no entry for weights whose linear layers got no input.
    """
    found: dict[str, Tensor] = {}
    with evaluating(model), _noted(linears, found):
        for given in runs:
            call(model, given)
    return found


@contextmanager
def _noted(linears: Mapping[str, Sequence[nn.Module]], found: dict[str, Tensor]) -> Iterator[None]:
    def note_for(name: str) -> Any:  # noqa: ANN401
        def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            flat = (given[0] if given else named["input"]).detach().flatten(0, -2).float()
            if name not in found:
                width = flat.shape[1]
                found[name] = flat.new_zeros((width, width))
            found[name].addmm_(flat.t(), flat)

        return note

    hooks = [
        linear.register_forward_pre_hook(note_for(name), with_kwargs=True)
        for name, owners in linears.items()
        for linear in owners
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def kept(x: Tensor, mantissa: int) -> Tensor:
    """Return fp32 numbers rounded to `mantissa` mantissa bits; a number halfway between two such
    numbers is rounded away from zero."""
    low = FRACTION - mantissa  # bits that are dropped; a carry raises the exponent
    return x.view(torch.int32).add(1 << (low - 1)).bitwise_and_(-1 << low).view(torch.float32)


@torch.no_grad()
def rounded_for(weight: Tensor, gram: Tensor, mantissa: int, block: int) -> Tensor | None:
    """Round a weight (V, D) to numbers that a lossy compressed format can represent.

    So encoding the rounded weight loses nothing more. The numbers are chosen so that the products
    of the weight and the inputs of its linear layers lose little precision. `gram` is the Gram
    matrix of inputs that these layers got (see `grams`). `mantissa` is the number of mantissa bits
    that stay.

    The format divides each block of `block` numbers by the significand of the block's largest
    number (in magnitude). Rounding does not change this largest number, and no other number of the
    block exceeds it in magnitude. Return None if all inputs are zero, or if an input or the weight
    is not finite.
    """
    x = weight.float()
    spread = float(gram.diagonal().mean())
    if not (math.isfinite(spread) and spread > 0 and bool(x.isfinite().all())):
        return None
    blocks = F.pad(x.reshape(-1), (0, -x.numel() % block)).view(-1, block)
    largest = blocks.abs().amax(1, True)
    top = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1)
    # A block of zeros is divided by one, and keeps them.
    scale = torch.where(largest > 0, largest / top, 1.0)
    top = torch.where(largest > 0, top, 0.0)
    scale, top = (e.expand_as(blocks).reshape(-1)[: x.numel()].view_as(x) for e in (scale, top))
    fixed = x.abs() == scale * top
    damped = gram.double()
    damped.diagonal().add_(DAMPED * spread)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        return None
    factor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True).to(x.dtype)
    left, found, least = x.clone(), torch.empty_like(x), -top
    for first in range(0, x.shape[1], AT_ONCE):
        end = min(first + AT_ONCE, x.shape[1])
        errors = torch.empty(len(x), end - first, device=x.device)
        for place in range(first, end):  # ten launches for a column, which take most of the time
            own, size = left[:, place], scale[:, place]
            made = kept(own / size, mantissa).clamp_(least[:, place], top[:, place]).mul_(size)
            torch.where(fixed[:, place], x[:, place], made, out=found[:, place])
            error = torch.sub(own, found[:, place], out=errors[:, place - first])
            error.div_(factor[place, place])
            left[:, place:end].addr_(error, factor[place, place:end], alpha=-1)
        left[:, end:] -= errors @ factor[first:end, end:]
    return found.to(weight.dtype)
