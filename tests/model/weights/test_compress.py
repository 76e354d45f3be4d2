"""compress_: compressed and skipped weights, and that a compressed model equals the original."""

from __future__ import annotations

import copy
import json
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memeff_compile
from memeff_compile.errors import (
    CodedWeightError,
    MemeffError,
    OptionError,
    UnsupportedInputError,
)
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights.compress import compress_, compressed_weights, decompress_
from memeff_compile.model.weights.compressed_file import (
    LARGEST_BUFFER,
    METADATA,
    load_compressed_,
    save_compressed,
)
from tests.support.hostile_weights import bits, hostile

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
SLOW = [pytest.param(codec, marks=pytest.mark.slow) for codec in ("rans", "win4:k3:b64")]
IDS = torch.arange(24).view(2, 12) % 64


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LLAMA).to(torch.bfloat16).eval()


def compressed(model: nn.Module, codec: str = "win4", **settings: Any) -> nn.Module:
    compress_(model, codec, min_size=0, progress=False, **settings)
    return model


def same_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(
        type(right[name]) is Tensor and torch.equal(left[name], right[name]) for name in left
    )


EVERY_LAYER: dict[str, Any] = {"layers": ("Linear", "Conv1D", "Embedding"), "skip": ()}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 64}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).to(torch.bfloat16)


def tied() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": 256, "tie_word_embeddings": True})
    return LlamaForCausalLM(config).to(torch.bfloat16)


# --- what is compressed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "count"), [(gpt2, 5), (tied, 15)], ids=["conv1d", "tied head"])
def test_layers_that_are_named_are_compressed_and_train_on_the_same_bits(
    make: Callable[[], nn.Module], count: int
) -> None:
    model, twin = make(), make()
    report = compress_(model, min_size=2**14, progress=False)
    assert "; layers may name 'Embedding'" in str(report)
    assert ("; layers may name 'Conv1D'" in str(report)) == (make is gpt2)
    compress_(model, min_size=2**14, progress=False, **EVERY_LAYER)
    assert len(compressed_weights(model)) == count
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    for each in (model, twin):
        memeff_compile.optim_in_backward(each, torch.optim.SGD, lr=0.1)
        for _ in range(3):
            each(input_ids=IDS, labels=IDS).loss.backward()
    assert same_tensors(dict(model.state_dict()), dict(twin.state_dict()))
    assert not same_tensors(dict(model.state_dict()), dict(make().state_dict()))


def test_adapters_train_on_compressed_conv1d_as_on_dense() -> None:
    settings = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    found = []
    for model in (gpt2(), compressed(gpt2(), layers=["Conv1D"])):
        torch.manual_seed(1)
        adapted = get_peft_model(model, settings)
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        found.append([p.grad for p in adapted.parameters() if p.requires_grad])
    assert len(found[0]) == 6
    assert all(map(torch.equal, *found))


def test_rounding_for_inputs_takes_linears_and_rounds_tables_plainly() -> None:
    model = tied()
    report = compress_(
        model, mantissa=3, inputs=[{"input_ids": IDS}], min_size=0, progress=False, **EVERY_LAYER
    )
    kinds = {each.name: each.for_inputs for each in report.compressed}
    assert not kinds.pop("model.embed_tokens.weight")
    assert set(kinds.values()) == {True}


@pytest.mark.parametrize("layers", [(), ("Conv2d",), "Bilinear"])
def test_layers_of_no_use_are_refused(layers: Any) -> None:
    with pytest.raises(OptionError, match="layers is"):
        compress_(nn.Linear(4, 4), layers=layers)


def test_an_embedding_that_writes_to_its_weight_stays_dense() -> None:
    model = nn.Sequential(nn.Embedding(256, 128, max_norm=1.0)).to(torch.bfloat16)
    assert not compress_(model, min_size=0, progress=False, **EVERY_LAYER).compressed


