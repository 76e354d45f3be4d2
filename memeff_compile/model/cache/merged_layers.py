"""The layers of a KVCache that share directions, two and two.

The lower layer of a pair is read before the upper layer's keys and values exist. So a single token
goes into the lower layer's window at once, and the upper layer's append merges what is due of
both; of several tokens, the lower layer's wait for the upper's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from memeff_compile.kernels import coded_kv_cache as op_folder
from memeff_compile.model.cache.layers import CodedLayer, Starts, refuse, refuse_training
from memeff_compile.model.cache.minicache import MiniCache


class Pair:
    """What the two layers of a pair share, and the tokens of the lower one that wait."""

    def __init__(self, numbers: tuple[int, int], merge: MiniCache, keep_first: int) -> None:
        # numbers of the layers; first tokens of a sequence that stay as they come
        self.numbers, self.merge, self.keep_first = numbers, merge, keep_first
        self.shape: tuple[int, ...] | None = None
        # keys and values that the lower layer got and the upper layer will write
        self.parked: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is shared, once it is there."""
        if self.shape is not None:
            for name in op_folder.SHARED:
                yield name, getattr(self, name)

    def torn(self) -> str:
        """Return what to say where tokens still wait that a pass left behind."""
        lower, upper = self.numbers
        return (
            f"a forward pass ended between layers {lower} and {upper}, which are merged: layer "
            f"{lower} has tokens that layer {upper} never got. reset() the cache and give it all "
            "tokens again."
        )

    def clear(self, starts: Tensor) -> None:
        """Forget all tokens; `starts` is each sequence's first, (B, H)."""
        self.parked = None
        held: Any = self
        held.places.fill_(-1)
        held.starts.copy_(starts)
        held.bound.fill_(torch.nan)
        held.kept_count.zero_()
        held.left_over.zero_()


class MergedLayer(CodedLayer):
    """One of two neighbouring layers whose older tokens have one direction and two lengths."""

    norms: Tensor

    def __init__(
        self,
        max_cache_len: int,
        settings: dict[str, Any],
        starts: Starts,
        pair: Pair,  # what it shares with the other
        lower: MergedLayer | None = None,  # the earlier of the two, where this is the later
    ) -> None:
        super().__init__(max_cache_len, settings, starts)
        self.pair, self.lower = pair, lower
        self.is_upper = lower is not None
        self.settled = "merged" if settings["bits"] == op_folder.PLAIN else "in codes"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with an entry per sequence; what is shared comes with the lower."""
        if self.is_initialized:
            if not self.is_upper:
                yield from self.pair.tensors()
            for name in op_folder.OWN:
                if name != "counts":
                    yield name, getattr(self, name)

    def holder(self, name: str) -> object:
        """Return the pair, for what its two layers share."""
        return self.pair if name in op_folder.SHARED else self

    def own(self) -> list[Tensor]:
        """Return the tensors of this layer alone, in the order in which the ops take them."""
        return [getattr(self, name) for name in op_folder.OWN]

    def pool(self) -> list[Tensor]:
        """Return the tensors that the view and attention take."""
        return op_folder.pool_of([tensor for _, tensor in self.pair.tensors()], self.own())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys and values like these, and what is shared with the first of the two."""
        layout, batch, heads = self._laid_out(key_states, value_states)
        shared, own = op_folder.shapes_of_pair(layout, batch, heads, self.max_cache_len)
        shape = (batch, heads, layout.depth)
        if self.pair.shape is None:
            self._allocate(self.pair, shared)
            self.pair.shape = shape
            self.pair.clear(self._first_tokens(batch, heads))
        elif self.pair.shape != shape:
            first, second = self.pair.numbers
            refuse(
                f"layers {first} and {second} have keys of {self.pair.shape} and {shape} (batch, "
                "heads, depth); layers that are merged need the same. Set MiniCache(start_layer=) "
                "behind them."
            )
        self._allocate(self, own)
        self.is_initialized = True

    def _dtype_of(self, name: str) -> torch.dtype:
        return op_folder.dtype_of(name, self.dtype, self.settings["bits"])

    def _first_tokens(self, batch: int, heads: int) -> Tensor:
        first = self.starts.first_tokens(batch, self.device)
        return first[:, None].expand(batch, heads)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens; return them where they are all there is, else a dense view."""
        del args, kwargs
        refuse_training(key_states, value_states)
        if not self.is_upper and self.pair.parked is not None:
            refuse(self.pair.torn())
        self.require_like(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        was_empty, self.is_empty = self.is_empty, False
        new = (key_states, value_states)
        if self.is_upper:
            self._append_pair(*new, is_first=was_empty)
        elif key_states.shape[2] == 1:
            held = self.k_window, self.v_window, self.counts
            op_folder.coded_kv_cache_append_lower(*held, *new, self.max_cache_len)
        else:
            self.pair.parked = new
            return new if was_empty else self._overlaid(*new)
        return new if was_empty else self._view()

    def _append_pair(self, k: Tensor, v: Tensor, *, is_first: bool) -> None:
        """Write this layer's tokens, and the lower's that wait; merge what is due."""
        lower, recent = cast("MergedLayer", self.lower), self.settings["recent"]
        parked, self.pair.parked = self.pair.parked, None
        lower_k, lower_v = (None, None) if parked is None else parked
        merge, shared = self.pair.merge, (tensor for _, tensor in self.pair.tensors())
        new = (lower_k, lower_v, k, v)
        how = (self.settings["bits"], recent, self.max_cache_len, self.pair.keep_first)
        rule = (merge.rule, merge.t, merge.gamma, merge.reading, merge.scale, is_first)
        op_folder.coded_kv_cache_append_pair(*shared, *lower.own(), *self.own(), *new, *how, *rule)

    def _view(self) -> tuple[Tensor, Tensor]:
        norms = self.norms[..., 0], self.norms[..., 1]
        how = (self.settings["bits"], self.max_cache_len)
        keys, values = op_folder.coded_kv_cache_view(*self.pool(), *norms, *how)
        return keys, values

    def _overlaid(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return a dense view with tokens that are not yet written; no number where none fit."""
        length, new = self.counts[op_folder.LENGTH], k.shape[2]
        places = (length + torch.arange(new, device=k.device)).clamp(max=self.max_cache_len - 1)
        is_too_many = length + new > self.max_cache_len
        keys, values = (
            whole.index_copy(2, places, part.masked_fill(is_too_many, torch.nan))
            for whole, part in zip(self._view(), (k, v), strict=True)
        )
        return keys, values

    def keeps(self, remove: int) -> str | None:
        """Return why the last `remove` tokens cannot be removed, or None."""
        return super().keeps(remove) if self.pair.parked is None else self.pair.torn()

    def reset(self) -> None:
        """Empty the layer; its tensors stay."""
        super().reset()
        if self.is_initialized and not self.is_upper and self.pair.shape is not None:
            self.pair.clear(self._first_tokens(*self.k_window.shape[:2]))
