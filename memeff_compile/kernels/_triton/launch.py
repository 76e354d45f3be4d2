"""Launch Triton kernels with little host time: constants are a single argument, and compiled
kernels are found by a short key.

A kernel with many constants takes them as one argument, C, and passes C on to device functions.
Names of constants are capitalised: after `start(kernel, grid, x, ROWS=64)`, the kernel reads C.ROWS
as 64.

At each launch, Triton binds arguments by name, computes each argument's specialisation, and builds
a key from all arguments. For a kernel with thirty arguments, this work takes longer than many
kernels run. So a training step with small kernels waits for the CPU. This module finds the
compiled kernel by a shorter key, and then calls the compiled kernel directly. The shorter key
contains only the few properties on which a specialisation depends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from ...compat import current_gpu
from . import compat
from .stored import record
from .typed import is_typed, typed

Argument: TypeAlias = "Tensor | int | float | tuple[Argument, ...]"

_compiled: dict[tuple[Any, ...], Any] = {}
_MOST = 4096
"""The most cached specialisations; when there are more, the cache is emptied."""


class Constants:
    """Compile-time constants as one kernel argument; equal constants are the same object."""

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
    """Return keyword arguments in which the capitalised arguments are packed into C, if the kernel
    has an argument C."""
    if not compat.takes(kernel, "C"):
        return dict(given)
    constants = tuple(item for item in given.items() if item[0].isupper())
    rest = {name: value for name, value in given.items() if not name.isupper()}
    return {**rest, "C": _constants(constants, is_compiled=compat.is_compiled(kernel))}


class Launch(NamedTuple):
    """The description of a kernel launch that was put into a list instead of being run."""

    kernel: Any
    arguments: tuple[Any, ...]  # with the dtypes and alignments of tensors in place of tensors
    constants: Mapping[str, Any]

    def key(self) -> Hashable:
        """Return a key that is equal for two launches only if they use the same compiled kernel."""
        constants = tuple(f"{name}={value}" for name, value in self.constants.items())
        return (id(self.kernel), constants, *map(_kind, self.arguments))

    def compile(self) -> None:
        """Compile the kernel for the current GPU, so that a later launch finds it in Triton's
        cache."""
        compat.compile_only(self.kernel, self.arguments, self.constants)


_notes: ContextVar[list[Launch] | None] = ContextVar("launches to note", default=None)


@contextmanager
def noted(launches: list[Launch]) -> Iterator[None]:
    """Record the kernel launches of this thread in a list instead of running them."""
    token = _notes.set(launches)
    try:
        yield
    finally:
        _notes.reset(token)


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **given: Any) -> None:
    """Run a kernel like `kernel[grid](*arguments, **given)`, with all its constants in one
    argument.

    The constants are the keyword arguments with capitalised names, such as ROWS=64. If the kernel
    has an argument C, it reads this constant as C.ROWS.
    """
    notes = _notes.get()
    if notes is not None:
        notes.append(Launch(kernel, _typed(arguments), packed(kernel, given)))
        return
    record(kernel[grid](*arguments, **packed(kernel, given)))


def _typed(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with each tensor replaced by a stand-in that has the properties which
    Triton reads."""
    return tuple(
        typed(each)
        if isinstance(each, Tensor)
        else _typed_tuple(each)
        if isinstance(each, tuple)
        else each
        for each in arguments
    )


def _kind(argument: Any) -> Hashable:
    """Return the properties of a kernel argument on which the compiler's specialisation depends."""
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    if isinstance(argument, int) and not isinstance(argument, bool):
        return ("int", *_kinds((argument,)))
    if compat.is_described(argument):
        return compat.tiles_in(argument)
    if is_typed(argument):
        return argument.dtype, argument.data_ptr() % 16
    return type(argument), repr(argument)


def _typed_tuple(given: tuple[Any, ...]) -> tuple[Any, ...]:
    fields = _typed(given)
    return type(given)(*fields) if hasattr(given, "_fields") else fields


