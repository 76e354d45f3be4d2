"""The base class of passes, and the objects with which a pass describes a rewrite or the reason why
the pass declined a match.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sympy
from torch.fx import Node

from ...logits.recipe import DeferredOutput
from ...report import Action
from .editor import Editor
from .graph_info import GraphInfo, node_name


@dataclass(frozen=True)
class Decline:
    """The reason why a pass declined a match: a code, a sentence and a remedy.

    `node` is the node whose location the compilation report shows.

    The report merges equal declines into one record, whose field `sites` is their number.
    """

    code: str
    sentence: str
    hint: str = ""
    node: Node | None = None
    sites: int = 0
    action: Action = "declined"  # or "note", for a node that need not be a match of the pass

    def counted(self, node: Node) -> Decline:
        """Return a copy of this Decline with the given node and a count of one declined match.

        A Decline is the reason why a pass does not rewrite a match. The compilation report
        merges equal declines and adds up their counts."""
        return replace(self, node=node, sites=1)


def mutated(write: Node, what: str, node: Node | None = None) -> Decline:
    """Return a Decline (the reason for no rewrite): the graph writes in place to memory that the
    rewritten graph would read later."""
    sentence = f"`{node_name(write)}` writes in place to {what}"
    return Decline("mutated", sentence, "use the out-of-place form", node)


@dataclass(frozen=True)
class Gain:
    """The bytes of the tensors that a rewrite affects, before and after the rewrite.

    `before` and `after` are formulas. Their variables are sizes, such as the number of tokens.
    `sizes` gives the value of each variable by its name.
    """

    before: sympy.Expr
    after: sympy.Expr
    sizes: Mapping[str, int]


Note = tuple[
    Action, str, str
]  # further entries of a rewrite for the report: action, code, sentence
NOTED = (
    "defer_logits"  # the pass that these notes are filed under: they say how logits are returned
)


@dataclass
class Done:
    """The compilation report's entries for a rewrite, and the changes outside of the graph that the
    backend must make for the rewrite.

    The report merges equal rewrites into one record, whose field `sites` is their number.
    `inductor` contains Inductor settings that suit the graph; the user's settings override these
    settings.
    """

    node: Node
    sentence: str
    notes: list[Note] = field(default_factory=list)
    deferred: list[DeferredOutput] = field(default_factory=list)
    action: Action = "rewrote"
    code: str = "rewrote"
    sites: int = 0
    inductor: Mapping[str, Any] = field(default_factory=dict)


class GraphPass(ABC):
    """The base class of passes.

    A pass finds matches (groups of nodes to rewrite) in a graph, checks each match, and rewrites
    the matches that pass the check. `find` and `check` do not change the graph. `rewrite`
    edits the graph only through its argument `editor`, an `Editor`, which can undo edits. The
    pipeline verifies the result, and undoes the edits of a match if the editor raises an error. A
    match may be any object, such as a node. `find` yields the matches. `places` returns
    nodes of a match. If `memeff.skip` names the module of one of these nodes, the match is skipped.

    Attributes:
        name: the name of the pass in reports, in `memeff.skip` and in `memeff.strict`.
        when: whether a pass given in `memeff.passes` runs before or after the built-in ones.
    """

    name: str
    when: Literal["before", "after"] = "after"

    def enabled(self, info: GraphInfo) -> bool:
        """Return whether the options turn the pass on for a graph."""
        return not info.options.switched_off(self.name)

    @abstractmethod
    def find(self, info: GraphInfo) -> Iterable[Any]:
        """Yield every match in the graph.

        Also yield a Decline (the reason) for each node that looks like a match but cannot be
        rewritten."""

    def check(self, info: GraphInfo, match: Any) -> Decline | None:
        """Return the reason why `match` must not be rewritten, or None if it may be rewritten."""
        return None

    def gain(self, info: GraphInfo, match: Any) -> Gain | None:
        """Return the bytes that the rewrite saves, or None if the graph does not determine them."""
        return None

    def places(self, match: Any) -> Sequence[Node]:
        """Return the nodes whose modules count as the modules of a match.

        If `memeff.skip` names the module of one of these nodes, the match is skipped.
        """
        return [match]

    def anchor(self, match: Any) -> Node:
        """Return the node whose line of user code the compilation report shows for `match`."""
        return self.places(match)[0]

    @abstractmethod
    def rewrite(self, info: GraphInfo, match: Any, editor: Editor) -> Done:
        """Edit the graph for one match.

        If an edit would change a property (such as the dtype) of a value that nodes outside of the
        match read, the editor raises EditRefused.
        """

    def dead(self, match: Any) -> Sequence[Node]:
        """Return the nodes that the rewrite replaces; the pipeline then erases each of them that
        has no users left.
        """
        return self.places(match)

    def notes(self, info: GraphInfo) -> Iterable[tuple[str, str]]:
        """Return notes on the whole graph for the compilation report, as pairs of a reason code and
        a sentence."""
        return ()

    def joins_ranks(self, info: GraphInfo, match: Any) -> bool:
        """Return whether the nodes that the rewrite inserts wait for other ranks.

        An error in such a rewrite must end the run, because if one rank skipped the rewrite, the
        other ranks would wait forever.
        """
        return False

    def parts(self, match: Any) -> Sequence[Any]:
        """Return the smaller matches that `match` combines; if `match` cannot be rewritten as a
        whole, the smaller matches are rewritten one by one.
        """
        return ()

    def identity(self) -> str:
        """Return a key that identifies the pass, including its version, in on-disk caches.

        The key contains the source code of the pass's classes, and the pass's attributes. Override
        this method if a rewrite also depends on something else, such as a global variable. If a
        pass has no source file, its key is valid only in this process.
        """
        kinds = [each for each in type(self).__mro__ if issubclass(each, GraphPass)]
        try:
            texts = {inspect.getsource(sys.modules[each.__module__]) for each in kinds[:-1]}
        except (KeyError, OSError, TypeError):
            texts = {uuid.uuid4().hex}
        said = [f"{kinds[0].__module__}.{kinds[0].__qualname__}", *sorted(texts)]
        settings = sorted(vars(self).items(), key=str)
        return hashlib.sha256(repr((said, settings)).encode()).hexdigest()[:16]

    def skipped(self, info: GraphInfo, node: Node) -> str:
        """Return the module path of `node` if `memeff.skip` names that module, otherwise ""."""
        paths = info.module_names(node)
        return next((p for p in paths if p and info.options.skips(self.name, p)), "")
