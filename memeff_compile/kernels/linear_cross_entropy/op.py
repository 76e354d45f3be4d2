"""memeff::linear_cross_entropy and related ops: schemas, validation, fake tensors, autograd.

Two ops compute the loss from hidden states and the output projection's weight:

- `linear_cross_entropy` returns, per row (token): loss (nll), log-sum-exp of the logits (lse), sum
  of logits, entropy, likeliest class.
- `linear_cross_entropy_total` returns one number and the gradients of that number, which is
  (sum over rows i of row_weight_i * nll_i) / norm.

The first of these ops has a backward op, `linear_cross_entropy_backward`. These three ops
optionally take a LoRA adapter of the output projection. The op `linear_cross_entropy` saves its
inputs, one lse per row and, if requested, one entropy per row. The backward op computes the logits
again. The forward pass of the op `linear_cross_entropy_total` also computes its operands'
gradients from the same logits. So a training step takes three matrix products instead of four. The
backward pass of `linear_cross_entropy_total` only multiplies the operands' gradients by the
gradient that autograd passes in for the total loss. The module `_head_loss.scaling` does this
multiplication.

Four more ops support classes that are split over ranks (`vocabulary_parallel`). They compute one
rank's statistics, merge statistics, compute a rank's total loss, and give all ranks the total of
the first rank.

Four further ops are composed of the ops above. In a graph, their names show that the output
projection has an adapter, or that its classes are split over ranks:

- with an adapter: `linear_cross_entropy_adapted` and `linear_cross_entropy_adapted_total`;
- with split classes: `linear_cross_entropy_over_ranks` and `linear_cross_entropy_total_over_ranks`.

Each argument of an op costs a few microseconds of CPU time. So the ops for a single process do not
have the many arguments for ranks.

No op of this module changes its inputs; Inductor treats the ops as opaque, and autocast does not
affect them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from ...errors import DoubleBackwardError
from .. import library
from .._gradient_filter.levels import filter_fault
from .._head_loss.call import (
    Operands,
    RowGradients,
    RowResults,
    Saved,
    ScalarLoss,
    Settings,
    as_results,
    check_range,
)
from .._head_loss.faults import check_sizes, dtype_fault, layout_fault, shape_fault
from .._head_loss.ranks import Shard, check_counts
from .._head_loss.scaling import asked, at_arguments, total_joins
from ..checks import require, wide
from ..device import without_autocast
from .vocabulary_parallel import Part, loss_of_rank, merge, statistics
from .walk import loss_and_gradients, row_gradients, row_results


def supports(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,) or None
    target: Tensor,  # (...), the leading dimensions of hidden
    column_weight: Tensor | None = None,  # (V,) or None
    low: Tensor | None = None,  # (..., R) or None, as of `linear_cross_entropy_adapted`
    up: Tensor | None = None,  # (V, R) or None, likewise
    *,
    # dtype to which the caller will cast hidden, weight and bias, or None
    dtype: torch.dtype | None = None,
    softcap: float = 0.0,  # as for the op
    gradient_filter: str = "exact",  # likewise
    workspace: int = 0,  # likewise
    filter_level: float = 0.0,  # likewise
    filter_parts: str = "both",  # likewise
) -> str | None:
    """Return the reason why the op does not support the given inputs, or None if it does.

    The check reads the dtypes, devices, layouts and sizes of real or fake tensors, but never their
    values. The check adds no guard on symbolic sizes, because the op checks them at run time.
    """
    given = Operands(hidden, weight, bias, target, column_weight, low, up)
    return (
        _setting_fault(softcap, workspace, gradient_filter, filter_level, filter_parts)
        or layout_fault(given)
        or dtype_fault(given, dtype)
        or shape_fault(given)
    )


def _setting_fault(
    softcap: float, workspace: int, gradient_filter: str, level: float, parts: str
) -> str | None:
    if not softcap >= 0:
        return f"softcap is {softcap}; it must be positive, or 0 for none."
    if isinstance(workspace, int) and workspace < 0:
        return f"workspace is {workspace} bytes; it must be positive, or 0 for automatic."
    return filter_fault(gradient_filter, level, parts)


class _Forward(NamedTuple):
    """The arguments of `linear_cross_entropy`."""

    operands: Operands
    settings: Settings


class _Backward(NamedTuple):
    """The arguments of `linear_cross_entropy_backward`."""

    grads: RowGradients
    call: _Forward
    saved: Saved
    output_mask: tuple[bool, ...]


_CHECKED = ("softcap", "gradient_filter", "workspace", "filter_level", "filter_parts")


def _called(*tensors: Any, **settings: Any) -> _Forward:
    """Check the arguments of an op's call, and add those that the dispatcher omits because they
    equal their defaults."""
    checked = {name: settings[name] for name in _CHECKED if name in settings}
    require("linear_cross_entropy", supports(*tensors, **checked))
    return _Forward(Operands(*tensors), Settings(**settings).served())


def _called_back(*tensors: Any, output_mask: Sequence[bool], **settings: Any) -> _Backward:
    grads, head, saved, low_rank = tensors[:4], tensors[4:9], tensors[9:11], tensors[11:]
    call = _called(*head, *low_rank, **settings)
    trained = zip(output_mask, call.operands.trained, strict=False)
    mask = tuple(wanted and each is not None for wanted, each in trained)
    return _Backward(RowGradients(*grads), call, Saved(*saved), mask)


def _forward(given: _Forward) -> tuple[Tensor, ...]:
    return row_results(*given)


def _fake_forward(given: _Forward) -> tuple[Tensor, ...]:
    check_sizes(given.operands)
    return RowResults.new(given.operands.hidden, given.operands.target.shape, given.settings)


def _backward(given: _Backward) -> tuple[Tensor, ...]:
    grads, (operands, settings), saved, mask = given
    return as_results(row_gradients(grads, operands, saved, settings, mask), operands)


def _fake_backward(given: _Backward) -> tuple[Tensor, ...]:
    return _fake_gradients(given.call.operands, given.output_mask)


def _fake_gradients(given: Operands, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
    """Return empty tensors for the gradients that the caller requests."""

    def empty(of: Tensor | None, is_needed: bool) -> Tensor:
        if of is None or not is_needed:
            return given.hidden.new_empty(0)
        has_rows = of is given.hidden or of is given.low
        return of.new_empty(of.shape) if has_rows else torch.empty_like(of)

    return tuple(map(empty, given.trained, (*output_mask, False, False)[:5]))


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    _, lse, _, entropy, top = output
    ctx.mark_non_differentiable(top)
    low_rank = inputs[5:] if inputs[5] is not None else ()
    ctx.save_for_backward(*inputs[:5], lse, entropy, *low_rank)
    ctx.settings = keyword_only_inputs


_TRAINED = (0, 1, 2, 5, 6)  # hidden, weight, bias, low and up, among the arguments


def _link(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    mask = asked(ctx, _TRAINED[: len(saved) - 4])  # without a low-rank part three are trained
    gradients = linear_cross_entropy_backward(
        *grads[:4],  # after them are indices
        *saved,
        **ctx.settings,
        output_mask=mask,
    )
    return at_arguments(ctx, _TRAINED, gradients, mask)


class _Shard(NamedTuple):
    """The arguments of `linear_cross_entropy_total_shard`."""

    loss: ScalarLoss  # targets are classes of the whole output projection
    counts: Tensor  # (P,) int64: how many rows each rank has
    shard: Shard
    group: str


def _called_total(*tensors: Any, **settings: Any) -> ScalarLoss:
    operands, (low, up) = tensors[:6], (*tensors[6:], None, None)[:2]
    loss = ScalarLoss(*operands, **settings)._replace(low=low, up=up)
    require("linear_cross_entropy_total", _total_fault(loss))
    return loss


def _called_total_shard(
    *tensors: Any, group: str, rank: int, ranks: int, classes: int, **settings: Any
) -> _Shard:
    *operands, counts = tensors
    shard = Shard(rank, ranks, classes)
    require("linear_cross_entropy", shard.fault(operands[1].shape[0]))
    return _Shard(_called_total(*operands, **settings), counts, shard, group)


def _total_fault(given: ScalarLoss) -> str | None:
    target, row_weight, norm = given.target, given.row_weight, given.norm
    sentence = supports(
        *given.operands,
        softcap=given.softcap,
        workspace=given.workspace,
        gradient_filter=given.gradient_filter,
        filter_level=given.filter_level,
    )
    if sentence is None and row_weight is not None and row_weight.dim() != target.dim():
        sentence = (
            f"row_weight has {row_weight.dim()} dimensions and target {target.dim()}; one number "
            "per target is needed."
        )
    if sentence is None and norm is not None and norm.dim() != 0:
        sentence = f"norm has {norm.dim()} dimensions; a single number is needed."
    for name, factor in (("row_weight", row_weight), ("norm", norm)):
        if sentence is None and factor is not None and factor.requires_grad:
            sentence = f"{name} requires a gradient, which the op does not give. Detach it."
    return sentence


def _total(given: ScalarLoss) -> tuple[Tensor, ...]:
    with without_autocast(given.hidden.device.type):
        total, *gradients = loss_and_gradients(given.flat())
    return (total, *as_results(gradients, given.operands))


def _fake_total(given: ScalarLoss) -> tuple[Tensor, ...]:
    check_sizes(given.operands)
    total = given.hidden.new_empty((), dtype=given.wide)
    return (total, *_fake_gradients(given.operands, given.output_mask))


def _total_shard(given: _Shard) -> tuple[Tensor, ...]:
    flat, shard = given.loss.flat(), given.shard
    gather, wait = compat.gathering_ops()
    with without_autocast(flat.hidden.device.type):
        check_counts(given.counts, flat.target.numel())
        check_range(flat.target, shard.classes, flat.ignore_index)
        meeting = shard.ranks, given.group
        local = loss_of_rank(flat, shard, lambda own: wait(gather(own, *meeting)))
        total, *gradients = loss_and_gradients(local)
    return (total, *as_results(gradients, given.loss.operands)[:3])


def _fake_total_shard(given: _Shard) -> tuple[Tensor, ...]:
    return _fake_total(given.loss)[:4]


def _part(*tensors: Any, rank: int, ranks: int, classes: int, **settings: Any) -> Part:
    shard = Shard(rank, ranks, classes)
    require("linear_cross_entropy", shard.fault(tensors[1].shape[0]))
    checked = {name: settings[name] for name in _CHECKED if name in settings}
    require("linear_cross_entropy", supports(*tensors, **checked))
    return Part(Operands(*tensors), Settings(**settings), shard)


def _shard(*tensors: Any, **settings: Any) -> Tensor:
    *operands, counts = tensors
    return statistics(_part(*operands, **settings), counts)


def _fake_shard(*tensors: Any, **settings: Any) -> Tensor:
    part = _part(*tensors[:5], **settings)
    hidden, shape = part.whole.hidden, part.whole.target.shape
    return hidden.new_empty((part.numbers, *shape), dtype=wide(hidden.dtype))


def _setup_shard(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.mark_non_differentiable(output)  # gradients go by the merge


def _merge(every: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    return merge(_part(*tensors, **settings), every)


def _fake_merge(every: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    part = _part(*tensors, **settings)
    shape = part.whole.target.shape
    *rows, top = (every.new_empty(shape if each else (0,)) for each in part.settings.wanted)
    return *rows, top.long()


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


def _link_merge(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, lse, entropy = ctx.saved_tensors
    part, mask = _part(*tensors, **ctx.settings), list(ctx.needs_input_grad[1:4])
    column, *_ = part.columns
    own = part.whole._replace(target=column)
    gradients = linear_cross_entropy_backward(
        *part.split(RowGradients(*grads[:4])),  # after them are indices
        *(*own[:5], lse, entropy),
        **part.own_settings._asdict(),
        output_mask=mask,
    )
    return at_arguments(ctx, (1, 2, 3), gradients, mask)


def _agreed(own: Tensor, every: Tensor) -> Tensor:
    return every[0].clone()


def _fake_agreed(own: Tensor, every: Tensor) -> Tensor:
    return torch.empty_like(own)


def _counts(target: Tensor, ranks: int, group: str) -> Tensor:
    """Return the number of rows (tokens) in each rank's call, gathered from all ranks."""
    gather, wait = compat.gathering_ops()
    rows = torch.full((1,), target.numel(), dtype=torch.int64, device=target.device)
    counts: Tensor = wait(gather(rows, ranks, group))
    return counts


