"""Draws the figures from committed rows; it measures nothing.

python benchmarks/plot.py                      # every results folder -> docs/figures/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
COLOURS = {"eager": "#9a9a9a", "inductor": "#4c78a8", "memeff": "#e4572e"}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def caption(rows: list[dict[str, Any]]) -> str:
    """Return machine and versions, as the rows state them."""
    last = rows[-1]
    return f"{last['gpu']}, torch {last['torch']}, triton {last['triton']}, {last['date']}"


def training_steps(rows: list[dict[str, Any]], target: Path) -> None:
    """Draw peak memory and time of a training step, one group of bars per model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    backends = [b for b in COLOURS if any(row["backend"] == b for row in rows)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axis, label, pick in (
        (left, "peak memory, GiB", lambda row: row["peak_gib"]),
        (right, "time of a step, ms", lambda row: row["ms"]["median"]),
    ):
        for offset, backend in enumerate(backends):
            heights = []
            for model in models:
                found = [pick(r) for r in rows if (r["model"], r["backend"]) == (model, backend)]
                heights.append(sorted(found)[len(found) // 2] if found else 0.0)
            places = [i + 0.8 * offset / len(backends) for i in range(len(models))]
            bars = axis.bar(
                places, heights, 0.75 / len(backends), label=backend, color=COLOURS[backend]
            )
            axis.bar_label(bars, fmt="%.1f", fontsize=8)
        axis.set_xticks([i + 0.2 for i in range(len(models))], models)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    title = f"Training step, bf16, gradient checkpointing, unmodified model\n{caption(rows)}"
    figure.suptitle(title, fontsize=9)
    save(figure, target)


def head_and_loss(rows: list[dict[str, Any]], target: Path) -> None:
    """Draw time against memory beyond the gradients, one panel per shape."""
    rows = [row for row in rows if "both_ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(4.2 * len(shapes), 3.4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        here = [row for row in rows if row["shape"] == shape]
        for row in here:
            colour = next((c for n, c in COLOURS.items() if row["method"].startswith(n)), "black")
            x, y = row["mib_beyond_gradients"], row["both_ms"]["median"]
            axis.plot(x, y, "o", color=colour)
            place = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 7}
            axis.annotate(row["method"], (x, y), **place)
        axis.set_xscale("log")
        axis.set_ylim(0, 1.2 * max(row["both_ms"]["median"] for row in here))
        axis.set_xlim(50, 60000)
        axis.set_xlabel("MiB beyond the gradients")
        axis.set_ylabel("forward + backward, ms")
        axis.set_title("N, D, V = {N}, {D}, {V}".format(**here[0]), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Linear + cross entropy alone, bf16\n{caption(rows)}", fontsize=9)
    save(figure, target)


def save(figure: Any, target: Path) -> None:
    """Write the figure and say where."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
    print(target.relative_to(FIGURES.parent.parent))


def main() -> None:
    """Draw what there are rows for."""
    for folder in sorted(p for p in RESULTS.iterdir() if p.is_dir()):
        models, op = folder / "models.jsonl", folder / "linear_cross_entropy.jsonl"
        if models.exists():
            training_steps(read(models), FIGURES / f"training-step-{folder.name}.png")
        if op.exists():
            head_and_loss(read(op), FIGURES / f"linear-cross-entropy-{folder.name}.png")


if __name__ == "__main__":
    main()
