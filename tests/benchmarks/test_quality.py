"""Quality of real models: the harness from end to end on a tiny one, and its figures by hand."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memeff_compile import MiniCache
from memeff_compile.kernels import coded_kv_cache as op_folder
from tests.support.scripts import script

transformers = pytest.importorskip("transformers", reason="models are folders of it")

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 4
SHORT = ["--length", "320", "--prompt", "256", "--sequences", "2", "--batch", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an untrained model, and a tokenizer of bytes."""
    from tokenizers import ByteLevelBPETokenizer

    made: Path = tmp_path_factory.mktemp("tiny-model")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the pass key is " * 9], 300, show_progress=False)
    tokenizer.save(str(made / "tokenizer.json"))
    file = str(made / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_file=file).save_pretrained(made)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=256,  # smaller weights are not worth a code
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def subject(folder: Path) -> Any:
    from benchmarks.quality.subject import Subject

    return Subject(folder, "cpu", torch.float32)


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("rows") / "quality.jsonl"
    given = ["measure", "--model", str(folder), *SHORT, "--keys", "3", "--out", str(out)]
    script("lossy_modes", *given, "--texts", "prose", "keys")
    return out, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_every_mode_has_a_row_of_the_same_tokens(measured: tuple[Path, Any]) -> None:
    from benchmarks.quality import labels
    from benchmarks.quality.modes import modes, reported_modes

    names = [mode.name for mode in (*modes(LAYERS), *reported_modes(LAYERS))]
    out, found = measured
    text = {row["mode"]: row for row in found if row["text"] == "prose"}
    assert list(text) == names
    assert [row["mode"] for row in found if row["text"] == "keys"] == names
    compiled = [text.pop(name) for name in names if name.endswith(", compiled")]
    assert all("refused" in row for row in compiled), "in fp32 the backend leaves attention exact"
    assert len(compiled) == 3
    for row in text.values():
        assert row["tokens"] == 2 * (320 - 256 - 1)
        assert len(row["layer_errors"]) == LAYERS
        assert row["command"].startswith("python benchmarks/quality/lossy_modes.py measure")
        assert {"commit", "torch", "transformers", "date", "cpu", "digest"} <= set(row)
    shown = script("lossy_modes", "table", "--out", str(out))
    assert "126 tokens, exact perplexity " in shown
    assert "pass keys found of 3 (exact model: " in shown
    assert all(f"| {labels.of_mode(name)} |" in shown for name in names)
    assert len({labels.of_mode(name) for name in names}) == len(names)


@pytest.mark.slow
def test_fewer_bits_are_further_from_the_exact_model(measured: tuple[Path, Any]) -> None:
    text = {row["mode"]: row for row in measured[1] if row["text"] == "prose"}
    exact = text["cache, 16 bits"]
    assert abs(exact["change"]) < 1e-5
    assert exact["same"] == 1.0
    assert max(exact["layer_errors"]) < 1e-3
    kl = [text[f"cache, {bits} bits"]["kl"] for bits in (16, 8, 4, 3, 2)]
    assert kl == sorted(kl)
    assert kl[-1] > 100 * kl[1]
    for family in (["8b+f16", "8b", "4b"], ["3 bits of 7", "1 bits of 7", "0 bits of 7"]):
        kind = "attention" if "4b" in family else "weights"
        kl = [text[f"{kind}, {name}"]["kl"] for name in family]
        assert kl == sorted(kl)
        assert kl[0] > 0
    lossless = text["weights, 7 bits of 7"]
    assert lossless["kl"] == lossless["change"] == 0
    assert 10 < lossless["bits"] < 16
    low = text["attention, 4b"]
    assert low["left_exact"] == 0
    assert min(low["attention_errors"]) > 0.01
    assert text["cache, 4 bits"]["cache_bytes"] < exact["cache_bytes"]
    merged = text["cache, merged from half on, slerp, t 0.5"]
    assert merged["layer_errors"][0] < 1e-4, "the layers before stay apart"
    assert merged["layer_errors"][-1] > 0.01


