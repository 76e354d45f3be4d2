"""The reference implementation, in plain PyTorch, of appending to two layers whose KV caches share
directions (unit vectors).

Older tokens are merged across the two layers. For each merged token and head, there is one
direction for both layers' keys, and one for both layers' values. The latest tokens, and some older
tokens, stay unmerged: each layer stores their keys and values exactly. The functions are correct on
any device and in any floating dtype. `merge` takes the position in the cache as an argument and
does not wait for the device. `append` copies the number of tokens to the CPU, and so waits for the
device.

Paper: MiniCache, arXiv 2405.14366.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import alignment
from .layout import CODED, LENGTH, Maps, Pair, Shared
from .merging import (
    direction_and_length,
    distance,
    folded_length,
    kept_rows,
    shared_direction,
    threshold,
)
from .reference import decode, encode, groups_due, require_room

_HORIZON = 4
"""Times the length of the first tokens, up to which maps of keys have to serve."""
_AT_ONCE = 1 << 24
"""Elements of one layer's keys that are merged at a time; this bounds the temporary memory."""


@dataclass(frozen=True)
class Merging:
    """The settings with which the keys and values of two layers are merged.

    A row is a token's key, or value, in one layer. A merged token's two rows become one shared
    direction (a unit vector) and two lengths.
    """

    rule: str = "slerp"  # one of `merging.RULES`
    t: float = 0.5  # position on the arc: 0 is the lower layer's row, 1 the upper layer's
    gamma: float = 0.05  # share of the range of distances whose rows are stored exactly
    reading: str = "distinct"  # one of `merging.READINGS`
    scale: str = "norm"  # one of `merging.SCALES`
    keep_first: int = 4  # the first tokens of a sequence that are always stored exactly


def append_lower(own: Sequence[Tensor], k: Tensor, v: Tensor, limit: int) -> None:
    """Write new keys and values of the lower of two layers to the layer's window of latest tokens.

    For older tokens, the two layers share unit vectors of values, or of keys and values. A layer's
    window is the memory for its latest tokens, which are stored exactly. A later append to the
    upper layer merges older tokens of the two layers. `k` and `v` have the shape (B, H, T, D).
    `own` contains the lower layer's `k_window`, `v_window` and `counts`. The first count is the
    layer's number of tokens. `limit` is the number of tokens that fit into the cache.
    """
    k_window, v_window, counts = own
    length, new = int(counts[LENGTH]), k.shape[2]
    require_room(length, new, limit)
    slots = torch.arange(length, length + new, device=k.device) % k_window.shape[2]
    k_window[:, :, slots], v_window[:, :, slots] = k, v
    counts[LENGTH] = length + new


def require_in_step(counts: Tensor, due: int) -> None:
    """Raise RuntimeError if the lower (earlier) of two layers does not have `due` tokens.

    The two layers share directions (unit vectors) of keys and values, or only of values. `counts`
    contains the lower layer's number of tokens, at the index LENGTH.
    """
    there = int(counts[LENGTH])
    if there != due:
        raise RuntimeError(
            f"the lower layer of a pair has {there} tokens where {due} are due: a "
            "forward pass ended between the two. Reset the cache."
        )


