"""Predict which buffers exist while Inductor runs a captured graph, kernel by kernel.

Inductor writes a value to memory only if one of its readers cannot compute the value itself. Such
readers are a matrix product, another library op, the graph's output, or a kernel of another shape.
This module uses a simplified form of Inductor's rules:

- Views take no memory.
- A pointwise value is usually computed inside the kernels that read it. The value gets a buffer if
  a matrix product reads it or it is an output of the graph. The value also gets a buffer if several
  readers would recompute a long chain of ops.
- Ops that read the same large buffer over the same elements are fused into one kernel, if no matrix
  product comes between them. So all results of this kernel exist at once.
- Kernels run in the order of their first nodes in the graph. But a kernel runs after the kernels
  whose results it reads.
- A buffer is freed after its last reader. A kernel may overwrite a buffer that only this kernel
  reads.
- `a @ b + c` is one library call, at the position of the addition.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .sizes import Scale, Size, Values, added, taken, tensors_in

REDUCTIONS = frozenset(
    "sum mean amax amin max min argmax argmin var var_mean prod any all logsumexp std".split()
)
LIBRARY = frozenset(
    "mm addmm bmm baddbmm index_put _unsafe_index_put index_put_ "
    "_unsafe_masked_index_put_accumulate scatter_add scatter_reduce scatter "
    "embedding_dense_backward sort topk convolution convolution_backward cumsum cumprod".split()
)
CONSTANTS = frozenset("full iota arange scalar_tensor empty zeros ones full_like".split())
FUSIBLE = ("pointwise", "reduction")

MANY_READS, LONG_CHAIN = 4, 30
"""Inductor's realize_reads_threshold and realize_opcount_threshold."""

MOST_FUSED = 64
"""Inductor's max_fusion_size."""

Transient = Callable[[Node], sympy.Expr]


