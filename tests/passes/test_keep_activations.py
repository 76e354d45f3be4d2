"""keep_activations: kept results and their order, declines, and eager's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memeff_compile
from memeff_compile import compat
from memeff_compile.kernels.device import planned_for
from memeff_compile.options import Options
from memeff_compile.passes import PASSES
from memeff_compile.passes.graph import pipeline
from memeff_compile.report import Record
from tests.support.captured_graphs import compare_with_eager
from tests.support.closeness import needs_compiler

NAME = "keep_activations"
D, HEADS, ROWS = 32, 4, 2 * 64
OUT = ROWS * (D * 4 + HEADS * 4)  # bytes of attention's results: values and log-sum-exps
LINEAR = ROWS * D * 4  # of a linear of D outputs


class Block(nn.Module):
    """A block of a Llama, small; `spoil` is done inside it."""

    def __init__(self, spoil: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.spoil = spoil
        self.before, self.between = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gate, self.up, self.down = nn.Linear(D, 80), nn.Linear(D, 80), nn.Linear(80, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in parts)
        attended = self.attend(q, k, v).transpose(1, 2).reshape(batch, length, D)
        x = x + self.o(self.spoil(attended))
        hidden = self.between(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Padded(Block):
    """Attention that another pass tells `memeff::attention`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=(places[None] <= places[:, None]) & (places[None] > 0)[None, None]
        )


class Halves(Block):
    """Attention over 32 keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.reshape(2, 2 * HEADS, 32, -1) for each in (q, k, v))
        return super().attend(q, k, v).reshape(2, HEADS, 64, -1)


class Blocks(nn.Module):
    """Checkpointed blocks with a head and its loss."""

    def __init__(self, *blocks: nn.Module, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = partial(checkpoint, use_reentrant=False, **settings)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(D, 97, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        rows = self.head(x).flatten(0, 1)
        return F.cross_entropy(rows, torch.arange(len(rows)) % 97)


def draw(length: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, length, D, generator=generator, dtype=dtype).requires_grad_()


def compiled(
    model: nn.Module, recompute: Any
) -> tuple[list[Record], list[tuple[int, ...]], Counter[str]]:
    """Return our records, shapes that only a checkpoint could keep, and calls of the backward."""
    graphs: list[GraphModule] = []
    records: list[Record] = []

    def keep(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return boxed(gm)

    rest = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        options = Options.parse(None, {"memeff.recompute": recompute})
        report = pipeline.run(gm, PASSES, options).report
        records.extend(r for r in report.records if r.pass_name == NAME)
        return rest(gm, inputs)

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(draw()).backward()
    forward, backward = graphs
    weights = {tuple(p.shape) for p in model.parameters()}
    values = (n.meta.get("val") for n in forward.graph.output_node().args[0][1:] if n is not None)
    floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
    saved = [tuple(v.shape) for v in floats if v.numel() >= ROWS * HEADS]
    called = Counter(str(n.target) for n in backward.graph.nodes if n.op == "call_function")
    return records, [s for s in saved if s not in weights and s != (2, 64, D)], called


def reported(
    model: nn.Module, recompute: Any, **options: Any
) -> tuple[list[Record], list[tuple[int, ...]]]:
    """Return the pass's records and the shapes of kept results, of graphs that are not lowered."""
    outcomes: list[tuple[list[Record], list[tuple[int, ...]]]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        parsed = Options.parse(None, {"memeff.recompute": recompute, **options})
        report = pipeline.run(gm, PASSES, parsed).report
        levels = (m for m in gm.modules() if isinstance(m, GraphModule))
        kept = (n.meta["example_value"] for m in levels for n in m.graph.nodes if compat.is_kept(n))
        shapes = [tuple((v[0] if isinstance(v, tuple) else v).shape) for v in kept]
        outcomes.append(([r for r in report.records if r.pass_name == NAME], shapes))
        return lambda *_: (torch.zeros(()),)

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(draw())
    (outcome,) = outcomes
    return outcome


def min_cut(*args: Any, **kwargs: Any) -> Any:
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*args, **kwargs)


