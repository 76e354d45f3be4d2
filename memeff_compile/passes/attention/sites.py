"""Find attention in a graph: calls of scaled_dot_product_attention, and chains that compute the
same.

A chain consists of matrix products and a softmax:

    scores = matmul(q, k.transpose(-1, -2)) * scale
    scores = tanh(scores / softcap) * softcap [+ mask]
    out = matmul(dropout(softmax(scores, -1).to(dtype), 0.0), v)

The products may be written in any way (:mod:`..graph.products`), with batch and heads as two axes
or as one joined axis. In-place writes to the scores count as operations between the products, too.
A chain matches only if no node outside of it uses a value that is computed between its two matrix
products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ... import compat
from ..graph.base import Decline, mutated
from ..graph.canonical import Call, aten, call_of, named, read_one, read_write
from ..graph.graph_info import GraphInfo, kind_among, node_name, same_shape, written_by
from ..graph.products import Product, product_of
from .mask_algebra import MASKED
from .operands import BATCH, FOLDED, HEADS, SCORES, Given, Operand, Step, folds, permutation, placed

MAX_STEPS = 10


@dataclass
class Site:
    """One attention in the graph: its inputs, mask and scale, and the nodes that compute the
    attention.
    """

    node: Node  # the node that has the result
    query: Operand
    key: Operand
    value: Operand
    mask: Node | None = None
    takes_away: bool = False  # whether the mask is true for hidden keys, as in `masked_fill`
    # the number that masked scores become; None if the mask is added or is the call's
    fill: float | None = None
    masked_in: torch.dtype | None = None  # the dtype in which a chain adds its mask or fills it in
    softcap: float = 0.0  # the cap of the scores; 0 for no cap
    causal: bool = False
    scale: Any = None
    grouped: bool = False
    # whether the mask is for scores with batch and heads in one axis
    mask_is_folded: bool = False
    # views that give a call's result the axes of the chain's
    result_steps: tuple[Step, ...] = ()
    product: Node | None = None  # the chain's first product; None for a call
    unread: Node | None = None  # the operand of baddbmm that beta = 0 leaves out
    between: list[Node] = field(default_factory=list)  # the nodes of the chain; empty for a call
    # nodes of symbols that were taken for the numbers they stand for: under `dynamic=True` the
    # scale, the softcap and the dropout of a config are symbols
    numbers: list[Node] = field(default_factory=list)

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Return the attention's operands: query, key and value."""
        return self.query, self.key, self.value

    @property
    def inputs(self) -> list[Node]:
        """Return the nodes of query, key and value, and the node of the mask if there is one."""
        return [*(operand.node for operand in self.operands), *_nodes(self.mask)]

    @property
    def chain(self) -> str:
        """Return the names of the calls that compute the attention, from the product of queries and
        keys to the product with the values."""
        assert self.product is not None
        capped = "tanh, " if self.softcap else ""
        return f"{node_name(self.product)}, {capped}softmax, {node_name(self.node)}"


