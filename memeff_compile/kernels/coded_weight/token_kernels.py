# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Multiply one token (row of x) by lossily compressed weights, in Gluon.

The codec (compressed format) win4 stores the exponent of a weight as a 4-bit code. A lossy mode of
win4 stores at most 3 of the weight's 7 mantissa bits. The kernel decodes the codes to fp16 numbers.

For lossy weights, the decoding instructions take longer than reading the codes. A weight with a
4-bit exponent code and at most 3 mantissa bits is an fp16 number. So one instruction assembles the
bits of four weights, and another instruction turns the bits of two weights into fp16 numbers. The
weights of a group, which are 256 neighbours in a row, share a normaliser (scale). The kernel
multiplies the group's sum of products by the normaliser, instead of each weight.

The kernel divides x by a power of two and then converts x to fp16. After the division, the largest
number in x is just below 2^15. Numbers in x that are smaller than 2^-29 times the largest number
lose bits. The error of such numbers is at most 2^-39 times the largest number. One tensor-core
instruction multiplies 16 rows of the weight by 8 columns of a second operand. In these kernels, all
8 columns contain the same token.

The columns of the weight are the dimension K of the sum. The kernel may permute them, if it
permutes x in the same way. Word w of a group of 256 columns contains the eight columns
`128 i + 64 o + 2 w + h`, with i, o and h each 0 or 1. The kernel multiplies a group in four calls
of `mma_v2`. So the tensor core gets four operands of weights, numbered `2 o + h`. From every word
w, operand `2 o + h` takes two columns: `64 o + 2 w + h` and `128 + 64 o + 2 w + h`.

Variable names have the same meaning as in `matrix_kernels`.
"""

from __future__ import annotations

from .._triton.gluon import barrier, gl, gluon, mma_v2
from .matrix_kernels import (
    chunks_of,
    own_patches,
    patched,
    some_patches,
)

HALF_BIAS: gl.constexpr = gl.constexpr(112)
"""A code is the exponent of a bf16 number, minus base; as one of fp16, its bias is smaller."""


@gluon.jit
def _bytes_of(high, low, FIRST: gl.constexpr):
    """Return two fp16 numbers in one 32-bit word: their high bytes come from `high`, and their low
    bytes from `low`. If FIRST is set, the function uses the bytes 0 and 1 of both words, otherwise
    the bytes 2 and 3.
    """
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x1504;" if FIRST else "prmt.b32 $0, $1, $2, 0x3726;",
        "=r,r,r",
        [high, low],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _high_byte(high, FIRST: gl.constexpr):
    """Return two fp16 numbers in one 32-bit word: their high bytes come from `high`, and their low
    bytes are zero. If FIRST is set, the function uses the bytes 0 and 1 of `high`, otherwise the
    bytes 2 and 3.
    """
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x1404;" if FIRST else "prmt.b32 $0, $1, 0, 0x3424;",
        "=r,r",
        [high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load(at, group, is_row, IS_EVEN: gl.constexpr, C: gl.constexpr):
    """Load one group of 256 weights for each warp and row: exponent codes, sign and mantissa
    fields, and normalisers (scales)."""
    codes_at, fields_at, norms_at, its_group = at
    if IS_EVEN:
        codes = gl.load(codes_at + group * 32, eviction_policy="evict_first")
        fields = gl.load(fields_at + group * (8 * C.FIELD), eviction_policy="evict_first")
    else:
        codes = gl.load(codes_at + group * 32, mask=is_row[:, :, None], other=0)
        its = gl.convert_layout(is_row, gl.SliceLayout(2, fields_at.type.layout))
        fields = gl.load(fields_at + group * (8 * C.FIELD), mask=its[:, :, None], other=0)
    norms = gl.load(norms_at + (its_group + group) // (C.BLOCK // 256), mask=is_row, other=0)
    return codes, fields, norms


@gluon.jit
def _numbers(codes, fields, FIELD: gl.constexpr):
    """Decode eight weights to four 32-bit words of two fp16 numbers each.

    The caller multiplies in four calls of `mma_v2`. Word i belongs to the weight operand of call i.

    `codes` contains the weights' 4-bit exponent codes. `fields` contains the weights' signs and
    mantissas, in FIELD bits per weight.

    The high byte of each fp16 number has sign, exponent and two mantissa bits: s0ccccmm.
    """
    even = (codes << 2) & 0x3C3C3C3C
    odd = (codes >> 2) & 0x3C3C3C3C
    if FIELD == 4:
        even = even | ((fields << 4) & -0x7F7F7F80) | ((fields >> 1) & 0x03030303)
        odd = odd | (fields & -0x7F7F7F80) | ((fields >> 5) & 0x03030303)
        even_low = (fields << 7) & -0x7F7F7F80
        odd_low = (fields << 3) & -0x7F7F7F80
        pair_0, pair_1 = _bytes_of(even, even_low, True), _bytes_of(even, even_low, False)
        pair_2, pair_3 = _bytes_of(odd, odd_low, True), _bytes_of(odd, odd_low, False)
    else:
        if FIELD == 2:  # four bits to a byte, then a product moves sign and mantissa
            each = gl.join(fields, fields >> 16).reshape(codes.shape)
            each = gl.convert_layout(each, codes.type.layout, assert_trivial=True)
            each = (each & 0xFF) | ((each << 8) & 0xFF0000)
            each = (each | (each << 4)) & 0x0F0F0F0F
            even = even | (((each & 0x03030303) * 0x42) & -0x7D7D7D7E)
            odd = odd | ((((each >> 1) & 0x06060606) * 0x21) & -0x7D7D7D7E)
        else:  # a product moves each second bit to the sign of its byte
            each = gl.join(
                gl.join(fields, fields >> 16), gl.join(fields >> 8, fields >> 24)
            ).reshape(codes.shape)
            each = gl.convert_layout(each, codes.type.layout, assert_trivial=True)
            even = even | (((each & 0x55) * 0x02082080) & -0x7F7F7F80)
            odd = odd | (((each & 0xAA) * 0x01041040) & -0x7F7F7F80)
        pair_0, pair_1 = _high_byte(even, True), _high_byte(even, False)
        pair_2, pair_3 = _high_byte(odd, True), _high_byte(odd, False)
    return pair_0, pair_1, pair_2, pair_3


@gluon.jit
def _operand(pair, layout: gl.constexpr):
    """Reinterpret 32-bit words as fp16 numbers, in the layout of a tensor-core operand.

    Each word of `pair` contains two numbers, which become neighbours along K (the columns of the
    weight). No data moves between registers.
    """
    low = pair.to(gl.int16).to(gl.float16, bitcast=True)
    high = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    joined = gl.join(low, high).reshape([pair.shape[0], pair.shape[1], 2 * pair.shape[2]])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def _power(exponent):
    """Return 2^exponent in fp32, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _exponent_of(x_ptr, C: gl.constexpr):
    """Return the exponent of the power of two by which x (the token) is multiplied, so that the
    largest number in x is below 2^15."""
    size: gl.constexpr = 256 * C.WARPS
    flat: gl.constexpr = gl.BlockedLayout([8], [32], [C.WARPS], [0])
    column = gl.arange(0, size, layout=flat)
    top = gl.full([size], 0, gl.int16, flat)
    for start in gl.static_range(0, C.GROUPS * 256, size):
        is_in = column < C.GROUPS * 256 - start
        some = gl.load(x_ptr + start + column, mask=is_in, other=0.0)
        top = gl.maximum(top, some.to(gl.int16, bitcast=True) & 0x7FFF)
    biased = gl.max(top.to(gl.int32), 0) >> 7
    return gl.minimum(141 - biased + 127, 254) - 127


