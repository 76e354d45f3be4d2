"""Gluon's names, as this Triton has them; it is experimental, and importing this may fail."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def tiles_of(matrix: Tensor, rows: int, columns: int, bits: int = 16, swizzle: int = 128) -> Any:
    """Return a matrix as the descriptor of tiles of a shape, which the GPU loads by itself."""
    layout = NVMMASharedLayout(swizzle, bits, 2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


__all__ = [
    "NVMMASharedLayout",
    "TensorDescriptor",
    "async_copy",
    "barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "tiles_of",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
