"""The report in the structured trace of TORCH_TRACE, as tlparse reads it, and in TORCH_LOGS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memeff_compile.cli.toy import ToyModel
from memeff_compile.report import Report
from tests.support.fresh_python import FreshPython

PROGRAM = """\
import torch
from memeff_compile.cli.toy import ToyModel
model = ToyModel()
compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
compiled(torch.arange(8)).backward()
with torch.no_grad():
    compiled(torch.arange(16))
"""


def artifacts(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Return the header and the text of each of our artifacts; the text stands below, indented."""
    found = []
    for log in folder.glob("*.log"):
        lines = log.read_text().splitlines()
        for place, line in enumerate(lines):
            if '"memeff_report"' in line and line.startswith("V"):
                text = []
                for below in lines[place + 1 :]:
                    if not below.startswith("\t"):
                        break
                    text.append(below[1:])
                found.append((json.loads(line[line.index("{") :]), "\n".join(text)))
    return found


def test_each_graph_writes_its_report_into_the_trace_and_its_decisions_into_the_log(
    fresh_python: FreshPython, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    result = fresh_python(PROGRAM, TORCH_TRACE=str(folder), TORCH_LOGS="+memeff_compile")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "fuse_linear_cross_entropy" in result.stderr
    found = artifacts(folder)
    assert len(found) == 2
    for place, (header, text) in enumerate(found):
        assert header["artifact"] == {"name": "memeff_report", "encoding": "json"}
        assert (header["frame_id"], header["frame_compile_id"]) == (0, place)
        (graph,) = Report.from_json(text).graphs
        assert graph.name == f"graph 0/{place}"
        assert graph.training == (place == 0)
        assert [record.action for record in graph.records] == ["rewrote"]
        assert "memeff.linear_cross_entropy" in graph.after


def test_without_torch_trace_no_report_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("written")

    monkeypatch.setattr(Report, "to_json", fail)
    compiled: Any = torch.compile(ToyModel(), backend="memeff", options={"memeff.inner": "eager"})
    compiled(torch.arange(8)).backward()
