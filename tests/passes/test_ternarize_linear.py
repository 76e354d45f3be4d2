"""ternarize_linear: rewrites, declines with reasons, eager's values and gradients."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels import library
from memeff_compile.kernels import ternary_linear as op_folder
from memeff_compile.kernels.device import planned_for
from memeff_compile.options import Options
from memeff_compile.passes import PASSES
from memeff_compile.passes.graph import pipeline
from memeff_compile.passes.graph.canonical import read
from memeff_compile.passes.ternary.chains import Quantized, Unread, read_quantized
from memeff_compile.report import Record
from tests.support.captured_graphs import capture
from tests.support.closeness import needs_compiler
from tests.support.ternary_layers import (
    LAYERS,
    Block,
    ByFunction,
    Detached,
    Plain,
    WithoutGrad,
    online_layer,
    tiny_bitnet,
    tokens_int8,
    weights,
)

NAME = "ternarize_linear"
OPTIONS = {"memeff.inner": "eager"}
AOT = {"inner": "aot_eager"}
ALL_LAYERS = [*LAYERS, online_layer()]
DTYPES = [torch.float32, torch.bfloat16]
BUDGET = {torch.float32: 2e-6, torch.bfloat16: 6e-2}


def case(layer: type, *others: Any, is_slow: bool) -> Any:
    """Return a parameter set; the slow ones run with `make test-all`."""
    name = "-".join([layer.__name__, *map(str, others)])
    return pytest.param(layer, *others, id=name, marks=[pytest.mark.slow] if is_slow else [])


TRAINED = [
    case(layer, dtype, is_slow=dtype is torch.bfloat16 and layer.__name__ != "Online")
    for layer, dtype in itertools.product(ALL_LAYERS, DTYPES)
]
INFERRED = [
    case(layer, is_slow=layer.__name__ not in ("Plain", "Wide", "Online"))
    for layer in [*ALL_LAYERS, Plain]
]


def records() -> list[Record]:
    report = memeff_compile.last_report()
    return [r for r in report.records if r.pass_name == NAME]


def outcome() -> list[tuple[str, int]]:
    return [(r.code, r.sites) for r in records()]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    given = {**OPTIONS, **{f"memeff.{key}": value for key, value in options.items()}}
    return torch.compile(model, backend="memeff", options=given)


def eagerly() -> Any:
    """Run transformers' layers without the compiled functions inside them."""
    return torch.compiler.set_stance("force_eager")


