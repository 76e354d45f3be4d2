"""Plain English: four habits that cost a reader time are counted, and so is the length of the docs.

A habit's limit is a number per 1,000 words over all texts of one kind. Headings and code blocks do
not count, cells of tables do; code in a sentence is one word. The limit of length is for sentences alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HABITS = {
    "what as a relative": r"\bwhat\b",
    "beside, behind, anew": r"\b(?:beside|behind|anew)\b",
    "nothing, nobody, none": r"\b(?:nothing|nobody|none)\b|\bNone of\b",
    "of ours, says so": (
        r"\bof (?:ours|yours|mine|theirs|(?:its|their|one's|our|your) own)\b|\bas (?:it lies|they lie)\b"
        r"|\bgo(?:es)? (?:before|first)\b|\bwithout a word\b|\b(?:say|says|said) so\b"
    ),
}
"""What to look for, in lower case but for Python's None; questions may ask "what"."""

LIMITS = {
    ("README.md", "what as a relative"): 2.5,
    ("README.md", "beside, behind, anew"): 0.3,
    ("README.md", "nothing, nobody, none"): 2.0,
    ("README.md", "of ours, says so"): 0.3,
    ("docs", "what as a relative"): 2.5,
    ("docs", "beside, behind, anew"): 0.3,
    ("docs", "nothing, nobody, none"): 2.0,
    ("docs", "of ours, says so"): 0.3,
    ("docstrings", "what as a relative"): 2.5,
    ("docstrings", "beside, behind, anew"): 0.3,
    ("docstrings", "nothing, nobody, none"): 2.0,
    ("docstrings", "of ours, says so"): 0.3,
}
LONGEST = 25_000
"""Words of prose in README, docs/use and docs/passes together."""

FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
NOT_PROSE = re.compile(r"^\s*(?:#|\||!\[|\$\$).*$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"``.+?``|`[^`\n]+(?:\n[^`\n]+)?`")
SENTENCE = re.compile(r"(?<=[.?!])[\"')*]*\s+(?=[\"'(*]*[A-Z`])|\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
TABLE = re.compile(r"(?:^ *\|.*\n)+", re.MULTILINE)
WORD = re.compile(r"[A-Za-z][\w'-]*")


def without_code(text: str) -> str:
    """Return a text with each piece of code as one word, so that names do not count."""
    return CODE.sub("Code", text)


def cleaned(markdown: str) -> str:
    """Return a page without code blocks and comments, and with the texts of its links alone."""
    for pattern, kept in ((FENCED, ""), (COMMENT, ""), (LINK, r"\1")):
        markdown = pattern.sub(kept, markdown)
    return without_code(markdown)


def prose(markdown: str) -> str:
    """Return the sentences of a page, without headings and tables."""
    return NOT_PROSE.sub("", cleaned(markdown))


def cells(markdown: str) -> str:
    """Return the cells of a page's tables that hold words, without the first row of each."""
    tables = TABLE.findall(cleaned(markdown))
    rows = [row.strip().strip("|") for table in tables for row in table.splitlines()[2:]]
    return "\n\n".join(cell for row in rows for cell in row.split(" | ") if WORD.search(cell))


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield without_code(ast.get_docstring(node) or "")


@cache
def files(kind: str) -> list[Path]:
    """Return the pages, or modules, of one kind."""
    if kind == "README.md":
        return [ROOT / "README.md"]
    if kind == "docs":
        return [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
    return sorted((ROOT / "memeff_compile").rglob("*.py"))


@cache
def texts(kind: str) -> dict[str, str]:
    """Return the sentences of every page, cells of tables included, or module of one kind."""
    found = {}
    for path in files(kind):
        page = path.suffix == ".md" and path.read_text()
        parts = (prose(page), cells(page)) if page else docstrings(path)
        found[path.relative_to(ROOT).as_posix()] = "\n\n".join(parts)
    return found


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, each on one line."""
    return [" ".join(each.split()) for each in SENTENCE.split(text) if each and each.strip()]


def found(habit: str, sentence: str) -> int:
    """Count a habit in a sentence; a question may ask what something is."""
    if habit == "what as a relative" and sentence.rstrip("\"')*").endswith("?"):
        return 0
    first, rest = sentence[:1], sentence[1:]
    return len(re.findall(HABITS[habit], first.lower() + rest))


def words(text: str) -> int:
    return len(WORD.findall(text))


@pytest.mark.parametrize(("kind", "habit"), LIMITS)
def test_a_habit_is_rare(kind: str, habit: str) -> None:
    pages = texts(kind)
    hits = [
        (found(habit, sentence), page, sentence)
        for page, text in pages.items()
        for sentence in sentences(text)
    ]
    hits = [hit for hit in hits if hit[0]]
    share = 1000 * sum(count for count, _, _ in hits) / sum(map(words, pages.values()))
    worst = sorted(hits, key=lambda hit: -hit[0] / len(hit[2]))[:12]
    assert share <= LIMITS[kind, habit], (
        f'"{habit}" {share:.2f} times in 1,000 words of {kind}; the limit is {LIMITS[kind, habit]}. '
        "The worst sentences:\n" + "\n".join(f"  {page}: {text[:200]}" for _, page, text in worst)
    )


def test_readme_use_and_passes_are_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs" / "use").glob("*.md")]
    pages += (ROOT / "docs" / "passes").glob("*.md")
    counted = {page.name: words(prose(page.read_text())) for page in pages}
    longest = sorted(counted.items(), key=lambda each: -each[1])[:8]
    assert sum(counted.values()) <= LONGEST, (
        f"{sum(counted.values())} words of prose; the limit is {LONGEST}. The longest pages: {longest}"
    )


def test_the_counts_see_the_habits() -> None:
    page = (
        "# What is\n\nWhat is it? It keeps what `what` is.\n\n"
        "| what |\n|---|\n| what it is |\n\n```\nnone\n```\n"
    )
    assert [found("what as a relative", each) for each in sentences(prose(page))] == [0, 1]
    assert [found("what as a relative", each) for each in sentences(cells(page))] == [1]
    assert words(prose(page)) == 8
    assert found("nothing, nobody, none", "It returns None.") == 0
    assert found("nothing, nobody, none", "None of them, and nothing else.") == 2
    assert found("of ours, says so", "A kernel of its own says so.") == 2
    assert found("beside, behind, anew", "Anew.") == 1
