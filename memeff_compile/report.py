"""Reports of a compilation.

A report contains the rewrites, the bytes that the rewrites save, and the matches that passes did
not rewrite, each with the reason.

The backend records one `GraphReport` per compiled graph. `last_report()` returns the reports of the
latest 64 graphs since the last `torch._dynamo.reset()`, as text (`print`) or JSON. Byte counts
are sympy formulas over the sizes of the user's model, so a reader can check the formulas and insert
other sizes.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import textwrap
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from memeff_compile.notebook import bars, folded, pre

if TYPE_CHECKING:
    import sympy

Action: TypeAlias = Literal[
    "rewrote",
    "declined",
    "deferred",
    "dropped",
    "note",
    "internal_error",
    "verified",
    "unverified",
    "mismatch",
    "undone",
]

# The actions that changed the graph.
CHANGES: frozenset[str] = frozenset({"rewrote", "deferred", "dropped"})

_TROUBLE: frozenset[str] = frozenset({"internal_error", "mismatch", "unverified"})

_LOSS_PASS = "fuse_linear_cross_entropy"
_NO_LOSS_TO_FUSE: frozenset[str] = frozenset({"vocab_too_small", "skipped"})

MAX_GRAPHS = 64

DEFERRED_SENTENCE = (
    "Reading out.logits after the weights changed raises; options={'memeff.logits': 'eager'} "
    "restores eager logits."
)

_WIDEST, _NARROWEST = 96, 40
_INDENT = 11
_TWO_LINES = 145  # characters of a source line that are shown, wherever the text wraps


def text_width(most: int = _WIDEST) -> int:
    """Return the maximum width of a line in columns: the terminal's width, within bounds."""
    return max(_NARROWEST, min(most, shutil.get_terminal_size((most, 24)).columns))


def fold_names(named: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge pairs of name and text whose texts are equal and whose names differ only in numbers.

    Example:
        >>> fold_names([("layers.0.up", "win4"), ("layers.1.up", "win4"), ("head", "dense")])
        [('layers.0.up and 1 more', 'win4'), ('head', 'dense')]
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name, text in named:
        found.setdefault((_NUMBER.sub("*", name), text), []).append(name)
    return [
        (names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), text)
        for (_, text), names in found.items()
    ]


_NUMBER = re.compile(r"\d+")


class VerbReport(ABC):
    """The report of a function that changes a model: a one-line summary, a longer text, and JSON.

    `print` shows the longer text, whose first line is `summary`; a notebook collapses the other
    lines. For a function that returns the model instead of its report, `verb_report(model)` returns
    the report.
    """

    @property
    def summary(self) -> str:
        """Return the first line of the report's text."""
        return str(self).partition("\n")[0]

    @abstractmethod
    def to_json(self, *, indent: int | None = None) -> str:
        """Return the whole report as JSON."""

    def _bytes_before_and_after(self) -> tuple[int, int] | None:
        """Return two byte counts, before and after the change that this report describes, or None.

        For example, the report of `compress_` counts the bytes of the weights that were compressed.
        None means that the report has no such counts. A notebook draws the two counts as bars."""
        return None

    def _bars(self) -> str:
        sizes = self._bytes_before_and_after()
        if sizes is None:
            return ""
        names = ("before", "after")
        return bars({n: (size, format_bytes(size)) for n, size in zip(names, sizes, strict=True)})

    def _repr_html_(self) -> str:
        summary, _, more = str(self).partition("\n")
        return pre(summary) + self._bars() + folded(more)


