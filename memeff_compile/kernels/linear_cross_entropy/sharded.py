"""memeff::linear_cross_entropy_over_ranks: a head of which every rank holds some classes.

Rank r of P has the rows of the weight that `torch.chunk` gives it. One op computes statistics of
its columns, a few numbers per row; those of all ranks are gathered, k x N numbers from each; the
other op merges them into what `linear_cross_entropy` returns for the whole head:

    stats = linear_cross_entropy_shard(h, W_r, None, y, None, None, rank=r, ranks=P, classes=V, ...)
    every = all_gather(stats)
    nll, lse, logit_sum, entropy, top = linear_cross_entropy_merge(every, h, W_r, None, y, ...)

What ranks gather needs as many rows on each. So they first gather how many they have, one number,
and where these differ all of them raise.

All ranks get the same numbers. Their gradients are the rank's own: those of W_r, and the part of
dh that W_r gives, which ranks have to add up. They come from `linear_cross_entropy_backward`, told
the log-sum-exp and entropy of all classes, so that its softmax is that of the whole head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from ...errors import UnsupportedInputError
from .. import library
from ..checks import require, wide
from . import op as rows_op
from .ranks import merged
from .selected import filter_level

_IGNORED = -100  # no column of any rank
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # as many bits
_ROWS_AT_A_TIME = 512


class Shard(NamedTuple):
    """Which classes of a head a rank holds."""

    rank: int
    ranks: int
    classes: int  # of all ranks

    @property
    def chunk(self) -> int:
        """How many classes the first ranks hold; the last may hold fewer."""
        return -(-self.classes // self.ranks)

    @property
    def first(self) -> int:
        """The first class of this rank."""
        return self.rank * self.chunk

    @property
    def columns(self) -> int:
        """How many classes this rank holds."""
        return max(0, min(self.chunk, self.classes - self.first))

    @property
    def leaves_some_empty(self) -> bool:
        """Whether ranks are left without any class."""
        return self.chunk * (self.ranks - 1) >= self.classes

    def fault(self, rows: int) -> str | None:
        """Say why a weight of so many rows is not this shard, or return None."""
        if 0 < rows == self.columns:
            return None
        return (
            f"weight has {rows} rows; rank {self.rank} of {self.ranks} with {self.classes} classes "
            f"holds {self.columns}, as torch.chunk cuts them. Shard the head with DTensor."
        )

    def places(self, target: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return targets as columns of this rank, and which rows have theirs here and elsewhere.

        Rows with a target elsewhere get any column: they count, but nothing is asked of it.
        """
        here = (target >= self.first) & (target < self.first + self.columns)
        if ignore_index is None:
            return torch.where(here, target - self.first, 0), here, ~here
        kept = target != ignore_index
        here = here & kept
        column = torch.where(here, target - self.first, torch.where(kept, 0, _IGNORED))
        return column.to(target.dtype), here, kept & ~here


class Split(NamedTuple):
    """A head over ranks: what this one holds, the dimension of the mesh, and the group's name."""

    shard: Shard
    dim: int
    group: str


def split_of(weight: Any) -> Split | str:
    """Return how a DTensor is split over ranks by its rows, or how it is laid out otherwise.

    The answer is the same on every rank, but for what the rank holds.
    """
    from torch.distributed.tensor import Shard as Rows

    places = {i: p for i, p in enumerate(weight.placements) if not p.is_replicate()}
    if len(places) != 1 or any(type(p) is not Rows or p.dim != 0 for p in places.values()):
        return f"is laid out as {layout(weight)}, not split by its classes over one dimension"
    (dim,), mesh = places, weight.device_mesh
    shard = Shard(mesh.get_local_rank(dim), mesh.size(dim), weight.shape[0])
    if shard.leaves_some_empty:
        return f"has {shard.classes} classes for {shard.ranks} ranks, which leave ranks without any"
    return Split(shard, dim, mesh.get_group(dim).group_name)


def layout(tensor: Any) -> str:
    """Say how a DTensor is laid out."""
    return f"({', '.join(map(repr, tensor.placements))})"


