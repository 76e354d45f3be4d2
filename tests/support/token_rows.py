"""A dataset of token ids with labels, as the Trainer takes it."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of eight token ids, which are their own labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        ids = (torch.arange(8) * (place + 1)) % 64
        return {"input_ids": ids, "labels": ids}
