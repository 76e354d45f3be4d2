# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Triton kernels of the implementation `tiles` of ternary linear layers.

A 32-bit word of packed weights contains the codes of 16 columns: each of its four bytes has four
2-bit fields. If a kernel sets all but one field of each byte to zero, the word contains four codes
(0, 1 or 2). An integer instruction multiplies these four weight codes by four activations of a
token, which are int8 codes. The four activations for field j of a word's four bytes are stored next
to each other. The activations for field j of all words in a row form the plane j. A stored weight
code is larger by one than the weight (-1, 0 or 1). So the product is too large by the sum of the
token's activations. The kernel subtracts this sum at the end.

Launch these kernels with enable_fp_fusion=False, because a product and the rounding after it must
be two steps, as in PyTorch.

With BYTEWISE, integer products are computed byte by byte, because Triton's interpreter cannot run
assembly code.

In variable names, rows are rows of the weights (N), and tokens are rows of the activations (M). The
words and bytes of one row or token contain the codes of its columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDING: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: ulp 1, ties to even


@triton.jit
def _rounded(value, DTYPE: tl.constexpr):
    """Round numbers to the dtype in which the model computes."""
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _scale_of_token(
    x,  # (COLUMNS,) fp32, zeros after the last column
    columns,
    eps,
    eps_rounded,
    C: tl.constexpr,
):
    """Return the scale of a token.

    The caller then passes the scale to `_checked`, which checks that the scale is valid.
    """
    if C.IS_MEAN:
        total = tl.sum(tl.abs(x), axis=0)
        statistic = _rounded(tl.div_rn(total, tl.cast(columns, tl.float32)), C.DTYPE)
    else:  # as integers, so that nan is the largest
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        statistic = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    if C.ADDS_EPS:
        statistic = _rounded(statistic + eps, C.DTYPE)
    else:
        statistic = tl.where(statistic < eps_rounded, eps_rounded, statistic)
    levels = tl.full((), C.LEVELS, tl.float32)
    if C.IS_STEP:
        if C.INVERSE > 0.0:  # on a GPU PyTorch divides by a number so
            return _rounded(statistic * tl.full((), C.INVERSE, tl.float32), C.DTYPE)
        return _rounded(tl.div_rn(statistic, levels), C.DTYPE)
    one = tl.full((), 1.0, tl.float32)
    return _rounded(_rounded(tl.div_rn(one, statistic), C.DTYPE) * levels, C.DTYPE)


