"""Runs the passes over a captured graph, in order: match, check, rewrite, verify, record.

A match is rewritten whole or not at all. An edit that would change what a consumer sees is rolled
back; an error of our own restores the graph as it came and is reported, and compilation goes on.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ... import compat
from ...errors import StrictError
from ...logits.recipe import DeferredOutput
from ...options import MAY_FIND_NOTHING, Options
from ...report import GraphReport, LogitsUse, Record, Report
from .. import defer_logits
from .base import Decline, Done, Gain, GraphPass
from .editor import Editor, EditRefused
from .graph_info import GraphInfo, ambient_region, clean_module_path
from .render import render

log = logging.getLogger(__name__)

TRACE_NAME = "memeff_report"
"""The name of a graph's report among the artifacts that TORCH_TRACE and tlparse show."""


@dataclass
class Outcome:
    """What the passes did to one graph."""

    report: GraphReport
    changed: bool = False
    deferred: list[DeferredOutput] = field(default_factory=list)
    inductor: dict[str, Any] = field(default_factory=dict)


def run(gm: GraphModule, passes: Sequence[GraphPass], options: Options) -> Outcome:
    """Run ``passes`` over ``gm``, editing it in place where they match.

    Raises:
        StrictError: A pass named in ``memeff.strict`` did not fire on this graph.
    """
    started = time.perf_counter()
    nodes = len(gm.graph.nodes)
    before = _guarded_render(gm)
    state = _Run(options)
    snapshot: list[tuple[GraphModule, Graph]] = []
    info = GraphInfo(gm, options, ambient_region())
    training = info.needs_grad
    try:
        for graph_pass in passes:
            for level in _levels(info):
                state.apply(graph_pass, level, snapshot)
    except Exception as error:  # our own fault must never cost the user a run
        log.warning("memeff_compile: internal error, graph left as it was", exc_info=True)
        for module, graph in snapshot:
            module.graph = graph
        state.fail(error)
    state.note_unused_skips(gm)
    if state.changed:
        for module, _ in snapshot:
            module.recompile()
    seconds = time.perf_counter() - started
    compile_id = compat.compile_id()
    report = GraphReport(
        name=f"graph {compile_id}" if compile_id else "graph",
        training=training,
        records=tuple(state.records),
        nodes=nodes,
        seconds=seconds,
        before=before,
        after=_guarded_render(gm) if state.changed else before,
        logits=LogitsUse() if state.deferred else None,
    )
    _log(report)
    compat.trace_artifact(TRACE_NAME, lambda: Report((report,)).to_json(indent=2))
    _enforce_strict(options, report)
    return Outcome(report, state.changed, state.deferred, state.inductor)


def _levels(info: GraphInfo) -> Iterator[GraphInfo]:
    yield info
    for body in info.bodies():
        yield from _levels(body)


