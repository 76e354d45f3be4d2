"""Insert the fused op's call that replaces an output projection and its losses.

Also insert the few ATen nodes that compute each loss from the call's results.

Losses and other results of the logits (tails) may share one call of the fused op. These tails must
have equal rows (tokens), scale, softcap, bias and targets. Reductions, class weights, label
smoothing and casts remain ATen nodes that operate on one number per row. Inductor (the
default compiler of the rewritten graph) fuses these nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...kernels import linear_cross_entropy as op_folder
from ...kernels.checks import wide
from ...logits.recipe import Modifiers
from ...options import Options
from ..graph.base import Decline
from ..graph.canonical import aten, call_of, named, read_one
from ..graph.editor import Editor
from ..graph.graph_info import GraphInfo, Region, same_shape, written_by
from . import shards
from .head import Factor, Step, fold, replay_rows
from .softmax import class_position
from .tails import ENTROPIES, STATISTICS, SUMS, SizeRead, Tail, is_silent, reads_sum

# The op's results, a number per row each; the third is a weighted sum of logits.
_NLL, _LSE, _LOGIT_SUM, _ENTROPY, _TOP = range(5)


def filter_settings(options: Options) -> dict[str, float | str | bool]:
    """Return the non-default settings of the gradient filter, as arguments of the fused loss op.

    A gradient filter drops parts of the loss's gradients that are small."""
    settings: dict[str, float | str | bool] = {
        "filter_level": options.filter_level,
        "filter_parts": options.linear_cross_entropy_parts,
        "sort_vocabulary": options.linear_cross_entropy_sort_vocabulary,
    }
    return {name: value for name, value in settings.items() if value and value != "both"}


def groups_of(info: GraphInfo, tails: Sequence[Tail]) -> list[list[Tail]]:
    """Group the tails (losses and other results of logits) that one fused loss call can compute.

    The tails of a group have:

    - the same scale, softcap and bias, and the same targets if they have targets;
    - the same rows (tokens) of the logits, but a tail without targets may use only some of the
      group's rows;
    - inputs that are all computed before the group's first tail, or can be computed again there.

    Groups whose tails have no targets and use different ranges of the rows may become one group.
    """
    groups: list[list[Tail]] = []
    # Targets first; statistics join them or each other, those over more rows first.
    for tail in sorted(tails, key=lambda t: (t.kind in STATISTICS, len(t.chain.row_key))):
        for group in groups:
            if _compatible(info, group, tail) and _late(info, [*group, tail]) is not None:
                group.append(tail)
                break
        else:
            groups.append([tail])
    return _parts_joined(info, groups)


def _parts_joined(info: GraphInfo, groups: list[list[Tail]]) -> list[list[Tail]]:
    """Combine tails (losses and other results of logits) that use different ranges of the rows.

    Such ranges are, for example, chunks into which the user's code splits the rows (tokens). One
    call of the fused loss op then computes the results per row of all ranges. The ranges are not
    combined if together they have less than half of the rows.
    """
    kept: list[list[Tail]] = []
    parts: dict[Any, list[list[Tail]]] = {}
    for group in groups:
        chain = group[0].chain
        if chain.row_key and all(tail.kind in STATISTICS for tail in group):
            parts.setdefault(chain.row_key[:-1], []).append(group)
        else:
            kept.append(group)
    for key, some in parts.items():
        chain, joined = some[0][0].chain, [tail for group in some for tail in group]
        whole = info.value(chain.row_steps[len(key) - 1].node if key else chain.head.node)
        sizes = [whole.shape[-1], whole.numel(), *(info.value(g[0].node).numel() for g in some)]
        columns, elements, *rows = map(compat.size_hint, sizes)
        is_one = all(fold(tail.chain) == fold(chain) for tail in joined)
        is_most = len(some) > 1 and 2 * columns * sum(rows) >= elements
        if is_one and is_most and _late(info, joined) is not None:
            kept.append(joined)
        else:
            kept.extend(some)
    return kept


