"""Declare the compiler pass and ops that low-bit attention adds to memeff_compile."""

from __future__ import annotations

from memeff_compile.system import PassFacts, System, SystemPass

SYSTEM = System(
    "low-bit attention",
    passes=(
        SystemPass(
            PassFacts("quantize_attention", "attention", ("exact", "off"), may_find_nothing=True),
            "passes.quantize_attention:QuantizeAttention",
            # attention that was recovered and left exact, where a lossy form is asked for
            after="recover_attention",
        ),
    ),
    ops=("kernels.quantized_attention.op", "kernels.quantized_attention.by_call"),
    attention_ops={
        "quantized_attention": ("q", "k"),
        "quantized_attention_by_call": ("q", "k"),
    },
    lossy_ops=("quantized_attention",),
)
