"""INT8 and NF4 weights for one token, as peers of coded ones: plain PyTorch, fused by Inductor.

The layouts are LLM.int8's rows (arXiv 2208.07339) and QLoRA's blocks of 64 (arXiv 2305.14314), with
scales in bf16. Inductor makes one kernel of decoding and product. These are no libraries: their
kernels may be faster or slower.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ablations.weights_ablation import SCALED_TOGETHER, normal_floats

FORMATS = ("int8", "nf4")


def _int8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return ((codes.float() * x.float()).sum(1) * scale.float()).to(x.dtype)


def _nf4(x: Tensor, codes: Tensor, scale: Tensor, numbers: Tensor) -> Tensor:
    rows, half = codes.shape
    low, high = scale.float()[:, :, None].expand(-1, -1, SCALED_TOGETHER).chunk(2, 1)
    first = numbers[(codes & 15).int()] * low.reshape(rows, half) * x[:half].float()
    second = numbers[(codes >> 4).int()] * high.reshape(rows, half) * x[half:].float()
    return (first + second).sum(1).to(x.dtype)


@cache
def _product(name: str, device: str) -> Any:
    product = {"int8": _int8, "nf4": _nf4}[name]
    return torch.compile(product, dynamic=False) if device == "cuda" else product


class PlainFormat(nn.Module):
    """A linear of one token in one of `FORMATS`."""

    def __init__(self, weight: Tensor, name: str) -> None:
        super().__init__()
        self.product = _product(name, weight.device.type)
        rows, columns = weight.shape
        wide = weight.detach().float()
        if name == "int8":
            scale = wide.abs().amax(1).clamp_min(1e-30) / 127.0
            held = [(wide / scale[:, None]).round().to(torch.int8), scale.bfloat16()]
        else:
            numbers = normal_floats().to(weight.device)
            blocks = wide.view(-1, SCALED_TOGETHER)
            scale = blocks.abs().amax(1).clamp_min(1e-30).bfloat16()
            middles = (numbers[1:] + numbers[:-1]) / 2
            codes = torch.bucketize(blocks / scale.float()[:, None], middles).to(torch.uint8)
            low, high = codes.view(rows, columns).chunk(2, 1)  # bytes of columns half a row apart
            held = [low | high << 4, scale.view(rows, -1), numbers]
        for place, part in enumerate(held):
            self.register_buffer(f"part_{place}", part)
        self.shape = weight.shape

    @property
    def bits(self) -> float:
        """Return how many bits a weight takes."""
        return 8 * sum(part.nbytes for part in self.buffers()) / self.shape.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear of one token, (..., columns)."""
        return self.product(x.reshape(-1), *self.buffers()).view(*x.shape[:-1], -1)
