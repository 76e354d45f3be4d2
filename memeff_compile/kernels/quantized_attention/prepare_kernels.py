# ruff: noqa: ANN001, ANN202  (arguments of device code are pointers and scalars of Triton's own)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What turns q, k and v into codes, in four launches.

    _look_kernel    sums and extremes of keys and values, chunk by chunk; codes of q
    _settle_kernel  means, the scales of values and the direction of queries, from the chunks
    _write_kernel   codes of k and v, and what rounding took from each block of values
    _total_kernel   the same for all blocks up to each

All values are looked at, and of the keys every SAMPLE-th: their mean need not be the true one.
Nothing is accumulated across programs but in `_settle_kernel` and `_total_kernel`, which read what
others left.

Queries that share a large part, their mean, turn the rounding of a key into an error of its score
that is alike for all of them. `_aligned` rounds keys so that this part of the error all but
vanishes: in two channels codes are moved by whole numbers.

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
INFINITE = tl.constexpr(float("inf"))
LARGEST_E4M3 = tl.constexpr(448.0)
MAGIC = tl.constexpr(0x4B400000)
MAGIC_VALUE = tl.constexpr(12582912.0)
LEAST_SHARE = tl.constexpr(0.6)  # of the queries' energy in their mean, from which it is heeded
FINER = tl.constexpr(3.0)  # the mean's size in the first of two channels over that in the second
MOST_STEPS = tl.constexpr(16.0)  # by which a code is moved
SAMPLES_TOGETHER = tl.constexpr(32)
BLOCKS_TOGETHER = tl.constexpr(64)


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
def _whole(x):
    """Round to the nearest whole number, ties to even, as fp32; |x| is far below 2^22."""
    return (x + MAGIC_VALUE) - MAGIC_VALUE


@triton.jit
def _is_counted(place, keys, mask_ptr, HAS_KEY_MASK: tl.constexpr):
    found = place < keys
    if HAS_KEY_MASK:
        found = found & (tl.load(mask_ptr + place, mask=found, other=0) != 0)
    return found


@triton.jit
def _sizes(x):
    """Return |x|, infinity for what is not finite."""
    size = tl.abs(x)
    return tl.where(size <= HUGE, size, INFINITE)


@triton.jit
def _scale_of(size, least, limit):
    """Return the scale of numbers up to `size`: not 0, and nan where size is not finite."""
    return (tl.maximum(size, least) + (size - size)) * (1.0 / limit)


# --- look -----------------------------------------------------------------------------------------


