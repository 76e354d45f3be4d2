"""Weights in other roundings than `compress_`'s, and weights with errors that are drawn.

How much does a rounding change a weight, and how much KL does a model pay for it? Drawn errors of
known sizes answer the second one; roundings of the same size in bits answer the first.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from memeff_compile.kernels.coded_weight import CodedWeight, encode
from memeff_compile.model.weights import rounding

KEPT = 3
"""Bits of the mantissa."""
BLOCK = 512
"""Weights that share a normaliser, as `compress_` has it."""

kept = partial(rounding.kept, mantissa=KEPT)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Return the numbers of a weight, a block a row."""
    return F.pad(x.reshape(-1), (0, -x.numel() % size)).view(-1, size)


def like(blocks: Tensor, x: Tensor) -> Tensor:
    """Return blocks as a weight of the shape of another."""
    return blocks.reshape(-1)[: x.numel()].view_as(x)


def by_least_error(x: Tensor) -> Tensor:
    """Divide each block of 512 by that number of four which leaves the least squared error."""
    blocks = in_blocks(x, BLOCK)
    found = torch.stack([kept(blocks / c) * c for c in (1.0, 1.25, 1.5, 1.75)])
    least = (found - blocks).square().sum(2).argmin(0)
    return like(found[least, torch.arange(len(blocks), device=x.device)], x)


def with_row_scales(x: Tensor) -> Tensor:
    """Scale each row of a weight decoded from `compress_` by least squares."""
    codec = f"tier:k{KEPT}:b{BLOCK}"
    found = CodedWeight(encode(x.bfloat16(), codec), codec, x.shape).decode().float()
    return found * ((x * found).sum(1, True) / found.square().sum(1, True).clamp_min(1e-20))


def with_errors_passed_on(x: Tensor) -> Tensor:
    """Add the error of a weight to the next one of its row: sums of neighbours stay."""
    columns = x.t().contiguous()
    found, error = torch.empty_like(columns), torch.zeros_like(columns[0])
    for number, column in enumerate(columns):
        found[number] = kept(column + error)
        error = column + error - found[number]
    return found.t().contiguous()


def with_errors(x: Tensor, share: float, *, each: bool = False, draw: int = 0) -> Tensor:
    """Add normal errors, as large as a share of the weights together, or of each weight."""
    seed = zlib.crc32(x[:4].cpu().numpy().tobytes(), draw)  # every weight has separate errors
    errors = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
    return x + share * (x.abs() if each else x.square().mean().sqrt()) * errors


def entropy(codes: Tensor) -> float:
    """Return how many bits a whole number takes in the best code of single numbers."""
    counts = torch.bincount((codes - codes.min()).long().flatten()).double()
    counts = counts[counts > 0]
    return float(math.log2(codes.numel()) - (counts * counts.log2()).sum() / codes.numel())


def in_even_steps(x: Tensor, bits: float) -> Tensor:
    """Round to multiples of one step a weight, of which a number takes so many bits."""
    low, high = (float(x.square().mean().sqrt()) * 2.0**power for power in (-9, 2))
    for _ in range(14):
        step = (low * high) ** 0.5
        if entropy((x / step).round()) > bits:
            low = step
        else:
            high = step
    return (x / high).round() * high


def in_integers(x: Tensor, bits: int, group: int) -> Tensor:
    """Round to whole numbers around zero; so many neighbours share a scale."""
    blocks = in_blocks(x, group)
    top = 2.0 ** (bits - 1) - 1
    scale = (blocks.abs().amax(1, True) / top).bfloat16().float().clamp_min(1e-20)
    return like((blocks / scale).round().clamp(-top, top) * scale, x)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "no normaliser": kept,
    "the best of four normalisers": by_least_error,
    "a scale for each row behind it": with_row_scales,
    "errors passed along the row": with_errors_passed_on,
}
"""Other roundings to three bits of the mantissa."""
SHARES = (0.0065, 0.013, 0.026, 0.052)
DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"drawn, {100 * s:.2g} %": partial(with_errors, share=s) for s in SHARES},
    "drawn, 2.6 % of each": partial(with_errors, share=0.026, each=True),
    **{
        f"drawn, 2.6 % of each, draw {n}": partial(with_errors, share=0.026, each=True, draw=n)
        for n in (2, 3, 4)
    },
}
"""Errors without a rounding."""
CODES: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "even steps": (6.9, partial(in_even_steps, bits=6.9)),
    "integers of 6 bits, a scale for 32": (6.5, partial(in_integers, bits=6, group=32)),
    "integers of 5 bits, a scale for 32": (5.5, partial(in_integers, bits=5, group=32)),
}
"""Codes of other numbers, and the bits a weight that they take."""
