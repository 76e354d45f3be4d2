"""Values and gradients of memeff::linear_cross_entropy against the dense float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from memeff_compile.kernels.linear_cross_entropy import (
    linear_cross_entropy,
)
from tests.support import hostile_rows
from tests.support.oracles import (
    CASES,
    Case,
    assert_matches_oracle,
    dense_linear_cross_entropy,
    make_inputs,
    relative_error,
    values_and_gradients,
)

PLAIN = CASES[0]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NARROW_PIECES = 64 * 21 * 4  # one 64-column piece of 21 fp32 rows: four pieces of 201 columns


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("kind", ["flat", "peaked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_match_the_oracle(case: Case, dtype: torch.dtype, kind: str) -> None:
    inputs = make_inputs(case, dtype=dtype, kind=kind)
    assert_matches_oracle(linear_cross_entropy, inputs, case.arguments(NARROW_PIECES))


@pytest.mark.parametrize("shape", [(1,), (), (2, 0), (0,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("depth", [1, 17])
def test_any_size_matches_the_oracle(shape: tuple[int, ...], vocab: int, depth: int) -> None:
    case = Case("sizes", has_bias=True, with_logit_sum=True)
    inputs = make_inputs(case, shape=shape, vocab=vocab, depth=depth)
    assert_matches_oracle(linear_cross_entropy, inputs, case.arguments(1))


@pytest.mark.parametrize("workspace", [0, 1, 10_000, 10**9])
def test_workspace_changes_nothing_but_rounding(workspace: int) -> None:
    case = CASES[-1]
    assert_matches_oracle(linear_cross_entropy, make_inputs(case), case.arguments(workspace))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_match_the_oracle(dtype: torch.dtype) -> None:
    inputs = make_inputs(PLAIN, dtype=dtype, kind="peaked")
    inputs.weight = inputs.weight.T.contiguous().T  # a head stored as (D, V)
    wide = torch.zeros(*inputs.hidden.shape[:-1], 2 * inputs.hidden.shape[-1], dtype=dtype)
    wide[..., ::2] = inputs.hidden
    inputs.hidden = wide[..., ::2]
    inputs.target = inputs.target.T.contiguous().T
    inputs.grad_nll = torch.tensor(0.5).expand(inputs.grad_nll.shape)
    assert_matches_oracle(linear_cross_entropy, inputs, PLAIN.arguments(NARROW_PIECES))


def test_gradient_of_a_transposed_weight_keeps_its_layout() -> None:
    inputs = make_inputs(PLAIN)
    inputs.weight = inputs.weight.T.contiguous().T
    found = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments())
    assert found["grad_weight"].stride() == inputs.weight.stride()


def test_int32_targets_give_the_same_bits_as_int64() -> None:
    results = [
        values_and_gradients(
            linear_cross_entropy, make_inputs(PLAIN, target_dtype=dtype), PLAIN.arguments()
        )
        for dtype in (torch.int32, torch.int64)
    ]
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])


def test_repeated_calls_give_the_same_bits() -> None:
    case = CASES[-1]
    inputs = make_inputs(case, dtype=torch.bfloat16)
    first = values_and_gradients(linear_cross_entropy, inputs, case.arguments(NARROW_PIECES))
    second = values_and_gradients(linear_cross_entropy, inputs, case.arguments(NARROW_PIECES))
    for name, value in first.items():
        assert torch.equal(value, second[name])


def test_mean_equals_eager_cross_entropy() -> None:
    inputs = make_inputs(Case("ignored", ignored_share=0.4), kind="peaked")
    hidden, weight = (t.clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), inputs.target.flatten())
    expected.backward()
    wanted = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    nll, *_ = linear_cross_entropy(hidden, weight, None, inputs.target, None, **PLAIN.arguments())
    loss = nll.sum() / (inputs.target != -100).sum()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for found, reference in zip((hidden.grad, weight.grad), wanted, strict=True):
        assert found is not None
        assert reference is not None
        assert relative_error(found, reference) < 1e-5


def test_confident_target_keeps_a_tiny_loss() -> None:
    weight = torch.eye(3)
    hidden = torch.tensor([[14.0, 0.0, 0.0]])
    arguments = PLAIN.arguments()
    target = torch.tensor([0])
    nll, *_ = linear_cross_entropy(hidden, weight, None, target, None, **arguments)
    expected, *_ = dense_linear_cross_entropy(hidden, weight, None, target, None, **arguments)
    assert float(nll) > 0
    assert relative_error(nll, expected) < 0.1


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poisoned_row_stays_visible(poison: float) -> None:
    inputs = make_inputs(PLAIN, shape=(6,))
    inputs.hidden[2, 4] = poison
    found = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments(1))
    healthy = torch.arange(6) != 2
    assert found["nll"][2].isnan()
    assert found["grad_hidden"][2].isnan().all()
    assert found["grad_weight"].isnan().any(1).all()
    assert found["nll"][healthy].isfinite().all()
    assert found["grad_hidden"][healthy].isfinite().all()


def test_poison_in_an_ignored_row_does_not_spread() -> None:
    inputs = make_inputs(PLAIN, shape=(6,))
    inputs.hidden[2, 4] = float("nan")
    inputs.target[2] = -100
    found = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments())
    assert all(value.isfinite().all() for value in found.values())
    assert found["nll"][2] == 0


def test_masked_columns_get_no_probability_and_no_gradient() -> None:
    case = Case("bias", has_bias=True)
    inputs = make_inputs(case, vocab=300)
    assert inputs.bias is not None
    inputs.bias[:130] = float("-inf")  # the first blocks contain only -inf
    inputs.target.clamp_(min=130)
    arguments = case.arguments(1)
    found = values_and_gradients(linear_cross_entropy, inputs, arguments)
    expected = values_and_gradients(dense_linear_cross_entropy, inputs, arguments)
    assert found["grad_weight"][:130].eq(0).all()
    for name, value in expected.items():
        assert relative_error(found[name], value) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", hostile_rows.ROWS)
def test_entropy_and_top_of_a_hostile_row_equal_eager(name: str, dtype: torch.dtype) -> None:
    hostile_rows.check(linear_cross_entropy, name, dtype)


def test_entropy_and_top_of_an_ignored_row_are_those_of_its_logits() -> None:
    case = Case("ignored", ignored_share=0.5, with_entropy=True, with_top=True)
    inputs = make_inputs(case, shape=(12,), kind="peaked")
    ignored = inputs.target == -100
    assert ignored.any()
    _, lse, _, entropy, top, *_ = linear_cross_entropy(*inputs.tensors(), **case.arguments(1))
    z = inputs.hidden @ inputs.weight.T
    assert torch.equal(top, z.argmax(-1))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=z).entropy())
    torch.testing.assert_close(lse, z.logsumexp(-1))


def test_top_alone_leaves_ignored_rows_out_of_the_backward_pass() -> None:
    case = Case("top", with_top=True)
    inputs = make_inputs(case, shape=(6,))
    inputs.hidden[2, 4] = float("nan")
    inputs.target[2] = -100
    found = values_and_gradients(linear_cross_entropy, inputs, case.arguments())
    assert all(value.isfinite().all() for value in found.values())
    assert found["lse"][2] == 0


def test_top_has_no_gradient() -> None:
    case = Case("top", with_top=True)
    inputs = make_inputs(case)
    inputs.hidden.requires_grad_()
    nll, _, _, _, top, *_ = linear_cross_entropy(*inputs.tensors(), **case.arguments())
    assert nll.requires_grad
    assert not top.requires_grad
    assert top.dtype == torch.int64


def test_float16_logits_beyond_its_range_stay_finite() -> None:
    hidden = torch.full((2, 64), 60.0, dtype=torch.float16)
    weight = torch.stack([torch.full((64,), 30.0), torch.full((64,), 29.0)]).half()
    target = torch.tensor([0, 1])
    nll, lse, *_ = linear_cross_entropy(hidden, weight, None, target, None, **PLAIN.arguments())
    torch.testing.assert_close(nll, torch.tensor([0.0, 3840.0]))
    assert lse[0] == 60 * 30 * 64


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradcheck_in_float64(case: Case) -> None:
    inputs = make_inputs(case, shape=(4,), depth=3, vocab=70, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in inputs.tensors()[:3] if t is not None]

    def call(*leaves: torch.Tensor) -> Any:
        hidden, weight, *bias = leaves
        return linear_cross_entropy(
            hidden,
            weight,
            bias[0] if bias else None,
            inputs.target,
            inputs.column_weight,
            **case.arguments(1),
        )

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 9),
    depth=st.integers(1, 9),
    vocab=st.integers(1, 300),
    workspace=st.integers(0, 10_000),
    case=st.builds(
        Case,
        name=st.just("drawn"),
        scale=st.sampled_from([1.0, 0.125, 3.0]),
        softcap=st.sampled_from([0.0, 5.0]),
        has_bias=st.booleans(),
        has_column_weight=st.booleans(),
        ignore_index=st.sampled_from([-100, 0, None]),
        ignored_share=st.sampled_from([0.0, 0.5, 1.0]),
        with_lse=st.booleans(),
        with_logit_sum=st.booleans(),
        with_entropy=st.booleans(),
        with_top=st.booleans(),
    ),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_any_combination_matches_the_oracle(
    rows: int,
    depth: int,
    vocab: int,
    workspace: int,
    case: Case,
    dtype: torch.dtype,
    seed: int,
) -> None:
    inputs = make_inputs(case, shape=(rows,), depth=depth, vocab=vocab, dtype=dtype, seed=seed)
    # A single column has zero gradient, of which rounding is all there is to see.
    inputs.weight[0] += 1
    assert_matches_oracle(linear_cross_entropy, inputs, case.arguments(workspace), slack=10)
