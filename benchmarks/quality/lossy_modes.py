"""Effects of every lossy mode on a real trained model: perplexity, KL, same token, pass keys.

    python benchmarks/quality/lossy_modes.py measure --model FOLDER
    python benchmarks/quality/lossy_modes.py measure --model FOLDER --length 8192 --sequences 4
    python benchmarks/quality/lossy_modes.py measure --model FOLDER --texts own=FILE.safetensors
    python benchmarks/quality/lossy_modes.py table

FOLDER is an argument of `from_pretrained`; weights are never part of a repository. Texts are those
of texts.py, the model's continuations, and any file (`--texts prose notes=notes.txt`). "generated"
are prompts of prose that the model continues, judged after the prompt. "own" is generated again, by
the measured model on this machine; own=FILE are token ids that data/continuations.py saved, the
same for every machine and run.

The exact model reads each sequence in one go, and so do attention in low bits and weights of fewer
bits. A cache takes a prompt, then pieces, each of which attends to the cache's decoded tokens
before it. So does 16 bits, whose row shows the effect of rounding alone. Every mode is judged on
the same tokens, those after the prompt. Standard errors are over blocks of 64 tokens, of the change
against the exact model. The error of a layer is that of its output states, in relative L2, with
errors of all earlier layers; for attention also that of each layer's attention alone, on exact
inputs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import rows
from benchmarks.quality import labels, texts
from benchmarks.quality.answering import calibration_of, levels_of
from benchmarks.quality.command import parser_of, run, subject_of
from benchmarks.quality.modes import Mode, modes, reported_modes
from benchmarks.quality.subject import Lowered, States, Subject
from memeff_compile.errors import MemeffError

BLOCK = 64
"""Tokens whose mean is one sample of a standard error."""
AT_ONCE = 512
"""Positions whose logits are made at a time."""
CALIBRATION = 2
"""Sequences of the other text that levels of attention are chosen on."""
REPORTED = 8
"""Sequences of the other text that a cache's report is made of."""


class Judged:
    """One mode's results, added up over batches."""

    def __init__(self) -> None:
        self.exact: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.kl: list[Tensor] = []
        self.same: list[Tensor] = []
        self.off: list[float] = []
        self.size: list[float] = []
        self.facts: dict[str, Any] = {}
        self.seconds = 0.0

    @torch.no_grad()
    def add(self, subject: Subject, exact: States, found: States, ids: Tensor, first: int) -> None:
        """Add the sequences of a batch, from position `first` on."""
        for row in range(len(ids)):
            parts: list[list[Tensor]] = [[], [], [], []]
            for at in range(first, ids.shape[1] - 1, AT_ONCE):
                place = slice(at, min(at + AT_ONCE, ids.shape[1] - 1))
                wanted = subject.logits(exact.last[row, place]).log_softmax(-1)
                got = subject.logits(found.last[row, place]).log_softmax(-1)
                targets = ids[row, place.start + 1 : place.stop + 1]
                parts[0].append(F.nll_loss(wanted, targets, reduction="none"))
                parts[1].append(F.nll_loss(got, targets, reduction="none"))
                parts[2].append((wanted.exp() * (wanted - got)).sum(-1))
                parts[3].append((wanted.argmax(-1) == got.argmax(-1)).float())
            for held, part in zip(
                (self.exact, self.losses, self.kl, self.same), parts, strict=True
            ):
                held.append(torch.cat(part).double().cpu())
        pairs = list(zip(exact.layers, found.layers, strict=True))
        self.off = self.off or [0.0] * len(pairs)
        self.size = self.size or [0.0] * len(pairs)
        for number, (wanted, got) in enumerate(pairs):
            wanted, got = wanted[:, first:].float(), got[:, first:].float()
            self.off[number] += float((got - wanted).norm()) ** 2
            self.size[number] += float(wanted.norm()) ** 2

    def row(self, against: Judged | None = None) -> dict[str, Any]:
        """Return the figures, and how they differ from those of another mode, token by token."""
        exact, losses = (torch.cat(each).mean().item() for each in (self.exact, self.losses))
        change, change_se = mean_and_error(
            [b - a for a, b in zip(self.exact, self.losses, strict=True)]
        )
        kl, kl_se = mean_and_error(self.kl)
        same, same_se = mean_and_error(self.same)
        layers = [(off / size) ** 0.5 for off, size in zip(self.off, self.size, strict=True)]
        beside = {} if against is None else self._beside(against)
        return {
            "sequences": len(self.exact),
            "tokens": sum(map(len, self.exact)),
            "perplexity_exact": math.exp(exact),
            "perplexity": math.exp(losses),
            "change": math.expm1(change),
            "change_se": math.exp(change) * change_se,
            "kl": kl,
            "kl_se": kl_se,
            "same": same,
            "same_se": same_se,
            "layer_errors": [round(each, 4) for each in layers],
            **self.facts,
            **beside,
            "seconds": round(self.seconds, 1),
        }

    def _beside(self, other: Judged) -> dict[str, float]:
        """Return differences from another mode on the same tokens, with standard errors."""
        found = {}
        for name, ours, theirs in (
            ("change", self.losses, other.losses),
            ("kl", self.kl, other.kl),
            ("same", self.same, other.same),
        ):
            pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
            found[f"{name}_beside"], found[f"{name}_beside_se"] = mean_and_error(pairs)
        return found


