# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that classify the tiles of a mask, and list the tiles that other kernels visit.

Each tile of the mask gets a code, with the same meaning as in the module `mask_tiles`. Code 0 is
empty (every key is hidden), 1 partial, and 2 full (every key is visible and the mask adds 0). If a
mask is added to scores, a tile that contains only very low numbers gets the temporary code 3. A
later step finds out whether each query of the tile has a visible key in another tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

# the code of positions beyond the mask: a tile that contains them can be full or empty
NOWHERE = tl.constexpr(4)


@triton.jit
def _all(truth):
    """Return, for each tile of a bool tensor (TILE, tiles, TILE), whether all its elements are
    true."""
    return tl.min(tl.min(truth.to(tl.int32), axis=2), axis=0)


@triton.jit
def _attention_mask_tiles_kernel(
    mask,  # (B, H, M, N), a `key_tiles.Cells`, bytes or numbers
    codes_ptr,  # (B, H, bands, tiles) uint8
    sizes,  # heads, queries, keys, bands of queries, tiles of keys
    C: tl.constexpr,
    # CHUNK: tiles looked at together
):
    heads, queries, keys, bands, tiles = sizes
    band = tl.program_id(0) % bands
    row = (tl.program_id(0) // bands).to(tl.int64)
    # The programs of a band share its chunks; for a mask of numbers one program reads whole rows.
    part, parts = tl.program_id(1), tl.num_programs(1)
    wide_zero = row * 0
    offs = tl.arange(0, C.TILE)
    is_row = band * C.TILE + offs < queries
    base = mask.ptr + (row // heads) * mask.batch + (row % heads) * mask.head
    base += (wide_zero + band * C.TILE) * mask.row
    codes_ptr += (row * bands + band) * tiles
    row_offs = ((wide_zero + offs) * mask.row)[:, None, None]
    seen = tl.zeros((C.TILE,), dtype=tl.int32)
    for chunk in tl.range(part, (tiles + C.CHUNK - 1) // C.CHUNK, parts, num_stages=1):
        tile = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
        key = tile[:, None] * C.TILE + offs[None, :]
        ptrs = base + row_offs + ((wide_zero + key) * mask.depth)[None, :, :]
        inside = is_row[:, None, None] & (key < keys)[None, :, :]
        found = tl.load(ptrs, mask=inside, other=0)
        beyond = inside == 0
        if C.IS_BIAS:
            found = found.to(tl.float32)
            seen |= tl.max(tl.max((inside & (found >= C.SEEN)).to(tl.int32), axis=2), axis=1)
            is_low = _all(beyond | (found <= C.HIDDEN))
            is_empty = _all(beyond | (found == float("-inf")))
            is_full = _all(beyond | (found == 0.0))
        else:
            is_full = _all(beyond | (found != 0))
            is_empty = _all(beyond | (found == 0))
            is_low = is_empty
        code = tl.where(is_low != 0, 3, 1)
        code = tl.where(is_empty != 0, 0, code)
        code = tl.where(is_full != 0, 2, code)
        tl.store(codes_ptr + tile, code.to(tl.uint8), mask=tile < tiles)
    if C.IS_BIAS:
        # A tile of only very low numbers is empty if each of its queries has a visible key
        # elsewhere, which is known only now.
        every = tl.min((seen | (is_row == 0).to(tl.int32)), axis=0)
        tl.debug_barrier()
        for chunk in tl.range(0, (tiles + C.CHUNK - 1) // C.CHUNK, num_stages=1):
            tile = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
            code = tl.load(codes_ptr + tile, mask=tile < tiles, other=0)
            code = tl.where(code == 3, 1 - every, code.to(tl.int32))
            tl.store(codes_ptr + tile, code.to(tl.uint8), mask=tile < tiles)


@triton.jit
def _attention_mask_tiles_lists_kernel(
    codes,  # a `key_tiles.Cells` of bytes, its row along ours and its depth along others
    lists_ptr,  # (B, H, program tiles, 3 + visited tiles) int32
    sizes,  # heads, program tiles, visited tiles, and the lengths of both sides
    C: tl.constexpr,
    # OURS, OTHERS: places per tile of the kernel; TILE: those of a code
    # CHUNK: tiles of others looked at together
):
    heads, tiles, others, our_length, other_length = sizes
    OUR_CODES: tl.constexpr = (C.OURS + C.TILE - 1) // C.TILE
    OTHER_CODES: tl.constexpr = (C.OTHERS + C.TILE - 1) // C.TILE
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    base = codes.ptr + (row // heads) * codes.batch + (row % heads) * codes.head
    list_ptr = lists_ptr + (row * tiles + tile) * (3 + others)
    ours = tile * C.OURS // C.TILE + tl.arange(0, OUR_CODES)
    full_count, partial_count = 0, 0
    for chunk in tl.range(0, (others + C.CHUNK - 1) // C.CHUNK, num_stages=1):
        other = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
        theirs = (other * C.OTHERS // C.TILE)[:, None] + tl.arange(0, OTHER_CODES)[None, :]
        ptrs = base + (row * 0 + ours)[None, :, None] * codes.row
        ptrs = ptrs + (row * 0 + theirs)[:, None, :] * codes.depth
        inside = (ours * C.TILE < our_length)[None, :, None]
        inside = inside & (theirs * C.TILE < other_length)[:, None, :]
        code = tl.load(ptrs, mask=inside, other=NOWHERE).to(tl.int32)
        is_full = tl.min(tl.min(((code == 2) | (code == 4)).to(tl.int32), axis=2), axis=1)
        is_empty = tl.min(tl.min(((code == 0) | (code == 4)).to(tl.int32), axis=2), axis=1)
        is_there = (other < others).to(tl.int32)
        # Complete tiles are read without a bounds check.
        is_full = is_full & is_there & ((other + 1) * C.OTHERS <= other_length).to(tl.int32)
        is_partial = is_there & (1 - is_empty) & (1 - is_full)
        place = 2 + full_count + tl.cumsum(is_full, axis=0) - 1
        tl.store(list_ptr + place, other, mask=is_full != 0)
        place = 1 + others - partial_count - tl.cumsum(is_partial, axis=0) + 1
        tl.store(list_ptr + place, other, mask=is_partial != 0)
        full_count += tl.sum(is_full, axis=0)
        partial_count += tl.sum(is_partial, axis=0)
    tl.store(list_ptr, full_count)
    tl.store(list_ptr + 1, partial_count)


@triton.jit
def list_of(dense, batch, head, tile, others):
    """Return the list of mask tiles that a program visits, and its numbers of full and partial
    tiles.

    In a full tile, every key is visible. All other tiles in the list are partial. `others` is the
    number of tiles that a list can contain.
    """
    list_ptr = dense.lists_ptr + batch * dense.lists_batch + head * dense.lists_head
    list_ptr += (batch * 0 + tile) * (3 + others)
    return list_ptr, tl.load(list_ptr), tl.load(list_ptr + 1)


@triton.jit
def listed(index, list_ptr, others, MASKED: tl.constexpr):
    """Return full tile number `index` of a list or, if MASKED, partial tile number `index`.

    In a full tile, every key is visible. All other tiles in the list are partial. Full tiles are
    counted from the front of the list, partial tiles from the end. `others` is the number of tiles
    that the list can contain.
    """
    place = 2 + index
    if MASKED:
        place = 1 + others - index
    return tl.load(list_ptr + place)


@triton.jit
def firsts_of(list_ptr, others):
    """Return the first full tile and the first partial tile of a program's list of mask tiles.

    In a full tile, every key is visible. All other tiles in the list are partial. If the list has
    no tile of a kind, the result for this kind has no meaning. `others` is the number of tiles that
    the list can contain.
    """
    return listed(0, list_ptr, others, False), listed(0, list_ptr, others, True)


@triton.jit
def corner_of(dense, batch, head, query, key):
    """Return the pointer to the first element of a tile of the mask."""
    return dense.ptr + batch * dense.batch + head * dense.head + query * dense.row + key * dense.key


@triton.jit
def places_in(dense, query, key):
    """Return the memory offsets of a mask's elements, relative to the first element of their tile.

    `query` and `key` are the positions of queries and keys within the tile, and are broadcast
    against each other.
    """
    return query * dense.row + key * dense.key
