# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""GPU kernels of the codec win4: decoding, encoding, and the kernels that run before and after
matrix products of a compressed weight with several tokens.

A 32-bit word of codes contains the exponents of eight weights. Two words of signs contain the
weights' signs and mantissas. No weight depends on its neighbours, so kernels need only about ten
operations per weight.

In variable names, a row is a row of the weight matrix (one output), and a token is a row of x. A
word is a 32-bit word with the codes of eight elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pair_kernels import (
    HEADING,
    as_patterns,
    as_words,
    even_bytes,
    first_patches,
    is_win4_patch,
    narrow_pair,
    odd_bytes,
    pair_scale,
    rounded_pair,
    spread_fields,
    step_patches,
    stepped_pair,
    store_patches,
    write_heading,
)

CHUNK: tl.constexpr = tl.constexpr(8192)


@triton.jit
def _exponents(codes, base, PAIR: tl.constexpr):
    """Return the exponents of pair number PAIR of the eight weights in a word of codes.

    The exponents are at their bit positions in two bf16 numbers. Code 0 gives exponent 0. The
    caller passes `base`, the number that is added to nonzero codes, already shifted by 7 bits.
    """
    code = (codes >> (4 * PAIR)) & 0x000F000F
    is_coded = ((code + 0x000F000F) >> 4) & 0x00010001
    return (code << 7) + is_coded * base


@triton.jit
def _pairs(codes, signs, base):
    """Decode words of codes, together with the signs and mantissas of the same weights.

    Return four 32-bit words of two weights each.
    """
    even, odd = tl.load(signs), tl.load(signs + 32)
    pair_0 = even_bytes(even) | _exponents(codes, base, 0)
    pair_1 = odd_bytes(even) | _exponents(codes, base, 1)
    pair_2 = even_bytes(odd) | _exponents(codes, base, 2)
    pair_3 = odd_bytes(odd) | _exponents(codes, base, 3)
    return pair_0, pair_1, pair_2, pair_3


@triton.jit
def _load_pairs(at):
    return tl.load(at), tl.load(at + 32), tl.load(at + 64), tl.load(at + 96)


@triton.jit
def _store_pairs(at, pair_0, pair_1, pair_2, pair_3):
    tl.store(at, pair_0)
    tl.store(at + 32, pair_1)
    tl.store(at + 64, pair_2)
    tl.store(at + 96, pair_3)


@triton.jit
def decode_some(program, parts, out_ptr, WORDS: tl.constexpr, PATCHES: tl.constexpr):
    """Decode losslessly compressed weights, eight per 32-bit word of exponent codes, and store
    them."""
    header_ptr, codes_ptr, starts_ptr, places_ptr, values_ptr, signs_ptr = parts
    first = program.to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    group = first // 32 + word // 32
    lane = word % 32
    chunk = first * 8 // CHUNK
    begin = tl.load(starts_ptr + chunk)  # long before they are needed
    end = tl.load(starts_ptr + chunk + 1)
    patches = (begin, end, places_ptr, values_ptr)
    base = tl.load(header_ptr) << 7
    loaded = first_patches(patches, PATCHES)
    codes = tl.load(codes_ptr + first + word)
    pair_0, pair_1, pair_2, pair_3 = _pairs(codes, signs_ptr + group * 64 + lane, base)
    _store_pairs(as_words(out_ptr) + group * 128 + lane, pair_0, pair_1, pair_2, pair_3)
    store_patches(patches, loaded, as_patterns(out_ptr), first * 8, WORDS * 8, PATCHES)


@triton.jit
def _coded_weight_win4_decode_kernel(
    header_ptr,
    codes_ptr,
    starts_ptr,
    places_ptr,
    values_ptr,
    signs_ptr,
    norms_ptr,
    out_ptr,  # numbers of 16 bits
    C: tl.constexpr,
    # FIELD: bits of sign and mantissa: 8 is lossless
    # BLOCK: weights per normaliser, or 0
    # PACKED: two lossy weights are scaled by one instruction, of assembly
):
    """Decode weights, eight per 32-bit word of exponent codes, and write them to memory."""
    if C.FIELD == 8:
        parts = (header_ptr, codes_ptr, starts_ptr, places_ptr, values_ptr, signs_ptr)
        decode_some(tl.program_id(0), parts, out_ptr, C.WORDS, C.PATCHES)
    else:
        parts = (header_ptr, codes_ptr, starts_ptr, places_ptr, values_ptr, signs_ptr)
        _decode_narrow(tl.program_id(0), parts, norms_ptr, out_ptr, C)


