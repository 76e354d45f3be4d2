"""KV caches of few bits, read as codes: the full cache is never rebuilt.

Old tokens are codes of 8, 4, 3 or 2 bits, in groups; the latest and the first few stay as they
came. Attention multiplies the codes as they are, with their scales folded into queries and weights.

    coded_kv_cache_append     writes new tokens in place, and codes the groups that are old enough
    coded_kv_cache_view       returns keys and values as a static cache would hold them
    coded_kv_cache_attention  attends with one query per sequence to everything in the cache

Papers: KIVI, arXiv 2402.02750 (keys per channel, values per token); BitNet a4.8, arXiv 2411.04965
(one scale per head, table 3).
"""

from __future__ import annotations

from memeff_compile.kernels.coded_kv_cache.layout import BITS as BITS
from memeff_compile.kernels.coded_kv_cache.layout import CODED as CODED
from memeff_compile.kernels.coded_kv_cache.layout import LENGTH as LENGTH
from memeff_compile.kernels.coded_kv_cache.layout import PLAIN as PLAIN
from memeff_compile.kernels.coded_kv_cache.layout import SCHEMES as SCHEMES
from memeff_compile.kernels.coded_kv_cache.layout import Layout as Layout
from memeff_compile.kernels.coded_kv_cache.layout import group_of as group_of
from memeff_compile.kernels.coded_kv_cache.memory import bytes_after as bytes_after
from memeff_compile.kernels.coded_kv_cache.memory import bytes_before as bytes_before
from memeff_compile.kernels.coded_kv_cache.memory import bytes_per_token as bytes_per_token
from memeff_compile.kernels.coded_kv_cache.memory import fixed_bytes as fixed_bytes
from memeff_compile.kernels.coded_kv_cache.memory import pair_bytes as pair_bytes
from memeff_compile.kernels.coded_kv_cache.memory import share_bytes as share_bytes
from memeff_compile.kernels.coded_kv_cache.memory import view_bytes as view_bytes
from memeff_compile.kernels.coded_kv_cache.merging import READINGS as READINGS
from memeff_compile.kernels.coded_kv_cache.merging import RULES as RULES
from memeff_compile.kernels.coded_kv_cache.merging import SCALES as SCALES
from memeff_compile.kernels.coded_kv_cache.op import ENGINES as ENGINES
from memeff_compile.kernels.coded_kv_cache.op import POOL as POOL
from memeff_compile.kernels.coded_kv_cache.op import coded_kv_cache_append as coded_kv_cache_append
from memeff_compile.kernels.coded_kv_cache.op import (
    coded_kv_cache_attention as coded_kv_cache_attention,
)
from memeff_compile.kernels.coded_kv_cache.op import coded_kv_cache_view as coded_kv_cache_view
from memeff_compile.kernels.coded_kv_cache.op import engine_for as engine_for
from memeff_compile.kernels.coded_kv_cache.op import supports as supports
from memeff_compile.kernels.coded_kv_cache.op import supports_append as supports_append
from memeff_compile.kernels.coded_kv_cache.op import unproven as unproven
from memeff_compile.kernels.coded_kv_cache.pair import OWN as OWN
from memeff_compile.kernels.coded_kv_cache.pair import SHARED as SHARED
from memeff_compile.kernels.coded_kv_cache.pair import (
    coded_kv_cache_append_lower as coded_kv_cache_append_lower,
)
from memeff_compile.kernels.coded_kv_cache.pair import (
    coded_kv_cache_append_pair as coded_kv_cache_append_pair,
)
from memeff_compile.kernels.coded_kv_cache.pair import dtype_of as dtype_of
from memeff_compile.kernels.coded_kv_cache.pair import pool_of as pool_of
from memeff_compile.kernels.coded_kv_cache.pair import shapes_of_pair as shapes_of_pair
from memeff_compile.kernels.coded_kv_cache.split_codes import plan_for as plan_for
