"""The reference implementation: encode, append, decode and attend in plain PyTorch.

This implementation is correct on any device and in any floating dtype. The functions copy the
number of tokens to the CPU, so the CPU waits for the GPU if the cache is on a GPU. Arithmetic runs
in float32, or in float64 for float64 caches. Scales are stored in the cache's dtype, and codes are
computed with these stored scales.

Papers: KIVI (scales per channel for keys, per token for values), BitNet a4.8 (one scale per head).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import wide
from ..library import heads_inside
from .alignment import in_order, restored
from .layout import CODED, LENGTH, PLAIN, block_of, channel_group, codes_of, value_bits_of


def _between(x: Tensor, dim: int, left_out: Tensor | None, bits: int) -> Tensor:
    """Return the quantisation step and the zero point of codes with `bits` bits, (2, ...).

    The step and the zero point map the extremes of `x` along `dim` to the first and the last code.
    """
    low = high = x
    if left_out is not None:
        low = x.masked_fill(left_out, torch.inf)
        high = x.masked_fill(left_out, -torch.inf)
    low, high = low.amin(dim), high.amax(dim)
    is_empty = low > high
    low = low.masked_fill(is_empty, 0.0)
    # Divide by a tensor: for a number CUDA multiplies by its inverse, which rounds differently.
    step = (high.masked_fill(is_empty, 0.0) - low) / x.new_full((1,), 2**bits - 1)
    return torch.stack([step, low])


def _codes(x: Tensor, step: Tensor, zero: Tensor, bits: int) -> Tensor:
    return ((x - zero) / step + 0.5).floor().clamp(0, 2**bits - 1).to(torch.uint8)


def _stored(step: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a quantisation step rounded to the dtype of scales, or 1 if the rounded step is 0."""
    rounded = step.to(dtype)
    return rounded.masked_fill(rounded == 0, 1.0)


def encode(
    x: Tensor,  # (B, H, n, G, D), n groups of G tokens
    bits: int,  # of a code
    scheme: str,  # one of `SCHEMES`
    *,
    is_value: bool,  # values rather than keys
    # bool (B or 1, H or 1, n, G), tokens ignored in the scales of keys, or None; their
    # codes are undefined
    left_out: Tensor | None = None,
    dtype: torch.dtype | None = None,  # of the scales, by default that of x
) -> tuple[Tensor, Tensor]:
    """Encode keys or values in groups of tokens. Return the codes and the scales.

    The codes are (B, H, n, G * D * bits / 8) uint8. With the scheme `kivi`, the scales of keys are
    (B, H, n, D, 2): a step and a zero point per channel. The scales of values are (B, H, n, blocks,
    G, 2): a step and a zero point per token and channel block. With the scheme `per_head`, the
    scales are (B, H, n, 1, G, 1): a step per token.

    If `bits` is PLAIN, the cache stores keys and values without codes. In place of codes, the
    function then returns the elements of x, with shape (B, H, n, G * D). In place of scales, the
    function then returns an empty tensor.
    """
    dtype = x.dtype if dtype is None else dtype
    if bits == PLAIN:
        return x.to(dtype).flatten(-2), x.new_zeros((*x.shape[:3], 0, 2), dtype=dtype)
    values = x.to(wide(x.dtype))
    hidden = None if left_out is None else left_out.unsqueeze(-1)
    if scheme == "per_head":
        top = 2 ** (bits - 1)
        step = _stored(values.abs().amax(-1) / values.new_full((1,), top - 1), dtype)
        whole = (values / step.to(values.dtype).unsqueeze(-1) + 0.5).floor()
        codes = (whole.clamp(1 - top, top - 1) + top).to(torch.uint8)
        scales = step[:, :, :, None, :, None]
    else:
        dim = -2
        if is_value:
            dim, hidden = -1, None
            values = values.unflatten(-1, (-1, channel_group(x.shape[-1], scheme)))
        step, zero = _between(values, dim, hidden, bits)
        step, zero = _stored(step, dtype), zero.to(dtype)
        wide_step, wide_zero = (t.to(values.dtype).unsqueeze(dim) for t in (step, zero))
        codes = _codes(values, wide_step, wide_zero, bits)
        scales = torch.stack([step, zero], -1)  # (B, H, n, D, 2); of values (B, H, n, G, parts, 2)
        if is_value:
            codes, scales = codes.flatten(-2), scales.transpose(3, 4)
    return block_of(codes, bits, is_value=is_value), scales


