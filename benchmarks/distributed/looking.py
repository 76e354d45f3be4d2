"""What the collectives of one step move, and the largest block that the allocator is asked for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

BLOCKS = 200_000
"""Allocations that are remembered of a step."""
SIZES = {"BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}


def at(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Return what this rank sees of one step, and of another its blocks; nothing on a CPU."""
    if device != "cuda":
        step()
        return {}
    moved = _collectives(step)
    return {"collectives": moved, "largest_block_mib": round(_largest_block(step) / 2**20, 1)}


def _collectives(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the collectives by name and bytes given, how often each was called, and its time."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
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


def _largest_block(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=BLOCKS, stacks="python", context=None)
    step()
    torch.cuda.synchronize()
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    return max((e["size"] for e in history if e["action"] == "alloc"), default=0)
