"""Widths of blocks, blocks of rows, and room inside a gradient: plain arithmetic, no Triton."""

from __future__ import annotations

import pytest

from memeff_compile.kernels.linear_cross_entropy.shapes import (
    FORWARD_BYTES,
    HOPPER_AUTO_BYTES_PER_ROW,
    forward_rows,
    hopper_columns,
    room_inside,
    shapes_for_programs,
)

HOPPER = shapes_for_programs(132)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 8192, 100_000])
@pytest.mark.parametrize("fitting", [1, 300, 5000])
def test_blocks_of_a_forward_are_whole_tiles_in_even_shares(rows: int, fitting: int) -> None:
    size = forward_rows(rows, FORWARD_BYTES // fitting, HOPPER)
    assert size % 128 == 0
    assert size <= max(128, fitting + 1)
    blocks = -(-rows // size)
    assert blocks * size - rows < blocks * 128


@pytest.mark.parametrize("workspace", [0, 1, 2**26, 2**40])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 300), (8192, 256_000), (65_536, 32_000)])
def test_a_piece_fits_the_workspace_or_is_the_narrowest(
    rows: int, vocab: int, workspace: int
) -> None:
    width = hopper_columns(rows, 2304, vocab, workspace, HOPPER)
    assert width % 256 == 0
    budget = workspace or max(2**26, HOPPER_AUTO_BYTES_PER_ROW * rows)
    assert width == 256 or 2 * rows * width <= budget
    assert width <= max(256, vocab // 2 + 256)


def test_room_inside_is_inside() -> None:
    room = room_inside(8192, 2304, 256_000, HOPPER, needs_hidden=True)
    assert room is not None
    sums, piece = 4 * 8192 * 2304, 2 * 8192 * room.width
    assert sums + piece <= 2 * 2304 * (256_000 - room.first_column)
    first = room.first_column
    while width := room.retreating_width(first):
        # The rows being written end before the G they are made of begins.
        assert 2304 * (first + width) <= 2304 * 256_000 - 8192 * width
        first += width
    assert 256_000 - first < 8192


def test_a_small_head_has_no_room_inside() -> None:
    assert room_inside(8192, 2304, 8_000, HOPPER, needs_hidden=True) is None
