"""Compute the memory of one training step as formulas in batch size and length.

There is a formula for each moment of the step at which the memory can be largest."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import sympy
import torch
from torch import nn
from torch.fx import GraphModule, Node

from .. import compat
from ..kernels import attention as attention_folder
from ..kernels import embedding as embedding_folder
from ..kernels import gated_linear as gated_folder
from ..kernels import linear_cross_entropy as op_folder
from ..kernels import linear_divergence as divergence_folder
from ..passes.graph.module_names import clean_module_path
from .capture import Capture, Graphs
from .cards import Target
from .depth import Stack
from .setting import Facts, Footprint, Moment, Parts
from .sizes import Scale, Size, tensors_in
from .timeline import Step, Timeline, Transient, called_op, op_name, writes_to_an_input

PER_BLOCK = ("block gradients", "activations", "logits")
"""The parts that grow with depth: each block of a kind adds the same bytes to them."""

DRAWN = ("rand", "seed", "dropout", "bernoulli")
"""Words in the names of ops whose results are separate for each block."""

LOSSES = tuple(
    f"linear_cross_entropy{kind}" for kind in ("", "_backward", "_total", "_shard", "_total_shard")
)


@dataclass(frozen=True)
class Block:
    """A block of a model, such as a layer, that was captured (traced into a graph).

    A block is identified by the list of blocks that contains the block, and by an index among the
    captured blocks of this list."""

    stack: Stack
    place: int

    @property
    def alike(self) -> tuple[int, ...]:
        """Return the indices of the blocks (layers) of the whole model that this block represents.

        Their tensors have the same sizes as the tensors of this block, which was traced."""
        return self.stack.alike(self.place)


_Part = tuple[str, Block | None]
"""The kind of bytes, and the block that they belong to."""

Owned = defaultdict[_Part, sympy.Expr]

_Place = tuple[str, Block | None, bool]
"""A phase, a block, and whether the running op is next to the block instead of inside."""

_PartOf = Callable[[Node], _Part]


def facts_of(model: object, stacks: Sequence[Stack], library: int) -> Facts:
    """Count the bytes of a model's parameters and buffers, separately for each block."""
    if not isinstance(model, nn.Module):
        return Facts(0, 0, 0, 0, 0, 0, 0, library)
    every = list(model.parameters())
    blocks = [list(b.parameters()) for s in stacks for b in model.get_submodule(s.path).children()]
    trained = [p for p in every if p.requires_grad]
    linear = _compressible(model)
    inside = {id(p) for block in blocks for p in block}
    outside = [p for p in linear if id(p) not in inside]
    return Facts(
        weights=_bytes(every),
        block_weights=_bytes({id(p): p for block in blocks for p in block}.values()),
        largest_block=max(map(_bytes, blocks), default=0),
        buffers=_bytes(model.buffers()),
        parameters=sum(p.numel() for p in every),
        trained=sum(compat.local_part(p).numel() for p in trained),
        trained_bytes=_bytes(trained),
        library=library,
        ranks=max((_ranks(parameter) for parameter in every), default=1),
        linear=_bytes(linear),
        linear_trained=_bytes(p for p in linear if p.requires_grad),
        largest_linear=max((p.nbytes for p in linear if id(p) in inside), default=0),
        largest_outside=max((p.nbytes for p in outside), default=0),
    )


def _compressible(model: nn.Module) -> list[torch.Tensor]:
    from ..model.weights.compress import compressible

    return compressible(model)


def _ranks(parameter: torch.Tensor) -> int:
    mesh: Any = getattr(parameter, "device_mesh", None)
    return 1 if mesh is None else int(mesh.size())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(compat.local_part(tensor).nbytes for tensor in tensors)


def vocabularies(captured: Capture) -> frozenset[int]:
    """Return the vocabulary sizes of all losses in a model's traced graphs, whether or not a pass
    rewrote the losses."""
    seen = (r.sizes["V"] for g in captured.reports for r in g.records if "V" in r.sizes)
    return frozenset({*seen, *captured.classes})


