"""`library`'s Triton kernels on a CPU: the same source, run by Triton's interpreter.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of the
gradient of the products; budgets are doubled to match.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._head_loss.call import Operands, RowGradients, Saved, Settings
from memeff_compile.kernels.linear_cross_entropy.shapes import library_widths
from tests.kernels.linear_cross_entropy.engines import library
from tests.support import hostile_rows
from tests.support.oracles import CASES, Case, Inputs, assert_matches_oracle, make_inputs

pytestmark = pytest.mark.interpreter

NARROW_PIECES = 21 * 64 * 6
IN_BF16 = {"plain", "weighted logit sum", "entropy of ignored rows", "everything"}
"""Cases for bf16, whose strips and pieces are two buffers; fp32, where they are one, has them all."""

FORMS = [
    pytest.param(
        case,
        dtype,
        id=f"{case.name}-{dtype}",
        marks=()
        if dtype == torch.float32 or (dtype == torch.bfloat16 and case.name in IN_BF16)
        else pytest.mark.slow,
    )
    for case in CASES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


class _Library(torch.autograd.Function):
    """The engine without its op, which would send CPU tensors to the reference."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        hidden, weight, bias, target, column_weight, knobs = args
        flat = hidden.reshape(target.numel(), -1), weight, bias, target.reshape(-1), column_weight
        found = library.forward(Operands(*flat), knobs)
        ctx.save_for_backward(*flat, found.lse, found.entropy)
        ctx.mark_non_differentiable(found.top)
        ctx.knobs, ctx.shape, ctx.has_bias = knobs, hidden.shape, bias is not None
        return tuple(part.view(target.shape) if part.numel() else part for part in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat_grads = RowGradients(*(grad.reshape(-1) for grad in grads[:4]))
        mask = (True, True, ctx.has_bias)
        *flat, lse, entropy = ctx.saved_tensors
        grad_hidden, grad_weight, grad_bias = library.backward(
            flat_grads, Operands(*flat), Saved(lse, entropy), ctx.knobs, mask
        )
        assert grad_hidden is not None
        return grad_hidden.view(ctx.shape), grad_weight, grad_bias, None, None, None


def call_library(*tensors: Tensor | None, **arguments: Any) -> tuple[Tensor, ...]:
    knobs = Settings(**arguments)
    results: tuple[Tensor, ...] = _Library.apply(*tensors, knobs)
    return results


def _check(inputs: Inputs, case: Case, workspace: int = NARROW_PIECES) -> None:
    assert_matches_oracle(call_library, inputs, case.arguments(workspace), slack=2)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(("case", "dtype"), FORMS)
def test_values_and_gradients_match_the_oracle(case: Case, dtype: torch.dtype) -> None:
    assert library_widths(21, 13, 201, NARROW_PIECES, dtype.itemsize, 132).strip == 64
    _check(make_inputs(case, dtype=dtype, kind="peaked"), case)


@pytest.mark.parametrize("vocab", [1, 2, 65, 1100])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("workspace", [0, 1, 5 * 12 * 256])
def test_any_size_matches_the_oracle(rows: int, vocab: int, workspace: int) -> None:
    case = CASES[-1]
    _check(make_inputs(case, shape=(rows,), vocab=vocab, dtype=torch.bfloat16), case, workspace)


def test_poisoned_row_stays_visible() -> None:
    inputs = make_inputs(CASES[0], shape=(4,))
    for row, poison in enumerate(("nan", "inf", "-inf")):
        inputs.hidden[row, 4] = float(poison)
    arguments = CASES[0].arguments(NARROW_PIECES)
    hidden = inputs.hidden.requires_grad_()
    nll, *_ = call_library(hidden, inputs.weight, None, inputs.target, None, **arguments)
    nll.sum().backward()
    assert hidden.grad is not None
    assert nll.isnan().tolist() == [True, True, True, False]
    assert hidden.grad.isnan().all(1).tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", hostile_rows.ROWS)
def test_entropy_and_top_of_a_hostile_row_equal_eager(name: str) -> None:
    hostile_rows.check(call_library, name, torch.float32)


def test_columns_masked_by_bias_get_no_gradient() -> None:
    case = Case("bias", has_bias=True)
    inputs = make_inputs(case)
    assert inputs.bias is not None
    inputs.bias[:130] = float("-inf")  # the first strips contain only -inf
    inputs.target.clamp_(min=130)
    _check(inputs, case)


def test_out_of_range_target_reads_nothing_and_gives_nan() -> None:
    inputs = make_inputs(CASES[0], shape=(3,))
    inputs.target[1] = 10**12
    arguments = CASES[0].arguments(NARROW_PIECES)
    nll, *_ = call_library(*inputs.tensors(), **arguments)
    assert nll.isnan().tolist() == [False, True, False]


def test_strided_inputs_match_the_oracle() -> None:
    inputs = make_inputs(CASES[0], shape=(6,))
    inputs.weight = inputs.weight.T.contiguous().T
    wide = torch.zeros(6, 2 * inputs.hidden.shape[-1])
    wide[:, ::2] = inputs.hidden
    inputs.hidden = wide[:, ::2]
    inputs.grad_nll = torch.tensor(0.5).expand(6)
    _check(inputs, CASES[0])


@pytest.mark.parametrize(
    "mask", [(True, False, False), (False, True, False), (False, False, True)], ids=str
)
def test_frozen_inputs_are_skipped(mask: tuple[bool, bool, bool]) -> None:
    case = Case("bias", has_bias=True)
    inputs = make_inputs(case, shape=(6,))
    knobs = Settings(**case.arguments(NARROW_PIECES))
    operands = Operands(*inputs.tensors())
    rows = library.forward(operands, knobs)
    given = operands, Saved(rows.lse, rows.entropy), knobs
    grads = RowGradients(*inputs.cotangents())
    wanted = library.backward(grads, *given, (True, True, True))
    found = library.backward(grads, *given, mask)
    for flag, some, all_of in zip(mask, found, wanted, strict=True):
        assert (some is not None) == flag
        assert some is None or (all_of is not None and torch.equal(some, all_of))
