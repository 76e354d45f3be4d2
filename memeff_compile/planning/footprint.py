"""The memory of one training step as formulas: every moment that can be the peak, and its parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Node

from .. import compat
from ..kernels import attention as attention_folder
from ..kernels import embedding as embedding_folder
from ..kernels import gated_linear as gated_folder
from ..kernels import linear_cross_entropy as op_folder
from ..kernels.device import planned_for
from ..passes.graph.module_names import clean_module_path
from .capture import Capture, Graphs
from .depth import Stack
from .setting import Facts, Footprint, Moment
from .sizes import Scale, Size, tensors_in
from .timeline import Step, Timeline, Transient, called_op, op_name, writes_to_an_input

Parts = dict[str, sympy.Expr]
_PartOf = Callable[[Node], str]

PERSISTENT = ("block gradients", "other gradients", "activations", "inputs")
"""The parts that grow with depth: what one more block adds to them, it adds to any moment."""

LIBRARY_WORKSPACES = 2 * 32 * 2**20
"""What cuBLAS keeps on a Hopper GPU: a workspace for forward's thread and one for backward's."""


@dataclass(frozen=True)
class Place:
    """A stretch of a step: a phase, the block that runs, and the end of the model it is near."""

    phase: str
    graph: int
    where: str
    end: str

    def __str__(self) -> str:
        return f"{self.phase}, {self.where}"


@dataclass(frozen=True)
class Block:
    """One block of a captured model."""

    stack: Stack
    index: int


@dataclass
class Stretch:
    """The moments of one place that are the largest at some point, and the parts on entry."""

    entry: Parts
    peaks: list[Parts]


@dataclass
class Run:
    """One depth of one variant, replayed."""

    stretches: dict[Place, Stretch] = field(default_factory=dict)
    kept: Parts = field(default_factory=dict)


def facts_of(model: object, stacks: Sequence[Stack], device: str) -> Facts:
    """Count the bytes of a model's parameters and buffers; parameters of blocks apart."""
    library = LIBRARY_WORKSPACES if device == "cuda" else 0
    if not isinstance(model, nn.Module):
        return Facts(0, 0, 0, 0, 0, 0, 0, library)
    in_blocks: set[int] = set()
    largest = 0
    for stack in stacks:
        blocks = model.get_submodule(stack.path)
        for block in blocks.children():
            sizes = {id(p): p.nbytes for p in block.parameters()}
            largest = max(largest, sum(sizes.values()))
            in_blocks |= set(sizes)
    unique = {id(p): p for p in model.parameters()}.values()
    buffers = {id(b): b for b in model.buffers()}.values()
    trained = [p for p in unique if p.requires_grad]
    return Facts(
        weights=sum(p.nbytes for p in unique),
        block_weights=sum(p.nbytes for p in unique if id(p) in in_blocks),
        largest_block=largest,
        buffers=sum(b.nbytes for b in buffers),
        parameters=sum(p.numel() for p in unique),
        trained=sum(p.numel() for p in trained),
        trained_bytes=sum(p.nbytes for p in trained),
        library=library,
    )


def vocabularies(captured: Capture) -> frozenset[int]:
    """Return the vocabulary sizes of the losses, rewritten or not."""
    seen = (r.sizes["V"] for g in captured.reports for r in g.records if "V" in r.sizes)
    return frozenset({*seen, *captured.classes})


def footprint(
    captures: Sequence[Capture],
    stacks: Sequence[Stack],
    scale: Scale,
    facts: Facts,
    *,
    after: bool,
    transient: Transient,
) -> Footprint:
    """Return the moments of a step at the model's full depth.

    Args:
        captures: the whole model, or the model at its small and its large depth; what a block
            adds is read off the graphs with the passes, unless these change the blocks.
        stacks: the lists of blocks that were shortened.
        after: with the passes, or without.
    """
    vocabulary = vocabularies(captures[-1])

    def replayed(captured: Capture, is_large: bool, graphs: Sequence[Graphs]) -> Run:
        depths = {s.path: s.large if is_large else s.small for s in stacks}
        return _Replay(captured, scale, stacks, depths, vocabulary, transient).run(graphs)

    is_alike = after or not captures[-1].changes_blocks
    small = replayed(captures[0], False, captures[0].after if is_alike else captures[0].before)
    deep = replayed(captures[-1], True, captures[-1].after if is_alike else captures[-1].before)
    wanted = deep if after else replayed(captures[-1], True, captures[-1].before)
    rest = stacks[0].rest if stacks else 0
    slopes = {place: _slope(place, small, deep) for place in wanted.stretches}
    moments = [
        Moment(str(place), _deepened(parts, slopes[place], rest))
        for place, stretch in wanted.stretches.items()
        for parts in stretch.peaks
    ]
    kept = _deepened(wanted.kept, _difference(deep.kept, small.kept), rest)
    return Footprint(facts, tuple(_undominated(moments, scale)), kept)


