"""Recording on a GPU: memory that outlives a recording, and the state after a failed one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from memeff_compile.backend.replay import CudaEngine, Recorder, Roles
from memeff_compile.report import Replays

pytestmark = pytest.mark.gpu


def recorder(engine: CudaEngine, is_failing: bool = False) -> tuple[Recorder, Replays]:
    def step(cache: Tensor, x: Tensor) -> tuple[Tensor]:
        cache.add_(x)
        if is_failing and torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return (cache * 2,)

    use = Replays()
    return Recorder(step, Roles(held=(0,), copied=(1,), written=(0,)), use, engine), use


def run(made: Recorder, calls: int) -> None:
    cache, expected = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    for count in range(calls):
        x = torch.full((64,), float(count), device="cuda")
        expected += x
        assert torch.equal(made(cache, x)[0], expected * 2)


def test_recordings_follow_recordings_that_are_gone() -> None:
    engine = CudaEngine(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):
        made, use = recorder(engine)
        run(made, 6)
        assert (use.recordings, use.replays, use.stopped) == (1, 4, "")
        del made
        gc.collect()


def test_after_a_recording_that_fails_random_numbers_and_recordings_work() -> None:
    engine = CudaEngine(torch.device("cuda", torch.cuda.current_device()))
    made, use = recorder(engine, is_failing=True)
    run(made, 6)
    assert use.recordings == 0
    assert use.stopped
    assert torch.rand(8, device="cuda").unique().numel() > 1
    again, used = recorder(engine)
    run(again, 6)
    assert used.replays == 4
