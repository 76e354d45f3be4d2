"""The smallest model with a head and a loss, for `doctor` and for trying things out."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ToyModel(nn.Module):
    """An embedding, a head and a cross entropy: what the first pass rewrites."""

    def __init__(self, vocabulary: int = 64, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of predicting each id, (tokens,) int64, from itself."""
        logits = self.head(self.embed(ids))
        return nn.functional.cross_entropy(logits, ids)


def add_one(x: Tensor) -> Tensor:
    """Return x + 1: the smallest thing that Inductor can be asked to compile."""
    return torch.add(x, 1)
