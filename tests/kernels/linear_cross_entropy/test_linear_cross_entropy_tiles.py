"""Widths, groups and lists of tiles: plain arithmetic, no Triton."""

from __future__ import annotations

import pytest
import torch

from memeff_compile.kernels.linear_cross_entropy.shapes import (
    FUSED_AUTO_BYTES_PER_ROW,
    piece_width,
    room_inside,
    row_groups,
    shapes_for_programs,
)
from memeff_compile.kernels.linear_cross_entropy.tile_lists import build, group_count

HOPPER = shapes_for_programs(132)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 8192, 100_000])
@pytest.mark.parametrize("fitting", [1, 300, 5000])
def test_groups_cover_the_rows_in_whole_blocks(rows: int, fitting: int) -> None:
    groups = row_groups(rows, fitting, HOPPER)
    assert groups.size % 128 == 0
    assert groups.size <= max(128, fitting)
    assert (groups.total - 1) * groups.size < rows <= groups.total * groups.size


@pytest.mark.parametrize("workspace", [0, 1, 2**26, 2**40])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 300), (8192, 256_000), (65_536, 32_000)])
def test_a_piece_fits_the_workspace_or_is_the_narrowest(
    rows: int, vocab: int, workspace: int
) -> None:
    width = piece_width(rows, 2304, vocab, workspace, HOPPER)
    assert width % 256 == 0
    budget = workspace or max(2**26, FUSED_AUTO_BYTES_PER_ROW * rows)
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


@pytest.mark.parametrize("parts", ["both", "hidden", "weight"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_lists_name_each_active_tile_once(parts: str, share: float) -> None:
    row_blocks, columns, slots = 6, 41, 20
    generator = torch.Generator().manual_seed(1)
    active = (torch.rand(row_blocks, columns, generator=generator) < share).to(torch.uint8)
    active[-1] = 0  # a row block without rows
    lists = build(active, row_blocks - 1, parts, slots, 0.95)
    groups = group_count(row_blocks, columns, slots, parts, 0.95)
    assert bool(lists.is_sparse)
    everything = torch.zeros_like(active)
    everything[:-1] = 1
    union = active if parts == "both" else everything
    total = int(lists.weight_start[-1]) if parts != "weight" else int(union.sum())
    tiles = list(zip(lists.tile_row.tolist(), lists.tile_column.tolist(), strict=True))[:total]
    assert sorted(tiles) == [tuple(place) for place in union.nonzero().tolist()]

    for_weight = active if parts in ("both", "weight") else everything
    for_hidden = active if parts in ("both", "hidden") else everything
    seen = []
    for column in range(columns):
        for at in range(int(lists.weight_start[column]), int(lists.weight_start[column + 1])):
            tile = int(lists.weight_tile[at])
            assert tiles[tile] == (int(lists.weight_row[at]), column)
            seen.append(tiles[tile])
    assert sorted(seen) == [tuple(place) for place in for_weight.nonzero().tolist()]

    seen = []
    for row in range(row_blocks):
        for group in range(groups):
            first = int(lists.group_tile[group])
            for at in range(
                int(lists.hidden_start[row, group]), int(lists.hidden_start[row, group + 1])
            ):
                tile = int(lists.hidden_tile[at])
                assert tiles[tile] == (row, int(lists.hidden_column[at]))
                assert 0 <= tile - first < slots
                seen.append(tiles[tile])
    assert sorted(seen) == [tuple(place) for place in for_hidden.nonzero().tolist()]
    assert int(lists.group_column[0]) == 0
    assert int(lists.group_column[-1]) == columns


def test_a_full_map_is_left_to_the_dense_kernels() -> None:
    lists = build(torch.ones(4, 30, dtype=torch.uint8), 4, "both", 12, 0.75)
    assert not bool(lists.is_sparse)
    assert int(lists.group_column.sum()) == 0
    assert int(lists.group_tile.sum()) == 0
