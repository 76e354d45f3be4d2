"""Attention over low-bit KV caches: kernels read the codes and never decode the whole cache.

Old tokens are stored as codes of 8, 4, 3 or 2 bits, in groups of tokens. The latest tokens and the
first few tokens are stored exactly. Attention multiplies the codes directly. Attention applies the
scales of the keys to the queries, and the scales of the values to the softmax weights.

- `coded_kv_cache_append` writes new tokens in place, and encodes the groups that are old enough.
- `coded_kv_cache_view` returns decoded keys and values, in the layout of a static cache.
- `coded_kv_cache_attention` attends with one query per sequence to all tokens of the cache.

Papers: KIVI, arXiv 2402.02750 (scales per channel for keys, per token for values); BitNet a4.8,
arXiv 2411.04965 (one scale per head, table 3).
"""

from __future__ import annotations

from .alignment import common as common
from .alignment import cosines as cosines
from .alignment import identity as identity
from .alignment import polar as polar
from .exact import Keeper as Keeper
from .exact import announce_exact as announce_exact
from .exact import keepers_of as keepers_of
from .heads import quantized_heads as quantized_heads
from .heads import require_bits as require_bits
from .layout import BITS as BITS
from .layout import CODED as CODED
from .layout import LENGTH as LENGTH
from .layout import PLAIN as PLAIN
from .layout import SCHEMES as SCHEMES
from .layout import Layout as Layout
from .layout import dtype_of as dtype_of
from .layout import group_of as group_of
from .layout import pool_of_values as pool_of_values
from .layout import value_bits_of as value_bits_of
from .memory import bytes_after as bytes_after
from .memory import bytes_of_token as bytes_of_token
from .memory import bytes_of_value_pair as bytes_of_value_pair
from .memory import bytes_per_token as bytes_per_token
from .memory import fixed_bytes as fixed_bytes
from .memory import map_bytes as map_bytes
from .memory import pair_bytes as pair_bytes
from .memory import value_pair_bytes as value_pair_bytes
from .merging import READINGS as READINGS
from .merging import RULES as RULES
from .merging import SCALES as SCALES
from .op import ENGINES as ENGINES
from .op import POOL as POOL
from .op import coded_kv_cache_append as coded_kv_cache_append
from .op import coded_kv_cache_attention as coded_kv_cache_attention
from .op import coded_kv_cache_view as coded_kv_cache_view
from .op import engine_for as engine_for
from .op import supports as supports
from .op import supports_append as supports_append
from .op import unproven as unproven
from .pair import MAPS as MAPS
from .pair import OWN as OWN
from .pair import SHARED as SHARED
from .pair import coded_kv_cache_append_lower as coded_kv_cache_append_lower
from .pair import coded_kv_cache_append_pair as coded_kv_cache_append_pair
from .pair import pool_of as pool_of
from .pair import shapes_of_maps as shapes_of_maps
from .pair import shapes_of_pair as shapes_of_pair
from .split_codes import plan_for as plan_for
from .value_pair import OWN_KEYS as OWN_KEYS
from .value_pair import SHARED_VALUES as SHARED_VALUES
from .value_pair import coded_kv_cache_append_values as coded_kv_cache_append_values
from .value_pair import shapes_of_values as shapes_of_values