def footprint(
    captured: Capture,  # the model, with the blocks that its stacks keep
    graphs: Sequence[Graphs],  # of it, with the passes or without
    stacks: Sequence[Stack],
    scale: Scale,
    facts: Facts,
    transient: Transient,
    *,
    is_cut: bool,  # whether graphs are split between blocks if weights are updated in backward
) -> Footprint:
    """Return the moments of a step at which the memory of the whole model, with all of its blocks,
    can be largest."""
    called = [graphs[call.graph] for call in captured.calls]
    parts = (captured, scale, stacks, vocabularies(captured), transient)
    replay = _Replay(*parts)
    replay.run(called)
    moments = _largest(replay)
    in_backward: tuple[Moment, ...] = ()
    if is_cut and any(pair.backward is not None for pair in called):
        stepped = _Replay(*parts, steps_in_backward=True)
        stepped.run(called)
        in_backward = _largest(stepped)
    return Footprint(facts, moments, _outside(replay.kept), in_backward)


def _largest(replay: _Replay) -> tuple[Moment, ...]:
    """Return the moments at which memory is largest for at least one batch and length.

    While compressed weights are used, a decoded copy of one weight needs memory. Two moments are
    compared only if such copies take the same number of bytes in both.
    """
    scale = replay.scale
    every = [
        moment
        for place, peaks in replay.peaks.items()
        for peak in peaks
        for moment in replay.in_the_whole_model(place, peak)
    ]
    best: set[int] = set()
    for runs in dict.fromkeys(moment.runs for moment in every):
        values = {m: scale.of(e.total).values for m, e in enumerate(every) if e.runs == runs}
        best |= {max(values, key=lambda m: values[m][p]) for p in range(len(scale.points))}
    return tuple(every[m] for m in sorted(best))


def _outside(found: Owned) -> Parts:
    """Return the bytes of all tensors at a moment of the step when no block runs, by kind of
    tensor.

    A captured (traced) block may represent several equal blocks of the model. The bytes of a tensor
    that belongs to this block are then multiplied by the number of these blocks.
    """
    parts: dict[str, sympy.Expr] = defaultdict(int)
    for (part, owner), size in found.items():
        parts[part] += size * (len(owner.alike) if owner and part in PER_BLOCK else 1)
    return _expanded(parts)


def _expanded(parts: Parts) -> Parts:
    found = {name: sympy.expand(formula) for name, formula in parts.items()}
    return {name: formula for name, formula in found.items() if formula != 0}


