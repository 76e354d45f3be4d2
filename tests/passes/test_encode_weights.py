"""encode_weights: rewrites, declines, and that no decoded weight is kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels.coded_weight import CODECS, CodedWeight, encode, op
from memeff_compile.report import Record
from tests.support.closeness import needs_compiler
from tests.support.hostile_weights import normal

NAME = "encode_weights"
ROOT = Path(__file__).resolve().parents[2]


def coded(rows: int, columns: int, codec: str = "win4", *, seed: int = 0) -> nn.Parameter:
    weight = normal(rows, columns, seed=seed)
    return nn.Parameter(CodedWeight(encode(weight, codec), codec, weight.shape))


def dense(weight: nn.Parameter) -> nn.Parameter:
    assert isinstance(weight, CodedWeight)
    return nn.Parameter(weight.decode())


class Block(nn.Module):
    """Two linears, the first with a bias."""

    def __init__(self, make: Callable[[nn.Parameter], nn.Parameter], codec: str = "win4") -> None:
        super().__init__()
        self.up = make(coded(48, 256, codec))
        self.bias = nn.Parameter(normal(48, seed=1))
        self.down = make(coded(256, 48, codec, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.up, self.bias)), self.down)


class Checkpointed(Block):
    """The same in an activation checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found


def run(module: nn.Module, x: Tensor, *, compiled: bool, **options: Any) -> list[Tensor | None]:
    """Return the result and all gradients."""
    torch._dynamo.reset()
    memeff_compile.reset()
    settings = {"memeff.inner": "aot_eager", **options}
    function = torch.compile(module, backend="memeff", options=settings) if compiled else module
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = function(x)
    out.float().square().sum().backward()
    return [out, x.grad, *(p.grad for p in module.parameters())]


def records() -> list[Record]:
    return [r for r in memeff_compile.last_report().records if r.pass_name == NAME]


def actions() -> list[tuple[str, str, int]]:
    return [(r.action, r.code, r.sites) for r in records()]


def same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("kind", [Block, Checkpointed])
@pytest.mark.parametrize("codec", CODECS)
def test_linears_are_rewritten_and_equal_the_dense_model(kind: type[Block], codec: str) -> None:
    x = normal(2, 3, 256, seed=5)
    expected = run(kind(dense, codec), x, compiled=False)
    found = run(kind(lambda w: w, codec), x, compiled=True)
    assert same(found, expected)
    assert actions() == [("rewrote", "rewrote", 1)] * 2


def test_what_is_kept_for_the_backward_is_the_code() -> None:
    x = normal(4, 256, seed=5)
    for module, is_kept in ((Block(lambda w: w), False), (Block(dense), True)):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t,  # type: ignore[misc]
            lambda t: t,
        ):
            run(module, x, compiled=True)
        kept = [t for t in saved if t.dtype == torch.bfloat16 and t.numel() == 48 * 256]
        assert bool([t for t in kept if not isinstance(t, CodedWeight)]) is is_kept


class Branches(nn.Module):
    """Linears of one input, as those of queries, keys and values."""

    def __init__(self, make: Callable[[nn.Parameter], nn.Parameter], *codecs: str) -> None:
        super().__init__()
        coded_ones = (coded(16 + 8 * n, 256, c, seed=n) for n, c in enumerate(codecs))
        self.weights = nn.ParameterList(make(each) for each in coded_ones)
        self.bias = nn.Parameter(normal(24, seed=9))

    def forward(self, x: Tensor) -> list[Tensor]:
        biases = [self.bias if w.shape[0] == 24 else None for w in self.weights]
        return [F.linear(x, w, b) for w, b in zip(self.weights, biases, strict=True)]


class WrittenBetween(Branches):
    """The input changes between two of them."""

    def forward(self, x: Tensor) -> list[Tensor]:
        y = x + 1
        first = F.linear(y, self.weights[0])
        y.mul_(2)
        return [first, F.linear(y, self.weights[1])]


class Adapted(Branches):
    """Low-rank adapters next to the linears."""

    def forward(self, x: Tensor) -> list[Tensor]:
        added = (x[..., :4] @ x.new_ones(4, 1)).expand(*x.shape[:-1], 16)
        return [F.linear(x, self.weights[0]) + added, F.linear(x, self.weights[1])]


