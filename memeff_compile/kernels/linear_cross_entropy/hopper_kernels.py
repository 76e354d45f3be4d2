# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of the implementation `hopper`: matrix products whose epilogue processes each tile of
logits in registers.

The epilogue (the code after a tile's product) uses the tile of logits in one of three ways.

- The epilogue reduces the tile to statistics of the rows (tokens).
- The epilogue writes a tile of the logits' gradient G, if the rows' statistics are known.
- The epilogue writes a tile of X (the logits' gradient up to a factor per row).

For a logit z_ij, an element of X is X_ij = exp(z_ij - base_i), where base_i is a number near the
largest logit of row i. With a softcap, X_ij is also multiplied by dz/ds, the derivative of the
logit z with respect to the uncapped product s. With or without a softcap, X_ij is rounded once to
16 bits.

At first, base_i is the logit of row i's target class, which a separate kernel computes before all
other logits. If another rank has the target class, base_i is the logit of another class. So a
kernel can write X, the logits' gradient up to a factor per row, before the row's log-sum-exp
(lse_i) is known. If base_i is too far from the row's largest logit, that logit becomes base_i. X
is then computed again for all rows of the block of rows that contains row i.

X lacks one factor per row. Kernels that compute gradients from X multiply row i of an operand, or
of the result, by this factor. Let base_i be the number that was subtracted from the logits of row
i, and lse_i the log-sum-exp of these logits. The factor of row i is exp(base_i - lse_i) times the
derivative of the total loss with respect to the row's loss. Without a softcap, this factor of row i
is also multiplied by `scale`, the op's factor for all logits.

When lse_i is known, a later kernel overwrites the element of X in the column of the row's target
class. The new element is (p - 1) * exp(lse_i - base_i), where p is the target's probability. With a
softcap, this element of X is also multiplied by dz/ds. Here, dz/ds is the derivative of the logit z
with respect to s, the uncapped product of hidden state and weight. The kernel computes p - 1 in
fp32, and rounds only the finished number to 16 bits.

Ranks that split the vocabulary exchange log-sum-exps after writing X, the logits' gradient up to a
factor per row.

Each program computes several output tiles one after another, and loads the operands of the next
tile during the epilogue of the current tile. The kernels process compact rows: ignored rows are
left out. Kernels read the number of rows that are not ignored from GPU memory (`kept_ptr`). The CPU
never reads this number. The kernels multiply logits by log2(e), so that they can use exp2: z2 = z *
log2(e).

In variable names, n stands for rows, v for columns (vocabulary), and d for features. BM x BN is the
shape of an output tile, and BK the number of terms that one loop iteration adds. With UPCAST,
operands are widened to fp32, because Triton's interpreter cannot multiply bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._head_loss.logits_kernels import (
    FAR,
    LN2,
    LOG2E,
    count_rows,
    halves_of,
    logits_of,
    quarter_of,
)
from .._triton.products_kernels import dot

# Logarithms of probabilities are cut off at this number, whose exp2 is 0: 0 times this number is 0,
# whereas 0 times minus infinity is nan.
LOWEST = tl.constexpr(-256.0)
# Lower bound for the share of a row's mass in this rank's classes when its target is among them: X
# sums to at least 1 / HEAVIEST of the whole row's mass. X at the target is multiplied by HEAVIEST,
# which 16 bits can hold, and so can the rows of hidden states divided by it; a probability is off
# by at most 2^-32.
HEAVIEST = tl.constexpr(2.0**96)


@triton.jit
def _products(hidden_desc, weight_desc, blocks, first_row, depth, C: tl.constexpr):
    """Return the matrix product hidden @ weight.T for a block of rows and a block of columns."""
    row_block, column_block = blocks
    ROWS: tl.constexpr = hidden_desc.block_shape[0]
    COLUMNS: tl.constexpr = weight_desc.block_shape[0]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, depth, C.BK):
        e = hidden_desc.load([first_row + row_block * ROWS, k])
        c = weight_desc.load([column_block * COLUMNS, k])
        acc = dot(e, c.T, acc, C.UPCAST)
    return acc


@triton.jit
def _place(tile, row_blocks, column_blocks, C: tl.constexpr):
    """Return the row block and the column block of the tile with a given number.

    The numbering lets programs process the tiles of GROUP row blocks together. Then the operands of
    these row blocks, and of a few column blocks, stay in the L2 cache.
    """
    group = tile // (C.GROUP * column_blocks)
    local = tile % (C.GROUP * column_blocks)
    size = tl.minimum(row_blocks - group * C.GROUP, C.GROUP)
    return group * C.GROUP + local % size, local // size


