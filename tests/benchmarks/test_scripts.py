"""The scripts run from end to end on a CPU, at tiny sizes, and draw from the rows they write."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.scripts import script

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


STATED = {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today"}


def op_row(method: str, factor: float, **others: Any) -> dict[str, Any]:
    sizes = {"N": 8, "D": 4, "V": 16, "data": "peaked", "shape": "s", "ignored_percent": 0}
    timed = {"both_ms": {"median": factor}, "memory_mib": {"beyond_gradients": 8 * factor}}
    return {**sizes, "method": method, **timed, **STATED, **others}


def rows_of_weights() -> list[dict[str, Any]]:
    shared = {"part": "perplexity", "parameters": 9, "perplexity": 2.0, **STATED}
    lossless = {"method": "memeff", "codec": "tier", "mantissa": 7, "bits": 11.0, **shared}
    dense = {"method": "dense", "bits": 16.0, **shared}
    emulated = {"method": "nf4", "bits": 4.5, "emulated": True, **shared}
    lossy = {**lossless, "mantissa": 3, "block": 512, "bits": 7.0}
    timed = [{**row, "part": "times", "ms": {"median": 1.0}} for row in (dense, lossless, lossy)]
    return [dense, emulated, lossless, lossy, *timed]


def rows_of_attention() -> list[dict[str, Any]]:
    means = {"mean": [[0.9, 0.8], [0.7, 0.6]], "deviation": [[0.0, 0.1], [0.0, 0.1]]}
    shared = {"model": "diffusion transformer", **STATED}
    return [
        {"table": "scores", "calls": 2, "four": means, "eight": means, **shared},
        {"table": "11", "variant": "by layer", "share_of_4b": 0.5, "recovered": 0.7, **shared},
    ]


def rows_of_tasks() -> list[dict[str, Any]]:
    shared = {"model": "m", "dtype": "bfloat16", "seed": 0, "digest": "d", "chance": 0.0, **STATED}
    asked = {"what": "tasks", "task": "copying", **shared}
    timed = {"what": "task times", "tokens": 9, "prompt": 8, "prompt_ms": 1.0, **shared}
    timed |= {"token_ms": 1.0, "cache_mib": 4.0}
    sizes = [("exact", {}), ("cache, 16 bits", {}), ("cache, 2 bits", {}), ("weights", {"bits": 9})]
    return [
        {**row, **more, "mode": mode}
        for mode, more in sizes
        for row in ({**asked, "answers": "1" * 9 + "0"}, timed)
    ]


def rows_of_trained_models() -> list[dict[str, Any]]:
    shared = {"model": "m", "tokens": 9, **STATED}
    ranked = {"rank": [1, 2], "probability": [0.5, 0.1], "eps": 2**-12, "ranks_above_eps": 2}
    kinds = {"exponents": [0, 2, 1], "entropy": {"exponent": 2.6}}
    names = [f"{x}{end}" for x in ("queries", "keys") for end in ("", ", smoothed")]
    coded: dict[str, Any] = {"counts": dict.fromkeys(names, [1] * 15)}
    coded |= {"entropy": dict.fromkeys(names, 3.9), "shown": {"layer": 1, "head": 0}}
    coded |= {"channel_mean": [0.1, 2.0], "channel_deviation": [1.0, 1.0]}
    ends = ("", ", aligned", ", later")
    cosines = {x + end: [0.1, None] for x in ("keys", "values") for end in ends}
    return [
        {"part": "probabilities", **ranked, **shared},
        {"part": "exponents", "weights": 3, "trained": kinds, "random": kinds, **shared},
        {"part": "codes", **coded, **shared},
        {"part": "layers", "cosines": cosines, **shared},
    ]


def test_every_painter_draws_from_a_small_file_of_rows(tmp_path: Path) -> None:
    from benchmarks import plot

    folder = tmp_path / "rows" / "box"
    several = [op_row(m, f) for m, f in (("inductor", 2.0), ("memeff mass", 1.0))]
    write(folder / "head-and-loss.jsonl", [*several, {**several[0], "both_ms": None}][:2])
    write(folder / "scaling.jsonl", [op_row("eager", n, N=n, scaling="N") for n in (1, 2)])
    step = {"model": "m", "length": 8, "backend": "memeff", "ms": {"median": 1.0}, **STATED}
    write(folder / "models.jsonl", [{**step, "peak_gib": 1.0}])
    write(folder / "batch.jsonl", [{**step, "batch": b, "peak_gib": b} for b in (1, 2)])
    many = {**step, "what": "FSDP2 by layers", "size": "m", "batch": 1, "peak_gib": 1.0}
    write(folder / "distributed.jsonl", [{**many, "gpus": count} for count in (1, 2)])
    curve: list[dict[str, Any]] = []
    for method, shift in (("inductor", 0.0), ("mass", 0.1)):
        for seed in (0, 1):
            name = {"run": f"scratch/{method}/{seed}"}
            recipe = {"layers": 1, "width": 2, "vocabulary": 3}
            curve += [{**name, "recipe": recipe, **STATED}]
            curve += [{**name, "step": s, "validation": 3.0 + shift - s / 9} for s in (1, 2)]
            curve += [{**name, "done": True, "validation": 2.0 + shift}]
    write(folder / "convergence.jsonl", curve)
    write(folder / "weights-ablation.jsonl", rows_of_weights())
    write(folder / "attention-ablation.jsonl", rows_of_attention())
    trained = [{"run": "hybrid/0", "recipe": {}, **STATED}, {"run": "hybrid/0", "done": True}]
    trained[1:1] = [{"run": "hybrid/0", "step": s, "validation": 3.0 - s / 9} for s in (1, 2)]
    write(folder / "ternary-qat.jsonl", trained)
    begun = {"model": "m", "stage": 1, "step": 0, "judged": {"python": 9.0}, "seed": 0}
    second = {**begun, "stage": 2, "of_steps": 4, "first_steps": 8}
    ended = {"done": True, "judged_each": {"python": [1.0]}, **STATED}
    continued = [begun]
    for variant in ("b1.58", "a4.8"):
        continued += [{**second, "variant": variant, "step": step} for step in (0, 2, 4)]
        continued.append({**second, "variant": variant, "step": 4, **ended})
    write(folder / "ternary-model.jsonl", continued)
    speed = {"way": "win4", "in_gb_per_s": 1.0, "out_gb_per_s": 2.0, **STATED}
    sizes = [{**speed, "side": 2**power, "mib": 2.0**power} for power in (1, 2)]
    write(folder / "coded-weight-throughput.jsonl", sizes)
    cache = {"kind": "coded kv batch", "shape": "gqa", "tokens": 8, "layers": 1, "ms": {}, **STATED}
    speed = {"cache": "4 bits", "tokens_per_s": 2, "peak_gib": 1.0}
    write(folder / "coded-kv-batch.jsonl", [{**cache, **speed, "batch": b} for b in (1, 2)])
    write(folder / "tasks.jsonl", rows_of_tasks())
    write(folder / "trained-figures.jsonl", rows_of_trained_models())
    script("plot", "--results", str(tmp_path / "rows"), "--figures", str(tmp_path / "figures"))
    drawn = {path.name.removesuffix("-box.png") for path in (tmp_path / "figures").iterdir()}
    missing = {*plot.TRAINED, *(name for _, name in plot.PAINTERS.values())} - drawn
    assert missing == {"linear-cross-entropy"}, "its file is not written above"


def test_training_steps_draw_no_bar_for_a_backend_that_was_not_measured() -> None:
    from benchmarks import plot

    step = {"length": 8, "ms": {"median": 2.0}, "peak_gib": 1.0, **STATED}
    measured = [("m", "inductor"), ("m", "memeff"), ("m", "memeff mass"), ("n", "memeff")]
    figure = plot.training_steps([{**step, "model": m, "backend": b} for m, b in measured])
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert heights == [[1.0] * 4, [2.0] * 4]


def test_curves_without_their_baseline_are_not_drawn() -> None:
    from benchmarks import plot

    start = {"run": "scratch/exact/0", "recipe": {"layers": 1, "width": 2, "vocabulary": 3}}
    curve = [{**start, **STATED}, {"run": start["run"], "step": 1, "validation": 3.0}]
    assert plot.curves([*curve, {"run": start["run"], "done": True, "validation": 3.0}]) is None


def test_ablations_print_the_papers_table_from_rows_they_wrote(tmp_path: Path) -> None:
    out = tmp_path / "ablations.jsonl"
    size = ["--shape", "64x32x300", "--ignored", "0", "50", "--repeats", "1", "--dtype", "float32"]
    table = script("loss_ablation", *size, "--method", "memeff exact", "--out", str(out))
    assert "| lower bound |" in table
    assert "| memeff exact |" in table
    assert "50 % ignored, ignored removed" in table
    assert "Active tiles: 128x128" in table
    from benchmarks import rows
    from benchmarks.ablations import loss_ablation

    found = rows.read(out)
    assert loss_ablation.table(found) == table.strip()
    counted = {(r["ignored_percent"], r["variant"], r["targets_that_count"]) for r in found}
    assert len(counted) == 3
    assert all(row["torch"] == torch.__version__ for row in found)


def test_an_adapted_head_is_held_to_fp64_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    told = "--shape 16x8x64 --rank 2 --device cpu --dtype float32 --repeats 1"
    told += " --method eager memeff --inner aot_eager"
    script("adapted_head", *told.split(), "--out", str(out))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in found] == ["eager", "memeff"]
    assert found[-1]["codes"] == [["fuse_linear_cross_entropy", "rewrote"]]
    assert max(error for row in found for error in row["errors"]) < 1e-5


@pytest.mark.slow
def test_first_calls_are_timed_with_regions_and_without(tmp_path: Path) -> None:
    out = tmp_path / "start.jsonl"
    script("start", "--layers", "4", "--hidden", "32", "--out", str(out))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["backend"] for row in found] == ["inductor", "memeff", "regions"]
    assert found[2]["layers_said"] == ["4 layers of 1 kind, each kind compiled once"]
    assert all(row["worst_gradient"] < 1e-4 for row in found)


def test_decoding_is_compared_with_every_backend(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "kv-decode.jsonl"
    script(
        "kv_decode", "--size", "tiny", "--part", "attention", "--repeats", "2", "--out", str(out)
    )
    found = rows.read(out)
    for method in ("memeff", "memeff, cache twice as long", "sdpa, repeated and masked"):
        mine = [row for row in found if row["method"] == method]
        assert [(r["batch"], r["filled"]) for r in mine] == [(2, 64), (1, 96)]
        assert all(row["us"]["median"] > 0 and row["error"] < 1e-2 for row in mine)
    assert all("failed" in row for row in found if row["us"] is None)


def test_attention_over_codes_is_compared_and_bytes_are_counted(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "coded-kv.jsonl"
    parts = ("attention", "size")
    script("coded_kv", "--size", "tiny", "--part", *parts, "--repeats", "2", "--out", str(out))
    found = rows.read(out)
    mine = [row for row in found if row.get("method", "").endswith(" bits")]
    assert [(row["bits"], row["batch"]) for row in mine] == [(4, 2), (3, 1)]
    assert all(row["us"]["median"] > 0 and row["error"] < 1e-5 for row in mine)
    sizes = [row for row in found if row["kind"] == "coded kv bytes"]
    assert [row["bits"] for row in sizes] == [16, 8, 4, 3, 2]
    assert all(row["bytes_per_token"] == row["formula"] for row in sizes)


@pytest.mark.slow
def test_appends_to_a_coded_cache_are_timed(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "coded-kv.jsonl"
    script("coded_kv", "--size", "tiny", "--part", "append", "--repeats", "2", "--out", str(out))
    found = rows.read(out)
    assert [row["what"] for row in found] == ["idle", "due"] * 2


@pytest.mark.slow
def test_steps_with_a_coded_cache_are_timed_and_the_longest_one_found(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "coded-kv.jsonl"
    parts = ("step", "longest", "batch", "prompt", "fits")
    given = ["--repeats", "2", "--budget", "600", "--out", str(out)]
    script("coded_kv", "--size", "tiny", "--part", *parts, *given)
    found = rows.read(out)
    assert all(row["rewritten"] == 1 for row in found if row.get("bits") == 4)
    lengths = {row["bits"]: row["tokens"] for row in found if row["kind"] == "coded kv longest"}
    assert lengths[4] > 2 * lengths[16]
    held = {row["cache"]: row["cache_bytes"] for row in found if row["kind"] == "coded kv batch"}
    assert held["3 bits, aligned from a quarter on"] < held["bf16"]
    fits = {row["cache"]: row["tokens"] for row in found if row["kind"] == "coded kv fits"}
    assert fits["3 bits, aligned from a quarter on"] > fits["4 bits"] > 3 * fits["bf16"]
    assert len([row for row in found if row["kind"] == "coded kv prompt"]) == 5
    assert len([row for row in found if row["kind"] == "coded kv batch"]) == 2 * 2 * 9
    assert fits["3 bits, values of 2 bits, merged"] > fits["3 bits, values of 2 bits"]


@pytest.mark.slow
def test_merging_is_measured_for_what_it_does_and_costs(
    corpus_folder: Path, tmp_path: Path
) -> None:
    from benchmarks import rows

    out, model = tmp_path / "merging.jsonl", tmp_path / "model"
    given = ("--size", "tiny", "--corpus", str(corpus_folder), "--model", str(model))
    for part, more in (
        ("train", ("--seconds", "2", "--inner", "none", "--one-projection")),
        ("fidelity", ("--study", "named", "t", "--budget", "1000")),
        ("memory", ()),
        ("overhead", ()),
    ):
        script("merging_ablation", *given, "--part", part, *more, "--out", str(out))
    assert (model / "config.json").exists()
    found = rows.read(out)
    answers = [row for row in found if row["what"] == "merging: fidelity"]
    assert [row["study"] for row in answers] == ["named"] * 13 + ["t"] * 7
    named = answers[:13]
    assert all(row["kl"] >= 0 and set(row["text"]) == {"python", "other"} for row in named)
    texts = [text for row in answers for text in row["text"].values()]
    assert all(text["perplexity"] > 1 and text["same"] <= 1 for text in texts)
    assert [row["text"]["python"]["kept"] > 0 for row in named] == [
        "merging" in row["setting"] for row in named
    ]
    sizes = {row["setting"]: row["bytes"] for row in found if row["what"] == "merging: memory"}
    assert set(sizes) == {row["setting"] for row in named}
    parts = [row for row in found if row["what"].startswith("merging: ") and "us" in row]
    assert len(parts) == 2 * 6 + 9
    assert all(row["us"]["median"] > 0 for row in parts)
    printed = script("merging_ablation", "--part", "table", "--out", str(out))
    assert all(row["setting"] in printed for row in answers)


def test_ternary_linears_are_compared_with_dense_ones(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "ternary.jsonl"
    script("ternary", "--size", "tiny", "--repeats", "2", "--out", str(out))
    found = rows.read(out)
    assert {row["method"] for row in found} == {
        "memeff, int8",
        "memeff, int4",
        "memeff, topk8",
        "bf16 linear",
    }
    assert all(row["us"]["median"] > 0 for row in found)
    errors = [row["error"] for row in found if "error" in row]
    assert len(errors) == 2
    assert max(errors) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("part", ["step", "decode", "steps"])
def test_ternary_models_are_measured(part: str, tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "ternary.jsonl"
    given = ("--size", "tiny", "--part", part, "--repeats", "2", "--out", str(out))
    script("ternary", *given, "--recipe", "a4.8", "--cases", "2")
    (row,) = rows.read(out)
    assert row["ms"]["median"] > 0


def test_attention_is_compared_and_timed(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "attention-kernels.jsonl"
    given = ("--size", "tiny", "--shape", "causal", "--repeats", "1", "--out", str(out))
    script("attention_kernels", *given)
    found = rows.read(out)
    assert {row["method"] for row in found} == {"ours", "sdpa"}
    assert all(max(row["errors"].values()) < 3e-2 for row in found)


@pytest.mark.slow
def test_attention_is_compared_under_every_mask(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "attention-kernels.jsonl"
    script("attention_kernels", "--size", "tiny", "--repeats", "2", "--out", str(out))
    found = rows.read(out)
    assert [r["case"] for r in found if r["method"] == "ours"] == [
        "causal",
        "gemma2",
        "padding",
        "packed",
        "tensor-blocks",
        "tensor-lowest",
        "tensor-numbers",
    ]
    assert {row["method"] for row in found} == {"ours", "sdpa", "chain"}
    assert all(max(row["errors"].values()) < 3e-2 for row in found)
    assert all(row["forward_ms"]["median"] > 0 for row in found)


def test_curves_are_read_back_as_the_latest_start_of_each_run(tmp_path: Path) -> None:
    from benchmarks.models import convergence

    path = tmp_path / "curves.jsonl"
    rows: list[dict[str, Any]] = [
        {"run": "scratch/mass/0", "recipe": {}},
        {"run": "scratch/mass/0", "step": 10, "validation": 9.0},
        {"run": "scratch/exact/0", "recipe": {}},
        {"run": "scratch/mass/0", "recipe": {}},
        {"run": "scratch/mass/0", "step": 10, "validation": 8.0},
        {"run": "scratch/mass/0", "done": True, "validation": 8.0},
    ]
    write(path, rows)
    with path.open("a") as stream:
        stream.write('{"run": "scratch/exact/0", "st')
    assert convergence.complete(path) == {"scratch/mass/0": {}}
    assert [r.get("validation") for r in convergence.read_curves(path)["scratch/mass/0"]] == [
        None,
        8.0,
        8.0,
    ]


def test_summary_pairs_methods_with_the_baseline_seed_by_seed() -> None:
    from benchmarks.models import convergence

    curves = {
        f"scratch/{method}/{seed}": [{"done": True, "validation": loss}]
        for method, seed, loss in (
            ("inductor", 0, 2.0),
            ("inductor", 1, 4.0),
            ("mass", 0, 2.02),
            ("mass", 1, 4.02),
        )
    }
    mass = convergence.summary(curves)[1]
    assert mass["against_baseline_percent"] == pytest.approx((1.0 + 0.5) / 2)
    assert mass["largest_percent"] == pytest.approx(1.0)


def test_plan_takes_low_seeds_first_stays_with_a_method_and_waits_for_the_base(
    tmp_path: Path,
) -> None:
    from benchmarks.models import convergence

    runs = [
        convergence.Run(phase, method, seed)
        for phase in ("scratch", "tune")
        for seed in (1, 0)
        for method in ("inductor", "mass")
    ]
    plan = convergence.Plan(runs, tmp_path / "base", deadline=float("inf"))
    assert plan.take("mass") == convergence.Run("scratch", "mass", 0)
    assert plan.take("mass") == convergence.Run("scratch", "inductor", 0)
    (tmp_path / "base").mkdir()
    assert plan.take("mass") == convergence.Run("tune", "mass", 0)


def test_plan_starts_nothing_that_would_not_end_in_the_budget(tmp_path: Path) -> None:
    import time

    from benchmarks.models import convergence

    run = convergence.Run("scratch", "mass", 0)
    plan = convergence.Plan([run], tmp_path, time.monotonic() + 50, seconds={"scratch": 60})
    assert plan.take(None) is None
    plan.seconds["scratch"] = 10
    assert plan.take(None) == run


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files of made-up sentences, the same in every run."""
    folder: Path = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["".join(draw.choices("aeiklmnorst", k=draw.randint(2, 7))) for _ in range(400)]
    for number in range(48):
        text = " ".join(draw.choices(words, k=600))
        (folder / f"{number}.{'py' if number % 2 else 'md'}").write_text(text)
    return folder


