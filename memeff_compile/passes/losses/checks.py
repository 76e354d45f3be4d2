"""Check whether memeff::linear_cross_entropy can replace the losses of an output projection; if
not, return the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...kernels import linear_cross_entropy as op_folder
from ..graph import base
from ..graph.base import Decline
from ..graph.graph_info import GraphInfo, kind_among, node_name
from . import shards
from .emit import groups_of, written_before
from .head import LEAVE_OUT_HINT, SMALLEST_VOCABULARY, fold
from .softmax import is_shift
from .tails import METRICS, STATISTICS, Site, has_sum, is_silent


def check_operands(info: GraphInfo, site: Site) -> Decline | None:
    head, where = site.head, site.tails[0].node
    split = shards.split_of(info, head)
    if isinstance(split, Decline):
        return replace(split, node=where)
    hidden, weight = map(compat.local_part, (info.value(head.hidden), info.value(head.weight)))
    operands: list[tuple[str, Node | None]] = [("targets come", tail.target) for tail in site.tails]
    if split is None:
        operands += [("hidden states come", head.hidden), ("head weight comes", head.weight)]
        operands += [("bias comes", head.bias)]
        for part in head.parts:
            operands += [("low-rank operand comes", part.low), ("adapter comes", part.up)]
    elif (refusal := _check_split(info, site)) is not None:
        return refusal
    for label, node in operands:
        kind = kind_among((node,))
        if kind == "Tensor":  # neither a subclass nor fake: one that torch.func has wrapped
            said = "torch.func (grad, vmap, jvp) transforms this loss; the op has no rule for it"
            hint = "take gradients by backward() or torch.autograd.grad"
            return Decline("torch_func", said, hint, where)
        if kind:
            said = f"the {label} as a {kind}, which this op does not take"
            hint = "gather the head to a plain tensor, or leave the loss to the model's own code"
            hint = getattr(type(info.value(node)), "how_to_leave_dense", hint) if node else hint
            return Decline(f"subclass_weight({kind})", said, hint, where)
    vocabulary = compat.known_size(info.value(head.weight).shape[1 if head.transposed else 0])
    cuts = [t.chain.classes for t in site.tails if t.chain.classes is not None]
    vocabulary = min((stop - first for first, stop in cuts), default=vocabulary)
    if compat.known_size(hidden.shape[-1]) is None or vocabulary is None:
        said = "the hidden or vocabulary size is dynamic"
        return Decline("dynamic_vocabulary", said, "mark only batch and length dynamic", where)
    if vocabulary < SMALLEST_VOCABULARY:
        said = f"{vocabulary} classes: the logits are too small to matter (the pass starts at "
        return Decline("vocab_too_small", f"{said}{SMALLEST_VOCABULARY})", node=where)
    rows = hidden.select(-1, 0)
    columns = weight.t() if head.transposed else weight
    how: dict[str, Any] = {"dtype": head.compute_dtype}
    how["gradient_filter"] = info.options.linear_cross_entropy
    how["workspace"] = info.options.linear_cross_entropy_workspace
    for tail in site.tails:  # the op's own check
        dtype = torch.int64 if tail.target is None else info.value(tail.target).dtype
        target = rows.new_empty(rows.shape, dtype=dtype)
        bias = None if head.bias is None else compat.local_part(info.value(head.bias))
        left = columns
        if tail.chain.classes is not None:
            first, stop = tail.chain.classes
            left, bias = columns[first:stop], None if bias is None else bias[first:stop]
        sentence = op_folder.supports(hidden, left, bias, target, **how)
        if sentence is not None:
            code = "dtype_unsupported" if "dtype" in sentence else "unsupported"
            return Decline(code, sentence, node=tail.node)
    return None


def _check_split(info: GraphInfo, site: Site) -> Decline | None:
    """Check the losses and other results (tails) of logits that are split over ranks.

    Return a Decline (the reason for no rewrite) if the fused loss op cannot compute a tail from
    split logits.
    """
    for tail in site.tails:
        value, said = compat.example_value(tail.node), ""
        folded = fold(tail.chain)
        vectors = () if isinstance(folded, Decline) else [v.node for v, _ in folded.biases]
        if kind_among((tail.target, tail.class_weight)):
            said = "the targets or class weights of a tensor parallel head are spread over ranks"
        elif compat.is_dtensor(value) and not shards.is_everywhere(value):
            said = f"`{tail.name}` of a tensor parallel head is not whole on every rank"
        elif kind_among(vectors) or any(info.value(each).requires_grad for each in vectors):
            said = "a vector with a gradient is added to logits that are split over ranks"
        elif tail.chain.classes is not None:
            said = "the classes of a tensor parallel head are cut"
        elif tail.chain.factors:
            said = "the logits of a tensor parallel head are scaled by a tensor"
        if said:
            return Decline("tensor_parallel_head", said, shards.HINT, tail.node)
    return None


def check_tails(info: GraphInfo, site: Site) -> Decline | None:
    cut = _check_gradients(info, site)
    if cut is not None:
        return cut
    for tail in site.tails:
        folded, moved = fold(tail.chain), tail.chain.moved
        if isinstance(folded, Decline):
            return replace(folded, node=tail.node)
        if tail.kind != "loss":
            if moved and tail.kind not in STATISTICS:
                return Decline("unknown_step", "gather after moving the classes", node=tail.node)
            continue
        if info.value(tail.chain.node).dim() > 2 and not moved:
            said = "the loss reads its classes from dimension 1 and the head's are last"
            hint = "transpose(1, 2) the logits, or flatten batch and length"
            return Decline("class_dim_changed", said, hint, tail.node)
        if kind_among((tail.class_weight,)):
            said = "the class weights are a tensor subclass"
            return Decline("class_weight", said, node=tail.node)
        weight = info.tensor(tail.class_weight)
        if weight is not None and weight.requires_grad:
            said = "the class weights need a gradient"
            return Decline("class_weight", said, "detach them", tail.node)
    for tail in site.tails:
        if tail.kind == "logit" and not has_sum(tail, site.tails):
            said = "single logits are gathered without their logsumexp over the same rows"
            hint = "gather from log_softmax, or return per-token losses with reduction='none'"
            return Decline("logits_reused(gather)", said, hint, tail.node)
    return None


def _check_gradients(info: GraphInfo, site: Site) -> Decline | None:
    """Return a Decline (the reason for no rewrite) if a loss is detached from autograd.

    Also return a Decline if some of the nodes that compute the loss are detached. Metrics may be
    detached.
    """
    trains = info.tensor(site.head.node)
    if trains is None or not trains.requires_grad:
        return None
    if _trains_nothing(info, site) and any(tail.chain.detached for tail in site.tails):
        said, where = "the loss reads detached logits", site.tails[0].node
        return Decline("detached", said, "take the loss of logits that are not detached", where)
    for tail in site.tails:
        if is_silent(info, tail):
            continue
        steps = (step.node for step in tail.chain.steps)
        for node in (*steps, *tail.through, *tail.factors):
            value = info.tensor(node)
            is_cut = value is not None and value.is_floating_point() and not value.requires_grad
            if is_cut and not is_shift(node):
                said = f"`{node_name(node)}` cuts a part of `{tail.name}` off from the gradient"
                return Decline("detached", said, "detach all of it, or nothing", tail.node)
    return None


def _trains_nothing(info: GraphInfo, site: Site) -> bool:
    losses = [tail for tail in site.tails if tail.kind not in METRICS] or site.tails
    return all(is_silent(info, tail) for tail in losses)


def check_regions(info: GraphInfo, site: Site) -> Decline | None:
    head_region = info.regions[site.head.node]
    # A metric may run without gradients next to a loss that has them.
    may_drop = head_region.grad and not _trains_nothing(info, site)
    for node in site.covered:
        region = info.regions[node]
        same = region.grad == head_region.grad or (may_drop and not region.grad)
        if region.inference != head_region.inference or not same:
            return Decline(
                "region_mismatch",
                f"`{node_name(node)}` runs with gradients or inference mode switched differently "
                "from the head",
                "put the head and its loss under the same no_grad / inference_mode",
                site.tails[0].node,
            )
    return None


def check_writes(info: GraphInfo, site: Site) -> Decline | None:
    results = [tail.node for tail in site.tails]
    last = info.output if site.outputs else max(results, key=info.positions.__getitem__)
    head = site.head
    for group in groups_of(info, site.tails):
        writer = written_before(info, group)
        if writer is not None:
            return mutated(writer, site.tails[0].node)
    chains = [*(tail.chain for tail in site.tails), *(output.chain for output in site.outputs)]
    chains += [size.chain for size in site.sizes]
    operands = [head.hidden, head.weight, head.bias, *site.covered]
    operands += [each for part in head.parts for each in (part.low, part.up)]
    operands += [n for chain in chains for n in chain.operands]
    read = [n for n in operands if n is not None and n not in results]
    first = min(head.nodes, key=info.positions.__getitem__)
    writer = info.written_between(read, first, last)
    return None if writer is None else mutated(writer, site.tails[0].node)


def mutated(writer: Node, loss: Node) -> Decline:
    what = "the logits, the hidden states or the weight between the head and the loss, or to the "
    what += "targets between two losses"
    found = base.mutated(writer, what, loss)
    fills = node_name(writer) in ("setitem", "__setitem__", "index_fill_")
    return replace(found, hint=f"{found.hint}; {LEAVE_OUT_HINT}") if fills else found