@gluon.jit
def _store_x(xs, x_ptr, scale, C: gl.constexpr):
    """Write x (the token), multiplied by `scale`, to the shared memory `xs` in fp16.

    The numbers are in the order in which each warp's matrix products read them.
    """
    share: gl.constexpr = (C.GROUPS + C.WARPS - 1) // C.WARPS
    tile: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [C.WARPS, 1], [1, 0])
    warp = gl.arange(0, C.WARPS, layout=gl.SliceLayout(1, tile))[:, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, tile))[None, :]
    own = warp * (share * 256) + (place % 2) * 128 + (place // 2) * 2
    for step in gl.static_range(0, share * 4):
        column = own + (step // 4 * 256 + step % 4 // 2 * 64 + step % 2)
        if share * C.WARPS == C.GROUPS:
            some = gl.load(x_ptr + column)
        else:
            is_in = warp * share + step // 4 < C.GROUPS
            some = gl.load(x_ptr + column, mask=is_in & (place >= 0), other=0.0)
        xs.index(step).store((some.to(gl.float32) * scale).to(gl.float16))


@gluon.jit
def token_tile(program, x_ptr, weight, groups, TILE: gl.constexpr, C: gl.constexpr):
    """Compute 16 outputs for one token; each warp sums over a share of the columns.

    `C` has the same constants as for `matrix_kernels._matrix_tile`. `C.GROUPS` equals `groups`, the
    number of groups of 256 weights in a row. `C.BLOCK`, the number of weights per normaliser
    (scale), is at least 256.
    """
    rows_count = weight.rows
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.WARPS, 1, 1], [1, 16, 8])
    words: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    share: gl.constexpr = (C.GROUPS + C.WARPS - 1) // C.WARPS
    first_row = program * C.ROWS
    warp = gl.arange(0, C.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, words)))
    row = gl.arange(0, C.ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, words)))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, words)))[None, None, :]
    row, begin = (first_row + row)[None, :], warp[:, None] * share
    row_groups = row.to(gl.int64) * groups + begin
    is_row = row < rows_count
    codes_at = weight.codes + (row_groups[:, :, None] * 32 + lane)
    packed: gl.constexpr = gl.DotOperandLayout(0, mma, C.FIELD)
    field = gl.arange(0, 8 * C.FIELD, layout=gl.SliceLayout(0, gl.SliceLayout(1, packed)))
    its_groups = gl.convert_layout(row_groups, gl.SliceLayout(2, packed))
    fields_at = weight.signs.to(gl.pointer_type(gl.int32), bitcast=True)
    fields_at += its_groups[:, :, None] * (8 * C.FIELD) + field[None, None, :]
    at = (codes_at, fields_at, weight.norms, row_groups)
    loaded = _load(at, 0, is_row & (begin < groups), TILE[1], C)
    lists = (weight.starts, weight.places, weight.patterns)
    found = chunks_of(weight.starts, first_row, rows_count, groups * 256, C)
    first = found[3] + own_patches(mma, C)
    patches = some_patches(first, found[4], weight.places, weight.patterns)
    base = gl.load(weight.header)
    # All of this waits for no code.
    exponent = _exponent_of(x_ptr, C)
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xs = gl.allocate_shared_memory(gl.float16, [share * 4, C.WARPS, 64], order)
    _store_x(xs, x_ptr, _power(exponent), C)
    barrier()
    exact = gl.full([C.WARPS, C.ROWS, C.TOKENS], 0.0, gl.float32, mma)
    short: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.DotOperandLayout(1, mma, 2)))
    token = gl.arange(0, C.TOKENS, layout=short)
    exact = patched(exact, x_ptr, lists, patches, found, token, 1, groups * 256, C)
    acc = gl.full([C.WARPS, C.ROWS, C.TOKENS], 0.0, gl.float32, mma)
    every = gl.full([C.WARPS, 64, C.TOKENS], 0.0, gl.float16, right)
    for group in range(0, share):
        codes, fields, norms = loaded
        following = gl.minimum(group + 1, share - 1)
        loaded = _load(at, following, is_row & (begin + following < groups), TILE[1], C)
        numbers = _numbers(codes, fields, C.FIELD)
        part = gl.full([C.WARPS, C.ROWS, C.TOKENS], 0.0, gl.float32, mma)
        for step in gl.static_range(4):
            x = xs.index(group * 4 + step).load(gl.SliceLayout(2, right))
            x, _ = gl.broadcast(x[:, :, None], every)
            part = mma_v2(_operand(numbers[step], left), x, part)
        norm = (norms.to(gl.int32) << 16) | 0x3F800000
        norm = gl.convert_layout(norm, gl.SliceLayout(2, mma)).to(gl.float32, bitcast=True)
        acc += part * norm[:, :, None]
    power = base - HALF_BIAS - exponent
    acc = acc * _power(power >> 1) * _power(power - (power >> 1)) + exact
    total = gl.sum(acc, 0)
    flat: gl.constexpr = gl.SliceLayout(0, mma)
    out_row = first_row + gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, flat))
    column = gl.arange(0, C.TOKENS, layout=gl.SliceLayout(0, flat))
    if TILE[0]:
        bias = gl.load(weight.bias + out_row, mask=out_row < rows_count, other=0.0)
        total += bias.to(gl.float32)[:, None]
    place = out_row[:, None] + column[None, :] * 0
    is_out = (out_row < rows_count)[:, None] & (column < 1)[None, :]
    gl.store(weight.out + place, total.to(weight.out.dtype.element_ty), mask=is_out)


