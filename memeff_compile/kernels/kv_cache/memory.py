"""Return bytes before and after the rewrite, as formulas in B (sequences), H (query heads), N, M
and D.

N is the length of the cache, M the number of queries, D the head dimension; all may be symbols or
numbers. The formulas leave out the cache, the queries and the output.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size


def bytes_before(
    batch: Size, heads: Size, keys: Size, depth: Size, *, dtype: torch.dtype
) -> sympy.Expr:
    """Return the bytes of the copies of keys and values that repeat_kv makes for query heads."""
    elements = sympy.sympify(batch) * heads * keys * depth
    return sympy.Integer(2 * dtype.itemsize) * elements


def bytes_after(
    batch: Size, heads: Size, queries: Size, depth: Size, *, splits: Size
) -> sympy.Expr:
    """Return the bytes of the fp32 partial results that the programs of each row write.

    `splits_for` is the number of programs per row; a single program writes no partial result.
    """
    if splits == 1:
        return sympy.Integer(0)
    rows = sympy.sympify(batch) * heads * queries
    return 4 * sympy.sympify(splits) * rows * (sympy.sympify(depth) + 2)
