"""The compiler, in order: every graph Dynamo captures is shown to these passes, first to last."""

from __future__ import annotations

from .base import GraphPass
from .fuse_embedding_gradient import FuseEmbeddingGradient
from .fuse_linear_cross_entropy import FuseLinearCrossEntropy

PASSES: tuple[GraphPass, ...] = (
    FuseLinearCrossEntropy(),  # and with it: logits outputs become deferred (defer_logits)
    FuseEmbeddingGradient(),  # behind it: a tied head is known by the op it became
)
