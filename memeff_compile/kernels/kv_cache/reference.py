"""The reference implementation: PyTorch's attention over the filled positions of the cache, one
key-value head at a time.

This implementation works on any device and in any floating dtype. If the cache is in CPU memory,
this implementation reads only the filled positions. If the cache is on a GPU, this implementation
reads the whole cache under a mask. To learn the number of filled positions, the CPU would have to
wait for the GPU. Keys and values are never repeated for query heads that share them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..library import heads_inside


def attend(
    q: Tensor,  # (B, H, M, D)
    k_cache: Tensor,  # (B, Hkv, N, D)
    v_cache: Tensor,  # likewise
    last: Tensor,  # (B or 1, M or 1) int32 or int64: query m sees keys 0 .. last[m].
    mask: Tensor | None,  # bool (B or 1, 1, M or 1, N), or None
    scale: float,  # factor of the scores
) -> Tensor:
    """Return each query's attention over the keys that are not after position `last` and not hidden
    by `mask`.

    The result's memory has the order (B, M, H, D). If a mask hides all keys from a query, the
    result for this query is zero.
    """
    batch, heads, queries, depth = q.shape
    kv_heads, end = k_cache.shape[1], k_cache.shape[2]
    if q.device.type == "cpu":
        end = max(0, min(end, int(last.max()) + 1)) if last.numel() else 0
    if 0 in (end, q.numel()):
        return heads_inside(q).zero_()
    keys, values = k_cache[:, :, :end], v_cache[:, :, :end]
    seen = _seen(last, mask, end)
    repeat = heads // kv_heads
    rows = q.reshape(batch, kv_heads, repeat * queries, depth)
    bias = None if seen is None else _per_row(seen, repeat, queries)
    found = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=scale)
    if bias is not None:
        found = found.masked_fill(~bias.any(-1, keepdim=True), 0.0)
    return heads_inside(q).copy_(found.reshape(q.shape))


def _seen(last: Tensor, mask: Tensor | None, end: int) -> Tensor | None:
    """Return a boolean tensor (B or 1, 1, M or 1, end): whether a query may attend to each of the
    first `end` keys. Return None if every query may attend to all of them."""
    seen = torch.arange(end, device=last.device) <= last[:, None, :, None]
    if mask is not None:
        seen = seen & mask[..., :end]
    is_all = seen.device.type == "cpu" and bool(seen.all())
    return None if is_all else seen


def _per_row(seen: Tensor, repeat: int, queries: int) -> Tensor:
    """Repeat the mask `seen` for every query head that shares a key-value head.

    The mask says which keys each query may attend to.
    """
    if seen.shape[2] == 1 or repeat == 1:
        return seen
    batch, _, _, keys = seen.shape
    return seen.expand(batch, repeat, queries, keys).reshape(batch, 1, repeat * queries, keys)
