"""Prints the tables of the pages on ablations from committed rows.

    python benchmarks/ablations/ablation_tables.py attention <results>/attention-ablation.jsonl
    python benchmarks/ablations/ablation_tables.py weights <results>/weights-ablation.jsonl

Of rows that measure the same, the latest counts; models of several seeds stand side by side.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.rows import latest, read

Row = dict[str, Any]
TEXT = "language model"
MODELS = (TEXT, "vision transformer", "diffusion transformer")
MEASURES = {
    "language model": "perplexity, change",
    "vision transformer": "accuracy / same answer as the exact model",
    "diffusion transformer": "PSNR over all images, mean, worst / share of pictures read rightly",
}
BLOCKS = (32, 64, 128, 256, 512)
LAYERS = {
    "2, 3": "scale of 4-bit scores per",
    "4, 5": "weights and values in",
    "6": "values",
}


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
    read = f" / {row['read_rightly']:.1f} %" if "read_rightly" in row else ""
    if row["mse"] == 0.0:
        return f"the same{read}"
    shown = (row[key] for key in ("psnr_db", "psnr_db_mean", "psnr_db_worst"))
    return f"{', '.join(f'{each:.1f}' for each in shown)} dB{read}"


def side_by_side(rows: Iterable[Row]) -> list[str]:
    """Return a table with a line for each variant and a column for each model and seed."""
    found = latest(rows, "model", "seed", "variant")
    places = sorted(dict.fromkeys((row["model"], row["seed"]) for row in found), key=_place)
    by_key = {(row["model"], row["seed"], row["variant"]): quality(row) for row in found}
    seeds = {seed for _, seed in places}
    head = [
        f"{model}{f' {seed}' if len(seeds) > 1 else ''}: {MEASURES.get(model, MEASURES[TEXT])}"
        for model, seed in places
    ]
    variants = list(dict.fromkeys(row["variant"] for row in found))
    body = [[v, *(by_key.get((*place, v), "-") for place in places)] for v in variants]
    return lines(["attention", *head], body)


def _place(key: tuple[str, int]) -> tuple[int, int]:
    return _order(key[0]), key[1]


def _order(model: str) -> int:
    """Return the place of a model in tables: real models come first."""
    return MODELS.index(model) if model in MODELS else -1


def layer_table(rows: list[Row], table: str) -> list[str]:
    """Return average and worst layer of each model and variant."""
    found = latest([r for r in rows if r["table"] == table and r["seed"] == 0], "model", "variant")
    if not found:
        return []
    by_key = {(row["model"], row["variant"]): row for row in found}
    models = sorted(dict.fromkeys(row["model"] for row in found), key=_order)
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
    """Return the share that adaptive choices recover, a column for each requested share of 4b."""
    found: dict[tuple[str, int, str], dict[str, str]] = {}
    for row in (row for row in rows if "recovered" in row):
        way, asked = row["variant"].removeprefix("adaptive ").split(", ")
        share = asked.removesuffix(" of them 4b")
        undone = "-" if math.isnan(row["recovered"]) else f"{100 * row['recovered']:.0f} %"
        found.setdefault((row["model"], row["seed"], way), {})[share] = undone
    shares = list(dict.fromkeys(share for cells in found.values() for share in cells))
    body = [
        [f"{model}{f', seed {seed}' if seed else ''}", way, *(cells.get(s, "-") for s in shares)]
        for (model, seed, way), cells in sorted(found.items(), key=lambda each: _place(each[0][:2]))
    ]
    return lines(["recovered, by share of 4b", "chosen", *shares], body)


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
    return [*found, "Table 7", "", *sums(rows)]


def sums(rows: list[Row]) -> list[str]:
    """Return the relative L1 error of sums: on layers, average / worst, and over random numbers."""
    found: dict[str, dict[str, str]] = {}
    for row in (row for row in rows if row["table"] == "7"):
        name = row["model"] + (f", seed {row['seed']}" if row["seed"] else "")
        average, worst = (row[which]["relative_l1"] for which in ("average", "worst"))
        found.setdefault(name, {})[row["variant"]] = f"{average:.4f} / {worst:.4f}"
    for row in (row for row in rows if row["table"] == "7, random"):
        way, numbers = row["variant"].split("; ")
        error = row["average"]["relative_l1"]
        found.setdefault(f"random, {numbers}", {})[way] = f"{error:.4f}"
    ways = list(dict.fromkeys(way for cells in found.values() for way in cells))
    body = [[name, *(cells.get(way, "-") for way in ways)] for name, cells in found.items()]
    return lines(["E4M3 products of", *ways], body)


# --- weights --------------------------------------------------------------------------------------


def weights(rows: list[Row]) -> list[str]:
    """Return the tables of compressed weights."""
    measured = [row for row in rows if row["part"] == "perplexity"]
    keys = ("method", "codec", "mantissa", "block")
    found = latest(measured, *keys)
    timed = {tuple(row.get(key) for key in keys): row for row in rows if row["part"] == "times"}
    body = []
    for row in found:
        if row.get("block", max(BLOCKS)) < max(BLOCKS):
            continue  # these have a separate table
        name = row["method"]
        if name == "memeff":
            name = f"`{row['codec']}`, {row['mantissa']} bits kept"
            name += f", blocks of {row['block']}" if "block" in row else ""
        cells = [name, f"{row['bits']:.2f}", f"{row['linears_mib']:.1f}", f"{row['model_mib']:.1f}"]
        time = timed.get(tuple(row.get(key) for key in keys))
        cells += [f"{row['perplexity']:.4f}", f"{100 * (row['against_dense'] - 1):+.3f} %"]
        body.append([*cells, "-" if time is None else f"{time['ms']['median']:.1f}"])
    head = ["format of the linear weights", "bits per weight", "memory of the linears, MiB"]
    head += ["memory of the model, MiB", "perplexity", "its change", "forward pass, ms"]
    shown = lines(head, body)
    blocks = [row for row in found if row.get("codec") == "tier" and "block" in row]
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
    shown += lines(["mantissa bits; cells: perplexity, bits per weight", *map(str, sizes)], body)
    return [*shown, *errors(rows)]


def errors(rows: list[Row]) -> list[str]:
    """Return L2 errors by block, and for blocks of 512 the largest error and the entropy."""
    found = latest([r for r in rows if r["part"] == "errors"], "weights", "mantissa", "block")
    by_key = {(row["weights"], row["mantissa"], row["block"]): row for row in found}
    blocks = sorted({row["block"] for row in found})
    body = []
    for kind, kept in dict.fromkeys((row["weights"], row["mantissa"]) for row in found):
        mine = [by_key[kind, kept, block] for block in blocks]
        cells = [f"{row.get('memeff', row['formula'])['relative_l2']:.4f}" for row in mine]
        last = mine[-1]
        cells += [f"{last['formula']['largest']:.3f}", f"{last['entropy_bits']:.2f}"]
        body.append([f"{kind}, {kept} bits kept", *cells])
    return lines(["L2 error by block", *map(str, blocks), "largest", "entropy, bits"], body)


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
