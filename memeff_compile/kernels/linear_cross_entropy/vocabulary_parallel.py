"""The loss of an output projection whose classes are split over ranks: statistics on each rank, and
their merging.

Rank r of P ranks has the rows W_r of the weight that `torch.chunk` assigns to it. Below, h is the
hidden states, and y the targets. For a loss per token (row of h), one op computes statistics over
the rank's classes, k numbers per token. These numbers are the log-sum-exp, the loss, and optional
results such as the entropy. All ranks then gather these statistics. Another op then merges the
statistics of all ranks into the results of `linear_cross_entropy` for all classes:

    stats = linear_cross_entropy_shard(h, W_r, None, y, None, None, rank=r, ranks=P, classes=V, ...)
    every = all_gather(stats)
    nll, lse, logit_sum, entropy, top = linear_cross_entropy_merge(every, h, W_r, None, y, ...)

`linear_cross_entropy_backward` computes the gradients from the log-sum-exp and entropy over all
classes. So the op uses the softmax over all classes, not only over this rank's classes.

The op for a scalar loss also computes the gradients of that loss. The gradients of a row need the
row's softmax over all classes, but no rank has all classes. So all ranks process the same blocks of
rows and exchange numbers once per block. Each rank computes the logits of its classes. For each
row, the rank sends two numbers to the other ranks: the log-sum-exp and the loss of the row, both
over only its own classes. If the rank does not have the row's target, it sends the loss 0. The
class `Ranks` exchanges these two numbers. Then each rank computes its gradients with the numbers of
all ranks:

    counts = all_gather(number of rows)
    total, *gradients = linear_cross_entropy_total_shard(h, W_r, None, y, ..., counts, rank=r, ...)
    total = linear_cross_entropy_total_agreed(total, all_gather(total))

A compiler does not see that the op `linear_cross_entropy_total_shard` itself gathers numbers. So a
compiler could move the op past other collectives, in a different way on each rank. A compiler keeps
the order of the collectives that it sees. So two other collectives fix the op's position: the
`all_gather` before the op and the `all_gather` after it. All ranks use the scalar loss (`total`)
that the first rank computed.

All ranks must have the same number of rows, so they first gather their row counts. If the counts
differ, every rank raises an error. The number of gathers depends on the number of rows, the hidden
size and the classes of all ranks. The number of gathers also depends on the dtype, the memory limit
`workspace` and the kind of device (such as "cuda"). A softcap of the logits may change the number
of gathers, too. The GPU's model and the loss's implementation change neither the number of gathers
nor the shapes of the gathered tensors. So ranks may use different implementations. Each rank gets
the gradient of its rows of the weight, and one summand of the gradient of the hidden states. The
caller has to add up the summands of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._gradient_filter.levels import filter_level
from .._head_loss.call import (
    Operands,
    RowGradients,
    RowResults,
    ScalarLoss,
    Settings,
    check_range,
)
from .._head_loss.ranks import (
    ELSEWHERE,
    IGNORED,
    NO_COLUMN,
    Ranks,
    Shard,
    check_counts,
    merged,
)
from ..checks import wide
from ..device import DEFAULT_PROCESSORS, where_it_runs
from .shapes import ROWS_AT_A_TIME, hopper_rows, reference_rows, shapes_for_programs
from .walk import row_results

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # as many bits


class Part(NamedTuple):
    """The arguments with which one rank computes the statistics of its classes.

    The statistics are numbers per row, such as the log-sum-exp. Only calls that return a loss per
    row use this class.
    """

    whole: Operands  # of the rank's rows of the weight; targets are classes of the whole head
    settings: Settings  # of the whole head
    shard: Shard

    @property
    def asked(self) -> tuple[bool, ...]:
        """Return which optional statistics the call requests: sums of logits, entropies, likeliest
        classes."""
        return self.settings.wanted[2:]

    @property
    def numbers(self) -> int:
        """Return how many numbers per row (token) a rank sends to the other ranks.

        If the call requests the likeliest class, a rank sends two numbers for the likeliest of its
        classes: the logit and the index.
        """
        return 2 + sum(self.asked) + self.asked[-1]

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return target columns in this rank's logits, and two masks: rows with targets on this
        rank, rows with targets on another rank.

        A row is one token. The ranks split the classes of an output projection. Rows with an
        ignored target are in neither mask.
        """
        return self.shard.columns_of(self.whole.target, self.settings.ignore_index)

    @property
    def own_settings(self) -> Settings:
        """Return the settings for the loss over this rank's classes.

        The gradient filter `mass` drops unlikely classes from the gradient of a row's logits, and
        limits their probability mass. Each rank gets an equal share of this limit.
        """
        settings = self.settings
        ignored = None if settings.ignore_index is None else NO_COLUMN
        settings = settings._replace(ignore_index=ignored)
        if settings.gradient_filter == "mass":
            level = filter_level("mass", settings.filter_level) / self.shard.ranks
            settings = settings._replace(filter_level=level)
        return settings

    def split(self, grads: RowGradients) -> RowGradients:
        """Convert gradients with respect to merged results to those of this rank's own results.

        The results are numbers per row (token), such as the loss and the log-sum-exp. A rank
        computes them for its own classes. The results of all ranks are merged into results over all
        classes. `grads` contains the training loss's gradients with respect to the merged results.

        On the rank that has a row's target, the gradient with respect to the row's loss stays
        unchanged. The other ranks add this gradient to the one with respect to the log-sum-exp.
        There, the row's loss depends on the rank's results only through the log-sum-exp.
        """
        _, here, elsewhere = self.columns
        of_lse = grads.lse + grads.nll.where(elsewhere, 0)
        return grads._replace(nll=grads.nll.where(here, 0), lse=of_lse)