def append(
    pair: Pair,
    # keys and values (B, H, T, D) of the lower layer, or None where `append_lower` has written them
    lower_new: tuple[Tensor, Tensor] | None,
    upper_new: tuple[Tensor, Tensor],  # keys and values of the upper layer
    bits: int,  # of a code, or PLAIN
    recent: int,  # latest tokens, which are never merged
    limit: int,  # tokens that the cache holds
    settings: Merging,  # how rows are merged
    *,
    is_first: bool = False,  # the cache is empty; then no value is read on the host
    merging: Callable[..., None] | None = None,  # the function that merges rows, by default `merge`
    sums: alignment.Sums | None = None,  # by which maps are fitted, if not by plain PyTorch
    angles: Tensor | None = None,  # (D / 2,) of the keys' rotary embedding, if it is known
) -> None:
    """Append new tokens to the caches of two layers, and merge older tokens across the layers.

    Merging replaces the keys of a token in the two layers by one shared direction (unit vector) and
    two lengths. The token's two values are merged in the same way. The latest tokens stay unmerged
    in each layer's window. When the windows are full, the group of their oldest tokens is merged.
    If `lower_new` is None, `append_lower` has already written the lower layer's tokens.
    """
    _, lower, upper, maps = pair
    window, new = upper.k_window.shape[2], upper_new[0].shape[2]
    group = window - recent
    length, coded, ahead = 0, 0, 0 if lower_new is not None else new
    if not is_first:
        length, coded = int(upper.counts[LENGTH]), int(upper.counts[CODED])
        require_in_step(lower.counts, length + ahead)
    end = length + new
    require_room(length, new, limit)
    due = groups_due(end - coded, window, group)
    device = upper.counts.device
    rows = []
    for own, fresh, has in ((lower, lower_new, length + ahead), (upper, upper_new, length)):
        slots = torch.arange(coded, has, device=device) % window
        parts: tuple[Tensor | None, ...] = (None, None) if fresh is None else fresh
        for held, part in zip(own[:2], parts, strict=True):
            old = held[:, :, slots]
            rows.append(old if part is None else _joined(old, part))
    if is_first and maps is not None:
        # The first tokens of both layers are present: the maps of a cache are fitted to the first
        # tokens that it gets.
        position = torch.arange(end, device=device)
        behind = position - pair.shared.starts[:, :1]
        later = min(limit, _HORIZON * end) - end
        alignment.fit(maps, rows, behind >= settings.keep_first, sums, angles, later)
    # All rows of a prompt compete together for the memory for unmerged rows; later rows compete
    # group by group.
    step = max(1, due) * group if is_first else group
    for at in range(0, due * group, step):
        some = [x[:, :, at : at + step] for x in rows]
        (merging or merge)(pair, some, coded + at, group, bits, settings)
    fresh_slots = torch.arange(max(length, end - window), end, device=device)
    for own, (k, v) in ((lower, rows[:2]), (upper, rows[2:])):
        for held, x in zip(own[:2], (k, v), strict=True):
            held[:, :, fresh_slots % window] = x[:, :, fresh_slots - coded]
        own.counts[LENGTH].fill_(end)
        own.counts[CODED].fill_(coded + due * group)


def _joined(old: Tensor, new: Tensor) -> Tensor:
    return torch.cat([old, new], 2) if old.shape[2] else new


