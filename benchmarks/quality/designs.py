"""What designs do to a real model: caches, weights and attention in other ways than by default.

    python benchmarks/quality/designs.py measure --model FOLDER --part weights
    python benchmarks/quality/designs.py table

As lossy_modes.py, on the same texts and tokens, with designs in the place of modes. Caches differ
by their settings, attention by layers that get another level. Weights keep 3 bits of the mantissa:
in blocks of other sizes, which `compress_` codes, or rounded in ways that nothing here codes.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import rows
from benchmarks.quality import lossy_modes, texts
from benchmarks.quality.command import parser_of, run, subject_of
from benchmarks.quality.modes import Mode
from benchmarks.quality.subject import Lowered, States
from memeff_compile.kernels.coded_weight import CodedWeight, encode
from memeff_compile.model.weights.compress import decompress_

KEPT = 3
"""Bits of the mantissa."""
WORST = ((18,), (18, 25), (12, 18, 25, 26), (7, 9, 10, 12, 18, 19, 25, 26))
"""Layers of SmolLM2 whose attention is furthest off in low bits."""
SETTINGS: tuple[dict[str, int], ...] = (
    {},
    {"group": 32},
    {"group": 128},
    {"recent": 256},
    {"recent": 512},
    {"recent": 1024},
    {"keep_first": 64},
    {"group": 32, "recent": 512},
)


def kept(x: Tensor) -> Tensor:
    """Return numbers with fewer bits of mantissa, half away from zero."""
    fraction, exponent = torch.frexp(x)
    whole = torch.floor(fraction.abs() * 2.0 ** (KEPT + 1) + 0.5)
    return torch.ldexp(torch.sign(fraction) * whole / 2.0 ** (KEPT + 1), exponent)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Return the numbers of a weight, a block a row."""
    return F.pad(x.reshape(-1), (0, -x.numel() % size)).view(-1, size)


def like(blocks: Tensor, x: Tensor) -> Tensor:
    """Return blocks as a weight of the shape of another."""
    return blocks.reshape(-1)[: x.numel()].view_as(x)


def by_least_error(x: Tensor) -> Tensor:
    """Divide each block of 512 by that number of four which leaves the least squared error."""
    blocks = in_blocks(x, 512)
    found = torch.stack([kept(blocks / c) * c for c in (1.0, 1.25, 1.5, 1.75)])
    least = (found - blocks).square().sum(2).argmin(0)
    return like(found[least, torch.arange(len(blocks), device=x.device)], x)


def with_row_scales(x: Tensor) -> Tensor:
    """Scale each row of what `compress_` makes of it by least squares."""
    codec = f"tier:k{KEPT}:b512"
    found = CodedWeight(encode(x.bfloat16(), codec), codec, x.shape).decode().float()
    return found * ((x * found).sum(1, True) / found.square().sum(1, True).clamp_min(1e-20))


def with_errors_passed_on(x: Tensor) -> Tensor:
    """Add the error of a weight to the next one of its row: sums of neighbours stay."""
    columns = x.t().contiguous()
    found, error = torch.empty_like(columns), torch.zeros_like(columns[0])
    for number, column in enumerate(columns):
        found[number] = kept(column + error)
        error = column + error - found[number]
    return found.t().contiguous()


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "no normaliser": kept,
    "the best of four normalisers": by_least_error,
    "a scale for each row behind it": with_row_scales,
    "errors passed along the row": with_errors_passed_on,
}


@dataclass(frozen=True, eq=False)
class Design(Mode):
    """A mode with what it lacks.

    Attributes:
        other: the level of some layers' attention; all others are in `8b`.
        layers: these.
        block: of coded weights.
        rounding: of weights that are not coded.
    """

    other: str | None = None
    layers: tuple[int, ...] = ()
    block: int | None = None
    rounding: str | None = None


def caches(bits: int) -> list[Design]:
    """Return caches of so many bits with other settings."""
    return [
        Design(
            ", ".join([f"cache, {bits} bits", *(f"{k} {v}" for k, v in settings.items())]),
            cache={"bits": bits, **settings},
        )
        for settings in SETTINGS
    ]


PARTS: dict[str, list[Design]] = {
    "caches": [*caches(4), *caches(3), Design("cache, 8 bits", cache={"bits": 8})],
    "weights": [
        *(Design(f"weights, 3 bits, blocks of {size}", block=size) for size in (512, 256, 128, 64)),
        Design("weights, 3 bits, blocks of 32", block=32),
        *(Design(f"weights, 3 bits, {name}", rounding=name) for name in ROUNDINGS),
    ],
    "attention": [
        *(Design(f"attention, {level}", level=level) for level in ("8b", "8b+f16")),
        *(
            Design(f"attention, 8b, {level} in {len(layers)}", other=level, layers=layers)
            for level in ("exact", "8b+f16")
            for layers in WORST
        ),
    ],
}


