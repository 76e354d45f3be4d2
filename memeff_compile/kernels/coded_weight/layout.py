"""Describe into which tensors each codec (compressed format) splits a bf16 weight tensor.

The module also names these tensors. A weight tensor is read in row-major order as a flat array of
16-bit patterns. The array is padded with zeros to a whole number of chunks (blocks of fixed size).
Every codec stores the sign and mantissa of each pattern as one byte, and encodes the exponent. A
kernel rebuilds two neighbouring weights at once, in one 32-bit word. So all codecs use the
following order inside a group of 256 weights:

    group[64 * q + 2 * j + h] is weight h (0 or 1) of pair q (0 to 3) of thread j (0 to 31)

A pair is one of the four 32-bit words that a thread of a warp rebuilds. Neighbouring threads of a
warp read neighbouring words of every buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...errors import UnsupportedInputError

GROUP = 256
CHUNK = 8192
"""Weights per entry of the tables that say where a stream continues."""
LANES = 32

RANS_CHUNK = 2 * CHUNK
"""Weights that one set of 32 states encodes; weights are padded to whole chunks of this size."""
RANS_STEPS = RANS_CHUNK // LANES
RUN = RANS_CHUNK
"""Adjacent weights that a sample includes or skips together."""
SAMPLED_RUNS = 256
"""The fewest runs from which win4 chooses its window, if the weight has more."""
RANS_BITS = 10
RANS_FLOOR = 1 << 16
"""States of the entropy coder stay in [2^16, 2^32); words are 16 bits wide."""

CODECS = ("win4", "tier", "rans")
BITS = {"win4": 12.02, "tier": 11.03, "rans": 10.89}
"""Bits per weight, including all parts, for values like those of trained weights
(`benchmarks/ops/coded_weights.py`)."""
ADVISED = ("win4", "tier")
"""The codecs that `fit` plans with: one for speed, one for memory."""
SMALLER = ADVISED[-1]
"""The codec to name for weights that another one leaves dense."""
MANTISSA_BITS = 7
LOSSY = (0, 1, 3)
"""Mantissa bits that the lossy modes keep."""
BLOCKS = (32, 64, 128, 256, 512)
"""Weights that share a normaliser in the lossy modes."""

PATCH_PARTS = ("patch_starts", "patch_places", "patch_values")
LISTS = ("second", "third", "words", "patch_places", "patch_values")
"""Parts whose length depends on the values; the memory after their contents is not read."""

_EXPONENTS = {
    "win4": ("header", "codes", *PATCH_PARTS),
    "tier": ("header", "first", "second", "third", "stream_starts", *PATCH_PARTS),
    "rans": ("header", "words", "word_starts", "states"),
}


class Multiplied(NamedTuple):
    """A weight with 4-bit exponent codes (codec `win4`), its bias, and the memory for the product.

    The kernels that multiply one or a few tokens take this tuple as one argument.
    """

    # header, codes, starts, places, patterns, signs, norms: its parts; the patterns are values
    header: Any
    codes: Any
    starts: Any
    places: Any
    patterns: Any
    signs: Any
    norms: Any  # of a lossy weight, or anything
    bias: Any  # (N,), or anything
    out: Any  # (N,) bf16, written
    rows: Any  # N


@dataclass(frozen=True)
class Format:
    """The settings of a codec, a compressed format for weights.

    `parse` reads the settings from the codec's name, such as "win4" or "tier:fp32".
    """

    codec: str  # how exponents are coded, one of `CODECS`
    mantissa: int = MANTISSA_BITS  # mantissa bits kept; 7 is lossless
    block: int = 0  # weights per normaliser; 0 where it is lossless
    dtype: str = "bf16"  # of decoded weights; fp32 and fp16 are lossless

    @property
    def is_lossless(self) -> bool:
        """Return whether decoding restores all bits of the original weight."""
        return self.mantissa == MANTISSA_BITS

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the tensors that encode a weight, in order."""
        norms = () if self.is_lossless else ("norms",)
        rest = () if self.dtype == "bf16" else ("rest",)
        return (*_EXPONENTS[self.codec], "signs", *norms, *rest)

    @property
    def family(self) -> str:
        """Return the name of the codec (compressed format of a weight) without mantissa bits and
        block size.

        Examples are "tier", for bf16 weights, and "tier:fp32", for fp32 weights."""
        return self.codec if self.dtype == "bf16" else f"{self.codec}:{self.dtype}"

    def __str__(self) -> str:
        return self.family if self.is_lossless else f"{self.codec}:k{self.mantissa}:b{self.block}"


_FORMATS = {
    str(form): form
    for codec in CODECS
    for form in (Format(codec), *(Format(codec, kept, block) for kept in LOSSY for block in BLOCKS))
}
WIDER = tuple(f"{codec}:{dtype}" for codec in CODECS for dtype in ("fp32", "fp16"))
"""Names of the codecs of weights of another dtype; their mantissas keep all bits."""
_FORMATS |= {name: Format(name[:4], dtype=name[5:]) for name in WIDER}
_FORMATS |= {
    f"{codec}:k{kept}": Format(codec, kept, BLOCKS[-1]) for codec in CODECS for kept in LOSSY
}


