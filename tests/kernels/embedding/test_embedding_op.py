"""The embedding ops on the CPU: rows, gradients, writes, allocations."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.embedding import (
    ENGINES,
    bytes_after,
    bytes_before,
    embedding,
    embedding_accumulate,
    embedding_backward,
    embedding_tied,
    engine_for,
    reference,
    supports,
)
from tests.support.live_bytes import LiveBytes

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {
    torch.float64: 1e-15,
    torch.float32: 1e-6,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}
NONE = -1


def draw(
    tokens: int, vocab: int, depth: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gradient of the table, gradients of rows, and ids."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, depth, generator=generator, dtype=torch.float64).to(dtype)
    rows = torch.randn(tokens, depth, generator=generator, dtype=torch.float64).to(dtype)
    return table, rows, torch.randint(0, vocab, (tokens,), generator=generator)


def exact_sum(table: Tensor, rows: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    kept = ids != padding_idx
    return table.double().index_add(0, ids[kept].long(), rows.double()[kept])


@pytest.mark.parametrize("padding_idx", [NONE, 1], ids=["no padding", "padding"])
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "vocab", "depth"),
    [(1, 2, 1), (40, 2, 3), (300, 50, 33), (7, 900, 130)],
    ids=["one", "repeated", "mixed", "sparse"],
)
def test_accumulate_adds_the_exact_sum_rounded_once(
    tokens: int,
    vocab: int,
    depth: int,
    dtype: torch.dtype,
    index: torch.dtype,
    padding_idx: int,
) -> None:
    table, rows, ids = draw(tokens, vocab, depth, dtype)
    expected = exact_sum(table, rows, ids, padding_idx)
    found = table.clone()
    embedding_accumulate(found, rows, ids.to(index), padding_idx)
    limit = ROUNDING[dtype] * expected.abs() + 1e-6 * rows.double().abs().sum()
    assert ((found.double() - expected).abs() <= limit).all()
    untouched = torch.ones(vocab, dtype=torch.bool)
    untouched[ids[ids != padding_idx]] = False
    assert torch.equal(found[untouched], table[untouched])


def test_sixteen_bit_sums_do_not_lose_small_terms() -> None:
    """4096 ones added in bf16 would stop at 256; fp32 sums round once, at the end."""
    rows = torch.ones(4096, 4, dtype=torch.bfloat16)
    found = embedding_backward(rows, torch.zeros(4096, dtype=torch.int64), 3, NONE)
    assert found[0].tolist() == [4096.0] * 4
    assert found[1:].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,), (2, 3, 4)], ids=str)
def test_any_shape_of_ids_is_served(shape: tuple[int, ...]) -> None:
    ids = torch.randint(0, 5, shape)
    rows = torch.randn(*shape, 6)
    expected = exact_sum(torch.zeros(5, 6), rows.reshape(-1, 6), ids.reshape(-1), NONE)
    found = embedding_backward(rows, ids, 5, NONE)
    torch.testing.assert_close(found, expected.float())


def test_strided_operands_are_served() -> None:
    table, rows, ids = draw(50, 8, 12)
    expected = exact_sum(table, rows[:1].expand(50, 12), ids, NONE)
    turned = table.t().contiguous().t()
    embedding_accumulate(turned, rows[:1].expand(50, 12), ids, NONE)
    torch.testing.assert_close(turned, expected.float())
    wide = torch.zeros(8, 24)
    embedding_accumulate(wide[:, ::2], rows, ids, NONE)
    expected = exact_sum(torch.zeros(8, 12), rows, ids, NONE)
    torch.testing.assert_close(wide[:, ::2], expected.float())
    assert wide[:, 1::2].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_inputs_give_the_same_bits(dtype: torch.dtype) -> None:
    _, rows, ids = draw(2000, 7, 65, dtype)
    first, second = (embedding_backward(rows, ids, 7, NONE) for _ in range(2))
    assert torch.equal(first, second)


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [None, 2], ids=["no padding", "padding"])
def test_plain_embedding_equals_eager_up_to_the_second_derivative(padding_idx: int | None) -> None:
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 2, 2], [4, 0, 0]])
    padding = NONE if padding_idx is None else padding_idx

    def derivatives(rows: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(rows.pow(3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        return [rows, first, second]

    found = derivatives(embedding(weight, ids, padding))
    expected = derivatives(F.embedding(ids, weight, padding_idx))
    for ours, eagers in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eagers)


def test_tied_embedding_hands_out_the_table_itself() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    rows, table = embedding_tied(weight, torch.tensor([4, 0]), NONE)
    assert torch.equal(rows, weight[[4, 0]])
    assert table.data_ptr() == weight.data_ptr()
    assert table.shape == weight.shape
    assert table.requires_grad


@pytest.mark.parametrize("create_graph", [False, True], ids=["once", "create_graph"])
@pytest.mark.parametrize("used", ["both", "rows", "table"])
def test_tied_embedding_gives_eagers_gradient(used: str, create_graph: bool) -> None:
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 1, 5], [0, 3, 1]])

    def gradient(rows: Tensor, table: Tensor) -> Tensor:
        parts = {"rows": [rows.pow(2).sum()], "table": [(table * 3).sin().sum()]}
        loss = torch.stack([p for name, p in parts.items() if used in (name, "both") for p in p])
        return torch.autograd.grad(loss.sum(), weight, create_graph=create_graph)[0]

    found = gradient(*embedding_tied(weight, ids, 3))
    expected = gradient(F.embedding(ids, weight, 3), weight)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == create_graph


def test_tied_embedding_adds_into_the_heads_own_buffer() -> None:
    """The gradient that the head's backward returns is the one that arrives at the weight."""
    weight = torch.randn(6, 4, requires_grad=True)
    rows, table = embedding_tied(weight, torch.tensor([1, 1, 5]), NONE)
    buffers: list[Tensor] = []

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, table: Tensor) -> Tensor:
            return table.new_zeros(())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            buffers.append(torch.zeros(6, 4))
            return buffers[0]

    (found,) = torch.autograd.grad(Head.apply(table) + rows.sum(), weight)
    assert found.data_ptr() == buffers[0].data_ptr()
    assert found.sum(1).tolist() == [0.0, 8.0, 0.0, 0.0, 0.0, 4.0]