def launch(
    kernel: Any,  # the result of `triton.jit`, or the interpreter's form of it
    grid: tuple[int, ...],  # one to three numbers of programs
    # the arguments that are not compile-time constants, in the kernel's order; they come first
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],  # the others by their names, and options of the compiler
    # the values that determine `constants`; equal names have equal constants
    name: tuple[Any, ...],
) -> None:
    """Run a Triton kernel with less host time than Triton's own launch.

    The effect is the same as that of `start(kernel, grid, *arguments, **constants)`, which uses
    Triton's own launch. This function finds the compiled kernel by a short key. The key contains
    the argument `name` instead of the constants, because `name` determines the constants.
    """
    if not compat.is_compiled(kernel) or _notes.get() is not None:
        start(kernel, grid, *arguments, **constants)
        return
    device = current_gpu()
    key: list[Any] = [id(kernel), device, name]
    numbers: list[int] = []
    given = _read(arguments, device, key, numbers)
    key.append(_kinds(tuple(numbers)))
    found = _compiled.get(tuple(key))
    if found is None or compat.is_watched(kernel):
        _compile(kernel, grid, arguments, constants, tuple(key))
        return
    found(grid, device, given)


class Launches:
    """An object that launches the kernels of one call of an op, one after another.

    The constructor's `sizes` are values that identify similar calls, such as shapes and settings.
    The object reuses the compiled kernels of an earlier call with equal `sizes`. The n-th launch
    reuses the compiled kernel of the earlier call's n-th launch if kernel function, constants,
    numeric arguments and dtypes are the same in both. For this reuse, the memory of all tensors of
    the launch must also be aligned to 16 bytes. All tensors of a launch must be on the current GPU.

    A launch through this class takes a quarter of the host time of `run_kernel`. The function
    `run_kernel` builds a key in each launch, to find the compiled kernel. The saved time matters
    for small calls.
    """

    def __init__(self, *sizes: Hashable) -> None:
        if len(_launched) >= _MOST and sizes not in _launched:
            _launched.clear()
        self.steps: list[Any] = _launched.setdefault(sizes, [])
        self.number = 0

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any
    ) -> None:
        number, steps = self.number, self.steps
        self.number = number + 1
        if not compat.is_compiled(kernel) or _notes.get() is not None:
            start(kernel, grid, *arguments, **constants)
            return
        seen, given, bits = _addresses(arguments)
        is_known = number < len(steps)
        if is_known and not bits & 15 and not compat.is_watched(kernel):
            known, its_constants, its_seen, device, found = steps[number]
            is_same = known is kernel and its_seen == seen and its_constants == constants
            if is_same and device == current_gpu():
                found(grid, device, given)
                return
        key = tuple(constants.items())
        launch(kernel, grid, arguments, constants, key)
        device = current_gpu()
        numbers: list[int] = []
        whole: list[Any] = [id(kernel), device, key]
        _read(arguments, device, whole, numbers)
        whole.append(_kinds(tuple(numbers)))
        found = _compiled.get(tuple(whole))
        if found is not None and not bits & 15:
            step = kernel, constants, seen, device, found
            if is_known:
                steps[number] = step
            elif number == len(steps):
                steps.append(step)


_launched: dict[tuple[Hashable, ...], list[Any]] = {}
_NUMBERS = frozenset((int, float, bool, type(None)))


