"""Measure how much low-bit attention changes a model's output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

ROWS = 512
"""Tokens whose logits are compared at a time."""


def main_output(result: Any) -> tuple[Tensor, bool] | None:  # noqa: ANN401
    """Return the main tensor of a model's result, and whether this tensor contains logits.

    Calibration measures how much low-bit attention changes this tensor. The returned tensor is the
    one named `logits` if it has several classes, otherwise the largest floating-point tensor.
    Without a floating-point tensor, the function returns None.
    """
    logits = result.get("logits") if isinstance(result, Mapping) else None
    if isinstance(logits, Tensor) and _has_classes(logits):
        return logits, True
    found = [each for each in _tensors(result) if each.is_floating_point() and each.numel()]
    return (max(found, key=Tensor.numel), False) if found else None


def _has_classes(logits: Tensor) -> bool:
    return logits.is_floating_point() and logits.dim() > 1 and logits.shape[-1] > 1


def _tensors(result: Any) -> Iterator[Tensor]:  # noqa: ANN401
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (Mapping, list, tuple)):
        for each in result.values() if isinstance(result, Mapping) else result:
            yield from _tensors(each)


def change_of(found: Tensor, wanted: Tensor, *, are_logits: bool) -> float:
    """Return how far a model's output is from the wanted output; infinity if the output contains an
    infinity or nan.

    For logits, the distance is the mean KL divergence of the softmax distributions, in nats. For
    other outputs, the distance is the squared error relative to the energy (sum of squares) of the
    wanted output.
    """
    if found.shape != wanted.shape:
        return math.inf
    if not are_logits:
        off = float((found.float() - wanted.float()).square().sum())
        off /= max(float(wanted.float().square().sum()), 1e-30)
        return off if math.isfinite(off) else math.inf
    total, rows = 0.0, wanted.shape[:-1].numel()
    pairs = (x.reshape(rows, -1).split(ROWS) for x in (found, wanted))
    for ours, theirs in zip(*pairs, strict=True):
        mine, exact = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
        each = exact.exp() * (exact - mine)
        total += float(each.masked_fill(exact == -math.inf, 0.0).sum())
    return max(0.0, total / max(1, rows)) if math.isfinite(total) else math.inf
