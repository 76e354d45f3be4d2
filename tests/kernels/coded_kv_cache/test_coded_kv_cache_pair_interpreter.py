"""The kernels of pairs of layers on a CPU: the same source, run by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_kv_cache import (
    PLAIN,
    Layout,
    alignment,
    append_pairs,
    pair_reference,
    reference,
    split_codes,
    split_rows,
)
from memeff_compile.kernels.coded_kv_cache.layout import Maps
from memeff_compile.kernels.coded_kv_cache.pair_reference import Merging
from tests.support.coded_caches import by_hand
from tests.support.merged_caches import Pair, aligned_rows, draw

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

SMALL: dict[str, Any] = {"group": 16, "recent": 16, "kept": 8}
LIMIT = 90


def step(engine: Any, pair: Pair, rows: list[Tensor], merging: Merging, *, parked: bool) -> None:
    """Append with one engine: the lower layer first, or both together."""
    if not parked:
        window = pair.lower[0], pair.lower[1], pair.lower[4]
        if engine is pair_reference:
            engine.append_lower(window, *rows[:2], LIMIT)
        else:
            engine.append_lower(*window, *rows[:2], LIMIT)
    run = pair_reference.append if engine is pair_reference else append_pairs.append_pair
    lower = (rows[0], rows[1]) if parked else None
    bits, recent = pair.layout.bits, pair.layout.recent
    upper = (rows[2], rows[3])
    run(pair.tensors(), lower, upper, bits, recent, LIMIT, merging)


def compare(found: Pair, expected: Pair) -> None:
    assert found.filled() == expected.filled()
    coded = found.filled()[1]
    slots = torch.arange(coded, found.filled()[0]) % found.layout.window
    for name in ("places", "kept_count", "left_over"):
        assert torch.equal(found.get(name), expected.get(name)), name
    bounds = found.get("bound"), expected.get("bound")
    torch.testing.assert_close(*bounds, rtol=0, atol=1e-5, equal_nan=True)  # in fp32
    for mine, theirs in ((found.lower, expected.lower), (found.upper, expected.upper)):
        for place in (0, 1):
            assert torch.equal(mine[place][:, :, slots], theirs[place][:, :, slots])
        for place in (2, 3):
            assert torch.equal(mine[place], theirs[place])
        a, b = mine[5][:, :, :coded], theirs[5][:, :, :coded]
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-3, atol=1e-6)
    for is_value in (False, True) if coded else ():
        a, b = (p.directions(is_value=is_value)[:, :, :coded] for p in (found, expected))
        # A direction on the border of two codes may fall to either side.
        assert float((a - b).abs().max()) < (2e-3 if found.layout.bits == PLAIN else 0.7)
        assert float(((a - b).abs() > 2e-3).float().mean()) < 2e-3


CASES = [
    *[pytest.param(bits, Merging(gamma=0.3, keep_first=2), id=f"{bits}") for bits in (16, 8, 4)],
    pytest.param(3, Merging(gamma=0.3, keep_first=2, t=0.7), id="3, t=0.7"),
    pytest.param(2, Merging(rule="average", t=0.6, keep_first=2, gamma=0.1), id="2, average"),
    pytest.param(4, Merging(rule="max_norm", scale="projection", keep_first=0), id="max_norm"),
    pytest.param(4, Merging(reading="similar", gamma=0.2, keep_first=2), id="similar"),
    pytest.param(16, Merging(gamma=1.0, keep_first=2), id="all that there is room for"),
]


@pytest.mark.parametrize(("bits", "merging"), CASES)
def test_appending_leaves_what_the_reference_leaves(bits: int, merging: Merging) -> None:
    rows = draw(2, 1, 66, 16, torch.float32)
    layout = Layout(16, bits, **SMALL)
    pairs = [Pair(layout, 2, 1, LIMIT, torch.float32, first=(0, 3)) for _ in range(2)]
    engines = (append_pairs, pair_reference)
    for start, end in ((0, 30), (30, 31), (31, 32), (32, 33), (33, 66)):
        part = [x[:, :, start:end] for x in rows]
        for pair, engine in zip(pairs, engines, strict=True):
            step(engine, pair, part, merging, parked=end - start > 1)
        compare(*pairs)
    assert pairs[0].filled() == [66, 48] * 2
    assert int(pairs[0].get("kept_count").min()) > 0


@pytest.mark.parametrize("layout", ["tokens by heads", "heads by tokens", "each its own"])
@pytest.mark.parametrize(
    ("bits", "merging"),
    [
        pytest.param(4, Merging(gamma=0.3, keep_first=2), id="4"),
        *(pytest.param(*case.values, marks=pytest.mark.slow, id=case.id) for case in CASES),
    ],
)
def test_a_prompt_leaves_what_the_reference_leaves(
    bits: int, merging: Merging, layout: str
) -> None:
    rows = draw(2, 2, 50, 16, torch.float32)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
    if layout == "tokens by heads":
        rows = turned
    elif layout == "each its own":
        rows = [turned[0], rows[1], *rows[2:]]
    pairs = [
        Pair(Layout(16, bits, **SMALL), 2, 2, LIMIT, torch.float32, first=(0, 3)) for _ in range(2)
    ]
    for pair, more in zip(pairs, ({"merging": append_pairs.merge_prompt}, {}), strict=True):
        lower, upper = (rows[0], rows[1]), (rows[2], rows[3])
        given = (pair.tensors(), lower, upper, bits, pair.layout.recent)
        pair_reference.append(*given, LIMIT, merging, is_first=True, **more)
    compare(*pairs)
    assert pairs[0].filled() == [50, 32] * 2
    assert int(pairs[0].get("kept_count").min()) > 0


def test_two_shares_of_channels_and_half_precision() -> None:
    rows = draw(1, 1, 40, 128, torch.float16)
    pairs = [Pair(Layout(128, 4, **SMALL), 1, 1, LIMIT, torch.float16) for _ in range(2)]
    for pair, engine in zip(pairs, (append_pairs, pair_reference), strict=True):
        step(engine, pair, rows, Merging(keep_first=2), parked=True)
    compare(*pairs)


@pytest.mark.parametrize("why", ["full", "apart"])
def test_what_cannot_be_appended_leaves_no_numbers(why: str) -> None:
    pair = Pair(Layout(16, PLAIN, **SMALL), 1, 1, LIMIT, torch.float32)
    rows = draw(1, 1, 91, 16, torch.float32)
    step(append_pairs, pair, [x[:, :, :90] for x in rows], Merging(), parked=True)
    before = pair.filled()
    last = [x[:, :, 90:] for x in rows]
    if why == "full":
        step(append_pairs, pair, last, Merging(), parked=False)
        assert pair.filled() == before
    else:
        pair.lower[4][0] -= 1
        step(append_pairs, pair, [x[:, :, 80:81] for x in rows], Merging(), parked=True)
    for is_upper in (False, True):
        norms = pair.norms(is_upper=is_upper)
        pool = pair.pool(is_upper=is_upper)
        pool[-1][0] = 90
        found = split_rows.attend(rows[0][:, :, :1], pool, norms, None, 0.25, PLAIN)
        assert found.isnan().all()


@pytest.mark.parametrize(
    ("tokens", "splits", "repeat"), [(1, 1, 2), (31, 3, 2), (33, 1, 1), (70, 2, 2), (70, 5, 12)]
)
@pytest.mark.parametrize("is_upper", [False, True])
def test_attention_over_plain_directions_equals_float64(
    tokens: int, splits: int, repeat: int, is_upper: bool
) -> None:
    rows = draw(2, 1, tokens, 16, torch.float32)
    pair = Pair(Layout(16, PLAIN, **SMALL), 2, 1, LIMIT, torch.float32, first=(0, 3))
    step(pair_reference, pair, rows, Merging(gamma=0.3, keep_first=2), parked=True)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, repeat, 1, 16, generator=generator)
    mask = torch.rand(2, 1, 1, LIMIT, generator=generator) < 0.6
    pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
    for seen in (None, mask, mask[:1, ..., :64]):
        found = split_rows.attend(q, pool, norms, seen, 0.25, PLAIN, splits=splits)
        expected = by_hand(q, pool, PLAIN, 0.25, seen, norms)
        assert float((found - expected).abs().max()) < 2e-5


@pytest.mark.parametrize("bits", [PLAIN, 4])
def test_lengths_in_half_precision_are_read_two_at_once(bits: int) -> None:
    rows = draw(2, 1, 60, 16, torch.float16)
    pair = Pair(Layout(16, bits, **SMALL), 2, 1, LIMIT, torch.float16)
    step(pair_reference, pair, rows, Merging(gamma=0.3, keep_first=2), parked=True)
    q = torch.randn(2, 2, 1, 16, generator=torch.Generator().manual_seed(1)).half()
    pool, norms = pair.pool(is_upper=True), pair.norms(is_upper=True)
    assert norms[0].dtype == torch.float16
    engine = split_rows if bits == PLAIN else split_codes
    found = engine.attend(q, pool, norms, None, 0.25, bits)
    expected = by_hand(q, pool, bits, 0.25, None, norms)
    assert float((found.double() - expected).abs().max()) < 2e-2


ALIGNED = [
    pytest.param(16, Merging(gamma=0.05, keep_first=2), id="16"),
    pytest.param(4, Merging(gamma=0.05, keep_first=2), id="4"),
    pytest.param(3, Merging(gamma=0.1, keep_first=2, t=0.7), id="3, t=0.7"),
    pytest.param(2, Merging(gamma=0.1, keep_first=2, scale="projection"), id="2, projection"),
]


def first_tokens(pair: Pair, rows: list[Tensor], settings: Merging, **more: Any) -> None:
    """Append the first tokens, on which the maps are fitted."""
    lower, upper = (rows[0], rows[1]), (rows[2], rows[3])
    given = (pair.tensors(), lower, upper, pair.layout.bits, pair.layout.recent)
    pair_reference.append(*given, LIMIT, settings, is_first=True, **more)


@pytest.mark.parametrize(("bits", "merging"), ALIGNED)
def test_aligned_layers_are_appended_to_as_the_reference_does(bits: int, merging: Merging) -> None:
    rows = aligned_rows(2, 2, 66, 16, torch.float32)
    rows[2][:, :, 40] *= -1
    layout = Layout(16, bits, **SMALL)
    pairs = [Pair(layout, 2, 2, LIMIT, torch.float32, first=(0, 3), align=True) for _ in range(2)]
    engines = (append_pairs, pair_reference)
    more = ({"merging": append_pairs.merge_prompt, "sums": append_pairs.SUMS}, {})
    for pair, given in zip(pairs, more, strict=True):
        first_tokens(pair, [x[:, :, :50] for x in rows], merging, **given)
    compare(*pairs)
    for start, end in ((50, 51), (51, 66)):
        part = [x[:, :, start:end] for x in rows]
        for pair, engine in zip(pairs, engines, strict=True):
            step(engine, pair, part, merging, parked=end - start > 1)
        compare(*pairs)
    assert pairs[0].maps[3].tolist() == [[1, 0]] * 2
    assert pairs[0].filled() == [66, 48] * 2


@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 16), (torch.float16, 128)], ids=str)
def test_maps_are_fitted_as_the_reference_fits_them(
    dtype: torch.dtype, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are shared among several programs, and one sequence has padding that is no number."""
    monkeypatch.setattr(append_pairs, "_LEAST", 64)
    rows = aligned_rows(2, 2, 300, depth, dtype)
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
    counted = torch.arange(300) >= torch.tensor([[4], [11]])
    for x in rows:
        x[1, :, :7] = torch.nan
    pairs = [Pair(Layout(depth, 4), 2, 2, LIMIT, dtype, align=True).maps for _ in range(2)]
    for maps, sums in zip(pairs, (append_pairs.SUMS, None), strict=True):
        alignment.fit(Maps(*maps), rows, counted, sums)
    budget = 1e-4 if dtype == torch.float32 else 2e-3
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=budget, atol=budget)