@triton.jit
def _decode_narrow(program, parts, norms_ptr, out_ptr, C: tl.constexpr):
    """Decode lossily compressed weights, eight per 32-bit word of exponent codes, and store them.

    Before encoding, each weight was divided by a normaliser (the scale of a block of weights). The
    quotient's code is its exponent minus `base`, the exponent just below those that have codes. The
    kernel takes the code as the exponent of a number. The decoded weight is this number times
    2^base, times the normaliser. Weights without a code (patches) are stored whole.
    """
    header_ptr, codes_ptr, starts_ptr, places_ptr, values_ptr, signs_ptr = parts
    words_ptr, out_ptr = as_words(out_ptr), as_patterns(out_ptr)
    first = program.to(tl.int64) * C.WORDS
    lane = tl.arange(0, 32)[None, :]
    group = first // 32 + tl.arange(0, C.WORDS // 32)
    chunk = first * 8 // CHUNK
    begin = tl.load(starts_ptr + chunk)
    end = tl.load(starts_ptr + chunk + 1)
    patches = (begin, end, places_ptr, values_ptr)
    power = (tl.load(header_ptr) + 127) << 7
    loaded = first_patches(patches, C.PATCHES)
    word = group[:, None] * 32 + lane
    codes = tl.load(codes_ptr + word)
    fields = spread_fields(tl.load(signs_ptr + word).to(tl.int32), C.FIELD)
    at = words_ptr + group[:, None] * 128 + lane
    for pair in tl.static_range(4):
        scale = pair_scale(norms_ptr, group, power, lane, pair, C.BLOCK)
        found = narrow_pair(fields, codes, pair, C.FIELD)
        tl.store(at + 32 * pair, rounded_pair(found, scale + tl.zeros_like(found), C.PACKED))
    store_patches(patches, loaded, out_ptr, first * 8, C.WORDS * 8, C.PATCHES)


@triton.jit
def _coded(pattern, base):
    """Return a weight's code, its byte of sign and mantissa, and a flag for weights without a code.

    `pattern` contains the weight's 16 bits. The flag is 1 if the weight has no code and must be
    stored with all its 16 bits, as a patch. Otherwise the flag is 0.
    """
    code = ((pattern >> 7) & 0xFF) - base
    is_zero = (pattern & 0x7FFF) == 0
    is_coded = (code > 0) & (code < 16)
    byte = ((pattern >> 8) & 0x80) | (pattern & 0x7F)
    byte = tl.where(is_coded | is_zero, byte, 0)
    return tl.where(is_coded, code, 0), byte, tl.where(is_coded | is_zero, 0, 1)


@triton.jit
def _coded_pair(pair, base, PAIR: tl.constexpr):
    """Return the 4-bit exponent codes of a pair of weights, and their bytes of sign and mantissa.

    The codes are already at their positions in a word, which contains the codes of four pairs. PAIR
    is the number of the pair. Also return the number of patches (elements whose exponents have no
    4-bit code) in the pair.
    """
    low_code, low_byte, low_patch = _coded(pair & 0xFFFF, base)
    high_code, high_byte, high_patch = _coded((pair >> 16) & 0xFFFF, base)
    codes = (low_code | (high_code << 16)) << (4 * PAIR)
    return codes, low_byte | (high_byte << 16), low_patch + high_patch


