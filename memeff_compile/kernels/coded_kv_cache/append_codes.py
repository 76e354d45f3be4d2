"""Launch the kernels that append tokens to a low-bit KV cache.

The kernels need a CUDA GPU of sm_80 or later. The CPU does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._triton.key_tiles import cells_of
from .._triton.launch import start
from ..device import on_device
from .layout import Pool, channel_group, value_bits_of
from .reference import is_per_head

WARPS = 8
"""Warps of a program when several tokens are appended."""

NEW_GROUPS = (4, 4)
"""The most programs that share a group in which all tokens are new, and their warps."""

PROGRAMS = 8192
"""Programs that encode such groups, if there are that many groups."""


def cut(bits: int, depth: int) -> tuple[int, int]:
    """Return how many programs encode one group of tokens when one token is appended, and how many
    warps each program has.

    The returned numbers were the best on an H200. More programs encode a group faster, but slow
    down the decoding steps in which no group is encoded. With fewer than 4 bits, a program has one
    warp, or two for keys and values of more than 128 channels. More than 128 channels do not fit
    into the registers of one warp.
    """
    return (1, 4) if bits >= 4 else (4, 1 if depth <= 128 else 2)


def append(
    pool: Sequence[Tensor],  # the tensors of a cache
    k: Tensor,  # (B, H, T, D), any strides
    v: Tensor,  # likewise
    bits: int,  # of a code
    recent: int,  # latest tokens, which are never stored as codes
    limit: int,  # tokens that the cache holds
    *,
    warps: int | None = None,  # per program, by default the result of `cut`
    # programs that share a group when one token is appended, by default the result of `cut`
    pieces: int | None = None,
    new_groups: tuple[int, int] = NEW_GROUPS,
    programs: int = PROGRAMS,
    codes_values: bool = True,  # False if another launch encodes values
) -> None:
    """Write the keys and values of new tokens to a layer's cache, and encode groups of old tokens.

    The window is the memory for the latest tokens, which stay unencoded. When the window is full,
    the group of its oldest tokens is encoded. The calling op has already checked the shapes.

    If the cache would contain more than `limit` tokens, no token is written. Attention then returns
    nan until the cache is reset.
    """
    from . import append_codes_kernels as kernels

    k_codes, v_codes, k_scales, _, k_window, _, k_kept, _, _, _ = pool
    batch, heads, window, depth = k_window.shape
    group = window - recent
    per_head = is_per_head(k_scales)
    new = k.shape[2]
    v_bits = value_bits_of(k_codes.shape[3], v_codes.shape[3], bits)
    best = cut(min(bits, v_bits), depth) if new == 1 else (1, WARPS)
    pieces, warps = best[0] if pieces is None else pieces, best[1] if warps is None else warps
    if new > 1 or recent == 0 or depth < 64:
        # If several tokens are appended, a single program encodes a group that they complete.
        pieces = 1
    sizes = heads, k_codes.shape[2], new, limit
    given = cells_of(k), cells_of(v), Pool(*pool), sizes
    constants = {
        "DEPTH": depth,
        "BITS": bits,
        "V_BITS": v_bits,
        "GROUP": group,
        "CHANNELS": channel_group(depth, "per_head" if per_head else "kivi"),
        "WINDOW": window,
        "KEPT": k_kept.shape[2],
        "TOKENS": min(group, 1 << (new - 1).bit_length()),
        "IS_PER_HEAD": per_head,
        "IS_FAST": k.is_cuda,
        "CODES_VALUES": codes_values,
    }
    with on_device(k):
        if new >= group:
            share = max(1, min(new_groups[0], depth // 32))
            parts = share * max(1, min(new // group, programs // (2 * batch * heads * share)))
            more = {"PIECES": share, "num_warps": new_groups[1]}
            kernel = kernels._coded_kv_cache_append_codes_groups_kernel
            start(kernel, (batch * heads, 2 * parts), *given, **constants, **more)
        more = {"PIECES": pieces, "num_warps": warps}
        kernel = kernels._coded_kv_cache_append_codes_rows_kernel
        start(kernel, (batch * heads, 2 * pieces), *given, **constants, **more)
