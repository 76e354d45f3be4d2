"""The ops memeff::coded_kv_cache_append, _view and _attention: schemas, validation, choice of
implementation, fake tensors.

A cache consists of ten tensors, the *pool*, which every op takes in the same order.
`layout.Layout.shapes` returns their shapes. `coded_kv_cache_append` returns no tensor. The op
writes to all tensors of the pool except `places`. The cache stores each sequence's first tokens
exactly, and `places` contains the positions of these tokens in the cache. The caller sets these
positions before the call. The other ops only read the pool. The ops have no backward pass, because
they are meant for generation. If a gradient is requested, the ops raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedInputError
from .. import library
from ..checks import FLOATING, MAX_DEPTH, require, short
from ..device import kernels_serve, where_it_runs
from . import reference
from .layout import BITS, PLAIN, Pool, dtype_of, group_of, scale_shapes, value_bits_of

LEAST_DEPTH = 64
"""The fewest channels per head for which the kernels were compared with float64 on a GPU."""

MOST_HEADS = 16
"""The most query heads per key-value head for which the kernels were compared with float64."""

POOL = Pool._fields
"""Names of the tensors of a cache, in the order that the ops take them."""

_COUNT = len(POOL)

ENGINES = {
    "codes": (
        "groups of codes split over programs, unpacked in registers, scales folded into queries "
        "and weights, two Triton kernels (CUDA, compute capability 8.0 or later; bf16, fp16)"
    ),
    "rows": (
        "directions that two layers share split over programs, lengths folded into scores and "
        "weights, two Triton kernels (CUDA, compute capability 8.0 or later; bf16, fp16)"
    ),
    "reference": "plain PyTorch, after decoding what is filled (any device and dtype)",
}

_MAPS = "Tensor? means=None, Tensor? turns=None, Tensor? slots=None"
"""The maps of a layer that is aligned to another: `layout.Maps`."""

_READ = ", ".join(f"Tensor {name}" for name in POOL)
_WRITTEN = ", ".join(
    f"Tensor {name}" if name == "places" else f"Tensor({letter}!) {name}"
    for letter, name in zip("abcdefghij", POOL, strict=True)
)


def supports(
    q: Tensor, pool: Sequence[Tensor], bits: int, mask: Tensor | None = None
) -> str | None:
    """Return a sentence that says why a low-bit cache's attention op does not support its inputs.

    The result is None if `coded_kv_cache_attention` supports them. `q` contains the queries, and
    `pool` the ten tensors of one layer's cache (`layout.Pool`).
    """
    return supports_pool(pool, bits) or _unlike_query(q, pool) or _unlike_mask(q, mask)


def supports_pool(pool: Sequence[Tensor], bits: int) -> str | None:
    """Return a sentence that says why the ops on a low-bit cache do not support its tensors.

    The result is None if the ops support them. `pool` contains the ten tensors of one layer's cache
    (`layout.Pool`). The ops append tokens, decode the cache, or attend to it.
    """
    if bits not in (PLAIN, *BITS):
        return f"bits is {bits}; one of {', '.join(map(str, BITS))} is needed."
    named = dict(zip(POOL, pool, strict=True))
    window = named["k_window"]
    if window.dim() != 4 or window.dtype not in FLOATING:
        return (
            f"k_window is {short(window.dtype)} with {window.dim()} dimensions; a floating "
            "(batch, heads, window, depth) is needed."
        )
    batch, heads, _, depth = window.shape
    for name, tensor in named.items():
        if tensor.device != window.device:
            return f"{name} is on {tensor.device} and k_window on {window.device}; move one."
        if not tensor.is_contiguous():
            return f"{name} is not contiguous; the tensors of a cache are used as allocated."
        wanted = dtype_of(name, window.dtype, bits)
        if tensor.dtype != wanted:
            return f"{name} is {short(tensor.dtype)}; {short(wanted)} is needed."
        if name != "counts" and tuple(tensor.shape[:2]) != (batch, heads):
            return f"{name} is {tuple(tensor.shape)}; it has to begin with {(batch, heads)}."
    if not 16 <= depth <= MAX_DEPTH or depth & (depth - 1):
        return f"the head dimension is {depth}; 16, 32, 64, 128 or 256 is served."
    return _unlike_scales(named, bits, depth)


def _unlike_scales(named: dict[str, Tensor], bits: int, depth: int) -> str | None:
    groups, block = named["k_codes"].shape[2:]
    v_bits = value_bits_of(block, named["v_codes"].shape[3], bits)
    if v_bits not in ((PLAIN,) if bits == PLAIN else BITS):
        return f"a block of v_codes has {named['v_codes'].shape[3]} bytes: no known number of bits."
    scheme = reference.scheme_of(named["k_scales"])
    shapes = scale_shapes(depth, bits, group_of(block, depth, bits), scheme)
    for name, end in zip(("k_scales", "v_scales"), shapes, strict=True):
        found, shape = tuple(named[name].shape[2:]), (groups, *end)
        if found != shape:
            return f"{name} ends in {found}; {shape} is needed for codes of {bits} bits."
    return None


def _unlike_query(q: Tensor, pool: Sequence[Tensor]) -> str | None:
    window = pool[POOL.index("k_window")]
    if q.dim() != 4 or q.shape[2] != 1:
        return (
            f"q is {tuple(q.shape)}; one query per sequence, (batch, heads, 1, depth), is needed."
        )
    if q.dtype != window.dtype or q.device != window.device:
        return (
            f"q is {short(q.dtype)} on {q.device} and the cache {short(window.dtype)} on "
            f"{window.device}; cast or move one."
        )
    batch, heads, _, depth = window.shape
    if q.shape[0] != batch or q.shape[3] != depth:
        return f"q is {tuple(q.shape)}; batch {batch} and depth {depth} are needed."
    if heads == 0 or q.shape[1] % heads:
        return f"q has {q.shape[1]} heads and the cache {heads}; a multiple of them is needed."
    return None


def _unlike_mask(q: Tensor, mask: Tensor | None) -> str | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.device != q.device:
        return (
            f"mask is {short(mask.dtype)} with {mask.dim()} dimensions on {mask.device}; bool of "
            f"(batch or 1, 1, 1, keys) on {q.device} is needed."
        )
    if mask.shape[0] not in (1, q.shape[0]) or tuple(mask.shape[1:3]) != (1, 1):
        return f"mask is {tuple(mask.shape)}; (1 or {q.shape[0]}, 1, 1, keys) is needed."
    return None


def supports_append(pool: Sequence[Tensor], k: Tensor, v: Tensor, bits: int) -> str | None:
    """Return a sentence that says why keys and values cannot be appended to a low-bit cache.

    The result is None if they can. `pool` contains the ten tensors of one layer's cache
    (`layout.Pool`).
    """
    sentence = supports_pool(pool, bits)
    if sentence is not None:
        return sentence
    if bits == PLAIN:
        return f"bits is {bits}; rows without codes are appended by pairs of layers."
    window = pool[POOL.index("k_window")]
    batch, heads, _, depth = window.shape
    for name, new in (("k", k), ("v", v)):
        if new.dtype != window.dtype or new.device != window.device:
            return (
                f"{name} is {short(new.dtype)} on {new.device} and the cache "
                f"{short(window.dtype)} on {window.device}; cast or move one."
            )
        if new.dim() != 4 or (new.shape[0], new.shape[1], new.shape[3]) != (batch, heads, depth):
            return f"{name} is {tuple(new.shape)}; {(batch, heads, 'tokens', depth)} is needed."
    if k.shape != v.shape:
        return f"k is {tuple(k.shape)} and v {tuple(v.shape)}; they need the same shape."
    return None


def engine_for(device: torch.device, dtype: torch.dtype, group: int = 64, bits: int = 4) -> str:
    """Return the name of the implementation, a key of `ENGINES`, for a dtype and group size on a
    device."""
    is_served = dtype in (torch.bfloat16, torch.float16) and group in (32, 64, 128)
    if not is_served or not kernels_serve(device, dtype):
        return "reference"
    return "rows" if bits == PLAIN else "codes"


def unproven(q: Tensor, pool: Sequence[Tensor], bits: int) -> str | None:
    """Return a sentence that says why a cache's keys and values should be decoded before attention.

    A low-bit cache stores keys and values as codes. The result is None if attention should read the
    codes themselves, with the op `coded_kv_cache_attention`, or if attention does not run on a GPU.
    The op works on any GPU. This function only tells passes whether to use the op.
    """
    if where_it_runs(q.device).type != "cuda":
        return None
    if engine_for(q.device, q.dtype, _group(pool, bits), bits) == "reference":
        return (
            f"the kernels do not serve {short(q.dtype)} in groups of {_group(pool, bits)} here, "
            "and without them the number of tokens would have to be read from the GPU"
        )
    heads, depth = q.shape[1] // pool[4].shape[1], pool[4].shape[3]
    if depth < LEAST_DEPTH:
        return (
            f"the head dimension is {depth}; {LEAST_DEPTH} and more have been compared with "
            "float64 on a GPU."
        )
    least = min(bits, value_bits_of(pool[0].shape[3], pool[1].shape[3], bits))
    if q.dtype != torch.bfloat16 and least < 4:
        return (
            f"{least} bits serve {short(q.dtype)}; there 4 and 8 bits have been compared with "
            "float64 on a GPU, and all in bfloat16."
        )
    if heads > MOST_HEADS:
        return (
            f"{heads} query heads share a key-value head; up to {MOST_HEADS} have been compared "
            "with float64 on a GPU."
        )
    return None


def _group(pool: Sequence[Tensor], bits: int) -> int:
    return group_of(pool[0].shape[3], pool[4].shape[3], bits)


def on_kernels(window: Tensor, group: int) -> bool:
    """Return whether Triton kernels append tokens to a cache. Otherwise, plain PyTorch does.

    If the kernels append, the CPU does not wait for the GPU and copies no value from it.
    """
    is_served = group in (32, 64, 128) and kernels_serve(window.device, window.dtype)
    return window.is_cuda and is_served and window.numel() > 0


def _engine(pool: Sequence[Tensor], bits: int) -> str:
    window = pool[4]
    if not window.is_cuda or not window.numel():
        return "reference"
    return engine_for(window.device, window.dtype, _group(pool, bits), bits)


def _append(*args: Any) -> None:
    pool, (k, v, bits, recent, limit) = args[:_COUNT], args[_COUNT:]
    require("coded_kv_cache_append", supports_append(pool, k, v, bits))
    if not k.numel():
        return
    if on_kernels(pool[4], _group(pool, bits)):
        from .append_codes import append

        append(pool, k, v, bits, recent, limit)
    else:
        reference.append(pool, k, v, bits, recent, limit)


def _fake_append(*args: Any) -> None:
    pool, (k, v, bits, _, _) = args[:_COUNT], args[_COUNT:]
    require("coded_kv_cache_append", supports_append(pool, k, v, bits))


def _maps_of(args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Take `means`, `turns` and `slots` out of the last arguments of an op, and return them.

    These tensors make the keys and values, or only the values, of a layer and another layer
    similar. `means` contains the means of these keys and values, `turns` contains rotation
    matrices, and `slots` contains the indices of matching heads. The result contains None for each
    tensor that the op did not get.
    """
    means, turns, slots = (*args, None, None, None)[:3]
    return means, turns, slots


