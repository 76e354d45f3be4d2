"""linear + cross entropy -> memeff::linear_cross_entropy: the N x V logits never exist.

    before: logits = linear(h, W)                       after: nll, lse, _ = memeff.linear_cross_entropy(h, W, y)
            f = logits.float().view(-1, V)                     loss = nll.sum() / (y != -100).sum()
            loss = cross_entropy(f, y)
            return loss, logits                                return loss, h        (logits deferred)

Paper: Cut Your Losses in Large-Vocabulary Language Models (Cut Cross-Entropy), arXiv 2411.09009.

A *site* is one head and every loss-like consumer of its logits: cross_entropy, log_softmax + nll_loss
or gather, logsumexp (z-loss). Consumers that use the same rows and targets share one op call. The
reductions stay ATen nodes, so an empty or all-ignored batch gives nan as in eager.

Declined, never guessed: class-probability targets, other uses of the logits inside the graph, logits
or operands written in place in between, mixed grad regions, subclass or integer weights, scales that
are tensors, heads in another graph. The docs page lists every code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Node

from .. import compat
from ..kernels import linear_cross_entropy as op_folder
from . import defer_logits
from .base import Decline, Done, Gain
from .canonical import aten, read_one
from .defer_logits import LogitsOutput
from .editor import Editor
from .graph_info import GraphInfo, written_by
from .linear_head import Chain, Head, HeadReader, Modifiers, fold, replay_rows

SMALLEST_VOCABULARY = 32


@dataclass(frozen=True)
class Tail:
    """One consumer of logits that the op can serve.

    kind is ``loss`` (cross_entropy or nll_loss), ``log_prob`` (gather on log_softmax), ``lse``
    (logsumexp) or ``logit`` (gather on the logits themselves).
    """

    node: Node
    kind: str
    chain: Chain
    target: Node | None = None
    class_weight: Node | None = None
    reduction: int = 0
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    through: Node | None = None  # the log_softmax between
    symbols: tuple[Node, ...] = ()  # settings that dynamic=True made symbols of

    @property
    def operands(self) -> tuple[Node, ...]:
        """The tensors the loss reads beside the logits."""
        return tuple(n for n in (self.target, self.class_weight) if n is not None)


@dataclass
class Site:
    """A head, its tails, and the outputs that return its logits."""

    head: Head
    tails: list[Tail]
    outputs: list[LogitsOutput] = field(default_factory=list)
    covered: list[Node] = field(default_factory=list)


class FuseLinearCrossEntropy:
    """The pass."""

    name = "fuse_linear_cross_entropy"
    version = 1
    tier = "exact"

    def enabled(self, info: GraphInfo) -> bool:
        """Return whether memeff.linear_cross_entropy is on."""
        return info.options.linear_cross_entropy != "off"

    # --- find -------------------------------------------------------------------------------------

    def find(self, info: GraphInfo) -> Iterable[Site | Decline]:
        """Yield one site per head with a loss-like consumer; a Decline per loss that has none."""
        reader = HeadReader(info)
        by_head: dict[Node, list[Tail]] = defaultdict(list)
        losses = False
        for node in info.gm.graph.nodes:
            for answer in _tails_of(info, reader, node):
                losses = True
                if isinstance(answer, Decline):
                    yield answer
                else:
                    by_head[answer.chain.head.node].append(answer)
        for head_node, tails in by_head.items():
            if not any(t.kind in ("loss", "log_prob") for t in tails) and not _pairs(tails):
                continue
            yield self._site(info, reader, head_node, tails)
        if not losses:
            yield from _loss_outside(info)

    def _site(
        self, info: GraphInfo, reader: HeadReader, head_node: Node, tails: list[Tail]
    ) -> Site | Decline:
        site = Site(tails[0].chain.head, tails)
        served = {t.node for t in tails}
        throughs = {t.through for t in tails if t.through is not None}
        queue, seen = [head_node], {head_node}
        output = info.output
        while queue:
            node = queue.pop()
            site.covered.append(node)
            chain = reader.chain(node) if node not in throughs else None
            for user in node.users:
                if user in served or user in seen:
                    continue
                if user is output and isinstance(chain, Chain):
                    detached = any(s.kind == "detach" for s in chain.steps)
                    site.outputs.append(LogitsOutput(node, chain, detached))
                    continue
                if user in throughs:
                    seen.add(user)
                    queue.append(user)
                    continue
                onward = reader.chain(user) if node not in throughs and user is not output else None
                if isinstance(onward, Chain) and onward.head.node is head_node:
                    seen.add(user)
                    queue.append(user)
                    continue
                if node in written_by(user):
                    return _mutated(user, tails[0].node)
                what = "log-probabilities" if node in throughs else "logits"
                return Decline(
                    f"logits_reused({_name(user)})",
                    f"the {what} are also used by `{_name(user)}`"
                    + (" as an output" if user is output else ""),
                    "compute that from the loss, or outside the compiled function",
                    tails[0].node,
                )
        site.covered.extend(served)
        return site

    # --- check ------------------------------------------------------------------------------------

    def check(self, info: GraphInfo, match: Site) -> Decline | None:
        """Return why the site must be left alone, or None."""
        for judge in (_check_operands, _check_tails, _check_regions, _check_writes):
            refusal = judge(info, match)
            if refusal is not None:
                return refusal
        return defer_logits.check(info, match.outputs)

    def gain(self, info: GraphInfo, match: Site) -> Gain:
        """Return the formula for the logits' bytes, before and after."""
        head = match.head
        hidden, weight = info.tensor(head.hidden), info.tensor(head.weight)
        assert hidden is not None and weight is not None
        n, d, v = sympy.symbols("N D V", integer=True, positive=True)
        training = info.region.grad and (hidden.requires_grad or weight.requires_grad)
        upcast = any(s.kind == "to" for t in match.tails for s in t.chain.steps)
        before = op_folder.bytes_before(
            n,
            d,
            v,
            dtype=head.compute_dtype,
            upcast=upcast,
            returns_logits=bool(match.outputs),
            training=training,
            compiled=info.options.inner == "inductor",
        )
        sizes = {
            "N": math.prod(_hint(size) for size in hidden.shape[:-1]),
            "D": _hint(hidden.shape[-1]),
            "V": _hint(weight.shape[1 if head.transposed else 0]),
        }
        call: dict[str, Any] = {
            "dtype": head.compute_dtype,
            "engine": op_folder.engine_for(hidden.device, head.compute_dtype),
            "device_type": hidden.device.type,
            "workspace": info.options.linear_cross_entropy_workspace,
            "has_softcap": any(s.kind == "tanh" for s in match.tails[0].chain.steps),
            "training": training,
        }
        held = op_folder.piece_sizes(max(sizes["N"], 1), sizes["V"], **call)
        sizes |= {"B": int(held.bytes), "W": int(held.columns)}
        pieces = op_folder.Pieces(*sympy.symbols("B W", integer=True, positive=True))
        after = op_folder.bytes_after(n, d, v, **call, pieces=pieces)
        return Gain(before, after, sizes)

    def anchor(self, match: Site) -> Node:
        """Return the loss node."""
        return match.tails[0].node

    def places(self, match: Site) -> Iterable[Node]:
        """Return the head and the losses."""
        return [match.head.node, *(t.node for t in match.tails)]

    # --- rewrite ----------------------------------------------------------------------------------

    def rewrite(self, info: GraphInfo, match: Site, editor: Editor) -> Done:
        """Emit one op call per set of tails with the same rows and targets; then the outputs."""
        spellings = []
        chains = [*(t.chain for t in match.tails), *(o.chain for o in match.outputs)]
        for symbol in (s.symbol for chain in chains for s in chain.steps):
            compat.hold_constant(symbol)
        for symbol in (s for t in match.tails for s in t.symbols):
            compat.hold_constant(symbol)
        for group in _groups(info, match.tails):
            match.covered.extend(_emit_group(info, editor, group))
            spellings.extend(_name(t.node) for t in group)
        deferred, notes = defer_logits.rewrite(info, match.outputs, editor)
        engine = _engine(info.tensor(match.head.hidden), match.head.compute_dtype)
        sentence = (
            f"{_name(match.head.node)} + {' + '.join(dict.fromkeys(spellings))} -> "
            f"memeff::linear_cross_entropy; {engine}"
        )
        return Done(match.tails[0].node, sentence, notes, deferred)

    def dead(self, match: Site) -> Sequence[Node]:
        """Return the nodes the rewrite leaves without users."""
        return match.covered


