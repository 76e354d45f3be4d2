"""The implementation `reference`: the formula in plain PyTorch, one block at a time, on any device.

For 16-bit and fp32 inputs, matrix products are fp32 and are not rounded before exp. For fp64
inputs, matrix products are fp64. Gradients of the logits are computed in full precision, including
the target's term. For a loss per row, this implementation processes blocks of classes. The
implementation rounds the gradients of the logits once to the input dtype, as the implementation
`library` does. For a scalar loss, this implementation processes blocks of rows. The implementation
computes a block's logits once for the whole vocabulary. From these logits, the implementation
computes each row's statistics. Then the logits' gradient overwrites the logits. The weight's
gradient is summed over the blocks in fp32 (fp64 for fp64 inputs). On a CPU, rows with an ignored
target are left out. On a GPU, these rows are computed too, because reading the targets would make
the CPU wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._head_loss.call import (
    Gradients,
    LossAndGradients,
    Operands,
    RowGradients,
    RowResults,
    Saved,
    ScalarLoss,
    Settings,
)
from .._head_loss.ranks import Ranks, counted_first
from .._head_loss.shapes import spans, window
from .._head_loss.walks import Block, Differentiating, Statistics
from ..checks import wide
from .shapes import (
    REFERENCE_MIN_ROWS,
    reference_bytes_per_logit,
    reference_columns,
    reference_rows,
)
from .walk import kept_rows

# A number whose exp is 0 in fp32 and in fp64. Logarithms of probabilities are cut off at this
# number before they are multiplied by the probabilities, so that an impossible column (-inf) adds 0
# and not nan.
LOG_ZERO = -1000.0


class Forward(Statistics):
    """A forward pass over blocks of classes, which keeps, per row, the largest logit so far and
    sums relative to this logit."""

    def __init__(self, given: Operands, settings: Settings) -> None:
        self.settings, self.rows = settings, given.target.shape[0]
        dtype, self.kept = wide(given.hidden.dtype), kept_rows(given.target, settings, forward=True)
        hidden, target, low = _rows(self.kept, given.hidden, given.target, given.low)
        low = None if low is None else low.to(dtype)
        self.given = given._replace(hidden=hidden.to(dtype), target=target.long(), low=low)
        self.extent = given.weight.shape[0]
        self.step = _width(given.hidden.dtype, self.rows, given.weight, settings, forward=True)
        hidden, rows = self.given.hidden, target.shape[0]
        self.peak = hidden.new_full((rows,), -torch.inf)
        self.mass, self.total, self.moment = (hidden.new_zeros(rows) for _ in range(3))
        self.top = self.given.target.new_zeros(rows)
        self.target_logit = hidden.new_full((rows,), torch.nan)
        self.buffer = hidden.new_empty(rows * min(self.step, self.extent))
        self.raised = torch.empty_like(self.buffer) if settings.with_entropy else None
        columns = given.column_weight
        self.columns = None if columns is None else columns.to(dtype)

    def statistics(self, block: Block) -> None:
        (_, first, stop), settings = block, self.settings
        rows = self.peak.numel()
        z = window(self.buffer, rows, stop - first)
        _scaled_products(self.given, block, settings.scale, z)
        if settings.softcap > 0:
            z.div_(settings.softcap).tanh_().mul_(settings.softcap)
        is_here, column = _column(self.given.target - first, stop - first)
        at_target = z.gather(1, column).squeeze(1)
        self.target_logit = torch.where(is_here, at_target, self.target_logit)
        if settings.with_logit_sum:
            columns = self.columns
            self.total += z.sum(1) if columns is None else z @ columns[first:stop]
        if settings.with_top:
            largest, at = z.max(1)
            # nan counts as the largest, as in torch.max, and so stays in `peak`
            wins = (largest > self.peak) | (largest.isnan() & ~self.peak.isnan())
            self.top = torch.where(wins, at + first, self.top)
            higher = torch.maximum(self.peak, largest)
        else:
            higher = torch.maximum(self.peak, z.amax(1))
        base = higher.masked_fill(higher == -torch.inf, 0)  # a row of -inf so far
        z.sub_(base.unsqueeze(1))
        shift = (self.peak - base).masked_fill_(self.peak == -torch.inf, 0)
        shrink = shift.exp()
        if self.raised is not None:
            # sum of exp(z - base) * (z - base): never positive, so the entropy has no cancellation
            power = torch.exp(z.clamp_(min=LOG_ZERO), out=window(self.raised, rows, stop - first))
            self.moment = shrink * (self.moment + shift * self.mass) + z.mul_(power).sum(1)
            self.mass = self.mass * shrink + power.sum(1)
        else:
            self.mass = self.mass * shrink + z.exp_().sum(1)
        self.peak = higher

    def results(self) -> RowResults:
        settings, target = self.settings, self.given.target
        log_mass, nothing = self.mass.log(), self.mass.new_empty
        found = RowResults(
            # (peak - z_t) + log(mass) rather than lse - z_t: no cancellation for a confident target
            nll=(self.peak - self.target_logit) + log_mass,
            lse=self.peak + log_mass,
            logit_sum=self.total if settings.with_logit_sum else nothing(0),
            entropy=log_mass - self.moment / self.mass if settings.with_entropy else nothing(0),
            top=self.top if settings.with_top else self.top.new_empty(0),
        )
        if self.kept is not None:
            parts = zip(found, settings.wanted, strict=True)
            spread = (_spread(part, self.kept, self.rows) if each else part for part, each in parts)
            return RowResults(*spread)
        if settings.ignore_index is not None:
            is_ignored = target == settings.ignore_index
            found.nll.masked_fill_(is_ignored, 0)
            if settings.with_logit_sum:
                found.logit_sum.masked_fill_(is_ignored, 0)
            if not settings.keeps_ignored_rows:
                found.lse.masked_fill_(is_ignored, 0)
        return found


class _Factors(NamedTuple):
    """The per-row factors of the four terms of the logits' gradient.

    The terms of the gradient are p, 1 at the target, the class weight, and p (log p + entropy).
    Every term must be multiplied by the logits' scale. So the incoming gradients of the op's
    per-row results (N elements each) are multiplied by the scale beforehand.
    """

    probability: Tensor
    target: Tensor
    logit_sum: Tensor
    entropy: Tensor


class Backward(Differentiating):
    """A backward pass over blocks of classes, which computes the logits again."""

    def __init__(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        output_mask: Sequence[bool],
    ) -> None:
        self.settings, self.narrow, self.rows = settings, given.hidden.dtype, len(given.hidden)
        dtype, self.kept = wide(self.narrow), kept_rows(given.target, settings, forward=False)
        self.extent = given.weight.shape[0]
        self.step = _width(self.narrow, self.rows, given.weight, settings, forward=False)
        hidden, target, low = _rows(self.kept, given.hidden, given.target, given.low)
        self.lse, self.entropy = saved
        if self.kept is not None:
            self.lse = self.lse[self.kept]
            parts = zip(grads, settings.wanted, strict=False)
            grads = RowGradients(*(each[self.kept] if asked else each for each, asked in parts))
        elif settings.ignore_index is not None:
            is_ignored = target == settings.ignore_index
            grads = grads._replace(nll=grads.nll.masked_fill(is_ignored, 0))
            if settings.with_logit_sum:
                grads = grads._replace(logit_sum=grads.logit_sum.masked_fill(is_ignored, 0))
            if not settings.keeps_ignored_rows:
                # exp(z - inf) is 0, so ignored rows get no gradient, whatever their logits are.
                self.lse = self.lse.masked_fill(is_ignored, torch.inf)
        scale = settings.scale
        self.factors = _Factors(
            ((grads.nll + grads.lse) * scale).unsqueeze(1),
            grads.nll * scale,
            grads.logit_sum * scale,
            (grads.entropy * scale).unsqueeze(1),
        )
        # For a LoRA adapter of a wide dtype the gradients of the logits are not rounded.
        self.is_apart = low is not None and low.dtype != self.narrow
        wide_low = None if low is None else low.to(dtype)
        self.given = given._replace(hidden=hidden.to(dtype), target=target.long(), low=wide_low)
        of_hidden, of_weight, of_bias, of_low, of_up = (*output_mask, False, False)[:5]
        bias, up = given.bias, given.up
        self.grad_hidden = torch.zeros_like(self.given.hidden) if of_hidden else None
        self.grad_weight = torch.empty_like(given.weight) if of_weight else None
        self.grad_bias = torch.empty_like(bias) if of_bias and bias is not None else None
        self.grad_low = torch.zeros_like(wide_low) if of_low and wide_low is not None else None
        self.grad_up = torch.empty_like(up) if of_up and up is not None else None
        self.low_dtype = None if low is None else low.dtype
        self.buffer = self.given.hidden.new_empty(len(hidden) * min(self.step, self.extent))
        self.slopes = torch.empty_like(self.buffer) if settings.softcap > 0 else None
        self.slants = torch.empty_like(self.buffer) if settings.with_entropy else None
        columns = given.column_weight
        self.columns = None if columns is None else columns.to(dtype)

    def gradients(self, block: Block) -> None:
        (_, first, stop), given = block, self.given
        g = window(self.buffer, len(given.hidden), stop - first)
        weight, up = _scaled_products(given, block, self.settings.scale, g)
        self._differentiate(g, block)
        if self.grad_bias is not None:
            self.grad_bias[first:stop] = g.sum(0)
        if not self.is_apart:
            _round(g, self.narrow)
        if self.grad_up is not None and given.low is not None:
            _product_into(g.t(), given.low, self.grad_up[first:stop])
        if self.grad_low is not None and up is not None:
            self.grad_low.addmm_(g, up)
        if self.is_apart:
            _round(g, self.narrow)
        if self.grad_weight is not None:
            _product_into(g.t(), given.hidden, self.grad_weight[first:stop])
        if self.grad_hidden is not None:
            self.grad_hidden.addmm_(g, weight)

    def _differentiate(self, g: Tensor, block: Block) -> None:
        """Overwrite scaled logits with their gradients, in the same memory."""
        (_, first, stop), settings, factors = block, self.settings, self.factors
        slope = None
        if self.slopes is not None:
            slope = window(self.slopes, *g.shape)
            g.div_(settings.softcap).tanh_()
            torch.mul(g, g, out=slope).neg_().add_(1)
            g.mul_(settings.softcap)
        g.sub_(self.lse.unsqueeze(1))
        if self.slants is None:
            g.exp_().mul_(factors.probability)
        else:
            # dH/dz = -p (log p + H), so p times (on_probability - on_entropy (log p + H))
            slant = window(self.slants, *g.shape)
            g.clamp_(min=LOG_ZERO)
            torch.add(g, self.entropy.unsqueeze(1), out=slant).mul_(factors.entropy).neg_()
            g.exp_().mul_(slant.add_(factors.probability))
        is_here, column = _column(self.given.target - first, stop - first)
        at_target = g.gather(1, column).squeeze(1)
        without = torch.where(is_here, at_target - factors.target, at_target)
        g.scatter_(1, column, without.unsqueeze(1))
        if settings.with_logit_sum:
            ones, columns = g.new_ones(1).expand(stop - first), self.columns
            g.addr_(factors.logit_sum, ones if columns is None else columns[first:stop])
        if slope is not None:
            g.mul_(slope)

    def results(self) -> Gradients:
        grad_hidden, grad_low = self.grad_hidden, self.grad_low
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(self.narrow)
        if grad_low is not None:
            grad_low = grad_low.to(self.low_dtype)
        if self.kept is not None:
            grad_hidden, grad_low = (
                None if each is None else _spread(each, self.kept, self.rows)
                for each in (grad_hidden, grad_low)
            )
        return Gradients(grad_hidden, self.grad_weight, self.grad_bias, grad_low, self.grad_up)


class Total(Statistics, Differentiating):
    """The loss and gradients by blocks of rows: a block's logits are overwritten with
    probabilities, and the probabilities with gradients."""

    def __init__(self, given: ScalarLoss) -> None:
        hidden, weight, bias, target = given[:4]
        self.given, self.dtype, self.ranks = given, given.wide, given.ranks
        self.factors, rows = given.row_gradients(self.dtype), len(hidden)
        self.nll = hidden.new_zeros(rows, dtype=self.dtype)
        of_hidden, of_weight, of_bias = given.output_mask[:3]
        self.grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        self.sums = torch.zeros_like(weight, dtype=self.dtype) if of_weight else None
        self.bias_sums = None
        if of_bias and bias is not None:
            self.bias_sums = torch.zeros_like(bias, dtype=self.dtype)
        self.kept = kept_rows(target, given.settings, forward=True)
        self.leaves_out = self.kept is not None
        counted = rows if self.kept is None else self.kept.numel()
        if self.ranks is None:
            per_logit = self.dtype.itemsize * (1 + (given.softcap > 0))
            sizes = rows, len(weight), per_logit, given.workspace
            self.step = int(reference_rows(*sizes, weight.device.type))
        else:
            self.step = self.ranks.height
            if self.kept is None and given.ignore_index is not None:
                self.kept = counted_first(target)
        # All ranks exchange statistics equally often, whatever the targets: also for blocks in
        # which all rows are ignored.
        self.extent = counted if self.ranks is None else rows
        self.buffer = hidden.new_empty(min(self.step, counted), len(weight), dtype=self.dtype)

    def statistics(self, block: Block) -> None:
        given, weight = self.given, self.given.weight
        here = slice(block.first, block.stop)
        self.here = here if self.kept is None else self.kept[here]
        self.x = given.hidden[self.here].to(self.dtype)
        y = given.target[self.here].long().unsqueeze(1)
        g = self.g = self.buffer[: len(self.x)]
        for start, end in self._columns():
            torch.mm(self.x, weight[start:end].to(self.dtype).t(), out=g[:, start:end])
        if given.bias is not None:
            g.add_(given.bias)
        g.mul_(given.scale)
        self.slope = None
        if given.softcap > 0:
            g.div_(given.softcap).tanh_()
            self.slope = g.square().neg_().add_(1)
            g.mul_(given.softcap)
        ignore_index = given.ignore_index
        self.is_ignored = None if ignore_index is None else y == ignore_index
        y = y if self.is_ignored is None else y.masked_fill(self.is_ignored, 0)
        self.has_target = y >= 0  # unless another rank has it
        self.y = y.where(self.has_target, 0)
        peak = g.amax(1, keepdim=True)
        base = peak.masked_fill(peak == -torch.inf, 0)  # a row of -inf
        at_target = g.gather(1, self.y)
        self.mass = g.sub_(base).exp_().sum(1, keepdim=True)
        self.lse = base + self.mass.log()
        # (peak - z_t) + log(mass) rather than lse - z_t: no cancellation for a confident target.
        losses = (base - at_target) + self.mass.log()
        if self.is_ignored is not None:
            losses = losses.masked_fill(self.is_ignored, 0)
        self.nll[self.here] = losses.squeeze(1)
        self.losses = losses
        if self.ranks is None:
            g.div_(self.mass)

    def meet(self, block: Block, ranks: Ranks) -> None:
        """Compute the losses and probabilities of one block of rows (tokens), over the classes of
        all ranks.

        Each rank has some of the classes. The method merges the rows' log-sum-exps and losses that
        the ranks send each other."""
        own = self.losses.where(self.has_target, 0)
        rows, owner = block.stop - block.first, ranks.owner[self.here]
        whole, losses = ranks.meet(self.lse.squeeze(1), own.squeeze(1), owner, rows)
        losses, share = losses.unsqueeze(1), (self.lse - whole.unsqueeze(1)).exp()
        # If this rank's classes have no mass, because all are at -inf, their probabilities are 0.
        self.g.mul_((share / self.mass).masked_fill((self.mass == 0) & (share == 0), 0))
        if self.is_ignored is not None:
            losses = losses.masked_fill(self.is_ignored, 0)
        self.nll[self.here] = losses.squeeze(1)

    def gradients(self, block: Block) -> None:
        given, g, factor = self.given, self.g, self.factors[self.here].unsqueeze(1)
        at_target = g.gather(1, self.y) - self.has_target.to(self.dtype)
        g.scatter_(1, self.y, at_target).mul_(factor * given.scale)
        if self.slope is not None:
            g.mul_(self.slope)
        if self.is_ignored is not None and not self.leaves_out:
            g.masked_fill_(self.is_ignored, 0)  # also if an ignored row contains nan
        if self.sums is not None:
            self.sums.addmm_(g.t(), self.x)
        if self.bias_sums is not None:
            self.bias_sums.add_(g.sum(0))
        if self.grad_hidden is not None:
            part = torch.zeros_like(self.x)
            for start, end in self._columns():
                part.addmm_(g[:, start:end], given.weight[start:end].to(self.dtype))
            self.grad_hidden[self.here] = part.to(self.grad_hidden.dtype)

    def _columns(self) -> list[tuple[int, int]]:
        """Return the ranges of classes for the matrix products with the weight, one per range.

        If the weight must be converted to a wider dtype, a range's rows of the weight are copied.
        The copy has REFERENCE_MIN_ROWS rows, or more rows if the copy is then no larger than the
        buffer of logits.
        """
        vocab, depth = self.given.weight.shape
        if self.given.weight.dtype == self.dtype:
            return [(0, vocab)]
        return list(spans(0, vocab, max(REFERENCE_MIN_ROWS, self.step * vocab // max(depth, 1))))

    def results(self) -> LossAndGradients:
        weight, bias = self.given.weight, self.given.bias
        grad_weight = None if self.sums is None else self.sums.to(weight.dtype)
        grad_bias = None
        if self.bias_sums is not None and bias is not None:
            grad_bias = self.bias_sums.to(bias.dtype)
        gradients = Gradients(self.grad_hidden, grad_weight, grad_bias)
        return LossAndGradients(self.given.total_of(self.nll), *gradients)


forward, backward, total = Forward, Backward, Total


def _rows(
    kept: Tensor | None, hidden: Tensor, target: Tensor, low: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the hidden states, targets and low-rank inputs (`low`) of the rows with the indices
    `kept`, or of all rows if `kept` is None."""
    if kept is None:
        return hidden, target, low
    return hidden[kept], target[kept], None if low is None else low[kept]


