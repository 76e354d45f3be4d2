"""The kernels of quantised attention on a CPU: the same source, run by Triton's interpreter.

Where a tile has as many keys as the reference takes together, both round the same numbers; with
smaller tiles weights are rounded against another running maximum.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.quantized_attention import reference, tiles
from memeff_compile.kernels.quantized_attention import settings as settings_module
from memeff_compile.kernels.quantized_attention.settings import Settings, settings_for
from memeff_compile.kernels.quantized_attention.shapes import Shape
from tests.support.coded_attention import biased, conditions, exact, relative_l1
from tests.support.dense_attention import Case, draw

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

WHOLE = Shape(64, 128, 4, 1)
MAGIC = Shape(64, 128, 4, 1, magic=True)
SMALL = Shape(32, 64, 4, 1)


def both(
    case: Case, settings: Settings, shape: Shape = WHOLE
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    given = conditions(case)
    ours = tiles.attend(case.q, case.k, case.v, given, settings, shape=shape)
    return ours, reference.attend(case.q, case.k, case.v, given, settings)


def check(case: Case, settings: Settings, shape: Shape = WHOLE) -> None:
    """Check equality with the reference, but for a few weights.

    A last bit of the maximum, or another order of tiles, moves a weight over the edge between two
    numbers of its format. Wrong codes would differ by a hundred times the tolerance.
    """
    (out, lse), (wanted, sums) = both(case, settings, shape)
    assert relative_l1(out, wanted) <= 5e-4
    torch.testing.assert_close(out, wanted, rtol=0, atol=0.06)
    is_magic = shape.magic or settings.starts
    torch.testing.assert_close(lse, sums, rtol=0, atol=2e-3 if is_magic else 5e-4)


def float32(queries: int, keys: int, depth: int, **settings: Any) -> Case:
    return biased(draw(1, 2, 1, queries, keys, depth, torch.float32, **settings), "bias")


@pytest.mark.parametrize(
    ("queries", "keys", "depth", "settings"),
    [
        (64, 128, 64, {}),
        (70, 200, 40, {"ahead": 0}),
        (1, 129, 64, {"ahead": 128}),
        (70, 1, 16, {}),
        (65, 257, 96, {"ahead": 192, "behind": 60}),
    ],
    ids=str,
)
def test_values_are_those_of_the_reference(
    queries: int, keys: int, depth: int, settings: dict[str, int]
) -> None:
    check(float32(queries, keys, depth, **settings), settings_for("8b"))


def test_channels_whose_sampled_keys_are_one_number() -> None:
    case = float32(20, 136, 16)
    case.k[:, :, :: reference.SAMPLE, :9] = torch.linspace(-9.0, 7.7, 9)
    check(case, settings_for("8b"))


@pytest.mark.parametrize("level", ["8b+f16", "4b"])
def test_every_level(level: str) -> None:
    check(float32(70, 140, 16, ahead=70), settings_for(level))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["8b", "4b"])
def test_heads_that_are_turned_in_parts(level: str, dtype: torch.dtype) -> None:
    """Heads of 200, which tiles pad to 256; the codes of keys are the reference's."""
    case = biased(draw(1, 2, 1, 40, 130, 200, dtype), "bias")
    settings, given = settings_for(level, with_lse=False, depth=200), conditions(case)
    made = tiles.pack(case.q, case.k, case.v, given, settings)
    wanted = reference.codes(case.q, case.k, case.v, given, settings)
    found = made.k.view(1, -1, 256)[:, :130].float()
    assert float((found != wanted.k[0]).float().mean()) <= 2e-3
    assert float(found.abs().max()) > 7, "keys have steps of their own"
    ours, theirs = both(case, settings)
    assert relative_l1(ours[0], theirs[0]) <= (1e-3 if dtype == torch.float32 else 8e-3)


def test_queries_of_one_block_that_are_alike_stay_numbers() -> None:
    """Without their mean they are zero; the mean's scores are the start of the sums."""
    case = float32(5, 140, 64)
    case.q[:] = 40 * case.q[:, :, :1]
    (out, _), (wanted, _) = both(case, settings_for("4b"))
    assert relative_l1(out, wanted) <= 4e-3
    assert relative_l1(out, exact(case)[0]) <= 0.08


@pytest.mark.parametrize("granularity", ["thread", "tensor"])
def test_scales_of_single_keys(granularity: str) -> None:
    check(float32(64, 140, 16), settings_for("4b", granularity))


def test_integers_become_floats_by_the_start_of_the_sum() -> None:
    check(float32(64, 200, 64, ahead=100), settings_for("8b"), MAGIC)


