"""memeff::linear_cross_entropy_total: its numbers, and when its gradients are scaled in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import functional
from memeff_compile.errors import DoubleBackwardError, TargetRangeError, UnsupportedInputError
from memeff_compile.kernels._gradient_filter import levels as gradient_filter
from memeff_compile.kernels._head_loss import scaling
from memeff_compile.kernels.device import planned_for
from memeff_compile.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_total,
    makes_gradients_in_forward,
    walk,
)

IGNORED = -100


def measured_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table say that gradients are best made in the forward."""
    monkeypatch.setattr(walk, "is_faster_in_one_walk", lambda _: True)


SETTINGS: dict[str, Any] = {
    "ignore_index": IGNORED,
    "scale": 1.0,
    "softcap": 0.0,
    "workspace": 1,
    "output_mask": [True, True, True],
}
# Relative errors (Frobenius norm) of the total and of gradients, against float64.
BUDGETS = {
    torch.float64: (1e-13, 1e-12),
    torch.float32: (2e-6, 1e-5),
    torch.bfloat16: (2e-6, 4e-3),
}


def _inputs(
    dtype: torch.dtype = torch.float64, *, ignored: float = 0.3, has_bias: bool = True
) -> list[Any]:
    source = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=source, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, weight, bias = normal(3, 15, 13), normal(101, 13), normal(101) if has_bias else None
    target = torch.randint(101, (3, 15), generator=source)
    target[torch.rand(3, 15, generator=source) < ignored] = IGNORED
    return [hidden, weight, bias, target]


def _wide(inputs: list[Any]) -> list[Any]:
    parts = [None if p is None else p.detach().double().requires_grad_() for p in inputs[:3]]
    return [*parts, inputs[3]]


def _dense(inputs: list[Any], scale: float = 1.0, softcap: float = 0.0, **how: Any) -> Tensor:
    hidden, weight, bias, target = inputs
    z = F.linear(hidden, weight, bias) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z.flatten(0, 1), target.flatten(), ignore_index=IGNORED, **how)


def _mean(inputs: list[Any], **changes: Any) -> tuple[Tensor, ...]:
    norm = (inputs[3] != IGNORED).sum()
    found: tuple[Tensor, ...] = linear_cross_entropy_total(
        *inputs, None, norm, **{**SETTINGS, **changes}
    )
    return found[:4]  # after them come the operands of a low-rank part


def _assert_close(found: Tensor | None, expected: Tensor | None, budget: float) -> None:
    assert found is not None
    assert expected is not None
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) <= budget


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (1.5, 4.0)])
@pytest.mark.parametrize("workspace", [0, 1])
def test_mean_matches_float64(
    workspace: int, scale: float, softcap: float, ignored: float, dtype: torch.dtype
) -> None:
    inputs = _inputs(dtype, ignored=ignored)
    exact = _wide(inputs)
    loss = _mean(inputs, scale=scale, softcap=softcap, workspace=workspace)[0]
    expected = _dense(exact, scale, softcap)
    (3 * loss).backward()
    (3 * expected).backward()
    of_value, of_gradient = BUDGETS[dtype]
    _assert_close(loss.detach(), expected.detach(), of_value)
    for one, other in zip(inputs[:3], exact[:3], strict=True):
        _assert_close(one.grad, other.grad, of_gradient)


