# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of attention's engine `hopper`, written in Gluon: one warp loads tiles, and groups of
four warps multiply.

Each group of four warps owns 64 positions of the program's tile and waits only for tiles that the
loading warp announces. So one group computes exponentials while the other multiplies. A program
takes one tile after the other, and the loading warp runs ahead into the next one.

As in `tiles_kernels`, a program does not visit pairs of tiles in which no key counts, and checks
the conditions only in incomplete pairs, which it visits first.
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
    seen_as,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .._triton.key_tiles_kernels import bounds_of, edge_tile

LOW: gl.constexpr = gl.constexpr(-1.0e38)  # below every score; finite, as in `tiles_kernels`
NAN: gl.constexpr = gl.constexpr(tl.PropagateNan.ALL)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
# Positions of a program's tile that one group of warps owns: the rows of a product.
OWN: gl.constexpr = gl.constexpr(64)
# Arguments for whose values no kernel is compiled again.
EVERY = ("ahead", "behind", "repeat", "queries", "keys", "section")
OF_QUERIES = [*EVERY, "batch_heads", "heads", "query_tiles"]
OF_KEYS = [*EVERY, "batch_groups", "groups", "key_tiles"]


@gluon.jit
def _rounds(tiles):
    """Return how many tiles this program takes: one in each round of all programs."""
    programs = gl.num_programs(0)
    whole = tiles // programs
    mine = gl.program_id(0)
    if whole % 2 == 1:
        mine = programs - 1 - mine
    return whole + (mine < tiles % programs).to(gl.int32)


@gluon.jit
def _place_of(turn, rows, tiles, width):
    """Return a program's tile of a round, counted from the first position, and its row (sequence
    and head).

    The first tiles take longest. Every other round runs backwards over the programs, so all
    programs finish at about the same time. The rows are processed in sections, so that the keys and
    values of a section stay in the cache.
    """
    programs = gl.num_programs(0)
    index = gl.program_id(0)
    if turn % 2 == 1:
        index = programs - 1 - index
    index += turn * programs
    section = index // (width * tiles)
    here = gl.minimum(width, rows - section * width)
    rest = index - section * width * tiles
    return rest // here, section * width + rest % here


@gluon.jit
def _bounds(bounds_ptr, batch, tile, tiles, lengths, span, SIZES, IS_BOUND, C: gl.constexpr):
    """Return the first visited tile, first and stop of the complete ones, and how many tiles are
    incomplete and visited at all."""
    first, full_first, full_stop, stop = bounds_of(
        bounds_ptr, batch, tile, tiles, lengths, span, SIZES, IS_BOUND, C
    )
    edges = full_first - first + stop - full_stop
    return first, full_first, full_stop, edges, edges + full_stop - full_first


@gluon.jit
def _nth(index, found):
    """Return the tile that is visited at this index: incomplete tiles come first."""
    first, full_first, full_stop, edges, _ = found
    edge = edge_tile(index, first, full_first, full_stop)
    return gl.where(index < edges, edge, full_first + index - edges)


@gluon.jit
def _which_count(queries, keys, is_key, span, AXIS: gl.constexpr, C: gl.constexpr):
    """Return which keys of a tile each query attends to; `AXIS` is the axis of the queries."""
    query = gl.expand_dims(queries[0], 1 - AXIS)
    key = gl.expand_dims(keys[0], AXIS)
    found = gl.expand_dims(is_key, AXIS) & (query == query)
    if C.HAS_AHEAD:
        found = found & (key <= query + span[0])
    if C.HAS_BEHIND:
        found = found & (key >= query - span[1])
    if C.HAS_IDS:
        found = found & (gl.expand_dims(queries[1], 1 - AXIS) == gl.expand_dims(keys[1], AXIS))
    return found


@gluon.jit
def _ids_of(ids_ptr, place, is_inside, C: gl.constexpr):
    found = place
    if C.HAS_IDS:
        found = gl.load(ids_ptr + place, mask=is_inside, other=0)
    return found


@gluon.jit
def _keys_shown(mask_ptr, key, keys, C: gl.constexpr):
    is_key = key < keys
    if C.HAS_KEY_MASK:
        is_key = is_key & (gl.load(mask_ptr + key, mask=is_key, other=0) != 0)
    return is_key


@gluon.jit
def _tile_2d(memory, ROWS: gl.constexpr, C: gl.constexpr):
    """Return a tile that a descriptor of four axes loads as a matrix."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return seen_as(memory, memory.dtype, [ROWS, C.DEPTH_BLOCK], layout)


@gluon.jit
def _clear_hidden(memory, mask_ptr, tile, keys, ROWS: gl.constexpr, C: gl.constexpr):
    """Write zeros over hidden keys in shared memory, because 0 times nan is nan.

    Every group of warps writes the same numbers, so groups need not wait for each other.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    shown = _keys_shown(mask_ptr, key, keys, C)
    here = memory.load(layout)
    memory.store(gl.where(shown[:, None], here, gl.zeros_like(here)))
    fence_async_shared()
    barrier()


