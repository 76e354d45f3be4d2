"""The reference implementation of compressed weights in plain PyTorch: correct on every device, and
used on a CPU.

Its functions process about a million elements of a weight at a time, so that temporary tensors stay
small. `layout.py` names the tensors that encode a weight, and defines the order of the weight's
elements inside each group of 256.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import (
    CHUNK,
    GROUP,
    LANES,
    PATCH_PARTS,
    RANS_BITS,
    RANS_CHUNK,
    RANS_FLOOR,
    RANS_STEPS,
    RUN,
    Format,
    frequencies,
    padded,
    sampled,
    tier_header,
    win4_header,
)

PIECE = 128 * CHUNK
"""Weights that are processed at a time: a million."""

STREAM_TAIL = 3
"""Words after a stream that a reader may read."""


def as_patterns(weight: Tensor) -> Tensor:
    """Return a bf16 tensor as flat int16 bit patterns, padded with zeros to a multiple of 16,384
    elements."""
    flat = weight.detach().contiguous().reshape(-1).view(torch.int16)
    missing = padded(flat.numel()) - flat.numel()
    # Kernels read two weights as one word.
    is_aligned = not missing and flat.data_ptr() % 16 == 0
    return flat if is_aligned else F.pad(flat, (0, missing))


def histogram(patterns: Tensor, every: int = 1) -> Tensor:
    """Return how often each of the 256 exponents occurs in a weight, as int64.

    `patterns` contains the weight's elements as 16-bit patterns. The function counts only every
    n-th run of 16,384 consecutive elements, where n is `every`.
    """
    counts = torch.zeros(256, dtype=torch.int64, device=patterns.device)
    patterns = patterns.view(-1, RUN)[::every].reshape(-1) if every > 1 else patterns
    for piece in patterns.split(PIECE):
        counts += torch.bincount(_exponents(piece).int(), minlength=256)
    return counts


def _exponents(patterns: Tensor) -> Tensor:
    return (patterns >> 7) & 0xFF


def _grouped(flat: Tensor) -> Tensor:
    """Reshape flat values to (groups, 4, 32, 2): four pairs of values for each of a warp's 32
    threads."""
    return flat.view(-1, 4, LANES, 2)


def _words(fields: Tensor, shifts: Sequence[int]) -> Tensor:
    """Pack the last dimension into int32 words, with each field at its own bit shift."""
    places = torch.tensor(shifts, dtype=torch.int64, device=fields.device)
    total = (fields.long() << places).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _fields(words: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Unpack int32 words into fields along a new last dimension."""
    places = torch.tensor(shifts, dtype=torch.int64, device=words.device)
    return (words.long()[..., None] >> places) & mask


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, PIECE):
        yield slice(start, min(start + PIECE, count))


def pack_signs(values: Tensor, bits: int) -> Tensor:
    """Pack the sign and mantissa bits of weights in the order that kernels read.

    `values` is one-dimensional, with one number per weight: its field of `bits` sign and mantissa
    bits. Each thread of a warp reads eight fields. Fields of eight bits take two 32-bit words per
    thread. Each word contains two pairs of fields, one in its even bytes and one in its odd bytes.
    Smaller fields are stored one after another. The eight fields of a thread then take 8, 16 or 32
    bits together.
    """
    lanes = _grouped(values)
    if bits == 8:
        split = lanes.view(-1, 2, 2, LANES, 2).permute(0, 1, 3, 4, 2)
        return split.to(torch.uint8).reshape(-1, 4).view(torch.int32).view(-1)
    fields = lanes.permute(0, 2, 3, 1).reshape(-1, LANES, 8)  # halves outside, pairs inside
    words = _words(fields, [bits * place for place in range(8)]).reshape(-1)
    return {1: words.to(torch.uint8), 2: words.to(torch.int16), 4: words}[bits]


