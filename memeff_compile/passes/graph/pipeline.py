"""Run the passes over a captured graph; each pass finds, checks, rewrites, verifies and records its
matches.

A pass rewrites a match completely or not at all. If an edit would change a property (such as the
dtype) of a value, all edits of the match are undone. If the edits remained, nodes outside of the
match, or the code that calls the graph, could see the changed property. If a built-in pass raises
an error, only the current match is undone and reported; the other matches are rewritten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch.fx import Graph, GraphModule, Node

from ... import compat
from ...errors import MemeffError, StrictError
from ...logits.recipe import DeferredOutput
from ...options import MAY_FIND_NOTHING, PASS_NAMES, SWITCHES, Options
from ...report import CHANGES, GraphReport, LogitsUse, Record, Report
from .base import NOTED, Decline, Done, Gain, GraphPass
from .editor import Editor, EditRefused
from .graph_info import GraphInfo, ambient_region
from .module_names import module_stack
from .render import render

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_MOST_FAILURES = 32  # how many failing candidates one search may leave out

# The name of a graph's report among the artifacts that TORCH_TRACE and tlparse show.
TRACE_NAME = "memeff_report"


@dataclass
class Outcome:
    """The result of running the passes on one graph."""

    report: GraphReport
    changed: bool = False
    deferred: list[DeferredOutput] = field(default_factory=list)
    inductor: dict[str, Any] = field(default_factory=dict)


def run(gm: GraphModule, passes: Sequence[GraphPass], options: Options) -> Outcome:
    """Run `passes` over `gm`; the passes edit the graph in place."""
    started = time.perf_counter()
    nodes = len(gm.graph.nodes)
    before = _guarded_render(gm)
    state = _Run(options)
    info = GraphInfo(gm, options, ambient_region())
    training = info.needs_grad
    try:
        for graph_pass in passes:
            for level in info.inward():
                state.apply(graph_pass, level)
        edited = [module for module, _ in state.snapshot]
        for module in [gm, *edited] if options.passes else edited:
            # this is the only check that detects a user-defined pass that edits without the editor
            module.graph.lint()
        state.note_unused_skips(info)
    except MemeffError:
        raise  # other processes would wait for the node that this process did not insert
    except Exception as error:  # not the fault of a match: an undo failed
        state.give_up(error)
    if state.changed:
        for module, _ in state.snapshot:
            module.recompile()
    after = _guarded_render(gm) if state.changed else before
    seconds = time.perf_counter() - started
    compile_id = compat.compile_id()
    report = GraphReport(
        name=f"graph {compile_id}" if compile_id else "graph",
        training=training,
        records=tuple(state.records),
        nodes=nodes,
        seconds=seconds,
        before=before,
        after=after,
        logits=LogitsUse() if state.deferred else None,
    )
    _log(report)
    compat.trace_artifact(TRACE_NAME, lambda: Report((report,)).to_json(indent=2))
    return Outcome(report, state.changed, state.deferred, state.inductor)


class _Run:
    """One run of the passes on a graph: the compilation report's records (entries), and the changes
    that the backend makes after the run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.records: list[Record] = []
        self.deferred: list[DeferredOutput] = []
        self.inductor: dict[str, Any] = {}
        self.changed = False
        self.snapshot: list[tuple[GraphModule, Graph]] = []

    def give_up(self, error: Exception) -> None:
        """Give up the passes on this graph after an error: restore the original graph.

        Of the compilation report's records (entries), keep those of declined matches and of errors,
        and add one for this error.
        """
        for module, graph in self.snapshot:
            module.graph = graph
        self.deferred, self.inductor, self.changed = [], {}, False
        self.records = [r for r in self.records if r.action in ("declined", "internal_error")]
        self._append(_internal_error("backend", error, "the graph"), is_counted=False)

    def note_unused_skips(self, info: GraphInfo) -> None:
        """Report each path in `memeff.skip` that names no module of the model, because it may be
        a typing error."""
        patterns = {p for paths in self.options.skip.values() for p in paths}
        if not patterns:
            return
        stacks = {each for node in info.gm.graph.nodes for each in module_stack(node)}
        paths = {"", *(name for each in stacks for name in info.names.of(*each))}
        paths |= info.names.everything()
        for each in sorted(patterns):
            hint = f"Compare {each!r} of memeff.skip with the names in model.named_modules()."
            if not any(Options(skip={"*": (each,)}).skips("*", path) for path in paths):
                said = f"memeff.skip names {each!r}, but no module of this graph has such a path."
                self.records.append(Record("backend", "note", "skip_unmatched", said, hint))

    def apply(self, graph_pass: GraphPass, info: GraphInfo) -> None:
        """Run one pass on one graph, without its nested graphs.

        If the pass raises an error for a match, only this match is skipped.
        """
        for found in self._found(graph_pass, info):
            self._try(graph_pass, info, found)
        if info.parent is None:
            self.records += _said((), lambda: _notes(graph_pass, info))

    def _found(self, graph_pass: GraphPass, info: GraphInfo) -> list[Any]:
        """Return the matches of a pass; if the pass's search raises an error at a node, repeat the
        search without that node."""
        info.left_out.clear()
        while True:
            found: list[Any] = []
            info.candidate = None
            try:
                if graph_pass.enabled(info):
                    for answer in graph_pass.find(info):
                        found.append(answer)
                return found
            except Exception as error:
                node = info.candidate
                if node is None or len(info.left_out) == _MOST_FAILURES:
                    what = "all that this pass had not found yet"
                    self._append(_internal_error(graph_pass.name, error, what), is_counted=False)
                    return found
                info.left_out.add(node)
                record = _internal_error(graph_pass.name, error, "this place", _where(info, node))
                self._append(record, is_counted=True)

    def _try(self, graph_pass: GraphPass, info: GraphInfo, found: Any) -> bool:
        """Rewrite a match; if this fails, rewrite the smaller matches that the match combines, one
        by one. Return whether the whole match was rewritten.
        """
        editor = Editor(info)
        try:
            self._serve(graph_pass, info, found, editor)
            return True
        except Exception as error:
            editor.rollback()
            is_match = not isinstance(found, Decline)
            if is_match and _said(False, lambda: graph_pass.joins_ranks(info, found)):
                option, off = SWITCHES.get(graph_pass.name, ("memeff.passes", ()))
                raise MemeffError(
                    f"{graph_pass.name} failed on this process while it rewrote a tensor that is "
                    f"split over several: {type(error).__name__}: {error}. If this process went on "
                    "without the rewrite, the others would wait for it. Please report this; with "
                    f"options={{{option!r}: {off!r}}} no process rewrites."
                ) from error
            parts: Sequence[Any] = _said((), lambda: graph_pass.parts(found) if is_match else ())
            went_well = [self._try(graph_pass, info, p) for p in (parts if len(parts) > 1 else ())]
            if all(went_well):
                place = _said(
                    ("", ""),
                    lambda: _where(info, graph_pass.anchor(found), graph_pass.places(found)),
                )
                record = _internal_error(graph_pass.name, error, "this place", place)
                self._append(record, is_counted=True)
            return False

    def _serve(self, graph_pass: GraphPass, info: GraphInfo, found: Any, editor: Editor) -> None:
        """Check one match and rewrite it, or record the reason why the match is not rewritten."""
        if isinstance(found, Decline):
            self._decline(graph_pass, info, found, None)
            return
        anchor, places = graph_pass.anchor(found), list(graph_pass.places(found))
        path = next(filter(None, (graph_pass.skipped(info, node) for node in places)), "")
        skipped = Decline("skipped", f"memeff.skip names {path}", node=anchor) if path else None
        refusal = skipped or graph_pass.check(info, found)
        if refusal is not None:
            # A pass may decline more matches than it can count.
            gain = None if skipped else _said(None, lambda: graph_pass.gain(info, found))
            self._decline(graph_pass, info, refusal, gain, anchor, places)
            return
        gain = graph_pass.gain(info, found)
        self._keep(info)
        where = _where(info, anchor, places)
        try:
            done = graph_pass.rewrite(info, found, editor)
            record, notes = _records(graph_pass, done, where, gain)
            record = _with_all_places(record, info, places)
            editor.commit(graph_pass.dead(found))
        except EditRefused as refused:
            editor.rollback()
            undone = Decline("edit_refused", f"the edit was undone: {refused}")
            self._decline(graph_pass, info, undone, gain, anchor)
            return
        self.changed = True
        self.deferred.extend(done.deferred)
        self.inductor |= done.inductor
        self._append(record, is_counted=done.sites > 0)
        self.records.extend(notes)

    def _keep(self, info: GraphInfo) -> None:
        """Copy the original graphs, once, before the first edit, so that they can be restored."""
        for level in info.outward():  # an edit of a checkpoint's body may give it more arguments
            if not any(module is level.gm for module, _ in self.snapshot):
                self.snapshot.append((level.gm, compat.copy_graph(level.gm)))

    def _decline(
        self,
        graph_pass: GraphPass,
        info: GraphInfo,
        decline: Decline,
        gain: Gain | None,
        anchor: Node | None = None,
        nearby: Iterable[Node] = (),
    ) -> None:
        node = decline.node or anchor
        where = _where(info, node, nearby) if node is not None else ("", "")
        said = decline.code, _sentence(decline.sentence), _sentence(decline.hint)
        sites = max(decline.sites, 1)
        record = Record(graph_pass.name, decline.action, *said, *where, *_bytes(gain), sites)
        self._append(_with_all_places(record, info, nearby), is_counted=decline.sites > 0)

    def _append(self, record: Record, *, is_counted: bool) -> None:
        """Add a record of a rewrite, declined match or error to the compilation report.

        If `is_counted` is set and an earlier record differs only in location (such as the layer)
        and count, merge the two records.
        """
        for place, earlier in enumerate(self.records if is_counted else ()):
            if record.says_the_same_as(earlier):
                self.records[place] = earlier.joined(record)
                return
        self.records.append(record)


