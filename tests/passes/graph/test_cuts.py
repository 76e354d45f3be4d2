"""Graphs whose weights are updated in the backward are compiled in pieces, block by block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import optim_in_backward
from memeff_compile.passes.graph import cuts

WIDTH, BLOCKS = 16, 3


class Block(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    """Blocks between two linears; the first linear's result is an output too."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        early = x = self.first(x)
        scale = x.shape[0]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x).square().mean() * scale, early.detach(), scale


def sgd(parameter: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=0.1)


def pieces() -> str:
    """Return the report's text about partitions."""
    report = memeff_compile.last_report()
    assert report is not None
    return "".join(r.sentence for r in report.records if r.code == "in_pieces")


def train(model: Any, optimizer: torch.optim.Optimizer, batches: tuple[int, ...]) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    losses = []
    for batch in batches:
        loss, early, scale = model(torch.randn(batch, WIDTH, generator=draw))
        assert scale == batch
        assert early.shape == (batch, WIDTH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(model: Net, batches: tuple[int, ...], inner: str, dynamic: bool | None = None) -> None:
    """Train whole with the optimizer after the backward pass, and in partitions: the same bits."""
    options = {"memeff.inner": inner}
    twin = copy.deepcopy(model)
    twin.compile(backend="memeff", options=options, dynamic=dynamic)
    expected = train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), batches)
    assert pieces() == ""
    memeff_compile.reset()  # or the graph of the same class would serve both
    optimizer = optim_in_backward(model, sgd)
    model.compile(backend="memeff", options=options, dynamic=dynamic)
    assert train(model, optimizer, batches) == expected
    assert f"compiled in {BLOCKS + 2} pieces" in pieces()
    for trained, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(trained, other)


@pytest.mark.parametrize(
    ("checkpointed", "dynamic"),
    [
        (True, True),
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((False, False), (False, True), (True, False))
        ],
    ],
)
def test_pieces_train_as_the_whole_graph_does(checkpointed: bool, dynamic: bool) -> None:
    compare(Net(checkpointed), (4, 4, 6), "aot_eager", dynamic)


@pytest.mark.slow
def test_pieces_run_under_inductor() -> None:
    compare(Net(checkpointed=True), (4, 4), "inductor")


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_come_and_go_block_by_block(checkpointed: bool) -> None:
    class Counted(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counted.products += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def products_before_updates(model: Net) -> dict[str, int]:
        seen: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: seen.update({name: Counted.products})
            )
        options = {"memeff.inner": "aot_eager", "memeff.gated_linear": "off"}
        model.compile(backend="memeff", options=options)
        loss, *_ = model(torch.ones(2, WIDTH))
        Counted.products = 0
        with Counted():
            loss.backward()
        return seen

    whole = products_before_updates(Net(checkpointed))
    assert len(set(whole.values())) == 1  # after the whole backward pass
    memeff_compile.reset()
    model = Net(checkpointed)
    optim_in_backward(model, sgd)
    seen = products_before_updates(model)
    order = ["last.weight", *(f"blocks.{n}.down.weight" for n in (2, 1, 0)), "first.weight"]
    counts = [seen[name] for name in order]
    assert counts == sorted(set(counts))


def test_other_graphs_stay_whole() -> None:
    model = Net()
    optimizer = optim_in_backward(model, sgd)
    optimizer.remove()
    model.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), (4,))
    assert pieces() == ""
    memeff_compile.reset()
    optim_in_backward(model, sgd)
    with torch.no_grad():
        model(torch.ones(3, WIDTH))
    assert pieces() == ""


def test_graphs_that_write_stay_whole() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
            self.calls.add_(1)
            return super().forward(x)

    model = Counting()
    optimizer = optim_in_backward(model, sgd)
    model.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
    train(model, optimizer, (4, 4))
    assert pieces() == ""
    assert model.calls == 2


def test_a_search_for_blocks_that_fails_leaves_the_graph_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(node: object) -> str:
        raise KeyError("a stack of another kind")

    monkeypatch.setattr(cuts, "block_of", fail)
    model = Net()
    optimizer = optim_in_backward(model, sgd)
    model.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
    train(model, optimizer, (4,))
    assert pieces() == ""
    found = [r for r in memeff_compile.last_report().records if r.code == "cuts_failed"]
    assert "a stack of another kind" in found[0].sentence
