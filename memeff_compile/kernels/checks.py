"""Checks of an op's inputs: each function returns a sentence that names the input, the requirement
and a remedy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import compat
from ..errors import TargetRangeError, UnsupportedInputError

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_DEPTH = 256
"""The largest head dimension that attention supports."""
INDICES = (torch.int32, torch.int64)


def require(op: str, sentence: str | None) -> None:
    """Raise an error with a sentence about an unsupported input.

    Do nothing if the sentence is None.
    """
    if sentence is not None:
        raise UnsupportedInputError(f"{op}: {sentence}")


def require_classes(op: str, index: Tensor, classes: int) -> None:
    """Raise an error for class indices outside 0 .. classes - 1.

    On CUDA, a device assertion fails instead.
    """
    is_valid = (index >= 0) & (index < classes)
    if index.device.type == "cuda":
        sentence = f"{op}: a class number is outside 0 .. {classes - 1}"
        compat.assert_on_device(is_valid.all(), sentence)
    elif not bool(is_valid.all()):
        *row, place = (~is_valid).nonzero()[0].tolist()
        number = int(index[(*row, place)])
        raise TargetRangeError(
            f"{op}: row {short_index(row)} names class {number}; classes run from 0 to "
            f"{classes - 1}. Fix the class numbers."
        )


def short_index(place: list[int]) -> str:
    """Return a position in a tensor as text: "3" or "(0, 3)"."""
    return str(place[0]) if len(place) == 1 else str(tuple(place))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of numbers: fp64 for fp64 inputs, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def unplain(name: str, tensor: Tensor) -> str | None:
    """Return the reason why an op cannot use a tensor's memory, or None if the op can."""
    if tensor.layout == torch.strided and not tensor.is_quantized:
        return None
    kind = "quantised" if tensor.is_quantized else f"stored as {tensor.layout}"
    return f"{name} is {kind}; a plain strided tensor is needed. Dequantise or densify it."


def unfloating(name: str, tensor: Tensor) -> str | None:
    """Return the reason why an op does not support a tensor's dtype, or None if it does."""
    if tensor.dtype in FLOATING:
        return None
    return (
        f"{name} has dtype {short(tensor.dtype)}; bfloat16, float16, float32 or float64 is needed. "
        "Dequantise or cast it."
    )


def two_dtypes(name: str, dtype: torch.dtype, other: str, of_other: torch.dtype) -> str | None:
    """Return a sentence which says that two dtypes differ, or None if they are equal."""
    if dtype == of_other:
        return None
    return f"{name} has dtype {short(dtype)} and {other} {short(of_other)}; cast them to one dtype."


def two_devices(name: str, tensor: Tensor, other: str, of_other: Tensor) -> str | None:
    """Return a sentence which says that two tensors are on different devices, or None if they are
    not."""
    if tensor.device == of_other.device:
        return None
    where = f"{name} is on {tensor.device} and {other} on {of_other.device}"
    return f"{where}; move them to one device."


def unlike_heads(named: Mapping[str, Tensor]) -> str | None:
    """Return the reason why queries, keys and values cannot be used together, or None if they can.

    Each of the three tensors is (batch, heads, length, depth). All three must have the same layout,
    dtype, number of axes and device.
    """
    first, of_first = next(iter(named.items()))
    for name, tensor in named.items():
        sentence = unplain(name, tensor) or unfloating(name, tensor)
        if sentence is not None:
            return sentence
        if tensor.dim() != 4:
            return f"{name} has {tensor.dim()} dimensions; (batch, heads, length, depth) is needed."
        sentence = two_dtypes(first, of_first.dtype, name, tensor.dtype)
        sentence = sentence or two_devices(first, of_first, name, tensor)
        if sentence is not None:
            return sentence
    return None


def unlike_sizes(named: Mapping[str, Tensor]) -> str | None:
    """Return the reason why the sizes of queries, keys and values do not fit together, or None if
    they do.

    The tensors must already have four axes, one dtype and one device, as `unlike_heads` checks."""
    (q_name, q), (k_name, k), (v_name, v) = named.items()
    sizes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if k.shape != v.shape:
        return (
            f"{k_name} is {sizes[k_name]} and {v_name} {sizes[v_name]}; they need the same shape."
        )
    both = f"{k_name} and {v_name}"
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return (
            f"{q_name} is {sizes[q_name]} and {both} {sizes[k_name]}; batch and depth need to be "
            "the same. Expand them over the batch."
        )
    heads, groups = q.shape[1], k.shape[1]
    if groups == 0 or heads % groups:
        return f"{q_name} has {heads} heads and {both} {groups}; a multiple of them is needed."
    if not 0 < q.shape[3] <= MAX_DEPTH:
        return f"the head dimension is {q.shape[3]}; 1 to {MAX_DEPTH} is served."
    return None
