"""compress_kv_cache: rewrites of attention over a dense view, every decline, eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.kernels.coded_kv_cache import (
    Layout,
    coded_kv_cache_append,
    coded_kv_cache_view,
)
from tests.support.coded_caches import allocate, draw

NAME = "compress_kv_cache"
LAYOUT = Layout(16, 4, group=16, recent=16, kept=2)
FIRED = [("rewrote", "rewrote")]
TOKENS = 60
MASK = torch.arange(TOKENS)[None, None, None] <= torch.tensor([50, 40])[:, None, None, None]


def cache() -> list[Tensor]:
    pool = allocate(LAYOUT, 2, 2, TOKENS, torch.float32)
    coded_kv_cache_append(*pool, *draw(2, 2, 50, 16, torch.float32), 4, 16, TOKENS)
    return pool


def step(pool: list[Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    coded_kv_cache_append(*pool, k, v, 4, 16, TOKENS)
    keys, values = coded_kv_cache_view(*pool, None, None, 4, TOKENS)
    return keys, values


def repeated(x: Tensor) -> Tensor:
    return x[:, :, None].expand(2, 2, 3, TOKENS, 16).reshape(2, 6, TOKENS, 16)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask, **given)


def run(
    function: Callable[..., Any],
    *more: Any,
    queries: int = 1,
    heads: int = 6,
    grad: bool = False,
    options: dict[str, Any] | None = None,
) -> list[tuple[str, str]]:
    """Run a step eagerly and compiled on separate caches; compare, and return the records."""
    torch._dynamo.reset()
    memeff_compile.reset()
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, heads, queries, 16, generator=generator).requires_grad_(grad)
    k, v = torch.randn(2, 2, 2, 1, 16, generator=generator).unbind(0)
    pools = [cache(), cache()]
    settings = {"memeff.inner": "eager", **(options or {})}
    compiled = torch.compile(function, backend="memeff", fullgraph=True, options=settings)
    with torch.set_grad_enabled(grad):
        expected = function(pools[0], q, k, v, *more)
        found = compiled(pools[1], q, k, v, *more)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    for a, b in zip(*pools, strict=True):
        assert torch.equal(a, b)
    report = memeff_compile.last_report()
    assert not [r for r in report.records if r.action in ("internal_error", "failed")], (
        report.details()
    )
    return [(r.action, r.code) for r in report.records if r.pass_name == NAME]


def plain(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor, *rest: Any, **given: Any) -> Tensor:
    mask = rest[0] if rest else MASK
    return attention(q, *step(pool, k, v), mask, **given)


def test_attention_reads_the_codes_and_the_append_stays() -> None:
    assert run(plain) == FIRED
    after = memeff_compile.graphs()[-1].after
    assert after.count("memeff.coded_kv_cache_attention(") == 1
    assert after.index("coded_kv_cache_append(") < after.index("coded_kv_cache_attention(")
    assert "coded_kv_cache_view(" not in after
    assert "expand(" not in after
    (record,) = memeff_compile.last_report().records
    assert record.bytes_saved is not None
    assert record.bytes_saved == 2 * 4 * 2 * (2 + 6) * TOKENS * 16


SPELLINGS: dict[str, Callable[..., Any]] = {
    "grouped": lambda p, q, k, v: F.scaled_dot_product_attention(
        q, *step(p, k, v), attn_mask=MASK, enable_gqa=True
    ),
    "repeat_interleave": lambda p, q, k, v: F.scaled_dot_product_attention(
        q, *(t.repeat_interleave(3, 1) for t in step(p, k, v)), attn_mask=MASK
    ),
    "scale": lambda p, q, k, v: plain(p, q, k, v, scale=0.3),
    "one mask for all": lambda p, q, k, v: plain(p, q, k, v, MASK[:1]),
    "two layers": lambda p, q, k, v: plain(p, plain(p, q, k, v), k, v),
}


@pytest.mark.parametrize("spelling", list(SPELLINGS))
def test_every_spelling_is_read(spelling: str) -> None:
    assert run(SPELLINGS[spelling]) == FIRED * (2 if spelling == "two layers" else 1)


def with_another_use(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = step(pool, k, v)
    return attention(q, keys, values, MASK), keys.sum()


def with_a_write(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = step(pool, k, v)
    keys.mul_(2)
    return attention(q, keys, values, MASK)


def with_a_later_append(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = step(pool, k, v)
    coded_kv_cache_append(*pool, k, v, 4, 16, TOKENS)
    return attention(q, keys, values, MASK)


def with_crossed_parts(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = step(pool, k, v)
    return attention(q, values, keys, MASK)


def by_hand(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (repeated(t) for t in step(pool, k, v))
    score = (q @ keys.transpose(2, 3) / 4).masked_fill(~MASK, -torch.inf)
    return score.softmax(-1) @ values


def without_a_mask(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, *step(pool, k, v), None)


def under_autocast(pool: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = step(pool, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        return attention(q, keys, values, MASK).float()


DECLINED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "view_used(sum)": (with_another_use, {}),
    "mutated": (with_a_later_append, {}),
    "other_operands": (with_crossed_parts, {}),
    "no_attention": (by_hand, {}),
    "no_mask": (without_a_mask, {}),
    "autocast": (under_autocast, {}),
    "needs_gradient": (plain, {"grad": True}),
    "many_queries": (plain, {"queries": 3}),
    "attention_setting(is_causal)": (
        lambda p, q, k, v: plain(p, q, k, v, None, is_causal=True),
        {},
    ),
    "mask_form": (lambda p, q, k, v: plain(p, q, k, v, MASK.float()), {}),
    "unsupported": (lambda p, q, k, v: plain(p, q, k, v, MASK.expand(2, 6, 1, TOKENS)), {}),
}


@pytest.mark.parametrize("code", list(DECLINED))
def test_what_cannot_be_served_is_left_alone_and_reported(code: str) -> None:
    function, settings = DECLINED[code]
    assert run(function, **settings) == [("declined", code)]
    after = memeff_compile.graphs()
    assert not after or "coded_kv_cache_attention(" not in after[-1].after


def test_a_write_to_the_view_is_a_use_of_it() -> None:
    ((action, code),) = run(with_a_write)
    assert action == "declined"
    assert code.startswith(("view_used(", "mutated"))


def test_dropout_is_declined() -> None:
    torch.manual_seed(0)
    pool, q = cache(), torch.randn(2, 6, 1, 16)
    k, v = torch.randn(2, 2, 2, 1, 16).unbind(0)
    compiled = torch.compile(
        lambda *given: plain(*given, dropout_p=0.5),
        backend="memeff",
        options={"memeff.inner": "eager"},
    )
    with torch.no_grad():
        compiled(pool, q, k, v)
    found = [r for r in memeff_compile.last_report().records if r.pass_name == NAME]
    assert [(r.action, r.code) for r in found] == [("declined", "attention_setting(dropout_p)")]


def test_the_option_switches_it_off() -> None:
    assert run(plain, options={"memeff.kv_codes": "off"}) == []
