"""When does the loss pass write the op that makes its gradients in the forward, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels.linear_cross_entropy import walk

VOCAB, WIDTH, IGNORED = 67, 16, -100
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def gradients_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(walk, "is_faster_in_one_walk", lambda _: True)
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """An embedding, a layer and a head, which may be tied; the loss is given."""

    def __init__(
        self, loss: Loss, *, tied: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embedding(ids)))
        return self.loss(logits.flatten(0, 1), labels.flatten())


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def per_item(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") / 13


def mixed(logits: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(logits, labels) * 0.5 + 1).square()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=torch.linspace(0.1, 2, VOCAB).double())


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(3 * torch.tanh(logits / 3), labels)


def _data(length: int = 9) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(VOCAB, (2, length), generator=source) for _ in range(2))
    labels[0, :3] = IGNORED
    return ids, labels


def _compiled(model: Model, inner: str = "aot_eager", **how: Any) -> Any:
    return torch.compile(model, backend="memeff", options={"memeff.inner": inner}, **how)


def _served() -> bool:
    return "in three products" in " ".join(memeff_compile.last_report().details().split())


def _assert_same(model: Model, call: Any, factor: float = 3.0, **budget: float) -> None:
    data = _data()
    model.zero_grad()
    found = call(*data)
    (factor * found).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected = model(*data)
    (factor * expected).backward()
    torch.testing.assert_close(found, expected, **budget)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, **budget)


@pytest.mark.parametrize("loss", [mean, per_item, mixed, weighted, capped])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_loss_that_is_one_number_has_eager_values_and_gradients(tied: bool, loss: Loss) -> None:
    model = Model(loss, tied=tied, dtype=torch.float64)
    _assert_same(model, _compiled(model), rtol=1e-10, atol=1e-12)
    assert _served()


@pytest.mark.usefixtures("inductors_loops")
def test_inductor_gives_the_same() -> None:
    model = Model(mean, tied=True)
    call = _compiled(model, "inductor")
    for factor in (3.0, 1.0):
        _assert_same(model, call, factor)
    assert _served()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(logits, labels, reduction="none") * torch.arange(18)).sum()


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("loss", [smoothed, per_token, with_z_loss])
def test_other_losses_recompute_their_logits(loss: Loss) -> None:
    model = Model(loss, dtype=torch.float64)
    _assert_same(model, _compiled(model), rtol=1e-10, atol=1e-12)
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    assert not _served()


def test_without_a_backward_nothing_is_made() -> None:
    model = Model(mean)
    with torch.no_grad():
        found = _compiled(model)(*_data())
        torch.testing.assert_close(found, model(*_data()))
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    assert not _served()


def test_a_checkpoint_around_head_and_loss_recomputes_its_logits() -> None:
    class Checkpointed(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            hidden = self.layer(self.embedding(ids))
            found: Tensor = checkpoint(self.head_and_loss, hidden, labels, use_reentrant=False)
            return found

        def head_and_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self.head(hidden).flatten(0, 1), labels.flatten())

    model = Checkpointed(mean, dtype=torch.float64)
    _assert_same(model, _compiled(model), rtol=1e-10, atol=1e-12)
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    assert not _served()


@pytest.mark.parametrize("part", ["head", "trunk"])
def test_frozen_parts_get_no_gradient(part: str) -> None:
    model = Model(mean, dtype=torch.float64)
    frozen = [model.head] if part == "head" else [model.embedding, model.layer]
    for module in frozen:
        module.requires_grad_(False)
    data, call = _data(), _compiled(model)
    call(*data).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(*data).backward()
    for name, parameter in model.named_parameters():
        assert (found[name] is None) == (parameter.grad is None) == (not parameter.requires_grad)
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad)
    assert _served()


def test_gradients_accumulate_and_a_kept_graph_repeats_them() -> None:
    model = Model(mean, dtype=torch.float64)
    call, data = _compiled(model), _data()
    loss = 3 * call(*data)
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    (3 * call(*data)).backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * gradient)


def test_two_losses_in_one_graph() -> None:
    class Two(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            first = super().forward(ids, labels)
            return first + 2 * super().forward(ids.flip(0), labels)

    model = Two(mean, dtype=torch.float64)
    _assert_same(model, _compiled(model), rtol=1e-10, atol=1e-12)
    assert _served()


def test_compiled_autograd_gives_the_same() -> None:
    model = Model(mean)
    call = _compiled(model)

    def step(*data: Tensor) -> Tensor:
        loss: Tensor = 3 * call(*data)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
        return loss

    data = _data()
    step(*data)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    (3 * model(*data)).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_dynamic_lengths_share_one_graph() -> None:
    model = Model(mean, dtype=torch.float64)
    call = _compiled(model, dynamic=True)
    for length in (9, 12, 5):
        data = _data(length)
        model.zero_grad()
        call(*data).backward()
        found = model.head.weight.grad
        model.zero_grad()
        model(*data).backward()
        torch.testing.assert_close(found, model.head.weight.grad)
    assert _served()


def test_autocast_and_a_gradient_scaler() -> None:
    model = Model(mean)
    call, data = _compiled(model), _data()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = call(*data)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*data).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        error = (gradient - parameter.grad).norm() / parameter.grad.norm()
        assert float(error) < 2e-2
    assert _served()


def test_the_report_counts_what_is_held() -> None:
    model = Model(mean)
    _compiled(model)(*_data())
    text = " ".join(memeff_compile.last_report().details().split())
    assert "the gradients are made in the forward, in three products instead of four" in text
    assert "- (B + 64*N) bytes with B = " in text
