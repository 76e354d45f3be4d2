# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of `gradient_filter`: they find the classes that count in a block of rows, and
multiply them.

Rows are sorted by the mass that they have in light tiles. Each TILE of them form a block; there are
up to 16 blocks. Each column has a word of 16 bits that say in which of the 16 blocks it counts.
Sorted by their words, columns form tiles of which nearly all count completely or not at all. Tiles
that count are packed. The rows of the weight and of its gradient that belong to their columns stay
in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import dot
from .hopper_kernels import _halves, _rows_here

# A tile of statistics is light in a row if none of its probabilities reaches this.
LIGHT = tl.constexpr(2.0**-10)
# Bits of a word: blocks of TILE rows in a block of rows of the walk.
BLOCKS = tl.constexpr(16)
# The upper bound of scores.
LARGEST = tl.constexpr(3.0e38)
# The kept elements of a row are multiplied by less than this.
MOST = tl.constexpr(256.0)


@triton.jit
def _linear_cross_entropy_filter_weigh_kernel(
    stats_ptr,  # (2, T, R) fp32: maximum, sum of exp2(z2 - base), of `hopper`
    base_ptr,  # (R,) fp32
    kept_ptr,
    inverse_ptr,  # (R,) fp32 out: factor from |X| to |p - 1(target)|, or to less with a softcap
    light_ptr,  # (R,) fp32 out: the row's mass in light tiles
    here_ptr,  # (1,) int32 out: rows of this block
    first_row,
    piece_rows,
    tiles,  # T
    scale,
    C: tl.constexpr,
):
    """Write each row's mass in light tiles, an estimate of the mass that may be dropped."""
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    rows_here = _rows_here(kept_ptr, first_row, piece_rows, C)
    tl.store(here_ptr, rows_here)
    is_row = rows < rows_here
    plane = tl.cast(tiles, tl.int64) * piece_rows
    base = tl.load(base_ptr + rows, mask=is_row, other=0.0)
    masses = tl.zeros((C.ROWS,), tl.float32)
    for start in range(0, tiles, C.TILES):
        offs = start + tl.arange(0, C.TILES)
        mask = (offs < tiles)[:, None] & is_row[None, :]
        place = plane + offs.to(tl.int64)[:, None] * piece_rows + rows[None, :]
        masses += tl.sum(tl.load(stats_ptr + place, mask=mask, other=0.0), axis=0)
    light = tl.zeros((C.ROWS,), tl.float32)
    for start in range(0, tiles, C.TILES):
        offs = start + tl.arange(0, C.TILES)
        mask = (offs < tiles)[:, None] & is_row[None, :]
        place = offs.to(tl.int64)[:, None] * piece_rows + rows[None, :]
        peak = tl.load(stats_ptr + place, mask=mask, other=float("-inf"))
        mass = tl.load(stats_ptr + plane + place, mask=mask, other=0.0)
        is_light = tl.exp2(peak - base[None, :]) < masses[None, :] * LIGHT
        light += tl.sum(tl.where(is_light, mass, 0.0), axis=0)
    tl.store(inverse_ptr + rows, 1.0 / (masses * tl.abs(scale)), mask=is_row)
    tl.store(light_ptr + rows, light / masses, mask=is_row)