@gluon.jit
def _coded_weight_token_win4_kernel(x_ptr, weight, groups, C: gl.constexpr):
    """Multiply one token (row of x) by one lossily compressed weight matrix.

    The codec (compressed format) win4 stores the exponent of a weight as a 4-bit code. The matrix
    is compressed with a lossy mode of win4, which stores at most 3 of a weight's 7 mantissa bits.
    `groups` is the number of groups of 256 weights in a row. `C` contains compile-time constants.
    """
    token_tile(gl.program_id(0), x_ptr, weight, groups, C.TILE, C)


@gluon.jit
def _coded_weight_token_win4_several_kernel(
    x_ptr, weight_0, weight_1, weight_2, groups, C: gl.constexpr
):
    """Multiply one token (row of x) by 2 or 3 compressed weight matrices with equal numbers of
    columns.

    Each product is summed in the same order as in a separate call.
    """
    program = gl.program_id(0)
    first = (weight_0.rows + C.ROWS - 1) // C.ROWS
    second = first + (weight_1.rows + C.ROWS - 1) // C.ROWS
    if program < first:
        token_tile(program, x_ptr, weight_0, groups, C.TILE_0, C)
    elif program < second:
        token_tile(program - first, x_ptr, weight_1, groups, C.TILE_1, C)
    elif C.COUNT == 3:
        token_tile(program - second, x_ptr, weight_2, groups, C.TILE_2, C)
