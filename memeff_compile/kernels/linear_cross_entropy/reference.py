"""The reference: the formula in plain PyTorch, piece by piece over the vocabulary; any device.

16-bit and fp32 inputs meet in fp32 products that go into exp unrounded; fp64 stays fp64. In
backward the gradient with respect to the products is formed in full precision, target term
included, and rounded once to the input dtype, as `hybrid` does. On a CPU, where looking at targets
costs nothing, rows with an ignored target are left out of every product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .call import Gradients, Kept, Knobs, Operands, RowGradients, Rows
from .pieces import reference_bytes_per_logit, reference_width, spans, window

# exp of it is 0 in fp32 and in fp64. Logarithms of probabilities are cut off here where they are
# multiplied by that probability, so that an impossible column (-inf) adds 0 and not nan.
LOG_ZERO = -1000.0


def forward(given: Operands, knobs: Knobs) -> Rows:
    """Compute what is asked for of every row, of any floating dtype and a weight of any strides."""
    hidden, weight, _, target, _, low, _ = given
    rows = target.shape[0]
    wide = checks.wide(hidden.dtype)
    kept = kept_rows(target, knobs, forward=True)
    if kept is not None:
        hidden, target, low = hidden[kept], target[kept], None if low is None else low[kept]
    width = _width(hidden.dtype, rows, weight, knobs, forward=True)
    low = None if low is None else low.to(wide)
    given = given._replace(hidden=hidden.to(wide), target=target.long(), low=low)
    found = _statistics(given, knobs, width)
    if kept is not None:
        parts = zip(found, knobs.wanted, strict=True)
        return Rows(*(_spread(part, kept, rows) if wanted else part for part, wanted in parts))
    if knobs.ignore_index is not None:
        is_ignored = target == knobs.ignore_index
        found.nll.masked_fill_(is_ignored, 0)
        if knobs.with_logit_sum:
            found.logit_sum.masked_fill_(is_ignored, 0)
        if not knobs.keeps_ignored_rows:
            found.lse.masked_fill_(is_ignored, 0)
    return found


def backward(
    grads: RowGradients, given: Operands, results: Kept, knobs: Knobs, output_mask: Sequence[bool]
) -> Gradients:
    """Compute the gradients that `output_mask` asks for."""
    (hidden, weight, bias, target, column_weight, low, up), (lse, entropy) = given, results
    needs_hidden, needs_weight, needs_bias, *needs_low_rank = output_mask
    narrow, wide = hidden.dtype, checks.wide(hidden.dtype)
    rows, vocab = hidden.shape[0], weight.shape[0]
    width = _width(narrow, rows, weight, knobs, forward=False)
    kept = kept_rows(target, knobs, forward=False)
    if kept is not None:
        hidden, target, lse = hidden[kept], target[kept], lse[kept]
        low = None if low is None else low[kept]
        parts = zip(grads, knobs.wanted, strict=False)
        grads = RowGradients(*(grad[kept] if wanted else grad for grad, wanted in parts))
    elif knobs.ignore_index is not None:
        is_ignored = target == knobs.ignore_index
        grads = grads._replace(nll=grads.nll.masked_fill(is_ignored, 0))
        if knobs.with_logit_sum:
            grads = grads._replace(logit_sum=grads.logit_sum.masked_fill(is_ignored, 0))
        if not knobs.keeps_ignored_rows:
            # exp(z - inf) is 0, so whatever their logits, these rows get no gradient.
            lse = lse.masked_fill(is_ignored, torch.inf)
    # The scale is the last factor of every term, so it goes into the cotangents, N elements each.
    on_probability = ((grads.nll + grads.lse) * knobs.scale).unsqueeze(1)
    on_target = grads.nll * knobs.scale
    on_sum = grads.logit_sum * knobs.scale
    on_entropy = (grads.entropy * knobs.scale).unsqueeze(1)

    wide_hidden, target = hidden.to(wide), target.long()
    grad_hidden = torch.zeros_like(wide_hidden) if needs_hidden else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if needs_bias and bias is not None else None
    wide_low, grad_low, grad_up = None if low is None else low.to(wide), None, None
    if low is not None and up is not None:
        needs_low, needs_up = needs_low_rank
        grad_low = torch.zeros_like(low, dtype=wide) if needs_low else None
        grad_up = torch.empty_like(up) if needs_up else None
    buffer = wide_hidden.new_empty(hidden.shape[0] * min(width, vocab))
    slopes = torch.empty_like(buffer) if knobs.softcap > 0 else None
    slants = torch.empty_like(buffer) if knobs.with_entropy else None
    columns = None if column_weight is None else column_weight.to(wide)

    for first, stop in spans(0, vocab, width):
        wide_weight = weight[first:stop].to(wide)
        g = window(buffer, hidden.shape[0], stop - first)
        wide_up = _widened(up, first, stop, wide)
        _scaled_products((wide_hidden, wide_weight, wide_up, wide_low), bias, first, knobs, g)
        if slopes is not None:
            slope = window(slopes, hidden.shape[0], stop - first)
            g.div_(knobs.softcap).tanh_()
            torch.mul(g, g, out=slope).neg_().add_(1)
            g.mul_(knobs.softcap)
        g.sub_(lse.unsqueeze(1))
        if slants is None:
            g.exp_().mul_(on_probability)
        else:
            # dH/dz = -p (log p + H), so p times (on_probability - on_entropy (log p + H))
            slant = window(slants, hidden.shape[0], stop - first)
            g.clamp_(min=LOG_ZERO)
            torch.add(g, entropy.unsqueeze(1), out=slant).mul_(on_entropy).neg_()
            g.exp_().mul_(slant.add_(on_probability))
        _subtract_at_target(g, target - first, on_target)
        if knobs.with_logit_sum:
            ones = g.new_ones(1).expand(stop - first)
            g.addr_(on_sum, ones if columns is None else columns[first:stop])
        if slopes is not None:
            g.mul_(slope)
        if grad_bias is not None:
            grad_bias[first:stop] = g.sum(0)
        if low is None or low.dtype == narrow:  # an adapter of a wide dtype has them unrounded
            _round(g, narrow)
        if grad_up is not None and wide_low is not None:
            _product_into(g.t(), wide_low, grad_up[first:stop])
        if grad_low is not None and wide_up is not None:
            grad_low.addmm_(g, wide_up)
        if low is not None and low.dtype != narrow:
            _round(g, narrow)
        if grad_weight is not None:
            _product_into(g.t(), wide_hidden, grad_weight[first:stop])
        if grad_hidden is not None:
            grad_hidden.addmm_(g, wide_weight)

    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(narrow)
        if kept is not None:
            grad_hidden = _spread(grad_hidden, kept, rows)
    if low is None:
        return grad_hidden, grad_weight, grad_bias
    if grad_low is not None:
        grad_low = grad_low.to(low.dtype)
        if kept is not None:
            grad_low = _spread(grad_low, kept, rows)
    return grad_hidden, grad_weight, grad_bias, grad_low, grad_up


def kept_rows(target: Tensor, knobs: Knobs, *, forward: bool) -> Tensor | None:
    """Return the rows to compute on a CPU, or None where all of them are.

    Some statistics are wanted of ignored rows too. On a GPU counting rows would wait for it.
    """
    wants_all = knobs.reads_ignored_rows if forward else knobs.keeps_ignored_rows
    if wants_all or knobs.ignore_index is None or target.device.type != "cpu":
        return None
    is_kept = target != knobs.ignore_index
    return None if bool(is_kept.all()) else is_kept.nonzero().squeeze(1)


def _spread(part: Tensor, kept: Tensor, rows: int) -> Tensor:
    """Put what belongs to the kept rows among `rows` rows of zeros."""
    whole = part.new_zeros((rows, *part.shape[1:]))
    whole[kept] = part
    return whole


def _statistics(given: Operands, knobs: Knobs, width: int) -> Rows:
    """Walk the vocabulary once, keeping each row's maximum and sums relative to it."""
    hidden, weight, bias, target, column_weight, low, up = given
    rows = hidden.shape[0]
    peak = hidden.new_full((rows,), -torch.inf)
    mass, total, moment = (hidden.new_zeros(rows) for _ in range(3))
    top = target.new_zeros(rows)
    target_logit = hidden.new_full((rows,), torch.nan)
    buffer = hidden.new_empty(rows * min(width, weight.shape[0]))
    raised = torch.empty_like(buffer) if knobs.with_entropy else None
    columns = None if column_weight is None else column_weight.to(hidden.dtype)
    for first, stop in spans(0, weight.shape[0], width):
        z = window(buffer, rows, stop - first)
        # No names: what is widened of a piece is freed before the next one is.
        _scaled_products(
            (hidden, *(_widened(w, first, stop, hidden.dtype) for w in (weight, up)), low),
            *(bias, first, knobs, z),
        )
        if knobs.softcap > 0:
            z.div_(knobs.softcap).tanh_().mul_(knobs.softcap)
        is_here, column = _column(target - first, stop - first)
        target_logit = torch.where(is_here, z.gather(1, column).squeeze(1), target_logit)
        if knobs.with_logit_sum:
            total += z.sum(1) if columns is None else z @ columns[first:stop]
        if knobs.with_top:
            largest, at = z.max(1)
            # nan counts as the largest, as in torch.max, and so stays in `peak`
            wins = (largest > peak) | (largest.isnan() & ~peak.isnan())
            top = torch.where(wins, at + first, top)
            higher = torch.maximum(peak, largest)
        else:
            higher = torch.maximum(peak, z.amax(1))
        base = higher.masked_fill(higher == -torch.inf, 0)  # a row of -inf so far
        z.sub_(base.unsqueeze(1))
        shift = (peak - base).masked_fill_(peak == -torch.inf, 0)
        shrink = shift.exp()
        if raised is not None:
            # sum of exp(z - base) * (z - base): never positive, so nothing cancels in the entropy
            power = torch.exp(z.clamp_(min=LOG_ZERO), out=window(raised, rows, stop - first))
            moment = shrink * (moment + shift * mass) + z.mul_(power).sum(1)
            mass = mass * shrink + power.sum(1)
        else:
            mass = mass * shrink + z.exp_().sum(1)
        peak = higher
    log_mass = mass.log()
    return Rows(
        # (peak - z_t) + log(mass) rather than lse - z_t: no cancellation for a confident target.
        nll=(peak - target_logit) + log_mass,
        lse=peak + log_mass,
        logit_sum=total if knobs.with_logit_sum else total.new_empty(0),
        entropy=log_mass - moment / mass if knobs.with_entropy else moment.new_empty(0),
        top=top if knobs.with_top else top.new_empty(0),
    )


