"""Bytes before and after, as formulas in B (sequences), H (query heads), M, N and D.

M is the number of queries, N that of keys, D the head dimension, as symbols or numbers. They count
what lives beside q, k, v, the output and the gradients.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size
from .mask_tiles import TILE


def bytes_before(
    batch: Size, heads: Size, queries: Size, keys: Size, *, dtype: torch.dtype
) -> sympy.Expr:
    """Return the bytes of one buffer of scores or weights, of which a chain builds several."""
    return dtype.itemsize * sympy.sympify(batch) * heads * queries * keys


def mask_bytes(batch: Size, queries: Size, keys: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes of a dense mask, one per sequence: 32 MiB for 8 times 2048 x 2048 truths."""
    return dtype.itemsize * sympy.sympify(batch) * queries * keys


def bytes_after(batch: Size, heads: Size, queries: Size) -> sympy.Expr:
    """Return the bytes that the forward keeps for the backward beside its output: the fp32 lse."""
    return 4 * sympy.sympify(batch) * heads * queries


def backward_bytes(batch: Size, heads: Size, queries: Size) -> sympy.Expr:
    """Return the bytes that the backward needs beside the gradients: two fp32 per query."""
    return 8 * sympy.sympify(batch) * heads * queries


def bounds_bytes(batch: Size, length: Size, *, tile: Size) -> sympy.Expr:
    """Return the bytes that say which tiles are visited, where masks or ids decide.

    They live during a kernel: four int32 per tile of queries (or keys) of a sequence, of which
    `length` is cut into tiles of so many places.
    """
    return 16 * sympy.sympify(batch) * sympy.ceiling(sympy.sympify(length) / tile)


def mask_tiles_bytes(batch: Size, heads: Size, queries: Size, keys: Size) -> sympy.Expr:
    """Return the bytes of the codes of a mask's tiles, kept for the backward.

    All are sizes of the mask, 1 where it is broadcast.
    """
    tiles = [sympy.ceiling(sympy.sympify(size) / TILE) for size in (queries, keys)]
    return sympy.sympify(batch) * heads * tiles[0] * tiles[1]


def lists_bytes(
    batch: Size, heads: Size, ours: Size, others: Size, *, tile: tuple[Size, Size]
) -> sympy.Expr:
    """Return the bytes of a kernel's lists of the tiles that it visits, under such a mask.

    Batch and heads are the mask's, 1 where it is broadcast; ours and others, and the places per
    tile, are of M and N, or of N and M in the kernel of the gradients of k and v.
    """
    counts = [
        sympy.ceiling(sympy.sympify(n) / size) for n, size in zip((ours, others), tile, strict=True)
    ]
    return 4 * sympy.sympify(batch) * heads * counts[0] * (3 + counts[1])
