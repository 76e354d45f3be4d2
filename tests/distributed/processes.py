"""Processes that talk through gloo, or NCCL, and call functions together, started once for many."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.models import OPTIONS, fresh_start
from tests.support.quick_dynamo import (
    let_cycles_wait,
    measure_nothing,
    read_configs_plainly,
    seed_what_is_there,
)

RANKS = 2
IMPORTS = [
    "memeff_compile.backend",
    "torch._functorch.aot_autograd",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]
"""Imports of the third process, from which the two are forked."""
LIMIT = 400.0
"""Seconds until a call counts as stuck: a loaded machine is slow, a lost peer waits for ever."""


class TwoProcesses:
    """Starts at the first call, and again after a failure: a process may wait for a dead peer."""

    def __init__(
        self,
        folders: pytest.TempPathFactory,
        ranks: int = RANKS,
        backend: str = "gloo",
        is_quick: bool = False,
    ) -> None:
        self._folders, self._ranks, self._backend = folders, ranks, backend
        self._is_quick = is_quick
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(
        self, work: Callable[[], None], limit: float = LIMIT, inner: str = OPTIONS["memeff.inner"]
    ) -> None:
        """Call `work`, which can be pickled, in both processes; raise its exception.

        Models that it compiles with `OPTIONS` go through `inner`.
        """
        if not self._processes:
            self._start()
        deadline = time.monotonic() + limit
        for pipe in self._pipes:
            pipe.send((work, inner))
        waiting = list(self._pipes)
        while waiting:
            ready = connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            said = [self._heard(pipe) for pipe in ready] or [f"it took longer than {limit:.0f} s"]
            if any(said):
                self.stop()
                raise AssertionError("\n".join(said))
            waiting = [pipe for pipe in waiting if pipe not in ready]

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        meeting_point = f"file://{self._folders.mktemp('two_processes') / 'meeting_point'}"
        for rank in range(self._ranks):
            ours, theirs = context.Pipe()
            told = (rank, self._ranks, self._backend, theirs, meeting_point, self._is_quick)
            process = context.Process(target=_serve, args=told)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def _heard(self, pipe: Any) -> str:
        try:
            return str(pipe.recv())
        except (EOFError, ConnectionError):
            return f"process {self._pipes.index(pipe)} ended without a word"

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(
    rank: int, ranks: int, backend: str, pipe: Any, meeting_point: str, is_quick: bool
) -> None:
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 50)  # as conftest.py has it
    seed_what_is_there()
    if is_quick:
        read_configs_plainly()
        let_cycles_wait()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=meeting_point,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT),
    )
    while True:
        work, OPTIONS["memeff.inner"] = pipe.recv()
        try:
            torch.manual_seed(0)
            fresh_start()
            measure_nothing()
            work()
            dist.barrier()
        except BaseException:  # whatever it is, the other side is told
            pipe.send(f"process {rank}:\n{traceback.format_exc()}")
            return
        pipe.send("")