@triton.jit
def _larger_half(x, kept, LOW_BIT: tl.constexpr):
    """Set all elements of a token to zero, except the `kept` elements with the largest absolute
    values.

    The kernel finds the smallest of the kept absolute values, two bits at a time, starting with the
    highest bits. The next two bits have three possible values other than zero: 1, 2 or 3. Each
    value defines a number: the known bits, then this value, then zeros. The kernel counts the
    elements that are at least as large as each of these numbers. The three counts share one 64-bit
    integer, 21 bits for each. So a single sum over the token's elements computes all three.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    least = tl.full((), 0, tl.int32)
    for step in tl.static_range((31 - LOW_BIT) // 2):
        one = least | (1 << (29 - 2 * step))
        two = least | (2 << (29 - 2 * step))
        three = one | two
        counts = (bits >= one).to(tl.int64) + ((bits >= two).to(tl.int64) << 21)
        total = tl.sum(counts + ((bits >= three).to(tl.int64) << 42), axis=0)
        least = tl.where((total & 0x1FFFFF) >= kept, one, least)
        least = tl.where(((total >> 21) & 0x1FFFFF) >= kept, two, least)
        least = tl.where((total >> 42) >= kept, three, least)
    if (31 - LOW_BIT) % 2 == 1:
        one = least | (1 << LOW_BIT)
        least = tl.where(tl.sum((bits >= one).to(tl.int32), axis=0) >= kept, one, least)
    return tl.where(bits >= least, x, 0.0)


@triton.jit
def _codes_of_token(x, scale, C: tl.constexpr):
    """Quantise the values `x` of a token, and return the integer codes as int32.

    If `C.IS_STEP` is set, `scale` is the quantisation step, and the values are divided by `scale`.
    Otherwise the values are multiplied by `scale`. Then they are rounded.
    """
    if C.IS_STEP:
        x, over = tl.broadcast(x, scale)
        scaled = tl.div_rn(x, over)
    else:
        scaled = x * scale
    scaled = _rounded(scaled, C.DTYPE)
    if C.IS_FLOAT:
        size = tl.abs(scaled)
        code = (size > 0.5).to(tl.int32) + (size >= 1.5).to(tl.int32) + (size > 2.5).to(tl.int32)
        code += (size >= 3.5).to(tl.int32) + 2 * (size > 5.0).to(tl.int32)
        code += 2 * (size >= 7.0).to(tl.int32) + 4 * (size > 10.0).to(tl.int32)
        return tl.where(scaled < 0.0, -code, code)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, C.LOW), C.HIGH)
    return ((scaled + _ROUNDING) - _ROUNDING).to(tl.int32)


@triton.jit
def _checked(scale):
    """Return a scale unchanged, or nan if it is invalid."""
    return tl.where((scale > 0.0) & (scale < float("inf")), scale, float("nan"))


@triton.jit
def _entering_token(
    entering,  # the token, up, with HAS_UP, and the weight of the norm, with HAS_NORM
    columns,
    norm_eps,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
):
    """Return a token in float32 after the operations that precede quantisation, rounded wherever
    PyTorch would round to the token's dtype.

    If HAS_UP is set, the token x becomes relu(x) ** 2 * up. If HAS_NORM is set, an RMS norm
    follows.
    """
    x_ptr, up_ptr, norm_ptr = entering
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    offs = tl.arange(0, COLUMNS)
    mask = offs < columns
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if C.HAS_UP:
        up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(x <= 0.0, 0.0, x)
        x = _rounded(_rounded(x * x, KIND) * up, KIND)
    if C.HAS_NORM:
        weight = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        mean = tl.div_rn(tl.sum(x * x, axis=0), tl.cast(columns, tl.float32))
        x = _rounded(_rounded(x * tl.rsqrt(mean + norm_eps), KIND) * weight, KIND)
    return x


@triton.jit
def _quantized_token(
    entering,  # the token and its operands, as in `_entering_token`
    columns,
    numbers,
    COLUMNS: tl.constexpr,  # a power of two
    C: tl.constexpr,
):
    """Return a token's codes, the token's scale, and the sum of the codes.

    A 32-bit word contains four codes. Word w contains the columns 4 w to 4 w + 3.
    """
    norm_eps, kept, eps, eps_rounded = numbers
    offs = tl.arange(0, COLUMNS)
    x = _entering_token(entering, columns, norm_eps, COLUMNS, C)
    x = _rounded(x, C.DTYPE)
    scale = _scale_of_token(x, columns, eps, eps_rounded, C)
    if C.KEEPS_HALF:
        x = _larger_half(x, kept, C.LOW_BIT)
    codes = _codes_of_token(x, scale, C)
    codes = tl.where(offs < columns, codes, 0)
    shift = 8 * tl.arange(0, 4)
    words = tl.sum((tl.reshape(codes, (COLUMNS // 4, 4)) & 255) << shift[None, :], axis=1)
    return words, _checked(scale), tl.sum(codes, axis=0)


@triton.jit
def _ternary_linear_tiles_quantize_kernel(
    entry,  # x and up, (M, K), each with the stride of a token, and the norm, (K,)
    codes_ptr,  # (M, 4, words) int32
    scale_ptr,  # (M,) fp32
    sums_ptr,  # (M,) int32
    columns,
    words,
    numbers,  # eps of the norm; of the quantiser: kept elements, eps, and eps rounded
    C: tl.constexpr,  # IS_CHAINED: the next kernel may start, and waits before it reads
    # IS_EARLY: started while the kernel before may still be running
):
    x_ptr, stride_x, up_ptr, stride_up, norm_ptr = entry
    if C.IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    if C.IS_EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    held, scale, total = _quantized_token(
        (x_ptr + token * stride_x, up_ptr + token * stride_up, norm_ptr),
        columns,
        numbers,
        C.COLUMNS,
        C,
    )
    place = tl.arange(0, C.COLUMNS // 4)
    word = place // 4
    tl.store(codes_ptr + (token * 4 + place % 4) * words + word, held, mask=word < words)
    tl.store(scale_ptr + token, scale)
    tl.store(sums_ptr + token, total)


@triton.jit
def _ternary_linear_tiles_pack_kernel(
    weight_ptr,  # (N, K)
    stride_row,
    stride_column,
    scale_ptr,  # one element
    packed_ptr,  # (N, words) int32
    columns,
    words,
    WORDS: tl.constexpr,
    IS_STEP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * (WORDS * 16) + tl.arange(0, WORDS * 16)
    value = tl.load(
        weight_ptr + row * stride_row + offs.to(tl.int64) * stride_column,
        mask=offs < columns,
        other=0.0,
    )
    value = _rounded(value.to(tl.float32), DTYPE)
    scale = _rounded(tl.load(scale_ptr).to(tl.float32), DTYPE)
    if IS_STEP:
        value, over = tl.broadcast(value, scale)
        value = tl.div_rn(value, over)
    else:
        value = value * scale
    value = _rounded(value, DTYPE)
    # Half rounds to zero; nan is neither above nor below.
    code = tl.where(value > 0.5, 2, tl.where(value < -0.5, 0, 1))
    field = tl.arange(0, 16)
    shift = (field // 4) * 2 + (field % 4) * 8
    word = tl.sum(tl.reshape(code, (WORDS, 16)) << shift[None, :], axis=1)
    place = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    tl.store(packed_ptr + row * words + place, word, mask=place < words)


@triton.jit
def _ternary_linear_tiles_weights_kernel(
    packed_ptr,  # (N, words) int32
    scale_ptr,  # one element
    out_ptr,  # (N, K)
    columns,
    words,
    WORDS: tl.constexpr,
    IS_STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    packed = tl.load(packed_ptr + row * words + word, mask=word < words, other=0)
    field = tl.arange(0, 16)
    shift = (field // 4) * 2 + (field % 4) * 8
    code = tl.reshape(((packed[:, None] >> shift[None, :]) & 3) - 1, (WORDS * 16,))
    scale = tl.load(scale_ptr).to(tl.float32)
    if not IS_STEP:  # a code over the scale is plus or minus one over the scale, or zero
        scale = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    value = code.to(tl.float32) * scale
    offs = tl.program_id(1) * (WORDS * 16) + tl.arange(0, WORDS * 16)
    out_ptrs = out_ptr + row * columns + offs
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=offs < columns)


@triton.jit
def _ternary_linear_tiles_tokens_kernel(
    codes_ptr,  # (M, 4, words) int32
    scale_ptr,  # (M,) fp32
    out_ptr,  # (M, K)
    columns,
    words,
    WORDS: tl.constexpr,
    IS_STEP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    plane = tl.arange(0, 4)
    # Word t of plane j holds the columns 16 t + 4 j to 16 t + 4 j + 3.
    codes_ptrs = codes_ptr + (token * 4 + plane[None, :]) * words + word[:, None]
    held = tl.load(codes_ptrs, mask=(word < words)[:, None], other=0)
    shift = 24 - 8 * tl.arange(0, 4)
    code = tl.reshape((held[:, :, None] << shift[None, None, :]) >> 24, (WORDS * 16,))
    scale = tl.load(scale_ptr + token)
    value = code.to(tl.float32)
    if IS_STEP:
        value = value * scale
    else:
        value, over = tl.broadcast(value, scale)
        value = tl.div_rn(value, over)
    offs = tl.program_id(1) * (WORDS * 16) + tl.arange(0, WORDS * 16)
    out_ptrs = out_ptr + token * columns + offs
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=offs < columns)


@triton.jit
def _dot4(code, x, acc, BYTEWISE: tl.constexpr):
    """Multiply four unsigned bytes by four signed bytes, and add the four products to `acc`."""
    if BYTEWISE:
        for byte in tl.static_range(4):
            acc += ((code >> (8 * byte)) & 255) * ((x << (24 - 8 * byte)) >> 24)
        return acc
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [code, x, acc],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _dot4_field(weight, plane, acc, FIELD: tl.constexpr, BYTEWISE: tl.constexpr):
    """Multiply one 2-bit field of each weight byte by the codes in `plane`, and add the products to
    `acc`.

    `plane` contains a token's quantised activations for the columns whose weights are in this
    field.
    """
    code, x = tl.broadcast((weight >> (2 * FIELD)) & 0x03030303, plane[None, :])
    return _dot4(code, x, acc, BYTEWISE)


@triton.jit
def _weight_tile(packed_ptr, begin, rows, word, words, ROWS: tl.constexpr):
    """Load whole rows of packed weights, with zeros after the last row."""
    row = begin + tl.arange(0, ROWS)
    return tl.load(
        packed_ptr + row.to(tl.int64)[:, None] * words + word[None, :],
        mask=(row < rows)[:, None] & (word < words)[None, :],
        other=0,
    )


@triton.jit
def _factor(scale, weight_scale, C: tl.constexpr):
    """Return the factor that turns an integer product into the linear layer's output."""
    by_token = scale
    by_weight = weight_scale.to(tl.float32)
    if not C.IS_STEP:
        by_token = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    if not C.WEIGHT_IS_STEP:
        by_weight = tl.div_rn(tl.full((), 1.0, tl.float32), by_weight)
    return by_weight * by_token


