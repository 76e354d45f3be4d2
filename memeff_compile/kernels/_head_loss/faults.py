"""Sentences that name the reason why a loss does not support its operands."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import (
    FLOATING,
    INDICES,
    short,
    two_devices,
    two_dtypes,
    unfloating,
    unplain,
    wide,
)
from .call import Operands


def layout_fault(given: Operands) -> str | None:
    """Return the reason why operands are not plain strided tensors on one device, or None if they
    are.
    """
    for name, tensor in given._asdict().items():
        if tensor is None:
            continue
        sentence = unplain(name, tensor) or two_devices(name, tensor, "hidden", given.hidden)
        if sentence is not None:
            return sentence
    return None


def dtype_fault(given: Operands, dtype: torch.dtype | None) -> str | None:
    """Return the reason why the dtypes of operands are not supported, or None if they are.

    `dtype` is the dtype to which the caller will cast hidden states, weight and bias, or None if
    the caller will not cast them.
    """
    hidden, weight, bias, target, column_weight, low, up = given
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        sentence = unfloating(name, tensor)
        if sentence is None and dtype is None:
            sentence = two_dtypes(name, tensor.dtype, "hidden", hidden.dtype)
        if sentence is not None:
            return sentence
    if dtype is not None and dtype not in FLOATING:
        return (
            f"the compute dtype is {short(dtype)}; bfloat16, float16, float32 or float64 is needed."
        )
    if target.dtype not in INDICES:
        return (
            f"target has dtype {short(target.dtype)}; class indices of dtype int64 or int32 are "
            "needed. Class probabilities are not supported."
        )
    if column_weight is not None:
        if column_weight.dtype not in FLOATING:
            return (
                f"column_weight has dtype {short(column_weight.dtype)}; a floating dtype is "
                "needed. Cast it."
            )
        if column_weight.requires_grad:
            return "column_weight requires a gradient, which the op does not give. Detach it."
    if low is None or up is None:
        return None
    served = hidden.dtype if dtype is None else dtype
    if low.dtype not in (served, wide(served)):
        return f"low has dtype {short(low.dtype)}; {short(served)} or its wide dtype is needed."
    return two_dtypes("up", up.dtype, "low", low.dtype)


def shape_fault(given: Operands) -> str | None:
    """Return the reason why the shapes of operands do not fit together, or None if they do."""
    hidden, weight, bias, target, column_weight, low, up = given
    if hidden.dim() < 1 or weight.dim() != 2:
        return (
            f"hidden has {hidden.dim()} dimensions and weight {weight.dim()}; (..., D) and (V, D) "
            "are needed."
        )
    if target.dim() != hidden.dim() - 1:
        return (
            f"target has {target.dim()} dimensions and hidden {hidden.dim()}; target must have the "
            "leading dimensions of hidden."
        )
    if low is not None and up is not None and (low.dim() != hidden.dim() or up.dim() != 2):
        return (
            f"low has {low.dim()} dimensions and up {up.dim()}; (..., R), with the leading "
            "dimensions of hidden, and (V, R) are needed."
        )
    vocab, depth = weight.shape
    for vector, name in ((bias, "bias"), (column_weight, "column_weight")):
        if vector is not None and vector.dim() != 1:
            return f"{name} has {vector.dim()} dimensions; (V,) is needed."
    for seen, needed, sentence in _size_pairs(given):
        if isinstance(seen, int) and isinstance(needed, int) and seen != needed:
            return sentence
    if isinstance(vocab, int) and vocab == 0:
        return f"weight has shape (0, {depth}); a head needs at least one column."
    return None


def _size_pairs(given: Operands) -> list[tuple[Any, Any, str]]:
    """Return the pairs of sizes that must be equal, each with the message of the error."""
    hidden, weight, bias, target, column_weight, low, up = given
    vocab, depth = weight.shape
    of_depth = (
        f"hidden has {hidden.shape[-1]} features and weight {depth}; hidden must be (..., D) and "
        "weight (V, D)."
    )
    of_rows = (
        f"target has shape {tuple(target.shape)} and hidden {tuple(hidden.shape)}; target must "
        "have the leading dimensions of hidden."
    )
    pairs = [(hidden.shape[-1], depth, of_depth)]
    for seen, needed in zip(target.shape, hidden.shape[:-1], strict=True):
        pairs.append((seen, needed, of_rows))
    for vector, name in ((bias, "bias"), (column_weight, "column_weight")):
        if vector is not None:
            sentence = f"{name} has {vector.shape[0]} elements and weight {vocab} rows."
            pairs.append((vector.shape[0], vocab, sentence))
    if low is not None and up is not None:
        sentence = (
            f"low has shape {tuple(low.shape)} and up {tuple(up.shape)}; low must have the leading "
            "dimensions of hidden, up the rows of weight, and both one rank."
        )
        wanted = (*hidden.shape[:-1], up.shape[1])
        pairs += [(seen, needed, sentence) for seen, needed in zip(low.shape, wanted, strict=True)]
        pairs.append((up.shape[0], vocab, sentence))
    return pairs


def check_sizes(given: Operands) -> None:
    """Raise an error if two sizes that must be equal are not.

    The sizes may be symbols.
    """
    for seen, needed, sentence in _size_pairs(given):
        torch._check(seen == needed, lambda sentence=sentence: f"linear_cross_entropy: {sentence}")
