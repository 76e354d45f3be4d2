"""Arguments of memeff::attention that replace a mask, against the mask: every cell must agree.

Masks are composed at random, captured, read and turned into arguments; the tables are written into
the graph as the pass writes them, the graph is run, and bounds and tables are put together again
cell by cell.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from memeff_compile import compat
from memeff_compile.compat import copy_graph
from memeff_compile.options import Options
from memeff_compile.passes.attention import mask_forms, mask_tables
from memeff_compile.passes.attention.mask_algebra import MASKED, TRUE
from memeff_compile.passes.attention.mask_forms import form_of
from memeff_compile.passes.attention.mask_reader import MaskReader
from memeff_compile.passes.attention.operands import Operand
from memeff_compile.passes.attention.sites import Site
from memeff_compile.passes.attention.told_to_op import Said, said_for
from memeff_compile.passes.graph.base import Decline
from memeff_compile.passes.graph.editor import Editor
from memeff_compile.passes.graph.graph_info import GraphInfo, ambient_region
from tests.support.captured_graphs import capture

from .test_mask_algebra import interpreted, random_mask, tables, traced

B, Q, K, D = 2, 5, 7, 4
Build = Callable[..., Tensor]


@dataclass(frozen=True)
class Recovered:
    """A mask as eager computes it, and as it was recovered; None where it was declined."""

    mask: Tensor
    said: Tensor | None
    may_be_empty: bool


def recovered(
    gm: GraphModule, inputs: Sequence[Tensor], operands: tuple[Node, Node] | None = None
) -> list[Recovered]:
    """Say every mask that a graph returns; its inputs end with queries and keys, or these."""
    info = GraphInfo(gm, Options(), ambient_region())
    reader = MaskReader(info)
    query, key = operands or info.placeholders[-2:]
    masks = list(gm.graph.output_node().args[0])
    editor = Editor(info)
    found: list[tuple[Any, Any, bool]] = []
    shape = (B, 1, Q, K)
    for node in masks:
        read = reader.mask(node, shape)
        form = None if read is None else form_of(read.formula, shape)
        said: Said | Decline | str | None = None
        if form is not None:
            operands = map(Operand, (query, key, key))
            said = said_for(info, Site(query, *operands, node), form, None)
        if form is None or not isinstance(said, Said):
            found.append((node, None, True))
            continue
        written = [None if t is None else t.written(editor) for t in _tables_of(said)]
        found.append((node, (said.ahead, said.behind, *written), form.empty))
    gm.graph.lint()
    gm.recompile()
    values = interpreted(gm, inputs)
    return [
        Recovered(
            _allowed(values[node]),
            None if told is None else _put_together(told[:2], [values.get(n) for n in told[2:]]),
            empty,
        )
        for node, told, empty in found
    ]


def _tables_of(said: Said) -> list[Any]:
    return [said.key_mask, *(said.ids or (None, None))]


def _allowed(mask: Tensor) -> Tensor:
    allowed = mask if mask.dtype == torch.bool else mask > MASKED
    return allowed.expand(B, 1, Q, K)[:, 0]


def _put_together(bounds: Sequence[Any], written: Sequence[Tensor | None]) -> Tensor:
    """Return bool (B, Q, K) as the op is specified."""
    (ahead, behind), (key_mask, query_ids, key_ids) = bounds, written
    q, k = torch.arange(Q)[:, None], torch.arange(K)[None, :]
    mask = torch.ones(B, Q, K, dtype=torch.bool)
    if ahead is not None:
        mask &= k <= q + ahead
    if behind is not None:
        mask &= k >= q - behind
    if key_mask is not None:
        assert key_mask.dtype == torch.bool
        assert key_mask.shape in ((1, K), (B, K))
        mask &= key_mask[:, None, :]
    if query_ids is not None and key_ids is not None:
        assert query_ids.dtype == key_ids.dtype == torch.int64
        assert query_ids.shape in ((1, Q), (B, Q))
        assert key_ids.shape in ((1, K), (B, K))
        mask &= query_ids[:, :, None] == key_ids[:, None, :]
    return mask


def operands() -> tuple[Tensor, Tensor]:
    return torch.zeros(B, 1, Q, D), torch.zeros(B, 1, K, D)


def said_of(build: Build, *given: Tensor) -> Recovered:
    """Capture one function with Dynamo and say its mask."""
    inputs = (*given, *operands())
    gm = capture(
        lambda *all_inputs: (build(*all_inputs[:-2]), *(t * 1 for t in all_inputs[-2:])), *inputs
    )
    by_shape = {tuple(i.shape): i for i in inputs}
    assert len(by_shape) >= len(inputs) - 1  # queries and keys are alike
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    output = gm.graph.output_node()
    mask, query, key = output.args[0]
    output.args = ((mask,),)
    values = [by_shape[tuple(compat.example_value(n).shape)] for n in placeholders]
    (result,) = recovered(gm, values, (query, key))
    if result.said is not None:
        assert torch.equal(result.said, result.mask)
    return result


# --- random masks ---------------------------------------------------------------------------------


def sayable_mask(seed: int) -> Build:
    """Return a function that joins conditions of which most can be said."""
    chance = random.Random(seed)
    kinds = [chance.randrange(12) for _ in range(chance.randrange(1, 5))]
    drawn = [(chance.randrange(7) - 2, chance.randrange(1, 8)) for _ in kinds]
    spelling = chance.randrange(4)

    def build(flags: Tensor, sequences: Tensor) -> Tensor:
        q, k = torch.arange(Q)[None, None, :, None], torch.arange(K)[None, None, None, :]
        rows = torch.arange(B)[:, None, None, None]
        atoms: list[Callable[[int, int], Tensor]] = [
            lambda a, b: k <= q + a,
            lambda a, b: k > q - b,
            lambda a, b: torch.abs(q - k) <= b,
            lambda a, b: flags[rows, k],
            lambda a, b: ~flags[:, None, None, :],
            lambda a, b: sequences[rows, q] == sequences[rows, k],
            lambda a, b: q // b == k // b,
            lambda a, b: k < b,
            lambda a, b: k < sequences[:, :1].sum(-1)[:, None, None, None] + a,
            lambda a, b: flags[rows, q + 1] | (q == a),
            lambda a, b: flags[rows, k] | (k < b),
            lambda a, b: (sequences[rows, k] + a) * 1 == sequences[rows, q] - b + 2,
        ]
        mask = torch.ones(B, 1, Q, K, dtype=torch.bool)
        for kind, (a, b) in zip(kinds, drawn, strict=True):
            mask = mask & atoms[kind](a, b)
        if spelling == 0:
            return torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        if spelling == 1:
            return torch.zeros(B, 1, Q, K).masked_fill(~mask, float("-inf"))
        return mask

    return build


def graph_of(seeds: Sequence[int], build: Callable[[int], Build]) -> GraphModule:
    masks = [build(seed) for seed in seeds]
    inputs = (*tables(), *operands())
    return traced(lambda f, s, q, k: tuple(mask(f, s) for mask in masks), *inputs).gm


def check(gm: GraphModule) -> list[Recovered]:
    """Say the masks of a graph, which stays as it is, and compare every cell."""
    results = recovered(GraphModule(gm, copy_graph(gm)), (*tables(), *operands()))
    for number, result in enumerate(results):
        if result.said is not None:
            assert torch.equal(result.said, result.mask), number
        if not result.may_be_empty:
            assert bool(result.mask.any(-1).all()), f"{number}: a query without keys"
    return results


@pytest.fixture(scope="module")
def sayable() -> GraphModule:
    return graph_of(range(40), sayable_mask)


def test_what_is_said_of_random_masks_is_the_mask_in_every_cell(sayable: GraphModule) -> None:
    """And most masks that are made of sayable conditions are said."""
    results = check(sayable)
    assert sum(result.said is not None for result in results) >= 25
    assert any(result.may_be_empty for result in results)
    assert any(not result.may_be_empty for result in results)


def test_what_is_said_of_any_random_mask_is_the_mask_in_every_cell() -> None:
    results = check(graph_of(range(2000, 2020), random_mask))
    assert any(result.said is not None for result in results)


@pytest.mark.slow
def test_what_is_said_of_many_random_masks_is_the_mask_in_every_cell() -> None:
    for start in range(3000, 4000, 50):
        check(graph_of(range(start, start + 50), sayable_mask))
        check(graph_of(range(start, start + 50), random_mask))


# --- masks of models ------------------------------------------------------------------------------


def packed(*, by_position: bool, window: int | None = None) -> Build:
    """As transformers spells packed sequences: with places or with positions compared."""

    def build(positions: Tensor) -> Tensor:
        first = positions[:, :1] - 1
        ids = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
        rows = torch.arange(B)[:, None, None, None]
        q, k = torch.arange(Q)[None, None, :, None], torch.arange(Q)[None, None, None, :]
        same = ids[rows, q] == ids[rows, k]
        left, right = (positions[rows, k], positions[rows, q]) if by_position else (k, q)
        mask = same & (left <= right)
        if window is not None:
            mask = mask & (left > right - window)
        return torch.nn.functional.pad(mask, (0, K - Q)) if K < Q else mask

    return build


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("by_position", [False, True], ids=["places", "positions"])
def test_packed_sequences_are_bounds_and_ids(
    by_position: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no query is without keys: its own place is in its own sequence."""
    monkeypatch.setattr(f"{__name__}.K", Q)
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 7, 8]])
    result = said_of(packed(by_position=by_position, window=window), positions)
    assert result.said is not None
    assert not result.may_be_empty


