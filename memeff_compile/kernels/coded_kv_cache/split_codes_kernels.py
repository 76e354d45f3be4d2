# ruff: noqa: ANN001, ANN202  (arguments of device code are pointers and scalars of Triton's own)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The two passes of the engine `codes`: attention over a share of the cache, and the sum of shares.

Program i of n takes the turns i, i + n, i + 2n ... of a few groups of codes each, then tiles of the
window and of the kept tokens in the same manner. Scores stand with tokens down and query heads
across: then keys and values are both the left operand of their product, read as bytes and unpacked
in registers, and eight query heads fill a tile. Codes stay whole numbers: a key's scales multiply
the query, a value's the weight, and zeros are added once per tile. Weights are summed token by
token in registers and across tokens at the end, so a turn has two reductions: the zeros of keys,
and the largest score. Sums run in a fixed order.

PACKED unpacks four bytes at a time with 32-bit instructions into bf16 numbers 128 + code, which are
exact. Of keys 128 is taken out with the zeros; of values it is taken off, with the middle code,
before they are summed over many tokens, where a large sum would lose what is small. The interpreter
cannot run it, nor multiply bf16: there PACKED is off and UPCAST widens operands to fp32.

Axis letters: tokens run over one group, rows are the query heads of one key-value head, part is a
share of the channels that one product covers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes are loaded as numbers of 16 bits, two bytes each, and two of these become two bf16 numbers
# in as few as one instruction: the bits of one code of each stay where they are, and the exponent
# of 128 is put above them. A code that lies n bits up from the last counts 2 ** n times.
_KEEP = "0x{0:04x}{0:04x}"


def _moved(name: str, source: int, right: int) -> str:
    """Return the instruction that puts an operand, so many bits to the right, into a register."""
    return f"{'shr' if right >= 0 else 'shl'}.b32 {name}, ${source}, {abs(right)}; "


def _take_two(right: int, mask: int) -> tl.constexpr:
    """Return code that makes numbers of the codes at a place in two times 16 bits."""
    keep = _KEEP.format(mask)
    return tl.constexpr(
        "{ .reg .b32 t; " + _moved("t", 1, right) + f"lop3.b32 $0, t, {keep}, 0x43004300, 0xEA; }}"
    )


def _take_two_high(right: int, mask: int, high_right: int, high_mask: int) -> tl.constexpr:
    """Return code as `_take_two`, with a bit from a second operand."""
    keep, more = _KEEP.format(mask), _KEEP.format(high_mask)
    return tl.constexpr(
        "{ .reg .b32 t, u; "
        + _moved("t", 1, right)
        + _moved("u", 2, high_right)
        + f"lop3.b32 t, t, {keep}, 0x43004300, 0xEA; lop3.b32 $0, u, {more}, t, 0xEA; }}"
    )


# Keys take codes where they lie; of values all count 16 times, so that 128 is less against them.
# Names end in bits, part and byte.
_K_4_0_0, _K_4_0_1 = _take_two(0, 0x0F), _take_two(8, 0x0F)
_K_4_1_0, _K_4_1_1 = _take_two(4, 0x0F), _take_two(12, 0x0F)
_K_2_0_0, _K_2_0_1 = _take_two(0, 0x03), _take_two(8, 0x03)
_K_2_1_0, _K_2_1_1 = _take_two(0, 0x0C), _take_two(8, 0x0C)
_K_2_2_0, _K_2_2_1 = _take_two(0, 0x30), _take_two(8, 0x30)
_K_2_3_0, _K_2_3_1 = _take_two(2, 0x30), _take_two(10, 0x30)
_V_2_0_0, _V_2_0_1 = _take_two(-4, 0x30), _take_two(4, 0x30)
_V_2_1_0, _V_2_1_1 = _take_two(-2, 0x30), _take_two(6, 0x30)
_K_3_0_0, _K_3_0_1 = _take_two_high(0, 0x03, -2, 0x04), _take_two_high(8, 0x03, 6, 0x04)
_K_3_1_0, _K_3_1_1 = _take_two_high(0, 0x0C, -2, 0x10), _take_two_high(8, 0x0C, 6, 0x10)
_K_3_2_0, _K_3_2_1 = _take_two_high(0, 0x30, -2, 0x40), _take_two_high(8, 0x30, 6, 0x40)
_K_3_3_0, _K_3_3_1 = _take_two_high(2, 0x30, 0, 0x40), _take_two_high(10, 0x30, 8, 0x40)
_V_3_0_0, _V_3_0_1 = _take_two_high(-4, 0x30, -6, 0x40), _take_two_high(4, 0x30, 2, 0x40)
_V_3_1_0, _V_3_1_1 = _take_two_high(-2, 0x30, -4, 0x40), _take_two_high(6, 0x30, 4, 0x40)

