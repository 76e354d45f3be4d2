"""List the settings with which one GPU can serve a model: codecs (formats) of weights, and bits of
KV caches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ExplainError
from ..kernels import coded_weight as coded_folder
from ..report import VerbReport, format_bytes
from .caches import STEP_ROOM, CacheMode, explain_cache
from .cards import Card, given_memory
from .models import build

CODECS = ("dense", *coded_folder.ADVISED)


@dataclass(frozen=True)
class ServingRow:
    """A row of the table of `fit_serving`: one codec (format) of weights with one number of bits of
    the KV cache.

    The row has the bytes of the weights and of the cache in these formats."""

    codec: str  # codec of the weights, or "dense"
    weights: int  # bytes
    mode: CacheMode  # number of bits and sizes of the cache
    least_ms: float | None  # to read weights and cache once, if the card is known

    @property
    def numbers(self) -> str:
        """Return text that says whether a model with this weight codec (format) and these KV cache
        bits computes the same results as the dense model.
        """
        return "exact" if self.mode.bits == 16 else "lossy: cache"

    @property
    def line(self) -> str:
        """Return, as text, the call of `memeff_compile.compile` that applies the weight codec
        (format) and the KV cache bits of this row of the `fit_serving` table.

        The text does not contain the name of the package."""
        options = [] if self.codec == "dense" else [f'weights="{self.codec}"']
        options += [] if self.mode.bits == 16 else [f"kv_cache={self.mode.bits}"]
        return f"compile({', '.join(['model', *options])})"

    def to_dict(self) -> dict[str, Any]:
        """Return this combination of weight codec (format) and KV cache bits as a dictionary."""
        return {
            "weights": self.codec,
            "weights_bytes": self.weights,
            "cache_bits": self.mode.bits,
            "cache_bytes": self.mode.total,
            "longest": self.mode.longest,
            "largest_batch": self.mode.largest_batch,
            "least_ms_per_step": self.least_ms,
            "numbers": self.numbers,
            "line": self.line,
        }


@dataclass(frozen=True)
class ServingFit(VerbReport):
    """The table that `fit_serving` returns.

    Each row combines a codec (format) of weights with a number of bits of the KV cache. The row has
    the longest context that fits into memory with `batch` sequences, and the largest batch that
    fits with `length` tokens per sequence."""

    name: str  # of the model
    memory: int  # bytes of one GPU
    card: Card | None
    batch: int
    length: int
    rows: tuple[ServingRow, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        on = f"{self.card}" if self.card else f"one GPU of {format_bytes(self.memory)}"
        if self.card is not None and self.memory != self.card.memory:
            on += f"; planned for {format_bytes(self.memory)}"
        at, longest = f"{self.batch} x {self.length}", f"longest, batch {self.batch}"
        title = f"{'weights':<9}{'cache':<8}{'weights':>10}{f'cache, {at}':>18}"
        title += f"{longest:>20}{f'batch, {self.length}':>14}{'least ms':>10}"
        lines = [f"{self.name} on {on}", "", f"  {title}   {'numbers':<14}write"]
        for row in self.rows:
            mode = row.mode
            start = f"{row.codec:<9}{f'{mode.bits} bits':<8}{format_bytes(row.weights):>10}"
            start += f"{format_bytes(mode.total):>18}{_count(mode.longest):>20}"
            least = "-" if row.least_ms is None else f"{row.least_ms:.1f}"
            start += f"{_count(mode.largest_batch):>14}{least:>10}"
            lines.append(f"  {start}   {row.numbers:<14}{row.line}")
        lines += ["", *(f"  {line}" for line in self._verdict()), ""]
        return "\n".join([*lines, *(f"  {note}" for note in (*self.notes, *NOTES))])

    def _verdict(self) -> list[str]:
        def fits(row: ServingRow) -> bool:
            return row.mode.largest_batch >= self.batch

        at = f"{self.batch} x {self.length}"
        first = next(filter(fits, self.rows), None)
        if first is not None:
            return [f"The first that holds {at}: memeff_compile.{first.line}"]
        nearest = min(self.rows, key=lambda row: row.weights + row.mode.total)
        takes = nearest.weights + nearest.mode.total + STEP_ROOM
        return [
            f"None fits {at}. The nearest is {nearest.line},",
            f"which lacks {format_bytes(takes - self.memory)}: it takes {format_bytes(takes)}.",
        ]

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the table as JSON: for each codec (format) of weights and number of KV cache bits,
        the bytes, the longest context and the largest batch."""
        data = {
            "model": self.name,
            "batch": self.batch,
            "length": self.length,
            "memory_bytes": self.memory,
            "gpu": None if self.card is None else self.card.name,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(data, indent=indent)


NOTES = (
    f"{format_bytes(STEP_ROOM)} is set aside for a step. least ms: the time of reading weights and",
    "cache once at the rate of the card's memory, a floor for one step of decoding.",
    "batch: the largest one at that length; longest: tokens of a sequence at that batch.",
)


def _count(count: int | None) -> str:
    return "any" if count is None else f"{count:,}" if count else "none fits"


def fit_serving(
    model: str | Path | nn.Module,
    *,
    memory: str | int | None = None,
    gpu: str | None = None,
    batch: int = 1,
    length: int = 8192,
    dtype: str = "bfloat16",
) -> ServingFit:
    """Return a table of the settings with which one GPU can serve a model.

    This function allocates no tensors and traces no code.

    Args:
        model: a config.json, a folder with one, or a model of transformers (also on "meta").
        memory: the memory of the GPU, such as "24GB"; by default the memory of the GPU that `gpu`
            names.
        gpu: the name of a GPU, such as "rtx4090".
        batch: number of sequences that are generated at the same time.
        length: number of tokens of each sequence, prompt and answer together.
        dtype: dtype of the parameters of a model that is built from a config.

    Raises:
        ExplainError: the model cannot be built, or its config lacks the sizes of a cache. Also if
            you passed neither `memory` nor `gpu`, or if the GPU's name is unknown.

    Example:
        >>> print(memeff_compile.fit_serving("config.json", gpu="rtx4090"))  # doctest: +SKIP
    """
    card, room = given_memory(memory, gpu)
    if not isinstance(model, nn.Module):
        made = build(str(model), batch=1, length=1, dtype=dtype, checkpointing=False)
        if not isinstance(made.model, nn.Module):
            raise ExplainError("fit_serving needs a model of transformers, not a function.")
        model = made.model
    from ..model.weights.compress import compressible

    unread = _weights_not_read(model)
    largest = max((weight.nbytes for weight in compressible(model)), default=0)
    rows: list[ServingRow] = []
    notes: tuple[str, ...] = ()
    for codec in CODECS:
        plan = explain_cache(model, memory=room, batch=batch, length=length, weights=codec)
        notes = plan.notes
        for mode in plan.modes:
            least = None
            if card is not None:
                decoded = 0 if codec == "dense" else largest
                read_bytes = plan.weights - decoded - unread + mode.total
                least = 1e3 * read_bytes / (1e9 * card.gb_per_s)
            rows.append(ServingRow(codec, plan.weights, mode, least))
    return ServingFit(type(model).__name__, room, card, batch, length, tuple(rows), notes)


def _weights_not_read(model: nn.Module) -> int:
    """Return the bytes of weights that a decoding step does not read.

    These are the weights of an embedding, unless an output projection shares them; of an
    embedding's weight, the step reads only a few rows.
    """
    inputs = getattr(model, "get_input_embeddings", lambda: None)()
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    table: torch.Tensor | None = getattr(inputs, "weight", None)
    if table is None or getattr(outputs, "weight", None) is table:
        return 0
    return int(table.nbytes)
