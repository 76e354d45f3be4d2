"""Tiny models of transformers with a cache to try, their prompts, and steps of one token."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor


def make(family: str = "Llama", **settings: Any) -> Any:
    """Build a causal model of two layers with two key-value heads of 16, in eval mode."""
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
            **settings,
        }
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()


def prompt(batch: int = 2, tokens: int = 60) -> Tensor:
    """Return the same ids every time."""
    return torch.randint(2, 64, (batch, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, step: Any, cache: Any, ids: Tensor, start: int) -> Tensor:
    """Fill a cache eagerly with `start` tokens, then step token by token."""
    model(input_ids=ids[:, :start], past_key_values=cache)
    parts = [
        step(input_ids=ids[:, t : t + 1], past_key_values=cache).logits
        for t in range(start, ids.shape[1])
    ]
    return torch.cat(parts, 1)
