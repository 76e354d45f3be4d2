# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two kernels of `kept_logits`: products to stored logits, then to results and gradients.

A program of the first kernel computes a chunk of a row, and a program of the second a whole row. So
no sum crosses programs, and every run gives the same bits. Arithmetic is fp32 throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _linear_divergence_kept_logits_keep_kernel(
    s_ptr,  # (R, W) products of a strip, or given logits
    stride_s_row,
    bias_ptr,  # (V,) or None
    kept_ptr,  # (R, V) fp16 or fp32
    stride_kept_row,
    sums_ptr,  # (R, 2, chunks) fp32: each chunk's maximum, and its sum of exponentials
    first_column,
    stop_column,
    scale,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    offs = start + tl.arange(0, CHUNK)
    mask = first_column + offs < stop_column
    s = tl.load(s_ptr + row * stride_s_row + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        s += tl.load(bias_ptr + first_column + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.where(mask, s * scale, float("-inf"))
    largest = tl.max(z, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    z -= base
    # tl.max passes over nan; the sum keeps it.
    mass = tl.sum(tl.exp(z), axis=0)
    kept_ptr += row * stride_kept_row + first_column
    tl.store(kept_ptr + offs, z.to(kept_ptr.dtype.element_ty), mask=mask)
    chunk = (first_column + start) // CHUNK
    tl.store(sums_ptr + row * (2 * CHUNKS) + chunk, base)
    tl.store(sums_ptr + row * (2 * CHUNKS) + CHUNKS + chunk, mass)


@triton.jit
def _log_sum(sums_ptr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """Return the log-sum-exp of a row from its chunks' maxima and sums."""
    offs = tl.arange(0, PADDED)
    mask = offs < CHUNKS
    base = tl.load(sums_ptr + offs, mask=mask, other=float("-inf"))
    mass = tl.load(sums_ptr + CHUNKS + offs, mask=mask, other=0.0)
    base = tl.where(mass == 0.0, float("-inf"), base)  # a chunk of -inf
    peak = tl.max(base, axis=0)
    total = tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(base - peak)), axis=0)
    return peak + tl.log(total)


@triton.jit
def _times(probability, logarithm):
    """Return the product, or 0 if the probability is 0, even if the other factor is minus
    infinity."""
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
def _chunk_of(ptr, sums_ptr, lse, chunk, offs, mask):
    """Return the log-probabilities of a chunk."""
    kept = tl.load(ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    return kept + (tl.load(sums_ptr + chunk) - lse)


@triton.jit
def _slope(p, q, log_p, log_q, log_m, a3, a4, a5, a6, share, HAS_MIXTURE: tl.constexpr):
    """Return p times the derivative of the sums with respect to p, up to a constant per row."""
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
    sums_ptr,  # (2, R, 2, chunks) fp32
    gradient_ptr,  # (R, V), over the student's
    vocab,
    stride_side,
    factor_ptr,  # (R,) fp32 or None
    rows_ptr,  # (R,) fp32
    coefficients,
    HAS_MIXTURE: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    a1, a2, a3, a4, a5, a6, share = coefficients
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * vocab
    teacher_ptr += row * vocab
    gradient_ptr += row * vocab
    of_student = sums_ptr + row * (2 * CHUNKS)
    of_teacher = of_student + stride_side
    lse_p = _log_sum(of_student, CHUNKS, PADDED)
    lse_q = _log_sum(of_teacher, CHUNKS, PADDED)
    factor = 1.0
    if HAS_GRADIENT:
        factor = tl.load(factor_ptr + row)

    value = tl.zeros([CHUNK], tl.float32)
    centre = tl.zeros([CHUNK], tl.float32)
    for chunk in range(0, CHUNKS):
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = offs < vocab
        log_p = _chunk_of(student_ptr, of_student, lse_p, chunk, offs, mask)
        log_q = _chunk_of(teacher_ptr, of_teacher, lse_q, chunk, offs, mask)
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
    tl.store(rows_ptr + row, tl.sum(value, axis=0))

    if HAS_GRADIENT and HAS_CENTRE:
        middle = tl.sum(centre, axis=0)
        for chunk in range(0, CHUNKS):
            offs = chunk * CHUNK + tl.arange(0, CHUNK)
            mask = offs < vocab
            log_p = _chunk_of(student_ptr, of_student, lse_p, chunk, offs, mask)
            log_q = _chunk_of(teacher_ptr, of_teacher, lse_q, chunk, offs, mask)
            p, q = tl.exp(log_p), tl.exp(log_q)
            log_m = log_p
            if HAS_MIXTURE:
                log_m = _mixed(log_p, log_q, share)
            slope = _slope(p, q, log_p, log_q, log_m, a3, a4, a5, a6, share, HAS_MIXTURE)
            g = factor * (a2 * (q - p) + slope - p * middle)
            g = tl.where(factor == 0.0, 0.0, g)
            tl.store(gradient_ptr + offs, g.to(gradient_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_divergence_kept_logits_scale_kernel(x_ptr, by_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    scaled = x * tl.load(by_ptr).to(tl.float32)
    tl.store(out_ptr + offs, scaled.to(out_ptr.dtype.element_ty), mask=mask)
