"""A layer with a static cache, and one with buffers, as the inner compiler gets them.

`make golden` rewrites the expected texts; read the difference before accepting it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.kernels.device import planned_for

expecttest = pytest.importorskip(
    "expecttest", reason="goldens are compared with expecttest, which is not installed here"
)

B, H, G, N, D = 2, 4, 2, 32, 8


@pytest.fixture(autouse=True)
def _planned() -> Iterator[None]:
    """On the CPU the pass asks for copies of a size that toys do not have."""
    with planned_for(torch.device("cuda", 0)):
        yield


class Projections(nn.Module):
    """Queries, keys and values of one token, and the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(H * D, H * D, bias=False)
        self.k = nn.Linear(H * D, G * D, bias=False)
        self.v = nn.Linear(H * D, G * D, bias=False)
        self.o = nn.Linear(H * D, H * D, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (p(x).view(B, 1, -1, D).transpose(1, 2) for p in (self.q, self.k, self.v))
        return q, k, v

    def out(self, y: Tensor) -> Tensor:
        found: Tensor = self.o(y.transpose(1, 2).reshape(B, 1, H * D))
        return found


class StaticLayer(Projections):
    """As transformers writes it: the length is a tensor, the mask compares places with positions."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        q, k, v = self.project(x)
        queries = torch.arange(1) + length
        mask = (torch.arange(N)[None, None, None, :] <= queries[None, None, :, None]).expand(
            B, -1, 1, N
        )
        positions = torch.arange(1) + length
        length.add_(1)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        wide = [
            t[:, :, None, :, :].expand(B, G, H // G, N, D).reshape(B, H, N, D)
            for t in (keys, values)
        ]
        return self.out(
            F.scaled_dot_product_attention(
                q, *wide, attn_mask=mask, dropout_p=0.0, scale=0.5, is_causal=False
            )
        )


class BufferLayer(Projections):
    """As gpt-fast writes it: buffers of the module, a row of a mask that is a buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(B, G, N, D))
        self.register_buffer("v_cache", torch.zeros(B, G, N, D))
        self.register_buffer("causal", torch.tril(torch.ones(N, N, dtype=torch.bool)))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.project(x)
        mask = self.causal[None, None, positions]
        self.k_cache[:, :, positions] = k
        self.v_cache[:, :, positions] = v
        wide = [t.repeat_interleave(H // G, dim=1) for t in (self.k_cache, self.v_cache)]
        return self.out(F.scaled_dot_product_attention(q, *wide, attn_mask=mask, dropout_p=0.0))


def run(layer: nn.Module, *given: Tensor) -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled: Any = torch.compile(
        layer, backend="memeff", options={"memeff.inner": "eager"}, fullgraph=True
    )
    with torch.no_grad():
        compiled(torch.ones(B, 1, H * D), *given)


def after() -> str:
    (graph,) = memeff_compile.graphs()
    return graph.after


def report() -> str:
    """Return the report's text without source lines and times."""
    graphs = [
        replace(g, seconds=0.0, records=tuple(replace(r, source="") for r in g.records))
        for g in memeff_compile.last_report().graphs
    ]
    return replace(memeff_compile.last_report(), graphs=tuple(graphs)).details()


def test_static_cache_layer() -> None:
    caches = torch.zeros(B, G, N, D), torch.zeros(B, G, N, D)
    run(StaticLayer(), *caches, torch.tensor(5))
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    x: input f32[2, 1, 32],
    q.weight: param f32[32, 32],
    k.weight: param f32[16, 32],
    v.weight: param f32[16, 32],
    length: input i64[],
    keys: input f32[2, 2, 32, 8],
    values: input f32[2, 2, 32, 8],
    o.weight: param f32[32, 32],
):
    %0: f32[2, 1, 32] = aten.linear(x, q.weight)
    %1: f32[2, 1, 4, 8] = aten.view(%0, [2, 1, -1, 8])
    %2: f32[2, 4, 1, 8] = aten.transpose(%1, 1, 2)
    %3: f32[2, 1, 16] = aten.linear(x, k.weight)
    %4: f32[2, 1, 2, 8] = aten.view(%3, [2, 1, -1, 8])
    %5: f32[2, 2, 1, 8] = aten.transpose(%4, 1, 2)
    %6: f32[2, 1, 16] = aten.linear(x, v.weight)
    %7: f32[2, 1, 2, 8] = aten.view(%6, [2, 1, -1, 8])
    %8: f32[2, 2, 1, 8] = aten.transpose(%7, 1, 2)
    %9: i64[1] = aten.arange(1)
    %10: i64[1] = aten.add(%9, length)
    %11: i64[32] = aten.arange(32)
    %12: i64[1, 1, 1, 32] = aten.unsqueeze(aten.unsqueeze(aten.unsqueeze(%11, 0), 1), 2)
    %13: i64[1, 1, 1, 1] = aten.unsqueeze(aten.unsqueeze(aten.unsqueeze(%10, 0), 1), 3)
    %14: i64[1] = aten.arange(1)
    %15: i64[1] = aten.add(%14, length)
    %16: i64[] = add_(length, 1)
    %17: none = memeff.kv_cache_append(keys, values, %5, %8, %15)
    %18: i64[1, 1] = aten.squeeze(%13, [1, 3])
    %19: f32[2, 4, 1, 8] = memeff.kv_cache_attention(%2, keys, values, %18, scale=0.5)
    %20: f32[2, 1, 4, 8] = aten.transpose(%19, 1, 2)
    %21: f32[2, 1, 32] = aten.reshape(%20, [2, 1, 32])
    %22: f32[2, 1, 32] = aten.linear(%21, o.weight)
    return (%22)""",
    )


def test_static_cache_report() -> None:
    caches = torch.zeros(B, G, N, D), torch.zeros(B, G, N, D)
    run(StaticLayer(), *caches, torch.tensor(5))
    expecttest.assert_expected_inline(
        report(),
        """\
memeff_compile: 1 graph, 1 change, 15.7 KiB never allocated

graph 0/0 (inference, 40 nodes, our passes 0 ms)
  rewrote    rewrite_kv_update
             Attention over a cache of 32 keys -> memeff::kv_cache_attention, which reads up to
             the query's position; engine split: the filled keys split over programs, query heads
             of one key-value head in one tile, two Triton kernels (CUDA, compute capability 8.0
             or later; bf16, fp16, fp32).
             Saves 15.7 KiB (16.0 KiB before, 320 bytes after): 8*B*D*H*N - 4*B*H*M*S*(D + 2)
             bytes with B = 2, D = 8, H = 4, M = 1, N = 32, S = 1.""",
    )


def test_buffer_layer() -> None:
    run(BufferLayer(), torch.tensor([5]))
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    x: input f32[2, 1, 32],
    q.weight: param f32[32, 32],
    k.weight: param f32[16, 32],
    v.weight: param f32[16, 32],
    causal: buffer b8[32, 32],
    positions: input i64[1],
    k_cache: buffer f32[2, 2, 32, 8],
    v_cache: buffer f32[2, 2, 32, 8],
    o.weight: param f32[32, 32],
):
    %0: f32[2, 1, 32] = aten.linear(x, q.weight)
    %1: f32[2, 1, 4, 8] = aten.view(%0, [2, 1, -1, 8])
    %2: f32[2, 4, 1, 8] = aten.transpose(%1, 1, 2)
    %3: f32[2, 1, 16] = aten.linear(x, k.weight)
    %4: f32[2, 1, 2, 8] = aten.view(%3, [2, 1, -1, 8])
    %5: f32[2, 2, 1, 8] = aten.transpose(%4, 1, 2)
    %6: f32[2, 1, 16] = aten.linear(x, v.weight)
    %7: f32[2, 1, 2, 8] = aten.view(%6, [2, 1, -1, 8])
    %8: f32[2, 2, 1, 8] = aten.transpose(%7, 1, 2)
    %9: b8[1, 1, 1, 32] = aten.index(aten.unsqueeze(aten.unsqueeze(causal, 0), 1), [None, None, positions])
    %10: none = memeff.kv_cache_append(k_cache, v_cache, %5, %8, positions)
    %11: i64[1, 1] = memeff.kv_cache_last(%9)
    %12: f32[2, 4, 1, 8] = memeff.kv_cache_attention(%2, k_cache, v_cache, %11, %9)
    %13: f32[2, 1, 4, 8] = aten.transpose(%12, 1, 2)
    %14: f32[2, 1, 32] = aten.reshape(%13, [2, 1, 32])
    %15: f32[2, 1, 32] = aten.linear(%14, o.weight)
    return (%15)""",
    )


class Stack(nn.Module):
    """A decoding model: layers of one kind, each with separate buffers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BufferLayer() for _ in range(count))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions)
        return x


def test_many_layers_are_one_entry_and_the_json_has_each() -> None:
    run(Stack(12), torch.tensor([3]))
    found = memeff_compile.last_report()
    assert found.rewrites("rewrite_kv_update") == 12
    assert len(str(found).splitlines()) == 3
    assert len(found.details().splitlines()) <= 20
    assert "rewrite_kv_update in layers.0 and 11 more" in found.details()
    records = json.loads(found.to_json())["graphs"][0]["records"]
    assert [r["module"] for r in records] == [f"layers.{n}" for n in range(12)]
