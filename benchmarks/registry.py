"""What there is to measure: shapes, data and methods of `linear + cross entropy`, each with a name.

Shapes are N tokens, D hidden size, V vocabulary. A shape can also be spelled out, as in
8192x2304x256000, and a method can carry knobs, as in "memeff mass parts=hidden level=0.001".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import methods
from benchmarks.methods import IGNORED, Loss, Unavailable

SHAPES = {
    "gemma2": (8192, 2304, 256000),
    "llama3": (8192, 4096, 128256),
    "llama1b": (16384, 2048, 128256),
    "tiny": (128, 32, 512),
}
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def sizes(shape: str) -> tuple[int, int, int]:
    """Return (N, D, V) of a named or spelled-out shape.

    Example: sizes("128x32x512") == (128, 32, 512).
    """
    if shape in SHAPES:
        return SHAPES[shape]
    try:
        n, d, v = map(int, shape.split("x"))
    except ValueError:
        known = ", ".join(SHAPES)
        raise ValueError(
            f"shape is {shape!r}; it takes NxDxV, such as 8192x2304x256000, or one of {known}"
        ) from None
    return n, d, v


# ------------------------------------------------------------------ data


@dataclass(frozen=True)
class Inputs:
    """Tensors of one measurement: hidden (N, D), weight (V, D), target (N,) int64."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    def without_gradients(self) -> None:
        """Drop the gradients of the last call."""
        self.hidden.grad = self.weight.grad = None


def _head(v: int, d: int, generator: torch.Generator) -> Tensor:
    """Return weight rows of length about 1."""
    return torch.randn(v, d, device=generator.device, generator=generator).div_(math.sqrt(d))


def _peaked(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw hidden states that are mixtures of vocabulary rows, as in a trained model.

    A row mixes 24 vocabulary rows, drawn log-uniformly over the ids so that low ids are frequent,
    with falling amounts; how fast they fall differs from row to row. A few entries per row exceed
    2**-12. The target is drawn from the softmax over the 24.
    """
    n, d, v = shape
    device, mixed = generator.device, 24
    weight = _head(v, d, generator).bfloat16()
    hidden = torch.empty(n, d, device=device)
    target = torch.empty(n, device=device, dtype=torch.int64)
    place = torch.arange(mixed, device=device)
    for first in range(0, n, 1024):
        span = slice(first, min(first + 1024, n))
        count = span.stop - span.start
        uniform = torch.rand(count, mixed, device=device, generator=generator)
        ids = (torch.exp(uniform * math.log(v)) - 1).long().clamp_(0, v - 1)
        fall = 0.165 + 1.1 * torch.rand(count, 1, device=device, generator=generator)
        amount = (17.0 - fall * place).clamp_min(0.0)
        chosen = weight[ids].float()
        hidden[span] = torch.einsum("nk,nkd->nd", amount, chosen)
        scores = torch.einsum("nd,nkd->nk", hidden[span], chosen)
        pick = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        target[span] = ids.gather(1, pick).squeeze(1)
    return hidden, weight, target


def _normal(
    spread: float, shape: tuple[int, int, int], generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Draw logits that are normal with this standard deviation; targets are uniform."""
    n, d, v = shape
    weight = _head(v, d, generator)
    hidden = torch.randn(n, d, device=generator.device, generator=generator).mul_(spread)
    target = torch.randint(v, (n,), device=generator.device, generator=generator)
    return hidden, weight, target


DATA: dict[str, Callable[[tuple[int, int, int], torch.Generator], tuple[Tensor, ...]]] = {
    "peaked": _peaked,
    "flat": partial(_normal, 0.25),
    "spread": partial(_normal, 1.5),
}
"""peaked: as in a trained model; flat: as at random initialisation; spread: the filter's worst."""


def inputs(
    shape: str, data: str, device: str, dtype: torch.dtype, ignored: int = 0, seed: int = 1
) -> Inputs:
    """Draw the tensors of one measurement; `ignored` percent of the targets do not count."""
    generator = torch.Generator(device=device).manual_seed(seed)
    hidden, weight, target = DATA[data](sizes(shape), generator)
    if ignored:
        chance = torch.rand(target.shape, device=device, generator=generator)
        target = torch.where(chance < ignored / 100, IGNORED, target)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), target)


# ------------------------------------------------------------------ methods


@dataclass(frozen=True)
class Method:
    """A way to compute the loss and its gradients.

    Attributes:
        name: what rows and figures call it.
        build: returns the loss, or raises `Unavailable` with the reason.
        budget: largest relative gradient error (Frobenius) with which it may be timed; None for
            a filter that promises nothing about it.
        loss_budget: the same for the loss.
    """

    name: str
    build: Callable[[], Loss]
    budget: float | None
    loss_budget: float

    def why_not(self) -> str | None:
        """Say why the method cannot run here, or return None if it can."""
        try:
            self.build()
        except (Unavailable, ImportError) as problem:
            return str(problem) or type(problem).__name__
        return None


ROUNDED = (3e-2, 1e-2)
"""Budgets of methods that round their logits to 16 bits before `exp`."""
EXACT_LOSS = 1e-4
_FILTERS: dict[str, float | None] = {"exact": 4e-3, "mass": 2e-2, "block": None}

_FIXED = {
    name: Method(name, build, *ROUNDED)
    for name, build in (
        ("eager", lambda: methods.eager),
        ("inductor", methods.inductor),
        ("apple", partial(methods.apple, "auto")),
        ("apple no filter", partial(methods.apple, None)),
        ("liger", methods.liger),
        ("liger cute", methods.liger_cute),
    )
}
NAMES = (*_FIXED, *(f"memeff {name}" for name in _FILTERS))
PARTS = ("both", "hidden", "weight")


def method(spec: str) -> Method:
    """Return the method that a string names.

    Args:
        spec: a name of `NAMES`; "memeff" methods take further words: parts=both|hidden|weight,
            level=<number>, sort=0|1, workspace=<bytes, or 64MiB>, gradients=forward.

    Example: method("memeff block sort=1").name == "memeff block sort=1".
    """
    if spec in _FIXED:
        return _FIXED[spec]
    words = spec.split()
    if words[:1] != ["memeff"] or len(words) < 2 or words[1] not in _FILTERS:
        raise ValueError(f"method is {spec!r}; the methods are {', '.join(NAMES)}")
    knobs = {"gradient_filter": words[1], **dict(_knob(word) for word in words[2:])}
    return Method(spec, partial(methods.memeff, **knobs), _FILTERS[words[1]], EXACT_LOSS)


def _knob(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    if name == "parts" and value in PARTS:
        return "filter_parts", value
    if name == "gradients" and value == "forward":
        return name, value
    if name == "level":
        return "filter_level", float(value)
    if name == "sort" and value in ("0", "1"):
        return "sort_vocabulary", value == "1"
    if name == "workspace":
        return "workspace", _bytes(value)
    raise ValueError(
        f"knob is {word!r}; the knobs are parts={'|'.join(PARTS)}, level=<number>, sort=0|1 and "
        "workspace=<bytes, or a size such as 64MiB>"
    )


def _bytes(text: str) -> int:
    if text == "auto":
        return 0
    unit = next((u for u in UNITS if text.endswith(u)), "")
    return int(float(text.removesuffix(unit)) * UNITS.get(unit, 1))
