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

from memeff_compile.kernels._triton import compat

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
    if not compat.is_compiled(kernel):
        kernel[grid](*arguments, **constants)
        return
    device = compat.current_device()
    key = (id(kernel), device, name, *map(_kind, arguments))
    found = _compiled.get(key)
    if found is None or compat.is_watched():
        compiled = kernel[grid](*arguments, **constants)
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compat.launcher(kernel, compiled, constants, len(arguments))
        return
    across, down, deep = (*grid, 1, 1)[:3]
    found((across, down, deep), device, arguments)


def _kind(argument: Tensor | int | float) -> Any:  # noqa: ANN401
    """Return all of an argument that the compiler may have made use of."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31
    return float
