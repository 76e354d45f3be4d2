"""optim_in_backward with the kernels, run by Triton's interpreter: whose memory a step writes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memeff_compile.kernels.coded_weight import CodedWeight, Step, codecs, encode, op
from memeff_compile.kernels.coded_weight.layout import Format
from memeff_compile.model.weights.optim_in_backward import optim_in_backward

pytestmark = pytest.mark.interpreter

SHAPE = (128, 128)


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Serve the CPU with the kernels, and note each step that they take."""
    monkeypatch.setattr(op, "_uses_kernels", lambda tensor: True)
    plain, taken = codecs.step, []

    def step(parts: Any, form: Format, gradient: Tensor, by: Step) -> Tensor | None:
        taken.append(by)
        return plain(parts, form, gradient, by)

    monkeypatch.setattr(codecs, "step", step)
    return taken


class Weights(nn.Module):
    """Two weights, of which the first one can be compressed."""

    def __init__(self, *, is_coded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = torch.randn(2, *SHAPE).bfloat16()
        coded = CodedWeight(encode(first, "win4"), "win4", first.shape)
        self.first = nn.Parameter(coded if is_coded else first)
        self.second = nn.Parameter(second)

    def value(self) -> Tensor:
        first = self.first
        return first.decode() if isinstance(first, CodedWeight) else first.detach()


Case = Callable[[Weights, list[Tensor]], None]
GIVEN = (torch.arange(128 * 128) % 13 - 6).bfloat16()


def shared_with_another(model: Weights, kept: list[Tensor]) -> None:
    ((model.first.view(-1) + model.second.view(-1)) * GIVEN).sum().backward()
    assert model.second.grad is not None
    kept.append(model.second.grad)


def kept_by_a_hook(model: Weights, kept: list[Tensor]) -> None:
    (model.first * GIVEN.view(SHAPE)).sum().backward()
    assert kept


def given_by_the_caller(model: Weights, kept: list[Tensor]) -> None:
    kept.append(GIVEN.clone())
    model.first.view(-1).backward(kept[0])


def _log(model: Weights, case: str, kept: list[Tensor]) -> None:
    if case == "kept after":
        model.first.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))  # type: ignore[arg-type]
    elif case == "kept before":
        model.first.register_hook(lambda g: kept.append(g.detach()))


CASES: dict[str, Case] = {
    "shared with another": shared_with_another,
    "kept after": kept_by_a_hook,
    "kept before": kept_by_a_hook,
    "given by the caller": given_by_the_caller,
}


@pytest.mark.parametrize(
    ("case", "max_norm"), [*[(case, None) for case in CASES], ("shared with another", 1.0)]
)
def test_memory_that_others_hold_is_not_written_to(
    case: str, max_norm: float | None, steps: list[Step]
) -> None:
    found: list[tuple[Tensor, list[Tensor]]] = []
    for is_coded in (True, False):
        model, kept = Weights(is_coded=is_coded), []  # type: ignore[var-annotated]
        _log(model, case, kept)
        model.second.requires_grad_(False)
        optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.25), max_norm=max_norm)
        model.second.requires_grad_(True)  # its gradient stays
        CASES[case](model, kept)
        assert model.first.grad is None
        found.append((model.value(), kept))
    assert torch.equal(found[0][0], found[1][0])
    for _, kept in found:
        assert [torch.equal(each.view(-1), GIVEN) for each in kept] == [True]
    assert len(steps) == (max_norm is not None), "what was scaled is memory of ours"


def test_a_gradient_that_nobody_else_holds_is_stepped_in_its_memory(steps: list[Step]) -> None:
    values = []
    for is_coded in (True, False):
        model = Weights(is_coded=is_coded)
        model.first.register_hook(lambda g: None)
        optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.25), max_norm=200.0)
        (model.first * GIVEN.view(SHAPE)).sum().backward()
        values.append(model.value())
    assert torch.equal(*values)
    assert steps == [Step(0.25)]
