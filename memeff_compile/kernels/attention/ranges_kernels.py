# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that prepare a call with sequence ids or a mask of keys, for the attention kernels in
Gluon.

For each tile of queries, the first kernel finds the tiles of keys to combine with this tile. For
each query, this kernel also finds the first and the last visible key. The same kernel computes a
joint id, one number, for each query and each key. The joint ids of a query and a key are equal if
neither the mask of keys nor the sequence ids hide the key. For the gradients of keys and values,
queries and keys change roles. The second kernel finds nan and infinities at hidden keys. The third
kernel sorts the tiles by their work. The module `ranges` describes the results.

In variable names, "ours" is the tile of the program, and "others" are the tiles that it visits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.key_tiles_kernels import (
    FAR,
    ids_of,
    keys_shown,
    run_of,
    table_of,
    visited_by,
    which_count,
    whole_pairs,
)

FIELDS = tl.constexpr(8)  # numbers per tile
PART = tl.constexpr(32)  # visited positions that are compared at a time
NOWHERE = tl.constexpr(2**30)  # above every position
# Joint ids: a sequence id from -LARGEST to LARGEST - 1 is its own joint id. The joint id of another
# sequence id is LARGEST plus the first key position with this sequence id.
LARGEST = tl.constexpr(2**30)
NO_KEY = tl.constexpr(-(2**30) - 1)  # of a query that equals no key
HIDDEN = tl.constexpr(-(2**31))  # of a hidden key
# Arguments for whose values no kernel is compiled again.
VARYING = ["ahead", "behind", "queries", "keys", "tiles", "groups"]


@triton.jit
def _range_of(start, mine, span, length, own_id, ids_ptr, mask_ptr, C: tl.constexpr):
    """Compare the positions of the program's tile with `PART` (32) positions, from `start` on.

    If the program's tile contains queries, the `PART` positions are keys, and the other way around.
    A query and a key see each other if the query attends to the key. For each position of the tile,
    the results tell which of the `PART` positions it sees: the first, the last, and how many.
    """
    place, is_ours = mine
    their_mask: tl.constexpr = C.HAS_KEY_MASK and C.OURS_ARE_QUERIES
    their = (start + tl.arange(0, PART)).to(tl.int32)
    is_their = their < length
    their_id = ids_of(ids_ptr, their, is_their, C)
    if their_mask:
        is_their = keys_shown(mask_ptr, their, is_their)
    if C.OURS_ARE_QUERIES:
        found = which_count((place, own_id), (their, their_id), is_their, span, 0, C)
        found = found & is_ours[:, None]
    else:
        found = which_count((their, their_id), (place, own_id), is_ours, span, 1, C)
        found = found & is_their[None, :]
    return _ends(found, their, their + 1)


@triton.jit
def _ends(found, start, stop):
    """Return the first and last position that each position of a tile sees, and how many it sees.

    A program combines its own tile of queries with keys, or its own tile of keys with queries. A
    query and a key see each other if the query attends to the key. The positions to combine with
    the tile are passed as ranges. The vectors `start` and `stop` contain the first position of each
    range, and the position after its last one. `found` says which of these ranges each position of
    the tile sees. A position sees a range completely or not at all. The third result counts all
    positions of the ranges that a position sees.
    """
    low = tl.min(tl.where(found, start[None, :], NOWHERE), axis=1)
    high = tl.max(tl.where(found, stop[None, :] - 1, -1), axis=1)
    return low, high, tl.sum(tl.where(found, (stop - start)[None, :], 0), axis=1)


