"""The built-in passes, in the order in which they run on every graph that Dynamo captures."""

from __future__ import annotations

from collections.abc import Sequence

from .. import system
from .defer_logits import DeferLogits
from .expand_multihead import ExpandMultihead
from .fuse_divergence import FuseDivergence
from .fuse_embedding_gradient import FuseEmbeddingGradient
from .fuse_gated_linear import FuseGatedLinear
from .fuse_linear_cross_entropy import FuseLinearCrossEntropy
from .graph.base import GraphPass
from .keep_activations import KeepActivations
from .keep_rotary_tables import KeepRotaryTables
from .recover_attention import RecoverAttention
from .rewrite_kv_update import RewriteKVUpdate

CORE: tuple[GraphPass, ...] = (
    FuseDivergence(),  # a loss on class indices may read the same logits afterwards
    FuseLinearCrossEntropy(),  # logits returned together with a fused loss become deferred with it
    FuseEmbeddingGradient(),  # needs the pass above, whose op shows which head is tied
    FuseGatedLinear(),  # inside activation checkpoints only
    DeferLogits(),  # logits returned without a loss, for a loss outside the graph
    RewriteKVUpdate(),  # generation: no loss, no gradient
    ExpandMultihead(),  # it emits masks that the next pass reads
    RecoverAttention(),  # attention to a static cache is already rewritten
    KeepRotaryTables(),  # only for Inductor, which would compute the tables in each layer
    KeepActivations(),  # activation checkpoints, as the passes above leave them
)
"""The passes of the core. A system's pass follows the one that its `system.py` names."""

PASSES = system.in_order(CORE, lambda each: each.name, lambda each: system.load(each.source)())


def in_order(ours: Sequence[GraphPass], theirs: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """Return the order in which passes run.

    Each of the user's passes `theirs` comes before or after the built-in passes `ours`, as the
    user's pass requests."""
    before = [each for each in theirs if each.when == "before"]
    return (*before, *ours, *(each for each in theirs if each not in before))
