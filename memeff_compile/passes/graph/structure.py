"""Describe the structure of a graph and its inputs as a key.

Two graphs with equal keys can share compiled code. Two layers of a model are captured as two
partitions that differ only in node names and weights. One compiled function can run both partitions
if everything that a compiler may read is equal. A compiler may read operations, constants, and the
sizes, strides, dtypes and aliasing of the inputs.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ... import compat

ALIGNMENT = 16
"""The alignment in bytes that compilers assume for an address if the first address had it."""


def structure(
    gm: GraphModule, inputs: Sequence[Any] | None = None, graph: Graph | None = None
) -> Hashable:
    """Return a key that two graphs share only if both can run the same compiled code.

    The key contains neither the names of nodes nor the values of input tensors.

    Args:
        gm: the module of the graph.
        inputs: the example values (real or fake tensors) for which the graph is compiled, or None
            for a nested graph.
        graph: a graph that reads the module's attributes; by default, the module's own graph.
    """
    places: dict[Node, int] = {}
    lines: list[Hashable] = []
    for node in (gm.graph if graph is None else graph).nodes:
        places[node] = len(places)
        if node.op == "placeholder":
            continue
        target = _attribute(gm, node) if node.op == "get_attr" else _constant(node.target, places)
        given = _constant(node.args, places), _constant(node.kwargs, places)
        lines.append((node.op, target, *given, repr(node.meta.get("custom"))))
    return (tuple(lines), len(places), None if inputs is None else _described(inputs))


def with_names(key: Hashable, names: Mapping[str, str]) -> Hashable:
    """Return a key in which the names of size symbols are replaced as the mapping `names`
    says."""
    if isinstance(key, tuple):
        return tuple(with_names(each, names) for each in key)
    if isinstance(key, str) and key:
        return _SYMBOL.sub(lambda found: names.get(found.group(), found.group()), key)
    return key


_SYMBOL = re.compile(r"\bs\d+\b")


def _attribute(gm: GraphModule, node: Node) -> Hashable:
    """Describe the value of an attribute: a nested graph by its structure, any other value by its
    identity."""
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return structure(value) if isinstance(value, GraphModule) else ("object", id(value))


def _constant(value: Any, places: Mapping[Node, int]) -> Hashable:
    """Describe an argument: a node by its position, a number by its type and value."""
    if isinstance(value, Node):
        return ("node", places[value])
    if isinstance(value, (tuple, list)):
        return (type(value), *(_constant(each, places) for each in value))
    if isinstance(value, Mapping):
        return (dict, *((str(name), _constant(each, places)) for name, each in value.items()))
    if isinstance(value, slice):
        return (slice, *(_constant(e, places) for e in (value.start, value.stop, value.step)))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("size", str(value.node.expr))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return (type(value), repr(value))
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return value
    return ("object", id(value))


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def _described(inputs: Sequence[Any]) -> Hashable:
    storages: dict[int, int] = {}
    return tuple(_input(value, storages) for value in inputs)


def _input(value: Any, storages: dict[int, int]) -> Hashable:
    if not isinstance(value, Tensor):
        return _constant(value, {})
    if not (type(value) in _PLAIN or compat.is_fake(value)):
        return _subclass(value, storages)
    if value.layout is not torch.strided:
        return ("object", id(value))
    # Inputs that share memory are compiled differently if the graph writes to one of them.
    shared = storages.setdefault(compat.storage_key(value), len(storages))
    offset = value.storage_offset()
    return (
        (value.dtype, value.device, value.requires_grad, value.is_leaf),
        (value.is_conj(), value.is_neg(), value.is_inference()),
        tuple(str(size) for size in (*value.shape, "strides", *value.stride())),
        str(offset * value.itemsize % ALIGNMENT),
        (shared, isinstance(value, nn.Parameter)),
    )


def _subclass(value: Any, storages: dict[int, int]) -> Hashable:
    """Describe an instance of a Tensor subclass by its inner tensors or, if its class does not
    define any, by its identity.
    """
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return ("object", id(value))
    names, context = flatten()
    inner = tuple(_input(getattr(value, name), storages) for name in names)
    shape = tuple(str(size) for size in (*value.shape, *value.stride()))
    return (type(value), value.requires_grad, shape, tuple(names), _constant(context, {}), inner)
