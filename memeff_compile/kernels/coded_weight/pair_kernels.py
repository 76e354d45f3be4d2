# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions that the kernels of all codecs (compressed formats of weights) share. Some
functions process pairs of weights, each pair in one 32-bit word. Other functions process patches
(elements whose exponents have no code) or histograms.

A pair word is a 32-bit word that contains two neighbouring bf16 weights. The sign and mantissa bits
of each weight come from one byte. The kernel inserts the exponents between sign and mantissa, for
both weights at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK: tl.constexpr = tl.constexpr(8192)
HEADING: tl.constexpr = tl.constexpr(8)  # 16-bit words before a value in a spill buffer


@triton.jit
def as_patterns(pointer):
    """Return a pointer to 16-bit numbers as a pointer to bit patterns."""
    return pointer.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def as_words(pointer):
    """Return a pointer to 16-bit numbers as a pointer to 32-bit words of two numbers."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def even_bytes(word):
    """Return two bf16 weights whose exponent bits are still zero, packed into one 32-bit word.

    Their signs and mantissas are the bytes 0 and 2 of `word`.
    """
    return (word & 0x007F007F) | ((word << 8) & -0x7FFF8000)


@triton.jit
def odd_bytes(word):
    """Return two bf16 weights whose exponent bits are still zero, packed into one 32-bit word.

    Their signs and mantissas are the bytes 1 and 3 of `word`.
    """
    return ((word >> 8) & 0x007F007F) | (word & -0x7FFF8000)


@triton.jit
def narrow_fields(word, PAIR: tl.constexpr, FIELD: tl.constexpr):
    """Return two bf16 weights whose exponent bits are still zero, packed into one 32-bit word.

    `word` contains eight fields. A field is the sign and mantissa of one weight, in FIELD bits: 1,
    2 or 4. The two weights have the fields PAIR and PAIR + 4.
    """
    low = word >> (FIELD * PAIR)
    high = word >> (FIELD * (PAIR + 4))
    both = (low & ((1 << FIELD) - 1)) | ((high & ((1 << FIELD) - 1)) << 16)
    sign = (both << (16 - FIELD)) & -0x7FFF8000
    return sign | ((both & (((1 << (FIELD - 1)) - 1) * 0x00010001)) << (8 - FIELD))


@triton.jit
def low_float(pair):
    """Return the bf16 number in the low half of a 32-bit word as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_float(pair):
    """Return the bf16 number in the high half of a 32-bit word as fp32."""
    return (pair & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_bits(value):
    """Return a finite fp32 value rounded to bf16, as bits in the low half of a 32-bit word."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _stepped(weight, gradient, rate, decay, HAS_DECAY: tl.constexpr):
    """Return weight - lr * gradient as bf16 bits, rounded as torch.optim.SGD rounds it.

    `rate` is -lr.
    """
    if HAS_DECAY:
        gradient = (_bits_or_nan(tl.fma(weight, decay, gradient)) << 16).to(
            tl.float32, bitcast=True
        )
    return _bits_or_nan(tl.fma(gradient, rate, weight))


@triton.jit
def _bits_or_nan(value):
    """Return an fp32 value rounded to bf16, as bits in the low half of a 32-bit word.

    NaN becomes the bits that a GPU's cast gives.
    """
    return tl.where(value == value, _rounded_bits(value), 0x7FFF)


@triton.jit
def stepped_pair(pair, gradients, rate, decay, HAS_DECAY: tl.constexpr):
    """Return two bf16 weights in one 32-bit word after an optimizer step.

    The gradients of both weights are passed in one word too.
    """
    low = _stepped(low_float(pair), low_float(gradients), rate, decay, HAS_DECAY)
    high = _stepped(high_float(pair), high_float(gradients), rate, decay, HAS_DECAY)
    return low | (high << 16)


@triton.jit
def step_patches(patches, gradient_ptr, first, rate, decay, WEIGHTS: tl.constexpr, C: tl.constexpr):
    """Apply the optimizer step to the patches (elements whose exponents have no code) of one
    program, with their gradients.

    When this function returns, all threads have read the gradients, so the caller may overwrite
    them.
    """
    begin, end, places_ptr, values_ptr = patches
    inside = (first % CHUNK).to(tl.int32)
    if end > begin:
        for start in range(begin, end, C.PATCHES):
            each = start + tl.arange(0, C.PATCHES)
            place = tl.load(places_ptr + each, mask=each < end, other=-1).to(tl.int32) - inside
            is_ours = (place >= 0) & (place < WEIGHTS)
            weight = tl.load(values_ptr + each, mask=is_ours, other=0).to(tl.int32)
            gradient = tl.load(gradient_ptr + first + place, mask=is_ours, other=0).to(tl.int32)
            moved = _stepped(low_float(weight), low_float(gradient), rate, decay, C.HAS_DECAY)
            tl.store(values_ptr + each, moved.to(tl.int16), mask=is_ours)
        tl.debug_barrier()


@triton.jit
def scaled(pair, norms_ptr, place, BLOCK: tl.constexpr):
    """Multiply both bf16 weights of a 32-bit word by the normaliser (scale) of the block that
    contains the weight with the index `place`."""
    if BLOCK == 0:
        return pair
    scale = 1.0 + tl.load(norms_ptr + place // BLOCK).to(tl.float32) / 128
    low = _rounded_bits(low_float(pair) * scale)
    return low | (_rounded_bits(high_float(pair) * scale) << 16)


@triton.jit
def scaled_pair(pair, scale):
    """Multiply both bf16 numbers in each word of `pair` by those in the same word of `scale`.

    A word has 32 bits, and contains two bf16 numbers. The products are rounded to nearest, ties to
    even. The function uses one multiply-add instruction, which adds -0.0. Adding 0.0 would turn a
    product of -0.0 into 0.0.
    """
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pair, scale, tl.full(pair.shape, -0x7FFF8000, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def rounded_pair(pair, scale, PACKED: tl.constexpr):
    """Multiply the two bf16 numbers of a 32-bit word by those of another word, and round to bf16.

    The numbers must be finite. With PACKED, `scaled_pair` computes both products with one
    instruction. Without PACKED, ordinary operations compute the same result.
    """
    if PACKED:
        found = scaled_pair(pair, scale)
    else:
        low = _rounded_bits(low_float(pair) * low_float(scale))
        found = low | (_rounded_bits(high_float(pair) * high_float(scale)) << 16)
    return found


@triton.jit
def spread_fields(word, FIELD: tl.constexpr):
    """Spread the sign and mantissa bits of eight weights over the two halves of a 32-bit word.

    `word` contains FIELD bits for each weight of four pairs of neighbouring weights. The lower bits
    of `word` belong to the first weights of the pairs, the upper bits to the second weights. In the
    result, the first weights have their bits from bit 0 on, the second weights from bit 16 on. If
    FIELD is 4, `word` has this order already.
    """
    if FIELD == 2:
        word = (word & 0xFF) | ((word << 8) & 0xFF0000)
    if FIELD == 1:
        word = (word & 0xF) | ((word << 12) & 0xF0000)
    return word


@triton.jit
def narrow_pair(fields, codes, PAIR: tl.constexpr, FIELD: tl.constexpr):
    """Return pair number PAIR of the eight weights in a word of codes, as one 32-bit word.

    `fields` contains the weights' sign and mantissa bits, 1, 2 or 4 for each weight. A weight's
    code is its exponent minus `base`, the exponent just below those that have codes. The codes are
    not decoded: the returned numbers have the codes as exponents. The caller multiplies the numbers
    by 2^base and by a normaliser, the scale of a block of weights. The first weight of the pair is
    in the lower half of the returned word.
    """
    if FIELD == 2:  # one product moves sign and mantissa, as the bits of a half are eight
        signs = (fields * (0x4040 >> (2 * PAIR))) & -0x7FBF7FC0
    else:
        signs = (fields << (16 - FIELD * (PAIR + 1))) & -0x7FFF8000
        if FIELD == 4:
            moved = fields << 4 if PAIR == 0 else fields >> (4 * PAIR - 4)
            signs = signs | (moved & 0x00700070)
    moved = codes << (7 - 4 * PAIR) if PAIR < 2 else codes >> (4 * PAIR - 7)
    return signs | (moved & 0x07800780)


@triton.jit
def load_norm(norms_ptr, group, is_in, PAIR: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Load one 7-bit normaliser (scale) for each group of 256 weights.

    A group of weights may have several normalisers. Each thread of a warp has four pairs of the
    group's weights, numbered 0 to 3. The loaded normaliser belongs to pair number PAIR of sixteen
    threads: the warp's first sixteen if HALF is 0, its last sixteen if HALF is 1.
    """
    if BLOCK >= 256:
        at = group // (BLOCK // 256)
    else:
        at = group * (256 // BLOCK) + (64 * PAIR + 32 * HALF) // BLOCK
    return tl.load(norms_ptr + at, mask=is_in, other=0)


@triton.jit
def pair_scale(norms_ptr, group, power, lane, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    """Return 32-bit words, each with two copies of a bf16 number: a power of two times a group's
    normaliser (scale).

    The shape is (groups, 32) if BLOCK is 32, otherwise (groups, 1).
    """
    is_in = group >= 0
    first = load_norm(norms_ptr, group, is_in, PAIR, 0, BLOCK).to(tl.int32)[:, None]
    if BLOCK == 32:
        last = load_norm(norms_ptr, group, is_in, PAIR, 1, BLOCK).to(tl.int32)[:, None]
        first = tl.where(lane < 16, first, last)
    return (first | power) * 0x00010001


@triton.jit
def first_patches(patches, PATCHES: tl.constexpr):
    """Load the positions and values of the first PATCHES patches (elements of a weight whose
    exponents have no code) of a range.

    A patch's position is its index in its chunk of 8192 elements. If a kernel calls this function
    early, `store_patches` does not wait for memory when it stores the patches. If the range has
    fewer than PATCHES patches, the results are filled up with the position -1 and the value 0.
    """
    begin, end, places_ptr, values_ptr = patches
    each = begin + tl.arange(0, PATCHES)
    place = tl.load(places_ptr + each, mask=each < end, other=-1).to(tl.int32)
    return place, tl.load(values_ptr + each, mask=each < end, other=0)


@triton.jit
def store_patches(patches, loaded, out_ptr, first, WEIGHTS: tl.constexpr, PATCHES: tl.constexpr):
    """Overwrite decoded weights with the patches (elements whose exponents have no code). The
    program has stored `WEIGHTS` decoded weights, from index `first` on.

    `first_patches` has already loaded the first of these patches.
    """
    begin, end, places_ptr, values_ptr = patches
    place, value = loaded
    inside = (first % CHUNK).to(tl.int32)
    if end > begin:
        tl.debug_barrier()
        is_ours = (place >= inside) & (place < inside + WEIGHTS)
        tl.store(out_ptr + first + place - inside, value, mask=is_ours)
        for start in range(begin + PATCHES, end, PATCHES):
            each = start + tl.arange(0, PATCHES)
            place = tl.load(places_ptr + each, mask=each < end, other=-1).to(tl.int32) - inside
            is_ours = (place >= 0) & (place < WEIGHTS)
            value = tl.load(values_ptr + each, mask=is_ours, other=0)
            tl.store(out_ptr + first + place, value, mask=is_ours)


@triton.jit
def is_win4_patch(pattern, header_ptr):
    """Return which 16-bit weight patterns have an exponent outside of the window (the range of
    exponents that have 4-bit codes).
    """
    base = tl.load(header_ptr)
    code = ((pattern >> 7) & 0xFF) - base
    return ((code <= 0) | (code > 15)) & ((pattern & 0x7FFF) != 0)


@triton.jit
def is_tier_patch(pattern, header_ptr):
    """Return which 16-bit weight patterns have an exponent outside of all three windows (ranges of
    exponents that have codes)."""
    wide = tl.load(header_ptr + 2)
    exponent = (pattern >> 7) & 0xFF
    return ((exponent < wide) | (exponent >= wide + 21)) & (exponent != 0)


@triton.jit(do_not_specialize=["room"])
def _coded_weight_pair_patches_kernel(
    weight_ptr,  # 16-bit patterns
    header_ptr,
    starts_ptr,  # (chunks + 1,) int32
    places_ptr,
    values_ptr,
    room,  # elements of the list
    BLOCK: tl.constexpr,
):
    """Write the positions and values of one chunk's patches (weights whose exponents have no code)
    to two lists.

    A chunk has 8192 weights. The compressed format (codec) is `tier`, which codes exponents in 2, 4
    or 8 bits. The patches have the order of the weights. The kernel drops patches beyond the end of
    the lists.
    """
    chunk = tl.program_id(0)
    at = tl.load(starts_ptr + chunk)
    if tl.load(starts_ptr + chunk + 1) > at:
        for first in range(0, CHUNK, BLOCK):
            place = first + tl.arange(0, BLOCK)
            pattern = tl.load(weight_ptr + chunk.to(tl.int64) * CHUNK + place)
            is_patch = is_tier_patch(pattern.to(tl.int32), header_ptr)
            count = is_patch.to(tl.int32)
            found = tl.sum(count, 0)
            # only for the few chunks with patches: a prefix sum takes longer than reading the
            # weights
            if found > 0:
                rank = at + tl.cumsum(count, 0) - count
                is_patch &= rank < room
                tl.store(places_ptr + rank, place.to(tl.int16), mask=is_patch)
                tl.store(values_ptr + rank, pattern, mask=is_patch)
            at += found


@triton.jit
def write_heading(refuge_ptr, place, needed):
    """Write the needed length of a coded tensor to a spill buffer's header, as two 16-bit words.

    A compressed weight has coded tensors whose needed lengths depend on the weight's values.
    `needed` is the length that one of these tensors needs. The two words are entry number `place`
    in the header. A spill buffer is memory for weights whose new codes do not fit into their coded
    tensors.
    """
    tl.store(refuge_ptr + 2 * place, (needed & 0xFFFF).to(tl.int16))
    tl.store(refuge_ptr + 2 * place + 1, (needed >> 16).to(tl.int16))


@triton.jit(do_not_specialize=["room_0", "room_1", "room_2", "size"])
def _coded_weight_pair_shelter_kernel(
    value_ptr,  # 16-bit patterns
    needed_ptr,  # (COUNT,) int32
    refuge_ptr,  # its heading, then patterns
    room_0,
    room_1,
    room_2,
    size,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the needed lengths of a weight's COUNT lists to a buffer, and also the weight if a list
    is too short.

    A list is a coded tensor whose needed length depends on the weight's values. An example is the
    list of elements whose exponents have no code. The buffer is a spill buffer: memory for weights
    whose new codes do not fit into their coded tensors. The lengths go to the buffer's header.
    """
    is_short = tl.load(needed_ptr) > room_0
    if COUNT == 3:
        is_short |= (tl.load(needed_ptr + 1) > room_1) | (tl.load(needed_ptr + 2) > room_2)
    if tl.program_id(0) == 0:
        for place in tl.static_range(COUNT):
            write_heading(refuge_ptr, place, tl.load(needed_ptr + place))
    if is_short:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(value_ptr + place, mask=place < size)
            tl.store(refuge_ptr + HEADING + place, value, mask=place < size)


@triton.jit(do_not_specialize=["every"])
def _coded_weight_pair_histogram_kernel(
    weight_ptr, counts_ptr, every, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count how often each exponent occurs in every n-th run of weights, where n is `every`.

    A run consists of BLOCKS * BLOCK consecutive weights. The counts do not depend on the order of
    the programs.
    """
    first = tl.program_id(0).to(tl.int64) * every * BLOCKS * BLOCK
    counts = tl.zeros((256,), tl.int32)
    for block in range(BLOCKS):
        pattern = tl.load(weight_ptr + first + block * BLOCK + tl.arange(0, BLOCK))
        counts += tl.histogram((pattern.to(tl.int32) >> 7) & 0xFF, 256)
    tl.atomic_add(counts_ptr + tl.arange(0, 256), counts, sem="relaxed")


@triton.jit
def _sign_bytes(pair):
    """Return the sign and mantissa of the two bf16 values in a 32-bit word as two bytes, 16 bits
    apart."""
    return ((pair >> 8) & 0x00800080) | (pair & 0x007F007F)


@triton.jit
def _coded_weight_pair_signs_kernel(words_ptr, signs_ptr, BLOCK: tl.constexpr):
    """Copy the sign and mantissa bits of one chunk of bf16 weights from `words_ptr` to `signs_ptr`.

    A chunk has 8192 weights. The kernel runs when a weight is compressed.
    """
    first = tl.program_id(0).to(tl.int64) * (CHUNK // 8)
    for start in range(0, CHUNK // 8, BLOCK):
        word = start + tl.arange(0, BLOCK)
        group = first // 32 + word // 32
        lane = word % 32
        pairs = words_ptr + group * 128 + lane
        low = _sign_bytes(tl.load(pairs)) | (_sign_bytes(tl.load(pairs + 32)) << 8)
        high = _sign_bytes(tl.load(pairs + 64)) | (_sign_bytes(tl.load(pairs + 96)) << 8)
        tl.store(signs_ptr + group * 64 + lane, low)
        tl.store(signs_ptr + group * 64 + 32 + lane, high)
