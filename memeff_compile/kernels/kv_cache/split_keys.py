"""The engine `split`: the keys of a cache split over programs. CUDA, sm_80 or later.

Nothing waits for the GPU or reads a value on the host, and the grid follows from static sizes, so
calls can be captured in CUDA graphs and replayed while the cache fills up. There are no atomics:
the same inputs give the same bits.

The floor is the time to read the filled keys and values once: 2 * B * Hkv * filled * D elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memeff_compile.kernels._triton.device import capability, on_device, processors
from memeff_compile.kernels.kv_cache.shapes import (
    Shapes,
    depth_block,
    rows_for,
    shapes_for,
    splits_for,
)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    last: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    shapes: Shapes | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attend to the keys up to `last`; the shapes are as the op has checked them.

    Args:
        q: (B, H, M, D).
        k_cache, v_cache: (B, Hkv, N, D), any strides.
        last: (B or 1, M or 1) int32 or int64.
        mask: bool (B or 1, 1, M or 1, N), or None.
        scale: factor of the scores.
        shapes, splits: what `shapes_for` and `splits_for` would choose otherwise.

    Returns:
        (B, H, M, D) in the dtype of q, laid out as (B, M, H, D).
    """
    from memeff_compile.kernels.kv_cache import split_keys_kernels as kernels

    batch, heads, queries, depth = q.shape
    kv_heads, keys = k_cache.shape[1], k_cache.shape[2]
    repeat = heads // kv_heads
    rows = queries * repeat
    row_block = rows_for(rows, q.element_size())
    row_tiles = -(-rows // row_block)
    shapes = shapes or shapes_for(depth, q.element_size(), row_block, capability(q.device))
    groups = batch * kv_heads
    splits = splits or splits_for(groups * row_tiles, keys, shapes.keys, processors(q.device))
    out = q.new_empty((batch, queries, heads, depth))
    stat_count = groups * rows * splits
    share = stat = out
    if splits > 1:
        share = q.new_empty((stat_count, depth), dtype=torch.float32)
        stat = q.new_empty((2, stat_count), dtype=torch.float32)
    last = last.expand(batch, queries)
    seen = last if mask is None else mask.squeeze(1).view(torch.uint8).expand(batch, queries, keys)
    block = depth_block(depth)
    with on_device(q):
        kernels._kv_cache_attention_kernel[(splits, groups, row_tiles)](
            q,
            *q.stride(),
            k_cache,
            *k_cache.stride(),
            v_cache,
            *v_cache.stride(),
            last,
            *last.stride(),
            seen,
            *(seen.stride() if mask is not None else (0, 0, 0)),
            out,
            share,
            stat,
            scale * math.log2(math.e),
            kv_heads,
            queries,
            keys,
            stat_count,
            REPEAT=repeat,
            DEPTH=depth,
            DEPTH_BLOCK=block,
            ROWS=row_block,
            KEYS=shapes.keys,
            SPLITS=splits,
            HAS_MASK=mask is not None,
            STAGES=shapes.stages,
            UPCAST=not q.is_cuda,
            num_warps=shapes.warps,
        )
        if splits > 1:
            kernels._kv_cache_combine_kernel[(rows, groups)](
                share,
                stat,
                out,
                last,
                *last.stride(),
                kv_heads,
                queries,
                keys,
                stat_count,
                REPEAT=repeat,
                DEPTH=depth,
                DEPTH_BLOCK=block,
                KEYS=shapes.keys,
                SPLITS=splits,
                SPLIT_BLOCK=1 << (splits - 1).bit_length(),
                num_warps=4,
            )
    return out.transpose(1, 2)