def test_figures_are_those_computed_by_hand(subject: Any) -> None:
    from benchmarks.quality.lossy_modes import Judged
    from benchmarks.quality.subject import States

    torch.manual_seed(1)
    ids = torch.randint(0, 300, (2, 200))
    exact = subject.states(ids)
    shift = torch.randn_like(exact.last) * 0.3
    found = States(exact.last + shift, [exact.layers[0], *(2 * x for x in exact.layers[1:])])
    judged = Judged()
    for row in range(2):  # by batches of one
        part = [States(s.last[row, None], [x[row, None] for x in s.layers]) for s in (exact, found)]
        judged.add(subject, *part, ids[row, None], 71)
    row = judged.row()
    head = subject.model.lm_head.weight
    wanted, got = ((s.last[:, 71:-1] @ head.t()).log_softmax(-1) for s in (exact, found))
    targets = ids[:, 72:, None]
    first, other = (-x.gather(2, targets).squeeze(2).double() for x in (wanted, got))
    assert row["tokens"] == targets.numel()
    assert row["perplexity_exact"] == pytest.approx(first.mean().exp().item(), rel=1e-5)
    assert row["perplexity"] == pytest.approx(other.mean().exp().item(), rel=1e-5)
    change = (other - first).mean().exp().item()
    assert row["change"] == pytest.approx(change - 1, rel=1e-4)
    blocks = torch.stack([(other - first)[:, :64].mean(1), (other - first)[:, 64:].mean(1)])
    error = blocks.std().item() / math.sqrt(4)
    assert row["change_se"] == pytest.approx(change * error, rel=1e-4)
    kl = F.kl_div(got, wanted, log_target=True, reduction="none").sum(-1)
    assert row["kl"] == pytest.approx(kl.mean().item(), rel=1e-3)
    same = (got.argmax(-1) == wanted.argmax(-1)).float()
    assert row["same"] == pytest.approx(same.mean().item())
    assert 0 < row["same"] < 1
    assert row["layer_errors"] == [0.0, 1.0, 1.0, 1.0]


def test_attention_is_lowered_where_it_is_causal_and_its_own_error_is_noted(subject: Any) -> None:
    from benchmarks.quality.subject import Lowered

    q, k, v = torch.randn(3, 1, 2, 96, 16)
    lowered = Lowered(["4b", "exact", "8b", "8b"])
    mask = torch.ones(96, 96, dtype=torch.bool).tril().triu(-40)
    with lowered.forward():
        found = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(3)]
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    windowed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    errors = [float((each - exact).norm() / exact.norm()) for each in found]
    assert errors[0] > 3 * errors[2] > 0
    assert errors[1] == 0
    torch.testing.assert_close(masked, windowed)
    assert lowered.exact == {1, 3}
    assert lowered.errors() == pytest.approx([*errors, 0.0], rel=1e-5)


def test_a_model_whose_logits_are_scaled_is_refused(folder: Path, tmp_path: Path) -> None:
    from benchmarks.quality.subject import Subject

    config = transformers.GraniteConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, logits_scaling=4.0,
    )  # fmt: skip
    transformers.GraniteForCausalLM(config).save_pretrained(tmp_path)
    for file in folder.glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(SystemExit, match="not the product with its head"):
        Subject(tmp_path, "cpu", torch.float32)


def test_rows_of_pass_keys_hold_what_they_ask_for(subject: Any) -> None:
    from benchmarks.quality import texts

    ids, answer = texts.pass_keys(subject.tokenizer, 320, 5)
    assert ids.shape == (5, 320)
    written = [subject.tokenizer.decode(row) for row in ids]
    keys = [subject.tokenizer.decode(row[-answer:]) for row in ids]
    assert len(set(keys)) == 5
    for text, key in zip(written, keys, strict=True):
        assert key.strip().isdigit()
        assert text.endswith(f"{texts.ASKED}{key}")
        assert text.count(key) == 3
    places = [text.index(key) for text, key in zip(written, keys, strict=True)]
    assert places == sorted(places)


