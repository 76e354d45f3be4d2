"""Modules have the names that `named_modules()` of the compiled model says, however reached."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.passes.graph.module_names import clean_module_path
from tests.support.captured_graphs import FUSE

IDS = torch.arange(8)


class Heads(nn.Module):
    """A model of two heads; a graph break before the head puts it into a separate frame."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.lm_head = nn.Linear(8, 64, bias=False)
        self.tied = self.lm_head
        self.breaks = breaks

    def forward(self, ids: Tensor) -> Any:
        hidden = self.embed(ids)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.lm_head(hidden), ids)


class Adapted(nn.Module):
    """Like PEFT's models: missing attributes are looked up in the model inside, by
    `__getattr__`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, ids: Tensor) -> Any:
        return self.base_model(ids)


def _as_module(model: nn.Module, options: Any) -> Any:
    return torch.compile(model, backend="memeff", options=options)(IDS)


def _in_place(model: nn.Module, options: Any) -> Any:
    model.compile(backend="memeff", options=options)
    return model(IDS)


def _forward(model: nn.Module, options: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="memeff", options=options)  # type: ignore[method-assign]
    return model(IDS)


def _inside_a_trainer(model: nn.Module, options: Any) -> Any:
    trainer = types.SimpleNamespace(parts=[model])
    step = torch.compile(lambda t, ids: t.parts[0](ids), backend="memeff", options=options)
    return step(trainer, IDS)


def _inside_a_model(model: nn.Module, options: Any) -> Any:
    whole = nn.Sequential(torch.compile(model, backend="memeff", options=options))  # type: ignore[arg-type]
    return whole(IDS)


WAYS = [_as_module, _in_place, _forward, _inside_a_trainer, _inside_a_model]
HEAD = "base_model.base_model.lm_head"


def records(way: Callable[..., Any], *, breaks: bool, skip: str = "") -> dict[str, str]:
    """Return the module of the fused loss by its code, or of the record about skipping."""
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "eager"} | ({"memeff.skip": {FUSE: skip}} if skip else {})
    way(Adapted(Adapted(Heads(breaks=breaks))), options)
    found = memeff_compile.last_report().records
    return {r.code: r.module for r in found if r.pass_name in (FUSE, "backend")}


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
def test_skip_takes_and_reports_say_what_named_modules_says(
    way: Callable[..., Any], breaks: bool
) -> None:
    ((code, place),) = records(way, breaks=breaks, skip=HEAD).items()
    assert (code, place) == ("skipped", HEAD)


@pytest.mark.parametrize("skip", [f"_orig_mod.{HEAD}", "*.base_model.tied"])
def test_other_names_of_a_module_name_it_too(skip: str) -> None:
    assert list(records(_in_place, breaks=True, skip=skip)) == ["skipped"]


def test_the_name_in_a_frame_behind_a_break_names_it_too() -> None:
    assert "skipped" in records(_in_place, breaks=True, skip="lm_head")


def test_a_name_that_no_module_has_is_noted() -> None:
    found = records(_in_place, breaks=True, skip="base_model.lm_haed")
    assert set(found) == {"rewrote", "skip_unmatched"}
    said = " ".join(str(memeff_compile.last_report()).split())
    assert "next: Compare 'base_model.lm_haed' of memeff.skip with the names" in said


def test_a_module_of_another_graph_is_no_typo() -> None:
    assert "skip_unmatched" not in records(
        _in_place, breaks=True, skip="base_model.base_model.embed"
    )


def test_paths_of_dynamo_without_a_model_are_cleaned() -> None:
    path = "L['self'].__dict__['_modules']['base_model']._modules['layers'][0].mlp"
    assert clean_module_path(path) == "base_model.layers.0.mlp"
    assert clean_module_path("L['args'][0].model.layers[1].mlp") == "model.layers.1.mlp"
    assert clean_module_path("G['blocks'][0].mlp") == "0.mlp"