def _difference(large: Parts, small: Parts) -> Parts:
    zero = sympy.Integer(0)
    return {name: large.get(name, zero) - small.get(name, zero) for name in PERSISTENT}


def _deepened(parts: Parts, slope: Parts, rest: int) -> Parts:
    names = dict.fromkeys([*parts, *(slope if rest else {})])
    zero = sympy.Integer(0)
    grown = {n: sympy.expand(parts.get(n, zero) + rest * slope.get(n, zero)) for n in names}
    return {name: formula for name, formula in grown.items() if formula != 0}


def _slope(place: Place, small: Run, large: Run) -> Parts:
    """Return what one more period adds on entry to a place, or to the nearest one that both have.

    A middle block exists at the large depth only; the ends on its side grow as it does.
    """
    if place not in small.stretches:
        key = (place.phase, place.graph, place.end)
        alike = [p for p in small.stretches if (p.phase, p.graph, p.end) == key]
        place = alike[0] if alike else place
    if place not in small.stretches or place not in large.stretches:
        return {}
    return _difference(large.stretches[place].entry, small.stretches[place].entry)


def _undominated(moments: Sequence[Moment], scale: Scale) -> Iterator[Moment]:
    """Yield the moments that are the largest at one of the points at least."""
    values = [scale.of(moment.total).values for moment in moments]
    best = {max(range(len(moments)), key=lambda m: values[m][p]) for p in range(len(scale.points))}
    yield from (moments[place] for place in sorted(best))