@pytest.fixture(scope="module")
def corpus_folder(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a small corpus."""
    folder: Path = tmp_path_factory.mktemp("corpus")
    script("corpus", *corpus_arguments(folder, text_folder))
    return folder


def corpus_arguments(folder: Path, text_folder: Path) -> list[str]:
    sizes = ["--megabytes", "0.3", "--other-megabytes", "0.3", "--sample-megabytes", "0.2"]
    return [
        *("--folder", str(folder), *sizes, "--vocabulary", "512", "--validation-share", "4"),
        *("--processes", "1", "--root", str(text_folder)),
    ]


def test_the_same_files_give_the_same_corpus(
    corpus_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    script("corpus", *corpus_arguments(tmp_path, text_folder))
    first, second = (
        json.loads((folder / "corpus.json").read_text()) for folder in (corpus_folder, tmp_path)
    )
    first.pop("seconds")
    second.pop("seconds")
    assert first == second
    assert all(facts["tokens"] > 1000 for facts in first["slices"].values())


@pytest.mark.slow
def test_a_run_learns_reports_and_saves_a_loadable_model(
    corpus_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the small model is a Llama of transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.models import training

    trainer = training.Trainer("tiny", corpus_folder, "cpu")
    reported: list[dict[str, Any]] = []
    last = trainer.run("eager", "scratch", 0, reported.append, save_to=tmp_path / "model")
    assert [row["step"] for row in reported] == [10, 20]
    assert all(len(row["loss"]) == 2 for row in reported)
    assert last["validation"] < reported[0]["loss"][0]
    again: list[dict[str, Any]] = []
    trainer.run("eager", "scratch", 0, again.append)
    assert again == reported
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer) == 512
    recipe = training.recipe_for("tiny", "scratch")
    held_out = training.Tokens(corpus_folder, "python-validation", recipe, "cpu")
    loss = training.validate(model, held_out.first(recipe.final_batches), "cpu")
    assert loss == pytest.approx(last["validation"], abs=1e-4)
    tuned = trainer.run("eager", "tune", 0, reported.append, base=tmp_path / "model")
    assert tuned["train"] < reported[0]["loss"][0]
    summary = script(
        "probabilities",
        *("--model", str(tmp_path / "model"), "--folder", str(corpus_folder)),
        *("--length", "32", "--rows", "8", "--out", str(tmp_path / "probabilities.jsonl")),
    )
    row = json.loads(summary.strip().splitlines()[-1])
    assert row["rank"][0] == 1
    assert row["probability"] == sorted(row["probability"], reverse=True)


@pytest.mark.slow
def test_driver_trains_every_method_and_leaves_out_what_is_complete(
    corpus_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the small model is a Llama of transformers")
    arguments = ["train", "--size", "tiny", "--gpu", "none", "--inner", "aot_eager"]
    arguments += ["--folder", str(corpus_folder), "--out", str(tmp_path / "curves.jsonl")]
    arguments += ["--method", "inductor", "exact", "--seed", "0", "1"]
    first = script("convergence", *arguments)
    assert "8 runs complete" in first
    assert "holds every run asked for" in script("convergence", *arguments)
    table = script("convergence", "table", "--out", str(tmp_path / "curves.jsonl"))
    assert table.count("\n") == 6
    from benchmarks.models import convergence

    curves = convergence.read_curves(tmp_path / "curves.jsonl")
    assert curves["scratch/exact/0"][-1]["rewrites"] == 1
    for phase in ("scratch", "tune"):
        exact, wanted = (
            [row["validation"] for row in curves[f"{phase}/{method}/0"] if "validation" in row]
            for method in ("exact", "inductor")
        )
        assert exact == pytest.approx(wanted, rel=1e-3)


@pytest.mark.slow
def test_attention_forms_are_checked_before_they_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the models are those of transformers")
    out = tmp_path / "attention.jsonl"
    script(
        "attention_forms",
        *("--size", "tiny", "--backend", "memeff", "--inner", "aot_eager", "--attention", "eager"),
        *("--steps", "2", "--out", str(out)),
    )
    from benchmarks import rows

    found = rows.read(out)
    assert [(r["what"], r["backend"]) for r in found] == [
        (f"attention {job}", backend)
        for job in ("prefill", "step")
        for backend in ("eager", "memeff")
    ]
    assert all("ms" in row and row["error"] < 0.05 for row in found)
    assert all(row["sites"] == {"rewrote": 2} for row in found[1::2])


@pytest.mark.slow
def test_multihead_is_checked_before_it_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "multihead.jsonl"
    script(
        "multihead",
        *("--size", "tiny", "--backend", "memeff", "--inner", "aot_eager", "--repeats", "2"),
        *("--case", "plain", "weights", "both", "--out", str(out)),
    )
    from benchmarks import rows

    found = rows.read(out)
    assert all("ms" in row and row["error"] < 1e-5 for row in found)
    fired = ["expand_multihead: rewrote" in row["records"] for row in found[1::2]]
    assert fired == [False, True, True]


@pytest.mark.slow
def test_training_step_rows_of_two_backends_share_a_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the models are those of transformers")
    out = tmp_path / "models.jsonl"
    script(
        "models",
        *("--model", "tiny", "--backend", "eager", "memeff", "--option", "memeff.inner=aot_eager"),
        *("--attention", "default", "causal", "--steps", "2", "--out", str(out)),
    )
    from benchmarks import rows

    found = rows.read(out)
    assert [(r["attention"], r["name"]) for r in found] == [
        (attention, name) for attention in ("default", "causal") for name in ("eager", "memeff")
    ]
    assert all("ms" in row for row in found)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-3)
    assert found[0]["loss"] == pytest.approx(found[2]["loss"], rel=1e-3)


@pytest.mark.slow
def test_training_steps_of_several_batches_share_what_was_compiled(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the models are those of transformers")
    out = tmp_path / "models.jsonl"
    given = ["--model", "tiny", "--backend", "memeff", "--option", "memeff.inner=aot_eager"]
    given += ["--steps", "1", "--out", str(out)]
    script("models", *given, "--dynamic", "--batch", "3", "2", "4")
    script("models", *given, "--batch", "2")
    from benchmarks import rows

    *shared, alone = rows.read(out)
    assert [row["batch"] for row in shared] == [3, 2, 4]
    assert [row["rewrites_of_all"] for row in shared] == [1, 1, 1]  # of one graph
    assert shared[1]["loss"] == pytest.approx(alone["loss"], rel=1e-3)


@pytest.mark.slow
def test_compiled_training_with_compressed_weights_ends_with_the_same_bits(tmp_path: Path) -> None:
    from benchmarks import ROOT, rows
    from benchmarks.models import compressed_training as subject

    out = tmp_path / "rows.jsonl"
    given = ["--ways", subject.INSIDE, "win4", "--steps", "5", "--timed", "1", "--out", str(out)]
    command = [sys.executable, subject.__file__, *given, "--inner", "aot_eager"]
    subprocess.run(command, check=True, cwd=ROOT)
    found = rows.read(out)
    assert [row["way"] for row in found if "s_per_step" in row].count("win4") == 1
    ends = {row["way"]: (row["steps"], row["loss"], row["sha"]) for row in found if "sha" in row}
    assert ends.keys() == {subject.INSIDE, "win4"}
    assert ends["win4"] == ends[subject.INSIDE]
    assert ends["win4"][0] == 5


@pytest.mark.slow
def test_compressed_weights_are_measured_part_by_part(tmp_path: Path) -> None:
    from benchmarks import rows

    out = tmp_path / "coded.jsonl"
    script("coded_weights", "--size", "tiny", "--out", str(out))
    found = rows.read(out)
    assert {row["part"] for row in found} == {"kernels", "widths", "memory", "training", "token"}
    assert not any("failed" in row for row in found)
    away = {row["way"]: row["largest_difference"] for row in found if row["part"] == "token"}
    assert away["dense"] == away["win4"] == away["tier"] == 0
    assert 0 < away["int8"] < away["win4:k1:b512"]
    ways = [row["way"] for row in found if row["part"] == "training"]
    assert ways == ["sgd after the backward", "sgd in the backward", "win4", "tier"]
    assert all(row["error"] < 5e-3 for row in found if row["what"] == "linear")


@pytest.mark.slow
def test_small_models_with_compressed_weights_train_alike_and_are_drawn(tmp_path: Path) -> None:
    from benchmarks import plot, rows

    script("coded_weight_models", "--size", "tiny", "--out", str(tmp_path))
    found = {
        name: rows.read(tmp_path / f"coded-weight-{name}.jsonl")
        for name in ("curves", "t5", "exponents", "throughput", "grouping")
    }
    assert found["grouping"][-1]["same_bits"]
    compared = [row for row in (*found["curves"], *found["t5"]) if "way" in row]
    assert {row["way"] for row in compared} == {"dense", "win4", "tier"}
    assert not any(row["differing_losses"] or row["differing_weights"] for row in compared)
    kept = {row["kept"]: row["loss"] for row in found["t5"] if "kept" in row}
    assert set(kept) == {"dense", 7, 3, 1, 0}
    assert kept[7] == kept["dense"]
    assert plot.exponents(found["exponents"]) is not None
    assert plot.coded_weight_throughput(found["throughput"]) is not None
