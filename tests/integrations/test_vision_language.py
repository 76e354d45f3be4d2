"""Vision-language models of transformers: the loss is fused, training and generation are eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import memeff_compile
from tests.integrations.tiny import OPTIONS, assert_same_gradients, gradients

pytestmark = pytest.mark.slow

IMAGE, IMAGES = 150, 4  # the id of an image token, and the number of image tokens per image
TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
PATCHES = {**TOWER, "patch_size": 4}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}
# Names of the classes, and arguments of their configurations.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "projection_dim": 32},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "PaliGemma": {
        "text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "projection_dim": 32,
        "hidden_size": 32,
    },
    "Gemma3": {
        "text_config": {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": IMAGES,
        "image_token_index": IMAGE,
        "boi_token_index": 151,
        "eoi_token_index": 152,
    },
    "SmolVLM": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": PATCHES,
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "InternVL": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**PATCHES, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
    },
    "Qwen2VL": {
        "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        "image_token_id": IMAGE,
        "video_token_id": 151,
        "vision_start_token_id": 152,
        "vision_end_token_id": 153,
    },
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def inputs(name: str) -> dict[str, Tensor]:
    """Return two rows of text with an image each, as the family's processor returns them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 140, (2, 12 + IMAGES), generator=generator)
    row = [152, *[IMAGE] * IMAGES, 153] if name == "Qwen2VL" else [IMAGE] * IMAGES
    ids[:, 1 : 1 + len(row)] = torch.tensor(row)
    is_image = (ids == IMAGE).long()
    sizes = {"SmolVLM": (2, 1, 3, 16, 16), "Qwen2VL": (32, 96)}.get(name, (2, 3, 16, 16))
    more = {
        "PaliGemma": {"token_type_ids": 1 - is_image},
        "Gemma3": {"token_type_ids": is_image},
        "Qwen2VL": {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": is_image},
    }.get(name, {})
    return {"input_ids": ids, "pixel_values": torch.randn(sizes, generator=generator), **more}


@pytest.mark.parametrize("name", FAMILIES)
def test_training_and_generation_are_eagers_with_the_loss_fused(name: str) -> None:
    model: Any = build(name)
    eager = copy.deepcopy(model)
    given = inputs(name)
    labels = given["input_ids"].masked_fill(given["input_ids"] >= IMAGE, -100)
    expected = eager(**given, labels=labels)
    expected.loss.backward()

    model.compile(backend="memeff", options=OPTIONS)
    out = model(**given, labels=labels)
    out.loss.backward()
    changed = {(r.pass_name, r.code, r.module) for r in memeff_compile.last_report().records}
    assert ("fuse_linear_cross_entropy", "rewrote", "lm_head") in changed
    assert ("defer_logits", "logits_deferred", "lm_head") in changed
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(out.logits + 0, expected.logits, rtol=1e-5, atol=1e-5)
    # For a part whose output is not read, AOTAutograd writes zeros where eager leaves None.
    ours, theirs = gradients(model), gradients(eager)
    assert not any(ours[name].any() for name in ours.keys() - theirs.keys())
    assert_same_gradients({name: ours[name] for name in theirs}, theirs)

    model.eval()
    eager.eval()
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**given, **settings), eager.generate(**given, **settings))
