"""Draws what the ablations of attention in low bits and of compressed weights found."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot

Row = dict[str, Any]
KEPT_COLOURS = {0: "#8c510a", 1: "#f2a541", 3: "#e4572e", 7: "#2da44e"}
MODEL_COLOURS = {
    "language model": "#4c78a8",
    "vision transformer": "#2da44e",
    "diffusion transformer": "#e4572e",
}


def _tidy(axis: Any, across: str, up: str) -> None:
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.spines[["top", "right"]].set_visible(False)


def _machine(rows: list[Row]) -> str:
    last = rows[-1]
    return f"{last.get('gpu') or last.get('cpu')}, torch {last['torch']}, {last['date']}"


def latest(rows: list[Row], *keys: str) -> list[Row]:
    """Return the last row for each combination of values, in the order of first appearance."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[tuple(row.get(key) for key in keys)] = row
    return list(found.values())


# --- compressed weights ---------------------------------------------------------------------------


def weights(rows: list[Row]) -> Any:
    """Draw perplexity and time of a forward against the bits of a weight (NeuZip's Figure 3)."""
    found = [row for row in rows if row["part"] == "perplexity"]
    if not found:
        return None
    found = latest(found, "method", "codec", "mantissa", "block")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for kept, shade in KEPT_COLOURS.items():
        mine = [r for r in found if r.get("mantissa") == kept and r["codec"] == "rans"]
        mine.sort(key=lambda row: row["bits"])
        label = f"memeff, {kept} mantissa bits" + (" (lossless)" if kept == 7 else "")
        across = [row["bits"] for row in mine]
        left.plot(across, [row["perplexity"] for row in mine], "o-", color=shade, label=label)
        timed = [r for r in found if r.get("mantissa") == kept and r.get("block", 512) == 512]
        for row in timed:
            right.plot(row["bits"], row["ms"]["median"], "o", color=shade)
            right.annotate(row["codec"], (row["bits"], row["ms"]["median"]), **_BESIDE)
    for row in found:
        if row.get("emulated") or row["method"] == "dense":
            left.plot(row["bits"], row["perplexity"], "x", color="black")
            left.annotate(row["method"], (row["bits"], row["perplexity"]), **_BESIDE)
        if row["method"] == "dense":
            right.plot(row["bits"], row["ms"]["median"], "x", color="black")
            right.annotate("dense", (row["bits"], row["ms"]["median"]), **_BESIDE)
    left.set_yscale("log")
    _tidy(left, "bits per weight of the linears", "perplexity")
    _tidy(right, "bits per weight of the linears", "ms of a forward, eager")
    right.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=7)
    title = f"Language model of {found[0]['parameters'] / 1e6:.0f} M parameters"
    figure.suptitle(f"{title}; x: plain emulations and dense\n{_machine(found)}", fontsize=8)
    return figure


_BESIDE: dict[str, Any] = {"textcoords": "offset points", "xytext": (3, 3), "fontsize": 6}


# --- attention ------------------------------------------------------------------------------------


def attention(rows: list[Row]) -> Any:
    """Draw 4-bit scores by layer and step, and what adaptive choices recover."""
    scored = latest([row for row in rows if row["table"] == "scores"], "model")
    if not scored:
        return None
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for row in scored:
        _scores(axes[0], row)
        if row["calls"] > 1:
            shown = axes[1].imshow(row["four"]["mean"], aspect="auto", origin="lower")
            figure.colorbar(shown, ax=axes[1], label="score of 4b")
            axes[1].set_title(row["model"], fontsize=8)
    axes[1].set_xlabel("step of sampling")
    axes[1].set_ylabel("layer")
    _tidy(axes[0], "layer", "score of 4b, mean and deviation")
    axes[0].legend(frameon=False, fontsize=7)
    chosen = [row for row in rows if "recovered" in row]
    for row in latest(chosen, "model", "variant"):
        marker = "x" if "and step" in row["variant"] else "o"
        shade = MODEL_COLOURS.get(row["model"], "black")
        axes[2].plot(100 * row["share_of_4b"], 100 * row["recovered"], marker, color=shade)
    axes[2].axhline(80, color="black", linewidth=0.6, linestyle="--")
    axes[2].set_ylim(-20, 120)
    _tidy(axes[2], "% of attentions in 4 bits", "% of the harm recovered")
    axes[2].set_title("o by layer, x by layer and step", fontsize=8)
    figure.suptitle(_machine(rows), fontsize=8)
    return figure


def _scores(axis: Any, row: Row) -> None:
    means = [sum(steps) / len(steps) for steps in row["four"]["mean"]]
    spreads = [max(steps) for steps in row["four"]["deviation"]]
    shade = MODEL_COLOURS.get(row["model"], "black")
    places = range(len(means))
    axis.errorbar(places, means, spreads, fmt="o-", markersize=3, color=shade, label=row["model"])
