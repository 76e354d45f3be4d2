"""Engines as tests call them: without the op, which would send CPU tensors to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from memeff_compile.kernels._head_loss.call import (
    Operands,
    RowGradients,
    RowResults,
    Saved,
    ScalarLoss,
    Settings,
)
from memeff_compile.kernels.linear_cross_entropy import walk


class Found(NamedTuple):
    """A total and its gradients, of a head without a LoRA part."""

    total: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


class Engine:
    """One engine's walks."""

    def __init__(self, name: str, **parts: str) -> None:
        self.name, self.parts = name, parts
        self.filters = walk.ENGINES[name].filters

    @property
    def module(self) -> Any:
        module = walk.ENGINES[self.name].module
        if not self.parts:
            return module
        return SimpleNamespace(**{k: getattr(module, name) for k, name in self.parts.items()})

    def forward(self, given: Operands, settings: Settings) -> RowResults:
        return walk.forward(self.module, given, settings)

    def backward(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        output_mask: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        found = walk.backward(self.module, grads, given, saved, settings, output_mask)
        return found if given.low is not None else found[:3]

    def total(self, given: ScalarLoss) -> Any:
        found = walk.total(self.module, given)
        return found if given.low is not None else Found(*found[:4])

    def in_two_walks(self, given: ScalarLoss) -> Any:
        found = walk.in_two_walks(self.module, given)
        return found if given.low is not None else Found(*found[:4])


reference, library, hopper = map(Engine, ("reference", "library", "hopper"))
by_classes = Engine("hopper", forward="Forward", backward="BackwardByClasses")
by_rows = Engine("hopper", forward="Forward", backward="BackwardByRows", total="Total")
