"""Rewrite attention without gradients into memeff::quantized_attention, if the user requests it.

    before: out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    after:  out = memeff.quantized_attention(q, k, v, ahead=0, level="8b")

With `ahead=0`, no query attends to a later key, as with is_causal=True.

The pass runs after the pass recover_attention. The pass rewrites calls of PyTorch's attention
without a mask, and calls of memeff::attention with any masking arguments. Paper: SageAttention2,
arXiv 2411.10958.

The pass is lossy and therefore opt-in. The option memeff.attention names a precision level such as
"8b", or a table with a level for each module. If a gradient is needed, the pass leaves the
attention exact, and the compilation report says why.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..kernels import attention as exact_folder
from ..kernels import quantized_attention as op_folder
from ..kernels.checks import short
from ..kernels.device import kernels_need, was_measured, where_it_runs
from .attention.sites import have_one_size
from .attention.torch_kernels import kernels_chosen, laid_out_as
from .graph.base import Decline, Done, GraphPass
from .graph.canonical import aten, call_of
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, kind_among, node_name

# Queries and keys from which on the low-bit form was faster than PyTorch's on an H200, for every
# kind of mask and head; below, making the codes costs more than they save.
SHORTEST = 8192
# The same where at least four query heads share a key head: there are fewer codes to make.
SHORTEST_GROUPED = 4096
# Heads up to this size gain no time from sharing keys at that length; tiles hold this many or twice
# as many.
NARROW = 64
# Pairs of a query and a key, over all heads, that fill the GPU as the measurements did.
FEWEST_PAIRS = 32 * 4096 * 4096

NEVER_FASTER = {
    "8b+f16": "was slower than PyTorch's kernels wherever it was measured",
    "4b": "was nowhere measured to be faster than PyTorch's kernels",
}
"""Levels that need a minimum length: if none is set, a call at these levels stays exact."""

WIDEST = 128  # wider heads were measured to be no faster than PyTorch's kernels


@dataclass(frozen=True)
class Asked:
    """The arguments of an attention call, as the graph passes them."""

    operands: tuple[Node, Node, Node]  # q, k and v
    tables: tuple[Any, Any, Any] = (None, None, None)  # key_mask, query_ids, key_ids: None or nodes
    ahead: Any = None  # how far a key may be ahead of a query; None for no bound
    behind: Any = None  # how far before a query; None for no bound
    scale: Any = None  # factor of the scores; None for 1 / sqrt(head dimension)
    # "whole" without a condition, "causal" where PyTorch's kernels know the mask, "told" where
    # memeff::attention serves it
    kind: str = "whole"


@dataclass
class Site:
    """An attention call: its node, the node of the attention result, and the call's arguments.

    The two nodes differ if the call returns several tensors."""

    node: Node
    call: Node
    asked: Asked
    levels: tuple[str, ...]
    counter: torch.Tensor | None = None
    left_out: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """Return the precision level of this attention call, such as "8b" (8 bits).

        The compilation report shows this text. If the level changes between executions of this
        call, the text lists the levels in order."""
        if len(self.levels) == 1:
            return self.levels[0]
        return "by call: " + ", ".join(
            f"{level} x {len(list(same))}" for level, same in groupby(self.levels)
        )


@dataclass(frozen=True)
class Place:
    """One attention call in a graph, and the name that a calibration table uses for it."""

    node: Node  # the node that has the result
    asked: Asked | Decline  # its arguments, or why this pass does not serve it
    name: str  # the path of the module, with `#1` for the second attention of one call of it
    call: int  # how often this graph has called it before
    counter: str  # a key that identifies the module in this process


@dataclass
class Match:
    """Attention calls that are all rewritten to memeff::quantized_attention in the same way."""

    sites: list[Site] = field(default_factory=list)
    sentence: str = ""


class QuantizeAttention(GraphPass):
    """The pass that replaces exact attention by attention in 8 or 4 bits. The report of this pass
    shows no saved bytes, because the pass saves time, not memory."""

    name = "quantize_attention"

    def find(self, info: GraphInfo) -> Iterable[Match | Decline]:
        """Yield one match for each group of attention calls that are rewritten in the same way.

        Then yield a Decline (the reason) for each attention call that cannot be rewritten. The
        rewrite replaces an attention call by memeff::quantized_attention."""
        matches: dict[str, Match] = {}
        declines: list[Decline] = []
        places = {place.node: place for place in _places(info)}
        calls = Counter(place.name for place in places.values())
        for node in info.visit(places):
            place = places[node]
            site = _site_for(info, place, calls[place.name])
            if isinstance(site, Decline):
                declines.append(replace(site, sites=1))
                continue
            sentence = _sentence(info, site)
            key = self.skipped(info, place.node) or sentence
            match = matches.setdefault(key, Match(sentence=sentence))
            match.sites.append(site)
        yield from matches.values()
        yield from declines

    def places(self, match: Match) -> Sequence[Node]:
        return [site.node for site in match.sites]

    def parts(self, match: Match) -> Sequence[Match]:
        return [Match([site], match.sentence) for site in match.sites]

    def rewrite(self, info: GraphInfo, match: Match, editor: Editor) -> Done:
        for site in match.sites:
            with editor.at(site.node):
                result = _insert(info, editor, site)
                editor.replace(site.node, laid_out_as(editor, site.node, result))
        return Done(match.sites[0].node, match.sentence, sites=len(match.sites))

    def dead(self, match: Match) -> Sequence[Node]:
        return [node for site in match.sites for node in dict.fromkeys((site.node, site.call))]


def _places(info: GraphInfo) -> list[Place]:
    """Return all attention calls of a graph, with the names that calibration gives them."""
    found: list[Place] = []
    inside: Counter[tuple[str, str]] = Counter()
    calls: Counter[str] = Counter()
    for node in info.visit(info.gm.graph.nodes):
        asked = _asked(info, node)
        if asked is None:
            continue
        path, key = info.module_path(node), info.module_key(node)
        number = inside[path, key]
        inside[path, key] += 1
        name = f"{path}#{number}" if number else path
        found.append(Place(node, asked, name, calls[name], f"{key.partition('@')[0]} {name}"))
        calls[name] += 1
    return found


def _asked(info: GraphInfo, node: Node) -> Asked | Decline | None:
    """Return the arguments of an attention call, or the reason why the pass does not support the
    call; return None for other nodes.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, Node) or source.target is not exact_folder.attention:
            return None
        return _asked_of_op(source) if node.args[1] == 0 else None
    is_named = node_name(node) == "scaled_dot_product_attention"
    call = call_of(node, aten.scaled_dot_product_attention.default) if is_named else None
    return None if call is None else _asked_of_call(info, node, call.args)


