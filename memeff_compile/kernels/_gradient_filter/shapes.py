"""The sizes of groups of rows (tokens) and tiles, and launch options, for the gradient filters.

A gradient filter drops unlikely classes from a loss's gradients. Loops over blocks of rows use
these sizes for a call with a filter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .._head_loss.shapes import MIB
from ..device import gpu, processors

# Classes of a sample: targets of some rows, and classes that are spread over the vocabulary.
LIKELY = SPREAD = 1024
# Rows whose logits of the sample exist at one time.
SAMPLED_ROWS = 2048
# Rows that a program checks; classes of which one writes the words, and tiles that one lists.
CHECKED, WORDS, LISTED = 128, 512, 512
# Features of a row that a program of the sum of dE reads at a time.
SUMMED = 1024
# Groups of rows in a block of rows under a gradient filter; each group has one bit of a 16-bit
# word.
FILTER_GROUPS = 16
# Bytes of a loop over blocks if the workspace is automatic; the most of them for sums of dE, unless
# a single sum takes more; the fewest for packed tiles.
FILTER_BYTES = 132 * MIB
FILTER_SUMS_BYTES = 32 * MIB
FILTER_LEAST_BYTES = 8 * MIB
# Shares of a group's tiles: so many items of dE for a program.
FILTER_ITEMS = 4


class FilterShapes(NamedTuple):
    """Tiles, warps and pipeline stages of the gradient filters' kernels on one kind of GPU.

    A gradient filter drops unlikely classes from a loss's gradients. The filter chooses these
    classes separately for each group of `rows` rows (tokens). To choose the classes, the filter
    computes logits in tiles of `columns` classes. The hidden states' gradient (dE) is a matrix
    product in tiles of `rows` tokens x `product_columns` features. The weight's gradient (dC) is a
    matrix product, whose tiles have `product_columns` features too. For dC, `rows` is the number of
    classes in a tile. A multiprocessor runs `per_processor` programs that compute products at the
    same time. If there are two, one multiplies while the other reads and writes dC.
    """

    rows: int
    columns: int
    product_columns: int
    step: int
    warps: tuple[int, int]  # of logits, and of packed tiles
    stages: tuple[int, int, int]  # of logits, of packed logits, and of products
    programs: int
    per_processor: int = 2
    is_interpreted: bool = False
    flatten: bool = False

    def _constants(self, columns: int, warps: int, stages: int) -> dict[str, Any]:
        return {
            "BN": columns,
            "BK": self.step,
            "UPCAST": self.is_interpreted,
            "num_warps": warps,
            "num_stages": stages,
        }

    def scoring(self) -> dict[str, Any]:
        """Return the compile-time constants and launch options of the kernel that computes, for
        each class, the sum or the maximum of its probabilities in a group of rows (tokens).

        The gradient filter leaves a class out of a loss's gradients if this number, the score, is
        low.
        """
        return {
            **self._constants(self.columns, self.warps[0], self.stages[0]),
            "FLATTEN": self.flatten,
        }

    def filling(self) -> dict[str, Any]:
        """Return the compile-time constants and launch options of the kernel that computes the
        logits' gradients.

        The gradient filter drops unlikely classes. The kernel computes only the tiles (rows x
        classes) in which the filter keeps a class.
        """
        return self._constants(self.rows, self.warps[1], self.stages[1])

    def multiplying(self) -> dict[str, Any]:
        """Return the compile-time constants and launch options of the kernel that multiplies the
        logits' gradients by the weight and by the hidden states."""
        parts = 4 if self.product_columns >= 256 else 2
        columns = self.product_columns
        return {**self._constants(columns, self.warps[1], self.stages[2]), "PARTS": parts}


@lru_cache(maxsize=64)
def filter_shapes_for(device: torch.device) -> FilterShapes:
    """Return the tile shapes with which a loss with a gradient filter runs on a device.

    A gradient filter drops unlikely classes from a loss's gradients. The kernels compute the
    logits, and the gradients of logits, hidden states and weight, tile by tile. Without CUDA, the
    shapes are small ones for Triton's interpreter.
    """
    if device.type != "cuda":
        return FilterShapes(32, 64, 64, 16, (4, 4), (1, 1, 1), 2, 1, is_interpreted=True)
    return filter_shapes_of(processors(device), is_hopper=gpu(device).is_hopper)


def filter_shapes_of(programs: int, *, is_hopper: bool) -> FilterShapes:
    """Return the tile shapes with which a loss with a gradient filter runs on a GPU.

    A gradient filter drops unlikely classes from a loss's gradients. The kernels compute the
    logits, and the gradients of logits, hidden states and weight, tile by tile. `programs` is the
    GPU's number of multiprocessors. `is_hopper` says whether its compute capability is 9.0.
    """
    if is_hopper:
        return FilterShapes(128, 256, 128, 64, (8, 4), (3, 3, 5), programs, flatten=True)
    return FilterShapes(128, 128, 128, 32, (8, 4), (3, 3, 3), programs, 1)


def filter_rows(rows: int, tile: int) -> int:
    """Return how many rows (tokens) a block has in a call with `rows` rows and a gradient filter.

    The filter drops unlikely classes in each group of `tile` rows, so the result is a multiple of
    `tile`. All blocks of a call have about the same number of rows.
    """
    tiles = max(-(-rows // tile), 1)
    blocks = -(-tiles // FILTER_GROUPS)
    return -(-tiles // blocks) * tile


def filter_fixed_bytes(height: Any, groups: Any, depth: int, vocab: int, sums: Any) -> Any:
    """Return the bytes of buffers for a loss's filtered gradients, except the logits' gradients.

    A gradient filter drops unlikely classes from the gradients. The loss computes its gradients in
    a loop over blocks of rows (tokens). The counted buffers contain:

    - the classes' scores: sums or maxima of their probabilities in each group of rows;
    - for each class, a word with a bit per group of rows, and the sorted order of these words;
    - two copies of hidden-state rows, and partial sums for the hidden states' gradient (dE);
    - for each row and each level (a score below which the filter drops classes), the sum of the
      probabilities that the row would lose.
    """
    return (4 * groups + 40) * vocab + 4 * height * depth + sums + 16384 * (groups + 256)


def filter_capacity(
    rows: int, depth: int, vocab: int, itemsize: int, workspace: int, splits: int, tile: int
) -> int:
    """Return how many tiles of the logits' gradients are in memory at one time.

    A tile contains the gradients for `tile` rows (tokens) and `tile` classes. A gradient filter
    drops unlikely classes, and only tiles with a kept class are stored.
    """
    groups = rows // tile
    taken = filter_fixed_bytes(rows, groups, depth, vocab, 4 * splits * rows * depth)
    budget = max(workspace or FILTER_BYTES - taken, FILTER_LEAST_BYTES)
    return max(min(budget // (itemsize * tile * tile), groups * -(-vocab // tile)), 1)


def filter_splits(rows: int, depth: int, groups: int, shapes: FilterShapes) -> int:
    """Return among how many programs the sum for one tile of the hidden states' gradient (dE) is
    divided.
    """
    items = groups * -(-depth // shapes.product_columns)
    fitting = FILTER_SUMS_BYTES // (4 * rows * depth)
    return max(1, min(-(-FILTER_ITEMS * shapes.programs // items), fitting))
