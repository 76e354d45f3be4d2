"""Kernels of several weights in one piece each, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_weight import codecs, parse, pieces
from memeff_compile.kernels.coded_weight.layout import padded, piece_places, piece_words
from tests.support.hostile_weights import bits, hostile, normal

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

WIN4 = parse("win4")


def in_one_piece(weight: Tensor, room: int = 0) -> Tensor:
    """Return a win4 weight in one piece."""
    parts = codecs.encode(weight, WIN4)
    room = max(room, parts[3].numel())
    piece = torch.zeros(piece_words(weight.numel(), room), dtype=torch.int32)
    for place, part in zip(pieces.parts_of(piece, weight.numel()), parts, strict=True):
        place[: part.numel()].copy_(part)
    return piece


def test_parts_of_a_piece_are_apart() -> None:
    words = piece_words(100_000, 300)
    places = sorted(piece_places(100_000, words))
    assert all(start % 128 == 0 for start, _ in places)
    ends = [start + length for start, length in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert ends[-1] == words


@pytest.mark.parametrize("count", [1, 3])
def test_several_weights_are_decoded_in_one_launch(count: int) -> None:
    weights = [hostile(32, 512), normal(18, 513), hostile(64, 512, seed=3)][:count]
    held = [in_one_piece(weight) for weight in weights]
    found = pieces.decode(held, [tuple(weight.shape) for weight in weights])
    for one, weight in zip(found, weights, strict=True):
        assert one.shape == weight.shape
        assert torch.equal(bits(one), bits(weight))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_several_weights_are_moved_as_each_alone(decay: float) -> None:
    weights = [hostile(32, 512), normal(64, 512), torch.zeros(32, 512).bfloat16()]
    gradients = [hostile(*weight.shape, seed=7 + n) for n, weight in enumerate(weights)]
    by = codecs.Step(0.25, decay)
    expected = []
    for weight, gradient in zip(weights, gradients, strict=True):
        alone = gradient.clone()
        codecs.step(codecs.encode(weight, WIN4), WIN4, alone, by)
        expected.append(alone)
    rooms = [1 << 15, 1 << 15, 0]  # the last one does not fit
    held = [in_one_piece(weight, room) for weight, room in zip(weights, rooms, strict=True)]
    counts = [weight.numel() for weight in weights]
    refuge = torch.full((pieces.sheltered_together(counts),), 77, dtype=torch.int16)
    outcomes = pieces.step(held, gradients, by, refuge)
    misfits = dict(outcomes.misfits())
    assert list(misfits) == [2]
    assert torch.equal(misfits[2], bits(expected[2]).view(-1))
    inside = refuge[pieces.HEADING : pieces.HEADING + sum(map(padded, counts[:2]))]
    assert (inside == 77).all()
    found = pieces.decode(held[:2], [tuple(weight.shape) for weight in weights[:2]])
    for one, gradient, value in zip(found, gradients, expected, strict=False):
        assert torch.equal(bits(gradient), bits(value))
        assert torch.equal(bits(one), bits(value))
