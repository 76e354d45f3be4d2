# ruff: noqa: ANN001, ANN202  (arguments of device code are pointers and scalars of Triton's own)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of the engine `tiles`: which tiles count, attention, and the two of its backward.

A tile of queries meets a tile of keys. Pairs in which no key counts are not visited; pairs in which
all do are computed without a look at the conditions. For one tile the pairs are four numbers: first
and stop of what is visited, and in between first and stop of what is complete. Positions alone give
them by arithmetic, tables (masks and ids) by a small kernel in front.

Softmax runs in base 2 on differences of raw numbers (products, or what tanh leaves of them), which
are then scaled: an exponent above 0 cannot arise however large the numbers are.

UPCAST widens operands to fp32: the interpreter, which cannot multiply bf16, sets it.

Axis letters: rows are queries, keys are keys; "ours" is the tile of a program, "others" what it
visits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from memeff_compile.kernels._triton.key_tiles_kernels import bounds_of, edge_tile, which_count
from memeff_compile.kernels._triton.products_kernels import dot, load_rows, store_rows

LOW = tl.constexpr(-1.0e38)  # below every score; finite, so that differences are numbers
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# --- scores ---------------------------------------------------------------------------------------


@triton.jit
def _raw(product, inner, C: tl.constexpr):
    """Return what softmax scales: the product, or tanh of it; within 2e-7 of tanh."""
    if C.SIGN != 1:
        product = product * C.SIGN
    if C.SOFTCAP:
        product = 1.0 - 2.0 / (tl.exp2(product * (2.0 * LOG2_E * inner)) + 1.0)
    return product


@triton.jit
def _weights(raw, sums, scale):
    """Return the weights of raw scores in the backward, which are 1 at most."""
    exponent = raw * scale - sums
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


# --- forward --------------------------------------------------------------------------------------