def _with_all_places(record: Record, info: GraphInfo, places: Iterable[Node]) -> Record:
    """Return the record of a match, extended by the names of the modules that contain its nodes."""
    paths = dict.fromkeys(filter(None, map(info.module_path, places if record.sites > 1 else ())))
    return replace(record, also=tuple(path for path in paths if path != record.module))


def _said(otherwise: _T, answer: Callable[[], _T]) -> _T:
    """Call a method of a pass that returns text for the compilation report; if the method raises an
    error, return a default."""
    try:
        return answer()
    except Exception:
        log.debug("memeff_compile: a pass failed at an answer for the report", exc_info=True)
        return otherwise


def _bytes(gain: Gain | None) -> tuple[Any, Any, Mapping[str, int]]:
    return (gain.before, gain.after, gain.sizes) if gain else (None, None, {})


def _notes(graph_pass: GraphPass, info: GraphInfo) -> Sequence[Record]:
    """Return the compilation report's records (entries) of a pass's notes on a whole graph.

    The records of rewrites, and of matches that the pass declined, are not included.
    """
    said = graph_pass.notes(info) if graph_pass.enabled(info) else ()
    return [Record(graph_pass.name, "note", code, _sentence(text)) for code, text in said]


def _records(
    graph_pass: GraphPass, done: Done, where: tuple[str, str], gain: Gain | None
) -> tuple[Record, list[Record]]:
    """Return the compilation report's records (entries) of a rewrite.

    The first record is for the rewrite itself. The others are for the pass's notes on the rewrite,
    for example that logits are deferred."""
    said, sites = (done.action, done.code, _sentence(done.sentence)), max(done.sites, 1)
    notes = [
        Record(NOTED, action, code, _sentence(sentence), "", *where)
        for action, code, sentence in done.notes
    ]
    return Record(graph_pass.name, *said, "", *where, *_bytes(gain), sites), notes


