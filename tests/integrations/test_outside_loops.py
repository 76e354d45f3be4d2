"""Training loops that compute their loss from `out.logits`: the curve of eager, and no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memeff_compile
from memeff_compile.errors import StaleLogitsError
from tests.integrations.tiny import (
    OPTIONS,
    assert_same_gradients,
    batch,
    codes,
    gradients,
    llama,
    products,
)
from tests.support.zoo import FAMILIES, build, inputs

STEPS = 3


def plain(out: Any, labels: Tensor) -> Tensor:
    logits = out.logits[..., :-1, :].contiguous()
    return F.cross_entropy(
        logits.view(-1, logits.shape[-1]).float(), labels[..., 1:].reshape(-1), ignore_index=-100
    )


criterion = nn.CrossEntropyLoss(label_smoothing=0.05)


def module(out: Any, labels: Tensor) -> Tensor:
    return criterion(out.logits[:, :-1].transpose(1, 2), labels[:, 1:])


def per_token(out: Any, labels: Tensor) -> Tensor:
    """Return log-probabilities of the sampled tokens, at a temperature."""
    logits, ids = out.logits[:, :-1] / 0.9, labels[:, 1:].clamp(min=0)
    picked = torch.gather(logits, dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def policy_gradient(out: Any, labels: Tensor) -> Tensor:
    """Return the clipped objective of policy-gradient trainers, at their first step on a batch."""
    log_probs, mask = per_token(out, labels), labels[:, 1:] != -100
    ratio = torch.exp(log_probs - log_probs.detach())
    advantages = torch.linspace(-1, 1, len(ratio)).unsqueeze(1)
    objective = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(objective * mask).sum() / mask.sum()


def preference(out: Any, labels: Tensor) -> Tensor:
    """Return a loss that prefers one half of the batch, as in direct preference optimisation."""
    ids = labels[:, 1:].clamp(min=0)
    rows = zip(out.logits[:, :-1], ids.unsqueeze(-1), strict=True)
    sums = torch.stack([F.log_softmax(z, dim=-1).gather(-1, i).sum() for z, i in rows])
    chosen, rejected = sums.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


LOOPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": plain,
    "module": module,
    "policy gradient": policy_gradient,
    "preference": preference,
}


def train(
    model: nn.Module, loss_of: Callable[[Any, Tensor], Tensor]
) -> tuple[list[float], list[Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve, seen = [], []
    for seed in range(STEPS):
        for part in range(2):  # gradient accumulation
            given = batch(2 * seed + part)
            labels = given.pop("labels")
            out = model(**given)
            loss = loss_of(out, labels)
            (loss / 2).backward()
            curve.append(loss.item())
            seen.append(out.logits)
        optimizer.step()
        optimizer.zero_grad()
    return curve, seen


def test_loops_have_eagers_curves_and_compute_no_logits() -> None:
    """One model, compiled once, runs every loop from the same weights."""
    model = llama()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model.compile(backend="memeff", options=OPTIONS)
    for name, loss_of in LOOPS.items():
        expected, _ = train(llama(), loss_of)
        model.load_state_dict(start)
        curve, seen = train(model, loss_of)
        assert curve == pytest.approx(expected, rel=5e-6, abs=1e-7), name
        assert products(seen) == [0] * 2 * STEPS, name
        with pytest.raises(StaleLogitsError, match=r"Read out.logits before optimizer.step\(\)"):
            plain(type("Out", (), {"logits": seen[-1]}), batch()["labels"])
    assert codes() == {"logits_deferred"}
    (use,) = (g.logits for g in memeff_compile.last_report().graphs if g.logits is not None)
    assert use.computed == {}
    assert use.calls >= 2 * STEPS * len(LOOPS)


@pytest.mark.parametrize(
    "family",
    ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "cohere"))],
)
def test_heads_of_other_families_train_without_logits(family: str) -> None:
    """The families have a softcap, a tied output projection, or scaled logits."""
    found = next(each for each in FAMILIES if each.name == family)
    one_layer = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    models = [build(found, vocab_size=160, **one_layer) for _ in range(2)]
    given = inputs(found)
    labels = given.pop("labels")
    models[1].compile(backend="memeff", options=OPTIONS)
    losses = []
    for model in models:
        out = model(**given)
        loss = plain(out, labels)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert_same_gradients(gradients(models[1]), gradients(models[0]))
    assert codes() == {"logits_deferred"}
    assert products([out.logits]) == [0]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(160, 16), nn.Linear(16, 160)

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.head(torch.tanh(self.embed(input_ids))))


class Output(NamedTuple):
    logits: Tensor


def test_evaluation_between_steps_gets_plain_logits() -> None:
    model, reference = Small(), Small()
    model.compile(backend="memeff", options=OPTIONS)
    given = batch()
    ids, labels = given["input_ids"], given["labels"]
    for each in (model, reference):
        plain(each(ids), labels).backward()
        with torch.no_grad():
            out = each(ids)
            assert type(out.logits) is Tensor
    assert_same_gradients(gradients(model), gradients(reference))
    assert codes() == {"logits_deferred"}