class Bench(lossy_modes.Bench):
    """A model under every design."""

    held: tuple[str, Any, dict[str, Any]] = ("", None, {})

    def states(self, mode: Mode, ids: Tensor, facts: dict[str, Any]) -> States:
        """Return what a design makes of tokens; `facts` gets what it took."""
        subject = self.subject
        assert isinstance(mode, Design)
        if mode.block is not None or mode.rounding is not None:
            if self.held[0] != mode.name:
                self.held = (mode.name, *self._with_weights(mode))
            _, model, took = self.held
            facts |= took
            return subject.states(ids, model)
        if mode.other is not None:
            levels = [mode.other if n in mode.layers else "8b" for n in range(subject.layers)]
            lowered = facts.setdefault("lowered", Lowered(levels))
            return subject.states(ids, around=lowered.forward())
        return super().states(mode, ids, facts)

    def _with_weights(self, design: Design) -> tuple[Any, dict[str, Any]]:
        subject, took = self.subject, dict[str, Any]()
        model = copy.deepcopy(subject.stored).to(subject.device)
        if design.block is not None:
            report = memeff_compile.compress_(
                model, "tier", mantissa=KEPT, block=design.block, min_size=1, progress=False
            )
            took["bits"] = report.bits
            decompress_(model)
        off = []
        for name, linear in model.named_modules():
            if isinstance(linear, nn.Linear) and linear is not model.get_output_embeddings():
                exact = subject.stored.get_submodule(name).weight.detach().to(subject.device)
                if design.rounding is not None:
                    linear.weight.data = ROUNDINGS[design.rounding](exact.float()).to(exact.dtype)
                error = (linear.weight.detach().float() - exact.float()).norm()
                off.append(float(error / exact.float().norm()))
        return subject._ready(model), {**took, "weights_off": sum(off) / len(off)}


def measure(given: argparse.Namespace) -> int:
    """Write a row for each text and design."""
    started = time.monotonic()
    subject = subject_of(given)
    bench, environment = Bench(subject, given), rows.environment()
    bench.modes = [*PARTS[given.part]]
    for name in given.texts:
        ids = texts.rows_of(subject.tokenizer, name, given.length, given.sequences)
        facts = {"what": "design", **subject.facts, "text": name, "length": given.length}
        facts["digest"] = texts.digest(ids)
        for design, row in bench.judge(ids, started + given.budget):
            found = {**facts, "mode": design.name, "layers_other": getattr(design, "layers", ())}
            rows.append(given.out, {**found, **row, **environment})
            print(f"{subject.facts['dtype']}, {name}: {line(found | row)}", flush=True)
    return 0


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "kl" not in row:
        return f"| {row['mode']} | {row.get('refused') or row.get('failed')} |"
    size = f"{row['bits']:.2f} bits" if "bits" in row else ""
    size += f"{row['cache_bytes'] / 2**20:.1f} MiB" if "cache_bytes" in row else ""
    off = f"{row['weights_off']:.4f}" if "weights_off" in row else ""
    return (
        f"| {row['mode']} | {lossy_modes.cell(row)} ({100 * row['same_se']:.1f}) | {size} | {off} |"
    )


def table(given: argparse.Namespace) -> int:
    """Print the latest rows as Markdown: a table for each model, dtype and text."""
    by = ("model", "dtype", "text", "length")
    found = rows.latest(rows.read(given.out), *by, "mode")
    for place in dict.fromkeys(tuple(row[key] for key in by) for row in found):
        here = [row for row in found if tuple(row[key] for key in by) == place]
        tokens = max(row.get("tokens", 0) for row in here)
        print("\n{}, {}, {}, sequences of {}: ".format(*place) + f"{tokens:,} tokens\n")
        print("| design | perplexity (se); KL (se); same token (se) | size | weights are off by |")
        print("|---" * 4 + "|")
        for row in here:
            print(line(row))
    return 0


def main() -> int:
    """Run from the command line."""
    parser = parser_of(__doc__, texts=["prose", "source"], prompt=512, sequences=24)
    parser.add_argument("--part", choices=PARTS, default="weights")
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time")
    parser.set_defaults(modes=[])
    return run(parser, {"measure": measure, "table": table}, "quality-designs.jsonl")


if __name__ == "__main__":
    sys.exit(main())
