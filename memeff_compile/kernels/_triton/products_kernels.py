# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device code for kernels of several ops: products of tiles, and loads of a head's rows.

UPCAST widens operands to fp32: the interpreter, which cannot multiply bf16, sets it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a b, without rounding operands in fp32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def of_head(x, batch, head):
    """Return the pointer to the rows of one head of a `key_tiles.Rows`."""
    return x.ptr + batch * x.batch + head * x.head


@triton.jit
def load_rows(ptrs, is_row, depth, C: tl.constexpr, MASKED: tl.constexpr):
    """Load (rows, DEPTH_BLOCK), with zeros beyond DEPTH and, if MASKED, where is_row is false."""
    if MASKED:
        mask = is_row[:, None]
        if C.DEPTH != C.DEPTH_BLOCK:
            mask = mask & (depth < C.DEPTH)[None, :]
        found = tl.load(ptrs, mask=mask, other=0.0)
    elif C.DEPTH != C.DEPTH_BLOCK:
        found = tl.load(ptrs, mask=(depth < C.DEPTH)[None, :], other=0.0)
    else:
        found = tl.load(ptrs)
    return found


@triton.jit
def store_rows(ptrs, values, is_row, depth, C: tl.constexpr):
    mask = is_row[:, None]
    if C.DEPTH != C.DEPTH_BLOCK:
        mask = mask & (depth < C.DEPTH)[None, :]
    tl.store(ptrs, values.to(ptrs.dtype.element_ty), mask=mask)
