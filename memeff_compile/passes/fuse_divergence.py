"""Rewrite two output projections and the divergence of their softmaxes into
memeff::linear_divergence.

The op builds no N x V logits (N tokens, V classes).

    before: s = log_softmax(linear(h, W) / T)
            with no_grad(): t = softmax(linear(g, U) / T)
            loss = kl_div(s, t, reduction="sum")
    after:  loss, *_ = memeff.linear_divergence_total(
                h, W, None, g, U, None, None, scale=1 / T, teacher_scale=1 / T, ...)

    before: s = log_softmax(linear(h, W)).gather(-1, i)
    after:  s = memeff.linear_divergence_classes(h, W, None, i)

The pass finds two kinds of matches. The first kind is a divergence, such as the `kl_div` above. For
each row (token), a divergence computes one number. The number compares the softmax of a student's
output projection with a teacher's softmax. The graph may then sum the rows' numbers, as
`reduction="sum"` does. The teacher's logits come from another output projection of this graph, or
exist already as a tensor. `losses/divergences.py` recognises the different ways to write such a
divergence. If the graph only masks, scales and sums a divergence's per-row numbers, the fused op
returns the sum and its gradients. The op then needs four matrix products in all. If the graph does
more than mask, scale and sum a divergence's per-row numbers, the backward pass computes the logits
again. The backward pass also computes the logits again for fp16 and inside activation checkpoints.

The second kind of match is a gather that reads the log-probabilities of k classes per row, as in
the second example. `losses/classes.py` recognises such gathers. A teacher often provides only its k
most likely classes. The nodes that compute a loss from the k log-probabilities stay in the graph.

The pass declines if one of these conditions holds:

- the teacher requires a gradient;
- other nodes read the logits;
- the logits have a softcap, or a vector over the vocabulary is added to the logits;
- a node writes to the logits in place before the divergence;
- an operand is a tensor subclass.

The page docs/passes/fuse-divergence.md lists the compilation report's code for each reason to
decline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
from torch.fx import Node

from .. import compat
from ..kernels import linear_divergence as op_folder
from ..kernels.checks import wide
from ..kernels.device import speed_note
from ..logits.recipe import Modifiers
from .graph.base import Decline, Done, Gain, GraphPass, mutated
from .graph.canonical import aten
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among, node_name, same_shape
from .losses.classes import GATHERS, Classes, read_classes
from .losses.divergences import Divergence, DivergenceReader, Group, Mask, Side, kl_arguments
from .losses.head import Chain, HeadReader, fold, replay_rows
from .losses.softmax import Soft
from .losses.tails import Tail, TailReader, reads_a_size, unread

_NAMES = ("kl_div", "sum", "mean", "cross_entropy")
_SOFTMAXES = ("log_softmax", "softmax", "kl_div", *GATHERS)


class FuseDivergence(GraphPass):
    name = "fuse_divergence"

    def find(self, info: GraphInfo) -> Iterable[Divergence | Classes | Decline]:
        """Yield every divergence of an output projection's softmax, and every gather that reads
        several classes per row from the softmax, the log-softmax or the logits.

        Also yield a Decline (the reason for no rewrite) for each `kl_div` that the pass cannot
        read.
        """
        nodes = list(info.gm.graph.nodes)
        if not any(node_name(node) in _SOFTMAXES for node in nodes):
            return
        reader = DivergenceReader(info, HeadReader(info))
        known, by_head = set[Node](), dict[Node, list[Divergence]]()
        for node in info.visit(nodes):
            if node_name(node) not in _NAMES or node in known:
                continue
            for answer in reader.divergences(node):
                known.add(node)
                if isinstance(answer, Divergence):
                    known.update(answer.covered)
                    by_head.setdefault(_head(answer.student).node, []).append(answer)
                else:
                    known.update(reader.visited)
                    yield answer
        for head in info.visit(by_head):
            group = Group(by_head[head])
            for match in group.members:
                match.group = group
            yield from group.members
        for node in info.visit(nodes):
            if node_name(node) == "kl_div" and node not in known:
                yield from _unread(info, reader, node)
        for node in info.visit(nodes):
            if node_name(node) in GATHERS and node not in known:
                read = (info, reader.reader, reader.softmax, node, reader.side)
                found = read_classes(*read)
                if found is not None:
                    yield found

    def check(self, info: GraphInfo, match: Divergence | Classes) -> Decline | None:
        if isinstance(match, Classes):
            return _refusal(info, match, match.covered)
        group = match.group
        if not group.is_checked:
            covered = [node for each in group.members for node in each.covered]
            refusals = (
                self._skipped_match(info, each) or _refusal(info, each, covered)
                for each in group.members
            )
            group.refusal, group.is_checked = next(filter(None, refusals), None), True
        return group.refusal and replace(group.refusal, node=match.node)

    def _skipped_match(self, info: GraphInfo, match: Divergence) -> Decline | None:
        """Return a Decline (the reason for no rewrite) if `memeff.skip` names a module that
        contains the divergence."""
        path = next(filter(None, (self.skipped(info, node) for node in self.places(match))), "")
        said = f"memeff.skip names {path}, which has another divergence of these logits"
        return Decline("skipped", said, "skip both, or neither", match.node) if path else None

    def gain(self, info: GraphInfo, match: Divergence | Classes) -> Gain | None:
        """Return the bytes of logits before and after the rewrite.

        Before the rewrite, these are the student's and the teacher's logits. After the rewrite,
        these are the blocks of logits that the fused op computes one at a time.
        """
        if isinstance(match, Divergence) and match.group.members[0] is not match:
            return None  # the first divergence of these logits has counted them
        hidden, weight, *_ = _values(info, match.student)
        rows = math.prod(compat.size_hint(size) for size in hidden.shape[:-1])
        vocab = compat.size_hint(weight.shape[0])
        n, v, b = sympy.symbols("N V B", integer=True, positive=True)
        teacher = None if isinstance(match, Classes) else match.teacher.chain
        before = op_folder.bytes_before(
            *(n, v),
            dtype=hidden.dtype,
            teacher_bytes=0 if teacher is None else teacher.head.compute_dtype.itemsize,
            training=match.student.trains,
            compiled=info.options.inner == "inductor",
        )
        held = op_folder.temporary_bytes(
            *(rows, vocab),
            dtype=hidden.dtype,
            engine=_engine(info, match),
            workspace=info.options.linear_cross_entropy_workspace,
            training=match.student.trains,
            depth=_lending_depth(info, match),
        )
        return Gain(before, op_folder.bytes_after(n, b), {"N": rows, "V": vocab, "B": int(held)})

    def anchor(self, match: Divergence | Classes) -> Node:
        return match.node

    def places(self, match: Divergence | Classes) -> Sequence[Node]:
        heads = (side.chain.head.node for side in match.sides if side.chain is not None)
        return [*heads, match.node]

    def rewrite(self, info: GraphInfo, match: Divergence | Classes, editor: Editor) -> Done:
        """Insert the fused op before the match, and compute the original result from the op's
        result."""
        for side in match.sides:
            for step in () if side.chain is None else side.chain.steps:
                compat.hold_constant(step.symbol)
        engine = _engine(info, match)
        speed = speed_note(info.value(_head(match.student).hidden).device)
        with editor.at(match.node):
            emit: Any = _emit_classes if isinstance(match, Classes) else _emit
            editor.replace(match.node, emit(info, match, editor))
        if isinstance(match, Classes):
            sentence = "several classes of each row of a head -> memeff::linear_divergence_classes"
            sentence += f"; engine {engine}: {op_folder.ENGINES[engine]}"
            if match.student.trains:
                sentence += "; the backward computes the logits again, four products instead of "
                sentence += "three, so it takes longer than without the pass, in less memory"
            return Done(match.node, f"{sentence}; {speed}" if speed else sentence)
        teacher = "the teacher's logits" if match.teacher.chain is None else "a teacher's head"
        how = "the backward computes the logits again"
        if _is_total(info, match):
            how = "the gradients are made in the forward, in four products, and held to the "
            how += "backward"
            rows = info.value(_head(match.student).hidden).shape[:-1]
            known = [compat.known_size(size) for size in rows]
            if engine == "kept_logits" and None not in known:
                how += op_folder.cost_of_few_rows(math.prod(size or 0 for size in known))
        sentence = f"the divergence of a head and {teacher} ({match.name}) -> "
        sentence += f"memeff::linear_divergence; engine {engine}: {op_folder.ENGINES[engine]}"
        sentence += f"; {speed}" if speed else ""
        count = len(match.group.members)
        if count > 1:
            how += (
                f"; these logits have {count} divergences, and each computes products of its own, "
            )
            how += "so together they take longer; add their rows up before the mean"
        return Done(match.node, f"{sentence}; {how}" if match.student.trains else sentence)

    def dead(self, match: Divergence | Classes) -> Sequence[Node]:
        heads = [side.chain.head for side in match.sides if side.chain is not None]
        return [*match.covered, *(cast for head in heads for cast in head.casts)]


def _refusal(
    info: GraphInfo, match: Divergence | Classes, covered: Sequence[Node]
) -> Decline | None:
    """Return the reason why a match is not rewritten, or None. The nodes in `covered` are rewritten
    together with the match, so these nodes are allowed to read the logits.
    """
    return (
        _check_sides(info, match)
        or _check_readers(info, match, set(covered))
        or _check_writes(info, match)
        or _check_op(info, match)
    )


def _lending_depth(info: GraphInfo, match: Divergence | Classes) -> int:
    """Return the hidden size of the student's weight if the fused op computes this weight's
    gradient in its forward pass, otherwise 0."""
    weight = info.value(_head(match.student).weight)
    is_total = isinstance(match, Divergence) and _is_total(info, match)
    size = compat.known_size(info.value(_head(match.student).hidden).shape[-1])
    return size or 0 if is_total and weight.requires_grad else 0


def _head(side: Side) -> Any:
    assert side.chain is not None
    return side.chain.head


def _unread(info: GraphInfo, reader: DivergenceReader, node: Node) -> Iterable[Decline]:
    """Yield a Decline (the reason for no rewrite) if a `kl_div` that the pass does not recognise
    reads an output projection's log-probabilities."""
    given = kl_arguments(node) or {"input": node.args[0] if node.args else None}
    sides = [reader.softmax.log_probs(given.get(name)) for name in ("input", "target")]
    if any(isinstance(side, Soft) for side in sides):
        said = "`kl_div` compares a head's probabilities with numbers that this pass does not read"
        hint = "compare it with the softmax or log_softmax of a teacher's logits over all classes, "
        hint += "and sum the result over the classes in the same graph"
        yield Decline("divergence", said, hint, node)


