"""A user's pass: found, judged, rewritten, reported, cached and undone as ours are."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

import memeff_compile
from memeff_compile import Decline, Done, Editor, GraphInfo, GraphPass, OptionError
from memeff_compile.backend import memeff
from memeff_compile.cli.toy import ToyModel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_pass.py"
aten = torch.ops.aten


def example() -> Any:
    """Return a new instance of the example's pass."""
    spec = importlib.util.spec_from_file_location("own_pass", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_pass"] = module
    spec.loader.exec_module(module)
    return module.UseSilu()


class Gated(torch.nn.Module):
    """Two gates, written differently, and a look-alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
        self.down = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = self.down(y * torch.sigmoid(y))
        return y.mul(y.sigmoid()) * torch.sigmoid(x)


X = torch.arange(8.0).view(2, 4)


class SinToCos(GraphPass):
    """Wrong on purpose, or broken at one place."""

    name = "sin_to_cos"

    def __init__(self, when: Any = "after", fails: str = "", op: Any = aten.cos.default) -> None:
        self.when, self.fails, self.op = when, fails, op

    def find(self, info: GraphInfo) -> Iterator[Node]:
        for node in info.visit(info.gm.graph.nodes):
            call = info.call(node)
            if call is not None and call.op is aten.sin.default:
                if self.fails == "find" and info.positions[node] == 2:
                    raise KeyError("broken in find")
                yield node

    def check(self, info: GraphInfo, match: Node) -> Decline | None:
        if self.fails == "check" and info.positions[match] == 2:
            raise KeyError("broken in check")
        return None

    def rewrite(self, info: GraphInfo, match: Node, editor: Editor) -> Done:
        with editor.at(match):
            editor.replace(match, editor.call(self.op, match.args[0]))
        if self.fails == "rewrite" and info.positions[match] == 2:
            raise KeyError("broken in rewrite")
        return Done(match, "sin(x) -> cos(x)")


def sines(x: Tensor) -> Tensor:
    return torch.sin(x.exp()).add(1).sin()


def compiled(function: Any, *passes: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    memeff_compile.reset()
    chosen = {"memeff.inner": "eager", "memeff.passes": list(passes), **options}
    return torch.compile(function, backend="memeff", options=chosen)


def test_the_example_is_short_fires_is_reported_and_in_a_golden() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    model = Gated()
    torch.testing.assert_close(compiled(model, example())(X), model(X))
    records = memeff_compile.last_report().records
    said = [(r.pass_name, r.action, r.module, r.sentence) for r in records]
    sentence = "x * sigmoid(x) -> silu(x)."
    assert said == [("use_silu", "rewrote", "", sentence)] * 2
    assert_expected_inline(
        memeff_compile.graphs()[-1].after,
        """\
graph(
    up.weight: param f32[4, 4],
    up.bias: param f32[4],
    x: input f32[2, 4],
    down.weight: param f32[4, 4],
    down.bias: param f32[4],
):
    %0: f32[2, 4] = aten.linear(x, up.weight, up.bias)
    %1: f32[2, 4] = aten.silu(%0)
    %2: f32[2, 4] = aten.linear(%1, down.weight, down.bias)
    %3: f32[2, 4] = aten.silu(%2)
    %4: f32[2, 4] = aten.sigmoid(x)
    %5: f32[2, 4] = aten.mul(%3, %4)
    return (%5)""",
    )


def test_values_and_gradients_of_the_example_are_verified() -> None:
    model = compiled(Gated(), example(), **{"memeff.verify": "raise"})
    model(X).sum().backward()
    assert "verified" in {r.action for r in memeff_compile.last_report().records}


def test_a_wrong_pass_is_caught_by_verify_which_says_how_to_do_without() -> None:
    with pytest.warns(RuntimeWarning, match="does not compute what the original does") as caught:
        result = compiled(sines, SinToCos(), **{"memeff.verify": "on"})(X)
    torch.testing.assert_close(result, sines(X))
    said = str(caught[0].message)
    assert "'memeff.passes': []" in said
    assert "The rewrite is of a pass of yours, sin_to_cos: mend that" in said
    assert "report it" not in said


def test_verify_says_which_to_leave_out_first_where_a_pass_of_ours_is_in_the_graph() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.sin() @ weight.T, y)

    torch.manual_seed(0)
    given = torch.randn(8, 4), torch.randn(9000, 4, requires_grad=True), torch.arange(8)
    with pytest.warns(RuntimeWarning, match="does not compute what the original does") as caught:
        compiled(step, SinToCos(), **{"memeff.verify": "on"})(*given)
    said = str(caught[0].message)
    assert "Leave out your own pass first, sin_to_cos" in said
    assert "if not, please report it with the reproducer" in said


@pytest.mark.parametrize("when", ["before", "after"])
def test_it_runs_before_ours_or_after_them(when: str) -> None:
    class Watch(GraphPass):
        name = "watch"

        def find(self, info: GraphInfo) -> Iterator[Decline]:
            names = " ".join(str(node.target) for node in info.gm.graph.nodes)
            yield Decline("seen", "ours ran" if "memeff." in names else "ours did not run")

        def rewrite(self, info: GraphInfo, match: Any, editor: Editor) -> Done:
            raise NotImplementedError

    watch = Watch()
    watch.when = when  # type: ignore[assignment]
    compiled(ToyModel(64, 16), watch)(torch.arange(8)).backward()
    (record,) = (r for r in memeff_compile.last_report().records if r.pass_name == "watch")
    assert record.sentence == ("Ours did not run." if when == "before" else "Ours ran.")


@pytest.mark.parametrize("stage", ["find", "check", "rewrite"])
def test_an_error_costs_its_place_alone_and_is_reported(stage: str) -> None:
    found = compiled(sines, SinToCos(fails=stage))(X)
    torch.testing.assert_close(found, torch.sin(X.exp()).add(1).cos())
    records = memeff_compile.last_report().records
    assert sorted(r.action for r in records) == ["internal_error", "rewrote"]
    (error,) = (r for r in records if r.action == "internal_error")
    assert f"KeyError: 'broken in {stage}'" in error.sentence
    assert "not built in" in error.hint
    assert "test_own_passes.py" in error.source


def test_an_edit_that_changes_what_others_see_is_undone() -> None:
    found = compiled(sines, SinToCos(op=aten.isnan.default))(X)
    torch.testing.assert_close(found, sines(X))
    assert {r.code for r in memeff_compile.last_report().records} == {"edit_refused"}


def test_a_graph_that_is_broken_beside_the_editor_is_put_back() -> None:
    class Vandal(SinToCos):
        def rewrite(self, info: GraphInfo, match: Node, editor: Editor) -> Done:
            found = super().rewrite(info, match, editor)
            editor.commit([match])
            for node in info.gm.graph.nodes:
                if node.op == "output":
                    node.prepend(next(iter(info.gm.graph.nodes)))
            return found

        def find(self, info: GraphInfo) -> Iterator[Node]:
            yield list(super().find(info))[-1]

    found = compiled(sines, Vandal())(X)
    torch.testing.assert_close(found, sines(X))
    assert "internal_error" in {r.action for r in memeff_compile.last_report().records}


def test_skip_and_strict_know_its_name() -> None:
    model = Gated()
    compiled(model, example(), **{"memeff.skip": {"use_silu": "*"}})(X)
    compiled(sines, SinToCos(), **{"memeff.strict": "sin_to_cos"})(X)
    with pytest.raises(OptionError, match=r"use_silo.*Did you mean 'use_silu'"):
        memeff_compile.Options(passes=example(), skip={"use_silo": "up"})
    with pytest.raises(OptionError, match=r"the passes are .*'use_silu'"):
        memeff_compile.Options(passes=example(), strict="other")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (SinToCos, "it takes instances of subclasses of memeff_compile.GraphPass"),
        (3, "it takes instances"),
        (SinToCos("between"), "'before' or 'after'"),
        ([SinToCos(), SinToCos()], "no other pass has"),
        ("nobodys", "which no installed package offers"),
    ],
    ids=["class", "number", "when", "twice", "unknown"],
)
def test_what_is_no_pass_is_refused(given: Any, words: str) -> None:
    with pytest.raises(OptionError, match=r"memeff\.passes") as caught:
        memeff_compile.Options.parse(None, {"memeff.passes": given})
    assert words in str(caught.value)


def test_the_name_of_one_of_ours_is_refused() -> None:
    taken = example()
    taken.name = "recover_attention"
    with pytest.raises(OptionError, match="built-in ones included"):
        memeff_compile.Options(passes=[taken])


def test_an_installed_pass_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silu_pass.py").write_text(EXAMPLE.read_text())
    about = tmp_path / "silu_pass-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: silu-pass\nVersion: 1.0\n")
    points = "[memeff_compile.passes]\nuse_silu = silu_pass:UseSilu\n"
    (about / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    compiled(Gated(), "use_silu")(X)
    assert memeff_compile.last_report().rewrites("use_silu") == 2


def test_the_backend_can_be_wrapped() -> None:
    def mine(gm: Any, example_inputs: Any, **given: Any) -> Any:
        for node in gm.graph.nodes:
            if node.target in (torch.sin, "sin"):
                node.op, node.target = "call_function", torch.cos
        gm.recompile()
        return memeff(gm, example_inputs, **given)

    memeff_compile.reset()
    found = torch.compile(sines, backend=mine, options={"memeff.inner": "eager"})(X)
    torch.testing.assert_close(found, torch.cos(torch.cos(X.exp()) + 1))
    assert "aten.cos" in memeff_compile.graphs()[-1].before


@pytest.mark.usefixtures("calling_ops")
def test_inductors_hooks_see_our_ops() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Mine(CustomGraphPass):
        seen = ""

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.seen += " ".join(str(node.target) for node in graph.nodes)

        def uuid(self) -> str:
            return uuid.uuid4().hex  # never found in a cache

    words = "joint_custom_pre joint_custom_post post_grad_custom_pre post_grad_custom_post"
    hooks = {f"{word}_pass": Mine() for word in words.split()}
    torch._dynamo.reset()
    model = torch.compile(ToyModel(64, 16), backend="memeff", options=hooks)  # type: ignore[arg-type]
    model(torch.arange(8))
    assert [name for name, hook in hooks.items() if "linear_cross" not in hook.seen] == []


def test_a_pass_without_a_file_is_of_its_process_alone() -> None:
    space: dict[str, Any] = {"GraphPass": GraphPass, "__name__": "nowhere"}
    exec("class Typed(GraphPass):\n    name = 'typed'\n    find = rewrite = None", space)
    sys.modules["nowhere"] = type(sys)("nowhere")
    first, second = space["Typed"](), space["Typed"]()
    del sys.modules["nowhere"]
    assert first.identity() != second.identity()
    assert example().identity() == example().identity()
