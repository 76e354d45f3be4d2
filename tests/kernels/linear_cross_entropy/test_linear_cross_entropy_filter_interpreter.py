"""Walks under a gradient filter, in Triton's interpreter: fp32, tiles of 32 x 32."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops import filter_activity
from memeff_compile.kernels._gradient_filter import filtered
from memeff_compile.kernels._gradient_filter import levels as gradient_filter
from memeff_compile.kernels._gradient_filter.filtered import FilteredTotal, Walks
from memeff_compile.kernels._head_loss.call import (
    Operands,
    RowGradients,
    Saved,
    ScalarLoss,
    Settings,
)
from memeff_compile.kernels.linear_cross_entropy import hopper as hopper_module
from memeff_compile.kernels.linear_cross_entropy import walk
from tests.kernels.linear_cross_entropy.engines import Found, hopper, reference

pytestmark = pytest.mark.interpreter

IGNORED = -100
ROWS, DEPTH, VOCAB = 100, 24, 400


def _inputs(kind: str, ignored: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows that mix a few shuffled ids each; among them flat ones, or rows of a few extremes."""
    source = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCAB, DEPTH, generator=source)
    target = torch.randint(VOCAB, (ROWS,), generator=source)
    ids = torch.randint(VOCAB, (ROWS, 3), generator=source)
    amount = torch.linspace(0.2, 1.4, ROWS)[torch.randperm(ROWS, generator=source)]
    hidden = amount[:, None] * weight[ids].mean(1) + 0.6 * amount[:, None] * weight[target]
    if kind == "flat":
        hidden *= 0.01
    elif kind == "flat among peaked":
        hidden[::17] *= 0.01
    elif kind == "far":
        hidden[5], hidden[60] = 40 * weight[7], -40 * weight[target[60]]
    target[torch.rand(ROWS, generator=source) < ignored] = IGNORED
    return hidden, weight, target


FILTERED = Walks(hopper_module)


def _run(
    inputs: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Found, Any]:
    """Return the results of a total, and the walk that made them."""
    walks: list[Any] = []
    hidden, weight, target = inputs
    norm = (target != IGNORED).sum()
    given = {"scale": 1.0, "softcap": 0.0, "output_mask": (True, True, False)}
    given |= {"sort_vocabulary": True, "workspace": 0} | settings
    loss = ScalarLoss(hidden, weight, None, target, None, norm, IGNORED, **given)
    engine = hopper_module if given["gradient_filter"] == "exact" else FILTERED

    def total(loss: ScalarLoss) -> Any:
        walks.append(engine.total(loss))
        return walks[-1]

    return Found(*walk.total(SimpleNamespace(total=total), loss)[:4]), walks[0]


