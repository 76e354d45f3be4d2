"""What a gradient filter finds in given tensors: how much is computed, and what rows lose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .filters import DENSE_SHARE
from .op import linear_cross_entropy


class Activity(NamedTuple):
    """What one call of the op would leave out of its gradients."""

    active: float  # share of 128 x 128 tiles that are computed
    dropped: Tensor  # per row: sum of |p_j - 1(j = target)| over what is left out
    is_sparse: bool  # whether the sparse kernels run; else dense ones compute every tile


def measure(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    gradient_filter: str = "mass",
    filter_level: float = 0.0,
    ignore_index: int | None = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    sort_vocabulary: bool = False,
) -> Activity:
    """Run the op forward and say what its filter decided. Waits for the GPU.

    Arguments are those of the op. Where no filter runs (off CUDA, or in fp32), all is active.
    """
    with torch.no_grad():
        *_, dropped, active, _order = linear_cross_entropy(
            hidden,
            weight,
            bias,
            target,
            None,
            ignore_index=ignore_index,
            scale=scale,
            softcap=softcap,
            with_lse=False,
            with_logit_sum=False,
            gradient_filter=gradient_filter,
            workspace=0,
            filter_level=filter_level,
            sort_vocabulary=sort_vocabulary,
        )
    if active.numel() == 0:
        return Activity(1.0, hidden.new_zeros(target.shape, dtype=torch.float32), False)
    share = float(active.float().mean())
    return Activity(share, dropped, share < DENSE_SHARE)
