"""Makes the scripts of benchmarks/ importable: they are no package."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
