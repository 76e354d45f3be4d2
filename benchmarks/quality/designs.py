"""Effects of designs on a real model: caches, weights and attention in other ways than by default.

    python benchmarks/quality/designs.py measure --model FOLDER --part weights
    python benchmarks/quality/designs.py table

As lossy_modes.py, on the same texts and tokens, with designs instead of modes, each compared with
the first of its part, token by token. Weights keep 3 bits of the mantissa: in blocks of other
sizes, which `compress_` codes, or rounded in ways that nothing here codes. "errors" asks what they
must lose: next to roundings with inputs in view and other codes there are drawn errors, which
say what KL an error of a size costs. "formats" are NeuZip's tables: 0, 1 and 3 bits in every size
of block next to INT8, FP4 and NF4, as weights_ablation.py writes those out. Attention has layers of
another level. Codes of caches, and scores of attention, are prototypes.py's: other arithmetic, most
of which nothing here serves.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import rows
from benchmarks.ablations import weights_ablation
from benchmarks.quality import labels, lossy_modes, texts
from benchmarks.quality.command import parser_of, run, subject_of
from benchmarks.quality.modes import Mode
from benchmarks.quality.prototypes import KEYS, VALUES, Cached, Coded, Published, Study, Told
from benchmarks.quality.roundings import CODES, DRAWN, KEPT, ROUNDINGS
from benchmarks.quality.subject import Lowered, States
from memeff_compile.kernels.quantized_attention.settings import (
    GRANULARITIES,
    Settings,
    settings_for,
)
from memeff_compile.model.weights.compress import decompress_

SAME = "positions with the same likeliest token"
CHANGES = (
    "change of perplexity (standard error)",
    "KL in nats (standard error)",
    f"{SAME} (standard error)",
    "KL compared with the first row (standard error)",
    f"{SAME} compared with the first row, percentage points (standard error)",
)
"""The heads of a text's columns."""
SIZES = {
    "layers_other": "layers with a score below the limit",
    "bits": "bits per weight",
    "weights_off": "relative error of the weights",
}
"""The quantity in a column, by the name of its fact."""
ROUNDED = {**ROUNDINGS, **DRAWN, **{name: rounding for name, (_, rounding) in CODES.items()}}
INPUTS = 8
"""Sequences of the other text that weights are rounded for."""
LEAST = (0.95, 0.955, 0.96, 0.965, 0.97)
"""Scores below which `calibrate_attention` would give a layer another level."""


@dataclass(frozen=True, eq=False)
class Design(Mode):
    """A mode with what it lacks.

    Attributes:
        other: the level of layers whose attention scores less than `least` on the other text in
            `8b`, as all others are.
        least: as `calibrate_attention` has it.
        block: of coded weights.
        kept: bits of their mantissas.
        published: a format of other papers, in which the weights are held instead.
        rounding: of weights that are not coded.
        for_inputs: whether they are rounded with inputs in view, those of the other text.
        cached: a cache of other codes.
        study: arithmetic of attention.
    """

    other: str | None = None
    least: float = 0.0
    block: int | None = None
    kept: int = KEPT
    published: str | None = None
    rounding: str | None = None
    for_inputs: bool = False
    cached: Cached | None = None
    study: Settings | None = None


