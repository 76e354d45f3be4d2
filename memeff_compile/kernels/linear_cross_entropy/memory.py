"""Bytes before and after, as formulas in N (rows), D (hidden size) and V (vocabulary).

They count the dominant buffers that live beside the inputs and the gradients that are returned.
`before` is what a model holds for its loss without us: full N x V buffers. `after` is an upper
bound of what our op holds: pieces, per-row vectors and the fp32 sum of the hidden gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch

from ..sizes import Size
from . import total_fused
from .pieces import (
    HYBRID_AUTO_BYTES,
    HYBRID_AUTO_BYTES_PER_ROW,
    MIN_WIDTH,
    REFERENCE_AUTO_BYTES,
    REFERENCE_AUTO_BYTES_ELSEWHERE,
    REFERENCE_AUTO_COLUMNS,
    reference_bytes_per_logit,
)
from .shapes import FUSED_AUTO_BYTES, FUSED_AUTO_BYTES_PER_ROW, FUSED_MIN_WIDTH


def bytes_before(
    rows: Size,  # N, D, V as symbols or numbers; D does not enter
    depth: Size,  # likewise
    vocab: Size,  # likewise
    *,
    dtype: torch.dtype,  # compute dtype of the logits
    upcast: bool = True,  # whether the model casts 16-bit logits to fp32 for its loss
    returns_logits: bool = False,  # whether the logits leave the graph and so outlive the loss
    training: bool = True,  # whether gradients follow
    compiled: bool = True,  # Inductor if true, eager otherwise
) -> sympy.Expr:
    """Return the peak bytes of N x V buffers that the loss takes without us.

    Compiled by Inductor: one logits tensor in the compute dtype, which backward overwrites with its
    own gradient; if the logits are returned to the user it cannot, and needs a second one. Casts
    and log_softmax are fused away. Measured at N, V = 8192, 256000 in bf16: 4001 MiB, formula 4000.

    Eager forward: the logits, an fp32 copy if there is a cast, and the output of log_softmax. Eager
    backward: that output, its gradient and the gradient of its input, each in the cast's dtype, and
    the logits if they are returned. Measured at the same shape: 24000 MiB (22839 beyond the two
    gradients, which do not exist yet at the peak), formula 24000.
    """
    logits = dtype.itemsize
    wide = max(logits, 4) if upcast else logits
    if compiled:
        per_logit = logits * (2 if training and returns_logits else 1)
    else:
        copy = wide if wide != logits else 0
        per_logit = logits + copy + wide
        if training:
            per_logit = max(per_logit, 3 * wide + (logits if returns_logits else 0))
    return sympy.Integer(per_logit) * sympy.sympify(rows) * sympy.sympify(vocab)


class How(NamedTuple):
    """What a call's bytes depend on beside its sizes N, D and V, which are symbols or numbers."""

    dtype: torch.dtype  # dtype of hidden and weight
    engine: str  # "fused", "hybrid" or "reference", as `engine_for` says
    device_type: str  # where the tensors are, such as "cuda"
    workspace: int = 0  # the op's workspace in bytes, 0 = automatic
    has_softcap: bool = False  # whether logits are capped
    with_entropy: bool = False  # whether the entropy of each row is computed
    training: bool = True  # whether a backward pass follows
    gradient_filter: str = "exact"  # the op's


class Pieces(NamedTuple):
    """What one call holds of the logits at any time: bytes, and columns where a copy needs them."""

    bytes: sympy.Expr
    columns: sympy.Expr


def bytes_after(
    rows: Size, depth: Size, vocab: Size, *, pieces: Pieces | None = None, **how: Any
) -> sympy.Expr:
    """Return an upper bound of the bytes our op holds beside inputs and returned gradients.

    The larger of forward and backward: the workspace of pieces (each at most half as wide as the
    vocabulary, once that exceeds 64 columns), the vectors of N elements, and for 16-bit inputs the
    fp32 sum of the hidden gradient (4ND). `reference` adds the fp32 copies of 16-bit hidden states
    and of pieces of the weight, and on a CPU the copies of the rows that are not ignored. `how`
    is as of `How`; `pieces` are symbols for a short formula, by default `piece_sizes`.
    """
    n, d = sympy.sympify(rows), sympy.sympify(depth)
    dtype, engine, device_type, *_, training, _ = How(**how)
    if pieces is None:
        pieces = piece_sizes(rows, depth, vocab, **how)
    itemsize = dtype.itemsize
    sums = 4 * n * d if itemsize == 2 and training else sympy.Integer(0)
    if engine in ("fused", "hybrid"):
        # state, the five results, the cotangents made contiguous, target checks
        return pieces.bytes + sums + 64 * n
    # 16-bit: hidden in fp32, two pieces of the weight in fp32 and its gradient before rounding
    widened = 4 * n * d + 12 * pieces.columns * d if itemsize == 2 else sympy.Integer(0)
    compacted = 2 * itemsize * n * d if device_type == "cpu" else sympy.Integer(0)
    return pieces.bytes + sums + widened + compacted + 24 * max(itemsize, 4) * n


def piece_sizes(rows: Size, depth: Size, vocab: Size, **how: Any) -> Pieces:
    """Return an upper bound of the pieces of logits that are alive at once; how, as of `How`."""
    given = How(**how)
    dtype, engine, device_type, workspace, has_softcap, with_entropy, training, _ = given
    n, v = sympy.sympify(rows), sympy.sympify(vocab)
    half = (sympy.floor((v + 2 * MIN_WIDTH - 1) / (2 * MIN_WIDTH))) * MIN_WIDTH
    itemsize = dtype.itemsize
    if engine in ("fused", "hybrid"):
        per_logit, narrowest = (6 if itemsize == 2 else 4), MIN_WIDTH
        automatic, per_row = HYBRID_AUTO_BYTES, HYBRID_AUTO_BYTES_PER_ROW
        if engine == "fused":
            per_logit, narrowest = 2, FUSED_MIN_WIDTH
            automatic, per_row = FUSED_AUTO_BYTES, FUSED_AUTO_BYTES_PER_ROW
            half = sympy.Max(half, FUSED_MIN_WIDTH)
        budget = workspace or sympy.Max(automatic, per_row * n)
        held = sympy.Min(sympy.Max(budget, narrowest * per_logit * n), per_logit * n * half)
        if engine == "fused" and training and not workspace and dtype in total_fused.DTYPES:
            # a backward by pieces of rows; what a call is asked for may switch its filter off
            size = (n, int(depth), int(vocab), 0)
            for each in {"exact", given.gradient_filter}:
                by_rows = total_fused.bytes_held(
                    *size,
                    is_plain=False,
                    gradient_filter=each,
                    tallest=total_fused.AGAIN_BYTES,
                )
                held = sympy.Max(held, by_rows)
        return Pieces(held, held / (per_logit * n))
    per_logit = reference_bytes_per_logit(itemsize, has_softcap, training, with_entropy)
    automatic = REFERENCE_AUTO_BYTES.get(device_type, REFERENCE_AUTO_BYTES_ELSEWHERE)
    budget = workspace or sympy.Max(automatic, REFERENCE_AUTO_COLUMNS * per_logit * n)
    columns = sympy.Min(sympy.Max(sympy.floor(budget / (per_logit * n)), MIN_WIDTH), half)
    return Pieces(per_logit * n * columns, columns)
