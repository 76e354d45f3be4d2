# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two kernels of the implementation `library`: one turns matrix products into row statistics,
the other turns matrix products into gradients.

Each program processes one row of an N x W block of fp32 products. So no two programs share a sum,
and every run gives the same bits. 16-bit vectors are converted to fp32 right after each load, so
all arithmetic is fp32, on the GPU and under Triton's interpreter.

In variable names, rows are tokens, and columns are vocabulary entries counted from `first_column`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# Above every column of a strip.
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _cap(u, softcap):
    """Return z = softcap * tanh(u / softcap) and dz/du.

    The kernel computes tanh from exp(-2|u| / softcap). This exponential is at most 1, so it never
    overflows. If u is NaN, both results are NaN.
    """
    shrink = tl.exp2(tl.abs(u) * (-2.0 * LOG2E / softcap))
    tanh = (1.0 - shrink) / (1.0 + shrink)
    slope = 4.0 * shrink / ((1.0 + shrink) * (1.0 + shrink))
    return tl.where(u < 0.0, -softcap * tanh, softcap * tanh), slope


@triton.jit
def _linear_cross_entropy_library_statistics_kernel(
    s_ptr,  # (N, W) fp32 products
    stride_s_row,
    bias_ptr,  # (V,) or None
    column_weight_ptr,  # (V,) fp32 or None
    target_ptr,  # (N,) int32 or int64
    state_ptr,  # (N, 5) fp32: running maximum, mass, target logit, weighted sum of logits, moment
    nll_ptr,  # (N,) fp32, written with the last strip
    lse_ptr,  # (N,) fp32, written with the last strip
    logit_sum_ptr,  # (N,) fp32 or None, written with the last strip
    entropy_ptr,  # (N,) fp32 or None, written with the last strip
    top_ptr,  # (N,) int64 or None, carried from strip to strip
    numbers,
    C: tl.constexpr,
):
    first_column, width, vocab, ignore_index, scale, softcap = numbers
    row = tl.program_id(0).to(tl.int64)
    s_row_ptr = s_ptr + row * stride_s_row
    state_row_ptr = state_ptr + row * 5
    target = tl.load(target_ptr + row).to(tl.int64)
    is_kept = target == target
    if C.HAS_IGNORE:
        is_kept = target != ignore_index
    has_lse = is_kept
    if C.WITH_LSE or C.WITH_ENTROPY:
        has_lse = target == target
    is_active = has_lse
    if C.WITH_TOP:
        is_active = target == target

    is_later = first_column > 0
    peak = tl.load(state_row_ptr, mask=is_later, other=float("-inf"))
    mass = tl.load(state_row_ptr + 1, mask=is_later, other=0.0)
    # NaN until the target's column is read, so an out-of-range target cannot pass for a loss.
    target_logit = tl.load(state_row_ptr + 2, mask=is_later, other=float("nan"))
    weighted = 0.0
    if C.WITH_LOGIT_SUM:
        weighted = tl.load(state_row_ptr + 3, mask=is_later, other=0.0)
    # Sum of exp(z - peak) (z - peak): never positive, so the entropy has no cancellation.
    moment = 0.0
    if C.WITH_ENTROPY:
        moment = tl.load(state_row_ptr + 4, mask=is_later, other=0.0)
    # The largest logit so far; after the first nan, the complement of its column.
    top = tl.full((), 0, tl.int64)
    if C.WITH_TOP:
        top = tl.load(top_ptr + row, mask=is_later, other=0)

    column = target - first_column
    is_here = is_active & (column >= 0) & (column < width)
    s_target = tl.load(s_row_ptr + column, mask=is_here, other=0.0)
    if C.HAS_BIAS:
        s_target += tl.load(bias_ptr + target, mask=is_here, other=0.0).to(tl.float32)
    z_target = s_target * scale
    if C.HAS_SOFTCAP:
        z_target, _slope_at_target = _cap(z_target, softcap)
    target_logit = tl.where(is_here, z_target, target_logit)

    active_width = tl.where(is_active, width, 0)
    for start in range(0, width, C.BLOCK):
        offs = start + tl.arange(0, C.BLOCK)
        mask = offs < active_width
        s = tl.load(s_row_ptr + offs, mask=mask, other=0.0)
        if C.HAS_BIAS:
            s += tl.load(bias_ptr + first_column + offs, mask=mask, other=0.0).to(tl.float32)
        z = s * scale
        if C.HAS_SOFTCAP:
            z, _slope = _cap(z, softcap)
        if C.WITH_LOGIT_SUM:
            counted = tl.where(mask, z, 0.0)
            if C.HAS_COLUMN_WEIGHT:
                counted *= tl.load(column_weight_ptr + first_column + offs, mask=mask, other=0.0)
            weighted += tl.sum(counted, axis=0)
        z = tl.where(mask, z, float("-inf"))
        # tl.max passes over NaN; the sum below keeps it.
        largest = tl.max(z, axis=0)
        if C.WITH_TOP:
            at = tl.min(tl.where(z == largest, offs, LAST), axis=0)
            top = tl.where((top >= 0) & (largest > peak), first_column + at.to(tl.int64), top)
            nan_at = tl.min(tl.where(z == z, LAST, offs), axis=0)
            top = tl.where((top >= 0) & (nan_at < LAST), -1 - first_column - nan_at, top)
        higher = tl.maximum(peak, largest)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row of -inf so far
        power = tl.exp2((z - base) * LOG2E)
        if C.WITH_ENTROPY:
            shift = tl.where(peak == float("-inf"), 0.0, peak - base)
            drop = tl.where(power == 0.0, 0.0, power * (z - base))  # -inf counts as 0
            moment = tl.exp2(shift * LOG2E) * (moment + shift * mass) + tl.sum(drop, axis=0)
        mass = mass * tl.exp2((peak - base) * LOG2E)
        mass += tl.sum(power, axis=0)
        peak = higher

    if first_column + width < vocab:
        tl.store(state_row_ptr, peak)
        tl.store(state_row_ptr + 1, mass)
        tl.store(state_row_ptr + 2, target_logit)
        if C.WITH_LOGIT_SUM:
            tl.store(state_row_ptr + 3, weighted)
        if C.WITH_ENTROPY:
            tl.store(state_row_ptr + 4, moment)
        if C.WITH_TOP:
            tl.store(top_ptr + row, top)
    else:
        log_mass = tl.log(tl.where(is_active, mass, 1.0))
        # (peak - z_t) + log(mass) rather than lse - z_t: no cancellation for a confident target.
        tl.store(nll_ptr + row, tl.where(is_kept, (peak - target_logit) + log_mass, 0.0))
        tl.store(lse_ptr + row, tl.where(has_lse, peak + log_mass, 0.0))
        if C.WITH_LOGIT_SUM:
            tl.store(logit_sum_ptr + row, tl.where(is_kept, weighted, 0.0))
        if C.WITH_ENTROPY:
            tl.store(entropy_ptr + row, log_mass - moment / mass)
        if C.WITH_TOP:
            tl.store(top_ptr + row, tl.where(top < 0, -1 - top, top))