@triton.jit
def encode_chunk(
    chunk,
    chunks,
    weight_ptr,  # numbers of 16 bits; with STEP the gradient, over which the weight goes
    parts,  # starts, places and values are those of the old weight
    counts_ptr,  # (2, chunks) int32: patches of each, and a bit for each group that has patches
    rate,
    decay,
    C: tl.constexpr,
    # STEP: the parts hold the weight before a step along the gradient
):
    """Write the exponent codes, signs and mantissas of one chunk (8192 weights). Also write the
    number of the chunk's patches (elements whose exponents have no 4-bit code), and which groups of
    weights have patches.

    With an optimizer step, each weight is decoded, updated and encoded in registers. The kernel
    first overwrites the whole gradient of the chunk with updated weights. Elements that were
    patches before the step get wrong numbers at first. If the chunk had patches before the step,
    the kernel then overwrites the wrong numbers with the updated patches. Only in this case does
    the kernel load the chunk's updated weights back from memory, before it encodes them. Otherwise,
    memory is read and written once.
    """
    header_ptr, codes_ptr, starts_ptr, places_ptr, values_ptr, signs_ptr = parts
    base = tl.load(header_ptr)
    word = tl.arange(0, 1024)
    first = chunk.to(tl.int64) * 1024
    group = first // 32 + word // 32
    lane = word % 32
    weight_ptr = as_patterns(weight_ptr)
    at = as_words(weight_ptr) + group * 128 + lane
    signs = signs_ptr + group * 64 + lane
    pair_0, pair_1, pair_2, pair_3 = _load_pairs(at)
    if C.STEP:
        begin = tl.load(starts_ptr + chunk)
        end = tl.load(starts_ptr + chunk + 1)
        old_0, old_1, old_2, old_3 = _pairs(tl.load(codes_ptr + first + word), signs, base << 7)
        pair_0 = stepped_pair(old_0, pair_0, rate, decay, C.HAS_DECAY)
        pair_1 = stepped_pair(old_1, pair_1, rate, decay, C.HAS_DECAY)
        pair_2 = stepped_pair(old_2, pair_2, rate, decay, C.HAS_DECAY)
        pair_3 = stepped_pair(old_3, pair_3, rate, decay, C.HAS_DECAY)
        patches = (begin, end, places_ptr, values_ptr)
        step_patches(patches, weight_ptr, first * 8, rate, decay, CHUNK, C)
        _store_pairs(at, pair_0, pair_1, pair_2, pair_3)
        if end > begin:
            loaded = first_patches(patches, C.PATCHES)
            store_patches(patches, loaded, weight_ptr, first * 8, CHUNK, C.PATCHES)
            tl.debug_barrier()
            pair_0, pair_1, pair_2, pair_3 = _load_pairs(at)
    codes_0, bytes_0, count_0 = _coded_pair(pair_0, base, 0)
    codes_1, bytes_1, count_1 = _coded_pair(pair_1, base, 1)
    codes_2, bytes_2, count_2 = _coded_pair(pair_2, base, 2)
    codes_3, bytes_3, count_3 = _coded_pair(pair_3, base, 3)
    tl.store(codes_ptr + first + word, codes_0 | codes_1 | codes_2 | codes_3)
    tl.store(signs, bytes_0 | (bytes_1 << 8))
    tl.store(signs + 32, bytes_2 | (bytes_3 << 8))
    found = tl.sum(tl.reshape(count_0 + count_1 + count_2 + count_3, (32, 32)), 1)
    marks = tl.where(found > 0, 1 << tl.arange(0, 32), 0)
    tl.store(counts_ptr + chunk, tl.sum(found, 0))
    tl.store(counts_ptr + chunks + chunk, tl.sum(marks, 0))


@triton.jit
def _coded_weight_win4_encode_kernel(
    weight_ptr,
    header_ptr,
    codes_ptr,
    starts_ptr,
    places_ptr,
    values_ptr,
    signs_ptr,
    counts_ptr,
    rate,
    decay,
    C: tl.constexpr,
):
    """Encode one chunk (8192 elements) of a weight, as `encode_chunk` does.

    If C.STEP is set, first apply an optimizer step to the chunk. `rate` is the negative learning
    rate, and `decay` is the weight decay.
    """
    parts = (header_ptr, codes_ptr, starts_ptr, places_ptr, values_ptr, signs_ptr)
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    encode_chunk(chunk, chunks, weight_ptr, parts, counts_ptr, rate, decay, C)


@triton.jit
def list_chunks(
    program,
    weight_ptr,  # numbers of 16 bits
    header_ptr,
    counts_ptr,  # (2, chunks) int32, as `encode_chunk` writes them
    lists,  # starts, (chunks + 1,) int32, places and values
    refuge,  # a heading, which of its numbers is ours, and memory for patterns; read with REFUGE
    room,  # elements of the lists
    chunks,
    each,  # chunks of one program
    BLOCK: tl.constexpr,
    REFUGE: tl.constexpr,
):
    """Write the patches (elements whose exponents have no 4-bit code) of some chunks of a weight in
    order, and the index at which each chunk's patches start.

    A chunk has 8192 elements. The kernel drops patches that do not fit into their lists. If patches
    are dropped and there is a spill buffer, the weight is also written to the spill buffer. A spill
    buffer is memory for weights whose codes do not fit into their existing tensors. With a spill
    buffer, the start indices never exceed the length of the lists, so that decoding reads no other
    memory. Without a spill buffer, the last start index is the length that the lists of patches
    need.
    """
    starts_ptr, places_ptr, values_ptr = lists
    heading_ptr, number, refuge_ptr = refuge
    first = program * each
    weight_ptr = as_patterns(weight_ptr)
    at = 0
    total = 0
    for start in range(0, chunks, BLOCK):
        place = start + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + place, mask=place < chunks, other=0)
        total += tl.sum(count, 0)
        at += tl.sum(tl.where(place < first, count, 0), 0)
    if first == 0:
        tl.store(starts_ptr, 0)
        if REFUGE:
            write_heading(heading_ptr, number, total)
    for chunk in range(first, tl.minimum(first + each, chunks)):
        marks = tl.load(counts_ptr + chunks + chunk)
        weight = weight_ptr + tl.cast(chunk, tl.int64) * CHUNK
        if (
            marks != 0
        ):  # only groups that have patches are read again; all at once took twice as long
            for group in range(32):
                if (marks >> group) & 1 == 1:
                    place = group * 256 + tl.arange(0, 256)
                    pattern = tl.load(weight + place)
                    count = is_win4_patch(pattern.to(tl.int32), header_ptr).to(tl.int32)
                    rank = at + tl.cumsum(count, 0) - count
                    is_patch = (count == 1) & (rank < room)
                    tl.store(places_ptr + rank, place.to(tl.int16), mask=is_patch)
                    tl.store(values_ptr + rank, pattern, mask=is_patch)
                    at += tl.sum(count, 0)
        tl.store(starts_ptr + chunk + 1, tl.minimum(at, room) if REFUGE else at)
        if total > (room if REFUGE else 0x7FFFFFFF):
            for start in range(0, CHUNK, 256):
                place = start + tl.arange(0, 256)
                copy = refuge_ptr + tl.cast(chunk, tl.int64) * CHUNK + place
                tl.store(copy, tl.load(weight + place))


