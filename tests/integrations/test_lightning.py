"""Lightning with the real package: the call to compile, and the message for the other call."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.errors import UnsupportedInputError
from tests.integrations.frameworks import framework
from tests.integrations.tiny import OPTIONS, TRAINING, batch, codes, llama

pytestmark = pytest.mark.slow


@pytest.fixture
def lightning() -> Any:
    found = framework("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return found


def build(lightning: Any) -> Any:
    class Training(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            self.losses: list[Tensor] = []

        def training_step(self, step: dict[str, Tensor], _: int) -> Tensor:
            loss = self.model(**step, labels=step["input_ids"]).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Training()


def fit(lightning: Any, module: Any, given: nn.Module | None = None, **more: Any) -> Tensor:
    """Train three batches; return their losses."""
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    steps = [{"input_ids": batch(seed)["input_ids"]} for seed in range(3)]
    batches = torch.utils.data.DataLoader(steps, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module if given is None else given, batches)
    return torch.stack(module.losses)


@pytest.fixture
def eager(lightning: Any) -> Tensor:
    return fit(lightning, build(lightning))


def test_inner_model_compiled_in_place_is_fused(lightning: Any, eager: Tensor) -> None:
    module = build(lightning)
    module.model.compile(backend="memeff", options=OPTIONS)
    torch.testing.assert_close(fit(lightning, module), eager, rtol=1e-6, atol=0.0)
    assert {"rewrote", "logits_deferred"} <= codes()


def test_wrapped_module_compiles_the_training_step(lightning: Any, eager: Tensor) -> None:
    module = build(lightning)
    wrapped = torch.compile(module, backend="memeff", options=OPTIONS)
    torch.testing.assert_close(fit(lightning, module, wrapped), eager, rtol=1e-6, atol=0.0)
    assert "rewrote" in codes()


def test_module_compiled_in_place_trains_uncompiled_and_the_report_says_why(
    lightning: Any, eager: Tensor
) -> None:
    module = build(lightning)
    module.compile(backend="memeff", options=OPTIONS)
    torch.testing.assert_close(fit(lightning, module), eager, rtol=0.0, atol=0.0)
    report = memeff_compile.last_report()
    assert not report.graphs
    assert "LightningModule" in str(report)


def test_the_callback_compiles_the_model_inside(lightning: Any, eager: Tensor) -> None:
    from memeff_compile.integrations.lightning import MemeffCallback

    module = build(lightning)
    module.criterion = nn.CrossEntropyLoss()
    callbacks = [MemeffCallback(options=OPTIONS), MemeffCallback("model", options=OPTIONS)]
    losses = fit(lightning, module, callbacks=callbacks)
    torch.testing.assert_close(losses, eager, rtol=1e-6, atol=0.0)
    assert codes() >= TRAINING
    assert module._compiled_call_impl is None
    assert module.criterion._compiled_call_impl is None


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_the_callback_compiles_without_training(lightning: Any, call: str) -> None:
    from memeff_compile.integrations.lightning import MemeffCallback

    module = build(lightning)
    module.validation_step = module.test_step = module.training_step
    module.predict_step = lambda step, _=0: module.model(**step).logits
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[MemeffCallback(options=OPTIONS)],
    )
    batches: Any = [{"input_ids": batch()["input_ids"]}]
    getattr(trainer, call)(module, torch.utils.data.DataLoader(batches, batch_size=None))
    assert len(memeff_compile.last_report().graphs) == 1


def test_a_child_that_is_not_there_is_named(lightning: Any) -> None:
    from memeff_compile.integrations.lightning import MemeffCallback

    with pytest.raises(UnsupportedInputError, match="no child 'core'; its children are model"):
        fit(lightning, build(lightning), callbacks=[MemeffCallback("core")])
    empty = build(lightning)
    del empty.model
    with pytest.raises(UnsupportedInputError, match="no child with parameters"):
        MemeffCallback()._compile(empty)
