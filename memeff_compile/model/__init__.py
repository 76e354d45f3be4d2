"""Functions that change whole models.

Some of these functions free tensors of the model, such as weights that they replace.
`torch.compile` must not free the user's tensors, so a user calls these functions explicitly. The
functions change a model, or create an object for it, such as a cache, and may run kernels. The
functions do not depend on graphs and passes, and passes do not depend on the functions.

Each function or class is imported only on first use. As soon as transformers loads its own
quantizers, this package's module `ternary.pretrained` is imported too. That import must not import
kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memeff_compile.model.low_bit_heads import use_low_bit_heads_ as use_low_bit_heads_
    from memeff_compile.model.ternary.layers import PackedTernaryLinear as PackedTernaryLinear
    from memeff_compile.model.ternary.layers import TernaryLinear as TernaryLinear
    from memeff_compile.model.ternary.rotation import (
        rotate_hidden_states_ as rotate_hidden_states_,
    )
    from memeff_compile.model.ternary.stages import TernaryStages as TernaryStages
    from memeff_compile.model.ternary.verbs import pack_ternary_ as pack_ternary_
    from memeff_compile.model.ternary.verbs import ternarize_ as ternarize_

_NAMES = {
    "low_bit_heads": "use_low_bit_heads_",
    "ternary.layers": "PackedTernaryLinear TernaryLinear",
    "ternary.rotation": "rotate_hidden_states_",
    "ternary.stages": "TernaryStages",
    "ternary.verbs": "pack_ternary_ ternarize_",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Import a name from the module that defines it, on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
