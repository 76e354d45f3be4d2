"""memeff::linear_cross_entropy_total_over_ranks: one number of a head that ranks hold in parts.

`linear_cross_entropy_total` makes gradients as soon as a row's softmax is known, in three products.
Of a head of which every rank holds some classes (`sharded.py`) no rank knows it alone. So all of
them walk over the same pieces of rows and meet once per piece: each has made its logits, tells the
others the two numbers of `ranks.py`, and makes its gradients with what comes of all.

    counts = all_gather(number of rows)
    total, *gradients = linear_cross_entropy_total_shard(h, W_r, None, y, ..., counts, rank=r, ...)
    total = linear_cross_entropy_total_agreed(total, all_gather(total))

A compiler does not see that the op in the middle gathers, and may move it past collectives that
have nothing to do with it, on each rank as its own sizes suggest. It keeps the order of those that
it sees: the two around it, one number each, hold it where it is. All ranks get the first one's
total.

What is gathered, and how often, follows from rows, the classes of all ranks, dtype, workspace and
the kind of device. Engines may differ from rank to rank, and nothing that does may enter here: what
a rank has of the classes, what its GPU is, what was measured on it.

The gradient of the hidden states is the part that the rank's own classes give, which ranks add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from .. import library
from ..checks import require
from ..device import DEFAULT_PROCESSORS, where_it_runs, without_autocast
from . import op as rows_op
from . import sharded, total, total_fused, total_reference
from .ranks import ELSEWHERE, IGNORED, Ranks
from .shapes import is_minimal, shapes_for_programs
from .sharded import Shard
from .total_reference import Loss


@compat.constant_in_traces
def makes_gradients_in_forward_over_ranks(
    device: torch.device,  # as for `makes_gradients_in_forward`
    dtype: torch.dtype,  # likewise
    depth: int,  # likewise
    *,
    gradient_filter: str = "exact",  # likewise
    filter_parts: str = "both",  # likewise
    workspace: int = 0,  # likewise
) -> bool:
    """Say the same of a head that ranks hold in parts, alike on all of them whatever GPUs they are.

    A filter's tiles would be chosen with the softmax of the whole head, which the walk that filters
    does not have.
    """
    if gradient_filter != "exact" or filter_parts != "both" or is_minimal(workspace):
        return False
    if where_it_runs(device).type == "cuda":
        return dtype in total_fused.DTYPES and depth % 8 == 0
    return dtype != torch.float16


def rows_of_a_piece(
    rows: int,  # at least one
    shard: Shard,
    *,
    dtype: torch.dtype,  # of the hidden states
    device: torch.device,  # of them, of which only the kind counts
    workspace: int = 0,  # as for the op
    has_softcap: bool = False,  # likewise
) -> int:
    """Return how many rows ranks meet about at a time: what every engine's pieces have."""
    kind = where_it_runs(device).type
    if kind == "cuda":
        # whole tiles of engine T, which has one size of them
        tile = shapes_for_programs(DEFAULT_PROCESSORS)
        return total_fused.piece_rows(rows, shard.chunk, workspace, tile.rows, tile.columns)
    per_logit = max(dtype.itemsize, 4) * (1 + has_softcap)
    return int(total_reference.rows_per_piece(rows, shard.chunk, per_logit, workspace, kind))


class _Call(NamedTuple):
    """What `linear_cross_entropy_total_shard` is called with."""

    loss: Loss  # targets are classes of the whole head
    counts: Tensor  # (P,) int64: how many rows each rank has
    shard: Shard
    group: str


def _called(
    *tensors: Any, group: str, rank: int, ranks: int, classes: int, **settings: Any
) -> _Call:
    *operands, counts = tensors
    call = _Call(Loss(*operands, **settings), counts, Shard(rank, ranks, classes), group)
    require("linear_cross_entropy", call.shard.fault(call.loss.weight.shape[0]))
    total.require_support(call.loss)
    return call


def _forward(given: _Call) -> tuple[Tensor, ...]:
    flat, shard = total.flattened(given.loss), given.shard
    gather, wait = compat.gathering_ops()
    with without_autocast(flat.hidden.device.type):
        sharded.check_counts(given.counts, flat.target.numel())
        rows_op.check_range(flat.target, shard.classes, flat.ignore_index)
        local = of_rank(flat, shard, lambda said: wait(gather(said, shard.ranks, given.group)))
        return total.results(total.compute(local), given.loss)


def of_rank(whole: Loss, shard: Shard, gather: Any) -> Loss:
    """Return a flat call as an engine of one rank takes it; `gather` is as of `Ranks`."""
    target, rows = whole.target, whole.target.numel()
    owner = (target.clamp(min=0) // shard.chunk).clamp(max=shard.ranks - 1)
    within = (target % shard.chunk).clamp(max=shard.columns - 1)
    local = torch.where(owner == shard.rank, target - shard.first, ELSEWHERE - within)
    if whole.ignore_index is not None:
        local = local.masked_fill(target == whole.ignore_index, IGNORED)
    height = rows_of_a_piece(
        max(rows, 1),
        shard,
        dtype=whole.hidden.dtype,
        device=whole.hidden.device,
        workspace=whole.workspace,
        has_softcap=whole.softcap > 0,
    )
    return whole._replace(
        target=local,
        ignore_index=None if whole.ignore_index is None else IGNORED,
        ranks=Ranks(shard.rank, shard.ranks, height, owner.to(torch.int32), gather),
    )


def _fake_forward(given: _Call) -> tuple[Tensor, ...]:
    return total.fake_forward(given.loss)


def _agreed(own: Tensor, every: Tensor) -> Tensor:
    return every[0].clone()


def _fake_agreed(own: Tensor, every: Tensor) -> Tensor:
    return torch.empty_like(own)


def _over_ranks(*tensors: Any, group: str, **settings: Any) -> tuple[Tensor, ...]:
    gather, wait = compat.gathering_ops()
    target, ranks = tensors[3], settings["ranks"]
    rows = torch.full((1,), target.numel(), dtype=torch.int64, device=target.device)
    counts = wait(gather(rows, ranks, group))
    own, *gradients = linear_cross_entropy_total_shard(*tensors, counts, group=group, **settings)
    every = wait(gather(own.detach().reshape(1), ranks, group))
    return (linear_cross_entropy_total_agreed(own, every), *gradients)


_TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? row_weight, Tensor? norm"
)
_KNOBS = (
    "str group, int rank, int ranks, int classes, int? ignore_index, float scale, float softcap, "
    "int workspace, bool[3] output_mask"
)
_TOTALS = "(Tensor total, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)"
linear_cross_entropy_total_shard = library.op(
    f"linear_cross_entropy_total_shard({_TENSORS}, Tensor counts, *, {_KNOBS}) -> {_TOTALS}",
    *library.taking(_called, _forward, _fake_forward),
    backward=total.link,
    setup_context=total.setup_context,
)
linear_cross_entropy_total_agreed = library.op(
    "linear_cross_entropy_total_agreed(Tensor own, Tensor every) -> Tensor",
    _agreed,
    _fake_agreed,
    backward=lambda ctx, grad: (grad, None),
)
linear_cross_entropy_total_over_ranks = library.op(
    f"linear_cross_entropy_total_over_ranks({_TENSORS}, *, {_KNOBS}) -> {_TOTALS}", _over_ranks
)
