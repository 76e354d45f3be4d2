"""Decide whether a compiled graph is recorded as a CUDA graph.

This package records only decoding steps of text generation. A decoding step of few tokens launches
several hundred small kernels, and the host launches them more slowly than the GPU runs them. A
graph counts as a decoding step if all of these hold:

- it computes without gradients;
- it contains attention with few queries;
- it writes in place to inputs that are caches.

If you set a mode of torch.compile, Inductor decides which graphs are recorded as CUDA graphs. If
that mode uses CUDA graphs, this module tells Inductor which inputs keep their address. This module
also turns recording off for a graph that creates a cache and returns it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..options import Options
from ..passes.graph.graph_info import GraphInfo, node_name
from ..report import Record, format_bytes
from .replay import Counts, Roles

MAX_QUERIES = 8  # tokens of each sequence in one step; more is a prompt
MAX_CLONED = 64 << 20  # bytes that a step may return: they are cloned after each replay
MAX_COPIED = 64 << 20  # bytes of one input; a larger one counts by its address

DEVICES = ("cuda",)
INNERS = ("inductor",)

_COUNTING = (operator.add, operator.sub, operator.mul)
"""Operations with which a step counts, such as a cache's Python code for its length."""

_STATIC = (
    "Generate with a cache that stays where it is: cache_implementation='static', or "
    "memeff_compile.KVCache."
)

_WAYS_OUT = {
    "grouped_mm_fallback": "Load the model in bfloat16: in other dtypes transformers multiplies "
    "experts one by one, and reads on the host how many tokens each has.",
}
"""The remedies for ops that cannot be recorded, by the ops' names."""


@dataclass(frozen=True)
class Choice:
    """The decision whether one graph is recorded as a CUDA graph, with the reason if the graph is
    not recorded.
    """

    record: Record | None = None  # the line of the report, or None
    roles: Roles | None = None  # the roles of the arguments, if the graph is recorded
    device: torch.device | None = None  # the device on which the graph runs
    patches: Mapping[str, Any] = field(default_factory=dict)  # changes to Inductor's config


def decide(info: GraphInfo, options: Options) -> Choice:
    """Decide whether to record one graph as a CUDA graph, after the passes have run."""
    if info.needs_grad or torch.compiler.is_exporting():
        return Choice()
    steps = _Step(info)
    if steps.device is None:
        return Choice()
    if options.inner == "inductor" and compat.inductor_uses_cudagraphs(options.inductor_patches()):
        return _guarded(steps)
    if not steps.attentions or options.inner not in INNERS:
        return Choice()
    if options.cuda_graphs == "off":
        return _without("asked_off", "memeff.cuda_graphs='off' switches it off")
    found = next(steps.obstacles(), None)
    if found is not None:
        return _without(*found)
    roles = steps.roles()
    sentence = (
        f"a step of {steps.queries()} with {len(roles.written)} inputs that it writes in place: it "
        "is recorded when it comes again at the same addresses, then replayed; results are cloned"
    )
    return Choice(Record("backend", "note", "cuda_graph", sentence), roles, steps.device)


def undecided(error: Exception) -> Choice:
    """Return the decision for a graph for which `decide` raised an error: do not record the
    graph."""
    why = f"no CUDA graph: deciding about it failed with {type(error).__name__}: {error}"
    hint = "This is a bug of memeff_compile; the graph runs as it is. Please report it."
    return Choice(Record("backend", "internal_error", "decision_failed", why, hint))


def _without(code: str, why: str, hint: str = "") -> Choice:
    return Choice(Record("backend", "note", code, f"no CUDA graph: {why}", hint))


