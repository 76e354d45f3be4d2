"""Options on their way through torch.compile: to us, to Inductor, and back as errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memeff_compile
from memeff_compile.backend import entry, trip
from memeff_compile.cli.toy import ToyModel
from memeff_compile.errors import OptionError
from tests.support.closeness import needs_compiler

IDS = torch.arange(8)


class WithLogits(nn.Module):
    """A head whose logits are returned with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 64), labels.view(-1)), logits


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """Let Inductor compile in this process: starting its workers takes longer than they save."""
    from torch._functorch import config as aot_config
    from torch._inductor import config

    with (
        config.patch(compile_threads=1, fx_graph_cache=False),
        aot_config.patch(enable_autograd_cache=False),
    ):
        yield


# --- forwarding to Inductor ---------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_inductor", "calling_ops")
def test_inductor_options_hold_in_forward_and_backward() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen: list[bool] = []

    class Probe(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(config.epilogue_fusion)

        def uuid(self) -> str:
            return "memeff_compile probe"

    options = {"epilogue_fusion": False, "post_grad_custom_pre_pass": Probe()}
    model = ToyModel()
    torch.compile(model, backend="memeff", options=options)(IDS).backward()
    assert model.head.weight.grad is not None
    assert seen == [False, False]
    assert config.epilogue_fusion
    assert memeff_compile.last_report().rewrites() == 1


@needs_compiler
@pytest.mark.usefixtures("quick_inductor", "inductors_loops")
@pytest.mark.parametrize(
    "settings",
    [{"mode": "reduce-overhead"}, {"options": {"memeff.mode": "reduce-overhead"}}],
    ids=str,
)
def test_reduce_overhead_is_accepted(settings: dict[str, Any]) -> None:
    model, x, labels = WithLogits(), torch.randn(2, 4, 16), torch.arange(8).view(2, 4)
    loss, logits = torch.compile(model, backend="memeff", **settings)(x, labels)
    loss.backward()
    expected_loss, expected_logits = model(x, labels)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(logits, expected_logits)


@pytest.mark.parametrize(
    ("settings", "cudagraphs"),
    [
        ({}, False),
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"options": {"memeff.mode": "reduce-overhead"}}, True),
        ({"options": {"memeff.mode": "reduce-overhead", "triton.cudagraphs": False}}, False),
        ({"options": {"triton.cudagraphs": True}}, True),
    ],
    ids=str,
)
def test_modes_and_keys_reach_inductor(
    settings: dict[str, Any], cudagraphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    clones: list[bool] = []

    def inner(gm: Any, example_inputs: Sequence[Any], patches: dict[str, Any], tag: str) -> Any:
        given.update(patches)
        return gm.forward

    def attach(compiled: Any, plan: Any, *, clone_hidden: bool, **others: Any) -> Any:
        clones.append(clone_hidden)
        return compiled

    monkeypatch.setattr(entry.compat, "compile_with_inductor", inner)
    monkeypatch.setattr(trip, "attach", attach)
    torch.compile(WithLogits(), backend="memeff", **settings)(torch.ones(1, 2, 16), IDS[:2])
    assert bool(given.get("triton.cudagraphs", False)) == cudagraphs
    assert clones == [cudagraphs]  # CUDA graphs reuse memory: the hidden states are cloned
    assert not [key for key in given if key.startswith("memeff.")]


class NothingToDo(memeff_compile.GraphPass):
    name = "nothing_to_do"

    def find(self, info: memeff_compile.GraphInfo) -> list[Any]:
        return []

    def rewrite(self, *_: Any) -> Any:
        raise AssertionError("nothing was found")


def test_inductors_caches_are_tagged_by_the_users_own_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tags = []

    def inner(gm: Any, example_inputs: Any, patches: Any, tag: str) -> Any:
        tags.append(tag)
        return gm.forward

    monkeypatch.setattr(entry.compat, "compile_with_inductor", inner)
    own = NothingToDo()
    for passes in ([], [own]):
        torch._dynamo.reset()
        torch.compile(ToyModel(), backend="memeff", options={"memeff.passes": passes})(IDS)  # type: ignore[dict-item]
    assert tags == ["", own.identity()]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_other_inner_compilers_take_no_inductor_patches(
    inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry.compat, "compile_with_inductor", None)
    options = {"memeff.inner": inner, "max_autotune": True}
    assert torch.isfinite(torch.compile(ToyModel(), backend="memeff", options=options)(IDS))


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": {"memeff.logit": "eager"}}, ["not an option of memeff", "'memeff.logits'?"]),
        ({"options": {"logits": "eager"}}, ["neither an option of memeff", "'memeff.logits'"]),
        ({"options": {"max_autotun": True}}, ["nor a config key of Inductor", "'max_autotune'"]),
        ({"options": {"max_autotune": "yes"}}, ["max_autotune is 'yes'", "takes bool"]),
        ({"options": {"memeff.inner": "inductr"}}, ["'inductr'", "Did you mean 'inductor'?"]),
        ({"options": {"memeff.preset": "quick"}}, ["'quick'", "'exact', 'fast', 'paper'"]),
        ({"options": {"memeff.strict": "fuse"}}, ["which does not exist"]),
        ({"mode": "fastest"}, ["mode is 'fastest'", "'reduce-overhead'"]),
    ],
    ids=str,
)
def test_bad_option_raises_with_the_nearest_name(
    settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(Exception, match="OptionError") as caught:
        torch.compile(ToyModel(), backend="memeff", **settings)(IDS)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), OptionError)
    for word in words:
        assert word in str(caught.value)


