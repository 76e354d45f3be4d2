"""The Hugging Face Trainer with a model compiled in place: the same curve, and no logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

import memeff_compile
from memeff_compile.errors import StaleLogitsError
from memeff_compile.report import LogitsUse
from tests.integrations.tiny import OF_BLOCKS, OPTIONS, TRAINING, codes, llama, products

ROWS, LENGTH, STEPS = 24, 12, 4
SLOW = pytest.mark.slow


def data() -> list[dict[str, Tensor]]:
    """Return rows with different numbers of labels, which would reveal averaging by batch."""
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
    """A Trainer that keeps the logits of every step."""

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


def trainer(
    model: nn.Module, folder: Path, kind: type[Watching] = Watching, **settings: Any
) -> Watching:
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
    made = kind(
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


def compiled(inner: str = "eager", **options: object) -> nn.Module:
    """Compile a model in place; the tests of curves cover AOTAutograd, which is slow."""
    model = llama()
    model.compile(backend="memeff", options={"memeff.inner": inner, **options})
    return model


@pytest.fixture(autouse=True)
def _accelerate_forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from accelerate.state import AcceleratorState

    # At its end a Trainer looks for six kinds of accelerators to free memory, and collects cycles.
    monkeypatch.setattr("accelerate.utils.memory.clear_device_cache", lambda *given, **more: None)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 2e-6),
    "accumulation": ({"gradient_accumulation_steps": 3}, 2e-6),
    "bf16": ({"bf16": True}, 2e-3),
    "checkpointing": ({"gradient_checkpointing": True}, 2e-6),
}
ELSEWHERE = ("accumulation", "bf16", "checkpointing")
"""Quick in plain loops and in the zoo."""


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        pytest.param(*given, marks=SLOW if name in ELSEWHERE else (), id=name)
        for name, given in SETTINGS.items()
    ],
)
def test_training_has_the_same_curve_and_computes_no_logits(
    settings: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    eager = trainer(llama(), tmp_path / "eager", **settings)
    eager.train()
    torch._dynamo.reset()
    ours = trainer(compiled("aot_eager"), tmp_path / "ours", **settings)
    ours.train()

    np.testing.assert_allclose(losses(ours), losses(eager), rtol=tolerance)
    assert codes() == TRAINING
    steps = STEPS * settings.get("gradient_accumulation_steps", 1)
    assert products(ours.seen) == [0] * steps
    if settings.get("bf16"):
        assert ours.seen[0].dtype == eager.seen[0].dtype

    assert len(memeff_compile.graphs()) == 1
    if settings and not settings.get("bf16"):
        return
    ours.seen.clear()
    measured, expected = ours.evaluate(), eager.evaluate()
    assert len(memeff_compile.graphs()) == 2
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


def test_an_evaluation_that_needs_no_logits_computes_none(tmp_path: Path) -> None:
    ours = trainer(compiled(), tmp_path, prediction_loss_only=True)
    ours.compute_metrics = None
    assert ours.evaluate()["eval_loss"] > 0
    assert products(ours.seen) == [0, 0]


def test_predictions_instead_of_logits_are_gathered(tmp_path: Path) -> None:
    """Without this argument the Trainer keeps the logits of the whole evaluation set."""
    ours = trainer(compiled(), tmp_path)
    ours.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    ours.compute_metrics = lambda prediction: {"entries": prediction.predictions.size}
    assert ours.evaluate()["eval_entries"] == 8 * LENGTH
    assert products(ours.seen) == [1, 1]


def test_a_callback_behind_the_step_reads_stale_logits(tmp_path: Path) -> None:
    ours = trainer(compiled(), tmp_path, max_steps=1)

    class Reads(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ours.seen[-1].argmax(-1)

    ours.add_callback(Reads())
    with pytest.raises(StaleLogitsError, match=r"AdamW.step\(\) updated the head since then"):
        ours.train()


@pytest.mark.slow
def test_generating_between_steps_changes_nothing(tmp_path: Path) -> None:
    class Generates(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            ids = data()[0]["input_ids"][None]
            model.eval().generate(input_ids=ids, max_new_tokens=2, do_sample=False)
            model.train()

    both = trainer(llama(), tmp_path / "eager"), trainer(compiled(), tmp_path / "ours")
    for each in both:
        each.add_callback(Generates())
        each.train()
    np.testing.assert_allclose(losses(both[1]), losses(both[0]), rtol=2e-6)
    training = [graph for graph in memeff_compile.graphs() if graph.training]
    found = [r.code for r in training[0].records if r.pass_name not in OF_BLOCKS]
    assert found == ["rewrote", "logits_deferred"]


@pytest.mark.slow
def test_verify_in_the_trainer_compares_each_graph_and_keeps_the_curve(tmp_path: Path) -> None:
    eager = trainer(llama(), tmp_path / "eager")
    eager.train()
    ours = trainer(compiled(**{"memeff.verify": "raise"}), tmp_path / "ours")
    ours.train()
    ours.evaluate()
    np.testing.assert_allclose(losses(ours), losses(eager), rtol=2e-6)
    assert [g.records[-1].code for g in memeff_compile.graphs()] == ["verify_passed"] * 2
    assert products(ours.seen) == [0] * STEPS + [1, 1]


def use() -> LogitsUse:
    """Return how the deferred logits of the training graph were used."""
    (found,) = (g.logits for g in memeff_compile.last_report().graphs if g.logits is not None)
    return found


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        pytest.param(*given, marks=SLOW if given[0] else (), id=name)
        for name, given in SETTINGS.items()
    ],
)
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


class Supervised(Watching):
    """A Trainer that computes entropy and token accuracy from the logits in each training step."""

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        with torch.no_grad():
            for chunk in outputs["logits"].flatten(0, -2).split(8):
                logp = nn.functional.log_softmax(chunk, dim=-1)
                self.__dict__.setdefault("entropies", []).append(-(logp.exp() * logp).sum(-1))
            right = outputs["logits"][..., :-1, :].argmax(-1) == labels[..., 1:]
            self.__dict__.setdefault("right", []).append(right)
        return (loss, outputs) if return_outputs else loss


def test_metrics_of_every_step_compute_the_logits_and_a_trainer_without_them_does_not(
    tmp_path: Path,
) -> None:
    made = []
    for model in (llama(), compiled()):
        each = trainer(model, tmp_path, kind=Supervised, max_steps=2)
        each.train()
        made.append(each)
    np.testing.assert_allclose(losses(made[1]), losses(made[0]), rtol=2e-6)
    for name in ("entropies", "right"):
        torch.testing.assert_close(getattr(made[1], name), getattr(made[0], name))
    assert min(products(made[1].seen)) >= 1

    made[1].seen.clear()
    made[1].compute_loss = Watching.compute_loss.__get__(made[1])  # type: ignore[method-assign]
    made[1].train()
    assert products(made[1].seen) == [0] * 2


def test_the_option_none_trains_and_evaluates_without_logits(tmp_path: Path) -> None:
    ours = trainer(compiled(**{"memeff.logits": "none"}), tmp_path)
    ours.compute_metrics = None
    ours.compute_loss = Trainer.compute_loss.__get__(ours)  # type: ignore[method-assign]
    ours.train()
    assert ours.evaluate()["eval_loss"] > 0
    assert codes() == {"rewrote", "logits_none"}


UNKNOWN = "'MEMEFF' is not a valid DynamoBackend"


def test_the_ways_that_do_not_work_say_what_the_docs_say(tmp_path: Path) -> None:
    for settings in ({}, {"torch_compile": True}, {"torch_compile_mode": "max-autotune"}):
        with pytest.raises(ValueError, match=UNKNOWN):
            trainer(llama(), tmp_path, torch_compile_backend="memeff", **settings).train()
    with pytest.raises(ValueError, match=UNKNOWN):
        Accelerator(cpu=True, dynamo_backend="memeff")
    wrapped = torch.compile(llama(), backend="memeff", options=OPTIONS)
    with pytest.raises(ValueError, match="The batch received was empty"):
        trainer(wrapped, tmp_path).train()
    trainer(wrapped, tmp_path, remove_unused_columns=False, max_steps=1).train()
    assert codes() == TRAINING


def test_a_wrapper_renames_the_weights_and_a_model_compiled_in_place_does_not(
    tmp_path: Path,
) -> None:
    wrapped, model = torch.compile(llama(), backend="memeff", options=OPTIONS), compiled()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"_orig_mod"):
        model.load_state_dict(wrapped.state_dict())  # type: ignore[attr-defined]
    trainer(model, tmp_path, max_steps=1).save_model(str(tmp_path / "saved"))
    wrapped.save_pretrained(tmp_path / "wrapped")  # type: ignore[attr-defined]
    for folder, source in (("saved", model), ("wrapped", wrapped)):
        loaded = type(model).from_pretrained(tmp_path / folder)  # type: ignore[attr-defined]
        assert loaded.state_dict().keys() == model.state_dict().keys()
        weight, expected = (m.get_input_embeddings().weight for m in (loaded, source))
        assert torch.equal(weight, expected)


@pytest.mark.slow
def test_torch_compile_beside_the_model_compiled_in_place_keeps_our_graph(tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 1}
    ours = trainer(compiled(), tmp_path, **settings)
    ours.train()
    assert codes() == TRAINING
