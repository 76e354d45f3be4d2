"""Runs the scripts of benchmarks/ in this process: several seconds of imports are spared."""

from __future__ import annotations

import contextlib
import importlib
import io
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, *arguments: str) -> str:
    """Run a script as from its command line, wherever it is, and return its output."""
    printed = io.StringIO()
    (path,) = (ROOT / "benchmarks").rglob(f"{name}.py")
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    with mock.patch("sys.argv", [str(path), *arguments]), contextlib.redirect_stdout(printed):
        status = importlib.import_module(module).main()
    assert not status, printed.getvalue()
    return printed.getvalue()
