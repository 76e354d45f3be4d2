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

import torch
from torch import Tensor

from .._triton.launch import start
from ..device import on_device, processors
from .pieces import Knobs, RowGradients, Rows, Widths, hybrid_widths, spans

# Numbers per row that the statistics kernel keeps between strips.
STATE = 5


def forward(
    hidden: Tensor,  # (N, D) bf16, fp16 or fp32
    weight: Tensor,  # (V, D), any strides
    bias: Tensor | None,  # (V,) or None
    target: Tensor,  # (N,) int32 or int64
    column_weight: Tensor | None,  # (V,) or None
    knobs: Knobs,  # the call's settings
) -> Rows:
    """Compute what is asked for of every row.

    Returns:
        (N,) or (0,) each, as `Rows` says.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    hidden, target = _one_unit_stride(hidden), target.contiguous()
    bias, column_weight = _vector(bias, None), _vector(column_weight, torch.float32)
    widths = _widths(hidden, weight, knobs)
    found = _unwritten(hidden, rows, knobs)
    state = hidden.new_empty((rows, STATE), dtype=torch.float32)
    strip = hidden.new_empty(rows * min(widths.strip, vocab), dtype=torch.float32)
    with on_device(hidden):
        for first, stop in spans(0, vocab, widths.strip):
            s = _window(strip, rows, stop - first)
            product(hidden, weight[first:stop].t(), s)
            launch_statistics(s, bias, target, column_weight, state, found, first, vocab, knobs)
    return found


def _unwritten(hidden: Tensor, rows: int, knobs: Knobs) -> Rows:
    """Allocate the results of a forward pass."""

    def result(dtype: torch.dtype, wanted: bool = True) -> Tensor:
        return hidden.new_empty((rows if wanted else 0,), dtype=dtype)

    return Rows(
        nll=result(torch.float32),
        lse=result(torch.float32),
        logit_sum=result(torch.float32, knobs.with_logit_sum),
        entropy=result(torch.float32, knobs.with_entropy),
        top=result(torch.int64, knobs.with_top),
    )


def backward(
    grads: RowGradients,  # cotangents of forward's results
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    lse: Tensor,  # (N,) fp32 from forward
    entropy: Tensor,  # (N,) fp32 from forward, or (0,) where it was not asked for
    knobs: Knobs,
    output_mask: tuple[bool, bool, bool],  # which of hidden, weight, bias need a gradient
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of hidden, weight and bias that `output_mask` asks for.

    Returns:
        (N, D), a tensor laid out like weight, (V,); None where not asked for.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    hidden, target, lse = _one_unit_stride(hidden), target.contiguous(), lse.contiguous()
    grads, entropy = RowGradients(*(grad.contiguous() for grad in grads)), entropy.contiguous()
    flat_bias, column_weight = _vector(bias, None), _vector(column_weight, torch.float32)
    widths = _widths(hidden, weight, knobs)
    needs_hidden, needs_weight, needs_bias = output_mask
    in_place = hidden.dtype == torch.float32

    grad_hidden: Tensor | None = None
    if needs_hidden:
        grad_hidden = hidden.new_empty(hidden.shape, dtype=torch.float32)
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if needs_bias and bias is not None else None
    strip = hidden.new_empty(rows * min(widths.strip, vocab), dtype=torch.float32)
    piece = strip if in_place else hidden.new_empty(rows * min(widths.piece, vocab))

    with on_device(hidden):
        for first, stop in spans(0, vocab, widths.piece):
            g = _window(piece, rows, stop - first)
            for start, end in spans(first, stop, widths.strip):
                s = _window(strip, rows, end - start)
                product(hidden, weight[start:end].t(), s)
                g_strip = g[:, start - first : end - first]
                launch_gradient(
                    s, g_strip, flat_bias, target, column_weight, lse, entropy, grads, start, knobs
                )
            if grad_weight is not None:
                torch.mm(g.t(), hidden, out=grad_weight[first:stop])
            if grad_hidden is not None:
                product(g, weight[first:stop], grad_hidden, accumulate=first > 0)
            if grad_bias is not None:
                grad_bias[first:stop] = g.sum(0, dtype=torch.float32)
    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def product(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Write left @ right into fp32 `out`, or add it there, without rounding to 16 bits.

    Off CUDA, where products have no fp32 output of 16-bit inputs, the inputs are widened first:
    that serves the interpreter's tests.

    Args:
        left, right: (N, K) and (K, M) in one dtype.
        out: (N, M) fp32.
        accumulate: add to `out` instead of overwriting it.
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
    s: Tensor,  # (N, W) fp32 products of columns first .. first + W
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    state: Tensor,  # (N, STATE) fp32, kept between the strips of one call
    found: Rows,  # the results, to be written
    first: int,
    vocab: int,
    knobs: Knobs,
) -> None:
    """Fold one strip of products into the running state; the last strip also writes the results."""
    from . import hybrid_kernels

    rows, width = s.shape
    start(
        hybrid_kernels._linear_cross_entropy_statistics_kernel,
        (rows,),
        s,
        s.stride(0),
        bias,
        column_weight,
        target,
        state,
        found.nll,
        found.lse,
        found.logit_sum if knobs.with_logit_sum else None,
        found.entropy if knobs.with_entropy else None,
        found.top if knobs.with_top else None,
        (first, width, vocab, knobs.ignore_index or 0, knobs.scale, knobs.softcap),
        HAS_BIAS=bias is not None,
        HAS_COLUMN_WEIGHT=column_weight is not None,
        HAS_IGNORE=knobs.ignore_index is not None,
        HAS_SOFTCAP=knobs.softcap > 0,
        WITH_LSE=knobs.with_lse,
        WITH_LOGIT_SUM=knobs.with_logit_sum,
        WITH_ENTROPY=knobs.with_entropy,
        WITH_TOP=knobs.with_top,
        BLOCK=hybrid_kernels.block_for(width),
        num_warps=hybrid_kernels.WARPS,
    )


def launch_gradient(
    s: Tensor,  # (N, W) fp32 products of columns first .. first + W
    g: Tensor,  # (N, W) in the input dtype, unit stride along columns; may be `s` itself
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    lse: Tensor,  # (N,) fp32
    entropy: Tensor,  # (N,) fp32, or (0,) where it was not asked for
    grads: RowGradients,  # fp32 cotangents, contiguous
    first: int,
    knobs: Knobs,
) -> None:
    """Turn one strip of products into gradients with respect to the products."""
    from . import hybrid_kernels

    rows, width = s.shape
    block = hybrid_kernels.block_for(width)
    start(
        hybrid_kernels._linear_cross_entropy_gradient_kernel,
        (rows, -(-width // block)),
        s,
        s.stride(0),
        g,
        g.stride(0),
        bias,
        column_weight,
        target,
        lse,
        entropy if knobs.with_entropy else None,
        grads.nll,
        grads.lse,
        grads.logit_sum if knobs.with_logit_sum else None,
        grads.entropy if knobs.with_entropy else None,
        (first, width, knobs.ignore_index or 0, knobs.scale, knobs.softcap),
        HAS_BIAS=bias is not None,
        HAS_COLUMN_WEIGHT=column_weight is not None,
        HAS_IGNORE=knobs.ignore_index is not None,
        HAS_SOFTCAP=knobs.softcap > 0,
        WITH_LSE=knobs.with_lse,
        WITH_LOGIT_SUM=knobs.with_logit_sum,
        WITH_ENTROPY=knobs.with_entropy,
        BLOCK=block,
        num_warps=hybrid_kernels.WARPS,
    )


def _widths(hidden: Tensor, weight: Tensor, knobs: Knobs) -> Widths:
    rows, depth = hidden.shape
    return hybrid_widths(
        rows,
        depth,
        weight.shape[0],
        knobs.workspace,
        hidden.element_size(),
        processors(hidden.device),
    )


def _window(buffer: Tensor, rows: int, width: int) -> Tensor:
    """View the head of a flat buffer as a contiguous (rows, width) matrix."""
    return buffer[: rows * width].view(rows, width)


def _one_unit_stride(matrix: Tensor) -> Tensor:
    """Copy a matrix that a library product could not read as it is, once instead of per piece."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _vector(vector: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if vector is None:
        return None
    return vector.to(dtype or vector.dtype).contiguous()
