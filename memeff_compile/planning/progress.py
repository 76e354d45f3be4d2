"""Show progress on stderr.

On a terminal, each step overwrites the line of the step before. If stderr is no terminal, progress
is shown only if the caller asks for it, with one line per step."""

from __future__ import annotations

import sys
import time

WIDTH = 24


class Progress:
    """A progress line on stderr, shown if `is_shown`, or by default if stderr is a terminal."""

    # `steps`: how many there will be, if no step has to be repeated
    def __init__(self, steps: int, is_shown: bool | None = None) -> None:
        self._steps, self._done, self._started = steps, 0, time.monotonic()
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._start, self._end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            sys.stderr.write(self._start)

    def __call__(self, what: str) -> None:
        """Show the next step of the work."""
        full = WIDTH * self._done // max(self._steps, self._done + 1)
        self._done += 1
        if self._is_shown:
            bar = f"[{'#' * full}{'.' * (WIDTH - full)}]"
            line = f"{bar} {time.monotonic() - self._started:4.0f} s  {what}"
            sys.stderr.write(f"{self._start}{line}{self._end}")
            sys.stderr.flush()
