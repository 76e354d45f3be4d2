"""A head with low-rank parts, as of LoRA adapters: one fused loss, or left alone with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from tests.support.captured_graphs import Outcome, compare_with_eager
from tests.support.surfaces import D, V

R = 4
Function = Callable[..., Any]


def inputs(dtype: torch.dtype = torch.float64, *frozen: str) -> dict[str, Tensor]:
    """Return hidden states, a head (V, D), its bias, two adapters A (R, D) and B (V, R), labels."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"h": (2, 8, D), "w": (V, D), "bias": (V,)}
    sizes |= {"a": (R, D), "b": (V, R), "a2": (2, D), "b2": (V, 2)}
    given = {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(name not in frozen)
        for name, size in sizes.items()
    }
    labels = torch.randint(0, V, (2, 8), generator=generator)
    labels[:, 1::5] = -100
    return {**given, "y": labels}


def loss_of(logits: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), y.reshape(-1), **settings)


def adapter(x: Any, scale: float = 2.0) -> Tensor:
    """PEFT's product: B(A(h)) * scale."""
    return F.linear(F.linear(x.h, x.a), x.b) * scale


def adapted(x: Any) -> Tensor:
    return F.linear(x.h, x.w) + adapter(x)


class Given(NamedTuple):
    """The inputs by name."""

    h: Any
    w: Any
    bias: Any
    a: Any
    b: Any
    a2: Any
    b2: Any
    y: Any


def compare(
    function: Callable[[Any], Any], given: dict[str, Tensor] | None = None, **settings: Any
) -> Outcome:
    tensors = (inputs() if given is None else given).values()
    return compare_with_eager(lambda *each: function(Given(*each)), *tensors, **settings)


def two_adapters(x: Any) -> Tensor:
    return adapted(x) + F.linear(F.linear(x.h, x.a2), x.b2) * 0.5


SERVED: dict[str, Callable[[Any], Any]] = {
    "as PEFT adds it": lambda x: loss_of(adapted(x), x.y),
    "adapter first": lambda x: loss_of(adapter(x) + F.linear(x.h, x.w), x.y),
    "bias": lambda x: loss_of(F.linear(x.h, x.w, x.bias) + adapter(x), x.y),
    "two adapters": lambda x: loss_of(two_adapters(x), x.y),
    "stored transposes": lambda x: loss_of(
        x.h @ x.w.T + torch.einsum("blr,rv->blv", x.h @ x.a.T, x.b.t().contiguous()) / 2, x.y
    ),
    "another input of A": lambda x: loss_of(
        F.linear(x.h, x.w) + F.linear(F.linear(x.h.sin(), x.a), x.b), x.y
    ),
    "softcap and bias behind": lambda x: loss_of(
        3 * torch.tanh((adapted(x) / 2 + x.bias) / 3), x.y
    ),
    "rows shifted": lambda x: loss_of(adapted(x)[:, :-1], x.y[:, 1:]),
    "classes moved": lambda x: F.cross_entropy(adapted(x).transpose(1, 2), x.y),
    "a sum over num_items": lambda x: loss_of(adapted(x), x.y, reduction="sum") / 7,
    "per token": lambda x: loss_of(adapted(x), x.y, reduction="none"),
    "label smoothing": lambda x: loss_of(
        adapted(x), x.y, label_smoothing=0.1, weight=x.w[:, 0].detach().abs()
    ),
    "log-probabilities": lambda x: (
        adapted(x).log_softmax(-1).gather(-1, x.y.clamp(min=0).unsqueeze(-1))
    ),
    "z-loss and entropy": lambda x: _with_statistics(adapted(x), x.y),
}


