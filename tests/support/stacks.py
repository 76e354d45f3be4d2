"""A small model of repeated blocks, with a head and a loss, for the planner."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """An embedding, blocks, a head and a cross entropy; returns the loss and the logits."""

    def __init__(
        self, vocabulary: int = 4096, width: int = 64, depth: int = 4, *, checkpointed: bool = True
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the logits of ids (batch, length)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return loss, logits


def token_ids(batch: int, length: int) -> Tensor:
    """Return ids without memory."""
    return torch.zeros(batch, length, dtype=torch.int64, device="meta")


def stack_of_two() -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model and its inputs, as the explain command takes them."""
    return Stack(depth=2), {"ids": token_ids(2, 32), "labels": token_ids(2, 32)}


def module_alone() -> nn.Module:
    """Build a model that takes no input_ids."""
    return Stack(depth=2)


def unbuildable() -> nn.Module:
    """Fail as a model does that reads its weights while it is built."""
    weight = nn.Linear(2, 2).weight
    return Stack(depth=int(weight.sum().item()))


def triple() -> tuple[int, int, int]:
    """Return a value that the command does not accept."""
    return 1, 2, 3
