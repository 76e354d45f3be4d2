"""Find the names that modules have in the compiled model's `named_modules()`.

Dynamo gives only the modules' ids, and paths in Dynamo's notation. Dynamo names a module by the
path through which code reaches it:

- `L['self'].__dict__['_modules']['base_model']` in a model of PEFT;
- `L['trainer'].model.lm_head` in a method of a trainer;
- `L['self'].lm_head` in a submodule after a graph break.

For each node, Dynamo records a dictionary of modules, whose keys begin with the modules' ids.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from ... import compat
from ...options import plain_path

_STEP = re.compile(r"\.\w+|\[[^\]]*\]")


def clean_module_path(path: str) -> str:
    """Turn Dynamo's `L['self'].model.layers[0].mlp` into `model.layers.0.mlp`."""
    # A decorator of `forward` that takes `*args` has the model as the first of them.
    path = re.sub(r"^(?:L\['args'\]\[0\]|[LG]\['[^']*'\])", "", compat.plain_source(path))
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    return path.strip(".")


def module_stack(node: Node) -> list[tuple[str, str]]:
    """Return the modules in which `node` was called, as ids and Dynamo's paths, starting with the
    outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (str(key).partition("@")[0], entry[0] if isinstance(entry, tuple) else str(entry))
        for key, entry in stack.items()
    ]


class ModuleNames:
    """The names of the modules of one graph."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[str, ...]] = {}
        self._tables: dict[int, dict[str, list[str]]] = {}
        self._running: list[nn.Module] | None = None

    def of(self, number: str, path: str) -> tuple[str, ...]:
        """Return all names of a module; reports use the first one."""
        if (number, path) not in self._found:
            self._found[number, path] = tuple(dict.fromkeys(self._names(number, path)))
        return self._found[number, path]

    def everything(self) -> set[str]:
        """Return the names of all modules of the running model, including modules that are not in
        the graph.
        """
        tables = map(self._table, self._roots(""))
        return {name for table in tables for names in table.values() for name in names}

    def _names(self, number: str, path: str) -> Iterator[str]:
        written = clean_module_path(path)
        for root in self._roots(path):
            names = self._table(root).get(number, [])
            yield from (name for name in names if name == written)
            yield from names
        yield written

    def _roots(self, path: str) -> Iterator[nn.Module]:
        """Yield the modules that may contain a given module.

        These are the modules whose forward is running, and the first module on `path`. The path, in
        Dynamo's notation, is the expression by which code reaches the given module."""
        if self._running is None:
            self._running = compat.running_modules()
        yield from self._running
        first = _first_module(path)
        if first is not None:
            yield first

    def _table(self, root: nn.Module) -> dict[str, list[str]]:
        """Return the names of all modules in a model, by module id."""
        if id(root) not in self._tables:
            table: dict[str, list[str]] = {}
            for name, module in root.named_modules(remove_duplicate=False):
                table.setdefault(str(id(module)), []).append(plain_path(name))
            self._tables[id(root)] = table
        return self._tables[id(root)]


def _first_module(path: str) -> nn.Module | None:
    """Follow a path in Dynamo's notation, such as `L['trainer'].model.lm_head`; return the first
    value on the way that is a module, or None."""
    value: Any = compat.frame_variables().get(path[:1])
    for step in _STEP.findall(path[1:]):
        try:
            is_key = step.startswith("[")
            value = value[ast.literal_eval(step[1:-1])] if is_key else getattr(value, step[1:])
        except Exception:  # any error that a user's class raises
            return None
        if isinstance(value, nn.Module):
            return value
    return None
