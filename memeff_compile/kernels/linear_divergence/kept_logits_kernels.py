# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of the implementation `kept_logits` of divergences between two softmaxes.

Two kernels store logits: one computes products of hidden states and weight itself, the other reads
finished products or logits. The remaining kernels turn stored logits into results and gradients.

In a kernel that stores logits, each program computes whole tiles. In the other kernels, each
program computes whole rows. So no two programs share a sum, and every run gives the same bits. All
arithmetic is fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._head_loss.logits_kernels import quarter_of
from .._triton.products_kernels import dot


@triton.jit
def _scaled(part, columns, vocab, scale):
    """Return logits: `part` multiplied by `scale`.

    `part` contains some columns of a tile of the product of hidden states and weight, plus the bias
    if there is one. Columns beyond the vocabulary get the logit -inf."""
    return part * scale + tl.where(columns < vocab, 0.0, float("-inf"))[None, :]


@triton.jit
def _linear_divergence_kept_logits_product_kernel(
    hidden_desc,  # (R, D), block BM x BK
    weight_desc,  # (V, D), block TILE x BK
    kept_desc,  # (R, W) fp16 out, block BM x TILE / 4
    bias_ptr,  # (V,) or None
    sums_ptr,  # (2, R, tiles) fp32 out: each tile's maximum, and its sum of exponentials
    plane,
    rows,
    vocab,
    depth,
    scale,
    C: tl.constexpr,
):
    """Compute tiles of logits, and store them in fp16, relative to each row's maximum in a tile.

    Logits are products of hidden states and weight, plus a bias, times `scale`. The fp32 products
    never leave the multiprocessor."""
    row_blocks = tl.cdiv(rows, C.BM)
    tiles = tl.cdiv(vocab, C.TILE)
    for tile in tl.range(
        tl.program_id(0), row_blocks * tiles, tl.num_programs(0), flatten=C.FLATTEN
    ):
        row_block = tile % row_blocks
        column_block = tile // row_blocks
        acc = tl.zeros((C.BM, C.TILE), dtype=tl.float32)
        if C.HAS_BIAS:  # before the sum, since the epilogue has no registers left
            columns = column_block * C.TILE + tl.arange(0, C.TILE)
            bias = tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32)
            acc += bias[None, :]
        for k in range(0, depth, C.BK):
            h = hidden_desc.load([row_block * C.BM, k])
            w = weight_desc.load([column_block * C.TILE, k])
            acc = dot(h, w.T, acc, C.UPCAST)
        here = row_block * C.BM + tl.arange(0, C.BM)
        is_row = here < rows
        offs = column_block * C.TILE + tl.arange(0, C.TILE // 4)
        largest = tl.full((C.BM,), float("-inf"), tl.float32)
        for quarter in tl.static_range(4):
            part = quarter_of(acc, quarter, C.BM, C.TILE)
            columns = offs + quarter * (C.TILE // 4)
            z = _scaled(part, columns, vocab, scale)
            largest = tl.maximum(largest, tl.max(z, axis=1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        # tl.max passes over nan; the sum keeps it.
        mass = tl.zeros((C.BM,), tl.float32)
        for quarter in tl.static_range(4):
            part = quarter_of(acc, quarter, C.BM, C.TILE)
            columns = offs + quarter * (C.TILE // 4)
            z = _scaled(part, columns, vocab, scale) - base[:, None]
            mass += tl.sum(tl.exp(z), axis=1)
            first = column_block * C.TILE + quarter * (C.TILE // 4)
            kept_desc.store([row_block * C.BM, first], z.to(kept_desc.dtype))
        at = here.to(tl.int64) * tiles + column_block
        tl.store(sums_ptr + at, base, mask=is_row)
        tl.store(sums_ptr + plane + at, mass, mask=is_row)


@triton.jit
def _linear_divergence_kept_logits_keep_kernel(
    s_ptr,  # (R, W) products of a strip, or given logits
    stride_s_row,
    bias_ptr,  # (V,) or None
    kept_ptr,  # (R, V) fp16 or fp32
    stride_kept_row,
    sums_ptr,  # (2, R, tiles) fp32: each tile's maximum, and its sum of exponentials
    plane,
    tiles,
    first_column,
    stop_column,
    scale,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    of_chunk = tl.arange(0, CHUNK // TILE)
    offs = start + of_chunk[:, None] * TILE + tl.arange(0, TILE)[None, :]
    mask = first_column + offs < stop_column
    s = tl.load(s_ptr + row * stride_s_row + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        s += tl.load(bias_ptr + first_column + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.where(mask, s * scale, float("-inf"))
    largest = tl.max(z, axis=1)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    z -= base[:, None]
    # tl.max passes over nan; the sum keeps it.
    mass = tl.sum(tl.exp(z), axis=1)
    kept_ptr += row * stride_kept_row + first_column
    tl.store(kept_ptr + offs, z.to(kept_ptr.dtype.element_ty), mask=mask)
    tile = (first_column + start) // TILE + of_chunk
    tl.store(sums_ptr + row * tiles + tile, base, mask=tile < tiles)
    tl.store(sums_ptr + plane + row * tiles + tile, mass, mask=tile < tiles)


@triton.jit
def _log_sum(sums_ptr, plane, tiles, PADDED: tl.constexpr):
    """Return the log-sum-exp of a row from its tiles' maxima and sums of exponentials."""
    offs = tl.arange(0, PADDED)
    mask = offs < tiles
    base = tl.load(sums_ptr + offs, mask=mask, other=float("-inf"))
    mass = tl.load(sums_ptr + plane + offs, mask=mask, other=0.0)
    base = tl.where(mass == 0.0, float("-inf"), base)  # a tile of -inf
    peak = tl.max(base, axis=0)
    total = tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(base - peak)), axis=0)
    return peak + tl.log(total)


@triton.jit
def _times(probability, logarithm):
    """Multiply a probability by a logarithm.

    If the probability is 0, the product is 0, even if the logarithm is minus infinity."""
    return tl.where(probability == 0.0, 0.0, probability * logarithm)


@triton.jit
def _mixed(log_p, log_q, share):
    """Return log(share * q + (1 - share) * p)."""
    a, b = log_p + tl.log(1.0 - share), log_q + tl.log(share)
    high = tl.maximum(a, b)
    low = tl.minimum(a, b)
    safe = tl.where(high == float("-inf"), 0.0, high)
    return high + tl.log(1.0 + tl.exp(low - safe))


@triton.jit
def _chunk_of(ptr, sums_ptr, lse, tile, tiles, offs, mask):
    """Return the log-probabilities of one row's classes `offs`, as (tiles, columns of a tile).

    A tile is a range of neighbouring classes. `tile` contains the numbers of the tiles."""
    kept = tl.load(ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    base = tl.load(sums_ptr + tile, mask=tile < tiles, other=0.0)
    return kept + (base - lse)[:, None]


@triton.jit
def _slope(p, q, log_p, log_q, log_m, a3, a4, a5, a6, share, HAS_MIXTURE: tl.constexpr):
    """Return p times the derivative of a row's divergence with respect to p.

    Of the divergence's terms, the function counts only a3 sum(p log p), a4 sum(p log q), a5 sum(q
    log m) and a6 sum(p log m). Here, m is the mixture share * q + (1 - share) * p. The derivative
    may lack a number that is the same for all classes, because this number cancels in the logits'
    gradient."""
    found = a3 * _times(p, log_p) + a4 * _times(p, log_q)
    if HAS_MIXTURE:
        of_q = tl.where(q == 0.0, 0.0, tl.exp(log_q - log_m))
        of_p = tl.where(p == 0.0, 0.0, tl.exp(log_p - log_m))
        found += a6 * _times(p, log_m) + (1.0 - share) * p * (a5 * of_q + a6 * of_p)
    return found


@triton.jit
def _linear_divergence_kept_logits_gradient_kernel(
    student_ptr,  # (R, V) kept logits
    teacher_ptr,  # (R, V) kept logits
    of_student_ptr,  # (2, R, tiles) fp32
    of_teacher_ptr,  # (2, R, tiles) fp32
    gradient_ptr,  # (R, V), over the student's
    vocab,
    stride_row,
    plane,
    tiles,
    factor_ptr,  # (R,) fp32 or None
    rows_ptr,  # (R,) fp32
    coefficients,
    HAS_MIXTURE: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    a1, a2, a3, a4, a5, a6, share = coefficients
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * stride_row
    teacher_ptr += row * stride_row
    gradient_ptr += row * stride_row
    of_student = of_student_ptr + row * tiles
    of_teacher = of_teacher_ptr + row * tiles
    lse_p = _log_sum(of_student, plane, tiles, PADDED)
    lse_q = _log_sum(of_teacher, plane, tiles, PADDED)
    factor = 1.0
    if HAS_GRADIENT:
        factor = tl.load(factor_ptr + row)

    of_chunk = tl.arange(0, CHUNK // TILE)
    inside = of_chunk[:, None] * TILE + tl.arange(0, TILE)[None, :]
    value = tl.zeros([CHUNK // TILE, TILE], tl.float32)
    centre = tl.zeros([CHUNK // TILE, TILE], tl.float32)
    for chunk in range(0, tl.cdiv(vocab, CHUNK)):
        offs = chunk * CHUNK + inside
        tile = chunk * (CHUNK // TILE) + of_chunk
        mask = offs < vocab
        log_p = _chunk_of(student_ptr, of_student, lse_p, tile, tiles, offs, mask)
        log_q = _chunk_of(teacher_ptr, of_teacher, lse_q, tile, tiles, offs, mask)
        p, q = tl.exp(log_p), tl.exp(log_q)
        log_m = log_p
        value += a1 * _times(q, log_q) + a2 * _times(q, log_p)
        if HAS_CENTRE:
            value += a3 * _times(p, log_p) + a4 * _times(p, log_q)
            if HAS_MIXTURE:
                log_m = _mixed(log_p, log_q, share)
                value += a5 * _times(q, log_m) + a6 * _times(p, log_m)
            if HAS_GRADIENT:
                centre += _slope(p, q, log_p, log_q, log_m, a3, a4, a5, a6, share, HAS_MIXTURE)
        elif HAS_GRADIENT:
            g = tl.where(factor == 0.0, 0.0, factor * a2 * (q - p))
            tl.store(gradient_ptr + offs, g.to(gradient_ptr.dtype.element_ty), mask=mask)
    tl.store(rows_ptr + row, tl.sum(tl.sum(value, axis=1), axis=0))

    if HAS_GRADIENT and HAS_CENTRE:
        middle = tl.sum(tl.sum(centre, axis=1), axis=0)
        for chunk in range(0, tl.cdiv(vocab, CHUNK)):
            offs = chunk * CHUNK + inside
            tile = chunk * (CHUNK // TILE) + of_chunk
            mask = offs < vocab
            log_p = _chunk_of(student_ptr, of_student, lse_p, tile, tiles, offs, mask)
            log_q = _chunk_of(teacher_ptr, of_teacher, lse_q, tile, tiles, offs, mask)
            p, q = tl.exp(log_p), tl.exp(log_q)
            log_m = log_p
            if HAS_MIXTURE:
                log_m = _mixed(log_p, log_q, share)
            slope = _slope(p, q, log_p, log_q, log_m, a3, a4, a5, a6, share, HAS_MIXTURE)
            g = factor * (a2 * (q - p) + slope - p * middle)
            g = tl.where(factor == 0.0, 0.0, g)
            tl.store(gradient_ptr + offs, g.to(gradient_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_divergence_kept_logits_pick_kernel(
    kept_ptr,  # (R, V) kept logits
    sums_ptr,  # (2, R, tiles) fp32
    index_ptr,  # (R, k) int64
    found_ptr,  # (R, k) fp32 out
    vocab,
    stride_row,
    plane,
    tiles,
    count,  # k
    NORMALISED: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write a row's log-probabilities at the classes in `index_ptr`, or nan for a class that does
    not exist.

    If NORMALISED is false, write logits instead."""
    row = tl.program_id(0).to(tl.int64)
    sums_ptr += row * tiles
    offs = tl.arange(0, WIDTH)
    index = tl.load(index_ptr + row * count + offs, mask=offs < count, other=0)
    exists = (index >= 0) & (index < vocab)
    index = tl.where(exists, index, 0)
    found = tl.load(kept_ptr + row * stride_row + index).to(tl.float32)
    found += tl.load(sums_ptr + index // TILE)
    if NORMALISED:
        found -= _log_sum(sums_ptr, plane, tiles, PADDED)
    found = tl.where(exists, found, float("nan"))
    tl.store(found_ptr + row * count + offs, found, mask=offs < count)


@triton.jit
def _linear_divergence_kept_logits_spread_kernel(
    kept_ptr,  # (R, V) kept logits
    sums_ptr,  # (2, R, tiles) fp32
    index_ptr,
    found_ptr,
    factor_ptr,  # (R, k) fp32: the gradient of `found`
    gradient_ptr,  # (R, V), over the logits
    vocab,
    stride_row,
    plane,
    tiles,
    count,
    scale,
    NORMALISED: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the part of the gradient of a row's logits that comes from the row's log-sum-exp, or
    zeros if the call requests logits instead of log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    sums_ptr += row * tiles
    kept_ptr += row * stride_row
    gradient_ptr += row * stride_row
    given = tl.arange(0, WIDTH)
    factor = tl.load(factor_ptr + row * count + given, mask=given < count, other=0.0)
    total = -scale * tl.sum(factor, axis=0)
    lse = 0.0
    if NORMALISED:
        lse = _log_sum(sums_ptr, plane, tiles, PADDED)
    of_chunk = tl.arange(0, CHUNK // TILE)
    inside = of_chunk[:, None] * TILE + tl.arange(0, TILE)[None, :]
    for chunk in range(0, tl.cdiv(vocab, CHUNK)):
        offs = chunk * CHUNK + inside
        mask = offs < vocab
        g = tl.zeros([CHUNK // TILE, TILE], tl.float32)
        if NORMALISED:
            tile = chunk * (CHUNK // TILE) + of_chunk
            log_p = _chunk_of(kept_ptr, sums_ptr, lse, tile, tiles, offs, mask)
            g = tl.where(total == 0.0, 0.0, total * tl.exp(log_p))
        tl.store(gradient_ptr + offs, g.to(gradient_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_divergence_kept_logits_place_kernel(
    sums_ptr,
    index_ptr,  # (R, k) int64
    found_ptr,  # (R, k) fp32
    factor_ptr,  # (R, k) fp32
    gradient_ptr,  # (R, V)
    vocab,
    stride_row,
    plane,
    tiles,
    count,
    scale,
    NORMALISED: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the gradient of a row's logits at the classes that `index_ptr` lists for the row.

    The list may contain a class more than once. The gradient of this class then contains the sum of
    the incoming gradients of all its entries in the list."""
    row = tl.program_id(0).to(tl.int64)
    index_ptr += row * count
    factor_ptr += row * count
    offs = tl.arange(0, WIDTH)
    mask = offs < count
    index = tl.load(index_ptr + offs, mask=mask, other=-1)
    total = tl.sum(tl.load(factor_ptr + offs, mask=mask, other=0.0), axis=0)
    here = tl.zeros([WIDTH], tl.float32)
    for other in range(0, count):
        same = index == tl.load(index_ptr + other)
        here += tl.where(same, tl.load(factor_ptr + other), 0.0)
    if NORMALISED:
        log_p = tl.load(found_ptr + row * count + offs, mask=mask, other=0.0)
        here -= tl.where(total == 0.0, 0.0, total * tl.exp(log_p))
    mask = mask & (index >= 0) & (index < vocab)
    g = (scale * here).to(gradient_ptr.dtype.element_ty)
    tl.store(gradient_ptr + row * stride_row + index, g, mask=mask)
