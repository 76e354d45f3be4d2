"""Choose how the implementation `tiles` divides the work: tile sizes, warps and pipeline stages.

All these sizes depend on the head dimension and the kind of GPU, never on values in tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._triton.gpus import Gpu
from .._triton.key_tiles import depth_block
from .settings import NARROWEST


@dataclass(frozen=True)
class Shape:
    """The compile-time constants of the attention kernel: tile sizes, warps and pipeline stages."""

    rows: int  # queries per tile
    keys: int  # keys per tile; divides `settings.BLOCK`
    warps: int  # warps per program
    stages: int  # tiles in flight
    # whether int32 becomes fp32 by the start of the sum rather than by conversion
    magic: bool = False
    registers: int | None = None  # the most a thread may use, or None for no limit
    parts: int = 1  # of the channels of values, multiplied after each other


LOOK_WARPS = 4
LOOK_KEYS = 16
SETTLE_WARPS = 4
WRITE_WARPS = 4
TOTAL_COLUMNS = 16
TOTAL_BLOCKS = 8
TOTAL_WARPS = 4
MEANS = 64
CORRECT_WARPS = 8
MOST_CHUNKS = 32
PROGRAMS_PER_PROCESSOR = 4

HEADS_TOGETHER = 4
"""Heads whose tiles are computed at the same time: heads with the same keys share the L2 cache, and
the short tiles under a causal mask end at the same time.
"""

_SHAPES: dict[str, dict[int, Shape]] = {
    "hopper": {  # 227 KiB, products of warp groups; the fastest of a sweep on an H200
        64: Shape(64, 128, 4, 3, registers=128),  # four blocks per processor
        128: Shape(64, 128, 4, 2, magic=True, registers=168),  # three
        256: Shape(64, 64, 4, 3, magic=True, parts=4),
    },
    "roomy": {  # 163 KiB on 8.0
        64: Shape(128, 64, 8, 2),
        128: Shape(128, 64, 8, 2),
        256: Shape(64, 64, 8, 2),
    },
    "narrow": {  # 99 KiB
        64: Shape(128, 64, 8, 2),
        128: Shape(128, 64, 8, 2),
        256: Shape(64, 64, 8, 1),
    },
}

_SHAPES["blackwell"] = _SHAPES["roomy"]

# The same with values in fp16, whose products are added to the sums of earlier tiles.
_SHAPES_WITH_F16: dict[str, dict[int, Shape]] = {
    "hopper": {
        64: replace(_SHAPES["hopper"][64], registers=None),  # leaves room for two blocks anyway
        128: replace(_SHAPES["hopper"][128], registers=None),
        256: Shape(64, 64, 4, 2, magic=True),  # as fast as cuDNN
    },
}

# The same, for kernels whose masks, ids, corrections or scales of single keys take more registers.
_SHAPES_WITH_TABLES: dict[str, dict[int, Shape]] = {
    "hopper": {64: Shape(128, 64, 8, 2), 128: Shape(128, 64, 8, 2), 256: Shape(64, 64, 8, 2)},
    "roomy": {256: Shape(64, 32, 8, 2)},
    "blackwell": {256: Shape(64, 32, 8, 2)},
}


def channels_together(wide: int) -> int:
    """Return how many channels a kernel sums in each iteration of its loop over channels.

    The kernel multiplies keys by the mean of each block of queries. `wide` is the padded head
    dimension.
    """
    return min(64, 8192 // wide)  # wider heads would not leave enough registers


def write_warps(wide: int) -> int:
    """Return the number of warps of a program that rounds keys or values to codes.

    `wide` is the padded head dimension.
    """
    return WRITE_WARPS * (wide // 128 or 1)


def shape_for(
    depth: int,
    gpu: Gpu,
    *,
    has_tables: bool = False,
    has_starts: bool = False,
    has_f16: bool = False,
) -> Shape:
    """Return the tile shape of the attention kernel for a head dimension and GPU.

    With `has_tables`, the kernel also loads numbers per key other than k and v: a mask, sequence
    ids, scales, or mean products. Mean products are the products of the keys with the mean that is
    subtracted from a block of queries. The kernel adds the mean products after the product of
    queries and keys. With `has_starts`, the sums of this product start from the mean products
    instead. Only Hopper GPUs have enough shared memory for mean products in addition to the tiles.
    With `has_f16`, softmax weights and values are fp16.
    """
    kind, block = gpu.kind, depth_block(depth, NARROWEST)
    has_tables = has_tables or (has_starts and kind != "hopper")
    shapes = _SHAPES_WITH_F16 if has_f16 else _SHAPES
    found = shapes.get(kind, _SHAPES[kind])[block]
    return _SHAPES_WITH_TABLES.get(kind, {}).get(block, found) if has_tables else found
