"""Rewrite attention with dense masks and repeated keys into calls with is_causal and enable_gqa.

PyTorch uses faster kernels for these calls.

    before: mask = le(arange(S)[None, :], arange(S)[:, None]).expand(B, 1, S, S)
            k, v = repeat_kv(k), repeat_kv(v)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    after:  out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

The pass does not match the nodes of a mask against patterns. Instead, the modules `mask_reader`,
`mask_algebra` and `mask_forms` turn these nodes into a formula over batch, query and key index. A
call is changed only if every query attends to the same keys with the new arguments as with the
mask. This must be proved for all sizes for which the graph is compiled.

PyTorch's call has no arguments for padding, packed sequences, windows and softcaps. The values of
some masks are known only at run time. In these cases, the pass calls memeff::attention, if that op
has a kernel for the device. If neither PyTorch's call nor memeff::attention fits, the pass reports
the attention call and does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..kernels.checks import short
from ..kernels.device import was_measured
from .attention import told_to_op
from .attention.mask_algebra import axis, negated, reads_in, substituted
from .attention.mask_forms import Form, form_of
from .attention.mask_reader import Mask, reader_of
from .attention.operands import Operand, written
from .attention.repeated_heads import REPEATS, without_repeat
from .attention.sites import Site, find_sites, subclass
from .attention.torch_kernels import kernels_chosen, laid_out_as, why_not_fused, why_not_grouped
from .graph.base import Decline, Done, GraphPass
from .graph.canonical import aten, back_over, call_of, named, read
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among, node_name, written_by


@dataclass(frozen=True)
class Plan:
    """The rewrite of one attention call."""

    causal: bool  # the new call's is_causal
    limit: Any  # keys from this index on are never attended to and are cut off; None keeps all
    # keys and values before they were repeated; None leaves them repeated
    bases: tuple[Operand, Operand] | None
    sentence: str  # the sentence for the compilation report
    said: told_to_op.Said | None = (
        None  # arguments of memeff::attention, if PyTorch's call has none for them
    )


@dataclass
class Match:
    """Attention calls that share one entry of the compilation report.

    The entry describes the rewrite of these calls, or gives the reason why the pass leaves them
    unchanged."""

    nodes: list[Node] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    decline: Decline | None = None


class RecoverAttention(GraphPass):
    """The pass that rewrites attention calls with dense masks into calls that PyTorch's fast
    kernels support. A rewrite can avoid buffers for the mask, the repeated keys and values, and the
    scores. The kernel that PyTorch chooses for the new call determines which of these buffers the
    rewrite avoids.
    """

    name = "recover_attention"

    def find(self, info: GraphInfo) -> Iterable[Match | Decline]:
        """Yield one match for each group of attention calls that are rewritten in the same way."""
        matches: dict[tuple[str, ...], Match] = {}
        for site in find_sites(info):
            answer = site if isinstance(site, Decline) else plan_for(info, site)
            node = site.node
            if answer is None or node is None:
                continue
            code = answer.code if isinstance(answer, Decline) else ""
            key = (code, answer.sentence, self.skipped(info, node))
            match = matches.setdefault(key, Match())
            match.nodes.append(node)
            if isinstance(answer, Plan):
                assert isinstance(site, Site)
                match.sites.append(site)
                match.plans.append(answer)
            else:
                first = (match.decline or answer).counted(match.nodes[0])
                match.decline = replace(first, sites=len(match.nodes))
        yield from matches.values()

    def check(self, info: GraphInfo, match: Match) -> Decline | None:
        return match.decline

    def places(self, match: Match) -> Sequence[Node]:
        return match.nodes

    def parts(self, match: Match) -> Sequence[Match]:
        pairs = zip(match.sites, match.plans, strict=True)
        return [] if match.decline else [Match([site.node], [site], [plan]) for site, plan in pairs]

    def rewrite(self, info: GraphInfo, match: Match, editor: Editor) -> Done:
        """Replace each attention call by one call without a dense mask."""
        for site, plan in zip(match.sites, match.plans, strict=True):
            for number in site.numbers:
                compat.hold_constant(number)
            with editor.at(site.node):
                result = written(editor, _insert(info, editor, site, plan), site.result_steps)
                editor.replace(site.node, laid_out_as(editor, site.node, result))
        return Done(match.sites[0].node, match.plans[0].sentence, sites=len(match.sites))

    def dead(self, match: Match) -> Sequence[Node]:
        """Return the replaced attention calls, and the nodes that were needed only for the
        arguments of these calls.

        Such nodes compute the masks and repeat the keys and values.
        """
        found: set[Node] = set()
        for site, plan in zip(match.sites, match.plans, strict=True):
            found |= {site.node, *site.between}
            stack = [node for node in (site.mask, site.unread) if node is not None]
            bases = [base.node for base in plan.bases or ()]
            if plan.bases is not None:
                stack += [each.node for each in (site.key, site.value) if each.node not in bases]
            while stack:
                node = stack.pop()
                if node not in found and _is_pure(node) and node not in bases:
                    found.add(node)
                    stack.extend(node.all_input_nodes)
        return list(found)


def plan_for(info: GraphInfo, site: Site) -> Plan | Decline | None:
    """Return the rewrite of an attention call, or the reason why none is possible; return None if a
    rewrite would save nothing."""
    kind = kind_among(site.inputs)
    if kind:
        return subclass(kind, site.node)
    asked = _asked(info, site)
    if isinstance(asked, Decline):
        reason = told_to_op.why_not_read(info, site) or told_to_op.why_not_added(info, site)
        if not reason:
            return _as_read(info, site)
        return replace(asked, sentence=f"{asked.sentence}: kept, {reason}", node=site.node)
    form, mask = asked
    masking = None if site.softcap else _masking(info, site, form)
    if masking is None:
        return _as_op(info, site, form, mask)
    return _as_call(info, site, *masking)


def _as_call(
    info: GraphInfo, site: Site, causal: bool, limit: Any, said: list[str]
) -> Plan | Decline | None:
    """Return the rewrite of the attention into a call of PyTorch's attention without a mask.

    Return the reason if this is not possible, and None if the new call would equal the old one.
    """
    slow = why_not_fused(info, site) if site.between else ""
    if slow:
        return Decline("no_fused_kernel", slow, node=site.node)
    bases, expansion = _bases(info, site)
    if bases is not None:
        reason = why_not_grouped(info, site)
        if reason:
            bases, expansion = None, Decline("no_grouped_kernel", reason, node=site.node)
    if not said and bases is None and not site.between:
        return expansion
    chosen = kernels_chosen(info, site.node)
    if chosen is not None:
        return chosen
    if site.between:
        said = [f"{site.chain} -> scaled_dot_product_attention", *said]
    if bases is not None:
        said = [*said, "keys and values are not expanded (enable_gqa=True)"]
    elif expansion is not None:
        said = [*said, f"keys and values stay expanded: {expansion.sentence}"]
    return Plan(causal, limit, bases, "; ".join([*said, *_speed(info, site, "grouped_heads")]))


def _as_op(info: GraphInfo, site: Site, form: Form, mask: Mask | None) -> Plan | Decline:
    """Return the rewrite of the attention into a call of memeff::attention, or the reason why it is
    not possible."""
    reason = told_to_op.why_not_here(info, site) if form.is_sayable else ""
    if reason:
        return _kept(info, site, form, reason)
    said = told_to_op.said_for(info, site, form, mask)
    if isinstance(said, str):
        reason = told_to_op.why_not_read(info, site)
        return _kept(info, site, form, f"{said}, and {reason}") if reason else _as_read(info, site)
    if isinstance(said, Decline):
        return replace(said, node=site.node)
    return _told(info, site, said, told_to_op.sentence(info, site, said, form, _shown(info, site)))


def _as_read(info: GraphInfo, site: Site) -> Plan | Decline:
    """Return the rewrite of the attention into a call of memeff::attention that reads the mask at
    run time."""
    read = told_to_op.Said(reads_mask=True)
    return _told(info, site, read, told_to_op.sentence_of_mask(info, site, _shown(info, site)))


def _told(info: GraphInfo, site: Site, said: told_to_op.Said, what: str) -> Plan | Decline:
    chosen = kernels_chosen(info, site.node)
    if chosen is not None:
        return chosen
    bases, expansion = _bases(info, site)
    parts = [what]
    if bases is not None:
        parts.append("keys and values are not expanded")
    elif expansion is not None:
        parts.append(f"keys and values stay expanded: {expansion.sentence}")
    parts += _speed(info, site, "attention")
    return Plan(False, None, bases, "; ".join(parts), said)


def _masking(info: GraphInfo, site: Site, form: Form) -> tuple[bool, Any, list[str]] | None:
    """Return how `scaled_dot_product_attention` can express a mask, and text about the mask.

    The result has the argument is_causal and the number of keys to keep (None keeps all). The text
    is for the compilation report. Return None if `scaled_dot_product_attention` cannot express the
    mask.
    """
    queries, keys = (operand.value.shape[-2] for operand in (site.query, site.key))
    if site.mask is None:
        if not site.causal or compat.statically_true(keys == queries):
            return site.causal, None, []
        if compat.statically_true(queries == 1) or not compat.statically_true(keys > queries):
            return site.causal, None, []
        return True, queries, ["no query reaches the keys beyond the last query: they are cut off"]
    shown = _shown(info, site)
    if not form.is_plain or form.window is not None:
        return None
    if form.causal is None and form.keys is None:
        return False, None, [f"{shown} masks nothing: dropped"]
    if form.causal is None and isinstance(form.keys, int):
        return False, form.keys, [f"{shown} says that {form.keys} keys count: cut off and dropped"]
    if form.keys is not None or not compat.statically_true(form.causal == 0):
        return None
    if compat.statically_true(keys == queries):
        return True, None, [f"{shown} is causal: dropped, is_causal=True"]
    if compat.statically_true(keys > queries):
        what = f"{shown} is causal and reaches {queries} of {keys} keys"
        return True, queries, [f"{what}: dropped, is_causal=True over these"]
    return None


def _shown(info: GraphInfo, site: Site) -> str:
    if site.mask is None:
        return ""
    mask = info.value(site.mask)
    sizes = " x ".join(str(compat.size_hint(size)) for size in mask.shape)
    made = told_to_op.handed_in(info, site.mask)
    earlier = ", made in an earlier piece of the model," if made else ""
    return f"mask ({sizes}, {short(mask.dtype)}){earlier}"


def _asked(info: GraphInfo, site: Site) -> tuple[Form, Mask | None] | Decline:
    """Return the conditions under which a query of an attention call sees a key, and the call's
    mask, if there is one.
    """
    if site.mask is None:
        return Form(causal=0 if site.causal else None), None
    shape = (*site.query.value.shape[:-1], site.key.value.shape[-2])
    mask = _read_mask(info, site.mask, shape, is_folded=site.mask_is_folded)
    if mask is None:
        said = "the mask adds, or may add, values other than zero and minus infinity"
        return Decline("mask_is_bias", said, node=site.node)
    if site.takes_away:
        mask = replace(mask, formula=negated(mask.formula))
    return form_of(mask.formula, shape), mask


def _read_mask(
    info: GraphInfo, node: Node, shape: tuple[Any, ...], *, is_folded: bool
) -> Mask | None:
    """Return the condition under which a mask lets a query attend to a key.

    If `is_folded` is set, the attention has one head, and the mask has three axes: batch, queries
    and keys. The returned condition uses the four axes of attention calls: batch, heads, queries
    and keys."""
    if not is_folded:
        return reader_of(info).mask(node, shape)
    mask = reader_of(info).mask(node, (shape[0], *shape[2:]))
    apart = {0: axis(0), 1: axis(2), 2: axis(3)}
    return None if mask is None else replace(mask, formula=substituted(mask.formula, apart))


def _chosen_by(info: GraphInfo, form: Form) -> str | None:
    """If a mask consists of rows that a tensor of indices selects from a stored mask, return the
    name of this tensor.

    An example is `mask[None, None, input_pos]`. Return "" if the tensor of indices has no name, and
    None for any other mask.
    """
    nodes = {each.node for part in (*form.tables, *form.rest) for each in reads_in(part)}
    for node in nodes:
        index = _index_of(back_over(node, _MASK_VIEWS))
        if index is not None:
            return told_to_op.name_of(info, index)
    return None


_MASK_VIEWS = named("unsqueeze.default alias.default view.default expand.default slice.Tensor")


def _index_of(node: Node) -> Node | None:
    """Return the tensor of indices with which a node gathers from a tensor, or None."""
    for call in read(node) or ():
        if call.op is aten.index_select.default:
            return call.args["index"]  # type: ignore[no-any-return]
        if call.op is aten.index.Tensor:
            found = (each for each in call.args["indices"] if isinstance(each, Node))
            return next(found, None)
    return None


def _kept(info: GraphInfo, site: Site, form: Form, reason: str) -> Decline:
    """Return the reason why the pass left an attention call unchanged, for the graph's report."""
    chosen = _chosen_by(info, form)
    if chosen is not None:
        by = f"`{chosen}`" if chosen else "a tensor of positions"
        said = f"the mask is rows of a stored mask that {by} chooses"
        return Decline("mask_rows", f"{said}: kept, {reason}", node=site.node)
    hint = ""
    if form.rest:
        code = "unread_mask"
    elif site.softcap:
        code = "softcap"
    elif form.is_packed:
        code = "packed_mask"
    elif form.length or form.shifted:
        code = "cache_length"
    elif form.padding:
        code = "padding_mask"
        hint = "a batch without padding needs no attention_mask"
    elif form.window is not None:
        code = "window_mask"
    else:
        code = "empty_rows" if form.empty else "offset_causal"
    said = " and ".join(form.conditions)
    empty = " (some query attends to nothing, or may)" if code == "empty_rows" else ""
    capped = "the scores are capped by tanh, which PyTorch's kernels do not" if site.softcap else ""
    heads = "; ".join(filter(None, (capped, f"the mask is {said}{empty}" if said else "")))
    return Decline(code, f"{heads}: kept, {reason}", hint, site.node)


