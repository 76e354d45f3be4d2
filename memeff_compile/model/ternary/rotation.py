"""Rotate the hidden states of a dense model before it gets ternary weights (rotate_hidden_states_).

Quantisers of four bits lose much of a token if a few channels are much larger than the others, and
trained decoders have such channels. The weights of norms can be multiplied into the linear layers
that read the norms' outputs. Then the model computes the same function after any rotation of its
hidden states, if the rotation is multiplied into the embedding, into the linear layers that read
hidden states, and into the linear layers that write them (SliceGPT, QuaRot).

About half of the energy of a norm's output can be its mean over all tokens. This constant part
is the same for every token, but a quantiser whose scale is the mean magnitude of a token spends
its levels on it. So the rotation puts the constant part into a few channels, the norms' weights
make these channels small, and the columns of the linear layers grow by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import OptionError
from memeff_compile.model.changes import Changes, keep, require_module

Model = TypeVar("Model", bound=nn.Module)

CONSTANT = 16
"""The number of channels that take the constant part; a power of two."""
_LARGEST = 2.0
"""The size of these channels, in mean magnitudes of the other channels; the INT4 quantiser of
BitNet a4.8 clips at 3."""
_SHARE = 0.05
"""Directions with more than this share of the energy of all norms' means are the constant part."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_16_BITS = 0.05
"""Largest relative change of the logits, by the dtype of the weights."""
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


def rotate_hidden_states_(
    model: Model,
    text: Tensor | None = None,
    *,
    seed: int = 0,
) -> Model:
    """Rotate the hidden states of a dense model in place, so that quantisers lose less; return the
    model.

    The logits stay the same, up to rounding. Call this function before `ternarize_(model, "a4.8")`
    and before you create the optimizer. The model must have the structure of Llama, Mistral, Qwen2
    or Qwen3 in transformers; the function raises an error for other models and leaves them
    unchanged. It also compares the logits before and after.

    A tied output projection gets a weight of its own, because the weight of the final norm is
    multiplied into it, and `config.tie_word_embeddings` becomes False. `undo` cannot restore the
    weights.

    Args:
        model: A causal language model with floating point weights.
        text: Token ids, (sequences, length), of the text that the model will be trained on; some
            thousand tokens are enough. With a text, the function also moves the constant part of
            the norms' outputs into a few small channels.
        seed: The seed of the rotation.

    Raises:
        OptionError: The model has another structure than those above, the logits would change, or
            `text` is not a matrix of token ids.

    Example:
        >>> rotate_hidden_states_(model, ids)  # doctest: +SKIP
        >>> memeff_compile.ternarize_(model, "a4.8", activation="relu2")  # doctest: +SKIP
    """
    require_module(model, "rotate_hidden_states_")
    plan = _Plan(compat.without_compile(model))
    if text is not None:
        plan.require_text(text)
    with torch.no_grad(), _same_logits(plan, text):
        first = None if text is None else _constant_directions(plan, text)
        turn = rotation(plan.size, seed, first).to(plan.device)
        plan.rotate(turn, [] if text is None else _gains(plan, text, turn))
    keep(model, "rotate_hidden_states_", _report(plan, constant=text is not None))
    return model


def rotation(size: int, seed: int = 0, first: Tensor | None = None) -> Tensor:
    """Return an orthogonal fp64 matrix whose columns are the new axes.

    Without `first`, the matrix is random signs times a Hadamard matrix of the largest power of two
    that divides `size`, in a Kronecker product with a random rotation of the remaining factor. With
    `first`, which has orthonormal rows, the first CONSTANT axes span these rows. Each of these axes
    has an equal part of each row; the other axes are random.
    """
    draw = torch.Generator().manual_seed(seed)
    if first is not None:
        drawn = torch.randn(size, size, dtype=torch.float64, generator=draw)
        drawn[:, : len(first)] = first.t().cpu()
        axes: Tensor = torch.linalg.qr(drawn)[0]
        axes[:, :CONSTANT] = axes[:, :CONSTANT] @ _hadamard(CONSTANT)
        return axes
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


