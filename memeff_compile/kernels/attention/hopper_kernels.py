# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The forward kernel of attention on Hopper, written in Gluon: one warp loads tiles, and two groups
of four warps multiply.

Each group of four warps computes 64 queries of the program's tile. Before a product, a group waits
until the loading warp has loaded the product's keys or values. With IN_TURN, the two groups start
their products in turn. Therefore one group of warps can compute exponentials while the other group
multiplies. A program computes one tile of queries after another. Meanwhile, the loading warp
already loads the next tiles of queries, keys and values, as soon as shared memory is free.

As in `tiles_kernels`, a program skips pairs of tiles in which no key is visible. A program checks
the masking conditions only in pairs in which some keys are hidden. Pairs with hidden keys come
first.

If a call has sequence ids or a mask of keys (HAS_BOUNDS), the kernel reads a table that
`ranges.find` made. The table tells which tiles of keys to combine with each tile of queries. The
table also contains the first and the last visible key of each query. If all keys between them are
visible, the kernel compares positions with these two numbers. Otherwise the kernel compares two
other numbers of the table, one of the query and one of the key. These two numbers, called joint
ids, are equal if neither the mask of keys nor the sequence ids hide the key. Values that the mask
of keys hides may be nan or infinite. If they are, the kernel replaces them by zeros in tiles in
which the mask may hide a key.
"""

from __future__ import annotations

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
from .._triton.key_tiles_kernels import edge_tile, visited_by
from .ranges_kernels import FIELDS, HIDDEN, NOWHERE

LOW: gl.constexpr = gl.constexpr(-1.0e38)  # below every score; finite, as in `tiles_kernels`
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
# Positions of a program's tile that one group of warps owns: the rows of a product.
OWN: gl.constexpr = gl.constexpr(64)
# How a step finds the hidden keys of a tile: there are none, it compares positions with bounds, it
# compares joint ids, or it compares joint ids only if the program's tile has gaps.
WHOLE: gl.constexpr = gl.constexpr(0)
RANGE: gl.constexpr = gl.constexpr(1)
GAPS: gl.constexpr = gl.constexpr(2)
EITHER: gl.constexpr = gl.constexpr(3)
# Arguments for whose values no kernel is compiled again.
VARYING = [
    *("ahead", "behind", "batch_heads", "heads", "repeat"),
    *("queries", "keys", "query_tiles", "section"),
]


@gluon.jit
def _rounds(tiles):
    """Return how many of the launch's `tiles` this program computes.

    In each round, every program computes one tile. In the last round, some programs may have none.
    """
    programs = gl.num_programs(0)
    whole = tiles // programs
    mine = gl.program_id(0)
    if whole % 2 == 1:
        mine = programs - 1 - mine
    return gl.where(mine < tiles % programs, whole + 1, whole)


@gluon.jit
def _place_of(turn, rows, tiles, width):
    """Return which tile a program computes in a given round, and its sequence and head as one
    index.

    In each round, every program computes one tile. The tiles of the first rounds take longest. In
    every second round, programs take tiles in the reverse order, so all programs finish at about
    the same time. Sequences and heads are processed in sections, so that the keys and values of a
    section stay in the L2 cache.
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
def _bounds(tile, lengths, span, SIZES, IS_BOUND):
    """Return five numbers that describe the tiles with which a program combines its own tile.

    The own tile contains queries and the other tiles, called the visited tiles, contain keys, or
    the other way around. The mask depends only on positions. The five numbers are:

    - the first visited tile, the first complete tile (without hidden keys), the end of the complete
      tiles;
    - the number of incomplete tiles, and the number of all visited tiles.
    """
    first, full_first, full_stop, stop = visited_by(tile, lengths, span, SIZES, IS_BOUND)
    edges = full_first - first + stop - full_stop
    return first, full_first, full_stop, edges, edges + full_stop - full_first


