# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels of the attention implementation named `tiles`: one for the forward pass, two
for the backward pass.

Each kernel program combines one tile of queries with several tiles of keys, or one tile of keys
with several tiles of queries. A program skips each pair of tiles in which the mask hides every key.
A program does not check the mask in pairs of tiles in which every key is visible. For each program,
four numbers describe the tiles that it visits:

- the first tile, and the first fully visible tile;
- the end of the fully visible tiles, and the end of all tiles.

If the mask depends only on positions, a kernel computes these four bounds of tile ranges itself. If
a call has sequence ids or a mask of keys, a small kernel first computes these four bounds of tile
ranges, and writes them to a table.

The softmax uses powers of 2. A kernel subtracts the largest raw score before scaling, so no
exponent is above 0.

With HAS_MASK, only a mask tensor decides which keys are visible. The module `mask_tiles` lists the
tiles of the mask that each program visits. A kernel skips tiles in which the mask hides every key.
A kernel does not read the mask in tiles in which the mask hides no key. If the mask is a bias that
is added to the scores (IS_BIAS), lse has two planes. The planes are the largest score, and the
logarithm of the sum of weights relative to that score. The sum of score and logarithm is not
stored, because the logarithm could be lost by rounding. This rounding occurs if the mask contains
the lowest number of a dtype.

With UPCAST, operands are widened to fp32, because Triton's interpreter cannot multiply bf16.

In variable names, "ours" is the tile of the program, and "others" are the tiles that the program
visits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.key_tiles_kernels import bounds_of, edge_tile, ids_of, keys_shown, which_count
from .._triton.products_kernels import dot, load_rows, of_head, store_rows
from .mask_tiles_kernels import corner_of, firsts_of, list_of, listed, places_in

LOW = tl.constexpr(-1.0e38)  # below every score; finite, so that differences are numbers
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _raw(product, inner, C: tl.constexpr):
    """Return raw scores: attention scores before the mask, up to a constant factor.

    `product` contains the products of queries and keys. If the mask is a bias, a raw score is the
    product times `inner`, the scale of attention scores. With neither a bias nor a softcap, a raw
    score is the product times the sign of this scale.

    No call has both a bias and a softcap. With a softcap, `inner` is the scale's absolute value
    divided by the softcap. A raw score is then the tanh of product * sign * `inner`, with an error
    below 2e-7.
    """
    if C.IS_BIAS:
        product = product * inner
    elif C.SIGN != 1:
        product = product * C.SIGN
    if C.SOFTCAP:
        product = 1.0 - 2.0 / (tl.exp2(product * (2.0 * LOG2_E * inner)) + 1.0)
    return product


@triton.jit
def _weights(raw, sums, scale):
    """Return the softmax weights, each at most 1, from raw scores, for the backward pass."""
    exponent = raw * scale - sums
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _mask_tile(mask, start, is_ours, is_other, C: tl.constexpr):
    """Load the tile of the mask for a tile of queries and a tile of keys.

    A program combines its own tile of queries with visited tiles of keys, or the other way around.
    The rows of the result are the positions of the own tile. The columns are the positions of the
    visited tile. `is_ours` and `is_other` tell which positions of the two tiles lie inside the
    tensors. Outside, the result is 0.
    """
    corner, places, stride = mask
    inside = is_ours[:, None] & is_other[None, :]
    return tl.load(corner + start * stride + places, mask=inside, other=0)


@triton.jit
def _masked(raw, found, is_other, C: tl.constexpr):
    """Return raw scores with the bias added, or with minus infinity for hidden keys."""
    if C.IS_BIAS:
        raw = tl.where(is_other[None, :], raw + found.to(tl.float32), float("-inf"))
    else:
        raw = tl.where(found != 0, raw, float("-inf"))
    return raw


@triton.jit
def _nth(index, following, visits, C: tl.constexpr, MASKED: tl.constexpr):
    """Return the numbers of the tiles that a program visits in this and in the next loop iteration.

    A program combines its own tile with the visited tiles. A tile's number is its position along
    the sequence. The loop visits the partly visible tiles if MASKED, otherwise the fully visible
    ones.

    With a mask tensor (C.HAS_MASK), the tile numbers come from a list. The last element of `visits`
    is then the first result, because the caller loaded this number one iteration earlier. The
    second result is the tile number at the index `following`. The caller passes the second result
    in `visits` of the next call. Without a mask tensor, the second result is unused. `index` is
    then the number of a fully visible tile, or the place among the partly visible tiles.
    """
    first, full_first, full_stop, list_ptr, others, ahead = visits
    other = index
    if C.HAS_MASK:
        other = ahead
        ahead = listed(following, list_ptr, others, MASKED)
    elif MASKED:
        other = edge_tile(index, first, full_first, full_stop)
    return other, ahead


