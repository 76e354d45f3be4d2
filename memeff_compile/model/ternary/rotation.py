"""Rotate the hidden states of a dense model before it gets ternary weights (rotate_hidden_states_).

A four-bit quantiser represents a token's hidden state poorly if a few channels are much larger than
the others. Trained decoders have such channels. The weights of norms can be multiplied into the
linear layers that read the norms' outputs. Then the model computes the same function after any
rotation of its hidden states (SliceGPT, QuaRot). For this, the rotation is multiplied into the
weights of:

- the embedding;
- the linear layers that read hidden states;
- the linear layers that write hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import OptionError
from memeff_compile.model.changes import Changes, keep, require_module

Model = TypeVar("Model", bound=nn.Module)

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest relative change of the logits on a CPU, by the dtype of the weights."""
_ROUNDED = 0.05
"""The same for weights of 16 bits, and for GPUs, which may multiply float32 numbers as TF32."""
_PROBE = 64
"""The number of tokens whose logits are compared."""

_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""The norms of a layer, and the linear layers that read their outputs."""
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})  # of queries and keys, which do not change
_PARTS = {
    "": {"self_attn", "mlp", *_READERS},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj"},
}
"""The parts of a layer, and of its blocks, that have parameters."""


def rotate_hidden_states_(model: Model, *, seed: int = 0) -> Model:
    """Rotate the hidden states of a dense model in place, so that quantising them causes smaller
    errors.

    The function returns the model. The logits stay the same, up to rounding. Call this function
    before `ternarize_(model, "a4.8")`, which makes the weights of linear layers ternary and
    quantises these layers' inputs to 4 or 8 bits. Also call this function before you create the
    optimizer. The model must have the structure of Llama, Mistral, Qwen2 or Qwen3 in transformers.
    The function raises an error for other models and leaves them unchanged.

    The function also compares the logits before and after the rotation, in float32. Meanwhile, the
    main memory has a copy of the weights, and the model's device has a float32 copy of 16-bit
    weights. So rotate a large model before you move it to a GPU.

    A tied output projection gets a weight of its own, because the weight of the final norm is
    multiplied into it. `config.tie_word_embeddings` becomes False. `memeff_compile.undo`
    cannot restore the weights from before the rotation.

    Args:
        model: A causal language model with floating point weights.
        seed: The seed of the rotation.

    Raises:
        OptionError: The model does not have the structure of Llama, Mistral, Qwen2 or Qwen3, or the
            rotation would change its logits.

    Example:
        >>> rotate_hidden_states_(model)  # doctest: +SKIP
        >>> memeff_compile.ternarize_(model, "a4.8", activation="relu2")  # doctest: +SKIP
    """
    require_module(model, "rotate_hidden_states_")
    plan = _Plan(compat.without_compile(model))
    with torch.no_grad(), _same_logits(plan):
        plan.rotate(rotation(plan.size, seed).to(plan.device))
    keep(model, "rotate_hidden_states_", _report(plan))
    return model


def rotation(size: int, seed: int = 0) -> Tensor:
    """Return an orthogonal fp64 matrix: random signs times a Kronecker product.

    The product's first factor is a Hadamard matrix. Its number of rows, p, is the largest power of
    two that divides `size`. The second factor is a random orthogonal matrix with `size` / p rows.
    """
    draw = torch.Generator().manual_seed(seed)
    power = size & -size
    rest = torch.randn(size // power, size // power, dtype=torch.float64, generator=draw)
    found = torch.kron(_hadamard(power), torch.linalg.qr(rest).Q.contiguous())
    signs = torch.randint(2, (size, 1), generator=draw).double() * 2 - 1
    turned: Tensor = signs * found
    return turned


def _hadamard(size: int) -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / math.sqrt(size)


def _report(plan: _Plan) -> Changes:
    count = len(plan.layers)
    sentence = f"hidden states of {count} layer{'s' * (count > 1)} rotated"
    head = "rotated, with the weight of the final norm multiplied in"
    if plan.was_tied:
        sentence += "; the output projection is no longer tied to the embedding"
        head += "; has a weight of its own"
    places = {"model.embed_tokens": "rotated", "lm_head": head}
    places |= {f"model.layers.{at}": "rotated" for at in range(count)}
    return Changes("rotate_hidden_states_", sentence, places, None)


class _Plan:
    """The parts of a Llama-like model, found without changing the model."""

    head: Any
    body: Any

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        self.model, kind = model, type(model).__name__
        body, head = getattr(model, "model", None), getattr(model, "lm_head", None)
        _require_parts(kind, model, {"model", "lm_head"})
        _require_parts(f"{kind}.model", body, {"embed_tokens", "layers", "norm"})
        self.body, self.head = body, head
        self.embedding: Any = self.body.embed_tokens
        self.layers: Sequence[Any] = list(self.body.layers)
        linears: dict[str, Any] = {"lm_head": head}
        for at, layer in enumerate(self.layers):
            path = f"model.layers.{at}"
            for block, parts in _PARTS.items():
                more = _HEAD_NORMS if block == "self_attn" else frozenset()
                own = getattr(layer, block) if block else layer
                _require_parts(f"{path}.{block}".rstrip("."), own, parts, more)
            for name in (*(each for some in _READERS.values() for each in some), *_WRITERS):
                linears[f"{path}.{name}"] = layer.get_submodule(name)
        if type(self.embedding) is not nn.Embedding:
            _refuse(f"model.embed_tokens is a {type(self.embedding).__name__}, not an nn.Embedding")
        for path, linear in linears.items():
            if type(linear) is not nn.Linear:
                _refuse(f"{path} is a {type(linear).__name__}, not an nn.Linear")
        self.was_tied: bool = self.head.weight is self.embedding.weight
        weights = [self.embedding.weight, *(each.weight for each in linears.values())]
        _require_weights(weights, shared=int(self.was_tied))
        self.size: int = self.embedding.embedding_dim
        self.device = self.embedding.weight.device
        self.norms = [layer.get_submodule(name) for layer in self.layers for name in _READERS]
        for norm in (*self.norms, self.body.norm):
            _require_rms_norm(norm, self.size)

    def changed(self) -> list[Tensor]:
        """Return all parameters that the rotation writes to."""
        found = [self.embedding.weight, self.body.norm.weight, self.head.weight]
        for layer in self.layers:
            found += [each for name, each in layer.named_parameters() if not _is_head_norm(name)]
        return found

    def rotate(self, turn: Tensor) -> None:
        """Multiply an orthogonal matrix, and the weights of norms, into the weights of the layers
        that read or write hidden states."""
        head = _scaled(self.head.weight, self.body.norm) @ turn
        if self.was_tied:
            _untie(self.model)
            own = self.head.weight.detach().clone()
            self.head.weight = nn.Parameter(own, requires_grad=self.head.weight.requires_grad)
        _set(self.head.weight, head)
        _set(self.embedding.weight, self.embedding.weight.double() @ turn)
        self.body.norm.weight.fill_(1)
        for layer in self.layers:
            for name, paths in _READERS.items():
                norm = layer.get_submodule(name)
                for path in paths:
                    weight = layer.get_submodule(path).weight
                    _set(weight, _scaled(weight, norm) @ turn)
                norm.weight.fill_(1)
            for path in _WRITERS:
                linear = layer.get_submodule(path)
                _set(linear.weight, turn.t() @ linear.weight.double())
                if linear.bias is not None:
                    _set(linear.bias, turn.t() @ linear.bias.double())


@contextmanager
def _same_logits(plan: _Plan) -> Iterator[None]:
    """At the end of this context, raise OptionError if the model's logits have changed.

    If this error or another error is raised in the context, the model is restored. In this context,
    the model is in eval mode.
    """
    model, head = plan.model, plan.head.weight
    count = model.config.vocab_size
    ids = torch.arange(_PROBE).remainder(count)[None]
    modes = {module: module.training for module in model.modules()}
    kept = {weight: weight.detach().to("cpu", copy=True) for weight in plan.changed()}
    tied = model.config.tie_word_embeddings, getattr(model, "all_tied_weights_keys", None)
    attention = getattr(model.config, "_attn_implementation", None)
    takes_16_bits_alone = isinstance(attention, str) and "flash" in attention

    def logits() -> Tensor:
        # in float32: large channels make logits of 16-bit arithmetic differ by their rounding alone
        wide = {
            name: weight.float()
            for name, weight in model.named_parameters()
            if weight.is_floating_point() and weight.dtype.itemsize < 4
        }
        given = {"input_ids": ids.to(plan.device), "use_cache": False}
        with torch.autocast(plan.device.type, enabled=False):
            found: Tensor = torch.func.functional_call(model, wide, kwargs=given).logits
        return found.double()

    def restore() -> None:
        for weight, before in kept.items():
            weight.copy_(before)
        plan.head.weight = head
        model.config.tie_word_embeddings = tied[0]
        if tied[1] is not None:
            model.all_tied_weights_keys = tied[1]

    try:
        model.eval()
        if takes_16_bits_alone:
            model.set_attn_implementation("sdpa")
        before = logits()
        yield
        error = float((logits() - before).norm() / before.norm())
        is_exact = plan.device.type == "cpu"
        if not error < (_TOLERANCE.get(head.dtype, _ROUNDED) if is_exact else _ROUNDED):
            _refuse(f"its logits would change by {error:.1e} of their norm")
    except BaseException:
        restore()
        raise
    finally:
        if takes_16_bits_alone:
            model.set_attn_implementation(attention)
        for module, training in modes.items():
            module.training = training


def _untie(model: Any) -> None:  # noqa: ANN401
    """Make transformers save and load the output projection's weight separately from the
    embedding's weight."""
    model.config.tie_word_embeddings = False
    if getattr(model, "all_tied_weights_keys", None):
        model.all_tied_weights_keys = {}


