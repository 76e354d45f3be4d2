"""Kernels of our ops are compiled in threads while the inner compiler works."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.backend import ahead, memeff
from memeff_compile.kernels import device
from memeff_compile.kernels.library import Launch
from memeff_compile.kernels.linear_cross_entropy import walk

pytest.importorskip("triton", reason="its kernels are compiled")

LOSS = {
    *("_head_loss_rows_compact_kernel", "_head_loss_rows_copy_kernel"),
    *(
        f"_linear_cross_entropy_hopper_{step}_kernel"
        for step in ("base", "logits", "loss", "products")
    ),
}


def calls_in(model: nn.Module, *inputs: Tensor) -> list[ahead.Call]:
    """Return the calls of our ops in the model's graph after the passes."""
    found: list[ahead.Call] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        memeff(gm, example_inputs, options={"memeff.inner": "eager"})
        found.extend(ahead.calls_of(gm))
        return lambda *given: [torch.zeros(())]

    with device.planned_for(torch.device("cuda")):
        torch.compile(model, backend=backend)(*inputs)
    memeff_compile.reset()
    return found


class Head(nn.Module):
    """An output projection with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 1024, bias=False, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(hidden), target)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> ahead.Call:
    hidden = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    (found,) = calls_in(Head(), hidden, torch.zeros(256, dtype=torch.long))
    # On a CPU the check reads its result; on a GPU it is a device assertion.
    monkeypatch.setattr(walk, "check_range", lambda *given: None)
    return found


def launches_of(call: ahead.Call, *, trains: bool = True) -> list[Launch]:
    """Return the launches on a GPU that need not be present."""
    with device.planned_for(torch.device("cuda")):
        return call.launches(trains=trains)


def test_the_kernels_of_a_loss_and_its_gradient_are_noted(call: ahead.Call) -> None:
    names = {each.kernel.__name__ for each in launches_of(call)}
    assert names == LOSS


def test_noted_launches_of_one_compiled_kernel_have_one_key(call: ahead.Call) -> None:
    launches = launches_of(call)
    again = launches_of(call)
    assert [each.key() for each in launches] == [each.key() for each in again]
    assert len({each.key() for each in launches}) >= len(LOSS)
    wide = call._replace(args=tuple(_longer(each) for each in call.args))
    assert {e.key() for e in launches} != {e.key() for e in launches_of(wide)}


def _longer(value: Any) -> Any:
    """Return a likeness with rows whose number is no multiple of 16."""
    if isinstance(value, ahead.Likeness) and value.size[:1] == (256,):
        return value._replace(size=(255, *value.size[1:]))
    return value


def test_an_op_that_needs_data_is_left_to_its_first_launch(
    call: ahead.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", device.planned_for)
    on_gpu = call._replace(device=torch.device("cuda"))
    assert len(ahead._compile(on_gpu, trains=True)) >= len(LOSS)
    monkeypatch.setattr(walk, "check_range", lambda target, *given: bool(target.sum()))
    assert ahead._compile(on_gpu, trains=True) == []


@pytest.mark.gpu
def test_the_first_step_compiles_no_kernel_again() -> None:
    import triton

    compiled: list[tuple[str, str]] = []
    compile_one = triton.compiler.compile

    def counted(src: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append((src.name, threading.current_thread().name))
        return compile_one(src, *args, **kwargs)

    model = Head().cuda()
    hidden = torch.randn(256, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    begin = ahead.compile_ahead

    def finished(gm: Any, *, trains: bool) -> None:
        for call in begin(gm, trains=trains):
            wait(call.result())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.compiler, "compile", counted)
        patch.setattr("memeff_compile.backend.entry.compile_ahead", finished)
        target = torch.zeros(256, dtype=torch.long, device="cuda")
        torch.compile(model, backend="memeff")(hidden, target).backward()
    ours = [each for each in compiled if "linear_cross_entropy" in each[0]]
    assert ours
    assert all(thread.startswith("memeff kernels") for _, thread in ours)
