"""`benchmarks/distributed` from end to end, over gloo."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.distributed import many_gpus, merging
from tests.distributed.processes import RANKS, TwoProcesses

EVERY = [*many_gpus.CASES]
FIRST, OTHERS = EVERY[: len(EVERY) // 2], EVERY[len(EVERY) // 2 :]
SOME = ["TP head"]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(
    "cases",
    [SOME, *(pytest.param(cases, marks=pytest.mark.slow) for cases in (FIRST, OTHERS))],
    ids=["some", "first", "others"],
)
def test_a_case_writes_a_row_for_each_backend(
    cases: list[str], two_processes: TwoProcesses, tmp_path: Path
) -> None:
    told = "--size tiny --device cpu --steps 2 --backend eager memeff --look"
    inner = "eager" if cases is SOME else "aot_eager"
    told += f" --option memeff.inner={inner}"
    rows = tmp_path / "rows.jsonl"
    two_processes.run(
        partial(many_gpus.main, [*told.split(), "--out", str(rows), "--case", *cases])
    )
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    looked_at = [row for row in found if row["what"].endswith(", looked at")]
    found = [row for row in found if row not in looked_at]
    both = [(case, backend) for case in cases for backend in ("eager", "memeff")]
    assert len(looked_at) == len(both)
    assert [(row["what"], row["backend"]) for row in found] == both
    for row in found:
        assert row["gpus"] == RANKS
        assert "error" not in row
        assert row["ms"]["median"] > 0
        assert row.get("fused_losses", 1) == 1
    heads = [row for row in found if "head" in row["what"] and row["backend"] == "memeff"]
    for row in heads[1:]:  # the whole head's norm is that of the one that is split
        assert abs(row["gradient_norm"] / heads[0]["gradient_norm"] - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_merges_are_timed_alone(two_processes: TwoProcesses, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    told = f"--device cpu --rows 48 --samples 1 --out {out}"
    two_processes.run(partial(merging.main, told.split()))
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["what"], row["gpus"], row["pieces"]) == ("merge", RANKS, 2)
    assert row["ms"]["median"] > 0
