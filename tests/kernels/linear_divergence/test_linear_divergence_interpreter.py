"""The engine `kept_logits` on a CPU: the same kernels, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from memeff_compile.kernels.linear_divergence import Coefficients, reference
from memeff_compile.kernels.linear_divergence.call import ClassRequest, Request
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


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("depth", [16, 144], ids=["its slot", "lent memory"])
def test_tiles_of_products_are_kept_without_a_strip(
    depth: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits

    monkeypatch.setattr(kept_logits, "product_into", None)
    new, vocab, dtype = torch.Generator().manual_seed(0), 600, torch.bfloat16

    def of(size: int, by: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        drawn = [torch.randn(n, generator=new) for n in ((40, size), (vocab, size), (vocab,))]
        hidden, weight, bias = (each.to(dtype) for each in drawn)
        return hidden, by * weight, bias if has_bias else None

    settled = Coefficients(*DIVERGENCES["jsd"][0]).settled()
    given = Request(*of(depth, depth**-0.5), *of(24, 0.2), settled, 0.5, 0.7, 0)
    exact = Request(*(x.double() if isinstance(x, torch.Tensor) else x for x in given))
    factors = torch.linspace(-1, 2, 40)
    found = kept_logits.run(given, factors, (True, True, has_bias))
    wanted = reference.run(exact, factors.double(), (True, True, has_bias))
    for got, expected in zip(found, wanted, strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert (got.double() - expected).norm() / expected.norm() < BOUNDS[dtype]


@pytest.mark.parametrize("is_normalised", [True, False], ids=["log-probabilities", "logits"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_some_classes_of_each_row_are_those_of_the_reference(
    dtype: torch.dtype, is_normalised: bool
) -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits

    hidden, weight, bias, *_ = (each.detach() for each in draw(dtype, vocab=600).values())
    index = torch.tensor([[0, 5, 599], [7, 7, 9], [1, 2, 3], [4, 4, 4], *[[8, 6, 599]] * (N - 4)])
    given = ClassRequest(hidden, weight, bias, index, is_normalised, 0.5, 0)
    wide = {"hidden": hidden.double(), "weight": weight.double(), "bias": bias.double()}
    exact = given._replace(**wide)
    factors = torch.linspace(-1, 2, 3 * N).view(N, 3)
    factors[2] = 0
    found = kept_logits.run_classes(given, factors, (True, True, True))
    wanted = reference.run_classes(exact, factors.double(), (True, True, True))
    for got, expected in zip(found, wanted, strict=True):
        assert got is not None
        assert expected is not None
        assert (got.double() - expected).norm() / expected.norm() < BOUNDS[dtype]


def test_values_alone_need_no_gradient() -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits

    given = request("reverse_kl", torch.float32, is_given=False, workspace=0)
    found = kept_logits.run(given, None, (True, True, True))
    assert found.hidden is None
    wanted = reference.run(given, None, (True, True, True)).rows
    torch.testing.assert_close(found.rows, wanted, rtol=1e-5, atol=1e-5)
    assert len(found.rows) == N


def test_gradients_are_scaled_in_place() -> None:
    from memeff_compile.kernels._head_loss.scaling import run_scaling

    gradient = torch.randn(5000)
    wanted = gradient * 0.3
    run_scaling(gradient, torch.tensor(0.3), gradient)
    torch.testing.assert_close(gradient, wanted)
