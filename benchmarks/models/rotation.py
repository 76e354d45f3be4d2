"""Turn the weights of a trained decoder, so that quantisers of four bits and top-K lose less; the
function of the dense model stays.

Hidden states: the weights of norms go into the linears that read the norms' outputs. The model then
computes the same function after any rotation of its hidden states, if the rotation is multiplied
into the embedding, into the linears that write to hidden states and into those that read them
(SliceGPT, QuaRot). A rotation spreads a few large channels over all channels. The output projection
gets a weight of its own, as the final norm's weight goes into it.

Constant part: half of the energy of a norm's output can be its mean over tokens, which says nothing
about a token, and a quantiser whose scale is the token's mean spends its levels on it. With text to
measure on, the rotation turns this mean into CONSTANT channels, the norms' weights make these
channels as small as the quantiser takes them, and columns of the linears grow by as much.

Values: attention's output is a mixture of values, so that the values of a head can be turned, too.
In the principal axes of attention's output, most of its energy is in few channels, and top-K loses
little of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
CONSTANT = 16
"""Channels that take the constant part of the norms' outputs; a power of two."""
LARGEST = 2.0
"""Their size, in mean magnitudes of the other channels; INT4 of BitNet a4.8 clips at 3."""
SHARE = 0.05
"""Directions with more than this share of the means' energy are the constant part."""