# A byte is two halves: (128 + high) * 16 - 2304 + (128 + low) = code - 128, exact throughout.
_TAKE_8 = tl.constexpr(
    "{ .reg .b32 t, u, a, b, c, d, one, many, less; mov.b32 one, 0x3F803F80; "
    "mov.b32 many, 0x41804180; mov.b32 less, 0xC510C510; and.b32 t, $2, 0x0F0F0F0F; "
    "prmt.b32 a, t, 0x43434343, 0x4140; prmt.b32 b, t, 0x43434343, 0x4342; "
    "shr.b32 u, $2, 4; and.b32 u, u, 0x0F0F0F0F; "
    "prmt.b32 c, u, 0x43434343, 0x4140; prmt.b32 d, u, 0x43434343, 0x4342; "
    "fma.rn.bf16x2 c, c, many, less; fma.rn.bf16x2 d, d, many, less; "
    "fma.rn.bf16x2 $0, a, one, c; fma.rn.bf16x2 $1, b, one, d; }"
)


@triton.jit
def _take(raw, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _two(raw, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _two_high(raw, high, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [raw, high], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _code_of(raw, high, PLACE: tl.constexpr, BITS: tl.constexpr, kind: tl.constexpr):
    """Return codes at a place of 16 bits as numbers of a type."""
    if BITS == 3:
        code = ((raw >> PLACE) & 3) | (((high >> PLACE) & 1) << 2)
    else:
        code = (raw >> PLACE) & ((1 << BITS) - 1)
    return code.to(kind)


@triton.jit
def _numbers(
    raw,
    high,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_VALUE: tl.constexpr,
    PACKED: tl.constexpr,
    kind: tl.constexpr,
):
    """Return (ROWS, COLUMNS): codes of a part as numbers, first of even bytes, then of odd ones.

    With PACKED 128 is added, and codes count as often as `_take_two` says.
    """
    if not PACKED:
        even = _code_of(raw, high, PART * (2 if BITS == 3 else BITS), BITS, kind)
        odd = _code_of(raw, high, PART * (2 if BITS == 3 else BITS) + 8, BITS, kind)
    elif BITS == 4:
        even = _two(raw, _K_4_0_0 if PART == 0 else _K_4_1_0)
        odd = _two(raw, _K_4_0_1 if PART == 0 else _K_4_1_1)
    elif BITS == 2:
        if PART == 0:
            even = _two(raw, _V_2_0_0 if IS_VALUE else _K_2_0_0)
            odd = _two(raw, _V_2_0_1 if IS_VALUE else _K_2_0_1)
        elif PART == 1:
            even = _two(raw, _V_2_1_0 if IS_VALUE else _K_2_1_0)
            odd = _two(raw, _V_2_1_1 if IS_VALUE else _K_2_1_1)
        else:
            even = _two(raw, _K_2_2_0 if PART == 2 else _K_2_3_0)
            odd = _two(raw, _K_2_2_1 if PART == 2 else _K_2_3_1)
    elif PART == 0:
        even = _two_high(raw, high, _V_3_0_0 if IS_VALUE else _K_3_0_0)
        odd = _two_high(raw, high, _V_3_0_1 if IS_VALUE else _K_3_0_1)
    elif PART == 1:
        even = _two_high(raw, high, _V_3_1_0 if IS_VALUE else _K_3_1_0)
        odd = _two_high(raw, high, _V_3_1_1 if IS_VALUE else _K_3_1_1)
    else:
        even = _two_high(raw, high, _K_3_2_0 if PART == 2 else _K_3_3_0)
        odd = _two_high(raw, high, _K_3_2_1 if PART == 2 else _K_3_3_1)
    return tl.permute(tl.join(even, odd), (0, 2, 1)).reshape((ROWS, COLUMNS))


@triton.jit
def _all_numbers(
    raw,
    high,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    kind: tl.constexpr,
):
    """Return (ROWS, COLUMNS): the codes of all parts of keys, part after part."""
    PARTS: tl.constexpr = 8 // BITS if BITS != 3 else 4
    WIDTH: tl.constexpr = COLUMNS // PARTS
    first = _numbers(raw, high, 0, BITS, ROWS, WIDTH, False, PACKED, kind)
    second = _numbers(raw, high, 1, BITS, ROWS, WIDTH, False, PACKED, kind)
    if PARTS == 2:
        both = tl.join(first, second)  # (ROWS, WIDTH, 2)
        found = tl.permute(both, (0, 2, 1)).reshape((ROWS, COLUMNS))
    else:
        third = _numbers(raw, high, 2, BITS, ROWS, WIDTH, False, PACKED, kind)
        fourth = _numbers(raw, high, 3, BITS, ROWS, WIDTH, False, PACKED, kind)
        four = tl.join(tl.join(first, third), tl.join(second, fourth))  # (ROWS, WIDTH, 2, 2)
        found = tl.permute(four, (0, 2, 3, 1)).reshape((ROWS, COLUMNS))
    return found


@triton.jit
def _as_codes_come(x, DEPTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Put the channels of x into the order of `_all_numbers`: a part's even ones, then its odd."""
    parts = x.reshape((DEPTH // WIDTH, WIDTH // 2, 2, COLUMNS))
    return tl.permute(parts, (0, 2, 1, 3)).reshape((DEPTH, COLUMNS))


@triton.jit
def _narrow(x, PACKED: tl.constexpr, kind: tl.constexpr):
    """Return x in a type; with PACKED bf16, two numbers at a time."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(kind)


@triton.jit
def _pair_of(base, place):
    """Return the step and the zero at a place, in fp32; two bf16 numbers are one load."""
    kind: tl.constexpr = base.dtype.element_ty
    if kind == tl.bfloat16:
        both = tl.load(base.to(tl.pointer_type(tl.uint32)) + place)
        step = (both << 16).to(tl.float32, bitcast=True)
        zero = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        step = tl.load(base + 2 * place).to(tl.float32)
        zero = tl.load(base + 2 * place + 1).to(tl.float32)
    return step, zero


@triton.jit
def _norms_of(base, place):
    """Return what keys and what values are multiplied by, in fp32; two numbers are one load.

    Loads of less than four bytes are not made ahead of time, and waiting for them would cost more
    than all the rest of a turn.
    """
    if base.dtype.element_ty == tl.float16:
        both = tl.load(base.to(tl.pointer_type(tl.uint32)) + place)
        first = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        first, second = _pair_of(base, place)
    return first, second


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _attend_exact(
    k_base,
    v_base,
    place,  # (TILE,) rows of the tile
    is_seen,  # (TILE,)
    q,  # (D, ROWS)
    scale,
    largest,
    total,
    accs,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add a tile of tokens that are stored as they came."""
    depth = tl.arange(0, DEPTH)
    width = tl.arange(0, WIDTH)
    offs = place.to(tl.int64) * DEPTH
    k = tl.load(k_base + offs[:, None] + depth[None, :], mask=is_seen[:, None], other=0.0)
    score = tl.zeros((k.shape[0], q.shape[1]), dtype=tl.float32)
    score = _dot(k, q, score, UPCAST) * scale
    score = tl.where(is_seen[:, None], score, float("-inf"))
    higher = tl.maximum(largest, tl.max(score, axis=0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[None, :])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weight, axis=0)
    weight = weight.to(q.dtype)
    new = ()
    for part in tl.static_range(PARTS):
        v = tl.load(
            v_base + offs[None, :] + (part * WIDTH + width)[:, None],
            mask=is_seen[None, :],
            other=0.0,
        )
        new = new + (_dot(v, weight, accs[part] * shrink[None, :], UPCAST),)  # noqa: RUF005
    return higher, total, new


@triton.jit
def _coded_kv_cache_attention_kernel(
    q_ptr,  # (B, KV_HEADS * REPEAT, 1, D)
    stride_q_batch,
    stride_q_head,
    stride_q_depth,
    k_codes_ptr,  # (B, KV_HEADS, groups, GROUP * D * BITS / 8) bytes
    v_codes_ptr,
    k_scales_ptr,  # (B, KV_HEADS, groups, D, 2), or (B, KV_HEADS, groups, 1, GROUP, 1)
    v_scales_ptr,  # (B, KV_HEADS, groups, D / CHANNELS, GROUP, 2), or as of keys
    k_window_ptr,  # (B, KV_HEADS, WINDOW, D)
    v_window_ptr,
    k_kept_ptr,  # (B, KV_HEADS, KEPT, D)
    v_kept_ptr,
    places_ptr,  # (B, KV_HEADS, KEPT) int32
    counts_ptr,  # (3,) int64
    norms_ptr,  # (B, KV_HEADS, norm_count, 2) of key and value, with HAS_NORMS
    mask_ptr,  # (B, mask_count) bytes, with HAS_MASK
    stride_mask_batch,
    stride_mask_key,
    out_ptr,  # (B, KV_HEADS * REPEAT, D), with IS_ALONE
    share_ptr,  # (B, KV_HEADS, REPEAT, splits, D) fp32, otherwise
    stat_ptr,  # (2, B, KV_HEADS, REPEAT, splits) fp32: largest score in base 2, sum of weights
    scale,  # of the scores, in base 2
    kv_heads,
    groups,
    norm_count,
    mask_count,
    splits,
    stat_count,  # B * KV_HEADS * REPEAT * splits
    REPEAT: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a value that share a scale
    WIDTH: tl.constexpr,  # channels per part
    WINDOW: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_TILE: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_ALONE: tl.constexpr,
    STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,  # groups per turn
    PACKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    PARTS: tl.constexpr = DEPTH // WIDTH
    BLOCK: tl.constexpr = GROUP * DEPTH * BITS // 8
    HIGH: tl.constexpr = DEPTH // 8  # bytes of a row of the plane of high bits
    OFFSET: tl.constexpr = (-128.0 if BITS == 8 else 128.0) if PACKED else 0.0
    TOP: tl.constexpr = 1 << (BITS - 1)
    V_GAIN: tl.constexpr = 16.0 if PACKED and BITS < 4 else 1.0
    kind: tl.constexpr = q_ptr.dtype.element_ty
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    length = tl.load(counts_ptr)
    coded = tl.load(counts_ptr + 1)
    tiles = tl.minimum(coded // GROUP, groups).to(tl.int32)
    first = 0
    if KEPT > 0:
        first = tl.load(places_ptr + pair * KEPT)
    rows = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    width = tl.arange(0, WIDTH)
    tokens = tl.arange(0, GROUP)  # in the order in which their codes come, as channels of keys
    if BITS != 8:
        tokens = tokens % (GROUP // 2) * 2 + tokens // (GROUP // 2)
    is_row = rows < REPEAT
    q_offs = (kv_head * REPEAT + rows) * stride_q_head + batch * stride_q_batch
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((GROUP, ROWS), dtype=tl.float32)
    accs = ()
    zeros = ()
    # A key's code of a part counts as often as `_take_two` says; its query is that much smaller.
    gains = tl.full((DEPTH,), 1.0, dtype=tl.float32)
    if PACKED and BITS < 4:
        gains = tl.where(depth < WIDTH, 1.0, tl.where(depth < 2 * WIDTH, 4.0, 16.0))
    whole_query = (
        tl.load(
            q_ptr + q_offs[None, :] + depth[:, None] * stride_q_depth,
            mask=is_row[None, :],
            other=0.0,
        ).to(tl.float32)
        * scale
    )
    query = whole_query / gains[:, None]
    for _ in tl.static_range(PARTS):
        accs = accs + (tl.zeros((WIDTH, ROWS), dtype=tl.float32),)  # noqa: RUF005
    for _ in tl.static_range(DEPTH // CHANNELS):
        zeros = zeros + (tl.zeros((GROUP, ROWS), dtype=tl.float32),)  # noqa: RUF005

    # Offsets of bytes within a block: keys token by token, values channel by channel.
    if BITS == 8:
        k_place = tokens[:, None] * DEPTH + depth[None, :]
        v_place = width[:, None] * GROUP + tokens[None, :]
        k_base = k_codes_ptr
        v_base = v_codes_ptr
    else:
        k_half = tl.arange(0, WIDTH // 2)
        v_half = tl.arange(0, GROUP // 2)
        k_place = tokens[:, None] * (WIDTH // 2) + k_half[None, :]
        v_place = width[:, None] * (GROUP // 2) + v_half[None, :]
        k_base = k_codes_ptr.to(tl.pointer_type(tl.uint16))
        v_base = v_codes_ptr.to(tl.pointer_type(tl.uint16))
        if BITS == 3:
            # A high bit's byte serves two channels, HIGH apart, the second a bit up.
            BEHIND: tl.constexpr = GROUP * WIDTH // 2
            k_high = BEHIND + tokens[:, None] * (HIGH // 2) + (k_half % (HIGH // 2))[None, :]
            v_high = BEHIND + (width % HIGH)[:, None] * (GROUP // 2) + v_half[None, :]
            k_nudge = (k_half // (HIGH // 2)).to(tl.uint16)
            v_nudge = (width // HIGH).to(tl.uint16)
    PLACES: tl.constexpr = BLOCK if BITS == 8 else BLOCK // 2
    k_base += pair * groups * PLACES
    v_base += pair * groups * PLACES
    K_SCALES: tl.constexpr = GROUP if IS_PER_HEAD else 2 * DEPTH
    V_SCALES: tl.constexpr = GROUP if IS_PER_HEAD else 2 * GROUP * (DEPTH // CHANNELS)
    ks_base = k_scales_ptr + pair * groups * K_SCALES
    vs_base = v_scales_ptr + pair * groups * V_SCALES
    wide_zero = pair * 0  # makes addresses 64-bit numbers

    for turn in tl.range(split, tl.cdiv(tiles, AT_ONCE), splits, num_stages=STAGES):
        scores = ()
        v_norms = ()
        best = tl.full((GROUP, ROWS), float("-inf"), dtype=tl.float32)
        for at in tl.static_range(AT_ONCE):
            tile = turn * AT_ONCE + at
            block = wide_zero + tl.minimum(tile, tiles - 1)
            k_raw = tl.load(k_base + block * PLACES + k_place)
            k_more = k_raw
            if BITS == 3:
                k_more = tl.load(k_base + block * PLACES + k_high) >> k_nudge[None, :]
            score = tl.zeros((GROUP, ROWS), dtype=tl.float32)
            if IS_PER_HEAD:
                scaled = _narrow(query, PACKED, kind)
                bias = -(OFFSET / gains[:, None] + TOP) * (scaled.to(tl.float32) * gains[:, None])
            else:
                step, zero = _pair_of(ks_base + block * K_SCALES, depth)
                scaled = _narrow(query * step[:, None], PACKED, kind)
                bias = whole_query * zero[:, None] - OFFSET * scaled.to(tl.float32)
            if BITS != 8:
                scaled = _as_codes_come(scaled, DEPTH, WIDTH, ROWS)
            if BITS == 8:
                numbers = _take(k_raw, _TAKE_8) if PACKED else k_raw.to(kind)
            else:
                numbers = _all_numbers(k_raw, k_more, BITS, GROUP, DEPTH, PACKED, kind)
            score = _dot(numbers, scaled, score, UPCAST)
            score += tl.sum(bias, axis=0)[None, :]
            if IS_PER_HEAD:
                score *= tl.load(ks_base + block * K_SCALES + tokens).to(tl.float32)[:, None]
            position = tile * GROUP + tokens
            is_seen = position < tiles * GROUP
            if HAS_NORMS:
                place = block * GROUP + tokens
                k_norm, v_norm = _norms_of(norms_ptr + pair * norm_count * 2, place)
                v_norms = v_norms + (v_norm,)  # noqa: RUF005
                score *= k_norm[:, None]
                is_seen = is_seen & (k_norm >= 0.0)  # the others are among the kept tokens
            elif KEPT > 0:
                is_seen = is_seen & ((position < first) | (position >= first + KEPT))
            if HAS_MASK:
                seen = tl.load(
                    mask_ptr + batch * stride_mask_batch + (wide_zero + position) * stride_mask_key,
                    mask=is_seen & (position < mask_count),
                    other=0,
                )
                is_seen = is_seen & (seen != 0)
            score = tl.where(is_seen[:, None], score, float("-inf"))
            best = tl.maximum(best, score)
            scores = scores + (score,)  # noqa: RUF005
        higher = tl.maximum(largest, tl.max(best, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(largest - base)
        largest = higher
        sums = sums * shrink[None, :]
        fresh = ()  # of this turn alone: the 128 must not add up over many
        new_zeros = ()
        for _ in tl.static_range(PARTS):
            fresh = fresh + (tl.zeros((WIDTH, ROWS), dtype=tl.float32),)  # noqa: RUF005
        for share in tl.static_range(DEPTH // CHANNELS):
            new_zeros = new_zeros + (zeros[share] * shrink[None, :],)  # noqa: RUF005
        zeros = new_zeros
        for at in tl.static_range(AT_ONCE):
            tile = turn * AT_ONCE + at
            block = wide_zero + tl.minimum(tile, tiles - 1)
            v_raw = tl.load(v_base + block * PLACES + v_place)
            v_more = v_raw
            if BITS == 3:
                v_more = tl.load(v_base + block * PLACES + v_high) >> v_nudge[:, None]
            weight = tl.exp2(scores[at] - base[None, :])
            sums += weight
            if HAS_NORMS:
                weight *= v_norms[at][:, None]
            new_fresh = ()
            new_zeros = ()
            for part in tl.static_range(PARTS):
                if BITS == 8 and part > 0:
                    v_raw = tl.load(v_base + block * PLACES + v_place + part * WIDTH * GROUP)
                if part * WIDTH % CHANNELS == 0:
                    share = part * WIDTH // CHANNELS
                    if IS_PER_HEAD:
                        step = tl.load(vs_base + block * V_SCALES + tokens).to(tl.float32)
                        scaled = _narrow(weight * step[:, None], PACKED, kind)
                        taken = -TOP * scaled.to(tl.float32)
                    else:
                        step, zero = _pair_of(vs_base + block * V_SCALES, share * GROUP + tokens)
                        scaled = _narrow(weight * step[:, None], PACKED, kind)
                        taken = weight * zero[:, None]
                    if PACKED:
                        taken -= OFFSET / V_GAIN * scaled.to(tl.float32)
                    new_zeros = new_zeros + (zeros[part * WIDTH // CHANNELS] + taken,)  # noqa: RUF005
                if BITS == 8:
                    numbers = _take(v_raw, _TAKE_8) if PACKED else v_raw.to(kind)
                else:
                    numbers = _numbers(v_raw, v_more, part, BITS, WIDTH, GROUP, True, PACKED, kind)
                new_fresh = new_fresh + (_dot(numbers, scaled, fresh[part], UPCAST),)  # noqa: RUF005
            fresh = new_fresh
            zeros = new_zeros
        new_accs = ()
        for part in tl.static_range(PARTS):
            # By fma, not a sum: Triton would start the product at what is summed.
            new_accs = new_accs + (  # noqa: RUF005
                tl.fma(accs[part], tl.broadcast_to(shrink[None, :], (WIDTH, ROWS)), fresh[part]),
            )
        accs = new_accs

    total = tl.sum(sums, axis=0)
    whole = ()
    for part in tl.static_range(PARTS):
        whole = whole + (  # noqa: RUF005
            accs[part] * (1.0 / V_GAIN) + tl.sum(zeros[part * WIDTH // CHANNELS], axis=0)[None, :],
        )
    accs = whole
    whole_q = tl.load(
        q_ptr + q_offs[None, :] + depth[:, None] * stride_q_depth, mask=is_row[None, :], other=0.0
    )
    TILES: tl.constexpr = (WINDOW + WINDOW_TILE - 1) // WINDOW_TILE
    for tile in tl.range(split, TILES, splits, num_stages=1):
        slot = tile * WINDOW_TILE + tl.arange(0, WINDOW_TILE)
        position = coded + (slot + WINDOW - coded % WINDOW) % WINDOW
        is_seen = (position < length) & (slot < WINDOW)
        if HAS_MASK:
            seen = tl.load(
                mask_ptr + batch * stride_mask_batch + position * stride_mask_key,
                mask=is_seen & (position < mask_count),
                other=0,
            )
            is_seen = is_seen & (seen != 0)
        largest, total, accs = _attend_exact(
            k_window_ptr + pair * (WINDOW * DEPTH),
            v_window_ptr + pair * (WINDOW * DEPTH),
            slot,
            is_seen,
            whole_q,
            scale,
            largest,
            total,
            accs,
            DEPTH,
            WIDTH,
            PARTS,
            UPCAST,
        )
    if KEPT > 0:
        turn = (split + splits - TILES % splits) % splits
        for tile in tl.range(turn, (KEPT + KEPT_TILE - 1) // KEPT_TILE, splits, num_stages=1):
            row = tile * KEPT_TILE + tl.arange(0, KEPT_TILE)
            position = tl.load(places_ptr + pair * KEPT + row, mask=row < KEPT, other=-1)
            is_seen = (position >= 0) & (position < coded)
            if HAS_MASK:
                seen = tl.load(
                    mask_ptr + batch * stride_mask_batch + position.to(tl.int64) * stride_mask_key,
                    mask=is_seen & (position < mask_count),
                    other=0,
                )
                is_seen = is_seen & (seen != 0)
            largest, total, accs = _attend_exact(
                k_kept_ptr + pair * (KEPT * DEPTH),
                v_kept_ptr + pair * (KEPT * DEPTH),
                row,
                is_seen,
                whole_q,
                scale,
                largest,
                total,
                accs,
                DEPTH,
                WIDTH,
                PARTS,
                UPCAST,
            )
    row_of = pair * REPEAT + rows
    for part in tl.static_range(PARTS):
        channel = (part * WIDTH + width)[:, None]
        if IS_ALONE:
            tl.store(
                out_ptr + row_of[None, :] * DEPTH + channel,
                (accs[part] / tl.where(total == 0.0, 1.0, total)[None, :]).to(
                    out_ptr.dtype.element_ty
                ),
                mask=is_row[None, :],
            )
        else:
            tl.store(
                share_ptr + (row_of * splits + split)[None, :] * DEPTH + channel,
                accs[part],
                mask=(is_row & (largest != float("-inf")))[None, :],
            )
    if not IS_ALONE:
        tl.store(stat_ptr + row_of * splits + split, largest, mask=is_row)
        tl.store(stat_ptr + stat_count + row_of * splits + split, total, mask=is_row)


@triton.jit
def _coded_kv_cache_combine_kernel(
    share_ptr,  # (rows, splits, D) fp32
    stat_ptr,  # (2, rows, splits) fp32
    out_ptr,  # (rows, D)
    splits,
    stat_count,
    DEPTH: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    depth = tl.arange(0, DEPTH)
    place = row * splits + split
    largest = tl.load(stat_ptr + place, mask=split < splits, other=float("-inf"))
    total = tl.load(stat_ptr + stat_count + place, mask=split < splits, other=0.0)
    is_there = largest != float("-inf")  # the other shares were never written
    share = tl.load(
        share_ptr + place[:, None] * DEPTH + depth[None, :], mask=is_there[:, None], other=0.0
    )
    base = tl.max(largest, axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)
    weight = tl.exp2(largest - base)
    whole = tl.sum(weight * total, axis=0)
    result = tl.sum(share * weight[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out_ptr + row * DEPTH + depth, result.to(out_ptr.dtype.element_ty))
