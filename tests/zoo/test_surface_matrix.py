"""Every surface form x {fp32, bf16, autocast} x {train, no_grad} x {static, dynamic}.

The rewrite fires once per head, loss and gradients are eager's: to twelve digits in float64, as the
definition of equal gradients says in fp32, and no worse than 1.1 times eager's own error against fp32
in bf16 and under autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from tests.support.captured_graphs import FUSE
from tests.support.closeness import (
    WORSE,
    assert_no_worse,
    assert_same_gradients,
    needs_compiler,
    pooled_error,
)
from tests.support.surfaces import SURFACES, D, SurfaceModel, V, batch, loss_and_grads

SEEDS = range(5)
SHAPES = [(2, 8), (3, 5), (4, 9)]

MODES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


def region(autocast: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()


def compiled(
    model: nn.Module, inner: str = "aot_eager", dynamic: bool | None = None
) -> Callable[..., Any]:
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": inner}
    return torch.compile(model, backend="memeff", fullgraph=True, dynamic=dynamic, options=options)


def assert_fired(heads: int = 1, graphs: int = 1) -> None:
    report = memeff_compile.last_report()
    assert len(report.graphs) == graphs, str(report)
    assert report.rewrites(FUSE) == heads * graphs, str(report)
    assert not [r for r in report.records if r.action in ("declined", "internal_error")], str(
        report
    )


def assert_no_worse_than_eager(
    model: nn.Module, run: Callable[..., Any], autocast: bool, shape: tuple[int, int]
) -> None:
    """Compare the errors of loss and gradients against fp32 over the seeds.

    The loss is one number, whose error may be small by luck: half a bf16 rounding is allowed on top.
    """
    dtype = next(model.parameters()).dtype
    reference = SurfaceModel(model.surface, dtype).float()
    reference.load_state_dict(model.state_dict())
    ours, theirs, off, eager_off = [], [], [], []
    for seed in SEEDS:
        x, labels = batch(*shape, dtype=dtype, seed=seed)
        true_loss, truth = loss_and_grads(reference, x.float(), labels)
        with region(autocast):
            eager_loss, eager_grads = loss_and_grads(model, x, labels)
            loss, grads = loss_and_grads(_Called(model, run), x, labels)
        assert loss.dtype == eager_loss.dtype
        off.append(float((loss - true_loss).abs() / true_loss))
        eager_off.append(float((eager_loss - true_loss).abs() / true_loss))
        ours.append(pooled_error(grads, truth))
        theirs.append(pooled_error(eager_grads, truth))
    assert max(off) <= WORSE * max(eager_off) + 2**-10
    assert_no_worse(ours, theirs)


class _Called(nn.Module):
    """Parameters of one module, forward of another: what `loss_and_grads` takes."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


@pytest.mark.parametrize("surface", SURFACES)
def test_fp64_is_exact(surface: str) -> None:
    model = SurfaceModel(SURFACES[surface], torch.float64)
    run = compiled(model, inner="eager")
    x, labels = batch(dtype=torch.float64)
    expected_loss, expected = loss_and_grads(model, x, labels)
    loss, found = loss_and_grads(_Called(model, run), x, labels)
    downcast = loss.dtype != torch.float64
    tolerance = 1e-6 if downcast else 1e-12
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert_fired()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("surface", SURFACES)
def test_training_equals_eager(surface: str, mode: str) -> None:
    dtype, autocast = MODES[mode]
    model = SurfaceModel(SURFACES[surface], dtype)
    run = compiled(model)
    if mode != "fp32":
        assert_no_worse_than_eager(model, run, autocast, SHAPES[0])
        assert_fired()
        return
    x, labels = batch()
    expected_loss, expected = loss_and_grads(model, x, labels)
    loss, found = loss_and_grads(_Called(model, run), x, labels)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(found, expected)
    assert_fired()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("surface", SURFACES)
def test_symbolic_sizes_compile_once_and_equal_eager(surface: str, mode: str) -> None:
    dtype, autocast = MODES[mode]
    model = SurfaceModel(SURFACES[surface], dtype)
    run = compiled(model, inner="eager", dynamic=True)
    for shape in SHAPES:
        x, labels = batch(*shape, dtype=dtype)
        with region(autocast):
            expected_loss, expected = loss_and_grads(model, x, labels)
            loss, found = loss_and_grads(_Called(model, run), x, labels)
        if mode == "fp32":
            torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
            assert_same_gradients(found, expected)
        else:  # the errors themselves are judged with static sizes
            assert loss.dtype == expected_loss.dtype
            torch.testing.assert_close(loss, expected_loss, rtol=2e-2, atol=2e-2)
            assert pooled_error(found, expected) < 2e-2
    assert_fired()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("surface", SURFACES)
def test_no_grad_equals_eager(surface: str, mode: str) -> None:
    dtype, autocast = MODES[mode]
    model = SurfaceModel(SURFACES[surface], dtype)
    for dynamic, shapes in ((False, SHAPES[:1]), (True, SHAPES[1:])):
        run = compiled(model, inner="eager", dynamic=dynamic)
        for shape in shapes:
            x, labels = batch(*shape, dtype=dtype)
            with torch.no_grad(), region(autocast):
                expected, loss = model(x, labels), run(x, labels)
            assert not loss.requires_grad
            assert loss.dtype == expected.dtype
            tolerance = 1e-6 if mode == "fp32" else 2e-2
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        assert [g.training for g in memeff_compile.last_report().graphs] == [False]
        assert_fired()


# --- one diagonal under Inductor ------------------------------------------------------------------------

DIAGONAL = {
    "fp32": ("hf_shifted_labels", "softcap_gemma", "label_smoothing", "z_loss_unflattened"),
    "bf16": ("old_shifted_logits", "scaled_then_bias", "log_softmax_float_gather", "addmm_bias"),
    "autocast": ("classes_by_movedim", "einsum_vh", "weights_and_smoothing", "time_major"),
}


class Several(nn.Module):
    """Several surfaces in one model, each with a head of its own: one compilation."""

    def __init__(self, surfaces: tuple[str, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            SurfaceModel(SURFACES[name], dtype, seed) for seed, name in enumerate(surfaces)
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([part(x, labels).float() for part in self.parts]).sum()


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """Let Inductor compile in this process: starting its workers costs more than they save."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


@needs_compiler
@pytest.mark.usefixtures("quick_inductor")
@pytest.mark.parametrize("mode", MODES)
def test_diagonal_under_inductor(mode: str) -> None:
    dtype, autocast = MODES[mode]
    model = Several(DIAGONAL[mode], dtype)
    run = compiled(model, inner="inductor")
    x, labels = batch(dtype=dtype)
    if mode == "fp32":
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(labels, 1)
    with region(autocast):
        expected_loss, expected = loss_and_grads(model, x, labels)
        loss, found = loss_and_grads(_Called(model, run), x, labels)
    assert_fired(heads=len(DIAGONAL[mode]))
    tolerance = 1e-6 if mode == "fp32" else 2e-2
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    if mode == "fp32":
        assert_same_gradients(found, expected)
    else:
        assert pooled_error(found, expected) < 2e-2


def test_the_surfaces_are_worth_the_name() -> None:
    assert len(SURFACES) >= 38
    assert (V, D) == (48, 16)