def test_mode_and_options_together_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="Either mode or options"):
        torch.compile(
            ToyModel(), backend="memeff", mode="max-autotune", options={"memeff.inner": "eager"}
        )


def test_options_are_not_changed_and_equal_ones_share_code() -> None:
    options = {"memeff.inner": "eager", "max_autotune": True}
    model = ToyModel()
    for _ in range(2):
        torch.compile(model, backend="memeff", options=dict(options))(IDS)
    assert len(memeff_compile.graphs()) == 1
    torch.compile(model, backend="memeff", options={**options, "memeff.logits": "eager"})(IDS)
    assert len(memeff_compile.graphs()) == 2
    assert options == {"memeff.inner": "eager", "max_autotune": True}


# --- reports, reset, logs ---------------------------------------------------------------------------------


def test_torch_reset_forgets_the_reports() -> None:
    torch.compile(ToyModel(), backend="memeff", options={"memeff.inner": "eager"})(IDS)
    assert memeff_compile.last_report().rewrites() == 1
    torch._dynamo.reset()
    assert memeff_compile.graphs() == ()
    assert "yet" in str(memeff_compile.last_report())


def test_reports_are_kept_oldest_first() -> None:
    options = {"memeff.inner": "eager"}
    compiled = torch.compile(lambda x: x * 2, backend="memeff", options=options, dynamic=False)
    for size in (3, 1, 2):
        compiled(torch.ones(size, 7))
    texts_before = [graph.before for graph in memeff_compile.graphs()]
    assert [f"f32[{size}, 7]" in text for size, text in zip((3, 1, 2), texts_before, strict=True)]


def test_report_of_a_graph_in_two_modes() -> None:
    compiled = torch.compile(ToyModel(), backend="memeff", options={"memeff.inner": "eager"})
    compiled(IDS)
    with torch.no_grad():
        compiled(IDS)
    graphs = memeff_compile.last_report().graphs
    assert [(g.name, g.training) for g in graphs] == [("graph 0/0", True), ("graph 0/1", False)]
    assert [r.module for g in graphs for r in g.records] == ["head", "head"]
    assert all("toy.py" in r.source for g in graphs for r in g.records)


def test_logs_say_what_fired_and_show_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="memeff_compile"):
        torch.compile(ToyModel(), backend="memeff", options={"memeff.inner": "eager"})(IDS)
    ours = [r for r in caplog.records if r.name.startswith("memeff_compile")]
    infos = [r.getMessage() for r in ours if r.levelno == logging.INFO]
    details = "\n".join(r.getMessage() for r in ours if r.levelno == logging.DEBUG)
    assert len(infos) == 1
    assert "graph 0/0" in infos[0]
    assert "changes: 1" in infos[0]
    assert "rewrote" in details
    assert "memeff.linear_cross_entropy(" in details
    assert not [r for r in ours if r.levelno >= logging.WARNING]
