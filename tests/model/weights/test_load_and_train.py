"""A saved model of codes, loaded by one line, trains on with the Trainer: adapters, or all weights.

Each result equals that of the dense model, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import memeff_compile
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights.compress import compress_
from tests.support.token_rows import TokenRows

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def train(model: Any, folder: Path, optimizer: Any = None) -> None:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        learning_rate=0.05,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    Trainer(model, arguments, train_dataset=TokenRows(4), optimizers=(optimizer, None)).train()


@pytest.fixture
def models(tmp_path: Path) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "dense")
    dense, made = (
        LlamaForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16) for _ in "ab"
    )
    compress_(made, min_size=0, progress=False)
    made.save_pretrained(tmp_path / "coded")
    loaded: Any = memeff_compile.from_pretrained(tmp_path / "coded")
    assert sum(isinstance(weight, CodedWeight) for weight in loaded.parameters()) == 7
    return dense, loaded


def test_adapters_of_a_loaded_model_train_as_on_a_dense_one(models: Any, tmp_path: Path) -> None:
    found = []
    for number, model in enumerate(models):
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        before = {n: p.clone() for n, p in adapted.named_parameters() if p.requires_grad}
        train(adapted, tmp_path / str(number))
        after = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        assert any(not torch.equal(before[name], after[name]) for name in before)
        found.append(after)
    assert len(found[0]) == 4
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_all_weights_of_a_loaded_model_train_as_dense_ones(models: Any, tmp_path: Path) -> None:
    start = {name: value.clone() for name, value in models[0].state_dict().items()}
    for number, model in enumerate(models):
        optimizer = memeff_compile.optim_in_backward(model, torch.optim.SGD, lr=0.05)
        train(model.train(), tmp_path / str(number), optimizer)
    dense, loaded = (model.state_dict() for model in models)
    assert all(torch.equal(dense[name], loaded[name]) for name in dense)
    assert not torch.equal(start["lm_head.weight"], dense["lm_head.weight"])
    assert sum(isinstance(weight, CodedWeight) for weight in models[1].parameters()) == 7
