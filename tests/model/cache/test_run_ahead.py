"""generate() asks one step late whether it has ended: the same tokens, and only if unobservable.

The CPU replaces the GPU; it has no events, so no wait is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StaticCache, StoppingCriteria
from transformers.generation import utils as generation
from transformers.generation.stopping_criteria import StoppingCriteriaList

import memeff_compile
from memeff_compile.model.cache import run_ahead
from tests.support.cached_models import make, prompt

NEW = 8
IDS = prompt(3, 20)


class Event:
    def __init__(self, device: torch.device, blocking: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each generate() that asks late."""
    if not hasattr(generation, "DeferredStopCheck"):
        pytest.skip("transformers before 5.17 asks after each token, and cannot be told otherwise")
    found: list[bool] = []
    made = generation.DeferredStopCheck.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(True)
        made(self, *args, **kwargs)

    monkeypatch.setattr(generation.DeferredStopCheck, "__init__", noted)
    monkeypatch.setattr(run_ahead, "DEVICES", ("cpu",))
    monkeypatch.setattr(torch, "Event", Event)
    return found


def plain() -> Any:
    return make(num_hidden_layers=1)


def used(bits: int = 16) -> Any:
    model = plain()
    memeff_compile.use_kv_cache_(model, bits=bits)
    return model


def generated(model: Any, **settings: Any) -> Any:
    return model.generate(IDS, **{"max_new_tokens": NEW, "do_sample": False, **settings})


@functools.cache
def ends() -> list[list[int]]:
    """Return tokens to end with so that sequences end at the first token, soon, and never."""
    tokens = generated(plain())[:, IDS.shape[1] :]
    return [tokens[:, 0].tolist(), [*tokens[:2, 1].tolist(), int(tokens[2, 4])], [63]]


class Streamer:
    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("bits", [16, 4])
def test_tokens_and_streams_are_those_of_a_loop_that_waits(late: list[bool], bits: int) -> None:
    exact, model = plain(), used(bits)
    for end in ends():
        theirs = Streamer()
        cache = memeff_compile.KVCache(exact.config, 64, bits)
        asked = {"eos_token_id": end, "streamer": theirs}
        expected = generated(exact, past_key_values=cache, **asked)
        for _ in range(2):  # the second with a cache that was used before
            ours = Streamer()
            found = generated(model, eos_token_id=end, streamer=ours)
            assert torch.equal(found, expected)
            assert ours.tokens == theirs.tokens
            assert ours.has_ended
    assert len(late) == 2 * len(ends())


def test_a_step_too_many_is_made_only_where_an_end_was_met(late: list[bool]) -> None:
    model = used()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    never = generated(model)
    assert len(calls) == NEW
    calls.clear()
    found = generated(model, eos_token_id=ends()[0])
    new = found.shape[1] - IDS.shape[1]
    assert new < never.shape[1] - IDS.shape[1]
    assert len(calls) == new + 1
    assert len(late) == 2


class OwnProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class OwnCriterion(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def own_processor() -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([OwnProcessor()])}


def own_criterion() -> dict[str, Any]:
    return {"stopping_criteria": StoppingCriteriaList([OwnCriterion()])}


CASES: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "greedy": (dict, True),
    "processors of transformers": (lambda: {"repetition_penalty": 1.3, "min_length": 24}, True),
    "sampling that only its length ends": (lambda: {"do_sample": True, "eos_token_id": None}, True),
    "sampling": (lambda: {"do_sample": True}, False),
    "own processor": (own_processor, False),
    "own processor where only the length ends it": (
        lambda: {**own_processor(), "eos_token_id": None},
        True,
    ),
    "own criterion": (own_criterion, False),
    "a function of the user's": (
        lambda: {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(64))},
        False,
    ),
    "the cache is returned": (lambda: {"return_dict_in_generate": True}, False),
    "synchronised processes": (lambda: {"synced_gpus": True}, False),
    "beams": (lambda: {"num_beams": 2}, False),
    "another cache": (lambda: {"past_key_values": StaticCache(plain().config, 64)}, False),
    "a cache of transformers": (lambda: {"cache_implementation": "static"}, False),
}


@pytest.mark.parametrize(("given", "is_late"), CASES.values(), ids=CASES)
def test_only_where_nobody_can_see_it(
    late: list[bool],
    given: Callable[[], dict[str, Any]],
    is_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if given().get("synced_gpus"):
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    end = ends()[1]
    results = []
    for model in (plain(), used()):
        torch.manual_seed(0)
        found = generated(model, **{"eos_token_id": end, **given()})
        results.append((getattr(found, "sequences", found), torch.get_rng_state()))
    (expected, state), (ours, our_state) = results
    assert torch.equal(ours, expected)
    assert torch.equal(our_state, state)
    assert bool(late) == is_late


def test_a_model_without_our_caches_asks_as_before(late: list[bool]) -> None:
    used()
    generated(plain(), cache_implementation="static")
    assert not late