@dataclass
class _Replay:
    """Computes the memory during a training step from the traced graphs of one model.

    The replay goes through the forward graphs, then through the backward graphs in reverse
    order."""

    captured: Capture
    scale: Scale
    stacks: Sequence[Stack]
    vocabulary: frozenset[int]
    transient: Transient
    # whether a gradient is freed when the backward of its block has ended
    steps_in_backward: bool = False
    root: str = ""
    peaks: dict[_Place, list[Owned]] = field(default_factory=lambda: defaultdict(list))
    # the buffers that exist when the forward ends, and when the backward does
    kept: Owned = field(default_factory=lambda: defaultdict(int))
    produced: Owned = field(default_factory=lambda: defaultdict(int))

    def run(self, graphs: Sequence[Graphs]) -> None:
        given = [self.scale.bytes_of(tensor).formula for tensor in self.captured.inputs]
        inputs: Owned = defaultdict(int, {("inputs", None): sum(given)})
        held: dict[tuple[int, Node], tuple[_Part, Size]] = {}
        forwards: list[Timeline] = []
        for number, pair in enumerate(graphs):
            call = self.captured.calls[number]
            self.root = call.root
            line = Timeline(pair.forward, self.scale)
            forwards.append(line)
            known = (line, self._learned(line, call.parameters), self._owners(line.nodes))
            before = self._sum(held.values(), inputs)
            self._walk("forward", line, {}, before, partial(self._forward_part, *known))
            for node in {line.base[output] for output in line.outputs() if output is not None}:
                if node.op != "placeholder":
                    size = self.scale.bytes_of(node.meta["val"])
                    held[number, node] = (self._forward_part(*known, node, kept=True), size)
        self.kept = self._sum(held.values(), inputs)
        learned: dict[str, tuple[_Part, Size]] = {}
        for number in reversed(range(len(graphs))):
            backward, call = graphs[number].backward, self.captured.calls[number]
            if backward is None:
                continue
            self.root = call.root
            before = self._sum(learned.values(), inputs)
            self._backward(number, backward, forwards[number], held, before)
            outputs = list(backward.graph.nodes)[-1].args[0]
            for output, path in zip(outputs, call.parameters, strict=False):
                if path and isinstance(output, Node) and not self.steps_in_backward:
                    size = self.scale.bytes_of(output.meta["val"])
                    learned[path] = (self._gradient_part(path), size)
        self.produced = self._sum([*held.values(), *learned.values()], inputs)

    def _backward(
        self,
        number: int,
        backward: GraphModule,
        forward: Timeline,
        held: dict[tuple[int, Node], tuple[_Part, Size]],
        before: Owned,
    ) -> None:
        given = _placeholders(backward.graph.nodes)
        tangents = [n for n in given if n.name.startswith("tangents")]
        by_name = {n.name: n for n in forward.nodes}
        outputs = forward.outputs()
        handed = outputs[: len(outputs) - (len(given) - len(tangents))]
        returned = {forward.base[output] for output in handed if output is not None}
        same: dict[Node, Node] = {}
        owned: dict[Node, tuple[_Part, Size]] = {}
        first: dict[Node, Node] = {}
        for node in given:
            made = by_name.get(node.name)
            base = None if made is None else forward.base[made]
            if base is None or base.op == "placeholder" or not tensors_in(node.meta.get("val")):
                continue
            if base in first:
                same[node] = first[base]
                continue
            first[base] = node
            if base not in returned and (number, base) in held:
                owned[node] = held.pop((number, base))  # the whole buffer, also for a view of it
        line = Timeline(backward, self.scale, same)
        gradients = self._gradients(line, number)
        if self.steps_in_backward:
            self._give_up(line, self.captured.calls[number].parameters)
        owners = self._owners(line.nodes)
        before = self._sum(held.values(), before)
        for node in tangents:
            size = self.scale.bytes_of(node.meta["val"])
            before[self._part_of_size(node, "activations"), None] += size.formula

        def part_of(node: Node) -> _Part:
            found = owned[node][0] if node in owned else gradients.get(node)
            return found or (self._part_of_size(node, "working"), owners[node])

        sizes = {node: size for node, (_, size) in owned.items()}
        self._walk("backward", line, sizes, before, part_of)
        for key in [key for key in held if key[0] == number]:
            del held[key]

    def _give_up(self, line: Timeline, paths: Sequence[str]) -> None:
        """Count the gradients of a block's parameters as freed after the block's backward pass."""
        ends: list[int] = []  # of each kernel, the last one in a row that runs in the same block
        here: list[tuple[Block | None, bool]] = []
        block: Block | None = None
        for kernel in line.kernels:
            block, is_outside = self._where(kernel.nodes, block)
            here.append((block, is_outside))
        for step in reversed(range(len(here))):
            is_same = step + 1 < len(here) and here[step] == here[step + 1]
            ends.insert(0, ends[0] if is_same else step)
        last: dict[Node, int] = {}
        for step, kernel in enumerate(line.kernels):
            made = [made for _, made in line.results(kernel)]
            for buffer in (*kernel.reads, *made):
                last[buffer] = step
        given = zip(line.outputs(), paths, strict=False)
        learned = {line.base[output] for output, path in given if output is not None and path}
        others = zip(line.outputs(), paths, strict=False)
        kept = {line.base[output] for output, path in others if output is not None and not path}
        for buffer in learned - kept:
            if buffer in last:
                line.last_read[buffer] = ends[last[buffer]]

    def in_the_whole_model(self, place: _Place, found: Owned) -> Iterator[Moment]:
        """Yield the bytes of tensors that exist at a moment of a step of the whole model.

        Only some blocks (layers) of the model are captured (traced). A captured block that is
        neither first nor last in the model's list of blocks may represent several blocks of its
        kind. For a moment in such a block, yield the bytes for the first and for the last of the
        represented blocks.
        """
        phase, block, is_outside = place
        if block is None:
            where = "outside the blocks" if self.stacks else "the whole model"
            yield Moment(f"{phase}, {where}", _outside(found))
        elif is_outside:
            next_to = f"{block.stack.path}.{block.stack.kept[block.place]}"
            is_end = phase == "backward" and block.place == 0
            runs = "end" if is_end else "outside"
            yield Moment(f"{phase}, outside the blocks, next to {next_to}", _outside(found), runs)
        else:
            for index in dict.fromkeys((block.alike[0], block.alike[-1])):
                parts = self._inside(phase, block, index, found)
                yield Moment(f"{phase}, {block.stack.path}.{index}", parts, "block")

    def _inside(self, phase: str, block: Block, index: int, found: Owned) -> Parts:
        """Return the bytes of all tensors that exist while block (layer) `index` of the model runs.

        Only some of the model's blocks are traced. `found` has the bytes for a model with only
        these blocks. The traced `block` represents block `index` of the whole model."""
        parts: dict[str, sympy.Expr] = defaultdict(int)
        for (part, owner), size in found.items():
            is_apart = owner is not None and owner.stack != block.stack and part in PER_BLOCK
            parts[part] += size * (len(owner.alike) if owner and is_apart else 1)
        for place in range(len(block.stack.kept)):
            other = Block(block.stack, place)
            others = [i for i in other.alike if i != index]
            if place != block.place:
                others.remove(block.stack.kept[place])  # it is part of the result
            before = sum(i < index for i in others)
            for part in PER_BLOCK:
                key = (part, other)
                now = found.get(key, 0)
                later = self.produced.get(key, 0) if phase == "backward" else 0
                done = now if place < block.place else self.kept.get(key, 0)
                still = now if place > block.place else later
                parts[part] += before * done + (len(others) - before) * still
        return _expanded(parts)

    def _sum(self, sizes: Iterable[tuple[_Part, Size]], before: Owned) -> Owned:
        parts: Owned = defaultdict(int, before)
        counts = Counter((key, size.formula) for key, size in sizes)
        for (key, formula), count in counts.items():
            parts[key] += count * formula
        return parts

    def _learned(self, line: Timeline, paths: Sequence[str]) -> set[Node]:
        """Return the nodes whose results depend on a parameter or on random numbers.

        All other results (such as masks) are equal in all blocks (layers) of the model. So the
        formulas for a training step's memory count equal results once, not once per block.
        """
        given = zip(_placeholders(line.nodes), paths, strict=False)
        found = {node for node, path in given if path}
        for node in line.nodes:
            is_drawn = any(word in op_name(node) for word in DRAWN)
            if is_drawn or any(source in found for source in node.all_input_nodes):
                found.add(node)
        return found

    def _forward_part(
        self,
        line: Timeline,
        learned: set[Node],
        owners: Mapping[Node, Block | None],
        node: Node,
        *,
        kept: bool = False,
    ) -> _Part:
        is_kept = kept or line.last_read.get(node) == len(line.kernels)
        otherwise = "working" if not is_kept else "activations" if node in learned else "inputs"
        return self._part_of_size(node, otherwise), owners[node]

    def _part_of_size(self, node: Node, otherwise: str) -> str:
        for tensor in tensors_in(node.meta.get("val")):
            has_classes = any(compat.size_hint(size) in self.vocabulary for size in tensor.shape)
            if has_classes and self.scale.is_per_token(tensor):
                return "logits"
        return otherwise

    def _gradient_part(self, path: str) -> _Part:
        block = self._block_at(path)
        return ("other gradients" if block is None else "block gradients"), block

    def _gradients(self, line: Timeline, number: int) -> dict[Node, _Part]:
        """Return the buffers of the backward graph that contain a parameter's gradient.

        Also return the buffers from which such a gradient is made by rounding, adding or writing in
        place.
        """
        found: dict[Node, _Part] = {}
        paths = self.captured.calls[number].parameters
        for output, path in zip(line.outputs(), paths, strict=False):
            queue = [line.base[output]] if output is not None and path else []
            while queue:
                node = queue.pop()
                if node in found or node.op == "placeholder":
                    continue
                found[node] = self._gradient_part(path)
                if not _may_hold_a_part(node):
                    continue
                wanted = self.scale.elements(node.meta["val"])
                # the source of an element of a tuple; the maker of the tuple is one
                maker = cast("Node", node.args[0]) if line.kind[node] == "view" else node
                values = {buffer: buffer.meta.get("val") for buffer in line.reads[maker] - {node}}
                queue += [
                    buffer
                    for buffer, value in values.items()
                    if isinstance(value, torch.Tensor) and self.scale.elements(value) == wanted
                ]
        return found

    def _walk(
        self,
        phase: str,
        line: Timeline,
        owned: Mapping[Node, Size],
        before: Owned,
        part_of: _PartOf,
    ) -> None:
        """Go through the kernels of a graph in order, and record which tensors exist at the
        moments when the most memory is in use."""
        found: dict[_Place, list[Owned]] = defaultdict(list)
        best: dict[_Place, list[tuple[int, int]]] = {}
        block: Block | None = None
        for step in line.replay(owned, self.transient):
            block, is_outside = self._where(step.kernel.nodes, block)
            here = (phase, block, is_outside)
            most = best.setdefault(here, [(-1, -1)] * len(self.scale.points))
            better = [p for p, value in enumerate(step.total) if value > most[p][0]]
            if better:
                found[here].append(self._parts(step, before, part_of))
                for p in better:
                    most[p] = (step.total[p], len(found[here]) - 1)
        for here, parts in found.items():
            chosen = sorted({which for _, which in best[here] if which >= 0})
            self.peaks[here] += [parts[which] for which in chosen]

    def _parts(self, step: Step, before: Owned, part_of: _PartOf) -> Owned:
        parts = self._sum(((part_of(node), size) for node, size in step.live.items()), before)
        if step.transient:
            is_loss = any(_is_ours(n) and not _is_in_a_block(n) for n in step.kernel.nodes)
            parts["loss workspace" if is_loss else "working", None] += step.transient
        return parts

    def _where(self, nodes: Sequence[Node], block: Block | None) -> tuple[Block | None, bool]:
        """Return the block (repeated layer) in or after which a kernel runs, and whether the kernel
        runs after this block, outside of blocks.

        `nodes` are the nodes of the kernel, and `block` is the block that ran last, or None before
        the first block. For a kernel outside of blocks that runs after a block, return `block` and
        True. For a kernel before the first block, return None and False. Callers treat None as
        outside of all blocks.
        """
        for node in nodes:
            seen = self._block_of(node)
            if seen is not None:
                return seen, False
            if block is not None and _module_path(node) is not None:
                return block, True
        return block, False

    def _owners(self, nodes: Iterable[Node]) -> dict[Node, Block | None]:
        """Return the model's block (repeated layer) to which each node belongs, or None.

        A node without a module path belongs to the block of the node before it.
        """
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


