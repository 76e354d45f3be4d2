"""What memeff would do to a model, and the memory of its training step, without running it.

    print(memeff_compile.explain(model, input_ids=ids, labels=ids))

The model is traced on tensors that have sizes and no memory; the passes run on what was traced, and
the buffers of the graphs that Inductor would compile are replayed with and without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from ..errors import ExplainError, first_line
from ..options import Options
from ..report import Record, Report, format_bytes
from . import setting as settings
from .capture import Capture, capture, sizes_of
from .depth import Stack, configs_of, shortened, stacks_of
from .footprint import facts_of, footprint, op_transient, vocabularies
from .plan import Plan, Side
from .progress import Progress
from .setting import Footprint, Setting, read_memory
from .sizes import Scale, Sizes, Told, points_around

__all__ = ["Explanation", "explain"]

LEFT_OUT = 0.03
"""The share of the peak that may be made outside of graphs, where nothing is counted."""


def explain(
    model: Any,  # noqa: ANN401 - a module or any function of tensors
    *args: object,
    options: Mapping[str, object] | Options | None = None,
    device: str = "cuda",
    progress: bool | None = None,
    **kwargs: object,
) -> Explanation:
    """Say what the backend would do to a call of ``model``, and what memory a step needs.

    Nothing is allocated and nothing is compiled. The model may be on any device, "meta" included;
    it is copied and not touched. A model with gradients enabled is taken to be trained.

    Args:
        model: a module or function.
        *args: what the model is called with; tensors on "meta" do.
        options: options of the backend, as in `torch.compile(options=...)`.
        device: where it would run: "cuda" (compute capability 8.0 or later) or "cpu".
        progress: whether to say on stderr what is being done; by default where it is a terminal.
        **kwargs: what the model is called with by keyword.

    Raises:
        ExplainError: the call fails on tensors without memory, or has no tensor.
        OptionError: an option is unknown or out of range.

    Example:
        >>> print(memeff_compile.explain(model, input_ids=ids, labels=ids))  # doctest: +SKIP
    """
    if device not in ("cuda", "cpu"):
        raise ExplainError(f"device is {device!r}; it can be 'cuda' or 'cpu'.")
    chosen = options if isinstance(options, Options) else Options.parse(None, options)
    model = getattr(model, "_orig_mod", model)
    sizes = sizes_of(args, kwargs)
    with Progress(5, progress) as said:
        found = _captures(model, _Call(args, kwargs, sizes, chosen, device), said)
        scale = Scale(found.told, points_around(sizes.batch, sizes.length, found.told))
        facts = facts_of(model, found.stacks, device)
        transient = op_transient(scale, device)
        before, after = (
            footprint(found.graphs, found.stacks, scale, facts, after=is_after, transient=transient)
            for is_after in said.each(("memory without", "memory with memeff"), (False, True))
        )
    return Explanation(
        name=getattr(model, "__name__", type(model).__name__),
        sizes=sizes,
        vocabulary=max(vocabularies(found.graphs), default=0),
        before=before,
        after=after,
        report=_of_all_blocks(found.own, found.stacks),
        stacks=tuple(stack for stack in found.stacks if stack.is_short),
        fixed=found.fixed,
        outside=found.outside,
    )


class _Call(NamedTuple):
    """What is explained, beside the model."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    sizes: Sizes
    options: Options
    device: str


class _Captured(NamedTuple):
    """A model captured at the sizes of the call, for the report, and at sizes told apart."""

    own: Capture
    graphs: Capture
    told: Told
    stacks: list[Stack]
    fixed: Mapping[str, str]

    @property
    def outside(self) -> int:
        """Bytes of the tensors that the model made outside of graphs, at its own sizes."""
        return self.own.outside


def _captures(model: Any, call: _Call, said: Progress) -> _Captured:  # noqa: ANN401
    """Capture a model with few of its blocks, or whole where it does not run with fewer."""
    stacks = stacks_of(model)
    asked = [path for paths in call.options.skip.values() for path in paths]
    asked += [] if isinstance(call.options.attention, str) else list(call.options.attention)
    is_of_blocks = any(char.isdecimal() for path in asked for char in path)  # each has its number
    if any(stack.is_short for stack in stacks) and not is_of_blocks:
        try:
            return _captured(shortened(model, stacks), stacks, call, said)
        except ExplainError:
            pass  # the whole model either runs, or fails with the error that the user should see
    return _captured(model, [stack.whole() for stack in stacks], call, said)


def _captured(model: Any, stacks: list[Stack], call: _Call, said: Progress) -> _Captured:  # noqa: ANN401
    """Capture a model at its own sizes and at ones that say how others grow with them.

    Where sizes do not grow with the length in proportion (a length in whole chunks), it is left as
    it is, and so is the batch, so that what is planned is right at the sizes that it is for.
    """
    own = _own_sizes(call.sizes)
    given = (model, call.args, call.kwargs, call.sizes)
    said("what the passes do")
    mine = capture(*given, own, call.options, call.device, reports_alone=True)
    apart = Told.apart(call.sizes, _constants(model))
    fixed: dict[str, str] = {}
    for attempt in dict.fromkeys((apart, Told(apart.batch), Told())):
        said("the graphs of a step")
        at = Told(*astuple(call.sizes)) if attempt == Told() else attempt
        try:
            found = capture(*given, at, call.options, call.device)
        except ExplainError as error:
            if attempt == Told():
                raise
            problem = first_line(error)
            why = f"it does not run at {attempt.batch} x {attempt.length or own.length}: {problem}"
        else:
            told = attempt if attempt == Told() else mine.lengths_in(found, attempt)
            why = "" if attempt == Told() else mine.grows_as(found, told)
            if not why:
                return _Captured(mine, found, told, stacks, fixed)
        fixed["length" if attempt.length else "batch"] = why
    raise AssertionError("the last attempt returns or raises")


