"""Loops as in torchtitan: each block compiled alone, head and loss separately, or the whole step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from tests.integrations.tiny import (
    OPTIONS,
    assert_same_gradients,
    batch,
    codes,
    gradients,
    llama,
)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of such loops."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def pair() -> tuple[Any, dict[str, Tensor], Tensor, Tensor]:
    """Return a model with compiled blocks, the eager gradients, ids and labels."""
    eager: Any = llama(num_hidden_layers=2)
    model = copy.deepcopy(eager)
    ids, labels = (batch(seed)["input_ids"] for seed in (0, 1))
    cross_entropy(eager(ids).logits, labels).backward()
    for block in model.model.layers:
        block.compile(backend="memeff", options=OPTIONS, fullgraph=True)
    return model, gradients(eager), ids, labels


@pytest.mark.slow
def test_loss_compiled_apart_is_left_alone_and_the_report_says_how_to_join_it() -> None:
    model, expected, ids, labels = pair()
    loss = torch.compile(cross_entropy, backend="memeff", options=OPTIONS)
    loss(model(ids).logits, labels).backward()
    assert_same_gradients(gradients(model), expected)
    assert codes() == {"graph_break_between"}
    assert "as one function" in str(memeff_compile.last_report())


def test_head_and_loss_as_one_compiled_function_are_fused() -> None:
    model, expected, ids, labels = pair()

    @torch.compile(backend="memeff", options=OPTIONS)
    def head_and_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model.lm_head(hidden), labels)

    head_and_loss(model.model(ids).last_hidden_state, labels).backward()
    assert_same_gradients(gradients(model), expected)
    assert codes() == {"rewrote"}


@pytest.mark.slow
def test_step_compiled_whole_over_compiled_blocks_is_fused() -> None:
    model, expected, ids, labels = pair()

    @torch.compile(backend="memeff", options=OPTIONS)
    def step(ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(ids).logits, labels)

    step(ids, labels).backward()
    assert_same_gradients(gradients(model), expected)
    assert codes() == {"rewrote"}
