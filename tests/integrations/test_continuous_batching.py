"""generate_batch of transformers, with its caches and CUDA graphs: eager's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import memeff_compile
from tests.support.cached_models import make, prompt

pytestmark = pytest.mark.slow
NEW = 6


def batch(model: Any, asked: list[list[int]]) -> list[list[int]]:
    how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    found = model.generate_batch(asked, generation_config=how, progress_bar=False)
    assert not [each.error for each in found.values() if each.error]
    return [each.generated_tokens for each in found.values()]


@pytest.mark.parametrize("way", ["in place", "kv_cache", "win4"])
def test_requests_of_other_lengths_get_the_tokens_of_eager(way: str) -> None:
    ids = prompt(3, 20)
    asked = [ids[row, :length].tolist() for row, length in enumerate((20, 13, 7))]
    model: Any = make("Llama", num_hidden_layers=1, intermediate_size=8192)
    expected = [
        model.generate(torch.tensor([each]), max_new_tokens=NEW, do_sample=False)[0, len(each) :]
        for each in asked
    ]
    if way == "kv_cache":
        memeff_compile.compile(model, kv_cache=4, inner="eager")
    else:
        if way == "win4":
            # win4 encodes bf16 weights without loss, so its tokens equal theirs
            model = model.bfloat16()
            expected = [torch.tensor(each) for each in batch(model, asked)]
            memeff_compile.compress_(model, "win4", min_size=0, progress=False)
            kinds = {type(each).__name__ for each in model.parameters()}
            assert "CodedWeight" in kinds
        model.compile(backend="memeff", options={"memeff.inner": "eager"})
    assert batch(model, asked) == [each.tolist() for each in expected]
    graphs = memeff_compile.graphs()
    assert graphs
    # Paged keys are not a memeff cache, and memeff does not record graphs that transformers captures.
    assert not [each for each in graphs if each.replays is not None]
    assert not any("kv_cache" in each.after for each in graphs)
