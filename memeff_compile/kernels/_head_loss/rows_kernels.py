# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of the module `rows`.

One kernel lists the rows (tokens) whose target is not `ignore_index`. Another kernel copies
hidden-state rows. The third kernel gathers, for each row, the five numbers from which the row's
gradient of the logits is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits_kernels import LN2, LOG2E, count_rows


@triton.jit
def _head_loss_rows_compact_kernel(
    target_ptr,  # (N,) int32 or int64
    order_ptr,  # (N,) int32 out: the original row of each compact row
    place_ptr,  # (N,) int32 out: the compact row of each original row, -1 for ignored rows
    compact_target_ptr,  # (N,) int32 out
    kept_ptr,  # (1,) int32 out
    rows,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """List the rows (tokens) that are not ignored, in order. A single program computes a prefix sum
    over flags, one per row, that are 1 for a row that is not ignored."""
    count = 0
    for start in range(0, rows, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        in_range = offs < rows
        target = tl.load(target_ptr + offs, mask=in_range, other=0).to(tl.int64)
        is_kept = (target != ignore_index) & in_range
        flags = is_kept.to(tl.int32)
        place = count + tl.cumsum(flags, axis=0) - flags
        tl.store(order_ptr + place, offs, mask=is_kept)
        tl.store(compact_target_ptr + place, target.to(tl.int32), mask=is_kept)
        tl.store(place_ptr + offs, tl.where(is_kept, place, -1), mask=in_range)
        count += tl.sum(flags, axis=0)
    tl.store(kept_ptr, count)


@triton.jit
def _head_loss_rows_copy_kernel(
    source_ptr,  # (., D) rows, or out_ptr itself if they keep their order
    stride_source_row,
    out_ptr,  # (R, D) contiguous
    order_ptr,  # (N,) int32: which row of the source a row is, -1 for none; None: its own
    scale_ptr,  # (R,) fp32 factors, or None
    kept_ptr,  # (1,) int32 or None
    first_row,  # compact row where these rows start
    rows,  # R
    depth,
    C: tl.constexpr,
):
    """Copy hidden-state rows, optionally in another order and multiplied by a factor.

    The kernel writes zeros to these rows of the result:

    - the rows after the copied rows, until the number of rows is a multiple of PAD;
    - each row for which the order contains -1.
    """
    row = tl.program_id(0)
    here = count_rows(kept_ptr, first_row, rows, C)
    if row < tl.cdiv(here, C.PAD) * C.PAD:
        is_row = row < here
        source = row
        if C.HAS_ORDER:
            source = tl.load(order_ptr + first_row + row, mask=is_row, other=-1)
            is_row = source >= 0
        if C.HAS_SCALE:
            scale = tl.load(scale_ptr + row, mask=is_row, other=0.0)
        filled = tl.where(is_row, depth, 0)
        for start in range(0, depth, C.BLOCK):
            offs = start + tl.arange(0, C.BLOCK)
            place = source.to(tl.int64) * stride_source_row + offs
            values = tl.load(source_ptr + place, mask=offs < filled, other=0.0)
            if C.HAS_SCALE:
                values = values.to(tl.float32) * scale
            out_ptrs = out_ptr + row.to(tl.int64) * depth + offs
            tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=offs < depth)


@triton.jit
def _head_loss_rows_cotangents_kernel(
    order_ptr,  # (N,) int32 or None if rows have their original order
    kept_ptr,  # (1,) int32, or None if every row counts
    target_ptr,  # (N,) int32, compact, -1 for a row without a target
    lse_ptr,  # (N,) fp32, original rows
    grad_nll_ptr,
    grad_lse_ptr,
    grad_logit_sum_ptr,  # or None
    grad_entropy_ptr,  # or None
    entropy_ptr,  # (N,) fp32, original rows, or None
    # (5, N) fp32 out, compact: lse in base 2, and the factors of p, 1(j = t), the weights, p log2 p
    row_values_ptr,
    rows,
    HAS_KEPT: tl.constexpr,
    WITH_LOGIT_SUM: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather the five numbers from which a row of G (the logits' gradient) is computed.

    The comment on `row_values_ptr` lists these numbers. Rows after the last row that is not ignored
    get zeros."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = offs < rows
    is_row = in_range
    source = offs
    if HAS_KEPT:
        is_row = offs < tl.load(kept_ptr)
        source = tl.load(order_ptr + offs, mask=is_row, other=0)
    target = tl.load(target_ptr + offs, mask=is_row, other=-1)
    has_target = is_row & (target >= 0)
    lse = tl.load(lse_ptr + source, mask=is_row, other=0.0)
    grad_nll = tl.load(grad_nll_ptr + source, mask=has_target, other=0.0)
    of_p = grad_nll + tl.load(grad_lse_ptr + source, mask=is_row, other=0.0)
    if WITH_ENTROPY:
        grad_entropy = tl.load(grad_entropy_ptr + source, mask=is_row, other=0.0)
        of_p -= grad_entropy * tl.load(entropy_ptr + source, mask=is_row, other=0.0)
        tl.store(row_values_ptr + 4 * rows + offs, grad_entropy * LN2, mask=in_range)
    tl.store(row_values_ptr + offs, lse * LOG2E, mask=in_range)
    tl.store(row_values_ptr + rows + offs, of_p, mask=in_range)
    tl.store(row_values_ptr + 2 * rows + offs, grad_nll, mask=in_range)
    if WITH_LOGIT_SUM:
        grad_sum = tl.load(grad_logit_sum_ptr + source, mask=has_target, other=0.0)
        tl.store(row_values_ptr + 3 * rows + offs, grad_sum, mask=in_range)
