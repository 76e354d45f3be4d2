"""A gradient filter's activity on given tensors, computed densely and without memeff's ops.

A tile of the gradient is active if any |p - 1(target)| inside reaches eps; the dropped mass of a
row is the probability that lies in its inactive tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EPS = 2.0**-12


def wide_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden @ weight.T as fp32, without rounding the products to a 16-bit type."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.float().t()


@torch.no_grad()
def measure(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tiles: Sequence[tuple[int, int]],
    eps: float = EPS,
) -> dict[str, Any]:
    """Return active shares and dropped mass for tile sizes, and what no tile size changes.

    Args:
        hidden: (N, D).
        weight: (V, D).
        target: (N,) int64; rows with a negative target are left out first.
        tiles: (rows, columns) of a tile, rows at most 512.
        eps: the threshold of an entry.

    Returns:
        loss, mass_below_eps and entries_above_eps (means per row), active_share and
        dropped_mass_mean / _max by tile size such as "128x128".
    """
    counts = target >= 0
    hidden, target = hidden[counts], target[counts]
    n = hidden.shape[0]
    sums = {"loss": 0.0, "mass_below_eps": 0.0, "entries_above_eps": 0.0}
    active = dict.fromkeys(tiles, 0)
    total = dict.fromkeys(tiles, 0)
    dropped: dict[tuple[int, int], list[Tensor]] = {size: [] for size in tiles}
    for first in range(0, n, 512):
        z = wide_product(hidden[first : first + 512], weight)
        lse = z.logsumexp(-1)
        here = target[first : first + 512, None]
        sums["loss"] += float((lse - z.gather(1, here).squeeze(1)).sum())
        p = z.sub_(lse[:, None]).exp_()
        sums["mass_below_eps"] += float(torch.where(p < eps, p, 0).sum())
        sums["entries_above_eps"] += float((p >= eps).sum())
        for size in tiles:
            alive = _active(p, here, size, eps)
            active[size] += int(alive.sum())
            total[size] += alive.numel()
            dropped[size].append(_dropped(p, alive, size))
    row: dict[str, Any] = {name: value / n for name, value in sums.items()}
    label = {size: f"{size[0]}x{size[1]}" for size in tiles}
    row["active_share"] = {label[s]: round(active[s] / total[s], 5) for s in tiles}
    mass = {s: torch.cat(dropped[s]) for s in tiles}
    row["dropped_mass_mean"] = {label[s]: float(mass[s].mean()) for s in tiles}
    row["dropped_mass_max"] = {label[s]: float(mass[s].max()) for s in tiles}
    return row


def _fold(p: Tensor, size: tuple[int, int]) -> Tensor:
    """Return p padded with zeros and cut into (row tiles, rows, column tiles, columns)."""
    rows, columns = size
    down, across = -p.shape[0] % rows, -p.shape[1] % columns
    padded = torch.nn.functional.pad(p, (0, across, 0, down))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _active(p: Tensor, target: Tensor, size: tuple[int, int], eps: float) -> Tensor:
    """Return which tiles hold an entry of at least eps: (row tiles, column tiles)."""
    here = p.gather(1, target)
    p.scatter_(1, target, 1 - here)
    alive = _fold(p, size).amax((1, 3)) >= eps
    p.scatter_(1, target, here)
    return alive


def _dropped(p: Tensor, alive: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the mass of each row that lies in tiles that are not active."""
    by_tile = _fold(p, size).sum(3)
    return (by_tile * ~alive[:, None, :]).sum(2).view(-1)[: p.shape[0]]
