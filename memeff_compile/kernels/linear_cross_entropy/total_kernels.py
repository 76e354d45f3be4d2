# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of `total_fused`: one piece of R rows by the whole vocabulary at a time.

The buffer holds X_ij = exp(z_ij - base_i) dz/ds, rounded once to 16 bits. base_i is a number near
the row's logits that is known before them, so nothing has to wait for the log-sum-exp: the factor
exp(base_i - lse_i) that turns X into probabilities is one per row, and goes into the two products
behind it. At a row's target stands (p - 1) / factor, so that nothing cancels in 16 bits.

Where ranks have parts of the vocabulary, each knows a part of the log-sum-exp: they tell each other
theirs once X is written, and the factor comes of all of them.

Rows are compact where ignored rows cost nothing, and their number is read on the GPU, as in
`fused_kernels`. Logits are in base 2. Axis letters: n rows, v columns, d features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton.products_kernels import dot
from .fused_kernels import LN2, LOG2E, _halves, _logits, _products, _quarter, _rows_here

# How far above its base a row's largest logit may lie, in base 2: sums of 2^96 stay in fp32.
FAR = tl.constexpr(64.0)
# The least share that a row's own classes are taken to have where its target is among them and
# another rank's classes have all the rest: 1 / HEAVIEST of what X sums to. X at the target is times
# that, which 16 bits hold, and so do the rows of hidden states over it; a probability is off by
# 2^-32 at most.
HEAVIEST = tl.constexpr(2.0**96)


