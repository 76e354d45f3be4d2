"""A checkpoint around a compiled block does not compute the block's last product again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import memeff_compile
from memeff_compile.passes.graph import last_product
from memeff_compile.passes.graph.repeated_layers import LEAST

WIDTH, INNER = 8, 12
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Products(TorchDispatchMode):
    """Counts the products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let Dynamo run compiled code under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in PRODUCTS
        return func(*args, **kwargs or {})


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.fixture(autouse=True)
def _any_size_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(last_product.SHORTEST, "cpu", 0.0)


def compiled(block: nn.Module, **options: str) -> Any:
    torch.compiler.reset()
    return torch.compile(block, backend="memeff", options={"memeff.inner": "aot_eager", **options})


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found: Tensor = checkpoint(block, x, use_reentrant=False)
    return found


def products_again(run: Callable[[Tensor], Tensor], block: nn.Module, x: Tensor) -> int:
    """Return how many products the backward pass computes besides the gradients' two a linear."""
    linears = [each for each in block.modules() if isinstance(each, nn.Linear)]
    loss = run(x).square().sum()
    with Products() as seen:
        loss.backward()
    return seen.count - 2 * len(linears)


def given() -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


def is_apart() -> bool:
    records = memeff_compile.last_report().records
    return "last_product_apart" in {each.code for each in records}


@pytest.mark.parametrize("bias", [False, True])
def test_a_checkpoint_recomputes_no_last_product(bias: bool) -> None:
    eager = Block(bias)
    block = copy.deepcopy(eager)
    run = compiled(block)
    x, y = given(), given()
    assert products_again(lambda x: checkpointed(run, x), block, x) == 1
    assert is_apart()
    assert products_again(lambda x: checkpointed(eager, x), eager, y) == 1
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)
    for found, wanted in zip(block.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-6, atol=1e-6)


def test_another_backend_computes_it_again() -> None:
    block = Block()
    run = torch.compile(block, backend="aot_eager")
    assert products_again(lambda x: checkpointed(run, x), block, given()) == 2


def test_two_blocks_in_one_checkpoint_are_computed_right() -> None:
    eager = nn.Sequential(Block(), Block())
    model = copy.deepcopy(eager)
    torch.compiler.reset()
    for block in model:
        block.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
    x, y = given(), given()
    assert products_again(lambda x: checkpointed(model, x), model, x) == 3
    assert products_again(lambda x: checkpointed(eager, x), eager, y) == 3
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)


def test_layers_too_short_to_share_code_recompute_no_last_product_either() -> None:
    blocks = LEAST + 1
    model = nn.Sequential(nn.Sequential(*(Block() for _ in range(blocks))))
    run = compiled(model, **{"memeff.regions": "auto"})
    assert products_again(lambda x: checkpointed(run, x), model, given()) == 2 * blocks - 1
    codes = {each.code for each in memeff_compile.last_report().records}
    assert {"layers_are_short", "last_product_apart"} <= codes


def test_without_early_stop_everything_is_computed_again() -> None:
    block = Block()
    run = compiled(block)
    with set_checkpoint_early_stop(False):
        assert products_again(lambda x: checkpointed(run, x), block, given()) == 2
    assert products_again(lambda x: checkpointed(run, x), block, given()) == 1


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(super().forward(x))


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(super().forward(x), 0.5)


class Written(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += 1
        return super().forward(x)


class Cast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Alone(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


@pytest.mark.parametrize("kind", [Scaled, Dropped, Written, Cast, Alone])
def test_other_blocks_stay_whole(kind: Callable[[], nn.Module]) -> None:
    run = compiled(kind())
    checkpointed(run, given()).sum().backward()
    assert not is_apart()


@pytest.mark.parametrize("how", ["plain", "reentrant", "frozen", "off", "small"])
def test_other_calls_stay_whole(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block(), given()
    run = compiled(block, **({"memeff.preset": "off"} if how == "off" else {}))
    if how == "small":
        monkeypatch.setitem(last_product.SHORTEST, "cpu", 1e-3)
    if how == "frozen":
        block.requires_grad_(False)
        x = x.detach()
    if how == "plain":
        run(x).sum().backward()
    else:
        y = checkpoint(run, x, use_reentrant=how == "reentrant")
        if y.requires_grad:
            y.sum().backward()
    assert not is_apart()


def test_a_frozen_block_needs_no_last_product_either() -> None:
    block = Block().requires_grad_(False)
    run = compiled(block)
    loss = checkpointed(run, given()).square().sum()
    with Products() as seen:
        loss.backward()
    assert is_apart()
    assert seen.count == 2 + 1


def test_lengths_that_vary_are_cut_alike() -> None:
    eager = Block()
    block = copy.deepcopy(eager)
    run = compiled(block)
    for length in (3, 5, 7):
        for model, call in ((block, run), (eager, eager)):
            model.zero_grad()
            x = torch.ones(2, length, WIDTH, requires_grad=True)
            assert products_again(lambda x, c=call: checkpointed(c, x), model, x) == 1
        torch.testing.assert_close(block.up.weight.grad, eager.up.weight.grad)