def _exact(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return p - 1(target) of the rows that count, others zero, and both gradients' factors."""
    hidden, weight, target = (
        part.double() if part.is_floating_point() else part for part in inputs
    )
    away = (hidden @ weight.t()).softmax(-1)
    counts = target != IGNORED
    away[counts, target[counts]] -= 1
    return away * counts[:, None], hidden, weight


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filter rows of few features, in blocks of 64 rows, two groups each; the last is ragged."""
    monkeypatch.setattr(gradient_filter, "LEAST_DEPTH", 8)
    monkeypatch.setattr(filtered, "filter_rows", lambda *sizes: 64)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(
    ("kind", "ignored"),
    [
        *(("plain", 0.4), ("flat", 0.0), ("flat among peaked", 0.4), ("far", 0.0)),
        *(slow("plain", 0.0), slow("flat", 0.4), slow("flat among peaked", 0.0), slow("far", 0.4)),
    ],
)
def test_no_row_loses_more_than_the_bound_of_mass(
    kind: str, ignored: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs(kind, ignored)
    tau = 2.0**-6
    found, seen = _run(inputs, monkeypatch, gradient_filter="mass")
    away, hidden, weight = _exact(inputs)
    # The gradient of each row differs by a combination of weight rows whose amounts sum to tau, and
    # the same amount is restored on others.
    assert found.grad_hidden is not None
    assert found.grad_weight is not None
    count = int((inputs[2] != IGNORED).sum())
    lacks = (found.grad_hidden.double() * count - away @ weight).norm(dim=1)
    assert bool((lacks <= 2 * tau * weight.norm(dim=1).max() + 1e-5).all())
    dropped = seen.dropped
    assert float(dropped.max()) <= tau
    # The gradient of each class lacks at most the mass that its rows drop, or gets that much more:
    # twice tau in all.
    lost = (found.grad_weight.double() * count - away.t() @ hidden).abs().sum()
    assert lost <= 2 * float((dropped.double() * hidden.abs().sum(1)).sum()) * 1.01 + 1e-3
    share = int(seen.active[:, 0].sum()) / (-(-count // seen.shapes.rows) * seen.tiles)
    assert share == 1 if kind == "flat" else share < 1


@pytest.mark.parametrize("kind", [slow("plain"), "flat among peaked"])
def test_block_drops_what_is_below_eps_in_all_rows_of_a_block(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, eps = _inputs(kind), 2.0**-7
    found, seen = _run(inputs, monkeypatch, gradient_filter="block", filter_level=eps)
    away, _, weight = _exact(inputs)
    assert found.grad_hidden is not None
    # No element of eps or more is missing: without those below it, the rest is the lost mass.
    below = torch.where(away.abs() < eps, away.abs(), 0).sum(1)
    lacks = (found.grad_hidden.double() * ROWS - away @ weight).norm(dim=1)
    assert bool((lacks <= 2 * below * weight.norm(dim=1).max() + 1e-5).all())
    assert bool((seen.dropped <= below + 1e-5).all())
    assert float(seen.dropped.max()) > 0


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(("how", "level"), [("mass", 2.0**-3), ("block", 2.0**-6)])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), slow(-0.5, 8.0)])
def test_what_is_left_out_of_a_row_is_put_on_what_stays(
    how: str, level: float, scale: float, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feature with equal values in all classes shows the sum of a row of their gradients."""
    hidden, weight, target = _inputs("plain", 0.3)
    hidden, weight = hidden / scale, torch.cat([weight, torch.ones(VOCAB, 8)], 1)
    hidden = torch.cat([hidden, torch.zeros(ROWS, 8)], 1)
    given: dict[str, Any] = {"scale": scale, "softcap": softcap}
    inputs = hidden, weight, target
    found, seen = _run(inputs, monkeypatch, gradient_filter=how, filter_level=level, **given)
    exact, _ = _run(inputs, monkeypatch, gradient_filter="exact", **given)
    assert found.grad_hidden is not None
    assert exact.grad_hidden is not None
    assert float(seen.dropped.max()) > 1e-3
    # Rows that keep almost no mass are not restored.
    sums = (found.grad_hidden - exact.grad_hidden)[:, -8:] * int((target != IGNORED).sum())
    sums = sums[seen.dropped > 1e-4].abs().amax(1)
    is_restored = sums <= 1e-5 * abs(scale)
    assert float(is_restored.float().mean()) > 0.5
    assert bool((sums <= 8 * level).all())
    # The head's gradient, summed over classes, is those sums times the rows.
    assert found.grad_weight is not None
    assert exact.grad_weight is not None
    together = (found.grad_weight - exact.grad_weight).sum(0).abs()
    away = (found.grad_hidden - exact.grad_hidden)[:, -1].abs()
    bound = (away[:, None] * hidden.abs()).sum(0)
    assert bool((together <= bound + 1e-5 * abs(scale)).all())


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(
    ("mask", "capacity"),
    [
        ((True, True, True), 3),
        ((True, False, False), 1 << 20),
        *(slow((True, True, True), 1 << 20), slow((True, False, False), 3)),
        *[slow((False, True, False), capacity) for capacity in (1 << 20, 3)],
    ],
)
def test_gradients_are_exact_where_nothing_may_be_lost(
    mask: tuple[bool, bool, bool], capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bias, softcap, scale, weights of rows, ignored rows; tiles in one pass, or a few at a time."""
    plain = filtered.filter_capacity
    monkeypatch.setattr(filtered, "filter_capacity", lambda *a: min(plain(*a), capacity))
    hidden, weight, target = _inputs("plain", 0.3)
    source = torch.Generator().manual_seed(2)
    bias, weights = torch.randn(VOCAB, generator=source), torch.rand(ROWS, generator=source)
    norm = (target != IGNORED).sum()
    settings = IGNORED, 1.5, 20.0, 0, mask
    given = hidden, weight, bias, target, weights, norm, *settings
    run = walk.in_two_walks if mask[2] else walk.total
    found = Found(*run(FILTERED, ScalarLoss(*given, "mass", 1e-7, True))[:4])
    wide = [part.double() for part in (hidden, weight, bias)]
    expected = reference.total(ScalarLoss(*wide, target, weights, norm, *settings))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert float((one.double() - other).norm()) <= 2e-5 * float(other.norm())


def test_a_small_workspace_gives_the_same_bits_of_dc_in_more_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = _inputs("plain", 0.3)
    once, first = _run(inputs, monkeypatch, gradient_filter="mass")
    monkeypatch.setattr(filtered, "filter_capacity", lambda *_: 4)
    often, second = _run(inputs, monkeypatch, gradient_filter="mass", workspace=1)
    assert (first.passes, second.passes) == (1, 7)
    assert once.grad_weight is not None
    assert often.grad_weight is not None
    assert once.grad_hidden is not None
    assert torch.equal(once.grad_weight, often.grad_weight)
    torch.testing.assert_close(often.grad_hidden, once.grad_hidden, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("sorts", [True, False])
def test_the_published_filter_drops_tiles_under_eps_and_puts_nothing_back(sorts: bool) -> None:
    """Against the filter spelled out: tiles of 32 rows by 32 classes, by mean logit or as given."""
    hidden, weight, target = _inputs("plain", 0.2)
    target, eps = target.where(target == IGNORED, target % 3), 2.0**-2
    inputs = hidden, weight, target
    norm = (target != IGNORED).sum()
    settings = IGNORED, 1.0, 0.0, 0, (True, True, False)
    loss = ScalarLoss(hidden, weight, None, target, None, norm, *settings, "published", eps, sorts)
    found = walk.in_two_walks(FILTERED, loss)
    away, _, wide = _exact(inputs)
    rows = (target != IGNORED).nonzero()[:, 0]
    order = torch.arange(VOCAB)
    if sorts:
        order = (weight @ hidden.mean(0)).sort(stable=True).indices
    kept = away[rows][:, order]
    # A block of the walk has 64 rows.
    for top in range(0, len(rows), 32):
        for first in range(0, VOCAB, 32):
            tile = kept[top : top + 32, first : first + 32]
            tile *= bool((tile.abs() >= eps).any())
    assert 0.1 < float((kept == 0).float().mean()) < 0.99
    published = torch.zeros_like(away)
    published[rows[:, None], order[None, :]] = kept
    assert found.grad_hidden is not None
    assert found.grad_weight is not None
    torch.testing.assert_close(
        found.grad_hidden.double() * norm, published @ wide, atol=2e-5, rtol=1e-4
    )
    of_weight = published.t() @ hidden.double()
    torch.testing.assert_close(found.grad_weight.double() * norm, of_weight, atol=2e-5, rtol=1e-4)


def _of_rows(
    inputs: tuple[Tensor, Tensor, Tensor],
    needs: tuple[bool, bool] = (True, True),
    of_lse: float = 1.0,
    **changes: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of rows; nll and lse each have a separate gradient."""
    knobs = Settings(IGNORED, 1.0, 0.0, True, False, "mass", 0, sort_vocabulary=True)
    knobs = knobs._replace(**changes)
    operands, source = Operands(*inputs[:2], None, inputs[2]), torch.Generator().manual_seed(4)
    cotangents = torch.rand(2, ROWS, generator=source)
    cotangents[:, ::9] = 0
    cotangents[1] *= of_lse
    nothing = torch.empty(0)
    grads = RowGradients(*cotangents, nothing, nothing)
    lse = (inputs[0] @ inputs[1].t()).logsumexp(-1)
    saved, mask = Saved(lse, nothing), (*needs, False)
    if knobs.gradient_filter == "exact":
        return hopper.backward(grads, operands, saved, knobs, mask)
    exact = SimpleNamespace(backward=hopper_module.BackwardByClasses)
    made = Walks(exact).backward(grads, operands, saved, knobs, mask)
    for block in made.blocks():
        made.gradients(block)
    found: tuple[Tensor | None, ...] = made.results()
    return found


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(
    ("parts", "sorts", "of_lse"),
    [
        ("both", True, 1.0),
        # In half of the rows the target's element has the sign of the others.
        ("both", True, -1.0),
        slow("both", False, 1.0),
        ("hidden", True, 1.0),
        ("weight", True, 1.0),
    ],
)
def test_a_filter_on_rows_leaves_out_what_it_may_of_the_gradients_that_it_is_asked_for(
    parts: str, sorts: bool, of_lse: float
) -> None:
    """By |p - 1(target)| of a loss whose lse also has a gradient; zero in rows without one."""
    inputs, tau = _inputs("plain", 0.2), 2.0**-3
    exact = _of_rows(inputs, gradient_filter="exact", of_lse=of_lse)
    given: dict[str, Any] = {"filter_level": tau, "filter_parts": parts, "of_lse": of_lse}
    given["sort_vocabulary"] = sorts
    found = _of_rows(inputs, **given)
    bounds = [2 * tau * part.norm(dim=1).max() for part in (inputs[1], inputs[0] * ROWS)]
    for place, bound in enumerate(bounds):
        right, filtered = exact[place], found[place]
        assert right is not None
        assert filtered is not None
        lacks = (filtered - right).norm(dim=1)
        assert bool((lacks <= bound + 1e-4).all())
        is_filtered = parts in ("both", ("hidden", "weight")[place])
        assert (float(lacks.max()) > 1e-3) == is_filtered


def test_a_row_of_nan_spoils_what_it_spoils_without_a_filter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, target = _inputs("plain")
    hidden[3] = torch.nan
    found, _ = _run((hidden, weight, target), monkeypatch, gradient_filter="mass")
    assert found.total.isnan()
    assert found.grad_hidden is not None
    assert found.grad_weight is not None
    assert found.grad_hidden.isnan().any(1).nonzero()[:, 0].tolist() == [3]
    assert found.grad_weight.isnan().all()


def test_ids_in_any_order_give_like_tiles_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, target = _inputs("flat among peaked")
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    moved = torch.empty_like(order).scatter_(0, order, torch.arange(VOCAB))[target]
    given = {"gradient_filter": "block", "filter_level": 2.0**-7}
    one, first = _run((hidden, weight, target), monkeypatch, **given)
    other, second = _run((hidden, weight[order], moved), monkeypatch, **given)
    counts = [int(each.active[:, 0].sum()) for each in (first, second)]
    assert min(counts) > 0
    assert max(counts) <= 1.25 * min(counts)
    for a, b in ((one.grad_hidden, other.grad_hidden), (one.grad_weight, other.grad_weight)):
        assert a is not None
        assert b is not None
        b = b if b is other.grad_hidden else torch.empty_like(b).index_copy_(0, order, b)
        # Columns that fill up a tile are others.
        assert float((a - b).norm()) <= 5e-2 * float(a.norm())


def test_runs_agree_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs("plain", 0.3)
    first, second = (_run(inputs, monkeypatch, gradient_filter="mass")[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_what_a_filter_leaves_out_is_measured_where_the_inputs_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filter_activity, "engine_for", lambda *_: "hopper")
    monkeypatch.setattr(filter_activity, "DTYPES", (torch.float32,))
    devices: list[torch.device] = []
    plain = filter_activity.on_device

    def entered(tensor: Tensor) -> Any:
        devices.append(tensor.device)
        return plain(tensor)

    monkeypatch.setattr(filter_activity, "on_device", entered)
    inputs = _inputs("plain", 0.3)
    found = filter_activity.measure(*inputs)
    _, seen = _run(inputs, monkeypatch, gradient_filter="mass")
    assert devices == [inputs[0].device]
    assert torch.equal(found.dropped, seen.dropped)
    assert 0 < found.active < 1


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(("scale", "softcap"), [slow(3.0, 0.0), (-0.5, 0.0), (1.0, 8.0)])
def test_the_bound_of_mass_is_of_probabilities_whatever_logits_are_multiplied_with(
    scale: float, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, target = _inputs("plain", 0.2)
    inputs, tau = (hidden / scale, weight, target), 2.0**-5
    given = {"scale": scale, "softcap": softcap}
    found, seen = _run(inputs, monkeypatch, gradient_filter="mass", filter_level=tau, **given)
    exact, _ = _run(inputs, monkeypatch, gradient_filter="exact", **given)
    assert tau / 16 < float(seen.dropped.max()) <= tau
    assert found.grad_hidden is not None
    assert exact.grad_hidden is not None
    lacks = (found.grad_hidden - exact.grad_hidden).norm(dim=1) * (target != IGNORED).sum()
    assert bool((lacks <= 2 * tau * abs(scale) * weight.norm(dim=1).max() + 1e-5).all())


def test_what_a_walk_holds_is_let_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python looks for cycles: autograd copies a gradient that somebody else holds."""
    held: list[weakref.ref[Any]] = []
    plain = FilteredTotal.results

    def seen(self: FilteredTotal) -> Any:
        held.extend(weakref.ref(each) for each in (self, self.packed, self.grad_weight))
        return plain(self)

    monkeypatch.setattr(FilteredTotal, "results", seen)
    hidden, weight, target = _inputs("plain")
    settings = IGNORED, 1.0, 0.0, 0, (True, True, False)
    gc.disable()
    try:
        loss = ScalarLoss(hidden, weight, None, target, None, None, *settings, "mass")
        found = walk.total(FILTERED, loss)
        left = [each() for each in held if each() is not None]
        assert held
        assert all(each is found.grad_weight for each in left)
    finally:
        gc.enable()


@pytest.mark.parametrize(("how", "kept"), [("mass", 8), ("block", 0)])
def test_groups_without_rows_count_nothing_whatever_their_memory_holds(
    how: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_infinities(make: Any) -> Any:
        def filled(*given: Any, **how: Any) -> Tensor:
            made: Tensor = make(*given, **how)
            return made.fill_(float("inf")) if made.is_floating_point() else made.zero_()

        return filled

    monkeypatch.setattr(torch.Tensor, "new_empty", of_infinities(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", of_infinities(torch.empty_like))
    inputs = torch.randn(64, DEPTH), torch.randn(33, DEPTH), torch.full((64,), IGNORED)
    inputs[2][:kept] = 3
    found, _ = _run(inputs, monkeypatch, gradient_filter=how, filter_level=1e-7)
    assert all(torch.isfinite(each).all() for each in found[1:3] if each is not None)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(
    ("rows", "vocab"), [slow(1, 400), (100, 7), slow(64, 33), slow(33, 65), (5, 1)]
)
def test_ragged_sizes_and_ignored_rows_lose_nothing_at_a_level_of_nothing(
    rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, DEPTH, generator=source) for size in (rows, vocab))
    for target in (torch.randint(vocab, (rows,), generator=source), torch.full((rows,), IGNORED)):
        inputs = hidden, weight, target
        exact, _ = _run(inputs, monkeypatch, gradient_filter="exact")
        for how in ("mass", "block"):
            found, _ = _run(inputs, monkeypatch, gradient_filter=how, filter_level=1e-7)
            for one, other in zip(found[:3], exact[:3], strict=True):
                torch.testing.assert_close(one, other, equal_nan=True, atol=1e-5, rtol=1e-4)
