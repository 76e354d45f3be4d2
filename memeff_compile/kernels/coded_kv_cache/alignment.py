"""Fit and apply linear maps that make the keys and values of two layers similar.

A row is the key or the value of one token in one attention head. The rows of a head in two layers
differ mostly by a mean and a rotation. A pair of layers has these maps:

- the mean of each layer's rows;
- for each head of the upper layer, the matching head of the lower layer;
- an orthogonal matrix per head, which rotates the upper layer's rows towards those of the lower
  layer.

An aligned row is `row - mean` in the lower layer, and `(row - mean) @ turn` in the upper layer,
where `turn` is the orthogonal matrix. The *slot* of a head of the upper layer is the number of its
matching head in the lower layer. If a cache merges two layers, both layers share some tensors. If
only the values are merged, the shared tensor `norms` contains ratios of the two layers' lengths of
values. The ratios are in the order of the upper layer's heads. In all other shared tensors, the
heads are in the order of the lower layer's matching heads (the slots).

The functions of this module copy nothing from the GPU to the CPU, and use only matrix products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import wide
from .layout import Maps
from .positions import mean_key, mean_product

STEPS = 20
"""Iterations of `polar`: enough for singular values of 1e-6 times the largest one."""

_LEAST = 1e-6
_EXCHANGES = 4
_SHARE = 1e-3, 0.1
"""Share of the turn before a fit, the identity or a given one, in the matrix whose polar factor is
taken: where the rows say nothing, as with fewer rows than channels, the turn stays as it was.
"""
_MATCHED_ON = 1024
"""At most this many rows per sequence are used to match heads."""
_AT_ONCE = 1 << 22
"""Elements of rows that are read at a time; this bounds the temporary memory."""
_PRODUCTS = 1 << 24
"""Elements of products between all heads that are computed at a time."""


def identity(maps: Sequence[Tensor]) -> None:
    """Set two layers' linear maps to the identity, with which keys and values stay unchanged.

    The function `fit` replaces the identity by maps that make the layers' keys and values similar.
    """
    lower_means, upper_means, turns, slots = maps
    lower_means.zero_()
    upper_means.zero_()
    turns.copy_(torch.eye(turns.shape[-1], device=turns.device))
    slots.copy_(torch.arange(slots.shape[1], device=slots.device))


class Sums(NamedTuple):
    """Two functions: one sums rows (keys or values) of two layers, the other sums products of these
    rows.

    From the sums, `fit` computes the maps that make the two layers' keys and values similar.
    """

    # of rows as `fit` takes them: (B, H, 4, D), the sums of the rows for which `counted` is true
    rows: Callable[[Sequence[Tensor], Tensor], Tensor]
    # (B, H, 2, D, D) for keys and values, or (B, H, 1, D, D) for one kind, by the upper layer's
    # heads: sums of a row of the upper layer times the matching head's row of the lower layer,
    # after subtracting the means from both
    products: Callable[[Sequence[Tensor], Tensor, Maps], Tensor]


def fit(
    maps: Maps,
    # keys and values of the lower layer, then of the upper layer, each (B, H, N, D); or only
    # values, if only values are merged
    rows: Sequence[Tensor],
    counted: Tensor,  # bool (B, N), the rows that the maps are fitted on
    sums: Sums | None = None,  # by default those of plain PyTorch
    angles: Tensor | None = None,  # (D / 2,) of the keys' rotary embedding, per position
    span: int = 0,  # how many positions after those of the rows later keys will have
) -> None:
    """Write the maps that bring two layers' rows (keys or values) closest to each other.

    `maps` contains the mean of each layer's rows, the matching heads (`slots`), and rotations
    (`turns`). The rotations turn the upper layer's rows towards those of the lower layer.

    `angles` are those of a rotary embedding. If they are passed, the fit treats each key as if it
    also appeared at later positions, up to `span` positions after its own.

    Rotations in `maps` that are not the identity were fitted to other rows before. `fit` then keeps
    the matching heads. `fit` also keeps a rotation where the new rows are too few to determine a
    better one. After rotary embedding, a rotation that fits the keys of a few tokens may not fit
    the keys at later positions.
    """
    add, multiply = sums or (sum_rows, multiply_rows)
    kinds, depth = maps.turns.shape[2], maps.turns.shape[-1]
    is_given = (maps.turns != torch.eye(depth, device=counted.device)).flatten(1).any(1)
    total = add(rows, counted)
    means = total / counted.sum(1).clamp_min(1).to(total.dtype)[:, None, None, None]
    maps.lower_means.copy_(means[:, :, :kinds])
    maps.upper_means.copy_(means[:, :, kinds:])
    likeness = [_likeness(rows[at::kinds], counted, means[:, :, at::kinds]) for at in range(kinds)]
    slots = matched(torch.stack(likeness).sum(0)).to(maps.slots.dtype)
    maps.slots.copy_(torch.where(is_given[:, None], maps.slots, slots))
    with _exact(rows[0]):
        products = multiply(rows, counted, maps)
        if angles is not None and span > 0:
            _spread(maps, products, counted.sum(1), angles, span)
        least, given = _SHARE
        share = torch.where(is_given, given, least)[:, None, None, None, None]
        maps.turns.copy_(polar(products, share * maps.turns.to(products.dtype)))


def _spread(maps: Maps, products: Tensor, count: Tensor, angles: Tensor, span: int) -> None:
    """Average two layers' mean keys, and sums of products of their keys, over positions from the
    keys' own to `span` positions later.

    At a later position, a rotary embedding rotates the same key further. The averages replace each
    layer's mean key, in `maps`, and the sums over tokens, in `products`. Each sum adds up the outer
    products of the upper layer's keys and the lower layer's keys, after subtracting the means.
    `count` is the number of these tokens, and `angles` are those of the rotary embedding.
    """
    kind = products.dtype
    lower, upper = (x[:, :, 0].to(kind) for x in (maps.lower_means, maps.upper_means))
    count = count.to(kind)[:, None, None, None]

    def moved(of_upper: Tensor, of_lower: Tensor) -> Tensor:
        return count * of_upper.unsqueeze(3) * in_order(of_lower, maps.slots).unsqueeze(2)

    found = mean_product(products[:, :, 0] + moved(upper, lower), angles, span)
    for means, x in ((maps.lower_means, lower), (maps.upper_means, upper)):
        means[:, :, 0] = mean_key(x, angles, span).to(means.dtype)
    lower, upper = (x[:, :, 0].to(kind) for x in (maps.lower_means, maps.upper_means))
    products[:, :, 0] = found - moved(upper, lower)


def common(rows: Sequence[Tensor], counted: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the pairs of similar heads of two cache layers, and sums of outer products of their
    keys and of their values.

    To align two layers, lower and upper, the upper layer's rows are rotated towards those of the
    lower layer. A row is the key or the value of one token in one attention head. Each head of the
    upper layer has one matching head in the lower layer. The index of the matching head is called
    the slot. All sequences share the two results:

    - the slot of each head of the upper layer, (H);
    - the sums of outer products of the two layers' rows, over all sequences, (H, 2, D, D).

    The orthogonal matrices closest to these sums are the rotations that align the layers. `rows`
    contains the keys and values of both layers. `counted`, bool (B, N), marks the tokens that the
    sums include. `slots` contains the slots that an earlier call chose. If `slots` is None, this
    call chooses the slots.
    """
    batch, heads, _, depth = rows[0].shape
    total = sum_rows(rows, counted)
    means = total / counted.sum(1).clamp_min(1).to(total.dtype)[:, None, None, None]
    if slots is None:
        both = (_likeness(rows[at::2], counted, means[:, :, at::2]) for at in (0, 1))
        slots = matched(sum(both).sum(0, keepdim=True))[0]  # type: ignore[union-attr]
    turns = means.new_empty((batch, heads, 2, depth, depth))
    maps = Maps(means[:, :, :2], means[:, :, 2:], turns, slots.expand(batch, heads))
    with _exact(rows[0]):
        return slots, multiply_rows(rows, counted, maps).sum(0)


