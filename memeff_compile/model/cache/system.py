"""Declare the compiler pass, ops and hooks that KV caches add to memeff_compile."""

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