def step(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    out = model(x)
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach()


def assert_like_eager(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Compare values and gradients; codes are equal, so only rounding may differ."""
    twin = copy.deepcopy(model)
    budget = BUDGET[x.dtype]
    with eagerly():
        wanted = step(model, x)
    found = step(compiled(twin, **options), x)
    assert error(found, wanted) <= budget
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert error(mine.grad, theirs.grad) <= 4 * budget


@needs_compiler
def test_inductors_code_calls_the_functions_of_a_training_steps_ops() -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(4, 32)
    memeff_compile.ternarize_(model)
    for op in library._DIRECT:  # also where another process wrote the code that this one runs
        assert callable(op.direct)
    _, codes = run_and_get_code(lambda: assert_like_eager(model, x, inner="inductor"))
    call = r"= torch\.ops\.memeff\.ternary_linear_(\w+)\.default([.a-z]*)\("
    called = re.findall(call, "".join(codes))
    assert Counter(called) == {
        ("pack", ".direct"): 2,
        ("quantize", ".direct"): 2,
        ("product", ".direct"): 2,
        ("product_backward", ".direct"): 2,
    }


class Scored(nn.Module):
    """Two ternary linears of one input; each case uses the second one differently."""

    def __init__(self, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 16), nn.Linear(32, 16)
        self.second = second
        memeff_compile.ternarize_(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.q(x), self.second(self.k(x))
        return (q * k.detach()).sum(), k


@pytest.mark.parametrize("second", [torch.detach, torch.sign, torch.clone])
def test_weights_get_a_gradient_where_aot_eager_gives_one_and_none_elsewhere(
    second: Callable[[Tensor], Tensor],
) -> None:
    """Detached, with a gradient of zeros, and returned to a caller who drops it."""
    model, x = Scored(second), torch.randn(4, 32)
    twin = copy.deepcopy(model)
    torch.compile(model, backend="aot_eager")(x)[0].backward()
    compiled(twin, **AOT)(x)[0].backward()
    assert outcome() == [("rewrote", 2)]
    wanted, found = (
        {name: p.grad for name, p in each.named_parameters()} for each in (model, twin)
    )
    assert {name for name, grad in found.items() if grad is None} == {
        name for name, grad in wanted.items() if grad is None
    }
    for name, grad in found.items():
        if grad is not None:
            torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.5)
    before = twin.k.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, twin.k.weight) == (wanted["k.weight"] is None)


# --- rewrites -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layer", "dtype"), TRAINED)
def test_training_fires_in_every_spelling_and_equals_eager(
    layer: type[nn.Linear], dtype: torch.dtype, inner: str
) -> None:
    model = Block(layer).to(dtype)
    assert_like_eager(model, torch.randn(3, 5, 20).to(dtype), inner=inner)
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]


@pytest.mark.parametrize("layer", INFERRED)
def test_inference_fires_where_there_is_a_kernel_and_equals_eager(layer: type[nn.Linear]) -> None:
    model = Block(layer)
    x = torch.randn(2, 20)
    with torch.no_grad(), planned_for(torch.device("cuda", 0)):
        found = compiled(model)(x)
        with eagerly():
            assert error(found, model(x)) < 2e-6
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]
    assert "pack_ternary_" in records()[0].sentence


class Golden(expecttest.TestCase):
    def test_linears_of_one_input_share_its_codes(self) -> None:
        compiled(Block(Detached, 4, 8))(torch.randn(2, 20)).sum().backward()
        self.assertExpectedInline(
            memeff_compile.graphs()[-1].after,
            """\
graph(
    enter.weight: param f32[4, 20],
    enter.bias: param f32[4],
    x: input f32[2, 20],
    gate.weight: param f32[8, 4],
    up.weight: param f32[8, 4],
    up.bias: param f32[8],
    down.weight: param f32[20, 8],
):
    %0: f32[2, 4] = aten.linear(x, enter.weight, enter.bias)
    %1: f32[2, 4] = aten.tanh(%0)
    %2: f32[2, 4] = aten.detach(%1)
    %3: (i8[2, 4, 4], f32[2], i32[2]) = memeff.ternary_linear_quantize(%2)
    %4: f32[8, 4] = aten.detach(gate.weight)
    %5: f32[8, 4] = aten.abs(%4)
    %6: f32[] = aten.mean(%5)
    %7: f32[] = aten.clamp(%6, 1e-05)
    %8: f32[] = aten.reciprocal(%7)
    %9: i32[8, 1] = memeff.ternary_linear_pack(%4, %8)
    %10: f32[8, 4] = aten.detach(up.weight)
    %11: f32[8, 4] = aten.abs(%10)
    %12: f32[] = aten.mean(%11)
    %13: f32[] = aten.clamp(%12, 1e-05)
    %14: f32[] = aten.reciprocal(%13)
    %15: i32[8, 1] = memeff.ternary_linear_pack(%10, %14)
    %16: i8[2, 4, 4] = getitem(%3, 0)
    %17: f32[2] = getitem(%3, 1)
    %18: i32[2] = getitem(%3, 2)
    %19: (f32[2, 8], f32[2, 8]) = memeff.ternary_linear_product(%1, [gate.weight, up.weight], %16, %17, %18, [%9, %15], [%8, %14], [up.bias], [1], f32)
    %20: f32[2, 8] = getitem(%19, 0)
    %21: f32[2, 8] = getitem(%19, 1)
    %22: f32[2, 8] = aten.relu(%20)
    %23: f32[2, 8] = aten.square(%22)
    %24: f32[2, 8] = aten.mul(%23, %21)
    %25: f32[2, 8] = aten.detach(%24)
    %26: (i8[2, 4, 4], f32[2], i32[2]) = memeff.ternary_linear_quantize(%25)
    %27: f32[20, 8] = aten.detach(down.weight)
    %28: f32[20, 8] = aten.abs(%27)
    %29: f32[] = aten.mean(%28)
    %30: f32[] = aten.clamp(%29, 1e-05)
    %31: f32[] = aten.reciprocal(%30)
    %32: i32[20, 1] = memeff.ternary_linear_pack(%27, %31)
    %33: i8[2, 4, 4] = getitem(%26, 0)
    %34: f32[2] = getitem(%26, 1)
    %35: i32[2] = getitem(%26, 2)
    %36: (f32[2, 20]) = memeff.ternary_linear_product(%24, [down.weight], %33, %34, %35, [%32], [%31], [], [], f32)
    %37: f32[2, 20] = getitem(%36, 0)
    return (%37)""",
        )

    def test_one_op_multiplies_without_gradients(self) -> None:
        with torch.no_grad(), planned_for(torch.device("cuda", 0)):
            compiled(Block(Plain, 4, 8))(torch.randn(2, 20))
        self.assertExpectedInline(
            memeff_compile.graphs()[-1].after,
            """\
graph(
    enter.weight: param f32[4, 20],
    enter.bias: param f32[4],
    x: input f32[2, 20],
    gate.weight: param f32[8, 4],
    up.weight: param f32[8, 4],
    up.bias: param f32[8],
    down.weight: param f32[20, 8],
):
    %0: f32[2, 4] = aten.linear(x, enter.weight, enter.bias)
    %1: f32[2, 4] = aten.tanh(%0)
    %2: f32[8, 4] = aten.detach(gate.weight)
    %3: f32[8, 4] = aten.abs(%2)
    %4: f32[] = aten.mean(%3)
    %5: f32[] = aten.clamp(%4, 1e-05)
    %6: f32[] = aten.reciprocal(%5)
    %7: i32[8, 1] = memeff.ternary_linear_pack(%2, %6)
    %8: f32[8, 4] = aten.detach(up.weight)
    %9: f32[8, 4] = aten.abs(%8)
    %10: f32[] = aten.mean(%9)
    %11: f32[] = aten.clamp(%10, 1e-05)
    %12: f32[] = aten.reciprocal(%11)
    %13: i32[8, 1] = memeff.ternary_linear_pack(%8, %12)
    %14: (f32[2, 8], f32[2, 8]) = memeff.ternary_linear(%1, [%7, %13], [%6, %12], [None, up.bias], f32)
    %15: f32[2, 8] = getitem(%14, 0)
    %16: f32[2, 8] = getitem(%14, 1)
    %17: f32[2, 8] = aten.relu(%15)
    %18: f32[2, 8] = aten.square(%17)
    %19: f32[2, 8] = aten.mul(%18, %16)
    %20: f32[20, 8] = aten.detach(down.weight)
    %21: f32[20, 8] = aten.abs(%20)
    %22: f32[] = aten.mean(%21)
    %23: f32[] = aten.clamp(%22, 1e-05)
    %24: f32[] = aten.reciprocal(%23)
    %25: i32[20, 1] = memeff.ternary_linear_pack(%20, %24)
    %26: (f32[2, 20]) = memeff.ternary_linear(%19, [%25], [%24], [None], f32)
    %27: f32[2, 20] = getitem(%26, 0)
    return (%27)""",
        )


def test_codes_and_packed_weights_are_what_is_kept_for_the_backward() -> None:
    """Two bits per weight and a byte per input; no dequantised copy of either."""
    model, x = Detached(64, 128, bias=False), torch.randn(40, 64)
    held: list[Tensor] = []
    function = compiled(model)
    function(x.requires_grad_()).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        function(x)
    own = {x.data_ptr(), model.weight.data_ptr()}
    kept = {t.data_ptr(): t.nbytes for t in held if t.data_ptr() not in own}
    expected = int(op_folder.saved_after(128, 64, 40)) + 4  # and the scale of the weight
    assert sum(kept.values()) == expected


class Gated(nn.Module):
    """The gated half of a block; each case uses gate and up differently."""

    def __init__(
        self,
        activated: Callable[[Tensor], Tensor] = lambda gate: F.relu(gate).square(),
        rest: Callable[[Tensor, Tensor], Tensor | float] = lambda gate, up: 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (
            Detached(*sizes) for sizes in ((64, 96), (64, 96), (96, 64))
        )
        self.activated, self.rest = activated, rest

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        out: Tensor = self.down(self.activated(gate) * up) + self.rest(gate, up)
        return out


def trained(model: nn.Module, **options: Any) -> tuple[int, list[Tensor]]:
    """Return the bytes kept for the backward, and result and gradients of a step."""
    twin, held = copy.deepcopy(model), []
    torch.manual_seed(1)
    x = torch.randn(40, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        out = compiled(twin, **AOT, **options)(x)
    out.square().sum().backward()
    own = {t.data_ptr() for t in (*twin.parameters(), x)}
    size = sum(t.nbytes for t in held if t.data_ptr() not in own)
    return size, [out.detach(), x.grad, *(p.grad for p in twin.parameters())]


@pytest.mark.parametrize(
    "activated",
    [lambda gate: F.relu(gate).square(), F.silu],
    ids=["squared relu", "silu"],
)
def test_gate_and_up_are_multiplied_again_in_the_backward(activated: Any) -> None:
    model = Gated(activated)
    size, found = trained(model)
    kept, wanted = trained(model, ternary_gate="keep")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert kept - size >= 2 * 40 * 96 * 4 - 40 * 4, "less is saved than gate and up take"


@pytest.mark.parametrize(
    "rest",
    [lambda gate, up: gate[:, :64].sin(), lambda gate, up: up.mean()],
    ids=["gate", "up"],
)
def test_what_is_read_elsewhere_is_not_multiplied_again(rest: Any) -> None:
    model = Gated(rest=rest)
    assert trained(model)[0] == trained(model, ternary_gate="keep")[0]


def test_the_gain_is_that_formula() -> None:
    compiled(Block(Detached))(torch.randn(6, 20)).sum().backward()
    both, down = records()
    assert both.sizes == {"N": 80, "K": 32, "M": 6}
    assert down.sizes == {"N": 20, "K": 40, "M": 6}
    assert both.bytes_after is not None
    numbers = {symbol: both.sizes[symbol.name] for symbol in both.bytes_after.free_symbols}
    assert both.bytes_after.subs(numbers) == op_folder.saved_after(80, 32, 6)
    assert "never allocated" in str(memeff_compile.last_report())


def test_a_checkpointed_block_fires_and_equals_eager() -> None:
    block = Block(Detached)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    assert_like_eager(Checkpointed(), torch.randn(3, 20), **AOT)
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]


def test_a_varying_number_of_tokens_compiles_once_and_equals_eager() -> None:
    model = Block(Detached)
    function = torch.compile(model, backend="memeff", options=OPTIONS, dynamic=True)
    for tokens in (3, 7, 12):
        x = torch.randn(tokens, 20)
        assert error(function(x).detach(), model(x).detach()) < 2e-6
    assert len(memeff_compile.last_report().graphs) == 1
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]


def test_autocast_multiplies_in_its_dtype() -> None:
    model = Block(Detached)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 20)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = model(x), compiled(twin, **AOT)(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert error(found.detach(), wanted.detach()) < 1e-2
    found.sum().backward()
    wanted.sum().backward()
    assert twin.down.weight.grad is not None
    assert error(twin.down.weight.grad, model.down.weight.grad) < 3e-2
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]


def test_a_rewritten_graph_is_left_alone_by_a_second_run() -> None:
    gm = capture(Block(Detached), torch.randn(2, 20))
    assert pipeline.run(gm, PASSES, Options()).changed
    assert not pipeline.run(gm, PASSES, Options()).changed


def test_off_and_skip_leave_linears_alone() -> None:
    x = torch.randn(2, 20)
    compiled(Block(Detached), ternary="off")(x)
    assert outcome() == []
    compiled(Block(Detached), skip={NAME: ["up"]})(x)
    assert sorted(outcome()) == [("rewrote", 1), ("rewrote", 1), ("skipped", 1)]


@pytest.mark.parametrize("layer", [Detached, WithoutGrad, ByFunction])
def test_twenty_steps_of_each_way_to_train_track_eager(layer: type[nn.Linear]) -> None:
    """Detached differences, rounding under no_grad, an autograd Function; clipped codes included."""
    x, target = torch.randn(24, 20), torch.randn(24, 20)
    eager = Block(layer)
    with torch.no_grad():
        eager.gate.weight[0] *= 30  # far beyond the last code
    ours = copy.deepcopy(eager)
    losses: list[list[float]] = []
    for model, call in ((eager, eager), (ours, compiled(ours))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(20):
            loss = (call(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[0][-1] < losses[0][0] - 0.1, "nothing was learned"
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-3
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]


@pytest.mark.slow
def test_twenty_steps_of_a_bitnet_model_track_eager() -> None:
    ids = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(0))

    def losses(model: nn.Module, call: Callable[..., Any]) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
        found = []
        for _ in range(20):
            loss = call(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    eager, ours = tiny_bitnet(), tiny_bitnet()
    with eagerly():
        wanted = losses(eager, eager)
    found = losses(ours, compiled(ours, **AOT))
    assert wanted[-1] < wanted[0] - 0.1, "nothing was learned"
    assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 1e-3
    # In both layers: q, k and v share their codes; o; gate and up share theirs; down.
    assert sorted(outcome()) == [("rewrote", n) for n in (2, 2, 4, 6)]


def test_packed_linears_of_one_input_become_one_call() -> None:
    model = memeff_compile.ternarize_(Block(nn.Linear))
    memeff_compile.pack_ternary_(model)
    x = torch.randn(3, 20)
    with torch.no_grad():
        wanted = model(x)
        assert torch.equal(compiled(model)(x), wanted)
    assert outcome() == [("rewrote", 2)]
    assert memeff_compile.graphs()[-1].after.count("memeff.ternary_linear(") == 3  # of 4


def half(x: Tensor, share: int = 2) -> Tensor:
    size = x.abs()
    return size >= size.topk(x.shape[-1] // share, dim=-1).values[..., -1:]


def halved_after(x: Tensor) -> Tensor:
    return tokens_int8(x) * half(x).to(x.dtype)


def halved_before(x: Tensor) -> Tensor:
    return tokens_int8(torch.where(half(x), x, 0.0))


def halved_wide(x: Tensor) -> Tensor:
    wide = x.float()
    return (tokens_int8(wide) * half(wide)).to(x.dtype)


def halved_by_least(x: Tensor) -> Tensor:
    """The least of the larger half, wherever it stands among them."""
    values = x.abs().topk(x.shape[-1] // 2, sorted=False).values
    return tokens_int8(x) * (x.abs() >= values.amin(-1, keepdim=True))


def half_in_any_order(x: Tensor) -> Tensor:
    return x.abs() >= x.abs().topk(x.shape[-1] // 2, sorted=False).values[..., -1:]


def halved_in_any_order(x: Tensor) -> Tensor:
    return tokens_int8(x) * half_in_any_order(x)


def halved_by_rounded(x: Tensor) -> Tensor:
    """Entries that are equal once rounded are kept together: another half."""
    return tokens_int8(x) * half(x.to(torch.bfloat16)).to(x.dtype)


HALVES = [halved_after, halved_before, halved_wide, halved_by_least]


@pytest.mark.parametrize("tokens", HALVES)
def test_tokens_of_which_the_larger_half_is_kept_are_read(tokens: Callable[..., Any]) -> None:
    layer = type("Halved", (Detached,), {"tokens": staticmethod(tokens)})
    assert_like_eager(Block(layer), torch.randn(3, 5, 20))
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]
    assert "top 50 %" in records()[0].sentence


def test_a_mask_with_a_gradient_of_its_own_stays_in_the_graph() -> None:
    class Masked(Detached):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.where(half(x), x, 0.0))

    assert_like_eager(Block(Masked), torch.randn(3, 20))
    assert sum(sites for code, sites in outcome() if code == "rewrote") == 3
    assert "INT8 absmax" in records()[0].sentence


@pytest.mark.parametrize("share", [4, 1])
def test_another_share_than_half_is_left_alone(share: int) -> None:
    def tokens(x: Tensor) -> Tensor:
        return tokens_int8(x) * half(x, share)

    compiled(Block(type("Less", (Detached,), {"tokens": staticmethod(tokens)})))(torch.randn(3, 20))
    assert not [code for code, _ in outcome() if code == "rewrote"]


@pytest.mark.parametrize("tokens", [halved_in_any_order, halved_by_rounded])
def test_a_half_of_another_order_or_of_rounded_values_is_left_alone(
    tokens: Callable[..., Any],
) -> None:
    layer = type("Other", (Detached,), {"tokens": staticmethod(tokens)})
    assert_like_eager(Block(layer), torch.randn(3, 5, 20))
    assert not [code for code, _ in outcome() if code == "rewrote"]


class Normed(nn.Module):
    """A norm, a squared-ReLU gate with a norm inside, and the residual, around packed linears."""

    def __init__(
        self, width: int = 32, inner: int = 48, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(20, width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.before, self.inside = (nn.Parameter(torch.rand(n) + 0.5) for n in (width, inner))
        self.eps = 1e-5
        self.to(dtype)
        memeff_compile.ternarize_(self, skip=["enter"])
        memeff_compile.pack_ternary_(self)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(x.dtype)

    def middle(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(self.gate(x))) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)) + 1
        inner = self.middle(self.norm(x, self.before))
        return x + self.down(self.norm(inner, self.inside))


def neighbours_of(model: nn.Module, x: Tensor, **settings: Any) -> list[set[str]]:
    """Compile for a GPU, compare with eager, and name the neighbours that each call includes."""
    function = torch.compile(model, backend="memeff", options=OPTIONS, **settings)
    with torch.no_grad(), planned_for(torch.device("cuda", 0)):
        found = function(x)
        with eagerly():
            torch.testing.assert_close(found, model(x), rtol=1e-6, atol=1e-6)
    calls = [
        line
        for line in memeff_compile.graphs()[-1].after.splitlines()
        if ".ternary_linear(" in line
    ]
    return [{name for name in ("up", "norm", "added") if f"{name}=" in call} for call in calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_norms_and_sums_join_the_calls_on_packed_weights(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20).to(dtype)
    assert neighbours_of(Normed(dtype=dtype), x) == [{"norm"}, {"up", "norm", "added"}]
    assert outcome() == [("rewrote", 2), ("rewrote", 1)]
    assert "gates, normalises, quantises the input and adds" in records()[1].sentence


def test_an_epsilon_that_is_a_symbol_joins_and_may_change() -> None:
    model, x = Normed(), torch.randn(3, 20)
    for eps in (1e-5, 0.5):
        model.eps = eps
        found = neighbours_of(model, x, dynamic=True)
        assert found == [{"norm"}, {"up", "norm", "added"}]


class Shown(Normed):
    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.enter(x)) + 1
        normed = self.norm(x, self.before)
        out = self.down(self.norm(self.middle(normed), self.inside))
        return x + out, normed, out * 2


class Written(Normed):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)) + 1
        normed = self.norm(x, self.before)
        x.mul_(2)
        inner = self.norm(self.middle(normed), self.inside)
        out = self.down(inner)
        x.add_(1)
        return x + out


class Otherwise(Normed):
    """Another norm, another gate, and something added twice or not in full."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + self.eps))

    def middle(self, x: Tensor) -> Tensor:
        return F.relu(self.gate(x)) ** 3 * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)) + 1
        inner = self.middle(self.norm(x, self.before))
        return torch.add(x, self.down(self.norm(inner, self.inside)), alpha=2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Shown, [set(), {"up", "norm"}]),  # also read elsewhere
        (Written, [set(), {"up", "norm"}]),
        (Otherwise, [set(), set()]),
    ],
)
def test_neighbours_that_do_not_fit_stay_where_they_are(
    kind: type[Normed], expected: list[set[str]]
) -> None:
    assert neighbours_of(kind(), torch.randn(3, 20)) == expected