def inferred(module: nn.Module, x: Tensor, *, compiled: bool, **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    memeff_compile.reset()
    settings = {"memeff.inner": "eager", **options}
    function = torch.compile(module, backend="memeff", options=settings) if compiled else module
    with torch.no_grad():
        found: list[Tensor] = function(x)
    return found


TOGETHER = {
    "three": (Branches, ("win4",) * 3, [3]),
    "two": (Branches, ("win4",) * 2, [2]),
    "four": (Branches, ("win4",) * 4, [3, 1]),
    "with adapters": (Adapted, ("win4",) * 2, [2]),
    "another codec": (Branches, ("win4", "tier"), [1, 1]),
    "not while decoding": (Branches, ("tier", "tier"), [1, 1]),
    "lossy": (Branches, ("win4:k3:b32", "win4:k3:b32"), [2]),
    "lossy and lossless": (Branches, ("win4:k3:b32", "win4"), [1, 1]),
    "lossy, not while decoding": (Branches, ("tier:k1:b32", "tier:k1:b32"), [1, 1]),
    "written between": (WrittenBetween, ("win4", "win4"), [1, 1]),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_linears_of_one_input_are_one_op_where_nothing_is_trained(case: str) -> None:
    kind, codecs, counts = TOGETHER[case]
    for x in (normal(1, 1, 256, seed=5), normal(2, 3, 256, seed=5))[: 2 if case == "three" else 1]:
        expected = inferred(kind(dense, *codecs), x, compiled=False)
        found = inferred(kind(lambda w: w, *codecs), x, compiled=True)
        assert same(list(found), list(expected))
    after = memeff_compile.graphs()[0].after
    ops = [line.count("coded_weight_linear(") for line in after.splitlines()]
    assert sum(ops) == counts.count(1)
    assert ("coded_weight_linears" in after) is (max(counts) > 1)
    assert sum(r.sites for r in records()) == sum(counts)
    apart = [r for r in records() if "apart from another linear" in r.sentence]
    assert bool(apart) is (len(counts) > 1)


def test_linears_that_are_trained_stay_apart_and_the_report_says_why() -> None:
    x = normal(2, 256)
    for module in (Branches(lambda w: w, "win4", "win4"),):
        torch._dynamo.reset()
        torch.compile(module, backend="memeff", options={"memeff.inner": "aot_eager"})(x)
    assert "they are trained" in records()[-1].sentence


def test_a_skipped_linear_is_not_taken_along() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(256, 128, bias=False).bfloat16() for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.a(x), self.b(x), self.c(x)]

    model = Model()
    memeff_compile.compress_(model, min_size=0, progress=False)
    x = normal(1, 256)
    expected = inferred(model, x, compiled=False)
    found = inferred(model, x, compiled=True, **{"memeff.skip": "a"})
    assert same(list(found), list(expected))
    assert sum(r.sites for r in records() if r.action == "rewrote") == 2


def test_off_leaves_the_graph_alone_and_right() -> None:
    x = normal(4, 256, seed=5)
    expected = run(Block(dense), x, compiled=False)
    assert same(run(Block(lambda w: w), x, compiled=True, **{"memeff.weights": "off"}), expected)
    assert records() == []


def test_a_dense_model_is_left_alone_without_a_word() -> None:
    run(Block(dense), normal(4, 256), compiled=True)
    assert records() == []


def test_alike_layers_are_one_record() -> None:
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3))).bfloat16()
    memeff_compile.compress_(module, min_size=0, progress=False)
    run(module, normal(4, 128), compiled=True)
    assert sum(r.sites for r in records()) == 3
    assert "32.0 KiB of decoded weight" in records()[0].sentence
    assert "coded as win4" in records()[0].sentence


def test_inference_says_nothing_of_a_backward() -> None:
    module = Block(lambda w: w)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(module, backend="memeff", options={"memeff.inner": "aot_eager"})
        x = normal(4, 256)
        assert torch.equal(compiled(x), module(x))
    assert actions() == [("rewrote", "rewrote", 2)]  # without sizes both say the same
    assert "backward" not in records()[0].sentence