def _guarded(step: _Step) -> Choice:
    """Prepare a graph for Inductor's CUDA graphs, or turn recording off for this graph.

    The inputs to which the graph writes are marked as inputs that keep their address. A graph that
    returns a new cache is not recorded, because the next replay would overwrite the cache.
    """
    made = step.made_inside()
    if made is not None:
        why = f"`{made.name}` is made here, written to and returned, as a cache is that is "
        why += "allocated with the first prompt; the next replay would overwrite it"
        hint = "Allocate it before: use_kv_cache_ does, and cache.early_initialization(...)."
        told = _without("cache_created_inside", why, hint)
        return replace(told, patches={"triton.cudagraphs": False})
    for place in step.written:
        compat.mark_static_input(step.info.placeholders[place])
    return Choice()


class _Step:
    """A graph that may be a decoding step, and the properties that decide whether it is one."""

    def __init__(self, info: GraphInfo) -> None:
        self.info = info
        self.tensors = {
            place: value
            for place, node in enumerate(info.placeholders)
            if (value := info.tensor(node)) is not None
        }
        self.attentions = [node for node in info.gm.graph.nodes if self._queries(node) is not None]

    @property
    def device(self) -> torch.device | None:
        """Return the device of the decoding step, or None if this device cannot record CUDA
        graphs."""
        devices = {value.device for value in self.tensors.values()}
        return next((each for each in devices if each.type in DEVICES), None)

    def _queries(self, node: Node) -> Any:
        """If a node is attention or the softmax of attention, return its number of queries per
        sequence; otherwise return None."""
        name = node_name(node)
        if node.op == "placeholder" or not ("attention" in name or name == "softmax"):
            return None
        first = node.args[0] if node.args else node.kwargs.get("query")
        query = self.info.tensor(first)
        return query.shape[2] if query is not None and query.dim() == 4 else None

    def queries(self) -> str:
        """Return how many tokens of each sequence a decoding step processes."""
        most = max(compat.size_hint(self._queries(node)) for node in self.attentions)
        return f"{most} token{'' if most == 1 else 's'} per sequence"

    @property
    def written(self) -> tuple[int, ...]:
        """Return the positions of the graph inputs to which the decoding step writes."""
        keys = self._written_memory()
        return tuple(p for p, value in self.tensors.items() if compat.storage_keys(value) & keys)

    def _written_memory(self) -> set[int]:
        targets = (self.info.tensor(target) for w in self.info.writes for target in w.targets)
        return {key for value in targets if value is not None for key in compat.storage_keys(value)}

    def made_inside(self) -> Node | None:
        """Return the node of a tensor that the graph creates, writes to and returns, or None.

        Such a tensor is a new cache, for example.
        """
        given = {key for value in self.tensors.values() for key in compat.storage_keys(value)}
        made = self._written_memory() - given
        found = (node for node, value in self._returned() if compat.storage_keys(value) & made)
        return next(found, None)

    def _returned(self) -> list[tuple[Node, torch.Tensor]]:
        nodes = self.info.output.all_input_nodes
        return [(node, v) for node in nodes if (v := self.info.tensor(node)) is not None]

    def obstacles(self) -> Iterator[tuple[str, ...]]:
        """Yield each obstacle to recording the decoding step as a CUDA graph: a reason code, a
        sentence and, if one exists, a remedy."""
        for node in self.attentions:
            queries = compat.known_size(self._queries(node))
            if queries is None or queries > MAX_QUERIES:
                many = "a number that varies" if queries is None else queries
                yield "prefill", f"attention has {many} queries per sequence, which is a prompt"
        yield from self._foreign_inputs()
        made = self.made_inside()
        if made is not None:
            yield "cache_created_inside", f"`{made.name}` is made here, written to and returned"
        if not self.written:
            why = "it writes to none of its inputs: its cache grows, and moves, with each token"
            yield "growing_cache", why, _STATIC
        for write in self.info.writes:
            if any(self.info.tensor(target) is None for target in write.targets):
                name = node_name(write.node)
                yield f"unknown_write({name})", f"what `{name}` writes to is not known"
        for node in self.info.gm.graph.nodes:
            value = self.info.tensor(node)
            is_elsewhere = value is not None and value.device.type not in DEVICES
            if is_elsewhere or compat.is_unsafe_to_record(node):
                name = node_name(node)
                why = "waits for the GPU, asks the host, or is an op that may do either"
                yield f"unsafe_op({name})", f"`{name}` {why}", _WAYS_OUT.get(name, "")
        count = sum(_bytes(v) for node, v in self._returned() if node.op != "placeholder")
        if count > MAX_CLONED:
            why = f"it returns {format_bytes(count)}, which would be cloned in each step; up to "
            yield "outputs_large", f"{why}{format_bytes(MAX_CLONED)} are"

    def _foreign_inputs(self) -> Iterator[tuple[str, str]]:
        devices = {value.device for value in self.tensors.values()}
        for place, value in self.tensors.items():
            if value.device.type not in DEVICES:
                name = compat.readable_source(self.info.placeholders[place])
                yield f"cpu_input({name})", f"the input `{name}` is on {value.device}"
            if compat.is_dtensor(value):
                yield "distributed", "a weight is spread over processes"
        if len(devices) > 1:
            yield "several_devices", f"its inputs are on {len(devices)} devices"
        for place, node in enumerate(self.info.placeholders):
            given = compat.example_value(node)
            if place not in self.tensors and not isinstance(given, (int, float, torch.SymInt)):
                name = compat.readable_source(node)
                yield f"argument({name})", f"the input `{name}` is no tensor and no size"

    def roles(self) -> Roles:
        """Return the role of each argument of the decoding step in a replay of its CUDA graph.

        An argument is a tensor with a fixed address, a tensor that is copied before the replay, or
        a Python number.
        """
        written = self.written
        held = [p for p in self.tensors if p in written or self._stays(p)]
        counts, is_counted = self._counts()
        numbers = (n for n in enumerate(self.info.placeholders) if n[0] not in self.tensors)
        return Roles(
            tuple(held),
            tuple(place for place in self.tensors if place not in held),
            tuple(place for place, node in numbers if node not in is_counted),
            tuple(place for place, value in self.tensors.items() if _varies(value)),
            written,
            counts,
        )

    def _counts(self) -> tuple[Counts | None, set[Node]]:
        """Return formulas for the Python numbers that a decoding step returns.

        Also return the arguments that only these formulas use. If such an argument has a new value,
        the step need not be recorded again, because no tensor depends on the value.
        """
        nodes, returned = self.info.gm.graph.nodes, self.info.output.args[0]
        given = {n: p for p, n in enumerate(self.info.placeholders) if p not in self.tensors}
        graph, made = torch.fx.Graph(), {}  # nodes computed from numbers alone
        for node in nodes:
            read = node.all_input_nodes
            if node in given:
                made[node] = graph.placeholder(node.name)
            elif node.target in _COUNTING and read and made.keys() >= set(read):
                made[node] = graph.node_copy(node, made.__getitem__)
        counted: set[Node] = set()
        for node in reversed(made):
            if all(user.op == "output" or user in counted for user in node.users):
                counted.add(node)
        results = [each for each in compat.pytree.tree_leaves(returned) if each is not None]
        places = [place for place, each in enumerate(results) if each in counted]
        if not places:
            return None, set()
        graph.output(tuple(made[results[place]] for place in places))
        count = torch.fx.GraphModule(torch.nn.Module(), graph).forward
        return Counts(tuple(given.values()), tuple(places), count), counted

    def _stays(self, place: int) -> bool:
        """Return whether an input is expected to keep its address.

        Attributes of an object, such as weights and caches, keep their address; arguments of the
        call have a new address in each call.
        """
        node, value = self.info.placeholders[place], self.tensors[place]
        is_held = isinstance(compat.example_input(node), torch.nn.Parameter)
        is_held = is_held or not compat.is_fake(value) or "." in compat.source_name(node)
        return is_held or _bytes(value) > MAX_COPIED


def _bytes(value: torch.Tensor) -> int:
    return compat.size_hint(value.numel()) * value.dtype.itemsize


def _varies(value: torch.Tensor) -> bool:
    return any(compat.known_size(size) is None for size in (*value.shape, *value.stride()))
