"""Launches of Triton kernels that look up what Triton works out anew at each of them.

Triton binds arguments by name, asks each for its specialisation and writes all of it into a key:
for a kernel of thirty arguments that takes longer than many a kernel runs. A training step of small
kernels then waits for the host. Here the key is made of the few things that a specialisation
depends on, and what Triton compiled is called directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
_MOST = 4096
"""Specialisations that are held; more begin anew."""


def launch(
    kernel: Any,  # noqa: ANN401
    grid: tuple[int, ...],
    arguments: Sequence[Tensor | int | float],
    constants: Mapping[str, Any],
    name: tuple[Any, ...],
) -> None:
    """Run a kernel as `kernel[grid](*arguments, **constants)` does.

    Args:
        kernel: What `triton.jit` made, or the interpreter's form of it.
        grid: One to three numbers of programs.
        arguments: All that are no constants of the compiler, in the order of the kernel, which has
            them first.
        constants: The others by their names, and options of the compiler.
        name: What `constants` follow from; equal names have equal constants.
    """
    if not _is_compiled(kernel):
        kernel[grid](*arguments, **constants)
        return
    from triton import knobs
    from triton.runtime import driver

    device = driver.active.get_current_device()
    key = (id(kernel), device, name, *map(_kind, arguments))
    found = _compiled.get(key)
    is_watched = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
    if found is None or is_watched:
        compiled = kernel[grid](*arguments, **constants)
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = _handle(kernel, compiled, constants, len(arguments))
        return
    run, function, metadata, rest = found
    across, down, deep = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    run(across, down, deep, stream, function, metadata, None, None, None, *arguments, *rest)


def _is_compiled(kernel: Any) -> bool:  # noqa: ANN401
    """Return whether a kernel runs on a GPU, and nobody asked to be called before its launches."""
    return hasattr(kernel, "device_caches") and not kernel.pre_run_hooks


def _kind(argument: Tensor | int | float) -> Any:  # noqa: ANN401
    """Return all of an argument that the compiler may have made use of."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31
    return float


def _handle(
    kernel: Any,  # noqa: ANN401
    compiled: Any,  # noqa: ANN401
    constants: Mapping[str, Any],
    count: int,
) -> tuple[Any, Any, Any, list[Any]]:
    """Return what launches a compiled kernel, and the arguments that stand behind the others."""
    names = list(kernel.arg_names)
    rest = [constants[name] for name in names[count:]]
    return compiled.run, compiled.function, compiled.packed_metadata, rest