def test_a_new_value_is_used_without_compiling_again() -> None:
    module = Block(lambda w: w)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="memeff", options={"memeff.inner": "aot_eager"})
    x = normal(4, 256)
    compiled(x)
    assert isinstance(module.up, CodedWeight)
    module.up.store(normal(48, 256, seed=9))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x), module(x))


def test_dynamic_batches_compile_once() -> None:
    module = Block(lambda w: w)
    torch._dynamo.reset()
    options = {"memeff.inner": "aot_eager"}
    compiled = torch.compile(module, backend="memeff", options=options, dynamic=True)
    compiled(normal(3, 256))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (5, 9):
            assert torch.equal(compiled(normal(count, 256)), module(normal(count, 256)))
    assert [r.action for r in records()] == ["rewrote"] * 2


def test_autocast_to_bf16_is_served() -> None:
    module = Block(lambda w: w)
    x = torch.randn(4, 256)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(module, x, compiled=True)
        assert [r.action for r in records()] == ["rewrote"] * 2
        expected = run(module, x, compiled=False)
    assert same(found, expected)


class Product(Block):
    """A product by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up.t()


class Scaled(Block):
    """A linear of a scaled weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.up * 2)


@pytest.mark.parametrize(("kind", "reader"), [(Product, "t"), (Scaled, "mul")])
def test_another_reader_of_the_weight_is_declined_and_right(kind: type[Block], reader: str) -> None:
    x = normal(4, 256, seed=5)
    expected = run(kind(dense), x, compiled=False)
    found = run(kind(lambda w: w), x, compiled=True)
    assert torch.equal(found[0], expected[0])  # type: ignore[arg-type]
    assert actions() == [("declined", "not_a_linear", 1)]
    assert f"`{reader}`" in records()[0].sentence
    assert "skip" in records()[0].hint


def test_a_loss_of_a_part_of_a_coded_head_says_which_weight_to_leave_dense() -> None:
    head, x = coded(256, 32), normal(8, 32)

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, head[:200]).float(), torch.arange(8))

    options = {"memeff.inner": "aot_eager"}
    memeff_compile.reset()
    assert torch.equal(torch.compile(loss, backend="memeff", options=options)(x), loss(x))
    of_loss, of_weight = memeff_compile.last_report().records
    assert of_loss.code == "subclass_weight(CodedWeightView)"
    assert "head weight comes as a CodedWeightView" in of_loss.sentence
    assert of_weight.code == "not_a_linear"
    assert all("skip" in r.hint and "compress_" in r.hint for r in (of_loss, of_weight))


def test_flops_are_counted_with_the_formula_of_the_docs() -> None:
    page = (ROOT / "docs/passes/encode-weights.md").read_text()
    (code,) = re.findall(r"```python\n(from torch.utils.flop_counter.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {"torch": torch, "model": bool, "ids": 0}
    exec(code, found)
    x = normal(2, 6, 256).requires_grad_()
    counts = []
    for make in (lambda weight: weight, dense):
        with found["FlopCounterMode"](display=False, custom_mapping=found["FORMULAS"]) as counter:
            Block(make)(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [counts[0]] * 2


def test_autocast_to_another_dtype_is_declined_and_right() -> None:
    module = Block(lambda w: w)
    torch._dynamo.reset()
    x = torch.randn(4, 256)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        compiled = torch.compile(module, backend="memeff", options={"memeff.inner": "aot_eager"})
        assert torch.equal(compiled(x), module(x))
    assert {r.code for r in records()} == {"other_dtype(float16)"}


def test_a_subclass_beside_the_weight_is_declined() -> None:
    class Both(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.up, self.down.t())

    torch._dynamo.reset()
    module = Both(lambda w: w)
    with torch.no_grad():
        compiled = torch.compile(module, backend="memeff", options={"memeff.inner": "aot_eager"})
        assert torch.equal(compiled(normal(1)), module(normal(1)))
    assert {r.action for r in records()} == {"declined"}


def test_skip_leaves_a_module_alone() -> None:
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2))).bfloat16()
    memeff_compile.compress_(module, min_size=0, progress=False)
    run(module, normal(4, 128), compiled=True, **{"memeff.skip": {NAME: ["1"]}})
    assert sorted(r.code for r in records()) == ["rewrote", "skipped"]


