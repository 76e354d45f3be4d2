"""`memeff_compile.compile`: options are checked when it is called."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import memeff_compile
from memeff_compile.cli.toy import ToyModel


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"logits": "lazy"}, "memeff.logits is 'lazy'"),
        ({"logit": "eager"}, "Did you mean 'logits'?"),
        ({"options": {"memeff.logit": "eager"}}, "Did you mean 'memeff.logits'?"),
        ({"options": "eager"}, "takes a mapping"),
        ({"mode": "fastest"}, "mode is 'fastest'"),
        ({"mode": "max-autotune", "options": {"memeff.mode": "default"}}, "Give one of them"),
        ({"logits": "eager", "options": {"memeff.logits": "none"}}, "give it once"),
        ({"dynamic": "yes"}, "dynamic is 'yes'"),
    ],
    ids=str,
)
def test_bad_option_raises_before_anything_is_called(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(memeff_compile.OptionError) as caught:
        memeff_compile.compile(ToyModel(), **settings)  # type: ignore[call-overload]
    assert words in str(caught.value)


def test_what_is_no_module_and_no_function_is_refused() -> None:
    with pytest.raises(memeff_compile.UnsupportedInputError, match="given a int"):
        memeff_compile.compile(3)  # type: ignore[type-var]


def test_the_class_of_a_model_is_refused_and_left_as_it_was() -> None:
    before = ToyModel.__call__
    with pytest.raises(memeff_compile.UnsupportedInputError, match="the class ToyModel"):
        memeff_compile.compile(ToyModel)
    assert ToyModel.__call__ is before


def test_module_compiles_and_trains() -> None:
    model, ids = ToyModel(), torch.arange(8)
    expected = model(ids)
    loss = memeff_compile.compile(model, inner="aot_eager")(ids)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert model.head.weight.grad is not None


@pytest.mark.parametrize(
    "make",
    [
        ToyModel,
        lambda: torch.nn.Sequential(
            ToyModel()
        ),  # of PyTorch's own class, whose frames are left out
        lambda: torch.compile(ToyModel(), backend="eager"),  # what gives way
    ],
    ids=["module", "of PyTorch", "wrapper"],
)
def test_a_module_is_compiled_in_place_and_returned(make: Callable[[], torch.nn.Module]) -> None:
    model, names = make(), list(make().state_dict())
    memeff_compile.reset()
    assert memeff_compile.compile(model, inner="eager") is model
    model(torch.arange(8)).backward()
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    assert list(model.state_dict()) == names
    assert memeff_compile.compile(model, inner="eager", logits="none") is model, "and once more"


def test_a_module_is_compiled_by_the_decorator_form_too() -> None:
    model = ToyModel()
    assert memeff_compile.compile(inner="eager")(model) is model
    model(torch.arange(8))
    assert memeff_compile.last_report().graphs


class Switch(torch.nn.Module):
    """A module that needs a graph for each kind of call."""

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return x * 1.0 if kind else x


def calls_of_many_kinds(model: torch.nn.Module) -> int:
    """Call a model in twelve ways; return how many graphs PyTorch compiled."""
    memeff_compile.reset()
    x = torch.ones(3)
    for kind in range(12):
        torch.testing.assert_close(model(x, str(kind)), x)
    return len(memeff_compile.last_report().graphs)


def test_more_graphs_are_allowed_than_for_other_backends() -> None:
    model = memeff_compile.compile(Switch(), inner="eager")
    assert calls_of_many_kinds(model) == 12
    other = memeff_compile.compile(Switch(), inner="eager")
    other(torch.ones(3), "0")
    assert len(memeff_compile.last_report().graphs) == 12, "models of one class share graphs"
    assert "recompile_limit" not in str(memeff_compile.last_report())


def test_the_report_names_the_limit_of_graphs() -> None:
    model = Switch()
    with torch._dynamo.config.patch(recompile_limit=8):
        model.compile(backend="memeff", options={"memeff.inner": "eager"})
        assert calls_of_many_kinds(model) == 8
    report = memeff_compile.last_report()
    assert report.over_limit == 1
    for text in (str(report), report.details()):
        assert "run without compilation" in " ".join(text.split())
    assert type(report).from_json(report.to_json()).over_limit == 1
    memeff_compile.reset()
    assert memeff_compile.last_report().over_limit == 0


def test_the_copy_of_a_compiled_module_is_not_compiled() -> None:
    model = memeff_compile.compile(ToyModel(), inner="eager")
    memeff_compile.reset()
    copy.deepcopy(model)(torch.arange(8))
    assert not memeff_compile.last_report().graphs


def test_a_function_comes_back_as_a_wrapper_and_stays_as_it_was() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert memeff_compile.compile(double, inner="eager") is not double


def test_mode_may_stand_next_to_options() -> None:
    compiled = memeff_compile.compile(
        ToyModel(), mode="reduce-overhead", options={"memeff.inner": "aot_eager"}
    )
    assert torch.isfinite(compiled(torch.arange(8)))


def test_function_and_decorator_forms() -> None:
    @memeff_compile.compile(inner="eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert double(torch.ones(2)).tolist() == [2.0, 2.0]


def test_an_options_instance_is_taken() -> None:
    options = memeff_compile.Options(inner="eager", logits="eager")
    compiled = memeff_compile.compile(ToyModel(), options=options)
    assert torch.isfinite(compiled(torch.arange(8)))


def test_reset_forgets_the_reports() -> None:
    memeff_compile.compile(ToyModel(), inner="eager")(torch.arange(8))
    assert memeff_compile.last_report().graphs
    memeff_compile.reset()
    assert not memeff_compile.last_report().graphs


def test_bad_option_through_torch_compile_reaches_the_user() -> None:
    compiled = torch.compile(ToyModel(), backend="memeff", options={"memeff.logits": "lazy"})
    with pytest.raises(Exception, match=r"memeff\.logits is 'lazy'"):
        compiled(torch.arange(8))