@gluon.jit
def _sorted_tile(turn, ranges_ptr, rows, heads, tiles, width):
    """Return the tile that a program computes in a given round, from a table that `ranges.find`
    made. Also return the tile's sequence and head.

    The table lists the tiles of all sequences in one order: tiles with the most work come first.
    The program combines a tile of queries with tiles of keys, or a tile of keys with tiles of
    queries. The last result describes these other tiles, called the visited tiles, by five numbers:

    - the first visited tile, the first complete tile (without hidden keys), the end of the complete
      tiles;
    - the number of incomplete tiles, and the number of all visited tiles.
    """
    pairs = rows // heads * tiles
    nth, head = _place_of(turn, heads, pairs, width)
    pair = gl.load(ranges_ptr + nth * FIELDS + 7)
    found_ptr = ranges_ptr + pair * FIELDS
    first = gl.load(found_ptr)
    full_first = gl.load(found_ptr + 1)
    full_stop = gl.load(found_ptr + 2)
    stop = gl.load(found_ptr + 3)
    edges = full_first - first + stop - full_stop
    found = (first, full_first, full_stop, edges, edges + full_stop - full_first)
    return pair % tiles, pair // tiles, head, found


@gluon.jit
def _sequence_of(
    ranges_ptr, batches, batch, tiles, others, OURS: gl.constexpr, OTHERS: gl.constexpr
):
    """Return pointers into a table of visible keys: to one sequence's part, and to the flags of all
    sequences.

    The function `ranges.find` made the table. Each query and each key has a joint id, which
    combines the mask of keys and the sequence ids in one number. The joint ids of a query and a key
    are equal if neither the mask of keys nor the sequence ids hide the key. The first pointer
    points to a sequence's part of the table. In the table for a kernel with tiles of queries, each
    query has three numbers: its first and its last visible key, and its joint id. Each key has its
    joint id. In the table for a kernel with tiles of keys, queries and keys change roles.

    The second pointer points to one flag for each sequence and key head. A flag tells whether keys
    or values that the mask of keys hides are nan or infinite. `others` is the number of the
    sequence's keys for tiles of queries, and the number of its queries for tiles of keys.
    """
    size = 3 * tiles * OURS + (others + OTHERS - 1) // OTHERS * OTHERS
    first_ptr = ranges_ptr + batches * tiles * FIELDS
    return first_ptr + batch * size, first_ptr + batches * size


@gluon.jit
def _ranges_of(ranges_ptr, own_ptr, batch, tile, tiles, place, OURS: gl.constexpr):
    """Return each query's first and last visible key and joint id, whether visible keys have gaps,
    and a pointer.

    A tile may have keys instead of queries. Then the first two results are, for each key, the first
    and the last query that sees the key. The joint id combines the mask of keys and the sequence
    ids. The joint ids of a query and a key are equal if neither the mask of keys nor the sequence
    ids hide the key.

    The fourth result tells whether a position of the tile sees positions with gaps between them.
    For a tile of queries, the pointer points to the joint ids of the sequence's keys. For a tile of
    keys, the pointer points to the joint ids of the sequence's queries.
    """
    padded = tiles * OURS
    low = gl.load(own_ptr + place)
    high = gl.load(own_ptr + padded + place)
    joint_id = gl.load(own_ptr + 2 * padded + place)
    has_gaps = gl.load(ranges_ptr + (batch * tiles + tile) * FIELDS + 4)
    return low, high, joint_id, has_gaps, own_ptr + 3 * padded


@gluon.jit
def _dirty_tiles(ranges_ptr, flag_ptr, batch, tile, tiles, C: gl.constexpr):
    """Find the tiles of keys in which zeros must replace hidden keys or values.

    Hidden means that the mask of keys hides the key from all queries. The function returns two
    indices of tiles. Zeros are needed in all tiles before the first index, and from the second on.
    If no hidden key or value has nan or an infinity, there are no such tiles.
    """
    clean, dirty = 0, NOWHERE
    if C.HAS_KEY_MASK:
        found_ptr = ranges_ptr + (batch * tiles + tile) * FIELDS
        is_bad = gl.load(flag_ptr) != 0
        clean = gl.where(is_bad, gl.load(found_ptr + 5), clean)
        dirty = gl.where(is_bad, gl.load(found_ptr + 6), dirty)
    return clean, dirty


