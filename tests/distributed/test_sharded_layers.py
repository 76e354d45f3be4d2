"""Layers that FSDP2 shards inside checkpoints: said to be left out, or compiled one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.backend import sharded_layers
from memeff_compile.passes.graph import last_product
from tests.distributed.models import (
    OPTIONS,
    VOCABULARY,
    Block,
    assert_same_gradients,
    fresh_start,
    gradients,
    ids,
)
from tests.distributed.processes import RANKS, TwoProcesses
from tests.distributed.test_tensor_parallel import seen_by_the_inner_compiler

LAYERS, WIDTH = 3, 16


class Around(Block):
    """Checkpointed around its hooks, as transformers' layers were before 5.23."""

    gradient_checkpointing = True

    def __call__(self, x: Tensor) -> Any:
        if not (self.gradient_checkpointing and self.training):
            return super().__call__(x)
        return checkpoint(partial(super().__call__), x, use_reentrant=False)


class Inside(Block):
    """Checkpointed inside its hooks."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Trunk(nn.Module):
    """A loop in a separate function: if Dynamo skips a loop, it skips the whole function."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(kind(WIDTH) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = Trunk(kind)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.trunk(ids)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.roll(-1).flatten())


def sharded(kind: type[Block]) -> Model:
    mesh, model = init_device_mesh("cpu", (RANKS,)), Model(kind)
    for layer in model.trunk.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fresh_start()
    return model


def left_out() -> list[Any]:
    records = memeff_compile.last_report().records
    assert {r.code for r in records} & {"rewrote", "switched_off"}
    return [record for record in records if record.code == "layers_left_out"]


def expected() -> dict[str, Tensor]:
    model = sharded(Around)
    model(ids()).backward()
    return gradients(model)


def as_a_whole() -> None:
    """Layers that no graph of the model could contain are compiled with it, one by one."""
    model = sharded(Around)
    with seen_by_the_inner_compiler() as graphs:
        run = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
        for _ in range(2):
            model.zero_grad()
            run(ids()).backward()
    assert not left_out()
    (record,) = [r for r in memeff_compile.last_report().records if r.code == "layers_compiled"]
    assert record.sites == LAYERS
    products = [str(n.target) for graph in graphs for n in graph.nodes if "addmm" in str(n.target)]
    assert len(products) == 2, products  # of one graph that all layers share
    assert_same_gradients(gradients(model), expected())


def without_the_last_product() -> None:
    """The checkpoint around a layer's hooks ends in front of its last product, after which no hook
    of FSDP2 runs: gradients are reduced all the same, and weights are freed.
    """
    model = sharded(Around)
    with pytest.MonkeyPatch.context() as patch, seen_by_the_inner_compiler() as graphs:
        patch.setitem(last_product.SHORTEST, "cpu", 0.0)
        run = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
        for _ in range(2):
            model.zero_grad()
            run(ids()).backward()
    assert "last_product_apart" in {r.code for r in memeff_compile.last_report().records}
    products = [str(n.target) for graph in graphs for n in graph.nodes if "addmm" in str(n.target)]
    assert len(products) == 1, products
    assert_same_gradients(gradients(model), expected())
    assert all(isinstance(each, DTensor) for each in model.trunk.layers.parameters())


def as_a_whole_switched_off() -> None:
    """The report has their number, class and the way out; layers inside their hooks are not
    listed.
    """
    off = {**OPTIONS, "memeff.preset": "off"}
    torch.compile(sharded(Around), backend="memeff", options=off)(ids())
    (record,) = left_out()
    assert record.sentence.startswith(f"{LAYERS} Around run op by op")
    assert record.sites == LAYERS
    assert "memeff_compile.compile(model)" in record.hint
    torch.compile(sharded(Inside), backend="memeff", options=off)(ids())
    assert not left_out()
    model = sharded(Around)
    for layer in model.trunk.layers:
        layer.compile(backend="eager")  # by someone else
    torch.compile(model, backend="memeff", options=off)(ids())
    assert not left_out()


def by_the_verb() -> None:
    """Their products are in a graph, each step again, and no layer is reported as left out."""
    model = sharded(Around)
    with seen_by_the_inner_compiler() as graphs:
        run = memeff_compile.compile(model, inner="aot_eager")
        for _ in range(2):
            model.zero_grad()
            run(ids()).backward()
    assert not left_out()
    products = [str(n.target) for graph in graphs for n in graph.nodes if "addmm" in str(n.target)]
    assert len(products) == 2, products  # of one graph that all layers share
    assert_same_gradients(gradients(model), expected())
    assert set(model.state_dict()) == set(Model(Around).state_dict())


def what_the_verb_leaves() -> None:
    """Layers without checkpoints, or with one inside their hooks, are in graphs of the whole
    model.
    """
    model = sharded(Around)
    for layer in model.trunk.layers:
        layer.gradient_checkpointing = False
    assert sharded_layers.compile_layers(model, {"backend": "eager"}) == 0
    assert sharded_layers.compile_layers(sharded(Inside), {"backend": "eager"}) == 0
    assert sharded_layers.compile_layers(Model(Around), {"backend": "eager"}) == 0
    model = sharded(Around)
    assert sharded_layers.compile_layers(model, {"backend": "eager"}) == LAYERS
    assert sharded_layers.compile_layers(model, {"backend": "eager"}) == 0, "they are compiled"


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(
    "case",
    [
        as_a_whole,
        without_the_last_product,
        as_a_whole_switched_off,
        by_the_verb,
        what_the_verb_leaves,
    ],
)
def test_layers_in_checkpoints(
    case: Callable[[], None], two_processes: TwoProcesses, inner: str
) -> None:
    two_processes.run(case, inner=inner)
