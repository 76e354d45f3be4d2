"""The exact layers and the low-bit layers of a `KVCache`, and their common base class.

This module needs transformers; without transformers, importing this module raises an error that
names the missing package.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels import coded_kv_cache as op_folder

try:
    from transformers import CompileConfig as CompileConfig
    from transformers.cache_utils import (
        STATIC_LAYER_TYPE_MAPPING,
        StaticLayer,
        StaticSlidingWindowLayer,
        get_layer_types_and_kwargs,
    )
    from transformers.cache_utils import Cache as Cache
    from transformers.cache_utils import CacheLayerMixin as CacheLayerMixin
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS as ROPE_INIT_FUNCTIONS
except ImportError as missing:
    raise ImportError(
        "memeff_compile.KVCache is a cache of transformers, 5.16.1 or later, which cannot be "
        f"imported ({missing}). Install it: pip install 'memeff_compile[transformers]'."
    ) from missing


OLDER_CACHE_NAME = "past_key_values"
_NAMES = [field.name for field in fields(BaseModelOutputWithPast)]
CACHE_NAME = "cache" if "cache" in _NAMES else OLDER_CACHE_NAME
"""The argument, and the output, of models that is their cache; transformers renamed it in 5.24."""


def refuse(sentence: str) -> None:
    """Raise UnsupportedInputError with a sentence that names the wrong input and the
    requirement."""
    raise UnsupportedInputError(f"KVCache: {sentence}")


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """Return those properties of a tensor that must equal the properties of the buffer to which the
    tensor is written.
    """
    batch, heads, _, depth = tensor.shape
    return batch, heads, depth, tensor.dtype, tensor.device


def _in_words(tensor: Tensor) -> str:
    batch, heads, _, depth = tensor.shape
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{batch} sequences, {heads} heads and {depth} channels in {dtype} on {tensor.device}"


def remaining(tokens_to_remove: int) -> int:
    """Return n for the argument -n of `crop`, which removes n tokens.

    A positive argument raises a ValueError.
    """
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop was given {tokens_to_remove}; a negative number is needed: how many tokens to "
            "remove."
        )
    return -tokens_to_remove


Place: TypeAlias = tuple[object, str]
"""The owner of a tensor, and the attribute's name."""