def _with_statistics(logits: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    z_loss = logits.logsumexp(-1).square().mean()
    return loss_of(logits, y) + 1e-2 * z_loss, -(p * log_p).sum(-1), logits.argmax(-1)


@pytest.mark.parametrize("name", SERVED)
def test_a_low_rank_part_is_served_with_the_head(name: str) -> None:
    outcome = compare(SERVED[name])
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()
    after = memeff_compile.graphs()[-1].after
    assert "linear_cross_entropy_adapted" in after
    assert f"8, {V}]" not in after


@pytest.mark.parametrize("frozen", [("w", "bias"), ("h", "w", "bias"), ("a", "b"), ()], ids=str)
def test_gradients_equal_eager_whatever_is_frozen(frozen: tuple[str, ...]) -> None:
    assert compare(SERVED["bias"], inputs(torch.float64, *frozen)).fired == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two adapters", "z-loss and entropy"])
def test_under_inductor(name: str) -> None:
    assert compare(SERVED[name], inner="inductor").fired == 1


def test_a_call_without_gradients_is_served() -> None:
    outcome = compare(SERVED["bias"], inputs(torch.float64, *"h w bias a b a2 b2".split()))
    assert outcome.fired == 1


def test_dynamic_rows_are_served() -> None:
    given = inputs()
    h, y = given.pop("h"), given.pop("y")
    held = [torch.nn.Parameter(each.detach()) for each in given.values()]

    def function(h: Tensor, y: Tensor) -> Tensor:
        return loss_of(two_adapters(Given(h, *held, y)), y)

    outcome = compare_with_eager(function, h, y, dynamic=True)
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()


def test_the_filters_compute_everything_and_say_so() -> None:
    options = {"memeff.linear_cross_entropy": "mass"}
    outcome = compare(SERVED["as PEFT adds it"], options=options)
    assert outcome.fired == 1
    assert "leaves nothing out here" in outcome.report.details()


def test_the_report_counts_the_rank() -> None:
    records = compare(SERVED["two adapters"]).report.records
    (record,) = (r for r in records if r.bytes_after is not None)
    assert record.sizes["R"] == R + 2
    assert "R" in map(str, record.bytes_after.free_symbols)
    assert "2 low-rank parts" in record.sentence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_adapter_in_fp32_keeps_its_precision(dtype: torch.dtype) -> None:
    """As PEFT writes it with a 16-bit base: the sum is fp32, rounded afterwards."""

    def function(h: Tensor, w: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(h, w)
        logits = logits + F.linear(F.linear(h.to(a.dtype), a), b) * 2.0
        return loss_of(logits.to(h.dtype).float(), y)

    given = inputs(torch.float32)
    wide = [given[name].detach() for name in ("h", "w", "a", "b")]
    h, w = (each.to(dtype).requires_grad_() for each in wide[:2])
    a, b = (each.requires_grad_() for each in wide[2:])
    exact = [each.detach().double().requires_grad_() for each in (h, w, a, b)]
    function(*exact, given["y"]).backward()
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(function, backend="memeff", options={"memeff.inner": "eager"})
    errors = []
    for each in (function, compiled):
        leaves = [leaf.detach().requires_grad_() for leaf in (h, w, a, b)]
        each(*leaves, given["y"]).backward()
        pairs = zip(leaves, exact, strict=True)
        errors.append([float((x.grad - e.grad).norm() / e.grad.norm()) for x, e in pairs])  # type: ignore[union-attr]
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    for eager, ours in zip(*errors, strict=True):
        assert ours <= 1.1 * eager


RETURNED: dict[str, Callable[[Any], Any]] = {
    "logits": adapted,
    "an adapter scaled by 1": lambda x: F.linear(x.h, x.w) + adapter(x, 1.0),
    "a bias inside and one behind": lambda x: F.linear(x.h, x.w, x.bias) + adapter(x) + x.bias,
    "two adapters": two_adapters,
    "a softcap, in fp32": lambda x: (30 * torch.tanh(adapted(x) / 30)).float(),
    "last position": lambda x: adapted(x)[:, -1:],
}


@pytest.mark.parametrize("name", RETURNED)
def test_returned_logits_are_deferred_and_equal_eager(name: str) -> None:
    """Values, and gradients that come back through them together with the loss's."""

    def function(x: Any) -> tuple[Tensor, Tensor]:
        logits = RETURNED[name](x)
        return loss_of(logits, x.y[:, : logits.shape[1]]), logits

    exact = "fp32" not in name
    outcome = compare(function, **({} if exact else {"rtol": 1e-5, "atol": 1e-5}))
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()
    assert "logits_deferred" in {r.code for r in outcome.report.records}


KEPT: dict[str, Callable[[Any], Tensor]] = {
    "another input of A": lambda x: F.linear(x.h, x.w) + F.linear(F.linear(x.h.sin(), x.a), x.b),
    "dropout": lambda x: (
        F.linear(x.h, x.w) + F.linear(F.linear(F.dropout(x.h, 0.5, True, False), x.a), x.b)
    ),
    "scaled twice": lambda x: F.linear(x.h, x.w) + adapter(x) / 3,
    "computed adapter": lambda x: F.linear(x.h, x.w) + F.linear(F.linear(x.h, x.a.sin()), x.b),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_returned_logits_are_declined(name: str) -> None:
    def function(x: Any) -> tuple[Tensor, Tensor]:
        logits = KEPT[name](x)
        return loss_of(logits, x.y), logits

    outcome = compare(function)
    assert (outcome.fired, outcome.codes) == (0, ["logits_not_deferrable"])
    alone = compare(lambda x: function(x)[0])
    assert (alone.fired, alone.codes) == (1, []), alone.report.details()


def test_logits_without_a_loss_stay_as_they_are_and_the_report_says_why() -> None:
    given, narrow = inputs(), ("h", "w", "a", "a2")  # a head is more than four times as wide as h
    given |= {name: given[name].detach()[..., :5].requires_grad_() for name in narrow}
    plain = compare(lambda x: F.linear(x.h, x.w), given)
    assert [r.code for r in plain.report.records] == ["logits_deferred"]
    outcome = compare(adapted, given)
    (record,) = (r for r in outcome.report.records if r.pass_name == "defer_logits")
    assert (record.action, record.code) == ("declined", "logits_not_deferrable")
    assert "a loss outside the graph has no op for it" in record.sentence


def learned_scale(x: Any) -> Tensor:  # as DoRA's
    return loss_of(F.linear(x.h, x.w) + adapter(x) * x.bias, x.y)


def partial_sum_used(x: Any) -> Any:
    base = F.linear(x.h, x.w)
    return loss_of(base + adapter(x), x.y), base.sum()


def adapters_logits_used(x: Any) -> Any:
    low = adapter(x)
    return loss_of(F.linear(x.h, x.w) + low, x.y), low.sum()


def base_without_gradient(x: Any) -> Tensor:
    with torch.no_grad():
        base = F.linear(x.h, x.w)
    return loss_of(base + adapter(x), x.y)


def base_detached(x: Any) -> Tensor:
    return loss_of(F.linear(x.h, x.w).detach() + adapter(x), x.y)


def rows_broadcast(x: Any) -> Tensor:
    return loss_of(F.linear(x.h, x.w) + F.linear(F.linear(x.h[:1], x.a), x.b), x.y)


def added_in_place(x: Any) -> Tensor:
    logits = F.linear(x.h, x.w)
    logits += adapter(x)
    return loss_of(logits, x.y)


@torch.no_grad()
def weight_written_between(x: Any) -> Tensor:
    weight = x.w * 1
    base = F.linear(x.h, weight)
    weight.mul_(2)
    return loss_of(base + adapter(x), x.y)


def adapter_in_more_bits(x: Any) -> Tensor:
    """fp64 with a base in fp32, where the op would have less precision."""
    base = F.linear(x.h.float(), x.w.float())
    return loss_of(base + adapter(x).float(), x.y).double()


def of_full_rank(x: Any) -> Tensor:
    return loss_of(F.linear(x.h, x.w) + F.linear(x.h.sin(), x.w), x.y)


def subtracted(x: Any) -> Tensor:
    return loss_of(F.linear(x.h, x.w) - adapter(x), x.y)


DECLINED = {
    learned_scale: "logits_combined",
    partial_sum_used: "logits_reused(sum)",
    adapters_logits_used: "logits_reused(sum)",
    base_without_gradient: "logits_combined",
    base_detached: "logits_combined",
    rows_broadcast: "logits_combined",
    added_in_place: "no_linear_head",
    weight_written_between: "mutated",
    adapter_in_more_bits: "logits_combined",
    of_full_rank: "logits_combined",
    subtracted: "no_linear_head",
}


@pytest.mark.parametrize("function", DECLINED, ids=lambda f: f.__name__)
def test_other_sums_are_declined(function: Function) -> None:
    outcome = compare(function)
    assert (outcome.fired, outcome.codes) == (0, [DECLINED[function]]), outcome.report.details()