def _placeholders(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op == "placeholder"]


def _may_hold_a_part(node: Node) -> bool:
    """Return whether an op makes a gradient from another gradient, by rounding, adding or writing
    in place.
    """
    if op_name(node) in ("add", "convert_element_type", "_to_copy"):
        return True
    maker = node.args[0] if node.args else None
    return isinstance(maker, Node) and writes_to_an_input(maker)


def _module_path(node: Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    entry = list(stack.values())[-1]
    return clean_module_path(entry[0] if isinstance(entry, tuple) else str(entry))


def op_transient(scale: Scale, target: Target) -> Transient:
    """Return a function that computes the temporary memory of an op, which is freed when the op
    ends."""

    def transient(node: Node) -> sympy.Expr:
        op: Any = called_op(node)
        if not _is_ours(node):
            # a GPU's fused attention sums the gradient of its queries in fp32
            is_fused = op_name(node).startswith("_scaled_dot_product")
            if target.device == "cuda" and is_fused and "backward" in op_name(node):
                return 4 * scale.elements(cast("Node", node.args[1]).meta["val"])
            return sympy.Integer(0)
        known = node.args[1:] if op is node.args[0] else node.args
        names = (argument.name for argument in compat.schema(op).arguments)
        given = {**dict(zip(names, known, strict=False)), **node.kwargs}
        name = compat.schema(op).name.rpartition("::")[2]
        with target.planned():
            return sympy.sympify(_held(scale, target.device, name, given))

    return transient


def _is_ours(node: Node) -> bool:
    return getattr(called_op(node), "namespace", "") == "memeff"


def _is_in_a_block(node: Node) -> bool:
    name = str(called_op(node))
    return "gated_linear" in name or "memeff.attention" in name


def _held(scale: Scale, device: str, name: str, given: Mapping[str, Any]) -> sympy.Expr | int:
    """Return the bytes of temporary memory that an op of this package allocates, given the op's
    name and arguments."""

    def value(argument: str) -> torch.Tensor:
        return cast("torch.Tensor", given[argument].meta["val"])

    if name in LOSSES:
        hidden, rows = value("hidden"), scale.rows(value("hidden"))
        vocab, depth = (int(size) for size in value("weight").shape)
        how: dict[str, Any] = {"dtype": hidden.dtype, "workspace": given["workspace"]}
        how["has_softcap"] = bool(given["softcap"])
        how["gradient_filter"] = given.get("gradient_filter", "exact")
        if "_total" in name:
            per_row = op_folder.TOTAL_BYTES_PER_ROW
            if name.endswith("_shard"):
                shard = op_folder.Shard(*(given[each] for each in ("rank", "ranks", "classes")))
                vocab = shard.chunk  # it determines the blocks of rows
                per_row += 8 * shard.ranks
            held = op_folder.total_bytes(rows, depth, vocab, device=hidden.device, **how)
            return held + per_row * rows
        kind = (hidden.device, hidden.dtype, depth)
        how["engine"] = op_folder.engine_for(*kind, with_top=bool(given.get("with_top")))
        how["with_entropy"] = bool(given.get("with_entropy"))
        how |= {"device_type": device, "training": name.endswith("backward")}
        return op_folder.bytes_after(rows, depth, vocab, **how)
    if name.startswith("linear_divergence"):
        hidden = value("hidden")
        of_classes = name.startswith("linear_divergence_classes")
        teacher = hidden.dtype if of_classes else value("teacher").dtype
        held = divergence_folder.temporary_bytes(
            scale.rows(hidden),
            int(value("weight").shape[0]),
            dtype=hidden.dtype,
            engine=divergence_folder.engine_for(hidden.device, hidden.dtype, teacher),
            workspace=given["workspace"],
            training=not name.endswith(("divergence", "classes")),
        )
        return divergence_folder.bytes_after(scale.rows(hidden), held)
    if name in ("embedding_backward", "embedding_accumulate"):
        of = value("grad_rows")
        engine = embedding_folder.engine_for(of.device, of.dtype)
        size = (scale.rows(of), int(of.shape[-1]))
        return embedding_folder.bytes_after(*size, dtype=of.dtype, engine=engine)
    if name in ("gated_linear", "gated_linear_backward"):  # the product, or its gradient
        of = value("grad_out" if name.endswith("backward") else "gate")
        inner = int(value("weight").shape[-1])
        return gated_folder.transient_bytes(scale.rows(of), inner, dtype=of.dtype)
    if name == "attention_backward":  # one number per query, of which the lse has one each
        return attention_folder.backward_bytes(scale.elements(value("lse")), 1, 1)
    return 0