def other_codes(bits: int) -> list[Design]:
    """Return caches of so many bits in codes of other kinds, the package's own first."""
    keys, values = replace(KEYS, bits=bits), replace(VALUES, bits=bits)
    own = Cached(keys, values)
    turned, rotated = replace(keys, before="turned"), replace(values, before="rotated")
    by_token = replace(keys, along="channels")
    few = replace(values, group=32)
    found = {
        "as they are": own,
        "keys alone": replace(own, values=replace(values, bits=None)),
        "values alone": replace(own, keys=replace(keys, bits=None)),
        "keys in groups of 32": replace(own, keys=replace(keys, group=32)),
        "keys and values in groups of 32": Cached(replace(keys, group=32), few),
        "keys before their rotary embedding": replace(own, keys=turned),
        "keys rotated, a scale a token": replace(own, keys=replace(by_token, before="rotated")),
        "values rotated": replace(own, values=rotated),
        "values without their mean": replace(own, values=replace(values, before="mean")),
        "values a channel over tokens": replace(own, values=keys),
        "scales of least error": Cached(
            replace(keys, scale="least"), replace(values, scale="least")
        ),
        "centred, groups of 32": Cached(
            replace(keys, scale="centred", group=32), replace(few, scale="centred")
        ),
        "steps of a normal distribution": Cached(
            replace(keys, scale="normal"), replace(values, scale="normal")
        ),
        "bits of keys by channel": replace(own, keys=replace(keys, uneven="quarters")),
        "bits of keys by channel, by eighths": replace(own, keys=replace(keys, uneven="eighths")),
        "bits of keys by channel, all in groups of 32": Cached(
            replace(keys, uneven="quarters", group=32), few
        ),
        "512 recent tokens": replace(own, recent=512),
        "64 first tokens": replace(own, keep_first=64),
        "8 bits in the first two layers": replace(own, finer=(0, 1)),
        f"keys of {bits + 1} bits": replace(own, keys=replace(keys, bits=bits + 1)),
        f"values of {bits + 1} bits": replace(own, values=replace(values, bits=bits + 1)),
        "keys before their rotary embedding, values rotated, scales of least error": Cached(
            replace(turned, scale="least"), replace(rotated, scale="least")
        ),
    }  # fmt: skip
    return [Design(f"codes, {bits} bits, {name}", cached=each) for name, each in found.items()]


STUDIES = {
    "as it is": Study(),
    "values and weights exact": Study(values="exact"),
    "scores exact": Study(limit=1 << 20),
    "values and weights in int8": Study(values="int8"),
    "queries without their mean": Study(smooth="qkv"),
    "values with their mean": Study(smooth="k"),
    "a scale a key": Study(granularity="token"),
    "scales by thread": Study(granularity="thread"),
    "keys' mean of all keys": Study(constants={"SAMPLE": 1}),
    "channels not evened": Study(constants={"MOST_EVENED": 0.0}),
    "keys rounded for the mean query everywhere": Study(constants={"LEAST_SHARE": 0.0}),
    "keys never rounded for the mean query": Study(constants={"LEAST_SHARE": 2.0}),
    "queries without their mean, a scale a key": Study(smooth="qkv", granularity="token"),
    "weights summed as rounded": Study(sums_rounded=True),
}
"""Attention in 8 bits with other arithmetic."""

TABLES = {
    "1: 4b, means of queries and keys subtracted": Published(),
    "1: 4b, no mean subtracted": Published(smooth=""),
    "1: 4b, mean of keys subtracted": Published(smooth="k"),
    "1: 8b, no mean subtracted": Published(limit=127, smooth=""),
    "1: 8b, mean of keys subtracted": Published(limit=127, smooth="k"),
    **{
        f"2 and 3: 4b, a scale per {name}": Published(granularity=name)
        for name in GRANULARITIES
        if name not in ("row", "thread")
    },
    **{
        f"4 and 5: 4b, weights and values in {name}": Published(values=name)
        for name in ("int8", "e5m2", "e4m3", "f16")
    },
    "6: 4b, values in e4m3 without their mean": Published(values="e4m3", smooth="qkv"),
    "8: the paper's 8b": Published(limit=127, values="e4m3", smooth="k"),
    "8: the op's 4b": settings_for("4b", with_lse=False),
    "8: the op's 8b": settings_for("8b", with_lse=False),
}
"""SageAttention2's tables; the paper's 4b is in the line of e4m3. Table 7 needs tensor cores:
attention_ablation.py measures it."""

