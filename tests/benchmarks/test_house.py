"""Every script is found by its name, can be imported, and is timed by the one timer."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import registry, rows, timing
from tests.support.scripts import script

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ops", "models", "distributed", "quality", "ablations", "data")
MODULES = sorted((ROOT / "benchmarks").rglob("*.py"))
SCRIPTS = [path for path in MODULES if 'if __name__ == "__main__":' in path.read_text()]


def called(tree: ast.AST) -> set[str]:
    """Return the last names of called functions."""
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {getattr(f, "attr", getattr(f, "id", "")) for f in functions}


def test_make_bench_finds_each_script_by_its_name_alone() -> None:
    names = [path.stem for path in SCRIPTS if path.parent.name in FOLDERS]
    assert len(names) > 20
    assert len(set(names)) == len(names)
    for path in SCRIPTS:
        place = path.relative_to(ROOT / "benchmarks").parts
        assert place == ("plot.py",) or (len(place) == 2 and place[0] in FOLDERS), place


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_module_can_be_imported(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    assert importlib.import_module(".".join(parts).removesuffix(".__init__"))


@pytest.mark.parametrize("name", ["ops/linear_cross_entropy", "data/glyphs"])
def test_a_script_runs_from_the_root_without_installation(name: str) -> None:
    result = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_there_is_one_timer(path: Path) -> None:
    found = called(ast.parse(path.read_text())) & {"Event", "elapsed_time", "CUDAGraph"}
    assert not found or path.name == "timing.py"


def test_timers_take_turns_and_say_milliseconds() -> None:
    taken: list[str] = []

    def timer(name: str) -> float:
        return timing.milliseconds(lambda: taken.append(name), device="cpu")

    found = timing.in_turns({"a": lambda: timer("a"), "b": lambda: timer("b")}, 3)
    assert taken == ["a", "b"] * 3
    assert all(0.0 < each < 1e3 for times in found.values() for each in times)
    slept = timing.waited(lambda: timing.time.sleep(0.01), 2)
    assert 10.0 <= slept < 1e3
    calls: list[int] = []
    repeated = timing.Repeated([lambda: calls.append(0), lambda: calls.append(1)])
    calls.clear()
    repeated.run()
    assert calls == [0, 1] * 4


def test_every_command_in_raw_rows_has_a_script_today_or_one_that_is_gone() -> None:
    page = (ROOT / "docs" / "measured" / "benchmarks.md").read_text()
    renamed = dict(
        re.findall(r"^\| `(benchmarks/\w+\.py)[^`]*`.*\| `(benchmarks/\w+/\w+\.py)`", page, re.M)
    )
    gone = page.split("### Scripts that are gone")[1].split("\n## ")[0]
    names = {path.name for path in SCRIPTS} | set(re.findall(r"^\| `[\w/]+/(\w+\.py)`", gone, re.M))
    commands = set()
    for file in (ROOT / "benchmarks" / "results").rglob("*.jsonl"):
        commands |= set(re.findall(r'"command": "python (benchmarks/[\w/]+\.py)', file.read_text()))
    assert len(commands) > 15
    for command in commands:
        assert (ROOT / renamed.get(command, "")).is_file() or Path(command).name in names, command


def test_the_registry_has_inputs_for_every_op_of_the_package(tmp_path: Path) -> None:
    kernels = ROOT / "memeff_compile" / "kernels"
    folders = {path.parent.name for path in kernels.glob("*/op.py")}
    assert set(registry.OPS) == folders
    out = tmp_path / "rows.jsonl"
    script("every_op", "--size", "tiny", "--repeats", "2", "--out", str(out))
    measured = rows.read(out)
    assert {row["op"] for row in measured} == folders
    trained = {row["op"] for row in measured if "both_ms" in row}
    assert trained >= {"attention", "embedding", "gated_linear", "linear_cross_entropy"}
