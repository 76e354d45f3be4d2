"""Draws the figures from committed rows; it measures nothing.

    python benchmarks/plot.py                      # every results folder -> docs/figures/
    python benchmarks/plot.py --results my_rows --figures my_figures

A file in a folder of results becomes a figure if it has a painter below; a figure's name ends with
the folder's. A method that failed or could not run has no times and is not drawn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import ROOT
from benchmarks.models import convergence
from benchmarks.quality import task_scores
from benchmarks.rows import latest, read

COLOURS = {
    "eager": "#9a9a9a",
    "inductor": "#4c78a8",
    "apple": "#72b7b2",
    "liger": "#b279a2",
    "memeff mass": "#f2a541",
    "memeff block": "#8c510a",
    "memeff": "#e4572e",
}
KEPT_COLOURS = {0: "#8c510a", 1: "#f2a541", 3: "#e4572e", 7: "#2da44e"}
MODEL_COLOURS = {
    "language model": "#4c78a8",
    "vision transformer": "#2da44e",
    "diffusion transformer": "#e4572e",
}
NAMES = {
    "inductor": "torch.compile (Inductor)",
    "liger": "Liger, eager",
    "llama3.2-1b": "Llama-3.2-1B",
    "gemma2-2b": "Gemma-2-2B",
}
"""Names in rows -> names for readers."""
Row = dict[str, Any]


def called(name: str) -> str:
    """Return what a reader calls a backend or a model."""
    return NAMES.get(name, name)


def colour(method: str) -> str:
    """Return a method's colour: that of the first name it starts with."""
    return next((c for name, c in COLOURS.items() if method.startswith(name)), "black")


def caption(rows: list[Row]) -> str:
    """Return machine and versions, as the rows state them."""
    last = next(row for row in reversed(rows) if "torch" in row)
    machine = last.get("gpu") or last.get("cpu")
    return f"{machine}, torch {last['torch']}, triton {last['triton']}, {last['date']}"


def unique(values: Iterable[Any]) -> list[Any]:
    """Return distinct values in the order in which they come."""
    return list(dict.fromkeys(values))


def name_of(row: Row) -> str:
    """Return the backend's name in a row of a training step."""
    return row.get("name", row["backend"])


def memory_of(row: Row) -> float | None:
    """Return the MiB beyond the gradients of a row of the op."""
    if "mib_beyond_gradients" in row:
        return row["mib_beyond_gradients"]
    return row.get("memory_mib", {}).get("beyond_gradients")


def tidy(axis: Any, across: str, up: str) -> None:
    """Label both axes and take the frame away."""
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.spines[["top", "right"]].set_visible(False)