@triton.jit
def _attend_tile(
    acc,
    total,
    largest,
    q,
    query,
    query_id,
    tile,
    wide_zero,
    k_base,
    k_offs,
    stride_k_key,
    v_base,
    v_offs,
    stride_v_key,
    mask_ptr,
    key_ids_ptr,
    scale,
    inner,
    ahead,
    behind,
    keys,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    start = wide_zero + tile * C.KEYS
    key = tile * C.KEYS + tl.arange(0, C.KEYS)
    depth = tl.arange(0, C.DEPTH_BLOCK)
    is_inside = key < keys
    is_key = is_inside
    if MASKED and C.HAS_KEY_MASK:
        is_key = is_key & (tl.load(mask_ptr + key, mask=is_inside, other=0) != 0)
    # What hidden keys hold must not get in, not even times 0; for a mean they do count.
    is_read = is_inside if C.MEAN else is_key
    k_ptrs = k_base + start * stride_k_key + k_offs
    k = load_rows(k_ptrs, is_read, depth, C, MASKED)
    v_ptrs = v_base + start * stride_v_key + v_offs
    v = load_rows(v_ptrs, is_read, depth, C, MASKED)
    product = tl.zeros((q.shape[0], C.KEYS), dtype=tl.float32)
    raw = _raw(dot(q, tl.trans(k), product, C.UPCAST), inner, C)
    if MASKED:
        key_id = key
        if C.HAS_IDS:
            key_id = tl.load(key_ids_ptr + key, mask=is_inside, other=0)
        counts = which_count(
            query[:, None],
            key[None, :],
            is_key[None, :],
            query_id[:, None],
            key_id[None, :],
            ahead,
            behind,
            C,
        )
        if C.MEAN:
            # All weights of a query without keys are 2^(LOW - LOW); the first key wipes them out.
            raw = tl.where(counts, raw, LOW)
            raw = tl.where(is_inside[None, :], raw, float("-inf"))
        else:
            raw = tl.where(counts, raw, float("-inf"))
    higher = tl.maximum(largest, tl.max(raw, axis=1))
    weight = tl.exp2((raw - higher[:, None]) * scale)
    shrink = tl.exp2((largest - higher) * scale)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    acc = dot(weight.to(v.dtype), v, acc, C.UPCAST)
    return acc, total, higher


@triton.jit(do_not_specialize=["ahead", "behind"])
def _attention_kernel(
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
    query_ids_ptr,  # (B or 1, M), with HAS_IDS
    stride_query_ids_batch,
    key_ids_ptr,  # (B or 1, N), with HAS_IDS
    stride_key_ids_batch,
    bounds_ptr,  # (B, query tiles, 4), with HAS_BOUNDS
    out_ptr,  # (B, M, H, D)
    lse_ptr,  # (B, H, M) fp32, natural logarithm
    scale,  # of what _raw leaves, in base 2; above 0
    inner,  # of the product inside the softcap
    ahead,
    behind,
    batch_heads,  # B * H
    heads,
    repeat,  # query heads per key head
    queries,
    keys,
    query_tiles,
    C: tl.constexpr,
):
    # The last queries see most keys under causal masks: they start first.
    tile = query_tiles - 1 - tl.program_id(0) // batch_heads
    row = tl.program_id(0) % batch_heads
    batch = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    wide_zero = batch * 0  # makes addresses 64-bit numbers
    query = tile * C.ROWS + tl.arange(0, C.ROWS)
    is_row = query < queries
    depth = tl.arange(0, C.DEPTH_BLOCK)
    offs = tl.arange(0, C.KEYS)
    q = load_rows(
        q_ptr
        + batch * stride_q_batch
        + head * stride_q_head
        + (wide_zero + query)[:, None] * stride_q_query
        + depth[None, :],
        is_row,
        depth,
        C,
        True,
    )
    group = head // repeat
    k_base = k_ptr + batch * stride_k_batch + group * stride_k_head
    k_offs = offs[:, None] * stride_k_key + depth[None, :]
    v_base = v_ptr + batch * stride_v_batch + group * stride_v_head
    v_offs = offs[:, None] * stride_v_key + depth[None, :]
    mask_ptr = key_mask_ptr + batch * stride_mask_batch
    their_ids_ptr = key_ids_ptr + batch * stride_key_ids_batch
    query_id = query
    if C.HAS_IDS:
        query_id = tl.load(
            query_ids_ptr + batch * stride_query_ids_batch + query, mask=is_row, other=0
        )
    first, full_first, full_stop, stop = bounds_of(
        bounds_ptr,
        batch,
        tile,
        query_tiles,
        queries,
        keys,
        ahead,
        behind,
        C.ROWS,
        C.KEYS,
        C.HAS_AHEAD,
        C.HAS_BEHIND,
        C.HAS_BOUNDS,
    )
    largest = tl.full((C.ROWS,), LOW, dtype=tl.float32)
    total = tl.zeros((C.ROWS,), dtype=tl.float32)
    acc = tl.zeros((C.ROWS, C.DEPTH_BLOCK), dtype=tl.float32)
    start, end = full_first, full_stop
    for MASKED in tl.static_range(2):  # complete tiles, then those at the edges
        if MASKED:
            start, end = 0, full_first - first + stop - full_stop
        for index in tl.range(start, end, num_stages=C.STAGES):
            place = index
            if MASKED:
                place = edge_tile(index, first, full_first, full_stop)
            acc, total, largest = _attend_tile(
                acc,
                total,
                largest,
                q,
                query,
                query_id,
                place,
                wide_zero,
                k_base,
                k_offs,
                stride_k_key,
                v_base,
                v_offs,
                stride_v_key,
                mask_ptr,
                their_ids_ptr,
                scale,
                inner,
                ahead,
                behind,
                keys,
                C,
                MASKED,
            )
    divisor = tl.where(total == 0.0, 1.0, total)
    sums = (largest * scale + tl.log2(divisor)) * LN_2
    sums = tl.where(largest <= LOW, float("-inf"), sums)
    tl.store(lse_ptr + (batch * heads + head) * queries + query, sums, mask=is_row)
    store_rows(
        out_ptr
        + (batch * queries * heads + head) * C.DEPTH
        + (wide_zero + query)[:, None] * (heads * C.DEPTH)
        + depth[None, :],
        acc / divisor[:, None],
        is_row,
        depth,
        C,
    )


# --- backward: the gradient of the queries --------------------------------------------------------


@triton.jit
def _query_gradient_tile(
    acc,
    q,
    grad,
    sums,
    is_empty,
    delta,
    query,
    query_id,
    tile,
    wide_zero,
    k_base,
    k_offs,
    stride_k_key,
    v_base,
    v_offs,
    stride_v_key,
    mask_ptr,
    key_ids_ptr,
    scale,
    inner,
    ahead,
    behind,
    keys,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    start = wide_zero + tile * C.KEYS
    key = tile * C.KEYS + tl.arange(0, C.KEYS)
    depth = tl.arange(0, C.DEPTH_BLOCK)
    is_inside = key < keys
    is_key = is_inside
    if MASKED and C.HAS_KEY_MASK:
        is_key = is_key & (tl.load(mask_ptr + key, mask=is_inside, other=0) != 0)
    is_read = is_inside if C.MEAN else is_key
    k_ptrs = k_base + start * stride_k_key + k_offs
    k = load_rows(k_ptrs, is_read, depth, C, MASKED)
    v_ptrs = v_base + start * stride_v_key + v_offs
    v = load_rows(v_ptrs, is_read, depth, C, MASKED)
    zeros = tl.zeros((q.shape[0], C.KEYS), dtype=tl.float32)
    raw = _raw(dot(q, tl.trans(k), zeros, C.UPCAST), inner, C)
    weight = _weights(raw, sums[:, None], scale)
    if MASKED:
        key_id = key
        if C.HAS_IDS:
            key_id = tl.load(key_ids_ptr + key, mask=is_inside, other=0)
        counts = which_count(
            query[:, None],
            key[None, :],
            is_key[None, :],
            query_id[:, None],
            key_id[None, :],
            ahead,
            behind,
            C,
        )
        weight = tl.where(counts, weight, 0.0)
        if C.MEAN:
            weight = tl.where(is_empty[:, None] & is_inside[None, :], 1.0 / keys, weight)
    zeros = tl.zeros((q.shape[0], C.KEYS), dtype=tl.float32)
    slope = weight * (dot(grad, tl.trans(v), zeros, C.UPCAST) - delta[:, None])
    if C.SOFTCAP:
        slope = slope * (1.0 - raw * raw)
    return dot(slope.to(k.dtype), k, acc, C.UPCAST)


@triton.jit(do_not_specialize=["ahead", "behind"])
def _attention_query_gradient_kernel(
    grad_ptr,  # (B, H, M, D)
    stride_grad_batch,
    stride_grad_head,
    stride_grad_query,
    out_ptr,  # (B, H, M, D)
    stride_out_batch,
    stride_out_head,
    stride_out_query,
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
    key_mask_ptr,
    stride_mask_batch,
    query_ids_ptr,
    stride_query_ids_batch,
    key_ids_ptr,
    stride_key_ids_batch,
    bounds_ptr,  # (B, query tiles, 4), with HAS_BOUNDS
    lse_ptr,  # (B, H, M) fp32
    sums_ptr,  # (B, H, M) fp32, written: lse in base 2, infinity for a query without keys
    delta_ptr,  # (B, H, M) fp32, written: the sum of grad * out
    grad_q_ptr,  # (B, M, H, D)
    scale,
    inner,
    factor,  # of the scores, as it was given
    ahead,
    behind,
    batch_heads,
    heads,
    repeat,
    queries,
    keys,
    query_tiles,
    C: tl.constexpr,
):
    tile = query_tiles - 1 - tl.program_id(0) // batch_heads
    row = tl.program_id(0) % batch_heads
    batch = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    wide_zero = batch * 0
    query = tile * C.ROWS + tl.arange(0, C.ROWS)
    is_row = query < queries
    depth = tl.arange(0, C.DEPTH_BLOCK)
    offs = tl.arange(0, C.KEYS)
    place = (wide_zero + query)[:, None]
    out_ptrs = out_ptr + batch * stride_out_batch + head * stride_out_head
    out_ptrs = out_ptrs + place * stride_out_query + depth[None, :]
    out = load_rows(out_ptrs, is_row, depth, C, True)
    grad_ptrs = grad_ptr + batch * stride_grad_batch + head * stride_grad_head
    grad_ptrs = grad_ptrs + place * stride_grad_query + depth[None, :]
    grad = load_rows(grad_ptrs, is_row, depth, C, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    stat = (batch * heads + head) * queries + query
    tl.store(delta_ptr + stat, delta, mask=is_row)
    sums = tl.load(lse_ptr + stat, mask=is_row, other=float("inf"))
    is_empty = sums == float("-inf")
    sums = tl.where(is_empty, float("inf"), sums * LOG2_E)
    tl.store(sums_ptr + stat, sums, mask=is_row)
    q_ptrs = q_ptr + batch * stride_q_batch + head * stride_q_head
    q_ptrs = q_ptrs + place * stride_q_query + depth[None, :]
    q = load_rows(q_ptrs, is_row, depth, C, True)
    group = head // repeat
    k_base = k_ptr + batch * stride_k_batch + group * stride_k_head
    k_offs = offs[:, None] * stride_k_key + depth[None, :]
    v_base = v_ptr + batch * stride_v_batch + group * stride_v_head
    v_offs = offs[:, None] * stride_v_key + depth[None, :]
    mask_ptr = key_mask_ptr + batch * stride_mask_batch
    their_ids_ptr = key_ids_ptr + batch * stride_key_ids_batch
    query_id = query
    if C.HAS_IDS:
        query_id = tl.load(
            query_ids_ptr + batch * stride_query_ids_batch + query, mask=is_row, other=0
        )
    first, full_first, full_stop, stop = bounds_of(
        bounds_ptr,
        batch,
        tile,
        query_tiles,
        queries,
        keys,
        ahead,
        behind,
        C.ROWS,
        C.KEYS,
        C.HAS_AHEAD,
        C.HAS_BEHIND,
        C.HAS_BOUNDS,
    )
    acc = tl.zeros((C.ROWS, C.DEPTH_BLOCK), dtype=tl.float32)
    start, end = full_first, full_stop
    for MASKED in tl.static_range(2):  # complete tiles, then those at the edges
        if MASKED:
            start, end = 0, full_first - first + stop - full_stop
        for index in tl.range(start, end, num_stages=C.STAGES):
            other = index
            if MASKED:
                other = edge_tile(index, first, full_first, full_stop)
            acc = _query_gradient_tile(
                acc,
                q,
                grad,
                sums,
                is_empty,
                delta,
                query,
                query_id,
                other,
                wide_zero,
                k_base,
                k_offs,
                stride_k_key,
                v_base,
                v_offs,
                stride_v_key,
                mask_ptr,
                their_ids_ptr,
                scale,
                inner,
                ahead,
                behind,
                keys,
                C,
                MASKED,
            )
    store_rows(
        grad_q_ptr
        + (batch * queries * heads + head) * C.DEPTH
        + place * (heads * C.DEPTH)
        + depth[None, :],
        acc * factor,
        is_row,
        depth,
        C,
    )


# --- backward: the gradients of keys and values ---------------------------------------------------


@triton.jit
def _key_gradient_tile(
    grad_k,
    grad_v,
    k,
    v,
    key,
    is_key,
    key_id,
    tile,
    shared,  # which of the heads that share the keys
    wide_zero,
    q_base,
    q_offs,
    stride_q_head,
    stride_q_query,
    grad_base,
    grad_offs,
    stride_grad_head,
    stride_grad_query,
    query_ids_ptr,
    sums_ptr,
    delta_ptr,
    scale,
    inner,
    ahead,
    behind,
    queries,
    keys,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    start = wide_zero + tile * C.ROWS
    head = wide_zero + shared
    stat = head * queries
    query = tile * C.ROWS + tl.arange(0, C.ROWS)
    depth = tl.arange(0, C.DEPTH_BLOCK)
    is_row = query < queries
    q_ptrs = q_base + (head * stride_q_head + start * stride_q_query) + q_offs
    q = load_rows(q_ptrs, is_row, depth, C, MASKED)
    if MASKED:
        sums = tl.load(sums_ptr + stat + query, mask=is_row, other=float("inf"))
    else:
        sums = tl.load(sums_ptr + stat + query)
    zeros = tl.zeros((k.shape[0], C.ROWS), dtype=tl.float32)
    raw = _raw(dot(k, tl.trans(q), zeros, C.UPCAST), inner, C)
    weight = _weights(raw, sums[None, :], scale)
    if MASKED:
        query_id = query
        if C.HAS_IDS:
            query_id = tl.load(query_ids_ptr + query, mask=is_row, other=0)
        counts = which_count(
            query[None, :],
            key[:, None],
            is_key[:, None],
            query_id[None, :],
            key_id[:, None],
            ahead,
            behind,
            C,
        )
        weight = tl.where(counts, weight, 0.0)
        if C.MEAN:
            is_empty = (sums == float("inf")) & is_row
            weight = tl.where(is_empty[None, :] & (key < keys)[:, None], 1.0 / keys, weight)
    grad_ptrs = grad_base + (head * stride_grad_head + start * stride_grad_query) + grad_offs
    grad = load_rows(grad_ptrs, is_row, depth, C, MASKED)
    if C.WITH_V:
        grad_v = dot(weight.to(grad.dtype), grad, grad_v, C.UPCAST)
    if C.WITH_K:
        if MASKED:
            delta = tl.load(delta_ptr + stat + query, mask=is_row, other=0.0)
        else:
            delta = tl.load(delta_ptr + stat + query)
        # The sum starts at -delta, which need not be kept until the product is there.
        minus = tl.broadcast_to((-delta)[None, :], (k.shape[0], C.ROWS))
        slope = weight * dot(v, tl.trans(grad), minus, C.UPCAST)
        if C.SOFTCAP:
            slope = slope * (1.0 - raw * raw)
        grad_k = dot(slope.to(q.dtype), q, grad_k, C.UPCAST)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["ahead", "behind"])
def _attention_key_gradient_kernel(
    grad_ptr,  # (B, H, M, D)
    stride_grad_batch,
    stride_grad_head,
    stride_grad_query,
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
    key_mask_ptr,
    stride_mask_batch,
    query_ids_ptr,
    stride_query_ids_batch,
    key_ids_ptr,
    stride_key_ids_batch,
    bounds_ptr,  # (B, key tiles, 4), with HAS_BOUNDS
    sums_ptr,  # (B, H, M) fp32, in base 2: infinity for a query without keys
    delta_ptr,  # (B, H, M) fp32
    grad_k_ptr,  # (B, N, G, D)
    grad_v_ptr,  # (B, N, G, D)
    scale,
    inner,
    factor,
    ahead,
    behind,
    batch_groups,  # B * G
    groups,
    repeat,
    queries,
    keys,
    key_tiles,
    C: tl.constexpr,
):
    # The first keys are seen by most queries under causal masks: they start first.
    tile = tl.program_id(0) // batch_groups
    row = tl.program_id(0) % batch_groups
    batch = (row // groups).to(tl.int64)
    group = (row % groups).to(tl.int64)
    wide_zero = batch * 0
    key = tile * C.KEYS + tl.arange(0, C.KEYS)
    is_inside = key < keys
    is_key = is_inside
    depth = tl.arange(0, C.DEPTH_BLOCK)
    offs = tl.arange(0, C.ROWS)
    if C.HAS_KEY_MASK:
        shown = tl.load(key_mask_ptr + batch * stride_mask_batch + key, mask=is_inside, other=0)
        is_key = is_key & (shown != 0)
    key_id = key
    if C.HAS_IDS:
        key_id = tl.load(key_ids_ptr + batch * stride_key_ids_batch + key, mask=is_inside, other=0)
    is_read = is_inside if C.MEAN else is_key
    place = (wide_zero + key)[:, None]
    k_ptrs = k_ptr + batch * stride_k_batch + group * stride_k_head
    k_ptrs = k_ptrs + place * stride_k_key + depth[None, :]
    k = load_rows(k_ptrs, is_read, depth, C, True)
    v_ptrs = v_ptr + batch * stride_v_batch + group * stride_v_head
    v_ptrs = v_ptrs + place * stride_v_key + depth[None, :]
    v = load_rows(v_ptrs, is_read, depth, C, True)
    their_ids_ptr = query_ids_ptr + batch * stride_query_ids_batch
    first, full_first, full_stop, stop = bounds_of(
        bounds_ptr,
        batch,
        tile,
        key_tiles,
        keys,
        queries,
        behind,
        ahead,
        C.KEYS,
        C.ROWS,
        C.HAS_BEHIND,
        C.HAS_AHEAD,
        C.HAS_BOUNDS,
    )
    edges = full_first - first + stop - full_stop
    grad_k = tl.zeros((C.KEYS, C.DEPTH_BLOCK), dtype=tl.float32)
    grad_v = tl.zeros((C.KEYS, C.DEPTH_BLOCK), dtype=tl.float32)
    q_base = q_ptr + batch * stride_q_batch + group * repeat * stride_q_head
    q_offs = offs[:, None] * stride_q_query + depth[None, :]
    grad_base = grad_ptr + batch * stride_grad_batch + group * repeat * stride_grad_head
    grad_offs = offs[:, None] * stride_grad_query + depth[None, :]
    stat = (batch * groups + group) * repeat * queries
    # One loop over the tiles of all heads that share the keys: it stays filled between heads.
    whole = full_stop - full_first
    count = whole
    for MASKED in tl.static_range(2):
        if MASKED:
            count = edges
        for index in tl.range(0, count * repeat, num_stages=C.STAGES):
            other = full_first + index % count
            if MASKED:
                other = edge_tile(index % count, first, full_first, full_stop)
            grad_k, grad_v = _key_gradient_tile(
                grad_k,
                grad_v,
                k,
                v,
                key,
                is_key,
                key_id,
                other,
                index // count,
                wide_zero,
                q_base,
                q_offs,
                stride_q_head,
                stride_q_query,
                grad_base,
                grad_offs,
                stride_grad_head,
                stride_grad_query,
                their_ids_ptr,
                sums_ptr + stat,
                delta_ptr + stat,
                scale,
                inner,
                ahead,
                behind,
                queries,
                keys,
                C,
                MASKED,
            )
    target = (batch * keys * groups + group) * C.DEPTH
    offset = place * (groups * C.DEPTH) + depth[None, :]
    if C.WITH_K:
        grad_k_ptrs = grad_k_ptr + target + offset
        store_rows(grad_k_ptrs, grad_k * factor, is_inside, depth, C)
    if C.WITH_V:
        grad_v_ptrs = grad_v_ptr + target + offset
        store_rows(grad_v_ptrs, grad_v, is_inside, depth, C)