def sum_rows(rows: Sequence[Tensor], counted: Tensor) -> Tensor:
    """Return the sums over tokens of two layers' keys and values, in fp32 or fp64.

    `rows` contains the keys and values of the lower layer, then those of the upper layer, or only
    the values. Each tensor is (B, H, N, D), and the result is (B, H, `len(rows)`, D). Only tokens
    for which `counted` is true are added.
    """
    kind = wide(rows[0].dtype)
    found = []
    for x in rows:
        total = torch.zeros_like(x[:, :, 0], dtype=kind)
        for span in _spans(x):
            total += _only(counted[:, span], x[:, :, span]).sum(2, dtype=kind)
        found.append(total)
    return torch.stack(found, 2)


def multiply_rows(rows: Sequence[Tensor], counted: Tensor, maps: Maps) -> Tensor:
    """Return sums over tokens of products of two cache layers' keys or values, in fp32 or fp64.

    A row is the key or the value of one token in one attention head. A product is the outer product
    of an upper layer's row and the row of the matching head in the lower layer. From each row, the
    function first subtracts the mean row of the same layer and head. `maps` contains these means
    and the matching heads. `rows` contains the keys and values of the lower layer, then those of
    the upper layer, or only the values. Only tokens for which `counted` is true are added.
    """
    products = torch.zeros_like(maps.turns, dtype=wide(rows[0].dtype))
    kinds = len(rows) // 2
    for at, span in itertools.product(range(kinds), _spans(rows[0])):
        x = in_order(centred(rows[at][:, :, span], maps.lower_means[:, :, at]), maps.slots)
        y = centred(rows[at + kinds][:, :, span], maps.upper_means[:, :, at])
        x, y = (_only(counted[:, span], each) for each in (x, y))
        products[:, :, at] += y.transpose(-1, -2) @ x
    return products


