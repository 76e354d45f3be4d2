"""The bytes that attention needs without the op `memeff::attention`, and with the op.

The formulas use B (sequences), H (query heads), M (queries), N (keys) and D (head dimension). Each
of these letters may be a symbol or a number. The formulas do not count q, k, v, the output and the
gradients.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size


def bytes_before(
    batch: Size, heads: Size, queries: Size, keys: Size, *, dtype: torch.dtype
) -> sympy.Expr:
    """Return the bytes of one buffer of scores or softmax weights.

    Attention without the op `memeff::attention` builds several such buffers.
    """
    return dtype.itemsize * sympy.sympify(batch) * heads * queries * keys


def mask_bytes(batch: Size, queries: Size, keys: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes of a dense mask of all sequences, such as 32 MiB for 8 times 2048 x 2048
    booleans."""
    return dtype.itemsize * sympy.sympify(batch) * queries * keys


def bytes_after(batch: Size, heads: Size, queries: Size) -> sympy.Expr:
    """Return the bytes that the forward pass saves for the backward pass in addition to its output:
    the log-sum-exp in fp32.
    """
    return 4 * sympy.sympify(batch) * heads * queries


def backward_bytes(batch: Size, heads: Size, queries: Size) -> sympy.Expr:
    """Return the bytes that the backward pass allocates in addition to the gradients: two fp32
    numbers per query.

    The formula omits two small amounts. On Hopper, large calls round the number of queries up to a
    multiple of 128. Calls with sequence ids or a mask of keys need a table while a kernel runs.
    Each program of a Triton kernel has its own tile of queries or of keys. The table of a Triton
    kernel tells which tiles to combine with a program's own tile. That table has 16 bytes per own
    tile and sequence. The table of a kernel in Gluon tells which keys each query sees, or which
    queries see each key. The table of a kernel in Gluon has about 16 bytes per position of each
    sequence, rounded up to a multiple of 128 positions. All heads share this table. The kernels in
    Gluon need at least 16 heads, so their table has at most about 13 % of the bytes that this
    function returns.
    """
    return 8 * sympy.sympify(batch) * heads * queries
