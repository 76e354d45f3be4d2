"""kv_cache on a GPU: values against float64, CUDA graphs, the same bits twice, memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.kv_cache import (
    bytes_after,
    engine_for,
    kv_cache_append,
    kv_cache_attention,
    kv_cache_last,
    plan_for,
    split_keys,
)

pytestmark = pytest.mark.gpu

# Largest difference from float64, over the largest value.
BUDGET = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float64: 1e-12}


def draw(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    depth: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    cache = (batch, kv_heads, keys, depth)
    sizes = ((batch, heads, queries, depth), cache, cache)
    q, k, v = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in sizes)
    return q, k, v


def assert_right(q: Tensor, k: Tensor, v: Tensor, last: Tensor, mask: Tensor | None = None) -> None:
    found = kv_cache_attention(q, k, v, last, mask)
    repeat = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        wide = [t[b : b + 1].double().nan_to_num().repeat_interleave(repeat, 1) for t in (k, v)]
        mine = last[b : b + 1] if last.shape[0] > 1 else last
        seen = torch.arange(k.shape[2], device="cuda") <= mine[:, None, :, None]
        if mask is not None:
            seen = seen & (mask[b : b + 1] if mask.shape[0] > 1 else mask)
        score = q[b : b + 1].double() @ wide[0].transpose(2, 3) * q.shape[3] ** -0.5
        wanted = score.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num() @ wide[1]
        difference = (found[b : b + 1].double() - wanted).abs().max()
        assert difference <= BUDGET[q.dtype] * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 32, 8, 1, 4096, 128),
        (16, 32, 8, 1, 1000, 128),
        (2, 8, 8, 1, 333, 64),
        (3, 12, 2, 4, 700, 96),
        (2, 16, 1, 5, 515, 256),
        (1, 4, 4, 1, 20, 16),
    ],
    ids=str,
)
def test_attention_equals_float64(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = draw(*sizes, dtype=dtype)
    assert engine_for(q.device, dtype) == ("reference" if dtype == torch.float64 else "split")
    batch, queries, keys = sizes[0], sizes[3], sizes[4]
    for filled in (queries, keys // 2, keys):
        last = torch.arange(filled - queries, filled, device="cuda")[None]
        k[:, :, filled:], v[:, :, filled:] = math.nan, math.nan
        if dtype != torch.float64:
            assert_right(q, k, v, last)
        k, v = k.nan_to_num(), v.nan_to_num()
        assert_right(q, k, v, last)
    ragged = torch.randint(-1, keys, (batch, queries), device="cuda", dtype=torch.int32)
    assert_right(q, k, v, ragged)
    mask = torch.rand(batch, 1, queries, keys, device="cuda") < 0.3
    assert_right(q, k, v, kv_cache_last(mask), mask)


def test_other_layouts_are_served() -> None:
    q, k, v = draw(2, 8, 2, 2, 300, 64)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert_right(*turned, torch.tensor([[200, 201]], device="cuda"))


def test_a_captured_step_stays_right_as_the_cache_fills_up() -> None:
    q, k, v = draw(4, 32, 8, 1, 600, 128)
    k, v = torch.zeros_like(k), torch.zeros_like(v)
    new = [torch.randn(4, 8, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> Tensor:
        kv_cache_append(k, v, *new, position)
        return kv_cache_attention(q, k, v, position[None])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for place in (0, 1, 63, 64, 65, 300, 599):
        position.fill_(place)
        for tensor in new:
            tensor.normal_()
        graph.replay()
        captured = out.clone()
        assert torch.equal(k[:, :, place], new[0][:, :, 0])
        assert torch.equal(captured, kv_cache_attention(q, k, v, position[None]))
        assert_right(q, k, v, position[None])


def test_nothing_waits_for_the_gpu() -> None:
    q, k, v = draw(2, 8, 2, 1, 300, 64)
    last = torch.tensor([[200]], device="cuda")
    kv_cache_attention(q, k, v, last)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kv_cache_attention(q, k, v, last)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_same_inputs_give_the_same_bits() -> None:
    q, k, v = draw(3, 32, 8, 1, 5000, 128)
    last = torch.tensor([[4321]], device="cuda")
    first = kv_cache_attention(q, k, v, last)
    assert all(torch.equal(first, kv_cache_attention(q, k, v, last)) for _ in range(5))


def test_the_formula_bounds_what_is_allocated() -> None:
    sizes = (16, 32, 1, 8192, 128)
    q, k, v = draw(16, 32, 8, 1, 8192, 128)
    last = torch.tensor([[8000]], device="cuda")
    kv_cache_attention(q, k, v, last)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = kv_cache_attention(q, k, v, last)
    peak = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    plan = plan_for(sizes, 8, 2, q.device)
    assert peak <= int(bytes_after(16, 32, 1, 128, splits=plan.splits)) + 2048


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_any_number_of_programs_gives_the_same_values(splits: int) -> None:
    from dataclasses import replace

    q, k, v = draw(2, 8, 2, 1, 3000, 128, torch.float32)
    last = torch.tensor([[2500], [70]], device="cuda")
    plan = replace(plan_for((2, 8, 1, 3000, 128), 2, 4, q.device), splits=splits)
    found = split_keys.attend(q, k, v, last, None, 0.1, plan=plan)
    wanted = kv_cache_attention(q.double(), k.double(), v.double(), last, None, 0.1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_compiled_step_with_cuda_graphs_equals_eager() -> None:
    import torch.nn.functional as F

    import memeff_compile

    def step(q: Tensor, new: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        k.index_copy_(2, position, new)
        v.index_copy_(2, position, new)
        wide = [t[:, :, None].expand(2, 2, 4, 256, 64).reshape(2, 8, 256, 64) for t in (k, v)]
        mask = torch.arange(256, device=q.device) <= position[None, None, :, None]
        return F.scaled_dot_product_attention(q, *wide, attn_mask=mask)

    q, k, v = draw(2, 8, 2, 1, 256, 64)
    k, v = torch.zeros_like(k), torch.zeros_like(v)
    ours, eagers = (k.clone(), v.clone()), (k.clone(), v.clone())
    for cache in ours:
        torch._dynamo.mark_static_address(cache)
    memeff_compile.reset()
    compiled = torch.compile(step, backend="memeff", mode="reduce-overhead")
    with torch.no_grad():
        for place in range(20):
            new = torch.randn(2, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
            position = torch.tensor([place], device="cuda")
            found = compiled(q, new, *ours, position).clone()
            wanted = step(q, new, *eagers, position)
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(ours[0], eagers[0])
    assert memeff_compile.last_report().rewrites("rewrite_kv_update") == 1
