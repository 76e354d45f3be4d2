"""KV caches of a fixed length: written in place, and read only up to the last filled position.

A static cache is allocated for the longest sequence and filled token by token. Attention needs only
the filled positions, and needs to read each position only once for all query heads that share a
key-value head. PyTorch's attention, however, copies the keys and values of the whole cache once for
each query head that uses them. It then reads all of them under a mask, the unfilled positions as
well.

- `kv_cache_append` writes new keys and values at their positions, in place.
- `kv_cache_attention` attends to the keys up to a position that is stored in a tensor.
- `kv_cache_last` returns, for each query, the last position that a boolean mask lets it see.
"""

from __future__ import annotations

from .memory import bytes_after as bytes_after
from .memory import bytes_before as bytes_before
from .op import ENGINES as ENGINES
from .op import engine_for as engine_for
from .op import kv_cache_append as kv_cache_append
from .op import kv_cache_attention as kv_cache_attention
from .op import kv_cache_last as kv_cache_last
from .op import supports as supports
from .op import supports_append as supports_append
from .split_keys import plan_for as plan_for