@triton.jit
def _linear_cross_entropy_hopper_statistics_kernel(
    hidden_desc,  # (., D), block BM x BK
    weight_desc,  # (V, D), block BN x BK
    bias_ptr,  # (V,) or None
    column_weight_ptr,  # (V,) fp32 or None
    target_ptr,  # (N,) int32, compact, -1 for a row without a target
    kept_ptr,  # (1,) int32 or None
    # (2 to 4, T, R) fp32 out: maximum, sum of exp2, weighted sum of logits, sum of exp2(d) d, where
    # d is the distance to the maximum, never positive, so the entropy has no cancellation
    stats_ptr,
    target_logit_ptr,  # (N,) fp32 out, base 2
    first_row,  # compact row where the group of R rows starts
    hidden_row,  # where it starts in hidden_desc
    group_rows,  # R
    vocab,
    depth,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Reduce each tile of logits to a maximum and a sum of exponentials per row (token), and store
    the logit of each row's target.

    The exponentials are those of the logits minus the maximum.
    """
    rows_here = count_rows(kept_ptr, first_row, group_rows, C)
    row_blocks = tl.cdiv(rows_here, C.BM)
    column_blocks = tl.cdiv(vocab, C.BN)
    plane = tl.cast(column_blocks, tl.int64) * group_rows
    for tile in tl.range(
        tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=C.FLATTEN
    ):
        row_block = tile % row_blocks
        column_block = tile // row_blocks
        blocks = (row_block, column_block)
        acc = _products(hidden_desc, weight_desc, blocks, hidden_row, depth, C)

        rows = row_block * C.BM + tl.arange(0, C.BM)
        is_row = rows < rows_here
        offs = tl.arange(0, C.BN)
        columns = column_block * C.BN + offs
        z2, _slope = logits_of(acc, columns, bias_ptr, vocab, (scale, softcap), C)
        target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1) - column_block * C.BN
        is_here = (target >= 0) & (target < C.BN)
        if tl.max(is_here.to(tl.int32), axis=0) > 0:
            z2_target = tl.sum(tl.where(offs[None, :] == target[:, None], z2, 0.0), axis=1)
            tl.store(target_logit_ptr + first_row + rows, z2_target, mask=is_row & is_here)
        place = column_block.to(tl.int64) * group_rows + rows
        if C.WITH_LOGIT_SUM:
            counted = tl.where(columns[None, :] < vocab, z2, 0.0)
            if C.HAS_COLUMN_WEIGHT:
                counted *= tl.load(column_weight_ptr + columns, mask=columns < vocab, other=0.0)[
                    None, :
                ]
            tl.store(stats_ptr + 2 * plane + place, tl.sum(counted, axis=1), mask=is_row)
        # tl.max passes over NaN; the sum keeps it.
        peak = tl.max(z2, axis=1)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        if C.WITH_ENTROPY:
            mass = tl.zeros((C.BM,), tl.float32)
            moment = tl.zeros((C.BM,), tl.float32)
            for quarter in tl.static_range(4):
                away = quarter_of(z2, quarter, C.BM, C.BN) - base[:, None]
                power = tl.exp2(away)
                mass += tl.sum(power, axis=1)
                moment += tl.sum(power * tl.maximum(away, LOWEST), axis=1)
            last = (2 + C.WITH_LOGIT_SUM) * plane
            tl.store(stats_ptr + last + place, moment, mask=is_row)
        else:
            mass = tl.sum(tl.exp2(z2 - base[:, None]), axis=1)
        tl.store(stats_ptr + place, peak, mask=is_row)
        tl.store(stats_ptr + plane + place, mass, mask=is_row)


@triton.jit
def _linear_cross_entropy_hopper_merge_kernel(
    stats_ptr,  # (2 to 4, T, R) fp32
    target_logit_ptr,  # (N,) fp32, base 2, compact
    target_ptr,  # (N,) int32, compact
    order_ptr,  # or None
    kept_ptr,  # or None
    nll_ptr,  # (N,) fp32 out
    lse_ptr,  # (N,) fp32 out
    logit_sum_ptr,  # (N,) fp32 out, or None
    entropy_ptr,  # (N,) fp32 out, or None
    first_row,
    group_rows,
    tiles,  # T
    C: tl.constexpr,
):
    """Merge the statistics of a row's tiles, in a fixed order, into the row's results.

    A tile contains the logits of neighbouring classes. The statistics of a row in a tile include
    the largest logit and a sum of exponentials. The results are the row's loss and log-sum-exp and,
    if requested, its entropy and sum of logits.
    """
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    is_row = rows < group_rows
    if C.HAS_KEPT:
        is_row = is_row & (first_row + rows < tl.load(kept_ptr))
    plane = tl.cast(tiles, tl.int64) * group_rows
    peaks = tl.full((C.ROWS,), float("-inf"), tl.float32)
    masses = tl.zeros((C.ROWS,), tl.float32)
    weighted = tl.zeros((C.ROWS,), tl.float32)
    moments = tl.zeros((C.ROWS,), tl.float32)
    for start in range(0, tiles, C.TILES):
        offs = start + tl.arange(0, C.TILES)
        mask = (offs < tiles)[:, None] & is_row[None, :]
        place = offs.to(tl.int64)[:, None] * group_rows + rows[None, :]
        peak = tl.load(stats_ptr + place, mask=mask, other=float("-inf"))
        mass = tl.load(stats_ptr + plane + place, mask=mask, other=0.0)
        higher = tl.maximum(peaks, tl.max(peak, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        if C.WITH_ENTROPY:
            last = (2 + C.WITH_LOGIT_SUM) * plane
            moment = tl.load(stats_ptr + last + place, mask=mask, other=0.0)
            shift = tl.where(peak == float("-inf"), 0.0, peak - base[None, :])
            before = tl.where(peaks == float("-inf"), 0.0, peaks - base)
            moments = tl.exp2(peaks - base) * (moments + before * masses)
            moments += tl.sum(tl.exp2(peak - base[None, :]) * (moment + shift * mass), axis=0)
        masses = masses * tl.exp2(peaks - base)
        masses += tl.sum(mass * tl.exp2(peak - base[None, :]), axis=0)
        peaks = higher
        if C.WITH_LOGIT_SUM:
            part = tl.load(stats_ptr + 2 * plane + place, mask=mask, other=0.0)
            weighted += tl.sum(part, axis=0)
    target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
    z2_target = tl.load(target_logit_ptr + first_row + rows, mask=is_row, other=0.0)
    log_mass = tl.log2(tl.where(is_row, masses, 1.0))
    out = first_row + rows
    if C.HAS_KEPT:
        out = tl.load(order_ptr + out, mask=is_row, other=0)
    # (peak - z_t) + log(mass) rather than lse - z_t: no cancellation for a confident target.
    nll = tl.where(target >= 0, (peaks - z2_target + log_mass) * LN2, 0.0)
    tl.store(nll_ptr + out, nll, mask=is_row)
    tl.store(lse_ptr + out, (peaks + log_mass) * LN2, mask=is_row)
    if C.WITH_ENTROPY:
        tl.store(entropy_ptr + out, (log_mass - moments / masses) * LN2, mask=is_row)
    if C.WITH_LOGIT_SUM:
        tl.store(logit_sum_ptr + out, tl.where(target >= 0, weighted * LN2, 0.0), mask=is_row)


@triton.jit
def _gradient_tile(acc, place, given, sizes, cap, C: tl.constexpr):
    """Return one tile of G in fp32: the loss's gradient with respect to the product s, from which
    the logits are computed.

    The matrix s is the product of hidden states and weight. Rows and columns of the tile that are
    beyond the tensor are zero. `place` contains the rows' indices, which of the rows exist, and the
    columns' indices.
    """
    rows, is_row, columns = place
    bias_ptr, column_weight_ptr, target_ptr, row_values_ptr = given
    all_rows, vocab = sizes
    z2, slope = logits_of(acc, columns, bias_ptr, vocab, cap, C)
    lse2 = tl.load(row_values_ptr + rows, mask=is_row, other=0.0)
    of_p = tl.load(row_values_ptr + all_rows + rows, mask=is_row, other=0.0)
    of_target = tl.load(row_values_ptr + 2 * all_rows + rows, mask=is_row, other=0.0)
    target = tl.load(target_ptr + rows, mask=is_row, other=-1)
    factor = 1.0
    if not C.HAS_SOFTCAP:
        factor = slope
    of_p *= factor
    of_target *= factor
    log_p = z2 - lse2[:, None]
    p = tl.exp2(log_p)
    # p - 1 before the factor where both factors agree, as for a plain loss: no cancellation.
    is_target = columns[None, :] == target[:, None]
    if C.WITH_ENTROPY:
        of_log_p = tl.load(row_values_ptr + 4 * all_rows + rows, mask=is_row, other=0.0)
        of_log_p *= factor
        g = (of_p[:, None] - of_log_p[:, None] * tl.maximum(log_p, LOWEST)) * p
    else:
        g = of_p[:, None] * p
    g -= tl.where(is_target, of_target[:, None], 0.0)
    if C.WITH_LOGIT_SUM:
        of_sum = tl.load(row_values_ptr + 3 * all_rows + rows, mask=is_row, other=0.0) * factor
        weights = (columns < vocab).to(tl.float32)
        if C.HAS_COLUMN_WEIGHT:
            weights = tl.load(column_weight_ptr + columns, mask=columns < vocab, other=0.0)
        g += of_sum[:, None] * weights[None, :]
    if C.HAS_SOFTCAP:
        g = g * slope
    if tl.min(is_row.to(tl.int32), axis=0) == 0:  # rows beyond may hold anything, NaN too
        g = tl.where(is_row[:, None], g, 0.0)
    return g


@triton.jit
def _linear_cross_entropy_hopper_gradient_kernel(
    hidden_desc,  # (R, D), block BM x BK, or None
    hidden_ptr,  # (N, D), original rows, or None
    order_ptr,  # (N,) int32 or None
    stride_hidden_row,
    weight_desc,  # (V, D), block BN x BK
    g_desc,  # (R, W) out, block BM x BN / 4
    given,  # (V,), (V,), (N,) int32, compact, and (5, N) fp32
    kept_ptr,
    first_row,  # compact row where these rows start
    group_rows,  # R
    first_column,
    width,
    rows,
    vocab,
    depth,
    cap,  # scale and softcap
    C: tl.constexpr,  # GATHER: read the hidden states row by row, without a gathered copy
):
    """Compute the logits of `width` columns again, and write their gradient G in the input
    dtype."""
    rows_here = group_rows
    if C.HAS_KEPT:
        rows_here = tl.load(kept_ptr)
        if not C.GATHER:  # a loop with GATHER processes all rows at once
            rows_here = tl.minimum(group_rows, tl.maximum(rows_here - first_row, 0))
    row_blocks = tl.cdiv(rows_here, C.BM)
    tiles = row_blocks * tl.cdiv(width, C.BN)
    column_blocks = tl.cdiv(width, C.BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=C.FLATTEN):
        row_block, column_block = _place(tile, row_blocks, column_blocks, C)
        offs_n = row_block * C.BM + tl.arange(0, C.BM)
        acc = tl.zeros((C.BM, C.BN), dtype=tl.float32)
        if C.GATHER:
            source = tl.load(order_ptr + offs_n, mask=offs_n < rows_here, other=0).to(tl.int64)
            source_ptr = hidden_ptr + source * stride_hidden_row
        for k in range(0, depth, C.BK):
            if C.GATHER:
                offs_k = k + tl.arange(0, C.BK)
                mask = (offs_n < rows_here)[:, None] & (offs_k < depth)[None, :]
                e = tl.load(source_ptr[:, None] + offs_k[None, :], mask=mask, other=0.0)
            else:
                e = hidden_desc.load([row_block * C.BM, k])
            c = weight_desc.load([first_column + column_block * C.BN, k])
            acc = dot(e, c.T, acc, C.UPCAST)
        for quarter in tl.static_range(4):
            local = column_block * C.BN + quarter * (C.BN // 4)
            part = quarter_of(acc, quarter, C.BM, C.BN)
            row = offs_n if C.GATHER else first_row + offs_n
            place = (row, offs_n < rows_here, first_column + local + tl.arange(0, C.BN // 4))
            g = _gradient_tile(part, place, given, (rows, vocab), cap, C)
            g_desc.store([row_block * C.BM, local], g.to(g_desc.dtype))


@triton.jit
def _store_tile(desc, at, tile, ADD: tl.constexpr, C: tl.constexpr):
    """Write a tile in quarters, or add it to the tile in memory, a quarter at a time.

    No other program of the launch writes this tile.
    """
    row, first = at
    ROWS: tl.constexpr = tile.shape[0]
    parts = halves_of(tile, ROWS, C.BN)
    for half in tl.static_range(2):
        quarters = halves_of(parts[half], ROWS, C.BN // 2)
        for quarter in tl.static_range(2):
            column = first + half * (C.BN // 2) + quarter * (C.BN // 4)
            if not ADD:
                desc.store([row, column], quarters[quarter].to(desc.dtype))
            elif C.UPCAST:
                desc.store([row, column], desc.load([row, column]) + quarters[quarter])
            else:
                desc.atomic_add([row, column], quarters[quarter])


@triton.jit
def _linear_cross_entropy_hopper_class_products_kernel(
    g_by_column_desc,  # (N, W), block BK x BM
    g_by_row_desc,  # (N, W), block BM x BK
    hidden_desc,  # (N, D), block BK x BN, or None
    hidden_ptr,  # (N, D), original rows, or None
    order_ptr,  # (N,) int32 or None
    stride_hidden_row,
    weight_desc,  # (V, D), block BK x BN
    grad_weight_desc,  # (V, D) out, block BM x BN / 4, or None
    grad_hidden_desc,  # (N, D) fp32, block BM x BN / 4, or None
    kept_ptr,
    first_column,
    width,
    rows,
    depth,
    C: tl.constexpr,
    # ADD: add to grad_hidden instead of overwriting it
):
    """For a block of classes, write the weight's gradient dC = G^T E, from the logits' gradient G
    and the hidden states E. In the same launch, add G C to the hidden states' gradient dE, where C
    is the block's rows of the weight.

    The tiles of G C come after those of G^T E. They use the multiprocessors that the last tiles of
    G^T E leave idle.
    """
    rows_here = rows
    if C.HAS_KEPT:
        rows_here = tl.load(kept_ptr)
    depth_blocks = tl.cdiv(depth, C.BN)
    weight_tiles = 0
    if C.NEEDS_WEIGHT:
        weight_tiles = tl.cdiv(width, C.BM) * depth_blocks
    tiles = weight_tiles
    if C.NEEDS_HIDDEN:
        tiles += tl.cdiv(rows_here, C.BM) * depth_blocks
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if tile < weight_tiles:
            if C.NEEDS_WEIGHT:
                column_block = tile // depth_blocks
                depth_block = tile % depth_blocks
                acc = tl.zeros((C.BM, C.BN), dtype=tl.float32)
                for k in range(0, rows_here, C.BK):
                    g = g_by_column_desc.load([k, column_block * C.BM])
                    if C.GATHER:
                        offs_n = k + tl.arange(0, C.BK)
                        offs_d = depth_block * C.BN + tl.arange(0, C.BN)
                        source = tl.load(order_ptr + offs_n, mask=offs_n < rows_here, other=0)
                        place = source.to(tl.int64)[:, None] * stride_hidden_row + offs_d[None, :]
                        mask = (offs_n < rows_here)[:, None] & (offs_d < depth)[None, :]
                        e = tl.load(hidden_ptr + place, mask=mask, other=0.0)
                    else:
                        e = hidden_desc.load([k, depth_block * C.BN])
                    acc = dot(g.T, e, acc, C.UPCAST)
                at = (first_column + column_block * C.BM, depth_block * C.BN)
                _store_tile(grad_weight_desc, at, acc, False, C)
        else:
            if C.NEEDS_HIDDEN:
                row_block = (tile - weight_tiles) // depth_blocks
                depth_block = (tile - weight_tiles) % depth_blocks
                acc = tl.zeros((C.BM, C.BN), dtype=tl.float32)
                for k in range(0, width, C.BK):
                    g = g_by_row_desc.load([row_block * C.BM, k])
                    c = weight_desc.load([first_column + k, depth_block * C.BN])
                    acc = dot(g, c, acc, C.UPCAST)
                at = (row_block * C.BM, depth_block * C.BN)
                _store_tile(grad_hidden_desc, at, acc, C.ADD, C)


@triton.jit
def _linear_cross_entropy_hopper_base_kernel(
    hidden_ptr,  # (R, D) rows of this block
    stride_hidden_row,
    weight_ptr,  # (V, D) contiguous
    bias_ptr,  # (V,) or None
    target_ptr,  # (N,) int32, compact, -1 for a row without a target
    kept_ptr,  # (1,) int32 or None
    base_ptr,  # (R,) fp32 out
    first_row,
    piece_rows,
    vocab,
    depth,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Write each row's base, the number that is subtracted from the row's logits: the target's
    logit.

    In a trained model, a row's largest logit is usually slightly above its target's logit. If
    another rank has the target's class, the base is the logit of another class.
    """
    row = tl.program_id(0)
    is_row = row < count_rows(kept_ptr, first_row, piece_rows, C)
    target = tl.load(target_ptr + first_row + row, mask=is_row, other=-1)
    if C.HAS_RANKS:
        target = tl.where(target <= -2, -2 - target, target)
    is_class = (target >= 0) & (target < vocab)
    multiplied = tl.where(is_class, depth, 0)
    sums = tl.zeros((C.BLOCK,), tl.float32)
    for start in range(0, depth, C.BLOCK):
        offs = start + tl.arange(0, C.BLOCK)
        mask = offs < multiplied
        e = tl.load(hidden_ptr + row.to(tl.int64) * stride_hidden_row + offs, mask=mask, other=0.0)
        c = tl.load(weight_ptr + target.to(tl.int64) * depth + offs, mask=mask, other=0.0)
        sums += e.to(tl.float32) * c.to(tl.float32)
    s = tl.zeros((1,), tl.float32) + tl.sum(sums, axis=0)
    column = tl.zeros((1,), tl.int32) + tl.where(is_class, target, vocab)
    z2, _slope = logits_of(s[:, None], column, bias_ptr, vocab, (scale, softcap), C)
    tl.store(base_ptr + row, tl.where(is_class, tl.sum(tl.sum(z2, axis=1), axis=0), 0.0))


@triton.jit
def _linear_cross_entropy_hopper_logits_kernel(
    hidden_desc,  # (., D), block BM x BK
    weight_desc,  # (V, D), block BN x BK
    x_desc,  # (R, W) out, W the vocabulary in whole tiles, block BM x BN / 4
    bias_ptr,
    target_ptr,  # (N,) int32, compact
    kept_ptr,
    again_ptr,  # (1,) int32: whether a base was too far off, or None
    base_ptr,  # (R,) fp32
    stats_ptr,  # (2, T, R) fp32 out: maximum, sum of exp2(z2 - base)
    target_logit_ptr,  # (R,) fp32 out, base 2
    first_row,  # compact row where the block of rows starts
    hidden_row,  # where it starts in hidden_desc
    piece_rows,  # R
    vocab,
    depth,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Write X (the logits' gradient up to a factor per row) and the statistics of its rows, tile by
    tile.

    The kernel processes one block of rows (tokens), in tiles of BM x BN logits. In the last tiles,
    X has zeros in rows after the block's last row, and in columns after the last class.
    """
    rows_here = count_rows(kept_ptr, first_row, piece_rows, C)
    row_blocks = tl.cdiv(rows_here, C.BM)
    column_blocks = tl.cdiv(vocab, C.BN)
    tiles = row_blocks * column_blocks
    if C.HAS_AGAIN:
        tiles = tl.where(tl.load(again_ptr) > 0, tiles, 0)
    plane = tl.cast(column_blocks, tl.int64) * piece_rows
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=C.FLATTEN):
        blocks = _place(tile, row_blocks, column_blocks, C)
        row_block, column_block = blocks
        acc = _products(hidden_desc, weight_desc, blocks, hidden_row, depth, C)

        rows = row_block * C.BM + tl.arange(0, C.BM)
        is_row = rows < rows_here
        base = tl.load(base_ptr + rows, mask=is_row, other=0.0)
        target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1) - column_block * C.BN
        has_target = tl.max(((target >= 0) & (target < C.BN)).to(tl.int32), axis=0) > 0
        peak = tl.full((C.BM,), float("-inf"), tl.float32)
        mass = tl.zeros((C.BM,), tl.float32)
        for quarter in tl.static_range(4):
            first = column_block * C.BN + quarter * (C.BN // 4)
            offs = tl.arange(0, C.BN // 4)
            columns = first + offs
            part = quarter_of(acc, quarter, C.BM, C.BN)
            z2, slope = logits_of(part, columns, bias_ptr, vocab, (scale, softcap), C)
            if has_target:
                local = target - quarter * (C.BN // 4)
                is_here = (local >= 0) & (local < C.BN // 4)
                z2_target = tl.sum(tl.where(offs[None, :] == local[:, None], z2, 0.0), axis=1)
                tl.store(target_logit_ptr + rows, z2_target, mask=is_row & is_here)
            # tl.max passes over NaN; the sum keeps it.
            peak = tl.maximum(peak, tl.max(z2, axis=1))
            x = tl.exp2(z2 - base[:, None])
            mass += tl.sum(x, axis=1)
            if C.HAS_SOFTCAP:
                x *= slope
            if (row_block + 1) * C.BM > rows_here:  # rows beyond may hold anything, NaN too
                x = tl.where(is_row[:, None], x, 0.0)
            x_desc.store([row_block * C.BM, first], x.to(x_desc.dtype))
        place = column_block.to(tl.int64) * piece_rows + rows
        tl.store(stats_ptr + place, peak, mask=is_row)
        tl.store(stats_ptr + plane + place, mass, mask=is_row)


@triton.jit
def _linear_cross_entropy_hopper_loss_kernel(
    stats_ptr,  # (2, T, R) fp32
    target_logit_ptr,  # (R,) fp32, base 2
    target_ptr,  # (N,) int32, compact
    order_ptr,  # (N,) int32 or None
    kept_ptr,
    factor_ptr,  # (N,) fp32, original rows: the factor of the gradient of a row's loss
    base_ptr,  # (R,) fp32, in and, where it is too far off, out
    again_ptr,  # (1,) int32 out
    # (R,) fp32 out: the factor of X, or its sums if ranks have not exchanged theirs yet
    row_scale_ptr,
    x_ptr,  # (R, W), one element per row out
    nll_ptr,  # (N,) fp32 out, original rows
    said_ptr,  # (2, R) fp32 out: the values that ranks exchange, or None
    first_row,
    piece_rows,
    tiles,  # T
    width,  # W
    vocab,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Without FINAL, check whether the number subtracted from a row's logits (the base) is near the
    row's largest logit. With FINAL, add up each row's sums of exponentials over all tiles of
    classes, in a fixed order, and compute the row's loss.

    If a row's base is too far from the row's largest logit, that logit becomes the new base. If
    ranks split the vocabulary, this kernel only writes the statistics that the ranks exchange, and
    another kernel computes the loss.
    """
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    rows_here = count_rows(kept_ptr, first_row, piece_rows, C)
    is_row = rows < rows_here
    plane = tl.cast(tiles, tl.int64) * piece_rows
    base = tl.load(base_ptr + rows, mask=is_row, other=0.0)
    if not C.FINAL:
        peaks = tl.full((C.ROWS,), float("-inf"), tl.float32)
        for start in range(0, tiles, C.TILES):
            offs = start + tl.arange(0, C.TILES)
            mask = (offs < tiles)[:, None] & is_row[None, :]
            place = offs.to(tl.int64)[:, None] * piece_rows + rows[None, :]
            peak = tl.load(stats_ptr + place, mask=mask, other=float("-inf"))
            peaks = tl.maximum(peaks, tl.max(peak, axis=0))
        is_far = is_row & ((tl.abs(peaks - base) > FAR) | (tl.abs(base) == float("inf")))
        # A row of -inf alone keeps a base of 0: its sum is 0 and its loss nan, as in eager.
        nearer = tl.where(peaks == float("-inf"), 0.0, peaks)
        tl.store(base_ptr + rows, nearer, mask=is_far)
        if tl.max(is_far.to(tl.int32), axis=0) > 0:
            tl.store(again_ptr, 1)
    else:
        masses = tl.zeros((C.ROWS,), tl.float32)
        for start in range(0, tiles, C.TILES):
            offs = start + tl.arange(0, C.TILES)
            mask = (offs < tiles)[:, None] & is_row[None, :]
            place = offs.to(tl.int64)[:, None] * piece_rows + rows[None, :]
            mass = tl.load(stats_ptr + plane + place, mask=mask, other=0.0)
            masses += tl.sum(mass, axis=0)
        target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
        z2_target = tl.load(target_logit_ptr + rows, mask=is_row, other=0.0)
        # (base - z_t) + log(mass) rather than lse - z_t: no cancellation for a confident target.
        log_mass = tl.log2(tl.where(is_row, masses, 1.0))
        nll2 = (base - z2_target) + log_mass
        has_target = is_row & (target >= 0) & (target < vocab)
        # A target outside the vocabulary gives nan, which cannot pass for a loss.
        nll = tl.where(has_target, nll2 * LN2, tl.where(target < 0, 0.0, float("nan")))
        if C.HAS_RANKS:
            tl.store(said_ptr + rows, (base + log_mass) * LN2, mask=is_row)
            tl.store(said_ptr + piece_rows + rows, nll, mask=is_row)
            tl.store(row_scale_ptr + rows, masses, mask=is_row)
        else:
            source = first_row + rows
            if C.HAS_KEPT:
                source = tl.load(order_ptr + source, mask=is_row, other=0)
            tl.store(nll_ptr + source, nll, mask=is_row)
            factor = tl.load(factor_ptr + source, mask=is_row, other=0.0)
            if not C.HAS_SOFTCAP:
                factor *= scale
            tl.store(row_scale_ptr + rows, factor / masses, mask=is_row)
            at = (x_ptr + rows.to(tl.int64) * width + target, has_target)
            _store_at_target(at, nll2, masses, z2_target, (scale, softcap), C)


@triton.jit
def _store_at_target(at, nll2, mass, z2_target, cap, C: tl.constexpr):
    """Write the elements of X (the logits' gradient up to a factor per row) at the rows' targets.

    Such an element is (p - 1) * mass, where p is the target's probability. `mass` is the sum of
    exp(z - base) over the row's logits z, where base is the number subtracted from them. With a
    softcap, the element of X is also multiplied by dz/ds. Here, dz/ds is the derivative of the
    logit z with respect to s, the uncapped product of hidden state and weight. The probability is
    p = 2^-nll2, where nll2 is the row's loss divided by ln(2)."""
    ptrs, mask = at
    scale, softcap = cap
    x = (tl.exp2(-nll2) - 1.0) * mass
    if C.HAS_SOFTCAP:
        ratio = z2_target * LN2 / softcap
        x *= scale * (1.0 - ratio * ratio)
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _linear_cross_entropy_hopper_ranks_kernel(
    every_ptr,  # (P, 2, R) fp32: log-sum-exps and losses that each rank has of its classes
    target_logit_ptr,  # (R,) fp32, base 2
    target_ptr,  # (N,) int32, compact
    owner_ptr,  # (N,) int32, original rows: which rank has the target
    order_ptr,  # (N,) int32 or None
    kept_ptr,
    factor_ptr,  # (N,) fp32, original rows
    row_scale_ptr,  # (R,) fp32: in: the sum of X; out: its factor
    x_ptr,  # (R, W), one element per row of which the target is here out
    nll_ptr,  # (N,) fp32 out, original rows
    first_row,
    piece_rows,
    width,  # W
    rank,
    ranks,  # P
    scale,
    softcap,
    C: tl.constexpr,
):
    """Compute the loss of a row (token) from the log-sum-exps and losses that all ranks sent.

    Each rank sends the numbers of its own classes. The kernel merges the numbers in the order of
    the ranks, so all ranks get the same loss.
    """
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    is_row = rows < count_rows(kept_ptr, first_row, piece_rows, C)
    source = first_row + rows
    if C.HAS_KEPT:
        source = tl.load(order_ptr + source, mask=is_row, other=0)
    owner = tl.load(owner_ptr + source, mask=is_row, other=0)
    peak = tl.full((C.ROWS,), float("-inf"), tl.float32)
    nll2 = tl.zeros((C.ROWS,), tl.float32)
    place = every_ptr + rows
    for _each in range(0, ranks):
        peak = tl.maximum(peak, tl.load(place, mask=is_row, other=0.0) * LOG2E)
        nll2 += tl.load(place + piece_rows, mask=is_row, other=0.0) * LOG2E
        place += 2 * piece_rows
    mass = tl.zeros((C.ROWS,), tl.float32)
    place = every_ptr + rows
    for _each in range(0, ranks):
        # tl.maximum passes over NaN; the sum keeps it.
        mass += tl.exp2(tl.load(place, mask=is_row, other=0.0) * LOG2E - peak)
        place += 2 * piece_rows
    above = tl.log2(mass)
    at_owner = owner.to(tl.int64) * 2 * piece_rows
    own = tl.load(every_ptr + at_owner + rows, mask=is_row, other=0.0) * LOG2E
    # No difference of two large numbers for a confident target; a class at -inf loses inf.
    nll2 = tl.where(own == float("-inf"), 0.0, nll2) + ((peak - own) + above)
    target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
    tl.store(nll_ptr + source, tl.where(target == -1, 0.0, nll2 * LN2), mask=is_row)

    at_rank = tl.cast(rank, tl.int64) * 2 * piece_rows
    mine = tl.load(every_ptr + at_rank + rows, mask=is_row, other=0.0) * LOG2E
    here = tl.load(row_scale_ptr + rows, mask=is_row, other=1.0)
    heavier = here * tl.exp2((peak - mine) + above)
    # If this rank's sum is 0, as when all its classes are at -inf, it has no share of the others'.
    is_nothing = (here == 0.0) & (peak > float("-inf"))
    heavier = tl.where(is_nothing, float("inf"), heavier)
    has_target = is_row & (target >= 0)
    heavier = tl.where(has_target & (heavier > HEAVIEST), HEAVIEST, heavier)
    factor = tl.load(factor_ptr + source, mask=is_row, other=0.0)
    if not C.HAS_SOFTCAP:
        factor *= scale
    tl.store(row_scale_ptr + rows, factor / heavier, mask=is_row)
    z2_target = tl.load(target_logit_ptr + rows, mask=has_target, other=0.0)
    at = (x_ptr + rows.to(tl.int64) * width + target, has_target)
    _store_at_target(at, nll2, heavier, z2_target, (scale, softcap), C)


@triton.jit
def _linear_cross_entropy_hopper_products_kernel(
    x_by_column_desc,  # (R, W), block BK x BM
    x_by_row_desc,  # (R, W), block BM x BK
    scaled_desc,  # (R, D) rows times their scale, block BK x BN
    weight_desc,  # (V, D), block BK x BN
    grad_weight_desc,  # (V, D) in and out, block BM x BN / 4, or None
    grad_hidden_ptr,  # (N, D) contiguous out, original rows, or None
    order_ptr,
    kept_ptr,
    row_scale_ptr,  # (R,) fp32
    counter_ptr,  # (1,) int32, 0 at first
    first_row,
    piece_rows,
    width,
    vocab,
    depth,
    C: tl.constexpr,  # ADD: to grad_weight; MAY_REST: do not write it in blocks without rows
):
    """Write the hidden states' gradient (dE) of a block of rows, and add the block's contribution
    to the weight's gradient (dC), in one launch.

    The few tiles of the hidden states' gradient (dE), which are sums over the vocabulary, are
    computed first. The many tiles of the weight's gradient (dC) are sums over the rows. These tiles
    give work to the multiprocessors that have no tile of dE, and afterwards to all multiprocessors.
    A program that has finished a tile takes the next tile that no program has taken. One program
    computes all of a tile, so the order in which programs take tiles does not change the results.
    """
    rows_here = count_rows(kept_ptr, first_row, piece_rows, C)
    depth_blocks = tl.cdiv(depth, C.BN)
    hidden_tiles = 0
    if C.NEEDS_HIDDEN:
        hidden_tiles = tl.cdiv(rows_here, C.BM) * depth_blocks
    tiles = hidden_tiles
    if C.NEEDS_WEIGHT:
        weight_tiles = tl.cdiv(vocab, C.BM) * depth_blocks
        if C.MAY_REST:
            weight_tiles = tl.where(rows_here > 0, weight_tiles, 0)
        tiles += weight_tiles
    tile = tl.atomic_add(counter_ptr, 1)
    while tile < tiles:
        if tile < hidden_tiles:
            if C.NEEDS_HIDDEN:
                row_block = tile // depth_blocks
                depth_block = tile % depth_blocks
                acc = tl.zeros((C.BM, C.BN), dtype=tl.float32)
                for k in range(0, width, C.BK):
                    x = x_by_row_desc.load([row_block * C.BM, k])
                    c = weight_desc.load([k, depth_block * C.BN])
                    acc = dot(x, c, acc, C.UPCAST)
                rows = row_block * C.BM + tl.arange(0, C.BM)
                is_row = rows < rows_here
                scale = tl.load(row_scale_ptr + rows, mask=is_row, other=0.0)
                out = first_row + rows
                if C.HAS_KEPT:
                    out = tl.load(order_ptr + out, mask=is_row, other=0)
                for quarter in tl.static_range(4):
                    columns = depth_block * C.BN + quarter * (C.BN // 4) + tl.arange(0, C.BN // 4)
                    part = quarter_of(acc, quarter, C.BM, C.BN) * scale[:, None]
                    place = out.to(tl.int64)[:, None] * depth + columns[None, :]
                    mask = is_row[:, None] & (columns < depth)[None, :]
                    out_ptrs = grad_hidden_ptr + place
                    tl.store(out_ptrs, part.to(out_ptrs.dtype.element_ty), mask=mask)
        else:
            if C.NEEDS_WEIGHT:
                top = (tile - hidden_tiles) // depth_blocks * C.BM
                depth_block = (tile - hidden_tiles) % depth_blocks
                acc = tl.zeros((C.BM, C.BN), dtype=tl.float32)
                for k in range(0, rows_here, C.BK):
                    x = x_by_column_desc.load([k, top])
                    e = scaled_desc.load([k, depth_block * C.BN])
                    acc = dot(x.T, e, acc, C.UPCAST)
                parts = halves_of(acc, C.BM, C.BN)
                for half in tl.static_range(2):
                    quarters = halves_of(parts[half], C.BM, C.BN // 2)
                    for quarter in tl.static_range(2):
                        column = depth_block * C.BN + half * (C.BN // 2) + quarter * (C.BN // 4)
                        part = quarters[quarter]
                        if C.ADD:
                            part += grad_weight_desc.load([top, column]).to(tl.float32)
                        grad_weight_desc.store([top, column], part.to(grad_weight_desc.dtype))
        tile = tl.atomic_add(counter_ptr, 1)


@triton.jit
def _linear_cross_entropy_hopper_bias_kernel(
    x_ptr,  # (R, W) contiguous
    row_scale_ptr,  # (R,) fp32, or None
    sums_ptr,  # (V,) fp32 in and out
    kept_ptr,
    first_row,
    piece_rows,
    first_column,
    width,
    stop_column,  # columns from here on do not exist
    C: tl.constexpr,
):
    """Add X's column sums to the bias's gradient, where X is the logits' gradient up to a factor
    per row.

    With HAS_SCALE, each row of X is first multiplied by the row's scale."""
    rows_here = count_rows(kept_ptr, first_row, piece_rows, C)
    local = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    inside = (local < width) & (first_column + local < stop_column)
    sums = tl.load(sums_ptr + first_column + local, mask=inside, other=0.0)
    for start in range(0, rows_here, C.ROWS):
        offs = start + tl.arange(0, C.ROWS)
        mask = (offs < rows_here)[:, None] & inside[None, :]
        place = offs.to(tl.int64)[:, None] * width + local[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if C.HAS_SCALE:
            x *= tl.load(row_scale_ptr + offs, mask=offs < rows_here, other=0.0)[:, None]
        sums += tl.sum(x, axis=0)
    tl.store(sums_ptr + first_column + local, sums, mask=inside)
