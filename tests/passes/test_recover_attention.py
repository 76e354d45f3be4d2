"""recover_attention: proofs and rewrites, declines, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import compat
from memeff_compile.kernels.device import planned_for
from memeff_compile.passes.attention import torch_kernels
from memeff_compile.report import Record
from tests.support.captured_graphs import compare_with_eager

NAME = "recover_attention"
B, H, G, S, D = 2, 4, 2, 6, 8
REPEATS = H // G


def heads(count: int = H, length: int = S, seed: int = 0, size: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (B, count, length, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def qkv(kv_heads: int = H, queries: int = S, keys: int = S) -> tuple[Tensor, Tensor, Tensor]:
    return heads(H, queries, 1), heads(kv_heads, keys, 2), heads(kv_heads, keys, 3)


def records(report: memeff_compile.Report) -> list[Record]:
    return [r for r in report.records if r.pass_name == NAME]


def run(function: Callable[..., Any], *inputs: Any, **settings: Any) -> list[tuple[str, str]]:
    """Compare with eager, values and gradients; return the pass's records."""
    report = compare_with_eager(function, *inputs, rtol=1e-9, atol=1e-9, **settings).report
    return [(r.action, r.code) for r in records(report)]


def calls() -> list[str]:
    """Return the attention calls of the rewritten graph, without their operands."""
    lines = memeff_compile.graphs()[-1].after.splitlines()
    return [
        line.split("scaled_dot_product_attention(")[1].split(", ", 3)[-1].rstrip(")")
        for line in lines
        if "scaled_dot_product_attention" in line
    ]


FIRED = [("rewrote", "rewrote")]


def repeat_kv(x: Tensor) -> Tensor:
    """As transformers spells it."""
    b, g, s, d = x.shape
    return x[:, :, None, :, :].expand(b, g, REPEATS, s, d).reshape(b, g * REPEATS, s, d)


# --- masks ----------------------------------------------------------------------------------------


def causal(queries: int = S, keys: int = S, offset: int = 0) -> Tensor:
    q = torch.arange(queries)[None, None, :, None] + offset
    return (torch.arange(keys)[None, None, None, :] <= q).expand(B, -1, queries, keys)


def packed_by_default_positions() -> Tensor:
    """As transformers 5.17 spells it without a cache."""
    positions = (torch.arange(S) + 0).unsqueeze(0).expand(B, -1)
    difference = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    sequences = (difference != 1).cumsum(-1)
    rows = torch.arange(B)[:, None, None, None]
    q = torch.arange(S)[None, None, :, None]
    k = torch.arange(S)[None, None, None, :]
    mask = q.new_ones((), dtype=torch.bool) & (k <= q)
    return mask & (sequences[rows, q] == sequences[rows, k])


def by_positions() -> Tensor:
    """As transformers 5.23 spells it: positions are compared, not indices."""
    positions = torch.arange(S).unsqueeze(0).expand(B, -1)
    rows = torch.arange(B)[:, None, None, None]
    q = torch.arange(S)[None, None, :, None]
    k = torch.arange(S)[None, None, None, :]
    return positions[rows, k] <= positions[rows, q]


def by_operators() -> Tensor:
    """Operator methods, as older Dynamo records them."""
    q, k = torch.arange(S).unsqueeze(1), torch.arange(S).unsqueeze(0)
    return k.__le__(q).__and__(k.__ge__(0)).__or__((q.__lt__(0)).__invert__().__invert__())


LOW = torch.finfo(torch.float64).min

