# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that multiply one token by weights compressed with the codec win4, lossless or lossy. The
kernels decode the weights while multiplying.

A win4 code is a weight's exponent minus the number `base`. The kernel uses the code itself as the
exponent of a number, and then multiplies this tiny number by 2^base. If the code and all mantissa
bits are 0, the number is zero. For a lossy weight, the kernel multiplies by 2^base times the
normaliser (scale) of the weight's block. One instruction multiplies and rounds both weights of a
pair word (a 32-bit word of two bf16 weights). So the kernel multiplies x by exactly the weights
that decoding would give.

In variable names, a row is a row of the weight matrix (one output). A word is a 32-bit word with
the codes of eight elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pair_kernels import (
    even_bytes,
    high_float,
    load_norm,
    low_float,
    narrow_pair,
    odd_bytes,
    rounded_pair,
    scaled_pair,
    spread_fields,
)

CHUNK: tl.constexpr = tl.constexpr(8192)


@triton.jit
def chunks_of(weight, first_row, rows, row_length):
    """Find `rows` rows of a compressed weight, and their patches (elements whose exponents have no
    4-bit code).

    The first of the rows is `first_row`. Each patch's position and value are in the lists of
    patches. A chunk is 8192 consecutive elements of the weight. The first three results describe
    the position of the rows: the first chunk, the number of chunks, and the position in the first
    chunk. The last two results are the range of these chunks' patches in the lists.
    """
    first = first_row.to(tl.int64) * row_length
    last = tl.minimum(first_row + rows, weight.rows).to(tl.int64) * row_length
    chunk = first // CHUNK
    chunks = ((last + CHUNK - 1) // CHUNK - chunk).to(tl.int32)
    inside = (first % CHUNK).to(tl.int32)
    begin = tl.load(weight.starts + chunk)
    return chunk, chunks, inside, begin, tl.load(weight.starts + chunk + chunks)


@triton.jit
def _load_patches(weight, begin, end, PATCHES: tl.constexpr):
    """Load some patches: single elements of the weight whose exponents have no 4-bit code.

    Patches from index `end` on get the position -1.
    """
    each = begin + tl.arange(0, PATCHES)
    place = tl.load(weight.places + each, mask=each < end, other=-1).to(tl.int32)
    return each, place, tl.load(weight.patterns + each, mask=each < end, other=0).to(tl.int32)


@triton.jit
def _patch_rows(starts_ptr, place, each, chunk, chunks, inside, row_length, CHUNKS: tl.constexpr):
    """Return the row and column of each patch (an element whose exponent has no 4-bit code).

    Rows are counted from the program's first row, columns from the start of the weight's row. A
    patch before the program's first row gets row -1.
    """
    number = tl.arange(0, CHUNKS)
    ends = tl.load(starts_ptr + chunk + 1 + number, mask=number < chunks, other=0x7FFFFFFF)
    passed = tl.sum((each[:, None] >= ends[None, :]).to(tl.int32), 1)
    flat = passed * CHUNK + place - inside
    return tl.where(flat < 0, -1, flat // row_length), flat % row_length


@triton.jit
def _weights(pair, scale, PACKED: tl.constexpr):
    return scaled_pair(pair, scale) if PACKED else pair


@triton.jit
def _add_pair(pair, x, scale, acc, PACKED: tl.constexpr):
    """Add two products to `acc`: each is a bf16 weight times a bf16 number of x (the token). The
    two weights are in one 32-bit word, and the two numbers of x in another."""
    if PACKED:
        acc += low_float(pair) * low_float(x)
        return acc + high_float(pair) * high_float(x)
    acc += (low_float(pair) * scale) * low_float(x)
    return acc + (high_float(pair) * scale) * high_float(x)


@triton.jit
def _products(codes, signs, more, x_ptr, place, is_in, scale, acc, PACKED: tl.constexpr):
    """Decode the eight weights of each 32-bit word of `codes`, and add their products with x (the
    token) to `acc`.

    A weight's code is its exponent minus the number `base`. The code itself becomes the exponent of
    a number, which is then multiplied by 2^base. With PACKED, `scale` is a 32-bit word that
    contains 2^base twice. Otherwise `scale` is 2^base.
    """
    pair_0 = _weights(even_bytes(signs) | ((codes << 7) & 0x07800780), scale, PACKED)
    pair_1 = _weights(odd_bytes(signs) | ((codes << 3) & 0x07800780), scale, PACKED)
    pair_2 = _weights(even_bytes(more) | ((codes >> 1) & 0x07800780), scale, PACKED)
    pair_3 = _weights(odd_bytes(more) | ((codes >> 5) & 0x07800780), scale, PACKED)
    x_0 = tl.load(x_ptr + place, mask=is_in, other=0)[None, :]
    x_1 = tl.load(x_ptr + place + 32, mask=is_in, other=0)[None, :]
    x_2 = tl.load(x_ptr + place + 64, mask=is_in, other=0)[None, :]
    x_3 = tl.load(x_ptr + place + 96, mask=is_in, other=0)[None, :]
    acc = _add_pair(pair_0, x_0, scale, acc, PACKED)
    acc = _add_pair(pair_1, x_1, scale, acc, PACKED)
    acc = _add_pair(pair_2, x_2, scale, acc, PACKED)
    return _add_pair(pair_3, x_3, scale, acc, PACKED)


@triton.jit
def _add_patches(total, loaded, x_ptr, starts_ptr, row_length, found, ROWS, CHUNKS):
    """Add the products of x (the token) and patches (elements of the weight whose exponents have no
    4-bit code) to `total`, the outputs of some rows.

    Each patch is multiplied by the number of x in the same column. The product is added to the
    output of the patch's row.
    """
    chunk, chunks, inside, _, _ = found
    each, place, patched = loaded
    is_patch = place >= 0
    place = tl.where(is_patch, place, 0)
    its_row, column = _patch_rows(
        starts_ptr, place, each, chunk, chunks, inside, row_length, CHUNKS
    )
    is_patch &= (its_row >= 0) & (its_row < ROWS)
    x = tl.load(x_ptr + column // 2, mask=is_patch, other=0)
    x = tl.where(column % 2 == 0, low_float(x), high_float(x))
    product = tl.where(is_patch, low_float(patched) * x, 0.0)
    row = tl.arange(0, ROWS)
    return total + tl.sum(tl.where(its_row[None, :] == row[:, None], product[None, :], 0.0), 1)


@triton.jit
def _finish_rows(
    total,  # (ROWS,) fp32, the products without patches
    loaded,  # the first patches, as `_load_patches` returns them
    x_ptr,
    weight,  # `layout.Multiplied`
    first_row,
    row_length,
    found,  # as `chunks_of` returns it
    TILE: tl.constexpr,
    C: tl.constexpr,
):
    """Add the bias, and the products of x (the token) with the patches (elements whose exponents
    have no 4-bit code), to the outputs of some rows. Store these outputs."""
    ROWS: tl.constexpr = TILE[2]
    CHUNKS: tl.constexpr = TILE[5]
    _, _, _, begin, end = found
    if end > begin:
        total = _add_patches(total, loaded, x_ptr, weight.starts, row_length, found, ROWS, CHUNKS)
        for start in range(begin + C.PATCHES, end, C.PATCHES):
            more = _load_patches(weight, start, end, C.PATCHES)
            total = _add_patches(total, more, x_ptr, weight.starts, row_length, found, ROWS, CHUNKS)
    row = first_row + tl.arange(0, ROWS)
    if TILE[0]:
        total += tl.load(weight.bias + row, mask=row < weight.rows, other=0).to(tl.float32)
    tl.store(weight.out + row, total.to(weight.out.dtype.element_ty), mask=row < weight.rows)


@triton.jit
def _exact_rows(
    program,
    x_ptr,  # (K / 2,) pair words
    weight,  # `layout.Multiplied`
    row_words,  # K / 8
    TILE: tl.constexpr,  # HAS_BIAS, IS_EVEN, ROWS, WORDS, STAGES, CHUNKS
    # IS_EVEN: ROWS divides N, WORDS a row
    # CHUNKS: a power of two, not less than the chunks that ROWS rows touch
    C: tl.constexpr,
    # PACKED: two weights are scaled by one instruction, of assembly
):
    """Compute the products of ROWS rows of a losslessly compressed weight with one token x, summed
    in fp32."""
    IS_EVEN: tl.constexpr = TILE[1]
    ROWS: tl.constexpr = TILE[2]
    WORDS: tl.constexpr = TILE[3]
    STAGES: tl.constexpr = TILE[4]
    first_row = program * ROWS
    row_length = row_words * 8
    found = chunks_of(weight, first_row, ROWS, row_length)
    loaded = _load_patches(weight, found[3], found[4], C.PATCHES)  # long before it is needed
    row = first_row + tl.arange(0, ROWS)
    is_row = (row < weight.rows)[:, None]
    scale = ((tl.load(weight.header) + 127) << 23).to(tl.float32, bitcast=True)
    scales = tl.full((ROWS, WORDS), ((tl.load(weight.header) + 127) << 7) * 0x00010001, tl.int32)
    begin = row.to(tl.int64)[:, None] * row_words
    acc = tl.zeros((ROWS, WORDS), tl.float32)
    for start in tl.range(0, row_words, WORDS, num_stages=STAGES):
        word = start + tl.arange(0, WORDS)
        is_in = word < row_words
        is_read = is_row & is_in[None, :]
        if IS_EVEN:
            is_in = word >= 0
            is_read = (row >= 0)[:, None] & is_in[None, :]
        group = word // 32
        lane = word % 32
        codes = tl.load(weight.codes + begin + word[None, :], mask=is_read, other=0)
        at = begin * 2 + (group * 64 + lane)[None, :]
        signs = tl.load(weight.signs + at, mask=is_read, other=0)
        more = tl.load(weight.signs + at + 32, mask=is_read, other=0)
        at = group * 128 + lane
        by = scales if C.PACKED else scale
        acc = _products(codes, signs, more, x_ptr, at, is_in, by, acc, C.PACKED)
    total = tl.sum(acc, 1)
    _finish_rows(total, loaded, x_ptr, weight, first_row, row_length, found, TILE, C)


@triton.jit
def _load_groups(weight, groups, group, row, lane, C: tl.constexpr, IS_EVEN: tl.constexpr):
    """Load exponent codes and fields (sign and mantissa bits) of groups of 256 weights of each row.

    The tensor of codes and the tensor of fields have the shape (ROWS, GROUPS, 32). Also load the
    groups' normalisers (scales).
    """
    is_in = (group < groups)[None, :] & (row < weight.rows)[:, None]
    if IS_EVEN:  # one step is loaded ahead, after the last
        is_in = (group < groups)[None, :] & (row >= 0)[:, None]
    at = row.to(tl.int64)[:, None] * groups + group[None, :]
    word = at[:, :, None] * 32 + lane
    codes = tl.load(weight.codes + word, mask=is_in[:, :, None], other=0)
    fields = tl.load(weight.signs + word, mask=is_in[:, :, None], other=0)
    norms_0 = _load_norms(weight.norms, at, is_in, 0, C.BLOCK)
    norms_1, norms_2, norms_3 = norms_0, norms_0, norms_0
    if C.BLOCK <= 128:
        norms_2 = _load_norms(weight.norms, at, is_in, 2, C.BLOCK)
        norms_3 = norms_2
    if C.BLOCK <= 64:
        norms_1 = _load_norms(weight.norms, at, is_in, 1, C.BLOCK)
        norms_3 = _load_norms(weight.norms, at, is_in, 3, C.BLOCK)
    return codes, fields, norms_0, norms_1, norms_2, norms_3


@triton.jit
def _load_norms(norms_ptr, group, is_in, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    """Load the normalisers (scales) of pair number PAIR of each thread's weights.

    Each thread of a warp has four pairs of the weights of a group (256 weights). The first result
    is for the warp's first sixteen threads, the second result for its last sixteen. The results
    differ only if a normaliser belongs to 32 weights (BLOCK).
    """
    first = load_norm(norms_ptr, group, is_in, PAIR, 0, BLOCK)
    last = first
    if BLOCK == 32:
        last = load_norm(norms_ptr, group, is_in, PAIR, 1, BLOCK)
    return first, last


@triton.jit
def _narrow_product(
    fields, codes, norms, power, lane, x_ptr, at, is_in, acc, C: tl.constexpr, PAIR: tl.constexpr
):
    """Decode one pair of weights of each word of `codes`, multiply the pair by x (the token), and
    add the products to `acc`.

    A 32-bit word contains the codes of eight weights, which form four pairs. PAIR is the number of
    the pair.
    """
    scale = (norms[0].to(tl.int32)[:, :, None] | power) * 0x00010001
    if C.BLOCK == 32:
        other = (norms[1].to(tl.int32)[:, :, None] | power) * 0x00010001
        scale = tl.where(lane < 16, scale, other)
    pair = narrow_pair(fields, codes, PAIR, C.FIELD)
    pair = rounded_pair(pair, scale + tl.zeros_like(pair), C.PACKED)
    x = tl.load(x_ptr + at + 32 * PAIR, mask=is_in, other=0)[None, :, :]
    acc += low_float(pair) * low_float(x)
    return acc + high_float(pair) * high_float(x)


@triton.jit
def _narrow_rows(
    program,
    x_ptr,  # (K / 2,) pair words
    weight,  # `layout.Multiplied`
    row_words,  # K / 8
    TILE: tl.constexpr,  # as in `_exact_rows`
    C: tl.constexpr,
    # FIELD: bits of sign and mantissa: 1, 2 or 4
    # BLOCK: weights per normaliser
):
    """Compute the products of ROWS rows of a lossily compressed weight with one token x, summed in
    fp32.

    The kernel loads the codes for the next loop iteration before it multiplies by the weights of
    the current iteration.
    """
    IS_EVEN: tl.constexpr = TILE[1]
    ROWS: tl.constexpr = TILE[2]
    GROUPS: tl.constexpr = TILE[3] // 32
    first_row = program * ROWS
    row_length = row_words * 8
    groups = row_words // 32
    row = first_row + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, 32)[None, None, :]
    codes, fields, norms_0, norms_1, norms_2, norms_3 = _load_groups(
        weight, groups, group, row, lane, C, IS_EVEN
    )
    found = chunks_of(weight, first_row, ROWS, row_length)
    power = (tl.load(weight.header) + 127) << 7
    loaded = _load_patches(weight, found[3], found[4], C.PATCHES)  # long before it is needed
    acc = tl.zeros((ROWS, GROUPS, 32), tl.float32)
    for start in tl.range(0, groups, GROUPS, num_stages=1):
        now = start + group
        is_in = (now < groups)[:, None] & (tl.arange(0, 32) >= 0)[None, :]
        at = now[:, None] * 128 + tl.arange(0, 32)[None, :]
        following = _load_groups(weight, groups, now + GROUPS, row, lane, C, IS_EVEN)
        spread = spread_fields(fields.to(tl.int32), C.FIELD)
        acc = _narrow_product(spread, codes, norms_0, power, lane, x_ptr, at, is_in, acc, C, 0)
        acc = _narrow_product(spread, codes, norms_1, power, lane, x_ptr, at, is_in, acc, C, 1)
        acc = _narrow_product(spread, codes, norms_2, power, lane, x_ptr, at, is_in, acc, C, 2)
        acc = _narrow_product(spread, codes, norms_3, power, lane, x_ptr, at, is_in, acc, C, 3)
        codes, fields, norms_0, norms_1, norms_2, norms_3 = following
    total = tl.sum(tl.sum(acc, 2), 1)
    _finish_rows(total, loaded, x_ptr, weight, first_row, row_length, found, TILE, C)


@triton.jit
def _rows(program, x_ptr, weight, row_words, TILE: tl.constexpr, C: tl.constexpr):
    if C.FIELD == 8:
        _exact_rows(program, x_ptr, weight, row_words, TILE, C)
    else:
        _narrow_rows(program, x_ptr, weight, row_words, TILE, C)


@triton.jit
def _coded_weight_row_win4_kernel(x_ptr, weight, row_words, C: tl.constexpr):
    """Multiply one token (row of x) by one weight matrix that is compressed with the codec win4.

    Win4 stores each weight's exponent as a 4-bit code.
    """
    _rows(tl.program_id(0), x_ptr, weight, row_words, C.TILE, C)


@triton.jit
def _coded_weight_row_win4_several_kernel(
    x_ptr, weight_0, weight_1, weight_2, row_words, C: tl.constexpr
):
    """Multiply one token (row of x) by 2 or 3 compressed weight matrices with equal numbers of
    columns.

    Each sum adds its terms in the same order as in `_coded_weight_row_win4_kernel`.
    """
    program = tl.program_id(0)
    first = tl.cdiv(weight_0.rows, C.TILE_0[2])
    second = first + tl.cdiv(weight_1.rows, C.TILE_1[2])
    if program < first:
        _rows(program, x_ptr, weight_0, row_words, C.TILE_0, C)
    elif program < second:
        _rows(program - first, x_ptr, weight_1, row_words, C.TILE_1, C)
    elif C.COUNT == 3:
        _rows(program - second, x_ptr, weight_2, row_words, C.TILE_2, C)
