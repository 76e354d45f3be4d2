"""The engine `tiles` of attention on a CPU: the same source, run by Triton's interpreter.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of what
is written; the budget is doubled to match.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.attention import tiles
from memeff_compile.kernels.attention.conditions import Conditions
from memeff_compile.kernels.attention.shapes import Shape
from tests.support.dense_attention import Case, compose, dense_with_gradients, draw, largest

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

BUDGET = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v")
SMALL = tiles.Plan(Shape(16, 16, 4, 1), Shape(16, 16, 4, 1), Shape(16, 16, 4, 1))
UNEQUAL = tiles.Plan(Shape(32, 16, 4, 1), Shape(16, 32, 4, 1), Shape(16, 32, 4, 1))


def conditions(case: Case) -> Conditions:
    """Return the conditions of a case as the op hands them on."""
    given: dict[str, Any] = {"ahead": None, "behind": None, "scale": None, "softcap": 0.0}
    given |= case.settings
    scale = case.q.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
    mean = given.get("empty_rows") == "mean"
    return Conditions(*case.tables, given["ahead"], given["behind"], scale, given["softcap"], mean)


def ours(case: Case, grad: Tensor, plan: tiles.Plan) -> tuple[Tensor, ...]:
    given = conditions(case)
    out, lse = tiles.attend(case.q, case.k, case.v, given, plan=plan)
    found = tiles.gradients(grad, case.q, case.k, case.v, out, lse, given, plan=plan)
    return (out, lse, *found)


def check(case: Case, plan: tiles.Plan = SMALL) -> tuple[Tensor, ...]:
    grad = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(7)).to(case.q.dtype)
    found = ours(case, grad, plan)
    for name, ours_, wanted in zip(NAMES, found, dense_with_gradients(case, grad), strict=True):
        assert ours_.shape == wanted.shape
        is_number = wanted != -math.inf
        assert torch.equal(ours_ != -math.inf, is_number), name
        difference = largest(ours_.double()[is_number] - wanted[is_number])
        budget = BUDGET[case.q.dtype] * max(1.0, largest(wanted[is_number]))
        assert difference <= budget, f"{name}: {difference} > {budget}, {case.settings}"
    return found


@pytest.mark.parametrize("seed", range(24))
def test_values_and_gradients_equal_dense_attention(seed: int) -> None:
    queries, keys = [(35, 50), (64, 64), (20, 70), (70, 20), (1, 40), (48, 1)][seed % 6]
    groups = (1, 2)[seed % 2]
    case = draw(2, 2, groups, queries, keys, 16, torch.float32, seed)
    check(compose(case, seed), UNEQUAL if seed % 4 == 0 else SMALL)
