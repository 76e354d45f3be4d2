"""A KV cache of few bits for transformers' models: `KVCache`, and `use_kv_cache_` for generate().

Old tokens are codes of 8, 4, 3 or 2 bits; the latest and the first few stay as they came. Layers
that only see a window of tokens stay exact. Without the backend a step rebuilds keys and values and
is right; with it, attention reads the codes themselves (passes/compress_kv_cache.py).

Needs transformers, which nothing else of the package does; it is imported with this module.
"""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import (
    BITS,
    CODED,
    LENGTH,
    POOL,
    SCHEMES,
    Layout,
    coded_kv_cache_append,
    coded_kv_cache_view,
)
from memeff_compile.model.cache.minicache import MiniCache, pairs_of

try:
    from transformers import CompileConfig
    from transformers.cache_utils import (
        STATIC_LAYER_TYPE_MAPPING,
        Cache,
        CacheLayerMixin,
        StaticLayer,
        get_layer_types_and_kwargs,
    )
except ImportError as missing:
    raise ImportError(
        "memeff_compile.KVCache is a cache of transformers, 5.17 or later, which cannot be "
        f"imported ({missing}). Install it: pip install 'memeff_compile[transformers]'."
    ) from missing

_ROUNDED = 256
"""Lengths of caches that `use_kv_cache_` makes are multiples of it, so that few are compiled."""


def refuse(sentence: str) -> None:
    """Raise an error that says what was seen and what is needed."""
    raise UnsupportedInputError(f"KVCache: {sentence}")


