"""A low-bit KV cache for transformers' models: `KVCache`, and `use_kv_cache_` for generate().

Old tokens are stored as codes of 8, 4, 3 or 2 bits; the latest tokens and the first few tokens stay
exact. Layers with a sliding window store all their tokens exactly. Without the backend "memeff",
each step of generation first converts all codes back to keys and values. Results are then correct,
but generation is slower. With the backend "memeff", attention reads the codes directly
(passes/compress_kv_cache.py).

This module needs transformers, and imports it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.kernels.coded_kv_cache import BITS, CODED, SCHEMES, announce_exact
from memeff_compile.model.cache.layers import (
    CACHE_NAME,
    OLDER_CACHE_NAME,
    Cache,
    CacheLayerMixin,
    CodedLayer,
    CompileConfig,
    ExactLayer,
    InPlace,
    Place,
    Starts,
    WindowLayer,
    layers_of,
    refuse,
    remaining,
)
from memeff_compile.model.cache.merged_layers import MergedLayer, Pair
from memeff_compile.model.cache.merged_values import ValuesLayer, ValuesPair
from memeff_compile.model.cache.minicache import MiniCache, pairs_of, require_alike, rotary_of
from memeff_compile.model.cache.pool import Pool, allocate, bucket
from memeff_compile.model.cache.run_ahead import let_run_ahead
from memeff_compile.model.changes import require_module
from memeff_compile.model.low_bit_heads import Undo
from memeff_compile.options import is_disabled, plain_path
from memeff_compile.system import Undone

Untyped: TypeAlias = Any
"""Objects that have no type here: a config, a model or a layer of transformers, or a setting.
"""

_POOLED = ("greedy_search", "sample", "beam_search", "beam_sample")
"""Kinds of generation that change only the contents of a cache."""


class KVCache(Cache):
    """A low-bit KV cache that you pass as `past_key_values`, or as `cache` since transformers
    5.24.

    Args:
        config: the model's config.
        max_cache_len: the largest number of tokens that fit into the cache. A single call with more
            tokens raises an error. On a CPU, an error is also raised if several calls together
            have more tokens. On a GPU, there is no error in this case, because the CPU does not
            know how many tokens the cache contains. Instead, the logits of tokens that do not fit
            are nan.
        bits: 16 (exact), 8, 4, 3 or 2.
        value_bits: the bits of values, if values should have fewer bits than keys; by default the
            same number.
        scheme: `kivi` (a scale and a zero point per channel of keys and per token of values) or
            `per_head` (one scale per token and head).
        group: number of tokens that are encoded together: 32, 64 or 128.
        recent: the minimum number of latest tokens that stay exact; a multiple of 16.
        keep_first: the number of a sequence's first tokens that stay exact, because in most models
            all tokens attend to them.
        attention_mask: the mask of prompts that are padded on the left: (batch, tokens) with 0 for
            padding. With this mask, `keep_first` counts from the first token after the padding,
            and scales ignore padding.
        merge: None, `"minicache"`, or a `MiniCache` with settings. With the last two, the cache
            merges pairs of consecutive layers. For each older token, the two layers of such a pair
            share one direction (unit vector) of the keys. The two layers also share one direction
            of the values. With `MiniCache(values_only=True)`, they share only directions of values.
            Merging layers loses more accuracy than 3-bit codes. Creating a cache that merges layers
            shows a warning. To avoid the warning, pass the result of `fidelity_report` for your
            model as `MiniCache(fidelity=...)`.

    Raises:
        UnsupportedInputError: A setting or a model is not supported; the message says why.

    Example:
        cache = memeff_compile.KVCache(model.config, max_cache_len=32768, bits=4)
        model.generate(**inputs, past_key_values=cache)
    """

    def __init__(
        self,
        config: Untyped,
        max_cache_len: int,
        bits: int = 4,
        *,
        value_bits: int | None = None,
        scheme: str = "kivi",
        group: int = 64,
        recent: int = 128,
        keep_first: int = 4,
        attention_mask: Tensor | None = None,
        merge: MiniCache | str | None = None,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            kind = type(config).__name__
            refuse(f"a {kind} was given as config; model.config of transformers is needed.")
        _check(max_cache_len, bits, scheme, group, recent, keep_first)
        self.bits, self.scheme, self.merge = bits, scheme, _merging(merge, scheme)
        self.value_bits = bits if value_bits is None else value_bits
        _check_value_bits(bits, value_bits, self.merge)
        self._starts = Starts(attention_mask)
        settings = {"bits": bits, "value_bits": value_bits, "scheme": scheme, "group": group}
        settings |= {"recent": recent, "kept": keep_first}

        def full() -> Untyped:
            if bits == 16:
                return ExactLayer(max_cache_len)
            return CodedLayer(max_cache_len, settings, self._starts)

        layers = list(layers_of(config, max_cache_len, full))
        if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
            refuse("no layer of this model keeps keys and values; use transformers' own cache.")
        if self.merge is not None:
            _pair(layers, self.merge, config, max_cache_len, settings, self._starts)
        super().__init__(layers=layers)
        self.has_codes = any(isinstance(layer, CodedLayer) for layer in layers)
        self._max_cache_len = max_cache_len
        self.kept_exact = "" if bits == 16 else _kept_exact(layers, bits)
        if self.kept_exact:
            announce_exact(self)
            if not self.has_codes:
                _warn_once(f"KVCache: {self.kept_exact}. Leave the request out{_bounded(layers)}.")

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Untyped,
        **how: Untyped,
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values to a layer; return the keys and values over which attention
        runs.
        """
        if layer_idx >= len(self.layers):
            refuse(
                f"layer {layer_idx} of a model was given to a cache of {len(self.layers)} layers, "
                "which is of another model. Make one of this model's config."
            )
        return super().update(key_states, value_states, layer_idx, *args, **how)

    def merged(self) -> list[dict[str, Any]]:
        """Return one dictionary per pair of merged layers, which share directions (unit vectors).

        For older tokens, the two layers share directions of values, and of keys unless
        `values_only` is set. Each layer has its own lengths of the vectors. Older tokens are merged
        in groups of `group` tokens, a setting of `KVCache`. Some tokens of a merged group may stay
        unmerged. The call makes the CPU wait for the device, from which the dictionaries'
        numbers are copied.

        Each dictionary has these keys:

        - `layers`: the numbers of the pair's two layers;
        - `merged`: the number of tokens in merged groups, including tokens of these groups that
          stayed unmerged;
        - `kept`: the mean number of tokens per sequence and head that stayed unmerged, not
          counting a sequence's first `keep_first` tokens, which always stay exact;
        - `left_over`: the mean number of tokens per sequence and head that were merged only because
          they did not fit into the memory for unmerged tokens.
        """
        found = []
        for layer in self.layers:
            if not isinstance(layer, MergedLayer) or not layer.is_upper:
                continue
            pair = layer.pair
            merged = 0 if pair.shape is None else int(layer.counts[CODED])
            found.append({"layers": pair.numbers, "merged": merged, **pair.kept()})
        return found

    def reset(self, attention_mask: Tensor | None = None) -> None:
        """Empty the cache; its tensors keep their memory. The argument is the attention mask of the
        next prompts; None means no padding.
        """
        ours = (layer for layer in self.layers if isinstance(layer, InPlace))
        held = {tensor.shape[0] for layer in ours for _, tensor in layer.tensors()}
        self._starts.restart(attention_mask, held)
        for layer in self.layers:
            layer.reset()

    def begin_with_a_step(self) -> None:
        """Let a prompt of one token run as a decoding step, so that Dynamo compiles no separate
        graph for such a prompt.

        If compiled code cannot use this cache, the method does nothing. Attention over such a cache
        has no mask. A prompt of one token that ran as a decoding step would then also attend to
        empty positions.
        """
        for layer in self.layers if self.is_compileable else ():
            if isinstance(layer, InPlace) and layer.is_initialized:
                layer.is_empty = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last n tokens of every layer if the argument is -n; a positive argument is an
        error.

        If a layer cannot remove that many tokens, raise UnsupportedInputError and remove no token.
        For example, a sliding-window layer cannot restore tokens that the layer has dropped.
        """
        remove = remaining(tokens_to_remove)
        if remove == 0:
            return
        layer: Untyped
        for number, layer in enumerate(self.layers):
            why = _keeps(layer, remove)
            if why is not None:
                refuse(f"{why} Layer {number} says so, and no layer was changed.")
        for layer in self.layers:
            if isinstance(layer, InPlace):
                layer.remove_last(remove)
            else:
                layer.crop(-remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the sequences into another order, in place."""
        self._starts.change(lambda t: t.index_select(0, beam_idx.to(t.device)), in_place=True)
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace the layers' tensors by new ones in which every sequence is repeated."""
        self._change_rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the layers' tensors by new ones that contain only some of the sequences."""
        self._change_rows(lambda t: t[indices].contiguous())

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for number, layer in enumerate(self.layers):
            is_known = isinstance(layer, InPlace)
            if not is_known and type(layer).__name__ != "DummyLayer":
                refuse(
                    f"layer {number} is a {type(layer).__name__} of transformers, whose sequences "
                    "cannot be repeated or selected; no layer was changed. Fill a new cache with "
                    "the sequences that are needed."
                )
        self._starts.change(change, in_place=False)
        for layer in self.layers:
            for (owner, name), tensor in _tensors(layer):
                changed = change(tensor)
                compat.keep_address(changed)
                setattr(owner, name, changed)

    @property
    def is_croppable(self) -> bool:
        """Return whether every layer can remove its last tokens.

        The layer classes of transformers declare this property since version 5.17.
        """
        return all(getattr(layer, "is_croppable", False) for layer in self.layers)

    def exact_tensors(self) -> list[Tensor]:
        """Return the key and value tensors of layers that are neither quantised nor merged with
        another layer.

        Two merged layers share directions (unit vectors) of keys or values. No layer with a sliding
        window is quantised or merged."""
        exact = (layer for layer in self.layers if not isinstance(layer, CodedLayer))
        return [tensor for layer in exact for _, tensor in _tensors(layer)]

    def windows(self) -> list[WindowLayer]:
        """Return the layers that have a sliding window."""
        return [layer for layer in self.layers if isinstance(layer, WindowLayer)]

    def restores_drafts(self) -> bool:
        """Return whether every layer keeps the tokens that are needed again after a draft is
        rejected.

        A draft consists of several decoding steps, each with one token. A sliding window or a
        recurrent state may drop tokens in each step.
        """
        return not any(
            hasattr(layer, "activate_past_recording")
            or (isinstance(layer, WindowLayer) and not layer.holds_all)
            for layer in self.layers
        )

    @property
    def is_empty(self) -> bool:
        """Return whether no layer of this cache contains tokens."""
        return all(layer.is_empty for layer in self.layers if isinstance(layer, InPlace))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors that store keys and values."""
        found = sum(tensor.nbytes for layer in self.layers for _, tensor in _tensors(layer))
        places = getattr(self._starts, "places", None)
        return found + (0 if places is None else places.nbytes)

    def __repr__(self) -> str:
        coded = sum(isinstance(layer, CodedLayer) for layer in self.layers)
        length = self._max_cache_len
        merged = sum(isinstance(layer, MergedLayer) for layer in self.layers)
        share = f", {merged} of them share directions" if merged else ""
        of_values = "" if self.value_bits == self.bits else f", value_bits={self.value_bits}"
        return (
            f"KVCache(bits={self.bits}{of_values}, scheme={self.scheme!r}, max_cache_len={length}, "
            f"{coded} of {len(self.layers)} layers in codes{share})"
        )


def _bounded(layers: list[Untyped]) -> str:
    """If all layers have sliding windows, return why low-bit keys and values would save little.

    Otherwise return "". A sliding window limits how many tokens a layer stores."""
    ours = (layer for layer in layers if isinstance(layer, CacheLayerMixin))
    is_bounded = all(isinstance(layer, WindowLayer) for layer in ours)
    return ": a window bounds what such a layer keeps" if is_bounded else ""


@functools.cache
def _warn_once(text: str) -> None:
    """Warn about a setting without effect: only once, although generate() creates a new cache in
    each call."""
    warnings.warn(text, UserWarning, stacklevel=4)


def _kept_exact(layers: list[Untyped], bits: int) -> str:
    """Return a sentence that lists the layers whose keys and values are not quantised although the
    user requested low bits, or ""."""
    ours = [n for n, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
    coded = [n for n in ours if isinstance(layers[n], CodedLayer)]
    exact = [n for n in ours if n not in coded]
    if not exact:
        return ""
    windows = [n for n in exact if isinstance(layers[n], WindowLayer)]
    others = [n for n in exact if n not in windows]  # layers of transformers
    sizes = " or ".join(map(str, sorted({layers[n].window for n in windows})))
    reasons = [f"see a window of {sizes} tokens"] * bool(windows)
    names = ", ".join(sorted({type(layers[n]).__name__ for n in others}))
    unknown = f"of a kind that KVCache does not encode ({names})"
    reasons += [f"are {unknown}"] * bool(others)
    if not coded:
        return (
            f"{bits} bits have no effect on this model: all of its {len(exact)} layers that keep "
            f"keys and values {' or '.join(reasons)} and stay exact"
        )
    parts = [f"in {bits} bits: {_listed(coded)}"]
    if windows:
        parts.append(f"exact, with a window of {sizes} tokens: {_listed(windows)}")
    if others:
        parts.append(f"exact, {unknown}: {_listed(others)}")
    return "; ".join(parts)


def _listed(numbers: list[int]) -> str:
    """Return as text how many layers a list contains, and the numbers of its first few layers."""
    shown = [*map(str, numbers[:_MOST_NAMED]), *(["..."] if len(numbers) > _MOST_NAMED else [])]
    return f"{len(numbers)} layer{'s' * (len(numbers) > 1)} ({', '.join(shown)})"


_MOST_NAMED = 8


def _tensors(layer: Untyped) -> list[tuple[Place, Tensor]]:
    """Return the tensors of a cache layer of any class, with their owners and attribute names.

    Two merged layers share tensors, such as directions (unit vectors) of values. The shared tensors
    are returned only for the lower (earlier) layer.
    """
    if isinstance(layer, InPlace):
        return list(layer.tensors())
    held = [((layer, name), getattr(layer, name, None)) for name in ("keys", "values")]
    return [(place, tensor) for place, tensor in held if isinstance(tensor, Tensor)]


def _keeps(layer: Untyped, remove: int) -> str | None:
    """Return the reason why a layer cannot remove its last tokens, or None if the layer can remove
    them.
    """
    if isinstance(layer, InPlace):
        return layer.keeps(remove)
    if getattr(layer, "is_croppable", False) and hasattr(layer, "crop"):
        return None
    return (
        f"crop was asked to remove {remove} tokens, but a {type(layer).__name__} cannot restore "
        "the tokens that its window or state has dropped. Call reset() on the cache and give it "
        "the tokens that stay."
    )


def _merging(merge: MiniCache | str | None, scheme: str) -> MiniCache | None:
    if merge is None:
        return None
    if scheme != "kivi":
        refuse(f"merge goes with scheme='kivi', not {scheme!r}.")
    if isinstance(merge, MiniCache):
        return merge
    if merge != "minicache":
        refuse(f"merge is {merge!r}; None, 'minicache' or a MiniCache is needed.")
    return MiniCache()


def _pair(
    layers: list[Any],
    merge: MiniCache,
    config: Untyped,
    max_cache_len: int,
    settings: dict[str, Any],
    starts: Starts,
) -> None:
    """Replace pairs of layers in `layers` by merged layers, which share directions (unit vectors).

    The two merged layers of a pair share the directions of their older tokens' keys and values.
    With `merge.values_only`, they share only the directions of the values. Two layers form a pair
    if they are consecutive among the layers that attend to all tokens. A layer with a sliding
    window that lies between the two layers stays exact. Layers before the start layer of `merge`,
    and from its end layer on, are not merged.
    """
    rotary = rotary_of(config, len(layers))
    rotated = [
        rotary[place]
        if isinstance(layer, (CodedLayer, ExactLayer)) and not layer.is_sliding
        else None
        for place, layer in enumerate(layers)
    ]
    start = len(layers) // 2 if merge.start_layer is None else merge.start_layer
    pairs = pairs_of(rotated, start, merge.end_layer)
    attending = [place for place, kind in enumerate(rotated) if kind is not None]
    if not pairs_of(rotated, 0):
        refuse(
            "no two consecutive layers, of those that attend to all tokens, can be merged in this "
            "model. Leave merge out, and take fewer bits for a smaller cache."
        )
    if not pairs:
        where = f"from layer {start} on"
        where += "" if merge.end_layer is None else f" and before layer {merge.end_layer}"
        refuse(
            f"no two layers {where} attend to all tokens and can be merged; the layers of this "
            f"model that attend to all tokens are {_listed(attending)}. Set "
            "MiniCache(start_layer=, end_layer=) around more of them, or leave merge out."
        )
    require_alike(merge, pairs)
    room = settings["kept"] + merge.capacity(max_cache_len)
    kinds = (ValuesPair, ValuesLayer) if merge.values_only else (Pair, MergedLayer)
    given = settings if merge.values_only else {**settings, "kept": room}
    for numbers in pairs:
        pair = kinds[0](numbers, merge, settings["kept"], config if rotary[numbers[0]] else None)
        lower = None
        for place in numbers:
            lower = layers[place] = kinds[1](max_cache_len, given, starts, pair, lower)


def _check_value_bits(bits: int, value_bits: int | None, merge: MiniCache | None) -> None:
    if value_bits is not None and (bits == 16 or value_bits not in BITS):
        refuse(
            f"bits is {bits!r} and value_bits {value_bits!r}; both are one of "
            f"{', '.join(map(str, BITS))}, or value_bits is left out."
        )
    if merge is None:
        return
    if merge.values_only and bits == 16:
        refuse("values alone are merged in codes; set bits to 8, 4, 3 or 2, or merge keys as well.")
    if not merge.values_only and value_bits not in (None, bits):
        refuse(
            f"merged layers have {bits} bits for keys and {value_bits} for values; give both the "
            "same, or merge values alone: MiniCache(values_only=True)."
        )


def _check(
    max_cache_len: int, bits: int, scheme: str, group: int, recent: int, keep_first: int
) -> None:
    is_multiple = isinstance(recent, int) and recent >= 16 and recent % 16 == 0
    is_known = isinstance(bits, int) and bits in (16, *BITS)
    is_size = isinstance(group, int) and group in (32, 64, 128)
    for name, given, is_right, needed in (
        ("bits", bits, is_known, f"one of 16, {', '.join(map(str, BITS))} is needed"),
        ("scheme", scheme, scheme in SCHEMES, f"one of {', '.join(map(repr, SCHEMES))} is needed"),
        ("group", group, is_size, "32, 64 or 128 is needed"),
        ("recent", recent, is_multiple, "a multiple of 16 is needed, 16 at least"),
    ):
        if not is_right:
            refuse(f"{name} is {given!r}; {needed}.")
    for name, count, least in (("keep_first", keep_first, 0), ("max_cache_len", max_cache_len, 1)):
        if not isinstance(count, int) or count < least:
            refuse(f"{name} is {count!r}; a number of tokens is needed, {least} at least.")


def named_cache(kwargs: Mapping[str, Any]) -> Untyped:
    """Return the cache among the arguments of a model call, and the name of the argument that
    contains it.
    """
    cache = kwargs.get(CACHE_NAME)
    return kwargs.get(OLDER_CACHE_NAME) if cache is None else cache


def for_any_length(call: Callable[..., Untyped]) -> Callable[..., Untyped]:
    """Wrap the compiled call of a model so that it accepts prompts and caches of any length.

    Even the first graphs that are compiled for the call accept any length. Layers with a sliding
    window make room for a new token before the compiled step runs. So one compiled version of the
    step works whether the windows are full or not.
    """

    def run(*args: object, **kwargs: Untyped) -> Untyped:
        cache, ids = named_cache(kwargs), kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if isinstance(cache, KVCache) and isinstance(ids, Tensor) and ids.dim() > 1:
            masks = kwargs.get("attention_mask")
            masks = masks.values() if isinstance(masks, Mapping) else [masks]
            windows = cache.windows()
            for layer in windows:
                layer.require_room(ids.shape[1])
                layer.make_room(ids.shape[1])
            lengths = {cache.get_max_length(), *(layer.room for layer in windows)}
            if cache.is_empty and ids.shape[1] > 1:
                lengths = {ids.shape[1]}
                compat.mark_varying(ids, 1)
            for each in (*masks, kwargs.get("position_ids")):
                for dim in range(1, each.dim()) if isinstance(each, Tensor) else ():
                    if each.shape[dim] in lengths:
                        compat.mark_varying(each, dim)
        return call(*args, **kwargs)

    return run


_HOOK = "_prepare_cache_for_generation"


@dataclasses.dataclass
class _Hook:
    """A hook that replaces the method with which generate() prepares a model's cache, and stores
    the original method.

    The hook refers to the model, so that a copied or pickled model gets a hook that refers to the
    copy.
    """

    model: Any
    bits: int
    max_cache_len: int | None
    settings: dict[str, Any]
    before: _Hook | None
    is_undone: bool = False
    pool: Pool = dataclasses.field(default_factory=Pool)

    def __call__(
        self,
        generation_config: Untyped,
        model_kwargs: dict[str, Any],
        generation_mode: Untyped,
        batch_size: int,
        max_cache_length: int,
        *args: object,
        **kwargs: object,
    ) -> Untyped:
        """Put a KVCache into the arguments of a generate() call, unless the call requests another
        cache."""
        model = self.model
        given = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        is_named = named_cache(model_kwargs) is not None
        asks = generation_config.use_cache is False or generation_config.cache_implementation
        if is_named or asks or self.is_off:
            return getattr(type(model), _HOOK)(model, *given, *args, **kwargs)
        tokens = self.max_cache_len or bucket(max_cache_length)
        if tokens < max_cache_length:
            refuse(
                f"generate() needs room for {max_cache_length} tokens and max_cache_len is "
                f"{tokens}; make it larger, or leave it out."
            )
        mask = model_kwargs.get("attention_mask")
        is_padded = mask is not None and mask.dim() == 2 and bool((mask[:, 0] == 0).any())
        like_prompt = [model_kwargs.get("position_ids"), mask]  # transformers makes one of them
        lengths = [each.shape[-1] for each in like_prompt if each is not None]
        mask = mask if is_padded else None
        how = (generation_config, generation_mode, batch_size, tokens, mask)
        cache = self._cache(*how)
        if generation_config.is_assistant and not cache.restores_drafts():
            # transformers' cache keeps what has left a window until the draft is checked.
            return getattr(type(model), _HOOK)(model, *given, *args, **kwargs)
        model_kwargs[CACHE_NAME] = cache
        let_run_ahead(cache)
        if lengths[:1] == [1]:
            cache.begin_with_a_step()
        if generation_config.compile_config is not None:
            return None
        if getattr(model, "_compiled_call_impl", None) is not None:
            # The function that generate() would compile is compiled already.
            generation_config.disable_compile = True
        elif model.device.type == "cuda":
            # generate() compiles decoding by itself; Inductor alone would build the dense view. No
            # mode is set: the backend records each step, and only that, as a CUDA graph.
            generation_config.compile_config = CompileConfig(backend="memeff", mode="default")
        return None

    @property
    def is_off(self) -> bool:
        """Return whether an option of this package or of PyTorch forbids this package to change
        models."""
        if is_disabled() or compat.compiling_is_off():
            return True
        compiled = compat.backend_of(getattr(self.model, "_compiled_call_impl", None))
        return compiled is not None and compiled[1].get("memeff.preset") == "off"

    def undo(self) -> None:  # undoes only this call
        """Undo this call of `use_kv_cache_`: the model then creates the same caches as before the
        call. If an earlier call of `use_kv_cache_` was undone in the meantime, the earlier call
        stays undone.
        """
        self.is_undone = True
        held = self.model.__dict__
        current = held.get(_HOOK)
        if current is not self:
            return
        while current is not None and current.is_undone:
            current = current.before
        if current is None:
            del held[_HOOK]
        else:
            held[_HOOK] = current

    def _cache(
        self, config: Untyped, mode: Untyped, batch_size: int, tokens: int, mask: Tensor | None
    ) -> KVCache:
        """Return an empty cache: an earlier one if no code uses its tensors any more, otherwise a
        new one."""
        model = self.model
        sequences = batch_size * max(config.num_beams or 1, config.num_return_sequences or 1)

        def make() -> KVCache:
            made = KVCache(model.config, tokens, self.bits, attention_mask=mask, **self.settings)
            if is_pooled:
                allocate(made, model, sequences)
            return made

        is_pooled = getattr(mode, "value", None) in _POOLED
        device = model.device.type
        if not is_pooled or config.return_dict_in_generate or torch.is_autocast_enabled(device):
            return make()
        kind = sequences, model.dtype, model.device, torch.is_inference_mode_enabled()
        # How many rows a merged cache keeps follows from its length.
        longest = tokens if self.settings.get("merge") or self.max_cache_len else 2 * tokens
        return self.pool.take(kind, range(tokens, longest + 1), mask, make)


def own_caches_again(model: torch.nn.Module) -> Undone:
    """Undo `use_kv_cache_` for every transformers model inside a model.

    The models' `generate` then creates the usual caches of transformers again.
    `memeff_compile.undo` calls this function.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        hook = vars(module).get(_HOOK)
        if not isinstance(hook, _Hook):
            continue
        found[plain_path(path) or "(model)"] = (
            f"generate() makes the model's own cache, no KVCache of {hook.bits} bits"
        )
        while hook is not None:
            hook.pool.clear()
            hook.undo()
            hook = hook.before
        compiled = vars(module).get(_COMPILED_STEP)
        if (compat.backend_of(compiled) or ("",))[0] == "memeff":
            del module.__dict__[_COMPILED_STEP]  # by generate() itself, with these caches
    return Undone("KV cache of generate() taken out" if found else "", found)