PARTS: dict[str, list[Design]] = {
    "codes4": [*other_codes(4), Design("codes, 8 bits, as they are", cached=Cached().at_bits(8))],
    "codes3": other_codes(3),
    "weights": [
        *(Design(f"weights, 3 bits, blocks of {size}", block=size) for size in (512, 256, 128, 64)),
        Design("weights, 3 bits, blocks of 32", block=32),
        *(Design(f"weights, 3 bits, {name}", rounding=name) for name in ROUNDINGS),
    ],
    "errors": [
        *(
            Design(f"errors, 3 bits, blocks of {size}{how}", block=size, for_inputs=bool(how))
            for size in (512, 64)
            for how in ("", ", for inputs of the other text")
        ),
        *(Design(f"errors, {name}", rounding=name) for name in (*CODES, *DRAWN)),
    ],
    "formats": [
        Design("formats, 3 bits, blocks of 512", block=512),
        *(
            Design(f"formats, {kept} bits, blocks of {size}", block=size, kept=kept)
            for kept in (1, 0)
            for size in reversed(weights_ablation.BLOCKS)
        ),
        *(Design(f"formats, {name}", published=name) for name in weights_ablation.PUBLISHED),
        *(
            Design(
                f"formats, {kept} bits, blocks of {size}, for inputs of the other text",
                block=size,
                kept=kept,
                for_inputs=True,
            )
            for kept, size in ((3, 512), (3, 64), (1, 512), (1, 64), (0, 64))
        ),
    ],
    "attention": [
        *(Design(f"attention, {level}", level=level) for level in ("8b", "8b+f16")),
        *(
            Design(f"attention, 8b, {level} below {least}", other=level, least=least)
            for level in ("exact", "8b+f16")
            for least in LEAST
        ),
    ],
    "scores": [Design(f"scores, 8b, {name}", study=study) for name, study in STUDIES.items()],
    "tables": [Design(f"tables, {name}", study=study) for name, study in TABLES.items()],
}


class Bench(lossy_modes.Bench):
    """A model under every design."""

    compares = True
    held: tuple[tuple[str, str], Any, dict[str, Any]] = (("", ""), None, {})
    text = texts.NAMED[0]
    scored: tuple[str, list[float]] = ("", [])

    def states(self, mode: Mode, ids: Tensor, facts: dict[str, Any]) -> States:
        """Return a design's states for tokens; `facts` gets its costs."""
        subject = self.subject
        assert isinstance(mode, Design)
        if (mode.block, mode.rounding, mode.published) != (None, None, None):
            if self.held[0] != (mode.name, self.text):
                self.held = ((mode.name, self.text), *self._with_weights(mode))
            _, model, took = self.held
            facts |= took
            return subject.states(ids, model)
        if mode.cached is not None:
            body = subject.model.base_model
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            rotary = body.rotary_emb(body.embed_tokens(ids[:1, :1]).float(), positions)
            coded = Coded(mode.cached, self.given.prompt, self.given.piece, rotary)
            return subject.states(ids, around=coded.forward())
        if mode.study is not None:
            told = facts.setdefault("lowered", Told(mode.study))
            return subject.states(ids, around=told.forward())
        if mode.other is not None:
            levels = [mode.other if score < mode.least else "8b" for score in self._scores()]
            facts["layers_other"] = levels.count(mode.other)
            lowered = facts.setdefault("lowered", Lowered(levels))
            return subject.states(ids, around=lowered.forward())
        return super().states(mode, ids, facts)

    def _scores(self) -> list[float]:
        """Return the score of each layer's attention in `8b`, on a text that is not judged."""
        if self.scored[0] != self.text:
            subject = self.subject
            inputs = [{"input_ids": row[None]} for row in self._other(lossy_modes.CALIBRATION)]
            found = memeff_compile.calibrate_attention(
                subject.model.base_model, inputs, levels=("8b",)
            )
            scores = [
                min(call["worst"] for call in each["8b"]) for each in found["scores"].values()
            ]
            self.scored = self.text, scores
        return self.scored[1]

    def _other(self, count: int) -> Tensor:
        """Return rows of the text that is not judged."""
        name = next(name for name in texts.NAMED if name != self.text)
        ids = texts.rows_of(self.subject.tokenizer, name, self.given.length, count)
        return ids.to(self.subject.device)

    def _with_weights(self, design: Design) -> tuple[Any, dict[str, Any]]:
        subject, took = self.subject, dict[str, Any]()
        model = copy.deepcopy(subject.stored).to(subject.device)
        if design.block is not None:
            how: dict[str, Any] = {"block": design.block, "min_size": 1}
            how["mantissa"] = design.kept
            if design.for_inputs:
                rows = self._other(INPUTS).split(1)
                how["inputs"] = [{"input_ids": ids, "use_cache": False} for ids in rows]
            report = memeff_compile.compress_(model, "tier", **how, progress=False)
            took["bits"] = report.bits
            decompress_(model)
        if design.published is not None:
            took["bits"] = weights_ablation.emulate_(model, design.published)
        if design.rounding in CODES:
            took["bits"] = CODES[design.rounding][0]
        off = []
        for name, linear in model.named_modules():
            if isinstance(linear, nn.Linear) and linear is not model.get_output_embeddings():
                exact = subject.stored.get_submodule(name).weight.detach().to(subject.device)
                if design.rounding is not None:
                    rounded = ROUNDED[design.rounding](exact.float())
                    linear.weight.data = rounded.to(exact.dtype)
                error = (linear.weight.detach().float() - exact.float()).norm()
                off.append(float(error / exact.float().norm()))
        if off:  # INT8 multiplies codes: no linear is left
            took["weights_off"] = sum(off) / len(off)
        return subject._ready(model), took


