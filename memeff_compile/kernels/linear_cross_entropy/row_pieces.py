"""Engine F's backward by pieces of rows: G of R rows meets the whole vocabulary.

It computes what `fused.backward` does, with the buffers and the products of engine T: a piece of G
is written by engine F's kernel and multiplied by the kernel that loads with a warp of its own. dE
of a piece is complete, so no fp32 sums of it are kept; dC is added up over the pieces in the input
dtype, as in engine T. That is faster and takes more memory, so it serves the automatic workspace.
A filter leaves tiles of G out of the products (`selected.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton import compat as triton_compat
from .._triton.launch import run_kernel
from ..device import on_device
from . import fused, selected, total_fused
from .call import Gradients, Kept, Knobs, Operands, RowGradients, vector
from .pieces import spans
from .rows import gather


def serves(hidden: Tensor, weight: Tensor, knobs: Knobs) -> bool:
    """Say whether the rows of a backward that engine F serves are best taken in pieces."""
    sizes = hidden.shape[1], weight.shape[0], 0
    is_filtered = selected.leaves_out(knobs.gradient_filter, *sizes)
    if knobs.workspace or hidden.dtype not in total_fused.DTYPES:
        return False
    return is_filtered or triton_compat.has_gluon()


def backward(
    grads: RowGradients, given: Operands, kept: Kept, knobs: Knobs, output_mask: Sequence[bool]
) -> Gradients:
    """Compute the gradients of hidden, weight and bias that `output_mask` asks for."""
    with on_device(given.hidden):
        walk = _Backward(given, knobs, output_mask)
        walk.read(grads, given, kept)
        for index, (first, stop) in enumerate(spans(0, walk.rows, walk.height)):
            walk.piece(index, first, stop - first)
        return walk.gradients()


class _Backward(total_fused.Walk):
    """The walk whose X is G itself, with a factor of 1 per row."""

    tallest = total_fused.AGAIN_BYTES

    def read(self, grads: RowGradients, given: Operands, kept: Kept) -> None:
        """Gather what the gradients of the logits are made of."""
        values = fused.row_values(grads, kept, self.selection, self.knobs)
        column_weight = vector(given.column_weight, torch.float32)
        self.given = (self.bias, column_weight, self.selection.target, values)
        self.asked = given.flags(self.knobs)
        self.row_scale.fill_(1.0)
        self.gathered: Tensor | None = None
        if self.is_compact:
            self.gathered = self.hidden.new_empty((self.height, self.depth))

    def piece(self, index: int, first: int, here: int) -> None:
        """Compute G of these rows, their dE and what they give to dC."""
        hidden = self.hidden[first : first + here]
        if self.gathered is not None:
            hidden = self.gathered[:here]
            gather(self.hidden, hidden, self.selection, first, self.shapes)
        at = (first, here, 0, self.width)
        fused.write_gradient(self, hidden, self.x, self.columns, at)
        if self.filter is not None:
            self.filter.choose(self, hidden, index, first, here)
        # Rows behind the last are zero in G, and behind the end of what is multiplied with it.
        self.add_products(index, first, here, hidden)

    def weigh(
        self, inverse: Tensor, light: Tensor, rows_here: Tensor, first: int, here: int
    ) -> None:
        from . import selected_kernels as kernels

        run_kernel(
            kernels._linear_cross_entropy_selected_weigh_rows_kernel,
            (here,),
            *(self.x, self.given[-1], self.selection.kept, inverse, light, rows_here),
            *(first, here, self.rows, self.width, self.knobs.scale),
            HAS_KEPT=True,
            BLOCK=4096,
        )