def _internal_error(
    name: str, error: Exception, what: str, where: tuple[str, str] = ("", "")
) -> Record:
    """Log an error that a pass raised, and return the compilation report's record of the error."""
    text = "memeff_compile: internal error in %s, left as it was: %s"
    log.warning(text, name, what, exc_info=True)
    hint = "please report it with the graph from memeff_compile.graphs()[-1].before"
    if name not in (*PASS_NAMES, "backend"):
        hint = "fix the pass, which is not built in; the log of memeff_compile has the traceback"
    said = _sentence(f"an internal error left {what} as it was: {type(error).__name__}: {error}")
    return Record(name, "internal_error", "internal_error", said, hint, *where)


def _where(info: GraphInfo, node: Node, nearby: Iterable[Node] = ()) -> tuple[str, str]:
    """Return the line of user code that made `node`, and the module path of `node`.

    If `node` has no path, return the path of one of the nodes `nearby`. For a loss in a wrapped
    model (such as PEFT's), return the path of the output projection.
    """
    paths = [info.module_path(n) for n in (node, *nearby)]
    within = (path for path in paths[1:2] if path.startswith(f"{paths[0]}."))
    return info.source_line(node), next(within, next(filter(None, paths), ""))


def _sentence(text: str) -> str:
    """Return `text` as a sentence, with a capital letter and a full stop."""
    if not text:
        return text
    first = text.split(" ")[0].rstrip(",:;")
    is_word = first.isalpha() and (len(first) > 1 or first == "a") and not text.startswith(_NAMES)
    head = text[0].upper() if is_word else text[0]
    return head + text[1:] + ("" if text[-1] in ".!?" else ".")


