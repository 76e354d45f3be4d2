"""The compiler, in order: every graph Dynamo captures is shown to these passes, first to last."""

from __future__ import annotations

from collections.abc import Sequence

from .compress_kv_cache import CompressKVCache
from .defer_logits import DeferLogits
from .encode_weights import EncodeWeights
from .expand_multihead import ExpandMultihead
from .fuse_embedding_gradient import FuseEmbeddingGradient
from .fuse_gated_linear import FuseGatedLinear
from .fuse_linear_cross_entropy import FuseLinearCrossEntropy
from .graph.base import GraphPass
from .keep_activations import KeepActivations
from .keep_rotary_tables import KeepRotaryTables
from .quantize_attention import QuantizeAttention
from .recover_attention import RecoverAttention
from .rewrite_kv_update import RewriteKVUpdate
from .ternarize_linear import TernarizeLinear

PASSES: tuple[GraphPass, ...] = (
    FuseLinearCrossEntropy(),  # logits returned beside a fused loss become deferred with it
    FuseEmbeddingGradient(),  # behind it: a tied head is known by the op it became
    FuseGatedLinear(),  # inside activation checkpoints only; it reads linears, coded or not
    EncodeWeights(),  # behind it: what is left of linears with a compressed weight
    DeferLogits(),  # logits returned without a loss, for a loss outside the graph
    CompressKVCache(),  # generation with a cache of few bits: its ops say so
    RewriteKVUpdate(),  # generation: no loss, no gradient
    ExpandMultihead(),  # what it leaves of masks is the next pass's
    RecoverAttention(),  # what attends to a static cache is the pass before's
    QuantizeAttention(),  # what the pass before left, where a lossy form is asked for
    KeepRotaryTables(),  # for Inductor alone, which would compute them in each layer
    TernarizeLinear(),  # linears of models trained with ternary weights
    KeepActivations(),  # activation checkpoints, as they are behind all others
)


def in_order(ours: Sequence[GraphPass], theirs: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """Return our passes with a user's before and behind them."""
    before = [each for each in theirs if each.when == "before"]
    return (*before, *ours, *(each for each in theirs if each not in before))