def training_steps(rows: list[Row]) -> Any:
    """Draw peak memory and time of a training step, one group of bars per model."""
    rows = [row for row in rows if "ms" in row]
    if not rows:
        return None
    models = unique(row["model"] for row in rows)
    backends = sorted(unique(map(name_of, rows)), key=_rank)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axis, label, pick in (
        (left, "peak memory, GiB", lambda row: row.get("peak_gib", 0.0)),
        (right, "time of a step, ms", lambda row: row["ms"]["median"]),
    ):
        middles, end = [], 0.0
        for model in models:
            here = [row for row in rows if row["model"] == model]
            measured = [b for b in backends if any(name_of(row) == b for row in here)]
            for offset, backend in enumerate(measured):
                found = sorted(pick(row) for row in here if name_of(row) == backend)
                height = found[len(found) // 2]
                bars = axis.bar(end + offset, height, 0.95, label=backend, color=colour(backend))
                axis.bar_label(bars, fmt="%.1f", fontsize=8)
            middles.append(end + (len(measured) - 1) / 2)
            end += len(measured) + 1
        axis.set_xticks(middles, map(called, models))
        axis.set_ylim(bottom=0)
        tidy(axis, "", label)
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    shown = {called(name): handles[name] for name in backends}
    right.legend(shown.values(), shown.keys(), frameon=False, fontsize=8, loc="upper left")
    right.set_ylim(top=1.35 * right.dataLim.y1)
    title = f"Training step, bf16, gradient checkpointing; lower is better\n{caption(rows)}"
    figure.suptitle(title, fontsize=9)
    return figure


def _rank(backend: str) -> int:
    names = list(COLOURS)
    return next((names.index(n) for n in names if backend.startswith(n)), len(names))


def batch(rows: list[Row]) -> Any:
    """Draw time per sequence and peak memory of a training step against its batch, by model."""
    rows = [row for row in rows if "peak_gib" in row]
    if not rows:
        return None
    models = unique(row["model"] for row in rows)
    figure, axes = pyplot.subplots(2, len(models), figsize=(4.5 * len(models), 6), squeeze=False)
    for (upper, lower), model in zip(zip(*axes, strict=True), models, strict=True):
        here = [row for row in rows if row["model"] == model]
        for backend in sorted(unique(map(name_of, here)), key=_rank):
            own = sorted((r for r in here if name_of(r) == backend), key=lambda r: r["batch"])
            batches = [r["batch"] for r in own]
            each = [r["ms"]["median"] / r["batch"] for r in own]
            for axis, values in ((upper, [r["peak_gib"] for r in own]), (lower, each)):
                axis.plot(batches, values, "o-", label=called(backend), color=colour(backend))
        upper.set_title(called(model), fontsize=11)
        sizes = sorted(unique(row["batch"] for row in here))
        for axis, label in ((upper, "peak memory, GiB"), (lower, "time per sequence, ms")):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, sizes)
            axis.set_ylim(bottom=0)
            tidy(axis, f"batch (sequences of {here[0]['length']} tokens)", label)
    axes[0][0].legend(frameon=False, fontsize=9)
    title = "One training step, bf16, gradient checkpointing; lower is better"
    figure.suptitle(f"{title}\n{caption(rows)}", fontsize=10)
    return figure


def gpus(rows: list[Row]) -> Any:
    """Draw time and peak memory of a step under FSDP2 against the GPUs, a column per model."""
    rows = [row for row in rows if row.get("what") == "FSDP2 by layers" and "peak_gib" in row]
    sizes = [s for s in unique(r["size"] for r in rows) if len(_counts(rows, s)) > 1]
    if not sizes:
        return None
    figure, axes = pyplot.subplots(2, len(sizes), figsize=(4.5 * len(sizes), 6), squeeze=False)
    for column, size in zip(axes.T, sizes, strict=True):
        backends = sorted(unique(r["backend"] for r in rows if r["size"] == size), key=_rank)
        counts = _counts(rows, size)
        for backend in backends:
            here = [r for r in rows if (r["size"], r["backend"]) == (size, backend)]
            last = {row["gpus"]: row for row in here}
            steps = [last[count]["ms"]["median"] for count in sorted(last)]
            peaks = [last[count]["peak_gib"] for count in sorted(last)]
            for axis, heights in zip(column, (steps, peaks), strict=True):
                axis.plot(sorted(last), heights, "o-", label=called(backend), color=colour(backend))
        for axis, label in zip(column, ("time of a step, ms", "peak memory, GiB"), strict=True):
            axis.set_ylim(0, 1.1 * axis.dataLim.y1)
            axis.set_xticks(counts)
            tidy(axis, "GPUs", label)
        batch, length = (here[0][name] for name in ("batch", "length"))
        column[0].set_title(f"{size}, {batch} x {length} tokens a GPU", fontsize=9)
    axes[0][0].legend(frameon=False, fontsize=8)
    title = f"FSDP2, layers compiled one by one, checkpointed\n{caption(rows)}"
    figure.suptitle(title, fontsize=9)
    return figure


def _counts(rows: list[Row], size: str) -> list[int]:
    return sorted({row["gpus"] for row in rows if row["size"] == size})