@gluon.jit
def _conditions_of(ranges_ptr, sequences, at, place, keys, heads, C: gl.constexpr):
    """Return the numbers from which a kernel finds the keys that a tile of queries sees.

    The numbers come from the table that `ranges.find` made. Each query and each key has a joint id,
    which combines the mask of keys and the sequence ids in one number. The joint ids of a query and
    a key are equal if neither the mask of keys nor the sequence ids hide the key. The first result
    describes the tile's queries by five items:

    - the queries' positions;
    - the first and the last visible key of each query;
    - the joint id of each query;
    - whether any query of the tile has visible keys with gaps between them.

    The second result is a pointer to the joint ids of the sequence's keys. The last two results are
    indices of tiles of keys. Zeros must replace keys or values that the mask of keys hides, in the
    tiles before the first index and from the second index on.

    `sequences` is the number of sequences. `at` contains the tile's sequence, the tile, and the
    number of tiles of a sequence. `heads` contains one combined index of the tile's sequence and
    query head, and the number of query heads per key head.
    """
    batch, tile, tiles = at
    row, repeat = heads
    own_ptr, flags_ptr = _sequence_of(ranges_ptr, sequences, batch, tiles, keys, C.ROWS, C.KEYS)
    low, high, joint_id, has_gaps, joint_ids_ptr = _ranges_of(
        ranges_ptr, own_ptr, batch, tile, tiles, place, C.ROWS
    )
    clean, dirty = _dirty_tiles(ranges_ptr, flags_ptr + row // repeat, batch, tile, tiles, C)
    return (place, low, high, joint_id, has_gaps), joint_ids_ptr, clean, dirty


@gluon.jit
def _nth(index, found):
    """Return the number of the tile that a program visits at the loop index `index`.

    A program combines its own tile of queries or keys with the tiles that it visits. A visited tile
    is complete if every query of the two tiles sees every key, otherwise incomplete. The loop
    visits the incomplete tiles first. `found` describes the visited tiles by five numbers:

    - the first visited tile, the first complete tile, the end of the complete tiles;
    - the number of incomplete tiles, and the number of all visited tiles.
    """
    first, full_first, full_stop, edges, _ = found
    edge = edge_tile(index, first, full_first, full_stop)
    return gl.where(index < edges, edge, full_first + index - edges)


@gluon.jit
def _which_count(query, key, is_key, span, AXIS: gl.constexpr, C: gl.constexpr):
    """Return which keys of a tile each query sees under the bounds `span` on positions.

    `query` and `key` are positions. `span` is the pair of bounds `(ahead, behind)`: how far after
    and before a query its keys may be. `is_key` marks the keys that the result may contain. `AXIS`
    is the axis of the queries.
    """
    query = gl.expand_dims(query, 1 - AXIS)
    key = gl.expand_dims(key, AXIS)
    found = gl.expand_dims(is_key, AXIS) & (query == query)
    if C.HAS_AHEAD:
        found = found & (key <= query + span[0])
    if C.HAS_BEHIND:
        found = found & (key >= query - span[1])
    return found


@gluon.jit
def _is_within(ours, other):
    """Return which of the positions `other` lie in the visible range of each position of `ours`.

    A program combines its own tile of queries with visited tiles of keys, or the other way around.
    `ours` contains the visible range of each position of the own tile. `other` contains the
    positions of a visited tile. A query and a key see each other if the query attends to the key. A
    position's visible range extends from the first to the last position that it sees.
    """
    _, low, high, _, _ = ours
    other = gl.expand_dims(other, 0)
    return (other >= gl.expand_dims(low, 1)) & (other <= gl.expand_dims(high, 1))


@gluon.jit
def _is_same(ours, joint_ids):
    """Return in which pairs of a query and a key neither the mask of keys nor the sequence ids hide
    the key.

    The program combines its own tile of queries with visited tiles of keys, or the other way
    around. Element 3 of `ours` contains the joint id of each position of the own tile. `joint_ids`
    contains the joint ids of a visited tile. The joint ids of a query and a key are equal if
    neither the mask of keys nor the sequence ids hide the key. So the function compares joint ids.
    """
    return gl.expand_dims(ours[3], 1) == gl.expand_dims(joint_ids, 0)


@gluon.jit
def _tile_2d(memory, ROWS: gl.constexpr, C: gl.constexpr):
    """Return, as a matrix, a tile that was loaded through a descriptor of four axes."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return seen_as(memory, memory.dtype, [ROWS, C.DEPTH_BLOCK], layout)


@gluon.jit
def _is_dirty(tile, told):
    """Return whether zeros must replace the keys or values that the mask of keys hides in a tile.

    The last two of the five items of `told` are indices of tiles, which `_dirty_tiles` returned.
    Zeros are needed in all tiles before the first index, and from the second index on. `tile` is
    the index of the tile.
    """
    _, _, _, clean, dirty = told
    return (tile < clean) | (tile >= dirty)


@gluon.jit
def _clear_hidden(memory, told, tile, C: gl.constexpr):
    """Write zeros over those keys or values of a tile that the mask of keys hides from all queries.

    The tile is in shared memory. Hidden numbers may be nan, and 0 times nan is nan. The third
    of the five items of `told` is a pointer to one number per key, which is `HIDDEN` for hidden
    keys. Every group of warps writes the same numbers, so groups need not wait for each other.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    _, _, joint_ids_ptr, _, _ = told
    key = tile * C.KEYS + gl.arange(0, C.KEYS, layout=gl.SliceLayout(1, layout))
    shown = gl.load(joint_ids_ptr + key) != HIDDEN
    here = memory.load(layout)
    memory.store(gl.where(shown[:, None], here, gl.zeros_like(here)))
    fence_async_shared()
    barrier()


@gluon.jit
def _queries_of(turn, ranges_ptr, work, C: gl.constexpr):
    """Return the tile of queries whose output a program computes in a given round.

    In each round, every program computes the output of one tile. Also return the sequence and the
    head of the tile of queries. The program combines this tile with tiles of keys. The last result
    describes the tiles of keys by five numbers:

    - the first tile of keys, the first complete one (without hidden keys), the end of the complete
      tiles;
    - the number of incomplete tiles, and the number of all these tiles of keys.
    """
    batch_heads, heads, _, queries, keys, query_tiles, ahead, behind, section = work
    if C.HAS_BOUNDS:
        tile, batch, head, found = _sorted_tile(
            turn, ranges_ptr, batch_heads, heads, query_tiles, section
        )
    else:
        tile, row = _place_of(turn, batch_heads, query_tiles, section)
        tile = query_tiles - 1 - tile
        batch = row // heads
        head = row % heads
        found = _bounds(
            tile,
            (queries, keys),
            (ahead, behind),
            (C.ROWS, C.KEYS),
            (C.HAS_AHEAD, C.HAS_BEHIND),
        )
    return tile, batch, head, found


@gluon.jit
def _load_own(q_desc, memory, full, empty, at, taken, C: gl.constexpr):
    """Load the queries of a program's tile."""
    batch, head, start = at
    mbarrier.wait(empty, (taken & 1) ^ 1)
    mbarrier.expect(full, 2 * C.ROWS * C.DEPTH_BLOCK)
    for part in gl.static_range(C.ROWS // OWN):
        load_tile(q_desc, [batch, head, start + part * OWN, 0], full, memory.index(part))


@gluon.jit
def _load_forward(descs, memory, bars, ranges_ptr, work, C: gl.constexpr):
    """Load the program's tiles of queries, and the tiles of keys and values with which each tile of
    queries is combined."""
    q_desc, k_desc, v_desc = descs
    q_memory, k_memory, v_memory, _ = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
    batch_heads, _, repeat, _, _, query_tiles, _, _, _ = work
    step = 0
    taken = 0
    for turn in range(_rounds(batch_heads * query_tiles)):
        tile, batch, head, found = _queries_of(turn, ranges_ptr, work, C)
        group = head // repeat
        count = found[4]
        if count > 0:
            own = (batch, head, tile * C.ROWS)
            if not C.HAS_BOUNDS:
                _load_own(q_desc, q_memory, q_full, q_empty, own, taken, C)
            for visit in range(count):
                other = _nth(visit, found) * C.KEYS
                stage = step % C.STAGES
                phase = ((step // C.STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), 2 * C.KEYS * C.DEPTH_BLOCK)
                load_tile(
                    k_desc, [batch, group, other, 0], k_full.index(stage), k_memory.index(stage)
                )
                # Memory for keys becomes free earlier than memory for queries.
                if C.HAS_BOUNDS and visit == 0:
                    _load_own(q_desc, q_memory, q_full, q_empty, own, taken, C)
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), 2 * C.KEYS * C.DEPTH_BLOCK)
                load_tile(
                    v_desc, [batch, group, other, 0], v_full.index(stage), v_memory.index(stage)
                )
                step += 1
            taken += 1


@gluon.jit
def _joint_ids_at(other, told, MASKED: gl.constexpr):
    """Return one number, the joint id, for each key or query of a visited tile.

    A joint id combines the mask of keys and the sequence ids of a position. A program combines its
    own tile of queries with visited tiles of keys, or the other way around. The joint ids of a
    query and a key are equal if neither the mask of keys nor the sequence ids hide the key. `other`
    contains the positions of the visited tile. `told` contains a pointer to their joint ids.

    MASKED says how `_hide` finds the hidden keys of a tile. With GAPS, `_hide` compares joint ids,
    because visible positions may have gaps between them. With other values of MASKED, this function
    returns the positions themselves, which `_hide` does not use.
    """
    joint_ids = other
    if MASKED == GAPS:
        joint_ids = gl.load(told[2] + other)
    return joint_ids


@gluon.jit
def _hide(
    numbers,
    HIDDEN_NUMBER: gl.constexpr,
    ours,
    other,
    joint_ids,
    told,
    AXIS: gl.constexpr,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """Return `numbers` with `HIDDEN_NUMBER` where a key is hidden from a query.

    `numbers` are the scores or softmax weights of a tile of queries and a tile of keys. One of
    these tiles is the program's own tile, and the other is the visited tile. `AXIS` is the axis of
    the queries: 0 if the own tile contains queries, otherwise 1. `ours` describes the positions of
    the own tile. `other` contains the positions of the visited tile.

    With MASKED = GAPS, the kernel compares joint ids. A joint id combines the mask of keys and the
    sequence ids in one number per query or key. The joint ids of a query and a key are equal if
    neither the mask of keys nor the sequence ids hide the key. `joint_ids` then contains the joint
    ids of the visited tile. `told` contains the bounds on positions, the number of keys, and a
    pointer to joint ids.
    """
    span, keys, joint_ids_ptr, _, _ = told
    query, key = ours[0], other
    if AXIS == 1:
        query, key = other, ours[0]
    if MASKED == GAPS:
        # Two comparisons with a range would cost more than those with the bounds on positions.
        found = _is_same(ours, joint_ids) & _which_count(query, key, key == key, span, AXIS, C)
    elif C.HAS_BOUNDS:
        found = _is_within(ours, other)
    else:
        found = _which_count(query, key, key < keys, span, AXIS, C)
    numbers = gl.where(found, numbers, HIDDEN_NUMBER)
    if C.HAS_BOUNDS and MASKED == EITHER and ours[4] != 0:
        numbers = gl.where(_is_same(ours, gl.load(joint_ids_ptr + other)), numbers, HIDDEN_NUMBER)
    return numbers


@gluon.jit
def _softmax(raw, total, largest, scale):
    """Return the softmax weights of a tile, the updated sums of weights, and the factor by which
    earlier results must be multiplied."""
    higher = gl.maximum(largest, gl.max(raw, 1))
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
    """Start two products: a tile's scores, and the previous tile's softmax weights times values.

    A tile is a block of keys and values. Compute the tile's softmax weights during the second
    product.
    """
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
    tile = _nth(visit, found)
    if MASKED != WHOLE and C.HAS_KEY_MASK and _is_dirty(tile, told):
        mbarrier.wait(v_full.index(stage), (step // C.STAGES) & 1)
        here = _tile_2d(v_memory.index(stage), C.KEYS, C)
        _clear_hidden(here, told, tile, C)
    mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
    if C.IN_TURN:
        mbarrier.wait(in_turn.index(PART), (turns & 1) ^ (1 - PART))
    zeros = gl.zeros([OWN * C.WARPS // 4, C.KEYS], gl.float32, score_mma)
    raw = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((step - 1) // C.STAGES) & 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if C.IN_TURN:
        mbarrier.arrive(in_turn.index(1 - PART), count=1)
    # The joint ids are loaded during the products.
    key = tile * C.KEYS + gl.arange(0, C.KEYS, layout=gl.SliceLayout(0, score_mma))
    joint_ids = _joint_ids_at(key, told, MASKED)
    raw = warpgroup_mma_wait(1, deps=[raw])
    barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED != WHOLE:
        raw = _hide(raw, float("-inf"), query, key, joint_ids, told, 0, MASKED, C)
    weight, total, largest, shrink = _softmax(raw, total, largest, scale)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(v_empty.index(before), count=1)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, out_mma))
    p = gl.convert_layout(weight.to(k.dtype), gl.DotOperandLayout(0, out_mma, 2))
    return acc * shrink[:, None], total, largest, p, turns + 1


@gluon.jit
def _attend(memory, bars, outs, ranges_ptr, work, scale, PART: gl.constexpr, C: gl.constexpr):
    """Compute the output for the queries that one group of warps owns.

    In each tile of queries, a group owns 64 queries.
    """
    out_desc, lse_ptr = outs
    q_memory, k_memory, v_memory, out_memory = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
    batch_heads, heads, repeat, queries, keys, query_tiles, ahead, behind, _ = work
    HERE: gl.constexpr = OWN * C.WARPS // 4
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.KEYS, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.DEPTH_BLOCK, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, score_mma)
    step = 0
    taken = 0
    turns = 0
    q = _tile_2d(q_memory, HERE, C)
    for turn in range(_rounds(batch_heads * query_tiles)):
        tile, batch, head, found = _queries_of(turn, ranges_ptr, work, C)
        row = batch * heads + head
        edges, count = found[3], found[4]
        place = tile * C.ROWS + PART * OWN + gl.arange(0, HERE, layout=by_row)
        is_row = place < queries
        query = (place, place, place, place, 0)
        told = ((ahead, behind), keys, ranges_ptr, 0, 0)
        if C.HAS_BOUNDS:
            mine = (batch, tile, query_tiles)
            query, joint_ids_ptr, clean, dirty = _conditions_of(
                ranges_ptr, batch_heads // heads, mine, place, keys, (row, repeat), C
            )
            told = ((ahead, behind), keys, joint_ids_ptr, clean, dirty)
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
            first = _nth(0, found)
            key = first * C.KEYS + gl.arange(0, C.KEYS, layout=gl.SliceLayout(0, score_mma))
            raw = warpgroup_mma_wait(0, deps=[raw])
            barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            raw = _hide(raw, float("-inf"), query, key, key, told, 0, EITHER, C)
            weight, total, largest, _none = _softmax(raw, total, largest, scale)
            if C.HAS_KEY_MASK and _is_dirty(first, told):
                mbarrier.wait(v_full.index(stage), (step // C.STAGES) & 1)
                here = _tile_2d(v_memory.index(stage), C.KEYS, C)
                _clear_hidden(here, told, first, C)
            p = gl.convert_layout(weight.to(k.dtype), gl.DotOperandLayout(0, out_mma, 2))
            step += 1
            ranged = edges
            if C.HAS_BOUNDS:
                ranged = (1 - query[4]) * edges
                for visit in range(1, query[4] * edges):
                    sums = (acc, total, largest, p, turns)
                    acc, total, largest, p, turns = _step_forward(
                        sums, step, visit, found, query, told, memory, bars, scale, PART, GAPS, C
                    )
                    step += 1
            for visit in range(1, ranged):
                sums = (acc, total, largest, p, turns)
                acc, total, largest, p, turns = _step_forward(
                    sums, step, visit, found, query, told, memory, bars, scale, PART, RANGE, C
                )
                step += 1
            for visit in range(gl.maximum(edges, 1), count):
                sums = (acc, total, largest, p, turns)
                acc, total, largest, p, turns = _step_forward(
                    sums, step, visit, found, query, told, memory, bars, scale, PART, WHOLE, C
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
def _attend_first(memory, bars, outs, ranges_ptr, work, scale, C: gl.constexpr):
    mine = (memory[0].index(0), memory[1], memory[2], memory[3].index(0))
    _attend(mine, bars, outs, ranges_ptr, work, scale, 0, C)


@gluon.jit
def _attend_second(memory, bars, outs, ranges_ptr, work, scale, C: gl.constexpr):
    mine = (memory[0].index(1), memory[1], memory[2], memory[3].index(1))
    _attend(mine, bars, outs, ranges_ptr, work, scale, 1, C)


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Return initialised shared-memory barriers that complete after `COUNT` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(bars.index(index), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=VARYING)
def _attention_hopper_forward_kernel(
    q_desc,  # (B, H, M, D), block 1 x 1 x OWN x DEPTH_BLOCK
    k_desc,  # (B, G, N, D), block 1 x 1 x KEYS x DEPTH_BLOCK
    v_desc,  # likewise
    out_desc,  # (B, M, H, D), block 1 x OWN x 1 x DEPTH_BLOCK
    ranges_ptr,  # the result of `ranges.find`, with HAS_BOUNDS
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
            (_attend_first, (memory, bars, outs, ranges_ptr, work, scale, C)),
            (_attend_second, (memory, bars, outs, ranges_ptr, work, scale, C)),
            (_load_forward, (descs, memory, bars, ranges_ptr, work, C)),
        ],
        [4, 1],
        [C.REGISTERS, 24],
    )
