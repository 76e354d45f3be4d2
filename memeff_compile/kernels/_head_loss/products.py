"""A matrix product by cuBLAS that returns fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def product_into(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Write left @ right into fp32 `out`, or add it to `out`, without rounding to 16 bits.

    On devices without CUDA, PyTorch's product of 16-bit inputs cannot return fp32, so this function
    first converts the inputs to fp32. Only tests under Triton's interpreter need this.
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
