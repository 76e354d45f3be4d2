"""The embedding ops on a real GPU: sums, repeatability, CUDA graphs, memory."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor

from memeff_compile.kernels.embedding import (
    bytes_after,
    embedding_accumulate,
    embedding_backward,
    engine_for,
    reference,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BUDGET = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}
NONE = -1


def draw(
    tokens: int, vocab: int, depth: int, dtype: torch.dtype, busiest: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gradient of the table, gradients of rows, and ids; one id takes a share of them."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, depth, generator=generator).to(DEVICE, dtype)
    rows = torch.randn(tokens, depth, generator=generator).to(DEVICE, dtype)
    ids = torch.randint(0, vocab, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < busiest] = vocab // 2
    return table, rows, ids.to(DEVICE)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize(
    ("tokens", "vocab", "depth", "busiest"),
    [
        (1, 1, 1, 0.0),
        (31, 2, 7, 0.0),
        (3000, 50, 130, 0.0),
        (5000, 40000, 2304, 0.0),
        (16384, 128256, 256, 0.5),
        (16384, 3, 64, 1.0),
    ],
    ids=["one", "odd", "mixed", "sparse", "half of one id", "one id"],
)
def test_sums_are_exact_and_rounded_once(
    tokens: int,
    vocab: int,
    depth: int,
    busiest: float,
    dtype: torch.dtype,
    index: torch.dtype,
) -> None:
    table, rows, ids = draw(tokens, vocab, depth, dtype, busiest)
    for padding_idx in (NONE, int(ids[0])):
        kept = ids != padding_idx
        expected = table.double().index_add(0, ids[kept], rows[kept].double())
        size = table.double().abs().index_add(0, ids[kept], rows[kept].double().abs())
        found = table.clone()
        embedding_accumulate(found, rows, ids.to(index), padding_idx)
        limit = BUDGET[dtype] * expected.abs() + 2e-6 * size
        assert ((found.double() - expected).abs() <= limit).all()


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
def test_the_same_inputs_give_the_same_bits(dtype: torch.dtype) -> None:
    _, rows, ids = draw(16384, 500, 320, dtype, 0.3)
    first = embedding_backward(rows, ids, 500, NONE)
    for _ in range(5):
        assert torch.equal(embedding_backward(rows, ids, 500, NONE), first)


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
def test_calls_are_captured_in_cuda_graphs(dtype: torch.dtype) -> None:
    table, rows, ids = draw(4096, 700, 96, dtype, 0.3)
    static = table.clone()
    embedding_accumulate(static, rows, ids, NONE)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embedding_accumulate(static, rows, ids, 3)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.randint(0, 700, (4096,), generator=generator))
        static.copy_(table)
        graph.replay()
        expected = table.clone()
        embedding_accumulate(expected, rows, ids, 3)
        assert torch.equal(static, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_formula_bounds_what_is_allocated(dtype: torch.dtype) -> None:
    tokens, vocab, depth = 16384, 50000, 512
    table, rows, ids = draw(tokens, vocab, depth, dtype)
    embedding_accumulate(table, rows, ids, NONE)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    embedding_accumulate(table, rows, ids, NONE)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - base
    n, d = sympy.symbols("N D", positive=True, integer=True)
    formula = bytes_after(n, d, dtype=dtype, engine=engine_for(DEVICE, dtype))
    assert used <= int(formula.subs({n: tokens, d: depth})) + (1 << 20)


def test_an_id_outside_the_table_changes_nothing() -> None:
    """The lookup refuses it with a device assertion; the sums must not write elsewhere."""
    from memeff_compile.kernels.embedding.sorted_rows import accumulate

    table = torch.zeros(3, 64, device=DEVICE)
    ids = torch.tensor([0, 5, -1, 2**40, 2], device=DEVICE)
    accumulate(table, torch.ones(5, 64, device=DEVICE), ids, NONE)
    assert table.sum(1).tolist() == [64.0, 0.0, 64.0]


def test_offsets_beyond_32_bits() -> None:
    vocab, depth = 1_100_000, 2048
    table = torch.zeros(vocab, depth, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.tensor([vocab - 1, 0, vocab - 1], device=DEVICE)
    rows = torch.ones(3, depth, device=DEVICE, dtype=torch.bfloat16)
    embedding_accumulate(table, rows, ids, NONE)
    assert table[vocab - 1].unique().tolist() == [2.0]
    assert table[0].unique().tolist() == [1.0]
    assert table[1:-1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_both_engines_agree(dtype: torch.dtype) -> None:
    table, rows, ids = draw(3000, 300, 200, dtype, 0.2)
    other = table.clone()
    embedding_accumulate(table, rows, ids, NONE)
    reference.accumulate(other, rows, ids, NONE)
    # A row sums up to some hundred numbers, in another order in each engine.
    tolerance = 20 * BUDGET[dtype]
    scale = float(other.float().abs().max())
    torch.testing.assert_close(table, other, rtol=tolerance, atol=tolerance * scale)