@triton.jit
def _look(
    k_ptr,
    stride_k_key,
    v_ptr,
    stride_v_key,
    mask_ptr,
    sums_ptr,
    start,
    stop,
    keys,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SAMPLE: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):
    depth = tl.arange(0, DEPTH_BLOCK)
    k_sum = tl.zeros((KEYS // SAMPLE, DEPTH_BLOCK), dtype=tl.float32)
    v_sum = tl.zeros((KEYS, DEPTH_BLOCK), dtype=tl.float32)
    low = tl.full((KEYS, DEPTH_BLOCK), HUGE, dtype=tl.float32)
    high = tl.full((KEYS, DEPTH_BLOCK), -HUGE, dtype=tl.float32)
    k_count = tl.zeros((KEYS // SAMPLE,), dtype=tl.float32)
    v_count = tl.zeros((KEYS,), dtype=tl.float32)
    for first in tl.range(start, stop, KEYS, num_stages=2):
        place = first + tl.arange(0, KEYS)
        is_place = _is_counted(place, keys, mask_ptr, HAS_KEY_MASK)
        v = _load_tile(v_ptr, stride_v_key, place, is_place, depth, DEPTH, DEPTH_BLOCK)
        v_sum += v
        low = tl.minimum(low, tl.where(is_place[:, None], v, HUGE))
        high = tl.maximum(high, tl.where(is_place[:, None], v, -HUGE))
        v_count += is_place.to(tl.float32)
        sampled = first + tl.arange(0, KEYS // SAMPLE) * SAMPLE
        is_sampled = _is_counted(sampled, keys, mask_ptr, HAS_KEY_MASK)
        k = _load_tile(k_ptr, stride_k_key, sampled, is_sampled, depth, DEPTH, DEPTH_BLOCK)
        k_sum += k
        k_count += is_sampled.to(tl.float32)
    tl.store(sums_ptr + depth, tl.sum(k_sum, axis=0))
    tl.store(sums_ptr + DEPTH_BLOCK + depth, tl.sum(v_sum, axis=0))
    tl.store(sums_ptr + 2 * DEPTH_BLOCK + depth, tl.min(low, axis=0))
    tl.store(sums_ptr + 3 * DEPTH_BLOCK + depth, tl.max(high, axis=0))
    counts = tl.where(depth == 0, tl.sum(k_count, axis=0), tl.sum(v_count, axis=0))
    tl.store(sums_ptr + 4 * DEPTH_BLOCK + depth, counts)


@triton.jit
def _write_queries(
    q_ptr,
    stride,
    codes_ptr,
    scale_ptr,
    mean_ptr,
    scale,
    row,
    block,
    blocks,
    stride_sampled,
    samples,
    queries,
    LIMIT: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    ALIGN: tl.constexpr,
):
    depth = tl.arange(0, DEPTH_BLOCK)
    place = block * ROWS + tl.arange(0, ROWS)
    is_row = place < queries
    q = _load_tile(q_ptr, stride, place, is_row, depth, DEPTH, DEPTH_BLOCK) * scale
    if SMOOTH_Q:
        count = tl.minimum(queries - block * ROWS, ROWS)
        q_mean = tl.sum(q, axis=0) / count
        tl.store(mean_ptr + (row * blocks + block) * DEPTH_BLOCK + depth, q_mean)
        q = tl.where(is_row[:, None], q - q_mean[None, :], 0.0)
    elif ALIGN:  # known when compiling, unlike the next line  # noqa: SIM102
        if block % stride_sampled == 0:
            sample = (row * samples + block // stride_sampled) * 2 * DEPTH_BLOCK
            tl.store(mean_ptr + sample + depth, tl.sum(q, axis=0))
            tl.store(mean_ptr + sample + DEPTH_BLOCK + depth, tl.sum(q * q, axis=0))
    q_scale = _scale_of(tl.max(_sizes(q), axis=1), LEAST, LIMIT)
    tl.store(scale_ptr + row * queries + place, q_scale, mask=is_row)
    found = codes_ptr + (row * queries + place)[:, None] * DEPTH_BLOCK + depth[None, :]
    tl.store(found, _nearest(q * (1.0 / q_scale)[:, None]), mask=is_row[:, None])


@triton.jit
def _look_kernel(
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
    sums_ptr,  # (B * G, chunks, 5, DEPTH_BLOCK) fp32: keys, values, their extremes, counts
    q_codes_ptr,  # (B * H, M, DEPTH_BLOCK) int8
    q_scale_ptr,  # (B * H, M) fp32
    q_mean_ptr,  # (B * H, query blocks, DEPTH_BLOCK) fp32 with SMOOTH_Q; with ALIGN
    # (B * H, samples, 2, DEPTH_BLOCK): sums and sums of squares of some blocks
    scale,  # of attention, in base 2
    heads,
    groups,
    queries,
    keys,
    query_blocks,
    stride_sampled,  # every how many blocks of queries is one
    samples,
    chunk,  # keys per chunk, a multiple of KEYS
    chunks,
    looks,  # programs that look: B * G * chunks; the others write codes of q
    LIMIT: tl.constexpr,  # the largest code: 127 or 7
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,  # queries per program; with SMOOTH_Q those that share a mean
    SAMPLE: tl.constexpr,  # every how many keys are looked at for their mean; divides KEYS
    SMOOTH_Q: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < looks:
        row = (program // chunks).to(tl.int64)
        part = program % chunks
        batch, group = row // groups, row % groups
        _look(
            k_ptr + batch * stride_k_batch + group * stride_k_head,
            stride_k_key,
            v_ptr + batch * stride_v_batch + group * stride_v_head,
            stride_v_key,
            key_mask_ptr + batch * stride_mask_batch,
            sums_ptr + (row * chunks + part) * 5 * DEPTH_BLOCK,
            part * chunk,
            tl.minimum(part * chunk + chunk, keys),
            keys,
            DEPTH,
            DEPTH_BLOCK,
            KEYS,
            SAMPLE,
            HAS_KEY_MASK,
        )
    else:
        row = ((program - looks) // query_blocks).to(tl.int64)
        batch, head = row // heads, row % heads
        _write_queries(
            q_ptr + batch * stride_q_batch + head * stride_q_head,
            stride_q_query,
            q_codes_ptr,
            q_scale_ptr,
            q_mean_ptr,
            scale,
            row,
            (program - looks) % query_blocks,
            query_blocks,
            stride_sampled,
            samples,
            queries,
            LIMIT,
            DEPTH,
            DEPTH_BLOCK,
            ROWS,
            SMOOTH_Q,
            ALIGN,
        )


# --- settle ---------------------------------------------------------------------------------------


@triton.jit
def _chunk_values(
    sums_ptr, chunks, fill, WHICH: tl.constexpr, CHUNKS: tl.constexpr, DEPTH_BLOCK: tl.constexpr
):
    depth = tl.arange(0, DEPTH_BLOCK)
    part = tl.arange(0, CHUNKS)[:, None]
    ptrs = sums_ptr + (part * 5 + WHICH) * DEPTH_BLOCK + depth[None, :]
    return tl.load(ptrs, mask=part < chunks, other=fill)


@triton.jit
def _direction(samples_ptr, samples, queries, DEPTH_BLOCK: tl.constexpr):
    """Return the sum of sampled queries, zeros where little of their energy is in their mean."""
    depth = tl.arange(0, DEPTH_BLOCK)
    total = tl.zeros((SAMPLES_TOGETHER, DEPTH_BLOCK), dtype=tl.float32)
    squares = tl.zeros((SAMPLES_TOGETHER, DEPTH_BLOCK), dtype=tl.float32)
    for start in tl.range(0, samples, SAMPLES_TOGETHER):
        place = (start + tl.arange(0, SAMPLES_TOGETHER))[:, None]
        ptrs = samples_ptr + place * 2 * DEPTH_BLOCK + depth[None, :]
        total += tl.load(ptrs, mask=place < samples, other=0.0)
        squares += tl.load(ptrs + DEPTH_BLOCK, mask=place < samples, other=0.0)
    found = tl.sum(total, axis=0)
    energy = tl.sum(tl.sum(squares, axis=0), axis=0)
    shared = tl.sum(found * found, axis=0)
    return tl.where(shared > energy * (queries * LEAST_SHARE), found, 0.0)


@triton.jit
def _settle_kernel(
    sums_ptr,  # what _look_kernel left
    samples_ptr,  # the same of queries, with ALIGN
    k_mean_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: the keys' mean, and the direction of queries
    v_scale_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: scale and mean
    chunks,
    samples,  # blocks of queries that were sampled for each of the rows
    sampled_queries,  # in all of these
    DEPTH_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    SMOOTH_V: tl.constexpr,
    ALIGN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, DEPTH_BLOCK)
    sums_ptr += row * chunks * 5 * DEPTH_BLOCK
    k_sum = tl.sum(_chunk_values(sums_ptr, chunks, 0.0, 0, CHUNKS, DEPTH_BLOCK), axis=0)
    v_sum = tl.sum(_chunk_values(sums_ptr, chunks, 0.0, 1, CHUNKS, DEPTH_BLOCK), axis=0)
    low = tl.min(_chunk_values(sums_ptr, chunks, HUGE, 2, CHUNKS, DEPTH_BLOCK), axis=0)
    high = tl.max(_chunk_values(sums_ptr, chunks, -HUGE, 3, CHUNKS, DEPTH_BLOCK), axis=0)
    counts = tl.sum(_chunk_values(sums_ptr, chunks, 0.0, 4, CHUNKS, DEPTH_BLOCK), axis=0)
    k_count = tl.sum(tl.where(depth == 0, counts, 0.0), axis=0)
    v_count = tl.sum(tl.where(depth == 1, counts, 0.0), axis=0)
    k_mean = k_sum / tl.maximum(k_count, 1.0)
    true_mean = v_sum / tl.maximum(v_count, 1.0)
    v_mean = true_mean
    if not SMOOTH_K:
        k_mean = tl.zeros((DEPTH_BLOCK,), dtype=tl.float32)
    if not SMOOTH_V:
        v_mean = tl.zeros((DEPTH_BLOCK,), dtype=tl.float32)
    size = tl.maximum(tl.maximum(high - v_mean, v_mean - low), LEAST_VALUE)
    v_scale = (size + (true_mean - true_mean)) * (1.0 / LARGEST_E4M3)
    k_mean_ptr += row * 2 * DEPTH_BLOCK
    tl.store(k_mean_ptr + depth, k_mean)
    if ALIGN:
        samples_ptr += row * samples * 2 * DEPTH_BLOCK
        direction = _direction(samples_ptr, samples, sampled_queries, DEPTH_BLOCK)
        tl.store(k_mean_ptr + DEPTH_BLOCK + depth, direction)
    tl.store(v_scale_ptr + row * 2 * DEPTH_BLOCK + depth, v_scale)
    tl.store(v_scale_ptr + (row * 2 + 1) * DEPTH_BLOCK + depth, v_mean)


# --- write ----------------------------------------------------------------------------------------


@triton.jit
def _aligned(x, codes, direction, depth, LIMIT: tl.constexpr, DEPTH_BLOCK: tl.constexpr):
    """Move codes of two channels so that their distance from `x` is all but across `direction`.

    The first channel is that in which the direction is largest, the second one where it is a third
    of that: what whole steps of the one leave, steps of the other make finer.
    """
    size = tl.abs(direction)
    largest = tl.max(size, axis=0)
    first = depth == tl.argmax(size, axis=0)
    ratio = tl.maximum(size, largest * 1.0e-6) * (FINER / tl.maximum(largest, 1.0e-30))
    away = tl.where(first, INFINITE, tl.abs(tl.log2(tl.maximum(ratio, 1.0e-30))))
    second = depth == tl.argmin(away, axis=0)
    at_first = tl.sum(tl.where(first, direction, 0.0), axis=0)
    at_second = tl.sum(tl.where(second, direction, 0.0), axis=0)
    left = tl.sum((x - codes) * direction[None, :], axis=1)
    is_shared = largest > 0.0
    steps = tl.where(is_shared, _whole(left / tl.where(is_shared, at_first, 1.0)), 0.0)
    left = left - steps * at_first
    is_shared = is_shared & (at_second != 0.0)
    finer = tl.where(is_shared, _whole(left / tl.where(is_shared, at_second, 1.0)), 0.0)
    steps = tl.where(tl.abs(steps) <= MOST_STEPS, steps, 0.0)
    finer = tl.where(tl.abs(finer) <= MOST_STEPS, finer, 0.0)
    codes += tl.where(first[None, :], steps[:, None], 0.0)
    codes += tl.where(second[None, :], finer[:, None], 0.0)
    return tl.minimum(tl.maximum(codes, -LIMIT), LIMIT)


@triton.jit
def _write_keys(
    k_ptr,
    stride,
    mask_ptr,
    mean_ptr,
    codes_ptr,
    scale_ptr,
    row,
    block,
    blocks,
    keys,
    LIMIT: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):
    depth = tl.arange(0, DEPTH_BLOCK)
    place = block * BLOCK + tl.arange(0, BLOCK)
    is_place = _is_counted(place, keys, mask_ptr, HAS_KEY_MASK)
    k = _load_tile(k_ptr, stride, place, is_place, depth, DEPTH, DEPTH_BLOCK)
    if SMOOTH_K:
        k_mean = tl.load(mean_ptr + row * 2 * DEPTH_BLOCK + depth)
        k = tl.where(is_place[:, None], k - k_mean[None, :], 0.0)
    size = tl.max(tl.max(_sizes(k), axis=1), axis=0)
    k_scale = _scale_of(size, LEAST, LIMIT)
    tl.store(scale_ptr + row * blocks + block, k_scale)
    found = (row * blocks * BLOCK + place)[:, None] * DEPTH_BLOCK + depth[None, :]
    k = k * (1.0 / k_scale)
    if ALIGN:
        direction = tl.load(mean_ptr + (row * 2 + 1) * DEPTH_BLOCK + depth)
        k = _aligned(k, _whole(k), direction, depth, LIMIT, DEPTH_BLOCK)
    tl.store(codes_ptr + found, _nearest(k))


@triton.jit
def _write_values(
    v_ptr,
    stride,
    mask_ptr,
    codes_ptr,
    scale_ptr,
    rest_ptr,
    counts_ptr,
    row,
    block,
    blocks,
    keys,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    HAS_REST: tl.constexpr,
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
    v_scale = tl.load(scale_ptr + row * 2 * DEPTH_BLOCK + depth)
    v_mean = tl.load(scale_ptr + (row * 2 + 1) * DEPTH_BLOCK + depth)
    v = tl.where(is_place[:, None], (v - v_mean[None, :]) * (1.0 / v_scale)[None, :], 0.0)
    exact = v
    if UPCAST and is_8_bit:
        v = _e4m3_in_fp32(v)
    rounded = v.to(codes_ptr.dtype.element_ty)
    line = (row * DEPTH_BLOCK + depth)[:, None] * (blocks * BLOCK)
    tl.store(codes_ptr + line + (block * BLOCK + column)[None, :], tl.trans(rounded))
    if HAS_REST:
        rest = tl.sum(exact - rounded.to(tl.float32), axis=0)
        tl.store(rest_ptr + (row * (blocks + 1) + block + 1) * DEPTH_BLOCK + depth, rest)
        if HAS_KEY_MASK:
            count = tl.sum(is_place.to(tl.float32), axis=0)
            tl.store(counts_ptr + row * (blocks + 1) + block + 1, count)


@triton.jit
def _write_shift(
    q_ptr,
    stride,
    mean_ptr,
    shift_ptr,
    scale,
    row,
    group,
    block,
    queries,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write what the keys' mean adds to every score of a query."""
    depth = tl.arange(0, DEPTH_BLOCK)
    place = block * ROWS + tl.arange(0, ROWS)
    is_row = place < queries
    q = _load_tile(q_ptr, stride, place, is_row, depth, DEPTH, DEPTH_BLOCK) * scale
    k_mean = tl.load(mean_ptr + group * 2 * DEPTH_BLOCK + depth)
    tl.store(shift_ptr + row * queries + place, tl.sum(q * k_mean[None, :], axis=1), mask=is_row)


@triton.jit
def _write_kernel(
    q_ptr,  # (B, H, M, D), with WITH_LSE
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
    k_mean_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: the keys' mean, and the direction of queries
    v_scale_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: scale and mean
    k_codes_ptr,  # (B * G, key blocks * BLOCK, DEPTH_BLOCK) int8
    v_codes_ptr,  # (B * G, DEPTH_BLOCK, key blocks * BLOCK) E4M3 or fp16
    k_scale_ptr,  # (B * G, key blocks) fp32
    shift_ptr,  # (B * H, M) fp32, with WITH_LSE
    rest_ptr,  # (B * G, key blocks + 1, DEPTH_BLOCK) fp32: values less their codes, with HAS_REST
    counts_ptr,  # (B * G, key blocks + 1) fp32: keys that count, with HAS_REST and HAS_KEY_MASK
    scale,  # of attention, in base 2
    heads,
    groups,
    queries,
    keys,
    query_blocks,
    key_blocks,
    programs,  # those that write k, and as many that write v; then come those of shifts
    LIMIT: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    HAS_REST: tl.constexpr,
    WITH_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    program = tl.program_id(0)
    if program < programs:
        row = (program // key_blocks).to(tl.int64)
        batch, head = row // groups, row % groups
        _write_keys(
            k_ptr + batch * stride_k_batch + head * stride_k_head,
            stride_k_key,
            key_mask_ptr + batch * stride_mask_batch,
            k_mean_ptr,
            k_codes_ptr,
            k_scale_ptr,
            row,
            program % key_blocks,
            key_blocks,
            keys,
            LIMIT,
            DEPTH,
            DEPTH_BLOCK,
            BLOCK,
            SMOOTH_K,
            ALIGN,
            HAS_KEY_MASK,
        )
    elif program < 2 * programs:
        row = ((program - programs) // key_blocks).to(tl.int64)
        batch, head = row // groups, row % groups
        _write_values(
            v_ptr + batch * stride_v_batch + head * stride_v_head,
            stride_v_key,
            key_mask_ptr + batch * stride_mask_batch,
            v_codes_ptr,
            v_scale_ptr,
            rest_ptr,
            counts_ptr,
            row,
            (program - programs) % key_blocks,
            key_blocks,
            keys,
            DEPTH,
            DEPTH_BLOCK,
            BLOCK,
            HAS_KEY_MASK,
            HAS_REST,
            UPCAST,
        )
    elif WITH_LSE:
        ours = program - 2 * programs
        row = (ours // query_blocks).to(tl.int64)
        batch, head = row // heads, row % heads
        _write_shift(
            q_ptr + batch * stride_q_batch + head * stride_q_head,
            stride_q_query,
            k_mean_ptr,
            shift_ptr,
            scale,
            row,
            batch * groups + head // (heads // groups),
            ours % query_blocks,
            queries,
            DEPTH,
            DEPTH_BLOCK,
            ROWS,
        )


# --- total ----------------------------------------------------------------------------------------


@triton.jit
def _total_kernel(
    rest_ptr,  # (B * G, key blocks + 1, DEPTH_BLOCK) fp32: by block, then up to each block
    counts_ptr,  # (B * G, key blocks + 1) fp32, the same, with HAS_KEY_MASK
    key_blocks,
    DEPTH_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):
    """Add up what rounding took from the values of all blocks up to each."""
    row = tl.program_id(0).to(tl.int64) * (key_blocks + 1)
    part = tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    rest_ptr += row * DEPTH_BLOCK
    counts_ptr += row
    so_far = tl.zeros((COLUMNS,), dtype=tl.float32)
    tl.store(rest_ptr + column, so_far)
    for start in tl.range(0, key_blocks, BLOCKS_TOGETHER):
        block = start + 1 + tl.arange(0, BLOCKS_TOGETHER)
        ptrs = rest_ptr + block[:, None] * DEPTH_BLOCK + column[None, :]
        is_block = (block <= key_blocks)[:, None]
        rest = tl.load(ptrs, mask=is_block, other=0.0)
        tl.store(ptrs, tl.cumsum(rest, axis=0) + so_far[None, :], mask=is_block)
        so_far += tl.sum(rest, axis=0)
    if HAS_KEY_MASK:  # noqa: SIM102
        if part == 0:
            tl.store(counts_ptr, 0.0)
            total = 0.0
            for start in tl.range(0, key_blocks, BLOCKS_TOGETHER):
                block = start + 1 + tl.arange(0, BLOCKS_TOGETHER)
                is_block = block <= key_blocks
                count = tl.load(counts_ptr + block, mask=is_block, other=0.0)
                tl.store(counts_ptr + block, tl.cumsum(count, axis=0) + total, mask=is_block)
                total += tl.sum(count, axis=0)
