"""Every op of the package on the registry's inputs: forward, and backward where it has one.

    python benchmarks/ops/every_op.py
    python benchmarks/ops/every_op.py --op gated_linear embedding --repeats 20
    python benchmarks/ops/every_op.py --size tiny

A quick look at all ops on a machine, or at one before and after a change; results are not compared.
The other scripts of this folder compare with other libraries, and check before they time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, registry, rows, timing


def measure(name: str, shape: Any, device: str, repeats: int) -> dict[str, Any]:
    """Return the row of an op on one shape."""
    op = registry.OPS[name]
    data = op.draw(shape, device)
    found = op.call(data)
    gradient = torch.ones_like(found)
    clock = timing.Clock(device)

    def forward() -> float:
        clock.flush()
        with torch.no_grad():
            return timing.milliseconds(lambda: op.call(data), device=device)

    def both() -> float:
        clock.flush()
        return timing.milliseconds(lambda: op.call(data).backward(gradient), device=device)

    timers = {"forward_ms": forward, **({"both_ms": both} if found.requires_grad else {})}
    for timer in timers.values():
        timer()
    taken = timing.in_turns(timers, repeats)
    times = {name: rows.percentiles(each) for name, each in taken.items()}
    return {"op": name, "shape": str(shape), "device": device, **times}


def main() -> None:
    """Measure the ops that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", nargs="+", choices=registry.OPS, default=list(registry.OPS))
    parser.add_argument("--size", choices=("h200", "tiny"), default="h200")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "every-op.jsonl")
    given = parser.parse_args()
    device = "cpu" if given.size == "tiny" else "cuda"
    for name in given.op:
        for shape in registry.OPS[name].shapes[given.size]:
            rows.write(given.out, measure(name, shape, device, given.repeats))


if __name__ == "__main__":
    main()
