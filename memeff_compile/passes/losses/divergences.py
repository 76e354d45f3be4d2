"""Recognize divergences between the softmaxes of two logits tensors, independently of how the code
writes their sums.

A loss sums one number per class. The module describes this number as a polynomial. Its variables
are the student's probability p, the teacher's probability q, log p, log q, and log m. Here, m is a
mixture of p and q. The fused op memeff::linear_divergence computes the sums of six products, such
as q log p. `Coefficients` contains the polynomial's factor for each of the six products. The
factors can describe `kl_div`, hand-written sums, symmetric and Jensen-Shannon divergences, and
cross entropies with a teacher's probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...kernels.linear_divergence import Coefficients
from ..graph.base import Decline
from ..graph.canonical import aten, back_over, call_of, named, read_one
from ..graph.graph_info import GraphInfo, node_name, same_shape
from .head import SMALLEST_VOCABULARY, Chain, HeadReader
from .softmax import Soft, SoftmaxReader

_MAX_DEPTH = 24
_CLOSE = 1e-6  # tolerance for shares that are rounded to fp32
_NOTHING = 1e-12  # terms that cancel


@dataclass(frozen=True)
class Side:
    """The logits of the student or of the teacher: the result of an output projection, or a tensor
    such as a graph input."""

    key: tuple[Any, ...]
    chain: Chain | None
    logits: Node | None  # without a head: (..., V)
    scale: float  # factor of the logits
    trains: bool
    node: Node  # a node with a number per class of this side

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes from the output projection (included) to the softmax (excluded)."""
        if self.chain is None:
            return ()
        return (*self.chain.head.nodes, *(step.node for step in self.chain.steps))


# An atom is ("p", side), ("log p", side) or ("log m", ((side, share), (side, share))), in which a
# side is its key.
Atom = tuple[str, Any]
Terms = Mapping[tuple[Atom, ...], float]


@dataclass(frozen=True)
class Mask:
    """A mask with one number per row (token), by which a divergence is multiplied.

    With `fills`, the divergence is instead set to zero in rows in which the mask is True.
    """

    node: Node
    fills: bool = False


@dataclass(frozen=True)
class Expression:
    """A polynomial in probabilities and log-probabilities, with one value per row and class.

    `terms` has the factor of each term. Each mask in `masks` multiplies the whole polynomial by one
    number per row, or sets the polynomial to zero in some rows.
    """

    terms: Terms
    masks: tuple[Mask, ...] = ()

    def times(self, factor: float) -> Expression:
        """Return the expression multiplied by a number."""
        return replace(self, terms={atoms: factor * each for atoms, each in self.terms.items()})


