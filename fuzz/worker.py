"""Going through the programs of one part, one after the other, in one process."""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from .judge import Verdict, judge, judge_again, verdict
from .program import Program, World, start
from .report import Failure, Tally
from .shrink import shrink
from .sketch import Sketch

__all__ = ["PARTS", "load", "work"]

NAMES = ("logits", "losses", "attention", "verbs", "caches", "layers")
PARTS = dict(zip("abcdef", NAMES, strict=True))

_SHRUNK = 8
"""So many failures are shrunk, with the seconds that each may take; the others are counted."""

_SHRUNK_ALIKE = 3
"""So many of those whose sentences differ in numbers alone."""

_SECONDS = 20

_LATE = 5
"""Seconds after the time given when a program that still runs, or is made small, is given up."""

_SAVED = 10
"""Seconds between two looks at the counts from outside."""

Before = Callable[[str, Program], object]


class Part(Protocol):
    """One file of programs."""

    TITLE: str
    REUSE: int  # bodies that share a setup
    IMPORTS: str  # what its programs need next to torch

    def setup(self, random: random.Random) -> list[str]:
        """Draw what is made once."""

    def body(self, random: random.Random, sketch: Sketch) -> None:
        """Draw what is done with it."""

    def is_exact(self, names: dict[str, Any]) -> bool:
        """Say whether values are in float64, so that comparisons may be drawn."""


def load(part: str) -> Part:
    """Import the file of a part."""
    module: Any = importlib.import_module(f"{__package__}.{PARTS[part]}")
    found: Part = module
    return found


def _cpu_seconds() -> float:
    """CPU time of this process and of the compilers that it has run."""
    return sum(os.times()[:4])


def programs(
    part: Part, seed: str, number: int, before: Before
) -> Iterator[tuple[str, Program, World, World]]:
    """Draw one setup, and the programs that share it, each after the one before."""
    setup = tuple(part.setup(random.Random(f"{seed}/{number}")))
    torch._dynamo.reset()
    only = Program(setup, (), part.IMPORTS)
    eager, ours = start(only, ours=False), start(only, ours=True)
    for place in range(part.REUSE):
        own = f"{seed}/{number}/{place}"
        before(own, Program((), ()))
        names = eager.enter()
        choices = random.Random(own)
        sketch = Sketch(choices, names, is_exact=part.is_exact(names))
        part.body(choices, sketch)
        yield own, Program(setup, tuple(sketch.lines), part.IMPORTS), eager, ours


def work(
    tally: Tally,
    seed: str,
    seconds: float,
    *,
    before: Before = lambda own, program: None,
    after: Callable[[Tally], object] = lambda tally: None,
    device: str = "cpu",
    stops: bool = False,
) -> None:
    """Run programs until so much CPU time is spent.

    Args:
        tally: what was counted so far; continues there.
        seed: what to draw from.
        seconds: CPU time of this call.
        before: told each program before it runs, and an empty one before it is drawn.
        after: told the counts every few seconds.
        device: where tensors are made.
        stops: at the first failure.
    """
    with _settled(device), suppress(_Late), _given_up(seconds + _LATE) as is_late:
        _work(tally, seed, seconds, before, after, stops, is_late)


def _work(
    tally: Tally,
    seed: str,
    seconds: float,
    before: Before,
    after: Callable[[Tally], object],
    stops: bool,
    is_late: threading.Event,
) -> None:
    part = load(tally.part)
    started, spent, saved = _cpu_seconds(), tally.cpu_seconds, 0.0
    while _cpu_seconds() - started < seconds:
        number, tally.next_setup = tally.next_setup, tally.next_setup + 1
        after(tally)
        for own, program, eager, ours in programs(part, seed, number, before):
            before(own, program)
            found = verdict(program, eager, ours)
            if is_late.is_set():  # C++ may have made an error of the program of it
                return
            tally.programs += 1
            tally.kinds[found.kind] += 1
            if found.kind == "decline":
                tally.declines[found.sentence] += 1
            if found.is_failure:
                _report(tally, own, program, found, is_late)
                if stops and tally.has_failed:
                    return
            tally.cpu_seconds = spent + _cpu_seconds() - started
            if found.is_failure or time.monotonic() - saved > _SAVED:
                saved = time.monotonic()
                after(tally)
            if found.kind == "internal_error" or _cpu_seconds() - started >= seconds:
                break
        if number % 20 == 0:
            gc.collect()


def _report(
    tally: Tally, own: str, program: Program, found: Verdict, is_late: threading.Event
) -> None:
    """Judge a failure again, alone; keep it and make it small, unless others like it were.

    One of a setup stands for all. It is kept as it is before that, which may take too long.
    """
    numbered = re.compile(r"[0-9.e+-]+")
    alike = f"{found.kind}: {numbered.sub('', found.sentence)}"
    here = f"{own.rsplit('/', 1)[0]}: {alike}"

    def failure(program: Program, sentence: str) -> Failure:
        heading = f"part {tally.part}, seed {own}: {found.kind}: {sentence}".replace("\n", " ")
        return Failure(tally.part, own, found.kind, sentence, program.text(heading[:300]))

    is_shown = not tally.alike[here] and len(tally.failures) < _SHRUNK
    is_shown = is_shown and tally.alike[alike] < _SHRUNK_ALIKE
    tally.alike[here] += 1
    if is_shown:
        tally.alike[alike] += 1
        tally.failures.append(failure(program, found.sentence))
    again = judge(program)
    if is_late.is_set():
        return
    if again.kind in ("inner", "invalid") and found.kind != "internal_error":
        tally.kinds[found.kind] -= 1
        tally.kinds[again.kind] += 1
        tally.alike[here] -= 1
        if is_shown:
            tally.alike[alike] -= 1
            tally.failures.pop()
        return
    if not is_shown:
        return
    if not found.resembles(again):
        note = " (only after the programs before it: run the part with this seed)"
        tally.failures[-1] = failure(program, found.sentence + note)
        return
    # What compiled code of before lost stays in the report.
    fast = judge if found.kind == "internal_error" else judge_again()
    smaller = shrink(program, found, fast, _SECONDS)
    again = judge(smaller)
    if not found.resembles(again):
        smaller = shrink(program, found, judge, _SECONDS)
        again = judge(smaller)
    if not is_late.is_set():
        tally.failures[-1] = failure(smaller, again.sentence or found.sentence)


class _Late(BaseException):
    """The time is over; no program takes this for an error of its own."""


@contextmanager
def _given_up(seconds: float) -> Iterator[threading.Event]:
    """End what runs when so much CPU time is spent, where there can be such a signal."""
    is_late = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield is_late
        return

    def end(*_: object) -> None:
        is_late.set()
        raise _Late

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 0.1))
    try:
        yield is_late
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _settled(device: str) -> Iterator[None]:
    """Quiet, one thread, and as many compilations as it takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dynamo = {"recompile_limit": 64, "accumulated_recompile_limit": 100_000}
    with (
        warnings.catch_warnings(action="ignore"),
        torch.device(device) if device != "cpu" else nullcontext(),
        torch._dynamo.config.patch(dynamo),
        functorch_config.patch(donated_buffer=False),  # or no second backward pass
        inductor_config.patch(compile_threads=1),
    ):
        yield
    torch.set_num_threads(threads)
