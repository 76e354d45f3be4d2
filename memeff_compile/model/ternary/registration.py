"""Let transformers find the quantizer of packed ternary models."""

from __future__ import annotations

from memeff_compile.model.quantizers import load_with_quantizers

load_with_quantizers("memeff_compile.model.ternary.pretrained")
