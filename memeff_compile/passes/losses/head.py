"""Recognize how logits are computed from hidden states.

An output projection (head) comes first. Then follow steps that reorder, select or regroup rows
(tokens), and pointwise steps, such as casts and scales.

    hidden -> head (linear, matmul, addmm, einsum) -> {view, slice, transpose | cast, scale, cap,
    bias}*

An output projection may be a sum of products: one with the full weight, and low-rank products such
as those of LoRA adapters.

Row moves (steps that reorder, select or regroup rows) give the same result whether they are applied
before or after the product. So the rewrite applies row moves to the hidden states. Pointwise steps
become the arguments `scale`, `softcap` and `bias` of the fused op memeff::linear_cross_entropy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...kernels.checks import wide
from ...logits.recipe import Modifiers, Unfoldable, fold_steps
from ..graph.base import Decline
from ..graph.canonical import (
    Call,
    Reading,
    aten,
    back_over,
    call_of,
    is_several,
    named,
    read,
    read_one,
    trace,
)
from ..graph.editor import Editor
from ..graph.graph_info import GraphInfo, kind_among, node_name, same_shape
from ..graph.products import spelled_out
from . import shards

SMALLEST_VOCABULARY = 32  # logits with fewer classes are too small to matter
_HEAD_WIDTH = 4  # a head is wider than this times its input


@dataclass(frozen=True)
class LowRank:
    """A low-rank product, `scale * low @ up.T`, that is added to an output projection's product."""

    low: Node
    up: Node
    transposed: bool  # up is (R, V)
    scale: float
    dtype: torch.dtype  # dtype in which the product runs
    links: tuple[
        Node, ...
    ]  # the nodes that scale and cast the product, last first, and the product
    symbols: tuple[Node, ...] = ()  # user numbers in the scale, guarded as constant


