"""Gluon's names, as this Triton has them; it is experimental, and importing this may fail."""

from __future__ import annotations

from triton.experimental import gluon as gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout as NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import async_copy as async_copy
from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared as fence_async_shared,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma_wait as warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