def boxed(gm: GraphModule) -> Any:
    from functorch.compile import make_boxed_func

    return make_boxed_func(gm.forward)


def attentions(called: Mapping[str, int]) -> int:
    """How many calls of attention's forward there are in a backward."""
    names = (n for n in called if "attention" in n and "backward" not in n and "lists" not in n)
    return sum(called[n] for n in names)


def kept_in(report: memeff_compile.Report) -> int:
    """In how many checkpoints something is kept."""
    mine = (r for r in report.records if r.pass_name == NAME and r.action == "rewrote")
    return sum(r.sites for r in mine)


# --- kept -----------------------------------------------------------------------------------------

FUSED = [(2, HEADS, 64, D // HEADS), (2, HEADS, 64)]


def test_checkpoints_are_left_alone_as_written() -> None:
    records, saved, _ = compiled(Blocks(Block()), "as_written")
    assert not records
    assert not saved


@pytest.mark.parametrize("kind", [Block, Padded], ids=["PyTorch's", "memeff::attention"])
def test_attention_is_kept_and_computed_once(kind: type[Block]) -> None:
    records, saved, called = compiled(Blocks(kind(), kind()), "attention")
    (record,) = records
    assert (record.action, record.sites) == ("rewrote", 2)
    assert (
        f"the results of 1 attention for the backward, {OUT / 1024:.1f} KiB a call"
        in record.sentence
    )
    assert sorted(saved) == sorted(2 * FUSED)
    assert not attentions(called)


def test_bytes_are_spent_on_what_saves_most() -> None:
    """Attention over 64 keys, half of them seen, saves more a byte than a linear of 32 inputs."""
    model, attended, linear = Blocks(Block(), Block()), FUSED[0], (2, 64, D)
    for limit, kept in {
        LINEAR - 1: [],
        OUT - 1: [linear],
        LINEAR + OUT - 1: [attended],
        2 * (4 * LINEAR + OUT): 2 * [attended, linear, (2, 64, 3 * D)],
    }.items():
        records, saved = reported(model, limit)
        assert sorted(saved) == sorted(kept), limit
        assert bool(records) == bool(kept)
    # Fewer operations a byte than the linear, 14 and 16, and each of them takes twice as long.
    assert reported(Blocks(Halves()), LINEAR + OUT - 1)[1] == [(2, 2 * HEADS, 32, D // HEADS)]


def test_bytes_are_not_spent_on_what_is_skipped() -> None:
    skip = {"memeff.skip": {NAME: "blocks.0"}}
    records, kept = reported(Blocks(Block(), Block()), LINEAR + OUT - 1, **skip)
    assert [(r.code, r.module.startswith("blocks.0")) for r in records] == [
        ("skipped", True),
        ("rewrote", False),
    ]
    assert kept == FUSED[:1]


class Grouped(nn.Module):
    """Fewer heads of keys, and values as deep as is said; queries are 8 deep."""

    def __init__(self, deep: int, **settings: Any) -> None:
        super().__init__()
        self.settings, self.parts = settings, [8, deep]
        self.q, self.o = nn.Linear(D, D), nn.Linear(HEADS * deep, D)
        self.kv = nn.Linear(D, HEADS // 2 * sum(self.parts))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(2, -1, HEADS, 8).transpose(1, 2)
        kv = self.kv(x).view(2, -1, HEADS // 2, sum(self.parts)).transpose(1, 2)
        k, v = kv.split(self.parts, -1)
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.settings)
        return x + self.o(attended.transpose(1, 2).flatten(2))


def test_what_attention_returns_is_as_deep_as_its_values() -> None:
    with planned_for(torch.device("cuda", 0)):  # a CPU has no fused kernel for such values
        (record,), _ = reported(Blocks(Grouped(16)), "attention")
    assert f"{ROWS * (2 * D + HEADS) * 4 / 1024:.1f} KiB a call" in record.sentence


class Products(nn.Module):
    """One with few columns and a long bias, one with many, one with a vector, one with chosen
    rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.few, self.bias = nn.Parameter(torch.ones(2, 64)), nn.Parameter(torch.ones(64))
        self.many, self.vector = nn.Parameter(torch.ones(D, 64)), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        one = torch.addmm(self.bias, rows[:, :2], self.few).tanh()
        two = torch.mm(rows, self.many).tanh()
        chosen = torch.mm(rows[(rows[:, 0] > 0).nonzero()[:, 0]], self.many).tanh().sum(0)
        scale = torch.matmul(x, self.vector).sigmoid()
        return x * scale[..., None] + (one * two + chosen).view(2, -1, 2, D).sum(2)


def test_products_are_weighed_by_what_they_multiply_and_unknown_sizes_are_left() -> None:
    model, product = Blocks(Products()), (ROWS, 64)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (record,), kept = reported(model, 2 * LINEAR)
        assert kept == [product]
        assert "self.many" in record.source
        _, kept = reported(model, "1GiB")
        assert kept == [product, product, (2, 64)]
        _, saved, called = compiled(model, "1GiB")
    assert saved == [product, product]
    assert called["aten.mv.default"] == 1  # the gradient of the vector


def test_linears_that_nobody_reads_again_are_not_kept() -> None:
    """Neither results that leave the block by the residual, nor those that a gated product
    overwrites.
    """
    records, saved, called = compiled(Blocks(Block()), "1GiB")
    assert "1 attention and 2 linears" in records[0].sentence
    assert sorted(saved) == sorted([*FUSED, (ROWS, D), (ROWS, 3 * D)])
    assert called["aten.addmm.default"] == 2  # gate and up
    assert not attentions(called)


def turned(x: Tensor, table: Tensor) -> Tensor:
    """A rotation of the halves of each row, as Llama's."""
    one, other = x.chunk(2, -1)
    return x * table + torch.cat((-other, one), -1) * table.flip(-1)


def turned_in_part(x: Tensor, table: Tensor) -> Tensor:
    return torch.cat((turned(x[..., :4], table[..., :4]), x[..., 4:]), -1)


def turned_by_pairs(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return 0.5 * (x.double() * table + pairs * table).to(x.dtype).to(torch.get_default_dtype())


class Rotated(nn.Module):
    """Queries and fewer keys that something is done to."""

    def __init__(self, turn: Callable[[Tensor, Tensor], Tensor], *, trains: bool = False) -> None:
        super().__init__()
        self.turn = turn
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // 2), nn.Linear(D, D // 2)
        self.o, self.table = nn.Linear(D, D), nn.Parameter(torch.rand(64, 8), trains)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        made = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.view(2, length, -1, 8).transpose(1, 2) for each in made)
        q, k = (self.turn(each, self.table[:length]) for each in (q, k))
        k, v = (each.repeat_interleave(2, 1) if each is v else twice(each) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(attended.transpose(1, 2).reshape(x.shape))


def twice(x: Tensor) -> Tensor:
    """Each head twice, as transformers repeats keys."""
    batch, heads, length, deep = x.shape
    return x[:, :, None].expand(batch, heads, 2, length, deep).reshape(batch, -1, length, deep)


TURNED = [(2, HEADS, 64, 8), (2, HEADS // 2, 64, 8)]


@pytest.mark.parametrize("turn", [turned, turned_in_part, turned_by_pairs])
def test_queries_and_keys_are_kept_behind_their_rotation(turn: Any) -> None:
    """Neither their linears nor the rotation run in the backward, and heads are not repeated."""
    records, saved, called = compiled(Blocks(Rotated(turn)), "1GiB")
    assert "1 attention, 1 linear and 2 rotated linears" in records[0].sentence
    assert sorted(saved) == sorted([*FUSED, *TURNED, (ROWS, D // 2)])
    assert called["aten.addmm.default"] == 1  # the head's operands, from attention's result


@pytest.mark.parametrize(
    ("turn", "trains"),
    [
        (turned, True),  # the table's gradient is made of the linear's result
        (lambda x, table: turned(F.normalize(x, dim=-1), table), False),
        (lambda x, table: x * x * table, False),
        (lambda x, table: turned(x, table) * x.detach().sigmoid(), False),
        (lambda x, table: turned(x, table).repeat(1, 1, 1, 2)[..., :8] * x.mean(), False),
    ],
)
def test_a_linear_that_the_backward_reads_is_kept_itself(turn: Any, trains: bool) -> None:
    records, saved, called = compiled(Blocks(Rotated(turn, trains=trains)), "1GiB")
    assert "1 attention and 3 linears" in records[0].sentence
    assert called["aten.addmm.default"] == 1
    assert (ROWS, D) in saved


def test_a_gated_linear_that_a_norm_reads_is_kept_first() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(D, 80), nn.Linear(D, 80), nn.Linear(80, D)
            self.norm, self.linear = nn.RMSNorm(D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.norm(self.linear(x))
            return x + self.norm(self.down(F.silu(self.gate(x)) * self.up(x)))

    records, _, called = compiled(Blocks(Normed()), LINEAR)
    assert "the results of 1 linear" in records[0].sentence
    assert not called["memeff.gated_linear.default"]
    assert called["aten.addmm.default"] == 3


def test_later_blocks_keep_first() -> None:
    """Theirs is free again when the gradients of most weights are still to come."""
    records, _ = reported(Blocks(Block(), Block(), Block()), 2 * OUT)
    assert [(r.sites, r.module) for r in records] == [(2, "blocks.1")]


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "recompute", "inner", "kept"),
    [
        (Block, "1GiB", "aot_eager", 2),
        (Padded, "attention", "eager", 2),
        (Padded, "40KiB", "aot_eager", 1),
        (partial(Rotated, turned), "1GiB", "aot_eager", 2),
    ],
)
def test_values_and_gradients_are_those_of_eager(
    kind: Callable[[], nn.Module], recompute: str, inner: str, kept: int
) -> None:
    model, x = Blocks(kind(), kind()).double(), draw(dtype=torch.float64)
    options = {"memeff.recompute": recompute}
    outcome = compare_with_eager(model, x, options=options, inner=inner, fullgraph=False)
    assert kept_in(outcome.report) == kept


@needs_compiler
@pytest.mark.usefixtures("inductors_loops")
def test_a_step_under_inductor_has_the_gradients_of_eager() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Grouped(8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False).square().mean()

    options = {"memeff.recompute": "attention"}
    compare_with_eager(Step(), draw(), options=options, inner="inductor", rtol=1e-4, atol=1e-7)


def test_lengths_may_change() -> None:
    model = Blocks(Block())
    options = {"memeff.inner": "aot_eager", "memeff.recompute": "attention"}
    f = torch.compile(model, backend="memeff", options=options, dynamic=True)
    for length in (64, 33):
        x = draw(length)
        torch.testing.assert_close(f(x), model(x))
        ours, theirs = (torch.autograd.grad(g(x), model.parameters()) for g in (f, model))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert kept_in(memeff_compile.last_report()) == 1


def test_nothing_is_kept_where_nothing_goes_backward() -> None:
    with torch.no_grad():
        outcome = compare_with_eager(
            Blocks(Block()).double(),
            draw(dtype=torch.float64).detach(),
            options={"memeff.recompute": "attention"},
        )
    assert not [r for r in outcome.report.records if r.pass_name == NAME]


# --- declines -------------------------------------------------------------------------------------


def only(records: Sequence[Record]) -> tuple[str, str, int]:
    (record,) = records
    return record.action, record.code, record.sites


def recomputes_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def test_a_policy_of_the_user_stays() -> None:
    policy = partial(create_selective_checkpoint_contexts, recomputes_all)
    records, kept = reported(Blocks(Block(), Block(), context_fn=policy), "attention")
    assert only(records) == ("declined", "selective_checkpoint", 2)
    assert not kept


def test_a_write_in_place_inside_the_checkpoint_is_declined() -> None:
    records, kept = reported(Blocks(Block(lambda x: x.clone().add_(1))), "attention")
    assert only(records) == ("declined", "mutated", 1)
    assert not kept


@pytest.mark.parametrize("recompute", ["attention", "1GiB"])
def test_a_branch_inside_the_checkpoint_is_declined(recompute: str) -> None:
    """PyTorch's policies have no rule for it, and compiling would fail."""
    branch = Block(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    records, kept = reported(Blocks(branch), recompute)
    assert only(records) == ("declined", "higher_order", 1)
    assert not kept


class Chosen(Grouped):
    """Attention whose kernels the code chooses."""

    def __init__(self, *kinds: SDPBackend) -> None:
        super().__init__(8)
        self.kinds = list(kinds)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.kinds):
            return super().forward(x)


def test_attention_that_runs_op_by_op_is_not_said_to_be_kept() -> None:
    fused = Chosen(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    unfused = Grouped(16), Grouped(8, dropout_p=0.5), Chosen(SDPBackend.MATH)
    records, kept = reported(Blocks(*unfused, fused), "attention")
    found = {(r.action, r.code): r.sites for r in records}
    assert found == {("declined", "op_by_op"): 3, ("rewrote", "rewrote"): 1}
    assert kept == FUSED[:1]


def test_skip_names_a_block() -> None:
    skip = {"memeff.skip": {NAME: "blocks.0"}}
    records, kept = reported(Blocks(Block(), Block()), "attention", **skip)
    (skipped,) = (r for r in records if r.code == "skipped")
    assert skipped.module.startswith("blocks.0")
    assert kept == FUSED[:1]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.inner, x, use_reentrant=False)[:, None]
        return F.scaled_dot_product_attention(inner, inner, inner)[:, 0]


def test_a_checkpoint_inside_a_checkpoint_keeps_nothing_of_its_own() -> None:
    outcome = compare_with_eager(
        Blocks(Nested()).double(),
        draw(dtype=torch.float64),
        options={"memeff.recompute": "attention"},
        fullgraph=False,
    )
    assert kept_in(outcome.report) == 1
    assert outcome.declined("selective_checkpoint")


# --- caches, undo and text ------------------------------------------------------------------------


@pytest.fixture
def body() -> GraphModule:
    return torch.fx.symbolic_trace(lambda x: x.sin().cos())


def test_a_policy_is_taken_back_and_told_apart_in_caches(body: GraphModule) -> None:
    sin, cos = (n for n in body.graph.nodes if n.op == "call_method")
    hashes = set()
    for kept in (
        {sin: "attention"},
        {sin: "product"},
        {cos: "product"},
        {sin: "product", cos: "aten::cos"},
    ):
        undo = compat.keep_in_checkpoint(body, kept)
        assert compat.has_checkpoint_policy(body)
        assert [compat.is_kept(n) for n in (sin, cos)] == [sin in kept, cos in kept]
        hashes.add(body.meta["_checkpoint_context_fn"].cache_hash)
        undo()
        assert not compat.has_checkpoint_policy(body)
        assert not any(map(compat.is_kept, (sin, cos)))
    assert len(hashes) == 4


def test_the_graph_says_what_is_kept() -> None:
    torch._dynamo.reset()
    options = {"memeff.inner": "eager", "memeff.recompute": "attention"}
    torch.compile(Blocks(Block()), backend="memeff", options=options)(draw())
    (graph,) = memeff_compile.graphs()[-1:]
    (line,) = (line for line in graph.after.splitlines() if "kept for the backward" in line)
    assert "scaled_dot_product_attention" in line
    assert "kept for" not in graph.before


@pytest.mark.parametrize("value", ["attentions", "12", 1.5, -1, True, None])
def test_another_value_is_refused(value: Any) -> None:
    with pytest.raises(memeff_compile.OptionError, match=r"memeff\.recompute") as refused:
        Options.parse(None, {"memeff.recompute": value})
    if value == "attentions":
        assert "Did you mean 'attention'?" in str(refused.value)
