"""Bytes before and after, as formulas in B (sequences), H (query heads), N, M and D.

N is the length of the cache, M the number of queries, D the head dimension. They count what lives
beside the cache, the queries and the output.
"""

from __future__ import annotations

from typing import TypeAlias

import sympy
import torch

Size: TypeAlias = sympy.Expr | int


def bytes_before(
    batch: Size, heads: Size, keys: Size, depth: Size, *, dtype: torch.dtype
) -> sympy.Expr:
    """Return the bytes of keys and values copied once per query head (repeat_kv).

    Args:
        batch, heads, keys, depth: B, H, N, D as symbols or numbers.
        dtype: dtype of the cache.

    Example: bytes_before(16, 32, 8192, 128, dtype=torch.bfloat16) == 2 << 30.
    """
    elements = sympy.sympify(batch) * heads * keys * depth
    return sympy.Integer(2 * dtype.itemsize) * elements


def bytes_after(
    batch: Size, heads: Size, queries: Size, depth: Size, *, splits: Size
) -> sympy.Expr:
    """Return the bytes of the shares that the programs of one row leave to be summed, in fp32.

    Args:
        batch, heads, queries, depth: B, H, M, D as symbols or numbers.
        splits: programs per row, as `splits_for` says; one leaves nothing behind.

    Example: bytes_after(16, 32, 1, 128, splits=5) == 4 * 5 * 16 * 32 * 130.
    """
    if splits == 1:
        return sympy.Integer(0)
    rows = sympy.sympify(batch) * heads * queries
    return 4 * sympy.sympify(splits) * rows * (sympy.sympify(depth) + 2)