@triton.jit
def _linear_cross_entropy_library_gradient_kernel(
    s_ptr,  # (N, W) fp32 products
    stride_s_row,
    g_ptr,  # (N, W) gradients in the input dtype; may be s_ptr itself for fp32
    stride_g_row,
    bias_ptr,  # (V,) or None
    column_weight_ptr,  # (V,) fp32 or None
    target_ptr,  # (N,) int32 or int64
    lse_ptr,  # (N,) fp32
    entropy_ptr,  # (N,) fp32 or None
    grad_nll_ptr,  # (N,) fp32
    grad_lse_ptr,  # (N,) fp32
    grad_logit_sum_ptr,  # (N,) fp32 or None
    grad_entropy_ptr,  # (N,) fp32 or None
    numbers,
    C: tl.constexpr,
):
    first_column, width, ignore_index, scale, softcap = numbers
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * C.BLOCK + tl.arange(0, C.BLOCK)
    in_piece = offs < width
    target = tl.load(target_ptr + row).to(tl.int64)
    is_kept = target == target
    if C.HAS_IGNORE:
        is_kept = target != ignore_index
    is_active = is_kept
    if C.WITH_LSE or C.WITH_ENTROPY:
        is_active = target == target
    mask = offs < tl.where(is_active, width, 0)

    s = tl.load(s_ptr + row * stride_s_row + offs, mask=mask, other=0.0)
    if C.HAS_BIAS:
        s += tl.load(bias_ptr + first_column + offs, mask=mask, other=0.0).to(tl.float32)
    z = s * scale
    slope = scale
    if C.HAS_SOFTCAP:
        z, dz_du = _cap(z, softcap)
        slope = dz_du * scale
    lse = tl.load(lse_ptr + row)
    grad_nll = tl.load(grad_nll_ptr + row)
    grad_lse = tl.load(grad_lse_ptr + row)
    p = tl.exp2((z - lse) * LOG2E)

    column = target - first_column
    column = tl.where((column >= 0) & (column < width), column, -1).to(tl.int32)
    one_hot = tl.where(offs == column, 1.0, 0.0)
    g = tl.where(is_kept, grad_nll * (p - one_hot), 0.0) + grad_lse * p
    if C.WITH_ENTROPY:
        grad_entropy = tl.load(grad_entropy_ptr + row)
        slant = (z - lse) + tl.load(entropy_ptr + row)
        g -= tl.where(p == 0.0, 0.0, grad_entropy * p * slant)
    if C.WITH_LOGIT_SUM:
        grad_logit_sum = tl.where(is_kept, tl.load(grad_logit_sum_ptr + row), 0.0)
        if C.HAS_COLUMN_WEIGHT:
            g += grad_logit_sum * tl.load(
                column_weight_ptr + first_column + offs, mask=mask, other=0.0
            )
        else:
            g += grad_logit_sum
    g = tl.where(mask, g * slope, 0.0)
    tl.store(g_ptr + row * stride_g_row + offs, g.to(g_ptr.dtype.element_ty), mask=in_piece)
