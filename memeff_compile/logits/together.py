"""Compute the logits of an output projection that DTensor splits over ranks, on all ranks together.

Each rank has a shard of the projection's weight. If only rank 0 read the logits, for example to
print a sample, rank 0 would wait for the other ranks forever. So a read that computes the logits
without `full_tensor()` raises an error immediately. Call `full_tensor()` on every rank instead, as
for a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memeff_compile.errors import ShardedLogitsError

WAYS = (
    "Call out.logits.full_tensor() on every rank of the group before optimizer.step(), return only "
    'the loss, or compile with options={"memeff.logits": "eager"}.'
)

_asking: list[bool] = []


@contextmanager
def all_ranks_ask() -> Iterator[None]:
    """In this context, allow code to read logits of an output projection that is split over ranks.

    Every rank must enter the context.
    """
    _asking.append(True)
    try:
        yield
    finally:
        _asking.pop()


class Ranks:
    """The ranks among which an output projection's classes are split."""

    def __init__(self, weight: Tensor) -> None:  # a DTensor, split by rows over one dimension
        spread: Any = weight
        self.mesh, self.classes = spread.device_mesh, weight.shape[0]
        self.dim = next(i for i, p in enumerate(spread.placements) if not p.is_replicate())

    def agreed(self, change: str | None, device: torch.device) -> str | None:
        """Return a message on every rank if the logits' source tensors have changed on any rank.

        The source tensors are the hidden states and the output projection. `change` is the message
        about a change on this rank since the forward pass, or None. Return None if no rank found a
        change. All ranks must call this function.
        """
        if not _asking:
            raise ShardedLogitsError(
                "These logits were left out of the forward pass, and their head is split over "
                f"{self.mesh.size(self.dim)} ranks: a read on one rank would wait for the others. "
                f"{WAYS}"
            )
        changed = torch.tensor([change is not None], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(
            changed, torch.distributed.ReduceOp.MAX, group=self.mesh.get_group(self.dim)
        )
        return change or ("the head of another rank changed since then" if changed.item() else None)

    def gather(self, part: Tensor) -> Tensor:
        """Return the logits of all classes, gathered from all ranks."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        places: list[Any] = [Replicate()] * self.mesh.ndim
        places[self.dim] = Shard(part.dim() - 1)
        shape = torch.Size((*part.shape[:-1], self.classes))
        stride = torch.empty(shape, device="meta").stride()
        how: dict[str, Any] = {"run_check": False, "shape": shape, "stride": stride}
        whole: Tensor = DTensor.from_local(part, self.mesh, places, **how).full_tensor()
        return whole
