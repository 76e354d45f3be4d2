"""Which engine computes the op, and what is said of its speed. No GPU: one is planned or pretended."""

from __future__ import annotations

import pytest
import torch

from memeff_compile.kernels import device
from memeff_compile.kernels.device import planned_for, speed_note
from memeff_compile.kernels.linear_cross_entropy import engine_for

GPU = torch.device("cuda", 0)
HALF = torch.bfloat16


def test_hopper_serves_what_it_and_the_library_could() -> None:
    with planned_for(GPU):
        assert engine_for(GPU, HALF, 64) == "hopper"
        assert engine_for(GPU, HALF, 60) == "library"
        assert engine_for(GPU, HALF, 64, with_top=True) == "library"
        assert engine_for(GPU, torch.float64, 64) == "reference"
    assert engine_for(torch.device("cpu"), HALF, 64) == "reference"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NVIDIA H200", "defaults measured on an NVIDIA H200"),
        ("Some GPU", "speed not measured on this GPU"),
    ],
)
def test_a_gpu_whose_speed_was_not_measured_is_named(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    assert speed_note(GPU) == said


def test_nothing_is_known_of_a_gpu_that_is_not_here() -> None:
    with planned_for(GPU):
        assert speed_note(GPU) == ""
    assert speed_note(torch.device("cpu")) == ""
