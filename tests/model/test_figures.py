"""The figure of spreads shows each point and its ends, and does not change the user's pyplot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memeff_compile.errors import CalibrationError
from memeff_compile.model.figures import draw_spreads

matplotlib = pytest.importorskip("matplotlib", reason="draws figures")


def test_spreads_are_drawn_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **given: drawn.append((self, given)))
    series = {
        "one": [(0.1, 0.2, 0.4), (0.5, 0.5, 0.5)],
        "other": [(0.0, 0.3, 0.9), (0.2, 0.4, 0.6)],
    }
    backend = matplotlib.get_backend(auto_select=False)
    draw_spreads(tmp_path / "f", ["a", "b"], series, "score", CalibrationError, least=0.25)
    ((figure, given),) = drawn
    assert given == {"format": "svg"}
    assert matplotlib.get_backend(auto_select=False) == backend
    (axis,) = figure.axes
    for container, spreads in zip(axis.containers, series.values(), strict=True):
        points, _, (bars,) = container
        assert list(points.get_xdata()) == [middle for _, middle, _ in spreads]
        ends = [segment[:, 0].tolist() for segment in bars.get_segments()]
        assert ends == [pytest.approx([low, high]) for low, _, high in spreads]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert axis.yaxis_inverted()
