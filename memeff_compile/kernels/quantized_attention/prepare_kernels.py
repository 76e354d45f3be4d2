# ruff: noqa: ANN001, ANN202  (arguments of device code are pointers and scalars of Triton's own)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What turns q, k and v into codes: one kernel that looks at keys and values, one that writes.

The first reads all values and every SAMPLE-th key and leaves sums and extremes per chunk of keys;
the second adds the chunks up where it needs them, so nothing is accumulated across programs.

A number that is not finite makes its scale nan: int8 has no nan, and without that a code of it
would come out as an ordinary weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from memeff_compile.kernels.quantized_attention.tiles_kernels import _e4m3_in_fp32

LEAST = tl.constexpr(1.0e-16)  # of queries and keys that are all zeros: two scales multiply
LEAST_VALUE = tl.constexpr(1.0e-30)
HUGE = tl.constexpr(3.0e38)
LARGEST_E4M3 = tl.constexpr(448.0)
MAGIC = tl.constexpr(0x4B400000)
MAGIC_VALUE = tl.constexpr(12582912.0)


@triton.jit
def _load_tile(ptr, stride, place, is_place, depth, DEPTH: tl.constexpr, DEPTH_BLOCK: tl.constexpr):
    mask = is_place[:, None]
    if DEPTH != DEPTH_BLOCK:
        mask = mask & (depth < DEPTH)[None, :]
    ptrs = ptr + place.to(tl.int64)[:, None] * stride + depth[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _nearest(x):
    """Round to the nearest int8, ties to even; |x| is far below 2^22."""
    return ((x + MAGIC_VALUE).to(tl.int32, bitcast=True) - MAGIC).to(tl.int8)


@triton.jit
def _is_counted(place, keys, mask_ptr, HAS_KEY_MASK: tl.constexpr):
    found = place < keys
    if HAS_KEY_MASK:
        found = found & (tl.load(mask_ptr + place, mask=found, other=0) != 0)
    return found


@triton.jit
def _look_kernel(
    k_ptr,  # (B, G, N, D)
    stride_k_batch,
    stride_k_head,
    stride_k_key,
    v_ptr,  # (B, G, N, D)
    stride_v_batch,
    stride_v_head,
    stride_v_key,
    key_mask_ptr,  # (B or 1, N) bytes, with HAS_KEY_MASK
    stride_mask_batch,
    sums_ptr,  # (B * G, chunks, 5, D) fp32: keys, values, least value, largest, counts
    groups,
    keys,
    chunk,  # keys per chunk, a multiple of KEYS
    chunks,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SAMPLE: tl.constexpr,  # every how many keys are looked at for their mean; divides KEYS
    HAS_KEY_MASK: tl.constexpr,
):
    row = tl.program_id(0) // chunks
    part = tl.program_id(0) % chunks
    batch = (row // groups).to(tl.int64)
    group = (row % groups).to(tl.int64)
    k_ptr += batch * stride_k_batch + group * stride_k_head
    v_ptr += batch * stride_v_batch + group * stride_v_head
    mask_ptr = key_mask_ptr + batch * stride_mask_batch
    depth = tl.arange(0, DEPTH_BLOCK)
    k_sum = tl.zeros((DEPTH_BLOCK,), dtype=tl.float32)
    v_sum = tl.zeros((DEPTH_BLOCK,), dtype=tl.float32)
    low = tl.full((DEPTH_BLOCK,), HUGE, dtype=tl.float32)
    high = tl.full((DEPTH_BLOCK,), -HUGE, dtype=tl.float32)
    k_count = 0.0
    v_count = 0.0
    stop = tl.minimum(part * chunk + chunk, keys)
    for start in tl.range(part * chunk, stop, KEYS, num_stages=2):
        place = start + tl.arange(0, KEYS)
        is_place = _is_counted(place, keys, mask_ptr, HAS_KEY_MASK)
        v = _load_tile(v_ptr, stride_v_key, place, is_place, depth, DEPTH, DEPTH_BLOCK)
        v_sum += tl.sum(v, axis=0)
        low = tl.minimum(low, tl.min(tl.where(is_place[:, None], v, HUGE), axis=0))
        high = tl.maximum(high, tl.max(tl.where(is_place[:, None], v, -HUGE), axis=0))
        v_count += tl.sum(is_place.to(tl.float32), axis=0)
        sampled = start + tl.arange(0, KEYS // SAMPLE) * SAMPLE
        is_sampled = _is_counted(sampled, keys, mask_ptr, HAS_KEY_MASK)
        k = _load_tile(k_ptr, stride_k_key, sampled, is_sampled, depth, DEPTH, DEPTH_BLOCK)
        k_sum += tl.sum(k, axis=0)
        k_count += tl.sum(is_sampled.to(tl.float32), axis=0)
    found = sums_ptr + tl.program_id(0).to(tl.int64) * 5 * DEPTH_BLOCK + depth
    tl.store(found, k_sum)
    tl.store(found + DEPTH_BLOCK, v_sum)
    tl.store(found + 2 * DEPTH_BLOCK, low)
    tl.store(found + 3 * DEPTH_BLOCK, high)
    counts = tl.where(depth == 0, k_count, v_count)
    tl.store(found + 4 * DEPTH_BLOCK, counts)


@triton.jit
def _mean(
    sums_ptr, chunks, place, WHICH: tl.constexpr, CHUNKS: tl.constexpr, DEPTH_BLOCK: tl.constexpr
):
    """Add up the chunks of keys (WHICH 0) or values (1); return sum over count, 0 of nothing."""
    depth = tl.arange(0, DEPTH_BLOCK)
    part = tl.arange(0, CHUNKS)
    is_part = part < chunks
    ptrs = sums_ptr + place * chunks * 5 * DEPTH_BLOCK + part[:, None] * 5 * DEPTH_BLOCK
    found = tl.load(ptrs + WHICH * DEPTH_BLOCK + depth[None, :], mask=is_part[:, None], other=0.0)
    counts = sums_ptr + (place * chunks + part) * 5 * DEPTH_BLOCK + 4 * DEPTH_BLOCK + WHICH
    count = tl.sum(tl.load(counts, mask=is_part, other=0.0), axis=0)
    return tl.sum(found, axis=0) / tl.maximum(count, 1.0)


@triton.jit
def _extreme(
    sums_ptr, chunks, place, WHICH: tl.constexpr, CHUNKS: tl.constexpr, DEPTH_BLOCK: tl.constexpr
):
    depth = tl.arange(0, DEPTH_BLOCK)
    part = tl.arange(0, CHUNKS)
    ptrs = sums_ptr + (place * chunks + part)[:, None] * 5 * DEPTH_BLOCK
    fill = HUGE if WHICH == 2 else -HUGE
    found = tl.load(
        ptrs + WHICH * DEPTH_BLOCK + depth[None, :], mask=(part < chunks)[:, None], other=fill
    )
    return tl.min(found, axis=0) if WHICH == 2 else tl.max(found, axis=0)


@triton.jit
def _largest(size, total, least):
    """Return a size to divide by: not 0, and nan where `total` is not finite."""
    return tl.maximum(size, least, propagate_nan=tl.PropagateNan.ALL) + total * 0.0


@triton.jit
def _write_queries(
    q_ptr,
    stride,
    sums_ptr,
    codes_ptr,
    scale_ptr,
    mean_ptr,
    shift_ptr,
    scale,
    row,
    block,
    blocks,
    group,
    queries,
    chunks,
    LIMIT: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    depth = tl.arange(0, DEPTH_BLOCK)
    place = block * BLOCK + tl.arange(0, BLOCK)
    is_row = place < queries
    q = _load_tile(q_ptr, stride, place, is_row, depth, DEPTH, DEPTH_BLOCK) * scale
    if WITH_LSE:
        shift = tl.zeros((BLOCK,), dtype=tl.float32)
        if SMOOTH_K:
            k_mean = _mean(sums_ptr, chunks, group, 0, CHUNKS, DEPTH_BLOCK)
            shift = tl.sum(q * k_mean[None, :], axis=1)
        tl.store(shift_ptr + row * queries + place, shift, mask=is_row)
    if SMOOTH_Q:
        count = tl.minimum(queries - block * BLOCK, BLOCK)
        q_mean = tl.sum(q, axis=0) / count
        tl.store(mean_ptr + (row * blocks + block) * DEPTH_BLOCK + depth, q_mean)
        q = tl.where(is_row[:, None], q - q_mean[None, :], 0.0)
    q_scale = _largest(tl.max(tl.abs(q), axis=1), tl.sum(q, axis=1), LEAST) * (1.0 / LIMIT)
    tl.store(scale_ptr + row * queries + place, q_scale, mask=is_row)
    found = codes_ptr + (row * queries + place)[:, None] * DEPTH_BLOCK + depth[None, :]
    tl.store(found, _nearest(q * (1.0 / q_scale)[:, None]), mask=is_row[:, None])


@triton.jit
def _write_keys(
    k_ptr,
    stride,
    mask_ptr,
    sums_ptr,
    codes_ptr,
    scale_ptr,
    row,
    block,
    blocks,
    keys,
    chunks,
    LIMIT: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):
    depth = tl.arange(0, DEPTH_BLOCK)
    place = block * BLOCK + tl.arange(0, BLOCK)
    is_place = _is_counted(place, keys, mask_ptr, HAS_KEY_MASK)
    k = _load_tile(k_ptr, stride, place, is_place, depth, DEPTH, DEPTH_BLOCK)
    if SMOOTH_K:
        k_mean = _mean(sums_ptr, chunks, row, 0, CHUNKS, DEPTH_BLOCK)
        k = tl.where(is_place[:, None], k - k_mean[None, :], 0.0)
    total = tl.sum(tl.sum(k, axis=1), axis=0)
    size = tl.max(tl.max(tl.abs(k), axis=1), axis=0)
    k_scale = _largest(size, total, LEAST) * (1.0 / LIMIT)
    tl.store(scale_ptr + row * blocks + block, k_scale)
    found = (row * blocks * BLOCK + place)[:, None] * DEPTH_BLOCK + depth[None, :]
    tl.store(codes_ptr + found, _nearest(k * (1.0 / k_scale)))


@triton.jit
def _write_values(
    v_ptr,
    stride,
    mask_ptr,
    sums_ptr,
    codes_ptr,
    scale_ptr,
    row,
    block,
    blocks,
    keys,
    chunks,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SMOOTH_V: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    is_8_bit: tl.constexpr = codes_ptr.dtype.element_ty == tl.float8e4nv
    depth = tl.arange(0, DEPTH_BLOCK)
    column = tl.arange(0, BLOCK)
    offs = column
    if is_8_bit:  # the key that stands at a place, see tiles_kernels._reordered
        inside = offs % 16
        offs = offs - inside + (inside // 2 % 2) * 8 + inside // 4 * 2 + inside % 2
    place = block * BLOCK + offs
    is_place = _is_counted(place, keys, mask_ptr, HAS_KEY_MASK)
    v = _load_tile(v_ptr, stride, place, is_place, depth, DEPTH, DEPTH_BLOCK)
    true_mean = _mean(sums_ptr, chunks, row, 1, CHUNKS, DEPTH_BLOCK)
    v_mean = true_mean if SMOOTH_V else true_mean * 0.0
    low = _extreme(sums_ptr, chunks, row, 2, CHUNKS, DEPTH_BLOCK)
    high = _extreme(sums_ptr, chunks, row, 3, CHUNKS, DEPTH_BLOCK)
    size = _largest(tl.maximum(high - v_mean, v_mean - low), true_mean, LEAST_VALUE)
    v_scale = size * (1.0 / LARGEST_E4M3)
    if block == 0:
        found = scale_ptr + row * 2 * DEPTH_BLOCK + depth
        tl.store(found, v_scale)
        tl.store(found + DEPTH_BLOCK, v_mean)
    v = tl.where(is_place[:, None], (v - v_mean[None, :]) * (1.0 / v_scale)[None, :], 0.0)
    if UPCAST and is_8_bit:
        v = _e4m3_in_fp32(v)
    codes = tl.trans(v.to(codes_ptr.dtype.element_ty))
    line = (row * DEPTH_BLOCK + depth)[:, None] * blocks * BLOCK
    tl.store(codes_ptr + line + (block * BLOCK + column)[None, :], codes)


@triton.jit
def _write_kernel(
    q_ptr,  # (B, H, M, D)
    stride_q_batch,
    stride_q_head,
    stride_q_query,
    k_ptr,  # (B, G, N, D)
    stride_k_batch,
    stride_k_head,
    stride_k_key,
    v_ptr,  # (B, G, N, D)
    stride_v_batch,
    stride_v_head,
    stride_v_key,
    key_mask_ptr,  # (B or 1, N) bytes, with HAS_KEY_MASK
    stride_mask_batch,
    sums_ptr,  # what _look_kernel left
    q_codes_ptr,  # (B * H, M, DEPTH_BLOCK) int8
    k_codes_ptr,  # (B * G, key blocks * BLOCK, DEPTH_BLOCK) int8
    v_codes_ptr,  # (B * G, DEPTH_BLOCK, key blocks * BLOCK) E4M3 or fp16
    q_scale_ptr,  # (B * H, M) fp32
    k_scale_ptr,  # (B * G, key blocks) fp32
    v_scale_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: scale and mean
    q_mean_ptr,  # (B * H, query blocks, DEPTH_BLOCK) fp32, with SMOOTH_Q
    shift_ptr,  # (B * H, M) fp32, with WITH_LSE
    scale,  # of attention, in base 2
    heads,
    groups,
    queries,
    keys,
    query_blocks,
    key_blocks,
    query_programs,  # those that write q; then come those of k, then those of v
    key_programs,
    chunks,
    LIMIT: tl.constexpr,  # the largest code: 127 or 7
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    SMOOTH_V: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    WITH_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    program = tl.program_id(0)
    if program < query_programs:
        row = (program // query_blocks).to(tl.int64)
        batch, head = row // heads, row % heads
        _write_queries(
            q_ptr + batch * stride_q_batch + head * stride_q_head,
            stride_q_query,
            sums_ptr,
            q_codes_ptr,
            q_scale_ptr,
            q_mean_ptr,
            shift_ptr,
            scale,
            row,
            program % query_blocks,
            query_blocks,
            batch * groups + head // (heads // groups),
            queries,
            chunks,
            LIMIT,
            DEPTH,
            DEPTH_BLOCK,
            BLOCK,
            CHUNKS,
            SMOOTH_Q,
            SMOOTH_K,
            WITH_LSE,
        )
    else:
        ours = program - query_programs
        is_values = ours >= key_programs
        ours = tl.where(is_values, ours - key_programs, ours)
        row = (ours // key_blocks).to(tl.int64)
        batch, head = row // groups, row % groups
        mask_ptr = key_mask_ptr + batch * stride_mask_batch
        if is_values:
            _write_values(
                v_ptr + batch * stride_v_batch + head * stride_v_head,
                stride_v_key,
                mask_ptr,
                sums_ptr,
                v_codes_ptr,
                v_scale_ptr,
                row,
                ours % key_blocks,
                key_blocks,
                keys,
                chunks,
                DEPTH,
                DEPTH_BLOCK,
                BLOCK,
                CHUNKS,
                SMOOTH_V,
                HAS_KEY_MASK,
                UPCAST,
            )
        else:
            _write_keys(
                k_ptr + batch * stride_k_batch + head * stride_k_head,
                stride_k_key,
                mask_ptr,
                sums_ptr,
                k_codes_ptr,
                k_scale_ptr,
                row,
                ours % key_blocks,
                key_blocks,
                keys,
                chunks,
                LIMIT,
                DEPTH,
                DEPTH_BLOCK,
                BLOCK,
                CHUNKS,
                SMOOTH_K,
                HAS_KEY_MASK,
            )