def _modifiers(side: Side) -> Modifiers | Decline:
    assert side.chain is not None
    return fold(side.chain)


def _check_sides(info: GraphInfo, match: Divergence | Classes) -> Decline | None:
    for side, name in zip(match.sides, ("student", "teacher"), strict=False):
        operands: list[Node | None] = [side.logits]
        if side.chain is not None:
            head, folded = side.chain.head, fold(side.chain)
            if isinstance(folded, Decline):
                return folded
            said = ""
            if head.parts:
                said = "has a low-rank part, as of a LoRA adapter"
            elif folded.softcap > 0:
                said = "caps its logits"
            elif folded.biases:
                said = "adds a vector to its logits after the projection"
            elif folded.factors:
                said = "scales its logits by a tensor"
            if said:
                hint = "merge an adapter into the weight, add a vector as the projection's bias, "
                hint += "and divide by a Python number"
                said = f"the {name} of this divergence {said}, which the op does not compute"
                return Decline("side_unsupported", said, hint, match.node)
            operands = [head.hidden, head.weight, head.bias]
        kind = kind_among(tuple(operands))
        if kind:
            said = f"an operand of the {name} comes as a {kind}, which this op does not take"
            hint = "gather or dequantise the head, or leave the loss to the model's own code"
            return Decline(f"subclass_weight({kind})", said, hint, match.node)
    rows = [info.value(side.node).shape for side in match.sides]
    if not same_shape(rows[0], rows[-1]):
        said = "student and teacher may have other rows or classes"
        return Decline("rows_differ", said, "slice the hidden states of both alike", match.node)
    return None


