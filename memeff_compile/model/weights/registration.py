"""Let transformers find the quantizer of compressed weights."""

from __future__ import annotations

from memeff_compile.model.quantizers import load_with_quantizers

load_with_quantizers("memeff_compile.model.weights.pretrained")
