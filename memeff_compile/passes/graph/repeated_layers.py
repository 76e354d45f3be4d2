"""Find the repeated layers of a graph, so that the compiler compiles each distinct layer only once.

A model with 26 layers is captured as one graph with 26 copies of a layer, and compilers would
compile each copy. This module splits the graph between layers; equal partitions share one compiled
function, in the forward and in the backward pass.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.fx import Node

from ... import compat
from ...kernels.device import gpu
from ...report import Record
from .cuts import (
    Piece,
    block_of,
    candidates,
    crossed_by_tensors,
    is_size,
    path_of,
    return_from_partition,
    return_if_read,
    size_inputs,
    split,
)
from .graph_info import GraphInfo, levels_of
from .structure import with_names

LEAST = 4
"""The fewest equal layers for which the graph is cut; fewer are compiled with the rest of the
graph."""

FASTEST = {"cuda": 1e15, "blackwell": 2.5e15, "cpu": 1e11}
"""Floating-point operations per second that a GPU, or a thread of a CPU, does not exceed."""

SHORTEST = {"cuda": {True: 1.5e-3, False: 0.5e-3}, "cpu": {True: 20e-3, False: 10e-3}}
"""Seconds of a layer from which a call for each layer costs less than 1 %, with and without
gradients, if the layer ran at `FASTEST`.

