"""The shape of the repository: required contents of every folder."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from memeff_compile.options import PASS_NAMES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memeff_compile"
OP_FOLDERS = sorted(
    folder
    for folder in (PACKAGE / "kernels").iterdir()
    if folder.is_dir() and not folder.name.startswith("_")
)
MODULES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Module:
    """The facts about a file that the tests below need: read and parsed once."""

    docstring: str | None
    imported_at_top: set[str]
    """Absolute names of the modules that are imported when it is."""
    named: set[str]
    """Every name in any of its imports."""
    prints: bool
    long: list[str]


@cache
def module_in(path: Path) -> Module:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return Module(
        ast.get_docstring(tree),
        {
            *(a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names),
            *(
                node.module
                for node in tree.body
                if isinstance(node, ast.ImportFrom) and not node.level and node.module
            ),
        },
        {
            name
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
            if name
        },
        any(isinstance(call, ast.Name) and call.id == "print" for call in calls),
        [
            f"{node.name}: {1 + (node.end_lineno or 0) - node.lineno}"
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and 1 + (node.end_lineno or 0) - node.lineno >= 150
            and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        ],
    )


@pytest.mark.parametrize("folder", OP_FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("file", ["__init__.py", "op.py", "reference.py", "memory.py"])
def test_op_folder_is_complete(folder: Path, file: str) -> None:
    assert (folder / file).is_file(), f"{folder.name} lacks {file}; see CONTRIBUTING, 'add an op'"


KERNEL_FILES = sorted((PACKAGE / "kernels").rglob("*_kernels.py"))


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_kernels_stand_beside_the_engine_that_launches_them(path: Path) -> None:
    """`<engine>_kernels.py` is next to `<engine>.py`; one of these launches the parts of an
    engine.
    """
    beside = [other.read_text() for other in path.parent.glob("*.py") if other != path]
    engine = path.with_name(path.name.replace("_kernels", ""))
    shared = path.parent.name == "_triton"
    assert engine.is_file() or shared or any(path.stem in text for text in beside)


@pytest.mark.parametrize(
    "path",
    [path for path in KERNEL_FILES if path.parent.name != "_triton"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_a_kernel_is_named_by_its_op_its_engine_and_its_step(path: Path) -> None:
    """Kernels of `_triton` have the names of the ops that launch them."""
    room, engine = path.parent.name, path.stem.removesuffix("_kernels")
    start = f"{room}_" if room.startswith("_") else f"_{room}_{engine}_"
    tree = ast.parse(path.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [n for n in names if n.endswith("_kernel") and not n.startswith(start)] == []


@pytest.mark.parametrize("folder", OP_FOLDERS, ids=lambda folder: folder.name)
def test_a_kernel_has_one_name_in_its_folder(folder: Path) -> None:
    """A profile names the kernel alone: two of one name could not be told apart."""
    names = [
        node.name
        for path in folder.glob("*_kernels.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("folder", OP_FOLDERS, ids=lambda folder: folder.name)
def test_op_folder_has_tests(folder: Path) -> None:
    assert list((ROOT / "tests" / "kernels").rglob(f"*{folder.name}*"))


@pytest.mark.parametrize("name", PASS_NAMES)
def test_pass_is_a_file_named_in_the_options_with_tests_and_a_page(name: str) -> None:
    assert (PACKAGE / "passes" / f"{name}.py").is_file()
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert any(name in path.read_text() for path in others if path.name != "test_options.py")
    pages = " ".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert f"`{name}`" in pages


KERNEL_MODULES = sorted((PACKAGE / "kernels").rglob("*.py"))


@pytest.mark.parametrize("module", KERNEL_MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_kernels_know_nothing_of_graphs(module: Path) -> None:
    """import-linter sees torch as one module, so its graph half is looked for here."""
    graphs = ("torch.fx", "torch._inductor", "torch._dynamo")
    assert not [name for name in module_in(module).named if name.startswith(graphs)]


@pytest.mark.parametrize("module", KERNEL_MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_kernels_are_launched_by_functions_that_can_record_a_launch(module: Path) -> None:
    """A kernel that Triton launches itself, as `kernel[grid](...)`, cannot be compiled ahead."""
    launched = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    assert not [name for name in launched if "_kernel[" in name]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_triton_is_imported_by_kernel_files_only(module: Path) -> None:
    uses_triton = any(name.split(".")[0] == "triton" for name in module_in(module).imported_at_top)
    assert not uses_triton or "kernels" in module.parts


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_has_a_docstring_and_prints_nothing(module: Path) -> None:
    assert module_in(module).docstring
    assert not module_in(module).prints


def test_the_package_door_holds_names_and_nothing_else() -> None:
    import memeff_compile

    names = len(memeff_compile.__all__) - 1  # an import and a home each, apart from the version
    assert len((PACKAGE / "__init__.py").read_text().splitlines()) <= 33 + 2 * names


def test_version_is_the_same_everywhere() -> None:
    import memeff_compile

    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == memeff_compile.__version__


def test_every_paper_is_cited() -> None:
    citations = (ROOT / "CITATIONS.bib").read_text()
    for paper in ("2411.09009", "2410.20650", "2411.10958", "2411.04965", "2405.14366"):
        assert paper in citations


def test_passes_are_named_in_the_order_in_which_they_run() -> None:
    from memeff_compile.passes import PASSES

    assert tuple(each.name for each in PASSES) == PASS_NAMES


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_outside_device_code_are_under_150_lines(module: Path) -> None:
    assert module_in(module).long == []


@pytest.mark.parametrize("ending", ["gpu", "interpreter"])
def test_a_file_named_by_a_marker_gives_it_to_all_its_tests(ending: str) -> None:
    found = sorted((ROOT / "tests").rglob(f"test_*_{ending}.py"))
    assert len(found) > 15
    mark = re.compile(rf"^pytestmark = \[?pytest\.mark\.{ending}\b", re.MULTILINE)
    assert [str(file) for file in found if not mark.search(file.read_text())] == []
