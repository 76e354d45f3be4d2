"""Append to the caches of two layers that share values and have their own keys, in plain PyTorch.

`append` is correct on any device and in any floating dtype. `append` copies the number of tokens to
the CPU, so the CPU waits for the device.

Paper: MiniCache, arXiv 2405.14366, which merges keys and values; this module merges only values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import alignment
from .layout import CODED, LENGTH, ValuePair, value_bits_of
from .merging import folded_length, shared_direction
from .pair_reference import require_in_step, spans_of
from .reference import decode, encode, groups_due, keep_first, kept_until, require_room


@dataclass(frozen=True)
class Merging:
    """The settings with which the values of two layers are merged.

    A row is a token's value in one layer. A merged token's two rows become one shared direction (a
    unit vector) and two lengths.
    """

    rule: str = "slerp"  # one of `merging.RULES`
    t: float = 0.5  # position on the arc: 0 is the lower layer's row, 1 the upper layer's
    scale: str = "norm"  # one of `merging.SCALES`


def append(
    pair: ValuePair,
    # keys and values (B, H, T, D) of the lower layer, or None where they are in its window
    lower_new: tuple[Tensor, Tensor] | None,
    upper_new: tuple[Tensor, Tensor],  # keys and values of the upper layer
    bits: int,  # of a key's code
    recent: int,  # latest tokens, which are never stored as codes
    limit: int,  # tokens that the cache holds
    settings: Merging,  # how values are merged
    *,
    is_first: bool = False,  # the cache is empty: fit the maps to these tokens
) -> None:
    """Append new tokens to the caches of two layers that share values, and encode older tokens.

    The latest tokens stay unencoded in each layer's window. When the windows are full, the group of
    their oldest tokens is encoded, with merged values. If `lower_new` is None, the lower layer's
    tokens are already in its window.
    """
    shared, lower, upper, maps = pair
    window, new = upper.k_window.shape[2], upper_new[0].shape[2]
    group = window - recent
    length, coded = int(upper.counts[LENGTH]), int(upper.counts[CODED])
    there = length + (0 if lower_new is not None else new)
    require_in_step(lower.counts, there)
    end = length + new
    require_room(length, new, limit)
    due = groups_due(end - coded, window, group)
    count = due * group
    device = upper.counts.device
    positions = torch.arange(coded, end, device=device)
    early = kept_until(shared.places, positions)
    rows: list[Tensor] = []
    for own, fresh, has in ((lower, lower_new, there), (upper, upper_new, length)):
        slots = torch.arange(coded, has, device=device) % window
        for held, place in ((own.k_window, 0), (own.v_window, 1)):
            old = held[:, :, slots]
            rows.append(old if fresh is None else torch.cat([old, fresh[place]], 2))
    values = rows[1], rows[3]
    if is_first:
        alignment.fit(maps, values, ~early[:, 0].expand(values[0].shape[0], -1))
    if due:
        at = slice(coded // group, coded // group + due)
        hidden = early[:, :, :count].unflatten(-1, (due, group))
        for own, keys in ((lower, rows[0]), (upper, rows[2])):
            grouped = keys[:, :, :count].unflatten(2, (due, group))
            found = encode(grouped, bits, "kivi", is_value=False, left_out=hidden)
            own.k_codes[:, :, at], own.k_scales[:, :, at] = found
        share_values(pair, [x[:, :, :count] for x in values], coded, group, bits, settings)
        for own, both in ((lower, rows[:2]), (upper, rows[2:])):
            for x, kept in zip(both, (own.k_kept, own.v_kept), strict=True):
                keep_first(x[:, :, :count], kept, shared.places, coded)
    fresh_slots = torch.arange(max(length, end - window), end, device=device)
    for own, (k, v) in ((lower, rows[:2]), (upper, rows[2:])):
        for held, x in ((own.k_window, k), (own.v_window, v)):
            held[:, :, fresh_slots % window] = x[:, :, fresh_slots - coded]
        own.counts[LENGTH].fill_(end)
        own.counts[CODED].fill_(coded + count)


def share_values(
    pair: ValuePair,
    values: list[Tensor],  # of the lower layer and of the upper, (B, H, n * group, D)
    coded: int,  # position of the first
    group: int,  # tokens per group
    bits: int,  # of a key's code
    settings: Merging,  # how values are merged
) -> None:
    """Encode the common directions (unit vectors) of two layers' values, in whole groups of tokens.

    The function writes codes, scales and `norms` to `pair.shared`. The stored scales are already
    multiplied by the lengths of the lower layer's values. `norms` contains the ratios of the upper
    layer's lengths to the lower layer's lengths.
    """
    shared, lower, _, maps = pair
    depth = values[0].shape[3]
    v_bits = value_bits_of(lower.k_codes.shape[3], shared.v_codes.shape[3], bits)
    for span in spans_of(values[0], group):
        both = alignment.aligned([x[:, :, span] for x in values], maps)
        direction = shared_direction(*both, rule=settings.rule, t=settings.t)
        grouped = direction.unflatten(2, (-1, group))
        kind = shared.v_scales.dtype
        found = encode(grouped, v_bits, "kivi", is_value=True, dtype=kind)
        at = slice((coded + span.start) // group, (coded + span.stop) // group)
        decoded = decode(*found, v_bits, depth, is_value=True)
        low, high = (folded_length(x, decoded, scale=settings.scale) for x in both)
        low = torch.maximum(low, _LEAST * high)
        by = low.unflatten(2, (-1, group))[:, :, :, None, :, None]
        shared.v_codes[:, :, at] = found[0]
        shared.v_scales[:, :, at] = (found[1].to(by.dtype) * by).to(kind)
        longer = (high / low.clamp_min(1e-30)).clamp_max(torch.finfo(shared.norms.dtype).max)
        # by the upper layer's own heads
        shared.norms[:, :, coded + span.start : coded + span.stop] = alignment.in_order(
            longer, maps.slots
        )


_LEAST = 1e-3
"""The least length of a lower layer's value, as a share of that of the upper layer's."""
