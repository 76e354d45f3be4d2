"""memeff::linear_cross_entropy inside torch.compile: one graph, dynamic shapes, errors at compile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config, lowering
from torch._inductor.utils import run_and_get_code

from memeff_compile.kernels import library
from memeff_compile.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_cross_entropy_total,
)
from tests.support.inductors_code import uncompiled
from tests.support.oracles import CASES, Case, Inputs, make_inputs, values_and_gradients

PLAIN = CASES[0]
SMALL = {"depth": 8, "vocab": 150}


def op_of(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    def op(*tensors: Tensor | None, **arguments: object) -> tuple[Tensor, ...]:
        nll, lse, logit_sum, entropy, top, *_ = linear_cross_entropy(*tensors, **arguments)
        return nll * 2, lse + 1, logit_sum * 3, entropy * 5, top + 1

    return op


def assert_compiled_equals_eager(
    case: Case, inputs: Inputs, compiled: Callable[..., object]
) -> None:
    expected = values_and_gradients(op_of(case), inputs, case.arguments(1))
    found = values_and_gradients(compiled, inputs, case.arguments(1))  # type: ignore[arg-type]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [PLAIN, CASES[-1]], ids=lambda case: case.name)
def test_compiles_to_one_graph(case: Case, dtype: torch.dtype) -> None:
    compiled = torch.compile(op_of(case), backend="aot_eager", fullgraph=True)
    assert_compiled_equals_eager(case, make_inputs(case, **SMALL, dtype=dtype), compiled)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on the CPU needs g++")
@pytest.mark.usefixtures("inductors_loops")
def test_compiles_with_inductor() -> None:
    case = CASES[-1]
    compiled = torch.compile(op_of(case), backend="inductor", fullgraph=True, dynamic=True)
    for rows in (5, 9):
        inputs = make_inputs(case, shape=(2, rows), **SMALL, dtype=torch.bfloat16)
        inputs.weight = inputs.weight.T.contiguous().T
        assert_compiled_equals_eager(case, inputs, compiled)


def test_inductors_code_calls_the_functions_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = linear_cross_entropy, linear_cross_entropy_backward, linear_cross_entropy_total
    for op in ops:  # Inductor without our backend may have compiled them in this process
        monkeypatch.delitem(lowering.lowerings, op, raising=False)

    def loss(*tensors: Tensor | None) -> Tensor:
        rows = linear_cross_entropy(*tensors, **PLAIN.arguments())[0].sum()
        *operands, target, _ = tensors
        settings = {"ignore_index": None, "scale": 1.0, "softcap": 0.0, "workspace": 0}
        settings["output_mask"] = [True, True, False]
        total = linear_cross_entropy_total(*operands, target, None, None, **settings)[0]
        return rows + total

    library.direct_in_inductor()
    inputs = make_inputs(PLAIN, **SMALL)
    for operand in (inputs.hidden, inputs.weight):
        operand.requires_grad_()
    compiled = torch.compile(loss, backend="inductor", fullgraph=True)
    with uncompiled(), config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: compiled(*inputs.tensors()).backward())
    called = re.findall(r"ops\.memeff\.(\w+)\.default([.a-z]*)\(", "".join(codes))
    assert set(called) == {(op.name()[8:], ".direct") for op in ops}, "the dispatcher is not asked"


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_other_sizes_do_not_recompile(dynamic: bool | None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op_of(PLAIN), backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for rows in (5, 7, 11, 13):
        inputs = make_inputs(PLAIN, shape=(2, rows), **SMALL)
        assert_compiled_equals_eager(PLAIN, inputs, compiled)
        counts.append(counter.frame_count)
    assert len(set(counts if dynamic else counts[1:])) == 1


def test_flattened_hidden_compiles_with_dynamic_shapes() -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        nll, *_ = linear_cross_entropy(
            hidden.flatten(0, 1), weight, None, target.flatten(), None, **PLAIN.arguments()
        )
        return nll.mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    inputs = make_inputs(PLAIN, **SMALL)
    arguments = inputs.hidden.requires_grad_(), inputs.weight, inputs.target
    torch.testing.assert_close(compiled(*arguments), loss(*arguments))


def test_bad_input_shows_at_compile_time() -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, None, target, None, **PLAIN.arguments())[0]

    inputs = make_inputs(PLAIN)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="13 features and weight 12"):
        compiled(inputs.hidden, torch.ones(201, 12), inputs.target)
    with pytest.raises(Exception, match="target has dtype float32"):
        compiled(inputs.hidden, inputs.weight, inputs.target.float())


def test_autocast_in_a_compiled_function_does_not_reach_into_the_op() -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(hidden, weight, None, target, None, **PLAIN.arguments())[0]

    inputs = make_inputs(PLAIN)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = linear_cross_entropy(*inputs.tensors(), **PLAIN.arguments())[0]
    assert torch.equal(compiled(inputs.hidden, inputs.weight, inputs.target), expected)