def test_an_aligned_prompt_is_merged_a_few_groups_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = aligned_rows(2, 2, 80, 16, torch.float32)
    pairs = [
        Pair(Layout(16, 4, **SMALL), 2, 2, LIMIT, torch.float32, first=(0, 3), align=True)
        for _ in range(2)
    ]
    first_tokens(pairs[0], rows, Merging(keep_first=2), merging=append_pairs.merge_prompt)
    monkeypatch.setattr(append_pairs, "_ALIGNED", 1)
    first_tokens(pairs[1], rows, Merging(keep_first=2), merging=append_pairs.merge_prompt)
    for one, other in zip(pairs[0].all(), pairs[1].all(), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert pairs[0].filled() == [80, 64] * 2


FORMS = [(31, 2, 3), (70, 1, 1), (70, 4, 2), (70, 12, 5)]
QUICK = [
    *[(FORMS[0], bits) for bits in (PLAIN, 8, 4, 3, 2)],
    *zip(FORMS[1:], (4, PLAIN, 3), strict=True),
]
"""Each number of bits, and each form; the slow tests run each pair of both."""


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    ("tokens", "repeat", "splits", "bits"),
    [
        pytest.param(*form, bits, marks=() if (form, bits) in QUICK else pytest.mark.slow)
        for form in FORMS
        for bits in (PLAIN, 8, 4, 3, 2)
    ],
)
def test_attention_over_aligned_rows_equals_float64(
    bits: int,
    tokens: int,
    repeat: int,
    splits: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tokens == 70:  # one program turns all heads of a map, as on a GPU that is busy enough
        monkeypatch.setattr(split_codes, "heads_at_once", lambda *_: repeat)
    rows = aligned_rows(2, 2, tokens, 16, dtype)
    pair = Pair(Layout(16, bits, **SMALL), 2, 2, LIMIT, dtype, first=(0, 3), align=True)
    first_tokens(pair, rows, Merging(gamma=0.1, keep_first=2))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 2 * repeat, 1, 16, generator=generator).to(dtype)
    mask = torch.rand(2, 1, 1, LIMIT, generator=generator) < 0.6
    if bits == PLAIN:
        engine, plan = split_rows, {"splits": splits}
    else:
        shapes = split_codes.plan_for(4, 4, 16, bits, q.device, repeat).shapes
        engine, plan = split_codes, {"plan": split_codes.Plan(shapes, splits)}
    for is_upper in (False, True):
        pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
        maps = (*pair.maps_of(is_upper=is_upper), None, None)[:3]
        wide = [x.double() if x is not None and x.is_floating_point() else x for x in maps]
        held = [x.double() if x.is_floating_point() else x for x in pool]
        lengths = [x.double() for x in norms]
        for seen in (None, mask):
            found = engine.attend(q, pool, norms, seen, 0.25, bits, maps, **plan)
            expected = reference.attend(q.double(), held, lengths, seen, 0.25, bits, wide)
            wrong = float((found.double() - expected).abs().max())
            assert wrong < (5e-5 if dtype == torch.float32 else 3e-2)
