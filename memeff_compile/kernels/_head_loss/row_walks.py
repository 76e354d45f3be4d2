"""Code shared by all loops over blocks of rows (tokens): it prepares operands for kernels, and adds
up the blocks' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._triton.launch import Launches
from .call import Gradients, Operands, Settings
from .rows import aligned, copy_rows, select_rows, tiles_of
from .shapes import Tiles
from .walks import Differentiating


class RowWalk(Differentiating):
    """A loop over blocks of rows (tokens) for the gradients of hidden states, weight and bias.

    Each block writes its own rows of the hidden states' gradient. For the weight and the bias, the
    loop adds up the contributions of all blocks.
    """

    def __init__(
        self, given: Operands, settings: Settings, output_mask: Sequence[bool], shapes: Tiles
    ) -> None:
        hidden, weight, bias, target, *_ = given
        self.hidden = hidden = aligned(hidden)
        self.weight, self.settings, self.tiling = weight, settings, shapes
        self.bias = None if bias is None else bias.contiguous()
        (self.extent, self.depth), self.vocab = hidden.shape, len(weight)
        self.described: dict[tuple[Any, ...], Any] = {}
        sizes = (*hidden.shape, self.vocab, type(self), tuple(output_mask), settings)
        self.launch = Launches(*sizes, hidden.device, target.dtype)
        self.selection = select_rows(target, settings, self.launch)
        self.is_compact = self.selection.kept is not None
        self.cap = settings.scale, settings.softcap
        self.flags = {
            "HAS_BIAS": bias is not None,
            "HAS_KEPT": self.is_compact,
            "HAS_SOFTCAP": settings.softcap > 0,
        }
        of_hidden, of_weight, of_bias = output_mask[:3]
        self.grad_hidden = self.of_rows(hidden) if of_hidden else None
        self.grad_weight = torch.empty_like(weight) if of_weight else None
        self.bias_sums: Tensor | None = None
        if of_bias and bias is not None:
            self.bias_sums = hidden.new_zeros(self.vocab, dtype=torch.float32)

    def of_rows(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor with the shape of `like`. The first axis of both is rows (tokens).

        If ignored rows are left out, the tensor is filled with zeros, because no kernel writes the
        numbers of these rows.
        """
        new = torch.zeros_like if self.is_compact else torch.empty_like
        return new(like, dtype=dtype)

    def floats(self, *sizes: int) -> Tensor:
        """Return an uninitialized fp32 tensor of the given sizes."""
        return self.hidden.new_empty(sizes, dtype=torch.float32)

    def copy(self, source: Tensor, out: Tensor, order: Tensor | None, **how: Any) -> None:
        """Copy hidden states of the rows (tokens) that the call computes.

        Rows whose target is `ignore_index` are left out, unless a result other than the loss needs
        them. `order` contains the index of the source row of each copied row. If `order` is None,
        the rows keep their order. `how` contains further arguments of `copy_rows`, such as `scale`,
        a factor for each row.
        """
        copy_rows(source, out, self.tiling, order, self.selection.kept, launch=self.launch, **how)

    def tiles_of(self, matrix: Tensor, rows: int, columns: int, describe: Any = tiles_of) -> Any:
        """Return a tensor descriptor, with which the GPU loads tiles of a given shape from a
        matrix.

        The method makes the descriptor once. Later calls, for other blocks of rows (tokens), get
        the same descriptor."""
        key = id(matrix), rows, columns, describe
        if key not in self.described:
            self.described[key] = describe(matrix, rows, columns)  # holds the matrix
        return self.described[key]

    def made(self) -> Gradients:
        """Return the gradients that the caller of the loss op requested.

        Call this method after the last block of rows."""
        sums = self.bias_sums
        of_bias = None if sums is None else sums.to(self.bias)
        return Gradients(self.grad_hidden, self.grad_weight, of_bias)
