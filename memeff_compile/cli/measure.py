"""Measures decisions on this machine's GPU: right first, then timed in turns, then chosen.

A setting whose numbers are wrong, or that fails, is out. The rest take turns on every workload; a
setting is as good as the geometric mean, over workloads, of its median time against the default's.
The default stays unless another is at least 2 % better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any, Protocol

from ..decisions import DECISIONS, Entry, Found, Machine, Question, Table, Timing, Workload
from ..errors import TuneError

WORTH = 0.98
MIN_ROUNDS, MAX_ROUNDS = 5, 15


class Clock(Protocol):
    """Times what runs on the device."""

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Run once and return what it took."""

    def now(self) -> float:
        """Return the host's time in seconds."""


@dataclass(frozen=True)
class Bench:
    """What `measure` needs: where it runs, what to ask, a clock, and seconds per decision."""

    machine: Machine
    questions: Sequence[Question]
    clock: Clock
    seconds: float = 4.0


def measure(bench: Bench, today: str, say: Callable[[str], object] = lambda line: None) -> Entry:
    """Decide what a machine can, and `say` each decision; TuneError where no setting is right."""
    found: dict[str, Found] = {}
    for question in bench.questions:
        found[question.name] = _answer(question, bench.clock, bench.seconds)
        say("\n".join(_decision_lines(question.name, found[question.name])))
    return Entry(bench.machine, today, found)


def _answer(question: Question, clock: Clock, seconds: float) -> Found:
    refused: dict[str, str] = {}
    left = _without_faults(question.options, refused, question.fault)
    workloads = question.workloads() if len(left) > 1 else ()

    def warm_up(option: str) -> str:
        for work in workloads:
            clock.milliseconds(partial(work.run, option))
        return ""

    left = _without_faults(left, refused, warm_up)
    if not left:
        faults = "; ".join(f"{option}: {fault}" for option, fault in refused.items())
        raise TuneError(
            f"{question.name}: no setting works on this GPU ({faults}). Please report this; until "
            "then compile with options={'memeff.linear_cross_entropy': 'off'}."
        )
    if len(left) == 1:
        return Found(left[0], question.default, "no other setting works", (), refused)
    samples = _take_turns(left, workloads, clock, seconds)
    value, reason = _choose(question.default, samples)
    timings = tuple(
        Timing(option, name, *(round(_quantile(times, share), 4) for share in (0.5, 0.2, 0.8)))
        for option, by_name in samples.items()
        for name, times in by_name.items()
    )
    return Found(value, question.default, reason, timings, refused)


def _without_faults(
    options: Sequence[str], refused: dict[str, str], trial: Callable[[str], str]
) -> list[str]:
    """Return the options that a trial finds nothing wrong with; note the others in `refused`."""
    left = []
    for option in options:
        try:
            fault = trial(option)
        except Exception as error:
            # Whatever a compiler or a driver raises, this setting is not for this GPU.
            fault = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        if fault:
            refused[option] = fault
        else:
            left.append(option)
    return left


def _take_turns(
    options: Sequence[str], workloads: Sequence[Workload], clock: Clock, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Time every option on every workload in turn, for about `seconds`."""
    samples: dict[str, dict[str, list[float]]] = {option: {} for option in options}
    started = clock.now()
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and clock.now() - started > seconds:
            break
        for work in workloads:
            for option in options:
                took = clock.milliseconds(partial(work.run, option))
                samples[option].setdefault(work.name, []).append(took)
    return samples


def _choose(default: str, samples: Mapping[str, Mapping[str, list[float]]]) -> tuple[str, str]:
    """Return the setting to use, and why."""
    base = default if default in samples else next(iter(samples))
    medians = {
        option: [_quantile(times, 0.5) for _, times in sorted(by_name.items())]
        for option, by_name in samples.items()
    }
    ratios = {
        option: geometric_mean(mine / its for mine, its in zip(found, medians[base], strict=True))
        for option, found in medians.items()
    }
    best = min(ratios, key=lambda option: ratios[option])
    if base == default and ratios[best] > WORTH:
        return default, "no other setting is 2 % faster"
    if best == base:
        return best, "the fastest of those that work"
    return best, f"{1 - ratios[best]:.1%} less time than {base}"


def _quantile(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table_text(table: Table) -> str:
    """Return a table for a reader."""
    lines: list[str] = []
    for entry in table.entries:
        machine = entry.machine
        lines += [
            f"{machine.gpu} (compute capability {machine.capability}), {entry.date}",
            f"torch {machine.torch}, triton {machine.triton}, memeff_compile {machine.kernels}",
        ]
        for name, found in entry.found.items():
            lines += _decision_lines(name, found)
        lines.append("")
    return "\n".join(lines)


def _decision_lines(name: str, found: Found) -> list[str]:
    decision = DECISIONS.get(name)
    lines = [
        "",
        f"  {name} = {found.value}  ({found.reason}; default {found.default})",
        f"    {decision.meaning if decision else 'not known to this version'}",
    ]
    width = max((len(timing.workload) for timing in found.timings), default=0)
    lines += [
        f"    {timing.workload:<{width}}  {timing.value!s:>8}  {timing.median:8.3f} ms"
        f"  ({timing.p20:.3f} .. {timing.p80:.3f})"
        for timing in sorted(found.timings, key=lambda timing: timing.workload)
    ]
    return lines + [f"    left out: {value}: {why}" for value, why in found.refused.items()]


class GpuClock:
    """Device events, with the cache emptied before each run."""

    def __init__(self, device: Any) -> None:  # noqa: ANN401
        import torch

        self._filler = torch.empty(1 << 26, dtype=torch.int32, device=device)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Run once and return what the device took."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._filler.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def now(self) -> float:
        """Return the host's time in seconds."""
        return time.perf_counter()


def find_gpu(*, quick: bool) -> Bench:
    """Return the bench of this process's GPU; TuneError without one that runs our kernels."""
    import torch

    needed = "tune measures a CUDA GPU of compute capability 8.0 or later, with triton installed"
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise TuneError(
            f"No GPU was found (torch {torch.__version__} is built with {built}); {needed}. "
            "Nothing on a CPU is decided by measurement: there is nothing to do here."
        )
    from ..kernels.device import can_run_kernels, machine
    from .trials import questions

    device = torch.device("cuda", torch.cuda.current_device())
    if not can_run_kernels(device):
        from .doctor import installed

        major, minor = torch.cuda.get_device_capability(device)
        found = installed("triton")
        raise TuneError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            f"triton {f'{found} is' if found else 'is not'} installed; {needed}. "
            "CUDA_VISIBLE_DEVICES chooses another GPU."
        )
    asked = list(questions(device, quick=quick))
    if not asked:
        raise TuneError(
            f"On {torch.cuda.get_device_name(device)} one engine alone serves each op: there is "
            "nothing to choose, and nothing was measured."
        )
    return Bench(machine(device.index), asked, GpuClock(device), seconds=1.0 if quick else 4.0)
