"""The rule of `memeff.verify`: how the difference of two runs is measured, and how large it may
be.

`memeff.verify` makes two comparisons. Each of the two measures the difference of two tensors by
the Frobenius norm:

* The first comparison runs the original and the rewritten graph in float64. There, rounding affects
  only the sixteenth digit. So a difference above `EXACT` shows that the two graphs do not compute
  the same formula.
* The second comparison runs the original and the rewritten graph in the model's arithmetic. Each
  result is compared with the original graph's result in float64 (the truth). The error of the
  rewritten graph may be `OWN` times the error of the original graph, plus a constant. This
  constant (`SLACK`) depends on the coarsest dtype in the graph. If the graph cannot run in
  float64, the two graphs are compared with each other, and the difference may be at most this
  constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """The differences that a comparison allows."""

    relative: float  # share of a tensor's norm
    absolute: float  # per entry, as a root mean square; of values only


EXACT = Tolerance(1e-9, 1e-12)
OWN = 3.0
SLACK = {
    torch.float64: Tolerance(1e-9, 1e-12),
    torch.float32: Tolerance(3e-4, 1e-5),
    torch.float16: Tolerance(4e-3, 1e-4),
    torch.bfloat16: Tolerance(2e-2, 1e-3),
}

# Gradients below this share of the typical one are rounding of others.
_NEGLIGIBLE = 1e-3

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Gap:
    """The distance between two tensors, and the distance that is allowed."""

    what: str  # "output 0", "gradient of lm_head.weight"
    error: float  # relative to the size of the truth
    allowed: float  # the same, for the error
    own: float | None = None  # error of the original graph, where it is the yardstick
    words: str = ""  # a difference that is no distance ("has shape ...")

    @property
    def share(self) -> float:
        """Return the ratio of this gap (difference) to the allowed gap; more than 1 is a
        mismatch."""
        if self.words:
            return float("inf")
        return self.error / self.allowed if self.allowed > 0 else float(self.error > 0) * 1e300

    def __str__(self) -> str:
        if self.words:
            return f"{self.what} {self.words}"
        own = "" if self.own is None else f", where the original's own error is {self.own:.1e}"
        return f"{self.what} is off by {self.error:.1e} ({self.allowed:.1e} is allowed{own})"


def slack_of(dtypes: Iterable[torch.dtype], *, coarse_products: bool) -> Tolerance:
    """Return the allowed error (slack) for a graph's coarsest floating-point dtype.

    If matrix products compute in TF32 or bf16, return at least the slack of float16.
    """
    known = [SLACK[dtype] for dtype in dtypes if dtype in SLACK]
    if coarse_products:
        known.append(SLACK[torch.float16])
    return max(known, key=lambda slack: slack.relative, default=SLACK[torch.float32])


def value_gap(
    what: str, found: Tensor, truth: Tensor, tolerance: Tolerance, own: Tensor | None = None
) -> Gap:
    """Compare a value of the rewritten graph with the same value of the original graph.

    The rewritten graph's value is `found`, and the original graph's value is `truth`. The value is
    an output, or an input to which the graph wrote. If `truth` has a wider dtype than `found`,
    `own` is the value that the original graph computes in the dtype of `found`.
    """
    words = _different_kind(found, truth)
    if words:
        return Gap(what, 0.0, 0.0, words=words)
    if not (truth.is_floating_point() or truth.is_complex()):
        # Integers that come from comparing floats differ where two are equal but for rounding.
        count = max(truth.numel(), 1)
        return Gap(what, int((found != truth).sum()) / count, (truth.numel() // 100) / count)
    norms = _Norms.of(found, truth, own)
    if norms.broken:
        return Gap(what, 0.0, 0.0, words="is not finite where the original is")
    least = tolerance.absolute * norms.count**0.5
    return norms.gap(what, tolerance.relative, least, max(norms.size, least, 1e-300))


def gradient_gaps(
    names: Sequence[str],
    found: Sequence[Tensor | None],
    truth: Sequence[Tensor | None],
    tolerance: Tolerance,
    own: Sequence[Tensor | None] | None = None,
) -> list[Gap]:
    """Compare each input's gradient in the rewritten graph with that in the original graph.

    `found` has the rewritten graph's gradients, and `truth` the original graph's. If `truth` has a
    wider dtype than `found`, `own` has the original graph's gradients in the dtype of `found`. The
    gradients of each graph are from one backward pass. A difference is divided by the norm of the
    original graph's gradient. If this norm is less than a thousandth of the typical norm of all
    inputs' gradients, that thousandth is the divisor instead. A missing gradient counts as zero.
    """
    yardsticks: Sequence[Tensor | None] = [None] * len(names) if own is None else own
    both: list[tuple[str, _Norms | str]] = []
    for name, ours, theirs, mine in zip(names, found, truth, yardsticks, strict=True):
        if ours is None and theirs is None:
            continue
        zero = torch.zeros_like(cast("Tensor", ours if theirs is None else theirs))
        ours, theirs = zero if ours is None else ours, zero if theirs is None else theirs
        mine = None if own is None else torch.zeros_like(ours) if mine is None else mine
        words = _different_kind(ours, theirs)
        both.append((f"gradient of {name}", words or _Norms.of(ours, theirs, mine)))
    norms = [n for _, n in both if isinstance(n, _Norms)]
    typical = (sum(n.size**2 for n in norms) / max(len(norms), 1)) ** 0.5
    gaps = []
    for what, one in both:
        if isinstance(one, str):
            gaps.append(Gap(what, 0.0, 0.0, words=one))
        elif one.broken:
            gaps.append(Gap(what, 0.0, 0.0, words="is not finite where the original's is"))
        else:
            scale = max(one.size, _NEGLIGIBLE * typical, 1e-300)
            gaps.append(one.gap(what, tolerance.relative, 0.0, scale))
    return gaps


def _different_kind(found: Tensor, truth: Tensor) -> str:
    if found.shape != truth.shape:
        return f"has shape {tuple(found.shape)} and not {tuple(truth.shape)}"
    if found.dtype.is_floating_point != truth.dtype.is_floating_point:
        return f"is {found.dtype} and not {truth.dtype}"
    return ""


@dataclass
class _Norms:
    """Norms over the elements in which the original graph's results are finite.

    The truth is the original graph's result, in float64 if the graph can run in float64.
    `error` is the norm of the rewritten graph's error, `own` that of the original graph's
    error, and `size` that of the truth.
    """

    error: float = 0.0
    own: float | None = None
    size: float = 0.0
    count: int = 0
    broken: bool = False

    @classmethod
    def of(cls, found: Tensor, truth: Tensor, own: Tensor | None) -> _Norms:
        norms = cls(own=None if own is None else 0.0)
        sums = torch.zeros(3, dtype=torch.float64)
        flat = [t if t is None else t.detach().reshape(-1) for t in (found, truth, own)]
        for start in range(0, truth.numel(), _CHUNK):
            chunk: list[Any] = [t if t is None else t[start : start + _CHUNK] for t in flat]
            sums += torch.stack(norms._add(*chunk)).cpu()
        norms.error, norms.size = float(sums[0].sqrt()), float(sums[1].sqrt())
        norms.own = None if own is None else float(sums[2].sqrt())
        return norms

    def _add(self, found: Tensor, truth: Tensor, own: Tensor | None) -> list[Tensor]:
        """Return three sums of squares over a chunk of elements: of the errors of `found`, of the
        values of `truth`, and of the errors of `own`.

        `found` is a result of the rewritten graph, and `truth` the original graph's. If `truth` has
        a wider dtype than `found`, `own` is the original graph's result in the dtype of `found`.
        The caller adds up each of the three sums over all chunks.
        """
        wide = torch.complex128 if truth.is_complex() else torch.float64
        found, truth = found.to(wide), truth.to(wide)
        fair = truth.isfinite() if own is None else truth.isfinite() & own.isfinite()
        self.broken |= bool((fair & ~found.isfinite()).any())
        if own is None:  # nan and infinity stand where they stood
            same = (truth.isnan() & found.isnan()) | (truth == found)
            self.broken |= bool((~truth.isfinite() & ~same).any())
        self.count += int(fair.sum())
        zero = torch.zeros((), dtype=wide, device=truth.device)
        parts = [found - truth, truth, zero if own is None else own.to(wide) - truth]
        return [torch.where(fair, part, zero).abs().square().sum().double() for part in parts]

    def gap(self, what: str, relative: float, absolute: float, scale: float) -> Gap:
        """Return the rewritten graph's error and the allowed error, both divided by `scale`.

        An error is the norm of the difference from the truth. The truth is the original graph's
        result, in float64 if the graph can run in float64. Before the division, the allowed error
        is the sum of `relative * scale`, `absolute`, and three times the original graph's own
        error. If the field `own` is None, this own error counts as 0.
        """
        allowed = relative * scale + absolute + OWN * (self.own or 0.0)
        own = None if self.own is None else self.own / scale
        return Gap(what, self.error / scale, allowed / scale, own)