# --- finding tails ------------------------------------------------------------------------------------

_TAIL_NAMES = frozenset(
    "cross_entropy cross_entropy_loss nll_loss nll_loss_nd gather take_along_dim logsumexp "
    "linear_cross_entropy".split()
)


def _tails_of(info: GraphInfo, reader: HeadReader, node: Node) -> Iterable[Tail | Decline]:
    if node.op not in ("call_function", "call_method") or _name(node) not in _TAIL_NAMES:
        return
    call = read_one(node)
    if call is None:
        if "cross_entropy" in _name(node) or "nll_loss" in _name(node):
            yield Decline(
                "unreadable_loss",
                f"`{_name(node)}` is called with arguments this pass does not read",
                node=node,
            )
        return
    a = call.args
    if call.op is aten.cross_entropy_loss.default:
        yield from _loss_tail(info, reader, node, a["self"], a, a["label_smoothing"], None)
    elif call.op is aten.nll_loss_nd.default:
        soft = _log_softmax_operand(info, a["self"], class_dim=1)
        if soft is None:
            if not _is_plain_loss_input(info, a["self"]):
                yield Decline(
                    "not_log_softmax",
                    "nll_loss does not read a log_softmax over its classes",
                    node=node,
                )
            return
        yield from _loss_tail(info, reader, node, soft, a, 0.0, a["self"])
    elif call.op in (aten.gather.default, aten.take_along_dim.default):
        yield from _gather_tail(info, reader, node, call.args)
    elif call.op is aten.logsumexp.default:
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        value = info.tensor(a["self"])
        if value is None or len(dims) != 1 or dims[0] % value.dim() != value.dim() - 1:
            return
        chain = reader.chain(a["self"])
        if isinstance(chain, Chain) and not _detached(chain):
            yield Tail(node, "lse", chain)


