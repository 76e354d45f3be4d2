"""Tuple ops between head and loss: those that split rows are served, all others declined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.passes.graph.canonical import read
from tests.support.captured_graphs import FUSE, Outcome, calls, capture, compare_with_eager

V, D, ROWS = 64, 16, 10
Parted = Callable[[Tensor], Any]


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((rows, D), (V, D))
    )
    return hidden, weight, torch.randint(V, (rows,), generator=generator)


def of_parts(cut: Parted) -> Callable[..., Any]:
    """Return a function that sums the losses of the parts that `cut` makes."""

    def function(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        losses = [
            F.cross_entropy(logits, labels, reduction="sum")
            for logits, labels in zip(cut(F.linear(h, w)), cut(y), strict=True)
        ]
        return torch.stack(losses).sum() / y.numel()

    return function


CUTS: dict[str, Parted] = {
    "chunk": lambda x: x.chunk(4),
    "chunk with a short end": lambda x: torch.chunk(x, 3),
    "split": lambda x: x.split(4),
    "split by sizes": lambda x: torch.split(x, [3, 7]),
    "split_with_sizes": lambda x: x.split_with_sizes([3, 7]),
    "tensor_split": lambda x: x.tensor_split(3),
    "tensor_split by places": lambda x: torch.tensor_split(x, (2, 9)),
    "unbind": lambda x: [row[None] for row in x.view(2, 5, *x.shape[1:]).unbind(0)[1]],
}


@pytest.mark.parametrize("name", CUTS)
def test_losses_of_parts_are_fused(name: str) -> None:
    outcome = compare_with_eager(of_parts(CUTS[name]), *inputs())
    assert outcome.fired == 1
    assert not outcome.codes
    after = memeff_compile.graphs()[-1].after
    assert "linear(" not in after.replace("_linear(", "")
    assert f"{ROWS}, {V}]" not in after


def test_parts_of_log_probabilities_are_fused() -> None:
    def function(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        first, second = F.log_softmax(h @ w.t(), -1).chunk(2)
        return F.nll_loss(first, y[:5]) + F.nll_loss(second, y[5:])

    assert compare_with_eager(function, *inputs()).fired == 1


def test_parts_of_a_dynamic_number_of_rows() -> None:
    """Parts of a fixed size are served; parts whose size varies are declined with the reason."""
    h, w, y = inputs()
    weight = torch.nn.Parameter(w.detach())

    def compare(cut: Parted) -> Outcome:
        return compare_with_eager(lambda h, y: of_parts(cut)(h, weight, y), h, y, dynamic=True)

    assert compare(CUTS["split"]).fired == 1
    outcome = compare(CUTS["chunk"])
    assert outcome.fired == 0
    assert set(outcome.codes) == {"unknown_step"}
    sentences = [r.sentence for r in outcome.report.records]
    assert all("`chunk` between the head and the loss" in sentence for sentence in sentences)


def with_another_reader(h: Tensor, w: Tensor, y: Tensor) -> Any:
    first, second = F.linear(h, w).chunk(2)
    return F.cross_entropy(first, y[:5]), second.sin().sum()


def two_losses(first: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a loss of `first`'s result for logits, and a loss that can be fused."""

    def function(h: Tensor, w: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(first(F.linear(h, w)), y % 32), F.cross_entropy(h.sin() @ w.t(), y)

    return function


PARTS_OF_THE_CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda x: x.chunk(2, -1)[0],
    "split": lambda x: x.split(32, 1)[1],
}


@pytest.mark.parametrize("first", PARTS_OF_THE_CLASSES.values(), ids=PARTS_OF_THE_CLASSES)
def test_a_part_of_the_classes_is_a_part_of_the_weight(first: Callable[[Tensor], Tensor]) -> None:
    outcome = compare_with_eager(two_losses(first), *inputs())
    assert (outcome.fired, outcome.codes) == (2, [])


DECLINED: dict[str, tuple[Callable[..., Any], int]] = {
    "another reader": (with_another_reader, 0),
    "sort": (two_losses(lambda x: x.sort(0)[0]), 1),
    "topk": (two_losses(lambda x: torch.topk(x, 32)[0]), 1),
    "max": (two_losses(lambda x: x.view(ROWS, 2, 32).max(1)[0]), 1),
    "hsplit": (two_losses(lambda x: torch.hsplit(x, 2)[0]), 1),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_does_more_is_declined_and_costs_no_other_loss(name: str) -> None:
    function, fused = DECLINED[name]
    outcome = compare_with_eager(function, *inputs())
    assert outcome.fired == fused
    assert len(outcome.codes) == 1
    assert all(r.sentence for r in outcome.report.records if r.pass_name == FUSE)


def test_a_part_is_read_as_the_slice_it_is() -> None:
    def function(x: Tensor) -> Any:
        cuts = (x.split(3), x.chunk(3, -1), x.tensor_split((2, 5), 1), x.unbind(0), x.split([6, 4]))
        return [part * 1 for parts in cuts for part in parts]

    x = torch.arange(60.0).view(10, 6)
    gm, found = capture(function, x), 0
    parts = [n for n in calls(gm) if n.target is operator.getitem]
    wanted = function(x)
    for node, value in zip(parts, wanted, strict=True):
        reading = read(node)
        assert reading is not None
        arguments = list(reading[0].args.values())[1:]
        assert torch.equal(reading[0].op(x, *arguments), value)
        found += 1
    assert found == 4 + 3 + 3 + 10 + 2
