"""List settings with which a model trains on one GPU, and the memory that each setting needs.

The prediction needs neither a GPU nor the model's weights.

    memeff fit examples/configs/llama3.1-8b.json --gpu rtx4090 --length 2048

The model is captured a few times: unchanged, with checkpointing, and with LoRA adapters. The memory
with other optimizers, with updates during the backward pass, and with compressed weights is
computed from these captures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ExplainError
from ..kernels import coded_weight as coded_folder
from ..options import Options
from ..report import VerbReport, format_bytes
from . import setting as settings
from .capture import Capture, capture, without_log
from .cards import Card, Target, given_memory
from .depth import Stack, copied_with, shortened, stacks_of
from .explain import LEFT_FREE, captures, constants_of
from .footprint import facts_of, footprint, op_transient, vocabularies
from .models import build, checkpoint
from .progress import Progress
from .setting import Footprint, Setting, require_counts
from .sizes import Scale, Sizes, Told, points_around

RANK = 16

LINES = {
    "c": 'model.gradient_checkpointing_enable({"use_reentrant": False})',
    **{codec[0]: f'memeff_compile.compress_(model, "{codec}")' for codec in coded_folder.ADVISED},
    "l": "model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, "
    'target_modules="all-linear", task_type="CAUSAL_LM"))',
    "d": "model.disable_input_require_grads()  # else the graph breaks at the embedding",
    "A": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)",
    "8": "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-5)",
    "B": "optimizer = memeff_compile.optim_in_backward(model, "
    "lambda p: torch.optim.AdamW([p], lr=1e-5, fused=True))",
    "E": "optimizer = memeff_compile.optim_in_backward(model, "
    "lambda p: bitsandbytes.optim.AdamW8bit([p], lr=1e-5))",
    "S": "optimizer = memeff_compile.optim_in_backward(model, "
    "lambda p: torch.optim.SGD([p], lr=1e-3))",
    "m": 'model.compile(backend="memeff")',
    "k": 'model.compile(backend="memeff", options={"memeff.recompute": "attention"})',
    "i": "model.compile()",
}
"""The line of code for each letter of a setting."""


class Kind(NamedTuple):
    """A way to train a model, such as checkpointing with 8-bit AdamW.

    The table that `fit` returns has one row for each way in `KINDS`."""

    name: str
    captured: str  # "as is", "checkpointing", "keeping attention", "adapters"
    setting: Mapping[str, Any]
    numbers: str  # "exact", or how the results differ
    write: str  # keys of `LINES`, in order
    is_ours: bool = True  # whether the passes run


def _compressed(
    captured: str, setting: Mapping[str, Any], numbers: str, write: str
) -> Iterator[Kind]:
    """For each codec (format) of compressed weights, yield a training setting with weights in this
    codec.

    `write`, for example "c {} S m", has one letter for each line of user code that applies the
    setting. `LINES` has the line for each letter. In `write`, the first letter of the codec's name
    replaces `{}`.
    """
    for codec in coded_folder.ADVISED:
        how = {**setting, "weights": codec}
        name = f"the same, weights in {codec}"
        yield Kind(name, captured, how, numbers, write.format(codec[0]))


ADAM, SGD = {"optimizer": "adamw"}, {"optimizer": "sgd", "in_backward": True}
EIGHT = {"optimizer": "adamw8bit"}
KINDS = (
    Kind("as is, torch.compile alone, AdamW", "as is", ADAM, "exact", "A i", False),
    Kind("as is, AdamW", "as is", ADAM, "exact", "A m"),
    Kind("checkpointing that keeps attention, AdamW", "keeping attention", ADAM, "exact", "c A k"),
    Kind("checkpointing, AdamW", "checkpointing", ADAM, "exact", "c A m"),
    Kind(
        "checkpointing, AdamW in the backward",
        *("checkpointing", ADAM | {"in_backward": True}, "exact", "c B m"),
    ),
    Kind("checkpointing, 8-bit AdamW", "checkpointing", EIGHT, "lossy: state", "c 8 m"),
    Kind(
        "checkpointing, 8-bit AdamW in the backward",
        *("checkpointing", EIGHT | {"in_backward": True}, "lossy: state", "c E m"),
    ),
    Kind("checkpointing, SGD in the backward", "checkpointing", SGD, "exact", "c S m"),
    *_compressed("checkpointing", SGD, "exact", "c {} S m"),
    Kind("LoRA, checkpointing, AdamW", "adapters", ADAM, "adapters", "c l d A m"),
    *_compressed("adapters", ADAM, "adapters", "c {} l d A m"),
)
"""The rows of the table, from the smallest change of the training to the largest."""


@dataclass(frozen=True)
class Row:
    """A row of the table that `fit` returns: one setting, and whether a training step with this
    setting fits into memory.
    """

    kind: Kind
    peak: int | None  # bytes at the requested batch and length, or None: see `why`
    largest_batch: int  # the largest batch that fits, or 0
    longest: int  # tokens of one sequence that fit
    why: str = ""  # why this model cannot use the setting

    def to_dict(self) -> dict[str, Any]:
        """Return the row (a training setting and the memory that it needs) as a dictionary."""
        return {
            "setting": self.kind.name,
            "peak_bytes": self.peak,
            "largest_batch": self.largest_batch,
            "longest": self.longest,
            "numbers": self.kind.numbers,
            "lines": lines_of(self.kind.write),
            "why_not": self.why,
        }


def lines_of(write: str, rank: int = RANK) -> list[str]:
    """Return the lines of user code that apply a training setting.

    `write`, for example "c S m", has one letter for each line. The dictionary `LINES` maps each
    letter to its line of code, such as `model.compile()` for "i". `rank` is the rank of LoRA
    matrices."""
    return [LINES[key].replace("RANK", str(rank)) for key in write.split()]


@dataclass(frozen=True)
class Fit(VerbReport):
    """The table that `fit` returns: training settings, and the memory that each one needs."""

    name: str  # of the model
    parameters: int
    sizes: Sizes
    memory: int  # bytes of one GPU
    card: Card | None
    rank: int
    rows: tuple[Row, ...]

    @property
    def room(self) -> int:
        """Return the bytes that a training step may use, which leaves 10 % of the memory free."""
        return int(self.memory * (1 - LEFT_FREE))

    @property
    def first(self) -> Row | None:
        """Return the first row, in this table of training settings, whose setting uses this package
        and fits into memory, or None.

        Rows whose settings change the training less come first."""
        return next((row for row in self.rows if row.largest_batch and row.kind.is_ours), None)

    @property
    def nearest(self) -> Row:
        """Return the row, in this table of training settings, whose setting needs the least memory.

        If no setting with this package fits into memory, the table's text names this row."""
        return min(
            (row for row in self.rows if row.peak is not None), key=lambda row: row.peak or 0
        )

    def __str__(self) -> str:
        at = f"{self.sizes.batch} x {self.sizes.length}"
        on = f"{self.card}" if self.card else f"one GPU of {format_bytes(self.memory)}"
        if self.card is not None and self.memory != self.card.memory:
            on += f"; planned for {format_bytes(self.memory)}"
        lines = [f"{self.name}, {self.parameters / 1e6:,.1f} M parameters, on {on}", ""]
        head = f"  {'':<4}{'training':<44}{f'peak, {at}':>18}{'largest batch':>16}   "
        lines.append(f"{head}{'numbers':<14}write")
        for number, row in enumerate(self.rows, 1):
            start = f"  {number:<4}{row.kind.name:<44}"
            if row.peak is None:
                lines.append(f"{start}{'-':>18}{'-':>16}   {row.why}")
                continue
            fits = f"{row.largest_batch:,}" if row.largest_batch else "none fits"
            sizes = f"{format_bytes(row.peak):>18}{fits:>16}"
            lines.append(f"{start}{sizes}   {row.kind.numbers:<14}{row.kind.write}")
        lines += ["", *self._verdict(), "", "  The letters under `write`:"]
        used = dict.fromkeys(key for row in self.rows for key in row.kind.write.split())
        order = [key for key in LINES if key in used]
        lines += [f"  {key}  {lines_of(key, self.rank)[0]}" for key in order]
        return "\n".join([*lines, "", *(f"  {note}" for note in NOTES)])

    def _verdict(self) -> Iterator[str]:
        first = self.first
        if first is None:
            nearest = self.nearest
            assert nearest.peak is not None
            missing = format_bytes(nearest.peak - self.room)
            number = self.rows.index(nearest) + 1
            usable = format_bytes(self.room)
            yield f"  None fits at length {self.sizes.length}. The nearest is row {number}, which"
            yield f"  lacks {missing}: it takes {format_bytes(nearest.peak)} of {usable}."
            if nearest.longest:
                yield f"  One sequence of {nearest.longest:,} tokens fits with it."
            return
        yield f"  Row {self.rows.index(first) + 1} is the first that fits. To write:"
        yield ""
        yield from (f"      {line}" for line in lines_of(first.kind.write, self.rank))

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the table of training settings as JSON."""
        data = {
            "model": self.name,
            "parameters": self.parameters,
            "batch": self.sizes.batch,
            "length": self.sizes.length,
            "memory_bytes": self.memory,
            "gpu": None if self.card is None else self.card.name,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(data, indent=indent)


NOTES = (
    "exact: the same numbers as that optimizer on dense weights. lossy: the optimizer keeps its",
    "state in 8 bits. adapters: the weights stay as they are, and small matrices are trained.",
    "An optimizer in the backward clips each gradient by its own norm, not all by a common one.",
    "A tenth of the memory is left free. Predicted, not measured: docs/use/what-fits.md.",
)


class Adapted(nn.Module):
    """A linear layer with a frozen weight and a LoRA adapter in fp32, as in PEFT."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        how: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": base.weight.device}
        self.down = nn.Linear(base.in_features, rank, **how)
        self.up = nn.Linear(rank, base.out_features, **how)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layer's result and the adapter's result."""
        result: Tensor = self.base(x)
        added: Tensor = self.up(self.down(x.float()))
        return (result + 2.0 * added).to(result.dtype)


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """Return a copy of a model with activation checkpointing, and with an adapter at every linear
    layer of its blocks.

    All other parameters of the copy are frozen. This copy has its own parameter objects, so the
    original model's parameters are not frozen.
    """
    memo: dict[int, object] = {id(p): p.detach() for p in model.buffers()}
    memo |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    copied = copied_with(model, memo)
    linears = [
        (module, name, child)
        for stack in stacks_of(copied)
        for module in copied.get_submodule(stack.path).modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
    ]
    if not linears:
        raise ExplainError("there is no nn.Linear in its blocks to put adapters at")
    for module, name, child in linears:
        setattr(module, name, Adapted(child, rank))
    checkpoint(copied)
    disable = getattr(copied, "disable_input_require_grads", None)
    if disable is not None:  # a hook that would break the graph
        disable()
    return copied


def _shared(model: nn.Module) -> nn.Module:
    """Return a copy of a model; the copy uses the parameters and buffers of the original."""
    return copied_with(model, {id(p): p for p in (*model.parameters(), *model.buffers())})


class _Found(NamedTuple):
    footprints: dict[str, Footprint]  # by the kind of capture; "without" is without passes
    failed: dict[str, str]  # reasons for missing captures
    vocabulary: int


def fit(
    model: str | Path | nn.Module,
    *,
    memory: str | int | None = None,
    gpu: str | None = None,
    length: int = 2048,
    batch: int = 1,
    rank: int = RANK,
    dtype: str = "bfloat16",
    attention: str | None = None,
    progress: bool | None = None,
) -> Fit:
    """Return a table of the settings with which a model trains on one GPU.

    This function allocates no tensors and compiles no code.

    Args:
        model: a config.json, a folder with one, `module:function`, or a model of transformers,
            on any device, "meta" included. Gradient checkpointing must be off in this model. If
            gradient checkpointing is on, the table's rows for the unchanged model ("as is")
            describe training with checkpointing.
        memory: the memory of the GPU, such as "24GB"; by default the memory of the GPU that `gpu`
            names.
        gpu: the name of a GPU, such as "rtx4090", whose kernels are assumed. If you pass only
            `memory`, the kernels of an H100 are assumed.
        length: number of tokens per sequence.
        batch: number of sequences for which the peak is computed.
        rank: rank of the LoRA matrices.
        dtype: dtype of the parameters of a model that is built from a config.
        attention: attn_implementation of transformers for a model that is built from a config.
        progress: whether to show progress on stderr; by default only if stderr is a terminal.

    Raises:
        ExplainError: the model cannot be built or captured. Also if you passed neither `memory`
            nor `gpu`, or if the GPU's name is unknown.

    Example:
        >>> print(memeff_compile.fit("config.json", gpu="rtx4090", length=2048))  # doctest: +SKIP
    """
    require_counts(batch=batch, length=length, rank=rank)
    card, room = given_memory(memory, gpu)
    target = Target(card=card)
    if isinstance(model, nn.Module):
        built = _shared(model).train()
        with torch.device("meta"):
            ids = torch.zeros(batch, length, dtype=torch.int64)
        call = {"input_ids": ids, "labels": ids}
    else:
        how: dict[str, Any] = {"dtype": dtype, "attention": attention, "checkpointing": False}
        made = build(str(model), batch=batch, length=length, **how)
        if made.args or not isinstance(made.model, nn.Module):
            raise ExplainError("fit needs a module that is called with input_ids and labels.")
        built, call = made.model, made.kwargs
    with Progress(9, progress) as said:
        found = _found(built, call, Sizes(batch, length), rank, target, said)
    usable = int(room * (1 - LEFT_FREE))
    rows = tuple(_row(kind, found, Sizes(batch, length), usable) for kind in KINDS)
    facts = found.footprints["as is"].facts
    name = type(built).__name__
    return Fit(name, facts.parameters, Sizes(batch, length), room, card, rank, rows)


def _found(
    model: nn.Module, call: dict[str, Any], sizes: Sizes, rank: int, target: Target, said: Progress
) -> _Found:
    """Capture four forms of the model: unchanged, two with activation checkpointing, and one with
    LoRA adapters.

    One of the two forms with checkpointing keeps the results of attention. The form with LoRA
    adapters uses activation checkpointing too."""
    plain = Options()

    def take(options: Options) -> Any:  # a function that captures a model at sizes
        return lambda module, told: capture(((), call), sizes, options, target, module, told)

    _own, first, stacks, fixed = captures(model, plain, sizes, take(plain), said)
    if fixed:
        name, why = next(iter(fixed.items()))
        raise ExplainError(f"fit needs memory at other sizes, and the {name} has to stay: {why}.")
    footprints: dict[str, Footprint] = {}

    def read(key: str, found: Capture, module: nn.Module, of: Sequence[Stack]) -> None:
        scale = Scale(found.at, points_around(sizes.batch, sizes.length, found.at))
        how = (of, scale, facts_of(module, of, target.library), op_transient(scale, target))
        is_ours = key != "without"
        graphs = found.graphs(with_passes=is_ours)
        footprints[key] = footprint(found, graphs, *how, is_cut=is_ours)

    said("as is")
    read("without", first, model, stacks)
    read("as is", first, model, stacks)
    saves = _shared(model)
    failed: dict[str, str] = {}
    try:
        checkpoint(saves)
    except ExplainError as error:
        failed = dict.fromkeys(("checkpointing", "keeping attention", "adapters"), str(error))
    keeping = Options(recompute="attention")
    others: dict[str, tuple[Callable[[], nn.Module], Options]] = {
        "checkpointing": (lambda: saves, plain),
        "keeping attention": (lambda: saves, keeping),
        "adapters": (lambda: adapted(model, rank), plain),
    }
    for key, (make, options) in others.items():
        if key in failed:
            continue
        said(key)
        try:
            module = make()
            of = stacks_of(module) if any(s.is_short for s in stacks) else list(stacks)
            told = replace(Told.apart(sizes, constants_of(module)), near=first.at.near)
            # The backend itself sets the policy whose in-place ops this logger warns about, and the
            # captured code never runs.
            with without_log("torch._higher_order_ops.wrap"):
                read(key, take(options)(shortened(module, of), told), module, of)
        except ExplainError as error:
            failed[key] = str(error)
    return _Found(footprints, failed, max(vocabularies(first), default=0))


def _row(kind: Kind, found: _Found, sizes: Sizes, room: int) -> Row:
    key = kind.captured if kind.is_ours else "without"
    if key in found.failed:
        return Row(kind, None, 0, 0, found.failed[key].partition("\n")[0])
    of, setting = found.footprints[key], Setting(**kind.setting)
    try:
        every = settings.moments(of, setting, after=kind.is_ours, vocab=found.vocabulary)
    except ExplainError as error:
        return Row(kind, None, 0, 0, str(error))
    most = settings.largest_batch(every, sizes.length, room)
    longest = settings.most(lambda tokens: settings.peak(every, 1, tokens)[1] <= room)
    return Row(kind, settings.peak(every, sizes.batch, sizes.length)[1], most, longest)
