"""The interface between the core of this package and its systems (optional parts, such as KV
caches).

The core is the backend, its passes over losses and attention, deferred logits (computed when they
are first read), and the prediction of memory. The systems are compressed weights, KV caches,
ternary linear layers and low-bit attention. A system adds passes, ops, and functions that change a
model before compilation, such as `compress_`. Each folder of `model/` with a file `system.py`
defines one `System`, which names everything that the system adds. The core calls every system that
`systems()` finds, and contains no system's name, so the package works without the files of any
system.

A `System` names its functions as text, `"module:name"`, so that importing the file `system.py`
loads neither torch nor kernels. `Hooks` lists the functions of a system that the core calls.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")


@dataclass(frozen=True)
class PassFacts:
    """Those facts about a pass that options and reports need before the pass is imported."""

    name: str  # name of its file, also in reports, `memeff.skip` and `memeff.strict`
    option: str  # the option that switches it on and off, without `memeff.`
    off: tuple[str, ...] = ("off",)  # the values with which it does not run, first the one to name
    # `memeff.strict` only requires that it declines no match, since many graphs have none:
    # one that trains has no cache to update, for example
    may_find_nothing: bool = False
    needs: str = ""  # a pass without which it does not run, or ""


@dataclass(frozen=True)
class SystemPass:
    """A pass of a system, which is an optional part of this package, such as KV caches.

    `after` names the pass of the core (the rest of the package) after which this pass runs."""

    facts: PassFacts
    source: str  # "module:class"
    after: str


@dataclass(frozen=True)
class Request:
    """One call of `memeff_compile.compile`, as passed to each system (optional part of this
    package, such as KV caches)."""

    model: object
    options: Any  # the parsed `Options`
    kv_cache: Any = None


@dataclass(frozen=True)
class Undone:
    """The changes to a model that were undone, and the changes that could not be undone.

    A system (an optional part of this package, such as KV caches) had made these changes."""

    what: str = ""  # a short description, or "" if no part was changed
    places: Mapping[str, str] = field(default_factory=dict)  # new state by name
    left: Mapping[str, str] = field(default_factory=dict)  # reason by name


class Graph(Protocol):
    """The parts of a captured graph that the functions in `Hooks` may read.

    `Hooks` lists functions of a system, which is an optional part of this package (such as KV
    caches)."""

    @property
    def placeholders(self) -> Sequence[Any]:
        """Return the graph's inputs."""

    def may_be_written(self, node: Any) -> bool:  # noqa: ANN401 - a node of torch.fx
        """Return whether the graph, or code after it, may write to the graph's input `node`."""


class Hooks:
    """The functions of a system (an optional part of this package, such as KV caches) that the core
    of this package calls. By default these functions do nothing."""

    def refuse(self, options: Any) -> None:  # noqa: ANN401
        """Raise OptionError if an option requires a change of the model; the backend calls this
        method, because a backend cannot change the model."""

    def wants(self, request: Request) -> bool:
        """Return whether a call of `memeff_compile.compile` asks this system (an optional part of
        this package, such as KV caches) to change the model."""
        return False

    def check(self, request: Request) -> None:
        """Raise an error if this system (an optional part of this package) does not support a call
        of `memeff_compile.compile`.

        The package calls this method before any system, such as KV caches, changes the model."""

    def prepare(self, request: Request) -> Any:  # noqa: ANN401
        """Change the model, and return the options with which the changed model is compiled."""
        return request.options

    def compile(self, request: Request, given: Mapping[str, Any]) -> bool:
        """Compile the model in place with the given arguments and return True, or return False.

        If every system (an optional part of this package, such as KV caches) returns False, the
        core compiles the model."""
        return False

    def undo(self, model: Any) -> Undone:  # noqa: ANN401 - a module
        """Undo the changes that this system (an optional part of this package) made to a model, as
        far as possible.

        Return which changes were undone and which were not.
        """
        return Undone()

    def guard(self, graph: Graph) -> None:
        """Replace Dynamo's guards on some inputs of a graph by cheaper guards.

        A system is an optional part of this package, such as compressed weights. The inputs are
        tensors of this system. This method is called only for graphs without gradients."""

    def forget(self) -> None:
        """Free all memory that this system (an optional part of this package) keeps between calls.

        An example is the buffers of KV caches. `memeff_compile.reset()` calls this method."""


@dataclass(frozen=True)
class System:
    """Everything that one system (an optional part of this package, such as KV caches) adds to the
    core."""

    name: str
    passes: tuple[SystemPass, ...] = ()
    ops: tuple[str, ...] = ()  # modules that define the schemas of its ops
    hooks: str = ""  # "module:class" of its `Hooks`
    on_import: tuple[str, ...] = ()  # modules to import with the package; they import no torch
    # ops that compute attention, and the operands of which `keep_activations` knows the size
    attention_ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lossy_ops: tuple[str, ...] = ()  # ops whose results `memeff.verify` does not hold to tolerances


@cache
def systems() -> tuple[System, ...]:
    """Return every system (optional part of this package) that is installed, in the order of their
    names."""
    rooms = import_module("memeff_compile.model")
    names = [entry.name for entry in pkgutil.iter_modules(rooms.__path__) if entry.ispkg]
    found = (_system(f"{rooms.__name__}.{name}.system") for name in sorted(names))
    return tuple(each for each in found if each is not None)


def _system(module: str) -> System | None:
    try:
        found: System = import_module(module).SYSTEM
    except ImportError as error:
        log.warning("memeff_compile: a system is left out, %s: %s", module, error)
        return None
    return found


def load(source: str) -> Any:  # noqa: ANN401 - whatever the text names
    """Return the object that `"module:name"` names; modules are relative to the package."""
    module, _, name = source.partition(":")
    found = import_module(f"memeff_compile.{module}")
    return getattr(found, name) if name else found


@cache
def hooks() -> tuple[Hooks, ...]:
    """Return the hooks of every system (optional part of this package, such as KV caches)."""
    return tuple(load(each.hooks)() for each in systems() if each.hooks)


def in_order(
    core: Iterable[Item], name_of: Callable[[Item], str], of_system: Callable[[SystemPass], Item]
) -> tuple[Item, ...]:
    """Return the items (such as passes) of this package's core, with the items of its optional
    parts inserted.

    An optional part, such as KV caches, is called a system. The core is the rest of the package. A
    system names the core pass after which each of its items is inserted."""
    followers: dict[str, list[SystemPass]] = {}
    for system in systems():
        for each in system.passes:
            followers.setdefault(each.after, []).append(each)
    order: list[Item] = []
    for item in core:
        order += [item, *map(of_system, followers.get(name_of(item), []))]
    return tuple(order)
