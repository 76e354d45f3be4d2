"""fuse_gated_linear: rewrites, declines, skipped linears, and eager's numbers."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memeff_compile
from memeff_compile.kernels import gated_linear as op_folder
from memeff_compile.options import Options
from memeff_compile.passes import PASSES
from memeff_compile.passes.graph import pipeline
from memeff_compile.report import Record
from tests.support.captured_graphs import compare_with_eager
from tests.support.closeness import (
    assert_no_worse,
    assert_same_gradients,
    needs_compiler,
    pooled_error,
)
from tests.support.inductors_code import uncompiled

NAME = "fuse_gated_linear"
D, INNER = 6, 10
FIRED = [("rewrote", "rewrote")]


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return x, the weights of gate, up and down, and a bias of D."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 5, D), (INNER, D), (INNER, D), (D, INNER), (D,)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


Body = Callable[..., Any]


def checkpointed(body: Body, **settings: Any) -> Body:
    """Return a function that runs ``body`` as a checkpoint."""

    def function(*inputs: Tensor) -> Any:
        return checkpoint(body, *inputs, use_reentrant=False, **settings)

    return function


def gated_records(report: memeff_compile.Report) -> list[Record]:
    return [r for r in report.records if r.pass_name == NAME]


def run(function: Body, *inputs: Any, **settings: Any) -> list[tuple[str, str]]:
    """Compare with eager and return the pass's records."""
    outcome = compare_with_eager(function, *(inputs or operands()), **settings)
    return [(r.action, r.code) for r in gated_records(outcome.report)]


# --- rewrites -------------------------------------------------------------------------------------


def mlp(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return x + F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)


def up_first(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, u) * nn.SiLU()(F.linear(x, g)), d)


def with_a_bias(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, g)) * F.linear(x, u), d, b)


def gelu_tanh(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.gelu(x @ g.t(), approximate="tanh") * (x @ u.t()), d)


