"""The bytes that an embedding's gradient needs without and with this package's ops.

The formulas use N (tokens looked up), D (hidden size) and V (table rows). The formulas do not count
the inputs, nor the one returned gradient of the table.
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
    compiled: bool = True,  # compiled by Inductor, or run op by op
    # rows of a rank if DTensor splits the table by rows and no output projection that shares the
    # weight gives a gradient
    held: Size | None = None,
) -> sympy.Expr:
    """Return the bytes of the V x D buffers that the embedding's gradient needs without the op
    `memeff::embedding`.

    Inductor scatters the gradient into an fp32 buffer (fp64 for fp64 inputs). Inductor then adds
    this buffer to the output projection's gradient, or rounds the buffer into a second one, which
    is returned. Without Inductor, the gradient is one V x D tensor of the table's dtype. With
    DTensor, each rank's gradient has the rows of all ranks.
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
    # bytes of the partial sums: a symbol for a short formula, or by default those of `piece_bytes`
    pieces: sympy.Expr | None = None,
) -> sympy.Expr:
    """Return an upper bound of the bytes that the embedding's gradient needs with the op
    `memeff::embedding`: partial sums, sorted ids and index vectors.
    """
    if pieces is None:
        pieces = piece_bytes(tokens, depth, dtype=dtype, engine=engine)
    return pieces + INDEX_BYTES_PER_TOKEN * sympy.sympify(tokens)


def piece_bytes(tokens: Size, depth: Size, *, dtype: torch.dtype, engine: str) -> sympy.Expr:
    """Return the most bytes that partial sums of the embedding's gradient take at any one time.

    The implementation `sorted` has two fp32 partial sums per chunk of 32 tokens. The implementation
    `reference` sums a block of columns at a time. `reference` has four fp32 matrices (fp64 for fp64
    inputs) with one row per token and the columns of one block.
    """
    n, d = sympy.sympify(tokens), sympy.sympify(depth)
    if engine == "sorted":
        return 8 * d * sympy.ceiling(n / 32)
    per_column = PIECES * max(dtype.itemsize, 4) * n
    columns = sympy.Min(d, sympy.Max(MIN_COLUMNS, sympy.floor(PIECE_BYTES / per_column)))
    return per_column * columns
