"""fit: the settings that train or serve a model on a card, and the lines to write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memeff_compile
from memeff_compile import __main__ as command_line
from memeff_compile.errors import ExplainError
from memeff_compile.kernels.device import gpu
from memeff_compile.planning import fit as fitting
from memeff_compile.planning.cards import CARDS, card_of, target_of
from memeff_compile.planning.fit import KINDS, Fit, Row, adapted, fit, lines_of
from memeff_compile.planning.models import build
from memeff_compile.planning.serving import fit_serving
from memeff_compile.planning.sizes import Sizes
from memeff_compile.report import format_bytes
from tests.support.stacks import Stack

pytest.importorskip("transformers", reason="builds transformers models from their configs")

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture(scope="module")
def found(config: Any) -> Fit:
    return fit(config, memory="1GiB", gpu="rtx4090", length=512, batch=2, progress=False)


def row(found: Fit, captured: str, **setting: Any) -> Row:
    """Return the row of a setting, with memeff."""
    (found_row,) = (
        row
        for row in found.rows
        if row.kind.captured == captured and row.kind.is_ours and row.kind.setting == setting
    )
    assert found_row.peak is not None
    return found_row


@pytest.mark.slow
def test_a_row_holds_what_its_setting_keeps(found: Fit) -> None:
    weights = 2 * found.parameters
    adam = row(found, "checkpointing", optimizer="adamw")
    inside = row(found, "checkpointing", optimizer="adamw", in_backward=True)
    eight = row(found, "checkpointing", optimizer="adamw8bit")
    sgd = row(found, "checkpointing", optimizer="sgd", in_backward=True)
    assert adam.peak - eight.peak == pytest.approx(found.parameters * (4 - 2.03125), rel=1e-3)
    coded = 2 * 6 * 1024 * (2 * 1024 + 3 * 2048)  # weights of 2^20 elements or more
    # gradients of one block instead of all blocks
    assert 0.8 * coded < adam.peak - inside.peak < weights
    assert inside.peak - sgd.peak == 2 * weights
    packed = row(found, "checkpointing", optimizer="sgd", in_backward=True, weights="win4")
    largest = 2 * 1024 * 2048
    expected = coded * (1 - 1.01 * 12.02 / 16)
    # one weight is decoded inside a block
    assert -1 <= expected - (sgd.peak - packed.peak) <= largest
    frozen = row(found, "adapters", optimizer="adamw")
    adapters = 6 * 16 * (4 * 1024 + 4 * 1536 + 1024 * 3 + 2048 * 3) * 4
    assert weights < frozen.peak < weights + 4 * adapters + (512 << 20)


@pytest.mark.slow
def test_what_is_said_to_fit_fits_and_one_more_does_not(found: Fit) -> None:
    for each in found.rows:
        assert each.peak is not None
        assert (each.largest_batch >= 2) == (each.peak <= found.room)
        assert (each.longest >= 512) == (each.largest_batch >= 1)
    assert {bool(each.largest_batch) for each in found.rows} == {True, False}


@pytest.mark.slow
def test_the_text_names_the_first_that_fits_and_its_lines(found: Fit) -> None:
    text = str(found)
    first = found.first
    assert first is not None
    number = found.rows.index(first) + 1
    assert f"Row {number} is the first that fits" in text
    for line in lines_of(first.kind.write):
        assert f"      {line}\n" in text
    assert "RTX 4090" in text
    assert "compute capability 8.9" in text
    data = json.loads(found.to_json())
    assert data["gpu"] == "RTX 4090"
    assert [each["peak_bytes"] for each in data["rows"]] == [each.peak for each in found.rows]


def test_where_none_fits_the_nearest_is_named_with_what_is_missing() -> None:
    rows = (Row(KINDS[0], 9 << 30, 0, 0), Row(KINDS[8], 3 << 30, 0, 512))
    small = Fit("Small", 10, Sizes(1, 2048), 2 << 30, None, 16, rows)
    text = " ".join(str(small).split())
    assert (
        "None fits at length 2048. The nearest is row 2, which lacks 1.20 GiB: it takes 3.00 GiB of 1.80 GiB."
        in text
    )
    assert "One sequence of 512 tokens fits with it." in text


def test_the_page_prints_the_memory_that_a_step_may_use() -> None:
    page = " ".join((ROOT / "docs/use/what-fits.md").read_text().split())
    ((name, room),) = re.findall(r"--gpu (\w+) --length \d+ .{0,150} GiB of (\S+ GiB)\.", page)
    card = card_of(name)
    assert format_bytes(Fit("Page", 10, Sizes(1, 2048), card.memory, card, 16, ()).room) == room


def test_a_setting_that_a_model_does_not_have_says_why() -> None:
    why = "compress_ takes bf16 weights"
    rows = (Row(KINDS[1], 1 << 30, 3, 512), Row(KINDS[8], None, 0, 0, why))
    assert why in str(Fit("Small", 10, Sizes(1, 8), 2 << 30, None, 16, rows))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            id=f"{kind.name} ({kind.write})",
            # tier's reference takes seconds per weight on a CPU
            marks=[pytest.mark.slow] if kind.setting.get("weights") == "tier" else [],
        )
        for kind in KINDS
    ],
)
def test_the_lines_run(kind: fitting.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's linear layers are large enough to be compressed."""
    import peft
    import transformers

    class AdamW8bit(torch.optim.AdamW):
        """Stand-in for bitsandbytes' optimizer, which needs a GPU."""

    bitsandbytes = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=AdamW8bit))
    sizes = {**SHAPE, "num_hidden_layers": 1, "vocab_size": 64, "use_cache": False}
    sizes |= {"hidden_size": 256, "intermediate_size": 4096}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    given: dict[str, Any] = {
        "model": model,
        "torch": torch,
        "memeff_compile": memeff_compile,
        "bitsandbytes": bitsandbytes,
        "peft": peft,
    }
    for line in lines_of(kind.write):
        exec(line, given)
    trained = {n: p.detach().clone() for n, p in given["model"].named_parameters()}
    coded = [p for p in given["model"].parameters() if hasattr(p, "codec")]
    assert bool(coded) == ("weights" in kind.setting)
    assert given["model"]._compiled_call_impl is not None
    given["model"]._compiled_call_impl = None  # compilation is not tested here
    ids = torch.arange(8)[None]
    given["model"](input_ids=ids, labels=ids).loss.backward()
    given["optimizer"].step()
    moved = [n for n, p in given["model"].named_parameters() if not torch.equal(p, trained[n])]
    assert moved
    assert all("lora" in name for name in moved) == (kind.captured == "adapters")


