"""The front pages: their snippets run and print what the page says, links resolve, tables are whole.

A ``text`` block behind a ``python`` block of README.md or docs/use/first-steps.md is what that
snippet prints, up to times and what other releases count differently. Where a page and the program differ, EXPECTTEST_ACCEPT=1 rewrites the page, as it
does for the goldens of assert_expected_inline, so ``make golden`` renews both.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import memeff_compile
from memeff_compile import compat
from tests.support.fresh_python import FreshPython
from tests.support.zoo import FAMILIES, FURTHER

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIRST_STEPS = ROOT / "docs" / "use" / "first-steps.md"
PASS_PAGES = sorted(
    page for page in (ROOT / "docs").rglob("*.md") if "\n## What is declined\n" in page.read_text()
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

LINES = re.MULTILINE | re.DOTALL
SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", LINES)
FENCED = re.compile(r"^```.*?^```$", LINES)
ARGUMENTS = re.compile(r"^Args:\n((?:    .*\n?|\n)+)", re.MULTILINE)
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MARK, END = "--- end of snippet", "--- end of page"


def normalised(text: str) -> str:
    """Return printed text without times, other packages' line numbers and Dynamo's node count."""
    text = re.sub(r"\d+ nodes, our passes [\d.]+ m?s\)", "# nodes, our passes # ms)", text)
    text = re.sub(r"(transformers/[\w/]+\.py):\d+", r"\1:#", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def programs_of(pages: Sequence[Path], folder: Path) -> str:
    """Return code that runs the snippets of each page as one program, and says where it ends."""
    code = ["import runpy, torch, memeff_compile"]
    for page in pages:
        program = folder / page.stem / "train.py"
        program.parent.mkdir()
        snippets = SNIPPET.finditer(page.read_text())
        program.write_text("".join(f'{s[1]}\nprint("{MARK}")\n' for s in snippets))
        code += [f"runpy.run_path({str(program)!r})", f'print("{END}")']
        code += ["torch._dynamo.reset()", "memeff_compile.reset()"]
    return "\n".join(code)


def check_page(page: Path, output: str, *, compare: bool = True) -> None:
    """Compare what each snippet of a page printed with the page."""
    text = page.read_text()
    snippets = list(SNIPPET.finditer(text))
    printed = output.split(f"{MARK}\n")[:-1]
    pairs = list(zip(snippets, printed, strict=True))
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        for snippet, output in reversed(pairs):
            if snippet[2] is not None and normalised(output) != normalised(snippet[2]):
                text = text[: snippet.start(2)] + output.strip() + "\n" + text[snippet.end(2) :]
        page.write_text(text)
        return
    for snippet, output in pairs if compare else []:
        assert normalised(output) == normalised(snippet[2] or ""), (
            f"{page.name} shows something else behind:\n{snippet[1]}\n"
            "EXPECTTEST_ACCEPT=1 rewrites the page"
        )


@pytest.mark.parametrize(
    "as_it_stands",
    [
        pytest.param(False, id="in this process, without Inductor"),
        pytest.param(True, id="as it stands", marks=pytest.mark.slow),
    ],
)
def test_readme_and_first_steps_print_what_they_show(
    as_it_stands: bool,
    fresh_python: FreshPython,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the pages say is ours to keep; compiling their graphs again is Inductor's."""
    transformers = pytest.importorskip(
        "transformers", reason="the pages compile a Llama of transformers"
    )
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 20)
    newer = newer and torch.__version__ >= "2.13"
    code = programs_of((README, FIRST_STEPS), tmp_path)
    if as_it_stands:
        result = fresh_python(code)
        assert result.returncode == 0, result.stderr[-4000:]
        printed = result.stdout
    else:
        monkeypatch.setattr(compat, "compile_with_inductor", lambda gm, inputs, *_: gm)
        monkeypatch.chdir(tmp_path)
        memeff_compile.reset()
        exec(code, {})
        printed = capsys.readouterr().out
    readme, first_steps = printed.split(f"{END}\n")[:-1]
    check_page(README, readme, compare=newer)  # older ones build a mask to recover
    check_page(FIRST_STEPS, first_steps)


def test_readme_is_short_and_installs_first() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    assert any("pip install" in line for line in lines[:10])
    assert "last_report())" in "\n".join(lines[:30])


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        is_anchored = not parts.fragment or (
            target.suffix == ".md" and target.exists() and parts.fragment in anchors(target)
        )
        if not target.exists() or not is_anchored:
            broken.append(link)
    assert not broken


def test_the_site_lists_every_page_once() -> None:
    """mkdocs.yml against docs/; README.md is the site's front page, docs/index.md its contents."""
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*pages, "contents.md", "CONTRIBUTING.md", "CHANGELOG.md"])


