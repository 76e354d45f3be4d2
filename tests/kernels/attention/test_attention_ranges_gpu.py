"""Attention's Gluon kernels under padding and packed documents, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels.attention import hopper, hopper_gradients, tiles
from memeff_compile.kernels.attention.call import Call
from tests.support.attention_tables import KINDS, tables
from tests.support.dense_attention import Case, assert_equals_dense, draw, gradient_like

pytestmark = pytest.mark.gpu


def call_of(case: Case) -> Call:
    """Return a call as the kernels in Gluon take it, or skip the test if they do not support it."""
    bounds = (case.settings.get("ahead"), case.settings.get("behind"))
    scale = case.settings.get("scale", case.q.shape[3] ** -0.5)
    given = Conditions(*case.tables, *bounds, scale, 0.0, mean=False)
    call = tiles._call(case.q, case.k, case.v, given)
    if not hopper.serves(call):
        pytest.skip("needs compute capability 9.0 and Gluon")
    return call


def found_by(case: Case, grad: Tensor) -> tuple[Tensor, ...]:
    call = call_of(case)
    out, lse = hopper.attend(call)
    assert hopper_gradients.serves(call, grad, out)
    return (out, lse, *hopper_gradients.gradients(call, grad, out, lse))


def check(case: Case) -> None:
    case = case.to("cuda")
    grad = gradient_like(case)
    found = found_by(case, grad)
    assert all(map(torch.equal, found, found_by(case, grad)))
    assert_equals_dense(found, case, grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [128, 64])
def test_causal_attention_under_tables(kind: str, depth: int) -> None:
    for groups, length in ((2, 1008), (4, 640)):
        case = draw(4, 4, groups, length, length, depth, torch.bfloat16, ahead=0)
        check(Case(case.q, case.k, case.v, tables(kind, 4, length, length), case.settings))


@pytest.mark.parametrize("kind", ["right padding", "documents", "documents in turn and gaps"])
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((4, 4, 2, 704, 1008), {}),
        ((4, 4, 1, 1008, 704), {"ahead": 0, "behind": 200}),
        ((2, 4, 4, 144, 1168), {"ahead": 1024}),
        ((4, 4, 2, 912, 304), {"ahead": -200}),
    ],
    ids=str,
)
def test_other_bounds_under_tables(
    kind: str, sizes: tuple[int, int, int, int, int], settings: dict[str, int]
) -> None:
    case = draw(*sizes, 128, torch.float16, **settings)
    check(Case(case.q, case.k, case.v, tables(kind, sizes[0], *sizes[3:]), case.settings))


@pytest.mark.parametrize("kind", ["left padding", "documents", "documents and padding"])
def test_attention_without_causal_mask_under_tables(kind: str) -> None:
    case = draw(4, 4, 2, 912, 912, 64, torch.bfloat16)
    check(Case(case.q, case.k, case.v, tables(kind, 4, 912, 912), case.settings))


@pytest.mark.parametrize("kind", ["left padding", "documents"])
def test_peaked_weights_under_tables(kind: str) -> None:
    case = draw(3, 4, 2, 700, 700, 128, torch.bfloat16, ahead=0, scale=1.5)
    check(Case(case.q, case.k, case.v, tables(kind, 3, 700, 700), case.settings))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("depth", [128, 64])
@pytest.mark.parametrize(
    "kind", ["right padding", "left padding", "documents and padding", "keys with gaps"]
)
def test_what_hidden_keys_hold_reaches_nothing(kind: str, depth: int, bad: float) -> None:
    case = draw(4, 4, 2, 912, 912, depth, torch.bfloat16, ahead=0)
    case = Case(case.q, case.k, case.v, tables(kind, 4, 912, 912), case.settings).to("cuda")
    mask = case.tables[0]
    assert mask is not None
    hidden = ~mask[:, None, :, None]
    k, v = (each.masked_fill(hidden, bad) for each in (case.k, case.v))
    filled = Case(case.q, k, v, case.tables, case.settings)
    grad = gradient_like(case)
    assert all(map(torch.equal, found_by(filled, grad), found_by(case, grad)))


def test_a_captured_call_follows_its_tables() -> None:
    case = draw(4, 4, 2, 640, 640, 128, torch.bfloat16, ahead=0)
    case = Case(case.q, case.k, case.v, tables("right padding", 4, 640, 640), case.settings)
    case = case.to("cuda")
    mask = case.tables[0]
    assert mask is not None
    grad = gradient_like(case)
    found_by(case, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = found_by(case, grad)
    mask.copy_(mask.flip(1))
    graph.replay()
    assert all(map(torch.equal, held, found_by(case, grad)))
