"""The work of test_sharded on compressed FSDP2 models: each process codes its shard; values
stay.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memeff_compile import compat
from memeff_compile.errors import CodedWeightError
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights.compress import compress_, decompress_
from memeff_compile.model.weights.compressed_file import save_compressed
from tests.distributed.processes import RANKS


class Adapted(nn.Module):
    """Two frozen linears with a trained one between them."""

    def __init__(self, rows: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(256, rows, bias=False).bfloat16().requires_grad_(False)
        self.between = nn.Linear(rows, rows).bfloat16()
        self.down = nn.Linear(rows, 256).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.down(torch.relu(self.between(self.up(x))))
        assert isinstance(found, Tensor)
        return found


def sharded(rows: int = 256, **settings: Any) -> Adapted:
    model = Adapted(rows)
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


def trained_once(model: Adapted) -> list[Tensor]:
    x = torch.linspace(-1, 1, 4 * 256).view(4, 256).bfloat16().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.float().square().sum().backward()
    model.reshard()
    assert x.grad is not None
    assert model.between.weight.grad is not None
    return [out.detach(), x.grad, compat.local_part(model.between.weight.grad)]


def shards(model: Adapted) -> list[Tensor]:
    return [compat.local_part(model.up.weight), compat.local_part(model.down.weight)]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def frozen_weights_are_coded_and_the_model_computes_the_same(*, runs_first: bool) -> None:
    plain, model = sharded(), sharded()
    if runs_first:
        trained_once(model)
    report = compress_(model, min_size=0, progress=False)
    assert [each.name for each in report.compressed] == ["up.weight", "down.weight"]
    assert [each.shape for each in report.compressed] == [(128, 256)] * 2
    assert "freeze it" in report.left_dense[0].reason
    assert all(isinstance(shard, CodedWeight) for shard in shards(model))
    for _ in range(2):
        assert_same(trained_once(model), trained_once(plain))
    assert all(isinstance(shard, CodedWeight) for shard in shards(model)), "still, after a step"
    again = compress_(model, min_size=0, progress=False)
    assert not again.compressed
    assert "compressed already" in again.compressed_before[0].reason


def no_dense_copy_of_a_shard_is_kept() -> None:
    model = sharded()
    compress_(model, min_size=0, progress=False)
    trained_once(model)
    param = compat.distributed._find_fsdp2_shard(model.up.weight)
    assert isinstance(param._sharded_param_data, CodedWeight)
    assert param._sharded_param_data.parts[1] is shards(model)[0].parts[1]
    assert all(output.untyped_storage().size() == 0 for output in param.all_gather_outputs)


def state_dicts_are_dense_and_interchangeable() -> None:
    plain, model = sharded(), sharded()
    compress_(model, min_size=0, progress=False)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert type(compat.local_part(state[name])) is Tensor
        assert torch.equal(state[name].full_tensor(), value.full_tensor())
    other = {name: value * 2 for name, value in plain.state_dict().items()}
    for each in (plain, model):
        each.load_state_dict(copy.deepcopy(other))
    assert all(isinstance(shard, CodedWeight) for shard in shards(model))
    assert_same(trained_once(model), trained_once(plain))


def decompressing_gives_dense_shards() -> None:
    plain, model = sharded(), sharded()
    compress_(model, min_size=0, progress=False)
    assert decompress_(model) == 2
    assert all(type(shard) is Tensor for shard in shards(model))
    assert_same(trained_once(model), trained_once(plain))


def values_are_gathered_in_the_dtype_of_the_policy() -> None:
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)}
    plain, model = sharded(**settings), sharded(**settings)
    compress_(model, min_size=0, progress=False)
    assert_same(trained_once(model), trained_once(plain))


def what_cannot_be_coded_is_said() -> None:
    uneven = compress_(sharded(255), min_size=0, progress=False)
    reasons = {each.name: each.reason for each in uneven.left_dense}
    assert "equal shards" in reasons["up.weight"]
    assert [each.name for each in uneven.compressed] == ["down.weight"]

    small = compress_(sharded(), min_size=256 * 256, progress=False)
    assert "its shard has 32768 elements" in small.left_dense[0].reason

    gathered = sharded()
    gathered.up.unshard()
    reasons = {e.name: e.reason for e in compress_(gathered, min_size=0, progress=False).left_dense}
    assert "call reshard()" in reasons["up.weight"]

    model = sharded()
    compress_(model, min_size=0, progress=False)
    with pytest.raises(CodedWeightError, match=r"torch\.distributed\.checkpoint"):
        save_compressed(model, "nowhere")
    with pytest.raises(CodedWeightError, match="optim_in_backward"), torch.no_grad():
        model.up.weight.add_(1)


def compressed_shards() -> None:
    frozen_weights_are_coded_and_the_model_computes_the_same(runs_first=False)
    frozen_weights_are_coded_and_the_model_computes_the_same(runs_first=True)
    no_dense_copy_of_a_shard_is_kept()
    state_dicts_are_dense_and_interchangeable()
    decompressing_gives_dense_shards()
    values_are_gathered_in_the_dtype_of_the_policy()
    what_cannot_be_coded_is_said()
