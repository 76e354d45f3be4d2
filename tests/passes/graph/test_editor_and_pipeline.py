"""Guarantees of edits, failures of edits, and the pipeline's work around the passes."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.backend import entry
from memeff_compile.compat import copy_graph
from memeff_compile.errors import StrictError
from memeff_compile.options import Options
from memeff_compile.passes import PASSES
from memeff_compile.passes.graph.base import Done, Gain, GraphPass
from memeff_compile.passes.graph.canonical import aten
from memeff_compile.passes.graph.editor import Editor, EditRefused
from memeff_compile.passes.graph.graph_info import GraphInfo, ambient_region
from memeff_compile.passes.graph.pipeline import run
from tests.support.captured_graphs import FUSE, calls

D, V = 16, 64
Check = Callable[[GraphModule], None]


class Toy(nn.Module):
    """A small model with a head called lm_head inside a part called model."""

    def __init__(self, returns_logits: bool = True) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"trunk": nn.Linear(D, D), "lm_head": nn.Linear(D, V)})
        self.returns_logits = returns_logits

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.model["lm_head"](torch.tanh(self.model["trunk"](x)))
        loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))
        return (loss, logits[:, 1:]) if self.returns_logits else loss


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 2 * 8 * D).view(2, 8, D), torch.arange(16).view(2, 8)


def in_backend(look: Check, module: nn.Module | None = None) -> None:
    """Call `look` with the captured graph while Dynamo waits for the backend, then run it."""
    called = []

    def capturing(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        called.append(gm)
        look(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(module or Toy(), backend=capturing, fullgraph=True)(*batch())
    assert called, "nothing was compiled"


def text(gm: GraphModule) -> list[str]:
    return [n.format_node(include_tensor_metadata=False) or "return" for n in gm.graph.nodes]


class DoubleTheLoss(GraphPass):
    """A pass for tests: replaces the loss by twice the loss, after `trouble` had its way."""

    name = "double_the_loss"

    def __init__(self, trouble: str = "", replacement: Any = aten.mul.Scalar) -> None:
        self.trouble, self.replacement = trouble, replacement

    def _may_fail(self, where: str) -> None:
        if self.trouble == where:
            raise ValueError(f"broken in {where}")

    def enabled(self, info: GraphInfo) -> bool:
        self._may_fail("enabled")
        return True

    def find(self, info: GraphInfo) -> Iterable[Node]:
        self._may_fail("find")
        return [n for n in calls(info.gm) if n.target is F.cross_entropy]

    def check(self, info: GraphInfo, match: Node) -> None:
        self._may_fail("check")

    def gain(self, info: GraphInfo, match: Node) -> Gain:
        self._may_fail("gain")
        return Gain(sympy.Integer(8), sympy.Integer(0), {})

    def places(self, match: Node) -> Sequence[Node]:
        return [match]

    def dead(self, match: Node) -> Sequence[Node]:
        return []

    def rewrite(self, info: GraphInfo, match: Node, editor: Editor) -> Done:
        place = calls(info.gm)[0] if self.trouble == "order" else next(iter(match.users))
        with editor.at(place):
            if self.trouble == "dtype":
                editor.replace(match, editor.call(aten.to.dtype, match, torch.float64))
            if self.trouble == "shape":
                editor.replace(match, editor.call(aten.reshape.default, match, [1]))
            if self.trouble == "gradient":
                editor.replace(match, editor.call(aten.detach.default, match))
            editor.replace(match, editor.call(self.replacement, match, 2.0))
            self._may_fail("rewrite")
            if self.trouble == "refusal":
                raise EditRefused("the test says so")
        return Done(match, "loss -> 2 loss")


def losses(
    options: dict[str, Any] | None = None, module: nn.Module | None = None
) -> tuple[float, float]:
    """Return the compiled and the eager loss."""
    module = module or Toy(returns_logits=False)
    settings = {"memeff.inner": "eager", **(options or {})}
    compiled = torch.compile(module, backend="memeff", options=settings)
    return compiled(*batch()).item(), module(*batch()).item()


# --- edits ------------------------------------------------------------------------------------------------


def test_rollback_restores_the_graph() -> None:
    def look(gm: GraphModule) -> None:
        before, users = text(gm), {n: set(n.users) for n in gm.graph.nodes}
        info = GraphInfo(gm, Options(), ambient_region())
        (fuse,) = (p for p in PASSES if p.name == FUSE)
        (match,) = fuse.find(info)
        editor = Editor(info)
        fuse.rewrite(info, match, editor)
        assert text(gm) != before
        editor.rollback()
        assert text(gm) == before
        assert {n: set(n.users) for n in gm.graph.nodes} == users
        gm.graph.lint()
        assert set(info.positions) == set(gm.graph.nodes) == set(info.regions)

    in_backend(look)


def test_a_copy_can_take_the_place_of_the_graph() -> None:
    def look(gm: GraphModule) -> None:
        before, copied = text(gm), copy_graph(gm)
        values = [n.meta.get("example_value") for n in gm.graph.nodes]
        gm.graph = copied
        assert text(gm) == before
        assert all(
            n.meta.get("example_value") is v for n, v in zip(gm.graph.nodes, values, strict=True)
        )

    in_backend(look)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("dtype", "dtype from torch.float32 to torch.float64"),
        ("shape", "shape from () to (1,)"),
        ("gradient", "requires_grad from True to False"),
        ("refusal", "the test says so"),
    ],
)
def test_refused_edit_leaves_the_graph_and_says_so(
    trouble: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PASSES", (DoubleTheLoss(trouble),))
    found, expected = losses()
    assert found == expected
    (graph,) = memeff_compile.graphs()
    assert graph.after == graph.before
    (record,) = graph.records
    assert (record.action, record.code) == ("declined", "edit_refused")
    assert words in record.sentence
    assert record.source


@pytest.mark.parametrize("trouble", ["enabled", "find", "check", "gain", "rewrite", "order"])
def test_internal_error_undoes_its_match_and_goes_on(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry, "PASSES", (DoubleTheLoss(trouble), *PASSES))
    with caplog.at_level(logging.WARNING, logger="memeff_compile"):
        found, expected = losses()
    assert found == pytest.approx(expected)
    (graph,) = memeff_compile.graphs()
    assert [(r.pass_name, r.action, r.code) for r in graph.records] == [
        ("double_the_loss", "internal_error", "internal_error"),
        (FUSE, "rewrote", "rewrote"),
    ]
    record = graph.records[0]
    words = {"order": "RuntimeError: loss does not come before mul"}
    assert words.get(trouble, f"ValueError: broken in {trouble}") in record.sentence
    assert "fix the pass, which is not built in" in record.hint
    assert "test_editor_and_pipeline.py" in record.source or trouble in ("enabled", "find")
    (warning,) = (r for r in caplog.records if r.name.startswith("memeff_compile"))
    assert "internal error in double_the_loss" in warning.getMessage()
    assert warning.exc_info


def test_an_undo_that_fails_restores_the_graph_and_drops_the_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(DoubleTheLoss):
        def find(self, info: GraphInfo) -> Iterable[Node]:
            return calls(info.gm)[-1:]

    def rollback(self: Editor) -> None:
        raise KeyError("the editor is broken")

    monkeypatch.setattr(Editor, "rollback", rollback)
    monkeypatch.setattr(entry, "PASSES", (*PASSES, Broken("rewrite")))
    module = Toy()
    compiled = torch.compile(module, backend="memeff", options={"memeff.inner": "eager"})
    loss, logits = compiled(*batch())
    expected_loss, expected_logits = module(*batch())
    torch.testing.assert_close(loss, expected_loss)
    assert type(logits) is Tensor
    torch.testing.assert_close(logits, expected_logits)
    (graph,) = memeff_compile.graphs()
    assert graph.after == graph.before
    assert "linear_cross_entropy" not in graph.after
    assert [(r.pass_name, r.action) for r in graph.records] == [("backend", "internal_error")]


def test_a_pass_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "PASSES", (DoubleTheLoss(),))
    found, expected = losses()
    assert found == pytest.approx(2 * expected)


# --- metadata of new nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("returns_logits", [False, True])
def test_new_nodes_carry_value_source_and_module(returns_logits: bool) -> None:
    def look(gm: GraphModule) -> None:
        old = set(gm.graph.nodes)
        assert run(gm, PASSES, Options(inner="eager")).changed
        new = [n for n in gm.graph.nodes if n not in old]
        assert new
        for node in new:
            value = node.meta["example_value"]
            assert isinstance(value, (Tensor, tuple)), node
            assert "test_editor_and_pipeline.py" in node.meta["stack_trace"], node
            assert "nn_module_stack" in node.meta, node
            assert node.op == "call_function"
            is_overload = isinstance(node.target, torch._ops.OpOverload)
            assert is_overload or node.target is operator.getitem

    in_backend(look, _Wrapped(Toy(returns_logits)))


class _Wrapped(nn.Module):
    """A part that is not the root: Dynamo gives no module path to calls of the root itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        return self.part(*args)


