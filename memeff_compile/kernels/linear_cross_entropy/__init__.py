"""A linear layer and cross entropy in one op, which never builds the N x V logits.

As in Cut Cross-Entropy (arXiv 2411.09009, table 1), the op computes a language model's loss from
hidden states and the output projection's weight. This folder contains the op
memeff::linear_cross_entropy, its implementations, and the formulas for its memory. A row of the
hidden states is a token, with logits z and a label `target`. For each row, the op returns five
numbers:

- `nll`: logsumexp(z) - z[target];
- `lse`: logsumexp(z), for a z-loss;
- `logit_sum`: sum_j w_j z_j, for label smoothing, where w_j is the loss's weight of class j (the
  argument `column_weight`) or 1;
- `entropy`: -sum_j p_j log p_j with p = softmax(z);
- `top`: the index of the largest z_j, or the first of these indices if several z_j are largest.

The logits z of a row are softcap * tanh(u / softcap), or u without a softcap. Here, u is scale *
(hidden @ weight.T + low @ up.T + bias). All five results but `top` are differentiable once. The
arguments low (..., R) and up (V, R) are a low-rank term of the projection. For a LoRA adapter with
matrices A and B, low is h A^T times the adapter's scale, and up is B. Here, h is the hidden states.
The op never stores the whole N x V sum of hidden @ weight.T and low @ up.T in memory. Nor does the
op copy the projection's weight. PEFT keeps adapters in fp32, while the weight may have 16 bits. If
low and up are fp32 and the weight has 16 bits, the products with low and up are computed in fp32.
The gradients of low and up are then computed from unrounded fp32 gradients of the logits. Outside
of this op, ordinary PyTorch ops on N numbers (one per row) shift the labels, apply the targets'
class weights, and compute the losses' mean or sum.

The module `op` calls the module `walk`, which chooses the implementation. `walk` runs the
implementation in blocks of rows or of classes. There are three implementations:

- `reference` uses plain PyTorch;
- `library` uses PyTorch's matrix products and Triton kernels;
- `hopper` computes the matrix products in Triton kernels too, on Hopper GPUs.

The module `_head_loss.call` defines the arguments of a call, and `shapes` defines all block sizes.
The folder `_gradient_filter` contains the loops that skip classes with small gradients.
"""

from __future__ import annotations

from .._gradient_filter.levels import filter_level as filter_level
from .._gradient_filter.levels import leaves_out as leaves_out
from .._head_loss.ranks import Shard as Shard
from .._head_loss.ranks import Split as Split
from .._head_loss.ranks import layout as layout
from .._head_loss.ranks import part_of_rank as part_of_rank
from .._head_loss.ranks import split_of as split_of
from .._head_loss.scaling import scaled_gradients as scaled_gradients
from .memory import TOTAL_BYTES_PER_ROW as TOTAL_BYTES_PER_ROW
from .memory import Pieces as Pieces
from .memory import adapted_total_bytes as adapted_total_bytes
from .memory import bytes_after as bytes_after
from .memory import bytes_before as bytes_before
from .memory import piece_sizes as piece_sizes
from .memory import total_bytes as total_bytes
from .op import linear_cross_entropy as linear_cross_entropy
from .op import linear_cross_entropy_adapted as linear_cross_entropy_adapted
from .op import linear_cross_entropy_adapted_total as linear_cross_entropy_adapted_total
from .op import linear_cross_entropy_backward as linear_cross_entropy_backward
from .op import linear_cross_entropy_merge as linear_cross_entropy_merge
from .op import linear_cross_entropy_over_ranks as linear_cross_entropy_over_ranks
from .op import linear_cross_entropy_shard as linear_cross_entropy_shard
from .op import linear_cross_entropy_total as linear_cross_entropy_total
from .op import linear_cross_entropy_total_over_ranks as linear_cross_entropy_total_over_ranks
from .op import linear_cross_entropy_total_shard as linear_cross_entropy_total_shard
from .op import supports as supports
from .shapes import is_minimal as is_minimal
from .vocabulary_parallel import rows_of_a_block as rows_of_a_block
from .walk import ENGINES as ENGINES
from .walk import engine_for as engine_for
from .walk import makes_gradients_in_forward as makes_gradients_in_forward
from .walk import makes_gradients_in_forward_adapted as makes_gradients_in_forward_adapted
from .walk import makes_gradients_in_forward_over_ranks as makes_gradients_in_forward_over_ranks
