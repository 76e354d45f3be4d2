"""Split a graph into partitions, so that gradients become available block by block.

For autograd, a compiled graph is one node: its backward pass returns all gradients together.
Without a split, an optimizer could update the first weight only after all gradients were computed.
If `optim_in_backward` updates weights, this module splits the graph between the model's blocks, as
Dynamo does for DDP's buckets. Each partition is compiled separately. If a later partition needs a
value, the value is an output of the earlier partition and an input of the later one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ... import compat
from ...kernels.marks import announce, is_updated_in_backward
from ...report import Record, format_bytes
from .graph_info import GraphInfo
from .module_names import clean_module_path, module_stack
from .structure import structure

MOST = 64
"""Approximate number of partitions: each gets at least this share of the gradients."""

_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")


def starts(info: GraphInfo) -> tuple[Node, ...]:
    """Return the nodes at which a new partition of the graph starts; usually there are none.

    A new partition starts only where a block of the model begins or ends. The graph is split there
    only if the new and the previous partition both compute gradients of weights that
    `optim_in_backward` updates. Graphs with in-place writes or values of unknown size, and graphs
    that DDP already split, are not split.
    """
    updated = _updated(info)
    if not (updated and info.needs_grad) or info.parent is not None or info.writes:
        return ()
    if info.options.inner == "eager" or compat.inputs_from_other_graphs(info.gm):
        return ()
    nodes = candidates(info)
    if not nodes:
        return ()
    allowed = crossed_by_tensors(info, nodes)
    sizes = [sum(updated.get(each, 0) for each in node.all_input_nodes) for node in nodes]
    left, gathered, least = sum(sizes), 0, sum(updated.values()) / MOST
    found: list[Node] = []
    for (before, node), size in zip(pairwise([nodes[0], *nodes]), sizes, strict=True):
        begins = block_of(node) != block_of(before) and node in allowed
        if begins and left > 0 and gathered >= least:
            found.append(node)
            gathered = 0
        gathered, left = gathered + size, left - size
    return tuple(found)


_CROSSES = (torch.Tensor, torch.SymInt)


def candidates(info: GraphInfo) -> list[Node]:
    """Return the nodes that a split of the graph assigns to partitions (smaller graphs).

    These are all nodes except the graph's inputs and output. If the graph has a size that is known
    only at run time, return no nodes.
    """
    nodes = [node for node in info.gm.graph.nodes if node.op not in ("placeholder", "output")]
    return [] if any("unbacked_bindings" in node.meta for node in nodes) else nodes


def crossed_by_tensors(info: GraphInfo, nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes before which the graph can be split.

    Before such a node, both of these hold:

    - later nodes need only tensors and sizes from earlier nodes;
    - gradients are enabled or disabled as they were when the graph was called.
    """
    found = set()
    outside = info.region.grad, info.region.inference
    tied = -1  # until here a value is needed that is no tensor and so cannot cross a cut
    for node in nodes:
        region = info.regions[node]
        if tied < info.positions[node] and (region.grad, region.inference) == outside:
            found.add(node)
        if node.op == "get_attr" or enters_autocast(node):
            continue
        if not isinstance(compat.example_value(node), _CROSSES):
            tied = max((tied, *(info.positions[user] for user in node.users)))
    return found


def _updated(info: GraphInfo) -> dict[Node, int]:
    """Return the inputs that are weights updated during the backward pass, and the bytes of their
    gradients."""
    held = {node: compat.example_input(node) for node in info.placeholders}
    return {n: p.numel() * p.itemsize for n, p in held.items() if is_updated_in_backward(p)}


def block_of(node: Node) -> str:
    """Return the path of the block that contains a node, such as `model.layers.3`, or "".

    A node outside of all blocks may call a nested graph, as an activation checkpoint does. For such
    a node, return the name of the node itself.
    """
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    found = _BLOCK.match(path_of(node))
    is_body = isinstance(node.target, compat.HigherOrderOperator)
    return found.group() if found else node.name if is_body else ""


def path_of(node: Node) -> str:
    """Return the path of the module whose forward computes a node, or ""."""
    stack = module_stack(node)
    return clean_module_path(stack[-1][1]) if stack else ""