_COMPILED_STEP = "_compiled_call"


def use_kv_cache_(
    model: Untyped, bits: int = 4, *, max_cache_len: int | None = None, **settings: Untyped
) -> Undo:
    """Make every later `model.generate(...)` use this package's `KVCache`, also inside pipelines.

    A `generate` call to which you pass a cache, or `use_cache=False`, is not affected. Cache
    lengths are rounded up to a few sizes, and a cache that generate() does not return is reused in
    later calls. On a GPU, generate() itself compiles the decoding step, with the backend "memeff"
    unless you choose another one. The most recent `use_kv_cache_` applies until you undo it. Copies
    of the model inherit the setting.

    Args:
        model: a transformers model that generates; it may have PEFT adapters or be compiled.
        bits: the bits per element of stored keys and values, as for `KVCache`; 16 is exact.
        max_cache_len: the largest number of tokens that fit into a cache; by default the number
            that each call needs, rounded up.
        settings: further settings of `KVCache`, such as `recent`.

    Returns:
        An object that reverts the setting: call it, or use it in a `with` statement. Printing this
        object shows the cache's settings, and the layers that stay exact (not quantised).

    Raises:
        UnsupportedInputError: A setting is not supported, or the model cannot use a KVCache. Such a
            model has no `generate`, is an encoder-decoder, or uses another kind of cache.

    Example:
        undo = memeff_compile.use_kv_cache_(model, bits=4)
        model.generate(**inputs)
        undo()
    """
    require_module(model, "use_kv_cache_")
    inner: Untyped = compat.without_compile(model)
    if not hasattr(type(inner), _HOOK) and hasattr(inner, "get_base_model"):  # PEFT's
        inner = compat.without_compile(inner.get_base_model())
    if not hasattr(type(inner), _HOOK) or not hasattr(inner, "generate"):
        refuse(
            f"{type(model).__name__} has no generate() of transformers; pass a KVCache to the "
            "model's forward instead."
        )
    if inner.config.is_encoder_decoder:
        refuse(
            f"{type(inner).__name__} is an encoder-decoder: its generate() also caches keys and "
            "values of the encoder's tokens. Compile it without kv_cache, or give generate "
            f"{CACHE_NAME}=EncoderDecoderCache(KVCache(model.config, tokens), DynamicCache())."
        )
    takes_caches = getattr(inner, "_supports_default_dynamic_cache", None)
    if takes_caches is not None and not takes_caches():
        refuse(
            f"{type(inner).__name__} brings its own state or cache, and generate() does not "
            "replace it; compile it without kv_cache."
        )
    tried = KVCache(inner.config, max_cache_len or 1, bits, **settings)  # refuses now, not later
    hook = _Hook(inner, bits, max_cache_len, settings, inner.__dict__.get(_HOOK))
    inner.__dict__[_HOOK] = hook
    given = {"bits": bits, "max_cache_len": max_cache_len, **settings}
    shown = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    what = f"every later generate() of {type(inner).__name__} takes KVCache({shown})"
    what += f"; {tried.kept_exact}" if tried.kept_exact else ""
    return Undo(hook.undo, "use_kv_cache_", what)
