"""docs/use/spellings.md: the backend's result for each spelling equals the page's row.

EXPECTTEST_ACCEPT=1 rewrites the rows, as it does for the goldens of assert_expected_inline, so
`make golden` renews them: read the difference before accepting it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.report import LogitsUse, Report
from tests.support.captured_graphs import compare_with_eager
from tests.support.spellings import SUBJECTS, function, programs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "use" / "spellings.md"
TABLE = re.compile(r"<!-- spellings: (\w+)\..*?-->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)
PAIRS = [(name, text) for name, subject in SUBJECTS.items() for text in subject.spellings]

WORDS = {
    ("fuse_linear_cross_entropy", "rewrote"): "fused",
    ("fuse_divergence", "rewrote"): "fused",
    ("defer_logits", "deferred"): "deferred",
    ("recover_attention", "rewrote"): "one attention call",
}


def outcome(report: Report) -> str:
    """Return a report's result for one spelling, in the page's words."""
    changes = {WORDS.get((r.pass_name, r.action), "") for r in report.records} - {""}
    codes = sorted({f"`{r.code}`" for r in report.records if r.action == "declined"})
    declined = [f"declined: {', '.join(codes)}"] if codes else []
    return "; ".join([*sorted(changes), *declined]) or "unchanged"


def values_and_gradients(head: Callable[..., Tensor], text: str) -> list[Tensor]:
    """Run a loss of logits outside the graph that made them, and its backward pass."""
    h, weight, y, *_ = SUBJECTS["losses"].inputs()
    found = function("z, y", text)(head(h, weight), y)
    parts = found if isinstance(found, tuple) else (found,)
    sum(part.sum() for part in parts if part.requires_grad).backward()
    return [*(part.detach() for part in parts), h.grad, weight.grad]


@cache
def outcomes_outside() -> dict[str, str]:
    """Return every loss's result with deferred logits that one compiled head returned."""
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "aot_eager"}
    head = torch.compile(lambda h, W: F.linear(h, W), backend="memeff", options=options)
    found, before = {}, LogitsUse()
    for text in SUBJECTS["losses"].spellings:
        ours = values_and_gradients(head, text)
        (graph,) = memeff_compile.last_report().graphs
        assert graph.logits is not None
        found[text], before = in_words(before, graph.logits), graph.logits.copy()
        theirs = values_and_gradients(F.linear, text)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    return found


def in_words(before: LogitsUse, after: LogitsUse) -> str:
    """Return the counts of the calls between two readings, in words."""
    computed = [f"`{k}`" for k, n in after.computed.items() if n > before.computed.get(k, 0)]
    fused = [k for k, n in after.fused.items() if n > before.fused.get(k, 0)]
    assert computed or fused
    return f"logits computed for {', '.join(computed)}" if computed else "fused"


def row_of(subject: str, text: str) -> str:
    """Return a row of the page, as the backend would have it today."""
    inputs = SUBJECTS[subject].inputs()
    outcomes = [
        outcome(compare_with_eager(program, *inputs, rtol=1e-10, atol=1e-10).report)
        for program in programs(SUBJECTS[subject], text)
    ]
    outcomes += [outcomes_outside()[text] for around in SUBJECTS[subject].around if not around]
    return f"| `{text}` | {' | '.join(outcomes)} |"


def rows_of(subject: str) -> list[str]:
    """Return the rows that the page has for a subject, below the table's head."""
    (table,) = [found[2] for found in TABLE.finditer(PAGE.read_text()) if found[1] == subject]
    return table.splitlines()[2:]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_page_has_every_spelling_once_and_in_order(subject: str) -> None:
    spellings = SUBJECTS[subject].spellings
    found = [row.split("`")[1] for row in rows_of(subject)]
    if os.environ.get("EXPECTTEST_ACCEPT") == "1" and found != list(spellings):
        rows = [f"| `{text}` |" for text in spellings]
        write(subject, rows)
        return
    assert found == list(spellings), "EXPECTTEST_ACCEPT=1 rewrites the page"


@pytest.mark.parametrize(("subject", "text"), PAIRS, ids=[text for _, text in PAIRS])
def test_a_spelling_does_what_eager_does_and_what_its_row_says(subject: str, text: str) -> None:
    row, rows = row_of(subject, text), rows_of(subject)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        place = SUBJECTS[subject].spellings.index(text)
        write(subject, [*rows[:place], row, *rows[place + 1 :]])
        return
    assert row in rows, "EXPECTTEST_ACCEPT=1 rewrites the page"


def write(subject: str, rows: list[str]) -> None:
    """Write a subject's rows into the page, below the table's head."""

    def replaced(found: re.Match[str]) -> str:
        whole, old = found[0], found[2]
        new = "\n".join([*old.splitlines()[:2], *rows])
        return whole.replace(old, new) if found[1] == subject else whole

    PAGE.write_text(TABLE.sub(replaced, PAGE.read_text()))


def test_the_pages_words_are_explained_on_it() -> None:
    text = TABLE.sub("", PAGE.read_text())
    words = ("fused", "deferred", "logits computed for", "one attention call", "declined")
    for word in (*words, "unchanged"):
        assert f"**{word}**" in text, word


def test_a_head_that_no_pass_serves_has_no_record() -> None:
    program = function("h, W, y", "(h @ W[:40].T).square().mean()")
    h, weight, y, *_ = SUBJECTS["heads"].inputs()
    assert outcome(compare_with_eager(program, h, weight, y).report) == "unchanged"
