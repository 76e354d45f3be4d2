"""Fits and applies maps that make the rows of two adjacent layers similar.

Keys and values of adjacent layers differ mostly by a mean and a rotation per head. The maps of a
pair are: the mean of each layer's rows; for each head of the upper layer, the matching head of the
lower layer; and an orthogonal matrix per head, which rotates the upper layer's rows towards those
of the lower layer. An aligned row is `row - mean` in the lower layer, and `(row - mean) @ turn` in
the upper; the lower layer's head is its *slot* in the shared tensors.

No function here reads a value on the host, and matrix products are enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import wide
from .layout import Maps

STEPS = 20
"""Iterations of `polar`: enough for singular values of 1e-6 times the largest one."""

_LEAST = 1e-6
_EXCHANGES = 4
_IDENTITY = 1e-3
"""Share of the identity that is added before `polar`: channels that the rows do not determine, for
example if there are fewer rows than channels, are then not rotated.
"""
_MATCHED_ON = 1024
"""At most this many rows per sequence are used to match heads."""
_AT_ONCE = 1 << 22
"""Elements of rows that are read at a time; this bounds the temporary memory."""
_PRODUCTS = 1 << 24
"""Elements of products between all heads that are computed at a time."""


def identity(maps: Sequence[Tensor]) -> None:
    """Set maps that change no row, for caches with too few first tokens to fit maps."""
    lower_means, upper_means, turns, slots = maps
    lower_means.zero_()
    upper_means.zero_()
    turns.copy_(torch.eye(turns.shape[-1], device=turns.device))
    slots.copy_(torch.arange(slots.shape[1], device=slots.device))


def fit(
    maps: Maps,
    # keys and values of the lower layer, then of the upper, each (B, H, N, D)
    rows: Sequence[Tensor],
    counted: Tensor,  # bool (B, N), the rows that the maps are fitted on
) -> None:
    """Write the maps with which the rows of two layers differ least."""
    stored = [means[:, :, at] for means in (maps.lower_means, maps.upper_means) for at in (0, 1)]
    for x, place in zip(rows, stored, strict=True):
        place.copy_(_mean(x, counted))
    slots = matched(_likeness(rows[0], rows[2], counted) + _likeness(rows[1], rows[3], counted))
    maps.slots.copy_(slots)
    products = torch.zeros_like(maps.turns, dtype=wide(rows[0].dtype))
    with _exact(rows[0]):
        for at, span in itertools.product((0, 1), _spans(rows[0])):
            x = in_order(centred(rows[at][:, :, span], stored[at]), slots)
            y = _only(counted[:, span], centred(rows[at + 2][:, :, span], stored[at + 2]))
            products[:, :, at] += y.transpose(-1, -2) @ _only(counted[:, span], x)
        maps.turns.copy_(polar(products))


def _exact(x: Tensor) -> torch.autocast:
    """Return a context in which products are not rounded by autocast."""
    return torch.autocast(x.device.type, enabled=False)


def centred(rows: Tensor, means: Tensor) -> Tensor:
    """Return rows (B, H, N, D) minus their mean (B, H, D), in fp32 or fp64."""
    kind = wide(rows.dtype)
    return rows.to(kind) - means.to(kind).unsqueeze(2)


def in_order(x: Tensor, heads: Tensor) -> Tensor:
    """Return `x`, (B, H, ...), with the heads (B, H) in its second dimension."""
    index = heads.long().view(*heads.shape, *(1 for _ in x.shape[2:])).expand_as(x)
    return x.gather(1, index)


def upper_heads(maps: Maps) -> Tensor:
    """Return (B, H): the upper layer's head of each slot."""
    heads: Tensor = maps.slots.argsort(1)
    return heads


def aligned(rows: Sequence[Tensor], maps: Maps) -> list[Tensor]:
    """Return aligned rows, slot by slot, in fp32 or fp64. `rows` is as in `fit`."""
    heads = upper_heads(maps)
    found = [centred(rows[at], maps.lower_means[:, :, at]) for at in (0, 1)]
    with _exact(rows[0]):
        for at in (0, 1):
            y = in_order(centred(rows[at + 2], maps.upper_means[:, :, at]), heads)
            found.append(y @ in_order(maps.turns[:, :, at], heads).to(y.dtype))
    return found


def cosines(rows: Sequence[Tensor], counted: Tensor) -> list[Tensor]:
    """Return (B, H, N) for keys and for values: cosines between rows when they are aligned."""
    batch, heads, _, depth = rows[0].shape
    means = rows[0].new_empty((batch, heads, 2, depth), dtype=wide(rows[0].dtype))
    turns = means.new_empty((*means.shape, depth))
    slots = torch.empty((batch, heads), dtype=torch.int32, device=means.device)
    maps = Maps(means, torch.empty_like(means), turns, slots)
    fit(maps, rows, counted)
    found = aligned(rows, maps)
    return [torch.cosine_similarity(found[at], found[at + 2], dim=-1) for at in (0, 1)]


