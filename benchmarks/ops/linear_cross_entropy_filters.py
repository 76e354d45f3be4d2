"""Gradient filters of `hopper`: dropped mass, errors, memory, times in turns, each kernel.

    python benchmarks/ops/linear_cross_entropy_filters.py --every-depth --out $OUT/filters.jsonl

Data are `trained`, or a file of `data/hidden_states.py`. A row whose kernels sum to less than its
time waited for the host; `host_ms` is a call's time there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import measuring, methods, registry, rows, timing
from benchmarks.ops import filter_activity
from memeff_compile.kernels._gradient_filter import levels as gradient_filter

SHAPES = ("8192x576x49152", "8192x896x151936", "8192x4096x128256")
FILTERS = ("exact", "mass", "block", "published")
BASELINE = "inductor"
GROUPS = {
    "logits": ("hopper_logits", "hopper_base"),
    "scores": ("filter_score", "filter_estimate", "filter_sample"),
    "choice": ("filter_",),
    "order": ("sort", "Sort", "Radix", "radix"),
    "logits of tiles": ("filter_fill",),
    "products": ("filter_products",),
    "sums of dE": ("filter_rows",),
    "dense products": ("hopper_specialized_products", "hopper_products"),
}
"""Kernels by parts of their names; the longest part that fits decides."""


def group_of(name: str) -> str:
    """Return which group a kernel belongs to.

    Example: group_of("_gradient_filter_fill_kernel") == "logits of tiles".
    """
    fitting = [
        (len(part), group) for group, parts in GROUPS.items() for part in parts if part in name
    ]
    return max(fitting)[1] if fitting else "others"


def kernels(call: Callable[[], Any]) -> tuple[dict[str, float], dict[str, int]]:
    """Return the milliseconds of each group of kernels in one call, and their numbers."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    launches: dict[str, int] = {}
    for each in seen.key_averages():
        if not each.self_device_time_total:  # a call of the host
            continue
        group = group_of(each.key)
        spent[group] = round(spent.get(group, 0.0) + each.self_device_time_total / 1e3, 3)
        launches[group] = launches.get(group, 0) + each.count
    return spent, launches


def host_milliseconds(call: Callable[[], Any], count: int = 5) -> float:
    """Return how long a call keeps the host, with a GPU that is busy all the while."""
    taken = []
    for _ in range(count):
        timing.synchronize()
        if torch.cuda.is_available():
            torch.cuda._sleep(100_000_000)
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e3)
    timing.synchronize()
    return round(sorted(taken)[count // 2], 3)


def left_out(data: registry.Inputs, how: str) -> dict[str, Any]:
    """Return a filter's decisions on these tensors."""
    hidden, weight = data.hidden.detach(), data.weight.detach()
    found = filter_activity.measure(hidden, weight, data.target, gradient_filter=how)
    dropped = {"max": float(found.dropped.max()), "mean": float(found.dropped.mean())}
    return {"active": round(found.active, 4), "dropped": dropped}


def measure(shape: str, kind: str, names: list[str], rounds: int, out: Path | None) -> None:
    """Measure all filters on one shape and write a row for each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = registry.inputs(shape, kind, device, torch.bfloat16)
    wanted = measuring.reference(data)
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for how in names:
        of_total = "" if how == "published" else " gradients=forward"
        name = how if how == BASELINE else f"memeff {how}{of_total}"
        loss = methods.method(name).build()

        def call(loss: Any = loss) -> None:
            measuring.both(loss, data)
            data.without_gradients()

        measuring.both(loss, data)
        row: dict[str, Any] = {
            "grad_hidden_error": measuring.relative_error(data.hidden.grad, wanted.grad_hidden),
            "grad_weight_error": measuring.relative_error(data.weight.grad, wanted.grad_weight),
        }
        data.without_gradients()
        if how not in ("exact", BASELINE):
            row |= left_out(data, how)
        if device == "cuda":
            timing.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            timing.synchronize()
            gradients = data.hidden.nbytes + data.weight.nbytes
            peak = torch.cuda.max_memory_allocated() - before
            row["MiB_beyond_gradients"] = round((peak - gradients) / 2**20, 1)
        calls[how], found[how] = call, row
    del wanted
    clock = timing.Clock()

    def timer(call: Callable[[], Any]) -> Callable[[], float]:
        def sample() -> float:
            call()
            clock.flush()
            return timing.milliseconds(call)

        return sample

    times = timing.in_turns({how: timer(call) for how, call in calls.items()}, rounds)
    if device == "cuda":
        for how, call in calls.items():
            found[how]["host_ms"] = host_milliseconds(call)
        # Last: once a profiler has watched a process, its launches take the host longer.
        for how, call in calls.items():
            row = found[how]
            row["kernels_ms"], row["launches_of"] = kernels(call)
            row["launches"] = sum(row["launches_of"].values())
            row["kernels_sum"] = round(sum(row["kernels_ms"].values()), 3)
    for how, row in found.items():
        row |= rows.percentiles(times[how])
        if "exact" in times:
            exact = rows.percentiles(times["exact"])["median"]
            row["of_exact"] = round(row["median"] / exact, 3)
        if BASELINE in times:
            row["of_inductor"] = round(
                row["median"] / rows.percentiles(times[BASELINE])["median"], 3
            )
        print(shape, how, json.dumps(row), flush=True)
        if out is not None:
            facts = {"what": "gradient filter", "shape": shape, "data": Path(kind).name}
            rows.append(out, {**facts, "filter": how, **row, **rows.environment()})


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--data", type=registry.data_named, default="trained")
    parser.add_argument(
        "--filter", nargs="+", default=(*FILTERS, BASELINE), choices=(*FILTERS, BASELINE)
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every-depth", action="store_true", help="filter rows of any length")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.every_depth:
        gradient_filter.LEAST_DEPTH = 8
    for shape in given.shape:
        measure(shape, given.data, list(given.filter), given.rounds, given.out)


if __name__ == "__main__":
    main()
