"""Settings of the gradient filters, which drop unlikely classes from a loss's gradients.

The functions say which threshold a filter has, in which calls it drops classes, and how many bytes
it needs. The module `filtered` computes gradients with these filters.
"""

from __future__ import annotations

import math

import sympy

from .._head_loss.shapes import MIB
from .shapes import (
    FILTER_BYTES,
    FILTER_GROUPS,
    FILTER_LEAST_BYTES,
    FILTER_SUMS_BYTES,
    filter_fixed_bytes,
)

# The values that memeff.linear_cross_entropy may take.
GRADIENT_FILTERS = ("exact", "mass", "block", "published")
# The gradients for which a filter drops classes: both, the hidden states', or the weight's.
FILTER_PARTS = ("both", "hidden", "weight")
# eps of `block`, as the paper's code chooses it: the spacing of bf16 at 1, over 32.
BLOCK_EPS = 2.0**-12
# tau of `mass`: at most 1/64 of a row's softmax.
MASS_TAU = 2.0**-6
# If rows of the weight are shorter, the filter takes longer than the products that it saves: with
# 896 features it took 12.6 ms, and `exact` 10.0 ms (`nvidia-h200/filters-without-logits.txt`).
LEAST_DEPTH = 2048
# Levels that `mass` tries, from its tau down to a thousandth of that; `block` has one. The last
# level is above all scores, and so gives the sum of a row.
LEVELS, STEP = 32, 0.3125
# The summed numbers were rounded to bf16; this factor of the bound allows for the rounding error.
ROUNDING = 1.0 - 2.0**-8


def filter_fault(gradient_filter: str, level: float, parts: str) -> str | None:
    """Return the reason why a gradient filter's settings are not supported, or None if they are."""
    if gradient_filter not in GRADIENT_FILTERS:
        return (
            f"gradient_filter is {gradient_filter!r}; known filters are "
            f"{', '.join(GRADIENT_FILTERS)}. Use 'exact'."
        )
    if not 0 <= level < math.inf:
        return f"filter_level is {level}; it must be positive and finite, or 0 for automatic."
    if parts not in FILTER_PARTS:
        return f"filter_parts is {parts!r}; known parts are {', '.join(FILTER_PARTS)}."
    return None


def filter_level(gradient_filter: str, level: float) -> float:
    """Return the threshold of a gradient filter: `level`, or the filter's default if `level` is 0.

    A gradient filter drops unlikely classes from a loss's gradients. For the filter `mass`, the
    threshold is tau: the largest total probability of the classes dropped in a row (token). For the
    other filters, the threshold is eps. The filter `block` drops a class only if the class's
    probability is below eps in every row of a group. The filter `published` compares
    |probability - 1(target)| with eps. With a softcap, all filters first multiply each probability
    by the slope of the cap (at most 1)."""
    if level > 0:
        return level
    return MASS_TAU if gradient_filter == "mass" else BLOCK_EPS


def leaves_out(gradient_filter: str, depth: int) -> bool:
    """Return whether a gradient filter drops unlikely classes if the hidden size is `depth`.

    A gradient filter drops these classes from a loss's gradients. `gradient_filter` is the filter's
    name, one of `GRADIENT_FILTERS`. The filter `exact` drops no class. If the hidden size is below
    `LEAST_DEPTH` or is not a multiple of 8, no filter drops classes. At small hidden sizes,
    filtering would take longer than the matrix products that it saves. The function assumes that
    the output projection's weight is bf16 and contiguous.
    """
    return gradient_filter != "exact" and depth >= LEAST_DEPTH and depth % 8 == 0


def needs_two_walks(gradient_filter: str, depth: int, *, of_bias: bool = False) -> bool:
    """Return whether a filter must know each row's log-sum-exp before it drops unlikely classes.

    A gradient filter drops these classes from a loss's gradients. `depth` is the hidden size. The
    filter `published` needs the log-sum-exp, because it compares probabilities. Every filter needs
    the log-sum-exp if a bias has a gradient, because the bias gradient is always exact.
    """
    is_filtered = leaves_out(gradient_filter, depth)
    return is_filtered and (gradient_filter == "published" or of_bias)


def filter_bytes(rows: sympy.Expr, depth: int, vocab: int, workspace: int) -> sympy.Expr:
    """Return an upper bound of the bytes that a gradient filter needs.

    The filter drops unlikely classes from a loss's gradients. Its score of a class is the sum or
    the maximum of the class's probabilities in a group of rows (tokens). The bound includes these
    scores, and the logits' gradients of the tiles (128 rows x 128 classes) that the filter keeps.
    It also includes the buffer in which programs sum the hidden states' gradient (dE) over classes,
    and the indices of sorted rows and classes.
    """
    tile = 128
    height = sympy.Min(FILTER_GROUPS * tile, sympy.ceiling(rows / tile) * tile)
    groups = height / tile
    # However many programs share a sum of dE, sums and packed tiles have this much together.
    sums = sympy.Max(FILTER_SUMS_BYTES, 4 * height * depth)
    fixed = filter_fixed_bytes(height, groups, depth, vocab, sums)
    packed = max(workspace, FILTER_LEAST_BYTES)
    whole = fixed + packed if workspace else sympy.Max(FILTER_BYTES, fixed + packed)
    # One tile of each group may exceed the packed ones; lists of tiles; numbers per row.
    return whole + 2 * groups * tile**2 + 16 * groups * (vocab / tile + 4) + 64 * rows + 4 * MIB
