"""The engine `sorted` of the embedding ops on a CPU: the same source, run by Triton's interpreter.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of
stored values; the budget is doubled to match.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.embedding import sorted_rows
from memeff_compile.kernels.embedding.sorted_rows_kernels import BORDER_CHUNKS, CHUNK

pytestmark = pytest.mark.interpreter

BUDGET = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
NONE = -1


def check(ids: Tensor, vocab: int, depth: int, dtype: torch.dtype, padding_idx: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, depth, generator=generator).to(dtype)
    rows = torch.randn(ids.numel(), depth, generator=generator).to(dtype)
    kept = (ids != padding_idx) & (ids >= 0) & (ids < vocab)
    expected = table.double().index_add(0, ids[kept].long(), rows[kept].double())
    found = table.clone()
    sorted_rows.accumulate(found, rows, ids, padding_idx)
    limit = BUDGET[dtype] * expected.abs() + 1e-6 * ids.numel()
    assert ((found.double() - expected).abs() <= limit).all()
    untouched = torch.ones(vocab, dtype=torch.bool)
    untouched[ids[kept].long()] = False
    assert torch.equal(found[untouched], table[untouched])
    return found


def draw(tokens: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("padding_idx", [NONE, 1], ids=["no padding", "padding"])
def test_sums_are_right(dtype: torch.dtype, index: torch.dtype, padding_idx: int) -> None:
    check(draw(3 * CHUNK + 5, 40).to(index), 40, 33, dtype, padding_idx)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("vocab", [1, 2])
def test_runs_that_end_at_the_border_of_a_chunk(tokens: int, vocab: int) -> None:
    check(draw(tokens, vocab), vocab, 5, torch.float32, NONE)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_token_that_fills_the_batch(extra: int) -> None:
    """Its run is longer than the second pass reads at a time."""
    tokens = (BORDER_CHUNKS + 1) * CHUNK + extra
    ids = torch.full((tokens + 9,), 2)
    ids[::tokens] = 4
    ids[5] = 0
    check(ids, 6, 3, torch.float32, NONE)


def test_columns_beyond_one_block() -> None:
    check(draw(4, 3), 3, 1030, torch.float32, NONE)
    check(torch.ones(CHUNK + 1, dtype=torch.int64), 3, 260, torch.bfloat16, NONE)


def test_ids_outside_the_table_change_nothing() -> None:
    check(torch.tensor([0, 5, -1, 2, 2**40, 5] + [7] * (2 * CHUNK)), 3, 4, torch.float32, NONE)
    # As of a table of which other ranks hold most rows.
    check(torch.tensor([-1] * (2 * CHUNK + 3) + [0, 2]), 3, 4, torch.float32, NONE)


def test_strides_are_followed() -> None:
    ids = draw(50, 4)
    rows, table = torch.randn(50, 12), torch.zeros(4, 24)
    sorted_rows.accumulate(table[:, ::2], rows.t().contiguous().t(), ids, NONE)
    expected = torch.zeros(4, 12).index_add(0, ids, rows)
    torch.testing.assert_close(table[:, ::2], expected, rtol=1e-5, atol=1e-5)
    assert table[:, 1::2].count_nonzero() == 0
