"""Tiles of the Triton kernels: how many rows and tokens a program takes, with how many warps."""

from __future__ import annotations

from dataclasses import dataclass

MAX_VECTORS = 4
"""Tokens that the kernel without tensor cores takes at once."""
MAX_GROUP = 3
"""Matrices that one launch multiplies with the same tokens."""
MAX_COLUMNS = 1 << 15
"""Columns that a program holds of one token."""


@dataclass(frozen=True)
class VectorShapes:
    """A launch for few tokens: rows of weights per program, warps."""

    rows: int
    warps: int


@dataclass(frozen=True)
class TileShapes:
    """A launch on tensor cores: tokens, rows and bytes of weights per tile, warps and stages."""

    tokens: int
    rows: int
    bytes: int
    warps: int
    stages: int
    splits: int = 1


def vector_shapes(words: int, rows: int, tokens: int, processors: int) -> VectorShapes:
    """Return the launch for `tokens` <= 4.

    Args:
        words: of 32 bits per row of weights.
        rows: of weights, of all matrices of the launch.
        tokens: how many.
        processors: multiprocessors of the GPU.
    """
    wide = 1 << (words - 1).bit_length()
    held = max(1, 8192 // wide)  # words of a tile
    held = min(16, held // (2 if tokens > 2 else 1)) or 1
    while held > 4 and rows < held * 2 * processors:
        held //= 2
    return VectorShapes(max(2, held), 4 if wide <= 512 else 8)


def tile_shapes(tokens: int, rows: int, width: int, processors: int) -> TileShapes:
    """Return the launch for more tokens.

    Args:
        tokens, rows: of activations and of weights.
        width: bytes per row of weights.
        processors: multiprocessors of the GPU.
    """
    if tokens > 64:
        if tokens > 512:
            return TileShapes(128, 128, 64, 8, 3)
        return TileShapes(64, 128, 64, 4, 3)
    block = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    tall = 64
    while tall > 16 and -(-rows // tall) < 2 * processors:
        tall //= 2
    return TileShapes(block, max(tall, 32), 128 if width >= 512 else 64, 4, 4)
