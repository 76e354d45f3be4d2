"""explain_cache: its bytes are those of allocated caches, and a size that it says fits does fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import memeff_compile
from memeff_compile import __main__ as command_line
from memeff_compile.errors import ExplainError, UnsupportedInputError
from memeff_compile.model.cache.kv_cache import KVCache
from memeff_compile.planning.caches import STEP_ROOM

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


def build(family: str = "Llama", device: str = "meta", **settings: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**TINY, **settings})
    with torch.device(device):
        return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Llama", {}), ("Gemma2", {"sliding_window": 64})],
    ids=["all layers see all", "one layer sees a window"],
)
def test_the_bytes_are_those_of_a_cache_that_is_filled(
    family: str, settings: dict[str, Any]
) -> None:
    model = build(family, "cpu", **settings).eval()
    plan = memeff_compile.explain_cache(model, memory="2GiB", batch=3, length=500)
    assert plan.weights == sum(p.nbytes for p in model.parameters())
    for mode in plan.modes:
        cache = KVCache(model.config, 500, mode.bits)
        with torch.no_grad():
            model(input_ids=torch.zeros(3, 8, dtype=torch.int64), past_key_values=cache)
        # Layers share the places of the tokens they keep; the plan counts them in each.
        shared = 0 if mode.bits == 16 else 3 * 2 * 4 * 4
        coded = sum(hasattr(layer, "counts") for layer in cache.layers)
        assert mode.total == cache.nbytes + shared * max(0, coded - 1), mode.bits


@pytest.mark.parametrize(("start", "values_only"), [(0, False), (1, False), (1, True)])
def test_the_bytes_of_merged_layers_are_those_of_a_cache_that_is_filled(
    start: int, *, values_only: bool
) -> None:
    given = {"start_layer": start, "retained": 0.03, "values_only": values_only}
    merge = memeff_compile.MiniCache(**given)  # type: ignore[arg-type]
    model = build("Llama", "cpu", num_hidden_layers=4).eval()
    asked = {"memory": "2GiB", "batch": 3, "merge": merge}
    plan = memeff_compile.explain_cache(model, length=700, **asked)  # type: ignore[arg-type]
    for mode in plan.modes:
        here = None if values_only and mode.bits == 16 else merge
        cache = KVCache(model.config, 700, mode.bits, merge=here)
        with torch.no_grad():
            model(input_ids=torch.zeros(3, 8, dtype=torch.int64), past_key_values=cache)
        alone = sum(hasattr(x, "counts") and not hasattr(x, "pair") for x in cache.layers)
        shared = 3 * 2 * 4 * 4  # the places of the tokens that layers keep: the plan's are each's
        assert abs(mode.total - cache.nbytes) <= shared * max(1, alone), mode.bits
    assert f"{4 - 2 * start} layers share" in str(plan)
    full = memeff_compile.explain_cache(model, length=128 + 9 * 64, **asked)  # type: ignore[arg-type]
    for mode in full.modes:
        names = {str(symbol): symbol for symbol in mode.formula.free_symbols}
        assert mode.formula.subs({names["B"]: 3, names["N"]: 704}) == mode.total
    longest = full.modes[2].longest or 0
    again = [
        memeff_compile.explain_cache(model, length=longest + more, **asked).modes[2].total  # type: ignore[arg-type]
        for more in (0, 1)
    ]
    room = full.memory - full.weights - STEP_ROOM
    assert again[0] <= room < again[1]


def test_what_is_said_to_fit_fits_and_one_more_does_not() -> None:
    model = build()
    asked = {"memory": "1100MiB", "scheme": "per_head", "group": 32}
    plan = memeff_compile.explain_cache(model, batch=2, length=1000, **asked)  # type: ignore[arg-type]
    room = plan.memory - plan.weights - STEP_ROOM
    for place, mode in enumerate(plan.modes):
        for batch, length, fits in (
            (2, mode.longest or 0, True),
            (2, (mode.longest or 0) + 1, False),
            (mode.largest_batch, 1000, True),
            (mode.largest_batch + 1, 1000, False),
        ):
            again = memeff_compile.explain_cache(model, batch=batch, length=length, **asked)  # type: ignore[arg-type]
            assert (again.modes[place].total <= room) == fits, (mode.bits, batch, length)
    longest = [mode.longest or 0 for mode in plan.modes]
    assert longest == sorted(longest)


def test_a_formula_is_exact_where_groups_are_full() -> None:
    plan = memeff_compile.explain_cache(build(), memory="2GiB", batch=2, length=128 + 5 * 64)
    for mode in plan.modes:
        names = {str(symbol): symbol for symbol in mode.formula.free_symbols}
        assert mode.formula.subs({names["B"]: 2, names["N"]: 448}) == mode.total


@pytest.mark.parametrize("depth", [96, 80, 512])
def test_a_head_dimension_without_codes_has_the_exact_row_alone(depth: int) -> None:
    plan = memeff_compile.explain_cache(build(head_dim=depth), memory="2GiB")
    assert [mode.bits for mode in plan.modes] == [16]
    assert f"the head dimension is {depth}, and codes are for 16, 32" in str(plan)
    assert plan.to_dict()["notes"] == list(plan.notes)


def test_falcon_keeps_one_head_and_what_is_not_told_is_refused() -> None:
    def falcon(**settings: Any) -> Any:
        config = transformers.FalconConfig(
            vocab_size=64, hidden_size=64, num_attention_heads=4, num_hidden_layers=2, **settings
        )
        return transformers.FalconForCausalLM(config).eval()

    model = falcon(multi_query=True)
    cache = KVCache(model.config, 300, 16)
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 8, dtype=torch.int64), past_key_values=cache)
    plan = memeff_compile.explain_cache(model, memory="2GiB", batch=3, length=300)
    assert plan.modes[0].total == cache.nbytes
    for settings in (
        {"multi_query": False, "num_kv_heads": 4},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ):
        with pytest.raises(ExplainError, match="does not tell num_key_value_heads"):
            memeff_compile.explain_cache(falcon(**settings), memory="2GiB")


@pytest.mark.parametrize("family", ["GPT2", "OPT", "GPTNeoX", "GPTJ", "Bloom", "XGLM"])
def test_where_nothing_is_said_of_keys_they_have_as_many_heads_as_queries(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    given = {"OPT": {"ffn_dim": 64, "word_embed_proj_dim": 64}, "GPTJ": {"rotary_dim": 8}}
    names = {"XGLM": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}}
    made = names.get(family, {**sizes, **given.get(family, {})})
    config = getattr(transformers, f"{family}Config")(**{"vocab_size": 64, **made})
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, kind)(config).eval()
    plan = memeff_compile.explain_cache(model, memory="4GiB", batch=3, length=300)
    cache = KVCache(model.config, 300, 16)
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 8, dtype=torch.int64), past_key_values=cache)
    assert plan.modes[0].total == cache.nbytes


def test_keys_and_values_of_sizes_of_their_own_are_refused() -> None:
    model = build()
    model.config.qk_rope_head_dim, model.config.v_head_dim = 64, 128
    with pytest.raises(ExplainError, match="has qk_rope_head_dim and v_head_dim"):
        memeff_compile.explain_cache(model, memory="2GiB")


@pytest.mark.skipif(
    not hasattr(transformers, "Gemma4TextConfig"),
    reason=f"transformers {transformers.__version__} has no Gemma 4",
)
def test_layers_of_sizes_of_their_own_are_refused() -> None:
    config = transformers.Gemma4TextConfig(**TINY)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ExplainError, match="layers, have sizes of their own"):
        memeff_compile.explain_cache(model, memory="2GiB")


def test_where_every_layer_sees_a_window_any_context_fits() -> None:
    model = build("Gemma2", layer_types=["sliding_attention"] * 2, sliding_window=64)
    plan = memeff_compile.explain_cache(model, memory="2GiB", length=1 << 30)
    assert {mode.longest for mode in plan.modes} == {None}
    assert "any" in str(plan)
    assert "does not grow" in str(plan)
    # keys and values, layers, heads, channels, tokens with room for 16 more, float32
    window = 2 * 2 * 2 * 32 * (64 + 16) * 4
    assert {mode.total for mode in plan.modes} == {window}
    tight = plan.weights + STEP_ROOM + window - 1
    assert memeff_compile.explain_cache(model, memory=tight).modes[0].longest == 79


def test_layers_with_a_state_are_said_to_be_left_out() -> None:
    model = build()
    before = memeff_compile.explain_cache(model, memory="2GiB")
    model.config.layer_types = ["linear_attention", "full_attention"]
    plan = memeff_compile.explain_cache(model, memory="2GiB")
    assert [2 * mode.total for mode in plan.modes] == [mode.total for mode in before.modes]
    assert "The states of 1 layers" in str(plan)


def test_where_nothing_fits_it_says_so() -> None:
    plan = memeff_compile.explain_cache(build(), memory="1GiB")
    assert {mode.longest for mode in plan.modes} == {0}
    assert "none fits" in str(plan)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ExplainError, match="no model of transformers"):
        memeff_compile.explain_cache(torch.nn.Linear(2, 2), memory="1GiB")
    with pytest.raises(ExplainError, match="such as 80GB"):
        memeff_compile.explain_cache(build(), memory="much")
    with pytest.raises(ExplainError, match="at least 1"):
        memeff_compile.explain_cache(build(), memory="1GiB", batch=0)
    with pytest.raises(ExplainError, match="length is '2'"):
        memeff_compile.explain_cache(build(), memory="1GiB", length="2")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInputError, match="group is 5"):
        memeff_compile.explain_cache(build(), memory="1GiB", group=5)


def test_the_command_prints_a_table_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, data = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps({**TINY, "model_type": "llama"}))
    arguments = ["explain", str(config), "--cache", "--batch", "4", "--length", "900"]
    status = command_line.main([*arguments, "--memory", "2GiB", "--json", str(data)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "longest, batch 4" in printed.out
    plan = json.loads(data.read_text())
    assert [mode["bits"] for mode in plan["modes"]] == [16, 8, 4, 3, 2]
    assert f"{plan['modes'][2]['longest']:,}" in printed.out
    assert command_line.main([*arguments, "--memory", "2GiB", "--merge", "0"]) == 0
    assert "2 layers share" in capsys.readouterr().out
    assert command_line.main(arguments) == 1
    assert "give --memory" in capsys.readouterr().err


def test_the_command_merges_values_of_layers_with_a_window_between_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    hybrid = {"model_type": "gemma2", "num_hidden_layers": 4, "layer_types": kinds}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, **hybrid, "sliding_window": 64}))
    asked = ["explain", str(config), "--cache", "--memory", "2GiB", "--quiet"]
    assert command_line.main([*asked, "--merge", "0"]) == 1
    said = capsys.readouterr().err
    assert "the layers 1-3" in said
    assert said.endswith("In this command, --values-only is values_only=True.\n")
    assert command_line.main([*asked, "--merge", "0", "--values-only"]) == 0
    assert "2 layers share" in capsys.readouterr().out
    assert command_line.main([*asked, "--merge", "50"]) == 1
    assert "--values-only" not in capsys.readouterr().err
    assert command_line.main([*asked, "--values-only"]) == 1
    assert "give --merge, too" in capsys.readouterr().err
