"""The implementation `split` of attention over a cache: the keys are divided among several
programs. This implementation needs a CUDA GPU of sm_80 or later.

The CPU never waits for the GPU or reads a value from it, and the launch grid depends only on static
sizes. So a CUDA graph can capture the calls and replay them while the cache fills up. The kernels
use no atomic operations, so the same inputs give the same bits.

The lower bound of a launch's time is the time to read the filled keys and values once. The keys and
values are `2 * B * Hkv * filled * D` elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._triton.key_tiles import Cells, cells_of, depth_block
from .._triton.launch import start
from ..device import gpu, on_device, processors
from .shapes import Shapes, programs_per_processor, rows_for, shapes_for, splits_for

_splits = lru_cache(maxsize=1024)(splits_for)


@dataclass(frozen=True)
class Plan:
    """The parameters of a kernel launch: grid, tile, warps and stages."""

    shapes: Shapes  # tile, warps and stages of the attention kernel
    rows: int  # query rows per tile
    row_tiles: int  # tiles of query rows per key-value head
    splits: int  # programs per tile of rows


def plan_for(sizes: tuple[int, ...], kv_heads: int, itemsize: int, device: torch.device) -> Plan:
    """Return the launch parameters of attention over a KV cache.

    `sizes` contains five numbers: sequences, query heads, queries per sequence, positions of the
    cache, and the head dimension. The launch parameters do not depend on how many positions are
    filled. Without a GPU, this function returns the parameters for an H200.
    """
    batch, heads, queries, keys, depth = sizes
    count = queries * (heads // kv_heads)
    rows = rows_for(count, itemsize)
    row_tiles = -(-count // rows)
    kind = gpu(device)
    shapes = shapes_for(depth, itemsize, rows, kind)
    slots = processors(device) * programs_per_processor(shapes, depth, itemsize, kind)
    groups = batch * kv_heads * row_tiles
    return Plan(shapes, rows, row_tiles, _splits(groups, keys, shapes.keys, slots))


def alignment(*strides: int) -> int:
    """Return the number by which the strides between keys are divided before they are passed to a
    kernel.

    The kernel multiplies the strides by this number again. The returned number is 1 if all strides
    are multiples of 16, because Triton detects such strides by itself.
    """
    common = math.gcd(16, *strides)
    return 1 if common == 16 else common  # 100: 4, 128: 1


def _in_units(cache: Tensor, align: int) -> Cells:
    """Return a cache tensor and its strides as kernel arguments.

    The keys' stride is divided by `align`, and the kernel multiplies it by the constant `align`. So
    Triton knows that the stride is a multiple of `align`. By itself, Triton detects only multiples
    of 16, and would read rows of 100 elements element by element.
    """
    batch, head, key, depth = cache.stride()
    return Cells(cache, batch, head, key // align, depth)


def attend(
    q: Tensor,  # (B, H, M, D)
    k_cache: Tensor,  # (B, Hkv, N, D), any strides
    v_cache: Tensor,  # likewise
    last: Tensor,  # (B or 1, M or 1) int32 or int64
    mask: Tensor | None,  # bool (B or 1, 1, M or 1, N), or None
    scale: float,  # factor of the scores
    *,
    plan: Plan | None = None,  # the launch, by default the result of `plan_for`
) -> Tensor:
    """Return attention over the cached keys up to each query's position in `last`.

    The op `memeff::kv_cache_attention` calls this function, and has already checked the shapes.
    The result's memory has the order (B, M, H, D).
    """
    from . import split_keys_kernels as kernels

    batch, heads, queries, depth = q.shape
    kv_heads, keys = k_cache.shape[1], k_cache.shape[2]
    repeat = heads // kv_heads
    rows = queries * repeat
    groups = batch * kv_heads
    if plan is None:
        plan = plan_for((batch, heads, queries, keys, depth), kv_heads, q.element_size(), q.device)
    shapes, splits = plan.shapes, plan.splits
    out = q.new_empty((batch, queries, heads, depth))
    stat_count = groups * rows * splits
    share = stat = out
    if splits > 1:
        share = q.new_empty((stat_count, depth), dtype=torch.float32)
        stat = q.new_empty((2, stat_count), dtype=torch.float32)
    last = last.expand(batch, queries)
    seen = last if mask is None else mask.squeeze(1).view(torch.uint8).expand(batch, queries, keys)
    block = depth_block(depth)
    align = alignment(k_cache.stride(2), v_cache.stride(2))
    last_keys = (last, *last.stride())
    sizes = (kv_heads, queries, keys, splits, stat_count)
    with on_device(q):
        start(
            kernels._kv_cache_split_keys_attention_kernel,
            (groups, splits, plan.row_tiles),
            *(cells_of(q), _in_units(k_cache, align), _in_units(v_cache, align), last_keys),
            *((seen, *(seen.stride() if mask is not None else (0, 0, 0))), (out, share, stat)),
            *(scale * math.log2(math.e), sizes),
            REPEAT=repeat,
            DEPTH=depth,
            DEPTH_BLOCK=block,
            ROWS=plan.rows,
            KEYS=shapes.keys,
            IS_ALONE=splits == 1,
            HAS_MASK=mask is not None,
            STAGES=shapes.stages,
            ALIGN=align,
            UPCAST=not q.is_cuda,
            num_warps=shapes.warps,
        )
        if splits > 1:
            start(
                kernels._kv_cache_split_keys_combine_kernel,
                (rows * groups,),
                *(share, stat, out, last_keys, sizes),
                REPEAT=repeat,
                DEPTH=depth,
                DEPTH_BLOCK=block,
                KEYS=shapes.keys,
                SPLIT_BLOCK=1 << (splits - 1).bit_length(),
                num_warps=4,
            )
    return out.transpose(1, 2)