def _width(dtype: torch.dtype, rows: int, weight: Tensor, knobs: Knobs, *, forward: bool) -> int:
    """Choose the piece's width by the number of all rows, ignored ones included."""
    per_logit = reference_bytes_per_logit(
        dtype.itemsize, knobs.softcap > 0, not forward, knobs.with_entropy
    )
    return reference_width(rows, weight.shape[0], knobs.workspace, per_logit, weight.device.type)


def _scaled_products(
    given: Sequence[Any],  # hidden, weight, up and low, in a wide dtype
    bias: Tensor | None,
    first: int,
    knobs: Knobs,
    out: Tensor,
) -> None:
    """Write u = scale * (hidden @ weight.T + low @ up.T + bias) of one piece into `out`."""
    hidden, weight, up, low = given
    torch.mm(hidden, weight.t(), out=out)
    if low is not None:
        out.addmm_(low, up.t())
    if bias is not None:
        out.add_(bias[first : first + out.shape[1]])
    if knobs.scale != 1:
        out.mul_(knobs.scale)


def _column(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Say which rows have their target in this piece, and give a column safe to index with."""
    is_here = (column >= 0) & (column < width)
    return is_here, column.clamp(0, width - 1).unsqueeze(1)


def _subtract_at_target(g: Tensor, column: Tensor, amount: Tensor) -> None:
    """Subtract `amount` at each row's target where it lies in this piece."""
    is_here, safe = _column(column, g.shape[1])
    at_target = g.gather(1, safe).squeeze(1)
    g.scatter_(1, safe, torch.where(is_here, at_target - amount, at_target).unsqueeze(1))


def _widened(part: Tensor | None, first: int, stop: int, dtype: torch.dtype) -> Tensor | None:
    return None if part is None else part[first:stop].to(dtype)


def _round(g: Tensor, dtype: torch.dtype) -> None:
    """Round numbers of a wide dtype to those of another, in place."""
    if g.dtype != dtype:
        g.copy_(g.to(dtype))


def _product_into(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left @ right into `out`, rounding once if `out` is narrower."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)
