# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""GPU kernels of the codec `tier`, which stores the exponents of weights as codes in three streams.

Each weight has a 2-bit code in the first stream. If this code is 3, the weight has another 2-bit
code in the second stream. If that code is also 3, the weight has a 4-bit code in the third stream.
A chunk is a block of 8192 weights. A table contains the positions in the second and the third
stream at which each chunk's codes begin.

A thread decodes one word of the first stream, which contains sixteen 2-bit codes. Consider the
chunk's part of the second stream. A thread's position in this part is the number of codes equal to
3 in the chunk's earlier words. The kernel finds this position with one bit count and one prefix sum
per sixteen weights. A second bit count and a second prefix sum give the thread's position in the
third stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pair_kernels import (
    as_patterns,
    as_words,
    even_bytes,
    first_patches,
    is_tier_patch,
    narrow_fields,
    odd_bytes,
    scaled,
    step_patches,
    stepped_pair,
    store_patches,
)

CHUNK: tl.constexpr = tl.constexpr(8192)
WORDS: tl.constexpr = tl.constexpr(512)  # of sixteen codes, per chunk


@triton.jit
def _count_bits(word):
    """Count the set bits at even positions of a non-negative 32-bit word."""
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@triton.jit
def _threes(word):
    """Return a word in which, for each two-bit field of the given word that contains a 3, the
    field's lower bit is set.
    """
    return word & (word >> 1) & 0x55555555


