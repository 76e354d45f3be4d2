"""recover_attention with a mask that comes from outside, or adds unread numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels.device import planned_for
from memeff_compile.passes.attention import told_to_op
from tests.passes.test_recover_attention import (
    DECLINED,
    FIRED,
    B,
    G,
    H,
    S,
    causal,
    eager,
    qkv,
    records,
    repeat_kv,
    run,
)
from tests.support.captured_graphs import compare_with_eager

TILES = "memeff.attention_mask_tiles("


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass think that the op is fast everywhere: here it runs in fp64, in plain PyTorch."""
    monkeypatch.setattr(told_to_op, "why_not_fast", lambda *_: "")


def shown(*shape: int, seed: int = 0) -> Tensor:
    """Return truth values, one query of which sees no key."""
    found = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    found[..., 1, :] = False
    return found


def added(*shape: int, lowest: float = -math.inf) -> Tensor:
    return torch.where(shown(*shape), 0.0, torch.tensor(lowest, dtype=torch.float64))


MASKS: dict[str, Callable[[], Tensor]] = {
    "of each sequence": lambda: shown(B, 1, S, S),
    "of each head": lambda: shown(B, H, S, S),
    "of all": lambda: shown(S, S),
    "three axes": lambda: shown(1, S, S),
    "expanded": lambda: shown(1, 1, S, S).expand(B, H, S, S),
    "turned": lambda: shown(B, 1, S, S).transpose(2, 3),
    "with gaps": lambda: shown(B, 1, S, 2 * S)[..., ::2],
    "minus infinity": lambda: added(B, 1, S, S),
    "numbers": lambda: torch.randn(1, H, S, S, dtype=torch.float64),
    "numbers, turned": lambda: torch.randn(1, H, S, S, dtype=torch.float64).mT,
}


def layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = repeat_kv(k), repeat_kv(v)
    first = F.scaled_dot_product_attention(q, k, v, mask)
    return F.scaled_dot_product_attention(first, k, v, mask)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_from_outside_is_read_when_it_runs(name: str, fast: None) -> None:
    """Once for all layers, whatever its shape and strides; keys are not repeated."""
    assert run(layers, *qkv(G), MASKS[name]()) == FIRED
    text = memeff_compile.graphs()[-1].after
    assert text.count(TILES) == 1
    assert "scaled_dot_product_attention" not in text
    assert "expand" not in text


def test_a_row_of_the_lowest_number_is_a_softmax_of_its_scores(fast: None) -> None:
    """Products and a softmax show that; PyTorch's CPU kernel has wrong gradients there."""

    def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return eager(q, repeat_kv(k), repeat_kv(v), mask).transpose(1, 2)

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)

    given = (*qkv(G), added(B, 1, S, S, lowest=torch.finfo(torch.float64).min))
    compiled = torch.compile(call, backend="memeff", options={"memeff.inner": "aot_eager"})
    found, wanted = compiled(*given), products(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    pairs = (torch.autograd.grad(out.square().sum(), given[:3]) for out in (found, wanted))
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-9)
    assert "memeff.attention(" in memeff_compile.graphs()[-1].after


def test_a_mask_of_the_graph_that_is_not_read_beforehand(fast: None) -> None:
    assert run(DECLINED["unread_mask"], *qkv(G), shown(B, S)) == FIRED
    assert TILES in memeff_compile.graphs()[-1].after


def test_views_of_what_arrives_are_read_too(fast: None) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return layers(q, k, v, mask[:, :, :, :S].expand(B, H, S, S).double())

    wide = torch.randn(B, 1, S, S + 2)
    assert run(step, *qkv(G), wide) == FIRED
    assert TILES in memeff_compile.graphs()[-1].after


def test_lengths_may_change(fast: None) -> None:
    for length in (S, S + 3):
        assert run(layers, *qkv(G, length, length), shown(B, 1, length, length), dynamic=True) == (
            FIRED
        )