def measure(given: argparse.Namespace) -> int:
    """Write a row for each text and design."""
    started = time.monotonic()
    subject = subject_of(given)
    bench, environment = Bench(subject, given), rows.environment()
    first, *others = PARTS[given.part]
    bench.modes = [first, *dict.fromkeys(d for part in given.designs for d in named(part, others))]
    for name in given.texts:
        ids = texts.rows_of(subject.tokenizer, name, given.length, given.sequences)
        bench.text = name
        facts = {"what": "design", **subject.facts, "text": name, "length": given.length}
        facts["digest"] = texts.digest(ids)
        for design, row in bench.judge(ids, started + given.budget):
            found = {**facts, "mode": design.name, **row}
            rows.append(given.out, found | environment)
            print(
                f"{subject.facts['dtype']}, {name}: {design.name}: {'; '.join(cells(found))}",
                flush=True,
            )
    return 0


def named(part: str, designs: list[Design]) -> list[Design]:
    """Return the designs whose names end with a text, or else contain it."""
    ending = [design for design in designs if design.name.endswith(part)]
    return ending or [design for design in designs if part in design.name]


def cells(row: dict[str, Any]) -> list[str]:
    """Return the effect of one design on one text, and how it compares with the first design."""
    if "kl" not in row:
        return [str(row.get("refused") or row.get("failed")), *[""] * 4]
    *told, same_told = lossy_modes.cells(row)
    told.append(f"{same_told} ({100 * row['same_se']:.1f})")
    if "kl_beside" not in row:
        return [*told, "", ""]
    # By how much KL and the share of same tokens differ from those of the first design.
    kl = row["kl"] - row["kl_beside"]
    more, error = (100 * row[name] / kl for name in ("kl_beside", "kl_beside_se"))
    same, same_error = (100 * row[name] for name in ("same_beside", "same_beside_se"))
    return [*told, f"{more:+.0f} % ({error:.0f})", f"{same:+.1f} ({same_error:.1f})"]


def table(given: argparse.Namespace) -> int:
    """Print the latest rows as Markdown: a table for each model, family and text."""
    by = ("model", "dtype", "length")
    found = rows.latest(rows.read(given.out), *by, "text", "mode")
    for place in dict.fromkeys((*(row[key] for key in by), family(row)) for row in found):
        here = [row for row in found if (*(row[key] for key in by), family(row)) == place]
        sized = [name for name in SIZES if any(name in row for row in here)]
        changes = CHANGES if any("kl_beside" in row for row in here) else CHANGES[:3]
        heads = ["design", *changes, *(SIZES[name] for name in sized)]
        for name, _ in lossy_modes.by_text(here):
            column = [row for row in here if row["text"] == name]
            about = lossy_modes.heading(name, column)
            print("\n{}, {}, sequences of {}, {}, {}\n".format(*place, about))
            print(f"| {' | '.join(heads)} |\n|---{'|---:' * (len(heads) - 1)}|")
            for row in column:
                sizes = [f"{row[each]:.4g}" if each in row else "" for each in sized]
                told = [labels.of_design(row["mode"]), *cells(row)[: len(changes)], *sizes]
                print(f"| {' | '.join(told)} |")
    return 0


def family(row: dict[str, Any]) -> str:
    """Return the family of a design: the start of its name. Caches of 3 bits are a family."""
    name = str(row["mode"])
    return "codes, 3 bits" if name.startswith("codes, 3 bits") else name.partition(",")[0]


def main() -> int:
    """Run from the command line."""
    parser = parser_of(__doc__, texts=["prose", "source"], prompt=512, sequences=24)
    parser.add_argument("--part", choices=PARTS, default="weights")
    parser.add_argument("--designs", nargs="+", default=[""], help="ends or parts of names")
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time")
    parser.set_defaults(modes=[])
    return run(parser, {"measure": measure, "table": table}, "quality-designs.jsonl")


if __name__ == "__main__":
    sys.exit(main())