def unpack_signs(signs: Tensor, bits: int) -> Tensor:
    """Return the sign and mantissa bits of weights from the output of `pack_signs`.

    The result is one-dimensional, with one int16 number per weight.
    """
    if bits == 8:
        split = signs.view(torch.uint8).view(-1, 2, LANES, 2, 2).permute(0, 1, 4, 2, 3)
        return split.reshape(-1).to(torch.int16)
    fields = _fields(signs.view(-1, LANES), [bits * place for place in range(8)], (1 << bits) - 1)
    return fields.view(-1, LANES, 2, 4).permute(0, 3, 1, 2).reshape(-1).to(torch.int16)


def find_patches(patterns: Tensor, is_patch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of patches (elements whose exponents have no code) in each chunk (8192
    weights), their positions in the chunk, and their bit patterns."""
    counts = is_patch.view(-1, CHUNK).sum(1)
    places = is_patch.nonzero().view(-1)
    return counts, (places % CHUNK).to(torch.int16), patterns[places]


def join_patches(found: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """Join the lists of patches (elements whose exponents have no code) of consecutive blocks of
    weights into one list.

    A block contains one or several chunks of 8192 weights. Return the index at which each chunk's
    patches start, the positions of the patches in their chunks, and their values.
    """
    counts, places, values = (torch.cat(each) for each in zip(*found, strict=True))
    starts = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return starts, places, values


def _patched(starts: Tensor, places: Tensor) -> Tensor:
    """Return the positions of a weight's patches (elements whose exponents have no code) in the
    flat weight.

    `places` contains each patch's position in its chunk (8192 elements). `starts` contains the
    index in `places` at which each chunk's patches start. The function does not read the spare
    space that `places` may have after the last patch.
    """
    counts = starts.diff().long()
    chunks = torch.arange(counts.numel(), device=starts.device).repeat_interleave(counts)
    return chunks * CHUNK + places[: chunks.numel()]


_WIN4_SHIFTS = [0, 16, 4, 20, 8, 24, 12, 28]  # of the fields (pair, half)


def encode_win4(patterns: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Encode the exponent of each element of a weight in 4 bits.

    Return the tensors that encode the weight, except the tensor of signs and mantissas. A nonzero
    element whose exponent is outside of the window (the range of exponents that have codes) is
    stored whole, as a patch. Code 0 means a zero of either sign, or a patch.
    """
    header = win4_header(counts)
    codes, patches = [], []
    for piece in _pieces(patterns.numel()):
        values = patterns[piece]
        code = _exponents(values) - header[0]
        is_zero = (values & 0x7FFF) == 0
        is_coded = (code > 0) & (code < 16) & ~is_zero
        patches.append(find_patches(values, ~is_coded & ~is_zero))
        fields = _grouped(torch.where(is_coded, code, 0)).permute(0, 2, 1, 3).reshape(-1, LANES, 8)
        codes.append(_words(fields, _WIN4_SHIFTS).view(-1))
    head = torch.tensor(header, dtype=torch.int32, device=patterns.device)
    return [head, torch.cat(codes), *join_patches(patches)]


def decode_win4(parts: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Yield a weight's exponents as flat int16 tensors, about a million at a time. The caller must
    still insert the patches (elements whose exponents have no code)."""
    header, codes = parts[:2]
    for piece in _pieces(size):
        fields = _fields(codes[piece.start // 8 : piece.stop // 8], _WIN4_SHIFTS, 15)
        code = fields.view(-1, LANES, 4, 2).permute(0, 2, 1, 3).reshape(-1)
        yield torch.where(code > 0, code + header[0], 0).to(torch.int16)


_TIER_WORDS = CHUNK // 16
_TIER_SHIFTS = [2 * place for place in range(16)]


def tier_codes(exponents: Tensor, header: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of each exponent in three windows (ranges of exponents that have codes), and
    whether the element with this exponent is stored whole (a patch).

    Code 3 in the first or the second window means that the exponent has no code in that window.
    Then the code in the next window applies. Code 15 in the last window means exponent 0.
    """
    narrow, middle, wide = header
    first = exponents - narrow
    first = torch.where((first >= 0) & (first < 3), first, 3)
    second = exponents - middle
    inside = (second >= 0) & (second < 6)
    second = second - torch.where(exponents >= narrow + 3, 3, 0)
    second = torch.where(inside & (first == 3), second, 3)
    third = exponents - wide
    has_third = (third >= 0) & (third < 21) & ~inside
    third = third - torch.where(exponents >= middle + 6, 6, 0)
    is_patch = ~has_third & ~inside & (exponents != 0)
    return first, second, torch.where(has_third, third, 15), is_patch


def tier_order(flat: Tensor) -> Tensor:
    """Reorder values, one per weight, to (chunks of 8192 weights, words of a chunk, 16 weights).

    The codec `tier` stores exponents as codes in three streams. A 32-bit word of the first stream
    contains the codes of 16 weights. A warp's 32 words cover 512 consecutive values. Each word has
    two neighbouring values from each eighth of these 512 values.
    """
    lanes = flat.view(-1, 8, LANES, 2).permute(0, 2, 1, 3)
    return lanes.reshape(-1, _TIER_WORDS, 16)


def _pack_stream(codes: Tensor, is_in: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Pack exponent codes of a weight into 32-bit words, chunk by chunk (8192 weights each).

    The codec `tier` stores the exponents of a weight as codes in three streams. `codes` are those
    of the second or the third stream, with `bits` bits each: 2 or 4. `is_in` says which weights
    have a code in this stream. Return the words, and the number of words per chunk.
    """
    per_word = 32 // bits
    codes, is_in = codes.flatten(1), is_in.flatten(1)
    rank = is_in.cumsum(1) - 1
    count = is_in.sum(1)
    lengths = (count + per_word - 1) // per_word
    width = int(lengths.max()) * per_word
    fields = codes.new_zeros((codes.shape[0], width + 1))
    fields.scatter_(1, torch.where(is_in, rank, width), codes)
    shifts = [bits * place for place in range(per_word)]
    words = _words(fields[:, :width].reshape(codes.shape[0], -1, per_word), shifts)
    used = torch.arange(words.shape[1], device=codes.device) < lengths[:, None]
    return words[used], lengths


def encode_tier(patterns: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Encode each exponent in 2, 4 or 8 bits.

    Every exponent has a 2-bit code. If this code is 3, a second 2-bit code follows. If the second
    code is 3 too, a 4-bit code follows.

    Return the tensors of the codec `tier`, except the tensor of signs and mantissas. The returned
    tensors contain the starts of three windows (ranges of exponents), the codes, and the patches
    (weights stored whole). One more tensor has two indices for each chunk of 8192 weights. The
    chunk's second codes start at one index, and its third codes at the other.
    """
    header = tier_header(counts)
    firsts, streams, lengths, patches = [], ([], []), ([], []), []  # type: ignore[var-annotated]
    for piece in _pieces(patterns.numel()):
        values = patterns[piece]
        first, second, third, is_patch = tier_codes(_exponents(values), header)
        patches.append(find_patches(values, is_patch))
        first, second, third = (tier_order(code) for code in (first, second, third))
        firsts.append(_words(first, _TIER_SHIFTS).view(-1))
        is_second = first == 3
        is_third = is_second & (second == 3)
        for place, (code, is_in, bits) in enumerate(((second, is_second, 2), (third, is_third, 4))):
            words, length = _pack_stream(code, is_in, bits)
            streams[place].append(words)
            lengths[place].append(length)
    starts = [F.pad(torch.cat(each).cumsum(0), (1, 0)).to(torch.int32) for each in lengths]
    head = torch.tensor(header, dtype=torch.int32, device=patterns.device)
    second, third = (F.pad(torch.cat(each), (0, STREAM_TAIL)) for each in streams)
    begins = torch.stack(starts, 1).contiguous()
    return [head, torch.cat(firsts), second, third, begins, *join_patches(patches)]


def _read_stream(stream: Tensor, starts: Tensor, is_in: Tensor, bits: int) -> Tensor:
    per_word = 32 // bits
    flat = is_in.flatten(1)
    rank = flat.cumsum(1) - 1
    word = torch.where(flat, starts[:, None].long() + rank // per_word, 0)
    codes = (stream[word].long() >> (rank.clamp_min(0) % per_word * bits)) & ((1 << bits) - 1)
    return codes.view(is_in.shape)


def decode_tier(parts: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Yield a weight's exponents as flat int16 tensors, about a million at a time. The caller must
    still insert the patches (elements whose exponents have no code)."""
    header, first_words, second_stream, third_stream, starts = parts[:5]
    narrow, middle, wide = header.tolist()
    for piece in _pieces(size):
        words = first_words[piece.start // 16 : piece.stop // 16].view(-1, _TIER_WORDS)
        chunk = starts[piece.start // CHUNK : piece.stop // CHUNK]
        first = _fields(words, _TIER_SHIFTS, 3)
        is_second = first == 3
        second = _read_stream(second_stream, chunk[:, 0], is_second, 2)
        is_third = is_second & (second == 3)
        third = _read_stream(third_stream, chunk[:, 1], is_third, 4)
        low = narrow + first
        mid = middle + second + torch.where(second + middle >= narrow, 3, 0)
        high = wide + third + torch.where(third + wide >= middle, 6, 0)
        high = torch.where(third == 15, 0, high)
        exponent = torch.where(is_third, high, torch.where(is_second, mid, low))
        lanes = exponent.reshape(-1, LANES, 8, 2).permute(0, 2, 1, 3)
        yield lanes.reshape(-1).to(torch.int16)


def rans_table(counts: Sequence[int]) -> list[int]:
    """Return the table of 1024 slots of the codec `rans`, an entropy coder for exponents.

    A frequent exponent has more slots. Each slot has an exponent (8 bits), its frequency minus one
    (12 bits), and the slot's position among the exponent's slots (12 bits).
    """
    table = []
    for exponent, slots in enumerate(frequencies(counts)):
        for place in range(slots):
            word = exponent | (slots - 1) << 8 | place << 20
            table.append(word - (1 << 32) if word >= 1 << 31 else word)
    return table


def rans_order(flat: Tensor) -> Tensor:
    """Reshape flat values, one for each weight, to (chunks, steps, 32 threads).

    A chunk has 16,384 weights. In one step, each thread of a warp encodes or decodes one exponent.
    Of each 256 values, a thread has eight, in eight consecutive steps. The eight values are four
    pairs of neighbours, and these pairs are 64 values apart.
    """
    lanes = flat.view(-1, RANS_STEPS // 8, 4, LANES, 2).permute(0, 1, 2, 4, 3)
    return lanes.reshape(-1, RANS_STEPS, LANES)


def encode_rans(patterns: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Encode a weight's exponents with a range coder (rANS) of 32-bit states and 16-bit words. Each
    chunk of 16,384 weights has 32 lanes."""
    device = patterns.device
    slots = torch.tensor(frequencies(counts), dtype=torch.int64, device=device)
    begins = slots.cumsum(0) - slots
    streams, lengths, states = [], [], []
    for piece in _pieces(patterns.numel()):
        symbols = rans_order(_exponents(patterns[piece])).int()
        chunks = symbols.shape[0]
        state = torch.full((chunks, LANES), RANS_FLOOR, dtype=torch.int64, device=device)
        emits = torch.zeros((chunks, RANS_STEPS, LANES), dtype=torch.bool, device=device)
        words = torch.zeros((chunks, RANS_STEPS, LANES), dtype=torch.int16, device=device)
        for step in reversed(range(RANS_STEPS)):
            slot, begin = slots[symbols[:, step]], begins[symbols[:, step]]
            emit = state >= slot << (32 - RANS_BITS)
            emits[:, step] = emit
            words[:, step] = state.to(torch.int16)  # the low 16 bits
            state = torch.where(emit, state >> 16, state)
            state = ((state // slot) << RANS_BITS) + state % slot + begin
        streams.append(words[emits])
        lengths.append(emits.flatten(1).sum(1))
        states.append(state)
    starts = F.pad(torch.cat(lengths).cumsum(0), (1, 0)).to(torch.int32)
    table = torch.tensor(rans_table(counts), dtype=torch.int32, device=device)
    state = torch.cat(states)
    state = torch.where(state >= 1 << 31, state - (1 << 32), state).to(torch.int32)
    return [table, torch.cat(streams), starts, state.view(-1)]


def decode_rans(parts: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Yield a weight's exponents as flat int16 tensors, about a million at a time."""
    table, words, starts, states = parts[:4]
    words = F.pad(words, (0, 1)).long() & 0xFFFF
    table = table.long() & 0xFFFFFFFF
    for piece in _pieces(size):
        chunks = slice(piece.start // RANS_CHUNK, piece.stop // RANS_CHUNK)
        state = states.view(-1, LANES)[chunks].long() & 0xFFFFFFFF
        place = starts[chunks].long()[:, None]
        found = words.new_empty((state.shape[0], RANS_STEPS, LANES), dtype=torch.int16)
        for step in range(RANS_STEPS):
            slot = table[state & ((1 << RANS_BITS) - 1)]
            found[:, step] = (slot & 255).to(torch.int16)
            state = (((slot >> 8) & 0xFFF) + 1) * (state >> RANS_BITS) + (slot >> 20)
            needs = state < RANS_FLOOR
            rank = needs.cumsum(1)
            word = words[torch.where(needs, place + rank - 1, words.numel() - 1)]
            state = torch.where(needs, (state << 16) | word, state)
            place = place + rank[:, -1:]
        yield found.view(-1, 4, 2, LANES).permute(0, 1, 3, 2).reshape(-1)


def normalise(patterns: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Divide each block of weights by the significand of its largest weight, and keep only the top
    mantissa bits of the quotients.

    `patterns` are the bit patterns of finite bf16 weights. The function returns the quotients as
    bit patterns, with the dropped mantissa bits set to zero. The function also returns the
    normalisers, one byte per block: the 7 mantissa bits of the block's largest weight.
    """
    left = torch.empty_like(patterns)
    norms = []
    dropped = 7 - form.mantissa
    for piece in _pieces(patterns.numel()):
        values = patterns[piece].view(-1, form.block)
        largest = (values & 0x7FFF).amax(1)
        fraction = largest & 0x7F
        norms.append(fraction.to(torch.uint8))
        divisor = (1 + fraction.float() / 128)[:, None]
        small = (values.view(torch.bfloat16).float() / divisor).to(torch.bfloat16).view(torch.int16)
        # Adding half of the last bit kept, mantissa and exponent as one number, rounds half away
        # from zero and carries into the exponent.
        magnitude = (small & 0x7FFF) + ((1 << dropped) >> 1)
        magnitude = magnitude & ~((1 << dropped) - 1)
        left[piece] = ((small & -0x8000) | magnitude).view(-1)
    return left, torch.cat(norms)


def widen(patterns: Tensor, norms: Tensor, form: Format) -> Tensor:
    """Multiply each block of weights by its normaliser (scale).

    This function inverts `normalise`, except for the mantissa bits that `normalise` dropped.
    """
    out = torch.empty_like(patterns)
    for piece in _pieces(patterns.numel()):
        blocks = norms[piece.start // form.block : piece.stop // form.block]
        scale = (1 + blocks.float() / 128)[:, None]
        values = patterns[piece].view(torch.bfloat16).view(-1, form.block).float() * scale
        out[piece] = values.to(torch.bfloat16).view(torch.int16).view(-1)
    return out


_ENCODERS = {"win4": encode_win4, "tier": encode_tier, "rans": encode_rans}
_DECODERS = {"win4": decode_win4, "tier": decode_tier, "rans": decode_rans}


def encode(weight: Tensor, form: Format) -> list[Tensor]:
    """Return the tensors that encode a bf16 weight, in the order of `form.parts`."""
    whole = patterns = as_patterns(weight)
    norms = []
    if not form.is_lossless:
        patterns, blocks = normalise(whole, form)
        norms = [blocks]
    every = sampled(patterns.numel()) if form.codec == "win4" else 1
    parts = _ENCODERS[form.codec](patterns, histogram(patterns, every).tolist())
    return [*with_signs(parts, form, whole, patterns), *norms]


def with_signs(
    parts: Sequence[Tensor], form: Format, whole: Tensor, patterns: Tensor
) -> list[Tensor]:
    """Return the tensors `parts` (the coded exponents), followed by the tensor of the sign and
    mantissa fields of `patterns`.

    `whole` contains the bit patterns (16 bits each) of the weight to encode. For a lossy format,
    `patterns` contains the patterns after `normalise`: scaled block by block, and rounded to fewer
    mantissa bits. Otherwise `patterns` is `whole`. If the format has a list of patches (elements
    whose exponents have no code), this function also writes their values in place, to the tensor
    `patch_values` of `parts`. A patch's value is its 16 bits in `whole`. In the returned tensor of
    sign and mantissa fields, the field of each patch is zero.
    """
    if "patch_values" in form.parts:  # a patch is the weight itself, and has no sign elsewhere
        starts, places, values = (parts[form.parts.index(name)] for name in PATCH_PARTS)
        where = _patched(starts, places)
        values[: where.numel()] = whole[where]
        patterns = patterns.index_fill(0, where, 0)
    fields = (_sign_field(patterns[piece], form.mantissa) for piece in _pieces(patterns.numel()))
    return [*parts, torch.cat([pack_signs(field, form.mantissa + 1) for field in fields])]


def move(made: Sequence[Tensor], parts: Sequence[Tensor]) -> bool:
    """Copy a weight's newly encoded tensors `made` into its existing tensors `parts`, if all fit.

    Return whether all fitted.
    """
    if any(new.numel() > kept.numel() for new, kept in zip(made, parts, strict=True)):
        return False
    for new, kept in zip(made, parts, strict=True):
        kept.view(-1)[: new.numel()].copy_(new.view(-1))
    return True


def _sign_field(patterns: Tensor, mantissa: int) -> Tensor:
    byte = ((patterns >> 8) & 0x80) | (patterns & 0x7F)
    return ((byte >> 7) << mantissa) | ((byte & 0x7F) >> (7 - mantissa))


def decode(parts: Sequence[Tensor], form: Format, shape: Sequence[int]) -> Tensor:
    """Return the decoded bf16 weight in its shape."""
    named = dict(zip(form.parts, parts, strict=True))
    count = math.prod(shape)
    size = padded(count)
    out = torch.empty(size, dtype=torch.int16, device=parts[0].device)
    per_group = named["signs"].numel() // (size // GROUP)
    exponents = _DECODERS[form.codec](parts, size)
    for piece, exponent in zip(_pieces(size), exponents, strict=True):
        groups = slice(piece.start // GROUP * per_group, piece.stop // GROUP * per_group)
        field = unpack_signs(named["signs"][groups], form.mantissa + 1)
        sign = (field >> form.mantissa) * -0x8000
        mantissa = (field & ((1 << form.mantissa) - 1)) << (7 - form.mantissa)
        out[piece] = sign | (exponent << 7) | mantissa
    if not form.is_lossless:
        out = widen(out, named["norms"], form)
    if "patch_starts" in named:
        starts, places, values = (named[name] for name in PATCH_PARTS)
        where = _patched(starts, places)
        out[where] = values[: where.numel()]
    return out[:count].view(torch.bfloat16).view(*shape)
