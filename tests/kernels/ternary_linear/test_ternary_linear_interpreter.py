"""The engine `tiles` of ternary_linear on a CPU: the same source, run by Triton's interpreter.

Codes and integer sums have to be equal, not close. The interpreter cuts bf16 off instead of
rounding it, so that chains in bf16 itself are compared on a GPU alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.ternary_linear import KINDS, Quantizer, reference, tiles
from memeff_compile.kernels.ternary_linear.quantizer import Entry
from memeff_compile.kernels.ternary_linear.shapes import TileShapes, VectorShapes

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]


def draw(tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    return x


def packed(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-1, 2, (rows, columns), generator=generator)
    return reference.pack_codes(codes.to(torch.int8))


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.nan_to_num(-7), wanted.nan_to_num(-7))


@pytest.mark.parametrize("is_step", [False, True], ids=["times", "over"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_have_the_codes_of_the_reference(kind: str, is_step: bool) -> None:
    for dtype, is_native in ((torch.float32, False), (torch.float16, True)):
        quantizer = Quantizer(kind, is_step=is_step, is_native=is_native, adds_eps=is_step)
        x = draw(3, 37, dtype)
        x[1, 3] = float("nan")
        got, wanted = tiles.quantize(x, quantizer), reference.quantize(x, quantizer)
        for place, (found, right) in enumerate(zip(got, wanted, strict=True)):
            if KINDS[kind].is_mean and place == 1:  # the mean is summed in another order
                torch.testing.assert_close(found, right, rtol=2e-3, atol=0, equal_nan=True)
            else:
                assert_same(found[[0, 2]], right[[0, 2]])
        assert got[1][1].isnan()


@pytest.mark.parametrize("is_step", [False, True], ids=["times", "over"])
def test_weights_have_the_codes_of_the_reference(is_step: bool) -> None:
    weight, scale = torch.randn(5, 37), torch.tensor(1.2)
    for given, is_native in ((weight, False), (weight.half(), True)):
        found = tiles.pack(given, scale, is_step=is_step, is_native=is_native)
        wanted = reference.pack(given, scale, is_step=is_step, is_native=is_native)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "shapes", [TileShapes(16, 32, 32, 4, 2), TileShapes(16, 16, 32, 4, 2, 3)], ids=str
)
def test_products_have_the_bits_of_the_reference(shapes: TileShapes) -> None:
    x, weights, scale = draw(20, 300), packed(40, 300), torch.tensor(1.7)
    tokens = reference.quantize(x, Quantizer())
    for bias, is_step in ((torch.randn(40), False), (None, True)):
        settings = {"dtype": torch.float32, "is_step": is_step, "weight_is_step": is_step}
        found = tiles.product(*tokens, weights, scale, bias, shapes=shapes, **settings)
        assert_same(found, reference.product(*tokens, weights, scale, bias, **settings))


@pytest.mark.parametrize("count", [2, 3])
def test_matrices_of_one_launch_have_the_bits_of_their_own(count: int) -> None:
    x, scale = draw(20, 300), torch.tensor(1.7)
    weights = [packed(rows, 300) for rows in (40, 3, 33)][:count]
    tokens, settings = reference.quantize(x, Quantizer()), {"dtype": torch.float32}
    settings |= {"is_step": False, "weight_is_step": False}
    for biases in (None, 1.5), (0.5, 1.5):
        bias = [
            None if b is None else torch.full((w.shape[0],), b)
            for b, w in zip((*biases, 2.5), weights, strict=False)
        ]
        scales = [scale * (1 + number) for number in range(count)]
        for shapes in (TileShapes(16, 16, 32, 4, 2), TileShapes(16, 32, 32, 4, 2, 3, 2)):
            found = tiles.products(*tokens, weights, scales, bias, shapes=shapes, **settings)
            for got, *own in zip(found, weights, scales, bias, strict=True):
                assert_same(got, reference.product(*tokens, *own, **settings))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_few_tokens_have_the_bits_of_many(count: int) -> None:
    x, quantizer = draw(2, 37), Quantizer()
    weights = [packed(rows, 37) for rows in (19, 8, 3)][:count]
    scale, biases = torch.tensor(1.7), [torch.randn(19), None, torch.randn(3)][:count]
    settings = {"dtype": torch.float32, "weight_is_step": False}
    tokens = reference.quantize(x, quantizer)
    for shapes in (VectorShapes(8, 4), VectorShapes(4, 4, 2)):
        found = tiles.vectors(
            x, weights, [scale] * count, biases, quantizer, shapes=shapes, **settings
        )
        coded = tiles.vectors(
            x, weights, [scale] * count, biases, quantizer, shapes=shapes, coded=tokens, **settings
        )
        for got, same, weight, bias in zip(found, coded, weights, biases, strict=True):
            assert_same(
                got, reference.product(*tokens, weight, scale, bias, is_step=False, **settings)
            )
            assert_same(got, same)


ENTRIES = {
    "norm": lambda: Entry(None, torch.rand(300) + 0.5, 1e-6),
    "gate": lambda: Entry(torch.randn(3, 300)),
    "gate and norm": lambda: Entry(torch.randn(3, 300), torch.rand(300) + 0.5, 1e-6),
}


@pytest.mark.parametrize("case", list(ENTRIES))
def test_gates_norms_and_sums_are_those_of_the_reference(case: str) -> None:
    """The mean of a norm is summed in another order, so that a code may be the next one."""
    x, entry, quantizer = draw(3, 300), ENTRIES[case](), Quantizer()
    got, wanted = tiles.quantize(x, quantizer, entry), reference.quantize(x, quantizer, entry)
    assert int((got[0].int() - wanted[0].int()).abs().max()) <= 1
    assert float((got[0] != wanted[0]).float().mean()) < 1e-2
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=0)
    weights, scale, added = packed(24, 300), torch.tensor(1.7), torch.randn(3, 24)
    settings = {"dtype": torch.float32, "weight_is_step": False, "added": added}
    few = tiles.vectors(
        x, [weights], [scale], [None], quantizer, entry, shapes=VectorShapes(8, 4), **settings
    )[0]
    for shapes in (TileShapes(16, 32, 32, 4, 2), TileShapes(16, 16, 32, 4, 2, 3)):
        many = tiles.product(*got, weights, scale, None, is_step=False, shapes=shapes, **settings)
        assert_same(few, many)
    assert_same(few, reference.product(*got, weights, scale, None, is_step=False, **settings))


def test_operands_of_the_backward_have_the_bits_of_the_reference() -> None:
    weights, scale = packed(5, 37), torch.tensor(1.7)
    codes, by_token, _ = reference.quantize(draw(3, 37), Quantizer())
    for is_step in (False, True):
        settings = {"is_step": is_step, "dtype": torch.float32}
        found = tiles.dequantized_weights(weights, scale, 37, **settings)
        assert_same(found, reference.dequantized_weights(weights, scale, 37, **settings))
        found = tiles.dequantized_tokens(codes, by_token, 37, **settings)
        assert_same(found, reference.dequantized_tokens(codes, by_token, 37, **settings))
