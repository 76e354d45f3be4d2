"""memeff::linear_cross_entropy_adapted_total: its numbers, whichever engine, and who uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
import memeff_compile.kernels.linear_cross_entropy as op_folder
from memeff_compile.errors import DoubleBackwardError
from memeff_compile.kernels.linear_cross_entropy import (
    linear_cross_entropy_adapted_total,
    makes_gradients_in_forward_adapted,
    walk,
)
from tests.support.captured_graphs import compare_with_eager

IGNORED = -100
RANK = 3
MASK = [True, False, True, True, True]
SETTINGS: dict[str, Any] = {"ignore_index": IGNORED, "workspace": 1, "output_mask": MASK}


def inputs(dtype: torch.dtype, low_dtype: torch.dtype, *, has_bias: bool = True) -> list[Any]:
    """Return hidden, weight, bias, target, low and up; the weight is frozen."""
    source = torch.Generator().manual_seed(0)

    def normal(*sizes: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, generator=source, dtype=torch.float64).to(of).requires_grad_()

    hidden, weight, bias = normal(3, 7, 13), normal(101, 13), normal(101) if has_bias else None
    target = torch.randint(101, (3, 7), generator=source)
    target[torch.rand(3, 7, generator=source) < 0.3] = IGNORED
    low, up = normal(3, 7, RANK, of=low_dtype), normal(101, RANK, of=low_dtype)
    return [hidden, weight.detach(), bias, target, low, up]


def in_fp64(given: list[Any]) -> list[Any]:
    wide = []
    for each in given:
        is_real = each is not None and each.is_floating_point()
        leaf = each.detach().double() if is_real else each
        wide.append(leaf.requires_grad_(each.requires_grad) if is_real else leaf)
    return wide


def dense(given: list[Any], scale: float, softcap: float, **how: Any) -> Tensor:
    hidden, weight, bias, target, low, up = given
    z = (F.linear(hidden, weight, bias) + low @ up.T) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z.flatten(0, 1), target.flatten(), ignore_index=IGNORED, **how)


def mean(given: list[Any], scale: float = 1.0, softcap: float = 0.0, **changes: Any) -> Any:
    *operands, target, low, up = given
    norm = (target != IGNORED).sum()
    settings = {**SETTINGS, "scale": scale, "softcap": softcap, **changes}
    return linear_cross_entropy_adapted_total(*operands, target, None, norm, low, up, **settings)


DTYPES = [
    (torch.float64, torch.float64, 1e-12),
    (torch.float32, torch.float32, 1e-5),
    (torch.bfloat16, torch.bfloat16, 6e-3),  # rounded once more, times the loss's gradient
    (torch.bfloat16, torch.float32, 6e-3),
]


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(("dtype", "low_dtype", "budget"), DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (-1.5, 3.0)], ids=str)
def test_mean_matches_float64(
    scale: float, softcap: float, dtype: torch.dtype, low_dtype: torch.dtype, budget: float
) -> None:
    given = inputs(dtype, low_dtype)
    exact = in_fp64(given)
    loss, *_ = mean(given, scale, softcap)
    expected = dense(exact, scale, softcap)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=0)
    for ours, theirs in zip(given, exact, strict=True):
        if ours is None or not ours.requires_grad:
            continue
        assert ours.grad.dtype == ours.dtype
        allowed = budget if ours.dtype == dtype else 1e-5
        assert (ours.grad - theirs.grad).norm() <= allowed * theirs.grad.norm()


def test_a_trained_weight_is_served_too() -> None:
    given = inputs(torch.float64, torch.float64)
    given[1] = given[1].requires_grad_()
    exact = in_fp64(given)
    mean(given, output_mask=[True] * 5)[0].backward()
    dense(exact, 1.0, 0.0).backward()
    torch.testing.assert_close(given[1].grad, exact[1].grad)


def test_all_rows_ignored_and_no_rows() -> None:
    given = inputs(torch.float32, torch.float32)
    given[3] = torch.full_like(given[3], IGNORED)
    assert mean(given)[0].isnan()
    hidden, weight, bias, target, low, up = given
    empty = [hidden[:0], weight, bias, target[:0], low[:0], up]
    total, *gradients = mean(empty)
    assert total.isnan()
    assert [part.shape for part in gradients][3:] == [(0, 7, RANK), (101, RANK)]


def test_opcheck_passes_and_a_second_derivative_is_refused() -> None:
    hidden, weight, bias, target, low, up = inputs(torch.float64, torch.float64)
    norm = (target != IGNORED).sum()
    torch.library.opcheck(
        linear_cross_entropy_adapted_total,
        (hidden, weight, bias, target, None, norm, low, up),
        {**SETTINGS, "scale": 1.0, "softcap": 0.0},
    )
    total, *_ = mean([hidden, weight, bias, target, low, up])
    (first,) = torch.autograd.grad(total, up, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        first.sum().backward()


def test_who_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(device: str, dtype: torch.dtype, **how: Any) -> bool:
        settings = {"trains_weight": False, **how}
        return makes_gradients_in_forward_adapted(torch.device(device), dtype, **settings)

    assert not asked("cpu", torch.float32)
    monkeypatch.setattr(walk, "kernels_serve", lambda *_: True)
    assert asked("cpu", torch.float32)
    assert asked("cpu", torch.bfloat16, workspace=2**30)
    assert not asked("cpu", torch.float16)
    assert not asked("cpu", torch.bfloat16, workspace=1)
    assert not asked("cpu", torch.bfloat16, trains_weight=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_the_pass_asks_for_it_where_the_head_is_frozen(
    frozen: bool, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "is_faster_in_one_walk", lambda _: True)
    hidden, weight, bias, target, *_ = inputs(torch.float64, torch.float64)
    a, b = torch.randn(RANK, 13).double(), torch.randn(101, RANK).double()
    class_weight = torch.rand(101, dtype=torch.float64)

    def function(h: Tensor, w: Tensor, bias: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Any:
        logits = F.linear(h, w, bias) + F.linear(F.linear(h, a), b) * 0.5
        how: dict[str, Any] = {"weight": class_weight, "reduction": reduction}
        return F.cross_entropy(logits.view(-1, 101), y.view(-1), **how), logits

    given = hidden, weight.requires_grad_(not frozen), bias, a.requires_grad_(), b.requires_grad_()
    outcome = compare_with_eager(function, *given, target)
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()
    after = memeff_compile.graphs()[-1].after
    assert ("linear_cross_entropy_adapted_total" in after) == frozen
    (record,) = (r for r in outcome.report.records if r.action == "rewrote")
    assert ("the gradients are made in the forward" in record.sentence) == frozen


def test_the_report_counts_a_piece_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "is_faster_in_one_walk", lambda _: True)
    monkeypatch.setattr(op_folder, "engine_for", lambda *_, **__: "library")
    hidden, weight, _, target, low, up = inputs(torch.float64, torch.float64, has_bias=False)

    def function(h: Tensor, w: Tensor, low: Tensor, up: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(h, w) + F.linear(low, up)
        return F.cross_entropy(logits.view(-1, 101), y.view(-1))

    outcome = compare_with_eager(function, hidden, weight, low, up, target)
    (record,) = (r for r in outcome.report.records if r.action == "rewrote")
    bound = op_folder.adapted_total_bytes(21, 101, RANK, dtype=torch.float64)
    assert record.sizes["B"] == int(bound)
    assert "_adapted_total;" in record.sentence