@dataclass(frozen=True)
class Head:
    """The matrix product that computes logits: `hidden @ weight.T + bias` in `compute_dtype`.

    If the graph adds low-rank products (such as LoRA's) to this product, `node` is the sum of all
    these products.
    """

    node: Node
    hidden: Node
    weight: Node
    transposed: bool  # the weight is (D, V)
    bias: Node | None
    compute_dtype: torch.dtype
    parts: tuple[LowRank, ...] = ()
    summed: tuple[Node, ...] = ()  # the nodes of the products that `node` adds, in order
    casts: tuple[Node, ...] = ()  # casts of weight and bias, which the op's call repeats

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that compute the logits, in graph order.

        These nodes include the product with the full weight, low-rank products (such as LoRA's),
        and their sums."""
        return (*self.summed, self.node)

    @property
    def low_dtype(self) -> torch.dtype:
        """Return the dtype for the low-rank products (such as LoRA's) that the graph adds to the
        output projection's product.

        The result is `compute_dtype`, the projection's dtype, if all low-rank products in `parts`
        have this dtype. Otherwise the result is fp32, or fp64 for a projection in fp64."""
        if all(part.dtype == self.compute_dtype for part in self.parts):
            return self.compute_dtype
        return wide(self.compute_dtype)


@dataclass(frozen=True)
class Factor:
    """A tensor by which logits are multiplied or divided: one number, or one per row (token)."""

    node: Node
    is_divisor: bool
    # the effects of the row moves before it, where it has a number per row
    rows: tuple[tuple[Any, ...], ...] | None = None


@dataclass(frozen=True)
class Vector:
    """A vector over the vocabulary that is added to the logits.

    Later steps (such as a scale) also apply to the vector."""

    node: Node
    classes: tuple[int, int] | None = None  # its classes that remain at the end
    factors: tuple[Factor, ...] = ()  # the scales of the logits after it was added


@dataclass(frozen=True)
class Step:
    """One node between the output projection and a node that uses the logits.

    Values of `kind`:

    - `rows`: reorders or selects rows;
    - `reshape`: regroups leading dimensions;
    - `same` (no change) or `detach`;
    - `move`: moves the class dimension from the last position to position 1;
    - `classes`: selects some classes. The field `classes` has the index of the first selected
      class and the index after the last one.
    - `to`: casts to the dtype `value`;
    - `mul` or `div`: multiplies or divides by the number `value`;
    - `factor`: multiplies or divides by a tensor (`value` is a `Factor`);
    - `tanh`, without a `value`;
    - `bias`: adds the vector `value`, with one number per class.

    With `dynamic=True`, `value` may be a number that the user passes to the compiled function. The
    field `symbol` is then the graph's node for this number. A guard on this node makes Dynamo
    recompile if the number changes.

    One node may be equivalent to several ATen calls. The field `reading` contains those of these
    calls that reorder, select or regroup rows. If one of the node's calls slices the classes,
    `reading` omits this slice. The field `whole` then contains all calls of the node, including the
    slice.
    """

    node: Node
    kind: str
    value: Any = None
    reading: Reading = ()
    symbol: Node | None = None
    classes: tuple[int, int] | None = None
    whole: Reading = ()

    @property
    def effect(self) -> tuple[Any, ...]:
        """Return a key for how this node reorders, selects or regroups the logits' rows (tokens).

        Two nodes with equal keys change the rows in the same way."""
        return tuple((call.op, *_frozen(list(call.args.values())[1:])) for call in self.reading)


@dataclass(frozen=True)
class Chain:
    """An output projection and the steps (nodes) that follow it, in order.

    `node` is the node of the last step, or the projection's node if there are no steps."""

    head: Head
    steps: tuple[Step, ...]
    node: Node

    @property
    def row_steps(self) -> tuple[Step, ...]:
        """Return the steps (nodes after the projection) that reorder, select or regroup the logits'
        rows (tokens)."""
        return tuple(s for s in self.steps if s.kind in ("rows", "reshape"))

    @property
    def row_key(self) -> tuple[Any, ...]:
        """Return a key of the nodes that reorder, select or regroup the rows (tokens) of this
        chain's logits.

        A chain is an output projection and the nodes after it. If two chains of one output
        projection have equal keys, their logits have the same rows in the same order. The key
        contains one entry per node that reorders, selects or regroups rows. The key omits reshapes
        after the last selection or reordering.
        """
        rows = self.row_steps
        last = max((i for i, s in enumerate(rows) if s.kind == "rows"), default=-1)
        return tuple(s.effect for s in rows[: last + 1])

    def is_of(self, other: Chain) -> bool:
        """Return whether the logits of `other` contain all rows (tokens) of this chain's logits.

        A chain is an output projection with the steps (nodes) after it. The caller passes only
        chains with the same output projection."""
        effects = tuple(step.effect for step in self.row_steps)
        return effects[: len(other.row_key)] == other.row_key

    @property
    def classes(self) -> tuple[int, int] | None:
        """Return the range of classes that remains after slices of the logits.

        The range is the index of the first class and the index after the last class. Return None
        if all classes remain."""
        return _left(self.steps)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Return the tensors by which the logits are multiplied or divided."""
        return tuple(s.value for s in self.steps if s.kind == "factor")

    @property
    def moved(self) -> bool:
        """Return whether a node after the projection moves the class dimension to dimension 1."""
        return any(s.kind == "move" for s in self.steps)

    @property
    def detached(self) -> bool:
        """Return whether a node after the projection detaches the logits and stops the gradient."""
        return any(s.kind == "detach" for s in self.steps)

    @property
    def operands(self) -> tuple[Node, ...]:
        """Return the tensors, other than logits, that the steps (nodes after the projection) read.

        These tensors are row indices, vectors over the vocabulary and scales.
        """
        readings = (a for s in self.row_steps for c in s.reading for a in c.args.values())
        flat = (a for value in readings for a in (value if isinstance(value, list) else [value]))
        vectors = [s.value for s in self.steps if s.kind == "bias"]
        vectors += [factor.node for factor in self.factors]
        carried = {self.head.node, *(s.node for s in self.steps)}
        return tuple(n for n in (*flat, *vectors) if isinstance(n, Node) and n not in carried)


def _left(steps: Sequence[Step]) -> tuple[int, int] | None:
    """Return the range of original classes that remain after all class slices in `steps`."""
    first = None
    for start, stop in (step.classes for step in steps if step.classes is not None):
        first = (first[0] if first else 0) + start, (first[0] if first else 0) + stop
    return first


def _frozen(value: Any) -> Any:
    """Return an argument in a form that compares by value; nodes still compare by identity."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    plain = value is None or isinstance(value, (int, float, str, Node, torch.dtype))
    return value if plain else id(value)


POINTWISE = ("to", "mul", "div", "tanh", "bias", "factor")

_MAX_STEPS = 24
_MAX_PRODUCTS = 4  # of two tensors alike, one inside the other, in which a head is looked for
_MAX_PARTS = 8  # low-rank products added to a head's


class HeadReader:
    """Reads the output projections of one graph, each with the steps after it (a chain).

    Steps are nodes such as row selections, casts, scales and a softcap. The reader analyses each
    node once, and looks up in a table which ATen ops the node calls. If the table lacks a node's
    function and `tracing` is set, the reader runs the node on fake tensors. Such a run takes
    milliseconds.
    """

    def __init__(self, info: GraphInfo, *, tracing: bool = True) -> None:
        self.info, self.tracing = info, tracing
        self._chains: dict[Node, Chain | Decline] = {}
        self._products = 0  # products of two tensors alike whose operands are being read

    def chain(self, node: Node) -> Chain | Decline:
        """Return an output projection and the steps from it to `node`, which form a chain.

        Steps are nodes such as row selections, casts, scales and a softcap. If there is no such
        chain, return a Decline with the reason.
        """
        if node not in self._chains:
            self._chains[node] = self._read_chain(node)
        return self._chains[node]

    def _read_chain(self, node: Node) -> Chain | Decline:
        upwards: list[Node] = []
        current = node
        while (head := self._head(current)) is None:
            operand = self._chain_operand(current)
            if operand is None or len(upwards) >= _MAX_STEPS:
                return self._no_head(current)
            upwards.append(current)
            current = operand
        if isinstance(head, Decline):
            return head
        return self.extend(Chain(head, (), node), upwards[::-1])

    def is_wide(self, head: Head) -> bool:
        """Return whether a linear layer is an output projection.

        The answer depends on the weight's shape and on the graph inputs from which the weight is
        computed."""
        return self.has_shape_of_head(head) and self.input_in_weight(head) is None

    def has_shape_of_head(self, head: Head) -> bool:
        """Return whether a linear layer has the shape of an output projection, not that of an inner
        layer.
        """
        weight, hidden = self.info.tensor(head.weight), self.info.tensor(head.hidden)
        if weight is None or hidden is None:
            return False
        vocabulary = compat.size_hint(weight.shape[1 if head.transposed else 0])
        return is_wide(vocabulary, compat.size_hint(hidden.shape[-1]))

    def input_in_weight(self, head: Head) -> Node | None:
        """Return a graph input, other than a parameter or buffer, from which the weight of `head`
        is computed.

        A matrix product with such a weight does not count as an output projection. An example is
        the product of two encoders' outputs. If the weight is computed only from parameters and
        buffers, or is a graph input itself, return None. A graph input that requires a gradient
        counts as a parameter.
        """
        for node in self._sources(head.weight):
            value = self.info.tensor(node)
            is_trained = value is not None and value.requires_grad
            if node is not head.weight and not (is_trained or _is_held_by_module(node)):
                return node
        return None

    def masks_parameter(self, head: Head) -> bool:
        """Return whether the weight of `head` is computed from a graph input of the same shape that
        requires a gradient.

        A masked parameter, for example, is such a weight."""
        weight = self.info.value(head.weight)
        values = [self.info.tensor(node) for node in self._sources(head.weight)]
        trained = [value for value in values if value is not None and value.requires_grad]
        return any(same_shape(value.shape, weight.shape) for value in trained)

    def _sources(self, node: Node) -> list[Node]:
        """Return the graph inputs from which a node is computed."""
        found, seen, queue = list[Node](), {node}, [node]
        while queue:
            current = queue.pop()
            if current.op == "placeholder":
                found.append(current)
            fresh = [n for n in current.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue += fresh
        return found

    def row_operand(self, node: Node) -> Node | None:
        """Return the operand of `node` if the node only moves, copies, casts or detaches values.

        For other nodes, return None. The operand is, for example, log-probabilities with one row
        per token. A move selects, reorders or reshapes values. The method looks up the node's op in
        a table, and does not run the node on fake tensors.
        """
        reading = read(node)
        if not reading or reading[0].op not in _MOVE_OPS:
            return None
        operand = reading[0].args["self"]
        return operand if isinstance(operand, Node) else None

    def extend(
        self, chain: Chain, links: Sequence[Node], kinds: Sequence[str] | None = None
    ) -> Chain | Decline:
        """Return `chain` (output projection and later nodes) extended by the nodes in `links`.

        If a link is not a supported step, or its `Step.kind` is not in `kinds`, return the reason
        as a Decline."""
        steps, moved = list(chain.steps), chain.moved
        for link in links:
            step = self._step(link, chain.head, moved)
            if isinstance(step, Decline):
                return step
            is_cut = step.classes is not None
            if kinds is not None and (step.kind not in kinds or is_cut):
                return Decline("unknown_step", f"{_describe(link)} is not a row move", node=link)
            moved = moved or step.kind == "move"
            steps.append(step)
        return replace(chain, steps=tuple(steps), node=links[-1] if links else chain.node)

    def _head(self, node: Node) -> Head | Decline | None:
        call = read_one(node)
        if call is None:
            return None
        a = call.args
        if call.op is aten.linear.default:
            return self._make_head(node, a["input"], a["weight"], False, a["bias"])
        if call.op in (aten.matmul.default, aten.mm.default):
            right = a["other"] if "other" in a else a["mat2"]
            return self._product_head(node, a["self"], right, None)
        if call.op is aten.addmm.default:
            if a["beta"] != 1 or a["alpha"] != 1:
                said = "addmm with beta or alpha other than 1"
                hint = "write the sum without addmm: alpha * (hidden @ weight.T) + beta * bias"
                return Decline("head_scaled", said, hint, node)
            return self._product_head(node, a["mat1"], a["mat2"], a["self"])
        if call.op is aten.einsum.default:
            return self._einsum_head(node, a["equation"], a["tensors"])
        if call.op is aten.add.Tensor and a["alpha"] == 1:
            return self._sum_head(node, a["self"], a["other"])
        return None

    def product(self, node: Node) -> Head | None:
        """Return the output projection whose matrix product is a given node, or None."""
        head = self._head(node)
        return head if isinstance(head, Head) else None

    def _sum_head(self, node: Node, left: Any, right: Any) -> Head | None:
        """Recognize the sum of an output projection and a low-rank product with the same rows and
        classes, in either order."""
        values = [self.info.tensor(each) for each in (left, right, node)]
        shapes = [value.shape for value in values if value is not None]
        if len(shapes) < 3 or not all(same_shape(shape, shapes[2]) for shape in shapes):
            return None
        for base, other in ((left, right), (right, left)):
            part = self._low_rank(other)
            # In a residual stream the search would not end.
            if part is None or not self._is_narrow(part.low, shapes[2][-1]):
                continue
            head, casts = self._cast_head(base)
            depth = None if head is None else self.info.value(head.hidden).shape[-1]
            if head is None or not self._is_narrow(part.low, depth):
                continue
            before = (*head.nodes, *casts, *part.links)
            # In the op, a term without a gradient would get one from the sum.
            is_alike = all(self.info.regions[n] == self.info.regions[node] for n in before)
            head = replace(head, node=node, parts=(*head.parts, part))
            dtype = self.info.value(node).dtype
            is_served = part.dtype.itemsize <= head.low_dtype.itemsize >= dtype.itemsize
            if is_alike and is_served and len(head.parts) <= _MAX_PARTS:
                order = self.info.positions.__getitem__
                return replace(head, summed=tuple(sorted(before, key=order)))
        return None

    def _is_narrow(self, low: Node, width: Any) -> bool:
        rank = compat.known_size(self.info.value(low).shape[-1])
        return rank is not None and compat.statically_true(rank < width)

    def _low_rank(self, node: Node) -> LowRank | None:
        """Recognize a low-rank product and the casts and scales that follow it."""
        nodes, symbols, scale = list[Node](), list[Node](), 1.0
        while (call := read_one(node)) is not None and len(nodes) < _MAX_STEPS:
            nodes.append(node)
            if call.op in _SCALES:
                factor = compat.known_number(call.args["other"])
                if factor is None or not math.isfinite(factor) or factor == 0:
                    return None
                if isinstance(call.args["other"], Node):
                    symbols.append(call.args["other"])
                is_product = call.op in (aten.mul.Tensor, aten.mul.Scalar)
                scale *= float(factor) if is_product else 1.0 / float(factor)
            elif call.op is not aten.to.dtype or not call.args["dtype"].is_floating_point:
                head = None if call.op is aten.add.Tensor else self._head(node)
                if not isinstance(head, Head) or head.bias is not None:
                    return None
                made_of = head.hidden, head.weight, head.transposed
                links = tuple(nodes), tuple(symbols)
                return LowRank(*made_of, scale, head.compute_dtype, *links)
            node = call.args["self"]
        return None

    def _cast_head(self, node: Node) -> tuple[Head | None, list[Node]]:
        """If a node only casts the result of an output projection, return the output projection and
        the casts."""
        casts: list[Node] = []
        node = back_over(node, (aten.to.dtype,), casts)
        if not all(self.info.value(cast).dtype.is_floating_point for cast in casts):
            return None, casts
        head = self._head(node)
        return (head if isinstance(head, Head) else None), casts

    def _product_head(self, node: Node, left: Node, right: Node, bias: Node | None) -> Head | None:
        value, left_value, added = map(self.info.tensor, (right, left, bias))
        if value is None or left_value is None or value.dim() != 2 or left_value.dim() < 1:
            return None
        if added is not None and added.dim() != 1:
            return None
        weight, transposed = self._untranspose(right)
        return self._make_head(node, left, weight, transposed, bias)

    def _einsum_head(
        self, node: Node, equation: str, tensors: Sequence[Node]
    ) -> Head | Decline | None:
        values = [self.info.tensor(tensor) for tensor in tensors]
        dims = [value.dim() for value in values if value is not None]
        if len(dims) != 2 or len(tensors) != 2:
            return None
        (left, right), output = spelled_out(equation.replace(" ", ""), dims)
        for hidden, weight, h, w in ((left, right, 0, 1), (right, left, 1, 0)):
            if len(weight) != 2 or len(hidden) < 1 or len(set(hidden)) != len(hidden):
                continue
            rows, contracted = hidden[:-1], hidden[-1]
            if contracted not in weight:
                continue
            vocab = weight.replace(contracted, "")
            if len(vocab) == 1 and vocab not in hidden and output == rows + vocab:
                transposed = weight[0] == contracted
                return self._make_head(node, tensors[h], tensors[w], transposed, None)
            if len(vocab) == 1 and sorted(output) == sorted(rows + vocab):
                said = "`einsum` makes logits whose last dimension is not the classes"
                hint = f"write '{left},{right}->{rows}{vocab}', and transpose the result"
                return Decline("no_linear_head", said, hint, node)
        return None

    def _untranspose(self, node: Node) -> tuple[Node, bool]:
        """Return a projection's weight without its transpose, and whether the returned weight is
        (hidden size D, classes V).

        If `node`, a (D, V) tensor, is a plain transpose, return the (V, D) tensor before the
        transpose, and False. Otherwise return `node` and True."""
        call = read_one(node)
        swaps = call is not None and (call.op is aten.t.default or _permutation(call, 2) == [1, 0])
        return (call.args["self"], False) if call is not None and swaps else (node, True)

    def _make_head(
        self, node: Node, hidden: Node, weight: Node, transposed: bool, bias: Node | None
    ) -> Head | None:
        result = self.info.tensor(node)
        weight_value, hidden_value = self.info.tensor(weight), self.info.tensor(hidden)
        if result is None or weight_value is None or hidden_value is None:
            return None
        if weight_value.dim() != 2 or result.dim() < 1:
            return None
        casts: list[Node] = []
        weight, transposed = self._source(weight, transposed, result.dtype, casts)
        if bias is not None:
            bias, _ = self._source(bias, False, result.dtype, casts)
        return Head(node, hidden, weight, transposed, bias, result.dtype, casts=tuple(casts))

    def _source(
        self, node: Node, transposed: bool, dtype: torch.dtype, casts: list[Node]
    ) -> tuple[Node, bool]:
        """Follow an output projection's weight or bias back through casts and transposes.

        Return the node before them, and whether it is a weight of shape (D, V): hidden size by
        classes. The projection's matrix product computes in `dtype`. Do not follow a cast that
        changes the dtype to one other than `dtype`.
        """
        while (call := call_of(node, aten.to.dtype)) is not None:
            before, after = self.info.tensor(call.args["self"]), self.info.value(node)
            if before is None or before.requires_grad != after.requires_grad:
                break
            if kind_among((call.args["self"],)):  # a weight of a subclass, which the cast decodes
                break
            if before.dtype != after.dtype and (
                after.dtype != dtype or self.info.may_be_written(call.args["self"])
            ):
                break
            casts.append(node)
            node = call.args["self"]
            if transposed:
                node, transposed = self._untranspose(node)
        return node, transposed

    def _reading(self, node: Node) -> Reading | None:
        return read(node) or (trace(node) if self.tracing else None)

    def _chain_operand(self, node: Node) -> Node | None:
        """Return the operand that contains logits.

        The operands' shapes, and the nodes that compute the operands, decide which one this is.
        """
        if node.op not in ("call_function", "call_method"):
            return None
        if (source := shards.moved(node)) is not None:
            return source
        reading = self._reading(node)
        if not reading or reading[0].op not in _STEP_OPS:
            return None
        operand = reading[0].args["self"]
        other = reading[0].args.get("other")
        operand_value, other_value = self.info.tensor(operand), self.info.tensor(other)
        if isinstance(other, Node) and reading[0].op is aten.add.Tensor:
            if operand_value is None or other_value is None:
                return None
            if operand_value.dim() < other_value.dim() or _is_vector(operand_value):
                operand = other
        elif (
            operand_value is not None
            and other_value is not None
            and isinstance(other, Node)
            and reading[0].op in _SCALES
            and self._is_scale(operand, operand_value, other, other_value)
        ):
            operand = other if reading[0].op is aten.mul.Tensor else None
        return operand if isinstance(operand, Node) else None

    def _is_scale(
        self, left: Node, left_value: torch.Tensor, right: Node, right_value: torch.Tensor
    ) -> bool:
        """Return whether the first operand of a multiplication is a scale and the second is the
        logits.

        The scale is the operand with fewer dimensions, or the operand that is a vector or a single
        column. If both operands have the same shape, the one that comes from an output projection
        is the logits.
        """
        if same_shape(left_value.shape, right_value.shape):
            return self._products < _MAX_PRODUCTS and self._comes_second(left, right)
        if _is_vector(right_value) and right_value.dim() <= left_value.dim():
            return False
        is_column = left_value.dim() > 0 and compat.statically_true(left_value.shape[-1] == 1)
        is_lower = left_value.dim() < right_value.dim() or _is_vector(left_value)
        return is_lower or (is_column and not compat.statically_true(right_value.shape[-1] == 1))

    def _comes_second(self, left: Node, right: Node) -> bool:
        self._products += 1
        try:
            return not isinstance(self.chain(left), Chain) and isinstance(self.chain(right), Chain)
        finally:
            self._products -= 1

    def _step(self, node: Node, head: Head, moved: bool) -> Step | Decline:
        if shards.moved(node) is not None:
            return shards.lost(node) or Step(node, "same")
        reading = self._reading(node)
        assert reading is not None
        if len(reading) == 1:
            point = self._pointwise(node, reading[0], head, moved)
            if point is not None:
                return point
        kinds = set()
        before = self.info.tensor(self._chain_operand(node))
        rank = 0 if before is None else before.dim()
        width = before.shape[-1] if before is not None and rank else None
        classes, moves = None, list[Call]()
        for call in reading:
            cut = None if moved or "move" in kinds else _class_cut(node, call, rank, width)
            if isinstance(cut, Decline):
                return cut
            if cut is not None:
                if cut != (0, width):
                    first = 0 if classes is None else classes[0]
                    classes, width = (first + cut[0], first + cut[1]), cut[1] - cut[0]
                kinds.add("same")
                continue
            moves.append(call)
            kind = "same" if moved and call.op in SAME_OPS else _row_kind(call, rank)
            if kind is None or (moved and kind != "same"):
                return Decline(
                    "unknown_step",
                    f"{_describe(node)} between the head and the loss is not a known row move, "
                    "cast, scale, softcap or bias",
                    "compute it on the hidden states or on the weight, or on the per-token losses",
                    node,
                )
            kinds.add(kind)
            rank += {aten.unsqueeze.default: 1, aten.select.int: -1}.get(call.op, 0)
        is_last = not moved and "move" not in kinds  # the class dimension, after this node too
        if is_last and not _is_as_wide(self.info.tensor(node), width):
            what = f"{_describe(node)} changes the vocabulary dimension of the logits"
            hint = "regroup the hidden states and the weight, and leave the last dimension as it is"
            return Decline("class_dim_changed", what, hint, node)
        whole = reading if len(moves) < len(reading) else ()
        if kinds == {"same"}:
            kind = "same" if classes is None else "classes"
            return Step(node, kind, classes=classes, whole=whole)
        if "move" in kinds:
            if kinds - {"move", "same"} or classes is not None:
                hint = "move the classes in a separate call, after the rows"
                return Decline("unknown_step", f"{_describe(node)} mixes moves", hint, node)
            return Step(node, "move")
        if "detach" in kinds:
            return Step(node, "detach")
        kind = "rows" if "rows" in kinds else "reshape"
        return Step(node, kind, reading=tuple(moves), classes=classes, whole=whole)

    def _pointwise(self, node: Node, call: Call, head: Head, moved: bool) -> Step | Decline | None:
        op, args = call.op, call.args
        if op is aten.to.dtype:
            dtype, before = args["dtype"], self.info.tensor(self._chain_operand(node))
            if before is not None and dtype == before.dtype:
                return Step(node, "same")
            is_wider = dtype == torch.float64 != head.compute_dtype
            if not dtype.is_floating_point or is_wider:
                what = f"{_describe(node)} casts the logits to {dtype}"
                return Decline("dtype_unsupported", what, "cast them to float32", node)
            return Step(node, "to", dtype)
        if op is aten.tanh.default:
            return Step(node, "tanh")
        if op in _SCALES:
            kind = "mul" if op in (aten.mul.Tensor, aten.mul.Scalar) else "div"
            given = args["other"]
            tensor = args["self"] if given is self._chain_operand(node) else given
            if self.info.tensor(tensor) is not None:
                return self._factor(node, tensor, kind == "div", head, moved)
            factor = compat.known_number(given)
            if factor is None:
                return Decline(
                    "scale_not_constant",
                    f"{_describe(node)} scales the logits by a number that varies between calls",
                    "give it a fixed number, or keep the number in a tensor without dimensions",
                    node,
                )
            if not math.isfinite(factor) or factor == 0:
                what = f"{_describe(node)} scales by {factor}"
                hint = "scale by a number that is finite and not zero"
                return Decline("scale_not_constant", what, hint, node)
            symbol = given if isinstance(given, Node) else None
            return Step(node, kind, float(factor), symbol=symbol)
        if op is aten.add.Tensor:
            is_second = args["other"] is self._chain_operand(node)
            vector = args["self" if is_second else "other"]
            value = self.info.tensor(vector)
            logits = self.info.tensor(self._chain_operand(node))
            width = None if logits is None or logits.dim() < 1 else logits.shape[-1]
            is_vector = value is not None and _is_vector(value) and _is_as_wide(value, width)
            if moved or args["alpha"] != 1 or not is_vector:
                what = f"{_describe(node)} adds to the logits something other than a vector over "
                hint = "add it to the hidden states, or as a vector over the vocabulary"
                return Decline("logits_combined", f"{what}the vocabulary", hint, node)
            return Step(node, "bias", self._vector_source(vector))
        return None

    def _factor(
        self, node: Node, factor: Node, is_divisor: bool, head: Head, moved: bool
    ) -> Step | Decline:
        """Recognize a tensor by which logits are multiplied: one number for all rows, or one number
        per row."""
        value, scaled = self.info.value(factor), self.info.value(node)
        logits, verb = self.info.tensor(self._chain_operand(node)), _describe(node)
        if logits is None or not value.is_floating_point():
            said = f"{verb} scales the logits by a tensor of {value.dtype}"
            return Decline("scale_not_constant", said, "cast the scale to float32", node)
        if scaled.dtype == torch.float64 != head.compute_dtype:
            said = f"{verb} makes float64 of the logits"
            return Decline("dtype_unsupported", said, "cast the scale to float32", node)
        if value.dim() > logits.dim() or not same_shape(scaled.shape, logits.shape):
            said = f"{verb} gives the logits more rows than the head has made"
            hint = "expand the hidden states before the head"
            return Decline("scale_not_constant", said, hint, node)
        if self._depends_on(factor, head.node):
            said = f"{verb} scales the logits by a tensor that is computed from them"
            hint = "compute the scale from the hidden states"
            return Decline("scale_not_constant", said, hint, node)
        if all(compat.statically_true(size == 1) for size in value.shape):
            return Step(node, "factor", Factor(factor, is_divisor))
        if _is_vector(value):
            said = f"{verb} scales each class of the logits by a different number"
            hint = "scale the rows of the weight: F.linear(hidden, scale[:, None] * weight)"
            return Decline("scale_not_constant", said, hint, node)
        if moved or not compat.statically_true(value.shape[-1] == 1):
            said = f"{verb} scales the logits by a tensor with numbers for single classes of a row"
            hint = "scale by a number for each row, as (rows, 1), or weight the per-token losses"
            return Decline("scale_not_constant", said, hint, node)
        return Step(node, "factor", Factor(factor, is_divisor, rows=()))

    def _depends_on(self, node: Node, source: Node) -> bool:
        """Return whether the graph computes one tensor from another tensor."""
        first, seen, queue = self.info.positions[source], {node}, [node]
        while queue:
            current = queue.pop()
            if current is source:
                return True
            later = (n for n in current.all_input_nodes if self.info.positions[n] >= first)
            fresh = [n for n in later if n not in seen]
            seen.update(fresh)
            queue += fresh
        return False

    def _vector_source(self, node: Node) -> Node:
        """Follow a vector back through views and copies that preserve its values; return the
        earliest node that has these values."""
        while (call := call_of(node, *_VECTOR_VIEWS)) is not None:
            before, dtype = self.info.tensor(call.args["self"]), self.info.value(node).dtype
            if before is None or before.dtype != dtype or not _is_vector(before):
                break
            node = call.args["self"]
        return node

    def _no_head(self, node: Node) -> Decline:
        if node.op == "placeholder" and _is_held_by_module(node):
            said = (
                f"the logits come from `{node_name(node)}`, which a module holds, not from a head"
            )
            return Decline("no_linear_head", said, _NO_HEAD_HINT, node)
        if node.op == "placeholder":
            return Decline(
                "graph_break_between",
                "the logits enter this graph from outside: the head that made them is in another "
                "graph",
                "leave the head to the outermost group of fully_shard; accelerate groups it with "
                "the last norm: shard the model yourself before prepare(), with policy NO_WRAP"
                if compat.shards_by_fsdp2()
                else "compile the model and its loss as one function; fullgraph=True shows what "
                "split them",
                node,
            )
        values = map(compat.example_value, (node, *node.all_input_nodes))
        if any(map(compat.is_dtensor, values)):
            return Decline(
                "tensor_parallel_head",
                f"the head is tensor parallel: each rank has a part of the logits, which "
                f"{_describe(node)} moves between ranks",
                "gather the head to a plain tensor, or leave the loss to the model's own code",
                node,
            )
        if _is_part(node):
            return Decline(
                "unknown_step",
                f"{_describe(node)} between the head and the loss does more than cut the rows into "
                "parts of known sizes",
                "cut the hidden states, or compute one loss of all rows",
                node,
            )
        what = f"the logits come from {_describe(node)}, which is not a linear head"
        hint = _HINTS_BY_OP.get(node_name(node).rstrip("_"), _NO_HEAD_HINT)
        return Decline("no_linear_head", what, hint, node)


def is_wide(classes: int, width: int) -> bool:
    """Return whether a linear layer of the given sizes is an output projection rather than an inner
    layer."""
    return classes >= SMALLEST_VOCABULARY and classes > _HEAD_WIDTH * width


LEAVE_OUT_HINT = (
    "to leave out classes, cut them off (logits[..., :n]), or add a vector over the vocabulary "
    "that has -inf or a large negative number for them"
)
_SIGMOID_HINT = (
    "write c * sigmoid(x) as c / 2 * tanh(x / 2), a softcap: all logits become smaller by c / 2, "
    "which does not change cross entropy"
)
_HINTS_BY_OP = {
    **dict.fromkeys(("where", "masked_fill", "index_fill"), LEAVE_OUT_HINT),
    "sigmoid": _SIGMOID_HINT,
}
_NO_HEAD_HINT = (
    "make the logits by one linear layer, followed by casts, scales, one softcap and added vectors"
)
_UNFOLDED_HINTS = {
    "softcap_twice": "cap the logits once",
    "bias_after_softcap": "add the vector before the softcap",
    "scale_not_constant": "scale the logits before the softcap and before a vector is added",
}


def fold(chain: Chain) -> Modifiers | Decline:
    """Turn the pointwise steps after an output projection into the fused loss op's arguments.

    The arguments are scale, softcap, bias, the tensors that multiply the logits, and the range of
    classes that remains after slices of the logits.
    """
    pairs: list[tuple[str, Any]] = []
    factors: list[Factor] = []
    for place, step in enumerate(chain.steps):
        value, later = step.value, chain.steps[place + 1 :]
        if step.kind == "bias":
            scales = tuple(s.value for s in later if s.kind == "factor")
            value = Vector(step.value, _left(later), scales)
        if step.kind == "factor":
            rows = [s.effect for s in chain.steps[:place] if s.kind in ("rows", "reshape")]
            value = replace(value, rows=None if value.rows is None else tuple(rows))
            factors.append(value)
        pairs.append((step.kind, value))
    found = fold_steps(pairs)
    if isinstance(found, Unfoldable):
        step, hint = chain.steps[found.place], _UNFOLDED_HINTS.get(found.code, "")
        return Decline(found.code, found.sentence, hint, step.node)
    uneven = next((s for s in chain.steps if s.kind == "factor" and s.value.rows is not None), None)
    scaled = [factor for vector, _ in found.biases for factor in vector.factors]
    has_bias = chain.head.bias is not None or any(factor.rows is not None for factor in scaled)
    if uneven is not None and has_bias:
        said = f"{_describe(uneven.node)} scales each row, and the bias in it, by its own number"
        hint = "scale the hidden states, add the bias after that; or scale all rows by one number"
        return Decline("scale_not_constant", said, hint, uneven.node)
    return replace(found, factors=tuple(factors), classes=chain.classes)


def _is_held_by_module(node: Node) -> bool:
    """Return whether a graph input is a module's parameter or buffer."""
    name = compat.source_name(node)
    return any(part in name for part in ("._parameters[", "._buffers[", "_modules["))


def _class_cut(node: Node, call: Call, rank: int, width: Any) -> tuple[int, int] | Decline | None:
    """Return the classes that remain after a slice of the last dimension, or None for any other
    call."""
    if call.op not in (aten.slice.Tensor, aten.narrow.default):
        return None
    a, size = call.args, None if width is None else compat.known_size(width)
    if a["dim"] % rank != rank - 1:
        return None
    names = ("start", "end", "step") if call.op is aten.slice.Tensor else ("start", "length")
    given = [None if a[name] is None else _known_integer(a[name]) for name in names]
    is_known = all((g is None) == (a[name] is None) for g, name in zip(given, names, strict=True))
    if size is None or not is_known:
        said = f"{_describe(node)} cuts the classes at a place that varies from call to call"
        return Decline("unknown_step", said, "cut them at a fixed number", node)
    start, end, step = (*given, 1) if call.op is aten.narrow.default else given
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    if call.op is aten.narrow.default:
        end = start + (end or 0)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    if step not in (None, 1):
        said = f"{_describe(node)} takes one class in {step}"
        hint = f"take these rows of the weight: F.linear(hidden, weight[{start}:{end}:{step}])"
        return Decline("unknown_step", said, hint, node)
    return start, max(start, end)


def _known_integer(value: Any) -> int | None:
    """Return an integer argument, or the constant integer value of a node, otherwise None."""
    number = compat.example_value(value) if isinstance(value, Node) else value
    return compat.known_size(number) if isinstance(number, (int, torch.SymInt)) else None


def _is_as_wide(value: torch.Tensor | None, width: Any) -> bool:
    """Return whether the last dimension of a tensor is known to have a given size."""
    if value is None or width is None or value.dim() < 1:
        return False
    return compat.statically_true(value.shape[-1] == width)


def replay_rows(editor: Editor, hidden: Node, steps: Sequence[Step], hidden_size: Any) -> Node:
    """Insert copies of those `steps` that reorder, select or regroup the logits' rows (tokens).

    The copies apply to the hidden states. The last dimension of a copy's result is the hidden size
    instead of the number of classes.
    """
    for call in (call for step in steps for call in step.reading):
        hidden = _replay(editor, hidden, call, hidden_size)
    return hidden


def _replay(editor: Editor, current: Node, call: Call, hidden_size: Any) -> Node:
    args = dict(call.args)
    args.pop("self", None)
    if call.op in SAME_OPS:
        return current
    if call.op in (aten.view.default, aten.reshape.default):
        sizes = args["size"] if "size" in args else args["shape"]
        return editor.call(aten.reshape.default, current, [*sizes[:-1], hidden_size])
    return editor.call(call.op, current, *args.values())


_SCALES = named("mul.Tensor mul.Scalar div.Tensor div.Scalar")
SAME_OPS = named("contiguous.default clone.default alias.default")
_DIM_OPS = named("select.int slice.Tensor narrow.default squeeze.dim index_select.default")
_VECTOR_VIEWS = named("to.dtype view.default reshape.default unsqueeze.default alias.default")
_MOVE_OPS = (
    named("to.dtype detach.default view.default reshape.default flatten.using_ints index.Tensor")
    | named("unsqueeze.default transpose.int permute.default movedim.int movedim.intlist")
    | SAME_OPS
    | _DIM_OPS
)
_STEP_OPS = _MOVE_OPS | _SCALES | named("tanh.default add.Tensor")


def _row_kind(call: Call, rank: int) -> str | None:
    """If a call on logits keeps all their classes, return the call's kind (a `Step.kind`).

    The kind `rows` reorders or selects rows (tokens), `reshape` regroups leading dimensions, and
    `move` moves the class dimension to position 1. A call of kind `same` or `detach` changes no
    value. For any other call, return None.
    """
    op, args = call.op, call.args
    last = rank - 1
    if op in SAME_OPS:
        return "same"
    if op is aten.detach.default:
        return "detach"
    if op in _DIM_OPS:
        return "rows" if args["dim"] % rank != last else None
    if op is aten.unsqueeze.default:
        return "reshape" if args["dim"] % (rank + 1) <= last else None
    if op is aten.flatten.using_ints:
        return "reshape" if args["end_dim"] % rank < last else None
    if op in (aten.view.default, aten.reshape.default):
        sizes = args["size"] if op is aten.view.default else args["shape"]
        return "reshape" if isinstance(sizes, (list, tuple)) and len(sizes) >= 1 else None
    if op is aten.index.Tensor:
        return "rows" if len(args["indices"]) <= last else None
    permutation = _permutation(call, rank)
    if permutation is None:
        return None
    if permutation[-1] == last:
        return "rows"
    if rank >= 2 and permutation == [0, last, *range(1, last)]:
        return "move"
    return None


def _permutation(call: Call, rank: int) -> list[int] | None:
    op, args = call.op, call.args
    order = list(range(rank))
    if op is aten.transpose.int:
        a, b = args["dim0"] % rank, args["dim1"] % rank
        order[a], order[b] = order[b], order[a]
        return order
    if op is aten.permute.default:
        return [d % rank for d in args["dims"]]
    if op in (aten.movedim.int, aten.movedim.intlist):
        sources, targets = (
            given if isinstance(given, (list, tuple)) else [given]
            for given in (args["source"], args["destination"])
        )
        moved = {t % rank: s % rank for s, t in zip(sources, targets, strict=True)}
        rest = iter([d for d in range(rank) if d not in moved.values()])
        return [moved[i] if i in moved else next(rest) for i in range(rank)]
    return None


def _is_vector(value: torch.Tensor) -> bool:
    return value.dim() >= 1 and all(compat.statically_true(s == 1) for s in value.shape[:-1])


def _describe(node: Node) -> str:
    """Return the name of a node's operation.

    If the node is one of several results, return the name of the op that returns these results.
    """
    return f"`{node_name(node.all_input_nodes[0] if _is_part(node) else node)}`"


def _is_part(node: Node) -> bool:
    """Return whether a node is one of several results of an op, for example of `sort`."""
    if node.target is not operator.getitem or not is_several(node.args[0]):
        return False
    return not isinstance(node.all_input_nodes[0].target, compat.HigherOrderOperator)
