"""Deferred logits on their way through accelerate and the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import convert_to_fp32, find_device, honor_type, send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import (
    EvalLoopContainer,
    nested_concat,
    nested_detach,
    nested_numpify,
    nested_truncate,
)

from memeff_compile.logits.attach import attach, defer
from memeff_compile.logits.recipe import DeferredOutput, LogitsRecipe
from memeff_compile.logits.tensor import DeferredLogits

BATCH, LENGTH, HIDDEN, VOCAB = 2, 6, 8, 13
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB


def output(dtype: torch.dtype = torch.float32) -> tuple[CausalLMOutput, Tensor]:
    """A model output with deferred logits, and the same logits from eager PyTorch."""
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN).to(dtype).requires_grad_()
    logits = defer(hidden, weight, None, (), LogitsRecipe(dtype))
    return CausalLMOutput(loss=hidden.sum(), logits=logits), F.linear(hidden, weight)


def products(logits: Any) -> int:
    assert isinstance(logits, DeferredLogits)
    return logits.materialisations


def test_model_output_is_sliced_printed_and_copied_without_computing() -> None:
    out, expected = output()
    assert out.to_tuple()[1] is out["logits"] is out[1]
    assert "not computed yet" in repr(out)
    duplicate = type(out)(**out)
    assert duplicate.logits is out.logits
    assert products(out.logits) == 0
    torch.testing.assert_close(out.logits + 0, expected)


def test_accelerate_moves_and_casts_without_computing() -> None:
    out, expected = output(torch.bfloat16)
    moved = send_to_device(convert_to_fp32(out), "cpu")
    assert isinstance(moved, CausalLMOutput)
    assert moved.logits.dtype == torch.float32
    assert find_device(moved) == torch.device("cpu")
    assert honor_type([1], iter([moved.logits]))[0] is moved.logits
    assert products(moved.logits) == 0
    assert torch.equal(moved.logits + 0, expected.float())
    assert products(moved.logits) == 1


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_gathering_for_metrics_on_one_process_keeps_values(accelerator: Accelerator) -> None:
    out, expected = output()
    logits = nested_detach(out.logits)
    padded = accelerator.pad_across_processes(logits, dim=1, pad_index=-100)
    gathered = accelerator.gather_for_metrics(padded)
    assert products(out.logits) == 0
    assert torch.equal(gathered + 0, expected.detach())
    assert products(out.logits) == 1


def test_evaluation_loop_of_the_trainer_computes_each_batch_once() -> None:
    container = EvalLoopContainer(do_nested_concat=True, padding_index=-100)
    expected = []
    for _ in range(2):
        out, eager = output()
        container.add((nested_detach(out.logits), IDS))
        expected.append(eager.detach())
        assert products(out.logits) <= 1
    container.to_cpu_and_numpy()
    logits, _ = container.get_arrays()
    np.testing.assert_array_equal(logits, torch.cat(expected).numpy())


def test_nested_functions_of_the_trainer_take_deferred_logits() -> None:
    out, expected = output(torch.bfloat16)
    assert torch.equal(nested_truncate(out.logits, 1) + 0, expected[:1])
    joined = nested_concat(nested_detach(out.logits), nested_detach(out.logits), -100)
    assert torch.equal(joined, torch.cat([expected, expected]).detach())
    numbers = nested_numpify(nested_detach(out.logits))
    np.testing.assert_array_equal(numbers, expected.detach().float().numpy())


class Tiny(nn.Module):
    """A compiled causal language model in a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        plan = [DeferredOutput(1, 1, None, (), LogitsRecipe(torch.float32))]
        self.__dict__["run"] = attach(self.graph, plan, clone_hidden=False)
        self.seen: list[DeferredLogits] = []

    def graph(self, ids: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.embed(ids))
        targets = ids.roll(-1, 1).view(-1)
        return F.cross_entropy(F.linear(hidden, head).view(-1, VOCAB), targets), hidden

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        loss, logits = self.run(input_ids, self.head.weight)
        self.seen.append(logits)
        return CausalLMOutput(loss=loss, logits=logits)


def test_trainer_trains_without_computing_and_evaluates_with_metrics(tmp_path: Any) -> None:
    model = Tiny()
    data = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        assert prediction.predictions.shape == (8, LENGTH, VOCAB)
        return {"accuracy": float((prediction.predictions.argmax(-1) == 0).mean())}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        label_names=["labels"],
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=metrics,
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    assert [products(logits) for logits in model.seen] == [0, 0, 0]
    model.seen.clear()
    assert "eval_accuracy" in trainer.evaluate()
    assert [products(logits) for logits in model.seen] == [1, 1]
