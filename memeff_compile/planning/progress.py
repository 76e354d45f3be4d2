"""What is being done, on stderr: a line that is written over, where somebody may be looking."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")

WIDTH = 24


class Progress:
    """Says what is being done, in a number of steps.

    Args:
        steps: how many there will be, if nothing has to be done again.
        is_shown: whether to say anything; by default where stderr is a terminal.
    """

    def __init__(self, steps: int, is_shown: bool | None = None) -> None:
        self._steps, self._done = steps, 0
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")

    def __call__(self, what: str) -> None:
        """Say what is done next."""
        self._done += 1
        self._steps = max(self._steps, self._done)
        if not self._is_shown:
            return
        full = WIDTH * (self._done - 1) // self._steps
        bar = f"[{'#' * full}{'.' * (WIDTH - full)}]"
        line = f"{bar} {time.monotonic() - self._started:4.0f} s  {what}"
        sys.stderr.write(f"\r\x1b[K{line}" if sys.stderr.isatty() else f"{line}\n")
        sys.stderr.flush()

    def each(self, names: Iterable[str], values: Iterable[_T]) -> Iterator[_T]:
        """Yield values, saying the name of each before it is used."""
        for name, value in zip(names, values, strict=True):
            self(name)
            yield value
