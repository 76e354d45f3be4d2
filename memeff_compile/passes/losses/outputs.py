"""Decide which logits among a graph's outputs can be deferred (computed when they are first read),
and plan their replacement.

Two passes use this module:

- the pass that fuses the loss, for logits that the model returns with the loss;
- `defer_logits`, for logits of a training graph without a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...kernels import linear_cross_entropy as op_folder
from ...logits.recipe import (
    Adapter,
    DeferredOutput,
    GivenSize,
    LogitsRecipe,
    LogitsView,
    LossSettings,
)
from ..graph.base import NOTED, Decline, Note
from ..graph.canonical import aten, call_of, read
from ..graph.editor import Editor
from ..graph.graph_info import GraphInfo, node_name
from . import shards
from .head import POINTWISE, SAME_OPS, Chain, Head, HeadReader, Step, fold, replay_rows

NAME = NOTED
_SCALES = aten.mul.Tensor, aten.mul.Scalar
_MANY = 8192  # from this number of features on, a layer's results may be logits

STALE_SENTENCE = (
    "out.logits is computed when first read; reading it after the weights changed raises "
    "StaleLogitsError; options={'memeff.logits': 'eager'} restores eager logits"
)
GATHERED_SENTENCE = (
    "out.logits is computed when first read; FSDP frees the gathered head in the backward pass, "
    "and a first read after loss.backward() raises StaleLogitsError; "
    "options={'memeff.logits': 'eager'} restores eager logits"
)
SPREAD_SENTENCE = (
    "out.logits is computed by out.logits.full_tensor() on every rank of the group, before the "
    "weights change; any other read raises ShardedLogitsError; options={'memeff.logits': 'eager'} "
    "restores eager logits"
)


@dataclass(frozen=True)
class LogitsOutput:
    """Logits among the graph's outputs: the outputs' positions, and how the logits are computed."""

    node: Node
    chain: Chain


@dataclass
class Returned:
    """An output projection whose logits a training graph returns, and the outputs with these
    logits."""

    head: Node
    outputs: list[LogitsOutput]


def returned_logits(info: GraphInfo, *, narrow: bool = False) -> list[Returned]:
    """Return those output projections of a training graph whose logits are among the graph's
    outputs.

    With `narrow`, return instead those linear layers whose results the graph returns, but which are
    too narrow to count as output projections.
    """
    if not info.needs_grad or info.parent is not None:
        return []
    reader = HeadReader(info, tracing=False)
    found: dict[Node, list[LogitsOutput]] = {}
    for node in info.visit(info.output.all_input_nodes):
        chain = reader.chain(node)
        value = info.tensor(node)
        if isinstance(chain, Decline) or value is None or not value.requires_grad:
            continue
        if narrow:
            is_sought = value.shape[-1:] and compat.size_hint(value.shape[-1]) >= _MANY
            is_sought = is_sought and not reader.has_shape_of_head(chain.head)
        else:
            is_sought = reader.is_wide(chain.head)
        if is_sought:
            found.setdefault(chain.head.node, []).append(LogitsOutput(node, chain))
    return [Returned(head, outputs) for head, outputs in found.items()]


def is_deferrable(info: GraphInfo, match: Returned) -> bool:
    """Return whether the pass `defer_logits` will defer the given logits."""
    is_on = not info.options.switched_off(NAME)
    return is_on and is_unused(info, match) and check_returned(info, match) is None


def is_unused(info: GraphInfo, match: Returned) -> bool:
    """Return whether the logits are used only to be returned."""
    way = {match.head, *(step.node for output in match.outputs for step in output.chain.steps)}
    return all(user in way or user is info.output for node in way for user in node.users)


def check_returned(info: GraphInfo, match: Returned) -> Decline | None:
    """Return the reason why returned logits cannot be deferred (computed when first read), or None.

    The graph contains no loss of these logits."""
    hint = "compute the loss inside the compiled function (pass labels=)"
    alone = _not_deferrable(match.head, _why_no_loss(info, match), hint)
    return alone or check(info, match.outputs, hint)


def _why_no_loss(info: GraphInfo, match: Returned) -> str:
    """Return the reason why a loss outside of the graph could not use the fused loss op, or ""."""
    if compat.feeds_resumed_code(info.gm):
        return "Dynamo ended the graph here, and the function goes on after it"
    chains = [output.chain for output in match.outputs]
    if chains[0].head.parts:
        return "the head has an adapter, and a loss outside the graph has no op for it"
    nodes = [match.head, *(step.node for chain in chains for step in chain.steps)]
    regions = [info.regions[node] for node in nodes]
    if any(not region.grad or region.inference for region in regions):
        return "they are made where gradients or inference mode are switched"
    head, reason = chains[0].head, _why_not_fused(info, chains)
    if reason:
        return reason
    read = [head.hidden, head.weight, head.bias, *(n for c in chains for n in c.operands)]
    operands = [*nodes, *(node for node in read if node is not None)]
    writer = info.written_between(operands, match.head, info.output)
    named = "" if writer is None else node_name(writer)
    return f"`{named}` writes in place to what they come from" if named else ""


def _why_not_fused(info: GraphInfo, chains: Sequence[Chain]) -> str:
    """Return the reason why memeff::linear_cross_entropy cannot compute a loss of given logits.

    If the op supports these logits, return ""."""
    head = chains[0].head
    hidden, weight = info.value(head.hidden), info.value(head.weight)
    vectors = [s.value for chain in chains for s in chain.steps if s.kind == "bias"]
    for node in (head.hidden, head.weight, head.bias, *vectors):
        value = None if node is None else compat.example_value(node)
        if value is not None and not compat.is_fake(value):
            return f"{node.name} is a {type(value).__name__}"
    if any(compat.known_size(size) is None for size in (hidden.shape[-1], *weight.shape)):
        return "the hidden or vocabulary size is dynamic"
    for chain in chains:
        folded = fold(chain)
        if isinstance(folded, Decline):
            return folded.sentence
    columns, rows = weight.t() if head.transposed else weight, hidden.select(-1, 0)
    target = rows.new_empty(rows.shape, dtype=torch.int64)
    workspace = info.options.linear_cross_entropy_workspace
    how: dict[str, Any] = {"dtype": head.compute_dtype, "workspace": workspace}
    return op_folder.supports(hidden, columns, info.tensor(head.bias), target, **how) or ""


def _not_deferrable(node: Node, reason: str, hint: str) -> Decline | None:
    said = "the logits are an output of the compiled graph and cannot be deferred"
    return Decline("logits_not_deferrable", f"{said}: {reason}", hint, node) if reason else None


def check(info: GraphInfo, outputs: Sequence[LogitsOutput], way_out: str = "") -> Decline | None:
    """Return the reason why the logits that a graph returns cannot be deferred or removed.

    Deferred logits are computed only when they are first read. If the logits in `outputs` can be
    deferred or removed, return None. `way_out` is the remedy that the compilation report names if
    no loss in the graph reads the logits.
    """
    if not outputs:
        return None
    node = outputs[0].node
    path = info.module_path(outputs[0].chain.head.node)
    mode = "eager" if info.options.skips(NAME, path) else info.options.logits
    if info.parent is not None:
        said = "the logits leave an activation checkpoint"
        hint = "return only the loss from the checkpointed function"
        return Decline("logits_leave_checkpoint", said, hint, node)
    if mode == "none":
        return None
    if mode == "eager":
        return Decline(
            "logits_kept",
            "the logits are an output of the compiled graph and memeff.logits is 'eager' "
            "(or memeff.skip names them), so they are computed and kept; a fused loss would "
            "compute them a second time",
            "return only the loss from the compiled function, or set memeff.logits to "
            "'deferred' or 'none'",
            node,
        )
    reason = _why_not_deferrable(info, outputs)
    hint = "set options={'memeff.logits': 'none'} if nobody reads out.logits, or return only the "
    return _not_deferrable(node, reason, way_out or f"{hint}loss from the compiled function")


def _why_not_deferrable(info: GraphInfo, outputs: Sequence[LogitsOutput]) -> str:
    if torch.compiler.is_exporting():
        return "torch.export needs plain tensors as outputs"
    for output in outputs:
        head = output.chain.head
        adapters = _adapters(info, head)
        if isinstance(adapters, str):
            return adapters
        if compat.is_dtensor(info.value(output.node)):
            return "they are returned in parts, one on each rank"
        if compat.is_dtensor(info.value(head.node)) and not info.needs_grad:
            return "a read on one rank would wait for the others, and nothing trains here"
        if output.chain.factors:
            return "they are scaled by a tensor"
        vectors = [s.value for s in output.chain.steps if s.kind == "bias"]
        last_cut = max((i for i, s in enumerate(output.chain.steps) if s.classes), default=0)
        if any(s.kind == "bias" for s in output.chain.steps[:last_cut]):
            return "some of their classes are left out after a vector was added"
        vectors += [each for down, up, _ in adapters for each in (down, up)]
        for weight in filter(None, (head.weight, head.bias, *vectors)):
            if weight.op != "placeholder":
                named = "the head's weight" if weight is head.weight else weight.name
                return f"{named} is computed inside the graph (by `{node_name(weight)}`)"
            if compat.fsdp_frees_after_forward(compat.example_input(weight)):
                return "FSDP frees the gathered head weight after the forward pass"
        if output.chain.moved:
            return "they are returned with the vocabulary dimension moved"
    for group in _by_memory(info, outputs):
        if isinstance(laid := _layout(info, group), str):
            return laid
    return ""


def _adapters(info: GraphInfo, head: Head) -> list[tuple[Node, Node, Adapter]] | str:
    """Return the LoRA matrices of an output projection, and the steps that apply each adapter.

    The steps compute each adapter's product bit for bit as in the model. If logits with these
    adapters cannot be deferred (computed when first read), return the reason.
    """
    said = "the adapter of the head does not add a number times B(A(hidden states)) to them"
    said += ", for example because of a dropout before A"
    if any(call_of(node, aten.to.dtype) for node in head.summed):
        return "a product of the head or of its adapter is cast"
    found: list[tuple[Node, Node, Adapter]] = []
    sums = [node for node in head.nodes if call_of(node, aten.add.Tensor)]
    for part, total in zip(head.parts, sums, strict=True):
        *scales, product = part.links
        down, up = (call_of(node, aten.linear.default) for node in (part.low, product))
        if down is None or up is None or down.args["bias"] is not None or part.transposed:
            return said
        source = down.args["input"]
        cast = call_of(source, aten.to.dtype)
        if cast is not None and cast.args["dtype"].itemsize >= info.value(head.hidden).itemsize:
            source = cast.args["self"]
        is_scaled = len(scales) < 2 and all(call_of(scale, *_SCALES) for scale in scales)
        if source is not head.hidden or not is_scaled:
            return said
        dtypes = (info.value(node).dtype for node in (part.low, product, total))
        found.append((down.args["weight"], part.up, Adapter(part.scale, *dtypes)))
    return found


def _by_memory(info: GraphInfo, outputs: Sequence[LogitsOutput]) -> list[list[LogitsOutput]]:
    """Group the outputs that share memory, because they are views of one another or of one tensor
    that the graph does not return.
    """
    groups: list[list[LogitsOutput]] = []
    for output in outputs:
        for group in groups:
            if info.may_share_memory(group[0].node, output.node):
                group.append(output)
                break
        else:
            groups.append([output])
    return groups


def _base(info: GraphInfo, output: LogitsOutput) -> LogitsOutput:
    """Return the tensor whose memory an output shares: the earliest node of which the output is a
    view."""
    chain = output.chain
    way = [chain.head.node, *(step.node for step in chain.steps)]
    first = next(
        i
        for i, node in enumerate(way)
        if not compat.is_dtensor(info.value(node)) and info.may_share_memory(node, output.node)
    )
    chain = Chain(chain.head, chain.steps[:first], way[first])
    return LogitsOutput(way[first], chain)


@dataclass(frozen=True)
class _Layout:
    """The base tensor of which some outputs are views, and the order of its dimensions in
    memory."""

    base: LogitsOutput
    order: tuple[int, ...]

    @property
    def back(self) -> tuple[int, ...]:
        """Return the permutation of dimensions that undoes the permutation `order`."""
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))

    @property
    def is_plain(self) -> bool:
        return self.back == self.order == tuple(range(len(self.order)))


def _layout(info: GraphInfo, group: Sequence[LogitsOutput]) -> _Layout | str:
    """Return the memory layout of `group`, graph outputs that are logits and share memory.

    Deferred logits replace these outputs and are computed only when they are first read. Deferred
    logits need the outputs' layout. If deferred logits cannot have this layout, return the reason.
    """
    base, *others = (_base(info, output) for output in group)
    value = info.value(base.node)
    if any(other.node is not base.node for other in others):
        return "several outputs share one memory and come from different tensors"
    if any(step.kind in POINTWISE for output in group for step in _behind(output, base)):
        return "they share their memory with what they are computed from"
    dims = range(value.dim())
    by_stride = sorted(dims, key=lambda dim: -compat.size_hint(value.stride(dim)))
    for order in (tuple(dims), tuple(by_stride)):
        if order[-1] == dims[-1] and _is_dense(value.permute(order)):
            return _Layout(base, order)
    return "their rows do not follow each other in memory"


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous, without adding a guard."""
    strides = zip(value.shape, value.stride(), value.new_empty(value.shape).stride(), strict=True)
    return all(
        compat.statically_true(size == 1) or compat.statically_true(stride == dense)
        for size, stride, dense in strides
    )


