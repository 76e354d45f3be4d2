"""keep_rotary_tables: kept and skipped tables, and Inductor's code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import memeff_compile
from memeff_compile import compat
from memeff_compile.passes import keep_rotary_tables
from memeff_compile.report import Record
from tests.support.closeness import needs_compiler
from tests.support.inductors_code import uncompiled

NAME = "keep_rotary_tables"
S, D = 12, 8


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a GPU, and for tables as small as these."""
    monkeypatch.setattr(keep_rotary_tables, "where_it_runs", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(keep_rotary_tables, "FEWEST_NUMBERS", S * D)


@pytest.fixture
def in_place_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(gm: Any, example_inputs: Any, patches: Any, tag: str) -> Any:
        return compat.compile_with_aot_eager(gm, example_inputs)

    monkeypatch.setattr(compat, "compile_with_inductor", inner)


def angles(x: Tensor) -> Tensor:
    steps = 100 ** (-torch.arange(0, D, 2) / D)
    once = torch.arange(x.shape[1])[:, None].float() @ steps[None]
    return torch.cat((once, once), -1)[None]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
    return x * cos + half * sin


class Model(nn.Module):
    """Layers that rotate their input by the angles of its position."""

    layers, scale, dtype = 3, 1.0, torch.float64

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(3, D, D, generator=generator, dtype=torch.float64)
        self.weights = nn.Parameter(drawn / math.sqrt(D))

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        of = angles(x)
        return (of.cos() * self.scale).to(self.dtype), (of.sin() * self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Any:
        cos, sin = self.tables(x)
        for weight in self.weights[: self.layers]:
            x = turned(x @ weight, cos, sin)
        return x


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, S, D, generator=generator, dtype=torch.float64)


def records() -> list[Record]:
    found = memeff_compile.last_report().records
    assert not [r for r in found if r.action in ("internal_error", "declined")], str(found)
    return [r for r in found if r.pass_name == NAME]


def run(model: nn.Module, options: dict[str, Any] | None = None, **settings: Any) -> int:
    """Compare with eager, values and gradients; return how many tables are kept."""
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(model, backend="memeff", options=options, **settings)
    wanted, found = model(inputs()), compiled(inputs())
    for ours, theirs in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    ours, theirs = (
        torch.autograd.grad(torch.utils._pytree.tree_leaves(out)[0].sum(), parameters)
        for out in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    views = sum(graph.after.count("aten.as_strided(") for graph in memeff_compile.graphs())
    kept = sum(record.sites for record in records())
    assert views == kept
    return kept


class Returned(Model):
    """The tables are outputs, too: those are handed out as they were."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.tables(x)


class Learned(Model):
    def __init__(self) -> None:
        super().__init__()
        self.stretch = nn.Parameter(torch.ones((), dtype=torch.float64))

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        of = angles(x) * self.stretch
        return of.cos(), of.sin()


class Written(Model):
    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(x)
        return cos.mul_(1.0), sin.mul_(1.0)


class TwoLayers(Model):
    layers = 2


class Scaled(Model):
    scale = 1.25


@pytest.mark.usefixtures("in_place_of_inductor")
@pytest.mark.parametrize("make", [Model, Scaled, Returned], ids=lambda each: each.__name__)
def test_tables_that_layers_share_are_kept(make: Callable[[], Model]) -> None:
    assert run(make()) == 2
    assert records()[0].sentence.startswith("Cosines and sines of positions are kept in memory")


@pytest.mark.usefixtures("in_place_of_inductor")
@pytest.mark.parametrize("make", [Learned, Written, TwoLayers], ids=lambda each: each.__name__)
def test_what_is_no_shared_table_is_left_alone(make: Callable[[], Model]) -> None:
    assert run(make()) == 0


@pytest.mark.usefixtures("in_place_of_inductor")
def test_lengths_may_be_symbols() -> None:
    assert run(Model(), dynamic=True) == 2


@pytest.mark.usefixtures("in_place_of_inductor")
def test_small_tables_and_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(keep_rotary_tables, "FEWEST_NUMBERS", S * D + 1)
        assert run(Model()) == 0
    monkeypatch.setattr(keep_rotary_tables, "where_it_runs", lambda device: device)
    assert run(Model()) == 0


@pytest.mark.usefixtures("in_place_of_inductor")
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"memeff.rotary_tables": "off"}, 0),
        ({"memeff.inner": "aot_eager"}, 0),
        ({"memeff.strict": NAME}, 2),
    ],
    ids=str,
)
def test_options_are_followed(options: dict[str, str], kept: int) -> None:
    assert run(Model(), options) == kept


class Unlike(Model):
    """Equal layers would share their kernels."""

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.tables(x)
        for place, weight in enumerate(self.weights):
            x = turned(x @ weight, cos, sin) * (place + 2)
        return x


@needs_compiler
def test_inductor_takes_each_cosine_once() -> None:
    def cosines(choice: str) -> list[int]:
        torch._dynamo.reset()
        options = {"memeff.rotary_tables": choice}
        compiled = torch.compile(Unlike(), backend="memeff", options=options)
        with uncompiled():
            _, codes = run_and_get_code(lambda: compiled(inputs()).sum().backward())
        return [len(re.findall(r"\.cos\(\)|std::cos\(", code)) for code in codes]

    kept, recomputed = cosines("exact"), cosines("off")
    assert max(kept) < max(recomputed)
