"""The compiler, in order: every graph Dynamo captures is shown to these passes, first to last."""

from __future__ import annotations

from collections.abc import Sequence

from .. import system
from .defer_logits import DeferLogits
from .expand_multihead import ExpandMultihead
from .fuse_embedding_gradient import FuseEmbeddingGradient
from .fuse_gated_linear import FuseGatedLinear
from .fuse_linear_cross_entropy import FuseLinearCrossEntropy
from .graph.base import GraphPass
from .keep_activations import KeepActivations
from .keep_rotary_tables import KeepRotaryTables
from .recover_attention import RecoverAttention
from .rewrite_kv_update import RewriteKVUpdate

CORE: tuple[GraphPass, ...] = (
    FuseLinearCrossEntropy(),  # logits returned together with a fused loss become deferred with it
    FuseEmbeddingGradient(),  # needs the pass above: a tied head is known by the op it became
    FuseGatedLinear(),  # inside activation checkpoints only
    DeferLogits(),  # logits returned without a loss, for a loss outside the graph
    RewriteKVUpdate(),  # generation: no loss, no gradient
    ExpandMultihead(),  # it leaves masks that the next pass reads
    RecoverAttention(),  # attention to a static cache is already rewritten
    KeepRotaryTables(),  # for Inductor alone, which would compute them in each layer
    KeepActivations(),  # activation checkpoints, as the passes above leave them
)
"""The passes of the core. A system's pass follows the one that its `system.py` names."""

PASSES = system.in_order(CORE, lambda each: each.name, lambda each: system.load(each.source)())


def in_order(ours: Sequence[GraphPass], theirs: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """Return our passes with a user's before and after them."""
    before = [each for each in theirs if each.when == "before"]
    return (*before, *ours, *(each for each in theirs if each not in before))
