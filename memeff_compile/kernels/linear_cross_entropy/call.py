"""A call as every engine has it: what it is given and asked for, and what the engine returns.

Axis letters as in `pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..checks import wide


class Knobs(NamedTuple):
    """The settings of one call that every engine reads; meanings and defaults as in the schema.

    A row with an ignored target is still computed where a statistic that does not depend on the
    target is asked for, as it would be in eager PyTorch.
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
        """Which of the results in `Rows` are asked for."""
        return (True, True, self.with_logit_sum, self.with_entropy, self.with_top)

    @property
    def keeps_ignored_rows(self) -> bool:
        """Whether ignored rows have an lse that counts, so that they may get a gradient."""
        return self.with_lse or self.with_entropy

    @property
    def reads_ignored_rows(self) -> bool:
        """Whether forward has to look at the logits of ignored rows."""
        return self.keeps_ignored_rows or self.with_top


class Operands(NamedTuple):
    """What every engine computes with. An op takes any leading dimensions in the place of N."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,) or None
    target: Tensor  # (N,) int32 or int64
    column_weight: Tensor | None = None  # (V,) or None
    # A head that is a sum, hidden @ weight.T + low @ up.T: (N, R) and (V, R) in the dtype of hidden
    # or in its wide one, or None
    low: Tensor | None = None
    up: Tensor | None = None

    def flat(self) -> Operands:
        """Return them with all rows in one axis."""
        rows = self.target.numel()
        hidden = self.hidden.reshape(rows, self.hidden.shape[-1])
        low = None if self.low is None else self.low.reshape(rows, self.low.shape[-1])
        return self._replace(hidden=hidden, target=self.target.reshape(rows), low=low)

    @property
    def trained(self) -> tuple[Tensor | None, ...]:
        """What may have a gradient, in the order of an engine's results."""
        of_head = self.hidden, self.weight, self.bias
        return of_head if self.low is None else (*of_head, self.low, self.up)

    def flags(self, knobs: Knobs) -> dict[str, bool]:
        """Return what the kernels are told at compile time of what there is to be computed."""
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_COLUMN_WEIGHT": self.column_weight is not None,
            "HAS_SOFTCAP": knobs.softcap > 0,
            "WITH_LOGIT_SUM": knobs.with_logit_sum,
            "WITH_ENTROPY": knobs.with_entropy,
        }


class Rows(NamedTuple):
    """What an engine's forward returns: one element per row each, or (0,) where not asked for.

    No two of them share memory.
    """

    nll: Tensor  # fp32 or fp64; 0 in ignored rows
    lse: Tensor  # fp32 or fp64; 0 in ignored rows unless knobs.keeps_ignored_rows
    logit_sum: Tensor  # fp32 or fp64; 0 in ignored rows
    entropy: Tensor  # fp32 or fp64; of every row
    top: Tensor  # int64; of every row

    @classmethod
    def new(
        cls, like: Tensor, shape: Sequence[int], knobs: Knobs, *, of_zeros: bool = False
    ) -> Rows:
        """Allocate them beside a tensor of inputs."""
        new = like.new_zeros if of_zeros else like.new_empty
        asked = zip(knobs.wanted, (*4 * [wide(like.dtype)], torch.int64), strict=True)
        return cls(*(new(shape if wanted else (0,), dtype=dtype) for wanted, dtype in asked))


class RowGradients(NamedTuple):
    """What an engine's backward is given: a cotangent per row for each differentiable result.

    fp32 or fp64; (0,) where the result was not asked for.
    """

    nll: Tensor
    lse: Tensor
    logit_sum: Tensor
    entropy: Tensor


class Kept(NamedTuple):
    """What an engine's backward is given of its forward's results."""

    lse: Tensor  # (N,)
    entropy: Tensor  # (N,), or (0,) where it was not asked for


Gradients: TypeAlias = tuple[Tensor | None, ...]
"""Of hidden (N, D), of weight, laid out like it, and of bias (V,); of low (N, R) and up (V, R)
where there are such. None where not asked for."""


def vector(values: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a vector over the vocabulary as the kernels read it."""
    return None if values is None else values.to(dtype or values.dtype).contiguous()
