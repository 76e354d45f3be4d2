"""The engine `kept_logits` on a CPU: the same kernels, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from memeff_compile.kernels.linear_divergence import Coefficients, reference
from memeff_compile.kernels.linear_divergence.call import Request
from tests.kernels.linear_divergence.divergences import DIVERGENCES, N, draw

pytestmark = pytest.mark.interpreter

# The interpreter stores 16 bits by cutting bits off, which doubles the error of rounding.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FACTORS = torch.tensor([1.0, 0.0, 2.0, 0.5, -1.0, 1.0, 3.0])


def request(name: str, dtype: torch.dtype, *, is_given: bool, workspace: int) -> Request:
    given = {key: value.detach() for key, value in draw(dtype).items()}
    hidden, weight, bias, teacher, of_teacher, teacher_bias = given.values()
    if is_given:
        teacher = (teacher.float() @ of_teacher.float().t()).to(dtype)
    last = (teacher, None, None) if is_given else (teacher, of_teacher, teacher_bias)
    settled = Coefficients(*DIVERGENCES[name][0]).settled()
    return Request(hidden, weight, bias, *last, settled, 0.5, 0.7, workspace)


@pytest.mark.parametrize("is_given", [False, True], ids=["a head", "logits"])
@pytest.mark.parametrize("workspace", [0, 60_000], ids=["one block", "blocks"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_results_are_those_of_the_reference(
    name: str, dtype: torch.dtype, workspace: int, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits

    monkeypatch.setattr(kept_logits, "STRIP", 2048)  # two strips
    given = request(name, dtype, is_given=is_given, workspace=workspace)
    exact = Request(*(x.double() if isinstance(x, torch.Tensor) else x for x in given))
    found = kept_logits.run(given, FACTORS, (True, True, True))
    wanted = reference.run(exact, FACTORS.double(), (True, True, True))
    for got, expected in zip(found, wanted, strict=True):
        assert got is not None
        assert expected is not None
        error = (got.double() - expected).norm() / expected.norm()
        assert error < BOUNDS[dtype]
    assert found.hidden is not None
    assert not found.hidden[1].any()  # a row without weight


def test_values_alone_need_no_gradient() -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits

    given = request("reverse_kl", torch.float32, is_given=False, workspace=0)
    found = kept_logits.run(given, None, (True, True, True))
    assert found.hidden is None
    wanted = reference.run(given, None, (True, True, True)).rows
    torch.testing.assert_close(found.rows, wanted, rtol=1e-5, atol=1e-5)
    assert len(found.rows) == N


def test_gradients_are_scaled_in_place() -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits

    gradient = torch.randn(5000)
    wanted = gradient * 0.3
    kept_logits.scale_into(gradient, torch.tensor(0.3), gradient)
    torch.testing.assert_close(gradient, wanted)