class Rounded(Normed):
    """The norm's result is rounded to a narrower dtype than its input, before the weight's
    product.
    """

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(torch.bfloat16)


class RoundedBefore(Normed):
    """The product's operand is rounded; the root is computed from the unrounded tensor."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * (x.to(torch.bfloat16) * root)


@pytest.mark.parametrize("kind", [Rounded, RoundedBefore])
def test_a_norm_that_rounds_on_its_way_stays_where_it_is(kind: type[Normed]) -> None:
    found = neighbours_of(kind(), torch.randn(3, 20))
    assert not any("norm" in names for names in found)


class Between(Normed):
    def middle(self, x: Tensor) -> Tensor:
        x = x + 1
        gate = F.relu(self.gate(x))
        x.mul_(2)
        return gate * self.up(x)


def test_a_write_between_two_packed_linears_keeps_them_apart() -> None:
    assert neighbours_of(Between(), torch.randn(3, 20)) == [set(), set(), {"norm", "added"}]


def test_without_a_kernel_neighbours_stay_with_the_compiler() -> None:
    with torch.no_grad():
        compiled(Normed())(torch.randn(3, 20))
    assert "norm=" not in memeff_compile.graphs()[-1].after


class Adjustable(Detached):
    """An epsilon that is an attribute: a symbol where everything is dynamic."""

    eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        scale = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=self.eps)
        quantized = (x * scale).round().clamp(-128, 127) / scale
        w = self.weight
        return F.linear(x + (quantized - x).detach(), w + (self.weights(w) - w).detach(), self.bias)


def test_an_epsilon_that_is_a_symbol_is_read_and_compiled_anew_when_it_changes() -> None:
    layer, x = Adjustable(20, 8), torch.randn(3, 20)
    function = torch.compile(layer, backend="memeff", options=OPTIONS, dynamic=True)
    for eps in (1e-5, 4.0):
        layer.eps = eps
        assert error(function(x).detach(), layer(x).detach()) < 2e-6
        assert outcome()[-1] == ("rewrote", 1)


def test_a_write_between_two_linears_keeps_them_apart() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        x = x * 1
        first = linear_of()(x, w)
        x.add_(1)
        return first + linear_of()(x, w)

    x, w = torch.randn(4, 32), torch.randn(8, 32, requires_grad=True)
    assert error(compiled(function)(x, w).detach(), function(x, w).detach()) < 2e-6
    assert outcome() == [("rewrote", 2)] or outcome() == [("rewrote", 1), ("rewrote", 1)]


def test_tokens_quantised_once_by_hand_serve_all_their_linears() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        q = x + (tokens_int8(x) - x).detach()
        first, second = w[:4], w[4:]
        out = F.linear(q, first + (weights(first) - first).detach())
        return out + F.linear(q, second + (weights(second) - second).detach())

    x, w = data()
    assert error(compiled(function)(x, w).detach(), function(x, w).detach()) < 2e-6
    assert outcome() == [("rewrote", 2)]
    assert "round" not in memeff_compile.graphs()[-1].after


# --- declines -------------------------------------------------------------------------------------


def linear_of(
    tokens: Callable[[Tensor], Tensor] = tokens_int8,
    weight: Callable[[Tensor], Tensor] = weights,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a linear with detached estimators around two quantisers."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x + (tokens(x) - x).detach(), w + (weight(w) - w).detach())

    return function


def binary(w: Tensor) -> Tensor:
    return (w - w.mean()).sign() * w.abs().mean()


def per_channel(w: Tensor) -> Tensor:
    scale = 1.0 / w.abs().mean(dim=-1, keepdim=True).clamp(min=1e-5)
    return (w * scale).round().clamp(-1, 1) / scale


def five_levels(w: Tensor) -> Tensor:
    scale = 1.0 / w.abs().mean().clamp(min=1e-5)
    return (w * scale).round().clamp(-2, 2) / scale


def four_bits_by_maximum(x: Tensor) -> Tensor:
    scale = 7.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-8, 7) / scale


def whole_tensor(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().max().clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def other_axis(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().amax(0, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def scale_of_a_sum(x: Tensor) -> Tensor:
    scale = 127.0 / (x + 1).abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def unbounded(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().amax(-1, keepdim=True)
    return (x * scale).round().clamp(-128, 127) / scale


def scaled_back_otherwise(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / (scale + 1)


def to_tenths(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round(decimals=1).clamp(-128, 127) / scale


def first_row(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().amax(-1, keepdim=True)[0].clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def wrapping(x: Tensor) -> Tensor:
    scale = 255.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().to(torch.int8).clamp(-128, 127) / scale


def truncated(x: Tensor) -> Tensor:
    return tokens_int8(x).to(torch.int8).to(x.dtype)


def narrowed_inside(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).clamp(-128, 127).to(torch.bfloat16).round().float() / scale


def rounded_step(x: Tensor) -> Tensor:
    step = torch.div(
        x.abs().amax(-1, keepdim=True).clamp(min=1e-5) * 500, 127, rounding_mode="trunc"
    )
    return (x / step).round().clamp(-128, 127) * step


NEAR_MISSES = {
    "chain_form, a cast before rounding": linear_of(narrowed_inside),
    "chain_form, a division that rounds": linear_of(rounded_step),
    "learned_scale, of one row": linear_of(first_row),
    "chain_form, wraps": linear_of(wrapping),
    "chain_form, truncates": linear_of(truncated),
    "binary_weight": linear_of(weight=binary),
    "per_channel_scale": linear_of(weight=per_channel),
    "unknown_range": linear_of(weight=five_levels),
    "unknown_range, tokens": linear_of(four_bits_by_maximum),
    "other_axis, one scale": linear_of(whole_tensor),
    "other_axis": linear_of(other_axis),
    "other_source": linear_of(scale_of_a_sum),
    "learned_scale": linear_of(unbounded),
    "scale_form": linear_of(scaled_back_otherwise),
    "chain_form": linear_of(to_tenths),
}


@pytest.mark.parametrize("case", list(NEAR_MISSES))
def test_a_near_miss_is_left_alone_with_its_reason(case: str) -> None:
    function = NEAR_MISSES[case]
    x, w = torch.randn(4, 32), torch.randn(8, 32, requires_grad=True)
    found = compiled(function)(x, w)
    assert torch.equal(found, function(x, w))
    assert outcome() == [(case.split(",")[0], 1)]
    assert records()[0].sentence


def declined(function: Callable[..., Any], *inputs: Tensor) -> Record:
    """Run, compare with eager, and return the one record, a decline."""
    found = compiled(function)(*inputs)
    assert torch.equal(found, function(*inputs))
    (record,) = records()
    assert record.action == "declined"
    return record


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)


def test_a_learned_scale_is_declined() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        q = (w * scale).round().clamp(-1, 1) / scale
        return F.linear(x + (tokens_int8(x) - x).detach(), w + (q - w).detach())

    record = declined(function, *data(), torch.tensor(3.0, requires_grad=True))
    assert record.code == "learned_scale"


def test_training_without_an_estimator_is_declined() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(tokens_int8(x), w + (weights(w) - w).detach())

    assert declined(function, *data()).code == "no_straight_through"


def test_an_estimator_that_adds_back_something_else_is_declined() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        return F.linear(y + (tokens_int8(x) - y).detach(), w + (weights(w) - w).detach())

    assert declined(function, *data()).code == "other_source"


def test_a_backward_that_masks_is_declined() -> None:
    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return tokens_int8(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(Masked.apply(x), w + (weights(w) - w).detach())

    assert declined(function, *data()).code == "backward_form"


def test_a_function_that_saves_tensors_is_declined() -> None:
    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return tokens_int8(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < 1)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(Saving.apply(x), w + (weights(w) - w).detach())

    assert declined(function, *data()).code in ("autograd_function", "backward_form")


def test_a_value_of_the_chain_that_is_used_elsewhere_is_declined() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        scale = 127.0 / largest.clamp(min=1e-5)
        q = (x * scale).round().clamp(-128, 127) / scale
        out = F.linear(x + (q - x).detach(), w + (weights(w) - w).detach())
        return out + largest

    assert declined(function, *data()).code == "chain_reused(add)"


def test_a_write_to_an_operand_is_declined() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        x = x * 1
        q = x + (tokens_int8(x) - x).detach()
        x.add_(1)
        return F.linear(q, w + (weights(w) - w).detach())

    assert declined(function, *data()).code == "mutated"


def halved(q: Tensor, w: Tensor) -> None:
    q.mul_(0.5)


def halved_through_a_view(q: Tensor, w: Tensor) -> None:
    q.view(-1).mul_(0.5)


def pruned(q: Tensor, w: Tensor) -> None:
    w[:, :8] = 0


@pytest.mark.parametrize("write", [halved, halved_through_a_view, pruned])
def test_a_write_to_what_was_quantised_is_declined(write: Callable[..., None]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        q = x + (tokens_int8(x) - x).detach()
        r = w + (weights(w) - w).detach()
        write(q, r)
        return F.linear(q, r)

    assert declined(function, *data()).code == "mutated"


def test_a_chain_in_two_dtypes_is_not_read() -> None:
    """On a GPU autocast takes reciprocals in float32, so that a bf16 token gets such a scale."""
    gm = capture(linear_of(), *(t.bfloat16() for t in data()))
    (linear,) = (n for n in gm.graph.nodes if "linear" in str(n.target))
    tokens = linear.args[0]
    assert isinstance(read_quantized(tokens), Quantized)
    for node in gm.graph.nodes:
        call = read(node)
        if call and call[0].op is torch.ops.aten.reciprocal.default:
            node.meta["example_value"] = node.meta["example_value"].float()
    found = read_quantized(tokens)
    assert isinstance(found, Unread)
    assert (found.code, "bfloat16 and float32" in found.sentence) == ("chain_form", True)


def test_what_is_cut_off_from_its_gradient_stays_so() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = w + (weights(w) - w)
        return F.linear(x + (tokens_int8(x) - x).detach(), frozen)

    x, w = data()
    assert declined(function, x, w).code == "no_straight_through"
    compiled(function)(x, w).sum().backward()
    assert w.grad is None


def test_tokens_that_a_cast_rounds_first_are_quantised_after_it() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(tokens_int8(x.bfloat16().float()), w + (weights(w) - w).detach())

    x, w = torch.randn(4, 32), torch.randn(8, 32, requires_grad=True)
    torch.testing.assert_close(compiled(function)(x, w), function(x, w), rtol=2e-6, atol=2e-6)


def test_float64_is_declined() -> None:
    x, w = (t.detach().double().requires_grad_() for t in data())
    assert declined(linear_of(), x, w).code == "unsupported"


def test_inference_without_a_kernel_is_declined_with_the_way_out() -> None:
    with torch.no_grad():
        record = declined(linear_of(), *data())
    assert record.code == "no_gain"
    assert "pack_ternary_" in record.hint


def test_a_weight_of_unknown_values_is_declined_with_the_way_out() -> None:
    """transformers' offline mode: at compile time it is unknown that the weight is ternary."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(tokens_int8(x), w) * 0.5

    with torch.no_grad():
        record = declined(function, *data())
    assert record.code == "weight_values"
    assert "pack_ternary_" in record.hint


