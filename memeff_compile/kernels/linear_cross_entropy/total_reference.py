"""The total and its gradients in plain PyTorch, piece by piece over the rows; any device.

A piece of rows meets the whole vocabulary: its logits are made once, in fp32 or fp64, become row
statistics, then the gradient of the logits in place, then two products. Where ranks have parts of
the vocabulary, they meet once per piece, between the two. The gradient of the weight
is summed over the pieces in that wide dtype. Rows with an ignored target are left out on a CPU,
where looking at targets costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sympy
import torch
from torch import Tensor

from .. import checks
from .call import Knobs, Operands
from .pieces import REFERENCE_AUTO_BYTES, REFERENCE_AUTO_BYTES_ELSEWHERE, spans
from .ranks import Ranks, counted_first
from .reference import kept_rows

# Rows of the narrowest piece: the weight is read once per piece.
MIN_ROWS = 64


def rows_per_piece(
    rows: sympy.Expr | int, vocab: int, bytes_per_logit: int, workspace: int, device_type: str
) -> sympy.Expr:
    """Return how many rows of wide logits live at once, at most half; workspace 0 is automatic."""
    budget = workspace or REFERENCE_AUTO_BYTES.get(device_type, REFERENCE_AUTO_BYTES_ELSEWHERE)
    fitting = max(budget // (bytes_per_logit * vocab), 1 if workspace else MIN_ROWS)
    return sympy.Min(fitting, sympy.ceiling(sympy.sympify(rows) / 2))


class Loss(NamedTuple):
    """What the op is called with, as engines get it: its rows flat, and at least one."""

    hidden: Tensor  # (N, D) of any floating dtype
    weight: Tensor  # (V, D), any strides
    bias: Tensor | None  # (V,) or None
    target: Tensor  # (N,) int32 or int64
    row_weight: Tensor | None  # (N,) or None
    norm: Tensor | None  # a number or None
    # ignore_index, scale, softcap, workspace: as in the schema
    ignore_index: int | None
    scale: float
    softcap: float
    workspace: int
    output_mask: Sequence[bool]  # which gradients are asked for: of hidden, weight and bias
    # as for `linear_cross_entropy`; engines but T leave nothing out
    gradient_filter: str = "exact"
    filter_level: float = 0.0
    sort_vocabulary: bool = False
    # who has the other classes; targets are then as `ranks` says
    ranks: Ranks | None = None
    low: Tensor | None = None  # (N, R), as of `Operands`, and the mask is then of five
    up: Tensor | None = None  # (V, R), likewise

    @property
    def operands(self) -> Operands:
        """The tensors as engines of rows take them."""
        return Operands(*self[:4], None, self.low, self.up)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the total."""
        return checks.wide(self.hidden.dtype)

    @property
    def knobs(self) -> Knobs:
        """The settings as engines of rows take them."""
        knobs = Knobs(*self[6:9], False, False, self.gradient_filter, self.workspace)
        return knobs._replace(filter_level=self.filter_level, sort_vocabulary=self.sort_vocabulary)

    def row_gradients(self, dtype: torch.dtype) -> Tensor:
        """Return what the gradient of each row's loss is times: its weight over the norm, or 0.

        An ignored row has 0 whatever the norm, which is 0 where all of them are.
        """
        target, weight = self.target, self.row_weight
        factors = torch.ones_like(target, dtype=dtype) if weight is None else weight.to(dtype)
        if self.norm is not None:
            factors = factors / self.norm
        ignored = None if self.ignore_index is None else target.eq(self.ignore_index)
        return factors if ignored is None else factors.masked_fill(ignored, 0)


class Totals(NamedTuple):
    """What an engine returns: the number, and the gradients that were asked for."""

    total: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def total_of(nll: Tensor, row_weight: Tensor | None, norm: Tensor | None) -> Tensor:
    """Return the weighted sum of the rows' losses over the norm."""
    total = (nll if row_weight is None else nll * row_weight.to(nll.dtype)).sum()
    return total if norm is None else total / norm


