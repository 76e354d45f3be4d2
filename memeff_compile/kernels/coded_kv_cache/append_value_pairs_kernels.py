# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Kernels that append tokens to the caches of two layers that share values. The kernels write the
windows of latest tokens and encode groups of older tokens.

Three programs per sequence and key-value head process the new tokens. One writes the lower layer's
keys, one the upper layer's keys, and one the values of both layers. A program reads only windows
that it writes itself, or that an earlier launch has written, so programs need not wait for each
other. Programs read the cache's number of tokens from GPU memory. Of a launch's programs, the one
that ends last writes the new number of tokens.

For the tokens of a prompt, a separate kernel merges the values of the two layers. The keys of the
prompt are encoded by the same kernels as for a layer that shares no values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .alignment_kernels import _centre, _centre_and_turn
from .append_codes_kernels import _code_group
from .append_pairs_kernels import _code_directions, _keep_rows, _measure, _spoil, _write


@triton.jit
def _share_group(
    rows,  # of the lower layer and of the upper: memory, the group's slots, stride of slots
    heads,  # of the lower layer and of the upper, which share the group
    tile,  # the group's place
    shared,
    maps,
    made,  # memory for the aligned rows, (2, GROUP, D) fp32
    groups,
    t,
    C: tl.constexpr,
):
    """Merge the values of two layers for one group of tokens, and encode the merged values.

    The function first applies linear maps, which make the values of the two layers similar. For
    each token, both layers then share one direction (a vector of length one). The codes' scales are
    multiplied by the length of the lower layer's value. The ratio of the upper layer's length to
    the lower layer's is stored separately.
    """
    lower, lower_slot, lower_row, upper, upper_slot, upper_row = rows
    pair, mine = heads
    ROWS: tl.constexpr = C.GROUP * C.DEPTH
    BLOCK: tl.constexpr = ROWS * C.V_BITS // 8
    SCALES: tl.constexpr = 2 * C.GROUP * (C.DEPTH // C.CHANNELS)
    SHARE: tl.constexpr = C.DEPTH // 2
    member = tl.arange(0, C.GROUP)
    _centre(lower, lower_slot, lower_row, maps.lower_means + pair * C.DEPTH, made, C, SHARE)
    map_of = (maps.upper_means + mine * C.DEPTH, maps.turns + mine * (C.DEPTH * C.DEPTH))
    _centre_and_turn(upper, upper_slot, upper_row, map_of, made + ROWS, C, SHARE)
    tl.debug_barrier()  # other threads read the rows just written
    found = _measure(made, made + ROWS, member, C.DEPTH, SHARE, C.GROUP)
    block = pair * groups + tile
    codes = (shared.v_codes + block * BLOCK, shared.v_scales + block * SCALES)
    longer = shared.norms + (mine * groups + tile) * C.GROUP
    nobody = member < 0
    both, left = (made, made + ROWS), (nobody, nobody)
    _code_directions(both, codes, (longer, longer), member, found, t, left, C, True)
    tl.debug_barrier()  # the memory is free for the next group


@triton.jit
def _keep_early(window, kept, coded, first, C: tl.constexpr):
    """Copy a sequence's first tokens to the memory for tokens that are stored exactly, not as
    codes.

    The tokens are copied before they leave the window of latest tokens. The tokens of a group are
    encoded together. A call copies only tokens of one group: the GROUP tokens from position `coded`
    on.
    """
    if C.KEPT > 0:
        place = (coded + tl.arange(0, C.GROUP)).to(tl.int32)
        row = place - first
        is_kept = (row >= 0) & (row < C.KEPT)
        _keep_rows(window, kept, place % C.WINDOW, row, is_kept, C.DEPTH, C.DEPTH // 2)


@triton.jit
def _walk_keys(source, room, at, sizes, C: tl.constexpr, WRITES: tl.constexpr):
    """Write the new keys of one sequence and head, and encode groups of older keys.

    If WRITES is false, an earlier launch has written the new keys. When the window of latest tokens
    is full, the keys of its oldest GROUP tokens are encoded together.

    Return the new number of tokens in the cache, and the new number of tokens stored as codes.
    """
    length, coded, first, is_wrong = at
    kv_heads, groups, new, _ = sizes
    pair = tl.program_id(0).to(tl.int64)
    window = room[2] + pair * (C.WINDOW * C.DEPTH)
    kept = room[3] + pair * (C.KEPT * C.DEPTH)
    token = tl.arange(0, C.TOKENS)
    done = length * 0
    if is_wrong:
        _spoil(window, length, C.DEPTH, C.WINDOW)
        done += new
    while done < new:
        count = tl.minimum(tl.minimum(new - done, coded + C.WINDOW - length), C.TOKENS)
        if WRITES:
            where = (pair, kv_heads, done, length + token, token < count)
            _write(source, window, where, C.DEPTH, C.WINDOW)
        done += count
        length += count
        if length - coded == C.WINDOW:
            tl.debug_barrier()  # the tokens just written are read by other threads
            rows = (window, coded, C.DEPTH, 1)
            _code_group(rows, room, pair, coded, first, 0, groups, C, False)
            _keep_early(window, kept, coded, first, C)
            coded += C.GROUP
            tl.debug_barrier()  # the slots are free for the next tokens
    return length, coded


@triton.jit
def _walk_values(sources, shared, lower, upper, maps, scratch_ptr, at, sizes, t, C: tl.constexpr):
    """Write the new values of one head of each of two layers, and merge the layers' older values.

    When the windows of latest tokens are full, the values of their oldest GROUP tokens are merged
    and encoded. For each of these tokens, the two layers' values then share one direction (a vector
    of length one).

    Return the new number of tokens in the cache, and the new number of tokens stored as codes.
    """
    length, coded, first, is_wrong = at
    kv_heads, groups, new, _ = sizes
    mine = tl.program_id(0).to(tl.int64)  # sequence and head of the upper layer
    pair = mine // kv_heads * kv_heads + tl.load(maps.slots + mine)  # of the lower layer
    lower_window = lower.v_window + pair * (C.WINDOW * C.DEPTH)
    upper_window = upper.v_window + mine * (C.WINDOW * C.DEPTH)
    made = scratch_ptr + mine * (2 * C.GROUP * C.DEPTH)
    token = tl.arange(0, C.TOKENS)
    done = length * 0
    if is_wrong:
        _spoil(lower_window, length, C.DEPTH, C.WINDOW)
        _spoil(upper_window, length, C.DEPTH, C.WINDOW)
        done += new
    while done < new:
        count = tl.minimum(tl.minimum(new - done, coded + C.WINDOW - length), C.TOKENS)
        if C.HAS_LOWER:
            where = (pair, kv_heads, done, length + token, token < count)
            _write(sources[0], lower_window, where, C.DEPTH, C.WINDOW)
        where = (mine, kv_heads, done, length + token, token < count)
        _write(sources[1], upper_window, where, C.DEPTH, C.WINDOW)
        done += count
        length += count
        if length - coded == C.WINDOW:
            tl.debug_barrier()  # the tokens just written are read by other threads
            slot = (coded + tl.arange(0, C.GROUP)) % C.WINDOW
            rows = (lower_window, slot, C.DEPTH, upper_window, slot, C.DEPTH)
            tile = tl.minimum(coded // C.GROUP, groups - 1)
            _share_group(rows, (pair, mine), tile, shared, maps, made, groups, t, C)
            kept = C.KEPT * C.DEPTH
            _keep_early(lower_window, lower.v_kept + pair * kept, coded, first, C)
            _keep_early(upper_window, upper.v_kept + mine * kept, coded, first, C)
            coded += C.GROUP
            tl.debug_barrier()  # the slots are free for the next tokens
    return length, coded


@triton.jit
def _coded_kv_cache_append_value_pairs_rows_kernel(
    lower_k_new,  # (B, KV_HEADS, new, D), as the others `key_tiles.Cells`; with HAS_LOWER
    lower_v_new,
    k,
    v,
    shared,  # `layout.SharedValues`
    lower,  # `layout.OwnKeys`, as upper
    upper,
    maps,  # `layout.Maps`, of values alone
    scratch_ptr,  # (B, KV_HEADS, 2, GROUP, D) fp32
    sizes,  # key-value heads, groups, new tokens, limit
    t,
    C: tl.constexpr,
    # TOKENS: written at once, at most a group
):
    _, _, new, limit = sizes
    mine = tl.program_id(0).to(tl.int64)
    length = tl.load(upper.counts)
    coded = tl.load(upper.counts + 1)
    lower_length = tl.load(lower.counts)
    due = length
    if not C.HAS_LOWER:
        due += new
    is_wrong = (length + new > limit) | (lower_length != due)
    first = (length * 0).to(tl.int32)
    if C.KEPT > 0:
        first = tl.load(shared.places + mine * C.KEPT)
    at = (length, coded, first, is_wrong)
    if tl.program_id(1) == 0:
        room = (lower.k_codes, lower.k_scales, lower.k_window, lower.k_kept)
        end, behind = _walk_keys(lower_k_new, room, at, sizes, C, C.HAS_LOWER)
    elif tl.program_id(1) == 1:
        rooms = (upper.k_codes, upper.k_scales, upper.k_window, upper.k_kept)
        end, behind = _walk_keys(k, rooms, at, sizes, C, True)
    else:
        sources = (lower_v_new, v)
        end, behind = _walk_values(
            sources, shared, lower, upper, maps, scratch_ptr, at, sizes, t, C
        )
    if not is_wrong:
        lower_length = end
    tl.debug_barrier()  # every thread has read the counts
    arrived = tl.atomic_add(upper.counts + 2, 1)
    if arrived == tl.num_programs(0) * 3 - 1:
        tl.store(upper.counts, end)
        tl.store(upper.counts + 1, behind)
        tl.store(upper.counts + 2, 0)
        tl.store(lower.counts, lower_length)
        tl.store(lower.counts + 1, behind)


@triton.jit
def _coded_kv_cache_append_value_pairs_groups_kernel(
    lower_ptr,  # values of the lower layer, (B, KV_HEADS, count, D), and its first three strides
    lower_steps,
    upper_ptr,
    upper_steps,
    shared,  # as of `_coded_kv_cache_append_value_pairs_rows_kernel`
    maps,
    scratch_ptr,  # (B, KV_HEADS, programs, 2, GROUP, D) fp32
    sizes,  # key-value heads, groups, groups to encode
    t,
    C: tl.constexpr,
):
    kv_heads, groups, due = sizes
    mine = tl.program_id(0).to(tl.int64)
    sequence = mine // kv_heads
    slot = tl.load(maps.slots + mine).to(tl.int64)
    pair = sequence * kv_heads + slot
    lower = lower_ptr + sequence * lower_steps[0] + slot * lower_steps[1]
    upper = upper_ptr + sequence * upper_steps[0] + mine % kv_heads * upper_steps[1]
    made = scratch_ptr + (mine * tl.num_programs(1) + tl.program_id(1)) * (2 * C.GROUP * C.DEPTH)
    for group in tl.range(tl.program_id(1), due, tl.num_programs(1)):
        tile = mine * 0 + group  # a 64-bit number
        place = tile * C.GROUP + tl.arange(0, C.GROUP)
        rows = (lower, place, lower_steps[2], upper, place, upper_steps[2])
        _share_group(rows, (pair, mine), tile, shared, maps, made, groups, t, C)
