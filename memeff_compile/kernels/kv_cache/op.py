"""memeff::kv_cache_append and memeff::kv_cache_attention: schemas, validation, choice of
implementation, fake tensors.

`kv_cache_append` and `kv_cache_last` are composed of other ops (CompositeImplicitAutograd). In
`kv_cache_append`, the inner compiler (Inductor by default) sees two in-place writes: one of the
keys and one of the values. The compiler fuses the writes with the ops that compute the keys,
including the rotary embedding. `kv_cache_attention` is a custom op without side effects.
`kv_cache_attention` has no backward pass, because it is meant for generation. If a gradient is
requested, the op raises an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedInputError
from .. import library
from ..checks import INDICES, require, short, unlike_heads, unlike_sizes
from ..device import kernels_serve
from . import reference

ENGINES = {
    "split": (
        "the filled keys split over programs, query heads of one key-value head in one tile, two "
        "Triton kernels (CUDA, compute capability 8.0 or later; bf16, fp16, fp32)"
    ),
    "reference": "plain PyTorch, on the CPU over the filled part alone (any device, also fp64)",
}


def supports(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, last: Tensor | None, mask: Tensor | None = None
) -> str | None:
    """Return the reason why the op `memeff::kv_cache_attention` does not support the given tensors,
    or None if it does.

    `last` contains the last cache position that each query may attend to. If `last` is None, the
    function checks only the other tensors.
    """
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    return (
        unlike_heads(named)
        or unlike_sizes(named)
        or _unlike_last(q, last)
        or _unlike_mask(q, k_cache, mask)
    )


def _unlike_last(q: Tensor, last: Tensor | None) -> str | None:
    if last is None:
        return None
    batch, _, queries, _ = q.shape
    if last.dtype not in INDICES or last.dim() != 2 or last.device != q.device:
        return (
            f"last is {short(last.dtype)} with {last.dim()} dimensions on {last.device}; int32 or "
            f"int64 of (batch or 1, queries or 1) on {q.device} is needed."
        )
    if not _fits(last.shape, (batch, queries)):
        return f"last is {tuple(last.shape)}; (1 or {batch}, 1 or {queries}) is needed."
    return None


def _unlike_mask(q: Tensor, k_cache: Tensor, mask: Tensor | None) -> str | None:
    if mask is None:
        return None
    batch, _, queries, _ = q.shape
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.device != q.device:
        return (
            f"mask is {short(mask.dtype)} with {mask.dim()} dimensions on {mask.device}; bool of "
            f"(batch or 1, 1, queries or 1, keys) on {q.device} is needed."
        )
    keys = k_cache.shape[2]
    if mask.shape[3] != keys or not _fits(mask.shape[:3], (batch, 1, queries)):
        return f"mask is {tuple(mask.shape)}; (1 or {batch}, 1, 1 or {queries}, {keys}) is needed."
    return None


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return all(size in (1, full) for size, full in zip(shape, whole, strict=True))


def supports_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> str | None:
    """Return a sentence that says why the given keys and values cannot be appended to a cache, or
    None if they can."""
    if positions.dtype not in INDICES or positions.dim() != 1:
        return (
            f"positions is {short(positions.dtype)} with {positions.dim()} dimensions; int32 or "
            "int64 of (tokens,) is needed."
        )
    for name, cache, new in (("k", k_cache, k), ("v", v_cache, v)):
        if cache.dim() != 4 or new.dim() != 4:
            return f"{name} and its cache need (batch, heads, length, depth)."
        if cache.dtype != new.dtype:
            return (
                f"{name} has dtype {short(new.dtype)} and its cache {short(cache.dtype)}; "
                "cast one of them."
            )
        wanted = (*cache.shape[:2], positions.shape[0], cache.shape[3])
        if tuple(new.shape) != wanted:
            return f"{name} is {tuple(new.shape)}; {wanted} is needed."
    return None


def engine_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return which implementation of `memeff::kv_cache_attention` runs for a device and dtype: a
    key of `ENGINES`."""
    return "split" if kernels_serve(device, dtype) else "reference"


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    require("kv_cache_append", supports_append(k_cache, v_cache, k, v, positions))
    positions = positions.long()
    k_cache.index_copy_(2, positions, k)
    v_cache.index_copy_(2, positions, v)


class _Call(NamedTuple):
    """The arguments of `kv_cache_attention`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    last: Tensor
    mask: Tensor | None = None
    scale: float | None = None


def _attention(given: _Call) -> Tensor:
    require("kv_cache_attention", supports(*given[:5]))
    q, k_cache, _, _, _, scale = given
    factor = q.shape[3] ** -0.5 if scale is None else scale
    attend = reference.attend
    is_split = q.is_cuda and engine_for(q.device, q.dtype) == "split"
    if is_split and q.numel() and k_cache.shape[2]:
        from .split_keys import attend
    return attend(*given[:5], factor)


def _fake_attention(given: _Call) -> Tensor:
    require("kv_cache_attention", supports(*given[:5]))
    return library.heads_inside(given.q)


def _last(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedInputError(
            f"kv_cache_last: mask is {short(mask.dtype)} {tuple(mask.shape)}; bool of "
            "(batch or 1, 1, queries or 1, keys) is needed."
        )
    places = torch.arange(1, mask.shape[3] + 1, device=mask.device)
    return (mask[:, 0] * places).amax(-1) - 1


kv_cache_append = library.op(
    "kv_cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor positions) "
    "-> ()",
    _append,
)
kv_cache_attention = library.op(
    "kv_cache_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor last, "
    "Tensor? mask=None, float? scale=None) -> Tensor",
    *library.taking(_Call, _attention, _fake_attention),
    backward=library.refusing(
        UnsupportedInputError,
        "kv_cache_attention has no backward: it serves generation. Call it under torch.no_grad(), "
        "or use scaled_dot_product_attention where gradients are needed.",
    ),
)
kv_cache_last = library.op("kv_cache_last(Tensor mask) -> Tensor", _last)
