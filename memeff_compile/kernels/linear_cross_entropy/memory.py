"""The bytes that a language model's loss needs without and with this package's op.

The formulas in N (rows), D (hidden size) and V (vocabulary) count the largest buffers, except the
inputs and the returned gradients. `bytes_before` counts the full N x V buffers of a model without
this op. `bytes_after` is an upper bound of the op's bytes for blocks of logits, per-row vectors and
the fp32 sum of the hidden states' gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch

from .._gradient_filter.levels import filter_bytes, leaves_out
from ..device import DEFAULT_PROCESSORS, kernels_serve, where_it_runs
from ..sizes import Size
from .shapes import (
    AUTO_BYTES,
    HOPPER_AUTO_BYTES,
    HOPPER_AUTO_BYTES_PER_ROW,
    HOPPER_MIN_WIDTH,
    LIBRARY_AUTO_BYTES,
    LIBRARY_AUTO_BYTES_PER_ROW,
    MIN_WIDTH,
    MOST_SPLITS,
    REFERENCE_AUTO_BYTES,
    REFERENCE_AUTO_BYTES_ELSEWHERE,
    REFERENCE_AUTO_COLUMNS,
    REFERENCE_MIN_ROWS,
    hopper_rows,
    library_rows,
    reference_bytes_per_logit,
    reference_rows,
    shapes_for_programs,
    walk_bytes,
)

# An upper bound for losses, factors, orders of rows and the like.
TOTAL_BYTES_PER_ROW = 64


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
    """Return the peak bytes of the N x V buffers that the loss needs without the op
    `memeff::linear_cross_entropy`.

    Inductor allocates one logits tensor in the compute dtype, and the backward pass overwrites this
    tensor with the gradient. If the logits are returned to the user, the gradient needs a second
    tensor. Inductor fuses casts and log_softmax into other kernels. For 8192 rows and 256000
    classes in bf16, the formula gives 4000 MiB. The measured peak was 4001 MiB.

    In eager mode, the forward pass has the logits, an fp32 copy if the model casts them, and the
    output of log_softmax. Eager PyTorch's backward pass has the output of log_softmax, and the
    gradients of the output and of the input of log_softmax. All three tensors are fp32 if the model
    casts the logits to fp32; otherwise they have the logits' dtype. The logits are a fourth tensor
    if they are returned. In eager mode with the same 8192 rows and 256000 classes, the measured
    peak was 24000 MiB, and the formula gives 24000 MiB. This peak is 22839 MiB more than the size
    of the hidden states' and the weight's gradients. These two gradients are allocated only after
    the peak.
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
    """The properties of a call of `memeff::linear_cross_entropy` on which the op's memory depends.

    The memory also depends on the sizes N (rows), D (hidden size) and V (vocabulary), which are not
    fields of this class.
    """

    dtype: torch.dtype  # dtype of hidden and weight
    engine: str  # "hopper", "library" or "reference", as `engine_for` says
    device_type: str  # where the tensors are, such as "cuda"
    workspace: int = 0  # the op's workspace in bytes, 0 = automatic
    has_softcap: bool = False  # whether logits are capped
    with_entropy: bool = False  # whether the entropy of each row is computed
    training: bool = True  # whether a backward pass follows
    gradient_filter: str = "exact"  # the op's

    @property
    def goes_by_rows(self) -> bool:
        """Return whether the backward pass of the implementation `hopper` may process one block of
        rows (tokens) after another, instead of blocks of classes."""
        is_served = self.engine == "hopper" and self.dtype == torch.bfloat16
        return is_served and self.training and not self.workspace


class Pieces(NamedTuple):
    """The size of the blocks of logits that exist at one time.

    `bytes` is the size of these blocks. `columns` is the number of classes in a block. For 16-bit
    inputs, the implementation `reference` copies the weight's rows of these classes to fp32. The
    gradient of these rows is an fp32 buffer of the same size. The function `bytes_after` uses
    `columns` only to count these copies and this gradient.
    """

    bytes: sympy.Expr
    columns: sympy.Expr


