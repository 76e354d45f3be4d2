"""The kernels of pairs of layers that share values on a CPU, run by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_kv_cache import (
    OWN_KEYS,
    Layout,
    append_pairs,
    append_value_pairs,
    reference,
    split_codes,
    value_pair_reference,
)
from memeff_compile.kernels.coded_kv_cache.value_pair_reference import Merging
from tests.support.merged_caches import Values, aligned_rows

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

SMALL: dict[str, Any] = {"group": 16, "recent": 16, "kept": 2}
LIMIT = 90


def step(engine: Any, pair: Values, rows: list[Tensor], merging: Merging, **how: Any) -> None:
    """Append with one engine: a single token in the lower layer first, more of both together."""
    lower: tuple[Tensor, Tensor] | None = (rows[0], rows[1])
    if rows[0].shape[2] == 1:
        own = (pair.lower[OWN_KEYS.index(name)] for name in ("k_window", "v_window", "counts"))
        append_pairs.append_lower(*own, *rows[:2], LIMIT)
        lower = None
    given = pair.layout.bits, pair.layout.recent, LIMIT, merging
    engine.append(pair.tensors(), lower, (rows[2], rows[3]), *given, **how)


def compare(found: Values, expected: Values) -> None:
    assert found.filled() == expected.filled()
    length, coded = found.filled()[:2]
    slots = torch.arange(coded, length) % found.layout.window
    groups = coded // found.layout.group
    for is_upper in (False, True):
        for name, mine, theirs in zip(
            OWN_KEYS, found.own(is_upper=is_upper), expected.own(is_upper=is_upper), strict=True
        ):
            if name.endswith("window"):
                assert torch.equal(mine[:, :, slots], theirs[:, :, slots]), name
            elif name.startswith("k_") and not name.endswith("kept"):
                assert torch.equal(mine[:, :, :groups], theirs[:, :, :groups]), name
            elif name != "counts":
                assert torch.equal(mine, theirs), name
    longer, other = (pair.shared[2][:, :, :coded].float() for pair in (found, expected))
    torch.testing.assert_close(longer, other, rtol=5e-3, atol=1e-5)
    for mine, theirs in zip(found.maps, expected.maps, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)
    a, b = (pair.directions()[:, :, :coded] for pair in (found, expected))
    # A direction on the border of two codes may fall to either side.
    assert float((a - b).abs().max()) < 1.5
    assert float(((a - b).abs() > 2e-2).float().mean()) < 5e-3


CASES = [
    pytest.param(Layout(16, 3, value_bits=2, **SMALL), Merging(t=0.7), id="3 and 2 bits"),
    pytest.param(Layout(16, 4, **SMALL), Merging(rule="average", t=0.6), id="4 bits, average"),
    pytest.param(
        Layout(128, 2, group=16, recent=16, kept=0, value_bits=3),
        Merging(scale="projection"),
        id="two shares of channels",
    ),
]


@pytest.mark.parametrize(("layout", "merging"), CASES)
def test_appending_leaves_what_the_reference_leaves(layout: Layout, merging: Merging) -> None:
    """First tokens, by which maps are fitted; single ones, one of which fills a group; a chunk."""
    rows = aligned_rows(2, 2, 66, layout.depth, torch.float32)
    first = (0, 3) if layout.kept else (0, 0)
    pairs = [Values(layout, 2, 2, LIMIT, torch.float32, first=first) for _ in range(2)]
    for start, end in ((0, 47), (47, 48), (48, 49), (49, 66)):
        part = [x[:, :, start:end] for x in rows]
        for pair, engine in zip(pairs, (append_value_pairs, value_pair_reference), strict=True):
            step(engine, pair, part, merging, is_first=start == 0)
        compare(*pairs)
    assert pairs[0].filled() == [66, 48] * 2
    assert pairs[0].maps[3].tolist() == [[1, 0]] * 2, "heads that are alike share values"


@pytest.mark.parametrize("repeat", [1, 4])
@pytest.mark.parametrize("is_upper", [False, True])
def test_attention_equals_that_over_the_restored_values(*, is_upper: bool, repeat: int) -> None:
    layout = Layout(16, 3, value_bits=2, **SMALL)
    rows = aligned_rows(2, 2, 66, 16, torch.float32)
    pair = Values(layout, 2, 2, LIMIT, torch.float32, first=(0, 3))
    step(value_pair_reference, pair, rows, Merging(), is_first=True)
    q = torch.randn(2, 2 * repeat, 1, 16)
    mask = torch.ones(2, 1, 1, LIMIT, dtype=torch.bool)
    mask[1, ..., :3] = False
    given = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper), mask, 0.3, 3
    maps = (*pair.maps_of(is_upper=is_upper), None, None)[:3]
    for splits in (1, 3):
        plan = split_codes.plan_for(4, 3, 16, 3, q.device, repeat)
        plan = split_codes.Plan(plan.shapes, splits)
        found = split_codes.attend(q, *given, maps, plan=plan)
        expected = reference.attend(q, *given, maps)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("why", ["full", "apart"])
def test_what_cannot_be_appended_leaves_no_numbers(why: str) -> None:
    pair = Values(Layout(16, 4, **SMALL), 1, 1, LIMIT, torch.float32)
    rows = aligned_rows(1, 1, 91, 16, torch.float32)
    step(append_value_pairs, pair, [x[:, :, :90] for x in rows], Merging(), is_first=True)
    assert pair.filled() == [90, 64] * 2
    if why == "apart":
        pair.lower[OWN_KEYS.index("counts")][0] -= 1
        two = [x[:, :, 80:82] for x in rows]
        step(append_value_pairs, pair, two, Merging())
    else:
        step(append_value_pairs, pair, [x[:, :, 90:] for x in rows], Merging())
    for is_upper in (False, True):
        pool = pair.pool(is_upper=is_upper)
        pool[-1][0] = 90
        found = split_codes.attend(
            rows[0][:, :, :1], pool, pair.norms(is_upper=is_upper), None, 0.25, 4
        )
        assert found.isnan().all()
