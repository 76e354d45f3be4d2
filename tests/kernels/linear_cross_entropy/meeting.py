"""Ranks with parts of one head, as threads of one process, and their merged results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._head_loss.call import ScalarLoss
from memeff_compile.kernels.linear_cross_entropy import (
    Shard,
    vocabulary_parallel,
)
from tests.kernels.linear_cross_entropy.engines import Found, reference

IGNORED = -100
Engine = Callable[[ScalarLoss], Found]


@dataclass
class Meeting:
    """Stands in for a group of processes: one thread each, of which one runs until it waits."""

    ranks: int
    said: list[Any] = field(default_factory=list)
    sizes: list[list[tuple[int, ...]]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.said, self.sizes = [None] * self.ranks, [[] for _ in range(self.ranks)]
        self.barrier, self.lock = threading.Barrier(self.ranks, timeout=60), threading.Lock()

    def gather(self, rank: int, said: Tensor) -> Tensor:
        self.said[rank] = said.clone()
        self.sizes[rank].append(tuple(said.shape))
        self.lock.release()
        try:
            self.barrier.wait()
            every = torch.cat(self.said)
            self.barrier.wait()
        finally:
            self.lock.acquire()
        return every

    def run(self, walk: Callable[[int], Found]) -> list[Found]:
        found: list[Any] = [None] * self.ranks

        def one(rank: int) -> None:
            try:
                with self.lock:
                    found[rank] = walk(rank)
            except BaseException as error:  # told where the test runs
                self.errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        assert all(each == self.sizes[0] for each in self.sizes)
        return found


def part_of(given: ScalarLoss, shard: Shard, gather: Any) -> ScalarLoss:
    mine = slice(shard.first, shard.first + shard.columns)
    bias = None if given.bias is None else given.bias[mine]
    return vocabulary_parallel.loss_of_rank(
        given._replace(weight=given.weight[mine], bias=bias), shard, gather
    )


def together(given: ScalarLoss, *engines: Engine) -> tuple[list[Tensor], int]:
    """Return the merged results of ranks with these engines, and how often they exchanged."""
    meeting, classes = Meeting(len(engines)), given.weight.shape[0]

    def walk(rank: int) -> Found:
        shard = Shard(rank, len(engines), classes)
        return engines[rank](part_of(given, shard, lambda said: meeting.gather(rank, said)))

    every = meeting.run(walk)
    for each in every[1:]:
        torch.testing.assert_close(each.total, every[0].total, rtol=1e-6, atol=0, equal_nan=True)
    of_hidden = torch.stack([part.grad_hidden.double() for part in every]).sum(0)
    found = [every[0].total, of_hidden, torch.cat([part.grad_weight for part in every])]
    if given.bias is not None:
        found.append(torch.cat([part.grad_bias for part in every]))
    return found, len(meeting.sizes[0])


def whole(given: ScalarLoss) -> list[Tensor]:
    """Return the results of one process in fp64."""
    return [part for part in reference.total(cast_to(given, torch.float64)) if part is not None]


def moved_to(given: ScalarLoss, device: str) -> ScalarLoss:
    moved = {
        name: each.to(device) for name, each in given._asdict().items() if isinstance(each, Tensor)
    }
    return given._replace(**moved)


def cast_to(given: ScalarLoss, dtype: torch.dtype) -> ScalarLoss:
    bias = None if given.bias is None else given.bias.to(dtype)
    return given._replace(hidden=given.hidden.to(dtype), weight=given.weight.to(dtype), bias=bias)


def loss_of(
    rows: int = 37,
    vocab: int = 41,
    dtype: torch.dtype = torch.float64,
    *,
    ignored: float = 0.0,
    lowest: int = 0,
    highest: int | None = None,
    depth: int = 16,
    **settings: Any,
) -> ScalarLoss:
    draw = torch.Generator().manual_seed(vocab)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    target = torch.randint(lowest, highest or vocab, (rows,), generator=draw)
    target[torch.rand(rows, generator=draw) < ignored] = IGNORED
    how = {"ignore_index": IGNORED, "scale": 0.7, "softcap": 0.0, "workspace": 1} | settings
    norm = (target != IGNORED).sum()
    hidden, weight = random(rows, depth), random(vocab, depth) * (16 / depth) ** 0.5
    tensors = (hidden, weight, random(vocab), target, None, norm)
    return ScalarLoss(*tensors, **how, output_mask=(True, True, True))


def assert_close(found: list[Tensor], expected: list[Tensor], budget: float) -> None:
    for one, other in zip(found, expected, strict=True):
        bound = budget * max(1.0, float(other.abs().max())) if other.isfinite().all() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=0, atol=bound, equal_nan=True)


def hostile() -> Iterator[Any]:
    """Yield rows in which a rank has no mass, or almost none, of the softmax."""
    for offset in (-500.0, -torch.inf):
        low, high = loss_of(highest=20), loss_of(lowest=21)
        low.bias[:21] += offset  # the targets', of which the first of two ranks has all
        yield pytest.param(low, id=f"targets at {offset}")
        high.bias[:21] += offset
        yield pytest.param(high, id=f"others at {offset}")
    one = loss_of(highest=20)
    one.bias[:20] = -torch.inf
    one.bias[20] = 0.0
    yield pytest.param(one, id="all but one of a rank's, which is no target")
    all_of_them = loss_of()
    all_of_them.bias[:] = -torch.inf
    yield pytest.param(all_of_them, id="all at -inf")
