"""All ops of the package.

Importing this module defines the ops' schemas, so that graphs can contain them.
"""

from __future__ import annotations

from .. import system
from .attention import op as _attention
from .embedding import op as _embedding
from .gated_linear import op as _gated_linear
from .kv_cache import op as _kv_cache
from .linear_cross_entropy import op as _linear_cross_entropy
from .linear_divergence import op as _linear_divergence

__all__: list[str] = []

del (
    _attention,
    _embedding,
    _gated_linear,
    _kv_cache,
    _linear_cross_entropy,
    _linear_divergence,
)

for _each in system.systems():
    for _op in _each.ops:
        system.load(_op)
