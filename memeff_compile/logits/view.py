"""The interface through which losses outside of the compiled graph use deferred logits (logits that
are computed when first read).

The class `DeferredLogits` in the module `logits/tensor.py` implements this interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from memeff_compile.logits.fused_rows import Head
from memeff_compile.logits.memory import Memory, Part
from memeff_compile.logits.recipe import LogitsRecipe


class View(Part, Protocol):
    """Logits of an output projection, or some of their rows, whose values are computed on first
    use."""

    memory: Memory
    dims: tuple[int, ...]
    order: tuple[int, ...] | None  # order of the dimensions, if the vocabulary is not the last

    @property
    def head(self) -> Head:
        """Return the hidden states of this view's rows (tokens), and the output projection.

        A loss that is computed outside of the compiled graph takes the result as its argument."""

    @property
    def recipe(self) -> LogitsRecipe:
        """Return the recipe: the steps that compute these logits' values from hidden states."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the logits."""

    @property
    def device(self) -> torch.device:
        """Return the device of the logits."""

    def copied(self, recipe: LogitsRecipe, function: Callable[[Tensor], Tensor]) -> View:
        """Return new logits, computed when first read, that share no memory with these logits.

        If the present values are already computed, `function` computes the new values from them.
        Otherwise the steps in `recipe` compute the new values from hidden states."""

    def to_read(self) -> Tensor:
        """Return an ordinary tensor that autograd treats as a view of these logits."""
