"""The engine `in_place` of the gated linear on a CPU: the same source, run by Triton's interpreter.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of
stored values; the budget is doubled to match.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.gated_linear import ACTIVATIONS, in_place, reference
from memeff_compile.kernels.gated_linear.in_place_kernels import BLOCK

pytestmark = pytest.mark.interpreter

BUDGET = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
HARD = [0.0, -0.0, 1e-30, -1e4, 1e4, -88.0, 20.0, float("inf"), -float("inf"), float("nan")]


def draw(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(count, generator=generator) * 2 for _ in range(3))
    return gate.to(dtype), up.to(dtype), grad.to(dtype)


def assert_near(found: Tensor, exact: Tensor) -> None:
    """Rounded once: the dtype's error, plus fp32's for numbers of size one."""
    limit = BUDGET[found.dtype] * exact.abs() + 4e-6
    assert ((found.double() - exact).abs() <= limit).all()


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numbers_are_right(activation: str, dtype: torch.dtype) -> None:
    gate, up, grad = draw(2 * BLOCK + 77, dtype)
    exact = [t.double() for t in (gate, up, grad)]
    product = torch.empty_like(exact[0])
    reference.product(exact[0], exact[1], product, activation)
    found = torch.empty_like(gate)
    in_place.product(gate, up, found, activation)
    assert_near(found, product)
    reference.gradients(*exact, activation)
    in_place.gradients(gate, up, grad, activation)
    for ours, theirs in zip((gate, up, grad), exact, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_nothing_beyond_the_end_is_touched(count: int) -> None:
    wide = [torch.cat([t, torch.full((BLOCK,), 3.0)]) for t in draw(count, torch.float32)]
    in_place.gradients(*(t[:count] for t in wide), "silu")
    in_place.product(wide[0][:count], wide[1][:count], wide[2][:count], "silu")
    for tensor in wide:
        assert tensor[count:].eq(3).all()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_numbers_are_the_references(activation: str) -> None:
    """nan and inf where the reference has them, finite numbers elsewhere."""
    gate = torch.tensor(HARD).repeat_interleave(len(HARD))
    up, grad = torch.tensor(HARD).repeat(len(HARD)), torch.full((len(HARD) ** 2,), 0.5)
    theirs = [t.clone() for t in (gate, up, grad)]
    in_place.gradients(gate, up, grad, activation)
    reference.gradients(*theirs, activation)
    for found, expected in zip((gate, up, grad), theirs, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
