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
the last.
Means, sums, class weights of the target and shifts stay outside, in ordinary ops on N numbers.
"""

from __future__ import annotations

from memeff_compile.kernels.linear_cross_entropy.filters import filter_level as filter_level
from memeff_compile.kernels.linear_cross_entropy.memory import Pieces as Pieces
from memeff_compile.kernels.linear_cross_entropy.memory import bytes_after as bytes_after
from memeff_compile.kernels.linear_cross_entropy.memory import bytes_before as bytes_before
from memeff_compile.kernels.linear_cross_entropy.memory import piece_sizes as piece_sizes
from memeff_compile.kernels.linear_cross_entropy.op import ENGINES as ENGINES
from memeff_compile.kernels.linear_cross_entropy.op import engine_for as engine_for
from memeff_compile.kernels.linear_cross_entropy.op import (
    linear_cross_entropy as linear_cross_entropy,
)
from memeff_compile.kernels.linear_cross_entropy.op import (
    linear_cross_entropy_backward as linear_cross_entropy_backward,
)
from memeff_compile.kernels.linear_cross_entropy.op import supports as supports
from memeff_compile.kernels.linear_cross_entropy.shapes import is_minimal as is_minimal
from memeff_compile.kernels.linear_cross_entropy.total import (
    TOTAL_BYTES_PER_ROW as TOTAL_BYTES_PER_ROW,
)
from memeff_compile.kernels.linear_cross_entropy.total import (
    linear_cross_entropy_total as linear_cross_entropy_total,
)
from memeff_compile.kernels.linear_cross_entropy.total import (
    makes_gradients_in_forward as makes_gradients_in_forward,
)
from memeff_compile.kernels.linear_cross_entropy.total import total_bytes as total_bytes
