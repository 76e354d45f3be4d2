"""Engine H's total: the loss and its gradients from one walk over the rows, of a frozen head.

A piece of rows meets the whole vocabulary: the library makes its products once, in fp32, with the
low-rank part added; engine H's kernels fold them into statistics and turn them into G, and G gives
dE of the piece, complete, and d low. What low-rank weights gain is summed in fp32 over the pieces.
The weight has no gradient: it would be rounded, or kept in fp32, once per piece.

Expected time on an H200, as a floor: 2 * 2NDV / 790e12 and, in 16 bits, 26 NV / 4.28e12 (S written,
added to and read twice; G written and read by three products). For N, D, V = 8192, 4096, 128256:
21.8 + 6.4 ms.
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor

from ..device import on_device
from ..sizes import Size
from . import hybrid, total_fused
from .call import Gradients, Kept, RowGradients, Rows
from .pieces import HYBRID_AUTO_BYTES, spans, window
from .total_reference import Loss, total_of

# Rows of the narrowest piece: the weight is read once per piece.
MIN_ROWS = 128


def rows_per_piece(rows: Size, vocab: Size, workspace: int, itemsize: int) -> sympy.Expr:
    """Return how many rows a piece has: products, and G beside them where it has 16 bits.

    Automatic: three sixteenths of what all logits take in the head's dtype, up to 544 MiB.
    """
    n, per_logit = sympy.sympify(rows), 4 if itemsize == 4 else 4 + itemsize
    share = sympy.Rational(*total_fused.AUTO_SHARE) * itemsize * n * vocab
    budget = workspace or sympy.Max(HYBRID_AUTO_BYTES, sympy.Min(share, total_fused.AUTO_BYTES))
    fitting = sympy.floor(budget / (per_logit * vocab))
    return sympy.Min(sympy.Max(fitting, 1 if workspace else MIN_ROWS), sympy.ceiling(n / 2))


def adapted_total_bytes(
    rows: Size, vocab: Size, rank: Size, *, dtype: torch.dtype, workspace: int = 0
) -> sympy.Expr:
    """Return a bound of what a call holds beside inputs, gradients and 64 bytes per row."""
    itemsize = dtype.itemsize
    height = rows_per_piece(rows, vocab, workspace, itemsize)
    return height * vocab * (4 if itemsize == 4 else 4 + itemsize) + 4 * vocab * (rank + 1)


def run(given: Loss) -> tuple[Tensor, Gradients]:
    """Compute the total and the gradients asked for, that of the weight not among them."""
    whole = hybrid.readable(given.operands)
    hidden, weight, bias, target, _, low, up = whole
    assert low is not None
    assert up is not None
    needs_hidden, needs_weight, needs_bias, needs_low, needs_up = given.output_mask
    assert not needs_weight, "only frozen heads are served"
    (rows, _), vocab, dtype = hidden.shape, weight.shape[0], hidden.dtype
    height = int(rows_per_piece(rows, vocab, given.workspace, dtype.itemsize))
    is_apart = low.dtype != dtype  # and takes gradients of the logits unrounded

    def zeros(*sizes: int) -> Tensor:
        return hidden.new_zeros(sizes, dtype=torch.float32)

    factors, nothing, nll = given.row_gradients(torch.float32), zeros(0), zeros(rows)
    grad_hidden = hidden.new_empty(hidden.shape) if needs_hidden else None
    grad_low = low.new_empty(low.shape) if needs_low else None
    sums = zeros(*up.shape) if needs_up else None
    bias_sums = zeros(vocab) if needs_bias and bias is not None else None
    strip = hidden.new_empty(height * vocab, dtype=torch.float32)
    narrow = strip if dtype == torch.float32 else hidden.new_empty(height * vocab)
    state, silent = zeros(height, hybrid.STATE), zeros(height)
    with on_device(hidden):
        for first, stop in spans(0, rows, height):
            here = slice(first, stop)
            piece = whole._replace(hidden=hidden[here], target=target[here], low=low[here])
            s, g = (window(each, stop - first, vocab) for each in (strip, narrow))
            hybrid.products(piece, 0, vocab, s)
            found = Rows.new(piece.hidden, (stop - first,), given.knobs)
            hybrid.launch_statistics(s, piece, state, found, 0, given.knobs)
            nll[here] = found.nll
            grads = RowGradients(factors[here], silent[: stop - first], nothing, nothing)
            kept, out = Kept(found.lse, found.entropy), s if is_apart else g
            hybrid.launch_gradient(s, out, piece, kept, grads, 0, given.knobs)
            if grad_low is not None:
                torch.mm(out, up, out=grad_low[here])
            if sums is not None:
                hybrid.product(out.t(), low[here], sums, accumulate=True)
            if bias_sums is not None:
                bias_sums += out.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                if out is not g:
                    g.copy_(out)
                torch.mm(g, weight, out=grad_hidden[here])
    grad_bias = None if bias_sums is None or bias is None else bias_sums.to(bias.dtype)
    grad_up = None if sums is None else sums.to(up.dtype)
    total = total_of(nll, given.row_weight, given.norm)
    return total, (grad_hidden, None, grad_bias, grad_low, grad_up)
