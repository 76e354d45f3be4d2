# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions that several ops use: they multiply tiles, and load and store rows of one
attention head.

A row is one token's vector of a head, for example its query, key or value.

With UPCAST, operands are widened to fp32, because Triton's interpreter cannot multiply bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a b; fp32 operands are not rounded to TF32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def of_head(x, batch, head):
    """Return the pointer to the rows (tokens) of one attention head.

    `x`, a `key_tiles.Rows`, contains the pointer and the strides of a (B, H, rows, D) tensor.
    """
    return x.ptr + batch * x.batch + head * x.head


@triton.jit
def load_rows(ptrs, is_row, depth, C: tl.constexpr, MASKED: tl.constexpr):
    """Load rows as a (rows, C.DEPTH_BLOCK) tile from the pointers `ptrs`.

    `depth` contains the indices of the tile's columns. Columns from C.DEPTH on become zeros. If
    MASKED, rows for which `is_row` is false become zeros too.
    """
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
