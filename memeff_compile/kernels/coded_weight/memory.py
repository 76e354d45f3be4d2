"""Bytes before and after, as formulas in N (rows of the weight) and K (its columns)."""

from __future__ import annotations

import sympy

from ..sizes import Size


def bytes_before(rows: Size, columns: Size) -> sympy.Expr:
    """Return the bytes of the decoded weight, which autograd keeps if it is not decoded again."""
    return 2 * sympy.sympify(rows) * columns


def bits_per_weight(nbytes: int, count: int) -> float:
    """Return the bits per weight, all parts counted."""
    return 8 * nbytes / count
