"""Several compressed weights updated in one launch, on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from memeff_compile import compress_, optim_in_backward
from memeff_compile.errors import CodedWeightError
from memeff_compile.kernels.coded_weight import CodedWeight, op, pieces, tensor
from memeff_compile.model.weights import optim_in_backward as verb
from memeff_compile.model.weights.compress import compressed_weights

pytestmark = pytest.mark.interpreter


def model_of(count: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(count))).bfloat16()


def sgd(parameter: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=2.0)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_uses_kernels", lambda tensor: True)
    place = lambda count, device: torch.zeros(count, dtype=torch.int16)  # noqa: E731
    monkeypatch.setattr(verb, "make_refuge", place)


def trained(steps: int, together: bool, scale: float) -> tuple[list[Tensor], int]:
    """Return weights after some steps, and how many of them were encoded again."""
    model = model_of()
    if together:
        compress_(model, min_size=0, progress=False)
    optimizer = optim_in_backward(model, sgd)
    weights = list(compressed_weights(model).values())
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(steps):
        loss = (model(x).float() * scale).square().sum()
        if together:
            optimizer._queue.announce(weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    anew = sum(weight.times_anew for weight in weights)
    found = [p.decode() if isinstance(p, CodedWeight) else p.detach() for p in model.parameters()]
    return found, anew


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("scale", [2.0**-12, 1e9])  # the second does not fit
def test_weights_updated_together_have_the_bits_of_dense_ones(scale: float) -> None:
    found, anew = trained(2, together=True, scale=scale)
    expected, _ = trained(2, together=False, scale=scale)
    assert (anew > 0) == (scale > 1)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        kept = ~other.isnan()
        assert torch.equal(one[kept].view(torch.int16), other[kept].view(torch.int16))


def waiting() -> tuple[verb.BackwardOptimizer, list[CodedWeight], list[Tensor]]:
    """Return weights that expect gradients together, and their initial values."""
    model = model_of()
    compress_(model, min_size=0, progress=False)
    optimizer = optim_in_backward(model, sgd)
    weights = list(compressed_weights(model).values())
    optimizer._queue.announce(weights)
    return optimizer, weights, [weight.decode() for weight in weights]


@torch.no_grad()
def give(optimizer: verb.BackwardOptimizer, weight: CodedWeight) -> None:
    """Give a weight a gradient of ones, as its hook does: with a rate of 2 it loses 2."""
    weight.grad = torch.ones(weight.shape).bfloat16()
    next(u for u in optimizer._updates if u.parameter is weight).run(None)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_who_reads_a_weight_that_waits_has_the_others_updated_too() -> None:
    optimizer, (first, *_), before = waiting()
    give(optimizer, first)
    assert first.unsettled is not None
    assert torch.equal(first.decode(), before[0] - 2)
    assert first.unsettled is None
    optimizer.step()


@contextmanager
def failing(what: object, name: str) -> Iterator[None]:
    """Have a function find no memory."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what, name, fail)
        yield


@pytest.mark.usefixtures("as_on_a_gpu")
def test_values_are_kept_where_memory_runs_out_between_the_launches() -> None:
    optimizer, weights, before = waiting()
    for weight in weights[:2]:
        give(optimizer, weight)
    with (
        failing(pieces, "list_patches"),
        pytest.raises(CodedWeightError, match=r"3 compressed.*no room.*They are kept dense"),
    ):
        give(optimizer, weights[2])
    with failing(op, "encode"), pytest.raises(torch.OutOfMemoryError):  # still no memory
        weights[0].decode()
    for weight, value in zip(weights, before, strict=True):
        assert torch.equal(weight.decode(), value - 2)
        assert weight.unsettled is None
    optimizer.step()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_stay_as_they_were_where_memory_runs_out_before_the_launches() -> None:
    optimizer, weights, before = waiting()
    for weight in weights[:2]:
        give(optimizer, weight)
    with failing(pieces, "move"), pytest.raises(torch.OutOfMemoryError):
        give(optimizer, weights[2])
    for weight, value in zip(weights, before, strict=True):
        assert torch.equal(weight.decode(), value)
    optimizer.step()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_wait_on_where_no_place_can_be_made() -> None:
    optimizer, weights, before = waiting()
    for weight in weights[:2]:
        give(optimizer, weight)
    with failing(optimizer._queue, "place_for"), pytest.raises(torch.OutOfMemoryError):
        give(optimizer, weights[2])
    for weight, value in zip(weights, before, strict=True):
        assert torch.equal(weight.decode(), value - 2)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_kernels_run_on_the_stream_on_which_gradients_come(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = "first"
    launched: list[tuple[str, int]] = []

    @contextmanager
    def on_stream(one: str) -> Iterator[None]:
        nonlocal stream
        outer, stream = stream, one
        yield
        stream = outer

    move = pieces.move

    def noted(held: list[Tensor], *rest: object) -> Tensor:
        launched.append((stream, len(held)))
        return move(held, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor, "stream_of", lambda _: stream)
    monkeypatch.setattr(tensor, "on_stream", on_stream)
    monkeypatch.setattr(pieces, "move", noted)
    optimizer, weights, before = waiting()
    give(optimizer, weights[0])
    give(optimizer, weights[1])
    stream = "second"
    give(optimizer, weights[2])
    stream = "third"
    for weight, value in zip(weights, before, strict=True):
        assert torch.equal(weight.decode(), value - 2)
    assert launched == [("first", 2), ("second", 1)]