def format_bytes(count: float) -> str:
    """Return a byte count with a unit: '1.95 GiB', '64.0 MiB', '512 bytes'."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{count:.0f} bytes"


@dataclass(frozen=True)
class Record:
    """One change that a pass made, or one match that the pass declined."""

    pass_name: str  # one of `options.PASS_NAMES`, or "backend"
    action: Action  # the kind of event
    code: str  # a short stable name of the reason, for tests and scripts ("logits_reused")
    sentence: str  # what happened, for a reader
    hint: str = ""  # the user's way out, or ""
    source: str = ""  # the user's line, as "train.py:12 in forward: loss = ...", or ""
    module: str = ""  # path of the module as in `named_modules()`, or ""
    bytes_before: sympy.Expr | None = None  # size of the dominant buffers without the change
    bytes_after: sympy.Expr | None = None  # their size with it
    # value (or size hint, for a dynamic dimension) of each symbol in the formulas
    sizes: Mapping[str, int] = field(default_factory=dict)
    sites: int = 1  # number of locations, if equal records are merged
    also: tuple[str, ...] = ()  # modules of the other merged locations

    def __hash__(self) -> int:
        return hash((self.pass_name, self.action, self.code, self.sentence, self.source))

    def says_the_same_as(self, other: Record) -> bool:
        """Return whether two records (entries of the report) agree in everything except their
        locations and their count."""
        placed = replace(other, source=self.source, module=self.module, sites=self.sites)
        return self == replace(placed, also=self.also)

    def joined(self, other: Record) -> Record:
        """Return this record (entry of the report), with the locations of an otherwise equal record
        added."""
        modules = filter(None, (*self.also, other.module, *other.also))
        return replace(self, sites=self.sites + other.sites, also=tuple(modules))

    @property
    def formula(self) -> sympy.Expr | None:
        """Return the formula of the bytes that a rewrite saves, or None if this record has no
        formula.

        If a pass declined the rewrite, these are the bytes that the rewrite would save."""
        if self.bytes_before is None:
            return None
        return self.bytes_before - (0 if self.bytes_after is None else self.bytes_after)

    @property
    def bytes_saved(self) -> int | None:
        """Return the saved bytes (`formula`) as a number, with the values in `sizes` for its
        symbols.

        Return None if a value is missing, or if there is no formula."""
        return self._value(self.formula)

    def _value(self, formula: sympy.Expr | None) -> int | None:
        if formula is None:
            return None
        known = {s: self.sizes[s.name] for s in formula.free_symbols if s.name in self.sizes}
        value = formula.subs(known)
        return int(value) if value.is_number else None

    def __str__(self) -> str:
        return self._text(1, set())

    def _text(self, times: int, quoted: set[str]) -> str:
        """Return one text for `times` equal records (entries of the report).

        `quoted` contains the user's source lines that an earlier text already quotes. For such a
        line, the text shows only the file and the line number.
        """
        label = "failed" if self.action == "internal_error" else self.action
        where = f" in {self.place}" if self.module else f" {self.place}" if self.place else ""
        why = f" ({self.code})" if self.action not in CHANGES else ""
        shown = textwrap.shorten(self.source, _TWO_LINES, placeholder=" ...")
        source = self.source.split(": ")[0] if self.source in quoted else shown
        quoted.add(self.source)
        texts = (source, self.sentence, *self._consequences(times))
        return _paragraph(label, f"{self.pass_name}{where}{why}", *texts)

    @property
    def place(self) -> str:
        """Return text that names the module that this record (entry of the report) is about.

        Examples are "lm_head" and "layers.0.mlp and 31 more", in which 31 other locations have an
        equal record. Without a module, the text is "" or, for example, "here and 3 more"."""
        more = f" and {self.sites - 1} more" if self.sites > 1 else ""
        return f"{self.module or 'here'}{more}" if self.module or more else ""

    def _consequences(self, times: int) -> list[str]:
        texts = []
        if self.formula is not None:
            texts.append(self._saving(self.formula, times))
        if self.hint:
            texts.append(f"What to do: {self.hint}")
        if self.action == "deferred" and "memeff.logits" not in self.sentence:
            texts.append(DEFERRED_SENTENCE)
        return texts

    def _saving(self, formula: sympy.Expr, times: int) -> str:
        names = {s.name for e in (self.bytes_before, self.bytes_after) if e for s in e.free_symbols}
        known = sorted(names & set(self.sizes))
        sizes = ", ".join(f"{name} = {self.sizes[name]}" for name in known)
        verb = "Saves" if self.action in CHANGES else "Would save"
        number, change, saved = "", "", self.bytes_saved
        if saved is not None:
            number = f" {format_bytes(saved)}" if saved > 0 else " nothing at these sizes"
            if saved > 0 and times > 1:
                number = f" {format_bytes(saved * times)}, {format_bytes(saved)} at each"
        before, after = self._value(self.bytes_before), self._value(self.bytes_after)
        if before is not None and after is not None:
            change = f" ({format_bytes(before)} before, {format_bytes(after)} after)"
        given = f" with {sizes}" if sizes else ""
        return f"{verb}{number}{change}: {self._difference()} bytes{given}."

    def _difference(self) -> str:
        """Return the formula of the saved bytes as text: 'bytes before - bytes after'.

        Sympy would sort the terms of the difference, so this method joins the two texts itself."""
        if not self.bytes_after:
            return str(self.bytes_before)
        after = f"({self.bytes_after})" if self.bytes_after.is_Add else str(self.bytes_after)
        return f"{self.bytes_before} - {after}"

    def _to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            is_formula = name in ("bytes_before", "bytes_after") and value is not None
            found[name] = str(value) if is_formula else value
            if name == "bytes_after":
                found["bytes_saved"] = self.bytes_saved
        return {**found, "sizes": dict(self.sizes)}

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> Record:
        given = {key: value for key, value in data.items() if key != "bytes_saved"}
        for key in ("bytes_before", "bytes_after"):
            given[key] = None if given[key] is None else _parse_formula(given[key])
        return cls(**{**given, "also": tuple(given.get("also", ()))})


def _is_unfused(record: Record) -> bool:
    """Return whether a record (an entry of the report) says that a loss was not fused."""
    is_about_loss = record.pass_name == _LOSS_PASS and record.code not in _NO_LOSS_TO_FUSE
    return is_about_loss and record.action == "declined"


def _folded(records: Iterable[Record]) -> list[tuple[Record, int]]:
    """Merge equal records (entries of the report), which usually come from several layers.

    Return each record with its count.
    """
    found: list[tuple[Record, int]] = []
    for record in records:
        for place, (earlier, times) in enumerate(found):
            if record.says_the_same_as(earlier):
                found[place] = earlier.joined(record), times + 1
                break
        else:
            found.append((record, 1))
    return found


_WITHOUT_LOGITS = {"softmax": "log_softmax + gather would not"}
"""For an op by which a loss reads logits, an alternative that does not compute them."""

_SPELLED = {"local_scalar_dense": "item()"}
"""The name of an op in user code."""


@dataclass
class LogitsUse:
    """Counts how the deferred logits (logits that are computed when first read) of one graph were
    used at run time."""

    # calls of losses outside the graph that used the fused op, by their spelling
    fused: dict[str, int] = field(default_factory=dict)
    # products that built logits (or some of their rows), by the reader that needed them
    computed: dict[str, int] = field(default_factory=dict)
    unbuilt: int = 0  # bytes of the logits that the largest of those losses read and did not build
    steps: int = 0  # calls of the graph that handed out deferred logits
    computing_steps: int = 0  # those of them whose logits were computed, or some of their rows
    # for each reason, the user's line of a read, and whether a gradient came back through that read
    readers: dict[str, tuple[str, bool]] = field(default_factory=dict)
    is_counted: bool = True  # whether the latest step is among `computing_steps`

    def count_step(self) -> None:
        """Count a call of the graph."""
        self.steps += 1
        self.is_counted = False

    def count_fused(self, spelling: str, unbuilt: int = 0) -> None:
        """Count a call of a fused loss op; keep the largest number of bytes of logits that one call
        did not build."""
        self.unbuilt = max(self.unbuilt, unbuilt)
        self.fused[spelling] = self.fused.get(spelling, 0) + 1

    def count_computed(self, reason: str, line: str = "") -> None:
        """Count a computation of logits, and record the op that read the logits.

        `reason` names this op, and `line` is the line of user code that called it. The report
        treats the op as a part of a metric such as accuracy. If `record_gradient` is called for the
        op later, the report treats the op as a part of a loss.
        """
        self.computed[reason] = self.computed.get(reason, 0) + 1
        self.computing_steps += not self.is_counted
        self.is_counted = True
        if line:
            self.readers.setdefault(reason, (line, False))

    def record_gradient(self, reason: str, line: str) -> None:
        """Record that a backward pass went through the op that `reason` names.

        The op had read the logits. So the op is a part of a loss, and this loss needs the logits.
        """
        if not self.has_gradient(reason):
            self.readers[reason] = (line, True)

    def has_gradient(self, reason: str) -> bool:
        """Return whether a backward pass went through an op that read the logits.

        `reason` names this op."""
        return reason in self.readers and self.readers[reason][1]

    @property
    def calls(self) -> int:
        """Return the number of run-time calls of fused loss ops, which do not build logits."""
        return sum(self.fused.values())

    @property
    def products(self) -> int:
        """Return the number of times that logits were computed."""
        return sum(self.computed.values())

    def copy(self) -> LogitsUse:
        """Return a copy of these counts.

        The counts say how deferred logits (logits that are computed when first read) were used."""
        return replace(
            self, fused=dict(self.fused), computed=dict(self.computed), readers=dict(self.readers)
        )

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> LogitsUse:
        readers = {reason: tuple(read) for reason, read in data.get("readers", {}).items()}
        return cls(**{**data, "readers": readers})

    def restore(self, earlier: LogitsUse) -> None:
        """Reset these counts to those of an earlier copy of this object.

        The counts say how deferred logits (logits that are computed when first read) were used."""
        vars(self).update(vars(earlier.copy()))

    def advice(self) -> str:
        """Return a sentence about the op that read the logits, or "" if no op read the logits.

        The sentence names the op, its source line, the number of steps with such reads, and an
        alternative. An op of a loss takes precedence over other ops.
        """
        losses_first = sorted(self.readers, key=lambda reason: not self.has_gradient(reason))
        for reason in losses_first:
            who, instead = "your code", "do it only in the steps that need it"
            if self.unfused_by:
                who = "your loss"
                said = "cross_entropy and log_softmax + gather would not"
                instead = _WITHOUT_LOGITS.get(self.unfused_by, said)
            times = f"in {self.computing_steps} of {self.steps} steps"
            line, _ = self.readers[reason]
            return f"{who} computed the logits by {_op(reason)} at {line} {times}; {instead}"
        return ""

    @property
    def unfused_by(self) -> str:
        """Return the name of the op with which a loss read the logits, or "" if no loss read
        them."""
        losses = [_op(reason) for reason in self.readers if self.has_gradient(reason)]
        return losses[0].partition(":")[0] if losses else ""

    @property
    def bytes_saved(self) -> int:
        """Return the largest number of bytes of logits that one call of a fused loss op saved.

        If the logits were computed anyway, for example for a metric, return 0."""
        return 0 if self.computed else self.unbuilt

    def __str__(self) -> str:
        size = f"; the logits of one are {format_bytes(self.unbuilt)}" if self.unbuilt else ""
        fused = f"losses that used the fused op: {self.calls}{_listed(self.fused)}{size}"
        built = f"products that computed logits: {self.products}{_listed(self.computed)}"
        return _paragraph("so far", "out.logits, read outside the graph", fused, built)


def _op(reason: str) -> str:
    """Return an op's name as it is written in user code: `item()` for `_local_scalar_dense`."""
    plain = reason.strip("_")
    return _SPELLED.get(plain, plain)


