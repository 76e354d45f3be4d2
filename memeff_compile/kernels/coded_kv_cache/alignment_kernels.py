# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Kernels for the linear maps that make the keys and values of two layers similar.

A row is the key vector, or the value vector, of one token and head. The maps are fitted from two
sums over tokens. One sum adds up the rows of each layer. The other sum adds up outer products of a
token's rows in the two layers, each row minus the mean row of its layer. Each program sums over
some tokens of one sequence and head and writes a partial sum. Another step adds the partial sums in
a fixed order. The kernels read rows directly in the model's tensors, without an fp32 copy. One
kernel applies the maps to a prompt's rows, a few groups of tokens at a time. This kernel writes the
results to a temporary fp32 buffer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import dot
from .append_codes_kernels import _load_rows


@triton.jit
def _tile(x, sequence, head, place, is_token, column):
    """Load some channels of some tokens' keys, or values, in one head; missing tokens become zeros.

    `x` is the tensor of keys or values with its strides, as in `key_tiles.Cells`. `place` contains
    the tokens' indices, and `column` the channels' indices."""
    x_ptr, stride_batch, stride_head, stride_token, stride_depth = x
    base = x_ptr + sequence * stride_batch + head * stride_head
    offs = place.to(tl.int64)[:, None] * stride_token + column[None, :] * stride_depth
    return tl.load(base + offs, mask=is_token[:, None], other=0.0)


@triton.jit
def _coded_kv_cache_alignment_sum_rows_kernel(
    lower_k,  # (B, KV_HEADS, count, D), as the others `key_tiles.Cells`
    lower_v,
    upper_k,
    upper_v,
    counted_ptr,  # (B, count) bytes
    sums_ptr,  # (parts, B, KV_HEADS, KINDS, D) fp32
    sizes,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    KINDS: tl.constexpr,  # how many of the four count
):
    kv_heads, count, share = sizes
    pair = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    sequence = pair // kv_heads
    head = pair % kv_heads
    column = tl.arange(0, DEPTH)
    rows = (lower_k, lower_v, upper_k, upper_v)
    out = sums_ptr + (part * tl.num_programs(0) + pair) * (KINDS * DEPTH)
    end = tl.minimum((part + 1) * share, count)
    for kind in tl.static_range(KINDS):
        total = tl.zeros((DEPTH,), dtype=tl.float32)
        for start in tl.range(part * share, end, TILE):
            place = start + tl.arange(0, TILE)
            is_token = place < end
            flags = tl.load(counted_ptr + sequence * count + place, mask=is_token, other=0)
            is_token = is_token & (flags != 0)
            x = _tile(rows[kind], sequence, head, place, is_token, column)
            total += tl.sum(x.to(tl.float32), axis=0)
        tl.store(out + kind * DEPTH + column, total)