CAUSAL: dict[str, Callable[[], Tensor]] = {
    "broadcast": causal,
    "packed by default positions": packed_by_default_positions,
    "by positions": by_positions,
    "by operators": by_operators,
    "tril of ones": lambda: torch.ones(S, S, dtype=torch.bool).tril(),
    "not triu": lambda: ~torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1),
    "window as wide as the sequence": lambda: (
        causal() & (torch.arange(S) > torch.arange(S)[:, None] - S)
    ),
    "additive minimum": lambda: torch.where(causal(), torch.tensor(0.0, dtype=torch.float64), LOW),
    "additive infinity": lambda: torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1),
    "masked_fill": lambda: torch.zeros(B, 1, S, S, dtype=torch.float64).masked_fill(~causal(), LOW),
    "one minus": lambda: (1.0 - causal().to(torch.float64)) * LOW,
    "sum of two": lambda: (
        torch.where(causal(), torch.zeros((), dtype=torch.float64), LOW)
        + torch.zeros(S, S, dtype=torch.float64).masked_fill(~causal(offset=1), LOW)
    ),
}
NOTHING: dict[str, Callable[[], Tensor]] = {
    "every query": lambda: (torch.arange(S)[:, None] >= 0).expand(B, 1, S, S),
    "ones": lambda: torch.ones(B, 1, S, S, dtype=torch.bool),
    "zeros": lambda: torch.zeros(S, S, dtype=torch.float64),
    "offset beyond the keys": lambda: causal(offset=S),
    "one row for all": lambda: torch.ones(1, 1, 1, S, dtype=torch.bool),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_becomes_is_causal(name: str) -> None:
    mask = CAUSAL[name]
    assert run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask()), *qkv()) == FIRED
    assert calls() == ["is_causal=True"]


@pytest.mark.parametrize("name", NOTHING)
def test_a_mask_that_masks_nothing_is_dropped(name: str) -> None:
    mask = NOTHING[name]
    assert run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask()), *qkv()) == FIRED
    assert calls() == [calls()[0]]
    assert "attn_mask" not in calls()[0]
    assert "is_causal" not in calls()[0]


def test_one_query_against_all_keys_needs_no_mask() -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, causal(1, S, S - 1), scale=0.5)

    assert run(decode, *qkv(queries=1)) == FIRED
    assert "scale=0.5" in memeff_compile.graphs()[-1].after
    assert "is_causal" not in memeff_compile.graphs()[-1].after


def test_prefill_of_a_longer_cache_reads_its_first_keys() -> None:
    def prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, causal(4, S))

    assert run(prefill, *qkv(queries=4)) == FIRED
    assert memeff_compile.graphs()[-1].after.count("aten.slice") == 2


def test_is_causal_over_more_keys_than_queries_reads_the_first_ones() -> None:
    def prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert run(prefill, *qkv(queries=4)) == FIRED
    assert run(prefill, *qkv()) == []


def test_keys_beyond_a_constant_are_cut_off() -> None:
    def bounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, (torch.arange(S) < 4).expand(S, S))

    assert run(bounded, *qkv()) == FIRED
    assert "attn_mask" not in calls()[0]


# --- repeated keys --------------------------------------------------------------------------------

REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "transformers": repeat_kv,
    "repeat_interleave": lambda x: x.repeat_interleave(REPEATS, dim=1),
    "repeat_interleave function": lambda x: torch.repeat_interleave(x, REPEATS, -3),
    "unsqueeze and flatten": lambda x: x.unsqueeze(2).expand(-1, -1, REPEATS, -1, -1).flatten(1, 2),
    "and contiguous": lambda x: repeat_kv(x).contiguous(),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_keys_are_not_repeated(name: str) -> None:
    repeat = REPEATED[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), causal())

    assert run(attend, *qkv(G)) == FIRED
    assert calls() == ["is_causal=True, enable_gqa=True"]
    assert "expand" not in memeff_compile.graphs()[-1].after
    assert "repeat" not in memeff_compile.graphs()[-1].after


@pytest.mark.parametrize(
    "repeat",
    [
        lambda x: x.repeat(1, REPEATS, 1, 1),
        lambda x: x[:, None].expand(-1, REPEATS, -1, -1, -1).reshape(B, H, S, D),
        lambda x: x.repeat_interleave(REPEATS, dim=2)[:, :, ::REPEATS].repeat(1, REPEATS, 1, 1),
    ],
    ids=["repeat", "expanded in front", "along the length"],
)
def test_heads_in_another_order_stay_repeated(repeat: Callable[[Tensor], Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), causal())

    assert run(attend, *qkv(G)) == FIRED
    assert calls() == ["is_causal=True"]


