"""Declare the compiler pass, ops and hooks that ternary layers add to memeff_compile."""

from __future__ import annotations

from memeff_compile.system import PassFacts, System, SystemPass

SYSTEM = System(
    "ternary linears",
    passes=(
        SystemPass(
            PassFacts("ternarize_linear", "ternary", may_find_nothing=True),
            "passes.ternarize_linear:TernarizeLinear",
            after="keep_rotary_tables",
        ),
    ),
    ops=("kernels.ternary_linear.op",),
    hooks="model.ternary.hooks:TernaryHooks",
    on_import=("model.ternary.registration",),  # for from_pretrained, which reads a table alone
)
