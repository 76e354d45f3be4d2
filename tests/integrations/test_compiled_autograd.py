"""Compiled autograd: the backward pass as one graph, with the fused op and deferred logits in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.nn import functional as F

from tests.integrations.tiny import (
    OPTIONS,
    TRAINING,
    assert_same_gradients,
    codes,
    gradients,
    products,
)

IDS = torch.arange(12).view(2, 6)


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(160, 16), nn.Linear(16, 160)

    def forward(self, ids: Tensor = IDS) -> Output:
        logits = self.head(torch.tanh(self.embed(ids)))
        return Output(F.cross_entropy(logits.flatten(0, 1), ids.roll(-1).flatten()), logits)


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "the model's loss": lambda out: out.loss,
    "and the logits": lambda out: out.loss + out.logits.square().mean(),
    "and a row of the logits": lambda out: out.loss + out.logits[:, -1].logsumexp(-1).mean(),
    "two parts of the logits": lambda out: (out.logits[:, -1] * 2).sum() + out.logits[0, 0].sum(),
}


SLOW = ("the model's loss", "and the logits", "two parts of the logits")


def expected_gradients(loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    reference = Model()
    loss(reference()).backward()
    return gradients(reference)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, loss in LOSSES.items()
    ],
)
def test_a_backward_pass_outside_the_compiled_function(loss: Callable[[Any], Tensor]) -> None:
    model = Model()
    model.compile(backend="memeff", options=OPTIONS)
    value = loss(model())
    counters.clear()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        value.backward()
    assert counters["compiled_autograd"]["captures"] == 1
    assert_same_gradients(gradients(model), expected_gradients(loss))
    assert codes() == TRAINING


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda z, y: F.cross_entropy(z.flatten(0, 1).float(), y.flatten()),
    "log-probabilities": lambda z, y: -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
}


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param(spelling, id=name, marks=pytest.mark.slow if "prob" in name else ())
        for name, spelling in SPELLINGS.items()
    ],
)
def test_a_loss_outside_the_model_is_fused_in_the_compiled_backward(
    spelling: Callable[[Tensor, Tensor], Tensor],
) -> None:
    labels = IDS.roll(-1)
    model, reference = Model(), Model()
    model.compile(backend="memeff", options=OPTIONS)
    out = model()
    value, expected = (spelling(logits, labels) for logits in (out.logits, reference().logits))
    expected.backward()
    counters.clear()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        value.backward()
    assert counters["compiled_autograd"]["captures"] == 1
    torch.testing.assert_close(value, expected, rtol=2e-6, atol=0)
    assert_same_gradients(gradients(model), gradients(reference))
    assert products([out.logits]) == [0]


def test_a_whole_training_step_compiled_with_the_option_of_torch() -> None:
    model, curve = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module) -> Tensor:
        loss: Tensor = model().loss
        loss.backward()
        return loss

    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, backend="memeff", options=OPTIONS)
        for _ in range(3):
            curve.append(compiled(model).item())
            optimizer.step()
            optimizer.zero_grad()
    assert counters["compiled_autograd"]["captures"] == 1
    assert codes() == {"rewrote"}  # the logits do not leave the step

    reference, expected = Model(), []
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        expected.append(step(reference).item())
        optimizer.step()
        optimizer.zero_grad()
    assert curve == pytest.approx(expected, rel=2e-6)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="this torch cannot trace a backward pass into the graph of its forward pass",
)
def test_a_step_whose_backward_pass_is_traced_into_its_graph() -> None:
    def step(model: nn.Module) -> Tensor:
        loss: Tensor = model().loss
        loss.backward()
        return loss.detach()

    model = Model()
    options = {**OPTIONS, "memeff.verify": "on"}
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(step, backend="memeff", fullgraph=True, options=options)(model)
    assert_same_gradients(gradients(model), expected_gradients(LOSSES["the model's loss"]))
    assert codes() == {"rewrote", "verify_passed"}


def test_verify_compares_beside_compiled_autograd() -> None:
    model = Model()
    model.compile(backend="memeff", options={"memeff.inner": "eager", "memeff.verify": "on"})
    loss = LOSSES["the model's loss"]
    counters.clear()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss(model()).backward()
    assert counters["compiled_autograd"]["captures"] == 1  # without verify's
    assert_same_gradients(gradients(model), expected_gradients(loss))
    assert codes() == {*TRAINING, "verify_passed"}