def test_a_cache_that_is_written_beside_the_mask_is_not_the_mask(fast: None) -> None:
    """As in the prompt of a model with windows; a mask that is written to may be this one."""

    def prompt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kept: Tensor) -> Tensor:
        kept.copy_(k[:, :, -kept.shape[2] :] if kept.is_floating_point() else ~mask[:, :, -2:])
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)

    with torch.no_grad():
        given = [*qkv(G), shown(B, 1, S, S)]
        for kept, code in (
            (torch.zeros_like(given[1][:, :, :4]), "rewrote"),
            (torch.zeros(B, 1, 2, S, dtype=torch.bool), "unread_mask"),
        ):
            close = {"rtol": 1e-9, "atol": 1e-9}
            outcome = compare_with_eager(prompt, *given, kept, **close, inner="aot_eager")
            (record,) = records(outcome.report)
            assert record.code == code
    assert "may write to the mask" in record.sentence


def test_a_mask_may_be_written_to_as_another_dtype_where_ops_run_one_by_one(
    fast: None,
) -> None:
    """AOTAutograd treats two storages as separate memory; eager sees writes through the other
    one.
    """

    def layers(
        q: Tensor, k: Tensor, v: Tensor, shown: Tensor, other: Tensor, new: Tensor
    ) -> Tensor:
        k, v, place = repeat_kv(k), repeat_kv(v), torch.arange(S)
        before = (place[:, None] >= place) & shown.bool()[:, None, None, :]
        other.copy_(new)
        q = F.scaled_dot_product_attention(q, k, v, before)
        after = (place[:, None] >= place) & shown.bool()[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, after)

    def given(*, is_same: bool) -> list[Tensor]:
        shown, new = (torch.ones(B, S, dtype=torch.int64) for _ in range(2))
        shown[0, :3] = new[1, :5] = 0
        other = shown.view(torch.float64) if is_same else torch.zeros(B, S, dtype=torch.float64)
        return [*qkv(G), shown, other, new.view(torch.float64)]

    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(layers, backend="memeff", options={"memeff.inner": "eager"})
    with torch.no_grad():
        for is_same in (False, True):
            found, expected = compiled(*given(is_same=is_same)), layers(*given(is_same=is_same))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_bodies_of_checkpoints_are_given_the_codes(inner: str, fast: None) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)

    def both(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        q = checkpoint(layer, q, k, v, mask, use_reentrant=False)
        return checkpoint(layer, q, k, v, mask, use_reentrant=False)

    assert run(both, *qkv(G), shown(B, 1, S, S), inner=inner) == FIRED
    assert memeff_compile.graphs()[-1].after.count(TILES) == 1


def test_autocast_casts_what_is_added_as_it_does_for_the_call(fast: None) -> None:
    """The lowest number of fp32 is minus infinity in bf16: zeros, and no softmax of the scores."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)

    mask = added(B, 1, S, S, lowest=torch.finfo(torch.float32).min).float()
    given = [each.detach().float().requires_grad_() for each in qkv(G)]
    report = compare_with_eager(call, *given, mask, rtol=3e-2, atol=3e-2).report
    assert [r.code for r in records(report)] == ["rewrote"]


def test_the_report_says_what_is_read(fast: None) -> None:
    report = compare_with_eager(layers, *qkv(G), shown(B, 1, S, S), rtol=1e-9, atol=1e-9).report
    (record,) = records(report)
    assert record.sites == 2
    assert "is read when the kernel runs -> memeff::attention" in record.sentence
    assert "keys and values are not expanded" in record.sentence


# --- kept -----------------------------------------------------------------------------------------


def learned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    out = F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)
    mask[:, :, 0] = True
    return out + mask.sum()


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return eager(q, repeat_kv(k), repeat_kv(v), torch.where(mask, 0.0, -1.5).double())


KEPT: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor], str, str]] = {
    "learned": (
        learned,
        lambda: torch.randn(1, H, S, S, dtype=torch.float64, requires_grad=True),
        "mask_is_bias",
        "needs a gradient",
    ),
    "written": (written, lambda: shown(B, 1, S, S), "unread_mask", "may write to the mask"),
    "computed": (
        DECLINED["mask_is_bias"],
        lambda: shown(B, S),
        "mask_is_bias",
        "the graph computes the mask to add",
    ),
    "spelled out": (
        spelled_out,
        lambda: shown(B, 1, S, S),
        "mask_is_bias",
        "for calls of scaled_dot_product_attention alone",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_read_is_kept_with_the_reason(name: str, fast: None) -> None:
    function, mask, code, words = KEPT[name]
    report = compare_with_eager(function, *qkv(G), mask(), rtol=1e-9, atol=1e-9).report
    (record,) = records(report)
    assert (record.action, record.code) == ("declined", code)
    assert words in record.sentence


def test_a_cpu_keeps_the_mask_and_a_gpu_reads_it_in_16_bits_alone() -> None:
    wide = [torch.randn(B, n, 32, 8, dtype=torch.float64) for n in (H, G, G)]
    half = [each.bfloat16() for each in wide]
    mask = shown(B, 1, 32, 32)
    expected = {"unread_mask": "PyTorch's kernel for the CPU takes the mask as it is"}
    for given, place, words in (
        (half, None, expected["unread_mask"]),
        (wide, torch.device("cuda", 0), "compute in bfloat16 and float16"),
        ([half[0][:, :, :4], *half[1:]], torch.device("cuda", 0), "a step of decoding"),
    ):
        seen = mask[:, :, : given[0].shape[2]]
        with nullcontext() if place is None else planned_for(place):
            found = compare_with_eager(learned, *given, seen, rtol=2e-2, atol=2e-2).report
        (record,) = records(found)
        assert record.code == "unread_mask"
        assert words in record.sentence
    with planned_for(torch.device("cuda", 0)):
        report = compare_with_eager(learned, *half, mask, rtol=2e-2, atol=2e-2).report
    assert [r.code for r in records(report)] == ["rewrote"]


# --- models ---------------------------------------------------------------------------------------


def tiny(family: str, **more: Any) -> Any:
    """Return a causal model of two small layers, in float64."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **more,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


def step(model: nn.Module, side: str) -> list[Tensor]:
    """Return the loss of a batch with padding and every gradient."""
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    given = torch.ones(2, 24, dtype=torch.long)
    given[0, slice(0, 7) if side == "left" else slice(17, 24)] = 0
    labels = ids.masked_fill(given == 0, -100)
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=given, labels=labels, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters())]