def _paragraph(label: str, title: str, *texts: str) -> str:
    """Return a paragraph of the report: a title line, with texts indented below it."""
    fill = partial(textwrap.wrap, width=text_width() - _INDENT, break_long_words=False)
    lines = [line for text in texts for line in fill(text)]
    return f"\n{' ' * _INDENT}".join([f"{label:<{_INDENT - 1}} {title}", *lines])


def _listed(counts: Mapping[str, int]) -> str:
    items = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return f" ({', '.join(f'{name}: {count}' for name, count in items)})" if items else ""


@dataclass
class Replays:
    """Counts of the CUDA graph recordings and replays of one compiled graph."""

    recordings: int = 0  # CUDA graphs that were recorded, one per set of addresses and sizes
    replays: int = 0  # calls that replayed one
    ran: int = 0  # calls that ran without one
    stopped: str = ""  # why recording stopped, or ""

    def __str__(self) -> str:
        text = f"{self.recordings} recorded, {self.replays} calls replayed, {self.ran} ran without"
        stopped = f"not recorded any more: {self.stopped}" if self.stopped else ""
        return _paragraph("so far", "CUDA graph", text, stopped)


@dataclass(frozen=True)
class GraphReport:
    """The report of one captured graph."""

    name: str  # Dynamo's number of the graph, such as "graph 0/0"
    training: bool  # whether the graph was compiled with gradients
    records: tuple[Record, ...]  # in the order in which the passes ran
    nodes: int  # number of nodes of the original graph
    seconds: float  # spent in memeff_compile's code
    before: str = ""  # the original graph, as text
    after: str = ""  # the graph after the passes, as text
    logits: LogitsUse | None = None  # how deferred logits were used at run time, if there are any
    replays: Replays | None = None  # how often it ran as a CUDA graph, if it can
    cause: str = ""  # why an earlier graph of the function did not serve the call, or ""

    def __str__(self) -> str:
        return self._text(set())

    @property
    def is_silent(self) -> bool:
        """Return whether the report of a graph has no entries."""
        return not (self.records or self._uses())

    def _uses(self) -> list[LogitsUse | Replays]:
        found: list[LogitsUse | Replays] = []
        if self.logits is not None and (self.logits.fused or self.logits.computed):
            found.append(self.logits)
        if self.replays is not None and self.replays != Replays():
            found.append(self.replays)
        return found

    def _text(self, quoted: set[str]) -> str:
        kind = "training" if self.training else "inference"
        nodes = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        took = f"{self.seconds:.1f} s" if self.seconds >= 1 else f"{self.seconds * 1000:.0f} ms"
        went = ""
        if not any(record.action in CHANGES for record in self.records):
            is_undone = any(record.action == "mismatch" for record in self.records)
            went = ": the original runs" if is_undone else ": it went on unchanged"
            went += "" if self.records else ", no pass found anything to do here"
        heading = f"{self.name} ({kind}, {nodes}, our passes {took}){went}"
        losses_first = sorted(self.records, key=lambda r: not (self.training and _is_unfused(r)))
        paragraphs = [record._text(times, quoted) for record, times in _folded(losses_first)]
        paragraphs += map(str, self._uses())
        text = textwrap.indent("\n\n".join(paragraphs), "  ")
        return f"{heading}\n{text}" if text else heading

    def as_it_is(self) -> GraphReport:
        """Return a copy of this report with the present counts; later calls of the graph change the
        counts only in the original.
        """
        logits = None if self.logits is None else self.logits.copy()
        replays = None if self.replays is None else replace(self.replays)
        return replace(self, logits=logits, replays=replays)

    def with_verdict(self, record: Record, *, undo: bool) -> GraphReport:
        """Return a copy of the report that also has the result of the option `memeff.verify`.

        With this option, the graph's first run compares the rewritten graph with the original. If
        `undo` is set, the original graph runs from now on, and the report counts no rewrite of this
        graph.
        """
        records = [
            replace(r, action="undone") if undo and r.action in CHANGES else r for r in self.records
        ]
        return replace(self, records=(*records, record))

    def _to_dict(self, *, include_graphs: bool) -> dict[str, Any]:
        plain = ("name", "training", "nodes", "seconds", "cause")
        data: dict[str, Any] = {
            **{name: getattr(self, name) for name in plain},
            "logits": None if self.logits is None else asdict(self.logits),
            "replays": None if self.replays is None else asdict(self.replays),
            "records": [record._to_dict() for record in self.records],
        }
        return {**data, "before": self.before, "after": self.after} if include_graphs else data

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> GraphReport:
        records = tuple(Record._from_dict(record) for record in data["records"])
        use, counts = data.get("logits"), data.get("replays")
        logits = None if use is None else LogitsUse._from_dict(use)
        replays = None if counts is None else Replays(**counts)
        return cls(**{**data, "records": records, "logits": logits, "replays": replays})


