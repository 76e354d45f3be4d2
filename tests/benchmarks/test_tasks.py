"""Tasks: fixed prompts, right answers by hand, and a toy model that answers from its context."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality import answering, speech, task_scores, tasks
from benchmarks.quality.modes import Mode
from benchmarks.quality.subject import States
from tests.support.scripts import script

GENERATED = {
    "addition": "3411c6bbb675",
    "addition, likeliest of 4": "349dc82d0610",
    "word problems": "c278ad743195",
    "copying": "8d4288178d40",
    "sorting 3 digits": "490431bfc835",
    "sorting 5 digits": "37909f938eac",
    "key-value, 2k": "4437570f10d6",
    "key-value, 8k": "0973b94ec543",
    "key-value, 32k": "04556cb6b635",
}
"""Digests of the tasks that need no text: the same on every machine."""
BY_NAME = {task.name: task for task in tasks.TASKS}
COUNT = 3
ROOT = Path(__file__).resolve().parents[2]


class Bytes:
    """A tokenizer of bytes, with a token before every text."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=[256] * add_special_tokens + list(text.encode()))

    def decode(self, ids: Any) -> str:
        return bytes(int(each) for each in ids if int(each) < 256).decode(errors="replace")


class Knowing:
    """A model whose likeliest next token is the one that followed the same twelve tokens before."""

    device = "cpu"

    def __init__(self, tells: bool = True) -> None:
        self.tokenizer, self.tells = Bytes(), tells

    def states(self, ids: Tensor, *_: Any, **__: Any) -> States:
        last = torch.zeros(*ids.shape, 257)
        for row, tokens in enumerate(ids.tolist()):
            seen: dict[tuple[int, ...], int] = {}
            for at, token in enumerate(tokens):
                if at >= 12:
                    seen[tuple(tokens[at - 12 : at])] = token
                known = seen.get(tuple(tokens[at - 11 : at + 1]))
                if known is not None and self.tells:
                    last[row, at, known] = 9.0
        return States(last, [])

    def logits(self, last: Tensor) -> Tensor:
        return last


def rows(name: str, count: int = COUNT, seed: int = 0) -> tasks.Rows:
    return tasks.rows_of(Bytes(), BY_NAME[name], seed, count)


def judged(found: tasks.Rows, kind: str, tells: bool = True) -> list[bool]:
    subject: Any = Knowing(tells)
    return answering.Answering(subject, Mode("exact")).judge(found, kind, batch=2)[0]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_prompts_are_fixed(name: str) -> None:
    assert tasks.text_digest(BY_NAME[name], 0) == GENERATED[name]
    assert tasks.text_digest(BY_NAME[name], 1) != GENERATED[name]


def test_every_task_is_generated_or_from_packaged_text() -> None:
    packaged = {"next sentence", "definitions", "needles, 2k", "needles, 8k", "needles, 32k"}
    assert set(BY_NAME) == {*GENERATED, *packaged, "code that parses"}


@pytest.mark.parametrize("task", tasks.TASKS, ids=lambda task: task.name)
def test_prompts_of_a_seed_are_the_same_each_time(task: tasks.Task) -> None:
    if task.length > 2048:
        task = BY_NAME[task.name.replace("32k", "2k").replace("8k", "2k")]
    found = tasks.rows_of(Bytes(), task, 0, 2)
    assert tasks.digest(found) == tasks.digest(tasks.rows_of(Bytes(), task, 0, 2))
    assert tasks.digest(found) != tasks.digest(tasks.rows_of(Bytes(), task, 1, 2))
    written = tasks.WRITTEN if task.kind == "code" else 0
    assert found.ids.shape == (2 * found.each, task.length - written)
    assert (found.ids[:, 0] == 256).all()


def answers(found: tasks.Rows) -> list[tuple[str, str]]:
    """Return the end of each prompt, and the answer."""
    shown = []
    for ids, count in zip(found.ids, found.answers, strict=True):
        shown.append((Bytes().decode(ids[-count - 90 : -count]), Bytes().decode(ids[-count:])))
    return shown


