# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of the engine `fused` under a filter: gradients from the listed tiles of logits only.

A tile is TILE rows by TILE columns. `tile_lists.py` lists the active ones by group: a group is a
run of columns whose active tiles fit the buffer of G, one tile after the other. Every list and
count is read from the GPU; a group without work costs an empty launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import dot
from .fused_kernels import _gradient_tile, _products, _quarter, _store_tile


@triton.jit
def _linear_cross_entropy_sparse_gradient_kernel(
    hidden_desc,  # (N, D), block TILE x BK
    weight_desc,  # (V, D), block TILE x BK
    g_desc,  # (slots * TILE, TILE) out, block TILE x TILE / 4
    given,  # (V,), (V,), (N,) int32, compact, and (4, N) fp32
    kept_ptr,
    tile_row_ptr,  # row block of each active tile
    tile_column_ptr,  # column block of each active tile
    group_tile_ptr,  # (groups + 1,) int32: where a group's tiles start
    group,
    rows,
    vocab,
    depth,
    cap,  # scale and softcap
    C: tl.constexpr,
):
    """Recompute the logits of a group's tiles and write their gradient G, packed."""
    rows_here = rows
    if C.HAS_KEPT:
        rows_here = tl.load(kept_ptr)
    first = tl.load(group_tile_ptr + group)
    stop = tl.load(group_tile_ptr + group + 1)
    for tile in tl.range(first + tl.program_id(0), stop, tl.num_programs(0), flatten=C.FLATTEN):
        row_block = tl.load(tile_row_ptr + tile)
        column_block = tl.load(tile_column_ptr + tile)
        acc = _products(hidden_desc, weight_desc, (row_block, column_block), 0, depth, C)
        offs_n = row_block * C.TILE + tl.arange(0, C.TILE)
        for quarter in tl.static_range(4):
            local = quarter * (C.TILE // 4)
            part = _quarter(acc, quarter, C.TILE, C.TILE)
            is_row = offs_n < rows_here
            columns = column_block * C.TILE + local + tl.arange(0, C.TILE // 4)
            g = _gradient_tile(part, (offs_n, is_row, columns), given, (rows, vocab), cap, C)
            g_desc.store([(tile - first) * C.TILE, local], g.to(g_desc.dtype))


@triton.jit
def _linear_cross_entropy_sparse_products_kernel(
    g_by_column_desc,  # (slots * TILE, TILE), block BK x TILE
    g_by_row_desc,  # (slots * TILE, TILE), block TILE x BK
    hidden_desc,  # (N, D), block BK x BN
    weight_desc,  # (V, D), block BK x BN
    grad_weight_desc,  # (V, D) out, block TILE x BN / 4, or None
    grad_hidden_desc,  # (N, D) fp32, block TILE x BN / 4, or None
    kept_ptr,
    group_tile_ptr,  # (groups + 1,) int32: where a group's tiles start
    group_column_ptr,  # (groups + 1,) int32: its column blocks
    weight_start_ptr,  # (T + 1,) int32: where a column block's list starts
    weight_tile_ptr,  # the active tiles of each column block
    weight_row_ptr,  # and their row blocks
    hidden_start_ptr,  # (row blocks, groups + 1) int32
    hidden_tile_ptr,  # the active tiles of each row block
    hidden_column_ptr,  # and their column blocks
    group,
    groups,
    rows,
    depth,
    C: tl.constexpr,
):
    """Write the weight gradient of a group's columns and add to the hidden gradient.

    Columns without an active tile get zeros, so that each row of dC is written exactly once.
    """
    rows_here = rows
    if C.HAS_KEPT:
        rows_here = tl.load(kept_ptr)
    base = tl.load(group_tile_ptr + group)
    first_column = tl.load(group_column_ptr + group)
    stop_column = tl.load(group_column_ptr + group + 1)
    depth_blocks = tl.cdiv(depth, C.BN)
    weight_items = 0
    if C.NEEDS_WEIGHT:
        weight_items = (stop_column - first_column) * depth_blocks
    items = weight_items
    if C.NEEDS_HIDDEN:
        # A group without columns is past the last one, or this call is not sparse.
        row_blocks = tl.where(stop_column > first_column, tl.cdiv(rows_here, C.TILE), 0)
        items += row_blocks * depth_blocks
    STEPS: tl.constexpr = C.TILE // C.BK
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item < weight_items:
            if C.NEEDS_WEIGHT:
                column_block = first_column + item // depth_blocks
                depth_block = item % depth_blocks
                start = tl.load(weight_start_ptr + column_block)
                stop = tl.load(weight_start_ptr + column_block + 1)
                acc = tl.zeros((C.TILE, C.BN), dtype=tl.float32)
                for step in range(start * STEPS, stop * STEPS):
                    slot = tl.load(weight_tile_ptr + step // STEPS) - base
                    row_block = tl.load(weight_row_ptr + step // STEPS)
                    k = (step % STEPS) * C.BK
                    g = g_by_column_desc.load([slot * C.TILE + k, 0])
                    e = hidden_desc.load([row_block * C.TILE + k, depth_block * C.BN])
                    acc = dot(g.T, e, acc, C.UPCAST)
                at = (column_block * C.TILE, depth_block * C.BN)
                _store_tile(grad_weight_desc, at, acc, False, C)
        else:
            if C.NEEDS_HIDDEN:
                row = (item - weight_items) // depth_blocks
                depth_block = (item - weight_items) % depth_blocks
                start = tl.load(hidden_start_ptr + row * (groups + 1) + group)
                stop = tl.load(hidden_start_ptr + row * (groups + 1) + group + 1)
                acc = tl.zeros((C.TILE, C.BN), dtype=tl.float32)
                for step in range(start * STEPS, stop * STEPS):
                    slot = tl.load(hidden_tile_ptr + step // STEPS) - base
                    column_block = tl.load(hidden_column_ptr + step // STEPS)
                    k = (step % STEPS) * C.BK
                    g = g_by_row_desc.load([slot * C.TILE, k])
                    c = weight_desc.load([column_block * C.TILE + k, depth_block * C.BN])
                    acc = dot(g, c, acc, C.UPCAST)
                at = (row * C.TILE, depth_block * C.BN)
                _store_tile(grad_hidden_desc, at, acc, C.ADD, C)


@triton.jit
def _linear_cross_entropy_sparse_column_sums_kernel(
    g_ptr,  # (slots * TILE, TILE)
    out_ptr,  # (V,) out
    group_tile_ptr,
    group_column_ptr,
    weight_start_ptr,
    weight_tile_ptr,
    group,
    vocab,
    TILE: tl.constexpr,
):
    """Sum G over its rows: the bias gradient of a group's columns."""
    base = tl.load(group_tile_ptr + group)
    offs = tl.arange(0, TILE)
    first = tl.load(group_column_ptr + group) + tl.program_id(0)
    for column_block in range(first, tl.load(group_column_ptr + group + 1), tl.num_programs(0)):
        sums = tl.zeros((TILE,), tl.float32)
        start = tl.load(weight_start_ptr + column_block)
        for tile in range(start, tl.load(weight_start_ptr + column_block + 1)):
            slot = (tl.load(weight_tile_ptr + tile) - base).to(tl.int64)
            place = (slot * TILE + offs)[:, None] * TILE + offs[None, :]
            sums += tl.sum(tl.load(g_ptr + place).to(tl.float32), axis=0)
        columns = column_block * TILE + offs
        tl.store(out_ptr + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < vocab)


# What a tile drops from a row is sum_j |p_j - 1(j = t)|, here in steps of 2^(-1/8), rounded up.
CODE_STEPS = tl.constexpr(8.0)


@triton.jit
def _decoded(code):
    return tl.where(code == 255.0, 0.0, tl.exp2(code * (-1.0 / CODE_STEPS)))


@triton.jit
def _dropped(given, place, group, counts, offs, C: tl.constexpr):
    """Return, per tile and row: what leaving it out drops in sum, and at most in one column.

    It is given what `_linear_cross_entropy_block_score_kernel` is.
    """
    stats_ptr, compact_lse_ptr, target_logit_ptr, target_ptr = given
    rows, is_row = place
    first_row, group_rows = group
    stats_tiles, tiles = counts
    plane = tl.cast(stats_tiles, tl.int64) * group_rows
    mask = (offs < tiles)[:, None] & is_row[None, :]
    place = offs.to(tl.int64)[:, None] * group_rows + rows[None, :]
    peak = tl.load(stats_ptr + place, mask=mask, other=float("-inf"))
    mass = tl.load(stats_ptr + plane + place, mask=mask, other=0.0)
    lse = tl.load(compact_lse_ptr + first_row + rows, mask=is_row, other=0.0)
    target_logit = tl.load(target_logit_ptr + first_row + rows, mask=is_row, other=0.0)
    target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
    highest = tl.exp2(peak - lse[None, :])
    total = mass * highest
    p_target = tl.exp2(target_logit - lse)
    # 1 - p_t is the largest |p_j - 1(j = t)| of its tile, whatever else the tile holds.
    miss = tl.maximum(1.0 - p_target, 0.0)
    holds_target = (target // C.TILE)[None, :] == offs[:, None]
    holds_target = holds_target & (target >= 0)[None, :]
    others = tl.maximum(total - p_target[None, :], 0.0)
    total = tl.where(holds_target, miss[None, :] + others, total)
    highest = tl.where(holds_target, miss[None, :], highest)
    if C.KEEP_TARGETS:
        # The gradient of lse is p itself: a confident target's tile counts as much as can be.
        total = tl.where(holds_target, float("inf"), total)
        highest = tl.where(holds_target, float("inf"), highest)
    # NaN counts as infinite: such a tile is kept.
    total = tl.where(total == total, total, float("inf"))
    highest = tl.where(highest == highest, highest, float("inf"))
    return tl.where(mask, total, 0.0), tl.where(mask, highest, 0.0)


@triton.jit
def _linear_cross_entropy_block_score_kernel(
    given,  # (2 or 3, T, R) fp32: maximum and sum of exp2 of each row's tile
    # compact_lse_ptr: (N,) fp32, base 2
    # target_logit_ptr: (N,) fp32, base 2
    # target_ptr: (N,) int32
    kept_ptr,
    score_ptr,  # (row blocks, T) fp32 out
    part_ptr,  # (row blocks, chunks, 1, TILE) fp32 out
    group,
    counts,  # T of the statistics, which come for whole output tiles, and T
    threshold,
    C: tl.constexpr,
):
    """Score tiles by their largest |p_j - 1(j = t)|; sum per row what falls under the threshold."""
    first_row, group_rows = group
    _, tiles = counts
    block = tl.program_id(0)
    chunk = tl.program_id(1)
    rows = block * C.TILE + tl.arange(0, C.TILE)
    is_row = rows < group_rows
    if C.HAS_KEPT:
        is_row = is_row & (first_row + rows < tl.load(kept_ptr))
    offs = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
    total, highest = _dropped(given, (rows, is_row), group, counts, offs, C)
    score = tl.max(highest, axis=1)
    block += first_row // C.TILE
    tl.store(score_ptr + block * tiles + offs, score, mask=offs < tiles)
    sums = tl.sum(tl.where((score < threshold)[:, None], total, 0.0), axis=0)
    out = (block * tl.num_programs(1) + chunk) * C.TILE
    tl.store(part_ptr + out + tl.arange(0, C.TILE), sums)


@triton.jit
def _linear_cross_entropy_mass_code_kernel(
    given,  # as of `_linear_cross_entropy_block_score_kernel`
    kept_ptr,
    code_ptr,  # (N, T) uint8 out
    light_ptr,  # (chunks, N) fp32 out
    group,
    all_rows,
    counts,  # T of the statistics, which come for whole output tiles, and T
    threshold,
    C: tl.constexpr,
):
    """Keep one byte of what each tile would drop, and each row's sum over its light tiles."""
    first_row, group_rows = group
    _, tiles = counts
    rows = tl.program_id(0) * C.TILE + tl.arange(0, C.TILE)
    chunk = tl.program_id(1)
    is_row = rows < group_rows
    if C.HAS_KEPT:
        is_row = is_row & (first_row + rows < tl.load(kept_ptr))
    offs = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
    total, _highest = _dropped(given, (rows, is_row), group, counts, offs, C)
    code = tl.floor(tl.log2(tl.maximum(total, 1e-30)) * -CODE_STEPS)
    # 255 is exactly nothing.
    code = tl.where(total > 0.0, tl.minimum(tl.maximum(code, 0.0), 254.0), 255.0)
    place = (first_row + rows).to(tl.int64)[None, :] * tiles + offs[:, None]
    mask = (offs < tiles)[:, None] & is_row[None, :]
    tl.store(code_ptr + place, code.to(tl.uint8), mask=mask)
    upper = _decoded(code)
    light = tl.sum(tl.where(mask & (upper < threshold), upper, 0.0), axis=0)
    tl.store(light_ptr + chunk * all_rows + first_row + rows, light, mask=is_row)


@triton.jit
def _linear_cross_entropy_mass_score_kernel(
    code_ptr,  # (N, T) uint8
    rank_ptr,  # (N,) int32: the row that stands at each place
    kept_ptr,  # (1,) int32
    score_ptr,  # (row blocks, T) fp32 out
    part_ptr,  # (row blocks, chunks, LEVELS, TILE) fp32 out
    tiles,
    threshold,  # of the first level; each next one is half of it
    C: tl.constexpr,
):
    """Score tiles by the most they drop from a row; sum per row what each level would drop."""
    block = tl.program_id(0)
    chunk = tl.program_id(1)
    rows = block * C.TILE + tl.arange(0, C.TILE)
    is_row = rows < tl.load(kept_ptr)
    source = tl.load(rank_ptr + rows, mask=is_row, other=0).to(tl.int64)
    offs = chunk * C.CHUNK + tl.arange(0, C.CHUNK)
    mask = is_row[:, None] & (offs < tiles)[None, :]
    code = tl.load(code_ptr + source[:, None] * tiles + offs[None, :], mask=mask, other=255)
    upper = tl.where(mask, _decoded(code.to(tl.float32)), 0.0)
    score = tl.max(upper, axis=0)
    tl.store(score_ptr + block * tiles + offs, score, mask=offs < tiles)
    for index in tl.static_range(C.LEVELS):
        level = threshold * tl.exp2(-1.0 * index)
        sums = tl.sum(tl.where((score < level)[None, :], upper, 0.0), axis=1)
        out = ((block * tl.num_programs(1) + chunk) * C.LEVELS + index) * C.TILE
        tl.store(part_ptr + out + tl.arange(0, C.TILE), sums)


@triton.jit
def _linear_cross_entropy_select_kernel(
    score_ptr,  # (row blocks, T) fp32
    part_ptr,  # (row blocks, chunks, LEVELS, TILE) fp32
    order_ptr,  # (N,) int32 or None
    kept_ptr,  # (1,) int32 or None
    active_ptr,  # (row blocks, T) uint8 out
    dropped_ptr,  # (N,) fp32 out, original rows
    rows,
    tiles,
    chunks,
    threshold,
    limit,  # what a row may lose
    C: tl.constexpr,
):
    """Leave out the tiles under the highest level at which no row of the block loses too much."""
    block = tl.program_id(0)
    offs_n = block * C.TILE + tl.arange(0, C.TILE)
    rows_here = rows
    if C.HAS_KEPT:
        rows_here = tl.load(kept_ptr)
    is_row = offs_n < rows_here
    index = tl.arange(0, C.LEVELS)
    place = index[:, None] * C.TILE + tl.arange(0, C.TILE)[None, :]
    sums = tl.zeros((C.LEVELS, C.TILE), tl.float32)
    for chunk in range(chunks):
        sums += tl.load(part_ptr + (block * chunks + chunk) * C.LEVELS * C.TILE + place)
    levels = threshold * tl.exp2(-index.to(tl.float32))
    fits = tl.max(sums, axis=1) <= limit
    # -1 where no level fits: every tile is active.
    chosen = tl.max(tl.where(fits, levels, -1.0), axis=0)
    lost = tl.sum(tl.where((levels == chosen)[:, None], sums, 0.0), axis=0)
    out = offs_n
    if C.HAS_KEPT:
        out = tl.load(order_ptr + offs_n, mask=is_row, other=0)
    tl.store(dropped_ptr + out, lost, mask=is_row)
    for start in range(0, tiles, C.CHUNK):
        offs = start + tl.arange(0, C.CHUNK)
        score = tl.load(score_ptr + block * tiles + offs, mask=offs < tiles, other=0.0)
        active = tl.where(block * C.TILE < rows_here, (score >= chosen).to(tl.uint8), 0)
        tl.store(active_ptr + block * tiles + offs, active.to(tl.uint8), mask=offs < tiles)


@triton.jit
def _linear_cross_entropy_place_kernel(
    target_ptr,  # (N,) int32 or int64
    order_ptr,  # (N,) int32
    kept_ptr,  # (1,) int32
    place_ptr,  # (N,) int32 out, filled with -1
    compact_target_ptr,  # (N,) int32 out
    rows,
    ignore_index,
    HAS_IGNORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Invert an order of rows and gather their targets."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = offs < tl.load(kept_ptr)
    source = tl.load(order_ptr + offs, mask=is_row, other=0)
    target = tl.load(target_ptr + source, mask=is_row, other=-1).to(tl.int64)
    if HAS_IGNORE:
        target = tl.where(target == ignore_index, -1, target)
    tl.store(compact_target_ptr + offs, target.to(tl.int32), mask=is_row)
    tl.store(place_ptr + source, offs, mask=is_row)