@triton.jit
def _tiles_of(x, batch, head, offs, depth):
    """Return the pointer to the rows of one attention head, the offsets in a tile, and the stride
    between rows."""
    return of_head(x, batch, head), offs[:, None] * x.row + depth[None, :], x.row


@triton.jit
def _program(rows, tiles, C: tl.constexpr):
    """Return the number of a program's tile, and an index of its sequence and attention head.

    A tile contains consecutive queries or keys of one sequence. In the kernel for the gradients of
    keys and values, tile 0 contains the first keys. The other kernels reverse the returned number:
    0 stands for the tile with the last queries.

    If C.BY_HEAD, the programs of one head start together. These programs read the same keys and
    values, or the same queries and output gradients. Otherwise, the programs for the same tile of
    all heads start together.
    """
    if C.BY_HEAD:
        tile, row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    else:
        tile, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    return tile, row


@triton.jit
def _visits(tile, bounds_ptr, mask, lengths, span, SIZES, IS_BOUND, C: tl.constexpr):
    """Return the tiles that a program visits: it combines these tiles with its own tile.

    The first four results are tile numbers:

    - the first tile, and the first fully visible tile;
    - the end of the fully visible tiles, and the end of all tiles.

    With a mask tensor (C.HAS_MASK), the program visits the tiles of a list instead, which `mask`
    contains. The third result then counts the fully visible tiles, and the fourth all tiles of the
    list. The further results are a pointer to the list, the maximum length of the list, and a pair
    of tile numbers. The pair is the first fully visible tile and the first partly visible tile of
    the list.

    `tile` contains the batch index, a query head, the tile's number and the number of tiles. For a
    tile of keys, the query head is the first one that attends to these keys. `lengths` (numbers of
    queries or keys) and the tile sizes are pairs. The first number of a pair belongs to the
    program's own tile, the second to the visited tiles. `bounds_ptr`, `span` and `IS_BOUND` are
    arguments of `bounds_of`, which finds the range of visited tiles. `span` is the pair `(up,
    down)`. Position `p` of the own tile is combined with the positions from `p - down` to `p + up`.
    `IS_BOUND` tells which of `up` and `down` apply.
    """
    batch, head, number, count = tile
    first, full_first, full_stop, stop = bounds_of(
        bounds_ptr, batch, number, count, lengths, span, SIZES, IS_BOUND, C
    )
    list_ptr, others, ahead = bounds_ptr, 0, (full_first, full_first)
    if C.HAS_MASK:
        others = (lengths[1] + SIZES[1] - 1) // SIZES[1]
        list_ptr, full_stop, partial = list_of(mask, batch, head, number, others)
        ahead = firsts_of(list_ptr, others)
        first, full_first, stop = 0, 0, full_stop + partial
    return first, full_first, full_stop, stop, list_ptr, others, ahead


@triton.jit
def _scores(q, is_row, tile, seen, mask_ptr, C: tl.constexpr, MASKED: tl.constexpr):
    """Load a tile of keys and values, and compute the keys' raw scores.

    The function returns these scores as two matrices: before and after the mask is applied. It also
    returns three vectors with one element per key. The first two contain the key's position, and
    whether the key lies inside the tensor. The third tells whether the key lies inside the tensor
    and is not hidden by the mask of keys. The last two results are the loaded keys and the loaded
    values.
    """
    wide_zero, k, v, mask, scales, keys = seen
    start = wide_zero + tile * C.KEYS
    key = tile * C.KEYS + tl.arange(0, C.KEYS)
    depth = tl.arange(0, C.DEPTH_BLOCK)
    is_inside = key < keys
    is_key = is_inside
    if MASKED and C.HAS_KEY_MASK:
        is_key = keys_shown(mask_ptr, key, is_inside)
    # Hidden keys are not read: 0 times nan is nan. Only a mean of all values needs them.
    is_read = is_inside if C.MEAN else is_key
    k_base, k_offs, k_row = k
    v_base, v_offs, v_row = v
    k = load_rows(k_base + start * k_row + k_offs, is_read, depth, C, MASKED)
    v = load_rows(v_base + start * v_row + v_offs, is_read, depth, C, MASKED)
    if MASKED and C.HAS_MASK:
        found = _mask_tile(mask, start, is_row, is_inside, C)
    zeros = tl.zeros((q.shape[0], C.KEYS), dtype=tl.float32)
    raw = _raw(dot(q, tl.trans(k), zeros, C.UPCAST), scales[1], C)
    shown = raw
    if MASKED and C.HAS_MASK:
        shown = _masked(raw, found, is_inside, C)
    return raw, shown, (key, is_inside, is_key), k, v


