"""Record a compiled decoding step as a CUDA graph, and replay it in later calls.

Arguments that are new in each call (ids, masks, positions) are copied into static buffers. Weights
and caches are read and written at their addresses. So a recording is valid only for calls with the
same addresses, sizes and Python numbers. Each call looks up its recording by these three
properties. The results of a replay are cloned, so that the next replay does not overwrite them.

Several calls with the same addresses, sizes and numbers run as follows:

- the first call runs the compiled step;
- the second call runs the step on static buffers, and so loads every kernel;
- the third call records the step as a CUDA graph;
- the third call and all later calls replay this graph.

After a call has run on static buffers, calls with other addresses can skip the first two stages.
These calls must have the same sizes and Python numbers as the earlier call. Such a call is recorded
immediately if earlier recordings were replayed often enough.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import compat
from ..report import Replays

log = logging.getLogger(__name__)

Step: TypeAlias = Callable[..., Any]
Key: TypeAlias = tuple[int, Hashable, Hashable]
"""The key of a recording: the stream, addresses of weights and caches, sizes and numbers."""

MAX_RECORDINGS = 8  # recordings of one step that are kept, the latest ones
MAX_WAITING = 32  # sets of addresses that are remembered after one call
# A step stops being recorded when so many recordings as are kept, twice, were replayed less.
MIN_REPLAYS = 4

_OTHER_PLACES = "the addresses of its caches or weights change in each call"
_OTHER_NUMBER = "a number that tensors are made of, or a size, changes in each call"

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


@dataclass(frozen=True)
class Counts:
    """Formulas for the Python numbers that a decoding step returns; the formulas compute these
    numbers from the Python numbers among the step's arguments.

    A replayed CUDA graph computes only tensors, so Python computes the numbers after each replay.
    """

    given: tuple[int, ...]  # places of the arguments
    returned: tuple[int, ...]  # places of the results
    count: Callable[..., Sequence[int]]


@dataclass(frozen=True)
class Roles:
    """The role of each argument of a decoding step.

    An argument is a tensor at a fixed address, a tensor that is copied before each replay, or a
    Python number.
    """

    held: tuple[int, ...]  # tensors identified by address: weights, caches, written ones
    copied: tuple[int, ...] = ()  # tensors that are new in each call
    numbers: tuple[int, ...] = ()  # sizes and other numbers
    varying: tuple[int, ...] = ()  # tensors whose sizes are not the same in every call
    written: tuple[int, ...] = ()  # tensors that the step writes to
    counts: Counts | None = None  # `numbers` excludes those that only these read


class _Unfit(Exception):
    """The error that says why a decoding step cannot be recorded as a CUDA graph."""


class Recorder:
    """A compiled decoding step that replays its CUDA graph if addresses, sizes and Python numbers
    are the same as in an earlier call.
    """

    def __init__(self, step: Step, roles: Roles, use: Replays, engine: CudaEngine) -> None:
        self._step, self._roles, self._use, self._engine = step, roles, use, engine
        self._waiting: OrderedDict[Key, _Buffers | None] = OrderedDict()
        self._recordings: OrderedDict[Key, _Recording] = OrderedDict()
        self._rehearsed: set[Hashable] = set()
        self._is_stopped = False

    def __call__(self, *args: Any) -> Any:
        """Run the compiled decoding step, or replay its CUDA graph."""
        if not self._is_stopped and self._engine.is_free():
            with self._engine.lock:
                key = self._key(args)
                recording: Step | None = self._recordings.get(key)
                if recording is None:
                    recording = self._prepare(key, args)
                if recording is not None:
                    return recording(args)
        self._use.ran += 1
        return self._step(*args)

    def _key(self, args: Sequence[Any]) -> Key:
        held = [args[place] for place in self._roles.held]  # some hundred, in each call
        return (
            self._engine.stream(),
            tuple([t.data_ptr() if type(t) in _PLAIN else _place(t) for t in held]),
            self._signature(args),
        )

    def _signature(self, args: Sequence[Any]) -> tuple[Hashable, ...]:
        sizes = ((args[place].shape, args[place].stride()) for place in self._roles.varying)
        return (*(args[place] for place in self._roles.numbers), *sizes)

    def _prepare(self, key: Key, args: Sequence[Any]) -> Callable[..., Any] | None:
        """Return a function that handles a call for which no CUDA graph exists yet.

        Return None if the call should run the compiled decoding step directly.
        """
        if self._is_stopped:
            return None
        kind = self._engine.stream(), self._signature(args), self._alignments(args)
        try:
            if key in self._waiting:
                buffers = self._waiting.pop(key)
                if buffers is None and kind not in self._rehearsed:
                    return self._rehearse(key, kind, args)
                return self._record(key, buffers or _Buffers(self._roles, args), args)
            if kind in self._rehearsed and self._pays():
                return self._record(key, _Buffers(self._roles, args), args)
        except _Unfit as unfit:
            self._stop(str(unfit))
            return None
        self._waiting[key] = None
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
            if not self._recordings and len({where for _, where, _ in self._waiting}) == 1:
                self._stop(_OTHER_NUMBER)
        return None

    def _alignments(self, args: Sequence[Any]) -> Hashable:
        """Return the alignment of the arguments' addresses, because Triton also specializes kernels
        on alignment."""
        parts = compat.pytree.tree_leaves([_address(args[place]) for place in self._roles.held])
        return tuple(part % 16 == 0 for part in parts if isinstance(part, int))

    def _pays(self) -> bool:
        """Return whether the decoding step's CUDA graphs were replayed so often that recording
        another graph is worthwhile."""
        return self._use.replays >= MIN_REPLAYS * self._use.recordings

    def _rehearse(self, key: Key, kind: Hashable, args: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that runs the decoding step on static buffers; the CUDA graph that is
        recorded later uses the same buffers."""
        buffers = _Buffers(self._roles, args)

        def run(args: Sequence[Any]) -> Any:
            before = self._engine.random_state()
            inputs = buffers.fill(args)
            found = self._step(*inputs)
            self._use.ran += 1
            try:
                if self._engine.random_state() != before:
                    raise _Unfit("it draws random numbers")
                buffers.require_unchanged(args)
                outputs = _Outputs(found, inputs)
            except _Unfit as unfit:
                self._stop(str(unfit))  # the buffers are dropped; views of them stay valid
                return buffers.given_back(found, args)
            self._waiting[key] = buffers
            self._rehearsed.add(kind)
            return outputs.handed_out(found, args)

        return run

    def _record(self, key: Key, buffers: _Buffers, args: Sequence[Any]) -> _Recording | None:
        inputs = buffers.fill(args)
        try:
            replay, found = self._engine.record(self._step, inputs)
            outputs = _Outputs(found, inputs)
        except _Unfit:
            raise
        except Exception as error:  # any error that stops a capture: the step has not run
            log.warning("A step could not be recorded as a CUDA graph and runs without: %s", error)
            raise _Unfit(f"recording it failed: {error}") from error
        self._use.recordings += 1
        recording = _Recording(self._roles, buffers, replay, found, outputs, self._use)
        self._recordings[key] = recording
        if len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        if self._use.recordings > 2 * MAX_RECORDINGS and not self._pays():
            moved = len({where for _, where, _ in self._recordings}) > 1
            self._stop(_OTHER_PLACES if moved else _OTHER_NUMBER)
        return recording

    def _stop(self, why: str) -> None:
        """Discard all CUDA graphs. Later calls run the decoding step without, and record none."""
        self._is_stopped, self._use.stopped = True, why
        self._waiting.clear()
        self._recordings.clear()


