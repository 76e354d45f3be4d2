"""fuse_embedding_gradient on tables split over two imitated ranks, of which this is the second.

Their process group is fake: a sum over ranks is this rank's value, so the gradient of its rows is
exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import memeff_compile
from memeff_compile.kernels.embedding import layout_of, parts_of
from memeff_compile.passes import fuse_embedding_gradient
from memeff_compile.report import Record

V, D, RANKS = 11, 4, 2  # of 11 rows the second rank has 6 to 10
OPTIONS = {"memeff.inner": "aot_eager"}
WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


@pytest.fixture(scope="module", autouse=True)
def second_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def any_table_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_embedding_gradient, "MIN_BYTES", 1)


def laid_out(places: list[Any], of_ids: list[Any], rows: int = V) -> tuple[DTensor, DTensor]:
    draw = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (1,) * (len(places) - 1) + (RANKS,))
    table = torch.randn(rows, D, generator=draw, dtype=torch.float64)
    ids = torch.randint(rows, (3, 4), generator=draw)
    ids[0] = rows - 1
    spread = DTensor.from_local(ids, mesh, of_ids, run_check=False)
    return spread, distribute_tensor(table, mesh, places).requires_grad_()


def weighed(rows: DTensor) -> Tensor:
    found = rows.redistribute(placements=[WHOLE] * len(rows.placements)).to_local()
    weights = torch.arange(found.numel(), dtype=found.dtype).view(found.shape)
    return (found * weights).sum()


def plain(ids: DTensor, table: DTensor) -> Tensor:
    return weighed(F.embedding(ids, table, padding_idx=9))


def answers(function: Callable[..., Any], *given: Any, **options: Any) -> list[Record]:
    torch._dynamo.reset()
    memeff_compile.reset()
    run = torch.compile(function, backend="memeff", options={**OPTIONS, **options})
    run(*given).backward()
    return list(memeff_compile.last_report().records)


def gradient_of_all_rows(ids: Tensor, rows: int, padding_idx: int) -> Tensor:
    weights = torch.arange(ids.numel() * D, dtype=torch.float64).view(-1, D)
    kept = ids.flatten() != padding_idx
    found = torch.zeros(rows, D, dtype=torch.float64)
    return found.index_add(0, ids.flatten()[kept], weights[kept])


@pytest.mark.parametrize("places", [[ROWS], [WHOLE, ROWS]], ids=["one dimension", "two"])
def test_rows_of_this_rank_have_their_gradient(places: list[Any]) -> None:
    ids, table = laid_out(places, [WHOLE] * len(places))
    (record,) = answers(plain, ids, table)
    assert (record.action, record.code) == ("rewrote", "rewrote")
    assert record.sentence.startswith(
        "Embedding on several ranks, rows 6 to 10 of 11 here, -> memeff::embedding, whose gradient is "
        "of these alone"
    )
    assert table.grad is not None
    assert table.grad.placements == table.placements
    expected = gradient_of_all_rows(ids.to_local(), V, 9)[6:]
    assert torch.equal(table.grad.to_local(), expected)
    assert record.sizes == {"N": 12, "V": V, "D": D, "V_r": 6, "B": record.sizes["B"]}
    # Op by op, of the dtype of the table; DTensor returns the gradient of all rows.
    assert str(record.bytes_before) == "8*D*V - 8*D*V_r"


def test_a_rank_without_rows_looks_up_zeros() -> None:
    ids, table = laid_out([ROWS], [WHOLE], rows=1)
    assert table.to_local().shape == (0, D)
    (record,) = answers(lambda i, t: weighed(F.embedding(i, t)), ids, table)
    assert "several ranks, none of 1 here" in record.sentence
    assert table.grad is not None
    assert table.grad.to_local().shape == (0, D)


def test_a_graph_of_nothing_but_dtensors_is_served() -> None:
    def rows(ids: DTensor, table: DTensor) -> Any:
        return F.embedding(ids, table).redistribute(placements=[WHOLE])

    ids, table = laid_out([ROWS], [WHOLE])
    (record,) = answers(lambda *given: rows(*given).sum(), ids, table)
    assert record.code == "rewrote"


@pytest.mark.skipif(torch.__version__ < "2.13", reason="there a product of parts is one of parts")
def test_what_reads_the_sum_of_ranks_is_given_it() -> None:
    """DTensor adds up parts before it computes with them."""
    (record,) = answers(lambda i, t: weighed(F.embedding(i, t).exp()), *laid_out([ROWS], [WHOLE]))
    (graph,) = memeff_compile.graphs()
    assert record.code == "rewrote"
    assert graph.after.count("added_up(") == 1


@pytest.mark.skipif(torch.__version__ < "2.13", reason="there a sum of parts is one of parts")
def test_what_reads_two_lookups_in_one_table_is_given_both_sums() -> None:
    def both(ids: DTensor, table: DTensor, places: DTensor) -> Tensor:
        return weighed(F.embedding(ids, table) + F.embedding(places, table))

    ids, table = laid_out([ROWS], [WHOLE], rows=15)
    places = DTensor.from_local(torch.arange(4) + 9, ids.device_mesh, [WHOLE], run_check=False)
    (record,) = answers(both, ids, table, places)
    (graph,) = memeff_compile.graphs()
    assert record.code == "rewrote"
    assert graph.after.count("added_up(") == graph.after.count("memeff.embedding(") == 2
    assert "aten.embedding(" not in graph.after
    weights = torch.arange(ids.numel() * D, dtype=torch.float64).view(*ids.shape, D)
    expected = gradient_of_all_rows(ids.to_local(), 15, -1)
    expected.index_add_(0, places.to_local(), weights.sum(0))
    assert table.grad is not None
    assert torch.equal(table.grad.to_local(), expected[8:])


SPREAD = {
    "columns": ([COLUMNS], [WHOLE], (Shard(2),), None),
    "whole": ([WHOLE], [WHOLE], (WHOLE,), None),
    "ids in parts": ([WHOLE], [Shard(1)], (Shard(1),), 0),
}


@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD)
def test_layouts_whose_ranks_have_whole_rows_or_columns(case: Any) -> None:
    places, of_ids, found, summed = case
    ids, table = laid_out(places, of_ids)
    assert layout_of(table, ids) == (found, summed, False)
    assert parts_of(table)[0] == 1
    # Run op by op, the result is the gradient itself.
    assert answers(plain, ids, table) == []


@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD)
def test_their_16_bit_tables_are_served_as_plain_ones(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_embedding_gradient, "_is_compiled", lambda info: True)
    places, of_ids, (place,), _ = case
    ids, table = laid_out(places, of_ids)
    table = table.detach().bfloat16().requires_grad_()
    (record,) = answers(plain, ids, table)
    assert (
        "embedding -> memeff::embedding, whose gradient has no fp32 copy" in record.sentence.lower()
    )
    assert record.sizes["D"] == (D // 2 if places == [COLUMNS] else D)
    assert table.grad is not None
    weights = torch.arange(ids.numel() * D, dtype=torch.bfloat16).view(*ids.shape, D)
    mine = weights.chunk(RANKS, place.dim)[1] if isinstance(place, Shard) else weights
    kept = ids.to_local() != 9
    expected = torch.zeros_like(table.grad.to_local())
    expected.index_add_(0, ids.to_local()[kept], mine[kept])
    assert torch.equal(table.grad.to_local(), expected)


def test_each_lookup_has_the_gradient_of_its_own_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other ranks' ids, too, or of this rank's alone, which are added to theirs."""
    monkeypatch.setattr(fuse_embedding_gradient, "_is_compiled", lambda info: True)
    ids, table = laid_out([WHOLE], [WHOLE])
    own = DTensor.from_local(ids.to_local(), ids.device_mesh, [Shard(0)], run_check=False)
    table = table.detach().bfloat16().requires_grad_()

    def both(ids: DTensor, own: DTensor, table: DTensor) -> Tensor:
        return weighed(F.embedding(ids, table)) + weighed(F.embedding(own, table))

    (record,) = answers(both, ids, own, table)
    assert record.code == "rewrote"
    (graph,) = memeff_compile.graphs()
    assert graph.after.count(", None)") == graph.after.count(", 0)") == 1