def head_and_loss(rows: list[Row]) -> Any:
    """Draw time against memory beyond the gradients, one panel per shape and data."""
    rows = [row for row in rows if "both_ms" in row and memory_of(row) is not None]
    if not rows:
        return None
    kinds = unique(_kind(row) for row in rows)
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(4.2 * len(kinds), 3.4), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        here = [row for row in rows if _kind(row) == kind]
        for row in here:
            x, y = max(memory_of(row) or 0.0, 0.5), row["both_ms"]["median"]
            axis.plot(x, y, "o", color=colour(row["method"]))
            place = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 7}
            axis.annotate(row["method"], (x, y), **place)
        axis.set_xscale("log")
        axis.set_ylim(0, 1.2 * max(row["both_ms"]["median"] for row in here))
        across = [line.get_xdata()[0] for line in axis.lines]
        axis.set_xlim(min(across) / 3, max(across) * 12)
        axis.set_title(kind, fontsize=8)
        tidy(axis, "MiB beyond the gradients", "forward + backward, ms")
    figure.suptitle(f"Linear + cross entropy alone, bf16\n{caption(rows)}", fontsize=9)
    return figure


def _kind(row: Row) -> str:
    ignored = row.get("ignored_percent", 0)
    text = "N, D, V = {N}, {D}, {V}; {data}".format(**row)
    return f"{text}, {ignored} % ignored" if ignored else text


def scaling(rows: list[Row]) -> Any:
    """Draw time and memory against N, D and V, one column for each size that was varied."""
    rows = [row for row in rows if "both_ms" in row and "scaling" in row]
    if not rows:
        return None
    sizes = [size for size in "NDV" if any(size in row["scaling"] for row in rows)]
    figure, axes = pyplot.subplots(2, len(sizes), figsize=(4.2 * len(sizes), 6), squeeze=False)
    for column, size in enumerate(sizes):
        here = [row for row in rows if size in row["scaling"]]
        fixed = ", ".join(f"{other} = {here[0][other]}" for other in "NDV" if other != size)
        axes[0][column].set_title(fixed, fontsize=8)
        for axis, label, pick in (
            (axes[0][column], "forward + backward, ms", lambda row: row["both_ms"]["median"]),
            (axes[1][column], "MiB beyond the gradients", memory_of),
        ):
            for method in unique(row["method"] for row in here):
                points = sorted((r[size], pick(r)) for r in here if r["method"] == method)
                points = [(x, y) for x, y in points if y is not None]
                if points:
                    across, up = zip(*points, strict=True)
                    axis.plot(across, up, "o-", ms=3, label=method, color=colour(method))
            axis.set_xscale("log", base=2)
            tidy(axis, size, label)
        axes[0][column].set_ylim(bottom=0)
        if axes[1][column].lines:
            axes[1][column].set_yscale("log")
    axes[0][0].legend(frameon=False, fontsize=7)
    figure.suptitle(f"Linear + cross entropy alone, bf16, {rows[0]['data']}\n{caption(rows)}")
    return figure


def curves(rows: list[Row]) -> Any:
    """Draw validation loss over steps, and its difference to the baseline, with bands over seeds.

    The difference is taken seed by seed; bands are one standard deviation on both sides.
    """
    found = convergence.latest(rows)
    done = {name: lines for name, lines in found.items() if lines[-1].get("done")}
    if not done:
        return None
    parsed = {tuple(name.split("/")): _validation(lines) for name, lines in done.items()}
    if not any(method == convergence.BASE_METHOD for _, method, _ in parsed):
        return None  # a curve alone says nothing
    phases = [p for p in convergence.training.PHASES if any(key[0] == p for key in parsed)]
    figure, axes = pyplot.subplots(2, len(phases), figsize=(4.6 * len(phases), 6), squeeze=False)
    for column, phase in enumerate(phases):
        baseline = {
            seed: curve
            for (p, method, seed), curve in parsed.items()
            if (p, method) == (phase, convergence.BASE_METHOD)
        }
        for method in unique(key[1] for key in parsed if key[0] == phase):
            here = {s: c for (p, m, s), c in parsed.items() if (p, m) == (phase, method)}
            shade = colour(method if method in COLOURS else f"memeff {method}")
            _band(axes[0][column], list(here.values()), method, shade)
            apart = [_difference(c, baseline[s]) for s, c in here.items() if s in baseline]
            if apart and method != convergence.BASE_METHOD:
                _band(axes[1][column], apart, method, shade)
        title = {"scratch": "from scratch", "tune": "fine-tuned on other text"}[phase]
        axes[0][column].set_title(title, fontsize=9)
        axes[1][column].axhline(0, color=colour(convergence.BASE_METHOD), linewidth=0.8)
        tidy(axes[0][column], "step", "validation loss")
        tidy(axes[1][column], "step", f"difference to {convergence.BASE_METHOD}, %")
    axes[0][0].legend(frameon=False, fontsize=8)
    seeds = len({key[2] for key in parsed})
    first = next(iter(done.values()))[0]
    recipe = first["recipe"]
    size = f"{recipe['layers']} layers x {recipe['width']}, vocabulary {recipe['vocabulary']}"
    figure.suptitle(f"Llama, {size}, {seeds} seeds\n{caption([first])}", fontsize=9)
    return figure


