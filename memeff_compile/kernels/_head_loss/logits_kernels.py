# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions for losses: they turn matrix products of hidden states and weight into logits.

Two functions split the columns of a tile of products into halves or quarters. Code that processes
one half or quarter at a time needs fewer registers. The kernels multiply logits by log2(e), so that
they can use exp2: z2 = z * log2(e). The kernels process compact rows: rows (tokens) whose target is
ignored are left out. Kernels read the number of remaining rows from GPU memory (`kept_ptr`). The
host never reads this number.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# How far above its base a row's largest logit may lie, in base 2: sums of 2^96 stay in fp32.
FAR = tl.constexpr(64.0)


@triton.jit
def halves_of(tile, BM: tl.constexpr, BN: tl.constexpr):
    """Split the columns of a tile into two halves without moving data between threads.

    An epilogue (the code after a matrix product) needs half the registers if it processes one half
    of the tile at a time.
    """
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def quarter_of(tile, index: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Return one quarter of the columns of a tile."""
    half = halves_of(tile, BM, BN)[index // 2]
    return halves_of(half, BM, BN // 2)[index % 2]


@triton.jit
def count_rows(kept_ptr, first_row, rows, C: tl.constexpr):
    """Of `rows` rows (tokens) from `first_row` on, return how many are not ignored.

    A row is ignored if its target is `ignore_index`. Ignored rows come last. Without HAS_KEPT, no
    row is left out, and the result is `rows`.
    """
    if C.HAS_KEPT:
        return tl.minimum(rows, tl.maximum(tl.load(kept_ptr) - first_row, 0))
    return rows


@triton.jit
def logits_of(acc, columns, bias_ptr, vocab, cap, C: tl.constexpr):
    """Return the logits z (times log2(e)) of one tile of products s, and the derivative dz/ds.

    To set columns after the last class to -inf, the function adds one number per column to the
    products. A comparison for each element would take four times as long. Without a softcap, the
    logit of a product s is `z = scale * (s + bias)`, so the derivative dz/ds is `scale`.
    """
    scale, softcap = cap
    edge = tl.where(columns < vocab, 0.0, float("-inf"))
    bias = tl.zeros_like(edge)
    if C.HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32)
    if C.HAS_SOFTCAP:
        u = (acc + bias[None, :]) * scale
        shrink = tl.exp2(tl.abs(u) * (-2.0 * LOG2E / softcap))
        inverse = 1.0 / (1.0 + shrink)
        tanh = (1.0 - shrink) * inverse
        z2 = tl.where(u < 0.0, -tanh, tanh) * (softcap * LOG2E) + edge[None, :]
        slope = 4.0 * scale * shrink * inverse * inverse
    else:
        z2 = acc * (scale * LOG2E) + (bias * (scale * LOG2E) + edge)[None, :]
        slope = scale
    return z2, slope
