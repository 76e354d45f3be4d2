"""In the first call of every rewritten graph, also run the original graph, and compare the results
of the two graphs (`memeff.verify`).

`comparison` runs both graphs and measures the differences; `tolerance` defines how large the
differences may be. If a difference is too large, the original graph runs op by op in this call and
in all later calls. The user then gets a warning, a report and a reproducer that show the
difference.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from .. import compat, report
from ..errors import VerifyError
from ..logits.attach import accept
from ..logits.recipe import DeferredOutput
from ..options import PASS_NAMES, SWITCHES, Options
from ..report import GraphReport, LogitsUse, Record
from .comparison import Comparison, NotRunError, PostponedError, Verdict, run_plainly
from .op_by_op import KeptGraph
from .reproducer import write

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]

_ATTEMPTS = 3

# Name of each `memeff.inner` compiler, and the value that runs without it.
_COMPILERS = {"inductor": ("Inductor", "aot_eager"), "aot_eager": ("AOTAutograd", "eager")}


def verified(
    compiled: Compiled,  # the rewritten graph, compiled, with deferred outputs attached
    *,
    original: KeptGraph,  # the original graph
    rewritten: KeptGraph,  # the graph after the passes
    plan: Sequence[DeferredOutput],  # the outputs of `rewritten` that carry hidden states
    pieces: Sequence[int],  # inputs that come out of another compiled callable
    options: Options,  # tolerance, where reproducers go, and whether a mismatch raises
    graph_report: GraphReport,  # this graph's report; the verdict is added to it
    reuses_memory: bool,  # `compiled` keeps pointers to its inputs, as CUDA graphs do
) -> Compiled:
    """Return a callable that compares the original and the rewritten graph in its first call.

    Each call returns the results of the rewritten graph, or, after a mismatch, those of the
    original graph. With `memeff.verify` = "raise", the call that finds a mismatch raises
    VerifyError."""
    compared = Comparison(compiled, original, rewritten, tuple(plan), options, reuses_memory)
    plain: Compiled = partial(run_plainly, original)
    plain = accept(plain, pieces) if pieces else plain
    verifier = _Verifier(compared, plain, options, graph_report)

    def run(*args: object) -> Any:
        return verifier.callable_for(args)(*args)

    return run


class _Verifier:
    """The state of a verification.

    The object compares the original and the rewritten graph once, and stores which of these graphs
    later calls use.
    """

    def __init__(
        self, comparison: Comparison, plain: Compiled, options: Options, graph_report: GraphReport
    ) -> None:
        self.comparison: Comparison | None = comparison
        self.compiled, self.plain = comparison.compiled, plain
        self.options, self.graph_report = options, graph_report
        self.chosen: Compiled | None = None
        self.lock = threading.Lock()
        self.attempts = 0

    def callable_for(self, args: Sequence[Any]) -> Compiled:
        """Return the callable that runs the current call; if this is the first call, compare the
        rewritten graph with the original graph first.
        """
        if self.chosen is not None:
            return self.chosen
        with self.lock:
            if self.chosen is None and not _is_rehearsal(args):
                self._settle(args)
        return self.chosen or self.compiled

    def _settle(self, args: Sequence[Any]) -> None:
        comparison = cast("Comparison", self.comparison)
        try:
            with _uncounted(self.graph_report.logits):
                verdict = comparison.make(args)
        except PostponedError as error:
            self.attempts += 1
            if self.attempts == _ATTEMPTS:
                self._leave(str(error))
        except NotRunError as error:
            self._leave(str(error))
        else:
            self._judge(comparison, verdict, args)

    def _leave(self, reason: str) -> None:
        """Keep the rewritten graph, and report that it was not compared with the original graph."""
        sentence = f"The rewritten graph runs and was not compared with the original: {reason}."
        hint = "Verify with a smaller batch or model." if "memory" in reason else ""
        self._record(Record("backend", "unverified", "verify_not_run", sentence, hint))
        log.warning("memeff.verify: %s was not compared: %s", self.graph_report.name, reason)
        self._settled(self.compiled)

    def _judge(self, comparison: Comparison, verdict: Verdict, args: Sequence[Any]) -> None:
        if not verdict.mismatches:
            sentence = verdict.agreement()
            self._record(Record("backend", "verified", "verify_passed", sentence))
            log.info("memeff.verify: %s: %s", self.graph_report.name, sentence)
            self._settled(self.compiled)
            return
        changes = [r for r in self.graph_report.records if r.action in report.CHANGES]
        done = [f"{r.pass_name}{f' in {r.module}' if r.module else ''}" for r in changes]
        rewrites, names = ", ".join(done) or "none", {r.pass_name for r in changes}
        switches: dict[str, object] = dict(SWITCHES[name] for name in PASS_NAMES if name in names)
        if names - set(PASS_NAMES):
            switches["memeff.passes"] = []
        where = write(comparison, verdict.mismatches, self.graph_report.name, args)
        code, who = "verify_failed", "The rewritten graph does not compute what the original does"
        until = f"Until then options={switches} has the original graph compiled. {where}"
        hint = f"{_to_whom(names)} {until}"
        if verdict.is_of_the_compiler and self.options.inner in _COMPILERS:
            code, (inner, simpler) = "compiler_failed", _COMPILERS[self.options.inner]
            who = (
                f"{inner} of torch {torch.__version__} does not compute what the graph says, which "
                "agrees with the original where it runs op by op, so that no rewrite is to blame"
            )
            hint = (
                "Please report it to PyTorch; see whether plain torch.compile is as far off. Until "
                f"then options={{'memeff.inner': '{simpler}'}} does without "
                f"that compiler. {where}"
            )
        sentence = (
            f"{who}: {verdict.difference()} "
            f"Rewrites in this graph: {rewrites}. From now on the original graph runs, op by op."
        )
        self._record(Record("backend", "mismatch", code, sentence, hint), undo=True)
        text = f"memeff.verify: {self.graph_report.name}: {sentence} {hint}"
        self._settled(self.plain)
        if self.options.verify == "raise":
            raise VerifyError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _record(self, record: Record, *, undo: bool = False) -> None:
        amended = self.graph_report.with_verdict(record, undo=undo)
        report.amend(self.graph_report, amended)
        self.graph_report = amended

    def _settled(self, chosen: Compiled) -> None:
        self.chosen, self.comparison = chosen, None


def _to_whom(names: set[str]) -> str:
    """Return text that tells the user what to do about a wrong rewrite.

    If only passes of this package rewrote the graph, the user should report the wrong rewrite. If
    only the user's own passes rewrote the graph, the user should correct these passes. Otherwise
    the user should first compile without the user's own passes."""
    ours, theirs = names & set(PASS_NAMES), " and ".join(sorted(names - set(PASS_NAMES)))
    if not theirs:
        return "Please report it with the reproducer."
    if not ours:
        return f"The rewrite is of a pass of yours, {theirs}: mend that; the reproducer shows it."
    return (
        f"Leave out your own pass first, {theirs}, by options={{'memeff.passes': []}}: if the "
        "graphs agree then, it is at fault; if not, please report it with the reproducer."
    )


@contextlib.contextmanager
def _uncounted(use: LogitsUse | None) -> Iterator[None]:
    """Reset the counters in `use`, at the end of this context, to their values at its start.

    The counters say how a graph's deferred logits, which are computed when first read, were used.
    """
    before = None if use is None else use.copy()
    try:
        yield
    finally:
        if use is not None and before is not None:
            use.restore(before)


def _is_rehearsal(args: Sequence[Any]) -> bool:
    """Return whether a call is not a real one, because its tensors are fake or a CUDA graph is
    being recorded."""
    is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return is_captured or any(compat.is_fake(arg) for arg in args)
