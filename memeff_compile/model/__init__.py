"""Verbs on whole models: what `torch.compile` cannot do, as it must not free what the user owns.

A verb here changes a model, or makes an object for one, because the user called it by name. It may
use kernels; it knows nothing of graphs and passes, and passes know nothing of it.
"""

from __future__ import annotations

from memeff_compile.model.cache.low_bit_heads import use_low_bit_heads_ as use_low_bit_heads_
from memeff_compile.model.ternary.layers import PackedTernaryLinear as PackedTernaryLinear
from memeff_compile.model.ternary.layers import TernaryLinear as TernaryLinear
from memeff_compile.model.ternary.verbs import TernaryStages as TernaryStages
from memeff_compile.model.ternary.verbs import pack_ternary_ as pack_ternary_
from memeff_compile.model.ternary.verbs import ternarize_ as ternarize_
