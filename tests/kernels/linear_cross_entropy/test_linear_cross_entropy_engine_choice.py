"""Which engine computes the op, and what is said of its speed. No GPU: one is planned or pretended."""

from __future__ import annotations

import pytest
import torch

from memeff_compile.kernels import device
from memeff_compile.kernels._head_loss.call import Operands, Settings
from memeff_compile.kernels.device import planned_for, speed_note
from memeff_compile.kernels.linear_cross_entropy import engine_for, walk

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


@pytest.mark.parametrize("name", ["hopper", "library"])
def test_a_filter_takes_the_place_of_the_walks_of_engines_that_have_it(name: str) -> None:
    """On GPUs of capability 8.0, 8.9, 10.0 and 12.0 these are the walks of `library`."""
    engine, half = walk.ENGINES[name], torch.bfloat16
    hidden, weight = (torch.empty(size, 2048, dtype=half) for size in (4, 64))
    target = torch.zeros(4, dtype=torch.int64)
    mass = Settings(-100, 1.0, 0.0, False, False, "mass", 0)
    plain = Operands(hidden, weight, None, target)
    filtered = walk.walks_of(engine, plain, mass)
    assert filtered.exact is engine.module
    assert filtered.forward is engine.module.forward
    exact = [
        walk.walks_of(engine, plain, mass._replace(gradient_filter="exact")),
        walk.walks_of(engine, plain._replace(hidden=hidden.float()), mass),
        walk.walks_of(engine, plain._replace(weight=weight.t().contiguous().t()), mass),
        walk.walks_of(engine, plain._replace(low=hidden[:, :8]), mass),
    ]
    assert all(each is engine.module for each in exact)
    reference = walk.ENGINES["reference"]
    assert walk.walks_of(reference, plain, mass) is reference.module
