# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions that decide which pairs of a query tile and a key tile are computed, and which
keys are visible in each pair.

A program visits the tiles that it combines with its own tile. A visited tile is complete if, in
this pair of tiles, every key is visible to every query. For each program, four numbers describe the
visited tiles:

- the first visited tile, and the first complete tile;
- the end of the complete tiles, and the end of all visited tiles.

If the mask depends only on positions, a kernel computes these four bounds of tile ranges itself. If
a call has sequence ids or a mask of keys, a small kernel first computes these four bounds of tile
ranges, and writes them to a table.

In variable names, `rows` and `ours` belong to the program's own tile, and `keys` and `others` to
the tiles that the program visits.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**62)


@triton.jit
def which_count(queries, keys, is_key, span, AXIS: tl.constexpr, C: tl.constexpr):
    """Return which keys of a tile each query attends to.

    `AXIS` is the axis of the queries. `queries` is the pair of the queries' positions and sequence
    ids; `keys` is the same pair for the keys. `span` is the pair of bounds `(ahead, behind)`: how
    far after and before a query its keys may be.
    """
    query = tl.expand_dims(queries[0], 1 - AXIS)
    key = tl.expand_dims(keys[0], AXIS)
    found = tl.expand_dims(is_key, AXIS)
    query_id = tl.expand_dims(queries[1], 1 - AXIS)
    key_id = tl.expand_dims(keys[1], AXIS)
    if C.HAS_AHEAD:
        found = found & (key <= query + span[0])
    if C.HAS_BEHIND:
        found = found & (key >= query - span[1])
    if C.HAS_IDS:
        found = found & (query_id == key_id)
    return found


@triton.jit
def keys_shown(mask_ptr, key, is_inside):
    """Return which keys are inside the tensor and visible under the mask of keys."""
    return is_inside & (tl.load(mask_ptr + key, mask=is_inside, other=0) != 0)


@triton.jit
def ids_of(ids_ptr, place, is_inside, C: tl.constexpr):
    """Return the sequence ids at the given positions, or the positions themselves if there are no
    ids."""
    found = place
    if C.HAS_IDS:
        found = tl.load(ids_ptr + place, mask=is_inside, other=0)
    return found


