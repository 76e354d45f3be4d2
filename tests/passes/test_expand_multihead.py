"""expand_multihead: rewrites of nn.MultiheadAttention's node, declines, eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels.device import planned_for
from memeff_compile.report import Record
from tests.support.captured_graphs import compare_with_eager

NAME = "expand_multihead"
B, L, S, E, H = 2, 6, 5, 16, 4
FIRED = [("rewrote", "rewrote")]


def module(**settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    settings = {"batch_first": True, "dtype": torch.float64, **settings}
    made = nn.MultiheadAttention(E, H, **settings)
    for parameter in made.parameters():  # biases start at zero, where a mistake would not show
        nn.init.normal_(parameter, std=0.3)
    return made


def tokens(length: int = L, seed: int = 1, batch: int = B, size: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, size) if batch else (length, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def records(report: memeff_compile.Report) -> list[Record]:
    return [r for r in report.records if r.pass_name == NAME]


def run(function: Callable[..., Any], *inputs: Any, **settings: Any) -> list[tuple[str, str]]:
    """Compare with eager, values and gradients; return the pass's records."""
    report = compare_with_eager(function, *inputs, rtol=1e-9, atol=1e-9, **settings).report
    return [(r.action, r.code) for r in records(report)]


def run_module(made: nn.Module, *inputs: Any, **given: Any) -> list[tuple[str, str]]:
    """Run the module's output alone, its parameters' gradients compared with the inputs'."""
    names = [name for name, _ in made.named_parameters()]

    def function(*args: Tensor) -> Any:
        own = dict(zip(names, args[len(inputs) :], strict=True))
        return torch.func.functional_call(made, own, args[: len(inputs)], given)[0]

    parameters = [p.detach().requires_grad_() for p in made.parameters()]
    return run(function, *inputs, *parameters)


def after() -> str:
    return memeff_compile.graphs()[-1].after


def sentence() -> str:
    (record,) = records(memeff_compile.last_report())
    return record.sentence


# --- unread weights -------------------------------------------------------------------------------

