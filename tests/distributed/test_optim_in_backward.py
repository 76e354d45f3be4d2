"""optim_in_backward on FSDP2's shards: the bits of the ordinary optimizer, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from memeff_compile import compat
from memeff_compile.errors import MemeffError
from memeff_compile.model.weights.optim_in_backward import optim_in_backward
from tests.distributed.models import AOTAUTOGRAD, VOCABULARY, Block, fresh_start, ids
from tests.distributed.processes import RANKS, TwoProcesses

Make = Callable[[nn.Parameter], Optimizer]
STEPS = 3
PARTS = ("model", "optimizer")


class Stacked(nn.Module):
    """Embedding, two blocks of which the first may be called twice, head; returns the loss."""

    def __init__(self, order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 15), nn.Linear(15, VOCABULARY, bias=False)
        self.blocks, self.order = nn.ModuleList(Block(15) for _ in range(2)), order
        self.watch: Callable[[Tensor], object] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for place in self.order:
            x = self.blocks[place](x)
            if self.watch is not None and place == 0:
                x.register_hook(self.watch)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.roll(-1).flatten())


def sharded(
    order: tuple[int, ...] = (0, 1), shape: tuple[int, ...] = (RANKS,), **settings: Any
) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    model, mesh = Stacked(order), init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def adamw(parameter: nn.Parameter) -> Optimizer:
    return AdamW([parameter], lr=1e-2)


def several(parameter: nn.Parameter) -> Optimizer:
    """Momentum for vectors, AdamW for matrices."""
    return SGD([parameter], lr=0.1, momentum=0.9) if parameter.dim() == 1 else adamw(parameter)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: compat.local_part(p.detach()) for name, p in model.named_parameters()}


def assert_same(ours: nn.Module, ordinary: nn.Module) -> None:
    for model in (ours, ordinary):
        model.reshard()  # type: ignore[operator]
    expected = values(ordinary)
    for name, value in values(ours).items():
        assert torch.equal(value, expected[name]), name
    assert all(parameter.grad is None for parameter in ours.parameters())


def same_training(
    factory: Make = adamw,
    *,
    order: tuple[int, ...] = (0, 1),
    batches: int = 1,
    synced: bool = False,
    compiled: bool = False,
    max_norm: float | None = None,
    **settings: Any,
) -> None:
    """Train two models, a gradient in several batches; ``synced`` says that each is reduced."""
    ordinary, ours = sharded(order, **settings), sharded(order, **settings)
    optimizers = [factory(parameter) for parameter in ordinary.parameters()]
    accumulate = batches if synced else 1
    optimizer = optim_in_backward(ours, factory, accumulate=accumulate, max_norm=max_norm)
    if compiled:
        fresh_start()
        for model in (ordinary, ours):
            model.compile(backend="memeff", options=AOTAUTOGRAD)
    for _ in range(STEPS):
        for model in (ordinary, ours):
            for batch in range(batches):
                model.set_requires_gradient_sync(synced or batch == batches - 1)
                model(ids() + batch).backward()
        for parameter in ordinary.parameters():
            if max_norm is not None:
                nn.utils.clip_grad_norm_([parameter], max_norm)
        for each in (*optimizers, optimizer):
            each.step()
        for each in optimizers:
            each.zero_grad()
        assert_same(ours, ordinary)


def parameters_in_bf16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    same_training(mp_policy=policy)


def a_weight_is_updated_while_the_backward_runs() -> None:
    model = sharded()
    optim_in_backward(model, adamw)
    last = model.blocks[1].up.weight
    before, seen = compat.local_part(last).detach().clone(), list[bool]()
    model.watch = lambda grad: seen.append(torch.equal(compat.local_part(last), before))
    model(ids()).backward()
    assert seen == [False]


def states_come_back() -> None:
    first, second = sharded(), sharded()
    kept = optim_in_backward(first, adamw)
    first(ids()).backward()
    second.load_state_dict(first.state_dict())
    resumed = optim_in_backward(second, adamw)
    resumed.load_state_dict(copy.deepcopy(kept.state_dict()))  # loaded tensors are not copied
    for model in (first, second):
        model(ids()).backward()
    assert_same(second, first)


def states_come_back_from_a_checkpoint(folder: Path) -> None:
    """DCP has an optimizer make its states by a step with gradients of zero."""
    first, second = sharded(), sharded()
    kept, resumed = optim_in_backward(first, several), optim_in_backward(second, several)
    for _ in range(2):
        first(ids()).backward()
    dcp.save(dict(zip(PARTS, get_state_dict(first, kept), strict=True)), checkpoint_id=folder)
    state = dict(zip(PARTS, get_state_dict(second, resumed), strict=True))
    dcp.load(state, checkpoint_id=folder)
    model_state, optimizer_state = (state[part] for part in PARTS)
    set_state_dict(second, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for model, optimizer in ((first, kept), (second, resumed)):
        model(ids()).backward()
        optimizer.step()
    assert_same(second, first)


def what_cannot_be_served_is_said() -> None:
    def refused(model: nn.Module, said: str) -> None:
        with pytest.raises(MemeffError, match=said):
            optim_in_backward(model, adamw)

    refused(nn.Linear(2, 2), r"2 processes .* update weight .*fully_shard")
    gathered = sharded()
    gathered.unshard()
    refused(gathered, r"gathered at the moment.*reshard\(\)")
    refused(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "in host memory")

    mesh, replaced = init_device_mesh("cpu", (RANKS,)), Stacked()
    fully_shard(replaced, mesh=mesh)
    optimizer = optim_in_backward(replaced, adamw)
    replaced.load_state_dict({k: v.clone() for k, v in replaced.state_dict().items()}, assign=True)
    replaced(ids()).backward()
    with pytest.raises(MemeffError, match="of FSDP2 was replaced"):
        optimizer.step()


def a_block_without_a_gradient() -> None:
    """It is left alone, and updated when it has one."""
    ordinary, ours = sharded((1,)), sharded((1,))
    plain, optimizer = AdamW(ordinary.parameters(), lr=1e-2), optim_in_backward(ours, adamw)
    for order in ((1,), (0, 1)):
        for model, each in ((ordinary, plain), (ours, optimizer)):
            model.order = order
            model(ids()).backward()
            each.step()
        plain.zero_grad()
        assert_same(ours, ordinary)


CASES: dict[str, Callable[[], None]] = {
    "several optimizers": partial(same_training, several),
    "compiled": partial(same_training, compiled=True),
    "a block called twice": partial(same_training, order=(0, 0, 1, 0)),
    "accumulated without reducing": partial(same_training, batches=2),
    "accumulated, each reduced": partial(same_training, batches=2, synced=True),
    "accumulated, a block called twice": partial(
        same_training, batches=2, synced=True, order=(0, 1, 0)
    ),
    "clipped": partial(same_training, max_norm=0.02),
    "kept after the forward": partial(same_training, reshard_after_forward=False),
    "replicated, not sharded": partial(same_training, shape=(RANKS, 1)),
    "parameters in bf16": parameters_in_bf16,
    "while the backward runs": a_weight_is_updated_while_the_backward_runs,
    "a block without a gradient": a_block_without_a_gradient,
    "states": states_come_back,
    "refusals": what_cannot_be_served_is_said,
}


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_updates_of_shards(case: Callable[[], None], two_processes: TwoProcesses) -> None:
    two_processes.run(case)


@pytest.mark.xdist_group("two processes")
def test_states_come_back_from_a_checkpoint(two_processes: TwoProcesses, tmp_path: Path) -> None:
    two_processes.run(partial(states_come_back_from_a_checkpoint, tmp_path))
