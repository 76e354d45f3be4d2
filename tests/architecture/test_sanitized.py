"""The selection of `make sanitize`: every test function has a case, or a valid reason against
it.
"""

from __future__ import annotations

import ast

import pytest

from tests.support import sanitized


def functions() -> list[str]:
    """The names of all tests of kernels on a GPU."""
    return [
        node.name
        for path in (sanitized.ROOT / "tests" / "kernels").rglob("*_gpu.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_most_functions_run_and_each_reason_is_needed() -> None:
    found = functions()
    reasons = [sanitized.why_left_out(name) for name in found]
    assert reasons.count(None) > len(found) / 2
    for words in sanitized.LEFT_OUT.values():
        for word in words:
            assert any(word in name for name in found), f"{word} is in no test's name any more"


def test_no_test_that_captures_a_graph_runs() -> None:
    for path in (sanitized.ROOT / "tests" / "kernels").rglob("*_gpu.py"):
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and "CUDAGraph(" in ast.unparse(node):
                assert sanitized.why_left_out(node.name), f"{node.name} captures a graph"


@pytest.mark.parametrize("count", [1, 3])
def test_shards_have_each_test_once_and_first_cases_come_first(count: int) -> None:
    names = [f"a.py::test_{word}[{case}]" for word in ("one", "two") for case in range(60)]
    names.append("a.py::test_captured_one")
    whole = sanitized.pick(names, "0/1")
    assert whole[:2] == ["a.py::test_one[0]", "a.py::test_two[0]"]
    assert 2 < len(whole) < 60
    parts = [sanitized.pick(names, f"{place}/{count}") for place in range(count)]
    assert sorted(name for part in parts for name in part) == sorted(whole)