On a GPU the host has to stay ahead: a layer takes it up to 1.7 ms in both directions, of them
0.36 ms for the calls (H200, `nvidia-h200/start.jsonl`), and layers run at less than half of
`FASTEST`. On a CPU the calls add 0.1 to 0.2 ms.
"""


@dataclass(frozen=True)
class Repeated:
    """The positions at which a graph is split between layers, or the reason why the graph is not
    split.
    """

    starts: tuple[Node, ...] = ()  # the first node of each partition except the first
    layers: int = 0  # partitions that share a compiled function with others
    kinds: int = 0  # the number of compiled functions that they share
    why_not: str = ""  # a code; empty for graphs with few layers


def repeated_layers(info: GraphInfo) -> Repeated:
    """Find the layers of a whole graph that are equal to one another, after the passes have run."""
    options = info.options
    if options.regions == "off" or options.inner == "eager" or info.parent is not None:
        return Repeated()
    residuals = _borders(info)
    borders = [border for border in residuals if border is not None]
    if len({block_of(node) for node in borders} - {""}) < LEAST:
        return Repeated()
    if options.regions == "auto" and _are_short(info, borders):
        return Repeated(why_not="layers_are_short")
    if compat.inputs_from_other_graphs(info.gm):
        return Repeated(why_not="graph_of_ddp")
    if compat.is_to_be_saved():
        return Repeated(why_not="graph_is_saved")
    if _writes_across(info, borders):
        return Repeated(why_not="layers_written_across")
    pieces = split(info.gm, set(borders))
    keys = _keys(info, pieces)
    if _equate_sizes(info, pieces, keys):
        keys = _keys(info, split(info.gm, set(borders)))
    count = Counter(keys)
    if max(count.values()) < LEAST:
        return Repeated(why_not="layers_differ")
    kept: list[Node] = []
    cut: list[Hashable] = []  # the partitions that consist of one layer
    triples = zip(keys, (None, *borders), (*borders, None), strict=True)
    for is_shared, each in groupby(triples, lambda triple: count[triple[0]] >= LEAST):
        run = list(each)
        found = [start for _, start, _ in (run if is_shared else run[:1])]
        kept += [start for start in found if start is not None]
        if is_shared or len(run) == 1:
            cut += [key for key, _, _ in run]
        else:
            for node in (node for _, _, end in run for node in residuals.get(end, ())):
                return_if_read(node)
    # Fewer equal layers share a function too if they lie between others.
    shared = [number for number in Counter(cut).values() if number > 1]
    return Repeated(tuple(kept), sum(shared), len(shared))


def _borders(info: GraphInfo) -> dict[Node | None, list[Node]]:
    """Return the first node of each layer, and the first node after each stack of layers.

    Each of these nodes is a key. The value of the key is a list of nodes. The partition that ends
    before the key returns the listed nodes (see `_give_residual`). The key None stands for the end
    of the graph.

    Without gradients, a layer's first normalization belongs to the partition of the previous layer.
    In that partition, the compiler fuses the normalization with the addition of the previous
    layer's result to the residual. If the graph were not split, the compiler would fuse the two as
    well.
    """
    nodes = candidates(info)
    allowed = crossed_by_tensors(info, nodes)
    blocks = [block_of(node) for node in nodes]
    ends = {_stack(block): place + 1 for place, block in enumerate(blocks) if block}.values()
    found: dict[Node | None, list[Node]] = {}
    current = ""
    for place, block in enumerate(blocks):
        # Nodes between two layers of a stack belong to the previous layer.
        if (block and block != current) or place in ends:
            current = block
            end = place if info.needs_grad else _after_norm(nodes, place)
            if end == len(nodes):  # the graph ends with this norm, which the last layer keeps
                found[None] = _give_residual(nodes, place, end)
                continue
            if nodes[end] not in allowed:
                end = place
            if place and nodes[end] in allowed and nodes[end] not in found:
                found[nodes[end]] = _give_residual(nodes, place, end)
    return found


def _give_residual(nodes: Sequence[Node], place: int, end: int) -> list[Node]:
    """Add a normalization's inputs to the outputs of the partition that contains the normalization.

    The graph is split between layers, and a partition contains the nodes between two splits. The
    normalization consists of the nodes from `place` to `end`. Only those inputs of the
    normalization that other nodes compute, such as the residual, become outputs of the partition.
    The function returns these inputs. The next layer reads the added outputs. After the last
    layer, no layer reads them, but the partition returns them too, so that all partitions have the
    same structure.
    """
    norm = {*nodes[place:end]}
    given = dict.fromkeys(each for node in norm for each in node.all_input_nodes)
    found = [n for n in given if n.op not in ("placeholder", "get_attr") and n not in norm]
    for node in found:
        return_from_partition(node)
    return found


def _after_norm(nodes: Sequence[Node], place: int) -> int:
    """Return the position after the normalization that begins at `place`.

    Return `place` if no normalization begins there. Every module without matrices counts as a
    normalization.
    """
    path = path_of(nodes[place])
    end = place
    while path and end < len(nodes) and path_of(nodes[end]) == path:
        given = map(compat.example_input, nodes[end].all_input_nodes)
        if any(isinstance(each, torch.nn.Parameter) and each.dim() > 1 for each in given):
            return place
        end += 1
    return end


def _are_short(info: GraphInfo, borders: Sequence[Node]) -> bool:
    """Return whether the layers run so fast that calling each layer's function separately may cost
    more than 1 % of the layers' run time.
    """
    layers = len({block_of(node) for node in borders} - {""})
    values = [value for value in map(info.tensor, info.placeholders) if value is not None]
    on_gpu = next((value.device for value in values if value.is_cuda), None)
    device = "cpu" if on_gpu is None else "cuda"
    speed = FASTEST[device] * (torch.get_num_threads() if on_gpu is None else 1)
    if on_gpu is not None and gpu(on_gpu).kind == "blackwell":
        speed = FASTEST["blackwell"]
    return _operations(info) / layers / speed < SHORTEST[device][info.needs_grad]


def _operations(info: GraphInfo) -> int:
    """Return the approximate number of floating-point operations of all linear layers inside the
    repeated layers.

    The function does not count other operations, such as attention, convolutions, and experts
    stored in one tensor.
    """
    total = 0
    for module in levels_of(info.gm):
        for node in module.graph.nodes:
            if node.op == "call_function" and (block_of(node) or module is not info.gm):
                total += _operations_of(node, needs_grad=info.needs_grad)
    return total


def _operations_of(node: Node, *, needs_grad: bool) -> int:
    """Return the number of floating-point operations of a node that is a linear layer, otherwise 0.

    A linear layer is the product of a weight (a matrix that is a graph input) and a tensor with a
    matching last axis.
    """
    result = _floating(node)
    if result is None or result.dim() < 2:
        return 0
    given = [each for each in map(_floating, node.all_input_nodes) if each is not None]
    width = compat.size_hint(result.shape[-1])
    depths = {compat.size_hint(each.shape[-1]) for each in given if each.dim() > 1}
    for weight in given:
        sizes = [compat.size_hint(size) for size in weight.shape]
        if len(sizes) != 2 or width not in sizes or not weight.is_leaf:
            continue
        depth = sizes[0] * sizes[1] // max(width, 1)
        if depth in depths:
            rows = math.prod(map(compat.size_hint, result.shape[:-1]))
            times = 1 + (1 + weight.requires_grad if needs_grad else 0)
            return 2 * rows * width * depth * times
    return 0


def _floating(node: Node) -> torch.Tensor | None:
    value = compat.example_value(node)
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value if is_floating else None


def _stack(block: str) -> str:
    """Return the path of a layer without the layer's number; all layers of one stack have the
    returned path in common."""
    return block.rstrip("_0123456789")


def _keys(info: GraphInfo, pieces: Sequence[Piece]) -> list[Hashable]:
    known = {node: compat.example_input(node) for node in info.placeholders}
    return [
        p.structure([known.get(node, compat.example_value(node)) for node in p.takes])
        for p in pieces
    ]


def _equate_sizes(info: GraphInfo, pieces: Sequence[Piece], keys: Sequence[Hashable]) -> bool:
    """Merge symbolic sizes that each layer has separately, such as the length of its KV cache.

    Sizes of two layers correspond if their names are equal without the layer number. If layers are
    equal apart from these sizes, and the sizes have equal values in the current call, the sizes are
    merged into one symbol. Guards make Dynamo compile the graph again if the sizes differ in a
    later call. Return whether at least two sizes were merged.
    """
    sizes = size_inputs(info.gm)
    if len(sizes) < LEAST:
        return False
    names = {
        symbol: f"{_ANY_LAYER.sub('#', compat.source_name(node))}={compat.size_hint(value)}"
        for symbol, node in sizes.items()
        if (value := compat.example_value(node)) is not None
    }
    alike: dict[Hashable, list[Piece]] = {}
    for piece, key in zip(pieces, keys, strict=True):
        alike.setdefault(with_names(key, names), []).append(piece)
    is_merged = False
    if max(map(len, alike.values())) < LEAST:
        return False
    for first, *others in alike.values():
        for other in others:
            for pair in zip(first.takes, other.takes, strict=True):
                one, two = map(compat.example_value, pair)
                if all(map(is_size, pair)) and str(one) != str(two):
                    is_merged |= compat.holds(one == two)
    if is_merged:
        sizes = size_inputs(info.gm)
        for node in filter(is_size, info.placeholders):
            first_of_all = sizes[str(compat.example_value(node))]
            if first_of_all is not node:
                node.replace_all_uses_with(first_of_all)
        info.gm.recompile()
    return is_merged


_ANY_LAYER = re.compile(r"(?<=[.\[])\d+(?=[\].]|$)(?<!\(\)\[\d)")
"""A number in the name of an input, but not that of a dimension, as in `keys.size()[2]`."""


def _writes_across(info: GraphInfo, borders: list[Node]) -> bool:
    """Return whether an in-place write may change a tensor that another layer computed.

    Writes by the layer that creates a tensor do not count, because they are finished before a later
    layer reads the tensor.
    """
    if not info.writes:
        return False
    begins = {node: place for place, node in enumerate(borders, 1)}
    place_of, place = dict[Node, int](), 0
    for node in info.gm.graph.nodes:
        place = begins.get(node, place)
        place_of[node] = place
    created: dict[int | None, int | None] = {_storage(node): None for node in info.placeholders}
    crossing = set()
    for node, at in place_of.items():
        if node.op != "placeholder":
            created.setdefault(_storage(node), at)
            if any(place_of[user] > at for user in node.users):
                crossing.add(_storage(node))
    for write in info.writes:
        for target in write.targets:
            storage = _storage(target)
            if storage is not None and created.get(storage) == place_of[write.node]:
                continue
            if storage in crossing or (info.needs_grad and _has_gradient(target)):
                return True
    return False


def _storage(node: Node) -> int | None:
    value = compat.example_value(node)
    return compat.storage_key(value) if isinstance(value, torch.Tensor) else None


def _has_gradient(node: Node) -> bool:
    value = compat.example_value(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


WHY_NOT = {
    "graph_of_ddp": (
        "DDP cuts the model at its buckets of gradients, and layers are not cut a second time.",
        "Set torch._dynamo.config.optimize_ddp = False to compile each distinct layer once.",
    ),
    "graph_is_saved": ("aot_compile saves a graph as a whole.", ""),
    "layers_are_short": (
        "a call for each layer would slow down a step this short, in which the GPU may wait for "
        "the host.",
        'Set memeff.regions to "on" if the first call matters more than later ones.',
    ),
    "layers_written_across": (
        "a layer writes in place to a tensor that another layer computes or that needs gradients.",
        "Use the out-of-place form in the layer: x = x + y instead of x += y.",
    ),
    "layers_differ": (
        f"no {LEAST} layers are equal in operations, constants, sizes, dtypes and strides.",
        "",
    ),
    "cuda_graphs_of_inductor": (
        "this mode records each compiled function as a CUDA graph of its own.",
        "Leave the mode out: a step of generation is recorded as one CUDA graph without it.",
    ),
}
"""The reasons why layers are compiled with the whole graph, by code: the sentence and the
remedy."""


def said(found: Repeated) -> Record | None:
    """Return a note for the compilation report, which says how many layers share how many compiled
    functions, or why the graph is not split.
    """
    if found.why_not:
        why, hint = WHY_NOT[found.why_not]
        return Record("backend", "declined", found.why_not, f"each layer is compiled: {why}", hint)
    if not found.starts:
        return None
    kinds = "1 kind" if found.kinds == 1 else f"{found.kinds} kinds"
    sentence = f"{found.layers} layers of {kinds}, each kind compiled once"
    return Record("backend", "note", "repeated_layers", sentence)


def undecided(error: Exception) -> Record:
    """Return a note that the graph is not split, because the search for layers raised an error."""
    why = f"searching for repeated layers failed with {type(error).__name__}: {error}"
    hint = "This is a bug of memeff_compile; the graph is compiled whole. Please report it."
    return Record("backend", "internal_error", "layers_failed", why, hint)
