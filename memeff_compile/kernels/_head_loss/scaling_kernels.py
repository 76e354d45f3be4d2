# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of the module `scaling`: it multiplies a gradient by a number."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _head_loss_scaling_scale_kernel(
    gradient_ptr,  # contiguous
    by_ptr,  # (1,) fp32
    out_ptr,  # contiguous, may be gradient_ptr
    count,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply a gradient by one number in fp32, and round once.

    If the gradient is overwritten (IN_PLACE) and the number is 1, return immediately.
    """
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
