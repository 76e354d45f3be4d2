"""The engine `hybrid`: library products piece by piece, one Triton pass over each piece.

Forward, per strip of the vocabulary: S = E C_v^T in fp32 (16-bit inputs, fp32 output), then one
pass that folds S into a running maximum and sum per row. Backward, per piece: the same strips of S
again, one pass that turns each into G in the input dtype, then dC_v = G^T E straight into its rows
of the weight gradient (one write, no fp32 copy) and dE += G C_v in fp32. G has a buffer of its own:
written over the fp32 strip it would save nothing, since a strip half or a quarter as wide as the
piece costs the same bytes, and rows would then depend on the order in which warps read and write.

Nothing here waits for the GPU, reads a value on the host or depends on the data's values, so calls
can be captured in CUDA graphs. Nothing is summed by atomics.

Expected time on an H200, forward plus backward, as a floor:
    4 * 2NDV / 790e12       four products (forward, recompute, dC, dE)
    + 10 NV / 4.28e12       S read in forward; S read and G written in backward (16-bit inputs)
    + 8 ND * pieces / 4.28e12   dE read and written once per piece
    (+ 8 NV / 4.28e12       S written twice, partly hidden behind the product that writes it)
For N, D, V = 16384, 2048, 128256: 43.6 + 4.9 + 2.0 (+ 3.9) ms.
For N, D, V = 8192, 2304, 256000: 48.9 + 4.9 + 2.4 (+ 3.9) ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton.launch import start
from ..device import on_device, processors
from .call import Gradients, Kept, Knobs, Operands, RowGradients, Rows, vector
from .pieces import Widths, hybrid_widths, spans, window

# Numbers per row that the statistics kernel keeps between strips.
STATE = 5


def forward(given: Operands, knobs: Knobs) -> Rows:
    """Compute what is asked for of every row, of bf16, fp16 or fp32 and a weight of any strides."""
    given = readable(given)
    hidden, weight, *_ = given
    rows, vocab = hidden.shape[0], weight.shape[0]
    widths = _widths(hidden, weight, knobs)
    found = Rows.new(hidden, (rows,), knobs)
    state = hidden.new_empty((rows, STATE), dtype=torch.float32)
    strip = hidden.new_empty(rows * min(widths.strip, vocab), dtype=torch.float32)
    with on_device(hidden):
        for first, stop in spans(0, vocab, widths.strip):
            s = window(strip, rows, stop - first)
            products(given, first, stop, s)
            launch_statistics(s, given, state, found, first, knobs)
    return found


def backward(
    grads: RowGradients, given: Operands, kept: Kept, knobs: Knobs, output_mask: Sequence[bool]
) -> Gradients:
    """Compute the gradients that `output_mask` asks for."""
    bias = given.bias
    given = readable(given)
    hidden, weight, *_, low, up = given
    rows, vocab = hidden.shape[0], weight.shape[0]
    grads = RowGradients(*(grad.contiguous() for grad in grads))
    kept = kept._replace(lse=kept.lse.contiguous(), entropy=kept.entropy.contiguous())
    widths = _widths(hidden, weight, knobs)
    needs_hidden, needs_weight, needs_bias, *needs_low_rank = output_mask
    in_place = hidden.dtype == torch.float32

    grad_hidden: Tensor | None = None
    if needs_hidden:
        grad_hidden = hidden.new_empty(hidden.shape, dtype=torch.float32)
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if needs_bias and bias is not None else None
    grad_low, grad_up, is_apart = None, None, False
    if low is not None and up is not None:
        needs_low, needs_up = needs_low_rank
        grad_low = low.new_empty(low.shape, dtype=torch.float32) if needs_low else None
        grad_up = torch.empty_like(up) if needs_up else None
        is_apart = low.dtype != hidden.dtype  # and takes gradients of the logits unrounded

    def add_low_rank(g: Tensor, first: int) -> None:
        stop = first + g.shape[1]
        if grad_up is not None and low is not None:
            torch.mm(g.t(), low, out=grad_up[first:stop])
        if grad_low is not None and up is not None:
            product(g, up[first:stop], grad_low, accumulate=first > 0)

    strip = hidden.new_empty(rows * min(widths.strip, vocab), dtype=torch.float32)
    piece = strip if in_place else hidden.new_empty(rows * min(widths.piece, vocab))

    with on_device(hidden):
        for first, stop in spans(0, vocab, widths.piece):
            g = window(piece, rows, stop - first)
            for start, end in spans(first, stop, widths.strip):
                s = window(strip, rows, end - start)
                products(given, start, end, s)
                g_strip = g[:, start - first : end - first]
                launch_gradient(s, s if is_apart else g_strip, given, kept, grads, start, knobs)
                if is_apart:
                    add_low_rank(s, start)
                    g_strip.copy_(s)
            if not is_apart:
                add_low_rank(g, first)
            if grad_weight is not None:
                torch.mm(g.t(), hidden, out=grad_weight[first:stop])
            if grad_hidden is not None:
                product(g, weight[first:stop], grad_hidden, accumulate=first > 0)
            if grad_bias is not None:
                grad_bias[first:stop] = g.sum(0, dtype=torch.float32)
    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(hidden.dtype)
    if low is None:
        return grad_hidden, grad_weight, grad_bias
    grad_low = None if grad_low is None else grad_low.to(low.dtype)
    return grad_hidden, grad_weight, grad_bias, grad_low, grad_up


def products(given: Operands, first: int, stop: int, out: Tensor) -> None:
    """Write what the columns [first, stop) of the head give into fp32 `out`."""
    product(given.hidden, given.weight[first:stop].t(), out)
    if given.low is not None and given.up is not None:
        product(given.low, given.up[first:stop].t(), out, accumulate=True)


def product(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Write left @ right into fp32 `out`, or add it there, without rounding to 16 bits.

    Off CUDA, where products have no fp32 output of 16-bit inputs, the inputs are widened first:
    that serves the interpreter's tests.
    """
    if left.dtype == torch.float32 or not left.is_cuda:
        left, right = left.float(), right.float()
        if accumulate:
            torch.addmm(out, left, right, out=out)
        else:
            torch.mm(left, right, out=out)
    elif accumulate:
        torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    else:
        torch.mm(left, right, out_dtype=torch.float32, out=out)


