"""The table of CONTRIBUTING that says which files a change touches: they are there, few, and all."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from memeff_compile.kernels.linear_cross_entropy import ENGINES
from memeff_compile.options import PASS_NAMES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memeff_compile"
SECTION = (
    (ROOT / "CONTRIBUTING.md").read_text().split("## To change something")[1].split("\n## ")[0]
)
ROWS = {
    cells[0]: cells
    for line in SECTION.splitlines()
    if line.startswith("| ")
    for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]]
    if cells[0] != "change"
}
PATH = re.compile(r"`([\w/]+(?:/|\.py|\.txt|\.md)[\w/.-]*)`")
BOUNDS = {
    "a pass": 4,
    "an engine": 5,
    "a GPU": 1,
    "a mask form": 5,
    "an option": 2,
    "a loss's spelling": 2,
    "a cache scheme": 6,
    "a codec": 6,
}
NAMED_BY_OTHERS = {
    "fuse_linear_cross_entropy": {"cli/doctor.py", "report.py"},
    "encode_weights": {"model/weights/hooks.py"},
    "defer_logits": {"passes/graph/base.py"},
    # The planner has a row for the library's workspaces.
    "library": {"planning/timeline.py"},
}
"""Who asks about one pass or engine by its name, for a reason of its own: a new one needs none."""


def paths(cell: str) -> list[Path]:
    """Return the paths of a cell; those of the package are written without its name."""
    found = PATH.findall(cell)
    return [PACKAGE / p if (PACKAGE / p).exists() else ROOT / p for p in found]


def touched(change: str) -> set[str]:
    """Return the files of the package that a change touches, as the table has them."""
    return {
        p.relative_to(PACKAGE).as_posix() for p in paths(ROWS[change][2]) if PACKAGE in p.parents
    }


@cache
def values_in(path: Path) -> set[str]:
    """Return the strings that a module holds as values, docstrings aside."""
    tree = ast.parse(path.read_text())
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    }


def files_that_name(value: str) -> set[str]:
    """Return the modules that hold a string as a value."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if value in values_in(path)
    }


def test_there_are_thirteen_and_each_says_its_bound() -> None:
    assert len(ROWS) == 13
    for change, bound in BOUNDS.items():
        assert int(ROWS[change][3]) == bound


@pytest.mark.parametrize("change", ROWS)
def test_every_path_is_there_and_they_are_few(change: str) -> None:
    files, tests = paths(ROWS[change][2]), paths(ROWS[change][4])
    assert files
    assert tests
    missing = [str(path) for path in (*files, *tests) if not path.exists()]
    assert not missing
    counted = len(set(files)) + (len(tests) if change == "a pass" else 0)
    assert counted <= int(ROWS[change][3])


@pytest.mark.parametrize("name", PASS_NAMES)
def test_a_pass_is_named_where_the_table_says_and_nowhere_else(name: str) -> None:
    example = ROWS["a pass"][1].strip("`")
    wanted = {path.replace(example, name) for path in touched("a pass")}
    # The manifest of a system names its own pass, and the one that this follows.
    found = {path for path in files_that_name(name) if not path.endswith("/system.py")}
    assert found - NAMED_BY_OTHERS.get(name, set()) <= wanted
    assert f"passes/{name}.py" in found
    assert NAMED_BY_OTHERS.get(name, set()) <= found


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("a codec", "tier"),
        ("to retire a codec", "rans"),
        ("a cache scheme", "per_head"),
        ("an engine", "library"),
    ],
)
def test_a_name_stands_in_the_files_of_its_row_and_nowhere_else(change: str, name: str) -> None:
    assert ROWS[change][1] == f"`{name}`"
    assert files_that_name(name) - NAMED_BY_OTHERS.get(name, set()) <= touched(change)


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"reference"}))
def test_an_engine_of_the_loss_is_named_in_the_files_of_its_row_alone(engine: str) -> None:
    """Outside `kernels/`, where a GPU or a reference may have the same name, none names it."""
    ours = "kernels/linear_cross_entropy/"
    named = files_that_name(engine) - NAMED_BY_OTHERS.get(engine, set())
    found = {path for path in named if path.startswith(ours) or not path.startswith("kernels/")}
    assert found <= touched("an engine")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_of_the_loss_is_is_a_module_and_the_documentation_names_it(engine: str) -> None:
    folder = PACKAGE / "kernels" / "linear_cross_entropy"
    assert (folder / f"{engine}.py").is_file()
    for page in ("docs/passes/fuse-linear-cross-entropy.md", "docs/use/glossary.md"):
        text = (ROOT / page).read_text()
        assert f"`{engine}`" in text
        assert not re.findall(r"\b[Ee]ngines? [FHRTS]\b|`(?:fused|hybrid)`", text)


def is_capability(node: ast.expr) -> bool:
    """Say whether an expression is a compute capability, or its number."""
    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
        numbers = [getattr(each, "value", None) for each in node.elts]
        return (
            isinstance(numbers[0], int) and numbers[0] in range(7, 14) and numbers[1] in range(10)
        )
    return isinstance(node, ast.Constant) and node.value in (80, 86, 89, 90, 100, 103, 120)


@pytest.mark.parametrize(
    "path",
    sorted(PACKAGE.rglob("*.py")),
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_capabilities_of_gpus_are_compared_in_their_table_alone(path: Path) -> None:
    compared = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(is_capability(each) for each in (node.left, *node.comparators))
    ]
    assert not compared or path.relative_to(PACKAGE).as_posix() in touched("a GPU"), compared