def _check_readers(
    info: GraphInfo, match: Divergence | Classes, covered: set[Node]
) -> Decline | None:
    """Return a Decline (the reason for no rewrite) if a node outside of `covered` reads a tensor
    that the rewrite removes.

    `covered` contains the nodes that the rewrite replaces. The rewrite removes, for example, the
    logits. As an exception, a loss with class indices as targets or the graph's output may read the
    logits. This rewrite then leaves the logits in the graph.
    """
    reader = HeadReader(info)
    tails = TailReader(info, reader)
    for node in (*match.covered, *(each for side in match.sides for each in side.nodes)):
        for user in node.users:
            rest = [] if user in covered else unread(user)
            covered.update(rest)
            match.covered.extend(rest)
    for side in match.sides:
        queue = [] if side.chain is None else [side.chain.head.node]
        seen = set(queue)
        while queue:
            node = queue.pop()
            for user in node.users:
                if user in covered or user in seen:
                    if user in covered and user not in seen and user in side.nodes:
                        seen.add(user)
                        queue.append(user)
                    continue
                seen.add(user)
                if user is info.output or reads_a_size(user):
                    continue
                if isinstance(reader.chain(user), Chain):
                    queue.append(user)
                elif not _is_of_a_loss(tails, user):
                    said = f"the logits are also used by `{node_name(user)}`"
                    hint = "return the logits and compute that outside the compiled function"
                    return Decline(f"logits_reused({node_name(user)})", said, hint, match.node)
    for node in match.covered:
        outside = [user for user in node.users if user not in covered]
        if outside and node is not match.node and not _is_of_side(match, node):
            said = f"`{node_name(node)}`, a number of every class, is also used by "
            said += f"`{node_name(outside[0])}`"
            hint = "sum the divergence over the classes once, and use these sums"
            return Decline(f"logits_reused({node_name(outside[0])})", said, hint, match.node)
    return None