@triton.jit
def _window(stream_ptr, at, is_read):
    """Return 64 bits of a stream of exponent codes from bit `at` on.

    The caller uses at most 33 of these bits. Where `is_read` is false, no memory is read.
    """
    word = at >> 5
    low = tl.load(stream_ptr + word, mask=is_read, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(stream_ptr + word + 1, mask=is_read, other=0).to(tl.int64)
    return ((high << 32) | low) >> (at & 31)


@triton.jit
def _long_window(stream_ptr, at, is_read):
    """Return 64 bits of a stream of exponent codes, starting at bit `at`, or 0 where `is_read` is
    false."""
    word = at >> 5
    shift = (at & 31).to(tl.int64)
    low = tl.load(stream_ptr + word, mask=is_read, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(stream_ptr + word + 1, mask=is_read, other=0).to(tl.int64)
    top = tl.load(stream_ptr + word + 2, mask=is_read, other=0).to(tl.int64)
    both = ((high << 32) | low) >> shift
    keep = ((1 << (63 - shift)) << 1) - 1  # an arithmetic shift fills with the sign
    return (both & keep) | ((top << (63 - shift)) << 1)


@triton.jit
def _windows(header_ptr):
    """Return the start of each of the windows, which are the ranges of 3, 6 and 21 exponents that
    have codes.
    """
    return tl.load(header_ptr), tl.load(header_ptr + 1), tl.load(header_ptr + 2)


@triton.jit
def _take(first_codes, FIELD: tl.constexpr, second, third, windows):
    """Return the exponent of one weight, and the remaining bits of `second` and `third`.

    The codec `tier` stores exponents as codes in three streams. `first_codes` contains the first
    stream's 2-bit codes of sixteen weights, and FIELD is the index of one weight. `second` and
    `third` contain the codes of the other two streams that are not decoded yet. The next code is in
    the lowest bits. A weight has a code in `second` only if its 2-bit code is 3. The weight has a
    code in `third` only if both earlier codes are 3.
    """
    narrow, middle, wide = windows
    code = (first_codes >> (2 * FIELD)) & 3
    in_second = code == 3
    code_2 = second & 3
    second = tl.where(in_second, (second >> 2) & 0x3FFFFFFF, second)
    in_third = in_second & (code_2 == 3)
    code_3 = third.to(tl.int32) & 15
    third = tl.where(in_third, third >> 4, third)
    low = narrow + code
    mid = middle + code_2
    mid += tl.where(mid >= narrow, 3, 0)
    high = wide + code_3
    high += tl.where(high >= middle, 6, 0)
    high = tl.where(code_3 == 15, 0, high)
    return tl.where(in_third, high, tl.where(in_second, mid, low)), second, third


@triton.jit
def _take_pair(first_codes, PAIR: tl.constexpr, second, third, windows):
    low, second, third = _take(first_codes, 2 * PAIR, second, third, windows)
    high, second, third = _take(first_codes, 2 * PAIR + 1, second, third, windows)
    return (low << 7) | (high << 23), second, third


@triton.jit
def _coded_weight_tier_decode_kernel(
    header_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    stream_starts_ptr,  # (chunks + 1, 2) int32 words
    starts_ptr,
    places_ptr,
    values_ptr,
    signs_ptr,
    norms_ptr,
    out_ptr,  # numbers of 16 bits
    rate,
    decay,
    C: tl.constexpr,
    # STEP: out holds gradients, and gets the weights moved along them
):
    """Decode one chunk (8192 weights) of a weight of the codec `tier`, which codes exponents in 2,
    4 or 8 bits."""
    words_ptr, out_ptr = as_words(out_ptr), as_patterns(out_ptr)
    chunk = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, WORDS)
    begin = tl.load(starts_ptr + chunk)  # long before they are needed
    end = tl.load(starts_ptr + chunk + 1)
    patches = (begin, end, places_ptr, values_ptr)
    windows = _windows(header_ptr)
    first = tl.load(first_ptr + chunk * WORDS + word)
    threes = _threes(first)
    count = _count_bits(threes)
    before = tl.cumsum(count, 0) - count
    start = tl.load(stream_starts_ptr + 2 * chunk)
    second = _window(second_ptr + start, 2 * before, count > 0)
    # Fields after the last belong to another thread: make them zeros.
    second = (second & ((1 << (2 * count).to(tl.int64)) - 1)).to(tl.int32)
    count = _count_bits(_threes(second))
    before = tl.cumsum(count, 0) - count
    start = tl.load(stream_starts_ptr + 2 * chunk + 1)
    third = _long_window(third_ptr + start, 4 * before, count > 0)
    unit = word // 32  # of 512 weights: two groups
    lane = word % 32
    out = words_ptr + chunk * (CHUNK // 2) + unit * 256 + lane
    place = chunk * CHUNK + unit * 512 + 2 * lane
    if C.FIELD == 8:
        sign_at = signs_ptr + chunk * (CHUNK // 4) + unit * 128 + lane
    else:
        sign_at = signs_ptr + chunk * (CHUNK // 8) + unit * 64 + lane
    if C.STEP:
        step_patches(patches, out_ptr, chunk * CHUNK, rate, decay, CHUNK, C)
    for half in tl.static_range(4):
        even, second, third = _take_pair(first, 2 * half, second, third, windows)
        odd, second, third = _take_pair(first, 2 * half + 1, second, third, windows)
        if C.FIELD == 8:
            signs = tl.load(sign_at + 32 * half)
            even |= even_bytes(signs)
            odd |= odd_bytes(signs)
        else:
            signs = tl.load(sign_at + 32 * (half // 2)).to(tl.int32)
            even |= narrow_fields(signs, 2 * (half % 2), C.FIELD)
            odd |= narrow_fields(signs, 2 * (half % 2) + 1, C.FIELD)
            even = scaled(even, norms_ptr, place + 128 * half, C.BLOCK)
            odd = scaled(odd, norms_ptr, place + 128 * half + 64, C.BLOCK)
        if C.STEP:
            even = stepped_pair(even, tl.load(out + 64 * half), rate, decay, C.HAS_DECAY)
            odd = stepped_pair(odd, tl.load(out + 64 * half + 32), rate, decay, C.HAS_DECAY)
        tl.store(out + 64 * half, even)
        tl.store(out + 64 * half + 32, odd)
    if end > begin:  # seldom
        loaded = first_patches(patches, C.PATCHES)
        store_patches(patches, loaded, out_ptr, chunk * CHUNK, CHUNK, C.PATCHES)


@triton.jit
def _codes(pattern, windows):
    """Return three codes of a weight's exponent, one for each window (range of exponents that have
    codes). Also return the byte that contains the weight's sign and mantissa.

    `pattern` contains the weight's 16 bits.
    """
    narrow, middle, wide = windows
    exponent = (pattern >> 7) & 0xFF
    first = exponent - narrow
    first = tl.where((first >= 0) & (first < 3), first, 3)
    second = exponent - middle
    is_inside = (second >= 0) & (second < 6)
    second -= tl.where(exponent >= narrow + 3, 3, 0)
    second = tl.where(is_inside, second, 3)
    third = exponent - wide
    is_coded = (third >= 0) & (third < 21)
    third -= tl.where(exponent >= middle + 6, 6, 0)
    third = tl.where(is_coded, third, 15)
    byte = ((pattern >> 8) & 0x80) | (pattern & 0x7F)
    return first, second, third, tl.where(is_coded | (exponent == 0), byte, 0)


@triton.jit
def _coded_weight_tier_count_kernel(weight_ptr, header_ptr, counts_ptr, BLOCK: tl.constexpr):
    """Count the 32-bit words that the codes of one chunk (8192 weights) take, and the chunk's
    patches (weights stored whole).

    The codec `tier` stores exponents as codes in three streams. Each stream has a window, which is
    a range of exponents. A weight has a code in the second stream if its exponent is outside the
    first window. The weight has a code in the third stream if its exponent is also outside the
    second window. The kernel counts the words of the second and of the third stream. The first
    stream needs no count: it has one code for each weight. A weight is a patch if its exponent is
    nonzero and in none of the three windows.
    """
    chunk = tl.program_id(0).to(tl.int64)
    windows = _windows(header_ptr)
    in_second = tl.zeros((BLOCK,), tl.int32)
    in_third = tl.zeros((BLOCK,), tl.int32)
    patches = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, CHUNK, BLOCK):
        pattern = tl.load(weight_ptr + chunk * CHUNK + start + tl.arange(0, BLOCK)).to(tl.int32)
        first, second, _, _ = _codes(pattern, windows)
        in_second += (first == 3).to(tl.int32)
        in_third += ((first == 3) & (second == 3)).to(tl.int32)
        patches += is_tier_patch(pattern, header_ptr).to(tl.int32)
    tl.store(counts_ptr + chunk * 3, (tl.sum(in_second, 0) + 15) // 16)
    tl.store(counts_ptr + chunk * 3 + 1, (tl.sum(in_third, 0) + 7) // 8)
    tl.store(counts_ptr + chunk * 3 + 2, tl.sum(patches, 0))


@triton.jit
def _put(pattern, FIELD: tl.constexpr, made, windows):
    """Append the codes of a weight's exponent to `made`, the codes of earlier weights.

    The codec `tier` gives each weight one, two or three codes, each in a different stream.
    `pattern` contains the weight's 16 bits. Return all codes, and the byte of the weight's sign and
    mantissa.
    """
    first, second, third, count_2, count_3 = made
    code, code_2, code_3, byte = _codes(pattern, windows)
    first |= code << (2 * FIELD)
    in_second = code == 3
    second |= tl.where(in_second, code_2.to(tl.int64) << (2 * count_2).to(tl.int64), 0)
    count_2 += in_second.to(tl.int32)
    in_third = in_second & (code_2 == 3)
    third |= tl.where(in_third, code_3.to(tl.int64) << (4 * count_3).to(tl.int64), 0)
    count_3 += in_third.to(tl.int32)
    return (first, second, third, count_2, count_3), byte


@triton.jit
def _append(stream_ptr, bits, start, at, room, is_any):
    """Write at most 64 bits of codes to a stream that contains zeros. The first of them is bit
    `at`, counted from the beginning of the word with the index `start`.

    No other thread sets the same bits, so the order of threads does not matter. Bits after
    the stream's `room` words are dropped.
    """
    word = start + (at >> 5)
    shift = (at & 31).to(tl.int64)
    low = bits << shift
    rest = ((bits >> 1) & 0x7FFFFFFFFFFFFFFF) >> (63 - shift)
    for place in tl.static_range(3):
        value = (low >> (32 * place)).to(tl.int32) if place < 2 else rest.to(tl.int32)
        is_set = is_any & (value != 0) & (word + place < room)
        tl.atomic_or(stream_ptr + word + place, value, mask=is_set, sem="relaxed")


@triton.jit(do_not_specialize=["second_room", "third_room"])
def _coded_weight_tier_encode_kernel(
    words_ptr,  # pair words of the weight
    header_ptr,
    first_ptr,
    second_ptr,  # zeroed
    third_ptr,  # zeroed
    stream_starts_ptr,
    signs_ptr,
    second_room,  # words of the streams
    third_room,
):
    """Write the exponent codes, the signs and the mantissas of one chunk (8192 weights).

    The codec `tier` has three streams of codes: `first_ptr`, `second_ptr` and `third_ptr`. Signs
    and mantissas go to `signs_ptr`.
    """
    chunk = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, WORDS)
    windows = _windows(header_ptr)
    unit = word // 32
    lane = word % 32
    pairs = words_ptr + chunk * (CHUNK // 2) + unit * 256 + lane
    sign_at = signs_ptr + chunk * (CHUNK // 4) + unit * 128 + lane
    none = tl.zeros((WORDS,), tl.int32)
    empty = tl.zeros((WORDS,), tl.int64)
    made = (none, empty, empty, none, none)  # the three words, and how many are in the last two
    for pair in tl.static_range(8):
        weights = tl.load(pairs + 32 * pair)
        made, low = _put(weights & 0xFFFF, 2 * pair, made, windows)
        made, high = _put((weights >> 16) & 0xFFFF, 2 * pair + 1, made, windows)
        if pair % 2 == 0:
            signs = low | (high << 16)
        else:
            tl.store(sign_at + 32 * (pair // 2), signs | ((low | (high << 16)) << 8))
    first, second, third, count_2, count_3 = made
    tl.store(first_ptr + chunk * WORDS + word, first)
    start = tl.load(stream_starts_ptr + 2 * chunk)
    before = tl.cumsum(count_2, 0) - count_2
    _append(second_ptr, second, start, 2 * before, second_room, count_2 > 0)
    start = tl.load(stream_starts_ptr + 2 * chunk + 1)
    before = tl.cumsum(count_3, 0) - count_3
    _append(third_ptr, third, start, 4 * before, third_room, count_3 > 0)
