"""Low-bit weights of torchao with a memeff cache: generated tokens and reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memeff_compile
from tests.integrations.frameworks import framework
from tests.support.cached_models import make, prompt

pytestmark = pytest.mark.slow
GIVEN: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def torchao() -> None:
    framework("torchao")


def quantised(bits: int) -> Any:
    from torchao import quantization
    from torchao.quantization.granularity import PerGroup

    config: Any = quantization.Int8WeightOnlyConfig()
    if bits == 4:
        config = quantization.IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(16))
    model: Any = make(num_hidden_layers=1)
    quantization.quantize_(model, config)
    return model


@pytest.mark.parametrize("kv_cache", ["static", 4])
@pytest.mark.parametrize("weights", [8, 4])
def test_steps_over_torchaos_weights_say_the_same(weights: int, kv_cache: Any) -> None:
    plain = quantised(weights)
    memeff_compile.use_kv_cache_(plain, bits=16 if kv_cache == "static" else 4)
    model = memeff_compile.compile(quantised(weights), kv_cache=kv_cache, inner="eager")
    for length in (20, 300):
        ids = prompt(2, length)
        assert torch.equal(model.generate(ids, **GIVEN), plain.generate(ids, **GIVEN))
    assert sum("training" not in str(g).splitlines()[0] for g in memeff_compile.graphs()) == 2
    if kv_cache == 4:
        assert "memeff.coded_kv_cache_attention" in memeff_compile.graphs()[-1].after


def test_compression_leaves_torchaos_weights_with_a_reason() -> None:
    report = str(memeff_compile.compress_(quantised(8), "win4", progress=False))
    assert "q_proj.weight [64, 32]: it is a Int8Tensor; compress it before" in report