def merge(
    pair: Pair,
    # keys and values of the lower layer, then of the upper, each (B, H, n * group, D)
    rows: Sequence[Tensor],
    coded: int,  # tokens merged so far
    group: int,  # tokens per group
    bits: int,  # of a code, or PLAIN
    settings: Merging,  # how rows are merged
) -> None:
    """Merge two layers' keys and values (`rows`), and store the results in the caches `pair`.

    Merging replaces a token's two keys by one shared direction (unit vector) and two lengths. The
    two values are merged likewise. The first token of `rows` has the position `coded`. The function
    copies nothing from the GPU to the CPU.
    """
    shared, lower, upper, maps = pair
    count = rows[0].shape[2]
    spans = spans_of(rows[0], group)
    apart = torch.cat([_apart(aligned(rows, span, maps)) for span in spans], 2)
    position = torch.arange(coded, coded + count, device=apart.device)
    behind = position - shared.starts.unsqueeze(-1)  # the start of the sequence
    is_kept = keep(shared, apart, behind, settings)
    keep_rows(pair, rows, coded)
    left_out = is_kept | (behind < 0)
    for span in spans:
        part = aligned(rows, span, maps)
        at = slice((coded + span.start) // group, (coded + span.stop) // group)
        for place, is_value in ((0, False), (1, True)):
            both = part[place], part[place + 2]
            own = lower.norms[..., place], upper.norms[..., place]
            hidden = left_out[:, :, span]
            codes, scales = shared[place], shared[2 + place]
            found = _code(both, hidden, codes, scales, own, at, group, bits, settings, is_value)
            if not is_value:
                found = [mine.masked_fill(is_kept[:, :, span], -1.0) for mine in found]
            if maps is not None:  # lengths are those of the upper layer's own heads
                found[1] = alignment.in_order(found[1], maps.slots)
            for norms, mine in zip(own, found, strict=True):
                norms[:, :, at.start * group : at.stop * group] = mine


def spans_of(x: Tensor, group: int, elements: int = _AT_ONCE) -> list[slice]:
    """Divide the tokens of keys or values, (B, H, n * group, D), into ranges of whole groups.

    A caller merges the keys or values of two layers range by range, which bounds the temporary
    memory. In a range, `x` has at most `elements` elements. But a range has at least one group.
    """
    batch, heads, count, depth = x.shape
    at_once = max(1, elements // max(1, batch * heads * group * depth)) * group
    return [slice(at, min(at + at_once, count)) for at in range(0, count, at_once)]


def aligned(rows: Sequence[Tensor], span: slice, maps: Maps | None) -> list[Tensor]:
    """Return two layers' keys and values in the form in which they are compared and merged.

    `rows` contains the keys and values of the lower layer, then those of the upper layer. The
    result has only the tokens in `span`. If `maps` is None, keys and values stay as they are.
    Otherwise the function applies these linear maps, which make the two layers similar. In the
    result, each head of the upper layer then stands at the index of the lower layer's matching
    head.
    """
    some = [x[:, :, span] for x in rows]
    return some if maps is None else alignment.aligned(some, maps)


def _apart(rows: Sequence[Tensor]) -> Tensor:
    """Return the larger of two distances, (B, H, n): of two layers' keys, and of their values.

    `rows` contains the keys and values of the lower layer, then those of the upper layer. The
    distance of two vectors is their angle divided by pi.
    """
    directions = [direction_and_length(x)[0] for x in rows]
    return torch.maximum(
        distance(directions[0], directions[2]), distance(directions[1], directions[3])
    )


def keep_rows(pair: Pair, rows: Sequence[Tensor], coded: int) -> None:
    """Copy to each layer's own memory the keys and values of tokens that two layers do not merge.

    The two layers share merged keys and values of other tokens. The function `keep` has chosen the
    tokens that stay unmerged. This function copies from `rows`, which contains the keys and values
    of the lower layer, then those of the upper layer. The first token in each tensor of `rows` has
    the position `coded` in the cache.
    """
    (_, _, _, _, places, *_), lower, upper, maps = pair
    count, depth = rows[0].shape[2:]
    of_upper = places if maps is None else alignment.in_order(places, maps.slots)
    held = (lower.k_kept, lower.v_kept), (upper.k_kept, upper.v_kept)
    for both, place, some in zip(held, (places, of_upper), (rows[:2], rows[2:]), strict=True):
        is_here = (place >= coded) & (place < coded + count)
        index = (place.long() - coded).clamp(0, count - 1).unsqueeze(-1).expand(-1, -1, -1, depth)
        for kept, x in zip(both, some, strict=True):
            kept.copy_(torch.where(is_here.unsqueeze(-1), x.gather(2, index), kept))


def keep(shared: Shared, apart: Tensor, behind: Tensor, settings: Merging) -> Tensor:
    """Choose the tokens for which the keys and values of two layers are not merged.

    The function writes the positions of these tokens to `shared.places`. The result, bool (B, H,
    n), is true for these tokens. `apart` (B, H, n) is the distance between the two layers' keys, or
    between their values if it is larger. `behind` (B, H, n) is a token's position in its sequence,
    negative for padding.
    """
    _, _, _, _, places, starts, bound, kept_count, left_over = shared
    is_pinned = (behind >= 0) & (behind < settings.keep_first)
    counted = behind >= settings.keep_first
    found = threshold(apart, counted, gamma=settings.gamma, reading=settings.reading)
    bound.copy_(torch.where(bound.isnan(), found.to(bound.dtype), bound))
    room = places.shape[2] - settings.keep_first - kept_count
    chosen, rank, more = kept_rows(
        apart, counted, bound.to(apart.dtype), room, reading=settings.reading
    )
    row = torch.where(is_pinned, behind, settings.keep_first + kept_count.unsqueeze(-1) + rank)
    is_kept = is_pinned | chosen
    row = torch.where(is_kept, row, places.shape[2])
    listed = torch.nn.functional.pad(places, (0, 1))  # the last entry is for rows that are not kept
    listed.scatter_(2, row.long(), (behind + starts.unsqueeze(-1)).to(places.dtype))
    places.copy_(listed[..., :-1])
    kept_count += chosen.sum(-1).to(kept_count.dtype)
    left_over += more.to(left_over.dtype)
    return is_kept


def _code(
    pair: tuple[Tensor, Tensor],
    left_out: Tensor,
    codes: Tensor,
    scales: Tensor,
    norms: tuple[Tensor, Tensor],
    at: slice,
    group: int,
    bits: int,
    settings: Merging,
    is_value: bool,
) -> list[Tensor]:
    """Encode the common directions (unit vectors) of two layers' keys or of two layers' values.

    For each merged token and head, the two layers share one direction for their keys, and one for
    their values. The directions of `group` tokens are encoded together. The codes are written to
    the groups of the cache that the slice `at` selects.

    `pair` contains the keys, or values, of the lower layer and of the upper layer, (B, H, n, D).
    Return two tensors (B, H, n): for each layer, the lengths (norms) by which decoded directions
    are multiplied. The function reads only the dtype of the argument `norms`.
    """
    depth = pair[0].shape[3]
    direction = shared_direction(*pair, rule=settings.rule, t=settings.t)
    grouped = direction.unflatten(2, (-1, group))
    hidden = left_out.unflatten(2, (-1, group))
    found = encode(grouped, bits, "kivi", is_value=is_value, left_out=hidden, dtype=scales.dtype)
    codes[:, :, at], scales[:, :, at] = found
    decoded = decode(*found, bits, depth, is_value=is_value)
    most = torch.finfo(norms[0].dtype).max
    return [folded_length(x, decoded, scale=settings.scale).clamp_max(most) for x in pair]
