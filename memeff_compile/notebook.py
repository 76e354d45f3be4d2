"""HTML with which notebooks show reports: byte counts as bars, and text that a click expands. The
HTML uses only inline styles."""

from __future__ import annotations

import html
from collections.abc import Mapping

_BAR = "display:inline-block;height:0.8em;background:{colour};width:{width:.2f}em"
_COLOURS = ("#8c959f", "#2da44e")
_WIDEST = 24.0  # em


def pre(text: str) -> str:
    """Return text in a `<pre>` element, unchanged."""
    return f"<pre>{html.escape(text)}</pre>"


def folded(text: str, title: str = "details") -> str:
    """Return HTML in which a click expands the text, or "" for an empty text."""
    return f"<details><summary>{html.escape(title)}</summary>{pre(text)}</details>" if text else ""


def bars(lengths: Mapping[str, tuple[float, str]]) -> str:
    """Return HTML with one bar for each name, all on the same scale.

    After the bar comes the text that `lengths` has for the name.

    Example:
        >>> bars({"before": (2.0, "2 GiB"), "after": (1.0, "1 GiB")}).count("<tr>")
        2
    """
    most = max((length for length, _ in lengths.values()), default=0.0)
    rows = []
    for place, (name, (length, said)) in enumerate(lengths.items()):
        width = _WIDEST * length / most if most > 0 else 0.0
        colour = _COLOURS[min(place, len(_COLOURS) - 1)]
        bar = f'<span style="{_BAR.format(colour=colour, width=width)}"></span>'
        cells = (html.escape(name), bar, html.escape(said))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
