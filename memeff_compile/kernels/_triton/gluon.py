"""Import Gluon's functions and types from the installed version of Triton. Gluon is experimental,
so importing this module can fail."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental import gluon as gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

from ...compat import is_fake
from .typed import typed

gl, NVMMASharedLayout = language, language.NVMMASharedLayout
async_copy, mma_v2 = ampere.async_copy, ampere.mma_v2
fence_async_shared, mbarrier, tma = hopper.fence_async_shared, hopper.mbarrier, hopper.tma
# Names that differ before Triton 3.9: copies of a tile between its descriptor and shared memory,
# copies by pointers, and views of shared memory with another type, shape or layout.
if hasattr(tma, "async_load"):
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
if hasattr(async_copy, "async_load"):
    load_pointers = async_copy.async_load
else:
    load_pointers = async_copy.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
seen_as = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
warpgroup_mma_init = hopper.warpgroup_mma_init
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def tiles_of(matrix: Tensor, rows: int, columns: int, bits: int = 16, swizzle: int = 128) -> Any:
    """Return a descriptor of a matrix, through which the GPU loads tiles of one shape."""
    given: Any = typed(matrix) if is_fake(matrix) else matrix
    return TensorDescriptor.from_tensor(given, [rows, columns], _layout(swizzle, bits))


def tiles_of_heads(tensor: Tensor, block: Sequence[int]) -> Any:
    """Return a descriptor of a four-axis tensor of 16-bit numbers.

    The tensor's last axis must have stride 1. Outside the tensor, the GPU reads zeros and writes
    nothing.
    """
    given: Any = typed(tensor) if is_fake(tensor) else tensor
    depth = tensor.shape[3]
    # The stride of an axis of one element is never used, but has to be a multiple of 16 bytes.
    strides = [
        depth if size == 1 else stride
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    return TensorDescriptor(given, [*tensor.shape], [*strides, 1], [*block], _layout(128, 16, 4))


@lru_cache(maxsize=16)
def _layout(swizzle: int, bits: int, axes: int = 2) -> Any:
    return NVMMASharedLayout(swizzle, bits, axes)