@triton.jit
def visited_by(tile, lengths, span, SIZES, IS_BOUND):
    """Return the tiles that a program visits, for masks that depend only on positions.

    A program with a tile of queries visits tiles of keys, and a program with a tile of keys visits
    tiles of queries. The lengths and the tile sizes are passed as pairs. The first element of a
    pair belongs to the program's tile, the second to the visited tiles. `span` is the pair
    `(up, down)`: position `p` of the program's tile is combined with the positions from `p - down`
    to `p + up`. `IS_BOUND` has one flag for `up` and one for `down`. If a flag is false, the mask
    does not limit the positions in this direction. The four results are:

    - the first tile, and the first complete tile (without hidden keys);
    - the end of the complete tiles, and the end of all tiles.
    """
    ours, others = lengths
    up, down = span
    low = tile * SIZES[0]
    high = tl.minimum(low + SIZES[0], ours) - 1
    first, full_first = 0, 0
    stop, full_stop = others, others
    if IS_BOUND[0]:
        stop = tl.maximum(tl.minimum(others, high + up + 1), 0)
        full_stop = tl.maximum(tl.minimum(others, low + up + 1), 0)
    if IS_BOUND[1]:
        first = tl.maximum(low - down, 0)
        full_first = tl.maximum(high - down, 0)
    stop = (stop + SIZES[1] - 1) // SIZES[1]
    first = tl.minimum(first // SIZES[1], stop)
    full_first = tl.minimum(tl.maximum((full_first + SIZES[1] - 1) // SIZES[1], first), stop)
    full_stop = tl.minimum(tl.maximum(full_stop // SIZES[1], full_first), stop)
    return first, full_first, full_stop, stop


@triton.jit
def edge_tile(index, first, full_first, full_stop):
    """Return the number of an incomplete tile (a visited tile with hidden keys), given the tile's
    index among all incomplete tiles.

    Incomplete tiles lie before and after the complete tiles.
    """
    edge = full_first - first
    return tl.where(index < edge, first + index, full_stop + index - edge)


@triton.jit
def table_of(ids_ptr, mask_ptr, place, length, HAS_MASK: tl.constexpr, HAS_IDS: tl.constexpr):
    """Return four numbers for each tile, about positions that the mask of keys does not hide.

    A tile is a block of queries or keys. Positions that the mask does not hide are shown. Without a
    mask, all positions are shown. The four numbers are:

    - whether any position of the tile is shown, and whether all of them are shown;
    - the smallest and the largest sequence id of the shown positions.

    With sequence ids, a query attends only to keys with the query's own id.
    """
    shown = place < length
    inside = tl.minimum(place, length - 1)
    if HAS_MASK:
        shown = shown & (tl.load(mask_ptr + inside) != 0)
    some = tl.max(shown.to(tl.int32), axis=1)
    every = tl.min((shown | (place >= length)).to(tl.int32), axis=1)
    low, high = some.to(tl.int64), some.to(tl.int64)
    if HAS_IDS:
        ids = tl.load(ids_ptr + inside).to(tl.int64)
        low = tl.min(tl.where(shown, ids, FAR), axis=1)
        high = tl.max(tl.where(shown, ids, -FAR), axis=1)
    return some, every, low, high


@triton.jit
def whole_pairs(other, reach, ours, theirs, HAS_IDS: tl.constexpr):
    """Return which of the tiles `other` a program visits, and which of the visited tiles are
    complete (without hidden keys).

    A program combines its own tile of queries with visited tiles of keys, or the other way around.
    A visited tile is complete if every key of the two tiles is visible to every query. `other`
    contains the indices of tiles that the program may visit.

    `reach` is the result of `visited_by`: the range of visited tiles and the range of complete
    tiles. These ranges follow from positions alone, without the mask of keys and the sequence ids.
    `ours` and `theirs` are results of `table_of` for the program's tile and for the tiles `other`.
    Each result contains four numbers for each tile:

    - whether the mask of keys shows any position of the tile, and whether it shows all of them;
    - the smallest and the largest sequence id of the shown positions.
    """
    visited = (other >= reach[0]) & (other < reach[3]) & (ours[0] * theirs[0] != 0)
    complete = (other >= reach[1]) & (other < reach[2]) & (ours[1] * theirs[1] != 0)
    if HAS_IDS:
        low, high, their_low, their_high = ours[2], ours[3], theirs[2], theirs[3]
        visited = visited & (low <= their_high) & (their_low <= high)
        complete = complete & (low == high) & (their_low == their_high) & (low == their_low)
    return visited, complete


@triton.jit
def run_of(found, other, is_in):
    """Update the start and the end of a run of consecutive tiles with the next tiles.

    `found` contains the run's start and end so far. `other` contains the numbers of the next tiles.
    `is_in` marks those of the tiles `other` that can be in the run, such as complete tiles (without
    hidden keys). The run starts at the first marked tile, and ends before the first later tile
    without a mark.
    """
    first, stop = found
    first = tl.minimum(first, tl.min(tl.where(is_in, other, FAR), axis=0))
    stop = tl.minimum(stop, tl.min(tl.where((is_in == 0) & (other > first), other, FAR), axis=0))
    return first, stop


@triton.jit
def _attention_key_tiles_bounds_kernel(
    tables,  # `key_tiles.Tables`
    lse_ptr,  # (B, H, M) fp32: minus infinity for queries without keys, with FROM_LSE
    bounds_ptr,  # (B, program tiles, 4) int32
    ahead,
    behind,
    heads,
    queries,
    keys,
    tiles,
    C: tl.constexpr,
    # OURS: places per tile
    # CHUNK: tiles of others looked at together
):
    tile = tl.program_id(0) % tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    mask_ptr = tables.key_mask + batch * tables.mask_batch
    query_ids_ptr = tables.query_ids + batch * tables.query_ids_batch
    key_ids_ptr = tables.key_ids + batch * tables.key_ids_batch
    lse_ptr += batch * heads * queries
    place = tile * C.OURS + tl.arange(0, C.OURS)
    if C.OURS_ARE_QUERIES:
        reach = visited_by(
            tile, (queries, keys), (ahead, behind), (C.OURS, C.OTHERS), (C.HAS_AHEAD, C.HAS_BEHIND)
        )
        our_table = table_of(query_ids_ptr, mask_ptr, place[None, :], queries, False, C.HAS_IDS)
        count = keys
    else:
        reach = visited_by(
            tile, (keys, queries), (behind, ahead), (C.OURS, C.OTHERS), (C.HAS_BEHIND, C.HAS_AHEAD)
        )
        our_table = table_of(key_ids_ptr, mask_ptr, place[None, :], keys, C.HAS_KEY_MASK, C.HAS_IDS)
        count = queries
    # The first visited tile, the last visited tile, the first complete tile, and the first tile
    # after it that is not complete.
    least, most, whole, broken = batch * 0 + FAR, batch * 0 - 1, batch * 0 + FAR, batch * 0 + FAR
    start, end = reach[0], reach[3]
    if C.MEAN and not C.OURS_ARE_QUERIES:
        start, end = 0, (queries + C.OTHERS - 1) // C.OTHERS
    for chunk in tl.range(start // C.CHUNK, (end + C.CHUNK - 1) // C.CHUNK, num_stages=1):
        other = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
        places = other[:, None] * C.OTHERS + tl.arange(0, C.OTHERS)[None, :]
        if C.OURS_ARE_QUERIES:
            their_table = table_of(key_ids_ptr, mask_ptr, places, keys, C.HAS_KEY_MASK, C.HAS_IDS)
        else:
            their_table = table_of(query_ids_ptr, mask_ptr, places, queries, False, C.HAS_IDS)
        visited, complete = whole_pairs(other, reach, our_table, their_table, C.HAS_IDS)
        if C.MEAN and not C.OURS_ARE_QUERIES:
            sums = tl.load(lse_ptr + places, mask=places < queries, other=0.0)
            has_empty = tl.max((sums == float("-inf")).to(tl.int32), axis=1) != 0
            visited = visited | has_empty
            complete = complete & (has_empty == 0)
        other = other.to(tl.int64)
        least = tl.minimum(least, tl.min(tl.where(visited, other, FAR), axis=0))
        most = tl.maximum(most, tl.max(tl.where(visited, other, -1), axis=0))
        whole, broken = run_of((whole, broken), other, complete)
    stop_all = most + 1
    least = tl.minimum(least, stop_all)
    whole = tl.minimum(whole, stop_all)
    broken = tl.maximum(tl.minimum(broken, stop_all), whole)
    if C.MEAN and C.OURS_ARE_QUERIES:
        is_row = place < queries
        if C.FROM_LSE:
            sums = tl.load(lse_ptr + place, mask=is_row, other=0.0)
            is_empty = (sums == float("-inf")).to(tl.int32)
        else:
            is_empty = is_row.to(tl.int32)
            query_id = ids_of(query_ids_ptr, place, is_row, C)
            if broken > whole:  # a complete tile has a key for each query
                is_empty = is_empty * 0
            else:
                for other in tl.range(least, stop_all, num_stages=1):
                    key = (other * C.OTHERS + tl.arange(0, C.OTHERS)).to(tl.int32)
                    is_key = key < keys
                    key_id = ids_of(key_ids_ptr, key, is_key, C)
                    if C.HAS_KEY_MASK:
                        is_key = keys_shown(mask_ptr, key, is_key)
                    keys_here, span = (key, key_id), (ahead, behind)
                    counts = which_count((place, query_id), keys_here, is_key, span, 0, C)
                    counts = counts & is_row[:, None]
                    is_empty = is_empty * (1 - tl.max(counts.to(tl.int32), axis=1))
        if tl.max(is_empty, axis=0) != 0:
            least, whole, broken = least * 0, whole * 0, broken * 0
            stop_all = stop_all * 0 + (count + C.OTHERS - 1) // C.OTHERS
    found_ptr = bounds_ptr + (batch * tiles + tile) * 4
    tl.store(found_ptr, least.to(tl.int32))
    tl.store(found_ptr + 1, whole.to(tl.int32))
    tl.store(found_ptr + 2, broken.to(tl.int32))
    tl.store(found_ptr + 3, stop_all.to(tl.int32))


@triton.jit
def bounds_of(bounds_ptr, batch, tile, tiles, lengths, span, SIZES, IS_BOUND, C: tl.constexpr):
    """Return the range of tiles that a program visits: read it from a table, or compute it if the
    mask depends only on positions."""
    if C.HAS_BOUNDS:
        found_ptr = bounds_ptr + (batch * tiles + tile) * 4
        first = tl.load(found_ptr)
        full_first = tl.load(found_ptr + 1)
        full_stop = tl.load(found_ptr + 2)
        stop = tl.load(found_ptr + 3)
    else:
        first, full_first, full_stop, stop = visited_by(tile, lengths, span, SIZES, IS_BOUND)
    return first, full_first, full_stop, stop
