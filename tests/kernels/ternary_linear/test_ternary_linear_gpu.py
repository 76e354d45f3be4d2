"""ternary_linear on a GPU: codes against eager's chain, exact integer sums, gradients, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.ternary_linear import (
    KINDS,
    Quantizer,
    reference,
    ternary_linear,
    ternary_linear_pack,
    ternary_linear_product,
    ternary_linear_quantize,
    tiles,
)
from memeff_compile.kernels.ternary_linear import shapes as shapes_of
from memeff_compile.kernels.ternary_linear.quantizer import Entry
from memeff_compile.kernels.ternary_linear.shapes import TileShapes, VectorShapes, tile_shapes

pytestmark = pytest.mark.gpu


def draw(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def hostile(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random tokens, one of zeros, one with an outlier, one with nan, one with inf, ties."""
    x = draw(tokens, columns, dtype=dtype)
    for place in range(min(tokens, 5)):
        if place == 0:
            x[place] = 0
        elif place == 1:
            x[place, -1] = 3e4
        elif place == 2:
            x[place, columns // 2] = float("nan")
        elif place == 3:
            x[place, 0] = float("-inf")
        else:
            x[place] = torch.arange(columns, device="cuda").remainder(255).sub(127).div(2).to(dtype)
            x[place, 0] = 127 / 2
    return x


def packed(rows: int, columns: int, seed: int = 1) -> Tensor:
    codes = torch.randint(
        -1, 2, (rows, columns), device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
    )
    return reference.pack_codes(codes.to(torch.int8))


def exact(codes: Tensor, weights: Tensor) -> Tensor:
    """Return the integer products, in float64, where they are exact."""
    columns = 16 * weights.shape[1]
    rows = reference.from_planes(codes, columns).double()
    return rows @ reference.unpack_codes(weights, columns).double().t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_native", [False, True], ids=["upcast", "native"])
@pytest.mark.parametrize("is_step", [False, True], ids=["times", "over"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_codes_equal_the_eager_chain(
    kind: str, is_step: bool, is_native: bool, dtype: torch.dtype
) -> None:
    quantizer = Quantizer(kind, is_step=is_step, is_native=is_native)
    x = hostile(9, 4100, dtype)
    got = tiles.quantize(x, quantizer)
    wanted = reference.quantize(x, quantizer)
    is_token = wanted[1].isfinite()
    assert torch.equal(is_token, got[1].isfinite())
    if KINDS[kind].is_mean:  # the mean is summed in another order: its last bit may differ
        different = (got[0] != wanted[0])[is_token]
        assert float(different.float().mean()) < 1e-3
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-2, atol=0, equal_nan=True)
        return
    for found, right in zip(got, wanted, strict=True):
        assert torch.equal(found[is_token], right[is_token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_step", [False, True], ids=["times", "over"])
@pytest.mark.parametrize("is_native", [False, True], ids=["upcast", "native"])
def test_packed_weights_equal_the_eager_chain(
    dtype: torch.dtype, is_step: bool, is_native: bool
) -> None:
    weight = draw(70, 1365, dtype=dtype)
    mean = weight.float().abs().mean()
    scale = mean if is_step else 1.0 / mean
    settings = {"is_step": is_step, "is_native": is_native}
    found = tiles.pack(weight, scale, **settings)
    assert torch.equal(found, reference.pack(weight, scale, **settings))
    turned = tiles.pack(weight.t().contiguous().t(), scale, **settings)
    assert torch.equal(found, turned)
    codes = reference.unpack_codes(found, 1365)
    assert {-1, 0, 1} == set(codes.unique().tolist())


ONES = {"dtype": torch.float32, "is_step": True, "weight_is_step": True}
CONFIGURATIONS = [
    TileShapes(16, 32, 64, 4, 4),
    TileShapes(16, 64, 128, 4, 4),
    TileShapes(16, 64, 128, 4, 4, 3),
    TileShapes(32, 32, 64, 4, 3),
    TileShapes(64, 128, 64, 4, 3),
    TileShapes(128, 128, 64, 8, 3),
    TileShapes(128, 256, 64, 8, 3),
    TileShapes(64, 64, 32, 4, 3, 2),
]
CHOSEN = {
    tile_shapes(tokens, rows, width, 132)
    for tokens in (5, 32, 64, 100, 256, 4096)
    for rows in (64, 4096, 14336)
    for width in (160, 1024, 3584)
}
"""Every launch that `tile_shapes` names on an H200."""


@pytest.mark.parametrize("shapes", sorted({*CONFIGURATIONS, *CHOSEN}, key=str), ids=str)
def test_integer_sums_are_exact_with_every_tile(shapes: TileShapes) -> None:
    one = torch.ones((), device="cuda")
    for tokens, rows, columns in ((1, 17, 16), (5, 100, 1365), (257, 391, 2064), (17, 64, 14336)):
        x = draw(tokens, columns)
        codes, _, sums = tiles.quantize(x, Quantizer())
        weights = packed(rows, columns)
        ones = torch.ones(tokens, device="cuda")
        found = tiles.product(codes, ones, sums, weights, one, None, shapes=shapes, **ONES)
        assert torch.equal(found.double(), exact(codes, weights)), (tokens, rows, columns)


@pytest.mark.parametrize(
    "shapes", [VectorShapes(2, 2), VectorShapes(8, 4, 3), VectorShapes(16, 8, 2)], ids=str
)
def test_few_tokens_give_the_bits_of_many(shapes: VectorShapes) -> None:
    """Both scale exact sums in the same way, so a row does not depend on its neighbours."""
    for tokens, rows, columns in ((1, 33, 16), (2, 100, 1365), (4, 65, 8640), (3, 7, 4096)):
        x = draw(tokens, columns)
        weights = [packed(n, columns, n) for n in (rows, 16, 3)]
        scale = torch.full((), 33.3, device="cuda")
        bias = [draw(rows), None, None]
        quantizer = Quantizer("topk8")
        settings = {"dtype": torch.bfloat16, "weight_is_step": False}
        found = tiles.vectors(x, weights, [scale] * 3, bias, quantizer, shapes=shapes, **settings)
        codes = tiles.quantize(x, quantizer)
        coded = tiles.vectors(
            x, weights, [scale] * 3, bias, quantizer, coded=codes, shapes=shapes, **settings
        )
        assert all(torch.equal(a, b) for a, b in zip(found, coded, strict=True))
        for got, weight, added in zip(found, weights, bias, strict=True):
            many = tiles.product(*codes, weight, scale, added, is_step=False, **settings)
            assert torch.equal(got, many)
            assert torch.equal(
                many, reference.product(*codes, weight, scale, added, is_step=False, **settings)
            )


@pytest.mark.parametrize("kind", ["int8", "topk8"])
@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("has_up", [False, True], ids=["norm", "gate and norm"])
def test_gates_norms_and_sums_have_the_bits_of_pytorch(
    has_up: bool, tokens: int, kind: str
) -> None:
    """Sums of squares are exact in any order here: small multiples of a quarter."""
    x = draw(tokens, 4096).mul(4).round().clamp(-8, 8).div(4)
    up = torch.ones_like(x) if has_up else None
    norm, added = draw(4096, seed=3), draw(tokens, 200, seed=4)
    weights, scale = packed(200, 4096), torch.full((), 33.3, device="cuda")
    around = (up, norm, 1e-6, added)
    details = (False, kind, 1e-5, False, False, False)
    arguments = (x, [weights], [scale], [None], torch.bfloat16, *details, *around)
    (found,) = ternary_linear(*arguments)
    (early,) = ternary_linear(*arguments, True)
    entering = reference.enter(x, Entry(up, norm, 1e-6))
    (apart,) = ternary_linear(entering, [weights], [scale], [None], torch.bfloat16, *details)
    assert torch.equal(found, added + apart)
    assert torch.equal(found, early)


@pytest.mark.parametrize("is_first", [False, True], ids=["in each program", "first"])
def test_kernels_that_start_early_wait_for_what_they_read(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of calls in a CUDA graph, each of which reads the previous one's result."""
    monkeypatch.setattr(shapes_of, "WORDS_OF_ONE_LAUNCH", 0 if is_first else 1 << 40)
    norm = torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    weights, scale = [packed(2048, 2048, n) for n in range(8)], torch.full((), 9.0, device="cuda")

    def run(x: Tensor, *, is_early: bool) -> Tensor:
        x = x + 1
        for weight in weights * 4:
            details = (False, "int8", 1e-5, False, False, False, None, norm, 1e-6, x, is_early)
            (x,) = ternary_linear(x, [weight], [scale], [None], torch.bfloat16, *details)
        return x

    x = draw(1, 2048)
    wanted = run(x, is_early=False)
    assert torch.equal(run(x, is_early=True), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, is_early=True)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("tokens", [1, 3, 16, 300])
def test_tokens_that_are_no_numbers_stay_so_and_alone(tokens: int) -> None:
    x = draw(tokens, 512)
    x[-1, 7] = float("nan")
    one = torch.ones((), device="cuda")
    (out,) = ternary_linear(x, [packed(40, 512)], [one], [None], torch.bfloat16)
    assert out[-1].isnan().all()
    assert out[:-1].isfinite().all()


def test_gradients_are_those_of_the_eager_chain() -> None:
    x, weight = (draw(300, 260).requires_grad_() for _ in range(2))
    grad = draw(300, 300)
    scale = 1.0 / weight.detach().float().abs().mean()
    weights = ternary_linear_pack(weight.detach(), scale)
    tokens = ternary_linear_quantize(x.detach())
    found = ternary_linear_product(
        x, [weight], *tokens, [weights], [scale], [], [], torch.bfloat16
    )[0]
    got = torch.autograd.grad(found, (x, weight), grad)
    wide = weight.float()
    codes = (wide * scale).round().clamp(-1, 1) / scale
    quantized = weight + (codes.to(weight.dtype) - weight).detach()
    step = 127.0 / x.detach().float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    rounded = ((x.float() * step).round().clamp(-128, 127) / step).to(x.dtype)
    kept = x + (rounded - x).detach()
    wanted = torch.autograd.grad(torch.nn.functional.linear(kept, quantized), (x, weight), grad)
    for mine, theirs in zip(got, wanted, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) < 5e-3


def test_calls_are_captured_in_cuda_graphs_and_repeat_their_bits() -> None:
    x, scale = draw(1, 4096), torch.ones((), device="cuda")
    weights = [packed(4096, 4096), packed(1024, 4096)]

    def run() -> list[Tensor]:
        return ternary_linear(x, weights, [scale] * 2, [None] * 2, torch.bfloat16)

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(first, replayed, strict=True))


def test_addresses_beyond_two_gibibytes_are_reached() -> None:
    """Products of 2 ** 31 elements: the last token is as right as the first."""
    rows, tokens = 1 << 16, (1 << 15) + 3
    x = draw(tokens, 32)
    weights, one = packed(rows, 32), torch.ones((), device="cuda")
    (out,) = ternary_linear(x, [weights], [one], [None], torch.bfloat16)
    (few,) = ternary_linear(x[-4:], [weights], [one], [None], torch.bfloat16)
    assert torch.equal(out[-4:], few)