def decode(codes: Tensor, scales: Tensor, bits: int, depth: int, *, is_value: bool) -> Tensor:
    """Decode codes of keys or values to numbers, (B, H, n * G, D).

    There are n groups of G tokens, and `depth` is D, the number of channels per head. The result is
    float32, or float64 for float64 scales. Codes and scales have the format that `encode` returns.
    """
    kind = wide(scales.dtype)
    if bits == PLAIN:
        plain: Tensor = codes.unflatten(-1, (-1, depth)).flatten(2, 3)
        return plain.to(kind)
    numbers = codes_of(codes, bits, depth, is_value=is_value).to(kind)  # (B, H, n, G, D)
    scales = scales.to(kind)
    if is_per_head(scales):
        found = (numbers - 2 ** (bits - 1)) * scales[:, :, :, 0]
    elif is_value:
        parts = numbers.unflatten(-1, (scales.shape[3], -1))
        step, zero = scales.transpose(3, 4).unbind(-1)  # (B, H, n, G, parts)
        found = (parts * step[..., None] + zero[..., None]).flatten(-2)
    else:
        step, zero = scales.unsqueeze(3).unbind(-1)  # (B, H, n, 1, D)
        found = numbers * step + zero
    flat: Tensor = found.flatten(2, 3)
    return flat


def is_per_head(k_or_v_scales: Tensor) -> bool:
    """Return whether the scales of a cache have one number per token and head."""
    return k_or_v_scales.shape[-1] == 1


def scheme_of(k_or_v_scales: Tensor) -> str:
    """Return the quantization scheme of a cache, given its scales."""
    return "per_head" if is_per_head(k_or_v_scales) else "kivi"


def require_room(length: int, new: int, limit: int) -> None:
    """Raise an error if a cache has no space for `new` more tokens."""
    if length + new > limit:
        raise IndexError(
            f"the cache holds {limit} tokens, has {length} and is given {new}; make it longer "
            "(max_cache_len)"
        )