_NAMES = ("memeff", "torch", "linear ", "matmul ", "mm ", "addmm ", "einsum ")


def _guarded_render(gm: GraphModule) -> str:
    try:
        return render(gm)
    except Exception as error:
        log.debug("memeff_compile: could not render a graph", exc_info=True)
        return f"(this graph could not be rendered: {type(error).__name__}: {error})"


def _log(report: GraphReport) -> None:
    fired = [r for r in report.records if r.action in CHANGES]
    declined = sum(r.action == "declined" for r in report.records)
    counted = report.name, report.nodes, len(fired), declined, report.seconds * 1e3
    log.info("%s: %d nodes, changes: %d, declined: %d, %.1f ms", *counted)
    for record in report.records:
        log.debug("%s", record)
    if log.isEnabledFor(logging.DEBUG) and fired:
        log.debug("before:\n%s\nafter:\n%s", report.before, report.after)


def enforce_strict(options: Options, report: GraphReport) -> None:
    """Raise a StrictError if a pass that `memeff.strict` names declined a match or had an error.

    A declined match is a part of the graph that looks like the pass's pattern but is not rewritten.
    In a training graph, also raise the error if the pass made no change. Passes in
    `MAY_FIND_NOTHING` may leave a training graph unchanged.
    """
    for name in options.strict:
        mine = [r for r in report.records if r.pass_name in (name, "backend")]
        fired = any(r.action in CHANGES for r in mine)
        left = [r for r in mine if r.action in ("declined", "internal_error")]
        expected = report.training and name not in MAY_FIND_NOTHING
        if left or (expected and not fired):
            reasons = "\n".join(f"  - {r.code}: {r.sentence} {r.source}" for r in left)
            reasons = reasons or (
                "  - this training graph has no place that looks like its pattern; a loss that "
                "your code computes from out.logits, outside the graph, is not seen here"
            )
            raise StrictError(
                f"memeff.strict names {name}, which did not rewrite everything it found in "
                f"{report.name}:\n{reasons}\nRemove the name from memeff.strict to compile anyway, "
                "or change the code as hinted in memeff_compile.last_report()."
            )