def test_a_single_query_head_that_broadcasts_keeps_keys_repeated() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :1], repeat_kv(k), repeat_kv(v), causal())

    assert run(attend, *qkv(G)) == FIRED
    assert calls() == ["is_causal=True"]


def test_only_one_of_both_repeated_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), v, causal())

    q, k, _ = qkv(G)
    assert run(attend, q, k, heads(H)) == FIRED
    assert calls() == ["is_causal=True"]


def test_a_write_between_repeating_and_reading_keeps_the_copy() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k * 1
        wide = repeat_kv(k)
        k.mul_(2.0)
        return F.scaled_dot_product_attention(q, wide, repeat_kv(v), causal()) + k.sum()

    assert run(attend, *qkv(G)) == FIRED
    assert calls() == ["is_causal=True"]


def test_layers_share_one_mask_and_one_record() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal()
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)
        return q

    report = compare_with_eager(layers, *qkv(G), rtol=1e-9, atol=1e-9).report
    (record,) = records(report)
    assert record.sites == 3
    assert " and 2 more" in str(record)
    assert "aten.le" not in memeff_compile.graphs()[-1].after  # the mask is gone


def test_a_mask_that_is_used_otherwise_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = causal()
        return F.scaled_dot_product_attention(q, k, v, mask), mask.sum()

    assert run(attend, *qkv()) == FIRED
    assert "aten.le" in memeff_compile.graphs()[-1].after


def test_layers_in_checkpoints_are_rewritten_and_counted_together() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = causal()
        for _ in range(2):
            q = checkpoint(layer, q, k, v, mask, use_reentrant=False)
        return q

    report = compare_with_eager(layers, *qkv(G), rtol=1e-9, atol=1e-9, inner="aot_eager").report
    (record,) = records(report)
    assert (record.action, record.sites) == ("rewrote", 2)


@pytest.mark.parametrize("dynamic", [True, None], ids=["all", "marked"])
def test_dynamic_lengths_are_proved_and_add_no_recompiles(dynamic: bool | None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, s, _ = q.shape
        at = torch.arange(s)
        mask = (at[None, None, None, :] <= at[None, None, :, None]).expand(b, 1, s, s)
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)

    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(
        attend, backend="memeff", dynamic=dynamic, options={"memeff.inner": "aot_eager"}
    )
    for length in (5, 9, 12):
        given = qkv(G, length, length)
        for tensor in given:
            if dynamic is None:
                torch._dynamo.mark_dynamic(tensor, 2)
        torch.testing.assert_close(compiled(*given), attend(*given))
    (graph,) = memeff_compile.graphs()
    assert [r.code for r in graph.records] == ["rewrote"]
    assert "enable_gqa=True" in graph.after


class Numbers(torch.nn.Module):
    """Attention whose scale and dropout are attributes, which dynamic=True makes symbols."""

    def __init__(self, is_chain: bool) -> None:
        super().__init__()
        self.is_chain, self.scale, self.dropout = is_chain, 0.37, 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal(q.shape[2], q.shape[2])
        if not self.is_chain:
            return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, scale=self.scale)
        scores = (q @ k.mT * self.scale).masked_fill(~mask, float("-inf"))
        return F.dropout(torch.softmax(scores, -1), self.dropout) @ v


@pytest.mark.parametrize(
    "is_chain",
    [pytest.param(False, id="call", marks=pytest.mark.slow), pytest.param(True, id="chain")],
)
def test_numbers_of_a_config_may_be_symbols_and_may_change(is_chain: bool) -> None:
    module = Numbers(is_chain)
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(
        module,
        backend="memeff",
        dynamic=True,
        options={"memeff.inner": "eager" if is_chain else "aot_eager"},
    )
    for scale in (0.37, 0.37, 0.11):
        module.scale = scale
        torch.testing.assert_close(compiled(*qkv()), module(*qkv()), rtol=1e-9, atol=1e-9)
        assert "is_causal=True" in calls()[0]
    module.dropout = 0.5
    compiled(*qkv())
    assert [(r.action, r.code) for r in records(memeff_compile.last_report())][-1:] == [
        ("declined", "dropout_active")
    ]


