"""`tune` on a real GPU: every setting computes right numbers, and what was stored decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memeff_compile
from memeff_compile import decisions
from memeff_compile.cli.measure import find_gpu, measure
from memeff_compile.cli.toy import ToyModel
from memeff_compile.decisions import DECISIONS, Table
from memeff_compile.errors import TuneError
from memeff_compile.kernels.device import decided_by_measurement, gpu
from memeff_compile.kernels.linear_cross_entropy import engine_for
from memeff_compile.kernels.linear_cross_entropy.walk import ENGINE

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decisions.forget()
    yield decisions.stored_at()
    monkeypatch.undo()
    decisions.forget()


def test_a_measurement_finds_every_setting_right_and_decides(cache: Path) -> None:
    if not gpu(DEVICE).is_hopper:
        with pytest.raises(TuneError, match="one engine alone serves each op"):
            find_gpu(quick=True)
        return
    entry = measure(replace(find_gpu(quick=True), seconds=0.0), "2026-11-21")
    assert not {name: found.refused for name, found in entry.found.items() if found.refused}
    assert all(found.value in DECISIONS[name].choices for name, found in entry.found.items())
    assert all(len(found.timings) > 1 for found in entry.found.values())

    other = replace(entry.found[ENGINE], value="library", default="hopper")
    entry = replace(entry, found={**entry.found, ENGINE: other})
    decisions.save(Table((entry,)), cache)
    decisions.forget()
    assert engine_for(DEVICE, torch.bfloat16, 64) == "library"
    assert decided_by_measurement() != ""
    model = ToyModel().to(DEVICE, torch.bfloat16)
    options = {"memeff.inner": "aot_eager"}
    torch.compile(model, backend="memeff", options=options)(torch.arange(32, device=DEVICE))
    report = " ".join(memeff_compile.last_report().details().split())
    assert "; measured on this GPU on 2026-11-21" in report
