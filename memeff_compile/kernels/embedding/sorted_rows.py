"""The engine `sorted` of the embedding's gradient: a stable sort of the ids and two Triton passes.

The engine needs CUDA, sm_80 or later.

The CPU never waits for the GPU or reads a value from it, and launches do not depend on how many ids
differ, so calls can be captured in CUDA graphs. Sums use no atomic operations, and the stable sort
fixes their order.

Expected time on an H200 for N, D = 16384, 2048 in bf16: 64 MiB of gradients are read, and at most
128 MiB of the table's gradient are read and written. At 4.28 TB/s that takes 0.05 ms. The sort of
16384 ids takes additional time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton.launch import start
from ..device import on_device


def accumulate(grad_weight: Tensor, grad_rows: Tensor, ids: Tensor, padding_idx: int) -> None:
    """Add each row's gradient to its id's row of `grad_weight`, summed in fp32 and rounded once.

    The arguments are those of `reference.accumulate`, in bf16, fp16 or fp32 and with any strides.
    An id that is negative, or at least V, is ignored; the lookup has refused it already.
    """
    from . import sorted_rows_kernels as kernels

    places, depth = grad_rows.shape
    vocab = grad_weight.shape[0]
    chunks = -(-places // kernels.CHUNK)
    sorted_ids, order = torch.sort(ids, stable=True)
    partial = grad_rows.new_empty((2 * chunks, depth), dtype=torch.float32)
    block = kernels.block_for(depth, kernels.MAX_BLOCK)
    border = kernels.block_for(depth, kernels.BORDER_BLOCK)
    sizes = (places, depth, vocab, padding_idx)
    with on_device(grad_weight):
        start(
            kernels._embedding_sorted_rows_runs_kernel,
            (chunks, -(-depth // block)),
            *(sorted_ids, order, grad_rows, *grad_rows.stride()),
            *(grad_weight, *grad_weight.stride(), partial, *sizes),
            CHUNK=kernels.CHUNK,
            BLOCK=block,
            num_warps=kernels.WARPS,
        )
        if chunks > 1:
            start(
                kernels._embedding_sorted_rows_borders_kernel,
                (chunks - 1, -(-depth // border)),
                *(sorted_ids, grad_weight, *grad_weight.stride(), partial, *sizes),
                CHUNK=kernels.CHUNK,
                CHUNKS=kernels.BORDER_CHUNKS,
                BLOCK=border,
                num_warps=kernels.WARPS,
            )
