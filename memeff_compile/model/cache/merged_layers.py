"""The merged layers of a KVCache.

The two layers of a pair, the lower (earlier) and the upper one, are merged. Per token and head,
they store one common direction (unit vector) of their keys and one of their values. Each layer also
stores the lengths of its own keys and values. A group of `group` tokens is merged as soon as
at least `recent` later tokens exist (both are settings of `KVCache`).

In a forward pass, attention of a pair's lower layer runs before the upper layer's keys and values
exist. So the tokens wait in the lower layer:

- One appended token: the lower layer stores its key and value exactly. When the upper layer gets
  the same token, the upper layer merges every group that is now old enough.
- Several appended tokens: the lower layer keeps them aside until the upper layer's tokens arrive.

Other layers, with a sliding window, may run between the two layers of a pair. Such layers are not
part of this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from memeff_compile.kernels import coded_kv_cache as op_folder
from memeff_compile.model.cache.layers import CodedLayer, Place, Starts, refuse
from memeff_compile.model.cache.minicache import MiniCache
from memeff_compile.model.cache.rotary import angles_of


class Pair:
    """The state of two merged layers of a KV cache, which share directions (unit vectors).

    For each merged token and head, the two layers share one direction of their keys and one of
    their values. Each layer stores the lengths of its own keys and values. New keys and
    values of the lower (earlier) layer may wait in this state. They wait until the upper layer gets
    the same tokens. The upper layer then writes both layers' keys and values.
    """

    def __init__(
        self,
        numbers: tuple[int, int],
        merge: MiniCache,
        keep_first: int,
        config: Any = None,  # noqa: ANN401 - a config of transformers
    ) -> None:
        # numbers of the layers; first tokens of a sequence that stay as they come; and the model's
        # config, for the angles of the rotary embedding of keys
        self.numbers, self.merge, self.keep_first = numbers, merge, keep_first
        self.is_aligned = merge.align != "none"
        self.config = config
        self.angles: Tensor | None = None
        self.shape: tuple[int, ...] | None = None
        self.span: Tensor  # no elements: (0, 0, tokens that a layer can hold)
        # turns and slots from a report, (heads, 2, depth, depth) and (heads,), if there are any
        self.common = merge.common(numbers) if self.is_aligned else None
        # keys and values that the lower layer got and the upper layer will write
        self.parked: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield the tensors that two layers with merged keys and values share, once allocated.

        The tensors contain the layers' common directions (unit vectors) of keys and values. With
        `MiniCache(align="heads")`, the result includes the maps, tensors that make the two layers'
        keys and values similar before the merge.
        """
        if self.shape is not None:
            for name in (*op_folder.SHARED, *(op_folder.MAPS if self.is_aligned else ())):
                yield (self, name), getattr(self, name)

    def shared(self) -> list[Tensor]:
        """Return the tensors, such as directions (unit vectors), that two layers with merged keys
        and values share.

        The order is that of the arguments of the op that appends tokens to the cache. For each
        merged token and head, the tensors contain one direction of both layers' keys, and one of
        both layers' values."""
        return [getattr(self, name) for name in op_folder.SHARED]

    def maps(self) -> list[Tensor]:
        """Return the maps, tensors that make the two merged layers' keys and values similar.

        After the maps are applied, the two layers share directions (unit vectors) of keys and
        values. The order is that of the arguments of the op that appends tokens to the cache. The
        list is empty with `MiniCache(align="none")`, which merges layers without maps.
        """
        return [getattr(self, name) for name in (op_folder.MAPS if self.is_aligned else ())]

    def find_angles(self, depth: int, device: torch.device) -> None:
        """Compute the angles of the keys' rotary embedding, and store them in `self.angles`.

        Store None if the model's config does not determine the angles. Before two layers' keys are
        merged, rotation matrices make the keys similar. With known angles, these matrices are
        fitted as if each key also appeared at later positions."""
        found = None if self.config is None else angles_of(self.config, depth)
        self.angles = None if found is None else found.to(device)

    def torn(self) -> str:
        """Return the error message for a forward pass that ended between two layers with merged
        keys or values.

        The two layers share directions (unit vectors) of keys or values, so the two layers must
        have the same tokens. After an interrupted pass, the lower (earlier) layer has tokens that
        the upper one never got.
        """
        lower, upper = self.numbers
        return (
            f"a forward pass ended between layers {lower} and {upper}, which are merged: layer "
            f"{lower} has tokens that layer {upper} never got. reset() the cache and give it all "
            "tokens again."
        )

    def kept(self) -> dict[str, float]:
        """Return the mean numbers of unmerged tokens (`kept`) and of tokens merged for lack of
        memory (`left_over`).

        The means are over sequences and heads. When tokens leave the window (the memory for the
        latest tokens), two layers can merge these tokens' keys and values. The layers then share
        directions (unit vectors). `kept` is the number of tokens outside the window that stay
        unmerged. A sequence's first `keep_first` tokens always stay exact, and `kept` does not
        count them. `left_over` is the number of tokens that were merged only because they did not
        fit into the memory for unmerged tokens."""
        held: Any = self
        if self.shape is None:
            return {"kept": 0.0, "left_over": 0.0}
        return {name: float(getattr(held, of).float().mean()) for name, of in _KEPT.items()}

    def clear(self, starts: Tensor) -> None:
        """Remove all tokens from the state of two layers that share directions (unit vectors) of
        keys and values.

        With `MiniCache(align="heads")`, the state has maps, tensors that make the two layers' keys
        and values similar. The maps are reset to the identity. `MiniCache(fidelity=...)` may be a
        result of `fidelity_report` that has rotations and a pairing of heads for these layers. If
        so, both are then copied to the maps. `starts`, (B, H), contains the position of each
        sequence's first token.
        """
        self.parked = None
        held: Any = self
        held.places.fill_(-1)
        held.starts.copy_(starts)
        held.bound.fill_(torch.nan)
        held.kept_count.zero_()
        held.left_over.zero_()
        if self.is_aligned:
            op_folder.identity(self.maps())
            if self.common is not None:
                for name, given in zip(("turns", "slots"), self.common, strict=True):
                    getattr(self, name).copy_(given)


