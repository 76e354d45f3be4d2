"""What ranks that hold parts of a head's classes tell each other of a row, and what comes of it.

Of each row a rank has the log-sum-exp of its own classes, and the loss of the target among them: 0
where another rank has the target. That is all the others need, in one dtype and one order, whatever
engine made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# A row's target, to an engine that has some of the classes: its column, or one of these. Of a row
# whose target another rank has it is ELSEWHERE less a column that is about as likely as any.
IGNORED = -1
ELSEWHERE = -2


class Ranks(NamedTuple):
    """The ranks that an engine meets once per piece of rows, of which each has as many.

    Pieces are of rows in the order of `counted_first`.
    """

    rank: int
    ranks: int
    height: int  # rows of a piece
    owner: Tensor  # (N,) int32: the rank that has a row's target; any, where there is none
    gather: Callable[[Tensor], Tensor]  # (2, R), log-sum-exps and losses, to (P * 2, R)

    def meet(self, lse: Tensor, nll: Tensor, owner: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return log-sum-exps and losses of the whole head, of a piece of so many rows or fewer."""
        said = lse.new_zeros(2, rows)
        said[0, : lse.shape[0]], said[1, : lse.shape[0]] = lse, nll
        every = self.gather(said).view(self.ranks, 2, rows)[..., : lse.shape[0]]
        return merged(every[:, 0], every[:, 1], owner)


def merged(lse: Tensor, nll: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps and losses of the whole head from those of all ranks, (P, ...) each."""
    whole = lse.logsumexp(0)
    own = lse.gather(0, owner.long().unsqueeze(0))[0]
    # No difference of two large numbers for a confident target; a class at -inf loses inf.
    loss = nll.sum(0) + (lse - own).logsumexp(0)
    return whole, torch.where(own == -torch.inf, whole - own, loss)


def counted_first(target: Tensor) -> Tensor:
    """Return the order in which ranks meet over rows: those that count, then ignored ones.

    Engines that leave ignored rows out have them in this order and no other.
    """
    return (target == IGNORED).to(torch.int8).sort(stable=True).indices


def own_columns(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a column for each row that counts, and where the target is here or elsewhere."""
    here, elsewhere = target >= 0, target <= ELSEWHERE
    return torch.where(elsewhere, ELSEWHERE - target, target), here, elsewhere