def _is_of_side(match: Divergence | Classes, node: Node) -> bool:
    """Return whether a node belongs to the computation of the student's or the teacher's softmax,
    or is a mask.
    """
    before = (node for side in match.sides for node in side.nodes)
    return node in (*before, *_row_tensors(match))


def _row_tensors(match: Divergence | Classes) -> list[Node]:
    """Return those operands of the fused op that have entries for each row (token).

    For a divergence, which has one number per row, return the masks that multiply this number or
    set it to zero. For a gather of some classes per row (`Classes`), return the tensor of class
    indices."""
    return [match.index] if isinstance(match, Classes) else [mask.node for mask in match.masks]


def _is_of_a_loss(tails: TailReader, user: Node) -> bool:
    """Return whether a node that reads logits is a loss that takes class indices as targets, or the
    softmax in such a loss.
    """
    if any(isinstance(answer, Tail) for answer in tails.tails(user)):
        return True
    is_log = isinstance(tails.softmax.log_probs(user), Soft)
    after = [any(isinstance(a, Tail) for a in tails.tails(each)) for each in user.users]
    return is_log and bool(after) and all(after)


def _check_writes(info: GraphInfo, match: Divergence | Classes) -> Decline | None:
    read = [each for side in match.sides for each in _operands(side)]
    read += [*match.covered, *_row_tensors(match)]
    read = [node for node in read if node is not match.node]
    first = min(match.covered, key=info.positions.__getitem__)
    writer = info.written_between(read, first, match.node)
    what = "the logits, the hidden states or a weight between a head and the divergence"
    return None if writer is None else mutated(writer, what, match.node)


