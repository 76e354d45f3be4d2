"""Every op of the package; importing this defines their schemas, so that graphs can name them."""

from __future__ import annotations

from .attention import op as _attention
from .coded_kv_cache import op as _coded_kv_cache
from .coded_weight import op as _coded_weight
from .embedding import op as _embedding
from .gated_linear import op as _gated_linear
from .kv_cache import op as _kv_cache
from .linear_cross_entropy import op as _linear_cross_entropy
from .quantized_attention import by_call as _attention_by_call
from .quantized_attention import op as _quantized_attention
from .ternary_linear import op as _ternary_linear

__all__: list[str] = []

del (
    _attention,
    _attention_by_call,
    _coded_kv_cache,
    _coded_weight,
    _embedding,
    _gated_linear,
    _kv_cache,
    _linear_cross_entropy,
    _quantized_attention,
    _ternary_linear,
)