def op_name(node: Node) -> str:
    """Return the name of an op without overload, such as "mm"."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet or node.target, "__name__", ""))


def kind_of(node: Node) -> str:
    """Return the kind of a node's operation: view, constant, size, pointwise, reduction, library or
    other."""
    if node.op != "call_function":
        return "other"
    if _is_view(node):
        return "view"
    if not tensors_in(node.meta.get("val")):
        return "size"
    name = op_name(node)
    if getattr(node.target, "namespace", "") not in ("aten", "prims"):
        return "library"
    if name in CONSTANTS:
        return "constant"
    if name == "scatter" and isinstance(node.args[0], Node) and kind_of(node.args[0]) == "constant":
        return "pointwise"  # one-hot rows are computed, not stored
    if name in LIBRARY or name.startswith("_scaled_dot_product"):
        return "library"
    return "reduction" if name in REDUCTIONS else "pointwise"


def writes_to_an_input(node: Node) -> bool:
    """Return whether an op writes to one of its arguments.

    In the graph, PyTorch has wrapped such an op so that it returns the written argument as a new
    tensor. If no later node reads the argument, this new tensor uses the argument's memory.
    """
    return getattr(node.target, "__name__", "").startswith("auto_functionalized")


def called_op(node: Node) -> object:
    """Return the op that a node calls, even if PyTorch wrapped this op, as it does for in-place
    ops.
    """
    return node.args[0] if writes_to_an_input(node) else node.target


def _is_view(node: Node) -> bool:
    name = op_name(node)
    if node.target is operator.getitem or name in ("_unsafe_view", "view", "wait_tensor"):
        return True
    if name == "all_reduce":  # in place, if the summed tensor has no other reader
        return len(node.all_input_nodes[0].users) == 1
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


@dataclass
class Kernel:
    """A kernel that Inductor is expected to run: its graph nodes, and the buffers that it reads."""

    nodes: list[Node]
    reads: set[Node]


@dataclass
class Step:
    """The time while one kernel runs, with the buffers that exist during that time."""

    kernel: Kernel  # the running kernel
    live: Mapping[Node, Size]  # the buffers that exist, its results included
    total: Values  # their bytes and its transient bytes, at each point of the scale
    transient: sympy.Expr  # bytes that exist only inside the kernel


class Timeline:
    """The kernels of a forward or backward graph, as Inductor gets it, in execution order. `same`
    contains placeholders that share memory with another placeholder.
    """

    def __init__(
        self, gm: GraphModule, scale: Scale, same: Mapping[Node, Node] = MappingProxyType({})
    ) -> None:
        self.scale = scale
        self.nodes = _with_sums_in_the_library(list(gm.graph.nodes))
        self.kind = {node: kind_of(node) for node in self.nodes}
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.base = self._bases(same)
        self.users = self._users()
        self.reads: dict[Node, set[Node]] = {}
        self.stored: set[Node] = set()
        self._store()
        self.readers = self._readers()
        self.fused = _Fusion(self)
        self.kernels = list(self._ordered())
        self._last_reads()

    def outputs(self) -> list[Node | None]:
        """Return the outputs of the graph; an output that is not a node is None."""
        given: Any = self.nodes[-1].args[0]
        values = given if isinstance(given, (tuple, list)) else (given,)
        return [value if isinstance(value, Node) else None for value in values]

    def _bases(self, same: Mapping[Node, Node]) -> dict[Node, Node]:
        base: dict[Node, Node] = {}
        for node in self.nodes:
            base[node] = same.get(node, node)
            if self.kind[node] == "view":
                source = node.args[0]
                assert isinstance(source, Node)
                is_element = node.target is operator.getitem and self.kind[source] != "view"
                base[node] = node if is_element else base[source]
        return base

    def _users(self) -> dict[Node, list[Node]]:
        users: dict[Node, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for base in {self.base[source] for source in node.all_input_nodes}:
                if base is not node:
                    users[base].append(node)
        return users

    def _store(self) -> None:
        """Find the nodes whose values are written to memory, and the buffers that each node
        reads."""
        steps: dict[Node, int] = {}
        for node in self.nodes:
            kind = self.kind[node]
            steps[node] = 0
            if kind in ("other", "view"):
                base = self.base[node]
                self.reads[node] = {node if kind == "other" else base}
                if node.op == "placeholder" or (kind == "view" and base is node):
                    self.stored.add(base)
                continue
            self.reads[node] = set()
            if kind in ("constant", "size"):
                continue
            steps[node] = 1
            for source in {self.base[source] for source in node.all_input_nodes}:
                if source in self.stored:
                    self.reads[node].add(source)
                else:
                    self.reads[node] |= self.reads[source]
                    steps[node] += steps[source]
            if kind != "pointwise" or self._must_store(node, steps[node]):
                self.stored.add(node)

    def _must_store(self, node: Node, steps: int) -> bool:
        users = self.users[node]
        if any(user.op == "output" or self.kind[user] == "library" for user in users):
            return True
        return len(users) > 1 and (len(self.reads[node]) > MANY_READS or steps > LONG_CHAIN)

    def _has_kernel(self, node: Node) -> bool:
        return node in self.stored and self.kind[node] in (*FUSIBLE, "library")

    def _readers(self) -> dict[Node, list[Node]]:
        """Return, for each buffer, the nodes that read the buffer.

        These are nodes that become a part of a kernel, and the graph's output node."""
        readers: dict[Node, list[Node]] = defaultdict(list)
        for node in self.nodes:
            read = self.reads[node] if self._has_kernel(node) else set()
            if node.op == "output":
                read = {self.base[source] for source in node.all_input_nodes}
            for buffer in read:
                readers[buffer].append(node)
        return readers

    def _ordered(self) -> Iterator[Kernel]:
        """Yield the kernels depth first, so that each kernel comes after the kernels whose results
        it reads."""
        kernels: dict[Node, Kernel] = {}
        for node in self.nodes:
            if self._has_kernel(node):
                kernel = kernels.setdefault(self.fused.leader(node), Kernel([], set()))
                kernel.nodes.append(node)
                kernel.reads |= self.reads[node]
        made_by = {node: leader for leader, k in kernels.items() for node in k.nodes}
        needs = {leader: self._needed(k, made_by) - {leader} for leader, k in kernels.items()}
        done: set[Node] = set()
        for first in kernels:
            stack = [first]
            entered: set[Node] = set()
            while stack:
                leader = stack[-1]
                missing = [n for n in needs[leader] if n not in done and n not in entered]
                if leader not in entered and leader not in done:
                    entered.add(leader)
                    stack += sorted(missing, key=lambda n: -self.position[kernels[n].nodes[0]])
                    continue
                stack.pop()
                if leader not in done:
                    done.add(leader)
                    yield kernels[leader]

    def _needed(self, kernel: Kernel, made_by: Mapping[Node, Node]) -> set[Node]:
        makers = (b.args[0] if b.target is operator.getitem else b for b in kernel.reads)
        return {made_by[node] for node in makers if isinstance(node, Node) and node in made_by}

    def _last_reads(self) -> None:
        last: dict[Node, int] = {}
        for step, kernel in enumerate(self.kernels):
            for buffer in kernel.reads:
                last[buffer] = step
        for output in self.outputs():
            if output is not None:
                last[self.base[output]] = len(self.kernels)
        self.last_read = last

    def replay(
        self,
        owned: Mapping[Node, Size] = MappingProxyType({}),
        transient: Transient = lambda _: sympy.Integer(0),
    ) -> Iterator[Step]:
        """Yield one moment per kernel of a run of the graph, with the buffers that exist then.

        `transient` returns the temporary bytes that an op allocates while it runs. `owned` maps
        placeholders to their bytes. These placeholders are freed after the last node that reads
        them. All other placeholders belong to the caller and are not counted.
        """
        ends: dict[int, list[Node]] = defaultdict(list)
        for buffer, step in self.last_read.items():
            ends[step].append(buffer)
        live = {node: size for node, size in owned.items() if node in self.last_read}
        total = self.scale.zero
        for size in live.values():
            total = added(total, size.values)
        for step, kernel in enumerate(self.kernels):
            made = list(self.results(kernel))
            free = [b for b in ends[step] if b in live]
            for node, result in made:
                size = self.scale.bytes_of(result.meta["val"])
                over = self._written_over(node, size, free, live)
                if over is not None:
                    total = taken(total, live.pop(over).values)
                live[result] = size
                total = added(total, size.values)
            extra = sum((transient(node) for node in kernel.nodes), sympy.Integer(0))
            now = added(total, self.scale.of(extra).values) if extra else total
            yield Step(kernel, live, now, extra)
            dead = [result for _, result in made if self.last_read.get(result, step) <= step]
            for buffer in [*free, *dead]:
                if buffer in live:
                    total = taken(total, live.pop(buffer).values)

    def results(self, kernel: Kernel) -> Iterator[tuple[Node, Node]]:
        """Yield, for each buffer that a kernel writes, the node that computes the buffer, and the
        node whose value is the buffer.

        If the first node's op has several results, the second node is the `getitem` of one result.
        Otherwise the two nodes are the same.
        """
        for node in kernel.nodes:
            if node in self.fused.inside:
                continue
            if isinstance(node.meta.get("val"), (tuple, list)):
                yield from ((node, u) for u in node.users if u.target is operator.getitem)
            else:
                yield node, node

    def _written_over(
        self, node: Node, size: Size, free: Iterable[Node], live: Mapping[Node, Size]
    ) -> Node | None:
        if self.kind[node] == "library" and not writes_to_an_input(node):
            return None
        for buffer in free:
            is_same = buffer in live and live[buffer].formula == size.formula
            if is_same and self.readers[buffer] == [node]:
                return buffer
        return None


