"""The cost of the passes: a small share of the compile time."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

import memeff_compile
from tests.support.closeness import needs_compiler


def share(layers: int, inner: str) -> float:
    """Compile one training step of a Llama of width 256; return the share of our passes."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": inner})
    ids = torch.arange(128).view(2, 64)
    started = time.perf_counter()
    compiled(input_ids=ids, labels=ids).loss.backward()
    elapsed = time.perf_counter() - started
    report = memeff_compile.last_report()
    assert report.rewrites("fuse_linear_cross_entropy") == 1
    return sum(graph.seconds for graph in report.graphs) / elapsed


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers", reason="compiles a Llama of transformers")


@pytest.mark.slow
def test_passes_cost_little_even_where_nothing_is_compiled() -> None:
    """Against aot_eager, which generates no code, the share is several times that of Inductor."""
    share(1, "aot_eager")  # imports
    assert share(2, "aot_eager") < 0.1


@needs_compiler
@pytest.mark.slow
def test_passes_take_below_five_per_cent_of_inductors_time() -> None:
    from torch._functorch import config as aot_config
    from torch._inductor import config

    without_caches = config.patch(fx_graph_cache=False)
    with without_caches, aot_config.patch(enable_autograd_cache=False):
        assert statistics.median(share(32, "inductor") for _ in range(3)) < 0.05
