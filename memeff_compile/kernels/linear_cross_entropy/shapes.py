"""Tile shapes per GPU, and how much of the logits the engines hold at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..device import processors
from .pieces import MIB

# Forward: bytes of statistics, and of gathered rows, for one group of rows.
FORWARD_BYTES = int(7.5 * MIB)

# Backward, automatic workspace. 13.5 KiB per row is a piece of 6912 columns in 16 bits.
FUSED_AUTO_BYTES = 64 * MIB
FUSED_AUTO_BYTES_PER_ROW = 13824
# The narrowest piece; a smaller workspace is exceeded rather than refused.
FUSED_MIN_WIDTH = 256


# A workspace of at most this much is spent on vectors and one narrow piece; sums and pieces then
# live inside the weight gradient, where it is wide enough.
MINIMAL_BYTES = 8 * MIB
SPARE_BYTES = 4 * MIB
# The widest piece of G inside the weight gradient, as a share of the budget outside it.
INSIDE_WIDTH = 3072


class Shapes(NamedTuple):
    """Tiles, warps and pipeline stages of the fused kernels on one kind of GPU.

    `rows` x `columns` is an output tile and `step` a step along the summed axis. `programs` is how
    many run at a time: one per multiprocessor.
    """

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    flatten: bool
    programs: int
    is_interpreted: bool = False

    def constants(self, columns: int) -> dict[str, Any]:
        """Return the constants of a kernel whose tiles are of so many columns, and its launch."""
        return {
            "BM": self.rows,
            "BN": columns,
            "BK": self.step,
            "UPCAST": self.is_interpreted,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    def gradient_columns(self, *, is_plain: bool) -> int:
        """Return how wide a tile of G is: a softcap, a bias or gathered rows take registers."""
        return self.columns if is_plain else self.rows


@lru_cache(maxsize=64)
def shapes_for(device: torch.device) -> Shapes:
    """Return the tile shapes for a GPU, or small ones for Triton's interpreter off CUDA."""
    if device.type != "cuda":
        return Shapes(32, 64, 16, 4, 1, False, 2, is_interpreted=True)
    return shapes_for_programs(processors(device))


def shapes_for_programs(programs: int) -> Shapes:
    """Return the tile shapes for compute capability 9.0, where they were measured."""
    return Shapes(128, 256, 64, 8, 3, True, programs)


class RowGroups(NamedTuple):
    """How forward walks over the rows: `total` groups of `size` rows each, the last one shorter."""

    size: int
    total: int


def row_groups(rows: int, fitting: int, shapes: Shapes) -> RowGroups:
    """Cut the rows into groups of at most `fitting`, in even shares of whole row blocks."""
    blocks = -(-rows // shapes.rows)
    count = -(-blocks // max(1, fitting // shapes.rows))
    return RowGroups(-(-blocks // count) * shapes.rows, count)


@lru_cache(maxsize=1024)
def piece_width(rows: int, depth: int, vocab: int, workspace: int, shapes: Shapes) -> int:
    """Choose how many columns of G backward holds at once.

    Within the budget, and at most half the vocabulary, the width whose launches leave the fewest
    multiprocessors idle in their last waves. A workspace of 0 is automatic.
    """
    step = shapes.columns
    budget = workspace or max(FUSED_AUTO_BYTES, FUSED_AUTO_BYTES_PER_ROW * rows)
    limit = budget // (2 * max(rows, 1))
    limit = min(max(limit // step * step, FUSED_MIN_WIDTH, step), -(-vocab // (2 * step)) * step)
    coarse = step * -(-limit // (step * 64))
    candidates = range(limit, max(limit // 2, step - 1), -coarse)
    return min(candidates, key=lambda width: _units(rows, depth, vocab, width, shapes))


def _units(rows: int, depth: int, vocab: int, width: int, shapes: Shapes) -> float:
    """Model the time of backward, in steps of one output tile along the summed axis."""
    whole, rest = divmod(vocab, width)
    units = whole * _piece_units(rows, depth, width, shapes)
    return units + (_piece_units(rows, depth, rest, shapes) if rest else 0)


def _piece_units(rows: int, depth: int, width: int, shapes: Shapes) -> float:
    row_blocks = -(-rows // shapes.rows)
    depth_blocks = -(-depth // shapes.columns)
    # The epilogue of a tile of G costs about as much as 256 steps of its sum.
    logits = -(-row_blocks * -(-width // shapes.columns) // shapes.programs) * (depth + 256)
    weight_tiles = -(-width // shapes.rows) * depth_blocks
    hidden_tiles = row_blocks * depth_blocks
    last = 0
    for program in {0, weight_tiles % shapes.programs}:
        mine = -(-(weight_tiles - program) // shapes.programs)
        both = -(-(weight_tiles + hidden_tiles - program) // shapes.programs)
        last = max(last, mine * rows + (both - mine) * width)
    # Two launches, and the hidden gradient read and written once more.
    return logits + last + 200


def is_minimal(workspace: int) -> bool:
    """Say whether a workspace is too small for anything but the minimal mode."""
    return 0 < workspace <= MINIMAL_BYTES


class Room(NamedTuple):
    """Where a minimal backward works: the rows of the weight gradient from `first_column` on.

    Example: with 8 rows of 4 features, columns of G take twice the bytes of columns of the weight
    gradient, so a piece that ends at the last column leaves room for one third of what is left.
    """

    first_column: int
    width: int  # columns of G at a time
    spare_width: int  # columns of G outside, for the last of them
    rows: int
    depth: int
    vocab: int
    step: int

    def retreating_width(self, first: int) -> int:
        """Return how many columns fit before the G of theirs at the very end, or 0."""
        width = int((self.vocab - first) * self.depth / (self.depth + self.rows))
        return width // self.step * self.step


def room_inside(
    rows: int, depth: int, vocab: int, shapes: Shapes, *, needs_hidden: bool
) -> Room | None:
    """Plan a backward inside the weight gradient, or return None where that is too small."""
    step = shapes.columns
    sums = 2 * rows if needs_hidden else 0  # columns that fp32 sums of the hidden gradient take
    half = vocab // 2 // step * step
    width = min((half - sums) * depth // rows // step * step, INSIDE_WIDTH // step * step)
    if width < step:
        return None
    taken = sums + -(-rows * width // depth)
    first = (vocab - taken) // step * step
    spare = max(SPARE_BYTES // (2 * rows) // step * step, step)
    return Room(first, width, spare, rows, depth, vocab, step)