def _validation(lines: list[Row]) -> dict[int, float]:
    return {line["step"]: line["validation"] for line in lines if "step" in line}


def _difference(curve: dict[int, float], baseline: dict[int, float]) -> dict[int, float]:
    return {s: 100 * (v - baseline[s]) / baseline[s] for s, v in curve.items() if s in baseline}


def _band(axis: Any, several: list[dict[int, float]], label: str, shade: str) -> None:
    steps = sorted(set.intersection(*(set(curve) for curve in several)))
    columns = [[curve[step] for curve in several] for step in steps]
    middle = [statistics.mean(column) for column in columns]
    axis.plot(steps, middle, label=label, color=shade, linewidth=1.2)
    if len(several) > 1:
        spread = [statistics.stdev(column) for column in columns]
        low = [m - s for m, s in zip(middle, spread, strict=True)]
        high = [m + s for m, s in zip(middle, spread, strict=True)]
        axis.fill_between(steps, low, high, color=shade, alpha=0.2, linewidth=0)


def ternary_training(rows: list[Row]) -> Any:
    """Draw validation loss of ternary models over the second half of their steps.

    A panel per figure of BitNet a4.8.
    """
    found: dict[str, list[dict[int, float]]] = {}
    runs = convergence.latest(rows)
    for name, lines in runs.items():
        if lines[-1].get("done"):
            variant, seed = name.rsplit("/", 1)
            before = {}
            if lines[0].get("stages"):  # it starts where the first stage of this run ended
                first = _validation(runs.get(f"a4.8/{seed}", []))
                before = {s: v for s, v in first.items() if s < min(_validation(lines))}
            found.setdefault(variant, []).append({**before, **_validation(lines)})
    panels = {title: [n for n in names if n in found] for title, names in TERNARY_PANELS.items()}
    panels = {title: names for title, names in panels.items() if names}
    if not panels:
        return None
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), squeeze=False)
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for number, name in enumerate(names):
            last = max(found[name][0])
            late = [{s: v for s, v in c.items() if s >= last / 2} for c in found[name]]
            _band(axis, late, name, f"C{number}")
        axis.set_title(title, fontsize=9)
        axis.legend(frameon=False, fontsize=7)
        tidy(axis, "step", "validation loss")
    recipe = next(row for row in rows if "recipe" in row)
    figure.suptitle(f"Ternary weights, small Llama\n{caption([recipe])}", fontsize=9)
    return figure


