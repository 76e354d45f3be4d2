"""rewrite_kv_update: rewrites, declines, skipped caches, and eager's numbers.

On the CPU the pass requires copies of a size that toys do not have. Most tests plan for a GPU, so
that it applies to toys, and run the rewritten graph on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import memeff_compile
from memeff_compile import compat
from memeff_compile.kernels.device import planned_for
from memeff_compile.kernels.kv_cache import reference
from memeff_compile.options import Options
from memeff_compile.passes import PASSES, rewrite_kv_update
from memeff_compile.passes.graph import pipeline
from memeff_compile.passes.graph.graph_info import written_by
from memeff_compile.report import Record
from tests.support.captured_graphs import capture
from tests.support.closeness import needs_compiler

NAME = "rewrite_kv_update"
B, H, G, N, D = 2, 4, 2, 24, 8
FIRED = [("rewrote", "rewrote")]
PLANNED = torch.device("cuda", 0)


@pytest.fixture
def planned() -> Iterator[None]:
    with planned_for(PLANNED):
        yield


def inputs(queries: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return q, k, v, half-filled caches of keys and values, and positions."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(B, heads, queries, D) for heads in (H, G, G)] + [(B, G, N, D)] * 2
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    for cache in tensors[3:]:
        cache[:, :, 12:] = 0
    return (*(t.to(dtype) for t in tensors), torch.arange(12, 12 + queries))


def records() -> list[Record]:
    found = memeff_compile.last_report().records
    assert not [r for r in found if r.action == "internal_error"], str(found)
    return [r for r in found if r.pass_name == NAME]


def run(
    function: Callable[..., Any],
    *given: Tensor,
    options: dict[str, Any] | None = None,
    inner: str = "eager",
    grad: bool = False,
    tolerance: float = 2e-6,
    steps: int = 1,
    **settings: Any,
) -> list[tuple[str, str]]:
    """Run eagerly and compiled on copies; outputs and everything written must agree."""
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(
        function,
        backend="memeff",
        options={"memeff.inner": inner, **(options or {})},
        fullgraph=True,
        **settings,
    )
    results = []
    for each in (function, compiled):
        copies = [t.clone() for t in given]
        with torch.set_grad_enabled(grad):
            outputs = [each(*copies) for _ in range(steps)]
        results.append(torch.utils._pytree.tree_leaves((outputs, copies)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return [(r.action, r.code) for r in records()]


def after() -> str:
    (graph,) = memeff_compile.graphs()
    return graph.after


# --- rewrites -------------------------------------------------------------------------------------


def repeat(cache: Tensor) -> Tensor:
    return cache[:, :, None, :, :].expand(B, G, H // G, N, D).reshape(B, H, N, D)


def visible(positions: Tensor) -> Tensor:
    """Return the mask that transformers builds for a StaticCache: (B, 1, M, N)."""
    keys, queries = torch.arange(N) + 0, positions
    mask = keys[None, None, None, :] <= queries[None, None, :, None]
    return mask.expand(B, -1, queries.shape[0], N)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **settings: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)


def static_cache(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    mask = visible(p)
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return attend(q, repeat(kc), repeat(vc), mask, scale=0.3, is_causal=False, dropout_p=0.0)


def buffers(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc[:, :, p] = k
    vc[:, :, p] = v
    keys, values = kc.repeat_interleave(H // G, dim=1), vc.repeat_interleave(H // G, dim=1)
    return attend(q, keys, values, torch.arange(N)[None, :] <= p[:, None])


def results_of_index_copy(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    keys, values = kc.index_copy_(2, p, k), vc.index_copy_(2, p, v)
    return attend(q, repeat(keys), repeat(values), visible(p))


def grouped(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(-2, p, k)
    vc.index_copy_(-2, p, v)
    return attend(q, kc, vc, p[None, None, :, None] >= torch.arange(N), enable_gqa=True)


def strictly_below(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc[..., p, :] = k
    vc[..., p, :] = v
    mask = torch.arange(0, N) < (p + 1).view(1, 1, -1, 1)
    return attend(q, repeat(kc), repeat(vc), mask)


def strictly_above(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc[:, :, p, :] = k
    vc[:, :, p, :] = v
    mask = (p + 1)[:, None] > torch.arange(0, N, 1)
    return attend(q, repeat(kc), repeat(vc), mask.contiguous())


def per_sequence(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    starts = torch.arange(B)[:, None, None, None]
    mask = torch.arange(N)[None, None, None] <= p[None, None, :, None] - starts
    return attend(q, repeat(kc), repeat(vc), mask)


JOINED = [
    static_cache,
    buffers,
    results_of_index_copy,
    grouped,
    strictly_below,
    strictly_above,
    per_sequence,
]


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("function", JOINED, ids=lambda f: f.__name__)
def test_update_and_read_become_two_ops_and_equal_eager(
    function: Callable[..., Any], queries: int
) -> None:
    assert run(function, *inputs(queries)) == FIRED
    text = after()
    assert text.count("memeff.kv_cache_append(") == 1
    assert text.count("memeff.kv_cache_attention(") == 1
    for gone in ("index_copy_", "setitem", "repeat_interleave", "expand", "scaled_dot"):
        assert gone not in text, text
    assert f"b8[{B}, 1" not in text, "the mask is still built"


def masked(mask: Tensor) -> Callable[..., Any]:
    def step(
        q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor, m: Tensor
    ) -> Tensor:
        kc.index_copy_(2, p, k)
        vc.index_copy_(2, p, v)
        return attend(q, repeat(kc), repeat(vc), m)

    return step


def a_mask(kind: str, queries: int) -> Tensor:
    seen = torch.arange(N) <= torch.arange(12, 12 + queries)[:, None]
    if kind == "left padding":
        return (seen & (torch.arange(N) >= torch.tensor([0, 5])[:, None, None]))[:, None]
    if kind == "window":
        return (seen & (torch.arange(N) > torch.arange(8, 8 + queries)[:, None]))[None, None]
    if kind == "nothing seen":
        return (seen & (torch.tensor([True, False])[:, None, None]))[:, None]
    return torch.rand(B, 1, queries, N, generator=torch.Generator().manual_seed(1)) < 0.5


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["left padding", "window", "holes", "nothing seen"])
def test_any_boolean_mask_from_outside_is_served(kind: str, queries: int) -> None:
    mask = a_mask(kind, queries)
    assert run(masked(mask), *inputs(queries), mask) == FIRED
    assert after().count("memeff.kv_cache_last(") == 1


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("form", ["positions", "mask"])
def test_layers_share_the_mask(form: str) -> None:
    start, k, v, kc, vc, p = inputs()

    def two(kc1: Tensor, vc1: Tensor, kc2: Tensor, vc2: Tensor, m: Tensor) -> Tensor:
        q = start
        mask = visible(p) if form == "positions" else m
        for kc, vc in ((kc1, vc1), (kc2, vc2)):
            kc.index_copy_(2, p, k)
            vc.index_copy_(2, p, v)
            q = attend(q, repeat(kc), repeat(vc), mask)
        return q

    assert run(two, kc, vc, 2 * kc, 2 * vc, a_mask("holes", 1)) == 2 * FIRED
    assert after().count("memeff.kv_cache_append(") == 2
    assert after().count("memeff.kv_cache_last(") == (form == "mask")


def turned_layout(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    """Caches of (B, N, G, D)."""
    kc, vc = kc.view(B, N, G, D), vc.view(B, N, G, D)
    kc[:, p] = k.transpose(1, 2)
    vc.index_copy_(1, p, v.transpose(1, 2))
    return attend(q, kc.transpose(1, 2), vc.transpose(1, 2), visible(p), enable_gqa=True)


def written_apart(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    total = kc.sum()
    vc.index_copy_(2, p, v)
    return attend(q, repeat(kc), repeat(vc), visible(p)) + total


def other_positions(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p + 1, v)
    return attend(q, repeat(kc), repeat(vc), visible(p))


def one_token_by_slice(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    kc[:, :, 12 : 12 + k.shape[2]] = k
    vc[:, :, 12 : 12 + k.shape[2]].copy_(v)
    return attend(q, repeat(kc), repeat(vc), visible(p))


def copy_used_twice(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    written, values = kc.index_copy_(2, p, k), vc.index_copy_(2, p, v)
    keys = repeat(written)
    return attend(q, keys, repeat(values), visible(p)).sum() + keys.sum()


def counted_in_eight_bits(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    """Not a count of the keys where there are more than 127: the mask is taken as it is."""
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    counted = torch.arange(N).to(torch.int8).long()
    return attend(q, repeat(kc), repeat(vc), (counted <= p[:, None])[None, None])


def counted_from_one(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    mask = torch.arange(1, N + 1) <= p[:, None]
    return attend(q, repeat(kc), repeat(vc), mask[None, None])


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("function", [counted_in_eight_bits, counted_from_one])
def test_what_only_looks_like_a_count_goes_to_the_op_as_a_mask(
    function: Callable[..., Any],
) -> None:
    assert run(function, *inputs(3)) == FIRED
    assert after().count("memeff.kv_cache_last(") == 1


APART = [turned_layout, written_apart, other_positions, one_token_by_slice, copy_used_twice]


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("function", APART, ids=lambda f: f.__name__)
def test_writes_that_cannot_be_joined_stay_as_they_are(
    function: Callable[..., Any], queries: int
) -> None:
    assert run(function, *inputs(queries)) == FIRED
    assert "kv_cache_append" not in after()
    assert "kv_cache_attention" in after()


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_a_cache_fills_up_without_recompiling(inner: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            *_, kc, vc, _ = inputs()
            self.register_buffer("k_cache", torch.zeros_like(kc))
            self.register_buffer("v_cache", torch.zeros_like(vc))
            self.register_buffer("length", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            p = torch.arange(1) + self.length
            mask = visible(p)
            self.length.add_(1)
            self.k_cache.index_copy_(2, p, x[:, :G])
            self.v_cache.index_copy_(2, p, x[:, :G] * 2)
            return attend(x, repeat(self.k_cache), repeat(self.v_cache), mask)

    torch._dynamo.reset()
    memeff_compile.reset()
    eager, ours = Layer(), Layer()
    pointers = [t.data_ptr() for t in ours.buffers()]
    compiled = torch.compile(ours, backend="memeff", options={"memeff.inner": inner})
    with torch.no_grad():
        for step in range(N):
            x = torch.randn(B, H, 1, D, generator=torch.manual_seed(step))
            torch.testing.assert_close(compiled(x), eager(x))
    for found, expected in zip(ours.buffers(), eager.buffers(), strict=True):
        assert torch.equal(found, expected)
    assert [t.data_ptr() for t in ours.buffers()] == pointers
    assert len(memeff_compile.graphs()) == 1
    assert [(r.action, r.code) for r in records()] == FIRED


@pytest.mark.usefixtures("planned")
def test_dynamic_batch_is_served() -> None:
    def step(q: Tensor, k: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
        kc.index_copy_(2, p, k)
        vc.index_copy_(2, p, k)
        mask = torch.arange(N)[None, None, None] <= p[None, None, :, None]
        return attend(q, kc, vc, mask, enable_gqa=True)

    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(step, backend="memeff", options={"memeff.inner": "eager"})
    with torch.no_grad():
        for batch in (2, 3, 5):
            sizes = [(batch, H, 1, D), (batch, G, 1, D), (batch, G, N, D), (batch, G, N, D)]
            given = [torch.randn(size) for size in sizes]
            copies = [t.clone() for t in given]
            positions = torch.tensor([4])
            torch.testing.assert_close(compiled(*given, positions), step(*copies, positions))
    assert len(memeff_compile.graphs()) == 2
    assert [(r.action, r.code) for r in records()] == 2 * FIRED


@pytest.mark.usefixtures("planned")
def test_everything_dynamic_is_served() -> None:
    """Sizes, the scale and the dropout are symbols; another scale is another graph."""

    class Layer(nn.Module):
        scale, dropout = 0.41, 0.0

        def forward(self, q: Tensor, k: Tensor, kc: Tensor, p: Tensor) -> Tensor:
            kc.index_copy_(2, p, k)
            b, g, n, d = kc.shape
            keys = kc[:, :, None].expand(b, g, H // G, n, d).reshape(b, g * (H // G), n, d)
            mask = torch.arange(n)[None, None, None] <= p[None, None, :, None]
            return attend(q, keys, keys, mask, scale=self.scale, dropout_p=self.dropout)

    layer = Layer()
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "eager"}
    compiled = torch.compile(layer, backend="memeff", options=options, dynamic=True)
    with torch.no_grad():
        for length, layer.scale in ((24, 0.41), (32, 0.41), (40, 0.17)):
            q, k, cache = (torch.randn(B, h, n, D) for h, n in ((H, 1), (G, 1), (G, length)))
            given, positions = (q, k, cache), torch.tensor([4])
            wanted = layer(*(t.clone() for t in given), positions)
            torch.testing.assert_close(compiled(*given, positions), wanted)
    assert {(r.action, r.code) for r in records()} == set(FIRED)
    assert len(memeff_compile.graphs()) <= 3


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_no_further_from_fp64_than_eager(dtype: torch.dtype) -> None:
    given = inputs(dtype=dtype)
    compiled = torch.compile(static_cache, backend="memeff", options={"memeff.inner": "eager"})
    with torch.no_grad():
        truth = static_cache(*(t.double() if t.is_floating_point() else t for t in given))
        eager = static_cache(*(t.clone() for t in given))
        ours = compiled(*(t.clone() for t in given))
    assert ours.dtype == dtype
    assert (ours - truth).norm() <= 1.1 * (eager - truth).norm() + 1e-3 * truth.norm()


@needs_compiler
@pytest.mark.usefixtures("planned", "inductors_loops")
def test_inductor_writes_in_place_and_hands_the_cache_itself_to_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    attend_by_reference = reference.attend

    def spy(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
        seen.extend((k_cache.data_ptr(), v_cache.data_ptr()))
        return attend_by_reference(q, k_cache, v_cache, *rest)

    monkeypatch.setattr(reference, "attend", spy)
    given = inputs()
    copies = [t.clone() for t in given]
    torch._dynamo.reset()
    compiled = torch.compile(static_cache, backend="memeff")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), static_cache(*copies))
    assert seen == [given[3].data_ptr(), given[4].data_ptr()]
    assert torch.equal(given[3], copies[3])
    assert torch.equal(given[4], copies[4])


# --- declines -------------------------------------------------------------------------------------


WEIGHT = nn.Parameter(torch.ones(()))


def with_gradient(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return attend(q * WEIGHT, repeat(kc), repeat(vc), visible(p)).detach()


def under_autocast(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return static_cache(q, k, v, kc, vc, p)


def with_dropout(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return attend(q, repeat(kc), repeat(vc), visible(p), dropout_p=0.5)[..., :0]


def causal(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return F.scaled_dot_product_attention(q, repeat(kc), repeat(vc), is_causal=True)


def without_mask(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return F.scaled_dot_product_attention(q, repeat(kc), repeat(vc))


def additive_mask(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    mask = torch.where(visible(p), 0.0, -1e9).to(q.dtype)
    return attend(q, repeat(kc), repeat(vc), mask)


def mask_per_head(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    heads = torch.arange(H)[None, :, None, None] >= 0
    return attend(q, repeat(kc), repeat(vc), visible(p) & heads)


WIDE = [torch.zeros(B, G, N, D, dtype=torch.float64) for _ in range(2)]
NARROW = torch.zeros(B, G, N, 4)


def cache_of_another_dtype(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    keys, values = WIDE
    keys.index_copy_(2, p, k.double())
    values.index_copy_(2, p, v.double())
    return attend(q, repeat(keys).float(), repeat(values).float(), visible(p))


def sliced_cache(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    keys, values = repeat(kc)[:, :, :20], repeat(vc)[:, :, :20]
    return attend(q, keys, values, visible(p)[..., :20])


def heads_in_turn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    """Repeats all heads after one another, where repeat_kv repeats each."""
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return attend(q, kc.repeat(1, H // G, 1, 1), vc.repeat(1, H // G, 1, 1), visible(p))


def cache_written_while_it_is_read(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    keys, values = repeat(kc), repeat(vc)
    kc.mul_(2)
    return attend(q, keys, values, visible(p))


def positions_moved_on(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    mask = torch.arange(N)[None, None, None] <= p[None, None, :, None]
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    p.add_(1)
    return attend(q, repeat(kc), repeat(vc), mask)


def keys_alone(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    """Values of another depth, as in latent attention."""
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return attend(q, repeat(kc), repeat(vc)[..., :4].contiguous(), visible(p))


def values_of_another_depth(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    kc.index_copy_(2, p, k)
    NARROW.index_copy_(2, p, v[..., :4])
    return attend(q, kc, NARROW, visible(p), enable_gqa=True)


DECLINED = [
    (with_gradient, "needs_gradient"),
    (under_autocast, "autocast"),
    (with_dropout, "attention_setting(dropout_p)"),
    (causal, "attention_setting(is_causal)"),
    (without_mask, "no_mask"),
    (additive_mask, "mask_form"),
    (mask_per_head, "mask_form"),
    (cache_of_another_dtype, "cache_form"),
    (sliced_cache, "cache_form"),
    (heads_in_turn, "cache_form"),
    (keys_alone, "cache_form"),
    (values_of_another_depth, "unsupported"),
    (cache_written_while_it_is_read, "mutated"),
    (positions_moved_on, "mutated"),
]


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    ("function", "code"), DECLINED, ids=lambda v: v if isinstance(v, str) else v.__name__
)
def test_what_cannot_be_served_is_declined_and_left_as_it_was(
    function: Callable[..., Any], code: str
) -> None:
    tolerance = 1e-2 if function is under_autocast else 2e-6
    grad = function is with_gradient
    assert run(function, *inputs(), grad=grad, tolerance=tolerance) == [("declined", code)]
    (graph,) = memeff_compile.graphs()
    assert graph.after == graph.before


@pytest.mark.usefixtures("planned")
def test_a_prefill_is_declined() -> None:
    def prefill(kc: Tensor, vc: Tensor, x: Tensor, p: Tensor) -> Tensor:
        kc.index_copy_(2, p, x)
        vc.index_copy_(2, p, x)
        mask = torch.arange(80) <= p[:, None]
        return F.scaled_dot_product_attention(x, kc, vc, attn_mask=mask)

    kc, x = torch.zeros(1, 2, 80, 8), torch.randn(1, 2, 65, 8)
    found = run(prefill, kc, kc, x, torch.arange(65), tolerance=1e-5)
    assert found == [("declined", "many_queries")]


def test_without_a_kernel_small_copies_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(static_cache, *inputs()) == [("declined", "no_gain")]
    assert run(grouped, *inputs()) == [("declined", "no_gain")]
    bytes_copied = 2 * B * H * N * D * 4
    monkeypatch.setattr(rewrite_kv_update, "MIN_COPIED_BYTES", bytes_copied)
    assert run(static_cache, *inputs()) == FIRED
    assert run(grouped, *inputs()) == [("declined", "no_gain")], "nothing is copied there"
    monkeypatch.setattr(rewrite_kv_update, "MIN_COPIED_BYTES", bytes_copied + 1)
    assert run(static_cache, *inputs()) == [("declined", "no_gain")]


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"memeff.kv_reads": "off"}, []),
        ({"memeff.skip": {NAME: "layer"}}, [("declined", "skipped")]),
        ({"memeff.skip": {"defer_logits": "layer"}}, FIRED),
        ({"memeff.strict": NAME}, FIRED),
    ],
    ids=str,
)
def test_options_are_followed(options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, *given: Tensor) -> Tensor:
            return self.layer(*given)

    class Layer(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return static_cache(*given)

    assert run(Model(), *inputs(), options=options) == expected


@pytest.mark.usefixtures("planned")
def test_strict_raises_for_what_is_declined_and_not_for_training() -> None:
    options = {"memeff.strict": NAME}
    with pytest.raises(BackendCompilerFailed, match=r"StrictError(.|\n)*no_mask"):
        run(without_mask, *inputs(), options=options)
    assert run(lambda x: (x * WEIGHT).sum(), torch.ones(3), options=options, grad=True) == []


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_verify_finds_the_same_numbers(inner: str) -> None:
    options = {"memeff.verify": "raise"}
    assert run(static_cache, *inputs(), options=options, inner=inner, steps=2) == FIRED


# --- skipped without a record ---------------------------------------------------------------------


def fresh_keys(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return attend(q, k, v, torch.ones(1, 1, dtype=torch.bool), enable_gqa=True)


def growing_cache(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor) -> Tensor:
    keys, values = torch.cat((kc, k), 2), torch.cat((vc, v), 2)
    return attend(q, keys, values, torch.ones(1, N + 1, dtype=torch.bool), enable_gqa=True)


def written_in_place_but_not_a_cache(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    """As a rotary embedding that writes to its keys."""
    keys, values = k * 2, v * 2
    keys[..., :4] = 0
    values[..., :4] = 0
    return attend(q, keys, values, torch.ones(1, 1, dtype=torch.bool), enable_gqa=True)


def cache_that_is_only_read(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    """As in cross-attention."""
    return attend(q, repeat(kc), repeat(vc), visible(p))


def written_after_attention(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, p: Tensor
) -> Tensor:
    found = attend(q, repeat(kc), repeat(vc), visible(p))
    kc.index_copy_(2, p, k)
    vc.index_copy_(2, p, v)
    return found


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    "function",
    [
        fresh_keys,
        growing_cache,
        written_in_place_but_not_a_cache,
        cache_that_is_only_read,
        written_after_attention,
    ],
    ids=lambda f: f.__name__,
)
def test_other_attention_is_left_alone(function: Callable[..., Any]) -> None:
    assert run(function, *inputs()) == []


# --- the graph ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("planned")
def test_every_write_survives_the_passes() -> None:
    """Their results have no users: a dead-code elimination would freeze the cache."""
    for function, writes in ((static_cache, 1), (written_apart, 2), (without_mask, 2)):
        with torch.no_grad():
            gm = capture(function, *inputs())
            pipeline.run(gm, PASSES, Options())
        assert sum(bool(written_by(n)) for n in gm.graph.nodes) == writes
        gm.graph.lint()


@pytest.mark.usefixtures("planned")
def test_a_second_run_changes_nothing() -> None:
    with torch.no_grad():
        gm = capture(static_cache, *inputs())
        assert pipeline.run(gm, PASSES, Options()).changed
        again = pipeline.run(gm, PASSES, Options())
    assert not again.changed
    assert not again.report.records


@pytest.mark.usefixtures("planned")
def test_a_refused_edit_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from memeff_compile.passes.graph.editor import Editor, EditRefused

    def refuse(self: Editor, old: Any, new: Any) -> None:
        raise EditRefused("no")

    monkeypatch.setattr(Editor, "replace", refuse)
    for function in (static_cache, results_of_index_copy):
        assert run(function, *inputs()) == [("declined", "edit_refused")]
        (graph,) = memeff_compile.graphs()
        assert graph.after == graph.before


def advised(monkeypatch: pytest.MonkeyPatch, given: Sequence[Tensor], **options: Any) -> Any:
    """Return Inductor's tuning settings when one step of ``given`` is compiled."""
    told: list[dict[str, Any]] = []

    def inner(gm: Any, example_inputs: Any, patches: dict[str, Any], tag: str) -> Any:
        told.append(patches)
        return gm.forward

    monkeypatch.setattr(compat, "compile_with_inductor", inner)
    torch._dynamo.reset()
    torch.compile(static_cache, backend="memeff", options=options or None)(*given)
    (patches,) = told
    return patches.get("coordinate_descent_tuning")


def test_one_token_at_a_time_has_inductor_tune_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [t.clone() for t in inputs()]
    one = [t[:1].clone() if t.dim() == 4 else t.clone() for t in wide]
    monkeypatch.setattr(sys.modules[__name__], "B", 1)
    assert advised(monkeypatch, one) is None, "the CPU's products are not Inductor's to tune"
    with planned_for(PLANNED):
        assert advised(monkeypatch, one) is True
        assert "one token: Inductor tunes its kernels" in records()[0].sentence
        assert advised(monkeypatch, one, coordinate_descent_tuning=False) is False
        monkeypatch.setattr(sys.modules[__name__], "B", 2)
        assert advised(monkeypatch, wide) is None


@pytest.mark.usefixtures("planned")
def test_the_report_names_engine_and_bytes() -> None:
    run(static_cache, *inputs())
    (record,) = records()
    assert "reads up to the query's position; engine split" in record.sentence
    assert record.bytes_before is not None
    sizes = {s: record.sizes[s.name] for s in record.bytes_before.free_symbols}
    assert record.bytes_before.subs(sizes) == 2 * B * H * N * D * 4
