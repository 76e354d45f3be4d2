"""What memeff would do to a model, and the memory of its training step, without running it.

    print(memeff_compile.explain(model, input_ids=ids, labels=ids))

The model is traced on tensors that have sizes and no memory; the passes run on what was traced, and
the buffers of the graphs that Inductor would compile are replayed with and without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ExplainError
from ..options import Options
from ..report import Report
from . import setting as settings
from .capture import Capture, capture, sizes_of
from .depth import Stack, shortened, stacks_of
from .footprint import facts_of, footprint, op_transient, vocabularies
from .plan import Plan, Side
from .setting import Footprint, Setting, read_memory
from .sizes import Scale, Sizes, points_around

__all__ = ["Explanation", "explain"]


def explain(
    model: Any,  # noqa: ANN401 - a module or any function of tensors
    *args: object,
    options: Mapping[str, object] | Options | None = None,
    device: str = "cuda",
    **kwargs: object,
) -> Explanation:
    """Say what the backend would do to a call of ``model``, and what memory a step needs.

    Nothing is allocated and nothing is compiled. The model may be on any device, "meta" included;
    it is copied and not touched. A model with gradients enabled is taken to be trained.

    Args:
        model: a module or function.
        *args, **kwargs: what the model is called with; tensors on "meta" do.
        options: options of the backend, as in `torch.compile(options=...)`.
        device: where it would run: "cuda" (compute capability 8.0 or later) or "cpu".

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
    stacks = stacks_of(model)
    captures = _captures(model, stacks, args, kwargs, sizes, chosen, device)
    if len(captures) == 1:
        stacks = []
    scale = Scale(
        {symbol: name for found in captures for symbol, name in found.names.items()},
        points_around(sizes.batch, sizes.length),
    )
    facts = facts_of(model, stacks_of(model), device)
    transient = op_transient(scale, device)
    before, after = (
        footprint(captures, stacks, scale, facts, after=is_after, transient=transient)
        for is_after in (False, True)
    )
    reports = captures[-1].reports
    return Explanation(
        name=getattr(model, "__name__", type(model).__name__),
        sizes=sizes,
        vocabulary=max(vocabularies(captures[-1]), default=0),
        before=before,
        after=after,
        report=Report(tuple(reports)),
        stacks=tuple(stacks),
    )


def _captures(
    model: Any,  # noqa: ANN401
    stacks: list[Stack],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    sizes: Sizes,
    options: Options,
    device: str,
) -> list[Capture]:
    """Capture the model at two small depths, or whole where it does not run with fewer blocks."""
    call = (args, kwargs, sizes, options, device)
    if stacks and isinstance(model, nn.Module):
        small, large = (shortened(model, stacks, large=is_large) for is_large in (False, True))
        try:
            return [capture(small, *call, compare=False), capture(large, *call)]
        except ExplainError:
            pass  # the whole model either runs, or fails with the error that the user should see
    return [capture(model, *call)]


@dataclass(frozen=True)
class Explanation:
    """What `explain` found out.

    Args:
        name: of the model.
        sizes: batch and length of the call.
        vocabulary: classes of the largest head, 0 without one.
        before, after: the moments that can be the peak, without and with the passes.
        report: what each pass did or declined, as `last_report()`.
        stacks: the repeated blocks that were captured at two small depths; empty if all were.
    """

    name: str
    sizes: Sizes
    vocabulary: int
    before: Footprint
    after: Footprint
    report: Report
    stacks: tuple[Stack, ...] = ()

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
            ExplainError: a setting is unknown or out of range.

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
        return Plan(self.name, sizes, setting, room, *columns)

    def _side(
        self, found: Footprint, setting: Setting, sizes: Sizes, room: int | None, *, after: bool
    ) -> Side:
        moments = settings.moments(found, setting, after=after, vocab=self.vocabulary)
        moment, peak = settings.peak(moments, sizes.batch, sizes.length)
        groups = settings.grouped(moment, sizes.batch, sizes.length)
        most = None if room is None else settings.largest_batch(moments, sizes.length, room)
        return Side(peak, groups, moment, most)

    def __str__(self) -> str:
        return self.text(self.plan())

    def text(self, plan: Plan) -> str:
        """Return what the passes do, and a plan, for a reader."""
        parts = [f"{self.before.facts.parameters / 1e6:.1f} M parameters"]
        parts += [
            f"{stack.path}: {stack.depth} blocks, read off at {stack.small} and {stack.large}"
            for stack in self.stacks
        ]
        predicted = f"Predicted memory of a step. B = batch per GPU, L = length.\n{plan}"
        return f"{self.name}: {'; '.join(parts)}\n\n{self.report.details()}\n\n{predicted}"

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
