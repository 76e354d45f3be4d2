"""Prints the tables of the pages on ablations from committed rows.

    python benchmarks/ablation_tables.py attention <folder of results>/attention-ablation.jsonl
    python benchmarks/ablation_tables.py weights <folder of results>/weights-ablation.jsonl

Of rows that measure the same, the latest counts; models of several seeds stand side by side.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rows import read

Row = dict[str, Any]
MODELS = ("language model", "vision transformer", "diffusion transformer")
MEASURES = {
    "language model": "perplexity, change",
    "vision transformer": "accuracy / as exact",
    "diffusion transformer": "PSNR, worst / read rightly",
}
LAYERS = {
    "2, 3": "scale of 4-bit scores per",
    "4, 5": "weights and values in",
    "6": "values",
    "7": "sums",
}


def latest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Return the last row for each combination of values, in the order of first appearance."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[tuple(row.get(key) for key in keys)] = row
    return list(found.values())


def lines(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return a table of Markdown and an empty line."""
    found = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*found, *(f"| {' | '.join(cells)} |" for cells in body), ""]


# --- attention ------------------------------------------------------------------------------------


def quality(row: Row) -> str:
    """Return the measures of a whole model in a few words."""
    if "failed" in row:
        return "failed"
    if "perplexity" in row:
        change = row.get("against_exact")
        shown = "" if change is None else f", {100 * (change - 1):+.3f} %"
        return f"{row['perplexity']:.4f}{shown}"
    if "accuracy" in row:
        return f"{row['accuracy']:.2f} % / {row['same_answers']:.2f} %"
    if row["mse"] == 0.0:
        return f"exact / {row['read_rightly']:.1f} %"
    worst = row["psnr_db_worst"]
    return f"{row['psnr_db']:.1f} dB, {worst:.1f} dB / {row['read_rightly']:.1f} %"


def side_by_side(rows: Iterable[Row]) -> list[str]:
    """Return a table with a line for each variant and a column for each model and seed."""
    found = latest(rows, "model", "seed", "variant")
    places = sorted({(row["model"], row["seed"]) for row in found}, key=_place)
    by_key = {(row["model"], row["seed"], row["variant"]): quality(row) for row in found}
    seeds = {seed for _, seed in places}
    head = [
        f"{model}{f' {seed}' if len(seeds) > 1 else ''}: {MEASURES[model]}"
        for model, seed in places
    ]
    variants = list(dict.fromkeys(row["variant"] for row in found))
    body = [[v, *(by_key.get((*place, v), "-") for place in places)] for v in variants]
    return lines(["attention", *head], body)


def _place(key: tuple[str, int]) -> tuple[int, int]:
    return MODELS.index(key[0]), key[1]


def layer_table(rows: list[Row], table: str) -> list[str]:
    """Return average and worst layer of each model and variant."""
    found = latest([r for r in rows if r["table"] == table and r["seed"] == 0], "model", "variant")
    if not found:
        return []
    by_key = {(row["model"], row["variant"]): row for row in found}
    models = [model for model in MODELS if any(row["model"] == model for row in found)]
    body = []
    for variant in dict.fromkeys(row["variant"] for row in found):
        cells = [variant]
        for model in models:
            row = by_key.get((model, variant))
            for which in ("average", "worst"):
                cells.append("-" if row is None else _measures(row[which]))
        body.append(cells)
    head = [f"{model}: {which}" for model in models for which in ("average", "worst layer")]
    return lines([LAYERS[table], *head], body)


def _measures(found: dict[str, float]) -> str:
    return f"{100 * found['cosine']:.2f} % / {found['relative_l1']:.4f} / {found['rmse']:.4f}"


def adaptive(rows: list[Row]) -> list[str]:
    """Return what adaptive choices recover, by share of 4b."""
    found = latest([row for row in rows if "recovered" in row], "model", "seed", "variant")
    body = []
    for row in sorted(found, key=lambda row: (*_place((row["model"], row["seed"])),)):
        way = row["variant"].removeprefix("adaptive ").split(",")[0]
        undone = "-" if math.isnan(row["recovered"]) else f"{100 * row['recovered']:.0f} %"
        name = row["model"] if not row["seed"] else f"{row['model']}, seed {row['seed']}"
        body.append([name, way, f"{100 * row['share_of_4b']:.0f} %", quality(row), undone])
    return lines(["model", "chosen", "share of 4b", "result", "recovered"], body)


