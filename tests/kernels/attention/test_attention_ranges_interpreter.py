"""The ranges that the Gluon kernels of attention read, computed by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from memeff_compile.kernels._triton.key_tiles import tiles_of
from memeff_compile.kernels.attention import ranges, tiles
from memeff_compile.kernels.attention.call import Call
from tests.kernels.attention.test_attention_interpreter import conditions
from tests.support.dense_attention import Case, compose, draw

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

OWN, OTHERS = 32, 32


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
    span = found[table.numel() :].view(batch, 2, number * OWN)
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
