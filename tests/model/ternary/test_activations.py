"""ternarize_(activation=, low_bit_heads=) and compile(ternary=): the block of BitNet a4.8."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile import verb_report
from memeff_compile.errors import OptionError
from memeff_compile.model import TernaryLinear
from memeff_compile.model.low_bit_heads import heads_of

IDS = torch.arange(24).view(2, 12)
PAPER_HEADS = {"query": 4, "key_value": 3, "first": 1, "first_bits": 4}


def tiny(family: str = "Llama", **settings: Any) -> Any:
    transformers = pytest.importorskip(
        "transformers", reason="the models are those of transformers"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    given = {**sizes, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 64}
    given |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **settings}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**given)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def summary(model: nn.Module) -> str:
    report = verb_report(model, "ternarize_")
    assert report is not None
    return report.summary


class MLP(nn.Module):
    """A gated MLP; `forward` is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)


class ByFunction(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Squared(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.gate_proj(x)).square() * self.up_proj(x))


class Normed(MLP):
    """As BitNet's, with a norm before down; its activation has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.nonlinearity, self.norm = nn.GELU(), nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.norm(self.up_proj(x) * self.nonlinearity(self.gate_proj(x))))


class OfSum(MLP):
    """The activation is applied to gate + up, so that it is no gate."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x) + self.up_proj(x)))


