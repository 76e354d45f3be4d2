"""Accuracy, entropy and losses without a gradient next to the loss: one op call serves all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

import memeff_compile
from tests.support.captured_graphs import Outcome, compare_with_eager
from tests.support.surfaces import D, V

Function = Callable[[Tensor, Tensor, Tensor], Any]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, generator=generator, dtype=dtype) for size in ((2, 8, D), (V, D))
    )
    labels = torch.randint(0, V, (2, 8), generator=generator)
    labels[0, :3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def loss_of(z: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(z.reshape(-1, V), y.reshape(-1), **settings)


# A parameter has static sizes where dynamic=True makes those of the inputs dynamic.
HEAD = torch.nn.Parameter(inputs()[1].detach().clone())


def check(
    function: Function, *, calls: int = 1, dynamic: bool | None = None, **settings: Any
) -> Outcome:
    """Compare with eager; assert one rewrite with so many op calls that leaves no logits."""
    hidden, weight, labels = inputs()
    if dynamic:
        outcome = compare_with_eager(
            lambda h, y: function(h, HEAD, y), hidden, labels, dynamic=True, **settings
        )
    else:
        outcome = compare_with_eager(function, hidden, weight, labels, **settings)
    assert outcome.fired == 1, outcome.report.details()
    after = memeff_compile.graphs()[-1].after
    assert after.count("memeff.linear_cross_entropy(") == calls, after
    for line in after.splitlines():
        result = line.partition(" = ")[0]
        assert f", {V}]" not in result, f"logits are built: {line}"
    return outcome


# --- the likeliest class --------------------------------------------------------------------------

TOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda z: z.argmax(-1),
    "keyword": lambda z: z.argmax(dim=-1),
    "positive dimension": lambda z: z.argmax(2),
    "function": lambda z: torch.argmax(z, dim=-1),
    "kept dimension": lambda z: z.argmax(-1, keepdim=True),
    "max, second": lambda z: z.max(-1)[1],
    "max, indices": lambda z: z.max(dim=-1).indices,
    "torch.max": lambda z: torch.max(z, -1)[1],
    "max, unpacked": lambda z: (lambda values, indices: indices)(*z.max(-1)),
    "max, kept dimension": lambda z: z.max(-1, keepdim=True)[1],
    "topk": lambda z: z.topk(1).indices,
    "topk, dimension": lambda z: torch.topk(z, k=1, dim=-1)[1],
    "of probabilities": lambda z: z.softmax(-1).argmax(-1),
    "of log-probabilities": lambda z: F.log_softmax(z, dim=-1).argmax(-1),
    "detached": lambda z: z.detach().argmax(-1),
    "cast": lambda z: z.float().argmax(-1),
    "flattened": lambda z: z.view(-1, V).argmax(-1),
    "moved": lambda z: z.transpose(1, 2).argmax(1),
    "moved, kept dimension": lambda z: z.permute(0, 2, 1).argmax(1, keepdim=True),
    "shifted": lambda z: z[:, :-1].argmax(-1),
    "shifted and flattened": lambda z: z[..., :-1, :].contiguous().view(-1, V).argmax(-1),
    "last position": lambda z: z[:, -1].argmax(-1),
    "last position, kept dimension": lambda z: z[:, -1, :].argmax(-1, keepdim=True),
}


def with_top(name: str) -> Function:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        return loss_of(z, y), TOPS[name](z)

    return function


@pytest.mark.parametrize("name", TOPS)
def test_argmax_beside_the_loss_comes_from_its_call(name: str) -> None:
    check(with_top(name))


@pytest.mark.parametrize(
    "name", ["kept dimension", "flattened", "moved, kept dimension", "shifted and flattened"]
)
def test_argmax_with_dynamic_sizes_comes_from_the_call_of_the_loss(name: str) -> None:
    check(with_top(name), dynamic=True)


@pytest.mark.parametrize("before", [True, False], ids=["before the loss", "behind the loss"])
def test_accuracy_without_gradients_is_served(before: bool) -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w).float()
        if before:
            with torch.no_grad():
                accuracy = (z.argmax(-1) == y).float().mean()
            return loss_of(z, y), accuracy
        loss = loss_of(z, y)
        with torch.no_grad():
            accuracy = (z.argmax(-1) == y).float().mean()
        return loss, accuracy

    check(function, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_shifted_loss_and_shifted_accuracy_share_a_call(dynamic: bool | None) -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        loss = loss_of(z[:, :-1, :], y[:, 1:])
        hits = z[..., :-1, :].argmax(dim=-1) == y[..., 1:]
        return loss, hits.sum()

    check(function, dynamic=dynamic)


def test_metric_over_more_rows_than_the_loss_gets_a_call_of_its_own() -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        return loss_of(z[:, :-1], y[:, 1:]), z.argmax(-1)

    outcome = check(function, calls=2)
    assert "linear_cross_entropy, 2 calls;" in outcome.report.details()


def test_softcap_scale_and_bias_reach_the_metrics() -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = 5.0 * torch.tanh((F.linear(h, w) + w[:, 0]) / 4.0 / 5.0)
        return loss_of(z, y), z.argmax(-1), Categorical(logits=z).entropy()

    check(function)


# --- entropy --------------------------------------------------------------------------------------


def _rows(z: Tensor) -> Tensor:
    return z.reshape(-1, V)


def with_softmax_and_log_softmax(z: Tensor) -> Tensor:
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


def with_exp_of_log_softmax(z: Tensor) -> Tensor:
    logp = F.log_softmax(z, dim=-1)
    return -(logp.exp() * logp).sum(dim=-1)


def with_log_first(z: Tensor) -> Tensor:
    logp = torch.log_softmax(z, -1)
    return -torch.sum(logp * torch.exp(logp), dim=-1)


def with_minus_inside(z: Tensor) -> Tensor:
    p, logp = F.softmax(z, dim=-1), F.log_softmax(z, dim=-1)
    return (-p * logp).sum(-1)


def with_minus_on_the_logarithm(z: Tensor) -> Tensor:
    return (z.softmax(-1) * -z.log_softmax(-1)).sum(-1)


def with_minus_one(z: Tensor) -> Tensor:
    logp = z.log_softmax(-1)
    return -1 * (logp.exp() * logp).sum(-1)


def without_minus(z: Tensor) -> Tensor:
    logp = z.log_softmax(-1)
    return (logp.exp() * logp).sum(-1)


def with_log_of_softmax(z: Tensor) -> Tensor:
    p = z.softmax(-1)
    return -(p * p.log()).sum(-1)


def with_entr(z: Tensor) -> Tensor:
    return torch.special.entr(z.softmax(-1)).sum(-1)


def with_logsumexp_minus_mean(z: Tensor) -> Tensor:
    return torch.logsumexp(z, dim=-1) - (z.softmax(-1) * z).sum(-1)


def with_categorical(z: Tensor) -> Tensor:
    return Categorical(logits=z).entropy()


def with_kept_dimension(z: Tensor) -> Tensor:
    logp = z.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1, keepdim=True)


def of_flattened_rows(z: Tensor) -> Tensor:
    return with_exp_of_log_softmax(z.view(-1, V))


def of_log_probabilities_flattened_later(z: Tensor) -> Tensor:
    logp = z.log_softmax(-1).view(-1, V)
    return -(logp.exp() * logp).sum(-1)


def of_shifted_rows(z: Tensor) -> Tensor:
    return with_softmax_and_log_softmax(z[:, :-1])


def of_moved_classes(z: Tensor) -> Tensor:
    logp = z.transpose(1, 2).log_softmax(1)
    return -(logp.exp() * logp).sum(1)


ENTROPIES = [
    with_softmax_and_log_softmax,
    with_exp_of_log_softmax,
    with_log_first,
    with_minus_inside,
    with_minus_on_the_logarithm,
    with_minus_one,
    without_minus,
    with_log_of_softmax,
    with_entr,
    with_logsumexp_minus_mean,
    with_categorical,
    with_kept_dimension,
    of_flattened_rows,
    of_log_probabilities_flattened_later,
    of_shifted_rows,
    of_moved_classes,
]


@pytest.mark.parametrize("spelling", ENTROPIES, ids=lambda f: f.__name__)
def test_entropy_and_its_gradient_come_from_the_loss_call(
    spelling: Callable[[Tensor], Tensor],
) -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        return loss_of(z, y) - 0.1 * spelling(z).mean(), spelling(z)

    check(function)


@pytest.mark.parametrize(
    "spelling", [with_categorical, with_exp_of_log_softmax, of_shifted_rows, with_kept_dimension]
)
def test_entropy_with_dynamic_sizes_equals_eager(spelling: Callable[[Tensor], Tensor]) -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        return loss_of(z, y), spelling(z)

    check(function, dynamic=True)


@pytest.mark.parametrize("cut", ["no_grad", "detach"])
def test_entropy_as_a_metric_passes_no_gradient(cut: str) -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        if cut == "detach":
            entropy = with_categorical(z.detach())
        else:
            with torch.no_grad():
                entropy = with_exp_of_log_softmax(z)
        assert not entropy.requires_grad
        return loss_of(z, y), entropy

    check(function)


def test_policy_gradient_with_entropy_bonus_is_one_call() -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        policy = Categorical(logits=F.linear(h, w))
        return -(policy.log_prob(y.clamp(min=0)) * 0.5).mean() - 0.01 * policy.entropy().mean()

    check(function)


# --- losses without a gradient --------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
def test_loss_of_detached_logits_beside_the_loss_shares_its_call(settings: dict[str, Any]) -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        with torch.no_grad():
            perplexity = loss_of(z, y, **settings).exp()
        return loss_of(z, y), perplexity, loss_of(z.detach(), y, **settings)

    check(function)


def test_log_probabilities_without_gradient_are_served() -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        logp = F.linear(h, w).log_softmax(-1)
        picked = logp.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            old = logp.detach().gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(picked - old).exp().mean()

    outcome = compare_with_eager(function, *inputs())
    assert outcome.fired == 1, outcome.report.details()


# --- log_softmax after row moves ------------------------------------------------------------------

LATE_MOVES: dict[str, Function] = {
    "flattened": lambda h, w, y: F.nll_loss(F.linear(h, w).log_softmax(-1).view(-1, V), y.view(-1)),
    "cast and flattened": lambda h, w, y: F.nll_loss(
        F.linear(h, w).float().log_softmax(-1).double().flatten(0, 1), y.flatten()
    ),
    "transposed": lambda h, w, y: F.nll_loss(F.linear(h, w).log_softmax(-1).transpose(1, 2), y),
    "shifted": lambda h, w, y: F.nll_loss(
        F.linear(h, w).log_softmax(-1)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)
    ),
    "gathered": lambda h, w, y: (
        F.linear(h, w).log_softmax(-1).view(-1, V).gather(1, y.clamp(min=0).view(-1, 1)).mean()
    ),
    "logarithm of softmax": lambda h, w, y: F.nll_loss(
        F.linear(h, w).softmax(-1).log().view(-1, V), y.view(-1)
    ),
}


@pytest.mark.parametrize("name", LATE_MOVES)
def test_log_softmax_before_row_moves_is_read(name: str) -> None:
    tolerance = 1e-6 if "cast" in name else 1e-12
    check(LATE_MOVES[name], rtol=tolerance, atol=tolerance)


# --- near misses ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Miss:
    """A use of logits that only looks like a metric: the code of the decline."""

    code: str
    use: Callable[[Tensor], Any]


MISSES = {
    "the largest logits themselves": Miss("logits_reused(max)", lambda z: z.max(-1)[0]),
    "both results of max": Miss("logits_reused(max)", lambda z: (z.max(-1)[0], z.max(-1)[1])),
    "both results of one max": Miss("logits_reused(max)", lambda z: tuple(z.max(-1))),
    "the second best": Miss("logits_reused(topk)", lambda z: z.topk(2).indices),
    "the least likely": Miss("logits_reused(topk)", lambda z: z.topk(1, largest=False).indices),
    "argmin": Miss("logits_reused(argmin)", lambda z: z.argmin(-1)),
    "over the length": Miss("logits_reused(argmax)", lambda z: z.argmax(1)),
    "over everything": Miss("logits_reused(argmax)", lambda z: z.argmax()),
    "of changed logits": Miss("logits_reused(exp)", lambda z: (z.exp() + 1).argmax(-1)),
    "entropy of another temperature": Miss(
        "logits_reused(softmax)", lambda z: (z.softmax(-1) * (z / 2).log_softmax(-1)).sum(-1)
    ),
    "entropy with an offset": Miss(
        "logits_reused(softmax)", lambda z: (z.softmax(-1) * (z.softmax(-1) + 1e-9).log()).sum(-1)
    ),
    "entropy over the length": Miss(
        "logits_reused(softmax)", lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(1)
    ),
    "softmax over the length": Miss(
        "logits_reused(softmax)", lambda z: (z.softmax(1) * z.log_softmax(1)).sum(1)
    ),
    "entropy of other rows": Miss(
        "logits_reused(softmax)",
        lambda z: (z.softmax(-1)[:, 1:] * z.log_softmax(-1)[:, :-1]).sum(-1),
    ),
    "probabilities used once more": Miss(
        "logits_reused(output)",
        lambda z: (lambda p: ((p * z.log_softmax(-1)).sum(-1), p))(z.softmax(-1)),
    ),
    "clamped": Miss(
        "logits_reused(softmax)",
        lambda z: (z.softmax(-1) * z.log_softmax(-1).clamp(min=-5)).sum(-1),
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_miss_of_a_metric_is_declined(name: str) -> None:
    miss = MISSES[name]

    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        used = miss.use(z)
        return loss_of(z, y), *(used if isinstance(used, tuple) else (used,))

    outcome = compare_with_eager(function, *inputs())
    assert outcome.fired == 0, outcome.report.details()
    assert any(code.startswith("logits_reused") for code in outcome.codes), outcome.codes
    assert outcome.codes == [miss.code]


@pytest.mark.parametrize("part", ["probabilities", "logarithm", "logits"])
def test_entropy_cut_off_from_the_gradient_in_part_is_declined(part: str) -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        term = {
            "probabilities": lambda: z.softmax(-1).detach() * z.log_softmax(-1),
            "logarithm": lambda: z.softmax(-1) * z.log_softmax(-1).detach(),
            "logits": lambda: z.softmax(-1) * z.detach(),
        }[part]()
        return loss_of(z, y) + term.sum(-1).mean()

    outcome = compare_with_eager(function, *inputs())
    assert outcome.fired == 0
    assert outcome.codes == ["detached"]


def test_an_argmax_alone_is_left_alone() -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        return F.linear(h, w).argmax(-1)

    outcome = compare_with_eager(function, *inputs())
    assert outcome.fired == 0


def test_an_entropy_alone_is_fused() -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        return z.argmax(-1), with_categorical(z)

    outcome = compare_with_eager(function, *inputs())
    assert outcome.fired == 1


def test_rounded_ties_go_to_the_larger_unrounded_logit() -> None:
    # 256 and 257 are one number in bf16: eager's argmax takes the first, the op the larger.
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(V, 2, dtype=torch.bfloat16)
    weight[3], weight[7] = torch.tensor([256.0, 0.0]), torch.tensor([256.0, 1.0])

    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        z = F.linear(h, w)
        return F.cross_entropy(z.float(), y), z.argmax(-1)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="memeff", options={"memeff.inner": "eager"})
    labels = torch.tensor([0])
    assert function(hidden, weight, labels)[1].item() == 3
    assert compiled(hidden, weight, labels)[1].item() == 7