def mean_and_error(sequences: list[Tensor]) -> tuple[float, float]:
    """Return the mean over all tokens, and its standard error by blocks of neighbouring tokens."""
    whole = torch.cat(sequences)
    blocks = torch.cat([torch.stack([b.mean() for b in each.split(BLOCK)]) for each in sequences])
    if len(blocks) < 2:
        return whole.mean().item(), math.nan
    return whole.mean().item(), blocks.std().item() / len(blocks) ** 0.5


class Bench:
    """A model under every mode.

    Attributes:
        compares: whether each mode's figures are compared with those of the first, too.
    """

    compares = False
    text = texts.NAMED[0]  # that is measured

    def __init__(self, subject: Subject, given: argparse.Namespace) -> None:
        self.subject, self.given = subject, given
        self.weights: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.levels: dict[str, str | list[str]] = {}
        self.compiled: dict[str, Any] = {}
        self.reports: dict[str, Any] = {}
        self.modes = [
            mode
            for mode in (*modes(subject.layers), *reported_modes(subject.layers))
            if not given.modes or any(part in mode.name for part in given.modes)
        ]

    def states(self, mode: Mode, ids: Tensor, facts: dict[str, Any]) -> States:
        """Return a mode's states for tokens; `facts` gets its costs."""
        subject, given = self.subject, self.given
        if mode.cache is not None:
            settings = mode.cache
            if mode.reported:
                merge = replace(settings["merge"], fidelity=self.report())
                settings = {**settings, "merge": merge}
            cache = memeff_compile.KVCache(subject.model.config, ids.shape[1], **settings)
            found = subject.states(ids, cache=cache, pieces=(given.prompt, given.piece))
            facts |= {"cache_bytes": cache.nbytes, "prompt": given.prompt, "piece": given.piece}
            return found
        if mode.mantissa is not None:
            if mode.mantissa not in self.weights:
                self.weights[mode.mantissa] = subject.with_weights(mode.mantissa)
            model, took = self.weights[mode.mantissa]
            facts |= took
            return subject.states(ids, model)
        assert mode.level is not None
        if mode.compiled:
            if mode.name not in self.compiled:
                level: Any = mode.level
                if mode.share is not None:
                    level = calibration_of(subject, mode, given.length, CALIBRATION)
                self.compiled[mode.name] = subject.compiled(level)
            found = subject.states(ids, self.compiled[mode.name])
            facts["sites"] = subject.sites()
            return found
        lowered = facts.setdefault("lowered", Lowered(self._levels(mode)))
        return subject.states(ids, around=lowered.forward())

    def report(self) -> Any:
        """Return a fidelity report of the text that is not measured."""
        other = "prose" if self.text == "source" else "source"
        if other not in self.reports:
            subject, length = self.subject, self.given.length
            ids = texts.rows_of(subject.tokenizer, other, length, 8 * REPORTED)[::8][:REPORTED]
            inputs = [row[None].to(subject.device) for row in ids]
            found = memeff_compile.fidelity_report(subject.model, inputs, bits=16, merge=None)
            self.reports[other] = found
        return self.reports[other]

    def _levels(self, mode: Mode) -> str | list[str]:
        if mode.name not in self.levels:
            self.levels[mode.name] = levels_of(self.subject, mode, self.given.length, CALIBRATION)
        return self.levels[mode.name]

    def judge(self, ids: Tensor, deadline: float) -> Iterator[tuple[Mode, dict[str, Any]]]:
        """Yield each mode with its figures, all on the same sequences."""
        subject, first = self.subject, self.given.prompt
        parts = ids.to(subject.device).split(self.given.batch)
        exact = [subject.states(part) for part in parts]
        before: list[Judged] = []

        def figures(mode: Mode) -> dict[str, Any]:
            held, started = Judged(), time.monotonic()
            for part, wanted in zip(parts, exact, strict=True):
                held.add(subject, wanted, self.states(mode, part, held.facts), part, first)
            held.seconds = time.monotonic() - started
            lowered = held.facts.pop("lowered", None)
            if lowered is not None:
                held.facts["attention_errors"] = [round(e, 4) for e in lowered.errors()]
                held.facts["left_exact"] = len(lowered.exact)
            if self.compares:
                before.append(held)
            return held.row(*before[:1] if len(before) > 1 else ())

        yield from self._each(figures, deadline)

    def _each(
        self, figures: Callable[[Mode], dict[str, Any]], deadline: float
    ) -> Iterator[tuple[Mode, dict[str, Any]]]:
        """Yield each mode with its figures, or with the reason why it has none."""
        for mode in self.modes:
            if time.monotonic() > deadline:
                print(f"out of time before {mode.name}", flush=True)
                return
            try:
                yield mode, figures(mode)
            except MemeffError as problem:
                yield mode, {"refused": str(problem)}
            except Exception as problem:  # a crash of one is no reason to miss the others
                traceback.print_exc()
                yield mode, {"failed": f"{type(problem).__name__}: {problem}"[:300]}

    @torch.no_grad()
    def keys(self, deadline: float) -> Iterator[tuple[Mode, dict[str, Any]]]:
        """Yield each mode with the share of pass keys that it retrieves, compared with the exact
        model.
        """
        subject, given = self.subject, self.given
        ids, answer = texts.pass_keys(subject.tokenizer, given.length, given.keys)
        ids = ids.to(subject.device)

        def right(found: States, part: Tensor) -> Tensor:
            last = found.last[:, -answer - 1 : -1].flatten(0, 1)
            likeliest = subject.logits(last).argmax(-1).view(len(part), answer)
            return (likeliest == part[:, -answer:]).all(1)

        parts = ids.split(given.batch)
        exact = torch.cat([right(subject.states(part), part) for part in parts])

        def figures(mode: Mode) -> dict[str, Any]:
            found = torch.cat([right(self.states(mode, part, {}), part) for part in parts])
            counts = {"asked": len(ids), "exact_right": int(exact.sum())}
            return {**counts, "right": int(found.sum()), "digest": texts.digest(ids.cpu())}

        yield from self._each(figures, deadline)


