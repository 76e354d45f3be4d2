"""Gradient filters on a GPU: lost mass per row, both ops, and reproducibility."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import registry
from benchmarks.ops import filter_activity
from memeff_compile import linear_cross_entropy
from tests.support.oracles import relative_error

pytestmark = pytest.mark.gpu

IGNORED = -100
SHAPE = "3000x2048x20001"


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    data = registry.inputs(SHAPE, "trained", "cuda", torch.bfloat16, ignored=20)
    return data.hidden, data.weight, data.target


def _gradients(inputs: tuple[Tensor, Tensor, Tensor], reduction: str, how: str) -> list[Tensor]:
    hidden, weight, target = inputs
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, filter=how)
    loss = loss.sum() / (target != IGNORED).sum() if reduction == "none" else loss
    return list(torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_mass_keeps_its_bound(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs()
    hidden, weight, target = (part.detach() for part in inputs)
    counts = target != IGNORED
    away = (hidden.double() @ weight.double().t()).softmax(-1)
    away[counts, target[counts]] -= 1
    away *= counts[:, None]
    found = _gradients(inputs, reduction, "mass")
    exact = away @ weight.double(), away.t() @ hidden.double()
    lacks = (found[0].double() * counts.sum() - exact[0]).norm(dim=1)
    rounding = 2.0**-7 * exact[0].norm(dim=1)
    # The dropped mass, which is restored on the kept classes.
    assert bool((lacks <= 2.0**-5 * weight.double().norm(dim=1).max() + rounding + 1e-4).all())
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one * counts.sum(), other) < 2e-2
    for one, other in zip(found, _gradients(inputs, reduction, "mass"), strict=True):
        assert torch.equal(one, other)
    seen = filter_activity.measure(hidden, weight, target)
    assert float(seen.dropped.max()) <= 2.0**-6
    assert 0 < seen.active < 1


def test_rows_that_are_short_lose_nothing() -> None:
    hidden, weight, target = _inputs()
    inputs = hidden[:, :512], weight[:, :512].contiguous(), target
    for one, other in zip(
        _gradients(inputs, "mean", "mass"), _gradients(inputs, "mean", "exact"), strict=True
    ):
        assert torch.equal(one, other)