def ternary_model(rows: list[Row]) -> Any:
    """Draw a real model's loss over both stages, and the gaps of the second stage from b1.58."""
    judged = [row for row in rows if row.get("judged") and not row.get("done")]
    second = [row for row in judged if row["stage"] == 2 and row.get("of_steps")]
    ends = [row for row in rows if row.get("judged_each")]
    if not second or not ends:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for seed in unique(row["seed"] for row in second):
        curve = {r["step"]: _mean(r) for r in judged if (r["stage"], r["seed"]) == (1, seed)}
        left.plot([*curve], [*curve.values()], color="#9a9a9a", linewidth=1.2)
    base = {(r["seed"], r["step"]): _mean(r) for r in second if r["variant"] == "b1.58"}
    for shade, name in enumerate(unique(_variant(row) for row in second)):
        mine = [row for row in second if _variant(row) == name]
        gaps: dict[int, dict[float, float]] = {}
        for seed in unique(row["seed"] for row in mine):
            own = [row for row in mine if row["seed"] == seed]
            steps = [row["first_steps"] + row["step"] for row in own]
            label = name if seed == mine[0]["seed"] else None
            left.plot(steps, [_mean(r) for r in own], color=f"C{shade}", label=label, lw=1)
            for number, row in enumerate(own):
                if (seed, row["step"]) in base and row["step"]:
                    gap = _mean(row) - base[seed, row["step"]]
                    gaps.setdefault(seed, {})[number] = gap
        if mine[0]["variant"] != "b1.58":
            _band(right, [*gaps.values()], name, f"C{shade}")
    left.legend(frameon=False, fontsize=7)
    right.axhline(0.02, color="black", linewidth=0.6, linestyle="--")
    tidy(left, "step (gray: first stage)", "loss on held-out text")
    left.set_ylim(0, 8)
    right.set_ylim(bottom=0)
    tidy(right, "evaluation in the second stage", "loss above b1.58 (dashed: 0.02)")
    model = ends[0]["model"]
    figure.suptitle(f"{model} in ternary weights\n{caption(ends)}", fontsize=9)
    return figure


def _variant(row: Row) -> str:
    return row["variant"] + (", rotated" if row.get("rotated") else "")


def _mean(row: Row) -> float:
    return statistics.mean(row["judged"].values())


TERNARY_PANELS = {
    "hybrid and four bits everywhere (figure 4)": ["b1.58 relu2", "hybrid", "all int4", "all fp4"],
    "input of the down projection (figure 5)": [
        "b1.58 relu2",
        "down int4 relu2",
        "down fp4 relu2",
        "b1.58",
        "down int4 silu",
        "down fp4 silu",
    ],
    "input of attention, gate and up (figure 6)": [
        "b1.58 relu2",
        "inputs int4 absmean",
        "inputs int4 absmax",
        "inputs fp4 e2m1",
    ],
    "full precision and ternary": ["full precision", "full precision relu2", "b1.58", "a4.8"],
}
"""Title of a panel -> its runs."""


def coded_weight_throughput(rows: list[Row]) -> Any:
    """Draw bytes of bf16 per second in both directions against the size of a matrix."""
    rows = latest(rows, "way", "side")
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6), sharey=True)
    for axis, direction, title in zip(
        axes, ("in", "out"), ("encoding, or away", "decoding, or back"), strict=True
    ):
        for way in unique(row["way"] for row in rows):
            lines = [row for row in rows if row["way"] == way]
            rates = [row[f"{direction}_gb_per_s"] for row in lines]
            axis.plot([row["mib"] for row in lines], rates, marker="o", markersize=3, label=way)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=8)
        tidy(axis, "MiB of bf16", "GB/s of bf16" if direction == "in" else "")
    axes[1].legend(fontsize=7, frameon=False)
    figure.suptitle(caption(rows), fontsize=8)
    return figure


def coded_kv_batch(rows: list[Row]) -> Any:
    """Draw tokens per second and peak memory against the number of sequences, by cache."""
    steps = [row for row in rows if row["kind"] == "coded kv batch" and "ms" in row]
    sizes = Counter((row["shape"], row["tokens"], row["layers"]) for row in steps)
    size = sizes.most_common(1)[0][0]
    steps = [row for row in steps if (row["shape"], row["tokens"], row["layers"]) == size]
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6))
    for cache in unique(row["cache"] for row in steps):
        by_batch = {row["batch"]: row for row in steps if row["cache"] == cache}  # the latest
        counts = sorted(by_batch)
        for axis, key in zip(axes, ("tokens_per_s", "peak_gib"), strict=True):
            found = [by_batch[count][key] for count in counts]
            axis.plot(counts, found, marker="o", markersize=3, label=cache)
    for axis, up in zip(axes, ("tokens per second", "GiB at most"), strict=True):
        axis.set_xscale("log", base=2)
        tidy(axis, f"sequences of {size[1]:,} tokens, {size[2]} layers", up)
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle(caption(steps), fontsize=8)
    return figure