@dataclass(frozen=True)
class Report(VerbReport):
    """The reports of the graphs compiled since the last `torch._dynamo.reset()`, oldest first.

    If there were more than 64 graphs, the object has only the reports of the latest 64.

    The text shows the changes, the bytes of memory that they save, and suggestions for the user.
    `details` adds locations and reasons, and `to_json` returns all facts.

    Example:
        >>> print(Report(()))  # doctest: +ELLIPSIS
        Nothing has been compiled with backend="memeff" yet...
    """

    graphs: tuple[GraphReport, ...]
    over_limit: int = 0
    """How many functions of this process run without compilation since the last reset, because
    they had as many graphs as PyTorch's limit allows. Functions of other backends count, too."""

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the records of all graphs in one tuple: changes, declined matches and other
        entries."""
        return tuple(record for graph in self.graphs for record in graph.records)

    @property
    def bytes_saved(self) -> int:
        """Return the number of bytes that the passes save, as far as it is known.

        The number includes the bytes saved by all changes that passes made to the graphs. The
        number also includes the bytes of logits that were never built, because a loss outside of
        the graphs used the fused loss op."""
        changes = (record for record in self.records if record.action in CHANGES)
        uses = (graph.logits for graph in self.graphs if graph.logits is not None)
        return sum(r.bytes_saved or 0 for r in changes) + sum(use.bytes_saved for use in uses)

    def rewrites(self, pass_name: str | None = None) -> int:
        """Return how many changes a pass made; for the name None, return the number of changes of
        all passes.
        """
        changes = (record for record in self.records if record.action in CHANGES)
        return sum(pass_name in (None, record.pass_name) for record in changes)

    def __str__(self) -> str:
        if not self.graphs:
            return (
                'Nothing has been compiled with backend="memeff" yet, or not since the last reset. '
                '\nCompile a model with torch.compile(model, backend="memeff"), call it once, '
                "then ask again. \nOnly calls of the module itself are compiled: of a "
                "LightningModule compile the model inside it."
            )
        texts = (f"changed: {self._changed()}", f"next: {self._next()}")
        wrapped = (textwrap.wrap(text, text_width(), subsequent_indent="  ") for text in texts)
        return "\n".join([self._summary(), *(line for lines in wrapped for line in lines)])

    def details(self) -> str:
        """Return the rewrites with their locations and the declined matches with their reasons, by
        graph.

        Equal entries of several layers are merged, and so are graphs in which no pass found a
        match. `to_json` lists each entry and each graph.

        Example:
            >>> print(memeff_compile.last_report().details())  # doctest: +SKIP
        """
        if not self.graphs:
            return str(self)
        limit = [textwrap.fill(self._about_limit(), text_width())] if self.over_limit else []
        silent = [graph.name for graph in self.graphs if graph.is_silent]
        if len(silent) == len(self.graphs) == 1:
            return "\n\n".join([self._summary(), *limit, str(self.graphs[0])])
        quoted: set[str] = set()
        texts = [graph._text(quoted) for graph in self.graphs if not graph.is_silent]
        if silent:
            names = ", ".join(silent[:8]) + (f" and {len(silent) - 8} more" * (len(silent) > 8))
            went = f"{names} went on unchanged: no pass found anything to do there."
            texts.append(textwrap.fill(went, text_width()))
        causes = [f"  {graph.name}: {graph.cause}" for graph in self.graphs if graph.cause]
        if causes:
            texts.append("\n".join(["compiled again, with the cause:", *causes]))
        return "\n\n".join([self._summary(), *limit, *texts])

    def _bytes_before_and_after(self) -> tuple[int, int] | None:
        changes = [r for r in self.records if r.action in CHANGES and (r.bytes_saved or 0) > 0]
        sizes = [(r._value(r.bytes_before), r._value(r.bytes_after or None)) for r in changes]
        before = sum(size or 0 for size, _ in sizes)
        return (before, sum(size or 0 for _, size in sizes)) if before else None

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the short form of the report with bars, and the details,
        which a click expands."""
        return pre(str(self)) + self._bars() + folded(self.details())

    def _changed(self) -> str:
        """Return, for each pass, its changes, their locations and the bytes of memory that they
        save."""
        texts = []
        changes = [record for record in self.records if record.action in CHANGES]
        for name in dict.fromkeys(record.pass_name for record in changes):
            first, *others = mine = [record for record in changes if record.pass_name == name]
            joined = reduce(Record.joined, others, first)
            saved = sum(record.bytes_saved or 0 for record in mine)
            place = f" in {joined.place}" if joined.module else f" {joined.place}".rstrip()
            texts.append(f"{name}{place}" + (f" ({format_bytes(saved)})" if saved > 0 else ""))
        uses = [g.logits for g in self.graphs if g.logits is not None and g.logits.fused]
        if uses:
            saved, calls = sum(use.bytes_saved for use in uses), sum(use.calls for use in uses)
            size = f", {format_bytes(saved)} of logits never built" if saved else ""
            said = f"{calls} call{'' if calls == 1 else 's'}"
            texts.append(f"losses outside of the model ({said}{size})")
        return ", ".join(texts) or "nothing"

    def _next(self) -> str:
        """Return suggestions for the user, in this order:

        - advice on PyTorch's limit of graphs, if a function reached this limit;
        - the hint (remedy) of the most important record (entry of the report);
        - advice on code that reads deferred logits (logits that are computed when first read).

        Among the records, an error of a pass takes precedence over a loss that was not fused. Such
        a loss takes precedence over other matches that passes declined to rewrite. Among those, the
        match that would save the most memory takes precedence.
        """
        hinted = [r for r in self.records if r.hint and r.action not in (*CHANGES, "note")]
        hinted += [r for r in self.records if r.hint and r.action == "note"]
        losses = self._unfused()
        hinted.sort(
            key=lambda r: (
                r.action not in _TROUBLE,
                r not in losses,
                r.action == "note",
                -(r.bytes_saved or 0),
            )
        )
        texts = [self._about_limit()] if self.over_limit else []
        for record in hinted[:1]:
            saved, place = record.bytes_saved or 0, f" in {record.module}" if record.module else ""
            worth = f", would save {format_bytes(saved)}" if saved > 0 else ""
            why = f"{record.pass_name}{place}: {record.code}{worth}"
            texts.append(f"{record.hint.rstrip('.')} ({why})")
        advice = [said for use in self._training_uses() if (said := use.advice())]
        texts += advice
        if not advice and any(record.action == "deferred" for record in self.records):
            texts.append("read out.logits before the weights change")
        is_found = any(not graph.is_silent for graph in self.graphs)
        nothing = "nothing to do" if is_found else "nothing here is what a pass rewrites"
        more = "details() has the rest" if is_found else "details() has the graphs"
        return f"{'; '.join(texts or [nothing])}; {more}."

    def _about_limit(self) -> str:
        """Return a sentence about functions that reached PyTorch's limit of graphs per function.

        If a call of such a function needs another graph, PyTorch runs the call without compilation.
        """
        number = self.over_limit
        functions = "a function" if number == 1 else f"{number} functions"
        return (
            f"in this process, {functions} had as many graphs as "
            "torch._dynamo.config.recompile_limit allows, so calls that need another graph run "
            "without compilation and without changes of memeff: compile with "
            "memeff_compile.compile(model), which allows 64 graphs, or increase the limit"
        )

    def _training_uses(self) -> list[LogitsUse]:
        return [g.logits for g in self.graphs if g.training and g.logits is not None]

    def _unfused(self) -> list[Record]:
        """Return the records (entries of the report) of losses in training graphs that were not
        fused."""
        return [
            r for graph in self.graphs if graph.training for r in graph.records if _is_unfused(r)
        ]

    def _summary(self) -> str:
        count, changes = len(self.graphs), self.rewrites()
        declined = sum(record.action == "declined" for record in self.records)
        parts = [
            self._about_loss(),
            f"{count} graph{'' if count == 1 else 's'}",
            f"{changes or 'no'} change{'' if changes == 1 else 's'}",
            f"{declined} declined" if declined else "",
            f"{format_bytes(self.bytes_saved)} never allocated" if self.bytes_saved > 0 else "",
        ]
        return f"memeff_compile: {', '.join(filter(None, parts))}"

    def _about_loss(self) -> str:
        """Return a line that says whether the loss of training graphs was fused, and if not,
        why."""
        uses = self._training_uses()
        is_fused = bool(self.rewrites(_LOSS_PASS)) or any(use.fused for use in uses)
        codes = [record.code for record in self._unfused()]
        codes = list(dict.fromkeys([*codes, *filter(None, (use.unfused_by for use in uses))]))
        if codes:
            more = f" and {len(codes) - 1} more" if len(codes) > 1 else ""
            return f"{'a' if is_fused else 'the'} loss is not fused ({codes[0]}{more})"
        if is_fused:
            return "the loss is fused"
        is_to_come = any(record.action == "deferred" for record in self.records)
        is_trained = any(graph.training for graph in self.graphs)
        return "no loss was fused" if is_trained and not is_to_come else ""

    def to_json(self, *, include_graphs: bool = True, indent: int | None = None) -> str:
        """Return the report as JSON with formulas as strings; the texts of graphs can be left
        out."""
        graphs = [graph._to_dict(include_graphs=include_graphs) for graph in self.graphs]
        told = {"bytes_saved": self.bytes_saved, "over_limit": self.over_limit, "graphs": graphs}
        return json.dumps(told, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Create a report from the output of `to_json`; the symbols in its formulas stand for
        positive integers.
        """
        data = json.loads(text)
        graphs = tuple(GraphReport._from_dict(graph) for graph in data["graphs"])
        return cls(graphs, data.get("over_limit", 0))


_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}


def _parse_formula(text: str) -> sympy.Expr:
    """Parse the text of a formula for bytes, without `sympy.sympify`.

    `sympy.sympify` would evaluate code in the text. It would also read a size that is named N as
    sympy's function N.
    """
    import sympy

    functions = {name: getattr(sympy, name) for name in ("Min", "Max", "ceiling", "floor")}

    def build(node: ast.AST) -> Any:  # noqa: ANN401 - any sympy object
        match node:
            case ast.Expression(body=body):
                return build(body)
            case ast.Constant(value=int() | float() as value):
                return sympy.sympify(value)
            case ast.Name(id=name):
                return sympy.Symbol(name, integer=True, positive=True)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -build(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](build(left), build(right))
            case ast.Call(func=ast.Name(id=name), args=args) if name in functions:
                return functions[name](*map(build, args))
        raise ValueError(f"{text!r} is not a byte formula: it contains {ast.unparse(node)!r}")

    formula: sympy.Expr = build(ast.parse(text, mode="eval"))
    return formula


_lock = threading.Lock()
_graphs: deque[GraphReport] = deque(maxlen=MAX_GRAPHS)
_over_limit_before = 0  # functions over the limit of graphs at the last reset


def record_graph(report: GraphReport) -> None:
    """Store the report of a graph that was just compiled; only the newest 64 reports are kept."""
    with _lock:
        _graphs.append(report)


def amend(old: GraphReport, new: GraphReport) -> None:
    """Replace the report `old` by `new`, if `old` is still stored."""
    with _lock:
        for place, report in enumerate(_graphs):
            if report is old:
                _graphs[place] = new


def clear() -> None:
    """Delete every report; `torch._dynamo.reset()` makes the backend call this function."""
    from memeff_compile import compat

    global _over_limit_before
    with _lock:
        _graphs.clear()
        _over_limit_before = compat.functions_over_limit()


def graphs() -> Sequence[GraphReport]:
    """Return the reports of the graphs compiled since the last `torch._dynamo.reset()`.

    The oldest report comes first. If there were more than 64 graphs, return only the reports of the
    latest 64.

    Each report contains the text of the graph before and after the passes. This text is the same on
    every supported torch version, so a user's test can compare it with a stored text.

    Example:
        >>> print(memeff_compile.graphs()[-1].after)  # doctest: +SKIP
    """
    with _lock:
        return tuple(graph.as_it_is() for graph in _graphs)


def last_report() -> Report:
    """Return a single report about the graphs compiled since the last `torch._dynamo.reset()`.

    If there were more than 64 graphs, the report contains only the latest 64.

    Example:
        >>> print(memeff_compile.last_report())  # doctest: +SKIP
    """
    from memeff_compile import compat

    found = graphs()
    over_limit = compat.functions_over_limit() - _over_limit_before if found else 0
    return Report(tuple(found), max(over_limit, 0))