@triton.jit
def _coded_kv_cache_alignment_multiply_rows_kernel(
    lower_rows,  # keys or values, (B, KV_HEADS, count, D), as the upper layer's `key_tiles.Cells`
    upper_rows,
    counted_ptr,  # (B, count) bytes
    slots_ptr,  # (B, KV_HEADS): the lower layer's head of each head of the upper
    lower_means_ptr,  # (B, KV_HEADS, KINDS, D), of keys or values on
    upper_means_ptr,
    products_ptr,  # (parts, B, KV_HEADS, D, D) fp32
    sizes,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the product, for a program
    TILE: tl.constexpr,
    KINDS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    kv_heads, count, share = sizes
    mine = tl.program_id(0).to(tl.int64)  # sequence and head of the upper layer
    part = tl.program_id(2).to(tl.int64)
    sequence = mine // kv_heads
    slot = tl.load(slots_ptr + mine).to(tl.int64)
    channel = tl.arange(0, DEPTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = sequence * kv_heads + slot
    lower_mean = tl.load(lower_means_ptr + pair * (KINDS * DEPTH) + column).to(tl.float32)
    upper_mean = tl.load(upper_means_ptr + mine * (KINDS * DEPTH) + channel).to(tl.float32)
    kind: tl.constexpr = upper_rows[0].dtype.element_ty
    found = tl.zeros((DEPTH, COLUMNS), dtype=tl.float32)
    end = tl.minimum((part + 1) * share, count)
    for start in tl.range(part * share, end, TILE):
        place = start + tl.arange(0, TILE)
        is_token = place < end
        flags = tl.load(counted_ptr + sequence * count + place, mask=is_token, other=0)
        is_token = is_token & (flags != 0)
        x = _tile(lower_rows, sequence, slot, place, is_token, column).to(tl.float32)
        y = _tile(upper_rows, sequence, mine % kv_heads, place, is_token, channel).to(tl.float32)
        x = tl.where(is_token[:, None], x - lower_mean[None, :], 0.0).to(kind)
        y = tl.where(is_token[:, None], y - upper_mean[None, :], 0.0).to(kind)
        found = dot(tl.trans(y), x, found, UPCAST)
    out = products_ptr + (part * tl.num_programs(0) + mine) * (DEPTH * DEPTH)
    tl.store(out + channel[:, None] * DEPTH + column[None, :], found)


@triton.jit
def _centre(rows, slot, row, mean_ptr, made, C: tl.constexpr, SHARE: tl.constexpr):
    """Subtract a mean vector from each key, or value, of a group of tokens.

    A group is the tokens that are encoded together. The result is written to `made`, (tokens, D) in
    fp32.
    """
    token = tl.arange(0, C.GROUP)
    for part in tl.static_range(C.DEPTH // SHARE):
        column = part * SHARE + tl.arange(0, SHARE)
        mean = tl.load(mean_ptr + column).to(tl.float32)
        x = _load_rows(rows, slot, column, row, 1, False) - mean[None, :]
        tl.store(made + token[:, None] * C.DEPTH + column[None, :], x)


@triton.jit
def _centre_and_turn(rows, slot, row, map_of, made, C: tl.constexpr, SHARE: tl.constexpr):
    """Subtract a mean vector from each key, or value, of a group of tokens, and rotate the results.

    A group is the tokens that are encoded together. To rotate, the function multiplies by the
    orthogonal matrix in `map_of`. The result is written to `made`, (tokens, D) in fp32.

    The kernel represents each fp32 number by the sum of two 16-bit numbers, so that tensor cores
    multiply it without rounding. Keys or values of 256 channels are rounded to 16 bits, because
    there are too few registers for the two 16-bit numbers.
    """
    mean_ptr, turn_ptr = map_of
    kind: tl.constexpr = turn_ptr.dtype.element_ty
    STEP: tl.constexpr = C.DEPTH if C.DEPTH < 32 else 32
    token = tl.arange(0, C.GROUP)
    for part in tl.static_range(C.DEPTH // SHARE):
        column = part * SHARE + tl.arange(0, SHARE)
        found = tl.zeros((C.GROUP, SHARE), dtype=tl.float32)
        for start in tl.range(0, C.DEPTH, STEP, num_stages=1):
            depth = start + tl.arange(0, STEP)
            mean = tl.load(mean_ptr + depth).to(tl.float32)
            x = _load_rows(rows, slot, depth, row, 1, False) - mean[None, :]
            turn = tl.load(turn_ptr + depth[:, None] * C.DEPTH + column[None, :])
            high = x.to(kind)
            found = dot(high, turn, found, C.UPCAST)
            if kind != tl.float32 and C.DEPTH <= 128:
                found = dot((x - high.to(tl.float32)).to(kind), turn, found, C.UPCAST)
        tl.store(made + token[:, None] * C.DEPTH + column[None, :], found)


@triton.jit
def _coded_kv_cache_alignment_align_rows_kernel(
    lower_k_ptr,  # (B, KV_HEADS, n, D), consecutive tokens are `k_rows` times D apart
    upper_k_ptr,
    stride_k_batch,
    stride_k_head,
    k_rows,
    lower_v_ptr,
    upper_v_ptr,
    stride_v_batch,
    stride_v_head,
    v_rows,
    maps,  # `layout.Maps`
    heads_ptr,  # (B, KV_HEADS) int32, the upper layer's head of each slot
    scratch_ptr,  # (4, B, KV_HEADS, n, D) fp32: keys and values of the lower layer, of the upper
    sizes,
    C: tl.constexpr,
):
    kv_heads, count = sizes
    pair = tl.program_id(0).to(tl.int64)
    sequence = pair // kv_heads
    head = tl.load(heads_ptr + pair).to(tl.int64)
    mine = sequence * kv_heads + head
    SHARE: tl.constexpr = C.DEPTH // 2
    first = tl.program_id(1).to(tl.int64) * C.GROUP
    place = first + tl.arange(0, C.GROUP)
    made = scratch_ptr + (pair * count + first) * C.DEPTH
    layer = tl.num_programs(0).to(tl.int64) * count * C.DEPTH
    k_base = sequence * stride_k_batch
    v_base = sequence * stride_v_batch
    lower_k = lower_k_ptr + k_base + (pair % kv_heads) * stride_k_head
    lower_v = lower_v_ptr + v_base + (pair % kv_heads) * stride_v_head
    upper_k = upper_k_ptr + k_base + head * stride_k_head
    upper_v = upper_v_ptr + v_base + head * stride_v_head
    lowers = (lower_k, lower_v)
    uppers = (upper_k, upper_v)
    rows = (k_rows * C.DEPTH, v_rows * C.DEPTH)
    for kind in tl.static_range(2):
        mean_ptr = maps.lower_means + (pair * 2 + kind) * C.DEPTH
        to = made + kind * layer
        _centre(lowers[kind], place, rows[kind], mean_ptr, to, C, SHARE)
        mean_ptr = maps.upper_means + (mine * 2 + kind) * C.DEPTH
        turn_ptr = maps.turns + (mine * 2 + kind) * (C.DEPTH * C.DEPTH)
        to = made + (2 + kind) * layer
        _centre_and_turn(uppers[kind], place, rows[kind], (mean_ptr, turn_ptr), to, C, SHARE)
