"""Low-bit attention under a mask tensor, for comparisons of accuracy, not for speed.

The op `quantized_attention` itself takes masking conditions, which a pass reads from the graph.
Calibration stores attention calls and compares precision levels on them. Instead of the masking
conditions, a stored call can have a mask tensor or the flag `is_causal`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._triton.conditions import Conditions
from . import reference
from .op import quantized_attention, supports
from .settings import settings_for

MASKED = -1e4
"""A number at or below this, added to a score, hides its key."""


@dataclass(frozen=True)
class _Stored(Conditions):
    """Masking conditions that consist of a mask tensor, (B or 1, M, N)."""

    mask: Tensor

    def keys_of(self, first: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        """Return the range of keys that the queries `first` to `stop` need: always all keys."""
        return 0, keys

    def counts(self, first: int, stop: int, low: int, high: int, device: torch.device) -> Tensor:
        """Return which keys each query attends to, for a range of queries and a range of keys."""
        return self.mask[:, first:stop, low:high]


def attend_under_mask(
    q: Tensor,  # (B, H, M, D)
    k: Tensor,  # (B, G, N, D), H a multiple of G
    v: Tensor,  # likewise
    # as scaled_dot_product_attention takes it: bool, true where a key counts, or numbers that are
    # added, of which only zero and those that hide a key are served
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,  # whether query m sees keys up to m
    scale: float | None = None,  # of the scores
    level: str = "8b",  # a level of the op
) -> Tensor | None:
    """Return low-bit attention, or None if the call is not supported, for example because its mask
    is a bias.

    `level` names the number formats, such as "8b" for int8 scores.
    """
    if supports(q, k, v, level=level) is not None:
        return None
    ahead = 0 if is_causal else None
    if mask is None:
        told = {"ahead": ahead, "scale": scale, "level": level, "with_lse": False}
        found: Tensor = quantized_attention(q, k, v, **told)[0]
        return found
    shown = _shown(mask, (q.shape[0], q.shape[2], k.shape[2]))
    if shown is None:
        return None
    factor = q.shape[3] ** -0.5 if scale is None else scale
    given = _Stored(shown.any(1), None, None, None, None, factor, 0.0, False, shown)
    settings = settings_for(level, with_lse=False, depth=q.shape[3])
    return reference.attend(q, k, v, given, settings)[0]


def _shown(mask: Tensor, sizes: tuple[int, int, int]) -> Tensor | None:
    """Return a mask as bool (B, M, N), or None if the mask differs between heads or is a bias."""
    if mask.dtype != torch.bool:
        is_hidden = mask <= MASKED
        if not bool(((mask == 0) | is_hidden).all()):
            return None
        mask = ~is_hidden
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    if mask.shape[1] != 1:
        if not bool((mask == mask[:, :1]).all()):
            return None
        mask = mask[:, :1]
    return mask[:, 0].expand(sizes)
