"""Packed ternary models through transformers' save_pretrained and from_pretrained."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.model import PackedTernaryLinear, quantizers
from tests.support.fresh_python import FreshPython

transformers = pytest.importorskip("transformers", reason="save_pretrained is of transformers")

IDS = torch.arange(8).view(1, 8)


def config(**more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    return transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=2, attention_bias=True, **sizes, **more
    )


def packed(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    torch.manual_seed(0)
    # As from_pretrained makes it: a model cast afterwards has its rotary table cast with it.
    model = transformers.AutoModelForCausalLM.from_config(config(**more), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    memeff_compile.ternarize_(model, "a4.8", skip=["model.layers.1.mlp.up_proj"])
    return memeff_compile.pack_ternary_(model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def linears(model: nn.Module) -> dict[str, str]:
    return {p: m.kind for p, m in model.named_modules() if isinstance(m, PackedTernaryLinear)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_a_packed_model_comes_back_bit_for_bit_from_shards(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    model = packed(dtype, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "1", max_shard_size="8KB")
    assert len(list((tmp_path / "1").glob("*.safetensors"))) > 1
    auto = transformers.AutoModelForCausalLM
    again, info = auto.from_pretrained(tmp_path / "1", output_loading_info=True)
    assert not any(info.values()), info
    assert linears(again) == linears(model)
    assert len(set(linears(model).values())) == 3
    assert again.dtype == dtype
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "2")  # what was loaded is saved as what was packed
    third = memeff_compile.from_pretrained(tmp_path / "2")
    assert linears(third) == linears(model)
    assert torch.equal(logits(third), logits(model))
    files = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in "12"]
    dense = sum(p.numel() for p in transformers.LlamaForCausalLM(config()).parameters())
    assert max(files) < dense * dtype.itemsize


LOAD = """
{first}
import torch
from transformers import AutoModelForCausalLM
try:
    model = AutoModelForCausalLM.from_pretrained({path!r})
except RuntimeError as error:
    print("refused:", error)
    import memeff_compile
    model = AutoModelForCausalLM.from_pretrained({path!r})
with torch.no_grad():
    print(torch.equal(model(input_ids=torch.arange(8).view(1, 8)).logits, torch.load({wanted!r})))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "ours too late"])
def test_another_process_needs_our_import_in_any_order(
    tmp_path: Path, fresh_python: FreshPython, order: str
) -> None:
    model = packed()
    model.save_pretrained(tmp_path / "model")
    torch.save(logits(model), tmp_path / "wanted.pt")
    given = {"path": str(tmp_path / "model"), "wanted": str(tmp_path / "wanted.pt")}
    first = "import memeff_compile" if order == "ours first" else ""
    ran = fresh_python(LOAD.format(first=first, **given))
    assert ran.stdout.splitlines()[-1] == "True", ran.stderr
    # Without our import transformers says that it does not know the mark, and stops at a shape.
    assert ("refused:" in ran.stdout) == (order == "ours too late"), ran.stdout
    assert ("got memeff_ternary" in ran.stderr) == (order == "ours too late"), ran.stderr


def test_the_quantizer_is_found_whatever_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = importlib.import_module("transformers.quantizers.auto")

    class Old:
        """A finder of the form before Python 3.4, which 3.12 no longer calls."""

        def find_module(self, *_: object) -> None:
            return None

    twice: list[Any] = [quantizers._BesideQuantizers(), quantizers._BesideQuantizers()]
    monkeypatch.setattr(sys, "meta_path", [Old(), *twice, *sys.meta_path])
    importlib.reload(auto)  # fills new tables
    ours = sys.modules["memeff_compile.model.ternary.pretrained"]
    assert auto.AUTO_QUANTIZER_MAPPING[ours.METHOD] is ours.PackedTernaryQuantizer
    again = importlib.reload(ours)
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING[ours.METHOD] is again.PackedTernaryConfig


