"""recover_attention with memeff::attention: masks PyTorch's call cannot say, and eager's numbers.

Most tests run where the op is not fast, a CPU in fp64; a fixture says that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels.device import planned_for
from memeff_compile.passes.attention import told_to_op as masked_attention
from tests.passes.test_recover_attention import (
    DECLINED,
    FIRED,
    LOW,
    B,
    D,
    G,
    H,
    S,
    causal,
    eager,
    heads,
    qkv,
    records,
    repeat_kv,
    run,
)
from tests.support.captured_graphs import compare_with_eager

OP = "memeff.attention("


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass think that the op is fast everywhere."""
    monkeypatch.setattr(masked_attention, "why_not_fast", lambda *_: "")


def padding(*, left: bool = True) -> Tensor:
    table = torch.ones(B, S, dtype=torch.bool)
    table[0, slice(0, 2) if left else slice(S - 2, S)] = False
    return table


def told() -> list[str]:
    """Return the op's arguments in the rewritten graph, besides its operands."""
    text = memeff_compile.graphs()[-1].after
    found = [line for line in text.splitlines() if OP in line]
    return [line.split(OP)[1].rstrip(")").split(", ", 3)[3] for line in found]


# --- calls ----------------------------------------------------------------------------------------

SAID: dict[str, str] = {
    "padding_mask": "ahead=0",
    "packed_mask": "ahead=0",
    "window_mask": "ahead=0, behind=2",
    "offset_causal": "ahead=2",
    "empty_rows": "ahead=-1",
}


@pytest.mark.parametrize("code", SAID)
def test_a_mask_that_a_call_cannot_say_is_said_to_the_op(code: str, fast: None) -> None:
    assert run(DECLINED[code], *qkv(G), padding()) == FIRED
    (call,) = told()
    assert SAID[code] in call
    text = memeff_compile.graphs()[-1].after
    assert "scaled_dot_product_attention" not in text
    assert "expand" not in text  # neither keys nor masks


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_queries_without_keys_get_zeros_from_a_call(left: bool, fast: None) -> None:
    assert run(DECLINED["padding_mask"], *qkv(G), padding(left=left)) == FIRED
    assert "empty_rows" not in told()[0]  # zeros are the default


def test_a_filled_length_is_a_table_of_keys(fast: None) -> None:
    def prefill(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, (torch.arange(S) < length).expand(S, S))

    assert run(prefill, *qkv(), torch.tensor(4)) == FIRED
    assert "aten.arange" in memeff_compile.graphs()[-1].after


def test_the_report_says_what_was_recovered(fast: None) -> None:
    compiled = compare_with_eager(
        DECLINED["padding_mask"], *qkv(G), padding(), rtol=1e-9, atol=1e-9
    )
    (record,) = records(compiled.report)
    assert record.sentence.startswith(
        "Mask (2 x 1 x 6 x 6, bool) is causal and padding -> memeff::attention "
        "(key table from `table`), engine reference; the mask, B*M*N bytes (72 bytes), is not built"
    )
    assert "a query that attends to nothing gets zeros, as before" in record.sentence


# --- layers ---------------------------------------------------------------------------------------


def test_layers_share_one_table(fast: None) -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = causal() & table[:, None, None, :]
        near = mask & (torch.arange(S) > torch.arange(S)[:, None] - 3)
        for number in range(4):
            chosen = mask if number % 2 else near
            q = F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), chosen)
        return q

    report = compare_with_eager(layers, *qkv(G), padding(), rtol=1e-9, atol=1e-9).report
    assert sorted(r.sites for r in records(report)) == [2, 2]
    text = memeff_compile.graphs()[-1].after
    assert text.count("aten.clone") == 1
    assert "aten.le" not in text


