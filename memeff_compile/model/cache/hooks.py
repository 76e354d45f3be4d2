"""Hooks through which `memeff_compile.compile` makes a model's `generate()` use `KVCache`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memeff_compile import compat
from memeff_compile.errors import OptionError
from memeff_compile.model.cache.pool import forget_caches, is_cut_elsewhere
from memeff_compile.system import Hooks, Request, Undone


class CacheHooks(Hooks):
    """Hooks that make a model's `generate()` use this package's KV caches.

    The hooks also compile the model in place so that caches of any length use the same compiled
    graphs."""

    def wants(self, request: Request) -> bool:
        return request.kv_cache is not None

    def check(self, request: Request) -> None:
        _use_kv_cache(request)()  # undone at once, to refuse a bad request before weights change

    def compile(self, request: Request, given: Mapping[str, Any]) -> bool:
        from memeff_compile.model.cache.kv_cache import for_any_length

        _use_kv_cache(request)
        model = request.model
        assert isinstance(model, torch.nn.Module)
        if is_cut_elsewhere(model):
            # PyTorch fails if a DTensor's strides vary, such as those of a prompt's last token.
            given = {**given, "dynamic": False}
            compat.compile_in_place(model, {**given, **compat.room_for_graphs()})
            return True
        compat.compile_in_place(model, {**given, **compat.room_for_graphs()})
        compat.wrap_compiled(model, for_any_length)
        return True

    def undo(self, model: torch.nn.Module) -> Undone:
        if "transformers" not in sys.modules:
            return Undone()
        from memeff_compile.model.cache.kv_cache import own_caches_again
        from memeff_compile.model.low_bit_heads import full_heads_again

        caches, heads = own_caches_again(model), full_heads_again(model)
        what = ", ".join(filter(None, (caches.what, heads.what)))
        return Undone(what, {**caches.places, **heads.places})

    def forget(self) -> None:
        forget_caches()


def _use_kv_cache(request: Request) -> Callable[[], None]:
    """Let a model's generate() create this package's caches; return a function to undo this."""
    model, kv_cache = request.model, request.kv_cache
    if isinstance(kv_cache, str) and kv_cache != "static":
        raise OptionError(
            f"kv_cache is {kv_cache!r}; 'static', a number of bits, or a mapping of KVCache's "
            "settings is needed."
        )
    if not isinstance(model, torch.nn.Module):
        said = f"kv_cache is for models of transformers that generate, and this is {model!r}."
        raise OptionError(said)
    from memeff_compile.model.cache.kv_cache import KVCache, use_kv_cache_

    if isinstance(kv_cache, Mapping):
        taken = set(inspect.signature(KVCache).parameters) - {"config", "attention_mask"}
        for name in sorted(map(str, kv_cache.keys() - taken)):
            said = f"kv_cache has no setting {name!r}; it takes {', '.join(sorted(taken))}."
            raise OptionError(said)
    bits = 16 if kv_cache == "static" else kv_cache
    return use_kv_cache_(model, **(bits if isinstance(bits, Mapping) else {"bits": bits}))
