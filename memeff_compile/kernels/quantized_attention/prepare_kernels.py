# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that encode keys and values, and prepare the encoding of queries: four launches, or five
if the queries' means are subtracted. A kernel's name contains its step:

- `look` computes sums and extremes of keys and values in each chunk of tokens. `look` also computes
  sums of some queries or, if the queries' means are subtracted, the mean of each block of queries.
- `settle` computes, from the chunks' results, the means, the scales of values, and the direction of
  the queries' mean (their common direction).
- `write` writes the codes of keys and values, and the sum of the values in each block.
- `total` computes running sums of the values' rounding errors: for each block, the sum over this
  block and all earlier blocks.
- `correct` computes the scores of the queries' means with the keys, if these means are subtracted.

The kernel `look` reads all values, but only every SAMPLE-th key, because an approximate mean of the
keys is enough. Only the kernels `settle` and `total` combine results of several programs. These
kernels read the results from memory.

If all queries have a large common mean, a key's rounding error changes the key's scores with all
queries by about the same amount. The function `_aligned` makes this change almost vanish: it adds
integers to the key's codes in two channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import of_head
from .rounding_kernels import (
    LEAST,
    _code_of,
    _e4m3_in_fp32,
    _load_tile,
    _load_turned,
    _nearest,
    _scale_of,
    _size_bits,
    _turned_far,
    _whole,
)

HUGE = tl.constexpr(3.0e38)
INFINITE = tl.constexpr(float("inf"))
LEAST_VALUE = tl.constexpr(1.0e-30)
LARGEST_E4M3 = tl.constexpr(448.0)
LEAST_SHARE = tl.constexpr(0.6)  # least share of the queries' energy in their mean to use it
FINER = tl.constexpr(3.0)  # ratio of the mean's sizes in the first and the second channel
MOST_EVENED = tl.constexpr(3.0)  # largest exponent of 2 in the divisor of a channel
LEAST_ENERGY = tl.constexpr(2.0**-16)  # of keys around their mean, in that with it
MOST_STEPS = tl.constexpr(16.0)  # by which a code is moved
MOST_SCORE = tl.constexpr(30.0)  # in base 2, of a weight for rounding errors of values
SAMPLES_TOGETHER = tl.constexpr(32)


@triton.jit
def _is_counted(place, keys, mask_ptr, HAS_KEY_MASK: tl.constexpr):
    found = place < keys
    if HAS_KEY_MASK:
        found = found & (tl.load(mask_ptr + place, mask=found, other=0) != 0)
    return found