@dataclass
class Divergence:
    """A divergence with one number per row (token), and the nodes that scale, mask and sum these
    numbers."""

    node: Node  # the node that is replaced
    student: Side
    teacher: Side
    coefficients: Coefficients
    masks: list[Mask]
    is_total: bool  # whether all rows are summed
    factor: float = 1.0
    over_rows: bool = False  # divided by the number of rows
    over_first: Any = None  # divided by this size
    covered: list[Node] = field(default_factory=list)
    name: str = ""
    group: Group = field(default_factory=lambda: Group([]), compare=False, repr=False)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Return the student's and the teacher's logits, each as a `Side`."""
        return self.student, self.teacher


@dataclass
class Group:
    """The divergences of one student's logits, in graph order; all or none are rewritten.

    If the pass cannot rewrite one divergence of the group, the graph must build the logits anyway.
    So the pass checks all divergences of the group before it rewrites the first one. If one is
    declined, the whole group is declined for the reason in the field `refusal`.
    """

    members: list[Divergence]
    is_checked: bool = False
    refusal: Decline | None = None


class DivergenceReader:
    """Recognizes the divergences that the nodes of one graph compute."""

    def __init__(self, info: GraphInfo, reader: HeadReader) -> None:
        self.info, self.reader = info, reader
        self.softmax = SoftmaxReader(info, reader)
        self.sides: dict[tuple[Any, ...], Side] = {}
        self.visited: list[Node] = []
        self._read: dict[Node, tuple[Expression | None, tuple[Node, ...]]] = {}

    def divergences(self, node: Node) -> Iterable[Divergence | Decline]:
        """Yield the divergence that `node` computes by a sum over the classes.

        If the pass cannot read the sum as a divergence, yield the reason.
        """
        self.visited = []
        found = self._reduced(node)
        if found is None:
            return
        expression, reduction, source = found
        match = self._match(node, expression)
        if match is None or isinstance(match, Decline):
            if match is not None:
                yield match
            return
        rows = self.info.value(source).shape[:-1]
        match.covered = [*dict.fromkeys((*self.visited, *match.student.nodes, node))]
        match.covered += [each for each in match.teacher.nodes if each not in match.covered]
        match.name = node_name(node)
        classes = compat.known_size(self.info.value(source).shape[-1])
        if classes is None:
            return
        match.is_total = reduction != "rows"
        match.over_rows = reduction == "mean"
        if reduction == "mean":
            match.factor /= classes
        if reduction == "row mean":
            match.factor, match.is_total = match.factor / classes, False
        if reduction == "batchmean":
            match.over_first = self.info.value(source).shape[0]
        if reduction == "row average":
            match.over_rows = True
        if match.is_total:
            self._add_totals(match, reduction)
        else:
            self._follow(match, rows)
        yield match

    def _add_totals(self, match: Divergence, reduction: str) -> None:
        """Extend a divergence by sums that later nodes add to it or subtract from it.

        A later node may also subtract the divergence from such a sum. The sum must have terms, such
        as p log q, of the same two softmaxes p and q. The graph must reduce the sum in the same way
        as the divergence.
        """
        node, factor, steps = match.node, 1.0, list[Node]()
        while len(node.users) == 1 and len(steps) < _MAX_DEPTH:
            (user,) = node.users
            call = read_one(user)
            number = None if call is None else _multiplier(call, node)
            if number is not None:
                factor *= number
            elif call is None or call.op not in (aten.add.Tensor, aten.sub.Tensor):
                return
            else:
                a, self.visited = call.args, []
                is_first = a["self"] is node
                found = self._total(a["other"] if is_first else a["self"], reduction)
                terms = {} if found is None else found.terms
                terms = {atoms: each for atoms, each in terms.items() if abs(each) > _NOTHING}
                added = _coefficients(terms, match.student.key, match.teacher.key)
                if found is None or added is None or a["alpha"] != 1:
                    return
                signs = [1.0, 1.0 if call.op is aten.add.Tensor else -1.0]
                mine, theirs = signs if is_first else signs[::-1]
                joined = _joined(match.coefficients, mine * factor, added, theirs)
                if joined is None:
                    return
                match.coefficients, match.node, factor = joined, user, 1.0
                match.covered += [*self.visited, *steps, user]
                steps.clear()
                node = user
                continue
            steps.append(user)
            node = user

    def _total(self, node: Any, reduction: str, depth: int = 0) -> Expression | None:
        """Recognize the sum or mean (chosen by `reduction`) of terms such as p log q.

        Here, p and q are softmaxes. The graph may multiply this sum or mean by numbers."""
        if not isinstance(node, Node) or len(node.users) != 1 or depth > _MAX_DEPTH:
            return None
        call, reduced = read_one(node), self._reduced(node)
        if reduced is not None:
            expression, of_this, _ = reduced
            self.visited.append(node)
            return None if of_this != reduction or expression.masks else expression
        for inner in () if call is None else (call.args.get("self"), call.args.get("other")):
            number = _multiplier(call, inner) if isinstance(inner, Node) else None
            if number is not None:
                found = self._total(inner, reduction, depth + 1)
                self.visited.append(node)
                return None if found is None else found.times(number)
        return None

    def _reduced(self, node: Node) -> tuple[Expression, str, Node] | None:
        """Recognize a sum over the classes, or a sum over all classes and rows (tokens)."""
        name = node_name(node)
        if name == "kl_div":
            given = kl_arguments(node)
            if given is None or given["reduction"] not in ("sum", "mean", "batchmean"):
                return None
            expression = self._kl(given)
            return None if expression is None else (expression, given["reduction"], given["input"])
        call = read_one(node)
        if call is None:
            return None
        if call.op is aten.cross_entropy_loss.default:
            return self._soft_cross_entropy(call.args)
        if call.op not in _SUMS:
            return None
        source, value = call.args["self"], self.info.tensor(call.args["self"])
        if value is None or value.dim() < 2 or not value.is_floating_point():
            return None
        if (compat.known_size(value.shape[-1]) or 0) < SMALLEST_VOCABULARY:
            return None
        dtype, dims = call.args.get("dtype"), call.args.get("dim")
        if dtype is not None and dtype.itemsize < value.dtype.itemsize:
            return None
        is_mean = call.op in _MEANS
        if dims is not None and (len(dims) != 1 or dims[0] % value.dim() != value.dim() - 1):
            return None
        if call.args.get("keepdim"):
            return None
        expression = self.expression(source)
        if expression is None:
            return None
        if dims is None:
            return expression, "mean" if is_mean else "sum", source
        return expression, "row mean" if is_mean else "rows", source

    def _soft_cross_entropy(self, a: Mapping[str, Any]) -> tuple[Expression, str, Node] | None:
        """Recognize a cross entropy whose targets are the softmax of another output projection."""
        value, target = self.info.tensor(a["self"]), self.info.tensor(a["target"])
        if value is None or target is None or not target.is_floating_point() or value.dim() != 2:
            return None
        if a["weight"] is not None or a["label_smoothing"] != 0.0:
            return None
        chain = self.reader.chain(a["self"])
        probabilities = self.expression(a["target"])
        if isinstance(chain, Decline) or chain.moved or probabilities is None:
            return None
        side = self.side(Soft(chain, ()), a["self"])
        terms = _product(probabilities.terms, {(("log p", side.key),): -1.0})
        if terms is None:
            return None
        reduction = {0: "rows", 1: "row average", 2: "sum"}.get(a["reduction"])
        if reduction is None or probabilities.masks:
            return None
        return Expression(terms), reduction, a["self"]

    def expression(self, node: Any, depth: int = 0) -> Expression | None:
        """Describe a node with one value per class as a polynomial, or return None.

        The polynomial's variables are softmax probabilities, their logarithms, and logarithms of
        mixtures of these probabilities."""
        number = constant(node)
        if number is not None:
            return Expression({(): number})
        if not isinstance(node, Node):
            return None
        start = len(self.visited)
        if node not in self._read:  # once: both operands of a sum may lead to one node
            found = self._uncached(node, depth)
            if found is None:
                del self.visited[start:]
            self._read[node] = found, tuple(self.visited[start:])
            return found
        found, way = self._read[node]
        self.visited += way
        return found

    def _uncached(self, node: Node, depth: int) -> Expression | None:
        value = self.info.tensor(node)
        if value is None or depth > _MAX_DEPTH or value.dim() == 0:
            return None
        atom = self._atom(node)
        if atom is not None:
            return Expression({(atom,): 1.0})
        found = self._combined(node, depth + 1)
        if found is not None:
            self.visited.append(node)
        return found

    def _combined(self, node: Node, depth: int) -> Expression | None:
        name = node_name(node)
        if name == "kl_div":
            given = kl_arguments(node)
            return None if given is None or given["reduction"] != "none" else self._kl(given, depth)
        if name == "lerp" and len(node.args) == 3 and not node.kwargs:
            share = constant(node.args[2])
            left = None if share is None else self.expression(node.args[0], depth)
            right = None if left is None else self.expression(node.args[1], depth)
            return None if share is None else _added(left, right, 1.0 - share, share)
        if name in ("logaddexp", "xlogy"):
            pair = [self.expression(each, depth) for each in node.args[:2]]
            return _READ_PAIRS[name](pair[0], pair[1])
        call = read_one(node)
        if call is None:
            return None
        a, op = call.args, call.op
        if op in (aten.logsumexp.default, aten.log.default):
            return self._mixture(a, op, depth)
        if op is aten.neg.default:
            found = self.expression(a["self"], depth)
            return None if found is None else found.times(-1.0)
        if op is aten.to.dtype:
            is_floating = a["dtype"].is_floating_point
            return self.expression(a["self"], depth) if is_floating else None
        if op in _FILLS:
            return self._filled(a, depth)
        if op is aten.index.Tensor:
            return self._selected(node, a, depth)
        if op in _ADDS:
            alpha = compat.known_number(a["alpha"])
            left = self.expression(a["self"], depth)
            right = None if left is None else self.expression(a["other"], depth)
            signs = (1.0, alpha) if op not in _REVERSED else (-(alpha or 0.0), 1.0)
            if op in (aten.sub.Tensor, aten.sub.Scalar):
                signs = (1.0, -(alpha or 0.0))
            return None if alpha is None else _added(left, right, *signs)
        if op in _PRODUCTS:
            return self._multiplied(a["self"], a["other"], depth)
        if op in _QUOTIENTS:
            number, found = constant(a["other"]), self.expression(a["self"], depth)
            return found.times(1.0 / number) if found is not None and number else None
        return None

    def _multiplied(self, left: Any, right: Any, depth: int) -> Expression | None:
        pair = [self.expression(each, depth) for each in (left, right)]
        if pair[0] is not None and pair[1] is not None:
            masks = (*pair[0].masks, *pair[1].masks)
            return _expressed(_product(pair[0].terms, pair[1].terms), masks)
        for found, mask, whole in ((pair[0], right, left), (pair[1], left, right)):
            if found is not None and self._is_row_mask(mask, whole):
                return replace(found, masks=(*found.masks, Mask(mask)))
        return None

    def _filled(self, a: Mapping[str, Any], depth: int) -> Expression | None:
        """Recognize an op that sets values to zero, in masked rows or in classes whose logits are
        infinite."""
        if constant(a["value"]) != 0:
            return None
        found, mask = self.expression(a["self"], depth), a["mask"]
        if found is None or not isinstance(mask, Node):
            return None
        if self._is_row_mask(mask, a["self"]):
            return replace(found, masks=(*found.masks, Mask(mask, fills=True)))
        if node_name(mask) != "isinf" or not isinstance(mask.args[0], Node):
            return None
        chain = self.reader.chain(mask.args[0])
        # Without a bias only an overflow makes logits infinite.
        if isinstance(chain, Decline) or chain.head.bias is not None:
            return None
        if any(step.kind == "bias" for step in chain.steps):
            return None
        self.visited += [mask, *(step.node for step in chain.steps)]
        return found

    def _selected(self, node: Node, a: Mapping[str, Any], depth: int) -> Expression | None:
        """Recognize a selection of rows by a boolean mask.

        The op memeff::linear_divergence sums over all rows. Rows that the mask does not select add
        zero to this sum. Dynamo captures such a selection if
        `torch._dynamo.config.capture_dynamic_output_shape_ops` is set.
        """
        value, indices = self.info.tensor(a["self"]), a["indices"]
        mask = indices[0] if len(indices) == 1 and isinstance(indices[0], Node) else None
        given = self.info.tensor(mask)
        if value is None or given is None or given.dtype != torch.bool:
            return None
        if not same_shape(given.shape, value.shape[:-1]):
            return None
        found = self.expression(a["self"], depth)
        asserted = list[Node]()
        for user in node.users:
            call = read_one(user)
            is_sum = call is not None and call.op in _SUMS - _MEANS
            if not ((call and is_sum and call.args.get("dim") is None) or _asserts(user, asserted)):
                return None
        self.visited += asserted
        if found is None or mask is None:
            return None
        return replace(found, masks=(*found.masks, Mask(mask)))

    def _is_row_mask(self, mask: Any, whole: Any) -> bool:
        given, value = self.info.tensor(mask), self.info.tensor(whole)
        if given is None or value is None or given.requires_grad:
            return False
        if given.dim() != value.dim() or not same_shape(given.shape[:-1], value.shape[:-1]):
            return False
        return compat.statically_true(given.shape[-1] == 1)

    def _kl(self, given: Mapping[str, Any], depth: int = 0) -> Expression | None:
        """Recognize target * (log target - input), as in `kl_div`."""
        value, other = self.info.tensor(given["input"]), self.info.tensor(given["target"])
        if value is None or other is None or not same_shape(value.shape, other.shape):
            return None
        logs = self.expression(given["input"], depth)
        target = self.expression(given["target"], depth)
        if logs is None or target is None or logs.masks or target.masks:
            return None
        alone = _only(target)
        if alone is None or alone[0] != ("log p" if given["log_target"] else "p"):
            return None
        probability, logarithm = ("p", alone[1]), ("log p", alone[1])
        inner = _added(Expression({(logarithm,): 1.0}), logs, 1.0, -1.0)
        return None if inner is None else _expressed(_product({(probability,): 1}, inner.terms))

    def _mixture(self, a: Mapping[str, Any], op: Any, depth: int) -> Expression | None:
        """Recognize the logarithm of a mixture of probabilities.

        The forms are `log(a q + b p)` and `logsumexp([log q + log a, log p + log b])`, with a +
        b = 1."""
        if op is aten.log.default:
            found = self.expression(a["self"], depth)
            if found is None or found.masks:
                return None
            shares = {atoms[0]: share for atoms, share in found.terms.items() if len(atoms) == 1}
            is_whole = len(shares) == len(found.terms) and all(k == "p" for k, _ in shares)
            return _mixed({key: share for (_, key), share in shares.items()}) if is_whole else None
        stacked = call_of(a["self"], aten.stack.default)
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        if stacked is None or a["keepdim"] or len(dims) != 1 or len(stacked.args["tensors"]) != 2:
            return None
        rank = self.info.value(a["self"]).dim()
        if dims[0] % rank != stacked.args["dim"] % rank or dims[0] % rank == rank - 1:
            return None
        parts = [self.expression(each, depth) for each in stacked.args["tensors"]]
        self.visited.append(a["self"])
        return _log_of_sum(*parts)

    def _atom(self, node: Node) -> Atom | None:
        for kind, read in (("log p", self.softmax.log_probs), ("p", self.softmax.probs)):
            soft = read(node)
            if isinstance(soft, Soft):
                if soft.chain.moved:
                    return None
                self.visited += [*soft.through, *(step.node for step in soft.chain.steps)]
                return kind, self.side(soft, node).key
        return self._headless(node)

    def side(self, soft: Soft, node: Node) -> Side:
        """Return the `Side` (student or teacher) with the logits of a softmax; for equal softmaxes,
        return the same object.
        """
        chain, trains = soft.chain, self.info.value(node).requires_grad
        rows = tuple(step.effect for step in chain.row_steps)
        points = [(s.kind, s.value) for s in chain.steps if s.kind in ("mul", "div", "tanh")]
        others = tuple(s.node for s in chain.steps if s.kind in ("bias", "factor", "classes"))
        key = ("head", chain.head.node.name, rows, tuple(points), others, trains)
        return self.sides.setdefault(key, Side(key, chain, None, 1.0, trains, node))

    def _headless(self, node: Node) -> Atom | None:
        """Recognize a softmax of a teacher's logits if these logits come from no output projection
        of this graph.
        """
        way: list[Node] = []
        start = back_over(node, _SAME, way)
        call = call_of(start, aten.log_softmax.int, aten.softmax.int)
        value = self.info.tensor(start)
        if call is None or value is None or call.args["dim"] % value.dim() != value.dim() - 1:
            return None
        dtype, logits = call.args["dtype"], call.args["self"]
        given = self.info.tensor(logits)
        if given is None or (dtype is not None and dtype.itemsize < given.dtype.itemsize):
            return None
        scale, between = 1.0, list[Node]()
        while (step := read_one(logits)) is not None and len(between) < _MAX_DEPTH:
            factor = constant(step.args["other"]) if step.op in _PRODUCTS | _QUOTIENTS else None
            if factor:
                scale *= factor if step.op in _PRODUCTS else 1.0 / factor
            elif step.op not in _SAME:
                break
            between.append(logits)
            logits = step.args["self"]
        if not isinstance(self.reader.chain(logits), Decline):
            return None  # a head whose chain cannot be read
        trains = self.info.value(node).requires_grad
        key = ("given", logits.name, scale, trains)
        self.visited += [*way, start, *between]
        self.sides.setdefault(key, Side(key, None, logits, scale, trains, node))
        return "log p" if call.op is aten.log_softmax.int else "p", key

    def _match(self, node: Node, expression: Expression) -> Divergence | Decline | None:
        terms = {atoms: each for atoms, each in expression.terms.items() if abs(each) > _NOTHING}
        keys = {key for atoms in terms for atom in atoms for key in _keys(atom)}
        if len(keys) != 2 or any(len(atoms) != 2 for atoms in terms):
            return None
        first, second = sorted((self.sides[key] for key in keys), key=self._order)
        if first.chain and second.chain and first.chain.head.node is second.chain.head.node:
            return None  # one head: two products for its logits would take longer than one
        trains = [side for side in (first, second) if side.trains]
        if len(trains) == 2:
            said = "both softmaxes that this divergence compares have a gradient"
            hint = "compute the teacher under torch.no_grad(), or detach its logits"
            return Decline("teacher_trains", said, hint, node)
        student, teacher = (first, second) if first in trains or not trains else (second, first)
        if student.chain is None:
            if teacher.chain is None or trains:
                return None
            student, teacher = teacher, student
        coefficients = _coefficients(terms, student.key, teacher.key)
        if coefficients is None:
            return None
        masks = list(expression.masks)
        return Divergence(node, student, teacher, coefficients, masks, is_total=False)

    def _order(self, side: Side) -> tuple[bool, int]:
        return side.chain is None, self.info.positions[side.node]

    def _follow(self, match: Divergence, rows: Any) -> None:
        """Extend a divergence by the later nodes that turn its numbers, one per row (token), into a
        single number."""
        steps = _Steps([], 1.0)
        node = match.node
        while len(node.users) == 1 and len(steps.nodes) < _MAX_DEPTH:
            (user,) = node.users
            call, value = read_one(user), self.info.tensor(user)
            if call is None or value is None or not value.is_floating_point():
                return
            if self.info.regions[user] != self.info.regions[node]:
                return
            if call.op in _SUMS:
                dtype, dims = call.args.get("dtype"), call.args.get("dim")
                is_whole = dims is None or self.info.value(node).dim() == len(dims) == 1
                if dtype not in (None, self.info.value(node).dtype) or value.dim() or not is_whole:
                    return
                match.covered += [*steps.nodes, user]
                match.masks += steps.masks
                match.factor *= steps.factor
                match.over_rows = match.over_rows or call.op in _MEANS
                match.node, match.is_total = user, True
                return
            if not (
                self._adds_another(match, node, call, steps)
                or self._is_linear(node, user, call, steps)
            ):
                return
            steps.nodes.append(user)
            node = user

    def _adds_another(self, match: Divergence, node: Node, call: Any, steps: _Steps) -> bool:
        """Include another sum over the classes, such as sum(p log q), in a divergence.

        `node` has the divergence's numbers, one per row (token). `call` must be an addition or a
        subtraction, in either order, of `node` and a second sum. Both must compare the same two
        softmaxes. The divergence then contains the nodes of both sums. Return whether the second
        sum was included.
        """
        if call.op not in (aten.add.Tensor, aten.sub.Tensor) or call.args["alpha"] != 1:
            return False
        if match.masks or steps.masks:
            return False
        is_first = call.args["self"] is node
        other = call.args["other"] if is_first else call.args["self"]
        self.visited = []
        found = self._sum_of_rows(other)
        if found is None or found.masks or not isinstance(other, Node):
            return False
        terms = {atoms: each for atoms, each in found.terms.items() if abs(each) > _NOTHING}
        added = _coefficients(terms, match.student.key, match.teacher.key)
        if added is None:
            return False
        signs = [1.0, 1.0 if call.op is aten.add.Tensor else -1.0]
        mine, theirs = signs if is_first else signs[::-1]
        joined = _joined(match.coefficients, mine * steps.factor, added, theirs)
        if joined is None:
            return False
        match.coefficients, steps.factor = joined, 1.0
        (match.node,) = node.users
        match.covered += [*self.visited, *steps.nodes, match.node]
        steps.nodes.clear()
        return True

    def _sum_of_rows(self, node: Any, depth: int = 0) -> Expression | None:
        """Recognize a sum over the classes of each row (token), multiplied or divided by constants.

        Return the expression under the sum, after the same multiplications and divisions by
        constants. For other nodes, return None.
        """
        call = read_one(node) if isinstance(node, Node) else None
        if call is None or depth > _MAX_DEPTH or len(node.users) != 1:
            return None
        a, found = call.args, None
        if call.op is aten.sum.dim_IntList:
            reduced = self._reduced(node)
            found = reduced[0] if reduced is not None and reduced[1] == "rows" else None
        elif call.op is aten.neg.default:
            found = self._sum_of_rows(a["self"], depth + 1)
            found = None if found is None else found.times(-1.0)
        elif call.op in _PRODUCTS | _QUOTIENTS:
            pairs = ((a["self"], a["other"]), (a["other"], a["self"]))
            for rows, factor in pairs if call.op in _PRODUCTS else pairs[:1]:
                number = constant(factor)
                found = self._sum_of_rows(rows, depth + 1) if number else None
                if found is not None and number:
                    found = found.times(number if call.op in _PRODUCTS else 1.0 / number)
                    break
        if found is not None:
            self.visited.append(node)
        return found

    def _is_linear(self, node: Node, user: Node, call: Any, steps: _Steps) -> bool:
        """Return whether `user` only reshapes `node`, or multiplies it by a factor or a mask.

        `node` has a divergence's numbers, one per row (token). The factor or mask is recorded in
        `steps`."""
        a, op = call.args, call.op
        if op is aten.neg.default:
            steps.factor = -steps.factor
            return True
        if op in (aten.view.default, aten.reshape.default, aten.flatten.using_ints):
            return True
        if op in _FILLS and a["self"] is node and constant(a["value"]) == 0:
            steps.masks.append(Mask(a["mask"], fills=True))
            return self._is_alike(a["mask"], node)
        if op not in _PRODUCTS | _QUOTIENTS:
            return False
        other = a["other"] if a["self"] is node else a["self"]
        number = constant(other)
        if number is not None and (op in _PRODUCTS or a["self"] is node) and number:
            steps.factor *= number if op in _PRODUCTS else 1.0 / number
            return True
        if op in _PRODUCTS and isinstance(other, Node) and self._is_alike(other, node):
            steps.masks.append(Mask(other))
            return True
        return False

    def _is_alike(self, mask: Any, node: Node) -> bool:
        given = self.info.tensor(mask)
        if given is None or given.requires_grad:
            return False
        return same_shape(given.shape, self.info.value(node).shape)


@dataclass
class _Steps:
    """The nodes that scale, mask or reshape a divergence's numbers, one per row (token)."""

    nodes: list[Node]
    factor: float
    masks: list[Mask] = field(default_factory=list)