def part_of_rank(tensor: Any, summed: int | None = None) -> Tensor:
    """Return what this rank holds; its gradient is a part of a sum over one mesh dimension."""
    if summed is None:
        return tensor.to_local()  # type: ignore[no-any-return]
    from torch.distributed.tensor import Partial

    places = [Partial() if i == summed else p for i, p in enumerate(tensor.placements)]
    return tensor.to_local(grad_placements=places)  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """What both ops are called with."""

    tensors: tuple[Any, ...]  # hidden, weight, bias, target, column_weight, as of the whole op
    shard: Shard
    settings: dict[str, Any]  # of the whole op
    counts: Tensor | None = None  # (P,) int64: how many rows each rank has

    @property
    def target(self) -> Tensor:
        found: Tensor = self.tensors[3]
        return found

    @property
    def ignore_index(self) -> int | None:
        found: int | None = self.settings["ignore_index"]
        return found

    @property
    def asked(self) -> tuple[bool, bool, bool]:
        """Whether sums of logits, entropies and likeliest classes are among the statistics."""
        given = self.settings
        return given["with_logit_sum"], *(given.get(f"with_{k}", False) for k in ("entropy", "top"))

    @property
    def numbers(self) -> int:
        """How many numbers a rank gives of each row: two for its likeliest class and the logit."""
        return 2 + sum(self.asked) + self.asked[-1]

    @property
    def local(self) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
        """What the whole op is told of this rank's columns, and `Shard.places`.

        Of what a row may lose to the filter `mass`, each rank has its share.
        """
        ignored = None if self.ignore_index is None else _IGNORED
        settings = {**self.settings, "ignore_index": ignored}
        if (mode := settings["gradient_filter"]) == "mass":
            level = filter_level(mode, settings.get("filter_level", 0.0))
            settings["filter_level"] = level / self.shard.ranks
        return settings, *self.shard.places(self.target, self.ignore_index)


class _Merge(NamedTuple):
    """What `linear_cross_entropy_merge` is called with."""

    every: Tensor  # (P * k, ...): the statistics of all ranks, one behind the other
    call: _Call


def _called(*given: Any, rank: int, ranks: int, classes: int, **settings: Any) -> _Call:
    shard, tensors = Shard(rank, ranks, classes), given[:5]
    require("linear_cross_entropy", shard.fault(tensors[1].shape[0]))
    return _Call(tensors, shard, settings, *given[5:])


def check_counts(counts: Tensor, rows: int) -> None:
    """Refuse a rank's rows where another one has more or fewer; all ranks do so alike."""
    same = (counts == rows).all()
    said = "linear_cross_entropy: ranks that share a head have different numbers of rows"
    needed = "Every rank of a tensor-parallel group needs the same batch. Give them the same data."
    if counts.device.type == "cuda":
        compat.assert_on_device(same, f"{said}. {needed}")
    elif not bool(same):
        listed = ", ".join(map(str, counts.tolist()))
        raise UnsupportedInputError(f"{said} ({listed}). {needed}")


def _merging(every: Tensor, *tensors: Any, **settings: Any) -> _Merge:
    return _Merge(every, _called(*tensors, **settings))


def _statistics(given: _Call) -> Tensor:
    settings, column, here, _ = given.local
    if given.counts is not None:
        check_counts(given.counts, given.target.numel())
    rows_op.check_range(given.target.reshape(-1), given.shard.classes, given.ignore_index)
    hidden, weight, bias, _, column_weight = given.tensors
    nll, lse, *others, top = rows_op.linear_cross_entropy(
        *(hidden, weight, bias, column, column_weight), **settings
    )
    wanted = [part for part, asked in zip(others, given.asked[:2], strict=True) if asked]
    if given.asked[-1]:
        bits = (top + given.shard.first).to(_INTEGERS[lse.dtype]).view(lse.dtype)
        wanted += [_logits_of(given, top), bits]
    stacked: Tensor = torch.stack([lse, nll.where(here, 0), *wanted])
    return stacked


def _logits_of(given: _Call, column: Tensor) -> Tensor:
    """Return the logit of one column for each row, summed in one order whatever rank has it: equal
    classes of two ranks tie.
    """
    hidden, weight, bias, *_ = given.tensors
    dtype, rows = wide(hidden.dtype), column.numel()
    pieces = zip(
        hidden.reshape(rows, hidden.shape[-1]).split(_ROWS_AT_A_TIME),
        column.reshape(rows).split(_ROWS_AT_A_TIME),
        strict=True,
    )
    products = [(some.to(dtype) * weight[at].to(dtype)).sum(-1) for some, at in pieces]
    found: Tensor = torch.cat(products).view(column.shape)
    if bias is not None:
        found = found + bias[column].to(dtype)
    found, cap = found * given.settings["scale"], given.settings["softcap"]
    return (found / cap).tanh() * cap if cap > 0 else found


def _fake_statistics(given: _Call) -> Tensor:
    hidden: Tensor = given.tensors[0]
    shape = given.target.shape
    return hidden.new_empty((given.numbers, *shape), dtype=wide(hidden.dtype))