def _normed(rows: Tensor) -> Tensor:
    """Return the output of an RMS norm without weight."""
    found: Tensor = rows * rows.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
    return found


def _require_parts(
    path: str, module: object, needed: set[str], more: frozenset[str] = frozenset()
) -> None:
    """Raise OptionError unless exactly the children named in `needed` have parameters.

    Children of the module that are named in `more` may have parameters too. The module itself must
    not have parameters."""
    children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
    found = {name for name, child in children.items() if next(child.parameters(), None) is not None}
    own = set(module._parameters) if isinstance(module, nn.Module) else set()
    if missing := needed - found:
        _refuse(f"{path} has no {', '.join(sorted(missing))}")
    if others := (found | own) - needed - more:
        _refuse(f"{path} also has {', '.join(sorted(others))}")


def _require_weights(weights: Sequence[Tensor], shared: int) -> None:
    for each in weights:
        if each.device.type == "meta" or compat.is_dtensor(each):
            _refuse("its weights are not whole on this machine's devices")
        if not each.dtype.is_floating_point or each.dtype.itemsize < 2:
            _refuse(f"it has weights of {each.dtype}")
    if len({each.device for each in weights}) > 1:
        _refuse("its weights are on several devices")
    if len({id(each) for each in weights}) != len(weights) - shared:
        _refuse("some of its linear layers share a weight")


