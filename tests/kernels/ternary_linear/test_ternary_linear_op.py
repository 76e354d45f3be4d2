"""memeff::ternary_linear on a CPU: codes, exact sums, layouts, gradients, refusals, opcheck."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memeff_compile.errors import DoubleBackwardError, UnsupportedInputError
from memeff_compile.kernels.ternary_linear import (
    KINDS,
    Quantizer,
    packed_bytes,
    reference,
    saved_after,
    saved_before,
    supports,
    ternary_linear,
    ternary_linear_pack,
    ternary_linear_product,
    ternary_linear_quantize,
    ternary_linear_repack,
)
from tests.support.ternary_layers import tokens_int4, tokens_int8, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def codes_of(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (rows, columns), generator=generator).to(torch.int8)


def unplaned(codes: Tensor, columns: int) -> Tensor:
    return reference.from_planes(codes, columns)


# --- layouts --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 99))
def test_packing_loses_nothing(rows: int, columns: int, seed: int) -> None:
    codes = codes_of(rows, columns, seed)
    packed = reference.pack_codes(codes)
    assert packed.nbytes == packed_bytes(rows, columns)
    assert torch.equal(reference.unpack_codes(packed, columns), codes)
    planes = reference.to_planes(codes)
    assert torch.equal(reference.from_planes(planes, columns), codes)


def test_a_word_holds_its_columns_where_the_page_says() -> None:
    codes = codes_of(1, 16)
    (word,) = reference.pack_codes(codes).flatten().tolist()
    planes = reference.to_planes(codes)
    for byte, field in itertools.product(range(4), range(4)):
        column = 4 * field + byte
        assert (word >> (8 * byte + 2 * field)) & 3 == int(codes[0, column]) + 1
        assert planes[0, field, byte] == codes[0, column]


def test_all_bytes_of_codes_survive_the_layout_of_transformers() -> None:
    from transformers.integrations.bitnet import pack_weights

    every = torch.tensor(list(itertools.product((-1, 0, 1), repeat=4)), dtype=torch.float32).t()
    stored = pack_weights(every.clone())
    assert stored.shape == (1, 81)
    found = ternary_linear_repack(stored)
    assert torch.equal(reference.unpack_codes(found, 81).float(), every)


# --- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_native", [False, True], ids=["upcast", "native"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_tokens_are_those_of_the_published_chain(
    kind: str, is_native: bool, dtype: torch.dtype
) -> None:
    """Element for element, in the dtype that the chain computes in; zeros and outliers included."""
    x = torch.randn(6, 37).to(dtype)
    x[0], x[1, 5] = 0, 3e4
    x[2] = torch.arange(37).to(dtype) / 2
    quantizer = Quantizer(kind, adds_eps=kind == "int4", is_native=is_native)
    chain = tokens_int4 if kind == "int4" else tokens_int8
    wanted = chain(x) if is_native else chain(x.float()).to(dtype)
    codes, scale, sums = ternary_linear_quantize(x, *quantizer.arguments())
    found = reference.dequantized_tokens(codes, scale, 37, is_step=False, dtype=dtype)
    finite = wanted.isfinite().all(-1)
    assert torch.equal(found[finite], wanted[finite])
    assert not scale[~finite].isfinite().any()
    assert torch.equal(sums, unplaned(codes, 37).sum(-1, dtype=torch.int32))


def test_the_reciprocal_is_pytorchs() -> None:
    """127 / t is reciprocal(t) * 127 in PyTorch: another float than the quotient in one row of four."""
    x = torch.randn(2000, 8)
    _, scale, _ = ternary_linear_quantize(x)
    largest = x.abs().amax(-1)
    assert torch.equal(scale, 127 / largest)
    assert not torch.equal(scale, torch.full_like(largest, 127.0).div(largest))


def test_four_bit_floats_are_the_nearest_ones() -> None:
    x = torch.randn(50, 64)
    codes, scale, _ = ternary_linear_quantize(x, "fp4")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat([-values.flip(0), values]) / 6 * x.abs().amax(-1, keepdim=True)[:, :, None]
    nearest = (x[:, :, None] - grid).abs().amin(-1)
    found = unplaned(codes, 64) / scale[:, None]
    assert torch.allclose((x - found).abs(), nearest, atol=1e-6)
    assert set(codes.abs().unique().tolist()) <= {0, 1, 2, 3, 4, 6, 8, 12}


def test_four_bit_floats_round_ties_to_even() -> None:
    halves = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75]])
    codes, _, _ = ternary_linear_quantize(halves, "fp4")
    assert unplaned(codes, 10).tolist() == [[12, 0, 2, 2, 4, 4, 8, 8, 0, -2]]


def test_the_larger_half_is_kept_with_its_ties() -> None:
    x = torch.tensor([[4.0, -3.0, 2.0, 2.0, -2.0, 1.0, 0.5, 0.0]])
    codes, _, _ = ternary_linear_quantize(x, "topk8")
    assert unplaned(codes, 8).ne(0).tolist() == [[True] * 5 + [False] * 3]
    whole, _, _ = ternary_linear_quantize(x, "int8")
    assert torch.equal(unplaned(codes, 8)[0, :5], unplaned(whole, 8)[0, :5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_native", [False, True], ids=["upcast", "native"])
def test_packed_weights_are_those_of_the_published_chain(
    dtype: torch.dtype, is_native: bool
) -> None:
    weight = torch.randn(40, 33).to(dtype)
    held = weight if is_native else weight.float()
    scale = 1.0 / held.abs().mean().clamp(min=1e-5)
    packed = ternary_linear_pack(weight, scale, False, is_native)
    found = reference.unpack_codes(packed, 33).to(held.dtype) / scale
    assert torch.equal(found, weights(held))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_token_that_is_no_number_stays_so_and_alone(bad: float) -> None:
    x, scale = torch.randn(3, 20), torch.ones(())
    x[1, 4] = bad
    (out,) = ternary_linear(x, [reference.pack_codes(codes_of(6, 20))], [scale], [None], x.dtype)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert tokens_int8(x)[1].isnan().any(), "the chain itself gives nan there"


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 16, 37, 1365])
@pytest.mark.parametrize("tokens", [1, 2, 5, 17])
def test_sums_are_exact(tokens: int, columns: int) -> None:
    x, weight = torch.randn(tokens, columns), codes_of(23, columns)
    one = torch.ones(())
    codes, scale, sums = ternary_linear_quantize(x, is_step=True)
    found = ternary_linear_product(
        x, [weight.float()], codes, torch.ones_like(scale), sums, [reference.pack_codes(weight)],
        [one], [], [], torch.float32, True, True,
    )[0]  # fmt: skip
    wanted = unplaned(codes, columns).long() @ weight.long().t()
    assert torch.equal(found.long(), wanted)


def test_sums_beyond_what_float32_holds_are_exact() -> None:
    columns = 140_000
    codes = torch.full((1, columns), 127, dtype=torch.int8)
    packed = reference.pack_codes(torch.ones((1, columns), dtype=torch.int8))
    assert reference.accumulate(codes, packed).item() == 127 * columns


@pytest.mark.parametrize("kind", list(KINDS))
def test_one_call_for_several_matrices_gives_what_calls_for_each_give(kind: str) -> None:
    x = torch.randn(2, 3, 20).to(torch.bfloat16)
    packed = [reference.pack_codes(codes_of(n, 20, n)) for n in (4, 7)]
    scales, biases = [torch.tensor(3.0), torch.tensor(0.5)], [None, torch.randn(7)]
    settings_of = (torch.bfloat16, False, *Quantizer(kind).arguments())
    both = ternary_linear(x, packed, scales, biases, *settings_of)
    for place in range(2):
        (alone,) = ternary_linear(
            x, packed[place : place + 1], scales[place : place + 1], biases[place : place + 1],
            *settings_of,
        )  # fmt: skip
        assert torch.equal(both[place], alone)
        assert alone.shape == (2, 3, (4, 7)[place])


@pytest.mark.parametrize(("tokens", "rows"), [(0, 5), (3, 0)], ids=["no tokens", "no rows"])
def test_empty_operands_give_empty_results(tokens: int, rows: int) -> None:
    x = torch.randn(tokens, 16, requires_grad=True)
    weight = torch.randn(rows, 16, requires_grad=True)
    scale = torch.ones(())
    packed = ternary_linear_pack(weight.detach(), scale)
    tokens_of = ternary_linear_quantize(x.detach())
    out = ternary_linear_product(x, [weight], *tokens_of, [packed], [scale], [], [], x.dtype)[0]
    assert out.shape == (tokens, rows)
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_bits_of_the_models_own(dtype: torch.dtype) -> None:
    """The backward multiplies the dequantised operands, made again from the codes."""
    x = torch.randn(2, 9, 36).to(dtype).requires_grad_()
    weight = torch.randn(20, 36).to(dtype).requires_grad_()
    bias = torch.randn(20).to(dtype).requires_grad_()
    grad = torch.randn(2, 9, 20).to(dtype)
    scale = 1.0 / weight.detach().float().abs().mean()
    packed = ternary_linear_pack(weight.detach(), scale)
    tokens = ternary_linear_quantize(x.detach())
    out = ternary_linear_product(x, [weight], *tokens, [packed], [scale], [bias], [0], dtype)[0]
    found = torch.autograd.grad(out, (x, weight, bias), grad)
    x_quant = tokens_int8(x.detach().float()).to(dtype)
    w_quant = weights(weight.detach().float()).to(dtype)
    flat = grad.reshape(-1, 20)
    wanted = (grad @ w_quant, flat.t() @ x_quant.reshape(-1, 36), flat.sum(0))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, theirs.view_as(mine))


def test_one_product_of_several_weights_has_the_gradients_of_products_of_each() -> None:
    """A bias here and there, a frozen weight, and a matrix without rows among them."""
    x = torch.randn(2, 9, 36, requires_grad=True)
    weight = [torch.randn(rows, 36, requires_grad=rows != 8) for rows in (20, 8, 0, 4)]
    bias = {1: torch.randn(8, requires_grad=True), 3: torch.randn(4, requires_grad=True)}
    scale = [w.detach().abs().mean().nan_to_num(1.0).reciprocal() for w in weight]
    packed = [ternary_linear_pack(w.detach(), s) for w, s in zip(weight, scale, strict=True)]
    tokens = ternary_linear_quantize(x.detach())

    def product(places: list[int]) -> list[Tensor]:
        return ternary_linear_product(
            x, [weight[n] for n in places], *tokens, [packed[n] for n in places],
            [scale[n] for n in places], [bias[n] for n in places if n in bias],
            [places.index(n) for n in places if n in bias], torch.float32,
        )  # fmt: skip

    wanted = [product([place])[0] for place in range(4)]
    found = product([0, 1, 2, 3])
    leaves = [x, weight[0], weight[3], *bias.values()]
    grad = [torch.randn(2, 9, rows) for rows in (20, 8, 0, 4)]
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)
    got = torch.autograd.grad(found, leaves, grad)
    for mine, theirs in zip(got, torch.autograd.grad(wanted, leaves, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2]])
def test_a_result_without_a_gradient_gives_its_weight_and_bias_none(used: list[int]) -> None:
    """None, as with separate products, not zeros: an optimizer would move a parameter with
    zeros.
    """
    x = torch.randn(5, 36, requires_grad=True)
    weight = [torch.randn(rows, 36, requires_grad=True) for rows in (20, 8, 4)]
    bias = {1: torch.randn(8, requires_grad=True), 2: torch.randn(4, requires_grad=True)}
    scale = [w.detach().abs().mean().reciprocal() for w in weight]
    packed = [ternary_linear_pack(w.detach(), s) for w, s in zip(weight, scale, strict=True)]
    tokens = ternary_linear_quantize(x.detach())

    def product(places: list[int]) -> list[Tensor]:
        return ternary_linear_product(
            x, [weight[n] for n in places], *tokens, [packed[n] for n in places],
            [scale[n] for n in places], [bias[n] for n in places if n in bias],
            [places.index(n) for n in places if n in bias], torch.float32,
        )  # fmt: skip

    leaves = [x, *weight, *bias.values()]
    together, (apart,) = product([0, 1, 2]), zip(*map(product, [[0], [1], [2]]), strict=True)
    start = torch.zeros((), requires_grad=True)
    found, wanted = (
        torch.autograd.grad(
            sum((outs[n].sin().sum() for n in used), start), leaves, allow_unused=True
        )
        for outs in (together, apart)
    )
    assert [each is None for each in found] == [each is None for each in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_graph_that_hands_on_an_undefined_gradient_gives_none() -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return None

    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    scale = torch.ones(())
    packed, tokens = (
        ternary_linear_pack(weight.detach(), scale),
        ternary_linear_quantize(x.detach()),
    )
    out = ternary_linear_product(x, [weight], *tokens, [packed], [scale], [], [], x.dtype)[0]
    Cut.apply(out).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is None
    assert weight.grad is None


def test_only_codes_are_saved() -> None:
    x, weight = torch.randn(30, 64, requires_grad=True), torch.randn(50, 64, requires_grad=True)
    scale = torch.ones(())
    packed, tokens = (
        ternary_linear_pack(weight.detach(), scale),
        ternary_linear_quantize(x.detach()),
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ternary_linear_product(x, [weight], *tokens, [packed], [scale], [], [], x.dtype)[0]
    assert sum(t.nbytes for t in saved) == saved_after(50, 64, 30) + scale.nbytes
    assert saved_before(50, 64, 30, dtype=torch.bfloat16) == 2 * 64 * 80


def test_a_second_derivative_and_a_gradient_through_packed_weights_raise() -> None:
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    scale = torch.ones(())
    packed, tokens = (
        ternary_linear_pack(weight.detach(), scale),
        ternary_linear_quantize(x.detach()),
    )
    out = ternary_linear_product(x, [weight], *tokens, [packed], [scale], [], [], x.dtype)[0]
    grad = torch.ones_like(out, requires_grad=True)
    (first,) = torch.autograd.grad(out, x, grad, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="first derivative only"):
        first.sum().backward()
    with pytest.raises(UnsupportedInputError, match="ternarize_"):
        ternary_linear(x, [packed], [scale], [None], x.dtype)[0].sum().backward()


# --- refusals and contracts -----------------------------------------------------------------------

X, W = torch.randn(3, 32), torch.randn(8, 32)
PACKED, ONE = reference.pack_codes(codes_of(8, 32)), torch.ones(())
REFUSED = {
    "float64": (lambda: ternary_linear_quantize(X.double()), "float64"),
    "kind": (lambda: ternary_linear_quantize(X, "int3"), "int3"),
    "scale per row": (lambda: ternary_linear_pack(W, torch.ones(8)), "one scale"),
    "weight of integers": (lambda: ternary_linear_pack(W.long(), ONE), "int64"),
    "columns": (lambda: ternary_linear(X[:, :9], [PACKED], [ONE], [None], X.dtype), "words"),
    "packed dtype": (lambda: ternary_linear(X, [W], [ONE], [None], X.dtype), "int32"),
    "bias": (lambda: ternary_linear(X, [PACKED], [ONE], [torch.ones(3)], X.dtype), "bias"),
    "counts": (lambda: ternary_linear(X, [PACKED], [ONE, ONE], [None], X.dtype), "as many"),
    "no matrix": (lambda: ternary_linear(X, [], [], [], X.dtype), "at least one"),
    "stored layout": (lambda: ternary_linear_repack(PACKED), "uint8"),
    "too wide": (lambda: ternary_linear_quantize(torch.ones(1, 40_000)), "columns"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_served_is_refused_in_a_sentence(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(UnsupportedInputError, match=message):
        call()


def test_supports_says_why_not() -> None:
    assert supports(X, W) is None
    assert "columns" in str(supports(X[:, :5], W))
    assert "plain strided" in str(supports(X, W.to_sparse()))
    assert "bias" in str(supports(X, W, torch.ones(3)))


def test_opcheck() -> None:
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    tokens = ternary_linear_quantize(X)
    lists = ([PACKED] * 2, [ONE] * 2, [torch.ones(8).requires_grad_()], [1])
    product = (x, [weight] * 2, *tokens, *lists, torch.float32)
    torch.library.opcheck(ternary_linear_product, product)
    torch.library.opcheck(ternary_linear, (X, [PACKED] * 2, [ONE] * 2, [None] * 2, X.dtype))
    torch.library.opcheck(ternary_linear_quantize, (X, "topk8"))
    torch.library.opcheck(ternary_linear_pack, (W, ONE))
    torch.library.opcheck(ternary_linear_repack, (torch.zeros(2, 8, dtype=torch.uint8),))


def test_a_matrix_without_rows_leaves_the_others_as_they_are() -> None:
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    one = torch.ones(())
    packed, none = ternary_linear_pack(weight, one), ternary_linear_pack(weight[:0], one)
    alone = ternary_linear(x, [packed], [one], [None], torch.float32)[0]
    both = ternary_linear(x, [packed, none], [one, one], [None, None], torch.float32)
    assert torch.equal(both[0], alone)
    assert both[1].shape == (3, 0)