def _over_ranks(*tensors: Any, group: str, **settings: Any) -> tuple[Tensor, ...]:
    gather, wait = compat.gathering_ops()
    ranks = settings["ranks"]
    counts = _counts(tensors[3], ranks, group)
    stats = linear_cross_entropy_shard(*tensors, counts, **settings)
    every = wait(gather(stats, ranks, group))
    found: tuple[Tensor, ...] = linear_cross_entropy_merge(every, *tensors, **settings)
    return found


def _total_over_ranks(*tensors: Any, group: str, **settings: Any) -> tuple[Tensor, ...]:
    gather, wait = compat.gathering_ops()
    ranks = settings["ranks"]
    counts = _counts(tensors[3], ranks, group)
    own, *gradients = linear_cross_entropy_total_shard(*tensors, counts, group=group, **settings)
    every = wait(gather(own.detach().reshape(1), ranks, group))
    return (linear_cross_entropy_total_agreed(own, every), *gradients)


def _adapted(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = linear_cross_entropy(*tensors, **settings)
    return found


def _adapted_total(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = linear_cross_entropy_total(*tensors, **settings)
    return found


def _direct(called: library.Function, compute: library.Function) -> library.Function:
    """Return an op's Python function in the form that Inductor's generated code calls.

    That code passes optional tensors by keyword.
    """

    def direct(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
        named = [settings.pop(name) for name in ("low", "up") if name in settings]
        found: tuple[Tensor, ...] = compute(called(*tensors, *named, **settings))
        return found

    return direct


_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
_SETTINGS = (
    "int? ignore_index, float scale, float softcap, bool with_lse, bool with_logit_sum, "
    "str gradient_filter, int workspace, bool with_entropy=False, bool with_top=False, "
    'float filter_level=0.0, str filter_parts="both", bool sort_vocabulary=False'
)
_RESULTS = "(Tensor nll, Tensor lse, Tensor logit_sum, Tensor entropy, Tensor top)"
_LOW_RANK = "Tensor? low=None, Tensor? up=None"
_REFUSAL = (
    "linear_cross_entropy: a second derivative of the fused loss was requested, but the op has "
    "only a first one. Compile with options={'memeff.linear_cross_entropy': 'off'}."
)
_refuse = library.refusing(DoubleBackwardError, _REFUSAL)
linear_cross_entropy = library.op(
    f"linear_cross_entropy({_HEAD}, Tensor? column_weight, {_LOW_RANK}, *, {_SETTINGS}) -> "
    f"{_RESULTS}",
    *library.taking(_called, _forward, _fake_forward),
    backward=_link,
    setup_context=_setup_context,
    direct=_direct(_called, _forward),
)
linear_cross_entropy_backward = library.op(
    "linear_cross_entropy_backward(Tensor grad_nll, Tensor grad_lse, Tensor grad_logit_sum, "
    f"Tensor grad_entropy, {_HEAD}, Tensor? column_weight, Tensor lse, Tensor entropy, "
    f"{_LOW_RANK}, *, {_SETTINGS}, bool[] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    *library.taking(_called_back, _backward, _fake_backward),
    backward=_refuse,
    direct=_direct(_called_back, _backward),
)

_NUMBER = f"{_HEAD}, Tensor? row_weight, Tensor? norm"
_NUMBER_SETTINGS = "int? ignore_index, float scale, float softcap, int workspace"
_FILTER = 'str gradient_filter="exact", float filter_level=0.0, bool sort_vocabulary=False'
_TOTAL = "Tensor total, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias"
_TOTALS = f"({_TOTAL}, Tensor grad_low, Tensor grad_up)"
_setup_total, _link_total = total_joins((0, 1, 2, 6, 7), _REFUSAL)
linear_cross_entropy_total = library.op(
    f"linear_cross_entropy_total({_NUMBER}, {_LOW_RANK}, *, {_NUMBER_SETTINGS}, "
    f"bool[] output_mask, {_FILTER}) -> {_TOTALS}",
    *library.taking(_called_total, _total, _fake_total),
    backward=_link_total,
    setup_context=_setup_total,
    direct=_direct(_called_total, _total),
)
_RANK = "int rank, int ranks, int classes"
linear_cross_entropy_shard = library.op(
    f"linear_cross_entropy_shard({_HEAD}, Tensor? column_weight, Tensor? counts, *, {_RANK}, "
    f"{_SETTINGS}) -> Tensor",
    _shard,
    _fake_shard,
    backward=lambda ctx, _: (None,) * 6,
    setup_context=_setup_shard,
)
linear_cross_entropy_merge = library.op(
    f"linear_cross_entropy_merge(Tensor every, {_HEAD}, Tensor? column_weight, *, {_RANK}, "
    f"{_SETTINGS}) -> {_RESULTS}",
    _merge,
    _fake_merge,
    backward=_link_merge,
    setup_context=_setup_merge,
)
_setup_total_shard, _link_total_shard = total_joins((0, 1, 2), _REFUSAL)
linear_cross_entropy_total_shard = library.op(
    f"linear_cross_entropy_total_shard({_NUMBER}, Tensor counts, *, str group, {_RANK}, "
    f"{_NUMBER_SETTINGS}, bool[3] output_mask) -> ({_TOTAL})",
    *library.taking(_called_total_shard, _total_shard, _fake_total_shard),
    backward=_link_total_shard,
    setup_context=_setup_total_shard,
)
linear_cross_entropy_total_agreed = library.op(
    "linear_cross_entropy_total_agreed(Tensor own, Tensor every) -> Tensor",
    _agreed,
    _fake_agreed,
    backward=lambda ctx, grad: (grad, None),
)

linear_cross_entropy_adapted = library.op(
    f"linear_cross_entropy_adapted({_HEAD}, Tensor? column_weight, Tensor low, Tensor up, *, "
    f"{_SETTINGS}) -> {_RESULTS}",
    _adapted,
)
linear_cross_entropy_adapted_total = library.op(
    f"linear_cross_entropy_adapted_total({_NUMBER}, Tensor low, Tensor up, *, {_NUMBER_SETTINGS}, "
    f"bool[5] output_mask) -> {_TOTALS}",
    _adapted_total,
)
linear_cross_entropy_over_ranks = library.op(
    f"linear_cross_entropy_over_ranks({_HEAD}, Tensor? column_weight, *, str group, {_RANK}, "
    f"{_SETTINGS}) -> {_RESULTS}",
    _over_ranks,
)
linear_cross_entropy_total_over_ranks = library.op(
    f"linear_cross_entropy_total_over_ranks({_NUMBER}, *, str group, {_RANK}, {_NUMBER_SETTINGS}, "
    f"bool[3] output_mask) -> ({_TOTAL})",
    _total_over_ranks,
)
