"""Batches of any size and length train with two graphs; the report has the cause of each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.backend.few_graphs import cause_of
from tests.support import zoo

VOCABULARY, WIDTH = 64, 16


class Model(nn.Module):
    """A masked model of ids, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.body(self.embed(ids)))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        logits = self.head(x.cumsum(1))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batches(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    """Draw batches of another size, length and padding each; the first two have one size."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for place in range(count):
        rows, length = (int(torch.randint(2, 9, (), generator=generator)) for _ in range(2))
        rows, length = (4 if place < 2 else rows), 8 + length
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        if place % 2:
            mask[0, -place % 4 :] = 0
        made.append((ids, mask))
    return made


def train(call: Any, model: nn.Module, *given: Any, **named: Any) -> list[Tensor]:
    model.zero_grad()
    loss = call(*given, **named)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_twenty_batches_train_with_two_graphs() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    memeff_compile.compile(model, inner="aot_eager")
    for ids, mask in batches():
        found, expected = train(model, model, ids, mask=mask), train(twin, twin, ids, mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    causes = [graph.cause for graph in memeff_compile.graphs()]
    assert len(causes) == 2
    assert causes[0] == ""
    assert causes[1].startswith("ids.size()[1] was ")


def test_a_batch_of_one_sequence_costs_one_more() -> None:
    model = memeff_compile.compile(Model(), inner="aot_eager")
    for rows, length in ((4, 8), (4, 9), (1, 9), (1, 12), (3, 7)):
        train(model, model, torch.zeros(rows, length, dtype=torch.long))
    last = memeff_compile.graphs()[-1]
    assert len(memeff_compile.graphs()) == 3
    assert last.cause == "the earlier graph needs 2 <= ids.size()[0]"
    said = memeff_compile.last_report().details().split("compiled again, with the cause:")[1]
    assert f"  {last.name}: {last.cause}" in said


@pytest.mark.parametrize("how", ["fixed", "without gradients", "another model"])
def test_sizes_of_other_calls_are_left_alone(how: str) -> None:
    """Only the compiled model's own training calls have symbols for sizes that did not vary."""
    model = Model()
    memeff_compile.compile(model, inner="aot_eager", dynamic=False if how == "fixed" else None)
    other: Any = Model()
    other.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
    run = other if how == "another model" else model
    with torch.set_grad_enabled(how != "without gradients"):
        for rows, length in ((4, 8), (4, 9), (3, 9)):
            run(torch.zeros(rows, length, dtype=torch.long))
    assert len(memeff_compile.graphs()) == 3


def test_a_llama_trains_with_two_graphs() -> None:
    pytest.importorskip("transformers", reason="compiles a Llama of transformers")
    family = next(each for each in zoo.FAMILIES if each.name == "llama")
    model: Any = zoo.build(family, num_hidden_layers=1)
    model.config.use_cache = False
    memeff_compile.compile(model, inner="aot_eager")
    for ids, mask in batches(5):
        model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
    assert len(memeff_compile.graphs()) == 2


def test_causes_that_have_no_plain_words_are_quoted() -> None:
    said = "0/1: tensor 'kwargs['input_ids']' size mismatch at index 0. expected 4, actual 1"
    assert cause_of(said) == "input_ids.size()[0] was 4 and is 1"
    assert cause_of("0/0: len(kwargs) == 3   # output = f()") == "other arguments are given"
    assert cause_of("1/0: L['x'].requires_grad") == "the earlier graph needs x.requires_grad"
    assert cause_of("") == ""