def weights_ablation(rows: list[Row]) -> Any:
    """Draw perplexity and time of a forward against the bits of a weight (NeuZip's Figure 3)."""
    found = [row for row in rows if row["part"] == "perplexity"]
    if not found:
        return None
    found = latest(found, "method", "codec", "mantissa", "block")
    timed = [row for row in rows if row["part"] == "times"]
    timed = latest(timed, "method", "codec", "mantissa", "block")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for kept, shade in KEPT_COLOURS.items():
        mine = [r for r in found if r.get("mantissa") == kept and r["codec"] == "tier"]
        mine.sort(key=lambda row: row["bits"])
        label = f"tier, {kept} mantissa bits" + (" (lossless)" if kept == 7 else "")
        across = [row["bits"] for row in mine]
        left.plot(across, [row["perplexity"] for row in mine], "o-", color=shade, label=label)
        for row in [row for row in timed if row.get("mantissa") == kept]:
            right.plot(row["bits"], row["ms"]["median"], "o", color=shade)
            right.annotate(row["codec"], (row["bits"], row["ms"]["median"]), **_BESIDE)
    for row in found:
        if row.get("emulated") or row["method"] == "dense":
            left.plot(row["bits"], row["perplexity"], "x", color="black")
            left.annotate(row["method"], (row["bits"], row["perplexity"]), **_BESIDE)
    for row in timed:
        if row["method"] == "dense":
            right.plot(row["bits"], row["ms"]["median"], "x", color="black")
            right.annotate("dense", (row["bits"], row["ms"]["median"]), **_BESIDE)
    tidy(left, "bits per weight of the linears", "perplexity")
    tidy(right, "bits per weight of the linears", "ms of a forward, eager")
    right.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=7)
    title = f"Language model of {found[0]['parameters'] / 1e6:.0f} M parameters"
    figure.suptitle(f"{title}; x: plain emulations and dense\n{caption(found)}", fontsize=8)
    return figure


_BESIDE: dict[str, Any] = {"textcoords": "offset points", "xytext": (3, 3), "fontsize": 6}


def attention_ablation(rows: list[Row]) -> Any:
    """Draw 4-bit scores by layer and step, and the recovery of adaptive choices."""
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
    tidy(axes[0], "layer", "score of 4b, mean and deviation")
    axes[0].legend(frameon=False, fontsize=7)
    chosen = [row for row in rows if "recovered" in row]
    for row in latest(chosen, "model", "variant"):
        marker = "x" if "and step" in row["variant"] else "o"
        shade = MODEL_COLOURS.get(row["model"], "black")
        axes[2].plot(100 * row["share_of_4b"], 100 * row["recovered"], marker, color=shade)
    axes[2].axhline(80, color="black", linewidth=0.6, linestyle="--")
    axes[2].set_ylim(-20, 120)
    tidy(axes[2], "% of attentions in 4 bits", "% of the harm recovered")
    axes[2].set_title("o by layer, x by layer and step", fontsize=8)
    figure.suptitle(caption(rows), fontsize=8)
    return figure


def _scores(axis: Any, row: Row) -> None:
    means = [sum(steps) / len(steps) for steps in row["four"]["mean"]]
    spreads = [max(steps) for steps in row["four"]["deviation"]]
    shade = MODEL_COLOURS.get(row["model"], "black")
    places = range(len(means))
    axis.errorbar(places, means, spreads, fmt="o-", markersize=3, color=shade, label=row["model"])