@triton.jit
def _joint_ids_of(
    place, length, ids_ptr, tables, batch, keys, ARE_KEYS: tl.constexpr, C: tl.constexpr
):
    """Return joint ids: int32 numbers that combine the mask of keys and the sequence ids.

    Each given query or key has one joint id. The joint ids of a query and a key are equal if
    neither the mask of keys nor the sequence ids hide the key.
    """
    is_inside = place < length
    joint_id = tl.zeros_like(place)
    if C.HAS_IDS:
        ids = tl.load(ids_ptr + place, mask=is_inside, other=0).to(tl.int64)
        joint_id = ids.to(tl.int32)
        is_large = (ids < -LARGEST) | (ids >= LARGEST)
        if tl.max(is_large.to(tl.int32), axis=0) != 0:
            key_ids_ptr = tables.key_ids + batch * tables.key_ids_batch
            nth = tl.full(place.shape, NOWHERE, dtype=tl.int32)
            for start in tl.range(0, keys, PART, num_stages=1):
                key = (start + tl.arange(0, PART)).to(tl.int32)
                key_id = tl.load(key_ids_ptr + key, mask=key < keys, other=0).to(tl.int64)
                is_same = (key_id[None, :] == ids[:, None]) & (key < keys)[None, :]
                nth = tl.minimum(nth, tl.min(tl.where(is_same, key[None, :], NOWHERE), axis=1))
            large = tl.where(nth < NOWHERE, nth + LARGEST, NO_KEY)
            joint_id = tl.where(is_large, large, joint_id)
    if not ARE_KEYS:
        return tl.where(is_inside, joint_id, NO_KEY)
    if C.HAS_KEY_MASK:
        is_inside = keys_shown(tables.key_mask + batch * tables.mask_batch, place, is_inside)
    return tl.where(is_inside, joint_id, HIDDEN)


