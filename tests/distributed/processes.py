"""Runs a function in two processes that talk through gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
LIMIT = 400.0
"""Seconds until a run counts as stuck: a loaded machine is slow, a lost peer waits for ever."""


def run_in_two_processes(work: Callable[[], None], folder: Path) -> None:
    """Call `work`, a function of a module, in two processes; raise what it raises there."""
    meeting_point = f"file://{folder / 'meeting_point'}"
    context = mp.start_processes(
        _enter, args=(work, meeting_point), nprocs=RANKS, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + LIMIT
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{work.__name__} took longer than {LIMIT:.0f} s")


def _enter(rank: int, work: Callable[[], None], meeting_point: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=meeting_point,
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LIMIT),
    )
    work()
    dist.barrier()
    dist.destroy_process_group()
