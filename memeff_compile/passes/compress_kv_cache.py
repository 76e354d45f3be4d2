"""Rewrite attention over a low-bit KV cache into memeff::coded_kv_cache_attention.

The op reads the codes without decoding the whole cache.

    before: memeff.coded_kv_cache_append(*cache, k, v, ...)
            keys, values = memeff.coded_kv_cache_view(*cache, ...)
            y = scaled_dot_product_attention(q, repeat_kv(keys), repeat_kv(values), attn_mask=m)
    after:  memeff.coded_kv_cache_append(*cache, k, v, ...)
            y = memeff.coded_kv_cache_attention(q, *cache, ..., m)

The user creates the cache as a `memeff_compile.KVCache`. The pass does not move the calls that
append to the cache. If the pass declines an attention call, the result is correct but slow, because
every decoding step then decodes all keys and values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..kernels import coded_kv_cache as op_folder
from ..kernels import kv_cache
from .attention import cached
from .attention.repeated_heads import without_repeat
from .graph.base import Decline, Done, Gain
from .graph.canonical import read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, node_name

_POOL = len(op_folder.POOL)


@dataclass
class Site(cached.CachedSite):
    """An attention call that reads keys and values which were decoded from a low-bit KV cache.

    The dense view (`view`) is the node that decodes these keys and values. The site also has the
    nodes between the dense view and the call.
    """

    view: Node

    def tensors(self, info: GraphInfo) -> list[torch.Tensor | None]:
        """Return the tensors of the low-bit KV cache."""
        return [info.tensor(node) for node in self.view.args[:_POOL]]


class CompressKVCache(cached.CachedPass):
    name = "compress_kv_cache"

    def find(self, info: GraphInfo) -> Iterable[Site | Decline]:
        """Yield every attention call that reads a dense view (decoded keys and values), and every
        dense view that no attention reads."""
        for keeper in _keepers(info):
            if not keeper.has_codes:
                hint = "do not ask for few bits here: this model has no layer that can store codes"
                yield Decline("exact_layers", keeper.kept_exact, hint, _first_call(info))
        views = [node for node in info.visit(info.gm.graph.nodes) if _is_view(node)]
        if not views:
            return
        served = set()
        for node, call in cached.attention_calls(info):
            found = {_behind(info, call.args[name])[0] for name in ("key", "value")}
            for view in views:
                if view in found:
                    served.add(view)
                    yield Site(node, call, view)
        for view in views:
            if view not in served:
                yield _unread(view)

    def notes(self, info: GraphInfo) -> Iterable[tuple[str, str]]:
        """Return notes on the layers for which a low-bit cache stores all tokens exactly."""
        return [("exact_layers", k.kept_exact) for k in _keepers(info) if k.has_codes]

    def check(self, info: GraphInfo, match: Site) -> Decline | None:
        match.call = read_one(match.node) or match.call
        return (
            cached.unserved_setting(info, match, "give a mask")
            or _unserved(info, match)
            or _disturbed(info, match)
        )

    def gain(self, info: GraphInfo, match: Site) -> Gain | None:
        """Return a formula for the bytes of the decoded keys and values, and of the copies that
        repeat their heads for the query heads.
        """
        query, taken = (info.tensor(match.call.args[name]) for name in ("query", "key"))
        pool = match.tensors(info)
        codes, of_values, window = *pool[:2], pool[op_folder.POOL.index("k_window")]
        bits = _bits(match.view)
        if query is None or taken is None or codes is None or window is None or bits is None:
            return None
        most = bits if of_values is None else max(bits, _value_bits(codes, of_values, bits))
        b, h, g, n, d, s = sympy.symbols("B H G N D S", integer=True, positive=True)
        batch, heads, _, depth = map(compat.size_hint, query.shape)
        kv_heads, tokens = compat.size_hint(window.shape[1]), compat.size_hint(taken.shape[2])
        sizes = {"B": batch, "G": kv_heads, "N": tokens, "D": depth}
        # the dense view, and its copy for the query heads
        before = kv_cache.bytes_before(b, g, n, d, dtype=query.dtype)
        if compat.size_hint(taken.shape[1]) != kv_heads:
            before += kv_cache.bytes_before(b, h, n, d, dtype=query.dtype)
            sizes["H"] = heads
        group = op_folder.group_of(compat.size_hint(codes.shape[3]), depth, bits)
        if op_folder.engine_for(query.device, query.dtype, group) == "reference":
            return Gain(before, sympy.Integer(0), sizes)
        held, shared = compat.size_hint(codes.shape[2]), heads // kv_heads
        plan = op_folder.plan_for(batch * kv_heads, held, depth, most, query.device, shared)
        sizes |= {"H": heads, "S": plan.splits}
        return Gain(before, kv_cache.bytes_after(b, h, 1, d, splits=s), sizes)

    def rewrite(self, info: GraphInfo, match: Site, editor: Editor) -> Done:
        """Replace the node that decodes the cache, and the attention over the decoded keys and
        values, by one op that reads the codes.
        """
        given = match.call.args
        chains = [node for name in ("key", "value") for node in _behind(info, given[name])[1]]
        pool, maps = (
            match.view.args[: _POOL + 2],
            match.view.args[_POOL + 4 :],
        )  # norms among the first
        compat.hold_constant(match.view.args[_POOL + 2])
        settings = (_bits(match.view), given["attn_mask"], cached.held_scale(match.call), *maps)
        with editor.at(match.node):
            op = op_folder.coded_kv_cache_attention
            out = editor.call(op, given["query"], *pool, *settings)
        editor.replace(match.node, out)
        match.owned = [match.node, *chains, match.view]
        query = info.value(given["query"])
        is_one_row = query.is_cuda and compat.statically_true(query.shape[0] == 1)
        advice = cached.advice(is_one_row=is_one_row)
        return Done(match.node, _sentence(info, match), inductor=advice)


def _keepers(info: GraphInfo) -> list[op_folder.Keeper]:
    """Return those low-bit caches whose exact layers (the layers that store all tokens exactly) are
    all read in this graph.
    """
    if info.parent is not None:
        return []
    return op_folder.keepers_of(map(compat.example_input, info.placeholders))


def _first_call(info: GraphInfo) -> Node | None:
    return next((node for node, _ in cached.attention_calls(info)), None)


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and node.target is op_folder.coded_kv_cache_view


def _bits(view: Node) -> int | None:
    """Return the number of bits of a cache's codes, even if Dynamo made this number a symbol.

    The number is a symbol if two caches have different numbers of bits.
    """
    bits = compat.known_number(view.args[_POOL + 2])
    return None if bits is None else int(bits)


def _value_bits(codes: torch.Tensor, of_values: torch.Tensor, bits: int) -> int:
    """Return the number of bits with which a low-bit cache stores values."""
    k_block, v_block = (compat.size_hint(each.shape[3]) for each in (codes, of_values))
    return op_folder.value_bits_of(k_block, v_block, bits)


def _behind(info: GraphInfo, node: Any) -> tuple[Node | None, list[Node]]:
    """Return the dense view (the node that decodes a cache) from which `node` gets its value.

    If there is no dense view, return None. Also return the nodes after the dense view that repeat
    heads.
    """
    chain: list[Node] = []
    for _ in range(cached.MAX_CHAIN):
        if not isinstance(node, Node):
            break
        if node.target is operator.getitem and _is_view(node.args[0]):  # type: ignore[arg-type]
            return node.args[0], [*chain, node]  # type: ignore[return-value]
        stripped = without_repeat(info, node)
        if stripped is None:
            break
        nodes, node, _ = stripped
        chain += nodes
    return None, chain


def _readers(view: Node) -> Iterator[Node]:
    for part in view.users:
        yield from part.users


def _unread(view: Node) -> Decline:
    names = sorted({node_name(node) for node in _readers(view)})
    return Decline(
        "no_attention",
        "the dense view of a coded cache is read by "
        f"{', '.join(f'`{name}`' for name in names) or 'nothing'}, not by "
        "scaled_dot_product_attention with repeated heads at most",
        "load the model with attn_implementation='sdpa'",
        view,
    )


def _unserved(info: GraphInfo, match: Site) -> Decline | None:
    args = match.call.args
    read = (_behind(info, args[name]) for name in ("key", "value"))
    parts = [(view, chain[-1].args[1]) for view, chain in read if view is not None]
    if parts != [(match.view, 0), (match.view, 1)]:
        said = "keys and values of attention are not the two parts of one dense view"
        return Decline("other_operands", said)
    query = info.tensor(args["query"])
    if not compat.is_fake(query) or query.dim() != 4:
        return Decline("unsupported", "the query is no plain tensor of four dimensions")
    if not compat.statically_true(query.shape[2] == 1):
        return Decline(
            "many_queries",
            f"there are {query.shape[2]} queries per sequence; the op serves one, which is "
            "decoding. More, as in a prompt in pieces or in assisted decoding, read the dense view",
        )
    mask = args["attn_mask"]
    if mask is None:
        return Decline(
            "no_mask",
            "attention over the dense view has no mask, so it sees the whole buffer, filled or not",
            "give a boolean mask",
        )
    seen, told = info.tensor(mask), match.view.args[_POOL + 3]
    limit: Any = compat.example_value(told) if isinstance(told, Node) else told
    is_whole = compat.is_fake(seen) and (seen.dtype, seen.dim()) == (torch.bool, 4)
    if seen is None or not is_whole or not compat.statically_true(seen.shape[3] == limit):
        return Decline(
            "mask_form",
            "the mask is not boolean with four dimensions, the last as long as the cache; masks "
            "that are added to scores are not served",
            "give a boolean mask of (batch or 1, 1, 1, cache length)",
        )
    held: Any = match.tensors(info)
    if any(tensor is None for tensor in held):
        return Decline("unsupported", "a tensor of the cache is no plain tensor")
    bits = _bits(match.view)
    if bits is None:
        return Decline("unsupported", "the bits of the cache vary within one compilation")
    sentence = op_folder.supports(query, held, bits, seen)
    sentence = sentence or op_folder.unproven(query, held, bits)
    return None if sentence is None else Decline("unsupported", sentence)


def _disturbed(info: GraphInfo, match: Site) -> Decline | None:
    """Return a Decline (the reason for no rewrite) if a low-bit KV cache has to be decoded anyway.

    Otherwise return None. `match` is an attention call that reads keys and values decoded from the
    cache. The cache has to be decoded if another node also reads these keys and values. The same
    holds if a node writes to the cache, or to these keys and values, before the attention call
    reads them.
    """
    for user in _readers(match.view):
        if not _leads_to(user, match.node):
            return Decline(
                f"view_used({node_name(user)})",
                f"the dense view is also used by `{node_name(user)}`, so it has to be computed",
                "do not ask for attention weights, nor read the cache inside the model",
            )
    held = (*match.view.args[:_POOL], *match.view.args[_POOL + 4 :])  # the maps last
    read = [node for node in held if isinstance(node, Node)]
    found = info.written_between([*read, *match.view.users], match.view, match.node)
    if found is None:
        return None
    said = (
        f"`{node_name(found)}` writes to the cache or to its dense view before attention reads it"
    )
    return Decline("mutated", said, "write before reading")


def _leads_to(node: Node, end: Node) -> bool:
    """Return whether a chain of at most `MAX_CHAIN` nodes, without branches, leads from `node` to
    `end`.

    Each node before `end` has exactly one user.
    """
    for _ in range(cached.MAX_CHAIN):
        if node is end:
            return True
        if len(node.users) != 1:
            return False
        (node,) = node.users
    return False


_ON_MERGING = ". Merging layers saves memory, not time: each layer of a pair "
_ON_MERGING += "reads all that they share"


def _sentence(info: GraphInfo, match: Site) -> str:
    query, codes = info.value(match.call.args["query"]), info.value(match.view.args[0])
    width, told = _bits(match.view) or 0, match.view.args[_POOL + 3]
    length = compat.example_value(told) if isinstance(told, Node) else told
    held, depth, tokens = map(compat.size_hint, (codes.shape[3], query.shape[3], length))
    group = op_folder.group_of(held, depth, width)
    name = op_folder.engine_for(query.device, query.dtype, group, width)
    v_width = _value_bits(codes, info.value(match.view.args[1]), width)
    form, what = f"in codes of {width} bits", "the codes"
    if v_width != width:
        form = f"in codes of {width} bits, values of {v_width}"
    if width == op_folder.PLAIN:
        form, what = "as they come", "them"
    has_lengths = match.view.args[_POOL] is not None  # of keys
    is_aligned = any(each is not None for each in match.view.args[_POOL + 4 :])
    is_merged = is_aligned or has_lengths
    which = "directions" if has_lengths else "directions of values"
    shared = f"whose {'aligned ' * is_aligned}{which} two layers share, " if is_merged else ""
    return (
        f"attention over a cache of {tokens} tokens {shared}{form} -> "
        f"memeff::coded_kv_cache_attention, which reads {what}; engine "
        f"{name}: {op_folder.ENGINES[name]}{_ON_MERGING if is_merged else ''}"
    )