def _loss_tail(
    info: GraphInfo,
    reader: HeadReader,
    node: Node,
    logits: Node,
    a: Any,
    label_smoothing: Any,
    through: Node | None,
) -> Iterable[Tail | Decline]:
    target = info.tensor(a["target"])
    if target is None or target.dtype.is_floating_point:
        yield Decline(
            "prob_targets",
            "the targets are class probabilities, not class indices",
            "pass integer class indices to use the fused loss",
            node,
        )
        return
    chain = reader.chain(logits)
    if isinstance(chain, Decline):
        yield Decline(chain.code, chain.sentence, chain.hint, node)
        return
    settings = (a["reduction"], a["ignore_index"], label_smoothing)
    reduction, ignore_index, smoothing = map(compat.known_number, settings)
    if reduction is None or ignore_index is None or smoothing is None:
        yield Decline(
            "setting_not_constant",
            f"`{_name(node)}` gets an ignore_index or label_smoothing that varies from call to call",
            "give it a fixed number",
            node,
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
        symbols=tuple(s for s in settings if isinstance(s, Node)),
    )


def _gather_tail(
    info: GraphInfo, reader: HeadReader, node: Node, a: Any
) -> Iterable[Tail | Decline]:
    source, index = a["self"], a.get("index", a.get("indices"))
    value, index_value = info.tensor(source), info.tensor(index)
    if value is None or index_value is None or a["dim"] is None or value.dim() == 0:
        return
    if a["dim"] % value.dim() != value.dim() - 1 or index_value.dim() != value.dim():
        return
    if a.get("sparse_grad") or not _statically_one(index_value.shape[-1]):
        return
    same_rows = all(
        compat.statically_true(i == s)
        for i, s in zip(index_value.shape[:-1], value.shape[:-1], strict=True)
    )
    soft = _log_softmax_operand(info, source, class_dim=-1)
    chain = reader.chain(soft if soft is not None else source)
    if isinstance(chain, Decline):
        if soft is not None:
            yield Decline(chain.code, chain.sentence, chain.hint, node)
        return
    if not same_rows:
        if soft is not None:
            yield Decline(
                "rows_differ",
                "the gathered index may have fewer rows than the log-probabilities",
                "slice the hidden states to the rows that are gathered; sizes that are always equal "
                "but marked dynamic one by one are best marked by dynamic=True",
                node,
            )
        return
    kind = "logit" if soft is None else "log_prob"
    yield Tail(node, kind, chain, target=index, through=source if soft is not None else None)


