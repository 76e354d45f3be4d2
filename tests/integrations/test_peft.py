"""PEFT adapters: a frozen head costs no gradient product, an adapted head is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memeff_compile
from tests.integrations.tiny import (
    OPTIONS,
    TRAINING,
    assert_same_gradients,
    batch,
    codes,
    gradients,
    llama,
)


class BackwardCalls(TorchDispatchMode):
    """Notes which gradients each backward of the fused loss was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) == "memeff.linear_cross_entropy_backward.default":
            self.asked.append(list(kwargs["output_mask"]))
        return func(*args, **kwargs)


def adapted(*targets: str, save: tuple[str, ...] = (), **settings: object) -> nn.Module:
    model = llama(**settings)
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        target_modules=list(targets),
        modules_to_save=list(save) or None,
        init_lora_weights=False,
        lora_dropout=0.0,
    )
    return get_peft_model(model, config)  # type: ignore[arg-type]


def frozen_trunk() -> nn.Module:
    model = llama()
    model.requires_grad_(False)
    model.get_submodule("lm_head").requires_grad_(True)
    return model


def step(model: nn.Module) -> tuple[Any, BackwardCalls]:
    out, calls = model(**batch()), BackwardCalls()
    with calls:
        out.loss.backward()
    return out, calls


CASES = {
    "attention": (lambda: adapted("q_proj", "v_proj"), [True, False, False]),
    "attention, tied head": (
        lambda: adapted("q_proj", "v_proj", tie_word_embeddings=True),
        [True, False, False],
    ),
    "head saved whole": (lambda: adapted("q_proj", save=("lm_head",)), [True, True, False]),
    "frozen trunk": (frozen_trunk, [False, True, False]),
}


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if "tied" in name else ())
        for name, case in CASES.items()
    ],
)
def test_only_the_gradients_that_someone_trains_are_computed(make: Any, asked: list[bool]) -> None:
    reference, model = make(), make()
    expected, _ = step(reference)
    model.compile(backend="memeff", options=OPTIONS)
    out, calls = step(model)
    assert codes() == TRAINING
    assert calls.asked == [asked]
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model), gradients(reference))
    torch.testing.assert_close(out.logits + 0, expected.logits)


def test_an_adapted_head_is_declined_with_a_reason() -> None:
    reference, model = adapted("q_proj", "lm_head"), adapted("q_proj", "lm_head")
    expected, _ = step(reference)
    model.compile(backend="memeff", options=OPTIONS)
    out, _ = step(model)
    assert codes() == {"logits_combined"}
    assert "adds to the logits" in memeff_compile.last_report().records[0].sentence
    assert torch.equal(out.loss, expected.loss)
    assert_same_gradients(gradients(model), gradients(reference))


def test_skip_and_report_know_the_head_by_its_name() -> None:
    model = adapted("q_proj")
    (head,) = (name for name, _ in model.named_modules() if name.endswith("lm_head"))
    model.compile(backend="memeff", options={**OPTIONS, "memeff.skip": head})
    step(model)
    assert codes() == {"skipped"}
    records = memeff_compile.last_report().records  # older stacks have attention mended besides
    assert {record.module for record in records if record.code == "skipped"} == {head}
