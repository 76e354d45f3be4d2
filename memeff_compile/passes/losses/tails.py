"""Find the nodes that compute losses, gathered log-probabilities, log-sum-exps and metrics from
logits.

A *tail* is a node that computes a result from logits, if memeff::linear_cross_entropy can compute
that result, too. A *site* is an output projection and all tails of its logits. If a node looks like
a loss but is not recognised, `TailReader` returns a `Decline` (the reason).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...compat import OpOverload
from ...logits.recipe import Modifiers
from ..graph.base import Decline
from ..graph.canonical import Call, aten, back_over, call_of, read, read_one
from ..graph.graph_info import GraphInfo, node_name, same_shape, written_by
from .head import Chain, Head, HeadReader, fold
from .outputs import LogitsOutput, is_deferrable, returned_logits
from .softmax import Soft, SoftmaxReader, broadcast_operand, class_position, negated
from .targets import INDICES, NUMBERS, OneHot, counts_up, indexed_by_numbers, read_one_hot


@dataclass(frozen=True)
class Tail:
    """A node whose result the op memeff::linear_cross_entropy can compute from logits.

    With a target, `kind` is one of these:

    - `loss`: cross_entropy or nll_loss;
    - `log_prob`: gather on log-probabilities;
    - `logit`: gather on the logits themselves.

    Without a target, `kind` is one of these:

    - `lse` (logsumexp), `top` (argmax) or `entropy`;
    - `neg_entropy`: the sum of p log p;
    - `mean_logit`: the sum of p times the logits;
    - `log_prob_sum` or `logit_sum`: the sum over the classes.

    The field `reduction` is 0 if the result has one number per row. `reduction` is 1 for the mean
    of the rows' numbers and 2 for the sum of the rows' numbers.
    """

    node: Node
    kind: str
    chain: Chain
    target: Node | None = None
    class_weight: Node | None = None
    reduction: int = 0
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    through: tuple[Node, ...] = ()  # the nodes between the chain and this node
    symbols: tuple[Node, ...] = ()  # settings that are symbols under dynamic=True
    keepdim: bool = False  # a statistic without a target keeps the class dimension, of size 1
    factors: tuple[Node, ...] = ()  # the node that an entropy multiplies
    wraps: bool = False  # targets count modulo the classes, as in take_along_dim
    from_end: bool = False  # negative targets count from the last class, as in an index
    factor: float = 1.0  # by which the value of the kind is multiplied
    spread: float = 0.0  # by which the sum over all classes is multiplied and added to it
    aside: tuple[Node, ...] = ()  # nodes of a one-hot form of the targets that no other node reads

    @property
    def operands(self) -> tuple[Node, ...]:
        """Return the tensors that this node reads in addition to the logits: targets and class
        weights."""
        return tuple(n for n in (self.target, self.class_weight) if n is not None)

    @property
    def name(self) -> str:
        """Return the name that reports use for this node, which computes a loss, an argmax or
        another result from logits."""
        if self.node is self.chain.head.node:
            return "linear_cross_entropy"
        if self.kind in ENTROPIES:
            return "entropy"
        return "argmax" if self.kind == "top" else node_name(self.node)


PROB_HINT = (
    "pass integer class indices: cross_entropy has label_smoothing, and a mixture of two "
    "labellings is a * cross_entropy(z, y1) + b * cross_entropy(z, y2)"
)

_AFTER = "take one class per row first, and apply the operation to the numbers taken"
_MAX_STEPS = 8  # operations to look back over, between log-probabilities and a gather

ENTROPIES = ("entropy", "neg_entropy", "mean_logit")
SUMS = ("log_prob_sum", "logit_sum")
STATISTICS = ("lse", "top", *ENTROPIES, *SUMS)
METRICS = ("top", *ENTROPIES)
# The kinds that make a site worth a rewrite; an argmax alone does not.
LOSSES = ("loss", "log_prob", "entropy", "neg_entropy", "log_prob_sum")


def reads_sum(tail: Tail) -> bool:
    """Return whether a tail (a loss or another result of the logits) needs the sum of each row's
    logits.

    With such a tail, every class gets a gradient."""
    return tail.label_smoothing > 0 or tail.spread != 0 or tail.kind in SUMS


def is_silent(info: GraphInfo, tail: Tail) -> bool:
    """Return whether no gradient flows back through `tail` (a loss or another result of the
    logits).

    For example, the result of the tail is detached, computed under no_grad, or an integer."""
    value = info.tensor(tail.node)
    return value is None or not value.requires_grad


@dataclass(frozen=True)
class Picked:
    """A gather of one element per row of `source`, at a class index."""

    source: Node
    index: Node
    opened: tuple[Node, ...] = ()  # nodes that read the source for its shape
    wraps: bool = False
    from_end: bool = False

    @property
    def how(self) -> dict[str, Any]:
        """Return this gather's class indices as arguments of a `Tail` (a loss or another result of
        logits).

        With `wraps`, class indices count modulo the number of classes. With `from_end`, negative
        class indices count from the last class."""
        return {"target": self.index, "wraps": self.wraps, "from_end": self.from_end}


@dataclass(frozen=True)
class SizeRead:
    """A node that reads the shape of logits or log-probabilities, but not their values."""

    node: Node
    source: Node
    chain: Chain


def reads_a_size(node: Node) -> bool:
    """Return whether a node reads only the shape of its operand."""
    return node_name(node) in ("size", "sym_size")


def unread(node: Node) -> list[Node]:
    """Return a node and all nodes that depend on it, if all of these nodes can be deleted.

    Return an empty list if the output of the graph depends on the node. Also return an empty list
    if the node, or one that depends on it, has side effects or calls an unknown op.
    """
    found, queue = dict[Node, None](), [node]
    while queue:
        each = queue.pop()
        if each in found:
            continue
        call = read_one(each)
        if call is None or written_by(each) or compat.is_drawn(call.op):
            return []
        if not compat.schema(call.op).returns:
            return []  # such as an assertion
        found[each] = None
        queue.extend(each.users)
    return list(found)


@dataclass
class Site:
    """An output projection, its tails (losses and other results of the logits), and the graph
    outputs that return its logits."""

    head: Head
    tails: list[Tail]
    outputs: list[LogitsOutput] = field(default_factory=list)
    covered: list[Node] = field(default_factory=list)
    sizes: list[SizeRead] = field(default_factory=list)
    # ops that make one-hot forms of targets, and ops on the logits whose results nothing reads
    aside: list[Node] = field(default_factory=list)


_TAIL_NAMES = frozenset(
    "cross_entropy cross_entropy_loss nll_loss nll_loss_nd gather take_along_dim logsumexp "
    "linear_cross_entropy argmax getitem __getitem__ index sum mean log add sub".split()
)


class TailReader:
    """Recognizes the results that the nodes of one graph compute from logits."""

    def __init__(self, info: GraphInfo, reader: HeadReader) -> None:
        self.info, self.reader = info, reader
        self.softmax = SoftmaxReader(info, reader)
        # Models are full of sums and means: one that reads no head is not traced.
        self.untraced = HeadReader(info, tracing=False)

    def tails(self, node: Node) -> Iterable[Tail | Decline]:
        """Yield the losses and other results (tails) that `node` computes from logits.

        If such a result is not supported, yield a Decline (the reason for no rewrite).
        """
        name = node_name(node)
        if node.op not in ("call_function", "call_method") or name not in _TAIL_NAMES:
            return
        if name in ("getitem", "__getitem__", "index"):
            yield from self._chosen(node)
            yield from self._indexed(node)
        elif (call := read_one(node)) is not None:
            read = _READERS.get(call.op)
            yield from () if read is None else read(self, node, call.args)
        elif "cross_entropy" in name or "nll_loss" in name:
            said = f"`{name}` is called with arguments this pass does not read"
            hint = "call cross_entropy or nll_loss of torch.nn.functional, with plain numbers"
            yield Decline("unreadable_loss", said, hint, node)

    def chain_of_log_probs(self, node: Node) -> Chain | None:
        """If `node` is the log-probabilities of logits, or the negative log-probabilities, return
        the chain (output projection and later nodes) of these logits.
        """
        soft = self.softmax.signed_log_probs(node)
        return soft.chain if isinstance(soft, Soft) else None

    def _lse(self, node: Node, a: Any) -> Iterable[Tail]:
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        value = self.info.tensor(a["self"])
        if value is None or value.dim() == 0 or len(dims) != 1:
            return
        if dims[0] % value.dim() != value.dim() - 1:
            return
        chain = self.reader.chain(a["self"])
        if isinstance(chain, Chain) and not chain.moved:
            yield Tail(node, "lse", chain, keepdim=a["keepdim"])

    def _cross_entropy(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        return self._loss(node, self.reader.chain(a["self"]), a, a["label_smoothing"])

    def _nll(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        soft = self.softmax.log_probs(a["self"])
        if isinstance(soft, Decline):
            yield replace(soft, node=node)
        elif soft is not None:
            yield from self._loss(node, soft.chain, a, 0.0, soft.through)
        elif a["self"].op != "placeholder":
            said = "nll_loss does not read a log_softmax over its classes"
            hint = "use cross_entropy, or take log_softmax of the logits over their classes"
            yield Decline("not_log_softmax", said, hint, node)

    def _loss(
        self,
        node: Node,
        chain: Chain | Decline,
        a: Any,
        label_smoothing: Any,
        through: tuple[Node, ...] = (),
    ) -> Iterable[Tail | Decline]:
        target = self.info.tensor(a["target"])
        is_one_class = target is not None and not target.dtype.is_floating_point
        hot = None if is_one_class else self._one_hot_classes(node, chain, a)
        if not is_one_class and hot is None:
            said = "the targets are class probabilities, not class indices"
            yield Decline("prob_targets", said, PROB_HINT, node)
            return
        if isinstance(chain, Decline):
            yield replace(chain, node=node)
            return
        settings = (a["reduction"], a["ignore_index"], label_smoothing)
        reduction, ignore_index, smoothing = map(compat.known_number, settings)
        if reduction is None or ignore_index is None or smoothing is None:
            said = f"`{node_name(node)}` gets an ignore_index or label_smoothing that varies from "
            hint = "give it a fixed number"
            yield Decline("setting_not_constant", f"{said}call to call", hint, node)
            return
        symbols = tuple(s for s in settings if isinstance(s, Node))
        if hot is not None:  # the mean divides by one per row, whatever the sum of its targets
            classes = compat.known_size(self.info.value(a["self"]).shape[-1]) or 1
            yield Tail(
                node,
                "log_prob",
                chain,
                target=hot.index,
                reduction=int(reduction),
                through=through,
                symbols=symbols,
                factor=-hot.peak * (1 - smoothing),
                spread=-(hot.base * (1 - smoothing) + smoothing / classes),
                aside=hot.nodes,
            )
            return
        yield Tail(
            node,
            "loss",
            chain,
            target=a["target"],
            class_weight=a["weight"],
            reduction=int(reduction),
            ignore_index=int(ignore_index),
            label_smoothing=float(smoothing),
            through=through,
            symbols=symbols,
        )

    def _one_hot_classes(self, node: Node, chain: Chain | Decline, a: Any) -> OneHot | None:
        """Recognize a cross entropy whose targets are class probabilities made from class indices:
        one-hot, with or without label smoothing."""
        value, target = self.info.tensor(a["self"]), self.info.tensor(a["target"])
        if value is None or target is None or a["weight"] is not None or value.dim() != 2:
            return None
        if isinstance(chain, Decline) or compat.known_size(value.shape[-1]) is None:
            return None
        is_alike = same_shape(value.shape, target.shape)
        return read_one_hot(self.info, a["target"], node) if is_alike else None

    def _gather(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        picked = self._gathered(node, a)
        if picked is not None:
            yield from self._entry(node, picked)

    def _indexed(self, node: Node) -> Iterable[Tail | Decline]:
        """Recognize `x[arange(rows), targets]`, which is the element of each row at its
        target."""
        picked = self._picked_by_index(node)
        if isinstance(picked, Decline):
            yield picked
        elif picked is not None:
            yield from self._entry(node, picked)

    def _gathered(self, node: Node, a: Any) -> Picked | None:
        """Recognize `gather` and `take_along_dim` of one class per row."""
        source = a["self"]
        index, opened = _plain_index(self.info, a.get("index", a.get("indices")))
        value, index_value = self.info.tensor(source), self.info.tensor(index)
        if value is None or index_value is None or a["dim"] is None or value.dim() == 0:
            return None
        if a["dim"] % value.dim() != value.dim() - 1 or index_value.dim() != value.dim():
            return None
        if "indices" in a and compat.known_size(value.shape[-1]) is None:
            return None
        if a.get("sparse_grad") or not compat.statically_true(index_value.shape[-1] == 1):
            return None
        return Picked(source, index, opened, wraps="indices" in a)

    def _picked_by_index(self, node: Node) -> Picked | Decline | None:
        reading = read(node) or ()
        if reading and reading[-1].op is aten.index.Tensor:
            source, indices = reading[0].args["self"], reading[-1].args["indices"]
        elif (found := indexed_by_numbers(node)) is not None:
            source, indices = found
        else:
            return None
        value = self.info.tensor(source)
        if value is None or value.dim() < 2:
            return None
        if len(reading) > 1:  # a row by its number, and others by index
            is_read = indices[-1] is not None and value.dim() == len(indices) + 1
            return self._rows_differ(node, source) if is_read else None
        *places, index = indices
        if len(indices) != value.dim() or not all(isinstance(i, (Node, *NUMBERS)) for i in places):
            return None
        if not isinstance(index, Node):
            return None
        rows, target = value.shape[:-1], self.info.tensor(index)
        if target is None or target.dtype not in INDICES:
            return None
        is_each = all(
            counts_up(self.info, each, dim, rows, node) for dim, each in enumerate(places)
        )
        if is_each and same_shape(target.shape, rows):
            return Picked(source, index, from_end=True)
        return self._rows_differ(node, source)

    def _rows_differ(self, node: Node, source: Node) -> Decline | None:
        """Return a Decline (the reason for no rewrite) if a node indexes log-probabilities with row
        indices that are not 0, 1, 2 and so on."""
        if not isinstance(self.softmax.signed_log_probs(source), Soft):
            return None
        said = "the index takes entries of rows that are not known to be all rows in order"
        hint = "index the rows with torch.arange of their number and nothing else, made in the "
        hint += "compiled function; or use gather(-1, targets.unsqueeze(-1)), and slice hidden "
        return Decline("rows_differ", said, f"{hint}states to the rows that count", node)

    def _entry(self, node: Node, picked: Picked) -> Iterable[Tail | Decline]:
        """Recognize a node that takes, from each row, the element of one class out of logits,
        log-probabilities or negative log-probabilities.
        """
        source, index = picked.source, picked.index
        soft = self.softmax.signed_log_probs(source)
        if isinstance(soft, Decline):
            yield replace(soft, node=node)
            return
        signs: tuple[Node, ...] = ()
        sign = 1 if soft is None else soft.sign
        chain = self.reader.chain(source) if soft is None else soft.chain
        if isinstance(chain, Decline) and (below := negated(source)) is not None:
            sign, signs, chain = -1, (source,), self.reader.chain(below)
        if isinstance(chain, Decline):
            if node_name(source) == "log_softmax":
                said = f"`{node_name(node)}` reads a log_softmax over another dimension than the "
                yield Decline("unknown_step", f"{said}classes", node=node)
            elif steps := self._steps_after_log_probs(source):
                said = f"`{node_name(steps[0])}` changes log-probabilities before "
                hint = _AFTER if all(map(_is_pointwise, steps)) else ""
                yield Decline("unknown_step", f"{said}`{node_name(node)}`", hint, node)
            return
        value, index_value = self.info.value(source), self.info.value(index)
        shape = index_value.shape if picked.from_end else index_value.shape[:-1]
        has_same_rows = same_shape(shape, value.shape[:-1])
        if not has_same_rows and soft is not None:
            yield Decline(
                "rows_differ",
                "the gathered index may have fewer rows than the log-probabilities",
                "slice the hidden states to the rows that are gathered; sizes that are always "
                "equal but marked dynamic one by one are best marked by dynamic=True",
                node,
            )
        if has_same_rows:
            kind, through = ("logit", ()) if soft is None else ("log_prob", soft.through)
            through = (*through, *picked.opened, *signs)
            yield Tail(node, kind, chain, through=through, factor=float(sign), **picked.how)

    def _steps_after_log_probs(self, node: Node) -> list[Node]:
        """Return the operations between log-probabilities and `node`, which has the shape of the
        log-probabilities; the last operation is `node`.

        For example, return the clamp of `log_softmax(x, -1).clamp(min=-100)`. If no such
        log-probabilities are found, return an empty list."""
        steps = list[Node]()
        while len(steps) < _MAX_STEPS and node.op in ("call_function", "call_method"):
            value = self.info.tensor(node)
            operands = [(each, self.info.tensor(each)) for each in node.all_input_nodes]
            if value is None:
                break
            steps.insert(0, node)
            alike = [n for n, v in operands if v is not None and same_shape(v.shape, value.shape)]
            if any(isinstance(self.softmax.signed_log_probs(each), Soft) for each in alike):
                return steps
            if len(alike) != 1:
                break
            node = alike[0]
        return []

    def _difference(self, node: Node, a: Any) -> Iterable[Tail]:
        """Recognize `log(exp(x).sum(-1)) - x[target]`, in either order, where x is the logits
        minus their maximum.
        """
        for left, right, sign in ((a["self"], a["other"], -1.0), (a["other"], a["self"], 1.0)):
            total = self.softmax.total(left) if a["alpha"] == 1 else None
            if total is None or total.peak is None or total.chain.moved:
                continue
            way: list[Node] = []
            entry, picked = self._picked(right, way)
            peak = None
            if isinstance(picked, Picked):
                peak = self.softmax.peak_taken_off(picked.source)
            shapes = [self.info.value(each).shape for each in (left, right, node)]
            is_alike = all(same_shape(shape, shapes[-1]) for shape in shapes)
            if peak is None or not is_alike or not isinstance(picked, Picked):
                continue
            if peak.logits is not total.chain.node or not peak.is_that_of(total.peak):
                continue
            rows = self.info.value(peak.logits).shape[:-1]
            index = self.info.value(picked.index).shape
            if not same_shape(index if picked.from_end else index[:-1], rows):
                continue
            if not any(same_shape(shapes[-1], wanted) for wanted in (rows, (*rows, 1))):
                continue
            through = (*total.through, left, *peak.through, picked.source, *picked.opened)
            through = (*through, entry, *way)
            yield Tail(node, "log_prob", total.chain, through=through, factor=sign, **picked.how)
            return

    def _picked(self, node: Any, way: list[Node]) -> tuple[Node, Picked | Decline | None]:
        """Recognize a gather of one class per row of any tensor.

        After the gather, the graph may call squeeze or select. The callers of this method check
        that the result has one element per row."""
        entry = back_over(node, (aten.squeeze.dim, aten.select.int), way)
        call = call_of(entry, aten.gather.default, aten.take_along_dim.default)
        found = self._picked_by_index(entry) if call is None else self._gathered(entry, call.args)
        return entry, found

    def _log_of_picked(self, node: Node, a: Any) -> Iterable[Tail]:
        """Recognize `log(softmax(x)[target])`."""
        way: list[Node] = []
        entry, picked = self._picked(a["self"], way)
        soft = self.softmax.probs(picked.source) if isinstance(picked, Picked) else None
        if soft is None or not isinstance(picked, Picked) or soft.chain.moved:
            return
        rows = self.info.value(picked.source).shape[:-1]
        index, shape = self.info.value(picked.index).shape, self.info.value(node).shape
        is_alike = same_shape(index if picked.from_end else index[:-1], rows)
        if is_alike and any(same_shape(shape, wanted) for wanted in (rows, (*rows, 1))):
            through = (*soft.through, *picked.opened, entry, *way)
            yield Tail(node, "log_prob", soft.chain, through=through, **picked.how)

    def _chosen(self, node: Node) -> Iterable[Tail]:
        """Recognize `max(x, -1)[1]` and `topk(x, 1)[1]` as an argmax, if no node uses the
        maximum itself."""
        pair, index = node.args
        call = call_of(pair, aten.max.dim, aten.topk.default) if index in (1, -1) else None
        if call is None or not isinstance(pair, Node):
            return
        others = [user for user in pair.users if user.args[1:] != node.args[1:]]
        is_first = call.op is aten.max.dim or (call.args["k"] == 1 and call.args["largest"])
        if is_first and not any(user.users for user in others):
            yield from self._top(node, {"keepdim": True, **call.args}, (pair, *others))

    def _top(self, node: Node, a: Any, through: tuple[Node, ...] = ()) -> Iterable[Tail]:
        """Recognize an argmax of logits, probabilities or log-probabilities, over the classes."""
        source = a["self"]
        value = self.info.tensor(source)
        if value is None or value.dim() == 0 or not isinstance(a["dim"], int):
            return
        soft = self.softmax.probs(source) or self.softmax.log_probs(source)
        chain = soft.chain if isinstance(soft, Soft) else self.reader.chain(source)
        if isinstance(chain, Decline):
            return
        if a["dim"] % value.dim() == class_position(chain, value.dim()):
            before = soft.through if isinstance(soft, Soft) else ()
            yield Tail(node, "top", chain, through=(*before, *through), keepdim=a["keepdim"])

    def _sum(self, node: Node, a: Any) -> Iterable[Tail | Decline]:
        """Recognize a sum over the classes: an entropy, or a sum of log-probabilities, weighted or
        not."""
        a, reduction = {"dim": None, "keepdim": False, **a}, 2 if a.get("dim") is None else 0
        if not self._is_over_a_dimension(a, reduction):
            return
        term, sign, between = _unsigned(a["self"])
        call = call_of(term, aten.special_entr.default, aten.mul.Tensor)
        if call is None:
            yield from self._class_sum(node, a, reduction)
            return
        entropies = list(self._entropy(node, a, term, sign, between, call)) if a["dim"] else []
        yield from entropies
        if not entropies and call.op is aten.mul.Tensor:
            yield from self._by_targets(node, a, reduction, term, sign, between, call)

    def _mean(self, node: Node, a: Any) -> Iterable[Tail]:
        """Recognize a mean of log-probabilities or logits, over the classes or over rows and
        classes."""
        a, reduction = {"dim": None, "keepdim": False, **a}, 1 if a.get("dim") is None else 0
        if self._is_over_a_dimension(a, reduction):
            yield from self._class_sum(node, a, reduction, is_mean=True)

    def _is_over_a_dimension(self, a: Any, reduction: int) -> bool:
        """Return whether a sum or mean has a supported form.

        With `reduction` 0, the sum or mean must be over a single dimension. Any other `reduction`
        means a sum or mean over all dimensions. The sum or mean must be computed in its operand's
        dtype or a wider dtype."""
        value, dims = self.info.tensor(a["self"]), a["dim"]
        if value is None or value.dim() == 0 or (not reduction and len(dims) != 1):
            return False
        dtype = a["dtype"] or value.dtype
        return bool(dtype.is_floating_point and dtype.itemsize >= value.dtype.itemsize)

    def _class_sum(
        self, node: Node, a: Any, reduction: int, is_mean: bool = False
    ) -> Iterable[Tail]:
        source = a["self"]
        soft = self.softmax.signed_log_probs(source)
        if isinstance(soft, Decline) or (soft is None and reduction):
            return  # a sum of all logits, or of all numbers of anything else, is no loss
        kind = "log_prob_sum"
        if soft is None:
            source, sign, signs = _unsigned(source)
            chain = self.untraced.chain(source)
            if isinstance(chain, Decline):
                return
            kind, soft = "logit_sum", Soft(chain, signs, sign)
        rank = self.info.value(source).dim()
        position = class_position(soft.chain, rank)
        if not reduction and a["dim"][0] % rank != position:
            return
        factor = float(soft.sign)
        if is_mean:  # a varying number of classes has a separate decline, found later
            factor /= compat.known_size(self.info.value(source).shape[position]) or 1
        how = {"keepdim": a["keepdim"], "factor": factor, "reduction": reduction}
        yield Tail(node, kind, soft.chain, through=soft.through, **how)

    def _by_targets(
        self,
        node: Node,
        a: Any,
        reduction: int,
        term: Node,
        sign: int,
        between: tuple[Node, ...],
        call: Call,
    ) -> Iterable[Tail | Decline]:
        """Recognize log-probabilities that are multiplied by one-hot targets, or by other numbers,
        and then summed over the classes."""
        left, right = call.args["self"], call.args["other"]
        for logs, targets in ((left, right), (right, left)):
            soft = self.softmax.signed_log_probs(logs)
            value, given = self.info.tensor(logs), self.info.tensor(targets)
            if not isinstance(soft, Soft) or value is None or given is None:
                continue
            last = value.dim() - 1
            if not reduction and a["dim"][0] % value.dim() != last:
                return
            # A sum weighted by probabilities of a head, if no entropy, compares two heads.
            if self.softmax.probs(_unsigned(targets)[0]) is not None:
                return
            hot = None
            if not soft.chain.moved and same_shape(given.shape, value.shape):
                hot = read_one_hot(self.info, targets, term)
            if hot is None:
                said = "the log-probabilities are weighted by a number of every class, which is as "
                yield Decline("prob_targets", f"{said}large as the logits", PROB_HINT, node)
                return
            sign *= soft.sign
            yield Tail(
                node,
                "log_prob",
                soft.chain,
                target=hot.index,
                through=(*soft.through, term, *between),
                keepdim=a["keepdim"],
                factor=sign * hot.peak,
                spread=sign * hot.base,
                reduction=reduction,
                aside=hot.nodes,
            )
            return
        yield from self._one_hot_logits(node, a, reduction, term, sign, between, call)

    def _one_hot_logits(
        self,
        node: Node,
        a: Any,
        reduction: int,
        term: Node,
        sign: int,
        between: tuple[Node, ...],
        call: Call,
    ) -> Iterable[Tail]:
        """Recognize logits that are multiplied by one-hot targets and summed over the classes."""
        left, right = call.args["self"], call.args["other"]
        for logits, targets in ((left, right), (right, left)):
            value, given = self.info.tensor(logits), self.info.tensor(targets)
            if value is None or given is None or not same_shape(given.shape, value.shape):
                continue
            if reduction or a["dim"][0] % value.dim() != value.dim() - 1:
                continue
            hot = read_one_hot(self.info, targets, term)
            chain = None if hot is None else self.reader.chain(logits)
            if hot is None or not isinstance(chain, Chain) or chain.moved:
                continue
            yield Tail(
                node,
                "logit",
                chain,
                target=hot.index,
                through=(term, *between),
                keepdim=a["keepdim"],
                factor=sign * hot.peak,
                spread=sign * hot.base,
                aside=hot.nodes,
            )
            return

    def _by_hand(self, node: Node, a: Any) -> Iterable[Tail]:
        """Recognize a log-sum-exp that is written with exp and log, with or without subtracting the
        maximum."""
        total = self.softmax.total(node)
        if total is not None and total.peak is None and not total.chain.moved:
            yield Tail(node, "lse", total.chain, through=total.through, keepdim=total.keepdim)

    def _log(self, node: Node, a: Any) -> Iterable[Tail]:
        """Recognize the logarithm of a sum over the classes, or of one probability per row."""
        yield from self._by_hand(node, a)
        yield from self._log_of_picked(node, a)

    def _entropy(
        self, node: Node, a: Any, term: Node, sign: int, between: tuple[Node, ...], call: Call
    ) -> Iterable[Tail]:
        """Recognize p log p, p times the logits, or entr(p), summed over the classes."""
        value, dims = self.info.value(a["self"]), a["dim"]
        if call.op is aten.mul.Tensor:
            left, right = _unsigned(call.args["self"]), _unsigned(call.args["other"])
            factors: tuple[Node, ...] = (left[0], right[0])
            found = self._weighted(*factors)
            sign *= left[1] * right[1]
            between = (*between, *left[2], *right[2])
        else:
            factors = (call.args["self"],)
            probs = self.softmax.probs(*factors)
            found = None if probs is None else ("entropy", probs)
        if found is None:
            return
        kind, soft = found
        if dims[0] % value.dim() != class_position(soft.chain, value.dim()):
            return
        if sign < 0:
            kind = {"entropy": "neg_entropy", "neg_entropy": "entropy"}.get(kind, "")
        if kind:
            through = (*soft.through, term, *between)
            how = {"keepdim": a["keepdim"], "factors": factors}
            yield Tail(node, kind, soft.chain, through=through, **how)

    def _weighted(self, left: Any, right: Any) -> tuple[str, Soft] | None:
        """Recognize p times log p, or p times the logits, in either order.

        `Categorical.entropy` replaces log p = -inf by the smallest finite number. This method
        ignores the replacement, because p and the product are 0 there. In an expression without
        the factor p, the replacement would change the result.
        """
        for first, second in ((left, right), (right, left)):
            probs = self.softmax.probs(first)
            if probs is None:
                continue
            source = self.softmax.finite(second)
            logs = self.softmax.log_probs(source)
            if isinstance(logs, Soft):
                clamp = () if source is second else (second,)
                if _same_logits(probs.chain, logs.chain):
                    through = (*probs.through, *logs.through, *clamp)
                    return "neg_entropy", Soft(probs.chain, through)
                return None
            chain = self.reader.chain(second) if isinstance(second, Node) else None
            if isinstance(chain, Chain) and _same_logits(probs.chain, chain):
                return "mean_logit", probs
        return None


_READERS: dict[OpOverload, Callable[[TailReader, Node, Any], Iterable[Tail | Decline]]] = {
    aten.cross_entropy_loss.default: TailReader._cross_entropy,
    aten.nll_loss_nd.default: TailReader._nll,
    aten.gather.default: TailReader._gather,
    aten.take_along_dim.default: TailReader._gather,
    aten.logsumexp.default: TailReader._lse,
    aten.argmax.default: TailReader._top,
    aten.sum.dim_IntList: TailReader._sum,
    aten.sum.default: TailReader._sum,
    aten.mean.dim: TailReader._mean,
    aten.mean.default: TailReader._mean,
    aten.sub.Tensor: TailReader._difference,
    aten.log.default: TailReader._log,
    aten.add.Tensor: TailReader._by_hand,
}


def _plain_index(info: GraphInfo, index: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the class index before torch.distributions broadcasts it, and the nodes of the
    broadcast.

    torch.distributions gathers log-probabilities with
    `broadcast_tensors(index, logits)[0][..., :1]`. This call reads only the shape of the logits.
    If there is no such broadcast, return `index`.
    """
    if (call := call_of(index, aten.slice.Tensor)) is None:
        return index, ()
    broadcast: Node = call.args["self"]
    source = broadcast_operand(broadcast)
    if source is None:
        return index, ()
    before, after = info.tensor(source), info.tensor(index)
    if before is None or after is None or not same_shape(before.shape, after.shape):
        return index, ()
    joined: Any = broadcast.args[0]
    return source, (joined, broadcast, index)


