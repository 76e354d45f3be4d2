"""Loops over the blocks of rows (tokens) or classes of a loss op's call, in the order in which an
implementation computes the blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from .shapes import spans


class Block(NamedTuple):
    """A range of rows (tokens) or classes, from `first` up to but not including `stop`."""

    number: int
    first: int
    stop: int


class Walk(ABC):
    """A loop over the blocks of rows (tokens) or classes of a loss op's call.

    Subclasses compute the logits or the gradients of one block at a time.
    """

    extent: int  # rows or classes of the call
    step: int  # of a block

    def blocks(self) -> Iterator[Block]:
        """Yield the call's blocks of rows (tokens) or classes, in the order of computation."""
        for number, (first, stop) in enumerate(spans(0, self.extent, self.step)):
            yield Block(number, first, stop)

    @abstractmethod
    def results(self) -> Any:
        """Return the results that the caller of the loss op requested.

        Call this method after the last block of rows or classes was computed."""


class Statistics(Walk):
    """A loop that computes logits and, for each row (token), statistics of the logits.

    The rows' losses are computed from these statistics, such as the log-sum-exp of a row's logits.
    """

    @abstractmethod
    def statistics(self, block: Block) -> None:
        """Compute the logits of a block, and update the statistics of the logits of each row.

        A block is a range of rows (tokens) or classes. The losses are computed from these
        statistics, such as the log-sum-exp of a row's logits.
        """


class Differentiating(Walk):
    """A loop that computes the gradients of a loss op.

    Some loops for gradients also compute the loss of each row (token). A gradient filter drops
    classes whose logits have small gradients. If a loop that computes losses has no gradient
    filter, the loop computes the losses and the gradients from the same logits. All other loops for
    gradients compute the logits again.
    """

    @abstractmethod
    def gradients(self, block: Block) -> None:
        """Compute the gradients of a block's logits, and add the block's contributions to the
        gradients of hidden states and weight.

        These contributions are products of the logits' gradients with the weight, and with the
        hidden states. A block is a range of rows (tokens) or classes.
        """