def _exact(x: Tensor) -> torch.autocast:
    """Return a context in which autocast does not round matrix products."""
    return torch.autocast(x.device.type, enabled=False)


def centred(rows: Tensor, means: Tensor) -> Tensor:
    """Return keys or values (B, H, N, D) minus their mean (B, H, D), in fp32 or fp64."""
    kind = wide(rows.dtype)
    return rows.to(kind) - means.to(kind).unsqueeze(2)


def in_order(x: Tensor, heads: Tensor) -> Tensor:
    """Return `x`, (B, H, ...), with its heads (the second dimension) reordered by the given head
    indices (B, H)."""
    index = heads.long().view(*heads.shape, *(1 for _ in x.shape[2:])).expand_as(x)
    return x.gather(1, index)


def upper_heads(maps: Maps) -> Tensor:
    """Return, for each head of the lower of two layers, the index of the upper layer's head paired
    with it, (B, H).

    A KV cache merges the keys and values, or only the values, of two paired heads. `maps.slots`
    contains the reverse: the lower layer's head for each head of the upper layer.
    """
    heads: Tensor = maps.slots.argsort(1)
    return heads


def aligned(rows: Sequence[Tensor], maps: Maps) -> list[Tensor]:
    """Apply the maps to the keys and values of two layers, and return the results, called aligned
    rows.

    The maps subtract the mean of each layer's rows, and rotate the upper layer's rows towards those
    of the lower layer. A row is the key or the value of one token in one attention head. In the
    results, each head of the upper layer stands at the index of the lower layer's matching head.
    The results are in fp32 or fp64. `rows` contains the keys and values of the lower layer, then
    those of the upper layer, or only the values.
    """
    heads, kinds = upper_heads(maps), len(rows) // 2
    found = [centred(rows[at], maps.lower_means[:, :, at]) for at in range(kinds)]
    with _exact(rows[0]):
        for at in range(kinds):
            y = in_order(centred(rows[at + kinds], maps.upper_means[:, :, at]), heads)
            found.append(y @ in_order(maps.turns[:, :, at], heads).to(y.dtype))
    return found


def cosines(rows: Sequence[Tensor], counted: Tensor) -> list[Tensor]:
    """Return the cosines between the aligned rows (keys or values) of two layers.

    To align rows, the function subtracts their means, and rotates the upper layer's rows towards
    those of the lower layer. The result is one tensor (B, H, N) for keys and one for values. `rows`
    contains the keys and values of the lower layer, then those of the upper layer.
    """
    batch, heads, _, depth = rows[0].shape
    means = rows[0].new_empty((batch, heads, 2, depth), dtype=wide(rows[0].dtype))
    turns = means.new_empty((*means.shape, depth))
    slots = torch.empty((batch, heads), dtype=torch.int32, device=means.device)
    maps = Maps(means, torch.empty_like(means), turns, slots)
    identity(maps)
    fit(maps, rows, counted)
    found = aligned(rows, maps)
    return [torch.cosine_similarity(found[at], found[at + 2], dim=-1) for at in (0, 1)]


def restored(
    rows: Tensor,  # (B, H, N, D) fp32 or fp64, aligned, slot by slot
    norms: Tensor | None,  # (B, H, N), factors of the rows
    # of the layer, as the ops take them: means (B, H, D), turns (B, H, D, D), slots (B, H)
    maps: Sequence[Tensor | None],
) -> Tensor:
    """Invert the alignment of one layer's keys or values with another layer's, and restore the
    layer's order of heads.

    Two layers of a KV cache, lower and upper, are aligned with each other. A row is one token's key
    or value in one head. An aligned row is a row minus a mean. In the upper layer, the difference
    is also rotated towards the lower layer's rows. The aligned rows of an upper layer's head stand
    at the head's slot: the index of the lower layer's matching head. The function rotates the rows
    back and adds the means.
    """
    means, turns, slots = maps
    kind = rows.dtype
    rows = rows if slots is None else in_order(rows, slots)
    rows = rows if norms is None else rows * norms.to(kind).unsqueeze(-1)
    if turns is not None:
        with _exact(rows):
            rows = rows @ turns.to(kind).transpose(-1, -2)
    return rows if means is None else rows + means.to(kind).unsqueeze(2)