def _asked_of_call(info: GraphInfo, node: Node, given: Any) -> Asked | Decline | None:
    if given["dropout_p"] != 0:
        return Decline("dropout", "attention drops weights", "call model.eval()", node)
    if given["attn_mask"] is not None:
        said = "attention has a mask that stays as it is, and the op takes none"
        hint = "the record of recover_attention about the mask says why"
        return Decline("dense_mask", said, hint, node)
    operands = (given["query"], given["key"], given["value"])
    if any(info.tensor(each) is None for each in operands):
        return None
    ahead, kind = (0, "causal") if given["is_causal"] else (None, "whole")
    return Asked(operands, ahead=ahead, scale=given["scale"], kind=kind)


def _asked_of_op(call: Node) -> Asked | Decline:
    settings = dict(call.kwargs)
    if settings.get("softcap"):
        return Decline("softcap", "the scores are capped by tanh, which the op does not", "", call)
    if settings.get("empty_rows", "zeros") != "zeros":
        said = "here a query without keys gets the mean of all values; the op gives zeros"
        hint = "use attn_implementation='sdpa', where such a query gets zeros"
        return Decline("empty_rows", said, hint, call)
    q, k, v, *tables = (*call.args, None, None, None)[:6]
    told = {name: settings.get(name) for name in ("ahead", "behind", "scale")}
    return Asked((q, k, v), tuple(tables), **told, kind="told")  # type: ignore[arg-type]