def test_linears_are_compressed_and_the_rest_is_said() -> None:
    model = llama()
    report = compress_(model, "win4", min_size=0, progress=False)
    assert len(report.compressed) == 14
    assert report.bits == pytest.approx(12.0, abs=0.05)
    assert report.bytes_after == sum(w.coded_bytes for w in compressed_weights(model).values())
    why = {each.name: each.reason for each in report.left_dense}
    assert set(why) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert "Embedding" in why["model.embed_tokens.weight"]
    assert "lm_head" in why["lm_head.weight"]
    text = str(report)
    assert report.summary.startswith("compress_: 14 weights compressed, ")
    assert "12.01 bits  model.layers.0.mlp.up_proj.weight and 1 more [256, 128] win4" in text
    assert len(text.splitlines()) == 1 + 7 + 2  # the same linear of all layers is one line
    assert len(report.details().splitlines()) == 1 + 14 + 2
    assert len(json.loads(report.to_json())["weights"]) == 16


def test_weights_compressed_before_are_said_to_be_and_not_to_be_dense() -> None:
    model = compressed(llama())
    again = compress_(model, min_size=0, progress=False)
    assert again.summary == (
        "compress_: 0 weights compressed; 14 were compressed already; 2 left dense"
    )
    assert not again.compressed
    assert {each.before for each in again.compressed_before} == {"win4"}
    assert {each.name for each in again.left_dense} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    other = compress_(model, "tier", min_size=0, progress=False).compressed_before[0]
    assert other.reason == (
        "it is compressed already, with win4; for tier, call decompress_(model) first"
    )


def one(weight: Tensor, **settings: Any) -> str:
    """Return why the weight of one linear is left dense."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    report = compress_(linear, min_size=0, progress=False, **settings)
    return report.weights[0].reason


class Doubled(nn.Linear):
    """A linear with a custom forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2)


def tied_to_an_embedding() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(128, 256, bias=False), "b": nn.Embedding(256, 128)})
    model["b"].weight = model["a"].weight
    return model.to(torch.bfloat16)


def with_shared_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(128, 128)).to(torch.bfloat16)
    model[1].weight = nn.Parameter(model[0].weight.data[:128])
    return model


def with_a_hook() -> nn.Module:
    linear = nn.Linear(128, 256).to(torch.bfloat16)
    linear.weight.register_hook(lambda grad: grad)
    return linear


def with_a_gradient() -> nn.Module:
    linear = nn.Linear(128, 256).to(torch.bfloat16)
    linear.weight.grad = torch.zeros_like(linear.weight)
    return linear


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a forward of its own": (lambda: Doubled(128, 256).bfloat16(), "not a plain nn.Linear"),
    "tied to an embedding": (tied_to_an_embedding, "Embedding"),
    "shared memory": (with_shared_memory, "memory is shared"),
    "a hook": (with_a_hook, "hooks"),
    "a gradient": (with_a_gradient, "zero_grad"),
    "fp32": (lambda: nn.Linear(128, 256), "float32"),
    "fp16": (lambda: nn.Linear(128, 256).half(), "float16"),
    "meta": (lambda: nn.Linear(128, 256, device="meta").bfloat16(), "meta device"),
    "compressed already": (lambda: compressed(nn.Linear(128, 256).bfloat16()), "already"),
    "named in skip": (lambda: nn.Sequential(nn.Linear(128, 256).bfloat16()), "skip names '0'"),
}


@pytest.mark.parametrize("case", MODULES)
def test_a_weight_that_cannot_be_compressed_stays_and_the_report_says_why(case: str) -> None:
    make, needed = MODULES[case]
    model = make()
    skip = ("0",) if case == "named in skip" else ()
    before = [(type(p), p.dtype) for p in model.parameters()]
    report = compress_(model, min_size=0, progress=False, skip=skip)
    assert not report.compressed
    assert needed in report.weights[0].reason
    assert [(type(p), p.dtype) for p in model.parameters()] == before


