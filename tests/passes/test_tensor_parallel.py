"""Heads split over ranks, in one process: a mesh of one rank has every layout; and the declines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import memeff_compile
from memeff_compile.kernels import linear_cross_entropy as op_folder
from memeff_compile.passes.losses import emit, shards
from memeff_compile.report import Record

N, D, V = 6, 8, 40
OPTIONS = {"memeff.inner": "aot_eager"}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh(dims: int = 1) -> Any:
    return init_device_mesh("cpu", (1,) * dims)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, D, generator=draw) for rows in (N, V))
    return hidden, weight, torch.randint(0, V, (N,), generator=draw)


def head(places: list[Any], hidden_places: list[Any]) -> tuple[DTensor, DTensor, Tensor]:
    hidden, weight, target = inputs()
    on = mesh(len(places))
    weight = distribute_tensor(weight, on, places).requires_grad_()
    return distribute_tensor(hidden, on, hidden_places).requires_grad_(), weight, target


def gathered(logits: DTensor) -> Tensor:
    everywhere = [Replicate()] * len(logits.placements)
    return logits.redistribute(placements=everywhere).to_local()


def loss_of(hidden: DTensor, weight: DTensor, target: Tensor) -> Tensor:
    return F.cross_entropy(gathered(F.linear(hidden, weight)), target)


def answered(function: Callable[..., Tensor], *given: Any) -> Record:
    """Compile, compare with eager, and return the one answer of the report."""
    memeff_compile.reset()
    expected = function(*given)
    found = torch.compile(function, backend="memeff", options=OPTIONS)(*given)
    torch.testing.assert_close(found, expected)
    (record,) = memeff_compile.last_report().records
    return record


@pytest.mark.parametrize("dims", [1, 2])
def test_classes_over_one_dimension_of_a_mesh_are_served(dims: int) -> None:
    others = [Replicate()] * (dims - 1)
    record = answered(loss_of, *head([*others, Shard(0)], [Replicate()] * dims))
    assert record.action == "rewrote", record
    assert (
        "memeff::linear_cross_entropy on 1 ranks, classes 0 to 39 of 40 here; 2 all-gathers of 2 "
        "numbers per row; engine reference"
    ) in record.sentence


LAYOUTS = {
    "rows of features": ([Shard(1)], [Shard(1)], "(Shard(dim=1),), not split by its classes"),
    "whole": ([Replicate()], [Replicate()], "(Replicate(),), not split by its classes"),
    "two dimensions": (
        *([Shard(0), Shard(0)], [Replicate(), Replicate()]),
        "(Shard(dim=0), Shard(dim=0)), not split by its classes over one dimension",
    ),
    "hidden states in parts": (
        *([Replicate(), Shard(0)], [Shard(0), Replicate()]),
        "Hidden states laid out as (Shard(dim=0), Replicate()) meet a head",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_are_declined_by_name(layout: tuple[list[Any], list[Any], str]) -> None:
    *places, said = layout
    record = answered(loss_of, *head(*places))
    assert record.code == "tensor_parallel_head"
    assert said.replace(",)", ")") in record.sentence
    assert "ColwiseParallel" in record.hint


def trained_offset(hidden: DTensor, weight: DTensor, target: Tensor) -> Tensor:
    offset = weight.to_local()[:, 0]
    return F.cross_entropy(gathered(F.linear(hidden, weight)) + offset, target)


def split_by_rows(hidden: DTensor, weight: DTensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).redistribute(placements=[Shard(0)])
    return F.cross_entropy(logits.to_local(), target)


def own_gradient(hidden: DTensor, weight: DTensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).redistribute(placements=[Replicate()])
    return F.cross_entropy(logits.to_local(grad_placements=[Partial()]), target)


def weight_from_the_graph(hidden: DTensor, weight: DTensor, target: Tensor) -> Tensor:
    return F.cross_entropy(gathered(F.linear(hidden, weight * 2)), target)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (trained_offset, "a vector with a gradient is added"),
        (split_by_rows, "laid out as (Shard(dim=0)) where `redistribute` is called"),
        (own_gradient, "where `to_local` is called, neither whole"),
        (weight_from_the_graph, "weight is made inside the graph"),
    ],
)
def test_other_uses_are_declined_by_name(function: Callable[..., Tensor], said: str) -> None:
    record = answered(function, *head([Shard(0)], [Replicate()]))
    assert record.code == "tensor_parallel_head"
    sentence = record.sentence.replace("`prim_", "`")  # as torch before 2.13 names these calls
    assert said in sentence[0].lower() + sentence[1:]


def test_more_ranks_than_classes_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_folder.Shard, "leaves_some_empty", True)
    record = answered(loss_of, *head([Shard(0)], [Replicate()]))
    assert record.code == "tensor_parallel_head"
    assert "leave ranks without any" in record.sentence


def test_an_error_while_editing_ends_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that went on with the graph as it was would be waited for by the others."""

    def fail(*_: object) -> None:
        raise RuntimeError("halfway")

    monkeypatch.setattr(emit.GroupEmitter, "result", fail)
    memeff_compile.reset()
    run = torch.compile(loss_of, backend="memeff", options=OPTIONS)
    said = "MemeffError: .* failed on this process .* RuntimeError: halfway"
    with pytest.raises(BackendCompilerFailed, match=said):
        run(*head([Shard(0)], [Replicate()]))


def test_moves_that_older_versions_of_torch_write_are_read() -> None:
    """These versions record a closure for each of them, which contains the arguments."""

    def prim_to_local(told: dict[str, Any]) -> Any:
        def function(x: DTensor) -> Tensor:
            return x.to_local(**told)

        function.__name__ = "prim_to_local"
        return function

    graph = torch.fx.Graph()
    hidden, weight, _ = head([Shard(0)], [Replicate()])
    logits = graph.placeholder("logits")
    logits.meta["example_value"] = gathered_one = F.linear(hidden, weight).redistribute(
        placements=[Replicate()]
    )
    for told, is_read in (({}, True), ({"grad_placements": [Partial()]}, False)):
        taken = graph.call_function(prim_to_local(told), (logits,))
        taken.meta["example_value"] = gathered_one.to_local()
        assert shards.moved(taken) is logits
        assert (shards.lost(taken) is None) == is_read
