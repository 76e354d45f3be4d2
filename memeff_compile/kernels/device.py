"""The one door to what a GPU is and what runs there, and the setting that ops run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch

from .. import decisions
from ..compat import current_gpu
from ..compat import without_autocast as without_autocast
from ._triton.gpus import AMD, NVIDIA
from ._triton.gpus import H200 as H200
from ._triton.gpus import Gpu as Gpu
from ._triton.gpus import gpu_of as gpu_of

DEFAULT_PROCESSORS = 132
"""Of an H200; also what the width rules assume where there is no GPU to ask."""


class _Planned(NamedTuple):
    """The device that questions about engines are answered for, and its kind of GPU."""

    device: torch.device
    gpu: Gpu


_planned: ContextVar[_Planned | None] = ContextVar("planned device", default=None)


@contextmanager
def planned_for(device: torch.device, gpu: Gpu = H200) -> Iterator[None]:
    """Answer questions about engines for `device`, which need not be here, wherever tensors are.

    A GPU is taken to be of the kind `gpu`.
    """
    token = _planned.set(_Planned(device, gpu))
    try:
        yield
    finally:
        _planned.reset(token)


def where_it_runs(device: torch.device) -> torch.device:
    """Return the device whose engines are asked about: `device`, or the one planned for."""
    planned = _planned.get()
    return device if planned is None else planned.device


def kernels_serve(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether our Triton kernels serve tensors of this dtype on a device, or a planned one."""
    device = where_it_runs(device)
    return device.type == "cuda" and dtype != torch.float64 and can_run_kernels(device)


def can_run_kernels(device: torch.device) -> bool:
    """Say whether our Triton kernels and fp32-output products run on a GPU.

    They need triton and a GPU of NVIDIA's of compute capability 8.0 or later. A planned device is
    taken to have triton.
    """
    planned = _planned.get()
    return runs_kernels(_index(device)) if planned is None else planned.gpu.runs_kernels


@lru_cache(maxsize=64)
def runs_kernels(index: int) -> bool:
    """Say so of CUDA device `index`, which is here."""
    return find_spec("triton") is not None and _gpu(index).runs_kernels


def kernels_need(device: torch.device) -> str:
    """Say what is missing where `kernels_serve` says no on a GPU, as the object of "need"."""
    owner = "" if gpu(device).is_nvidia else "an NVIDIA GPU of "
    return f"triton and {owner}compute capability 8.0 or later"


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(maxsize=64)
def _gpu(index: int) -> Gpu:
    vendor = NVIDIA if torch.version.hip is None else AMD
    return gpu_of(torch.cuda.get_device_capability(index), vendor)


def gpu(device: torch.device) -> Gpu:
    """Return what the GPU of `device` has, or what an H200 has where there is none to ask."""
    planned = _planned.get()
    if planned is not None:
        return planned.gpu
    if device.type != "cuda" or not _has_gpu():
        return H200
    return _gpu(_index(device))


def starts_early(device: torch.device) -> bool:
    """Say whether a kernel may start while the one before it ends, and wait before it reads."""
    return device.type == "cuda" and gpu(device).starts_early


def was_measured(device: torch.device, op: str) -> bool:
    """Say whether an op's speed was measured on this kind of GPU; also where there is no GPU."""
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
    """Return the number of multiprocessors of `device`, or that of an H200 off CUDA."""
    return DEFAULT_PROCESSORS if device.type != "cuda" else _processors(_index(device))


_NOTHING = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU current, which is where Triton launches."""
    if not tensor.is_cuda or tensor.get_device() == current_gpu():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def stream_of(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """Return the current stream of the tensor's GPU; None off CUDA."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Make a stream that `stream_of` returned current again."""
    if stream is None or torch.cuda.current_stream(stream.device) == stream:
        return _NOTHING
    return torch.cuda.stream(stream)


@lru_cache(maxsize=64)
def machine(index: int) -> decisions.Machine:
    """Return what a measurement on CUDA device `index` holds for."""
    major, minor = _gpu(index).capability
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return decisions.Machine(
        gpu=torch.cuda.get_device_name(index),
        capability=f"{major}.{minor}",
        torch=torch.__version__,
        triton=triton,
        kernels=decisions.kernels_version(),
    )


@lru_cache(maxsize=1)
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def machine_of(device: torch.device) -> decisions.Machine | None:
    """Return the machine that serves a device; None for a CPU or a device that is only planned."""
    if _planned.get() is not None or device.type != "cuda" or not _has_gpu():
        return None
    return machine(_index(device))


def tuned(device: torch.device, name: str, default: str) -> str:
    """Return the setting that was measured on this device for a decision, else the default."""
    return decisions.value(machine_of(device), name, default)


def speed_note(device: torch.device) -> str:
    """Say what is known of the speed of our choices on a device, or "" where it is no GPU here."""
    found = machine_of(device)
    return "" if found is None else decisions.speed_note(found)


def decided_by_measurement() -> str:
    """Return a digest of every choice that was measured on the GPUs of this process, or ""."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return decisions.fingerprint(machine(index) for index in range(count))