_SUMS = named("sum.dim_IntList sum.default mean.dim mean.default")
_MEANS = named("mean.dim mean.default")
_ADDS = named("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor")
_REVERSED = named("rsub.Scalar rsub.Tensor")
_PRODUCTS = named("mul.Tensor mul.Scalar")
_QUOTIENTS = named("div.Tensor div.Scalar")
_FILLS = named("masked_fill.Scalar masked_fill.Tensor")
_SAME = named("to.dtype detach.default contiguous.default clone.default alias.default")


def _asserts(node: Node, seen: list[Node]) -> bool:
    """Return whether only assertions read a size; add the size and these assertions to `seen`."""
    name = node_name(node)
    seen.append(node)
    if name in _ASSERTIONS:
        return not node.users
    value = compat.example_value(node)
    is_number = not isinstance(value, torch.Tensor)
    return is_number and bool(node.users) and all(_asserts(user, seen) for user in node.users)


_ASSERTIONS = ("_assert_scalar", "_check", "sym_constrain_range_for_size", "_check_is_size")


def _multiplier(call: Any, node: Any) -> float | None:
    """Return the number by which a user of `node` multiplies `node`, or None if the user does
    something else.
    """
    a = call.args
    if call.op is aten.neg.default:
        return -1.0
    if call.op not in _PRODUCTS | _QUOTIENTS or (call.op in _QUOTIENTS and a["self"] is not node):
        return None
    number = constant(a["other"] if a["self"] is node else a["self"])
    if not number:
        return None
    return number if call.op in _PRODUCTS else 1.0 / number


