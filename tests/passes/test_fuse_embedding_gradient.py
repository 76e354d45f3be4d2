"""fuse_embedding_gradient: rewrites, declines, skipped tables, and eager's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels import embedding as op_folder
from memeff_compile.options import Options
from memeff_compile.passes import PASSES
from memeff_compile.passes.graph import pipeline
from memeff_compile.passes.graph.editor import Editor, EditRefused
from memeff_compile.passes.graph.graph_info import GraphInfo, ambient_region
from memeff_compile.report import Record
from tests.support.captured_graphs import FUSE, compare_with_eager
from tests.support.closeness import needs_compiler
from tests.support.inductors_code import uncompiled

NAME = "fuse_embedding_gradient"
V, D = 64, 8


def table(dtype: torch.dtype = torch.float64, vocab: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(vocab, D, generator=generator, dtype=dtype).requires_grad_()


def tokens(dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """Ids with repetitions: 24 of them below 20."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 20, (2, 12), generator=generator).to(dtype)


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).view(-1, V), labels.view(-1))


def tied(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(torch.tanh(F.embedding(ids, weight)), weight, labels)


def embedding_records(report: memeff_compile.Report) -> list[Record]:
    return [r for r in report.records if r.pass_name == NAME]


def run(function: Callable[..., Any], *inputs: Any, **settings: Any) -> list[tuple[str, str]]:
    """Compare with eager and return the pass's records."""
    outcome = compare_with_eager(function, *inputs, **settings)
    return [(r.action, r.code) for r in embedding_records(outcome.report)]


FIRED = [("rewrote", "rewrote")]


# --- rewrites -------------------------------------------------------------------------------------


def scaled(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight) * D**0.5, weight, labels)


def padded(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight, padding_idx=3), weight, labels)


