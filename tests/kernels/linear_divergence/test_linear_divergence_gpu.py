"""The engine `kept_logits` on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from memeff_compile.kernels.linear_divergence import Coefficients, kept_logits, reference
from memeff_compile.kernels.linear_divergence.call import ClassRequest, Request
from tests.kernels.linear_divergence.divergences import DIVERGENCES

pytestmark = pytest.mark.gpu

BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 8e-3, torch.float32: 3e-5}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_results_are_exact_and_repeat_bit_for_bit(dtype: torch.dtype, name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, depth, of_teacher, vocab = 1300, 512, 384, 32_011
    new = torch.Generator(device="cuda").manual_seed(0)

    def draw(*size: int, by: float = 1.0) -> torch.Tensor:
        return (by * torch.randn(size, device="cuda", generator=new)).to(dtype)

    settled = Coefficients(*DIVERGENCES[name][0]).settled()
    given = Request(
        *(draw(rows, depth), draw(vocab, depth, by=0.1), draw(vocab)),
        *(draw(rows, of_teacher), draw(vocab, of_teacher, by=0.1), None),
        *(settled, 0.5, 0.7, 0),
    )
    factors = torch.rand(rows, device="cuda", generator=new)
    exact = Request(*(x.double() if isinstance(x, torch.Tensor) else x for x in given))
    wanted = reference.run(exact, factors.double(), (True, True, True))
    found = kept_logits.run(given, factors, (True, True, True))
    again = kept_logits.run(given, factors, (True, True, True))
    for got, same, expected in zip(found, again, wanted, strict=True):
        assert got is not None
        assert expected is not None
        assert torch.equal(got, same)
        assert (got.double() - expected).norm() / expected.norm() < BOUNDS[dtype]


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("rows", [300, 3000], ids=["lent memory", "slots"])
def test_tiles_of_products_are_exact(rows: int, has_bias: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    new, vocab, dtype = torch.Generator(device="cuda").manual_seed(0), 130_011, torch.bfloat16

    def of(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        sizes = ((rows, size), (vocab, size), (vocab,))
        drawn = [torch.randn(each, device="cuda", generator=new) for each in sizes]
        hidden, weight, bias = (each.to(dtype) for each in drawn)
        return hidden, (3 * size**-0.5) * weight, bias if has_bias else None

    settled = Coefficients(*DIVERGENCES["jsd"][0]).settled()
    given = Request(*of(1024), *of(512), settled, 0.5, 0.7, 0)
    factors = torch.rand(rows, device="cuda", generator=new)
    exact = Request(*(x.double() if isinstance(x, torch.Tensor) else x for x in given))
    wanted = reference.run(exact, factors.double(), (True, True, has_bias))
    found = kept_logits.run(given, factors, (True, True, has_bias))
    for got, expected in zip(found, wanted, strict=True):
        if got is not None and expected is not None:
            assert (got.double() - expected).norm() / expected.norm() < BOUNDS[dtype]


@pytest.mark.parametrize("is_normalised", [True, False], ids=["log-probabilities", "logits"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_some_classes_of_each_row_are_exact_and_repeat(
    dtype: torch.dtype, is_normalised: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, depth, vocab, count = 1300, 512, 32_011, 50
    new = torch.Generator(device="cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(size, device="cuda", generator=new) for size in ((rows, depth), (vocab, depth))
    )
    hidden, weight = hidden.to(dtype), (0.1 * weight).to(dtype)
    index = torch.randint(0, vocab, (rows, count), device="cuda", generator=new)
    index[:, 1] = index[:, 0]
    given = ClassRequest(hidden, weight, None, index, is_normalised, 0.5, 0)
    factors = torch.rand((rows, count), device="cuda", generator=new)
    exact = given._replace(hidden=hidden.double(), weight=weight.double())
    wanted = reference.run_classes(exact, factors.double(), (True, True, False))
    found = kept_logits.run_classes(given, factors, (True, True, False))
    again = kept_logits.run_classes(given, factors, (True, True, False))
    for got, same, expected in zip(found[:3], again[:3], wanted[:3], strict=True):
        assert torch.equal(got, same)
        assert (got.double() - expected).norm() / expected.norm() < BOUNDS[dtype]


def test_a_number_that_is_no_class_fails_a_device_assertion() -> None:
    program = """
import torch
from memeff_compile import linear_divergence
hidden, weight = torch.ones(2, 8, device="cuda"), torch.ones(5, 8, device="cuda")
logs = torch.zeros(2, 1, device="cuda")
linear_divergence(hidden, weight, logs, classes=torch.tensor([[4], [5]], device="cuda"))
torch.cuda.synchronize()
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert found.returncode
    assert "a class number is outside 0 .. 4" in found.stdout + found.stderr