@triton.jit
def _linear_cross_entropy_filter_weigh_rows_kernel(
    x_ptr,  # (R, W): gradients of logits
    row_values_ptr,  # (5, N) fp32, compact, of `hopper`
    kept_ptr,
    inverse_ptr,  # (R,) fp32 out
    light_ptr,  # (R,) fp32 out
    here_ptr,  # (1,) int32 out
    first_row,
    piece_rows,
    all_rows,
    width,
    scale,
    C: tl.constexpr,
):
    """Write each row's light mass for rows of gradients, element by element."""
    row = tl.program_id(0)
    rows_here = _rows_here(kept_ptr, first_row, piece_rows, C)
    tl.store(here_ptr, rows_here)
    if row < rows_here:
        place = row_values_ptr + first_row + row
        factor = tl.abs(tl.load(place + all_rows))
        factor = tl.maximum(factor, tl.abs(tl.load(place + 2 * all_rows))) * tl.abs(scale)
        # A row without a gradient loses no mass; a row of nan stays nan.
        inverse = tl.where(factor > 0.0, 1.0 / factor, 0.0)
        light = tl.zeros((C.BLOCK,), tl.float32)
        for start in range(0, width, C.BLOCK):
            columns = start + tl.arange(0, C.BLOCK)
            there = x_ptr + row.to(tl.int64) * width + columns
            x = tl.load(there, mask=columns < width, other=0.0).to(tl.float32)
            weighed = tl.abs(x) * inverse
            light += tl.where(weighed < LIGHT, weighed, 0.0)
        tl.store(inverse_ptr + row, inverse)
        tl.store(light_ptr + row, tl.sum(light, axis=0))


