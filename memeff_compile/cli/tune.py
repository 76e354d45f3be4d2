"""The command `memeff tune`; torch is imported only when it measures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ..decisions import load, save, stored_at
from ..errors import TuneError

if TYPE_CHECKING:
    from .measure import Bench


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--quick", action="store_true", help="one small shape and fewer rounds")
    parser.add_argument("--show", action="store_true", help="print the table and measure nothing")
    parser.add_argument("--reset", action="store_true", help="remove the table")
    parser.add_argument(
        "--out", type=Path, help="a table elsewhere; only the one in the cache folder is ever used"
    )


def tune(given: argparse.Namespace, bench: Callable[..., Bench] | None = None) -> int:
    """Measure (by default this machine's GPU) and store, show or remove; return the exit status."""
    try:
        path = stored_at() if given.out is None else given.out
        if given.reset:
            if given.out is not None:
                raise TuneError(f"--reset removes {stored_at()} and no other file.")
            return _reset(path)
        if given.show:
            return _show(path)
        return _measure(path, given, bench)
    except (TuneError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _reset(path: Path) -> int:
    try:
        path.unlink()
    except FileNotFoundError:
        sys.stdout.write(f"There is no table at {path}.\n")
    except OSError as error:
        raise TuneError(f"The table {path} cannot be removed: {error}") from error
    else:
        sys.stdout.write(f"Removed {path}: the defaults decide again in new processes.\n")
    return 0


def _show(path: Path) -> int:
    from .measure import table_text

    table = load(path)
    if not table.entries:
        sys.stdout.write(f"There is no table at {path}: the defaults decide.\n")
        return 0
    sys.stdout.write(f"{path}\n\n{table_text(table)}")
    return 0


def _measure(path: Path, given: argparse.Namespace, bench: Callable[..., Bench] | None) -> int:
    from .measure import find_gpu, measure

    load(path)  # a table that cannot be read is said before a minute of work
    if given.out is not None and not path.parent.is_dir():
        raise TuneError(f"There is no folder {path.parent} to write {path.name} into.")
    found = (find_gpu if bench is None else bench)(quick=given.quick)
    sys.stdout.write(f"Measuring {found.machine.gpu}; keep it free of other work meanwhile.\n")
    entry = measure(found, date.today().isoformat(), lambda lines: sys.stdout.write(f"{lines}\n"))
    # Read again: another process may have measured another GPU in the meantime.
    save(load(path).with_entry(entry), path)
    used = "Processes that start from now on use it." if given.out is None else ""
    sys.stdout.write(f"\nStored in {path}. {used}".rstrip() + "\n")
    return 0
