# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two kernels of the implementation `split`. Each program of the first kernel attends to a
share of the keys. The second kernel combines the partial results.

Each row of a program's tile of queries belongs to one pair (query, query head). The rows of the
tile share one key-value head. So the program loads each key and value of its share once for all
rows. Program i of n processes the key tiles i, i + n, i + 2n and so on. The program skips the tiles
after the last key that any of its rows may attend to. So of the n programs for the same rows, each
processes at most one tile more than another, however full the cache is. Programs without tiles end
immediately. The second kernel sums the partial results in a fixed order.

With UPCAST, operands are widened to fp32, because Triton's interpreter cannot multiply bf16.

In variable names, rows are (query, head) pairs of one key-value head, and keys are positions of the
cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import dot
from .._triton.split_softmax_kernels import of_shares, step


@triton.jit
def _last_key_of_rows(given, batch, query, is_row, keys):
    """Return the last cache position that the query of each row may attend to, or -1 if there is
    none.

    A row of a tile is a pair of a query and a query head.
    """
    last_ptr, stride_last_batch, stride_last_query = given
    last = tl.load(
        last_ptr + batch * stride_last_batch + query * stride_last_query, mask=is_row, other=-1
    )
    return tl.minimum(last, keys - 1).to(tl.int32)


@triton.jit
def _kv_cache_split_keys_attention_kernel(
    q_cells,  # (B, H, M, D), as the others `key_tiles.Cells`
    k_cells,  # (B, KV_HEADS, N, D); the stride of keys is over ALIGN
    v_cells,
    last_keys,  # (B, M) int32 or int64 and its strides: the last key each query sees
    mask,  # (B, M, N) bytes and its strides, with HAS_MASK
    outs,  # (B, M, H, D), with IS_ALONE
    # share_ptr: (B, KV_HEADS, rows, splits, D) fp32, otherwise
    # stat_ptr: (2, B, KV_HEADS, rows, splits) fp32: largest score in base 2, sum of weights
    scale,  # of the scores, in base 2
    sizes,  # stat_count: B * KV_HEADS * rows * splits
    C: tl.constexpr,
    # REPEAT: query heads per key-value head
    # IS_ALONE: one split
    # ALIGN: elements that divide the strides of keys, so that loads are wide
):
    mask_ptr, stride_mask_batch, stride_mask_query, stride_mask_key = mask
    out_ptr, share_ptr, stat_ptr = outs
    kv_heads, queries, keys, splits, stat_count = sizes
    stride_k_key = k_cells.row * C.ALIGN
    stride_v_key = v_cells.row * C.ALIGN
    group = tl.program_id(0)
    split = tl.program_id(1)
    batch = (group // kv_heads).to(tl.int64)
    kv_head = (group % kv_heads).to(tl.int64)
    rows = tl.program_id(2) * C.ROWS + tl.arange(0, C.ROWS)
    query = rows // C.REPEAT
    head = kv_head * C.REPEAT + rows % C.REPEAT
    is_row = query < queries
    depth = tl.arange(0, C.DEPTH_BLOCK)
    last = _last_key_of_rows(last_keys, batch, query, is_row, keys)
    end = tl.max(last, axis=0) + 1
    tiles = tl.cdiv(end, C.KEYS)
    if (split < tiles) | C.IS_ALONE:
        q_offs = head[:, None] * q_cells.head + query[:, None].to(tl.int64) * q_cells.row
        q_mask = is_row[:, None]
        if C.DEPTH != C.DEPTH_BLOCK:
            q_mask = q_mask & (depth < C.DEPTH)[None, :]
        q = tl.load(
            q_cells.ptr + batch * q_cells.batch + q_offs + depth[None, :] * q_cells.depth,
            mask=q_mask,
            other=0.0,
        )
        wide_zero = batch * 0  # makes addresses 64-bit numbers
        offs = tl.arange(0, C.KEYS)
        k_base = k_cells.ptr + batch * k_cells.batch + kv_head * k_cells.head
        v_base = v_cells.ptr + batch * v_cells.batch + kv_head * v_cells.head
        k_offs = offs[:, None] * stride_k_key + depth[None, :] * k_cells.depth
        v_offs = offs[:, None] * stride_v_key + depth[None, :] * v_cells.depth
        largest = tl.full((C.ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((C.ROWS,), dtype=tl.float32)
        acc = tl.zeros((C.ROWS, C.DEPTH_BLOCK), dtype=tl.float32)
        for tile in tl.range(split, tiles, splits, num_stages=C.STAGES):
            start = wide_zero + tile * C.KEYS
            position = tile * C.KEYS + offs
            is_key = (position < end)[:, None]
            if C.DEPTH != C.DEPTH_BLOCK:
                is_key = is_key & (depth < C.DEPTH)[None, :]
            k = tl.load(k_base + start * stride_k_key + k_offs, mask=is_key, other=0.0)
            v = tl.load(v_base + start * stride_v_key + v_offs, mask=is_key, other=0.0)
            score = tl.zeros((C.ROWS, C.KEYS), dtype=tl.float32)
            score = dot(q, tl.trans(k), score, C.UPCAST) * scale
            is_seen = position[None, :] <= last[:, None]
            if C.HAS_MASK:
                seen = tl.load(
                    mask_ptr
                    + batch * stride_mask_batch
                    + start * stride_mask_key
                    + query[:, None].to(tl.int64) * stride_mask_query
                    + offs[None, :] * stride_mask_key,
                    mask=is_seen,
                    other=0,
                )
                is_seen = is_seen & (seen != 0)
            score = tl.where(is_seen, score, float("-inf"))
            weight, shrink, largest = step(score, largest, 1)
            total = total * shrink + tl.sum(weight, axis=1)
            acc = acc * shrink[:, None]
            acc = dot(weight.to(v.dtype), v, acc, C.UPCAST)
        row_offs = head[:, None] * C.DEPTH + query[:, None].to(tl.int64) * (
            kv_heads * C.REPEAT * C.DEPTH
        )
        if C.IS_ALONE:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            offset = batch * queries * kv_heads * C.REPEAT * C.DEPTH
            tl.store(
                out_ptr + offset + row_offs + depth[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=q_mask,
            )
        else:
            place = (group.to(tl.int64) * queries * C.REPEAT + rows) * splits + split
            tl.store(share_ptr + place[:, None] * C.DEPTH + depth[None, :], acc, mask=q_mask)
            tl.store(stat_ptr + place, largest, mask=is_row)
            tl.store(stat_ptr + stat_count + place, total, mask=is_row)


@triton.jit
def _kv_cache_split_keys_combine_kernel(
    share_ptr,  # (B, KV_HEADS, rows, splits, D) fp32
    stat_ptr,  # (2, B, KV_HEADS, rows, splits) fp32
    out_ptr,  # (B, M, H, D)
    last_keys,  # as of _kv_cache_split_keys_attention_kernel
    sizes,  # the same
    C: tl.constexpr,
):
    kv_heads, queries, keys, splits, stat_count = sizes
    row = tl.program_id(0) % (queries * C.REPEAT)
    group = tl.program_id(0) // (queries * C.REPEAT)
    batch = (group // kv_heads).to(tl.int64)
    kv_head = group % kv_heads
    query = row // C.REPEAT
    last = _last_key_of_rows(last_keys, batch, query, query < queries, keys)
    tiles = tl.cdiv(last + 1, C.KEYS)
    split = tl.arange(0, C.SPLIT_BLOCK)
    is_split = split < tl.minimum(tiles, splits)  # the other shares were never written
    depth = tl.arange(0, C.DEPTH_BLOCK)
    place = (group.to(tl.int64) * queries * C.REPEAT + row) * splits + split
    largest = tl.load(stat_ptr + place, mask=is_split, other=float("-inf"))
    total = tl.load(stat_ptr + stat_count + place, mask=is_split, other=0.0)
    is_value = is_split[:, None]
    if C.DEPTH != C.DEPTH_BLOCK:
        is_value = is_value & (depth < C.DEPTH)[None, :]
    share = tl.load(share_ptr + place[:, None] * C.DEPTH + depth[None, :], mask=is_value, other=0.0)
    result = of_shares(largest, total, share)
    head = kv_head * C.REPEAT + row % C.REPEAT
    out_row = (batch * queries + query) * (kv_heads * C.REPEAT) + head
    tl.store(
        out_ptr + out_row * C.DEPTH + depth,
        result.to(out_ptr.dtype.element_ty),
        mask=depth < C.DEPTH,
    )