def said(info: GraphInfo, at: Sequence[Node]) -> Record:
    """Return an entry for the compilation report: the graph is compiled in partitions.

    Each node of `at` starts a new partition."""
    total = format_bytes(sum(_updated(info).values()))
    sentence = (
        f"compiled in {len(at) + 1} pieces, cut between blocks of the model, because its weights "
        f"are updated in the backward: {total} of gradients are made and freed block by block"
    )
    return Record("backend", "note", "in_pieces", sentence)


def undecided(error: Exception) -> Record:
    """Return an entry for the compilation report: the graph is not split into partitions, because
    the search for the model's blocks raised an error."""
    why = f"not cut into blocks: searching for them failed with {type(error).__name__}: {error}"
    hint = "This is a bug of memeff_compile; the graph runs whole. Please report it."
    return Record("backend", "internal_error", "cuts_failed", why, hint)


@dataclass(frozen=True)
class Piece:
    """One of the partitions (subgraphs) into which a graph is split."""

    root: GraphModule  # the whole graph's module, which has the attributes
    graph: Graph
    takes: tuple[Node, ...]  # the partition's inputs, as nodes of the whole graph
    gives: tuple[Node, ...]  # the nodes that the partition returns

    def module(self) -> GraphModule:
        """Return a module that runs the partition; creating a module is slow, because FX generates
        Python code for it.
        """
        return GraphModule(self.root, self.graph)

    def structure(self, inputs: Sequence[Any]) -> Hashable:
        """Return a key that is equal for partitions which can run the same compiled code."""
        return structure(self.root, inputs, self.graph)


