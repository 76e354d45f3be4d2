"""Heads written as einsum: letters, an ellipsis, an implied output; and look-alikes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile

D, V = 16, 160
SIZES = {"b": 2, "t": 7, "d": D, "v": V, "i": D, "j": V}
TARGETS = torch.randint(0, V, (14,), generator=torch.Generator().manual_seed(0))

FUSED = [
    "btd,vd->btv",
    "btd,dv->btv",
    "vd,btd->btv",
    "...d,vd->...v",
    "vd,...d->...v",
    "... d, d v -> ... v",
    "b...d,vd->b...v",
    "bt...d,...vd->bt...v",
    "...d,...vd->...v",
    "bti,vi->btv",
    "...i,ji",
    "ji,...i",
]
"""With the hidden states as (2, 7, D)."""

LEFT = [
    "...d,vd->v...",  # classes first
    "tbd,vd->btv",  # rows in another order
    "...d,vd->...vd",  # no contraction
    "...dt,vd->...tv",  # contracted over a dimension that is not the last
    "bti,ji",  # implied: letters in the order of the alphabet, so classes before rows
]


def shape_of(operand: str, is_weight: bool) -> list[int]:
    hidden = "".join(letter for letter in "bt" if letter not in operand)
    return [SIZES[letter] for letter in operand.replace("...", "" if is_weight else hidden)]


def run(equation: str, compiled: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    is_weight = [set(each) & set("vj") != set() for each in inputs]
    operands = [
        torch.randn(shape_of(each, of_weight)).requires_grad_()
        for each, of_weight in zip(inputs, is_weight, strict=True)
    ]

    def loss(*given: Tensor) -> Tensor:
        logits = torch.einsum(equation, *given)
        return F.cross_entropy(logits.reshape(-1, V), TARGETS.repeat(logits.numel() // (14 * V)))

    function = torch.compile(loss, backend="memeff", options={"memeff.inner": "eager"})
    found = (function if compiled else loss)(*operands)
    return found, list(torch.autograd.grad(found, operands))


@pytest.mark.parametrize("equation", FUSED)
def test_a_head_is_one_however_einsum_spells_it(equation: str) -> None:
    memeff_compile.reset()
    found, gradients = run(equation, True)
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    expected, wanted = run(equation, False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("equation", LEFT)
def test_what_is_no_head_is_left_alone(equation: str) -> None:
    memeff_compile.reset()
    torch._dynamo.reset()
    found, gradients = run(equation, True)
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 0
    expected, wanted = run(equation, False)
    assert torch.equal(found, expected)
    torch.testing.assert_close(gradients, wanted)