def statistics(part: Part, counts: Tensor | None) -> Tensor:
    """Return the statistics of this rank's classes, (k, ...) with k numbers per row (token).

    The numbers are the log-sum-exp, the loss, and the optional statistics that the call requests.
    If another rank has a row's target, the row's loss is 0 here. `merge` merges the ranks'
    statistics.
    """
    if counts is not None:
        check_counts(counts, part.whole.target.numel())
    ignore_index = part.settings.ignore_index
    check_range(part.whole.target.reshape(-1), part.shard.classes, ignore_index)
    column, here, _ = part.columns
    own = part.whole._replace(target=column)
    nll, lse, *others, top = row_results(own, part.own_settings.served())
    wanted = [each for each, asked in zip(others, part.asked[:2], strict=True) if asked]
    if part.asked[-1]:
        bits = (top + part.shard.first).to(_INTEGERS[lse.dtype]).view(lse.dtype)
        wanted += [_logits_of(part, top), bits]
    stacked: Tensor = torch.stack([lse, nll.where(here, 0), *wanted])
    return stacked


def _logits_of(part: Part, column: Tensor) -> Tensor:
    """Return, for each row (token), the logit of the class whose index `column` contains.

    `part` contains the operands and settings of this rank's call. An index counts this rank's
    classes. A logit is a sum of products, over the features of a hidden state and a weight row. The
    order of this sum does not depend on the rank, so equal weight rows on two ranks give equal
    logits.
    """
    hidden, weight, bias, *_ = part.whole
    dtype, rows = wide(hidden.dtype), column.numel()
    blocks = zip(
        hidden.reshape(rows, hidden.shape[-1]).split(ROWS_AT_A_TIME),
        column.reshape(rows).split(ROWS_AT_A_TIME),
        strict=True,
    )
    products = [(some.to(dtype) * weight[at].to(dtype)).sum(-1) for some, at in blocks]
    found: Tensor = torch.cat(products).view(column.shape)
    if bias is not None:
        found = found + bias[column].to(dtype)
    found, cap = found * part.settings.scale, part.settings.softcap
    return (found / cap).tanh() * cap if cap > 0 else found


def merge(part: Part, every: Tensor) -> RowResults:
    """Return the results for all classes, merged from the statistics of all ranks in the order of
    the ranks."""
    target, settings = part.whole.target, part.settings
    numbers = iter(every.view(part.shard.ranks, part.numbers, *target.shape).unbind(1))
    every_lse, every_nll = next(numbers), next(numbers)
    kept = torch.ones_like(target, dtype=torch.bool)
    if settings.ignore_index is not None:
        kept = target != settings.ignore_index
    owner = torch.where(kept, target, 0).long() // part.shard.chunk
    lse, nll = merged(every_lse, every_nll, owner)
    share = every_lse - lse  # the logarithm of a rank's share of the softmax
    nothing = lse.new_empty(0)
    logit_sum, entropy, top = nothing, nothing.clone(), nothing.long()
    if settings.with_logit_sum:
        logit_sum = next(numbers).sum(0)
    if settings.with_entropy:
        entropy = (share.exp() * (next(numbers) - share)).where(share > -torch.inf, 0).sum(0)
    if settings.with_top:  # of equal logits, that of the first rank, which has the lower class
        best = next(numbers).argmax(0, keepdim=True)
        top = next(numbers).view(_INTEGERS[lse.dtype]).gather(0, best)[0].long()
    if not settings.keeps_ignored_rows:
        lse = lse.where(kept, 0)
    return RowResults(nll.where(kept, 0), lse, logit_sum, entropy, top)


def rows_of_a_block(
    rows: int,  # at least one
    shard: Shard,
    *,
    depth: int,  # of the hidden states
    dtype: torch.dtype,  # likewise
    device: torch.device,  # likewise; only its kind counts
    workspace: int = 0,  # as for the op
    has_softcap: bool = False,  # likewise
) -> int:
    """Return for how many rows (tokens) at a time the ranks exchange log-sum-exps and losses.

    Each rank has some of the classes. Every implementation uses this number of rows as its block
    height.
    """
    kind = where_it_runs(device).type
    if kind == "cuda":
        # whole tiles of `hopper`, which has one size of them
        tile = shapes_for_programs(DEFAULT_PROCESSORS)
        return hopper_rows(rows, depth, shard.chunk, workspace, tile)
    per_logit = max(dtype.itemsize, 4) * (1 + has_softcap)
    return int(reference_rows(rows, shard.chunk, per_logit, workspace, kind))


def loss_of_rank(whole: ScalarLoss, shard: Shard, gather: Callable[[Tensor], Tensor]) -> ScalarLoss:
    """Return this rank's arguments for a scalar loss over the classes of all ranks.

    `whole` contains the arguments of the loss op, with targets among the classes of all ranks. In
    the result, a target of this rank is a column of this rank's logits. A target of another rank is
    a negative number, and so is the target of an ignored row. The function `gather` collects
    log-sum-exps and losses from all ranks. The loss op calls `gather` once per block of rows,
    through the result's field `ranks`."""
    target, rows = whole.target, whole.target.numel()
    owner = (target.clamp(min=0) // shard.chunk).clamp(max=shard.ranks - 1)
    within = (target % shard.chunk).clamp(max=shard.columns - 1)
    local = torch.where(owner == shard.rank, target - shard.first, ELSEWHERE - within)
    if whole.ignore_index is not None:
        local = local.masked_fill(target == whole.ignore_index, IGNORED)
    height = rows_of_a_block(
        max(rows, 1),
        shard,
        depth=whole.hidden.shape[-1],
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
