"""Attention's kernels in Gluon on a CPU, under padding and packed documents, against float64."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.attention import hopper, hopper_gradients, tiles
from tests.kernels.attention.test_attention_interpreter import NAMES, conditions
from tests.support.attention_tables import KINDS, tables
from tests.support.dense_attention import Case, dense_with_gradients, draw, largest
from tests.support.gluon_on_cpu import emulate

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

BUDGET = 2e-5
SLOW = ("padding of all sequences", "short documents", "documents in turn", "keys with gaps")
"""Kinds of tables of which faster tests have each part."""
Sizes = tuple[int, int, int, int, int]


def found_by(case: Case, grad: Tensor) -> tuple[Tensor, ...]:
    call = tiles._call(case.q, case.k, case.v, conditions(case))
    out, lse = hopper.attend(call)
    return (out, lse, *hopper_gradients.gradients(call, grad, out, lse))


def check(case: Case, like: Case | None = None) -> None:
    """Compare a case with float64, or with what another case gives in float64."""
    grad = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(7))
    wanted = dense_with_gradients(like or case, grad)
    for name, ours, theirs in zip(NAMES, found_by(case, grad), wanted, strict=True):
        is_number = theirs != -math.inf
        assert torch.equal(ours != -math.inf, is_number), name
        difference = largest(ours.double()[is_number] - theirs[is_number])
        assert difference <= BUDGET * max(1.0, largest(theirs[is_number])), name


def drawn(kind: str, depth: int, sizes: Sizes, **settings: Any) -> Case:
    case = draw(*sizes, depth, torch.float32, **settings)
    return Case(case.q, case.k, case.v, tables(kind, sizes[0], *sizes[3:]), case.settings)


def some_slow(*cases: Any, slow: Container[Any]) -> list[Any]:
    """Return a test's parameters, of which those in `slow` do not run by default."""
    return [pytest.param(each, marks=[pytest.mark.slow] if each in slow else []) for each in cases]


@pytest.mark.parametrize("kind", some_slow(*KINDS, slow=SLOW))
def test_causal_attention_under_tables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, hopper, hopper_gradients, programs=5)
    check(drawn(kind, 64, (2, 2, 1, 400, 400), ahead=0))


@pytest.mark.parametrize("settings", [{"ahead": 0}, {"ahead": 0, "behind": 100}, {}], ids=str)
def test_masks_that_depend_on_positions(
    settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, hopper, hopper_gradients, programs=3)
    check(draw(2, 2, 1, 300, 400, 128, torch.float32, **settings))


@pytest.mark.parametrize(
    ("kind", "sizes", "settings"),
    [
        pytest.param("right padding", (4, 2, 1, 350, 500), {}, marks=pytest.mark.slow),
        ("documents", (2, 2, 1, 500, 350), {"ahead": 0, "behind": 100}),
        pytest.param(
            *("documents in turn and gaps", (2, 2, 2, 144, 700), {"ahead": 600}),
            marks=pytest.mark.slow,
        ),
        ("documents and padding", (2, 2, 1, 450, 150), {"ahead": -100}),
    ],
)
def test_other_bounds_under_tables(
    kind: str, sizes: Sizes, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, hopper, hopper_gradients, programs=7)
    check(drawn(kind, 128, sizes, **settings))


@pytest.mark.parametrize("bad", some_slow("nan", "inf", slow=("inf",)))
@pytest.mark.parametrize(
    "kind", some_slow("right padding", "left padding", "keys with gaps", slow=("right padding",))
)
def test_what_hidden_keys_hold_reaches_nothing(
    kind: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, hopper, hopper_gradients, programs=5)
    case = drawn(kind, 64, (4, 2, 1, 300, 300), ahead=0)
    assert case.tables[0] is not None
    hidden = ~case.tables[0][:, None, :, None]
    k, v = (each.masked_fill(hidden, float(bad)) for each in (case.k, case.v))
    check(Case(case.q, k, v, case.tables, case.settings), like=case)
