"""What a measurement on the user's GPU decides about the op, and that the trials can tell right
from wrong. No GPU: `decisions.using` stands for a stored table.
"""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from memeff_compile.decisions import DECISIONS, using
from memeff_compile.errors import TuneError
from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels.device import (
    decided_by_measurement,
    machine_of,
    planned_for,
    speed_note,
)
from memeff_compile.kernels.linear_cross_entropy import (
    engine_for,
    linear_cross_entropy,
    piece_sizes,
    trials,
    tuned,
)
from memeff_compile.kernels.linear_cross_entropy.pieces import hybrid_widths
from memeff_compile.kernels.linear_cross_entropy.shapes import piece_width, shapes_for_programs

GPU = torch.device("cuda", 0)
HALF = torch.bfloat16
HOPPER = shapes_for_programs(132)


def test_defaults_decide_without_a_measurement() -> None:
    assert tuned.engine_of_both(GPU) == "fused"
    assert tuned.bytes_per_row("fused", GPU, HALF) == 13824
    assert tuned.bytes_per_row("hybrid", GPU, HALF) == 16384
    assert tuned.dense_share(GPU) == 0.75


@pytest.mark.parametrize("name", ["engine_of_both", "dense_share"])
def test_defaults_are_values_that_the_table_takes(name: str) -> None:
    decision = {"engine_of_both": tuned.ENGINE, "dense_share": tuned.SHARE}[name]
    assert DECISIONS[decision].accepts(getattr(tuned, name)(GPU))
    for engine, default in tuned.BYTES_PER_ROW.items():
        decision = tuned.bytes_per_row_of(engine)
        assert all(DECISIONS[decision].accepts(each) for each in (default // 2, 2 * default))
    assert all(DECISIONS[tuned.SHARE].accepts(each) for each in trials.THRESHOLDS)


def test_a_measured_engine_serves_what_both_could_and_nothing_else() -> None:
    with planned_for(GPU), using({tuned.ENGINE: "hybrid"}):
        assert engine_for(GPU, HALF, 64) == "hybrid"
        assert engine_for(GPU, torch.float64, 64) == "reference"
    with planned_for(GPU), using({tuned.ENGINE: "fused"}):
        assert engine_for(GPU, HALF, 64) == "fused"
        assert engine_for(GPU, HALF, 60) == "hybrid"
        assert engine_for(GPU, HALF, 64, with_metrics=True) == "hybrid"
    with using({tuned.ENGINE: "fused"}):
        assert engine_for(torch.device("cpu"), HALF, 64) == "reference"


def test_a_graph_of_another_engine_may_not_be_taken_from_a_cache() -> None:
    """What a filtered loss returns beside its results has other sizes where no filter runs."""

    def sizes() -> list[torch.Size]:
        hidden = torch.empty(300, 64, dtype=HALF, device="meta")
        weight = torch.empty(1000, 64, dtype=HALF, device="meta")
        target = torch.empty(300, dtype=torch.int64, device="meta")
        settings: dict[str, Any] = {
            "ignore_index": -100,
            "scale": 1.0,
            "softcap": 0.0,
            "with_lse": False,
            "with_logit_sum": False,
            "gradient_filter": "block",
            "workspace": 0,
        }
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            found = linear_cross_entropy(hidden, weight, None, target, None, **settings)
        return [part.shape for part in found]

    with planned_for(GPU):
        untagged, fused = decided_by_measurement(), sizes()
        with using({tuned.ENGINE: "hybrid"}):
            tagged, hybrid = decided_by_measurement(), sizes()
    assert fused != hybrid
    assert untagged != tagged


def test_a_measured_workspace_is_the_one_that_pieces_and_formulas_keep_to() -> None:
    rows, depth, vocab = 16384, 2304, 256_000
    for engine in ("fused", "hybrid"):
        name = tuned.bytes_per_row_of(engine)
        held = {}
        for value in (tuned.BYTES_PER_ROW[engine] // 2, 2 * tuned.BYTES_PER_ROW[engine]):
            with using({name: value}):
                assert tuned.bytes_per_row(engine, GPU, torch.float32) != value  # 16 bits only
                per_row = tuned.bytes_per_row(engine, GPU, HALF)
                symbol = sympy.Symbol("N", positive=True, integer=True)
                pieces = piece_sizes(symbol, vocab, dtype=HALF, engine=engine, device_type="cuda")
                held[value] = int(pieces.bytes.subs(symbol, rows))
            if engine == "fused":
                taken = 2 * rows * piece_width(rows, depth, vocab, 0, HOPPER, per_row)
            else:
                strip, piece = hybrid_widths(rows, depth, vocab, 0, 2, 132, per_row)
                taken = rows * (4 * strip + 2 * piece)
            assert 0.4 * held[value] < taken <= held[value] == rows * value
        assert len(set(held.values())) == 2


def test_nothing_is_known_of_a_gpu_that_is_not_here() -> None:
    with planned_for(GPU):
        assert machine_of(GPU) is None
        assert speed_note(GPU) == ""
    assert speed_note(torch.device("cpu")) == ""


SMALL = trials.Shape(300, 16, 700)


def test_the_trial_of_the_loss_passes_the_reference_and_catches_wrong_numbers() -> None:
    work = trials.Loss(torch.device("cpu"), SMALL)
    budgets, names = (trials.LOSS_BUDGET, *[trials.GRADIENT_BUDGET] * 2), ("nll", "dE", "dC")
    found, expected = work.run(), work.expected()
    assert trials._fault(found, expected, names, budgets) == ""
    for place, name in enumerate(names):
        wrong = [part.clone() for part in found]
        wrong[place] *= 1.05
        assert trials._fault(wrong, expected, names, budgets).startswith(f"{name} is off by")
        wrong[place].view(-1)[3] = float("nan")
        assert trials._fault(wrong, expected, names, budgets).startswith(f"{name} is off by nan")


def test_the_trial_of_the_threshold_sees_tiles_that_were_not_left_out() -> None:
    """On a CPU no filter runs, so the gradient is the whole one: wrong for a map with holes."""
    budgets, names = [trials.GRADIENT_BUDGET] * 2, ("dE", "dC")
    device = torch.device("cpu")
    whole = trials.FilteredGradient(device, SMALL, 1.0)
    assert trials._fault(whole.run(), whole.expected(), names, budgets) == ""
    holes = trials.FilteredGradient(device, SMALL, 0.3)
    assert trials._fault(holes.run(), holes.expected(), names, budgets).startswith("dE is off")
    assert float(holes.active.float().mean()) == pytest.approx(0.3, abs=0.1)


def test_trials_are_the_questions_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * trials.GIB, 0))

    def asked(hopper: bool, engine: str) -> list[str]:
        monkeypatch.setattr(trials, "gpu", lambda device: gpu_of((9, 0) if hopper else (8, 0)))
        chosen: dict[str, Any] = {}
        names = []
        for question in trials.questions(GPU, chosen, quick=False):
            assert question.default in question.options
            assert all(DECISIONS[question.name].accepts(option) for option in question.options)
            names.append(question.name)
            chosen[question.name] = engine if question.name == tuned.ENGINE else question.default
        return names

    fused, hybrid = map(tuned.bytes_per_row_of, ("fused", "hybrid"))
    assert asked(True, "fused") == [tuned.ENGINE, fused, tuned.SHARE]
    assert asked(True, "hybrid") == [tuned.ENGINE, hybrid]
    assert asked(False, "") == [hybrid]


def test_trials_keep_to_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(gib: float) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gib * 2**30), 0))
        return len(trials._fitting(GPU, trials.SHAPES))

    assert [fitting(gib) for gib in (140, 3.6, 3.48)] == [3, 2, 1]
    with pytest.raises(TuneError, match=r"2.0 GiB of cuda:0 are free and .* needs 3.5 GiB"):
        fitting(2)
