"""The gated linear on the CPU: values, gradients, writes, allocations."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from memeff_compile.errors import DoubleBackwardError, UnsupportedInputError
from memeff_compile.kernels.gated_linear import (
    ACTIVATIONS,
    ENGINES,
    bytes_after,
    bytes_before,
    engine_for,
    gated_linear,
    gated_linear_backward,
    op,
    reference,
    supports,
    transient_bytes,
)
from tests.support.live_bytes import LiveBytes

EAGER = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "relu": F.relu,
}
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
NAMES = ("gate", "up", "weight", "bias")


def draw(
    shape: tuple[int, ...] = (5, 7), out: int = 3, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Return leaves: gate, up, weight, bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": shape, "up": shape, "weight": (out, shape[-1]), "bias": (out,)}
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, size in shapes.items()
    }


def ours(given: dict[str, Tensor], activation: str, *, bias: bool = True) -> Tensor:
    operands = (given["gate"], given["up"], given["weight"], given["bias"] if bias else None)
    found: Tensor = gated_linear(*operands, activation)
    return found


def eager(given: dict[str, Tensor], activation: str, *, bias: bool = True) -> Tensor:
    product = EAGER[activation](given["gate"]) * given["up"]
    return F.linear(product, given["weight"], given["bias"] if bias else None)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_gradients_equal_eagers_in_fp64(activation: str, dtype: torch.dtype) -> None:
    given = draw((2, 9, 33), 17, dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    found, expected = ours(given, activation), eager(exact, activation)
    assert found.dtype == dtype
    pairs = [(found, expected)]
    pairs += zip(
        gradients(found, list(given.values())),
        gradients(expected, list(exact.values())),
        strict=True,
    )
    for got, want in pairs:
        assert got.shape == want.shape
        assert (got.double() - want).norm() <= ROUNDING[dtype] * want.norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str) -> None:
    given = draw((2, 3))
    assert torch.autograd.gradcheck(
        lambda *leaves: gated_linear(*leaves, activation), tuple(given.values())
    )


@pytest.mark.parametrize("wanted", [("gate",), ("up",), ("weight",), ("bias",), ("gate", "up")])
def test_only_the_gradients_that_are_asked_for_are_made(
    wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: t.requires_grad_(name in wanted) for name, t in _detached(draw()).items()}
    leaves = [given[name] for name in wanted]
    products: list[Tensor] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a: products.append(multiply(*a)) or products[-1])
    found = gradients(ours(given, "silu"), leaves)
    assert len(products) == (0 if wanted == ("bias",) else 1)
    for got, want in zip(found, gradients(eager(given, "silu"), leaves), strict=True):
        torch.testing.assert_close(got, want)


def _detached(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in given.items()}


def test_nothing_of_the_callers_is_written_to() -> None:
    given = draw()
    before = {name: t.detach().clone() for name, t in given.items()}
    leaves = list(given.values())
    out = ours(given, "silu")
    grad = torch.ones_like(out)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad)
    for name in NAMES:
        assert torch.equal(given[name], before[name])
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    assert grad.eq(1).all()


def test_the_backward_op_writes_the_gradients_over_gate_and_up() -> None:
    given = _detached(draw())
    gate, up = given["gate"].clone(), given["up"].clone()
    out = torch.ones(5, 3, dtype=torch.float64)
    grad_weight = gated_linear_backward(out, gate, up, given["weight"], "gelu", True, True)
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    expected = torch.autograd.grad(eager(leaves, "gelu").sum(), [leaves[n] for n in NAMES[:3]])
    for got, want in zip((gate, up, grad_weight), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(7,), (0, 4), (2, 0, 4), (3, 1), (2, 3, 4, 5)], ids=str)
def test_any_shape_is_served(shape: tuple[int, ...]) -> None:
    given = draw(shape)
    found, expected = ours(given, "silu"), eager(given, "silu")
    torch.testing.assert_close(found, expected)
    leaves = list(given.values())
    for got, want in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want)


def test_strided_operands_and_gradients_are_served() -> None:
    given = _detached(draw((4, 6)))
    wide = torch.randn(4, 12, dtype=torch.float64)
    given |= {"gate": wide[:, ::2], "up": torch.randn(6, 4, dtype=torch.float64).t()}
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    found = torch.autograd.grad(ours(leaves, "silu").sum(), list(leaves.values()))  # stride 0
    expected = torch.autograd.grad(eager(leaves, "silu").sum(), list(leaves.values()))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    gate, up = given["gate"].detach(), given["up"].detach()
    before = wide[:, 1::2].clone()
    gated_linear_backward(torch.ones(4, 3).double(), gate, up, given["weight"], "silu", True, False)
    torch.testing.assert_close(gate, expected[0])
    torch.testing.assert_close(up, expected[1])
    assert torch.equal(wide[:, 1::2], before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_numbers_are_eagers(activation: str) -> None:
    """nan where eager has nan, inf where it has inf, and no other.

    Eager in float64: in fp32 torch 2.11 makes nan of gelu(inf) on some processors.
    """
    numbers = [0.0, -0.0, 1e-30, -1e4, 1e4, -88.0, 20.0, float("inf"), -float("inf"), float("nan")]
    gate = torch.tensor(numbers).repeat_interleave(len(numbers)).requires_grad_()
    up = torch.tensor(numbers).repeat(len(numbers)).requires_grad_()
    weight = torch.ones(1, 1)
    found = gated_linear(gate[:, None], up[:, None], weight, None, activation)
    wide = EAGER[activation](gate[:, None].double()) * up[:, None].double()
    expected = F.linear(wide, weight.double()).float()
    torch.testing.assert_close(found, expected, equal_nan=True)
    for got, want in zip(
        gradients(found, [gate, up]), gradients(expected, [gate, up]), strict=True
    ):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-6)


# --- the op as PyTorch sees it --------------------------------------------------------------------


def test_opcheck_passes() -> None:
    given = draw(dtype=torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operands = tuple(given.values())
    torch.library.opcheck(gated_linear, (*operands, "silu"), test_utils=checks)
    torch.library.opcheck(
        gated_linear,
        (*operands[:3], None, "silu"),
        test_utils=(*checks, "test_aot_dispatch_dynamic"),
    )
    plain = [t.detach() for t in operands[:3]]
    for needs in ((True, True), (False, True), (True, False)):
        arguments = (torch.ones(5, 3), *plain, "silu", *needs)
        torch.library.opcheck(gated_linear_backward, arguments, test_utils=checks)


def test_autocast_outside_does_not_reach_the_products() -> None:
    given = draw(dtype=torch.float32)
    expected = ours(given, "silu")
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(given, "silu")
        (grad,) = torch.autograd.grad(found.sum(), given["gate"])
    assert torch.equal(found, expected)
    assert grad.dtype == torch.float32


def test_a_second_derivative_is_refused() -> None:
    given = draw()
    (grad,) = torch.autograd.grad(ours(given, "silu").sum(), given["gate"], create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"memeff\.gated_linear"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"activation": "tanh"}, "activation is 'tanh'; one of silu"),
        ({"up": torch.ones(5, 6).double()}, r"gate has shape \(5, 7\) and up \(5, 6\)"),
        ({"up": torch.ones(5, 7)}, "up has dtype float32 and gate float64"),
        ({"weight": torch.ones(3, 6).double()}, r"weight has shape \(3, 6\)"),
        ({"weight": torch.ones(3).double()}, "2 and 1 dimensions"),
        ({"weight": torch.ones(3, 7).double().to_sparse()}, "stored as torch.sparse_coo"),
        ({"gate": torch.ones(5, 7).long()}, "gate has dtype int64"),
        ({"bias": torch.ones(4).double()}, r"bias has shape \(4,\); \(3,\)"),
        ({"weight": torch.ones(3, 7, device="meta").double()}, "weight is on meta"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_is_refused_with_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    arguments = {**_detached(draw()), "activation": "silu", **changed}
    assert supports(**arguments) is not None
    with pytest.raises(UnsupportedInputError, match=f"gated_linear: .*{sentence}"):
        gated_linear(*arguments.values())


def test_engines_are_named() -> None:
    assert set(ENGINES) == {"in_place", "reference"}
    assert engine_for(torch.device("cpu"), torch.bfloat16) == "reference"


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formula_is_what_is_allocated(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides its arguments, the backward op allocates one tensor, the weight's gradient and
    blocks.
    """
    monkeypatch.setattr(reference, "PIECE", 4096)
    tokens, inner, out = 512, 512, 16
    given = _detached(draw((tokens, inner), out, dtype))
    n, i = sympy.symbols("N I", positive=True, integer=True)
    one = int(transient_bytes(n, i, dtype=dtype).subs({n: tokens, i: inner}))
    assert one == tokens * inner * dtype.itemsize
    assert int(bytes_before(tokens, inner, dtype=dtype)) == 6 * one
    assert int(bytes_after(tokens, inner, dtype=dtype)) == 3 * one
    grad = torch.ones(tokens, out, dtype=dtype)
    pieces = 16 * 4 * reference.PIECE + 8 * inner * out
    with LiveBytes() as seen:
        operands = grad, given["gate"], given["up"], given["weight"]
        op._backward(op._Gradients(*operands, "gelu_tanh", True, True))
    assert one <= seen.peak <= one + pieces
    with LiveBytes() as seen:
        op._forward(given["gate"], given["up"], given["weight"], None, "silu")
    assert one <= seen.peak <= one + pieces