def kl_arguments(node: Node) -> dict[str, Any] | None:
    """Return the arguments of an F.kl_div call by name, or None if the pass cannot read the
    arguments.
    """
    names = ("input", "target", "size_average", "reduce", "reduction", "log_target")
    defaults = {"size_average": None, "reduce": None, "reduction": "mean", "log_target": False}
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    is_plain = isinstance(given["reduction"], str) and isinstance(given["log_target"], bool)
    if not is_plain or given["size_average"] is not None or given["reduce"] is not None:
        return None
    return given if set(names) == set(given) else None


def constant(node: Any, depth: int = 0) -> float | None:
    """Return the value of `node` if it is a number, or a scalar tensor made from constants.

    Otherwise, return None.
    """
    number = compat.known_number(node)
    if number is not None and not isinstance(node, Node):
        return float(number) if math.isfinite(number) else None
    if not isinstance(node, Node) or depth > _MAX_DEPTH or node.op == "placeholder":
        return None
    if getattr(compat.example_value(node), "dim", lambda: 0)():
        return None
    if node_name(node) == "log1p" and len(node.args) == 1:
        return _computed(math.log1p, constant(node.args[0], depth + 1))
    call = read_one(node)
    if call is None:
        return None
    if call.op is aten.full.default and not call.args["size"]:
        return constant(call.args["fill_value"], depth + 1)
    function = _ARITHMETIC.get(call.op)
    if function is None or call.args.get("alpha", 1) != 1:
        return None
    given = [call.args[name] for name in ("self", "other") if name in call.args]
    return _computed(function, *(constant(each, depth + 1) for each in given))


