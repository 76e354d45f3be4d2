"""memeff::linear_cross_entropy_adapted: the numbers of a head that is a sum, and bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import DoubleBackwardError, UnsupportedInputError
from memeff_compile.kernels._head_loss.call import Operands, RowGradients, Saved, Settings
from memeff_compile.kernels.linear_cross_entropy import (
    bytes_after,
    linear_cross_entropy,
    linear_cross_entropy_adapted,
    linear_cross_entropy_backward,
)
from tests.kernels.linear_cross_entropy.engines import reference
from tests.support.live_bytes import LiveBytes
from tests.support.oracles import CASES, Case, Inputs, assert_matches_oracle, make_inputs

RANK = 3
EVERYTHING = CASES[-1]


def in_two(dtype: torch.dtype | None = None) -> Callable[..., tuple[Tensor, ...]]:
    """Return the op as one of the whole head, of which the last features are the low-rank part."""

    def call(*tensors: Any, **arguments: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = linear_cross_entropy_adapted(
            *parted(tensors, dtype), **arguments
        )
        return found

    return call


def parted(tensors: Any, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    hidden, weight, *others = tensors
    low, up = (each[..., -RANK:].to(dtype or each.dtype) for each in (hidden, weight))
    return hidden[..., :-RANK], weight[:, :-RANK], *others, low, up


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_match_the_oracle(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype=dtype, kind="peaked")
    assert_matches_oracle(in_two(), inputs, case.arguments(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_part_in_fp32_beside_a_head_in_16_bits(dtype: torch.dtype) -> None:
    case = Case("ignored", ignored_share=0.3)
    inputs = make_inputs(case, dtype=dtype)
    assert_matches_oracle(in_two(torch.float32), inputs, case.arguments(1))
    tensors = leaves(parted(inputs.tensors(), torch.float32))
    found = gradients(linear_cross_entropy_adapted, tensors, inputs, case)
    exact = leaves([None if each is None else widened(each) for each in tensors])
    wanted = gradients(linear_cross_entropy_adapted, exact, inputs, case)
    for ours, of_fp64 in list(zip(found, wanted, strict=True))[-2:]:
        assert ours.dtype == torch.float32
        assert (ours - of_fp64).norm() <= 1e-5 * of_fp64.norm()


def widened(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def leaves(tensors: Sequence[Any]) -> list[Any]:
    """Return copies of which all but the targets and the class weights have gradients."""
    copies = [None if each is None else each.detach().clone() for each in tensors]
    for place, each in enumerate(copies):
        if each is not None and place not in (3, 4):
            each.requires_grad_()
    return copies


def gradients(op: Any, tensors: list[Any], inputs: Inputs, case: Case) -> list[Tensor]:
    nll, *_ = op(*tensors, **case.arguments(1))
    nll.backward(inputs.grad_nll.to(nll.dtype))
    return [each.grad for each in tensors if each is not None and each.requires_grad]


def test_a_part_of_zeros_changes_nothing() -> None:
    """As a new adapter, whose B is zero."""
    inputs = make_inputs(EVERYTHING, dtype=torch.float64)
    plain = leaves(inputs.tensors())
    low = torch.randn(*plain[0].shape[:-1], RANK, dtype=torch.float64)
    both = [*plain, low, torch.zeros(plain[1].shape[0], RANK, dtype=torch.float64)]
    expected = linear_cross_entropy(*plain, **EVERYTHING.arguments(1))
    found = linear_cross_entropy_adapted(*both, **EVERYTHING.arguments(1))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_only_what_is_asked_for_is_computed() -> None:
    case = Case("plain")
    inputs = make_inputs(case, dtype=torch.float64)
    tensors = leaves(parted(inputs.tensors()))
    _, lse, nothing, entropy, _ = linear_cross_entropy_adapted(*tensors, **case.arguments(1))
    zeros = torch.zeros_like(lse)
    given = inputs.grad_nll, zeros, nothing, entropy, *tensors[:5], lse, entropy, *tensors[5:]
    whole, some = (
        linear_cross_entropy_backward(*given, **case.arguments(1), output_mask=mask)
        for mask in ([True] * 5, [True, False, False, True, True])
    )
    assert [part.numel() > 0 for part in some] == [True, False, False, True, True]
    for place in (0, 3, 4):
        assert torch.equal(some[place], whole[place])


@pytest.mark.parametrize("shape", [(2, 3), (0,)], ids=str)
def test_opcheck_passes(shape: tuple[int, ...]) -> None:
    inputs = make_inputs(EVERYTHING, shape=shape, depth=8, vocab=70)
    tensors = tuple(leaves(parted(inputs.tensors())))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests += ("test_aot_dispatch_dynamic",) if shape[0] else ()
    arguments = EVERYTHING.arguments(1)
    torch.library.opcheck(linear_cross_entropy_adapted, tensors, arguments, test_utils=tests)
    _, lse, _, entropy, _ = linear_cross_entropy_adapted(*tensors, **arguments)
    given = (*inputs.cotangents(), *tensors[:5], lse.detach(), entropy.detach(), *tensors[5:])
    torch.library.opcheck(
        linear_cross_entropy_backward,
        given,
        {**arguments, "output_mask": [True, False, True, True, True]},
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_second_derivative_is_refused() -> None:
    inputs = make_inputs(Case("plain"), dtype=torch.float64)
    tensors = leaves(parted(inputs.tensors()))
    nll, *_ = linear_cross_entropy_adapted(*tensors, **Case("plain").arguments(1))
    (first,) = torch.autograd.grad(nll.sum(), tensors[5], create_graph=True)
    with pytest.raises(DoubleBackwardError):
        first.sum().backward()


BAD: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]] = {
    "two ranks": (lambda low, up: (low, up[:, :2]), "both one rank"),
    "other classes": (lambda low, up: (low, up[:7]), "the rows of weight"),
    "other rows": (lambda low, up: (low[:1], up), "the leading dimensions of hidden"),
    "dimensions": (lambda low, up: (low[0], up), "with the leading dimensions of hidden, and"),
    "a narrow part": (lambda low, up: (low.half(), up.half()), "low has dtype float16"),
    "two dtypes": (lambda low, up: (low, up.double()), "cast them to one dtype"),
    "integers": (lambda low, up: (low.long(), up.long()), "low has dtype int64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parts_are_refused(name: str) -> None:
    change, sentence = BAD[name]
    *tensors, low, up = parted(make_inputs(Case("plain")).tensors())
    with pytest.raises(UnsupportedInputError, match=sentence):
        linear_cross_entropy_adapted(*tensors, *change(low, up), **Case("plain").arguments(1))


@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_formula_bounds_what_is_allocated(low_dtype: torch.dtype) -> None:
    """That of a head with R more features; a frozen weight has no gradient, not of a piece even."""
    rows, depth, vocab = 200, 32, 24_000
    case = Case("memory", ignored_share=0.3)
    inputs = make_inputs(case, shape=(rows,), depth=depth, vocab=vocab, dtype=torch.bfloat16)
    given, knobs = Operands(*parted(inputs.tensors(), low_dtype)), Settings(**case.arguments(0))
    with LiveBytes() as forward:
        found = reference.forward(given, knobs)
    grads, mask = RowGradients(*inputs.cotangents()), (True, False, False, True, True)
    with LiveBytes() as backward:
        gradients = reference.backward(grads, given, Saved(found.lse, found.entropy), knobs, mask)
    returned = sum(g.untyped_storage().nbytes() for g in gradients if g is not None)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "engine": "reference", "device_type": "cpu"}
    bound = int(bytes_after(rows, depth, vocab, **how))
    assert forward.peak <= bound
    assert backward.peak - returned <= bound