def test_texts_are_of_this_python_or_of_a_file(subject: Any, tmp_path: Path) -> None:
    from benchmarks.quality import texts

    other = tmp_path / "other.txt"
    other.write_text("the pass key is lost. " * 200)
    for name in (*texts.NAMED, f"other={other}"):
        rows = texts.rows_of(subject.tokenizer, name, 64, 3)
        assert rows.shape == (3, 64)
        assert len(texts.digest(rows)) == 12
    with pytest.raises(SystemExit, match="one of prose, source"):
        texts.text_of("poems")
    other.write_text("short")
    with pytest.raises(SystemExit, match="64 at least"):
        texts.rows_of(subject.tokenizer, f"other={other}", 64, 3)
    own = texts.own(subject.model, subject.tokenizer, 64, 3)
    assert own.shape == (3, 64)
    assert torch.equal(own[0, :32], texts.rows_of(subject.tokenizer, "prose", 32, 2)[0])


def test_own_continuations_are_saved_once_and_judged_by_every_mode(
    folder: Path, subject: Any, tmp_path: Path
) -> None:
    from benchmarks.quality import texts

    file, out = tmp_path / "own.safetensors", tmp_path / "quality.jsonl"
    written = ["--length", "90", "--sequences", "3", "--to", str(file)]
    script("continuations", str(folder), *written, "--dtype", "float32")
    ids, drawn = texts.ids_of(file, subject.name, 80, 2)
    assert torch.equal(ids, texts.own(subject.model, subject.tokenizer, 90, 3)[:2, :80])
    assert drawn["dtype"] == "float32"
    assert (drawn["sequences"], drawn["length"]) == ("3", "90")
    given = ["measure", "--model", str(folder), "--length", "80", "--prompt", "32"]
    given += ["--texts", f"own={file}", "--sequences", "2", "--out", str(out)]
    script("lossy_modes", *given, "--modes", "attention, 8b+f16", "weights, 7 bits")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["text"] for row in rows] == ["own"] * 2
    assert {row["digest"] for row in rows} == {texts.digest(ids)}
    assert all(row["drawn"] == drawn for row in rows)
    begun = texts.rows_of(subject.tokenizer, "prose", 40, 2)[:, :32]
    continued = texts.own(subject.model, subject.tokenizer, 40, 2, begun)
    assert continued.shape == (2, 40)
    assert torch.equal(continued[:, :32], begun)
    assert {row["tokens"] for row in rows} == {2 * (80 - 32 - 1)}