@triton.jit
def _look(k, v, mask_ptr, sums_ptr, start, stop, keys, C: tl.constexpr):
    """Write sums of keys, and sums and extremes of values, for each channel.

    The keys and values are those at positions `start` to `stop`, but only every SAMPLE-th key. `k`
    and `v` are pairs: the pointer to the first row, and the stride between rows.
    """
    depth = tl.arange(0, C.DEPTH_BLOCK)
    k_sum = tl.zeros((C.KEYS // C.SAMPLE, C.DEPTH_BLOCK), dtype=tl.float32)
    k_squares = tl.zeros((C.KEYS // C.SAMPLE, C.DEPTH_BLOCK), dtype=tl.float32)
    v_sum = tl.zeros((C.KEYS, C.DEPTH_BLOCK), dtype=tl.float32)
    low = tl.full((C.KEYS, C.DEPTH_BLOCK), HUGE, dtype=tl.float32)
    high = tl.full((C.KEYS, C.DEPTH_BLOCK), -HUGE, dtype=tl.float32)
    k_count = tl.zeros((C.KEYS // C.SAMPLE,), dtype=tl.float32)
    v_count = tl.zeros((C.KEYS,), dtype=tl.float32)
    for first in tl.range(start, stop, C.KEYS, num_stages=2):
        place = first + tl.arange(0, C.KEYS)
        is_place = _is_counted(place, keys, mask_ptr, C.HAS_KEY_MASK)
        is_one = is_place.to(tl.float32)
        if C.HAS_KEY_MASK:
            tile = _load_tile(v, place, is_place, depth, C)
            v_sum += tile
            low = tl.minimum(low, tl.where(is_place[:, None], tile, HUGE))
            high = tl.maximum(high, tl.where(is_place[:, None], tile, -HUGE))
        else:  # positions after the last key read the last key, which changes no extreme
            place = tl.minimum(place, keys - 1)
            tile = _load_tile(v, place, place >= 0, depth, C)
            v_sum += tile * is_one[:, None]
            low = tl.minimum(low, tile)
            high = tl.maximum(high, tile)
        v_count += is_one
        sampled = first + tl.arange(0, C.KEYS // C.SAMPLE) * C.SAMPLE
        is_sampled = _is_counted(sampled, keys, mask_ptr, C.HAS_KEY_MASK)
        tile = _load_tile(k, sampled, is_sampled, depth, C)
        k_sum += tile
        k_squares += tile * tile
        k_count += is_sampled.to(tl.float32)
    tl.store(sums_ptr + depth, tl.sum(k_sum, axis=0))
    tl.store(sums_ptr + C.DEPTH_BLOCK + depth, tl.sum(v_sum, axis=0))
    tl.store(sums_ptr + 2 * C.DEPTH_BLOCK + depth, tl.min(low, axis=0))
    tl.store(sums_ptr + 3 * C.DEPTH_BLOCK + depth, tl.max(high, axis=0))
    counts = tl.where(depth == 0, tl.sum(k_count, axis=0), tl.sum(v_count, axis=0))
    tl.store(sums_ptr + 4 * C.DEPTH_BLOCK + depth, counts)
    tl.store(sums_ptr + 5 * C.DEPTH_BLOCK + depth, tl.sum(k_squares, axis=0))


@triton.jit
def _average_queries(q, mean_ptr, block, queries, C: tl.constexpr):
    """Write two numbers for each channel: the mean over a block of queries, and the sum of squared
    differences from that mean."""
    depth = tl.arange(0, C.DEPTH_BLOCK)
    place = block * C.ROWS + tl.arange(0, C.ROWS)
    is_row = place < queries
    q = _load_tile(q, place, is_row, depth, C)
    q_mean = tl.sum(q, axis=0) / tl.minimum(queries - block * C.ROWS, C.ROWS)
    q = tl.where(is_row[:, None], q - q_mean[None, :], 0.0)
    tl.store(mean_ptr + depth, q_mean)
    tl.store(mean_ptr + C.DEPTH_BLOCK + depth, tl.sum(q * q, axis=0))


@triton.jit
def _sample_queries(q, sample_ptr, scale, block, queries, C: tl.constexpr):
    """Write two numbers for each channel: the sum and the sum of squares over a block of queries.

    The queries are multiplied by `scale` first.
    """
    depth = tl.arange(0, C.DEPTH_BLOCK)
    place = block * C.ROWS + tl.arange(0, C.ROWS)
    q = _load_tile(q, place, place < queries, depth, C) * scale
    tl.store(sample_ptr + depth, tl.sum(q, axis=0))
    tl.store(sample_ptr + C.DEPTH_BLOCK + depth, tl.sum(q * q, axis=0))


@triton.jit
def _quantized_attention_prepare_look_kernel(
    q,  # (B, H, M, D), as k and v `key_tiles.Rows`
    k,  # (B, G, N, D)
    v,  # (B, G, N, D)
    key_mask_ptr,  # (B or 1, N) bytes, with HAS_KEY_MASK
    stride_mask_batch,
    sums_ptr,  # (B * G, chunks, 6, DEPTH_BLOCK) fp32: keys, values, their extremes, counts, and
    # squares of keys
    q_mean_ptr,  # (B * H, query blocks, 2, DEPTH_BLOCK) fp32: sums and sums of squares, or with
    # SMOOTH_Q means and sums of squares around them
    scale,  # of attention, in base 2
    heads,
    groups,
    queries,
    keys,
    query_blocks,  # with SMOOTH_Q all blocks, else the sampled blocks
    stride_sampled,  # one of this many blocks of queries is sampled
    chunk,  # keys per chunk, a multiple of KEYS
    chunks,
    looks,  # programs that look at keys and values: B * G * chunks; then come those of queries
    C: tl.constexpr,
    # ROWS: queries per program; with SMOOTH_Q those that share a mean
    # SAMPLE: one of this many keys is read for the mean; divides KEYS
):
    if C.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < looks:
        row = (program // chunks).to(tl.int64)
        part = program % chunks
        batch, group = row // groups, row % groups
        k_rows = (of_head(k, batch, group), k.row)
        v_rows = (of_head(v, batch, group), v.row)
        mask_ptr = key_mask_ptr + batch * stride_mask_batch
        sums_ptr += (row * chunks + part) * 6 * C.DEPTH_BLOCK
        stop = tl.minimum(part * chunk + chunk, keys)
        _look(k_rows, v_rows, mask_ptr, sums_ptr, part * chunk, stop, keys, C)
    else:
        row = ((program - looks) // query_blocks).to(tl.int64)
        batch, head = row // heads, row % heads
        block = (program - looks) % query_blocks
        q_rows = (q.ptr + (batch * q.batch + head * q.head), q.row)
        sample_ptr = q_mean_ptr + (row * query_blocks + block) * 2 * C.DEPTH_BLOCK
        if C.SMOOTH_Q:
            _average_queries(q_rows, sample_ptr, block, queries, C)
        else:
            _sample_queries(q_rows, sample_ptr, scale, block * stride_sampled, queries, C)


@triton.jit
def _chunk_values(sums_ptr, chunks, fill, WHICH: tl.constexpr, C: tl.constexpr):
    depth = tl.arange(0, C.DEPTH_BLOCK)
    part = tl.arange(0, C.CHUNKS)[:, None]
    ptrs = sums_ptr + (part * 6 + WHICH) * C.DEPTH_BLOCK + depth[None, :]
    return tl.load(ptrs, mask=part < chunks, other=fill)


@triton.jit
def _counted(sums_ptr, chunks, WHICH: tl.constexpr, C: tl.constexpr):
    """Return how many keys k (WHICH is 0) or values v (WHICH is 1) the kernel `look` summed.

    Of the keys, `look` reads only every SAMPLE-th. The result is at least 1.
    """
    part = tl.arange(0, C.CHUNKS)
    ptrs = sums_ptr + (part * 6 + 4) * C.DEPTH_BLOCK + WHICH
    return tl.maximum(tl.sum(tl.load(ptrs, mask=part < chunks, other=0.0), axis=0), 1.0)


@triton.jit
def _mean_of_keys(sums_ptr, chunks, C: tl.constexpr):
    k_mean = tl.zeros((C.DEPTH_BLOCK,), dtype=tl.float32)
    if C.SMOOTH_K:
        k_sum = tl.sum(_chunk_values(sums_ptr, chunks, 0.0, 0, C), axis=0)
        k_mean = k_sum / _counted(sums_ptr, chunks, 0, C)
    return k_mean


@triton.jit
def _settle_values(sums_ptr, v_scale_ptr, chunks, C: tl.constexpr):
    depth = tl.arange(0, C.DEPTH_BLOCK)
    v_sum = tl.sum(_chunk_values(sums_ptr, chunks, 0.0, 1, C), axis=0)
    low = tl.min(_chunk_values(sums_ptr, chunks, HUGE, 2, C), axis=0)
    high = tl.max(_chunk_values(sums_ptr, chunks, -HUGE, 3, C), axis=0)
    true_mean = v_sum / _counted(sums_ptr, chunks, 1, C)
    v_mean = true_mean
    if not C.SMOOTH_V:
        v_mean = tl.zeros((C.DEPTH_BLOCK,), dtype=tl.float32)
    size = tl.maximum(tl.maximum(high - v_mean, v_mean - low), LEAST_VALUE)
    v_scale = (size + (true_mean - true_mean)) * (1.0 / LARGEST_E4M3)
    tl.store(v_scale_ptr + depth, v_scale)
    tl.store(v_scale_ptr + C.DEPTH_BLOCK + depth, v_mean)


@triton.jit
def _evened_by(squares, sums_ptr, chunks, C: tl.constexpr):
    """Return a number per channel by which queries are divided and keys are multiplied.

    In each channel, queries and keys then have about the same energy (sum of squares), up to one
    factor for all channels. The numbers are scaled to the geometric mean 1, then clamped. The
    result is rounded to powers of the square root of two.
    """
    keys = tl.sum(_chunk_values(sums_ptr, chunks, 0.0, 5, C), axis=0)
    least = keys * LEAST_ENERGY
    if C.SMOOTH_K:
        k_sum = tl.sum(_chunk_values(sums_ptr, chunks, 0.0, 0, C), axis=0)
        keys -= k_sum * (k_sum / _counted(sums_ptr, chunks, 0, C))
    is_known = (squares > 0.0) & (squares < HUGE) & (keys > least) & (keys < HUGE)
    power = tl.log2(tl.where(is_known, squares, 1.0)) - tl.log2(tl.where(is_known, keys, 1.0))
    power *= 0.25
    known = tl.maximum(tl.sum(is_known.to(tl.float32), axis=0), 1.0)
    power = tl.where(is_known, power - tl.sum(power, axis=0) / known, 0.0)
    power = tl.minimum(tl.maximum(power, -MOST_EVENED), MOST_EVENED)
    return tl.exp2(0.5 * _whole(2.0 * power))


@triton.jit
def _turn_vector(places, step, COUNT: tl.constexpr):
    """Apply a Hadamard transform in place to vectors in memory.

    Element i of a vector is at the offset `places` + i * step.
    """
    tl.debug_barrier()
    parts = ()
    for part in tl.static_range(COUNT):
        parts += (tl.load(places + part * step),)
    parts = _turned_far(parts, COUNT)
    tl.debug_barrier()
    for part in tl.static_range(COUNT):
        tl.store(places + part * step, parts[part])


@triton.jit
def _settle_channels(samples_ptr, sums_ptr, found_ptr, scale, counts, C: tl.constexpr):
    """Write the factors by which the channels of queries and keys are multiplied. Also write the
    common direction of the queries: the direction of the sum of the sampled queries.

    The stored direction is zero if the common direction has only a small share of the queries'
    energy (sum of squares). For the common direction, the kernel stores:

    - the direction and its Hadamard transform;
    - the reciprocal of the number of sampled queries;
    - two elements of the Hadamard transform of the common direction, and the indices of these
      elements' channels.

    The first of the two channels has the largest transformed element. The element of the second
    channel is about a third as large.
    """
    samples, queries, chunks = counts
    depth = tl.arange(0, C.DEPTH_BLOCK)
    total = tl.zeros((SAMPLES_TOGETHER, C.DEPTH_BLOCK), dtype=tl.float32)
    squares = tl.zeros((SAMPLES_TOGETHER, C.DEPTH_BLOCK), dtype=tl.float32)
    for start in tl.range(0, samples, SAMPLES_TOGETHER):
        place = (start + tl.arange(0, SAMPLES_TOGETHER))[:, None]
        ptrs = samples_ptr + place * 2 * C.DEPTH_BLOCK + depth[None, :]
        if C.ALIGN:
            total += tl.load(ptrs, mask=place < samples, other=0.0)
        squares += tl.load(ptrs + C.DEPTH_BLOCK, mask=place < samples, other=0.0)
    by_channel = tl.sum(squares, axis=0)
    evened = _evened_by(by_channel, sums_ptr, chunks, C)
    tl.store(found_ptr + 3 * C.DEPTH_BLOCK + depth, evened)
    of_queries = (scale / (C.FAR * C.NEAR)) / evened
    tl.store(found_ptr + 5 * C.DEPTH_BLOCK + depth, of_queries)
    if C.ALIGN:
        found = tl.sum(total, axis=0)
        shared = tl.sum(found * found, axis=0)
        energy = tl.sum(by_channel, axis=0)
        found = tl.where(shared > energy * (queries * LEAST_SHARE), found, 0.0)
        tl.store(found_ptr + C.DEPTH_BLOCK + depth, found)
        tl.store(found_ptr + 4 * C.DEPTH_BLOCK + depth, found / evened)
        turned_ptr = found_ptr + 4 * C.DEPTH_BLOCK
        apart: tl.constexpr = C.DEPTH_BLOCK // C.FAR
        _turn_vector(turned_ptr + tl.arange(0, apart), apart, C.FAR)
        _turn_vector(turned_ptr + C.NEAR * tl.arange(0, C.DEPTH_BLOCK // C.NEAR), 1, C.NEAR)
        tl.debug_barrier()
        found = tl.load(found_ptr + 4 * C.DEPTH_BLOCK + depth)
        size = tl.abs(found)
        largest = tl.max(size, axis=0)
        first_place = tl.argmax(size, axis=0)
        first = depth == first_place
        ratio = tl.maximum(size, largest * 1.0e-6) * (FINER / tl.maximum(largest, 1.0e-30))
        away = tl.where(first, INFINITE, tl.abs(tl.log2(tl.maximum(ratio, 1.0e-30))))
        second_place = tl.argmin(away, axis=0)
        second = depth == second_place
        found_ptr += 2 * C.DEPTH_BLOCK
        tl.store(found_ptr, tl.sum(tl.where(first, found, 0.0), axis=0))
        tl.store(found_ptr + 1, tl.sum(tl.where(second, found, 0.0), axis=0))
        tl.store(found_ptr + 2, first_place.to(tl.float32))
        tl.store(found_ptr + 3, second_place.to(tl.float32))
        tl.store(found_ptr + 4, 1.0 / queries)


@triton.jit
def _quantized_attention_prepare_settle_kernel(
    sums_ptr,  # the result of _quantized_attention_prepare_look_kernel
    samples_ptr,  # the same for queries
    k_mean_ptr,  # (B * G, 6, DEPTH_BLOCK) fp32: the keys' mean; queries' direction; channels of it
    # turned; factors of keys per channel; the direction, turned; factors of queries
    v_scale_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: scale and mean
    scale,  # of attention, in base 2
    chunks,
    samples,  # blocks of queries that were sampled for each of the rows
    sampled_queries,  # in all of these
    C: tl.constexpr,
):
    """Compute the mean of the keys, and the scale and mean of the values.

    Also compute the factors by which the channels of queries and keys are multiplied, and the
    direction of the sum of the sampled queries.
    """
    if C.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    sums_ptr += row * chunks * 6 * C.DEPTH_BLOCK
    k_mean_ptr += row * 6 * C.DEPTH_BLOCK
    if part == 0:
        depth = tl.arange(0, C.DEPTH_BLOCK)
        tl.store(k_mean_ptr + depth, _mean_of_keys(sums_ptr, chunks, C))
    elif part == 1:
        v_scale_ptr += row * 2 * C.DEPTH_BLOCK
        _settle_values(sums_ptr, v_scale_ptr, chunks, C)
    else:
        samples_ptr += row * samples * 2 * C.DEPTH_BLOCK
        counts = (samples, sampled_queries, chunks)
        _settle_channels(samples_ptr, sums_ptr, k_mean_ptr, scale, counts, C)


@triton.jit
def _aligned(x, direction, at_first, at_second, first, second, LIMIT: tl.constexpr):
    """Change keys `x` so that their rounding errors are almost orthogonal to `direction`.

    `direction` is the sum of some queries. Its channels are scaled and Hadamard transformed like
    those of the queries. The masks `first` and `second` select one channel each. The function
    changes each key's number in the first channel by a whole number of quantisation steps. This
    change removes most of the error along `direction`. A change of the second channel removes most
    of the remaining error.
    """
    step_size: tl.constexpr = 1 + (LIMIT == 15)
    left = tl.sum((x - _code_of(x, LIMIT)) * direction[None, :], axis=1) / step_size
    steps = _whole(left / at_first)
    left -= steps * at_first
    finer = tl.where(at_second != 0.0, _whole(left / at_second), 0.0)
    steps = tl.where(tl.abs(steps) <= MOST_STEPS, steps, 0.0)
    finer = tl.where(tl.abs(finer) <= MOST_STEPS, finer, 0.0)
    moved = tl.where(first[None, :], steps[:, None], 0.0)
    x += step_size * tl.where(second[None, :], finer[:, None], moved)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def _write_keys(k, mask_ptr, mean_ptr, made, at, keys, C: tl.constexpr):
    codes_ptr, scale_ptr = made
    row, block, blocks = at
    depth = tl.arange(0, C.DEPTH_BLOCK)
    place = block * C.BLOCK + tl.arange(0, C.BLOCK)
    mean_ptr += row * 6 * C.DEPTH_BLOCK
    if C.HAS_KEY_MASK:
        is_place = _is_counted(place, keys, mask_ptr, C.HAS_KEY_MASK)
        is_loaded = is_place
    else:  # positions after the last key read the last key; their codes are never used
        place = tl.minimum(place, keys - 1)
        is_loaded = place >= 0
    change = (mean_ptr, mean_ptr + 3 * C.DEPTH_BLOCK)
    k = _load_turned(k, place, is_loaded, change, C, C.SMOOTH_K)
    if C.HAS_KEY_MASK:
        k = tl.where(is_place[:, None], k, 0.0)
    sizes = tl.max(_size_bits(k), axis=1)
    size = tl.max(sizes, axis=0).to(tl.float32, bitcast=True)
    widest: tl.constexpr = C.LIMIT + (C.LIMIT == 15)
    k_scale = _scale_of(size, LEAST, widest * C.KEY_STEPS)
    tl.store(scale_ptr + row * blocks + block, k_scale)
    if C.KEY_STEPS > 1:
        steps = tl.ceil(sizes.to(tl.float32, bitcast=True) * (1.0 / (k_scale * widest)))
        steps = tl.minimum(tl.maximum(steps, 1.0), C.KEY_STEPS)
        k *= (1.0 / (k_scale * steps))[:, None]
    else:
        k *= 1.0 / k_scale
    at_first = 0.0
    if C.ALIGN:
        at_first = tl.load(mean_ptr + 2 * C.DEPTH_BLOCK)
    if at_first != 0.0:
        direction = tl.load(mean_ptr + 4 * C.DEPTH_BLOCK + depth)
        at_second = tl.load(mean_ptr + 2 * C.DEPTH_BLOCK + 1)
        first = depth == tl.load(mean_ptr + 2 * C.DEPTH_BLOCK + 2).to(tl.int32)
        second = depth == tl.load(mean_ptr + 2 * C.DEPTH_BLOCK + 3).to(tl.int32)
        k = _aligned(k, direction, at_first, at_second, first, second, C.LIMIT)
    if C.KEY_STEPS > 1:
        k = _code_of(k, C.LIMIT) * steps[:, None]
    codes_ptr += (row * blocks + block) * C.BLOCK * C.DEPTH_BLOCK
    found = tl.arange(0, C.BLOCK)[:, None] * C.DEPTH_BLOCK + depth[None, :]
    tl.store(codes_ptr + found, _nearest(k))


@triton.jit
def _key_at(place):
    """Return the index of the key whose value is stored at a position of the 8-bit values.

    `tiles_kernels._reordered` explains the order.
    """
    inside = place % 16
    return place - inside + (inside // 2 % 2) * 8 + inside // 4 * 2 + inside % 2


@triton.jit
def _weights_of(k, mean_ptr, depth, DEPTH_BLOCK: tl.constexpr):
    """Return the softmax weights of a block of keys for the queries' mean, up to a factor."""
    direction = tl.load(mean_ptr + DEPTH_BLOCK + depth)
    direction *= tl.load(mean_ptr + 2 * DEPTH_BLOCK + 4)
    of_mean = tl.sum(tl.load(mean_ptr + depth) * direction, axis=0)
    score = tl.sum(k * direction[None, :], axis=1) - of_mean
    return tl.exp2(tl.minimum(tl.maximum(score, -MOST_SCORE), MOST_SCORE))


@triton.jit
def _write_values(v, k, mask_ptr, k_mean_ptr, made, rests, at, keys, C: tl.constexpr):
    """Write the codes of a block of values. With HAS_REST, also write the values' weighted sum.

    The kernel `_quantized_attention_prepare_total_kernel` reads both, and computes sums of the
    codes' rounding errors. In the weighted sum, each value usually has the weight 1. The queries
    may have a large common mean that is not subtracted from them. Then a value's weight is the
    softmax weight of its key for that common mean.
    """
    codes_ptr, scale_ptr = made
    rest_ptr, counts_ptr, weights_ptr = rests
    row, block, blocks = at
    is_8_bit: tl.constexpr = codes_ptr.dtype.element_ty == tl.float8e4nv
    depth = tl.arange(0, C.DEPTH_BLOCK)
    column = tl.arange(0, C.BLOCK)
    place = block * C.BLOCK + (_key_at(column) if is_8_bit else column)
    is_place = _is_counted(place, keys, mask_ptr, C.HAS_KEY_MASK)
    scale_ptr += row * 2 * C.DEPTH_BLOCK
    inverse = 1.0 / tl.load(scale_ptr + depth)
    v_mean = tl.load(scale_ptr + C.DEPTH_BLOCK + depth)
    if not C.HAS_KEY_MASK:  # positions after the last key read the last key, with weight 0
        place = tl.minimum(place, keys - 1)
    is_loaded = is_place if C.HAS_KEY_MASK else place >= 0
    weight = is_place.to(tl.float32)
    if C.HAS_REST and C.ALIGN:
        k_mean_ptr += row * 6 * C.DEPTH_BLOCK
        if tl.load(k_mean_ptr + 2 * C.DEPTH_BLOCK) != 0.0:
            rows = _load_tile(k, place, is_loaded, depth, C)
            weight *= _weights_of(rows, k_mean_ptr, depth, C.DEPTH_BLOCK)
    v = _load_tile(v, place, is_loaded, depth, C)
    if C.HAS_REST:
        after = row * (blocks + 1) + block + 1
        tl.store(rest_ptr + after * C.DEPTH_BLOCK + depth, tl.sum(v * weight[:, None], axis=0))
        tl.store(counts_ptr + after, tl.sum(weight, axis=0))
        tl.store(weights_ptr + row * blocks * C.BLOCK + block * C.BLOCK + column, weight)
    v = (v - v_mean[None, :]) * inverse[None, :]
    if C.HAS_KEY_MASK:
        v = tl.where(is_place[:, None], v, 0.0)
    if C.UPCAST and is_8_bit:
        v = _e4m3_in_fp32(v)
    line = (row * C.DEPTH_BLOCK + depth)[:, None] * (blocks * C.BLOCK)
    places = codes_ptr + line + (block * C.BLOCK + column)[None, :]
    tl.store(places, tl.trans(v.to(codes_ptr.dtype.element_ty)))


@triton.jit
def _write_shift(q, mean_ptr, shift_ptr, scale, at, queries, C: tl.constexpr):
    """Write, for each query, the number by which the keys' mean changes the query's scores."""
    row, group, block = at
    depth = tl.arange(0, C.DEPTH_BLOCK)
    place = block * C.ROWS + tl.arange(0, C.ROWS)
    is_row = place < queries
    q = _load_tile(q, place, is_row, depth, C) * scale
    k_mean = tl.load(mean_ptr + group * 6 * C.DEPTH_BLOCK + depth)
    tl.store(shift_ptr + row * queries + place, tl.sum(q * k_mean[None, :], axis=1), mask=is_row)


@triton.jit
def _quantized_attention_prepare_write_kernel(
    q,  # (B, H, M, D), with WITH_LSE, as k and v `key_tiles.Rows`
    k,  # (B, G, N, D)
    v,  # (B, G, N, D)
    key_mask_ptr,  # (B or 1, N) bytes, with HAS_KEY_MASK
    stride_mask_batch,
    k_mean_ptr,  # (B * G, 6, DEPTH_BLOCK) fp32: the keys' mean; queries' direction; channels of it
    # turned; factors of keys per channel; the direction, turned; factors of queries
    v_scale_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: scale and mean
    k_codes_ptr,  # (B * G, key blocks * BLOCK, DEPTH_BLOCK) int8
    v_codes_ptr,  # (B * G, DEPTH_BLOCK, key blocks * BLOCK) E4M3 or fp16
    k_scale_ptr,  # (B * G, key blocks) fp32
    shift_ptr,  # (B * H, M) fp32, with WITH_LSE
    rest_ptr,  # (B * G, key blocks + 1, DEPTH_BLOCK) fp32: weighed sums of values by block, with
    # HAS_REST
    counts_ptr,  # (B * G, key blocks + 1) fp32: sums of weights by block, with HAS_REST
    weights_ptr,  # (B * G, key blocks * BLOCK) fp32: of the keys at places of codes, with HAS_REST
    scale,  # of attention, in base 2
    heads,
    groups,
    queries,
    keys,
    query_blocks,
    key_blocks,
    programs,  # those that write k, and as many that write v; then come those of shifts
    C: tl.constexpr,
    # LIMIT: the largest code: 127 or 7
    # KEY_STEPS: the largest multiple of its block's step that a key's step may be
):
    if C.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    if program < programs:
        row = (program // key_blocks).to(tl.int64)
        batch, head = row // groups, row % groups
        k_rows = (of_head(k, batch, head), k.row)
        mask_ptr = key_mask_ptr + batch * stride_mask_batch
        at = (row, program % key_blocks, key_blocks)
        made = (k_codes_ptr, k_scale_ptr)
        _write_keys(k_rows, mask_ptr, k_mean_ptr, made, at, keys, C)
    elif program < 2 * programs:
        row = ((program - programs) // key_blocks).to(tl.int64)
        batch, head = row // groups, row % groups
        v_rows = (of_head(v, batch, head), v.row)
        k_rows = (of_head(k, batch, head), k.row)
        mask_ptr = key_mask_ptr + batch * stride_mask_batch
        rests = (rest_ptr, counts_ptr, weights_ptr)
        at = (row, (program - programs) % key_blocks, key_blocks)
        made = (v_codes_ptr, v_scale_ptr)
        _write_values(v_rows, k_rows, mask_ptr, k_mean_ptr, made, rests, at, keys, C)
    elif C.WITH_LSE:
        ours = program - 2 * programs
        row = (ours // query_blocks).to(tl.int64)
        batch, head = row // heads, row % heads
        q_rows = (of_head(q, batch, head), q.row)
        place = (row, batch * groups + head // (heads // groups), ours % query_blocks)
        _write_shift(q_rows, k_mean_ptr, shift_ptr, scale, place, queries, C)


@triton.jit
def _quantized_attention_prepare_total_kernel(
    v_codes_ptr,  # (B * G, DEPTH_BLOCK, key blocks * BLOCK) E4M3
    v_scale_ptr,  # (B * G, 2, DEPTH_BLOCK) fp32: scale and mean
    rest_ptr,  # (B * G, key blocks + 1, DEPTH_BLOCK) fp32: weighed sums of values by block; then,
    # in steps of their scale, the codes' error in them, up to each block
    counts_ptr,  # (B * G, key blocks + 1) fp32: sums of weights by block
    totals_ptr,  # (B * G, key blocks + 1) fp32: the same up to each block
    weights_ptr,  # (B * G, key blocks * BLOCK) fp32
    key_blocks,
    C: tl.constexpr,
    # TOGETHER: blocks
):
    """Write, for each block of values, the sum of the values' rounding errors over this block and
    all earlier blocks.
    """
    if C.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * C.COLUMNS + tl.arange(0, C.COLUMNS)
    v_codes_ptr += (row * C.DEPTH_BLOCK + column)[:, None] * (key_blocks * C.BLOCK)
    v_scale_ptr += row * 2 * C.DEPTH_BLOCK
    weights_ptr += row * key_blocks * C.BLOCK
    rest_ptr += row * (key_blocks + 1) * C.DEPTH_BLOCK
    counts_ptr += row * (key_blocks + 1)
    totals_ptr += row * (key_blocks + 1)
    inverse = 1.0 / tl.load(v_scale_ptr + column)
    v_mean = tl.load(v_scale_ptr + C.DEPTH_BLOCK + column)
    so_far = tl.zeros((C.COLUMNS,), dtype=tl.float32)
    counted = 0.0
    tl.store(rest_ptr + column, so_far)
    tl.store(totals_ptr, counted, mask=part == 0)
    for start in tl.range(0, key_blocks, C.TOGETHER):
        place = start * C.BLOCK + tl.arange(0, C.TOGETHER * C.BLOCK)
        is_place = place < key_blocks * C.BLOCK
        codes = tl.load(v_codes_ptr + place[None, :], mask=is_place[None, :], other=0.0)
        weight = tl.load(weights_ptr + place, mask=is_place, other=0.0)
        codes = codes.to(tl.float32) * weight[None, :]
        codes = tl.sum(tl.reshape(codes, (C.COLUMNS, C.TOGETHER, C.BLOCK)), axis=2)
        block = start + 1 + tl.arange(0, C.TOGETHER)
        is_block = block <= key_blocks
        count = tl.load(counts_ptr + block, mask=is_block, other=0.0)
        until = tl.cumsum(count, axis=0) + counted
        tl.store(totals_ptr + block, until, mask=block < tl.where(part == 0, key_blocks + 1, 0))
        counted += tl.sum(count, axis=0)
        ptrs = rest_ptr + block[None, :] * C.DEPTH_BLOCK + column[:, None]
        rest = tl.load(ptrs, mask=is_block[None, :], other=0.0) - v_mean[:, None] * count[None, :]
        rest = rest * inverse[:, None] - codes
        until = tl.cumsum(rest, axis=1) + so_far[:, None]
        tl.store(ptrs, until, mask=is_block[None, :])
        so_far += tl.sum(rest, axis=1)


@triton.jit
def _quantized_attention_prepare_correct_kernel(
    k,  # (B, G, N, D) `key_tiles.Rows`
    key_mask_ptr,  # (B or 1, N) bytes, with HAS_KEY_MASK
    stride_mask_batch,
    k_mean_ptr,  # as `_quantized_attention_prepare_write_kernel` has it
    q_mean_ptr,  # (B * H, query blocks, 2, DEPTH_BLOCK) fp32, the first of two
    k_scale_ptr,  # (B * G, key blocks) fp32, with STARTS
    correction_ptr,  # (B * H, query blocks, key blocks * BLOCK) fp32
    scale,  # of attention, in base 2
    groups,
    keys,
    blocks,  # of queries, of all heads that share keys
    key_blocks,
    C: tl.constexpr,
    # MEANS: per program
    # CHANNELS: at a time
):
    """Write the products of the keys with the mean of each block of queries.

    The keys' mean is subtracted from the keys first. If STARTS is set, the int32 sums of the
    attention kernel start from these products. Only in this case, the products are divided by the
    scale of the keys' block.
    """
    if C.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts = (blocks + C.MEANS - 1) // C.MEANS
    row = (tl.program_id(0) // (key_blocks * parts)).to(tl.int64)
    key_block = tl.program_id(0) % key_blocks
    mean = tl.program_id(0) // key_blocks % parts * C.MEANS + tl.arange(0, C.MEANS)
    is_mean = mean < blocks
    place = key_block * C.BLOCK + tl.arange(0, C.BLOCK)
    batch, group = row // groups, row % groups
    is_place = _is_counted(place, keys, key_mask_ptr + batch * stride_mask_batch, C.HAS_KEY_MASK)
    k_rows = (of_head(k, batch, group), k.row)
    k_mean_ptr += row * 6 * C.DEPTH_BLOCK
    q_mean_ptr += (row * blocks + mean)[:, None] * 2 * C.DEPTH_BLOCK
    found = tl.zeros((C.MEANS, C.BLOCK), dtype=tl.float32)
    for start in tl.range(0, C.DEPTH_BLOCK, C.CHANNELS, num_stages=1):
        channel = start + tl.arange(0, C.CHANNELS)
        x = _load_tile(k_rows, place, is_place, channel, C)
        x = tl.where(is_place[:, None], x - tl.load(k_mean_ptr + channel)[None, :], 0.0)
        q = tl.load(q_mean_ptr + channel[None, :], mask=is_mean[:, None], other=0.0)
        if C.UPCAST:
            found += tl.dot(q, tl.trans(x), input_precision="ieee")
        else:
            found = tl.dot(q, tl.trans(x), found, input_precision="tf32")
    if C.STARTS:
        scale /= tl.load(k_scale_ptr + row * key_blocks + key_block)
    found *= scale
    places = (row * blocks + mean)[:, None] * (key_blocks * C.BLOCK) + place[None, :]
    tl.store(correction_ptr + places, found, mask=is_mean[:, None])
