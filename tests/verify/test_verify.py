"""memeff.verify: healthy graphs pass, broken rewrites are caught and the numbers stay right."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.backend import entry
from memeff_compile.errors import MemeffError, VerifyError
from memeff_compile.passes.graph.base import Done, GraphPass
from memeff_compile.passes.graph.editor import Editor
from memeff_compile.passes.graph.graph_info import GraphInfo
from memeff_compile.report import Record
from memeff_compile.verify import comparison
from tests.support.closeness import needs_compiler
from tests.support.fresh_python import FreshPython
from tests.support.zoo import FAMILIES, Family, build, inputs

aten = torch.ops.aten
VOCABULARY, WIDTH, IDS = 64, 16, torch.arange(12).view(2, 6)


class Model(nn.Module):
    """Returns its loss, its logits and its hidden states; may drop out and normalise by batch."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.embed, self.dropout = nn.Embedding(VOCABULARY, WIDTH), dropout
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.body(self.embed(ids)))
        hidden = F.dropout(hidden, self.dropout, self.training)
        hidden = self.norm(hidden.flatten(0, 1)).view(hidden.shape)
        if self.counts:
            self.seen += 1
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1).flatten())
        return loss, logits, hidden


def make(dtype: torch.dtype = torch.float32, **settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings).to(dtype)


def compiled(model: Callable[..., Any], inner: str = "eager", **options: Any) -> Any:
    given = {"verify": "on", **options, "inner": inner}
    named = {f"memeff.{key.replace('verify_', 'verify.')}": v for key, v in given.items()}
    return torch.compile(model, backend="memeff", options=named)


def the(action: str) -> Record:
    (found,) = [r for r in memeff_compile.last_report().records if r.action == action]
    return found


def step(run: Callable[..., Any], owner: nn.Module, ids: Tensor = IDS) -> list[Tensor]:
    """Return loss and gradients of one step."""
    owner.zero_grad(set_to_none=True)
    loss = run(ids)[0]
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in owner.parameters() if p.grad is not None]]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], **close: float) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


# --- passes that are wrong on purpose ----------------------------------------------------------------


@torch.library.custom_op("memeff_tests::give_up", mutates_args=())
def give_up(x: Tensor) -> Tensor:
    raise RuntimeError("this kernel always fails")


@give_up.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


give_up.register_autograd(lambda ctx, grad: grad)


class Breaks(GraphPass):
    """A pass that spoils one output of every graph in which the loss was fused."""

    name = "fuse_linear_cross_entropy"

    def __init__(self, place: int, spoil: Callable[[Editor, Node], Node]) -> None:
        self.place, self.spoil = place, spoil

    def enabled(self, info: GraphInfo) -> bool:
        return info.parent is None

    def find(self, info: GraphInfo) -> Iterable[Node]:
        levels = [m for m in info.gm.modules() if isinstance(m, torch.fx.GraphModule)]
        if any("memeff" in str(node.target) for level in levels for node in level.graph.nodes):
            yield info.output.args[0][self.place]  # type: ignore[index]

    def anchor(self, match: Node) -> Node:
        return match

    def places(self, match: Node) -> Sequence[Node]:
        return ()

    def dead(self, match: Node) -> Sequence[Node]:
        return ()

    def rewrite(self, info: GraphInfo, match: Node, editor: Editor) -> Done:
        with editor.at(info.output, like=match):
            spoilt = self.spoil(editor, match)
        values = list(info.output.args[0])  # type: ignore[arg-type]
        values[self.place] = spoilt
        editor.set_output((tuple(values),))
        return Done(match, "spoilt")


def scaled(editor: Editor, node: Node) -> Node:
    return editor.call(aten.mul.Tensor, node, 1.001)


def with_wrong_gradient(editor: Editor, node: Node) -> Node:
    more = editor.call(aten.mul.Tensor, node, 1.5)
    half = editor.call(aten.detach.default, editor.call(aten.mul.Tensor, node, 0.5))
    return editor.call(aten.sub.Tensor, more, half)


def shifted(editor: Editor, node: Node) -> Node:
    return editor.call(aten.add.Tensor, node, 0.01)


def without_gradient(editor: Editor, node: Node) -> Node:
    return editor.call(aten.detach.default, node)


