"""The arguments and the results of every implementation of a loss op.

For a loss per row (token), `forward` takes `Operands` and `Settings` and returns `RowResults`.
`backward` also takes `RowGradients` and `Saved`, and returns `Gradients`. For a scalar loss, the
arguments are a `ScalarLoss` and the result is a `LossAndGradients`. The module `shapes` explains
the letters that stand for axes, such as N for rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import compat
from ...errors import TargetRangeError
from ..checks import wide
from .ranks import Ranks


class Settings(NamedTuple):
    """The settings of a call of a loss op, with the names of the op's arguments.

    As in eager PyTorch, a row with an ignored target has a log-sum-exp, an entropy and a most
    likely class too. The op computes these results if the caller requests them.
    """

    ignore_index: int | None
    scale: float
    softcap: float
    with_lse: bool
    with_logit_sum: bool
    gradient_filter: str
    workspace: int
    with_entropy: bool = False
    with_top: bool = False
    filter_level: float = 0.0
    filter_parts: str = "both"
    sort_vocabulary: bool = False

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Return one flag per result of the forward pass: whether the call computes this result.

        The flags have the order of the fields of `RowResults`: a row's (token's) loss, log-sum-exp,
        sum of logits, entropy and most likely class. The first two flags are always true.
        """
        return (True, True, self.with_logit_sum, self.with_entropy, self.with_top)

    def served(self) -> Settings:
        """Return the settings of a call, without a gradient filter if a requested result does not
        allow a filter.

        A gradient filter drops classes whose logits have small gradients. For label smoothing, for
        example, the caller requests the sum of each row's logits. Every class then has a gradient,
        so the filter may drop no class.
        """
        is_exact = self.with_logit_sum or self.with_entropy or self.with_top
        return self._replace(gradient_filter="exact") if is_exact else self

    @property
    def keeps_ignored_rows(self) -> bool:
        """Return whether the caller gets the log-sum-exp of rows whose target is `ignore_index`.

        This log-sum-exp can then have a gradient."""
        return self.with_lse or self.with_entropy

    @property
    def reads_ignored_rows(self) -> bool:
        """Return whether the forward pass needs logits of rows whose target is `ignore_index`."""
        return self.keeps_ignored_rows or self.with_top


class Operands(NamedTuple):
    """The tensor arguments of a call of a loss op. The op accepts any leading dimensions in place
    of N (rows).
    """

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,) or None
    target: Tensor  # (N,) int32 or int64
    column_weight: Tensor | None = None  # (V,) or None
    # For an output projection that is a sum, hidden @ weight.T + low @ up.T: (N, R) and (V, R) in
    # the dtype of hidden or in the dtype of sums, or None
    low: Tensor | None = None
    up: Tensor | None = None

    def flat(self) -> Operands:
        """Return the operands with all leading dimensions flattened into one."""
        rows = self.target.numel()
        hidden = self.hidden.reshape(rows, self.hidden.shape[-1])
        low = None if self.low is None else self.low.reshape(rows, self.low.shape[-1])
        return self._replace(hidden=hidden, target=self.target.reshape(rows), low=low)

    @property
    def trained(self) -> tuple[Tensor | None, ...]:
        """Return the operands that can have a gradient.

        The operands are the hidden states, the weight, the bias, `low` and `up`, in this order. The
        output projection is `hidden @ weight.T + low @ up.T`, plus the bias. Operands that a call
        does not have are None.
        """
        return self.hidden, self.weight, self.bias, self.low, self.up

    def flags(self, settings: Settings) -> dict[str, bool]:
        """Return the compile-time constants that tell a kernel which optional terms, such as a bias
        or a softcap, a call has."""
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_COLUMN_WEIGHT": self.column_weight is not None,
            "HAS_SOFTCAP": settings.softcap > 0,
            "WITH_LOGIT_SUM": settings.with_logit_sum,
            "WITH_ENTROPY": settings.with_entropy,
        }


class RowResults(NamedTuple):
    """The results of a loss op's forward pass.

    Each result has one element per row (token), or shape (0,) if the caller did not request it.

    These result tensors share no memory.
    """

    nll: Tensor  # fp32 or fp64; 0 in ignored rows
    lse: Tensor  # fp32 or fp64; 0 in ignored rows unless settings.keeps_ignored_rows
    logit_sum: Tensor  # fp32 or fp64; 0 in ignored rows
    entropy: Tensor  # fp32 or fp64; of every row
    top: Tensor  # int64; of every row

    @classmethod
    def new(
        cls, like: Tensor, shape: Sequence[int], settings: Settings, *, of_zeros: bool = False
    ) -> RowResults:
        """Allocate the tensors for the results of a call, on the device of an input."""
        new = like.new_zeros if of_zeros else like.new_empty
        asked = zip(settings.wanted, (*4 * [wide(like.dtype)], torch.int64), strict=True)
        return cls(*(new(shape if wanted else (0,), dtype=dtype) for wanted, dtype in asked))


class RowGradients(NamedTuple):
    """The gradients of the training loss with respect to a loss op's differentiable results.

    Each gradient has one fp32 or fp64 number per row (token). For a result that the caller did not
    request, the gradient has the shape (0,).
    """

    nll: Tensor
    lse: Tensor
    logit_sum: Tensor
    entropy: Tensor


class Saved(NamedTuple):
    """The results of a loss op's forward pass that its backward pass reads."""

    lse: Tensor  # (N,)
    entropy: Tensor  # (N,), or (0,) if it was not requested