def bytes_after(
    rows: Size, depth: Size, vocab: Size, *, pieces: Pieces | None = None, **how: Any
) -> sympy.Expr:
    """Return an upper bound of the bytes that the op `memeff::linear_cross_entropy` needs, without
    inputs and returned gradients.

    The bound is valid for the forward pass. If a backward pass follows, the bound is valid for it
    too. The bound is the sum of:

    - the blocks of logits that exist at one time (`pieces`);
    - the vectors with one number per row, such as losses and log-sum-exps;
    - for 16-bit inputs and a backward pass, the fp32 sum of the hidden states' gradient (4ND for
      N rows and D features).

    By default, the bound assumes that a block of classes has at most half of all classes, rounded
    up to a multiple of 64. For the implementation `hopper`, the half is rounded up to a multiple of
    256. For 16-bit inputs, the implementation `reference` also needs fp32 copies. The bound then
    adds the copies of the hidden states and of blocks of the weight. For `reference` on a CPU, the
    bound also adds the copies of the rows that are not ignored. `how` contains the fields of `How`,
    such as the dtype and the implementation.

    `pieces` contains the bytes of the blocks of logits, and the number of classes in a block. By
    default, `piece_sizes` computes these two numbers. The caller may pass symbols instead, so that
    the formula is short.
    """
    n, d, given = sympy.sympify(rows), sympy.sympify(depth), How(**how)
    dtype, engine, device_type, *_, training, _ = given
    if pieces is None:
        pieces = piece_sizes(rows, depth, vocab, **how)
    itemsize = dtype.itemsize
    has_sums = itemsize == 2 and training and not given.goes_by_rows
    sums = 4 * n * d if has_sums else sympy.Integer(0)
    if engine in ("hopper", "library"):
        # state, the five results, contiguous copies of the results' gradients, target checks
        return pieces.bytes + sums + 64 * n
    # 16-bit: hidden in fp32, two blocks of the weight in fp32 and its gradient before rounding
    widened = 4 * n * d + 12 * pieces.columns * d if itemsize == 2 else sympy.Integer(0)
    compacted = 2 * itemsize * n * d if device_type == "cpu" else sympy.Integer(0)
    return pieces.bytes + sums + widened + compacted + 24 * max(itemsize, 4) * n


def piece_sizes(rows: Size, depth: Size, vocab: Size, **how: Any) -> Pieces:
    """Return an upper bound of the bytes of the blocks of logits that exist at one time.

    The keys of `how` are the fields of `How`, such as the dtype and the implementation.
    """
    given = How(**how)
    dtype, engine, device_type, workspace, has_softcap, with_entropy, training, _ = given
    n, v = sympy.sympify(rows), sympy.sympify(vocab)
    half = _half(v, MIN_WIDTH)
    itemsize = dtype.itemsize
    if engine in ("hopper", "library"):
        per_logit, narrowest = (6 if itemsize == 2 else 4), MIN_WIDTH
        automatic, per_row = LIBRARY_AUTO_BYTES, LIBRARY_AUTO_BYTES_PER_ROW
        if engine == "hopper":
            per_logit, narrowest = 2, HOPPER_MIN_WIDTH
            automatic, per_row = HOPPER_AUTO_BYTES, HOPPER_AUTO_BYTES_PER_ROW
            half = _half(v, HOPPER_MIN_WIDTH)
        budget = workspace or sympy.Max(automatic, per_row * n)
        held = sympy.Min(sympy.Max(budget, narrowest * per_logit * n), per_logit * n * half)
        if given.goes_by_rows:
            # Blocks of classes, with the sums of dE, are for a Triton without Gluon. Some requested
            # results switch the filter off.
            held += 4 * n * depth
            size = (n, int(depth), int(vocab), 0)
            for each in {"exact", given.gradient_filter}:
                held = sympy.Max(held, hopper_bytes(*size, gradient_filter=each))
        mode = given.gradient_filter
        is_served = mode != "exact" and given.training and dtype == torch.bfloat16
        if is_served and leaves_out(mode, int(depth)):
            held = sympy.Max(held, filter_bytes(n, int(depth), int(vocab), workspace))
        return Pieces(held, held / (per_logit * n))
    per_logit = reference_bytes_per_logit(itemsize, has_softcap, training, with_entropy)
    automatic = REFERENCE_AUTO_BYTES.get(device_type, REFERENCE_AUTO_BYTES_ELSEWHERE)
    budget = workspace or sympy.Max(automatic, REFERENCE_AUTO_COLUMNS * per_logit * n)
    columns = sympy.Min(sympy.Max(sympy.floor(budget / (per_logit * n)), MIN_WIDTH), half)
    return Pieces(per_logit * n * columns, columns)


