"""The memory of one training step as formulas: every moment that can be the peak, and its parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sympy
import torch
from torch import nn
from torch.fx import GraphModule, Node

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

PER_BLOCK = ("block gradients", "activations", "logits")
"""The parts that grow with depth: what a block adds to them, each of its kind does."""

DRAWN = ("rand", "seed", "dropout", "bernoulli")
"""Words in the names of ops whose results each block has for itself."""

LIBRARY_WORKSPACES = 2 * 32 * 2**20
"""What cuBLAS keeps on a Hopper GPU: a workspace for forward's thread and one for backward's."""


@dataclass(frozen=True)
class Block:
    """One block of a captured model: its list, and its place among those that were captured."""

    stack: Stack
    place: int


_Key = TypeVar("_Key", str, tuple[str, Block | None])

Owned = dict[tuple[str, Block | None], sympy.Expr]
"""Bytes by part, and by the block that they belong to."""

_Place = tuple[str, Block | None, bool]
"""A phase, a block, and whether what runs is outside of it, next to it."""

_PartOf = Callable[[Node], tuple[str, Block | None]]


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
    captured: Capture,
    stacks: Sequence[Stack],
    scale: Scale,
    facts: Facts,
    *,
    after: bool,
    transient: Transient,
) -> Footprint:
    """Return the moments of a step at the model's full depth.

    Args:
        captured: the model, with the blocks that its stacks keep.
        stacks: the lists of blocks.
        after: with the passes, or without.
    """
    replay = _Replay(captured, scale, stacks, vocabularies(captured), transient)
    graphs = captured.after if after else captured.before
    replay.run([graphs[call.graph] for call in captured.calls])
    depth = _Depth(stacks, replay.kept, replay.produced)
    moments = [
        Moment(name, parts)
        for place, peaks in replay.peaks.items()
        for peak in peaks
        for name, parts in depth.moments(place, peak)
    ]
    kept = depth.outside(replay.kept)
    return Footprint(facts, tuple(_undominated(moments, scale)), kept)


@dataclass(frozen=True)
class _Depth:
    """Takes a moment of the captured blocks for those of the whole model.

    Args:
        stacks: the lists of blocks.
        kept: what exists when the forward ends.
        produced: what exists when the backward ends.
    """

    stacks: Sequence[Stack]
    kept: Owned
    produced: Owned

    def moments(self, place: _Place, found: Owned) -> Iterator[tuple[str, Parts]]:
        """Yield the name and the parts of a moment: of a block in between, at both of its ends."""
        phase, block, is_outside = place
        if block is None:
            yield (
                f"{phase}, {'outside the blocks' if self.stacks else 'the whole model'}",
                (self.outside(found)),
            )
        elif is_outside:
            index = block.stack.kept[block.place]
            next_to = f"outside the blocks, next to {block.stack.path}.{index}"
            yield f"{phase}, {next_to}", self.outside(found)
        else:
            alike = block.stack.alike(block.place)
            for index in dict.fromkeys((alike[0], alike[-1])):
                parts = self._inside(phase, block, index, found)
                yield f"{phase}, {block.stack.path}.{index}", parts

    def outside(self, found: Owned) -> Parts:
        """Return the parts of a moment that is in no block: each stands for all of its kind."""
        parts: Parts = {}
        for (part, owner), size in found.items():
            times = len(owner.stack.alike(owner.place)) if owner and part in PER_BLOCK else 1
            parts = _plus(parts, part, times * size)
        return _expanded(parts)

    def _inside(self, phase: str, block: Block, index: int, found: Owned) -> Parts:
        """Return the parts of a moment in the block at an index of the whole model."""
        parts: Parts = {}
        for (part, owner), size in found.items():
            is_same_list = owner is not None and owner.stack == block.stack
            if owner is None or is_same_list or part not in PER_BLOCK:
                parts = _plus(parts, part, size)
            else:
                parts = _plus(parts, part, len(owner.stack.alike(owner.place)) * size)
        zero = sympy.Integer(0)
        for place in range(len(block.stack.kept)):
            other = Block(block.stack, place)
            others = [i for i in block.stack.alike(place) if i != index]
            if place != block.place:
                others.remove(block.stack.kept[place])  # it is in what was found
            before = sum(i < index for i in others)
            for part in PER_BLOCK:
                key = (part, other)
                done, still = self.kept.get(key, zero), zero
                if phase == "backward":
                    still = self.produced.get(key, zero)
                now = found.get(key, zero)
                if place < block.place:
                    done = now
                if place > block.place:
                    still = now
                more = before * done + (len(others) - before) * still
                parts = _plus(parts, part, more)
        return _expanded(parts)


def _expanded(parts: Parts) -> Parts:
    found = {name: sympy.expand(formula) for name, formula in parts.items()}
    return {name: formula for name, formula in found.items() if formula != 0}


def _undominated(moments: Sequence[Moment], scale: Scale) -> Iterator[Moment]:
    """Yield the moments that are the largest at one of the points at least."""
    values = [scale.of(moment.total).values for moment in moments]
    best = {max(range(len(moments)), key=lambda m: values[m][p]) for p in range(len(scale.points))}
    yield from (moments[place] for place in sorted(best))


@dataclass
class _Replay:
    """Replays the graphs of one capture: forward in order, backward in reverse.

    `peaks` are the largest moments of each place, `kept` is what exists when the forward ends and
    `produced` what exists when the backward ends.
    """

    captured: Capture
    scale: Scale
    stacks: Sequence[Stack]
    vocabulary: frozenset[int]
    transient: Transient
    root: str = ""
    peaks: dict[_Place, list[Owned]] = field(default_factory=dict)
    kept: Owned = field(default_factory=dict)
    produced: Owned = field(default_factory=dict)

    def run(self, graphs: Sequence[Graphs]) -> None:
        given = [self.scale.bytes_of(tensor).formula for tensor in self.captured.inputs]
        inputs: Owned = {("inputs", None): sum(given, sympy.Integer(0))}
        held: dict[tuple[int, Node], tuple[tuple[str, Block | None], Size]] = {}
        forwards: list[Timeline] = []
        for number, pair in enumerate(graphs):
            line = Timeline(pair.forward, self.scale)
            forwards.append(line)
            self.root = self.captured.calls[number].root
            learned = self._learned(line, self.captured.calls[number].parameters)
            owners = self._owners(line.nodes)
            kept = {line.base[o] for o in line.outputs() if o is not None}
            before = self._sum(held.values(), inputs)

            def of(
                node: Node,
                line: Timeline = line,
                learned: set[Node] = learned,
                owners: Mapping[Node, Block | None] = owners,
            ) -> tuple[str, Block | None]:
                return self._forward_part(line, node, learned), owners[node]

            self._walk("forward", line.replay((), self.transient), before, of)
            for node in kept:
                if node.op != "placeholder":
                    part = self._forward_part(line, node, learned, kept=True)
                    size = self.scale.bytes_of(node.meta["val"])
                    held[(number, node)] = ((part, owners[node]), size)
        self.kept = self._sum(held.values(), inputs)
        learned_by: dict[str, tuple[tuple[str, Block | None], Size]] = {}
        for number in reversed(range(len(graphs))):
            backward = graphs[number].backward
            if backward is not None:
                self.root = self.captured.calls[number].root
                before = self._sum(learned_by.values(), inputs)
                self._backward(number, graphs[number], forwards[number], held, before)
                learned_by |= self._gradients_of(backward, number)
        self.produced = self._sum([*held.values(), *learned_by.values()], inputs)

    def _gradients_of(
        self, backward: GraphModule, number: int
    ) -> dict[str, tuple[tuple[str, Block | None], Size]]:
        """Return the gradients that a backward leaves, by the path of the parameter."""
        outputs = list(backward.graph.nodes)[-1].args[0]
        return {
            path: (self._gradient_part(path), self.scale.bytes_of(output.meta["val"]))
            for output, path in zip(outputs, self.captured.calls[number].parameters, strict=False)
            if path and isinstance(output, Node)
        }

    def _backward(
        self,
        number: int,
        pair: Graphs,
        forward: Timeline,
        held: dict[tuple[int, Node], tuple[tuple[str, Block | None], Size]],
        before: Owned,
    ) -> None:
        assert pair.backward is not None
        given = _placeholders(pair.backward.graph.nodes)
        tangents = [n for n in given if n.name.startswith("tangents")]
        by_name = {n.name: n for n in forward.nodes}
        outputs = forward.outputs()
        handed = outputs[: len(outputs) - (len(given) - len(tangents))]
        returned = {forward.base[output] for output in handed if output is not None}
        same: dict[Node, Node] = {}
        owned: dict[Node, tuple[str, Block | None]] = {}
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
                owned[node], _ = held.pop((number, base))
        line = Timeline(pair.backward, self.scale, same)
        gradients = self._gradients(line, number)
        owners = self._owners(line.nodes)
        before = self._sum(held.values(), before)
        for node in tangents:
            size = self.scale.bytes_of(node.meta["val"])
            before = _plus(before, (self._part_of_size(node, "activations"), None), size.formula)

        def of(node: Node) -> tuple[str, Block | None]:
            found = owned.get(node) or gradients.get(node)
            return found or (self._part_of_size(node, "working"), owners[node])

        self._walk("backward", line.replay(list(owned), self.transient), before, of)
        for key in [key for key in held if key[0] == number]:
            del held[key]

    # --- parts ------------------------------------------------------------------------------------

    def _sum(self, sizes: Iterable[tuple[tuple[str, Block | None], Size]], before: Owned) -> Owned:
        counts: dict[tuple[tuple[str, Block | None], sympy.Expr], int] = {}
        for key, size in sizes:
            counts[key, size.formula] = counts.get((key, size.formula), 0) + 1
        parts = dict(before)
        for (key, formula), count in counts.items():
            parts = _plus(parts, key, count * formula)
        return parts

    def _learned(self, line: Timeline, paths: Sequence[str]) -> set[Node]:
        """Return the nodes that depend on a parameter, or are drawn by chance: the others are
        masks, positions, targets, which all blocks share.
        """
        given = zip(_placeholders(line.nodes), paths, strict=False)
        found = {node for node, path in given if path}
        for node in line.nodes:
            is_drawn = any(word in op_name(node) for word in DRAWN)
            if is_drawn or any(source in found for source in node.all_input_nodes):
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
            has_classes = any(compat.size_hint(size) in self.vocabulary for size in tensor.shape)
            if has_classes and self.scale.is_per_token(tensor):
                return "logits"
        return otherwise

    def _gradient_part(self, path: str) -> tuple[str, Block | None]:
        block = self._block_at(path)
        return ("other gradients" if block is None else "block gradients"), block

    def _gradients(self, line: Timeline, number: int) -> dict[Node, tuple[str, Block | None]]:
        """Return the buffers of the backward that are gradients of parameters, or become them."""
        found: dict[Node, tuple[str, Block | None]] = {}
        for output, path in zip(
            line.outputs(), self.captured.calls[number].parameters, strict=False
        ):
            if output is None or not path:
                continue
            part = self._gradient_part(path)
            queue = [line.base[output]]
            while queue:
                node = queue.pop()
                if node in found or node.op == "placeholder":
                    continue
                found[node] = part
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

    def _walk(self, phase: str, steps: Iterator[Step], before: Owned, part_of: _PartOf) -> None:
        """Note, per place, the parts of its largest moments."""
        found: dict[_Place, list[Owned]] = {}
        best: dict[_Place, list[tuple[int, int]]] = {}
        block: Block | None = None
        for step in steps:
            block, is_outside = self._where(step.kernel.nodes, block)
            here = (phase, block, is_outside)
            if here not in best:
                found[here], best[here] = [], [(-1, -1)] * len(self.scale.points)
            better = [p for p, value in enumerate(step.total) if value > best[here][p][0]]
            if better:
                found[here].append(self._parts(step, before, part_of))
                for p in better:
                    best[here][p] = (step.total[p], len(found[here]) - 1)
        for here, parts in found.items():
            chosen = sorted({which for _, which in best[here] if which >= 0})
            self.peaks.setdefault(here, []).extend(parts[which] for which in chosen)

    def _parts(self, step: Step, before: Owned, part_of: _PartOf) -> Owned:
        parts = self._sum(((part_of(node), size) for node, size in step.live.items()), before)
        if step.transient:
            is_loss = any(_is_ours(n) and not _is_in_a_block(n) for n in step.kernel.nodes)
            part = "loss workspace" if is_loss else "working"
            parts = _plus(parts, (part, None), step.transient)
        return parts

    def _where(self, nodes: Sequence[Node], block: Block | None) -> tuple[Block | None, bool]:
        """Return the block that runs, or the last one and that what runs is outside of it."""
        for node in nodes:
            seen = self._block_of(node)
            if seen is not None:
                return seen, False
            if block is not None and _module_path(node) is not None:
                return block, True
        return block, False

    def _owners(self, nodes: Iterable[Node]) -> dict[Node, Block | None]:
        """Return the block of each node: that of the node before, where it does not say."""
        found: dict[Node, Block | None] = {}
        last: Block | None = None
        for node in nodes:
            last = self._block_of(node) or (last if _module_path(node) is None else None)
            found[node] = last
        return found

    def _block_of(self, node: Node) -> Block | None:
        path = _module_path(node)
        return None if path is None else self._block_at(f"{self.root}.{path}".strip("."))

    def _block_at(self, path: str) -> Block | None:
        for stack in self.stacks:
            match = re.match(rf"{re.escape(stack.path)}\.(\d+)(\.|$)", path)
            if match:
                return Block(stack, int(match[1]))
        return None


def _plus(parts: dict[_Key, sympy.Expr], key: _Key, formula: sympy.Expr) -> dict[_Key, sympy.Expr]:
    return {**parts, key: parts.get(key, sympy.Integer(0)) + formula}


def _placeholders(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op == "placeholder"]


def _may_hold_a_part(node: Node) -> bool:
    """Return whether a gradient is another gradient, rounded, added to or written to."""
    if op_name(node) in ("add", "convert_element_type", "_to_copy"):
        return True
    maker = node.args[0] if node.args else None
    return isinstance(maker, Node) and writes_to_an_input(maker)


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
