# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""The attention kernel of the implementation `tiles`: softmax attention over 8-bit codes.

Scores are products of int8 codes, which int32 represents exactly. The codes have one scale per
query and one per block of keys (or per key). These scales are folded into the exponent in base 2.
So a single multiply-add turns a score into the exponent of its softmax weight. Softmax weights are
at most 448, the largest E4M3 number, because an offset is subtracted from the running maximum.
Dividing by the sum of the weights cancels this offset.

The product of a tile's softmax weights and values is computed separately, and then added in fp32 to
the sum over the earlier tiles. The reason is that tensor cores which multiply 8-bit floats keep
only about 14 bits of a sum, too few for many keys.

After the softmax, the registers contain a tile's 8-bit weights in another order of keys than a
matrix product with v expects. So `prepare_kernels` stores the tokens of v in the order in which the
registers contain the softmax weights. `_reordered` computes this order.

With UPCAST, the kernel computes in fp32 with the same rounding, because Triton's interpreter has no
8-bit arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.key_tiles_kernels import bounds_of, edge_tile, ids_of, keys_shown, which_count
from .rounding_kernels import (
    MAGIC,
    MAGIC_VALUE,
    _codes_of_rows,
    _e4m3_in_fp32,
    _load_turned,
)

NOTHING = tl.constexpr(-1.0e30)  # below every score in base 2; finite, so differences are numbers
OFFSET = tl.constexpr(8.807)  # log2 of 448, rounded down
LEAST_COUNT = tl.constexpr(1.0e-30)
MOST_REST = tl.constexpr(16.0)  # half a step of E4M3 at 448
LEAST_OF_MEAN = tl.constexpr(
    128.0 / (14 << 18)
)  # of a mean's size, so that its scores fit in a start
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _reordered(weight, C: tl.constexpr):
    """Return a tile of 8-bit softmax weights with the keys in the order in which the values are
    stored.

    This order is such that no data moves between threads.
    """
    weight = tl.reshape(weight, (C.ROWS, C.KEYS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(weight, (0, 1, 3, 2, 4)), (C.ROWS, C.KEYS))


@triton.jit
def _load_codes(codes, at, stride, SIZES: tl.constexpr, C: tl.constexpr):
    """Load a tile of codes through a descriptor, or by addresses if there is no descriptor."""
    row, column = at
    if C.DESCRIBED:
        found = codes.load([row, column])
    else:
        rows = (row + tl.arange(0, SIZES[0])).to(tl.int64)[:, None] * stride
        found = tl.load(codes + rows + (column + tl.arange(0, SIZES[1]))[None, :])
    return found


@triton.jit
def _scores(q, k, start, C: tl.constexpr):
    """Return the scores q k^T of a tile of int8 codes, as fp32.

    - With MAGIC_SUM, the result is the scores plus the constant MAGIC_VALUE (1.5 * 2^23). The int32
      sums start from the bits of this fp32 number. So the bits of a sum are those of the fp32
      result.
    - With STARTS, the result is the scores plus `start`, and the int32 sums start from the bits of
      `start`. `start` is MAGIC_VALUE plus the products of the keys with the mean of a block of
      queries. These products are divided by the codes' scales, and are below 2^22 in absolute
      value.
    """
    if C.UPCAST:
        found = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee")
        if C.STARTS:
            found = found + start
        elif C.MAGIC_SUM:
            found = found + MAGIC_VALUE
    elif C.STARTS:
        start = start.to(tl.int32, bitcast=True)
        found = tl.dot(q, tl.trans(k), start, out_dtype=tl.int32).to(tl.float32, bitcast=True)
    elif C.MAGIC_SUM:
        start = tl.full((q.shape[0], k.shape[0]), MAGIC, dtype=tl.int32)
        found = tl.dot(q, tl.trans(k), start, out_dtype=tl.int32).to(tl.float32, bitcast=True)
    else:
        found = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32)
    return found


@triton.jit
def _weighted(weight, v, C: tl.constexpr):
    """Return the product of a tile's softmax weights with its values, which are stored as (depth,
    keys)."""
    is_8_bit: tl.constexpr = v.dtype == tl.float8e4nv
    if C.UPCAST:
        if is_8_bit:
            weight = _reordered(_e4m3_in_fp32(weight), C)
        else:
            weight = weight.to(tl.float16).to(tl.float32)
        found = tl.dot(weight, tl.trans(v).to(tl.float32), input_precision="ieee")
    elif is_8_bit:
        found = tl.dot(_reordered(weight.to(tl.float8e4nv), C), tl.trans(v))
    else:
        found = tl.dot(weight.to(tl.float16), tl.trans(v))
    return found


