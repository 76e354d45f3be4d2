"""The similarity of any two layers of a real model, and the cost of merging them.

    python benchmarks/quality/layer_pairs.py measure --model FOLDER
    python benchmarks/quality/layer_pairs.py table

MiniCache merges neighbours, by index. Here any two layers whose keys and values have one shape may
be a pair: `alike` is the mean cosine between their rows, of one head and token (keys after their
rotary embedding). `pair` merges two layers alone, on the first half of the sequences; `pairing`
several, on all: chosen greedily by cosine, by the cost of each alone, or neighbours from the middle
on.

A prompt is read exactly, then its rows are merged by `slerp` at the middle of the arc, each with
its length, without the first 4 and the last 128 tokens; the tokens after it are judged. One pair of
L layers saves 1 / L of the cache at most.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import rows
from benchmarks.quality import texts
from benchmarks.quality.command import parser_of, run, subject_of
from benchmarks.quality.lossy_modes import mean_and_error
from benchmarks.quality.subject import Subject
from memeff_compile.kernels.coded_kv_cache import merging

FIRST, RECENT = 4, 128
"""Tokens of a prompt that stay as they came: `KVCache`'s defaults."""
ALLOWED = 0.05
"""The allowed cost of a pairing, in perplexity."""

Pair = tuple[int, int]
Rows = list[tuple[Tensor, Tensor]]
"""Keys and values (B, H, N, D) of each layer; layers without any have empty ones."""


def rows_in(cache: Any, tokens: int) -> Rows:
    """Return an exact cache's rows of a prompt, layer by layer."""
    found: Rows = []
    for layer in cache.layers:
        is_whole = layer.keys is not None and layer.keys.shape[2] == tokens
        empty = torch.empty(0)
        found.append((layer.keys, layer.values) if is_whole else (empty, empty))
    return found


def candidates(held: Rows) -> list[Pair]:
    """Return any two layers whose keys and values have one shape."""
    places = [place for place, (keys, _) in enumerate(held) if keys.numel()]
    return [
        (i, j)
        for i, j in itertools.combinations(places, 2)
        if held[i][0].shape == held[j][0].shape and held[i][1].shape == held[j][1].shape
    ]


def alike(held: Rows, pairs: Iterable[Pair]) -> dict[Pair, tuple[float, float]]:
    """Return the mean cosine of keys and of values for each pair."""
    unit = [tuple(F.normalize(x[..., FIRST:, :].float(), dim=-1) for x in each) for each in held]
    return {
        (i, j): tuple(float((a * b).sum(-1).mean()) for a, b in zip(unit[i], unit[j], strict=True))
        for i, j in pairs
    }  # type: ignore[misc]


def merged(held: Rows, pairs: Iterable[Pair]) -> Rows:
    """Return the rows with those of pairs on one direction each, with their own lengths."""
    found = list(held)
    for i, j in pairs:
        both = []
        for x, y in zip(held[i], held[j], strict=True):
            middle = slice(FIRST, max(FIRST, x.shape[2] - RECENT))
            below, above = x[:, :, middle], y[:, :, middle]
            e = merging.shared_direction(below, above)
            new = []
            for whole, part in ((x, below), (y, above)):
                _, length = merging.direction_and_length(part)
                copy = whole.clone()
                copy[:, :, middle] = (e * length.unsqueeze(-1)).to(whole.dtype)
                new.append(copy)
            both.append(new)
        found[i], found[j] = ((both[0][n], both[1][n]) for n in (0, 1))
    return found


def greedy(scores: dict[Pair, float], count: int) -> list[Pair]:
    """Return pairs of the highest scores; each layer is in one at most."""
    found: list[Pair] = []
    for pair in sorted(scores, key=lambda pair: -scores[pair]):
        if len(found) < count and not set(pair) & set(itertools.chain(*found)):
            found.append(pair)
    return found


class Behind:
    """Losses of the tokens after a prompt whose rows are merged."""

    def __init__(self, subject: Subject, ids: Tensor, prompt: int) -> None:
        from transformers import DynamicCache

        self.subject, self.ids, self.prompt = subject, ids, prompt
        self.caches = [DynamicCache(config=subject.model.config) for _ in ids]
        for row, cache in zip(ids, self.caches, strict=True):
            subject.states(row[None, :prompt], cache=cache)
        self.held = [rows_in(cache, prompt) for cache in self.caches]
        self.exact = [self._losses(number, []) for number in range(len(ids))]

    def _losses(self, number: int, pairs: Sequence[Pair]) -> Tensor:
        subject, cache = self.subject, copy.deepcopy(self.caches[number])
        held = merged(self.held[number], pairs)
        for place in itertools.chain(*pairs):
            cache.layers[place].keys, cache.layers[place].values = held[place]
        behind = self.ids[number, self.prompt :]
        states = subject.states(behind[None], cache=cache)
        logits = subject.logits(states.last[0, :-1])
        return F.cross_entropy(logits, behind[1:], reduction="none").double().cpu()

    def change(self, pairs: Sequence[Pair], numbers: Iterable[int]) -> tuple[float, float]:
        """Return the change of perplexity on some sequences, and its standard error."""
        off = [self._losses(n, pairs) - self.exact[n] for n in numbers]
        mean, error = mean_and_error(off)
        return math.expm1(mean), math.exp(mean) * error


