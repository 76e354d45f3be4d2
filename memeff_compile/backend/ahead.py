"""Compile kernels before their first launch.

Kernels of this package are compiled in threads, kernels of Inductor in processes. Triton compiles a
kernel at its first launch. So a compiled graph would compile this package's kernels one after
another during its first run. To avoid this delay, this module calls each of this package's ops in
the rewritten graph, and the op's gradient. The calls come right after the passes have run, on
tensors without memory. The calls record their kernel launches instead of running them, and threads
compile the recorded kernels. Threads suffice, because Triton spends most of the compilation time in
LLVM and ptxas, without Python's global lock. The first launch then finds the compiled kernel. If an
op cannot be called without data, Triton compiles its kernels at their first launch, as usual.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from .. import compat
from ..kernels.library import Launch, noted, unpack

log = logging.getLogger(__name__)

MOST_THREADS = 4


class Likeness(NamedTuple):
    """The properties of a tensor on which the compilation of an op's kernels depends, such as dtype
    and sizes."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool

    def new(self) -> torch.Tensor:
        """Return a tensor that has the properties stored in this `Likeness`; under a fake tensor
        mode it has no memory."""
        empty = torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=self.device)
        return empty.requires_grad_(self.needs_grad)


class Call(NamedTuple):
    """A recorded call of one of this package's ops."""

    op: Any
    args: tuple[Any, ...]  # tensors as likenesses
    kwargs: tuple[tuple[str, Any], ...]  # likewise
    device: torch.device

    def launches(self, *, trains: bool) -> list[Launch]:
        """Return the kernels that this call's op and the op's gradient launch."""
        found: list[Launch] = []
        mode: Any = None

        def outside(op: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
            compute = getattr(op, "compute", None)
            if compute is None:
                return run()
            with mode, noted(found):
                return compute(*args, **kwargs)

        mode = compat.fake_mode(outside, has_addresses=False)
        with mode, torch.set_grad_enabled(trains):
            args, kwargs = _each(self.args, _made), _each(dict(self.kwargs), _made)
            results = _tensors(self.op(*args, **kwargs))
            given = [each for each in _tensors((args, kwargs)) if each.requires_grad]
            results = [each for each in results if each.requires_grad]
            if given and results:
                ones = [torch.empty_like(each) for each in results]
                torch.autograd.grad(results, given, ones, allow_unused=True)
        return found


def start_workers() -> None:
    """Start Inductor's compiler processes early if this process uses a GPU, because such processes
    take seconds to start.
    """
    if torch.cuda.is_initialized():
        try:
            compat.start_compile_workers()
        except Exception:  # Inductor starts them later
            log.debug("memeff_compile: Inductor's processes were not started", exc_info=True)


def calls_of(gm: GraphModule) -> list[Call]:
    """Return the distinct calls of this package's ops in a graph and in its subgraphs."""
    found: dict[str, Call] = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if hasattr(node.target, "compute"):
                call = _call_of(node)
                if call is not None:
                    found.setdefault(repr(call), call)
    return list(found.values())


def compile_ahead(gm: GraphModule, *, trains: bool) -> list[Future[list[Future[None]]]]:
    """Begin to compile the GPU kernels of a graph, without waiting. Return one future per op call;
    the future's result is a list with one future per kernel of that call."""
    try:
        calls = [call for call in calls_of(gm) if call.device.type == "cuda"]
    except Exception:  # the kernels are compiled at their first launch
        log.debug("memeff_compile: no kernel is compiled ahead", exc_info=True)
        return []
    return [_threads().submit(_compile, call, trains=trains) for call in calls]


def _compile(call: Call, *, trains: bool) -> list[Future[None]]:
    try:
        unpack()  # kernels that another process compiled and saved
        with torch.cuda.device(call.device):
            launches = call.launches(trains=trains)
    except Exception:
        log.debug("memeff_compile: %s is not compiled ahead", call.op, exc_info=True)
        return []
    different = {launch.key(): launch for launch in launches}
    return [_threads().submit(_compile_kernel, each, call.device) for each in different.values()]


def _compile_kernel(launch: Launch, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            launch.compile()
    except Exception:
        log.debug("memeff_compile: a kernel is not compiled ahead", exc_info=True)


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the thread pool that compiles kernels. The pool leaves some CPU cores to Inductor,
    because the first step cannot run before Inductor is done.
    """
    known = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return ThreadPoolExecutor(max(1, min(MOST_THREADS, processors - 1)), "memeff kernels")


def _call_of(node: Node) -> Call | None:
    devices: set[torch.device] = set()

    def likeness(each: Node) -> Likeness:
        value = compat.example_value(each)
        if not compat.is_fake(value) and type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise _UnknownError
        devices.add(value.device)
        size, strides = value.shape, value.stride()
        return Likeness(
            tuple(map(compat.size_hint, size)),
            tuple(map(compat.size_hint, strides)),
            *(value.dtype, value.device, value.requires_grad),
        )

    def alike(each: Any) -> Any:
        if isinstance(each, torch.SymInt):
            return compat.size_hint(each)
        if not isinstance(each, Node):
            return each
        value = compat.example_value(each)
        return compat.size_hint(value) if isinstance(value, torch.SymInt) else likeness(each)

    try:
        args, kwargs = _each(node.args, alike), _each(dict(node.kwargs), alike)
    except _UnknownError:
        return None
    gpus = [each for each in devices if each.type == "cuda"]
    device = gpus[0] if gpus else torch.device("cpu")
    return Call(node.target, tuple(args), tuple(kwargs.items()), device)


class _UnknownError(Exception):
    """The error for an op whose argument is neither a plain tensor nor a constant."""


def _made(value: Any) -> Any:
    return value.new() if isinstance(value, Likeness) else value


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every item of nested tuples, lists and dictionaries, and return the
    results in the same nesting."""
    if isinstance(value, (tuple, list)) and not isinstance(value, Likeness):
        kind = tuple if isinstance(value, tuple) else list  # not those of torch.fx
        return kind(_each(each, function) for each in value)
    if isinstance(value, dict):
        return {name: _each(each, function) for name, each in value.items()}
    return function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    def found(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            for each in value:
                yield from found(each)
        elif isinstance(value, dict):
            yield from found(list(value.values()))

    return list(found(value))