def _operands(side: Side) -> list[Node]:
    if side.chain is None:
        return [] if side.logits is None else [side.logits]
    head = side.chain.head
    return [n for n in (head.hidden, head.weight, head.bias, *side.chain.operands) if n is not None]


def _values(info: GraphInfo, side: Side) -> tuple[Any, Any, Any]:
    """Return example values of the fused op's operands for the student or the teacher: hidden
    states, weight, bias.

    If the logits already exist as a tensor, return the logits, None and None."""
    if side.chain is None:
        return info.value(side.logits), None, None
    head, dtype = side.chain.head, side.chain.head.compute_dtype
    folded = fold(side.chain)
    hidden, weight = info.value(head.hidden), info.value(head.weight)
    rows = info.value(side.node).shape[:-1]
    weight = weight.t() if head.transposed else weight
    bias = None if head.bias is None else info.value(head.bias)
    if isinstance(folded, Modifiers) and folded.classes is not None:
        first, stop = folded.classes
        weight, bias = weight[first:stop], None if bias is None else bias[first:stop]
    return (
        hidden.new_empty((*rows, hidden.shape[-1]), dtype=dtype),
        weight.to(dtype),
        None if bias is None else bias.to(dtype),
    )


def _check_op(info: GraphInfo, match: Divergence | Classes) -> Decline | None:
    given = tuple(each for side in match.sides for each in _values(info, side))
    vocab = compat.known_size(given[1].shape[0])
    if vocab is None or compat.known_size(given[0].shape[-1]) is None:
        said = "the hidden or vocabulary size is dynamic"
        hint = "mark only batch and length dynamic"
        return Decline("dynamic_vocabulary", said, hint, match.node)
    if isinstance(match, Classes):
        hidden, weight, bias = given
        index = info.value(match.index)
        how: dict[str, Any] = {"scale": _scale(match.student)}
        sentence = op_folder.supports_classes(hidden, weight, bias, index, **how)
    else:
        sentence = op_folder.supports(*given, coefficients=match.coefficients, **_scales(match))
    return None if sentence is None else Decline("unsupported", sentence, node=match.node)


def _scales(match: Divergence) -> dict[str, Any]:
    return {"scale": _scale(match.student), "teacher_scale": _scale(match.teacher)}


def _scale(side: Side) -> float:
    folded = None if side.chain is None else fold(side.chain)
    return float(folded.scale) if isinstance(folded, Modifiers) else side.scale


def _engine(info: GraphInfo, match: Divergence | Classes) -> str:
    rows = [_values(info, side)[0] for side in match.sides]
    return op_folder.engine_for(rows[0].device, rows[0].dtype, rows[-1].dtype)


def _is_total(info: GraphInfo, match: Divergence) -> bool:
    """Return whether the fused op returns a single number and its gradients.

    Return False in an activation checkpoint, where the forward pass runs twice.
    """
    dtype = _head(match.student).compute_dtype
    makes = op_folder.makes_gradients_in_forward(dtype)
    trains = info.value(match.node).requires_grad
    return match.is_total and info.parent is None and trains and makes