@torch.no_grad()
def measure(given: argparse.Namespace) -> int:
    """Write a row of cosines, one for each pair that is tried alone, and one for each pairing."""
    started = time.monotonic()
    subject = subject_of(given)
    environment = rows.environment()
    for name in given.texts:
        ids = texts.rows_of(subject.tokenizer, name, given.length, given.sequences)
        ids = ids.to(subject.device)
        facts = {"what": "layer pairs", **subject.facts, "text": name, "sequences": len(ids)}
        facts |= {"length": given.length, "prompt": given.prompt, "digest": texts.digest(ids.cpu())}
        facts |= environment
        behind = Behind(subject, ids, given.prompt)
        pairs = candidates(behind.held[0])
        if not pairs:
            raise SystemExit(f"{subject.name} has no two layers of one shape that keep all tokens")
        each = [alike(held, pairs) for held in behind.held]
        cosines = {p: [sum(e[p][n] for e in each) / len(each) for n in (0, 1)] for p in pairs}
        shown = [[*pair, *(round(cosine, 3) for cosine in cosines[pair])] for pair in pairs]
        rows.append(given.out, {**facts, "part": "alike", "pairs": shown})
        by_cosine = {pair: sum(found) / 2 for pair, found in cosines.items()}
        tried = sorted(pairs, key=lambda p: (p[1] - p[0] > 1, -by_cosine[p]))[: given.candidates]
        few = range(max(1, len(ids) // 2))
        alone = {}
        for pair in tried:
            if time.monotonic() - started > given.budget:
                print(f"out of time after {len(alone)} pairs", flush=True)
                break
            change, error = behind.change([pair], few)
            alone[pair] = -change
            row = {
                "part": "pair",
                "pair": "{}-{}".format(*pair),
                "cosines": cosines[pair],
                "judged": len(few),
            }
            rows.append(given.out, {**facts, **row, "change": change, "change_se": error})
        half = subject.layers // 2
        neighbours = [(i, i + 1) for i in range(half, subject.layers - 1, 2)]
        every = range(len(ids))
        for count in given.counts:
            ways = {
                "by cosine": greedy(by_cosine, count),
                "by cost alone": greedy(alone, count),
                "neighbours": [p for p in neighbours if p in by_cosine][:count],
            }
            for way, chosen in ways.items():
                if len(chosen) < count:
                    continue
                change, error = behind.change(chosen, every)
                row = {"part": "pairing", "chosen": way, "count": count, "pairs": chosen}
                row |= {"tokens": len(ids) * (given.length - given.prompt - 1)}
                rows.append(given.out, {**facts, **row, "change": change, "change_se": error})
    return 0


WAYS = {
    "by cosine": "the most similar pairs (by cosine)",
    "by cost alone": "the pairs that cost least when merged one at a time",
    "neighbours": "the first neighbouring layers from the middle layer on",
}
"""How pairs were chosen, as a table says it."""


def table(given: argparse.Namespace) -> int:
    """Print the similarity of layers, and the cost of pairings."""
    found = [row for row in rows.read(given.out) if row["what"] == "layer pairs"]
    for place in dict.fromkeys((row["model"], row["text"]) for row in found):
        here = [row for row in found if (row["model"], row["text"]) == place]
        print("\n{}, {}".format(*place))
        (cosines,) = rows.latest([row for row in here if row["part"] == "alike"], "part")
        for kind, at in (("keys", 2), ("values", 3)):
            ordered = sorted(cosines["pairs"], key=lambda pair: -pair[at])
            near = [pair[at] for pair in ordered if pair[1] - pair[0] == 1]
            best = ", ".join(f"{i}-{j} {pair[at - 2]:.2f}" for i, j, *pair in ordered[:3])
            print(f"{kind}: neighbours {min(near):.2f} to {max(near):.2f}; most alike {best}")
        alone = rows.latest([row for row in here if row["part"] == "pair"], "pair")
        cheap = sorted(alone, key=lambda row: row["change"])
        within = sum(row["change"] <= ALLOWED for row in alone)
        print(f"{within} of {len(alone)} pairs alone cost at most {100 * ALLOWED:g} %; the least:")
        for row in cheap[:3]:
            print(f"  {row['pair']} {100 * row['change']:+.1f} % ({100 * row['change_se']:.1f})")
        heads = "number of merged pairs of layers | chosen pairs"
        print(f"\n| {heads} | change of perplexity (standard error) |\n|---:|---|---:|")
        for row in rows.latest([r for r in here if r["part"] == "pairing"], "count", "chosen"):
            change = f"{100 * row['change']:+.1f} % ({100 * row['change_se']:.1f})"
            print(f"| {row['count']} | {WAYS[row['chosen']]} | {change} |")
    return 0


def main() -> int:
    """Run from the command line."""
    parser = parser_of(__doc__, texts=list(texts.NAMED), prompt=1024, sequences=8)
    parser.add_argument("--candidates", type=int, default=1000, help="pairs tried alone at most")
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 7])
    return run(parser, {"measure": measure, "table": table}, "layer-pairs.jsonl")


if __name__ == "__main__":
    sys.exit(main())