def test_a_weight_that_would_not_get_smaller_stays() -> None:
    noise = torch.randint(-(2**15), 2**15, (128, 256), dtype=torch.int16).view(torch.bfloat16)
    assert "bits a weight" in one(noise)
    assert "min_size" in compress_(nn.Linear(8, 8).bfloat16(), progress=False).weights[0].reason


def test_an_unknown_codec_or_mantissa_is_an_option_error() -> None:
    for settings in ({"codec": "zip"}, {"mantissa": 5}, {"mantissa": 3, "block": 100}):
        with pytest.raises(OptionError, match="win4, tier, rans"):
            compress_(nn.Linear(8, 8), progress=False, **settings)


@pytest.mark.parametrize(
    "settings", [{"skip": None}, {"skip": [4]}, {"min_size": "1 MiB"}], ids=str
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any]) -> None:
    (value,) = settings.values()
    with pytest.raises(OptionError, match=re.escape(repr(value))):
        compress_(nn.Linear(8, 8).bfloat16(), progress=False, **settings)


def test_lossy_weights_no_longer_train() -> None:
    linear = nn.Linear(512, 128, bias=False).bfloat16()
    report = compress_(linear, mantissa=3, block=64, min_size=0, progress=False)
    assert report.weights[0].codec == "win4:k3:b64"
    assert 8 < report.bits < 8.3
    assert not linear.weight.requires_grad


def test_tied_linears_share_one_code() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)).bfloat16()
    model[1].weight = model[0].weight
    report = compress_(model, min_size=0, progress=False)
    assert len(report.compressed) == 1
    assert model[0].weight is model[1].weight
    assert isinstance(model[1].weight, CodedWeight)


# --- it is the same model -------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["win4", "tier", SLOW[0]])
def test_a_compressed_model_computes_the_same_bits(codec: str) -> None:
    dense, model = llama(), compressed(llama(), codec)
    outs = []
    for each in (dense, model):
        out = each(input_ids=IDS, labels=IDS)
        out.loss.backward()
        outs.append((out.logits, *(p.grad for p in each.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in dense.named_parameters()
    ]


def test_a_compressed_model_generates_the_same_tokens() -> None:
    dense, model = llama(), compressed(llama())
    expected = dense.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)


def test_state_dicts_are_dense_and_interchangeable(tmp_path: Path) -> None:
    dense, model = llama(), compressed(llama(), "tier")
    assert same_tensors(dict(dense.state_dict()), dict(model.state_dict()))
    other = llama(seed=1)
    model.load_state_dict(other.state_dict())
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, CodedWeight)
    assert same_tensors(dict(other.state_dict()), dict(model.state_dict()))
    dense.load_state_dict(model.state_dict())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same_tensors(dict(other.state_dict()), dict(loaded))


@pytest.mark.parametrize("codec", ["win4", "tier", "rans"])
def test_a_model_is_saved_whole_with_its_codes_and_nothing_else(codec: str, tmp_path: Path) -> None:
    """Lists of many weights lie side by side, in `tier` those of two dtypes."""
    model = compressed(llama(), codec)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(loaded.model.layers[0].mlp.up_proj.weight, CodedWeight)
    assert same_tensors(dict(model.state_dict()), dict(loaded.state_dict()))
    weight = model.model.layers[0].mlp.up_proj.weight
    assert len(pickle.dumps(weight)) < sum(part.nbytes for part in weight.parts) + 8192


def test_a_copy_of_a_model_is_compressed_and_its_own() -> None:
    model = compressed(llama())
    twin = copy.deepcopy(model)
    twin.load_state_dict(llama(seed=1).state_dict())
    assert same_tensors(dict(llama().state_dict()), dict(model.state_dict()))
    assert same_tensors(dict(llama(seed=1).state_dict()), dict(twin.state_dict()))


