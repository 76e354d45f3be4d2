"""Wrappers around a model, each with its statement in docs/use/training-loops.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.errors import StaleLogitsError
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
    loss: Tensor | None
    logits: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(160, 16), nn.Linear(16, 160)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Output:
        return self.read(self.embed(ids), labels)

    def read(self, rows: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(torch.tanh(rows))
        if labels is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits)


def compiled() -> Model:
    model = Model()
    model.compile(backend="memeff", options=OPTIONS)
    return model


def loss_of(model: nn.Module, *, outside: bool) -> tuple[Tensor, Tensor]:
    """Return the loss, computed by the model or outside from its logits, and the logits."""
    out = model(IDS, None if outside else IDS)
    if outside:
        return F.cross_entropy(out.logits.flatten(0, 1).float(), IDS.flatten()), out.logits
    return out.loss, out.logits


WHERE = pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])


@WHERE
def test_fp16_with_a_gradient_scaler_has_eagers_curve_and_skips_infinite_steps(
    outside: bool,
) -> None:
    curves: list[list[float]] = []
    seen = []
    for model in (Model(), compiled()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        curve = []
        for step in range(4):
            if step == 2:
                scaler.update(2.0**40)  # infinite gradients in fp16
            with torch.autocast("cpu", torch.float16):
                loss, logits = loss_of(model, outside=outside)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = model.head.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            moved = not torch.equal(before, model.head.weight)
            assert moved == norm.isfinite() == (step < 2), (step, norm)
            curve += [loss.item(), 0.0 if step >= 2 else norm.item()]
            if step == 2:
                assert scaler.get_scale() == 2.0**39
            optimizer.zero_grad()
            seen.append(logits)
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], rel=2e-3)
    assert codes() == ({"logits_deferred"} if outside else TRAINING)
    assert products(seen[4:]) == [0] * 4
    with pytest.raises(StaleLogitsError):
        seen[5].argmax(-1)  # of a step that the optimizer took
    assert seen[7].argmax(-1).shape == IDS.shape  # of a skipped step


@WHERE
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved hooks", "reentrant"])
def test_a_checkpoint_around_the_compiled_model_has_eagers_gradients(
    outside: bool, reentrant: bool
) -> None:
    found = []
    for model in (Model(), Model()):
        read: Any = model.read
        if found:
            read = torch.compile(read, backend="memeff", options=OPTIONS)
        rows = model.embed(IDS)

        def run(rows: Tensor, read: Any = read) -> Tensor:
            out = read(rows, None if outside else IDS)
            value: Tensor = out.logits if outside else out.loss
            return value

        value = checkpoint(run, rows, use_reentrant=reentrant)
        loss = F.cross_entropy(value.flatten(0, 1), IDS.flatten()) if outside else value
        loss.backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])
    assert codes() == ({"logits_deferred"} if outside else TRAINING)


@pytest.mark.slow
def test_batches_of_other_sizes_are_one_graph_more() -> None:
    model = compiled()
    for batch in (4, 3, 2):  # like the last batch of an epoch, or one with less padding
        ids = torch.arange(6 * batch).view(batch, 6)
        model(ids, ids).loss.backward()
    assert [graph.name for graph in memeff_compile.graphs()] == ["graph 0/0", "graph 0/1"]
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 2


def test_a_sequential_is_compiled_in_place_where_torch_does_it() -> None:
    """Torch 2.11 and 2.13 do not compile it, whatever the backend."""
    seen: list[Any] = []

    def other(gm: Any, _: Any) -> Any:
        seen.append(gm)
        return gm

    for backend, options in ((other, None), ("memeff", OPTIONS)):
        model = nn.Sequential(nn.Embedding(160, 16), nn.Linear(16, 160))
        model.compile(backend=backend, options=options)
        model(IDS)
    assert len(memeff_compile.graphs()) == len(seen)


def test_data_parallel_on_one_device_changes_nothing() -> None:
    model, reference = compiled(), Model()
    nn.DataParallel(model)(IDS, IDS).loss.backward()
    reference(IDS, IDS).loss.backward()
    assert_same_gradients(gradients(model), gradients(reference))
    assert codes() == TRAINING


def test_a_replica_of_data_parallel_calls_the_model_it_was_made_from() -> None:
    """A replica on a second GPU would use the weights of the first, whatever the backend."""
    model = compiled()
    replica: Any = model._replicate_for_data_parallel()
    replica.embed = replica.head = None  # the replica does not use its state
    assert torch.equal(replica(IDS, IDS).loss, model(IDS, IDS).loss)


def test_another_compiler_around_the_step_takes_the_model_with_it() -> None:
    model, reference = compiled(), Model()

    def step(model: nn.Module) -> Tensor:
        loss: Tensor = model(IDS, IDS).loss
        return loss

    torch.compile(step, backend="aot_eager")(model).backward()
    step(reference).backward()
    assert_same_gradients(gradients(model), gradients(reference))
    assert codes() == set()
    torch.compile(step, backend="memeff", options=OPTIONS)(model).backward()
    assert codes() == {"rewrote"}
