"""The arguments and results of the op for divergences between a student's and a teacher's softmax.
The module also computes the sizes of the blocks of rows (tokens) that the op processes.

The implementations `reference` and `kept_logits` compute the divergence. In variable names, N
stands for rows (tokens), R for rows of a block, and V for classes. D and K stand for features of
student and teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sympy
import torch
from torch import Tensor

from .._head_loss.shapes import MIB
from ..checks import wide
from ..device import processors
from ..sizes import Size


class Coefficients(NamedTuple):
    """The factors of the six sums over the classes that make up a divergence.

    For example, `q_log_p` is the factor of the sum of q log p. The student's softmax is p, and the
    teacher's softmax is q. Their mixture m is share * q + (1 - share) * p."""

    q_log_q: float = 0.0
    q_log_p: float = 0.0
    p_log_p: float = 0.0
    p_log_q: float = 0.0
    q_log_m: float = 0.0
    p_log_m: float = 0.0
    share: float = 0.0

    def times(self, factor: float) -> Coefficients:
        """Return the coefficients of the divergence that is `factor` times this divergence."""
        return Coefficients(*(factor * each for each in self))._replace(share=self.share)

    @property
    def has_mixture(self) -> bool:
        """Return whether the divergence has a term with the mixture m of both softmaxes."""
        return self.q_log_m != 0 or self.p_log_m != 0

    @property
    def has_centre(self) -> bool:
        """Return whether a row's gradient has a term that is a sum over all classes."""
        return self.has_mixture or self.p_log_p != 0 or self.p_log_q != 0

    def settled(self) -> Coefficients:
        """Return factors of the same divergence, without the softmaxes' mixture where possible.

        The student's softmax is p, and the teacher's is q. Their mixture m is share * q + (1 -
        share) * p. The factors (coefficients) belong to sums over the classes, such as the sum of q
        log m. If m equals p, the factors of sums with log m are added to those of sums with log p.
        If m equals q, these factors are added to those of sums with log q.
        """
        a1, a2, a3, a4, a5, a6, share = self
        if share == 0:  # m is p
            return Coefficients(a1, a2 + a5, a3 + a6, a4)
        if share == 1:  # m is q
            return Coefficients(a1 + a5, a2, a3, a4 + a6)
        return self if self.has_mixture else self._replace(share=0.0)


