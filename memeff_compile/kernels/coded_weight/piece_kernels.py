# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels for compressed weights whose coded tensors lie in one allocation per weight. One launch
applies the optimizer step to several weights and encodes them again. A second launch writes their
patches (elements whose exponents have no 4-bit code).

The compressed format (codec) is `win4`, which stores exponents as 4-bit codes without loss. For a
small weight, launching a kernel takes longer on the CPU than decoding takes on the GPU. The
positions of a weight's tensors inside its allocation follow from the weight's size. So a kernel
takes one pointer per weight (the module `layout` computes the positions).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pair_kernels import CHUNK, as_patterns
from .win4_kernels import decode_some, encode_chunk, list_chunks

APART: tl.constexpr = tl.constexpr(128)  # `layout.PIECE_APART`


@triton.jit
def _at(program, pieces, weights, ENDS: tl.constexpr, C: tl.constexpr):
    """Return a tuple that describes the weight on which a program of the kernel works:

    - the weight's index, and the program's index among the programs of this weight;
    - the weight's allocation, and its gradient's memory, which the updated weight overwrites;
    - the number of the weight's chunks (blocks of 8192 elements);
    - the number of chunks of all earlier weights together;
    - the number of patches for which the allocation has space. Patches are weights that are stored
      uncompressed, because their exponents have no 4-bit code.

    Only this function branches on the weight's index, so that the kernel's other code is compiled
    once, not once per weight.
    """
    number = 0
    begin = 0
    piece = pieces[0]
    weight = weights[0]
    chunks = C.CHUNKS[0]
    before = 0
    room = C.ROOMS[0]
    for place in tl.static_range(1, C.COUNT):
        if program >= ENDS[place - 1]:
            number = place
            begin = ENDS[place - 1]
            piece = pieces[place]
            weight = weights[place]
            chunks = C.CHUNKS[place]
            before = C.ENDS[place - 1]
            room = C.ROOMS[place]
    return number, program - begin, piece, weight, chunks, before, room


@triton.jit
def _parts(piece_ptr, chunks, room):
    """Return pointers to the coded tensors of a weight, in the order of `Format.parts`.

    All these tensors lie in one allocation, which starts at `piece_ptr`.
    """
    codes = piece_ptr + APART
    signs = codes + chunks * 1024
    starts = signs + chunks * 2048
    places = as_patterns(starts + (chunks + APART) // APART * APART)
    return piece_ptr, codes, starts, places, places + room // 256 * 256, signs


@triton.jit
def _coded_weight_piece_decode_kernel(
    piece_ptr,
    weight_ptr,
    C: tl.constexpr,
    # CHUNKS and ROOM: of the weight
):
    """Decode a weight whose coded tensors (such as exponent codes, signs and mantissas) lie in one
    allocation.

    Each program decodes WORDS words. A word has 32 bits, the exponent codes of eight elements.
    """
    parts = _parts(piece_ptr, C.CHUNKS, C.ROOM)
    decode_some(tl.program_id(0), parts, weight_ptr, C.WORDS, C.PATCHES)


@triton.jit
def _coded_weight_piece_encode_kernel(
    counts_ptr,  # for each weight in turn, the arguments of `encode_chunk`
    p0,
    w0,
    p1,
    w1,
    p2,
    w2,
    p3,
    w3,
    p4,
    w4,
    p5,
    w5,
    p6,
    w6,
    p7,
    w7,
    rate,
    decay,
    C: tl.constexpr,
    # COUNT: weights; for each of them CHUNKS and ROOMS; ENDS: chunks of it and those before it
):
    """Apply the optimizer step to one chunk of one of several weights, and encode the chunk.

    A chunk has 8192 elements. The kernel also overwrites the chunk's gradients with the updated
    weights in bf16. The kernel `_coded_weight_piece_lists_kernel` reads the updated weights there.
    """
    at = _at(
        tl.program_id(0),
        (p0, p1, p2, p3, p4, p5, p6, p7),
        (w0, w1, w2, w3, w4, w5, w6, w7),
        C.ENDS,
        C,
    )
    _, chunk, piece, weight, chunks, before, room = at
    parts, counts = _parts(piece, chunks, room), counts_ptr + 2 * before
    encode_chunk(chunk, chunks, weight, parts, counts, rate, decay, C)


@triton.jit
def _coded_weight_piece_lists_kernel(
    counts_ptr,
    refuge_ptr,  # two numbers of 16 bits a weight, HEADING in all, then patterns
    p0,
    w0,
    p1,
    w1,
    p2,
    w2,
    p3,
    w3,
    p4,
    w4,
    p5,
    w5,
    p6,
    w6,
    p7,
    w7,
    C: tl.constexpr,
    # LISTING: programs of a weight, at most PROGRAMS, and those before it
):
    """Write the lists of patches (elements whose exponents have no 4-bit code) of several weights.

    Several programs write the lists of one weight: each program writes the patches of its own range
    of chunks. A chunk is a block of 8192 elements.
    """
    at = _at(
        tl.program_id(0),
        (p0, p1, p2, p3, p4, p5, p6, p7),
        (w0, w1, w2, w3, w4, w5, w6, w7),
        C.LISTING,
        C,
    )
    number, program, piece, weight, chunks, before, room = at
    header, _, starts, places, values, _ = _parts(piece, chunks, room)
    counts, lists = counts_ptr + 2 * before, (starts, places, values)
    refuge = (refuge_ptr, number, refuge_ptr + C.HEADING + tl.cast(before, tl.int64) * CHUNK)
    each = (chunks + C.PROGRAMS - 1) // C.PROGRAMS
    list_chunks(program, weight, header, counts, lists, refuge, room, chunks, each, C.BLOCK, True)
