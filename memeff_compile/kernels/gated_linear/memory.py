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
    """Return the bytes of a gated MLP's backward pass without the op `memeff::gated_linear`.

    The formula counts only tensors of size (N, I): N tokens by the intermediate size I. Without the
    op, Inductor's fused kernel reads three tensors: gate, up and the gradient of the product
    act(gate) * up. The kernel writes three further tensors: the product and the gradients of gate
    and up.
    """
    return 6 * transient_bytes(tokens, inner, dtype=dtype)


def bytes_after(tokens: Size, inner: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes of a gated MLP's backward pass with the op `memeff::gated_linear`.

    The formula counts only tensors of size (N, I): N tokens by the intermediate size I. The op's
    backward kernel reads three buffers: gate, up and the gradient of the product act(gate) * up.
    The kernel overwrites these buffers with its results.
    """
    return 3 * transient_bytes(tokens, inner, dtype=dtype)


def transient_bytes(tokens: Size, inner: Size, *, dtype: torch.dtype) -> sympy.Expr:
    """Return the bytes that `memeff::gated_linear`, or its backward op, needs while it runs, in
    addition to its arguments and results.

    The forward pass needs a buffer for the product act(gate) * up. The backward pass also needs one
    buffer. The buffer first contains the product's gradient, which the kernel overwrites with the
    product.
    """
    return dtype.itemsize * sympy.sympify(tokens) * sympy.sympify(inner)
