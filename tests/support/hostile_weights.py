"""bf16 weights with everything strange in them."""

from __future__ import annotations

import torch
from torch import Tensor

STRANGE = [
    float("nan"),
    float("inf"),
    -float("inf"),
    3.38e38,
    0.0,
    -0.0,
    1e-40,
    -1e-39,
    300.0,
    1e-25,
]


def bits(tensor: Tensor) -> Tensor:
    """Return the 16-bit patterns of a bf16 tensor: NaN is not equal to itself, its bits are."""
    return tensor.contiguous().view(torch.int16)


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Return weights as an initialised linear has them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.02
    return weight.to(torch.bfloat16).to(device)


def trained(*shape: int, seed: int = 0) -> Tensor:
    """Return weights with scales per row and column and heavier tails, as training leaves them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight /= torch.rand(shape, generator=generator).mul_(0.9).add_(0.1).sqrt_()
    weight *= 0.012 * torch.exp(0.4 * torch.randn(shape[0], 1, generator=generator))
    weight *= torch.exp(0.3 * torch.randn(1, shape[1], generator=generator))
    return weight.to(torch.bfloat16)


def hostile(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Return a normal weight with NaN (with a payload), infinities, denormals and outliers."""
    weight = normal(*shape, seed=seed)
    flat = weight.view(-1)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(flat.numel(), generator=generator)[: 3 * len(STRANGE)]
    flat[places] = torch.tensor(3 * STRANGE).to(torch.bfloat16)[: places.numel()]
    flat.view(torch.int16)[-1] = 0x7FA5
    return weight.to(device)


def all_patterns() -> Tensor:
    """Return every 16-bit pattern once."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