def not_a_number(editor: Editor, node: Node) -> Node:
    return editor.call(aten.mul.Tensor, node, float("nan"))


def failing(editor: Editor, node: Node) -> Node:
    return editor.call(torch.ops.memeff_tests.give_up.default, node)


LOSS, HIDDEN = 0, 2
BROKEN: dict[str, tuple[int, Callable[..., Node], str]] = {
    "loss times 1.001": (LOSS, scaled, "output 0 is off by 1.0e-03"),
    "gradient of the loss": (LOSS, with_wrong_gradient, "gradient of "),
    "another output": (HIDDEN, shifted, "output 2 is off by"),
    "gradient of another output": (HIDDEN, with_wrong_gradient, " through other outputs is off by"),
    "gradient cut off": (HIDDEN, without_gradient, "output 2 has requires_grad=False"),
    "nan": (LOSS, not_a_number, "output 0 is not finite where the original is"),
    "raises": (LOSS, failing, "raised RuntimeError: this kernel always fails"),
}


@pytest.fixture
def break_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(place: int, spoil: Callable[..., Node]) -> None:
        monkeypatch.setattr(entry, "PASSES", (*entry.PASSES, Breaks(place, spoil)))

    return install


CASES = [(kind, torch.float32) for kind in BROKEN] + [
    (kind, torch.bfloat16) for kind in ("loss times 1.001", "gradient of the loss")
]


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_a_broken_rewrite_is_caught_and_the_original_goes_on(
    kind: str, dtype: torch.dtype, break_with: Callable[..., None], tmp_path: Path
) -> None:
    place, spoil, words = BROKEN[kind]
    break_with(place, spoil)
    model, reference = make(dtype), make(dtype)
    run = compiled(model, verify_folder=str(tmp_path))
    with pytest.warns(RuntimeWarning, match="does not compute what the original does") as caught:
        first = step(run, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        second = step(run, model)
    expected = step(reference, reference)
    assert_equal(first, expected, rtol=0, atol=0)  # the very step that was compared
    assert_equal(second, expected, rtol=0, atol=0)
    assert model.seen == 2

    record = the("mismatch")
    assert words in record.sentence
    assert (
        "Rewrites in this graph: fuse_linear_cross_entropy in head, defer_logits" in record.sentence
    )
    assert "options={'memeff.linear_cross_entropy': 'off', 'memeff.logits': 'eager'}" in record.hint
    assert str(caught[0].message).endswith(f"{record.sentence} {record.hint}")
    assert memeff_compile.last_report().rewrites() == 0
    assert memeff_compile.last_report().bytes_saved == 0
    assert "the original runs" in memeff_compile.last_report().details()


def test_without_verify_a_broken_rewrite_is_not_noticed(break_with: Callable[..., None]) -> None:
    break_with(LOSS, scaled)
    model = make()
    found = step(compiled(model, verify="off"), model)
    assert found[0] == pytest.approx(1.001 * float(make()(IDS)[0].detach()), rel=1e-5)


def test_raise_raises_and_later_calls_are_right(
    break_with: Callable[..., None], tmp_path: Path
) -> None:
    break_with(LOSS, scaled)
    model, reference = make(), make()
    run = compiled(model, verify="raise", verify_folder=str(tmp_path))
    with pytest.raises(VerifyError, match="output 0 is off by") as caught:
        run(IDS)
    assert isinstance(caught.value, MemeffError)
    assert model.seen == 0
    assert_equal(step(run, model), step(reference, reference), rtol=0, atol=0)


def test_a_wider_tolerance_lets_more_pass(break_with: Callable[..., None]) -> None:
    break_with(LOSS, scaled)
    model = make()
    step(compiled(model, verify_tolerance=2e6), model)
    assert "is off by 1.0e-03 (2.0e-03 is allowed)" in the("verified").sentence


def test_only_the_graph_that_failed_falls_back(
    break_with: Callable[..., None], tmp_path: Path
) -> None:
    break_with(LOSS, with_wrong_gradient)
    model = make()
    run = compiled(model, verify_folder=str(tmp_path))
    with pytest.warns(RuntimeWarning, match="graph 0/0"):
        step(run, model)
    with torch.no_grad():
        run(IDS)
    assert [r.action for r in memeff_compile.last_report().graphs[1].records][-1] == "verified"


# --- healthy graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [
        ("eager", torch.float32),
        ("aot_eager", torch.bfloat16),
        pytest.param("inductor", torch.float32, marks=[needs_compiler, pytest.mark.slow]),
    ],
    ids=str,
)
def test_a_healthy_graph_is_verified_and_computes_what_it_did(
    inner: str, dtype: torch.dtype
) -> None:
    model, same = make(dtype), make(dtype)
    found = step(compiled(model, inner), model)
    record = the("verified")
    assert "5 values and " in record.sentence
    assert "As run (compiled)" in record.sentence
    assert re.search(r"in float64: .* is off by \d.\de-1[5-9]", record.sentence)
    assert memeff_compile.last_report().rewrites() == 2
    torch._dynamo.reset()
    assert_equal(found, step(compiled(same, inner, verify="off"), same), rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_graph_without_gradients_is_verified_by_its_values(mode: Callable[[], Any]) -> None:
    model = make()
    with mode():
        loss = compiled(model)(IDS)[0]
        torch.testing.assert_close(loss, model(IDS)[0])
    assert "5 values agree" in the("verified").sentence


def test_autocast_is_verified_and_left_as_it_was() -> None:
    model, reference = make(), make()
    run = compiled(model, "aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(IDS)[0]
        assert torch.is_autocast_cache_enabled()
        expected = reference(IDS)[0]
    assert not torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    assert "As run (compiled)" in the("verified").sentence


def test_a_graph_that_nothing_was_rewritten_in_is_not_compared() -> None:
    compiled(lambda x: x * 2)(torch.ones(3))
    assert not memeff_compile.last_report().records


def test_sizes_that_vary_are_verified_once_per_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    make_comparison = comparison.Comparison.make

    def counted(self: Any, args: Any) -> Any:
        calls.append(len(args))
        return make_comparison(self, args)

    monkeypatch.setattr(comparison.Comparison, "make", counted)
    model, reference = make(), make()
    named = {"memeff.verify": True, "memeff.inner": "aot_eager"}
    run = torch.compile(model, backend="memeff", options=named, dynamic=True)
    for length in (3, 4, 7):
        ids = torch.arange(2 * length).view(2, length)
        assert_equal(step(run, model, ids), step(reference, reference, ids), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    assert the("verified")


def test_logits_left_out_on_request_are_no_mismatch() -> None:
    model = make()
    assert compiled(model, logits="none")(IDS)[1] is None
    assert the("verified")


def test_the_same_tensor_twice_and_a_frozen_head_are_verified() -> None:
    model, reference = make(), make()
    for each in (model, reference):
        each.head.requires_grad_(False)
    assert_equal(step(compiled(model), model), step(reference, reference), rtol=1e-5, atol=1e-7)
    assert the("verified")


# --- the user's state is unchanged -------------------------------------------------------------------


def test_buffers_are_updated_once() -> None:
    model, reference = make(norm=True), make(norm=True)
    run = compiled(model, "aot_eager")
    for _ in range(2):
        assert_equal(step(run, model), step(reference, reference), rtol=1e-4, atol=1e-6)
    state = model.state_dict()
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(state[name], expected)
    assert the("verified")


def test_a_broken_write_to_a_buffer_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spoil(editor: Editor, node: Node) -> Node:
        seen = next(n for n in editor.info.placeholders if "seen" in n.name)
        editor.call(aten.add_.Scalar, seen, 1.0)
        return editor.call(aten.mul.Tensor, node, 1.0)

    monkeypatch.setattr(entry, "PASSES", (*entry.PASSES, Breaks(LOSS, spoil)))
    model = make()
    with pytest.warns(RuntimeWarning, match="seen after the call is off by 1.0e\\+00"):
        compiled(model, verify_folder=str(tmp_path))(IDS)
    assert model.seen == 1


class Cached(nn.Module):
    """Writes to a cache argument, at the end of its contents, and to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.count = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, ids: Tensor, cache: Tensor) -> Tensor:
        hidden = self.embed(ids)
        cache.index_copy_(1, torch.arange(ids.shape[1]), hidden.detach())
        self.count.add_(1)
        hidden = hidden + cache.mean()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(-1).flatten())


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_caches_and_parameters_that_a_graph_writes_to_are_written_once(inner: str) -> None:
    torch.manual_seed(0)
    model, cache = Cached(), torch.randn(2, 8, WIDTH)
    expected_cache = cache.clone()
    expected = model(IDS, expected_cache)
    model.count.zero_()
    loss = compiled(model, inner)(IDS, cache)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(cache, expected_cache)
    assert torch.equal(model.count, torch.ones(3))
    assert the("verified")


def test_inputs_that_share_memory_which_is_written_are_not_compared() -> None:
    model, both = Cached(), torch.randn(2, 2, 8, WIDTH)

    def run(ids: Tensor, cache: Tensor, other: Tensor) -> Tensor:
        return model(ids, cache) + other.sum()

    compiled(run)(IDS, both[0], both[0].view(16, WIDTH))
    assert "share memory that the graph writes to" in the("unverified").sentence


def test_random_numbers_are_those_of_one_run() -> None:
    model, same = make(dropout=0.5), make(dropout=0.5)
    torch.manual_seed(7)
    found = step(compiled(model, "aot_eager"), model)
    after = torch.rand(3)
    record = the("verified")
    assert "As run (op by op)" in record.sentence
    assert "in float64" in record.sentence

    torch._dynamo.reset()
    torch.manual_seed(7)
    expected = step(compiled(same, "aot_eager", verify="off"), same)
    assert_equal(found, expected, rtol=0, atol=0)
    assert torch.equal(after, torch.rand(3))


def test_a_broken_rewrite_beside_dropout_is_caught(
    break_with: Callable[..., None], tmp_path: Path
) -> None:
    break_with(LOSS, scaled)
    model, reference = make(dropout=0.5), make(dropout=0.5)
    torch.manual_seed(7)
    with pytest.warns(RuntimeWarning, match="output 0 is off by"):
        found = step(compiled(model, verify_folder=str(tmp_path)), model)
    torch.manual_seed(7)
    assert_equal(found, step(reference, reference), rtol=0, atol=0)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def observed(verify: str) -> tuple[Any, ...]:
    """Run one step and return the observations of hooks and modes around it."""
    torch._dynamo.reset()
    model, seen, operations = make(), [], Operations()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append(("grad", name)))
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(("done", p.shape)))
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    run = compiled(model, verify=verify)
    with operations, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run(IDS)[0]
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    versions = [p._version for p in model.parameters()]
    return seen, saved, operations.names, versions


def test_hooks_modes_and_gradients_see_one_run() -> None:
    assert observed("on") == observed("off")


@pytest.mark.parametrize("verify", ["on", "off"])
def test_a_checkpoint_around_the_compiled_function_saves_what_it_recomputes(verify: str) -> None:
    """The first call compiles and compares, the recomputation does neither."""
    model, reference = make(counts=False), make(counts=False)
    run = compiled(model, "aot_eager", verify=verify)

    def checkpointed(ids: Tensor) -> Any:
        return checkpoint(run, ids, use_reentrant=False)

    expected = step(reference, reference)
    for _ in range(2):
        assert_equal(step(checkpointed, model), expected, rtol=1e-4, atol=1e-6)
    assert len([r for r in memeff_compile.last_report().records if r.action == "verified"]) == (
        verify == "on"
    )


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make(dropout=0.4, counts=False)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: self.model(x)[0], ids, use_reentrant=False)
        return result * 2


def test_a_checkpoint_inside_the_graph_is_verified() -> None:
    model = Checkpointed()
    step(lambda ids: (compiled(model, "aot_eager")(ids),), model)
    assert the("verified")
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1


def test_a_mistake_of_the_users_is_raised_as_ever_and_verified_later() -> None:
    def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x @ weight.T, labels)

    x, weight = torch.randn(4, WIDTH), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    run = compiled(loss)
    with pytest.raises(IndexError, match="target holds 99"):
        run(x, weight, torch.tensor([1, 99, 2, 3]))
    assert not [r for r in memeff_compile.last_report().records if "verif" in r.action]
    run(x, weight, torch.tensor([1, 9, 2, 3])).backward()
    assert the("verified")


# --- where it cannot compare -------------------------------------------------------------------------


def test_no_memory_for_the_original_is_reported_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 31.25 GiB.")

    monkeypatch.setattr(comparison, "run_op_by_op", full)
    model, reference = make(), make()
    found = step(compiled(model), model)
    assert_equal(found, step(reference, reference), rtol=1e-5, atol=1e-6)
    record = the("unverified")
    assert (
        "was not compared with the original: the original graph ran out of memory"
        in record.sentence
    )
    assert "smaller batch" in record.hint
    assert "not compared" in caplog.text
    assert memeff_compile.last_report().rewrites() == 2


@torch.library.custom_op("memeff_tests::only_fp32", mutates_args=())
def only_fp32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("this kernel takes float32")
    return x.clone()


@only_fp32.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


only_fp32.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize("is_broken", [False, True], ids=["healthy", "broken"])
def test_an_operation_that_takes_no_float64_leaves_the_other_comparison(
    is_broken: bool, break_with: Callable[..., None], tmp_path: Path
) -> None:
    class Narrow(Model):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            loss, logits, hidden = super().forward(ids)
            return only_fp32(loss), logits, hidden

    if is_broken:
        break_with(LOSS, scaled)
    model = Narrow()
    with warnings.catch_warnings(record=True):
        step(compiled(model, verify_folder=str(tmp_path)), model)
    if is_broken:
        assert "as run, output 0 is off by 1.0e-03" in the("mismatch").sentence
    else:
        sentence = the("verified").sentence
        assert "not compared in float64: TypeError: this kernel takes float32" in sentence
        assert "As run (op by op)" in sentence


def test_gradients_that_are_left_out_on_purpose_are_compared_in_float64_only() -> None:
    model = make()
    step(compiled(model, linear_cross_entropy="mass"), model)
    sentence = the("verified").sentence
    assert "Nearest to its bound in float64: gradient of" in sentence
    assert "Gradients were not compared as run" in sentence
    assert "As run (compiled): output" in sentence


def test_cuda_graphs_are_compared_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep pointers to the copies that the comparison makes."""
    monkeypatch.setattr(entry.compat, "inductor_uses_cudagraphs", lambda patches: True)
    monkeypatch.setattr(entry.compat, "compile_with_inductor", lambda gm, inputs, *_: gm.forward)
    model = make()
    step(compiled(model, "inductor"), model)
    assert "As run (op by op)" in the("verified").sentence


def test_sharded_parameters_and_subclasses_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison.compat, "is_sharded_by_fsdp", lambda weight: True)
    model = make()
    step(compiled(model), model)
    assert "is sharded over processes" in the("unverified").sentence


# --- the reproducer ----------------------------------------------------------------------------------


def run_reproducer(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    "limit", ["64MiB", pytest.param(0, marks=pytest.mark.slow)], ids=["all inputs", "no inputs"]
)
def test_the_reproducer_shows_the_mismatch(
    limit: object,
    break_with: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_with(LOSS, scaled)
    model = Checkpointed() if limit else make(torch.bfloat16)
    folder = tmp_path / "made" / "when_needed"
    run = compiled(model, verify_folder=folder, verify_limit=limit)
    with pytest.warns(RuntimeWarning), torch.autocast("cpu", torch.bfloat16, enabled=bool(limit)):
        run(IDS)
    hint = the("mismatch").hint
    assert str(folder) in hint
    assert ("drawn anew" in hint) == (limit == 0)
    found = re.search(r"Reproducer: (\S+repro.py) \((.*)\)", hint)
    assert found is not None
    if limit:  # it is slow as a separate program
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(found[1], run_name="__main__")
        code, printed = ended.value.code, capsys.readouterr().out
    else:
        result = run_reproducer(found[1])
        code, printed = result.returncode, result.stdout
    assert code == 1, printed
    native, wide = printed.split("in float64")
    assert "as run" in native
    assert "output 0: 1.0e-03  <---" in wide
    assert re.search(r"gradient of \S*head.weight through output 0: 1.0e-03  <---", wide)


def test_a_reproducer_that_cannot_be_written_hides_nothing(
    break_with: Callable[..., None], tmp_path: Path
) -> None:
    break_with(LOSS, scaled)
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="No reproducer was written: NotADirectoryError"):
        compiled(make(), verify_folder=str(tmp_path / "file" / "folder"))(IDS)


def test_the_default_folder_is_a_temporary_one(
    break_with: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    break_with(LOSS, scaled)
    with pytest.warns(RuntimeWarning, match=re.escape(str(tmp_path / "memeff_verify_graph_0_0_"))):
        compiled(make())(IDS)
    (folder,) = tmp_path.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["inputs.pt", "repro.py"]


# --- real models -------------------------------------------------------------------------------------


QUICK = ("llama",)
ZOO = [
    pytest.param(each, id=each.name, marks=() if each.name in QUICK else pytest.mark.slow)
    for each in FAMILIES
]


@pytest.mark.parametrize("family", ZOO)
def test_transformers_models_are_verified(family: Family) -> None:
    pytest.importorskip("transformers", reason="the model zoo is built from transformers' configs")
    depth = {"num_hidden_layers": 1} if family.name in QUICK else {}
    model = build(family, **depth)
    out = compiled(model)(**inputs(family))
    out.loss.backward()
    sentence = the("verified").sentence
    assert "Nearest to its bound in float64" in sentence
    assert "As run (compiled)" in sentence


# --- inner compilers that are wrong ---------------------------------------------------------------


class _Stretched(torch.autograd.Function):
    """The identity, with a gradient that is 3 % too long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.03


@pytest.fixture
def wrong_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have aot_eager compute right values and wrong gradients."""
    right = entry.compat.compile_with_aot_eager

    def wrong(gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run = right(gm, example_inputs)

        def stretched(*args: Any) -> Any:
            return [_Stretched.apply(x) if x.requires_grad else x for x in run(*args)]

        return stretched

    monkeypatch.setattr(entry.compat, "compile_with_aot_eager", wrong)


@pytest.mark.usefixtures("wrong_compiler")
def test_a_wrong_compiler_is_named_and_does_not_serve() -> None:
    model, twin = make(), make()
    with pytest.warns(RuntimeWarning, match="AOTAutograd of torch") as caught:
        found = step(compiled(model, "aot_eager"), model)
    assert_equal(found, step(twin, twin))
    record = the("mismatch")
    assert record.code == "compiler_failed"
    assert torch.__version__ in record.sentence
    assert "no rewrite is to blame" in record.sentence
    assert "gradient of" in record.sentence
    assert "options={'memeff.inner': 'eager'}" in record.hint
    assert "report it to PyTorch" in str(caught[0].message)
    other = make()
    assert_equal(step(compiled(other, "eager"), other), step(twin, twin))


@pytest.mark.usefixtures("wrong_compiler")
def test_a_wrong_rewrite_is_not_blamed_on_a_wrong_compiler(
    break_with: Callable[..., None],
) -> None:
    break_with(LOSS, with_wrong_gradient)
    model = make()
    with pytest.warns(RuntimeWarning, match="The rewritten graph does not compute"):
        step(compiled(model, "aot_eager"), model)
    assert the("mismatch").code == "verify_failed"


FALCON = """
import copy
import warnings
import torch
import transformers
import memeff_compile

torch.manual_seed(0)
config = transformers.FalconConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, multi_query=True,
    parallel_attn=True, bias=False, hidden_dropout=0.0, attention_dropout=0.0,
)
model = transformers.FalconForCausalLM(config).train()
ids = torch.randint(0, 96, (2, 24))

def gradient(owner, run):
    run(input_ids=ids, labels=ids).loss.backward()
    return owner.transformer.h[0].self_attention.query_key_value.weight.grad.double()

wide, plain, ours = (copy.deepcopy(model) for _ in range(3))
truth = gradient(wide.double(), wide)
warnings.simplefilter("ignore")
options = {"memeff.verify": "on"}
for owner, settings in ((plain, {"backend": "inductor"}), (ours, {"backend": "memeff", "options": options})):
    found = gradient(owner, torch.compile(owner, **settings))
    print(float((found - truth).norm() / truth.norm()))
"""


@needs_compiler
@pytest.mark.slow
def test_inductor_adds_gradients_of_list_indices_wrong(fresh_python: FreshPython) -> None:
    """torch 2.13 on a CPU, vectors and threads: index_put with accumulation reads transposed
    values. It may write to wrong addresses.
    """
    result = fresh_python(FALCON, OMP_NUM_THREADS="2", TORCHINDUCTOR_VEC_ISA_OK="1")
    plain, ours = map(float, result.stdout.split())
    assert (plain > 1e-2) is torch.__version__.startswith("2.13."), result.stderr
    assert ours < 1e-5