@pytest.mark.parametrize("name", ["needles, 2k", "copying", "definitions"])
def test_rows_of_one_text_have_their_first_tokens_in_common(name: str) -> None:
    found = tasks.rows_of(Bytes(), BY_NAME[name], 0, 4, questions=2)
    assert found.group == (found.each if BY_NAME[name].is_apart else 2)
    for group in found.ids.split(found.group):
        assert (group[:, : found.first] == group[:1, : found.first]).all()
    assert len({tuple(ids[: found.first].tolist()) for ids in found.ids}) == (
        len(found.ids) // found.group
    )
    for ids, end, count in zip(found.ids, found.ends, found.answers, strict=True):
        assert (ids[end:] == ids[end - 1]).all()
        answer = Bytes().decode(ids[end - count : end])
        assert name != "needles, 2k" or Bytes().decode(ids[: found.first]).count(answer) == 1
    assert len(set(found.questions)) == 4


def test_questions_about_one_text_are_answered_as_about_their_own() -> None:
    found = tasks.rows_of(Bytes(), BY_NAME["key-value, 2k"], 0, 4, questions=4)
    subject: Any = Knowing()
    alone = answering.Answering(subject, Mode("exact"))
    assert alone.judge(found._replace(group=1), "exact", 2)[0] == [True] * 4


def test_sums_are_right() -> None:
    for prompt, answer in answers(rows("addition", 20)):
        a, b = re.findall(r"(\d+) \+ (\d+) =$", prompt)[0]
        assert answer == f" {int(a) + int(b)}\n"
    likely = answers(rows("addition, likeliest of 4", 20))
    for first in range(0, len(likely), tasks.CHOICES):
        own = likely[first : first + tasks.CHOICES]
        assert len({answer for _, answer in own}) == tasks.CHOICES
        a, b = re.findall(r"(\d+) \+ (\d+) =$", own[0][0])[0]
        assert own[0][1] == f" {int(a) + int(b)}\n"
    for prompt, answer in answers(rows("word problems", 20)):
        has, more = map(int, re.findall(r"has (\d) \w+s and buys (\d) more", prompt + "")[0:1][0])
        assert answer == f" {has + more}\n\n"


def test_digits_are_sorted_and_words_copied() -> None:
    for name in ("sorting 3 digits", "sorting 5 digits"):
        for prompt, answer in answers(rows(name, 20)):
            digits = re.findall(r"((?:\d )+)->$", prompt)[0].split()
            assert answer.split() == sorted(digits)
    for prompt, answer in answers(rows("copying", 20)):
        assert answer == re.findall(r"Words:( .*)\nCopy:$", prompt)[0] + "\n"


@pytest.mark.parametrize("name", ["key-value, 2k", "needles, 2k"])
def test_what_is_asked_was_told_once_before_the_question(name: str) -> None:
    found = rows(name, 8)
    places = []
    for ids, count in zip(found.ids, found.answers, strict=True):
        text, answer = Bytes().decode(ids[:-count]), Bytes().decode(ids[-count:])
        first, _, question = text.rpartition("The value" if "key" in name else "Question")
        key = question.rstrip(":").splitlines()[-1].rpartition("Answer: ")[2]
        told = key + (":" if "key" in name else "") + answer.rstrip("\n")
        assert first.count(told) == 1
        assert (
            first[: first.index(told)].rstrip(" ").endswith(("\n", "The secret")) or "The" in told
        )
        places.append(first.index(told) / len(first))
    assert max(places) - min(places) > 0.3, "keys lie all over the text"


def test_a_model_that_looks_back_finds_keys_and_one_that_does_not_finds_none() -> None:
    found = rows("key-value, 2k", 4)
    assert judged(found, "exact") == [True] * 4
    assert judged(found, "exact", tells=False) == [False] * 4


def test_choices_go_by_probability_of_a_character() -> None:
    ids = torch.tensor(
        [
            [256, *b"ab1234567890xy", *b"1234567890xy", 57],
            [256, *b"ab1234567890xy", *b"1234567890xy", 65],
        ]
    )
    ids[0, -1] = ids[1, -1] = 1
    found = tasks.Rows(ids, [27, 27], [1, 1], [1, 2], 9, 2, ["", ""])
    assert judged(found, "choice") == [False], "the longer answer has more probability a character"
    same = tasks.Rows(ids, [27, 27], [1, 1], [1, 1], 9, 2, ["", ""])
    assert judged(same, "choice") == [True]


HEAD = 'def f(a):\n    """Say."""\n'


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("    return a\n", True),
        ("    return a\n    x = (\n", True),
        ("    return a\n\n\ndef g(:\n", True),
        ("    x ==== 3\n    return\n", False),
        ("    for x in a:\n        print(x\n        y = 3\n", False),
        ("\n\ndef g():\n", False),
        ("    # a remark\n", False),
        ("    return", False),
    ],
)
def test_code_must_parse_up_to_its_last_statement(written: str, right: bool) -> None:
    assert tasks.parses(HEAD, written) is right


