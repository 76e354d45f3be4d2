"""`hopper` on a CPU: its kernels under Triton's interpreter, in fp32 and on tiles of 32 x 64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from memeff_compile.kernels._head_loss import scaling
from memeff_compile.kernels._head_loss.call import ScalarLoss
from memeff_compile.kernels.linear_cross_entropy import (
    memory,
    shapes,
)
from memeff_compile.kernels.linear_cross_entropy.shapes import shapes_for_programs, splits_of
from tests.kernels.linear_cross_entropy.engines import hopper, reference

pytestmark = pytest.mark.interpreter

IGNORED = -100
ALL = (True, True, True)


def _inputs(
    rows: int = 40, depth: int = 16, vocab: int = 90, *, ignored: float = 0.0, spread: float = 1.0
) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(0)
    hidden = spread * torch.randn(rows, depth, generator=source)
    weight = torch.randn(vocab, depth, generator=source)
    bias = torch.randn(vocab, generator=source)
    target = torch.randint(vocab, (rows,), generator=source)
    target[torch.rand(rows, generator=source) < ignored] = IGNORED
    return hidden, weight, bias, target


def _both(
    inputs: tuple[Tensor | None, ...], *settings: Any, row_weight: Tensor | None = None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    hidden, weight, bias, target = inputs
    assert hidden is not None
    assert target is not None
    norm = (target != IGNORED).sum()
    found = hopper.total(ScalarLoss(hidden, weight, bias, target, row_weight, norm, *settings))
    wide = [None if part is None else part.double() for part in (hidden, weight, bias)]
    expected = reference.total(ScalarLoss(*wide, target, row_weight, norm, *settings))
    return found, expected


def _assert_close(found: tuple[Any, ...], expected: tuple[Any, ...], budget: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            assert float((one.double() - other).norm()) <= budget * float(other.norm())


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("scale", "softcap", "has_bias"),
    [(1.0, 0.0, False), (1.5, 4.0, True)],
    ids=["plain", "bias and softcap"],
)
def test_total_and_gradients_match_float64(
    scale: float, softcap: float, has_bias: bool, ignored: float
) -> None:
    hidden, weight, bias, target = _inputs(ignored=ignored)
    inputs = hidden, weight, bias if has_bias else None, target
    found, expected = _both(inputs, IGNORED, scale, softcap, 1, (True, True, has_bias))
    if ignored == 1:
        assert found[0].isnan()
        assert all(part is None or not part.any() for part in found[1:])
    else:
        _assert_close(found, expected)


@pytest.mark.parametrize(("rows", "depth", "vocab"), [(1, 8, 33), (32, 16, 64), (34, 72, 130)])
def test_odd_shapes_are_served(rows: int, depth: int, vocab: int) -> None:
    found, expected = _both(
        _inputs(rows, depth, vocab), None, 1.0, 0.0, 2 * 32 * vocab, (True, True, True)
    )
    _assert_close(found, expected)


def test_row_weights_count() -> None:
    weights = torch.rand(40, generator=torch.Generator().manual_seed(1))
    found, expected = _both(_inputs(ignored=0.3), IGNORED, 1.0, 0.0, 1, ALL, row_weight=weights)
    _assert_close(found, expected)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_asked_for_is_made(mask: tuple[bool, bool, bool]) -> None:
    found, expected = _both(_inputs(ignored=0.3), IGNORED, 1.0, 0.0, 1, mask)
    assert [part is not None for part in found[1:]] == list(mask)
    _assert_close(found, expected)


@pytest.mark.usefixtures("nan_filled_empty")
def test_logits_far_above_the_target_are_computed_again() -> None:
    inputs = _inputs(spread=60.0)
    found, expected = _both(inputs, IGNORED, 1.0, 0.0, 1, ALL)
    hidden, weight, bias, target = inputs
    z = hidden @ weight.t() + bias
    assert float((z.amax(1) - z.gather(1, target[:, None])[:, 0]).max()) > 128
    _assert_close(found, expected)


def test_a_row_of_nan_stays_in_its_row_and_spoils_the_weight() -> None:
    hidden, weight, bias, target = _inputs()
    hidden[3] = torch.nan
    given = ScalarLoss(hidden, weight, bias, target, None, None, IGNORED, 1.0, 0.0, 1, ALL)
    total, grad_hidden, grad_weight, _ = hopper.total(given)
    assert total.isnan()
    assert grad_hidden is not None
    assert grad_weight is not None
    assert grad_hidden[3].isnan().all()
    assert not grad_hidden[:3].isnan().any()
    assert not grad_hidden[4:].isnan().any()
    assert grad_weight.isnan().all()


def test_runs_agree_bit_for_bit() -> None:
    inputs = _inputs(ignored=0.3)
    first, second = (
        hopper.total(ScalarLoss(*inputs, None, None, IGNORED, 1.0, 0.0, 1, ALL)) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


# --- scaling by the loss's own gradient -------------------------------------------------------

SPECIAL = (0.3, -2.0, 0.0, 1.0, float("inf"), float("nan"))


def _gradient(dtype: torch.dtype, count: int) -> Tensor:
    source = torch.Generator().manual_seed(2)
    values = torch.randn(count, generator=source)
    values[:4] = torch.tensor([0.0, float("inf"), float("-inf"), float("nan")])[:count]
    return values.to(dtype)


# The interpreter cuts bf16 off where a GPU rounds.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("by", SPECIAL, ids=str)
@pytest.mark.parametrize("is_in_place", [False, True], ids=["copy", "in place"])
def test_a_gradient_times_a_number_is_what_torch_makes_of_it(
    is_in_place: bool, by: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "SCALED", 64)
    monkeypatch.setattr(scaling, "processors", lambda _: 1)
    gradient, factor = _gradient(dtype, 64 * 19 + 5), torch.tensor(by)
    before = gradient.clone()
    expected = (gradient.float() * factor).to(dtype)
    out = gradient if is_in_place else torch.full_like(gradient, 7)
    assert scaling.has_kernel(gradient, factor, out)
    version = out._version
    scaling.run_scaling(gradient, factor, out)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))
    assert out._version > version
    if not is_in_place:
        assert torch.equal(gradient.nan_to_num(9), before.nan_to_num(9))


def test_a_factor_of_one_in_place_reads_and_writes_nothing() -> None:
    # A signalling nan is not the same after a multiplication.
    seen = torch.full((32,), 0x7F800001, dtype=torch.int32)
    memory = seen.clone().view(torch.float32)
    assert not torch.equal((memory * 1.0).view(torch.int32), seen)
    scaling.run_scaling(memory, torch.tensor(1.0), memory)
    assert torch.equal(memory.view(torch.int32), seen)


@pytest.mark.parametrize("count", [0, 1])
def test_gradients_of_few_elements_are_scaled(count: int) -> None:
    gradient = torch.full((count,), 3.0)
    scaling.run_scaling(gradient, torch.tensor(2.0), gradient)
    assert torch.equal(gradient, torch.full((count,), 6.0))


def test_what_scaling_declines() -> None:
    by, gradient = torch.tensor(2.0), torch.ones(4, 6)
    assert not scaling.has_kernel(gradient.double(), by.double(), gradient.double())
    assert not scaling.has_kernel(gradient.t(), by, gradient.t())


# --- pieces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workspace", [0, 256 << 20])
def test_blocks_of_rows_are_even_and_stay_in_the_workspace(workspace: int) -> None:
    tiles = shapes_for_programs(132)
    for rows, depth, vocab in itertools.product(
        (1, 300, 2048, 8192, 10007, 131072), (576, 4096, 8192), (32000, 128256, 262144)
    ):
        height = shapes.hopper_rows(rows, depth, vocab, workspace, tiles)
        blocks = -(-rows // height)
        tile = shapes.product_tile(depth, tiles)[0]
        assert height - tile < rows / blocks <= height
        assert blocks == 1 or height <= tile or height % tile == 0
        width = -(-vocab // 256) * 256
        if workspace:
            assert 2 * height * width <= workspace
        held = memory.hopper_bytes(sympy.Integer(rows), depth, vocab, workspace)
        assert held <= shapes.AUTO_BYTES
        assert held >= height * (2 * width + 8 * width // 128 + 2 * depth)
        n = sympy.Symbol("N", positive=True)
        assert held <= memory.hopper_bytes(n, depth, vocab, workspace).subs(n, rows)


@pytest.mark.parametrize(
    ("rows", "depth", "vocab", "height"),
    [
        (5, 64, 1000, 128),
        (2048, 5120, 131072, 2048),  # one block: all logits in 16 bits fit
        (1024, 4096, 128256, 1024),
        (4096, 7168, 129280, 2048),
        (8192, 4096, 128256, 2048),
        (8192, 4096, 151936, 2048),
        (8192, 4096, 32000, 8192),
        (16384, 1152, 262144, 1024),  # whole tiles of the hidden states' gradient, 256 rows each
        (16384, 576, 128256, 2048),
        (8192, 896, 151936, 2048),
    ],
)
def test_blocks_are_as_tall_as_pays(rows: int, depth: int, vocab: int, height: int) -> None:
    assert shapes.hopper_rows(rows, depth, vocab, 0, shapes_for_programs(132)) == height


@pytest.mark.parametrize(
    ("rows", "depth", "vocab", "splits"),
    [
        (2048, 4096, 128256, 1),
        (1024, 2304, 256000, 1),
        (512, 2304, 256000, 2),
        (768, 2048, 151936, 2),
        (128, 2048, 128256, 4),
    ],
)
def test_the_sums_of_few_tiles_are_shared(rows: int, depth: int, vocab: int, splits: int) -> None:
    found = splits_of(rows, depth, vocab, shapes_for_programs(132), needs_weight=True)
    assert found == splits
    for n in (sympy.Integer(rows), sympy.Symbol("N", positive=True)):
        held = memory.hopper_bytes(n, depth, vocab, 2 * rows * (vocab + 255))
        width = -(-vocab // 256) * 256
        of_row = 2 * width + 8 * (width // 128) + 2 * depth  # X, its statistics, a scaled copy
        parts = held - rows * of_row
        assert parts.subs({n: rows} if n.is_Symbol else {}) >= 4 * (splits - 1) * rows * depth