def test_row_weights_and_a_sum_match_float64() -> None:
    inputs = _inputs()
    exact, weights = _wide(inputs), torch.rand(101, dtype=torch.float64)
    hidden, _, _, target = inputs
    rows = weights[target.clamp(min=0)] * (target != IGNORED)
    loss = linear_cross_entropy_total(*inputs, rows, None, **SETTINGS)[0]
    expected = _dense(exact, weight=weights, reduction="sum")
    loss.backward()
    expected.backward()
    _assert_close(loss.detach(), expected.detach(), 1e-13)
    _assert_close(hidden.grad, exact[0].grad, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_rows_ignored(reduction: str) -> None:
    inputs = _inputs(ignored=1.0)
    norm = (inputs[3] != IGNORED).sum() if reduction == "mean" else None
    loss, *gradients = linear_cross_entropy_total(*inputs, None, norm, **SETTINGS)
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert not any(part.any() for part in gradients)


def test_an_empty_batch() -> None:
    hidden, weight, _, target = _inputs()
    nothing = (hidden[:0], weight, None, target[:0])
    assert linear_cross_entropy_total(*nothing, None, None, **SETTINGS)[0] == 0
    loss, _, grad_weight, _ = _mean([*nothing])
    assert loss.isnan()
    assert not grad_weight.any()


# --- who may see the buffer again -------------------------------------------------------------


def test_gradients_are_scaled_in_place_where_nothing_reads_them_again() -> None:
    inputs = _inputs()
    loss, *gradients = _mean(inputs)
    places = [part.data_ptr() for part in gradients]
    del gradients
    (3 * loss).backward()
    assert [part.grad.data_ptr() for part in inputs[:3]] == places


def test_no_zeros_are_made_for_results_that_nobody_differentiates() -> None:
    loss = _mean(_inputs(torch.bfloat16))[0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        loss.backward()
    names = {event.name for event in seen.events()}
    assert "aten::mul" in names
    assert not names & {"aten::zeros", "aten::zero_", "aten::zeros_like", "aten::new_zeros"}


def test_a_loss_without_a_gradient_gives_none() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    inputs = _inputs()
    Nothing.apply(_mean(inputs)[0]).backward()  # type: ignore[no-untyped-call]
    assert all(part.grad is None for part in inputs[:3])


def test_a_kept_graph_gives_the_same_gradient_again() -> None:
    inputs = _inputs()
    (expected,) = torch.autograd.grad(3 * _mean(inputs)[0], inputs[1])
    loss = 3 * _mean(inputs)[0]
    found = [
        torch.autograd.grad(loss, inputs[1], retain_graph=keep)[0] for keep in (True, True, False)
    ]
    assert all(torch.equal(each, expected) for each in found)


def test_two_losses_of_one_call_each_get_their_own_gradient() -> None:
    inputs = _inputs()
    (expected,) = torch.autograd.grad(_mean(inputs)[0], inputs[0])
    loss = _mean(inputs)[0]
    (first,) = torch.autograd.grad(2 * loss, inputs[0], retain_graph=True)
    (second,) = torch.autograd.grad(loss.square(), inputs[0])
    torch.testing.assert_close(first, 2 * expected)
    torch.testing.assert_close(second, 2 * loss.detach() * expected)


def test_gradients_accumulate_over_calls() -> None:
    inputs = _inputs()
    (expected,) = torch.autograd.grad(_mean(inputs)[0], inputs[1])
    for factor in (2, 3, 4):
        (factor * _mean(inputs)[0]).backward()
    torch.testing.assert_close(inputs[1].grad, 9 * expected)


def test_what_a_hook_packed_is_not_written_to() -> None:
    inputs, packed = _inputs(), []

    def pack(part: Tensor) -> Tensor:
        packed.append(part)
        return part

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda part: part):
        loss = _mean(inputs)[0]
    before = [part.clone() for part in packed]
    (3 * loss).backward()
    assert all(torch.equal(one, other) for one, other in zip(packed, before, strict=True))


def test_checkpointing_gives_the_same_gradient() -> None:
    inputs = _inputs()
    (expected,) = torch.autograd.grad(3 * _mean(inputs)[0], inputs[0])

    def tripled(hidden: Tensor) -> Tensor:
        return 3 * _mean([hidden, *inputs[1:]])[0]

    loss = checkpoint(tripled, inputs[0], use_reentrant=False)
    (found,) = torch.autograd.grad(loss, inputs[0])
    assert torch.equal(found, expected)


def test_second_derivative_is_refused_in_a_sentence() -> None:
    inputs = _inputs()
    (gradient,) = torch.autograd.grad(_mean(inputs)[0], inputs[0], create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"second derivative.*'off'"):
        gradient.sum().backward()


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_costs_nothing(frozen: int) -> None:
    inputs = _inputs()
    expected = torch.autograd.grad(_mean(inputs)[0], inputs[:3])
    inputs[frozen] = inputs[frozen].detach()
    mask = [part.requires_grad for part in inputs[:3]]
    loss, *gradients = _mean(inputs, output_mask=mask)
    assert [part.numel() > 0 for part in gradients] == mask
    loss.backward()
    for index, wanted in enumerate(expected):
        if index == frozen:
            assert inputs[index].grad is None
        else:
            assert torch.equal(inputs[index].grad, wanted)


def test_scaling_in_chunks_equals_scaling_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "CHUNK", 40)
    inputs = _inputs(torch.bfloat16)
    gradients = [part.float() for part in _mean(inputs)[1:]]
    (0.3 * _mean(inputs)[0]).backward()
    for part, whole in zip(inputs[:3], gradients, strict=True):
        assert torch.equal(part.grad, (whole * torch.tensor(0.3)).bfloat16())


# --- the op itself ----------------------------------------------------------------------------


def test_opcheck_passes() -> None:
    inputs = _inputs(torch.float32)
    norm = (inputs[3] != IGNORED).sum()
    torch.library.opcheck(linear_cross_entropy_total, (*inputs, None, norm), SETTINGS)


