"""The engine `reference` under the calls of `op`: codes in the order of packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memeff_compile.kernels.ternary_linear import reference
from memeff_compile.kernels.ternary_linear.quantizer import NO_ENTRY, Entry, Quantizer


def serves_vectors(tokens: int) -> bool:
    """Return False: few tokens are quantised as many are."""
    del tokens
    return False


def chains(device: torch.device) -> bool:
    """Return False: there are no kernels to overlap."""
    del device
    return False


pack = reference.pack
dequantized_weights = reference.dequantized_weights


def quantize(
    x: Tensor, quantizer: Quantizer, entry: Entry = NO_ENTRY, *, is_chained: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes in planes, scales, and the sum of the codes of each token."""
    del is_chained
    codes, scale = reference.quantize(reference.enter(x, entry), quantizer)
    return reference.to_planes(codes), scale, codes.sum(-1, dtype=torch.int32)


def product(
    codes: Tensor,
    scale: Tensor,
    sums: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    is_step: bool,
    weight_is_step: bool,
    added: Tensor | None = None,
    is_chained: bool = False,
    leading: Sequence[int] | None = None,
) -> Tensor:
    """Return (M, N) or (*leading, N) from codes in planes; the sums are not needed.

    It is no view: an op in place may follow.
    """
    del sums, is_chained
    found = reference.product(
        reference.from_planes(codes, 16 * packed.shape[1]),
        scale,
        packed,
        weight_scale,
        bias,
        dtype=dtype,
        is_step=is_step,
        weight_is_step=weight_is_step,
    )
    found = found if added is None else added + found
    shape = (*(found.shape[:1] if leading is None else leading), found.shape[1])
    shaped: Tensor = torch.ops.aten._unsafe_view.default(found, shape)
    return shaped


def dequantized_tokens(
    codes: Tensor, scale: Tensor, columns: int, *, is_step: bool, dtype: torch.dtype
) -> Tensor:
    """Return (M, K) from codes in planes."""
    rows = reference.from_planes(codes, columns)
    return reference.dequantized_tokens(rows, scale, is_step=is_step, dtype=dtype)