def _report(plan: _Plan, *, constant: bool) -> Changes:
    count = len(plan.layers)
    sentence = f"hidden states of {count} layer{'s' * (count > 1)} rotated"
    if constant:
        sentence += f"; the constant part of the norms' outputs is in {CONSTANT} channels"
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

    def require_text(self, text: Tensor) -> None:
        """Raise OptionError for token ids or a hidden size that cannot be used."""
        if text.ndim != 2 or text.dtype.is_floating_point or not text.numel():
            raise OptionError(
                f"text is a {text.dtype} tensor of shape {tuple(text.shape)}; token ids of shape "
                "(sequences, length) are needed."
            )
        if self.size < 2 * CONSTANT:
            raise OptionError(
                f"The model's hidden size is {self.size}, and the constant part alone takes "
                f"{CONSTANT} channels. Call rotate_hidden_states_ without text."
            )

    def changed(self) -> list[Tensor]:
        """Return all parameters that the rotation writes to."""
        found = [self.embedding.weight, self.body.norm.weight, self.head.weight]
        for layer in self.layers:
            found += [each for name, each in layer.named_parameters() if not _is_head_norm(name)]
        return found

    def run(self, text: Tensor) -> None:
        """Run the layers on each row of token ids."""
        for row in text.to(self.device).long():
            self.body(input_ids=row[None], use_cache=False)

    def rotate(self, turn: Tensor, gains: Sequence[Tensor]) -> None:
        """Multiply an orthogonal matrix into the weights next to hidden states, and set the weights
        of the layers' norms to the given numbers, in the order of the norms' calls."""
        head = _scaled(self.head.weight, self.body.norm) @ turn
        if self.was_tied:
            _untie(self.model)
            own = self.head.weight.detach().clone()
            self.head.weight = nn.Parameter(own, requires_grad=self.head.weight.requires_grad)
        _set(self.head.weight, head)
        _set(self.embedding.weight, self.embedding.weight.double() @ turn)
        self.body.norm.weight.fill_(1)
        gain = iter(gains)
        for layer in self.layers:
            for name, paths in _READERS.items():
                norm = layer.get_submodule(name)
                own = next(gain, turn.new_ones(self.size))
                for path in paths:
                    weight = layer.get_submodule(path).weight
                    _set(weight, _scaled(weight, norm) @ turn / own)
                _set(norm.weight, own)
            for path in _WRITERS:
                linear = layer.get_submodule(path)
                _set(linear.weight, turn.t() @ linear.weight.double())
                if linear.bias is not None:
                    _set(linear.bias, turn.t() @ linear.bias.double())


def _constant_directions(plan: _Plan, text: Tensor) -> Tensor:
    """Return the orthonormal directions of the means of the norms' outputs on a text, without the
    norms' weights."""
    means = [torch.zeros(plan.size, dtype=torch.float64, device=plan.device)] * len(plan.norms)

    def see(at: int, rows: Tensor) -> None:
        means[at] = means[at] + _normed(rows).sum(0, dtype=torch.float64)

    with _watched(plan.norms, see):
        plan.run(text)
    _, sizes, axes = torch.linalg.svd(torch.stack(means), full_matrices=False)
    shares = sizes.square() / sizes.square().sum()
    found: Tensor = axes[: int((shares > _SHARE).sum().clamp(1, CONSTANT))]
    return found


def _gains(plan: _Plan, text: Tensor, turn: Tensor) -> list[Tensor]:
    """Return the weights of the layers' norms that make no channel of the constant part larger than
    _LARGEST."""
    first = turn[:, :CONSTANT].float()
    energies = [turn.new_zeros(CONSTANT)] * len(plan.norms)

    def see(at: int, rows: Tensor) -> None:
        own = (_normed(rows) @ first).square().sum(0, dtype=torch.float64)
        energies[at] = energies[at] + own / text.numel()

    with _watched(plan.norms, see):
        plan.run(text)
    found = []
    for each in energies:
        rest = ((plan.size - each.sum()) / (plan.size - CONSTANT)).clamp(min=0)  # their mean square
        largest = _LARGEST * rest.sqrt() * (2 / torch.pi) ** 0.5
        gains = turn.new_ones(plan.size)
        gains[:CONSTANT] = (largest / each.sqrt()).clamp(1e-3, 1)
        found.append(gains)
    return found


@contextmanager
def _watched(modules: Sequence[nn.Module], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call a function with the number and the input of each module, one row for each token, before
    the module runs."""

    def hook(at: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: see(at, given[0].flatten(0, -2).float())

    hooks = [each.register_forward_pre_hook(hook(at)) for at, each in enumerate(modules)]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def _same_logits(plan: _Plan, text: Tensor | None) -> Iterator[None]:
    """Restore the model, and raise OptionError, if its logits changed; also restore it after any
    other error. Meanwhile the model is in eval mode."""
    model, head = plan.model, plan.head.weight
    count = model.config.vocab_size
    ids = torch.arange(_PROBE).remainder(count)[None] if text is None else text[:1, :_PROBE]
    modes = {module: module.training for module in model.modules()}
    kept = {weight: weight.detach().to("cpu", copy=True) for weight in plan.changed()}
    tied = model.config.tie_word_embeddings, getattr(model, "all_tied_weights_keys", None)

    def logits() -> Tensor:
        found: Tensor = model(input_ids=ids.to(plan.device).long(), use_cache=False).logits
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
        before = logits()
        yield
        error = float((logits() - before).norm() / before.norm())
        if not error < _TOLERANCE.get(head.dtype, _TOLERANCE_16_BITS):
            _refuse(f"its logits would change by {error:.1e} of their norm")
    except BaseException:
        restore()
        raise
    finally:
        for module, training in modes.items():
            module.training = training


def _untie(model: Any) -> None:  # noqa: ANN401
    """Make transformers save the output projection's weight, and load it."""
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
    """Raise OptionError unless exactly the needed children of a module have parameters."""
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
