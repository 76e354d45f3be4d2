"""Rotate the hidden states of a trained decoder, so that no channel is much larger than the others.

The weights of norms go into the linears that read the norms' outputs. The model then computes the
same function after any rotation of its hidden states, if the rotation is multiplied into the
embedding, into the linears that write to hidden states and into those that read them (SliceGPT,
QuaRot). A rotation spreads a few large channels over all channels, which quantisers of four bits
need. The output projection gets a weight of its own, as the final norm's weight goes into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Norms of a layer, and the linears that read their outputs."""
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
CLOSE = 1e-3
"""Of logits, relative; fp32."""


def rotation(size: int, seed: int = 0) -> Tensor:
    """Return an orthogonal fp64 matrix: random signs, then a Hadamard matrix of the largest power
    of two in `size`, in a product with a random rotation of the remaining factor."""
    power = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    draw = torch.Generator().manual_seed(seed)
    rest = torch.randn(size // power, size // power, dtype=torch.float64, generator=draw)
    found = torch.kron(hadamard / power**0.5, torch.linalg.qr(rest).Q.contiguous())
    signs = torch.randint(2, (size, 1), generator=draw).double() * 2 - 1
    return signs * found


@torch.no_grad()
def rotate_(model: Any, seed: int = 0) -> None:
    """Rotate the hidden states of a Llama-like model in place; its logits stay.

    Raises:
        ValueError: The logits changed: the model is not built as this function expects.
    """
    device = model.lm_head.weight.device
    ids = torch.arange(64, device=device).remainder(model.config.vocab_size)[None]
    before = model(input_ids=ids).logits
    body = model.model
    turn = rotation(model.config.hidden_size, seed).to(device)
    head = _scaled(model.lm_head.weight, body.norm) @ turn
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(head.to(model.lm_head.weight.dtype))
    _set(body.embed_tokens.weight, body.embed_tokens.weight.double() @ turn)
    body.norm.weight.fill_(1)
    for layer in body.layers:
        for name, paths in READERS.items():
            norm = layer.get_submodule(name)
            for path in paths:
                weight = layer.get_submodule(path).weight
                _set(weight, _scaled(weight, norm) @ turn)
            norm.weight.fill_(1)
        for path in WRITERS:
            linear = layer.get_submodule(path)
            _set(linear.weight, turn.t() @ linear.weight.double())
            if linear.bias is not None:
                _set(linear.bias, turn.t() @ linear.bias.double())
    after = model(input_ids=ids).logits
    error = float((after - before).norm() / before.norm())
    if not error < CLOSE:
        raise ValueError(f"the rotated model's logits are off by {error:.1e}")


def _scaled(weight: Tensor, norm: Any) -> Tensor:
    return weight.double() * norm.weight.double()


def _set(weight: Tensor, value: Tensor) -> None:
    weight.copy_(value.to(weight.dtype))