@triton.jit
def _attend_tile(sums, ours, tile, seen, told, C: tl.constexpr, MASKED: tl.constexpr):
    acc, total, largest = sums
    q, query, is_row, query_id = ours
    mask_ptr, key_ids_ptr, span, scale = told
    _, raw, found, _, v = _scores(q, is_row, tile, seen, mask_ptr, C, MASKED)
    key, is_inside, is_key = found
    if MASKED and not C.HAS_MASK:
        key_id = ids_of(key_ids_ptr, key, is_inside, C)
        counts = which_count((query, query_id), (key, key_id), is_key, span, 0, C)
        if C.MEAN:
            # All weights of a query without keys are 2^(LOW - LOW); the first key wipes them out.
            raw = tl.where(counts, raw, LOW)
            raw = tl.where(is_inside[None, :], raw, float("-inf"))
        else:
            raw = tl.where(counts, raw, float("-inf"))
    higher = tl.maximum(largest, tl.max(raw, axis=1))
    top = higher
    if C.IS_BIAS:
        top = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2((raw - top[:, None]) * scale)
    shrink = tl.exp2((largest - top) * scale)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    acc = dot(weight.to(v.dtype), v, acc, C.UPCAST)
    return acc, total, higher


@triton.jit(do_not_specialize=["ahead", "behind"])
def _attention_tiles_forward_kernel(
    q,  # (B, H, M, D), as k and v `key_tiles.Rows`
    k,  # (B, G, N, D)
    v,  # (B, G, N, D)
    tables,  # `key_tiles.Tables`
    mask,  # `mask_tiles.Dense`, with HAS_MASK
    bounds_ptr,  # (B, query tiles, 4), with HAS_BOUNDS
    out_ptr,  # (B, M, H, D)
    lse_ptr,  # (B, H, M) fp32, natural logarithm; with IS_BIAS (2, B, H, M)
    scales,  # of the results of _raw, in base 2, above 0; of the product inside the softcap
    ahead,
    behind,
    sizes,  # B * H, heads, query heads per key head, queries, keys, query tiles
    C: tl.constexpr,
):
    batch_heads, heads, repeat, queries, keys, query_tiles = sizes
    # The last queries see most keys under causal masks: they start first.
    tile, row = _program(batch_heads, query_tiles, C)
    tile = query_tiles - 1 - tile
    batch = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    wide_zero = batch * 0  # makes addresses 64-bit numbers
    lengths, span, is_bound = (queries, keys), (ahead, behind), (C.HAS_AHEAD, C.HAS_BEHIND)
    which = (batch, head, tile, query_tiles)
    first, full_first, full_stop, stop, list_ptr, others, ahead_tiles = _visits(
        which, bounds_ptr, mask, lengths, span, (C.ROWS, C.KEYS), is_bound, C
    )
    query = tile * C.ROWS + tl.arange(0, C.ROWS)
    is_row = query < queries
    depth = tl.arange(0, C.DEPTH_BLOCK)
    offs = tl.arange(0, C.KEYS)
    q_ptrs = of_head(q, batch, head) + (wide_zero + query)[:, None] * q.row + depth[None, :]
    q = load_rows(q_ptrs, is_row, depth, C, True)
    group = head // repeat
    k = _tiles_of(k, batch, group, offs, depth)
    v = _tiles_of(v, batch, group, offs, depth)
    mask_ptr = tables.key_mask + batch * tables.mask_batch
    key_ids_ptr = tables.key_ids + batch * tables.key_ids_batch
    query_id = ids_of(tables.query_ids + batch * tables.query_ids_batch, query, is_row, C)
    corner = corner_of(mask, batch, head, wide_zero + tile * C.ROWS, wide_zero)
    places = places_in(mask, tl.arange(0, C.ROWS)[:, None], offs[None, :])
    seen = (wide_zero, k, v, (corner, places, mask.key), scales, keys)
    told = (mask_ptr, key_ids_ptr, span, scales[0])
    largest = tl.full((C.ROWS,), float("-inf") if C.IS_BIAS else LOW, dtype=tl.float32)
    total = tl.zeros((C.ROWS,), dtype=tl.float32)
    acc = tl.zeros((C.ROWS, C.DEPTH_BLOCK), dtype=tl.float32)
    start, end = full_first, full_stop
    for MASKED in tl.static_range(2):  # complete tiles, then those at the edges
        if MASKED:
            start, end = 0, full_first - first + stop - full_stop
        ahead_tile = ahead_tiles[MASKED]
        for index in tl.range(start, end, num_stages=C.STAGES):
            visits = (first, full_first, full_stop, list_ptr, others, ahead_tile)
            other, ahead_tile = _nth(index, index + 1, visits, C, MASKED)
            sums, ours = (acc, total, largest), (q, query, is_row, query_id)
            acc, total, largest = _attend_tile(sums, ours, other, seen, told, C, MASKED)
    scale = scales[0]
    divisor = tl.where(total == 0.0, 1.0, total)
    stat = (batch * heads + head) * queries + query
    if C.IS_BIAS:
        tl.store(lse_ptr + stat, largest, mask=is_row)
        plane = (wide_zero + batch_heads) * queries
        tl.store(lse_ptr + plane + stat, tl.log2(divisor) * LN_2, mask=is_row)
    else:
        sums = (largest * scale + tl.log2(divisor)) * LN_2
        sums = tl.where(largest <= LOW, float("-inf"), sums)
        tl.store(lse_ptr + stat, sums, mask=is_row)
    out_ptrs = out_ptr + (batch * queries * heads + head) * C.DEPTH
    out_ptrs = out_ptrs + (wide_zero + query)[:, None] * (heads * C.DEPTH) + depth[None, :]
    store_rows(out_ptrs, acc / divisor[:, None], is_row, depth, C)


