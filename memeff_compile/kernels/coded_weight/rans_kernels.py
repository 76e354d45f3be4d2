# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""GPU kernels of the codec rans, an entropy coder for the exponents of weights. One warp decodes a
chunk of 16,384 weights from 32 interleaved streams.

Each thread decodes one symbol (an exponent) per step. The words that a warp reads in one step are
contiguous. So a prefix sum over the warp gives the position of each thread's next word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pair_kernels import as_words, even_bytes, narrow_fields, odd_bytes, scaled, stepped_pair

RANS_CHUNK: tl.constexpr = tl.constexpr(16384)
GROUPS: tl.constexpr = tl.constexpr(64)  # of 256 weights, eight steps each


@triton.jit
def _next(state, place, header_ptr, words_ptr):
    """Decode one symbol (an exponent) per thread of a warp.

    Return the symbols, the decoder states, and the position of the next words.
    """
    slot = tl.load(header_ptr + (state & 1023).to(tl.int32)).to(tl.uint32, bitcast=True)
    state = (((slot >> 8) & 0xFFF) + 1) * (state >> 10) + (slot >> 20)
    needs = state < 65536
    count = needs.to(tl.int32)
    rank = tl.cumsum(count, 1) - count
    word = tl.load(words_ptr + place[:, None] + rank, mask=needs, other=0).to(tl.uint32) & 0xFFFF
    state = tl.where(needs, (state << 16) | word, state)
    return (slot & 255).to(tl.int32), state, place + tl.sum(count, 1)


@triton.jit
def _next_pair(state, place, header_ptr, words_ptr):
    low, state, place = _next(state, place, header_ptr, words_ptr)
    high, state, place = _next(state, place, header_ptr, words_ptr)
    return (low << 7) | (high << 23), state, place


@triton.jit(do_not_specialize=["chunks"])
def _coded_weight_rans_decode_kernel(
    header_ptr,  # (1024,) slots
    words_ptr,  # 16-bit words
    word_starts_ptr,  # (chunks + 1,) int32
    states_ptr,
    signs_ptr,
    norms_ptr,
    out_ptr,  # numbers of 16 bits
    rate,
    decay,
    chunks,
    C: tl.constexpr,
    # STEP: out holds gradients, and gets the weights moved along them
):
    """Decode as many chunks of weights as the program has warps."""
    out_words_ptr = as_words(out_ptr)
    chunk = tl.program_id(0) * C.WARPS + tl.arange(0, C.WARPS)
    is_chunk = chunk < chunks
    chunk = tl.where(is_chunk, chunk, 0)  # a separate lane writes the same values again
    lane = tl.arange(0, 32)[None, :]
    state = tl.load(states_ptr + chunk[:, None] * 32 + lane).to(tl.uint32, bitcast=True)
    place = tl.load(word_starts_ptr + chunk)
    group = chunk.to(tl.int64)[:, None] * GROUPS
    for _ in range(GROUPS):
        for half in tl.static_range(2):
            even, state, place = _next_pair(state, place, header_ptr, words_ptr)
            odd, state, place = _next_pair(state, place, header_ptr, words_ptr)
            if C.FIELD == 8:
                signs = tl.load(signs_ptr + group * 64 + 32 * half + lane)
                even |= even_bytes(signs)
                odd |= odd_bytes(signs)
            else:
                signs = tl.load(signs_ptr + group * 32 + lane).to(tl.int32)
                even |= narrow_fields(signs, 2 * half, C.FIELD)
                odd |= narrow_fields(signs, 2 * half + 1, C.FIELD)
                first = group * 256 + 128 * half + 2 * lane
                even = scaled(even, norms_ptr, first, C.BLOCK)
                odd = scaled(odd, norms_ptr, first + 64, C.BLOCK)
            out = out_words_ptr + group * 128 + 64 * half + lane
            if C.STEP:
                gradient = tl.load(out, mask=is_chunk[:, None], other=0)
                even = stepped_pair(even, gradient, rate, decay, C.HAS_DECAY)
                gradient = tl.load(out + 32, mask=is_chunk[:, None], other=0)
                odd = stepped_pair(odd, gradient, rate, decay, C.HAS_DECAY)
            tl.store(out, even, mask=is_chunk[:, None])
            tl.store(out + 32, odd, mask=is_chunk[:, None])
        group += 1


@triton.jit(do_not_specialize=["chunks"])
def _coded_weight_rans_encode_kernel(
    weight_ptr,  # 16-bit patterns
    slots_ptr,  # (2, 256) int32: slots of an exponent, and those before it
    words_ptr,
    word_starts_ptr,
    states_ptr,
    counts_ptr,  # (chunks,) int32, with COUNT
    chunks,
    COUNT: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Encode as many chunks of weights as the program has warps. In one step, each thread of a warp
    encodes one weight. The kernel encodes a chunk's last weights first, because the decoder returns
    weights in the reverse of the order of encoding.

    If COUNT is set, the kernel only counts the words that the encoded chunk needs.
    """
    chunk = tl.program_id(0) * WARPS + tl.arange(0, WARPS)
    is_chunk = chunk < chunks
    chunk = tl.where(is_chunk, chunk, 0)
    lane = tl.arange(0, 32)[None, :]
    state = tl.full((WARPS, 32), 65536, tl.uint32)
    total = tl.zeros((WARPS,), tl.int32)
    if not COUNT:
        place = tl.load(word_starts_ptr + chunk + 1)
    begin = chunk.to(tl.int64)[:, None] * RANS_CHUNK + 2 * lane
    for back in range(GROUPS):
        group = GROUPS - 1 - back
        for field in tl.static_range(8):
            at = begin + group * 256 + (7 - field) // 2 * 64 + (7 - field) % 2
            pattern = tl.load(weight_ptr + at).to(tl.int32)
            exponent = (pattern >> 7) & 0xFF
            slots = tl.load(slots_ptr + exponent).to(tl.uint32)
            before = tl.load(slots_ptr + 256 + exponent).to(tl.uint32)
            emits = (state >> 22) >= slots
            count = emits.to(tl.int32)
            if COUNT:
                total += tl.sum(count, 1)
            else:
                place -= tl.sum(count, 1)
                rank = tl.cumsum(count, 1) - count
                tl.store(
                    words_ptr + place[:, None] + rank,
                    (state & 0xFFFF).to(tl.int16),
                    mask=emits & is_chunk[:, None],
                )
            state = tl.where(emits, state >> 16, state)
            state = ((state // slots) << 10) + state % slots + before
    if COUNT:
        tl.store(counts_ptr + chunk, total, mask=is_chunk)
    else:
        tl.store(states_ptr + chunk[:, None] * 32 + lane, state.to(tl.int32, bitcast=True))