def attention(rows: list[Row]) -> list[str]:
    """Return the tables of attention in low bits."""
    tables = [row for row in rows if row["part"] == "tables"]
    found = ["Table 1", "", *side_by_side(row for row in tables if row["table"] == "1")]
    whole = [row for row in tables if row["table"] == "11" and "recovered" not in row]
    found += ["Table 11", "", *side_by_side(whole), *adaptive(rows)]
    for inner in dict.fromkeys(row["inner"] for row in rows if "inner" in row):
        through = [row for row in rows if row["part"] == "door" and row.get("inner") == inner]
        found += [f"Through the backend, {inner}", "", *side_by_side(through)]
        for row in latest([r for r in through if "levels" in r], "model", "seed"):
            chosen = ", ".join(f"{count} {level}" for level, count in row["levels"].items())
            found += [f"{row['model']} {row['seed']}: table of {chosen}; {row['sites']} sites", ""]
    for table in LAYERS:
        found += [f"Table {table}", "", *layer_table(rows, table)]
    random = latest([row for row in rows if row["table"] == "7, random"], "variant")
    body = [[row["variant"], _measures(row["average"])] for row in random]
    return [*found, *lines(["sums", "cosine / relative L1 / RMSE"], body)]


# --- weights --------------------------------------------------------------------------------------


def weights(rows: list[Row]) -> list[str]:
    """Return the tables of compressed weights."""
    measured = [row for row in rows if row["part"] == "perplexity"]
    found = latest(measured, "method", "codec", "mantissa", "block", "seed")
    body = []
    for row in found:
        name = row["method"]
        if name == "memeff":
            name = f"`{row['codec']}`, {row['mantissa']} bits kept"
            name += f", blocks of {row['block']}" if "block" in row else ""
        cells = [name, f"{row['bits']:.2f}", f"{row['linears_mib']:.1f}", f"{row['model_mib']:.1f}"]
        cells += [f"{row['perplexity']:.4f}", f"{100 * (row['against_dense'] - 1):+.3f} %"]
        body.append([*cells, f"{row['ms']['median']:.1f}" if "ms" in row else "-"])
    head = ["linears", "bits", "linears, MiB", "model, MiB", "perplexity", "change", "forward, ms"]
    shown = lines(head, body)
    blocks = [row for row in found if row.get("codec") == "rans" and "block" in row]
    sizes = sorted({row["block"] for row in blocks})
    by_key = {(row["mantissa"], row["block"]): row for row in blocks}
    body = [
        [
            f"{kept}",
            *(
                f"{by_key[kept, size]['perplexity']:.3f}, {by_key[kept, size]['bits']:.2f}"
                for size in sizes
            ),
        ]
        for kept in sorted({row["mantissa"] for row in blocks})
    ]
    shown += lines(["bits kept: perplexity, bits a weight", *map(str, sizes)], body)
    wrong = latest([r for r in rows if r["part"] == "errors"], "weights", "mantissa", "block")
    body = [
        [
            row["weights"],
            str(row["mantissa"]),
            str(row["block"]),
            f"{row['formula']['relative_l2']:.4f}",
            f"{row['memeff']['relative_l2']:.4f}" if "memeff" in row else "-",
            f"{row['formula']['largest']:.3f}",
            f"{row['entropy_bits']:.2f}",
        ]
        for row in wrong
    ]
    head = [
        "weights",
        "bits kept",
        "block",
        "L2, formula",
        "L2, memeff",
        "largest",
        "entropy, bits",
    ]
    return [*shown, *lines(head, body)]


def main() -> int:
    """Print the tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["attention", "weights"])
    parser.add_argument("rows", type=Path)
    given = parser.parse_args()
    makers = {"attention": attention, "weights": weights}
    print("\n".join(makers[given.what](read(given.rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