def _own_sizes(sizes: Sizes) -> Told:
    """Return the sizes of the call; Dynamo makes graphs of their own for a batch of 1."""
    return Told(max(sizes.batch, 2), sizes.length)


def _constants(model: object) -> set[int]:
    """Return the sizes that are a model's own: those of its parameters and of its config."""
    if not isinstance(model, nn.Module):
        return set()
    found = {size for p in (*model.parameters(), *model.buffers()) for size in p.shape}
    for config in configs_of(model):
        found |= {value for value in vars(config).values() if type(value) is int}
    return found


def _of_all_blocks(captured: Capture, stacks: list[Stack]) -> Report:
    """Return the report with the places of all blocks, of which those captured are some."""

    def all_like(path: str) -> list[str]:
        """Return the paths in the whole model that one in the captured model stands for."""
        for stack in stacks:
            head, _, rest = path.removeprefix(f"{stack.path}.").partition(".")
            if path.startswith(f"{stack.path}.") and head.isdecimal():
                alike = stack.alike(int(head))
                return [f"{stack.path}.{index}.{rest}".rstrip(".") for index in alike]
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
class Explanation:
    """What `explain` found out.

    Args:
        name: of the model.
        sizes: batch and length of the call.
        vocabulary: classes of the largest head, 0 without one.
        before: the moments that can be the peak, without the passes.
        after: the same with them.
        report: what each pass did or declined, as `last_report()`.
        stacks: the lists of blocks of which some were captured; empty if all were.
        fixed: "batch", "length": why sizes are not known at another one, where they are not.
        outside: bytes that operations outside of graphs make, which no plan counts.
    """

    name: str
    sizes: Sizes
    vocabulary: int
    before: Footprint
    after: Footprint
    report: Report
    stacks: tuple[Stack, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    outside: int = 0

    def plan(
        self,
        *,
        batch: int | None = None,
        length: int | None = None,
        memory: str | int | None = None,
        **given: Any,  # noqa: ANN401 - the fields of Setting
    ) -> Plan:
        """Return the memory of a step under a setting.

        Args:
            batch: sequences per GPU, and
            length: tokens per sequence; by default those of the call.
            memory: of one GPU, such as "80GB", to ask for the largest batch.
            **given: the fields of `Setting`; by default one GPU, no optimizer.

        Raises:
            ExplainError: a setting is unknown or out of range, or the memory is not known at that
                batch or length.

        Example:
            >>> explanation.plan(optimizer="adamw", memory="80GB")  # doctest: +SKIP
        """
        try:
            setting = Setting(**{"optimizer": "none", **given})
        except TypeError:
            known = ", ".join(("batch", "length", "memory", *vars(Setting())))
            raise ExplainError(
                f"plan() got {', '.join(sorted(given))}; it takes {known}."
            ) from None
        sizes = Sizes(batch or self.sizes.batch, length or self.sizes.length)
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
        room = None if memory is None else read_memory(memory)
        columns = [
            self._side(found, setting, sizes, room, after=is_after)
            for found, is_after in ((self.before, False), (self.after, True))
        ]
        if self.outside > LEFT_OUT * min(column.peak for column in columns):
            raise ExplainError(
                f"{self.name} makes {format_bytes(self.outside)} of tensors outside of captured "
                f"graphs, beside {format_bytes(columns[1].peak)} in them, so its memory is not "
                "known. TORCH_LOGS=graph_breaks says where its graphs break; torch.compile(model, "
                "fullgraph=True) refuses a model that does."
            )
        return Plan(self.name, sizes, setting, room, *columns)

    def _side(
        self, found: Footprint, setting: Setting, sizes: Sizes, room: int | None, *, after: bool
    ) -> Side:
        moments = settings.moments(found, setting, after=after, vocab=self.vocabulary)
        moment, peak = settings.peak(moments, sizes.batch, sizes.length)
        groups = settings.grouped(moment, sizes.batch, sizes.length)
        most = None
        if room is not None and "batch" not in self.fixed:
            most = settings.largest_batch(moments, sizes.length, room)
        return Side(peak, groups, moment, most)

    def __str__(self) -> str:
        try:
            return self.text(self.plan())
        except ExplainError as error:
            return f"{self.text()}\n\nNo plan: {error}"

    def text(self, plan: Plan | None = None) -> str:
        """Return what the passes do, and a plan, for a reader."""
        parts = [f"{self.before.facts.parameters / 1e6:.1f} M parameters"]
        parts += [
            f"{stack.path}: {stack.depth} blocks, read off {len(stack.kept)}"
            for stack in self.stacks
        ]
        texts = [f"{self.name}: {'; '.join(parts)}", self.report.details()]
        if plan is not None:
            texts.append(f"Predicted memory of a step. B = batch per GPU, L = length.\n{plan}")
            texts += [
                f"At this {name} only: {why}."
                + (" What fits is not known." if name == "batch" and plan.memory else "")
                for name, why in self.fixed.items()
            ]
        return "\n\n".join(texts)

    def to_json(self, plan: Plan | None = None, *, indent: int | None = None) -> str:
        """Return report and plan as JSON."""
        data = {
            "model": self.name,
            "parameters": self.before.facts.parameters,
            "vocabulary": self.vocabulary,
            "plan": (plan or self.plan()).to_dict(),
            "report": json.loads(self.report.to_json(include_graphs=False)),
        }
        return json.dumps(data, indent=indent)
