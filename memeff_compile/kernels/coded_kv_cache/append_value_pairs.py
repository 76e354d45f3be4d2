"""Launch the kernels that append tokens to the caches of two layers that share values.

The kernels need a CUDA GPU of sm_80 or later. The CPU does not wait for the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._triton.key_tiles import cells_of
from .._triton.launch import start
from ..device import on_device, processors
from . import alignment, append_codes
from .append_pairs import SUMS
from .layout import ValuePair, channel_group, pool_of_values, value_bits_of
from .merging import RULES
from .reference import groups_due, kept_until
from .value_pair_reference import Merging

WARPS = 8


def append(
    pair: ValuePair,
    # keys and values of the lower layer, or None where they are in its window
    lower_new: tuple[Tensor, Tensor] | None,
    upper_new: tuple[Tensor, Tensor],  # (B, H, T, D) each, any strides
    bits: int,  # of a key's code
    recent: int,  # latest tokens, which are never stored as codes
    limit: int,  # tokens that the cache holds
    settings: Merging,  # how values are merged
    *,
    is_first: bool = False,  # the cache is empty: fit the maps to these tokens
) -> None:
    """Append new tokens to the caches of two layers that share values, and encode older tokens.

    The latest tokens stay unencoded in each layer's window. When the windows are full, the group of
    their oldest tokens is encoded. If `lower_new` is None, the lower layer's tokens are already in
    its window.

    No token is written if the caches would contain more than `limit` tokens. The same holds if the
    two layers would have different numbers of tokens. Attention then returns nan until the cache is
    reset.
    """
    if is_first and lower_new is not None:
        _append_first(pair, lower_new, upper_new, bits, recent, limit, settings)
        return
    from . import append_value_pairs_kernels as kernels

    k, v = upper_new
    lower_k, lower_v = upper_new if lower_new is None else lower_new
    shared, lower, upper, maps = pair
    batch, heads, window, depth = upper.k_window.shape
    group, new = window - recent, k.shape[2]
    scratch = k.new_empty((batch * heads, 2, group, depth), dtype=torch.float32)
    with on_device(k):
        start(
            kernels._coded_kv_cache_append_value_pairs_rows_kernel,
            (batch * heads, 3),
            *(cells_of(lower_k), cells_of(lower_v), cells_of(k), cells_of(v), shared, lower, upper),
            *(maps, scratch, (heads, upper.k_codes.shape[2], new, limit), float(settings.t)),
            **_constants(pair, bits, recent, settings),
            TOKENS=min(group, 1 << (new - 1).bit_length()),
            HAS_LOWER=lower_new is not None,
            num_warps=WARPS,
        )


def _constants(pair: ValuePair, bits: int, recent: int, settings: Merging) -> dict[str, Any]:
    """Return the compile-time constants of the kernels for two layers that share values."""
    shared, _, upper, _ = pair
    window, depth = upper.k_window.shape[2:]
    return {
        "DEPTH": depth,
        "BITS": bits,
        "V_BITS": value_bits_of(upper.k_codes.shape[3], shared.v_codes.shape[3], bits),
        "GROUP": window - recent,
        "CHANNELS": channel_group(depth, "kivi"),
        "WINDOW": window,
        "KEPT": upper.k_kept.shape[2],
        "NORMS": 1,
        "RULE": RULES.index(settings.rule),
        "IS_PROJECTED": settings.scale == "projection",
        "IS_PER_HEAD": False,
        "IS_FAST": upper.k_window.is_cuda,
        "PIECES": 1,
        "UPCAST": not upper.k_window.is_cuda,
    }


def _append_first(
    pair: ValuePair,
    lower_new: tuple[Tensor, Tensor],
    upper_new: tuple[Tensor, Tensor],
    bits: int,
    recent: int,
    limit: int,
    settings: Merging,
) -> None:
    """Fit the linear maps that make two layers' values similar, and append the layers' tokens.

    The tokens are the first ones that an empty cache gets. The maps are fitted to the values of
    these tokens.
    """
    shared, lower, upper, maps = pair
    new, window = upper_new[0].shape[2], upper.k_window.shape[2]
    if new <= limit:
        values = lower_new[1], upper_new[1]
        early = kept_until(shared.places, torch.arange(new, device=values[0].device))[:, 0]
        counted = ~early.expand(values[0].shape[0], -1)
        alignment.fit(maps, values, counted.contiguous(), SUMS)
        due = groups_due(new, window, window - recent)
        if due:
            merge_prompt(pair, values, due, bits, recent, settings)
    for own, (k, v) in ((lower, lower_new), (upper, upper_new)):
        pool = pool_of_values(shared, own)
        append_codes.append(pool, k, v, bits, recent, limit, codes_values=False)


def merge_prompt(
    pair: ValuePair,
    values: tuple[Tensor, Tensor],  # of the lower layer and of the upper, (B, H, n, D)
    due: int,  # groups to encode, from the first token on
    bits: int,
    recent: int,
    settings: Merging,
) -> None:
    """Merge two layers' values of the first `due` groups of a prompt, and encode the results.

    A group is the tokens that are encoded together. A token's two values become one direction (a
    unit vector) that both layers share, and two lengths. The prompt's tokens are the first ones
    that an empty cache gets.
    """
    from . import append_value_pairs_kernels as kernels

    shared, _, upper, maps = pair
    low, high = (x if x.stride(3) == 1 else x.contiguous() for x in values)
    batch, heads, _, depth = low.shape
    group = upper.k_window.shape[2] - recent
    parts = max(1, min(due, -(-_PROGRAMS * processors(low.device) // (batch * heads))))
    size = (batch * heads * parts, 2, group, depth)
    scratch = torch.empty(size, dtype=torch.float32, device=low.device)
    with on_device(low):
        start(
            kernels._coded_kv_cache_append_value_pairs_groups_kernel,
            (batch * heads, parts),
            *(low, low.stride()[:3], high, high.stride()[:3], shared),
            *(maps, scratch, (heads, shared.v_codes.shape[2], due), float(settings.t)),
            **_constants(pair, bits, recent, settings),
            num_warps=WARPS,
        )


_PROGRAMS = 2
"""Programs for each multiprocessor when a prompt is merged; each walks over several groups."""
