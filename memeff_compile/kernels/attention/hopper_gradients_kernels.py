# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The backward kernels of attention on Hopper, written in Gluon: one warp loads tiles, and two
groups of four warps multiply.

One kernel computes the gradient of queries: each group of warps owns 64 queries, and both groups
share the tiles of keys and values. The other kernel computes the gradients of keys and values. Each
group of warps owns 64 keys. The group keeps in registers the sums for the gradients of these keys
and of their values. Both groups share the tiles of queries and of output gradients. The work is
divided into rounds. In each round, every program computes one tile. Tiles with the most work come
first, so that all programs get about the same work.

As in `hopper_kernels`, a program skips pairs of tiles in which no key is visible. A program checks
the masking conditions only in pairs in which some keys are hidden. If a call has sequence ids or a
mask of keys, each of the two kernels has a table, which `ranges.find` makes. One table has the
first and the last key that each query sees. The other table has the first and the last query that
sees each key.
"""

from __future__ import annotations

import triton.language as tl

from .._triton.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_kernels import (
    EITHER,
    GAPS,
    OWN,
    RANGE,
    WHOLE,
    _barriers,
    _bounds,
    _clear_hidden,
    _conditions_of,
    _hide,
    _is_dirty,
    _joint_ids_at,
    _nth,
    _place_of,
    _ranges_of,
    _rounds,
    _sequence_of,
    _sorted_tile,
    _tile_2d,
)

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
KEEPS_NAN: gl.constexpr = gl.constexpr(tl.PropagateNan.ALL)
# Arguments for whose values no kernel is compiled again.
VARYING = [
    *("ahead", "behind", "batch_heads", "heads", "repeat"),
    *("queries", "keys", "tiles", "padded", "section"),
]


@gluon.jit
def _weights(raw, sums, scale):
    """Return the softmax weights from raw scores; each weight is at most 1."""
    return gl.exp2(gl.minimum(raw * scale - sums, 0.0, propagate_nan=KEEPS_NAN))


@gluon.jit
def _query_tile(turn, ranges_ptr, work, C: gl.constexpr):
    """Return the tile of queries whose gradient a program computes in a given round.

    In each round, every program computes the gradient of one tile. Also return the sequence and the
    head of the tile of queries. The program combines this tile with tiles of keys. The last result
    describes the tiles of keys by five numbers:

    - the first tile of keys, the first complete one (without hidden keys), the end of the complete
      tiles;
    - the number of incomplete tiles, and the number of all these tiles of keys.
    """
    batch_heads, heads, _, queries, keys, tiles, _, span, section = work
    if C.HAS_BOUNDS:
        tile, batch, head, found = _sorted_tile(
            turn, ranges_ptr, batch_heads, heads, tiles, section
        )
        row = batch * heads + head
    else:
        tile, row = _place_of(turn, batch_heads, tiles, section)
        # The last queries see most keys under causal masks: they come first.
        tile = tiles - 1 - tile
        batch = row // heads
        head = row % heads
        found = _bounds(
            tile,
            (queries, keys),
            span,
            (C.ROWS, C.KEYS),
            (C.HAS_AHEAD, C.HAS_BEHIND),
        )
    return tile, row, batch, head, found


@gluon.jit
def _load_own_queries(descs, memory, bars, at, turn, C: gl.constexpr):
    """Load the queries, output gradients and outputs of a program's tile."""
    q_desc, grad_desc, out_desc, _, _ = descs
    q_memory, grad_memory, out_memory, _, _ = memory
    own_full, own_empty, _, _, _, _, _ = bars
    batch, head, start = at
    for part in gl.static_range(C.ROWS // OWN):
        full = own_full.index(part)
        place = [batch, head, start + part * OWN, 0]
        mbarrier.wait(own_empty.index(part), (turn & 1) ^ 1)
        mbarrier.expect(full, 6 * OWN * C.DEPTH_BLOCK)
        load_tile(q_desc, place, full, q_memory.index(part))
        load_tile(grad_desc, place, full, grad_memory.index(part))
        load_tile(out_desc, place, full, out_memory.index(part))


@gluon.jit
def _load_query_gradient(descs, memory, bars, ranges_ptr, work, C: gl.constexpr):
    """Load the program's tiles of queries, and the tiles of keys and values with which each tile of
    queries is combined.

    The first keys and values are loaded before the queries, because their shared memory becomes
    free earlier than the shared memory for queries.
    """
    _, _, _, k_desc, v_desc = descs
    _, _, _, k_memory, v_memory = memory
    _, _, k_full, k_empty, v_full, v_empty, _ = bars
    batch_heads, _, repeat, _, _, tiles, _, _, _ = work
    step = 0
    for turn in range(_rounds(batch_heads * tiles)):
        tile, _row, batch, head, found = _query_tile(turn, ranges_ptr, work, C)
        group = head // repeat
        count = found[4]
        own = (batch, head, tile * C.ROWS)
        early = gl.minimum(count, C.STAGES) - 1
        if count == 0:
            _load_own_queries(descs, memory, bars, own, turn, C)
        for visit in range(count):
            at = [batch, group, _nth(visit, found) * C.KEYS, 0]
            stage = step % C.STAGES
            k_bar = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
            mbarrier.expect(k_bar, 2 * C.KEYS * C.DEPTH_BLOCK)
            load_tile(k_desc, at, k_bar, k_memory.index(stage))
            v_bar = v_full.index(stage)
            mbarrier.wait(v_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
            mbarrier.expect(v_bar, 2 * C.KEYS * C.DEPTH_BLOCK)
            load_tile(v_desc, at, v_bar, v_memory.index(stage))
            step += 1
            if visit == early:
                _load_own_queries(descs, memory, bars, own, turn, C)


@gluon.jit
def _query_step(
    sums,
    step,
    tile,
    query,
    memory,
    bars,
    told,
    PART: gl.constexpr,
    IS_FIRST: gl.constexpr,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """Process one tile of keys: start three products, and compute the gradients of the tile's
    scores during the third.

    The three products are:

    - the queries times the tile's keys, which give the tile's scores;
    - the output gradients times the tile's values;
    - the gradients of the previous tile's scores, times the previous tile's keys.
    """
    acc, slope, turns = sums
    q_memory, grad_memory, _, k_memory, v_memory = memory
    _, _, k_full, k_empty, v_full, v_empty, in_turn = bars
    ours, total, delta = query
    scale, where = told
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DEPTH_BLOCK, 16])
    stage = step % C.STAGES
    before = (step + C.STAGES - 1) % C.STAGES
    q = _tile_2d(q_memory, OWN, C)
    grad = _tile_2d(grad_memory, OWN, C)
    k = _tile_2d(k_memory.index(stage), C.KEYS, C)
    v = _tile_2d(v_memory.index(stage), C.KEYS, C)
    k_before = _tile_2d(k_memory.index(before), C.KEYS, C)
    mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
    mbarrier.wait(v_full.index(stage), (step // C.STAGES) & 1)
    if MASKED != WHOLE and C.HAS_KEY_MASK and _is_dirty(tile, where):
        _clear_hidden(k, where, tile, C)
        _clear_hidden(v, where, tile, C)
    if C.IN_TURN:
        mbarrier.wait(in_turn.index(PART), (turns & 1) ^ (1 - PART))
    zeros = gl.zeros([OWN, C.KEYS], gl.float32, score_mma)
    raw = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    product = warpgroup_mma(grad, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not IS_FIRST:
        acc = warpgroup_mma(slope, k_before, acc, is_async=True)
    if C.IN_TURN:
        mbarrier.arrive(in_turn.index(1 - PART), count=1)
    # The joint ids are loaded during the products.
    key = tile * C.KEYS + gl.arange(0, C.KEYS, layout=gl.SliceLayout(0, score_mma))
    joint_ids = _joint_ids_at(key, where, MASKED)
    raw = warpgroup_mma_wait(1 if IS_FIRST else 2, deps=[raw])
    weight = _weights(raw, total[:, None], scale)
    if MASKED != WHOLE:
        weight = _hide(weight, 0.0, ours, key, joint_ids, where, 0, MASKED, C)
    if IS_FIRST:
        product = warpgroup_mma_wait(0, deps=[product])
    else:
        product = warpgroup_mma_wait(1, deps=[product])
    barrier()
    mbarrier.arrive(v_empty.index(stage), count=1)
    found = (weight * (product - delta[:, None])).to(k.dtype)
    if not IS_FIRST:
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(k_empty.index(before), count=1)
    slope = gl.convert_layout(found, gl.DotOperandLayout(0, out_mma, 2))
    return acc, slope, turns + 1


@gluon.jit
def _query_gradient(
    memory, bars, outs, ranges_ptr, work, scales, PART: gl.constexpr, C: gl.constexpr
):
    """Compute the gradient of the queries that one group of warps owns.

    In each tile of queries, a group owns 64 queries. For each query, the group also writes two
    numbers that the kernel for keys and values reads. The numbers are the log-sum-exp in base 2
    (infinity for a query without keys), and the sum of the output gradient times the output.
    """
    q_memory, grad_memory, out_memory, k_memory, _ = memory
    own_full, own_empty, _, k_empty, _, _, _ = bars
    grad_q_desc, lse_ptr, stats_ptr = outs
    scale, factor = scales
    batch_heads, heads, repeat, queries, keys, tiles, padded, span, _ = work
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DEPTH_BLOCK, 16])
    slope_layout: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, score_mma)
    step = 0
    turns = 0
    for turn in range(_rounds(batch_heads * tiles)):
        tile, row, batch, head, found = _query_tile(turn, ranges_ptr, work, C)
        edges, count = found[3], found[4]
        place = tile * C.ROWS + PART * OWN + gl.arange(0, OWN, layout=by_row)
        ours = (place, place, place, place, 0)
        told = (scale, (span, keys, ranges_ptr, 0, 0))
        if C.HAS_BOUNDS:
            mine = (batch, tile, tiles)
            ours, joint_ids_ptr, clean, dirty = _conditions_of(
                ranges_ptr, batch_heads // heads, mine, place, keys, (row, repeat), C
            )
            told = (scale, (span, keys, joint_ids_ptr, clean, dirty))
        wide = gl.to_tensor(row).to(gl.int64)
        total = gl.load(lse_ptr + wide * queries + place, mask=place < queries, other=float("inf"))
        total = gl.where(total == float("-inf"), float("inf"), total * LOG2_E)
        mbarrier.wait(own_full.index(PART), turn & 1)
        grad = _tile_2d(grad_memory, OWN, C).load(out_mma).to(gl.float32)
        out = _tile_2d(out_memory, OWN, C).load(out_mma).to(gl.float32)
        delta = gl.convert_layout(gl.sum(grad * out, 1), by_row)
        gl.store(stats_ptr + wide * (2 * padded) + place, total)
        gl.store(stats_ptr + wide * (2 * padded) + padded + place, delta)
        acc = gl.zeros([OWN, C.DEPTH_BLOCK], gl.float32, out_mma)
        if count > 0:
            query = (ours, total, delta)
            slope = gl.zeros([OWN, C.KEYS], q_memory.dtype, slope_layout)
            acc, slope, turns = _query_step(
                (acc, slope, turns),
                step,
                _nth(0, found),
                query,
                memory,
                bars,
                told,
                PART,
                True,
                EITHER,
                C,
            )
            step += 1
            ranged = edges
            if C.HAS_BOUNDS:
                ranged = (1 - ours[4]) * edges
                for visit in range(1, ours[4] * edges):
                    other = _nth(visit, found)
                    sums = (acc, slope, turns)
                    acc, slope, turns = _query_step(
                        sums, step, other, query, memory, bars, told, PART, False, GAPS, C
                    )
                    step += 1
            for visit in range(1, ranged):
                other = _nth(visit, found)
                sums = (acc, slope, turns)
                acc, slope, turns = _query_step(
                    sums, step, other, query, memory, bars, told, PART, False, RANGE, C
                )
                step += 1
            for visit in range(gl.maximum(edges, 1), count):
                other = _nth(visit, found)
                sums = (acc, slope, turns)
                acc, slope, turns = _query_step(
                    sums, step, other, query, memory, bars, told, PART, False, WHOLE, C
                )
                step += 1
            before = (step + C.STAGES - 1) % C.STAGES
            k = _tile_2d(k_memory.index(before), C.KEYS, C)
            acc = warpgroup_mma(slope, k, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(k_empty.index(before), count=1)
        # The outputs are no longer needed: their memory takes the result.
        _tile_2d(out_memory, OWN, C).store((acc * factor).to(q_memory.dtype))
        fence_async_shared()
        barrier()
        store_tile(grad_q_desc, [batch, head, tile * C.ROWS + PART * OWN, 0], out_memory)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(own_empty.index(PART), count=1)


@gluon.jit
def _query_gradient_first(memory, bars, outs, ranges_ptr, work, scales, C: gl.constexpr):
    own = (memory[0].index(0), memory[1].index(0), memory[2].index(0), memory[3], memory[4])
    _query_gradient(own, bars, outs, ranges_ptr, work, scales, 0, C)


@gluon.jit
def _query_gradient_second(memory, bars, outs, ranges_ptr, work, scales, C: gl.constexpr):
    own = (memory[0].index(1), memory[1].index(1), memory[2].index(1), memory[3], memory[4])
    _query_gradient(own, bars, outs, ranges_ptr, work, scales, 1, C)


@gluon.jit(do_not_specialize=VARYING)
def _attention_hopper_gradients_query_kernel(
    q_desc,  # (B, H, M, D), block 1 x 1 x OWN x DEPTH_BLOCK
    grad_desc,  # likewise, the gradient of out
    out_desc,  # likewise
    k_desc,  # (B, G, N, D), block 1 x 1 x KEYS x DEPTH_BLOCK
    v_desc,  # likewise
    grad_q_desc,  # as q_desc, written
    ranges_ptr,  # the result of `ranges.find`, with HAS_BOUNDS
    lse_ptr,  # (B, H, M) fp32
    stats_ptr,  # (B, H, 2, padded) fp32, written: lse in base 2, and the sum of grad * out
    scale,  # of the products, in base 2, above 0
    factor,  # of the scores, as the caller passed it
    ahead,
    behind,
    batch_heads,  # rows of tiles: B * H
    heads,
    repeat,  # query heads per key head
    queries,
    keys,
    tiles,  # of queries
    padded,  # queries in whole tiles
    section,  # rows whose tiles are computed at the same time
    C: gl.constexpr,
):
    PARTS: gl.constexpr = C.ROWS // OWN
    span = (ahead, behind)
    work = (batch_heads, heads, repeat, queries, keys, tiles, padded, span, section)
    dtype: gl.constexpr = q_desc.dtype
    own: gl.constexpr = [PARTS, 1, 1, OWN, C.DEPTH_BLOCK]
    q_memory = gl.allocate_shared_memory(dtype, own, q_desc.layout)
    grad_memory = gl.allocate_shared_memory(dtype, own, q_desc.layout)
    out_memory = gl.allocate_shared_memory(dtype, own, q_desc.layout)
    k_memory = gl.allocate_shared_memory(
        dtype, [C.STAGES, 1, 1, C.KEYS, C.DEPTH_BLOCK], k_desc.layout
    )
    v_memory = gl.allocate_shared_memory(
        dtype, [C.STAGES, 1, 1, C.KEYS, C.DEPTH_BLOCK], v_desc.layout
    )
    own_full = _barriers(PARTS, 1)
    own_empty = _barriers(PARTS, 1)
    k_full = _barriers(C.STAGES, 1)
    k_empty = _barriers(C.STAGES, PARTS)
    v_full = _barriers(C.STAGES, 1)
    v_empty = _barriers(C.STAGES, PARTS)
    in_turn = k_full
    if C.IN_TURN:
        in_turn = _barriers(2, 1)
    fence_async_shared()
    bars = (own_full, own_empty, k_full, k_empty, v_full, v_empty, in_turn)
    memory = (q_memory, grad_memory, out_memory, k_memory, v_memory)
    descs = (q_desc, grad_desc, out_desc, k_desc, v_desc)
    outs = (grad_q_desc, lse_ptr, stats_ptr)
    scales = (scale, factor)
    gl.warp_specialize(
        [
            (_query_gradient_first, (memory, bars, outs, ranges_ptr, work, scales, C)),
            (_query_gradient_second, (memory, bars, outs, ranges_ptr, work, scales, C)),
            (_load_query_gradient, (descs, memory, bars, ranges_ptr, work, C)),
        ],
        [4, 1],
        [C.REGISTERS, C.LOADER_REGISTERS],
    )


@gluon.jit
def _key_tile(turn, ranges_ptr, work, C: gl.constexpr):
    """Return the tile of keys whose gradients a program computes in a given round.

    In each round, every program computes the gradients of one tile of keys and of their values. The
    tile's sequence and key head are returned too, first as one combined index, then as two indices.
    The program combines the tile of keys with tiles of queries. The last result describes the tiles
    of queries by five numbers:

    - the first tile of queries, the first complete one (without hidden keys), the end of the
      complete tiles;
    - the number of incomplete tiles, and the number of all these tiles of queries.
    """
    batch_groups, groups, _, queries, keys, tiles, _, span, section = work
    if C.HAS_BOUNDS:
        tile, batch, group, found = _sorted_tile(
            turn, ranges_ptr, batch_groups, groups, tiles, section
        )
        row = batch * groups + group
    else:
        # The first keys are seen by most queries under causal masks: they come first.
        tile, row = _place_of(turn, batch_groups, tiles, section)
        batch = row // groups
        group = row % groups
        found = _bounds(
            tile,
            (keys, queries),
            (span[1], span[0]),
            (C.KEYS, C.ROWS),
            (C.HAS_BEHIND, C.HAS_AHEAD),
        )
    return tile, row, batch, group, found


@gluon.jit
def _load_own_keys(descs, memory, bars, at, turn, C: gl.constexpr):
    """Load the keys and values of a program's tile."""
    k_desc, v_desc, _, _ = descs
    k_memory, v_memory, _, _, _, _ = memory
    own_full, own_empty, _, _ = bars
    batch, group, start = at
    for part in gl.static_range(C.KEYS // OWN):
        full = own_full.index(part)
        place = [batch, group, start + part * OWN, 0]
        mbarrier.wait(own_empty.index(part), (turn & 1) ^ 1)
        mbarrier.expect(full, 4 * OWN * C.DEPTH_BLOCK)
        load_tile(k_desc, place, full, k_memory.index(part))
        load_tile(v_desc, place, full, v_memory.index(part))


@gluon.jit
def _load_key_gradient(descs, memory, bars, stats_ptr, ranges_ptr, work, C: gl.constexpr):
    """Load the program's tiles of keys and values, and the tiles of those queries that see the
    program's keys.

    For each query, also load the output gradient, the log-sum-exp, and the sum of the output times
    the output gradient.
    """
    _, _, q_desc, grad_desc = descs
    _, _, q_memory, grad_memory, sums_memory, delta_memory = memory
    _, _, full, empty = bars
    batch_groups, _, repeat, _, _, tiles, padded, _, _ = work
    lanes: gl.constexpr = gl.BlockedLayout([C.ROWS // 32], [32], [1], [0])
    offs = gl.arange(0, C.ROWS, layout=lanes)
    step = 0
    for turn in range(_rounds(batch_groups * tiles)):
        tile, row, batch, group, found = _key_tile(turn, ranges_ptr, work, C)
        count = found[4]
        every = count * repeat
        own = (batch, group, tile * C.KEYS)
        early = gl.minimum(every, C.STAGES) - 1
        if every == 0:
            _load_own_keys(descs, memory, bars, own, turn, C)
        for index in range(every):
            shared = index // count
            start = _nth(index - shared * count, found) * C.ROWS
            of_row = stats_ptr + gl.to_tensor(row * repeat + shared).to(gl.int64) * (2 * padded)
            sums = gl.load(of_row + start + offs)
            delta = gl.load(of_row + padded + start + offs)
            at = [batch, group * repeat + shared, start, 0]
            stage = step % C.STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 4 * C.ROWS * C.DEPTH_BLOCK)
            load_tile(q_desc, at, bar, q_memory.index(stage))
            load_tile(grad_desc, at, bar, grad_memory.index(stage))
            sums_memory.index(stage).store(sums)
            delta_memory.index(stage).store(delta)
            barrier()
            mbarrier.arrive(bar, count=1)
            step += 1
            if index == early:
                _load_own_keys(descs, memory, bars, own, turn, C)


@gluon.jit
def _key_step(
    sums,
    step,
    tile,
    key,
    memory,
    bars,
    told,
    PART: gl.constexpr,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """Add the contribution of a tile of queries to the gradients of 64 keys and their values.

    One group of warps owns these keys.
    """
    acc_k, acc_v = sums
    k_memory, v_memory, q_memory, grad_memory, sums_memory, delta_memory = memory
    _, _, full, empty = bars
    scale, where = told
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.ROWS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DEPTH_BLOCK, 16])
    by_query: gl.constexpr = gl.SliceLayout(0, score_mma)
    operand: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    stage = step % C.STAGES
    k = _tile_2d(k_memory, OWN, C)
    v = _tile_2d(v_memory, OWN, C)
    q = _tile_2d(q_memory.index(stage), C.ROWS, C)
    grad = _tile_2d(grad_memory.index(stage), C.ROWS, C)
    mbarrier.wait(full.index(stage), (step // C.STAGES) & 1)
    zeros = gl.zeros([OWN, C.ROWS], gl.float32, score_mma)
    raw = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    product = warpgroup_mma(v, grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
    total = sums_memory.index(stage).load(by_query)
    # The joint ids are loaded during the products.
    query = tile * C.ROWS + gl.arange(0, C.ROWS, layout=by_query)
    joint_ids = _joint_ids_at(query, where, MASKED)
    raw = warpgroup_mma_wait(1, deps=[raw])
    weight = _weights(raw, total[None, :], scale)
    if MASKED != WHOLE:
        weight = _hide(weight, 0.0, key, query, joint_ids, where, 1, MASKED, C)
    if C.EARLY:
        # The product with the weights starts before the slopes are known.
        p = gl.convert_layout(weight.to(q.dtype), operand)
        acc_v = warpgroup_mma(p, grad, acc_v, is_async=True)
        delta = delta_memory.index(stage).load(by_query)
        product = warpgroup_mma_wait(1, deps=[product])
        slope = weight * (product - delta[None, :])
        ds = gl.convert_layout(slope.to(q.dtype), operand)
        acc_k = warpgroup_mma(ds, q, acc_k, is_async=True)
    else:
        delta = delta_memory.index(stage).load(by_query)
        product = warpgroup_mma_wait(0, deps=[product])
        slope = weight * (product - delta[None, :])
        p = gl.convert_layout(weight.to(q.dtype), operand)
        acc_v = warpgroup_mma(p, grad, acc_v, is_async=True)
        ds = gl.convert_layout(slope.to(q.dtype), operand)
        acc_k = warpgroup_mma(ds, q, acc_k, is_async=True)
    acc_v, acc_k = warpgroup_mma_wait(0, deps=[acc_v, acc_k])
    barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    return acc_k, acc_v


@gluon.jit
def _key_gradient(
    memory, bars, outs, ranges_ptr, work, scales, PART: gl.constexpr, C: gl.constexpr
):
    """Compute the gradients of the keys and values that one group of warps owns.

    In each tile of keys, a group owns 64 keys and their values.
    """
    k_memory, v_memory, _, _, _, _ = memory
    own_full, own_empty, _, _ = bars
    grad_k_desc, grad_v_desc = outs
    scale, factor = scales
    batch_groups, groups, repeat, queries, keys, tiles, _, span, _ = work
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.ROWS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DEPTH_BLOCK, 16])
    batches = batch_groups // groups
    step = 0
    for turn in range(_rounds(batch_groups * tiles)):
        tile, _row, batch, group, found = _key_tile(turn, ranges_ptr, work, C)
        edges, count = found[3], found[4]
        start = tile * C.KEYS + PART * OWN
        place = start + gl.arange(0, OWN, layout=gl.SliceLayout(1, score_mma))
        key = (place, place, place, place, 0)
        told = (scale, (span, keys, ranges_ptr, 0, 0))
        if C.HAS_BOUNDS:
            own_ptr, _flags_ptr = _sequence_of(
                ranges_ptr, batches, batch, tiles, queries, C.KEYS, C.ROWS
            )
            low, high, joint_id, has_gaps, joint_ids_ptr = _ranges_of(
                ranges_ptr, own_ptr, batch, tile, tiles, place, C.KEYS
            )
            key = (place, low, high, joint_id, has_gaps)
            told = (scale, (span, keys, joint_ids_ptr, 0, 0))
        acc_k = gl.zeros([OWN, C.DEPTH_BLOCK], gl.float32, out_mma)
        acc_v = gl.zeros([OWN, C.DEPTH_BLOCK], gl.float32, out_mma)
        mbarrier.wait(own_full.index(PART), turn & 1)
        ranged = edges
        if C.HAS_BOUNDS:
            ranged = (1 - key[4]) * edges
        for _shared in range(repeat):
            if C.HAS_BOUNDS:
                for visit in range(key[4] * edges):
                    other = _nth(visit, found)
                    sums = (acc_k, acc_v)
                    acc_k, acc_v = _key_step(
                        sums, step, other, key, memory, bars, told, PART, GAPS, C
                    )
                    step += 1
            for visit in range(ranged):
                other = _nth(visit, found)
                sums = (acc_k, acc_v)
                acc_k, acc_v = _key_step(sums, step, other, key, memory, bars, told, PART, RANGE, C)
                step += 1
            for visit in range(edges, count):
                other = _nth(visit, found)
                sums = (acc_k, acc_v)
                acc_k, acc_v = _key_step(sums, step, other, key, memory, bars, told, PART, WHOLE, C)
                step += 1
        if C.HAS_KEY_MASK:
            # Hidden keys may be nan, and 0 times nan is nan.
            here = start + gl.arange(0, OWN, layout=gl.SliceLayout(1, out_mma))
            own_ptr, _flags_ptr = _sequence_of(
                ranges_ptr, batches, batch, tiles, queries, C.KEYS, C.ROWS
            )
            low = gl.load(own_ptr + here)
            high = gl.load(own_ptr + tiles * C.KEYS + here)
            acc_k = gl.where((low <= high)[:, None], acc_k, 0.0)
        # The keys and values are no longer needed: their memory takes the results.
        _tile_2d(v_memory, OWN, C).store(acc_v.to(k_memory.dtype))
        _tile_2d(k_memory, OWN, C).store((acc_k * factor).to(k_memory.dtype))
        fence_async_shared()
        barrier()
        store_tile(grad_v_desc, [batch, group, start, 0], v_memory)
        store_tile(grad_k_desc, [batch, group, start, 0], k_memory)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(own_empty.index(PART), count=1)


@gluon.jit
def _key_gradient_first(memory, bars, outs, ranges_ptr, work, scales, C: gl.constexpr):
    own = (memory[0].index(0), memory[1].index(0), memory[2], memory[3], memory[4], memory[5])
    _key_gradient(own, bars, outs, ranges_ptr, work, scales, 0, C)


@gluon.jit
def _key_gradient_second(memory, bars, outs, ranges_ptr, work, scales, C: gl.constexpr):
    own = (memory[0].index(1), memory[1].index(1), memory[2], memory[3], memory[4], memory[5])
    _key_gradient(own, bars, outs, ranges_ptr, work, scales, 1, C)


@gluon.jit(do_not_specialize=VARYING)
def _attention_hopper_gradients_key_kernel(
    k_desc,  # (B, G, N, D), block 1 x 1 x OWN x DEPTH_BLOCK
    v_desc,  # likewise
    q_desc,  # (B, H, M, D), block 1 x 1 x ROWS x DEPTH_BLOCK
    grad_desc,  # likewise, the gradient of out
    grad_k_desc,  # as k_desc, written
    grad_v_desc,  # likewise
    ranges_ptr,  # the result of `ranges.find`, with HAS_BOUNDS
    stats_ptr,  # (B, H, 2, padded) fp32: lse in base 2, and the sum of grad * out
    scale,  # of the products, in base 2, above 0
    factor,  # of the scores, as the caller passed it
    ahead,
    behind,
    batch_heads,  # rows of tiles: B * G
    heads,  # of keys
    repeat,  # query heads per key head
    queries,
    keys,
    tiles,  # of keys
    padded,  # queries in whole tiles
    section,  # rows whose tiles are computed at the same time
    C: gl.constexpr,
):
    PARTS: gl.constexpr = C.KEYS // OWN
    span = (ahead, behind)
    work = (batch_heads, heads, repeat, queries, keys, tiles, padded, span, section)
    dtype: gl.constexpr = q_desc.dtype
    own: gl.constexpr = [PARTS, 1, 1, OWN, C.DEPTH_BLOCK]
    others: gl.constexpr = [C.STAGES, 1, 1, C.ROWS, C.DEPTH_BLOCK]
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_memory = gl.allocate_shared_memory(dtype, own, k_desc.layout)
    v_memory = gl.allocate_shared_memory(dtype, own, v_desc.layout)
    q_memory = gl.allocate_shared_memory(dtype, others, q_desc.layout)
    grad_memory = gl.allocate_shared_memory(dtype, others, grad_desc.layout)
    sums_memory = gl.allocate_shared_memory(gl.float32, [C.STAGES, C.ROWS], numbers)
    delta_memory = gl.allocate_shared_memory(gl.float32, [C.STAGES, C.ROWS], numbers)
    own_full = _barriers(PARTS, 1)
    own_empty = _barriers(PARTS, 1)
    full = _barriers(C.STAGES, 2)  # once for the tiles, once for the numbers
    empty = _barriers(C.STAGES, PARTS)
    fence_async_shared()
    bars = (own_full, own_empty, full, empty)
    memory = (k_memory, v_memory, q_memory, grad_memory, sums_memory, delta_memory)
    descs = (k_desc, v_desc, q_desc, grad_desc)
    outs = (grad_k_desc, grad_v_desc)
    scales = (scale, factor)
    gl.warp_specialize(
        [
            (_key_gradient_first, (memory, bars, outs, ranges_ptr, work, scales, C)),
            (_key_gradient_second, (memory, bars, outs, ranges_ptr, work, scales, C)),
            (_load_key_gradient, (descs, memory, bars, stats_ptr, ranges_ptr, work, C)),
        ],
        [4, 1],
        [C.REGISTERS, C.LOADER_REGISTERS],
    )
