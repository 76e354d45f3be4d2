"""MemeffCallback in the Hugging Face Trainer: compiles at the right time, once, with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainingArguments

import memeff_compile
from memeff_compile import compat
from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.integrations.transformers import MemeffCallback
from tests.integrations.test_trainer import (
    STEPS,
    Losses,
    _accelerate_forgets,  # noqa: F401
    losses,
    products,
    trainer,
)
from tests.integrations.tiny import TRAINING, codes, llama

EAGER = {"memeff.inner": "eager"}
SLOW = pytest.mark.slow


def with_callback(model: nn.Module, folder: Path, **settings: Any) -> Any:
    """Return a Trainer that is created with the callback."""
    made = trainer(model, folder, **settings)
    ours = type(made)(
        model=model,
        args=made.args,
        train_dataset=made.train_dataset,
        eval_dataset=made.eval_dataset,
        compute_metrics=made.compute_metrics,
        callbacks=[Losses(), MemeffCallback(options=EAGER)],
    )
    ours.seen = []
    return ours


@pytest.fixture
def expected(tmp_path: Path) -> list[float]:
    """Return the loss curve of the uncompiled model."""
    eager = trainer(llama(), tmp_path / "eager")
    eager.train()
    return losses(eager)


def test_the_callback_alone_gives_the_curve_of_the_uncompiled_model_and_no_logits(
    tmp_path: Path, expected: list[float]
) -> None:
    ours = with_callback(llama(), tmp_path)
    ours.train()
    np.testing.assert_allclose(losses(ours), expected, rtol=2e-6)
    assert codes() == TRAINING
    assert products(ours.seen) == [0] * STEPS
    assert ours.evaluate()["eval_loss"] > 0
    assert len(memeff_compile.graphs()) == 2
    assert type(ours.model.forward).__name__ == "method"
    assert not any(name.startswith("_orig_mod") for name in ours.model.state_dict())


def test_evaluate_and_predict_before_training_run_compiled(tmp_path: Path) -> None:
    expected = trainer(llama(), tmp_path).evaluate()["eval_loss"]
    ours = with_callback(llama(), tmp_path)
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=2e-6)
    assert len(memeff_compile.graphs()) == 1
    assert ours.predict(ours.eval_dataset).metrics["test_loss"] == pytest.approx(expected, rel=2e-6)


def test_a_callback_that_is_added_to_a_trainer_compiles_when_training_begins(
    tmp_path: Path,
) -> None:
    ours = trainer(llama(), tmp_path, max_steps=1)
    ours.add_callback(MemeffCallback(options=EAGER, logits="none"))
    ours.compute_loss = super(type(ours), ours).compute_loss  # the test's version keeps logits
    ours.train()
    assert codes() == {"rewrote", "logits_none"}


def test_a_model_that_is_compiled_already_stays_as_it_is(tmp_path: Path) -> None:
    model = llama()
    model.compile(backend="memeff", options={**EAGER, "memeff.logits": "eager"})
    call = model._compiled_call_impl
    with_callback(model, tmp_path, max_steps=1).train()
    assert model._compiled_call_impl is call
    assert "logits_deferred" not in codes()


def test_a_second_callback_changes_nothing_and_is_told_if_it_asks_for_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = with_callback(llama(), tmp_path, max_steps=1)
    call = ours.model._compiled_call_impl
    for settings in ({}, {"logits": "eager"}):
        MemeffCallback(options=EAGER, **settings).on_init_end(
            ours.args, ours.state, ours.control, ours.model
        )
        assert ours.model._compiled_call_impl is call
        said = [one.message for one in caplog.records if one.name.startswith("memeff_compile")]
        assert len(said) == len(settings)
    assert "is compiled already, with other options; they stay." in said[0]


def test_the_reference_model_of_a_trainer_is_compiled_too(tmp_path: Path) -> None:
    ours = with_callback(llama(), tmp_path, max_steps=1)
    ours.ref_model = llama()
    ours.train()
    assert compat.is_compiled_in_place(ours.ref_model)


def test_adapters_of_peft_are_compiled_with_their_model(tmp_path: Path) -> None:
    curves = []
    for make in (trainer, with_callback):
        torch.manual_seed(0)
        adapted = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))  # type: ignore[arg-type]
        ours = make(adapted, tmp_path, max_steps=2, gradient_accumulation_steps=2)
        ours.label_names = ["labels"]
        ours.train()
        curves.append(losses(ours))
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-6)
    assert codes() == TRAINING


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, {"torch_compile": True}], ids=list
)
def test_the_callback_gives_the_curve_next_to(settings: dict[str, Any], tmp_path: Path) -> None:
    eager = trainer(llama(), tmp_path / "eager", **{**settings, "torch_compile": False})
    eager.train()
    if settings.get("torch_compile"):
        settings["torch_compile_backend"] = "eager"
    ours = with_callback(llama(), tmp_path, **settings)
    ours.train()
    np.testing.assert_allclose(losses(ours), losses(eager), rtol=2e-6)
    assert codes() == TRAINING


@pytest.mark.slow
def test_training_with_the_callback_resumes_from_a_checkpoint(
    tmp_path: Path, expected: list[float]
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    with_callback(llama(), tmp_path / "ours", **settings).train()
    resumed = with_callback(llama(), tmp_path / "ours", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    np.testing.assert_allclose(losses(resumed), expected[2:], rtol=2e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"logit": "none"}, "Did you mean 'logits'"),
        ({"options": {"memeff.logits": "none"}, "logits": "none"}, "give it once"),
        ({"weights": "win4"}, r"compress_\(model\)"),
    ],
)
def test_options_are_checked_when_the_callback_is_made(settings: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        MemeffCallback(**settings)


def test_several_gpus_in_one_process_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(UnsupportedInputError, match=r"torchrun --nproc-per-node 2 train\.py"):
        with_callback(llama(), tmp_path)
