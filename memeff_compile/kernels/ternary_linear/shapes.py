"""Tile sizes of the kernels for ternary linear layers: rows of the weight, tokens, and warps."""

from __future__ import annotations

from dataclasses import dataclass

MAX_VECTORS = 4
"""The most tokens for which the kernel without tensor cores runs."""
MAX_GROUP = 3
"""The most matrices that one launch multiplies with the same tokens."""
GROUPED_TOKENS = 64
"""The most tokens for which several matrices of one input share a launch: separate launches would
leave multiprocessors idle.
"""
MAX_COLUMNS = 1 << 15
"""The most columns of one token that a program processes."""


@dataclass(frozen=True)
class VectorShapes:
    """The sizes of a launch for few tokens, which does not use tensor cores.

    The fields are the rows of weights per tile, the warps, and the tiles per program.
    """

    rows: int
    warps: int
    tiles: int = 1


@dataclass(frozen=True)
class TileShapes:
    """The sizes of a launch on tensor cores: tokens, rows and bytes of weights per tile, warps and
    stages.

    `group` consecutive tiles of rows use the same tile of tokens, which therefore stays in the L2
    cache.
    """

    tokens: int
    rows: int
    bytes: int
    warps: int
    stages: int
    splits: int = 1
    group: int = 8


def vector_shapes(words: int, rows: int, tokens: int, processors: int) -> VectorShapes:
    """For at most 4 tokens, return the tile sizes that were fastest, or nearly fastest, on an H200.

    `words` is the number of 32-bit words in a row of weights. `rows` is the number of rows of all
    matrices of the launch.
    """
    wide = 1 << (words - 1).bit_length()
    if tokens == 1 and wide == 256 and 16 * processors < rows <= 32 * processors:
        return VectorShapes(32, 16)
    warps = 16 if wide >= 1024 else 8
    high = max(2, min(32, 1024 * warps // wide) // (1 if tokens == 1 else 2))
    while high > 4 and 2 * rows < high * processors:
        high //= 2
    slots = processors * (1 if warps == 16 else 2)
    tiles = 1
    while tiles < 8 and rows > high * tiles * slots:
        tiles *= 2
    return VectorShapes(high, warps, tiles)


WORDS_OF_ONE_LAUNCH = 1_250_000
"""The most words of packed weights for which saving a launch is worth more than quantising the
tokens only once."""


def quantizes_first(words: int, rows: int) -> bool:
    """Return whether, for up to four tokens, a separate kernel quantises them before the
    product."""
    return words * rows > WORDS_OF_ONE_LAUNCH


def multiplies_by_dots(tokens: int, words: int, rows: int) -> bool:
    """Return whether integer dot products are faster than tensor cores, whose tiles have 16 tokens.

    On an H200, with weights of nine sizes, dot products were always faster for two tokens, and
    never faster for four tokens.
    """
    return tokens < 3 or (tokens == 3 and not quantizes_first(words, rows))


def coded_shapes(words: int, rows: int, tokens: int, processors: int) -> VectorShapes:
    """Return the tile sizes for multiplying up to 4 quantised tokens by ternary weights.

    A separate kernel has quantised the tokens. The result also contains the number of warps. On an
    H200, the returned tile sizes and numbers of warps were the fastest. `words` is the number of
    32-bit words in a row of weights. `rows` is the number of rows of all matrices of the launch.
    """
    wide = 1 << (words - 1).bit_length()
    if wide <= 256 and rows <= 96 * processors:
        return VectorShapes(8, 4)
    return VectorShapes(8, 4 if wide <= 512 else 8, 2)


def tile_shapes(
    tokens: int, rows: int, width: int, processors: int, *, is_hopper: bool = True
) -> TileShapes:
    """Return the tile sizes and warps for more tokens than `vector_shapes` supports: the fastest,
    or nearly the fastest, on an H200.

    A row of packed weights has `width` bytes. On Hopper GPUs, four warps have enough registers for
    the sums of a 128 x 128 tile.
    """
    large = TileShapes(128, 128, 64, 4 if is_hopper else 8, 3)
    if tokens > 64:
        if -(-rows // 128) * -(-tokens // 128) >= processors:
            return large
        if -(-rows // 128) * -(-tokens // 64) >= processors:
            return TileShapes(64, 128, 64, 4, 4)
        return TileShapes(64, 64, 128, 4, 3)
    block = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    warps = 2 if block == 16 else 4
    if -(-rows // 64) >= processors:
        return TileShapes(block, 64, 256 if block == 16 and width <= 1024 else 128, warps, 3)
    if width >= 2048:
        return TileShapes(block, 64, 256 if block == 16 else 128, warps, 3, 2)
    return TileShapes(block, 32, 128 if width >= 512 else 64, warps, 3)
