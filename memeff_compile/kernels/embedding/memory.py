"""Bytes before and after, as formulas in N (tokens looked up), D (hidden size) and V (table rows).

They count the memory besides the inputs and the one gradient of the table that is returned.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size
from .reference import MIN_COLUMNS, PIECE_BYTES, PIECES

# Sorted ids and their order, the sort's buffers and the engines' index vectors: 64-bit numbers.
INDEX_BYTES_PER_TOKEN = 96


def bytes_before(
    vocab: Size,  # V, D as symbols or numbers
    depth: Size,  # likewise
    *,
    dtype: torch.dtype,  # dtype of the table
    compiled: bool = True,  # by Inductor, or run op by op
    # rows that a rank has of a table that DTensor cuts by rows, of which no head gives a gradient
    held: Size | None = None,
) -> sympy.Expr:
    """Return the bytes of the V x D buffers that the embedding's gradient takes without this op.

    Inductor scatters it into an fp32 buffer (fp64 for fp64) and adds that to the head's gradient or
    rounds it, in a buffer that is returned. Run op by op, it is a tensor of the table's dtype.
    DTensor returns the rows of all ranks.
    """
    v, d = sympy.sympify(vocab), sympy.sympify(depth)
    itemsize = max(dtype.itemsize, 4) if compiled else dtype.itemsize
    buffer = sympy.Integer(itemsize) * v * d
    if held is None:
        return buffer
    rounded = dtype.itemsize * v * d if itemsize > dtype.itemsize else 0
    return buffer + rounded - dtype.itemsize * sympy.sympify(held) * d


def bytes_after(
    tokens: Size,  # N, D as symbols or numbers
    depth: Size,  # likewise
    *,
    dtype: torch.dtype,  # dtype of the table
    engine: str,  # "sorted" or "reference", as `engine_for` says
    # bytes of the pieces, as a symbol for a short formula; by default the result of `piece_bytes`
    pieces: sympy.Expr | None = None,
) -> sympy.Expr:
    """Return an upper bound of the bytes that the sums take: pieces, sorted ids, index vectors."""
    if pieces is None:
        pieces = piece_bytes(tokens, depth, dtype=dtype, engine=engine)
    return pieces + INDEX_BYTES_PER_TOKEN * sympy.sympify(tokens)


def piece_bytes(tokens: Size, depth: Size, *, dtype: torch.dtype, engine: str) -> sympy.Expr:
    """Return the bytes of the sums that are alive at once.

    Engine `sorted`: two partial sums per chunk of 32 tokens, in fp32. Engine `reference`: some
    columns of four fp32 matrices of N rows (fp64 for fp64).
    """
    n, d = sympy.sympify(tokens), sympy.sympify(depth)
    if engine == "sorted":
        return 8 * d * sympy.ceiling(n / 32)
    per_column = PIECES * max(dtype.itemsize, 4) * n
    columns = sympy.Min(d, sympy.Max(MIN_COLUMNS, sympy.floor(PIECE_BYTES / per_column)))
    return per_column * columns