@triton.jit
def _plane(codes_ptr, place, word, words):
    """Load one plane of a token's codes: the codes that are multiplied by one 2-bit field of the
    weights' bytes.
    """
    return tl.load(codes_ptr + place * words + word, mask=word < words, other=0)


@triton.jit
def _sum_with(found, added_ptrs, mask):
    """Round `found`, the layer's output, to the residual's dtype, then add the residual.

    `added_ptrs` points to the residual.
    """
    added = tl.load(added_ptrs, mask=mask, other=0.0)
    return found.to(added.dtype).to(tl.float32) + added.to(tl.float32)


@triton.jit
def _ternary_linear_tiles_vectors_kernel(
    entry,  # x and up, (M, K), each with the stride of a token, and the norm, (K,)
    added_ptr,  # (TOKENS, rows), with HAS_ADDED, which needs a group of one
    coded,  # (TOKENS, 4, words) int32, with IS_CODED, and scales and sums of the codes
    packed,  # (rows, words) int32, one matrix or up to three
    weight_scales,  # one element each
    biases,
    outs,  # (TOKENS, rows)
    counts,  # rows
    tiles,  # of ROWS * TILES rows
    columns,
    words,
    numbers,  # eps of the norm; of the quantiser: kept elements, eps, and eps rounded
    C: tl.constexpr,
    # TILES: of ROWS rows, one after the other: the token is quantised once
    # WORDS: a power of two
    # IS_CODED: tokens were quantised before
    # IS_EARLY: started while the kernel before may still be running
):
    x_ptr, stride_x, up_ptr, stride_up, norm_ptr = entry
    codes_ptr, scale_ptr, sums_ptr = coded
    if C.IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    packed_ptr, weight_scale_ptr = packed[0], weight_scales[0]
    bias_ptr, out_ptr = biases[0], outs[0]
    rows = tl.cast(counts[0], tl.int32)
    has_bias = tl.full((), C.HAS_BIAS_A, tl.int1)
    if C.GROUP > 1:
        first = tl.cast(tiles[0], tl.int32)
        if tile >= first:
            tile -= first
            packed_ptr, weight_scale_ptr = packed[1], weight_scales[1]
            bias_ptr, out_ptr = biases[1], outs[1]
            rows = tl.cast(counts[1], tl.int32)
            has_bias = tl.full((), C.HAS_BIAS_B, tl.int1)
            if C.GROUP > 2:
                second = tl.cast(tiles[1], tl.int32)
                if tile >= second:
                    tile -= second
                    packed_ptr, weight_scale_ptr = packed[2], weight_scales[2]
                    bias_ptr, out_ptr = biases[2], outs[2]
                    rows = tl.cast(counts[2], tl.int32)
                    has_bias = tl.full((), C.HAS_BIAS_C, tl.int1)
    word = tl.arange(0, C.WORDS)
    # Weights are asked for first: they come from far, the token is near.
    weight = _weight_tile(packed_ptr, tile * (C.ROWS * C.TILES), rows, word, words, C.ROWS)
    weight_scale = tl.load(weight_scale_ptr)
    if C.IS_EARLY:
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(C.TOKENS):
        if C.IS_CODED:
            planes = ()
            for field in tl.static_range(4):
                plane = _plane(codes_ptr, token * 4 + field, word, words)
                planes = planes + (plane,)  # noqa: RUF005
            scale, total = tl.load(scale_ptr + token), tl.load(sums_ptr + token)
        else:
            held, scale, total = _quantized_token(
                (x_ptr + token * stride_x, up_ptr + token * stride_up, norm_ptr),
                columns,
                numbers,
                C.WORDS * 16,
                C,
            )
            even, odd = tl.split(tl.reshape(held, (C.WORDS, 2, 2)))  # (WORDS, 2): j = 0, 2 and 1, 3
            plane_0, plane_2 = tl.split(even)
            plane_1, plane_3 = tl.split(odd)
            planes = (plane_0, plane_1, plane_2, plane_3)
        factor = _factor(scale, weight_scale, C)
        for step in tl.static_range(C.TILES):
            begin = (tile * C.TILES + step) * C.ROWS
            if C.TILES > 1:
                # The next tile is on its way while this one is multiplied; the last of a token
                # is followed by the first of the next.
                after = (tile * C.TILES + (step + 1) % C.TILES) * C.ROWS
                following = _weight_tile(packed_ptr, after, rows, word, words, C.ROWS)
            acc = tl.zeros((C.ROWS, C.WORDS), dtype=tl.int32)
            for field in tl.static_range(4):
                acc = _dot4_field(weight, planes[field], acc, field, C.BYTEWISE)
            product = tl.sum(acc, axis=1) - total
            row = begin + tl.arange(0, C.ROWS)
            bias = tl.load(bias_ptr + row, mask=(row < rows) & has_bias, other=0.0)
            found = product.to(tl.float32) * factor + bias.to(tl.float32)
            if C.HAS_ADDED:
                found = _sum_with(found, added_ptr + token * rows + row, row < rows)
            tl.store(
                out_ptr + token * rows + row, found.to(out_ptr.dtype.element_ty), mask=row < rows
            )
            if C.TILES > 1:
                weight = following


