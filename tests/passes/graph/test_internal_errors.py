"""If a pass raises, only that match is skipped: each pass is broken in turn, at every stage, among
others.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import compat
from memeff_compile.backend import entry
from memeff_compile.kernels.coded_kv_cache import (
    Layout,
    coded_kv_cache_append,
    coded_kv_cache_view,
)
from memeff_compile.kernels.coded_weight import CodedWeight, encode
from memeff_compile.kernels.device import planned_for
from memeff_compile.passes import PASSES, keep_rotary_tables
from memeff_compile.passes.graph.base import Decline, Done, Gain, GraphPass
from memeff_compile.passes.graph.editor import Editor
from memeff_compile.passes.graph.graph_info import GraphInfo
from memeff_compile.report import CHANGES, GraphReport
from tests.support.captured_graphs import FUSE
from tests.support.coded_caches import allocate, draw
from tests.support.ternary_layers import Detached

V, D = 64, 8
GPU = torch.device("cuda", 0)
# The state of a pass by then differs from pass to pass; the other stages are the pipeline's.
STAGES = ("find", "check", "edited", "rubbish")
ALL_STAGES = (*STAGES, "gain", "anchor", "places", "rewrite", "dead")


class Broken(GraphPass):
    """A pass that fails at one stage of one place; `served` counts the others."""

    def __init__(self, whole: Any, stage: str = "", candidate: str = "") -> None:
        self.whole, self.stage, self.candidate = whole, stage, candidate
        self.name = whole.name
        self.first: Any = None  # node
        self.served = 0

    def _is_first(self, match: Any) -> bool:
        return self.first in self.whole.places(match)

    def _may_fail(self, stage: str, match: Any) -> None:
        if self.stage == stage and self._is_first(match):
            raise KeyError(f"broken at {stage}")

    def enabled(self, info: GraphInfo) -> bool:
        return bool(self.whole.enabled(info))

    def find(self, info: GraphInfo) -> Iterator[Any]:
        visit = GraphInfo.visit

        def failing(self_: GraphInfo, candidates: Iterable[Node]) -> Iterator[Node]:
            for node in visit(self_, candidates):
                if self.first is None and self.candidate == node.name:
                    self.first = node
                    raise KeyError("broken at find")
                yield node

        with pytest.MonkeyPatch.context() as patch:
            if self.stage == "find":
                patch.setattr(GraphInfo, "visit", failing)
            for match in self.whole.find(info):
                yield match
                if self.first is None and self.stage != "find" and not isinstance(match, Decline):
                    self.first = self.whole.places(match)[0]

    def parts(self, match: Any) -> Sequence[Any]:
        found: Sequence[Any] = self.whole.parts(match)
        return found

    def check(self, info: GraphInfo, match: Any) -> Decline | None:
        self._may_fail("check", match)
        found: Decline | None = self.whole.check(info, match)
        return found

    def gain(self, info: GraphInfo, match: Any) -> Gain | None:
        self._may_fail("gain", match)
        found: Gain | None = self.whole.gain(info, match)
        return found

    def anchor(self, match: Any) -> Any:
        self._may_fail("anchor", match)
        return self.whole.anchor(match)

    def places(self, match: Any) -> Sequence[Any]:
        self._may_fail("places", match)
        found: Sequence[Any] = self.whole.places(match)
        return found

    def rewrite(self, info: GraphInfo, match: Any, editor: Editor) -> Done:
        self._may_fail("rewrite", match)
        done: Done = self.whole.rewrite(info, match, editor)
        self._may_fail("edited", match)
        self.served += len(self.parts(match)) or 1
        return done

    def dead(self, match: Any) -> Sequence[Any]:
        if self.stage in ("dead", "rubbish") and self._is_first(match):
            self.served -= len(self.parts(match)) or 1
            if self.stage == "rubbish":
                return [*self.whole.dead(match), None]
        self._may_fail("dead", match)
        found: Sequence[Any] = self.whole.dead(match)
        return found


@dataclasses.dataclass
class Program:
    """A function or module with places for a pass, and at least one for another."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grad: bool = True
    matches: int = 2
    is_planned: bool = False
    tolerance: float = 1e-9