def _spread(part: Tensor, kept: Tensor, rows: int) -> Tensor:
    """Return a tensor with `rows` rows, in which row `kept[i]` is row i of `part`, and all other
    rows are zero."""
    whole = part.new_zeros((rows, *part.shape[1:]))
    whole[kept] = part
    return whole


def _width(dtype: torch.dtype, rows: int, weight: Tensor, given: Settings, *, forward: bool) -> int:
    """Return the number of classes in a block.

    This number depends on the number of all rows, including ignored rows.
    """
    per_logit = reference_bytes_per_logit(
        dtype.itemsize, given.softcap > 0, not forward, given.with_entropy
    )
    return reference_columns(rows, len(weight), given.workspace, per_logit, weight.device.type)


def _scaled_products(
    given: Operands,  # of which hidden and low are wide
    block: Block,
    scale: float,
    out: Tensor,
) -> tuple[Tensor, Any]:
    """Write scale * (hidden @ weight.T + low @ up.T + bias) of a block of classes into `out`.

    The product `low @ up.T` is the output of a LoRA adapter, if the output projection has one. The
    matrix products are computed in the dtype of `out`. Return the block's rows of `weight` and of
    `up`, converted to this dtype.
    """
    here, dtype = slice(block.first, block.stop), out.dtype
    weight = given.weight[here].to(dtype)
    up = None if given.up is None else given.up[here].to(dtype)
    torch.mm(given.hidden, weight.t(), out=out)
    if given.low is not None and up is not None:
        out.addmm_(given.low, up.t())
    if given.bias is not None:
        out.add_(given.bias[here])
    if scale != 1:
        out.mul_(scale)
    return weight, up


def _column(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return which rows have their target in a block of classes, and each row's target index,
    clamped to the block.

    If the target is not in the block, the index is that of the block's first or last class.
    """
    is_here = (column >= 0) & (column < width)
    return is_here, column.clamp(0, width - 1).unsqueeze(1)


def _round(g: Tensor, dtype: torch.dtype) -> None:
    """Round a tensor's numbers to the precision of another dtype; its own dtype does not change."""
    if g.dtype != dtype:
        g.copy_(g.to(dtype))


def _product_into(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left @ right into `out`, and round once if `out` has a narrower dtype."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)
