"""Lossy modes on a real speech model: what it hears of sentences that a machine reads aloud.

    python benchmarks/quality/speech.py measure --model FOLDER
    python benchmarks/quality/speech.py table

FOLDER is a Whisper model as `from_pretrained` takes it. espeak-ng must be installed: it reads
sentences of Python's reference, without code, in `VOICES`. Attention in low bits is that of the
encoder, compiled with the backend; lossy weights are all linear layers'. A row has a mode, the
words of each sentence that were heard wrongly, and the relative error of the encoder's states.
"""

from __future__ import annotations

import argparse
import copy
import io
import random
import re
import statistics
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import RESULTS, rows
from benchmarks.quality import labels
from benchmarks.quality.modes import LEVELS, MANTISSAS
from benchmarks.quality.tasks import sentences
from memeff_compile.model.weights.compress import decompress_

VOICES = ("en-us", "en-gb")
RATE = 16_000
"""Samples a second that Whisper takes."""
START, END = (50258, 50259, 50359, 50363), 50257
"""Tokens before a transcript in English without times, and the one after it."""
MOST = 60
"""Tokens of a transcript."""
BATCH = 8
EXACT = "exact"
MODES = (
    EXACT,
    "compiled",
    *(f"attention, {level}" for level in LEVELS),
    *(f"weights, {kept} bits of 7" for kept in MANTISSAS),
)


def drawn(count: int, seed: int) -> list[str]:
    """Return sentences of ordinary words."""
    plain = [s for own in sentences() for s in own if re.fullmatch(r"[A-Za-z][a-z ,]{40,110}\.", s)]
    return random.Random(seed).sample(sorted(set(plain)), count)


def spoken(text: str, voice: str) -> Tensor:
    """Return the samples of a text that is read aloud."""
    call = ["espeak-ng", "-v", voice, "-s", "130", "--stdout", text]
    with wave.open(
        io.BytesIO(subprocess.run(call, capture_output=True, check=True).stdout)
    ) as read:
        rate, data = read.getframerate(), bytearray(read.readframes(read.getnframes()))
    samples = torch.frombuffer(data, dtype=torch.int16).float() / 2**15
    size = len(samples) * RATE // rate
    found = torch.nn.functional.interpolate(samples[None, None], size, mode="linear")
    return found[0, 0]


def words(text: str) -> list[str]:
    """Return the words of a text without case and marks."""
    return re.sub(r"[^a-z0-9 ]", "", text.lower().replace("-", " ")).split()


def word_errors(wanted: list[str], found: list[str]) -> int:
    """Return how many words must be put in, left out or changed."""
    costs = list(range(len(found) + 1))
    for row, word in enumerate(wanted, 1):
        before, costs[0] = costs[0], row
        for at, other in enumerate(found, 1):
            best = min(costs[at] + 1, costs[at - 1] + 1, before + (word != other))
            before, costs[at] = costs[at], best
    return costs[-1]


