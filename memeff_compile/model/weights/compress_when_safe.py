"""memeff.weights=win4: compress weights of a compiled model of which nobody else has hold.

The backend sees weights only while they are in use, when it cannot tell its own hold of them from
that of others. So it looks more than once. After the first call, each weight's parameter makes way
for another one on the same memory, which changes nothing: at the second call the first one has to
be gone. It makes way again, and is counted; what is counted at the third call has to be the same,
and no other tensor may hold the memory. Then nothing but the model holds the weight, and its code
takes its place. The next call compiles the model once more, for codes.

Where anything else shows, the parameter that was there first is put back, and the report says so.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memeff_compile import compat, report
from memeff_compile.model.weights.compress import (
    Owners,
    coded_or_reason,
    put_parameter,
    why_left_dense,
)
from memeff_compile.report import GraphReport, Record

ATTEMPTS = 3
"""Times that a weight is counted again after two counts that differ."""

HELD = (
    "something beside the model holds the weight or its memory, such as an optimizer, a list of "
    "parameters or a view"
)


@dataclass
class _Watched:
    """A weight on its way to be compressed.

    Attributes:
        place: which argument of the compiled graph it is.
        path: of the module that the graph reads it for.
        owners: modules and attributes that it is found under; empty until they were looked for.
        first: what was there first, if anything still holds it.
        last: what was there at the last call.
        put: what was put there then.
        count: references to what was there, at the last call.
    """

    place: int
    path: str
    owners: Owners = ()
    first: weakref.ref[Tensor] | None = None
    last: weakref.ref[Tensor] | None = None
    put: weakref.ref[Any] | None = None
    count: int = 0
    attempts: int = 0


@dataclass
class CompressWhenSafe:
    """Runs a compiled graph, and compresses its weights after some calls.

    Args:
        compiled: runs the graph.
        places: which arguments are weights that nothing but linears read, with module paths.
        codec: for all of them.
        graph_report: what is said of weights that stay dense is added to it.
    """

    compiled: Callable[..., Any]
    places: Sequence[tuple[int, str]]
    codec: str
    graph_report: GraphReport
    _watched: list[_Watched] = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Watch every weight."""
        self._watched = [_Watched(place, path) for place, path in self.places]

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - as the graph
        """Run the graph; then look at the weights it was given."""
        found = self.compiled(*args)
        if self._watched and not _is_rehearsal(args) and self._lock.acquire(blocking=False):
            try:
                self._look(args)
            finally:
                self._lock.release()
        return found

    def _look(self, args: Sequence[Any]) -> None:
        # What is made here outlives the call, and belongs to no inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if not self._watched[0].owners:
                _find_owners(self._watched, args)
            going_on = []
            for watched in self._watched:
                reason = self._step(watched, args)
                if reason is None:
                    going_on.append(watched)
                elif reason:
                    self._leave(watched, reason)
            self._watched = going_on

    def _step(self, watched: _Watched, args: Sequence[Any]) -> str | None:
        """Look at one weight: None to look again, "" once it is compressed, or why it stays."""
        count = sys.getrefcount(args[watched.place])  # before a variable of ours counts too
        weight = args[watched.place]
        if watched.last is None:
            reason = why_left_dense(weight, watched.path, watched.owners, self.codec)
            if reason:
                return reason
            watched.first = weakref.ref(weight)
            count = 0
        elif not _is_ours(watched, weight):
            return "another weight was put in its place meanwhile"
        elif watched.last() is not None or compat.memory_holders(weight) > 1:
            return self._put_back(watched)
        elif count == watched.count:
            coded = coded_or_reason(weight, self.codec)
            if isinstance(coded, str):
                return coded
            put_parameter(watched.owners, weight, coded)
            return ""
        elif watched.attempts == ATTEMPTS:
            return self._put_back(watched)
        watched.attempts += 1
        watched.count, watched.last = count, weakref.ref(weight)
        put_parameter(watched.owners, weight, weight.data)
        module, name = watched.owners[0]
        watched.put = weakref.ref(module._parameters[name])
        return None

    def _put_back(self, watched: _Watched) -> str:
        """Give the model the parameter again that others hold, if it is alive."""
        for held in (watched.first, watched.last):
            before = None if held is None else held()
            if isinstance(before, nn.Parameter):
                for module, attribute in watched.owners:
                    module._parameters[attribute] = before
                break
        return HELD

    def _leave(self, watched: _Watched, reason: str) -> None:
        record = Record(
            "encode_weights",
            "declined",
            "weight_left_dense",
            f"{reason}; memeff.weights={self.codec!r} compresses only what it can prove to be safe",
            "call memeff_compile.compress_(model) yourself, before compiling",
            module=watched.path,
        )
        amended = self.graph_report.with_verdict(record, undo=False)
        report.amend(self.graph_report, amended)
        self.graph_report = amended


def _is_rehearsal(args: Sequence[object]) -> bool:
    """Say whether this is no real call: fake tensors, or work that a CUDA graph records."""
    if any(compat.is_fake(arg) for arg in args):
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_ours(watched: _Watched, weight: Tensor) -> bool:
    """Say whether a weight is what was put into all its modules, which may have got another."""
    if watched.put is None or watched.put() is not weight:
        return False
    return all(module._parameters.get(name) is weight for module, name in watched.owners)


def _find_owners(several: Sequence[_Watched], args: Sequence[Any]) -> None:
    """Look through all modules that are alive for those that own the weights."""
    wanted = {id(args[watched.place]): watched for watched in several}
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):
            for name, parameter in vars(thing).get("_parameters", {}).items():
                if id(parameter) in wanted:
                    found.setdefault(id(parameter), []).append((thing, name))
    for key, watched in wanted.items():
        watched.owners = tuple(found.get(key, ()))


__all__ = ["CompressWhenSafe"]