class _Run:
    """The records and results of one run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.records: list[Record] = []
        self.deferred: list[DeferredOutput] = []
        self.inductor: dict[str, Any] = {}
        self.changed = False

    def fail(self, error: Exception) -> None:
        """Forget what was done: the graph has been restored."""
        self.deferred, self.inductor, self.changed = [], {}, False
        self.records = [r for r in self.records if r.action == "declined"]
        self.records.append(
            Record(
                "backend",
                "internal_error",
                "internal_error",
                f"an internal error left the graph as it was: {type(error).__name__}: {error}",
                "please report it with the graph from memeff_compile.graphs()[-1].before",
            )
        )

    def note_unused_skips(self, gm: GraphModule) -> None:
        """Say so when a path in ``memeff.skip`` names no module of this graph: it may be a typo."""
        patterns = {p for paths in self.options.skip.values() for p in paths}
        if not patterns:
            return
        paths = {clean_module_path(path) for node in gm.graph.nodes for path in _module_stack(node)}
        paths.add("")
        for pattern in sorted(patterns):
            if not any(Options(skip={"*": (pattern,)}).skips("*", path) for path in paths):
                self.records.append(
                    Record(
                        "backend",
                        "note",
                        "skip_unmatched",
                        f"memeff.skip names {pattern!r}, and no module of this graph has "
                        f"such a path.",
                        "Compare it with the names in model.named_modules().",
                    )
                )

    def apply(
        self,
        graph_pass: GraphPass,
        info: GraphInfo,
        snapshot: list[tuple[GraphModule, Graph]],
    ) -> None:
        """Let one pass work on one level of the graph."""
        if not graph_pass.enabled(info):
            return
        for found in list(graph_pass.find(info)):
            if isinstance(found, Decline):
                self._decline(graph_pass, info, found, None)
                continue
            anchor = graph_pass.anchor(found)
            refusal = self._skipped(graph_pass, info, found) or graph_pass.check(info, found)
            gain = (
                graph_pass.gain(info, found)
                if refusal is None or refusal.code != "skipped"
                else None
            )
            if refusal is not None:
                self._decline(graph_pass, info, refusal, gain, anchor, graph_pass.places(found))
                continue
            level: GraphInfo | None = info
            while level is not None:  # an edit of a checkpoint's body may give it more arguments
                if not any(module is level.gm for module, _ in snapshot):
                    snapshot.append((level.gm, copy_graph(level.gm)))
                level = level.parent
            self._rewrite(graph_pass, info, found, gain)

    def _skipped(self, graph_pass: GraphPass, info: GraphInfo, found: Any) -> Decline | None:
        for node in graph_pass.places(found):
            path = graph_pass.skipped(info, node)
            if path:
                return Decline(
                    "skipped", f"memeff.skip names {path}", node=graph_pass.anchor(found)
                )
        return None

    def _rewrite(
        self, graph_pass: GraphPass, info: GraphInfo, found: Any, gain: Gain | None
    ) -> None:
        anchor = graph_pass.anchor(found)
        where = _place(info, anchor, graph_pass.places(found))
        editor = Editor(info)
        try:
            done = graph_pass.rewrite(info, found, editor)
            editor.commit(graph_pass.dead(found))
        except EditRefused as refused:
            editor.rollback()
            self._decline(
                graph_pass,
                info,
                Decline("edit_refused", f"the edit was undone: {refused}"),
                gain,
                anchor,
            )
            return
        self.changed = True
        self.deferred.extend(done.deferred)
        self.inductor |= done.inductor
        self._record_done(graph_pass, done, where, gain)

    def _record_done(
        self, graph_pass: GraphPass, done: Done, where: tuple[str, str], gain: Gain | None
    ) -> None:
        source, module = where
        self._append(
            Record(
                graph_pass.name,
                done.action,
                done.code,
                _sentence(done.sentence),
                source=source,
                module=module,
                bytes_before=gain.before if gain else None,
                bytes_after=gain.after if gain else None,
                sizes=gain.sizes if gain else {},
                sites=max(done.sites, 1),
            ),
            is_counted=done.sites > 0,
        )
        for action, code, sentence in done.notes:
            self.records.append(
                Record(
                    defer_logits.NAME,
                    action,
                    code,
                    _sentence(sentence),
                    source=source,
                    module=module,
                )
            )

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
        source, module = _place(info, node, nearby) if node is not None else ("", "")
        self._append(
            Record(
                graph_pass.name,
                "declined",
                decline.code,
                _sentence(decline.sentence),
                _sentence(decline.hint),
                source,
                module,
                gain.before if gain else None,
                gain.after if gain else None,
                gain.sizes if gain else {},
                max(decline.sites, 1),
            ),
            is_counted=decline.sites > 0,
        )

    def _append(self, record: Record, *, is_counted: bool) -> None:
        """Add a record, or count its sites into one that says the same (of another layer)."""
        for place, earlier in enumerate(self.records if is_counted else ()):
            if record.says_the_same_as(earlier):
                total = earlier.sites + record.sites
                self.records[place] = dataclasses.replace(earlier, sites=total)
                return
        self.records.append(record)


def _place(info: GraphInfo, node: Node, nearby: Iterable[Node] = ()) -> tuple[str, str]:
    """Return the user's line of ``node``, and its module path or that of the nodes around it."""
    paths = (info.module_path(n) for n in (node, *nearby))
    return info.source_line(node), next(filter(None, paths), "")


def _sentence(text: str) -> str:
    """Write ``text`` as a sentence: a capital at the front, a full stop at the end."""
    if not text:
        return text
    is_word = text.split(" ")[0].rstrip(",:;").isalpha() and not text.startswith(_NAMES)
    head = text[0].upper() if is_word else text[0]
    return head + text[1:] + ("" if text[-1] in ".!?" else ".")


_NAMES = ("memeff", "torch", "linear ", "matmul ", "mm ", "addmm ", "einsum ")


def _module_stack(node: Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    return [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]


def copy_graph(gm: GraphModule) -> Graph:
    """Return a copy of ``gm``'s graph that can take its place again."""
    copied = Graph()
    copied.set_codegen(copy.deepcopy(gm.graph._codegen))
    mapping: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        mapping[node] = copied.node_copy(node, lambda n: mapping[n])
        if hasattr(node, "_dynamo_source"):  # AOTAutograd asks every placeholder for it
            mapping[node]._dynamo_source = node._dynamo_source
    return copied


def _guarded_render(gm: GraphModule) -> str:
    try:
        return render(gm)
    except Exception as error:
        log.debug("memeff_compile: could not render a graph", exc_info=True)
        return f"(this graph could not be rendered: {type(error).__name__}: {error})"


def _log(report: GraphReport) -> None:
    fired = [r for r in report.records if r.action in ("rewrote", "deferred", "dropped")]
    log.info(
        "%s: %d nodes, changes: %d, declined: %d, %.1f ms",
        report.name,
        report.nodes,
        len(fired),
        sum(r.action == "declined" for r in report.records),
        report.seconds * 1e3,
    )
    for record in report.records:
        log.debug("%s", record)
    if log.isEnabledFor(logging.DEBUG) and fired:
        log.debug("before:\n%s\nafter:\n%s", report.before, report.after)


def _enforce_strict(options: Options, report: GraphReport) -> None:
    """Raise when a pass the user insists on declined a place, or found none in a training graph."""
    for name in options.strict:
        fired = any(
            r.pass_name == name and r.action in ("rewrote", "deferred", "dropped")
            for r in report.records
        )
        declined = [r for r in report.records if r.action == "declined" and r.pass_name == name]
        expected = report.training and name not in MAY_FIND_NOTHING
        if declined or (expected and not fired):
            reasons = "\n".join(f"  - {r.code}: {r.sentence} {r.source}" for r in declined)
            raise StrictError(
                f"memeff.strict names {name}, which did not rewrite everything it found "
                f"in {report.name}:\n"
                + (reasons or "  - nothing in this training graph looks like what it rewrites")
                + "\nRemove the name from memeff.strict to compile anyway, or change the "
                "code as hinted "
                "in memeff_compile.last_report()."
            )
