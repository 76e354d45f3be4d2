"""What `tune` runs to choose between settings of this op on one GPU, and how it knows them right.

Head and loss in bf16, forward and backward, on random numbers, with some targets ignored; filtered
gradients on random maps of tiles. Numbers are checked first, on a shape that is small in the hidden
size alone, so that every setting walks over pieces of its own width: against `reference` in fp32,
and for filtered gradients against the formula written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from memeff_compile.decisions import Question, Value, Workload
from memeff_compile.errors import TuneError
from memeff_compile.kernels.device import gpu
from memeff_compile.kernels.linear_cross_entropy import reference
from memeff_compile.kernels.linear_cross_entropy.filters import DENSE_SHARE
from memeff_compile.kernels.linear_cross_entropy.op import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
)
from memeff_compile.kernels.linear_cross_entropy.pieces import Knobs, RowGradients
from memeff_compile.kernels.linear_cross_entropy.shapes import TILE
from memeff_compile.kernels.linear_cross_entropy.tuned import (
    BYTES_PER_ROW,
    ENGINE,
    SHARE,
    bytes_per_row_of,
)

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


# Enough rows that the automatic workspace is above its least, 64 MiB.
SHAPES = (Shape(8192, 2304, 256000), Shape(16384, 2048, 128256), Shape(16384, 4096, 32000))
QUICK = (Shape(16384, 2048, 32000),)
CHECKED = Shape(8192, 64, 16384)
CHECKED_MAP = Shape(1024, 64, 4096)

# Relative errors (Frobenius norm) of bf16 gradients and of fp32 losses that pass; what the tests
# see is a quarter of the first and a hundredth of the second.
GRADIENT_BUDGET, LOSS_BUDGET = 1e-2, 1e-4

# Shares of active tiles at which thresholds are compared, each between two thresholds.
MAPS = (0.45, 0.6, 0.7, 0.8, 0.9)
THRESHOLDS = (0.4, 0.5, 0.65, DENSE_SHARE, 0.85, 0.95)


def questions(
    device: torch.device, chosen: Mapping[str, Value], *, quick: bool
) -> Iterator[Question]:
    """Yield what can be measured on a GPU, one decision at a time.

    Args:
        device: A CUDA device that runs our kernels.
        chosen: What was decided so far; read when the next question is asked for.
        quick: One small shape instead of three.
    """
    shapes = _fitting(device, QUICK if quick else SHAPES)

    def losses() -> Sequence[Workload]:
        return [Loss(device, shape) for shape in shapes]

    engine = "hybrid"
    if gpu(device).is_hopper:
        fault = _loss_check(device)
        yield Question(ENGINE, "fused", ("fused", "hybrid"), fault, losses)
        engine = str(chosen[ENGINE])
    usual = BYTES_PER_ROW[engine]
    yield Question(
        bytes_per_row_of(engine), usual, (usual // 2, usual, 2 * usual), _loss_check(device), losses
    )
    if engine == "fused":
        last = shapes[-1]

        def maps() -> Sequence[Workload]:
            return [FilteredGradient(device, last, share) for share in MAPS]

        yield Question(SHARE, DENSE_SHARE, THRESHOLDS, functools.partial(_map_fault, device), maps)


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
        self.hidden, self.weight, self.target = _inputs(device, shape)
        ignored = torch.arange(shape.rows, device=device) % 8 == 0
        self.target = self.target.masked_fill(ignored, IGNORED)
        self.grad_nll = torch.full((shape.rows,), 1.0 / shape.rows, device=device)
        self.knobs = Knobs(IGNORED, 1.0, 0.0, False, False, "exact", 0)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return nll and the gradients of hidden and weight."""
        nll, lse, *_ = linear_cross_entropy(
            self.hidden, self.weight, None, self.target, None, **_settings(self.knobs)
        )
        nothing = self.grad_nll.new_empty(0)
        grad_hidden, grad_weight, _ = linear_cross_entropy_backward(
            self.grad_nll,
            torch.zeros_like(lse),
            nothing,
            nothing,
            self.hidden,
            self.weight,
            None,
            self.target,
            None,
            lse,
            nothing,
            self.hidden.new_empty(0, dtype=torch.uint8),
            self.hidden.new_empty(0, dtype=torch.int32),
            **_settings(self.knobs),
            output_mask=[True, True, False],
        )
        return nll, grad_hidden, grad_weight

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same from the engine `reference` in fp32."""
        wide = self.hidden.float(), self.weight.float(), None, self.target, None
        found = reference.forward(*wide, self.knobs)
        nothing = self.grad_nll.new_empty(0)
        grads = RowGradients(self.grad_nll, torch.zeros_like(self.grad_nll), nothing, nothing)
        mask = (True, True, False)
        grad_hidden, grad_weight, _ = reference.backward(
            grads, *wide, found.lse, nothing, self.knobs, mask
        )
        assert grad_hidden is not None
        assert grad_weight is not None
        return found.nll, grad_hidden, grad_weight


class FilteredGradient:
    """The backward pass of a filtered loss, with a random map of tiles that count."""

    def __init__(self, device: torch.device, shape: Shape, share: float, tile: int = TILE) -> None:
        self.tile = tile
        self.name = f"{shape}, {share:.0%} of the tiles"
        self.hidden, self.weight, self.target = _inputs(device, shape)
        self.grad_nll = torch.full((shape.rows,), 1.0 / shape.rows, device=device)
        self.knobs = Knobs(None, 1.0, 0.0, False, False, "exact", 0)
        _, self.lse, *_ = linear_cross_entropy(
            self.hidden, self.weight, None, self.target, None, **_settings(self.knobs)
        )
        self.knobs = self.knobs._replace(gradient_filter="block")
        tiles = -(-shape.rows // tile), -(-shape.vocab // tile)
        order = torch.randperm(tiles[0] * tiles[1], device=device, generator=_generator(device))
        self.active = (order < share * order.numel()).view(tiles).to(torch.uint8)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of hidden and weight."""
        nothing = self.grad_nll.new_empty(0)
        grad_hidden, grad_weight, _ = linear_cross_entropy_backward(
            self.grad_nll,
            torch.zeros_like(self.lse),
            nothing,
            nothing,
            self.hidden,
            self.weight,
            None,
            self.target,
            None,
            self.lse,
            nothing,
            self.active,
            self.hidden.new_empty(0, dtype=torch.int32),
            **_settings(self.knobs),
            output_mask=[True, True, False],
        )
        return grad_hidden, grad_weight

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the same from the formula, in fp32, with every tile but the active ones zero."""
        hidden, weight = self.hidden.float(), self.weight.float()
        g = torch.softmax(hidden @ weight.t(), -1) - F.one_hot(self.target, weight.shape[0])
        g *= self.grad_nll[:, None]
        kept = self.active.repeat_interleave(self.tile, 0).repeat_interleave(self.tile, 1)
        g *= kept[: g.shape[0], : g.shape[1]]
        return g @ weight, g.t() @ hidden


def _settings(knobs: Knobs) -> dict[str, object]:
    return knobs._asdict()


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _inputs(device: torch.device, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    source = _generator(device)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device=device, generator=source)

    hidden, weight = normal(shape.rows, shape.depth), normal(shape.vocab, shape.depth)
    weight *= shape.depth**-0.5
    target = torch.randint(shape.vocab, (shape.rows,), device=device, generator=source)
    return hidden, weight, target


def _loss_check(device: torch.device) -> Callable[[], str]:
    """Return a check of whatever setting is in force; the reference is computed once."""

    @functools.lru_cache(maxsize=1)
    def prepared() -> tuple[Loss, tuple[Tensor, ...]]:
        loss = Loss(device, CHECKED)
        return loss, loss.expected()

    def fault() -> str:
        loss, expected = prepared()
        names, budgets = ("the loss", "dE", "dC"), (LOSS_BUDGET, GRADIENT_BUDGET, GRADIENT_BUDGET)
        return _fault(loss.run(), expected, names, budgets)

    return fault


def _map_fault(device: torch.device) -> str:
    work = FilteredGradient(device, CHECKED_MAP, 0.3)  # below every threshold: the sparse kernels
    return _fault(work.run(), work.expected(), ("dE", "dC"), (GRADIENT_BUDGET, GRADIENT_BUDGET))


def _fault(
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    names: Sequence[str],
    budgets: Sequence[float],
) -> str:
    """Say which result is wrong and by how much, or "". A nan anywhere is wrong."""
    for one, other, name, budget in zip(found, expected, names, budgets, strict=True):
        error = float((one.float() - other).norm() / other.norm())
        if not error <= budget:
            return f"{name} is off by {error:.1e}, relatively; {budget:.0e} is allowed"
    return ""
