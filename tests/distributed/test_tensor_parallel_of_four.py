"""Heads and models split over four processes, and over two combined with FSDP2 over two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memeff_compile
from memeff_compile.errors import ExplainError, ShardedLogitsError, StaleLogitsError
from memeff_compile.passes import fuse_embedding_gradient
from tests.distributed.models import OPTIONS, assert_same_gradients, fresh_start, gradients, ids
from tests.distributed.processes import TwoProcesses
from tests.distributed.test_cut_models import (
    by_torch,
    by_transformers,
    case_name,
    decoding_by_the_verb,
    records,
    whole,
)
from tests.distributed.test_plan import a_step_under_fsdp2, cut, llama, planned
from tests.distributed.test_tensor_parallel import (
    Case,
    Model,
    Returning,
    codes,
    data,
    seen_by_the_inner_compiler,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("four processes")]


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    four = TwoProcesses(tmp_path_factory, 4)
    yield four
    four.stop()


@cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "classes"))


@cache
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def split(model: Model, mesh: DeviceMesh) -> Any:
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


def compiled(model: nn.Module, **how: Any) -> Any:
    fresh_start()
    return torch.compile(model, backend="memeff", options=OPTIONS, **how)


def over_four_ranks() -> None:
    for case in (
        Case(vocabulary=161, bias=True, softcap=3.0, dtype=torch.float64),
        Case(vocabulary=160, smoothing=0.1, z_loss=1e-2, entropy=True, dtype=torch.float64),
        Case(vocabulary=33, targets="half"),
        Case(vocabulary=161, targets="low", hidden_classes=120),
    ):
        one, many = Model(case), split(Model(case), line())
        expected, loss = one(*data(case)), compiled(many)(*data(case))
        assert codes() == ["rewrote"], memeff_compile.last_report()
        for each in (expected, loss):
            each.backward()
        tolerance = 1e-12 if case.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(loss, expected, rtol=max(tolerance / 10, 1e-12), atol=0)
        assert_same_gradients(gradients(many), gradients(one), tolerance)


def of_rank(case: Case, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Other lengths and other numbers of tokens that count for each data-parallel rank."""
    ids, target = data(case, (12, 9)[rank] - step)
    if rank == 1:
        target[:, step:] = -100  # at first no token of it counts
    return ids, target


def beside_fsdp(dynamic: bool) -> None:
    """Four steps: gradients are those of one process that has seen the data of both."""
    case = Case(reduction="sum")
    one, many = Model(case), split(Model(case), square()["classes"])
    fully_shard(many, mesh=square()["data"])
    run = compiled(many, dynamic=dynamic or None)
    models = (one, many)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1).step for each in models]
    for step in range(4):
        both = [of_rank(case, rank, step) for rank in range(2)]
        total = sum(int((target != -100).sum()) for _, target in both)
        expected = sum(one(*each) for each in both) / total
        loss = run(*both[square().get_local_rank("data")]) / total
        (expected / 2).backward()  # FSDP takes the mean
        loss.backward()
        found = loss.detach().clone()
        dist.all_reduce(found)
        torch.testing.assert_close(found / 2, expected.detach(), rtol=1e-6, atol=0)
        assert_same_gradients(gradients(many), gradients(one))
        for each, update in zip(models, steps, strict=True):
            update()
            each.zero_grad()
    assert set(codes()) == {"rewrote"}, memeff_compile.last_report()


def static_beside_fsdp() -> None:
    beside_fsdp(dynamic=False)


def dynamic_beside_fsdp() -> None:
    beside_fsdp(dynamic=True)


def logits_beside_fsdp() -> None:
    case = Case(bias=True)
    one, many = Returning(case), split(Returning(case), square()["classes"])
    fully_shard(many, mesh=square()["data"])
    run = compiled(many)
    (expected, kept), (loss, logits) = one(*data(case)), run(*data(case))
    assert set(codes()) == {"rewrote", "logits_deferred"}, memeff_compile.last_report()
    with pytest.raises(ShardedLogitsError):
        logits.argmax(-1)
    torch.testing.assert_close(logits[:, -1].full_tensor(), kept[:, -1])
    for each in (expected, loss):
        each.backward()
    assert_same_gradients(gradients(many), gradients(one))
    with pytest.raises(StaleLogitsError):
        logits.full_tensor()