def run(given: Loss) -> Totals:
    """Compute the total and the gradients that are asked for."""
    hidden, weight, bias, target, row_weight, norm, ignore_index, scale, softcap, *_ = given
    needs_hidden, needs_weight, needs_bias = given.output_mask
    rows, vocab, wide = hidden.shape[0], weight.shape[0], given.wide
    factors = given.row_gradients(wide)
    nll = hidden.new_zeros(rows, dtype=wide)
    grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
    sums = torch.zeros_like(weight, dtype=wide) if needs_weight else None
    bias_sums = None
    if needs_bias and bias is not None:
        bias_sums = torch.zeros_like(bias, dtype=wide)
    ranks, kept = given.ranks, kept_rows(target, given.knobs, forward=True)
    counted, is_left_out = rows if kept is None else kept.numel(), kept is not None
    if ranks is not None and kept is None and ignore_index is not None:
        kept = counted_first(target)
    if ranks is None:
        per_logit = wide.itemsize * (1 + (softcap > 0))
        height = int(rows_per_piece(rows, vocab, per_logit, given.workspace, weight.device.type))
    else:
        height = ranks.height
    buffer = hidden.new_empty(min(height, counted), vocab, dtype=wide)
    # Ranks meet as often whatever their targets: also over pieces of which no row counts.
    for first, stop in spans(0, counted if ranks is None else rows, height):
        here = slice(first, stop) if kept is None else kept[first:stop]
        x, y = hidden[here].to(wide), target[here].long().unsqueeze(1)
        g = buffer[: x.shape[0]]
        for start, end in _columns(weight, wide, height):
            torch.mm(x, weight[start:end].to(wide).t(), out=g[:, start:end])
        if bias is not None:
            g.add_(bias)
        g.mul_(scale)
        slope = None
        if softcap > 0:
            g.div_(softcap).tanh_()
            slope = g.square().neg_().add_(1)
            g.mul_(softcap)
        is_ignored = None if ignore_index is None else y == ignore_index
        y = y if is_ignored is None else y.masked_fill(is_ignored, 0)
        has_target = y >= 0  # unless another rank has it
        y = y.where(has_target, 0)
        peak = g.amax(1, keepdim=True)
        base = peak.masked_fill(peak == -torch.inf, 0)  # a row of -inf
        at_target = g.gather(1, y)
        mass = g.sub_(base).exp_().sum(1, keepdim=True)
        # (peak - z_t) + log(mass) rather than lse - z_t: no cancellation for a confident target.
        losses = (base - at_target) + mass.log()
        factor = factors[here].unsqueeze(1)
        if is_ignored is not None:
            losses = losses.masked_fill(is_ignored, 0)
        if ranks is None:
            g.div_(mass)
        else:
            given_here = base + mass.log(), losses.where(has_target, 0)
            losses, share = _met(ranks, here, *given_here, stop - first)
            # What has no mass, as where all classes of this rank are at -inf, has no share either.
            g.mul_((share / mass).masked_fill((mass == 0) & (share == 0), 0))
            if is_ignored is not None:
                losses = losses.masked_fill(is_ignored, 0)
        nll[here] = losses.squeeze(1)
        g.scatter_(1, y, g.gather(1, y) - has_target.to(wide)).mul_(factor * scale)
        if slope is not None:
            g.mul_(slope)
        if is_ignored is not None and not is_left_out:
            g.masked_fill_(is_ignored, 0)  # also where a row of nan was to be left out
        if sums is not None:
            sums.addmm_(g.t(), x)
        if bias_sums is not None:
            bias_sums.add_(g.sum(0))
        if grad_hidden is not None:
            part = torch.zeros_like(x)
            for start, end in _columns(weight, wide, height):
                part.addmm_(g[:, start:end], weight[start:end].to(wide))
            grad_hidden[here] = part.to(hidden.dtype)
    return Totals(
        total_of(nll, row_weight, norm),
        grad_hidden,
        None if sums is None else sums.to(weight.dtype),
        None if bias_sums is None or bias is None else bias_sums.to(bias.dtype),
    )


def _met(
    ranks: Ranks, here: Tensor | slice, lse: Tensor, nll: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Return losses of the whole head, and what this rank's classes have of its softmax."""
    whole, losses = ranks.meet(lse.squeeze(1), nll.squeeze(1), ranks.owner[here], rows)
    return losses.unsqueeze(1), (lse - whole.unsqueeze(1)).exp()


def _columns(weight: Tensor, wide: torch.dtype, height: int) -> list[tuple[int, int]]:
    """Cut a weight that has to be widened into pieces about as large as the logits' buffer."""
    vocab, depth = weight.shape
    if weight.dtype == wide:
        return [(0, vocab)]
    return list(spans(0, vocab, max(MIN_ROWS, height * vocab // max(depth, 1))))
