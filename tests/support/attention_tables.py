"""Masks of keys and ids of documents, of the kinds that attention's kernels treat differently."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = (
    *("right padding", "left padding", "padding of all sequences", "documents", "short documents"),
    *("documents and padding", "keys with gaps", "documents in turn", "documents in turn and gaps"),
)

Tables = tuple[Tensor | None, Tensor | None, Tensor | None]


def _documents(batch: int, length: int, mean: int) -> Tensor:
    """Return ids of documents, of random lengths and of one token."""
    generator = torch.Generator().manual_seed(length + mean)
    starts = torch.rand(batch, length, generator=generator) < 1.0 / mean
    starts[:, length // 2 : length // 2 + 3] = True  # documents of one token
    return starts.cumsum(1)


def tables(kind: str, batch: int, queries: int, keys: int) -> Tables:
    """Return the mask of keys and the ids of a kind of call."""
    place = torch.arange(keys)[None]
    size = max(queries, keys)
    lengths = torch.tensor([keys, keys // 3, 1, 0])[:batch, None]
    generator = torch.Generator().manual_seed(keys)
    match kind:
        case "right padding":
            return place < lengths, None, None
        case "left padding":
            return place >= keys - lengths, None, None
        case "padding of all sequences":
            return (place >= 5)[:1] & (place < keys - 300), None, None
        case "documents":
            ids = _documents(batch, size, 150)
            return None, ids[:, :queries], ids[:, :keys]
        case "short documents":
            ids = _documents(1, size, 7).int()
            return None, ids[:, :queries], ids[:, :keys]
        case "documents and padding":
            ids = _documents(batch, size, 200)
            return place < lengths, ids[:, :queries], ids[:, :keys]
        case "keys with gaps":
            return torch.rand(batch, keys, generator=generator) < 0.7, None, None
        case "documents in turn":
            ids = torch.arange(size)[None] // 40 % 3
            return None, ids[:, :queries], ids[:, :keys]
        case "documents in turn and gaps":
            ids = torch.randint(0, 3, (batch, size), generator=generator).sort(1).values
            ids = torch.where(torch.arange(size)[None] // 60 % 5 == 0, 1, ids)
            shown = torch.rand(batch, keys, generator=generator) < 0.9
            return shown, ids[:, :queries], ids[:, :keys]
    raise AssertionError(kind)
