"""Plain English: four habits that cost a reader time are counted, and so is the length of the docs.

A habit's limit is a number per 1,000 words over all texts of one kind. Headings, tables and code do
not count as prose; code in a sentence counts as one word.
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
WORD = re.compile(r"[A-Za-z][\w'-]*")


def prose(markdown: str) -> str:
    """Return the sentences of a page: no headings, tables, code blocks, comments or addresses."""
    for pattern, kept in ((FENCED, ""), (COMMENT, ""), (NOT_PROSE, ""), (LINK, r"\1")):
        markdown = pattern.sub(kept, markdown)
    return CODE.sub("Code", markdown)


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, examples and the lists of arguments' names included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@cache
def texts(kind: str) -> dict[str, str]:
    """Return the prose of every page, or module, of one kind."""
    if kind == "docstrings":
        files = sorted((ROOT / "memeff_compile").rglob("*.py"))
        read = {path: "\n\n".join(map(CODE_ONLY, docstrings(path))) for path in files}
    else:
        pages = {
            "README.md": [ROOT / "README.md"],
            "docs": [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"],
        }
        read = {path: prose(path.read_text()) for path in sorted(pages[kind])}
    return {path.relative_to(ROOT).as_posix(): text for path, text in read.items()}


def CODE_ONLY(text: str) -> str:  # noqa: N802
    return CODE.sub("Code", text)


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
    pages = texts("README.md") | texts("docs")
    counted = {
        page: words(text)
        for page, text in pages.items()
        if page.startswith(("README", "docs/use", "docs/passes"))
    }
    longest = sorted(counted.items(), key=lambda each: -each[1])[:8]
    assert sum(counted.values()) <= LONGEST, (
        f"{sum(counted.values())} words of prose; the limit is {LONGEST}. The longest pages: {longest}"
    )


def test_the_counts_see_the_habits() -> None:
    page = "# What is\n\nWhat is it? It keeps what `what` is.\n\n| what |\n\n```\nnone\n```\n"
    assert [found("what as a relative", each) for each in sentences(prose(page))] == [0, 1]
    assert found("nothing, nobody, none", "It returns None.") == 0
    assert found("nothing, nobody, none", "None of them, and nothing else.") == 2
    assert found("of ours, says so", "A kernel of its own says so.") == 2
    assert found("beside, behind, anew", "Anew.") == 1
