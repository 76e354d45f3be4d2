"""Coded caches for tests: allocated, filled, and attention over them by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memeff_compile.kernels.coded_kv_cache import CODED, LENGTH, POOL, Layout, reference


def allocate(
    layout: Layout,
    batch: int,
    heads: int,
    tokens: int,
    dtype: torch.dtype,
    *,
    first: tuple[int, ...] = (),
    device: str = "cpu",
) -> list[Tensor]:
    """Return the tensors of an empty cache; `first` is each sequence's first token."""
    pool = []
    for name, shape in layout.shapes(batch, heads, tokens).items():
        kind = {"codes": torch.uint8, "places": torch.int32, "counts": torch.int64}
        pool.append(torch.zeros(shape, dtype=kind.get(name.split("_")[-1], dtype), device=device))
    start = torch.tensor(first or (0,) * batch, dtype=torch.int32, device=device)
    places = pool[POOL.index("places")]
    order = torch.arange(layout.kept, dtype=torch.int32, device=device)
    places.copy_((start[:, None] + order)[:, None].expand(places.shape))
    return pool


def draw(
    batch: int, heads: int, tokens: int, depth: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return keys with a large channel, as models have them, and values."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, batch, heads, tokens, depth)
    k, v = torch.randn(shape, generator=generator, device=device).unbind(0)
    k[..., 3] = 4 * k[..., 3] + 9
    return k.to(dtype), v.to(dtype)


def filled(pool: list[Tensor]) -> tuple[int, int]:
    """Return the tokens in a cache, and those of them in codes."""
    counts = pool[POOL.index("counts")]
    return int(counts[LENGTH]), int(counts[CODED])


def by_hand(
    q: Tensor,
    pool: list[Tensor],
    bits: int,
    scale: float,
    mask: Tensor | None = None,
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Softmax attention in float64 over the decoded cache; zeros if no key is visible."""
    length, _ = filled(pool)
    exact = [t.double() if t.is_floating_point() else t for t in pool]
    keys, values = reference.view(exact, norms, bits, length)
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(repeat, 1) for t in (keys, values))
    score = q.double() @ keys.transpose(2, 3) * scale
    if mask is not None:
        seen = mask[..., :length]
        seen = torch.nn.functional.pad(seen, (0, length - seen.shape[3]), value=False)
        score = score.masked_fill(~seen, -math.inf)
    return score.softmax(-1).nan_to_num() @ values
