"""What a gradient filter finds in given tensors: how much is computed, and what rows lose."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import on_device
from . import selected, total_fused
from .op import engine_for
from .pieces import spans
from .total_reference import Loss


class Activity(NamedTuple):
    """What engine T under a filter would leave out of its gradients."""

    active: float  # share of 128 x 128 tiles that count
    dropped: Tensor  # per row: sum of |p_j - 1(j = target)| over what is left out
    sparse: float  # share of pieces of rows of which not all tiles are computed


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
    """Run engine T without its products and say what its filter decided. Waits for the GPU.

    Arguments are those of the op. Where no filter runs (off CUDA, in fp32, where rows are short),
    all is active.
    """
    serves = hidden.dtype in total_fused.DTYPES and total_fused.serves(weight)
    depth, vocab = hidden.shape[-1], weight.shape[0]
    serves = serves and selected.leaves_out(gradient_filter, depth, vocab, 0)
    if engine_for(hidden.device, hidden.dtype, depth) != "fused" or not serves:
        return Activity(1.0, hidden.new_zeros(target.shape, dtype=torch.float32), 0.0)
    settings: dict[str, Any] = {"scale": scale, "softcap": softcap, "workspace": 0}
    settings |= {"gradient_filter": gradient_filter, "filter_level": filter_level}
    settings |= {"output_mask": (False,) * 3, "sort_vocabulary": sort_vocabulary}
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1)
    with on_device(hidden):
        walk = total_fused._Total(Loss(*flat, None, None, ignore_index, **settings))
        for index, (first, stop) in enumerate(spans(0, walk.rows, walk.height)):
            walk.piece(index, first, stop - first)
        return activity_of(walk, target)


def activity_of(walk: total_fused.Walk, target: Tensor) -> Activity:
    """Return what the filter of a walk decided, once it has seen every piece."""
    found = walk.filter
    assert found is not None
    assert walk.selection.kept is not None
    blocks = -(-int(walk.selection.kept) // found.tile)
    sparse = float(found.is_sparse[:, 0].float().mean())
    share = int(found.active[:, 0].sum()) / max(blocks * found.tiles, 1)
    return Activity(share, found.dropped.view(target.shape), sparse)
