"""The divergence of two heads as a plain function: values, masks, deferred teachers, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile import linear_divergence
from memeff_compile.errors import StaleLogitsError, UnsupportedInputError

B, L, D, K, V = 2, 5, 8, 12, 128
KINDS = ("forward_kl", "reverse_kl", "jsd", "cross_entropy")


def draw(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    student = {"hidden": torch.randn(B, L, D), "weight": torch.randn(V, D)}
    teacher = {"teacher": torch.randn(B, L, K), "teacher_weight": torch.randn(V, K)}
    trained = {name: each.to(dtype).requires_grad_() for name, each in student.items()}
    return trained | {name: each.to(dtype) for name, each in teacher.items()}


def eager(given: dict[str, Tensor], kind: str, beta: float = 0.5, by: float = 1.0) -> Tensor:
    """Return a number per row."""
    s = (F.linear(given["hidden"], given["weight"]) / by).log_softmax(-1)
    t = (F.linear(given["teacher"], given["teacher_weight"]) / by).log_softmax(-1)
    p, q = s.exp(), t.exp()
    mixed = (beta * q + (1 - beta) * p).log()
    return {
        "forward_kl": lambda: q * (t - s),
        "reverse_kl": lambda: p * (s - t),
        "jsd": lambda: beta * q * (t - mixed) + (1 - beta) * p * (s - mixed),
        "cross_entropy": lambda: -q * s,
    }[kind]().sum(-1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["all rows", "a mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_eager(kind: Any, is_masked: bool, reduction: Any) -> None:
    given = draw()
    mask = torch.rand(B, L) > 0.4 if is_masked else None
    rows = eager(given, kind, 0.3, 2.0)
    wanted = rows if mask is None else rows * mask
    count = rows.numel() if mask is None else mask.sum()
    wanted = {"mean": wanted.sum() / count, "sum": wanted.sum(), "none": wanted}[reduction]
    how: dict[str, Any] = {"kind": kind, "beta": 0.3, "temperature": 2.0}
    found = linear_divergence(**given, **how, mask=mask, reduction=reduction)
    torch.testing.assert_close(found, wanted)
    trained = given["hidden"], given["weight"]
    weights = torch.linspace(1, 2, found.numel(), dtype=found.dtype).view(found.shape)
    pairs = zip(
        torch.autograd.grad((found * weights).sum(), trained),
        torch.autograd.grad((wanted * weights).sum(), trained),
        strict=True,
    )
    for got, expected in pairs:
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("with_rest", [False, True], ids=["k classes", "the rest as one"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_of_whom_some_classes_are_known(kind: Any, with_rest: bool) -> None:
    given = draw()
    student = given["hidden"], given["weight"]
    logits = given["teacher"] @ given["teacher_weight"].t()
    t, classes = (logits / 2).log_softmax(-1).topk(6)
    s = (F.linear(*student) / 2).log_softmax(-1).gather(-1, classes)
    if with_rest:
        s, t_all = (torch.cat([x, (1 - x.exp().sum(-1, True)).log()], -1) for x in (s, t))
    else:
        t_all = t
    p, q = s.exp(), t_all.exp()
    mixed = (0.3 * q + 0.7 * p).log()
    rows = {
        "forward_kl": q * (t_all - s),
        "reverse_kl": p * (s - t_all),
        "jsd": 0.3 * q * (t_all - mixed) + 0.7 * p * (s - mixed),
        "cross_entropy": -q * s,
    }[kind].sum(-1)
    mask = torch.arange(B * L).view(B, L) % 3 > 0
    wanted = (rows * mask).sum() / mask.sum()
    how: dict[str, Any] = {"kind": kind, "beta": 0.3, "temperature": 2.0, "mask": mask}
    found = linear_divergence(*student, t, classes=classes, with_rest=with_rest, **how)
    torch.testing.assert_close(found, wanted)
    pairs = (torch.autograd.grad(loss, student) for loss in (found, wanted))
    for got, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("beta", "kind"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_a_jsd_of_one_side_alone_is_that_kl(beta: float, kind: str) -> None:
    given = draw()
    found = linear_divergence(**given, kind="jsd", beta=beta)
    torch.testing.assert_close(found, eager(given, kind).mean())


def test_a_teacher_that_trains_gets_no_gradient() -> None:
    given = draw()
    given["teacher_weight"].requires_grad_()
    linear_divergence(**given).backward()
    assert given["teacher_weight"].grad is None
    assert given["weight"].grad is not None


def test_autocast_casts_both_heads_and_fp16_has_its_gradients_in_the_backward() -> None:
    given = draw(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_divergence(**given)
    torch.testing.assert_close(found, eager(given, "forward_kl").mean(), rtol=2e-2, atol=1e-3)
    half = {name: each.detach().half() for name, each in given.items()}
    half["hidden"].requires_grad_()
    loss = linear_divergence(**half)
    (1e4 * loss).backward()
    assert half["hidden"].grad is not None
    assert half["hidden"].grad.isfinite().all()


class Teacher(nn.Module):
    def __init__(self, cap: float = 0.0) -> None:
        super().__init__()
        self.cap, self.head = cap, nn.Linear(K, V, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x) / 3
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


@pytest.mark.parametrize(("cap", "computed"), [(0.0, 0), (5.0, 1)], ids=["plain", "capped"])
def test_deferred_logits_of_a_compiled_teacher(cap: float, computed: int) -> None:
    torch._dynamo.reset()
    model, given = Teacher(cap), draw()
    called = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    logits = called(given["teacher"])
    student = given["hidden"], given["weight"]
    found = linear_divergence(*student, logits, temperature=2.0)
    assert logits.materialisations == computed
    wanted = linear_divergence(*student, model(given["teacher"]).detach(), temperature=2.0)
    torch.testing.assert_close(found, wanted)
    uses = "linear_divergence: 1" in memeff_compile.last_report().details()
    assert uses == (not computed)
    with torch.no_grad():
        model.head.weight.mul_(2)
    if not cap:
        with pytest.raises(StaleLogitsError):
            linear_divergence(*student, logits)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a kind": ({"kind": "kl"}, "kind is 'kl'; use one of forward_kl"),
    "a reduction": ({"reduction": "batchmean"}, "reduction is 'batchmean'; use 'mean'"),
    "a share": ({"beta": 1.5}, "beta is 1.5; it must be between 0 and 1"),
    "a temperature": ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
    "a mask of other rows": ({"mask": torch.ones(B)}, "mask has shape"),
    "classes and a head": (
        {"classes": torch.zeros(B, L, 3, dtype=torch.int64)},
        "classes are given with a teacher's head",
    ),
    "classes without numbers": (
        {"classes": torch.zeros(B, L, 3, dtype=torch.int64), "teacher_weight": None},
        "log-probabilities are needed",
    ),
    "other classes": ({"teacher_weight": torch.ones(9, K, dtype=torch.float64)}, "has 9 classes"),
}


@pytest.mark.parametrize(("changed", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_gets_a_sentence(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedInputError, match=said):
        linear_divergence(**{**draw(), **changed})


def test_the_function_is_public() -> None:
    assert memeff_compile.linear_divergence is linear_divergence
