"""`hopper` on a CPU: the same source, run by Triton's interpreter on tiles of 32 x 32.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of the
gradient of the products; most cases therefore run in fp16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._head_loss.call import Operands, RowGradients, Saved, Settings
from memeff_compile.kernels.linear_cross_entropy import (
    hopper as hopper_module,
)
from memeff_compile.kernels.linear_cross_entropy.shapes import room_inside, shapes_for
from tests.kernels.linear_cross_entropy.engines import by_classes, by_rows
from tests.support.oracles import CASES, Case, Inputs, assert_matches_oracle, make_inputs

pytestmark = pytest.mark.interpreter

PLAIN = CASES[0]
BUSY = Case(
    "busy",
    scale=1.5,
    softcap=4.0,
    has_bias=True,
    has_column_weight=True,
    ignored_share=0.3,
    with_logit_sum=True,
)
BUSY_ENTROPY = replace(BUSY, name="busy, entropy", with_entropy=True, with_lse=True)
SERVED = [
    PLAIN,
    BUSY,
    Case("lse of ignored rows", with_lse=True, ignored_share=0.4),
    Case("entropy", with_entropy=True, ignored_share=0.4),
    BUSY_ENTROPY,
]
SIZES: dict[str, Any] = {"shape": (2, 19), "depth": 24, "vocab": 201}
SMALL_PIECES = 38 * 2 * 64


class _Hopper(torch.autograd.Function):
    """The engine without its op, which would send CPU tensors to the reference."""

    backwards: Any = by_classes

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        hidden, weight, bias, target, column_weight, knobs = args
        flat = hidden.reshape(target.numel(), -1), weight, bias, target.reshape(-1), column_weight
        rows = by_classes.forward(Operands(*flat), knobs)
        ctx.save_for_backward(*flat, rows.lse, rows.entropy)
        ctx.knobs, ctx.shape = knobs, hidden.shape
        wanted = zip(rows, knobs.wanted, strict=True)
        shaped = (part.view(target.shape) if asked else part for part, asked in wanted)
        ctx.mark_non_differentiable(rows.top)
        return tuple(shaped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *flat, lse, entropy = ctx.saved_tensors
        operands = Operands(*flat)
        cotangents = RowGradients(*(grad.reshape(-1) for grad in grads[:4]))
        kept = Saved(lse, entropy)
        mask = (True, True, operands.bias is not None)
        grad_hidden, grad_weight, grad_bias = _Hopper.backwards.backward(
            cotangents, operands, kept, ctx.knobs, mask
        )
        assert grad_hidden is not None
        return grad_hidden.view(ctx.shape), grad_weight, grad_bias, None, None, None


def call_hopper(*tensors: Tensor | None, **arguments: Any) -> tuple[Tensor, ...]:
    knobs = Settings(
        **{name: value for name, value in arguments.items() if name in Settings._fields}
    )
    results: tuple[Tensor, ...] = _Hopper.apply(*tensors, knobs)
    return results


def _check(inputs: Inputs, case: Case, slack: float = 2, **changes: Any) -> None:
    arguments = {**case.arguments(SMALL_PIECES), **changes}
    assert_matches_oracle(call_hopper, inputs, arguments, slack=slack)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_values_and_gradients_match_the_oracle(case: Case) -> None:
    _check(make_inputs(case, **SIZES, dtype=torch.float16, kind="peaked"), case)


@pytest.fixture
def pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the rows in pieces of 32, of which the last one is ragged."""
    monkeypatch.setattr(_Hopper, "backwards", by_rows)
    monkeypatch.setattr(hopper_module, "hopper_rows", lambda *sizes, **limits: 32)


@pytest.mark.usefixtures("nan_filled_empty", "pieces_of_rows")
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_pieces_of_rows_match_the_oracle(case: Case) -> None:
    inputs = make_inputs(case, **SIZES | {"shape": (3, 25)}, dtype=torch.float16, kind="peaked")
    _check(inputs, case)


