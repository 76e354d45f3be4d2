"""Reports of whole models fit a screen: a decoder of 32 layers, and a model for images."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import memeff_compile
from memeff_compile.report import Report
from tests.integrations.tiny import llama

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
OPTIONS = {"memeff.inner": "eager"}


def caches(config: Any) -> dict[str, Any]:
    return {
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=32),
        "4 bits": lambda: memeff_compile.KVCache(config, max_cache_len=32, bits=4),
    }


@pytest.mark.slow  # captures 32 layers twice, a minute each
@pytest.mark.parametrize("kind", ["static", "4 bits"])
def test_a_decoding_model_of_32_layers_takes_at_most_40_lines(kind: str) -> None:
    model = llama(num_hidden_layers=32, head_dim=16).eval()
    cache = caches(model.config)[kind]()
    model.compile(backend="memeff", options=OPTIONS)
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    report = memeff_compile.last_report()
    assert len(str(report).splitlines()) <= 4
    assert len(report.details().splitlines()) <= 40
    said = json.loads(report.to_json())["graphs"][-1]["records"]
    modules = {module for record in said for module in (record["module"], *record["also"])}
    assert modules >= {f"model.layers.{n}.self_attn" for n in range(32)}
    assert Report.from_json(report.to_json()) == report


@pytest.mark.slow  # about 25 graphs
def test_a_model_with_images_takes_at_most_25_lines() -> None:
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    text = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_scaling": rope}  # type: ignore[dict-item]
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tokens = {"image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, vision_end_token_id=153, **tokens
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    model.compile(backend="memeff", options=OPTIONS)
    ids = torch.tensor([[1, 152, 150, 150, 150, 150, 153, 2, 3, 4, 5, 6]])
    grid, pixels = torch.tensor([[1, 4, 4]]), torch.randn(16, 96)
    images = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == 150) * 1}
    model(input_ids=ids, labels=ids, **images).loss.backward()
    report = memeff_compile.last_report()
    assert len(report.graphs) > 10
    assert report.rewrites("fuse_linear_cross_entropy") == 1
    assert len(str(report).splitlines()) <= 4
    assert len(report.details().splitlines()) <= 25
    assert Report.from_json(report.to_json()) == report
