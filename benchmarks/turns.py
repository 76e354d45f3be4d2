"""Processes that measure on one GPU: they compile in parallel, and run one at a time."""

from __future__ import annotations

import fcntl
import gc
import time
from pathlib import Path
from typing import Any

import torch

import memeff_compile
from benchmarks import timing


def clean() -> None:
    """Drop compiled code and free its memory."""
    memeff_compile.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Turns:
    """The GPU, which this process has to itself but for the time in which it compiles."""

    def __init__(self, file: Path | None) -> None:
        self.held = None if file is None else file.open("w")
        self.compile_s = self.waited_s = self.started = 0.0
        self.take()

    def start(self) -> None:
        """Drop compiled code, and Dynamo's references to callbacks."""
        from torch._dynamo import callback

        clean()
        callback.on_compile_start(self.begin)
        callback.on_compile_end(self.end)

    def take(self) -> None:
        """Wait for the GPU."""
        if self.held is not None:
            begun = time.perf_counter()
            fcntl.flock(self.held, fcntl.LOCK_EX)
            self.waited_s += time.perf_counter() - begun

    def give(self) -> None:
        """Let another process have it, and the memory that is only kept."""
        if self.held is not None:
            timing.synchronize()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            fcntl.flock(self.held, fcntl.LOCK_UN)

    def begin(self, trigger: Any) -> None:
        """Start to compile; CUDA graphs that Inductor records need the GPU, and are compilation."""
        self.started = time.perf_counter()
        if self._is_long(trigger):
            self.give()

    def end(self, trigger: Any) -> None:
        """Continue with the compiled code."""
        self.compile_s += time.perf_counter() - self.started
        if self._is_long(trigger):
            self.take()

    @staticmethod
    def _is_long(trigger: Any) -> bool:
        return any(kind in str(trigger) for kind in ("DYNAMO", "LAZY_BACKWARD"))
