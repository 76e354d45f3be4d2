# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Kernels of the engine `rows`: attention over plain directions, each with a length.

Program i of n takes tiles i, i + n ... of the directions, then of the window and of the kept rows,
in one softmax. A key's length multiplies its score; a value's length multiplies its weight. Scores
have tokens as rows and query heads as columns, as in `split_codes_kernels`, whose second pass sums
the shares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import dot
from .._triton.split_softmax_kernels import step
from .split_codes_kernels import _pair_of, _seen


@triton.jit
def _attend(
    bases,
    at,  # rows of the tile, which of them are loaded, and which count
    norms,  # (TILE,) fp32
    q,  # (D, ROWS)
    scale,
    sums,
    C: tl.constexpr,
):
    """Add a tile of tokens."""
    k_base, v_base = bases
    place, is_there, is_seen = at
    k_norm, v_norm = norms
    largest, total, acc = sums
    depth = tl.arange(0, C.DEPTH)
    offs = place.to(tl.int64) * C.DEPTH
    k = tl.load(k_base + offs[:, None] + depth[None, :], mask=is_there[:, None], other=0.0)
    score = tl.zeros((k.shape[0], q.shape[1]), dtype=tl.float32)
    score = dot(k, q, score, C.UPCAST) * (scale * k_norm)[:, None]
    score = tl.where(is_seen[:, None], score, float("-inf"))
    weight, shrink, higher = step(score, largest, 0)
    total = total * shrink + tl.sum(weight, axis=0)
    weight = (weight * v_norm[:, None]).to(q.dtype)
    v = tl.load(v_base + offs[None, :] + depth[:, None], mask=is_there[None, :], other=0.0)
    return higher, total, dot(v, weight, acc * shrink[None, :], C.UPCAST)


@triton.jit
def _coded_kv_cache_rows_kernel(
    q,  # (B, KV_HEADS * REPEAT, 1, D), and strides of its first, second and last axis
    pool,  # `layout.Pool`, without scales; codes are rows
    norms_ptr,  # (B, KV_HEADS, row_count, 2); keys with a negative one are among the kept rows
    mask,  # (B, mask_count) bytes and its strides, with HAS_MASK
    out_ptr,  # (B, KV_HEADS * REPEAT, D), with IS_ALONE
    share_ptr,  # (B, KV_HEADS, REPEAT, splits, D) fp32, otherwise
    stat_ptr,  # (2, B, KV_HEADS, REPEAT, splits) fp32
    scale,  # of the scores, in base 2
    sizes,  # stat_count: B * KV_HEADS * REPEAT * splits
    C: tl.constexpr,
):
    q_ptr, stride_q_batch, stride_q_head, stride_q_depth = q
    kv_heads, row_count, mask_count, splits, stat_count = sizes
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    length = tl.load(pool.counts)
    coded = tl.load(pool.counts + 1)
    rows = tl.arange(0, C.ROWS)
    depth = tl.arange(0, C.DEPTH)
    token = tl.arange(0, C.TILE)
    is_row = rows < C.REPEAT
    q_offs = (kv_head * C.REPEAT + rows) * stride_q_head + batch * stride_q_batch
    q = tl.load(
        q_ptr + q_offs[None, :] + depth[:, None] * stride_q_depth, mask=is_row[None, :], other=0.0
    )
    largest = tl.full((C.ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((C.ROWS,), dtype=tl.float32)
    sums = (largest, total, tl.zeros((C.DEPTH, C.ROWS), dtype=tl.float32))
    one = tl.full((C.TILE,), 1.0, dtype=tl.float32)
    row_base = pair * row_count
    merged = tl.minimum(coded, row_count).to(tl.int32)
    for tile in tl.range(split, tl.cdiv(merged, C.TILE), splits, num_stages=C.STAGES):
        position = tile * C.TILE + token
        is_there = position < merged
        k_norm, v_norm = _pair_of(norms_ptr + row_base * 2, tl.minimum(position, merged - 1))
        # The lengths do not mask the loads: loads of keys and values would wait for the lengths.
        is_seen = is_there & (k_norm >= 0.0)
        if C.HAS_MASK:
            is_seen = _seen(mask, batch, position, is_seen, mask_count)
        bases = (pool.k_codes + row_base * C.DEPTH, pool.v_codes + row_base * C.DEPTH)
        at = (position, is_there, is_seen)
        sums = _attend(bases, at, (k_norm, v_norm), q, scale, sums, C)
    TILES: tl.constexpr = (C.WINDOW + C.TILE - 1) // C.TILE
    for tile in tl.range(split, TILES, splits, num_stages=1):
        slot = tile * C.TILE + token
        position = coded + (slot + C.WINDOW - coded % C.WINDOW) % C.WINDOW
        is_seen = (position < length) & (slot < C.WINDOW)
        if C.HAS_MASK:
            is_seen = _seen(mask, batch, position, is_seen, mask_count)
        window = pair * (C.WINDOW * C.DEPTH)
        windows = (pool.k_window + window, pool.v_window + window)
        sums = _attend(windows, (slot, is_seen, is_seen), (one, one), q, scale, sums, C)
    if C.KEPT > 0:
        turn = (split + splits - TILES % splits) % splits
        for tile in tl.range(turn, (C.KEPT + C.TILE - 1) // C.TILE, splits, num_stages=1):
            row = tile * C.TILE + token
            position = tl.load(pool.places + pair * C.KEPT + row, mask=row < C.KEPT, other=-1)
            is_seen = (position >= 0) & (position < coded)
            if C.HAS_MASK:
                is_seen = _seen(mask, batch, position, is_seen, mask_count)
            kept = pair * (C.KEPT * C.DEPTH)
            both = (pool.k_kept + kept, pool.v_kept + kept)
            sums = _attend(both, (row, is_seen, is_seen), (one, one), q, scale, sums, C)
    largest, total, acc = sums
    row_of = pair * C.REPEAT + rows
    if C.IS_ALONE:
        tl.store(
            out_ptr + row_of[None, :] * C.DEPTH + depth[:, None],
            (acc / tl.where(total == 0.0, 1.0, total)[None, :]).to(out_ptr.dtype.element_ty),
            mask=is_row[None, :],
        )
    else:
        tl.store(
            share_ptr + (row_of * splits + split)[None, :] * C.DEPTH + depth[:, None],
            acc,
            mask=(is_row & (largest != float("-inf")))[None, :],
        )
        tl.store(stat_ptr + row_of * splits + split, largest, mask=is_row)
        tl.store(stat_ptr + stat_count + row_of * splits + split, total, mask=is_row)
