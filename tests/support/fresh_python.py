"""A fresh Python process, for properties that show only there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FreshPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def fresh_python(tmp_path: Path) -> FreshPython:
    """Return a function that runs code (or `-m` arguments) in a process and an empty folder."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = ["-c", *arguments] if "\n" in arguments[0] or " " in arguments[0] else arguments
        root = Path(__file__).resolve().parents[2]
        paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        inherited = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
        return subprocess.run(
            [sys.executable, *given],
            cwd=tmp_path,
            env={
                **inherited,
                "PYTHONPATH": os.pathsep.join([*paths, str(root)]),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
