"""The layers of a KVCache that merge only values.

The two layers of a pair store common directions for their values, and each layer stores its own
keys. Keys of two layers differ more than values do, and an error in a key changes the attention
scores of all queries. So merging only values loses much less accuracy than merging keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor

from memeff_compile.kernels import coded_kv_cache as op_folder
from memeff_compile.model.cache.layers import Place
from memeff_compile.model.cache.merged_layers import MergedLayer, Pair


class ValuesPair(Pair):
    """The values that the two layers of a pair share.

    The pair also has those tokens of the lower layer that wait until the upper layer gets them."""

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield the shared tensors, once they exist, and the tensors (maps) that align the two
        layers' values.
        """
        if self.shape is not None:
            for name in (*op_folder.SHARED_VALUES, *op_folder.MAPS):
                yield (self, name), getattr(self, name)

    def shared(self) -> list[Tensor]:
        """Return the shared tensors in the order in which the cache ops take them as arguments."""
        return [getattr(self, name) for name in op_folder.SHARED_VALUES]

    def kept(self) -> dict[str, float]:
        """Return counts of unmerged tokens: zeros, because this cache merges all encoded tokens."""
        return {"kept": 0.0, "left_over": 0.0}

    def clear(self, starts: Tensor) -> None:
        """Remove the tokens that wait for the upper layer, and reset the tensors that align layers.

        The rotations and the pairing of the two layers' heads are copied from the report passed as
        `MiniCache(fidelity=...)`. Without a report, they become the identity. The layers' mean
        values, which are subtracted before the merge, become zero.
        """
        self.parked = None
        maps = self.maps()
        op_folder.identity(maps)
        if self.common is not None:
            turns, slots = self.common
            maps[2].copy_(turns[:, 1:])
            maps[3].copy_(slots)


class ValuesLayer(MergedLayer):
    """One of two layers that share the directions (unit vectors) of their older tokens' values."""

    held = tuple(name for name in op_folder.OWN_KEYS if name != "counts")
    long = "span", "k_codes", "k_scales"

    def own(self) -> list[Tensor]:
        """Return the tensors of this layer that the pair does not share, in the order in which the
        cache ops take them as arguments."""
        return [getattr(self, name) for name in op_folder.OWN_KEYS]

    def pool(self) -> list[Tensor]:
        """Return the layer's tensors in the order in which the ops that read the cache take them.

        One op converts the cache's codes back to keys and values, another computes attention."""
        return op_folder.pool_of_values([*self.pair.shared(), self.starts.places], self.own())

    def _lengths(self) -> tuple[Tensor | None, Tensor | None]:
        pair: Any = self.pair
        return None, pair.norms if self.is_upper else None

    def _allocate(self, layout: op_folder.Layout, batch: int, heads: int) -> None:
        """Allocate this layer's tensors; for the first layer of a pair, also allocate the shared
        tensors."""
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
        """Write new tokens. The upper layer of a pair then encodes both layers' keys, and merges
        both layers' values, for each complete group of tokens.

        The lower layer adds a single new token to its exact tokens. The lower layer keeps several
        new tokens aside until the upper layer gets the same tokens. The upper layer writes its own
        new tokens and those that the lower layer kept aside.
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
