"""The bytes of a linear layer's weight without and with compression.

The formulas are in N (rows of the weight) and K (columns of the weight).
"""

from __future__ import annotations

import sympy

from ..sizes import Size


def bytes_before(rows: Size, columns: Size, itemsize: int = 2) -> sympy.Expr:
    """Return the bytes of the decoded weight, which autograd keeps unless the backward pass decodes
    the weight again."""
    return itemsize * sympy.sympify(rows) * columns


def bits_per_weight(nbytes: int, count: int) -> float:
    """Return how many bits one element of a weight takes, counting all tensors that encode the
    weight."""
    return 8 * nbytes / count
