"""Declare the compiler pass, ops and hooks that compressed weights add to memeff_compile."""

from __future__ import annotations

from memeff_compile.system import PassFacts, System, SystemPass

SYSTEM = System(
    "compressed weights",
    passes=(
        SystemPass(
            PassFacts("encode_weights", "weights", may_find_nothing=True),
            "passes.encode_weights:EncodeWeights",
            # it runs later than this pass, which also reads linears with compressed weights
            after="fuse_gated_linear",
        ),
    ),
    ops=("kernels.coded_weight.op",),
    hooks="model.weights.hooks:WeightHooks",
    on_import=("model.weights.registration",),  # for from_pretrained, which reads a table alone
)
