"""PEFT adapters: a frozen head has no gradient product, with or without an adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memeff_compile
from memeff_compile.errors import StaleLogitsError
from tests.integrations.tiny import (
    OPTIONS,
    TRAINING,
    assert_same_gradients,
    batch,
    codes,
    gradients,
    llama,
)

DECLINED = {"logits_not_deferrable"}
BACKWARD = "memeff.linear_cross_entropy_backward.default"


class BackwardCalls(TorchDispatchMode):
    """A mode that records which gradients each backward of the fused loss computes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) == BACKWARD:
            self.asked.append(list(kwargs["output_mask"]))
        return func(*args, **kwargs)


def adapted(
    *targets: str,
    save: tuple[str, ...] = (),
    adapters: int = 1,
    dtype: torch.dtype = torch.float32,
    lora: dict[str, Any] | None = None,
    **settings: object,
) -> nn.Module:
    model = llama(**settings).to(dtype)
    torch.manual_seed(1)
    how: dict[str, Any] = {"r": 4, "init_lora_weights": False, "lora_dropout": 0.0, **(lora or {})}
    how |= {"target_modules": list(targets), "modules_to_save": list(save) or None}
    found = get_peft_model(model, LoraConfig(**how))  # type: ignore[arg-type]
    names = ["default", *(f"further {i}" for i in range(1, adapters))]
    for name in names[1:]:
        found.add_adapter(name, LoraConfig(**how))
    if names[1:]:
        found.base_model.set_adapter(names)  # type: ignore[operator]
    return found


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


@pytest.mark.parametrize(
    ("adapters", "is_tied"),
    [
        (1, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, True), (2, False), (2, True))
        ),
    ],
)
def test_an_adapted_head_is_served(adapters: int, is_tied: bool) -> None:
    def make() -> nn.Module:
        return adapted("q_proj", "lm_head", adapters=adapters, tie_word_embeddings=is_tied)

    reference, model = make(), make()
    expected, _ = step(reference)
    model.compile(backend="memeff", options=OPTIONS)
    out, calls = step(model)
    assert codes() == TRAINING
    assert calls.asked == [[True, False, False, True, True]]
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model), gradients(reference))
    assert torch.equal(out.logits + 0, expected.logits)


@pytest.mark.parametrize(
    ("name", "through_data"),
    [
        *(("lora_A", False), ("lora_B", True)),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("lora_A", True), ("lora_B", False))),
    ],
)
def test_logits_of_an_adapted_head_are_refused_once_an_adapter_changed(
    name: str, through_data: bool
) -> None:
    model = adapted("lm_head", lora={"r": 1})
    model.compile(backend="memeff", options=OPTIONS)
    out, _ = step(model)
    (changed,) = (p for n, p in model.named_parameters() if name in n)
    with torch.no_grad():
        (changed.data if through_data else changed).mul_(2)
    with pytest.raises(StaleLogitsError):
        out.logits.sum()


def test_dropout_before_an_adapter_is_served_where_nobody_reads_logits() -> None:
    for logits, expected in (("none", {"rewrote", "logits_none"}), ("deferred", DECLINED)):
        memeff_compile.reset()
        torch._dynamo.reset()
        reference, model = (adapted("lm_head", lora={"lora_dropout": 0.2}) for _ in range(2))
        model.compile(backend="memeff", options={**OPTIONS, "memeff.logits": logits})
        for each in (reference, model):
            each.train()
            torch.manual_seed(0)
            step(each)
        assert codes() == expected
        assert_same_gradients(gradients(model), gradients(reference))


def test_an_adapter_in_fp32_on_a_head_in_16_bits_is_served() -> None:
    def make() -> nn.Module:
        return adapted("q_proj", "lm_head", dtype=torch.bfloat16)

    exact, reference, model = make().double(), make(), make()
    for each in (exact, reference):
        step(each)
    model.compile(backend="memeff", options={**OPTIONS, "memeff.logits": "none"})
    step(model)
    assert codes() == {"rewrote", "logits_none"}
    found, eager, wanted = map(gradients, (model, reference, exact))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        ours, theirs = ((g[name] - gradient).norm() for g in (found, eager))
        assert ours <= 1.1 * theirs, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"use_dora": True}, "graph_break_between"),  # PEFT's code for it breaks the graph
        ({"lora_bias": True}, "logits_combined"),
    ],
    ids=["DoRA", "a bias of B"],
)
def test_other_adapters_are_declined(settings: dict[str, Any], code: str) -> None:
    reference, model = (adapted("q_proj", "lm_head", lora=settings) for _ in range(2))
    expected, _ = step(reference)
    model.compile(backend="memeff", options={**OPTIONS, "memeff.logits": "none"})
    out, _ = step(model)
    assert codes() == {code}
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model), gradients(reference))


def test_skip_and_report_know_the_head_by_its_name() -> None:
    model = adapted("q_proj")
    (head,) = (name for name, _ in model.named_modules() if name.endswith("lm_head"))
    model.compile(backend="memeff", options={**OPTIONS, "memeff.skip": head})
    step(model)
    assert codes() == {"skipped"}
    records = memeff_compile.last_report().records  # on older stacks attention is rewritten too
    assert {record.module for record in records if record.code == "skipped"} == {head}