@dataclass
class _Replay:
    """Replays the graphs of one capture: forward in order, backward in reverse."""

    captured: Capture
    scale: Scale
    stacks: Sequence[Stack]
    depths: Mapping[str, int]
    vocabulary: frozenset[int]
    transient: Transient
    found: Run = field(default_factory=Run)

    def run(self, graphs: Sequence[Graphs]) -> Run:
        held: dict[tuple[int, Node], tuple[str, Size]] = {}
        forwards: list[Timeline] = []
        for number, pair in enumerate(graphs):
            line = Timeline(pair.forward, self.scale)
            forwards.append(line)
            learned = self._learned(line, self.captured.parameters[number])
            kept = {line.base[o] for o in line.outputs() if o is not None}
            before = self._sum(held.values())
            if not number:
                before = _plus(before, "inputs", self._inputs(line, number))

            def of(node: Node, line: Timeline = line, learned: set[Node] = learned) -> str:
                return self._forward_part(line, node, learned)

            self._walk("forward", number, line.replay((), self.transient), before, of)
            for node in kept:
                if node.op != "placeholder":
                    part = self._forward_part(line, node, learned, kept=True)
                    held[(number, node)] = (part, self.scale.bytes_of(node.meta["val"]))
        self.found.kept = self._sum(held.values())
        for number in reversed(range(len(graphs))):
            backward = graphs[number].backward
            if backward is not None:
                self._backward(number, graphs[number], forwards[number], held)
        return self.found

    def _inputs(self, line: Timeline, number: int) -> sympy.Expr:
        paths = self.captured.parameters[number]
        given = zip(_placeholders(line.nodes), paths, strict=False)
        own = [node for node, path in given if not path and not _is_static(node)]
        return sum((self.scale.bytes_of(n.meta.get("val")).formula for n in own), sympy.Integer(0))

    def _backward(
        self,
        number: int,
        pair: Graphs,
        forward: Timeline,
        held: dict[tuple[int, Node], tuple[str, Size]],
    ) -> None:
        assert pair.backward is not None
        given = _placeholders(pair.backward.graph.nodes)
        tangents = [n for n in given if n.name.startswith("tangents")]
        by_name = {n.name: n for n in forward.nodes}
        outputs = forward.outputs()
        handed = outputs[: len(outputs) - (len(given) - len(tangents))]
        returned = {forward.base[output] for output in handed if output is not None}
        same: dict[Node, Node] = {}
        owned: dict[Node, tuple[str, Size]] = {}
        first: dict[Node, Node] = {}
        for node in given:
            made = by_name.get(node.name)
            if made is None or made.op == "placeholder" or not tensors_in(node.meta.get("val")):
                continue
            base = forward.base[made]
            if base.op == "placeholder":
                continue
            if base in first:
                same[node] = first[base]
                continue
            first[base] = node
            if base not in returned and (number, base) in held:
                owned[node] = held.pop((number, base))
        line = Timeline(pair.backward, self.scale, same)
        gradients = self._gradients(line, number)
        before = self._sum(held.values())
        for node in tangents:
            size = self.scale.bytes_of(node.meta["val"])
            before = _plus(before, self._part_of_size(node, "activations"), size.formula)

        def of(node: Node) -> str:
            if node in owned:
                return owned[node][0]
            return gradients.get(node) or self._part_of_size(node, "working")

        steps = line.replay(list(owned), self.transient)
        self._walk("backward", number, steps, before, of)
        for key in [key for key in held if key[0] == number]:
            del held[key]

    # --- parts ------------------------------------------------------------------------------------

    def _sum(self, sizes: Iterable[tuple[str, Size]]) -> Parts:
        parts: Parts = {}
        for part, size in sizes:
            parts = _plus(parts, part, size.formula)
        return parts

    def _learned(self, line: Timeline, paths: Sequence[str]) -> set[Node]:
        """Return the nodes that depend on a parameter: the others are masks, positions, targets."""
        given = zip(_placeholders(line.nodes), paths, strict=False)
        found = {node for node, path in given if path}
        for node in line.nodes:
            if any(source in found for source in node.all_input_nodes):
                found.add(node)
        return found

    def _forward_part(
        self, line: Timeline, node: Node, learned: set[Node], *, kept: bool = False
    ) -> str:
        is_kept = kept or line.last_read.get(node) == len(line.kernels)
        if not is_kept:
            return self._part_of_size(node, "working")
        return self._part_of_size(node, "activations" if node in learned else "inputs")

    def _part_of_size(self, node: Node, otherwise: str) -> str:
        for tensor in tensors_in(node.meta.get("val")):
            sizes = [size for size in tensor.shape if isinstance(size, int)]
            is_symbolic = len(sizes) < tensor.dim()
            rows = self.scale.elements(tensor).free_symbols
            if (is_symbolic or rows) and self.vocabulary & set(sizes):
                return "logits"
        return otherwise

    def _gradients(self, line: Timeline, number: int) -> dict[Node, str]:
        """Return the buffers of the backward that are gradients of parameters, or become them."""
        found: dict[Node, str] = {}
        for output, path in zip(line.outputs(), self.captured.parameters[number], strict=False):
            if output is None or not path:
                continue
            module = clean_module_path(path).replace("._parameters", "").replace("._buffers", "")
            in_block = any(module.startswith(f"{stack}.") for stack in self.depths)
            queue = [line.base[output]]
            while queue:
                node = queue.pop()
                if node in found or node.op == "placeholder":
                    continue
                found[node] = "block gradients" if in_block else "other gradients"
                if _may_hold_a_part(node):
                    wanted = self.scale.elements(node.meta["val"])
                    for buffer in self._read_by(line, node) - {node}:
                        value = buffer.meta.get("val")
                        if isinstance(value, torch.Tensor) and self.scale.elements(value) == wanted:
                            queue.append(buffer)
        return found

    def _read_by(self, line: Timeline, node: Node) -> set[Node]:
        """Return the buffers that a value is made from; an element of a tuple is its maker's."""
        maker = node.args[0] if line.kind[node] == "view" else node
        assert isinstance(maker, Node)
        return line.reads[maker]

    # --- places -----------------------------------------------------------------------------------

    def _walk(
        self, phase: str, number: int, steps: Iterator[Step], before: Parts, part_of: _PartOf
    ) -> None:
        """Note, per place, the parts on entry and those of the largest moments."""
        place: Place | None = None
        stretches: dict[Place, list[Parts]] = {}
        best: dict[Place, list[tuple[int, int]]] = {}
        block: Block | None = None
        for step in steps:
            block, where = self._where(step.kernel.nodes, block)
            here = Place(phase, number, where, self._end(block))
            if here != place and here not in self.found.stretches:
                entry = self._parts(step, before, part_of)
                self.found.stretches[here] = Stretch(entry, [])
                stretches[here], best[here] = [], [(-1, -1)] * len(self.scale.points)
            place = here
            if here not in best:
                continue
            better = [p for p, value in enumerate(step.total) if value > best[here][p][0]]
            if better:
                stretches[here].append(self._parts(step, before, part_of))
                for p in better:
                    best[here][p] = (step.total[p], len(stretches[here]) - 1)
        for here, parts in stretches.items():
            chosen = sorted({which for _, which in best[here] if which >= 0})
            self.found.stretches[here].peaks = [parts[which] for which in chosen]

    def _parts(self, step: Step, before: Parts, part_of: _PartOf) -> Parts:
        sums: dict[str, dict[sympy.Expr, int]] = {}
        for node, size in step.live.items():
            counts = sums.setdefault(part_of(node), {})
            counts[size.formula] = counts.get(size.formula, 0) + 1
        parts = dict(before)
        for part, counts in sums.items():
            total = sum((count * formula for formula, count in counts.items()), sympy.Integer(0))
            parts = _plus(parts, part, total)
        if step.transient:
            is_loss = any(_is_ours(n) and not _is_in_a_block(n) for n in step.kernel.nodes)
            parts = _plus(parts, "loss workspace" if is_loss else "working", step.transient)
        return parts

    def _where(self, nodes: Sequence[Node], block: Block | None) -> tuple[Block | None, str]:
        """Return the block that runs (the last one seen, between blocks) and a place's name."""
        for node in nodes:
            seen = self._block_of(node)
            if seen is not None:
                return seen, self._name(seen)
            if block is not None and _module_path(node) is not None:
                return block, f"outside the blocks, next to {self._name(block)}"
        if block is None:
            return None, "outside the blocks" if self.stacks else "the whole model"
        return block, self._name(block)

    def _end(self, block: Block | None) -> str:
        if block is None:
            return "first"
        return "first" if 2 * block.index < self.depths[block.stack.path] else "last"

    def _name(self, block: Block) -> str:
        """Return the block's path in the model at its full depth."""
        hidden = block.stack.depth - self.depths[block.stack.path]
        index = block.index + (hidden if self._end(block) == "last" else 0)
        return f"{block.stack.path}.{index}"

    def _block_of(self, node: Node) -> Block | None:
        path = _module_path(node) or ""
        for stack in self.stacks:
            match = re.match(rf"{re.escape(stack.path)}\.(\d+)(\.|$)", path)
            if match:
                return Block(stack, int(match[1]))
        return None


