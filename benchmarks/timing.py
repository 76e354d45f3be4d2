"""The one timer: the device's events on a GPU, the host's clock elsewhere; methods take turns.

`Clock` marks points in time; `milliseconds`, `with_peak` and `Repeated` time calls by it, `waited`
by the host's clock with the device idle at both ends. `in_turns` samples several of them round by
round, so that a drift of the machine touches all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
FILLER = 64 << 20
"""Numbers of four bytes that are written to empty an L2 cache."""


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Device events on a GPU, the host's clock elsewhere; `flush` empties the L2 cache."""

    def __init__(self, device: str | None = None) -> None:
        self.is_cuda = torch.cuda.is_available() if device is None else device == "cuda"
        self._filler: Any = None

    def flush(self) -> None:
        """Fill the cache with something else."""
        if self.is_cuda:
            if self._filler is None:
                self._filler = torch.empty(FILLER, dtype=torch.int32, device="cuda")
            self._filler.zero_()

    def mark(self) -> Any:
        """Return a point in time on the device."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return milliseconds between two marks."""
        if not self.is_cuda:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)


def milliseconds(
    call: Call, count: int = 1, *, device: str | None = None, is_ahead: bool = False
) -> float:
    """Return the time of a call, over `count` in a row.

    Args:
        device: of the call, if it is not the GPU that is there.
        is_ahead: whether the device first sleeps some 50 ms, so that the host gets ahead of it.
    """
    clock = Clock(device)
    if is_ahead and clock.is_cuda:
        torch.cuda._sleep(100_000_000)
    start = clock.mark()
    for _ in range(count):
        call()
    return clock.between(start, clock.mark()) / count


def waited(call: Call, count: int = 1) -> float:
    """Return the host's milliseconds of a call, over `count`; the device is idle at both ends."""
    synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - started) * 1e3 / count


def with_peak(call: Call, *, is_cuda: bool) -> tuple[float, int]:
    """Return the milliseconds of a call, and the allocator's absolute peak; 0 without a GPU."""
    if not is_cuda:
        return milliseconds(call, device="cpu"), 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return milliseconds(call, device="cuda"), torch.cuda.max_memory_allocated()


def captured(call: Call) -> Call:
    """Return a function that replays a call as a CUDA graph; the call itself without a GPU."""
    if not torch.cuda.is_available():
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Repeated:
    """Calls over rotated data, in one CUDA graph where there is a GPU.

    Args:
        calls: one for each copy of the data.
        least: how many calls there are at least in the graph; copies come up repeatedly.
    """

    def __init__(self, calls: Sequence[Call], least: int = 8) -> None:
        self.calls = list(calls) * max(1, least // len(calls))
        for call in calls[:2]:
            call()
        if torch.cuda.is_available():  # allocations of a first call on another stream
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                calls[0]()
            torch.cuda.current_stream().wait_stream(side)
        self.run = captured(self._all)
        if torch.cuda.is_available():
            self.run()

    def _all(self) -> None:
        for call in self.calls:
            call()

    def microseconds(self) -> float:
        """Return the time of one call, over one run of all."""
        return milliseconds(self.run) * 1e3 / len(self.calls)


def in_turns(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return each timer's results in so many rounds, in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer())
    return found
