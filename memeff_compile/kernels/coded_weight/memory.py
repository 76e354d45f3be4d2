"""Bytes before and after, as formulas in N (rows of the weight) and K (its columns)."""

from __future__ import annotations

from typing import TypeAlias

import sympy

Size: TypeAlias = sympy.Expr | int


def bytes_before(rows: Size, columns: Size) -> sympy.Expr:
    """Return the bytes of the decoded weight that a training step keeps for its backward."""
    return 2 * sympy.sympify(rows) * columns


def bytes_after(rows: Size, columns: Size) -> sympy.Expr:
    """Return the bytes of it that are kept when the backward decodes again: none."""
    del rows, columns
    return sympy.Integer(0)


def bits_per_weight(nbytes: int, count: int) -> float:
    """Return what a weight takes, all parts counted."""
    return 8 * nbytes / count
