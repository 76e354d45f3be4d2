"""The engine `tiles` of attention on a CPU: the same source, run by Triton's interpreter.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of
stored values; the budget is doubled to match.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels.attention import tiles
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


@pytest.mark.parametrize("seed", range(7))
def test_values_and_gradients_equal_dense_attention(seed: int) -> None:
    queries, keys = [(20, 36), (32, 32), (36, 20), (1, 20), (20, 1)][seed % 5]
    case = draw(2, 2, (1, 2)[seed % 2], queries, keys, 16, torch.float32, seed)
    check(compose(case, seed), UNEQUAL if seed % 3 == 0 else SMALL)


def test_heads_that_share_keys_and_dimensions_that_are_padded() -> None:
    check(draw(1, 3, 1, 20, 20, 24, torch.float32, ahead=0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_under_a_window_and_a_softcap(dtype: torch.dtype) -> None:
    check(draw(1, 1, 1, 40, 40, 16, dtype, ahead=0, behind=20, softcap=5.0))


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_a_scale_may_be_negative_or_zero(scale: float) -> None:
    check(draw(1, 1, 1, 20, 20, 16, torch.float32, ahead=0, scale=scale))
    check(draw(1, 1, 1, 20, 20, 16, torch.float32, ahead=0, scale=scale, softcap=2.0))


@pytest.mark.parametrize("empty_rows", ["zeros", "mean"])
def test_padding_before_and_documents_after(empty_rows: str) -> None:
    """Left padding makes queries without keys; tiles in between are complete."""
    case = draw(1, 1, 1, 50, 50, 16, torch.float32, ahead=0, empty_rows=empty_rows)
    key_mask = torch.arange(50)[None] >= 17
    ids = (torch.arange(50) // 36)[None].int()
    check(Case(case.q, case.k, case.v, (key_mask, ids, ids), case.settings))


def test_only_tiles_that_count_are_visited() -> None:
    """The bounds of the tiles of queries: first, first and stop of the complete ones, stop."""
    case = draw(1, 1, 1, 64, 64, 16, torch.float32, ahead=0)
    key_mask = torch.arange(64)[None] >= 20
    ids = (torch.arange(64) // 32)[None]
    shape = SMALL.forward

    def bounds(**changes: Any) -> list[list[int]]:
        given = dataclasses.replace(conditions(case), **changes)
        found, _ = tiles._call(case.q, case.k, case.v, given).bounds(shape, None)
        return found[0].tolist()

    assert bounds(key_mask=key_mask) == [[0, 0, 0, 0], [1, 2, 2, 2], [1, 3, 3, 3], [1, 2, 3, 4]]
    assert bounds(query_ids=ids, key_ids=ids)[2:] == [[2, 3, 3, 3], [2, 2, 3, 4]]
    empty = bounds(key_mask=key_mask, mean=True)
    assert empty[:2] == [[0, 0, 0, 4], [0, 0, 0, 4]]
    assert empty[2:] == [[1, 3, 3, 3], [1, 2, 3, 4]]


def test_what_hidden_keys_hold_reaches_nothing() -> None:
    case = draw(1, 1, 1, 10, 36, 16, torch.float32)
    key_mask = torch.arange(36)[None] < 20
    clean = Case(case.q, case.k, case.v, (key_mask, None, None), {})
    hidden = Case(case.q, case.k.clone(), case.v.clone(), clean.tables, {})
    hidden.k[:, :, 20:], hidden.v[:, :, 20:] = math.nan, math.inf
    grad = torch.ones_like(case.q)
    assert all(map(torch.equal, ours(hidden, grad, SMALL), ours(clean, grad, SMALL)))


def test_large_scores_give_weights_of_one_at_most() -> None:
    case = draw(1, 1, 1, 20, 20, 16, torch.float32, ahead=0)
    case.q[:, :, 7], case.k[:, :, 3] = 1e5, 1e5
    found = ours(case, torch.ones_like(case.q), SMALL)
    wanted = dense_with_gradients(case, torch.ones_like(case.q))[0]
    assert all(bool(each.isfinite().all()) for each in found)
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-3, atol=1e-3)


def test_strides_are_followed() -> None:
    """Heads next to the depth, a depth with gaps, a gradient that is one number expanded."""
    case = draw(1, 2, 1, 20, 20, 16, torch.float32, ahead=0)
    turned = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (case.q, case.k)]
    wide = torch.zeros(1, 1, 20, 32)
    wide[..., ::2] = case.v
    strided = Case(*turned, wide[..., ::2], case.tables, case.settings)
    grad = torch.ones(()).expand(case.q.shape)
    pairs = zip(ours(case, grad, SMALL), ours(strided, grad, SMALL), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    found = ours(strided, grad, SMALL)
    assert all(found[i].transpose(1, 2).is_contiguous() for i in (0, 2, 3, 4))
