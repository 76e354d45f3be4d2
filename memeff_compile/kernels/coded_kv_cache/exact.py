"""Record which layers of a low-bit cache are stored exactly, not as codes, so that reports can name
these layers.

A compiled graph contains the cache's tensors but not its settings, so it does not show which layers
are exact. Therefore each cache registers in this module, and a pass asks this module whether an
input of its graph belongs to an exact layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class Keeper(Protocol):
    """A cache that stores some or all layers exactly, not as codes."""

    kept_exact: str
    """The layers that stay exact, in words."""
    has_codes: bool
    """Whether any layer is stored as codes."""

    def exact_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of those layers that the cache stores exactly, not as codes."""
        ...


_KEEPERS: weakref.WeakSet[Any] = weakref.WeakSet()


def announce_exact(keeper: Keeper) -> None:
    """Register a cache that stores keys and values of some or all layers exactly, not as codes.

    If a compiled graph reads a tensor of such a layer, the graph's report names the exact layers.
    """
    _KEEPERS.add(keeper)


def keepers_of(tensors: Iterable[Any]) -> list[Keeper]:
    """Return the caches in which an exactly stored layer has one of the given tensors.

    Only caches that `announce_exact` has registered are returned.
    """
    asked = {id(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
    return [k for k in list(_KEEPERS) if any(id(t) in asked for t in k.exact_tensors())]