def _bases(info: GraphInfo, site: Site) -> tuple[tuple[Operand, Operand] | None, Decline | None]:
    """Return keys and values before their heads were repeated, or the reason why the rewrite must
    keep the repetition."""
    if site.grouped or not _same_heads(site.query, site.key):
        return None, None
    key, value = _unrepeated(info, site, site.key), _unrepeated(info, site, site.value)
    if key is None or value is None or not _same_heads(key[0], value[0]):
        return None, None
    writes = (info.written_between([base.node], first, site.node) for base, first in (key, value))
    write = next(filter(None, writes), None)
    if write is None:
        return (key[0], value[0]), None
    said = f"`{node_name(write)}` writes to them in between"
    return None, Decline("mutated", said, node=site.node)


def _same_heads(key: Operand, value: Operand) -> bool:
    return compat.statically_true(key.value.shape[1] == value.value.shape[1])


_COPIES = named("contiguous.default clone.default")


def _unrepeated(info: GraphInfo, site: Site, operand: Operand) -> tuple[Operand, Node] | None:
    """If an operand was computed by repeating the heads of another node, return that other node.

    Also return the first node of the repetition. For any other operand, return None.
    """
    if operand.unexpanded is not None and site.product is not None:
        return operand.unexpanded, site.product  # the product repeats it by broadcasting
    result, node = operand.value, back_over(operand.node, _COPIES)
    if operand.steps or result.dim() != 4 or call_of(node, *REPEATS) is None:
        return None
    repeated = without_repeat(info, node)
    return None if repeated is None else (Operand(repeated[1]), repeated[0][-1])


