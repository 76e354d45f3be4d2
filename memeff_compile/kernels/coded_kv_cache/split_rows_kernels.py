# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Kernels of the implementation `rows`: attention over directions (vectors of length one) that two
layers share, each direction with one length per layer.

The cache's tokens are divided into tiles (blocks). Program i of n processes tiles i, i + n and so
on. The first tiles contain shared directions, the next ones the latest tokens. The last tiles
contain earlier tokens without a shared direction (unmerged tokens), for which each layer stores its
own key and value. One softmax covers all these tokens. The kernel multiplies the score of a key's
direction by the key's length (norm). It multiplies the softmax weight of a value's direction by the
value's length. Scores have tokens as rows and query heads as columns, as in `split_codes_kernels`,
whose second kernel combines the partial results.
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
    at,  # rows of the tile, which of them are loaded, and which are visible
    norms,  # (TILE,) fp32
    q,  # (D, ROWS)
    scale,
    of_mean,  # (ROWS,) what every score is larger by, or None
    sums,
    C: tl.constexpr,
):
    """Add the contribution of a tile of tokens to the partial result."""
    k_base, v_base = bases
    place, is_there, is_seen = at
    k_norm, v_norm = norms
    largest, total, acc = sums
    depth = tl.arange(0, C.DEPTH)
    offs = place.to(tl.int64) * C.DEPTH
    k = tl.load(k_base + offs[:, None] + depth[None, :], mask=is_there[:, None], other=0.0)
    score = tl.zeros((k.shape[0], q.shape[1]), dtype=tl.float32)
    score = dot(k, q, score, C.UPCAST) * (scale * k_norm)[:, None]
    if of_mean is not None:
        score += of_mean[None, :]
    score = tl.where(is_seen[:, None], score, float("-inf"))
    weight, shrink, higher = step(score, largest, 0)
    total = total * shrink + tl.sum(weight, axis=0)
    weight = (weight * v_norm[:, None]).to(q.dtype)
    v = tl.load(v_base + offs[None, :] + depth[:, None], mask=is_there[None, :], other=0.0)
    return higher, total, dot(v, weight, acc * shrink[None, :], C.UPCAST)


@triton.jit
def _coded_kv_cache_split_rows_attention_kernel(
    q,  # (B, KV_HEADS * REPEAT, 1, D), and strides of its first, second and last axis
    pool,  # `layout.Pool`, without scales; codes are rows
    norms_ptr,  # (B, KV_HEADS, row_count, 2); keys with a negative one are among the kept rows
    maps,  # as `_coded_kv_cache_split_codes_attention_kernel` takes them
    mask,  # (B, mask_count) bytes and its strides, with HAS_MASK
    out_ptr,  # (B, KV_HEADS * REPEAT, D), with IS_ALONE
    share_ptr,  # (B, KV_HEADS, REPEAT, shares, D) fp32, otherwise
    stat_ptr,  # (2, B, KV_HEADS, REPEAT, shares) fp32
    scale,  # of the scores, in base 2
    sizes,  # stat_count: B * KV_HEADS * REPEAT * shares
    C: tl.constexpr,
):
    q_ptr, stride_q_batch, stride_q_head, stride_q_depth = q
    means_ptr, turned_ptr, slots_ptr = maps
    kv_heads, row_count, mask_count, splits, stat_count = sizes
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    shared = pair  # of the tensors that two layers share
    if C.IS_TURNED:
        shared = batch * kv_heads + tl.load(slots_ptr + pair)
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
    query = q
    of_mean = None
    if C.IS_TURNED:
        turned_offs = (pair * C.REPEAT + rows[None, :]) * C.DEPTH + depth[:, None]
        query = tl.load(turned_ptr + turned_offs, mask=is_row[None, :], other=0.0).to(q.dtype)
    if C.IS_ALIGNED:
        k_mean = tl.load(means_ptr + pair * (2 * C.DEPTH) + depth).to(tl.float32)
        of_mean = tl.sum(q.to(tl.float32) * k_mean[:, None], axis=0) * scale
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
        shared_base = shared * row_count * C.DEPTH
        bases = (pool.k_codes + shared_base, pool.v_codes + shared_base)
        at = (position, is_there, is_seen)
        sums = _attend(bases, at, (k_norm, v_norm), query, scale, of_mean, sums, C)
    row_of = pair * C.REPEAT + rows
    share_of = split + rows * 0
    shares = splits
    if C.IS_ALIGNED and not C.IS_TURNED:
        largest, total, acc = sums
        v_mean = tl.load(means_ptr + pair * (2 * C.DEPTH) + C.DEPTH + depth).to(tl.float32)
        sums = (largest, total, acc + total[None, :] * v_mean[:, None])
    if C.IS_TURNED:
        shares += splits
        _store_share(sums, share_ptr, stat_ptr, row_of * shares + share_of, is_row, stat_count, C)
        share_of += splits
        largest = tl.full((C.ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((C.ROWS,), dtype=tl.float32)
        sums = (largest, total, tl.zeros((C.DEPTH, C.ROWS), dtype=tl.float32))
    TILES: tl.constexpr = (C.WINDOW + C.TILE - 1) // C.TILE
    for tile in tl.range(split, TILES, splits, num_stages=1):
        slot = tile * C.TILE + token
        position = coded + (slot + C.WINDOW - coded % C.WINDOW) % C.WINDOW
        is_seen = (position < length) & (slot < C.WINDOW)
        if C.HAS_MASK:
            is_seen = _seen(mask, batch, position, is_seen, mask_count)
        window = pair * (C.WINDOW * C.DEPTH)
        windows = (pool.k_window + window, pool.v_window + window)
        sums = _attend(windows, (slot, is_seen, is_seen), (one, one), q, scale, None, sums, C)
    if C.KEPT > 0:
        turn = (split + splits - TILES % splits) % splits
        for tile in tl.range(turn, (C.KEPT + C.TILE - 1) // C.TILE, splits, num_stages=1):
            row = tile * C.TILE + token
            position = tl.load(pool.places + shared * C.KEPT + row, mask=row < C.KEPT, other=-1)
            is_seen = (position >= 0) & (position < coded)
            if C.HAS_MASK:
                is_seen = _seen(mask, batch, position, is_seen, mask_count)
            kept = pair * (C.KEPT * C.DEPTH)
            both = (pool.k_kept + kept, pool.v_kept + kept)
            sums = _attend(both, (row, is_seen, is_seen), (one, one), q, scale, None, sums, C)
    largest, total, acc = sums
    if C.IS_ALONE:
        tl.store(
            out_ptr + row_of[None, :] * C.DEPTH + depth[:, None],
            (acc / tl.where(total == 0.0, 1.0, total)[None, :]).to(out_ptr.dtype.element_ty),
            mask=is_row[None, :],
        )
    else:
        _store_share(sums, share_ptr, stat_ptr, row_of * shares + share_of, is_row, stat_count, C)


@triton.jit
def _store_share(sums, share_ptr, stat_ptr, place, is_row, stat_count, C: tl.constexpr):
    """Store a program's weighted sums, its largest score and its sum of softmax weights."""
    largest, total, acc = sums
    tl.store(
        share_ptr + place[None, :] * C.DEPTH + tl.arange(0, C.DEPTH)[:, None],
        acc,
        mask=(is_row & (largest != float("-inf")))[None, :],
    )
    tl.store(stat_ptr + place, largest, mask=is_row)
    tl.store(stat_ptr + stat_count + place, total, mask=is_row)