UNSERVED = {
    "ids like the table": ([ROWS], [Shard(0)], "(Shard(dim=0)) and the ids as (Shard(dim=0))"),
    "rows and columns": (
        *([COLUMNS, ROWS], [WHOLE, WHOLE]),
        "laid out as (Shard(dim=1), Shard(dim=0)) and the ids as (Replicate(), Replicate())",
    ),
}


@pytest.mark.parametrize("case", UNSERVED.values(), ids=UNSERVED)
def test_other_layouts_are_declined_by_name(case: Any) -> None:
    places, of_ids, said = case
    with contextlib.suppress(IndexError):  # of the data from the missing rank
        answers(plain, *laid_out(places, of_ids))
    (record,) = memeff_compile.last_report().records
    assert record.code == "tensor_parallel_embedding"
    assert said in record.sentence
    assert "RowwiseParallel" in record.hint


def test_what_reads_parts_of_a_sum_keeps_the_lookup() -> None:
    def reshaped(ids: DTensor, table: DTensor) -> Tensor:
        # The ids keep their two dimensions: after any other view DTensor forgets their shape.
        return weighed(F.embedding(ids, table).view(3, 4, 2, D // 2))

    answers(reshaped, *laid_out([ROWS], [WHOLE], rows=13))
    (record,) = memeff_compile.last_report().records
    assert record.code == "tensor_parallel_embedding"
    assert "`view` reads the rows of the embedding before ranks have added" in record.sentence