def test_bad_input_is_refused() -> None:
    hidden, weight, bias, target = _inputs()
    with pytest.raises(TargetRangeError):
        _mean([hidden, weight, bias, target + 101])
    with pytest.raises(UnsupportedInputError, match="row_weight has 1 dimension"):
        linear_cross_entropy_total(hidden, weight, bias, target, weight[0], None, **SETTINGS)
    with pytest.raises(UnsupportedInputError, match="single number"):
        linear_cross_entropy_total(hidden, weight, bias, target, None, weight[0], **SETTINGS)


def test_it_serves_gpus_that_have_its_kernels_and_filters_there_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, fp32 = torch.device("cpu"), torch.float32
    assert not makes_gradients_in_forward(cpu, fp32, 8)
    with planned_for(torch.device("cuda", 0)):
        assert makes_gradients_in_forward(cpu, torch.bfloat16, 8)
        assert not makes_gradients_in_forward(cpu, torch.bfloat16, 9)
        assert makes_gradients_in_forward(cpu, torch.bfloat16, 8, gradient_filter="mass")
        one = {"gradient_filter": "mass", "filter_parts": "hidden"}
        assert not makes_gradients_in_forward(cpu, torch.bfloat16, 8, **one)
        # The published filter compares probabilities, which need the log-sum-exp.
        published = {"gradient_filter": "published"}
        assert not makes_gradients_in_forward(cpu, torch.bfloat16, 2048, **published)
        minimal = {"workspace": 1, "gradient_filter": "mass"}
        assert makes_gradients_in_forward(cpu, torch.bfloat16, 2048, **minimal)
        assert not makes_gradients_in_forward(cpu, torch.bfloat16, 8, **minimal)
    measured_forward(monkeypatch)
    assert makes_gradients_in_forward(cpu, fp32, 8)
    assert not makes_gradients_in_forward(cpu, torch.float16, 8)
    assert not makes_gradients_in_forward(cpu, fp32, 8, gradient_filter="mass")
    assert not makes_gradients_in_forward(cpu, fp32, 8, workspace=1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_class_weight", [False, True])
def test_the_plain_function_uses_it(
    reduction: Any, has_class_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs()
    hidden, weight, bias, target = inputs
    class_weight = torch.rand(101, dtype=torch.float64) if has_class_weight else None
    exact, calls = _wide(inputs), []
    monkeypatch.setattr(
        functional.op_folder,
        "linear_cross_entropy_total",
        lambda *given, **settings: (
            calls.append(settings["output_mask"]) or linear_cross_entropy_total(*given, **settings)
        ),
    )
    arguments: dict[str, Any] = {"reduction": reduction, "class_weight": class_weight}
    measured_forward(monkeypatch)
    loss = memeff_compile.linear_cross_entropy(hidden, weight, target, bias, **arguments)
    with torch.no_grad():
        again = memeff_compile.linear_cross_entropy(hidden, weight, target, bias, **arguments)
    expected = _dense(exact, weight=class_weight, reduction=reduction)
    loss.backward()
    expected.backward()
    assert calls == [[True, True, True]]
    _assert_close(loss.detach(), expected.detach(), 1e-13)
    torch.testing.assert_close(again, loss.detach())
    _assert_close(weight.grad, exact[1].grad, 1e-12)


def test_where_no_engine_makes_both_at_once_one_follows_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_walks = walk.ENGINES["reference"]._replace(has_one_walk=lambda *_: False)
    monkeypatch.setitem(walk.ENGINES, "reference", two_walks)
    inputs = _inputs()
    exact = _wide(inputs)
    loss = _mean(inputs)[0]
    expected = _dense(exact)
    (3 * loss).backward()
    (3 * expected).backward()
    _assert_close(loss.detach(), expected.detach(), 1e-13)
    for one, other in zip(inputs[:3], exact[:3], strict=True):
        _assert_close(one.grad, other.grad, 1e-12)


def test_both_ops_agree() -> None:
    inputs = _inputs(torch.float32)
    rows = linear_cross_entropy(
        *inputs,
        None,
        ignore_index=IGNORED,
        scale=1.0,
        softcap=0.0,
        with_lse=False,
        with_logit_sum=False,
        gradient_filter="exact",
        workspace=0,
    )[0]
    torch.testing.assert_close(_mean(inputs)[0], rows.sum() / (inputs[3] != IGNORED).sum())


@pytest.mark.parametrize(
    ("depth", "is_filtered"), [(2048, True), (2040, False), (2052, False), (896, False)]
)
def test_a_filter_runs_where_it_pays(depth: int, is_filtered: bool) -> None:
    for each in ("mass", "block", "published"):
        assert gradient_filter.leaves_out(each, depth) == is_filtered
    assert not gradient_filter.leaves_out("exact", depth)
