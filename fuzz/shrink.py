"""Dropping the lines that a failure does not need."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from .judge import Verdict
from .program import Program

__all__ = ["shrink"]


def shrink(
    program: Program, failure: Verdict, judge: Callable[[Program], Verdict], seconds: float = 60
) -> Program:
    """Return a program of fewer lines that fails alike.

    Args:
        program: fails as `failure` says.
        failure: what is to stay.
        judge: runs a program.
        seconds: when to stop.
    """
    deadline = time.monotonic() + seconds
    step = max(len(program.lines) // 4, 1)
    while True:
        before = program
        place = len(program.lines)
        while place > 0 and time.monotonic() < deadline:
            place -= step
            smaller = _without(program, max(place, 0), place + step)
            if failure.resembles(judge(smaller)):
                program = smaller
        if time.monotonic() >= deadline or (step == 1 and program == before):
            return program
        step = max(step // 2, 1)


def _without(program: Program, first: int, last: int) -> Program:
    """Return the program without some of its lines, counted through setup and body."""
    behind = len(program.setup)
    setup = program.setup[: min(first, behind)] + program.setup[min(last, behind) :]
    body = program.body[: max(first - behind, 0)] + program.body[max(last - behind, 0) :]
    return replace(program, setup=setup, body=body)
