"""Facts about the GPU that launchers decide by."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from importlib.util import find_spec

import torch

# H100 and H200; also what the width rules assume where there is no GPU to ask.
DEFAULT_PROCESSORS = 132


@lru_cache(maxsize=64)
def can_run_kernels(index: int) -> bool:
    """Say whether our Triton kernels and fp32-output products run on CUDA device `index`.

    They need triton and compute capability 8.0 or later.
    """
    return find_spec("triton") is not None and torch.cuda.get_device_capability(index) >= (8, 0)


@lru_cache(maxsize=64)
def _cuda_processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of `device`, or that of an H200 off CUDA."""
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return _cuda_processors(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _cuda_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return _cuda_capability(torch.cuda.current_device() if device.index is None else device.index)


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU current, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@lru_cache(maxsize=64)
def has_tile_loads(index: int) -> bool:
    """Say whether CUDA device `index` loads tiles by descriptor: capability 9.0 or later."""
    return can_run_kernels(index) and _cuda_capability(index) >= (9, 0)