def tasks(rows: list[Row]) -> Any:
    """Draw each mode's mean change over tasks against its bytes and its times, a row per model."""
    found = {}
    for name in unique((row["model"], row["dtype"]) for row in rows):
        here = [row for row in rows if (row["model"], row["dtype"]) == name]
        asked = [row for row in here if row["what"] == "tasks"]
        made = task_scores.scores(asked)
        over = task_scores.solved(asked, made)
        means = {
            mode: task_scores.mean_of(own, [task for task in over if task in own])
            for mode, own in made.items()
        }
        sizes = [task_scores.share_of_bytes(here, m) for m, mean in means.items() if mean]
        if sum(size is not None for size in sizes) > 1:
            found[name] = (here, means, len(over))
    if not found:
        return None
    figure, axes = pyplot.subplots(len(found), 2, figsize=(9, 3.8 * len(found)), squeeze=False)
    for (left, right), ((model, _), (here, means, count)) in zip(axes, found.items(), strict=True):
        for mode, mean in means.items():
            if mean is None:
                continue
            shade = next((c for part, c in MODE_COLOURS.items() if mode.startswith(part)), "black")
            spot = {"fmt": "o", "markersize": 4, "color": shade}
            share = task_scores.share_of_bytes(here, mode)
            ratio = task_scores.share_of_time(here, mode)
            for axis, across in ((left, share), (right, ratio)):
                if across is not None:
                    up = 100 * mean.change
                    axis.errorbar(100 * across, up, 100 * mean.error, **spot)
                    axis.annotate(_short(mode), (100 * across, up), **_BESIDE)
        right.set_visible(bool(right.lines))  # there are times
        left.set_title(f"{model}, {count} tasks", fontsize=9)
        tidy(
            left,
            "bytes of the cache (blue) or weights (orange), % of bf16",
            "mean change of scores, points",
        )
        how = task_scores.how_timed(here)
        tidy(right, f"time of kernels, {how}, % of exact", "")
    figure.suptitle(caption(rows), fontsize=8)
    return figure


def _short(mode: str) -> str:
    return mode.partition(", ")[2].replace(" bits of 7", "").replace("merged from ", "")


MODE_COLOURS = {"cache": "#4c78a8", "weights": "#f2a541", "attention": "#2da44e"}


def trained_probabilities(rows: list[Row]) -> Any:
    """Draw the mean probability of the i-th likeliest token of real models."""
    rows = latest([row for row in rows if row["part"] == "probabilities"], "model")
    figure, axis = pyplot.subplots(figsize=(5, 3.6))
    for row in rows:
        label = f"{row['model']}: {row['ranks_above_eps']} ranks above"
        axis.plot(row["rank"], row["probability"], label=label)
        axis.axhline(row["eps"], color="black", linewidth=0.6, linestyle="--")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.legend(frameon=False, fontsize=7)
    tidy(axis, "i-th likeliest token (dashed: 2^-12)", "mean probability")
    figure.suptitle(
        f"Real models, {rows[0]['tokens']} tokens of prose\n{caption(rows)}", fontsize=8
    )
    return figure


def trained_exponents(rows: list[Row]) -> Any:
    """Draw how often each exponent occurs in real models' weights, and in random ones."""
    rows = latest([row for row in rows if row["part"] == "exponents"], "model")
    figure, axes = pyplot.subplots(1, len(rows), figsize=(4.5 * len(rows), 3.6), squeeze=False)
    for axis, row in zip(axes[0], rows, strict=True):
        for kind, shade in (("random", "#9a9a9a"), ("trained", "#e4572e")):
            counts = row[kind]["exponents"]
            seen = [place for place, count in enumerate(counts) if count and place]
            share = [counts[place] / row["weights"] for place in seen]
            label = f"{kind}: {row[kind]['entropy']['exponent']:.2f} of 8 bits"
            across = [place - 127 for place in seen]
            axis.step(across, share, where="mid", color=shade, label=label)
        axis.set_yscale("log")
        axis.set_title(row["model"], fontsize=9)
        axis.legend(frameon=False, fontsize=7)
        tidy(axis, "exponent", "share of weights")
    figure.suptitle(caption(rows), fontsize=8)
    return figure


