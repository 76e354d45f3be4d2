"""The retrieval task asks for values that it contains; its tables come from a tiny model's
caches.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.scripts import script

pytest.importorskip("transformers", reason="the small model is a Llama of it")


def drawn(records: int = 9, questions: int = 3, first: float = 1.0) -> tuple[Any, Any]:
    from benchmarks.ablations import retrieval_ablation

    plan = retrieval_ablation.PLANS["tiny"]
    generator = torch.Generator().manual_seed(0)
    return plan, retrieval_ablation.draw(plan, (5, 128), records, questions, generator, first)


def test_every_question_was_told_once_where_it_says() -> None:
    from benchmarks.ablations import retrieval_ablation

    plan, asked = drawn()
    assert asked.ids.shape == (5, 128)
    body = asked.ids[:, : -3 * plan.cell]
    assert ((body == retrieval_ablation.MARK).sum(1) == 9).all(), "so many are told"
    names_and_values = body >= retrieval_ablation.FIRST + plan.filler
    for row, here in zip(body, names_and_values, strict=True):
        assert len(row[here].unique()) == 9 * (plan.value + 1), "no token twice"
    for number in range(3):
        begin = 128 - (3 - number) * plan.cell
        question = asked.ids[:, begin : begin + plan.cell]
        where = asked.told[:, number, None] + torch.arange(plan.cell)
        assert torch.equal(question, body.gather(1, where))
        inside = asked.is_answer[begin : begin + plan.cell].tolist()
        assert inside == [False, False] + [True] * plan.value
    assert int(asked.is_answer.sum()) == 3 * plan.value


def test_what_is_asked_can_be_kept_out_of_the_last_tokens() -> None:
    _, asked = drawn(records=100, questions=1, first=0.5)
    assert int(asked.told.max()) < 64


def test_batches_tell_from_one_record_to_all_that_fit() -> None:
    from benchmarks.ablations import retrieval_ablation

    lesson = retrieval_ablation.Lesson(retrieval_ablation.PLANS["full"], stage=2)
    generator = torch.Generator().manual_seed(0)
    told = []
    for step in range(8):
        asked = lesson.draw(step, generator)
        assert asked.ids.shape == (128, 256)
        questions = asked.told.shape[1]
        told.append(int((asked.ids[0] == retrieval_ablation.MARK).sum()) - questions)
    assert told == [8, 8, 13, 17, 8, 8, 13, 1]


def test_sequences_grow_as_answers_are_right() -> None:
    from benchmarks.ablations import retrieval_ablation

    plan = dataclasses.replace(retrieval_ablation.PLANS["tiny"], enough=0.9, patience=3)
    lesson = retrieval_ablation.Lesson(plan)
    assert not any(lesson.learn(0.5) for _ in range(100))
    assert lesson.length == 32
    assert any(lesson.learn(1.0) for _ in range(100))
    assert lesson.length == 64
    assert not any(lesson.learn(1.0) for _ in range(100)), "there is no longer one"


def test_the_rate_is_nothing_when_time_or_steps_are_over() -> None:
    from benchmarks.ablations import retrieval_ablation

    plan = retrieval_ablation.PLANS["full"]
    at = [(4000, 0.0), (plan.steps, 0.0), (200, 1.0), (0, 0.0)]
    rates = [retrieval_ablation.rate(plan, step, spent) for step, spent in at]
    assert rates == pytest.approx([plan.peak_lr, 0.0, 0.0, plan.peak_lr / plan.warm_up], abs=1e-12)


@pytest.mark.slow
def test_each_cache_has_a_row_and_the_exact_one_answers_as_the_model(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from benchmarks import rows
    from benchmarks.ablations import retrieval_ablation

    given = ["--size", "tiny", "--model", str(tmp_path / "m"), "--out", str(tmp_path / "o.jsonl")]
    assert "retrieval model" in script("retrieval_ablation", "train", *given)
    script("retrieval_ablation", "measure", "--bits", "16", "2", *given)
    found = [row for row in rows.read(tmp_path / "o.jsonl") if row["kind"] == "retrieval"]
    plan = retrieval_ablation.PLANS["tiny"]
    assert len(found) == 3 + 2 * 2 + 6
    model = LlamaForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    for records in plan.records:
        losses = []
        for asked in retrieval_ablation.asked_of(plan, records, "cpu"):
            with torch.no_grad():
                losses.append(retrieval_ablation.answer_loss(model, asked, "cpu")[0])
        exact = found[0]["records"][str(records)]
        assert exact["loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
        assert exact["asked"] == plan.questions
    size = {
        (r["bits"], r["scheme"], r["start_layer"], r["gamma"]): r["records"]["4"] for r in found
    }
    exact, two, merged = (
        size[key]
        for key in ((16, "kivi", None, 0.05), (2, "kivi", None, 0.05), (2, "kivi", 2, 0.05))
    )
    assert merged["bytes"] < two["bytes"] < exact["bytes"]
    assert two["loss"] != exact["loss"] == pytest.approx(two["loss"], abs=0.2)
    table = script("retrieval_ablation", "table", *given)
    assert table.count("| per_head |") == 1
    assert table.count("from layer 2, room 1% |") == 2
    assert "Seed 0, 8 steps, sequences of 64 tokens, 13 caches" in table


def test_all_widths_and_both_schemes_are_measured() -> None:
    from benchmarks.ablations import retrieval_ablation

    found = list(retrieval_ablation.settings(4))
    assert found[0] == retrieval_ablation.Setting(16)
    assert len(found) == len(set(found)) == 9 + 2 * 5 + 6
