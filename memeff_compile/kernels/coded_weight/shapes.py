"""Tiles, warps and stages of the Triton kernels, as plain numbers.

Launchers ask here, and so do the tests that compile the kernels for GPUs that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import CHUNK


@dataclass(frozen=True)
class RowTile:
    """One token: rows of the weight per program, words of codes per step."""

    rows: int
    words: int
    warps: int
    stages: int = 3
    packed: bool = False

    def constants(self, columns: int, *, has_bias: bool, is_even: bool) -> tuple[int, ...]:
        """Return HAS_BIAS, IS_EVEN, ROWS, WORDS, STAGES, CHUNKS, as `_some_rows` takes them."""
        chunks = chunks_touched(self.rows, columns)
        return has_bias, is_even, self.rows, self.words, self.stages, chunks


@dataclass(frozen=True)
class Tile:
    """Several tokens: rows and tokens per program, words per step, programs that share a row."""

    rows: int
    tokens: int
    words: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True)
class MatrixTile:
    """A few tokens, codes decoded in registers: rows and tokens of a program."""

    rows: int
    tokens: int
    warps: int  # each has a share of the columns
    is_ahead: bool = True  # codes are loaded one group ahead
    patches: int = 32  # patches that a warp multiplies at once


@dataclass(frozen=True)
class WideTile:
    """More tokens, each weight decoded once for all of a program; for Hopper."""

    rows: int  # 64 or 128, of the weight
    tokens: int  # of x; a power of two
    x_stages: int = 4  # pieces of 64 columns of x in shared memory
    stages: int = 3  # pieces of 128 columns of codes there
    splits: int = 1  # programs that share the columns of a row
    whole: int = 0  # the first tiles of rows, which have a program each nevertheless

    @property
    def warps(self) -> int:
        """Return the warps of a program: sixteen rows have one."""
        return self.rows // 16

    @property
    def noted(self) -> int:
        """Return the patches whose places a program writes down at once."""
        return 4 * self.rows


WIN4_DECODE_WORDS = 512
WIN4_DECODE_WARPS = 8
WIN4_ENCODE_WARPS = 4
PATCHES_WARPS = 1
TIER_DECODE_WARPS = 8
TIER_ENCODE_WARPS = 8
RANS_WARPS = 1
SUM_BLOCK = 512
STARTS_BLOCK = 4096
ORDERED_TOKENS = 32
PATCHES = 32

MAX_FUSED_TOKENS = 16
"""Tokens up to which a product decodes on the way; with more, the weight is decoded first."""
MAX_WIDE_TOKENS = 256
"""The same on Hopper, whose tensor cores read x from shared memory."""


ROW_TILES = (
    RowTile(4, 64, 1, 4, packed=True),
    RowTile(2, 64, 1, 3, packed=True),
    RowTile(2, 128, 1, 4, packed=True),
)
"""For fewer and fewer rows, as swept on an H200 with the shapes of Llama-3-8B."""
WARPS_PER_PROCESSOR = 8


WARPS_FOR_SOME = 6
"""Warps of each multiprocessor with some tokens: what hides the time until the codes are there."""
PROGRAMS_PER_PROCESSOR = 12
"""With several tokens: what hides the time until the codes are there."""


def row_tile(rows: int, processors: int) -> RowTile:
    """Return the tile for one token and N rows; a multiprocessor wants some warps to wait with."""
    for found in ROW_TILES:
        if rows // found.rows * found.warps >= WARPS_PER_PROCESSOR * processors:
            return found
    return ROW_TILES[-1]


def matrix_tile(tokens: int, rows: int, columns: int, processors: int) -> MatrixTile:
    """Return the tile for M tokens, a few, N rows and K columns, codes decoded in registers."""
    height = 16 if tokens <= 8 else 32
    warps = 2
    while rows // height * warps < WARPS_FOR_SOME * processors and warps < 8:
        warps *= 2
    warps = min(warps, max(1, columns // 512))
    return MatrixTile(height, 8 if tokens <= 8 else 16, 1 << (warps.bit_length() - 1))


def wide_tile(tokens: int) -> WideTile:
    """Return the tile for more tokens, M, on Hopper."""
    if tokens <= 128:
        return WideTile(64, 64 if tokens <= 64 else 128)
    return WideTile(128, 256)


def tile(tokens: int, rows: int, columns: int, processors: int) -> Tile:
    """Return the tile for M tokens, a few, N rows and K columns."""
    width = max(16, 1 << (tokens - 1).bit_length())
    height = 32
    programs = -(-rows // height)
    splits = 1
    while programs * splits < PROGRAMS_PER_PROCESSOR * processors and splits < 8:
        splits *= 2
    return Tile(height, min(width, 128), 32, 2, 3, splits)


def chunks_touched(rows: int, columns: int) -> int:
    """Return a power of two, not less than the chunks that some rows touch."""
    return 1 << ((rows * columns - 1) // CHUNK + 1).bit_length()
