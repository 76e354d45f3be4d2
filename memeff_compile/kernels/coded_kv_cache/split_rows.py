"""The attention implementation `rows`, for two layers that share the directions (unit vectors) of
their keys and values. Their caches store these directions as plain numbers, not as codes. This
implementation needs a CUDA GPU of sm_80 or later.

The implementation `codes` (module `split_codes`) is for caches with codes. For both
implementations, the CPU never waits for the GPU, the launch grid depends only on static sizes, and
kernels use no atomic operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .._triton.launch import start
from ..device import on_device, processors
from .layout import Pool
from .shapes import MIN_ROWS, rows_for, splits_for
from .split_codes import combine, mask_argument, paired_norms, room_for, turned


@dataclass(frozen=True)
class Plan:
    """The launch parameters of the kernels in `split_rows_kernels`."""

    tile: int  # tokens per step
    warps: int  # warps per program
    stages: int  # turns in flight
    programs: int  # programs per multiprocessor that are aimed at


def plan_for(repeat: int) -> Plan:
    """Return the launch parameters for `repeat` query heads per key-value head.

    The returned parameters were the fastest on an H200 with 16 sequences of 32,768 tokens. In that
    measurement, larger tiles and more pipeline stages were at least 0.3 % slower.
    """
    return Plan(64, 4 if rows_for(repeat) == MIN_ROWS else 2, 2, 3)


def attend(
    q: Tensor,  # (B, Hq, 1, D), any strides
    pool: Sequence[Tensor],  # the tensors of a cache without codes
    norms: Sequence[Tensor | None],  # of keys and of values, (B, H, N)
    mask: Tensor | None,  # bool (B or 1, 1, 1, N), or None
    scale: float,  # factor of the scores
    bits: int,  # PLAIN
    maps: Sequence[Tensor | None] = (None, None, None),  # as of `reference.view`
    *,
    # programs per sequence and key-value head, by default from static sizes
    splits: int | None = None,
    plan: Plan | None = None,  # the launch, by default the result of `plan_for`
) -> Tensor:
    """Return attention of one query per sequence over a KV cache without low-bit codes.

    The cache stores the keys and values as plain numbers. The op `memeff::coded_kv_cache_attention`
    calls this function, and has already checked the shapes.
    """
    from . import split_rows_kernels

    rows = Pool(*pool)._replace(k_scales=None, v_scales=None)
    paired = paired_norms(norms)
    if paired is None:
        tokens = rows.k_codes.shape[2] * rows.k_codes.shape[3] // q.shape[3]
        paired = q.new_ones((*rows.k_codes.shape[:2], tokens, 2))
    batch, kv_heads, row_count, _ = paired.shape
    window, depth = rows.k_window.shape[2:]
    heads = q.shape[1]
    repeat, pairs = heads // kv_heads, batch * kv_heads
    plan = plan or plan_for(repeat)
    if splits is None:
        tiles = -(-row_count // plan.tile)
        splits = splits_for(pairs, tiles, processors(q.device) * plan.programs)
    means, turns, slots = maps
    exact = 0 if turns is None else splits
    shares = splits + exact
    out, share, stat = room_for(q, shares)
    mask_count = 0 if mask is None else mask.shape[3]
    with on_device(q):
        read = means, None if turns is None else turned(q, turns), slots
        start(
            split_rows_kernels._coded_kv_cache_split_rows_attention_kernel,
            (pairs, splits),
            *((q, q.stride(0), q.stride(1), q.stride(3)), rows, paired, read),
            *(mask_argument(mask, rows.counts), out, share, stat, scale * math.log2(math.e)),
            (kv_heads, row_count, mask_count, splits, batch * heads * shares),
            REPEAT=repeat,
            DEPTH=depth,
            ROWS=rows_for(repeat),
            TILE=plan.tile,
            WINDOW=window,
            KEPT=rows.k_kept.shape[2],
            HAS_MASK=mask is not None,
            IS_ALONE=shares == 1,
            IS_ALIGNED=means is not None,
            IS_TURNED=turns is not None,
            STAGES=plan.stages,
            UPCAST=not q.is_cuda,
            num_warps=plan.warps,
        )
        combine(out, share, stat, shares, maps, exact)
    return out.transpose(1, 2)
