"""Measures the collectives of one step, the GPU's busy and waiting time, the largest block
requested from the allocator, and the blocks that exist at the step's memory peak.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

BLOCKS = 200_000
"""Allocations that are remembered of a step."""
SIZES = {"BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}


def at(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Return this rank's measurements of one step, and of another its blocks; empty on a CPU."""
    if device != "cuda":
        step()
        return {}
    events = _traced(step)
    seen = {"collectives": collectives(events), "stream": stream(events)}
    return {**seen, **blocks(_allocations(step))}


Events = list[dict[str, Any]]


def _traced(step: Callable[[], object]) -> Events:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events: Events = json.loads(path.read_text())["traceEvents"]
    return events


def collectives(events: Events) -> Events:
    """Return the collectives by name and bytes given, how often each was called, and its time."""
    found: dict[tuple[str, int], list[float]] = {}
    for event in events:
        told = event.get("args", {})
        if event.get("cat") == "kernel" and "Collective name" in told:
            given = int(told.get("In msg nelems", 0)) * SIZES.get(told.get("dtype", ""), 0)
            found.setdefault((told["Collective name"], given), []).append(event["dur"] / 1e3)
    return [
        {"name": name, "bytes_in": given, "calls": len(ms), "ms": round(sum(ms), 3)}
        for (name, given), ms in sorted(found.items(), key=lambda item: -item[0][1])
    ]


def stream(events: Events, most: int = 8) -> dict[str, Any]:
    """Return how long the stream that computes was busy and idle, its longest gaps with the kernels
    around them, and the kernels that took most of it.
    """
    ours = (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    streams: dict[Any, Events] = {}
    for event in ours:
        if "Collective name" not in event.get("args", {}):
            streams.setdefault(event.get("tid"), []).append(event)
    if not streams:
        return {}
    taken = max(streams.values(), key=lambda found: sum(e["dur"] for e in found))
    taken = sorted(taken, key=lambda event: float(event["ts"]))
    by_name: dict[str, float] = {}
    for event in taken:
        by_name[event["name"]] = by_name.get(event["name"], 0.0) + event["dur"]
    start, end, gaps = float(taken[0]["ts"]), float(taken[0]["ts"]), list[dict[str, Any]]()
    for before, event in zip([taken[0], *taken], taken, strict=False):
        gap = float(event["ts"]) - end
        if gap > 0:
            at, between = round((end - start) / 1e3, 1), [before["name"][:60], event["name"][:60]]
            gaps.append({"ms": round(gap / 1e3, 3), "at_ms": at, "between": between})
        end = max(end, float(event["ts"]) + event["dur"])
    idle, whole = sum(gap["ms"] for gap in gaps), (end - start) / 1e3
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:most]
    return {
        "busy_ms": round(whole - idle, 2),
        "idle_ms": round(idle, 2),
        "gaps": sorted(gaps, key=lambda gap: -float(gap["ms"]))[:most],
        "kernels": [[name[:80], round(took / 1e3, 2)] for name, took in longest],
    }


def _allocations(step: Callable[[], object]) -> Events:
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=BLOCKS, stacks="python", context="alloc")
    step()
    torch.cuda.synchronize()
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [event for event in history if event["action"] in ("alloc", "free_completed")]


def blocks(history: Events, most: int = 16) -> dict[str, Any]:
    """Return the largest block of a step, and the blocks of the step that exist at its peak, with
    the lines of code that asked for them.
    """
    sizes = [e["size"] * (1 if e["action"] == "alloc" else -1) for e in history]
    totals = list(accumulate(sizes, initial=0))
    live: Events = []
    for event in history[: totals.index(max(totals))]:
        if event["action"] == "alloc":
            live.append(event)
        else:
            live = [each for each in live if each["addr"] != event["addr"]]
    live.sort(key=lambda event: -int(event["size"]))
    return {
        "largest_block_mib": round(max([0, *sizes]) / 2**20, 1),
        "above_start_mib": round(max(totals) / 2**20, 1),
        "at_peak": [[round(e["size"] / 2**20, 1), _lines(e)] for e in live[:most]],
    }


def _lines(event: dict[str, Any], most: int = 4) -> str:
    frames = event.get("frames", [])[:most]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in frames)