@pytest.mark.parametrize("side", ["left", "right"])
def test_layers_that_are_compiled_one_by_one_read_the_mask_of_eager(side: str, fast: None) -> None:
    model = tiny("Llama")
    expected = step(model, side)
    for layer in model.model.layers:
        layer.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
    found = step(model, side)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    kinds = [r for r in memeff_compile.last_report().records if r.pass_name == "recover_attention"]
    assert {r.action for r in kinds} == {"rewrote"}
    assert all("is read when the kernel runs" in r.sentence for r in kinds)


def test_a_mask_of_another_graph_is_read_by_the_graph_of_all_layers(fast: None) -> None:
    """As under FSDP2: the mask is made in a graph in front, and arrives as an input."""

    class Layers(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
            mask = causal() & padding[:, None, None, :]
            torch._dynamo.graph_break()
            return layers(q, k, v, mask)

    padding = torch.ones(B, S, dtype=torch.bool)
    padding[0, :3] = False
    given = (*qkv(G), padding)
    report = compare_with_eager(Layers(), *given, rtol=1e-9, atol=1e-9, fullgraph=False).report
    assert [(r.action, r.code) for r in records(report)] == FIRED
    assert "is read when the kernel runs" in records(report)[0].sentence


def test_a_prompt_through_windows_reads_the_mask_beside_its_cache(fast: None) -> None:
    """The cache is written in the graph that is given the mask; tokens are those of eager."""
    model = tiny("Mistral", sliding_window=8, bos_token_id=1, eos_token_id=None).eval()
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    memeff_compile.compile(model, kv_cache="static", options={"memeff.inner": "aot_eager"})
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    prompt = memeff_compile.graphs()[0].records
    assert [(r.code, r.sites) for r in prompt if r.pass_name == "recover_attention"] == [
        ("rewrote", 2)
    ]
