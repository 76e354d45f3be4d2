"""The bytes that attention over a cache needs without and with this package's op.

The formulas use B (sequences), H (query heads), N (the cache's length), M (queries) and D (head
dimension). Each of these letters may be a symbol or a number. The formulas do not count the cache,
the queries and the output.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size


def bytes_before(
    batch: Size, heads: Size, keys: Size, depth: Size, *, dtype: torch.dtype
) -> sympy.Expr:
    """Return the bytes of the copies of keys and values that `repeat_kv` of transformers makes for
    the query heads."""
    elements = sympy.sympify(batch) * heads * keys * depth
    return sympy.Integer(2 * dtype.itemsize) * elements


def bytes_after(
    batch: Size, heads: Size, queries: Size, depth: Size, *, splits: Size
) -> sympy.Expr:
    """Return the bytes of the fp32 partial results that the kernel's programs write.

    `splits` is the result of `splits_for`, the number of programs among which the keys of a query
    are divided. If `splits` is 1, the kernel writes no partial result.
    """
    if splits == 1:
        return sympy.Integer(0)
    rows = sympy.sympify(batch) * heads * queries
    return 4 * sympy.sympify(splits) * rows * (sympy.sympify(depth) + 2)