def _half(vocab: sympy.Expr, width: int) -> sympy.Expr:
    """Return half of the classes, rounded up to a multiple of `width`."""
    return sympy.floor((vocab + 2 * width - 1) / (2 * width)) * width


def total_bytes(
    rows: Size,  # n as a symbol or number, D, V
    depth: int,  # likewise
    vocab: int,  # likewise
    *,
    dtype: torch.dtype,  # of hidden states and weight
    device: torch.device,  # likewise
    workspace: int = 0,  # as for the op
    has_softcap: bool = False,  # likewise
    gradient_filter: str = "exact",  # likewise
) -> sympy.Expr:
    """Return an upper bound of the bytes that `memeff::linear_cross_entropy_total`, the op for a
    scalar loss, allocates.

    The bound leaves out the inputs, the gradients, and the vectors with a number per row. These
    vectors take at most 64 bytes per row in total.

    With Triton kernels on a GPU, the bound counts X (the logits' gradient up to a factor per row)
    and statistics of X's tiles. It also counts partial sums of the hidden states' gradient (dE). It
    also counts a copy of the hidden states of one block of rows (tokens). In this copy, each row is
    multiplied by the factor that turns the same row of X into the logits' gradient.

    If the Triton kernels do not support the device or dtype, plain PyTorch computes the op, for
    example on a CPU. The bound then counts a block of logits (with a softcap, three such blocks).
    It also counts a copy of the hidden states' rows that are not ignored. For 16-bit inputs, plain
    PyTorch needs two more fp32 buffers. One sums the weight's gradient, and the other is a copy of
    some rows of the weight.
    """
    n, wide = sympy.sympify(rows), max(dtype.itemsize, 4)
    if kernels_serve(device, dtype):
        return hopper_bytes(n, depth, vocab, workspace, gradient_filter=gradient_filter)
    height = reference_rows(
        n, vocab, wide * (1 + has_softcap), workspace, where_it_runs(device).type
    )
    held = wide * height * (vocab * (1 + 2 * has_softcap) + 3 * depth) + dtype.itemsize * depth * n
    if dtype.itemsize < wide:
        held += wide * (height * vocab + REFERENCE_MIN_ROWS * depth + vocab * depth)
    return held


def adapted_total_bytes(
    rows: Size, vocab: Size, rank: Size, *, dtype: torch.dtype, workspace: int = 0
) -> sympy.Expr:
    """Return an upper bound of the bytes that the fused loss allocates for a frozen output
    projection with a LoRA adapter.

    The bound is for the implementation `library` (products by cuBLAS). Like `total_bytes`, the
    bound is valid for a scalar loss. The bound leaves out the inputs, the gradients, and the
    vectors with a number per row."""
    itemsize = dtype.itemsize
    height = library_rows(rows, vocab, workspace, itemsize)
    return height * vocab * (4 if itemsize == 4 else 4 + itemsize) + 4 * vocab * (rank + 1)


def hopper_bytes(
    rows: sympy.Expr,
    depth: int,
    vocab: int,
    workspace: int,
    *,
    gradient_filter: str = "exact",
) -> sympy.Expr:
    """Return an upper bound of the bytes of the fused loss's temporary buffers, for a loop over
    blocks of rows (tokens).

    The bound is for the implementation `hopper`. If `rows` is a symbol, the bound is valid for
    every number of rows. If a gradient filter drops unlikely classes from the gradients, `hopper`
    has other buffers. The function then returns the bound for these buffers (`filter_bytes`).
    """
    shapes = shapes_for_programs(DEFAULT_PROCESSORS)
    if leaves_out(gradient_filter, depth):
        return filter_bytes(rows, depth, vocab, workspace)
    if rows.is_number:
        height = hopper_rows(int(rows), depth, vocab, workspace, shapes)
        return sympy.Integer(walk_bytes(int(rows), height, depth, vocab, shapes))
    # The bytes for a block of one tile, with all partial sums, counted for each tile of the rows.
    least = walk_bytes(2 * shapes.rows, shapes.rows, depth, vocab, shapes)
    tallest = least + 4 * (MOST_SPLITS - 1) * shapes.rows * depth
    limit = AUTO_BYTES
    if workspace:
        width = -(-vocab // shapes.columns) * shapes.columns
        limit = -(-workspace // (2 * width * shapes.rows)) * tallest
    return sympy.Max(tallest, sympy.Min(limit, sympy.ceiling(rows / shapes.rows) * tallest))