_ARITHMETIC: dict[Any, Callable[..., float]] = {
    aten.log.default: math.log,
    aten.neg.default: lambda a: -a,
    **dict.fromkeys(named("add.Tensor add.Scalar"), lambda a, b: a + b),
    **dict.fromkeys(named("sub.Tensor sub.Scalar"), lambda a, b: a - b),
    **dict.fromkeys(_REVERSED, lambda a, b: b - a),
    **dict.fromkeys(_PRODUCTS, lambda a, b: a * b),
    **dict.fromkeys(_QUOTIENTS, lambda a, b: a / b),
}


def _computed(function: Callable[..., float], *given: float | None) -> float | None:
    try:
        found = function(*given) if None not in given else math.nan
    except (ArithmeticError, ValueError):
        return None
    return found if math.isfinite(found) else None


def _added(
    left: Expression | None, right: Expression | None, first: float, second: float
) -> Expression | None:
    if left is None or right is None or left.masks != right.masks:
        return None
    terms = dict(left.times(first).terms)
    for atoms, each in right.terms.items():
        terms[atoms] = terms.get(atoms, 0.0) + second * each
    return replace(left, terms=terms)


def _product(left: Terms, right: Terms) -> dict[tuple[Atom, ...], float] | None:
    """Return the product of two polynomials in softmax probabilities and their logarithms.

    If a term has more than two factors, which occurs in no divergence, return None."""
    terms: dict[tuple[Atom, ...], float] = {}
    for some, each in left.items():
        for others, factor in right.items():
            atoms = tuple(sorted((*some, *others), key=repr))
            if len(atoms) > 2:
                return None
            terms[atoms] = terms.get(atoms, 0.0) + each * factor
    return terms