def _compatible(info: GraphInfo, group: list[Tail], tail: Tail) -> bool:
    first = group[0]
    if fold(first.chain) != fold(tail.chain):
        return False
    is_own_sum = reads_sum(tail) and tail.kind != "loss"
    if is_own_sum and (first.ignore_index is not None or first.class_weight is not None):
        return False  # the op's sums leave out ignored rows, and may be weighted by class
    if tail.kind in STATISTICS:  # of all rows; the tail's rows are then selected
        return tail.chain.is_of(first.chain)
    return (
        first.kind not in STATISTICS
        and first.chain.row_key == tail.chain.row_key
        and _target_source(info, first.target) is _target_source(info, tail.target)
        and (first.ignore_index, first.wraps) == (tail.ignore_index, tail.wraps)
        and first.from_end == tail.from_end
        and first.class_weight is tail.class_weight
    )


def _target_source(info: GraphInfo, node: Node | None) -> Node | None:
    """Follow a target back through reshapes and copies, and return the earliest node.

    Do not go past a node whose memory the graph may overwrite.
    """
    while (call := call_of(node, *_TARGET_MOVES)) is not None:
        source: Node = call.args["self"]
        is_narrower = call.args.get("dtype", torch.int64) not in (torch.int64, torch.int32)
        if is_narrower or any(info.may_write(write, (source,)) for write in info.writes):
            break
        node = source
    return node


_TARGET_MOVES = named(
    "view.default reshape.default unsqueeze.default squeeze.dim contiguous.default to.dtype "
    "flatten.using_ints"
)


def _late(info: GraphInfo, group: Sequence[Tail]) -> list[Node] | None:
    """Return the nodes that the graph must compute again before the call of the fused loss op.

    The call comes before the group's first tail (a loss or another result of the logits). The nodes
    to compute again are targets or class weights, for example labels that the graph shifts after it
    has computed a z-loss. Usually, they are views and copies of integer inputs, so computing them
    again is cheap. If computing these nodes again could give other values, return None.
    """
    first, _ = _place(info, group)
    again: list[Node] = []

    def collect(node: Node) -> bool:
        if info.positions[node] < info.positions[first] or node in again:
            return True
        call = read_one(node)
        if call is None or written_by(node) or call.op is aten.dropout.default:
            return False
        if not all(collect(operand) for operand in node.all_input_nodes):
            return False
        again.append(node)
        return True

    operands = [n for t in group for n in t.operands]
    if not all(collect(operand) for operand in operands):
        return None
    if written_before(info, group) is not None:
        return None
    if again:
        touched = [*again, *(i for n in again for i in n.all_input_nodes)]
        last = max(again, key=lambda n: info.positions[n])
        if info.written_between(touched, first, last) is not None:
            return None
    return again


def written_before(info: GraphInfo, group: Sequence[Tail]) -> Node | None:
    """Return a node that writes to targets or class weights after the fused loss op reads them.

    One call of the op computes all tails (losses and other results of the logits) in `group`. The
    node comes before the group's last tail. In the original graph, a tail that comes after this
    node reads the changed values. The fused op would read the old values. If there is no such node,
    return None.
    """
    operands = [n for tail in group for n in tail.operands]
    last = max((tail.node for tail in group), key=info.positions.__getitem__)
    return info.written_between(operands, _place(info, group)[0], last)


def _place(info: GraphInfo, group: Sequence[Tail]) -> tuple[Node, Region]:
    """Return the node before which the fused loss op is inserted, and the autograd, autocast and
    inference modes of the op.

    The op computes all losses and other results of the logits in `group`. Usually the op is
    inserted before the node that computes the first of these results. The first result may be a
    metric without a gradient, while another result needs gradients. Then the op is inserted before
    the node that disabled gradients.
    """
    place = min((t.node for t in group), key=lambda n: info.positions[n])
    trains = info.regions[group[0].chain.head.node].grad
    if not trains or info.regions[place].grad or all(is_silent(info, t) for t in group):
        return place, info.regions[place]
    while not info.regions[place.prev].grad:
        place = place.prev
    return place, info.regions[place.prev]


