"""A model of transformers: calibration and compiler call its attention by the same names."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memeff_compile
from tests.support.coded_attention import relative_l1


def test_the_table_of_a_llama_reaches_every_layer() -> None:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").bfloat16().eval()
    ids = torch.randint(0, 97, (2, 40))
    table = memeff_compile.calibrate_attention(model, [{"input_ids": ids}], min_score=0.5)
    assert set(table["levels"]) == {f"model.layers.{layer}.self_attn" for layer in range(2)}
    options = {
        "memeff.attention": table,
        "memeff.attention.length": 0,
        "memeff.inner": "aot_eager",
    }
    memeff_compile.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="memeff", options=options)(input_ids=ids).logits
        wanted = model(input_ids=ids).logits
    (record,) = [
        r for r in memeff_compile.last_report().records if r.pass_name == "quantize_attention"
    ]
    assert (record.action, record.sites) == ("rewrote", 2)
    assert relative_l1(found, wanted) <= 0.06
