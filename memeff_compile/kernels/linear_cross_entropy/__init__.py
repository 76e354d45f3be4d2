"""Linear layer and cross entropy in one op, without ever forming the N x V logits.

Cut Cross-Entropy (arXiv 2411.09009, table 1) computes the loss of a language model's head from the
hidden states and the head's weight. This folder holds the op memeff::linear_cross_entropy, its
engines and the formula of the bytes it saves. Per row of the hidden states it returns

    nll        logsumexp(z) - z[target]
    lse        logsumexp(z), for a z-loss
    logit_sum  sum_j column_weight_j z_j, for label smoothing
    entropy    -sum_j p_j log p_j with p = softmax(z)
    top        the index of the largest z_j, the first of equals

with z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), all differentiable once but
the last. memeff::linear_cross_entropy_adapted has a low-rank product beside the head's.
Means, sums, class weights of the target and shifts stay outside, in ordinary ops on N numbers.
"""

from __future__ import annotations

from .adapted import linear_cross_entropy_adapted as linear_cross_entropy_adapted
from .adapted import (
    linear_cross_entropy_adapted_backward as linear_cross_entropy_adapted_backward,
)
from .adapted_total import (
    linear_cross_entropy_adapted_total as linear_cross_entropy_adapted_total,
)
from .adapted_total import (
    makes_gradients_in_forward_adapted as makes_gradients_in_forward_adapted,
)
from .memory import Pieces as Pieces
from .memory import bytes_after as bytes_after
from .memory import bytes_before as bytes_before
from .memory import piece_sizes as piece_sizes
from .op import ENGINES as ENGINES
from .op import engine_for as engine_for
from .op import linear_cross_entropy as linear_cross_entropy
from .op import linear_cross_entropy_backward as linear_cross_entropy_backward
from .op import supports as supports
from .selected import filter_level as filter_level
from .selected import leaves_out as leaves_out
from .shapes import is_minimal as is_minimal
from .sharded import Shard as Shard
from .sharded import Split as Split
from .sharded import layout as layout
from .sharded import linear_cross_entropy_merge as linear_cross_entropy_merge
from .sharded import linear_cross_entropy_over_ranks as linear_cross_entropy_over_ranks
from .sharded import linear_cross_entropy_shard as linear_cross_entropy_shard
from .sharded import part_of_rank as part_of_rank
from .sharded import split_of as split_of
from .sharded_total import (
    linear_cross_entropy_total_over_ranks as linear_cross_entropy_total_over_ranks,
)
from .sharded_total import linear_cross_entropy_total_shard as linear_cross_entropy_total_shard
from .sharded_total import (
    makes_gradients_in_forward_over_ranks as makes_gradients_in_forward_over_ranks,
)
from .sharded_total import rows_of_a_piece as rows_of_a_piece
from .total import TOTAL_BYTES_PER_ROW as TOTAL_BYTES_PER_ROW
from .total import linear_cross_entropy_total as linear_cross_entropy_total
from .total import makes_gradients_in_forward as makes_gradients_in_forward
from .total import total_bytes as total_bytes
from .total_hybrid import adapted_total_bytes as adapted_total_bytes