def trained_codes(rows: list[Row]) -> Any:
    """Draw channels of one layer's keys, and 4-bit codes with means and without."""
    rows = latest([row for row in rows if row["part"] == "codes"], "model")
    figure, axes = pyplot.subplots(len(rows), 3, figsize=(12, 3.4 * len(rows)), squeeze=False)
    for (first, *others), row in zip(axes, rows, strict=True):
        places = range(len(row["channel_mean"]))
        first.errorbar(places, row["channel_mean"], row["channel_deviation"], fmt="o", markersize=2)
        place = f"layer {row['shown']['layer']}, head {row['shown']['head']}"
        first.set_title(f"{row['model']}, keys of {place}", fontsize=9)
        tidy(first, "channel", "mean and deviation over tokens")
        for axis, name in zip(others, ("queries", "keys"), strict=True):
            for kind, shade in ((name, "#9a9a9a"), (f"{name}, smoothed", "#e4572e")):
                counts = row["counts"][kind]
                share = [count / sum(counts) for count in counts]
                label = f"{kind}: {row['entropy'][kind]:.2f} bits used"
                axis.step(range(-7, 8), share, where="mid", color=shade, label=label)
            axis.legend(frameon=False, fontsize=7)
            tidy(axis, "4-bit code", "share, all layers and heads")
    figure.suptitle(caption(rows), fontsize=8)
    return figure


def trained_layers(rows: list[Row]) -> Any:
    """Draw cosines of neighbouring layers' keys and values, as they are and aligned."""
    rows = latest([row for row in rows if row["part"] == "layers"], "model")
    figure, axes = pyplot.subplots(len(rows), 2, figsize=(9, 3.2 * len(rows)), squeeze=False)
    for pair, row in zip(axes, rows, strict=True):
        for axis, name in zip(pair, ("keys", "values"), strict=True):
            for end, shade, label in (
                ("", "#9a9a9a", "as they are"),
                (", aligned", "#e4572e", "aligned"),
                (", later", "#f2a541", "aligned on earlier tokens"),
            ):
                axis.plot(row["cosines"][name + end], "o-", markersize=3, color=shade, label=label)
            axis.set_ylim(-0.5, 1)
            axis.set_title(f"{row['model']}, {name}", fontsize=9)
            tidy(axis, "layer, and the next one", "mean cosine")
    axes[0][0].legend(frameon=False, fontsize=7)
    figure.suptitle(caption(rows), fontsize=8)
    return figure


TRAINED = {
    "trained-probabilities": trained_probabilities,
    "trained-exponents": trained_exponents,
    "trained-codes": trained_codes,
    "trained-layers": trained_layers,
}
"""Figures of `trained-figures.jsonl`."""
PAINTERS: dict[str, tuple[Callable[[list[Row]], Any], str]] = {
    "tasks.jsonl": (tasks, "tasks"),
    "models.jsonl": (training_steps, "training-step"),
    "batch.jsonl": (batch, "training-step-by-batch"),
    "distributed.jsonl": (gpus, "gpus"),
    "linear_cross_entropy.jsonl": (head_and_loss, "linear-cross-entropy"),
    "head-and-loss.jsonl": (head_and_loss, "head-and-loss"),
    "scaling.jsonl": (scaling, "scaling"),
    "convergence.jsonl": (curves, "convergence"),
    "weights-ablation.jsonl": (weights_ablation, "weights-ablation"),
    "attention-ablation.jsonl": (attention_ablation, "attention-ablation"),
    "ternary-qat.jsonl": (ternary_training, "ternary-qat"),
    "ternary-model.jsonl": (ternary_model, "ternary-model"),
    "coded-kv-batch.jsonl": (coded_kv_batch, "coded-kv-batch"),
    "coded-weight-throughput.jsonl": (coded_weight_throughput, "coded-weight-throughput"),
}
"""File of rows -> its painter, and the name of the figure."""


def main() -> None:
    """Draw the figures whose rows exist."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    given = parser.parse_args()
    for folder in sorted(p for p in given.results.iterdir() if p.is_dir()):
        several = [("trained-figures.jsonl", each, name) for name, each in TRAINED.items()]
        for file, paint, name in [*((f, *pair) for f, pair in PAINTERS.items()), *several]:
            if (folder / file).exists():
                figure = paint(read(folder / file))
                if figure is None:
                    print(f"{folder / file}: no row that can be drawn", file=sys.stderr)
                    continue
                figure.tight_layout()
                target = given.figures / f"{name}-{folder.name}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(target, dpi=150)
                pyplot.close(figure)
                print(target)


if __name__ == "__main__":
    main()
