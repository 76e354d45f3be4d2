"""Show how the passes would rewrite a model and how much memory its training step would need,
without running the model.

    print(memeff_compile.explain(model, input_ids=ids, labels=ids))

The model is traced on tensors that have sizes but no memory, and the passes run on the captured
graphs. The memory of a step is then computed from the buffers of the graphs that Inductor would
compile, with and without the passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from .. import compat, system
from ..errors import ExplainError, OptionError, first_line
from ..notebook import folded, pre
from ..options import Options
from ..report import Record, Report, VerbReport, format_bytes
from . import setting as settings
from .capture import Capture, capture, sizes_of
from .cards import Card, target_of
from .depth import Stack, configs_of, shortened, stacks_of
from .footprint import facts_of, footprint, op_transient, vocabularies
from .plan import Plan, Side
from .progress import Progress
from .setting import BITS_PER_WEIGHT, Footprint, Setting, read_memory
from .sizes import Scale, Sizes, Told, points_around

LEFT_FREE = 0.10
"""The share of the memory that the largest batch leaves free, for gaps between allocated blocks,
the CUDA context, and plans that are too low. With 0.05, the largest batches of two of three models
ran out of memory in the first step on an H200 (`nvidia-h200/largest-batch.jsonl`)."""

LEFT_OUT = 0.03
"""The largest share of the peak that may be allocated outside graphs, which a plan does not
count."""


def explain(
    model: Any,
    *args: object,
    options: Mapping[str, object] | Options | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    progress: bool | None = None,
    **kwargs: object,
) -> Explanation:
    """Report how the backend would rewrite a call of `model`, and the memory that a step needs.

    The function neither allocates memory nor compiles. The model may be on any device, "meta"
    included. The function traces a copy whose weights take no memory, and does not change the
    model. If gradients are enabled, the function predicts the memory of a training step.

    Args:
        model: a module, or any function of tensors.
        *args: arguments of the model; tensors may be on "meta".
        options: the backend's options, as in `torch.compile(options=...)`. If "memeff.weights"
            names a codec (a format of compressed weights), the predicted memory is that of a model
            which `compress_` has compressed.
        device: the device for which the memory is predicted: "cuda" or "cpu".
        gpu: the name of a GPU, such as "rtx4090". The prediction is for this GPU's kernels and
            memory; by default, for the kernels of an H100 or H200.
        progress: whether to show progress on stderr; by default only if stderr is a terminal.
        **kwargs: keyword arguments of the model.

    Raises:
        ExplainError: the model is neither a module nor a function; or its call has no tensor, or
            fails on tensors without memory.
        OptionError: an option is not valid, or has no effect on the prediction.

    Example:
        >>> print(memeff_compile.explain(model, input_ids=ids, labels=ids))  # doctest: +SKIP
    """
    target = target_of(device, gpu)
    chosen = options if isinstance(options, Options) else Options.parse(None, options)
    chosen, weights = honoured(chosen)
    model = getattr(model, "_orig_mod", model)
    _require_callable(model)
    sizes = sizes_of(args, kwargs)
    take: _Take = partial(capture, (args, kwargs), sizes, chosen, target)
    with Progress(5, progress) as said:
        own, found, stacks, fixed = captures(model, chosen, sizes, take, said)
        scale = Scale(found.at, points_around(sizes.batch, sizes.length, found.at))
        facts, transient = facts_of(model, stacks, target.library), op_transient(scale, target)
        said("the graphs of a step")
        graphs = [found.graphs(with_passes=each) for each in (False, True)]
        sides = []
        for with_passes, what in enumerate(("memory without", "memory with memeff")):
            said(what)
            how = (stacks, scale, facts, transient)
            sides.append(footprint(found, graphs[with_passes], *how, is_cut=bool(with_passes)))
    return Explanation(
        name=getattr(model, "__name__", type(model).__name__),
        sizes=sizes,
        vocabulary=max(vocabularies(found), default=0),
        before=sides[0],
        after=sides[1],
        report=_of_all_blocks(own, stacks),
        stacks=tuple(stack for stack in stacks if stack.is_short),
        fixed=fixed,
        outside=own.outside,
        card=target.card,
        weights=weights,
    )


def honoured(options: Options) -> tuple[Options, str]:
    """Return the options that change the captured graphs, and the codec of compressed weights.

    The option `memeff.weights` names the codec, for example "win4". If it names none, the returned
    codec is "dense". Raise OptionError if an option has no effect on a memory plan.
    """
    weights = options.weights if options.weights in BITS_PER_WEIGHT else "dense"
    options = replace(options, weights="exact") if weights != "dense" else options
    for hooks in system.hooks():
        hooks.refuse(options)
    ignored = {
        "memeff.inner": (options.inner != "inductor", "a plan is of the memory of Inductor's code"),
        "memeff.verify": (options.verify != "off", "a plan is of the calls after the first one"),
        "memeff.mode": (options.mode is not None, "a plan is of Inductor's default mode"),
        ", ".join(map(repr, options.inductor)): (bool(options.inductor), "no code is made"),
    }
    for key, (is_given, why) in ignored.items():
        if is_given:
            raise OptionError(f"explain cannot honour {key}: {why}. Leave it out.")
    return options, weights


def _require_callable(model: object) -> None:
    """Raise an error for an object that cannot be called, and for a class, which torch.compile
    would change permanently.
    """
    if isinstance(model, type):
        raise ExplainError(
            f"explain was given the class {model.__name__}; it needs a model that is made of it, "
            "whose weights may be on device 'meta'."
        )
    if not callable(model):
        raise ExplainError(
            f"explain was given a {type(model).__name__}; it needs a module or a function. "
            "`memeff explain config.json` reads a configuration."
        )


_Take = Callable[..., Capture]
"""Captures a model at sizes."""

_Captured = tuple[Capture, Capture, list[Stack], dict[str, str]]
"""A model captured at the sizes of the call, for the report, and at distinct sizes; its stacks; and
why the batch or the length is fixed.
"""


def captures(model: Any, options: Options, sizes: Sizes, take: _Take, said: Progress) -> _Captured:
    """Capture (trace) a model with a few of its blocks (layers).

    If the model does not run with fewer blocks, capture all of them."""
    stacks = stacks_of(model)
    asked = [path for paths in options.skip.values() for path in paths]
    asked += [] if isinstance(options.attention, str) else list(options.attention)
    is_of_blocks = any(char.isdecimal() for path in asked for char in path)  # each has its number
    is_of_blocks |= isinstance(options.recompute, int)  # bytes that all of them share
    if any(stack.is_short for stack in stacks) and not is_of_blocks:
        try:
            return _captured(shortened(model, stacks), stacks, sizes, take, said)
        except ExplainError:
            pass  # the whole model either runs, or fails with the error that the user should see
    return _captured(model, [stack.whole() for stack in stacks], sizes, take, said)


def _captured(
    model: Any, stacks: list[Stack], sizes: Sizes, take: _Take, said: Progress
) -> _Captured:
    """Capture (trace) a model at the sizes of the user's call, and again at other sizes.

    The sizes of a call are batch size and sequence length. The captures show how the sizes of
    buffers depend on batch size and length. If a buffer's size follows no formula in the length,
    the predicted memory holds only for the call's length. For example, a model may round lengths
    up to whole chunks. The same applies if the model does not run at another length.

    A prediction that holds only for the call's length may also hold only for the call's batch size.
    Such a prediction is limited to this batch size in three cases:

    - the size of some buffer follows no formula in the batch size;
    - the model does not run at another batch size;
    - the model uses values of a tensor as numbers or sizes, such as positions of images.
    """
    said("what the passes do")
    # Dynamo makes separate graphs for a batch of 1
    mine = take(model, Told(max(sizes.batch, 2), sizes.length))
    apart = Told.apart(sizes, constants_of(model))
    fixed: dict[str, str] = {}
    for told in dict.fromkeys((apart, Told(apart.batch))):
        said("how sizes grow")
        try:
            found = take(model, told)
        except ExplainError as error:
            at = f"{told.batch} x {told.length or sizes.length}"
            why = f"it does not run at {at}: {first_line(error)}"
        else:
            found.at = mine.lengths_in(found)
            why = mine.grows_as(found)
            if not why:
                return mine, found, stacks, fixed
        fixed["length" if told.length else "batch"] = why
        if mine.values.are_read:  # such as positions of images, which differ between batches
            fixed["batch"] = why
            break
    if sizes.batch == 1:
        said("the sizes of this call alone")
        mine = take(model, Told(*astuple(sizes)))
    mine.at = Told()
    return mine, mine, stacks, fixed


def constants_of(model: object) -> set[int]:
    """Return the numbers that are constants of a model: the sizes of its parameters, and the
    numbers in its config."""
    if not isinstance(model, nn.Module):
        return set()
    every = [*model.parameters(), *model.buffers()]
    found = {size for p in (*every, *map(compat.local_part, every)) for size in p.shape}
    for config in configs_of(model):
        found |= {value for value in vars(config).values() if type(value) is int}
    return found


def _of_all_blocks(captured: Capture, stacks: list[Stack]) -> Report:
    """Return the compilation report of the whole model.

    `captured` has the reports of a model in which only some blocks (layers) were traced. Each
    traced block represents blocks of the same kind. The records (entries) of the new report
    name the modules of all blocks."""

    def all_like(path: str) -> list[str]:
        """Return the paths in the whole model that a path in the shortened model (which has fewer
        blocks) represents."""
        for stack in stacks:
            found = re.fullmatch(rf"{re.escape(stack.path)}\.(\d+)(|\..*)", path)
            if found:
                return [f"{stack.path}.{i}{found[2]}" for i in stack.alike(int(found[1]))]
        return [path]

    def of_all(record: Record) -> Iterator[Record]:
        first, *also = paths = [p for m in (record.module, *record.also) for p in all_like(m)]
        if record.sites > 1:
            sites = record.sites * len(paths) // (1 + len(record.also))
            yield replace(record, module=first, also=tuple(also), sites=sites)
        else:
            yield from (replace(record, module=path) for path in paths)

    return Report(
        tuple(
            replace(graph, records=tuple(each for r in graph.records for each in of_all(r)))
            for graph in captured.reports
        )
    )


@dataclass(frozen=True)
class Explanation(VerbReport):
    """The result of `explain`: the passes' rewrites, and the method `plan`, which computes the
    memory of a step."""

    name: str  # of the model
    sizes: Sizes  # batch and length of the call
    vocabulary: int  # classes of the largest head, 0 without one
    before: Footprint  # the moments that can be the peak, without the passes
    after: Footprint  # likewise, with them
    report: Report  # the rewrites and declines of each pass, as `last_report()`
    stacks: tuple[Stack, ...] = ()  # the lists of blocks of which only some were captured
    # "batch", "length": why sizes at another one are unknown
    fixed: Mapping[str, str] = field(default_factory=dict)
    outside: int = 0  # bytes of operations outside graphs, which no plan counts
    card: Card | None = None  # the named card
    weights: str = "dense"  # the codec that the options named, or "dense"

    def plan(
        self,
        *,
        batch: int | None = None,
        length: int | None = None,
        memory: str | int | None = None,
        **given: Any,
    ) -> Plan:
        """Return the predicted memory of a training step, for example with a given optimizer.

        Args:
            batch: sequences per GPU; by default as in the model call that `explain` traced.
            length: tokens per sequence; by default as in the traced call.
            memory: the memory of one GPU, such as "80GB", for which the largest batch is computed.
                By default, the memory of the GPU that was passed to `explain`.
            **given: the fields of `Setting`; by default one GPU and no optimizer.

        Raises:
            ExplainError: a setting is not valid. Also if `batch` or `length` differs from the
                traced call's, and the model's memory is known only for the traced call. This is
                so, for example, if the model rounds lengths up to whole chunks.

        Example:
            >>> explanation.plan(optimizer="adamw", memory="80GB")  # doctest: +SKIP
        """
        unknown = [name for name in given if name not in vars(Setting())]
        if unknown:
            known = ", ".join(("batch", "length", "memory", *vars(Setting())))
            raise ExplainError(f"plan() got {', '.join(sorted(unknown))}; it takes {known}.")
        setting = Setting(**{"optimizer": "none", "weights": self.weights, **given})
        batch = self.sizes.batch if batch is None else batch
        length = self.sizes.length if length is None else length
        settings.require_counts(batch=batch, length=length)
        sizes = Sizes(batch, length)
        for name, why in self.fixed.items():
            own, asked = getattr(self.sizes, name), getattr(sizes, name)
            if asked != own:
                raise ExplainError(
                    f"The memory at {name} {asked} is not known from that at {own}: {why}. Explain "
                    f"the model with inputs of {name} {asked}."
                )
        if setting.accounting == "paper" and not self.vocabulary:
            raise ExplainError(
                "accounting='paper' compares a loss with and without log-probabilities, and no "
                "head with a loss was found in this model. Pass labels, or use accounting='peak'."
            )
        if memory is None and self.card is not None:
            memory = self.card.memory
        room = None if memory is None else read_memory(memory)
        columns = []
        for found, is_after in ((self.before, False), (self.after, True)):
            moments = settings.moments(found, setting, after=is_after, vocab=self.vocabulary)
            moment, peak = settings.peak(moments, sizes.batch, sizes.length)
            groups = settings.grouped(moment, sizes.batch, sizes.length)
            fits = None
            if room is not None and "batch" not in self.fixed:
                free = LEFT_FREE * room if setting.accounting == "peak" else 0
                fits = settings.largest_batch(moments, sizes.length, int(room - free))
            columns.append(Side(peak, groups, moment, fits))
        before, after = columns
        if self.outside > LEFT_OUT * min(before.peak, after.peak):
            raise ExplainError(
                f"{self.name} makes {format_bytes(self.outside)} of tensors outside of captured "
                f"graphs, beside {format_bytes(after.peak)} in them, so its memory is not "
                "known. TORCH_LOGS=graph_breaks says where its graphs break; torch.compile(model, "
                "fullgraph=True) refuses a model that does."
            )
        return Plan(self.name, sizes, setting, room, before, after, self.before.facts.ranks)

    def __str__(self) -> str:
        try:
            return self.text(self.plan())
        except ExplainError as error:
            return f"{self.text()}\n\nNo plan: {error}"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the rewrites and the peak memory, and the full text, which a
        click expands."""
        try:
            found, why = self.plan()._repr_html_(), ""
        except ExplainError as error:
            found, why = "", f"\nNo plan: {error}"
        return pre(f"{self.summary}\n{self.report}{why}") + found + folded(self.text())

    def text(self, plan: Plan | None = None) -> str:
        """Return the report of the passes, and a plan (the predicted memory of a training step), as
        text.

        Without `plan`, the text contains no predicted memory."""
        parts = [f"{self.before.facts.parameters / 1e6:.1f} M parameters"]
        parts += [f"{s.path}: {s.depth} blocks, read off {len(s.kept)}" for s in self.stacks]
        texts = [f"{self.name}: {'; '.join(parts)}", self.report.details()]
        if self.card is not None:
            texts.insert(1, str(self.card))
        if plan is not None:
            texts.append(f"Predicted memory of a step. B = batch per GPU, L = length.\n{plan}")
            texts += [
                f"At this {name} only: {why}."
                + (" What fits is not known." if name == "batch" and plan.memory else "")
                for name, why in self.fixed.items()
            ]
        return "\n\n".join(texts)

    def to_json(self, plan: Plan | None = None, *, indent: int | None = None) -> str:
        """Return the report of the passes, and a plan (the predicted memory of a training step), as
        JSON."""
        data = {
            "model": self.name,
            "parameters": self.before.facts.parameters,
            "vocabulary": self.vocabulary,
            "plan": (plan or self.plan()).to_dict(),
            "report": json.loads(self.report.to_json(include_graphs=False)),
        }
        return json.dumps(data, indent=indent)