class Gradients(NamedTuple):
    """The gradients of a loss op's operands. Those that the caller did not request are None."""

    hidden: Tensor | None  # (N, D)
    weight: Tensor | None  # (V, D), laid out like the weight
    bias: Tensor | None  # (V,)
    low: Tensor | None = None  # (N, R)
    up: Tensor | None = None  # (V, R)


class ScalarLoss(NamedTuple):
    """The arguments of a call whose loss is a single number: the weighted sum of all rows' losses,
    divided by the op's argument `norm`.
    """

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
    output_mask: Sequence[bool]  # which gradients are requested: of hidden, weight and bias
    # as for `linear_cross_entropy`
    gradient_filter: str = "exact"
    filter_level: float = 0.0
    sort_vocabulary: bool = False
    # the ranks that have the other classes; targets are then columns, IGNORED or ELSEWHERE
    ranks: Ranks | None = None
    low: Tensor | None = None  # (N, R), as of `Operands`, and the mask is then of five
    up: Tensor | None = None  # (V, R), likewise

    @property
    def operands(self) -> Operands:
        """Return the tensors from which the logits are computed, and the targets, as `Operands`."""
        return Operands(*self[:4], None, self.low, self.up)

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype in which the total loss is summed."""
        return wide(self.hidden.dtype)

    @property
    def settings(self) -> Settings:
        """Return the settings of this loss as `Settings`."""
        settings = Settings(*self[6:9], False, False, self.gradient_filter, self.workspace)
        return settings._replace(
            filter_level=self.filter_level, sort_vocabulary=self.sort_vocabulary
        )

    def flat(self) -> ScalarLoss:
        """Return a copy of the arguments in which all leading dimensions of the tensors are
        flattened into one.

        The result's `output_mask`, which says for each operand whether its gradient is requested,
        has no entry for operands that are None.
        """
        operands, row_weight = self.operands.flat(), self.row_weight
        asked = zip(self.output_mask, operands.trained, strict=False)
        return self._replace(
            hidden=operands.hidden,
            target=operands.target,
            row_weight=None if row_weight is None else row_weight.reshape(operands.target.numel()),
            low=operands.low,
            output_mask=tuple(wanted and part is not None for wanted, part in asked),
        )

    def row_gradients(self, dtype: torch.dtype) -> Tensor:
        """Return the factor of each row's loss in the total: the row's weight divided by `norm`, or
        0 if the row is ignored.

        `norm` is the number by which the total loss is divided. Without `norm`, the weights are not
        divided. The factor of an ignored row is 0 even if `norm` is 0, which occurs if all rows are
        ignored.
        """
        target, weight = self.target, self.row_weight
        factors = torch.ones_like(target, dtype=dtype) if weight is None else weight.to(dtype)
        if self.norm is not None:
            factors = factors / self.norm
        ignored = None if self.ignore_index is None else target.eq(self.ignore_index)
        return factors if ignored is None else factors.masked_fill(ignored, 0)

    def total_of(self, nll: Tensor) -> Tensor:
        """Return the total loss: the weighted sum of the rows' losses `nll`, divided by `norm`.

        `norm` is the number that the loss op's caller passed. Without `norm`, the sum is not
        divided.
        """
        row_weight, norm = self.row_weight, self.norm
        total = (nll if row_weight is None else nll * row_weight.to(nll.dtype)).sum()
        return total if norm is None else total / norm


class LossAndGradients(NamedTuple):
    """The total loss of a loss op, and the gradients of the op's operands.

    The operands are the hidden states, the weight, the bias, `low` and `up`. `low` and `up` are the
    operands of a second product in the output projection (`Operands`). Gradients that the caller
    did not request are None.
    """

    total: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    grad_low: Tensor | None = None
    grad_up: Tensor | None = None


def vector(values: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a vector over the vocabulary as a contiguous tensor, cast to `dtype` unless `dtype` is
    None.
    """
    return None if values is None else values.to(dtype or values.dtype).contiguous()


def check_range(target: Tensor, vocab: int, ignore_index: int | None) -> None:
    """Raise an error for targets outside of the vocabulary; on CUDA, a device assertion fails
    instead."""
    is_valid = (target >= 0) & (target < vocab)
    if ignore_index is not None:
        is_valid |= target == ignore_index
    if target.device.type == "cuda":
        compat.assert_on_device(
            is_valid.all(),
            f"linear_cross_entropy: a target is outside 0 .. {vocab - 1} and is not ignore_index "
            f"({ignore_index})",
        )
        return
    if not bool(is_valid.all()):
        row = int((~is_valid).nonzero()[0])
        rest = ". Fix the index."
        if ignore_index is not None:
            rest = f" and ignore_index is {ignore_index}. Fix the labels, or pass that value as "
            rest += "ignore_index."
        raise TargetRangeError(
            f"linear_cross_entropy: target holds {int(target[row])} (row {row}); columns run from "
            f"0 to {vocab - 1}{rest}"
        )


def zero_gradients(given: Operands, mask: Sequence[bool]) -> Gradients:
    """Return the requested gradients for an input without rows."""
    asked = zip(given.trained, mask, strict=False)
    return Gradients(
        *(torch.zeros_like(each) if wanted and each is not None else None for each, wanted in asked)
    )


def as_results(gradients: Sequence[Tensor | None], given: Operands) -> tuple[Tensor, ...]:
    """Return gradients in the form in which an op returns them: in the operands' shapes, with an
    empty tensor in place of None."""
    found: list[Tensor] = []
    for part, of in zip(gradients, given.trained, strict=True):
        if part is None or of is None:
            found.append(given.hidden.new_empty(0))
        else:  # rows are flat in engines
            found.append(part if part.shape == of.shape else part.reshape(of.shape))
    return tuple(found)