@pytest.mark.parametrize("name", sorted({*memeff_compile.__all__} - {"__version__"}))
def test_a_public_name_says_what_it_is(name: str) -> None:
    """What the site's API page shows of it."""
    value = getattr(memeff_compile, name)
    assert vars(value).get("__doc__", value.__doc__), "a class inherits none: it needs its own"
    for each in (value, *(vars(value).values() if inspect.isclass(value) else ())):
        each = getattr(each, "__func__", each)
        listed = ARGUMENTS.search(inspect.cleandoc(getattr(each, "__doc__", None) or ""))
        for names in re.findall(r"^    \**(\S[^:\n]*):", listed[1] if listed else "", re.MULTILINE):
            assert names in inspect.signature(each).parameters, "the site takes one name a line"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_raw_data_behind_numbers_is_there(page: Path) -> None:
    named = re.findall(r"benchmarks/results/[\w./-]+\.jsonl", page.read_text())
    missing = sorted({name for name in named if not (ROOT / name).is_file()})
    assert not missing, "a number without its raw rows does not enter the docs"


MEASURED = re.compile(r"<!-- measured: begin\..*?-->(.*?)<!-- measured: end -->", LINES)
ROW = re.compile(
    r"^\| (?P<what>.+?) \| (?P<peer>[^|]+) \| (?P<ours>[^|]+) \| [^|]+ \| `(?P<file>[\w-]+\.jsonl)` (?P<commit>\w{7}) \|$",
    re.MULTILINE,
)


def figures(value: Any) -> Iterator[float]:
    """Yield the numbers of a row, wherever they lie in it."""
    if isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(figures, value.values()))
    elif isinstance(value, int | float):
        yield float(value)


def holds(row: dict[str, Any], cell: str) -> bool:
    """Whether one row has every number of a table's cell, rounded as the cell rounds it."""
    values = list(figures(row))
    return all(
        any(f"{value:.{len(number.partition('.')[2])}f}" == number for value in values)
        for number in re.findall(r"\d+(?:\.\d+)?", cell)
    )


def in_one_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of one run, or of two backends that took turns on one machine."""
    commands = [
        re.sub(r" --backend \w+$| --backend \w+(?= --(?:mode|turns))", "", row["command"])
        for row in (one, other)
    ]
    return one is not other and commands[0] == commands[1] and one["date"] == other["date"]


def test_every_figure_is_a_row_of_one_run() -> None:
    results = ROOT / "benchmarks" / "results" / "nvidia-h200"
    counted = {}
    for page in (README, ROOT / "docs" / "measured" / "benchmarks.md"):
        (block,) = MEASURED.findall(page.read_text())
        table = [line for line in block.splitlines() if line.startswith("|")]
        matches = [ROW.match(line) for line in table[2:]]
        counted[page.name] = len(matches)
        for line, match in zip(table[2:], matches, strict=True):
            assert match, line
            rows = map(json.loads, (results / match["file"]).read_text().splitlines())
            rows = [row for row in rows if row["commit"] == match["commit"]]
            peers, ours = ([r for r in rows if holds(r, match[side])] for side in ("peer", "ours"))
            assert any(in_one_run(*pair) for pair in itertools.product(peers, ours)), line
    assert counted["README.md"] == 5
    assert counted["benchmarks.md"] > 20


def test_readme_counts_the_families_and_shows_a_plan_of_the_page() -> None:
    text = README.read_text()
    assert f"Models: {len(FAMILIES) + len(FURTHER)} families" in text
    plan = text.split("## Plan before you run")[1].split("```text\n")[1].split("```")[0]
    assert plan in (ROOT / "docs" / "use" / "explain.md").read_text()


def test_pages_that_code_names_are_there() -> None:
    rooms = ("memeff_compile", "benchmarks", "tests", "examples")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    named = {(page, path) for path in files for page in PAGE.findall(path.read_text())}
    assert len({page for page, _ in named}) > 3
    assert not [(page, str(path)) for page, path in named if not (ROOT / page).is_file()]


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if "docs" in page.parts}
    assert pages - {"index.md"} <= set(LINK.findall(index))


def constants(node: ast.AST) -> set[str]:
    """Return the strings an expression can be; an f-string counts up to its first value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.JoinedStr):
        return constants(node.values[0])
    if isinstance(node, ast.IfExp):
        return constants(node.body) | constants(node.orelse)
    return set()


def decline_codes() -> set[str]:
    """Return every code that a pass can decline with, read from the source."""
    found: set[str] = set()
    rooms = [ROOT / "memeff_compile" / room for room in ("passes", "logits")]
    for path in (path for room in rooms for path in room.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                found |= codes_in(function)
    return {code.split("(")[0] for code in found}


def codes_in(function: ast.FunctionDef) -> set[str]:
    """Return the first arguments of the Declines, or what becomes one, through variables."""
    nodes = list(ast.walk(function))
    given: list[ast.expr] = [
        n.args[0]
        for n in nodes
        if isinstance(n, ast.Call)
        and getattr(n.func, "id", "") in ("Decline", "Unfoldable", "_Misfit")
        and n.args
    ]
    names = {n.id for n in given if isinstance(n, ast.Name)}
    given += [
        n.value
        for n in nodes
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in names
    ]
    return set().union(*map(constants, given))


def test_every_decline_code_is_on_a_page_and_nothing_else() -> None:
    documented = set()
    for page in PASS_PAGES:
        section = page.read_text().split("## What is declined")[1].split("\n## ")[0]
        found = re.findall(r"^\| `([a-z_]+(?:\([^)]*\))?)` \|", section, re.MULTILINE)
        documented |= {code.split("(")[0] for code in found}
    codes = decline_codes()
    assert len(codes) > 20
    assert documented == codes
