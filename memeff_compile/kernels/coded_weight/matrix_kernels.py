# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Multiply several tokens (rows of x) by weights compressed with the codec win4, in Gluon.

The codec (compressed format) win4 stores the exponent of a weight as a 4-bit code. A kernel decodes
the codes to tensor-core operands in registers. A tensor core takes pairs of neighbours along K (the
columns of the weight) as 32-bit words. Decoded weights already form such words, called pair words.
Each thread loads only the codes of the weights that it passes to the tensor core. A load reads four
32-bit words, each with the codes of eight weights. So threads need not exchange data. The terms of
a sum along K may have any order, as long as the weights and x have the same order.

In variable names, a row is a row of the weight matrix (one output), and a token is a row of x. A
word is a 32-bit word with the codes of eight elements.
"""

from __future__ import annotations

from .._triton.gluon import (
    async_copy,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_pointers,
    load_tile,
    mbarrier,
    mma_v2,
    seen_as,
    warpgroup_mma,
    warpgroup_mma_wait,
)

CHUNK: gl.constexpr = gl.constexpr(8192)


@gluon.jit
def _even_bytes(word):
    return (word & 0x007F007F) | ((word << 8) & -0x7FFF8000)


@gluon.jit
def _odd_bytes(word):
    return ((word >> 8) & 0x007F007F) | (word & -0x7FFF8000)


@gluon.jit
def _scaled_pair(pair, scale):
    """Multiply both bf16 numbers in each word of `pair` by those in the same word of `scale`.

    A word has 32 bits, and contains two bf16 numbers. The products are rounded to nearest, ties to
    even, as in `pair_kernels.scaled_pair`.
    """
    return gl.inline_asm_elementwise(
        "{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}",
        "=r,r,r",
        [pair, scale],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _spread(word, FIELD: gl.constexpr):
    """Spread the sign and mantissa bits of eight weights over the two halves of a 32-bit word.

    `word` contains FIELD bits for each weight of four pairs of neighbouring weights. The lower bits
    of `word` belong to the first weights of the pairs, the upper bits to the second weights. In the
    result, the first weights have their bits from bit 0 on, the second weights from bit 16 on. If
    FIELD is 4 or 8, `word` has this order already, and the function returns `word` unchanged. If
    FIELD is 8, `word` contains only two pairs.
    """
    word = word.to(gl.int32)
    if FIELD == 2:
        word = (word & 0xFF) | ((word << 8) & 0xFF0000)
    if FIELD == 1:
        word = (word & 0xF) | ((word << 12) & 0xF0000)
    return word


@gluon.jit
def _narrow_signs(fields, PAIR: gl.constexpr, FIELD: gl.constexpr):
    """Return two bf16 weights whose exponent bits are still zero, packed into one 32-bit word.

    `fields` contains the sign and mantissa bits of eight weights, 1, 2 or 4 bits for each weight.
    The returned weights are pair number PAIR.
    """
    if FIELD == 2:  # one product moves sign and mantissa, as the bits of a half are eight
        signs = (fields * (0x4040 >> (2 * PAIR))) & -0x7FBF7FC0
    else:
        signs = (fields << (16 - FIELD * (PAIR + 1))) & -0x7FFF8000
    if FIELD == 4:
        moved = fields << 4 if PAIR == 0 else fields >> (4 * PAIR - 4)
        signs = signs | (moved & 0x00700070)
    return signs


@gluon.jit
def _pair(codes, fields, PAIR: gl.constexpr, FIELD: gl.constexpr):
    """Return pair number PAIR of the eight weights in a word of codes, as one 32-bit word.

    A weight's code is its exponent minus the number `base`, the exponent just below those that have
    codes. The returned numbers have the codes as exponents. The caller multiplies them by 2^base,
    and those of a lossy weight also by a normaliser (scale). For lossless weights, the argument
    `fields` is a pair of 32-bit words with the sign and mantissa bits.
    """
    if FIELD == 8:
        word = fields[PAIR // 2]
        signs = _even_bytes(word) if PAIR % 2 == 0 else _odd_bytes(word)
    else:
        signs = _narrow_signs(fields[0], PAIR, FIELD)
    moved = codes << (7 - 4 * PAIR) if PAIR < 2 else codes >> (4 * PAIR - 7)
    return signs | (moved & 0x07800780)


@gluon.jit
def _norms(norms_ptr, group, is_read, PAIR: gl.constexpr, C: gl.constexpr):
    """Load two 7-bit normalisers (scales) for each group of 256 weights.

    The first is for the weights of a warp's first sixteen threads, the second for those of its last
    sixteen threads.
    """
    if C.BLOCK == 0:
        first = group  # which is not read
    else:
        if C.BLOCK >= 256:
            at = norms_ptr + group // (C.BLOCK // 256)
        else:
            at = norms_ptr + group * (256 // C.BLOCK) + 64 * PAIR // C.BLOCK
        first = gl.load(at, mask=is_read, other=0)
    last = first
    if C.BLOCK == 32:
        last = gl.load(at + 1, mask=is_read, other=0)
    return first, last


@gluon.jit
def _scale(power, norms, lane, C: gl.constexpr):
    """Return the bf16 factors that multiply blocks of weights, each factor twice in a 32-bit word.

    A weight's code is its exponent minus `base`, the exponent just below those that have codes. The
    factor is 2^base times the normaliser (scale) of a block of weights. `power` contains 2^base
    twice in each word. Without normalisers, return `power`.
    """
    scale = power
    if C.BLOCK > 0:
        scale = power | (norms[0].to(gl.int32)[:, :, None] * 0x00010001)
    if C.BLOCK == 32:
        other = power | (norms[1].to(gl.int32)[:, :, None] * 0x00010001)
        scale = gl.where(lane < 16, scale, other)
    return scale


@gluon.jit
def _operand(pair, scale, layout: gl.constexpr):
    """Multiply pairs of weights by `scale`, and return the weights in bf16 in the layout of a
    tensor-core operand.

    Each pair is a 32-bit word of two weights that are neighbours along K in the operand. No data
    moves between registers.
    """
    pair = _scaled_pair(pair, scale)
    low = pair.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    joined = gl.join(low, high).reshape([pair.shape[0], pair.shape[1], 2 * pair.shape[2]])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def chunks_of(starts_ptr, first_row, rows_count, row_length, C: gl.constexpr):
    """Find C.ROWS rows of a compressed weight, and their patches (elements whose exponents have no
    4-bit code).

    The first of the rows is `first_row`. Each patch's position and value are in the lists of
    patches. A chunk is 8192 consecutive elements of the weight. The first three results describe
    the position of the rows: the first chunk, the number of chunks, and the position in the first
    chunk. The last two results are the range of these chunks' patches in the lists.
    """
    first = gl.cast(first_row, gl.int64) * row_length
    last = gl.cast(gl.minimum(first_row + C.ROWS, rows_count), gl.int64) * row_length
    chunk = first // CHUNK
    chunks = ((last + CHUNK - 1) // CHUNK - chunk).to(gl.int32)
    inside = (first % CHUNK).to(gl.int32)
    patch = gl.load(starts_ptr + chunk)
    end = gl.load(starts_ptr + chunk + chunks)
    return chunk, chunks, inside, patch, end


@gluon.jit
def own_patches(mma: gl.constexpr, C: gl.constexpr):
    """Return the indices of the patches (elements whose exponents have no 4-bit code) that each
    warp loads at a time.

    The result has the shape (WARPS, PATCHES).
    """
    lanes: gl.constexpr = 32 if C.CHUNKS <= 16 else 4
    plain: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1], [1, lanes, 32 // lanes], [C.WARPS, 1, 1], [2, 1, 0]
    )
    warp = gl.arange(0, C.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, plain)))
    lane = gl.arange(0, C.PATCHES, layout=gl.SliceLayout(0, gl.SliceLayout(2, plain)))
    return warp[:, None] * C.PATCHES + lane[None, :]


@gluon.jit
def some_patches(each, end, places_ptr, values_ptr):
    """Load positions and values of patches (elements whose exponents have no 4-bit code).

    Positions from index `end` on are -1.
    """
    place = gl.load(places_ptr + each, mask=each < end, other=-1).to(gl.int32)
    return place, gl.load(values_ptr + each, mask=each < end, other=0)


@gluon.jit
def patched(
    acc,
    x_ptr,
    lists,  # starts, places, values
    loaded,  # the first patches, as `some_patches` returns them
    found,  # as `chunks_of` returns it
    token,  # for the operand of x
    tokens_count,
    row_length,
    C: gl.constexpr,
):
    """Add the products of x (one token per row) with patches (elements whose exponents have no
    4-bit code) of the weight to `acc`.

    The patches are those in the program's rows of the weight. `found` contains the position of
    these rows and the range of their patches. The warps of a program share the work.
    """
    starts_ptr, places_ptr, values_ptr = lists
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    own = own_patches(mma, C)
    plain: gl.constexpr = own.type.layout.parent
    chunk, chunks, inside, patch, end = found
    number = gl.arange(0, C.CHUNKS, layout=gl.SliceLayout(0, gl.SliceLayout(1, plain)))
    ends = gl.load(starts_ptr + chunk + 1 + number, mask=number < chunks, other=0x7FFFFFFF)
    row = gl.arange(0, C.ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    place, weight = loaded
    for start in range(patch, end, C.WARPS * C.PATCHES):
        each = start + own
        if start > patch:
            place, weight = some_patches(each, end, places_ptr, values_ptr)
        passed = gl.sum((each[:, :, None] >= ends[None, None, :]).to(gl.int32), 2)
        flat = passed * CHUNK + place - inside
        its_row = gl.where((flat < 0) | (each >= end), -1, flat // row_length)
        column = gl.where(its_row < 0, 0, flat % row_length)
        column = gl.where(its_row < C.ROWS, column, 0)
        its_row = gl.convert_layout(its_row, gl.SliceLayout(1, left))
        values = gl.convert_layout(weight, gl.SliceLayout(1, left))
        column = gl.convert_layout(column, gl.SliceLayout(2, right))
        a = gl.where(its_row[:, None, :] == row[None, :, None], values[:, None, :], 0)
        a = a.to(gl.bfloat16, bitcast=True)
        at = x_ptr + token.to(gl.int64)[None, None, :] * row_length + column[:, :, None]
        b = gl.load(at, mask=(token < tokens_count)[None, None, :], other=0.0)
        acc = mma_v2(a, b, acc)
    return acc


@gluon.jit
def _places_of(loaded, start, found, starts_ptr, row_length, mma: gl.constexpr, C: gl.constexpr):
    """Return the row and column of each loaded patch (an element whose exponent has no 4-bit code).

    Rows are counted from the first row of the tile, columns from the start of the weight's row. A
    patch before the tile gets row -1, as does an entry that is no patch. A patch after the tile
    gets a row of at least `C.ROWS`. For each row outside the tile, the column is 0.
    """
    own = own_patches(mma, C)
    plain: gl.constexpr = own.type.layout.parent
    chunk, chunks, inside, _, end = found
    number = gl.arange(0, C.CHUNKS, layout=gl.SliceLayout(0, gl.SliceLayout(1, plain)))
    ends = gl.load(starts_ptr + chunk + 1 + number, mask=number < chunks, other=0x7FFFFFFF)
    each = start + own
    passed = gl.sum((each[:, :, None] >= ends[None, None, :]).to(gl.int32), 2)
    flat = passed * CHUNK + loaded[0] - inside
    row = gl.where((flat < 0) | (each >= end), -1, flat // row_length)
    column = gl.where((row < 0) | (row >= C.ROWS), 0, flat % row_length)
    return row, column


@gluon.jit
def _columns_of_patches(x_ptr, column, token, tokens_count, row_length, mma: gl.constexpr):
    """Load the numbers of x (one token per row) by which the kernel multiplies patches (elements
    whose exponents have no 4-bit code)."""
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    column = gl.convert_layout(column, gl.SliceLayout(2, right))
    at = x_ptr + token.to(gl.int64)[None, None, :] * row_length + column[:, :, None]
    return gl.load(at, mask=(token < tokens_count)[None, None, :], other=0.0)


@gluon.jit
def _add_patches(acc, its_row, weight, x, C: gl.constexpr):
    """Multiply patches (elements whose exponents have no 4-bit code) by columns of the product's
    input, and add the products to `acc`.

    The input has one token per row. A patch is multiplied by the input's column with the patch's
    column index. `x` contains these columns.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    row = gl.arange(0, C.ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    its_row = gl.convert_layout(its_row, gl.SliceLayout(1, left))
    values = gl.convert_layout(weight, gl.SliceLayout(1, left))
    a = gl.where(its_row[:, None, :] == row[None, :, None], values[:, None, :], 0)
    return mma_v2(a.to(gl.bfloat16, bitcast=True), x, acc)


@gluon.jit
def _later_patches(
    acc,
    x_ptr,
    lists,  # starts, places, values
    loaded,  # the first patches, as `some_patches` returns them
    found,  # as `chunks_of` returns it
    token,  # for the operand of x
    tokens_count,
    row_length,
    C: gl.constexpr,
    ROUNDS: gl.constexpr,
):
    """Add the products of x (one token per row) with patches (elements whose exponents have no
    4-bit code) to `acc`, like `patched`.

    In each round of the loop, each warp multiplies PATCHES patches. In the tiles that
    `shapes.matrix_tile` chooses, PATCHES is 16 for this function, and 32 for `patched`. This
    function skips the first ROUNDS rounds, because the caller has already added their products. A
    chunk is 8192 consecutive elements of the weight. In each round, the function loads, for each
    chunk, the index in the lists of patches at which the chunk's patches end. An earlier version
    had a single function in place of `patched` and `_later_patches`, and used more registers. That
    version made products of 16 tokens with weights of 0 mantissa bits slower
    (docs/history/compressed-weights.md).
    """
    starts_ptr, places_ptr, values_ptr = lists
    mma: gl.constexpr = acc.type.layout
    patch, end = found[3], found[4]
    place, weight = loaded
    for start in range(patch + ROUNDS * C.WARPS * C.PATCHES, end, C.WARPS * C.PATCHES):
        if start > patch:
            each = start + own_patches(mma, C)
            place, weight = some_patches(each, end, places_ptr, values_ptr)
        row, column = _places_of((place, weight), start, found, starts_ptr, row_length, mma, C)
        x = _columns_of_patches(x_ptr, column, token, tokens_count, row_length, mma)
        acc = _add_patches(acc, row, weight, x, C)
    return acc


@gluon.jit
def load_codes(at, group, is_row, IS_EVEN: gl.constexpr, C: gl.constexpr):
    """Load exponent codes, signs, mantissas and scales of 256 weights for each warp and row.

    The sign and the mantissa of a weight take C.FIELD bits. A scale (normaliser) belongs to C.BLOCK
    weights, so 256 weights may have several scales. Lossless weights have no scales.
    """
    codes_at, signs_at, norms_ptr, its_group = at
    pitch: gl.constexpr = 64 if C.FIELD == 8 else 32
    if IS_EVEN:
        codes = gl.load(codes_at + group * 32, eviction_policy="evict_first")
        signs = gl.load(signs_at + group * pitch, eviction_policy="evict_first")
        more = signs
        if C.FIELD == 8:
            more = gl.load(signs_at + (group * 64 + 32), eviction_policy="evict_first")
    else:
        codes = gl.load(codes_at + group * 32, mask=is_row[:, :, None], other=0)
        signs = gl.load(signs_at + group * pitch, mask=is_row[:, :, None], other=0)
        more = signs
        if C.FIELD == 8:
            more = gl.load(signs_at + (group * 64 + 32), mask=is_row[:, :, None], other=0)
    norms_0 = _norms(norms_ptr, its_group + group, is_row, 0, C)
    norms_1, norms_2, norms_3 = norms_0, norms_0, norms_0
    if (C.BLOCK > 0) & (C.BLOCK <= 128):
        norms_2 = _norms(norms_ptr, its_group + group, is_row, 2, C)
        norms_3 = norms_2
    if (C.BLOCK > 0) & (C.BLOCK <= 64):
        norms_1 = _norms(norms_ptr, its_group + group, is_row, 1, C)
        norms_3 = _norms(norms_ptr, its_group + group, is_row, 3, C)
    return codes, signs, more, norms_0, norms_1, norms_2, norms_3


@gluon.jit
def _columns(at, is_token, IS_EVEN: gl.constexpr):
    """Load columns of x, the input of the product, from the pointers `at`.

    Unless IS_EVEN is set, the function loads 0 where `is_token` is False.
    """
    if IS_EVEN:
        return gl.load(at)
    return gl.load(at, mask=is_token, other=0.0)


@gluon.jit
def _add_half(acc, loaded, fields, x_0, x_1, place, HALF: gl.constexpr, C: gl.constexpr):
    """Multiply half of a group of 256 weights by columns of x, and add the products to `acc`.

    x is the input of the product, with one token per row. A weight is multiplied by the column of x
    with the weight's column index. Each thread has four pairs of weights of the group. Two of these
    pairs are multiplied: the first by `x_0`, the second by `x_1`.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 8)
    power, zeros, lane = place
    codes, _, _, norms_0, norms_1, norms_2, norms_3 = loaded
    scale = _scale(power, norms_0 if HALF == 0 else norms_2, lane, C) + zeros
    acc = mma_v2(_operand(_pair(codes, fields, 2 * HALF, C.FIELD), scale, left), x_0, acc)
    scale = _scale(power, norms_1 if HALF == 0 else norms_3, lane, C) + zeros
    return mma_v2(_operand(_pair(codes, fields, 2 * HALF + 1, C.FIELD), scale, left), x_1, acc)


@gluon.jit
def _matrix_tile(
    program,
    x_ptr,  # (M, K) bf16
    weight,  # `layout.Multiplied`; its result is (M, N)
    tokens_count,
    groups,  # K / 256
    TILE: gl.constexpr,  # HAS_BIAS, IS_EVEN
    # IS_EVEN: ROWS divides N and WARPS the groups
    C: gl.constexpr,
    # FIELD: bits of sign and mantissa: 8 is lossless
    # BLOCK: weights per normaliser, or 0
    # HAS_ALL: TOKENS divides M and WARPS the groups
    # ROWS: 16, or a multiple
    # GROUPS: `groups`, or 0; then only one group is loaded ahead, and patches are added first
):
    """Compute a tile of ROWS x TOKENS products. Each warp sums over its share of the columns.

    GROUPS is the number of weight groups per row, or 0 if this number is no compile-time constant.
    If GROUPS is not 0, each warp loads codes two groups ahead, and adds the products of patches
    (weights stored whole) last.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.WARPS, 1, 1], [1, 16, 8])
    words: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    first_row = program * C.ROWS
    rows_count = weight.rows
    first_token = gl.program_id(1) * C.TOKENS
    share = (groups + C.WARPS - 1) // C.WARPS
    warp = gl.arange(0, C.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, words)))
    row = gl.arange(0, C.ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, words)))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, words)))[None, None, :]
    its = gl.arange(0, C.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    token = gl.arange(0, C.TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    row = (first_row + row)[None, :]
    token = (first_token + token)[None, None, :]
    begin, its = warp[:, None] * share, its[:, None, None] * share
    row_groups = row.to(gl.int64) * groups + begin
    is_row, is_token = row < rows_count, token < tokens_count
    codes_at = weight.codes + (row_groups[:, :, None] * 32 + lane)
    signs_at = weight.signs + (row_groups[:, :, None] * (64 if C.FIELD == 8 else 32) + lane)
    at = (codes_at, signs_at, weight.norms, row_groups)
    loaded = load_codes(at, 0, is_row & (begin < groups), TILE[1], C)
    its_share: gl.constexpr = (C.GROUPS + C.WARPS - 1) // C.WARPS
    later = loaded
    if its_share > 1:
        later = load_codes(at, 1, is_row & (begin + 1 < groups), TILE[1], C)
    power = ((gl.load(weight.header) + 127) << 7) * 0x00010001
    lists = (weight.starts, weight.places, weight.patterns)
    length = C.GROUPS * 256 if C.GROUPS > 0 else groups * 256
    found = chunks_of(weight.starts, first_row, rows_count, length, C)
    first = found[3] + own_patches(mma, C)  # loaded early, so that no one waits for them
    patches = some_patches(first, found[4], weight.places, weight.patterns)
    zeros = gl.full([C.WARPS, C.ROWS, 32], 0, gl.int32, words)
    x_at = x_ptr + (token.to(gl.int64) * groups + its) * 256 + column[None, :, None]
    acc = gl.full([C.WARPS, C.ROWS, C.TOKENS], 0.0, gl.float32, mma)
    short: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.DotOperandLayout(1, mma, 2)))
    its_token = first_token + gl.arange(0, C.TOKENS, layout=short)
    place = (power, zeros, lane)
    if C.GROUPS > 0:
        its_row, column = _places_of(patches, found[3], found, weight.starts, length, mma, C)
        its_x = _columns_of_patches(x_ptr, column, its_token, tokens_count, length, mma)
        for group in gl.static_range(its_share):
            here = x_at + group * 256
            is_in = is_token & (its + group < groups)
            x_0 = _columns(here, is_in, C.HAS_ALL)
            x_1 = _columns(here + 64, is_in, C.HAS_ALL)
            x_2 = _columns(here + 128, is_in, C.HAS_ALL)
            x_3 = _columns(here + 192, is_in, C.HAS_ALL)
            fields = (_spread(loaded[1], C.FIELD), loaded[2])
            acc = _add_half(acc, loaded, fields, x_0, x_1, place, 0, C)
            acc = _add_half(acc, loaded, fields, x_2, x_3, place, 1, C)
            loaded = later
            if group + 2 < its_share:
                is_read = is_row & (begin + group + 2 < groups)
                later = load_codes(at, group + 2, is_read, TILE[1], C)
        acc = _add_patches(acc, its_row, patches[1], its_x, C)
        given = (its_token, tokens_count, length)
        acc = _later_patches(acc, x_ptr, lists, patches, found, *given, C, 1)
    else:
        # Patches are added first, while the codes of the first group are being loaded.
        given = (its_token, tokens_count, length)
        if C.PATCHES == 32:
            acc = patched(acc, x_ptr, lists, patches, found, *given, C)
        else:
            acc = _later_patches(acc, x_ptr, lists, patches, found, *given, C, 0)
        for group in range(0, share):
            now = loaded
            following = gl.minimum(group + 1, share - 1)
            loaded = load_codes(at, following, is_row & (begin + following < groups), TILE[1], C)
            here = x_at + group * 256
            is_in = is_token & (its + group < groups)
            fields = (_spread(now[1], C.FIELD), now[2])
            x_0 = _columns(here, is_in, C.HAS_ALL)
            x_1 = _columns(here + 64, is_in, C.HAS_ALL)
            acc = _add_half(acc, now, fields, x_0, x_1, place, 0, C)
            x_2 = _columns(here + 128, is_in, C.HAS_ALL)
            x_3 = _columns(here + 192, is_in, C.HAS_ALL)
            acc = _add_half(acc, now, fields, x_2, x_3, place, 1, C)
    total = gl.sum(acc, 0)
    flat: gl.constexpr = gl.SliceLayout(0, mma)
    out_row = first_row + gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, flat))
    out_token = first_token + gl.arange(0, C.TOKENS, layout=gl.SliceLayout(0, flat))
    if TILE[0]:
        bias = gl.load(weight.bias + out_row, mask=out_row < rows_count, other=0.0)
        total += bias.to(gl.float32)[:, None]
    place = out_token.to(gl.int64)[None, :] * weight.rows + out_row[:, None]
    is_out = (out_row < rows_count)[:, None] & (out_token < tokens_count)[None, :]
    gl.store(weight.out + place, total.to(weight.out.dtype.element_ty), mask=is_out)


