"""The page of random programs shows what the rows of its commit say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from fuzz.judge import FAILURES

COLUMNS = ("difference", "exception", "internal_error", "crash")
"""Failures in the order of the table's columns."""

ROOT = Path(__file__).parents[2]
LATEST = (ROOT / "docs/measured/fuzz.md").read_text().split("## Latest runs\n")[1]
ROWS = [
    json.loads(line)
    for line in (ROOT / "benchmarks/results/cpu/fuzz.jsonl").read_text().splitlines()
]


def test_the_table_sums_the_rows_of_its_commit() -> None:
    (commit,) = re.findall(r"on commit (\w+)", LATEST)
    rows = [row for row in ROWS if row["commit"] == commit]
    assert set(COLUMNS) == FAILURES
    kinds = ("cpu_seconds", "programs", *COLUMNS)
    has_failed = any(row[kind] for row in rows for kind in FAILURES)
    sums = {part: Counter[str]() for part in sorted({row["part"] for row in rows})}
    for row in rows:
        sums[row["part"]].update({kind: row[kind] for kind in kinds})
    shown = [re.sub(r"`: [^|]+ ", "` ", line) for line in LATEST.splitlines() if line[:3] == "| `"]
    columns = kinds if has_failed else kinds[:2]
    assert shown == [
        f"| `{part}` | {' | '.join(f'{each[kind]:,}' for kind in columns)} |"
        for part, each in sums.items()
    ]
    assert ("no program failed" in LATEST) is not has_failed
    least = min(each["cpu_seconds"] for each in sums.values())
    assert "at least 20 CPU minutes" not in LATEST or least >= 1200


def test_no_two_runs_of_a_commit_draw_the_same_programs() -> None:
    runs = Counter((row["commit"], row["part"], row["seed"], row["torch"]) for row in ROWS)
    assert runs.most_common(1)[0][1] == 1