def test_codes_that_meet_an_unpacked_weight_are_declined_with_the_way_out() -> None:
    """transformers' packed layer: integers times integers, scaled after the linear."""

    def function(x: Tensor, packed: Tensor) -> Tensor:
        scale = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
        codes = (x * scale).round().clamp(-128, 127).to(torch.int8)
        w = torch.cat([packed >> 2 * i & 3 for i in range(4)]).to(x.dtype) - 1
        return F.linear(codes.to(x.dtype), w) / scale

    with torch.no_grad():
        record = declined(function, data()[0], torch.randint(0, 86, (2, 32), dtype=torch.uint8))
    assert record.code == "weight_values"
    assert "pack_ternary_" in record.hint


def test_a_weight_quantised_like_tokens_is_declined() -> None:
    assert declined(linear_of(weight=tokens_int8), *data()).code == "operands"


def test_a_subclass_is_declined() -> None:
    gm = capture(linear_of(), *data())
    values = {n: n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"}
    weight = next(n for n, value in values.items() if value.shape[0] == 8)

    class Piece(Tensor):
        pass

    weight.meta["example_value"] = torch.randn(8, 32).as_subclass(Piece)
    (record,) = [
        r for r in pipeline.run(gm, PASSES, Options()).report.records if r.pass_name == NAME
    ]
    assert record.code == "subclass_weight(Piece)"


def test_layers_that_round_for_other_reasons_are_no_concern() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear((x * 8).round() / 8, w)

    compiled(function)(*data())
    assert outcome() == []