def test_layers_in_checkpoints_are_given_the_table_of_the_graph_around_them(fast: None) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)

    def layers(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        mask = causal() & table[:, None, None, :]
        for _ in range(2):
            q = checkpoint(layer, q, k, v, mask, use_reentrant=False)
        return layer(q, k, v, mask)

    outcome = compare_with_eager(
        layers, *qkv(G), padding(), rtol=1e-9, atol=1e-9, inner="aot_eager"
    )
    (record,) = records(outcome.report)
    assert (record.action, record.sites) == ("rewrote", 3)
    assert memeff_compile.graphs()[-1].after.count("aten.clone") == 1


def test_masks_made_in_checkpoints_are_said_there(fast: None) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = causal() & table[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, mask)

    def layers(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        q = checkpoint(layer, q, k, v, table, use_reentrant=False)
        return checkpoint(layer, q, k, v, ~table, use_reentrant=False)

    report = compare_with_eager(
        layers, *qkv(), padding(), rtol=1e-9, atol=1e-9, inner="aot_eager"
    ).report
    assert sum(r.sites for r in records(report) if r.action == "rewrote") == 2


def test_an_edit_that_is_refused_leaves_both_graphs_as_they_were(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memeff_compile.passes import recover_attention
    from memeff_compile.passes.graph.editor import EditRefused

    def refuse(*_: Any) -> Any:
        raise EditRefused("no")

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    def layers(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        mask = causal() & table[:, None, None, :]
        return checkpoint(layer, q, k, v, mask, use_reentrant=False)

    monkeypatch.setattr(recover_attention, "laid_out_as", refuse)
    report = compare_with_eager(
        layers, *qkv(), padding(), rtol=1e-9, atol=1e-9, inner="aot_eager"
    ).report
    assert [r.code for r in records(report)] == ["edit_refused"]
    graph = memeff_compile.graphs()[-1]
    assert graph.after == graph.before


@pytest.mark.parametrize("dynamic", [True, None], ids=["all", "marked"])
def test_dynamic_lengths_add_no_recompiles(dynamic: bool | None, fast: None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        mask = (at <= at[:, None]) & (at > at[:, None] - 4) & table[:, None, None, :]
        v = k * 0 + v  # of one length
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), mask)

    def repeat(x: Tensor) -> Tensor:
        b, g, s, d = x.shape
        return x[:, :, None].expand(b, g, H // G, s, d).reshape(b, H, s, d)

    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "aot_eager"}
    compiled = torch.compile(attend, backend="memeff", dynamic=dynamic, options=options)
    for length in (5, 9, 12):
        given = [*qkv(G, length, length), torch.arange(2 * length).view(2, length) % 5 != 1]
        for place, tensor in enumerate(given):
            if dynamic is None:
                torch._dynamo.mark_dynamic(tensor, 2 if place < 3 else 1)
        torch.testing.assert_close(compiled(*given), attend(*given))
    (graph,) = memeff_compile.graphs()
    assert [r.code for r in graph.records] == ["rewrote"]


def test_a_dynamic_number_of_earlier_keys_is_a_bound(fast: None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
        k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
        at = torch.arange(q.shape[2]) + past.shape[2]
        mask = torch.arange(k.shape[2]) <= at[:, None]
        return F.scaled_dot_product_attention(q, k, v, mask)

    assert run(attend, *qkv(), heads(H, 9), dynamic=True) == FIRED
    assert "ahead=%" in told()[0] or "ahead=s" in told()[0]


def test_a_mask_is_not_said_once_its_source_was_written_to(fast: None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        table = table.clone()
        mask = causal() & table[:, None, None, :]
        table.logical_not_()
        return F.scaled_dot_product_attention(q, k, v, mask & (torch.arange(S) >= 0)) + table.sum()

    assert run(attend, *qkv(), padding()) == FIRED  # read before it changes


def test_autocast_computes_in_its_dtype(fast: None) -> None:
    given = [t.detach().float() for t in qkv(G)]
    torch._dynamo.reset()
    memeff_compile.reset()
    attend = DECLINED["padding_mask"]
    compiled = torch.compile(attend, backend="memeff", options={"memeff.inner": "aot_eager"})
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(*given, padding()), attend(*given, padding())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert memeff_compile.last_report().rewrites("recover_attention") == 1


# --- chains ---------------------------------------------------------------------------------------


def added(mask: Tensor, low: float = LOW) -> Tensor:
    return torch.where(mask, torch.zeros((), dtype=torch.float64), low)


def capped(scores: Tensor) -> Tensor:
    return torch.tanh(scores / 5.0) * 5.0


CHAINS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "padding": (
        lambda q, k, v, t: eager(q, k, v, added(causal() & t[:, None, None, :])),
        "empty_rows='mean'",
    ),
    "window": (
        lambda q, k, v, t: eager(
            q, k, v, added(causal() & (torch.arange(S) > torch.arange(S)[:, None] - 3))
        ),
        "behind=2",
    ),
    "softcap": (lambda q, k, v, t: eager(q, k, v, step=capped), "softcap=5.0"),
    "softcap, causal": (
        lambda q, k, v, t: eager(q, k, v, added(causal()), step=capped),
        "softcap=5.0",
    ),
    "softcap of products": (
        lambda q, k, v, t: torch.softmax(torch.tanh(q @ k.mT * 0.1) * 3.0, -1) @ v,
        "scale=0.30000000000000004, softcap=3.0",
    ),
    "softcap of one": (
        lambda q, k, v, t: torch.softmax(torch.tanh(q @ k.mT), -1) @ v,
        "scale=1.0, softcap=1.0",
    ),
    "repeated keys": (
        lambda q, k, v, t: eager(q, k, v, added(t[:, None, None, :].expand(B, 1, S, S))),
        "scale=",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_said_to_the_op(name: str, fast: None) -> None:
    chain, expected = CHAINS[name]
    assert run(chain, *qkv(), padding()) == FIRED
    assert expected in told()[0]
    assert "softmax" not in memeff_compile.graphs()[-1].after


def test_repeated_keys_of_a_capped_chain_are_not_repeated(fast: None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q, repeat_kv(k), repeat_kv(v), added(causal()), step=capped)

    assert run(attend, *qkv(G)) == FIRED
    assert "expand" not in memeff_compile.graphs()[-1].after


def filled(fill: float) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        hidden = ~(causal() & table[:, None, None, :])
        return torch.softmax((q @ k.mT).masked_fill(hidden, fill), -1) @ v

    return attend


EMPTY: dict[str, tuple[Callable[..., Tensor], bool, bool]] = {
    # with gradients, without
    "filled with a number": (filled(-1e9), False, True),
    "filled with minus infinity": (filled(float("-inf")), False, False),
    "the lowest number added": (
        lambda q, k, v, t: eager(q, k, v, added(causal() & t[:, None, None, :])),
        True,
        True,
    ),
    "a low number added": (
        lambda q, k, v, t: eager(q, k, v, added(causal() & t[:, None, None, :], -1e9)),
        False,
        False,
    ),
    "minus infinity added": (
        lambda q, k, v, t: eager(q, k, v, added(causal() & t[:, None, None, :], float("-inf"))),
        False,
        False,
    ),
    "two masks added": (
        lambda q, k, v, t: eager(q, k, v, added(causal()) + added(t[:, None, None, :]) * 0.5),
        False,
        False,
    ),
    "a call's lowest number": (
        lambda q, k, v, t: F.scaled_dot_product_attention(
            q, k, v, added(causal() & t[:, None, None, :])
        ),
        False,
        False,
    ),
    "a call's minus infinity": (
        lambda q, k, v, t: F.scaled_dot_product_attention(
            q, k, v, added(causal() & t[:, None, None, :], float("-inf"))
        ),
        True,
        True,
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_queries_without_keys_get_what_the_original_gives_or_are_left(
    name: str, fast: None
) -> None:
    attend, *expected = EMPTY[name]
    for is_served, given in zip(expected, (qkv(), [t.detach() for t in qkv()]), strict=True):
        wanted = FIRED if is_served else [("declined", "empty_rows")]
        assert run(attend, *given, padding()) == wanted
        graph = memeff_compile.graphs()[-1]
        assert is_served or graph.after == graph.before


def test_fp16_leaves_scores_visible_behind_its_lowest_number(fast: None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        low = torch.finfo(torch.float16).min
        mask = torch.where(causal() & table[:, None, None, :], torch.zeros((), dtype=q.dtype), low)
        return eager(q, k, v, mask)

    given = [t.detach().half() * 10 for t in qkv()]
    assert run(attend, *given, padding()) == [("declined", "empty_rows")]
    given = [t.detach().bfloat16() for t in qkv()]
    low = {"rtol": 2e-2, "atol": 2e-2}

    def in_bf16(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = torch.where(
            causal() & table[:, None, None, :],
            torch.zeros((), dtype=q.dtype),
            torch.finfo(q.dtype).min,
        )
        return eager(q, k, v, mask)

    report = compare_with_eager(in_bf16, *given, padding(), **low).report
    assert [r.code for r in records(report)] == ["rewrote"]


# --- where it is worth it -------------------------------------------------------------------------


def test_a_gpu_gets_the_op_in_16_bits_alone() -> None:
    attend = DECLINED["padding_mask"]
    long = [heads(n, 32, seed).detach() for seed, n in enumerate((H, H, H))]
    table = torch.ones(B, 32, dtype=torch.bool)

    def padded(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, table[:, None, None, :])

    with planned_for(torch.device("cuda", 0)):
        assert run(padded, *long, table) == [("declined", "padding_mask")]
        halves = [t.to(torch.bfloat16) for t in long]
        report = compare_with_eager(padded, *halves, table, rtol=2e-2, atol=2e-2).report
        assert [r.code for r in records(report)] == ["rewrote"]
        few = [t[:, :, :4].to(torch.bfloat16) for t in long[:1]] + halves[1:]
        assert run(padded, *few, table) == [("declined", "padding_mask")]
        assert run(attend, *(t.detach() for t in qkv(G)), padding()) == [
            ("declined", "padding_mask")
        ]


def test_a_cpu_keeps_the_mask_of_a_call_and_the_chain_in_fp32() -> None:
    given = [heads(H, 32, seed).detach().float() for seed in range(3)]
    table = torch.ones(B, 32, dtype=torch.bool)
    calls = {
        "takes the mask as it is": lambda q, k, v, t: F.scaled_dot_product_attention(
            q, k, v, t[:, None, None, :]
        ),
        "2.1 to 3.5 times": lambda q, k, v, t: (
            torch.softmax(torch.where(t[:, None, None, :], q @ k.mT, -1e9), -1) @ v
        ),
    }
    for reason, attend in calls.items():
        report = compare_with_eager(attend, *given, table, rtol=1e-5, atol=1e-5).report
        (record,) = records(report)
        assert record.code == "padding_mask"
        assert reason in record.sentence


def test_a_cpu_without_products_of_bf16_gets_the_op_for_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [heads(H, 32, seed).detach().bfloat16() for seed in range(3)]
    chain = CHAINS["softcap of products"][0]
    for has_products, expected in ((False, "rewrote"), (True, "softcap")):
        monkeypatch.setattr(
            "memeff_compile.compat.multiplies_bf16", lambda found=has_products: found
        )
        report = compare_with_eager(chain, *given, None, rtol=3e-2, atol=3e-2).report
        assert [r.code for r in records(report)] == [expected]


def test_a_checkpoint_with_a_policy_keeps_its_calls() -> None:
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    def layers(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        mask = causal() & table[:, None, None, :]
        return checkpoint(layer, q, k, v, mask, use_reentrant=False, context_fn=contexts)

    report = compare_with_eager(
        layers, *qkv(), padding(), rtol=1e-9, atol=1e-9, inner="aot_eager"
    ).report
    (record,) = records(report)
    assert record.code == "padding_mask"
    assert "policy" in record.sentence


def test_heads_of_two_sizes_stay() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v[..., : D // 2], table[:, None, None, :])

    assert run(attend, *qkv(), padding()) == [("declined", "padding_mask")]
