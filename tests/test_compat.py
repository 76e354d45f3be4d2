"""Every private name of torch that this package uses, tested with the installed torch.

After an update of torch, a failure here names the function of `compat/` to fix.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from memeff_compile import compat
from memeff_compile.cli.toy import ToyModel
from memeff_compile.kernels.coded_weight import refuse_step
from tests.support.closeness import needs_compiler

PROBED: set[str] = set()


def probes(*names: str) -> Callable[[Any], Any]:
    """Record which functions of compat a test covers."""
    PROBED.update(names)
    return lambda test: test


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.register_buffer("offset", torch.ones(3))
        self.cap, self.seen = 30.0, 0

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return (x @ self.weight + self.offset)[:, :2] / self.cap * times


def look(
    question: Callable[[GraphModule, Sequence[Any]], Any], *args: Any, dynamic: bool | None = None
) -> Any:
    """Return a function's result for a captured graph, called in place of a backend."""
    answers = []

    def asking(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        answers.append(question(gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    model = Model()
    torch.compile(model, backend=asking, fullgraph=True, dynamic=dynamic)(
        *(args or (torch.ones(5, 4),))
    )
    return answers[0]


def placeholders(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


# --- Dynamo's nodes -------------------------------------------------------------------------------------


@probes("example_value", "is_fake")
def test_every_node_has_a_fake_example_value_of_one_mode() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        values = [compat.example_value(n) for n in gm.graph.nodes if n.op != "output"]
        assert all(compat.is_fake(v) for v in values)
        assert len({id(v.fake_mode) for v in values}) == 1
        assert values[0].fake_mode is not None
        assert not compat.is_fake(example_inputs[0])

    look(question)


@probes("example_input", "source_name")
def test_placeholders_know_their_tensor_and_their_name() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> dict[str, str]:
        for node, given in zip(placeholders(gm), example_inputs, strict=True):
            assert compat.example_input(node) is given
        return {
            compat.source_name(n): type(compat.example_input(n)).__name__ for n in placeholders(gm)
        }

    kinds = look(question)
    assert [kinds[name] for name in kinds if "x" in name.split(".")[0]] == ["Tensor"]
    assert [kinds[name] for name in kinds if "weight" in name] == ["Parameter"]
    (buffer,) = (name for name in kinds if "offset" in name)
    assert "_buffers[" in buffer or "_modules[" in buffer or kinds[buffer] == "Tensor"


@probes("example_input", "source_name")
def test_other_nodes_have_neither() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        for node in calls(gm):
            assert compat.example_input(node) is None
            assert compat.source_name(node) == ""

    look(question)


@probes("constant_in_traces")
def test_an_answer_is_constant_in_traces() -> None:
    @compat.constant_in_traces
    def answer(dtype: torch.dtype) -> bool:
        return hashlib.sha256(str(dtype).encode()).hexdigest() > "8"  # which Dynamo cannot trace

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if answer(x.dtype) else x - 1

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.ones(2, dtype=dtype)
        assert torch.equal(torch.compile(asks, backend="eager", fullgraph=True)(x), asks(x))


@probes("plain_source")
def test_a_source_has_no_dictionaries_of_modules() -> None:
    way = "L['self'].__dict__['_modules']['base'].__dict__['_parameters']['w'].__dict__['x']"
    plain = "L['self']._modules['base']._parameters['w'].__dict__['x']"
    assert compat.plain_source(way) == plain


@probes("running_modules", "frame_variables")
def test_what_runs_and_what_is_captured_is_known() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compat.running_modules(), compat.frame_variables()["L"]["self"]

    (model,), captured = look(question)
    assert captured is model
    assert type(model) is Model
    assert compat.running_modules() == []
    assert compat.frame_variables() == {}


@probes("apart_in_tracing")
def test_what_is_noted_of_a_piece_is_not_taken_for_the_graphs() -> None:
    from torch._guards import TracingContext

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        whole = TracingContext.get()
        noted = whole.fw_metadata
        with compat.apart_in_tracing():
            own = TracingContext.get()
            assert own is not whole
            assert own.guards_context is whole.guards_context
            compat.compile_with_aot_eager(gm, example_inputs)
            assert own.fw_metadata is not None
        assert TracingContext.get() is whole
        assert whole.fw_metadata is noted

    look(question)
    with compat.apart_in_tracing():
        assert TracingContext.try_get() is None


@probes("inputs_from_other_graphs")
def test_inputs_of_the_user_are_not_those_of_another_graph() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        assert compat.inputs_from_other_graphs(gm) == []
        last = placeholders(gm)[-1]
        kept = last.meta.pop("grapharg")
        assert compat.inputs_from_other_graphs(gm) == [len(placeholders(gm)) - 1]
        last.meta["grapharg"] = kept

    look(question)


@probes("notes_between_pieces")
def test_pieces_of_one_model_share_notes_and_others_have_none() -> None:
    from torch._dynamo.backends.distributed import SubmodCompiler

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        assert compat.notes_between_pieces() is None
        value = compat.example_value(placeholders(gm)[0])
        SubmodCompiler(gm, lambda *_: gm.forward, value.fake_mode)
        notes = compat.notes_between_pieces()
        assert notes is not None
        notes[value] = "causal"
        again = compat.notes_between_pieces()
        assert again is not None
        assert again[value] == "causal"

    look(question)
    assert compat.notes_between_pieces() is None


@probes("feeds_resumed_code")
def test_a_graph_knows_whether_the_function_goes_on_behind_it() -> None:
    assert not look(lambda gm, _: compat.feeds_resumed_code(gm))
    answers = []

    def asking(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        answers.append(compat.feeds_resumed_code(gm))
        return gm.forward

    @torch.compile(backend=asking)
    def function(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    function(torch.ones(2))
    assert answers == [True, False]

    from torch._dynamo.backends import distributed

    said = inspect.getsource(distributed.SubmodCompiler)
    assert '"DDPOptimizer intentional graph-break' in said


@probes("assert_on_device")
def test_a_device_assertion_has_its_message() -> None:
    compat.assert_on_device(torch.tensor(True), "never")
    with pytest.raises(RuntimeError, match="the sentence"):
        compat.assert_on_device(torch.tensor(False), "the sentence")


@probes("is_batched")
def test_what_several_gradients_at_once_hide_is_seen() -> None:
    answers: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            answers.append(compat.is_batched(grad))
            return grad

    x = torch.ones(2, requires_grad=True)
    y = Looks.apply(x)  # type: ignore[no-untyped-call]
    torch.autograd.grad(y, x, torch.eye(2), retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.vmap(lambda row: answers.append(compat.is_batched(row)) or row)(torch.eye(2))
    assert answers == [True, False, True]


@probes("is_functorch_active")
def test_transforms_of_functions_are_noticed() -> None:
    assert not compat.is_functorch_active()
    answers = []
    torch.vmap(lambda x: answers.append(compat.is_functorch_active()) or x)(torch.ones(2))
    assert answers == [True]


@probes("ignores_gradients")
def test_only_fsdps_hook_is_known_to_look_at_no_gradient() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    assert compat.ignores_gradients(FSDPState()._pre_backward)
    assert not compat.ignores_gradients(print)
    assert not compat.ignores_gradients([].append)
    source = inspect.getsource(FSDPState._register_pre_backward_hook)
    assert "register_hook(self._pre_backward)" in source
    body = inspect.getsource(FSDPState._pre_backward)
    assert body.count("grad") - body.count("_grad") <= 3 or "return grad" in body


@probes("compile_id")
def test_compile_id() -> None:
    assert look(lambda gm, _: compat.compile_id()) == "0/0"
    assert compat.compile_id() == ""


@probes("recompile_reason")
def test_a_second_compilation_has_a_reason() -> None:
    reasons = []

    def asking(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reasons.append(compat.recompile_reason())
        return gm.forward

    run = torch.compile(torch.tanh, backend=asking)
    for length in (2, 3):
        run(torch.ones(length))
    assert reasons[0] == ""
    assert "size mismatch at index 0. expected 2, actual 3" in reasons[1]
    assert compat.recompile_reason() == ""


@probes("trace_artifact")
def test_an_artifact_goes_into_the_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def trace(name: str, metadata_fn: Any, *, payload_fn: Any, expect_trace_id: bool) -> None:
        written.extend([name, metadata_fn()["name"], payload_fn()])

    parameters = inspect.signature(torch._logging.trace_structured).parameters
    assert {"metadata_fn", "payload_fn", "expect_trace_id"} <= set(parameters)
    monkeypatch.setattr(torch._logging, "trace_structured", trace)
    compat.trace_artifact("probe", lambda: "text")
    assert written == ["artifact", "probe", "text"]


def test_stack_traces_and_module_paths_are_recorded() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        for node in calls(gm):
            assert Path(__file__).name in node.meta["stack_trace"]

    look(question)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def paths(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in calls(gm):
            assert any("inner" in entry[0] for entry in node.meta["nn_module_stack"].values())
        return gm.forward

    torch.compile(Outer(), backend=paths)(torch.ones(5, 4))


@probes("ignore_while_tracing")
def test_a_logging_function_can_be_ignored() -> None:
    import logging

    from torch._dynamo import config

    log = logging.getLogger("memeff_compile_test_of_ignored_logs")
    before = set(config.ignore_logging_functions)
    try:
        compat.ignore_while_tracing(log.warning)
        compat.ignore_while_tracing(log.warning)
        assert len(config.ignore_logging_functions) == len(before) + 1
        assert log.warning in config.ignore_logging_functions

        def function(x: Tensor) -> Tensor:
            log.warning("not while compiling")
            return x + 1

        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    finally:
        config.ignore_logging_functions.clear()
        config.ignore_logging_functions.update(before)


@probes("substitute_while_tracing")
def test_a_function_can_be_traced_as_another() -> None:
    def function(x: Tensor, *, by: float = 2.0) -> Tensor:
        torch._dynamo.graph_break()
        return x * by

    def substitute(x: Tensor, *, by: float = 3.0) -> Tensor:
        return x * by if torch.compiler.is_compiling() else original(x, by=by)

    original = compat.substitute_while_tracing(function, substitute)
    assert original(torch.ones(2)).tolist() == [2, 2]
    compiled = torch.compile(lambda x: function(x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [4, 4]


@probes("chunks_probability_targets")
def test_the_targets_of_the_chunked_loss_are_known() -> None:
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        assert compat.chunks_probability_targets() is not torch.__version__.startswith("2.13.")


# --- symbols ----------------------------------------------------------------------------------------------


@probes("symbols_of")
def test_the_symbols_of_values_are_named() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        x = next(n for n in placeholders(gm) if compat.source_name(n) == "L['x']")
        value = compat.example_value(x)
        rows = value.shape[0]
        assert compat.symbols_of(value) == compat.symbols_of([rows, None]) == {str(rows)}
        assert compat.symbols_of((7, "text")) == set()

    look(question, torch.ones(5, 4), dynamic=True)


@probes("statically_true", "known_size", "size_hint", "known_number", "hold_constant")
def test_symbols_are_read_without_guards() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        x = next(n for n in placeholders(gm) if compat.source_name(n) == "L['x']")
        rows = compat.example_value(x).shape[0]
        assert isinstance(rows, torch.SymInt)
        assert compat.known_size(rows) is None
        assert compat.size_hint(rows) == 5
        assert compat.statically_true(rows == rows)
        assert not compat.statically_true(rows == 5)
        assert compat.known_size(compat.example_value(x).shape[1]) == 4
        weight = next(n for n in placeholders(gm) if "weight" in compat.source_name(n))
        assert compat.known_size(compat.example_value(weight).shape[1]) == 3
        guards = len(rows.node.shape_env.guards)
        sizes = [n for n in placeholders(gm) if ".size()" in compat.source_name(n)]
        assert [compat.known_number(n) for n in sizes] == [None] * len(sizes)
        assert sizes
        scale = next(n for n in calls(gm) if "truediv" in str(n.target)).args[1]
        assert isinstance(compat.example_value(scale), torch.SymFloat)
        assert compat.known_number(scale) == 30.0
        assert len(rows.node.shape_env.guards) == guards
        compat.hold_constant(scale)
        assert compat.known_number(scale) == 30.0
        assert not compat.example_value(scale).node.expr.free_symbols

    look(question, torch.ones(5, 4), dynamic=True)


@probes("known_number", "known_size", "size_hint", "statically_true", "hold_constant")
def test_plain_numbers_are_themselves() -> None:
    assert compat.known_number(2) == 2
    assert compat.known_number(0.5) == 0.5
    assert compat.known_number(None) is None
    assert compat.known_number(True) is None
    assert compat.known_size(7) == compat.size_hint(7) == 7
    assert compat.statically_true(True)
    compat.hold_constant(3)


# --- fake tensors and tracing -----------------------------------------------------------------------------


@probes("storage_key")
def test_views_share_the_storage_key_of_their_base() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        x = compat.example_value(placeholders(gm)[0])
        with x.fake_mode:
            assert compat.storage_key(x) == compat.storage_key(x.view(-1)[1:])
            assert compat.storage_key(x) != compat.storage_key(x.clone())

    look(question)


def test_composite_ops_are_traced_whole() -> None:
    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> list[str]:
        x, w = (compat.example_value(n) for n in placeholders(gm)[:2])
        x, w = (x, w) if x.shape == (5, 4) else (w, x)
        graph = make_fx(lambda a, b: nn.functional.linear(a, b.t()), pre_dispatch=True)(x, w).graph
        return [str(n.target) for n in graph.nodes if n.op == "call_function"]

    assert look(question) == ["aten.t.default", "aten.linear.default"]


def test_exporting_is_seen() -> None:
    seen = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.compiler.is_exporting())
            return x + 1

    Asking()(torch.ones(2))
    torch.export.export(Asking(), (torch.ones(2),), strict=False)
    assert seen[0] is False
    assert any(seen[1:])


# --- compilers --------------------------------------------------------------------------------------------


@probes("inductor_modes", "inductor_uses_cudagraphs", "inductor_config")
def test_modes_and_config_of_inductor() -> None:
    modes = compat.inductor_modes()
    assert modes["default"] == {}
    assert compat.inductor_uses_cudagraphs(modes["reduce-overhead"])
    known, type_of = compat.inductor_config()
    assert known["triton.cudagraphs"] is False
    assert type_of("triton.cudagraphs") is bool
    assert not compat.inductor_uses_cudagraphs({})


@probes("compile_with_aot_eager")
def test_aot_eager_compiles_a_graph() -> None:
    model = Model()
    compiled = torch.compile(model, backend=compat.compile_with_aot_eager)
    compiled(torch.ones(5, 4)).sum().backward()
    assert model.weight.grad is not None


@needs_compiler
@pytest.mark.usefixtures("inductors_loops")
@probes("compile_with_inductor")
def test_inductor_compiles_a_graph_under_patches() -> None:
    patches = {"compile_threads": 1, "epilogue_fusion": False}
    model = ToyModel()
    compiled = torch.compile(
        model, backend=lambda gm, inputs: compat.compile_with_inductor(gm, inputs, patches)
    )
    compiled(torch.arange(8)).backward()
    assert model.head.weight.grad is not None


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that gets the settings of each later compilation, in place of compiling."""
    import torch._inductor.compile_fx

    given: list[dict[str, Any]] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: Any) -> Any:
        given.append(config_patches)
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    return given


@probes("compile_with_inductor")
def test_what_inductor_keeps_on_disk_is_tagged(settings: list[dict[str, Any]]) -> None:
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphHashDetails

    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    for tag in ("", "", "another choice"):
        compat.compile_with_inductor(graph, [], {}, tag)
    tags = [each["unsafe_marked_cacheable_functions"]["memeff_compile"] for each in settings]
    assert tags[0] == tags[1]
    assert len(set(tags)) == 2
    assert all(compat.op_fingerprint() in tag for tag in tags)
    keys = []
    for patches in ({}, *settings):
        with config.patch(patches):  # type: ignore[attr-defined]
            keys.append(repr(FxGraphHashDetails(graph, [], {}, []).inductor_config))
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3


@probes("compile_with_inductor")
def test_inductor_stores_graphs_that_replay_random_numbers(
    settings: list[dict[str, Any]],
) -> None:
    from torch._inductor import codecache, config
    from torch._prims import rng_prims

    graph = torch.fx.Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    given = (torch.ops.aten.bernoulli.default, x)
    op = rng_prims.graphsafe_run_with_rng_state
    graph.output(graph.call_function(op, given, {"rng_state": state}))
    gm = GraphModule(nn.Module(), graph)
    own = {"torch.ops.own": "1"}
    compat.compile_with_inductor(gm, [], {"unsafe_marked_cacheable_functions": own})
    with config.patch(settings[0]):  # type: ignore[attr-defined]
        assert own.items() <= config.unsafe_marked_cacheable_functions.items()
        codecache.FxGraphCache._check_for_hop(gm)
    if not op.cacheable():  # before torch 2.13
        with pytest.raises(codecache.BypassFxGraphCache):
            codecache.FxGraphCache._check_for_hop(gm)


@probes("record_artifact", "loaded_artifacts")
def test_artifacts_of_this_package_are_saved_and_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        compat.record_artifact("name", {"key": [1]})
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        assert compat.loaded_artifacts() == {}
        torch.compiler.load_cache_artifacts(saved[0])
        assert {name: read() for name, read in compat.loaded_artifacts().items()} == {
            "name": {"key": [1]}
        }


@probes("op_fingerprint")
def test_fingerprint_follows_schemas_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import memeff_compile.kernels.linear_cross_entropy  # noqa: F401  (registers an op)

    before = compat.op_fingerprint()
    assert compat.op_fingerprint() == before
    library = torch.library.Library("memeff", "FRAGMENT")
    library.define("fingerprint_probe(Tensor x) -> Tensor")
    assert compat.op_fingerprint() != before
    library._destroy()
    assert compat.op_fingerprint() == before
    monkeypatch.setattr("memeff_compile.__version__", "0.0.0")
    assert compat.op_fingerprint() != before


def test_regions_are_entered_and_left_by_known_names() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            y = x * 2
        return y.clone()

    names: list[str] = []

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names.extend(n.target.__name__ for n in calls(gm) if n.op == "call_function")
        return gm.forward

    torch.compile(function, backend=question, fullgraph=True)(torch.ones(2))
    for name in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast"):
        assert name in names
    assert {"_enter_inference_mode", "_exit_inference_mode"} <= set(names)


def test_checkpoint_bodies_hang_on_a_known_operator() -> None:
    from torch.utils.checkpoint import checkpoint

    names: list[str] = []

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names.extend(
            n.target.name()
            for n in calls(gm)
            if isinstance(n.target, torch._ops.HigherOrderOperator)
        )
        return gm.forward

    def function(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False)

    torch.compile(function, backend=question)(torch.ones(2, requires_grad=True))
    assert names == ["tag_activation_checkpoint"]


@probes("call_in_inductor")
def test_inductor_calls_the_function_of_an_op() -> None:
    with torch.library._scoped_library("memeff_test", "FRAGMENT") as library:
        library.define("seen(Tensor x, int[] more) -> Tensor[]")
        library.impl("seen", lambda x, more: [x + 1], "CompositeExplicitAutograd")
        fake = lambda x, more: [torch.empty_like(x)]  # noqa: E731
        torch.library.register_fake("memeff_test::seen", fake, lib=library)
        op, called = torch.ops.memeff_test.seen.default, []
        op.direct = lambda x, more: called.append(more) or [x + 2]
        compat.call_in_inductor(op)
        compiled = torch.compile(lambda x: op(x * 1, [7])[0])
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 3.0))
        assert op(torch.ones(1), [7]) == [torch.full((1,), 2.0)]
        assert called == [[7]]


@probes("recompute_in_backward")
def test_a_marked_call_is_computed_again_instead_of_kept() -> None:
    def saved(*, is_marked: bool) -> int:
        def question(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            for node in gm.graph.nodes:
                if is_marked and node.name == "product":
                    compat.recompute_in_backward(node)
            return compat.compile_with_aot_eager(gm, example_inputs)

        def function(x: Tensor) -> Tensor:
            product = x @ x
            return product.sin().cos()

        x, held = torch.ones(8, 8, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            torch.compile(function, backend=question, fullgraph=True)(x).sum().backward()
        return sum(t.nbytes for t in held if t.data_ptr() != x.data_ptr())

    torch._dynamo.reset()
    kept = saved(is_marked=False)
    torch._dynamo.reset()
    assert saved(is_marked=True) < kept


@probes("has_checkpoint_policy")
@pytest.mark.parametrize("has_policy", [True, False], ids=["policy", "no policy"])
def test_a_checkpoints_policy_hangs_on_its_body(has_policy: bool) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    found: list[bool] = []

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        bodies = [m for m in gm.children() if isinstance(m, GraphModule)]
        found.extend(compat.has_checkpoint_policy(body) for body in bodies)
        return gm.forward

    def function(x: Tensor) -> Tensor:
        settings = {"context_fn": contexts} if has_policy else {}
        return checkpoint(torch.sin, x, use_reentrant=False, **settings)

    torch.compile(function, backend=question)(torch.ones(2, requires_grad=True))
    assert found == [has_policy]


@probes("keep_in_checkpoint", "is_kept")
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
def test_what_a_checkpoint_keeps_is_not_computed_again(is_kept: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        (body,) = (m for m in gm.children() if isinstance(m, GraphModule))
        product = next(n for n in body.graph.nodes if n.op == "call_function")
        undo = compat.keep_in_checkpoint(body, {product: "product"})
        assert compat.is_kept(product)
        if not is_kept:
            undo()
        return compat.compile_with_aot_eager(gm, example_inputs)

    x, held = torch.ones(8, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        torch.compile(
            lambda x: checkpoint(lambda x: (x @ x).sin(), x, use_reentrant=False), backend=question
        )(x)
    assert len(held) == 1 + is_kept


@probes("may_be_under_policy")
def test_operations_on_graphs_that_policies_serve() -> None:
    served = (torch.sin, torch.ops.higher_order.flex_attention, "sin")
    assert all(map(compat.may_be_under_policy, served))
    assert compat.may_be_under_policy(torch.ops.higher_order.tag_activation_checkpoint)
    assert not compat.may_be_under_policy(torch.ops.higher_order.cond)


# --- next to the caller -----------------------------------------------------------------------------------


@probes("readable_source")
def test_inputs_have_the_names_of_their_owner() -> None:
    def names(gm: GraphModule, example_inputs: Sequence[Any]) -> set[str]:
        return {compat.readable_source(n) for n in gm.graph.nodes if n.op == "placeholder"}

    assert {"weight", "offset", "x"} <= look(names)


@probes("beside_autograd", "unseen_by_saved_tensor_hooks", "outside_dispatch_modes")
def test_autograd_beside_the_callers_is_seen_by_nobody() -> None:
    from torch._dynamo import compiled_autograd
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def pack(tensor: Tensor) -> Tensor:
        seen.append("saved")
        return tensor

    x = torch.ones(2, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    compiler = compiled_autograd._enable(lambda gm: seen.append("compiled"))
    with Watches(), hooks, compiler:
        with compat.beside_autograd():
            (gradient,) = torch.autograd.grad(x.exp().sum(), x)
        assert not seen
        with compat.unseen_by_saved_tensor_hooks():
            x.exp()
        assert seen == ["aten.exp.default"]
        with compat.outside_dispatch_modes():
            x.exp()
        assert seen == ["aten.exp.default", "saved"]
        x.exp()
    assert seen == ["aten.exp.default", "saved", "aten.exp.default", "saved"]
    torch.testing.assert_close(gradient, x.detach().exp())


# --- distributed ------------------------------------------------------------------------------------------


@probes("is_dtensor", "local_part", "fsdp_shard", "fsdp_frees_after_forward", "is_sharded_by_fsdp")
def test_plain_tensors_belong_to_no_group() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not compat.is_dtensor(weight)
    assert compat.local_part(weight) is weight
    assert compat.fsdp_shard(weight) is None
    assert not compat.fsdp_frees_after_forward(weight)
    assert not compat.fsdp_frees_after_forward(None)
    assert not compat.is_sharded_by_fsdp(weight)
    assert not compat.is_tensor_parallel(weight)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
@probes("is_dtensor", "local_part", "fsdp_shard", "fsdp_frees_after_forward")
@probes("shards_by_fsdp2", "is_fsdp_shard", "put_fsdp_shard", "with_local_part", "fsdp_shards")
@probes("is_tensor_parallel", "is_fsdp2_module", "fsdp_group", "sharded_with")
@probes("awaits_backward", "keep_gathered", "free_last_gather")
def test_parameters_of_fsdp2_are_found() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        inner, outer = nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.Sequential(inner, outer)
        fully_shard(inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert compat.shards_by_fsdp2()
        assert compat.is_dtensor(outer.weight)
        assert not compat.is_dtensor(compat.local_part(outer.weight))
        assert compat.is_fsdp_shard(outer.weight)
        shard = compat.fsdp_shards()[id(outer.weight)]
        assert shard.holds(outer.weight)
        assert not shard.holds(inner.weight)
        assert not shard.is_on_host
        doubled = compat.local_part(outer.weight).detach() * 2
        assert torch.equal(compat.with_local_part(outer.weight, doubled).to_local(), doubled)
        assert compat.put_fsdp_shard(outer, "weight", doubled)
        assert torch.equal(compat.local_part(outer.weight), doubled)
        assert not outer.weight.requires_grad
        inner.unshard()
        model.unshard()
        assert isinstance(compat.fsdp_shard(outer.weight), Tensor)
        assert compat.fsdp_group(inner.weight) == (inner,)
        assert compat.fsdp_group(torch.ones(1)) == ()
        assert compat.sharded_with(torch.ones(1)) == []
        assert compat.is_fsdp2_module(inner)
        assert not compat.is_fsdp2_module(nn.Linear(2, 2))
        assert compat.fsdp_frees_after_forward(inner.weight)
        assert compat.is_sharded_by_fsdp(inner.weight)
        assert compat.is_sharded_by_fsdp(outer.weight)
        assert torch.equal(outer.weight, doubled)
        assert not compat.is_fsdp_shard(outer.weight)
        assert not compat.put_fsdp_shard(outer, "weight", doubled)
        model(torch.ones(1, 4)).sum().backward()
        model.unshard()
        assert set(compat.sharded_with(outer.weight)) == {inner, model}  # after the root has run
        model.reshard()
        assert not compat.awaits_backward(inner)
        result = model(torch.ones(1, 4)).sum()
        assert compat.awaits_backward(inner)
        result.backward()
        assert not compat.awaits_backward(inner)
        for stays in (True, False):
            compat.keep_gathered(inner, stays)
            with torch.no_grad():
                model(torch.ones(1, 4))
            assert compat.is_fsdp_shard(inner.weight) is not stays

        communication = inner._get_fsdp_state()._comm_ctx
        communication.all_gather_state = SimpleNamespace(event=torch.cpu.Event())  # of two ranks
        compat.free_last_gather(inner)
        assert communication.all_gather_state is None
        compat.free_last_gather(inner)

        both = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
        cut = parallelize_module(nn.Linear(4, 4), both["tensor"], ColwiseParallel())
        assert compat.is_tensor_parallel(cut.weight)
        fully_shard(cut, mesh=both["data"])
        assert compat.is_tensor_parallel(cut.weight)
        inner.reshard()
        assert compat.is_fsdp_shard(inner.weight)
        assert not compat.is_tensor_parallel(inner.weight)
    finally:
        dist.destroy_process_group()


class Twice(nn.Module):
    """A module with code of its own: Dynamo compiles no call of PyTorch's modules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)


@probes("compile_once", "compile_between_hooks", "compiled_module")
def test_modules_are_compiled_from_an_idle_call_on_or_between_their_hooks() -> None:
    found: list[Any] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(compat.compiled_module())
        return gm.forward

    module, is_idle = Twice(), [False]
    compat.compile_once(module, {"backend": keep}, lambda _: is_idle[0])
    x = torch.ones(1, 2)
    expected = 2 * module.linear(x)
    assert torch.equal(module(x), expected)
    assert not found
    is_idle[0] = True
    assert torch.equal(module(x), expected)
    assert len(found) == 1

    hooked, called = nn.Linear(2, 2), []
    hooked.register_forward_hook(lambda *_: called.append("hook"))
    compat.compile_between_hooks(hooked, {"backend": keep}, lambda m: called.append(m is hooked))
    assert torch.equal(hooked(x), torch.nn.functional.linear(x, *hooked.parameters()))
    assert called == [True, "hook"]
    assert len(found) == 2

    torch._dynamo.reset()  # all modules of a class share compiled code
    model = Twice()
    model.compile(backend=keep)
    model(x)
    assert found[-1] is model
    assert compat.compiled_module() is None


@probes("is_aligned")
def test_addresses_are_multiples_of_sixteen_bytes_or_are_not() -> None:
    x = torch.ones(16)
    assert compat.is_aligned(x)
    assert not compat.is_aligned(x[1:])
    with compat.fake_mode(lambda op, args, kwargs, run: run()):
        fake = torch.ones(16)
        assert compat.is_aligned(fake)
        assert not compat.is_aligned(fake[1:])


@probes("start_compile_workers")
def test_inductors_processes_are_started_by_its_own_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import async_compile

    called: list[bool] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: called.append(True))
    compat.start_compile_workers()
    assert called == [True]


CHECKS_VECTORS = """
import sys
import torch
from torch._inductor import config, cpp_builder, cpu_vec_isa
from memeff_compile import compat

programs, build = [], cpp_builder.CppBuilder.build

def building(self):
    programs.append(self)
    build(self)

cpp_builder.CppBuilder.build = building
every = cpu_vec_isa.valid_vec_isa_list
if sys.argv[1] == "alone":
    chosen = cpu_vec_isa.pick_vec_isa()
else:
    with compat.checks_best_vectors_only({}):
        chosen = cpu_vec_isa.pick_vec_isa()
        assert cpu_vec_isa.pick_vec_isa() is chosen
        assert every.cache_info().currsize == 0
        with config.patch({"cpp.simdlen": 1}):  # asks for a set that no CPU has
            expected = cpu_vec_isa.pick_vec_isa()
    assert cpu_vec_isa.valid_vec_isa_list is every
    assert cpu_vec_isa.pick_vec_isa() is chosen
    assert expected is cpu_vec_isa.invalid_vec_isa
    programs = programs[:1]
print(len(programs), type(chosen).__name__, chosen.build_arch_flags())
"""


@probes("checks_best_vectors_only")
@needs_compiler
@pytest.mark.slow  # it compiles PyTorch's headers for each set of vector instructions
def test_inductor_chooses_the_same_vector_instructions_and_checks_only_these(
    tmp_path: Path,
) -> None:
    def run(name: str) -> list[str]:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        env.pop("TORCHINDUCTOR_VEC_ISA_OK", None)  # as in the tests' own process
        command = [sys.executable, "-c", CHECKS_VECTORS, name]
        done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run("best")[1:] == run("alone")[1:]


@probes("checks_best_vectors_only")
@pytest.mark.parametrize("works", [True, False])
def test_only_the_best_vector_instructions_are_checked_if_they_work(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    from torch._inductor import config, cpu_vec_isa

    checked: list[str] = []

    class Instructions:
        def __init__(self, name: str, works: bool) -> None:
            self.name, self.works = name, works

        def __str__(self) -> str:
            return self.name

        def __bool__(self) -> bool:
            checked.append(self.name)
            return self.works

    best, other = Instructions("avx512", works), Instructions("avx2", True)
    found = [best, other] if works else [other]

    @cache
    def every() -> list[Any]:
        return found

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(compat.inductor, "_best_found", [])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [best, other])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", every)
    asks_for_none = config.patch({"cpp.vec_isa_ok": None})  # type: ignore[attr-defined]
    with asks_for_none, compat.checks_best_vectors_only({}):
        for _ in range(2):
            assert cpu_vec_isa.pick_vec_isa() is (best if works else other)
    assert checked == (["avx512"] if works else ["avx512", "avx2"])
    assert every.cache_info().currsize == 0
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with compat.checks_best_vectors_only({}):
        assert cpu_vec_isa.pick_vec_isa() is other
    assert every.cache_info().currsize == 1


@probes("waits_for_kernels_at_end")
@pytest.mark.parametrize("tunes", [False, True])
def test_inductor_waits_for_the_kernels_of_several_graphs_together(
    monkeypatch: pytest.MonkeyPatch, tunes: bool
) -> None:
    from torch._functorch import config
    from torch._inductor.async_compile import AsyncCompile

    order: list[Any] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: order.append(scope))
    waits = AsyncCompile.wait
    with compat.waits_for_kernels_at_end({"max_autotune": tunes}, trains=True):
        AsyncCompile().wait({"one": 1})
        AsyncCompile().wait({"two": 2})
        order.append("compiled")
        assert config.force_non_lazy_backward_lowering is not tunes
    assert not config.force_non_lazy_backward_lowering
    assert AsyncCompile.wait is waits
    kernels = [{"one": 1}, {"two": 2}]
    assert order == ([*kernels, "compiled"] if tunes else ["compiled", *kernels])
    with pytest.raises(ZeroDivisionError), compat.waits_for_kernels_at_end({}, trains=False):
        raise ZeroDivisionError
    assert AsyncCompile.wait is waits


@probes("is_compiled_by_itself")
def test_modules_that_are_compiled_by_themselves_are_known() -> None:
    module, wrapped = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not compat.is_compiled_by_itself(module)
    module.compile(backend="eager")
    assert compat.is_compiled_by_itself(module)
    wrapped.forward = torch.compile(wrapped.forward, backend="eager")  # type: ignore[method-assign]
    assert compat.is_compiled_by_itself(wrapped)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
@probes("gathering_ops")
def test_ranks_gather_what_each_has() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gather, wait = compat.gathering_ops()
        name = dist.group.WORLD.group_name
        assert torch.equal(wait(gather(torch.ones(2, 3), 1, name)), torch.ones(2, 3))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
@probes("offset_of_part")
def test_a_part_of_a_dtensor_begins_where_it_was_cut() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
        for rows, held, first in ((9, 3, 6), (5, 1, 4), (3, 1, 2), (2, 0, 2)):
            shape = {"shape": torch.Size((rows, 2)), "stride": (2, 1)}
            part = DTensor.from_local(torch.ones(held, 2), mesh, [Shard(0)], **shape)
            assert compat.offset_of_part(part) == (first, 0)
    finally:
        dist.destroy_process_group()


@probes("without_autocast")
def test_autocast_is_kept_away_and_devices_without_it_are_left_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16), compat.without_autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with compat.without_autocast("meta"), compat.without_autocast("cpu"):
        assert not torch.is_autocast_enabled("cpu")


@probes("cut_inside")
def test_the_function_inside_which_dynamo_cuts_is_named() -> None:
    seen: list[str] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(compat.cut_inside(gm))
        return gm.forward

    def cuts(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    torch.compile(lambda x: cuts(x * 2) * 3, backend=keep)(torch.ones(2))
    assert seen[0] == "cuts"
    assert seen[-1] == ""


@probes("is_cut_in")
def test_the_file_in_which_dynamo_cuts_is_known() -> None:
    seen: list[list[bool]] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append([compat.is_cut_in(gm, file) for file in ("tests/test_compat.py", "other.py")])
        return gm.forward

    def cuts(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    torch.compile(lambda x: cuts(x * 2) * 3, backend=keep)(torch.ones(2))
    assert seen[0] == [True, False]
    assert seen[-1] == [False, False]


@probes("capturing_backend")
def test_the_backend_that_a_graph_is_captured_for_is_known() -> None:
    seen: list[object] = []

    @compat.constant_in_traces
    def ask() -> int:
        seen.append(compat.capturing_backend())
        return 1

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return gm.forward

    for given in (backend, "eager"):
        torch._dynamo.reset()
        torch.compile(lambda x: x + ask(), backend=given)(torch.ones(2))  # type: ignore[call-overload]
    assert seen[0] is backend
    assert getattr(seen[-1], "__name__", "") == "eager"
    assert compat.capturing_backend() is None


@probes("forward_hooks")
def test_hooks_around_forward_are_listed() -> None:
    module = nn.Linear(2, 2)
    assert compat.forward_hooks(module) == []
    module.register_forward_hook(print)
    module.register_forward_pre_hook(repr)
    assert compat.forward_hooks(module) == [repr, print]


@probes("is_compiled_in_place")
def test_a_module_that_is_compiled_in_place_is_known() -> None:
    module = nn.Linear(2, 2)
    torch.compile(module, backend="eager")
    assert not compat.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert compat.is_compiled_in_place(module)


@needs_compiler
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="aot_compile of torch 2.11 saves no graph of AOTAutograd"
)
@probes("is_to_be_saved", "has_artifact", "let_be_saved", "serialized", "deserialized")
def test_an_artifact_of_inductor_is_saved_and_read() -> None:
    from torch._dynamo.aot_compile_types import SerializableCallable
    from torch._functorch import config

    class Kept:
        pass

    compat.let_be_saved(Kept)
    assert issubclass(Kept, SerializableCallable)
    assert not compat.is_to_be_saved()
    with config.patch(bypass_autograd_cache_key=True):
        assert compat.is_to_be_saved()
    assert not compat.has_artifact(lambda x: x)
    found: list[Any] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(compat.compile_with_inductor(gm, example_inputs, {}))
        return cast("Callable[..., Any]", found[-1])

    torch._dynamo.reset()
    torch.compile(lambda x: x * 2 + 1, backend=keep, fullgraph=True).aot_compile(
        ((torch.ones(3),), {})
    )
    (compiled,) = found
    assert compat.has_artifact(compiled)
    again = compat.deserialized(compat.serialized(compiled))
    assert torch.equal(again(torch.ones(3))[0], torch.full((3,), 3.0))


def test_every_function_of_compat_is_probed() -> None:
    functions = {
        name
        for name, value in vars(compat).items()
        if inspect.isfunction(value) and value.__module__.startswith(compat.__name__)
    }
    public = {name for name in functions if not name.startswith("_")}
    assert public <= PROBED, public - PROBED


PACKAGE = Path(compat.__file__).parents[1]
OWN_WORDS = {"_replace", "_fields", "_asdict"}  # of named tuples: public
REGISTRIES = {
    # nn.Module has no public way to replace a parameter by a tensor of a subclass or to remove it,
    # nor to distinguish stored from computed buffers.
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
}
UNAVOIDABLE = {
    ("kernels/_head_loss/faults.py", "_check"),  # documented by torch, underscore and all
    ("kernels/_triton/gluon.py", "_reinterpret"),  # of Gluon, public by its name since Triton 3.9
    # of transformers, whose quantizers use them for reading and writing
    ("model/ternary/pretrained.py", "_keys_to_ignore_on_load_unexpected"),
    ("model/ternary/pretrained.py", "_weight_conversions"),
    ("model/weights/pretrained.py", "_weight_conversions"),
    ("model/weights/pretrained.py", "_hf_hook"),  # of accelerate: which weights it moves, and when
    # of torchtitan, which refuses other backends there
    ("integrations/torchtitan.py", "_maybe_regional_inductor_backend"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """Return every name that the package itself defines."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Return the private names of other packages that a file imports or reads as attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found |= {name for name in names if is_private(name)}
        elif isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names if alias.name.startswith("torch")):
                found |= {part for part in name.split(".") if is_private(part)}
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if node.attr in own and owner.split(".")[0] != "torch":
                continue
            is_op = owner.split(".")[-1].lstrip("_") == "aten"  # the name of an op is public
            if not is_op and not re.fullmatch(r"self|cls", owner):
                found.add(node.attr)
    return found


def test_private_names_of_torch_stand_in_compat_only() -> None:
    """This covers the whole package, with imports inside functions and attributes of objects."""
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != Path(compat.__file__).parent
    }
    own = own_names(trees.values())
    seen = {
        (file, name)
        for file, tree in trees.items()
        if not file.endswith("_kernels.py")  # device code, which uses Triton
        for name in private_names(tree, own)
    }
    left = {(file, name) for file, name in seen if name not in OWN_WORDS | REGISTRIES}
    assert left <= UNAVOIDABLE, left - UNAVOIDABLE
    assert left >= UNAVOIDABLE, "no longer needed in the list"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch._inductor import config", "_inductor"),
        ("def f():\n    import torch._dynamo", "_dynamo"),
        ("from torch.utils import _pytree", "_pytree"),
        ("torch._C.something()", "_C"),
        ("def f(x):\n    return x._version", "_version"),
    ],
)
def test_a_private_name_is_seen(text: str, name: str) -> None:
    assert private_names(ast.parse(text), set()) == {name}


class _Memoryless(Tensor):
    """A tensor of twos without memory."""

    device = torch.device("cpu")  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in compat.ABOUT_MEMORY:
            return compat.ABOUT_MEMORY[func](*args)
        args = [torch.full(x.shape, 2.0) if isinstance(x, _Memoryless) else x for x in args]
        return func(*args, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def refuse_memory(self) -> None:
        raise TypeError("it has no memory")


@probes("make_without_memory")
def test_a_tensor_without_memory_gives_none_away() -> None:
    tensor = compat.make_without_memory(
        _Memoryless, (2, 3), dtype=torch.float32, device=torch.device("cpu")
    )
    assert torch.equal(tensor + 1, torch.full((2, 3), 3.0))
    other = torch.ones(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.matmul(tensor, tensor.t()).dtype == torch.bfloat16
    for _ in range(2):
        with pytest.raises(TypeError, match="no memory"):
            other.data = tensor
        with pytest.raises(TypeError, match="no memory"), torch.inference_mode():
            tensor.data = other
    with pytest.raises(NotImplementedError):
        tensor.untyped_storage().tolist()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(tensor)
    assert torch.equal(other, torch.ones(2, 3))
    meta = torch.ones(2, device="meta")
    meta.data = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        meta.data = other
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert tensor.is_cpu


@probes("can_be_swapped")
def test_a_tensor_with_a_weak_reference_is_not_swapped() -> None:
    tensor = torch.ones(2)
    assert compat.can_be_swapped(tensor)
    kept = weakref.ref(tensor)
    assert not compat.can_be_swapped(tensor)
    assert kept() is tensor


@probes("is_forward_mode_active")
def test_forward_mode_is_noticed() -> None:
    assert not compat.is_forward_mode_active()
    with torch.autograd.forward_ad.dual_level():
        assert compat.is_forward_mode_active()


@probes("multiplies_bf16")
def test_whether_a_cpu_multiplies_bf16_is_known() -> None:
    has = compat.multiplies_bf16()
    assert isinstance(has, bool)
    if "AVX2" in torch.backends.cpu.get_cpu_capability():
        assert not has


# --- memory that a backward pass may overwrite ----------------------------------------------------


@probes("is_traced", "frees_saved_tensors", "packs_saved_tensors")
def test_a_backward_knows_whether_it_is_the_last_to_read() -> None:
    seen: list[tuple[bool, bool]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            packed.append(compat.packs_saved_tensors())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append((compat.is_traced(gradient), compat.frees_saved_tensors()))
            return gradient

    packed: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    total = Probe.apply(x).sum()  # type: ignore[no-untyped-call]
    total.backward(retain_graph=True)
    total.backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        Probe.apply(x)  # type: ignore[no-untyped-call]
    assert seen == [(False, False), (False, True)]
    assert packed == [False, True]
    assert not compat.frees_saved_tensors()
    with FakeTensorMode():
        assert compat.is_traced(torch.ones(2))


@probes("is_under_checkpoint")
def test_a_checkpoint_around_the_code_is_noticed_both_times() -> None:
    from torch.utils.checkpoint import checkpoint

    seen: list[bool] = []

    def body(x: Tensor) -> Tensor:
        seen.append(compat.is_under_checkpoint())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(body, x, use_reentrant=False).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        body(x)
    body(x)
    assert seen == [True, True, False, False]


# --- addresses ------------------------------------------------------------------------------------


@probes("holds", "mark_varying")
def test_a_size_that_varies_is_guarded_where_it_is_asked_about() -> None:
    found: list[bool] = []

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        x = next(n for n in placeholders(gm) if isinstance(compat.example_value(n), Tensor))
        found.append(compat.holds(compat.example_value(x).shape[0] >= 6))
        return gm.forward

    step = torch.compile(lambda x: x * 2, backend=question)
    for rows in (4, 5, 7, 8, 3):
        x = torch.ones(rows, 2)
        compat.mark_varying(x, 0)
        assert step(x).sum() == 4 * rows
    assert found == [False, True]
    assert compat.holds(True)
    assert not compat.holds(False)


@probes("wrap_compiled")
def test_what_is_compiled_in_place_is_wrapped() -> None:
    model, calls = nn.Linear(2, 2), []
    model.compile(backend="eager")

    def noted(call: Any) -> Any:
        def run(x: Tensor) -> Any:
            calls.append(x)
            return call(x)

        return run

    compat.wrap_compiled(model, noted)
    x = torch.ones(1, 2)
    assert torch.equal(model(x), model._call_impl(x))
    assert len(calls) == 1


@probes("names_around")
def test_names_of_a_caller_are_read() -> None:
    def asks() -> dict[str, Any]:
        return compat.names_around()

    here = object()
    assert asks()["here"] is here


@probes("keep_address")
def test_a_tensor_that_stays_is_known_to_dynamo() -> None:
    held, other = torch.zeros(3), torch.zeros(3)
    compat.keep_address(held)
    kinds: list[dict[str, Any]] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        kinds.extend(node.meta.get("tensor_dict", {}) for node in placeholders(gm))
        return gm.forward

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        compat.keep_address(a)
        return a + b

    torch.compile(function, backend=keep, fullgraph=True)(held, other)
    assert ["_dynamo_static_input_type" in kind for kind in kinds] == [True, False]


@probes("without_compile")
def test_a_compiled_module_gives_back_what_it_was_made_of() -> None:
    linear = torch.nn.Linear(2, 2)
    assert compat.without_compile(linear) is linear
    assert compat.without_compile(torch.compile(linear, backend="eager")) is linear


@probes("compile_in_place", "backend_of", "undo_compile", "original_of")
def test_a_module_of_pytorch_is_compiled_in_place_by_a_backend_that_is_found_again() -> None:
    linear, graphs = torch.nn.Linear(2, 2), []

    def keep(gm: GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    compat.compile_in_place(linear, {"backend": keep})
    linear(torch.ones(1, 2))
    assert len(graphs) == 1
    assert compat.backend_of(linear._compiled_call_impl) == ("keep", {})
    assert compat.undo_compile(linear, "another") == ""
    assert compat.undo_compile(linear, "keep") == "no longer compiled"
    assert linear._compiled_call_impl is None
    wrapper = torch.compile(linear, backend=keep, options={"a": 1})
    assert compat.backend_of(wrapper.forward) == ("keep", {"a": 1})
    assert compat.original_of(wrapper) is linear
    assert compat.original_of(linear) is None
    assert compat.undo_compile(wrapper, "keep")
    assert compat.backend_of(wrapper.forward) is None
    assert compat.backend_of(None) is compat.backend_of(len) is None


@probes("compiling_is_off")
def test_what_turns_compiling_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.compiling_is_off()
    with torch.compiler.set_stance("force_eager"):
        assert compat.compiling_is_off()
    with torch._dynamo.config.patch(disable=True):
        assert compat.compiling_is_off()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert compat.compiling_is_off()


@probes("users_line")
def test_the_line_of_a_user_is_found_through_frames_of_pytorch() -> None:
    found = []

    class Says(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.utils._pytree.tree_map(lambda _: found.append(compat.users_line()), [x])
            return x

    nn.Sequential(Says())(torch.ones(1))
    assert found[0].startswith("test_compat.py:")


# --- capturing without running --------------------------------------------------------------------


@probes("is_view", "written_to", "reads_values", "is_item", "is_drawn", "on_real_tensors")
def test_what_an_op_says_of_itself() -> None:
    aten, x = torch.ops.aten, torch.zeros(2)
    ops = (aten.view.default, aten.add_.Tensor, aten.nonzero.default, aten.equal.default)
    ops += (aten._local_scalar_dense.default, aten.rand.default, aten.empty.memory_format)
    assert [compat.is_view(op) for op in ops] == [True, True, *[False] * 5]
    assert [compat.reads_values(op) for op in ops] == [False, False, True, True, True, False, False]
    assert [compat.is_item(op) for op in ops] == [*[False] * 4, True, False, False]
    assert [compat.is_drawn(op) for op in ops] == [*[False] * 5, True, True]
    assert compat.written_to(aten.add_.Tensor, (x, 1), {})[0] is x
    assert not compat.written_to(aten.add.Tensor, (x, 1), {})
    with compat.fake_mode(lambda op, args, kwargs, run: run()):
        assert compat.is_fake(torch.ones(2))
        with compat.on_real_tensors():
            assert torch.ones(2).tolist() == [1.0, 1.0]


@probes("fake_mode", "fresh_capture", "size_formula", "inductor_graphs", "tracing_again")
def test_the_graphs_inductor_would_compile_come_without_memory() -> None:
    graphs: list[GraphModule] = []
    outside: list[Any] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        (x,) = (n for n in placeholders(gm) if compat.source_name(n) == "L['x']")
        rows, columns = compat.example_value(x).shape
        assert compat.size_formula(rows).is_Symbol
        assert compat.size_formula(columns) == columns
        with compat.tracing_again()():
            graphs.extend(compat.inductor_graphs(gm, example_inputs))
        return gm.forward

    def function(x: Tensor, layer: nn.Module) -> Tensor:
        return torch.relu(layer(x)).sum()

    def seen(op: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        result = run()
        if not compat.is_view(op):
            outside.append(result)
        return result

    with torch._dynamo.config.patch(recompile_limit=1):  # the captures do not count here
        for width in (4, 3, 2):
            with compat.fake_mode(seen), compat.fresh_capture():
                layer, x = nn.Linear(width, 1 << 40), torch.empty(5, width)
                torch._dynamo.maybe_mark_dynamic(x, 0)
                outside.clear()
                assert compat.is_fake(torch.compile(function, backend=keep)(x, layer))
                ran = [value for value in outside if isinstance(value, Tensor)]
                assert [5, 1 << 40] in [list(value.shape) for value in ran]
                outside.clear()
                assert x.view(-1).shape == (5 * width,)
                assert not [v for v in outside if isinstance(v, Tensor)], "a view makes no tensor"
    sizes: list[Any] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        sizes.extend(compat.example_value(n).shape[-1] for n in placeholders(gm)[:1])
        return gm.forward

    torch.compile(function, backend=look)(torch.ones(5, 8), nn.Linear(8, 2))
    assert sizes == [8], "what captures saw of other sizes is not dynamic in the next compile"
    assert len(graphs) == 6
    forward, backward = graphs[-2:]
    assert any("mm" in str(n.target) for n in forward.graph.nodes)
    assert any(n.name.startswith("tangents") for n in backward.graph.nodes)
    assert len(backward.graph.output_node().args[0]) >= 2  # type: ignore[arg-type]


@probes("forget_failures")
def test_dynamo_captures_again_what_failed_once() -> None:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    def refusing(x: Tensor) -> Tensor:
        if x.shape[0] != 4:
            raise ValueError("four")
        return x + 1

    compiled: Callable[..., Any] = torch.compile(refusing, backend=keep)
    with pytest.raises(ValueError, match="four"):
        compiled(torch.ones(3))
    compat.forget_failures([refusing])
    compiled(torch.ones(4))
    assert len(graphs) == 1


# --- hooks of tensors -----------------------------------------------------------------------------


@probes("tensor_hooks", "drop_empty_hooks")
def test_hooks_that_were_removed_leave_nothing_that_swallows_new_ones() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not compat.tensor_hooks(weight)
    hook = weight.register_post_accumulate_grad_hook(lambda p: None)
    assert compat.tensor_hooks(weight)
    hook.remove()
    assert not compat.tensor_hooks(weight)
    compat.drop_empty_hooks(weight)
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(2)))
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(seen.append)
    weight.register_hook(lambda grad: grad * 2)
    assert compat.tensor_hooks(weight)
    weight.sum().backward()
    assert len(seen) == 1
    assert weight.grad is not None
    assert float(weight.grad.sum()) == 4.0


@probes("revive_hooks")
def test_hooks_of_a_swapped_tensor_run_again_once_and_can_be_taken_off() -> None:
    weight = nn.Parameter(torch.ones(2))
    seen: list[str] = []
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda p: seen.append("after")),
        weight.register_hook(lambda g: seen.append("before")),
    ]
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(2)))
    for _ in range(2):
        compat.revive_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("new"))
    weight.sum().backward()
    assert seen == ["before", "after", "new"]
    for hook in hooks:
        hook.remove()
    weight.sum().backward()
    assert seen[3:] == ["new"]


def _after(keep: Callable[[Tensor], Any]) -> Callable[[nn.Parameter, list[Any]], None]:
    """Return a function that adds a hook, which keeps a result of the accumulated gradient."""

    def register(weight: nn.Parameter, kept: list[Any]) -> None:
        def hook(p: Tensor) -> None:
            assert p.grad is not None
            kept.append(keep(p.grad))

        weight.register_post_accumulate_grad_hook(hook)

    return register


def _before(keep: Callable[[Tensor], Any]) -> Callable[[nn.Parameter, list[Any]], None]:
    """Return a function that adds a hook, which keeps a result of the gradient beforehand."""
    return lambda weight, kept: weight.register_hook(lambda g: kept.append(keep(g))) and None


OWNERS: dict[str, tuple[Callable[[nn.Parameter, list[Any]], Any], tuple[int, int, int, int]]] = {
    "nobody": (lambda weight, kept: None, (2, 1, 2, 2)),
    "looked at": (_after(lambda g: float(g.sum())), (2, 1, 2, 2)),
    "copied by autograd": (_before(lambda g: g), (2, 1, 2, 2)),
    "the tensor": (_after(lambda g: g), (2, 1, 3, 2)),
    "detached": (_before(lambda g: g.detach()), (3, 1, 2, 2)),
    "a view": (_after(lambda g: g.view(-1)), (3, 2, 3, 2)),
    "an array": (_after(lambda g: g.numpy()), (3, 1, 2, 2)),
    "the storage": (_after(lambda g: g.untyped_storage()), (2, 1, 2, 3)),
}


@probes("references", "is_sole_owner")
@pytest.mark.parametrize("case", OWNERS)
def test_whoever_else_holds_a_gradient_is_counted(case: str) -> None:
    keep, expected = OWNERS[case]
    weight, kept, seen = nn.Parameter(torch.ones(4, 4)), [], []  # type: ignore[var-annotated]
    keep(weight, kept)

    def hook(p: Tensor) -> None:
        held = [p.grad]
        p.grad = None
        seen.append((compat.references(held), compat.is_sole_owner(held)))  # type: ignore[arg-type]

    weight.register_post_accumulate_grad_hook(hook)
    nn.functional.linear(torch.ones(3, 4), weight).sum().backward()
    assert seen == [(expected, expected == compat.SOLE_OWNER)]


@probes("references", "is_sole_owner")
@pytest.mark.parametrize("whose", ["another gradient", "the caller", "autograd"])
def test_a_gradient_in_memory_of_others_has_other_owners(whose: str) -> None:
    weight, other = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    given, saved = torch.ones(16), []
    if whose == "another gradient":
        ((weight.view(-1) + other.view(-1)) * given).sum().backward()
    elif whose == "the caller":
        weight.view(-1).backward(given)
    else:
        nn.functional.linear(torch.ones(3, 4), weight).sum().backward()
        assert weight.grad is not None
        saved.append(other * weight.grad)
    held = [weight.grad]
    weight.grad = None
    assert not compat.is_sole_owner(held)  # type: ignore[arg-type]
    if whose != "autograd":
        assert compat.references(held) == (3, 1, 2, 2)  # type: ignore[arg-type]


@probes("optimizer_hooks", "run_hooks_after_every_step")
@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("whose", ["its own", "everyone's"])
def test_hooks_of_an_optimizer_are_seen_and_those_after_every_step_can_be_run(
    whose: str, when: str
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not compat.optimizer_hooks(optimizer, but=refuse_step)
    is_own = whose == "its own"
    owner: Any = optimizer if is_own else import_module("torch.optim.optimizer")
    seen: list[Any] = []
    name = f"register_step_{when}_hook" if is_own else f"register_optimizer_step_{when}_hook"
    hook = getattr(owner, name)(lambda optimizer, *_: seen.append(optimizer))
    is_after_every = not is_own and when == "post"
    assert compat.optimizer_hooks(optimizer, but=refuse_step) is not is_after_every
    compat.run_hooks_after_every_step(optimizer)
    assert seen == ([optimizer] if is_after_every else [])
    hook.remove()
    assert not compat.optimizer_hooks(optimizer, but=refuse_step)


@probes("after_backward")
def test_a_function_is_called_at_the_end_of_a_backward_and_only_there() -> None:
    seen: list[str] = []
    assert not compat.after_backward(lambda: seen.append("never"))
    x = torch.ones(2, requires_grad=True)
    middle = x * 2
    middle.register_hook(lambda grad: compat.after_backward(lambda: seen.append("end")) and None)
    x.register_post_accumulate_grad_hook(lambda p: seen.append("leaf"))
    middle.sum().backward()
    assert seen == ["leaf", "end"]


@probes("after_gradients")
def test_a_function_is_called_when_gradients_are_there_before_they_are_used() -> None:
    seen: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append("made")
            return 2 * grad

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: seen.append("used"))
    result = Twice.apply(x)
    compat.after_gradients([None, torch.ones(2), result], lambda: seen.append("there"))
    result.sum().backward()
    assert seen == ["made", "there", "used"]


@probes("empty_bf16")
def test_empty_memory_has_the_sizes_asked_for() -> None:
    made = compat.empty_bf16((2, 3), (3, 1), torch.ones(1, dtype=torch.int32))
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.bfloat16)


@probes("copy_graph", "schema", "python_dispatcher", "untraced")
def test_graphs_are_copied_and_functions_kept_out_of_them() -> None:
    seen = []

    @compat.untraced
    def outside(x: Tensor) -> None:
        seen.append(compat.is_fake(x))

    def function(x: Tensor) -> Tensor:
        x = x * 2
        outside(x)
        return x + 1

    def question(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[int, int]:
        return len(gm.graph.nodes), len(compat.copy_graph(gm).nodes)

    before, after = look(question)
    assert before == after > 2
    with compat.python_dispatcher():
        assert compat.schema(torch.ops.aten.mm.default).name == "aten::mm"
    torch.compile(function, backend="eager")(torch.ones(2))
    assert seen == [False]
    torch.compiler.reset()


class Wrapped(Tensor):
    __torch_function__ = compat.NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("it has no memory")


@probes("wrapper_subclass", "as_class", "without_torch_function", "version_of")
def test_tensors_of_subclasses_have_sizes_and_versions() -> None:
    made = compat.wrapper_subclass(Wrapped, (2, 3), dtype=torch.float64)
    assert type(made) is Wrapped
    assert (made.shape, made.dtype) == ((2, 3), torch.float64)
    plain = torch.zeros(2)
    shares = compat.as_class(Wrapped, plain)
    assert (type(shares), compat.storage_key(shares)) == (Wrapped, compat.storage_key(plain))
    before = compat.version_of(plain)
    with compat.without_torch_function():
        plain.add_(1)
    assert compat.version_of(plain) == before + 1


@probes("forward_of", "has_state_dict_hook")
def test_modules_are_called_as_they_are_and_their_hooks_known() -> None:
    module = nn.Linear(2, 2)
    assert compat.forward_of(module)(torch.ones(1, 2)).shape == (1, 2)

    def hook(*args: Any) -> None:
        pass

    assert not compat.has_state_dict_hook(module, hook)
    module.register_state_dict_post_hook(hook)
    assert compat.has_state_dict_hook(module, hook)


def test_built_in_functions_have_their_names() -> None:
    assert compat.BUILT_IN_FUNCTIONS.gelu.__name__ == "gelu"


@probes("add_buffer", "remove_buffer")
def test_a_graph_holds_a_tensor_of_ours_until_it_is_taken_back() -> None:
    gm = torch.fx.symbolic_trace(Model())
    held = torch.ones(2)
    compat.add_buffer(gm, "ours", held)
    assert gm.ours is held
    compat.remove_buffer(gm, "ours")
    assert not hasattr(gm, "ours")


@probes("parts_of", "storage_keys")
def test_the_memory_of_a_tensor_is_that_of_its_parts() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.ones(2), torch.zeros(2)
    both = TwoTensor(a, b)
    assert list(compat.parts_of(both)[0]) == ["a", "b"]
    assert compat.storage_keys(both) == {compat.storage_key(a), compat.storage_key(b)}
    assert compat.storage_keys(a[1:]) == {compat.storage_key(a)}


@probes("mark_static_input")
def test_an_input_is_said_to_stay_where_it_is() -> None:
    """AOTAutograd tells Inductor's compiler which inputs are static."""
    from torch._inductor.compile_fx import compile_fx

    seen = []

    def inner(gm: Any, inputs: Any, **settings: Any) -> Any:
        seen.append(list(settings.get("static_input_idxs") or ()))
        return gm.forward

    def backend(gm: GraphModule, inputs: Sequence[Any], marked: bool) -> Any:
        if marked:
            for node in gm.graph.nodes:
                if node.op == "placeholder":
                    compat.mark_static_input(node)
        return compile_fx(gm, inputs, inner_compile=inner)  # type: ignore[arg-type]

    for marked in (False, True):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(
                lambda x, y: x.add_(y), backend=partial(backend, marked=marked)
            )
            compiled(torch.ones(2), torch.ones(2))
    assert seen == [[], [0, 1]]


@probes("is_unsafe_to_record")
def test_ops_that_ask_the_host_are_known() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    for op in (aten.nonzero, aten.nonzero.default, aten._local_scalar_dense.default):
        assert compat.is_unsafe_to_record(graph.call_function(op, (x,)))
    for op in (aten.relu, aten.relu.default, torch.relu):
        assert not compat.is_unsafe_to_record(graph.call_function(op, (x,)))
    assert compat.is_unsafe_to_record(graph.call_module("inner", (x,)))


@probes("guard_by_attribute")
def test_one_number_stands_for_what_is_guarded_of_an_input() -> None:
    seen = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(inputs[0].shape)
        (node,) = (n for n in gm.graph.nodes if n.op == "placeholder")
        compat.guard_by_attribute([node], "number")
        return gm.forward

    torch._dynamo.reset()
    step = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    given: Any = torch.ones(2)
    for number in (1, 1, 2):
        given.number = number
        assert step(given).tolist() == [2, 2]
    assert len(seen) == 2  # only another number compiles again
    other: Any = torch.ones(2, dtype=torch.float64)
    other.number = 2
    step(other)
    assert len(seen) == 2
    other.number = 3
    step(other)
    assert len(seen) == 3


@probes("guard_by_attribute")
def test_each_of_several_inputs_is_guarded_by_its_number() -> None:
    seen = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(len(inputs))
        compat.guard_by_attribute([n for n in gm.graph.nodes if n.op == "placeholder"], "number")
        return gm.forward

    torch._dynamo.reset()
    step = torch.compile(lambda x, y: x + y, backend=backend, dynamic=False)
    x: Any = torch.ones(2)
    y: Any = torch.ones(2)
    for numbers, graphs in (((1, 1), 1), ((1, 1), 1), ((1, 2), 2), ((2, 2), 3)):
        for given, number in zip((x, y), numbers, strict=True):
            given.number = number
        assert step(x, y).tolist() == [2, 2]
        assert len(seen) == graphs


@probes("functions_over_limit")
def test_functions_that_reach_the_limit_of_graphs_are_counted() -> None:
    from torch._dynamo import config

    def named(x: torch.Tensor, name: str) -> torch.Tensor:
        return x + 1 if name else x

    before = compat.functions_over_limit()
    with config.patch(recompile_limit=2):
        compiled = torch.compile(named, backend="eager")
        for name in "abc":
            compiled(torch.ones(1), name)
            assert compat.functions_over_limit() == before + (name == "c")
    shared = compat.room_for_graphs(shared=True)
    assert not shared or set(shared) == {"recompile_limit"}


@probes("room_for_graphs")
def test_a_model_may_have_a_limit_of_graphs_of_its_own() -> None:
    from torch._dynamo import config

    before = config.recompile_limit
    given = compat.room_for_graphs()
    if given:
        assert set(given) == {"recompile_limit", "isolate_recompiles"}
        assert config.recompile_limit == before
    else:
        assert config.recompile_limit >= 64
    assert torch.compile(lambda x: x + 1, backend="eager", **given)(torch.ones(1)) == 2


@probes("capturing_alone")
def test_captures_take_turns() -> None:
    with compat.capturing_alone():
        pass
    with compat.capturing_alone():
        pass


@probes("forget_workspaces", "leave_pool")
def test_what_a_capture_asks_of_cuda_is_there() -> None:
    if not torch.backends.cuda.is_built():
        for call in (compat.forget_workspaces, partial(compat.leave_pool, (0, 1))):
            with pytest.raises((AttributeError, AssertionError)):
                call()
    elif torch.cuda.is_available():
        compat.forget_workspaces()
        compat.leave_pool((0, 1))


@probes("reduction_of")
def test_old_arguments_of_a_loss_are_a_reduction() -> None:
    given = [(None, None), (False, None), (None, False)]
    assert [compat.reduction_of(*each) for each in given] == ["mean", "sum", "none"]
