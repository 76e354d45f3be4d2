"""Tell which GPU is present and which kernels it can run, and make a GPU and a stream current."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from ..compat import current_gpu
from ..compat import without_autocast as without_autocast
from ._triton.gpus import AMD, NVIDIA
from ._triton.gpus import H200 as H200
from ._triton.gpus import Gpu as Gpu
from ._triton.gpus import gpu_of as gpu_of

DEFAULT_PROCESSORS = 132
"""Multiprocessors of an H200; the width rules also assume this number if no GPU is present."""
MEASURED = ("NVIDIA H200",)
"""The GPUs on which the choices of engines were measured, as torch names them."""


class _Planned(NamedTuple):
    """The device for which an op's implementation is chosen, and its kind of GPU.

    This device is called the planned device. The op's tensors may be on another device.
    """

    device: torch.device
    gpu: Gpu


_planned: ContextVar[_Planned | None] = ContextVar("planned device", default=None)


@contextmanager
def planned_for(device: torch.device, gpu: Gpu = H200) -> Iterator[None]:
    """Choose implementations for `device` instead of the tensors' device, as if the code ran there.
    This planned device need not be present.

    If `device` is a GPU, implementations are chosen for GPUs of the kind `gpu`.
    """
    token = _planned.set(_Planned(device, gpu))
    try:
        yield
    finally:
        _planned.reset(token)


def where_it_runs(device: torch.device) -> torch.device:
    """Return the device for which implementations are chosen.

    Inside the context `planned_for`, the result is the device that was passed to `planned_for`.
    Otherwise, the result is `device`.
    """
    planned = _planned.get()
    return device if planned is None else planned.device


def kernels_serve(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels support a dtype on a device. Inside the context
    `planned_for`, the result is for the planned device instead.
    """
    device = where_it_runs(device)
    return device.type == "cuda" and dtype != torch.float64 and can_run_kernels(device)


def can_run_kernels(device: torch.device) -> bool:
    """Return whether a GPU can run the Triton kernels and matrix products with fp32 output.

    The kernels need triton and an NVIDIA GPU of compute capability 8.0 or later. Inside the context
    `planned_for`, the function answers for the planned kind of GPU, and assumes that triton is
    installed.
    """
    planned = _planned.get()
    return runs_kernels(_index(device)) if planned is None else planned.gpu.runs_kernels


@lru_cache(maxsize=64)
def runs_kernels(index: int) -> bool:
    """Return whether the CUDA device `index` of this machine can run the Triton kernels."""
    return find_spec("triton") is not None and _gpu(index).runs_kernels


def kernels_need(device: torch.device) -> str:
    """Return the kernels' requirements that this machine does not meet, as text that can follow
    "the kernels need"."""
    owner = "" if gpu(device).is_nvidia else "an NVIDIA GPU of "
    return f"triton and {owner}compute capability 8.0 or later"


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(maxsize=64)
def _gpu(index: int) -> Gpu:
    vendor = NVIDIA if torch.version.hip is None else AMD
    return gpu_of(torch.cuda.get_device_capability(index), vendor)


def gpu(device: torch.device) -> Gpu:
    """Return the properties of a device's GPU; without a GPU, return the properties of an H200."""
    planned = _planned.get()
    if planned is not None:
        return planned.gpu
    if device.type != "cuda" or not _has_gpu():
        return H200
    return _gpu(_index(device))


def starts_early(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous kernel has ended.

    A kernel that starts early waits before it reads the previous kernel's results.
    """
    return device.type == "cuda" and gpu(device).starts_early


def was_measured(device: torch.device, op: str) -> bool:
    """Return whether an op's speed was measured on GPUs of the device's kind.

    Without a GPU, return True.
    """
    planned = _planned.get()
    if planned is not None:
        return op in planned.gpu.measured
    if device.type != "cuda" or not _has_gpu():
        return True
    return op in gpu(device).measured


@lru_cache(maxsize=64)
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of `device`.

    If the device is not a GPU, return the number of an H200.
    """
    return DEFAULT_PROCESSORS if device.type != "cuda" else _processors(_index(device))


_NOTHING = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU current, because Triton launches kernels on the current GPU."""
    if not tensor.is_cuda or tensor.get_device() == current_gpu():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def stream_of(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """Return the current stream of the tensor's GPU, or None if the tensor is not on a GPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Make `stream`, a result of `stream_of`, the current stream."""
    if stream is None or torch.cuda.current_stream(stream.device) == stream:
        return _NOTHING
    return torch.cuda.stream(stream)


@lru_cache(maxsize=1)
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def speed_note(device: torch.device) -> str:
    """Return a remark that says whether speed was measured on the present GPU. The result is "" if
    no GPU is present, or inside the context `planned_for`, where code is planned for another
    device.
    """
    if _planned.get() is not None or device.type != "cuda" or not _has_gpu():
        return ""
    name = torch.cuda.get_device_name(_index(device))
    return (
        f"defaults measured on an {name}" if name in MEASURED else "speed not measured on this GPU"
    )