def _remaining(tokens_to_remove: int) -> int:
    """Return how many tokens `crop` is to remove."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop was given {tokens_to_remove}; a negative number is needed: how many tokens to "
            "remove."
        )
    return -tokens_to_remove


class _InPlace(CacheLayerMixin):
    """What the layers of a KVCache share: tensors that are changed in place, never moved."""

    is_compileable = True
    is_sliding = False
    max_cache_len: int
    is_empty: bool

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that have an entry per sequence."""

    @abstractmethod
    def keeps(self, remove: int) -> str | None:
        """Return why the last `remove` tokens cannot be removed, or None."""

    @abstractmethod
    def remove_last(self, remove: int) -> None:
        """Remove the last tokens, which `keeps` has nothing against."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; a negative number says how many."""
        remove = _remaining(tokens_to_remove)
        why = self.keeps(remove)
        if why is not None:
            refuse(why)
        self.remove_last(remove)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that the mask is about."""
        return (query_length if self.is_empty else self.max_cache_len), 0

    def get_max_length(self) -> int:
        """Return the tokens there is room for."""
        return self.max_cache_len

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the sequences into another order, for beam search."""
        for _, tensor in self.tensors():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        for name, tensor in self.tensors():
            self._replace(name, tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        for name, tensor in self.tensors():
            self._replace(name, tensor[indices].contiguous())

    def _replace(self, name: str, tensor: Tensor) -> None:
        compat.keep_address(tensor)
        setattr(self, name, tensor)

    def offload(self) -> None:
        """Refuse: the tensors stay where they are."""
        refuse("offloading is not supported; the cache is small because it is coded.")

    prefetch = offload


def refuse_training(*tensors: Tensor) -> None:
    """Refuse keys and values that require gradients."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        refuse(
            "keys and values require gradients, and a cache has no backward. Generate under "
            "torch.no_grad(), or train with use_cache=False."
        )


class ExactLayer(_InPlace, StaticLayer):
    """A layer whose keys and values stay as they come, in the dtype they come in."""

    is_croppable = True
    keys: Any
    values: Any

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.is_empty = True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield keys and values, once they are there."""
        if self.is_initialized:
            yield "keys", self.keys
            yield "values", self.values

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens; return them where they are all there is, else the whole buffers."""
        refuse_training(key_states, value_states)
        was_empty, self.is_empty = self.is_empty, False
        whole = super().update(key_states, value_states, *args, **kwargs)
        return (key_states, value_states) if was_empty else whole

    def get_seq_length(self) -> Any:  # noqa: ANN401 - a number, or a tensor once there are tokens
        """Return the tokens in the cache."""
        return 0 if self.is_empty else self.cumulative_length

    def keeps(self, remove: int) -> None:
        """Say nothing against it: every token can be removed."""

    def remove_last(self, remove: int) -> None:
        """Remove the last tokens."""
        if remove == 0 or self.is_empty:
            return
        left = max(0, int(self.cumulative_length) - remove)
        self.keys[:, :, left:].zero_()
        self.values[:, :, left:].zero_()
        self.cumulative_length.fill_(left)
        self.is_empty = left == 0

    def reset(self) -> None:
        """Empty the layer; its tensors stay."""
        super().reset()
        self.is_empty = True

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors())


class CodedLayer(_InPlace):
    """A layer whose older tokens are codes.

    Attributes:
        settings: of `Layout`, without the depth, which the first keys tell.
        layout: what it is made of, once it is known.
    """

    is_croppable = False  # only tokens that are not yet in codes can be removed
    settled = "in codes"
    counts: Tensor
    k_window: Tensor
    v_window: Tensor

    def __init__(self, max_cache_len: int, settings: dict[str, Any], starts: Starts) -> None:
        CacheLayerMixin.__init__(self)
        self.max_cache_len = max_cache_len
        self.settings = settings
        self.starts = starts
        self.is_empty = True
        self.layout: Layout | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with an entry per sequence, once they are there."""
        if self.is_initialized:
            for name in POOL[:8]:
                yield name, getattr(self, name)

    def pool(self) -> list[Tensor]:
        """Return the tensors in the order in which the ops take them."""
        mine = [getattr(self, name) for name in POOL[:8]]
        return [*mine, self.starts.places, self.counts]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys and values like these."""
        self._require_depth(key_states, value_states)
        batch, heads, _, depth = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = batch
        self.layout = Layout(depth, **self.settings)
        kinds = {"codes": torch.uint8, "counts": torch.int64}
        shapes = self.layout.shapes(batch, heads, self.max_cache_len)
        self.starts.allocate(shapes.pop("places"), self.device)
        for name, shape in shapes.items():
            dtype = kinds.get(name.split("_")[-1], self.dtype)
            tensor = torch.zeros(shape, dtype=dtype, device=self.device)
            compat.keep_address(tensor)
            setattr(self, name, tensor)
        self.is_initialized = True

    @staticmethod
    def _require_depth(key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values that cannot be coded."""
        depth = key_states.shape[3]
        if key_states.shape != value_states.shape:
            refuse(
                f"keys are {tuple(key_states.shape)} and values {tuple(value_states.shape)}; one "
                "head dimension for both is needed. Use bits=16 for this model."
            )
        if not 16 <= depth <= 256 or depth & (depth - 1):
            refuse(
                f"the head dimension is {depth}; 16, 32, 64, 128 or 256 is served. Use bits=16 for "
                "this model."
            )

    def _require_tokens(self, new: int) -> None:
        """Refuse more tokens at once than there is room for."""
        if new > self.max_cache_len:
            refuse(
                f"{new} tokens were given to a cache of max_cache_len={self.max_cache_len}. Make a "
                "longer one."
            )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens; return them where they are all there is, else a dense view."""
        del args, kwargs
        refuse_training(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.layout is not None
        self._require_tokens(key_states.shape[2])
        bits, recent = self.layout.bits, self.layout.recent
        pool = self.pool()
        coded_kv_cache_append(*pool, key_states, value_states, bits, recent, self.max_cache_len)
        was_empty, self.is_empty = self.is_empty, False
        if was_empty:
            return key_states, value_states
        keys, values = coded_kv_cache_view(*pool, None, None, bits, self.max_cache_len)
        return keys, values

    def get_seq_length(self) -> Any:  # noqa: ANN401 - a number, or a tensor once there are tokens
        """Return the tokens in the cache."""
        return 0 if self.is_empty else self.counts[LENGTH]

    def keeps(self, remove: int) -> str | None:
        """Return why the last `remove` tokens cannot be removed: they are in codes already."""
        if remove == 0 or self.is_empty:
            return None
        length, coded = int(self.counts[LENGTH]), int(self.counts[CODED])
        if bool(self.k_window.isnan().any()):
            return (
                "crop found keys that are not numbers: the cache was given more tokens than "
                f"max_cache_len={self.max_cache_len}, and which are missing is not known. reset() "
                "it, and make it longer."
            )
        if remove > length - coded:
            return (
                f"crop was asked to remove {remove} tokens, and {length - coded} of {length} are "
                f"not yet {self.settled}. Remove at most these, or make `recent` larger."
            )
        return None

    def remove_last(self, remove: int) -> None:
        """Remove the last tokens, of those that are not yet in codes."""
        if remove == 0 or self.is_empty:
            return
        self.counts[LENGTH] -= remove
        self.is_empty = int(self.counts[LENGTH]) == 0

    def reset(self) -> None:
        """Empty the layer; its tensors stay."""
        self.is_empty = True
        if self.is_initialized:
            self.counts.zero_()
            self.k_window.zero_()
            self.v_window.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, without what layers share."""
        return sum(tensor.nbytes for _, tensor in self.tensors())


class Starts:
    """Where each sequence starts, and the places of the tokens that are kept: shared by layers."""

    def __init__(self, attention_mask: Tensor | None) -> None:
        self.places: Tensor
        self._shape: tuple[int, ...] = ()
        self.first = self._first(attention_mask)

    @staticmethod
    def _first(attention_mask: Tensor | None) -> Tensor | None:
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                refuse(
                    f"attention_mask has {attention_mask.dim()} dimensions; (batch, tokens) with 1 "
                    "for a token and 0 for padding is needed."
                )
            return (attention_mask.cumsum(1) == 0).sum(1)
        return None

    def restart(self, attention_mask: Tensor | None, held: set[int]) -> None:
        """Start over with other sequences, in the tensors that are there; refused, or all of it.

        Args:
            attention_mask: of the sequences.
            held: how many sequences the layers have tensors for.
        """
        first = self._first(attention_mask)
        for sequences in held:
            self._spread(first, sequences, torch.device("cpu"))
        self.first = first
        if self._shape:
            self.places.copy_(self._counted(self._shape, self.places.device))

    def allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Make the places for layers of this shape, unless they are there."""
        if self._shape == shape:
            return
        if self._shape:
            refuse(
                f"layers keep tokens in {shape} and {self._shape}; the same number of key-value "
                "heads in every coded layer is needed. Use bits=16 for this model."
            )
        places = self._counted(shape, device)
        compat.keep_address(places)
        self._shape, self.places = shape, places

    def _counted(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the places of the tokens that are kept."""
        order = torch.arange(shape[2], dtype=torch.int32, device=device)
        return (order + self.first_tokens(shape[0], device)[:, None, None]).expand(shape).clone()

    def first_tokens(self, sequences: int, device: torch.device) -> Tensor:
        """Return the position of each sequence's first token, int32."""
        return self._spread(self.first, sequences, device)

    @staticmethod
    def _spread(first: Tensor | None, sequences: int, device: torch.device) -> Tensor:
        if first is None:
            return torch.zeros(sequences, dtype=torch.int32, device=device)
        batch = first.shape[0]
        if batch == 0 or sequences % batch:
            refuse(
                f"attention_mask has {batch} rows and the keys {sequences}; a row per sequence, "
                "or per sequence before beams, is needed."
            )
        return first.to(device, torch.int32).repeat_interleave(sequences // batch)

    def change(self, function: Callable[[Tensor], Tensor], *, in_place: bool) -> None:
        """Reorder, repeat or select sequences."""
        if not self._shape:
            return
        changed = function(self.places)
        if in_place:
            self.places.copy_(changed)
        else:
            compat.keep_address(changed)
            self.places, self._shape = changed, tuple(changed.shape)


class KVCache(Cache):
    """A KV cache of few bits, to pass as ``past_key_values``.

    Args:
        config: the model's config.
        max_cache_len: tokens there is room for. More raise on a CPU; on a GPU, where nothing may
            wait for the host, logits are not-a-number from there on.
        bits: 16 (exact), 8, 4, 3 or 2.
        scheme: ``kivi``, a scale and zero per channel of keys and per token of values, or
            ``per_head``, one scale per token and head.
        group: tokens that are coded together: 32, 64 or 128.
        recent: at least so many of the latest tokens stay exact; a multiple of 16.
        keep_first: so many of a sequence's first tokens stay exact: most models attend to them
            from everywhere.
        attention_mask: (batch, tokens) with 0 for padding, where prompts are padded on the left, so
            that `keep_first` counts from the first token and padding has no say in scales.
        merge: None, ``"minicache"``, or a `MiniCache` that says how: neighbouring layers share the
            directions of their older tokens. Lossy beyond the codes; measure with
            `fidelity_report` what it does to your model.

    Raises:
        UnsupportedInputError: A setting or a model that cannot be served; the sentence says why.

    Example:
        cache = memeff_compile.KVCache(model.config, max_cache_len=32768, bits=4)
        model.generate(**inputs, past_key_values=cache)
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - transformers' config
        max_cache_len: int,
        bits: int = 4,
        *,
        scheme: str = "kivi",
        group: int = 64,
        recent: int = 128,
        keep_first: int = 4,
        attention_mask: Tensor | None = None,
        merge: MiniCache | str | None = None,
    ) -> None:
        _check(max_cache_len, bits, scheme, group, recent, keep_first)
        self.bits, self.scheme, self.merge = bits, scheme, _merging(merge, scheme)
        self._starts = Starts(attention_mask)
        settings = {
            "bits": bits,
            "scheme": scheme,
            "group": group,
            "recent": recent,
            "kept": keep_first,
        }

        def full() -> Any:  # noqa: ANN401
            if bits == 16:
                return ExactLayer(max_cache_len)
            return CodedLayer(max_cache_len, settings, self._starts)

        layers = list(_layers(config, max_cache_len, full))
        if self.merge is not None:
            _pair(layers, self.merge, config, max_cache_len, settings, self._starts)
        super().__init__(layers=layers)

    def merged(self) -> list[dict[str, Any]]:
        """Return a line per pair of layers that share directions.

        Returns:
            For each pair the numbers of its `layers`, `merged` tokens, the mean number of rows
            that are `kept` as they came per sequence and head, first tokens aside, and
            `left_over`, rows per sequence and head that were to be kept and found no room. Waits
            for the device.
        """
        found = []
        layer: Any
        for layer in self.layers:
            pair = getattr(layer, "pair", None)
            if pair is None or not layer.is_upper:
                continue
            has = pair.shape is not None
            found.append(
                {
                    "layers": pair.numbers,
                    "merged": int(layer.counts[CODED]) if has else 0,
                    "kept": float(pair.kept_count.float().mean()) if has else 0.0,
                    "left_over": float(pair.left_over.float().mean()) if has else 0.0,
                }
            )
        return found

    def reset(self, attention_mask: Tensor | None = None) -> None:
        """Empty the cache; its tensors stay.

        Args:
            attention_mask: of the next prompts, as when the cache is made; None: no padding.
        """
        held = {
            tensor.shape[0]
            for layer in self.layers
            if isinstance(layer, _InPlace)
            for _, tensor in layer.tensors()
        }
        self._starts.restart(attention_mask, held)
        for layer in self.layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every layer, or refuse and remove none.

        Args:
            tokens_to_remove: a negative number: how many tokens to remove.

        Raises:
            UnsupportedInputError: A layer cannot remove as many, or sees a window of tokens.
        """
        remove = _remaining(tokens_to_remove)
        if remove == 0:
            return
        layer: Any
        for number, layer in enumerate(self.layers):
            why = _keeps(layer, remove)
            if why is not None:
                refuse(f"{why} Layer {number} says so, and no layer was changed.")
        for layer in self.layers:
            if isinstance(layer, _InPlace):
                layer.remove_last(remove)
            else:
                layer.crop(-remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the sequences into another order, in place."""
        self._starts.change(lambda t: t.index_select(0, beam_idx.to(t.device)), in_place=True)
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence; new tensors."""
        self._starts.change(lambda t: t.repeat_interleave(repeats, 0), in_place=False)
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences; new tensors."""
        self._starts.change(lambda t: t[indices].contiguous(), in_place=False)
        super().batch_select_indices(indices)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that hold keys and values."""
        found = 0
        for layer in self.layers:
            if isinstance(layer, (CodedLayer, ExactLayer)):
                found += layer.nbytes
            else:
                held: Any = layer
                parts = (getattr(held, "keys", None), getattr(held, "values", None))
                found += sum(part.nbytes for part in parts if isinstance(part, Tensor))
        places = getattr(self._starts, "places", None)
        return found + (0 if places is None else places.nbytes)

    def __repr__(self) -> str:
        coded = sum(isinstance(layer, CodedLayer) for layer in self.layers)
        length = self.get_max_length()
        merged = sum(hasattr(layer, "pair") for layer in self.layers)
        share = f", {merged} of them share directions" if merged else ""
        return (
            f"KVCache(bits={self.bits}, scheme={self.scheme!r}, max_cache_len={length}, "
            f"{coded} of {len(self.layers)} layers in codes{share})"
        )


def _keeps(layer: Any, remove: int) -> str | None:  # noqa: ANN401
    """Return why a layer of any kind cannot remove its last tokens, or None."""
    if isinstance(layer, _InPlace):
        return layer.keeps(remove)
    if getattr(layer, "is_croppable", False) and hasattr(layer, "crop"):
        return None
    return (
        f"crop was asked to remove {remove} tokens, and {type(layer).__name__} of transformers "
        "cannot give back those that its window or state has left behind. reset() the cache and "
        "give it the tokens that stay."
    )


def _layers(
    config: Any,  # noqa: ANN401
    max_cache_len: int,
    full: Callable[[], Any],
) -> Iterator[Any]:
    """Yield a layer of its kind for each of the model's."""
    types, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if isinstance(settings, dict):  # transformers before 5.20 has one for all
        settings = [settings] * len(types)
    for kind, given in zip(types, settings, strict=True):
        if kind == "full_attention":
            yield full()
        elif kind in STATIC_LAYER_TYPE_MAPPING:
            yield STATIC_LAYER_TYPE_MAPPING[kind](**{"max_cache_len": max_cache_len, **given})
        else:
            refuse(f"layers of the kind {kind!r} are not known; use transformers' own cache.")


def _merging(merge: MiniCache | str | None, scheme: str) -> MiniCache | None:
    """Return how layers are merged, or None."""
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
    config: Any,  # noqa: ANN401
    max_cache_len: int,
    settings: dict[str, Any],
    starts: Starts,
) -> None:
    """Put layers that share directions in the place of neighbours that can, from a layer on."""
    from memeff_compile.model.cache.merged_layers import MergedLayer, Pair

    text = config.get_text_config(decoder=True)
    # A layer without rotary embeddings never goes with one that has them.
    rotary = getattr(text, "no_rope_layers", None) or [1] * len(layers)
    kinds = [
        None if not isinstance(layer, (CodedLayer, ExactLayer)) else rotary[place]
        for place, layer in enumerate(layers)
    ]
    start = len(layers) // 2 if merge.start_layer is None else merge.start_layer
    pairs = pairs_of(kinds, start, merge.end_layer)
    if not pairs:
        where = f"from layer {start} on"
        where += "" if merge.end_layer is None else f" and before layer {merge.end_layer}"
        refuse(
            f"no two neighbouring layers {where} attend to all tokens, so none are merged "
            f"({len(layers)} layers). Set MiniCache(start_layer=, end_layer=) around more layers, "
            "or leave merge out."
        )
    room = settings["kept"] + merge.capacity(max_cache_len)
    given = {**settings, "kept": room}
    for numbers in pairs:
        pair = Pair(numbers, merge, settings["kept"])
        lower = None
        for place in numbers:
            lower = layers[place] = MergedLayer(max_cache_len, given, starts, pair, lower)


def _check(
    max_cache_len: int, bits: int, scheme: str, group: int, recent: int, keep_first: int
) -> None:
    if bits not in (16, *BITS):
        refuse(f"bits is {bits!r}; one of 16, {', '.join(map(str, BITS))} is needed.")
    if scheme not in SCHEMES:
        refuse(f"scheme is {scheme!r}; one of {', '.join(map(repr, SCHEMES))} is needed.")
    if group not in (32, 64, 128):
        refuse(f"group is {group!r}; 32, 64 or 128 is needed.")
    if not isinstance(recent, int) or recent < 16 or recent % 16:
        refuse(f"recent is {recent!r}; a multiple of 16 is needed, 16 at least.")
    if not isinstance(keep_first, int) or keep_first < 0:
        refuse(f"keep_first is {keep_first!r}; a number of tokens is needed, 0 at least.")
    if not isinstance(max_cache_len, int) or max_cache_len < 1:
        refuse(f"max_cache_len is {max_cache_len!r}; a number of tokens is needed, 1 at least.")


# --- every later generate() -----------------------------------------------------------------------

_HOOK = "_prepare_cache_for_generation"


@dataclasses.dataclass
class _Hook:
    """What generate() calls in the place of the model's own method, and what it was before.

    It holds the model itself, so that copies of the model, pickled ones too, have hooks of theirs.
    """

    model: Any
    bits: int
    max_cache_len: int | None
    settings: dict[str, Any]
    before: _Hook | None
    is_undone: bool = False

    def __call__(
        self,
        generation_config: Any,  # noqa: ANN401
        model_kwargs: dict[str, Any],
        generation_mode: Any,  # noqa: ANN401
        batch_size: int,
        max_cache_length: int,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Put a KVCache into the arguments of the model, unless another cache is asked for."""
        model = self.model
        given = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        is_named = model_kwargs.get("past_key_values") is not None
        asks = generation_config.use_cache is False or generation_config.cache_implementation
        if is_named or asks or model.config.is_encoder_decoder:
            if model.config.is_encoder_decoder:
                warnings.warn(
                    "use_kv_cache_: an encoder-decoder model keeps its own cache", stacklevel=3
                )
            return getattr(type(model), _HOOK)(model, *given, *args, **kwargs)
        tokens = self.max_cache_len or -(-max_cache_length // _ROUNDED) * _ROUNDED
        if tokens < max_cache_length:
            refuse(
                f"generate() needs room for {max_cache_length} tokens and max_cache_len is "
                f"{tokens}; make it larger, or leave it out."
            )
        mask = model_kwargs.get("attention_mask")
        is_padded = mask is not None and mask.dim() == 2 and bool((mask[:, 0] == 0).any())
        mask = mask if is_padded else None
        model_kwargs["past_key_values"] = KVCache(
            model.config, tokens, self.bits, attention_mask=mask, **self.settings
        )
        compiles = model.device.type == "cuda" and generation_config.compile_config is None
        if compiles and getattr(model, "_compiled_call_impl", None) is None:
            # generate() compiles decoding by itself; Inductor alone would build the dense view.
            generation_config.compile_config = CompileConfig(backend="memeff")
        return None


@dataclasses.dataclass
class _Use:
    """What `use_kv_cache_` returns: call it, or leave its ``with`` block, to undo."""

    hook: _Hook

    def __call__(self) -> None:
        """Let the model make the caches it made before, as far as that is not undone as well."""
        self.hook.is_undone = True
        held = self.hook.model.__dict__
        current = held.get(_HOOK)
        if current is not self.hook:
            return
        while current is not None and current.is_undone:
            current = current.before
        if current is None:
            del held[_HOOK]
        else:
            held[_HOOK] = current

    def __enter__(self) -> _Use:
        return self

    def __exit__(self, *exception: object) -> None:
        self()


def _generating(model: Any) -> Any:  # noqa: ANN401
    """Return the model of transformers whose generate() runs: inside adapters and compiled ones."""
    model = compat.without_compile(model)
    if not hasattr(type(model), _HOOK) and hasattr(model, "get_base_model"):  # PEFT's
        model = compat.without_compile(model.get_base_model())
    return model


def use_kv_cache_(
    model: Any,  # noqa: ANN401 - a model of transformers
    bits: int = 4,
    *,
    max_cache_len: int | None = None,
    **settings: Any,  # noqa: ANN401 - of KVCache
) -> Callable[[], None]:
    """Let every later ``model.generate(...)`` use a `KVCache`, pipelines included.

    A call that names a cache of its own, or ``use_cache=False``, gets what it asks for. On a GPU
    generate() compiles decoding by itself; where nothing else is asked for, that is with the
    backend. Uses nest: the latest one that is not undone counts. Copies of the model keep it.

    Args:
        model: a model of transformers that generates, also with PEFT's adapters or compiled.
        bits: as for `KVCache`.
        max_cache_len: tokens there is room for; by default what each call needs, rounded up.
        settings: as for `KVCache`.

    Returns:
        What undoes it: call it, or use it in a ``with`` statement.

    Raises:
        UnsupportedInputError: The model does not generate, or a setting cannot be served.

    Example:
        undo = memeff_compile.use_kv_cache_(model, bits=4)
        model.generate(**inputs)
        undo()
    """
    inner = _generating(model)
    if not hasattr(type(inner), _HOOK) or not hasattr(inner, "generate"):
        refuse(
            f"{type(model).__name__} has no generate() of transformers; pass a KVCache to the "
            "model's forward instead."
        )
    KVCache(inner.config, max_cache_len or 1, bits, **settings)  # refuses now what it would later
    hook = _Hook(inner, bits, max_cache_len, settings, inner.__dict__.get(_HOOK))
    inner.__dict__[_HOOK] = hook
    return _Use(hook)
