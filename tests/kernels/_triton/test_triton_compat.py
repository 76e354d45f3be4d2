"""Triton's private names are used in one module: other imports of them are listed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memeff_compile
from memeff_compile.kernels._triton import compat

PACKAGE = Path(memeff_compile.__file__).parent
HOMES = {PACKAGE / "kernels" / "_triton" / name for name in ("compat.py", "gluon.py")}
PUBLIC = {"triton", "triton.language"}
PRIVATE_ATTRIBUTES = {
    "arg_names",
    "device_caches",
    "driver",
    "fn",
    "launch_enter_hook",
    "launch_exit_hook",
    "packed_metadata",
    "pre_run_hooks",
}
OTHERS = sorted(
    path for path in PACKAGE.rglob("*.py") if path not in HOMES and "triton" in path.read_text()
)


def private_names(source: str) -> list[str]:
    """Return the names that a module uses of Triton outside its two public modules."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("triton.")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] == "triton":
                found += [f"{module}.{a.name}" for a in node.names if module not in PUBLIC]
                found += [f"{module}.{a.name}" for a in node.names if a.name == "knobs"]
        elif isinstance(node, ast.Attribute):
            value = node.value
            is_ours = isinstance(value, ast.Name) and value.id in ("tl", "gl", "triton")
            if (is_ours and node.attr.startswith("_")) or node.attr in PRIVATE_ATTRIBUTES:
                found.append(node.attr)
    return [name for name in found if name not in PUBLIC]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_triton_stand_in_compat(path: Path) -> None:
    assert private_names(path.read_text()) == []


def test_the_list_sees_every_way_to_a_private_name() -> None:
    for source, name in (
        ("from triton.runtime import driver", "triton.runtime.driver"),
        ("from triton import knobs", "triton.knobs"),
        ("import triton.compiler", "triton.compiler"),
        ("import triton.language as tl\ntl._core", "_core"),
        ("kernel.device_caches", "device_caches"),
    ):
        assert private_names(source) == [name]
    assert {name for path in HOMES for name in private_names(path.read_text())}


def test_what_compat_needs_is_there() -> None:
    from tests.support.add_kernel import add_kernel

    assert compat.is_compiled(add_kernel)
    assert not compat.is_watched(add_kernel)
    assert compat.takes(add_kernel, "x_ptr")
    assert not compat.takes(add_kernel, "C")
    assert compat.constant(3).value == 3