def parse(name: str) -> Format:
    """Return the settings that the name of a codec (a compressed format for weights) describes.

    The name of a lossless codec is, for example, "win4", which codes exponents in 4 bits. Each
    codec for bf16 weights also has lossy modes, which drop mantissa bits. The name of a lossy mode
    is, for example, "win4:k3:b512". Here, k3 means that each weight keeps 3 mantissa bits. The
    setting b512 means that blocks of 512 weights share a normaliser (scale). If the name of a lossy
    mode contains no block size, a block has 512 weights. For any other name, raise an error that
    lists the valid names.
    """
    if name not in _FORMATS:
        raise UnsupportedInputError(
            f"codec is {name!r}; {', '.join(CODECS)} are lossless, with :fp32 or :fp16 for weights "
            "of these dtypes instead of bfloat16, and a lossy mode is one of them "
            f"with the mantissa bits kept ({', '.join(map(str, LOSSY))}) and the size of a block "
            f"({', '.join(map(str, BLOCKS))}), such as 'win4:k3:b512'."
        )
    return _FORMATS[name]


def padded(count: int) -> int:
    """Return a weight's number of elements, `count`, rounded up to a multiple of 16,384.

    Codecs store a weight in chunks of 8192 or 16,384 elements.
    """
    return -(-count // RANS_CHUNK) * RANS_CHUNK


def sampled(count: int) -> int:
    """Return n: to compress a weight, exponents are counted in every n-th run of 16,384 elements.

    The codec `win4`, a compressed format for weights, has codes for 15 neighbouring exponents. To
    choose these exponents, the codec counts how often each exponent occurs in these runs. A run is
    a block of consecutive elements of the weight. `count` is the weight's number of elements. With
    n = 1, the codec reads all elements.
    """
    return max(1, padded(count) // (RUN * SAMPLED_RUNS))  # 14 for 14336 * 4096


def best_window(counts: Sequence[int], width: int, first: int, last: int) -> int:
    """Return the start of the window of `width` exponents that contains the most weights, given the
    counts of all 256 exponents.

    The start lies between `first` and `last`, both included.
    """
    sums = [sum(counts[start : start + width]) for start in range(first, last + 1)]
    return first + max(range(len(sums)), key=sums.__getitem__)


def win4_header(counts: Sequence[int]) -> list[int]:
    """Return the exponent just below the window of 15 exponents that contains the most weights.

    Kernels rebuild a weight by one multiplication by 2^result. The result is below 128, so that
    2^result is a finite float32 number.
    """
    return [best_window(counts, 15, 1, 128) - 1]


def tier_header(counts: Sequence[int]) -> list[int]:
    """Return the starts of three nested windows of 3, 6 and 21 exponents, in this order.

    The distribution of exponents has one peak, so the 3, 6 and 21 most frequent exponents are
    neighbours. An exponent is its window's start plus its code, so no lookup table is needed.
    """
    wide = best_window(counts, 21, 1, 234)
    middle = best_window(counts, 6, wide, wide + 15)
    narrow = best_window(counts, 3, middle, middle + 3)
    return [narrow, middle, wide]


def frequencies(counts: Sequence[int]) -> list[int]:
    """Return how many of the entropy coder's 1024 slots each exponent gets.

    An exponent that occurs gets at least one.
    """
    total, slots = sum(counts), 1 << RANS_BITS
    found = [max(1, round(count / total * slots)) if count else 0 for count in counts]
    while (surplus := sum(found) - slots) != 0:
        # Add or remove a slot where it costs least: the cost of a slot is about count / slots.
        step = -1 if surplus > 0 else 1
        able = [e for e, slot in enumerate(found) if slot > 1 or (slot and step > 0)]
        cost = {e: counts[e] / (found[e] + min(step, 0)) for e in able}
        chosen = min(able, key=cost.__getitem__) if step < 0 else max(able, key=cost.__getitem__)
        found[chosen] += step
    return found


PIECE_APART = 128
"""In a weight with one allocation, each part starts at a multiple of this many 32-bit words."""


def fits_one_piece(form: Format) -> bool:
    """Return whether one allocation can contain all tensors that encode a weight in a given format.

    The position of each tensor then follows from the weight's size and the length of the
    allocation. With one allocation, a compiled graph takes one tensor per weight instead of six,
    and so does a kernel for several weights.
    """
    return form == Format("win4")


def _piece_lists(count: int) -> int:
    """Return the index, in 32-bit words, at which the patches (elements of the matrix that are
    stored without a code) begin inside a weight's allocation.
    """
    chunks = padded(count) // CHUNK
    starts = -(-(chunks + 1) // PIECE_APART) * PIECE_APART
    return PIECE_APART + 3 * chunks * (CHUNK // 8) + starts


def piece_words(count: int, room: int) -> int:
    """Return the length of a weight's allocation in 32-bit words, with space for at least `room`
    patches (elements whose exponents have no code).
    """
    return _piece_lists(count) + -(-room // (2 * PIECE_APART)) * 2 * PIECE_APART


def piece_room(count: int, words: int) -> int:
    """Return how many patches (elements whose exponents have no code) fit into a weight's
    allocation of a given number of 32-bit words."""
    return words - _piece_lists(count)


def piece_places(count: int, words: int) -> tuple[tuple[int, int], ...]:
    """Return the position and length of each coded tensor inside a weight's allocation, in 32-bit
    words.

    A compressed weight consists of several tensors, such as codes and signs. The tensors are in the
    order of `Format.parts`. The lists of patches (elements whose exponents have no code) have two
    numbers per word.
    """
    chunks, room = padded(count) // CHUNK, piece_room(count, words)
    signs = PIECE_APART + chunks * (CHUNK // 8)
    starts, lists = signs + chunks * (CHUNK // 4), words - room
    return (
        (0, 1),
        (PIECE_APART, chunks * (CHUNK // 8)),
        (starts, chunks + 1),
        (lists, room // 2),
        (lists + room // 2, room // 2),
        (signs, chunks * (CHUNK // 4)),
    )
