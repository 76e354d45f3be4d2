"""Launch the kernels that append tokens to the cache that two layers share.

The kernels need a CUDA GPU of sm_80 or later. The CPU does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._triton.key_tiles import cells_of
from .._triton.launch import start
from ..device import on_device, processors
from .alignment import Sums, upper_heads
from .layout import PLAIN, Maps, Pair, channel_group
from .merging import RULES
from .pair_reference import Merging, keep, keep_rows, spans_of


def append_lower(
    k_window: Tensor, v_window: Tensor, counts: Tensor, k: Tensor, v: Tensor, limit: int
) -> None:
    """Write new keys and values of the lower of two layers to the layer's window of latest tokens.

    For older tokens, the two layers share unit vectors of values, or of keys and values. Each layer
    stores its latest tokens exactly, in its own window: `k_window` and `v_window`, each (B, H, W,
    D). A later append to the upper layer merges older tokens of the two layers. `counts` (3,)
    contains the layer's number of tokens and its number of merged tokens. The third number counts
    the finished programs of a launch, and the last program resets the number to 0.

    If the cache would then have more than `limit` tokens, the kernel writes no new token. Instead,
    the kernel overwrites the latest token in the window with nan. `k` and `v`, (B, H, T, D), may
    have any strides.
    """
    from . import append_pairs_kernels as kernels

    batch, heads, window, depth = k_window.shape
    new = k.shape[2]
    with on_device(k):
        start(
            kernels._coded_kv_cache_append_pairs_lower_kernel,
            (batch * heads,),
            *(cells_of(k), cells_of(v), k_window, v_window, counts, (heads, new, limit)),
            DEPTH=depth,
            WINDOW=window,
            TOKENS=1 << (new - 1).bit_length(),
            num_warps=1 if new == 1 else 4,
        )


def append_pair(
    pair: Pair,
    # keys and values of the lower layer, or None where they are in its window
    lower_new: tuple[Tensor, Tensor] | None,
    upper_new: tuple[Tensor, Tensor],  # (B, H, T, D) each, any strides
    bits: int,  # of a code, or PLAIN
    recent: int,  # latest tokens, which are never merged
    limit: int,  # tokens that the cache holds
    settings: Merging,  # how rows are merged
) -> None:
    """Append new tokens to the caches of two layers, and merge the two layers' keys and values of
    groups of older tokens.

    Merging replaces the keys of a token in the two layers by one shared direction (unit vector) and
    two lengths. The token's two values are merged in the same way. The latest tokens stay unmerged
    in each layer's window. When the windows are full, the group of their oldest tokens is merged.
    If `lower_new` is None, `append_lower` has already written the lower layer's tokens.

    Some tokens of the group stay unmerged, as three fields of `settings` say. A token's distance is
    the larger of two angles: between its keys in the two layers, and between its values. These
    tokens stay unmerged:

    - the first `keep_first` tokens of each sequence;
    - tokens whose distance is above a threshold, or below it with `reading="similar"`, while memory
      for unmerged tokens is left. `gamma` determines the threshold.

    No token is written if the caches would contain more than `limit` tokens. The same holds if the
    two layers would have different numbers of tokens. Attention then returns nan until the cache is
    reset.
    """
    from . import append_pairs_kernels as kernels

    k, v = upper_new
    lower_k, lower_v = upper_new if lower_new is None else lower_new
    shared, lower, upper, maps = pair
    batch, heads, window, depth = upper.k_window.shape
    group, new = window - recent, k.shape[2]
    scratch = None
    if maps is not None:  # for the aligned rows of a group, which several threads write and read
        scratch = k.new_empty((batch * heads, 4, group, depth), dtype=torch.float32)
    with on_device(k):
        start(
            kernels._coded_kv_cache_append_pairs_merge_kernel,
            (batch * heads,),
            *(cells_of(lower_k), cells_of(lower_v), cells_of(k), cells_of(v), shared, lower, upper),
            *(Maps(None, None, None, None) if maps is None else maps, scratch),
            (heads, shared.k_codes.shape[2], new, limit),
            *(float(settings.t), float(settings.gamma)),
            **_constants(depth, group, bits, settings),
            WINDOW=window,
            KEPT=shared.places.shape[2],
            KEEP_FIRST=settings.keep_first,
            TOKENS=min(group, 1 << (new - 1).bit_length()),
            KEEPS_NEAREST=settings.reading == "similar",
            KEEPS_ALL=settings.gamma >= 1,
            HAS_LOWER=lower_new is not None,
            IS_ALIGNED=maps is not None,
            UPCAST=not k.is_cuda,
        )


def _constants(depth: int, group: int, bits: int, settings: Merging) -> dict[str, Any]:
    """Return the compile-time constants of the kernels that encode directions (unit vectors) which
    two layers share.

    The two layers share one direction for a token's keys, and another one for its values.
    """
    return {
        "DEPTH": depth,
        "BITS": bits,
        "V_BITS": bits,
        "NORMS": 2,
        "GROUP": group,
        "CHANNELS": depth // 2 if bits == PLAIN else channel_group(depth, "kivi"),
        "RULE": RULES.index(settings.rule),
        "IS_PROJECTED": settings.scale == "projection",
        "num_warps": 8,
    }


def merge_prompt(
    pair: Pair, rows: Sequence[Tensor], coded: int, group: int, bits: int, settings: Merging
) -> None:
    """Merge two layers' keys and values of a prompt, by kernels.

    A prompt is the first tokens that are written to an empty cache. The caches then contain the
    same as after `pair_reference.merge`, which takes the same arguments.
    """
    shared, maps = pair.shared, pair.maps
    heads = None if maps is None else upper_heads(maps).to(torch.int32)
    spans = [slice(0, rows[0].shape[2])] if maps is None else spans_of(rows[0], group, _ALIGNED)

    def halves(span: slice) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the keys, then the values, of the two layers that `merge_prompt` merges.

        Each result is a pair, of the lower and of the upper layer, for the tokens in `span`. If
        there are maps that make the two layers' keys and values similar, apply these maps.
        """
        some = [x[:, :, span] for x in rows]
        keys, values = _alike(some[0], some[2]), _alike(some[1], some[3])
        if maps is None or heads is None:
            return keys, values
        return align_prompt(keys, values, maps, heads, group)

    last = halves(spans[0])
    apart = [measure_prompt(*last, group)]
    for span in spans[1:]:
        last = halves(span)
        apart.append(measure_prompt(*last, group))
    count = rows[0].shape[2]
    behind = torch.arange(coded, coded + count, device=rows[0].device)
    is_kept = keep(shared, torch.cat(apart, 2), behind - shared.starts.unsqueeze(-1), settings)
    keep_rows(pair, rows, coded)
    for span in reversed(spans):  # the last one is still aligned
        both = last if span == spans[-1] else halves(span)
        chosen = is_kept[:, :, span].contiguous()
        for place, some in enumerate(both):
            code_prompt(pair, some, chosen, group, bits, settings, place, span.start, heads)