def _expressed(
    terms: dict[tuple[Atom, ...], float] | None, masks: tuple[Mask, ...] = ()
) -> Expression | None:
    return None if terms is None else Expression(terms, masks)


def _only(expression: Expression) -> Atom | None:
    """Return the factor of an expression that consists of one factor, or None for other
    expressions."""
    items = list(expression.terms.items())
    is_one = len(items) == 1 and len(items[0][0]) == 1 and items[0][1] == 1.0
    return items[0][0][0] if is_one else None


def _mixed(shares: Mapping[Any, float]) -> Expression | None:
    """Return the logarithm of a mixture of the student's and the teacher's probabilities, with the
    weights in `shares`."""
    if len(shares) != 2 or min(shares.values()) <= 0:
        return None
    whole = sum(shares.values())
    parts = tuple(sorted(((key, share / whole) for key, share in shares.items()), key=repr))
    offset = math.log(whole) if abs(whole - 1) > _CLOSE else 0.0
    return Expression({(("log m", parts),): 1.0, (): offset})


def _log_of_sum(left: Expression | None, right: Expression | None) -> Expression | None:
    """Return log(exp(left) + exp(right)), if it is the logarithm of a mixture of probabilities.

    For that, `left` and `right` must each be the sum of a log-probability and a constant. In other
    cases, return None."""
    shares: dict[Any, float] = {}
    for part in (left, right):
        if part is None or part.masks:
            return None
        terms = dict(part.terms)
        share = math.exp(terms.pop((), 0.0))
        atom = _only(Expression(terms))
        if atom is None or atom[0] != "log p":
            return None
        shares[atom[1]] = shares.get(atom[1], 0.0) + share
    return _mixed(shares)


