"""Imports between modules: no cycles, imports in functions and for type checkers included, and none
upwards.

`lint-imports` keeps the contracts of pyproject.toml; this reads the files themselves, and checks
that every module is under a contract.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from memeff_compile.options import PASS_NAMES

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "memeff_compile"


def named(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {named(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield every import, in functions and for type checkers too."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            yield from statements(ast.iter_child_nodes(node))


def imports_of(name: str, path: Path, text: str) -> set[str]:
    """Return the modules of the package that a file asks for by name."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in statements([ast.parse(text)]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        above = package.split(".")[: len(package.split(".")) + 1 - node.level]
        base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
        members = {f"{base}.{alias.name}" for alias in node.names}
        found |= (members & MODULES.keys()) or {base}
    return (found & MODULES.keys()) - {name}


@cache
def graph() -> dict[str, set[str]]:
    return {name: imports_of(name, path, path.read_text()) for name, path in MODULES.items()}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle_in(graph()) == []


def test_a_circle_through_a_function_is_seen() -> None:
    path = ROOT / PACKAGE / "errors.py"
    text = "def late():\n    if True:\n        from . import report\n"
    back = imports_of(f"{PACKAGE}.errors", path, text)
    assert back == {f"{PACKAGE}.report"}
    there = {f"{PACKAGE}.report": {f"{PACKAGE}.errors"}, f"{PACKAGE}.errors": back}
    assert circle_in(there) != []
    checked = "if TYPE_CHECKING:\n    import memeff_compile.report\n"
    assert imports_of(f"{PACKAGE}.errors", path, checked) == back


def contracts() -> list[dict[str, Any]]:
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = read["tool"]["importlinter"]["contracts"]
    # Passes do not import each other, nor their packages passes; a new one needs no line here.
    passes = {
        "containers": [f"{PACKAGE}.passes"],
        "exhaustive": True,
        "layers": [" | ".join(PASS_NAMES), "attention | losses | ternary", "graph"],
    }
    return [passes, *(contract for contract in found if contract["type"] == "layers")]


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract["containers"][0])
def test_a_contract_covers_its_room_and_no_import_in_it_goes_up(contract: dict[str, Any]) -> None:
    (room,) = contract["containers"]
    rows = [row.split(" | ") for row in contract["layers"]]
    level = {f"{room}.{name}": depth for depth, row in enumerate(rows) for name in row}
    depth = room.count(".") + 2

    def door(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    inside = {name for name in MODULES if name.startswith(f"{room}.")}
    assert {door(name) for name in inside} == level.keys()
    assert contract["exhaustive"]
    upwards = [
        f"{name} -> {other}"
        for name in inside
        for other in graph()[name] & inside
        if door(name) != door(other) and level[door(other)] <= level[door(name)]
    ]
    assert upwards == []


def test_the_whole_package_is_under_contract() -> None:
    assert PACKAGE in {contract["containers"][0] for contract in contracts()}


def test_the_root_is_twelve_modules_at_most_and_passes_are_what_they_are_called() -> None:
    assert len(list((ROOT / PACKAGE).glob("*.py"))) <= 12
    held = {path.name for path in (ROOT / PACKAGE / "passes").iterdir()} - {"__pycache__"}
    rooms = {"graph", "losses", "attention", "ternary"}
    assert held == {"__init__.py", *rooms, *(f"{name}.py" for name in PASS_NAMES)}
