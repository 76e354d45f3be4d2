"""The layers of a KVCache that merge only values.

Two merged layers store, per token and head, one common direction (unit vector) of their values.
Each layer has its own keys and its own lengths of values. Keys of two layers differ more than
values do, and an error in a key changes the attention scores of all queries. So merging only values
loses much less accuracy than merging keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor

from memeff_compile.kernels import coded_kv_cache as op_folder
from memeff_compile.model.cache.layers import Place
from memeff_compile.model.cache.merged_layers import MergedLayer, Pair


class ValuesPair(Pair):
    """The state of two layers that share the directions (unit vectors) of their values.

    New keys and values of the lower (earlier) layer may wait in this state. They wait until the
    upper layer gets the same tokens. The upper layer then writes both layers' keys and values.
    """

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield the tensors that two merged layers of a KV cache share, once these tensors exist.

        The tensors contain the layers' common directions (unit vectors) of values. The tensors
        include the maps, which make the two layers' values similar before the merge.
        """
        if self.shape is not None:
            for name in (*op_folder.SHARED_VALUES, *op_folder.MAPS):
                yield (self, name), getattr(self, name)

    def shared(self) -> list[Tensor]:
        """Return the tensors that two layers share because their values are merged.

        The order is that of the arguments of the op that appends tokens to the cache. The tensors
        contain the common directions (unit vectors) and the lengths of values."""
        return [getattr(self, name) for name in op_folder.SHARED_VALUES]

    def kept(self) -> dict[str, float]:
        """Return zero for `kept` (unmerged tokens), and for `left_over` (tokens merged for lack of
        memory).

        `left_over` is the number of tokens that were merged only because they did not fit into the
        memory for unmerged tokens. This object is the state of two merged layers, which share
        directions (unit vectors) of values. The numbers are zero because the layers merge the
        values of all tokens that are stored as low-bit codes."""
        return {"kept": 0.0, "left_over": 0.0}

    def clear(self, starts: Tensor) -> None:
        """Reset the state of two merged layers, which share directions (unit vectors) of values.

        New tokens wait in the lower (earlier) layer until the upper layer gets them. Tokens still
        wait if a forward pass ended between the two layers. This method removes these tokens, and
        resets the maps. The maps are tensors that make the two layers' values similar before the
        merge. The rotations of the upper layer's values and the pairing of the layers' heads are
        copied from the report passed as `MiniCache(fidelity=...)`. Without a report, they become
        the identity. The layers' mean values, which are subtracted before the merge, become zero.
        `starts` has no effect.
        """
        self.parked = None
        maps = self.maps()
        op_folder.identity(maps)
        if self.common is not None:
            turns, slots = self.common
            maps[2].copy_(turns[:, 1:])
            maps[3].copy_(slots)


class ValuesLayer(MergedLayer):
    """One of two cache layers that share the directions (unit vectors) of older tokens' values.

    For each merged token and head, one unit vector is stored for both layers. Each layer has its
    own keys. The latest tokens (`KVCache(recent=...)` of them) are never merged."""

    held = tuple(name for name in op_folder.OWN_KEYS if name != "counts")
    long = "span", "k_codes", "k_scales"

    def own(self) -> list[Tensor]:
        """Return the tensors that only this layer has.

        The order is that of the arguments of the op that appends tokens to the cache. For example,
        each layer has its own keys. The layer is merged with another layer: they share the codes of
        values' directions (unit vectors)."""
        return [getattr(self, name) for name in op_folder.OWN_KEYS]

    def pool(self) -> list[Tensor]:
        """Return the tensors of this layer's cache in the order in which decoding and attention ops
        take them.

        The decoding op converts the cache's codes back to keys and values. The layer is merged with
        another layer: they share some of the tensors, with directions (unit vectors) of values."""
        return op_folder.pool_of_values([*self.pair.shared(), self.starts.places], self.own())

    def _lengths(self) -> tuple[Tensor | None, Tensor | None]:
        pair: Any = self.pair
        return None, pair.norms if self.is_upper else None

    def _allocate(self, layout: op_folder.Layout, batch: int, heads: int) -> None:
        """Allocate the tensors that only this layer has.

        The layer is merged with another layer: they share directions (unit vectors) of values. The
        first of the two layers also allocates the tensors that they share."""
        shared, own = op_folder.shapes_of_values(layout, batch, heads, self.max_cache_len)
        places = (batch, heads, layout.kept)
        self.starts.allocate(places, self.max_cache_len, self.device)
        self.span = self.starts.span
        shape = (batch, heads, layout.depth)
        if self.pair.shape is None:
            self._require_common(layout, heads)
            self._make(self.pair, shared | op_folder.shapes_of_maps(layout, batch, heads, 1))
            self.pair.shape = shape
            self.pair.clear(self._first_tokens(batch, heads))
        else:
            self._require_alike(shape)
        self._make(self, own)

    def _write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write the keys and values of new tokens, and encode older keys and values.

        Two layers' older values are merged: the layers then share directions (unit vectors).

        The lower (earlier) of two merged layers runs first. If a call brings one new token, the
        lower layer stores this token's key and value exactly. If a call brings several new tokens,
        the lower layer keeps them aside until the upper layer gets the same tokens. The upper layer
        writes its own new tokens and those that the lower layer kept aside. The upper layer then
        encodes both layers' keys and merges their values in groups. A group of `group` tokens is
        merged once `recent` later tokens exist (settings of `KVCache`).
        """
        if not self.is_upper:
            self._write_lower(key_states, value_states)
            return
        lower, merge = cast("MergedLayer", self.lower), self.pair.merge
        waiting, self.pair.parked = self.pair.parked or (None, None), None
        tensors = (*self.pair.shared(), self.starts.places, *lower.own(), *self.own())
        new = (*waiting, key_states, value_states)
        how = (self.settings["bits"], self.settings["recent"], self.room)
        rule = (merge.rule, merge.position(), merge.scale, self.is_empty)
        op_folder.coded_kv_cache_append_values(*tensors, *self.pair.maps(), *new, *how, *rule)
