"""Counts the bytes that a piece of code allocates on the CPU, as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages that ops create and that are still alive, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.largest = 0

    def _alive(self) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
        return ((key, entry) for key, entry in self.live.items() if not entry[0].expired())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self.live = dict(self._alive())
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.is_meta:  # which has no memory
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self.live:
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, leaf.numel())
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result
