"""Merging two layers' rows: angles, lengths, the bounds of the error, which rows are kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_kv_cache.merging import (
    READINGS,
    RULES,
    direction_and_length,
    distance,
    folded_length,
    kept_rows,
    shared_direction,
    threshold,
)
from memeff_compile.kernels.coded_kv_cache.reference import decode, encode


def pair(cosine: float, rows: int = 64, depth: int = 128) -> tuple[Tensor, Tensor]:
    """Return rows at a given angle, of different lengths, in float64."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(2, rows, depth, generator=generator, dtype=torch.float64)
    u = draw[0] / draw[0].norm(dim=-1, keepdim=True)
    across = draw[1] - (draw[1] * u).sum(-1, keepdim=True) * u
    across = across / across.norm(dim=-1, keepdim=True)
    v = cosine * u + math.sqrt(1 - cosine**2) * across
    lengths = torch.rand(2, rows, 1, generator=generator, dtype=torch.float64) + 0.5
    return lengths[0] * u, lengths[1] * v


def restored(x: Tensor, e: Tensor) -> Tensor:
    return folded_length(x, e).unsqueeze(-1) * e


def error(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@pytest.mark.parametrize(
    ("cosine", "published"),
    [
        (0.99, (0.071, 0.085, 0.057)),
        (0.95, (0.159, 0.190, 0.127)),
        (0.90, (0.225, 0.270, 0.180)),
        (0.80, (0.320, 0.384, 0.257)),
        (0.65, (0.428, 0.512, 0.344)),
    ],
)
def test_the_error_of_a_merged_row_is_that_of_its_angle(
    cosine: float, published: tuple[float, float, float]
) -> None:
    lower, upper = pair(cosine)
    angle = math.acos(cosine)
    for t, wanted in ((0.5, published[:1] * 2), (0.6, published[1:])):
        e = shared_direction(lower, upper, t=t)
        torch.testing.assert_close(
            e.norm(dim=-1), torch.ones(64, dtype=torch.float64), atol=1e-12, rtol=0
        )
        for x, share, table in ((lower, t, wanted[0]), (upper, 1 - t, wanted[1])):
            found = error(restored(x, e), x)
            exact = torch.full_like(found, 2 * math.sin(share * angle / 2))
            torch.testing.assert_close(found, exact, atol=1e-6, rtol=0)
            assert float(found.mean()) == pytest.approx(table, abs=6e-4)


def test_half_way_makes_the_larger_error_smallest() -> None:
    lower, upper = pair(0.7)
    worst = []
    for t in (0.3, 0.4, 0.5, 0.6, 0.7):
        e = shared_direction(lower, upper, t=t)
        worst.append(max(float(error(restored(x, e), x).mean()) for x in (lower, upper)))
    assert min(worst) == worst[2]


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_coding_adds_no_more_than_its_own_angle(bits: int) -> None:
    lower, upper = pair(0.8)
    e = shared_direction(lower, upper)
    codes, scales = encode(e[None, None, None], bits, "kivi", is_value=True)
    coded = decode(codes, scales, bits, 128, is_value=True)[0, 0]
    between = distance(e, coded / coded.norm(dim=-1, keepdim=True)) * math.pi
    for x in (lower, upper):
        found = error(restored(x, coded), x)
        bound = 2 * ((0.5 * math.acos(0.8) + between) / 2).sin()
        assert bool((found <= bound + 1e-9).all())
        torch.testing.assert_close(restored(x, coded).norm(dim=-1), x.norm(dim=-1))
        nearest = folded_length(x, coded, scale="projection").unsqueeze(-1) * coded
        assert bool((error(nearest, x) <= found + 1e-12).all())


def test_rotary_embedding_may_come_before_or_after() -> None:
    lower, upper = pair(0.6, depth=16)
    angle = torch.randn(8, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    found = shared_direction(rotate(lower), rotate(upper), t=0.6)
    torch.testing.assert_close(found, rotate(shared_direction(lower, upper, t=0.6)))
    torch.testing.assert_close(
        distance(*(direction_and_length(rotate(x))[0] for x in (lower, upper))),
        distance(*(direction_and_length(x)[0] for x in (lower, upper))),
    )


@pytest.mark.parametrize("rule", RULES)
def test_parallel_opposite_and_empty_rows_are_finite(rule: str) -> None:
    x = torch.randn(4, 16)
    zero = torch.zeros(4, 16)
    for other in (x, 2 * x, -x, zero):
        e = shared_direction(x, other, rule=rule)
        assert e.isfinite().all()
        for row in (x, other):
            assert restored(row, e).isfinite().all()
    torch.testing.assert_close(
        shared_direction(x, 3 * x, rule=rule), x / x.norm(dim=-1, keepdim=True)
    )


def test_rules_differ_as_they_say() -> None:
    lower, upper = pair(0.5)
    u, v = (direction_and_length(x)[0] for x in (lower, upper))
    longer = shared_direction(lower, upper, rule="max_norm")
    is_lower = lower.norm(dim=-1) >= upper.norm(dim=-1)
    assert torch.equal(longer[is_lower], u[is_lower])
    assert torch.equal(longer[~is_lower], v[~is_lower])
    # Half way the mean of two directions is the middle of the arc; elsewhere it is not.
    halves = [shared_direction(lower, upper, rule=rule) for rule in ("slerp", "average")]
    torch.testing.assert_close(*halves)
    others = [shared_direction(lower, upper, rule=rule, t=0.8) for rule in ("slerp", "average")]
    assert not torch.allclose(*others)


def test_the_distance_of_bf16_rows_is_computed_wider() -> None:
    x = torch.randn(256, 128).bfloat16()
    u = direction_and_length(x)[0]
    assert u.dtype == torch.float32
    assert float(distance(u, u).max()) < 1e-3


# --- which rows are kept --------------------------------------------------------------------------

APART = torch.tensor([[[0.1, 0.9, 0.5, 0.88, 0.2, 0.87]]])
ALL = torch.ones_like(APART, dtype=torch.bool)


def chosen(reading: str, gamma: float, room: int, counted: Tensor = ALL) -> tuple[list[int], int]:
    bound = threshold(APART, counted, gamma=gamma, reading=reading)
    rows, _, left = kept_rows(APART, counted, bound, torch.full((1, 1), room), reading=reading)
    return rows[0, 0].nonzero().flatten().tolist(), int(left)


def test_the_most_distinct_rows_are_kept_and_a_larger_gamma_keeps_more() -> None:
    assert chosen("distinct", 0.05, 9) == ([1, 3, 5], 0)
    assert chosen("distinct", 0.03, 9) == ([1, 3], 0)
    assert chosen("distinct", 0.6, 9) == ([1, 2, 3, 5], 0)


def test_the_other_reading_keeps_the_most_similar_rows() -> None:
    assert chosen("similar", 0.05, 9) == ([0], 0)
    assert chosen("similar", 0.2, 9) == ([0, 4], 0)
    assert set(READINGS) == {"distinct", "similar"}


def test_room_is_a_hard_bound_and_what_finds_none_is_counted() -> None:
    assert chosen("distinct", 0.05, 2) == ([1, 3], 1)
    assert chosen("distinct", 0.05, 0) == ([], 3)


def test_rows_without_a_say_set_no_bound_and_are_not_kept() -> None:
    counted = ALL.clone()
    counted[..., 1] = False
    assert chosen("distinct", 0.05, 9, counted) == ([3, 5], 0)
