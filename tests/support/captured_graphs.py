"""Shared by the tests of the passes: captured graphs, and a comparison of compiled with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import memeff_compile
from memeff_compile.report import Record, Report

FUSE = "fuse_linear_cross_entropy"


def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> GraphModule:
    """Return the one graph that Dynamo captures of `function`."""
    found: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(*args)
    assert len(found) == 1
    return found[0]


def calls(gm: GraphModule) -> list[Node]:
    """Return the call nodes of a graph, in order."""
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


@dataclass(frozen=True)
class Outcome:
    """The result of a function compiled with the backend and found equal to eager."""

    report: Report

    @property
    def fired(self) -> int:
        """How often the loss was fused."""
        return sum(r.action == "rewrote" and r.pass_name == FUSE for r in self.report.records)

    @property
    def codes(self) -> list[str]:
        """The codes of the declines."""
        return [r.code for r in self.report.records if r.action == "declined"]

    def declined(self, code: str) -> Record:
        """Return the one record with a decline code."""
        (record,) = [r for r in self.report.records if (r.action, r.code) == ("declined", code)]
        return record


def compare_with_eager(
    function: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    rtol: float = 1e-12,
    atol: float = 1e-12,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    inner: str = "eager",
) -> Outcome:
    """Run `function` eagerly and compiled on copies of `inputs`; values and gradients must agree.

    Outputs (a tensor or a tuple of them), gradients of every input that asks for one, and the
    inputs after writes are compared. An internal error of the passes fails the test.
    """
    torch._dynamo.reset()
    memeff_compile.reset()
    settings = {"memeff.inner": inner, **(options or {})}
    compiled = torch.compile(
        function, backend="memeff", options=settings, fullgraph=fullgraph, dynamic=dynamic
    )
    expected = _values_and_gradients(function, inputs)
    found = _values_and_gradients(compiled, inputs)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None), "a gradient is missing or not wanted"
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    report = memeff_compile.last_report()
    assert report.graphs, "nothing was compiled"
    assert not [r for r in report.records if r.action == "internal_error"], report.details()
    return Outcome(report)


def _values_and_gradients(
    function: Callable[..., Any], inputs: Sequence[Any]
) -> list[Tensor | None]:
    torch.manual_seed(0)
    leaves = [
        i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, Tensor) else i
        for i in inputs
    ]
    # Writes into a leaf that needs a gradient are illegal in eager: hand out non-leaf aliases.
    given = [i * 1 if isinstance(i, Tensor) and i.requires_grad else i for i in leaves]
    result = function(*given)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    tensors = [o for o in outputs if isinstance(o, Tensor)]
    differentiable = [t for t in tensors if t.requires_grad]
    if differentiable:
        generator = torch.Generator().manual_seed(3)
        cotangents = [
            torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) + 0.5
            for t in differentiable
        ]
        torch.autograd.backward(differentiable, cotangents)
    values: list[Tensor | None] = [t.detach() for t in tensors]
    for leaf, passed in zip(leaves, given, strict=True):
        if isinstance(leaf, Tensor):
            values.append(passed.detach() if passed is not leaf else leaf.detach())
            values.append(leaf.grad if leaf.requires_grad else None)
    return values