_KEPT = {"kept": "kept_count", "left_over": "left_over"}


class MergedLayer(CodedLayer):
    """One of two cache layers that share directions (unit vectors) of keys and values.

    For each merged token and head, one unit vector of the keys and one of the values are stored for
    both layers. Each layer stores the lengths of its own keys and values. The latest tokens
    (`KVCache(recent=...)` of them) are never merged."""

    held = tuple(name for name in op_folder.OWN if name != "counts")
    long: Sequence[str] = ("span", "norms", "k_kept", "v_kept")

    def __init__(
        self,
        max_cache_len: int,
        settings: dict[str, Any],
        starts: Starts,
        pair: Pair,  # the state that it shares with the other
        lower: MergedLayer | None = None,  # the earlier of the two, if this is the later
    ) -> None:
        super().__init__(max_cache_len, settings, starts)
        self.pair, self.lower = pair, lower
        self.is_upper = lower is not None
        self.settled = "merged" if settings["bits"] == op_folder.PLAIN else "in codes"

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield each tensor of this layer whose first dimension is the batch.

        The lower (earlier) of two merged layers also yields the tensors that the two share, such as
        directions (unit vectors) of keys or values. The `Place` before each tensor contains the
        tensor's owner and name."""
        if self.is_initialized and not self.is_upper:
            yield from self.pair.tensors()
        yield from super().tensors()

    def own(self) -> list[Tensor]:
        """Return the tensors that only this layer has.

        The order is that of the arguments of the op that appends tokens to the cache. The layer is
        merged with another layer: they share directions (unit vectors) of keys and values, in other
        tensors."""
        return [getattr(self, name) for name in op_folder.OWN]

    def pool(self) -> list[Tensor]:
        """Return the tensors of this layer's cache in the order in which decoding and attention ops
        take them.

        The decoding op converts the cache's codes back to keys and values. The layer is merged with
        another layer: they share some of the tensors, with directions (unit vectors) of keys and
        values."""
        return op_folder.pool_of(self.pair.shared(), self.own())

    def maps(self) -> tuple[Tensor, ...]:
        """Return this layer's maps, tensors that make two merged layers' keys or values similar.

        Merged layers share directions (unit vectors) of keys or values. The ops that read the cache
        take the maps. One op converts the cache's codes back to keys and values, another computes
        attention. The result is empty with `MiniCache(align="none")`, which merges layers without
        maps.
        """
        held = self.pair.maps()
        return tuple(held[1:] if self.is_upper else held[:1])

    def _allocate(self, layout: op_folder.Layout, batch: int, heads: int) -> None:
        """Allocate the tensors that only this layer has.

        The layer is merged with another layer: they share directions (unit vectors) of keys and
        values. The first of the two layers also allocates the tensors that they share."""
        shared, own = op_folder.shapes_of_pair(layout, batch, heads, self.max_cache_len)
        shape = (batch, heads, layout.depth)
        if self.pair.shape is None:
            if self.pair.is_aligned:
                shared |= op_folder.shapes_of_maps(layout, batch, heads)
                self._require_common(layout, heads)
                self.pair.find_angles(layout.depth, self.device)
            self._make(self.pair, shared)
            self.pair.span = torch.empty(0, 0, self.max_cache_len, device=self.device)
            self.pair.shape = shape
            self.pair.clear(self._first_tokens(batch, heads))
        else:
            self._require_alike(shape)
        self._make(self, own)
        self.span = self.pair.span

    def _require_alike(self, shape: tuple[int, ...]) -> None:
        """Raise an error if two layers that share unit vectors of keys or values have keys of
        different shapes.

        A shape is (batch, heads, depth).
        """
        if self.pair.shape != shape:
            first, second = self.pair.numbers
            refuse(
                f"layers {first} and {second} have keys of {self.pair.shape} and {shape} (batch, "
                "heads, depth); merged layers need equal shapes. Set MiniCache(start_layer=) to a "
                "later layer."
            )

    def _require_common(self, layout: op_folder.Layout, heads: int) -> None:
        """Raise an error if the rotation matrices that align two layers are not of the shape of
        this model's heads.

        The matrices turn the later layer's keys and values towards those of the earlier layer.
        Then the two layers share directions (unit vectors). The argument `fidelity` of `MiniCache`,
        a result of `fidelity_report`, may contain such matrices. Matrices that fit are moved to the
        device."""
        if self.pair.common is None:
            return
        turns, slots = self.pair.common
        wanted = (heads, 2, layout.depth, layout.depth)
        if tuple(turns.shape) != wanted:
            refuse(
                f"the fidelity report has turns of {tuple(turns.shape)} for layers "
                f"{self.pair.numbers}, and {wanted} are needed: it is of another model. Call "
                "fidelity_report on this one."
            )
        self.pair.common = turns.to(self.device), slots.to(self.device)

    def lengthy(self) -> list[Tensor]:
        """Return the tensors whose third dimension depends on the cache's length.

        Two merged layers share directions (unit vectors) of keys or values, but store some tokens
        unmerged. The memory for these tokens depends on the cache's length too."""
        shared = (tensor for tensor in self.pair.shared() if tensor.dim() > 2)
        return [*super().lengthy(), *shared]

    def _first_tokens(self, batch: int, heads: int) -> Tensor:
        first = self.starts.first_tokens(batch, self.device)
        return first[:, None].expand(batch, heads)

    def require_like(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise an error if new keys and values do not match the cache, for example in their dtype.

        This layer and another layer share directions (unit vectors) of keys or values. Also raise
        an error if the two layers have different tokens, as after an interrupted forward pass."""
        if not self.is_upper and self.pair.parked is not None:
            refuse(self.pair.torn())
        super().require_like(key_states, value_states)

    def _write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write the keys and values of new tokens, and merge two layers' older keys and values.

        Merged layers share directions (unit vectors) of keys and values. The lower (earlier) of two
        merged layers runs first. If a call brings one new token, the lower layer stores this
        token's key and value exactly. If a call brings several new tokens, the lower layer keeps
        them aside until the upper layer gets the same tokens. The upper layer writes its own new
        tokens and those that the lower layer kept aside. The upper layer then merges both layers'
        keys and values in groups. A group of `group` tokens is merged once `recent` later tokens
        exist (settings of `KVCache`)."""
        if not self.is_upper:
            self._write_lower(key_states, value_states)
            return
        lower, merge = cast("MergedLayer", self.lower), self.pair.merge
        waiting, self.pair.parked = self.pair.parked or (None, None), None
        new = (*waiting, key_states, value_states)
        shared, maps = self.pair.shared(), self.pair.maps()
        bits, recent = self.settings["bits"], self.settings["recent"]
        how = (bits, recent, self.room, self.pair.keep_first)
        rule = (merge.rule, merge.position(), merge.gamma, merge.reading, merge.scale)
        tensors = (*shared, *lower.own(), *self.own())
        if self.is_empty and self.pair.angles is not None:
            maps = [*maps, self.pair.angles]
        op_folder.coded_kv_cache_append_pair(*tensors, *new, *how, *rule, self.is_empty, *maps)

    def _write_lower(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write new tokens of the lower (earlier) of two layers that share unit vectors of keys or
        values.

        If the call brings one new token, its key and value are stored exactly. If the call brings
        several new tokens, these tokens wait in `pair.parked` until the upper layer gets them."""
        if key_states.shape[2] != 1:
            self.pair.parked = key_states, value_states
            return
        held = self.k_window, self.v_window, self.counts
        op_folder.coded_kv_cache_append_lower(*held, key_states, value_states, self.room)

    def _whole(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of this layer as plain tensors.

        This layer is one of two merged layers, which share directions (unit vectors) of keys or
        values. The lower (earlier) layer may keep new tokens aside until the upper layer gets the
        same tokens. The result includes the tokens that are kept aside. If the tokens that are kept
        aside do not fit into the cache, the result contains nan instead of their keys and values.
        """
        if self.pair.parked is None:
            return self._view()
        length, new = self.counts[op_folder.LENGTH], key_states.shape[2]
        device = key_states.device
        places = (length + torch.arange(new, device=device)).clamp(max=self.room - 1)
        is_too_many = length + new > self.room
        keys, values = (
            dense.index_copy(2, places, part.masked_fill(is_too_many, torch.nan))
            for dense, part in zip(self._view(), (key_states, value_states), strict=True)
        )
        return keys, values

    def keeps(self, remove: int) -> str | None:
        """Return the reason why the last `remove` tokens cannot be removed, or None."""
        return super().keeps(remove) if self.pair.parked is None else self.pair.torn()

    def remove_last(self, remove: int) -> None:
        super().remove_last(remove)
        if self.is_empty:
            self._forget()

    def reset(self) -> None:
        """Empty the layer; its tensors keep their memory."""
        super().reset()
        self._forget()

    def _forget(self) -> None:
        """Remove all tokens from the state of two layers that share directions (unit vectors).

        The two layers share directions of keys or values. With `MiniCache(align="heads")`, the
        state has maps, tensors that make the two layers' keys or values similar. The maps are then
        fitted again, to the next tokens that arrive."""
        if self.is_initialized and not self.is_upper and self.pair.shape is not None:
            self.pair.clear(self._first_tokens(*self.k_window.shape[:2]))
