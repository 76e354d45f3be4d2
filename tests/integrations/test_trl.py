"""TRL's trainers with the real package: rewrites, and curves equal to the uncompiled ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer

import memeff_compile
from memeff_compile.integrations.transformers import MemeffCallback
from memeff_compile.integrations.trl import hand_over_head
from memeff_compile.report import GraphReport
from tests.integrations.frameworks import framework
from tests.integrations.tiny import OPTIONS, llama

pytestmark = pytest.mark.slow
WORDS = 126


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield framework("trl")
    hand_over_head()()


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


def rows(**columns: Callable[[int], object]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {name: [make(row) for row in range(8)] for name, make in columns.items()}
    )


def sft(folder: Path, model: nn.Module, kind: Any = None, **more: object) -> Any:
    import trl

    return (kind or trl.SFTTrainer)(
        model=model,
        args=trl.SFTConfig(**settings(folder, **more)),
        train_dataset=rows(text=lambda row: text(row, 10 + row)),
        processing_class=tokenizer(),
    )


def adapted() -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config)  # type: ignore[arg-type]


def sft_of_adapters(folder: Path, model: nn.Module, **more: object) -> Any:
    """Return an SFT trainer for a new PEFT model; the given model is not used."""
    return sft(folder, adapted(), **more)


def dpo(folder: Path, model: nn.Module, **more: object) -> Any:
    import trl

    return trl.DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=trl.DPOConfig(**settings(folder, **more)),
        train_dataset=rows(
            prompt=lambda row: text(row, 4),
            chosen=lambda row: " " + text(row + 9, 5),
            rejected=lambda row: " " + text(row + 3, 6),
        ),
        processing_class=tokenizer(),
    )


def dpo_of_adapters(folder: Path, model: nn.Module, **more: object) -> Any:
    """Return a DPO trainer for a PEFT model, whose reference is the model without adapters."""
    import trl

    made = dpo(folder, model, **more)
    return trl.DPOTrainer(
        model=adapted(),
        args=made.args,
        train_dataset=made.train_dataset,
        processing_class=made.processing_class,
    )


def kto(folder: Path, model: nn.Module, **more: object) -> Any:
    import trl

    return trl.KTOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=trl.KTOConfig(**settings(folder, **more)),
        train_dataset=rows(
            prompt=lambda row: text(row, 4),
            completion=lambda row: " " + text(row + 9, 5),
            label=lambda row: row % 2 == 0,
        ),
        processing_class=tokenizer(),
    )


def policy(kind: str, folder: Path, model: nn.Module, **more: object) -> Any:
    """Return a trainer that samples; it loads the reference model from the saved model."""
    import trl

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) % 3) for completion in completions]

    saved = folder / "saved"
    model.save_pretrained(saved)  # type: ignore[operator]
    tokenizer().save_pretrained(saved)
    model.config._name_or_path = str(saved)  # type: ignore[union-attr]
    own = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(**settings(folder, **own, **more)),
        train_dataset=rows(prompt=lambda row: text(row, 4)),
        processing_class=tokenizer(),
    )


grpo, rloo = partial(policy, "GRPO"), partial(policy, "RLOO")


def reward(folder: Path, model: nn.Module, **more: object) -> Any:
    import trl
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    config: Any = copy.deepcopy(model.config)
    config.num_labels = 1
    return trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_config(config),
        args=trl.RewardConfig(**settings(folder, **more)),
        train_dataset=rows(
            chosen=lambda row: text(row + 9, 7), rejected=lambda row: text(row + 3, 8)
        ),
        processing_class=tokenizer(),
    )


TIMES = ("time", "runtime", "per_second", "epoch", "learning_rate")


def curve(trainer: Any) -> list[dict[str, float]]:
    """Train; return the loss and every metric of each step, without times."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2
    return [
        {name: value for name, value in step.items() if not any(t in name for t in TIMES)}
        for step in steps
    ]


def assert_same_curves(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=5e-5, abs=1e-6)


def fused() -> list[GraphReport]:
    """Return the graphs in which the fused loss replaced the output projection."""
    graphs = memeff_compile.last_report().graphs
    return [
        graph
        for graph in graphs
        if any(
            record.pass_name == "fuse_linear_cross_entropy" and record.code == "rewrote"
            for record in graph.records
        )
    ]


METRICS = {
    "sft": {"entropy", "mean_token_accuracy"},
    "dpo": {"logits/chosen", "logps/rejected", "rewards/accuracies", "mean_token_accuracy"},
    "kto": {"logits/chosen", "kl", "rewards/margins"},
    "grpo": {"entropy", "kl", "reward"},
    "rloo": {"entropy", "kl", "reward"},
}
SMALL = {"num_hidden_layers": 1, "vocab_size": 160}