def test_arguments_of_from_pretrained_hold_for_packed_linears(tmp_path: Path) -> None:
    model = packed()
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    half = auto.from_pretrained(tmp_path, dtype=torch.float16)
    projection = half.model.layers[0].self_attn.q_proj
    assert (half.dtype, projection.bias.dtype) == (torch.float16, torch.float16)
    assert projection.weight_scale.dtype == torch.float32
    parts = ("embed_tokens", "layers.0", "norm", "rotary_emb")
    places = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
    apart = {**places, "model.layers.1": "disk"}
    for where, buffers in (({"": "cpu"}, False), (apart, False), (apart, True)):
        off = {"offload_folder": tmp_path / "off", "offload_buffers": buffers}
        placed = auto.from_pretrained(tmp_path, device_map=where, **off)
        assert torch.equal(logits(placed), logits(model))


def test_heads_and_base_models_read_each_others_files(tmp_path: Path) -> None:
    model = packed()
    with torch.no_grad():
        wanted = model.model(input_ids=IDS).last_hidden_state
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "base")
    for kind, folder in (
        (transformers.LlamaModel, "whole"),
        (transformers.LlamaModel, "base"),
        (transformers.LlamaForCausalLM, "base"),
        (transformers.LlamaForSequenceClassification, "whole"),
    ):
        other = kind.from_pretrained(tmp_path / folder)
        base = getattr(other, "model", other)
        with torch.no_grad():
            assert torch.equal(base(input_ids=IDS).last_hidden_state, wanted), (kind, folder)
    with pytest.raises(UnsupportedInputError, match="Load it as the class that was saved"):
        transformers.GPT2Model.from_pretrained(
            tmp_path / "whole",
            config=transformers.GPT2Config(
                n_embd=32, n_head=2, n_layer=1, quantization_config=model.config.quantization_config
            ),
        )


def test_a_copy_a_part_and_a_model_packed_from_inside_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config()).eval()
    memeff_compile.pack_ternary_(memeff_compile.ternarize_(model.model))
    for number, saved in enumerate((model, copy.deepcopy(model))):
        saved.save_pretrained(tmp_path / str(number))
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / str(number))
        assert torch.equal(logits(again), logits(model))


def test_norms_and_biases_of_bitnet_layers_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config(dtype="bfloat16")).bfloat16().save_pretrained(
        tmp_path / "a"
    )
    file = tmp_path / "a" / "config.json"
    how = {"linear_class": "autobitlinear", "quantization_mode": "offline", "use_rms_norm": True}
    values = {
        **json.loads(file.read_text()),
        "quantization_config": {"quant_method": "bitnet", **how},
    }
    file.write_text(json.dumps(values))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "a").eval()
    for module in model.modules():
        if type(module).__name__ == "AutoBitLinear":
            nn.init.normal_(module.rms_norm.weight)
            module.weight_scale.fill_(0.25)
            module.weight.data = torch.randint(-1, 2, module.weight.shape).to(torch.bfloat16)
            if module.bias is not None:
                nn.init.normal_(module.bias)
    memeff_compile.pack_ternary_(model)
    projection = model.model.layers[0].self_attn.q_proj
    assert projection.norm is not None
    assert projection.bias.dtype == torch.float32  # multiplied by a scale in float32
    model.save_pretrained(tmp_path / "b")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.equal(logits(again), logits(model))
    assert again.model.layers[0].self_attn.q_proj.bias.dtype == torch.float32
    projection.norm = nn.LayerNorm(32)
    with pytest.raises(UnsupportedInputError, match="a LayerNorm"):
        model.save_pretrained(tmp_path / "c")


def test_dense_weights_under_a_packed_config_are_refused(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(config()).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedInputError, match=r"has no model\.layers\.0.*packed, and the config"
    ):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=packed().config)


def test_a_trainer_refuses_a_packed_model_as_any_quantised_one() -> None:
    with pytest.raises(ValueError, match="purely quantized"):
        transformers.Trainer(packed())


def test_a_wrapper_with_a_save_pretrained_of_its_own_refuses(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def save_pretrained(self, folder: Path) -> None:
            raise AssertionError(folder)

    wrapper = Wrapper(transformers.LlamaForCausalLM(config()))
    memeff_compile.pack_ternary_(memeff_compile.ternarize_(wrapper))
    with pytest.raises(UnsupportedInputError, match="Save the transformers model inside it"):
        wrapper.save_pretrained(tmp_path)
    wrapper.model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(wrapper.model.eval()))