def _unlike_maps(window: Tensor, maps: Sequence[Tensor | None]) -> str | None:
    """Return why `maps`, a layer's means, rotations and matching heads, do not fit the layer's
    cache, or None if they fit.

    The maps make the keys and values, or only the values, of this layer and another layer similar.
    The function checks the shapes, dtypes, devices and memory layout of the maps. It also checks
    which maps are passed together.
    """
    batch, heads, _, depth = window.shape
    means, turns, slots = maps
    if (turns is None) != (slots is None) or (turns is not None and means is None):
        return "turns and slots come together, with means, or not at all."
    front = (batch, heads)
    kinds = 1 if means is not None and means.dim() == 4 and means.shape[2] == 1 else 2
    for name, tensor, end, dtype in (
        ("means", means, (kinds, depth), window.dtype),
        ("turns", turns, (kinds, depth, depth), window.dtype),
        ("slots", slots, (), torch.int32),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != (*front, *end) or tensor.dtype != dtype:
            found, wanted = f"{short(tensor.dtype)} {tuple(tensor.shape)}", (*front, *end)
            return f"{name} is {found}; {short(dtype)} {wanted} is needed."
        if tensor.device != window.device or not tensor.is_contiguous():
            return f"{name} has to be contiguous on {window.device}."
    return None


def _view(*args: Any) -> tuple[Tensor, Tensor]:
    pool, (k_norms, v_norms, bits, tokens, *rest) = args[:_COUNT], args[_COUNT:]
    maps = _maps_of(rest)
    require("coded_kv_cache_view", supports_pool(pool, bits) or _unlike_maps(pool[4], maps))
    return reference.view(pool, (k_norms, v_norms), bits, tokens, maps)


def _fake_view(*args: Any) -> tuple[Tensor, Tensor]:
    pool, (_, _, bits, tokens, *rest) = args[:_COUNT], args[_COUNT:]
    maps = _maps_of(rest)
    require("coded_kv_cache_view", supports_pool(pool, bits) or _unlike_maps(pool[4], maps))
    batch, heads, _, depth = pool[4].shape
    keys, values = (pool[4].new_empty((batch, heads, tokens, depth)) for _ in range(2))
    return keys, values


def _attention(q: Tensor, *args: Any) -> Tensor:
    pool, (k_norms, v_norms, bits, mask, scale, *rest) = args[:_COUNT], args[_COUNT:]
    maps = _maps_of(rest)
    sentence = supports(q, pool, bits, mask) or _unlike_maps(pool[4], maps)
    require("coded_kv_cache_attention", sentence)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    attend: Any = reference.attend
    engine = _engine(pool, bits)
    if engine == "codes":
        from .split_codes import attend
    elif engine == "rows":
        from .split_rows import attend
    out: Tensor = attend(q, pool, (k_norms, v_norms), mask, factor, bits, maps)
    return out


def _fake_attention(q: Tensor, *args: Any) -> Tensor:
    pool, (_, _, bits, mask, _, *rest) = args[:_COUNT], args[_COUNT:]
    sentence = supports(q, pool, bits, mask) or _unlike_maps(pool[4], _maps_of(rest))
    require("coded_kv_cache_attention", sentence)
    return library.heads_inside(q)


_no_backward = library.refusing(
    UnsupportedInputError,
    "a coded KV cache has no backward: it serves generation. Call the model under torch.no_grad().",
)

coded_kv_cache_append = library.op(
    f"coded_kv_cache_append({_WRITTEN}, Tensor k, Tensor v, int bits, int recent, SymInt limit)"
    " -> ()",
    _append,
    _fake_append,
)
coded_kv_cache_view = library.op(
    f"coded_kv_cache_view({_READ}, Tensor? k_norms, Tensor? v_norms, int bits, SymInt tokens, "
    f"{_MAPS}) -> (Tensor, Tensor)",
    _view,
    _fake_view,
    backward=_no_backward,
)
coded_kv_cache_attention = library.op(
    f"coded_kv_cache_attention(Tensor q, {_READ}, Tensor? k_norms, Tensor? v_norms, int bits, "
    f"Tensor? mask, float? scale, {_MAPS}) -> Tensor",
    _attention,
    _fake_attention,
    backward=_no_backward,
)
