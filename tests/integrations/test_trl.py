"""TRL's trainers with the real package: rewrites, and curves equal to the uncompiled ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Trainer

import memeff_compile
from memeff_compile.report import GraphReport
from tests.integrations.frameworks import framework
from tests.integrations.tiny import OPTIONS, llama

pytestmark = pytest.mark.slow
WORDS = 126


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return framework("trl")


def text(row: int, words: int) -> str:
    return " ".join(f"w{(row * 7 + word * 3) % WORDS}" for word in range(words))


def tokenizer() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<e>": 0, "<u>": 1, **{f"w{word}": word + 2 for word in range(WORDS)}}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<u>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "<e>", "pad_token": "<e>", "unk_token": "<u>"}
    return PreTrainedTokenizerFast(tokenizer_object=split, **names)


def settings(folder: Path, **more: object) -> dict[str, Any]:
    """Return common settings of TRL's trainers: two steps, offline, on the CPU."""
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **more,
    }


def rows(**columns: Callable[[int], str]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {name: [make(row) for row in range(8)] for name, make in columns.items()}
    )


def sft(folder: Path, model: nn.Module, kind: Any = None) -> Any:
    import trl

    return (kind or trl.SFTTrainer)(
        model=model,
        args=trl.SFTConfig(**settings(folder)),
        train_dataset=rows(text=lambda row: text(row, 10 + row)),
        processing_class=tokenizer(),
    )


def adapted() -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config)  # type: ignore[arg-type]


def sft_of_adapters(folder: Path, model: nn.Module) -> Any:
    """The same on a new PEFT model, in place of the given one."""
    return sft(folder, adapted())


def dpo(folder: Path, model: nn.Module) -> Any:
    import trl

    return trl.DPOTrainer(
        model=model,
        ref_model=llama(),
        args=trl.DPOConfig(**settings(folder)),
        train_dataset=rows(
            prompt=lambda row: text(row, 4),
            chosen=lambda row: " " + text(row + 9, 5),
            rejected=lambda row: " " + text(row + 3, 6),
        ),
        processing_class=tokenizer(),
    )


def grpo(folder: Path, model: nn.Module) -> Any:
    import trl

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) % 3) for completion in completions]

    return trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(
            **settings(folder, num_generations=2, max_completion_length=6, beta=0.0)
        ),
        train_dataset=rows(prompt=lambda row: text(row, 4)),
        processing_class=tokenizer(),
    )


def curve(trainer: Any) -> list[dict[str, float]]:
    """Train; return the losses and metrics of each step, without times and means of logits."""
    trainer.train()
    kept = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "logps/chosen", "reward")
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2
    return [{name: step[name] for name in kept if name in step} for step in steps]


def assert_same_curves(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)


def fused() -> list[GraphReport]:
    """Return the graphs in which the fused loss took the place of the head."""
    graphs = memeff_compile.last_report().graphs
    return [
        graph
        for graph in graphs
        if any(
            record.pass_name == "fuse_linear_cross_entropy" and record.code == "rewrote"
            for record in graph.records
        )
    ]


@pytest.mark.parametrize(("make", "graphs"), [(sft, 1), (sft_of_adapters, 1), (dpo, 2), (grpo, 1)])
def test_head_spelled_out_is_fused_and_the_curve_is_the_uncompiled_one(
    make: Any, graphs: int, tmp_path: Path
) -> None:
    from examples.trl_head import spell_out_head

    expected = curve(make(tmp_path, llama()))
    trainer = make(tmp_path, llama())
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            base = model.get_base_model() if isinstance(model, PeftModel) else model
            spell_out_head(base, getattr(trainer, "temperature", 1.0))
            model.compile(backend="memeff", options=OPTIONS)
    assert_same_curves(curve(trainer), expected)
    assert len(fused()) >= graphs
    logits = [graph.logits for graph in memeff_compile.last_report().graphs if graph.logits]
    assert not any(use.computed for use in logits)


def test_trl_own_head_is_left_as_it_is(tmp_path: Path) -> None:
    expected = curve(sft(tmp_path, llama()))
    model = llama()
    model.compile(backend="memeff", options=OPTIONS)
    assert_same_curves(curve(sft(tmp_path, model)), expected)
    assert not fused()
    assert memeff_compile.last_report().graphs


@pytest.fixture
def supervised(trl: Any) -> Any:
    """Return SFTTrainer with the model's own loss, as docs/use/training-loops.md has it."""

    class Supervised(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(
            self,
            model: nn.Module,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: torch.Tensor | None = None,
        ) -> Any:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    return Supervised


def test_sft_with_the_loss_of_the_model_is_fused(tmp_path: Path, supervised: Any) -> None:
    expected = [{"loss": step["loss"]} for step in curve(sft(tmp_path, llama()))]
    model = llama()
    model.compile(backend="memeff", options=OPTIONS)
    actual = curve(sft(tmp_path, model, supervised))
    assert_same_curves([{"loss": step["loss"]} for step in actual], expected)
    assert len(fused()) >= 1


def test_head_of_an_adapted_model_is_skipped_by_the_name_it_has(
    tmp_path: Path, supervised: Any
) -> None:
    model = adapted()
    (name,) = (name for name, _ in model.named_modules() if name.endswith("lm_head"))
    options = {**OPTIONS, "memeff.skip": {"fuse_linear_cross_entropy": name}}
    model.compile(backend="memeff", options=options)
    curve(sft(tmp_path, model, supervised))
    found = {record.code for record in memeff_compile.last_report().records}
    assert "skipped" in found
    assert not found & {"rewrote", "skip_unmatched"}
