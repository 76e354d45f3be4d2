# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Rounding to 8 bits on the device, for the kernels that write codes and those that read them.

A number that is not finite gets the scale nan. int8 has no nan, so with an ordinary scale the code
of such a number would give an ordinary weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(0x4B400000)  # 1.5 * 2^23: an integer added to its bits is added to its value
MAGIC_VALUE = tl.constexpr(12582912.0)
LEAST = tl.constexpr(1.0e-16)  # the least scale, for rows of zeros; two scales are multiplied


@triton.jit
def _e4m3_in_fp32(x):
    """Round to the nearest number of E4M3, ties to even; |x| is at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    large = bits.to(tl.float32, bitcast=True)
    small = ((x * 512.0 + 12582912.0) - 12582912.0) / 512.0
    return tl.where(tl.abs(x) < 0.015625, small, large)


@triton.jit
def _load_tile(x, place, is_place, depth, C: tl.constexpr):
    """Load channels of rows in fp32; x is a pointer to a head's rows and their stride."""
    ptr, stride = x
    mask = is_place[:, None]
    if C.DEPTH != C.DEPTH_BLOCK:
        mask = mask & (depth < C.DEPTH)[None, :]
    ptrs = ptr + place.to(tl.int64)[:, None] * stride + depth[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _nearest(x):
    """Round to the nearest int8, ties to even; |x| is far below 2^22."""
    return ((x + MAGIC_VALUE).to(tl.int32, bitcast=True) - MAGIC).to(tl.int8)


@triton.jit
def _whole(x):
    """Round to the nearest whole number, ties to even, as fp32; |x| is far below 2^22."""
    return (x + MAGIC_VALUE) - MAGIC_VALUE


@triton.jit
def _size_bits(x):
    """Return the bits of |x|, which are ordered like the numbers; nan is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(size, least, limit):
    """Return the scale of numbers up to `size`; never 0, and nan if `size` is not finite."""
    return (tl.maximum(size, least) + (size - size)) * (1.0 / limit)


@triton.jit
def _codes_of_rows(x, least, LIMIT: tl.constexpr):
    """Return rows as int8 codes, and the scale of each, which is at least `least`."""
    scale = _scale_of(tl.max(_size_bits(x), axis=1).to(tl.float32, bitcast=True), LEAST, LIMIT)
    scale = tl.where(scale < least, least, scale)
    return _nearest(x * (1.0 / scale)[:, None]), scale


@triton.jit
def _add_turned(found, x, signs_ptr, first, C: tl.constexpr):
    """Add the Hadamard transform of channels from `first` on to `found`.

    The sum is exact for bf16 numbers times powers of two. For others, PARTS=2 adds the remainder.
    """
    depth = tl.arange(0, C.DEPTH_BLOCK)
    channel = first + tl.arange(0, C.TURNED)
    signs = tl.load(signs_ptr + channel[:, None] * C.DEPTH_BLOCK + depth[None, :])
    if C.UPCAST:
        found += tl.dot(x, signs.to(tl.float32), input_precision="ieee")
    else:
        high = x.to(tl.bfloat16)
        found = tl.dot(high, signs, found)
        if C.PARTS == 2:
            found = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), signs, found)
    return found