def test_strict_raises_for_a_reader_that_is_not_a_linear() -> None:
    with pytest.raises(Exception, match="not_a_linear"):
        run(Product(lambda w: w), normal(4, 256), compiled=True, **{"memeff.strict": NAME})
    run(Block(dense), normal(4, 256), compiled=True, **{"memeff.strict": NAME})


@needs_compiler
@pytest.mark.slow
def test_inductor_runs_it_and_equals_eager() -> None:
    x = normal(4, 256, seed=5)
    expected = run(Block(dense), x, compiled=False)
    found = run(Block(lambda w: w), x, compiled=True, **{"memeff.inner": "inductor"})
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_the_op_knows_whether_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def fuses(*args: Any, trains: bool) -> bool:
        seen.append(trains)
        return False

    block = Block(lambda weight: weight)
    monkeypatch.setattr(op, "_uses_kernels", lambda tensor: tensor.dtype == torch.bfloat16)
    monkeypatch.setattr(op.codecs, "fuses", fuses)
    for grad in (True, False):
        torch._dynamo.reset()
        settings = {"memeff.inner": "aot_eager"}
        function = torch.compile(block, backend="memeff", options=settings)
        with torch.set_grad_enabled(grad):
            function(normal(3, 256))
    assert seen == [False, False]  # weights that train have the dense layer's products


@needs_compiler
def test_a_bias_that_inductor_takes_out_of_a_product_is_taken_out_here_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU it may do so before pointwise ops, which then read an unrounded sum."""
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    monkeypatch.setattr(post_grad, "is_gpu", lambda kind: True)
    takes_out = hasattr(config, "keep_addmm_fused_for_half_dtypes")  # releases without never do
    if takes_out:
        monkeypatch.setattr(config, "keep_addmm_fused_for_half_dtypes", False)
    x, inner = normal(6, 256, seed=3).view(2, 3, 256), {"memeff.inner": "inductor"}
    expected = run(Checkpointed(dense), x, compiled=True, **inner)
    found = run(Checkpointed(lambda weight: weight), x, compiled=True, **inner)
    assert same(found, expected)
    assert same(expected, run(Checkpointed(dense), x, compiled=False)) != takes_out


class Gated(nn.Module):
    """A gated MLP in a checkpoint."""

    def __init__(self, make: Callable[[nn.Parameter], nn.Parameter], codec: str) -> None:
        super().__init__()
        self.gate, self.up = (make(coded(96, 48, codec, seed=seed)) for seed in (0, 1))
        self.down = make(coded(48, 96, codec, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)

        found = checkpoint(body, x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_gate_of_coded_linears_in_a_checkpoint_has_the_bits_of_a_dense_one(
    codec: str, inner: str
) -> None:
    x = normal(6, 48, seed=3)
    expected = run(Gated(dense, codec), x, compiled=True, **{"memeff.inner": inner})
    found = run(Gated(lambda weight: weight, codec), x, compiled=True, **{"memeff.inner": inner})
    assert same(found, expected)
    assert actions() == [("rewrote", "rewrote", 1)] * 2  # gate and up
    others = [r.pass_name for r in memeff_compile.last_report().records if r.pass_name != NAME]
    assert others == ["fuse_gated_linear"]


@needs_compiler
def test_a_gate_of_coded_linears_keeps_nothing_decoded_and_decodes_once_for_the_backward() -> None:
    from torch._inductor.utils import run_and_get_code

    model, x = Gated(lambda weight: weight, "win4"), normal(6, 48, seed=3).requires_grad_()
    torch._dynamo.reset()
    function = torch.compile(model, backend="memeff")
    _, (forward, backward) = run_and_get_code(lambda: function(x).float().sum().backward())
    decodes = "torch.ops.memeff.coded_weight_decode.default.direct("
    # After the gate once; before it once to recompute, and once for the gradient.
    assert (forward.count(decodes), backward.count(decodes)) == (3, 1 + 2 * 2)
    returned = forward[forward.rindex("return (") :]
    made = [line.split("=")[0].strip() for line in forward.splitlines() if decodes in line]
    assert not any(name in returned for name in made)