class Plain(nn.Module):
    """No gate: transformers' GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


@pytest.mark.parametrize(
    ("family", "name"), [("Llama", "act_fn"), ("Phi3", "activation_fn"), ("Gemma", "act_fn")]
)
def test_the_squared_relu_replaces_the_activation_of_every_gated_mlp(
    family: str, name: str
) -> None:
    model = tiny(family)
    before = type(model.model.layers[0].mlp.get_submodule(name)).__name__
    keys = [k for k in ("hidden_act", "hidden_activation") if getattr(model.config, k, None)]
    names = [getattr(model.config, key) for key in keys]
    memeff_compile.ternarize_(model, "a4.8", activation="relu2")
    report = verb_report(model)
    assert "; the squared ReLU in 2 gated MLPs" in summary(model)
    assert f"model.layers.1.mlp.{name}  squared ReLU, was {before}" in report.details()
    assert "relu2" in [getattr(model.config, key) for key in keys]
    seen = []
    mlp = model.model.layers[0].mlp
    mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(input_ids=IDS)
    assert (seen[0] == 0).float().mean() > 0.3
    assert torch.equal(mlp.get_submodule(name)(torch.tensor([-2.0, 3.0])), torch.tensor([0.0, 9.0]))
    mlp.down_proj._forward_pre_hooks.clear()
    memeff_compile.undo(model)
    assert type(mlp.get_submodule(name)).__name__ == before
    assert [getattr(model.config, key) for key in keys] == names


def test_an_activation_before_a_norm_with_any_name_is_found() -> None:
    model = nn.Sequential(Normed(), Normed())
    x = torch.randn(3, 8)
    memeff_compile.ternarize_(model, "a4.8", activation="relu2")
    first = model[0]
    gate, up = first.gate_proj(x), first.up_proj(x)
    wanted = first.down_proj(first.norm(up * F.relu(gate).square()))
    assert torch.equal(first(x), wanted)
    memeff_compile.ternarize_(model, "a4.8", activation="relu2")  # it is there: no second change
    assert "gated MLPs" not in summary(model)
    memeff_compile.undo(model)
    assert type(first.nonlinearity) is nn.GELU


def test_a_model_without_numbers_is_made_ready_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Normed())
        memeff_compile.ternarize_(model, "a4.8", activation="relu2")
    assert summary(model).endswith("; the squared ReLU in 1 gated MLP")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ByFunction, "computes its activation in forward, and has no module for it"),
        (OfSum, r"is not gated: the input of down_proj is not activation\(gate\) \* up"),
        (Plain, "is not gated"),
        (lambda: nn.ModuleDict({"q_proj": nn.Linear(4, 4)}), "none of the linears"),
    ],
    ids=["by function", "of a sum", "no gate", "no MLP"],
)
def test_other_mlps_are_refused_before_anything_is_changed(model: Any, message: str) -> None:
    whole = nn.ModuleDict({"mlp": model()})
    with pytest.raises(OptionError, match=message):
        memeff_compile.ternarize_(whole, "a4.8", activation="relu2")
    assert not any(isinstance(m, TernaryLinear) for m in whole.modules())
    with pytest.raises(OptionError, match="'relu2'"):
        memeff_compile.ternarize_(whole, "a4.8", activation="swiglu")


def test_an_mlp_with_a_forward_of_its_own_is_refused() -> None:
    model = tiny()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x
    with pytest.raises(OptionError, match="another form than a gated MLP"):
        memeff_compile.ternarize_(model, "a4.8", activation="relu2")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (tiny, "into down goes SiLUActivation, where 'a4.8' is made for the squared ReLU"),
        (lambda: tiny(hidden_act="relu2"), ""),
        (lambda: nn.Sequential(ByFunction()), "into down goes ByFunction"),
        (lambda: nn.Sequential(Squared()), ""),
        (lambda: nn.Sequential(Plain()), "into down goes Plain"),
    ],
    ids=["llama", "relu2", "by function", "squared by function", "no gate"],
)
def test_the_report_says_that_down_sees_another_activation(model: Any, said: str) -> None:
    made = model()
    memeff_compile.ternarize_(made, "a4.8")
    assert said in summary(made)
    assert ("squared ReLU" in str(verb_report(made))) == bool(said)
    memeff_compile.ternarize_(made, "b1.58")
    assert "squared ReLU" not in str(verb_report(made)), "b1.58 is published with Llama's"


def test_low_bit_heads_come_in_the_same_call_and_change_with_it() -> None:
    model = tiny()
    memeff_compile.ternarize_(model, "a4.8", activation="relu2", low_bit_heads=PAPER_HEADS)
    assert heads_of(model) == PAPER_HEADS
    assert "queries in 4 bits, keys and values in 3" in summary(model)
    memeff_compile.ternarize_(model, "a4.8", low_bit_heads=4)
    assert heads_of(model) == {"query": 16, "key_value": 4, "first": 0, "first_bits": 4}
    with pytest.raises(memeff_compile.UnsupportedInputError, match="key_value is 5"):
        memeff_compile.ternarize_(model, "b1.58", low_bit_heads=5)
    assert heads_of(model) is not None
    with pytest.raises(OptionError, match="low_bit_heads has 'keys'"):
        memeff_compile.ternarize_(model, low_bit_heads={"keys": 4})
    memeff_compile.undo(model)
    assert heads_of(model) is None
    wide = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(OptionError, match="attention"):
        memeff_compile.ternarize_(wide, kinds={"*": "int8"}, low_bit_heads=4)
    assert type(wide[0]) is nn.Linear


def test_a_copy_is_undone_by_itself() -> None:
    model = memeff_compile.ternarize_(tiny(), "a4.8", activation="relu2")
    other = copy.deepcopy(model)
    memeff_compile.undo(other)
    assert other.config.hidden_act == "silu"
    assert model.config.hidden_act == "relu2"
    assert not any("SquaredReLU" in type(m).__name__ for m in other.modules())
    assert not any("was" in name or "act_fn." in name for name in model.state_dict())


def test_a_packed_model_keeps_activation_and_heads_through_a_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny()
    memeff_compile.ternarize_(model, "a4.8", activation="relu2", low_bit_heads=PAPER_HEADS)
    kinds = {p: m.kind for p, m in model.named_modules() if isinstance(m, TernaryLinear)}
    memeff_compile.pack_ternary_(model)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    undone = memeff_compile.undo(copy.deepcopy(model))
    assert "trained with it" in undone.left["model.layers.0.mlp.act_fn"]
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert heads_of(again) == PAPER_HEADS
    assert again.config.hidden_act == "relu2"
    assert {p: again.get_submodule(p).kind for p in kinds} == kinds
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, wanted)


# --- compile(ternary=) ----------------------------------------------------------------------------


def test_compile_makes_a_model_ternary_and_compiles_it_in_place() -> None:
    model = tiny()
    eager = memeff_compile.ternarize_(copy.deepcopy(model), "a4.8")
    found = memeff_compile.compile(
        model, ternary="a4.8", inner="aot_eager", skip={"*": "model.layers.1.mlp"}
    )
    assert found is model
    assert model.model.layers[0].self_attn.o_proj.kind == "topk8"
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    memeff_compile.undo(model)
    memeff_compile.compile(model, ternary="a4.8", inner="aot_eager")
    losses = [each(input_ids=IDS, labels=IDS).loss for each in (eager, model)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert "into down goes SiLUActivation" in summary(model)


def test_compile_leaves_a_model_that_it_cannot_make_ternary() -> None:
    model = tiny()
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(OptionError, match="has hooks"):
        memeff_compile.compile(model, ternary="a4.8", kv_cache=4)
    with pytest.raises(OptionError, match="give one"):
        memeff_compile.compile(tiny(), ternary="a4.8", weights="win4")
    with pytest.raises(OptionError, match=r"memeff\.ternary"):
        memeff_compile.compile(model, ternary="a4")
    assert not any(isinstance(m, TernaryLinear) for m in model.modules())
    assert memeff_compile.undo(model) == 0


def test_a_backend_alone_refuses_a_recipe() -> None:
    with pytest.raises(Exception, match=r"ternarize_\(model, 'a4.8'\)"):
        torch.compile(nn.Linear(4, 4), backend="memeff", options={"memeff.ternary": "a4.8"})(
            torch.randn(2, 4)
        )
