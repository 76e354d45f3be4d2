"""Checkpoints in the published layouts of ternary models, with random weights.

transformers has three: two bits packed in bytes whose products a scale divides (`bitlinear`), codes
in 16 bits with a factor (`autobitlinear`, offline), and weights that each call quantises (online).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.kernels.device import planned_for
from memeff_compile.model import PackedTernaryLinear

transformers = pytest.importorskip("transformers", reason="the layouts are those of transformers")

IDS = torch.arange(3, 27).view(2, 12)
LAYOUTS = {
    "packed": {"linear_class": "bitlinear", "quantization_mode": "offline"},
    "offline": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


def write(folder: Path, layout: str) -> None:
    """Write a BitNet checkpoint in a layout, as one that was trained elsewhere comes."""
    from safetensors.torch import save_file
    from transformers.integrations.bitnet import pack_weights

    torch.manual_seed(0)
    config = transformers.BitNetConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.BitNetForCausalLM(config)
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and layout != "online":
            weight = module.weight.detach()
            size = weight.abs().mean()
            codes = (weight / size).round().clamp(-1, 1)
            is_packed = layout == "packed"
            state[f"{name}.weight"] = pack_weights(codes.clone()) if is_packed else codes
            state[f"{name}.weight_scale"] = (1 / size if is_packed else size).view(1)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    found = config.to_dict() | {"architectures": ["BitNetForCausalLM"], "dtype": "float32"}
    found["quantization_config"] = {"quant_method": "bitnet", **LAYOUTS[layout]}
    (folder / "config.json").write_text(json.dumps(found))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    # transformers' packed layer has a compiled function inside.
    with torch.compiler.set_stance("force_eager"):
        found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_gives_transformers_own_logits_and_stays_packed_through_a_folder(
    layout: str, tmp_path: Path
) -> None:
    write(tmp_path, layout)
    wanted = logits(load(tmp_path))
    assert wanted.std() > 0.05
    model = memeff_compile.pack_ternary_(load(tmp_path))
    found = logits(model)
    assert error(found, wanted) < 1e-5
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    kinds = [m.kind for m in again.modules() if isinstance(m, PackedTernaryLinear)]
    assert kinds == ["int8"] * 14
    assert torch.equal(logits(again), found)


@pytest.mark.parametrize("layout", ["packed", "online"])
def test_the_backend_serves_a_published_checkpoint(layout: str, tmp_path: Path) -> None:
    """Packed in two bits; and as it is, if its own source quantises."""
    write(tmp_path, layout)
    model = load(tmp_path)
    wanted = logits(model)
    if layout == "packed":
        memeff_compile.pack_ternary_(model)
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
    with torch.no_grad(), planned_for(torch.device("cuda", 0)):
        assert error(compiled(input_ids=IDS).logits, wanted) < 1e-5
    after = memeff_compile.graphs()[-1].after
    assert after.count("aten.linear(") == 1  # the head
    assert after.count("memeff.ternary_linear(") == 8  # q, k and v share one, as do gate and up