@pytest.mark.parametrize(
    ("make", "graphs"),
    [
        pytest.param(sft, 1, id="sft"),
        pytest.param(sft_of_adapters, 1, id="sft-peft"),
        pytest.param(dpo, 2, id="dpo"),
        pytest.param(dpo_of_adapters, 2, id="dpo-peft"),
        pytest.param(kto, 2, id="kto"),
        pytest.param(grpo, 2, id="grpo"),
        pytest.param(rloo, 2, id="rloo"),
    ],
)
def test_the_callback_alone_fuses_the_loss_and_every_metric_is_the_uncompiled_one(
    make: Any, graphs: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = curve(make(tmp_path, llama()))
    name = request.node.callspec.id.split("-")[0]
    assert METRICS[name] <= expected[0].keys()
    trainer = make(tmp_path, llama())
    trainer.add_callback(MemeffCallback(options=OPTIONS))
    assert_same_curves(curve(trainer), expected)
    assert len(fused()) >= graphs
    logits = [graph.logits for graph in memeff_compile.last_report().graphs if graph.logits]
    assert not any(use.computed for use in logits)


def test_a_reward_model_is_compiled_by_the_callback(tmp_path: Path) -> None:
    expected = curve(reward(tmp_path, llama()))
    trainer = reward(tmp_path, llama())
    trainer.add_callback(MemeffCallback(options=OPTIONS))
    assert_same_curves(curve(trainer), expected)
    assert len(memeff_compile.last_report().graphs) == 1


@pytest.mark.parametrize(
    ("make", "more", "nearly"),
    [
        pytest.param(sft, {"gradient_checkpointing": True}, 5e-5, id="checkpointing"),
        pytest.param(sft, {"bf16": True}, 1e-3, id="bf16"),
        pytest.param(dpo, {"use_weighting": True}, 5e-5, id="wpo"),
        pytest.param(
            grpo, {"cast_lm_head_to_fp32": True, "temperature": 0.7}, 5e-5, id="fp32-head"
        ),
    ],
)
def test_settings_of_the_trainers_go_with_the_callback(
    make: Any, more: dict[str, Any], nearly: float, tmp_path: Path
) -> None:
    expected = curve(make(tmp_path, llama(), **more))
    trainer = make(tmp_path, llama(), **more)
    trainer.add_callback(MemeffCallback(options=OPTIONS))
    for ours, theirs in zip(curve(trainer), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=nearly, abs=1e-6)
    assert fused()


@pytest.mark.parametrize(
    ("make", "more", "nearly"),
    [
        pytest.param(sft, {}, 5e-5, id="sft"),
        pytest.param(sft, {"bf16": True}, 1e-3, id="bf16"),
        pytest.param(dpo, {}, 5e-5, id="dpo"),
        pytest.param(grpo, {"cast_lm_head_to_fp32": True}, 5e-5, id="fp32-head"),
    ],
)
def test_rows_that_trl_picks_as_on_a_gpu_have_the_fused_loss(
    make: Any,
    more: dict[str, Any],
    nearly: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = curve(make(tmp_path, llama(), **more))
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)
    trainer = make(tmp_path, llama(), **more)
    trainer.add_callback(MemeffCallback(options=OPTIONS))
    for ours, theirs in zip(curve(trainer), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=nearly, abs=1e-6)
    assert fused()


def test_evaluation_before_training_is_fused(tmp_path: Path) -> None:
    made = [
        SFTTrainer(
            model=llama(),
            args=SFTConfig(**settings(tmp_path), per_device_eval_batch_size=2),
            train_dataset=rows(text=lambda row: text(row, 10)),
            eval_dataset=rows(text=lambda row: text(row, 12)),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )
        for SFTTrainer, SFTConfig in [(framework("trl").SFTTrainer, framework("trl").SFTConfig)]
        for callbacks in ([], [MemeffCallback(options=OPTIONS)])
    ]
    expected, actual = (
        {k: v for k, v in one.evaluate().items() if not any(t in k for t in TIMES)} for one in made
    )
    assert actual == pytest.approx(expected, rel=2e-5)
    assert "eval_entropy" in actual
    assert fused()


def test_capped_logits_keep_their_mean(tmp_path: Path) -> None:
    """Gemma 2 caps its logits, so their mean is not a product."""
    from tests.support.zoo import FAMILIES, build

    (family,) = (each for each in FAMILIES if each.name == "gemma2")
    expected = curve(dpo(tmp_path, build(family, **SMALL, final_logit_softcapping=0.5)))
    trainer = dpo(tmp_path, build(family, **SMALL, final_logit_softcapping=0.5))
    trainer.add_callback(MemeffCallback(options=OPTIONS))
    assert_same_curves(curve(trainer), expected)
    assert fused()


def test_without_the_callback_trl_keeps_its_own_head(tmp_path: Path) -> None:
    expected = curve(sft(tmp_path, llama()))
    model = llama()
    model.compile(backend="memeff", options=OPTIONS)
    assert_same_curves(curve(sft(tmp_path, model)), expected)
    assert not fused()
    assert memeff_compile.last_report().graphs


def test_the_head_is_handed_to_no_other_backend_and_taken_back(tmp_path: Path) -> None:
    from trl.trainer import utils

    theirs = utils._ChunkedLogProbFunction
    undo = hand_over_head()
    assert hand_over_head() == undo
    expected = curve(sft(tmp_path, llama()))
    trainer = sft(tmp_path, llama())
    trainer.model.compile(backend=(other := torch._dynamo.testing.CompileCounter()))
    assert_same_curves(curve(trainer), expected)
    assert other.frame_count > 2  # TRL's function breaks graphs
    undo()
    assert utils._ChunkedLogProbFunction is theirs


def test_the_example_is_two_lines_and_fuses(tmp_path: Path) -> None:
    from examples.trl_head import train

    trainer = sft(tmp_path, llama())
    train(trainer, options=OPTIONS)
    assert fused()


@pytest.fixture
def supervised(trl: Any) -> Any:
    """Return SFTTrainer with the model's own loss, as in docs/use/training-loops.md."""

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
