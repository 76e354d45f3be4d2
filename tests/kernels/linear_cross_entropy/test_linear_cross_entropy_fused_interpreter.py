"""Engines F and S on a CPU: the same source, run by Triton's interpreter on tiles of 32 x 32.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of the
gradient of the products; most cases therefore run in fp16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.linear_cross_entropy import (
    filters,
    fused,
    row_pieces,
    sorting,
    total_fused,
)
from memeff_compile.kernels.linear_cross_entropy.call import Kept, Knobs, Operands, RowGradients
from memeff_compile.kernels.linear_cross_entropy.shapes import room_inside, shapes_for
from tests.support.oracles import CASES, Case, Inputs, assert_matches_oracle, make_inputs

pytestmark = pytest.mark.interpreter

PLAIN = CASES[0]
BUSY = Case(
    "busy",
    scale=1.5,
    softcap=4.0,
    has_bias=True,
    has_column_weight=True,
    ignored_share=0.3,
    with_logit_sum=True,
)
BUSY_ENTROPY = replace(BUSY, name="busy, entropy", with_entropy=True, with_lse=True)
SERVED = [
    PLAIN,
    BUSY,
    Case("lse of ignored rows", with_lse=True, ignored_share=0.4),
    Case("entropy", with_entropy=True, ignored_share=0.4),
    BUSY_ENTROPY,
]
SIZES: dict[str, Any] = {"shape": (2, 19), "depth": 24, "vocab": 201}
SMALL_PIECES = 38 * 2 * 64


class _EngineF(torch.autograd.Function):
    """The engine without its op, which would send CPU tensors to the reference."""

    backwards: Any = fused

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        hidden, weight, bias, target, column_weight, knobs = args
        flat = hidden.reshape(target.numel(), -1), weight, bias, target.reshape(-1), column_weight
        engine = sorting if knobs.sort_vocabulary else fused
        rows, left_out = engine.forward(Operands(*flat), knobs)
        ctx.save_for_backward(*flat, rows.lse, rows.entropy)
        ctx.knobs, ctx.shape, ctx.left_out = knobs, hidden.shape, left_out
        wanted = zip(rows, knobs.wanted, strict=True)
        shaped = (part.view(target.shape) if asked else part for part, asked in wanted)
        ctx.mark_non_differentiable(rows.top)
        return *shaped, left_out.dropped, left_out.active

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *flat, lse, entropy = ctx.saved_tensors
        operands = Operands(*flat)
        engine = sorting if ctx.knobs.sort_vocabulary else _EngineF.backwards
        cotangents = RowGradients(*(grad.reshape(-1) for grad in grads[:4]))
        kept = Kept(lse, entropy, *ctx.left_out[1:])
        mask = (True, True, operands.bias is not None)
        grad_hidden, grad_weight, grad_bias = engine.backward(
            cotangents, operands, kept, ctx.knobs, mask
        )
        assert grad_hidden is not None
        return grad_hidden.view(ctx.shape), grad_weight, grad_bias, None, None, None


def engine_f(*tensors: Tensor | None, **arguments: Any) -> tuple[Tensor, ...]:
    knobs = Knobs(**{name: value for name, value in arguments.items() if name in Knobs._fields})
    results: tuple[Tensor, ...] = _EngineF.apply(*tensors, knobs)
    return results


def _check(inputs: Inputs, case: Case, slack: float = 2, **changes: Any) -> None:
    arguments = {**case.arguments(SMALL_PIECES), **changes}
    assert_matches_oracle(engine_f, inputs, arguments, slack=slack)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_values_and_gradients_match_the_oracle(case: Case) -> None:
    _check(make_inputs(case, **SIZES, dtype=torch.float16, kind="peaked"), case)


@pytest.fixture
def pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the rows in pieces of 32, of which the last one is ragged."""
    monkeypatch.setattr(_EngineF, "backwards", row_pieces)
    monkeypatch.setattr(total_fused, "piece_rows", lambda *sizes: 32)


@pytest.mark.usefixtures("nan_filled_empty", "pieces_of_rows")
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_pieces_of_rows_match_the_oracle(case: Case) -> None:
    inputs = make_inputs(case, **SIZES | {"shape": (3, 25)}, dtype=torch.float16, kind="peaked")
    _check(inputs, case)


