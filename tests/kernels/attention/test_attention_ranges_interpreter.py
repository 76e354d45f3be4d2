"""The ranges that the Gluon kernels of attention read, computed by Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from memeff_compile.kernels._triton.key_tiles import tiles_of
from memeff_compile.kernels.attention import ranges, tiles
from memeff_compile.kernels.attention.call import Call
from tests.kernels.attention.test_attention_interpreter import conditions
from tests.support.dense_attention import Case, compose, draw

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

OWN, OTHERS = 32, 32


def check_joint_ids(
    call: Call, joint_ids: torch.Tensor, own: int, *, ours_are_queries: bool
) -> None:
    """Check that the joint ids of a query and a key are equal if, and only if, neither the mask nor
    the ids hide the key.

    Positions after the last query and after the last key equal no other position.
    """
    queries, keys, given = call.sizes[3], call.sizes[4], call.given
    of_queries, of_keys = joint_ids[:, :own], joint_ids[:, own:]
    if not ours_are_queries:
        of_queries, of_keys = of_keys, of_queries
    wanted = torch.zeros(len(joint_ids), of_queries.shape[1], of_keys.shape[1], dtype=torch.bool)
    unbounded = dataclasses.replace(given, ahead=None, behind=None)
    wanted[:, :queries, :keys] = unbounded.counts(0, queries, 0, keys, call.q.device)
    assert torch.equal(of_queries[:, :, None] == of_keys[:, None, :], wanted)


def check(call: Call, *, ours_are_queries: bool) -> torch.Tensor:
    """Compare the result with the visible pairs, and return whether each tile has gaps."""
    batch, _, _, queries, keys, _ = call.sizes
    counts = call.given.counts(0, queries, 0, keys, call.q.device).expand(batch, -1, -1)
    shown = torch.ones(batch, keys, dtype=torch.bool)
    if call.given.key_mask is not None:
        shown = call.given.key_mask.expand(batch, -1)
    if not ours_are_queries:
        counts, shown = counts.transpose(1, 2), torch.ones(batch, queries, dtype=torch.bool)
    length, others = counts.shape[1:]
    number = tiles_of(length, OWN)
    found = ranges.find(call, OWN, OTHERS, ours_are_queries=ours_are_queries)
    table = found[: batch * number * ranges.FIELDS].view(batch, number, ranges.FIELDS)
    visited = tiles_of(others, OTHERS) * OTHERS
    size = 3 * number * OWN + visited
    rest = found[table.numel() :][: batch * size].view(batch, size)
    span = rest[:, : 2 * number * OWN].view(batch, 2, number * OWN)
    check_joint_ids(
        call, rest[:, 2 * number * OWN :], number * OWN, ours_are_queries=ours_are_queries
    )
    low = torch.where(counts, torch.arange(others), others).amin(-1)
    high = torch.where(counts, torch.arange(others), -1).amax(-1)
    has_any = counts.any(-1)
    assert torch.equal(span[:, 0, :length][has_any].long(), low[has_any])
    assert torch.equal(span[:, 1, :length].long(), high)
    assert bool((span[:, 0, :length] > span[:, 1, :length])[~has_any].all())
    has_gaps = has_any & (high - low + 1 != counts.sum(-1))
    padded = torch.zeros(batch, number * OWN, dtype=torch.bool)
    padded[:, :length] = has_gaps
    tile_gaps = padded.view(batch, number, OWN).any(-1)
    assert torch.equal(table[:, :, 4].bool(), tile_gaps)
    for b in range(batch):
        for t in range(number):
            first, full, full_stop, stop, _, clean, clean_stop, _ = table[b, t].tolist()
            rows = counts[b, t * OWN : (t + 1) * OWN]
            seen = rows.any(0).nonzero()
            if len(seen):
                assert first * OTHERS <= int(seen.min())
                assert int(seen.max()) < stop * OTHERS
            assert first <= full <= full_stop <= stop
            assert bool(rows[:, full * OTHERS : full_stop * OTHERS].all())
            assert bool(shown[b, clean * OTHERS : clean_stop * OTHERS].all())
    work = (table[:, :, 3] - table[:, :, 0]).flatten()
    order = table[:, :, 7].flatten().long()
    assert torch.equal(order.sort().values, torch.arange(batch * number))
    assert bool((work[order].diff() <= 0).all())
    return tile_gaps


@pytest.mark.parametrize("seed", range(16))
def test_the_ranges_are_those_of_the_visible_pairs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "CHUNK", 64)  # so that a program reads several chunks
    queries, keys = [(70, 330), (64, 64), (300, 33), (1, 200), (130, 1)][seed % 5]
    case = compose(draw(2, 2, 1, queries, keys, 16, torch.float32, seed), seed)
    call = tiles._call(case.q, case.k, case.v, conditions(case))
    for ours_are_queries in (True, False):
        check(call, ours_are_queries=ours_are_queries)


@pytest.mark.parametrize("ours_are_queries", [True, False])
def test_padding_and_documents_have_no_gaps(ours_are_queries: bool) -> None:
    place = torch.arange(150)[None]
    ids = torch.cumsum(torch.tensor([[0, 1, 1] + 70 * [0] + [1] + 76 * [0]]), 1)
    for key_mask, each in (
        (place >= torch.tensor([[0], [37], [149]]), None),
        (place < torch.tensor([[150], [37], [1]]), None),
        (None, ids),
        (place < torch.tensor([[150], [100], [1]]), ids),
    ):
        case = draw(3, 2, 1, 150, 150, 16, torch.float32, ahead=0)
        case = Case(case.q, case.k, case.v, (key_mask, each, each), case.settings)
        call = tiles._call(case.q, case.k, case.v, conditions(case))
        assert not check(call, ours_are_queries=ours_are_queries).any()


@pytest.mark.parametrize("ours_are_queries", [True, False])
def test_ids_of_any_size_keep_documents_apart(ours_are_queries: bool) -> None:
    # Ids that int32 cannot hold, of which some are equal in their lower 32 bits.
    large = [0, 2**32, 2**62, -(2**63), 2**31, -(2**31), 2**30, 2**30 - 1, -(2**30), -(2**30) - 1]
    query_ids = torch.tensor([[*large, 7, -1], [*large[::-1], 8, 2**40]]).repeat_interleave(6, 1)
    key_ids = torch.tensor([[*large, 5], [3, *large]]).repeat_interleave(9, 1)
    place = torch.arange(99)[None]
    for key_mask in (None, place % 7 != 3):
        case = draw(2, 2, 1, 72, 99, 16, torch.float32)
        case = Case(case.q, case.k, case.v, (key_mask, query_ids, key_ids), case.settings)
        check(
            tiles._call(case.q, case.k, case.v, conditions(case)), ours_are_queries=ours_are_queries
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["keys", "values"])
def test_numbers_at_hidden_keys_that_are_not_finite_are_found(where: str, bad: float) -> None:
    shown = torch.arange(300)[None] < torch.tensor([[300], [200], [299]])
    case = draw(3, 4, 2, 300, 300, 24, torch.float32, ahead=0)
    for batch, group, key in ((1, 0, 250), (2, 1, 299), (1, 1, 10), (0, 0, 299)):
        k, v = case.k.clone(), case.v.clone()
        (k if where == "keys" else v)[batch, group, key, 23] = bad
        given = Case(case.q, k, v, (shown, None, None), case.settings)
        call = tiles._call(k=k, v=v, q=given.q, given=conditions(given))
        wanted = torch.zeros(3, 2, dtype=torch.bool)
        wanted[batch, group] = not shown[batch, key]
        both = ranges.find(call, OWN, OTHERS, ours_are_queries=True, checked=(call.k, call.v))
        assert torch.equal(both[-6:].view(3, 2) != 0, wanted)
        values = ranges.find(call, OWN, OTHERS, ours_are_queries=True, checked=(call.v,))
        assert torch.equal(values[-6:].view(3, 2) != 0, wanted & (where == "values"))
