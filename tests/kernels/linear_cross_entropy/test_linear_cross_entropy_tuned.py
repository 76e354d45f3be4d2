"""What a measurement on the user's GPU decides about the op, and that the trials can tell right
from wrong. No GPU: what the table says is put in its place.
"""

from __future__ import annotations

import pytest
import torch

from memeff_compile.cli import trials
from memeff_compile.decisions import DECISIONS
from memeff_compile.errors import TuneError
from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels.device import machine_of, planned_for, speed_note
from memeff_compile.kernels.linear_cross_entropy import engine_for, walk

GPU = torch.device("cuda", 0)
HALF = torch.bfloat16


def measured(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Let the table say that an engine is the faster one."""
    assert engine in DECISIONS[walk.ENGINE].choices
    monkeypatch.setattr(walk, "tuned", lambda device, name, default: {walk.ENGINE: engine}[name])


def test_without_a_measurement_the_default_decides() -> None:
    with planned_for(GPU):
        assert engine_for(GPU, HALF, 64) == "hopper"


def test_a_measured_engine_serves_what_both_could_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(monkeypatch, "library")
    with planned_for(GPU):
        assert engine_for(GPU, HALF, 64) == "library"
        assert engine_for(GPU, torch.float64, 64) == "reference"
    measured(monkeypatch, "hopper")
    with planned_for(GPU):
        assert engine_for(GPU, HALF, 64) == "hopper"
        assert engine_for(GPU, HALF, 60) == "library"
        assert engine_for(GPU, HALF, 64, with_top=True) == "library"
    assert engine_for(torch.device("cpu"), HALF, 64) == "reference"


def test_nothing_is_known_of_a_gpu_that_is_not_here() -> None:
    with planned_for(GPU):
        assert machine_of(GPU) is None
        assert speed_note(GPU) == ""
    assert speed_note(torch.device("cpu")) == ""


SMALL = trials.Shape(300, 16, 700)


def test_the_trial_of_the_loss_passes_the_reference_and_catches_wrong_numbers() -> None:
    work = trials.Loss(torch.device("cpu"), SMALL)
    found, expected = work.run("reference"), work.expected()
    assert trials.fault_of(found, expected) == ""
    for place, name in enumerate(trials.BUDGETS):
        wrong = [part.clone() for part in found]
        wrong[place] *= 1.05
        assert trials.fault_of(wrong, expected).startswith(f"{name} is off by")
        wrong[place].view(-1)[3] = float("nan")
        assert trials.fault_of(wrong, expected).startswith(f"{name} is off by nan")


def test_trials_are_the_questions_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * trials.GIB, 0))
    monkeypatch.setattr(trials, "gpu", lambda device: gpu_of((9, 0)))
    (question,) = trials.questions(GPU, quick=False)
    assert question.name == walk.ENGINE
    assert question.options == DECISIONS[walk.ENGINE].choices
    assert question.default in question.options
    monkeypatch.setattr(trials, "gpu", lambda device: gpu_of((8, 0)))
    assert list(trials.questions(GPU, quick=False)) == []  # one engine alone runs there


def test_trials_keep_to_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(gib: float) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gib * 2**30), 0))
        return len(trials._fitting(GPU, trials.SHAPES))

    assert [fitting(gib) for gib in (140, 3.6, 3.48)] == [3, 2, 1]
    with pytest.raises(TuneError, match=r"2.0 GiB of cuda:0 are free and .* needs 3.5 GiB"):
        fitting(2)
