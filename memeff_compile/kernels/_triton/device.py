"""Facts about the GPU that launchers decide by, and the setting that ops run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from memeff_compile import decisions

# H100 and H200; also what the width rules assume where there is no GPU to ask.
DEFAULT_PROCESSORS = 132
DEFAULT_CAPABILITY = (9, 0)

_planned: ContextVar[torch.device | None] = ContextVar("planned device", default=None)


@contextmanager
def planned_for(device: torch.device) -> Iterator[None]:
    """Answer questions about engines for `device`, which need not be here, wherever tensors are."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def where_it_runs(device: torch.device) -> torch.device:
    """Return the device whose engines are asked about: `device`, or the one planned for."""
    return _planned.get() or device


def can_run_kernels(index: int) -> bool:
    """Say whether our Triton kernels and fp32-output products run on CUDA device `index`.

    They need triton and compute capability 8.0 or later, which a planned device is taken to have.
    """
    return _planned.get() is not None or _can_run_kernels(index)


def kernels_serve(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether our Triton kernels serve tensors of this dtype on a device, or a planned one."""
    device = where_it_runs(device)
    if device.type != "cuda" or dtype == torch.float64:
        return False
    return can_run_kernels(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _can_run_kernels(index: int) -> bool:
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
    """Return the compute capability of `device`, or that of an H200 off CUDA."""
    if device.type != "cuda":
        return DEFAULT_CAPABILITY
    return _cuda_capability(torch.cuda.current_device() if device.index is None else device.index)


_NOTHING = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU current, which is where Triton launches."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Keep autocast, which reaches into opaque ops, away from the products."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def is_hopper(index: int) -> bool:
    """Say whether CUDA device `index` is what the tile kernels are shaped for: capability 9.0.

    A planned device is taken to be one.
    """
    if _planned.get() is not None:
        return True
    return can_run_kernels(index) and _cuda_capability(index)[0] == 9


@lru_cache(maxsize=64)
def machine(index: int) -> decisions.Machine:
    """Return what a measurement on CUDA device `index` holds for."""
    major, minor = _cuda_capability(index)
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
    return machine(torch.cuda.current_device() if device.index is None else device.index)


def tuned(device: torch.device, name: str, default: decisions.Value) -> decisions.Value:
    """Return the setting that was measured on this device for a decision, else the default."""
    return decisions.value(machine_of(device), name, default)


def tuned_number(device: torch.device, name: str, default: float) -> float:
    """Return a measured number, else the default."""
    found = tuned(device, name, default)
    assert not isinstance(found, str)
    return found


def speed_note(device: torch.device) -> str:
    """Say what is known of the speed of our choices on a device, or "" where it is no GPU here."""
    found = machine_of(device)
    return "" if found is None else decisions.speed_note(found)


def decided_by_measurement() -> str:
    """Return a digest of every choice that was measured on the GPUs of this process, or ""."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return decisions.fingerprint(machine(index) for index in range(count))