@triton.jit
def _query_gradient_tile(acc, ours, tile, seen, told, C: tl.constexpr, MASKED: tl.constexpr):
    q, grad, top, sums, is_empty, delta, query, is_row, query_id = ours
    mask_ptr, key_ids_ptr, span, scale = told
    raw, shown, found, k, v = _scores(q, is_row, tile, seen, mask_ptr, C, MASKED)
    key, is_inside, is_key = found
    if C.IS_BIAS:
        shown = shown - top[:, None]
    weight = _weights(shown, sums[:, None], scale)
    if MASKED and not C.HAS_MASK:
        key_id = ids_of(key_ids_ptr, key, is_inside, C)
        counts = which_count((query, query_id), (key, key_id), is_key, span, 0, C)
        weight = tl.where(counts, weight, 0.0)
        if C.MEAN:
            weight = tl.where(is_empty[:, None] & is_inside[None, :], 1.0 / seen[5], weight)
    zeros = tl.zeros((q.shape[0], C.KEYS), dtype=tl.float32)
    slope = weight * (dot(grad, tl.trans(v), zeros, C.UPCAST) - delta[:, None])
    if C.SOFTCAP:
        slope = slope * (1.0 - raw * raw)
    return dot(slope.to(k.dtype), k, acc, C.UPCAST)


