"""The table of lossy weights shows what the rows say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/measured/compressed-weights.md").read_text()
FILE = ROOT / "benchmarks/results/nvidia-h200/coded-weight-lossy.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]
CODECS = ("win4", *(f"win4:k{kept}:b512" for kept in (3, 1, 0)))


def section() -> list[list[str]]:
    """Return the cells of the section's table, without its head."""
    text = PAGE.split("## Fewer mantissa bits\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return lines[2:]


def relative(measured: dict[str, Any]) -> list[str]:
    """Return the time of each codec relative to the dense weight's."""
    dense, *times = (measured[way]["us"]["median"] for way in ("dense", *CODECS))
    return [f"{time / dense:.2f}" for time in times]


def test_the_page_shows_what_the_rows_say() -> None:
    found: dict[Any, dict[str, Any]] = {}
    for row in ROWS:
        if row.get("what") == "width":
            name = "{} x {}, {}".format(*row["shape"], row["tokens"])
            found.setdefault(name, {})[row["codec"]] = row
        if row.get("what") == "token":
            found.setdefault("token", {})[row["way"]] = row
    *widths, times, sizes = section()
    assert len(widths) >= 8
    for name, dense, *ratios in widths:
        assert dense == f"{found[name]['dense']['us']['median']:.1f} us"
        assert ratios == relative(found[name]), name
    model = found["token"]
    assert times[1] == f"{model['dense']['us']['median'] / 1000:.2f} ms"
    assert times[2:] == relative(model)
    shown = [f"{model[way]['peak_gib']:.2f} GiB" for way in ("dense", *CODECS)]
    assert sizes[1:] == shown


def test_the_whole_model_takes_what_its_rows_say() -> None:
    text = PAGE.split("## All 32 layers in generate()\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    wanted = {"size": "llama3-8b", "layers": 32, "batch": 1}.items()
    stored = map(json.loads, (FILE.parent / "serving.jsonl").read_text().splitlines())
    rows = [row for row in stored if row.items() >= wanted]
    paths = ("verb-static", "verb-win4", "verb-k3")
    for path, (_, commits, times, peak, floor) in zip(paths, lines[2:], strict=True):
        found = [row for row in rows if row["path"] == path]
        assert {row["commit"] for row in found} == {*commits.split(", ")}
        assert sorted(f"{row['step_ms']['median']:.2f}" for row in found) == times.split(", ")
        assert {f"{row['peak_gib']:.2f} GiB" for row in found} == {peak}
        assert {f"{row['read_gb']['weights'] / 4.6:.2f} ms" for row in found} == {floor}
