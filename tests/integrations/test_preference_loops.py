"""Loops of preference and policy training: token log-probabilities, two models, masked means."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memeff_compile
from tests.integrations.tiny import (
    assert_same_gradients,
    batch,
    codes,
    gradients,
    llama,
)

IDS = batch()["input_ids"]
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(4), 0)  # the prompt


def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probability of every token but the first."""
    logits = model(input_ids=ids).logits[:, :-1]
    every = torch.log_softmax(logits.float(), -1)
    return every.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def preference_loss(policy: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Tensor:
    """Return the loss of DPO, the first row chosen and the second rejected."""
    with torch.no_grad():
        expected = (reference(IDS) * MASK[:, 1:]).sum(-1)
    chosen, rejected = ((policy(IDS) * MASK[:, 1:]).sum(-1) - expected).unbind()
    return -F.logsigmoid(0.1 * (chosen - rejected))


def policy_loss(policy: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Tensor:
    """Return a clipped ratio with a penalty, as in GRPO, averaged over completion tokens."""
    now = policy(IDS)
    with torch.no_grad():
        before = reference(IDS)
    ratio, drift = torch.exp(now - now.detach() + 0.1), before - now
    gain = torch.minimum(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5)
    each = -gain + 0.04 * (drift.exp() - drift - 1)
    return (each * MASK[:, 1:]).sum() / MASK[:, 1:].sum()


def pair() -> tuple[nn.Module, nn.Module]:
    policy = llama()
    reference = copy.deepcopy(policy)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return policy, reference.requires_grad_(False)


@pytest.mark.parametrize("loss", [preference_loss, policy_loss])
def test_log_probabilities_of_two_models_are_fused(loss: Callable[..., Tensor]) -> None:
    policy, reference = pair()
    expected = loss(lambda ids: log_probs(policy, ids), lambda ids: log_probs(reference, ids))
    expected.backward()
    wanted = gradients(policy)
    policy.zero_grad()

    compiled: Any = torch.compile(log_probs, backend="memeff", options={"memeff.inner": "eager"})
    found = loss(lambda ids: compiled(policy, ids), lambda ids: compiled(reference, ids))
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert_same_gradients(gradients(policy), wanted)
    assert codes() == {"rewrote"}
    assert sorted(g.training for g in memeff_compile.graphs()) == [False, True]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(160, 16), nn.Linear(16, 160)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embed(ids)))
        return logits


Spelling = Callable[[Tensor, Tensor], Tensor]


def row_by_row(logits: Tensor, tokens: Tensor) -> Tensor:
    rows = []
    for some, chosen in zip(logits, tokens, strict=True):
        rows.append(some.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def at_once(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def with_temperature(logits: Tensor, tokens: Tensor) -> Tensor:
    return at_once(logits / 0.7, tokens)


def sums_row_by_row(logits: Tensor, tokens: Tensor) -> Tensor:
    sums = torch.stack([some.logsumexp(-1) for some in logits])
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - sums


def with_entropy_by_chunks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities plus a share of the entropies, computed as in TRL."""
    logits = logits / 0.7
    entropies = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(4):
        every = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(every) * every).sum(-1))
    entropy = torch.cat(entropies).reshape(logits.shape[:-1])
    return sums_row_by_row(logits, tokens) + 0.01 * entropy


def with_a_masked_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        certain = with_entropy_by_chunks(logits, tokens) < -4
    return sums_row_by_row(logits, tokens) * certain


def entropy_of_some_rows(logits: Tensor, tokens: Tensor) -> Tensor:
    every = logits[:, :3].log_softmax(-1)
    first = -(every.exp() * every).sum(-1)
    every = logits[:, 5:6].log_softmax(-1)
    return first.sum(-1) - (every.exp() * every).sum(-1).sum(-1)


def with_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    every = logits.log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) + 0.01 * entropy


@pytest.mark.parametrize(
    ("spelling", "found"),
    [
        (row_by_row, {"rewrote"}),
        (at_once, {"rewrote"}),
        (with_temperature, {"rewrote"}),
        (sums_row_by_row, {"rewrote"}),
        (with_entropy, {"rewrote"}),
        (with_entropy_by_chunks, {"rewrote"}),
        (with_a_masked_entropy, {"rewrote"}),
        (entropy_of_some_rows, {"rewrote"}),
    ],
)
def test_which_spellings_of_the_log_probabilities_are_fused(
    spelling: Spelling, found: set[str]
) -> None:
    """The page on training loops has this list. Fused or not, the numbers equal eager's."""
    model, reference = Head(), Head()

    def run(model: nn.Module, ids: Tensor) -> Tensor:
        return spelling(model(ids)[:, :-1], ids[:, 1:]).sum()

    torch.compile(run, backend="memeff", options={"memeff.inner": "eager"})(model, IDS).backward()
    run(reference, IDS).backward()
    assert codes() == found
    assert_same_gradients(gradients(model), gradients(reference))