def _log_softmax_operand(info: GraphInfo, node: Any, class_dim: int) -> Node | None:
    """Return x when ``node`` is log_softmax(x) over ``class_dim`` (the only one of a vector)."""
    if not isinstance(node, Node):
        return None
    call = read_one(node)
    if call is None or call.op is not aten.log_softmax.int:
        return None
    value = info.tensor(call.args["self"])
    if value is None:
        return None
    rank = max(value.dim(), 1)
    dtype = call.args["dtype"]
    if dtype is not None and dtype.itemsize < value.dtype.itemsize:
        return None
    source: Node = call.args["self"]
    return source if call.args["dim"] % rank == min(class_dim % rank, rank - 1) else None


def _is_plain_loss_input(info: GraphInfo, node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _loss_outside(info: GraphInfo) -> Iterable[Decline]:
    """Say so when a training graph returns head-shaped logits and no loss reads them."""
    if not info.needs_grad or info.parent is not None:
        return
    reader = HeadReader(info, tracing=False)
    for node in info.output.all_input_nodes:
        chain = reader.chain(node)
        if isinstance(chain, Decline):
            continue
        head = chain.head
        weight, hidden = info.tensor(head.weight), info.tensor(head.hidden)
        if weight is None or hidden is None or head.weight.op != "placeholder":
            continue
        vocabulary = weight.shape[1 if head.transposed else 0]
        if _hint(vocabulary) > 4 * _hint(hidden.shape[-1]):
            yield Decline(
                "graph_break_between",
                f"this graph returns logits over {_hint(vocabulary)} classes and no loss: the loss is "
                "computed in another graph or outside the compiled function",
                "compute the loss inside the compiled function (pass labels=), and compile with "
                "fullgraph=True to see what splits it",
                head.node,
            )
            return


def _pairs(tails: Sequence[Tail]) -> bool:
    """Return whether a gather on the logits has its logsumexp over the same rows."""
    keys = {t.chain.row_key for t in tails if t.kind == "lse"}
    return any(t.kind == "logit" and t.chain.row_key in keys for t in tails)


# --- checking -----------------------------------------------------------------------------------------


def _check_operands(info: GraphInfo, site: Site) -> Decline | None:
    head = site.head
    where = site.tails[0].node
    hidden, weight = info.tensor(head.hidden), info.tensor(head.weight)
    assert hidden is not None and weight is not None
    operands = [("hidden states", head.hidden), ("head weight", head.weight), ("bias", head.bias)]
    operands += [("targets", tail.target) for tail in site.tails]
    for label, node in operands:
        value = None if node is None else compat.example_value(node)
        if value is not None and not compat.is_fake(value):
            kind = type(value).__name__
            code = "tensor_parallel_head" if kind == "DTensor" else f"subclass_weight({kind})"
            return Decline(
                code,
                f"the {label} come as a {kind}, which this op does not take",
                "gather the head to a plain tensor, or leave the loss to the model's own code",
                where,
            )
    vocabulary = weight.shape[1 if head.transposed else 0]
    vocabulary = compat.known_size(vocabulary)
    if compat.known_size(hidden.shape[-1]) is None or vocabulary is None:
        return Decline(
            "dynamic_vocabulary",
            "the hidden or vocabulary size is dynamic",
            "mark only batch and length dynamic",
            where,
        )
    if vocabulary < SMALLEST_VOCABULARY:
        return Decline(
            "vocab_too_small",
            f"{vocabulary} classes: the logits are too small to matter (the pass starts at "
            f"{SMALLEST_VOCABULARY})",
            node=where,
        )
    return _check_support(info, site, hidden, weight)


def _check_support(
    info: GraphInfo, site: Site, hidden: torch.Tensor, weight: torch.Tensor
) -> Decline | None:
    """Ask the op itself, tail by tail."""
    head = site.head
    rows = hidden.select(-1, 0)
    columns = weight.t() if head.transposed else weight
    bias = None if head.bias is None else info.tensor(head.bias)
    for tail in site.tails:
        target = rows if tail.target is None else info.tensor(tail.target)
        assert target is not None
        sentence = op_folder.supports(
            hidden,
            columns,
            bias,
            rows.new_empty(rows.shape, dtype=target.dtype if tail.target else torch.int64),
            dtype=head.compute_dtype,
            gradient_filter=info.options.linear_cross_entropy,
            workspace=info.options.linear_cross_entropy_workspace,
        )
        if sentence is not None:
            code = "dtype_unsupported" if "dtype" in sentence else "unsupported"
            return Decline(code, sentence, node=tail.node)
    return None


def _check_tails(info: GraphInfo, site: Site) -> Decline | None:
    for tail in site.tails:
        chain = tail.chain
        if _detached(chain):
            return Decline("detached", "the loss reads detached logits", node=tail.node)
        folded = fold(chain.steps)
        if isinstance(folded, Decline):
            return Decline(folded.code, folded.sentence, folded.hint, tail.node)
        logits = info.tensor(tail.through or tail.chain.node)
        assert logits is not None
        if tail.kind != "loss":
            if chain.moved:
                return Decline("unknown_step", "gather after moving the classes", node=tail.node)
            continue
        target = info.tensor(tail.target)
        assert target is not None
        class_dim = 1 if logits.dim() >= 2 else 0
        if class_dim != logits.dim() - 1 and not chain.moved:
            return Decline(
                "class_dim_changed",
                "the loss reads its classes from dimension 1 and the head's are last",
                "transpose(1, 2) the logits, or flatten batch and length",
                tail.node,
            )
        weight = tail.class_weight
        if weight is not None and not compat.is_fake(compat.example_value(weight)):
            return Decline(
                "class_weight", "the class weights are a tensor subclass", node=tail.node
            )
        if weight is not None and compat.example_value(weight).requires_grad:
            return Decline(
                "class_weight", "the class weights need a gradient", "detach them", tail.node
            )
    lone = [t for t in site.tails if t.kind == "logit"]
    keys = {t.chain.row_key for t in site.tails if t.kind == "lse"}
    for tail in lone:
        if tail.chain.row_key not in keys:
            return Decline(
                "logits_reused(gather)",
                "single logits are gathered without their logsumexp over the same rows",
                "gather from log_softmax, or return per-token losses with reduction='none'",
                tail.node,
            )
    return None


def _check_regions(info: GraphInfo, site: Site) -> Decline | None:
    head_region = info.regions[site.head.node]
    for node in site.covered:
        region = info.regions[node]
        if (region.grad, region.inference) != (head_region.grad, head_region.inference):
            return Decline(
                "region_mismatch",
                f"`{_name(node)}` runs with gradients or inference mode switched differently from the head",
                "put the head and its loss under the same no_grad / inference_mode",
                site.tails[0].node,
            )
    return None


def _check_writes(info: GraphInfo, site: Site) -> Decline | None:
    last = max((t.node for t in site.tails), key=lambda n: info.positions[n])
    if site.outputs:
        last = info.output
    operands: list[Node] = [site.head.hidden, site.head.weight, *site.covered]
    for tail in site.tails:
        operands.extend((*tail.operands, *tail.chain.operands))
    for output in site.outputs:
        operands.extend(output.chain.operands)
    if site.head.bias is not None:
        operands.append(site.head.bias)
    results = {t.node for t in site.tails}
    writer = info.written_between([n for n in operands if n not in results], site.head.node, last)
    return None if writer is None else _mutated(writer, site.tails[0].node)


def _mutated(writer: Node, loss: Node) -> Decline:
    return Decline(
        "mutated",
        f"`{_name(writer)}` writes in place to the logits, the hidden states, the weight or the "
        "targets between the head and the loss",
        "use the out-of-place form",
        loss,
    )


# --- rewriting ----------------------------------------------------------------------------------------


def _groups(info: GraphInfo, tails: Sequence[Tail]) -> list[list[Tail]]:
    """Group tails that one op call can serve: same rows, same modifiers, same targets, in time."""
    groups: list[list[Tail]] = []
    for tail in sorted(tails, key=lambda t: t.kind == "lse"):  # targets first, logsumexp joins
        for group in groups:
            if _compatible(info, group, tail) and _late(info, [*group, tail]) is not None:
                group.append(tail)
                break
        else:
            groups.append([tail])
    return groups


def _compatible(info: GraphInfo, group: list[Tail], tail: Tail) -> bool:
    first = group[0]
    if first.chain.row_key != tail.chain.row_key or _modifiers(first) != _modifiers(tail):
        return False
    if tail.kind == "lse":
        return True
    return (
        first.kind != "lse"
        and _target_source(info, first.target) is _target_source(info, tail.target)
        and first.ignore_index == tail.ignore_index
        and first.class_weight is tail.class_weight
    )


def _modifiers(tail: Tail) -> Modifiers:
    folded = fold(tail.chain.steps)
    assert isinstance(folded, Modifiers)
    return folded


def _target_source(info: GraphInfo, node: Node | None) -> Node | None:
    """Follow a target through reshapes and copies to where it comes from, unless that is written to."""
    while node is not None:
        call = read_one(node)
        if call is None or call.op not in _TARGET_MOVES:
            return node
        if call.args.get("dtype", torch.int64) not in (torch.int64, torch.int32):
            return node
        source: Node = call.args["self"]
        if any(info.may_share_memory(t, source) for w in info.writes for t in w.targets):
            return node
        node = source
    return None


_TARGET_MOVES = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
    aten.to.dtype,
    aten.flatten.using_ints,
)