def test_a_copy_of_a_model_has_its_gradients_as_a_dense_one() -> None:
    model = nn.Linear(256, 256, dtype=torch.bfloat16)
    compress_(model, min_size=0)
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in copy.deepcopy(model).parameters())


def test_decompressing_gives_the_dense_model_back() -> None:
    model = compressed(llama())
    assert decompress_(model) == 14
    assert not compressed_weights(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert same_tensors(dict(llama().state_dict()), dict(model.state_dict()))


def test_attributes_of_parameters_stay(tmp_path: Path) -> None:
    """Trainers mark parameters: for weight decay, for sharding."""
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    kept = model.weight
    kept.no_decay = True
    compressed(model)
    assert model.weight.no_decay is kept.no_decay is True
    save_compressed(model, tmp_path / "codes")
    other = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    other.weight.no_decay = False
    load_compressed_(other, tmp_path / "codes")
    assert other.weight.no_decay is False
    decompress_(model)
    assert set(vars(model.weight)) == {"no_decay"}


def test_decompressing_keeps_gradients() -> None:
    linear = compressed(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16))
    linear(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
    gradient = linear.weight.grad
    decompress_(linear)
    assert gradient is not None
    assert linear.weight.grad is gradient


@pytest.mark.parametrize("codec", ["win4", "tier", "rans"])
@pytest.mark.parametrize("through", ["data", "detach"])
def test_a_whole_value_stored_through_an_alias_reaches_the_weight(through: str, codec: str) -> None:
    """Where the new value needs longer lists, too."""
    linear = compressed(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16), codec)
    spread = torch.exp2(torch.randint(-30, 30, (256, 256)).float())
    value = (torch.randn(256, 256) * spread).bfloat16()
    weight = linear.weight
    alias = weight.data if through == "data" else weight.detach()
    with torch.no_grad():
        alias.copy_(value)
    assert torch.equal(weight.decode(), value)
    assert torch.equal(linear.state_dict()["weight"], value)


def test_lossy_weights_refuse_values_that_are_not_finite() -> None:
    linear = compressed(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16), mantissa=3)
    value = linear.weight.decode()
    value[3, 5] = float("nan")
    with pytest.raises(UnsupportedInputError, match="finite"), torch.no_grad():
        linear.weight.copy_(value)


def test_one_name_to_skip_is_a_name() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16))
    assert not compressed(model, skip="0")[0].weight.__class__.__name__.startswith("Coded")


def test_the_report_notes_names_to_skip_that_no_module_has() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16))
    report = compress_(model, min_size=0, progress=False, skip=["mlpp", "?", "lm_head"])
    (note,) = report.notes
    assert "skip names 'mlpp', but no module has this name" in note
    assert f"note: {note}" in str(report)
    assert json.loads(report.to_json())["notes"] == [note]


@pytest.mark.parametrize(
    ("skip", "notes"),
    [(["up"], 1), (["up", "lm_head"], 0), ((), 0), (None, 0)],
    ids=["the head is dropped", "the head is named", "nothing is named", "the default"],
)
def test_the_report_notes_a_list_that_drops_the_output_projection(
    skip: Sequence[str] | None, notes: int
) -> None:
    linears = {name: nn.Linear(256, 256, dtype=torch.bfloat16) for name in ("up", "lm_head")}
    given: dict[str, Any] = {} if skip is None else {"skip": skip}
    report = compress_(nn.ModuleDict(linears), min_size=0, progress=False, **given)
    assert len(report.notes) == notes
    assert all("lm_head.weight is compressed" in note for note in report.notes)


