"""Frameworks that spread a model by themselves: accelerate's FSDP2, and the Trainer under DDP."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memeff_compile
from memeff_compile import compat
from memeff_compile.backend import memeff
from memeff_compile.integrations.transformers import MemeffCallback
from tests.distributed import models
from tests.distributed.models import TRAINING, codes, fresh_start, gradients, ids
from tests.distributed.processes import RANKS, TwoProcesses
from tests.integrations.tiny import OPTIONS, llama

STEPS = 3


@contextmanager
def as_torchrun_starts_it() -> Iterator[None]:
    rank = str(dist.get_rank())
    AcceleratorState._reset_state(reset_partial_state=True)
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, and not used again
    with mock.patch.dict(os.environ, {**given, **meeting}):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator(policy: str) -> Accelerator:
    """One with FSDP2, which accelerate itself gives to GPUs alone."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy=policy,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    made = Accelerator(cpu=True, fsdp_plugin=plugin)
    made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
    return made


def shard(model: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def trained(policy: str, is_compiled: bool) -> list[float]:
    fresh_start()
    with as_torchrun_starts_it():
        made, model = accelerator(policy), llama()
        if is_compiled:
            model.compile(backend="memeff", options=OPTIONS)
        if policy == "no_wrap":
            shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = made.prepare(model, optimizer)
        losses = []
        for step in range(STEPS):
            rows = (ids() + step) % 160
            loss = model(input_ids=rows, labels=rows).loss
            made.backward(loss)
            assert all(hasattr(p.grad, "full_tensor") for p in model.parameters())
            assert len(gradients(model)) == len(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def fsdp2_as_accelerate_groups_it() -> None:
    """Norm and head are a group, so the head is in no graph with the loss; the loss is fused."""
    policy = "transformer_based_wrap"
    expected = trained(policy, is_compiled=False)
    assert trained(policy, is_compiled=True) == pytest.approx(expected, rel=2e-6)
    assert codes() == {"head_compiled", "logits_deferred"}


def fsdp2_sharded_before_prepare() -> None:
    expected = trained("no_wrap", is_compiled=False)
    assert trained("no_wrap", is_compiled=True) == pytest.approx(expected, rel=2e-6)
    assert codes() == TRAINING


def the_trainer(accumulate: int, by_callback: bool = False) -> None:
    """Under DDP, with rows of different numbers of labels on each rank."""
    from tests.integrations import test_trainer

    def run(model: nn.Module, *callbacks: MemeffCallback) -> Any:
        folder = Path(tempfile.mkdtemp())
        with as_torchrun_starts_it():
            made = test_trainer.trainer(model, folder, gradient_accumulation_steps=accumulate)
            assert made.args.world_size == RANKS
            for callback in callbacks:
                made.add_callback(callback)
            made.train()
        return made

    fresh_start()
    expected = test_trainer.losses(run(llama()))
    if by_callback:
        made = run(llama(), MemeffCallback(options=models.OPTIONS))
    else:
        made = run(test_trainer.compiled(models.OPTIONS["memeff.inner"]))
    assert test_trainer.losses(made) == pytest.approx(expected, rel=2e-6)
    assert codes() == TRAINING
    assert set(test_trainer.products(made.seen)) == {0}
    assert memeff_compile.last_report().graphs


class Asks(nn.Module):
    """Asks, while it is captured, which backend that is for."""

    def __init__(self, ask: Callable[[], int]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.ask()


def the_backend_under_ddp() -> None:
    """DDP puts a backend of its own around ours; TRL's head is handed to ours all the same."""
    seen: list[object] = []

    @compat.constant_in_traces
    def ask() -> int:
        seen.append(compat.capturing_backend())
        return 1

    fresh_start()
    model = Asks(ask)
    model.compile(backend="memeff", options=models.OPTIONS)
    nn.parallel.DistributedDataParallel(model)(torch.ones(2, 4)).sum().backward()
    assert seen == [memeff]


CASES: list[Any] = [
    the_backend_under_ddp,
    pytest.param(fsdp2_as_accelerate_groups_it, marks=pytest.mark.slow),
    pytest.param(fsdp2_sharded_before_prepare, marks=pytest.mark.slow),
    partial(the_trainer, 1),
    pytest.param(partial(the_trainer, 1, by_callback=True), marks=pytest.mark.slow),
    pytest.param(partial(the_trainer, 3), marks=pytest.mark.slow),
]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("case", CASES, ids=lambda case: getattr(case, "func", case).__name__)
def test_frameworks(case: Callable[[], None], two_processes: TwoProcesses, inner: str) -> None:
    two_processes.run(case, inner=inner)