def _behind(output: LogitsOutput, base: LogitsOutput) -> tuple[Step, ...]:
    return output.chain.steps[len(base.chain.steps) :]


def rewrite(
    info: GraphInfo, outputs: Sequence[LogitsOutput], editor: Editor
) -> tuple[list[DeferredOutput], list[Note]]:
    """Replace returned logits by hidden states, or by None if `memeff.logits` is "none".

    If several outputs share their memory, the first of them becomes the hidden states, and the
    others become None. Return the plan from which the backend makes deferred logits, which are
    computed when first read. Also return the notes for the compilation report."""
    if not outputs:
        return [], []
    values: Any = info.output.args[0]
    slots = list(values)
    plan: list[DeferredOutput] = []
    notes: list[Note] = []
    for group in _by_memory(info, outputs):
        places = [(i, o) for i, slot in enumerate(values) for o in group if o.node is slot]
        for place, output in places:
            slots[place] = None
            if info.options.logits == "none":
                what = "out.logits is None, as memeff.logits asks"
                notes.append(("dropped", "logits_none", what))
            else:
                notes.append(("deferred", "logits_deferred", stale_sentence(output)))
        if info.options.logits == "none":
            continue
        laid = _layout(info, group)
        assert isinstance(laid, _Layout), "the check admits only outputs with a layout"
        first, output = places[0]
        steps = [_behind(o, laid.base) for _, o in places]
        # A lone output that has all of its memory, in order, needs no view.
        is_whole = all(s.kind != "rows" and s.classes is None for s in steps[0])
        if len(places) == 1 and laid.is_plain and is_whole:
            laid, views = replace(laid, base=output), []
        else:
            turned = () if laid.is_plain else (("permute.default", (laid.back,)),)
            views = [
                LogitsView(i, turned + _calls(behind, slots))
                for (i, _), behind in zip(places, steps, strict=True)
            ]
        head, rows = laid.base.chain.head, laid.base.chain.row_steps
        size = compat.size_hint(info.value(head.hidden).shape[-1])  # the check admits no symbol
        with editor.at(info.output, like=laid.base.node):
            split, hidden = shards.split_of(info, head), head.hidden
            if isinstance(split, op_folder.Split):
                hidden = shards.here(editor, head, hidden, split.dim)
            hidden = replay_rows(editor, hidden, rows, size)
            if not laid.is_plain:
                hidden = editor.call(aten.permute.default, hidden, list(laid.order))
        slots[first] = hidden
        plan.append(_planned(info, first, laid.base, tuple(views)))
    editor.set_output((type(values)(slots),))
    return plan, notes


