"""Draw figures for reports with matplotlib, which is imported only when a figure is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memeff_compile.errors import MemeffError

Spread = tuple[float, float, float]
"""The low end, the middle and the high end of one point's spread."""
LINE = 0.22
"""Inches between two names."""


def matplotlib_for(error: type[MemeffError]) -> Any:  # noqa: ANN401 - matplotlib has no types
    """Return matplotlib, or raise `error` if it is not installed."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError as problem:
        raise error(
            "A figure needs matplotlib, which is not installed: pip install matplotlib, or the "
            "package's extra `plot`. "
            "Text and JSON need nothing more."
        ) from problem


def draw_spreads(
    path: str | Path,  # its ending sets the format; without one it is SVG, whose text stays text
    names: Sequence[str],  # one name per row of the figure
    series: Mapping[str, Sequence[Spread]],  # for each series one spread per name
    title: str,  # the meaning of the points
    error: type[MemeffError],  # raised if matplotlib is not installed
    *,
    least: float | None = None,  # where a line across all names is drawn
) -> None:
    """Draw one row per name, from top to bottom, with one point and an error bar for each
    series."""
    matplotlib = matplotlib_for(error)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(7.0, 1.2 + LINE * len(names)), layout="constrained"
    )
    axis = figure.subplots()
    for place, (label, spreads) in enumerate(series.items()):
        low, middle, high = (list(ends) for ends in zip(*spreads, strict=True))
        away = 0.3 * ((place + 0.5) / len(series) - 0.5)
        ends = [[m - e for m, e in zip(middle, low, strict=True)], []]
        ends[1] = [e - m for m, e in zip(middle, high, strict=True)]
        lines = [number + away for number in range(len(names))]
        axis.errorbar(middle, lines, xerr=ends, fmt="o", markersize=4, label=label)
    if least is not None:
        axis.axvline(least, color="#cf222e", linewidth=0.8, label=f"{least}")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, format=Path(path).suffix[1:] or "svg")