def _late(info: GraphInfo, group: Sequence[Tail]) -> list[Node] | None:
    """Return what must be computed again, earlier, for one op call to serve ``group``; None if unsafe.

    The call stands before the first tail. Targets that are made after it (a shift behind a z-loss) are
    made once more before it: integer views and copies that cost nothing, of inputs nobody writes to.
    """
    first = min((t.node for t in group), key=lambda n: info.positions[n])
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
    if again:
        touched = [*again, *(i for n in again for i in n.all_input_nodes)]
        last = max(again, key=lambda n: info.positions[n])
        if info.written_between(touched, first, last) is not None:
            return None
    return again


def _emit_group(info: GraphInfo, editor: Editor, group: list[Tail]) -> list[Node]:
    """Emit the op and the results of ``group``; return the nodes that were computed again earlier."""
    anchor = min((t.node for t in group), key=lambda n: info.positions[n])
    again = _late(info, group)
    assert again is not None, "only tails that one call can serve are grouped"
    with editor.at(anchor):
        early: dict[Node, Node] = {}
        for node in again:
            early[node] = editor.copy(node, early)
        group = [_reading_early(tail, early) for tail in group]
        emit = _GroupEmitter(info, editor, group)
        emit.op_call()
    for tail in group:
        with editor.at(tail.node):
            editor.replace(tail.node, emit.result(tail))
    return again


