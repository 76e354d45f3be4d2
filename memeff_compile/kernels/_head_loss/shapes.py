"""Sizes that all losses share, such as how many elements one program reads at a time, and functions
that divide an axis into ranges.

The letters for axes are: N rows (tokens), D hidden size, V vocabulary (classes), R rows of a block,
W classes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

MIB = 2**20
# Targets that a program reads at a time to list the rows that are not ignored; rows for which a
# program gathers the numbers of their gradients.
LISTED = 2048
GATHERED = 512
# Elements that a program scales at a time, and programs per multiprocessor.
SCALED = 4096
SCALING_PROGRAMS = 8
# Elements that are converted to fp32 at a time if a gradient is scaled without the kernel, outside
# a compiled graph.
CHUNK = 1 << 22


def spans(first: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Split [first, stop) into ranges of `width` elements; the last range may be shorter."""
    for start in range(first, stop, width):
        yield start, min(start + width, stop)


def window(buffer: Tensor, rows: int, width: int) -> Tensor:
    """Return the first elements of a flat buffer as a contiguous (rows, width) matrix."""
    return buffer[: rows * width].view(rows, width)


class Tiles(Protocol):
    """The tile sizes of a loss implementation, and whether Triton's interpreter runs its kernels.

    The function `copy_rows`, which copies rows of hidden states, reads these properties.
    """

    @property
    def rows(self) -> int:
        """Return the number of rows of a tile."""

    @property
    def step(self) -> int:
        """Return how many terms a matrix product's loop adds to each sum in one iteration."""

    @property
    def is_interpreted(self) -> bool:
        """Return whether Triton's interpreter runs the kernels."""


def row_block(depth: int, shapes: Tiles) -> int:
    """Return how many features a program reads at a time from a row of hidden states or of the
    weight."""
    return 16 if shapes.is_interpreted else min(4096, 1 << (depth - 1).bit_length())