@gluon.jit
def _coded_weight_matrix_win4_kernel(x_ptr, weight, tokens_count, groups, C: gl.constexpr):
    """Multiply one or a few tokens (rows of x) by one weight matrix with 4-bit exponent codes."""
    _matrix_tile(gl.program_id(0), x_ptr, weight, tokens_count, groups, C.TILE, C)


@gluon.jit
def _coded_weight_matrix_win4_several_kernel(
    x_ptr, weight_0, weight_1, weight_2, tokens_count, groups, C: gl.constexpr
):
    """Multiply one or a few tokens (rows of x) by 2 or 3 weight matrices.

    The matrices are compressed with 4-bit exponent codes, and have equal numbers of columns. The
    order of each sum is the same as in `_coded_weight_matrix_win4_kernel`.
    """
    program = gl.program_id(0)
    first = (weight_0.rows + C.ROWS - 1) // C.ROWS
    second = first + (weight_1.rows + C.ROWS - 1) // C.ROWS
    if program < first:
        _matrix_tile(program, x_ptr, weight_0, tokens_count, groups, C.TILE_0, C)
    elif program < second:
        _matrix_tile(program - first, x_ptr, weight_1, tokens_count, groups, C.TILE_1, C)
    elif C.COUNT == 3:
        _matrix_tile(program - second, x_ptr, weight_2, tokens_count, groups, C.TILE_2, C)