# --- parts of a table -----------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [NONE, 5], ids=["no padding", "padding"])
@pytest.mark.parametrize("op", [embedding, embedding_tied], ids=["alone", "tied"])
def test_parts_of_a_table_add_up_to_the_whole(op: Any, padding_idx: int) -> None:
    """Three parts have 3, 3 and 1 of 7 rows, a fourth is empty; up to the second derivative."""
    whole = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    parts = [part.detach().requires_grad_() for part in (*whole.split(3), whole[7:])]
    ids = torch.tensor([[0, 5, 5, 6], [4, 0, 6, 0]], dtype=torch.int32)

    def derivatives(rows: Tensor, tables: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(rows.pow(3).sum(), tables, create_graph=True)
        second = torch.autograd.grad(torch.cat(first).square().sum(), tables)
        return [rows, torch.cat(first), torch.cat(second)]

    found = [op(part, ids, padding_idx, 3 * place) for place, part in enumerate(parts)]
    found = [each[0] for each in found] if op is embedding_tied else found
    expected = F.embedding(ids, whole, None if padding_idx == NONE else padding_idx)
    for ours, eagers in zip(
        derivatives(torch.stack(found).sum(0), parts), derivatives(expected, [whole]), strict=True
    ):
        torch.testing.assert_close(ours, eagers)


@pytest.mark.parametrize(
    "ids", [[-1, 4, 2, -1, 2], [-1, 4, 4, -1, 9], [3, 3, 3, 3, 3], [-1, 0, 1, 3, 3]], ids=str
)
def test_ids_of_rows_held_elsewhere_change_nothing(ids: list[int]) -> None:
    """Even if their gradient rows are nan."""
    table, rows, _ = draw(5, 4, 3)
    places = torch.tensor(ids)
    kept = (places >= 0) & (places < 4) & (places != 3)
    rows[~kept] = torch.nan
    found = table.clone()
    embedding_accumulate(found, rows, places, 3)
    expected = table.double().index_add(0, places[kept], rows[kept].double())
    torch.testing.assert_close(found, expected.float())


# --- the ops as PyTorch sees them -----------------------------------------------------------------


def test_opcheck_passes() -> None:
    table, rows, ids = draw(20, 6, 5, torch.bfloat16)
    # Compiling them is tested with the backend.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(embedding_accumulate, (table, rows, ids, 2), test_utils=checks)
    rows.requires_grad_()
    torch.library.opcheck(embedding_backward, (rows, ids, 6, NONE), test_utils=checks)


@pytest.mark.parametrize(
    ("weight", "ids", "sentence"),
    [
        (torch.ones(3, 2), torch.zeros(2), "ids has dtype float32; int64 or int32"),
        (torch.ones(3), torch.zeros(2).long(), "weight has 1 dimensions"),
        (torch.ones(3, 2).long(), torch.zeros(2).long(), "weight has dtype int64"),
        (torch.ones(3, 2).to_sparse(), torch.zeros(2).long(), "stored as torch.sparse_coo"),
        (torch.ones(3, 2, device="meta"), torch.zeros(2).long(), "ids is on cpu and weight on"),
    ],
    ids=["ids dtype", "rank", "weight dtype", "layout", "device"],
)
def test_bad_input_is_refused_with_a_sentence(weight: Tensor, ids: Tensor, sentence: str) -> None:
    found = supports(weight, ids)
    assert found is not None
    assert sentence in found
    with pytest.raises(UnsupportedInputError, match="embedding: "):
        embedding(weight, ids, NONE)
    assert supports(torch.ones(3, 2), torch.zeros(2).int()) is None


def test_an_id_outside_the_table_is_refused_as_in_eager() -> None:
    with pytest.raises(IndexError):
        embedding(torch.ones(3, 2), torch.tensor([3]), NONE)


def test_engines_are_named() -> None:
    assert set(ENGINES) == {"sorted", "reference"}
    assert engine_for(torch.device("cpu"), torch.bfloat16) == "reference"


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "depth"), [(64, 32), (1500, 400), (20000, 40)], ids=["small", "wide", "long"]
)
def test_formula_bounds_what_is_allocated(tokens: int, depth: int, dtype: torch.dtype) -> None:
    vocab = 8000
    table, rows, ids = draw(tokens, vocab, depth, dtype)
    n, d = sympy.symbols("N D", positive=True, integer=True)
    formula = bytes_after(n, d, dtype=dtype, engine="reference")
    bound = int(formula.subs({n: tokens, d: depth}))
    with LiveBytes() as seen:
        reference.accumulate(table, rows, ids, NONE)
    assert seen.peak <= bound <= 2 * seen.peak
    if tokens < vocab:
        assert seen.largest < vocab * depth


def test_formulas_at_the_shape_of_a_small_llama() -> None:
    before = bytes_before(128256, 2048, dtype=torch.bfloat16)
    after = bytes_after(16384, 2048, dtype=torch.bfloat16, engine="sorted")
    assert before == 4 * 128256 * 2048
    assert after == 8 * 512 * 2048 + 96 * 16384
    assert bytes_before(10, 10, dtype=torch.bfloat16, compiled=False) == 200
    assert bytes_before(10, 10, dtype=torch.float64) == 800
    # Of a cut table an fp32 buffer and the rounded one, of which this rank's half is asked for.
    assert bytes_before(10, 10, dtype=torch.bfloat16, held=5) == 400 + 200 - 100
    assert bytes_before(10, 10, dtype=torch.float32, held=5) == 400 - 200