@pytest.mark.slow
def test_adapters_take_what_peft_s_take(config: Any) -> None:
    import peft

    how: dict[str, Any] = {"batch": 2, "length": 256, "dtype": "bfloat16"}
    ours = build(str(config), checkpointing=False, **how)
    theirs = build(str(config), checkpointing=True, **how)
    settings = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        model: Any = peft.get_peft_model(theirs.model, settings)
    model.disable_input_require_grads()
    peaks = [
        memeff_compile.explain(each, **ours.kwargs).plan(optimizer="adamw").after.peak
        for each in (adapted(ours.model, 16), model.train())
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-4)


# --- cards ----------------------------------------------------------------------------------------


def test_a_card_is_known_by_its_name() -> None:
    assert card_of("rtx4090") is card_of("NVIDIA GeForce RTX 4090") is card_of("4090")
    assert card_of("a100").gib > 70
    assert 22 << 30 < card_of("rtx4090").memory < 24 << 30
    assert all(key == card.key for key, card in CARDS.items())


@pytest.mark.parametrize(("name", "meant"), [("rtx409", "rtx4090"), ("h100x", "h100"), ("v", "")])
def test_another_name_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ExplainError, match=f"no card in the list.*{meant}"):
        card_of(name)


def test_engines_are_those_of_the_card() -> None:
    from memeff_compile.kernels.linear_cross_entropy import engine_for

    where = torch.device("cuda", 0)
    names = {}
    for name in ("t4", "rtx4090", "h100"):
        with target_of("cuda", name).planned():
            assert gpu(where).capability == card_of(name).capability
            names[name] = engine_for(where, torch.bfloat16, 1024)
    assert names == {"t4": "reference", "rtx4090": "library", "h100": "hopper"}


def test_explain_plans_with_the_engines_and_the_memory_of_the_card() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model = Stack(depth=1).to(torch.bfloat16)
    found = memeff_compile.explain(model, ids, ids, gpu="rtx4090")
    assert "capability 9.0" not in str(found)
    assert "RTX 4090: 23.65 GiB, compute capability 8.9" in str(found)
    assert found.plan().memory == card_of("rtx4090").memory
    assert found.plan(memory="1GiB").memory == 1 << 30


# --- serving --------------------------------------------------------------------------------------


