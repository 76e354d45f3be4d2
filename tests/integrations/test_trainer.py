"""The Hugging Face Trainer with a model compiled in place: the same curve, and no logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

import memeff_compile
from memeff_compile.report import LogitsUse
from tests.integrations.tiny import OPTIONS, TRAINING, codes, llama, products

ROWS, LENGTH, STEPS = 24, 12, 4


def data() -> list[dict[str, Tensor]]:
    """Rows with different numbers of labels, so that averaging by batch would show."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for row in range(ROWS):
        ids = torch.randint(3, 160, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: row % 7] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    assert isinstance(logits, np.ndarray)
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "sum": float(logits.sum())}


class Watching(Trainer):
    """Keeps the logits of every step."""

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.__dict__.setdefault("seen", []).append(outputs["logits"])
        return (loss, outputs) if return_outputs else loss


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def trainer(model: nn.Module, folder: Path, **settings: Any) -> Watching:
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
    }
    rows = data()
    made = Watching(
        model=model,
        args=TrainingArguments(**{**arguments, **settings}),
        train_dataset=rows,
        eval_dataset=rows[:8],
        compute_metrics=accuracy,
        callbacks=[Losses()],
    )
    made.seen = []
    return made


def losses(made: Watching) -> list[float]:
    return next(c.losses for c in made.callback_handler.callbacks if isinstance(c, Losses))


def compiled(**options: object) -> nn.Module:
    model = llama()
    model.compile(backend="memeff", options={**OPTIONS, **options})
    return model


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 2e-6),
    "accumulation": ({"gradient_accumulation_steps": 3}, 2e-6),
    "bf16": ({"bf16": True}, 2e-3),
}


@pytest.mark.parametrize(("settings", "tolerance"), SETTINGS.values(), ids=SETTINGS)
def test_training_has_the_same_curve_and_computes_no_logits(
    settings: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    eager = trainer(llama(), tmp_path / "eager", **settings)
    eager.train()
    torch._dynamo.reset()
    ours = trainer(compiled(), tmp_path / "ours", **settings)
    ours.train()

    np.testing.assert_allclose(losses(ours), losses(eager), rtol=tolerance)
    assert codes() == TRAINING
    steps = STEPS * settings.get("gradient_accumulation_steps", 1)
    assert products(ours.seen) == [0] * steps
    if settings.get("bf16"):
        assert ours.seen[0].dtype == eager.seen[0].dtype

    if "gradient_accumulation_steps" in settings:
        return
    ours.seen.clear()
    measured, expected = ours.evaluate(), eager.evaluate()
    assert measured["eval_loss"] == pytest.approx(expected["eval_loss"], rel=tolerance)
    if not settings.get("bf16"):
        assert measured["eval_accuracy"] == expected["eval_accuracy"]
        assert measured["eval_sum"] == pytest.approx(expected["eval_sum"], rel=1e-4, abs=1e-2)
    assert products(ours.seen) == [1, 1]


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    whole = trainer(llama(), tmp_path / "eager")
    whole.train()
    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer(compiled(), tmp_path / "ours", **settings).train()
    torch._dynamo.reset()
    resumed = trainer(compiled(), tmp_path / "ours", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    np.testing.assert_allclose(losses(resumed), losses(whole)[2:], rtol=2e-6)
    assert products(resumed.seen) == [0, 0]


def use() -> LogitsUse:
    """What became of the deferred logits of the graph that trains."""
    (found,) = (g.logits for g in memeff_compile.last_report().graphs if g.logits is not None)
    return found


@pytest.mark.parametrize(("settings", "tolerance"), SETTINGS.values(), ids=SETTINGS)
def test_label_smoothing_outside_the_model_computes_no_logits(
    settings: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    eager = trainer(llama(), tmp_path / "eager", label_smoothing_factor=0.1, **settings)
    eager.train()
    torch._dynamo.reset()
    ours = trainer(compiled(), tmp_path / "ours", label_smoothing_factor=0.1, **settings)
    ours.train()
    np.testing.assert_allclose(losses(ours), losses(eager), rtol=tolerance)
    assert codes() == {"logits_deferred"}
    steps = STEPS * settings.get("gradient_accumulation_steps", 1)
    assert products(ours.seen) == [0] * steps
    assert use().computed == {}
    assert use().fused == {"log_softmax + gather": steps, "log_softmax + sum": steps}

    measured, expected = ours.evaluate(), eager.evaluate()
    assert measured["eval_loss"] == pytest.approx(expected["eval_loss"], rel=tolerance)


def test_a_loss_function_given_to_the_trainer_computes_no_logits(tmp_path: Path) -> None:
    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][..., :-1, :].float()
        total = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels[..., 1:].reshape(-1), reduction="sum"
        )
        return total / num_items_in_batch

    curves = []
    for model in (llama(), compiled()):
        made = trainer(model, tmp_path, gradient_accumulation_steps=2)
        made.compute_loss_func = loss_of
        made.train()
        curves.append(losses(made))
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-6)
    assert products(made.seen) == [0] * 2 * STEPS
    assert use().fused == {"cross_entropy": 2 * STEPS}


def test_the_option_none_trains_and_evaluates_without_logits(tmp_path: Path) -> None:
    ours = trainer(compiled(**{"memeff.logits": "none"}), tmp_path)
    ours.compute_metrics = None
    ours.compute_loss = Trainer.compute_loss.__get__(ours)  # type: ignore[method-assign]
    ours.train()
    assert ours.evaluate()["eval_loss"] > 0
    assert codes() == {"rewrote", "logits_none"}


def test_the_two_ways_that_do_not_work_say_what_the_docs_say(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'MEMEFF' is not a valid DynamoBackend"):
        trainer(llama(), tmp_path, torch_compile_backend="memeff").train()
    wrapped = torch.compile(llama(), backend="memeff", options=OPTIONS)
    with pytest.raises(ValueError, match="The batch received was empty"):
        trainer(wrapped, tmp_path).train()
    trainer(wrapped, tmp_path, remove_unused_columns=False, max_steps=1).train()
    assert codes() == TRAINING