def row(mode: str, answers: str, task: str = "copying", **others: Any) -> dict[str, Any]:
    facts = {"what": "tasks", "model": "m", "dtype": "bfloat16", "chance": 0.0, "seed": 0}
    return {**facts, "digest": "d", "task": task, "mode": mode, "answers": answers, **others}


@pytest.mark.parametrize(
    ("found", "errors"),
    [("a b c", 0), ("a c", 1), ("a x c", 1), ("a b b c", 1), ("", 3), ("c a b", 2)],
)
def test_words_that_were_heard_wrongly_are_counted(found: str, errors: int) -> None:
    assert speech.word_errors(["a", "b", "c"], found.split()) == errors


@pytest.mark.slow
def test_each_mode_of_speech_has_a_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="models are folders of it")
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder")
             for name in ("layers", "attention_heads")}  # fmt: skip
    sizes |= {"encoder_ffn_dim": 8192, "decoder_ffn_dim": 64, "d_model": 64, "init_std": 0.2}
    made, out = tmp_path / "speaker", tmp_path / "speech.jsonl"
    config = transformers.WhisperConfig(**sizes)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(made)
    transformers.WhisperFeatureExtractor().save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(made)
    monkeypatch.setattr(speech, "spoken", lambda text, voice: torch.randn(speech.RATE))
    monkeypatch.setattr(speech, "MOST", 3)
    modes = ["exact", "attention, 4b", "weights, 7 bits of 7", "weights, 0 bits of 7"]
    given = ["measure", "--model", str(made), "--count", "2", "--out", str(out), "--modes"]
    script("speech", *given, *modes)
    found = {row["mode"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(found) == modes
    assert found["attention, 4b"]["rewrites"], "a change, of all layers"
    assert found["weights, 7 bits of 7"]["error"] == 0 < found["weights, 0 bits of 7"]["error"]
    assert found["weights, 7 bits of 7"]["same"] == 2
    assert script("speech", *given, *modes) == "", "no row is measured again"
    assert "| attention, 4b | " in script("speech", "table", "--out", str(out))


def test_modes_are_compared_item_by_item() -> None:
    found = [row("exact", "1110"), row("half", "1011"), row("half", "0000", digest="other")]
    made = task_scores.scores(found)
    assert made["exact"]["copying"][:2] == (0.75, 0.0)
    right, change, error = made["half"]["copying"]
    assert (right, change) == (0.75, 0.0)
    assert error == pytest.approx(torch.tensor([0.0, -1, 0, 1]).std().item() / 2)
    assert task_scores.shown(made["half"]["copying"], "half") == "+0 (41)"
    assert (
        task_scores.shown(task_scores.scores([found[0]])["exact"]["copying"], "exact")
        == "75 % (25)"
    )


def test_the_newest_prompts_of_a_seed_count() -> None:
    found = [row("exact", "11", digest="old"), row("half", "00", digest="old")]
    found += [row("exact", "1111"), row("half", "1110"), row("exact", "11", seed=1)]
    made = task_scores.scores(found)
    assert made["half"]["copying"].change == -0.25
    assert made["exact"]["copying"].right == 1.0


def test_fine_tuned_models_are_compared_with_that_of_the_exact_loss() -> None:
    found = [
        row("exact", "0000"),
        row("fine-tuned, exact-1", "1100"),
        row("fine-tuned, mass-1", "1110"),
    ]
    made = task_scores.scores(found)
    assert made["fine-tuned, exact-1"]["copying"].change == 0.5
    assert made["fine-tuned, mass-1"]["copying"].change == 0.25


def test_the_mean_is_over_tasks_above_chance() -> None:
    found = [row("exact", "1" * 30 + "0" * 10), row("exact", "1" + "0" * 39, "sorting")]
    assert task_scores.solved(found, task_scores.scores(found)) == ["copying"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an untrained model, and a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers", reason="models are folders of it")
    from tokenizers import ByteLevelBPETokenizer

    made: Path = tmp_path_factory.mktemp("tiny")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["how many"], 260, show_progress=False)
    tokenizer.save(str(made / "tokenizer.json"))
    file = str(made / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_file=file).save_pretrained(made)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(**sizes, **heads, **ends, initializer_range=0.1)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    return made


MODES = ["exact", "cache, 2 bits"]


@pytest.mark.slow
def test_rows_end_where_time_does_and_go_on_from_there(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    given = ["measure", "--models", str(folder), "--count", "2", "--out", str(out)]
    given += ["--seeds", "0", "--tasks", "copying", "code", "--modes", *MODES]
    script("task_scores", *given, "--budget", "0")
    assert not out.exists()
    script("task_scores", *given, "--tasks", "copying")
    first = out.read_text().splitlines()
    script("task_scores", *given)
    whole = out.read_text().splitlines()
    assert whole[: len(first)] == first
    found = [json.loads(line) for line in whole]
    names = {(each["mode"], each["task"]) for each in found}
    assert len(names) == len(found), "no row is measured again"
    assert {mode for mode, _ in names} == set(MODES)
    assert {each["task"] for each in found} == {"copying", "code that parses"}
    assert all(len(each["answers"]) == each["items"] == 2 for each in found)
    times = ["--times", "--shape", "1", "256", "3", "--inner", "aot_eager"]
    script("task_scores", *given, *times, "--turns", str(tmp_path / "turns"))
    timed = [json.loads(line) for line in out.read_text().splitlines()[len(whole) :]]
    assert {each["what"] for each in timed} == {"task times"}
    assert all(each["token_ms"] > 0 for each in timed)
    assert {each["mode"]: each["rewrites"]["compress_kv_cache"] > 0 for each in timed} == {
        "exact": False,
        "cache, 2 bits": True,
    }
    shown = script("task_scores", "table", "--out", str(out))
    assert "Not above chance: copying" in shown


@pytest.mark.parametrize(
    "mode",
    [
        Mode("cache", cache={"bits": 16}),
        pytest.param(Mode("compiled", compiled=True), marks=pytest.mark.slow),
    ],
    ids=lambda mode: mode.name,
)
def test_exact_modes_answer_as_the_exact_model(mode: Mode, folder: Path) -> None:
    from benchmarks.quality.subject import Subject

    subject = Subject(folder, "cpu", torch.float32)
    items = tasks.rows_of(subject.tokenizer, BY_NAME["addition, likeliest of 4"], 0, 3)
    plain, margins = answering.Answering(subject, Mode("exact")).judge(items, "choice", 4)
    found = answering.Answering(subject, mode).judge(items, "choice", 4)
    assert found[0] == plain
    assert found[1] == pytest.approx(margins, abs=1e-5)


@pytest.mark.parametrize("mode", [Mode("exact"), Mode("cache", cache={"bits": 16})], ids=str)
def test_a_text_is_read_once_for_all_questions(mode: Mode, folder: Path) -> None:
    from benchmarks.quality.subject import Subject

    subject = Subject(folder, "cpu", torch.float32)
    items = tasks.rows_of(subject.tokenizer, BY_NAME["copying"], 0, 4, questions=4)
    _, plain = answering.Answering(subject, Mode("exact")).judge(
        items._replace(group=1), "exact", 4
    )
    read = answering.Answering(subject, mode)
    _, found = read.judge(items, "exact", 2)
    assert found == pytest.approx(plain, abs=1e-5)
    (pairs,) = read.exact.known.values()
    assert pairs[0][0].shape[::2] == (1, items.first), "one row, for two batches of two"


def test_attention_in_low_bits_goes_on_after_keys_of_a_cache() -> None:
    from benchmarks.quality.subject import Lowered

    q, k, v = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64).unbind()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, 24:]
    mask = torch.ones(16, 40, dtype=torch.bool).tril(24)
    lowered = Lowered("8b", judged=False)  # in fp64 the op computes the exact formula
    with lowered.forward():
        call = torch.nn.functional.scaled_dot_product_attention
        found = call(q[:, :, 24:], k, v, attn_mask=mask)
        assert not lowered.exact
        call(q[:, :, 24:], k, v, attn_mask=mask.roll(1, 1))
    assert lowered.exact == {1}, "another mask than the causal one"
    assert torch.allclose(found, wanted)


def test_exact_modes_are_told_by_margins() -> None:
    found = [row("exact", "10", margins=[0.2, -3.0]), row("same", "00", margins=[-0.1, -3.1])]
    made = task_scores.agreements([*found, row("half", "01")])
    assert list(made) == ["same"]
    assert made["same"] == pytest.approx((2, 1, 0.2, 0.1))


def test_a_summary_has_a_mode_in_a_row_and_a_model_in_a_column(tmp_path: Path) -> None:
    big = {"model": "n", "cache_bytes_a_token": 100.0, "length": 8}
    half = {**big, "cache_bytes_a_token": 50.0}
    timed = {"what": "task times", "model": "m", "dtype": "bfloat16", "compiled": "inductor"}
    found = [row("exact", "1101" * 32), row("exact", "1001" * 32, "sorting")]
    found += [row("cache, 16 bits", "11" * 64), row("exact", "10" * 64, model="n")]
    found += [row("cache, 16 bits", "10" * 64, **big), row("cache, 4 bits", "10" * 64, **half)]
    for mode, ms in (("exact", 1.0), ("cache, 16 bits", 0.5)):
        found.append({**timed, "mode": mode, "prompt_ms": 0.0, "token_ms": ms})
    out = tmp_path / "tasks.jsonl"
    out.write_text("".join(json.dumps(each) + "\n" for each in found))
    shown = script("task_scores", "summary", "--out", str(out)).splitlines()
    assert [line for line in shown if line.startswith("|")] == [
        f"| {task_scores.SCORED} | {task_scores.BYTES} | time of the compiled model, % of exact "
        "| m, mean of 2 tasks | n, mean of 1 task |",
        "|---|---:|---:|---:|---:|",
        "| exact model |  | 100 % | 62 % (3) | 50 % (4) |",
        "| 16-bit KV cache | 100 % | 50 % | +25 (4) in 1 task | 0 |",
        "| 4-bit KV cache | 50 % |  |  | 0 |",
    ]


def test_the_page_shows_what_the_rows_say() -> None:
    page = (ROOT / "docs" / "measured" / "task-scores.md").read_text()
    results = ROOT / "benchmarks" / "results"
    files = [("task_scores", file) for file in sorted(results.glob("*/tasks.jsonl"))]
    files += [("speech", file) for file in sorted(results.glob("*/speech.jsonl"))]
    assert len(files) > 2
    for name, file in files:
        shown = script(name, "table", "--out", str(file))
        tables = [line for line in shown.splitlines() if line.startswith("|")]
        assert len(tables) > 3
        assert [line for line in tables if line not in page] == []
    file = results / "nvidia-h200" / "tasks.jsonl"
    page = (ROOT / "docs" / "measured" / "tasks.md").read_text()
    shown = script("task_scores", "summary", "--out", str(file))
    assert [line for line in shown.splitlines() if line not in page] == []


SMALL, QWEN, GEMMA = "smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"
VALUES = "cache, 4 bits, values merged from half on"
ALIGNED = "cache, aligned from half on, 4 bits"
MIXED = "cache, 3 bits, values of 2 bits, merged"
WIDE = "cache, 3 bits, values of 2 bits, groups of 128, merged from a quarter on"
BOTH = "cache, aligned from a quarter on, 3 bits"
CLAIMS = {
    "all 64 needles at 2,048": (SMALL, "cache, 4 bits", "needles, 2k", 64),
    "17 instead of 19 of 24": (SMALL, "cache, 4 bits", "needles, 8k", 17),
    "13 instead of 14 of 16 keys": (QWEN, "cache, 4 bits", "key-value, 32k", 13),
    "6 instead of 9 of 16 needles": (QWEN, "cache, 4 bits", "needles, 32k", 6),
    "60 of 64 needles": (SMALL, "cache, 3 bits", "needles, 2k", 60),
    "15 of 24 in 8,192 tokens": (SMALL, "cache, 3 bits", "needles, 8k", 15),
    "12 of 16 keys in 32,768": (QWEN, "cache, 3 bits", "key-value, 32k", 12),
    "53 of 64 keys": (QWEN, "cache, 2 bits", "key-value, 2k", 53),
    "14 of 24 in 8,192": (QWEN, "cache, 2 bits", "key-value, 8k", 14),
    "3 of 16 keys in 32,768": (QWEN, "cache, 2 bits", "key-value, 32k", 3),
    "62 of 64 needles": (SMALL, VALUES, "needles, 2k", 62),
    "17 of 24 in 8,192": (SMALL, VALUES, "needles, 8k", 17),
    "all 64 keys": (QWEN, VALUES, "key-value, 2k", 64),
    "49 of 64 needles": (SMALL, ALIGNED, "needles, 2k", 49),
    "tokens and 5 of 24 needles": (SMALL, ALIGNED, "needles, 8k", 5),
    "57 of 64 keys": (QWEN, ALIGNED, "key-value, 2k", 57),
    "55 of 64": (SMALL, WIDE, "needles, 2k", 55),
    "and 10 of 24 needles": (SMALL, WIDE, "needles, 8k", 10),
    "all of Qwen's 64 keys": (QWEN, WIDE, "key-value, 2k", 64),
    "24 of 64 needles in 2,048": (SMALL, "cache, 2 bits", "needles, 2k", 24),
    "36 of 64 needles in 2,048": (SMALL, MIXED, "needles, 2k", 36),
    "and 4 of 24": (SMALL, MIXED, "needles, 8k", 4),
    "18 of 64 needles in 2,048": (SMALL, BOTH, "needles, 2k", 18),
    "and 3 of 24": (SMALL, BOTH, "needles, 8k", 3),
    "14 of 16 keys at every level": (QWEN, "attention, 4b", "key-value, 32k", 14),
    "8 with `8b`": (QWEN, "attention, 8b", "needles, 32k", 8),
    "6 with `4b`": (QWEN, "attention, 4b", "needles, 32k", 6),
    "it finds 42 of 64 needles": (GEMMA, "cache, 4 bits, per_head", "needles, 2k", 42),
    "and 3 of 24 needles in 8,192": (GEMMA, "cache, 4 bits, per_head", "needles, 8k", 3),
    "and 9 with `8b`": (QWEN, "attention, 4b, the worst half 8b", "needles, 32k", 9),
}
"""Words of the page -> the newest row of seed 0 that they stand for, and how many items are right."""


@pytest.mark.parametrize("words", CLAIMS)
def test_counts_in_the_text_are_those_of_the_rows(words: str) -> None:
    page = " ".join((ROOT / "docs" / "measured" / "tasks.md").read_text().split())
    file = ROOT / "benchmarks" / "results" / "nvidia-h200" / "tasks.jsonl"
    model, mode, task, right = CLAIMS[words]
    found = [json.loads(line) for line in file.read_text().splitlines()]
    named = (model, mode, task, 0)
    own = [r for r in found if (r["model"], r["mode"], r.get("task"), r.get("seed")) == named]
    assert words in page
    assert own[-1]["right"] == right


EXACT_MODES = {
    "questions with transformers' own cache": "transformers' own cache",
    "with a 16-bit cache (three models)": "cache, 16 bits",
    "with lossless compressed weights (three models)": "weights, 7 bits of 7",
    "with the compiled SmolLM2": "compiled",
}
"""Words of the page -> the exact mode whose items the number before them counts."""


@pytest.mark.parametrize("words", EXACT_MODES)
def test_exact_modes_answer_as_many_items_as_the_text_says(words: str) -> None:
    page = " ".join((ROOT / "docs" / "measured" / "tasks.md").read_text().split())
    file = ROOT / "benchmarks" / "results" / "nvidia-h200" / "tasks.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    asked = [each for each in found if each["what"] == "tasks"]
    by_model = [
        task_scores.agreements([each for each in asked if each["model"] == name])
        for name in (SMALL, QWEN, GEMMA)
    ]
    own = [each[EXACT_MODES[words]] for each in by_model if EXACT_MODES[words] in each]
    assert sum(each.others for each in own) == 0
    assert f"{sum(each.items for each in own):,} {words}" in page


def test_figures_of_trained_models_hold_what_arithmetic_says() -> None:
    from benchmarks.quality import trained_figures as figures

    torch.manual_seed(0)
    x = torch.randn(2, 64, 8)
    turn, _ = torch.linalg.qr(torch.randn(2, 8, 8))
    y = (x @ turn)[[1, 0]] + torch.randn(2, 1, 8)
    assert abs(figures.cosine(x, y)) < 0.3
    assert figures.cosine(*figures.turned(x, y, 64)) == pytest.approx(1, abs=1e-5)
    assert figures.entropy(torch.tensor([0, 1, 2, 3])) == 2.0
    codes = figures.codes_of(torch.tensor([[[7.0, -3.4], [0.2, 14.0]]]), 1)
    assert codes.flatten().tolist() == [7, -3, 0, 7]


def test_each_part_of_the_figures_has_a_row(folder: Path, tmp_path: Path) -> None:
    from benchmarks.quality.trained_figures import PARTS

    out = tmp_path / "figures.jsonl"
    script("trained_figures", "--models", str(folder), "--length", "260", "--out", str(out))
    found = {each["part"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert list(found) == list(PARTS)
    assert sum(found["codes"]["counts"]["keys"]) == 2 * 256 * 32
    assert found["exponents"]["trained"]["entropy"]["sign"] == pytest.approx(1, abs=0.01)
    assert len(found["layers"]["cosines"]["keys, aligned"]) == 1