class Request(NamedTuple):
    """The tensors and settings of a divergence call, with N rows (tokens).

    The caller has flattened all dimensions of tokens, such as batch and sequence, to one.
    """

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    teacher: Tensor  # (N, K), or (N, V) logits if there is no weight
    teacher_weight: Tensor | None  # (V, K)
    teacher_bias: Tensor | None  # (V,)
    coefficients: Coefficients
    scale: float
    teacher_scale: float
    workspace: int  # in bytes; 0 is automatic

    @property
    def rows(self) -> int:
        """Return the number of rows (tokens) of the hidden states."""
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:
        """Return the number of classes (vocabulary entries)."""
        return self.weight.shape[0]

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of the divergences, one per row: fp64 for fp64 inputs, otherwise
        fp32."""
        return wide(self.hidden.dtype)


class ClassRequest(NamedTuple):
    """The tensors and settings of a call that computes the log-probabilities of k chosen classes
    for each row (token)."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    chosen: Tensor  # (N, k) int64
    is_normalised: bool  # log-probabilities, else logits
    scale: float
    workspace: int  # in bytes; 0 is automatic

    @property
    def rows(self) -> int:
        """Return the number of rows (tokens) of the hidden states."""
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:
        """Return the number of classes (vocabulary entries)."""
        return self.weight.shape[0]

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype in which results are computed and returned: fp64 for fp64 inputs,
        otherwise fp32."""
        return wide(self.hidden.dtype)


class Found(NamedTuple):
    """The results of a divergence call for each row (token), and the requested gradients."""

    rows: Tensor  # (N,) or (N, k), fp32 or fp64
    hidden: Tensor | None = None  # (N, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)


def wanted(
    given: Request | ClassRequest, factors: Tensor | None, mask: Sequence[bool]
) -> tuple[bool, ...]:
    """Return which gradients to compute: none if `factors` is None.

    `factors` is the loss's gradient with respect to the call's per-row results (`Found.rows`). It
    has one number for each element of these results."""
    return tuple(
        each and factors is not None and (place < 2 or given.bias is not None)
        for place, each in enumerate(mask)
    )


# The engine `reference`: two blocks of wide logits, log-probabilities in place, and up to three
# more while the gradient is formed.
REFERENCE_BLOCKS = 5
REFERENCE_AUTO_BYTES = 32 * MIB
REFERENCE_MIN_ROWS = 16


def reference_rows(rows: Size, vocab: Size, workspace: int, itemsize: int) -> sympy.Expr:
    """Return for how many rows (tokens) plain PyTorch has a divergence's logits in memory at once.

    Plain PyTorch is the implementation `reference`. `workspace` is the memory limit in bytes, and 0
    stands for a default limit.
    """
    per_row = REFERENCE_BLOCKS * max(itemsize, 4) * sympy.sympify(vocab)
    budget = workspace or REFERENCE_AUTO_BYTES
    fitting = sympy.Max(sympy.floor(budget / per_row), 1 if workspace else REFERENCE_MIN_ROWS)
    return sympy.Min(fitting, sympy.Max(sympy.sympify(rows), 1))


# The engine `kept_logits`. A tile is the columns of a row whose logits are kept relative to their
# maximum: those of an output tile of the product, whose epilogue has no registers left for a bias
# of 256 columns. A chunk is the columns that a program of the other passes reads at once. A strip
# is the columns of one product of cuBLAS in fp32: eight chunks, which are 128 tiles of 128 x 256 at
# 512 rows, about a wave of 132 processors, and stay in the L2 cache.
TILE, TILE_WITH_BIAS = 256, 128
CHUNK = 2048
STRIP = 8 * CHUNK
# Slots of R rows of kept logits. The student's logits of one block go to slot k and become their
# gradient there, the teacher's to slot k + 1, which is free again afterwards. So four blocks leave
# their gradients next to each other, and one product adds all of them to the weight's gradient,
# which is read, rounded and written a fourth as often.
SLOTS = 5
ROW_STEP = 128  # rows of a tile of cuBLAS
HEIGHT = 512  # rows of a block at which its products are fast, and multiples of it
LENT_HEIGHT = 1024  # likewise if all gradients are multiplied together
AUTO_BYTES = 640 * MIB


class Shapes(NamedTuple):
    """The launch settings of the kernel of a matrix product.

    A tile has `rows` rows. In one iteration of its loop, the kernel adds `step` terms to each dot
    product. A program has `warps` warps, and its loop has `stages` pipeline stages. `programs` is
    the number of programs that run at the same time.
    """

    rows: int
    step: int
    warps: int
    stages: int
    flatten: bool
    programs: int
    is_interpreted: bool = False


def shapes_for(device: torch.device) -> Shapes:
    """Return the launch settings of a matrix product's kernel for a device.

    On a GPU, the settings are those chosen by measurements on compute capability 9.0. Without a
    GPU, the tiles are small."""
    if device.type != "cuda":
        return Shapes(32, 16, 4, 1, False, 2, is_interpreted=True)
    return Shapes(128, 64, 8, 3, True, processors(device))


def tile_of(given: Request | ClassRequest) -> int:
    """Return the number of columns of a tile of logits."""
    biases = (given.bias, getattr(given, "teacher_bias", None))
    return TILE if biases == (None, None) else TILE_WITH_BIAS


def columns_of(vocab: int, tile: int) -> int:
    """Return the size of the vocabulary, rounded up to whole tiles.

    The result is the number of columns of a slot: a buffer for the logits of one block of rows
    (tokens). The gradients of the student's logits overwrite the logits.
    """
    return -(-vocab // tile) * tile


class Slots(NamedTuple):
    """The buffers (slots) that contain the logits' gradients of one block of rows (tokens) each.

    A slot has `rows` rows. One matrix product multiplies the logits' gradients in `blocks` slots by
    the weight, and another one multiplies them by the hidden states. `others` is the number of
    further slots, which the teacher's logits use."""

    rows: int
    blocks: int
    # further slots: the teacher's, if the weight's gradient does not lend its memory
    others: int
    is_lent: bool = False

    @property
    def together(self) -> int:
        """Return the number of rows whose logits' gradients are multiplied by the weight, or by the
        hidden states, in one matrix product."""
        return self.rows * self.blocks

    @property
    def allocated(self) -> int:
        """Return how many rows (tokens) all slots together contain.

        A slot is a buffer for the logits of one block of rows, or for their gradients.
        """
        return self.rows * (self.blocks + self.others)