def groups_due(waiting: int, window: int, group: int) -> int:
    """Return how many groups of tokens a cache must encode, given its number of unencoded tokens.

    `waiting` is this number. The cache has memory for `window` unencoded tokens. If this memory is
    just full, one group must be encoded.
    """
    return max(0, (waiting - window) // group + 1) if waiting >= window else 0  # (192, 192, 64): 1


def append(
    pool: Sequence[Tensor], k: Tensor, v: Tensor, bits: int, recent: int, limit: int
) -> None:
    """Append keys and values, (B, H, T, D), to a layer's cache, and encode groups of old tokens.

    The latest `recent` tokens are never encoded. The cache can contain at most `limit` tokens.
    """
    k_codes, v_codes, k_scales, v_scales, k_window, v_window, k_kept, v_kept, places, counts = pool
    window, new = k_window.shape[2], k.shape[2]
    group = window - recent
    length, coded = int(counts[LENGTH]), int(counts[CODED])
    end = length + new
    require_room(length, new, limit)
    due = groups_due(end - coded, window, group)
    scheme = scheme_of(k_scales)
    v_bits = value_bits_of(k_codes.shape[3], v_codes.shape[3], bits)
    slots = torch.arange(coded, length, device=k.device) % window
    old_and_new = [
        torch.cat([held[:, :, slots], fresh], 2) for held, fresh in ((k_window, k), (v_window, v))
    ]
    positions = torch.arange(coded, end, device=k.device)
    is_kept = kept_until(places, positions)
    if due:
        first, count = coded // group, due * group
        left_out = is_kept[:, :, :count].unflatten(-1, (due, group))
        for x, codes, scales, is_value in (
            (old_and_new[0], k_codes, k_scales, False),
            (old_and_new[1], v_codes, v_scales, True),
        ):
            grouped = x[:, :, :count].unflatten(2, (due, group))
            width = v_bits if is_value else bits
            found = encode(grouped, width, scheme, is_value=is_value, left_out=left_out)
            codes[:, :, first : first + due], scales[:, :, first : first + due] = found
    fresh = torch.arange(max(length, end - window), end, device=k.device)
    for x, held, kept in ((k, k_window, k_kept), (v, v_window, v_kept)):
        held[:, :, fresh % window] = x[:, :, fresh - length]
        keep_first(x, kept, places, length)
    counts[LENGTH], counts[CODED] = end, coded + due * group


def kept_until(places: Tensor, positions: Tensor) -> Tensor:
    """Return which positions contain one of a sequence's first tokens, or padding before them.

    The result is bool (B, H or 1, n). The cache stores these first tokens exactly.
    """
    if places.shape[2] == 0:
        return torch.zeros(1, 1, positions.numel(), dtype=torch.bool, device=positions.device)
    return positions < places[:, :, :1] + places.shape[2]


def keep_first(x: Tensor, kept: Tensor, places: Tensor, length: int) -> None:
    """Copy a sequence's first tokens from `x` to `kept`, where the cache stores them exactly.

    `x` contains the keys, or the values, of tokens from the position `length` on.
    """
    source = places.long() - length
    is_here = (source >= 0) & (source < x.shape[2])
    if x.shape[2] and places.shape[2]:
        index = source.clamp(0, x.shape[2] - 1)[..., None].expand(kept.shape)
        kept.copy_(torch.where(is_here[..., None], x.gather(2, index), kept))


def view(
    pool: Sequence[Tensor],  # the tensors of a cache
    # of keys and of values, (B, H, N): factors of the decoded rows, negative for kept tokens; or
    # two None.
    norms: Sequence[Tensor | None],
    bits: int,  # of a code
    tokens: int,  # N, length of the result
    # `layout.Maps` of the layer, for layers that are aligned: means, turns, slots; turns and slots
    # are None in the lower layer, and there is one kind of each if only values are merged
    maps: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor]:
    """Return keys and values as a static cache would contain them, with zeros in empty positions.

    Keys and values are (B, H, N, D). Their dtype is that of the cache's window, which stores the
    latest tokens exactly.
    """
    k_codes, v_codes, k_scales, v_scales, k_window, v_window, k_kept, v_kept, places, counts = pool
    depth, dtype = k_window.shape[3], k_window.dtype
    v_bits = value_bits_of(k_codes.shape[3], v_codes.shape[3], bits)
    length, coded = counts[LENGTH], counts[CODED]
    position = torch.arange(tokens, device=counts.device)
    in_window = position % k_window.shape[2]
    is_coded = (position < coded)[:, None]
    is_recent = ((position >= coded) & (position < length))[:, None]
    slots = maps[2]
    has_own_keys = maps[0] is not None and maps[0].shape[2] == 1
    place = places if slots is None or has_own_keys else in_order(places, slots)
    place = place.long()
    there = torch.where((place >= 0) & (place < coded), place, tokens)
    results = []
    for codes, scales, window, kept, norm, is_value in (
        (k_codes, k_scales, k_window, k_kept, norms[0], False),
        (v_codes, v_scales, v_window, v_kept, norms[1], True),
    ):
        width = v_bits if is_value else bits
        decoded = decode(codes, scales, width, depth, is_value=is_value)
        if is_value or not has_own_keys:
            some = [None if x is None else x[:, :, -1 if is_value else 0] for x in maps[:2]]
            lengths = None if norm is None else norm[:, :, : decoded.shape[2]]
            decoded = restored(decoded, lengths, (*some, slots))
        short = tokens - decoded.shape[2]
        decoded = F.pad(decoded[:, :, :tokens], (0, 0, 0, max(0, short))).to(dtype)
        whole = torch.where(is_recent, window[:, :, in_window], decoded)
        whole = torch.where(is_recent | is_coded, whole, 0.0)
        # the extra last row receives the entries of the memory for exact tokens that contain no
        # token yet
        room = F.pad(whole, (0, 0, 0, 1))
        room.scatter_(2, there[..., None].expand(kept.shape), kept)
        results.append(room[:, :, :tokens].contiguous())
    return results[0], results[1]


def attend(
    q: Tensor,  # (B, Hq, 1, D)
    pool: Sequence[Tensor],  # as for `view`
    norms: Sequence[Tensor | None],  # likewise
    mask: Tensor | None,  # bool (B or 1, 1, 1, N), or None
    scale: float,  # factor of the scores
    bits: int,  # likewise
    maps: Sequence[Tensor | None] = (None, None, None),  # likewise
) -> Tensor:
    """Return the attention of one query per sequence over the tokens of a low-bit cache.

    `mask` hides the tokens for which it is false. If a mask hides all keys from a query, the result
    for this query is zero.
    """
    batch, heads, _, depth = q.shape
    kv_heads, length = pool[0].shape[1], int(pool[-1][LENGTH])
    if 0 in (length, q.numel()):
        return heads_inside(q).zero_()
    keys, values = view(pool, norms, bits, length, maps)
    seen = None
    if mask is not None:
        seen = mask[..., :length]
        seen = F.pad(seen, (0, length - seen.shape[3]), value=False)
    rows = q.reshape(batch, kv_heads, heads // kv_heads, depth)
    found = F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen, scale=scale)
    if seen is not None:
        found = found.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return heads_inside(q).copy_(found.reshape(q.shape))
