"""How the engine `split` cuts the work: keys per tile, and programs per sequence and head.

Everything follows from static sizes, never from how much is filled, so a launch that was captured
in a CUDA graph stays right as the cache fills up.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROWS = 16
"""The fewest rows of a tensor-core product; query heads of one key-value head share a tile."""

MAX_ROWS = 32

PROGRAMS_PER_PROCESSOR = 3
"""As many as fit on one of an H200 at once: 168 registers per thread, 70 KiB of shared memory."""

MAX_SPLITS = 64


@dataclass(frozen=True)
class Shapes:
    """What a launch of the attention kernel is compiled for.

    Attributes:
        keys: keys per tile.
        warps: warps per program.
        stages: tiles of keys and values in flight.
    """

    keys: int
    warps: int
    stages: int


def shapes_for(depth: int, itemsize: int, rows: int, capability: tuple[int, int]) -> Shapes:
    """Return the tile of a head dimension, element size, rows per tile and compute capability.

    A stage holds a tile of keys and one of values. What fits is decided by the shared memory of a
    multiprocessor: 163 KiB on 8.0, 227 KiB on 9.0 and 10.0, 99 KiB on the others; two programs
    should share one, so that one loads while the other computes.

    Example: shapes_for(128, 2, 16, (9, 0)) == Shapes(keys=64, warps=4, stages=3).
    """
    if itemsize > 2:  # no tensor cores: small tiles, or the registers overflow
        return Shapes(16, 8 if depth <= 128 else 4, 2)
    roomy = capability in ((8, 0), (9, 0)) or capability[0] == 10
    budget = (96 if roomy else 48) << 10
    block = depth_block(depth)
    stage = 2 * block * itemsize  # bytes per key: its key and its value
    keys = 64
    while keys > 16 and 2 * keys * stage > budget:
        keys //= 2
    stages = max(1, min(3, budget // (keys * stage)))
    return Shapes(keys, 8 if rows > MIN_ROWS and block > 64 else 4, stages)


def depth_block(depth: int) -> int:
    """Return the power of two that holds a head dimension: at least 16."""
    return max(16, 1 << (depth - 1).bit_length())


def rows_for(rows: int, itemsize: int) -> int:
    """Return the rows of a tile for so many query rows per key-value head.

    Example: rows_for(4, 2) == 16 and rows_for(100, 2) == 32.
    """
    most = MAX_ROWS if itemsize <= 2 else MIN_ROWS
    return min(most, max(MIN_ROWS, 1 << (rows - 1).bit_length()))


def splits_for(groups: int, keys: int, tile: int, processors: int) -> int:
    """Return the number of programs that share the keys of one sequence and key-value head.

    Args:
        groups: sequences times key-value heads times tiles of query rows.
        keys: length of the cache, filled or not.
        tile: keys per tile.
        processors: multiprocessors of the GPU.

    Example: splits_for(8, 32768, 64, 132) == 49 and splits_for(128, 4096, 64, 132) == 3.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(groups, 1)
    return max(1, min(wanted, MAX_SPLITS, -(-keys // tile)))
