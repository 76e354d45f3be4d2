"""The contents of the wheel; `.ci/run` also installs it into an empty environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BUILD = "import setuptools.build_meta as backend; backend.build_wheel({folder!r})"


def setuptools_is_new_enough() -> bool:
    """Say whether the setuptools at hand knows the licence field of pyproject.toml."""
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy of the sources, with the setuptools at hand."""
    if not setuptools_is_new_enough():
        pytest.skip("building the wheel needs setuptools 77 or newer, as pyproject.toml says")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "memeff_compile", source / "memeff_compile")
    shutil.copytree(ROOT / "tests" / "cli", source / "tests" / "cli")
    folder = tmp_path_factory.mktemp("wheel")
    code = BUILD.format(folder=str(folder))
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_is_pure_python_of_the_right_name(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name == "memeff_compile-0.1.0-py3-none-any.whl"


def test_wheel_holds_every_module_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "memeff_compile").rglob("*.py")}
    names = set(wheel.namelist())
    assert expected | {"memeff_compile/py.typed"} <= names


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert roots == {"memeff_compile", "memeff_compile-0.1.0.dist-info"}


def test_wheel_announces_the_backend_and_its_needs(wheel: zipfile.ZipFile) -> None:
    info = "memeff_compile-0.1.0.dist-info"
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "[torch_dynamo_backends]\nmemeff = memeff_compile.backend:memeff" in entry_points
    for line in ("Requires-Dist: torch>=2.11", "Requires-Dist: triton>=3.6", "BSD-3-Clause"):
        assert line in metadata