def _place(tensor: Any) -> Hashable:
    """Return a value that changes when a tensor's memory moves to another address.

    The value is usually the address. A tensor subclass may count the moves of its memory in an
    attribute `memory_number`; then the value is this number.
    """
    number = getattr(type(tensor), "memory_number", None)
    return _address(tensor) if number is None else tensor.memory_number


def _address(tensor: Any) -> Hashable:
    """Return the address of a tensor's memory; for a subclass, return one address per inner
    tensor."""
    if type(tensor) in _PLAIN:
        return int(tensor.data_ptr())
    names, about = compat.parts_of(tensor)
    parts = [getattr(tensor, name) for name in names]
    return (about, *[p.data_ptr() if type(p) in _PLAIN else _address(p) for p in parts])


def _memory(tensor: Tensor) -> Iterator[int]:
    if type(tensor) in _PLAIN:
        yield tensor.untyped_storage().data_ptr()
    else:
        for name in compat.parts_of(tensor)[0]:
            yield from _memory(getattr(tensor, name))


class _Buffers:
    """Static memory for a step's arguments that are a new tensor in each call.

    A CUDA graph reads its inputs at fixed addresses, so `fill` copies these tensors into this
    memory.
    """

    def __init__(self, roles: Roles, args: Sequence[Any]) -> None:
        self._roles = roles
        held = {where for place in roles.held for where in _memory(args[place])}
        self.tensors: dict[int, Tensor] = {}
        self._filled: list[tuple[int, Tensor, bool]] = []
        for place in roles.copied:
            given = args[place]
            if type(given) not in _PLAIN:
                raise _Unfit(f"an input is a {type(given).__name__}")
            if given.numel() and given.untyped_storage().data_ptr() in held:
                raise _Unfit("an input shares memory with a cache or a weight")
            how = {"dtype": given.dtype, "device": given.device}
            with torch.inference_mode(mode=False), torch.no_grad():
                made = torch.empty_strided(given.shape, given.stride(), **how)
            if not _is_dense(_unexpanded(made)):
                raise _Unfit("an input overlaps itself in memory")
            self.tensors[place] = made
            self._filled.append((place, _unexpanded(made), _unexpanded(made) is not made))

    def fill(self, args: Sequence[Any]) -> list[Any]:
        """Copy a call's arguments that have static buffers into these buffers.

        Return the argument list, with each copied argument replaced by its buffer.
        """
        inputs = list(args)
        with torch.no_grad():
            for place, part, is_expanded in self._filled:
                given = args[place]
                part.copy_(_unexpanded(given) if is_expanded else given, non_blocking=True)
                inputs[place] = self.tensors[place]
        return inputs

    def require_unchanged(self, args: Sequence[Any]) -> None:
        """Raise an error if a decoding step wrote to an input that the step should only read."""
        for place, buffer in self.tensors.items():
            if not torch.equal(buffer, args[place]):
                raise _Unfit("it writes to an input that is a new tensor in each call")

    def given_back(self, found: Any, args: Sequence[Any]) -> Any:
        """Return the decoding step's results `found`; if a result is a static buffer, return the
        caller's argument in `args` instead."""
        ours = {id(buffer): args[place] for place, buffer in self.tensors.items()}
        if type(found) not in (tuple, list):
            return ours.get(id(found), found)
        return type(found)(ours.get(id(each), each) for each in found)


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a tensor without its expanded dimensions, which take no memory."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_dense(tensor: Tensor) -> bool:
    """Return whether each position in a tensor's memory belongs to exactly one element."""
    expected = 1
    steps = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    for stride, size in steps:
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