def _ordered(positions: Tensor) -> Tensor:
    rows = torch.arange(B)[:, None, None, None]
    q, k = torch.arange(Q)[None, None, :, None], torch.arange(Q)[None, None, None, :]
    return positions[rows, k] <= positions[rows, q]


def _other_breaks(positions: Tensor) -> Tensor:
    ids = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 2).cumsum(-1)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & _ordered(positions)


@pytest.mark.parametrize("build", [_ordered, _other_breaks], ids=["no ids", "other breaks"])
def test_positions_without_their_ids_are_not_places(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.K", Q)
    positions = torch.tensor([[0, 2, 4, 0, 1], [3, 4, 0, 7, 8]])
    assert said_of(build, positions).said is None


CASES: dict[str, tuple[Build, bool]] = {
    "padding of integers": (
        lambda f, s: (s[:, :K] != 0)[:, None, None, :].expand(B, 1, Q, K),
        True,
    ),
    "left out of two tables": (
        lambda f, s: f[:, None, None, :] & (s[:, None, None, :K] > 0) & torch.ones(Q, 1).bool(),
        True,
    ),
    "one row for all": (lambda f, s: f[0].expand(Q, K), True),
    "padding of queries and keys": (
        lambda f, s: f[:, None, :Q, None] & f[:, None, None, :],
        True,
    ),
    "chunks": (
        lambda f, s: (torch.arange(Q)[:, None] // 3 == torch.arange(K) // 3).expand(B, 1, Q, K),
        True,
    ),
    "chunks behind left padding": (
        lambda f, s: (
            (torch.arange(Q)[None, None, :, None] - s[:, :1, None, None]) // 2
            == (torch.arange(K) - s[:, :1, None, None]) // 2
        ),
        True,
    ),
    "a window to both sides": (
        lambda f, s: ((torch.arange(Q)[:, None] - torch.arange(K)).abs() < 3).expand(B, 1, Q, K),
        False,
    ),
    "filled length": (
        lambda f, s: (torch.arange(K) < s.sum()).expand(B, 1, Q, K),
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_of_models_are_said(name: str) -> None:
    build, may_be_empty = CASES[name]
    result = said_of(build, *tables())
    assert result.said is not None
    assert result.may_be_empty == may_be_empty


UNSAID: dict[str, Build] = {
    "prefix": lambda f, s: (
        (torch.arange(K) <= torch.arange(Q)[:, None]) | (torch.arange(K) < 2)
    ).expand(B, 1, Q, K),
    "ids twice": lambda f, s: (
        (s[:, None, :Q, None] == s[:, None, None, :K])
        & (torch.arange(Q)[:, None] // 3 == torch.arange(K) // 3)
    ),
    "ids that are more": lambda f, s: s[:, None, :Q, None] >= s[:, None, None, :K],
    "a query's own number of keys": lambda f, s: (
        torch.arange(K) <= torch.arange(Q)[:, None] + s[:, :1, None, None]
    ),
    "a dense table": lambda f, s: (
        (f[:, None, None, :].float() @ torch.ones(K, Q * K)).view(B, 1, Q, K) > 3
    ),
    "written meanwhile": lambda f, s: _written(f),
}


def _written(flags: Tensor) -> Tensor:
    table = flags.clone()
    before = table[:, None, None, :] & torch.ones(Q, 1).bool()
    table.logical_not_()
    return before & table[:, None, None, :]


@pytest.mark.parametrize("name", UNSAID)
def test_what_cannot_be_said_is_not(name: str) -> None:
    assert said_of(UNSAID[name], *tables()).said is None


# --- wrong rules are found ------------------------------------------------------------------------


def _shifted(form: Any, rank: int) -> Any:
    counted = mask_forms.algebra.both(*form.tables)
    return TRUE if form.keys is not None else counted


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "a number of keys left out": (mask_forms, "key_table", _shifted),
    "ids without their constant": (
        mask_forms,
        "_ids",
        lambda total, q, k: mask_forms.Ids(
            *(mask_forms.Linear(0, dict(s.terms)) for s in _split(total, q, k))
        ),
    ),
    "sums without their numbers": (
        mask_tables._Writer,
        "sum",
        lambda self, total: _sum(self, mask_forms.Linear(0, dict(total.terms))),
    ),
    "some read as all": (
        mask_tables._Writer,
        "_joined",
        lambda self, op, parts: _joined(self, torch.ops.aten.logical_and.default, parts),
    ),
}
_sum, _joined, _ids = mask_tables._Writer.sum, mask_tables._Writer._joined, mask_forms._ids


def _split(total: Any, query: Any, key: Any) -> tuple[Any, Any]:
    found = _ids(total, query, key)
    assert found is not None
    return found.query, found.key


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_way_to_say_it_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, sayable: GraphModule
) -> None:
    owner, attribute, wrong = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    if owner is mask_forms and attribute == "key_table":
        monkeypatch.setattr("memeff_compile.passes.attention.told_to_op.key_table", wrong)
    with pytest.raises(AssertionError):
        check(sayable)
