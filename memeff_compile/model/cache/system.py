"""Register KV caches with the core of this package."""

from __future__ import annotations

from memeff_compile.system import PassFacts, System, SystemPass

SYSTEM = System(
    "KV caches",
    passes=(
        SystemPass(
            PassFacts("compress_kv_cache", "kv_codes", may_find_nothing=True),
            "passes.compress_kv_cache:CompressKVCache",
            # generation with a cache of few bits, which the ops in its graph tell
            after="defer_logits",
        ),
    ),
    ops=("kernels.coded_kv_cache.op",),
    hooks="model.cache.hooks:CacheHooks",
)
