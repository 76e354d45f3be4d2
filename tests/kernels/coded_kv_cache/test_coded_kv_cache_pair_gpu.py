"""Pairs of layers on a GPU: stored tensors against the reference, attention against float64."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from memeff_compile import MiniCache
from memeff_compile.kernels.coded_kv_cache import (
    PLAIN,
    Layout,
    alignment,
    append_pairs,
    coded_kv_cache_append_lower,
    coded_kv_cache_append_pair,
    coded_kv_cache_attention,
    coded_kv_cache_view,
    engine_for,
    pair_reference,
    reference,
)
from memeff_compile.kernels.coded_kv_cache.layout import Maps
from memeff_compile.kernels.coded_kv_cache.pair_reference import Merging
from tests.support.coded_caches import by_hand
from tests.support.merged_caches import Pair, aligned_rows, draw
from tests.support.merged_decoding import assert_a_gpu_decodes_as_without_the_backend

pytestmark = pytest.mark.gpu

BUDGET = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
LIMIT = 730
BY_KERNELS: dict[str, Any] = {"merging": append_pairs.merge_prompt, "sums": append_pairs.SUMS}


def make(layout: Layout, dtype: torch.dtype) -> Pair:
    return Pair(layout, 2, 2, LIMIT, dtype, first=(0, 7), device="cuda")


def both(pair: Pair, rows: list[Tensor], merging: Merging, *, by_kernels: bool) -> None:
    """Append tokens of both layers with the kernels or with the reference."""
    run = append_pairs.append_pair if by_kernels else pair_reference.append
    bits, recent = pair.layout.bits, pair.layout.recent
    lower, upper = (rows[0], rows[1]), (rows[2], rows[3])
    run(pair.tensors(), lower, upper, bits, recent, LIMIT, merging)


CASES = [
    *[pytest.param(Layout(128, bits, kept=60), Merging(), id=f"{bits}") for bits in (16, 8, 4)],
    pytest.param(Layout(128, 3, kept=60), Merging(t=0.7, gamma=0.2), id="3 bits"),
    pytest.param(Layout(64, 2, kept=60), Merging(rule="average", t=0.6), id="average"),
    pytest.param(
        Layout(128, 4, group=128, kept=20),
        Merging(rule="max_norm", scale="projection", gamma=1.0),
        id="max_norm, all there is room for",
    ),
    pytest.param(Layout(128, 4, kept=60), Merging(reading="similar", gamma=0.2), id="similar"),
    pytest.param(Layout(256, 4, recent=64, kept=60), Merging(), id="256"),
]


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize(("layout", "merging"), CASES)
def test_appending_leaves_what_the_reference_leaves(
    layout: Layout, merging: Merging, dtype: torch.dtype
) -> None:
    rows = draw(2, 2, 500, layout.depth, dtype, "cuda")
    pairs = [make(layout, dtype) for _ in range(2)]
    for start, end in ((0, 300), (300, 301), (301, 500)):
        part = [x[:, :, start:end] for x in rows]
        for pair, by_kernels in zip(pairs, (True, False), strict=True):
            both(pair, part, merging, by_kernels=by_kernels)
    compare(*pairs)


def compare(found: Pair, expected: Pair) -> None:
    """Require that a pair equals the reference's, except for rounding."""
    layout = found.layout
    assert found.filled() == expected.filled()
    length, coded = found.filled()[:2]
    # Two rows as far apart to 1e-6 may change places; all others are the same.
    places = [pair.get("places").sort(-1).values for pair in (found, expected)]
    assert float((places[0] != places[1]).float().mean()) <= 0.05
    slots = torch.arange(coded, length, device="cuda") % layout.window
    for mine, theirs in ((found.lower, expected.lower), (found.upper, expected.upper)):
        for place in (0, 1):
            assert torch.equal(mine[place][:, :, slots], theirs[place][:, :, slots])
        a, b = (own[5][:, :, :coded].float() for own in (mine, theirs))
        wrong = (a - b).abs() > 2e-2 * b.abs() + 1e-6
        assert float(wrong.float().mean()) < 1e-2
    for is_value in (False, True):
        a, b = (p.directions(is_value=is_value)[:, :, :coded] for p in (found, expected))
        assert float((a - b).norm() / b.norm()) < 2e-2


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize(("layout", "merging"), CASES)
def test_a_prompt_leaves_what_the_reference_leaves(
    layout: Layout, merging: Merging, dtype: torch.dtype
) -> None:
    """Through the op, which has kernels for it, with keys as models have them: heads last."""
    rows = draw(2, 2, 600, layout.depth, dtype, "cuda")
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
    pairs = [make(layout, dtype) for _ in range(2)]
    settings = (merging.keep_first, merging.rule, merging.t, merging.gamma, merging.reading)
    sizes = (layout.bits, layout.recent, LIMIT)
    with mock.patch.object(append_pairs, "merge_prompt", wraps=append_pairs.merge_prompt) as merge:
        coded_kv_cache_append_pair(*pairs[0].all(), *rows, *sizes, *settings, merging.scale, True)
    assert merge.call_count == 1
    lower, upper = (rows[0], rows[1]), (rows[2], rows[3])
    expected = pairs[1]
    given = (expected.tensors(), lower, upper, *sizes, merging)
    pair_reference.append(*given, is_first=True)
    compare(*pairs)
    is_same = pairs[0].get("places") == expected.get("places")
    for place in (2, 3):  # kept rows, bit for bit
        for mine, theirs in ((pairs[0].lower, expected.lower), (pairs[0].upper, expected.upper)):
            assert torch.equal(mine[place][is_same], theirs[place][is_same])


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("bits", [PLAIN, 8, 4, 3, 2])
def test_attention_equals_float64(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = Layout(128, bits, kept=60)
    # Scales of few bits are large: float16 is declined there, and compared all the same.
    budget = BUDGET[dtype] * (2 if dtype == torch.float16 and bits < 4 else 1)
    name = "rows" if bits == PLAIN else "codes"
    assert engine_for(torch.device("cuda"), dtype, layout.group, bits) == name
    mask = torch.rand(2, 1, 1, LIMIT, device="cuda") < 0.7
    for tokens in (1, 191, 192, 700):
        pair = make(layout, dtype)
        rows = draw(2, 2, tokens, 128, dtype, "cuda")
        both(pair, rows, Merging(gamma=0.2), by_kernels=True)
        for repeat in (1, 4):
            q = torch.randn(2, 2 * repeat, 1, 128, device="cuda", dtype=dtype)
            for is_upper in (False, True):
                pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
                for seen in (None, mask):
                    found = coded_kv_cache_attention(q, *pool, *norms, bits, seen, None)
                    expected = by_hand(q, pool, bits, 128**-0.5, seen, norms)
                    difference = float((found.double() - expected).abs().max())
                    assert difference <= budget * max(1.0, float(expected.abs().max()))


SETTINGS: tuple[Any, ...] = (4, "slerp", 0.5, 0.05, "distinct", "norm", False)


def one_step(pair: Pair, new: list[Tensor], q: Tensor) -> list[Tensor]:
    """Append a token to the lower layer, read it, append to the upper, read it."""
    bits, recent = pair.layout.bits, pair.layout.recent
    window = pair.lower[0], pair.lower[1], pair.lower[4]
    coded_kv_cache_append_lower(*window, *new[:2], LIMIT)
    found = []
    for is_upper in (False, True):
        if is_upper:
            coded_kv_cache_append_pair(
                *pair.all(), None, None, *new[2:], bits, recent, LIMIT, *SETTINGS
            )
        pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
        found.append(coded_kv_cache_attention(q, *pool, *norms, bits, None, None))
    return found


@pytest.mark.parametrize("bits", [PLAIN, 4])
def test_a_graph_is_replayed_while_groups_are_merged(bits: int) -> None:
    layout = Layout(128, bits, kept=20)
    pairs = [make(layout, torch.bfloat16) for _ in range(2)]
    rows = draw(2, 2, 420, 128, torch.bfloat16, "cuda")
    q = torch.randn(2, 8, 1, 128, device="cuda").bfloat16()
    new = [x[:, :, :1].clone() for x in rows]
    for pair in pairs:  # compiles
        one_step(pair, new, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one_step(pairs[0], new, q)
    for token in range(1, 420):
        for held, source in zip(new, rows, strict=True):
            held.copy_(source[:, :, token : token + 1])
        graph.replay()
        expected = one_step(pairs[1], new, q)
        if token % 37 == 0:
            for mine, theirs in zip(out, expected, strict=True):
                assert torch.equal(mine, theirs)
    assert pairs[0].filled() == pairs[1].filled() == [420, 256] * 2
    for mine, theirs in zip(pairs[0].all(), pairs[1].all(), strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


# --- aligned layers -------------------------------------------------------------------------------


def aligned(layout: Layout, dtype: torch.dtype) -> Pair:
    return Pair(layout, 2, 4, LIMIT, dtype, first=(0, 7), device="cuda", align=True)


def first_tokens(pair: Pair, rows: list[Tensor], settings: Merging, **more: Any) -> None:
    lower, upper = (rows[0], rows[1]), (rows[2], rows[3])
    given = (pair.tensors(), lower, upper, pair.layout.bits, pair.layout.recent, LIMIT, settings)
    pair_reference.append(*given, is_first=True, **more)


def restored(pair: Pair) -> list[Tensor]:
    found: list[Tensor] = []
    for is_upper in (False, True):
        held = [*pair.pool(is_upper=is_upper), *pair.norms(is_upper=is_upper)]
        maps = pair.maps_of(is_upper=is_upper)
        found += coded_kv_cache_view(*held, pair.layout.bits, LIMIT, *maps)
    return found


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize(("layout", "merging"), [CASES[0], CASES[2], CASES[3], CASES[4], CASES[7]])
def test_aligned_layers_are_appended_to_as_the_reference_does(
    layout: Layout, merging: Merging, dtype: torch.dtype
) -> None:
    rows = aligned_rows(2, 4, 600, layout.depth, dtype, "cuda")
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
    pairs = [aligned(layout, dtype) for _ in range(2)]
    for pair, more in zip(pairs, ({"merging": append_pairs.merge_prompt}, {}), strict=True):
        first_tokens(pair, [x[:, :, :400] for x in rows], merging, **more)
    assert pairs[0].maps[3].tolist() == [[1, 2, 3, 0]] * 2
    for start, end in ((400, 401), (401, 600)):
        part = [x[:, :, start:end] for x in rows]
        for pair, by_kernels in zip(pairs, (True, False), strict=True):
            both(pair, part, merging, by_kernels=by_kernels)
    assert pairs[0].filled() == pairs[1].filled()
    wrong, reference_wrong = [], []
    for found, expected, came in zip(*map(restored, pairs), rows, strict=True):
        real = torch.ones(2, 600, dtype=torch.bool, device="cuda")
        real[1, :7] = False
        mine, theirs, truth = (
            x.transpose(1, 2)[:, :600][real].float() for x in (found, expected, came)
        )
        spread = (truth - truth.mean(0)).norm()
        assert float((mine - theirs).norm() / spread) < 2e-2
        wrong.append(float((mine - truth).norm() / spread))
        reference_wrong.append(float((theirs - truth).norm() / spread))
    few = {16: 0.1, 4: 0.15, 3: 0.3, 2: 0.6}[layout.bits]
    assert max(wrong) < few, wrong
    for mine, theirs in zip(wrong, reference_wrong, strict=True):
        assert mine <= 1.02 * theirs + 1e-3, (wrong, reference_wrong)


@pytest.mark.parametrize(
    ("dtype", "depth"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 256)], ids=str
)
def test_maps_are_nearly_those_of_float64(dtype: torch.dtype, depth: int) -> None:
    rows = aligned_rows(2, 4, 3001, depth, dtype, "cuda")
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
    counted = torch.arange(3001, device="cuda") >= torch.tensor([[4], [11]], device="cuda")
    for x in rows:
        x[1, :, :7] = torch.nan
    pairs = [
        Pair(Layout(depth, 4), 2, 4, LIMIT, kind, device="cuda", align=True)
        for kind in (dtype, torch.float64)
    ]
    alignment.fit(Maps(*pairs[0].maps), rows, counted, append_pairs.SUMS)
    alignment.fit(Maps(*pairs[1].maps), [x.double() for x in rows], counted)
    assert pairs[0].maps[3].equal(pairs[1].maps[3])
    found, expected = (
        alignment.aligned([x[:, :, 20:].double() for x in rows], Maps(*p.maps)) for p in pairs
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < (
            1e-2 if dtype == torch.bfloat16 else 2e-3
        )


READ = [
    *((bits, 128, torch.bfloat16, 4) for bits in (PLAIN, 8, 4, 3, 2)),
    (4, 64, torch.bfloat16, 1),
    (4, 256, torch.bfloat16, 4),
    (4, 128, torch.bfloat16, 12),
    (4, 128, torch.float16, 4),
    (PLAIN, 64, torch.float16, 1),
]


@pytest.mark.parametrize(("bits", "depth", "dtype", "repeat"), READ)
def test_attention_over_aligned_rows_equals_float64(
    bits: int, depth: int, dtype: torch.dtype, repeat: int
) -> None:
    torch.manual_seed(0)
    layout = Layout(depth, bits, kept=60)
    mask = torch.rand(2, 1, 1, LIMIT, device="cuda") < 0.7
    for tokens in (1, 191, 192, 700):
        pair = aligned(layout, dtype)
        first_tokens(pair, aligned_rows(2, 4, tokens, depth, dtype, "cuda"), Merging(gamma=0.2))
        for is_upper, seen in itertools.product((False, True), (None, mask)):
            q = torch.randn(2, 4 * repeat, 1, depth, device="cuda", dtype=dtype)
            pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
            maps = (*pair.maps_of(is_upper=is_upper), None, None)[:3]
            found = coded_kv_cache_attention(q, *pool, *norms, bits, seen, None, *maps)
            wide = [x.double() if x is not None and x.is_floating_point() else x for x in maps]
            held = [x.double() if x.is_floating_point() else x for x in pool]
            lengths = [x.double() for x in norms]
            given = (seen, depth**-0.5, bits, wide)
            expected = reference.attend(q.double(), held, lengths, *given)
            difference = float((found.double() - expected).abs().max())
            assert difference <= 2 * BUDGET[dtype] * max(1.0, float(expected.abs().max()))


def aligned_step(pair: Pair, new: list[Tensor], q: Tensor) -> list[Tensor]:
    """Append a token to the lower layer, read it, append to the upper, read it."""
    bits, recent = pair.layout.bits, pair.layout.recent
    window = pair.lower[0], pair.lower[1], pair.lower[4]
    coded_kv_cache_append_lower(*window, *new[:2], LIMIT)
    found = []
    for is_upper in (False, True):
        if is_upper:
            given = (None, None, *new[2:], bits, recent, LIMIT, *SETTINGS)
            coded_kv_cache_append_pair(*pair.all(), *given, *pair.maps)
        held = [*pair.pool(is_upper=is_upper), *pair.norms(is_upper=is_upper)]
        maps = pair.maps_of(is_upper=is_upper)
        found.append(coded_kv_cache_attention(q, *held, bits, None, None, *maps))
    return found


@pytest.mark.parametrize("bits", [PLAIN, 3])
def test_a_graph_is_replayed_while_groups_are_aligned_and_merged(bits: int) -> None:
    pairs = [aligned(Layout(128, bits, kept=20), torch.bfloat16) for _ in range(2)]
    rows = aligned_rows(2, 4, 420, 128, torch.bfloat16, "cuda")
    q = torch.randn(2, 8, 1, 128, device="cuda").bfloat16()
    for pair in pairs:
        first_tokens(pair, [x[:, :, :100] for x in rows], Merging())
    new = [x[:, :, 100:101].clone() for x in rows]
    for pair in pairs:  # compiles
        aligned_step(pair, new, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = aligned_step(pairs[0], new, q)
    for token in range(101, 420):
        for held, source in zip(new, rows, strict=True):
            held.copy_(source[:, :, token : token + 1])
        graph.replay()
        expected = aligned_step(pairs[1], new, q)
        if token % 37 == 0:
            for mine, theirs in zip(out, expected, strict=True):
                assert torch.equal(mine, theirs)
    assert pairs[0].filled() == pairs[1].filled() == [420, 256] * 2
    for mine, theirs in zip(pairs[0].all(), pairs[1].all(), strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_a_prompt_is_fitted_and_merged_without_a_wait_for_the_gpu() -> None:
    rows = aligned_rows(2, 4, 600, 128, torch.bfloat16, "cuda")
    for _ in range(2):  # the first time compiles
        pair = aligned(Layout(128, 4, kept=60), torch.bfloat16)
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        try:
            first_tokens(pair, rows, Merging(), **BY_KERNELS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert pair.filled() == [600, 448] * 2


def test_more_tokens_than_there_is_room_for_are_no_numbers() -> None:
    pair = make(Layout(128, 4, kept=20), torch.bfloat16)
    rows = draw(2, 2, LIMIT, 128, torch.bfloat16, "cuda")
    both(pair, rows, Merging(), by_kernels=True)
    before = pair.filled()
    q = torch.randn(2, 8, 1, 128, device="cuda").bfloat16()
    for out in one_step(pair, [x[:, :, :1] for x in rows], q):
        assert out.isnan().all()
    assert pair.filled() == before


def test_a_model_decodes_from_a_merged_cache_as_without_the_backend() -> None:
    merge = MiniCache(start_layer=0, retained=0.05)
    assert_a_gpu_decodes_as_without_the_backend(merge, 4)


def test_a_model_with_windows_decodes_from_a_merged_cache_as_without_the_backend() -> None:
    merge = MiniCache(start_layer=0, retained=0.05, force=True)
    types = ["sliding_attention", "full_attention"] * 2
    assert_a_gpu_decodes_as_without_the_backend(merge, 4, types=types)