def _reading_early(tail: Tail, early: Mapping[Node, Node]) -> Tail:
    target = None if tail.target is None else early.get(tail.target, tail.target)
    weight = None if tail.class_weight is None else early.get(tail.class_weight, tail.class_weight)
    return replace(tail, target=target, class_weight=weight)


class _GroupEmitter:
    """Emits the op and, per tail, the few ATen nodes that turn its rows into what the tail gave."""

    def __init__(self, info: GraphInfo, editor: Editor, group: list[Tail]) -> None:
        self.info, self.editor, self.group = info, editor, group
        self.head = group[0].chain.head
        self.modifiers = _modifiers(group[0])
        self.with_target = next((t for t in group if t.target is not None), None)
        self.ignore_index = self.with_target.ignore_index if self.with_target else None
        self.op = self.target = self.hidden = group[0].node
        self._items: dict[int, Node] = {}

    def op_call(self) -> None:
        """Insert the op over the selected rows."""
        e, head = self.editor, self.head
        hidden_value = self.info.tensor(head.hidden)
        assert hidden_value is not None
        key_steps = self.group[0].chain.row_steps[: self._rows_in_key()]
        size = compat.known_size(hidden_value.shape[-1])
        hidden = replay_rows(e, head.hidden, key_steps, size)
        self.hidden = self._cast(hidden)
        weight = self._cast(head.weight)
        if head.transposed:
            weight = e.call(aten.t.default, weight)
        bias = self._bias()
        self.target = self._target_rows()
        smoothing = any(t.label_smoothing > 0 for t in self.group)
        column_weight = self.with_target.class_weight if smoothing and self.with_target else None
        options = self.info.options
        self.op = e.call(
            op_folder.linear_cross_entropy,
            self.hidden,
            weight,
            bias,
            self.target,
            column_weight,
            ignore_index=self.ignore_index,
            scale=self.modifiers.scale,
            softcap=self.modifiers.softcap,
            with_lse=any(t.kind in ("lse", "logit") for t in self.group),
            with_logit_sum=smoothing,
            gradient_filter=options.linear_cross_entropy,
            workspace=options.linear_cross_entropy_workspace,
        )
        if smoothing:
            self._item(2)
        if any(t.kind != "lse" for t in self.group):
            self._item(0)
        if smoothing or any(t.kind in ("lse", "logit") for t in self.group):
            self._item(1)

    def _item(self, index: int) -> Node:
        """Return one of the op's results, fetched right behind the op."""
        if index not in self._items:
            self._items[index] = self.editor.item(self.op, index)
        return self._items[index]

    @property
    def nll(self) -> Node:
        """Per-row losses."""
        return self._items[0]

    @property
    def lse(self) -> Node:
        """Per-row log-sum-exp."""
        return self._items[1]

    @property
    def logit_sum(self) -> Node:
        """Per-row weighted sums of logits."""
        return self._items[2]

    def _rows_in_key(self) -> int:
        rows = self.group[0].chain.row_steps
        return max((i + 1 for i, s in enumerate(rows) if s.kind == "rows"), default=0)

    def _cast(self, node: Node) -> Node:
        value = self.info.tensor(node)
        if value is not None and value.dtype == self.head.compute_dtype:
            return node
        return self.editor.call(aten.to.dtype, node, self.head.compute_dtype)

    def _bias(self) -> Node | None:
        e = self.editor
        total = None if self.head.bias is None else self._cast(self.head.bias)
        for vector, divisor in self.modifiers.biases:
            flat = e.call(aten.reshape.default, self._cast(vector), [-1])
            if divisor != 1.0:
                flat = e.call(aten.div.Scalar, flat, divisor)
            total = flat if total is None else e.call(aten.add.Tensor, total, flat)
        return total

    def _target_rows(self) -> Node:
        """Give the targets the leading dimensions of the hidden states."""
        e = self.editor
        if self.with_target is None:  # only logsumexp is asked for: any class will do
            rows = e.call(aten.select.int, self.hidden, -1, 0)
            return e.call(aten.zeros_like.default, rows, dtype=torch.int64)
        assert self.with_target.target is not None
        return self._reshape_like_rows(self.with_target.target, self.hidden)

    def _reshape_like_rows(self, node: Node, hidden: Node) -> Node:
        value, like = self.info.tensor(node), self.info.tensor(hidden)
        assert value is not None and like is not None
        rows = like.shape[:-1]
        if len(rows) == value.dim() and all(
            compat.statically_true(a == b) for a, b in zip(rows, value.shape, strict=True)
        ):
            return node
        e = self.editor
        if all(isinstance(s, int) for s in rows):
            return e.call(aten.reshape.default, node, list(rows))
        return e.call(aten.reshape_as.default, node, e.call(aten.select.int, hidden, -1, 0))

    def _shaped(self, node: Node, like: Node) -> Node:
        """Give ``node`` the shape of ``like``'s value."""
        value, wanted = self.info.tensor(node), self.info.tensor(like)
        assert value is not None and wanted is not None
        if value.dim() == wanted.dim() and all(
            compat.statically_true(a == b) for a, b in zip(value.shape, wanted.shape, strict=True)
        ):
            return node
        if all(isinstance(s, int) for s in wanted.shape):
            return self.editor.call(aten.reshape.default, node, list(wanted.shape))
        return self.editor.call(aten.reshape_as.default, node, like)

    def _typed(self, node: Node, like: Node) -> Node:
        value, wanted = self.info.tensor(node), self.info.tensor(like)
        assert value is not None and wanted is not None
        if value.dtype == wanted.dtype:
            return node
        return self.editor.call(aten.to.dtype, node, wanted.dtype)

    def result(self, tail: Tail) -> Node:
        """Insert what ``tail`` computed, from the op's rows."""
        e = self.editor
        if tail.kind == "loss":
            return self._typed(self._loss(tail), tail.node)
        if tail.kind == "lse":
            return self._typed(self._like_logsumexp(tail), tail.node)
        assert tail.target is not None
        if tail.kind == "log_prob":
            rows = e.call(aten.neg.default, self.nll)
        else:
            rows = e.call(aten.sub.Tensor, self.lse, self.nll)
        return self._typed(self._shaped(rows, tail.target), tail.node)

    def _like_logsumexp(self, tail: Tail) -> Node:
        e = self.editor
        wanted = self.info.tensor(tail.node)
        assert wanted is not None
        if all(isinstance(s, int) for s in wanted.shape):
            return self._shaped(self.lse, tail.node)
        hidden_value = self.info.tensor(self.head.hidden)
        assert hidden_value is not None
        rest = tail.chain.row_steps[self._rows_in_key() :]
        replayed = replay_rows(e, self.hidden, rest, compat.known_size(hidden_value.shape[-1]))
        like = e.call(aten.select.int, replayed, -1, 0)
        call = read_one(tail.node)
        if call is not None and call.args["keepdim"]:
            like = e.call(aten.unsqueeze.default, like, -1)
        return e.call(aten.reshape_as.default, self.lse, like)

    def _loss(self, tail: Tail) -> Node:
        """Reduce per-token losses as cross_entropy does: weights, smoothing, then mean, sum or none."""
        e = self.editor
        kept = e.call(aten.ne.Scalar, self.target, tail.ignore_index)
        rows, norm = self.nll, kept
        if tail.class_weight is not None:
            norm = self._row_weights(tail.class_weight, kept)
            rows = e.call(aten.mul.Tensor, rows, norm)
        loss = self._reduce(tail, rows, norm)
        if tail.label_smoothing > 0:
            smooth = self._reduce(tail, self._smooth_rows(tail, kept), norm)
            vocabulary = self._vocabulary()
            loss = e.call(
                aten.add.Tensor,
                e.call(aten.mul.Scalar, loss, 1.0 - tail.label_smoothing),
                e.call(aten.mul.Scalar, smooth, tail.label_smoothing / vocabulary),
            )
        if tail.reduction == 0:
            assert tail.target is not None
            return self._shaped(loss, tail.target)
        return loss

    def _vocabulary(self) -> int:
        weight = self.info.tensor(self.head.weight)
        assert weight is not None
        return int(weight.shape[1 if self.head.transposed else 0])

    def _row_weights(self, class_weight: Node, kept: Node) -> Node:
        e = self.editor
        zero = e.call(aten.zeros_like.default, self.target)
        index = e.call(aten.where.self, kept, self.target, zero)
        flat = e.call(
            aten.index_select.default, class_weight, 0, e.call(aten.reshape.default, index, [-1])
        )
        picked = e.call(
            aten.to.dtype, e.call(aten.reshape_as.default, flat, index), self._loss_dtype()
        )
        return e.call(aten.mul.Tensor, picked, kept)

    def _loss_dtype(self) -> torch.dtype:
        value = self.info.tensor(self.nll)
        assert value is not None
        return value.dtype

    def _smooth_rows(self, tail: Tail, kept: Node) -> Node:
        """Sum over classes of weight * (lse - z), zero in ignored rows."""
        e = self.editor
        if tail.class_weight is None:
            spread = e.call(aten.mul.Scalar, self.lse, float(self._vocabulary()))
        else:
            weight = e.call(aten.to.dtype, tail.class_weight, self._loss_dtype())
            spread = e.call(aten.mul.Tensor, self.lse, e.call(aten.sum.default, weight))
        rows = e.call(aten.sub.Tensor, spread, self.logit_sum)
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


# --- words --------------------------------------------------------------------------------------------


def _engine(hidden: torch.Tensor | None, dtype: torch.dtype) -> str:
    assert hidden is not None
    name = op_folder.engine_for(hidden.device, dtype)
    return f"engine {name}: {op_folder.ENGINES[name]}"


def _detached(chain: Chain) -> bool:
    return any(s.kind == "detach" for s in chain.steps)


def _name(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))


def _hint(size: Any) -> int:
    """Return a number for a size, the hint of a symbol; 0 when it has none. Adds no guard."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if isinstance(hint, int) else 0


def _statically_one(size: Any) -> bool:
    return compat.statically_true(size == 1)