def _log_times(left: Expression | None, right: Expression | None) -> Expression | None:
    """Recognize xlogy(p, q) as p log q."""
    atoms = [None if part is None or part.masks else _only(part) for part in (left, right)]
    if atoms[0] is None or atoms[1] is None or atoms[1][0] != "p":
        return None
    return _expressed(_product({(atoms[0],): 1.0}, {(("log p", atoms[1][1]),): 1.0}))


_READ_PAIRS = {"logaddexp": _log_of_sum, "xlogy": _log_times}


def _keys(atom: Atom) -> tuple[Any, ...]:
    return tuple(key for key, _ in atom[1]) if atom[0] == "log m" else (atom[1],)


def _coefficients(terms: Terms, student: Any, teacher: Any) -> Coefficients | None:
    """Return the factors of a divergence, which is a weighted sum of six sums over the classes.

    An example of these sums is sum(q log p). The op memeff::linear_divergence computes the sums. p
    is the student's softmax, q is the teacher's, and m is a mixture of p and q. `terms` is the
    divergence as a polynomial in p, q, log p, log q and log m. If the polynomial has other terms,
    such as those of a third softmax, return None.
    """
    factors, shares = dict.fromkeys(Coefficients._fields, 0.0), set[float]()
    letters = {student: "p", teacher: "q"}
    for atoms, each in terms.items():
        if any(key not in letters for atom in atoms for key in _keys(atom)):
            return None
        by_kind = dict(atoms)
        if len(by_kind) != 2 or "p" not in by_kind:
            return None
        (logarithm,) = by_kind.keys() - {"p"}
        of = by_kind[logarithm]
        name = "m"
        if logarithm == "log m":
            shares.add(dict(of)[teacher])
        else:
            name = letters[of]
        factors[f"{letters[by_kind['p']]}_log_{name}"] += each
    if len(shares) > 1:
        return None
    return Coefficients(**factors)._replace(share=shares.pop() if shares else 0.0)


def _joined(
    left: Coefficients, first: float, right: Coefficients, second: float
) -> Coefficients | None:
    """Return the coefficients of first * left + second * right, a weighted sum of divergences.

    Coefficients are factors of sums over the classes, such as sum(q log p). A divergence may have
    terms with a mixture, a weighted mean of student's and teacher's probabilities. If `left`
    and `right` have mixtures with different weights, return None."""
    if left.has_mixture and right.has_mixture and left.share != right.share:
        return None
    pairs = zip(left, right, strict=True)
    joined = Coefficients._make(first * a + second * b for a, b in pairs)
    return joined._replace(share=left.share if left.has_mixture else right.share)