def rotation(size: int, seed: int = 0, first: Tensor | None = None) -> Tensor:
    """Return an orthogonal fp64 matrix whose columns are the new axes.

    Without `first`, it is random signs, then a Hadamard matrix of the largest power of two in
    `size`, in a product with a random rotation of the remaining factor. With `first`, orthonormal
    rows, the first CONSTANT axes span these rows, each axis with an equal part of each row, and the
    other axes are random.
    """
    draw = torch.Generator().manual_seed(seed)
    if first is not None:
        drawn = torch.randn(size, size, dtype=torch.float64, generator=draw)
        drawn[:, : len(first)] = first.t().cpu()
        found = torch.linalg.qr(drawn).Q
        found[:, :CONSTANT] = found[:, :CONSTANT] @ _hadamard(CONSTANT)
        return found
    power = size & -size
    rest = torch.randn(size // power, size // power, dtype=torch.float64, generator=draw)
    found = torch.kron(_hadamard(power), torch.linalg.qr(rest).Q.contiguous())
    signs = torch.randint(2, (size, 1), generator=draw).double() * 2 - 1
    return signs * found


def _hadamard(size: int) -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / size**0.5


@torch.no_grad()
def rotate_(model: Any, seed: int = 0, text: Tensor | None = None) -> None:
    """Rotate the hidden states of a Llama-like model in place; its logits stay.

    Args:
        model: A causal model of transformers with the module names of Llama.
        seed: Of the rotation.
        text: Token ids to find the constant part with, or None to leave it.

    Raises:
        ValueError: The logits changed: the model is not built as this function expects.
    """
    with _same_logits(model):
        first, moments = (None, []) if text is None else _constant(model, text)
        turn = rotation(model.config.hidden_size, seed, first).to(model.lm_head.weight.device)
        _rotate(model, turn, [_gains(each, turn) for each in moments])


def _rotate(model: Any, turn: Tensor, gains: list[Tensor]) -> None:
    """Multiply an orthogonal matrix into the weights around hidden states, and set the weights of
    the layers' norms to the gains, in the order of their use."""
    body = model.model
    head = _scaled(model.lm_head.weight, body.norm) @ turn
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(head.to(model.lm_head.weight.dtype))
    _set(body.embed_tokens.weight, body.embed_tokens.weight.double() @ turn)
    body.norm.weight.fill_(1)
    gain = iter(gains)
    for layer in body.layers:
        for name, paths in READERS.items():
            norm = layer.get_submodule(name)
            own = next(gain, norm.weight.new_ones((), dtype=torch.float64))
            for path in paths:
                weight = layer.get_submodule(path).weight
                _set(weight, _scaled(weight, norm) @ turn / own)
            _set(norm.weight, own.expand_as(norm.weight))
        for path in WRITERS:
            linear = layer.get_submodule(path)
            _set(linear.weight, turn.t() @ linear.weight.double())
            if linear.bias is not None:
                _set(linear.bias, turn.t() @ linear.bias.double())


def _constant(model: Any, text: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the directions of the means of all norms' outputs, without the norms' weights, and the
    second moment of each of these outputs."""
    norms = [layer.get_submodule(name) for layer in model.model.layers for name in READERS]
    means = [torch.zeros((), dtype=torch.float64)] * len(norms)
    moments = list(means)

    def see(at: int, norm: Any, out: Tensor) -> None:
        rows = (out / norm.weight).flatten(0, -2).double()
        means[at] = means[at].to(rows.device) + rows.mean(0) / len(text)
        moments[at] = moments[at].to(rows.device) + rows.t() @ rows / text.numel()

    hooks = [
        norm.register_forward_hook(lambda norm, _, out, at=at: see(at, norm, out))
        for at, norm in enumerate(norms)
    ]
    _run(model, text, hooks)
    _, sizes, axes = torch.linalg.svd(torch.stack(means), full_matrices=False)
    shares = sizes.square() / sizes.square().sum()
    return axes[: max(1, int((shares > SHARE).sum()))], moments


def _gains(moment: Tensor, turn: Tensor) -> Tensor:
    """Return the weights of a norm that make its first channels no larger than LARGEST."""
    sizes = (turn * (moment @ turn)).sum(0).sqrt()  # of each channel after the turn
    rest = sizes[CONSTANT:].square().mean().sqrt() * (2 / torch.pi) ** 0.5
    gains = torch.ones_like(sizes)
    gains[:CONSTANT] = (LARGEST * rest / sizes[:CONSTANT]).clamp(max=1)
    return gains


@torch.no_grad()
def rotate_values_(model: Any, text: Tensor) -> None:
    """Turn the values of each key/value head into the principal axes of attention's output, the
    largest first, in place; the logits stay.

    Raises:
        ValueError: The logits changed: the model is not built as this function expects.
    """
    blocks = [layer.self_attn for layer in model.model.layers]
    width = blocks[0].head_dim
    moments: dict[int, Tensor] = {}

    def see(at: int, rows: Tensor) -> None:  # of the query heads that share a key/value head
        shared = blocks[at].v_proj.weight.shape[0] // width
        heads = (
            rows.flatten(0, -2).double().view(-1, shared, rows.shape[-1] // shared // width, width)
        )
        found = torch.einsum("tsgi,tsgj->sij", heads, heads)
        moments[at] = moments.get(at, torch.zeros_like(found)) + found

    with _same_logits(model):
        hooks = [
            block.o_proj.register_forward_pre_hook(lambda _, given, at=at: see(at, given[0]))
            for at, block in enumerate(blocks)
        ]
        _run(model, text, hooks)
        for at, block in enumerate(blocks):
            axes = torch.linalg.eigh(moments[at]).eigenvectors.flip(-1)  # (heads, width, axes)
            value, out = block.v_proj, block.o_proj
            rows = value.weight.double().view(len(axes), width, -1)
            _set(value.weight, torch.einsum("sij,sic->sjc", axes, rows).flatten(0, 1))
            if value.bias is not None:
                bias = value.bias.double().view(len(axes), width)
                _set(value.bias, torch.einsum("sij,si->sj", axes, bias).flatten())
            columns = out.weight.double().view(out.weight.shape[0], len(axes), -1, width)
            _set(out.weight, torch.einsum("rsgi,sij->rsgj", columns, axes).flatten(1))


def _run(model: Any, text: Tensor, hooks: list[Any]) -> None:
    """Run the model on each row of the text, and remove the hooks."""
    try:
        for row in text.to(model.lm_head.weight.device).long():
            model.model(input_ids=row[None])
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _same_logits(model: Any) -> Iterator[None]:
    """Raise ValueError if the logits changed meanwhile."""
    device = model.lm_head.weight.device
    ids = torch.arange(64, device=device).remainder(model.config.vocab_size)[None]
    before = model(input_ids=ids).logits
    yield
    after = model(input_ids=ids).logits
    error = float((after - before).norm() / before.norm())
    if not error < CLOSE:
        raise ValueError(f"the rotated model's logits are off by {error:.1e}")


def _scaled(weight: Tensor, norm: Any) -> Tensor:
    return weight.double() * norm.weight.double()


def _set(weight: Tensor, value: Tensor) -> None:
    weight.copy_(value.to(weight.dtype))
