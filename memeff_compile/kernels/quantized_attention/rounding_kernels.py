# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions that round to 8 bits, for kernels that write codes and for kernels that read
them.

If one number of a group that shares a scale is not finite, the group gets the scale nan. The reason
is that int8 has no nan. With an ordinary scale, the code of a nan or an infinity would decode to an
ordinary number.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(0x4B400000)  # 1.5 * 2^23: an integer added to its bits is added to its value
MAGIC_VALUE = tl.constexpr(12582912.0)
LEAST = tl.constexpr(1.0e-16)  # the least scale, for rows of zeros; two scales are multiplied


@triton.jit
def _e4m3_in_fp32(x):
    """Round to the nearest E4M3 number, ties to even; |x| must be at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    large = bits.to(tl.float32, bitcast=True)
    small = ((x * 512.0 + 12582912.0) - 12582912.0) / 512.0
    return tl.where(tl.abs(x) < 0.015625, small, large)


@triton.jit
def _load_tile(x, place, is_place, depth, C: tl.constexpr):
    """Load the channels `depth` of the rows `place` of one head, in fp32.

    A row is the query, key or value of one token. Rows for which `is_place` is false become zero.
    `x` is a pair: the pointer to the head's first row, and the stride between rows.
    """
    ptr, stride = x
    mask = is_place[:, None]
    if C.DEPTH != C.DEPTH_BLOCK:
        mask = mask & (depth < C.DEPTH)[None, :]
    ptrs = ptr + place.to(tl.int64)[:, None] * stride + depth[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _nearest(x):
    """Round to the nearest int8, ties to even; |x| must be far below 2^22."""
    return ((x + MAGIC_VALUE).to(tl.int32, bitcast=True) - MAGIC).to(tl.int8)


@triton.jit
def _whole(x):
    """Round to the nearest integer, ties to even, as fp32; |x| must be far below 2^22."""
    return (x + MAGIC_VALUE) - MAGIC_VALUE


@triton.jit
def _size_bits(x):
    """Return the bits of |x| as integers, which have the same order as the numbers.

    Nan is larger than infinity.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(size, least, limit):
    """Return the scale for numbers up to `size`.

    The scale is never 0, and it is nan if `size` is not finite.
    """
    return (tl.maximum(size, least) + (size - size)) * (1.0 / limit)


@triton.jit
def _codes_of_rows(x, least, LIMIT: tl.constexpr):
    """Return rows as int8 codes, and the scale of each row, which is at least `least`."""
    widest: tl.constexpr = LIMIT + (LIMIT == 15)
    scale = _scale_of(tl.max(_size_bits(x), axis=1).to(tl.float32, bitcast=True), LEAST, widest)
    is_least = scale < least
    scale = tl.where(is_least, least, scale)
    x = x * (1.0 / scale)[:, None]
    if LIMIT == 15:  # rows far below their mean have even codes, because these have a zero
        x = tl.where(is_least[:, None], 2.0 * _whole(0.5 * x), _code_of(x, LIMIT))
    return _nearest(x), scale


@triton.jit
def _code_of(x, LIMIT: tl.constexpr):
    """Return the nearest code as fp32: any integer, or with LIMIT 15 an odd integer."""
    if LIMIT == 15:
        x = 2.0 * _whole(0.5 * x - 0.5) + 1.0
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    else:
        x = _whole(x)
    return x


@triton.jit
def _turned_far(parts, COUNT: tl.constexpr):
    """Return the Hadamard transform across up to 16 tensors, element by element."""
    for bit in tl.static_range(4):
        if (1 << bit) < COUNT:
            turned = ()
            for part in tl.static_range(COUNT):
                other = parts[part ^ (1 << bit)]
                if (part >> bit) % 2 == 0:
                    turned += (parts[part] + other,)
                else:
                    turned += (other - parts[part],)
            parts = turned
    return parts


@triton.jit
def _turned_near(x, NEAR: tl.constexpr):
    """Return rows after a Hadamard transform over groups of 1, 8 or 16 neighbouring channels."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    if NEAR == 1:
        pass
    elif NEAR == 8:
        x = tl.reshape(x, (rows, width // 8, 2, 2, 2))
        for _ in tl.static_range(3):
            even, odd = tl.split(x)
            x = tl.permute(tl.join(even + odd, even - odd), (0, 1, 4, 2, 3))
    else:
        x = tl.reshape(x, (rows, width // 16, 2, 2, 2, 2))
        for _ in tl.static_range(4):
            even, odd = tl.split(x)
            x = tl.permute(tl.join(even + odd, even - odd), (0, 1, 5, 2, 3, 4))
    return tl.reshape(x, (rows, width))


@triton.jit
def _load_turned(x, place, is_place, change, C: tl.constexpr, HAS_MEAN: tl.constexpr):
    """Load queries or keys of one head, scale their channels, and apply a Hadamard transform.

    `change` contains one factor per channel and, if HAS_MEAN is set, a mean to subtract. The
    Hadamard transform has two steps. The first combines neighbouring channels of a head, and the
    second combines channels that are far apart. A thread loads most of the channels that it
    combines, so few numbers move between threads.
    """
    mean_ptr, factor_ptr = change
    width: tl.constexpr = C.DEPTH_BLOCK // C.FAR
    parts = ()
    for part in tl.static_range(C.FAR):
        channel = part * width + tl.arange(0, width)
        tile = _load_tile(x, place, is_place, channel, C)
        if HAS_MEAN:
            tile -= tl.load(mean_ptr + channel)[None, :]
        tile *= tl.load(factor_ptr + channel)[None, :]
        parts += (_turned_near(tile, C.NEAR),)
    parts = _turned_far(parts, C.FAR)
    if C.FAR == 1:
        whole = parts[0]
    elif C.FAR == 4:
        whole = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        whole = tl.permute(whole, (0, 2, 3, 1))
    else:
        low = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        high = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        whole = tl.permute(tl.join(low, high), (0, 2, 3, 4, 1))
    return tl.reshape(whole, (place.shape[0], C.DEPTH_BLOCK))