def measure(given: argparse.Namespace) -> int:
    """Write a row for each text and mode."""
    started = time.monotonic()
    subject = subject_of(given)
    if given.length > subject.longest:
        raise SystemExit(
            f"{subject.name} is for {subject.longest} tokens; --length is {given.length}"
        )
    bench = Bench(subject, given)
    deadline = started + given.budget
    environment = rows.environment()
    for name in given.texts:
        if time.monotonic() > deadline:
            print(f"out of time before {name}", flush=True)
            break
        label = name.partition("=")[0]
        bench.text = label
        facts = {"what": "quality", **subject.facts, "text": label, "length": given.length}
        if name == "keys":
            made: Iterator[tuple[Mode, dict[str, Any]]] = bench.keys(deadline)
        elif label == "generated":
            size = given.length, given.sequences
            begun = texts.rows_of(subject.tokenizer, "prose", *size)[:, : given.prompt]
            ids = texts.own(subject.model, subject.tokenizer, *size, begun)
            made = bench.judge(ids, deadline)
        elif label == "own":
            ids, facts["drawn"] = own_ids(subject, name, given)
            made = bench.judge(ids, deadline)
        else:
            ids = texts.rows_of(subject.tokenizer, name, given.length, given.sequences)
            made = bench.judge(ids, deadline)
        if name != "keys":
            facts["digest"] = texts.digest(ids)
        for mode, row in made:
            rows.append(given.out, {**facts, "mode": mode.name, **row, **environment})
        print(f"{label}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


def own_ids(
    subject: Subject, name: str, given: argparse.Namespace
) -> tuple[Tensor, dict[str, str]]:
    """Return the model's own continuations, saved or written now, and how they were drawn."""
    path = name.partition("=")[2]
    if path:
        return texts.ids_of(Path(path), subject.name, given.length, given.sequences)
    ids = texts.own(subject.model, subject.tokenizer, given.length, given.sequences)
    return ids, {"sequences": str(given.sequences), "length": str(given.length)}


CHANGES = (
    "change of perplexity (standard error) | KL in nats (standard error) | "
    "positions with the same likeliest token"
)
"""The heads of the columns of one text."""
ERRORS = (
    "relative error of the hidden states after the last layer",
    "relative error of attention in the worst layer",
    "layers whose attention stays exact",
)


def table(given: argparse.Namespace) -> int:
    """Print the latest rows as Markdown: for each model and length a table for each text, and one
    of errors and pass keys.
    """
    found = [row for row in rows.read(given.out) if row["what"] == "quality"]
    by = ("model", "length", "dtype")
    for place in dict.fromkeys(tuple(row[key] for key in by) for row in found):
        here = rows.latest(
            [row for row in found if tuple(row[key] for key in by) == place],
            "text",
            "asked",
            "mode",
        )
        columns = {each: [r for r in here if is_of(r, *each)] for each in by_text(here)}
        for (name, _), column in columns.items():
            if name != "keys":
                print("\n{}, sequences of {}, {}, {}\n".format(*place, heading(name, column)))
                print(f"| lossy mode | {CHANGES} |\n|---|---:|---:|---:|")
                for row in column:
                    print(f"| {' | '.join([labels.of_mode(row['mode']), *cells(row)])} |")
        keys = [column for (name, _), column in columns.items() if name == "keys"]
        heads = [*ERRORS, *(heading("keys", column) for column in keys)]
        lines = {}
        for mode in dict.fromkeys(row["mode"] for row in here):
            own = [row for row in here if row["mode"] == mode]
            counts = [[r for r in column if r["mode"] == mode] for column in keys]
            lines[mode] = [*worst(own), *(cells(each[0])[0] if each else "" for each in counts)]
        used = [n for n in range(len(heads)) if any(line[n] for line in lines.values())]
        print("\n{}, sequences of {}, {}, errors\n".format(*place))
        print(f"| lossy mode | {' | '.join(heads[n] for n in used)} |")
        print(f"|---{'|---:' * len(used)}|")
        for mode, line in lines.items():
            if any(line):
                print(f"| {' | '.join([labels.of_mode(mode), *(line[n] for n in used)])} |")
    return 0


def is_of(row: dict[str, Any], text: str, asked: int) -> bool:
    """Return whether a row belongs to the column of a text and of a number of pass keys."""
    return row["text"] == text and row.get("asked", asked) == asked


def by_text(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return texts and numbers of pass keys in the order of first appearance, keys last."""
    names = dict.fromkeys((row["text"], row.get("asked", 0)) for row in found)
    several = sum(name == "keys" for name, _ in names) > 1
    kept = [each for each in names if each != ("keys", 0) or not several]
    return sorted(kept, key=lambda each: each[0] == "keys")


def heading(name: str, column: list[dict[str, Any]]) -> str:
    """Return the heading of a text's table, or of a column of pass keys."""
    if name == "keys":
        each = [r for r in column if "asked" in r]
        asked = [f"{r['asked']} (exact model: {r['exact_right']})" for r in each]
        return f"pass keys found of {''.join(asked[:1])}"
    judged = [row for row in column if "tokens" in row][:1]
    of = [
        f", {row['tokens']:,} tokens, exact perplexity {row['perplexity_exact']:.2f}"
        for row in judged
    ]
    return f"{name}{''.join(of)}"


def cells(row: dict[str, Any]) -> list[str]:
    """Return the effect of one mode on one text: change of perplexity, KL and same tokens."""
    if "refused" in row or "failed" in row:
        return ["refused" if "refused" in row else "failed", "", ""]
    if row["text"] == "keys":
        return [str(row["right"])]
    change = f"{100 * row['change']:+.2f} % ({100 * row['change_se']:.2f})"
    kl = f"{max(row['kl'], 0.0):.4f} ({row['kl_se']:.4f})"
    return [change, kl, f"{100 * row['same']:.1f} %"]


def worst(found: list[dict[str, Any]]) -> list[str]:
    """Return a mode's errors of layers, the largest of all texts, and how many stay exact."""
    found = [row for row in found if "layer_errors" in row]
    if not found:
        return ["", "", ""]
    last = max(row["layer_errors"][-1] for row in found)
    shown = [f"{100 * last:.1f} %", "", ""]
    own = [row["attention_errors"] for row in found if "attention_errors" in row]
    if own:
        error, place = max((e, place) for errors in own for place, e in enumerate(errors))
        shown[1] = f"{100 * error:.1f} % (layer {place})"
        shown[2] = str(max(row["left_exact"] for row in found))
    return shown


def main() -> int:
    """Run from the command line."""
    named = ["prose", "source", "own", "keys"]
    parser = parser_of(__doc__, texts=named, prompt=512, sequences=24)
    parser.add_argument("--modes", nargs="+", default=[], help="parts of names; all without")
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time")
    return run(parser, {"measure": measure, "table": table}, "quality.jsonl")


if __name__ == "__main__":
    sys.exit(main())