@triton.jit(do_not_specialize=["ahead", "behind"])
def _attention_tiles_query_gradient_kernel(
    grad,  # (B, H, M, D), as all of these `key_tiles.Rows`
    out,  # (B, H, M, D)
    q,  # (B, H, M, D)
    k,  # (B, G, N, D)
    v,  # (B, G, N, D)
    tables,
    mask,
    bounds_ptr,  # (B, query tiles, 4), with HAS_BOUNDS
    lse_ptr,  # (B, H, M) fp32
    sums_ptr,  # (B, H, M) fp32, written: lse in base 2, infinity for a query without keys
    delta_ptr,  # (B, H, M) fp32, written: the sum of grad * out
    grad_q_ptr,  # (B, M, H, D)
    scales,
    factor,  # of the scores, as the caller passed it
    ahead,
    behind,
    sizes,  # as of _attention_tiles_forward_kernel
    C: tl.constexpr,
):
    batch_heads, heads, repeat, queries, keys, query_tiles = sizes
    tile, row = _program(batch_heads, query_tiles, C)
    tile = query_tiles - 1 - tile
    batch = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    wide_zero = batch * 0
    lengths, span, is_bound = (queries, keys), (ahead, behind), (C.HAS_AHEAD, C.HAS_BEHIND)
    which = (batch, head, tile, query_tiles)
    first, full_first, full_stop, stop, list_ptr, others, ahead_tiles = _visits(
        which, bounds_ptr, mask, lengths, span, (C.ROWS, C.KEYS), is_bound, C
    )
    query = tile * C.ROWS + tl.arange(0, C.ROWS)
    is_row = query < queries
    depth = tl.arange(0, C.DEPTH_BLOCK)
    offs = tl.arange(0, C.KEYS)
    place = (wide_zero + query)[:, None]
    out_ptrs = of_head(out, batch, head) + place * out.row + depth[None, :]
    out = load_rows(out_ptrs, is_row, depth, C, True)
    grad_ptrs = of_head(grad, batch, head) + place * grad.row + depth[None, :]
    grad = load_rows(grad_ptrs, is_row, depth, C, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    stat = (batch * heads + head) * queries + query
    tl.store(delta_ptr + stat, delta, mask=is_row)
    top = tl.load(lse_ptr + stat, mask=is_row, other=float("inf"))
    is_empty = top == float("-inf")
    sums = top
    if C.IS_BIAS:
        plane = (wide_zero + batch_heads) * queries
        sums = tl.load(lse_ptr + plane + stat, mask=is_row, other=float("inf"))
        top = tl.where(is_empty, 0.0, top)
    sums = tl.where(is_empty, float("inf"), sums * LOG2_E)
    tl.store(sums_ptr + stat, sums, mask=is_row)
    q = load_rows(of_head(q, batch, head) + place * q.row + depth[None, :], is_row, depth, C, True)
    group = head // repeat
    k = _tiles_of(k, batch, group, offs, depth)
    v = _tiles_of(v, batch, group, offs, depth)
    mask_ptr = tables.key_mask + batch * tables.mask_batch
    key_ids_ptr = tables.key_ids + batch * tables.key_ids_batch
    query_id = ids_of(tables.query_ids + batch * tables.query_ids_batch, query, is_row, C)
    corner = corner_of(mask, batch, head, wide_zero + tile * C.ROWS, wide_zero)
    places = places_in(mask, tl.arange(0, C.ROWS)[:, None], offs[None, :])
    seen = (wide_zero, k, v, (corner, places, mask.key), scales, keys)
    told = (mask_ptr, key_ids_ptr, span, scales[0])
    acc = tl.zeros((C.ROWS, C.DEPTH_BLOCK), dtype=tl.float32)
    start, end = full_first, full_stop
    for MASKED in tl.static_range(2):  # complete tiles, then those at the edges
        if MASKED:
            start, end = 0, full_first - first + stop - full_stop
        ahead_tile = ahead_tiles[MASKED]
        for index in tl.range(start, end, num_stages=C.STAGES):
            visits = (first, full_first, full_stop, list_ptr, others, ahead_tile)
            other, ahead_tile = _nth(index, index + 1, visits, C, MASKED)
            ours = (q, grad, top, sums, is_empty, delta, query, is_row, query_id)
            acc = _query_gradient_tile(acc, ours, other, seen, told, C, MASKED)
    grad_q_ptrs = grad_q_ptr + (batch * queries * heads + head) * C.DEPTH
    grad_q_ptrs = grad_q_ptrs + place * (heads * C.DEPTH) + depth[None, :]
    store_rows(grad_q_ptrs, acc * factor, is_row, depth, C)


@triton.jit
def _key_gradient_tile(
    grads, ours, tile, shared, seen, mask, told, C: tl.constexpr, MASKED: tl.constexpr
):
    """Add the contribution of a tile of queries to the gradients of keys and values, for one query
    head."""
    grad_k, grad_v = grads
    k, v, key, is_key, key_id = ours
    wide_zero, q, grad, scales, queries, keys = seen
    query_ids_ptr, top_ptr, sums_ptr, delta_ptr, span = told
    scale, inner = scales
    start = wide_zero + tile * C.ROWS
    head = wide_zero + shared
    stat = head * queries
    query = tile * C.ROWS + tl.arange(0, C.ROWS)
    depth = tl.arange(0, C.DEPTH_BLOCK)
    is_row = query < queries
    q_base, q_offs, q_head, q_row = q
    q_ptrs = q_base + (head * q_head + start * q_row) + q_offs
    q = load_rows(q_ptrs, is_row, depth, C, MASKED)
    if MASKED:
        sums = tl.load(sums_ptr + stat + query, mask=is_row, other=float("inf"))
    else:
        sums = tl.load(sums_ptr + stat + query)
    if MASKED and C.HAS_MASK:
        found = _mask_tile(mask, start, key < keys, is_row, C)
    zeros = tl.zeros((k.shape[0], C.ROWS), dtype=tl.float32)
    raw = _raw(dot(k, tl.trans(q), zeros, C.UPCAST), inner, C)
    shown = raw
    if MASKED and C.HAS_MASK:
        shown = _masked(raw, found, is_row, C)
    if C.IS_BIAS:
        top = tl.load(top_ptr + stat + query, mask=is_row, other=0.0)
        shown = shown - tl.where(top == float("-inf"), 0.0, top)[None, :]
    weight = _weights(shown, sums[None, :], scale)
    if MASKED and not C.HAS_MASK:
        query_id = ids_of(query_ids_ptr, query, is_row, C)
        counts = which_count((query, query_id), (key, key_id), is_key, span, 1, C)
        weight = tl.where(counts, weight, 0.0)
        if C.MEAN:
            is_empty = (sums == float("inf")) & is_row
            weight = tl.where(is_empty[None, :] & (key < keys)[:, None], 1.0 / keys, weight)
    grad_base, grad_offs, grad_head, grad_row = grad
    grad_ptrs = grad_base + (head * grad_head + start * grad_row) + grad_offs
    grad = load_rows(grad_ptrs, is_row, depth, C, MASKED)
    if C.WITH_V:
        grad_v = dot(weight.to(grad.dtype), grad, grad_v, C.UPCAST)
    if C.WITH_K:
        if MASKED:
            delta = tl.load(delta_ptr + stat + query, mask=is_row, other=0.0)
        else:
            delta = tl.load(delta_ptr + stat + query)
        # The sum starts at -delta, so registers need not hold delta until the product is complete.
        minus = tl.broadcast_to((-delta)[None, :], (k.shape[0], C.ROWS))
        slope = weight * dot(v, tl.trans(grad), minus, C.UPCAST)
        if C.SOFTCAP:
            slope = slope * (1.0 - raw * raw)
        grad_k = dot(slope.to(q.dtype), q, grad_k, C.UPCAST)
    return grad_k, grad_v


@triton.jit
def _over_queries(
    grads, ours, visits, heads, seen, mask, told, C: tl.constexpr, MASKED: tl.constexpr
):
    """Add the contributions of all visited tiles of queries to the gradients of keys and values,
    for all query heads.

    One loop runs over the tiles of all heads, so the pipeline stays filled between heads.
    """
    count, first, full_first, full_stop, list_ptr, others, ahead = visits
    shared, number = heads
    grad_k, grad_v = grads
    for index in tl.range(0, count * number, num_stages=C.STAGES):
        visit = index % count
        if not MASKED:
            visit += full_first
        found = (first, full_first, full_stop, list_ptr, others, ahead)
        other, ahead = _nth(visit, (index + 1) % count, found, C, MASKED)
        grads, head = (grad_k, grad_v), shared + index // count
        grad_k, grad_v = _key_gradient_tile(grads, ours, other, head, seen, mask, told, C, MASKED)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["ahead", "behind"])
