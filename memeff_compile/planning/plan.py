"""Plans: the predicted memory of a model's training step, as text, as plain values and as a figure.

A plan is for one batch size, length and `Setting` (such as the optimizer)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy

from ..notebook import bars, folded, pre
from ..report import format_bytes, text_width
from .figure import draw
from .setting import GROUPS, Moment, Setting
from .sizes import Sizes


@dataclass(frozen=True)
class Side:
    """One column of a plan: the memory of a step, either without or with the passes."""

    peak: int  # bytes on one GPU at the largest moment
    groups: Mapping[str, int]  # the same, as weights + optimizer, activations and logits
    moment: Moment  # which moment it is, with its parts as formulas
    largest_batch: int | None  # the largest batch per GPU that fits, or None without a memory


@dataclass(frozen=True)
class Plan:
    """The predicted memory of a step of one model, without and with the passes.

    The prediction is for one batch size, length and `Setting` (such as the optimizer)."""

    name: str  # of the model
    sizes: Sizes  # batch per GPU and length
    setting: Setting  # how the model is trained
    memory: int | None  # bytes of one GPU, or None
    before: Side  # the two columns
    after: Side  # likewise
    ranks: int = 1  # how many GPUs share each layer, as tensor parallelism cut it

    @property
    def increase(self) -> float | None:
        """Return the ratio of the largest batch with the passes to the largest batch without
        them."""
        if not self.before.largest_batch or self.after.largest_batch is None:
            return None
        return self.after.largest_batch / self.before.largest_batch

    def __str__(self) -> str:
        sides = (self.before, self.after)
        rows = {"": ["without", "with memeff"]}
        rows |= {g: [format_bytes(side.groups[g]) for side in sides] for g in GROUPS}
        rows["peak"] = [format_bytes(side.peak) for side in sides]
        if self.after.largest_batch is not None:
            most = [f"{s.largest_batch:,}" if s.largest_batch else "none fits" for s in sides]
            rows["largest batch per GPU"] = most
            if self.setting.gpus > 1:
                tokens = [f"{self._token_count(side):,}" for side in sides]
                rows[f"tokens on {self.setting.gpus} GPUs"] = tokens
        lines = [self.heading(), ""]
        lines += [f"  {label:<24}{a:>16}{b:>16}" for label, (a, b) in rows.items()]
        if self.increase is not None:
            lines += ["", f"  The largest batch grows {self.increase:.1f} times."]
        for label, side in (("without", self.before), ("with memeff", self.after)):
            formula = f"{label}: {side.moment.place}: {_formula(side.moment)}"
            lines += ["", *(f"  {line}" for line in textwrap.wrap(formula, text_width() - 2))]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the peak memory as bars, and the whole plan, which a click
        expands."""
        sides = {"without": self.before, "with memeff": self.after}
        peaks = {name: (side.peak, format_bytes(side.peak)) for name, side in sides.items()}
        said = f"{self.heading()}: peak {' -> '.join(size for _, size in peaks.values())}"
        return pre(said) + bars(peaks) + folded(str(self))

    def _token_count(self, side: Side) -> int:
        return (side.largest_batch or 0) * self.sizes.length * self.setting.gpus

    def heading(self) -> str:
        """Return one line with the model's name, the batch size, the length, the GPUs and the
        optimizer.

        The line also names other settings, such as the codec of compressed weights."""
        given = self.setting
        where = "one GPU" if given.gpus == 1 else f"each of {given.gpus} GPUs"
        if self.ranks > 1:
            where = f"each of {given.gpus * self.ranks} GPUs, {self.ranks} of them for each layer"
        if given.sharding == "fsdp":
            where += ", FSDP"
        optimizer = {"none": "no optimizer"}.get(given.optimizer, given.optimizer)
        optimizer += " in the backward" if given.in_backward else ""
        optimizer += f", weights in {given.weights}" if given.weights != "dense" else ""
        counted = ", counted as in the paper" if given.accounting == "paper" else ""
        master = ", fp32 master weights" if given.master_weights else ""
        room = "" if self.memory is None else f", {format_bytes(self.memory)} each"
        return (
            f"{self.name}, batch {self.sizes.batch} x length {self.sizes.length} on {where}{room}, "
            f"{optimizer}{master}{counted}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values; formulas are strings in B (batch size per GPU) and L
        (length)."""

        def column(side: Side) -> dict[str, Any]:
            return {
                "peak_bytes": side.peak,
                "bytes": dict(side.groups),
                "moment": side.moment.place,
                "formula": str(sympy.expand(side.moment.total)),
                "parts": {name: str(part) for name, part in side.moment.parts.items()},
                "largest_batch_per_gpu": side.largest_batch,
            }

        return {
            "batch_per_gpu": self.sizes.batch,
            "length": self.sizes.length,
            "setting": vars(self.setting),
            "memory_bytes": self.memory,
            "without": column(self.before),
            "with": column(self.after),
            "increase_of_largest_batch": self.increase,
        }

    def save_figure(self, path: str | Path) -> None:
        """Save a figure: bars of the peak memory of a step, without and with the passes.

        If the size of the GPU's memory is known, the figure also shows the largest batches that fit
        into this memory.

        Raise ExplainError if matplotlib is not installed.
        """
        before, after = self.before, self.after
        counts = [side.largest_batch or 0 for side in (before, after)]
        batches = None if before.largest_batch is None else counts
        groups = {name: (before.groups[name], after.groups[name]) for name in GROUPS}
        title = "\n".join(textwrap.wrap(f"{self.heading()}; predicted by explain", 100))
        draw(Path(path), title, groups, batches, self.sizes.length, self.increase)


def _formula(moment: Moment) -> str:
    """Return the bytes in use at a moment of the step as a formula, with one term for each group of
    tensors."""
    texts = []
    for group, names in GROUPS.items():
        parts = [moment.parts[name] for name in names if name in moment.parts]
        if parts:
            texts.append(f"{sympy.expand(sum(parts, sympy.Integer(0)))} ({group})")
    return " + ".join(texts)
