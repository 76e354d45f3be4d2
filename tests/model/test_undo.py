"""`memeff_compile.undo` restores a model, or its report lists the rest with reasons."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memeff_compile
from memeff_compile import undo
from memeff_compile.cli.toy import ToyModel
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.model.ternary.layers import PackedTernaryLinear, TernaryLinear

IDS = torch.arange(8)
INNER = {"memeff.inner": "eager"}


def graphs_of(call: Callable[..., Any], *args: object) -> int:
    """Return the number of graphs that our backend gets from a call."""
    memeff_compile.reset()
    call(*args)
    return len(memeff_compile.last_report().graphs)


def compile_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="memeff", options=INNER)  # type: ignore[method-assign]
    return model


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "compile()": lambda m: memeff_compile.compile(m, inner="eager"),
    "in place": lambda m: m.compile(backend="memeff", options=INNER),
    "its forward": compile_forward,
    "twice": lambda m: memeff_compile.compile(
        memeff_compile.compile(m, inner="eager"), inner="eager"
    ),
}


@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_call_is_taken_back(way: str) -> None:
    model = ToyModel()
    COMPILED[way](model)
    assert graphs_of(model, IDS) == 1
    report = undo(model)
    assert report == 1, report
    assert report.summary == "undo: 1 compiled module uncompiled"
    assert graphs_of(model, IDS) == 0
    assert not {"forward", "_compiled_call_impl"} & {k for k, v in vars(model).items() if v}
    again = undo(model)
    assert again == 0
    assert again.summary == "undo: nothing to take back from ToyModel"


def test_what_torch_compile_returned_runs_the_model_itself() -> None:
    model = torch.compile(ToyModel(), backend="memeff", options=INNER)
    assert graphs_of(model, IDS) == 1
    assert undo(model) == 1
    assert graphs_of(model, IDS) == 0
    assert undo(model) == 0


@pytest.mark.parametrize("wraps", [True, False], ids=["wrapper", "in place"])
def test_compiled_modules_inside_a_model_are_taken_back(wraps: bool) -> None:
    model = nn.Sequential(ToyModel())
    names = list(model.state_dict())
    if wraps:
        model[0] = torch.compile(model[0], backend="memeff", options=INNER)
    else:
        model[0].compile(backend="memeff", options=INNER)
    assert graphs_of(model, IDS) == 1
    assert dict(undo(model).places).keys() == {"0"}
    assert graphs_of(model, IDS) == 0
    assert list(model.state_dict()) == names


def test_what_another_backend_compiled_stays_compiled() -> None:
    model = nn.Sequential(ToyModel(), nn.Identity())
    model[0].compile(backend="eager")
    model[1] = torch.compile(model[1], backend="eager")
    theirs = model[0]._compiled_call_impl, model[1]
    assert undo(model) == 0
    assert (model[0]._compiled_call_impl, model[1]) == theirs


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def same_bits(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    found = dict(model.named_parameters())
    return all(type(found[n]) is nn.Parameter and torch.equal(found[n], state[n]) for n in state)


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_lossless_weights_come_back_bit_for_bit(codec: str) -> None:
    model = Wide()
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    memeff_compile.compress_(model, codec, min_size=0)
    assert not same_bits(model, state)
    report = undo(model)
    assert report == 2
    assert "2 compressed weights dense again (" in report.summary
    assert same_bits(model, state)
    assert all(p.requires_grad for p in model.parameters())
    assert undo(model) == 0


def test_rounded_weights_stay_and_the_report_says_why() -> None:
    model = Wide()
    memeff_compile.compress_(model, "win4", mantissa=3, min_size=0)
    report = undo(model)
    assert report == 0
    assert report.summary == "undo: nothing to take back from Wide; 2 left as they are"
    assert "its bits are gone: load the model again" in report.left["first.weight"]
    assert not isinstance(model.first.weight.data, nn.Parameter)
    assert json.loads(report.to_json())["left"] == dict(report.left)


def test_weights_that_are_updated_in_the_backward_stay_until_that_is_removed() -> None:
    model = Wide()
    memeff_compile.compress_(model, "win4", min_size=0)
    optimizer = memeff_compile.optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.1))
    report = undo(model)
    assert report == 0
    assert "remove()" in report.left["first.weight"]
    optimizer.remove()
    assert undo(model) == 2


def test_ternary_linears_are_dense_again_with_the_same_parameters() -> None:
    model = nn.Sequential(Wide(), TernaryLinear(128, 4)).float()
    x = torch.randn(3, 128)
    expected, held = model[0](x), list(model.parameters())
    memeff_compile.ternarize_(model[0])
    model.eval()
    assert not torch.allclose(model[0](x), expected)
    report = undo(model)
    assert report.summary == "undo: 2 ternary linears dense again"
    torch.testing.assert_close(model[0](x), expected, rtol=0, atol=0)
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    assert type(model[1]) is TernaryLinear, "it came so"
    assert not model[0].first.training
    assert undo(model) == 0


def test_a_ternary_linear_with_hooks_and_packed_ones_stay() -> None:
    model = Wide().float()
    memeff_compile.ternarize_(model)
    model.first.register_forward_hook(lambda *_: None)
    assert "has hooks" in undo(model).left["first"]
    assert type(model.second) is nn.Linear
    packed = Wide().float()
    memeff_compile.pack_ternary_(memeff_compile.ternarize_(packed))
    report = undo(packed)
    assert report == 0
    assert report.left["second"].startswith("packed, so its full-precision weight is gone")
    assert isinstance(packed.second, PackedTernaryLinear)


@pytest.mark.parametrize("saved", [False, True], ids=["copied", "saved and loaded"])
def test_a_copy_is_undone_by_itself(saved: bool) -> None:
    model = Wide()
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    memeff_compile.compress_(memeff_compile.ternarize_(model), "win4", min_size=0)
    if saved:
        torch.save(model, held := io.BytesIO())
        held.seek(0)
        made = torch.load(held, weights_only=False)
    else:
        made = copy.deepcopy(model)
    undo(made)
    assert same_bits(made, state)
    assert type(made.first) is nn.Linear
    assert isinstance(model.first, TernaryLinear), "the other stays as it was"


def test_undo_refuses_what_is_no_module() -> None:
    with pytest.raises(UnsupportedInputError, match="undo was given a int"):
        undo(3)  # type: ignore[arg-type]


class TestGeneration:
    """Undo with a model of transformers that generates."""

    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}  # noqa: RUF012

    @staticmethod
    def make() -> Any:
        transformers = pytest.importorskip("transformers", reason="the model is one of its")
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": None}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()

    def cache_of(self, model: Any) -> Any:
        ids = torch.arange(2, 8)[None]
        return model.generate(ids, return_dict_in_generate=True, **self.asked).past_key_values

    @pytest.mark.parametrize("adapted", [False, True], ids=["plain", "PEFT"])
    def test_generate_makes_the_models_own_cache_again(self, adapted: bool) -> None:
        model = outer = self.make()
        if adapted:
            peft = pytest.importorskip("peft", reason="the adapters are its")
            outer = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
            outer.eval()
        own, tokens = (
            type(self.cache_of(outer)),
            outer.generate(torch.arange(2, 8)[None], **self.asked),
        )
        memeff_compile.use_kv_cache_(outer, bits=8)
        memeff_compile.compile(outer, kv_cache=4, inner="eager")
        assert isinstance(self.cache_of(outer), memeff_compile.KVCache)
        report = undo(outer)
        assert "KV cache of generate() taken out" in report.summary, report
        assert "1 compiled module uncompiled" in report.summary
        assert type(self.cache_of(outer)) is own
        assert graphs_of(lambda: outer.generate(torch.arange(2, 8)[None], **self.asked)) == 0
        assert torch.equal(outer.generate(torch.arange(2, 8)[None], **self.asked), tokens)
        assert "_prepare_cache_for_generation" not in vars(model)
        assert undo(outer) == 0

    def test_everything_at_once_in_one_report(self) -> None:
        from memeff_compile.model import use_low_bit_heads_

        model = self.make().to(torch.bfloat16)
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        before = model.config._attn_implementation
        memeff_compile.ternarize_(model)
        use_low_bit_heads_(model, key_value=4)
        memeff_compile.compile(model, kv_cache=4, inner="eager")
        model.lm_head.compile(backend="memeff", options=INNER)
        report = undo(model)
        assert memeff_compile.verb_report(model, "undo") is report
        assert {"(model)", "lm_head", "model.layers.0.mlp.up_proj"} <= report.places.keys()
        assert model.config._attn_implementation == before
        assert same_bits(model, state)
        assert not any(isinstance(m, TernaryLinear) for m in model.modules())
        assert undo(model) == 0