def emit_group(info: GraphInfo, editor: Editor, group: list[Tail]) -> list[Node]:
    """Insert the fused loss op, then compute each loss or other result of the logits (each tail) in
    `group` from the op's results.

    The op may need a node, such as shifted labels, that the graph computes only after the op's
    position. Such nodes are copied to before the op. Return the original nodes."""
    anchor, region = _place(info, group)
    named = min((t.node for t in group), key=info.positions.__getitem__)
    again = _late(info, group)
    assert again is not None, "only tails that one call can serve are grouped"
    with editor.at(anchor, like=named, region=region):
        early: dict[Node, Node] = {}
        for node in again:
            early[node] = editor.copy(node, early)
        group = [
            replace(
                tail,
                target=tail.target and early.get(tail.target, tail.target),
                class_weight=tail.class_weight and early.get(tail.class_weight, tail.class_weight),
            )
            for tail in group
        ]
        emit = GroupEmitter(info, editor, group)
        emit.op_call()
    for tail in group:
        with editor.at(tail.node):
            editor.replace(tail.node, emit.result(tail))
    return again


def emit_size(info: GraphInfo, editor: Editor, read: SizeRead) -> None:
    """Change a node that reads the shape of the logits, so that the node needs no logits.

    Let the node read the shape from a column of the hidden states, expanded to the shape of the
    logits. This tensor needs no memory.
    """
    head, e = read.chain.head, editor
    depth = compat.known_size(info.value(head.hidden).shape[-1])
    classes = compat.known_size(info.value(read.source).shape[-1])
    with e.at(read.node):
        rows = replay_rows(e, head.hidden, read.chain.row_steps, depth)
        column = e.call(aten.slice.Tensor, rows, -1, 0, 1)
        spread = [*([-1] * (info.value(rows).dim() - 1)), classes]
        stand_in = e.call(aten.expand.default, column, spread)
        e.replace(read.node, e.copy(read.node, {read.source: stand_in}))


def is_total(info: GraphInfo, group: Sequence[Tail]) -> bool:
    """Return whether the fused loss op's forward pass also computes the gradients.

    Return True only if the call has a single loss that is reduced to one number. In an activation
    checkpoint, return False, because the forward pass runs twice there.
    """
    tail = group[0]
    hidden = info.tensor(tail.chain.head.hidden)
    if len(group) > 1 or tail.kind != "loss" or tail.reduction == 0 or hidden is None:
        return False
    if tail.label_smoothing or info.parent is not None or is_silent(info, tail):
        return False
    if tail.chain.head.parts:
        return op_folder.makes_gradients_in_forward_adapted(
            hidden.device,
            tail.chain.head.compute_dtype,
            trains_weight=info.value(tail.chain.head.weight).requires_grad,
            workspace=info.options.linear_cross_entropy_workspace,
        )
    makes = op_folder.makes_gradients_in_forward
    if compat.is_dtensor(hidden):
        makes = op_folder.makes_gradients_in_forward_over_ranks
    return makes(
        hidden.device,
        tail.chain.head.compute_dtype,
        hidden.shape[-1],
        gradient_filter=info.options.linear_cross_entropy,
        filter_parts=info.options.linear_cross_entropy_parts,
        workspace=info.options.linear_cross_entropy_workspace,
    )


def gathered(group: Sequence[Tail]) -> list[str]:
    """Return the names of the values per row (token) that a fused loss call gathers from ranks."""
    extra = {"sum": any(map(reads_sum, group))}
    extra["entropy"] = any(t.kind in ENTROPIES for t in group)
    extra |= dict.fromkeys(("top", "its logit"), any(t.kind == "top" for t in group))
    return ["lse", "nll", *(name for name, wanted in extra.items() if wanted)]


