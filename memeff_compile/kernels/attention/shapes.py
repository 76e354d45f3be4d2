"""Choose how the implementation `tiles` divides the work: tile sizes, warps and pipeline stages of
each kernel.

All these sizes depend on the head dimension and the kind of GPU. Some sizes also depend on whether
a call has a mask or sequence ids. No size depends on the values in a mask or in sequence ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._triton.gpus import Gpu
from .._triton.key_tiles import depth_block

KERNELS = ("forward", "query_gradient", "key_gradient")


@dataclass(frozen=True)
class Shape:
    """The compile-time constants of a kernel: tile sizes, warps and pipeline stages."""

    rows: int  # queries per tile
    keys: int  # keys per tile
    warps: int  # warps per program
    stages: int  # tiles in flight
    # keys and values get their gradients from two launches, so the scores are computed once
    # more; both sums do not fit in the registers of wide heads
    is_split: bool = False
    registers: int | None = None  # the most a thread may use, or None for no limit
    # programs of one head start together, instead of the programs for the same tile of all heads
    by_head: bool = False


def _row(*shapes: tuple[Any, ...]) -> dict[int, Shape]:
    """Return a kernel's shapes (tile sizes, warps and pipeline stages) by padded head dimension.

    `shapes` contains the arguments of `Shape` for the head dimensions 64, 128 and 256.
    """
    return {depth: Shape(*shape) for depth, shape in zip((64, 128, 256), shapes, strict=True)}


# By the kind of GPU, then by kernel: rows, keys, warps and stages for padded head dimensions of 64,
# 128 and 256, and whether the kernel for 256 is split.
_SHAPES: dict[str, dict[str, dict[int, Shape]]] = {
    "hopper": {  # 227 KiB, products of warp groups; the fastest of a sweep on an H200
        "forward": _row((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
        "query_gradient": _row((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        "key_gradient": _row((64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 8, 2)),
    },
    "blackwell": {  # 227 KiB, and separate memory for sums
        "forward": _row((128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2)),
        "query_gradient": _row((128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        "key_gradient": _row((64, 128, 8, 2), (32, 128, 8, 3), (16, 64, 8, 1, True)),
    },
    "roomy": {  # 163 KiB on 8.0
        "forward": _row((128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        "query_gradient": _row((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
        "key_gradient": _row((64, 128, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    },
    "narrow": {  # 99 KiB
        "forward": _row((128, 64, 4, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        "query_gradient": _row((64, 64, 4, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
        "key_gradient": _row((64, 64, 4, 2), (32, 64, 8, 1), (32, 32, 8, 1)),
    },
}


# The same, for kernels whose tables take additional registers.
_SHAPES_WITH_TABLES: dict[str, dict[str, dict[int, Shape]]] = {
    "hopper": {
        "forward": {64: Shape(128, 64, 8, 3), 128: Shape(128, 64, 8, 3), 256: Shape(128, 32, 8, 2)},
        "query_gradient": {256: Shape(64, 32, 8, 2)},
    },
    "blackwell": {"forward": {64: Shape(128, 64, 8, 3)}},
    "roomy": {
        "forward": {64: Shape(128, 64, 8, 3), 128: Shape(128, 32, 8, 3)},
        "key_gradient": {64: Shape(32, 64, 8, 2), 128: Shape(32, 64, 8, 2)},
    },
    "narrow": {
        "forward": {64: Shape(128, 64, 8, 2)},
        "query_gradient": {64: Shape(64, 64, 8, 2)},
        "key_gradient": {64: Shape(32, 64, 8, 2)},
    },
}


# Shapes for calls in which a mask tensor decides, tile by tile.
_SHAPES_WITH_A_MASK: dict[str, dict[str, dict[int, Shape]]] = {
    "hopper": {  # two programs per processor
        "forward": {
            64: Shape(128, 64, 8, 3, registers=128),
            128: Shape(64, 64, 4, 2, by_head=True),
        },
        "query_gradient": {
            64: Shape(128, 64, 8, 3, registers=128, by_head=True),
            128: Shape(64, 64, 4, 2, by_head=True),
        },
    },
    "blackwell": {
        "query_gradient": {64: Shape(128, 64, 8, 2), 128: Shape(128, 64, 8, 2)},
        "key_gradient": {128: Shape(32, 64, 8, 3)},
    },
    "roomy": {"query_gradient": {64: Shape(64, 64, 8, 2)}},
}


def shape_for(
    kernel: str, depth: int, gpu: Gpu, *, has_tables: bool = False, has_mask: bool = False
) -> Shape:
    """Return the tile shape of a kernel for a head dimension and GPU.

    A call has tables if it has a key mask or sequence ids. With tables or a mask tensor, some
    kernels use other tile shapes than if only positions decide which keys are visible.
    """
    kind, block = gpu.kind, max(64, depth_block(depth))
    found = _SHAPES[kind][kernel][block]
    for table, is_meant in (
        (_SHAPES_WITH_TABLES, has_tables or has_mask),
        (_SHAPES_WITH_A_MASK, has_mask),
    ):
        if is_meant:
            found = table.get(kind, {}).get(kernel, {}).get(block, found)
    return found
