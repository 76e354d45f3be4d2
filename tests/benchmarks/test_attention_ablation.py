"""The tables of low-bit attention on tiny models: every row, and invariants of any model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.scripts import script

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"1": 6, "2, 3": 6, "4, 5": 4, "6": 2, "scores": 1}


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write pictures of no fonts: bars whose place is the class."""
    drawn = numpy.zeros((2, 36, 48, 48), numpy.uint8)
    for place in range(36):
        drawn[:, place, 6 + place : 10 + place, 8:40] = 255
    path = tmp_path_factory.mktemp("glyphs") / "glyphs.npz"
    numpy.savez(path, pictures=drawn)
    return path


@pytest.fixture(scope="module")
def folders(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train and save a tiny transformer of each kind."""
    from benchmarks.models import small_models

    found = {}
    for kind in ("vit", "dit"):
        sizes = small_models.sizes_of(kind, "tiny")
        model, row = small_models.train(kind, sizes, glyphs, "cpu")
        assert row["parameters"] > 0
        found[kind] = tmp_path_factory.mktemp("models") / kind
        for name, weight in model.named_parameters():  # attention of a new model is all but uniform
            if "query" in name or "key" in name or "qkv" in name:
                weight.data.mul_(8.0)
        small_models.save(model, kind, sizes, found[kind])
    return found


def language_model(length: int = 40) -> Any:
    from benchmarks.ablations import attention_subjects
    from benchmarks.models.causal_attention import use_causal_attention

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
    model.set_attn_implementation(use_causal_attention())
    for layer in model.model.layers:  # attention of a new model is all but uniform
        layer.self_attn.q_proj.weight.data.mul_(20.0)
        layer.self_attn.k_proj.weight.data.mul_(20.0)
    tokens, others = torch.randint(0, 97, (2, 4, length))
    return attention_subjects.LanguageModel("a model", model, "loss", 2, tokens, others, 2)


def small(kind: str, glyphs: Path, folders: dict[str, Path]) -> Any:
    from benchmarks.ablations import attention_subjects

    if kind == "language":
        return language_model()
    given = (glyphs, 16, 8, "cpu", torch.float32)
    reader = attention_subjects.classifier(folders["vit"], *given)
    if kind == "vision":
        return reader
    return attention_subjects.painter(folders["dit"], 4, 3, 1.5, "cpu", torch.float32, reader)


@pytest.fixture(scope="module")
def found(glyphs: Path, folders: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    from benchmarks.ablations import attention_ablation

    kinds = ("language", "vision", "diffusion")
    return {kind: list(attention_ablation.tables(small(kind, glyphs, folders))) for kind in kinds}


def of(found: list[dict[str, Any]], table: str) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in found if row["table"] == table}


def test_fewer_bits_of_attention_are_farther_from_a_language_model() -> None:
    from benchmarks.ablations import attention_ablation

    subject = language_model(16)
    named = {**attention_ablation.TABLE_1, **attention_ablation.TABLE_11}
    found = {
        name: attention_ablation.whole_model(subject, lambda place, s=named[name]: s)["loss"]
        for name in ("exact", "8b+f16", "4b")
    }
    assert abs(found["8b+f16"] - found["exact"]) < 0.01 * found["exact"]
    assert found["4b"] != found["exact"]
    (layer, *_) = attention_ablation.layers(subject)
    kinds = attention_ablation.TABLES_4_5
    error = {name: layer.distance(settings)["relative_l1"] for name, settings in kinds.items()}
    assert error["f16"] < error["e4m3"] < error["e5m2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language", "vision", "diffusion"])
def test_every_table_has_its_rows(kind: str, found: dict[str, list[dict[str, Any]]]) -> None:
    from benchmarks.ablations import attention_ablation

    ways = 2 if kind == "diffusion" else 1
    wanted = {**COUNTS, "11": 4 + ways * len(attention_ablation.SHARES)}
    assert {table: len(of(found[kind], table)) for table in wanted} == wanted
    shares = [row["share_of_4b"] for row in found[kind] if "share_of_4b" in row]
    assert min(shares) == 0.0 < max(shares)


@pytest.mark.slow
def test_all_8b_recovers_everything(found: dict[str, list[dict[str, Any]]]) -> None:
    for kind in ("language", "vision", "diffusion"):
        none = [row for row in found[kind] if row.get("share_of_4b") == 0.0]
        assert none
        for row in none:
            assert row["recovered"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
def test_what_is_replaced_is_what_the_model_computes(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    end = of(found["language"], "11")
    assert of(found["language"], "1")["exact"]["against_exact"] == 1.0
    assert abs(end["8b+f16"]["against_exact"] - 1.0) < 0.01
    assert abs(end["8b"]["against_exact"] - 1.0) < 0.05
    assert end["8b"]["perplexity"] != end["4b"]["perplexity"]
    pictures = of(found["diffusion"], "11")
    assert of(found["diffusion"], "1")["exact"]["mse"] == 0.0
    assert 0.0 < pictures["8b+f16"]["mse"] < pictures["4b"]["mse"]
    assert of(found["vision"], "1")["exact"]["same_answers"] == 100.0


@pytest.mark.slow
def test_scores_have_a_line_for_each_layer_and_step(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    (row,) = of(found["diffusion"], "scores").values()
    assert row["calls"] == 3
    assert [len(steps) for steps in row["four"]["mean"]] == [3, 3]
    four, eight = (torch.tensor(row[level]["mean"]) for level in ("four", "eight"))
    assert bool((four < eight).all())


@pytest.mark.slow
def test_distances_are_ordered_as_arithmetic_has_it(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for kind in ("language", "diffusion"):
        kinds = of(found[kind], "4, 5")
        error = {name: row["average"]["relative_l1"] for name, row in kinds.items()}
        assert error["f16"] < error["e4m3"] < error["e5m2"]
        for row in kinds.values():
            assert row["worst"]["relative_l1"] >= row["average"]["relative_l1"]
    scales = of(found["language"], "2, 3")
    token, tensor = (scales[name]["average"]["relative_l1"] for name in ("token", "tensor"))
    assert token < tensor


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language", "vision", "diffusion"])
def test_the_backend_serves_every_site_of_a_model(
    kind: str, glyphs: Path, folders: dict[str, Path]
) -> None:
    from benchmarks.ablations import attention_ablation

    subject = small(kind, glyphs, folders)
    for each in (subject, getattr(subject, "reader", None)):
        if each is not None:
            each.model.to(torch.bfloat16)  # attention in fp32 is left alone
    levels = ("exact", "8b", "table", "table 40 %")
    rows = list(attention_ablation.door(subject, "eager", levels))
    assert [row["variant"] for row in rows] == ["eager", *levels]
    assert not [row for row in rows if "failed" in row]
    assert rows[1]["sites"] == 0
    assert rows[2]["sites"] == 2
    calls = 2 * getattr(subject, "steps", 1)
    assert rows[3]["levels"]["4b"] == calls // 2
    assert rows[4]["levels"]["4b"] <= calls // 2
    assert [sum(row["levels"].values()) for row in rows[3:]] == [calls, calls]
    assert rows[2][subject.harm] != rows[1][subject.harm]


@pytest.mark.slow
def test_the_command_writes_rows_of_each_model(
    glyphs: Path, folders: dict[str, Path], tmp_path: Path
) -> None:

    out = tmp_path / "rows.jsonl"
    given = ("--subject", "vision", "--part", "sums", "tables", "--pictures", "8")
    models = ("--vit", str(folders["vit"]), "--glyphs", str(glyphs), "--out", str(out))
    printed = script("attention_ablation", *given, *models)
    assert "needs a GPU" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["model"] == "vision transformer" and row["torch"] for row in rows)
    assert printed.count("| vision transformer |") == len(rows)
    from benchmarks.ablations import ablation_tables

    shown = ablation_tables.attention(rows)
    assert sum(line.startswith("| 4b scores,") for line in shown) == 3
    (line,) = (line for line in shown if line.startswith("| e5m2 |"))
    (row,) = (row for row in rows if row["variant"] == "e5m2")
    assert f"{row['worst']['relative_l1']:.4f}" in line


def test_pictures_are_shown_with_and_without_a_reader() -> None:
    from benchmarks.ablations import ablation_tables

    row = {"mse": 0.01, "psnr_db": 26.0, "psnr_db_mean": 30.0, "psnr_db_worst": 14.04}
    assert ablation_tables.quality(row) == "26.0, 30.0, 14.0 dB"
    assert ablation_tables.quality({**row, "read_rightly": 97.2}) == "26.0, 30.0, 14.0 dB / 97.2 %"
    assert ablation_tables.quality({**row, "mse": 0.0}) == "the same"


def test_training_ends_with_its_time_at_a_rate_of_nothing(glyphs: Path) -> None:
    from benchmarks.models import small_models

    sizes = dataclasses.replace(small_models.sizes_of("dit", "tiny"), steps=10**6)
    _, row = small_models.train("dit", sizes, glyphs, "cpu", seconds=0.3)
    assert 1 < row["steps"] < 10**4
    assert row["loss"][-1][0] == row["steps"] - 1
    rates = [small_models.rate(sizes, 10, spent) for spent in (0.0, 0.5, 1.0, 1.1)]
    assert rates[0] == pytest.approx(sizes.peak_lr, rel=1e-3)
    assert rates[1] == pytest.approx(sizes.peak_lr / 2)
    assert rates[2] == rates[3] == pytest.approx(0.0, abs=1e-9)


def test_samples_follow_their_class_and_noise(glyphs: Path, tmp_path: Path) -> None:
    from benchmarks.models import small_models

    sizes = dataclasses.replace(small_models.sizes_of("dit", "tiny"), steps=2)
    trained, _ = small_models.train("dit", sizes, glyphs, "cpu")
    small_models.save(trained, "dit", sizes, tmp_path / "dit")
    model, sizes = small_models.load(tmp_path / "dit", "cpu", torch.float32)
    start = torch.randn(2, 1, sizes.side, sizes.side)
    label = torch.tensor([3, 3])
    once, again, other = (
        small_models.sample(model, noise, label, 2, 1.5) for noise in (start, start, start.flip(0))
    )
    assert torch.equal(once, again)
    assert torch.allclose(once, other.flip(0), atol=1e-5)
    assert not torch.allclose(once, start)


def test_fonts_give_pictures_that_training_reads(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="its fonts are drawn")
    pytest.importorskip("PIL", reason="it draws them")
    from benchmarks.data import glyphs
    from benchmarks.models import small_models

    count, characters = glyphs.build(tmp_path / "glyphs.npz")
    assert count > 10
    sizes = small_models.sizes_of("dit")
    drawn = small_models.Glyphs(tmp_path / "glyphs.npz", sizes, "cpu")
    assert drawn.classes == characters == sizes.classes
    shown = drawn.masters.flatten(2).sum(-1)
    assert float(shown.min()) > 20.0
    first, second = (drawn.draw(4, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert first[0].shape == (4, 1, 32, 32)
    assert -1.0 <= float(first[0].min()) < float(first[0].max()) <= 1.0


@pytest.mark.slow
def test_a_prefill_in_low_bits_says_how_far_its_logits_are(tmp_path: Path) -> None:
    given = ("--size", "tiny", "--part", "prefill", "--out", str(tmp_path / "rows.jsonl"))
    printed = script("quantized_attention", *given)
    assert printed.count("logits_distance") == 2


def test_low_bits_are_compared_with_float64(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    given = ("--size", "tiny", "--part", "accuracy", "--depths", "16", "--out", str(out))
    script("quantized_attention", *given)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 3
    by_level = {row["method"]: row for row in rows if row["kind"] == "iid" and row["causal"]}
    assert by_level["8b+f16"]["relative_l1"] < by_level["8b"]["relative_l1"] < 0.06


def test_the_page_of_real_models_shows_what_the_rows_say() -> None:
    file = ROOT / "benchmarks" / "results" / "nvidia-h200" / "attention-real-models.jsonl"
    page = (ROOT / "docs" / "measured" / "attention-tables.md").read_text().splitlines()
    printed = script("ablation_tables", "attention", str(file)).splitlines()
    below = zip(printed, [*printed[1:], ""], strict=True)
    body = [line for line, after in below if line.startswith("| ") and after[:4] != "|---"]
    assert len(body) > 30
    shown = {line.partition(" | ")[2] for line in page if line.startswith("| ")}
    for line in body:  # the page has its own names of rows and columns
        assert line.partition(" | ")[2].removeprefix("by layer | ") in shown, line