_ALIGNED = 1 << 22
"""Elements of one layer's keys that are aligned at a time; this bounds the temporary memory."""


def align_prompt(
    # of the lower layer and of the upper, (B, H, n, D) of the same strides
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],  # likewise
    maps: Maps,
    heads: Tensor,  # (B, H) int32, the upper layer's head of each slot
    group: int,  # tokens per program
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Apply the linear maps that make two layers' keys and values similar.

    The function returns two pairs in fp32: the keys of the lower and of the upper layer, and the
    values of the lower and of the upper layer. In the results, each head of the upper layer stands
    at the index of the lower layer's matching head. The function `alignment.aligned` does the same
    in plain PyTorch, and returns a list in another order.
    """
    from . import alignment_kernels as kernels

    batch, kv_heads, count, depth = keys[0].shape
    made = torch.empty((4, batch, kv_heads, count, depth), dtype=torch.float32, device=heads.device)
    with on_device(made):
        start(
            kernels._coded_kv_cache_alignment_align_rows_kernel,
            (batch * kv_heads, count // group),
            *(*keys, *_steps(keys[0]), *values, *_steps(values[0]), maps, heads, made),
            (kv_heads, count),
            DEPTH=depth,
            GROUP=group,
            UPCAST=not made.is_cuda,
            num_warps=8,
        )
    return (made[0], made[2]), (made[1], made[3])


def sum_rows(rows: Sequence[Tensor], counted: Tensor) -> Tensor:
    """Return the sums of two layers' keys and values over the tokens for which `counted` is true.

    `rows` contains the keys and values of the lower layer, then those of the upper layer, or only
    the two layers' values. Each tensor is (B, H, N, D), and `counted` is (B, N). The result is (B,
    H, 4, D), or (B, H, 2, D) for only values.
    """
    from . import alignment_kernels as kernels

    batch, heads, count, depth = rows[0].shape
    parts, share = _shares(count, batch * heads, counted)
    sums = torch.empty(
        (parts, batch, heads, len(rows), depth), dtype=torch.float32, device=counted.device
    )
    four = (*rows, *rows)[:4]
    with on_device(sums):
        start(
            kernels._coded_kv_cache_alignment_sum_rows_kernel,
            (batch * heads, parts),
            *(*map(cells_of, four), counted.view(torch.uint8), sums, (heads, count, share)),
            DEPTH=depth,
            TILE=_TILE,
            KINDS=len(rows),
            num_warps=4,
        )
    return sums.sum(0)


def multiply_rows(rows: Sequence[Tensor], counted: Tensor, maps: Maps) -> Tensor:
    """Return sums of outer products of two cache layers' keys or values, over the tokens that
    `counted` selects.

    A row is the key, or the value, of one token and head. Each product, (D, D), multiplies an upper
    layer's row by the same token's row in the lower layer's matching head. `maps.slots` contains
    the matching head of each head of the upper layer. From each row, the function first subtracts
    the mean of the same layer's and head's rows, which `maps` contains.

    `rows` contains the keys and values of the lower layer, then those of the upper layer, or only
    the two layers' values. Each tensor is (B, H, N, D), and `counted` is bool (B, N). The result is
    (B, H, 2, D, D), or (B, H, 1, D, D) for only values.
    """
    from . import alignment_kernels as kernels

    batch, heads, count, depth = rows[0].shape
    columns = min(depth, 64)
    parts, share = _shares(count, batch * heads * (depth // columns), counted)
    kinds = len(rows) // 2
    found = torch.empty(
        (kinds, parts, batch, heads, depth, depth), dtype=torch.float32, device=counted.device
    )
    with on_device(found):
        for place in range(kinds):
            start(
                kernels._coded_kv_cache_alignment_multiply_rows_kernel,
                (batch * heads, depth // columns, parts),
                *(cells_of(rows[place]), cells_of(rows[place + kinds]), counted.view(torch.uint8)),
                *(maps.slots, maps.lower_means[:, :, place], maps.upper_means[:, :, place]),
                *(found[place], (heads, count, share)),
                KINDS=kinds,
                DEPTH=depth,
                COLUMNS=columns,
                TILE=_TILE,
                UPCAST=not found.is_cuda,
                num_warps=8 if depth > 64 else 4,
            )
    return found.sum(1).permute(1, 2, 0, 3, 4)


SUMS = Sums(sum_rows, multiply_rows)
"""The sums that maps are fitted from, by kernels."""

_TILE = 64
"""Tokens that a program of the fit reads at once."""


def _shares(count: int, programs: int, like: Tensor) -> tuple[int, int]:
    """Return the number of programs among which the tokens of one head are divided, and the number
    of tokens that each program processes."""
    wanted = max(1, 4 * processors(like.device) // programs)
    share = -(-max(1, count) // wanted)
    share = max(_LEAST, -(-share // _TILE) * _TILE)
    return -(-max(1, count) // share), share


_LEAST = 256
"""Tokens of a program of the fit, at least; a partial sum is as large as 128 rows of keys."""


def measure_prompt(
    # of the lower layer and of the upper, (B, H, n, D) of the same strides
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],  # likewise
    group: int,  # tokens per program
) -> Tensor:
    """Return the larger of two distances, (B, H, n): of two layers' keys, and of their values.

    The distance of a token's two keys, or of its two values, is their angle divided by pi.
    """
    from . import append_pairs_kernels as kernels

    batch, heads, count, depth = keys[0].shape
    apart = torch.empty((batch, heads, count), dtype=torch.float32, device=keys[0].device)
    with on_device(apart):
        start(
            kernels._coded_kv_cache_append_pairs_measure_kernel,
            (batch * heads, count // group),
            *(*keys, *_steps(keys[0]), *values, *_steps(values[0]), apart, heads, count),
            DEPTH=depth,
            GROUP=group,
            num_warps=8,
        )
    return apart


def code_prompt(
    pair: Pair,
    # keys, or values, of the lower layer and of the upper, of the same strides
    rows: tuple[Tensor, Tensor],
    is_kept: Tensor,  # bool (B, H, n)
    group: int,  # tokens per group
    bits: int,  # of a code, or PLAIN
    settings: Merging,  # how rows are merged
    place: int,  # 0 for keys, 1 for values
    at: int = 0,  # position of the first row in the cache
    heads: Tensor | None = None,  # the upper layer's head of each slot, if layers are aligned
) -> None:
    """Store a prompt's keys, or its values, in the merged form that two layers share.

    For each token and head, the two layers' vectors become one direction (a unit vector) and two
    lengths, one per layer. The function stores the direction, as codes or plain numbers, and the
    lengths. Tokens for which `is_kept` is true stay unmerged. A key's length of -1 marks them.
    """
    from . import append_pairs_kernels as kernels

    shared, lower, upper, _ = pair
    batch, kv_heads, count, depth = rows[0].shape
    with on_device(is_kept):
        start(
            kernels._coded_kv_cache_append_pairs_code_kernel,
            (batch * kv_heads, count // group),
            *(*rows, *_steps(rows[0]), shared[place], shared[2 + place], is_kept.view(torch.uint8)),
            *(shared.starts, lower.norms, upper.norms, heads),
            (kv_heads, shared.k_codes.shape[2], count, at // group),
            float(settings.t),
            **_constants(depth, group, bits, settings),
            IS_VALUE=place == 1,
            IS_ALIGNED=heads is not None,
        )


def _alike(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return two layers' keys, or values, as tensors with equal strides.

    In the returned tensors, a row (the D numbers of one token and head) is contiguous. The stride
    between tokens is a multiple of D. If the given tensors do not meet these conditions, the
    function copies them.
    """
    _, _, step, unit = lower.stride()
    is_fine = unit == 1 and step % lower.shape[3] == 0 and lower.stride() == upper.stride()
    return (lower, upper) if is_fine else (lower.contiguous(), upper.contiguous())


def _steps(x: Tensor) -> tuple[int, int, int]:
    """Return three strides of a tensor: between sequences, between heads and between tokens.

    The first two strides are numbers of elements. The third stride is a number of rows, of D
    elements each.
    """
    return x.stride(0), x.stride(1), x.stride(2) // x.shape[3]