def relu(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(torch.mul(torch.relu(F.linear(x, g)), F.linear(x, u)), d)


def with_adapters(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    gate = F.linear(x, g.detach()) + F.linear(F.linear(x, d[:, :D]), g) * 0.5
    up = F.linear(x, u.detach()) + F.linear(F.linear(x, d[:, :D]), u) * 0.5
    return F.linear(F.silu(gate) * up, d.detach())


def over_views(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    gate = F.linear(x, g).view(-1, INNER).float()
    return F.linear(F.silu(gate) * F.linear(x, u).view(-1, INNER).to(gate.dtype), d.float())


FIRES = [mlp, up_first, with_a_bias, gelu_tanh, relu, with_adapters]


@pytest.mark.parametrize("body", FIRES, ids=lambda f: f.__name__)
def test_a_gated_linear_in_a_checkpoint_is_rewritten_and_equals_eager(body: Body) -> None:
    assert run(checkpointed(body)) == FIRED
    (graph,) = memeff_compile.graphs()
    assert "memeff.gated_linear(" in graph.after
    assert (body is with_adapters) == ("aten.mul" in graph.after)


@pytest.mark.parametrize("body", [mlp, with_a_bias], ids=lambda f: f.__name__)
def test_aot_eager_equals_eager(body: Body) -> None:
    assert run(checkpointed(body), inner="aot_eager") == FIRED


def test_views_and_casts_of_fresh_results_are_seen_through() -> None:
    settings: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    assert run(checkpointed(over_views), *operands(torch.float32), **settings) == FIRED


@pytest.mark.parametrize("frozen", [(1, 2), (3,), (0, 1, 2), (0, 3)], ids=str)
def test_frozen_weights_are_served(frozen: tuple[int, ...]) -> None:
    given = [t.requires_grad_(i not in frozen) for i, t in enumerate(_detached(operands()))]
    assert run(checkpointed(with_a_bias), *given) == FIRED


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach() for t in tensors]


def test_every_block_is_rewritten_and_recorded_once() -> None:
    model = Model(3)
    compiled(model, inner="eager")(torch.randn(2, 4, 8)).sum().backward()
    report = memeff_compile.last_report()
    (record,) = gated_records(report)
    assert (record.module, record.sites) == ("blocks.0.down", 3)
    text = " ".join(report.details().split())
    assert "fuse_gated_linear in blocks.0.down and 2 more" in text
    assert "holds 768 bytes instead of 1.5 KiB" in text


class Block(nn.Module):
    """A gated MLP of modules."""

    def __init__(self, width: int = 8, inner: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """Checkpointed blocks."""

    def __init__(self, depth: int = 1, width: int = 8, inner: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def compiled(model: Any, *, dynamic: bool | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    memeff_compile.reset()
    settings = {f"memeff.{key}": value for key, value in options.items()}
    return torch.compile(model, backend="memeff", options=settings, dynamic=dynamic)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_dynamic_shapes_compile_once(inner: str) -> None:
    model = Model(2).double()
    runs = compiled(model, dynamic=True, inner=inner)
    for rows, length in ((2, 12), (3, 7), (5, 30)):
        x = torch.randn(rows, length, 8, dtype=torch.float64)
        found = torch.autograd.grad(runs(x).square().sum(), list(model.parameters()))
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(found, expected)
    assert len(memeff_compile.graphs()) == 1
    assert memeff_compile.last_report().rewrites(NAME) == 1


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_autocast_casts_the_weight_as_the_linear_would(inner: str, where: str) -> None:
    model, x = Model(2), torch.randn(3, 5, 8)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside"):
            return model(x)

    def gradients(function: Body) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "outside"):
            out = function(x)
        return list(torch.autograd.grad(out.float().square().sum(), list(model.parameters())))

    expected = gradients(step)
    found = gradients(compiled(step, inner=inner))
    assert memeff_compile.last_report().rewrites(NAME) == 1
    for ours, eagers in zip(found, expected, strict=True):
        assert ours.dtype == eagers.dtype == torch.float32
        assert (ours - eagers).norm() <= 0.03 * eagers.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_no_further_from_fp64_than_eager(dtype: torch.dtype) -> None:
    model = Model(2, 16, 32).to(dtype)
    exact = copy.deepcopy(model).double()
    runs = compiled(model, inner="eager")
    ours, eager = [], []
    for seed in range(5):
        x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)

        def gradients(function: Body, owner: nn.Module, x: Tensor) -> Sequence[Tensor]:
            return torch.autograd.grad(function(x).sum(), list(owner.parameters()))

        truth = gradients(exact, exact, x.double())
        eager.append(pooled_error(gradients(model, model, x), truth))
        found = gradients(runs, model, x)
        assert {g.dtype for g in found} == {dtype}
        ours.append(pooled_error(found, truth))
    assert_no_worse(ours, eager)
    assert memeff_compile.last_report().rewrites(NAME) == 1


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_verify_finds_nothing_to_mend(inner: str) -> None:
    runs = compiled(Model(2), inner=inner, verify="raise")
    runs(torch.randn(2, 4, 8)).square().sum().backward()
    records = memeff_compile.last_report().records
    assert [r.action for r in records] == ["rewrote", "verified"]


# --- skipped without a record ---------------------------------------------------------------------


def halves_of_one(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    gate, up = F.linear(x, torch.cat([g, u])).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, d)


def gate_from_outside(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.silu(x[..., :1].expand(2, 5, INNER)) * F.linear(x, u), d)


def gate_kept_by_its_maker(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.silu(torch.tanh(F.linear(x, g))) * F.linear(x, u), d)


def no_activation(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, g) * F.linear(x, u), d)


def another_activation(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, g)) * F.linear(x, u), d)


def rounded_between(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    product = F.silu(F.linear(x, g)).float() * F.linear(x, u)
    return F.linear(product.double(), d)


def activated_in_place(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, g), inplace=True) * F.linear(x, u), d)


def without_gradients(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)


LEFT = [
    halves_of_one,
    gate_from_outside,
    gate_kept_by_its_maker,
    no_activation,
    another_activation,
    rounded_between,
    activated_in_place,
]


@pytest.mark.parametrize("body", LEFT, ids=lambda f: f.__name__)
def test_nothing_to_gain_is_left_alone(body: Body) -> None:
    assert run(checkpointed(body)) == []


def test_outside_a_checkpoint_everything_is_left_alone() -> None:
    assert run(mlp) == []


