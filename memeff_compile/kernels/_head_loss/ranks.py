"""An output projection whose classes are split over ranks: which rank has which classes, and how
ranks exchange statistics.

Rank r of P ranks has the rows of the weight that `torch.chunk` assigns to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from ...errors import UnsupportedInputError

# If ranks split the classes, an implementation gets for each row the target's column, or IGNORED,
# or, if another rank has the target, ELSEWHERE minus an arbitrary column, which is about as likely
# as any other.
IGNORED = -1
ELSEWHERE = -2
NO_COLUMN = -100  # the target of an ignored row, in a loss per row over one rank's columns


class Shard(NamedTuple):
    """The range of an output projection's classes that one rank has."""

    rank: int
    ranks: int
    classes: int  # of all ranks

    @property
    def chunk(self) -> int:
        """Return how many classes a rank has, except for the last ranks, which may have fewer."""
        return -(-self.classes // self.ranks)

    @property
    def first(self) -> int:
        """Return the first class of this rank."""
        return self.rank * self.chunk

    @property
    def columns(self) -> int:
        """Return how many classes this rank has."""
        return max(0, min(self.chunk, self.classes - self.first))

    @property
    def leaves_some_empty(self) -> bool:
        """Return whether at least one rank has no class of the output projection."""
        return self.chunk * (self.ranks - 1) >= self.classes

    def fault(self, rows: int) -> str | None:
        """Return the reason why a weight with the given number of rows is not this rank's shard, or
        None if it is."""
        if 0 < rows == self.columns:
            return None
        return (
            f"weight has {rows} rows; rank {self.rank} of {self.ranks} with {self.classes} classes "
            f"holds {self.columns}, as torch.chunk cuts them. Shard the head with DTensor."
        )

    def columns_of(self, target: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return target columns in this rank's logits, and two masks: rows with targets on this
        rank, rows with targets on another rank.

        A row is one token. The ranks split the classes of an output projection. Rows whose target
        is `ignore_index` are in neither mask. A row whose target is on another rank gets an
        arbitrary column. The row is not ignored, but the logit of that column is not used.
        """
        here = (target >= self.first) & (target < self.first + self.columns)
        if ignore_index is None:
            return torch.where(here, target - self.first, 0), here, ~here
        kept = target != ignore_index
        here = here & kept
        column = torch.where(here, target - self.first, torch.where(kept, 0, NO_COLUMN))
        return column.to(target.dtype), here, kept & ~here


class Split(NamedTuple):
    """The description of how an output projection is split over ranks.

    A `Split` contains:

    - this rank's shard;
    - the dimension of the device mesh over which the classes are split;
    - the name of the process group.
    """

    shard: Shard
    dim: int
    group: str


def split_of(weight: Any) -> Split | str:
    """Return how a DTensor's rows are split over ranks.

    If the rows are not split, return a description of the DTensor's layout instead. Except for the
    rank's own shard, the result is the same on every rank.
    """
    from torch.distributed.tensor import Shard as Rows

    places = {i: p for i, p in enumerate(weight.placements) if not p.is_replicate()}
    if len(places) != 1 or any(type(p) is not Rows or p.dim != 0 for p in places.values()):
        return f"is laid out as {layout(weight)}, not split by its classes over one dimension"
    (dim,), mesh = places, weight.device_mesh
    shard = Shard(mesh.get_local_rank(dim), mesh.size(dim), weight.shape[0])
    if shard.leaves_some_empty:
        return f"has {shard.classes} classes for {shard.ranks} ranks, which leave ranks without any"
    return Split(shard, dim, mesh.get_group(dim).group_name)


def layout(tensor: Any) -> str:
    """Return the layout of a DTensor as text."""
    return f"({', '.join(map(repr, tensor.placements))})"


def part_of_rank(tensor: Any, summed: int | None = None) -> Tensor:
    """Return a DTensor's local tensor.

    `summed` is a dimension of the device mesh. If it is given, DTensor adds the ranks' gradients of
    their local tensors over this dimension.
    """
    if summed is None:
        return tensor.to_local()  # type: ignore[no-any-return]
    from torch.distributed.tensor import Partial

    places = [Partial() if i == summed else p for i, p in enumerate(tensor.placements)]
    return tensor.to_local(grad_placements=places)  # type: ignore[no-any-return]


class Ranks(NamedTuple):
    """The ranks among which the classes of a loss are split.

    The ranks exchange statistics once per block of rows (tokens). For each row, a rank sends the
    log-sum-exp over its classes, and a loss. If the rank has the target's class, the loss is this
    log-sum-exp minus the target's logit. Otherwise the loss is 0. Ranks exchange no other data. All
    implementations of the loss op exchange log-sum-exps and losses in the same format. Blocks
    contain rows in the order that `counted_first` returns: first the rows that are not ignored,
    then the ignored rows. This order is the same on all ranks.
    """

    rank: int
    ranks: int
    height: int  # rows of a block
    owner: Tensor  # (N,) int32: the rank that has a row's target; any rank for a row without one
    gather: Callable[[Tensor], Tensor]  # (2, R), log-sum-exps and losses, to (P * 2, R)

    def meet(self, lse: Tensor, nll: Tensor, owner: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Exchange the log-sum-exps and losses of a block of rows with the other ranks.

        Return the log-sum-exps and losses over the classes of all ranks.
        """
        own = lse.new_zeros(2, rows)
        own[0, : lse.shape[0]], own[1, : lse.shape[0]] = lse, nll
        every = self.gather(own).view(self.ranks, 2, rows)[..., : lse.shape[0]]
        return merged(every[:, 0], every[:, 1], owner)


def merged(lse: Tensor, nll: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the log-sum-exps and losses of the P ranks, (P, ...) each, into log-sum-exps and losses
    over all classes.
    """
    whole = lse.logsumexp(0)
    own = lse.gather(0, owner.long().unsqueeze(0))[0]
    # For a target of high probability, this subtracts no two large numbers; a logit of -inf gives
    # loss inf.
    loss = nll.sum(0) + (lse - own).logsumexp(0)
    return whole, torch.where(own == -torch.inf, whole - own, loss)


def counted_first(target: Tensor) -> Tensor:
    """Return the order in which ranks process rows: first the rows that are not ignored, then the
    ignored rows.

    Implementations that leave out ignored rows use exactly this order.
    """
    return (target == IGNORED).to(torch.int8).sort(stable=True).indices


def own_columns(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return target columns in this rank's logits, and two masks: rows with targets on this rank,
    rows with targets on another rank.

    A row is one token. The ranks split the classes of an output projection. If another rank has a
    row's target, the first result contains an arbitrary column of this rank. For an ignored row,
    the first result contains `IGNORED`.
    """
    here, elsewhere = target >= 0, target <= ELSEWHERE
    return torch.where(elsewhere, ELSEWHERE - target, target), here, elsewhere


def check_counts(counts: Tensor, rows: int) -> None:
    """Raise an error on every rank if the ranks have different numbers of rows (tokens).

    `counts` contains each rank's number of rows, and `rows` is this rank's number.
    """
    same = (counts == rows).all()
    said = "linear_cross_entropy: ranks that share a head have different numbers of rows"
    needed = "Every rank of a tensor-parallel group needs the same batch. Give them the same data."
    if counts.device.type == "cuda":
        compat.assert_on_device(same, f"{said}. {needed}")
    elif not bool(same):
        listed = ", ".join(map(str, counts.tolist()))
        raise UnsupportedInputError(f"{said} ({listed}). {needed}")
