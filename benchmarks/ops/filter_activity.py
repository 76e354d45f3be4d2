"""The decisions of a gradient filter on given tensors: how much is computed, and the mass that rows
lose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from memeff_compile.kernels._gradient_filter.filtered import FilteredTotal
from memeff_compile.kernels._head_loss.call import ScalarLoss
from memeff_compile.kernels.device import on_device
from memeff_compile.kernels.linear_cross_entropy import engine_for, leaves_out

DTYPES = (torch.bfloat16,)


class Activity(NamedTuple):
    """The part of its gradients that `hopper` computes under a filter."""

    active: float  # share of 128 x 128 tiles that count
    dropped: Tensor  # per row: sum of |p_j - 1(j = target)| over the dropped elements


@torch.no_grad()
def measure(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int | None = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    gradient_filter: str = "mass",
    filter_level: float = 0.0,
    sort_vocabulary: bool = True,
) -> Activity:
    """Run `hopper` without its products and return its filter's decisions. Waits for the GPU.

    Arguments are those of the op. Where no filter runs (off CUDA, in fp32, where rows are short),
    all is active.
    """
    depth = hidden.shape[-1]
    serves = hidden.dtype in DTYPES and weight.is_contiguous()
    serves = serves and leaves_out(gradient_filter, depth)
    if engine_for(hidden.device, hidden.dtype, depth) != "hopper" or not serves:
        return Activity(1.0, hidden.new_zeros(target.shape, dtype=torch.float32))
    settings: dict[str, Any] = {"scale": scale, "softcap": softcap, "workspace": 0}
    settings |= {"gradient_filter": gradient_filter, "filter_level": filter_level}
    settings |= {"output_mask": (False,) * 3, "sort_vocabulary": sort_vocabulary}
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1)
    with on_device(hidden):
        total = FilteredTotal(ScalarLoss(*flat, None, None, ignore_index, **settings))
        for block in total.blocks():
            total.statistics(block)
            total.gradients(block)
        return activity_of(total, target)


def activity_of(walked: Any, target: Tensor) -> Activity:
    """Return the decisions of a walk's filter, after every block."""
    groups = -(-int(walked.selection.kept) // walked.shapes.rows)
    share = int(walked.active[:, 0].sum()) / max(groups * walked.tiles, 1)
    return Activity(share, walked.dropped.view(target.shape))