def find_sites(info: GraphInfo) -> Iterator[Site | Decline]:
    """Yield a `Site` for every attention in a graph, and a Decline (the reason) for every attention
    that cannot be rewritten."""
    for node in info.visit(info.gm.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        found: Site | Decline | None = None
        if node_name(node) == "scaled_dot_product_attention":
            found = _single_call(info, node)
        elif node_name(node) in ("softmax", "_softmax", "special_softmax"):
            found = _chain(info, node)
        if found is not None:
            yield found


def _single_call(info: GraphInfo, node: Node) -> Site | Decline | None:
    if (call := call_of(node, aten.scaled_dot_product_attention.default)) is None:
        return None
    given = call.args
    if any(info.tensor(given[name]) is None for name in ("query", "key", "value")):
        return None
    if compat.known_number(given["dropout_p"]) != 0:
        return dropout_active(node) if given["attn_mask"] is not None else None
    scale = compat.known_number(given["scale"])
    return Site(
        node,
        Operand(given["query"]),
        Operand(given["key"]),
        Operand(given["value"]),
        given["attn_mask"],
        causal=given["is_causal"],
        scale=given["scale"] if scale is None else scale,
        grouped=given["enable_gqa"],
        numbers=_nodes(given["dropout_p"], *([] if scale is None else [given["scale"]])),
    )


def _nodes(*values: Any) -> list[Node]:
    return [value for value in values if isinstance(value, Node)]


def dropout_active(node: Node | None, hint: str = "") -> Decline:
    """Return a Decline (the reason for no rewrite): the attention applies dropout."""
    said = "attention dropout is active, and another kernel would drop other weights"
    return Decline("dropout_active", said, hint or "train with an attention dropout of 0", node)


@dataclass
class _Walk:
    """Follows the graph from a softmax to a matrix product, node by node.

    The object records the nodes, and the current positions of the axes of the scores.
    """

    info: GraphInfo
    axes: str
    steps: list[Node] = field(default_factory=list)
    numbers: list[Node] = field(default_factory=list)
    # batch and heads where a view splits or joins them
    apart: list[Sequence[Any]] = field(default_factory=list)

    def moves(self, step: Node, call: Call | None, *, is_backward: bool) -> bool:
        """Record how a view moves the axes of the scores; return False if the node does anything
        else to the scores.
        """
        if call is None or call.op.overloadpacket not in _VIEWS:
            return False
        order = permutation(step, len(self.axes))
        if order is not None:
            if is_backward:
                order = [order.index(place) for place in range(len(order))]
            self.axes = "".join(self.axes[place] for place in order)
            return True
        before, after = map(self.info.tensor, (call.args["self"], step))
        wide = before if folds(before, after) else after if folds(after, before) else None
        if wide is None:
            return False
        pair, one = BATCH + HEADS, FOLDED
        is_wide = (wide is after) == is_backward  # separate batch and heads on this side
        if not self.axes.startswith(pair if is_wide else one):
            return False
        self.axes = self.axes.replace(*((pair, one) if is_wide else (one, pair)))
        self.apart.append(wide.shape[:2])
        return True


_VIEWS = named("transpose permute view reshape flatten unflatten")


@dataclass
class _Weights:
    """The matrix product of the softmax weights with the values."""

    node: Node
    value: Given
    axes: str  # the axes of the product
    walk: _Walk


@dataclass
class _Scores:
    """The operand of the softmax: the matrix product of queries and keys, with scale and mask
    applied."""

    node: Node
    query: Given
    key: Given
    factors: _Factors
    masking: _Masking
    unread: Node | None
    walk: _Walk


class _Masking(NamedTuple):
    """How a chain (attention written as matrix products and a softmax) masks its scores."""

    mask: Node | None = None
    takes_away: bool = False
    fill: float | None = None
    dtype: torch.dtype | None = None
    is_folded: bool = False  # whether the scores have batch and heads in one axis there


def _chain(info: GraphInfo, softmax: Node) -> Site | Decline | None:
    call, tensor = read_one(softmax), info.tensor(softmax)
    if call is None or call.op is not aten.softmax.int or tensor is None:
        return None
    if tensor.dim() not in SCORES:
        is_attention = tensor.dim() > 2 and _is_between_products(info, softmax)
        return _more_axes(softmax, tensor.dim()) if is_attention else None
    axes, last = SCORES[tensor.dim()].replace("k", ""), call.args["dim"] % tensor.dim()
    axes = f"{axes[:last]}k{axes[last:]}"
    weights = _follow_weights(softmax, _Walk(info, axes))
    if weights is None:
        return None
    scores = _follow_scores(softmax, call.args["self"], _Walk(info, axes), call.args["dtype"])
    if scores is None:
        return None
    if isinstance(scores, Decline):
        return _at(scores, softmax)
    if isinstance(weights, Decline):
        return _at(weights, softmax)
    for step in weights.walk.steps:
        if node_name(step) in ("getitem", "slice", "narrow"):
            return _at(_unknown_step(step), softmax)
    sizes = dict(zip(axes, tensor.shape, strict=True))
    return _site(info, softmax, sizes, scores, weights)


def _more_axes(softmax: Node, number: int) -> Decline:
    """Return a Decline (the reason for no rewrite): the attention scores have more axes than an
    attention call supports."""
    hint = "let queries, keys and values have four axes (batch, heads, positions, features): join "
    hint += "the others with the batch or the heads"
    return replace(axes_order(softmax, f"the scores have {number} axes"), hint=hint)


def _is_between_products(info: GraphInfo, softmax: Node) -> bool:
    """Return whether a softmax's operand comes from a matrix product, and the softmax's result is
    used in another matrix product.

    The operations between the softmax and the two products must keep the sizes of the last two
    axes.
    """
    source, later = softmax, softmax
    for _ in range(MAX_STEPS):
        if node_name(source) in _ANY_PRODUCT:
            break
        near = [n for n in source.all_input_nodes if _is_floating(n)]
        before = [n for n in near if _same_pairs(info, n, softmax)]
        source = next(iter(before), softmax)
    for _ in range(MAX_STEPS):
        if any(node_name(user) in _ANY_PRODUCT for user in later.users):
            return node_name(source) in _ANY_PRODUCT
        later = next(iter(_alike(info, later)), later)
    return False


_ANY_PRODUCT = ("matmul", "einsum")


def _site(
    info: GraphInfo, softmax: Node, sizes: dict[str, Any], scores: _Scores, weights: _Weights
) -> Site | Decline:
    """Return the attention that matrix products and a softmax compute, or the reason why these
    nodes cannot be rewritten.
    """
    given, walks = (scores.query, scores.key, weights.value), (scores.walk, weights.walk)
    kind = kind_among(each.node for each in given)
    if kind:
        return subclass(kind, weights.node)
    apart = [shape for walk in walks for shape in walk.apart]
    if apart:
        if not all(same_shape(shape, apart[0]) for shape in apart):
            return axes_order(softmax, "batch and heads are split in two ways")
        sizes |= dict(zip((BATCH, HEADS), apart[0], strict=True))
        sizes[FOLDED] = apart[0][0] * apart[0][1]
    masking, (scale, softcap) = scores.masking, scores.factors.result()
    fits_both = not masking.is_folded or _is_for_all(info, masking.mask)
    if apart and not fits_both:
        return axes_order(softmax, "the mask is added to scores with batch and heads in one axis")
    found = placed(info, given, weights.axes, sizes, may_split=fits_both)
    if found is None:
        return axes_order(softmax, "the sizes of queries, keys and values do not match")
    query, key, value = found.operands
    site = Site(
        weights.node,
        query.then(aten.neg.default) if scores.factors.is_negative else query,
        key,
        value,
        *masking[:4],
        softcap,
        scale=scale,
        mask_is_folded=masking.is_folded and found.has_one_head,
        result_steps=found.result_steps,
        product=scores.node,
        unread=scores.unread,
        between=[*found.moved, scores.node, softmax, *(n for walk in walks for n in walk.steps)],
        numbers=[number for walk in walks for number in walk.numbers],
    )
    return _reason_against(info, site) or site


def _is_for_all(info: GraphInfo, mask: Node | None) -> bool:
    """Return whether all sequences and heads have the same attention mask.

    The attention scores may have one joined axis for batch and heads. If the pass splits this axis
    into two, the pass can still broadcast such a mask.
    """
    shape = () if mask is None else info.value(mask).shape
    return len(shape) < 3 or compat.statically_true(shape[0] == 1)


def _at(decline: Decline, softmax: Node) -> Decline:
    return replace(decline, node=decline.node or softmax)


def axes_order(node: Node, seen: str) -> Decline:
    """Return a Decline (the reason for no rewrite): the order of the attention scores' axes is not
    supported."""
    said = f"{seen}; this pass reads (batch, heads, queries, keys) and (batch, queries, keys)"
    return Decline("axes_order", said, "let the last two axes of the scores be queries, keys", node)


_PASSES_ON = named("to dropout contiguous clone alias slice")


def _follow_weights(softmax: Node, walk: _Walk) -> _Weights | Decline | None:
    current, others, rates = softmax, list[Node](), dict[Node, Any]()
    unknown: Node | None = None
    for _ in range(MAX_STEPS):
        read = ((user, _weighted(user, current, walk.axes)) for user in current.users)
        products = [(user, found) for user, found in read if found is not None]
        forward = [user for user in current.users if _passes_on(user, current, walk)]
        strange = [] if products or forward else _alike(walk.info, current)
        onward = next(iter([*(user for user, _ in products), *forward, *strange]), None)
        if onward is None:
            return None
        others += [user for user in current.users if user is not onward]
        if products and others:
            return weights_used(others[0], "do not ask for attention weights (output_attentions)")
        if products:
            found = products[0][1]
            active = (step for step, rate in rates.items() if compat.known_number(rate) != 0)
            step = next(active, None)
            walk.numbers += _nodes(*rates.values())
            if unknown is not None:
                return _unknown_step(unknown)
            if isinstance(found, Decline):
                return found
            return _Weights(onward, *found, walk) if step is None else dropout_active(step)
        unknown = unknown or next(iter(strange), None)
        walk.moves(onward, read_one(onward), is_backward=False)
        if (rate := _dropout(onward)) is not None:
            rates[onward] = rate
        current = onward
        walk.steps.append(current)
    return None


def _passes_on(node: Node, weights: Node, walk: _Walk) -> bool:
    call = read_one(node)
    if call is None or not _is_floating(node):
        return False
    if call.args.get("self", call.args.get("input")) is not weights:
        return False
    if call.op.overloadpacket in _VIEWS:
        return replace(walk, apart=[]).moves(node, call, is_backward=False)
    return call.op.overloadpacket in _PASSES_ON


def _alike(info: GraphInfo, node: Node) -> list[Node]:
    """Return those users of a node whose results have the same sizes in the last two dimensions as
    the node's result.
    """
    return [user for user in node.users if _is_floating(user) and _same_pairs(info, node, user)]


def _same_pairs(info: GraphInfo, node: Node, other: Node) -> bool:
    shapes = [info.value(each).shape[-2:] for each in (node, other)]
    return len(shapes[0]) == 2 and same_shape(*shapes)


def _is_floating(node: Node) -> bool:
    value = compat.example_value(node)
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _weighted(node: Node, weights: Node, axes: str) -> tuple[Given, str] | Decline | None:
    """Return the values operand of a node that multiplies the softmax weights by the values, and
    the axes of the node's result."""
    product = product_of(node)
    if product is None or [product.left.node, product.right.node].count(weights) != 1:
        return None
    mine, other = product.left, product.right
    if mine.node is not weights:
        mine, other = other, mine
    name = dict(zip(mine.letters, axes, strict=True))
    if name.get(product.summed) != "k":
        return None
    adds = product.added is not None and compat.known_number(product.beta) != 0
    if adds or compat.known_number(product.alpha) != 1:
        return None
    new = [letter for letter in other.letters if letter not in name]
    if len(new) != 1 or set(product.letters) != {*mine.letters, *new} - {product.summed}:
        return None
    name[new[0]] = "e"
    values = "".join(name[letter] for letter in other.letters)
    if "q" in values:
        seen = f"`{node_name(node)}` multiplies each query by values of its own"
        return axes_order(node, seen)
    return Given(other.node, values, "bhke"), "".join(name[letter] for letter in product.letters)


def _dropout(node: Node) -> Any:
    """Return the rate of a dropout that is active, or None for any other node."""
    call = read_one(node)
    if call is None or call.op.overloadpacket is not aten.dropout or call.args["train"] is False:
        return None
    return call.args["p"]


def weights_used(user: Node, hint: str) -> Decline:
    """Return a Decline (the reason for no rewrite): `user`, which is not the product with the
    values, reads the softmax weights."""
    if written_by(user):
        return _unknown_step(user)
    said = f"the attention weights are also used by `{node_name(user)}` and must be computed"
    return Decline(f"weights_used({node_name(user)})", said, hint)


def _follow_scores(
    softmax: Node, scores: Any, walk: _Walk, dtype: torch.dtype | None
) -> _Scores | Decline | None:
    """Follow the operand of a softmax back to the product of queries and keys; the softmax may
    compute in another dtype."""
    info = walk.info
    if not _leads_to_product(info, scores):
        return None
    current, reader = scores, softmax
    read = _Read([] if dtype is None else [dtype])
    for _ in range(MAX_STEPS):
        writes = _writes_before(info, current, reader)
        if isinstance(writes, Decline):
            return writes
        for write in writes:
            walk.steps.append(write)
            call = read_write(write)
            assert call is not None  # as `_writes_before` has seen
            problem = read.step(walk, write, call)
            if problem is not None:
                return problem
        product = product_of(current)
        if product is not None:
            return read.product(walk, current, product)
        walk.steps.append(current)
        step = read_write(current) or read_one(current)
        if step is None:
            return _unknown_step(current)
        if not walk.moves(current, step, is_backward=True):
            problem = read.step(walk, current, step)
            if problem is not None:
                return problem
        current, reader = _scores_operand(info, step), current
    return None


def _writes_before(info: GraphInfo, scores: Node, reader: Node) -> list[Node] | Decline:
    """Return the in-place writes to the scores before the node `reader` reads the scores, the
    last write first.

    If another node reads the scores between these writes, return a `Decline`, the reason why
    attention is not rewritten.
    """
    others = [user for user in scores.users if user is not reader]
    for user in others:
        call = read_write(user)
        is_step = call is not None and list(call.args.values()).count(scores) == 1
        is_before = info.positions[user] < info.positions[reader]
        if is_step and is_before and call.args["self"] is scores and not user.users:  # type: ignore[union-attr]
            continue
        if written_by(user) and is_before and not user.users:
            return _unknown_step(user)
        name = node_name(user)
        said = f"the attention scores are also used by `{name}` and must be computed"
        return Decline(f"scores_used({name})", said)
    return sorted(others, key=info.positions.__getitem__, reverse=True)


@dataclass
class _Read:
    """The mask, scale and softcap that have been found so far.

    The search goes from the softmax back to the product of queries and keys.
    """

    casts: list[torch.dtype]
    masking: _Masking = field(default_factory=lambda: _Masking())
    factors: _Factors = field(default_factory=lambda: _Factors())

    def step(self, walk: _Walk, node: Node, call: Call) -> Decline | None:
        """Read one node between the softmax and the product of queries and keys.

        If the node scales, caps, masks, casts or copies the scores in a supported way, record the
        step and return None. Otherwise return a Decline: the reason why the attention is not
        rewritten.
        """
        op, given = call.op.overloadpacket, call.args
        if op in (aten.mul, aten.div):
            return self._scaled(walk, node, given["other"], is_division=op is aten.div)
        if op is aten.tanh and self.factors.cap is None:
            self.factors = _Factors(self.factors.product(), is_negative=self.factors.is_negative)
            return None
        if op in (aten.add, aten.masked_fill, aten.where):
            return self._masked(walk, node, _masking(walk.info, call, node))
        if op not in (aten.to, aten.contiguous, aten.clone, aten.alias) or not _is_floating(node):
            return _unknown_step(node)
        if self.masking.mask is None:
            self.casts.append(compat.example_value(node).dtype)
        return None

    def _scaled(self, walk: _Walk, node: Node, by: Any, *, is_division: bool) -> Decline | None:
        factor = compat.known_number(by)
        if not factor or not math.isfinite(factor):
            what = "zero" if factor == 0 else "a value that is not a number"
            said = f"`{node_name(node)}` scales the scores by {what}"
            return Decline("scale_not_constant", said, "scale the queries instead")
        walk.numbers += _nodes(by)
        self.factors.add(factor, is_division=is_division)
        return None

    def _masked(self, walk: _Walk, node: Node, masking: _Masking | None) -> Decline | None:
        if masking is None or self.masking.mask is not None or self.factors != _Factors():
            return _unknown_step(node)
        if walk.axes not in SCORES.values():
            return axes_order(node, f"`{node_name(node)}` masks scores whose axes are transposed")
        masking = masking._replace(is_folded=walk.axes == SCORES[3])
        self.masking = _seen_through(masking, self.casts)
        return None

    def product(self, walk: _Walk, node: Node, product: Product) -> _Scores | Decline:
        """Read the matrix product of queries and keys, and return it with the mask, scale and
        softcap.

        Return a Decline (the reason for no rewrite) if this product cannot be rewritten."""
        beta = compat.known_number(product.beta)
        if product.added is not None and beta != 0:
            if beta != 1:
                return _unknown_step(node)
            if not _is_zero(product.added):
                mask = product.added if _is_number(walk.info, product.added) else None
                dtype = compat.example_value(node).dtype
                masking = None if mask is None else _Masking(mask, dtype=dtype)
                problem = self._masked(walk, node, masking)
                if problem is not None:
                    return problem
        walk.numbers += _nodes(product.beta)
        if product.alpha != 1:
            problem = self._scaled(walk, node, product.alpha, is_division=False)
            if problem is not None:
                return problem
        name = dict(zip(product.letters, walk.axes, strict=True)) | {product.summed: "d"}
        sides = [
            (factor.node, "".join(name[letter] for letter in factor.letters))
            for factor in (product.left, product.right)
        ]
        sides.sort(key=lambda side: "k" in side[1])
        (query, of_query), (key, of_key) = sides
        if "k" in of_query or "k" not in of_key or "q" in of_key or "q" not in of_query:
            return axes_order(node, f"`{node_name(node)}` is no product of queries and keys")
        given = Given(query, of_query, "bhqd"), Given(key, of_key, "bhkd")
        unread = None if product.added is self.masking.mask else product.added
        return _Scores(node, *given, self.factors, self.masking, unread, walk)


@dataclass
class _Factors:
    """The numbers by which attention scores are multiplied or divided before the mask is applied.

    One list has the multipliers, and the other the divisors. In each list, the number that the
    graph applies last comes first. With a softcap (`tanh`), the lists contain only the numbers that
    the graph applies before `tanh`. The object does not record the sign of each number, only the
    sign of their product, because tanh is odd.
    """

    cap: float | None = None  # the scores' factor after `tanh`, without its sign; None: no `tanh`
    multiplied: list[float] = field(default_factory=list)
    divided: list[float] = field(default_factory=list)
    is_negative: bool = False

    def add(self, factor: float, *, is_division: bool) -> None:
        """Record a number by which the scores are multiplied or divided."""
        (self.divided if is_division else self.multiplied).append(abs(float(factor)))
        self.is_negative ^= factor < 0

    def result(self) -> tuple[float, float]:
        """Return the scale of the scores and the softcap; a softcap of 0 means none."""
        if self.cap is None:
            return self.product(), 0.0
        if self.cap in self.divided:  # divided by the cap, this leaves the scale, unrounded
            self.divided.remove(self.cap)
            return self.product(), self.cap
        return self.product() * self.cap, self.cap

    def product(self) -> float:
        """Return the scores' factor from all recorded multiplications and divisions, without its
        sign."""
        return math.prod(self.multiplied) / math.prod(self.divided)


def _leads_to_product(info: GraphInfo, node: Any) -> bool:
    """Return whether a node's value comes from a matrix product through steps that may occur
    between the product and the softmax."""
    seen: set[Node] = set()
    stack = [(node, 0)]
    while stack:
        current, steps = stack.pop()
        if not isinstance(current, Node) or current in seen or not _is_floating(current):
            continue
        seen.add(current)
        if product_of(current) is not None:
            return True
        call = read_write(current) or read_one(current)
        is_step = call is not None and call.op.overloadpacket in (*_STEPS, *_VIEWS)
        if steps < MAX_STEPS:
            before = [each for each in current.all_input_nodes if _is_floating(each)]
            near = before if is_step else [n for n in before if _same_pairs(info, n, current)]
            stack += [(each, steps + 1) for each in reversed(near)]
    return False


_STEPS = named("to mul div add tanh masked_fill where cat sub")


def _scores_operand(info: GraphInfo, call: Call) -> Any:
    """Return the operand that contains the scores, for a node between the product of queries and
    keys and the softmax."""
    given, op = call.args, call.op.overloadpacket
    if op is aten.cat:
        return given["tensors"][0]
    if op in (aten.add, aten.where) and not _leads_to_product(info, given["self"]):
        return given["other"]
    return given["self"]


def _masking(info: GraphInfo, call: Call, step: Node) -> _Masking | None:
    given, op = call.args, call.op.overloadpacket
    scores = _scores_operand(info, call)
    dtype = info.value(step if _is_floating(step) else scores).dtype
    is_first = scores is given["self"]
    if op is aten.add:
        mask = given["other" if is_first else "self"]
        is_mask = _is_number(info, mask) and given["alpha"] == 1
        return _Masking(mask, dtype=dtype) if is_mask else None
    mask = given["mask" if op is aten.masked_fill else "condition"]
    fill = _number(given["value" if op is aten.masked_fill else "other" if is_first else "self"])
    if fill is None or not fill <= MASKED:
        return None
    number = float(fill) if fill >= torch.finfo(dtype).min else -math.inf
    return _Masking(mask, op is aten.masked_fill or not is_first, number, dtype)


def _is_number(info: GraphInfo, node: Any) -> bool:
    tensor = info.tensor(node)
    return tensor is not None and tensor.dtype.is_floating_point


def _number(given: Any) -> float | None:
    """Return an argument as a number; the argument may be a number, or a tensor without axes that
    contains one.
    """
    call = call_of(given, aten.full.default)
    if call is not None and not call.args["size"]:
        given = call.args["fill_value"]
    return given if isinstance(given, (int, float)) else None


def _is_zero(node: Node) -> bool:
    """Return whether a tensor contains only zeros, as the tensor that baddbmm adds usually does."""
    call = read_one(node)
    return call is not None and call.op.overloadpacket in named("zeros new_zeros zeros_like")


def _seen_through(masking: _Masking, casts: list[torch.dtype]) -> _Masking:
    """Return `masking` (how attention scores are masked), without its dtype if a later cast may
    change the scores of hidden keys.

    The field `dtype` of `masking` is the dtype in which the mask is applied. The mask gives hidden
    keys scores that are large negative numbers. A cast to a dtype of a smaller range may turn these
    numbers into minus infinity. `casts` are the dtypes of all casts between the mask and the
    softmax.
    """
    assert masking.dtype is not None
    reach = torch.finfo(masking.dtype).max
    is_seen = all(torch.finfo(dtype).max >= reach for dtype in casts)
    return masking if is_seen else masking._replace(dtype=None)


def _unknown_step(node: Node) -> Decline:
    name = node_name(node)
    if name == "cat":
        return Decline("sinks", "the softmax has more columns than there are keys (sinks)")
    said = f"`{name}` between the two products is not a known scale, mask or cast"
    return Decline(f"unknown_step({name})", said)


def subclass(kind: str, node: Node | None = None) -> Decline:
    """Return a Decline (the reason for no rewrite): an operand of the attention is a tensor
    subclass.

    For the `kind` "Tensor", the reason is that torch.func transforms the attention."""
    if kind == "Tensor":  # neither a subclass nor fake: one that torch.func has wrapped
        said = (
            "torch.func (vmap, grad, jvp) transforms this attention; this pass has no rule for it"
        )
        hint = "give the operands a batch dimension in the place of vmap, and call backward()"
        return Decline("torch_func", said, hint, node)
    what = f"an operand of the attention is a {kind}, which this pass does not look into"
    return Decline(f"subclass_operand({kind})", what, node=node)


def have_one_size(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether query, key and value have four axes, the same batch size and the same head
    size."""
    q, k, v = query.shape, key.shape, value.shape
    return len(q) == len(k) == 4 and same_shape((*k, q[0], q[3]), (*v, k[0], k[3]))


def _reason_against(info: GraphInfo, site: Site) -> Decline | None:
    assert site.product is not None
    product, result = info.value(site.product), info.value(site.node)
    if product.dtype != result.dtype or not result.dtype.is_floating_point:
        said = f"the first product is in {product.dtype} and the second in {result.dtype}"
        return Decline("dtype_changes", said, node=site.node)
    if info.regions[site.product] != info.regions[site.node]:
        said = "gradients or autocast are switched between the two products"
        return Decline("region_mismatch", said, node=site.node)
    write = info.written_between(site.inputs, site.product, site.node)
    what = "queries, keys, values or mask"
    return None if write is None else mutated(write, what, site.node)
