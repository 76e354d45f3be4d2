"""The meaning of "gradients equal" in this project, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]

WORSE = 1.1
"""How much worse than eager's the error of bf16 against fp32 may be."""

NEGLIGIBLE = 1e-6
"""Below this pooled error bf16 is as good as fp32, and a ratio of two errors has no meaning."""


def pairs(found: Gradients, expected: Gradients) -> list[tuple[Tensor, Tensor]]:
    """Return the gradients that exist, in fp32 or better; they must exist on both sides."""
    assert [g is None for g in found] == [g is None for g in expected], "a gradient is missing"
    return [
        (f, e) if e.dtype == torch.float64 else (f.float(), e.float())
        for f, e in zip(found, expected, strict=True)
        if f is not None and e is not None
    ]


def assert_same_gradients(found: Gradients, expected: Gradients) -> None:
    """Assert |g - g'| <= 1e-5 max(|g'|, 1e-3 RMS of |g'| over the parameters), for fp32."""
    both = pairs(found, expected)
    least = 1e-3 * torch.stack([e.norm() for _, e in both]).square().mean().sqrt()
    for place, (ours, theirs) in enumerate(both):
        difference, size = (ours - theirs).norm(), torch.maximum(theirs.norm(), least)
        assert difference <= 1e-5 * size, f"gradient {place}: {difference:.1e} of {size:.1e}"


def pooled_error(found: Gradients, truth: Gradients) -> float:
    """Return the relative error over all parameters together."""
    both = pairs(found, truth)
    difference = sum(float((f - t).square().sum()) for f, t in both)
    return float((difference / sum(float(t.square().sum()) for _, t in both)) ** 0.5)


def median(values: Sequence[float]) -> float:
    """Return the middle one of an odd number of values."""
    return sorted(values)[len(values) // 2]


def assert_no_worse(ours: Sequence[float], eager: Sequence[float]) -> None:
    """Compare pooled errors against fp32, one per seed, by their medians."""
    assert median(ours) <= WORSE * median(eager) + NEGLIGIBLE


def compiler_missing() -> str:
    """Return why Inductor cannot compile for the CPU here, or an empty string."""
    import os
    import shutil

    names = [os.environ.get("CXX", "g++"), "g++", "clang++"]
    if any(shutil.which(name) for name in names):
        return ""
    return "Inductor compiles C++ on the CPU, and there is no g++ or clang++ here"


needs_compiler: Callable[..., object] = pytest.mark.skipif(
    bool(compiler_missing()), reason=compiler_missing() or "a C++ compiler is needed"
)
