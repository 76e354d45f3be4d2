"""A head with a low-rank part on a real GPU: values, gradients and the bytes a call takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.linear_cross_entropy import bytes_after, linear_cross_entropy_adapted
from tests.support.oracles import CASES, Case, assert_matches_oracle, make_inputs

pytestmark = pytest.mark.gpu

RANK = 8
SIZES: dict[str, Any] = {"shape": (3, 43), "depth": 96, "vocab": 3001, "device": "cuda"}


def in_two(dtype: torch.dtype | None) -> Any:
    def call(hidden: Tensor, weight: Tensor, *others: Any, **arguments: Any) -> tuple[Tensor, ...]:
        low, up = (each[..., -RANK:].to(dtype or each.dtype) for each in (hidden, weight))
        given = hidden[..., :-RANK], weight[:, :-RANK], *others, low, up
        found: tuple[Tensor, ...] = linear_cross_entropy_adapted(*given, **arguments)
        return found

    return call


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("low_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_match_the_oracle(
    case: Case, dtype: torch.dtype, low_dtype: torch.dtype | None
) -> None:
    inputs = make_inputs(case, **SIZES, dtype=dtype, kind="peaked")
    for workspace in (0, 129 * 12 * 256):
        assert_matches_oracle(in_two(low_dtype), inputs, case.arguments(workspace), slack=2)


@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_takes_no_more_than_the_formula_says(low_dtype: torch.dtype) -> None:
    rows, depth, vocab = 4096, 1024, 32_000
    new: Any = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(rows, depth, **new).requires_grad_()
    weight = torch.randn(vocab, depth, **new) / 32
    low = torch.randn(rows, RANK, device="cuda", dtype=low_dtype).requires_grad_()
    up = torch.randn(vocab, RANK, device="cuda", dtype=low_dtype).requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")

    def step() -> int:
        arguments = Case("plain").arguments()
        given = hidden, weight, None, target, None, low, up
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        nll, *_ = linear_cross_entropy_adapted(*given, **arguments)
        found = torch.autograd.grad(nll.sum(), (hidden, low, up))
        returned = sum(each.untyped_storage().nbytes() for each in found)
        return torch.cuda.max_memory_allocated() - resident - returned

    step()
    how: dict[str, Any] = {"dtype": torch.bfloat16, "engine": "hybrid", "device_type": "cuda"}
    bound = int(bytes_after(rows, depth + RANK, vocab, **how))
    assert step() <= bound + 2**20
    assert bound < 2 * rows * vocab
