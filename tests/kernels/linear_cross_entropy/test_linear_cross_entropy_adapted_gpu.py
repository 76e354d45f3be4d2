"""A head with a low-rank part on a real GPU: values, gradients and the bytes a call takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._head_loss.call import ScalarLoss
from memeff_compile.kernels.linear_cross_entropy import (
    TOTAL_BYTES_PER_ROW,
    adapted_total_bytes,
    bytes_after,
    linear_cross_entropy_adapted,
    linear_cross_entropy_adapted_total,
)
from tests.kernels.linear_cross_entropy.engines import library
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
    how: dict[str, Any] = {"dtype": torch.bfloat16, "engine": "library", "device_type": "cuda"}
    bound = int(bytes_after(rows, depth + RANK, vocab, **how))
    assert step() <= bound + 2**20
    assert bound < 2 * rows * vocab


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("workspace", [0, 16 * 3001 * 6])
def test_a_total_equals_what_two_passes_give(
    workspace: int, dtype: torch.dtype, low_dtype: torch.dtype
) -> None:
    case = Case("bias", has_bias=True, ignored_share=0.3)
    inputs = make_inputs(case, **SIZES, dtype=dtype, kind="peaked")
    hidden, weight, bias, target, _ = inputs.tensors()
    assert hidden is not None
    assert weight is not None
    assert target is not None
    rows, of = target.numel(), dtype if dtype == torch.float32 else low_dtype
    low, up = (torch.randn(n, RANK, device="cuda").to(of) for n in (rows, weight.shape[0]))
    given = ScalarLoss(
        *(hidden.reshape(rows, -1), weight, bias, target.reshape(-1)),
        torch.rand(rows, device="cuda"),
        torch.tensor(7.0, device="cuda"),
        case.ignore_index,
        *(1.5, 5.0, workspace),
        (True, False, True, True, True),
    )._replace(low=low, up=up)
    total, *found = library.total(given)
    expected, *wanted = library.in_two_walks(given)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=0)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            allowed = 1e-4 if ours.dtype == torch.float32 else 8e-3
            assert (ours - theirs).norm() <= allowed * theirs.norm()


@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_total_takes_no_more_than_the_formula_says(low_dtype: torch.dtype) -> None:
    rows, depth, vocab = 8192, 1024, 64_000
    new: Any = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(rows, depth, **new).requires_grad_()
    weight = torch.randn(vocab, depth, **new) / 32
    low = torch.randn(rows, RANK, device="cuda", dtype=low_dtype).requires_grad_()
    up = torch.randn(vocab, RANK, device="cuda", dtype=low_dtype).requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")
    settings = {"ignore_index": -100, "scale": 1.0, "softcap": 0.0, "workspace": 0}

    def step() -> int:
        given = hidden, weight, None, target, None, None, low, up
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        mask = [True, False, False, True, True]
        total, *_ = linear_cross_entropy_adapted_total(*given, **settings, output_mask=mask)
        found = torch.autograd.grad(total, (hidden, low, up))
        returned = sum(each.untyped_storage().nbytes() for each in found)
        return torch.cuda.max_memory_allocated() - resident - returned

    step()
    bound = int(adapted_total_bytes(rows, vocab, RANK, dtype=torch.bfloat16))
    assert step() <= bound + TOTAL_BYTES_PER_ROW * rows + 2**20
    assert bound < 2 * rows * vocab
