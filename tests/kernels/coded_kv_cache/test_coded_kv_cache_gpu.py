"""coded_kv_cache on a GPU: codes equal to the reference's, values against float64, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_kv_cache import (
    POOL,
    Layout,
    bytes_per_token,
    coded_kv_cache_append,
    coded_kv_cache_attention,
    engine_for,
    reference,
)
from tests.support.coded_caches import allocate, by_hand, draw, filled

pytestmark = pytest.mark.gpu

# Largest difference from float64, over the largest value.
BUDGET = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}

KINDS = [
    *[Layout(128, bits) for bits in (8, 4, 3, 2)],
    *[Layout(128, bits, "per_head") for bits in (8, 4, 3)],
    Layout(64, 4),
    Layout(64, 2, kept=0),
    Layout(256, 4, recent=64),
    Layout(128, 4, group=128),
    Layout(32, 2),
    Layout(16, 3),
]


def fill(layout: Layout, batch: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    pool = allocate(layout, batch, 2, tokens + 30, dtype, first=(0, 7)[:batch], device="cuda")
    k, v = draw(batch, 2, tokens, layout.depth, dtype, "cuda")
    coded_kv_cache_append(*pool, k, v, layout.bits, layout.recent, tokens + 30)
    return pool


def assert_close(found: Tensor, expected: Tensor, bits: int = 8) -> None:
    difference = float((found.double() - expected).abs().max())
    # A query times a scale is rounded once; a score of few channels is divided by less afterwards,
    # and scales of few bits are large. float16 is declined there, and compared all the same.
    budget = BUDGET[found.dtype] * max(1.0, (64 / found.shape[3]) ** 0.5)
    if found.dtype == torch.float16 and bits < 4:
        budget *= 2
    assert difference <= budget * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("layout", KINDS, ids=str)
def test_appending_leaves_what_the_reference_leaves(layout: Layout, dtype: torch.dtype) -> None:
    k, v = draw(2, 2, 500, layout.depth, dtype, "cuda")
    pools = [allocate(layout, 2, 2, 520, dtype, first=(0, 7), device="cuda") for _ in range(2)]
    for start, end in ((0, 300), (300, 301), (301, 302), (302, 400), (400, 500)):
        new = k[:, :, start:end], v[:, :, start:end]
        coded_kv_cache_append(*pools[0], *new, layout.bits, layout.recent, 520)
        reference.append(pools[1], *new, layout.bits, layout.recent, 520)
    assert pools[0][-1].tolist() == pools[1][-1].tolist()
    length, coded = filled(pools[0])
    slots = torch.arange(coded, length, device="cuda") % layout.window
    for name, found, expected in zip(POOL, *pools, strict=True):
        if name.endswith("window"):
            found, expected = found[:, :, slots], expected[:, :, slots]
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20, 1e36])
@pytest.mark.parametrize("scheme", ["kivi", "per_head"])
def test_tiny_and_huge_numbers_are_coded_as_the_reference_codes_them(
    size: float, scheme: str
) -> None:
    layout = Layout(64, 4, scheme)
    rows = [x * size for x in draw(2, 2, 320, 64, torch.float32, "cuda")]
    pools = [allocate(layout, 2, 2, 400, torch.float32, device="cuda") for _ in range(2)]
    for run, pool in zip((coded_kv_cache_append, reference.append), pools, strict=True):
        for start, end in ((0, 191), (191, 192), (192, 320)):
            new = [x[:, :, start:end] for x in rows]
            run(*([*pool] if run is coded_kv_cache_append else [pool]), *new, 4, 128, 400)
    for name, found, expected in zip(POOL[:4], *(pool[:4] for pool in pools), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("layout", KINDS, ids=str)
def test_attention_equals_float64(layout: Layout, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scale = layout.depth**-0.5
    expected = "reference" if dtype == torch.float32 else "codes"
    assert engine_for(torch.device("cuda"), dtype, layout.group) == expected
    for tokens in (1, layout.window - 1, layout.window, 700):
        pool = fill(layout, 2, tokens, dtype)
        mask = torch.rand(2, 1, 1, tokens + 30, device="cuda") < 0.7
        for repeat, seen in ((1, None), (4, None), (4, mask), (8, mask), (12, None), (16, mask)):
            q = torch.randn(2, 2 * repeat, 1, layout.depth, device="cuda", dtype=dtype)
            found = coded_kv_cache_attention(q, *pool, None, None, layout.bits, seen, scale)
            assert_close(found, by_hand(q, pool, layout.bits, scale, seen), layout.bits)


@pytest.mark.parametrize(
    ("bits", "depth"), [(8, 128), (4, 128), (3, 128), (2, 128), (4, 64), (4, 256)]
)
def test_norms_multiply_codes_and_kept_tokens_replace_them(bits: int, depth: int) -> None:
    layout = Layout(depth, bits, kept=100)
    pool = fill(layout, 2, 700, torch.bfloat16)
    norms = [torch.rand(2, 2, 730, device="cuda").bfloat16() + 0.5 for _ in range(2)]
    places = pool[POOL.index("places")]
    places.fill_(-1)
    for row in range(70):
        places[:, :, row] = 3 * row
        norms[0][:, :, 3 * row] *= -1
    q = torch.randn(2, 8, 1, depth, device="cuda").bfloat16()
    found = coded_kv_cache_attention(q, *pool, *norms, bits, None, None)
    assert_close(found, by_hand(q, pool, bits, depth**-0.5, None, (norms[0], norms[1])))


def test_a_graph_is_replayed_while_the_cache_fills_up() -> None:
    layout = Layout(128, 4)
    pools = [allocate(layout, 2, 2, 600, torch.bfloat16, device="cuda") for _ in range(2)]
    k, v = draw(2, 2, 500, 128, torch.bfloat16, "cuda")
    q = torch.randn(2, 8, 1, 128, device="cuda").bfloat16()
    new = [torch.zeros(2, 2, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for pool in pools:  # compiles
        coded_kv_cache_append(*pool, *new, 4, 128, 600)
        coded_kv_cache_attention(q, *pool, None, None, 4, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        coded_kv_cache_append(*pools[0], *new, 4, 128, 600)
        out = coded_kv_cache_attention(q, *pools[0], None, None, 4, None, None)
    for token in range(400):
        for held, source in zip(new, (k, v), strict=True):
            held.copy_(source[:, :, token : token + 1])
        graph.replay()
        coded_kv_cache_append(*pools[1], *new, 4, 128, 600)
        if token % 37 == 0:
            expected = coded_kv_cache_attention(q, *pools[1], None, None, 4, None, None)
            assert torch.equal(out, expected)
    assert filled(pools[0]) == filled(pools[1]) == (401, 256)


def test_more_tokens_than_there_is_room_for_are_no_numbers() -> None:
    pool = fill(Layout(128, 4), 1, 300, torch.bfloat16)
    k, v = draw(1, 2, 31, 128, torch.bfloat16, "cuda")
    coded_kv_cache_append(*pool, k, v, 4, 128, 330)
    assert filled(pool) == (300, 128)
    q = torch.randn(1, 4, 1, 128, device="cuda").bfloat16()
    assert coded_kv_cache_attention(q, *pool, None, None, 4, None, None).isnan().all()


def test_the_allocator_gives_what_the_formula_says() -> None:
    """Bytes per token of keys and values in codes of 4 bits, against the formula, within 3 %."""
    layout, held = Layout(128, 4), []
    for tokens in (4096, 36864):
        before = torch.cuda.memory_allocated()
        pool = allocate(layout, 4, 8, tokens, torch.bfloat16, device="cuda")
        held.append(torch.cuda.memory_allocated() - before)
        del pool
    measured = (held[1] - held[0]) / (4 * 32768)
    formula = float(bytes_per_token(8, 128, 4, group=64, shares=2))
    assert measured == pytest.approx(formula, rel=0.03)