@pytest.mark.usefixtures("nan_filled_empty", "pieces_of_rows")
@pytest.mark.parametrize("needed", [(True, False), (False, True)], ids=["frozen head", "trunk"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_pieces_of_rows_skip_gradients_that_nobody_needs(
    needed: tuple[bool, bool], share: float
) -> None:
    case = replace(PLAIN, ignored_share=share)
    inputs = make_inputs(case, shape=(75,), depth=24, vocab=201, dtype=torch.float16)
    knobs = Knobs(-100, 1.0, 0.0, False, False, "exact", 0)
    operands = Operands(*inputs.tensors())
    rows, left_out = fused.forward(operands, knobs)
    nothing = torch.empty(0)
    grads = RowGradients(inputs.grad_nll, torch.zeros(75), nothing, nothing)
    given = grads, operands, Kept(rows.lse, rows.entropy, *left_out[1:]), knobs
    both = row_pieces.backward(*given, (True, True, False))
    one = row_pieces.backward(*given, (*needed, False))
    for found, expected, is_needed in zip(one, both, (*needed, False), strict=True):
        assert (found is not None) == is_needed
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.usefixtures("pieces_of_rows")
def test_a_row_of_nan_stays_alone_in_a_ragged_piece() -> None:
    inputs = make_inputs(PLAIN, shape=(40,), depth=16, vocab=100, dtype=torch.float16)
    inputs.hidden.view(-1, 16)[35] = float("nan")
    hidden = inputs.hidden.requires_grad_()
    knobs = {**PLAIN.arguments(0), "with_entropy": True}
    nll, _, _, entropy, *_ = engine_f(hidden, *inputs.tensors()[1:4], None, **knobs)
    (nll + entropy).sum().backward()
    is_bad = [row == 35 for row in range(40)]
    assert nll.isnan().tolist() == entropy.isnan().tolist() == is_bad
    assert hidden.grad is not None
    assert hidden.grad.isnan().any(1).tolist() == is_bad


def test_entropy_beside_classes_that_a_bias_forbids() -> None:
    case = replace(PLAIN, with_entropy=True, has_bias=True)
    inputs = make_inputs(case, shape=(20,), depth=16, vocab=100, dtype=torch.float16)
    assert inputs.bias is not None
    inputs.bias[40:] = float("-inf")
    inputs.target.clamp_(max=39)
    operands = inputs.tensors()
    grads = []
    for width in (100, 40):
        hidden = inputs.hidden.clone().requires_grad_()
        bias = inputs.bias[:width]
        results = engine_f(hidden, operands[1][:width], bias, operands[3], None, **case.arguments())
        torch.autograd.backward((results[0], results[3]), (inputs.grad_nll, inputs.grad_entropy))
        grads.append((results[0], results[3], hidden.grad))
    for masked, cut in zip(*grads, strict=True):
        torch.testing.assert_close(masked, cut, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("nan_filled_empty")
def test_bf16_matches_the_oracle() -> None:
    _check(make_inputs(PLAIN, **SIZES, dtype=torch.bfloat16, kind="peaked"), PLAIN, slack=3)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (33, 65)])
def test_any_size_matches_the_oracle(rows: int, vocab: int) -> None:
    case = BUSY
    inputs = make_inputs(case, shape=(rows,), vocab=vocab, depth=8, dtype=torch.float16)
    _check(inputs, case, slack=100 if vocab < 3 else 20, workspace=0)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_minimal_workspace_matches_the_oracle(share: float) -> None:
    case = Case("minimal", has_bias=True, ignored_share=share)
    inputs = make_inputs(case, shape=(40,), vocab=400, depth=32, dtype=torch.float16)
    device = inputs.hidden.device
    assert room_inside(40, 32, 400, shapes_for(device), needs_hidden=True) is not None
    _check(inputs, case, workspace=1)


def _confident(
    rows: int = 70, vocab: int = 400, depth: int = 32, *, ignored: float = 0.3
) -> Inputs:
    """Make rows that point at their targets' columns, so that most tiles are light."""
    case = Case("filter", ignored_share=ignored, ignore_index=-100)
    inputs = make_inputs(case, shape=(rows,), vocab=vocab, depth=depth, dtype=torch.float16)
    near = inputs.weight[inputs.target.clamp(min=0)].float()
    scale = torch.linspace(4, 14, rows).unsqueeze(1)
    inputs.hidden = (near / near.norm(dim=1, keepdim=True) * scale).to(torch.float16)
    return inputs


def _lost(inputs: Inputs, active: Tensor, order: Tensor) -> Tensor:
    """Return what each row loses by a map of tiles, computed densely."""
    z = inputs.hidden.float() @ inputs.weight.float().T
    away = z.softmax(-1)
    kept = inputs.target != -100
    away[kept, inputs.target[kept]] -= 1
    lost = torch.zeros(len(away))
    tile = shapes_for(inputs.hidden.device).rows
    for place, row in enumerate(order.tolist()):
        columns = active[place // tile].repeat_interleave(tile)[: away.shape[1]] == 0
        lost[row] = away[row, columns].abs().sum()
    return lost * kept


def _order(inputs: Inputs, row_order: Tensor) -> Tensor:
    kept = (inputs.target != -100).nonzero()[:, 0]
    return row_order[: len(kept)] if row_order.numel() else kept


@pytest.mark.parametrize("tau", [0.05, 1e-3])
def test_mass_never_drops_more_than_tau_and_says_what_it_drops(tau: float) -> None:
    inputs = _confident()
    knobs = Knobs(-100, 1.0, 0.0, False, False, "mass", 0, filter_level=tau)
    flat = Operands(inputs.hidden, inputs.weight, None, inputs.target)
    _, left_out = fused.forward(flat, knobs)
    lost = _lost(inputs, left_out.active, _order(inputs, left_out.row_order))
    assert float(left_out.dropped.max()) <= tau
    # lse is one fp32 number of this size: the last bits of a probability near 1 are its.
    assert bool((lost <= left_out.dropped * 1.0001 + 3e-5).all())
    if tau >= 0.05:
        assert float(left_out.active.float().mean()) < 0.75


def test_flat_rows_lose_nothing_to_mass() -> None:
    inputs = make_inputs(Case("flat"), shape=(40,), vocab=400, depth=32, dtype=torch.float16)
    inputs.hidden = inputs.hidden * 0.1
    knobs = Knobs(None, 1.0, 0.0, False, False, "mass", 0)
    _, left_out = fused.forward(Operands(inputs.hidden, inputs.weight, None, inputs.target), knobs)
    assert bool(left_out.active.all())
    assert float(left_out.dropped.max()) == 0


def test_block_leaves_out_what_is_everywhere_below_eps() -> None:
    inputs = _confident(ignored=0.0)
    eps = filters.filter_level("block", 0.0, torch.float16) * 16
    knobs = Knobs(None, 1.0, 0.0, False, False, "block", 0, filter_level=eps)
    _, left_out = fused.forward(Operands(inputs.hidden, inputs.weight, None, inputs.target), knobs)
    away = (inputs.hidden.float() @ inputs.weight.float().T).softmax(-1)
    away[torch.arange(len(away)), inputs.target] -= 1
    tile = 32
    padded = torch.zeros(96, 416)
    padded[:70, :400] = away.abs()
    largest = padded.view(3, tile, 13, tile).amax((1, 3))
    sure = (largest < eps * 0.999) | (largest > eps * 1.001)
    assert torch.equal(left_out.active.bool()[sure], (largest >= eps)[sure])
    lost = _lost(inputs, left_out.active, torch.arange(70))
    torch.testing.assert_close(left_out.dropped, lost, rtol=1e-3, atol=3e-5)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(("parts", "sorts"), [("both", True), ("hidden", False), ("weight", False)])
def test_filtered_gradients_are_exact_without_the_tiles_left_out(parts: str, sorts: bool) -> None:
    inputs = _confident()
    # lse has a gradient of its own here, as with a z-loss.
    case = Case("filter", ignored_share=0.3, ignore_index=-100, with_lse=True)
    knobs = {
        "gradient_filter": "mass",
        "filter_level": 1e-5,
        "filter_parts": parts,
        "sort_vocabulary": sorts,
    }

    def filtered(*tensors: Tensor | None, **arguments: Any) -> tuple[Tensor, ...]:
        return engine_f(*tensors, **{**arguments, **knobs})

    # What 1e-5 of the mass can change is far below the rounding of fp16.
    assert_matches_oracle(filtered, inputs, case.arguments(2**20), slack=20)


def test_groups_of_tiles_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _confident(rows=70, vocab=300)
    flat = Operands(inputs.hidden, inputs.weight, None, inputs.target)
    knobs = Knobs(-100, 1.0, 0.0, False, False, "mass", 0, filter_level=0.05)
    rows, left_out = fused.forward(flat, knobs)
    kept = Kept(rows.lse, rows.entropy, *left_out[1:])
    grads = RowGradients(inputs.grad_nll, torch.zeros(70), torch.zeros(0), torch.zeros(0))
    mask = (True, True, False)
    whole = fused.backward(grads, flat, kept, knobs, mask)
    monkeypatch.setattr(fused, "fused_budget", lambda *sizes: 0)
    cut = fused.backward(grads, flat, kept, knobs, mask)
    for one, other in zip(whole[:2], cut[:2], strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("dense_share", "sparse"), [(0.5, True), (0.2, False)])
def test_the_share_of_tiles_that_count_says_which_kernels_run(
    dense_share: float, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sparse kernels compute the formula with its holes; the dense ones leave nothing out."""
    monkeypatch.setattr(filters, "DENSE_SHARE", dense_share)
    (rows, depth, vocab), tile = (70, 16, 300), shapes_for(torch.device("cpu")).rows
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, depth, generator=source).bfloat16()
    weight = torch.randn(vocab, depth, generator=source).bfloat16() * depth**-0.5
    target = torch.randint(vocab, (rows,), generator=source)
    grad_nll, none = torch.full((rows,), 1.0 / rows), torch.empty(0)
    logits = hidden.float() @ weight.float().t()
    tiles = -(-rows // tile), -(-vocab // tile)
    active = torch.zeros(tiles[0] * tiles[1], dtype=torch.uint8)
    active[torch.randperm(active.numel(), generator=source)[: int(0.35 * active.numel())]] = 1
    active = active.view(tiles)

    def gradients(kept: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.softmax(logits, -1) - torch.nn.functional.one_hot(target, vocab)
        cells = kept.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[:rows, :vocab]
        g = g * grad_nll[:, None] * cells
        return g @ weight.float(), g.t() @ hidden.float()

    expected, whole = gradients(active), gradients(torch.ones_like(active))
    found = fused.backward(
        RowGradients(grad_nll, torch.zeros(rows), none, none),
        Operands(hidden, weight, None, target),
        Kept(logits.logsumexp(-1), none, active, torch.empty(0, dtype=torch.int32)),
        Knobs(None, 1.0, 0.0, False, False, "block", 0),
        (True, True, False),
    )
    for one, right, wrong in zip(
        found[:2],
        *((expected, whole) if sparse else (whole, expected)),
        strict=True,
    ):
        assert one is not None
        assert (one.float() - right).norm() <= 1e-2 * right.norm()
        assert (one.float() - wrong).norm() > 1e-2 * wrong.norm()


def test_poisoned_row_stays_visible_and_alone() -> None:
    inputs = make_inputs(PLAIN, shape=(20,), depth=16, vocab=100, dtype=torch.float16)
    inputs.hidden[3, 4] = float("nan")
    knobs = Knobs(-100, 1.0, 0.0, False, False, "exact", 0)
    rows, _ = fused.forward(Operands(inputs.hidden, inputs.weight, None, inputs.target), knobs)
    assert rows.nll.isnan().tolist() == [row == 3 for row in range(20)]


def test_poison_in_an_ignored_row_does_not_spread() -> None:
    inputs = make_inputs(PLAIN, shape=(20,), depth=16, vocab=100, dtype=torch.float16)
    inputs.hidden[3], inputs.target[3] = float("nan"), -100
    results = engine_f(*inputs.tensors()[:4], None, **PLAIN.arguments(0))
    assert bool(results[0].isfinite().all())
