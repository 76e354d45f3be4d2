"""Choose tiles, warps and pipeline stages of the Triton kernels for compressed weights, as plain
numbers.

Both the launchers and the tests that compile the kernels for absent GPUs call this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from .layout import CHUNK, GROUP


@dataclass(frozen=True)
class RowTile:
    """The tile of the kernel that multiplies a compressed weight by a single token.

    A program computes `rows` outputs, one per row of the weight. In each step, the program reads
    `words` 32-bit words of codes from each of these rows.
    """

    rows: int
    words: int
    warps: int
    stages: int = 3
    packed: bool = False

    def constants(self, columns: int, *, has_bias: bool, is_even: bool) -> tuple[int, ...]:
        """Return the tile's compile-time constants for the kernels of `row_kernels`.

        The constants are HAS_BIAS, IS_EVEN, ROWS, WORDS, STAGES and CHUNKS. A program computes ROWS
        outputs, one per row of the compressed weight. In each step of its loop over the columns, it
        reads WORDS 32-bit words of exponent codes per row. The program's rows extend over at most
        CHUNKS chunks of 8192 weights. IS_EVEN says that no tile goes beyond the edge of the weight.
        STAGES is the number of pipeline stages.
        """
        chunks = chunks_touched(self.rows, columns)
        return has_bias, is_even, self.rows, self.words, self.stages, chunks


@dataclass(frozen=True)
class MatrixTile:
    """The tile of the kernel that decodes a compressed weight in registers and multiplies one or a
    few tokens."""

    rows: int  # of a program
    tokens: int
    warps: int  # each has a share of the columns
    patches: int = 32  # patches that a warp multiplies at once
    is_early: bool = False  # two groups of codes are loaded before the program waits for the first


@dataclass(frozen=True)
class WideTile:
    """The tile of the kernel that multiplies a compressed weight by more than a few tokens on
    Hopper GPUs.

    A program decodes each weight once for all its tokens.
    """

    rows: int  # 64 or 128, of the weight
    tokens: int  # of x; a power of two
    x_stages: int = 4  # blocks of 64 columns of x in shared memory
    stages: int = 3  # blocks of 128 columns of codes in shared memory
    splits: int = 1  # programs that share the columns of a row
    whole: int = 0  # the first tiles of rows, which have a program each nevertheless

    @property
    def warps(self) -> int:
        """Return the number of warps in a program: one per sixteen rows of the weight."""
        return self.rows // 16

    @property
    def noted(self) -> int:
        """Return how many patches (elements whose exponents have no code) a program processes at
        once."""
        return 4 * self.rows


WIN4_DECODE_WORDS = 512
WIN4_DECODE_WARPS = 8
WIN4_ENCODE_WARPS = 4
WIN4_STEP_WARPS = 8
TIER_DECODE_WARPS = 8
TIER_ENCODE_WARPS = 8
RANS_WARPS = 1
SUM_BLOCK = 512
STARTS_BLOCK = 1024
LISTS_PROGRAMS = 2048
ORDERED_TOKENS = 32
PATCHES = 32

MAX_FUSED_TOKENS = 16
"""The most tokens for which a product decodes in its kernel; with more, the weight is decoded
first."""
MAX_WIDE_TOKENS = 256
"""The same on Hopper, whose tensor cores read x from shared memory."""


ROW_TILES = (
    RowTile(4, 64, 1, 4, packed=True),
    RowTile(2, 64, 1, 3, packed=True),
    RowTile(2, 128, 1, 4, packed=True),
)
"""Tiles in the order of decreasing rows, from a sweep on an H200 with the shapes of Llama-3-8B."""
WARPS_PER_PROCESSOR = 8
WARPS_WITH_MATRICES = 10
"""The same where tensor cores multiply a few tokens."""


def row_tile(rows: int, processors: int) -> RowTile:
    """Return the tile of the kernel that multiplies one token by a losslessly compressed weight.

    The weight has `rows` rows, and each program of the kernel computes one tile of outputs. The
    function tries the tiles of `ROW_TILES` in order, those with more rows first. The function
    returns the first tile with which the GPU's `processors` multiprocessors have enough warps.
    `WARPS_PER_PROCESSOR` warps for each multiprocessor are enough. If no tile gives that many, the
    function returns the last tile.
    """
    return _first_busy(ROW_TILES, rows, processors)


NARROW_ROW_TILES = (RowTile(4, 128, 1, packed=True), RowTile(2, 128, 1, packed=True))
"""The same for lossy weights without Gluon; see `matrix_tile`."""


def narrow_row_tile(rows: int, processors: int) -> RowTile:
    """Return the tile of the kernel that multiplies one token by a lossily compressed weight, which
    keeps at most 3 mantissa bits.

    Each program of the kernel computes one tile of outputs. The function tries the tiles of
    `NARROW_ROW_TILES` in order. The function returns the first tile with which the GPU's
    `processors` multiprocessors have enough warps. `WARPS_PER_PROCESSOR` warps for each
    multiprocessor are enough. If no tile gives that many, the function returns the last tile.
    """
    return _first_busy(NARROW_ROW_TILES, rows, processors)


def _first_busy(tiles: tuple[RowTile, ...], rows: int, processors: int) -> RowTile:
    """Return the first of several candidate tiles with which a kernel runs enough warps.

    Each program of the kernel computes one tile. Enough warps are `WARPS_PER_PROCESSOR` or more
    for each multiprocessor. If no tile reaches this number, return the last tile.
    """
    for found in tiles:
        if rows // found.rows * found.warps >= WARPS_PER_PROCESSOR * processors:
            return found
    return tiles[-1]


MOST_EARLY = 16
"""The most groups of columns (K / 256) of which two are loaded before anything is awaited; in wider
weights this was slower on an H200."""
EARLY_WARPS = 8
"""Warps that a multiprocessor runs at a time if two groups are loaded early, which takes up to 178
registers; without that it runs 12."""
LEAST_FULL = 0.6
"""The least share of the places for programs that must be used, if these run in several rounds."""


def _fills_rounds(programs: int, places: int) -> bool:
    """Return whether the given number of programs is enough to keep busy a GPU that runs up to
    `places` programs at the same time. The result is true in two cases:

    - All programs run at the same time.
    - They run in several rounds, which on average fill at least `LEAST_FULL` of the `places`.
    """
    rounds = -(-programs // places)
    return rounds == 1 or programs >= LEAST_FULL * rounds * places


def matrix_tile(
    tokens: int, rows: int, columns: int, processors: int, *, is_lossless: bool = False
) -> MatrixTile:
    """Return the tile of the kernel that multiplies one or a few tokens by a compressed weight.

    The tile was the fastest on an H200 for the given tokens (M), rows (N) and columns (K).
    """
    programs, groups, warps = -(-rows // 16), columns // GROUP, 2
    busy = 7 if tokens > 8 and groups <= 32 else WARPS_WITH_MATRICES
    while warps < 8 and programs * warps < busy * processors:
        warps *= 2
    while warps > 1 and (warps > groups or -(-groups // warps) * warps > 1.2 * groups):
        warps //= 2
    if tokens <= 8 or not is_lossless:
        return MatrixTile(16, 8 if tokens <= 8 else 16, warps)
    is_early = groups <= MOST_EARLY
    is_early = is_early and _fills_rounds(programs, processors * EARLY_WARPS // warps)
    return MatrixTile(16, 16, warps, patches=16, is_early=is_early)


class _Cost(NamedTuple):
    """The coefficients from which `_wide_time` predicts how long a matrix product with a compressed
    weight takes on an H200.

    Each `WideTile` (size of output tiles) has its own coefficients. Times are in microseconds. The
    coefficients were fitted to the measurements in `coded-weight-widths.txt`.
    """

    resident: int  # programs on a multiprocessor at a time
    start: float  # of a program
    step: float  # 64 columns of a program that is alone
    share: float  # and of one of several at a time


WIDE_TILES: dict[WideTile, _Cost] = {
    WideTile(64, 32): _Cost(4, 3.47, 0.327, 0.213),
    WideTile(64, 64): _Cost(3, 3.06, 0.362, 0.234),
    WideTile(64, 128): _Cost(2, 1.58, 0.504, 0.325),
    WideTile(128, 256): _Cost(1, 1.62, 0.966, 0.966),
}
_ORDERING, _SUMMING = 3.6, 2.4
"""The times of the kernels before and after a wide product, in microseconds."""
_SUMMED_BYTES, _DECODED = 2.0e6, 1.14e6
"""Rates per microsecond: bytes of shares that are written and read, and weights that are
decoded."""
_READ, _MULTIPLIED = 1.75e6, 3.66e8
"""Rates of the library per microsecond: weights that it reads, and weights times tokens that it
multiplies."""


def _wide_time(found: WideTile, cost: _Cost, size: tuple[int, int, int], processors: int) -> float:
    tokens, rows, columns = size
    tiles, groups = -(-rows // found.rows), columns // GROUP
    wide = -(-tokens // found.tokens)
    shared = (tiles - found.whole) * wide * found.splits
    total = _ORDERING
    for programs, width in (
        (found.whole * wide, 4 * groups),
        (shared, 4 * -(-groups // found.splits)),
    ):
        rounds, left = divmod(-(-programs // processors), cost.resident)
        for count, together in ((rounds, cost.resident), (min(left, 1), left)):
            total += count * (cost.start + width * max(cost.step, together * cost.share))
    if found.splits > 1:
        left = rows - found.whole * found.rows
        total += _SUMMING + 8 * found.splits * tokens * left / _SUMMED_BYTES
    return total


@lru_cache(maxsize=4096)
def wide_tile(tokens: int, rows: int, columns: int, processors: int) -> WideTile | None:
    """Return the tile of the kernel that multiplies more than a few tokens by a compressed weight
    on Hopper GPUs. Return None if decoding the weight first is faster.

    The function returns the tile with the shortest predicted time. The programs' partial sums never
    take more memory than the decoded weight would take.
    """
    size, weights = (tokens, rows, columns), rows * columns
    read = max(7.0, weights / _READ, 3.5 + weights * tokens / _MULTIPLIED)
    first = 1.5 + weights / _DECODED + read
    found: list[tuple[float, WideTile | None]] = [(first, None)]
    for plain, cost in WIDE_TILES.items():
        if plain.tokens >= 2 * tokens and plain.tokens > 32:
            continue
        tiles, groups = -(-rows // plain.rows), columns // GROUP
        for whole in {0, tiles // processors * processors} - {tiles}:
            for splits in range(1 if whole == 0 else 2, 13):
                each = replace(plain, splits=splits, whole=whole)
                is_small = 4 * tokens * splits * (rows - whole * plain.rows) <= 2 * weights
                if splits == -(-groups // -(-groups // splits)) and (splits == 1 or is_small):
                    time = _wide_time(each, cost, size, processors)
                    found.append((time if whole == 0 else 1.08 * time, each))
    return min(found, key=itemgetter(0))[1]


MOST_HALVES = {3: 14336, 1: 8192, 0: 8192}
"""The most columns of x that are multiplied in fp16, by the mantissa bits kept: each program
converts all of x. With more columns this takes longer than it saves."""


def fits_halves(block: int, columns: int, mantissa: int) -> bool:
    """Return whether the product of one token and a lossily compressed weight is computed in fp16.

    Fp16 requires that each normaliser (scale) covers at least one whole group of 256 weights. The
    token has `columns` features, which must be at most the limit in `MOST_HALVES`. This limit
    depends on `mantissa`, the number of mantissa bits that the weight keeps.
    """
    return block >= GROUP and columns <= MOST_HALVES[mantissa]


def halves_tile(rows: int, columns: int, mantissa: int, processors: int) -> MatrixTile:
    """Return the tile for multiplying one token by a lossily compressed weight in fp16.

    Of the measured numbers of warps, the tile has the one that was fastest on an H200. This is true
    of each measured weight for which `fits_halves` returns True, except 4096 x 4096. For this size,
    the tile has eight warps. Four warps would be up to 7 % faster. With eight warps, the weights
    for queries, keys and values of usual models get the same tile. So one launch multiplies all
    three. With more than 32 groups of 256 columns, the tile has four warps for any number of rows.
    Eight warps were 10 % slower for a weight of 4096 x 14336 with 3 mantissa bits.
    """
    programs, groups, warps = -(-rows // 16), columns // GROUP, 2 if mantissa == 3 else 4
    if groups > 32:
        return MatrixTile(16, 8, 4)
    while warps < 8 and programs * warps < WARPS_WITH_MATRICES * processors:
        warps *= 2
    while warps > groups:
        warps //= 2
    return MatrixTile(16, 8, warps)


def chunks_touched(rows: int, columns: int) -> int:
    """Return over how many chunks (of 8192 weights) the given number of rows can extend, rounded up
    to a power of two."""
    return 1 << ((rows * columns - 1) // CHUNK + 1).bit_length()
