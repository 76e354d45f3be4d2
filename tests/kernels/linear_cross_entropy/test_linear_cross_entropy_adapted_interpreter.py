"""`library` with a low-rank part of the head, its kernels run by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._head_loss.call import (
    Operands,
    RowGradients,
    Saved,
    ScalarLoss,
    Settings,
)
from memeff_compile.kernels.linear_cross_entropy import adapted_total_bytes
from tests.kernels.linear_cross_entropy.engines import library, reference
from tests.support.live_bytes import LiveBytes
from tests.support.oracles import CASES, Case, assert_matches_oracle, make_inputs

pytestmark = pytest.mark.interpreter

RANK = 3
NARROW_PIECES = 21 * 64 * 6
PLAIN, EVERYTHING = CASES[0], CASES[-1]


class _Library(torch.autograd.Function):
    """The engine without its op, which would send CPU tensors to the reference."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, knobs = args
        given = Operands(*tensors).flat()
        found = library.forward(given, knobs)
        ctx.save_for_backward(*given, found.lse, found.entropy)
        ctx.mark_non_differentiable(found.top)
        ctx.knobs, ctx.shapes = knobs, (tensors[0].shape, tensors[5].shape)
        return tuple(p.view(tensors[3].shape) if p.numel() else p for p in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = RowGradients(*(grad.reshape(-1) for grad in grads[:4]))
        *tensors, lse, entropy = ctx.saved_tensors
        given, mask = Operands(*tensors), (True, True, tensors[2] is not None, True, True)
        found = library.backward(flat, given, Saved(lse, entropy), ctx.knobs, mask)
        of_hidden, of_weight, of_bias, of_low, of_up = found
        assert of_hidden is not None
        assert of_low is not None
        of_hidden, of_low = of_hidden.view(ctx.shapes[0]), of_low.view(ctx.shapes[1])
        return of_hidden, of_weight, of_bias, None, None, of_low, of_up, None


def call_library(dtype: torch.dtype | None) -> Any:
    def call(hidden: Tensor, weight: Tensor, *others: Any, **arguments: Any) -> tuple[Tensor, ...]:
        low, up = (each[..., -RANK:].to(dtype or each.dtype) for each in (hidden, weight))
        given = hidden[..., :-RANK], weight[:, :-RANK], *others, low, up, Settings(**arguments)
        found: tuple[Tensor, ...] = _Library.apply(*given)
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
    assert_matches_oracle(call_library(low_dtype), inputs, case.arguments(NARROW_PIECES), slack=2)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (-1.5, 3.0)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "low_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("workspace", [0, 4 * 201 * 6])
def test_the_total_and_its_gradients_equal_those_of_two_passes(
    workspace: int, dtype: torch.dtype, low_dtype: torch.dtype, scale: float, softcap: float
) -> None:
    """A walk over the rows against the reference's forward and backward."""
    case = Case("bias", has_bias=True, ignored_share=0.3)
    inputs = make_inputs(case, dtype=dtype, kind="peaked")
    hidden, weight, bias, target, _ = inputs.tensors()
    low, up = (torch.randn(n, RANK).to(low_dtype) for n in (target.numel(), weight.shape[0]))
    given = ScalarLoss(
        *(hidden.reshape(target.numel(), -1), weight, bias, target.reshape(-1)),
        torch.rand(target.numel()),
        torch.tensor(7.0),
        case.ignore_index,
        *(scale, softcap, workspace),
        (True, False, True, True, True),
    )._replace(low=low, up=up)
    total, *found = library.total(given)
    expected, *wanted = reference.in_two_walks(given)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    for ours, theirs, of in zip(found, wanted, given.operands.trained, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None or of is None:
            continue
        assert (ours.shape, ours.dtype) == (of.shape, of.dtype)
        allowed = 1e-5 if dtype == torch.float32 or ours.dtype != dtype else 1.5e-2
        assert (ours - theirs).norm() <= allowed * theirs.norm()


def test_the_formula_bounds_what_a_total_holds() -> None:
    rows, vocab = 64, 3000
    inputs = make_inputs(PLAIN, shape=(rows,), vocab=vocab)
    hidden, weight, _, target, _ = inputs.tensors()
    low, up = torch.randn(rows, RANK), torch.randn(vocab, RANK)
    workspace = 8 * vocab * 4
    given = ScalarLoss(hidden, weight, None, target, None, None, None, 1.0, 0.0, workspace, _FROZEN)
    with LiveBytes() as counted:
        found = library.total(given._replace(low=low, up=up))
    returned = sum(each.untyped_storage().nbytes() for each in found if each is not None)
    bound = adapted_total_bytes(rows, vocab, RANK, dtype=torch.float32, workspace=workspace)
    assert counted.peak - returned <= int(bound) + 64 * rows
    assert int(bound) < rows * vocab


_FROZEN = (True, False, False, True, True)


def test_a_frozen_weight_has_no_gradient_and_changes_no_other() -> None:
    inputs = make_inputs(PLAIN, shape=(6,))
    hidden, weight, *others = inputs.tensors()
    assert hidden is not None
    assert weight is not None
    low, up = hidden[:, -RANK:].contiguous(), weight[:, -RANK:].contiguous()
    given, knobs = (
        Operands(hidden, weight, *others, low, up),
        Settings(**PLAIN.arguments(NARROW_PIECES)),
    )
    rows = library.forward(given, knobs)
    made_of = RowGradients(*inputs.cotangents()), given, Saved(rows.lse, rows.entropy), knobs
    whole = library.backward(*made_of, (True, True, False, True, True))
    some = library.backward(*made_of, (True, False, False, True, True))
    assert some[1] is None
    for place in (0, 3, 4):
        ours, theirs = some[place], whole[place]
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