@gluon.jit
def _load_forward(descs, memory, bars, bounds_ptr, work, C: gl.constexpr):
    """Load the queries of each tile, and the keys and values that the tile visits."""
    q_desc, k_desc, v_desc = descs
    q_memory, k_memory, v_memory, _ = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
    batch_heads, heads, repeat, queries, keys, query_tiles, ahead, behind, section = work
    step = 0
    taken = 0
    for turn in range(_rounds(batch_heads * query_tiles)):
        tile, row = _place_of(turn, batch_heads, query_tiles, section)
        tile = query_tiles - 1 - tile
        batch = row // heads
        head = row % heads
        group = head // repeat
        found = _bounds(
            bounds_ptr,
            batch,
            tile,
            query_tiles,
            (queries, keys),
            (ahead, behind),
            (C.ROWS, C.KEYS),
            (C.HAS_AHEAD, C.HAS_BEHIND),
            C,
        )
        count = found[4]
        if count > 0:
            mbarrier.wait(q_empty, (taken & 1) ^ 1)
            mbarrier.expect(q_full, 2 * C.ROWS * C.DEPTH_BLOCK)
            for part in gl.static_range(C.ROWS // OWN):
                place = [batch, head, tile * C.ROWS + part * OWN, 0]
                load_tile(q_desc, place, q_full, q_memory.index(part))
            taken += 1
            for visit in range(count):
                other = _nth(visit, found) * C.KEYS
                stage = step % C.STAGES
                phase = ((step // C.STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), 2 * C.KEYS * C.DEPTH_BLOCK)
                load_tile(
                    k_desc, [batch, group, other, 0], k_full.index(stage), k_memory.index(stage)
                )
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), 2 * C.KEYS * C.DEPTH_BLOCK)
                load_tile(
                    v_desc, [batch, group, other, 0], v_full.index(stage), v_memory.index(stage)
                )
                step += 1


@gluon.jit
def _hide(raw, query, tile, told, MMA: gl.constexpr, C: gl.constexpr):
    """Return raw scores with minus infinity for keys that do not count."""
    mask_ptr, key_ids_ptr, span, keys = told
    key = tile * C.KEYS + gl.arange(0, C.KEYS, layout=gl.SliceLayout(0, MMA))
    key_id = _ids_of(key_ids_ptr, key, key < keys, C)
    is_key = _keys_shown(mask_ptr, key, keys, C)
    counts = _which_count(query, (key, key_id), is_key, span, 0, C)
    return gl.where(counts, raw, float("-inf"))


@gluon.jit
def _softmax(raw, total, largest, scale, C: gl.constexpr):
    """Return the weights of a tile, and the sums of all tiles with the factor that old sums get."""
    higher = gl.maximum(largest, gl.max(raw, 1))
    if C.FUSED:
        weight = gl.exp2(raw * scale - (higher * scale)[:, None])
    else:
        weight = gl.exp2((raw - higher[:, None]) * scale)
    shrink = gl.exp2((largest - higher) * scale)
    return weight, total * shrink + gl.sum(weight, 1), higher, shrink


@gluon.jit
def _step_forward(
    sums,
    step,
    visit,
    found,
    query,
    told,
    memory,
    bars,
    scale,
    PART: gl.constexpr,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """Start the scores of a tile and the product with the previous tile's values; compute the
    tile's weights during that product."""
    acc, total, largest, p, turns = sums
    q_memory, k_memory, v_memory, _ = memory
    _, _, k_full, k_empty, v_full, v_empty, in_turn = bars
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.KEYS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    q = _tile_2d(q_memory, OWN * C.WARPS // 4, C)
    stage = step % C.STAGES
    k = _tile_2d(k_memory.index(stage), C.KEYS, C)
    before = (step + C.STAGES - 1) % C.STAGES
    v = _tile_2d(v_memory.index(before), C.KEYS, C)
    mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
    if C.IN_TURN:
        mbarrier.wait(in_turn.index(PART), (turns & 1) ^ (1 - PART))
    zeros = gl.zeros([OWN * C.WARPS // 4, C.KEYS], gl.float32, score_mma)
    raw = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((step - 1) // C.STAGES) & 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if C.IN_TURN:
        mbarrier.arrive(in_turn.index(1 - PART), count=1)
    raw = warpgroup_mma_wait(1, deps=[raw])
    barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        raw = _hide(raw, query, _nth(visit, found), told, score_mma, C)
    weight, total, largest, shrink = _softmax(raw, total, largest, scale, C)
    if MASKED and C.HAS_KEY_MASK:
        mbarrier.wait(v_full.index(stage), (step // C.STAGES) & 1)
        here = _tile_2d(v_memory.index(stage), C.KEYS, C)
        _clear_hidden(here, told[0], _nth(visit, found), told[3], C.KEYS, C)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(v_empty.index(before), count=1)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, out_mma))
    p = gl.convert_layout(weight.to(k.dtype), gl.DotOperandLayout(0, out_mma, 2))
    return acc * shrink[:, None], total, largest, p, turns + 1


@gluon.jit
def _attend(
    memory, bars, outs, tables, bounds_ptr, work, scale, PART: gl.constexpr, C: gl.constexpr
):
    """Compute the output for the queries of one group of warps."""
    out_desc, lse_ptr = outs
    q_memory, k_memory, v_memory, out_memory = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
    batch_heads, heads, _, queries, keys, query_tiles, ahead, behind, section = work
    HERE: gl.constexpr = OWN * C.WARPS // 4
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.KEYS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, score_mma)
    step = 0
    taken = 0
    turns = 0
    q = _tile_2d(q_memory, HERE, C)
    for turn in range(_rounds(batch_heads * query_tiles)):
        tile, row = _place_of(turn, batch_heads, query_tiles, section)
        tile = query_tiles - 1 - tile
        batch = row // heads
        head = row % heads
        span = (ahead, behind)
        found = _bounds(
            bounds_ptr,
            batch,
            tile,
            query_tiles,
            (queries, keys),
            span,
            (C.ROWS, C.KEYS),
            (C.HAS_AHEAD, C.HAS_BEHIND),
            C,
        )
        edges, count = found[3], found[4]
        place = tile * C.ROWS + PART * OWN + gl.arange(0, HERE, layout=by_row)
        is_row = place < queries
        wide = gl.to_tensor(batch).to(gl.int64)
        query_ids_ptr = tables.query_ids + wide * tables.query_ids_batch
        query = (place, _ids_of(query_ids_ptr, place, is_row, C))
        told = (
            tables.key_mask + wide * tables.mask_batch,
            tables.key_ids + wide * tables.key_ids_batch,
            span,
            keys,
        )
        largest = gl.full([HERE], LOW, gl.float32, by_row)
        total = gl.zeros([HERE], gl.float32, by_row)
        acc = gl.zeros([HERE, C.DEPTH_BLOCK], gl.float32, out_mma)
        if count > 0:
            mbarrier.wait(q_full, taken & 1)
            stage = step % C.STAGES
            mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
            k = _tile_2d(k_memory.index(stage), C.KEYS, C)
            zeros = gl.zeros([HERE, C.KEYS], gl.float32, score_mma)
            raw = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            raw = warpgroup_mma_wait(0, deps=[raw])
            barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            raw = _hide(raw, query, _nth(0, found), told, score_mma, C)
            weight, total, largest, _none = _softmax(raw, total, largest, scale, C)
            if C.HAS_KEY_MASK:
                mbarrier.wait(v_full.index(stage), (step // C.STAGES) & 1)
                here = _tile_2d(v_memory.index(stage), C.KEYS, C)
                _clear_hidden(here, told[0], _nth(0, found), keys, C.KEYS, C)
            p = gl.convert_layout(weight.to(k.dtype), gl.DotOperandLayout(0, out_mma, 2))
            step += 1
            for visit in range(1, edges):
                sums = (acc, total, largest, p, turns)
                acc, total, largest, p, turns = _step_forward(
                    sums, step, visit, found, query, told, memory, bars, scale, PART, True, C
                )
                step += 1
            for visit in range(gl.maximum(edges, 1), count):
                sums = (acc, total, largest, p, turns)
                acc, total, largest, p, turns = _step_forward(
                    sums, step, visit, found, query, told, memory, bars, scale, PART, False, C
                )
                step += 1
            mbarrier.arrive(q_empty, count=1)
            taken += 1
            before = (step + C.STAGES - 1) % C.STAGES
            v = _tile_2d(v_memory.index(before), C.KEYS, C)
            mbarrier.wait(v_full.index(before), ((step - 1) // C.STAGES) & 1)
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(v_empty.index(before), count=1)
        divisor = gl.where(total == 0.0, 1.0, total)
        lse = gl.where(largest <= LOW, float("-inf"), (largest * scale + gl.log2(divisor)) * LN_2)
        gl.store(lse_ptr + gl.to_tensor(row).to(gl.int64) * queries + place, lse, mask=is_row)
        divisor = gl.convert_layout(divisor, gl.SliceLayout(1, out_mma))
        tma.store_wait(0)
        barrier()
        _tile_2d(out_memory, HERE, C).store((acc / divisor[:, None]).to(q.dtype))
        fence_async_shared()
        barrier()
        at = [batch, tile * C.ROWS + PART * OWN, head, 0]
        store_tile(out_desc, at, out_memory)
    tma.store_wait(0)


@gluon.jit
def _attend_first(memory, bars, outs, tables, bounds_ptr, work, scale, C: gl.constexpr):
    mine = (memory[0].index(0), memory[1], memory[2], memory[3].index(0))
    _attend(mine, bars, outs, tables, bounds_ptr, work, scale, 0, C)


@gluon.jit
def _attend_second(memory, bars, outs, tables, bounds_ptr, work, scale, C: gl.constexpr):
    mine = (memory[0].index(1), memory[1], memory[2], memory[3].index(1))
    _attend(mine, bars, outs, tables, bounds_ptr, work, scale, 1, C)


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Return initialised barriers that complete after `COUNT` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(bars.index(index), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=OF_QUERIES)
def _attention_hopper_forward_kernel(
    q_desc,  # (B, H, M, D), block 1 x 1 x OWN x DEPTH_BLOCK
    k_desc,  # (B, G, N, D), block 1 x 1 x KEYS x DEPTH_BLOCK
    v_desc,  # likewise
    out_desc,  # (B, M, H, D), block 1 x OWN x 1 x DEPTH_BLOCK
    tables,  # `key_tiles.Tables`
    bounds_ptr,  # (B, query tiles, 4), with HAS_BOUNDS
    lse_ptr,  # (B, H, M) fp32, natural logarithm
    scale,  # of the products, in base 2, above 0
    ahead,
    behind,
    batch_heads,  # rows of tiles: B * H
    heads,
    repeat,  # query heads per key head
    queries,
    keys,
    query_tiles,
    section,  # rows whose tiles are computed at the same time
    C: gl.constexpr,
):
    PARTS: gl.constexpr = C.ROWS // OWN
    GROUPS: gl.constexpr = PARTS * 4 // C.WARPS
    work = (batch_heads, heads, repeat, queries, keys, query_tiles, ahead, behind, section)
    out_layout: gl.constexpr = out_desc.layout
    dtype: gl.constexpr = q_desc.dtype
    q_memory = gl.allocate_shared_memory(dtype, [PARTS, 1, 1, OWN, C.DEPTH_BLOCK], q_desc.layout)
    out_memory = gl.allocate_shared_memory(dtype, [PARTS, 1, OWN, 1, C.DEPTH_BLOCK], out_layout)
    k_memory = gl.allocate_shared_memory(
        dtype, [C.STAGES, 1, 1, C.KEYS, C.DEPTH_BLOCK], k_desc.layout
    )
    v_memory = gl.allocate_shared_memory(
        dtype, [C.STAGES, 1, 1, C.KEYS, C.DEPTH_BLOCK], v_desc.layout
    )
    q_full = _barriers(1, 1).index(0)
    q_empty = _barriers(1, GROUPS).index(0)
    k_full = _barriers(C.STAGES, 1)
    k_empty = _barriers(C.STAGES, GROUPS)
    v_full = _barriers(C.STAGES, 1)
    v_empty = _barriers(C.STAGES, GROUPS)
    turn = k_full
    if C.IN_TURN:
        turn = _barriers(2, 1)
    fence_async_shared()
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn)
    memory = (q_memory, k_memory, v_memory, out_memory)
    descs = (q_desc, k_desc, v_desc)
    outs = (out_desc, lse_ptr)
    gl.warp_specialize(
        [
            (_attend_first, (memory, bars, outs, tables, bounds_ptr, work, scale, C)),
            (_attend_second, (memory, bars, outs, tables, bounds_ptr, work, scale, C)),
            (_load_forward, (descs, memory, bars, bounds_ptr, work, C)),
        ],
        [4, 1],
        [C.REGISTERS, 24],
    )


@gluon.jit
def _weights(raw, sums, scale):
    """Return the softmax weights from raw scores, for the backward pass; no weight exceeds 1."""
    return gl.exp2(gl.minimum(raw * scale - sums, 0.0, propagate_nan=NAN))


@gluon.jit
def _load_query_gradient(descs, memory, bars, bounds_ptr, work, C: gl.constexpr):
    """Load queries and the gradient of the output, and the keys and values that a tile visits."""
    q_desc, grad_desc, k_desc, v_desc, _ = descs
    q_memory, grad_memory, k_memory, v_memory, _ = memory
    q_full, q_empty, k_full, k_empty, v_full = bars
    batch_heads, heads, repeat, queries, keys, query_tiles, ahead, behind, section = work
    step = 0
    for turn in range(_rounds(batch_heads * query_tiles)):
        tile, row = _place_of(turn, batch_heads, query_tiles, section)
        tile = query_tiles - 1 - tile
        batch = row // heads
        head = row % heads
        group = head // repeat
        found = _bounds(
            bounds_ptr,
            batch,
            tile,
            query_tiles,
            (queries, keys),
            (ahead, behind),
            (C.ROWS, C.KEYS),
            (C.HAS_AHEAD, C.HAS_BEHIND),
            C,
        )
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, 4 * C.ROWS * C.DEPTH_BLOCK)
        for part in gl.static_range(C.ROWS // OWN):
            place = [batch, head, tile * C.ROWS + part * OWN, 0]
            load_tile(q_desc, place, q_full, q_memory.index(part))
            load_tile(grad_desc, place, q_full, grad_memory.index(part))
        for visit in range(found[4]):
            other = _nth(visit, found) * C.KEYS
            stage = step % C.STAGES
            phase = ((step // C.STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 2 * C.KEYS * C.DEPTH_BLOCK)
            load_tile(v_desc, [batch, group, other, 0], v_full.index(stage), v_memory.index(stage))
            mbarrier.expect(k_full.index(stage), 2 * C.KEYS * C.DEPTH_BLOCK)
            load_tile(k_desc, [batch, group, other, 0], k_full.index(stage), k_memory.index(stage))
            step += 1


@gluon.jit
def _step_query_gradient(
    acc,
    slope,
    step,
    visit,
    found,
    query,
    told,
    rows,
    memory,
    bars,
    scale,
    MASKED: gl.constexpr,
    FIRST: gl.constexpr,
    C: gl.constexpr,
):
    """Start both products of a tile, then that of the previous tile's slopes with its keys."""
    q, grad, k_memory, v_memory = memory
    _, _, k_full, k_empty, v_full = bars
    sums, delta = rows
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.KEYS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    stage = step % C.STAGES
    before = (step + C.STAGES - 1) % C.STAGES
    phase = (step // C.STAGES) & 1
    k = _tile_2d(k_memory.index(stage), C.KEYS, C)
    v = _tile_2d(v_memory.index(stage), C.KEYS, C)
    zeros = gl.zeros([OWN, C.KEYS], gl.float32, score_mma)
    mbarrier.wait(k_full.index(stage), phase)
    if MASKED and C.HAS_KEY_MASK:
        _clear_hidden(k, told[0], _nth(visit, found), told[3], C.KEYS, C)
    raw = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    steep = warpgroup_mma(grad, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not FIRST:
        old = _tile_2d(k_memory.index(before), C.KEYS, C)
        acc = warpgroup_mma(slope, old, acc, is_async=True)
        raw = warpgroup_mma_wait(2, deps=[raw])
    else:
        raw = warpgroup_mma_wait(1, deps=[raw])
    weight = _weights(raw, sums[:, None], scale)
    if not FIRST:
        steep = warpgroup_mma_wait(1, deps=[steep])
    else:
        steep = warpgroup_mma_wait(0, deps=[steep])
    turned = weight * (steep - delta[:, None])
    if MASKED:
        mask_ptr, key_ids_ptr, span, keys = told
        key = _nth(visit, found) * C.KEYS + gl.arange(
            0, C.KEYS, layout=gl.SliceLayout(0, score_mma)
        )
        key_id = _ids_of(key_ids_ptr, key, key < keys, C)
        is_key = _keys_shown(mask_ptr, key, keys, C)
        counts = _which_count(query, (key, key_id), is_key, span, 0, C)
        turned = gl.where(counts, turned, 0.0)
    if not FIRST:
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(k_empty.index(before), count=1)
    slope = gl.convert_layout(turned.to(k.dtype), gl.DotOperandLayout(0, out_mma, 2))
    return acc, slope


@gluon.jit
def _query_gradient(
    memory, bars, outs, tables, bounds_ptr, work, scales, PART: gl.constexpr, C: gl.constexpr
):
    """Compute the gradient for the queries of one group of warps."""
    out, grad_q_desc, lse_ptr, sums_ptr, delta_ptr = outs
    q_memory, grad_memory, k_memory, v_memory, out_memory = memory
    q_full, q_empty, _, k_empty, _ = bars
    batch_heads, heads, _, queries, keys, query_tiles, ahead, behind, section = work
    scale, factor = scales
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.KEYS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, score_mma)
    wide_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    step = 0
    for turn in range(_rounds(batch_heads * query_tiles)):
        tile, row = _place_of(turn, batch_heads, query_tiles, section)
        tile = query_tiles - 1 - tile
        batch = row // heads
        head = row % heads
        span = (ahead, behind)
        found = _bounds(
            bounds_ptr,
            batch,
            tile,
            query_tiles,
            (queries, keys),
            span,
            (C.ROWS, C.KEYS),
            (C.HAS_AHEAD, C.HAS_BEHIND),
            C,
        )
        edges, count = found[3], found[4]
        first = tile * C.ROWS + PART * OWN
        place = first + gl.arange(0, OWN, layout=by_row)
        is_row = place < queries
        wide = gl.to_tensor(batch).to(gl.int64)
        query_ids_ptr = tables.query_ids + wide * tables.query_ids_batch
        query = (place, _ids_of(query_ids_ptr, place, is_row, C))
        told = (
            tables.key_mask + wide * tables.mask_batch,
            tables.key_ids + wide * tables.key_ids_batch,
            span,
            keys,
        )
        # The sums of grad * out and the logarithms in base 2, which the next kernel reads too.
        rows = first + gl.arange(0, OWN, layout=gl.SliceLayout(1, wide_rows))
        depth = gl.arange(0, C.DEPTH_BLOCK, layout=gl.SliceLayout(0, wide_rows))
        inside = (rows < queries)[:, None] & (depth < C.DEPTH)[None, :]
        out_ptr = out.ptr + wide * out.batch + gl.to_tensor(head).to(gl.int64) * out.head
        places = rows.to(gl.int64)[:, None] * out.row + depth[None, :]
        output = gl.load(out_ptr + places, mask=inside, other=0.0)
        stat = gl.to_tensor(row).to(gl.int64) * queries
        sums = gl.load(lse_ptr + stat + place, mask=is_row, other=float("inf"))
        sums = gl.where(sums == float("-inf"), float("inf"), sums * LOG2_E)
        gl.store(sums_ptr + stat + place, sums, mask=is_row)
        mbarrier.wait(q_full, turn & 1)
        grad = _tile_2d(grad_memory, OWN, C)
        q = _tile_2d(q_memory, OWN, C)
        delta = gl.sum(grad.load(wide_rows).to(gl.float32) * output.to(gl.float32), 1)
        delta = gl.convert_layout(delta, by_row)
        gl.store(delta_ptr + stat + place, delta, mask=is_row)
        acc = gl.zeros([OWN, C.DEPTH_BLOCK], gl.float32, out_mma)
        if C.IN_REGISTERS:
            by_operand: gl.constexpr = gl.DotOperandLayout(0, score_mma, 2)
            operands = (q.load(by_operand), grad.load(by_operand), k_memory, v_memory)
        else:
            operands = (q, grad, k_memory, v_memory)
        if count > 0:
            state = (sums, delta)
            acc, slope = _step_query_gradient(
                *(acc, None, step, 0, found, query, told, state, operands, bars, scale),
                *(True, True, C),
            )
            step += 1
            for visit in range(1, edges):
                acc, slope = _step_query_gradient(
                    *(acc, slope, step, visit, found, query, told, state, operands, bars, scale),
                    *(True, False, C),
                )
                step += 1
            for visit in range(gl.maximum(edges, 1), count):
                acc, slope = _step_query_gradient(
                    *(acc, slope, step, visit, found, query, told, state, operands, bars, scale),
                    *(False, False, C),
                )
                step += 1
            before = (step + C.STAGES - 1) % C.STAGES
            acc = warpgroup_mma(
                slope, _tile_2d(k_memory.index(before), C.KEYS, C), acc, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(k_empty.index(before), count=1)
        barrier()
        mbarrier.arrive(q_empty, count=1)
        tma.store_wait(0)
        barrier()
        _tile_2d(out_memory, OWN, C).store((acc * factor).to(q.dtype))
        fence_async_shared()
        barrier()
        store_tile(grad_q_desc, [batch, first, head, 0], out_memory)
    tma.store_wait(0)


@gluon.jit
def _query_gradient_first(memory, bars, outs, tables, bounds_ptr, work, scales, C: gl.constexpr):
    own = memory[4].index(0)
    mine = (memory[0].index(0), memory[1].index(0), memory[2], memory[3], own)
    _query_gradient(mine, bars, outs, tables, bounds_ptr, work, scales, 0, C)


@gluon.jit
def _query_gradient_second(memory, bars, outs, tables, bounds_ptr, work, scales, C: gl.constexpr):
    own = memory[4].index(1)
    mine = (memory[0].index(1), memory[1].index(1), memory[2], memory[3], own)
    _query_gradient(mine, bars, outs, tables, bounds_ptr, work, scales, 1, C)


@gluon.jit(do_not_specialize=OF_QUERIES)
def _attention_hopper_query_gradient_kernel(
    q_desc,  # (B, H, M, D), block 1 x 1 x OWN x DEPTH_BLOCK
    grad_desc,  # (B, H, M, D), likewise
    k_desc,  # (B, G, N, D), block 1 x 1 x KEYS x DEPTH_BLOCK
    v_desc,  # likewise
    out,  # (B, H, M, D), `key_tiles.Rows`
    grad_q_desc,  # (B, M, H, D), block 1 x OWN x 1 x DEPTH_BLOCK
    tables,  # `key_tiles.Tables`
    bounds_ptr,  # (B, query tiles, 4), with HAS_BOUNDS
    lse_ptr,  # (B, H, M) fp32
    sums_ptr,  # (B, H, M) fp32, written: lse in base 2, infinity for a query without keys
    delta_ptr,  # (B, H, M) fp32, written: the sum of grad * out
    scale,
    factor,  # of the scores, as the caller passed it
    ahead,
    behind,
    batch_heads,  # rows of tiles: B * H
    heads,
    repeat,  # query heads per key head
    queries,
    keys,
    query_tiles,
    section,  # rows whose tiles are computed at the same time
    C: gl.constexpr,
):
    PARTS: gl.constexpr = C.ROWS // OWN
    work = (batch_heads, heads, repeat, queries, keys, query_tiles, ahead, behind, section)
    dtype: gl.constexpr = q_desc.dtype
    own: gl.constexpr = [PARTS, 1, 1, OWN, C.DEPTH_BLOCK]
    other: gl.constexpr = [C.STAGES, 1, 1, C.KEYS, C.DEPTH_BLOCK]
    layout: gl.constexpr = q_desc.layout
    q_memory = gl.allocate_shared_memory(dtype, own, layout)
    grad_memory = gl.allocate_shared_memory(dtype, own, layout)
    k_memory = gl.allocate_shared_memory(dtype, other, layout)
    v_memory = gl.allocate_shared_memory(dtype, other, layout)
    out_memory = gl.allocate_shared_memory(dtype, [PARTS, 1, OWN, 1, C.DEPTH_BLOCK], layout)
    q_full = _barriers(1, 1).index(0)
    q_empty = _barriers(1, PARTS).index(0)
    k_full = _barriers(C.STAGES, 1)
    k_empty = _barriers(C.STAGES, PARTS)
    v_full = _barriers(C.STAGES, 1)
    fence_async_shared()
    bars = (q_full, q_empty, k_full, k_empty, v_full)
    memory = (q_memory, grad_memory, k_memory, v_memory, out_memory)
    descs = (q_desc, grad_desc, k_desc, v_desc, grad_q_desc)
    outs = (out, grad_q_desc, lse_ptr, sums_ptr, delta_ptr)
    scales = (scale, factor)
    gl.warp_specialize(
        [
            (_query_gradient_first, (memory, bars, outs, tables, bounds_ptr, work, scales, C)),
            (_query_gradient_second, (memory, bars, outs, tables, bounds_ptr, work, scales, C)),
            (_load_query_gradient, (descs, memory, bars, bounds_ptr, work, C)),
        ],
        [4, 1],
        [C.REGISTERS, 24],
    )


@gluon.jit
def _load_key_gradient(descs, memory, bars, bounds_ptr, work, C: gl.constexpr):
    """Load keys and values, and the queries and gradients of the output that a tile visits."""
    q_desc, grad_desc, k_desc, v_desc = descs
    k_memory, v_memory, q_memory, grad_memory = memory
    k_full, k_empty, q_full, q_empty, grad_full = bars
    batch_groups, groups, repeat, queries, keys, key_tiles, ahead, behind, section = work
    step = 0
    for turn in range(_rounds(batch_groups * key_tiles)):
        tile, row = _place_of(turn, batch_groups, key_tiles, section)
        batch = row // groups
        group = row % groups
        found = _bounds(
            bounds_ptr,
            batch,
            tile,
            key_tiles,
            (keys, queries),
            (behind, ahead),
            (C.KEYS, C.ROWS),
            (C.HAS_BEHIND, C.HAS_AHEAD),
            C,
        )
        mbarrier.wait(k_empty, (turn & 1) ^ 1)
        mbarrier.expect(k_full, 4 * C.KEYS * C.DEPTH_BLOCK)
        for part in gl.static_range(C.KEYS // OWN):
            place = [batch, group, tile * C.KEYS + part * OWN, 0]
            load_tile(k_desc, place, k_full, k_memory.index(part))
            load_tile(v_desc, place, k_full, v_memory.index(part))
        for shared in range(repeat):
            head = group * repeat + shared
            for visit in range(found[4]):
                other = _nth(visit, found) * C.ROWS
                stage = step % C.STAGES
                mbarrier.wait(q_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(stage), 2 * C.ROWS * C.DEPTH_BLOCK)
                place = [batch, head, other, 0]
                load_tile(q_desc, place, q_full.index(stage), q_memory.index(stage))
                mbarrier.expect(grad_full.index(stage), 2 * C.ROWS * C.DEPTH_BLOCK)
                load_tile(grad_desc, place, grad_full.index(stage), grad_memory.index(stage))
                step += 1


@gluon.jit
def _step_key_gradient(
    grads,
    step,
    stat,
    other,
    key,
    told,
    memory,
    bars,
    scale,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """Add the contribution of a tile of queries to the gradients of keys and values."""
    grad_k, grad_v = grads
    k, v, q_memory, grad_memory = memory
    _, _, q_full, q_empty, grad_full = bars
    query_ids_ptr, sums_ptr, delta_ptr, span, queries, is_key = told
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.ROWS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    by_operand: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    stage = step % C.STAGES
    phase = (step // C.STAGES) & 1
    q = _tile_2d(q_memory.index(stage), C.ROWS, C)
    grad = _tile_2d(grad_memory.index(stage), C.ROWS, C)
    query = other * C.ROWS + gl.arange(0, C.ROWS, layout=gl.SliceLayout(0, score_mma))
    is_row = query < queries
    if MASKED:
        sums = gl.load(sums_ptr + stat + query, mask=is_row, other=float("inf"))
    else:
        sums = gl.load(sums_ptr + stat + query)
    zeros = gl.zeros([OWN, C.ROWS], gl.float32, score_mma)
    mbarrier.wait(q_full.index(stage), phase)
    raw = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(grad_full.index(stage), phase)
    steep = warpgroup_mma(v, grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
    raw = warpgroup_mma_wait(1, deps=[raw])
    weight = _weights(raw, sums[None, :], scale)
    if MASKED:
        query_id = _ids_of(query_ids_ptr, query, is_row, C)
        counts = _which_count((query, query_id), key, is_key, span, 1, C)
        weight = gl.where(counts, weight, 0.0)
        delta = gl.load(delta_ptr + stat + query, mask=is_row, other=0.0)
    else:
        delta = gl.load(delta_ptr + stat + query)
    p = gl.convert_layout(weight.to(k.dtype), by_operand)
    grad_v = warpgroup_mma(p, grad, grad_v, is_async=True)
    steep = warpgroup_mma_wait(1, deps=[steep])
    slope = weight * (steep - delta[None, :])
    if MASKED:
        slope = gl.where(counts, slope, 0.0)
    slope = gl.convert_layout(slope.to(k.dtype), by_operand)
    grad_k = warpgroup_mma(slope, q, grad_k, is_async=True)
    grad_k, grad_v = warpgroup_mma_wait(0, deps=[grad_k, grad_v])
    barrier()
    mbarrier.arrive(q_empty.index(stage), count=1)
    return grad_k, grad_v


@gluon.jit
def _step_key_gradient_carried(
    grads,
    slope,
    step,
    stat,
    other,
    key,
    told,
    memory,
    bars,
    scale,
    MASKED: gl.constexpr,
    FIRST: gl.constexpr,
    C: gl.constexpr,
):
    """Add the contribution of a tile of queries to the gradients of keys and values."""
    grad_k, grad_v = grads
    k, v, q_memory, grad_memory = memory
    _, _, q_full, q_empty, grad_full = bars
    query_ids_ptr, sums_ptr, delta_ptr, span, queries, is_key = told
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.ROWS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    by_operand: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    stage = step % C.STAGES
    phase = (step // C.STAGES) & 1
    q = _tile_2d(q_memory.index(stage), C.ROWS, C)
    grad = _tile_2d(grad_memory.index(stage), C.ROWS, C)
    query = other * C.ROWS + gl.arange(0, C.ROWS, layout=gl.SliceLayout(0, score_mma))
    is_row = query < queries
    if MASKED:
        sums = gl.load(sums_ptr + stat + query, mask=is_row, other=float("inf"))
    else:
        sums = gl.load(sums_ptr + stat + query)
    zeros = gl.zeros([OWN, C.ROWS], gl.float32, score_mma)
    mbarrier.wait(q_full.index(stage), phase)
    raw = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(grad_full.index(stage), phase)
    steep = warpgroup_mma(v, grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
    before = (step + C.STAGES - 1) % C.STAGES
    if not FIRST:
        grad_k = warpgroup_mma(
            slope, _tile_2d(q_memory.index(before), C.ROWS, C), grad_k, is_async=True
        )
        raw = warpgroup_mma_wait(2, deps=[raw])
    else:
        raw = warpgroup_mma_wait(1, deps=[raw])
    weight = _weights(raw, sums[None, :], scale)
    if MASKED:
        query_id = _ids_of(query_ids_ptr, query, is_row, C)
        counts = _which_count((query, query_id), key, is_key, span, 1, C)
        weight = gl.where(counts, weight, 0.0)
        delta = gl.load(delta_ptr + stat + query, mask=is_row, other=0.0)
    else:
        delta = gl.load(delta_ptr + stat + query)
    p = gl.convert_layout(weight.to(k.dtype), by_operand)
    grad_v = warpgroup_mma(p, grad, grad_v, is_async=True)
    if not FIRST:
        steep = warpgroup_mma_wait(2, deps=[steep])
    else:
        steep = warpgroup_mma_wait(1, deps=[steep])
    steep = weight * (steep - delta[None, :])
    if MASKED:
        steep = gl.where(counts, steep, 0.0)
    if not FIRST:
        grad_k, grad_v = warpgroup_mma_wait(0, deps=[grad_k, grad_v])
        barrier()
        mbarrier.arrive(q_empty.index(before), count=1)
    else:
        grad_v = warpgroup_mma_wait(0, deps=[grad_v])
    return grad_k, grad_v, gl.convert_layout(steep.to(k.dtype), by_operand)


@gluon.jit
def _key_gradient(
    memory, bars, outs, tables, bounds_ptr, work, scales, PART: gl.constexpr, C: gl.constexpr
):
    """Compute the gradients for the keys and values of one group of warps."""
    grad_k_desc, grad_v_desc, sums_ptr, delta_ptr = outs
    k_memory, v_memory, q_memory, grad_memory = memory
    k_full, k_empty, _, q_empty, _ = bars
    batch_groups, groups, repeat, queries, keys, key_tiles, ahead, behind, section = work
    scale, factor = scales
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.ROWS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, score_mma)
    step = 0
    k = _tile_2d(k_memory, OWN, C)
    v = _tile_2d(v_memory, OWN, C)
    for turn in range(_rounds(batch_groups * key_tiles)):
        tile, row = _place_of(turn, batch_groups, key_tiles, section)
        batch = row // groups
        group = row % groups
        found = _bounds(
            bounds_ptr,
            batch,
            tile,
            key_tiles,
            (keys, queries),
            (behind, ahead),
            (C.KEYS, C.ROWS),
            (C.HAS_BEHIND, C.HAS_AHEAD),
            C,
        )
        edges, count = found[3], found[4]
        first = tile * C.KEYS + PART * OWN
        place = first + gl.arange(0, OWN, layout=by_row)
        wide = gl.to_tensor(batch).to(gl.int64)
        key_ids_ptr = tables.key_ids + wide * tables.key_ids_batch
        key = (place, _ids_of(key_ids_ptr, place, place < keys, C))
        is_key = _keys_shown(tables.key_mask + wide * tables.mask_batch, place, keys, C)
        query_ids_ptr = tables.query_ids + wide * tables.query_ids_batch
        told = (query_ids_ptr, sums_ptr, delta_ptr, (ahead, behind), queries, is_key)
        operands = (k, v, q_memory, grad_memory)
        grad_k = gl.zeros([OWN, C.DEPTH_BLOCK], gl.float32, out_mma)
        grad_v = gl.zeros([OWN, C.DEPTH_BLOCK], gl.float32, out_mma)
        mbarrier.wait(k_full, turn & 1)
        if C.CARRIED:
            if count > 0:
                stat = gl.to_tensor(row).to(gl.int64) * repeat * queries
                grads = (grad_k, grad_v)
                grad_k, grad_v, slope = _step_key_gradient_carried(
                    *(grads, None, step, stat, _nth(0, found), key, told, operands),
                    *(bars, scale, True, True, C),
                )
                step += 1
                for shared in range(repeat):
                    stat = (gl.to_tensor(row).to(gl.int64) * repeat + shared) * queries
                    begin = (shared == 0).to(gl.int32)
                    for visit in range(begin, edges):
                        grads = (grad_k, grad_v)
                        grad_k, grad_v, slope = _step_key_gradient_carried(
                            *(grads, slope, step, stat, _nth(visit, found), key, told, operands),
                            *(bars, scale, True, False, C),
                        )
                        step += 1
                    for visit in range(gl.maximum(edges, begin), count):
                        grads = (grad_k, grad_v)
                        grad_k, grad_v, slope = _step_key_gradient_carried(
                            *(grads, slope, step, stat, _nth(visit, found), key, told, operands),
                            *(bars, scale, False, False, C),
                        )
                        step += 1
                before = (step + C.STAGES - 1) % C.STAGES
                last = _tile_2d(q_memory.index(before), C.ROWS, C)
                grad_k = warpgroup_mma(slope, last, grad_k, is_async=True)
                grad_k = warpgroup_mma_wait(0, deps=[grad_k])
                barrier()
                mbarrier.arrive(q_empty.index(before), count=1)
        else:
            for shared in range(repeat):
                stat = (gl.to_tensor(row).to(gl.int64) * repeat + shared) * queries
                for visit in range(edges):
                    grads = (grad_k, grad_v)
                    grad_k, grad_v = _step_key_gradient(
                        *(grads, step, stat, _nth(visit, found), key, told, operands),
                        *(bars, scale, True, C),
                    )
                    step += 1
                for visit in range(edges, count):
                    grads = (grad_k, grad_v)
                    grad_k, grad_v = _step_key_gradient(
                        *(grads, step, stat, _nth(visit, found), key, told, operands),
                        *(bars, scale, False, C),
                    )
                    step += 1
        # The results are written from the memory of the keys and values.
        k.store((grad_k * factor).to(k.dtype))
        v.store(grad_v.to(k.dtype))
        fence_async_shared()
        barrier()
        store_tile(grad_k_desc, [batch, first, group, 0], k_memory)
        store_tile(grad_v_desc, [batch, first, group, 0], v_memory)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(k_empty, count=1)


@gluon.jit
def _key_gradient_first(memory, bars, outs, tables, bounds_ptr, work, scales, C: gl.constexpr):
    mine = (memory[0].index(0), memory[1].index(0), memory[2], memory[3])
    _key_gradient(mine, bars, outs, tables, bounds_ptr, work, scales, 0, C)


@gluon.jit
def _key_gradient_second(memory, bars, outs, tables, bounds_ptr, work, scales, C: gl.constexpr):
    mine = (memory[0].index(1), memory[1].index(1), memory[2], memory[3])
    _key_gradient(mine, bars, outs, tables, bounds_ptr, work, scales, 1, C)


@gluon.jit(do_not_specialize=OF_KEYS)
def _attention_hopper_key_gradient_kernel(
    q_desc,  # (B, H, M, D), block 1 x 1 x ROWS x DEPTH_BLOCK
    grad_desc,  # (B, H, M, D), likewise
    k_desc,  # (B, G, N, D), block 1 x 1 x OWN x DEPTH_BLOCK
    v_desc,  # likewise
    grad_k_desc,  # (B, N, G, D), block 1 x OWN x 1 x DEPTH_BLOCK
    grad_v_desc,  # likewise
    tables,  # `key_tiles.Tables`
    bounds_ptr,  # (B, key tiles, 4), with HAS_BOUNDS
    sums_ptr,  # (B, H, M) fp32, in base 2: infinity for a query without keys
    delta_ptr,  # (B, H, M) fp32
    scale,
    factor,
    ahead,
    behind,
    batch_groups,  # rows of tiles: B * G
    groups,
    repeat,  # query heads per key head
    queries,
    keys,
    key_tiles,
    section,  # rows whose tiles are computed at the same time
    C: gl.constexpr,
):
    PARTS: gl.constexpr = C.KEYS // OWN
    work = (batch_groups, groups, repeat, queries, keys, key_tiles, ahead, behind, section)
    dtype: gl.constexpr = q_desc.dtype
    own: gl.constexpr = [PARTS, 1, 1, OWN, C.DEPTH_BLOCK]
    other: gl.constexpr = [C.STAGES, 1, 1, C.ROWS, C.DEPTH_BLOCK]
    layout: gl.constexpr = q_desc.layout
    k_memory = gl.allocate_shared_memory(dtype, own, layout)
    v_memory = gl.allocate_shared_memory(dtype, own, layout)
    q_memory = gl.allocate_shared_memory(dtype, other, layout)
    grad_memory = gl.allocate_shared_memory(dtype, other, layout)
    k_full = _barriers(1, 1).index(0)
    k_empty = _barriers(1, PARTS).index(0)
    q_full = _barriers(C.STAGES, 1)
    q_empty = _barriers(C.STAGES, PARTS)
    grad_full = _barriers(C.STAGES, 1)
    fence_async_shared()
    bars = (k_full, k_empty, q_full, q_empty, grad_full)
    memory = (k_memory, v_memory, q_memory, grad_memory)
    descs = (q_desc, grad_desc, k_desc, v_desc)
    outs = (grad_k_desc, grad_v_desc, sums_ptr, delta_ptr)
    scales = (scale, factor)
    gl.warp_specialize(
        [
            (_key_gradient_first, (memory, bars, outs, tables, bounds_ptr, work, scales, C)),
            (_key_gradient_second, (memory, bars, outs, tables, bounds_ptr, work, scales, C)),
            (_load_key_gradient, (descs, memory, bars, bounds_ptr, work, C)),
        ],
        [4, 1],
        [C.REGISTERS, 24],
    )
