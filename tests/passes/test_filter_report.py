"""The report about a gradient filter: whether the calls it counts drop any class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

from memeff_compile.kernels import linear_cross_entropy as op_folder
from tests.support.captured_graphs import compare_with_eager
from tests.support.surfaces import V

DEPTH = 2048
EXACT = "'mass' leaves nothing out here: the gradients are exact"
FILTERED = "gradient filter 'mass': a row loses at most 0.015625"


def engine_for(*_: object, is_contiguous: bool, **__: object) -> str:
    """Answer as on a GPU of capability 9.0."""
    return "hopper" if is_contiguous else "library"


def _said(
    function: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    depth: int = DEPTH,
    is_transposed: bool = False,
    **options: Any,
) -> str:
    """Return the report of a head in bf16 on a GPU where `hopper` would serve it."""
    monkeypatch.setattr(op_folder, "engine_for", engine_for)
    source = torch.Generator().manual_seed(0)
    hidden, weight = (
        (torch.randn(size, generator=source) * 0.05).to(torch.bfloat16).requires_grad_()
        for size in ((2, 8, depth), (depth, V) if is_transposed else (V, depth))
    )
    target = torch.randint(V, (2, 8), generator=source)
    settings = {"memeff.linear_cross_entropy": "mass"} | options
    near = {"rtol": 0.1, "atol": 0.05}
    outcome = compare_with_eager(function, hidden, weight, target, options=settings, **near)
    assert outcome.fired == 1, outcome.report.details()
    return " ".join(outcome.report.details().split())


def _loss(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Tensor:
    logits = F.linear(hidden, weight).float().view(-1, V)
    return F.cross_entropy(logits, target.view(-1), **settings)


def _smoothed(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _loss(hidden, weight, target, label_smoothing=0.1)


def _with_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    policy = Categorical(logits=F.linear(hidden, weight).float())
    return -policy.log_prob(target).mean() - 0.01 * policy.entropy().mean()


def test_a_loss_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _said(_loss, monkeypatch)
    assert "engine hopper" in said
    assert FILTERED in said


@pytest.mark.parametrize("function", [_smoothed, _with_entropy])
def test_what_has_a_gradient_in_all_classes_is_exact(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _said(function, monkeypatch)
    assert EXACT in said
    assert "gradient filter" not in said


def test_of_two_calls_one_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float().view(-1, V)
        other = F.cross_entropy(logits, target.view(-1).roll(1), label_smoothing=0.1)
        return F.cross_entropy(logits, target.view(-1)) + other

    assert "gradient filter 'mass' in 1 of the calls: a row loses" in _said(function, monkeypatch)


@pytest.mark.parametrize("depth", [DEPTH - 8, DEPTH + 4])
def test_short_and_odd_rows_are_exact(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EXACT in _said(_loss, monkeypatch, depth=depth)


@pytest.mark.parametrize("workspace", ["64MiB", "minimal"])
def test_a_workspace_is_filtered_too(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"memeff.linear_cross_entropy.workspace": workspace}
    assert FILTERED in _said(_loss, monkeypatch, **options)


def test_a_weight_stored_by_columns_has_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight).float().view(-1, V), target.view(-1))

    said = _said(function, monkeypatch, is_transposed=True)
    assert "engine library" in said
    assert EXACT in said
