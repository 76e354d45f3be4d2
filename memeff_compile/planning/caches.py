"""Compute the longest context and the largest batch that fit into memory with a model's weights.

There is one result for each number of bits of a KV cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import nn

from ..errors import ExplainError
from ..kernels import coded_kv_cache as op_folder
from ..report import VerbReport, format_bytes
from .depth import config_of
from .setting import BITS_PER_WEIGHT, most, read_memory, require_counts

MODES = (16, 8, 4, 3, 2)

STEP_ROOM = 1 << 30
"""Bytes that are reserved for a decoding step: logits, intermediate values, workspaces of
libraries."""


@dataclass(frozen=True)
class CacheMode:
    """For one number of bits: the size of the KV cache, and the longest context and largest batch
    that fit into memory.
    """

    bits: int  # bits of a code; 16 stores keys and values unchanged
    # bytes of the cache of all layers in B (sequences) and N (tokens); groups of codes are taken as
    # filled
    formula: sympy.Expr
    bytes_per_token: float  # of one more token of one sequence, in all layers
    total: int  # bytes at the requested batch and length
    # tokens per sequence that fit at that batch, 0 if none does; None if any number does,
    # because the cache does not grow with the context
    longest: int | None
    largest_batch: int  # sequences that fit at that length, 0 if none does


@dataclass(frozen=True)
class CachePlan(VerbReport):
    """The sizes of one model's KV cache for each number of bits."""

    name: str  # of the model
    weights: int  # bytes of its parameters
    memory: int  # bytes of the device
    batch: int  # the requested batch
    length: int  # likewise
    # one per number of bits, 16 first; 16 alone where `KVCache` has no codes for the model
    modes: tuple[CacheMode, ...]
    notes: tuple[str, ...] = ()  # sentences on costs that the numbers leave out

    def __str__(self) -> str:
        lines = [
            f"{self.name}: weights {format_bytes(self.weights)} of {format_bytes(self.memory)}; "
            f"{format_bytes(STEP_ROOM)} set aside for a step",
            "",
            f"  {'bits':<6}{'bytes per token':>16}{f'{self.batch} x {self.length}':>16}"
            f"{f'longest, batch {self.batch}':>22}{f'largest batch, {self.length}':>24}",
        ]
        lines += [
            f"  {mode.bits:<6}{mode.bytes_per_token:>16,.0f}{format_bytes(mode.total):>16}"
            f"{_fits(mode.longest):>22}{_fits(mode.largest_batch):>24}"
            for mode in self.modes
        ]
        lines += ["", *(f"  {mode.bits} bits: {mode.formula} bytes" for mode in self.modes)]
        lines += ["", *(f"  {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values; formulas are strings in B (sequences) and N (tokens)."""
        modes = [{**vars(mode), "formula": str(mode.formula)} for mode in self.modes]
        found = {**vars(self), "modes": modes, "notes": list(self.notes)}
        return {f"{k}_bytes" if k in ("weights", "memory") else k: v for k, v in found.items()}


def _fits(count: int | None) -> str:
    if count is None:
        return "any"
    return f"{count:,}" if count else "none fits"


def explain_cache(
    model: Any,
    *,
    memory: str | int,
    batch: int = 1,
    length: int = 4096,
    scheme: str = "kivi",
    group: int = 64,
    recent: int = 128,
    keep_first: int = 4,
    merge: Any = None,
    weights: str = "dense",
) -> CachePlan:
    """Return the longest context and the largest batch that fit into memory, for each number of
    bits of a `KVCache`.

    The function allocates no memory. The keys and values of a layer with a sliding window are not
    quantised, whatever the number of bits.

    Args:
        model: a model of transformers, on any device, "meta" included.
        memory: memory of the GPU, in bytes or as a size such as "141GB".
        batch: the number of sequences for which the longest context is computed.
        length: the number of tokens per sequence for which the largest batch is computed.
        scheme: which numbers share a scale, "kivi" or "per_head", as for `KVCache`.
        group: the number of tokens that are encoded together, as for `KVCache`.
        recent: the minimum number of latest tokens that stay exact, as for `KVCache`.
        keep_first: the number of first tokens that stay exact, as for `KVCache`.
        merge: as for `KVCache`, None, "minicache" or a `MiniCache`. With "minicache" or a
            `MiniCache`, the cache merges pairs of layers. Merged layers share directions (unit
            vectors) of older tokens' values, and by default of their keys. With 16 bits, merged
            layers store these directions without quantising them. `KVCache` refuses
            `MiniCache(values_only=True)` with 16 bits. If you pass this setting, the function's
            result for 16 bits counts all layers as unmerged.
        weights: "dense", or the codec with which `compress_` compresses the weights, such as
            "win4".

    Raises:
        ExplainError: the memory is not a size, or keys and values have no common head dimension.
            Also if the model's config lacks the number of layers or of key-value heads.
        UnsupportedInputError: `KVCache` does not support the model, or one of the settings
            `scheme`, `group`, `recent`, `keep_first` and `merge`.

    Example:
        >>> print(memeff_compile.explain_cache(model, memory="141GB", batch=16))  # doctest: +SKIP
    """
    require_counts(batch=batch, length=length)
    total = read_memory(memory)
    kept = {"scheme": scheme, "group": group, "recent": recent, "keep_first": keep_first}
    shape = _shape_of(model, {**kept, "merge": merge})
    held = weight_bytes(model, weights)
    room = total - held - STEP_ROOM
    coded, notes = _served(shape)
    modes = tuple(_mode(bits, shape, kept, room, batch, length) for bits in (16, *coded))
    return CachePlan(type(model).__name__, held, total, batch, length, modes, notes)


def weight_bytes(model: nn.Module, codec: str) -> int:
    """Return the bytes of a model's parameters if the weights of its linear layers are compressed
    by a codec.

    For an input with many tokens, a compressed linear layer decodes its whole weight, so the
    returned number includes the largest decoded weight.
    """
    every = sum(parameter.nbytes for parameter in model.parameters())
    if codec not in BITS_PER_WEIGHT:
        can_be = ", ".join(map(repr, BITS_PER_WEIGHT))
        raise ExplainError(f"weights is {codec!r}; it can be {can_be}.")
    if codec == "dense":
        return every
    from ..model.weights.compress import compressible

    sizes = [weight.nbytes for weight in compressible(model)]
    saved = int(sum(sizes) * (1 - BITS_PER_WEIGHT[codec] / 16))
    return every - saved + max(sizes, default=0)


@dataclass(frozen=True)
class _Shape:
    """The sizes of the keys and values that a model caches for each token.

    Merged layers share directions (unit vectors) of values, and of keys unless `values_only` is
    set."""

    layers: int  # number of unmerged layers that see all tokens
    pairs: int  # number of pairs of merged layers, which `layers` does not count
    retained: float  # the share of tokens that a pair has room to store exactly
    is_aligned: bool  # layers of a pair are aligned before they are merged
    values_only: bool  # the layers of a pair share values alone
    windows: tuple[int, ...]  # of the other layers
    states: int  # layers that keep no keys and values but a state of one size
    heads: int
    depth: int  # channels
    itemsize: int  # bytes of a number

    @property
    def row(self) -> int:
        """Return the bytes of the keys and values of one token in one layer, in the model's
        dtype."""
        return 2 * self.heads * self.depth * self.itemsize


def _shape_of(model: Any, settings: dict[str, Any]) -> _Shape:
    config = config_of(model)
    if not isinstance(model, nn.Module) or config is None:
        raise ExplainError(
            f"{type(model).__name__} is no model of transformers with a config; build one, on "
            "device 'meta' if its weights are not here."
        )
    from ..model.cache.kv_cache import KVCache
    from ..model.cache.layers import CodedLayer

    text = config.get_text_config(decoder=True)
    # Reading such a setting from the config raises an error of transformers.
    varied = sorted(_SIZES & set(getattr(text, "per_layer_attributes", None) or ()))
    if varied:
        raise _unlike(text, varied)
    query_heads = getattr(text, "num_attention_heads", None)
    if query_heads is None:
        raise ExplainError(f"{type(text).__name__} does not tell num_attention_heads.")
    heads = _heads_of(text, query_heads)
    depth = _depth_of(text, query_heads)
    most = 1 << 40
    layers = KVCache(config, most, 4, **settings).layers
    others = [layer.get_max_length() for layer in layers if not isinstance(layer, CodedLayer)]
    dtype = next((p.dtype for p in model.parameters()), torch.bfloat16)
    if any(window >= most for window in others):
        raise ExplainError(
            f"{type(text).__name__} has layers that keep both keys of all tokens and a state; "
            f"their size is not known. Fill a KVCache {_INSTEAD}"
        )
    # Without a length: a state, or no tensor at all, if the layer reads another layer's keys.
    windows = tuple(window for window in others if 0 <= window < most)
    states = sum(hasattr(layer, "update_recurrent_state") for layer in layers)
    merged = [layer.pair for layer in layers if hasattr(layer, "pair")]
    coded = len(layers) - len(others) - len(merged)
    retained = merged[0].merge.retained if merged else 0.0
    pairs = len(merged) // 2, retained, bool(merged) and merged[0].is_aligned
    values_only = bool(merged) and merged[0].merge.values_only
    return _Shape(coded, *pairs, values_only, windows, states, heads, depth, dtype.itemsize)


_INSTEAD = "with a short prompt and read its nbytes instead."


def _heads_of(text: Any, query_heads: int) -> int:
    """Return the number of key-value heads in a model's cache."""
    if hasattr(text, "num_key_value_heads"):
        return int(text.num_key_value_heads or query_heads)
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    named = [name for name in vars(text) if any(word in name for word in _OF_KEYS)]
    own = [name for name in named if getattr(text, name)]
    if not own:
        return int(query_heads)
    raise ExplainError(
        f"{type(text).__name__} does not tell num_key_value_heads but {' and '.join(own)}, so the "
        f"size of its cache is not known. Fill a KVCache {_INSTEAD}"
    )


_OF_KEYS = ("kv", "key_value", "query_group", "multi_query", "new_decoder_architecture")
"""Words in names of settings that may give keys another number of heads than queries; without such
settings the numbers are equal.
"""

_OWN_SIZES = ("qk_rope_head_dim", "v_head_dim", "global_head_dim", "num_global_key_value_heads")
"""Settings with which keys and values, or layers, differ in size."""


_SIZES = {"num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", *_OWN_SIZES}
"""Settings that may differ between the layers of a config."""


def _unlike(text: Any, settings: Sequence[str]) -> ExplainError:
    """Return an error that names the given settings of a model's config.

    These settings may give keys another size than values, or layers different sizes."""
    return ExplainError(
        f"{type(text).__name__} has {' and '.join(settings)}: keys and values, or layers, have "
        "sizes of their own, and one head dimension for all is needed. Fill a "
        f"KVCache(bits=16) {_INSTEAD}"
    )


def _depth_of(text: Any, query_heads: int) -> int:
    """Return the head dimension that the model's keys and values have in common."""
    found = [name for name in _OWN_SIZES if getattr(text, name, None) is not None]
    if found:
        raise _unlike(text, found)
    return int(getattr(text, "head_dim", None) or text.hidden_size // query_heads)


def _served(shape: _Shape) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers of bits that `KVCache` supports for a model, and a remark if `KVCache`
    does not support low bits for this model.
    """
    notes = []
    coded = tuple(bits for bits in MODES if bits != 16)
    if (shape.layers or shape.pairs) and shape.depth not in (16, 32, 64, 128, 256):
        coded = ()
        notes.append(
            f"16 bits only: the head dimension is {shape.depth}, and codes are for 16, 32, 64, 128 "
            "or 256."
        )
    if not shape.layers and not shape.pairs and not shape.states:
        notes.append("Every layer sees a window of tokens: the cache does not grow beyond it.")
    if shape.states:
        notes.append(f"The states of {shape.states} layers without keys and values are left out.")
    if shape.pairs:
        what = "values" if shape.values_only else "tokens"
        where = "not at 16 bits" if shape.values_only else "at 16 bits too"
        notes.append(
            f"{2 * shape.pairs} layers share the directions of their older {what} in pairs, "
            f"{where}; the loss depends on the model (fidelity_report)."
        )
    return coded, tuple(notes)


def _mode(
    bits: int, shape: _Shape, settings: dict[str, Any], room: int, batch: int, length: int
) -> CacheMode:
    if bits == 16 and shape.values_only:  # merged in codes alone
        shape = replace(shape, layers=shape.layers + 2 * shape.pairs, pairs=0)
    codes = op_folder.PLAIN if bits == 16 else bits
    held = op_folder.Layout(shape.depth, codes, *settings.values())

    def size(sequences: int, tokens: int) -> int:
        """Return the bytes of the cache over all layers."""
        one = sequences * shape.row * tokens
        if bits != 16:
            one = op_folder.bytes_after(held, sequences, shape.heads, tokens, shape.itemsize)
        windows = sum(min(window, tokens) for window in shape.windows)
        found = shape.layers * one + sequences * shape.row * windows
        if shape.pairs and shape.values_only:
            sizes = (shape.heads, tokens, shape.itemsize)
            pair = op_folder.value_pair_bytes(held, sequences, *sizes)
            found += shape.pairs * (pair + sequences * _maps_of(shape, held))
        elif shape.pairs:
            more = replace(held, kept=held.kept + math.ceil(shape.retained * tokens))
            pair = op_folder.pair_bytes(more, sequences, shape.heads, tokens, shape.itemsize)
            if shape.is_aligned:
                pair += op_folder.map_bytes(held, sequences, shape.heads, shape.itemsize)
            found += shape.pairs * pair
        return found

    b, n = sympy.symbols("B N", integer=True, positive=True)
    # bytes of a token in codes, and further bytes, of one sequence and layer
    each, fixed = op_folder.bytes_of_token(held, shape.heads, shape.itemsize), 0
    if bits != 16:
        how: dict[str, Any] = {"window": held.window, "kept": held.kept}
        fixed = op_folder.fixed_bytes(1, shape.heads, shape.depth, itemsize=shape.itemsize, **how)
        fixed -= each * held.recent
    pair_each, pair = _per_pair(shape, held, n)
    beside = shape.layers * fixed + shape.pairs * pair + shape.row * sum(shape.windows)
    is_flat, longest_window = not shape.layers and not shape.pairs, max(shape.windows, default=1)

    def fits(tokens: int) -> bool:
        return size(batch, tokens) <= room

    return CacheMode(
        bits=bits,
        formula=b * (shape.layers * each * n + beside),
        bytes_per_token=float(shape.layers * each + shape.pairs * pair_each),
        total=size(batch, length),
        # None where the cache stops growing and any length fits
        longest=None if is_flat and fits(longest_window) else most(fits),
        largest_batch=most(lambda sequences: size(sequences, length) <= room),
    )


def _maps_of(shape: _Shape, layout: op_folder.Layout) -> int:
    """Return the bytes of the linear maps that make two layers' values in a KV cache similar.

    The maps are mean vectors and rotation matrices. With the maps, the two layers share one set of
    directions (unit vectors) of values. Each layer stores its own keys. The bytes are for one
    sequence."""
    return op_folder.map_bytes(layout, 1, shape.heads, shape.itemsize, 1)


def _per_pair(
    shape: _Shape, layout: op_folder.Layout, tokens: sympy.Symbol
) -> tuple[sympy.Expr, sympy.Expr]:
    """Return formulas for one sequence's bytes in the KV caches of two layers that share directions
    (unit vectors).

    The two layers share directions of values, and of keys unless `values_only` is set. The bytes
    are those of both caches together. The first formula is for one more token in the caches, the
    second for `tokens` tokens.
    """
    if shape.values_only:
        merged = op_folder.bytes_of_value_pair(layout, shape.heads, shape.itemsize)
        exact = 2 * shape.row * (layout.window + layout.kept)
        return merged, merged * (tokens - layout.recent) + exact + _maps_of(shape, layout)
    codes = op_folder.bytes_of_token(layout, shape.heads, shape.itemsize)
    merged = codes + 4 * shape.heads * shape.itemsize  # and the lengths of both
    retained = sympy.Rational(shape.retained).limit_denominator(10**9)
    kept = layout.kept + sympy.ceiling(retained * tokens)
    whole = merged * (tokens - layout.recent) + 2 * shape.row * (layout.window + kept)
    whole += 4 * shape.heads * (kept + 4)
    if shape.is_aligned:
        whole += op_folder.map_bytes(layout, 1, shape.heads, shape.itemsize)
    return merged + retained * (2 * shape.row + 4 * shape.heads), whole