class _Outputs:
    """The rules by which the results of a decoding step are returned to its caller.

    A result that is also an argument is returned as the caller's tensor. After a replay of the
    step's CUDA graph, every other tensor is returned as a clone.
    """

    def __init__(self, found: Any, inputs: Sequence[Any]) -> None:
        if type(found) not in (tuple, list):
            raise _Unfit(f"it returns a {type(found).__name__}")
        places = {id(each): place for place, each in enumerate(inputs) if isinstance(each, Tensor)}
        taken = {where for each in inputs if isinstance(each, Tensor) for where in _memory(each)}
        self._type, self._places = type(found), [places.get(id(each)) for each in found]
        self._cloned: list[int] = []
        for number, (each, place) in enumerate(zip(found, self._places, strict=True)):
            if place is not None or not isinstance(each, Tensor):
                continue
            where = each.untyped_storage().data_ptr() if type(each) is Tensor else None
            if where is None or not _is_dense(each) or (each.numel() and where in taken):
                raise _Unfit("a result is a view of an input, of another result or of itself")
            taken.add(where)
            self._cloned.append(number)

    def handed_out(self, found: Sequence[Any], args: Sequence[Any]) -> Any:
        """Return the decoding step's results `found`; if a result is one of the step's inputs,
        return the caller's tensor in `args` instead."""
        pairs = zip(found, self._places, strict=True)
        return self._type(each if place is None else args[place] for each, place in pairs)

    def cloned(self, found: Sequence[Any], args: Sequence[Any]) -> Any:
        """Return the results `found` of a replayed CUDA graph, with clones of those that the next
        replay would overwrite.

        `args` are the arguments of this call of the decoding step. If a result is one of the step's
        inputs, return the caller's tensor in `args` instead.
        """
        copies = list(found)
        for number in self._cloned:
            copies[number] = found[number].clone()
        return self.handed_out(copies, args)


