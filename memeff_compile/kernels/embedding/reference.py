"""The reference implementation, in plain PyTorch, of an embedding table's gradient.

The implementation sorts the ids, sums the gradient rows of each id, and adds each sum to a row of
the table's gradient. This implementation works on any device, never waits for a GPU, and always
sums in the same order. The implementation needs no buffer as large as the table, because it sums a
few columns at a time for all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks

# Bytes of the four matrices that exist at once for some columns: gradients in sorted order, their
# sums, the sums per token, and the rows of the table's gradient that the sums are added to.
PIECE_BYTES = 8 << 20
PIECES = 4
MIN_COLUMNS = 16


def accumulate(grad_weight: Tensor, grad_rows: Tensor, ids: Tensor, padding_idx: int) -> None:
    """For each id, add the gradients of all rows looked up with this id to the id's row of
    `grad_weight`.

    The sum, which includes the old row of `grad_weight`, is computed in fp32 (for fp64 inputs in
    fp64) and rounded once. The gradient rows (N, D) have the dtype of `grad_weight` (V, D). The row
    of `padding_idx`, which is an id or -1, does not change. An id that is negative, or at least V,
    belongs to another rank's row and is ignored.
    """
    tokens, depth = grad_rows.shape
    wide = checks.wide(grad_weight.dtype)
    rows, order = torch.sort(ids.long(), stable=True)
    is_new = torch.ones_like(rows, dtype=torch.bool)
    is_new[1:] = rows[1:] != rows[:-1]
    segment = is_new.long().cumsum(0) - 1
    lengths = torch.zeros_like(rows).scatter_add_(0, segment, torch.ones_like(rows))
    kept = (rows != padding_idx) & (rows >= 0) & (rows < grad_weight.shape[0])
    # A token without a sum repeats the write of the last token with one, or keeps row 0 unchanged.
    place = torch.arange(tokens, device=rows.device)
    place = torch.where(kept, place, torch.where(kept, place, 0).amax())
    rows, segment = rows.index_select(0, place), segment.index_select(0, place)
    skipped = ~kept.index_select(0, place).unsqueeze(1)
    rows = rows.clamp(0, grad_weight.shape[0] - 1)
    width = columns(tokens, wide.itemsize)
    for first in range(0, depth, width):
        target = grad_weight[:, first : first + width]
        part = grad_rows[:, first : first + width].index_select(0, order).to(wide)
        sums = torch.segment_reduce(part, "sum", lengths=lengths, unsafe=True)
        added = sums.index_select(0, segment).masked_fill_(skipped, 0)
        # All tokens of an id write the same numbers, so the host need not know how many ids differ.
        target[rows] = added.add_(target.index_select(0, rows)).to(target.dtype)


def columns(tokens: int, itemsize: int) -> int:
    """Return how many columns (features) of the tokens' gradients `accumulate` processes at a time.

    For 1024 tokens summed in fp32, the number is 512.
    """
    return max(MIN_COLUMNS, PIECE_BYTES // (PIECES * itemsize * max(tokens, 1)))
