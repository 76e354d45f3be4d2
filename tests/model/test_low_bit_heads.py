"""use_low_bit_heads_: attention over heads in few bits, in training and with a cache, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import quantized_heads
from memeff_compile.model import use_low_bit_heads_

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def logits(model: Any, **options: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, **options).logits
    return found


def test_attention_gets_quantised_heads_after_their_rotary_embedding(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plain = F.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((query.detach(), key.detach(), value.detach()))
        return plain(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    logits(model)
    with use_low_bit_heads_(model, query=4, key_value=3, first=1):
        logits(model)
    (q, k, v), (rounded_q, rounded_k, rounded_v) = seen
    torch.testing.assert_close(rounded_q, quantized_heads(q, 4))
    torch.testing.assert_close(rounded_k, quantized_heads(k, 3, first=1))
    torch.testing.assert_close(rounded_v, quantized_heads(v, 3, first=1))


def test_undoing_gives_the_former_attention_back(model: Any) -> None:
    before = logits(model)
    undo = use_low_bit_heads_(model, key_value=2)
    assert not torch.allclose(logits(model), before, atol=1e-6)
    undo()
    assert torch.equal(logits(model), before)


def test_a_compiled_model_trains_as_an_uncompiled_one(model: Any) -> None:
    use_low_bit_heads_(model, query=4, key_value=4)
    model(input_ids=IDS, labels=IDS).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert wanted["model.layers.0.self_attn.k_proj.weight"].abs().max() > 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6)


def test_steps_with_a_cache_see_the_heads_that_a_whole_sequence_sees(model: Any) -> None:
    use_low_bit_heads_(model, query=4, key_value=3, first=1)
    with torch.no_grad():
        whole = logits(model)
        cache = memeff_compile.KVCache(model.config, max_cache_len=32, bits=16)
        parts = [
            model(input_ids=part, past_key_values=cache).logits
            for part in IDS.split([7, 1, 1, 1, 1, 1], 1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_served_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedInputError, match="key_value is 5"):
        use_low_bit_heads_(model, key_value=5)
    with pytest.raises(UnsupportedInputError, match="first is -1"):
        use_low_bit_heads_(model, first=-1)
    with (
        use_low_bit_heads_(model),
        pytest.raises(OptionError, match="in few bits already"),
    ):
        use_low_bit_heads_(model)
    model.set_attn_implementation("eager")
    with pytest.raises(OptionError, match="set_attn_implementation"):
        use_low_bit_heads_(model)
    with pytest.raises(OptionError, match="None"):
        use_low_bit_heads_(torch.nn.Linear(2, 2))