def test_no_grad_is_left_alone() -> None:
    assert run(checkpointed(lambda x, *w: x * without_gradients(x, *w).sum())) == []
    with torch.no_grad():
        runs = compiled(checkpointed(mlp), inner="eager")
        torch.testing.assert_close(runs(*operands()), mlp(*operands()))
    assert gated_records(memeff_compile.last_report()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gated_linear": "off"}, []),
        ({"skip": "blocks.0"}, [("declined", "skipped"), *FIRED]),
        ({"skip": {NAME: "blocks.*.down"}}, [("declined", "skipped")] * 2),
        ({"skip": {"defer_logits": "blocks"}}, FIRED),
        ({"strict": NAME}, FIRED),
    ],
    ids=["off", "a block skipped", "skipped by name", "another pass skipped", "strict"],
)
def test_options_are_obeyed(options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    compiled(Model(2), inner="eager", **options)(torch.randn(2, 4, 8)).sum().backward()
    assert [(r.action, r.code) for r in gated_records(memeff_compile.last_report())] == expected


# --- declines -------------------------------------------------------------------------------------


def gate_returned(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Any:
    gate = F.linear(x, g)
    return F.linear(F.silu(gate) * F.linear(x, u), d), gate


def up_used_again(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    up = F.linear(x, u)
    return F.linear(F.silu(F.linear(x, g)) * up, d) + up.exp().sum()


def product_used_again(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    product = F.silu(F.linear(x, g)) * F.linear(x, u)
    return F.linear(product, d) + product.mean()


def gate_written_to(x: Tensor, g: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    gate = F.linear(x, g)
    activated = F.silu(gate)
    up = F.linear(x, u)
    with torch.no_grad():
        d.mul_(0.5)
    return F.linear(activated * up, d)


DECLINED = [
    (gate_returned, "gate_reused(output)", "also used by `output`"),
    (up_used_again, "gate_reused(exp)", "also used by `exp`"),
    (product_used_again, "gate_reused(mean)", "also used by `mean`"),
]


@pytest.mark.parametrize(("body", "code", "sentence"), DECLINED, ids=[c for _, c, _ in DECLINED])
def test_a_decline_says_why(body: Body, code: str, sentence: str) -> None:
    outcome = compare_with_eager(checkpointed(body), *operands())
    (record,) = gated_records(outcome.report)
    assert (record.action, record.code) == ("declined", code)
    assert sentence in record.sentence
    assert record.hint
    assert "F.linear(" in record.source


def test_a_policy_that_may_keep_gate_or_up_is_declined() -> None:
    def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    function = checkpointed(mlp, context_fn=contexts)
    outcome = compare_with_eager(function, *operands(), inner="aot_eager")
    (record,) = gated_records(outcome.report)
    assert (record.action, record.code) == ("declined", "selective_checkpoint")


def records_of(function: Body, *inputs: Any) -> list[Record]:
    """Return the passes' records of a graph that is not run."""
    found: list[Record] = []

    def look(gm: GraphModule, example_inputs: Sequence[Any]) -> Body:
        found.extend(pipeline.run(gm, PASSES, Options()).report.records)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=look, fullgraph=True)(*inputs)
    return [r for r in found if r.pass_name == NAME]


def test_a_weight_of_a_tensor_subclass_is_declined() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x, g, u, d, b = operands(torch.float32)
    weight = nn.Parameter(TwoTensor(d.detach(), d.detach()))
    (record,) = records_of(checkpointed(mlp), x, g, u, weight, b)
    assert (record.action, record.code) == ("declined", "subclass_weight(TwoTensor)")


def test_what_the_op_cannot_serve_is_declined_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_folder, "supports", lambda *_: "gate is no good. Mend it.")
    (record,) = records_of(checkpointed(mlp), *operands())
    assert (record.action, record.code) == ("declined", "unsupported")
    assert record.sentence == "Gate is no good. Mend it."


def test_a_write_between_gate_and_linear_is_declined() -> None:
    (record,) = records_of(checkpointed(gate_written_to), *operands())
    assert (record.action, record.code) == ("declined", "mutated")
    assert "`mul_` writes in place" in record.sentence


# --- under Inductor -------------------------------------------------------------------------------


@needs_compiler
def test_inductor_makes_gate_and_up_and_copies_neither() -> None:
    """The op writes into the very results of the products that the backward computes again."""
    from torch._inductor.utils import run_and_get_code

    rows, inners = 48, (160, 224)  # two sizes: no block's buffers can be handed on to the other
    model, x = nn.Sequential(*(Model(1, 16, i) for i in inners)), torch.randn(3, rows // 3, 16)

    called: set[tuple[str, str]] = set()

    def made(**options: str) -> list[int]:
        """Count the buffers of each block's intermediate size that the backward allocates."""
        runs = compiled(model, **options)
        with uncompiled():
            _, codes = run_and_get_code(lambda: runs(x).square().sum().backward())
        called.update(re.findall(r"ops\.memeff\.(\w+)\.default([.a-z]*)\(", "".join(codes)))
        shapes = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\), ", codes[-1])
        sizes = [math.prod(map(int, shape.strip(", ").split(", "))) for shape in shapes]
        return [sizes.count(rows * inner) for inner in inners]

    assert made() == [2, 2], "gate and up, and no copy of them"
    assert min(made(gated_linear="off")) > 3, "the pass would be for nothing"
    names = {"gated_linear", "gated_linear_backward"}
    assert called == {(name, ".direct") for name in names}, "the dispatcher is not asked"


@needs_compiler
@pytest.mark.usefixtures("inductors_loops")
def test_inductor_gives_the_gradients_of_eager() -> None:
    model, x = Model(1, 16, 160), torch.randn(3, 16, 16)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled(model)(x).square().sum().backward()
    assert_same_gradients([p.grad for p in model.parameters()], list(expected))