def restored(
    rows: Tensor,  # (B, H, N, D) fp32 or fp64, aligned, slot by slot
    norms: Tensor | None,  # (B, H, N), factors of the rows
    # of the layer, as the ops take them: means (B, H, D), turns (B, H, D, D), slots (B, H)
    maps: Sequence[Tensor | None],
) -> Tensor:
    """Undo `aligned`: return the rows of a layer in the order of the layer's heads."""
    means, turns, slots = maps
    kind = rows.dtype
    rows = rows if slots is None else in_order(rows, slots)
    rows = rows if norms is None else rows * norms.to(kind).unsqueeze(-1)
    if turns is not None:
        with _exact(rows):
            rows = rows @ turns.to(kind).transpose(-1, -2)
    return rows if means is None else rows + means.to(kind).unsqueeze(2)


def _only(counted: Tensor, x: Tensor) -> Tensor:
    """Return x, (B, H, N, D), with zeros in the rows that do not count, even where these are
    nan."""
    return x.masked_fill(~counted[:, None, :, None], 0.0)


def _spans(x: Tensor) -> list[slice]:
    step = max(1, _AT_ONCE // max(1, x[:, :, 0].numel()))
    return [slice(at, at + step) for at in range(0, x.shape[2], step)]


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    """Return (B, H, D): the mean of the rows that count, or 0 if there are none."""
    kind = wide(x.dtype)
    total = torch.zeros_like(x[:, :, 0], dtype=kind)
    for span in _spans(x):
        total += _only(counted[:, span], x[:, :, span]).sum(2, dtype=kind)
    return total / counted.sum(1).clamp_min(1).to(kind)[:, None, None]


def _likeness(lower: Tensor, upper: Tensor, counted: Tensor) -> Tensor:
    """Return (B, H, H): how similar each head of the upper layer is to each head of the lower
    layer.

    The similarity is the norm of the product of both heads' rows, divided by the norm of each
    head's rows. Orthogonal maps do not change it.
    """
    few = max(1, -(-lower.shape[2] // _MATCHED_ON))
    counted = counted[:, ::few]
    x, y = (
        _only(counted, centred(r, _mean(r, counted)))
        for r in (lower[:, :, ::few], upper[:, :, ::few])
    )
    batch, heads, _, depth = x.shape
    at_once = max(1, _PRODUCTS // (heads * depth) ** 2)
    found = []
    for start in range(0, batch, at_once):
        a, b = (r[start : start + at_once].transpose(2, 3).flatten(1, 2) for r in (y, x))
        with _exact(a):
            products = (a @ b.transpose(1, 2)).view(-1, heads, depth, heads, depth)
        found.append(products.square().sum((2, 4)).sqrt())
    sizes = [r.square().sum((2, 3)).sqrt().clamp_min(1e-30) for r in (y, x)]
    return torch.cat(found) / (sizes[0].unsqueeze(2) * sizes[1].unsqueeze(1))


def matched(likeness: Tensor) -> Tensor:
    """Return (B, H): a different column for each row of (B, H, H), such that the chosen elements
    have a large sum.

    The largest element is chosen first, then the largest of the other rows and columns, and so on;
    then a few pairs of rows exchange their columns if that increases the sum.
    """
    batch, heads, _ = likeness.shape
    left = likeness.clone()
    slots = torch.zeros(batch, heads, dtype=torch.int64, device=likeness.device)
    for _ in range(heads):
        best = left.flatten(1).argmax(1, keepdim=True)
        row, column = best // heads, best % heads
        slots.scatter_(1, row, column)
        left.scatter_(1, row.unsqueeze(2).expand(-1, -1, heads), -torch.inf)
        left.scatter_(2, column.unsqueeze(1).expand(-1, heads, -1), -torch.inf)
    for _ in range(min(heads - 1, _EXCHANGES)):
        crossed = likeness.gather(2, slots.unsqueeze(1).expand(-1, heads, -1))  # row i, slot of j
        own = crossed.diagonal(dim1=1, dim2=2)
        gain = crossed + crossed.transpose(1, 2) - own.unsqueeze(1) - own.unsqueeze(2)
        more, best = gain.flatten(1).max(1, keepdim=True)
        pair = torch.cat([best // heads, best % heads], 1)
        there = slots.gather(1, pair)
        slots.scatter_(1, pair, torch.where(more > 0, there.flip(1), there))
    return slots


def polar(x: Tensor) -> Tensor:
    """Return the orthogonal matrices nearest to x, (..., D, D), by matrix products only.

    This is the Newton-Schulz iteration. Each step is scaled by a lower bound of the singular
    values, so small ones grow by a factor of 2.6 in each of the first steps.
    """
    depth = x.shape[-1]
    size = x.norm(dim=(-2, -1), keepdim=True)
    share = _IDENTITY / depth**0.5
    y = x / size.clamp_min(1e-30) + share * torch.eye(depth, dtype=x.dtype, device=x.device)
    y = (y / y.norm(dim=(-2, -1), keepdim=True)).view(-1, depth, depth)
    least = _LEAST
    for _ in range(STEPS):
        by = (3.0 / (1.0 + least + least * least)) ** 0.5
        square = torch.bmm(y.transpose(1, 2), y)
        y = torch.baddbmm(y, y, square, beta=1.5 * by, alpha=-0.5 * by**3)
        least = min(1.0, 0.5 * least * by * (3.0 - (by * least) ** 2))
    found: Tensor = y.view(x.shape)
    return found
