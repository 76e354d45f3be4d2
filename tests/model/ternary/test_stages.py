"""TernaryStages: what the switch changes in model, optimizer and scheduler, and saved state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.model import TernaryStages
from memeff_compile.model.low_bit_heads import heads_of
from tests.model.ternary.test_activations import Normed, tiny


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Normed())


def optimizer_of(model: nn.Module, **settings: Any) -> AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.3}]
    return AdamW(groups, **{"lr": 0.15, "weight_decay": 0.02, **settings})


def settings_of(optimizer: Any) -> list[tuple[float, float]]:
    return [(round(float(g["lr"]), 6), g["weight_decay"]) for g in optimizer.param_groups]


def test_the_switch_lowers_the_rate_by_a_third_and_drops_the_decay() -> None:
    model = made()
    optimizer = optimizer_of(model)
    stages = TernaryStages(model, 4, share=0.5, optimizer=optimizer, activation="relu2")
    seen = []
    for _ in range(4):
        seen.append(settings_of(optimizer))
        stages.step()
    first, second = [(0.15, 0.1), (0.3, 0.02)], [(0.1, 0.0), (0.2, 0.0)]
    assert seen == [first, first, second, second]
    assert settings_of(optimizer) == second


def test_rate_and_decay_can_be_chosen_and_a_tensor_keeps_its_address() -> None:
    model = made()
    rate = torch.tensor(0.5)
    optimizer = AdamW(model.parameters(), lr=rate)
    TernaryStages(model, 4, share=0, optimizer=optimizer, rate=0.5, weight_decay=0.03)
    assert optimizer.param_groups[0]["lr"] is rate
    assert settings_of(optimizer) == [(0.25, 0.03)]
    plain = SGD([{"params": list(model.parameters())}], lr=0.5)
    del plain.param_groups[0]["weight_decay"]
    TernaryStages(model, 4, share=0, optimizer=plain, rate=0.5)
    assert plain.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: CosineAnnealingLR(o, 8),
        lambda o: OneCycleLR(o, max_lr=[0.3, 0.6], total_steps=8, cycle_momentum=False),
        lambda o: SequentialLR(
            o, [LinearLR(o, 0.5, 1.0, 4), LambdaLR(o, lambda step: 0.9**step)], [5]
        ),
    ],
    ids=["lambda", "cosine", "one cycle", "sequence"],
)
def test_a_schedule_goes_on_at_the_lower_rate(schedule: Any) -> None:
    rates = []
    for switched in (False, True):
        model = made()
        optimizer = optimizer_of(model)
        scheduler = schedule(optimizer)
        settings = {"optimizer": optimizer, "scheduler": scheduler} if switched else {}
        stages = TernaryStages(model, 8, share=0.5, **settings)
        rates.append([])
        for _ in range(7):
            optimizer.step()
            stages.step()
            scheduler.step()
            rates[-1].append([group["lr"] for group in optimizer.param_groups])
    for number, (plain, lower) in enumerate(zip(*rates, strict=True)):
        factor = 1 if number < 3 else 2 / 3
        torch.testing.assert_close(lower, [each * factor for each in plain])


def test_saved_states_are_not_lowered_twice_and_can_go_back() -> None:
    model = made()
    optimizer = optimizer_of(model)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    stages = TernaryStages(model, 2, share=0.5, optimizer=optimizer, scheduler=scheduler)
    early = copy.deepcopy((stages.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    stages.step()
    late = copy.deepcopy((stages.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        other = made()
        fresh = optimizer_of(other)
        again = LambdaLR(fresh, lambda step: 1.0)
        parts = TernaryStages(other, 2, share=0.5, optimizer=fresh, scheduler=again), fresh, again
        for number in order:
            parts[number].load_state_dict(copy.deepcopy(late[number]))
        assert settings_of(fresh) == settings_of(optimizer) == [(0.1, 0.0), (0.2, 0.0)]
        fresh.step()
        again.step()
        assert settings_of(fresh) == [(0.1, 0.0), (0.2, 0.0)]
        for number in order:
            parts[number].load_state_dict(copy.deepcopy(early[number]))
        assert settings_of(fresh) == [(0.15, 0.1), (0.3, 0.02)]
        assert parts[0].stage == 1


def test_going_back_without_the_optimizers_state_takes_the_change_back() -> None:
    model = made()
    optimizer = optimizer_of(model)
    stages = TernaryStages(model, 2, share=0.5, optimizer=optimizer)
    stages.step()
    stages.load_state_dict({"done": 0})
    assert settings_of(optimizer) == [(0.15, 0.1), (0.3, 0.02)]


def test_heads_get_few_bits_at_the_switch_and_lose_them_on_the_way_back() -> None:
    model = tiny()
    stages = TernaryStages(model, 2, share=0.5, activation="relu2", low_bit_heads=4)
    assert heads_of(model) is None
    assert model.config.hidden_act == "relu2"
    stages.step()
    assert heads_of(model) is not None
    stages.load_state_dict({"done": 0})
    assert heads_of(model) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda o: {"optimizer": o, "rate": 0.0}, "rate is 0.0"),
        (lambda o: {"scheduler": LambdaLR(o, lambda step: 1.0)}, "pass both"),
        (
            lambda o: {"optimizer": LambdaLR(o, lambda step: 1.0).optimizer},
            "Pass it as scheduler=",
        ),
    ],
    ids=["rate", "scheduler alone", "scheduler left out"],
)
def test_what_would_not_last_is_refused(settings: Any, message: str) -> None:
    model = made()
    optimizer = optimizer_of(model)
    with pytest.raises(OptionError, match=message):
        TernaryStages(model, 2, **settings(optimizer))
    with pytest.raises(UnsupportedInputError, match="optimizer is a str"):
        TernaryStages(model, 2, optimizer="adam")
    LambdaLR(optimizer, lambda step: 1.0)
    TernaryStages(model, 2, share=0, optimizer=optimizer, rate=1.0)
    assert settings_of(optimizer)[0] == (0.15, 0.0)
