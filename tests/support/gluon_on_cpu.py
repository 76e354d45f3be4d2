"""Kernels in Gluon without a GPU: NumPy computes their source, with a thread per group of warps.

Barriers in shared memory have phases, as on the GPU, so a group that would wait for ever raises an
error. All numbers are fp32; products are complete when they start, and layouts have no meaning.
"""

from __future__ import annotations

import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

SECONDS = 20.0
"""How long a group of warps waits at a barrier before the test fails."""


class Tile(np.ndarray[Any, Any]):
    """An array with the method of Gluon's tensors."""

    def to(self, dtype: Any) -> Tile:
        return self.astype(dtype).view(Tile)


def _tile(given: Any) -> Any:
    """Return numbers as a tile; a single whole number as one of Python's."""
    found = np.asarray(given)
    if found.ndim == 0 and np.issubdtype(found.dtype, np.integer):
        return int(found)
    return (found.astype(np.float32) if found.dtype == np.float64 else found).view(Tile)


class Pointer:
    """An address in a tensor's memory, or a tile of them."""

    def __init__(self, memory: Any, offset: Any = 0) -> None:
        self.memory, self.offset = memory, np.asarray(offset)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + np.asarray(more).astype(np.int64))

    def within(self, mask: Any) -> Any:
        """Return which elements are meant, all of them inside the tensor."""
        meant = np.broadcast_to(True if mask is None else np.asarray(mask), self.offset.shape)
        where = self.offset[meant]
        assert bool(((where >= 0) & (where < len(self.memory))).all()), "outside the tensor"
        return meant

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        meant = self.within(mask)
        return _tile(np.where(meant, self.memory[np.where(meant, self.offset, 0)], other))

    def store(self, value: Any, mask: Any = None) -> None:
        meant = self.within(mask)
        self.memory[self.offset[meant]] = np.broadcast_to(value, self.offset.shape)[meant]