@pytest.mark.parametrize("masked", [False, True], ids=["", "key mask"])
def test_keys_are_rounded_with_the_queries_in_view_and_values_restored(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "MOST_SAMPLES", 2)  # of four blocks of queries
    case = biased(draw(1, 1, 1, 200, 150, 16, torch.float32), "bias")
    assert bool(reference.direction_of(case.q, 1)[0].any())
    if masked:
        case = Case(case.q, case.k, case.v, (torch.arange(150)[None] % 3 > 0, None, None))
    settings = settings_for("8b")
    check(case, settings)
    made = tiles.pack(case.q, case.k, case.v, conditions(case), settings)
    wanted = reference.codes(case.q, case.k, case.v, conditions(case), settings)
    assert made.rest is not None
    assert wanted.rest is not None
    assert made.counts is not None
    sums = wanted.counts.flatten(0, 1)
    torch.testing.assert_close(made.counts, sums, rtol=1e-4, atol=1e-4)
    assert float(sums.diff().std()) > 1.0, "keys weigh the same"
    means = (made.rest[:, 1:, :16] / sums[:, 1:, None], wanted.rest[0, :, 1:] / sums[:, 1:, None])
    torch.testing.assert_close(*means, rtol=1e-2, atol=0.02)
    ours = made.k.view(1, -1, 64)[:, :150].float()
    assert float((ours != wanted.k[0]).float().mean()) <= 2e-3


def test_smaller_tiles_are_as_close() -> None:
    case = float32(70, 200, 40, ahead=130)
    (out, lse), (wanted, sums) = both(case, settings_for("8b"), SMALL)
    truth = exact(case)[0]
    assert relative_l1(out, truth) <= 1.2 * relative_l1(wanted, truth)
    torch.testing.assert_close(lse, sums, rtol=0, atol=2e-4)


def test_tables_and_queries_without_keys() -> None:
    case = float32(140, 140, 16, ahead=0)
    key_mask = torch.arange(140)[None] >= 30
    ids = (torch.arange(140) // 50)[None].int()
    case = Case(case.q, case.k, case.v, (key_mask, ids, ids), case.settings)
    check(case, settings_for("8b"))
    out, lse = both(case, settings_for("8b"))[0]
    assert not bool(out[:, :, :30].any())
    assert bool((lse[:, :, :30] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_heads_that_share_keys(dtype: torch.dtype) -> None:
    case = biased(draw(2, 3, 1, 64, 130, 16, dtype), "bias")
    (out, _), (wanted, _) = both(case, settings_for("8b", with_lse=False))
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10  # stores cut bits off
    assert relative_l1(out, wanted) <= rounding + 5e-4


@pytest.mark.parametrize("smooth", ["", "q"])
def test_means_that_stay(smooth: str) -> None:
    check(float32(64, 130, 16), dataclasses.replace(settings_for("8b"), smooth=smooth))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_does_not_come_out_as_numbers(which: str) -> None:
    case = float32(20, 130, 16)
    getattr(case, which)[0, 0, 7, 3] = math.nan
    out, _ = both(case, settings_for("8b"))[0]
    wanted = exact(case)[0]
    assert not bool(wanted.isfinite().all())
    assert not bool(out[~wanted.isfinite()].isfinite().any())


def test_what_masked_keys_hold_reaches_nothing() -> None:
    case = float32(20, 200, 16)
    key_mask = torch.arange(200)[None] < 140
    hidden = Case(case.q, case.k.clone(), case.v.clone(), (key_mask, None, None))
    hidden.k[:, :, 140:], hidden.v[:, :, 140:] = math.nan, math.inf
    clean = Case(case.q, case.k, case.v, hidden.tables)
    ours = [both(each, settings_for("8b"))[0] for each in (hidden, clean)]
    assert all(map(torch.equal, *ours))


def test_strides_are_followed_and_inputs_stay() -> None:
    case = float32(64, 130, 16)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k)]
    wide = torch.zeros(1, 1, 130, 32)
    wide[..., ::2] = case.v
    strided = Case(*turned, wide[..., ::2])
    before = [x.clone() for x in (strided.q, strided.k, strided.v)]
    assert all(map(torch.equal, *(both(c, settings_for("8b"))[0] for c in (strided, case))))
    assert all(map(torch.equal, before, (strided.q, strided.k, strided.v)))


def test_codes_are_those_of_the_reference() -> None:
    """Both roads to the kernel's buffers: two launches, and PyTorch with the order of values."""
    case = float32(70, 200, 40)
    given, settings = conditions(case), settings_for("8b")
    ours = tiles.pack(case.q, case.k, case.v, given, settings)
    made = reference.codes(case.q, case.k, case.v, given, settings)
    wanted = tiles.packed(made, settings)
    assert ours.q_scale is None, "queries are coded as they are loaded"
    ones = dataclasses.replace(made, k=torch.ones_like(made.k), v=torch.ones_like(made.v))
    for name in ("k", "v"):
        is_real = getattr(tiles.packed(ones, settings), name).float() != 0
        assert bool(is_real.any())
        found = getattr(ours, name).float()[is_real]
        expected = getattr(wanted, name).float()[is_real]
        assert float((found != expected).float().mean()) <= 1e-3
        assert float((found - expected).abs().max()) <= 32.0
    torch.testing.assert_close(ours.k_scale, wanted.k_scale[:, ::128])
    torch.testing.assert_close(ours.v_scale, wanted.v_scale, atol=1e-6, rtol=1e-5)