def _speed(info: GraphInfo, site: Site, op: str) -> list[str]:
    """Return a remark for the compilation report if the attention op's speed was not measured on
    this kind of GPU.

    The measurement compares the inserted attention op with the original nodes."""
    return [] if was_measured(site.query.value.device, op) else ["speed not measured on this GPU"]


def _insert(info: GraphInfo, editor: Editor, site: Site, plan: Plan) -> Node:
    """Insert a call of an attention op for attention that the model writes as several nodes.

    Queries, keys and values are cast to the dtype of the original result. Under autocast, the
    original queries, keys and values may have another dtype."""
    old = info.value(site.node)
    operands = (site.query, *(plan.bases or (site.key, site.value)))
    query, key, value = (operand.written(editor) for operand in operands)
    if plan.limit is not None:
        end = plan.limit
        if not isinstance(end, int):
            end = editor.call(aten.sym_size.int, query, -2)
        key, value = (editor.call(aten.slice.Tensor, node, -2, 0, end) for node in (key, value))
    taken = [editor.cast(node, old.dtype) for node in (query, key, value)]
    if plan.said is not None:
        return told_to_op.write(editor, site, plan.said, taken)
    how = {"scale": site.scale, "enable_gqa": site.grouped or plan.bases is not None}
    sdpa = aten.scaled_dot_product_attention.default
    return editor.call(sdpa, *taken, None, 0.0, plan.causal, **how)


def _is_pure(node: Node) -> bool:
    """Return whether a node may be erased if it has no users."""
    if node.op not in ("call_function", "call_method") or written_by(node):
        return False
    if not isinstance(compat.example_value(node), torch.Tensor):
        return False
    reading = read(node)
    return reading is not None and not any(
        torch.Tag.nondeterministic_seeded in call.op.tags for call in reading
    )