@triton.jit
def _linear_cross_entropy_total_base_kernel(
    hidden_ptr,  # (R, D) rows of this piece
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
    """Take the logit of a row's target as its base: a trained model's rows lie close above it.

    Where another rank has the target, that of another class.
    """
    row = tl.program_id(0)
    is_row = row < _rows_here(kept_ptr, first_row, piece_rows, C)
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
    z2, _slope = _logits(s[:, None], column, bias_ptr, vocab, (scale, softcap), C)
    tl.store(base_ptr + row, tl.sum(tl.sum(z2, axis=1), axis=0))


@triton.jit
def _linear_cross_entropy_total_logits_kernel(
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
    first_row,  # compact row where the piece starts
    hidden_row,  # where it starts in hidden_desc
    piece_rows,  # R
    vocab,
    depth,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Write X and its row statistics, tile by tile; rows and columns that do not exist are zero."""
    rows_here = _rows_here(kept_ptr, first_row, piece_rows, C)
    row_blocks = tl.cdiv(rows_here, C.BM)
    column_blocks = tl.cdiv(vocab, C.BN)
    tiles = row_blocks * column_blocks
    if C.HAS_AGAIN:
        tiles = tl.where(tl.load(again_ptr) > 0, tiles, 0)
    plane = tl.cast(column_blocks, tl.int64) * piece_rows
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=C.FLATTEN):
        row_block = tile % row_blocks
        column_block = tile // row_blocks
        blocks = (row_block, column_block)
        acc = _products(hidden_desc, weight_desc, blocks, hidden_row, depth, C)

        rows = row_block * C.BM + tl.arange(0, C.BM)
        is_row = rows < rows_here
        base = tl.load(base_ptr + rows, mask=is_row, other=0.0)
        target = tl.load(target_ptr + first_row + rows, mask=is_row, other=-1)
        peak = tl.full((C.BM,), float("-inf"), tl.float32)
        mass = tl.zeros((C.BM,), tl.float32)
        for quarter in tl.static_range(4):
            first = column_block * C.BN + quarter * (C.BN // 4)
            offs = tl.arange(0, C.BN // 4)
            columns = first + offs
            part = _quarter(acc, quarter, C.BM, C.BN)
            z2, slope = _logits(part, columns, bias_ptr, vocab, (scale, softcap), C)
            local = target - first
            is_here = (local >= 0) & (local < C.BN // 4)
            if tl.max(is_here.to(tl.int32), axis=0) > 0:
                z2_target = tl.sum(tl.where(offs[None, :] == local[:, None], z2, 0.0), axis=1)
                tl.store(target_logit_ptr + rows, z2_target, mask=is_row & is_here)
            if first + C.BN // 4 > vocab:
                z2 = tl.where(columns[None, :] < vocab, z2, float("-inf"))
            # tl.max passes over NaN; the sum keeps it.
            peak = tl.maximum(peak, tl.max(z2, axis=1))
            x = tl.exp2(z2 - base[:, None])
            mass += tl.sum(x, axis=1)
            x = tl.where(is_row[:, None], x * slope, 0.0)
            x_desc.store([row_block * C.BM, first], x.to(x_desc.dtype))
        place = column_block.to(tl.int64) * piece_rows + rows
        tl.store(stats_ptr + place, peak, mask=is_row)
        tl.store(stats_ptr + plane + place, mass, mask=is_row)


@triton.jit
def _linear_cross_entropy_total_rows_kernel(
    stats_ptr,  # (2, T, R) fp32
    target_logit_ptr,  # (R,) fp32, base 2
    target_ptr,  # (N,) int32, compact
    order_ptr,  # (N,) int32 or None
    kept_ptr,
    factor_ptr,  # (N,) fp32, original rows: what the gradient of a row's loss is times
    base_ptr,  # (R,) fp32, in and, where it is too far off, out
    again_ptr,  # (1,) int32 out
    row_scale_ptr,  # (R,) fp32 out: what X is times, or its sums where ranks have yet to meet
    x_ptr,  # (R, W), one element per row out
    nll_ptr,  # (N,) fp32 out, original rows
    said_ptr,  # (2, R) fp32 out: what ranks tell each other, or None
    first_row,
    piece_rows,
    tiles,  # T
    width,  # W
    vocab,
    scale,
    softcap,
    C: tl.constexpr,
):
    """Merge a row's statistics in a fixed order: first whether its base will do, then the rest.

    The rest is another kernel's where ranks have parts of the vocabulary: here they only speak.
    """
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    rows_here = _rows_here(kept_ptr, first_row, piece_rows, C)
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
        # A target that is no class can never look like a loss.
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
            tl.store(row_scale_ptr + rows, factor / masses, mask=is_row)
            at = (x_ptr + rows.to(tl.int64) * width + target, has_target)
            _store_at_target(at, nll2, masses, z2_target, (scale, softcap), C)


@triton.jit
def _store_at_target(at, nll2, mass, z2_target, cap, C: tl.constexpr):
    """Write X at the target: (p - 1) / (1 / mass), with p - 1 = 2^-nll2 - 1."""
    ptrs, mask = at
    scale, softcap = cap
    slope = tl.zeros((C.ROWS,), tl.float32) + scale
    if C.HAS_SOFTCAP:
        ratio = z2_target * LN2 / softcap
        slope *= 1.0 - ratio * ratio
    x = (tl.exp2(-nll2) - 1.0) * mass * slope
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _linear_cross_entropy_total_ranks_kernel(
    every_ptr,  # (P, 2, R) fp32: log-sum-exps and losses that each rank has of its classes
    target_logit_ptr,  # (R,) fp32, base 2
    target_ptr,  # (N,) int32, compact
    owner_ptr,  # (N,) int32, original rows: which rank has the target
    order_ptr,  # (N,) int32 or None
    kept_ptr,
    factor_ptr,  # (N,) fp32, original rows
    row_scale_ptr,  # (R,) fp32: in, what X sums to; out, what it is times
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
    """Finish a row with what all ranks know of it, in their order: all find the same loss."""
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    is_row = rows < _rows_here(kept_ptr, first_row, piece_rows, C)
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
    # Nothing here, as where all classes of this rank are at -inf, is nothing of what others have.
    is_nothing = (here == 0.0) & (peak > float("-inf"))
    heavier = tl.where(is_nothing, float("inf"), heavier)
    has_target = is_row & (target >= 0)
    heavier = tl.where(has_target & (heavier > HEAVIEST), HEAVIEST, heavier)
    factor = tl.load(factor_ptr + source, mask=is_row, other=0.0)
    tl.store(row_scale_ptr + rows, factor / heavier, mask=is_row)
    z2_target = tl.load(target_logit_ptr + rows, mask=has_target, other=0.0)
    at = (x_ptr + rows.to(tl.int64) * width + target, has_target)
    _store_at_target(at, nll2, heavier, z2_target, (scale, softcap), C)


@triton.jit
def _linear_cross_entropy_total_scale_rows_kernel(
    hidden_ptr,  # (R, D) rows of this piece, or out_ptr itself
    stride_hidden_row,
    row_scale_ptr,  # (R,) fp32
    kept_ptr,
    out_ptr,  # (R, D) contiguous
    first_row,
    piece_rows,
    depth,
    C: tl.constexpr,
):
    """Multiply rows by their scale; rows past the last up to a multiple of PAD become zero."""
    row = tl.program_id(0)
    rows_here = _rows_here(kept_ptr, first_row, piece_rows, C)
    if row < tl.cdiv(rows_here, C.PAD) * C.PAD:
        is_row = row < rows_here
        scale = tl.load(row_scale_ptr + row, mask=is_row, other=0.0)
        filled = tl.where(is_row, depth, 0)
        for start in range(0, depth, C.BLOCK):
            offs = start + tl.arange(0, C.BLOCK)
            inside = offs < depth
            place = row.to(tl.int64) * stride_hidden_row + offs
            values = tl.load(hidden_ptr + place, mask=offs < filled, other=0.0)
            scaled = (values.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row.to(tl.int64) * depth + offs, scaled, mask=inside)


@triton.jit
def _linear_cross_entropy_total_products_kernel(
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
    C: tl.constexpr,  # ADD: to grad_weight; MAY_REST: leave that alone where no rows count
):
    """Write dE of this piece's rows and add what they give to dC, in one launch.

    The few tiles of dE sum over the vocabulary and come first; the many tiles of dC sum over the
    rows and fill the multiprocessors beside and behind them. Programs take the next tile when they
    are done with one. Each tile is one program's, so the order changes no bit.
    """
    rows_here = _rows_here(kept_ptr, first_row, piece_rows, C)
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
                    part = _quarter(acc, quarter, C.BM, C.BN) * scale[:, None]
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
                parts = _halves(acc, C.BM, C.BN)
                for half in tl.static_range(2):
                    quarters = _halves(parts[half], C.BM, C.BN // 2)
                    for quarter in tl.static_range(2):
                        column = depth_block * C.BN + half * (C.BN // 2) + quarter * (C.BN // 4)
                        part = quarters[quarter]
                        if C.ADD:
                            part += grad_weight_desc.load([top, column]).to(tl.float32)
                        grad_weight_desc.store([top, column], part.to(grad_weight_desc.dtype))
        tile = tl.atomic_add(counter_ptr, 1)


@triton.jit
def _linear_cross_entropy_total_bias_kernel(
    x_ptr,  # (R, W) contiguous
    row_scale_ptr,  # (R,) fp32
    sums_ptr,  # (V,) fp32 in and out
    kept_ptr,
    first_row,
    piece_rows,
    width,
    vocab,
    C: tl.constexpr,
):
    """Add the column sums of X, each row times its scale: the gradient of the bias."""
    rows_here = _rows_here(kept_ptr, first_row, piece_rows, C)
    columns = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    inside = columns < vocab
    sums = tl.load(sums_ptr + columns, mask=inside, other=0.0)
    for start in range(0, rows_here, C.ROWS):
        offs = start + tl.arange(0, C.ROWS)
        mask = (offs < rows_here)[:, None] & inside[None, :]
        x = tl.load(
            x_ptr + offs.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0
        )
        scale = tl.load(row_scale_ptr + offs, mask=offs < rows_here, other=0.0)
        sums += tl.sum(x.to(tl.float32) * scale[:, None], axis=0)
    tl.store(sums_ptr + columns, sums, mask=inside)


@triton.jit
def _linear_cross_entropy_total_scale_kernel(
    gradient_ptr,  # contiguous
    by_ptr,  # (1,) fp32
    out_ptr,  # contiguous, may be gradient_ptr
    count,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply by one number in fp32, rounded once; in place, times 1 is nothing to do."""
    by = tl.load(by_ptr)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    first = tl.program_id(0).to(tl.int64) * BLOCK
    end = count
    if IN_PLACE:
        end = tl.where(by == 1.0, 0, count)
    while first < end:
        place = first + tl.arange(0, BLOCK)
        values = tl.load(gradient_ptr + place, mask=place < count, other=0.0)
        scaled = (values.to(tl.float32) * by).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, scaled, mask=place < count)
        first += step
