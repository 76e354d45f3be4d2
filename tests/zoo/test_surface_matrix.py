"""Every surface form x {fp32, bf16, autocast} x {train, no_grad} x {static, dynamic}.

The rewrite fires once per head (or not at all, as `NOT_FUSED` says), loss and gradients are eager's: to twelve digits in float64, as the
definition of equal gradients says in fp32, and no worse than 1.1 times eager's own error against fp32
in bf16 and under autocast. All surfaces are compiled as one model per mode; a test reads its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.report import GraphReport
from tests.support.captured_graphs import FUSE
from tests.support.closeness import (
    WORSE,
    assert_no_worse,
    assert_same_gradients,
    needs_compiler,
    pooled_error,
)
from tests.support.surfaces import NOT_FUSED, OF_PACKAGES, SURFACES, D, SurfaceModel, V, batch

EVERY = SURFACES | OF_PACKAGES
SEEDS = range(5)
SHAPES = [(2, 8), (3, 5), (4, 9)]

MODES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


def region(autocast: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()


class Surfaces(nn.Module):
    """Some surfaces in one model, each with a separate trunk and head: one compilation."""

    def __init__(self, names: Iterable[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: SurfaceModel(EVERY[name], dtype, seed) for seed, name in enumerate(names)}
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {name: part(x, labels) for name, part in self.parts.items()}


def compiled(
    model: nn.Module, inner: str = "aot_eager", dynamic: bool | None = None
) -> Callable[..., Any]:
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": inner}
    return torch.compile(model, backend="memeff", fullgraph=True, dynamic=dynamic, options=options)


@dataclass(frozen=True)
class Outcome:
    """One surface's loss and gradients; no gradients if none are needed."""

    loss: Tensor
    grads: list[Tensor | None]


@dataclass(frozen=True)
class Pair:
    """The outcomes of all surfaces on one batch: as compiled, in eager, and in fp32."""

    ours: dict[str, Outcome]
    eager: dict[str, Outcome]
    truth: dict[str, Outcome]


@dataclass(frozen=True)
class Run:
    """One compilation of all surfaces: its results on some batches, and its report's graphs."""

    pairs: list[Pair]
    graphs: list[GraphReport]

    def assert_fired(self, surface: str) -> None:
        """Assert one graph with one rewrite of the surface's head and no decline.

        A surface in `NOT_FUSED` has the record listed there instead, or none.
        """
        (graph,) = self.graphs
        of_it = [r for r in graph.records if r.module.split(".")[-1] == surface]
        expected = [("rewrote", FUSE)]
        if (code := NOT_FUSED.get(surface)) is not None:
            expected = [("declined", code)] if code else []
        found = [(r.action, r.code if r.action == "declined" else r.pass_name) for r in of_it]
        assert found == expected, of_it
        left = [r for r in graph.records if r.action in ("declined", "internal_error")]
        assert not [r for r in left if r.module.split(".")[-1] not in NOT_FUSED], left


def outcomes(
    model: nn.Module, call: Callable[..., dict[str, Tensor]], *args: Tensor
) -> dict[str, Outcome]:
    """Call, and run the backward pass of all losses together: no two share a parameter."""
    model.zero_grad(set_to_none=True)
    losses = call(*args)
    if all(loss.requires_grad for loss in losses.values()):
        torch.autograd.backward(list(losses.values()))
    return {
        name: Outcome(
            loss.detach(),
            [None if p.grad is None else p.grad.clone() for p in model.parts[name].parameters()],
        )
        for name, loss in losses.items()
    }


def run_all(
    dtype: torch.dtype,
    autocast: bool,
    batches: Iterable[tuple[tuple[int, int], int]],
    inner: str = "aot_eager",
    dynamic: bool | None = None,
) -> Run:
    """Compile every surface once and run it on batches, given as ((rows, length), seed)."""
    model = Surfaces(EVERY, dtype)
    exact = Surfaces(EVERY, dtype).to(torch.promote_types(dtype, torch.float32))
    call = compiled(model, inner, dynamic)
    pairs = []
    for shape, seed in batches:
        x, labels = batch(*shape, dtype=dtype, seed=seed)
        with region(autocast):
            eager = outcomes(model, model, x, labels)
            ours = outcomes(model, call, x, labels)
        truth = outcomes(exact, exact, x.to(next(exact.parameters()).dtype), labels)
        pairs.append(Pair(ours, eager, truth))
    return Run(pairs, memeff_compile.last_report().graphs)


@cache
def exact_run() -> Run:
    return run_all(torch.float64, False, [(SHAPES[0], 1)], inner="eager")


@cache
def training_run(mode: str, inner: str = "aot_eager") -> Run:
    return run_all(*MODES[mode], [(SHAPES[0], seed) for seed in SEEDS], inner)


@cache
def symbolic_run(mode: str) -> Run:
    return run_all(*MODES[mode], [(shape, 1) for shape in SHAPES], inner="eager", dynamic=True)


@cache
def no_grad_run(mode: str, dynamic: bool) -> Run:
    shapes = SHAPES[1:] if dynamic else SHAPES[:1]
    with torch.no_grad():
        return run_all(*MODES[mode], [(s, 1) for s in shapes], inner="eager", dynamic=dynamic)