def _site_for(info: GraphInfo, place: Place, calls: int) -> Site | Decline:
    """Return the rewrite of an attention call, or the reason why the pass does not rewrite it."""
    found, node = place.asked, place.node
    if isinstance(found, Decline):
        return replace(found, node=node)
    levels = info.options.attention_levels(place.name)
    if not levels:
        said = "the table of levels does not name the module: kept exact"
        return Decline("not_in_table", said, "calibrate on inputs that reach it", node)
    if len(levels) == calls:
        levels = levels[place.call : place.call + 1]
    if len(set(levels)) == 1:
        levels = levels[:1]
    if levels == ("exact",):
        return Decline("exact_in_table", "the table keeps it exact", "", node)
    reason = _reason_against(info, node, found)
    if reason is not None:
        return reason
    left_out: tuple[str, ...] = ()
    if info.options.attention_length is None:
        left_out = tuple(level for level in NEVER_FASTER if level in levels)
        levels = tuple("exact" if level in left_out else level for level in levels)
    if set(levels) == {"exact"}:
        why = "; ".join(f"{level} {NEVER_FASTER[level]}" for level in left_out)
        return _not_faster(node, why)
    call: Any = node.args[0] if found.kind == "told" else node
    if len(levels) == 1:
        return Site(node, call, found, levels)
    # A parameter of the graph lives as long as the model that is compiled.
    real = map(compat.example_input, info.placeholders)
    owner = next((each for each in real if isinstance(each, torch.nn.Parameter)), None)
    counter = op_folder.counter_for(place.counter, levels, owner)
    return Site(node, call, found, levels, counter, left_out)


def _reason_against(info: GraphInfo, node: Node, asked: Asked) -> Decline | None:
    result = info.tensor(node)
    query, key, value = map(info.value, asked.operands)
    if result is None or result.requires_grad:
        said = "attention takes part in a backward pass: kept exact"
        hint = "low bits serve inference; use torch.no_grad() or torch.inference_mode()"
        return Decline("needs_gradient", said, hint, node)
    kind = kind_among(asked.operands)
    if kind:
        what = f"an operand of attention is a {kind}, which the op does not look into"
        return Decline(f"subclass_operand({kind})", what, "", node)
    if not isinstance(asked.scale, (int, float, type(None))):
        return Decline("scale_not_constant", "the scale varies from call to call", "", node)
    if result.dtype not in (torch.bfloat16, torch.float16):
        what = f"attention computes in {short(result.dtype)}, of which 8 bits leave more out than "
        return Decline("dtype", f"{what}of 16", "cast the model to bfloat16 or float16", node)
    chosen = kernels_chosen(info, node, "leave the choice to PyTorch")
    if chosen is not None:
        return chosen
    unserved = _unserved(query, key, value)
    if unserved:
        return Decline("unsupported", unserved, "", node)
    return _without_gain(info, node, asked, query, key)