class InPlace(CacheLayerMixin):
    """The base class of a KVCache's layers, whose tensors are changed in place and never move."""

    is_compileable = True
    is_sliding = False
    max_cache_len: int
    is_empty: bool
    buffers: tuple[str, str]
    """Names of tensors like keys and values: (batch, heads, some tokens, depth)."""
    held: Sequence[str]
    """Names of its tensors that have an element per sequence."""
    long: Sequence[str] = ()
    """Names of its tensors whose third size grows with the cache; the first tensor's is its
    length.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens to the layer, and return the keys and values to which attention applies.

        If the layer was empty, return the given keys and values themselves. Otherwise return the
        keys and values of the layer's old and new tokens."""
        new = key_states, value_states
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new):
            refuse(
                "keys and values require gradients, and a cache has no backward. Generate under "
                "torch.no_grad(), or train with use_cache=False."
            )
        self.require_like(*new)
        if not self.is_initialized:
            self.lazy_initialization(*new)
        was_empty = self.is_empty
        self._write(*new)
        self.is_empty = False
        return new if was_empty else self._whole(*new)

    @property
    def room(self) -> int:
        """Return the largest number of tokens that fit into the layer (`max_cache_len`).

        If a buffer has one entry per token, this number comes from the buffer's shape. Compiled
        code then accepts caches of any length.
        """
        if self.long and self.is_initialized:
            return getattr(self, self.long[0]).shape[2]  # type: ignore[no-any-return]
        return self.max_cache_len

    def lengthy(self) -> list[Tensor]:
        """Return the tensors whose third dimension depends on the length of the cache."""
        return [getattr(self, name) for name in self.long]

    @abstractmethod
    def _write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write the keys and values of new tokens; the caller has already checked that they fit."""

    @abstractmethod
    def _whole(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values, including the newly written ones."""

    def require_like(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise an error for tokens that do not match the cache, before any token is written.

        The new tokens alone must fit into an empty layer, unless it has a sliding window. Their
        sizes (except the number of tokens), dtype and device must be those of the stored tokens.
        """
        new = key_states.shape[2]
        if not self.is_sliding and new > self.room:
            refuse(
                f"{new} tokens were given to a cache of max_cache_len={self.max_cache_len}. Make a "
                "longer one."
            )
        if not self.is_initialized:
            return
        given = (key_states, value_states)
        for what, name, tensor in zip(("keys", "values"), self.buffers, given, strict=True):
            held = getattr(self, name)
            if _kind(tensor) != _kind(held):
                refuse(
                    f"{what} of {_in_words(tensor)} were given to a cache of {_in_words(held)}. "
                    "reset() keeps its tensors; make a new cache for another batch or model."
                )

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield each tensor of this layer whose first dimension is the batch.

        Before the tensors are allocated, yield no tensor. The `Place` before each tensor contains
        the tensor's owner and name."""
        if self.is_initialized:
            for name in self.held:
                yield (self, name), getattr(self, name)

    @property
    def nbytes(self) -> int:
        """Return the bytes of this layer's tensors, without tensors that it shares with other
        layers."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def keeps(self, remove: int) -> str | None:
        """Return the reason why the last `remove` tokens cannot be removed, or None.

        A layer of this class can remove any number of tokens.
        """
        return None

    @abstractmethod
    def remove_last(self, remove: int) -> None:
        """Remove the last tokens; call this only if `keeps` has returned None, which means that the
        layer can remove them."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last n tokens if the argument is -n, as in transformers.

        A positive argument raises a ValueError."""
        remove = remaining(tokens_to_remove)
        why = self.keeps(remove)
        if why is not None:
            refuse(why)
        self.remove_last(remove)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the attention mask covers, and the position of the first
        of these keys."""
        return (query_length if self.is_empty else self.room), 0

    def get_max_length(self) -> int:
        """Return the largest number of tokens that fit into this layer."""
        return self.max_cache_len

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the sequences into another order, as beam search needs."""
        for _, tensor in self.tensors():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def offload(self) -> None:
        """Raise an error, because the tensors of this layer must keep their addresses."""
        refuse("offloading is not supported; the cache is small because it is coded.")

    prefetch = offload


class AsTheyCome(InPlace, StaticLayer):
    """A layer that stores keys and values unchanged, each in their own dtype.

    Under autocast these dtypes differ, because the rotary embedding returns keys in fp32, and
    values have 16 bits.
    """

    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tensors for keys and values, with the shape and dtype of the given keys and
        values.
        """
        super().lazy_initialization(key_states, value_states)
        if self.values.dtype != value_states.dtype:  # transformers before 5.24: that of the keys
            self.values = self.values.to(value_states.dtype)
            compat.keep_address(self.values)


class ExactLayer(AsTheyCome):
    """A layer without a sliding window that stores all tokens exactly."""

    is_croppable = True
    buffers = held = long = "keys", "values"

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.is_empty = True

    def require_like(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise an error for tokens that do not match the cache, or do not fit after its tokens.

        For a cache on a GPU, and in compiled graphs, the CPU does not know the cache's number of
        tokens. Then the method does not check whether new tokens fit after the cache's tokens. The
        method still checks whether the new tokens alone would fit into an empty cache.
        """
        super().require_like(key_states, value_states)
        if self.is_empty or key_states.device.type != "cpu" or torch.compiler.is_compiling():
            return
        length, new = int(self.cumulative_length), key_states.shape[2]
        if length + new > self.max_cache_len:
            refuse(
                f"{length} tokens and {new} more were given to a cache of "
                f"max_cache_len={self.max_cache_len}. Make a longer one."
            )

    def _write(self, key_states: Tensor, value_states: Tensor) -> None:
        StaticLayer.update(self, key_states, value_states)

    def _whole(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def get_seq_length(self) -> Any:  # noqa: ANN401 - a number, or a tensor once there are tokens
        """Return the number of tokens in the cache."""
        return 0 if self.is_empty else self.cumulative_length

    def remove_last(self, remove: int) -> None:
        if remove == 0 or self.is_empty:
            return
        left = max(0, int(self.cumulative_length) - remove)
        self.keys[:, :, left:].zero_()
        self.values[:, :, left:].zero_()
        self.cumulative_length.fill_(left)
        self.is_empty = left == 0

    def reset(self) -> None:
        """Empty the layer; its tensors keep their memory."""
        super().reset()
        self.is_empty = True


class WindowLayer(AsTheyCome):
    """A sliding-window layer with memory for slightly more tokens than the window.

    New tokens are written after the existing ones. When new tokens do not fit, the layer copies the
    tokens of the window to the front of the memory. With more memory, this copy happens less often.
    The attention mask hides tokens outside of the window. The layer counts its tokens twice: on the
    CPU, for masks, and on the device, for write positions. If all `max_cache_len` tokens of a cache
    fit into the layer's memory, no token ever leaves the layer.
    """

    buffers = held = long = "keys", "values"
    is_sliding = True
    passing: tuple[Tensor, Tensor] | None = None  # keys and values of more than there is room for

    def __init__(self, window: int, max_cache_len: int) -> None:
        super().__init__(max_cache_len=min(room_of(window), max_cache_len))
        self.window = window
        # Tokens that have left the window do not come back.
        self.is_croppable = self.holds_all = max_cache_len <= room_of(window)
        self._start()

    def _start(self) -> None:
        self.is_empty = True
        # Tokens, and those that are still here: counted from 2, as Dynamo compiles 0 and 1 apart.
        self.total = self.filled = _NONE

    @property
    def here(self) -> int:
        """Return the number of tokens that the layer still contains, of all tokens that were
        appended."""
        return min(self.filled - _NONE, self.max_cache_len)

    def _write(self, key_states: Tensor, value_states: Tensor) -> None:
        room, new, length = self.room, key_states.shape[2], self.cumulative_length
        states = key_states, value_states
        if not torch.compiler.is_compiling():
            self.require_room(new)
        self.total += new
        if self.is_empty:  # the last ones, of a prompt of any length
            length.add_(new)
            places = torch.arange(room, device=self.device) + (length - room).clamp(min=0)
            places = places.clamp(max=new - 1)
            self._fill(*(state.index_select(2, places) for state in states))
            length.clamp_(max=room)
            self.filled += new  # more than there is room for: the next step moves the window
            return
        self.make_room(new)
        if self.filled + new > room + _NONE:
            older = self._latest(self.kept)
            keys, values = (torch.cat(pair, 2) for pair in zip(older, states, strict=True))
            self.passing, self.filled = (keys, values), room + _NONE
            self._fill(keys[:, :, -room:], values[:, :, -room:])
            length.fill_(room)
            return
        self.filled += new
        StaticLayer.update(self, *states)

    def _fill(self, keys: Tensor, values: Tensor) -> None:
        """Overwrite all positions of the layer's memory with keys and values, by `index_copy_`.

        `ExactLayer`, a layer without a sliding window that stores all tokens exactly, also writes
        by `index_copy_`. With `copy_` instead, the prompt's keys and values of all layers would
        stay in memory together. The peak of the GPU's memory would then be higher.
        """
        everywhere = torch.arange(self.room, device=self.device)
        self.keys.index_copy_(2, everywhere, keys)
        self.values.index_copy_(2, everywhere, values)

    @property
    def kept(self) -> int:
        """Return how many tokens remain when the sliding window's tokens are copied to the front of
        the layer's memory.

        The remaining tokens are those to which the next token attends.
        """
        return min(self.filled - _NONE, self.window - 1)

    def _latest(self, kept: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(kept, device=self.device) + (self.cumulative_length - kept)
        return self.keys.index_select(2, places), self.values.index_select(2, places)

    def make_room(self, new: int) -> None:
        """Copy the sliding window's tokens to the front of the layer's memory if `new` more tokens
        do not fit after the existing ones.

        This method runs before the compiled decoding step, so that the step only appends tokens.
        One compiled version of the step then works whether the memory is full or not.
        """
        if self.is_empty or self.filled + new <= self.room + _NONE or self.kept + new > self.room:
            return
        kept = self.kept
        keys, values = self._latest(kept)
        self.keys[:, :, :kept].copy_(keys)
        self.values[:, :, :kept].copy_(values)
        self.cumulative_length.fill_(kept)
        self.filled = kept + _NONE

    def require_room(self, new: int) -> None:
        """Raise an error if `new` more tokens do not fit into a layer that drops no tokens.

        A sliding-window layer drops no tokens if its memory holds the cache's `max_cache_len`
        tokens."""
        there = self.total - _NONE
        if self.holds_all and there + new > self.max_cache_len:
            counted = f"{there} tokens and {new} more" if there else f"{new} tokens"
            refuse(
                f"{counted} were given to a cache of max_cache_len={self.max_cache_len}. Make a "
                "longer one."
            )

    def _whole(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.passing is None:
            return self.keys, self.values
        found, self.passing = self.passing, None
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the attention mask of the next tokens covers, and the
        position of the first of these keys."""
        if self.is_empty:
            return query_length, 0
        if self.filled + query_length <= self.room + _NONE:
            return self.room, self.total - self.filled
        return max(self.kept + query_length, self.room), self.total - _NONE - self.kept

    def get_seq_length(self) -> int:
        """Return the number of tokens that were ever appended to the cache."""
        return self.total - _NONE

    def keeps(self, remove: int) -> str | None:
        """Return the reason why the last `remove` tokens cannot be removed, or None.

        After the removal, the sliding window would again contain earlier tokens. The tokens cannot
        be removed if the layer has already dropped such earlier tokens.
        """
        if self.total - _NONE == self.here or self.here - remove >= self.window - 1:
            return None
        return (
            f"crop was asked to remove {remove} tokens; a window of {self.window} can remove "
            f"{max(0, self.here - self.window + 1)}, because it has dropped the tokens before "
            "them. Call reset() on the cache and give it the tokens that stay. In assisted "
            "decoding, draft fewer tokens (num_assistant_tokens)."
        )

    def remove_last(self, remove: int) -> None:
        left = max(0, self.here - remove)
        self.total -= self.here - left
        self.filled = left + _NONE
        self.cumulative_length.fill_(left)
        self.is_empty = self.total == _NONE

    def reset(self) -> None:
        """Empty the layer; its tensors keep their memory."""
        super().reset()
        self._start()


_NONE = 2


def room_of(window: int) -> int:
    """Return how many tokens fit into a layer with a sliding window of a given size.

    The number is a sixteenth more than the window, and at least 16 more."""
    return window + max(16, window // 16)


class CodedLayer(InPlace):
    """A cache layer that stores the keys and values of older tokens as low-bit codes."""

    buffers = "k_window", "v_window"
    held: Sequence[str] = op_folder.POOL[:8]
    long: Sequence[str] = ("span", *op_folder.POOL[:4])
    is_croppable = False  # only tokens that are not yet in codes can be removed
    settled = "in codes"
    counts: Tensor
    k_window: Tensor
    v_window: Tensor
    norms: Tensor | None = None  # lengths of keys and values, if only directions are coded

    def __init__(self, max_cache_len: int, settings: dict[str, Any], starts: Starts) -> None:
        CacheLayerMixin.__init__(self)
        self.max_cache_len = max_cache_len
        self.settings = settings  # of `Layout`, without the depth, which the first keys tell
        self.starts = starts
        self.is_empty = True
        self.layout: op_folder.Layout | None = None  # its tensors, once their shapes are known

    def pool(self) -> list[Tensor]:
        """Return the layer's tensors in the order in which the ops on a cache take them as
        arguments.

        The ops append tokens to the cache, decode the cache, or attend to the cache.
        """
        return [*(getattr(self, name) for name in self.held), self.starts.places, self.counts]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tensors for keys and values.

        Raise an error if keys or values with the shape and dtype of the given ones cannot be
        encoded.
        """
        batch, heads, _, depth = key_states.shape
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
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.layout = batch, op_folder.Layout(depth, **self.settings)
        self._allocate(self.layout, batch, heads)
        self.is_initialized = True

    def _allocate(self, layout: op_folder.Layout, batch: int, heads: int) -> None:
        shapes = layout.shapes(batch, heads, self.max_cache_len)
        self.starts.allocate(shapes.pop("places"), self.max_cache_len, self.device)
        self.span = self.starts.span
        self._make(self, shapes)

    def _make(self, owner: object, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            dtype = op_folder.dtype_of(name, self.dtype, self.settings["bits"])
            tensor = torch.zeros(shape, dtype=dtype, device=self.device)
            compat.keep_address(tensor)
            setattr(owner, name, tensor)

    def _write(self, key_states: Tensor, value_states: Tensor) -> None:
        how = (self.settings["bits"], self.settings["recent"], self.room)
        op_folder.coded_kv_cache_append(*self.pool(), key_states, value_states, *how)

    def _whole(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        return self._view()

    def maps(self) -> tuple[Tensor, ...]:
        """Return the tensors, such as rotations, that make two layers' keys or values similar.

        Two such layers are merged: they share directions (unit vectors) of keys or values. The
        tensors are the last arguments of the ops that decode the cache or attend to the cache. The
        result is empty if the layer has no such tensors.
        """
        return ()

    def _view(self) -> tuple[Tensor, Tensor]:
        how = (self.settings["bits"], self.room)
        found = op_folder.coded_kv_cache_view(*self.pool(), *self._lengths(), *how, *self.maps())
        keys, values = found
        return keys, values

    def _lengths(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the numbers by which decoded keys and values are multiplied, (B, H, N), or None if
        the layer has no such numbers."""
        return (None, None) if self.norms is None else (self.norms[..., 0], self.norms[..., 1])

    def get_seq_length(self) -> Any:  # noqa: ANN401 - a number, or a tensor once there are tokens
        """Return the number of tokens in the cache."""
        return 0 if self.is_empty else self.counts[op_folder.LENGTH]

    def keeps(self, remove: int) -> str | None:
        """Return the reason why the last `remove` tokens cannot be removed, or None.

        A token cannot be removed after its keys and values are quantised to low-bit codes. Nor can
        a token be removed after its keys or values are merged with those of another layer. Merged
        layers share directions (unit vectors) of keys or values, to save memory.
        """
        if remove == 0 or self.is_empty:
            return None
        length, coded = int(self.counts[op_folder.LENGTH]), int(self.counts[op_folder.CODED])
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
        if remove == 0 or self.is_empty:
            return
        self.counts[op_folder.LENGTH] -= remove
        self.is_empty = int(self.counts[op_folder.LENGTH]) == 0

    def reset(self) -> None:
        """Empty the layer; its tensors keep their memory."""
        self.is_empty = True
        if self.is_initialized:
            self.counts.zero_()
            self.k_window.zero_()
            self.v_window.zero_()


class Starts:
    """The position at which each sequence starts (after its padding), and the positions of its
    first `keep_first` tokens, which stay unquantised. All layers of a cache share one `Starts`."""

    def __init__(self, attention_mask: Tensor | None) -> None:
        self.places: Tensor
        self.span: Tensor  # no elements: (0, 0, tokens that a layer can hold)
        self._shape: tuple[int, ...] = ()
        if attention_mask is not None and attention_mask.dim() != 2:
            refuse(
                f"attention_mask has {attention_mask.dim()} dimensions; (batch, tokens) with 1 for "
                "a token and 0 for padding is needed."
            )
        self.first = None if attention_mask is None else (attention_mask.cumsum(1) == 0).sum(1)

    def restart(self, attention_mask: Tensor | None, held: set[int]) -> None:
        """Store the start positions of new sequences in the existing tensors; if the method raises
        an error, it has changed no tensor.

        `held` contains the batch sizes of the layers' tensors.
        """
        other = Starts(attention_mask)
        for sequences in held:
            other.first_tokens(sequences, torch.device("cpu"))
        self.first = other.first
        if self._shape:
            self.places.copy_(self._counted(self._shape, self.places.device))

    def allocate(self, shape: tuple[int, ...], tokens: int, device: torch.device) -> None:
        """Allocate the tensor with the positions of each sequence's first `keep_first` tokens.

        These first tokens stay unquantised. `shape` is the shape of this tensor. If the tensor
        already exists with this shape, the method does nothing. If it exists with another shape,
        the method raises an error. `tokens` is the number of tokens that a layer can hold. The
        method also creates `span`, a tensor without elements whose shape, (0, 0, `tokens`),
        contains this number.
        """
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
        self.span = torch.empty(0, 0, tokens, device=device)

    def _counted(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return, for each sequence, the positions of its first `keep_first` tokens, which stay
        unquantised."""
        order = torch.arange(shape[2], dtype=torch.int32, device=device)
        return (order + self.first_tokens(shape[0], device)[:, None, None]).expand(shape).clone()

    def first_tokens(self, sequences: int, device: torch.device) -> Tensor:
        """Return the index in the cache of each sequence's first token after the padding, int32.

        Without padding on the left, the index is 0."""
        if self.first is None:
            return torch.zeros(sequences, dtype=torch.int32, device=device)
        batch = self.first.shape[0]
        if batch == 0 or sequences % batch:
            refuse(
                f"attention_mask has {batch} rows and the keys {sequences}; a row per sequence, "
                "or per sequence before beams, is needed."
            )
        return self.first.to(device, torch.int32).repeat_interleave(sequences // batch)

    def change(self, function: Callable[[Tensor], Tensor], *, in_place: bool) -> None:
        """Apply `function`, which reorders, repeats or selects sequences, to the positions of each
        sequence's first tokens.

        The tensor `places` contains the positions of the first `keep_first` tokens. The first
        dimension of this tensor is the batch, with one index per sequence."""
        if not self._shape:
            return
        changed = function(self.places)
        if in_place:
            self.places.copy_(changed)
        else:
            compat.keep_address(changed)
            self.places, self._shape = changed, tuple(changed.shape)


def layers_of(config: Any, max_cache_len: int, full: Callable[[], Any]) -> Iterator[Any]:  # noqa: ANN401
    """Yield a cache layer of the right class for each layer of the model."""
    config = config.get_text_config(decoder=True)
    types, settings = get_layer_types_and_kwargs(config)
    if isinstance(settings, dict):  # transformers before 5.20 has one for all
        settings = [settings] * len(types)
    # With `assistant_early_exit`, transformers lowers the number of layers and keeps their types.
    layers = min(config.num_hidden_layers, len(types))
    for kind, given in zip(types[:layers], settings[:layers], strict=True):
        if kind == "full_attention":
            yield full()
        elif STATIC_LAYER_TYPE_MAPPING.get(kind) is StaticSlidingWindowLayer:
            yield WindowLayer(given["sliding_window"], max_cache_len)
        elif kind in STATIC_LAYER_TYPE_MAPPING:
            yield STATIC_LAYER_TYPE_MAPPING[kind](**{"max_cache_len": max_cache_len, **given})
        else:
            refuse(f"layers of the kind {kind!r} are not known; use transformers' own cache.")