def test_nothing_to_recover_is_nothing_to_report() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    strict = {"memeff.strict": NAME}
    assert run(attend, *qkv(G)) == run(attend, *qkv(G), options=strict) == []


def test_strict_raises_for_a_mask_that_is_kept() -> None:
    table = torch.ones(B, S, dtype=torch.bool)
    with pytest.raises(BackendCompilerFailed, match=r"StrictError(.|\n)*padding_mask"):
        run(padded, *qkv(G), table, options={"memeff.strict": NAME})


def test_autocast_computes_in_its_dtype() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), causal())

    given = [t.detach().float() for t in qkv(G)]
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(attend, backend="memeff", options={"memeff.inner": "aot_eager"})
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(*given), attend(*given)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert memeff_compile.last_report().rewrites(NAME) == 1


def test_writes_to_a_cache_are_kept() -> None:
    """A cache is written and its buffer read: erasing nodes that only masks need must not touch
    them.
    """

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        at = torch.arange(4)
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        return F.scaled_dot_product_attention(q, repeat_kv(keys), repeat_kv(values), causal(4, S))

    given = [t.detach() for t in qkv(G, 4, 4)]
    caches = [torch.zeros(B, G, S, D, dtype=torch.float64) for _ in range(2)]
    assert run(step, *given, *caches) == FIRED
    assert memeff_compile.graphs()[-1].after.count("index_copy_") == 2


# --- declines -------------------------------------------------------------------------------------


def padded(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    rows = torch.arange(B)[:, None, None, None]
    return F.scaled_dot_product_attention(
        q, repeat_kv(k), repeat_kv(v), causal() & table[rows, torch.arange(S)[None, None, None, :]]
    )


def packed(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    ids = table.long().cumsum(-1)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), causal() & same)


def window(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    near = torch.arange(S) > torch.arange(S)[:, None] - 3
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), causal() & near)


def cache_length(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    length = table.sum()
    return (
        F.scaled_dot_product_attention(q[:, :, :1], k, v, torch.arange(S)[None] < length) + k.sum()
    )


def shifted(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), causal(offset=2))


def nobody(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), causal(offset=-1))


def bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    slope = torch.arange(S, dtype=torch.float64)[None] * 0.1
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), slope.expand(S, S))


def weak(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    soft = torch.where(causal(), 0.0, -10.0).double()
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), soft)


def either(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    prefix = causal() | (torch.arange(S) < 2)
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), prefix)


def chosen(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), causal())


def dropped(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return (
        F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), causal(), dropout_p=0.5) * 0
    )


DECLINED: dict[str, Callable[..., Tensor]] = {
    "padding_mask": padded,
    "packed_mask": packed,
    "window_mask": window,
    "cache_length": cache_length,
    "offset_causal": shifted,
    "empty_rows": nobody,
    "mask_is_bias": bias,
    "unread_mask": either,
    "kernels_chosen": chosen,
    "dropout_active": dropped,
}


@pytest.mark.parametrize("code", DECLINED)
def test_what_is_not_proved_is_left_as_it_was(code: str) -> None:
    table = torch.ones(B, S, dtype=torch.bool)
    table[0, 4:] = False
    kv_heads = H if code == "cache_length" else G
    assert run(DECLINED[code], *qkv(kv_heads), table) == [("declined", code)]
    graph = memeff_compile.graphs()[-1]
    assert graph.after == graph.before


def test_a_soft_mask_is_a_bias() -> None:
    table = torch.ones(B, S, dtype=torch.bool)
    assert run(weak, *qkv(G), table) == [("declined", "mask_is_bias")]