SPELLINGS: dict[str, tuple[dict[str, Any], Callable[[], tuple[Tensor, ...]]]] = {
    "self, batch first": ({}, lambda: (tokens(),) * 3),
    "self, length first": ({"batch_first": False}, lambda: (tokens(),) * 3),
    "cross": ({}, lambda: (tokens(), *(tokens(S, 2),) * 2)),
    "cross, length first": (
        {"batch_first": False},
        lambda: (tokens(batch=L, length=B), *(tokens(batch=S, length=B, seed=2),) * 2),
    ),
    "three operands": ({}, lambda: (tokens(), tokens(S, 2), tokens(S, 3))),
    "without bias": ({"bias": False}, lambda: (tokens(),) * 3),
    "sizes of their own": (
        {"kdim": 3, "vdim": 7},
        lambda: (tokens(), tokens(S, 2, size=3), tokens(S, 3, size=7)),
    ),
    "sizes of their own, without bias": (
        {"kdim": 3, "vdim": 7, "bias": False},
        lambda: (tokens(), tokens(S, 2, size=3), tokens(S, 3, size=7)),
    ),
    "without a batch": ({}, lambda: (tokens(batch=0), *(tokens(S, 2, batch=0),) * 2)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_unread_weights_are_not_built(name: str) -> None:
    settings, operands = SPELLINGS[name]
    made, inputs = module(**settings), operands()

    # One tensor in several places has to stay one: the module looks for it.
    distinct = list(dict.fromkeys(inputs))
    places = [next(i for i, d in enumerate(distinct) if d is x) for x in inputs]

    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = made

        def forward(self, *given: Tensor) -> Any:
            return self.attention(*(given[place] for place in places))

    assert run_module(Output(), *distinct) == FIRED
    assert "multi_head_attention_forward" not in after()
    assert "softmax" not in after()
    assert "are not built" in sentence()


def test_weights_that_are_read_decline() -> None:
    made = module()

    def both(x: Tensor) -> Any:
        return made(x, x, x)

    def mean(x: Tensor) -> Any:
        out, weights = made(x, x, x)
        return out * weights.mean()

    assert run(both, tokens()) == [("declined", "weights_used(output)")]
    assert run(mean, tokens()) == [("declined", "weights_used(mean)")]
    assert after() == memeff_compile.graphs()[-1].before


def test_what_pytorch_does_well_is_left_without_a_record() -> None:
    made, hinted = module(), causal()

    def plain(x: Tensor) -> Tensor:
        return made(x, x, x, need_weights=False)[0]

    def by_hint(x: Tensor) -> Tensor:
        return made(x, x, x, need_weights=False, attn_mask=hinted, is_causal=True)[0]

    def padded(x: Tensor, taken: Tensor) -> Tensor:
        return made(x, x, x, need_weights=False, key_padding_mask=taken)[0]

    assert run(plain, tokens()) == []
    assert run(by_hint, tokens()) == []
    assert run(padded, tokens(), PADDING) == []
    assert "multi_head_attention_forward" in after()


# --- masks ----------------------------------------------------------------------------------------


def causal() -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).triu(1)


def causal_numbers() -> Tensor:
    return torch.full((L, L), float("-inf"), dtype=torch.float64).triu(1)


PADDING = torch.zeros(B, L, dtype=torch.bool)
PADDING[0, 4:] = True
EMPTY = PADDING.clone()
EMPTY[1] = True
NUMBERS = torch.linspace(-2, 1, L * L, dtype=torch.float64).view(L, L)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("make", [causal, causal_numbers])
def test_a_causal_mask_becomes_is_causal(make: Callable[[], Tensor], need_weights: bool) -> None:
    made = module()

    def attend(x: Tensor) -> Tensor:
        return made(x, x, x, attn_mask=make(), need_weights=need_weights)[0]

    assert run(attend, tokens()) == FIRED
    assert "is_causal=True" in after()
    assert "triu" not in after()
    assert "masked_fill" not in after()


MASKS: dict[str, dict[str, Tensor]] = {
    "padding": {"key_padding_mask": PADDING},
    "padding by numbers": {"key_padding_mask": torch.zeros(B, L).double().masked_fill(PADDING, -9)},
    "nobody left": {"key_padding_mask": EMPTY},
    "numbers": {"attn_mask": NUMBERS},
    "one per head": {"attn_mask": NUMBERS.expand(B * H, L, L) * 0.5},
    "from outside": {"attn_mask": causal()},
    "from outside, a row of nothing": {"attn_mask": causal() | (torch.arange(L) == 2)[:, None]},
    "both": {"attn_mask": causal(), "key_padding_mask": PADDING},
    "both, nobody left": {"attn_mask": causal(), "key_padding_mask": EMPTY},
    "numbers and padding": {
        "attn_mask": NUMBERS,
        "key_padding_mask": torch.zeros(B, L).double().masked_fill(EMPTY, float("-inf")),
    },
    "one per head and padding": {
        "attn_mask": causal().expand(B * H, L, L),
        "key_padding_mask": PADDING,
    },
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_unknown_values_give_the_same_and_nan_where_nothing_is_left(name: str) -> None:
    made, given = module(), MASKS[name]

    def attend(x: Tensor, *masks: Tensor) -> Tensor:
        return made(x, x, x, **dict(zip(given, masks, strict=True)))[0]

    assert run(attend, tokens(), *given.values()) == FIRED
    assert "softmax" not in after()
    expected = attend(tokens(), *given.values())
    assert bool(expected.isnan().any()) == (name in WITH_NAN)


WITH_NAN = {
    "nobody left",
    "from outside, a row of nothing",
    "both, nobody left",
    "numbers and padding",
}


@pytest.mark.parametrize("padding", [PADDING, EMPTY], ids=["some", "all"])
def test_two_masks_become_one_for_all_heads(padding: Tensor) -> None:
    """Without weights a query that attends to no key gets zeros, as in PyTorch."""
    made = module()

    def attend(x: Tensor, taken: Tensor) -> Tensor:
        return made(x, x, x, attn_mask=causal(), key_padding_mask=taken, need_weights=False)[0]

    assert run(attend, tokens(), padding) == FIRED
    assert f"b8[{B}, 1, {L}, {L}]" in after()
    assert f"[{B * H}, {L}, {L}]" not in after()
    assert not attend(tokens(), padding).isnan().any()
    assert "one mask for all heads" in sentence()


def test_a_mask_written_to_after_it_was_taken_over_declines() -> None:
    weights = list(module().parameters())

    def attend(x: Tensor, taken: Tensor) -> Tensor:
        taken = taken | False
        mask = torch.zeros_like(taken, dtype=x.dtype).masked_fill_(taken, float("-inf"))
        taken.fill_(False)
        x = x.transpose(0, 1)
        in_weight, in_bias, out_weight, out_bias = weights
        return F.multi_head_attention_forward(
            x,
            x,
            x,
            E,
            H,
            in_weight,
            in_bias,
            None,
            None,
            False,
            0.0,
            out_weight,
            out_bias,
            key_padding_mask=mask,
        )[0]

    assert run(attend, tokens(), PADDING) == [("declined", "mutated")]


def test_a_mask_that_is_no_product_of_truth_values_keeps_its_numbers() -> None:
    weights = list(module().parameters())

    def attend(x: Tensor, taken: Tensor) -> Tensor:
        mask = torch.zeros_like(taken, dtype=x.dtype).masked_fill_(taken, -0.5)
        x = x.transpose(0, 1)
        in_weight, in_bias, out_weight, out_bias = weights
        return F.multi_head_attention_forward(
            x,
            x,
            x,
            E,
            H,
            in_weight,
            in_bias,
            None,
            None,
            False,
            0.0,
            out_weight,
            out_bias,
            key_padding_mask=mask,
        )[0]

    assert run(attend, tokens(), PADDING) == FIRED


# --- declines -------------------------------------------------------------------------------------


def dropped(x: Tensor) -> Tensor:
    return module(dropout=0.5)(x, x, x)[0] * 0


def own_bias(x: Tensor) -> Tensor:
    return OWN_BIAS(x, x, x)[0]


def own_zeros(x: Tensor) -> Tensor:
    return OWN_ZEROS(x, x, x)[0]


def learned(x: Tensor) -> Tensor:
    return PLAIN(x, x, x, attn_mask=x[0, :, :1] @ x[0, :, :1].T)[0]


def chosen(x: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return PLAIN(x, x, x)[0]


PLAIN, DROPPING = module(), module(dropout=0.5)
OWN_BIAS, OWN_ZEROS = module(add_bias_kv=True), module(add_zero_attn=True)

DECLINED: dict[str, Callable[..., Tensor]] = {
    "dropout_active": lambda x: DROPPING(x, x, x)[0] * 0,
    "keys_of_its_own": own_bias,
    "mask_is_bias": learned,
    "kernels_chosen": chosen,
    "weights_used(mean)": lambda x: PLAIN(x, x, x)[1].mean() + PLAIN(x, x, x)[0],
}


@pytest.mark.parametrize("code", DECLINED)
def test_what_is_not_served_is_left_as_it_was(code: str) -> None:
    found = run(DECLINED[code], tokens())
    assert ("declined", code) in found
    if code != "weights_used(mean)":  # there the other call is served
        assert found == [("declined", code)]
        assert after() == memeff_compile.graphs()[-1].before


def test_zeros_added_as_a_key_are_left_as_they_were() -> None:
    assert run(own_zeros, tokens()) == [("declined", "keys_of_its_own")]


def test_dropout_that_is_switched_off_is_none() -> None:
    made = module(dropout=0.5).eval()
    assert run(lambda x: made(x, x, x)[0], tokens()) == FIRED


def test_a_checkpoint_gets_no_kernel_where_its_graph_returns_no_gradient() -> None:
    made = module().requires_grad_(False)

    def attend(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x: made(x, x, x)[0], x, use_reentrant=False)
        return out

    assert run(attend, tokens().detach(), inner="aot_eager") == [("declined", "no_fused_kernel")]
    assert run(attend, tokens().detach().requires_grad_(), inner="aot_eager") == FIRED


def test_a_gpu_is_asked_for_a_fused_kernel() -> None:
    made = module(dtype=torch.float32)

    def attend(x: Tensor) -> Tensor:
        out: Tensor = made(x, x, x)[0]
        return out

    with planned_for(torch.device("cuda", 0)):
        found = run_fp32(attend, tokens().detach().float())
    assert found == [("declined", "no_fused_kernel")]  # heads of 4
    assert run_fp32(attend, tokens().detach().float()) == FIRED


def run_fp32(function: Callable[..., Any], *inputs: Any, **settings: Any) -> list[tuple[str, str]]:
    outcome = compare_with_eager(function, *inputs, rtol=1e-4, atol=1e-5, **settings)
    return [(r.action, r.code) for r in records(outcome.report)]


# --- around it ------------------------------------------------------------------------------------


def test_the_pass_can_be_switched_off_and_skipped() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x)[0]
            return out

    assert run(Block(), tokens(), options={"memeff.attention": "off"}) == []
    found = run(Block(), tokens(), options={"memeff.skip": {NAME: "attention"}})
    assert found == [("declined", "skipped")]


def test_layers_are_one_record_also_in_checkpoints() -> None:
    layers = [module(), module(), module()]

    def attend(x: Tensor) -> Tensor:
        for layer in layers[:2]:
            x = x + checkpoint(lambda y, m=layer: m(y, y, y)[0], x, use_reentrant=False)
        return x + layers[2](x, x, x)[0]

    assert run(attend, tokens()) == FIRED
    (record,) = records(memeff_compile.last_report())
    assert record.sites == 3


def test_a_transformer_of_pytorch_is_served_mask_and_all() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, dtype=torch.float64)

    def encode(x: Tensor, taken: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
        return layer(x, src_mask=mask, src_key_padding_mask=taken.double() * -1e9)

    def decode(x: Tensor) -> Tensor:
        return layer(x, src_mask=causal())

    assert run(encode, tokens(), PADDING) == FIRED
    assert run(decode, tokens()) == FIRED
    assert "is_causal=True" in after()


def test_autocast_computes_in_its_dtype() -> None:
    made = module(dtype=torch.float32)
    x = tokens().detach().float()
    exact = made(x, x, x)[0]

    def attend(x: Tensor, taken: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = made(x, x, x, attn_mask=causal(), key_padding_mask=taken)[0]
        return out

    nothing = torch.zeros_like(PADDING)
    outcome = compare_with_eager(attend, x, nothing, rtol=5e-2, atol=5e-2, inner="aot_eager")
    assert [r.code for r in records(outcome.report)] == ["rewrote"]
    assert attend(x, nothing).dtype == torch.bfloat16
    assert exact.dtype == torch.float32


def test_bf16_is_as_close_as_eager() -> None:
    made = module(dtype=torch.float32)
    x = tokens().detach().float()
    exact = made(x, x, x)[0]
    made, x = made.bfloat16(), x.bfloat16()
    compiled = torch.compile(
        lambda x: made(x, x, x)[0], backend="memeff", options={"memeff.inner": "eager"}
    )
    ours, theirs = ((f(x).float() - exact).norm() for f in (compiled, lambda x: made(x, x, x)[0]))
    assert ours <= 1.5 * theirs


def test_dynamic_lengths_are_served_without_recompiles() -> None:
    made = module()

    def attend(x: Tensor, taken: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return made(x, x, x, attn_mask=mask, key_padding_mask=taken)[0]

    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(
        attend, backend="memeff", options={"memeff.inner": "eager"}, dynamic=True, fullgraph=True
    )
    for length in (6, 9, 4):
        x = tokens(length)
        taken = torch.zeros(B, length, dtype=torch.bool)
        taken[0, :2] = length == 9
        torch.testing.assert_close(
            compiled(x, taken), attend(x, taken), rtol=1e-9, atol=1e-9, equal_nan=True
        )
    assert len(memeff_compile.last_report().graphs) == 1
    assert [r.code for r in records(memeff_compile.last_report())] == ["rewrote"]


def test_strict_asks_only_that_nothing_is_declined() -> None:
    assert run(lambda x: x * 2, tokens(), options={"memeff.strict": NAME}) == []


# --- the rewrite ----------------------------------------------------------------------------------


def test_the_text_of_the_rewritten_graph() -> None:
    expecttest = pytest.importorskip("expecttest", reason="goldens are compared with expecttest")
    made = module(dtype=torch.float32)
    run_fp32(lambda x: made(x, x, x, attn_mask=causal())[0], tokens().detach().float())
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    x: input f32[2, 6, 16],
    in_proj_bias: param f32[48],
    in_proj_weight: param f32[48, 16],
    out_proj.weight: param f32[16, 16],
    out_proj.bias: param f32[16],
):
    %0: f32[2, 6, 48] = aten.linear(x, in_proj_weight, in_proj_bias)
    %1: f32[2, 6, 3, 4, 4] = aten.unflatten(%0, 2, [3, 4, 4])
    %2: f32[3, 2, 4, 6, 4] = aten.permute(%1, [2, 0, 3, 1, 4])
    %3: (f32[2, 4, 6, 4], f32[2, 4, 6, 4], f32[2, 4, 6, 4]) = aten.unbind(%2)
    %4: f32[2, 4, 6, 4] = aten.select(%2, 0, 0)
    %5: f32[2, 4, 6, 4] = aten.select(%2, 0, 1)
    %6: f32[2, 4, 6, 4] = aten.select(%2, 0, 2)
    %7: f32[2, 4, 6, 4] = aten.scaled_dot_product_attention(%4, %5, %6, is_causal=True)
    %8: f32[6, 2, 4, 4] = aten.permute(%7, [2, 0, 1, 3])
    %9: f32[6, 2, 16] = aten.flatten(%8, 2, 3)
    %10: f32[6, 2, 16] = aten.contiguous(%9)
    %11: f32[6, 2, 16] = aten.linear(%10, out_proj.weight, out_proj.bias)
    %12: f32[2, 6, 16] = aten.transpose(%11, 1, 0)
    return (%12)""",
    )
