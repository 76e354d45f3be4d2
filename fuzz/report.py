"""The counts of a run: as a table, as rows to be committed, and in files between two processes."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch

import memeff_compile

from .judge import FAILURES, Kind
from .program import Program

__all__ = [
    "Failure",
    "Tally",
    "read_program",
    "restore",
    "row",
    "save",
    "save_program",
    "table",
]


@dataclass(frozen=True)
class Failure:
    """A program that went wrong, as small as it was made."""

    part: str
    seed: str
    kind: str
    sentence: str
    text: str


@dataclass
class Tally:
    """How far a part has come, and what it found."""

    part: str
    programs: int = 0
    next_setup: int = 0
    cpu_seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    declines: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    alike: Counter[str] = field(default_factory=Counter)

    @property
    def has_failed(self) -> bool:
        """Whether anything went wrong, shown or not."""
        return any(self.kinds[kind] for kind in FAILURES)

    def record_crash(self, failure: Failure) -> None:
        """Count a program that took its process with it."""
        self.programs += 1
        self.kinds["crash"] += 1
        self.failures.append(failure)


def table(tallies: Sequence[Tally]) -> str:
    """What a run found, a line for each part; then what was declined, and how often."""
    heading = ("part", "seconds", "programs", "differences", "exceptions")
    cells = [[*heading, "internal errors", "crashes", "declines"]]
    for tally in tallies:
        kinds = ("difference", "exception", "internal_error", "crash", "decline")
        counts = [str(tally.kinds[kind]) for kind in kinds]
        cells.append([tally.part, f"{tally.cpu_seconds:.0f}", str(tally.programs), *counts])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
    declines = sum((tally.declines for tally in tallies), Counter[str]())
    lines += ["", "declined, with a sentence:"] if declines else []
    lines += [f"{count:7}  {sentence[:110]}" for sentence, count in declines.most_common(12)]
    return "\n".join(lines)


def row(tally: Tally, seed: str, device: str) -> dict[str, Any]:
    """Return the counts of a part, to be committed."""
    return {
        "part": tally.part,
        "seed": seed,
        "device": device,
        "cpu_seconds": round(tally.cpu_seconds),
        "programs": tally.programs,
        **{kind: tally.kinds[kind] for kind in get_args(Kind)},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memeff_compile": memeff_compile.__version__,
        "commit": os.environ.get("MEMEFF_COMMIT") or _commit(),
        "date": date.today().isoformat(),
    }


@functools.cache
def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    here = Path(__file__).parent
    found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def save(folder: Path, tally: Tally) -> None:
    """Leave the counts to the process that watches, or that goes on."""
    (folder / "new").write_text(json.dumps(tally, default=vars))
    (folder / "new").replace(folder / "tally.json")


def restore(folder: Path) -> Tally:
    """Read what `save` left."""
    data = json.loads((folder / "tally.json").read_text())
    data["failures"] = [Failure(**failure) for failure in data["failures"]]
    return Tally(
        **{**data, **{name: Counter(data[name]) for name in ("kinds", "declines", "alike")}}
    )


def save_program(folder: Path, own: str, program: Program) -> None:
    """Leave a program that is about to run, and its seed."""
    (folder / "program.json").write_text(json.dumps([own, asdict(program)]))


def read_program(folder: Path) -> tuple[str, Program]:
    """Read what `save_program` left."""
    own, fields = json.loads((folder / "program.json").read_text())
    return own, Program(tuple(fields["setup"]), tuple(fields["body"]), fields["imports"])