def _calls(steps: Sequence[Step], slots: list[Any]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the view operations, each with its arguments, that the nodes in `steps` apply.

    The graph applies these operations to logits, and returns the resulting view of the logits.
    `slots` contains the outputs of the graph. Sizes that differ from one call of the graph to the
    next are appended as additional outputs.
    """

    def given(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(map(given, arg))
        if not isinstance(arg, Node):
            return arg
        size = compat.known_size(compat.example_value(arg))
        if size is not None:
            return size
        slots.append(arg)
        return GivenSize(len(slots) - 1)

    calls: list[tuple[str, tuple[Any, ...]]] = []
    for step in steps:
        if step.kind == "detach":
            calls.append(("detach.default", ()))
        # A cast to the same dtype is the tensor itself; `logits[:]` is another tensor.
        moves = step.whole or step.reading
        for call in moves or read(step.node) or ():
            if call.op is aten.alias.default or (moves and call.op not in SAME_OPS):
                args = tuple(given(arg) for arg in list(call.args.values())[1:])
                calls.append((str(call.op).removeprefix("aten."), args))
    return tuple(calls)


def stale_sentence(output: LogitsOutput) -> str:
    if compat.is_dtensor(compat.example_value(output.chain.head.weight)):
        return SPREAD_SENTENCE
    weight = compat.example_input(output.chain.head.weight)
    is_gathered = weight is not None and compat.fsdp_shard(weight) is not None
    return GATHERED_SENTENCE if is_gathered else STALE_SENTENCE


def _planned(
    info: GraphInfo, index: int, output: LogitsOutput, views: tuple[LogitsView, ...]
) -> DeferredOutput:
    positions = {placeholder: i for i, placeholder in enumerate(info.placeholders)}
    head, made, options = output.chain.head, info.value(output.node), info.options
    steps: list[tuple[str, object]] = []
    vectors: list[int] = []
    adapters, dtype = _adapters(info, head), head.compute_dtype
    assert not isinstance(adapters, str), "the check admits only adapters that are read"
    for down, up, adapter in adapters:
        vectors += [positions[down], positions[up]]
        steps.append(("adapter", adapter))
        dtype = adapter.total
    width = compat.size_hint(info.value(head.weight).shape[1 if head.transposed else 0])
    for step in output.chain.steps:
        value = info.value(step.node)
        if step.classes is not None:
            steps.append(("classes", (*step.classes, width)))
            width = step.classes[1] - step.classes[0]
        if step.kind not in POINTWISE:
            continue
        if step.kind == "bias":  # a wider vector widens the logits
            vectors.append(positions[step.value])
            steps.append(("bias", None if value.dtype == dtype else value.dtype))
        else:
            steps.append((step.kind, step.value))
        dtype = value.dtype
    workspace = options.linear_cross_entropy_workspace
    is_spread = compat.is_dtensor(info.value(head.node))
    is_served = options.linear_cross_entropy != "off" and not is_spread and not adapters
    return DeferredOutput(
        output=index,
        weight=positions[head.weight],
        bias=None if head.bias is None else positions[head.bias],
        vectors=tuple(vectors),
        recipe=LogitsRecipe(head.compute_dtype, head.transposed, tuple(steps)),
        detached=output.chain.detached,
        is_view=made._is_view() and not output.chain.detached,
        loss=LossSettings(workspace) if is_served else None,
        views=views,
    )