def test_moving_a_model_keeps_it_compressed() -> None:
    model = compressed(nn.Linear(128, 256).bfloat16())
    assert isinstance(model.to("meta").weight, CodedWeight)
    assert isinstance(compressed(nn.Linear(128, 256).bfloat16()).cpu().weight, CodedWeight)


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["compress first", "adapt first"])
def test_adapters_train_on_a_compressed_model_as_on_a_dense_one(order: str) -> None:
    losses = []
    for is_coded in (False, True):
        model: nn.Module = llama()
        if is_coded and order == "compress first":
            compressed(model)
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], r=4))
        if is_coded and order == "adapt first":
            compressed(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
        losses.append([float(loss), *(float(p.float().sum()) for p in trained)])
        assert len(compressed_weights(model)) == (14 if is_coded else 0)
    assert losses[0] == losses[1]


def test_merging_adapters_into_a_compressed_weight_is_refused() -> None:
    model = get_peft_model(compressed(llama()), LoraConfig(target_modules=["q_proj"], r=4))
    before = model(input_ids=IDS).logits
    with pytest.raises(CodedWeightError, match=r"decompress_.* To train it") as raised:
        model.merge_and_unload()
    assert "merge_and_unload" in str(raised.value)
    assert torch.equal(model(input_ids=IDS).logits, before)
    decompress_(model)
    assert not compressed_weights(model.merge_and_unload())


# --- in-place writes ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("settings", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_writes_are_refused(name: str, settings: dict[str, bool], is_early: bool) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).to(torch.bfloat16)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    memeff_compile.compress_(model, min_size=0, progress=False)
    model(torch.ones(2, 128, dtype=torch.bfloat16)).float().sum().backward()
    before = model.state_dict()["0.weight"].clone()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **settings)
    with pytest.raises(CodedWeightError, match="optim_in_backward"):
        (early if is_early else optimizer).step()
    assert torch.equal(model.state_dict()["0.weight"], before)


def test_safetensors_gets_dense_values_or_refuses(tmp_path: Path) -> None:
    model = compressed(nn.Linear(128, 256).bfloat16())
    save_file(dict(model.state_dict()), tmp_path / "dense.safetensors")
    loaded = load_file(tmp_path / "dense.safetensors")
    assert torch.equal(loaded["weight"], model.weight.decode())
    with pytest.raises(CodedWeightError, match=r"compressed weight of .* has no address"):
        save_file({"weight": model.weight.detach()}, tmp_path / "coded.safetensors")


# --- files of compressed weights ------------------------------------------------------------------