@torch.no_grad()
def transcripts(model: Any, features: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Return the encoder's states, and the tokens that a model hears, greedily."""
    states, found = [], []
    for part in features.split(BATCH):
        own = model.model.encoder(part).last_hidden_state
        ids = torch.tensor([START] * len(part))
        cache = None
        given = ids
        while ids.shape[1] < len(START) + MOST and not (ids == END).any(1).all():
            out = model.model.decoder(
                input_ids=given, encoder_hidden_states=own, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            given = model.proj_out(out.last_hidden_state[:, -1:]).argmax(-1)
            ids = torch.cat([ids, given], 1)
        states.append(own)
        ends = [[*row, END].index(END) for row in ids[:, len(START) :].tolist()]
        found += [row[:end] for row, end in zip(ids[:, len(START) :].tolist(), ends, strict=True)]
    return torch.cat(states), found


def under(mode: str, stored: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model under a mode, and facts about it."""
    model = copy.deepcopy(stored)
    kind, _, name = mode.partition(", ")
    if kind == "weights":
        kept = int(name.split()[0])
        report = memeff_compile.compress_(model, "tier", mantissa=kept, min_size=1, progress=False)
        if not decompress_(model):
            raise SystemExit(f"no weight was compressed:\n{report}")
        return model, {"bits": report.bits, "compressed": len(report.compressed)}
    if mode == EXACT:
        return model, {}
    options: dict[str, Any] = {"memeff.inner": "aot_eager"}
    if kind == "attention":
        options |= {"memeff.attention": name, "memeff.attention.length": 0}
    torch.compiler.reset()
    memeff_compile.reset()
    model.model.encoder = torch.compile(model.model.encoder, backend="memeff", options=options)
    return model, {}


def measure(given: argparse.Namespace) -> int:
    """Write a row for each mode that has none."""
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    stored = WhisperForConditionalGeneration.from_pretrained(given.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    extract = WhisperFeatureExtractor.from_pretrained(given.model)
    texts = drawn(given.count, given.seed)
    sound = [spoken(text, VOICES[at % len(VOICES)]).numpy() for at, text in enumerate(texts)]
    made = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features.bfloat16()
    had = rows.read(given.out) if given.out.exists() else []
    done = {(row["mode"], row["seed"], row["sentences"]) for row in had}
    facts = {"what": "speech", "model": given.model.name, "dtype": "bfloat16", "seed": given.seed}
    facts |= {"sentences": len(texts), "words": sum(len(words(text)) for text in texts)}
    exact, environment = transcripts(stored.eval(), made), rows.environment()
    for mode in given.modes or MODES:
        if (mode, given.seed, len(texts)) in done:
            continue
        model, own = under(mode, stored.eval())
        states, heard = exact if mode == EXACT else transcripts(model, made)
        if mode.startswith("attention"):
            own["rewrites"] = memeff_compile.last_report().rewrites("quantize_attention")
        off = (states.float() - exact[0].float()).norm() / exact[0].float().norm()
        pairs = zip(texts, tokenizer.batch_decode(heard), strict=True)
        wrong = [word_errors(words(text), words(own)) for text, own in pairs]
        same = sum(a == b for a, b in zip(heard, exact[1], strict=True))
        row = {**facts, "mode": mode, "wrong": wrong, "same": same, "error": float(f"{off:.3g}")}
        rows.append(given.out, {**row, **own, **environment})
        print(
            f"{mode}: {sum(wrong)} words wrong, {same} transcripts the same, {off:.2%}", flush=True
        )
    return 0


def table(given: argparse.Namespace) -> int:
    """Print a table for each model."""
    found = rows.latest(rows.read(given.out), "model", "mode", "seed")
    for name in dict.fromkeys(row["model"] for row in found):
        here = [row for row in found if row["model"] == name]
        exact = {row["seed"]: row for row in here if row["mode"] == EXACT}
        count, total = (sum(r[k] for r in exact.values()) for k in ("sentences", "words"))
        print(f"\n{name}, {count} sentences, {total:,} words\n")
        wrong = "wrong words (exact model: share; other rows: change in percentage points)"
        same = "transcripts that stay the same"
        print(f"| mode | {wrong} | {same} | relative error of the encoder |")
        print("|---|---:|---:|---:|")
        for mode in dict.fromkeys(row["mode"] for row in here):
            own = [row for row in here if row["mode"] == mode]
            print(f"| {labels.of_mode(mode)} | {' | '.join(_cells(own, exact))} |")
    return 0


def _cells(own: list[dict[str, Any]], exact: dict[int, dict[str, Any]]) -> list[str]:
    total = sum(row["words"] for row in own)
    if own[0]["mode"] == EXACT:
        told = f"{100 * sum(sum(row['wrong']) for row in own) / total:.1f} %"
    else:
        pairs = [zip(exact[r["seed"]]["wrong"], r["wrong"], strict=True) for r in own]
        moved = [b - a for each in pairs for a, b in each]
        error = statistics.stdev(moved) * len(moved) ** 0.5
        told = f"{100 * sum(moved) / total:+.1f} ({100 * error / total:.1f})"
    same = 100 * sum(row["same"] for row in own) / sum(row["sentences"] for row in own)
    off = 100 * statistics.mean(row["error"] for row in own)
    return [told, f"{same:.0f} %", f"{off:.1f} %"]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["measure", "table"])
    parser.add_argument("--model", type=Path, help="a folder")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[], help="all without")
    parser.add_argument("--count", type=int, default=32, help="sentences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "speech.jsonl")
    given = parser.parse_args()
    return {"measure": measure, "table": table}[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
