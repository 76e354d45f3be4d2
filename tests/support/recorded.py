"""A CUDA graph imitated on a CPU: a recorder that does not run while it records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.backend import cuda_graphs, trip


class Imitation:
    """An engine whose replays run the step again, on the memory that it was recorded with.

    Results of a replay are written where the ones before are, as a CUDA graph does.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_busy = False
        self.is_replaying = False
        self.recorded = 0
        self.on: Any = 0

    def is_free(self) -> bool:
        return not self.is_busy

    def stream(self) -> Any:
        return self.on

    def random_state(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()

    def record(
        self, step: Callable[..., Any], inputs: Sequence[Any]
    ) -> tuple[Callable[[], None], Any]:
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        with torch.no_grad():
            before = [each.detach().clone() for each in tensors]
            found = step(*inputs)
            for each, value in zip(tensors, before, strict=True):
                if not torch.equal(each, value):
                    each.copy_(value)
        self.recorded += 1

        def replay() -> None:
            self.is_replaying = True
            with torch.no_grad():
                for old, new in zip(found, step(*inputs), strict=True):
                    if isinstance(old, Tensor) and not any(old is each for each in inputs):
                        old.copy_(new)
            self.is_replaying = False

        return replay, found


def imitate(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    """Record on the CPU, whatever compiles."""
    engine = Imitation()
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "INNERS", ("eager", "aot_eager", "inductor"))
    monkeypatch.setattr(trip, "engine_for", lambda device: engine)
    return engine