def test_values_of_new_nodes_are_what_they_compute() -> None:
    def look(gm: GraphModule) -> None:
        run(gm, PASSES, Options(inner="eager"))
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        given = [n.meta["grapharg"].example for n in inputs]
        for node, value in _Recording(gm).values(*given):
            kept = node.meta.get("example_value")
            if isinstance(value, Tensor):
                assert (kept.shape, kept.dtype) == (value.shape, value.dtype), node
                assert kept.requires_grad == value.requires_grad, node

    in_backend(look)


class _Recording(torch.fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def values(self, *args: Any) -> list[tuple[Node, Any]]:
        self.kept: list[tuple[Node, Any]] = []
        self.run(*args)
        return self.kept

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.kept.append((n, value))
        return value


def test_running_the_pipeline_on_its_own_output_changes_nothing() -> None:
    def look(gm: GraphModule) -> None:
        assert run(gm, PASSES, Options(inner="eager")).changed
        before = text(gm)
        again = run(gm, PASSES, Options(inner="eager"))
        assert not again.changed
        assert not again.deferred
        assert not again.report.records
        assert text(gm) == before

    in_backend(look)


def test_a_graph_without_matches_reaches_the_inner_compiler_untouched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def inner(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen["inner"] = (gm, gm.graph, gm.code, gm.forward.__func__)
        return gm.forward

    def outer(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen["outer"] = (gm, gm.graph, gm.code, gm.forward.__func__)
        seen["metas"] = [dict(n.meta) for n in gm.graph.nodes]
        compiled = entry.memeff(gm, example_inputs, options={"memeff.inner": "aot_eager"})
        assert [dict(n.meta) for n in gm.graph.nodes] == seen["metas"]
        return compiled

    monkeypatch.setattr(entry.compat, "compile_with_aot_eager", inner)
    nothing = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    module = type("Nothing", (nn.Module,), {"forward": lambda self, x: self.part(x).sum()})()
    module.part = nothing
    torch.compile(module, backend=outer)(batch()[0])
    assert all(a is b for a, b in zip(seen["inner"], seen["outer"], strict=True))


def test_a_declined_graph_reaches_the_inner_compiler_untouched() -> None:
    def look(gm: GraphModule) -> None:
        graph, code = gm.graph, gm.code
        outcome = run(gm, PASSES, Options(inner="eager", logits="eager"))
        assert [r.code for r in outcome.report.records] == ["logits_kept"]
        assert gm.graph is graph
        assert gm.code is code

    in_backend(look)


# --- strict and skip ------------------------------------------------------------------------------------------


def test_strict_raises_when_a_place_was_declined() -> None:
    module = Toy()
    options = {"memeff.inner": "eager", "memeff.logits": "eager", "memeff.strict": [FUSE]}
    with pytest.raises(Exception, match="which did not rewrite everything it found") as caught:
        torch.compile(module, backend="memeff", options=options)(*batch())
    cause = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(cause, StrictError)
    assert "logits_kept" in str(cause)
    assert "test_editor_and_pipeline.py" in str(cause)
    (record,) = memeff_compile.last_report().records
    assert record.code in str(cause)
    assert record.hint, "the error says to look here for hints"


def test_strict_raises_when_a_match_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    (fuse,) = (p for p in PASSES if p.name == FUSE)

    def broken(info: GraphInfo, match: Any) -> Gain:
        raise ValueError("broken in gain")

    monkeypatch.setattr(fuse, "gain", broken)
    with pytest.raises(Exception, match=r"internal_error: An .* ValueError: broken in gain"):
        losses({"memeff.strict": [FUSE]})


def test_strict_raises_when_a_training_graph_has_nothing_to_rewrite() -> None:
    options = {"memeff.inner": "eager", "memeff.strict": [FUSE]}
    weight = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: (x * weight).sum(), backend="memeff", options=options)
    with pytest.raises(Exception, match="this training graph has no place that looks like"):
        compiled(torch.ones(3))
    with torch.no_grad():
        assert float(compiled(torch.ones(3))) == 3.0


def test_strict_is_silent_when_the_pass_fired() -> None:
    found, expected = losses({"memeff.strict": [FUSE]})
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("skip", "skipped"),
    [
        ("model.lm_head", True),
        ("model", True),
        ("*", True),
        ("model.*", True),
        ("*.lm_head", True),
        (["model.trunk", "model.lm_head"], True),
        ({FUSE: "model.lm_head"}, True),
        ({"*": ["*head"]}, True),
        ("model.trunk", False),
        ("lm_head.other", False),
        ("model.lm", False),
        ({"defer_logits": "model.lm_head"}, False),
    ],
    ids=str,
)
def test_skip_by_module_path_glob_and_pass(skip: Any, skipped: bool) -> None:
    found, expected = losses({"memeff.skip": skip})
    assert found == pytest.approx(expected)
    codes = [r.code for r in memeff_compile.last_report().records if r.action != "note"]
    assert codes == (["skipped"] if skipped else ["rewrote"])


def test_skipping_deferral_keeps_the_logits_eager() -> None:
    module = Toy()
    options = {"memeff.inner": "eager", "memeff.skip": {"defer_logits": "model.lm_head"}}
    _, logits = torch.compile(module, backend="memeff", options=options)(*batch())
    assert type(logits) is Tensor
    assert [r.code for r in memeff_compile.last_report().records] == ["logits_kept"]


def test_off_switches_the_pass_off() -> None:
    found, expected = losses({"memeff.linear_cross_entropy": "off"})
    assert found == expected
    assert memeff_compile.last_report().records == ()


# --- regions --------------------------------------------------------------------------------------------------


def _nested(x: Tensor) -> Any:
    a = x.sin()
    with torch.no_grad():
        b = x.cos()
        with torch.enable_grad():
            c = x.tanh()
            with torch.autocast("cpu", torch.bfloat16):
                d = x.exp()
                with torch.autocast("cpu", enabled=False):
                    e = x.sqrt()
                f = x.square()
            g = x.neg()
        h = x.sigmoid()
    with torch.inference_mode():
        i = x.relu()
    with torch.inference_mode(False):
        j = x.log()
    return a, b, c, d, e, f, g, h, i.clone(), j


def test_regions_follow_nested_contexts() -> None:
    seen: dict[str, tuple[bool, bool, int, bool]] = {}

    def look(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        info = GraphInfo(gm, Options(), ambient_region())
        for node in calls(gm):
            region = info.regions[node]
            on = bool(region.autocast) and region.autocast[-1][2]
            seen[str(node.target)] = (region.grad, region.inference, len(region.autocast), on)
        return gm.forward

    torch.compile(_nested, backend=look, fullgraph=True)(torch.ones(3, requires_grad=True))
    expected = {
        "sin": (True, False, 0, False),
        "cos": (False, False, 0, False),
        "tanh": (True, False, 0, False),
        "exp": (True, False, 1, True),
        "sqrt": (True, False, 2, False),
        "square": (True, False, 1, True),
        "neg": (True, False, 0, False),
        "sigmoid": (False, False, 0, False),
        "relu": (False, True, 0, False),
        "log": (True, False, 0, False),
    }
    assert {name: seen[name] for name in expected} == expected


def test_a_changed_graph_leaves_nothing_worked_out_of_it() -> None:
    def look(gm: GraphModule) -> None:
        info = GraphInfo(gm, Options(), ambient_region())
        names = [n for n, v in vars(GraphInfo).items() if isinstance(v, functools.cached_property)]
        assert len(names) > 4
        for name in names:
            getattr(info, name)
        info.refresh()
        assert not set(names) & set(vars(info))

    in_backend(look)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_ambient_region_is_the_callers(context: Callable[[], Any]) -> None:
    with context():
        region = ambient_region()
        assert region.grad == torch.is_grad_enabled()
        assert region.inference == torch.is_inference_mode_enabled()


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy(returns_logits=False)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return checkpoint(self.toy, x, labels, use_reentrant=False)


def test_bodies_of_checkpoints_know_their_caller() -> None:
    def look(gm: GraphModule) -> None:
        info = GraphInfo(gm, Options(), ambient_region())
        (body,) = info.bodies()
        assert body.parent is info
        roots = [body.root_placeholder(p) for p in body.placeholders]
        assert {r.op for r in roots if r is not None} == {"placeholder"}
        assert set(roots) <= set(info.placeholders)
        assert body.needs_grad
        loss = next(n for n in calls(body.gm) if n.target is F.cross_entropy)
        assert "cross_entropy" in body.source_line(loss)

    in_backend(look, _Checkpointed())


def test_checkpointed_loss_names_its_module_and_line() -> None:
    module = _Checkpointed()
    found, expected = losses(module=module)
    assert found == pytest.approx(expected)
    (record,) = memeff_compile.last_report().records
    assert record.module == "toy.model.lm_head"
    assert "loss = F.cross_entropy(" in record.source