class _Fusion:
    """Decides which pointwise and reduction nodes of a graph run in one fused kernel.

    The candidates are the nodes whose results, without fusion, would be written to memory."""

    def __init__(self, timeline: Timeline) -> None:
        self._line = timeline
        self._parent: dict[Node, Node] = {}
        self._members: dict[Node, list[Node]] = {}
        self._behind = self._ancestors_behind_a_library_call()
        self._join_all()
        self.inside = self._read_only_inside()

    def leader(self, node: Node) -> Node:
        """Return the node that identifies the fused kernel in which `node` runs.

        All nodes that run in this kernel have the same leader."""
        while self._parent.get(node, node) is not node:
            node = self._parent[node]
        return node

    def _ancestors_behind_a_library_call(self) -> dict[Node, int]:
        """Return, for each node, the set (as bits of an integer) of earlier nodes on which the node
        depends through a library op (an op of the kind "library", such as a matrix product).
        """
        line = self._line
        every: dict[Node, int] = {}
        behind: dict[Node, int] = {}
        for node in line.nodes:
            every[node] = behind[node] = 0
            for source in node.all_input_nodes:
                reached = every[source] | 1 << line.position[source]
                every[node] |= reached
                behind[node] |= reached if line.kind[source] == "library" else behind[source]
        return behind

    def _join_all(self) -> None:
        line = self._line
        readers: dict[Node, list[Node]] = defaultdict(list)
        for node in line.nodes:
            if node not in line.stored or line.kind[node] not in FUSIBLE:
                continue
            self._members[node] = [node]
            for buffer in sorted(line.reads[node], key=lambda b: line.position[b]):
                if not self._is_large(node, buffer):
                    continue
                for other in readers[buffer][-MOST_FUSED:]:
                    self._join(self.leader(other), self.leader(node))
                readers[buffer].append(node)
            readers[node].append(node)

    def _is_large(self, node: Node, buffer: Node) -> bool:
        """Return whether fusion of the kernels that read a buffer saves time.

        The buffer must be about as large as the range over which the kernels loop.
        """
        line = self._line
        shared = tensors_in(buffer.meta.get("val"))
        if not shared:
            return False
        if line.kind[node] == "reduction":
            return bool(line.scale.elements(shared[0]) == self._elements(node))
        mine = line.scale.bytes_of(node.meta["val"]).values[0]
        return 2 * line.scale.bytes_of(shared[0]).values[0] >= mine

    def _elements(self, node: Node) -> sympy.Expr:
        """Given a node, return the number of elements over which the loop of its kernel runs."""
        scale, reads = self._line.scale, node.all_input_nodes
        if self._line.kind[node] != "reduction":
            return scale.elements(tensors_in(node.meta["val"])[0])
        sizes = [scale.elements(t) for s in reads for t in tensors_in(s.meta.get("val"))]
        return max(sizes, key=lambda size: scale.of(size).values[0], default=sympy.Integer(0))

    def _join(self, first: Node, second: Node) -> None:
        if first is second or self._elements(first) != self._elements(second):
            return
        both = [*self._members[first], *self._members[second]]
        if len(both) > MOST_FUSED or self._is_separated(first, second):
            return
        self._parent[second] = first
        self._members[first] = both

    def _is_separated(self, first: Node, second: Node) -> bool:
        position, behind = self._line.position, self._behind
        return any(
            behind[b] >> position[a] & 1 or behind[a] >> position[b] & 1
            for a in self._members[first]
            for b in self._members[second]
        )

    def _read_only_inside(self) -> set[Node]:
        """Return the pointwise nodes whose values are read only inside the fused kernel that
        computes them.

        These values take no memory."""
        line = self._line

        def stays(node: Node) -> bool:
            is_inside = (
                line.kind[reader] in FUSIBLE and self.leader(reader) is self.leader(node)
                for reader in line.readers[node]
            )
            return line.kind[node] == "pointwise" and bool(line.readers[node]) and all(is_inside)

        return set(filter(stays, self._members))


def _with_sums_in_the_library(nodes: list[Node]) -> list[Node]:
    """If an addition is the only node that reads a matrix product, move the product directly before
    the addition.
    """
    for node in list(nodes):
        if op_name(node) != "add" or not tensors_in(node.meta.get("val")):
            continue
        for operand in node.args[:2]:
            chain = _product_behind(operand)
            if chain and isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim() == 2:
                for moved in chain:
                    nodes.remove(moved)
                place = nodes.index(node)
                nodes[place:place] = chain
                break
    return nodes


def _product_behind(operand: object) -> list[Node]:
    """Return the mm that computes `operand`, and the transposes between mm and `operand`, which
    cancel one another.

    Return an empty list if there is no such mm.
    """
    chain: list[Node] = []
    while isinstance(operand, Node) and len(operand.users) == 1:
        chain.insert(0, operand)
        if op_name(operand) == "mm":
            return chain if len(chain) % 2 else []
        if op_name(operand) not in ("permute", "t"):
            return []
        operand = operand.args[0]
    return []