def spelled_as_a_product(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    logits = torch.embedding(weight, ids) @ weight.t()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def encoder_and_decoder(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    encoded = torch.tanh(F.embedding(ids, weight, padding_idx=3)).mean(1, keepdim=True)
    decoded = F.embedding(ids.flip(0), weight)
    return loss_of(encoded + decoded, weight, labels)


def used_elsewhere(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return tied(ids, weight, labels) + 0.1 * weight.square().sum()


def two_losses(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    hidden = torch.tanh(F.embedding(ids, weight))
    return loss_of(hidden, weight, labels) + 0.5 * loss_of(hidden.flip(0), weight, labels)


def loss_that_is_not_used(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    rows = F.embedding(ids, weight)
    return loss_of(rows, weight, labels).detach(), rows


def embedding_in_a_checkpointed_block_behind(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    rows = F.embedding(ids, weight)
    return loss_of(checkpoint(torch.tanh, rows, use_reentrant=False), weight, labels)


def cut_head(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    logits = F.linear(torch.tanh(F.embedding(ids, weight)), weight)[..., : V - 3]
    return F.cross_entropy(logits.reshape(-1, V - 3), labels.view(-1) % (V - 3))


FIRES = [
    tied,
    cut_head,
    scaled,
    padded,
    spelled_as_a_product,
    encoder_and_decoder,
    used_elsewhere,
    two_losses,
    loss_that_is_not_used,
    embedding_in_a_checkpointed_block_behind,
]


@pytest.mark.parametrize(
    ("function", "inner"),
    [
        *((function, "eager") for function in FIRES),
        *((function, "aot_eager") for function in (encoder_and_decoder, used_elsewhere, cut_head)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_tied_embedding_is_rewritten_and_equals_eager(
    function: Callable[..., Any], inner: str
) -> None:
    assert run(function, tokens(), table(), tokens(seed=1), inner=inner) == FIRED
    (graph,) = memeff_compile.graphs()
    assert "aten.embedding(" not in graph.after


def test_int32_ids_are_served() -> None:
    assert run(tied, tokens(torch.int32), table(), tokens(seed=1)) == FIRED


def test_dynamic_shapes_compile_once() -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    model = Model().double()
    run = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"}, dynamic=True)
    for rows, length in ((2, 12), (3, 7), (5, 30)):
        ids = torch.randint(0, V, (rows, length))
        (found,) = torch.autograd.grad(run(ids), model.embed.weight)
        (expected,) = torch.autograd.grad(model(ids), model.embed.weight)
        torch.testing.assert_close(found, expected)
    assert len(memeff_compile.graphs()) == 1
    assert memeff_compile.last_report().rewrites(NAME) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_no_further_from_fp64_than_eager(dtype: torch.dtype) -> None:
    weight = table(dtype)
    exact = weight.detach().double().requires_grad_()
    ids, labels = tokens(), tokens(seed=1)
    compiled = torch.compile(tied, backend="memeff", options={"memeff.inner": "eager"})
    (truth,) = torch.autograd.grad(tied(ids, exact, labels), exact)
    (eager,) = torch.autograd.grad(tied(ids, weight, labels), weight)
    (ours,) = torch.autograd.grad(compiled(ids, weight, labels), weight)
    assert ours.dtype == dtype
    assert (ours - truth).norm() <= 1.1 * (eager - truth).norm()


def test_a_head_in_higher_precision_is_served_through_its_cast() -> None:
    def wide_head(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
        return loss_of(F.embedding(ids, weight).double(), weight.double(), labels)

    settings: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
    assert run(wide_head, tokens(), table(torch.float32), tokens(seed=1), **settings) == FIRED


# --- skipped without a record ---------------------------------------------------------------------


def untied(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight), weight.clone(), labels)


def embedding_without_gradient(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    with torch.no_grad():
        rows = F.embedding(ids, weight)
    return loss_of(rows, weight, labels)


def head_in_a_checkpoint(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    rows = F.embedding(ids, weight)
    return checkpoint(lambda h, y: loss_of(h, weight, y), rows, labels, use_reentrant=False)


def head_before_the_embedding(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    first = loss_of(weight[:24].reshape(2, 12, D), weight, labels)
    return first + F.embedding(ids, weight).square().sum()


def head_in_lower_precision(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight).float(), weight.float(), labels)


def loss_that_is_not_fused(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    logits = F.linear(F.embedding(ids, weight), weight)
    return F.cross_entropy(logits.view(-1, V), labels.view(-1)) + logits.square().mean()


LEFT = [
    untied,
    embedding_without_gradient,
    head_in_a_checkpoint,
    head_before_the_embedding,
    head_in_lower_precision,
    loss_that_is_not_fused,
]


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_nothing_to_gain_is_left_alone(function: Callable[..., Any]) -> None:
    tolerance = 1e-5 if function is head_in_lower_precision else 1e-12
    settings = {"rtol": tolerance, "atol": tolerance}
    assert run(function, tokens(), table(), tokens(seed=1), **settings) == []


def test_a_frozen_table_is_left_alone() -> None:
    frozen = table().detach()
    scale = torch.ones(D, dtype=torch.float64, requires_grad=True)
    found = run(lambda i, w, s, y: tied(i, w * 1, y) * s.sum(), tokens(), frozen, scale, tokens())
    assert found == []


def test_a_table_far_smaller_than_the_batch_is_left_alone() -> None:
    ids = torch.randint(0, V, (10, 2000))
    assert run(tied, ids, table(torch.float32), ids, rtol=1e-4, atol=1e-6) == []


def test_no_grad_is_left_alone() -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(tied, backend="memeff", options={"memeff.inner": "eager"})
    with torch.no_grad():
        compiled(tokens(), table(), tokens())
    assert memeff_compile.last_report().rewrites(NAME) == 0


def test_autocast_is_left_alone() -> None:
    """The head's gradient is 16 bits there, and the one fp32 buffer is the gradient itself."""

    def autocasted(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return tied(ids, weight, labels)

    settings: dict[str, Any] = {"rtol": 0.05, "atol": 0.05}
    assert run(autocasted, tokens(), table(torch.float32), tokens(seed=1), **settings) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"memeff.embedding": "off"}, []),
        ({"memeff.linear_cross_entropy": "off"}, []),
        ({"memeff.skip": {NAME: "embed"}}, [("declined", "skipped")]),
        ({"memeff.skip": {"defer_logits": "embed"}}, FIRED),
    ],
    ids=["off", "loss off", "embedding skipped", "another pass skipped"],
)
def test_options_are_obeyed(options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    model = Model()
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager", **options})
    compiled(tokens()).backward()
    found = [(r.action, r.code) for r in embedding_records(memeff_compile.last_report())]
    assert found == expected


class Model(nn.Module):
    """A tied model of modules."""

    def __init__(self, vocab: int = V, width: int = D, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.lm_head(torch.tanh(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten().roll(-1))


# --- declines -------------------------------------------------------------------------------------


def renormed(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight, max_norm=1.0), weight, labels)


def scaled_by_frequency(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight, scale_grad_by_freq=True), weight, labels)


def sparse(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight, sparse=True), weight, labels)


def negative_padding(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    return loss_of(F.embedding(ids, weight, padding_idx=-V), weight, labels)


def written_to(ids: Tensor, weight: Tensor, labels: Tensor) -> Any:
    loss = tied(ids, weight, labels)
    with torch.no_grad():
        weight.mul_(0.5)
    return loss.detach()


@pytest.mark.parametrize(
    ("function", "code", "sentence"),
    [
        (scaled_by_frequency, "embedding_setting(scale_grad_by_freq)", "divides gradients by"),
        (sparse, "embedding_setting(sparse)", "whose gradient is a sparse tensor"),
        (negative_padding, "embedding_setting(padding_idx)", "negative"),
        (written_to, "mutated", "`mul_` writes in place to the embedding's weight"),
    ],
    ids=lambda value: value if isinstance(value, str) and "(" in value else None,
)
def test_a_decline_says_why(function: Callable[..., Any], code: str, sentence: str) -> None:
    outcome = compare_with_eager(function, tokens(), table(), tokens(seed=1))
    (record,) = embedding_records(outcome.report)
    assert (record.action, record.code) == ("declined", code)
    assert sentence in record.sentence
    assert record.hint
    assert "embedding" in record.source


def test_max_norm_is_declined() -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    weight = nn.Parameter(table().detach())
    compiled = torch.compile(renormed, backend="memeff", options={"memeff.inner": "eager"})
    compiled(tokens(), weight, tokens(seed=1)).backward()
    (record,) = embedding_records(memeff_compile.last_report())
    assert record.code == "embedding_setting(max_norm)"
    assert "rescales rows of the table in place" in record.sentence


def records_of_large_tables(function: Callable[..., Any], *inputs: Any) -> list[Record]:
    """Return the passes' records of a function for Inductor."""
    found: list[Record] = []

    def look(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend(pipeline.run(gm, PASSES, Options()).report.records)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=look, fullgraph=True)(*inputs)
    return [r for r in found if r.pass_name == NAME]


def large_table() -> Tensor:
    return torch.zeros(1 << 19, D, dtype=torch.bfloat16)


def test_a_table_of_a_tensor_subclass_is_declined() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight = nn.Parameter(TwoTensor(large_table(), large_table()))
    (record,) = records_of_large_tables(F.embedding, tokens(), weight)
    assert (record.action, record.code) == ("declined", "subclass_weight(TwoTensor)")
    (record,) = records_of_large_tables(F.embedding, tokens(), nn.Parameter(large_table()))
    assert record.action == "rewrote"


def test_what_the_op_cannot_serve_is_declined_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_folder, "supports", lambda weight, ids: "ids are no good. Mend them.")
    (record,) = records_of_large_tables(F.embedding, tokens(), nn.Parameter(large_table()))
    assert (record.action, record.code) == ("declined", "unsupported")
    assert record.sentence == "Ids are no good. Mend them."


# --- edits ----------------------------------------------------------------------------------------


def test_an_undone_rewrite_leaves_the_graph_as_it_was() -> None:
    found: list[bool] = []

    def look(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        (fuse, embed) = (p for p in PASSES if p.name in (FUSE, NAME))
        pipeline.run(gm, (fuse,), Options(inner="eager"))
        before, users = str(gm.graph), {n: set(n.users) for n in gm.graph.nodes}
        info = GraphInfo(gm, Options(inner="eager"), ambient_region())
        (match,) = embed.find(info)
        editor = Editor(info)
        embed.rewrite(info, match, editor)
        assert str(gm.graph) != before
        editor.rollback()
        assert str(gm.graph) == before
        assert {n: set(n.users) for n in gm.graph.nodes} == users
        other = next(n for n in gm.graph.nodes if n.op == "placeholder" and n is not match.weight)
        with pytest.raises(EditRefused, match="would change"):
            editor.reroute(match.heads, match.weight, other)
        found.append(True)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(encoder_and_decoder, backend=look)(tokens(), table(), tokens(seed=1))
    assert found


# --- under Inductor -------------------------------------------------------------------------------


def backward_code(model: nn.Module, ids: Tensor, **options: str) -> str:
    """Compile a step with Inductor and return the code it made of the backward pass."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    memeff_compile.reset()
    model.zero_grad()
    compiled = torch.compile(model, backend="memeff", options={**options} or None)
    with uncompiled():
        _, codes = run_and_get_code(lambda: compiled(ids).backward())
    return str(codes[-1])


def tables_allocated(code: str, vocab: int, width: int) -> list[str]:
    """Return the dtypes of the table-sized buffers that compiled code allocates."""
    return re.findall(rf"= empty_strided_cpu\(\({vocab}, {width}\), .*?, torch\.(\w+)\)", code)


@needs_compiler
@pytest.mark.usefixtures("inductors_loops")
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_inductor_gives_the_gradients_of_eager(is_tied: bool) -> None:
    model, ids = Model(600, 32, is_tied=is_tied).bfloat16(), torch.randint(0, 600, (2, 9))
    torch.compile(model, backend="memeff")(ids).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(ids).backward()
    for ours, parameter in zip(found, model.parameters(), strict=True):
        assert ours is not None
        assert parameter.grad is not None
        expected = parameter.grad.float()
        assert (ours.float() - expected).norm() <= 0.01 * expected.norm()


@needs_compiler
def test_inductor_allocates_no_table_beside_the_heads_gradient() -> None:
    """And it copies none: the op writes into the same tensor that the head's backward pass
    returned.
    """
    model = Model(600, 32).bfloat16()
    ids = torch.randint(0, 600, (2, 9))
    without = backward_code(model, ids, **{"memeff.embedding": "off"})
    assert tables_allocated(without, 600, 32) == ["float32"], "the pass would be for nothing"
    code = backward_code(model, ids)
    assert tables_allocated(code, 600, 32) == []
    (gradient,) = re.findall(r"memeff\.embedding_accumulate\.default\((\w+), ", code)
    assert re.search(rf"{gradient} = \w+\[1\]\n", code), "not the head's own gradient"
    assert re.search(rf"return \({gradient}, ", code)


@needs_compiler
def test_a_large_untied_sixteen_bit_table_gets_no_fp32_copy() -> None:
    vocab, width = 1 << 17, 32
    model = Model(vocab, width, is_tied=False).bfloat16()
    ids = torch.randint(0, vocab, (2, 9))
    assert tables_allocated(backward_code(model, ids), vocab, width) == []
    (record,) = embedding_records(memeff_compile.last_report())
    assert record.action == "rewrote"
    assert "memeff::embedding," in record.sentence
    assert record.bytes_saved is not None
    assert record.bytes_saved > 15 << 20
