"""The trials of `tune` for the loss: which engine computes it, and how it is known to be right.

Head and loss in bf16, forward and backward, on random numbers, with some targets ignored. Numbers
are checked first, on a shape that is small in the hidden size alone, so that every engine walks
over blocks of its own width: against `reference` in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..decisions import Question, Workload
from ..errors import TuneError
from ..kernels.device import gpu
from ..kernels.linear_cross_entropy import ENGINES, walk
from ..kernels.linear_cross_entropy.call import Operands, RowGradients, Saved, Settings

IGNORED = -100
GIB = 2**30


class Shape(NamedTuple):
    """N, D, V."""

    rows: int
    depth: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.depth} x {self.vocab}"

    @property
    def bytes_needed(self) -> int:
        """Roughly what a trial of this shape holds: weight and gradient, rows, pieces, slack."""
        return 4 * self.depth * self.vocab + self.rows * (16 * self.depth + 65536) + GIB


SHAPES = (Shape(8192, 2304, 256000), Shape(16384, 2048, 128256), Shape(16384, 4096, 32000))
QUICK = (Shape(16384, 2048, 32000),)
CHECKED = Shape(8192, 64, 16384)

# Relative errors (Frobenius norm) of fp32 losses and bf16 gradients that pass; what the tests see
# is a hundredth of the first and a quarter of the others.
BUDGETS = {"the loss": 1e-4, "dE": 1e-2, "dC": 1e-2}


def questions(device: torch.device, *, quick: bool) -> Iterator[Question]:
    """Yield what can be measured on a CUDA device; `quick` is on one small shape, not three."""
    if not gpu(device).is_hopper:
        return
    shapes = _fitting(device, QUICK if quick else SHAPES)

    def losses() -> Sequence[Workload]:
        return [Loss(device, shape) for shape in shapes]

    yield Question(walk.ENGINE, "hopper", ("hopper", "library"), _loss_check(device), losses)


def _fitting(device: torch.device, shapes: Sequence[Shape]) -> Sequence[Shape]:
    free, _ = torch.cuda.mem_get_info(device)
    found = [shape for shape in shapes if shape.bytes_needed <= free]
    if not found:
        needed = min(shape.bytes_needed for shape in shapes)
        raise TuneError(
            f"{free / GIB:.1f} GiB of {device} are free and the smallest trial needs "
            f"{needed / GIB:.1f} GiB. End what else runs there, or use --quick."
        )
    return found


class Loss:
    """Head and loss, forward and backward."""

    def __init__(self, device: torch.device, shape: Shape) -> None:
        self.name = str(shape)
        source = torch.Generator(device).manual_seed(0)
        told: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "generator": source}
        self.hidden = torch.randn(shape.rows, shape.depth, **told)
        self.weight = torch.randn(shape.vocab, shape.depth, **told) * shape.depth**-0.5
        target = torch.randint(shape.vocab, (shape.rows,), device=device, generator=source)
        ignored = torch.arange(shape.rows, device=device) % 8 == 0
        self.target = target.masked_fill(ignored, IGNORED)
        self.grad_nll = torch.full((shape.rows,), 1.0 / shape.rows, device=device)
        self.settings = Settings(IGNORED, 1.0, 0.0, False, False, "exact", 0)

    def run(self, engine: str) -> Sequence[Tensor]:
        """Return nll and the gradients of hidden and weight, as one engine computes them."""
        return self._computed(engine, self.hidden, self.weight)

    def expected(self) -> Sequence[Tensor]:
        """Return the same from the engine `reference` in fp32."""
        return self._computed("reference", self.hidden.float(), self.weight.float())

    def _computed(self, engine: str, hidden: Tensor, weight: Tensor) -> Sequence[Tensor]:
        operands = Operands(hidden, weight, None, self.target)
        nothing, mask = self.grad_nll.new_empty(0), (True, True, False)
        grads = RowGradients(self.grad_nll, torch.zeros_like(self.grad_nll), nothing, nothing)
        module = ENGINES[engine].module
        rows = walk.forward(module, operands, self.settings)
        saved = Saved(rows.lse, nothing)
        found = walk.backward(module, grads, operands, saved, self.settings, mask)
        return [rows.nll, *(part for part in found if part is not None)]


def _loss_check(device: torch.device) -> Callable[[str], str]:
    """Return a check of an engine; the reference is computed once."""

    @functools.lru_cache(maxsize=1)
    def prepared() -> tuple[Loss, Sequence[Tensor]]:
        loss = Loss(device, CHECKED)
        return loss, loss.expected()

    def fault(engine: str) -> str:
        loss, expected = prepared()
        return fault_of(loss.run(engine), expected)

    return fault


def fault_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Say which result is wrong and by how much, or "". A nan anywhere is wrong."""
    for one, other, (name, budget) in zip(found, expected, BUDGETS.items(), strict=True):
        error = float((one.float() - other).norm() / other.norm())
        if not error <= budget:
            return f"{name} is off by {error:.1e}, relatively; {budget:.0e} is allowed"
    return ""
