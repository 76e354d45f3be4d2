"""Changing shapes: the backend compiles exactly as often as an empty backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import memeff_compile
from tests.support.surfaces import SURFACES, SurfaceModel, V, batch

SHAPES = [(2, 8), (3, 8), (4, 11), (5, 6), (2, 13)]


class WithLogits(SurfaceModel):
    """A surface with its logits returned, as transformers does."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(x @ self.trunk, self.weight)
        loss = torch.nn.functional.cross_entropy(logits.float().view(-1, V), labels.view(-1))
        return loss, logits


def compilations(model: torch.nn.Module, how: str, backend: Any, **settings: Any) -> int:
    """Run the shapes through `backend` and return how often it was called."""
    called = []

    def counting(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        called.append(gm)
        return gm.forward

    torch._dynamo.reset()
    memeff_compile.reset()
    dynamic = {"automatic": None, "marked": None, "dynamic=True": True, "dynamic=False": False}[how]
    run = torch.compile(model, backend=backend or counting, dynamic=dynamic, **settings)
    for shape in SHAPES:
        x, labels = batch(*shape)
        if how == "marked":
            for tensor in (x, labels):
                torch._dynamo.mark_dynamic(tensor, (0, 1))
        result, expected = run(x, labels), model(x, labels)
        for found, wanted in zip(_tuple(result), _tuple(expected), strict=True):
            torch.testing.assert_close(found, wanted)
        _tuple(result)[0].backward()
    return len(memeff_compile.graphs()) if backend else len(called)


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize(
    ("how", "returns_logits"),
    [
        pytest.param(
            *(how, returns),
            id=f"{'loss and logits' if returns else 'loss'}-{how}",
            marks=() if returns or how == "automatic" else pytest.mark.slow,
        )
        for returns in (False, True)
        for how in ("automatic", "marked", "dynamic=True", "dynamic=False")
    ],
)
def test_no_compilation_is_added(how: str, returns_logits: bool) -> None:
    surface = SURFACES["old_shifted_logits"]
    model = (WithLogits if returns_logits else SurfaceModel)(surface)
    plain = compilations(model, how, None)
    ours = compilations(model, how, "memeff", options={"memeff.inner": "aot_eager"})
    assert ours == plain
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == ours
