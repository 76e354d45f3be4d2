"""Pairs of layers that share values on a GPU: stored tensors, attention against float64, graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from memeff_compile import MiniCache
from memeff_compile.kernels.coded_kv_cache import (
    OWN_KEYS,
    Layout,
    coded_kv_cache_append_lower,
    coded_kv_cache_append_values,
    coded_kv_cache_attention,
    coded_kv_cache_view,
    reference,
    value_pair_reference,
)
from memeff_compile.kernels.coded_kv_cache.value_pair_reference import Merging
from tests.support.merged_caches import Values, aligned_rows
from tests.support.merged_decoding import assert_a_gpu_decodes_as_without_the_backend

pytestmark = pytest.mark.gpu

LIMIT = 730
BUDGET = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
LAYOUTS = [
    pytest.param(Layout(128, 3, value_bits=2), id="3 and 2 bits"),
    pytest.param(Layout(128, 3, group=128, value_bits=2), id="3 and 2 bits, groups of 128"),
    pytest.param(Layout(64, 4), id="4 bits"),
    pytest.param(Layout(128, 8, kept=0, group=128, value_bits=3), id="8 and 3 bits"),
    pytest.param(Layout(256, 4, recent=64, value_bits=2), id="256 channels"),
]


def make(layout: Layout, dtype: torch.dtype) -> Values:
    first = (0, 7) if layout.kept else ()
    return Values(layout, 2, 4, LIMIT, dtype, first=first, device="cuda")


def write(pair: Values, rows: list[Tensor], *, is_first: bool = False) -> None:
    """Append by the op: a single token in the lower layer first, more of both together."""
    lower: list[Tensor | None] = [*rows[:2]]
    if rows[0].shape[2] == 1:
        own = (pair.lower[OWN_KEYS.index(name)] for name in ("k_window", "v_window", "counts"))
        coded_kv_cache_append_lower(*own, *rows[:2], LIMIT)
        lower = [None, None]
    how = (pair.layout.bits, pair.layout.recent, LIMIT, "slerp", 0.7, "norm", is_first)
    coded_kv_cache_append_values(*pair.all(), *lower, *rows[2:], *how)


def restored(pair: Values) -> list[Tensor]:
    found: list[Tensor] = []
    for is_upper in (False, True):
        held = [*pair.pool(is_upper=is_upper), *pair.norms(is_upper=is_upper)]
        maps = pair.maps_of(is_upper=is_upper)
        found += coded_kv_cache_view(*held, pair.layout.bits, LIMIT, *maps)
    return found


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_appending_leaves_what_the_reference_leaves(layout: Layout, dtype: torch.dtype) -> None:
    rows = aligned_rows(2, 4, 600, layout.depth, dtype, "cuda")
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
    pairs = [make(layout, dtype) for _ in range(2)]
    for start, end in ((0, 400), (400, 401), (401, 600)):
        part = [x[:, :, start:end] for x in rows]
        write(pairs[0], part, is_first=start == 0)
        given = (part[0], part[1]), (part[2], part[3]), layout.bits, layout.recent, LIMIT
        value_pair_reference.append(pairs[1].tensors(), *given, Merging(t=0.7), is_first=start == 0)
    assert pairs[0].filled() == pairs[1].filled()
    assert pairs[0].maps[3].tolist() == [[1, 2, 3, 0]] * 2
    coded = pairs[0].filled()[1] // layout.group
    for is_upper, name in itertools.product((False, True), ("k_codes", "k_scales", "k_kept")):
        place = OWN_KEYS.index(name)
        mine, theirs = (pair.own(is_upper=is_upper)[place] for pair in pairs)
        end = None if name == "k_kept" else coded
        assert torch.equal(mine[:, :, :end], theirs[:, :, :end]), name
    for place, (found, expected, came) in enumerate(zip(*map(restored, pairs), rows, strict=True)):
        real = torch.ones(2, 600, dtype=torch.bool, device="cuda")
        real[1, : 7 if layout.kept else 0] = False
        mine, theirs, truth = (
            x.transpose(1, 2)[:, :600][real].float() for x in (found, expected, came)
        )
        spread = (truth - truth.mean(0)).norm()
        assert float((mine - theirs).norm() / spread) < 3e-2
        wrong, also = (float((x - truth).norm() / spread) for x in (mine, theirs))
        assert wrong <= 1.02 * also + 1e-3, (place, wrong, also)


@pytest.mark.parametrize(
    ("layout", "repeat"),
    [
        (Layout(128, 3, value_bits=2), 4),
        (Layout(128, 3, value_bits=2), 12),
        (Layout(128, 3, group=128, value_bits=2), 4),
        (Layout(64, 4), 1),
        (Layout(128, 2, value_bits=4), 4),
        (Layout(128, 8, value_bits=3, kept=0), 4),
        (Layout(256, 4), 4),
    ],
)
def test_attention_equals_float64(layout: Layout, repeat: int) -> None:
    torch.manual_seed(0)
    bits, depth, dtype = layout.bits, layout.depth, torch.bfloat16
    mask = torch.rand(2, 1, 1, LIMIT, device="cuda") < 0.7
    for tokens in (1, 191, 192, 700):
        pair = make(layout, dtype)
        write(pair, aligned_rows(2, 4, tokens, depth, dtype, "cuda"), is_first=True)
        for is_upper, seen in itertools.product((False, True), (None, mask)):
            q = torch.randn(2, 4 * repeat, 1, depth, device="cuda", dtype=dtype)
            pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
            maps = (*pair.maps_of(is_upper=is_upper), None, None)[:3]
            found = coded_kv_cache_attention(q, *pool, *norms, bits, seen, None, *maps)
            wide = [x.double() if x is not None and x.is_floating_point() else x for x in maps]
            held = [x.double() if x.is_floating_point() else x for x in pool]
            given = (seen, depth**-0.5, bits, wide)
            lengths = None if norms[1] is None else norms[1].double()
            expected = reference.attend(q.double(), held, (None, lengths), *given)
            difference = float((found.double() - expected).abs().max())
            assert difference <= 2 * BUDGET[dtype] * max(1.0, float(expected.abs().max()))


def one_step(pair: Values, new: list[Tensor], q: Tensor) -> list[Tensor]:
    """Append a token to the lower layer, read it, append to the upper, read it."""
    own = (pair.lower[OWN_KEYS.index(name)] for name in ("k_window", "v_window", "counts"))
    coded_kv_cache_append_lower(*own, *new[:2], LIMIT)
    found = []
    for is_upper in (False, True):
        if is_upper:
            how = (pair.layout.bits, pair.layout.recent, LIMIT, "slerp", 0.7, "norm", False)
            coded_kv_cache_append_values(*pair.all(), None, None, *new[2:], *how)
        held = [*pair.pool(is_upper=is_upper), *pair.norms(is_upper=is_upper)]
        maps = pair.maps_of(is_upper=is_upper)
        found.append(coded_kv_cache_attention(q, *held, pair.layout.bits, None, None, *maps))
    return found


def test_a_graph_is_replayed_while_groups_are_merged() -> None:
    pairs = [make(Layout(128, 3, value_bits=2), torch.bfloat16) for _ in range(2)]
    rows = aligned_rows(2, 4, 420, 128, torch.bfloat16, "cuda")
    q = torch.randn(2, 8, 1, 128, device="cuda").bfloat16()
    for pair in pairs:
        write(pair, [x[:, :, :100] for x in rows], is_first=True)
    new = [x[:, :, 100:101].clone() for x in rows]
    for pair in pairs:  # compiles
        one_step(pair, new, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one_step(pairs[0], new, q)
    for token in range(101, 420):
        for held, source in zip(new, rows, strict=True):
            held.copy_(source[:, :, token : token + 1])
        graph.replay()
        expected = one_step(pairs[1], new, q)
        if token % 37 == 0:
            for mine, theirs in zip(out, expected, strict=True):
                assert torch.equal(mine, theirs)
    assert pairs[0].filled() == pairs[1].filled() == [420, 256] * 2
    for mine, theirs in zip(pairs[0].all(), pairs[1].all(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_prompt_is_fitted_and_merged_without_a_wait_for_the_gpu() -> None:
    rows = aligned_rows(2, 4, 600, 128, torch.bfloat16, "cuda")
    for is_second in (False, True):  # the first time compiles
        pair = make(Layout(128, 3, value_bits=2), torch.bfloat16)
        torch.cuda.set_sync_debug_mode("error" if is_second else "default")
        try:
            write(pair, rows, is_first=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert pair.filled() == [600, 448] * 2


def test_more_tokens_than_there_is_room_for_are_no_numbers() -> None:
    pair = make(Layout(128, 4), torch.bfloat16)
    rows = aligned_rows(2, 4, LIMIT, 128, torch.bfloat16, "cuda")
    write(pair, rows, is_first=True)
    before = pair.filled()
    q = torch.randn(2, 8, 1, 128, device="cuda").bfloat16()
    for out in one_step(pair, [x[:, :, :1] for x in rows], q):
        assert out.isnan().all()
    assert pair.filled() == before


def test_a_model_decodes_from_merged_values_as_without_the_backend() -> None:
    merge = MiniCache(start_layer=0, values_only=True, force=True)
    assert_a_gpu_decodes_as_without_the_backend(merge, 3, value_bits=2)


def test_a_model_with_windows_decodes_from_merged_values_as_without_the_backend() -> None:
    merge = MiniCache(start_layer=0, values_only=True, force=True)
    types = ["sliding_attention", "full_attention"] * 2
    assert_a_gpu_decodes_as_without_the_backend(merge, 4, types=types)