def test_the_pass_can_be_switched_off_and_skipped() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, causal())

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.second(self.first(q, k, v), k, v)

    assert run(attend, *qkv(), options={"memeff.attention": "off"}) == []
    model = Model()
    options = {"memeff.skip": {NAME: "second"}}
    assert run(lambda *given: model(*given), *qkv(), options=options) == [
        ("rewrote", "rewrote"),
        ("declined", "skipped"),
    ]


# --- attention spelled out ------------------------------------------------------------------------


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: Any = D**-0.5,
    dropout: float = 0.0,
    step: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """As transformers spells it."""
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if step is not None:
        scores = step(scores)
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype)
    weights = F.dropout(weights, p=dropout, training=True)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def additive() -> Tensor:
    return torch.where(causal(), torch.zeros((), dtype=torch.float64), LOW)


CHAINS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "causal": (lambda q, k, v: eager(q, k, v, additive()), "is_causal=True, scale=0.353"),
    "no mask": (lambda q, k, v: eager(q, k, v), "scale=0.353"),
    "division": (
        lambda q, k, v: (q @ k.mT / 2.0).masked_fill(~causal(), float("-inf")).softmax(-1) @ v,
        "is_causal=True, scale=0.5",
    ),
    "where": (
        lambda q, k, v: torch.softmax(
            torch.where(causal(), q @ k.permute(0, 1, 3, 2), float("-inf")), 3
        ).matmul(v),
        "is_causal=True, scale=1.0",
    ),
    "scaled queries": (lambda q, k, v: eager(q * 0.5, k, v, scale=1.0), "scale=1.0"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_becomes_one_call(name: str) -> None:
    chain, expected = CHAINS[name]
    assert run(chain, *qkv()) == FIRED
    (call,) = calls()
    assert call.startswith(expected)
    assert "softmax" not in memeff_compile.graphs()[-1].after


def test_repeated_keys_of_a_chain_are_not_repeated() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q, repeat_kv(k), repeat_kv(v), additive())

    assert run(attend, *qkv(G)) == FIRED
    assert "enable_gqa=True" in calls()[0]
    assert "expand" not in memeff_compile.graphs()[-1].after