def compiled_in_pieces(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    cuts: Sequence[Node],
    compile_one: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    *,
    shares: bool = True,
    is_last_plain: bool = False,
) -> Callable[..., Any]:
    """Compile each partition of the graph; return a function that runs the whole graph.

    With `shares`, partitions that have the same structure and inputs share the compiled code of the
    first of these partitions. With `is_last_plain`, the last partition runs without compilation, op
    by op.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    known = dict(zip(placeholders, example_inputs, strict=True))
    pieces = split(gm, set(cuts))
    if not all(piece.gives for piece in pieces):  # a partition that runs only for its side effects
        return compile_one(gm, example_inputs)
    last_use = {node: place for place, piece in enumerate(pieces) for node in piece.takes}
    results: Any = gm.graph.output_node().args[0]
    kept = {node for node in results if isinstance(node, Node)}
    made: dict[Hashable, Callable[..., Any]] = {}
    slots = {node: place for place, node in enumerate(placeholders)}
    steps: list[_Step] = []
    for place, piece in enumerate(pieces):
        inputs = [known.get(node, compat.example_value(node)) for node in piece.takes]
        is_plain = is_last_plain and piece is pieces[-1]
        key = piece.structure(inputs) if shares and not is_plain else place
        if is_plain:
            made[key] = piece.module().forward
        if key not in made:
            with compat.apart_in_tracing():
                made[key] = compile_one(piece.module(), inputs)
        for node in piece.gives:
            slots[node] = len(slots)
        done = [n for n in {*piece.takes, *piece.gives} if last_use.get(n, place) <= place]
        places = [
            tuple(slots[node] for node in nodes)
            for nodes in (piece.takes, piece.gives, [node for node in done if node not in kept])
        ]
        updated = sum(is_updated_in_backward(compat.example_input(node)) for node in piece.takes)
        steps.append(_Step(made[key], places[0], places[1], places[2], updated))
    created = [None] * (len(slots) - len(placeholders))
    returned = [slots[each] if isinstance(each, Node) else None for each in results]

    def run(*args: Any) -> tuple[Any, ...]:
        # A training step of many small partitions waits for this loop.
        values: list[Any] = [*args, *created]
        for compiled, takes, gives, done, updated in steps:
            given = [values[slot] for slot in takes]
            found = compiled(*given)
            for slot, value in zip(gives, found, strict=True):
                values[slot] = value
            if updated > 1:
                _announce(given, found)
            for slot in done:
                values[slot] = None
        pairs = zip(returned, results, strict=True)
        return tuple(each if slot is None else values[slot] for slot, each in pairs)

    return run


class _Step(NamedTuple):
    """A call of a compiled partition, with the indices of the values that it takes and returns.

    The indices count all values of the graph in the order in which they are created.
    """

    compiled: Callable[..., Any]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    done: tuple[int, ...]  # the values that no later partition reads
    updated: int  # weights that are updated in the backward


def _announce(given: Sequence[Any], found: Sequence[Any]) -> None:
    """Register a hook that says when all gradients of a graph partition are computed.

    The function `optim_in_backward`, which updates weights during the backward pass, needs the
    hook: it updates several weights of the partition in one kernel launch. `given` and `found` are
    the partition's inputs and results.
    """
    updated = [each for each in given if is_updated_in_backward(each)]
    compat.after_gradients(found, lambda: announce(updated))


def split(gm: GraphModule, cuts: set[Node]) -> list[Piece]:
    """Return the partitions of the graph, in order.

    A partition whose nodes are inside an autocast region enters that region at its start and leaves
    it at its end.
    """
    groups: list[list[Node]] = [[]]
    entered: list[tuple[Node, ...]] = [()]  # autocast regions that a group begins in
    open_now: list[Node] = []
    for node in gm.graph.nodes:
        if node in cuts:
            groups.append([])
            entered.append(tuple(open_now))
        if node.op not in ("placeholder", "output", "get_attr"):
            groups[-1].append(node)
        if enters_autocast(node):
            open_now.append(node)
        elif leaves_autocast(node):
            open_now.remove(node.args[0])
    place = {node: number for number, group in enumerate(groups) for node in group}
    end = len(groups)
    order = {node: n for n, node in enumerate(gm.graph.nodes)}
    sizes = size_inputs(gm)
    found = []
    for number, group in enumerate(groups):
        read = dict.fromkeys(each for n in group for each in n.all_input_nodes)
        symbols: set[str] = set()
        for each in (*group, *read) if sizes else ():
            symbols |= compat.symbols_of(compat.example_value(each))
        given = {sizes[name] for name in symbols & sizes.keys()}
        given |= {node for node in read if node.op == "placeholder" and is_size(node)}
        needed = dict.fromkeys([*sorted(given, key=order.__getitem__), *read])
        outside = [n for n in needed if n.op != "get_attr" and place.get(n, -1) < number]
        takes = tuple(n for n in outside if not enters_autocast(n))
        # a user without an index is the output
        used = [
            n
            for n in group
            if _RETURNED in n.meta or any(place.get(u, end) > number for u in n.users)
        ]
        gives = tuple(n for n in used if not enters_autocast(n))
        found.append(Piece(gm, _piece(group, takes, gives, entered[number]), takes, gives))
    return found


def return_from_partition(node: Node) -> None:
    """Add a node to the outputs of its partition, even if no later partition reads the node."""
    node.meta[_RETURNED] = True


def return_if_read(node: Node) -> None:
    """Make a node an output of its partition only if a later partition or the whole graph's output
    reads the node.

    This call undoes `return_from_partition`."""
    node.meta.pop(_RETURNED, None)


_RETURNED = "memeff_returned_from_partition"


def is_size(node: Node) -> bool:
    """Return whether a node's value is a symbolic integer (SymInt), such as a tensor's size."""
    return isinstance(compat.example_value(node), torch.SymInt)


def size_inputs(gm: GraphModule) -> dict[str, Node]:
    """Return a mapping from the name of each size symbol in a graph to the first input whose size
    contains the symbol."""
    found: dict[str, Node] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if is_size(node):
            found.setdefault(str(compat.example_value(node)), node)
    return found


def enters_autocast(node: Node) -> bool:
    """Return whether a node opens an autocast region."""
    return getattr(node.target, "__name__", "") == "_enter_autocast"


def leaves_autocast(node: Node) -> bool:
    """Return whether a node closes an autocast region."""
    return getattr(node.target, "__name__", "") == "_exit_autocast"


def _piece(
    group: Sequence[Node], takes: Sequence[Node], gives: Sequence[Node], entered: Sequence[Node]
) -> Graph:
    graph, copies = Graph(), dict[Node, Node]()
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"example_value": compat.example_value(node)}
    open_now = list(entered)
    for node in entered:
        copies[node] = graph.node_copy(node)
    for node in group:
        for each in node.all_input_nodes:
            if each.op == "get_attr" and each not in copies:
                copies[each] = graph.node_copy(each)
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if enters_autocast(node):
            open_now.append(node)
        elif leaves_autocast(node):
            open_now.remove(node.args[0])  # type: ignore[arg-type]
    for node in reversed(open_now):
        graph.call_function(compat.leave_autocast, (copies[node],))
    graph.output(tuple(copies[node] for node in gives))
    return graph