def _is_pointwise(node: Node) -> bool:
    """Return whether a node computes each element from the operands' elements at the same place,
    without random numbers."""
    call = read_one(node)
    if call is None or compat.is_drawn(call.op):
        return False
    return torch.Tag.pointwise in call.op.tags


def _unsigned(node: Any) -> tuple[Node, int, tuple[Node, ...]]:
    """Follow negations back from `node`; return the first node that is no negation, the total
    sign, and the negations."""
    sign, taken = 1, list[Node]()
    while (below := negated(node)) is not None:
        taken.append(node)
        sign, node = -sign, below
    return node, sign, tuple(taken)


def _same_logits(a: Chain, b: Chain) -> bool:
    """Return whether two chains compute logits with equal values at the same positions.

    A chain consists of an output projection and the nodes after the projection, such as scales. The
    gradients of the two chains may differ.
    """
    left, right = fold(a), fold(b)
    return (
        a.head.node is b.head.node
        and a.moved == b.moved
        and [s.effect for s in a.row_steps] == [s.effect for s in b.row_steps]
        and isinstance(left, Modifiers)
        and left == right
    )


def loss_outside(info: GraphInfo) -> Iterable[Decline]:
    """Yield a Decline (the reason for no rewrite) for a training graph that returns its logits.

    The graph contains no loss of these logits, so the loss is computed outside the graph. The pass
    `defer_logits` can make the graph return deferred logits, which are computed when first read.
    Yield no Decline for logits that this pass will defer.
    """
    for match in returned_logits(info):
        if is_deferrable(info, match):
            continue
        head = match.outputs[0].chain.head
        weight = info.value(head.weight)
        vocabulary = compat.size_hint(weight.shape[1 if head.transposed else 0])
        yield Decline(
            "graph_break_between",
            f"this graph returns logits over {vocabulary} classes and no loss: the loss is "
            "computed in another graph or outside the compiled function",
            "compute the loss inside the compiled function (pass labels=), and compile with "
            "fullgraph=True to see what splits it",
            head.node,
        )
        return


def without_parts(tails: Sequence[Tail]) -> list[Tail]:
    """Return losses and other results of the logits, without results that are steps of other
    results.

    Losses come first. For example, a logsumexp may be only a step in the computation of
    log-probabilities.
    """
    inner = {node for tail in tails for node in tail.through}
    known = inner | {tail.node for tail in tails}
    kept = [t for t in tails if t.node not in inner or not known.issuperset(t.node.users)]
    return sorted(kept, key=lambda tail: tail.kind not in LOSSES)


def has_sum(tail: Tail, tails: Sequence[Tail]) -> bool:
    """Return whether the graph also computes the logsumexp of rows (tokens) of `tail`'s logits.

    `tail` describes a gather of one logit per row. `tails` has the losses and other results of
    the same output projection's logits. Gathered logits and logsumexps together form a loss. In
    a loop over chunks, each logsumexp may cover only some of the rows of `tail`.
    """
    return any(other.kind == "lse" and other.chain.is_of(tail.chain) for other in tails)