@dataclass
class _Recording:
    """A decoding step recorded as a CUDA graph: its buffers, its replay function, and the results
    that a replay overwrites."""

    roles: Roles
    buffers: _Buffers
    replay: Callable[[], None]
    found: Sequence[Any]
    outputs: _Outputs
    use: Replays

    def __call__(self, args: Sequence[Any]) -> Any:
        self.buffers.fill(args)
        self.replay()
        self.use.replays += 1
        torch.autograd.graph.increment_version([args[place] for place in self.roles.written])
        return self.outputs.cloned(self._counted(args), args)

    def _counted(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a replay, with each Python number computed from this call's
        arguments.

        A replayed CUDA graph computes only tensors. `args` are the arguments of this call.
        """
        counts = self.roles.counts
        if counts is None:
            return self.found
        found = list(self.found)
        numbers = counts.count(*(args[place] for place in counts.given))
        for place, number in zip(counts.returned, numbers, strict=True):
            found[place] = number
        return found


class CudaEngine:
    """Recorder of CUDA graphs on one GPU, with a memory pool and a recording stream for each stream
    of the caller.

    With `lock`, only one thread at a time copies a call's inputs, replays a graph and clones the
    results.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._pools: dict[int, _Pool] = {}
        self._failed: list[torch.cuda.CUDAGraph] = []

    def is_free(self) -> bool:
        """Return whether a call may record or replay a CUDA graph now.

        No call may do so while the current stream is recorded as a CUDA graph. Nor may a call do
        so while a PyTorch mode (as in tracing) intercepts operations.
        """
        return not torch.cuda.is_current_stream_capturing() and not compat.is_traced()

    def stream(self) -> int:
        """Return the number of the current CUDA stream."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def random_state(self) -> bytes:
        """Return the state of the GPU's random numbers, which PyTorch keeps on the CPU."""
        return torch.cuda.get_rng_state(self._device).numpy().tobytes()

    def record(self, step: Step, inputs: Sequence[Any]) -> tuple[Callable[[], None], Any]:
        """Record the decoding step on a separate CUDA stream, in the memory pool of the current
        stream."""
        with compat.capturing_alone(), _collecting_nothing(), torch.cuda.device(self._device):
            pool = self._pools.setdefault(self.stream(), _Pool())
            handle, graph = pool.opened()
            pool.aside.wait_stream(torch.cuda.current_stream())
            compat.forget_workspaces()  # workspaces that a recording uses have to be in its pool
            try:
                with torch.cuda.stream(pool.aside):
                    found = _captured(graph, handle, step, inputs)
            except BaseException:
                # Allocators still ask a graph that failed whether memory is for it.
                self._failed.append(graph)
                del self._pools[self.stream()]
                raise
            finally:
                compat.forget_workspaces()
        return graph.replay, found


class _Pool:
    """The memory pool of all CUDA graphs for one stream of the caller, and a recording stream.

    The graphs are recorded on the recording stream, and replayed on the caller's stream. PyTorch's
    allocator deletes a pool together with the pool's last graph, and refuses the pool's handle
    afterwards.
    """

    def __init__(self) -> None:
        self.aside = torch.cuda.Stream()
        self._handle: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def opened(self) -> tuple[Any, torch.cuda.CUDAGraph]:
        """Return the handle of the memory pool, and an empty graph that keeps the pool alive. If
        the allocator has deleted the pool, create another."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        return self._handle, graph


def _captured(graph: torch.cuda.CUDAGraph, pool: Any, step: Step, inputs: Sequence[Any]) -> Any:
    idle = torch.zeros(1, device="cuda")
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        found = step(*inputs)
        graph.capture_end()
    except BaseException:
        with contextlib.suppress(Exception):
            graph.capture_end()
        compat.leave_pool(pool)
        _record_nothing(idle)
        raise
    return found


def _record_nothing(idle: Tensor) -> None:
    """Record an empty CUDA graph, because after a failed recording PyTorch's random number
    functions raise errors until a recording succeeds."""
    graph = torch.cuda.CUDAGraph()
    with contextlib.suppress(Exception):
        graph.capture_begin(capture_error_mode="thread_local")
        idle.zero_()
        graph.capture_end()


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Suspend garbage collection, because freeing CUDA objects would abort the recording of a CUDA
    graph."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def engine_for(device: torch.device) -> CudaEngine:
    """Return the CUDA graph recorder of a device."""
    return CudaEngine(device)