@gluon.jit
def _half_operand(
    codes, fields, power, norms, STEP: gl.constexpr, layout: gl.constexpr, C: gl.constexpr
):
    """Decode 64 of the 128 columns of half a group of weights to bf16, for each row of a tile.

    A group is 256 neighbouring weights of a row. The two halves of a group alternate every 32
    columns: the first half has columns 0 to 31, 64 to 95, and so on. With STEP 0, the function
    decodes the first 64 columns of the half, with STEP 1 the others. In each 32 columns, the 16
    pairs of neighbouring columns are transposed like a 4 x 4 matrix. The columns of x, the layer's
    input, are in the same order: `_coded_weight_win4_order_kernel` writes them so.
    """
    pair = _pair(codes, fields, 2 * STEP, C.FIELD)
    other = _pair(codes, fields, 2 * STEP + 1, C.FIELD)
    pair = _scaled_pair(pair, _row_scale(power, norms[2 * STEP], C))
    other = _scaled_pair(other, _row_scale(power, norms[2 * STEP + 1], C))
    rows: gl.constexpr = pair.shape[0]
    both = gl.join(pair, other).reshape([rows, 4, 2, 2, 2])  # lanes in fours, i1, i0, which
    both = both.permute([0, 4, 2, 3, 1]).reshape([rows, 32])
    low = both.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (both >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    joined = gl.join(low, high).reshape([rows, 64])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def _row_scale(power, norm, C: gl.constexpr):
    """Return the bf16 factors that multiply the rows' blocks, each twice in a 32-bit word.

    A weight's code is its exponent minus `base`, the exponent just below those that have codes. The
    factor is 2^base times the normaliser (scale) of a row's block of weights. `power` contains
    2^base twice in each word. Without normalisers, return `power`.
    """
    if C.BLOCK == 0:
        return power
    return power | (norm.to(gl.int32)[:, None] * 0x00010001)


@gluon.jit
def _half_norms(norms_ptr, first, half, is_row, C: gl.constexpr):
    """Load the 7-bit normalisers (scales) of half a group of weights, for each row of a tile.

    A group is 256 neighbouring weights of a row. The two halves of a group alternate every 32
    columns. For each row, `first` contains the index of the row's first group.
    """
    norm_0 = first  # which is not read
    if C.BLOCK > 0:
        at = (first + half // 2) * 256 + 32 * (half % 2)
        norm_0 = gl.load(norms_ptr + at // C.BLOCK, mask=is_row, other=0)
    norm_1, norm_2, norm_3 = norm_0, norm_0, norm_0
    if (C.BLOCK > 0) & (C.BLOCK <= 128):
        norm_2 = gl.load(norms_ptr + (at + 128) // C.BLOCK, mask=is_row, other=0)
        norm_3 = norm_2
    if (C.BLOCK > 0) & (C.BLOCK <= 64):
        norm_1 = gl.load(norms_ptr + (at + 64) // C.BLOCK, mask=is_row, other=0)
        norm_3 = gl.load(norms_ptr + (at + 192) // C.BLOCK, mask=is_row, other=0)
    return norm_0, norm_1, norm_2, norm_3


@gluon.jit
def _half_fields(slots, place, layout: gl.constexpr, C: gl.constexpr):
    """Read half a group of weights from shared memory, for each row of a tile.

    A group is 256 neighbouring weights of a row. The function reads the weights' exponent codes,
    and their fields of sign and mantissa bits.
    """
    code = slots[0].index(place).load(layout)
    sign = slots[1].index(place).load(layout)
    if C.FIELD == 8:
        later = slots[2].index(place).load(layout)
    else:
        sign = _spread(sign, C.FIELD)
        later = sign
    return code, sign, later


@gluon.jit
def _expect(bars, slot, size: gl.constexpr, wanted):
    mbarrier.expect(bars.index(slot), size, pred=wanted)


@gluon.jit
def _fetch_codes(descs, code_bars, slots, place, half, row, wanted, C: gl.constexpr):
    """Start copying exponent codes, signs and mantissas of a tile's weights to shared memory.

    For each row of the tile, the function copies those of 128 weights: half a group. A group is 256
    neighbouring weights of a row, and `half` is the index of the half.
    """
    codes_desc, signs_desc = descs
    bar, codes, signs = code_bars.index(place), slots[0].index(place), slots[1].index(place)
    group = half // 2
    lane = 16 * (half % 2)
    load_tile(codes_desc, [row, group * 32 + lane], bar, codes, pred=wanted)
    if C.FIELD == 8:
        load_tile(signs_desc, [row, group * 64 + lane], bar, signs, pred=wanted)
        more = slots[2].index(place)
        load_tile(signs_desc, [row, group * 64 + 32 + lane], bar, more, pred=wanted)
    else:
        load_tile(signs_desc, [row, group * 32 + lane], bar, signs, pred=wanted)


@gluon.jit
def _fetch_x(x_desc, bars, slots, place, token, step, wanted):
    """Start copying the columns of x (one token per row) for one pipeline step to shared memory."""
    bar, slot = bars.index(place), slots.index(place)
    load_tile(x_desc, [token, step * 64], bar, slot, pred=wanted)


@gluon.jit
def _load_patches(begin, end, places_ptr, values_ptr, C: gl.constexpr):
    """Load `NOTED` patches (elements whose exponents have no 4-bit code), from index `begin` on.

    Patches are loaded before they are needed, so that later pipeline steps do not wait for memory.
    The position of an entry after the last patch is -1.
    """
    several: gl.constexpr = gl.BlockedLayout(
        [C.NOTED // (32 * C.WARPS), 16], [32, 1], [C.WARPS, 1], [1, 0]
    )
    each = begin + gl.arange(0, C.NOTED, layout=gl.SliceLayout(1, several))
    place = gl.load(places_ptr + each, mask=each < end, other=-1).to(gl.int32)
    return each, place, gl.load(values_ptr + each, mask=each < end, other=0)


@gluon.jit
def _note_patches(
    notes,  # (NOTED,) each in shared memory: rows, counted from the first, or -1; columns; values
    loaded,  # as `_load_patches` returns them
    starts_ptr,
    found,  # as `chunks_of` returns it
    row_length,
    C: gl.constexpr,
):
    """Store the rows, columns and values of the loaded patches in shared memory.

    A patch is an element of the weight whose exponent has no 4-bit code.
    """
    rows_note, columns_note, values_note = notes
    chunk, chunks, inside, _, _ = found
    each, place, value = loaded
    several: gl.constexpr = each.type.layout.parent
    passed = gl.full([C.NOTED], 0, gl.int32, each.type.layout)
    for first in range(0, chunks, 16):
        number = first + gl.arange(0, 16, layout=gl.SliceLayout(0, several))
        ends = gl.load(starts_ptr + chunk + 1 + number, mask=number < chunks, other=0x7FFFFFFF)
        passed += gl.sum((each[:, None] >= ends[None, :]).to(gl.int32), 1)
    flat = passed * CHUNK + place - inside
    row = flat // row_length
    is_ours = (place >= 0) & (flat >= 0) & (row < C.ROWS)
    rows_note.store(gl.where(is_ours, row, -1))
    columns_note.store(gl.where(is_ours, flat - row * row_length, 0))
    values_note.store(value)


@gluon.jit
def _noted(notes, batch, layout: gl.constexpr):
    """Return 64 numbers of `notes`, from index 64 * `batch` on.

    A patch is an element of the weight whose exponent has no 4-bit code. `_note_patches` has
    written three tensors in shared memory: the rows, the columns and the values of patches. `notes`
    is one of these tensors.
    """
    several: gl.constexpr = [notes.shape[0] // 64, 64]
    return seen_as(notes, notes.dtype, several, notes.layout).index(batch).load(layout)


@gluon.jit
def _gather(columns_note, batch, slot, xt_ptr, token, xt_stride, copied: gl.constexpr):
    """Start copying to shared memory the columns of x that 64 elements of the weight multiply.

    The elements are patches, whose exponents have no 4-bit code. x has one token per row. The
    kernel multiplies a patch by the column of x with the patch's column index.
    """
    column = _noted(columns_note, batch, gl.SliceLayout(1, copied))
    at = xt_ptr + column.to(gl.int64)[:, None] * xt_stride + token[None, :]
    load_pointers(slot, at, mask=(token < xt_stride)[None, :])
    async_copy.commit_group()


@gluon.jit
def _store(result, ptr, first_row, rows_count, first_token, tokens_count, pitch):
    """Store the transpose of a tile of results, (ROWS, TOKENS), in an output of shape (M, pitch).

    M is the number of tokens. `pitch` is the number of outputs per token.
    """
    layout: gl.constexpr = result.type.layout
    row = first_row + gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, layout))
    token = first_token + gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, layout))
    is_in = (row < rows_count)[:, None] & (token < tokens_count)[None, :]
    gl.store(ptr + token.to(gl.int64)[None, :] * pitch + row[:, None], result, mask=is_in)


@gluon.jit(do_not_specialize=["tokens_count", "groups", "whole", "splits"])
def _coded_weight_matrix_win4_wide_kernel(
    x_desc,  # (M, K) bf16, columns in the order of the operands
    codes_desc,
    signs_desc,
    xt_ptr,  # (K, xt_stride) bf16, tokens after the last are undefined
    header_ptr,
    starts_ptr,
    places_ptr,
    values_ptr,
    norms_ptr,  # of a lossy weight
    bias_ptr,
    out_ptr,  # (M, N) bf16
    shares_ptr,  # (splits, M, rows after those of `whole`) fp32
    tokens_count,
    rows_count,
    groups,  # K / 256
    xt_stride,
    whole,  # tiles of rows with a program each; the others have `splits`
    splits,  # programs that share the columns of a row, each at least a group, and its patches
    C: gl.constexpr,
):
    """Compute a tile of ROWS x TOKENS products; each weight is decoded once for all tokens.

    Asynchronous copies bring codes and x to shared memory, several steps of 64 columns ahead of the
    products. While the tensor cores multiply one step, the operand of the next step is decoded. The
    kernel multiplies the patches (elements whose exponents have no 4-bit code) last. One step
    multiplies 64 patches by the columns of x with the patches' column indices.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.WARPS, 1], [16, C.TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    warps: gl.constexpr = [[16, 0], [32, 0], [64, 0]] if C.WARPS == 8 else [[16, 0], [32, 0]]
    words: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], warps, [], [C.ROWS, 16]
    )
    words_of_signs: gl.constexpr = 2 if C.FIELD == 8 else 1
    bytes_of_signs: gl.constexpr = words_of_signs * signs_desc.block_type.nbytes
    bytes_of_codes: gl.constexpr = codes_desc.block_type.nbytes + bytes_of_signs
    bytes_of_x: gl.constexpr = x_desc.block_type.nbytes
    program = gl.program_id(0)
    shared = (rows_count + C.ROWS - 1) // C.ROWS - whole  # tiles of rows
    is_whole = program < whole
    split = gl.where(is_whole, 0, (program - whole) // gl.maximum(shared, 1))
    first_row = (program - split * shared) * C.ROWS
    first_token = gl.program_id(1) * C.TOKENS
    splits = gl.where(is_whole, 1, splits)
    share = (groups + splits - 1) // splits
    origin = split * share * 2  # the first of all halves of a group
    halves = gl.minimum(groups * 2 - origin, share * 2)
    steps = halves * 2
    bars = gl.allocate_shared_memory(gl.int64, [C.X_STAGES, 1], mbarrier.MBarrierLayout())
    code_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    x = gl.allocate_shared_memory(gl.bfloat16, [C.X_STAGES, C.TOKENS, 64], x_desc.layout)
    codes = gl.allocate_shared_memory(gl.int32, [C.STAGES, C.ROWS, 16], codes_desc.layout)
    kind: gl.constexpr = signs_desc.dtype
    signs = gl.allocate_shared_memory(kind, [C.STAGES, C.ROWS, 16], signs_desc.layout)
    more = signs
    if C.FIELD == 8:
        more = gl.allocate_shared_memory(kind, [C.STAGES, C.ROWS, 16], signs_desc.layout)
    descs = (codes_desc, signs_desc)
    slots = (codes, signs, more)
    notes: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_note = gl.allocate_shared_memory(gl.int32, [C.NOTED], notes)
    columns_note = gl.allocate_shared_memory(gl.int32, [C.NOTED], notes)
    values_note = gl.allocate_shared_memory(gl.int16, [C.NOTED], notes)
    for stage in gl.static_range(C.X_STAGES):
        mbarrier.init(bars.index(stage), count=1)
    for stage in gl.static_range(C.STAGES):
        mbarrier.init(code_bars.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(C.STAGES):
        _expect(code_bars, stage, bytes_of_codes, stage < halves)
    for stage in gl.static_range(C.X_STAGES):
        _expect(bars, stage, bytes_of_x, stage < steps)
    barrier()
    for stage in gl.static_range(C.STAGES):
        _fetch_codes(descs, code_bars, slots, stage, origin + stage, first_row, stage < halves, C)
    first = origin * 2  # of all steps
    for stage in gl.static_range(C.X_STAGES):
        _fetch_x(x_desc, bars, x, stage, first_token, first + stage, stage < steps)
    row_length = groups * 256
    chunk, chunks, inside, patch, end = chunks_of(starts_ptr, first_row, rows_count, row_length, C)
    its_patches = (end - patch + splits - 1) // splits
    patch += split * its_patches
    end = gl.minimum(end, patch + its_patches)
    found = (chunk, chunks, inside, patch, end)
    loaded = _load_patches(patch, end, places_ptr, values_ptr, C)
    power = ((gl.load(header_ptr) + 127) << 7) * 0x00010001
    power += gl.full([C.ROWS, 16], 0, gl.int32, words)
    decoded_row = first_row + gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, words))
    is_row, its_groups = decoded_row < rows_count, decoded_row.to(gl.int64) * groups
    norms_0, norms_1, norms_2, norms_3 = _half_norms(norms_ptr, its_groups, origin, is_row, C)
    norms = (norms_0, norms_1, norms_2, norms_3)
    acc = gl.full([C.ROWS, C.TOKENS], 0.0, gl.float32, mma)
    mbarrier.wait(code_bars.index(0), 0)
    code, sign, later = _half_fields(slots, 0, words, C)
    operand = _half_operand(code, (sign, later), power, norms, 0, left, C)
    second = operand
    for half in range(0, halves):
        step = 2 * half
        slot = step % C.X_STAGES
        mbarrier.wait(bars.index(slot), (step // C.X_STAGES) & 1)
        acc = warpgroup_mma(operand, x.index(slot).permute((1, 0)), acc, is_async=True)
        norms = (norms_0, norms_1, norms_2, norms_3)
        following_second = _half_operand(code, (sign, later), power, norms, 1, left, C)
        far = origin + gl.minimum(half + 1, halves - 1)
        norms_0, norms_1, norms_2, norms_3 = _half_norms(norms_ptr, its_groups, far, is_row, C)
        # All products except the latest are complete, so their slot in shared memory is free.
        acc, operand, second = warpgroup_mma_wait(1, deps=[acc, operand, second])
        second = following_second
        before = step - 1 + C.X_STAGES
        slot = before % C.X_STAGES
        wanted = (step > 0) & (before < steps)
        _expect(bars, slot, bytes_of_x, wanted)
        barrier()
        _fetch_x(x_desc, bars, x, slot, first_token, first + before, wanted)
        step = step + 1
        slot = step % C.X_STAGES
        mbarrier.wait(bars.index(slot), (step // C.X_STAGES) & 1)
        following = half + 1
        place = following % C.STAGES
        mbarrier.wait(code_bars.index(place), (following // C.STAGES) & 1, pred=following < halves)
        code, sign, later = _half_fields(slots, place, words, C)
        # The loaded codes are decoded between the products of this operand.
        acc = warpgroup_mma(second, x.index(slot).permute((1, 0)), acc, is_async=True)
        norms = (norms_0, norms_1, norms_2, norms_3)
        following_operand = _half_operand(code, (sign, later), power, norms, 0, left, C)
        acc, operand, second = warpgroup_mma_wait(1, deps=[acc, operand, second])
        operand = following_operand
        before = step - 1 + C.X_STAGES
        slot = before % C.X_STAGES
        wanted = before < steps
        far = half + C.STAGES
        place = far % C.STAGES  # that of this half, whose words are in registers by now
        _expect(bars, slot, bytes_of_x, wanted)
        _expect(code_bars, place, bytes_of_codes, far < halves)
        barrier()
        _fetch_x(x_desc, bars, x, slot, first_token, first + before, wanted)
        _fetch_codes(descs, code_bars, slots, place, origin + far, first_row, far < halves, C)
    acc, second = warpgroup_mma_wait(0, deps=[acc, second])
    barrier()
    for stage in gl.static_range(C.X_STAGES):
        mbarrier.invalidate(bars.index(stage))
    for stage in gl.static_range(C.STAGES):
        mbarrier.invalidate(code_bars.index(stage))

    copied: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // C.TOKENS, C.TOKENS // 8], [C.WARPS, 1], [1, 0]
    )
    turned: gl.constexpr = gl.NVMMASharedLayout(128 if C.TOKENS >= 64 else 64, 16, 2)
    row = gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, left))
    token = first_token + gl.arange(0, C.TOKENS, layout=gl.SliceLayout(0, copied))
    all_notes = (rows_note, columns_note, values_note)
    for start in range(patch, end, C.NOTED):
        if start > patch:
            barrier()
            loaded = _load_patches(start, end, places_ptr, values_ptr, C)
        _note_patches(all_notes, loaded, starts_ptr, found, row_length, C)
        barrier()
        batches = (gl.minimum(end - start, C.NOTED) + 63) // 64
        for several in range(0, batches, C.X_STAGES):
            for stage in gl.static_range(C.X_STAGES):
                if several + stage < batches:
                    room = seen_as(x.index(stage), gl.bfloat16, [64, C.TOKENS], turned)
                    _gather(columns_note, several + stage, room, xt_ptr, token, xt_stride, copied)
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
            for stage in gl.static_range(C.X_STAGES):
                if several + stage < batches:
                    its_row = _noted(rows_note, several + stage, gl.SliceLayout(0, left))
                    value = _noted(values_note, several + stage, gl.SliceLayout(0, left))
                    a = gl.where(its_row[None, :] == row[:, None], value[None, :], 0)
                    a = a.to(gl.bfloat16, bitcast=True)
                    gathered = seen_as(x.index(stage), gl.bfloat16, [64, C.TOKENS], turned)
                    acc = warpgroup_mma(a, gathered, acc)
            barrier()
    out_row = first_row + gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, mma))
    if C.HAS_BIAS:
        is_added = (out_row < rows_count) & (split == 0)
        acc += gl.load(bias_ptr + out_row, mask=is_added, other=0.0).to(gl.float32)[:, None]
    if is_whole:
        out: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, C.WARPS], [0, 1])
        result = gl.convert_layout(acc.to(gl.bfloat16), out)
        _store(result, out_ptr, first_row, rows_count, first_token, tokens_count, rows_count)
    else:
        skipped = whole * C.ROWS
        shares_ptr += split.to(gl.int64) * tokens_count * (rows_count - skipped) - skipped
        pitch = rows_count - skipped
        _store(acc, shares_ptr, first_row, rows_count, first_token, tokens_count, pitch)
