"""Choose how `split`, an implementation of attention over a KV cache, divides the work: keys per
tile, and programs per sequence and head.

The implementation `split` divides the cached keys of a sequence among several programs.
The chosen sizes depend on static sizes, not on the number of cached tokens. So a launch in a CUDA
graph stays valid as the cache fills up.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._triton.gpus import Gpu
from .._triton.key_tiles import depth_block

MIN_ROWS = 16
"""The fewest rows of a tensor-core product; query heads of one key-value head share a tile."""

MAX_ROWS = 32

MAX_SPLITS = 64

MAX_PROGRAMS = 3
"""The most programs per multiprocessor that are counted on: registers allow no more."""

# The cost of a launch. The unit is the time for one tile of keys per program, when the GPU runs as
# many programs at once as it can. The costs are: the first loads of a program, the kernel that adds
# the partial results, and the minimum that few programs need for one tile each. These numbers were
# chosen so that `splits_for` picks the fastest sizes of `benchmarks/ops/kv_decode.py --part sweep`
# on an H200.
_START = 0.5
_COMBINE = 1.6
_COMBINE_PER_SHARE = 0.05
_LEAST = 0.9


@dataclass(frozen=True)
class Shapes:
    """The compile-time constants of the attention kernel: tile size, warps and pipeline stages."""

    keys: int  # keys per tile
    warps: int  # warps per program
    stages: int  # tiles of keys and values in flight


def shapes_for(depth: int, itemsize: int, rows: int, gpu: Gpu) -> Shapes:
    """Return the attention kernel's keys per tile, warps and pipeline stages.

    `depth` is the head dimension, and `itemsize` the bytes of an element. `rows` is the number of
    query rows in a tile of queries. A pipeline stage is one tile of keys and one tile of values in
    shared memory. One program fills a multiprocessor's shared memory with its pipeline stages. On
    an H200, one such program is 3 to 8 % faster than three smaller programs.
    """
    if itemsize > 2:  # no tensor cores: small tiles, or the registers overflow
        return Shapes(16, 8 if depth <= 128 else 4, 2)
    budget = _shared_memory(gpu)
    block = depth_block(depth)
    stage = _bytes_per_key(depth, itemsize)
    keys = 128
    while keys > 16 and 2 * keys * stage > budget:
        keys //= 2
    stages = max(1, min(3, budget // (keys * stage)))
    is_wide = block > 64 and (rows > MIN_ROWS or keys > 64)
    return Shapes(keys, 8 if is_wide else 4, stages)  # 128, 8, 3 for (128, 2, 16, H200)


def _shared_memory(gpu: Gpu) -> int:
    """Return the shared memory that tiles may use, in bytes, a little below the limit of one
    program."""
    return gpu.shared - (11 << 10)


def _bytes_per_key(depth: int, itemsize: int) -> int:
    return 2 * depth_block(depth) * itemsize


def programs_per_processor(shapes: Shapes, depth: int, itemsize: int, gpu: Gpu) -> int:
    """Return how many programs run on a multiprocessor at once, given the shared memory of each
    program.
    """
    used = shapes.stages * shapes.keys * _bytes_per_key(depth, itemsize)
    return max(1, min(MAX_PROGRAMS, _shared_memory(gpu) // used))


def rows_for(rows: int, itemsize: int) -> int:
    """Return how many query rows a tile of queries has.

    `rows` is the number of query rows per key-value head, and `itemsize` the bytes of an element.
    """
    most = MAX_ROWS if itemsize <= 2 else MIN_ROWS
    return min(most, max(MIN_ROWS, 1 << (rows - 1).bit_length()))  # (100, 2): 32


def splits_for(groups: int, keys: int, tile: int, slots: int) -> int:
    """Return the number of programs among which the keys of one sequence and key-value head are
    divided.

    A group is one tile of query rows of one sequence and key-value head. The number of programs
    depends on the cache's length, not on its filled positions. The GPU runs `slots` programs at
    once. Examples with tiles of 128 keys and 132 programs at once:

    - 8 groups with 32768 keys get 16 programs each;
    - 128 groups with 4096 keys get 1 each.
    """
    tiles = -(-keys // tile)
    return min(
        range(1, max(1, min(MAX_SPLITS, tiles)) + 1),
        key=lambda splits: _cost(groups * splits, -(-tiles // splits), splits, slots),
    )


def _cost(programs: int, tiles: int, splits: int, slots: int) -> float:
    """Predict the time of attention over a KV cache, including the sum of partial results.

    The GPU runs `slots` programs at once. Further programs wait until other programs end. The unit
    is the time in which `slots` programs process one tile of keys each.
    """
    waves, rest = divmod(programs, slots)
    time = waves + (max(rest / slots, _LEAST) if rest else 0.0)
    combine = _COMBINE + _COMBINE_PER_SHARE * splits if splits > 1 else 0.0
    return time * (tiles + _START) + combine
