# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two kernels of the implementation `sorted`, which sum the gradients of each run (all tokens
with one id).

After the sort, the tokens of a run are neighbours. A chunk is CHUNK consecutive positions in sorted
order. One kernel is for the runs inside one chunk, one for the runs that extend over several
chunks. The program for a chunk sums and writes each run that lies completely inside the chunk. For
a run that extends over several chunks, each of these chunks writes a partial sum. The second kernel
adds the partial sums in order. So several programs sum a long run in parallel, even if it contains
half of the batch's tokens. Sums are fp32 in a fixed order, so every execution gives the same bits.

In variable names, places are positions in the sorted tokens (N), and columns are features (D).
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 32
# Columns per program of the first pass and its warps: 8 elements per thread, 16 bytes in 16 bits.
MAX_BLOCK = 1024
WARPS = 4
# The second pass reads a tile of this many chunks by this many columns at a time.
BORDER_CHUNKS = 16
BORDER_BLOCK = 256


@triton.jit
def _embedding_sorted_rows_runs_kernel(
    ids_ptr,  # (N,) sorted, int32 or int64
    order_ptr,  # (N,) int64: the token at each sorted position
    rows_ptr,  # (N, D) gradients of the rows
    stride_rows_token,
    stride_rows_column,
    out_ptr,  # (V, D) gradient of the table, added to
    stride_out_row,
    stride_out_column,
    partial_ptr,  # (2 * chunks, D) fp32: sum of a run from the last chunk, of a run into the next
    places,
    depth,
    vocab,
    padding_idx,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < depth
    first = chunk * CHUNK
    row_id = tl.load(ids_ptr + first).to(tl.int64)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=0).to(tl.int64)
    came_in = (first > 0) & (before == row_id)  # the run began in an earlier chunk
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(CHUNK):
        place = first + step
        is_there = place < places
        token = tl.load(order_ptr + place, mask=is_there, other=0)
        following = tl.load(ids_ptr + place + 1, mask=place + 1 < places, other=0).to(tl.int64)
        ends = (place + 1 >= places) | (following != row_id)
        total += tl.load(
            rows_ptr + token * stride_rows_token + offs * stride_rows_column,
            mask=offs < tl.where(is_there, depth, 0),
            other=0.0,
        ).to(tl.float32)
        is_last = step == CHUNK - 1
        if is_there & (ends | is_last):
            if ends & (came_in == 0):
                is_kept = (row_id >= 0) & (row_id < vocab) & (row_id != padding_idx)
                out_offs = row_id * stride_out_row + offs * stride_out_column
                is_added = offs < tl.where(is_kept, depth, 0)
                old = tl.load(out_ptr + out_offs, mask=is_added, other=0.0).to(tl.float32)
                new = (old + total).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + out_offs, new, mask=is_added)
            else:
                slot = 2 * chunk + tl.where(came_in, 0, 1)
                tl.store(partial_ptr + slot * depth + offs, total, mask=mask)
        total = tl.where(ends, 0.0, total)
        came_in = came_in & (ends == 0)
        row_id = following


@triton.jit
def _embedding_sorted_rows_borders_kernel(
    ids_ptr,  # (N,) sorted, int32 or int64
    out_ptr,  # (V, D) gradient of the table, added to
    stride_out_row,
    stride_out_column,
    partial_ptr,  # (2 * chunks, D) fp32
    places,
    depth,
    vocab,
    padding_idx,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < depth
    first = chunk * CHUNK
    behind = first + CHUNK
    row_id = tl.load(ids_ptr + behind - 1, mask=behind < places, other=0).to(tl.int64)
    following = tl.load(ids_ptr + behind, mask=behind < places, other=0).to(tl.int64)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=0).to(tl.int64)
    goes_on = (behind < places) & (following == row_id)
    began_here = (first == 0) | (before != row_id)
    is_kept = (row_id >= 0) & (row_id < vocab) & (row_id != padding_idx)
    if goes_on & began_here & is_kept:
        total = tl.load(partial_ptr + (2 * chunk + 1) * depth + offs, mask=mask, other=0.0)
        following_chunk = chunk + 1
        while goes_on:
            chunks = following_chunk + tl.arange(0, CHUNKS)
            starts = chunks * CHUNK
            ids = tl.load(ids_ptr + starts, mask=starts < places, other=0).to(tl.int64)
            is_run = (starts < places) & (ids == row_id)
            tile = tl.load(
                partial_ptr + (2 * chunks)[:, None] * depth + offs[None, :],
                mask=is_run[:, None] & mask[None, :],
                other=0.0,
            )
            total += tl.sum(tile, axis=0)
            goes_on = tl.sum(is_run.to(tl.int32), axis=0) == CHUNKS
            following_chunk += CHUNKS
        out_offs = row_id * stride_out_row + offs * stride_out_column
        old = tl.load(out_ptr + out_offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + out_offs, (old + total).to(out_ptr.dtype.element_ty), mask=mask)


def block_for(depth: int, largest: int) -> int:
    """Return how many columns a program's block of the embedding's gradient has.

    `depth` is the number of columns of the gradient. The result is `depth`, rounded up to a power
    of two, but at least 128 and at most `largest`. The program masks columns after the gradient's
    last column. For a `depth` of 64, the block has 128 columns.
    """
    return min(largest, max(128, 1 << (depth - 1).bit_length()))