@triton.jit
def _attend_tile(sums, ours, tile, codes, told, C: tl.constexpr, MASKED: tl.constexpr):
    acc, total, largest = sums
    q, q_scale, query, query_id = ours
    k_codes, key_row, v_codes, value_row, k_scale_ptr, correction_ptr = codes
    mask_ptr, key_ids_ptr, span, keys, key_blocks = told
    key = tile * C.KEYS + tl.arange(0, C.KEYS)
    at = (key_row + tile * C.KEYS, 0)
    k = _load_codes(k_codes, at, C.DEPTH_BLOCK, (C.KEYS, C.DEPTH_BLOCK), C)
    start = 0.0
    if C.STARTS:
        start = tl.load(correction_ptr + key)[None, :] * (1.0 / q_scale)[:, None] + MAGIC_VALUE
    score = _scores(q, k, start, C)
    if C.SCALE_PER_KEY or (C.HAS_CORRECTION and not C.STARTS):
        if C.MAGIC_SUM:
            score = score - MAGIC_VALUE
        if C.SCALE_PER_KEY:
            score = score * tl.load(k_scale_ptr + key)[None, :]
        else:
            score = score * tl.load(k_scale_ptr + tile // (C.KEY_BLOCK // C.KEYS))
        score = score * q_scale[:, None]
        if C.HAS_CORRECTION:
            score = score + tl.load(correction_ptr + key)[None, :]
        scale = q_scale * 0.0 + 1.0
        shift = scale * 0.0
    else:
        scale = q_scale * tl.load(k_scale_ptr + tile // (C.KEY_BLOCK // C.KEYS))
        shift = scale * MAGIC_VALUE if C.MAGIC_SUM else scale * 0.0
    if MASKED:
        is_inside = key < keys
        is_key = is_inside
        if C.HAS_KEY_MASK:
            is_key = keys_shown(mask_ptr, key, is_inside)
        key_id = ids_of(key_ids_ptr, key, is_inside, C)
        counts = which_count((query, query_id), (key, key_id), is_key, span, 0, C)
        score = tl.where(counts, score, float("-inf"))
    higher = tl.maximum(largest, tl.max(score, axis=1) * scale - (shift + OFFSET))
    weight = tl.exp2(score * scale[:, None] - (higher + shift)[:, None])
    shrink = tl.exp2(largest - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    added = ()
    wide: tl.constexpr = C.DEPTH_BLOCK // C.PARTS_OF_DEPTH
    for part in tl.static_range(C.PARTS_OF_DEPTH):
        at = (value_row + part * wide, tile * C.KEYS)
        v = _load_codes(v_codes, at, key_blocks * C.KEY_BLOCK, (wide, C.KEYS), C)
        added += (acc[part] * shrink[:, None] + _weighted(weight, v, C),)
    return added, total, higher


@triton.jit
def _mean_rest(rest_ptr, counts_ptr, first, stop, depth, DEPTH_BLOCK: tl.constexpr):
    """Return the weighted mean rounding error of the values v in each channel.

    The mean is over the blocks of keys from `first` up to, not including, `stop`. A value usually
    has the weight 1. The queries may have a large common mean that is not subtracted from them.
    Then a value's weight is the softmax weight of its key for that common mean. For each block,
    `rest_ptr` points to the sum of weighted errors over all earlier blocks. `counts_ptr` points to
    the sum of the weights over the same blocks.
    """
    stop = tl.maximum(first, stop)
    rest = tl.load(rest_ptr + stop * DEPTH_BLOCK + depth)
    rest -= tl.load(rest_ptr + first * DEPTH_BLOCK + depth)
    count = tl.load(counts_ptr + stop) - tl.load(counts_ptr + first)
    mean = rest / tl.maximum(count, LEAST_COUNT)
    return tl.minimum(tl.maximum(mean, -MOST_REST), MOST_REST)


# Sizes stay variables even if they are 1: unrolled for a single key, Triton reads values too early.
@triton.jit(do_not_specialize=["ahead", "behind", "together", "keys", "key_blocks"])
def _quantized_attention_tiles_forward_kernel(
    q,  # (B, H, M, D) `key_tiles.Rows`, with CODES_QUERIES
    k_mean_ptr,  # (B * G, 6, D) fp32, the same: the last is the factors of queries
    q_mean_ptr,  # (B * H, query blocks, 2, D) fp32, the same, with HAS_CORRECTION: the first of two
    q_codes,  # (B * H * M, D) int8: room for them with CODES_QUERIES
    k_codes,  # (B * G * N, D) int8, N a multiple of KEY_BLOCK
    v_codes,  # (B * G * D, N) E4M3 in the order of `_reordered`, or fp16
    q_scale_ptr,  # (B * H, M) fp32, in base 2, with the scale of attention; not with CODES_QUERIES
    k_scale_ptr,  # (B * G, N / KEY_BLOCK) fp32, or (B * G, N) with SCALE_PER_KEY
    v_scale_ptr,  # (B * G, 2, D) fp32: scale and mean of each channel
    correction_ptr,  # (B * H, query blocks, N) fp32, with HAS_CORRECTION; with STARTS in steps of
    # keys
    shift_ptr,  # (B * H, M) fp32: the keys' mean's part in the scores, with WITH_LSE
    rest_ptr,  # (B * G, N / KEY_BLOCK + 1, D) fp32: rounding errors of the values of all
    # blocks up to each, weighed, in steps of their scale, with HAS_REST
    counts_ptr,  # (B * G, N / KEY_BLOCK + 1) fp32: sums of weights, the same
    tables,  # `key_tiles.Tables`
    bounds_ptr,  # (B, query tiles, 4), with HAS_BOUNDS
    out_ptr,  # (B, M, H, D)
    lse_ptr,  # (B, H, M) fp32, natural logarithm
    ahead,
    behind,
    together,  # heads whose tiles are computed at the same time
    heads,
    repeat,  # query heads per key head
    queries,
    keys,
    key_blocks,
    query_tiles,
    C: tl.constexpr,
    # DESCRIBED: codes are descriptors, not addresses
    # CODES_QUERIES: queries are coded here
    # LIMIT: the largest code of queries
    # FAR, NEAR: channels that are Hadamard transformed together
    # STARTS: sums of products start from the correction
    # EARLY: started while the kernel before may still be running
):
    # The last queries see most keys under causal masks: they start first.
    ours = tl.program_id(0) % (together * query_tiles)
    tile = query_tiles - 1 - ours // together
    row = tl.program_id(0) // (together * query_tiles) * together + ours % together
    batch = (row // heads).to(tl.int64)
    head = row % heads
    group = (row // repeat).to(tl.int64)
    query = tile * C.ROWS + tl.arange(0, C.ROWS)
    is_row = query < queries
    place = row.to(tl.int64) * queries + query
    if C.EARLY:
        tl.extra.cuda.gdc_wait()
    # through memory: otherwise a product would keep unloaded operands in registers
    if C.CODES_QUERIES:
        q_rows = (q.ptr + (batch * q.batch + head.to(tl.int64) * q.head), q.row)
        wide = tl.arange(0, C.DEPTH_BLOCK)
        factor_ptr = k_mean_ptr + (group * 6 + 5) * C.DEPTH_BLOCK
        blocks = (queries + C.QUERY_BLOCK - 1) // C.QUERY_BLOCK
        block = row.to(tl.int64) * blocks + tile // (C.QUERY_BLOCK // C.ROWS)
        q_mean_ptr += block * 2 * C.DEPTH_BLOCK
        q = _load_turned(q_rows, query, is_row, (q_mean_ptr, factor_ptr), C, C.HAS_CORRECTION)
        least = 0.0
        if C.STARTS:
            mean = tl.load(q_mean_ptr + wide) * tl.load(factor_ptr + wide)
            turned: tl.constexpr = C.DEPTH_BLOCK * C.FAR * C.NEAR
            least = tl.sqrt(tl.sum(mean * mean, axis=0) * turned) * LEAST_OF_MEAN
        made, q_scale = _codes_of_rows(q, least, C.LIMIT)
        q_places = q_codes + place[:, None] * C.DEPTH_BLOCK + wide[None, :]
        tl.store(q_places, made, mask=is_row[:, None])
        tl.debug_barrier()
        q = tl.load(q_places, mask=is_row[:, None], other=0)
    else:
        at = (row * queries + tile * C.ROWS, 0)
        q = _load_codes(q_codes, at, C.DEPTH_BLOCK, (C.ROWS, C.DEPTH_BLOCK), C)
        q_scale = tl.load(q_scale_ptr + place, mask=is_row, other=0.0)
    scales = key_blocks * C.KEY_BLOCK if C.SCALE_PER_KEY else key_blocks
    k_scale_ptr += group * scales
    if C.HAS_CORRECTION:
        blocks = (queries + C.QUERY_BLOCK - 1) // C.QUERY_BLOCK
        block = row.to(tl.int64) * blocks + tile // (C.QUERY_BLOCK // C.ROWS)
        correction_ptr += block * key_blocks * C.KEY_BLOCK
    key_row = (group * key_blocks * C.KEY_BLOCK).to(tl.int32)
    value_row = (group * C.DEPTH_BLOCK).to(tl.int32)
    mask_ptr = tables.key_mask + batch * tables.mask_batch
    key_ids_ptr = tables.key_ids + batch * tables.key_ids_batch
    query_id = ids_of(tables.query_ids + batch * tables.query_ids_batch, query, is_row, C)
    lengths, span, is_bound = (queries, keys), (ahead, behind), (C.HAS_AHEAD, C.HAS_BEHIND)
    first, full_first, full_stop, stop = bounds_of(
        bounds_ptr, batch, tile, query_tiles, lengths, span, (C.ROWS, C.KEYS), is_bound, C
    )
    codes = (k_codes, key_row, v_codes, value_row, k_scale_ptr, correction_ptr)
    told = (mask_ptr, key_ids_ptr, span, keys, key_blocks)
    largest = tl.full((C.ROWS,), NOTHING, dtype=tl.float32)
    total = tl.zeros((C.ROWS,), dtype=tl.float32)
    part_wide: tl.constexpr = C.DEPTH_BLOCK // C.PARTS_OF_DEPTH
    acc = ()
    for _ in tl.static_range(C.PARTS_OF_DEPTH):
        acc += (tl.zeros((C.ROWS, part_wide), dtype=tl.float32),)
    start, end = full_first, full_stop
    for MASKED in tl.static_range(2):  # complete tiles, then those at the edges
        if MASKED:
            start, end = 0, full_first - first + stop - full_stop
        for index in tl.range(start, end, num_stages=1 if MASKED else C.STAGES):
            other = index
            if MASKED:
                other = edge_tile(index, first, full_first, full_stop)
            sums, rows = (acc, total, largest), (q, q_scale, query, query_id)
            acc, total, largest = _attend_tile(sums, rows, other, codes, told, C, MASKED)
    v_scale_ptr += group * 2 * C.DEPTH_BLOCK
    is_empty = total == 0.0
    share = 1.0 / tl.where(is_empty, 1.0, total)
    places = ((batch * queries + query) * heads + head)[:, None] * C.DEPTH
    for part in tl.static_range(C.PARTS_OF_DEPTH):
        depth = part * part_wide + tl.arange(0, part_wide)
        v_scale = tl.load(v_scale_ptr + depth)
        v_mean = tl.load(v_scale_ptr + C.DEPTH_BLOCK + depth)
        if C.HAS_REST:
            v_mean += v_scale * _mean_rest(
                rest_ptr + group * (key_blocks + 1) * C.DEPTH_BLOCK,
                counts_ptr + group * (key_blocks + 1),
                first * C.KEYS // C.KEY_BLOCK,
                (stop * C.KEYS + C.KEY_BLOCK - 1) // C.KEY_BLOCK,
                depth,
                C.DEPTH_BLOCK,
            )
        out = (acc[part] * share[:, None]) * v_scale[None, :] + v_mean[None, :]
        out = tl.where(is_empty[:, None], 0.0, out)
        is_out = is_row[:, None]
        if C.DEPTH != C.DEPTH_BLOCK:
            is_out = is_out & (depth < C.DEPTH)[None, :]
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places + depth[None, :], out, mask=is_out)
    if C.WITH_LSE:
        shift = tl.load(shift_ptr + place, mask=is_row, other=0.0)
        lse = (largest + tl.log2(tl.where(is_empty, 1.0, total)) + shift) * LN_2
        tl.store(lse_ptr + place, tl.where(is_empty, float("-inf"), lse), mask=is_row)
