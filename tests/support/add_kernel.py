"""The smallest Triton kernel, for the tests of the test processes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write x + y, BLOCK elements per program."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask) + tl.load(y_ptr + offsets, mask)
    tl.store(out_ptr + offsets, total, mask)


@triton.jit
def casts_its_size_kernel(out_ptr, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write n, which has to be a number of the launch: a constant cannot be cast."""
    tl.store(out_ptr, n.to(tl.float32))


@triton.jit
def masks_by_a_number_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write x where n is positive, by a mask that is one number spread over a tile."""
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets), mask=(offsets < BLOCK) & (n > 0))


def launch_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x + y of two (n,) tensors."""
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
    return out
