"""The predicted peak of a training step against the GPU's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memeff_compile
from memeff_compile import explain

pytestmark = pytest.mark.gpu

SETTINGS = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "use_cache": False,
}


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "kept"])
def test_predicted_peak_is_the_allocators(checkpointing: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="builds a transformers model")
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SETTINGS), dtype=torch.bfloat16
        ).train()
        ids = torch.randint(0, 32000, (8, 1024))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plan = explain(model, input_ids=ids, labels=ids).plan()
    for backend, side in (("inductor", plan.before), ("memeff", plan.after)):
        memeff_compile.reset()
        compiled: Callable[..., Any] = torch.compile(model, backend=backend)
        for _ in range(3):
            out = compiled(input_ids=ids, labels=ids)
            out.loss.backward()
            model.zero_grad(set_to_none=True)
            del out
            measured = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        print(f"{backend}: predicted {side.peak / 2**30:.3f} GiB, measured {measured / 2**30:.3f}")
        # Six narrow blocks: memory kept by one block's late weight gradients is a tenth of the
        # total.
        assert side.peak == pytest.approx(measured, rel=0.15)
