"""Reuse the KV caches of generate(), so that their tensors have the same addresses in every call.

The CUDA graph of a decoding step depends on the addresses of its cache, and compiled code depends
on the cache's sizes. So this module does three things:

- it rounds lengths up to a few sizes;
- it allocates tensors before the first prompt runs;
- it empties and reuses a cache that is no longer in use.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from memeff_compile import compat

KEPT = 2
"""Caches that are kept for one model."""

_SMALLEST = 256
Made = TypeVar("Made")


def bucket(tokens: int) -> int:
    """Return the length of a cache for a number of tokens: the number rounded up by at most an
    eighth, and at least 256."""
    step = max(_SMALLEST, (1 << (tokens - 1).bit_length() - 1) // 8) if tokens > 1 else _SMALLEST
    return -(-tokens // step) * step  # 12288 for 12096


@dataclass
class _Kept:
    kind: Hashable
    tokens: int
    cache: Any
    handed_out: weakref.ref[Any]
    was_searched: bool = False

    @property
    def is_free(self) -> bool:
        """Return whether no other code still uses the cache that `take` returned."""
        return self.handed_out() is None


class Pool:
    """The reusable caches of one model; a copy of the model starts without caches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        _pools.add(self)

    def clear(self) -> None:
        """Delete all reusable caches; a cache in use lives as long as code refers to it."""
        with self._lock:
            self._kept.clear()

    def take(
        self,
        kind: Hashable,  # key of caches that can replace each other
        tokens: range,  # the lengths that serve
        mask: Tensor | None,  # the attention mask of padded prompts
        make: Callable[[], Made],  # makes one, with the mask, for the first of these lengths
    ) -> Made:
        """Return an empty cache of the given kind: an earlier cache if no code uses it any more,
        otherwise a new one.
        """
        with self._lock:
            alike = [k for k in self._kept if k.kind == kind and k.tokens in tokens]
            for kept in alike:
                if not kept.is_free and not kept.was_searched:
                    gc.collect()  # Dynamo's notes about a call that it compiled are in cycles
                    kept.was_searched = True
                if kept.is_free:
                    cache: Any = copy.copy(kept.cache)  # another object over the same layers
                    cache.reset(mask)
                    kept.handed_out = weakref.ref(cache)
                    return cast("Made", cache)
            if len(self._kept) == KEPT:  # before another is allocated
                free = [kept for kept in self._kept if kept.is_free]
                self._kept.remove((free or self._kept)[0])
            made = make()
            self._kept.append(_Kept(kind, tokens.start, copy.copy(made), weakref.ref(made)))
            return made

    def __reduce__(self) -> Any:  # noqa: ANN401
        """Make pickling and copying create an empty pool."""
        return Pool, ()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def forget_caches() -> None:
    """Delete the unused caches that the pools of all models keep for later calls."""
    for pool in list(_pools):
        pool.clear()


def is_cut_elsewhere(model: Any) -> bool:  # noqa: ANN401
    """Return whether a model is split over processes by other code than transformers."""
    is_theirs = (getattr(model, "_tp_size", None) or 1) > 1
    return not is_theirs and any(map(compat.is_tensor_parallel, model.parameters()))


def head_shapes(model: Any) -> tuple[Any, Any] | None:  # noqa: ANN401
    """Return the number of key-value heads and the head dimension of the model's cache in this
    process.

    Return None if these numbers are unknown before the first keys arrive.
    """
    if is_cut_elsewhere(model):
        return None
    config = model.config.get_text_config(decoder=True)
    ask = getattr(model, "_get_static_cache_init_shape", None)
    if ask is not None:  # since transformers 5.2x
        found: tuple[Any, Any] | None = ask()
        is_one = getattr(config, "multi_query", False)  # Falcon's, which it does not read
        if found and is_one and not getattr(config, "new_decoder_architecture", False):
            return 1, found[1]
        return found
    heads, depth = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    keys = [m for name, m in model.named_modules() if name.endswith(".k_proj")]
    is_whole = getattr(model, "_tp_size", None) in (None, 1) and not hasattr(model, "hf_device_map")
    if not heads or not depth or not is_whole or len(keys) != config.num_hidden_layers:
        return None
    sizes = {getattr(each, "out_features", None) for each in keys}
    return (heads, depth) if sizes == {heads * depth} else None


def allocate(cache: Any, model: Any, sequences: int) -> None:  # noqa: ANN401
    """Allocate the tensors of a model's cache, if the tensors' sizes are known before the model's
    first call.
    """
    shapes = head_shapes(model)
    if shapes is None or torch.is_autocast_enabled(model.device.type):
        return
    cache.early_initialization(sequences, *shapes, model.dtype, model.device)
    for layer in cache.layers:  # the first graphs serve caches of other lengths, too
        for tensor in getattr(layer, "lengthy", list)():
            compat.mark_varying(tensor, 2)
