"""Measures the package: shared parts here, scripts by subject, raw rows in `results`.

`ops`: one op at a time; `models`: whole models; `distributed`: several GPUs; `quality`: effects of
lossy modes on real ones; `ablations`: the worth of each part of a method; `data`: makes text and
pictures, which go to `generated`, a folder that git ignores.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
GENERATED = Path("benchmarks/generated")
GENERATED_8192 = GENERATED / "8192"
"""The same with text of a vocabulary of 8192."""
