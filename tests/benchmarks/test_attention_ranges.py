"""Attention under masks of keys and ids: the script runs, and the page's tables are its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import script

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measured" / "attention.md"


def test_the_script_runs_the_op_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "rows.jsonl"
    script("attention_ranges", "--size", "tiny", "--repeats", "1", "--out", str(out))
    found = rows.read(out)
    assert [row["gaps"] for row in found] == [False, True]
    assert all(row["finite"] and row["ms"]["op"]["forward"] > 0 for row in found)


def test_every_case_was_measured_once() -> None:
    from benchmarks import rows
    from benchmarks.ops import attention_ranges

    found = [(row["case"], row["sizes"]) for row in rows.read(attention_ranges.RESULTS)]
    assert found == [(case.name(), list(case.sizes)) for case in attention_ranges.CASES["h200"]]


@pytest.mark.parametrize("kind", ["padding", "gaps"])
def test_the_tables_of_the_page_are_the_rows(kind: str) -> None:
    from benchmarks import rows
    from benchmarks.ops import attention_ranges

    lines = attention_ranges.table(rows.read(attention_ranges.RESULTS), kind)
    assert len(lines) > 10
    assert "\n".join(lines) in PAGE.read_text()
