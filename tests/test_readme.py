"""The front pages: their snippets run and print what the page says, links resolve, tables are whole.

A ``text`` block after a ``python`` block of README.md, docs/use/quick-start.md or
docs/use/first-steps.md is what that snippet prints, up to times and what other releases count differently. Where a page and the program differ, EXPECTTEST_ACCEPT=1 rewrites the page, as it
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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import torch

import memeff_compile
from memeff_compile import compat
from tests.support.fresh_python import FreshPython
from tests.support.printed import normalised
from tests.support.zoo import FAMILIES, FURTHER

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
QUICK_START = ROOT / "docs" / "use" / "quick-start.md"
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
# What README.md leaves to its reader: the folder of a model, and some ids.
READERS_OWN = """
import torch, transformers
config = transformers.LlamaConfig(vocab_size=32000, hidden_size=128, intermediate_size=256,
                                  num_hidden_layers=1, num_attention_heads=4)
name = {folder!r}
transformers.LlamaForCausalLM(config).save_pretrained(name)
ids = torch.randint(0, 32000, (2, 512))
"""


def programs_of(pages: Sequence[Path], folder: Path) -> str:
    """Return code that runs the snippets of each page as one program, and says where it ends."""
    code = ["import runpy, torch, memeff_compile"]
    for page in pages:
        program = folder / page.stem / "train.py"
        program.parent.mkdir()
        snippets = SNIPPET.finditer(page.read_text())
        before = READERS_OWN.format(folder=str(folder / "model")) if page == README else ""
        program.write_text(before + "".join(f'{s[1]}\nprint("{MARK}")\n' for s in snippets))
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
def test_front_pages_print_what_they_show(
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
    code = programs_of((README, QUICK_START, FIRST_STEPS), tmp_path)
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
    readme, quick_start, first_steps = printed.split(f"{END}\n")[:-1]
    check_page(README, readme, compare=newer)  # older ones build a mask to recover
    check_page(QUICK_START, quick_start, compare=newer)
    check_page(FIRST_STEPS, first_steps)


def test_readme_is_short_and_shows_a_picture_installs_and_uses_first() -> None:
    lines = README.read_text().splitlines()
    assert sum(map(bool, lines)) <= 100
    first = ["![", "pip install", "from_pretrained(", "last_report())"]
    where = [next(i for i, line in enumerate(lines) if text in line) for text in first]
    assert where == sorted(where)
    assert where[-1] < 40


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
    outside = ["contents.md", *(page.name for page in ROOT.glob("*.md") if page != README)]
    assert sorted(listed) == sorted([*pages, *outside])


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
    r"^\| (?P<what>.+?) \| (?P<peer>[^|]+) \| (?P<ours>[^|]+) \| [^|]+ \| `(?P<file>[\w-]+\.jsonl)` (?P<commit>\w{7,8}) \|$",
    re.MULTILINE,
)


def figures(value: Any) -> Iterator[float]:
    """Yield the numbers of a row, wherever they lie in it, without percentiles."""
    if isinstance(value, dict):
        inner = (part for name, part in value.items() if name not in ("p20", "p80"))
        yield from itertools.chain.from_iterable(map(figures, inner))
    elif isinstance(value, int | float):
        yield float(value)


def holds(row: dict[str, Any], cell: str) -> bool:
    """Whether one row has every number of a table's cell, rounded as the cell rounds it."""
    values = list(figures(row))
    return all(
        any(rounds_to(value, number) for value in values)
        for number in re.findall(r"\d+(?:\.\d+)?", cell)
    )


def rounds_to(value: float, number: str) -> bool:
    """Say whether a number is a value, rounded as it is written; halves may go either way."""
    return abs(value - float(number)) <= 0.5001 * 10 ** -len(number.partition(".")[2])