def numbers(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def classes(*size: int) -> Tensor:
    return torch.arange(torch.Size(size).numel()).view(size) * 7 % V


HEADS = {(d, seed): numbers(V, d, seed=seed) for d in (8, 16, 32, 256) for seed in (8, 9)}
TURNS = [numbers(8, 8, seed=layer) for layer in range(3)]


def loss_of(hidden: Tensor, seed: int = 8) -> Tensor:
    """A head and its loss, which another pass serves."""
    weight = HEADS[hidden.shape[-1], seed].to(hidden.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return F.cross_entropy(F.linear(rows, weight), torch.arange(rows.shape[0]) % V)


def masked(q: Tensor) -> Tensor:
    """Attention under a mask that is known to be causal."""
    places = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, q, q, attn_mask=places[None] <= places[:, None])


def heads(dtype: torch.dtype = torch.float64) -> Tensor:
    return numbers(2, 2, 6, 16, seed=3, dtype=dtype).requires_grad_(dtype == torch.float64)


def two_losses() -> Any:
    def function(q: Tensor, h: Tensor) -> Any:
        return masked(q), loss_of(h), loss_of(h.tanh(), 9)

    return function, (heads(), numbers(5, D).requires_grad_())


def two_divergences() -> Any:
    def one(h: Tensor, w: Tensor) -> Tensor:
        student = F.linear(h, w).log_softmax(-1)
        teacher = F.linear(h.detach().tanh(), w.detach()).softmax(-1)
        return F.kl_div(student, teacher, reduction="sum")

    def function(q: Tensor, h: Tensor, w: Tensor) -> Any:
        return masked(q), one(h, w), one(h.sin(), w)

    given = numbers(5, D).requires_grad_(), numbers(V, D, seed=1).requires_grad_()
    return function, (heads(), *given)


def two_tied_tables() -> Any:
    def one(ids: Tensor, table: Tensor) -> Tensor:
        hidden = torch.tanh(F.embedding(ids, table))
        return F.cross_entropy(F.linear(hidden, table).view(-1, V), ids.view(-1))

    def function(ids: Tensor, a: Tensor, b: Tensor) -> Any:
        return one(ids, a), one(ids, b)

    return function, (classes(2, 6), *(numbers(V, D, seed=s).requires_grad_() for s in (1, 2)))


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, seed in (("up", 1), ("down", 2), ("gate", 3)):
            weight = numbers(256, 256, seed=seed, dtype=torch.bfloat16)
            coded = CodedWeight(encode(weight, "win4"), "win4", weight.shape)
            setattr(self, name, nn.Parameter(coded))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)  # a group
        return loss_of(F.linear(inner, self.down).float())


def three_coded_weights() -> Any:
    return Coded(), (numbers(3, 256, seed=5, dtype=torch.bfloat16),)