def strange() -> nn.Sequential:
    """Return a model with strange weights, a tied linear and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)), nn.BatchNorm1d(128)).bfloat16()
    model[0].weight = nn.Parameter(hostile(128, 128))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("codec", ["win4", "tier", *SLOW])
def test_a_compressed_file_comes_back_bit_for_bit(codec: str, tmp_path: Path) -> None:
    model = llama() if ":" in codec else strange()
    path = tmp_path / "model.safetensors"
    save_compressed(compressed(model, codec), path)
    dense = sum(p.nbytes for p in model.state_dict().values())
    assert path.stat().st_size < dense
    other = llama(1) if ":" in codec else strange()
    for target in (other, copy.deepcopy(other).to("meta")):
        load_compressed_(target, path)
        assert len(compressed_weights(target)) == len(compressed_weights(model))
        for name, value in model.state_dict().items():
            assert torch.equal(bits(target.state_dict()[name].bfloat16()), bits(value.bfloat16()))
        assert not [p for p in target.parameters() if p.is_meta]


class Table(nn.Module):
    """Has a buffer that no state dict holds, which `reset_parameters` computes if it may."""

    def __init__(self, size: int, computes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.computes = computes
        self.table: Tensor
        self.register_buffer("table", torch.empty(size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.computes:
            self.table.copy_(torch.arange(self.table.numel()) / 3)


@pytest.mark.parametrize("source", ["the file", "the module", "nowhere"])
def test_buffers_on_the_meta_device_get_values_or_a_sentence(tmp_path: Path, source: str) -> None:
    size = 8 if source == "the file" else LARGEST_BUFFER
    model = nn.Sequential(Table(size, computes=True))
    model[0].linear.bfloat16()
    model[0].table += source == "the file"  # not as it was made
    save_compressed(compressed(model), tmp_path / "codes")
    with torch.device("meta"):
        other = nn.Sequential(Table(size, computes=source != "nowhere"))
    other[0].linear.bfloat16()
    if source == "nowhere":
        with pytest.raises(CodedWeightError, match=r"values for the buffers 0\.table"):
            load_compressed_(other, tmp_path / "codes")
        assert all(each.is_meta for each in (*other.parameters(), *other.buffers()))
        return
    load_compressed_(other, tmp_path / "codes")
    assert not [each for each in (*other.parameters(), *other.buffers()) if each.is_meta]
    assert torch.equal(other[0].table, model[0].table)
    assert torch.equal(bits(other[0].linear.weight.decode()), bits(model[0].linear.weight.decode()))


def test_a_model_on_the_meta_device_computes_the_same_bits_once_it_is_loaded(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LLAMA, dtype=torch.bfloat16).eval()
    save_compressed(compressed(model), tmp_path / "codes")
    with torch.device("meta"):
        made = LlamaForCausalLM(LLAMA).to(torch.bfloat16).eval()
    load_compressed_(made, tmp_path / "codes")
    with torch.no_grad():
        assert torch.equal(made(IDS).logits, model(IDS).logits)


def test_buffers_that_were_rounded_are_named(tmp_path: Path, recwarn: Any) -> None:
    model = LlamaForCausalLM._from_config(LLAMA, dtype=torch.bfloat16)
    save_compressed(compressed(model), tmp_path / "codes")
    load_compressed_(LlamaForCausalLM._from_config(LLAMA, dtype=torch.bfloat16), tmp_path / "codes")
    assert not [w for w in recwarn if "buffers" in str(w.message)]
    with pytest.warns(UserWarning, match=r"inv_freq \(bfloat16 here and float32 there\)"):
        load_compressed_(llama(), tmp_path / "codes")


def test_a_file_of_the_first_version_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    rewritten(path, lambda note, _: (note.update(version=1), note.pop("buffers")))
    target = strange()
    load_compressed_(target, path)
    assert len(compressed_weights(target)) == 2


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_compressed(compressed(strange()), path)
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        note = json.loads(file.metadata()[METADATA])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(note, tensors)
    save_file(tensors, path, metadata={METADATA: json.dumps(note)})


def drop(note: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors.pop("1.bias")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (
        lambda path: rewritten(path, lambda note, tensors: tensors["0.weight.codes"].add_(1)),
        "checksum",
    ),
    "another version": (
        lambda path: rewritten(path, lambda note, tensors: note.update(version=3)),
        "version 3",
    ),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a whole"),
    "dense": (lambda path: save_file({"0.weight": torch.ones(1)}, path), "load_state_dict"),
    "a tensor missing": (lambda path: rewritten(path, drop), "1.bias"),
    "a tensor too many": (
        lambda path: rewritten(path, lambda note, t: t.update(extra=torch.ones(1))),
        "extra",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_not_right_is_refused(case: str, tmp_path: Path) -> None:
    spoil, needed = FILES[case]
    path = saved(tmp_path)
    spoil(path)
    target = strange()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CodedWeightError, match=needed):
        load_compressed_(target, path)
    for name, value in target.state_dict().items():
        assert torch.equal(bits(value.bfloat16()), bits(before[name].bfloat16()))


def test_files_of_another_shape_or_of_nothing_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = strange()
    other[1] = nn.Linear(128, 64).bfloat16()
    with pytest.raises(CodedWeightError, match="shape"):
        load_compressed_(other, path)
    with pytest.raises(CodedWeightError, match="compress_"):
        save_compressed(strange(), path)


def test_a_missing_safetensors_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MemeffError, match="safetensors is not installed"):
        save_compressed(compressed(strange()), tmp_path / "x")


def test_the_verbs_are_public() -> None:
    for name in ("compress_", "decompress_", "save_compressed", "load_compressed_"):
        assert callable(getattr(memeff_compile, name))
