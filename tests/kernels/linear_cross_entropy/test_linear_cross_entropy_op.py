"""memeff::linear_cross_entropy as a citizen of PyTorch: registration, autograd, modes, bad input."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.ops.filter_activity import measure
from memeff_compile.errors import (
    DoubleBackwardError,
    MemeffError,
    TargetRangeError,
    UnsupportedInputError,
)
from memeff_compile.kernels.device import planned_for
from memeff_compile.kernels.linear_cross_entropy import (
    ENGINES,
    engine_for,
    linear_cross_entropy,
    linear_cross_entropy_backward,
    supports,
)
from tests.support.oracles import CASES, Case, Inputs, make_inputs, values_and_gradients

PLAIN = CASES[0]
SMALL = {"shape": (2, 3), "depth": 5, "vocab": 70}


def call(inputs: Inputs, **changes: Any) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = linear_cross_entropy(
        *inputs.tensors(), **{**PLAIN.arguments(1), **changes}
    )
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", [PLAIN, CASES[-1]], ids=lambda case: case.name)
def test_opcheck_passes(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, **SMALL, dtype=dtype)
    for tensor in inputs.tensors()[:3]:
        if tensor is not None:
            tensor.requires_grad_()
    torch.library.opcheck(linear_cross_entropy, inputs.tensors(), case.arguments(1))


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False]], ids=str)
def test_opcheck_of_backward_passes(mask: list[bool]) -> None:
    case = CASES[-1]
    inputs = make_inputs(case, **SMALL)
    _, lse, _, entropy, _ = linear_cross_entropy(*inputs.tensors(), **case.arguments(1))
    torch.library.opcheck(
        linear_cross_entropy_backward,
        (*inputs.cotangents(), *inputs.tensors(), lse, entropy),
        {**case.arguments(1), "output_mask": mask},
    )


def test_opcheck_passes_for_an_empty_batch() -> None:
    inputs = make_inputs(PLAIN, shape=(0,), vocab=70)
    inputs.hidden.requires_grad_()
    torch.library.opcheck(
        linear_cross_entropy,
        inputs.tensors(),
        PLAIN.arguments(1),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_input_gets_no_gradient_and_changes_no_other(frozen: str) -> None:
    case = Case("bias", has_bias=True)
    inputs = make_inputs(case)
    expected = values_and_gradients(linear_cross_entropy, inputs, case.arguments())
    for name in ("hidden", "weight", "bias"):
        getattr(inputs, name).requires_grad_(name != frozen)
    nll, lse, *_ = linear_cross_entropy(*inputs.tensors(), **case.arguments())
    torch.autograd.backward((nll, lse), (inputs.grad_nll, inputs.grad_lse))
    for name in ("hidden", "weight", "bias"):
        gradient = getattr(inputs, name).grad
        if name == frozen:
            assert gradient is None
        else:
            assert torch.equal(gradient, expected[f"grad_{name}"])


def test_two_backward_calls_give_twice_the_gradient() -> None:
    inputs = make_inputs(PLAIN)
    hidden = inputs.hidden.requires_grad_()
    loss = call(inputs)[0].sum()
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    once = hidden.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * once)


def test_second_derivative_is_refused_in_a_sentence() -> None:
    inputs = make_inputs(PLAIN)
    hidden = inputs.hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(call(inputs)[0].sum(), hidden, create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"second derivative.*'off'"):
        gradient.sum().backward()


def test_checkpointing_gives_the_same_gradient() -> None:
    inputs = make_inputs(PLAIN)
    hidden = inputs.hidden.requires_grad_()
    (expected,) = torch.autograd.grad(call(inputs)[0].sum(), hidden)

    def loss(hidden: Tensor) -> Tensor:
        nll, *_ = linear_cross_entropy(hidden, *inputs.tensors()[1:], **PLAIN.arguments(1))
        return nll.sum()

    recomputed = checkpoint(loss, hidden, use_reentrant=False)
    (found,) = torch.autograd.grad(recomputed, hidden)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_give_the_same_values(mode: Any) -> None:
    inputs = make_inputs(PLAIN)
    expected = call(inputs)[0]
    inputs.hidden.requires_grad_()
    with mode():
        found = call(inputs)[0]
        inference = make_inputs(PLAIN)
        assert torch.equal(call(inference)[0], expected)
    assert not found.requires_grad
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_does_not_reach_into_the_op(dtype: torch.dtype) -> None:
    inputs = make_inputs(PLAIN, dtype=dtype)
    expected = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments())
    with torch.autocast("cpu", torch.bfloat16):
        found = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments())
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_inputs_are_left_alone() -> None:
    case = CASES[-1]
    inputs, untouched = make_inputs(case), make_inputs(case)
    values_and_gradients(linear_cross_entropy, inputs, case.arguments(1))
    for name, value in vars(untouched).items():
        assert torch.equal(getattr(inputs, name), value)


def test_distributed_data_parallel_sees_the_gradient() -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(13, 13)
            self.weight = torch.nn.Parameter(make_inputs(PLAIN).weight)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            nll, *_ = linear_cross_entropy(
                self.inner(hidden), self.weight, None, target, None, **PLAIN.arguments(1)
            )
            return nll.mean()

    inputs, head = make_inputs(PLAIN), Head()
    head(inputs.hidden, inputs.target).backward()
    assert head.weight.grad is not None
    expected = head.weight.grad.clone()
    head.weight.grad = None
    # A store in memory: a port on this machine could be taken by another run of the suite.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(head)
        wrapped(inputs.hidden, inputs.target).backward()
        # DDP must not be the last owner of the group: it would join Gloo's threads, which may wait
        # for the interpreter's lock, without giving up that lock.
        del wrapped
        assert torch.equal(head.weight.grad, expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("value", [-1, 201, 2**40])
def test_target_out_of_range_is_named(value: int) -> None:
    inputs = make_inputs(PLAIN)
    inputs.target[1, 2] = value
    with pytest.raises(TargetRangeError, match=rf"holds {value} \(row 9\).*0 to 200.*-100"):
        call(inputs)
    assert issubclass(TargetRangeError, IndexError)


def test_negative_target_is_out_of_range_without_ignore_index() -> None:
    inputs = make_inputs(PLAIN)
    inputs.target[0, 0] = -100
    with pytest.raises(TargetRangeError, match=r"columns run from 0 to 200\. Fix the index\."):
        call(inputs, ignore_index=None)


def _bad_inputs() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """Name -> changed tensors, changed arguments, words of the sentence."""
    ok = make_inputs(PLAIN)
    requires_grad = torch.ones(201, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(201, 13), 0.1, 0, torch.qint8)
    return {
        "integer weight": ({"weight": ok.weight.to(torch.int8)}, {}, "weight has dtype int8"),
        "quantised weight": ({"weight": quantised}, {}, "weight is quantised"),
        "sparse weight": ({"weight": ok.weight.to_sparse()}, {}, "weight is stored as"),
        "float8 hidden": (
            {"hidden": ok.hidden.to(torch.float8_e4m3fn)},
            {},
            "hidden has dtype float8_e4m3fn",
        ),
        "two dtypes": (
            {"weight": ok.weight.bfloat16()},
            {},
            "weight has dtype bfloat16 and hidden",
        ),
        "depth": ({"weight": torch.ones(201, 12)}, {}, "13 features and weight 12"),
        "empty head": ({"weight": torch.ones(0, 13)}, {}, "at least one column"),
        "head of three dimensions": ({"weight": torch.ones(2, 2, 13)}, {}, "weight 3"),
        "target shape": ({"target": ok.target.T}, {}, r"target has shape \(7, 3\)"),
        "target dimensions": ({"target": ok.target.flatten()}, {}, "target has 1 dimensions"),
        "class probabilities": ({"target": torch.rand(3, 7)}, {}, "target has dtype float32"),
        "bias size": ({"bias": torch.ones(200)}, {}, "bias has 200 elements and weight 201"),
        "bias dimensions": ({"bias": torch.ones(1, 201)}, {}, "bias has 2 dimensions"),
        "column_weight size": ({"column_weight": torch.ones(7)}, {}, "column_weight has 7"),
        "column_weight dtype": (
            {"column_weight": torch.ones(201, dtype=torch.int64)},
            {},
            "column_weight has dtype int64",
        ),
        "column_weight gradient": ({"column_weight": requires_grad}, {}, "Detach it"),
        "two devices": ({"weight": ok.weight.to("meta")}, {}, "weight is on meta"),
        "softcap": ({}, {"softcap": -1.0}, "softcap is -1.0"),
        "workspace": ({}, {"workspace": -1}, "workspace is -1"),
        "filter level": ({}, {"filter_level": -0.1}, "filter_level is -0.1"),
        "endless filter level": ({}, {"filter_level": float("inf")}, "filter_level is inf"),
        "filter parts": ({}, {"filter_parts": "bias"}, "known parts are both, hidden, weight"),
        "unknown filter": ({}, {"gradient_filter": "most"}, "known filters are exact, mass, block"),
    }


@pytest.mark.parametrize("name", list(_bad_inputs()))
def test_bad_input_is_refused_in_a_sentence(name: str) -> None:
    tensors, arguments, words = _bad_inputs()[name]
    inputs = make_inputs(PLAIN)
    for key, tensor in tensors.items():
        setattr(inputs, key, tensor)
    with pytest.raises(UnsupportedInputError, match=words) as caught:
        call(inputs, **arguments)
    assert isinstance(caught.value, (MemeffError, TypeError))
    knobs = {"softcap", "gradient_filter", "workspace", "filter_level", "filter_parts"}
    asked = {key: value for key, value in arguments.items() if key in knobs}
    sentence = supports(*inputs.tensors(), **asked)
    assert sentence is not None
    assert sentence in str(caught.value)


def test_supports_accepts_what_the_caller_will_cast() -> None:
    inputs = make_inputs(PLAIN)
    inputs.weight = inputs.weight.bfloat16()
    assert supports(*inputs.tensors()) is not None
    assert supports(*inputs.tensors(), dtype=torch.bfloat16) is None
    refused = supports(*inputs.tensors(), dtype=torch.int8)
    assert refused is not None
    assert "int8" in refused


def test_engines_are_described_and_have_one_interface() -> None:
    pytest.importorskip("triton")
    assert set(ENGINES) == {"hopper", "library", "reference"}
    for name, engine in ENGINES.items():
        assert engine.name == name
        assert str(engine) == f"{engine.how} ({engine.needs})"
        assert all(
            callable(getattr(engine.module, each)) for each in ("forward", "backward", "total")
        )


def test_engine_of_a_planned_hopper_depends_on_what_is_asked() -> None:
    device, half = torch.device("cuda", 0), torch.bfloat16
    with planned_for(device):
        assert engine_for(device, half, 64) == "hopper"
        assert engine_for(device, half, 60) == "library"
        assert engine_for(device, torch.float32, 64) == "library"
        assert engine_for(device, half, 64, with_top=True) == "library"
        assert engine_for(device, half, 64, is_adapted=True) == "library"
        assert engine_for(device, half, 64, is_contiguous=False) == "library"
        assert engine_for(device, torch.float64, 64) == "reference"


def test_a_filter_without_its_engine_leaves_nothing_out() -> None:
    inputs = make_inputs(PLAIN)
    found = measure(inputs.hidden, inputs.weight, inputs.target, gradient_filter="mass")
    assert found.active == 1
    assert found.dropped.shape == inputs.target.shape
    assert not found.dropped.any()
    exact, filtered = (
        values_and_gradients(linear_cross_entropy, inputs, {**PLAIN.arguments(1), **changes})
        for changes in ({}, {"gradient_filter": "mass"})
    )
    for name, value in exact.items():
        assert torch.equal(filtered[name], value)