@pytest.mark.xdist_group("surfaces")
@pytest.mark.parametrize("surface", EVERY)
def test_fp64_is_exact(surface: str) -> None:
    run = exact_run()
    ours, eager = run.pairs[0].ours[surface], run.pairs[0].eager[surface]
    downcast = ours.loss.dtype != torch.float64
    tolerance = 1e-6 if downcast else 1e-12
    torch.testing.assert_close(ours.loss, eager.loss, rtol=tolerance, atol=tolerance)
    for found, expected in zip(ours.grads, eager.grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    run.assert_fired(surface)


@pytest.mark.slow  # in fp64 and with symbolic sizes it is not
@pytest.mark.xdist_group("surfaces")
@pytest.mark.parametrize("surface", EVERY)
def test_training_equals_eager(surface: str) -> None:
    run = training_run("fp32")
    for pair in run.pairs:
        ours, eager = pair.ours[surface], pair.eager[surface]
        torch.testing.assert_close(ours.loss, eager.loss, rtol=1e-6, atol=1e-6)
        assert_same_gradients(ours.grads, eager.grads)
    run.assert_fired(surface)


@pytest.mark.xdist_group("surfaces")
@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [pytest.param("bf16", marks=pytest.mark.slow), "autocast"])
@pytest.mark.parametrize("surface", EVERY)
def test_training_in_low_precision_is_no_worse_than_eager(
    surface: str, mode: str, inner: str
) -> None:
    """Errors of loss and gradients against fp32, over the seeds.

    The loss is one number, whose error may be small by luck: half a bf16 rounding is allowed on top.
    """
    run = training_run(mode, inner)
    found = [(p.ours[surface], p.eager[surface], p.truth[surface]) for p in run.pairs]
    assert all(ours.loss.dtype == eager.loss.dtype for ours, eager, _ in found)
    off = [float((o.loss - t.loss).abs() / t.loss) for o, _, t in found]
    eager_off = [float((e.loss - t.loss).abs() / t.loss) for _, e, t in found]
    assert max(off) <= WORSE * max(eager_off) + 2**-10
    assert_no_worse(
        [pooled_error(o.grads, t.grads) for o, _, t in found],
        [pooled_error(e.grads, t.grads) for _, e, t in found],
    )
    run.assert_fired(surface)


@pytest.mark.xdist_group("surfaces")
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode == "fp32" else pytest.mark.slow) for mode in MODES],
)
@pytest.mark.parametrize("surface", EVERY)
def test_symbolic_sizes_compile_once_and_equal_eager(surface: str, mode: str) -> None:
    run = symbolic_run(mode)
    for pair in run.pairs:
        ours, eager = pair.ours[surface], pair.eager[surface]
        if mode == "fp32":
            torch.testing.assert_close(ours.loss, eager.loss, rtol=1e-6, atol=1e-6)
            assert_same_gradients(ours.grads, eager.grads)
        else:  # the errors themselves are judged with static sizes
            assert ours.loss.dtype == eager.loss.dtype
            torch.testing.assert_close(ours.loss, eager.loss, rtol=2e-2, atol=2e-2)
            assert pooled_error(ours.grads, eager.grads) < 2e-2
    run.assert_fired(surface)


@pytest.mark.xdist_group("surfaces")
@pytest.mark.parametrize(
    ("mode", "dynamic"),
    [
        pytest.param("fp32", True, id="fp32-dynamic"),
        pytest.param("fp32", False, id="fp32-static", marks=pytest.mark.slow),
        *[pytest.param(m, True, id=m, marks=pytest.mark.slow) for m in MODES if m != "fp32"],
    ],
)
@pytest.mark.parametrize(
    "surface",
    [pytest.param(s, marks=pytest.mark.slow if n % 3 else ()) for n, s in enumerate(EVERY)],
)
def test_no_grad_equals_eager(surface: str, mode: str, dynamic: bool) -> None:
    tolerance = 1e-6 if mode == "fp32" else 2e-2
    run = no_grad_run(mode, dynamic)
    for pair in run.pairs:
        ours, eager = pair.ours[surface], pair.eager[surface]
        assert not any(grad is not None for grad in ours.grads)
        assert ours.loss.dtype == eager.loss.dtype
        torch.testing.assert_close(ours.loss, eager.loss, rtol=tolerance, atol=tolerance)
    assert [graph.training for graph in run.graphs] == [False]
    run.assert_fired(surface)


# --- one diagonal under Inductor ------------------------------------------------------------------------

DIAGONAL = {
    "fp32": ("softcap_gemma", "z_loss_unflattened", "hf_shifted_labels", "label_smoothing"),
    "bf16": ("scaled_then_bias", "log_softmax_float_gather", "old_shifted_logits", "addmm_bias"),
    "autocast": ("classes_by_movedim", "weights_and_smoothing", "einsum_vh", "time_major"),
}
"""Four surfaces for each mode: Inductor takes seconds for each, so one in one mode is quick."""


@needs_compiler
@pytest.mark.usefixtures("inductors_loops")
@pytest.mark.parametrize(
    ("mode", "share"),
    [
        pytest.param(mode, share, marks=pytest.mark.slow if share.start or mode != "fp32" else ())
        for mode in MODES
        for share in (slice(0, 1), slice(1, 4))
    ],
)
def test_diagonal_under_inductor(mode: str, share: slice) -> None:
    dtype, autocast = MODES[mode]
    model = Surfaces(DIAGONAL[mode][share], dtype)
    call = compiled(model, inner="inductor")
    x, labels = batch(dtype=dtype)
    if mode == "fp32":
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(labels, 1)
    with region(autocast):
        eager, ours = outcomes(model, model, x, labels), outcomes(model, call, x, labels)
    run = Run([], memeff_compile.last_report().graphs)
    tolerance = 1e-6 if mode == "fp32" else 2e-2
    for name, found in ours.items():
        torch.testing.assert_close(found.loss, eager[name].loss, rtol=tolerance, atol=tolerance)
        if mode == "fp32":
            assert_same_gradients(found.grads, eager[name].grads)
        else:
            assert pooled_error(found.grads, eager[name].grads) < 2e-2
        run.assert_fired(name)


def test_the_surfaces_are_worth_the_name() -> None:
    assert len(SURFACES) >= 38
    assert (V, D) == (48, 16)
