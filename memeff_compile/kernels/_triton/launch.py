"""Launches of Triton kernels: constants handed on as one, and launches that are looked up.

A kernel of many constants takes them as one argument, C, and device functions hand that on. They
are in capitals, here as there: `start(kernel, grid, x, ROWS=64)` is C.ROWS == 64 in the kernel.

Triton binds arguments by name, asks each for its specialisation and writes all of it into a key:
for a kernel of thirty arguments that takes longer than many a kernel runs. A training step of small
kernels then waits for the host. Here the key is made of the few things that a specialisation
depends on, and what Triton compiled is called directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from torch import Tensor

from . import compat

Argument: TypeAlias = "Tensor | int | float | tuple[Argument, ...]"

_compiled: dict[tuple[Any, ...], Any] = {}
_MOST = 4096
"""Specialisations that are held; more begin anew."""


class Constants:
    """Constants of the compiler as one argument of a kernel: one object for the same ones."""

    def __init__(self, given: Mapping[str, Any], *, is_compiled: bool) -> None:
        for name, value in given.items():
            setattr(self, name, compat.constant(value) if is_compiled else value)
        self._text = f"Constants({dict(given)})"

    def __repr__(self) -> str:
        return self._text


@lru_cache(maxsize=4096)
def _constants(given: tuple[tuple[str, Any], ...], *, is_compiled: bool) -> Constants:
    return Constants(dict(given), is_compiled=is_compiled)


def packed(kernel: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, those in capitals as one, C, where the kernel takes them so."""
    if not compat.takes(kernel, "C"):
        return dict(given)
    constants = tuple(item for item in given.items() if item[0].isupper())
    rest = {name: value for name, value in given.items() if not name.isupper()}
    return {**rest, "C": _constants(constants, is_compiled=compat.is_compiled(kernel))}


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **given: Any) -> None:
    """Run a kernel as `kernel[grid](*arguments, **given)` does, its constants packed."""
    kernel[grid](*arguments, **packed(kernel, given))


def launch(
    kernel: Any,  # what `triton.jit` made, or the interpreter's form of it
    grid: tuple[int, ...],  # one to three numbers of programs
    # all that are no constants of the compiler, in the order of the kernel, which has them first
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],  # the others by their names, and options of the compiler
    name: tuple[Any, ...],  # what `constants` follow from; equal names have equal constants
) -> None:
    """Run a kernel as `start(kernel, grid, *arguments, **constants)` does."""
    if not compat.is_compiled(kernel):
        start(kernel, grid, *arguments, **constants)
        return
    device = compat.current_device()
    key = (id(kernel), device, name, *map(_kind, arguments))
    found = _compiled.get(key)
    if found is None or compat.is_watched(kernel):
        constants = packed(kernel, constants)
        compiled = kernel[grid](*arguments, **constants)
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compat.launcher(kernel, compiled, constants, len(arguments))
        return
    across, down, deep = (*grid, 1, 1)[:3]
    found((across, down, deep), device, arguments)


def _kind(argument: Argument) -> Any:
    """Return all of an argument that the compiler may have made use of."""
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31
    return float
