"""Draw the predicted memory of a training step of the user's model as bars.

The style is that of figure 1 of arXiv 2411.09009."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ExplainError
from ..model.figures import matplotlib_for

COLOURS = ("#4c78a8", "#7fb3d5", "#274b6d", "#9a9a9a", "#e4572e")
GIB = 1 << 30
COLUMNS = ("without", "memeff")


def draw(
    path: Path,
    title: str,  # above both panels
    # bytes of each group, without the passes and with them, from the bottom up
    groups: Mapping[str, tuple[int, int]],
    batches: Sequence[int] | None,  # the largest of a GPU, in sequences, if a memory was given
    length: int,  # tokens of a sequence
    increase: float | None,  # how many times larger the second one is
) -> None:
    """Draw the peak memory without and with the passes and, if they are known, the largest batch
    sizes."""
    matplotlib_for(ExplainError).use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    panels = 1 if batches is None else 2
    figure, axes = pyplot.subplots(1, panels, figsize=(1 + 4 * panels, 3.6), squeeze=False)
    _memory(axes[0][0], groups)
    if batches is not None:
        _batches(axes[0][1], batches, length, increase)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _memory(axis: Any, groups: Mapping[str, tuple[int, int]]) -> None:
    bottoms = [0.0, 0.0]
    for (group, sizes), colour in zip(groups.items(), COLOURS, strict=True):
        heights = [size / GIB for size in sizes]
        label = group if any(heights) else None  # nothing to see, so nothing to explain
        axis.bar(COLUMNS, heights, 0.6, bottom=bottoms, label=label, color=colour)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for place, total in enumerate(bottoms):
        axis.text(place, total, f"{total:.1f} GiB", ha="center", va="bottom", fontsize=9)
    axis.set_ylabel("memory per GPU, GiB")
    axis.set_ylim(0, 1.15 * max(bottoms))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def _batches(axis: Any, batches: Sequence[int], length: int, increase: float | None) -> None:
    bars = axis.bar(COLUMNS, batches, 0.6, color=COLOURS[-2:])
    axis.bar_label(bars, [f"{count:,}" for count in batches], fontsize=9)
    grows = "" if increase is None else f" ({increase:.1f} times)"
    axis.set_ylabel(f"largest batch per GPU,\nsequences of {length:,} tokens{grows}")
    axis.set_ylim(0, 1.15 * max(*batches, 1))
    axis.spines[["top", "right"]].set_visible(False)