@triton.jit
def _linear_cross_entropy_filter_rank_kernel(
    light_ptr,  # (R,) fp32
    here_ptr,
    rank_ptr,  # (R,) int32 out: the row of the block at each rank
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Sort rows by their light mass. The sort is stable, and rows of nan come last."""
    rows_here = tl.load(here_ptr)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(light_ptr + rows, mask=rows < rows_here, other=0.0)
    own = tl.where(own == own, own, float("inf"))
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows_here, OTHERS):
        offs = start + tl.arange(0, OTHERS)
        other = tl.load(light_ptr + offs, mask=offs < rows_here, other=0.0)
        other = tl.where(other == other, other, float("inf"))[None, :]
        is_equal = (other == own[:, None]) & (offs[None, :] < rows[:, None])
        is_before = ((other < own[:, None]) | is_equal) & (offs < rows_here)[None, :]
        place += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(rank_ptr + place, rows, mask=rows < rows_here)


@triton.jit
def _level(index, highest, C: tl.constexpr):
    """Return the levels of these indices.

    The last level is above all scores, so it drops every column.
    """
    level = highest * tl.exp2(index.to(tl.float32) * (-C.STEP))
    return tl.where(index < C.LEVELS - 1, level, float("inf"))


@triton.jit
def _linear_cross_entropy_filter_score_kernel(
    x_ptr,  # (R, W)
    rank_ptr,
    here_ptr,
    inverse_ptr,
    score_ptr,  # (blocks, V) fp32 out
    part_ptr,  # (blocks, chunks, LEVELS, TILE) fp32 out
    vocab,
    width,  # W
    columns_here,  # of a chunk, whole strips
    highest,  # of the levels
    C: tl.constexpr,  # SUMS: score by the sum over rows, else by the most
):
    """Score columns by the block's rows; sum the elements of X that each level drops.

    The sums are of signed elements, so X is multiplied from shared memory, without another load.
    """
    block = tl.program_id(0)
    chunk = tl.program_id(1)
    rows_here = tl.load(here_ptr)
    places = block * C.TILE + tl.arange(0, C.TILE)
    is_row = places < rows_here
    source = tl.load(rank_ptr + places, mask=is_row, other=0)
    inverse = tl.load(inverse_ptr + source, mask=is_row, other=0.0)
    row_ptr = x_ptr + source.to(tl.int64) * width
    levels = _level(tl.arange(0, C.LEVELS), highest, C)
    sums = tl.zeros((C.TILE, C.LEVELS), tl.float32)
    stop = tl.minimum((chunk + 1) * columns_here, vocab)
    for start in tl.range(chunk * columns_here, stop, C.BLOCK, num_stages=C.STAGES):
        columns = start + tl.arange(0, C.BLOCK)
        # X is zero after the last column, in whole tiles.
        there = row_ptr[:, None] + columns[None, :]
        x = tl.load(there, mask=is_row[:, None], other=0.0)
        weighed = tl.abs(x).to(tl.float32) * inverse[:, None]
        if C.SUMS:
            score = tl.sum(weighed, axis=0)
        else:
            weighed = tl.where(weighed == weighed, weighed, float("inf"))
            score = tl.max(weighed, axis=0)
        # nan counts, and is below the last level.
        score = tl.where(score < LARGEST, score, LARGEST)
        tl.store(score_ptr + block * vocab + columns, score, mask=columns < vocab)
        is_under = score[:, None] < levels[None, :]
        # Zeros and ones times values that are rounded already: only the sums are rounded.
        sums = dot(x, is_under.to(x.dtype), sums, C.UPCAST)
    sums = tl.where(is_row[:, None], sums * inverse[:, None], 0.0)
    out = (block * tl.num_programs(1) + chunk) * C.LEVELS * C.TILE
    place = tl.arange(0, C.LEVELS)[None, :] * C.TILE + tl.arange(0, C.TILE)[:, None]
    tl.store(part_ptr + out + place, sums)


@triton.jit
def _linear_cross_entropy_filter_level_kernel(
    part_ptr,  # (blocks, chunks, LEVELS, TILE) fp32
    x_ptr,  # (R, W)
    score_ptr,  # (blocks, V) fp32
    inverse_ptr,
    rank_ptr,
    target_ptr,  # (N,) int32, compact, no class for a row without a target
    here_ptr,
    lost_ptr,  # (blocks, LEVELS, TILE) fp32 out: the mass that each row loses at each level
    fits_ptr,  # (blocks, LEVELS) int32 out: whether every row loses at most tau
    rest_ptr,  # (blocks, TILE) fp32 out: each row's mass without its target
    first_row,
    chunks,
    vocab,
    width,
    highest,
    limit,  # the mass that a row may lose
    C: tl.constexpr,  # SOME: levels of a program
):
    """Sum over the vocabulary the mass that rows lose at some levels.

    All elements of a row of X except its target's have one sign, so their sum is a sum of
    magnitudes.
    """
    block = tl.program_id(0)
    index = tl.program_id(1) * C.SOME + tl.arange(0, C.SOME)
    place = index[:, None] * C.TILE + tl.arange(0, C.TILE)[None, :]
    sums = tl.zeros((C.SOME, C.TILE), tl.float32)
    for start in range(0, chunks, C.CHUNKS):
        each = start + tl.arange(0, C.CHUNKS)
        at = (block * chunks + each)[:, None, None] * (C.LEVELS * C.TILE) + place[None, :, :]
        found = tl.load(part_ptr + at, mask=(each < chunks)[:, None, None], other=0.0)
        sums += tl.sum(found, axis=0)
    places = block * C.TILE + tl.arange(0, C.TILE)
    is_row = places < tl.load(here_ptr)
    source = tl.load(rank_ptr + places, mask=is_row, other=0)
    target = tl.load(target_ptr + first_row + source, mask=is_row, other=-1)
    is_class = (target >= 0) & (target < vocab)
    own = tl.load(x_ptr + source.to(tl.int64) * width + target, mask=is_class, other=0.0)
    own = own.to(tl.float32) * tl.load(inverse_ptr + source, mask=is_class, other=0.0)
    score = tl.load(score_ptr + block * vocab + target, mask=is_class, other=float("inf"))
    own = tl.where(score[None, :] < _level(index, highest, C)[:, None], own[None, :], 0.0)
    rest = tl.abs(sums - own)
    is_last = (index == C.LEVELS - 1)[:, None]
    here = rest_ptr + block * C.TILE + tl.arange(0, C.TILE)[None, :] + index[:, None] * 0
    tl.store(here, rest, mask=is_last)
    sums = rest + tl.abs(own)
    tl.store(lost_ptr + block * C.LEVELS * C.TILE + place, sums)
    # nan does not fit.
    is_over = tl.where(sums <= limit, 0, 1)
    tl.store(fits_ptr + block * C.LEVELS + index, 1 - tl.max(is_over, axis=1))


@triton.jit
def _linear_cross_entropy_filter_word_kernel(
    score_ptr,  # (blocks, V) fp32
    fits_ptr,  # (blocks, LEVELS) int32
    lost_ptr,  # (blocks, LEVELS, TILE) fp32
    rank_ptr,
    order_ptr,  # (N,) int32
    here_ptr,
    dropped_ptr,  # (N,) fp32 out, original rows
    word_ptr,  # (V,) int16 out
    first_row,
    blocks,
    vocab,
    highest,
    C: tl.constexpr,
):
    """Write a column's word: a bit for each block in which the column counts.

    The first block has the highest bit.

    A column counts in a block if it reaches the highest level at which no row loses more than tau.
    In the order of words, columns that count in rarely used blocks are adjacent. That fills more
    tiles than the reverse order of bits.
    """
    columns = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    rows_here = tl.load(here_ptr)
    index = tl.arange(0, C.LEVELS)
    word = tl.zeros((C.BLOCK,), tl.int32)
    for block in range(blocks):
        fits = tl.load(fits_ptr + block * C.LEVELS + index) > 0
        chosen = tl.min(tl.where(fits, index, C.LEVELS), axis=0)
        level = tl.sum(tl.where(index == chosen, _level(index, highest, C), 0.0), axis=0)
        # If no level fits, every column counts; in a block without rows, no column does.
        level = tl.where(chosen < C.LEVELS, level, -1.0)
        level = tl.where(block * C.TILE < rows_here, level, float("inf"))
        score = tl.load(score_ptr + block * vocab + columns, mask=columns < vocab, other=0.0)
        word |= (score >= level).to(tl.int32) << (BLOCKS - 1 - block)
        if block == tl.program_id(0):
            places = block * C.TILE + tl.arange(0, C.TILE)
            is_row = places < rows_here
            is_lost = places < tl.where(chosen < C.LEVELS, rows_here, 0)
            place = (block * C.LEVELS + chosen) * C.TILE + tl.arange(0, C.TILE)
            lost = tl.load(lost_ptr + place, mask=is_lost, other=0.0)
            source = tl.load(rank_ptr + places, mask=is_row, other=0)
            out = tl.load(order_ptr + first_row + source, mask=is_row, other=0)
            tl.store(dropped_ptr + out, lost, mask=is_row)
    tl.store(word_ptr + columns, word.to(tl.int16), mask=columns < vocab)


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def _linear_cross_entropy_filter_tile_kernel(
    word_ptr,  # (V,) int16, sorted
    column_order_ptr,  # (V,) int64
    tile_word_ptr,  # (T,) int32 out
    place_ptr,  # (T * TILE,) int32 out: where a column stands in the order
    vocab,
    TILE: tl.constexpr,
):
    """Write a tile's word: a bit for each block in which at least one of its columns counts."""
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_column = places < vocab
    # Indices after the last column do not exist; X is zero there.
    column = tl.load(column_order_ptr + places, mask=is_column, other=0)
    tl.store(place_ptr + tl.where(is_column, column, places), places)
    words = tl.load(word_ptr + places, mask=is_column, other=0).to(tl.int32) & 0xFFFF
    tl.store(tile_word_ptr + tl.program_id(0), tl.reduce(words, 0, _either))


@triton.jit
def _bits(words):
    count = words & 1
    for bit in tl.static_range(1, BLOCKS):
        count += (words >> bit) & 1
    return count


@triton.jit
def _linear_cross_entropy_filter_list_kernel(
    tile_word_ptr,  # (T,) int32
    kept_ptr,
    active_ptr,  # (1,) int32 out: how many tiles count
    is_sparse_ptr,  # (1,) int32 out: whether so many tiles fit
    dense_kept_ptr,  # (1,) int32 out: rows that are left to the dense kernels
    block_start_ptr,  # (blocks + 1,) int32 out: where a block's slots start
    slot_at_ptr,  # (blocks, T) int32 out: a block's slot of a tile, or the next one
    tile_start_ptr,  # (T + 1,) int32 out: where a tile's list starts
    tile_slot_ptr,  # (blocks * T,) int32 out: its slots
    tile_block_ptr,  # (blocks * T,) int32 out: and their blocks
    tiles,
    capacity,  # slots
    BLOCK: tl.constexpr,
):
    """List the tiles that count, in the order of either product; each block has a program."""
    block = tl.program_id(0)
    before = 0
    total = 0
    for start in range(0, tiles, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        words = tl.load(tile_word_ptr + offs, mask=offs < tiles, other=0)
        before += tl.sum(_bits(words >> (BLOCKS - block)), axis=0)
        total += tl.sum(_bits(words), axis=0)
    tl.store(block_start_ptr + block, before)
    if block == 0:
        is_sparse = total <= capacity
        tl.store(block_start_ptr + tl.num_programs(0), total)
        tl.store(tile_start_ptr + tiles, total)
        tl.store(active_ptr, total)
        tl.store(is_sparse_ptr, is_sparse.to(tl.int32))
        tl.store(dense_kept_ptr, tl.where(is_sparse, 0, tl.load(kept_ptr)))
    slot = before
    listed = 0
    for start in range(0, tiles, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        words = tl.load(tile_word_ptr + offs, mask=offs < tiles, other=0)
        count = _bits(words)
        own = (words >> (BLOCKS - 1 - block)) & 1
        first = listed + tl.cumsum(count, axis=0) - count
        here = slot + tl.cumsum(own, axis=0) - own
        at = first + _bits(words >> (BLOCKS - block))
        tl.store(slot_at_ptr + block * tiles + offs, here, mask=offs < tiles)
        tl.store(tile_slot_ptr + at, here, mask=own > 0)
        tl.store(tile_block_ptr + at, tl.zeros((BLOCK,), tl.int32) + block, mask=own > 0)
        tl.store(tile_start_ptr + offs, first, mask=offs < tl.where(block == 0, tiles, 0))
        slot += tl.sum(own, axis=0)
        listed += tl.sum(count, axis=0)


@triton.jit
def _linear_cross_entropy_filter_pack_kernel(
    x_ptr,  # (R, W)
    packed_ptr,  # (slots * TILE, TILE) out: columns of X, of the rows of a block
    slot_column_ptr,  # (slots * TILE,) int32 out: their indices; V or more after the last
    stays_ptr,  # (programs, R) fp32 out: a row's sum of the copied elements
    rank_ptr,
    here_ptr,
    place_ptr,  # (T * TILE,) int32
    tile_word_ptr,
    slot_at_ptr,
    is_sparse_ptr,
    piece_rows,
    tiles,
    width,
    C: tl.constexpr,  # STRIPS of BLOCK columns per program
):
    """Copy the tiles that count, transposed, so that a block's column is contiguous.

    The kernel reads X once, in the order of its memory.
    """
    if tl.load(is_sparse_ptr) > 0:
        block = tl.program_id(1)
        offs = tl.arange(0, C.TILE)
        places = block * C.TILE + offs
        is_row = places < tl.load(here_ptr)
        source = tl.load(rank_ptr + places, mask=is_row, other=0)
        stays = tl.zeros((C.TILE,), tl.float32)
        row_ptr = x_ptr + source.to(tl.int64) * width
        first = tl.program_id(0) * (C.STRIPS * C.BLOCK)
        stop = tl.minimum(first + C.STRIPS * C.BLOCK, tiles * C.TILE)
        for start in range(first, stop, C.BLOCK):
            columns = start + tl.arange(0, C.BLOCK)
            place = tl.load(place_ptr + columns)
            tile = place // C.TILE
            counts = ((tl.load(tile_word_ptr + tile) >> (BLOCKS - 1 - block)) & 1) > 0
            if tl.max(counts.to(tl.int32), axis=0) > 0:
                slot = tl.load(slot_at_ptr + block * tiles + tile)
                there = row_ptr[:, None] + columns[None, :]
                x = tl.load(there, mask=is_row[:, None], other=0.0)
                stays += tl.sum(tl.where(counts[None, :], x, 0.0).to(tl.float32), axis=1)
                out = slot * C.TILE + place % C.TILE
                out_ptrs = packed_ptr + out.to(tl.int64)[None, :] * C.TILE + offs[:, None]
                tl.store(out_ptrs, x, mask=counts[None, :])
                tl.store(slot_column_ptr + out, columns, mask=counts)
        out = stays_ptr + tl.program_id(0).to(tl.int64) * piece_rows + places
        tl.store(out, stays, mask=is_row)


@triton.jit
def _linear_cross_entropy_filter_restore_kernel(
    hidden_ptr,  # (R, D) rows of this block
    stride_hidden_row,
    row_scale_ptr,  # (R,) fp32
    stays_ptr,  # (parts, R) fp32
    rest_ptr,  # (R,) fp32, by rank
    inverse_ptr,
    rank_ptr,
    target_ptr,
    here_ptr,
    place_ptr,
    tile_word_ptr,
    slot_at_ptr,
    is_sparse_ptr,
    packed_ptr,  # in and out: a row's target
    restore_ptr,  # (R,) fp32 out, by rank
    ranked_ptr,  # (R, D) contiguous out, or None
    first_row,
    piece_rows,
    parts,
    tiles,
    vocab,
    depth,
    C: tl.constexpr,
):
    """Redistribute the mass that a row lost over its kept classes, in proportion.

    Then each row's gradients (target excluded) sum to the same value as without a filter. Otherwise
    classes that are never pushed down would rise over many steps. Rows are multiplied, and a target
    is divided, by the same number. Ranked rows past the last are zero.
    """
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    rows_here = tl.load(here_ptr)
    if (tl.load(is_sparse_ptr) > 0) & (
        tl.program_id(0) * C.ROWS < tl.cdiv(rows_here, C.TILE) * C.TILE
    ):
        is_row = rows < rows_here
        source = tl.load(rank_ptr + rows, mask=is_row, other=0)
        stays = tl.zeros((C.ROWS,), tl.float32)
        for start in range(0, parts, C.PARTS):
            each = start + tl.arange(0, C.PARTS)
            there = stays_ptr + each.to(tl.int64)[:, None] * piece_rows + rows[None, :]
            mask = (each < parts)[:, None] & is_row[None, :]
            stays += tl.sum(tl.load(there, mask=mask, other=0.0), axis=0)
        rest = tl.load(rest_ptr + rows, mask=is_row, other=0.0)
        target = tl.load(target_ptr + first_row + source, mask=is_row, other=-1)
        is_class = (target >= 0) & (target < vocab)
        place = tl.load(place_ptr + target, mask=is_class, other=0)
        block, tile = rows // C.TILE, place // C.TILE
        word = tl.load(tile_word_ptr + tile, mask=is_class, other=0)
        counts = is_class & (((word >> (BLOCKS - 1 - block)) & 1) > 0)
        slot = tl.load(slot_at_ptr + block * tiles + tile, mask=counts, other=0)
        at = (slot * C.TILE + place % C.TILE).to(tl.int64) * C.TILE + rows % C.TILE
        own = tl.load(packed_ptr + at, mask=counts, other=0.0).to(tl.float32)
        stays = tl.abs(stays - own) * tl.load(inverse_ptr + source, mask=is_row, other=0.0)
        # The mass is not restored in rows of nan, or if little mass or not the target is kept.
        is_some = (stays * MOST > rest) & (counts | (is_class == 0))
        restore = tl.where(is_some, rest / tl.where(is_some, stays, 1.0), 1.0)
        tl.store(restore_ptr + rows, restore, mask=is_row)
        own /= restore
        tl.store(packed_ptr + at, own.to(packed_ptr.dtype.element_ty), mask=counts)
        if ranked_ptr is not None:
            scale = tl.load(row_scale_ptr + source, mask=is_row, other=0.0) * restore
            for start in range(0, depth, C.BLOCK):
                offs = start + tl.arange(0, C.BLOCK)
                inside = (offs < depth)[None, :]
                there = source.to(tl.int64)[:, None] * stride_hidden_row + offs[None, :]
                values = tl.load(hidden_ptr + there, mask=inside & is_row[:, None], other=0.0)
                scaled = values.to(tl.float32) * scale[:, None]
                out = ranked_ptr + rows.to(tl.int64)[:, None] * depth + offs[None, :]
                tl.store(out, scaled.to(ranked_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _part(tile, index: tl.constexpr, C: tl.constexpr):
    """Return one of PARTS equal shares of the columns of a tile."""
    part = _halves(tile, C.TILE, C.BN)[index * 2 // C.PARTS]
    if C.PARTS == 4:
        part = _halves(part, C.TILE, C.BN // 2)[index % 2]
    return part


@triton.jit
def _linear_cross_entropy_filter_products_kernel(
    packed_by_step_desc,  # (slots * TILE, TILE), block BK x TILE
    packed_by_tile_desc,  # (slots * TILE, TILE), block TILE x BK
    ranked_desc,  # (R, D) rows times their scale, ranked, block BK x BN
    weight_ptr,  # (V, D) contiguous
    grad_weight_ptr,  # (V, D) contiguous, in and out, or None
    sums_ptr,  # (splits, R, D) fp32 out, ranked, or None
    slot_column_ptr,
    column_order_ptr,
    is_sparse_ptr,
    block_start_ptr,
    slot_at_ptr,
    tile_start_ptr,
    tile_slot_ptr,
    tile_block_ptr,
    counter_ptr,  # (1,) int32, 0 at first
    first_row,  # of the piece; dC is written in the first one
    blocks,
    tiles,
    splits,  # shares of the tiles, each of which has its own sum of dE
    piece_rows,
    vocab,
    depth,
    C: tl.constexpr,
):
    """Sum packed tiles times gathered rows of the weight, and add packed tiles times rows to dC.

    Tiles of dE come first, because they take longest. Those of neighbouring blocks run together and
    share rows of the weight, which stay in the L2 cache. One program computes each tile, so the
    order in which programs take tiles changes no bit.
    """
    depth_blocks = tl.cdiv(depth, C.BN)
    hidden_items = 0
    if C.NEEDS_HIDDEN:
        hidden_items = splits * blocks * depth_blocks
    items = hidden_items
    if C.NEEDS_WEIGHT:
        items += tiles * depth_blocks
    items = tl.where(tl.load(is_sparse_ptr) > 0, items, 0)
    STEPS: tl.constexpr = C.TILE // C.BK
    WIDE: tl.constexpr = C.BN // C.PARTS
    item = tl.atomic_add(counter_ptr, 1)
    while item < items:
        if item < hidden_items:
            if C.NEEDS_HIDDEN:
                first_column = (item % depth_blocks) * C.BN
                offs_d = first_column + tl.arange(0, C.BN)
                rest = item // depth_blocks
                block = blocks - 1 - rest % blocks
                split = rest // blocks
                share = tl.cdiv(tiles, splits)
                end = tl.load(block_start_ptr + block + 1)
                at = slot_at_ptr + block * tiles
                start = tl.load(at + split * share, mask=split * share < tiles, other=0)
                start = tl.where(split * share < tiles, start, end)
                last = (split + 1) * share
                stop = tl.where(last < tiles, tl.load(at + last, mask=last < tiles, other=0), end)
                acc = tl.zeros((C.TILE, C.BN), dtype=tl.float32)
                for step in range(start * STEPS, stop * STEPS):
                    g = packed_by_step_desc.load([step * C.BK, 0])
                    column = tl.load(slot_column_ptr + step * C.BK + tl.arange(0, C.BK))
                    mask = (column < vocab)[:, None] & (offs_d < depth)[None, :]
                    place = column.to(tl.int64)[:, None] * depth + offs_d[None, :]
                    c = tl.load(weight_ptr + place, mask=mask, other=0.0)
                    acc = dot(g.T, c, acc, C.UPCAST)
                rows = split * piece_rows + block * C.TILE + tl.arange(0, C.TILE)
                for index in tl.static_range(C.PARTS):
                    part = _part(acc, index, C)
                    columns = first_column + index * WIDE + tl.arange(0, WIDE)
                    place = rows.to(tl.int64)[:, None] * depth + columns[None, :]
                    tl.store(sums_ptr + place, part, mask=(columns < depth)[None, :])
        else:
            if C.NEEDS_WEIGHT:
                tile = (item - hidden_items) // depth_blocks
                first_column = (item - hidden_items) % depth_blocks * C.BN
                start = tl.load(tile_start_ptr + tile)
                stop = tl.load(tile_start_ptr + tile + 1)
                if (stop > start) | (first_row == 0):
                    acc = tl.zeros((C.TILE, C.BN), dtype=tl.float32)
                    for step in range(start * STEPS, stop * STEPS):
                        slot = tl.load(tile_slot_ptr + step // STEPS)
                        block = tl.load(tile_block_ptr + step // STEPS)
                        k = step % STEPS * C.BK
                        g = packed_by_tile_desc.load([slot * C.TILE, k])
                        e = ranked_desc.load([block * C.TILE + k, first_column])
                        acc = dot(g, e, acc, C.UPCAST)
                    places = tile * C.TILE + tl.arange(0, C.TILE)
                    is_column = places < vocab
                    column = tl.load(column_order_ptr + places, mask=is_column, other=0)
                    for index in tl.static_range(C.PARTS):
                        part = _part(acc, index, C)
                        columns = first_column + index * WIDE + tl.arange(0, WIDE)
                        mask = is_column[:, None] & (columns < depth)[None, :]
                        out_ptrs = grad_weight_ptr + column[:, None] * depth + columns[None, :]
                        if first_row > 0:
                            part += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
                        tl.store(out_ptrs, part.to(out_ptrs.dtype.element_ty), mask=mask)
        item = tl.atomic_add(counter_ptr, 1)


@triton.jit
def _linear_cross_entropy_filter_rows_kernel(
    sums_ptr,  # (splits, R, D) fp32, ranked
    grad_hidden_ptr,  # (N, D) contiguous out, original rows
    rank_ptr,
    order_ptr,  # (N,) int32
    here_ptr,
    is_sparse_ptr,
    row_scale_ptr,  # (R,) fp32
    restore_ptr,  # (R,) fp32, by rank
    first_row,
    piece_rows,
    splits,
    depth,
    BLOCK: tl.constexpr,
):
    """Add the shares of dE in a fixed order, times the row's scale, at the rows' positions."""
    place = tl.program_id(0)
    if (place < tl.load(here_ptr)) & (tl.load(is_sparse_ptr) > 0):
        source = tl.load(rank_ptr + place)
        scale = tl.load(row_scale_ptr + source) * tl.load(restore_ptr + place)
        out = tl.load(order_ptr + first_row + source).to(tl.int64) * depth
        for start in range(0, depth, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            inside = offs < depth
            sums = tl.zeros((BLOCK,), tl.float32)
            for split in range(splits):
                here = (split * piece_rows + place).to(tl.int64) * depth + offs
                sums += tl.load(sums_ptr + here, mask=inside, other=0.0)
            values = (sums * scale).to(grad_hidden_ptr.dtype.element_ty)
            tl.store(grad_hidden_ptr + out + offs, values, mask=inside)