def slots_for(
    rows: int,
    columns: int,
    workspace: int,
    itemsize: int,
    *,
    sides: int = 2,
    trains: bool = True,
    lent: int = 0,
) -> Slots:
    """Choose the number of slots (buffers for the logits' gradients of a block of rows).

    The function chooses as many slots as fit into the workspace, but at least one. The number never
    exceeds the number of blocks of rows. A teacher's logits use one more slot, or the memory of the
    weight's gradient. If they use a slot, there are at most `SLOTS` slots in total.

    - `rows`: the number of rows in the call.
    - `columns`: the number of columns in a slot.
    - `workspace`: the memory limit in bytes; 0 stands for a default limit.
    - `itemsize`: the bytes of one element of an input.
    - `sides`: 2 if student and teacher have logits, 1 without a teacher.
    - `trains`: whether gradients are computed; if not, only one block is stored at a time.
    - `lent`: how many rows of the teacher's logits fit into the memory of the weight's gradient.
    """
    rows = max(rows, 1)
    tiles = -(-rows // ROW_STEP) * ROW_STEP
    fitting = (workspace or AUTO_BYTES) // (columns * kept_bytes(itemsize))  # rows of all slots
    if trains and (lent >= ROW_STEP or sides == 1) and tiles <= fitting:
        height = tiles if sides == 1 else min(tiles, lent // ROW_STEP * ROW_STEP, LENT_HEIGHT)
        return Slots(height, -(-rows // height), 0, is_lent=sides == 2)
    most = SLOTS if trains else sides
    height = max(fitting // most // HEIGHT * HEIGHT, HEIGHT)
    if fitting < sides * HEIGHT:
        height = max(fitting // sides // ROW_STEP * ROW_STEP, min(fitting // sides, ROW_STEP), 1)
    height = min(height, tiles) if trains else min(height, tiles, HEIGHT)
    blocks = min(most - sides + 1, fitting // height - sides + 1, -(-rows // height))
    return Slots(height, max(blocks, 1), sides - 1)


def lent_rows(weight: Sequence[int], columns: int, tile: int, itemsize: int) -> int:
    """Return how many rows of temporary values fit into the memory of a weight's gradient.

    Each row's logits of student and teacher form tiles of `tile` classes. The temporary values of a
    row are the teacher's logits, and each tile's maximum and sum of exponentials.
    """
    return (
        weight[0] * weight[1] * itemsize // (columns * kept_bytes(itemsize) + 16 * columns // tile)
    )


def kept_bytes(itemsize: int) -> int:
    """Return the bytes of one stored logit, which is fp16 for 16-bit inputs and fp32 for other
    inputs.
    """
    return min(itemsize, 4)


def strip_bytes(rows: int, vocab: int) -> int:
    """Return the bytes of a strip (fp32 products of hidden states and weight for some classes)."""
    return 4 * rows * min(STRIP, vocab)
