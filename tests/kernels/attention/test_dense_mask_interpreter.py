"""Masks that are tensors, in the kernels of the engine `tiles`, run by Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels.attention import mask_tiles, reference, tiles
from memeff_compile.kernels.attention.mask_tiles import EMPTY, FULL, PARTIAL
from memeff_compile.kernels.attention.shapes import Shape
from tests.support.dense_attention import MASKS, drawn_mask, largest

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v")
UNEQUAL = tiles.Plan(
    Shape(128, 32, 4, 1, by_head=True), Shape(32, 128, 4, 1, by_head=True), Shape(32, 64, 4, 1)
)
SMALL = tiles.Plan(*3 * [Shape(16, 16, 4, 1)])


def check(mask: Tensor, queries: int, keys: int, plan: tiles.Plan = UNEQUAL, **told: float) -> None:
    """Compare the kernels with the reference, which the op's tests compare with the formula."""
    codes = mask_tiles.classify_in_kernel(mask)
    assert torch.equal(codes, mask_tiles.classify(mask))
    generator = torch.Generator().manual_seed(0)
    batch = mask.shape[0]
    q, grad = (torch.randn(batch, 2, queries, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(batch, 1, keys, 16, generator=generator) for _ in range(2))
    q[:, :, -1], k[:, :, -1] = 30.0 * q[:, :, -1], 30.0 * k[:, :, -1]
    settings = {"scale": 0.25, "softcap": 0.0, "mean": False, **told}
    given = Conditions(None, None, None, None, None, **settings, mask=mask, mask_tiles=codes)  # type: ignore[arg-type]
    found = [
        (*forward, *engine.gradients(grad, q, k, v, *forward, given, **how))
        for engine, how in ((tiles, {"plan": plan}), (reference, {}))
        for forward in [engine.attend(q, k, v, given, **how)]
    ]
    for name, ours, wanted in zip(NAMES, *found, strict=True):
        if name == "lse" and given.is_bias:
            ours, wanted = (each.double().sum(0) for each in (ours, wanted))
        is_number = wanted != -math.inf
        assert torch.equal(ours != -math.inf, is_number), name
        difference = largest((ours - wanted)[is_number])
        assert difference <= 2e-5 * max(1.0, largest(wanted[is_number])), name


FIRST = ("blocks, lowest number, rows without keys", "transposed")
"""Numbers and truth values, of each head and of all; the others are marked slow."""


@pytest.mark.parametrize(
    "kind",
    [kind if kind in FIRST else pytest.param(kind, marks=pytest.mark.slow) for kind in MASKS],
)
def test_every_mask_equals_the_reference(kind: str) -> None:
    check(drawn_mask(kind, 1, 2, 70, 140), 70, 140)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", MASKS)
def test_every_mask_equals_the_reference_at_other_sizes(kind: str, seed: int) -> None:
    queries, keys = [(64, 64), (1, 130), (150, 65), (129, 33)][seed]
    check(drawn_mask(kind, 2, 2, queries, keys, seed), queries, keys, (SMALL, UNEQUAL)[seed % 2])


def test_a_softcap_and_a_negative_scale() -> None:
    check(drawn_mask("blocks of each head", 1, 2, 40, 70), 40, 70, softcap=2.0, scale=-0.4)
    check(drawn_mask("numbers", 1, 2, 40, 70), 40, 70, scale=-0.4)


def test_what_is_empty_is_not_visited_and_what_is_full_not_looked_up() -> None:
    """The lists of 32 x 128 and of 128 x 32: codes of several tiles, and of a part of one."""
    mask = torch.zeros(1, 1, 200, 260, dtype=torch.bool)
    mask[:, :, 64:128, :130] = True
    codes = mask_tiles.classify_in_kernel(mask)[0, 0].tolist()
    assert codes == [[EMPTY] * 5, [FULL, FULL, PARTIAL, EMPTY, EMPTY], *2 * [[EMPTY] * 5]]

    def lists(*tile: int) -> list[tuple[list[int], list[int]]]:
        found = mask_tiles.dense_of(mask, None, (200, 260), tile)  # type: ignore[arg-type]
        rows = found.lists_ptr[0, 0].tolist()
        return [(row[2 : 2 + row[0]], row[2:-1][::-1][: row[1]]) for row in rows]

    nothing: tuple[list[int], list[int]] = ([], [])
    assert lists(32, 128) == [nothing, nothing, ([0], [1]), ([0], [1]), *3 * [nothing]]
    assert lists(128, 32) == [([], [0, 1, 2, 3, 4, 5]), nothing]
    assert lists(64, 64) == [nothing, ([0, 1], [2]), nothing, nothing]


def test_the_last_tile_of_keys_is_never_taken_for_full() -> None:
    mask = torch.ones(1, 1, 64, 70, dtype=torch.bool)
    assert mask_tiles.classify_in_kernel(mask)[0, 0].tolist() == [[FULL, FULL]]
    found = mask_tiles.dense_of(mask, None, (64, 70), (64, 64)).lists_ptr[0, 0, 0].tolist()
    assert found[:4] == [1, 1, 0, 1]