@triton.constexpr_function
def _keep_field(FIELD):
    """Return assembly code that keeps one field (two bits) of each of four bytes."""
    if FIELD == 0:
        return "and.b32 $0, $1, 0x03030303;"
    return f"{{ .reg .b32 t; shr.b32 t, $1, {2 * FIELD}; and.b32 $0, t, 0x03030303; }}"


@triton.jit
def _kept(packed, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _field(packed, FIELD: tl.constexpr, BYTEWISE: tl.constexpr):
    """Return the weight codes (0, 1 or 2) in one 2-bit field of each byte, as int8.

    On a GPU, the function processes four bytes at once.
    """
    if BYTEWISE:
        return ((packed >> (2 * FIELD)) & 3).to(tl.int8)
    return _kept(packed, _keep_field(FIELD))


@triton.jit
def _ternary_linear_tiles_tiles_kernel(
    codes_ptr,  # (M, 4, width) int8
    packed,  # (N, width) uint8, one matrix or up to three
    scale_ptr,  # (M,) fp32
    sums_ptr,  # (M,) int32
    weight_scales,  # one element each
    biases,  # (N,), with HAS_BIAS
    added_ptr,  # (M, N), with HAS_ADDED, which needs one matrix
    outs,  # (M, N)
    part_ptr,  # (splits, M, N) int32, with IS_PART, which needs one matrix
    tokens,
    counts,  # rows of each
    width,  # bytes per row of weights
    share,  # of the bytes, per split
    C: tl.constexpr,
    # MATRICES: one, or up to three that are multiplied in turn with the same tokens
    # GROUP: tiles of rows that share the tokens in cache
    # IS_EVEN: no tile reaches beyond a share
    # IS_CHAINED: started while the tokens are still being quantised
):
    tile = tl.program_id(0)
    packed_ptr, weight_scale_ptr = packed[0], weight_scales[0]
    bias_ptr, out_ptr = biases[0], outs[0]
    rows = tl.cast(counts[0], tl.int32)
    if C.MATRICES > 1:
        first_of_all = tl.cdiv(tokens, C.TOKENS) * tl.cdiv(rows, C.ROWS)
        if tile >= first_of_all:
            tile -= first_of_all
            packed_ptr, weight_scale_ptr = packed[1], weight_scales[1]
            bias_ptr, out_ptr = biases[1], outs[1]
            rows = tl.cast(counts[1], tl.int32)
            if C.MATRICES > 2:
                second = tl.cdiv(tokens, C.TOKENS) * tl.cdiv(rows, C.ROWS)
                if tile >= second:
                    tile -= second
                    packed_ptr, weight_scale_ptr = packed[2], weight_scales[2]
                    bias_ptr, out_ptr = biases[2], outs[2]
                    rows = tl.cast(counts[2], tl.int32)
    token_tiles = tl.cdiv(tokens, C.TOKENS)
    row_tiles = tl.cdiv(rows, C.ROWS)
    around = C.GROUP * token_tiles
    first = (tile // around) * C.GROUP
    tall = tl.minimum(row_tiles - first, C.GROUP)
    row_tile = first + (tile % around) % tall
    token_tile = (tile % around) // tall
    row = row_tile * C.ROWS + tl.arange(0, C.ROWS)
    token = token_tile * C.TOKENS + tl.arange(0, C.TOKENS)
    byte = tl.arange(0, C.BYTES)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, width)
    # Rows and tokens beyond the last are read from the first ones, and not stored.
    near_row = (row % rows).to(tl.int64)
    near_token = (token % tokens).to(tl.int64)
    packed_ptrs = packed_ptr + near_row[:, None] * width + byte[None, :]
    codes_ptrs = codes_ptr + near_token[None, :] * 4 * width + byte[:, None]
    acc = tl.zeros((C.ROWS, C.TOKENS), dtype=tl.int32)
    if C.IS_CHAINED:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(begin, end, C.BYTES, num_stages=C.STAGES):
        if C.IS_EVEN:
            weights = tl.load(packed_ptrs + start)
        else:
            inside = byte < end - start
            weights = tl.load(packed_ptrs + start, mask=inside[None, :], other=0)
        for field in tl.static_range(4):
            if C.IS_EVEN:
                x = tl.load(codes_ptrs + field * width + start)
            else:
                x = tl.load(codes_ptrs + field * width + start, mask=inside[:, None], other=0)
            acc = tl.dot(_field(weights, field, C.BYTEWISE), x, acc, out_dtype=tl.int32)
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    place = token.to(tl.int64)[None, :] * rows + row[:, None]
    if C.IS_PART:
        part = tl.program_id(1).to(tl.int64) * tokens * rows
        tl.store(part_ptr + part + place, acc, mask=mask)
    else:
        scale = tl.load(scale_ptr + near_token)
        sums = tl.load(sums_ptr + near_token)
        factor = _factor(scale, tl.load(weight_scale_ptr), C)
        found = (acc - sums[None, :]).to(tl.float32) * factor[None, :]
        if C.HAS_BIAS:
            found += tl.load(bias_ptr + near_row).to(tl.float32)[:, None]
        if C.HAS_ADDED:
            found = _sum_with(found, added_ptr + place, mask)
        tl.store(out_ptr + place, found.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _ternary_linear_tiles_parts_kernel(
    part_ptr,  # (splits, M, N) int32
    scale_ptr,  # (M,) fp32
    sums_ptr,  # (M,) int32
    weight_scale_ptr,  # one element
    bias_ptr,  # (N,), with HAS_BIAS
    added_ptr,  # (M, N), with HAS_ADDED
    out_ptr,  # (M, N)
    tokens,
    rows,
    C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * C.ROWS + tl.arange(0, C.ROWS)
    mask = row < rows
    place = token * rows + row
    acc = tl.zeros((C.ROWS,), dtype=tl.int32)
    for part in tl.static_range(C.SPLITS):
        acc += tl.load(
            part_ptr + part * (tl.cast(tokens, tl.int64) * rows) + place, mask=mask, other=0
        )
    factor = _factor(tl.load(scale_ptr + token), tl.load(weight_scale_ptr), C)
    found = (acc - tl.load(sums_ptr + token)).to(tl.float32) * factor
    if C.HAS_BIAS:
        found += tl.load(bias_ptr + row, mask=mask, other=0.0).to(tl.float32)
    if C.HAS_ADDED:
        found = _sum_with(found, added_ptr + place, mask)
    tl.store(out_ptr + place, found.to(out_ptr.dtype.element_ty), mask=mask)
