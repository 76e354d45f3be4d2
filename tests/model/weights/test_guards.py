"""Compiled code looks at one number of a compressed weight, and is right whatever becomes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.kernels.coded_weight import CodedWeight

ROWS, COLUMNS = 512, 64


def make() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, COLUMNS))
    model.bfloat16().requires_grad_(requires_grad=False)
    memeff_compile.compress_(model, min_size=0, progress=False)
    assert isinstance(model[0].weight, CodedWeight)
    return model


def harder(weight: Tensor) -> Tensor:
    """Return values that take other sizes of lists."""
    generator = torch.Generator().manual_seed(1)
    scale = 2.0 ** torch.randint(-30, 30, weight.shape, generator=generator)
    return (torch.randn(weight.shape, generator=generator) * scale).to(weight.dtype)


def graphs() -> int:
    return len(memeff_compile.graphs())


x = torch.ones(1, COLUMNS, dtype=torch.bfloat16)


def check(model: Any, step: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x), rtol=2e-2, atol=2e-2, equal_nan=True)


def started(inner: str = "aot_eager") -> tuple[Any, Any]:
    model = make()
    step = torch.compile(model, backend="memeff", options={"memeff.inner": inner})
    check(model, step)
    check(model, step)
    assert graphs() == 1
    return model, step


def test_a_call_asks_for_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    step = started("eager")[1]
    asked = []
    flatten = CodedWeight.__tensor_flatten__
    monkeypatch.setattr(
        CodedWeight, "__tensor_flatten__", lambda self: asked.append(self) or flatten(self)
    )
    with torch.no_grad():
        step(x)
    assert not asked
    assert graphs() == 1


def test_values_stored_in_place_need_no_new_code() -> None:
    model, step = started()
    model[0].weight.store(model[0].weight.decode() * 2)
    check(model, step)
    assert graphs() == 1


def test_new_parts_compile_anew() -> None:
    model, step = started()
    weight = model[0].weight
    before = [part.shape for part in weight.parts]
    weight.encode_anew(harder(weight.decode()))
    assert [part.shape for part in weight.parts] != before
    check(model, step)
    assert graphs() == 2


def test_a_value_that_is_still_to_be_settled_is_settled_first() -> None:
    model, step = started()
    weight = model[0].weight
    weight.store_soon(harder(weight.decode()))
    with torch.no_grad():
        found = step(x)
        assert torch.equal(model[0].weight.decode(), harder(weight.decode()))
        torch.testing.assert_close(found, model(x), rtol=2e-2, atol=2e-2, equal_nan=True)


def test_another_weight_in_its_place_compiles_anew() -> None:
    model, step = started()
    memeff_compile.decompress_(model)
    check(model, step)
    memeff_compile.compress_(model, "tier", min_size=0, progress=False)
    check(model, step)
    model[0].weight = nn.Parameter(torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16))
    check(model, step)
    model[0].weight = make()[0].weight
    check(model, step)


def test_insides_that_were_swapped_are_noticed() -> None:
    model, step = started()
    other = make()[0].weight
    other.encode_anew(harder(other.decode()))
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(other, requires_grad=False))
    check(model, step)
    assert graphs() == 2


def test_data_of_another_weight_is_noticed() -> None:
    model, step = started()
    other = make()[0].weight
    other.encode_anew(harder(other.decode()))
    model[0].weight.data = other.data
    check(model, step)


def test_copies_and_gradients_have_code_of_their_own() -> None:
    model, step = started()
    copied = copy.deepcopy(model)
    check(copied, torch.compile(copied, backend="memeff", options={"memeff.inner": "aot_eager"}))
    given = x.clone().requires_grad_()
    step(given).sum().backward()
    expected = x.clone().requires_grad_()
    model(expected).sum().backward()
    torch.testing.assert_close(given.grad, expected.grad, rtol=2e-2, atol=2e-2)
    check(model, step)


def test_numbers_tell_apart_what_compiled_code_tells_apart() -> None:
    model = make()
    weight = model[0].weight
    number = weight.number
    for alike in (weight.detach(), copy.copy(weight), copy.deepcopy(weight), torch.Tensor(weight)):
        same = type(alike) is type(weight) and isinstance(alike, nn.Parameter)
        assert (alike.number == number) or not same
    assert make()[0].weight.number == number
    weight.store(weight.decode())
    weight.encode_anew(weight.decode())
    assert weight.number == number
    weight.encode_anew(harder(weight.decode()))
    assert weight.number != number
    assert model[1].weight.number not in (number, weight.number)