def test_serving_is_weights_times_bits(config: Any) -> None:
    found = fit_serving(config, gpu="rtx3090", batch=4, length=1024)
    assert {(row.codec, row.mode.bits) for row in found.rows} == {
        (codec, bits) for codec in ("dense", "win4", "tier") for bits in (16, 8, 4, 3, 2)
    }
    by = {(row.codec, row.mode.bits): row for row in found.rows}
    assert by["tier", 16].weights < by["win4", 16].weights < by["dense", 16].weights
    assert by["dense", 16].numbers == "exact"
    assert by["win4", 4].numbers == "lossy: cache"
    assert by["win4", 4].line == 'compile(model, weights="win4", kv_cache=4)'
    assert by["dense", 16].mode.total == 4 * 1024 * 6 * 2 * 4 * 128 * 2
    read = by["dense", 16].weights - 2 * 32000 * 1024 + by["dense", 16].mode.total
    assert by["dense", 16].least_ms == pytest.approx(read / 936e6)
    assert "The first that holds 4 x 1024: memeff_compile.compile(model)\n" in str(found)
    assert len(json.loads(found.to_json())["rows"]) == 15


def test_a_model_without_linear_layers_in_its_blocks_has_no_adapters() -> None:
    model = Stack(depth=2)
    model.blocks = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
    with pytest.raises(ExplainError, match=r"no nn\.Linear in its blocks"):
        adapted(model, 4)


def test_a_copy_with_adapters_leaves_the_model_as_it_was() -> None:
    class Switched(Stack):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object) -> None:
            self.checkpointed = True

    model = Switched(depth=2, checkpointed=False)
    found = adapted(model, 4)
    assert not model.checkpointed
    assert all(p.requires_grad for p in model.parameters())
    assert sum(p.numel() for p in found.parameters() if p.requires_grad) == 2 * 2 * 4 * (64 + 256)
    x = torch.ones(1, 8, dtype=torch.int64)
    assert found(x, x)[0].requires_grad


def test_serving_that_does_not_fit_says_what_is_missing(config: Any) -> None:
    text = str(fit_serving(config, memory="1.2GiB", batch=8, length=8192))
    assert 'None fits 8 x 8192. The nearest is compile(model, weights="tier", kv_cache=2)' in text
    assert "lacks" in text


# --- the command ----------------------------------------------------------------------------------


def test_the_command_hands_on_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    asked: dict[str, Any] = {}

    def fake(model: str, **how: Any) -> Fit:
        asked.update(how, model=model)
        return Fit("Small", 10, Sizes(1, 2048), 2 << 30, None, 16, (Row(KINDS[0], 9 << 30, 0, 0),))

    monkeypatch.setattr(fitting, "fit", fake)
    arguments = ["fit", "c.json", "--gpu", "rtx4090", "--memory", "20GB", "--quiet"]
    file = tmp_path / "fit.json"
    assert command_line.main([*arguments, "--json", str(file)]) == 0  # "none fits" is no error
    assert asked["model"] == "c.json"
    assert asked["length"] == 2048
    assert asked["gpu"] == "rtx4090"
    assert asked["memory"] == "20GB"
    assert "None fits" in capsys.readouterr().out
    assert json.loads(file.read_text())["model"] == "Small"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["c.json"], "Say which GPU"),
        (["c.json", "--gpu", "rtx409"], "Did you mean rtx4090"),
        (["c.json", "--memory", "24"], "without a unit"),
        (["nobody/model", "--memory", "24GB"], "Names on a model hub are not looked up"),
        (["c.json", "--memory", "24GB", "--serve"], "There is no config at c.json"),
        (["c.json", "--memory", "24GB", "--json", "none/x.json"], "There is no folder none"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["fit", *arguments]) == 1
    printed = capsys.readouterr()
    assert words in printed.err
    assert not printed.out


def test_a_length_over_the_models_positions_is_named(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    bert = {"model_type": "bert", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**bert, "num_attention_heads": 2, "intermediate_size": 64}))
    assert command_line.main(["fit", str(path), "--gpu", "rtx4090"]) == 1
    said = capsys.readouterr().err
    assert "have 2048 tokens per sequence" in said
    assert "max_position_embeddings=512" in said
    assert "--length 512" in said
    assert "Traceback" not in said + caplog.text
    assert command_line.main(["fit", str(path), "--gpu", "rtx4090", "--length", "512"]) == 0


def test_the_command_serves(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["fit", str(config), "--gpu", "l4", "--serve", "--batch", "2"]) == 0
    assert "cache, 2 x 8192" in capsys.readouterr().out
