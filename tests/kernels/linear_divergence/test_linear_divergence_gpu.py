"""The engine `kept_logits` on a GPU."""

from __future__ import annotations

import pytest
import torch

from memeff_compile.kernels.linear_divergence import Coefficients, kept_logits, reference
from memeff_compile.kernels.linear_divergence.call import Request
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
