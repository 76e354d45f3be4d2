"""memeff.weights=win4: what is compressed, and what stays because somebody else has hold of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights import compress
from memeff_compile.report import Record

CALLS = 3
"""Calls until a weight is compressed."""


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take small weights for large ones."""
    monkeypatch.setattr(compress, "MIN_SIZE", 0)
    torch._dynamo.reset()
    memeff_compile.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 128)
        self.up = nn.Linear(128, 256)
        self.lm_head = nn.Linear(256, 32, bias=False)
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.lm_head(torch.relu(self.up(self.embed(ids))))
        assert isinstance(found, Tensor)
        return found


IDS = torch.arange(8).view(2, 4)


def compiled(model: nn.Module, codec: str = "win4") -> Callable[[Tensor], Tensor]:
    options = {"memeff.inner": "aot_eager", "memeff.weights": codec}
    return torch.compile(model, backend="memeff", options=options)


def run(model: nn.Module, calls: int = CALLS + 2, codec: str = "win4") -> list[Tensor]:
    function = compiled(model, codec)
    with torch.no_grad():
        return [function(IDS) for _ in range(calls)]


def records() -> list[Record]:
    found = memeff_compile.last_report().records
    return [r for r in found if r.pass_name == "encode_weights"]


def left() -> list[str]:
    return [r.sentence for r in records() if r.code == "weight_left_dense"]


@pytest.mark.parametrize("codec", ["win4", "tier", "rans"])
def test_a_weight_that_only_the_model_holds_is_compressed(codec: str) -> None:
    model = Model()
    expected = model(IDS).detach()
    dense = weakref.ref(model.up.weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(out, expected) for out in run(model, codec=codec))
    assert isinstance(model.up.weight, CodedWeight)
    assert model.up.weight.codec == codec
    assert isinstance(model.up.weight, nn.Parameter)
    assert model.up.weight.requires_grad
    assert dense() is None, "its memory is given up"
    assert any(r.action == "rewrote" and r.module == "up" for r in records())
    assert type(model.lm_head.weight) is nn.Parameter, "heads stay dense, as with compress_"
    assert any("skip names 'lm_head'" in sentence for sentence in left())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_inference_mode_makes_parameters_that_can_train_later() -> None:
    model = Model()
    function = compiled(model)
    with torch.inference_mode():
        for _ in range(CALLS + 1):
            function(IDS)
    assert isinstance(model.up.weight, CodedWeight)
    assert not model.up.weight.is_inference()
    model(IDS).float().sum().backward()
    assert model.up.weight.grad is not None


def test_a_weight_gets_its_values_until_the_last_moment() -> None:
    """Between calls the model is dense, and may be written to."""
    for calls in range(1, CALLS + 1):
        model, plain = Model(), Model()
        function = compiled(model)
        with torch.no_grad():
            for _ in range(calls):
                function(IDS)
            if calls < CALLS:
                model.up.weight.mul_(2)
                plain.up.weight.mul_(2)
            for _ in range(CALLS):
                assert torch.equal(function(IDS), plain(IDS))


def an_optimizer(model: Model) -> object:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def a_variable(model: Model) -> object:
    return model.up.weight


def a_view(model: Model) -> object:
    return model.up.weight[3:]


def an_array(model: Model) -> object:
    return model.up.weight.detach().view(torch.int16).numpy()


def what_autograd_saved(model: Model) -> object:
    x = torch.ones(1, 128, dtype=torch.bfloat16, requires_grad=True)
    return model.up(x)


def a_closure(model: Model) -> object:
    weight = model.up.weight
    return lambda: weight


@pytest.mark.parametrize(
    "holder",
    [an_optimizer, a_variable, a_view, an_array, what_autograd_saved, a_closure],
    ids=lambda holder: holder.__name__,
)
def test_a_weight_that_somebody_else_holds_stays(holder: Callable[[Model], object]) -> None:
    model = Model()
    before, held = id(model.up.weight), holder(model)
    run(model)
    assert type(model.up.weight) is nn.Parameter
    assert any("beside the model holds the weight" in sentence for sentence in left())
    if holder is not a_view and holder is not an_array:
        assert id(model.up.weight) == before, "what others hold is the model's again"
    assert held is not None


def test_an_optimizer_made_before_still_trains_the_model() -> None:
    model = Model()
    optimizer: Any = an_optimizer(model)
    run(model)
    before = model.up.weight.detach().clone()
    model(IDS).float().sum().backward()
    optimizer.step()
    assert not torch.equal(model.up.weight, before)


@pytest.mark.parametrize("after", [1, 2])
def test_a_weight_that_is_taken_hold_of_between_calls_stays(after: int) -> None:
    model = Model()
    function = compiled(model)
    with torch.no_grad():
        for _ in range(after):
            function(IDS)
        held = model.up.weight
        for _ in range(CALLS + 2):
            function(IDS)
        assert type(model.up.weight) is nn.Parameter
        held.zero_()
        assert not model.up.weight.any(), "a write of whoever holds it is seen"


def test_a_weight_that_was_replaced_between_calls_stays_replaced() -> None:
    model = Model()
    function = compiled(model)
    kept = model.up.weight
    with torch.no_grad():
        function(IDS)
        model.up.weight = nn.Parameter(torch.zeros_like(kept))
        for _ in range(CALLS):
            assert torch.equal(function(IDS), model(IDS))
    assert not model.up.weight.any()
    assert any("was put in its place" in sentence for sentence in left())


def tied(model: Model) -> None:
    model.lm_head = nn.Linear(128, 32, bias=False, dtype=torch.bfloat16)
    model.lm_head.weight = model.embed.weight
    model.up = nn.Linear(128, 128, dtype=torch.bfloat16)


def hooked(model: Model) -> None:
    model.up.weight.register_hook(lambda gradient: gradient)


def with_a_gradient(model: Model) -> None:
    model.up.weight.grad = torch.ones_like(model.up.weight)


def of_another_class(model: Model) -> None:
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1

    other = Mine(128, 256, dtype=torch.bfloat16)
    other.load_state_dict(model.up.state_dict())
    model.up = other


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "hooks are registered"),
        (with_a_gradient, "it has a gradient"),
        (of_another_class, "which is not a plain nn.Linear"),
    ],
    ids=["hooked", "with a gradient", "of another class"],
)
def test_a_weight_that_compress_would_leave_stays(
    change: Callable[[Model], None], reason: str
) -> None:
    model = Model()
    change(model)
    run(model)
    assert type(model.up.weight) is nn.Parameter
    assert any(reason in sentence for sentence in left())


def test_a_weight_that_an_embedding_reads_too_stays() -> None:
    model = Model()
    tied(model)
    expected = model(IDS).detach()
    assert all(torch.equal(out, expected) for out in run(model))
    assert type(model.lm_head.weight) is nn.Parameter
    assert isinstance(model.up.weight, CodedWeight)


def test_nothing_is_compressed_where_gradients_are_recorded() -> None:
    model = Model()
    function = compiled(model)
    for _ in range(CALLS + 1):
        function(IDS)
    assert type(model.up.weight) is nn.Parameter
    assert [r.code for r in records()] == ["weights_trained"]
    assert "compress_(model) and optim_in_backward" in records()[0].hint


def test_the_default_compresses_nothing() -> None:
    model = Model()
    run(model, codec="exact")
    assert type(model.up.weight) is nn.Parameter
    assert not records()