def _plus(parts: Parts, name: str, formula: sympy.Expr) -> Parts:
    return {**parts, name: parts.get(name, sympy.Integer(0)) + formula}


def _placeholders(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op == "placeholder"]


def _may_hold_a_part(node: Node) -> bool:
    """Return whether a gradient is another gradient, rounded, added to or written to."""
    if op_name(node) in ("add", "convert_element_type", "_to_copy"):
        return True
    maker = node.args[0] if node.args else None
    return isinstance(maker, Node) and writes_to_an_input(maker)


def _is_static(node: Node) -> bool:
    """Return whether an input has the same size in every call: a buffer, not the user's data."""
    return all(isinstance(size, int) for t in tensors_in(node.meta.get("val")) for size in t.shape)


def _module_path(node: Node) -> str | None:
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if stack:
            entry = list(stack.values())[-1]
            return clean_module_path(entry[0] if isinstance(entry, tuple) else str(entry))
    return None


def op_transient(scale: Scale, device: str) -> Transient:
    """Return a function that says what an op holds while it runs, beside its results."""
    known = {
        "linear_cross_entropy": _loss_transient,
        "linear_cross_entropy_backward": _loss_transient,
        "linear_cross_entropy_total": _loss_transient,
        "embedding_backward": _embedding_transient,
        "embedding_accumulate": _embedding_transient,
        "gated_linear": _gated_transient,
        "gated_linear_backward": _gated_transient,
        "attention_backward": _own_attention_transient,
    }

    def transient(node: Node) -> sympy.Expr:
        if not _is_ours(node):
            return _attention_transient(scale, device, node)
        op = called_op(node)
        name = compat.schema(op).name.rpartition("::")[2]
        with planned_for(torch.device(device, 0)):
            formula = known.get(name)
            return formula(scale, device, name, _arguments(node)) if formula else sympy.Integer(0)

    return transient


