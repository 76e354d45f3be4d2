"""Wrap Triton's private functions and classes, so that a new Triton release needs changes in only
one file.

The functions import triton when they are called. The module `gluon` wraps Gluon's functions and
classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ...compat import is_fake
from .typed import typed


@lru_cache(maxsize=1)
def _runtime() -> Any:
    """Return Triton's runtime settings, which contain the launch hooks."""
    from triton import knobs

    return knobs.runtime


def is_watched(kernel: Any) -> bool:
    """Return whether a launch hook is set for a kernel, for example by a profiler."""
    every = _runtime()
    calls = every.launch_enter_hook.calls or every.launch_exit_hook.calls
    return bool(calls or kernel.pre_run_hooks)


def takes(kernel: Any, name: str) -> bool:
    """Return whether a kernel has an argument with a given name."""
    return name in kernel.arg_names


def constant(value: Any) -> Any:
    """Return a value as a `tl.constexpr`, the form in which kernels can read a constant of their
    module.
    """
    import triton.language as tl

    return tl.constexpr(value)


def is_compiled(kernel: Any) -> bool:
    """Return whether a kernel is compiled for a GPU; if not, Triton's interpreter runs it."""
    return hasattr(kernel, "device_caches")


def launcher(
    kernel: Any, compiled: Any, constants: Mapping[str, Any], count: int
) -> Callable[[tuple[int, ...], int, Sequence[Any]], None]:
    """Return a function that launches a compiled kernel on a grid.

    The returned function takes the kernel's first `count` arguments; `constants` contains the
    kernel's other arguments.
    """
    from triton.runtime import driver

    run, stream_of = compiled.run, driver.active.get_current_stream
    rest = [constants[name] for name in list(kernel.arg_names)[count:]]
    plain = (compiled.function, compiled.packed_metadata, None, None, None)

    def launch(grid: tuple[int, ...], device: int, arguments: Sequence[Any]) -> None:
        across, down, deep = (*grid, 1, 1)[:3]
        run(across, down, deep, stream_of(device), *plain, *arguments, *rest)

    return launch


def compile_only(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Compile a kernel and its launch code for the current GPU, without running the kernel."""
    from triton.runtime import driver

    compiled = kernel.warmup(*arguments, grid=(1,), **constants)
    if compiled is not None:
        # The launch code is compiled too, and stored on disk. The kernel is not loaded onto the
        # GPU: another thread may be capturing a CUDA graph.
        driver.active.launcher_cls(compiled.src, compiled.metadata)


def files_of(key: str) -> dict[str, bytes]:
    """Return the files that Triton's cache has for a compiled kernel with the hash `key`."""
    from triton.runtime.cache import get_cache_manager

    folder = Path(get_cache_manager(key).cache_dir)
    found = [each for each in folder.iterdir() if each.is_file()]
    return {each.name: each.read_bytes() for each in found if not _is_of_cache(each.name)}


def is_kept(key: str) -> bool:
    """Return whether Triton's cache has a compiled kernel with the hash `key`."""
    from triton.runtime.cache import get_cache_manager

    folder = getattr(get_cache_manager(key), "cache_dir", None)  # a cache may have no files
    return folder is not None and any(Path(folder).glob(f"{_GROUP}*"))


def keep_files(key: str, files: Mapping[str, bytes]) -> None:
    """Add a compiled kernel to Triton's cache, unless the cache already contains the kernel."""
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(key)
    (about,) = (name for name in files if name.endswith(".json"))
    if manager.get_group(about) is None:
        manager.put_group(about, {name: manager.put(data, name) for name, data in files.items()})


def _is_of_cache(name: str) -> bool:
    """Return whether a file of Triton's cache is a lock or a list of files, not part of a
    kernel."""
    return name.startswith(_GROUP) or name == "lock"


_GROUP = "__grp__"
"""How the name of the file begins in which Triton lists a kernel's files."""


def described(tensor: Tensor, block: Sequence[int]) -> Any:
    """Return a descriptor of a matrix, through which the GPU loads tiles of shape `block`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = typed(tensor) if is_fake(tensor) else tensor
    return TensorDescriptor(base, list(tensor.shape), list(tensor.stride()), list(block))


def is_described(argument: Any) -> bool:
    """Return whether a kernel argument is a tensor descriptor, through which a GPU loads tiles."""
    return hasattr(argument, "block_shape")


def tiles_in(descriptor: Any) -> tuple[Any, ...]:
    """Return a tensor descriptor's properties that are known at compile time, except its layout."""
    return (*descriptor.block_shape, descriptor.base.dtype)


@lru_cache(maxsize=1)
def release() -> tuple[int, int]:
    """Return the first two numbers of Triton's version, such as (3, 7)."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


@lru_cache(maxsize=1)
def has_gluon() -> bool:
    """Return whether this Triton release has the version of the experimental Gluon API that the
    kernels use."""
    try:
        from . import gluon
    except (ImportError, AttributeError):
        return False
    return gluon is not None