def _attention_tiles_key_gradient_kernel(
    grad,  # (B, H, M, D), as all of these `key_tiles.Rows`
    q,  # (B, H, M, D)
    k,  # (B, G, N, D)
    v,  # (B, G, N, D)
    tables,
    mask,
    bounds_ptr,  # (B, key tiles, 4), with HAS_BOUNDS
    lse_ptr,  # (B, H, M) fp32, with IS_BIAS
    sums_ptr,  # (B, H, M) fp32, in base 2: infinity for a query without keys
    delta_ptr,  # (B, H, M) fp32
    grad_k_ptr,  # (B, N, G, D)
    grad_v_ptr,  # (B, N, G, D)
    scales,
    factor,
    ahead,
    behind,
    sizes,  # B * G, groups, query heads per key head, queries, keys, key tiles
    C: tl.constexpr,
):
    batch_groups, groups, repeat, queries, keys, key_tiles = sizes
    # The first keys are seen by most queries under causal masks: they start first.
    tile, row = _program(batch_groups, key_tiles, C)
    batch = (row // groups).to(tl.int64)
    group = (row % groups).to(tl.int64)
    wide_zero = batch * 0
    lengths, span, is_bound = (keys, queries), (behind, ahead), (C.HAS_BEHIND, C.HAS_AHEAD)
    which = (batch, group * repeat, tile, key_tiles)
    first, full_first, full_stop, stop, list_ptr, others, ahead_tiles = _visits(
        which, bounds_ptr, mask, lengths, span, (C.KEYS, C.ROWS), is_bound, C
    )
    key = tile * C.KEYS + tl.arange(0, C.KEYS)
    is_inside = key < keys
    is_key = is_inside
    depth = tl.arange(0, C.DEPTH_BLOCK)
    offs = tl.arange(0, C.ROWS)
    if C.HAS_KEY_MASK:
        is_key = keys_shown(tables.key_mask + batch * tables.mask_batch, key, is_inside)
    key_id = ids_of(tables.key_ids + batch * tables.key_ids_batch, key, is_inside, C)
    is_read = is_inside if C.MEAN else is_key
    place = (wide_zero + key)[:, None]
    k_ptrs = of_head(k, batch, group) + place * k.row + depth[None, :]
    k = load_rows(k_ptrs, is_read, depth, C, True)
    v_ptrs = of_head(v, batch, group) + place * v.row + depth[None, :]
    v = load_rows(v_ptrs, is_read, depth, C, True)
    query_ids_ptr = tables.query_ids + batch * tables.query_ids_batch
    places = places_in(mask, offs[None, :], tl.arange(0, C.KEYS)[:, None])
    corner = corner_of(mask, batch, group * repeat, wide_zero, wide_zero + tile * C.KEYS)
    q_base = q.ptr + batch * q.batch + group * repeat * q.head
    q_offs = offs[:, None] * q.row + depth[None, :]
    grad_base = grad.ptr + batch * grad.batch + group * repeat * grad.head
    grad_offs = offs[:, None] * grad.row + depth[None, :]
    stat = (batch * groups + group) * repeat * queries
    ours = (k, v, key, is_key, key_id)
    q_tiles = (q_base, q_offs, q.head, q.row)
    grad_tiles = (grad_base, grad_offs, grad.head, grad.row)
    seen = (wide_zero, q_tiles, grad_tiles, scales, queries, keys)
    told = (query_ids_ptr, lse_ptr + stat, sums_ptr + stat, delta_ptr + stat, (ahead, behind))
    grad_k = tl.zeros((C.KEYS, C.DEPTH_BLOCK), dtype=tl.float32)
    grad_v = tl.zeros((C.KEYS, C.DEPTH_BLOCK), dtype=tl.float32)
    for MASKED in tl.static_range(2):
        if C.PER_HEAD:
            for shared in tl.range(0, repeat, num_stages=1):
                head = group * repeat + shared
                list_ptr, count, partial = list_of(mask, batch, head, tile, others)
                if MASKED:
                    count = partial
                ahead_tiles = firsts_of(list_ptr, others)
                visits = (count, 0, 0, 0, list_ptr, others, ahead_tiles[MASKED])
                of_this = (corner + (wide_zero + shared) * mask.head, places, mask.row)
                grad_k, grad_v = _over_queries(
                    (grad_k, grad_v), ours, visits, (shared, 1), seen, of_this, told, C, MASKED
                )
        else:
            count = full_stop - full_first
            if MASKED:
                count = full_first - first + stop - full_stop
            visits = (count, first, full_first, full_stop, list_ptr, others, ahead_tiles[MASKED])
            of_all = (corner, places, mask.row)
            grad_k, grad_v = _over_queries(
                (grad_k, grad_v), ours, visits, (0, repeat), seen, of_all, told, C, MASKED
            )
    target = (batch * keys * groups + group) * C.DEPTH
    offset = place * (groups * C.DEPTH) + depth[None, :]
    if C.WITH_K:
        store_rows(grad_k_ptr + target + offset, grad_k * factor, is_inside, depth, C)
    if C.WITH_V:
        store_rows(grad_v_ptr + target + offset, grad_v, is_inside, depth, C)
