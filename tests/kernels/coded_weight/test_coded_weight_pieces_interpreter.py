"""Kernels of several weights in one piece each, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_weight import codecs, parse, pieces
from memeff_compile.kernels.coded_weight.layout import padded, piece_places, piece_words
from tests.support.bounded import bounded as bounded
from tests.support.hostile_weights import bits, hostile, normal

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty", "bounded")]

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


@pytest.mark.parametrize("size", [(32, 512), (18, 513)])
def test_a_weight_in_one_piece_is_decoded(size: tuple[int, int]) -> None:
    weight = hostile(*size)
    found = pieces.decode(in_one_piece(weight), size)
    assert found.shape == weight.shape
    assert torch.equal(bits(found), bits(weight))


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
    found = pieces.move(held, gradients, by)
    misfits = dict(pieces.list_patches(held, gradients, found, refuge).misfits())
    assert list(misfits) == [2]
    assert torch.equal(misfits[2], bits(expected[2]).view(-1))
    inside = refuge[pieces.HEADING : pieces.HEADING + sum(map(padded, counts[:2]))]
    assert (inside == 77).all()
    for piece, gradient, value in zip(held[:2], gradients, expected, strict=False):
        assert torch.equal(bits(gradient), bits(value))
        assert torch.equal(bits(pieces.decode(piece, gradient.shape)), bits(value))


def test_what_is_left_of_a_weight_that_did_not_fit_stays_within_its_lists() -> None:
    weight = torch.zeros(32, 512).bfloat16()
    piece, by = in_one_piece(weight), codecs.Step(0.25)
    refuge = torch.zeros(pieces.sheltered_together([weight.numel()]), dtype=torch.int16)
    for gradient in (hostile(32, 512), hostile(32, 512, seed=1)):
        found = pieces.move([piece], [gradient], by)
        outcomes = pieces.list_patches([piece], [gradient], found, refuge)
        assert [place for place, _ in outcomes.misfits()] == [0]
        assert pieces.decode(piece, (32, 512)).shape == weight.shape


def test_what_is_left_of_a_weight_in_parts_stays_within_its_lists() -> None:
    parts = codecs.encode(torch.zeros(32, 512).bfloat16(), WIN4)
    refuge = torch.zeros(codecs.sheltered(32 * 512), dtype=torch.int16)
    outcome = codecs.encode_soon(parts, hostile(32, 512), WIN4, refuge)
    assert isinstance(outcome, codecs.Outcome)
    assert not outcome.fits()
    assert codecs.decode(parts, WIN4, (32, 512)).shape == (32, 512)
