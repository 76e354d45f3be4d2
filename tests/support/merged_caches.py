"""Pairs of layers that share directions, for tests: allocated, filled, compared."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from memeff_compile.kernels.coded_kv_cache import (
    CODED,
    LENGTH,
    OWN,
    OWN_KEYS,
    PLAIN,
    SHARED,
    Layout,
    dtype_of,
    identity,
    pool_of,
    pool_of_values,
    shapes_of_maps,
    shapes_of_pair,
    shapes_of_values,
)
from memeff_compile.kernels.coded_kv_cache.layout import (
    Maps,
    Own,
    OwnKeys,
    Shared,
    SharedValues,
    ValuePair,
)
from memeff_compile.kernels.coded_kv_cache.layout import Pair as Tensors
from memeff_compile.kernels.coded_kv_cache.reference import decode


def _zeros(
    shapes: dict[str, tuple[int, ...]], layout: Layout, dtype: torch.dtype, device: str
) -> list[Tensor]:
    return [
        torch.zeros(shape, dtype=dtype_of(name, dtype, layout.bits), device=device)
        for name, shape in shapes.items()
    ]


class Pair:
    """The tensors of two layers that share directions."""

    def __init__(
        self,
        layout: Layout,
        batch: int,
        heads: int,
        tokens: int,
        dtype: torch.dtype,
        *,
        first: tuple[int, ...] = (),
        device: str = "cpu",
        align: bool = False,
    ) -> None:
        self.layout = layout
        shared, own = shapes_of_pair(layout, batch, heads, tokens)
        make = partial(_zeros, layout=layout, dtype=dtype, device=device)
        self.shared, self.lower, self.upper = make(shared), make(own), make(own)
        self.maps = make(shapes_of_maps(layout, batch, heads)) if align else []
        if align:
            identity(self.maps)
        named = dict(zip(SHARED, self.shared, strict=True))
        named["places"].fill_(-1)
        named["bound"].fill_(torch.nan)
        if first:
            named["starts"].copy_(torch.tensor(first, dtype=torch.int32)[:, None])

    def tensors(self) -> Tensors:
        maps = Maps(*self.maps) if self.maps else None
        return Tensors(Shared(*self.shared), Own(*self.lower), Own(*self.upper), maps)

    def maps_of(self, *, is_upper: bool) -> list[Tensor]:
        """Return the maps that the view and attention of one layer take."""
        return self.maps[1:] if is_upper else self.maps[:1]

    def all(self) -> list[Tensor]:
        return [*self.shared, *self.lower, *self.upper]

    def get(self, name: str) -> Tensor:
        return self.shared[SHARED.index(name)]

    def pool(self, *, is_upper: bool) -> list[Tensor]:
        return pool_of(self.shared, self.upper if is_upper else self.lower)

    def norms(self, *, is_upper: bool) -> tuple[Tensor, Tensor]:
        own = self.upper if is_upper else self.lower
        k_norms, v_norms = own[OWN.index("norms")].unbind(-1)
        return k_norms, v_norms

    def filled(self) -> list[int]:
        counts = [own[OWN.index("counts")] for own in (self.lower, self.upper)]
        return [int(c[place]) for c in counts for place in (LENGTH, CODED)]

    def directions(self, *, is_value: bool) -> Tensor:
        """Return the decoded directions, (B, H, N, D)."""
        codes, scales = self.shared[int(is_value)], self.shared[2 + int(is_value)]
        return decode(codes, scales, self.layout.bits, self.layout.depth, is_value=is_value)


class Values:
    """The tensors of two layers that share values and have their own keys."""

    def __init__(
        self,
        layout: Layout,
        batch: int,
        heads: int,
        tokens: int,
        dtype: torch.dtype,
        *,
        first: tuple[int, ...] = (),
        device: str = "cpu",
    ) -> None:
        self.layout = layout
        shared, own = shapes_of_values(layout, batch, heads, tokens)
        make = partial(_zeros, layout=layout, dtype=dtype, device=device)
        self.shared, self.lower, self.upper = make(shared), make(own), make(own)
        start = torch.tensor(first or (0,) * batch, dtype=torch.int32, device=device)
        order = torch.arange(layout.kept, dtype=torch.int32, device=device)
        places = (start[:, None] + order)[:, None].expand(-1, heads, -1)
        self.shared.append(places.contiguous())
        self.maps = make(shapes_of_maps(layout, batch, heads, 1))
        identity(self.maps)

    def tensors(self) -> ValuePair:
        own = OwnKeys(*self.lower), OwnKeys(*self.upper)
        return ValuePair(SharedValues(*self.shared), *own, Maps(*self.maps))

    def all(self) -> list[Tensor]:
        return [*self.shared, *self.lower, *self.upper, *self.maps]

    def own(self, *, is_upper: bool) -> list[Tensor]:
        return self.upper if is_upper else self.lower

    def pool(self, *, is_upper: bool) -> list[Tensor]:
        return pool_of_values(self.shared, self.own(is_upper=is_upper))

    def norms(self, *, is_upper: bool) -> tuple[None, Tensor | None]:
        return None, self.shared[2] if is_upper else None

    def maps_of(self, *, is_upper: bool) -> list[Tensor]:
        """Return the maps that the view and attention of one layer take."""
        return self.maps[1:] if is_upper else self.maps[:1]

    def filled(self) -> list[int]:
        counts = [own[OWN_KEYS.index("counts")] for own in (self.lower, self.upper)]
        return [int(c[place]) for c in counts for place in (LENGTH, CODED)]

    def directions(self) -> Tensor:
        """Return the decoded directions of values, (B, H, N, D)."""
        bits = self.layout.bits_of_values
        return decode(*self.shared[:2], bits, self.layout.depth, is_value=True)


def draw(
    batch: int, heads: int, tokens: int, depth: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Return keys and values of the lower layer, then of the upper: alike, some rows less so."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (5, batch, heads, tokens, depth)
    k, v, other_k, other_v, noise = torch.randn(shape, generator=generator, device=device)
    apart = noise[..., :1].abs() * 0.6
    k[..., 3] = 4 * k[..., 3] + 3
    rows = [k, v, 2 * k + 2 * apart * other_k, 0.5 * v + 0.5 * apart * other_v]
    return [x.to(dtype) for x in rows]


def aligned_rows(
    batch: int, heads: int, tokens: int, depth: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Return rows as `draw`, of layers that differ by means, rotations and the order of heads.

    The upper layer's head h is alike to the lower's head h + 1; keys have a large mean.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, batch, heads, tokens, depth)
    lower = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    shape = (2, batch, heads, depth, depth)
    matrices = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    turns = torch.linalg.qr(matrices).Q
    means = 3 * torch.randn((4, *shape[1:4]), generator=generator, device=device).double()
    lower = lower * torch.linspace(2.0, 0.5, depth, device=device).double()
    upper = (lower + 0.02 * noise).roll(-1, 2) @ turns
    rows = [*lower, 2 * upper[0], 0.5 * upper[1]]
    return [(x + mean.unsqueeze(2)).to(dtype) for x, mean in zip(rows, means, strict=True)]


__all__ = ["PLAIN", "Pair", "Values", "aligned_rows", "draw"]
