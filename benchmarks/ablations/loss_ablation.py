"""The paper's Table 1 and Table A1 for this project: the worth of each part of the loss.

    python benchmarks/ablations/loss_ablation.py --shape gemma2 llama3
    python benchmarks/ablations/loss_ablation.py --ignored 50 90  # Table A1
    python benchmarks/ablations/loss_ablation.py table benchmarks/results/ablations.jsonl

Its columns are the paper's: loss, gradient and both, each as peak memory and time, under a lower
bound (the outputs' bytes; the library's products). Rows are the filters with and without vocabulary
sorting, one gradient at a time, no filter, and the baselines. With ignored targets every method
runs unchanged, and again with the ignored rows removed beforehand. The rows also have the shares of
active tiles and the dropped mass, computed densely from the same tensors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, measuring, methods, registry, rows, tiles
from benchmarks.ops import linear_cross_entropy as op

METHODS = [
    "memeff mass",
    "memeff mass sort=0",
    "memeff mass parts=hidden",
    "memeff mass parts=weight",
    "memeff block",
    "memeff block sort=0",
    "memeff exact",
    "liger",
    "inductor",
    "eager",
    "apple",
    "apple no filter",
]
TILES = ((128, 128), (128, 256))
MIB = 2**20


def lower_bound(tensors: registry.Inputs, product_time: dict[str, float]) -> dict[str, Any]:
    """Return the lower bound as a row: output bytes, and one and two library products.

    The loss is one fp32 number. Forward needs one product; the two gradients need two, if the
    probabilities were free.
    """
    outputs = (tensors.hidden, tensors.weight)
    gradients = sum(t.numel() * t.element_size() for t in outputs) / MIB
    times = {
        part: {key: round(count * value, 3) for key, value in product_time.items()}
        for part, count in (("loss_ms", 1), ("gradient_ms", 2), ("both_ms", 3))
    }
    memory = {"loss": 4 / MIB, "gradient": gradients, "both": gradients, "beyond_gradients": 0.0}
    return {"method": "lower bound", "memory_mib": memory, **times}


def inspected(tensors: registry.Inputs) -> dict[str, Any]:
    """Return tile shares and dropped mass: dense, and as the op itself sees them if it can say."""
    found: dict[str, Any] = {
        "tiles": tiles.measure(tensors.hidden, tensors.weight, tensors.target, TILES)
    }
    try:
        found["op"] = methods.inspect(tensors.hidden, tensors.weight, tensors.target)
    except methods.Unavailable as problem:
        found["op_unavailable"] = str(problem)
    return found


def without_ignored(tensors: registry.Inputs) -> registry.Inputs:
    """Return the inputs with the rows of ignored targets taken out."""
    keep = tensors.target != methods.IGNORED
    hidden = tensors.hidden.detach()[keep].requires_grad_()
    return registry.Inputs(hidden, tensors.weight, tensors.target[keep])


def variants(ignored: int) -> dict[str, Callable[[registry.Inputs], registry.Inputs]]:
    """Return the ways to hand over the inputs: as they are and, for Table A1, compacted."""
    as_is = {"as given": lambda tensors: tensors}
    return as_is | {"ignored removed": without_ignored} if ignored else as_is


def measure(shape: str, data: str, ignored: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return every row of the table for one shape, data and share of ignored targets."""
    found = []
    for label, prepare in variants(ignored).items():
        torch._dynamo.reset()
        tensors = prepare(
            registry.inputs(shape, data, op.device(), op.DTYPES[given.dtype], ignored)
        )
        base = {
            name: {**op.describe(shape, data, ignored, given.dtype, name), "variant": label}
            for name in given.method or METHODS
        }
        losses = op.checked(list(base), tensors, base)
        timed = measuring.interleaved(losses, tensors, given.repeats, op.device())
        for name, times in timed.items():
            base[name] |= times
            base[name]["memory_mib"] = measuring.memory(losses[name], tensors)
        facts = {**op.describe(shape, data, ignored, given.dtype, ""), "variant": label}
        bound = lower_bound(tensors, measuring.product_ms(tensors, given.repeats, op.device()))
        found += [{**facts, **bound}, *base.values()]
        found.append({**facts, "method": "inspection", **inspected(tensors)})
        counted = int((tensors.target != methods.IGNORED).sum())
        for row in found[-len(base) - 2 :]:
            row["targets_that_count"] = counted
        del tensors, losses
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, one table per shape, data, share and variant."""
    lines: list[str] = []
    heading = ""
    for row in found:
        this = "{shape} ({N}, {D}, {V}), {data}, {ignored_percent} % ignored, {variant}".format(
            **row
        )
        if this != heading:
            heading = this
            lines += ["", this, "", "| method | loss MiB / ms | gradient | both | dE, dC error |"]
            lines.append("|---|---|---|---|---|")
        lines.append(_inspection(row) if row["method"] == "inspection" else _line(row))
    return "\n".join(lines).strip()


def _line(row: dict[str, Any]) -> str:
    cells = [row["method"]]
    for part in ("loss", "gradient", "both"):
        memory = row.get("memory_mib", {}).get(part)
        milliseconds = row.get(f"{part}_ms", {}).get("median")
        shown = "-" if memory is None else format(memory, ".0f" if memory >= 10 else ".3g")
        cells.append(f"{shown} / {'-' if milliseconds is None else format(milliseconds, '.1f')}")
    reason = next((row[key] for key in ("unavailable", "failed", "error") if key in row), None)
    errors = [row.get("grad_hidden_error"), row.get("grad_weight_error")]
    known = ", ".join(format(error, ".1e") for error in errors if error is not None)
    cells.append(reason or known or "-")
    return f"| {' | '.join(cells)} |"


def _inspection(row: dict[str, Any]) -> str:
    seen = row["tiles"]
    shares = ", ".join(f"{name} {share:.1%}" for name, share in seen["active_share"].items())
    largest = ", ".join(f"{name} {mass:.1e}" for name, mass in seen["dropped_mass_max"].items())
    return f"\nActive tiles: {shares}. Largest mass a row loses to `block`: {largest}."


def main() -> int:
    """Measure, or print the measured rows."""
    parser = op.arguments(__doc__)
    parser.add_argument(
        "what", choices=["linear_cross_entropy", "table"], nargs="?", default="linear_cross_entropy"
    )
    parser.add_argument("rows", nargs="?", type=Path, help="for table: the file to print")
    parser.add_argument("--method", nargs="+", help="instead of the table's own rows")
    parser.add_argument("--out", type=Path, default=RESULTS / "ablations.jsonl")
    given = parser.parse_args()
    if given.what == "table":
        print(table(rows.read(given.rows or given.out)))
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    everything = []
    for shape, data, ignored in product(given.shape, given.data, given.ignored):
        for row in measure(shape, data, ignored, given):
            rows.append(given.out, {**row, **rows.environment()})
            everything.append(row)
    print(table(everything))
    return 1 if any("failed" in row for row in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