def _addresses(arguments: Sequence[Any]) -> tuple[list[Any], list[Any], int]:
    """Return the properties of the arguments on which the compiled kernel depends.

    Also return the arguments with each tensor replaced by its address, and the bitwise "or" of all
    addresses.
    """
    seen: list[Any] = []
    given: list[Any] = []
    bits = 0
    for argument in arguments:
        if type(argument) in _NUMBERS:  # an instance check of a tensor's class takes longer
            seen.append(argument)
            given.append(argument)
        elif compat.is_described(argument):
            bits |= argument.base.data_ptr()
            seen.append(compat.tiles_in(argument))
            given.append(argument)
        else:
            address = argument.data_ptr()
            bits |= address
            seen.append(argument.dtype)
            given.append(address)
    return seen, given, bits


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel, and find the compiled kernel by a short key that contains all constants.

    The launch takes less host time than with `start`, which uses Triton's own launch.
    """
    launch(kernel, grid, arguments, constants, tuple(constants.items()))


def launch_plain(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],  # on the current GPU, or in CPU memory that the GPU can access
    # the arguments after the tensors; the kernel declares them as varying
    numbers: Sequence[int | float],
    constants: Mapping[str, Any],
    name: tuple[Any, ...],  # the values that determine `constants`, and the dtype of each tensor
) -> None:
    """Run a Triton kernel, and find its compiled form by a short key that contains `name`.

    The argument `name` determines `constants` and the dtype of each tensor.

    The function checks only whether the tensors are aligned to 16 bytes. The function `launch` also
    reads the dtypes and devices of the tensors.
    """
    if not compat.is_compiled(kernel) or _notes.get() is not None:
        start(kernel, grid, *tensors, *numbers, **constants)
        return
    device, bits = current_gpu(), 0
    given: list[int | float] = [tensor.data_ptr() for tensor in tensors]
    for address in given:
        bits |= address  # type: ignore[operator]
    key = (id(kernel), device, name, "aligned")
    found = _compiled.get(key)
    if bits & 15:
        launch(kernel, grid, (*tensors, *numbers), constants, name)
    elif found is None or compat.is_watched(kernel):
        _compile(kernel, grid, (*tensors, *numbers), constants, key)
    else:
        given += numbers
        found(grid, device, given)


def launch_aligned(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],  # as `launch_plain` takes them, all of them aligned to 16 bytes
    count: int,  # tensors of the kernel: the last one is repeated to fill them, and not read
    numbers: Sequence[int | float],
    constants: Mapping[str, Any],
    name: Hashable,  # as for `launch_plain`
) -> None:
    """Run a Triton kernel for tensors that are known to be aligned to 16 bytes.

    The function finds the compiled kernel by a short key that contains `name`. The argument `name`
    determines `constants` and the dtype of each tensor.
    """
    runs_compiled = compat.is_compiled(kernel) and _notes.get() is None
    if runs_compiled:
        device = current_gpu()
        key = (id(kernel), device, name)
        found = _compiled.get(key)
        if found is not None and not compat.is_watched(kernel):
            given: list[int | float] = [tensor.data_ptr() for tensor in tensors]
            given += given[-1:] * (count - len(given))
            found(grid, device, [*given, *numbers])
            return
    every = [*tensors, *[tensors[-1]] * (count - len(tensors)), *numbers]
    if runs_compiled:
        _compile(kernel, grid, every, constants, key)
    else:
        start(kernel, grid, *every, **constants)


def _compile(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],
    key: tuple[Hashable, ...],
) -> None:
    """Run a kernel through Triton's own launch, and store the compiled kernel under `key`."""
    constants = packed(kernel, constants)
    compiled = kernel[grid](*arguments, **constants)
    record(compiled)
    if len(_compiled) >= _MOST:
        _compiled.clear()
    _compiled[key] = compat.launcher(kernel, compiled, constants, len(arguments))


def _read(
    arguments: Sequence[Argument], device: int, key: list[Any], numbers: list[int]
) -> list[Any]:
    """Return the arguments, with tensors on the GPU replaced by their addresses.

    The compiler specialises a kernel by some properties of its arguments. The function appends
    these properties to `key`. The values of integer arguments are appended to `numbers`
    instead. The function `_kinds` then finds the properties of these values.

    For tensors that are not on the GPU, Triton itself checks whether a kernel can read them.
    """
    given: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            key.append(argument.dtype)
            if address & 15:
                key.append("no multiple of 16")
            given.append(address if argument.get_device() == device else argument)
        elif isinstance(argument, tuple):
            key.append(len(argument))
            given.append(tuple(_read(argument, device, key, numbers)))
        else:
            key.append(type(argument))
            if isinstance(argument, int):
                numbers.append(argument)
            elif compat.is_described(argument):
                key.append(compat.tiles_in(argument))
            given.append(argument)
    return given


@lru_cache(maxsize=1 << 14)
def _kinds(numbers: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the properties of numbers on which the compiler's specialisation may depend."""
    return tuple((n % 16 == 0, n == 1, -(1 << 31) <= n < 1 << 31) for n in numbers)
