"""The bytes that a gated MLP's backward pass needs without and with this package's op.

The formulas are in N (tokens) and I (intermediate size). The formulas count the tensors of size (N,
I) that exist at once during a part of the backward pass. This part computes the product and the
gradients of gate and up.
"""

from __future__ import annotations

import sympy
import torch

from ..sizes import Size


def bytes_before(tokens: Size, inner: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes of the three inputs and the three results of Inductor's fused kernel."""
    return 6 * transient_bytes(tokens, inner, dtype=dtype)


def bytes_after(tokens: Size, inner: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes of the three buffers that the in-place kernel reads and writes."""
    return 3 * transient_bytes(tokens, inner, dtype=dtype)


def transient_bytes(tokens: Size, inner: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes that an op needs while it runs, in addition to its arguments and results.

    The forward pass needs a buffer for the product. The backward pass needs a buffer for the
    product's gradient, over which the kernel writes the product.
    """
    return dtype.itemsize * sympy.sympify(tokens) * sympy.sympify(inner)
