"""Engine H with a low-rank part of the head, its kernels run by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.linear_cross_entropy import hybrid
from memeff_compile.kernels.linear_cross_entropy.call import Kept, Knobs, Operands, RowGradients
from tests.support.oracles import CASES, Case, assert_matches_oracle, make_inputs

pytestmark = pytest.mark.interpreter

RANK = 3
NARROW_PIECES = 21 * 64 * 6
PLAIN, EVERYTHING = CASES[0], CASES[-1]


class _EngineH(torch.autograd.Function):
    """The engine without its op, which would send CPU tensors to the reference."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, knobs = args
        given = Operands(*tensors).flat()
        found = hybrid.forward(given, knobs)
        ctx.save_for_backward(*given, found.lse, found.entropy)
        ctx.mark_non_differentiable(found.top)
        ctx.knobs, ctx.shapes = knobs, (tensors[0].shape, tensors[5].shape)
        return tuple(p.view(tensors[3].shape) if p.numel() else p for p in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = RowGradients(*(grad.reshape(-1) for grad in grads[:4]))
        *tensors, lse, entropy = ctx.saved_tensors
        given, mask = Operands(*tensors), (True, True, tensors[2] is not None, True, True)
        found = hybrid.backward(flat, given, Kept(lse, entropy), ctx.knobs, mask)
        of_hidden, of_weight, of_bias, of_low, of_up = found
        assert of_hidden is not None
        assert of_low is not None
        of_hidden, of_low = of_hidden.view(ctx.shapes[0]), of_low.view(ctx.shapes[1])
        return of_hidden, of_weight, of_bias, None, None, of_low, of_up, None


def engine_h(dtype: torch.dtype | None) -> Any:
    def call(hidden: Tensor, weight: Tensor, *others: Any, **arguments: Any) -> tuple[Tensor, ...]:
        low, up = (each[..., -RANK:].to(dtype or each.dtype) for each in (hidden, weight))
        given = hidden[..., :-RANK], weight[:, :-RANK], *others, low, up, Knobs(**arguments)
        found: tuple[Tensor, ...] = _EngineH.apply(*given)
        return found

    return call


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(
    ("dtype", "low_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        pytest.param(torch.float16, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", [PLAIN, EVERYTHING], ids=lambda case: case.name)
def test_values_and_gradients_match_the_oracle(
    case: Case, dtype: torch.dtype, low_dtype: torch.dtype | None
) -> None:
    inputs = make_inputs(case, dtype=dtype, kind="peaked")
    assert_matches_oracle(engine_h(low_dtype), inputs, case.arguments(NARROW_PIECES), slack=2)


def test_a_frozen_weight_has_no_gradient_and_changes_no_other() -> None:
    inputs = make_inputs(PLAIN, shape=(6,))
    hidden, weight, *others = inputs.tensors()
    assert hidden is not None
    assert weight is not None
    low, up = hidden[:, -RANK:].contiguous(), weight[:, -RANK:].contiguous()
    given, knobs = (
        Operands(hidden, weight, *others, low, up),
        Knobs(**PLAIN.arguments(NARROW_PIECES)),
    )
    rows = hybrid.forward(given, knobs)
    made_of = RowGradients(*inputs.cotangents()), given, Kept(rows.lse, rows.entropy), knobs
    whole = hybrid.backward(*made_of, (True, True, False, True, True))
    some = hybrid.backward(*made_of, (True, False, False, True, True))
    assert some[1] is None
    for place in (0, 3, 4):
        ours, theirs = some[place], whole[place]
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