def test_a_view_behind_a_chain_finds_the_layout_it_needs() -> None:
    """The product is contiguous; PyTorch's kernel returns the layout of its queries."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(B, S, H, D).transpose(1, 2) for t in (q, k, v))
        return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).view(B * H, S, D)

    flat = [heads(H, S, seed).detach().reshape(B, S, H * D) for seed in range(3)]
    assert run(attend, *flat) == FIRED


CHAINS_DECLINED: dict[str, Callable[..., Any]] = {
    "softcap": lambda q, k, v: eager(q, k, v, step=lambda s: torch.tanh(s / 5.0) * 5.0),
    "dropout_active": lambda q, k, v: eager(q, k, v, dropout=0.5) * 0,
    "scale_not_constant": lambda q, k, v: eager(q, k, v, scale=q.detach().abs().mean()),
    "mask_is_bias": lambda q, k, v: eager(q, k, v, torch.ones(S, S).double().cumsum(-1)),
    "unknown_step(add)": lambda q, k, v: eager(q, k, v, step=lambda s: (s + additive()) * 2.0),
    "offset_causal": lambda q, k, v: eager(
        q, k, v, torch.where(causal(offset=1), torch.zeros((), dtype=torch.float64), LOW)
    ),
}


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    weights = torch.cat([scores, torch.ones(B, H, S, 1).double()], -1).softmax(-1)
    return weights[..., :-1] @ v


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    return weights @ v, weights


def with_scores(q: Tensor, k: Tensor, v: Tensor) -> Any:
    scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores, -1) @ v, scores.amax()


def in_two_dtypes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)).double()
    return torch.softmax(scores, -1) @ v


def in_two_regions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    return weights @ v


def with_a_write(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1
    weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    q.mul_(2.0)
    return weights @ v + q.sum()


def with_a_root(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.sub(q @ k.transpose(-1, -2), 1.0), -1) @ v


CHAINS_DECLINED |= {
    "weights_used(output)": with_weights,
    "scores_used(amax)": with_scores,
    "dtype_changes": in_two_dtypes,
    "region_mismatch": in_two_regions,
    "unknown_step(sub)": with_a_root,
    "unknown_step(getitem)": lambda q, k, v: (
        torch.softmax(q @ k.transpose(-1, -2), -1)[..., :-1] @ v[:, :, :-1]
    ),
    "sinks": with_sinks,
}


@pytest.mark.parametrize("code", CHAINS_DECLINED)
def test_a_chain_that_is_not_proved_is_left_as_it_was(code: str) -> None:
    assert run(CHAINS_DECLINED[code], *qkv()) == [("declined", code)]
    graph = memeff_compile.graphs()[-1]
    assert graph.after == graph.before


def test_a_write_between_the_products_declines() -> None:
    with torch.no_grad():
        given = [t.detach() for t in qkv()]
    assert run(with_a_write, *given) == [("declined", "mutated")]


def test_other_softmaxes_are_no_attention() -> None:
    def router(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q, -1) @ k.transpose(-1, -2) @ v

    assert run(router, *qkv()) == []


# --- lengths, devices, subclasses -----------------------------------------------------------------


def test_a_dynamic_length_is_cut_where_it_is_known_to_be_shorter() -> None:
    def prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = torch.cat([k, k], 2), torch.cat([v, v], 2)
        at = torch.arange(k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, at[None] <= at[: q.shape[2], None])

    assert run(prefill, *qkv(), dynamic=True) == FIRED
    assert "is_causal=True" in calls()[0]


def test_a_gpu_keeps_keys_repeated_where_no_fused_kernel_takes_them() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), is_causal=True)

    with planned_for(torch.device("cuda", 0)):
        assert run(attend, *qkv(G)) == [("declined", "no_grouped_kernel")]
        assert run(CHAINS["causal"][0], *qkv()) == [("declined", "no_fused_kernel")]
        halves = [t.detach().to(torch.bfloat16) for t in qkv(G)]
        assert run(attend, *halves) == FIRED
    assert "enable_gqa=True" in memeff_compile.graphs()[-1].after


@pytest.mark.parametrize("trains", ["nothing", "something detached", "all"])
def test_a_checkpoint_gets_no_kernel_where_its_graph_returns_no_gradient(trains: str) -> None:
    """PyTorch computes such a graph again without its partition, and refuses random numbers there."""
    chain, _ = CHAINS["causal"]

    def attend(*given: Tensor) -> Tensor:
        out: Tensor = checkpoint(chain, *given, use_reentrant=False)
        return out if trains == "all" else out.detach()

    given = [t.detach().requires_grad_(trains != "nothing") for t in qkv()]
    with torch.enable_grad():
        found = run(attend, *given, inner="aot_eager")
    assert found == (FIRED if trains == "all" else [("declined", "no_fused_kernel")])


@pytest.mark.parametrize("is_narrow", [False, True])
def test_float64_is_not_trained_on_a_kernel_that_inductor_cannot_differentiate(
    monkeypatch: pytest.MonkeyPatch, *, is_narrow: bool
) -> None:
    """torch 2.11 tells compilers that the CPU kernel has float32 statistics of float64."""

    def aot_eager(gm: Any, inputs: Any, *_: Any) -> Any:
        return compat.compile_with_aot_eager(gm, inputs)

    monkeypatch.setattr(torch_kernels, "_has_narrow_statistics", lambda: is_narrow)
    monkeypatch.setattr(compat, "compile_with_inductor", aot_eager)
    chain, _ = CHAINS["causal"]
    declined = [("declined", "no_fused_kernel")] if is_narrow else FIRED
    assert run(chain, *qkv(), inner="inductor") == declined
    assert run(chain, *(t.detach() for t in qkv()), inner="inductor") == FIRED
    assert run(chain, *qkv(), inner="aot_eager") == FIRED


def test_subclass_operands_are_left_alone() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, causal())

    torch._dynamo.reset()
    memeff_compile.reset()
    given = [TwoTensor(t.detach(), t.detach()) for t in qkv()]
    torch.compile(attend, backend="memeff", options={"memeff.inner": "eager"})(*given)
    found = [r.code for r in records(memeff_compile.last_report())]
    assert found == ["subclass_operand(TwoTensor)"]


def test_attention_that_torch_func_transforms_says_so() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.vmap(lambda *one: F.scaled_dot_product_attention(*one, causal()))(q, k, v)

    torch._dynamo.reset()
    memeff_compile.reset()
    given = [t.detach().unsqueeze(0) for t in qkv()]
    torch.compile(attend, backend="memeff", options={"memeff.inner": "eager"})(*given)
    (record,) = records(memeff_compile.last_report())
    assert record.code == "torch_func"
    assert "vmap" in record.sentence
    assert record.hint


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_view_behind_other_ops_finds_the_layout_it_was_written_for(inner: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v
        return (found * 2).view(2, -1, 8), (found + 1).transpose(1, 2)

    operands = [torch.randn(2, 6, 4, 8).transpose(1, 2) for _ in range(3)]
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": inner})
    for found, wanted in zip(compiled(*operands), model(*operands), strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
    assert memeff_compile.last_report().rewrites("recover_attention") == 1


# --- positions in a cache -------------------------------------------------------------------------

STORED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gpt-fast": lambda stored, at: stored[None, None, at],
    "torchtune": lambda stored, at: stored[None, at].unsqueeze(1),
    "litgpt": lambda stored, at: stored[None, None].index_select(2, at),
    "cut to the keys": lambda stored, at: stored[None, None, at][..., :S],
}


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", STORED)
def test_rows_of_a_stored_mask_are_no_padding(name: str, queries: int) -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, stored: Tensor, input_pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, STORED[name](stored, input_pos))

    stored, at = torch.ones(S, S, dtype=torch.bool).tril(), torch.arange(2, 2 + queries)
    report = compare_with_eager(decode, *qkv(queries=queries), stored, at, rtol=1e-9).report
    (record,) = records(report)
    assert record.code == "mask_rows"
    assert record.sentence.startswith(
        "The mask is rows of a stored mask that `input_pos` chooses: kept"
    )
    assert not record.hint


def test_a_row_that_is_chosen_and_added_to_scores_is_no_padding() -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, stored: Tensor, input_pos: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~stored[None, None, input_pos], LOW)
        return scores.softmax(-1) @ v

    stored = torch.ones(S, S, dtype=torch.bool).tril()
    assert run(decode, *qkv(queries=1), stored, torch.tensor([3])) == [("declined", "mask_rows")]


def test_padding_next_to_positions_is_still_padding() -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, table[:, None, None])

    table = torch.ones(B, S, dtype=torch.bool)
    assert run(decode, *qkv(queries=1), table) == [("declined", "padding_mask")]


SHIFTED: dict[str, Callable[[Tensor], Tensor]] = {
    "by a number": lambda past: torch.arange(3)[:, None] + past,
    "by positions": lambda past: (torch.arange(3) + past).clone()[:, None],
}


@pytest.mark.parametrize("name", SHIFTED)
def test_causal_rows_after_earlier_keys_are_called_causal(name: str) -> None:
    def prefill(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
        mask = torch.arange(S)[None] <= SHIFTED[name](past)
        return F.scaled_dot_product_attention(q, k, v, mask)

    report = compare_with_eager(prefill, *qkv(queries=3), torch.tensor([2]), rtol=1e-9).report
    (record,) = records(report)
    assert record.code == "cache_length"
    assert record.sentence.startswith("The mask is causal from a position that a tensor holds: ")


def test_positions_compared_with_positions_are_still_packed_sequences() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        mask = positions[:, None] <= positions[:, :, None]
        return F.scaled_dot_product_attention(q, k, v, mask[:, None])

    positions = torch.arange(S).expand(B, S).clone()
    assert run(attend, *qkv(), positions) == [("declined", "packed_mask")]