def _merge(given: _Merge) -> tuple[Tensor, ...]:
    call, target = given.call, given.call.target
    parts = iter(given.every.view(call.shard.ranks, call.numbers, *target.shape).unbind(1))
    every_lse, every_nll = next(parts), next(parts)
    kept = torch.ones_like(target, dtype=torch.bool)
    if call.ignore_index is not None:
        kept = target != call.ignore_index
    owner = torch.where(kept, target, 0).long() // call.shard.chunk
    lse, nll = merged(every_lse, every_nll, owner)
    share = every_lse - lse  # the logarithm of what a rank's classes have of the softmax
    found = [nll.where(kept, 0), lse]
    nothing = lse.new_empty(0)
    with_logit_sum, with_entropy, with_top = call.asked
    found.append(next(parts).sum(0) if with_logit_sum else nothing)
    if with_entropy:
        mixed = (share.exp() * (next(parts) - share)).where(share > -torch.inf, 0)
        found.append(mixed.sum(0))
    else:
        found.append(nothing.clone())
    if with_top:  # of equals the first rank's, which has the lower class
        best = next(parts).argmax(0, keepdim=True)
        found.append(next(parts).view(_INTEGERS[lse.dtype]).gather(0, best)[0].long())
    else:
        found.append(nothing.long())
    if not (call.settings["with_lse"] or with_entropy):
        found[1] = lse.where(kept, 0)
    return tuple(found)


def _fake_merge(given: _Merge) -> tuple[Tensor, ...]:
    call = given.call
    shapes = (call.target.shape if each else (0,) for each in (True, True, *call.asked))
    *rows, top = map(given.every.new_empty, shapes)
    return *rows, top.long()


def _setup_statistics(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.mark_non_differentiable(output)  # gradients go by the merge


def _setup_merge(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    _, lse, _, entropy, top = output
    ctx.mark_non_differentiable(top)
    ctx.save_for_backward(*inputs[1:], lse, entropy)
    ctx.settings = keyword_only_inputs


def _link(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, lse, entropy = ctx.saved_tensors
    hidden, weight, bias, _, column_weight = tensors
    settings, column, here, elsewhere = _called(*tensors, **ctx.settings).local
    of_nll, of_lse, *others = grads[:4]  # behind them are indices
    # What pulls a target elsewhere up is another rank's; what pushes all classes down is not.
    split = of_nll.where(here, 0), of_lse + of_nll.where(elsewhere, 0)
    mask = list(ctx.needs_input_grad[1:4])
    gradients = rows_op.linear_cross_entropy_backward(
        *(*split, *others, hidden, weight, bias, column, column_weight, lse, entropy),
        **settings,
        output_mask=mask,
    )
    found = [gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True)]
    return (None, *found, None, None)


def _over_ranks(*tensors: Any, group: str, **settings: Any) -> tuple[Tensor, ...]:
    gather, wait = compat.gathering_ops()
    target, ranks = tensors[3], settings["ranks"]
    rows = torch.full((1,), target.numel(), dtype=torch.int64, device=target.device)
    counts = wait(gather(rows, ranks, group))
    stats = linear_cross_entropy_shard(*tensors, counts, **settings)
    every = wait(gather(stats, ranks, group))
    found: tuple[Tensor, ...] = linear_cross_entropy_merge(every, *tensors, **settings)
    return found


_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? column_weight"
_KNOBS = (
    "int rank, int ranks, int classes, int? ignore_index, float scale, float softcap, "
    "bool with_lse, bool with_logit_sum, str gradient_filter, int workspace, "
    "bool with_entropy=False, bool with_top=False, float filter_level=0.0, "
    'str filter_parts="both", bool sort_vocabulary=False'
)
linear_cross_entropy_shard = library.op(
    f"linear_cross_entropy_shard({_TENSORS}, Tensor? counts, *, {_KNOBS}) -> Tensor",
    *library.taking(_called, _statistics, _fake_statistics),
    backward=lambda ctx, _: (None,) * 6,
    setup_context=_setup_statistics,
)
_ROWS = "(Tensor nll, Tensor lse, Tensor logit_sum, Tensor entropy, Tensor top)"
linear_cross_entropy_merge = library.op(
    f"linear_cross_entropy_merge(Tensor every, {_TENSORS}, *, {_KNOBS}) -> {_ROWS}",
    *library.taking(_merging, _merge, _fake_merge),
    backward=_link,
    setup_context=_setup_merge,
)
linear_cross_entropy_over_ranks = library.op(
    f"linear_cross_entropy_over_ranks({_TENSORS}, *, str group, {_KNOBS}) -> {_ROWS}", _over_ranks
)
