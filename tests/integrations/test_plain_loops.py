"""Training loops written by hand, and tools around a model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from memeff_compile.errors import StaleLogitsError
from tests.integrations.tiny import (
    OPTIONS,
    TRAINING,
    assert_same_gradients,
    batch,
    codes,
    gradients,
    llama,
    products,
)


def compiled(model: nn.Module, **options: object) -> Any:
    """Compile in place; other tests cover AOTAutograd, which takes half of the time."""
    model.compile(backend="memeff", options={"memeff.inner": "eager", **options})
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_logits_read_after_the_step_raise_and_the_named_option_makes_it_work() -> None:
    model = compiled(llama())
    optimizer = adamw(model)
    out = model(**batch())
    out.loss.backward()
    optimizer.step()
    with pytest.raises(StaleLogitsError) as raised:
        out.logits.argmax(-1)
    sentence = str(raised.value)
    assert "Read out.logits before optimizer.step()" in sentence
    assert 'options={"memeff.logits": "eager"}' in sentence

    model, reference = compiled(llama(), **{"memeff.logits": "eager"}), llama()
    optimizer = adamw(model)
    out = model(**batch())
    out.loss.backward()
    optimizer.step()
    assert torch.equal(out.logits.argmax(-1), reference(**batch()).logits.argmax(-1))


def test_logits_read_before_the_step_are_eager_logits() -> None:
    model, reference = compiled(llama()), llama()
    optimizer = adamw(model)
    out = model(**batch())
    out.loss.backward()
    predictions = out.logits.argmax(-1)
    optimizer.step()
    assert torch.equal(predictions, reference(**batch()).logits.argmax(-1))
    assert torch.equal(out.logits.argmax(-1), predictions)  # computed values stay


def test_logits_of_every_micro_batch_can_wait_until_the_step() -> None:
    model, reference = compiled(llama()), llama()
    optimizer = adamw(model)
    waiting = []
    for seed in range(3):
        out = model(**batch(seed))
        (out.loss / 3).backward()
        waiting.append(out.logits)
        (reference(**batch(seed)).loss / 3).backward()
    for seed, logits in enumerate(waiting):
        torch.testing.assert_close(logits + 0, reference(**batch(seed)).logits)
    optimizer.step()
    assert_same_gradients(gradients(model), gradients(reference))
    assert products(waiting) == [1, 1, 1]


def test_another_optimizer_does_not_make_logits_stale() -> None:
    generator = compiled(llama())
    critic = nn.Linear(160, 1)
    critic_optimizer = torch.optim.AdamW(critic.parameters())
    fake = generator(**batch())
    critic(torch.rand(4, 160)).sum().backward()
    critic_optimizer.step()
    score = critic(fake.logits).mean()  # through the logits, after the critic's step
    score.backward()

    reference, same_critic = llama(), copy.deepcopy(critic)
    same_critic(reference(**batch()).logits).mean().backward()
    assert_same_gradients(gradients(generator), gradients(reference))


def test_a_loss_on_the_logits_beside_the_models_own() -> None:
    model, reference = compiled(llama()), llama()
    for each in (model, reference):
        out = each(**batch())
        (out.loss + out.logits.square().mean()).backward()
    assert_same_gradients(gradients(model), gradients(reference))


@pytest.fixture
def bf16_accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "compiled_first", [True, False], ids=["compile, prepare", "prepare, compile"]
)
def test_accelerate_in_bf16_defers_the_cast_logits(
    bf16_accelerator: Accelerator, compiled_first: bool
) -> None:
    model, reference = llama(), llama()
    if compiled_first:
        compiled(model)
    model, optimizer = bf16_accelerator.prepare(model, adamw(model))
    if not compiled_first:
        compiled(model)
    curve, waiting = [], []
    for seed in range(4):
        with bf16_accelerator.accumulate(model):
            out = model(**batch(seed))
            bf16_accelerator.backward(out.loss)
            curve.append(out.loss.item())
            waiting.append(out.logits)
            optimizer.step()
            optimizer.zero_grad()
    assert codes() == TRAINING
    assert out.loss.dtype == out.logits.dtype == torch.float32
    assert products(waiting) == [0] * 4

    optimizer, expected = adamw(reference), []
    for seed in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = reference(**batch(seed)).loss
        (loss / 2).backward()
        expected.append(loss.item())
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert curve == pytest.approx(expected, rel=2e-3)


def test_outputs_are_pickled_and_saved_with_their_values() -> None:
    model, reference = compiled(llama()), llama()
    out, expected = model(**batch()), reference(**batch())
    loaded = pickle.loads(pickle.dumps(out))
    assert type(loaded) is type(expected)
    assert type(loaded.logits) is Tensor
    assert loaded.logits.requires_grad
    torch.testing.assert_close(loaded.logits.detach(), expected.logits.detach())
    file = io.BytesIO()
    torch.save({"logits": out.logits.detach(), "loss": out.loss.detach()}, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file)["logits"], expected.logits.detach())
    torch.testing.assert_close(copy.deepcopy(out.logits.detach()), expected.logits.detach())


def test_a_compiled_model_is_saved_and_copied_as_ever() -> None:
    model, reference = compiled(llama()), llama()
    model(**batch()).loss.backward()
    assert model.state_dict().keys() == reference.state_dict().keys()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(**batch()).loss, reference(**batch()).loss)


class Flat(nn.Module):
    """A model that returns plain tensors, as exporters need."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(160, 16), nn.Linear(16, 160, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1).flatten()), logits


def test_a_model_compiled_in_place_is_exported_as_it_was() -> None:
    model, ids = Flat(), torch.arange(12).view(2, 6)
    expected = model(ids)
    compiled(model)
    for _ in range(2):  # before the model was ever called, and after
        exported = torch.export.export(model, (ids,)).module()(ids)
        torch.testing.assert_close(exported, expected)
        assert [type(one) for one in exported] == [Tensor, Tensor]
        loss, _ = model(ids)
        torch.testing.assert_close(loss, expected[0])
    assert codes() == TRAINING


def test_a_capture_of_our_graph_by_export_gives_plain_tensors() -> None:
    """torch.export of a function that calls a compiled one inlines the original function."""
    model, ids = Flat(), torch.arange(12).view(2, 6)
    expected = model(ids)
    inner = torch.compile(model, backend="memeff", options=OPTIONS)

    class Outer(nn.Module):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            loss, logits = inner(ids)
            return loss * 1, logits

    exported = torch.export.export(Outer(), (ids,), strict=False).module()(ids)
    torch.testing.assert_close(exported, expected)