@triton.jit(do_not_specialize=VARYING)
def _attention_ranges_kernel(
    tables,  # `key_tiles.Tables`
    ranges_ptr,  # `ranges.find`'s result
    ahead,
    behind,
    queries,
    keys,
    tiles,  # of one sequence
    groups,  # key heads
    C: tl.constexpr,
    # OURS: positions per tile
    # CHUNK: tiles of others looked at together
):
    tile = tl.program_id(0) % tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    batches = tl.num_programs(0) // tiles
    mask_ptr = tables.key_mask + batch * tables.mask_batch
    query_ids_ptr = tables.query_ids + batch * tables.query_ids_batch
    key_ids_ptr = tables.key_ids + batch * tables.key_ids_batch
    place = tile * C.OURS + tl.arange(0, C.OURS)
    span = (ahead, behind)
    SIZES: tl.constexpr = (C.OURS, C.OTHERS)
    OUR_MASK: tl.constexpr = C.HAS_KEY_MASK and not C.OURS_ARE_QUERIES
    THEIR_MASK: tl.constexpr = C.HAS_KEY_MASK and C.OURS_ARE_QUERIES
    if C.OURS_ARE_QUERIES:
        reach = visited_by(tile, (queries, keys), span, SIZES, (C.HAS_AHEAD, C.HAS_BEHIND))
        length, count = queries, keys
        our_ids_ptr, their_ids_ptr = query_ids_ptr, key_ids_ptr
    else:
        reach = visited_by(
            tile, (keys, queries), (behind, ahead), SIZES, (C.HAS_BEHIND, C.HAS_AHEAD)
        )
        length, count = keys, queries
        our_ids_ptr, their_ids_ptr = key_ids_ptr, query_ids_ptr
    our_table = table_of(our_ids_ptr, mask_ptr, place[None, :], length, OUR_MASK, C.HAS_IDS)
    first, full_first, full_stop, stop = reach
    is_ours = place < length
    own_id = ids_of(our_ids_ptr, place, is_ours, C)
    if OUR_MASK:
        is_ours = keys_shown(mask_ptr, place, is_ours)
    lowest = tl.full((C.OURS,), NOWHERE, dtype=tl.int32)
    highest = tl.full((C.OURS,), -1, dtype=tl.int32)
    number = tl.zeros((C.OURS,), dtype=tl.int32)
    # The first and the last visited tile, the first complete tile and the first later tile that is
    # not complete, and the same for tiles of which the mask hides no key.
    least, most, whole, broken = batch * 0 + FAR, batch * 0 - 1, batch * 0 + FAR, batch * 0 + FAR
    clean, dirty = batch * 0 + FAR, batch * 0 + FAR
    for chunk in tl.range(first // C.CHUNK, (stop + C.CHUNK - 1) // C.CHUNK, num_stages=1):
        other = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
        places = other[:, None] * C.OTHERS + tl.arange(0, C.OTHERS)[None, :]
        their_table = table_of(their_ids_ptr, mask_ptr, places, count, THEIR_MASK, C.HAS_IDS)
        _, their_every, their_low, their_high = their_table
        visited, complete = whole_pairs(other, reach, our_table, their_table, C.HAS_IDS)
        is_clean = (other >= first) & (their_every != 0)
        # A tile of one id, without hidden positions, is visible to a position as a whole or not at
        # all. Positions of other visited tiles are compared one by one.
        is_one = (other >= full_first) & (other < full_stop) & (their_every != 0)
        seen = is_one[None, :] & is_ours[:, None]
        if C.HAS_IDS:
            is_one = is_one & (their_low == their_high)
            seen = seen & is_one[None, :] & (own_id.to(tl.int64)[:, None] == their_low[None, :])
        begin = other * C.OTHERS
        low_here, high_here, more = _ends(seen, begin, tl.minimum(begin + C.OTHERS, count))
        lowest, highest = tl.minimum(lowest, low_here), tl.maximum(highest, high_here)
        number += more
        is_mixed = (visited & (is_one == 0)).to(tl.int64)
        bits = tl.sum(is_mixed << (other % C.CHUNK).to(tl.int64), axis=0)
        for index in tl.range(0, C.CHUNK, num_stages=1):
            if (bits >> index) & 1 != 0:
                for part in tl.range(0, C.OTHERS, PART, num_stages=1):
                    at = (chunk * C.CHUNK + index) * C.OTHERS + part
                    low_here, high_here, more = _range_of(
                        at, (place, is_ours), span, count, own_id, their_ids_ptr, mask_ptr, C
                    )
                    lowest, highest = tl.minimum(lowest, low_here), tl.maximum(highest, high_here)
                    number += more
        other = other.to(tl.int64)
        least = tl.minimum(least, tl.min(tl.where(visited, other, FAR), axis=0))
        most = tl.maximum(most, tl.max(tl.where(visited, other, -1), axis=0))
        whole, broken = run_of((whole, broken), other, complete)
        clean, dirty = run_of((clean, dirty), other, is_clean)
    end = most + 1
    least = tl.minimum(least, end)
    whole = tl.minimum(whole, end)
    broken = tl.maximum(tl.minimum(broken, end), whole)
    clean = tl.minimum(clean, end)
    dirty = tl.maximum(tl.minimum(dirty, end), clean)
    has_gaps = (number > 0) & (number != highest - lowest + 1)
    found_ptr = ranges_ptr + (batch * tiles + tile) * FIELDS
    tl.store(found_ptr, least.to(tl.int32))
    tl.store(found_ptr + 1, whole.to(tl.int32))
    tl.store(found_ptr + 2, broken.to(tl.int32))
    tl.store(found_ptr + 3, end.to(tl.int32))
    tl.store(found_ptr + 4, tl.max(has_gaps.to(tl.int32), axis=0))
    tl.store(found_ptr + 5, clean.to(tl.int32))
    tl.store(found_ptr + 6, dirty.to(tl.int32))
    padded = tiles * C.OURS
    other_tiles = (count + C.OTHERS - 1) // C.OTHERS
    size = 3 * padded + other_tiles * C.OTHERS
    own_ptr = ranges_ptr + batches * tiles * FIELDS + batch * size
    tl.store(own_ptr + place, lowest)
    tl.store(own_ptr + padded + place, highest)
    ARE_QUERIES: tl.constexpr = C.OURS_ARE_QUERIES
    joint_id = _joint_ids_of(place, length, our_ids_ptr, tables, batch, keys, not ARE_QUERIES, C)
    tl.store(own_ptr + 2 * padded + place, joint_id)
    # The programs of a sequence share the work of finding the joint ids of visited positions.
    for index in tl.range(tile, other_tiles, tiles, num_stages=1):
        other_place = index * C.OTHERS + tl.arange(0, C.OTHERS)
        others = _joint_ids_of(
            other_place, count, their_ids_ptr, tables, batch, keys, ARE_QUERIES, C
        )
        tl.store(own_ptr + 3 * padded + other_place, others)
    flags_ptr = ranges_ptr + batches * tiles * FIELDS + batches * size + batch * groups
    for group in tl.range(tile, groups, tiles, num_stages=1):
        tl.store(flags_ptr + group, 0)


@triton.jit(do_not_specialize=["groups", "keys", "tiles"])
def _attention_ranges_finite_kernel(
    first,  # (B, G, N, D), `key_tiles.Rows`
    second,  # likewise
    tables,  # `key_tiles.Tables`
    flags_ptr,  # (B, G) int32: 1 is written if a hidden key has nan or an infinity
    groups,
    keys,
    tiles,
    C: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    batch = (row // groups).to(tl.int64)
    group = (row % groups).to(tl.int64)
    key = (tl.program_id(0) % tiles) * C.KEYS + tl.arange(0, C.KEYS)
    is_key = key < keys
    shown = keys_shown(tables.key_mask + batch * tables.mask_batch, key, is_key)
    is_hidden = is_key & (shown == 0)
    if tl.max(is_hidden.to(tl.int32), axis=0) != 0:
        offs = tl.arange(0, C.DEPTH_BLOCK)[None, :]
        is_here = is_hidden[:, None] & (offs < C.DEPTH)
        wide = key[:, None].to(tl.int64)
        at = first.ptr + batch * first.batch + group * first.head + wide * first.row + offs
        size = tl.abs(tl.load(at, mask=is_here, other=0.0).to(tl.float32))
        if C.HAS_SECOND:
            at = second.ptr + batch * second.batch + group * second.head + wide * second.row + offs
            more = tl.abs(tl.load(at, mask=is_here, other=0.0).to(tl.float32))
            size = tl.where(more < float("inf"), size, float("inf"))
        # The comparison is false for nan.
        if tl.min((size < float("inf")).to(tl.int32)) == 0:
            tl.store(flags_ptr + row, 1)


@triton.jit(do_not_specialize=["tiles"])
def _attention_ranges_order_kernel(
    ranges_ptr,  # `ranges.find`'s result; its last number of each tile is written
    tiles,  # of all sequences
    C: tl.constexpr,
):
    tile = tl.program_id(0) * C.OURS + tl.arange(0, C.OURS)
    is_tile = tile < tiles
    found_ptr = ranges_ptr + tile.to(tl.int64) * FIELDS
    work = tl.load(found_ptr + 3, mask=is_tile, other=0)
    work -= tl.load(found_ptr, mask=is_tile, other=0)
    rank = tl.zeros((C.OURS,), dtype=tl.int32)
    for start in tl.range(0, tiles, C.OTHERS, num_stages=1):
        other = start + tl.arange(0, C.OTHERS)
        other_ptr = ranges_ptr + other.to(tl.int64) * FIELDS
        more = tl.load(other_ptr + 3, mask=other < tiles, other=0)
        more -= tl.load(other_ptr, mask=other < tiles, other=1)  # tiles outside have less than 0
        is_before = (other[None, :] < tile[:, None]) & (more[None, :] == work[:, None])
        is_before = is_before | (more[None, :] > work[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(ranges_ptr + rank.to(tl.int64) * FIELDS + 7, tile, mask=is_tile)