def launch_statistics(
    s: Tensor, given: Operands, state: Tensor, found: Rows, first: int, knobs: Knobs
) -> None:
    """Fold products, fp32 (N, W) of the columns from `first` on, into the state, (N, STATE).

    The last strip also writes the results.
    """
    from . import hybrid_kernels

    (_, weight, bias, target, column_weight, *_), (rows, width) = given, s.shape
    start(
        hybrid_kernels._linear_cross_entropy_statistics_kernel,
        (rows,),
        *(s, s.stride(0), bias, column_weight, target, state, found.nll, found.lse),
        found.logit_sum if knobs.with_logit_sum else None,
        *(found.entropy if knobs.with_entropy else None, found.top if knobs.with_top else None),
        (first, width, weight.shape[0], knobs.ignore_index or 0, knobs.scale, knobs.softcap),
        **given.flags(knobs),
        HAS_IGNORE=knobs.ignore_index is not None,
        WITH_LSE=knobs.with_lse,
        WITH_TOP=knobs.with_top,
        BLOCK=hybrid_kernels.block_for(width),
        num_warps=hybrid_kernels.WARPS,
    )


def launch_gradient(
    s: Tensor, g: Tensor, given: Operands, kept: Kept, grads: RowGradients, first: int, knobs: Knobs
) -> None:
    """Turn a strip of products into gradients with respect to the products.

    `g`, in the input dtype, has unit stride along columns and may be `s` itself; `grads` are fp32
    cotangents, contiguous.
    """
    from . import hybrid_kernels

    (_, _, bias, target, column_weight, *_), (rows, width) = given, s.shape
    block = hybrid_kernels.block_for(width)
    start(
        hybrid_kernels._linear_cross_entropy_gradient_kernel,
        (rows, -(-width // block)),
        *(s, s.stride(0), g, g.stride(0), bias, column_weight, target, kept.lse),
        *(kept.entropy if knobs.with_entropy else None, grads.nll, grads.lse),
        grads.logit_sum if knobs.with_logit_sum else None,
        grads.entropy if knobs.with_entropy else None,
        (first, width, knobs.ignore_index or 0, knobs.scale, knobs.softcap),
        **given.flags(knobs),
        HAS_IGNORE=knobs.ignore_index is not None,
        WITH_LSE=knobs.with_lse,
        BLOCK=block,
        num_warps=hybrid_kernels.WARPS,
    )


def _widths(hidden: Tensor, weight: Tensor, knobs: Knobs) -> Widths:
    sizes = (*hidden.shape, weight.shape[0], knobs.workspace, hidden.element_size())
    return hybrid_widths(*sizes, processors(hidden.device))


def readable(given: Operands) -> Operands:
    """Copy what a kernel or a library product could not read as it is: once, not per piece."""
    hidden, weight, bias, target, column_weight, low, up = given
    return Operands(
        hidden if 1 in hidden.stride() else hidden.contiguous(),
        weight,
        vector(bias, None),
        target.contiguous(),
        vector(column_weight, torch.float32),
        low if low is None or 1 in low.stride() else low.contiguous(),
        up,
    )