def tokens(rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(3, 150, (rows, 12), generator=torch.Generator().manual_seed(seed))


def a_step_of_a_whole_model() -> None:
    """One sum of N x D numbers per row-split linear each way, and no larger one."""
    one, many = whole().train(), by_torch(whole()).train()
    given = tokens()
    with seen_by_the_inner_compiler() as graphs:
        found = compiled(many)(input_ids=given, labels=given)
        found.loss.backward()
    expected = one(input_ids=given, labels=given)
    expected.loss.backward()
    assert ("fuse_linear_cross_entropy", "rewrote") in records()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients(many), gradients(one))
    torch.testing.assert_close(found.logits.full_tensor(), expected.logits)

    rows, width = given.numel(), one.config.hidden_size
    moved = [
        (str(node.target).split(".")[1], node.meta["val"].numel())
        for graph in graphs
        for node in graph.nodes
        if str(node.target).startswith("_c10d_functional.") and "wait" not in str(node.target)
    ]
    assert max(size for _, size in moved) == rows * width
    assert sorted(size for name, size in moved if name == "all_gather_into_tensor") == [4, 4]
    assert Counter(moved)["all_reduce", rows * width] == len(moved) - 2


def a_step_of_a_whole_model_beside_fsdp() -> None:
    """Layers and root are sharded over two, each split over two ranks.

    The embedding is whole: in a separate graph torch fails on a split one (`Mixing fake modes`).
    """
    one = whole().train()
    many = by_torch(whole(), square()["classes"], looks_up_parts=False).train()
    for layer in many.model.layers:
        fully_shard(layer, mesh=square()["data"])
    fully_shard(many, mesh=square()["data"])
    run, place = compiled(many), square().get_local_rank("data")
    for step in range(2):
        both = [tokens(2 + step, 2 * step + rank) for rank in range(2)]
        losses = [one(input_ids=given, labels=given).loss for given in both]
        (sum(losses) / 2).backward()
        loss = run(input_ids=both[place], labels=both[place]).loss
        loss.backward()
        torch.testing.assert_close(loss, losses[place], rtol=1e-6, atol=0)
        assert_same_gradients(gradients(many), gradients(one))
    assert ("fuse_linear_cross_entropy", "rewrote") in records()


def cut_embeddings_beside_fsdp() -> None:
    """Their gradients are of a quarter of the rows, tied to the head or not."""
    for tied in (False, True):
        case = Case(reduction="sum")
        one, many = Model(case), Model(case)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(many, square()["classes"], plan)
        for each in (one, many) if tied else ():
            each.head.weight = each.embed.weight
        fully_shard(many, mesh=square()["data"])
        with mock.patch.object(fuse_embedding_gradient, "MIN_BYTES", 1):
            run = compiled(many)
            for step in range(2):
                both = [of_rank(case, rank, step) for rank in range(2)]
                (sum(one(*each) for each in both) / 2).backward()  # FSDP takes the mean
                run(*both[square().get_local_rank("data")]).backward()
                assert_same_gradients(gradients(many), gradients(one))
        assert ("fuse_embedding_gradient", "rewrote") in records()
        (*_, record) = memeff_compile.last_report().records
        assert ("embedding_tied" in record.sentence) == tied


class Types(nn.Module):
    """A table of few rows and, after it, the head."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(rows, 16), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()  # type: ignore[no-any-return]


def a_rank_without_rows() -> None:
    one, many = Types(5), Types(5)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(many, line(), plan)
    given = torch.tensor([[0, 4, 4], [2, 1, 4]])
    with mock.patch.object(fuse_embedding_gradient, "MIN_BYTES", 1):
        found = compiled(many)(given)
        found.backward()
    assert ("fuse_embedding_gradient", "rewrote") in records()
    expected = one(given)
    expected.backward()
    torch.testing.assert_close(found, expected)
    assert_same_gradients(gradients(many), gradients(one))


def a_plan_of_a_model_that_is_cut_and_sharded() -> None:
    model, given = cut(llama(), square()["classes"]), {"input_ids": ids(), "labels": ids()}
    found = memeff_compile.explain(model, **given, device="cpu")
    a_step_under_fsdp2(planned(found, "fsdp"), model, square()["data"])
    with pytest.raises(ExplainError, match="sharded by FSDP2 already"):
        memeff_compile.explain(model, **given, device="cpu")


CASES: list[Any] = [
    a_plan_of_a_model_that_is_cut_and_sharded,
    *(over_four_ranks, static_beside_fsdp, dynamic_beside_fsdp, logits_beside_fsdp),
    *(a_step_of_a_whole_model, a_step_of_a_whole_model_beside_fsdp),
    *(cut_embeddings_beside_fsdp, a_rank_without_rows),
    partial(decoding_by_the_verb, by_torch, 4),
    partial(decoding_by_the_verb, by_transformers, 4),
]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_heads_split_over_four(case: Callable[[], None], four_processes: TwoProcesses) -> None:
    four_processes.run(case)