def _only(counted: Tensor, x: Tensor) -> Tensor:
    """Return x, (B, H, N, D), with zeros in the rows for which `counted` is false, even where x
    contains nan there."""
    return x.masked_fill(~counted[:, None, :, None], 0.0)


def _spans(x: Tensor) -> list[slice]:
    step = max(1, _AT_ONCE // max(1, x[:, :, 0].numel()))
    return [slice(at, at + step) for at in range(0, x.shape[2], step)]


def _likeness(rows: Sequence[Tensor], counted: Tensor, means: Tensor) -> Tensor:
    """Return how similar each head of an upper and each head of a lower layer are, (B, H, H).

    The function `matched` uses the similarities to pair the heads of two layers of a KV cache. The
    keys (or values) of one head, minus their mean, form a matrix with one row per token. For two
    such matrices X and Y, the similarity is the norm of `Y.T @ X`, divided by the norms of X and Y.
    An orthogonal map of one head's rows does not change this similarity.

    `rows` contains the keys, or the values, of the lower layer and of the upper layer. Tokens for
    which `counted` is false are ignored. `means`, (B, H, 2, D), contains each layer's mean over the
    tokens for which `counted` is true. The function reads at most `_MATCHED_ON` tokens per
    sequence. On a GPU, 16-bit rows are multiplied in 16 bits.
    """
    few = max(1, -(-rows[0].shape[2] // _MATCHED_ON))
    counted = counted[:, ::few]
    x, y = (_only(counted, centred(r[:, :, ::few], means[:, :, at])) for at, r in enumerate(rows))
    sizes = [r.square().sum((2, 3)).sqrt().clamp_min(1e-30) for r in (y, x)]
    if x.is_cuda and rows[0].dtype.itemsize == 2:
        x, y = (r / size[..., None, None] for r, size in ((x, sizes[1]), (y, sizes[0])))
        x, y, sizes = x.to(rows[0].dtype), y.to(rows[0].dtype), [torch.ones_like(s) for s in sizes]
    batch, heads, _, depth = x.shape
    at_once = max(1, _PRODUCTS // (heads * depth) ** 2)
    found = []
    for start in range(0, batch, at_once):
        a, b = (r[start : start + at_once].transpose(2, 3).flatten(1, 2) for r in (y, x))
        with _exact(a):
            products = (a @ b.transpose(1, 2)).view(-1, heads, depth, heads, depth)
        found.append(products.to(wide(products.dtype)).square().sum((2, 4)).sqrt())
    return torch.cat(found) / (sizes[0].unsqueeze(2) * sizes[1].unsqueeze(1))


def matched(likeness: Tensor) -> Tensor:
    """Choose a different column for each row of the (B, H, H) similarities, such that the sum of
    the chosen similarities is large. Return the columns, (B, H).

    The function first chooses the largest similarity, then the largest in the remaining rows and
    columns, and so on. At the end a few pairs of rows exchange their columns if the exchange
    increases the sum.
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


def polar(x: Tensor, more: Tensor | None = None) -> Tensor:
    """Return the orthogonal matrices nearest to x, (..., D, D), computed with matrix products only.

    The function first adds to x the matrix `more`, multiplied by x's norm divided by the root of D.
    By default, `more` is a small multiple of the identity. The method is the Newton-Schulz
    iteration. Each step first multiplies the matrix by a factor. The factor is larger if the matrix
    can still have small singular values. So each of the first steps multiplies small singular
    values by 2.6.
    """
    depth = x.shape[-1]
    size = x.norm(dim=(-2, -1), keepdim=True)
    if more is None:
        more = _SHARE[0] * torch.eye(depth, dtype=x.dtype, device=x.device)
    y = x / size.clamp_min(1e-30) + more / depth**0.5
    y = (y / y.norm(dim=(-2, -1), keepdim=True)).reshape(-1, depth, depth)
    least = _LEAST
    for _ in range(STEPS):
        by = (3.0 / (1.0 + least + least * least)) ** 0.5
        square = torch.bmm(y.transpose(1, 2), y)
        y = torch.baddbmm(y, y, square, beta=1.5 * by, alpha=-0.5 * by**3)
        least = min(1.0, 0.5 * least * by * (3.0 - (by * least) ** 2))
    found: Tensor = y.view(x.shape)
    return found