def _is_ours(node: Node) -> bool:
    return getattr(called_op(node), "namespace", "") == "memeff"


def _is_in_a_block(node: Node) -> bool:
    name = str(called_op(node))
    return "gated_linear" in name or "memeff.attention" in name


def _attention_transient(scale: Scale, device: str, node: Node) -> sympy.Expr:
    """Return what a GPU's fused attention sums the gradient of its queries in: fp32."""
    name = op_name(node)
    if device != "cuda" or not name.startswith("_scaled_dot_product") or "backward" not in name:
        return sympy.Integer(0)
    query = node.args[1]
    assert isinstance(query, Node)
    return 4 * scale.elements(query.meta["val"])


# How much an op of ours holds: by the scale, the device, the op's name and its arguments.


def _loss_transient(scale: Scale, device: str, name: str, given: Mapping[str, Any]) -> sympy.Expr:
    hidden, weight = given["hidden"].meta["val"], given["weight"].meta["val"]
    vocab, depth = (int(size) for size in weight.shape)
    rows, has_softcap = scale.rows(hidden), bool(given["softcap"])
    workspace, with_entropy = given["workspace"], bool(given.get("with_entropy"))
    if name == "linear_cross_entropy_total":
        held = op_folder.total_bytes(
            rows,
            depth,
            vocab,
            dtype=hidden.dtype,
            device=hidden.device,
            workspace=workspace,
            has_softcap=has_softcap,
        )
        return held + op_folder.TOTAL_BYTES_PER_ROW * rows
    kind = (hidden.device, hidden.dtype, depth)
    return op_folder.bytes_after(
        rows,
        depth,
        vocab,
        dtype=hidden.dtype,
        engine=op_folder.engine_for(*kind, with_top=bool(given.get("with_top"))),
        device_type=device,
        workspace=workspace,
        has_softcap=has_softcap,
        with_entropy=with_entropy,
        training=name.endswith("backward"),
    )


def _embedding_transient(scale: Scale, _: str, __: str, given: Mapping[str, Any]) -> sympy.Expr:
    rows = given["grad_rows"].meta["val"]
    engine = embedding_folder.engine_for(rows.device, rows.dtype)
    size = (scale.rows(rows), int(rows.shape[-1]))
    return embedding_folder.bytes_after(*size, dtype=rows.dtype, engine=engine)


def _gated_transient(scale: Scale, _: str, name: str, given: Mapping[str, Any]) -> sympy.Expr:
    """Return the product's bytes, or those of its gradient: one row per row of what is known."""
    rows = given["grad_out" if name.endswith("backward") else "gate"].meta["val"]
    inner = int(given["weight"].meta["val"].shape[-1])
    return gated_folder.transient_bytes(scale.rows(rows), inner, dtype=rows.dtype)


def _own_attention_transient(scale: Scale, _: str, __: str, given: Mapping[str, Any]) -> sympy.Expr:
    """Return the bytes of one number per query, of which the lse has one each."""
    return attention_folder.backward_bytes(scale.elements(given["lse"].meta["val"]), 1, 1)


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of ours by name."""
    op: Any = called_op(node)
    given = node.args[1:] if op is node.args[0] else node.args
    named = zip((argument.name for argument in compat.schema(op).arguments), given, strict=False)
    return {**dict(named), **node.kwargs}