def _emit(info: GraphInfo, match: Divergence, e: Editor) -> Node:
    student, teacher = (_emit_side(info, side, e) for side in (match.student, match.teacher))
    teacher = [n and _detached(info, e, n) for n in teacher]
    operands = [*student, *teacher]
    # Multiplied before the sum, so that the op's gradients need not be multiplied again.
    factor, over_rows, over_first = match.factor, match.over_rows, match.over_first
    rows = [compat.known_size(size) for size in info.value(student[0]).shape[:-1]]
    if over_rows and None not in rows and 0 not in rows:
        factor, over_rows = factor / math.prod(size or 1 for size in rows), False
    if over_first is not None and compat.known_size(over_first):
        factor, over_first = factor / over_first, None
    settings: dict[str, Any] = {
        "coefficients": list(match.coefficients.times(factor)),
        **_scales(match),
        "workspace": info.options.linear_cross_entropy_workspace,
    }
    before = info.value(match.node)
    weight = _row_weight(info, match.masks, student[0], e)
    if _is_total(info, match):
        mask = [n is not None and info.value(n).requires_grad for n in student]
        op = op_folder.linear_divergence_total
        found = e.item(e.call(op, *operands, weight, **settings, output_mask=mask), 0)
    else:
        found = e.call(op_folder.linear_divergence, *operands, **settings)
        if weight is not None:
            found = e.call(aten.mul.Tensor, found, weight)
        if match.is_total:
            found = e.call(aten.sum.default, found)
        elif not same_shape(info.value(found).shape, before.shape):
            found = e.call(aten.reshape.default, found, list(before.shape))
    if over_rows:
        one = e.call(aten.select.int, student[0], -1, 0)
        count = e.call(aten.sum.default, e.call(aten.ones_like.default, one, dtype=before.dtype))
        found = e.call(aten.div.Tensor, found, _detached(info, e, count))
    if over_first is not None:
        found = e.call(aten.div.Scalar, found, e.size(over_first))
    return e.cast(found, before.dtype)


def _emit_classes(info: GraphInfo, match: Classes, e: Editor) -> Node:
    index, before = match.index, info.value(match.node)
    if match.counts_from_end:
        vocab = compat.known_size(info.value(match.student.node).shape[-1])
        index = e.call(aten.remainder.Scalar, index, vocab)
    found = e.call(
        op_folder.linear_divergence_classes,
        *_emit_side(info, match.student, e),
        index,
        is_normalised=match.kind != "z",
        scale=_scale(match.student),
        workspace=info.options.linear_cross_entropy_workspace,
    )
    found = e.call(aten.exp.default, found) if match.kind == "p" else found
    return e.cast(found, before.dtype)


def _detached(info: GraphInfo, e: Editor, node: Node) -> Node:
    return e.call(aten.detach.default, node) if info.value(node).requires_grad else node


def _emit_side(info: GraphInfo, side: Side, e: Editor) -> list[Node | None]:
    """Return the fused op's operands for the student or the teacher: hidden states, weight, bias.

    Insert the nodes that compute the operands. If the logits already exist as a tensor, return the
    logits, None and None."""
    if side.chain is None:
        assert side.logits is not None
        return [side.logits, None, None]
    head, folded = side.chain.head, fold(side.chain)
    assert isinstance(folded, Modifiers)
    size = compat.known_size(info.value(head.hidden).shape[-1])
    hidden = replay_rows(e, head.hidden, side.chain.row_steps, size)
    weight, bias = head.weight, head.bias
    if head.transposed:
        weight = e.call(aten.t.default, weight)
    if folded.classes is not None:
        weight = e.call(aten.slice.Tensor, weight, 0, *folded.classes)
        bias = bias and e.call(aten.slice.Tensor, bias, 0, *folded.classes)
    dtype = head.compute_dtype
    return [e.cast(hidden, dtype), e.cast(weight, dtype), bias and e.cast(bias, dtype)]


def _row_weight(
    info: GraphInfo, masks: Sequence[Mask], hidden: Node | None, e: Editor
) -> Node | None:
    """Return one factor per row (token): the product of all masks of a divergence.

    Without masks, return None. The factor is zero in rows that a mask sets to zero. The factors are
    fp32 numbers (fp64 for fp64 hidden states).
    """
    assert hidden is not None
    total = None
    for mask in masks:
        rows = info.value(hidden).shape[:-1]
        node = mask.node
        if mask.fills:
            node = e.call(aten.logical_not.default, node)
        if not same_shape(info.value(node).shape, rows):
            like = e.call(aten.select.int, hidden, -1, 0)
            node = e.call(aten.reshape_as.default, node, _detached(info, e, like))
        node = e.cast(node, wide(info.value(hidden).dtype))
        total = node if total is None else e.call(aten.mul.Tensor, total, node)
    return total
