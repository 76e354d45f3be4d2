"""Writes one JSON line per measurement, with everything needed to repeat it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT


def command() -> str:
    """Return the command as anyone would type it in a clone."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif argument != "--here":
            kept.append(argument)
    return shlex.join([*_program(), _script(), *kept])


def _program() -> list[str]:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    return ["python"]


def _script() -> str:
    path = Path(sys.argv[0]).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def environment() -> dict[str, Any]:
    """Return machine, versions, commit and command."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": command(),
        "commit": os.environ.get("MEMEFF_COMMIT") or _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": None,
    }
    for package in ("triton", "transformers", "cut_cross_entropy", "liger_kernel", "torchao"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _driver()
    else:
        facts["gpu"] = None
        facts["cpu"] = platform.processor() or platform.machine()
    return facts


def write(path: Path, row: dict[str, Any]) -> None:
    """Append ``row`` with its environment to ``path`` and print it."""
    append(path, {**row, **environment()})
    print(json.dumps(row), flush=True)


def append(path: Path, row: dict[str, Any]) -> None:
    """Append ``row`` as it is, in one write, so that several processes can share the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as stream:
        stream.write((json.dumps(row) + "\n").encode())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def latest(rows: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return the last row for each combination of values, in the order of first appearance."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        found[tuple(row.get(key) for key in keys)] = row
    return list(found.values())


def percentiles(samples: list[float], digits: int = 3) -> dict[str, float]:
    """Return median, 20th and 80th percentile, rounded; of milliseconds to a microsecond."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], digits)

    return {"median": at(0.5), "p20": at(0.2), "p80": at(0.8)}


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"


def _driver() -> str:
    result = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else "unknown"
