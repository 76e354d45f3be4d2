"""Widths of blocks, blocks of rows, and room inside a gradient: plain arithmetic, no Triton."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import memeff_compile
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


ROOMS = ("linear_cross_entropy", "_head_loss", "_gradient_filter")


def sizes_in(text: str) -> Iterator[str]:
    """Yield the sizes that a module chooses: constants of its own, and literals in launches."""
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [ast.unparse(target) for target in node.targets]
            if type(node.value.value) is int and node.value.value > 0 and names[0].isupper():
                yield names[0]
    for node in ast.walk(tree):
        for given in node.keywords if isinstance(node, ast.Call) else ():
            is_literal = isinstance(given.value, ast.Constant) and type(given.value.value) is int
            if is_literal and given.arg is not None and given.arg.isupper():
                yield given.arg


@pytest.mark.parametrize("room", ROOMS)
def test_every_size_of_a_block_is_chosen_in_one_file(room: str) -> None:
    folder = Path(memeff_compile.__file__).parent / "kernels" / room
    others = [path for path in folder.glob("*.py") if not path.stem.endswith("_kernels")]
    chosen = {path.stem for path in others if list(sizes_in(path.read_text()))}
    assert chosen - {"levels", "memory"} == {"shapes"}  # levels and bounds are not blocks


def test_a_size_in_an_engine_is_seen() -> None:
    assert list(sizes_in("ROWS = 8\nstart(kernel, (1,), x, BLOCK=128, num_warps=4)")) == [
        "ROWS",
        "BLOCK",
    ]