@triton.jit(do_not_specialize=["room", "chunks", "each"])
def _coded_weight_win4_lists_kernel(
    weight_ptr,
    header_ptr,
    counts_ptr,
    starts_ptr,
    places_ptr,
    values_ptr,
    refuge_ptr,  # its heading, then patterns; read with REFUGE
    room,
    chunks,
    each,
    BLOCK: tl.constexpr,
    REFUGE: tl.constexpr,
):
    """Write a weight's patches (elements whose exponents have no 4-bit code) to two lists, of
    places and of values.

    A chunk is 8192 consecutive elements of the weight. For each chunk, the kernel also writes the
    index of its first patch in the lists. Each program calls `list_chunks` for some of the chunks.
    """
    lists = (starts_ptr, places_ptr, values_ptr)
    refuge = (refuge_ptr, 0, refuge_ptr + HEADING)
    program = tl.program_id(0)
    list_chunks(
        program,
        weight_ptr,
        header_ptr,
        counts_ptr,
        lists,
        refuge,
        room,
        chunks,
        each,
        BLOCK,
        REFUGE,
    )


@triton.jit
def _coded_weight_win4_window_kernel(counts_ptr, header_ptr):
    """Choose the window of 15 exponents that contains the most weights, and write the exponent just
    below it. The function `layout.win4_header` makes the same choice."""
    exponent = tl.arange(0, 256)
    count = tl.load(counts_ptr + exponent)
    start = 1 + tl.arange(0, 128)
    is_in = (exponent[None, :] >= start[:, None]) & (exponent[None, :] < start[:, None] + 15)
    held = tl.sum(tl.where(is_in, count[None, :], 0), 1)
    best = tl.max(held, 0)
    tl.store(header_ptr, tl.min(tl.where(held == best, start, 256), 0) - 1)


@triton.jit
def _coded_weight_win4_sum_kernel(
    parts_ptr,  # (SPLITS, M, width) fp32
    out_ptr,  # the last `width` of each row of (M, N)
    size,  # M * width
    width,
    rows_count,  # N
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the partial sums of a product, each over a block of the weight's columns, and round
    the results."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + tl.cast(split, tl.int64) * size + place, mask=is_in, other=0)
    at = (place // width + 1).to(tl.int64) * rows_count - width + place % width
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _coded_weight_win4_order_kernel(
    x_ptr,  # (M, K / 2) pair words
    ordered_ptr,  # the same, columns in the order of the wide kernel's operands
    turned_ptr,  # (K, STRIDE) 16-bit patterns, the transpose of x
    tokens_count,
    groups,  # K / 256
    stride,
    TOKENS: tl.constexpr,
):
    """Write one group of 256 columns of x (one token per row) twice: in the order that the kernel
    `_coded_weight_matrix_win4_wide_kernel` reads, and transposed.
    """
    group = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < tokens_count)[:, None]
    word = tl.arange(0, 128)
    begin = token.to(tl.int64)[:, None] * (groups * 128) + group * 128 + word[None, :]
    pair = tl.load(x_ptr + begin, mask=is_token, other=0)
    parts = tl.reshape(pair, (TOKENS, 4, 2, 4, 4))  # pair, half, four lanes, lane
    tl.store(
        ordered_ptr + begin,
        tl.reshape(tl.permute(parts, (0, 2, 1, 4, 3)), (TOKENS, 128)),
        mask=is_token,
    )
    both = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))
    turned = tl.trans(tl.reshape(both, (TOKENS, 256)))
    column = group.to(tl.int64) * 256 + tl.arange(0, 256)
    at = turned_ptr + column[:, None] * stride + token[None, :]
    tl.store(at, turned, mask=(token < stride)[None, :])