def _unserved(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        return "the op needs (batch, heads, length, depth)"
    if not have_one_size(query, key, value):
        return "the op needs heads of one size and one batch"
    if not compat.statically_true(query.shape[1] % key.shape[1] == 0):
        return "the op needs a multiple of the key heads as query heads"
    depth = query.shape[3]
    if not isinstance(depth, int) or not 0 < depth <= exact_folder.MAX_DEPTH:
        return f"the op serves head dimensions up to {exact_folder.MAX_DEPTH}"
    return ""


def _without_gain(
    info: GraphInfo, node: Node, asked: Asked, query: torch.Tensor, key: torch.Tensor
) -> Decline | None:
    """Return the reason why attention in low bits would not be faster than exact attention, or
    None.

    Attention in low bits is faster if there are more tokens than a measured limit. A limit that the
    user sets takes precedence. If the number of tokens is dynamic (can differ between calls of the
    graph), a guard compares it with the limit. Dynamo then compiles the graph again for a call on
    the other side of the limit.
    """
    queries, keys = query.shape[2], key.shape[2]
    least = info.options.attention_length
    if least is not None:
        is_long = compat.holds(keys >= least)
        return None if is_long else _too_few(node, keys, least, "memeff.attention.length")
    device, depth = where_it_runs(query.device), query.shape[3]
    if device.type != "cuda":
        return _not_faster(node, f"on {device.type} the arithmetic of low bits is emulated")
    if op_folder.engine_for(query.device, query.dtype) == "reference":
        return _not_faster(node, f"the kernels need {kernels_need(query.device)}")
    if depth > WIDEST:
        return _not_faster(node, f"heads of {depth} were measured to be no faster in 8 bits")
    if 4 * depth < 3 * (NARROW if depth <= NARROW else WIDEST):
        what = "leave much of a tile empty, and were not measured to be faster"
        return _not_faster(node, f"heads of {depth} {what}")
    is_grouped = compat.size_hint(query.shape[1]) >= 4 * compat.size_hint(key.shape[1])
    least = SHORTEST_GROUPED if is_grouped and depth > NARROW else SHORTEST
    lengths = [queries, keys]
    if isinstance(asked.ahead, int) and isinstance(asked.behind, int):
        # Keys that would be as much work under a causal mask as those in the window are.
        lengths.append(max(0, 2 * (asked.ahead + asked.behind + 1)))
    for length in lengths:
        if not compat.holds(length >= least):
            return _too_few(node, length, least, "what was measured")
    pairs = query.shape[0] * query.shape[1] * queries * keys
    if not compat.holds(pairs >= FEWEST_PAIRS):
        return _not_faster(node, "there are too few heads to fill the GPU at this length")
    return None


def _too_few(node: Node, length: Any, least: int, source: str) -> Decline:
    few = compat.size_hint(length)
    why = f"{few} queries or keys are fewer than {least}, where low bits start to pay by {source}"
    return _not_faster(node, why)


def _not_faster(node: Node, why: str) -> Decline:
    hint = "set memeff.attention.length to use low bits anyway"
    return Decline("not_faster", f"{why}: kept exact", hint, node)


def _insert(info: GraphInfo, editor: Editor, site: Site) -> Node:
    """Insert a call of the low-bit attention op, and return the node that has its result.

    Queries, keys and values are first cast to the dtype of the original attention's result."""
    dtype = info.value(site.node).dtype
    operands = [editor.cast(node, dtype) for node in map(info.current, site.asked.operands)]
    operands += site.asked.tables
    told = {name: getattr(site.asked, name) for name in ("ahead", "behind", "scale")}
    if site.counter is not None:
        counter = editor.hold("attention_calls", site.counter)
        by_call = {"levels": list(site.levels), "counter": counter}
        return editor.call(op_folder.quantized_attention_by_call, *operands, **by_call, **told)
    told |= {"level": site.level, "with_lse": False}
    return editor.item(editor.call(op_folder.quantized_attention, *operands, **told), 0)


def _sentence(info: GraphInfo, site: Site) -> str:
    query = info.value(site.asked.operands[0])
    engine = op_folder.engine_for(query.device, query.dtype)
    name = "memeff::attention" if site.asked.kind == "told" else "scaled_dot_product_attention"
    mask = " (causal)" if site.asked.kind == "causal" else ""
    arithmetic = "; ".join(
        op_folder.LEVELS[level] for level in dict.fromkeys(site.levels) if level != "exact"
    )
    op = "quantized_attention" + ("_by_call" if len(site.levels) > 1 else "")
    parts = [
        f"{name}{mask} -> memeff::{op}, level {site.level}, engine {engine}; lossy: {arithmetic}"
    ]
    if not op_folder.has_fp8(query.device) and site.levels != ("8b+f16",):
        parts.append("this GPU does not multiply E4M3: weights and values in fp16")
    elif query.shape[3] > op_folder.WIDEST_E4M3 and site.levels != ("8b+f16",):
        parts.append(f"heads of {query.shape[3]}: weights and values in fp16")
    if len(site.levels) > 1:
        parts.append("calls are counted while the model runs")
    parts += [f"{level} {NEVER_FASTER[level]}: exact is used instead" for level in site.left_out]
    if not was_measured(query.device, "quantized_attention"):
        parts.append("speed not measured on this GPU")
    return "; ".join(parts)
