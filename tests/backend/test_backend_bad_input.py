"""Input that is wrong or extreme: eager's kind of error with a better sentence, or eager's value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memeff_compile
from memeff_compile.errors import DoubleBackwardError, TargetRangeError
from tests.support.closeness import needs_compiler
from tests.support.surfaces import SURFACES, SurfaceModel, V, batch

INNER = ("eager", "aot_eager")


def compiled(model: Any, inner: str) -> Any:
    return torch.compile(model, backend="memeff", options={"memeff.inner": inner})


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrong", [V, -1, -101])
def test_target_out_of_range_raises_as_eager_does(inner: str, wrong: int) -> None:
    model = SurfaceModel(SURFACES["linear_view"])
    x, labels = batch()
    labels[1, 2] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        model(x, labels)
    with pytest.raises(TargetRangeError) as caught:
        compiled(model, inner)(x, labels)
    for word in (str(wrong), str(V - 1), "-100", "ignore_index"):
        assert word in str(caught.value)


@pytest.mark.parametrize("inner", INNER)
def test_all_ignored_batch_is_nan_with_eagers_gradients(inner: str) -> None:
    model = SurfaceModel(SURFACES["linear_view"])
    x, labels = batch()
    labels.fill_(-100)
    results = []
    for run in (model, compiled(model, inner)):
        model.zero_grad()
        loss = run(x, labels)
        loss.backward()
        results.append((loss.detach(), model.weight.grad.clone(), model.trunk.grad.clone()))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert torch.isnan(results[1][0])


@pytest.mark.parametrize("inner", INNER)
def test_empty_batch_is_nan_with_zero_gradients(inner: str) -> None:
    model = SurfaceModel(SURFACES["linear_view"])
    x, labels = batch()
    loss = compiled(model, inner)(x[:0], labels[:0])
    loss.backward()
    assert torch.isnan(loss)
    assert torch.isnan(model(x[:0], labels[:0]))
    assert not model.weight.grad.any()


def test_second_derivative_raises_with_the_way_out() -> None:
    model = SurfaceModel(SURFACES["linear_view"])
    (grad,) = torch.autograd.grad(
        compiled(model, "eager")(*batch()), model.weight, create_graph=True
    )
    with pytest.raises(DoubleBackwardError, match=r"memeff\.linear_cross_entropy.*off"):
        grad.square().sum().backward()


def test_second_derivative_works_with_the_way_out() -> None:
    model = SurfaceModel(SURFACES["linear_view"])
    options = {"memeff.inner": "eager", "memeff.linear_cross_entropy": "off"}
    run = torch.compile(model, backend="memeff", options=options)
    (grad,) = torch.autograd.grad(run(*batch()), model.weight, create_graph=True)
    grad.square().sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize(
    ("state", "scale"),
    [
        (200.0, lambda z: z.float()),
        (200.0, lambda z: (z / 1e3).float()),
        (1.0, lambda z: (z * 300).float()),
        (1.0, lambda z: (z * 3e3 / 3e3).float()),
        (1.0, lambda z: (z.float() * 300).to(z.dtype).float()),
    ],
    ids=["product", "product, lowered", "raised", "raised and lowered", "cast back"],
)
def test_fp16_logits_that_overflow_give_the_fp32_loss(
    state: float, scale: Callable[[Tensor], Tensor]
) -> None:
    """Eager rounds logits and scaled logits to fp16 and gets infinities; the op takes fp32."""
    h = torch.full((4, 16), state, dtype=torch.float16)
    w = torch.linspace(-40, 40, V * 16).view(V, 16).to(torch.float16).requires_grad_()
    y = torch.tensor([V - 1, V - 1, V - 2, V - 1])

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(scale(F.linear(h, w)), y)

    assert not torch.isfinite(loss(h, w))
    found = compiled(loss, "aot_eager")(h, w)
    found.backward()
    torch.testing.assert_close(found, loss(h.float(), w.float()), rtol=1e-3, atol=1e-3)
    assert torch.isfinite(w.grad).all()


@needs_compiler
@pytest.mark.usefixtures("inductors_loops")
def test_labels_and_class_weights_of_other_dtypes_are_what_inductor_makes_of_them() -> None:
    """Eager refuses them, and so do losses outside the graph; decompositions take them."""
    torch.manual_seed(0)
    h, w = torch.randn(12, 16, requires_grad=True), torch.randn(V, 16, requires_grad=True)
    y, weights = torch.randint(V, (12,)), torch.rand(V)
    cases = [(y.int(), None), (y, weights.double()), (y, weights.bfloat16()), (y.int(), weights)]

    def losses(h: Tensor, w: Tensor) -> list[Tensor]:
        return [F.cross_entropy(F.linear(h, w), y, weight=weight) for y, weight in cases]

    with pytest.raises(RuntimeError, match="expected"):
        losses(h, w)
    theirs = torch.compile(losses, backend="inductor")(h, w)
    ours = compiled(losses, "aot_eager")(h, w)
    assert memeff_compile.last_report().rewrites() == len(cases)
    for found, wanted, (_, weight) in zip(ours, theirs, cases, strict=True):
        assert found.dtype == wanted.dtype
        rtol = 2e-3 if weight is not None and weight.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)
    logits = torch.compile(F.linear, backend="memeff", options={"memeff.inner": "eager"})(h, w)
    for y, weight in cases:
        with pytest.raises(RuntimeError, match="expected"):
            F.cross_entropy(logits, y, weight=weight)


def test_gradient_that_arrives_twice_is_summed() -> None:
    model = SurfaceModel(SURFACES["linear_view"], torch.float64)
    run = compiled(model, "aot_eager")
    x, labels = batch(dtype=torch.float64)
    (run(x, labels) + 2 * run(x, labels)).backward()
    found = model.weight.grad.clone()
    model.zero_grad()
    (3 * model(x, labels)).backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=1e-12, atol=1e-12)


def test_unusual_strides_equal_eager() -> None:
    model = SurfaceModel(SURFACES["linear_view"], torch.float64)
    with torch.no_grad():
        model.weight.set_(model.weight.t().contiguous().t())
    x, labels = batch(dtype=torch.float64)
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(compiled(model, "aot_eager")(x, labels), model(x, labels))
    assert memeff_compile.last_report().rewrites() == 1