@pytest.mark.usefixtures("nan_filled_empty", "pieces_of_rows")
@pytest.mark.parametrize("needed", [(True, False), (False, True)], ids=["frozen head", "trunk"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_pieces_of_rows_skip_gradients_that_nobody_needs(
    needed: tuple[bool, bool], share: float
) -> None:
    case = replace(PLAIN, ignored_share=share)
    inputs = make_inputs(case, shape=(75,), depth=24, vocab=201, dtype=torch.float16)
    knobs = Settings(-100, 1.0, 0.0, False, False, "exact", 0)
    operands = Operands(*inputs.tensors())
    rows = by_classes.forward(operands, knobs)
    nothing = torch.empty(0)
    grads = RowGradients(inputs.grad_nll, torch.zeros(75), nothing, nothing)
    given = grads, operands, Saved(rows.lse, rows.entropy), knobs
    both = by_rows.backward(*given, (True, True, False))
    one = by_rows.backward(*given, (*needed, False))
    for found, expected, is_needed in zip(one, both, (*needed, False), strict=True):
        assert (found is not None) == is_needed
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.usefixtures("pieces_of_rows")
def test_a_row_of_nan_stays_alone_in_a_ragged_piece() -> None:
    inputs = make_inputs(PLAIN, shape=(40,), depth=16, vocab=100, dtype=torch.float16)
    inputs.hidden.view(-1, 16)[35] = float("nan")
    hidden = inputs.hidden.requires_grad_()
    knobs = {**PLAIN.arguments(0), "with_entropy": True}
    nll, _, _, entropy, *_ = call_hopper(hidden, *inputs.tensors()[1:4], None, **knobs)
    (nll + entropy).sum().backward()
    is_bad = [row == 35 for row in range(40)]
    assert nll.isnan().tolist() == entropy.isnan().tolist() == is_bad
    assert hidden.grad is not None
    assert hidden.grad.isnan().any(1).tolist() == is_bad


def test_entropy_beside_classes_that_a_bias_forbids() -> None:
    case = replace(PLAIN, with_entropy=True, has_bias=True)
    inputs = make_inputs(case, shape=(20,), depth=16, vocab=100, dtype=torch.float16)
    assert inputs.bias is not None
    inputs.bias[40:] = float("-inf")
    inputs.target.clamp_(max=39)
    operands = inputs.tensors()
    grads = []
    for width in (100, 40):
        hidden = inputs.hidden.clone().requires_grad_()
        bias = inputs.bias[:width]
        results = call_hopper(
            hidden, operands[1][:width], bias, operands[3], None, **case.arguments()
        )
        torch.autograd.backward((results[0], results[3]), (inputs.grad_nll, inputs.grad_entropy))
        grads.append((results[0], results[3], hidden.grad))
    for masked, cut in zip(*grads, strict=True):
        torch.testing.assert_close(masked, cut, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("nan_filled_empty")
def test_bf16_matches_the_oracle() -> None:
    _check(make_inputs(PLAIN, **SIZES, dtype=torch.bfloat16, kind="peaked"), PLAIN, slack=3)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (33, 65)])
def test_any_size_matches_the_oracle(rows: int, vocab: int) -> None:
    case = BUSY
    inputs = make_inputs(case, shape=(rows,), vocab=vocab, depth=8, dtype=torch.float16)
    _check(inputs, case, slack=100 if vocab < 3 else 20, workspace=0)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_minimal_workspace_matches_the_oracle(share: float) -> None:
    case = Case("minimal", has_bias=True, ignored_share=share)
    inputs = make_inputs(case, shape=(40,), vocab=400, depth=32, dtype=torch.float16)
    device = inputs.hidden.device
    assert room_inside(40, 32, 400, shapes_for(device), needs_hidden=True) is not None
    _check(inputs, case, workspace=1)


def test_poisoned_row_stays_visible_and_alone() -> None:
    inputs = make_inputs(PLAIN, shape=(20,), depth=16, vocab=100, dtype=torch.float16)
    inputs.hidden[3, 4] = float("nan")
    knobs = Settings(-100, 1.0, 0.0, False, False, "exact", 0)
    rows = by_classes.forward(Operands(inputs.hidden, inputs.weight, None, inputs.target), knobs)
    assert rows.nll.isnan().tolist() == [row == 3 for row in range(20)]


def test_poison_in_an_ignored_row_does_not_spread() -> None:
    inputs = make_inputs(PLAIN, shape=(20,), depth=16, vocab=100, dtype=torch.float16)
    inputs.hidden[3], inputs.target[3] = float("nan"), -100
    results = call_hopper(*inputs.tensors()[:4], None, **PLAIN.arguments(0))
    assert bool(results[0].isfinite().all())