def test_continuations_of_another_model_or_too_short_are_refused(
    subject: Any, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    from benchmarks.quality import texts

    file = tmp_path / "own.safetensors"
    with pytest.raises(SystemExit, match=r"continuations\.py writes"):
        texts.ids_of(file, subject.name, 64, 2)
    save_file({"ids": torch.zeros(2, 64, dtype=torch.int64)}, file, {"model": "other"})
    with pytest.raises(SystemExit, match="is of other"):
        texts.ids_of(file, subject.name, 64, 2)
    with pytest.raises(SystemExit, match="65 are needed"):
        texts.ids_of(file, "other", 65, 2)


def test_sequences_beyond_what_a_model_is_for_are_refused(folder: Path, tmp_path: Path) -> None:
    given = ["measure", "--model", str(folder), "--texts", "prose", "--length", "2049"]
    with pytest.raises(SystemExit, match="is for 2048 tokens; --length is 2049"):
        script("lossy_modes", *given, "--out", str(tmp_path / "none.jsonl"))


MEASURED = ROOT / "docs" / "measured"
PAGES = ["lossy_modes quality.jsonl", "layer_pairs layer-pairs.jsonl"]


def table_rows(text: str) -> list[tuple[tuple[str, str], ...]]:
    """Return the rows of all tables of a text: pairs of a column's head and a cell, if not empty.

    Pages show the rows of one kind of mode, so they leave out columns that no such row fills.
    """
    found, heads = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            heads = None
            continue
        cells = [cell.strip() for cell in line[1:].removesuffix("|").split("|")]
        if heads is None:
            heads = cells
        elif set(line) - set("|-:"):
            assert len(cells) == len(heads), line
            found.append(tuple(pair for pair in zip(heads, cells, strict=True) if pair[1]))
    return found


@pytest.mark.parametrize("name", [*PAGES, "designs quality-designs.jsonl"])
def test_the_pages_show_what_the_rows_say(name: str) -> None:
    pages = [page.read_text() for page in MEASURED.glob("real-models*.md")]
    on_pages = Counter(row for page in pages for row in table_rows(page))
    action, _, file = name.partition(" ")
    for rows in (ROOT / "benchmarks" / "results").glob(f"*/{file}"):
        shown = Counter(table_rows(script(action, "table", "--out", str(rows))))
        assert shown.total() > 5
        assert shown - on_pages == Counter()


def test_the_page_shows_the_rows_of_gemmas_merged_layers() -> None:
    page = (MEASURED / "real-models-merged-layers.md").read_text()
    table = page.partition("\n## Gemma\n")[2].partition("\n## ")[0]
    rows = ROOT / "benchmarks" / "results" / "cpu" / "quality-aligned.jsonl"
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    found = [row for row in found if (row["model"], row["text"]) == ("gemma3-270m", "prose")]
    assert len(found) == 9
    for row in found:
        change = f"{100 * row['change']:+.2f} % ({100 * row['change_se']:.2f})"
        assert f"| {change} | {row['kl']:.4f} ({row['kl_se']:.4f}) |" in table, row["mode"]


def test_the_page_shows_the_rows_of_gemmas_merged_layers_on_a_gpu() -> None:
    page = (MEASURED / "real-models-merged-layers.md").read_text()
    table = page.partition("| cache of Gemma 3 270M on an H200 |")[2].partition("\n\n")[0]
    rows = ROOT / "benchmarks" / "results" / "nvidia-h200" / "quality-aligned.jsonl"
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    found = [row for row in found if row["commit"] == "7ff2f42a" and row["text"] != "keys"]
    names = {"prose": "prose", "source": "source code"}
    wanted = {
        f"| {names[row['text']]} | {100 * row['change']:+.2f} % | {100 * row['change_se']:.2f} % "
        f"| {row['kl']:.4f} |"
        for row in found
    }
    shown = ["| " + line.split("| ", 2)[2] for line in table.splitlines()[2:]]
    assert set(shown) == wanted
    assert len(shown) == len(wanted) == 13


def test_the_page_shows_the_bytes_of_gemmas_merged_layers() -> None:
    """One key-value head of 256; three layers attend to all tokens, 15 to a window of 512."""
    page = (MEASURED / "real-models-merged-layers.md").read_text()
    table = page.partition("\n## Gemma\n")[2].partition("\n## ")[0]
    from memeff_compile.model.cache.layers import room_of

    tokens, windows = 32768, 15 * 1024 * room_of(512)

    def smaller(bits: int, value_bits: int | None, group: int, merged: str) -> str:
        layout = op_folder.Layout(256, bits, group=group, value_bits=value_bits)
        one = op_folder.bytes_after(layout, 1, 1, tokens, 2)
        size = 3 * one
        if merged == "values":
            size = one + op_folder.value_pair_bytes(layout, 1, 1, tokens, 2)
            size += op_folder.map_bytes(layout, 1, 1, 2, 1)
        elif merged:
            kept = 4 + MiniCache().capacity(tokens)
            layout = op_folder.Layout(256, bits, group=group, kept=kept)
            size = one + op_folder.pair_bytes(layout, 1, 1, tokens, 2)
            size += op_folder.map_bytes(layout, 1, 1, 2)
        return f"{(3 * 1024 * tokens + windows) / (size + windows):.2f}"

    wanted = [
        smaller(4, None, 64, "values"),
        smaller(4, None, 64, "values"),  # on more tokens
        smaller(4, None, 64, "keys and values"),
        smaller(3, 2, 64, ""),
        smaller(3, 2, 64, "values"),
        smaller(3, 2, 128, "values"),
        smaller(3, 2, 128, "values"),
        smaller(2, None, 64, ""),
    ]
    lines = [line for line in table.splitlines() if " % (" in line and line.startswith("|")]
    assert [line.rstrip("| ").split("| ")[-1] for line in lines] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    ["codes3", "codes4", "weights", "errors", "formats", "attention", "scores", "tables"],
)
def test_designs_have_rows_of_the_same_tokens(folder: Path, tmp_path: Path, part: str) -> None:
    from benchmarks.quality import labels
    from benchmarks.quality.designs import PARTS

    out = tmp_path / "designs.jsonl"
    given = ["measure", "--model", str(folder), *SHORT, "--part", part, "--texts", "prose"]
    script("designs", *given, "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["mode"] for row in rows] == [each.name for each in PARTS[part]]
    assert {row["tokens"] for row in rows} == {2 * (320 - 256 - 1)}
    if part == "weights":
        off = {row["mode"].removeprefix("weights, 3 bits, "): row["weights_off"] for row in rows}
        assert off["blocks of 32"] < off["blocks of 512"] < off["errors passed along the row"]
    if part == "formats":
        kl = {row["mode"].removeprefix("formats, "): row["kl"] for row in rows}
        assert kl["3 bits, blocks of 512"] < kl["1 bits, blocks of 512"]
        assert kl["1 bits, blocks of 512"] < kl["0 bits, blocks of 512"]
        assert kl["int8"] < kl["nf4"] < kl["0 bits, blocks of 512"]
    shown = script("designs", "table", "--out", str(out))
    assert all(f"| {labels.of_design(row['mode'])} | " in shown for row in rows)
    assert len({labels.of_design(row["mode"]) for row in rows}) == len(rows)
    first, *others = rows
    assert "kl_beside" not in first
    for row in others:
        assert row["kl_beside"] == pytest.approx(row["kl"] - first["kl"], abs=1e-9)
        assert row["same_beside"] == pytest.approx(row["same"] - first["same"], abs=1e-9)


def test_drawn_errors_and_even_steps_have_the_sizes_they_say() -> None:
    from benchmarks.quality import roundings

    torch.manual_seed(0)
    x = torch.randn(256, 512)
    for name, each in (("drawn, 2.6 %", 0.026), ("drawn, 2.6 % of each", 0.026)):
        off = (roundings.DRAWN[name](x) - x).norm() / x.norm()
        assert off == pytest.approx(each, rel=0.03)
    assert not torch.equal(
        roundings.DRAWN["drawn, 2.6 %"](x) - x, roundings.DRAWN["drawn, 2.6 %"](-x) + x
    )
    even = roundings.in_even_steps(x, 5.0)
    step = float(even[even > 0].min())
    assert roundings.entropy((even / step).round()) == pytest.approx(5.0, abs=0.01)
    # At high rates a normal source in even steps of entropy R is off by sqrt(pi e / 6) 2 ** -R.
    off = float((even - x).norm() / x.norm())
    assert off == pytest.approx((math.pi * math.e / 6) ** 0.5 * 2**-5.0, rel=0.02)
    six, five = (roundings.in_integers(x, bits, 32) for bits in (6, 5))
    assert (six - x).norm() < 0.6 * (five - x).norm()


@pytest.mark.parametrize("settings", [{}, {"group": 32}, {"recent": 64, "keep_first": 0}])
def test_codes_of_a_cache_are_put_in_as_the_cache_has_them(
    subject: Any, settings: dict[str, int]
) -> None:
    import memeff_compile
    from benchmarks.quality import designs, prototypes, texts

    ids = texts.rows_of(subject.tokenizer, "prose", 320, 1)
    keys = prototypes.Codes(bits=3, group=settings.get("group", 64))
    rest = {name: count for name, count in settings.items() if name != "group"}
    values = prototypes.Codes(bits=3, along="channels", group=32)  # all of a head
    design = designs.Design("", cached=prototypes.Cached(keys, values, **rest))
    given = argparse.Namespace(prompt=192, piece=48, modes=[])
    found = designs.Bench(subject, given).states(design, ids, {})
    cache = memeff_compile.KVCache(subject.model.config, 320, 3, **settings)
    wanted = subject.states(ids, cache=cache, pieces=(192, 48))
    off = (wanted.last - subject.states(ids).last).norm()
    assert (found.last - wanted.last).norm() < 0.05 * off


def test_codes_of_other_kinds_round_as_they_say() -> None:
    from benchmarks.quality import prototypes

    torch.manual_seed(0)
    x, bits = torch.randn(400, 64, dtype=torch.float64), torch.tensor(4.0)
    x[:, 0] = torch.nan
    off = {
        scale: (prototypes.rounded(x, bits, scale, torch.float64) - x)[:, 1:].norm() / 160
        for scale in ("ends", "centred", "least", "normal")
    }
    assert off["normal"] < off["least"] < off["ends"] < off["centred"] < 0.12
    rotary = torch.randn(1, 9, 8).cos(), torch.zeros(1, 9, 8)
    k = torch.randn(2, 3, 9, 8)
    torch.testing.assert_close(prototypes.turned(k, rotary, 1), k * rotary[0][:, None])
    angle = torch.randn(1, 9, 4).repeat(1, 1, 2)
    rotary = angle.cos(), angle.sin()
    back = prototypes.turned(prototypes.turned(k, rotary, 1), rotary, -1)
    torch.testing.assert_close(back, k)
    matrix = prototypes.hadamard(8)
    torch.testing.assert_close(matrix @ matrix, torch.eye(8))


def test_attention_of_a_study_is_the_op_s_where_nothing_is_changed() -> None:
    from benchmarks.quality import prototypes

    q, k, v = torch.randn(3, 1, 2, 160, 32)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = torch.ops.memeff.quantized_attention(q, k, v, ahead=0, with_lse=False)[0]
    found = prototypes.Told(prototypes.Study()).low(q, k, v, None, "8b")
    torch.testing.assert_close(found, wanted)
    close = prototypes.Study(values="exact", limit=1 << 20)
    found = prototypes.Told(close).low(q, k, v, None, "8b")
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
    summed = prototypes.Told(prototypes.Study(sums_rounded=True)).low(q, k, v, None, "8b")
    assert 0 < (summed - wanted).norm() < (wanted - exact).norm()


def test_pairs_of_layers_are_merged_as_a_cache_does(subject: Any) -> None:
    """Neighbours merged here equal those of `KVCache`, if it keeps no rows."""
    import memeff_compile
    from benchmarks.quality import layer_pairs, texts
    from benchmarks.quality.modes import Merged

    ids = texts.rows_of(subject.tokenizer, "prose", 319, 1)
    behind = layer_pairs.Behind(subject, ids, 256)
    assert len(layer_pairs.candidates(behind.held[0])) == LAYERS * (LAYERS - 1) // 2
    assert behind.change([], [0])[0] == pytest.approx(0, abs=1e-6)
    found = behind._losses(0, [(2, 3)])
    merge = Merged(start_layer=2, gamma=0.0, retained=0.0, align="none")
    cache = memeff_compile.KVCache(subject.model.config, 319, 16, merge=merge)
    states = subject.states(ids, cache=cache, pieces=(256, 63))
    assert [line["merged"] for line in cache.merged()] == [128]
    logits = subject.logits(states.last[0, 256:-1])
    wanted = F.cross_entropy(logits, ids[0, 257:], reduction="none").double()
    assert (behind.exact[0] - wanted).abs().max() > 1e-2
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_pairs_are_chosen_greedily_and_their_rows_keep_their_lengths(subject: Any) -> None:
    from benchmarks.quality import layer_pairs

    scores = {(0, 1): 0.9, (1, 2): 0.95, (0, 3): 0.1, (2, 3): 0.99}
    assert layer_pairs.greedy(scores, 2) == [(2, 3), (0, 1)]
    assert layer_pairs.greedy(scores, 9) == [(2, 3), (0, 1)]
    torch.manual_seed(0)
    keys = torch.randn(3, 1, 2, 200, 16)
    held = [(x, 3 * x) for x in (keys[0], 2 * keys[0], keys[2])]
    cosines = layer_pairs.alike(held, [(0, 1), (0, 2)])
    assert cosines[0, 1] == pytest.approx((1, 1), abs=1e-6)
    assert abs(cosines[0, 2][0]) < 0.1
    same = layer_pairs.merged(held, [(0, 1)])
    for wanted, got in zip(held, same, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    other = layer_pairs.merged(held, [(0, 2)])
    for n in (0, 2):
        torch.testing.assert_close(other[n][0].norm(dim=-1), held[n][0].norm(dim=-1))
        torch.testing.assert_close(other[n][0][:, :, :4], held[n][0][:, :, :4])
        torch.testing.assert_close(other[n][0][:, :, -128:], held[n][0][:, :, -128:])
    assert (other[0][0] - held[0][0])[:, :, 4:-128].abs().max() > 0.1


def test_pairings_run_from_end_to_end(folder: Path, tmp_path: Path) -> None:
    from benchmarks.quality import layer_pairs

    out = tmp_path / "pairs.jsonl"
    given = ["measure", "--model", str(folder), "--texts", "prose", "--length", "256"]
    given += ["--prompt", "192", "--sequences", "2", "--counts", "1", "2", "--out", str(out)]
    script("layer_pairs", *given)
    shown = script("layer_pairs", "table", "--out", str(out))
    assert "of 6 pairs alone" in shown
    counts = {way: shown.count(f"| {label} |") for way, label in layer_pairs.WAYS.items()}
    assert counts == {"by cosine": 2, "by cost alone": 2, "neighbours": 1}, "one pair of neighbours"


@pytest.mark.slow
def test_a_model_is_fine_tuned_alike_by_each_loss(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import methods
    from benchmarks.models import fine_tuning

    monkeypatch.setattr(fine_tuning, "apple", lambda eps: methods.eager)
    out = tmp_path / "rows.jsonl"
    small = ["--steps", "6", "--batch", "2", "--length", "24", "--judged", "4", "--seed", "0", "1"]
    asked = ["train", "--model", str(folder), *small, "--rate", "1e-3", "--inner", "aot_eager"]
    asked += [
        "--method",
        "inductor",
        "exact",
        "apple",
        "--root",
        str(ROOT / "docs"),
        "--out",
        str(out),
    ]
    script("fine_tuning", *asked)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["method"], row["seed"]) for row in found] == [
        *(("inductor", 0), ("inductor", 1)),
        *(("exact", 0), ("exact", 1)),
        *(("apple", 0), ("apple", 1)),
    ]
    assert all(row["validation"] < row["before"] == found[0]["before"] for row in found)
    assert found[2]["rewrites"] == 1
    for first, *others in zip(found[:2], found[2:4], found[4:], strict=True):
        assert all(each["loss"] == pytest.approx(first["loss"], abs=2e-2) for each in others)
    assert found[0]["loss"] != found[1]["loss"]  # another order of the text
    script("fine_tuning", *asked)  # nothing is left to do
    assert len(out.read_text().splitlines()) == 6
    table = script("fine_tuning", "table", "--out", str(out))
    assert "| `inductor` | 2 |" in table
    assert "| +0.00000 | +0.00000 |" in table


@pytest.mark.slow
def test_formats_are_tuned_from_one_state_and_codes_end_with_the_dense_loss(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    small = ["--steps", "6", "--batch", "2", "--length", "24", "--judged", "4", "--seed", "0"]
    asked = ["--rate", "0.01", "--root", str(ROOT / "docs"), "--out", str(out)]
    script("tuning_formats", "train", "--model", str(folder), *small, *asked)
    before, *found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in found] == ["sgd", "win4", "tier", "nf4 + lora"]
    assert all(row["validation"] < before["validation"] for row in found)
    dense, win4, tier, adapted = found
    assert dense["loss"] == win4["loss"] == tier["loss"] != adapted["loss"]
    assert dense["validation"] == win4["validation"] == tier["validation"]
    assert adapted["trained"] < 0.3 * dense["trained"]
    shown = script("tuning_formats", "table", "--out", str(out))
    assert f"| sgd | 0.01 | 1 | {dense['validation']:.4f} |" in shown


def test_tables_of_rotated_starts_are_those_of_the_rows() -> None:
    results = ROOT / "benchmarks" / "results" / "nvidia-h200" / "ternary-model-turned.jsonl"
    printed = script("ternary_model", "table", "--out", str(results)).splitlines()
    (plain,) = (line for line in printed if line.startswith("| rotated | 520 |"))
    (turned,) = (line for line in printed if line.startswith("| rotated and constant turned |"))
    assert plain in (ROOT / "docs" / "measured" / "ternary-linears.md").read_text()
    history = (ROOT / "docs" / "history" / "ternary-linears.md").read_text()
    assert plain in history
    assert turned in history


def test_the_table_of_long_first_stages_is_that_of_the_rows() -> None:
    results = ROOT / "benchmarks" / "results" / "nvidia-h200" / "ternary-model-long.jsonl"
    page = (ROOT / "docs" / "measured" / "ternary-linears.md").read_text()
    found = [json.loads(line) for line in results.read_text().splitlines()]
    done = [row for row in found if row.get("done")]
    ends = {(row["first_steps"], row["variant"]): row for row in done}
    assert len(ends) == len(done) == 14
    found_gaps: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (first_steps, variant), row in ends.items():
        recipe = f"`{variant.partition(',')[0]}`"
        recipe += ", queries, keys and values in 4 bits" if "heads" in variant else ""
        cells = [f"{first_steps} and {row['step']}", recipe]
        cells += [f"{row['judged'][part]:.4f}" for part in ("python", "other")]
        for part in ("python", "other"):
            base = ends[first_steps, "b1.58"]["judged_each"][part]
            gaps = [own - other for own, other in zip(row["judged_each"][part], base, strict=True)]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5
            found_gaps.setdefault((variant, part), []).append((statistics.mean(gaps), error))
            cells.append(f"{statistics.mean(gaps):+.4f} ({error:.4f})")
        assert f"| {' | '.join(cells)} | {row['zeros']['overall']:.1%} |" in page
    prose = " ".join(page.split())
    means = {
        key: (
            statistics.mean(gap for gap, _ in gaps),
            math.hypot(*(e for _, e in gaps)) / len(gaps),
        )
        for key, gaps in found_gaps.items()
    }
    mean, error = means["a4.8", "python"]
    assert f"five runs is {mean:.4f} (standard error {error:.4f})" in prose
    mean, error = means["a4.8", "other"]
    assert f"On other text the mean gap is {mean:.4f} ({error:.4f})" in prose
    for part, where in (("python", "on Python code"), ("other", "on other text")):
        mean, error = means["a4.8-fp4", part]
        assert f"{mean:.3f} ({error:.4f}) {where}" in prose
    printed = script("ternary_model", "table", "--out", str(results)).splitlines()
    rises = [line for line in printed if line.startswith("| rotated | ")]
    assert len(rises) == 5
    assert all(line in page for line in rises)


@pytest.mark.slow
def test_a_model_continues_in_ternary_weights_and_its_variants_from_one_state(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    small = ["--model", str(folder), "--state", str(tmp_path), "--inner", "aot_eager", "--every"]
    small += ["2", "--batch", "2", "--length", "32", "--judged", "4", "--few", "2"]
    small += ["--train-tokens", "100000", "--out", str(out)]
    texts = tmp_path / "texts"  # not this project's own: an edit may move a file to another split
    texts.mkdir()
    for number in range(80):
        sentences = [f"text {number} has line {line}, " * 4 for line in range(60)]
        (texts / f"{number}.{'md' if number % 2 else 'py'}").write_text("\n".join(sentences))
    small += ["--root", str(texts)]
    script("ternary_model", "text", *small)
    small.append("--rotate")
    script("ternary_model", "first", *small, "--steps", "2")
    rest = ["--second-until", str(time.time() + 1), "--evaluations", "2"]
    script("ternary_model", "first", *small, "--steps", "4", *rest)  # goes on after two steps
    for variant in ("b1.58", "a4.8, keys in 3 bits"):
        script("ternary_model", "second", *small, "--wait", *rest[2:], "--variant", variant)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["step"] for row in found if row["stage"] == 1] == [0, 2, 2, 4, 4]
    starts = [row for row in found if row["stage"] == 2 and row["step"] == 0]
    assert starts[0]["before"] == starts[1]["before"] == starts[0]["judged"]
    assert starts[1]["judged"] != starts[1]["before"]
    ends = {row["variant"]: row for row in found if row.get("done")}
    assert ends["a4.8, keys in 3 bits"]["zeros"]["out"] > 0.4 > ends["b1.58"]["zeros"]["out"]
    assert all(row["step"] == row["of_steps"] == 2 for row in ends.values())
    table = script("ternary_model", "table", "--out", str(out))
    assert "| b1.58, rotated | 1 | 2 |" in table
    assert "| +0.0000 (0.0000) | +0.0000 (0.0000) |" in table
    assert "| gap of | evaluation 0 | evaluation 1 | evaluation 2 |" in table