class Memory:
    """A tile in shared memory."""

    dtype = np.float32

    def __init__(self, array: Any) -> None:
        self.array = array

    def index(self, number: Any) -> Memory:
        return Memory(self.array[int(number)])

    def load(self, layout: Any = None) -> Any:
        return _tile(self.array.copy())

    def store(self, value: Any) -> None:
        assert self.array.shape == value.shape
        self.array[...] = value

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.array.transpose(order))

    def reshaped(self, dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
        return Memory(self.array.reshape(shape))


class Barrier:
    """A barrier in shared memory: a phase ends after `count` arrivals and all announced bytes."""

    def __init__(self, stopped: threading.Event) -> None:
        self.changed, self.stopped = threading.Condition(), stopped
        self.phase, self.count, self.missing, self.transferred = 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def add(self, arrivals: int, transferred: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.transferred += transferred
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.transferred == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        def is_over() -> bool:
            return self.phase & 1 != int(parity) or self.stopped.is_set()

        with self.changed:
            assert self.changed.wait_for(is_over, SECONDS), "a group of warps waits for ever"
            assert not self.stopped.is_set(), "another group of warps failed"


class Barriers:
    """Several barriers."""

    def __init__(self, every: list[Barrier]) -> None:
        self.every = every

    def index(self, number: Any) -> Barrier:
        return self.every[int(number)]


class Described:
    """A tensor of four axes from which tiles are loaded, and to which they are stored."""

    layout, dtype = None, np.float32

    def __init__(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        self.array, self.block = tensor.numpy(), tuple(block)

    def part(self, at: Sequence[Any]) -> Any:
        """Return the part of the tensor in which a tile lies."""
        starts = map(int, at)
        places = zip(starts, self.block, strict=True)
        return self.array[tuple(slice(start, start + size) for start, size in places)]

    def load(self, at: Sequence[Any], barrier: Barrier, memory: Memory) -> None:
        found, part = np.zeros(self.block, np.float32), self.part(at)
        found[tuple(map(slice, part.shape))] = part
        memory.store(found)
        barrier.add(0, -2 * found.size)

    def store(self, at: Sequence[Any], memory: Memory) -> None:
        part = self.part(at)
        part[...] = memory.array[tuple(map(slice, part.shape))]


def _product(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    left, right = (each.array if isinstance(each, Memory) else each for each in (a, b))
    with np.errstate(all="ignore"):
        found = np.asarray(left) @ np.asarray(right)
        return _tile(found + acc if use_acc else found)


def _of_both(function: Any) -> Any:
    return lambda x, y, propagate_nan=None: _tile(function(np.asarray(x), np.asarray(y)))


def _nothing(*given: Any, **named: Any) -> None:
    return None


class Emulator:
    """The language as kernels see it; it runs one program after another."""

    def __init__(self) -> None:
        self.program, self.programs = 0, 0
        self.stopped = threading.Event()

    def language(self) -> Any:
        """Return the names that kernels read from Gluon's and from Triton's language."""
        layouts = ("Slice", "Blocked", "NVMMADistributed", "NVMMAShared", "SwizzledShared")
        return types.SimpleNamespace(
            **{f"{name}Layout": _nothing for name in layouts},
            DotOperandLayout=_nothing,
            constexpr=lambda value: value,
            int32=np.int32,
            int64=np.int64,
            float32=np.float32,
            load=Pointer.load,
            store=Pointer.store,
            arange=lambda start, stop, layout=None: _tile(np.arange(start, stop)),
            full=lambda shape, value, *_: _tile(np.full(shape, value, np.float32)),
            zeros=lambda shape, *_: _tile(np.zeros(shape, np.float32)),
            zeros_like=lambda tile: _tile(np.zeros_like(tile)),
            expand_dims=lambda tile, axis: _tile(np.expand_dims(tile, axis)),
            max=lambda tile, axis: _tile(np.max(tile, axis)),
            sum=lambda tile, axis: _tile(np.sum(tile, axis)),
            exp2=lambda tile: _tile(np.exp2(np.asarray(tile, np.float32))),
            log2=lambda tile: _tile(np.log2(tile)),
            minimum=_of_both(np.minimum),
            maximum=_of_both(np.maximum),
            where=lambda found, x, y: _tile(np.where(found, x, y)),
            convert_layout=lambda tile, layout: tile,
            static_range=range,
            to_tensor=lambda number: np.asarray(number).view(Tile),
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            warp_specialize=self.run_together,
            allocate_shared_memory=self.shared_memory,
        )

    def names(self) -> dict[str, Any]:
        """Return what replaces the globals of a module with kernels."""
        language = self.language()
        return {
            "gl": language,
            "tl": language,
            "barrier": _nothing,
            "fence_async_shared": _nothing,
            "load_tile": Described.load,
            "store_tile": Described.store,
            "seen_as": Memory.reshaped,
            "warpgroup_mma": _product,
            "warpgroup_mma_wait": lambda number, deps: deps[0] if len(deps) == 1 else tuple(deps),
            "tma": types.SimpleNamespace(store_wait=_nothing),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=_nothing,
                init=Barrier.init,
                wait=Barrier.wait,
                arrive=lambda barrier, count: barrier.add(count, 0),
                expect=lambda barrier, transferred: barrier.add(1, transferred),
            ),
        }

    def shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any = None) -> Any:
        if dtype is np.int64:
            return Barriers([Barrier(self.stopped) for _ in range(shape[0])])
        return Memory(np.full(shape, np.nan, np.float32))

    def run_together(self, parts: Sequence[Any], warps: Any, registers: Any) -> None:
        """Run the groups of warps of a program, each in a thread."""
        errors: list[str] = []

        def run(part: Any, arguments: Any) -> None:
            try:
                part(*arguments)
            except BaseException:
                errors.append(traceback.format_exc())
                self.stopped.set()

        threads = [threading.Thread(target=run, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]

    def source(self, function: Any) -> Any:
        """Return a kernel, or a function that a kernel calls, that computes with NumPy."""
        plain = function.fn
        known: dict[str, Any] = {}
        found = types.FunctionType(plain.__code__, known, plain.__name__)
        known.update(self.replaced(plain.__globals__, plain.__code__.co_names))
        return found

    def replaced(self, names: Mapping[str, Any], used: Sequence[str]) -> dict[str, Any]:
        """Return the names that a function uses, each with what replaces it."""
        ours, found = self.names(), {}
        for name in used:
            if name in ours:
                found[name] = ours[name]
            elif name in names:
                value = names[name]
                if hasattr(value, "fn"):
                    value = self.source(value)
                found[name] = getattr(value, "value", value)
        return found

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        name: Any,
    ) -> None:
        """Run a kernel like `launch.launch`."""
        known = {name: value for name, value in constants.items() if name.isupper()}
        run, given = self.source(kernel), [_argument(each) for each in arguments]
        self.programs = grid[0]
        for self.program in range(grid[0]):
            run(*given, types.SimpleNamespace(**known))


def _argument(given: Any) -> Any:
    if isinstance(given, tuple):
        every = map(_argument, given)
        return type(given)(*every) if hasattr(given, "_fields") else tuple(every)
    if not isinstance(given, torch.Tensor):
        return given
    size = given.untyped_storage().nbytes() // given.element_size()
    return Pointer(torch.as_strided(given, (size,), (1,), 0).numpy(), given.storage_offset())


def emulate(patch: pytest.MonkeyPatch, *modules: Any, programs: int) -> None:
    """Let modules launch their kernels through an emulator, as on a GPU with some processors."""
    from memeff_compile.kernels._triton import gluon

    emulator = Emulator()
    patch.setattr(gluon, "tiles_of_heads", Described)
    for module in modules:
        patch.setattr(module, "launch", emulator.launch)
        patch.setattr(module, "processors", lambda device: programs)
