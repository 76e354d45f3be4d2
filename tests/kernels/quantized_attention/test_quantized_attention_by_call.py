"""memeff::quantized_attention_by_call: levels in turn, counting, exact cases."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.attention import attention
from memeff_compile.kernels.quantized_attention import (
    by_call,
    counter_for,
    quantized_attention,
    quantized_attention_by_call,
)
from tests.support.coded_attention import half
from tests.support.dense_attention import Case

LEVELS = ["8b", "exact", "8b+f16"]


@pytest.fixture(autouse=True)
def counters() -> Iterator[dict[str, Tensor]]:
    """Hold the counters of two sites, as the graphs that have them would."""
    held.update({site: counter_for(site) for site in "ab"})
    yield held
    held.clear()


held: dict[str, Tensor] = {}


def small() -> Case:
    return half(30, 40, 16)


def call(case: Case, site: str = "a", **bounds: int) -> Tensor:
    found: Tensor = quantized_attention_by_call(
        case.q, case.k, case.v, *case.tables, levels=LEVELS, counter=held[site], **bounds
    )
    return found


def at(case: Case, level: str, **bounds: int) -> Tensor:
    if level == "exact":
        causal = {"is_causal": bounds.get("ahead") == 0}
        return F.scaled_dot_product_attention(case.q, case.k, case.v, enable_gqa=True, **causal)
    found: Tensor = quantized_attention(
        case.q, case.k, case.v, *case.tables, level=level, with_lse=False, **bounds
    )[0]
    return found


def test_levels_are_taken_in_turn_and_from_the_start_again() -> None:
    case = small()
    for level in LEVELS * 2 + LEVELS[:1]:
        assert torch.equal(call(case, ahead=0), at(case, level, ahead=0))
    memeff_compile.restart_attention_calls()
    assert torch.equal(call(case), at(case, LEVELS[0]))


def test_sites_count_apart() -> None:
    case = small()
    assert torch.equal(call(case, "a"), at(case, "8b"))
    assert torch.equal(call(case, "b"), at(case, "8b"))
    assert torch.equal(call(case, "a"), at(case, "exact"))
    assert counter_for("a") is held["a"] is not counter_for("b")


def test_other_levels_and_another_owner_begin_anew() -> None:
    assert counter_for("c", ["8b", "4b"]) is not counter_for("c", ["8b", "exact"])
    owner, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    first = counter_for("c", LEVELS, owner)
    assert counter_for("c", LEVELS, owner) is first
    assert counter_for("c", LEVELS, other) is not first
    key = "c", tuple(LEVELS), id(owner)
    del owner
    assert key not in by_call._counters, "who takes the owner's place would count on"


def test_a_counter_lives_as_long_as_a_graph_has_it() -> None:
    call(small())
    assert int(counter_for("a")) == 1
    held.clear()
    assert int(counter_for("a")) == 0


def test_calls_of_several_threads_are_counted_one_by_one() -> None:
    counter, seen = counter_for("threads", LEVELS), []

    def count() -> None:
        for _ in range(300):
            seen.append(by_call._next(LEVELS, counter, torch.device("cpu")))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [seen.count(level) for level in LEVELS] == [400, 400, 400]


def test_exact_calls_take_conditions_too() -> None:
    case = small()
    mask = torch.arange(40)[None] < 25
    case = Case(case.q, case.k, case.v, (mask, None, None))
    call(case, ahead=3, behind=9)
    wanted = attention(case.q, case.k, case.v, mask, ahead=3, behind=9)[0]
    assert torch.equal(call(case, ahead=3, behind=9), wanted)


def test_results_are_laid_out_alike() -> None:
    case = small()
    assert {call(case).stride() for _ in LEVELS} == {at(case, "8b").stride()}


def test_in_float64_nothing_is_counted() -> None:
    case = small()
    wide = Case(*(each.double() for each in (case.q, case.k, case.v)))
    torch.testing.assert_close(call(wide), at(wide, "exact"))
    assert torch.equal(call(case), at(case, LEVELS[0]))


def test_the_op_is_what_torch_asks_of_one() -> None:
    case = small()
    inputs = (case.q, case.k, case.v)
    settings = {"levels": ["8b"], "counter": counter_for("check"), "ahead": 0}
    torch.library.opcheck(quantized_attention_by_call, inputs, settings)


def test_bad_levels_and_gradients_are_named() -> None:
    case = small()
    for levels in ([], ["9b"]):
        with pytest.raises(UnsupportedInputError, match=r"levels is .*8b"):
            quantized_attention_by_call(case.q, case.k, case.v, levels=levels, counter=held["a"])
    case.q.requires_grad_()
    with pytest.raises(UnsupportedInputError, match="no backward"):
        call(case).sum().backward()