def pieces_met(info: GraphInfo, group: Sequence[Tail], shard: op_folder.Shard) -> int:
    """Return how many exchanges between the ranks one call of the fused loss op makes.

    The call computes the losses in `group`. Each rank has a shard of the classes. In an exchange,
    each rank sends a few numbers per row (token), such as the log-sum-exp over the rank's classes.
    """
    if not is_total(info, group):
        return 1
    chain, options = group[0].chain, info.options
    hidden, folded = info.value(chain.head.hidden), fold(chain)
    sizes = map(compat.size_hint, info.value(group[0].target or chain.node).shape)
    rows = max(math.prod(sizes), 1)
    height = op_folder.rows_of_a_block(
        rows,
        shard,
        depth=compat.size_hint(hidden.shape[-1]),
        dtype=chain.head.compute_dtype,
        device=hidden.device,
        workspace=options.linear_cross_entropy_workspace,
        has_softcap=isinstance(folded, Modifiers) and folded.softcap > 0,
    )
    return -(-rows // height)


class GroupEmitter:
    """Inserts the fused op's call for one group of tails (losses and other results of the logits).

    The op returns a few numbers per row (token), such as the loss and the log-sum-exp. The emitter
    also inserts the few ATen nodes that compute each tail from these numbers."""

    def __init__(self, info: GraphInfo, editor: Editor, group: list[Tail]) -> None:
        self.info, self.editor, self.group = info, editor, group
        self.head = group[0].chain.head
        folded = fold(group[0].chain)
        assert isinstance(folded, Modifiers)
        self.modifiers = folded
        self.with_target = next((t for t in group if t.target is not None), None)
        self.ignore_index = self.with_target.ignore_index if self.with_target else None
        split = shards.split_of(info, self.head)
        assert not isinstance(split, Decline), "the check admits only splits that are served"
        self.split = split
        self.op = self.target = self.hidden = group[0].node
        self.total: Node | None = None
        self._items: dict[int, Node] = {}
        self._silent = False

    def op_call(self) -> None:
        """Insert one call of the fused loss op for all losses in `self.group`.

        The call gets the rows (tokens) that these losses use."""
        e, head = self.editor, self.head
        key_steps = self.group[0].chain.row_steps[: self._rows_in_key()]
        size = compat.known_size(self.info.value(head.hidden).shape[-1])
        hidden = self._here(head.hidden, None if self.split is None else self.split.dim)
        self.hidden = self._cast(self._scaled(self._moved(hidden, key_steps, size)))
        weight = self._cast(self._cut(self._here(head.weight), 1 if head.transposed else 0))
        if head.transposed:
            weight = e.call(aten.t.default, weight)
        bias = self._bias()
        self.target = self._target_rows()
        smoothing = any(t.label_smoothing > 0 for t in self.group)
        with_sum = any(map(reads_sum, self.group))
        of_logs = any(t.spread or t.kind == "log_prob_sum" for t in self.group)
        column_weight = self.with_target.class_weight if smoothing and self.with_target else None
        options = self.info.options
        operands = [self.hidden, weight, bias, self.target]
        low_rank = self._low_rank(key_steps)
        if is_total(self.info, self.group):
            self._total_call(operands, low_rank)
            return
        # A call without metrics leaves their arguments at the defaults; they are not in the graph.
        metrics = {"with_entropy": self._has(*ENTROPIES), "with_top": self._has("top")}
        with_lse = of_logs or self._has("lse", "logit", "mean_logit")
        self.op = self._call(
            *operands,
            column_weight and self._columns(column_weight),
            *low_rank,
            ignore_index=self.ignore_index,
            scale=self.modifiers.scale,
            softcap=self.modifiers.softcap,
            with_lse=with_lse,
            with_logit_sum=with_sum,
            gradient_filter=options.linear_cross_entropy,
            workspace=options.linear_cross_entropy_workspace,
            **{name: True for name, wanted in metrics.items() if wanted},
            **filter_settings(options),
        )
        asked = {_LOGIT_SUM: with_sum, _NLL: self._has("loss", "log_prob", "logit")}
        asked |= {_LSE: smoothing or with_lse, _ENTROPY: metrics["with_entropy"]}
        asked[_TOP] = metrics["with_top"]
        self._items = {place: e.item(self.op, place) for place, holds in asked.items() if holds}

    def _call(self, *operands: Node | None, **settings: Any) -> Node:
        """Insert a call of the fused op, which computes an output projection and its loss.

        `operands` are hidden states, weight and so on. If the projection has low-rank products, or
        its classes are split over ranks, call the op's variant for this case.
        """
        e, split = self.editor, self.split
        if split is None:
            whole, adapted = op_folder.linear_cross_entropy, op_folder.linear_cross_entropy_adapted
            return e.call(adapted if self.head.parts else whole, *operands, **settings)
        settings |= {"group": split.group, **split.shard._asdict()}
        return e.call(op_folder.linear_cross_entropy_over_ranks, *operands, **settings)

    def _here(self, node: Node, summed: int | None = None) -> Node:
        """If the output projection is split over ranks, return the node of this rank's shard of an
        operand, otherwise return the operand itself.
        """
        if self.split is None:
            return node
        return shards.here(self.editor, self.head, node, summed)

    def _low_rank(self, steps: Sequence[Step]) -> list[Node]:
        """Return the inputs of the output projection's low-rank products (such as LoRA's), and the
        matrices that multiply these inputs.

        Several low-rank products are combined into one, whose rank is the sum of their ranks. The
        scales of these products are applied to the small low-rank inputs. The products are larger:
        they have one number per row (token) and class.
        """
        e, lows, ups = self.editor, list[Node](), list[Node]()
        for part in self.head.parts:
            rank = compat.known_size(self.info.value(part.low).shape[-1])
            low = self._scaled(self._moved(part.low, steps, rank))
            low = e.cast(low, self.head.low_dtype)
            up = e.cast(self._cut(part.up, 1 if part.transposed else 0), self.head.low_dtype)
            lows.append(low if part.scale == 1 else e.call(aten.mul.Scalar, low, part.scale))
            ups.append(e.call(aten.t.default, up) if part.transposed else up)
        if len(lows) < 2:
            return [*lows, *ups]
        return [e.call(aten.cat.default, lows, -1), e.call(aten.cat.default, ups, -1)]

    def _moved(self, node: Node, steps: Sequence[Step], size: Any) -> Node:
        """Apply row moves (reorderings and selections of rows), and the per-row scales between
        them, to the hidden states."""
        e, done = self.editor, 0
        for factor in self.modifiers.factors:
            if factor.rows is not None:
                node = replay_rows(e, node, steps[done : len(factor.rows)], size)
                node, done = self._times(node, [factor]), len(factor.rows)
        return replay_rows(e, node, steps[done:], size)

    def _scaled(self, node: Node) -> Node:
        """Multiply a node by those factors of the logits that are one number for all rows."""
        shared = [factor for factor in self.modifiers.factors if factor.rows is None]
        return self._times(node, shared) if shared else node

    def _times(self, node: Node, factors: Sequence[Factor]) -> Node:
        """Multiply a node by factors.

        For a dtype of 16 bits, compute in fp32, so that the gradient of a factor is summed in fp32.
        """
        e, dtype = self.editor, self.info.value(node).dtype
        node = e.cast(node, wide(dtype))
        for factor in factors:
            op = aten.div.Tensor if factor.is_divisor else aten.mul.Tensor
            number = self._here(e.cast(factor.node, wide(dtype)))
            if factor.rows is None and self.info.value(number).dim():
                number = e.call(aten.reshape.default, number, [])
            node = e.call(op, node, number)
        return e.cast(node, dtype)

    def _cut(self, node: Node, dim: int, classes: tuple[int, int] | None = None) -> Node:
        """Return a view of a weight or bias without the classes that no loss reads; their gradient
        is zero."""
        classes = classes or self.modifiers.classes
        return node if classes is None else self.editor.call(aten.slice.Tensor, node, dim, *classes)

    def _columns(self, vector: Node) -> Node:
        """Take a vector with one element per class, and return the elements for the classes of this
        rank.
        """
        if self.split is None:
            return vector
        shard = self.split.shard
        stop = shard.first + shard.columns
        return self.editor.call(aten.slice.Tensor, vector, 0, shard.first, stop)

    def _total_call(self, operands: Sequence[Node | None], low_rank: Sequence[Node]) -> None:
        """Insert the fused loss op that returns the reduced loss together with its gradients."""
        e, tail = self.editor, self.group[0]
        row_weight = norm = None
        if tail.class_weight is not None or tail.reduction == 1:
            norm = kept = e.call(aten.ne.Scalar, self.target, tail.ignore_index)
            if tail.class_weight is not None:
                dtype = wide(self.head.compute_dtype)
                norm = row_weight = self._row_weights(tail.class_weight, kept, dtype)
            norm = e.call(aten.sum.default, norm) if tail.reduction == 1 else None
        trained = map(self.info.tensor, (*operands[:3], *low_rank))
        options = self.info.options
        filtered: dict[str, Any] = {}
        if options.linear_cross_entropy != "exact" and not low_rank:
            filtered = {"gradient_filter": options.linear_cross_entropy, **filter_settings(options)}
        op = op_folder.linear_cross_entropy_total
        if low_rank:
            op = op_folder.linear_cross_entropy_adapted_total
        over_ranks: dict[str, Any] = {}
        if self.split is not None:
            op = op_folder.linear_cross_entropy_total_over_ranks
            over_ranks = {"group": self.split.group, **self.split.shard._asdict()}
        self.op = e.call(
            op,
            *operands,
            row_weight,
            norm,
            *low_rank,
            ignore_index=tail.ignore_index,
            scale=self.modifiers.scale,
            softcap=self.modifiers.softcap,
            workspace=options.linear_cross_entropy_workspace,
            output_mask=[value is not None and value.requires_grad for value in trained],
            **filtered,
            **over_ranks,
        )
        self.total = e.item(self.op, 0)

    def _has(self, *kinds: str) -> bool:
        return any(tail.kind in kinds for tail in self.group)

    def _rows(self, index: int) -> Node:
        """Return one of the fused loss op's results per row (token), such as the log-sum-exps.

        The numbers are detached if no gradient flows back through the tail (loss or other result)
        that uses them."""
        item = self._items[index]
        value = self.info.tensor(item)
        if self._silent and value is not None and value.requires_grad:
            return self.editor.call(aten.detach.default, item)
        return item

    def _rows_in_key(self) -> int:
        """Return how many row moves (reorderings and selections of rows) come before the fused op.

        The emitter applies these row moves to the hidden states. One call of the op computes all
        losses in `self.group`, so these losses must have the row moves in common."""
        rows = self.group[0].chain.row_steps
        shared = 0
        for effects in zip(*(t.chain.row_steps for t in self.group), strict=False):
            if any(step.effect != effects[0].effect for step in effects):
                break
            shared += 1
        selecting = [i + 1 for i, s in enumerate(rows[:shared]) if s.kind == "rows"]
        scaled = [len(f.rows) for f in self.modifiers.factors if f.rows is not None]
        return max((*selecting, *scaled), default=0)

    def _cast(self, node: Node) -> Node:
        return self.editor.cast(node, self.head.compute_dtype)

    def _bias(self) -> Node | None:
        e, factors = self.editor, self.modifiers.factors
        total = None
        if self.head.bias is not None:
            total = self._cast(self._cut(self._here(self.head.bias), 0))
            total = self._times(total, factors) if factors else total
        for vector, divisor in self.modifiers.biases:
            flat = e.call(aten.reshape.default, self._cast(vector.node), [-1])
            flat = self._cut(flat, 0, vector.classes) if vector.classes else flat
            flat = self._times(flat, vector.factors) if vector.factors else flat
            flat = self._columns(flat)
            if divisor != 1.0:
                flat = e.call(aten.div.Scalar, flat, divisor)
            total = flat if total is None else e.call(aten.add.Tensor, total, flat)
        return total

    def _target_rows(self) -> Node:
        """Reshape the targets to the leading dimensions of the hidden states."""
        e = self.editor
        rows = partial(e.call, aten.select.int, self.hidden, -1, 0)
        if self.with_target is None or self.with_target.target is None:
            # Only logsumexp is requested, so any class is a valid target.
            return e.call(aten.zeros_like.default, rows(), dtype=torch.int64)
        shape = self.info.value(self.hidden).shape[:-1]
        target = self._as_wide(self.with_target.target, shape, rows)
        if self.with_target.wraps:
            return e.call(aten.remainder.Scalar, target, self._vocabulary())
        if self.with_target.from_end:
            last = e.call(aten.add.Scalar, target, self._vocabulary())
            return e.call(aten.where.self, e.call(aten.lt.Scalar, target, 0), last, target)
        return target

    def _as_wide(self, node: Node, shape: Sequence[Any], like: Callable[[], Node]) -> Node:
        """Reshape `node` to `shape`; if the sizes in `shape` are unknown, reshape `node` to the
        shape of the node that `like` returns.
        """
        if same_shape(shape, self.info.value(node).shape):
            return node
        if all(isinstance(size, int) for size in shape):
            return self.editor.call(aten.reshape.default, node, list(shape))
        return self.editor.call(aten.reshape_as.default, node, like())

    def _shaped(self, node: Node, like: Node) -> Node:
        return self._as_wide(node, self.info.value(like).shape, lambda: like)

    def result(self, tail: Tail) -> Node:
        """Insert the result of `tail` (a loss or another result of the logits), computed from the
        fused loss op's results per row (token)."""
        e = self.editor
        self._silent = is_silent(self.info, tail)
        if tail.kind == "loss":
            found = self._loss(tail)
        elif tail.kind in STATISTICS:
            found = self._like_statistic(tail, self._statistic(tail))
        else:
            found = self._entry(tail)
        before = self.info.value(tail.node)
        found = e.cast(found, before.dtype)
        if any(self.info.may_write(write, (tail.node,)) for write in self.info.writes):
            found = e.call(aten.clone.default, found)  # a view of several results takes no writes
        is_spread = compat.is_dtensor(before)
        return e.call(shards.on_every_rank, found, self.head.weight) if is_spread else found

    def _entry(self, tail: Tail) -> Node:
        """Return each row's (token's) logit or log-probability at its target.

        The original graph computes this number by a gather or a sum with a one-hot tensor."""
        e, found, factor = self.editor, self._rows(_NLL), tail.factor
        if tail.kind == "log_prob":
            factor = -factor  # the op returns minus the log-probability
        else:
            found = e.call(aten.sub.Tensor, self._rows(_LSE), found)
        found = self._by_number(found, factor)
        if tail.spread:
            spread = self._by_number(self._class_sum(tail.kind), tail.spread)
            found = e.call(aten.add.Tensor, found, spread)
        if tail.reduction:
            return e.call(aten.mean.default if tail.reduction == 1 else aten.sum.default, found)
        found = self._shaped(found, tail.target or self.target)
        surplus = self.info.value(found).dim() - self.info.value(tail.node).dim()
        if surplus:
            keep = aten.unsqueeze.default if surplus < 0 else aten.squeeze.dim
            found = e.call(keep, found, -1)
        return found

    def _by_number(self, node: Node, factor: float) -> Node:
        """Multiply a node by a number; if the number is 1, insert no node."""
        if factor in (1.0, -1.0):
            return node if factor == 1.0 else self.editor.call(aten.neg.default, node)
        return self.editor.call(aten.mul.Scalar, node, factor)

    def _statistic(self, tail: Tail) -> Node:
        """Return one number per row (token) for `tail`, a loss or another result of the logits.

        The number is computed from the fused loss op's results for the row."""
        kind = tail.kind
        if kind in SUMS:
            return self._by_number(self._class_sum(kind), tail.factor)
        if kind in ("lse", "top"):
            return self._rows(_LSE if kind == "lse" else _TOP)
        entropy = self._rows(_ENTROPY)
        if kind == "neg_entropy":
            return self.editor.call(aten.neg.default, entropy)
        if kind == "mean_logit":  # H = lse - sum of p z
            return self.editor.call(aten.sub.Tensor, self._rows(_LSE), entropy)
        return entropy

    def _class_sum(self, kind: str) -> Node:
        """Return each row's (token's) sum of logits or log-probabilities over the classes."""
        e, rows = self.editor, self._rows(_LOGIT_SUM)
        if kind not in ("log_prob", "log_prob_sum"):
            return rows
        spread = e.call(aten.mul.Scalar, self._rows(_LSE), float(self._vocabulary()))
        return e.call(aten.sub.Tensor, rows, spread)

    def _like_statistic(self, tail: Tail, rows: Node) -> Node:
        """From the fused loss op's results per row (token), select the rows that a loss (or another
        result of the logits) uses, and reshape the selected numbers."""
        e, wanted = self.editor, self.info.value(tail.node)
        rest = tail.chain.row_steps[self._rows_in_key() :]
        is_known = all(isinstance(size, int) for size in wanted.shape)
        if is_known and not tail.reduction and all(step.kind == "reshape" for step in rest):
            return self._shaped(rows, tail.node)
        if rest:
            column = e.call(aten.unsqueeze.default, rows, -1)
            rows = e.call(aten.select.int, replay_rows(e, column, rest, 1), -1, 0)
        if tail.reduction:
            return e.call(aten.mean.default if tail.reduction == 1 else aten.sum.default, rows)
        if tail.keepdim:
            rows = e.call(aten.unsqueeze.default, rows, class_position(tail.chain, wanted.dim()))
        return rows

    def _loss(self, tail: Tail) -> Node:
        """Compute a loss from the fused loss op's results per token as cross_entropy does: apply
        class weights and label smoothing, then the reduction."""
        e = self.editor
        if self.total is not None:
            return self.total
        kept = e.call(aten.ne.Scalar, self.target, tail.ignore_index)
        rows, norm = self._rows(_NLL), kept
        if tail.class_weight is not None:
            norm = self._row_weights(tail.class_weight, kept, self.info.value(rows).dtype)
            rows = e.call(aten.mul.Tensor, rows, norm)
        loss = self._reduce(tail, rows, norm)
        if tail.label_smoothing > 0:
            smooth = self._reduce(tail, self._smooth_rows(tail, kept), norm)
            share = tail.label_smoothing / self._vocabulary()
            loss = e.call(aten.mul.Scalar, loss, 1.0 - tail.label_smoothing)
            loss = e.call(aten.add.Tensor, loss, e.call(aten.mul.Scalar, smooth, share))
        return loss if tail.reduction else self._shaped(loss, tail.target or self.target)

    def _vocabulary(self) -> int:
        if self.modifiers.classes is not None:
            first, stop = self.modifiers.classes
            return stop - first
        return int(self.info.value(self.head.weight).shape[1 if self.head.transposed else 0])

    def _row_weights(self, class_weight: Node, kept: Node, dtype: torch.dtype) -> Node:
        e = self.editor
        zero = e.call(aten.zeros_like.default, self.target)
        index = e.call(aten.where.self, kept, self.target, zero)
        places = e.call(aten.reshape.default, index, [-1])
        flat = e.call(aten.index_select.default, class_weight, 0, places)
        picked = e.call(aten.to.dtype, e.call(aten.reshape_as.default, flat, index), dtype)
        return e.call(aten.mul.Tensor, picked, kept)

    def _smooth_rows(self, tail: Tail, kept: Node) -> Node:
        """Return, per row (token), the sum over classes of class weight * (log-sum-exp - logit).

        The class weight is 1 if the loss has none. `kept` is false in ignored rows, which get 0.
        """
        e = self.editor
        lse = self._rows(_LSE)
        if tail.class_weight is None:
            spread = e.call(aten.mul.Scalar, lse, float(self._vocabulary()))
        else:
            weight = e.call(aten.to.dtype, tail.class_weight, self.info.value(lse).dtype)
            spread = e.call(aten.mul.Tensor, lse, e.call(aten.sum.default, weight))
        rows = e.call(aten.sub.Tensor, spread, self._rows(_LOGIT_SUM))
        zero = e.call(aten.zeros_like.default, rows)
        return e.call(aten.where.self, kept, rows, zero)

    def _reduce(self, tail: Tail, rows: Node, norm: Node) -> Node:
        e = self.editor
        if tail.reduction == 0:
            return rows
        total = e.call(aten.sum.default, rows)
        if tail.reduction == 2:
            return total
        return e.call(aten.div.Tensor, total, e.call(aten.sum.default, norm))