def _require_rms_norm(norm: Any, size: int) -> None:  # noqa: ANN401
    """Raise OptionError unless a norm divides by the root mean square and multiplies by its
    weight."""
    kind: str = type(norm).__name__
    weight: Any = getattr(norm, "weight", None)
    if weight is None or [name for name, _ in norm.named_parameters()] != ["weight"]:
        _refuse(f"{kind} has other parameters than a weight")
    draw = torch.Generator().manual_seed(0)
    rows = (torch.randn(4, size, generator=draw) + 1).to(weight.device, weight.dtype)
    with torch.no_grad():
        found, wanted = norm(rows).float(), _normed(rows.float()) * weight.float()
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=3e-2, atol=1e-2):
        _refuse(f"{kind} is not an RMS norm that multiplies by its weight")


def _refuse(why: str) -> None:
    raise OptionError(
        "rotate_hidden_states_ needs a dense model with the structure of Llama, Mistral, Qwen2 or "
        f"Qwen3, before ternarize_ and adapters. This model cannot be rotated: {why}."
    )


def _is_head_norm(name: str) -> bool:
    return any(part in _HEAD_NORMS for part in name.split("."))


def _scaled(weight: Tensor, norm: Any) -> Tensor:  # noqa: ANN401
    found: Tensor = weight.double() * norm.weight.double()
    return found


def _set(weight: Tensor, value: Tensor) -> None:
    weight.copy_(value.to(weight.dtype))
