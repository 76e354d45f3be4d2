"""Bytes before and after, as formulas in N (rows), K (columns) of a weight and M tokens.

They count what a linear keeps from its forward for its backward.
"""

from __future__ import annotations

from typing import TypeAlias

import sympy
import torch

Size: TypeAlias = sympy.Expr | int


def saved_before(rows: Size, columns: Size, tokens: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes of the dequantised weight and input that autograd keeps.

    Example: saved_before(4096, 4096, 8192, dtype=torch.bfloat16) == 2 * 4096 * (4096 + 8192).
    """
    return dtype.itemsize * sympy.sympify(columns) * (sympy.sympify(rows) + tokens)


def saved_after(rows: Size, columns: Size, tokens: Size) -> sympy.Expr:
    """Return the bytes of packed weight, int8 input and its scales that the op keeps.

    Columns count up to a multiple of 16.

    Example: saved_after(4096, 4096, 8192) == 4096 * 4096 // 4 + 8192 * (4096 + 4).
    """
    padded = 16 * sympy.ceiling(sympy.sympify(columns) / 16)
    return sympy.sympify(rows) * padded / 4 + sympy.sympify(tokens) * (padded + 4)


def packed_bytes(rows: Size, columns: Size) -> sympy.Expr:
    """Return the bytes of a packed weight.

    Example: packed_bytes(4096, 4096) == 1 << 22.
    """
    return 4 * sympy.sympify(rows) * sympy.ceiling(sympy.sympify(columns) / 16)
