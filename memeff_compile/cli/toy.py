"""The smallest model with an output projection and a loss, for experiments.

The command `memeff doctor` runs the model to check the installation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ToyModel(nn.Module):
    """An embedding, an output projection and a cross entropy; the backend fuses the last two."""

    def __init__(self, vocabulary: int = 64, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of predicting each token id from itself; the ids are an int64 tensor
        of shape (tokens,).
        """
        logits = self.head(self.embed(ids))
        return nn.functional.cross_entropy(logits, ids)


def add_one(x: Tensor) -> Tensor:
    """Return x + 1; this is the smallest function with which to try Inductor."""
    return torch.add(x, 1)
