"""The page of random programs shows what the rows of its commit say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from fuzz.judge import FAILURES

ROOT = Path(__file__).parents[2]
LATEST = (ROOT / "docs/measured/fuzz.md").read_text().split("## Latest runs\n")[1]
ROWS = [
    json.loads(line)
    for line in (ROOT / "benchmarks/results/cpu/fuzz.jsonl").read_text().splitlines()
]


def test_the_table_sums_the_rows_of_its_commit() -> None:
    (commit,) = re.findall(r"on commit (\w+)", LATEST)
    rows = [row for row in ROWS if row["commit"] == commit]
    seconds, programs = Counter[str](), Counter[str]()
    for row in rows:
        seconds[row["part"]] += row["cpu_seconds"]
        programs[row["part"]] += row["programs"]
    shown = [line for line in LATEST.splitlines() if line.startswith("| `")]
    parts = sorted(seconds)
    assert shown == [f"| `{part}` | {seconds[part]:,} | {programs[part]:,} |" for part in parts]
    assert "no program failed" in LATEST
    assert not any(row[kind] for row in rows for kind in FAILURES)
    assert "at least 20 CPU minutes" not in LATEST or min(seconds.values()) >= 1200


def test_no_two_runs_of_a_commit_draw_the_same_programs() -> None:
    runs = Counter((row["commit"], row["part"], row["seed"], row["torch"]) for row in ROWS)
    assert runs.most_common(1)[0][1] == 1
