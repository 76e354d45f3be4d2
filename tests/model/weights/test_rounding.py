"""Weights rounded by their inputs: the result is coded without change, and products lose less."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memeff_compile.errors import OptionError
from memeff_compile.kernels.coded_weight import CodedWeight, encode
from memeff_compile.model.weights import rounding
from memeff_compile.model.weights.compress import compress_, compressed_weights
from memeff_compile.model.weights.rounding import gram_groups, rounded_for
from tests.model.weights.test_compress import llama
from tests.support.hostile_weights import hostile


def _coded(weight: Tensor, mantissa: int, block: int) -> Tensor:
    codec = f"tier:k{mantissa}:b{block}"
    return CodedWeight(encode(weight, codec), codec, weight.shape).decode()


def _inputs(width: int, rank: int = 12) -> Tensor:
    source = torch.Generator().manual_seed(1)
    alike = torch.randn(2000, rank, generator=source) @ torch.randn(rank, width, generator=source)
    return alike + 0.1 * torch.randn(2000, width, generator=source)


@pytest.mark.parametrize("block", [32, 512])
@pytest.mark.parametrize("mantissa", [0, 1, 3])
def test_products_lose_less_and_coding_changes_nothing(mantissa: int, block: int) -> None:
    weight = (0.05 * torch.randn(96, 200, generator=torch.Generator().manual_seed(0))).bfloat16()
    inputs = _inputs(200)
    nearest = _coded(weight, mantissa, block)
    rounded = rounded_for(weight, inputs.t() @ inputs, mantissa, block)
    assert rounded is not None
    assert torch.equal(_coded(rounded, mantissa, block), rounded)
    lost = [float((inputs @ (w - weight).float().t()).norm()) for w in (nearest, rounded)]
    assert lost[1] < 0.6 * lost[0]
    off = [float((w - weight).float().norm()) for w in (nearest, rounded)]
    assert off[1] > off[0], "which is no least squared error"


@pytest.mark.parametrize("mantissa", [0, 1, 3])
def test_hostile_weights_are_coded_as_they_are_rounded(mantissa: int) -> None:
    weight = hostile(64 * 128).view(64, 128)
    weight = torch.where(weight.isfinite(), weight, torch.zeros_like(weight))
    weight[3], weight[:, 7] = 0, 0
    weight[5, :64] = 1e-37
    inputs = _inputs(128)
    rounded = rounded_for(weight, inputs.t() @ inputs, mantissa, 64)
    assert rounded is not None
    assert torch.equal(_coded(rounded, mantissa, 64), rounded)
    assert not bool(rounded[3].any())


def test_what_cannot_be_rounded_so_is_none() -> None:
    weight = torch.randn(64, 64).bfloat16()
    gram = torch.eye(64)
    assert rounded_for(weight, torch.zeros(64, 64), 3, 64) is None
    assert rounded_for(weight, gram * torch.nan, 3, 64) is None
    assert rounded_for(weight * torch.inf, gram, 3, 64) is None
    assert rounded_for(weight, gram, 3, 64) is not None


def test_gram_matrices_are_held_within_a_bound_but_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounding, "GRAM_BYTES", 4 * 100)
    assert list(gram_groups([5, 5, 5, 5, 6, 20, 20, 1])) == [4, 1, 1, 1, 1]
    assert list(gram_groups([])) == []


IDS = torch.arange(96).view(2, 48) % 64


def _llama() -> nn.Module:
    """Return a Llama that drops much of its attention where it trains."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    return model.train()


def _lossy(model: nn.Module, **settings: Any) -> Any:
    return compress_(model, "tier", mantissa=1, min_size=1, progress=False, **settings)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_model_is_rounded_for_what_it_is_called_with(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grouped:  # the model runs once for each weight, with those before it rounded
        monkeypatch.setattr(rounding, "GRAM_BYTES", 1)
    exact = llama()(IDS).logits.float().log_softmax(-1).detach()
    away = []
    for inputs in (None, {"input_ids": IDS}):
        model = _llama()
        report = _lossy(model, inputs=inputs)
        assert model.training
        assert all(each.for_inputs == (inputs is not None) for each in report.compressed)
        assert len(compressed_weights(model)) == 14
        found = model.eval()(IDS).logits.float().log_softmax(-1).detach()
        away.append(float((exact.exp() * (exact - found)).sum(-1).mean()))
        assert ("rounded for inputs" in str(report)) == (inputs is not None)
        assert json.loads(report.to_json())["weights"][-1]["for_inputs"] is (
            report.weights[-1].for_inputs
        )
        assert not any(module._forward_pre_hooks for module in model.modules())
    assert away[1] < 0.8 * away[0]


def test_a_linear_that_no_input_reaches_is_rounded_to_the_nearest() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = (nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(input=x)
            return out

    torch.manual_seed(0)
    model = Idle()
    before = model.idle.weight.detach().clone()
    report = compress_(
        model, "tier", mantissa=3, min_size=1, progress=False, inputs=torch.randn(8, 256).bfloat16()
    )
    assert [each.for_inputs for each in report.weights] == [True, False]
    coded = compressed_weights(model)["idle.weight"]
    assert torch.equal(coded.decode(), _coded(before, 3, 512))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mantissa": 7, "inputs": IDS}, "mantissa is 7, which keeps every bit"),
        (
            {"mantissa": 3, "inputs": []},
            r"inputs is \[\]; a list with at least one entry is needed",
        ),
        ({"mantissa": 3, "inputs": 5}, "inputs is 5; a list with at least one entry is needed"),
        ({"mantissa": 3, "inputs": "text"}, "inputs is 'text'; a list with at least one"),
    ],
)
def test_inputs_that_are_none_are_refused_before_anything_is_changed(
    settings: dict[str, Any], sentence: str
) -> None:
    model = _llama()
    with pytest.raises(OptionError, match=sentence):
        compress_(model, "tier", min_size=1, progress=False, **settings)
    assert not compressed_weights(model)


def test_a_model_that_fails_on_its_inputs_is_left_as_it_was() -> None:
    model = _llama()
    with pytest.raises(IndexError):
        _lossy(model, inputs=[torch.full((1, 4), 1000)])
    assert model.training
    assert not compressed_weights(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
