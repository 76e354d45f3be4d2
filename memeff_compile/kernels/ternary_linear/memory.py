"""The bytes that a ternary linear layer saves for the backward pass, without and with the op
`memeff::ternary_linear_product`.

The formulas are in N (rows of the weight), K (columns of the weight) and M (tokens). The formulas
count the tensors that the forward pass saves for the backward pass.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size


def saved_before(rows: Size, columns: Size, tokens: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes that autograd saves in the model's own code, without this package's op.

    Autograd saves the dequantised weight (N, K) and the dequantised input (M, K).
    """
    return dtype.itemsize * sympy.sympify(columns) * (sympy.sympify(rows) + tokens)


def saved_after(rows: Size, columns: Size, tokens: Size) -> sympy.Expr:
    """Return the bytes of the tensors that the op saves for its backward pass.

    The op `memeff::ternary_linear_product` saves the packed weight, the int8 input and the input's
    scales. In the packed weight and the int8 input, the number of columns is rounded up to a
    multiple of 16.
    """
    padded = 16 * sympy.ceiling(sympy.sympify(columns) / 16)
    return sympy.sympify(rows) * padded / 4 + sympy.sympify(tokens) * (padded + 4)


def packed_bytes(rows: Size, columns: Size) -> sympy.Expr:
    """Return the bytes of a packed (2-bit) weight."""
    return 4 * sympy.sympify(rows) * sympy.ceiling(sympy.sympify(columns) / 16)
