"""Attention variants of transformers models for the benchmarks.

`causal` is SDPA told that it is causal, instead of being handed a mask tensor: the fastest kernels
then apply, with or without `torch.compile`. It is right for whole sequences without padding.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

NAME = "causal"


def _causal(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Attend causally; (B, H, L, D) in, (B, L, H, D) out, as transformers asks."""
    del module, attention_mask, ignored
    if softcap is not None or (sliding_window is not None and sliding_window < key.shape[2]):
        raise ValueError(
            f"attention {NAME!r} has neither softcap ({softcap}) nor a window ({sliding_window}); "
            "take flex_attention for this model"
        )
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask, as `_causal` needs none."""
    del args, kwargs


def use_causal_attention() -> str:
    """Register the variant with transformers and return its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _causal)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME
