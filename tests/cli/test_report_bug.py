"""`memeff report-bug`: a script runs, and the zip has texts but no weights or inputs."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from memeff_compile import __main__ as command_line
from memeff_compile.cli import report_bug
from memeff_compile.cli.doctor import Finding

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
from memeff_compile.cli.toy import ToyModel
from beside import NAME
model = ToyModel()
model.compile(backend="memeff", options={"memeff.inner": "eager"})
model(torch.full((8,), 51)).backward()
assert sys.argv[1:] == ["--steps", "3"], sys.argv
if __name__ != "__main__":
    sys.exit(9)
"""


DIES = "import os; os._exit(7)"


def script(folder: Path, end: str = "") -> Path:
    (folder / "beside.py").write_text("NAME = 1\n")
    path = folder / "train.py"
    path.write_text(DIES if end == DIES else SCRIPT + end)
    return path


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        pytest.param("", 0, "the script ended well", marks=pytest.mark.slow),
        ("raise KeyError('what went wrong')", 1, "ended with status 1"),
        pytest.param(DIES, 7, "ended with status 7", marks=pytest.mark.slow),
    ],
    ids=["well", "raised", "died"],
)
def test_the_zip_has_reports_graphs_and_versions(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    end: str,
    status: int,
    words: str,
) -> None:
    output = tmp_path / "found.zip"
    command = ("report-bug", "--no-doctor", "--output", str(output), str(script(tmp_path, end)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    assert command_line.main([*command, "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert words in printed
    assert str(output) in printed
    with zipfile.ZipFile(output) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    versions = json.loads(texts["versions.json"])
    assert versions["exit_status"] == status
    assert versions["torch"]
    if status == 7:  # the process ended before it wrote more
        assert set(texts) == {"versions.json"}
        return
    assert "the loss is fused" in texts["report.txt"]
    assert json.loads(texts["report.json"])["graphs"]
    assert "memeff.linear_cross_entropy" in texts["graphs/00-after.txt"]
    assert "memeff.linear_cross_entropy" not in texts["graphs/00-before.txt"]
    assert ("what went wrong" in texts.get("traceback.txt", "")) == bool(end)
    assert all(name.endswith((".txt", ".json")) for name in texts), "no tensors"
    assert not any("51" in texts[name] for name in texts if name.startswith("graphs/"))
    assert "1 graph compiled with memeff" in printed


def test_the_doctor_is_in_the_zip_unless_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_bug, "diagnose", lambda: [Finding("versions", "torch", "1.0")])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing.py").write_text("")
    assert command_line.main(["report-bug", "nothing.py"]) == 0
    (found,) = tmp_path.glob("memeff-report-*.zip")
    printed = capsys.readouterr().out
    assert str(found) in printed
    assert "the script ended well" in printed
    with zipfile.ZipFile(found) as archive:
        assert json.loads(archive.read("doctor.json"))["usable"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], "There is no file absent.py"),
        (["--output", "absent/a.zip", "nothing.py"], "There is no folder absent"),
    ],
)
def test_what_cannot_be_run_or_written_is_said_first(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing.py").write_text("raise SystemExit(3)")
    assert command_line.main(["report-bug", *arguments]) == 1
    assert words in capsys.readouterr().err
