"""The tables of low-bit attention on a tiny model: every row, and what must hold in any model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    sys.path.insert(0, str(BENCHMARKS))
    import attention_ablation

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    for layer in model.model.layers:  # attention of a new model is all but uniform
        layer.self_attn.q_proj.weight.data.mul_(20.0)
        layer.self_attn.k_proj.weight.data.mul_(20.0)
    tokens = torch.randint(0, 97, (4, 40))
    return list(attention_ablation.tables(model, tokens, 2))


def of(found: list[dict[str, Any]], table: str) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in found if row["table"] == table}


def test_every_table_has_its_rows(found: list[dict[str, Any]]) -> None:
    counts = {table: len(of(found, table)) for table in ("1", "11", "2, 3", "4, 5", "6")}
    assert counts == {"1": 4, "11": 6, "2, 3": 6, "4, 5": 4, "6": 2}


def test_what_is_replaced_is_what_the_model_computes(found: list[dict[str, Any]]) -> None:
    end = of(found, "11")
    assert of(found, "1")["exact"]["against_exact"] == 1.0
    assert abs(end["8b+f16"]["against_exact"] - 1.0) < 0.01
    assert abs(end["8b"]["against_exact"] - 1.0) < 0.05
    assert end["8b"]["perplexity"] != end["4b"]["perplexity"]


def test_distances_are_ordered_as_arithmetic_has_it(found: list[dict[str, Any]]) -> None:
    kinds = of(found, "4, 5")
    error = {name: row["average"]["relative_l1"] for name, row in kinds.items()}
    assert error["f16"] < error["e4m3"] < error["e5m2"]
    for row in kinds.values():
        assert row["worst"]["relative_l1"] >= row["average"]["relative_l1"]
    scales = of(found, "2, 3")
    token, tensor = (scales[name]["average"]["relative_l1"] for name in ("token", "tensor"))
    assert token < tensor


def test_the_benchmark_of_low_bits_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quantized_attention

    out = tmp_path / "rows.jsonl"
    for part in ("accuracy", "prefill"):
        monkeypatch.setattr(
            sys, "argv", ["", "--size", "tiny", "--part", part, "--depths", "16", "--out", str(out)]
        )
        quantized_attention.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 3
    by_level = {row["method"]: row for row in rows if row["kind"] == "iid" and row["causal"]}
    assert by_level["8b+f16"]["relative_l1"] < by_level["8b"]["relative_l1"] < 0.06