def in_one_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of one run, or of two backends that took turns on one machine."""
    commands = [
        re.sub(r" --backend \w+$| --backend \w+(?= --(?:mode|turns))", "", row["command"])
        for row in (one, other)
    ]
    return one is not other and commands[0] == commands[1] and one["date"] == other["date"]


def test_every_figure_of_the_benchmarks_page_is_a_row_of_one_run() -> None:
    results = ROOT / "benchmarks" / "results" / "nvidia-h200"
    (block,) = MEASURED.findall((ROOT / "docs" / "measured" / "benchmarks.md").read_text())
    table = [line for line in block.splitlines() if line.startswith("|")]
    matches = [ROW.match(line) for line in table[2:]]
    assert len(matches) > 20
    for line, match in zip(table[2:], matches, strict=True):
        assert match, line
        rows = map(json.loads, (results / match["file"]).read_text().splitlines())
        rows = [row for row in rows if row["commit"] == match["commit"]]
        peers, ours = ([r for r in rows if holds(r, match[side])] for side in ("peer", "ours"))
        assert any(in_one_run(*pair) for pair in itertools.product(peers, ours)), line


class Line(NamedTuple):
    """Where a line of a table has its figures from."""

    file: str
    all_of: dict[str, Any]  # what the rows of every column share
    columns: tuple[dict[str, Any] | None, ...]  # what each has of its own; None: not measured


BACKENDS = tuple({"backend": name} for name in ("inductor", "liger", "memeff"))
WITHOUT_LIGER = (BACKENDS[0], None, BACKENDS[2])
GAINS = (
    Line(
        "nvidia-h100/batch.jsonl",
        {"commit": "759b67e2", "model": "llama3.2-1b", "batch": 8, "length": 2048},
        BACKENDS,
    ),
    Line(
        "nvidia-h100/batch.jsonl",
        {"commit": "759b67e2", "model": "gemma2-2b", "batch": 4, "length": 2048},
        BACKENDS,
    ),
    Line(
        "nvidia-h200/compressed-training.jsonl",
        {"commit": "fe245ad", "model": "llama3-8b", "batch": 8, "length": 1024},
        ({"way": "dense, after the backward"}, None, {"way": "tier"}),
    ),
    Line(
        "nvidia-h200/outside-loss.jsonl",
        {
            "commit": "967f3e6",
            "model": "llama3.2-1b",
            "loss": "cross_entropy",
            "batch": 8,
            "length": 2048,
        },
        WITHOUT_LIGER,
    ),
    Line(
        "nvidia-h200/log-probabilities.jsonl",
        {"commit": "efa0da0f", "shape": "8192x4096x151936", "ignored": 0, "frozen": False},
        ({"method": "inductor"}, None, {"method": "memeff"}),
    ),
    Line(
        "nvidia-h200/kv-decode.jsonl",
        {"commit": "974f822", "kind": "kv decode step", "batch": 16, "length": 8192, "filled": 65},
        WITHOUT_LIGER,
    ),
)
SHAPES = ({"shape": "gemma2"}, {"shape": "llama3"})
LOSSES = (
    *(
        Line("nvidia-h200/head-and-loss.jsonl", {"commit": "76e7d8a", "method": method}, SHAPES)
        for method in ("eager", "inductor", "liger", "apple", "apple no filter")
    ),
    Line(
        "nvidia-h200/minimal-workspace.jsonl",
        {"method": "memeff exact workspace=1"},
        (SHAPES[0] | {"commit": "1c014ea"}, SHAPES[1] | {"commit": "442fbc8"}),
    ),
    Line(
        "nvidia-h200/gradients-in-forward.jsonl",
        {"commit": "efa0da0f", "method": "memeff exact gradients=forward", "ignored": 0},
        ({"shape": "8192x2304x256000"}, {"shape": "8192x4096x128256"}),
    ),
)
COMPARE = ROOT / "docs" / "use" / "compare.md"
TABLES = [
    pytest.param(page, number, line, id=f"{page.stem}, line {number}")
    for page, lines in ((README, GAINS), (COMPARE, LOSSES))
    for number, line in enumerate(lines)
]
FIGURE = re.compile(r"(\d+(?:\.\d+)?) (GiB|MiB|ms|s|%|times)\b")
# How a figure's unit follows from the units of rows, which are MiB or GiB, and ms or s.
UNITS = {"GiB": (1, 1024), "MiB": (1,), "ms": (1,), "s": (1, 1000)}


def holds_figure(row: dict[str, Any], number: str, unit: str) -> bool:
    """Say whether a row has a number of this unit, rounded as it is written."""
    return any(rounds_to(value / by, number) for value in figures(row) for by in UNITS[unit])


def lines_of(page: Path) -> list[str]:
    """Return the lines of a page's measured table."""
    (block,) = MEASURED.findall(page.read_text())
    return [line for line in block.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize(("page", "number", "line"), TABLES)
def test_every_figure_of_a_table_is_of_the_row_that_its_line_names(
    page: Path, number: int, line: Line
) -> None:
    label, *cells = (cell.strip() for cell in lines_of(page)[number].strip("|").split("|"))
    rows = list(map(json.loads, (ROOT / "benchmarks/results" / line.file).open()))
    for cell, own in zip(cells, line.columns, strict=True):
        found = FIGURE.findall(cell)
        assert bool(found) == (own is not None), "an empty cell is one that was not measured"
        wanted = (line.all_of | (own or {})).items()
        named = [row for row in rows if row.items() >= wanted]
        assert any(all(holds_figure(row, *each) for each in found) for row in named), cell
    if page == README:
        sizes = re.findall(r"\d+", " ".join(map(str, line.all_of.values())))
        assert {*re.findall(r"\d{3,}", label)} <= {*sizes}


def test_every_line_of_a_table_of_figures_is_held_to_rows() -> None:
    assert len(lines_of(README)) == len(GAINS)
    assert len(lines_of(COMPARE)) == len(LOSSES)


def test_the_readme_has_figures_in_its_table_alone() -> None:
    """And the ratio of its first sentence follows from the first two lines of the table."""
    text = README.read_text()
    (block,) = MEASURED.findall(text)
    elsewhere = FENCED.sub("", text.replace(block, ""))
    assert not FIGURE.findall(re.sub(r"`[^`]*`", "", elsewhere))
    assert "a third to a half of the memory" in text
    lines = [line for line in block.splitlines() if line.startswith("| train")][:2]
    peaks = [[float(found) for found in re.findall(r"([\d.]+) GiB", line)] for line in lines]
    assert all(0.3 < memeff / inductor < 0.5 for inductor, _, memeff in peaks)


def test_readme_counts_the_families() -> None:
    assert f"{len(FAMILIES) + len(FURTHER)} families" in README.read_text()


def test_the_api_page_has_every_public_name_once_and_stability_a_word_on_it() -> None:
    listed = re.findall(r"^::: memeff_compile\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    names = {*memeff_compile.__all__} - {"__version__"}
    assert sorted(listed) == sorted(names)
    stability = (ROOT / "docs/use/stability.md").read_text()
    assert names <= set(re.findall(r"`(\w+)`", stability))


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


SEARCHED = (
    "24 GB, 4090, A100, ROCm, uninstall, undo, report a bug, DeepSpeed, Axolotl, LLaMA-Factory, Unsloth, "
    "Lightning, bitsandbytes, QLoRA, 8-bit Adam, flash_attention_2, Liger, vLLM, distillation, quick start"
)


@pytest.mark.parametrize("words", SEARCHED.split(", "))
def test_the_faq_has_the_words_that_people_search_for(words: str) -> None:
    text = " ".join((ROOT / "docs/use/faq.md").read_text().split())
    assert words.lower() in text.lower()


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
