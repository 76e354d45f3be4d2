"""Several compressed weights updated in one launch, on a CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memeff_compile import compress_, optim_in_backward
from memeff_compile.kernels.coded_weight import CodedWeight, op
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
    """Return weights after some steps, and how many of them were encoded anew."""
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


@pytest.mark.usefixtures("as_on_a_gpu")
def test_who_reads_a_weight_that_waits_has_the_others_updated_too() -> None:
    model = model_of()
    compress_(model, min_size=0, progress=False)
    optimizer = optim_in_backward(model, sgd)
    first, *others = compressed_weights(model).values()
    before = first.decode()
    optimizer._queue.announce([first, *others])
    first.grad = torch.ones_like(before)
    with torch.no_grad():
        update = next(u for u in optimizer._updates if u.parameter is first)
        update.run(None)
    assert first.unsettled is not None
    assert torch.equal(first.decode(), before - 2)
    assert first.unsettled is None
    optimizer.step()