def two_checkpointed_blocks() -> Any:
    def block(x: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return x + F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for layer in range(2):
            x = checkpoint(block, x, *weights[3 * layer : 3 * layer + 3], use_reentrant=False)
        return loss_of(x)

    shapes = [(10, D), (10, D), (D, 10)] * 2
    weights = (numbers(*s, seed=i).requires_grad_() for i, s in enumerate(shapes))
    return function, (numbers(2, 5, D, seed=9).requires_grad_(), *weights)


def two_checkpointed_attentions() -> Any:
    def block(x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def function(q: Tensor) -> Tensor:
        for _ in range(2):
            q = checkpoint(block, q, use_reentrant=False)
        return loss_of(q)

    return function, (heads(),)


def two_returned_heads() -> Any:
    def function(q: Tensor, h: Tensor, w: Tensor) -> Any:
        return masked(q), F.linear(h.sin(), w), h.cos() @ w.T

    return function, (heads(), numbers(5, D).requires_grad_(), numbers(V, D).requires_grad_())


def two_reads_of_a_coded_cache() -> Any:
    pool = allocate(Layout(16, 4, group=16, recent=16, kept=2), 2, 2, 60, torch.float32)
    coded_kv_cache_append(*pool, *draw(2, 2, 50, 16, torch.float32), 4, 16, 60)
    mask = (torch.arange(60) < 50).expand(2, 1, 1, 60)

    def function(q: Tensor, *pool: Tensor) -> Any:
        for _ in range(2):
            k, v = coded_kv_cache_view(*pool, None, None, 4, 60)
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return q, loss_of(q)

    return function, (numbers(2, 4, 1, 16, dtype=torch.float32), *pool)


def two_static_caches() -> Any:
    def function(q: Tensor, k: Tensor, p: Tensor, *caches: Tensor) -> Any:
        for keys, values in (caches[:2], caches[2:]):
            keys.index_copy_(2, p, k)
            values.index_copy_(2, p, k)
            mask = torch.arange(24)[None, None, None, :] <= p[None, None, :, None]
            q = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return q, loss_of(q)

    caches = (numbers(2, 2, 24, 8, seed=s, dtype=torch.float32) for s in range(4))
    new = numbers(2, 2, 1, 8, seed=7, dtype=torch.float32)
    query = numbers(2, 4, 1, 8, seed=8, dtype=torch.float32)
    return function, (query, new, torch.tensor([12]), *caches)


class TwoMultiheads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
        self.parts = nn.ModuleList(nn.MultiheadAttention(16, 4, **settings) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x, x, x)[0]
        return loss_of(x)


def two_multiheads() -> Any:
    return TwoMultiheads(), (numbers(2, 6, 16, seed=4).requires_grad_(),)


def masked_attention() -> Any:
    def function(q: Tensor) -> Any:
        return loss_of(masked(masked(q)))

    return function, (heads(),)


def two_kinds_of_attention() -> Any:
    def function(q: Tensor) -> Any:
        x = q
        for is_causal in (True, True, False):
            x = F.scaled_dot_product_attention(x, q, q, is_causal=is_causal)
        return loss_of(x.float())

    return function, (heads(torch.bfloat16),)


class Rotary(nn.Module):
    """Layers that rotate their input by two tables, which are one match."""

    def forward(self, x: Tensor) -> Tensor:
        once = torch.arange(12)[:, None].double() * 100 ** (-torch.arange(4)[None] / 4)
        of = torch.cat((once, once), -1)[None]
        cos, sin = of.cos(), of.sin()
        for layer in range(3):
            half = torch.cat((-x[..., 4:], x[..., :4]), -1)
            x = (x * cos + half * sin) @ TURNS[layer]
        return loss_of(x)


def two_tables() -> Any:
    return Rotary(), (numbers(2, 12, 8, seed=1).requires_grad_(),)


class ThreeTernary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.last = (Detached(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.last(torch.tanh(self.first(x) * self.gate(x))))


def three_ternary_linears() -> Any:
    return ThreeTernary(), (numbers(3, 32, dtype=torch.float32).requires_grad_(),)


LOW = {"memeff.attention": "8b", "memeff.attention.length": 0}
PROGRAMS = {
    "fuse_divergence": Program(two_divergences),
    FUSE: Program(two_losses),
    "fuse_embedding_gradient": Program(two_tied_tables),
    "fuse_gated_linear": Program(two_checkpointed_blocks),
    "encode_weights": Program(three_coded_weights, grad=False, matches=3, tolerance=1e-5),
    "defer_logits": Program(two_returned_heads),
    "compress_kv_cache": Program(two_reads_of_a_coded_cache, grad=False, tolerance=1e-5),
    "rewrite_kv_update": Program(two_static_caches, grad=False, is_planned=True, tolerance=1e-5),
    "expand_multihead": Program(two_multiheads),
    "recover_attention": Program(masked_attention),
    "quantize_attention": Program(
        two_kinds_of_attention, LOW, grad=False, matches=3, tolerance=0.1
    ),
    "keep_rotary_tables": Program(two_tables, {"memeff.inner": "inductor"}, grad=False),
    "ternarize_linear": Program(three_ternary_linears, matches=3, tolerance=1e-4),
    "keep_activations": Program(two_checkpointed_attentions, {"memeff.recompute": "attention"}),
}


@pytest.fixture(autouse=True)
def _tables_as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tables as small as these, and put aot_eager in the place of Inductor."""

    def inner(gm: Any, example_inputs: Any, patches: Any, tag: str) -> Any:
        return compat.compile_with_aot_eager(gm, example_inputs)

    monkeypatch.setattr(keep_rotary_tables, "where_it_runs", lambda _: GPU)
    monkeypatch.setattr(keep_rotary_tables, "FEWEST_NUMBERS", 12 * 8)
    monkeypatch.setattr(compat, "compile_with_inductor", inner)


def values(function: Callable[..., Any], inputs: Sequence[Any], *, grad: bool) -> list[Tensor]:
    """Return outputs, gradients of inputs and the inputs after writes."""
    given = [
        x.detach().clone().requires_grad_(x.requires_grad and grad) if _is_plain(x) else x
        for x in inputs
    ]
    with torch.set_grad_enabled(grad):
        found = [x for x in function(*given) if x is not None]
    if grad:
        sum(x.sin().sum() for x in found).backward()
    leaves = [x for x in given if _is_plain(x)]
    gradients = [x.grad for x in leaves if x.grad is not None]
    return [x.detach() * 1 for x in [*found, *leaves] if x.is_floating_point()] + gradients


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def stages_of(whole: Any) -> tuple[str, ...]:
    """Return all stages for one pass with matches of one place, and for one with groups."""
    return ALL_STAGES if whole.name in (FUSE, "recover_attention") else STAGES


def run(
    program: Program, whole: Any, patch: pytest.MonkeyPatch
) -> dict[str, tuple[Broken, GraphReport]]:
    """Compile one graph with a pass broken at every stage; compare results with the graph itself."""
    found: dict[str, tuple[Broken, GraphReport]] = {}
    options = {"memeff.inner": "eager", **program.options}

    def inner(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: dict[str, Callable[..., Any]] = {}
        for stage in ("", *stages_of(whole)):
            candidate = found[""][0].first.name if found else ""
            broken = Broken(whole, stage, candidate)
            patch.setattr(entry, "PASSES", tuple(broken if p is whole else p for p in PASSES))
            twin = copy.deepcopy(gm)
            with planned_for(GPU) if program.is_planned else contextlib.nullcontext():
                result = entry.memeff(twin, example_inputs, options=options)
            report = memeff_compile.graphs()[-1]
            found[stage] = broken, report
            compiled.setdefault(report.after, result)  # stages usually leave one graph

        def call(*args: Any) -> Any:
            wanted = values(gm.forward, args, grad=program.grad)
            for graph, each in compiled.items():
                for mine, theirs in zip(values(each, args, grad=program.grad), wanted, strict=True):
                    limit = program.tolerance
                    torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit, msg=graph)
            return gm.forward(*args)

        return call

    torch._dynamo.reset()
    memeff_compile.reset()
    function, inputs = program.make()
    with torch.set_grad_enabled(program.grad):
        torch.compile(function, backend=inner, fullgraph=True)(*inputs)
    return found


def changes(report: GraphReport, *, but: str) -> list[tuple[str, str, int]]:
    """Return the rewrites of the other passes."""
    done = [r for r in report.records if r.action in CHANGES and r.pass_name != but]
    return [(r.pass_name, r.sentence, r.sites) for r in done]


@pytest.mark.parametrize("whole", PASSES, ids=lambda each: str(each.name))
def test_a_failing_place_costs_itself_alone(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(PROGRAMS[whole.name], whole, monkeypatch)
    sound, report = found.pop("")
    others = changes(report, but=whole.name)
    assert sound.served == PROGRAMS[whole.name].matches
    assert others, "no other pass has anything to do"
    assert not [r for r in report.records if r.action == "internal_error"]
    assert list(found) == list(stages_of(whole))
    for stage, (broken, report) in found.items():
        (record,) = [r for r in report.records if r.action == "internal_error"]
        assert broken.served == sound.served - 1, stage
        assert record.pass_name == whole.name, stage
        assert record.hint.startswith("please report it"), stage
        assert record.source or stage in ("anchor", "places"), stage
        assert changes(report, but=whole.name) == others, stage
        assert "KeyError: 'broken at" in record.sentence or stage == "rubbish", stage


def test_every_pass_has_a_program() -> None:
    assert list(PROGRAMS) == [each.name for each in PASSES]
