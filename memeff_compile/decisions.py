"""Choices that only change speed, as measured on the user's own GPU: the table that `tune` stores.

An entry holds for one kind of GPU and the very software it was measured with: another torch, triton
or kernel of ours may turn a choice around, so such an entry is not used. Without an entry the
defaults decide; nothing is declined for want of a measurement.

The stored table is read once per process, when a GPU first asks, and never again: what a process
computes does not change under it. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from .errors import TuneError

log = logging.getLogger(__name__)

FORMAT = 1

# GPUs on which the defaults themselves were measured, as torch names them.
MEASURED_BY_US = ("NVIDIA H200",)


@dataclass(frozen=True)
class Decision:
    """A choice between settings that compute the same, up to rounding order."""

    meaning: str  # one line for the reader of the table
    choices: tuple[str, ...]  # the names it may be


DECISIONS = {
    "linear_cross_entropy.products": Decision(
        "which engine computes head and loss in 16 bits, where both run", ("hopper", "library")
    ),
    "linear_cross_entropy.gradients": Decision(
        "in which pass the gradients of a loss that is one number are made", ("backward", "forward")
    ),
}
"""By the name in the table: the op, then what is chosen."""


@dataclass(frozen=True)
class Machine:
    """What a measurement holds for: a kind of GPU and what ran on it, all exactly."""

    gpu: str
    capability: str
    torch: str
    triton: str
    kernels: str


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one setting on one workload."""

    value: str
    workload: str
    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Found:
    """One decision: what was chosen and why, what was timed, and what was refused and why."""

    value: str
    default: str
    reason: str
    timings: tuple[Timing, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """Every decision for one machine, and the day it was measured."""

    machine: Machine
    date: str
    found: Mapping[str, Found]


@dataclass(frozen=True)
class Table:
    """The stored entries, one per machine."""

    entries: tuple[Entry, ...] = ()

    def entry(self, machine: Machine) -> Entry | None:
        """Return what was measured on a machine, or None."""
        return next((entry for entry in self.entries if entry.machine == machine), None)

    def with_entry(self, entry: Entry) -> Table:
        """Return the table with an entry added, or put in the place of the machine's old one."""
        others = (each for each in self.entries if each.machine != entry.machine)
        return replace(self, entries=(*others, entry))

    def to_json(self) -> str:
        """Return the table as it is stored."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Read a stored table; TuneError for another format, or a value that no kernel takes."""
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']!r}, where {FORMAT} is needed")
            return cls(tuple(_entry(each) for each in found["entries"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TuneError(f"not a table of decisions: {type(error).__name__}: {error}") from error


def _entry(given: dict[str, Any]) -> Entry:
    machine = Machine(**given["machine"])
    if not all(isinstance(text, str) for text in (*asdict(machine).values(), given["date"])):
        raise TypeError("a machine or a date is not text")
    found = {name: _found(name, each) for name, each in given["found"].items()}
    return Entry(machine, given["date"], found)


def _found(name: str, given: dict[str, Any]) -> Found:
    decision = DECISIONS.get(name)
    # A name of another version is kept: its entry is of other kernels and is never used.
    if decision is not None and given["value"] not in decision.choices:
        raise ValueError(f"{name} is {given['value']!r}")
    timings = tuple(Timing(**each) for each in given["timings"])
    return Found(given["value"], given["default"], given["reason"], timings, given["refused"])


def stored_at() -> Path:
    """Return the path of the user's table, which need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return folder / "memeff_compile" / "decisions.json"


def load(path: Path) -> Table:
    """Read a table; one that is not there is empty. TuneError where it is unread or no table."""
    try:
        return Table.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Table()
    except (OSError, TuneError, UnicodeDecodeError) as error:
        raise TuneError(
            f"The table {path} cannot be used: {error}. Remove it (the one in the cache folder: "
            "`python -m memeff_compile tune --reset`) and measure again."
        ) from error


def save(table: Table, path: Path) -> None:
    """Write a table in one step: readers find the old file or the new. TuneError where it fails."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        where: Any = {"dir": path.parent, "prefix": path.name, "delete": False}
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", **where) as file:
            temporary = file.name
            file.write(table.to_json())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise TuneError(f"The table {path} cannot be written: {error}") from error


@functools.lru_cache(maxsize=1)
def kernels_version() -> str:
    """Return our version and a digest of every file that computes tensors."""
    from memeff_compile import __version__

    digest = hashlib.sha256()
    folder = Path(__file__).with_name("kernels")
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return f"{__version__}-{digest.hexdigest()[:16]}"


_lock = threading.Lock()
_entries: dict[Machine, Entry | None] = {}
_table: Table | None = None


def measured(machine: Machine) -> Entry | None:
    """Return what was measured on this machine, or None. The answer stays for the process."""
    with _lock:
        if machine not in _entries:
            _entries[machine] = _look_up(machine)
        return _entries[machine]


def _look_up(machine: Machine) -> Entry | None:
    global _table
    if _table is None:
        try:
            _table = load(stored_at())
        except (TuneError, RuntimeError) as error:  # RuntimeError: no home folder
            log.warning("%s Until then the defaults decide.", error)
            _table = Table()
    entry = _table.entry(machine)
    if entry is None and any(each.machine.gpu == machine.gpu for each in _table.entries):
        log.warning(
            "What was measured on this %s is of another torch, triton or memeff_compile and is not "
            "used. Measure again with `python -m memeff_compile tune`.",
            machine.gpu,
        )
    return entry


def value(machine: Machine | None, name: str, default: str) -> str:
    """Return a setting of `DECISIONS` as measured, else the default; None is no GPU of ours."""
    entry = None if machine is None else measured(machine)
    found = None if entry is None else entry.found.get(name)
    return default if found is None else found.value


def fingerprint(machines: Iterable[Machine]) -> str:
    """Return a digest of what was decided by measurement for these machines; "" for nothing.

    It tags compiled code that is kept on disk: what an op returns may depend on the engine.
    """
    decided = {
        (machine.gpu, name, found.value)
        for machine in machines
        if (entry := measured(machine)) is not None
        for name, found in entry.found.items()
        if found.value != found.default
    }
    said = repr(sorted(decided, key=repr)).encode()
    return hashlib.sha256(said).hexdigest()[:16] if decided else ""


def speed_note(machine: Machine) -> str:
    """Say what is known of the speed of our choices on a machine."""
    entry = measured(machine)
    if entry is not None:
        return f"measured on this GPU on {entry.date}"
    if machine.gpu in MEASURED_BY_US:
        return f"defaults measured on an {machine.gpu}"
    return "speed not measured on this GPU (python -m memeff_compile tune)"


def forget() -> None:
    """Read the table anew when it is next asked for, as a new process would."""
    global _table
    with _lock:
        _table = None
        _entries.clear()


class Workload(Protocol):
    """Something to time."""

    @property
    def name(self) -> str:
        """Say what it is, sizes included."""

    def run(self, setting: str) -> object:
        """Run it once with a setting."""


@dataclass(frozen=True)
class Question:
    """One decision to be made by measuring."""

    name: str  # a key of `DECISIONS`
    default: str  # what decides without a measurement
    options: Sequence[str]  # the settings to compare, the default among them
    # runs with a setting and returns what is wrong with its numbers, or ""
    fault: Callable[[str], str]
    # makes what is timed; called once, and its results are dropped afterwards
    workloads: Callable[[], Sequence[Workload]]
