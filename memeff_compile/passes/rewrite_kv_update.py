"""Rewrite attention over a static KV cache into memeff::kv_cache_attention.

This op reads only the filled part of the cache.

    before: k_cache.index_copy_(2, p, k); v_cache.index_copy_(2, p, v)
            K, V = repeat_kv(k_cache), repeat_kv(v_cache)
            y = scaled_dot_product_attention(q, K, V, attn_mask=arange(N) <= q_positions)
    after:  memeff.kv_cache_append(k_cache, v_cache, k, v, p)
            y = memeff.kv_cache_attention(q, k_cache, v_cache, last)

memeff.kv_cache_append also writes to the caches in place. The pass does not change the order of
writes to the same cache.

`last` contains, for each query, the index of the last key that the query may attend to. Later keys
do not affect the result. If the mask compares key indices with the positions of the queries, `last`
is computed from these positions on the device. The mask is then removed. Any other boolean mask,
such as the one that generate() builds outside of the graph, is passed to memeff::kv_cache_attention
together with `last`. In this case, `last` is computed from the mask once per forward pass. So in
each of the two cases, the result equals that of attention over the whole cache with the mask.

The pass deletes only nodes that it replaces. The pass does not call Graph.eliminate_dead_code,
because that would also delete the writes to the cache, whose results no node uses.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..kernels import kv_cache as op_folder
from .attention import cached
from .attention.repeated_heads import without_repeat
from .graph.base import Decline, Done, Gain
from .graph.canonical import aten, back_over, call_of, named, read, read_one
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, node_name, same_shape

# Queries times query heads per key-value head. More is a prefill, which SDPA's kernels serve.
MAX_ROWS = 64
# Without a Triton kernel the only gain is the copies per query head; small ones do not pay.
MIN_COPIED_BYTES = 4 << 20

_NO_CAUSAL = "is_causal compares places in the buffer; give a mask of positions"


@dataclass(frozen=True)
class Cache:
    """The node from which attention reads keys or values, and the cache tensor from which this node
    is computed."""

    node: Node
    repeat: Any
    # the nodes from attention's operand back to the cache, the cache excluded
    chain: tuple[Node, ...]


@dataclass(frozen=True)
class Visible:
    """The keys that each query may attend to.

    If `mask` is given, these are the keys that the mask makes visible. Otherwise, the query may
    attend to the keys up to the index `bound` - `minus`. `bound` is a tensor with one position per
    query, and `minus` is 0 or 1.
    """

    mask: Node | None
    bound: Node | None = None
    compared_at: Node | None = None
    minus: int = 0
    chain: tuple[Node, ...] = ()


@dataclass
class Site(cached.CachedSite):
    """An attention call that reads caches to which the graph has written, together with these
    caches and the call's mask."""

    storages: frozenset[int]
    caches: tuple[Cache, ...] = ()
    visible: Visible | None = None

    @property
    def shown(self) -> Visible:
        """Return which keys the queries may attend to, or None if the pass could not read the
        mask."""
        assert self.visible is not None
        return self.visible


class RewriteKVUpdate(cached.CachedPass):
    name = "rewrite_kv_update"

    def find(self, info: GraphInfo) -> Iterable[Site | Decline]:
        """Yield every attention call whose keys and values come from graph inputs to which the
        graph writes before the call."""
        writes = [w for w in info.writes if _is_cache_write(w.node)]
        if not writes:
            return
        inputs = _storages(info, info.gm.graph.nodes)
        for node, call in cached.attention_calls(info):
            before = (w for w in writes if w.position < info.positions[node])
            storages = inputs & _storages(info, (t for w in before for t in w.targets), any_op=True)
            if all(_reads_from(info, call.args[name], storages) for name in ("key", "value")):
                yield Site(node, call, storages)

    def check(self, info: GraphInfo, match: Site) -> Decline | None:
        """Return the reason why the pass declines a match, or None.

        The nodes of the match are read again, because an earlier rewrite may have changed them.
        """
        match.call = read_one(match.node) or match.call
        read = (_cache(info, match.call.args[name], match.storages) for name in ("key", "value"))
        match.caches = tuple(cache for cache in read if cache is not None)
        match.visible = _visible(info, match)
        return (
            cached.unserved_setting(info, match, _NO_CAUSAL)
            or _unserved(info, match)
            or _changed_meanwhile(info, match)
            or _without_gain(info, match)
        )

    def gain(self, info: GraphInfo, match: Site) -> Gain | None:
        """Return formulas for the bytes that attention over the cache allocates before and after
        the rewrite.

        The bytes before are those of the copies of keys and values for each query head. Return None
        if the graph makes no such copies."""
        query = info.tensor(match.call.args["query"])
        if query is None or not _copies(info, match):
            return None
        cache = info.value(match.caches[0].node)
        b, h, m, n, d, s = sympy.symbols("B H M N D S", integer=True, positive=True)
        hints = [compat.size_hint(size) for size in (*query.shape[:3], *cache.shape[2:])]
        sizes = dict(zip("BHMND", hints, strict=True))
        before = op_folder.bytes_before(b, h, n, d, dtype=query.dtype)
        if op_folder.engine_for(query.device, query.dtype) == "reference":
            del sizes["M"]
            return Gain(before, sympy.Integer(0), sizes)
        kv_heads = compat.size_hint(cache.shape[1])
        plan = op_folder.plan_for(tuple(hints), kv_heads, query.dtype.itemsize, query.device)
        sizes["S"] = plan.splits
        return Gain(before, op_folder.bytes_after(b, h, m, d, splits=s), sizes)

    def rewrite(self, info: GraphInfo, match: Site, editor: Editor) -> Done:
        """Combine the writes of new keys and of new values into one op if that is safe, and make
        attention read the caches directly."""
        sentence, (key, value), visible = _sentence(info, match), match.caches, match.shown
        chain = [n for n in (*key.chain, *value.chain) if not _is_cache_write(n)]
        match.owned = [match.node, *chain]
        pair = _pair(info, match)
        if pair is not None:
            first, second, operands = pair
            with editor.at(second):
                editor.call(op_folder.kv_cache_append, *operands)
            match.owned += [first, second]
        with editor.at(match.node):
            mask = visible.mask
            last = _bound(editor, visible) if mask is None else _last(info, editor, mask, match)
            taken = (match.call.args["query"], key.node, value.node, last, mask)
            out = editor.call(op_folder.kv_cache_attention, *taken, cached.held_scale(match.call))
            old = info.value(match.node)
            # PyTorch's result is contiguous by head, the op's is not; users may need a view of it.
            if not compat.statically_true(old.shape[2] == 1) and old.is_contiguous():
                out = editor.call(aten.clone.default, out, memory_format=torch.contiguous_format)
        editor.replace(match.node, out)
        match.owned += visible.chain
        return Done(match.node, sentence, inductor=_advice(info, match))


_WRITING_METHODS = ("index_copy_", "index_put_", "copy_", "__setitem__")


def _is_cache_write(node: Node) -> bool:
    """Return whether `node` writes new tokens to some positions of a tensor."""
    if node.target is operator.setitem or node.target is op_folder.kv_cache_append:
        return True
    return node_name(node) in _WRITING_METHODS


def _storages(info: GraphInfo, nodes: Iterable[Node], *, any_op: bool = False) -> frozenset[int]:
    """Return those storages of `nodes` that also exist outside of the graph, such as the storages
    of caches.
    """
    held = (node for node in nodes if any_op or node.op in ("placeholder", "get_attr"))
    return frozenset(map(compat.storage_key, filter(compat.is_fake, map(info.tensor, held))))


def _reads_from(info: GraphInfo, node: Any, storages: frozenset[int]) -> bool:
    """Return whether the memory of `node` is one of `storages`.

    Also return True if `node` is a direct or indirect copy of a node whose memory is one of them.
    """
    for _ in range(cached.MAX_CHAIN):
        value = info.tensor(node)
        if not compat.is_fake(value):
            return False
        if compat.storage_key(value) in storages:
            return True
        operands = [] if node.op not in ("call_function", "call_method") else node.all_input_nodes
        operands = [n for n in operands if info.tensor(n) is not None]  # and not a symbolic size
        if len(operands) != 1:
            return False
        (node,) = operands
    return False


def _cache(info: GraphInfo, node: Node, storages: frozenset[int]) -> Cache | None:
    """Go back from keys or values, through nodes that repeat heads, to the cache; return None if
    there are other nodes on the way.
    """
    chain: list[Node] = []
    repeat: Any = 1
    for _ in range(cached.MAX_CHAIN):
        stripped = without_repeat(info, node)
        if stripped is None:
            value = info.tensor(node)
            is_one = value is not None and value.dim() == 4
            is_one = is_one and compat.storage_key(info.value(node)) in storages
            return Cache(node, repeat, tuple(chain)) if is_one else None
        nodes, node, times = stripped
        chain, repeat = [*chain, *nodes], repeat * times
    return None


def _copies(info: GraphInfo, match: Site) -> bool:
    """Return whether the graph copies keys and values for each query head that uses them."""
    if len(match.caches) < 2 or not all(cache.chain for cache in match.caches):
        return False
    pairs = [(info.tensor(c.chain[0]), info.tensor(c.node)) for c in match.caches]
    known = [(taken, held) for taken, held in pairs if taken is not None and held is not None]
    apart = [compat.storage_key(taken) != compat.storage_key(held) for taken, held in known]
    return len(known) == len(pairs) and all(apart)


def _visible(info: GraphInfo, match: Site) -> Visible | None:
    """Return the keys that the mask of an attention call lets queries attend to.

    Return None if there is no mask, if the mask is not boolean, or if the mask differs between
    heads.
    """
    mask = match.call.args["attn_mask"]
    value = info.tensor(mask)
    if not match.caches or not compat.is_fake(value):
        return None
    cache = info.value(match.caches[0].node)
    by_position = _by_position(info, mask, cache.shape[2])
    if by_position is not None:
        return by_position
    is_whole = same_shape(value.shape[1::2], (1, cache.shape[2]))
    return Visible(mask) if value.dtype == torch.bool and value.dim() == 4 and is_whole else None


_TRANSPARENT = named("expand.default alias.default contiguous.default")
_COMPARED = {  # the side of the keys, the side of the positions, whether equal is seen
    aten.le.Tensor: ("self", "other", True),
    aten.lt.Tensor: ("self", "other", False),
    aten.ge.Tensor: ("other", "self", True),
    aten.gt.Tensor: ("other", "self", False),
}


def _by_position(info: GraphInfo, mask: Node, keys: Any) -> Visible | None:
    """If a mask is `arange(N) <= positions[..., None]`, possibly broadcast, return the keys that
    this mask makes visible; otherwise return None.
    """
    chain: list[Node] = []
    node: Node = back_over(mask, _TRANSPARENT, chain)
    if (call := call_of(node, *_COMPARED)) is None:
        return None
    key_side, query_side, equal = _COMPARED[call.op]
    places, positions = call.args[key_side], call.args[query_side]
    if not _counts_keys(info, places, keys) or not _is_per_query(info, positions):
        return None
    return Visible(None, positions, node, 0 if equal else 1, (*chain, node))


def _counts_keys(info: GraphInfo, node: Node, keys: Any) -> bool:
    """Return whether `node` contains the numbers 0 to `keys` - 1 along its last dimension."""
    value = info.tensor(node)
    if value is None or not same_shape(value.shape, (*[1] * (value.dim() - 1), keys)):
        return False
    for _ in range(cached.MAX_CHAIN):
        held = info.tensor(node)
        # Views keep the order; all the keys must be there at every step, in a type that holds them.
        if held is None or held.dtype not in _INDICES or not same_shape(held.shape[-1:], (keys,)):
            return False
        calls = read(node)
        if not calls or any(c.op not in _KEEPS_COUNT for c in calls[1:]):
            return False
        if calls[0].op in _ARANGE:
            given = calls[0].args
            return bool(given.get("start", 0) == 0 and given.get("step", 1) == 1)
        adds_nothing = calls[0].op in _ADDS and calls[0].args["other"] == 0
        if calls[0].op not in _KEEPS_COUNT and not adds_nothing:
            return False
        node = calls[0].args["self"]
    return False


_INDICES = (torch.int32, torch.int64)
_ADDS = named("add.Tensor add.Scalar")
_ARANGE = named("arange.default arange.start arange.start_step")
_KEEPS_COUNT = named("unsqueeze.default view.default reshape.default alias.default to.dtype")


def _is_per_query(info: GraphInfo, node: Node) -> bool:
    """Return whether `node` has the shape (B, 1, M, 1) or (M, 1).

    There are B sequences and M queries. B and M may be replaced by 1."""
    value = info.tensor(node)
    if value is None or value.dtype not in _INDICES:
        return False
    if value.dim() == 4:
        return same_shape((value.shape[1], value.shape[3]), (1, 1))
    return value.dim() == 2 and same_shape(value.shape[1:], (1,))


def _bound(editor: Editor, visible: Visible) -> Node:
    """Return the last key that each query may attend to, as a tensor of shape (B or 1, M or 1).

    The tensor is computed from the positions with which the mask compares key indices."""
    positions = visible.bound
    assert positions is not None
    has_heads = compat.example_value(positions).dim() == 4
    turned = (aten.squeeze.dims, positions, [1, 3]) if has_heads else (aten.t.default, positions)
    last = editor.call(*turned)
    return editor.call(aten.sub.Scalar, last, visible.minus) if visible.minus else last


def _last(info: GraphInfo, editor: Editor, mask: Node, match: Site) -> Node:
    """Return the node that computes, from a mask, the last key that each query may attend to.

    Attention calls that read the same mask share this node, if no node writes to the mask between
    these calls.
    """
    end = info.positions[match.node]
    for user in mask.users:
        begin = info.positions.get(user, end) if user.target is op_folder.kv_cache_last else end
        if begin < end and info.written_alike(mask, begin, end) is None:
            return user
    return editor.call(op_folder.kv_cache_last, mask)


def _unserved(info: GraphInfo, match: Site) -> Decline | None:
    """Return the property of caches, mask or shapes that memeff::kv_cache_attention does not
    support, or None if the op supports all of them."""
    args = match.call.args
    if len(match.caches) < 2:
        return Decline(
            "cache_form",
            "between the cache and attention there is more than a repetition of heads, such as a "
            "cast, a slice or a dequantisation",
            "keep the cache in the dtype of the queries and pass it whole",
        )
    key, value = match.caches
    query, taken = info.tensor(args["query"]), info.tensor(args["key"])
    if query is None or taken is None or query.dim() != 4 or key.repeat != value.repeat:
        return Decline("cache_form", "keys and values are not repeated alike, or not (B, H, N, D)")
    if not same_shape(query.shape[:1], taken.shape[:1]):
        return Decline("cache_form", "queries and keys differ in their batch")
    if not same_shape(query.shape[1:2], taken.shape[1:2]) and not args["enable_gqa"]:
        return Decline("cache_form", "queries and keys differ in their heads")
    if match.visible is None and args["attn_mask"] is None:
        return Decline(
            "no_mask",
            "attention over the cache has no mask, so it sees the whole buffer, filled or not",
            "give a boolean mask, or slice the cache to what is filled",
        )
    if match.visible is None:
        return Decline(
            "mask_form",
            "the mask is neither a comparison of slots with positions nor boolean and equal for "
            "all heads; which keys a float mask hides is not known when compiling",
            "give a boolean mask of (batch or 1, 1, queries or 1, cache length)",
        )
    keys, values = info.tensor(key.node), info.tensor(value.node)
    if keys is None or values is None or not compat.is_fake(query):
        return Decline("unsupported", "an operand of attention is no plain tensor")
    sentence = op_folder.supports(query, keys, values, None, None)
    if sentence is not None:
        return Decline("unsupported", sentence)
    rows = query.shape[2] * query.shape[1] // keys.shape[1]
    if not compat.statically_true(rows <= MAX_ROWS):
        return Decline(
            "many_queries",
            f"there are {rows} query rows per key-value head; up to {MAX_ROWS} are served, which "
            "is decoding. A prefill is left to PyTorch's kernels",
        )
    return None


def _changed_meanwhile(info: GraphInfo, match: Site) -> Decline | None:
    end, visible = info.positions[match.node], match.shown
    reads: list[tuple[Node, int]] = []
    for cache in match.caches:
        places = [info.positions[n] for n in cache.chain if not _is_cache_write(n)]
        reads += [(cache.node, min(places))] if places else []
    if visible.bound is not None and visible.compared_at is not None:
        reads.append((visible.bound, info.positions[visible.compared_at]))
    writes = (info.written_alike(node, first, end) for node, first in reads)
    found = next(filter(None, writes), None)
    if found is None:
        return None
    return Decline(
        "mutated",
        f"`{node_name(found)}` writes to the cache or the positions after they were read and "
        "before attention",
        "write before reading",
    )


def _without_gain(info: GraphInfo, match: Site) -> Decline | None:
    query, taken = (info.value(match.call.args[name]) for name in ("query", "key"))
    if op_folder.engine_for(query.device, query.dtype) != "reference":
        return None
    copied = 2 * taken.numel() * taken.dtype.itemsize
    if _copies(info, match) and compat.holds(copied >= MIN_COPIED_BYTES):
        return None
    return Decline(
        "no_gain",
        "on this device the op gains where keys and values are copied for the query heads that "
        f"share them, {MIN_COPIED_BYTES >> 20} MiB or more",
    )


def _pair(info: GraphInfo, match: Site) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """Return the writes of the new keys and values, and the operands of one op that replaces both.

    The op is inserted at the position of the later write. Return None if one op cannot replace both
    writes.
    """
    key, value = match.caches
    keys, values = _write(info, match, key), _write(info, match, value)
    if keys is None or values is None:
        return None
    (k_write, k_new, k_positions), (v_write, v_new, v_positions) = keys, values
    if k_positions is not v_positions or k_write is v_write:
        return None
    operands = (key.node, value.node, k_new, v_new, k_positions)
    tensors = [t for t in map(info.tensor, operands) if compat.is_fake(t)]
    if len(tensors) < len(operands) or op_folder.supports_append(*tensors) is not None:
        return None
    if compat.storage_key(tensors[0]) == compat.storage_key(tensors[1]):
        return None
    first, second = sorted((k_write, v_write), key=lambda n: info.positions[n])
    is_alone = all(not w.users or _is_seen_only_by(w, match.owned) for w in (first, second))
    is_alone = is_alone and _nothing_between(info, first, second, tensors[:2])
    return (first, second, operands) if is_alone else None


def _is_seen_only_by(write: Node, owned: Sequence[Node]) -> bool:
    """Return whether only `owned` nodes use the result of a write."""
    others = [node for node in owned[1:] if node.op != "placeholder"]
    return all(set(node.users) <= set(owned) for node in (write, *others))


def _write(info: GraphInfo, match: Site, cache: Cache) -> tuple[Node, Node, Node] | None:
    """Return the last write to a cache before attention, as node, written value, and index."""
    held, last = compat.storage_key(info.value(cache.node)), None
    for write in info.writes:
        if write.position >= info.positions[match.node]:
            break
        written = [value for value in map(info.tensor, write.targets) if value is not None]
        if any(compat.storage_key(value) == held for value in written):
            last = write
    return _read_write(last.node) if last is not None and last.targets == (cache.node,) else None


def _read_write(node: Node) -> tuple[Node, Node, Node] | None:
    """If a node is `cache.index_copy_(2, positions, new)` or `cache[:, :, positions] = new`, return
    the node, `new` and `positions`, otherwise return None."""
    call = call_of(node, aten.index_copy_.default)
    if call is not None:
        is_along_keys = call.args["dim"] in (2, -2)
        return (node, call.args["source"], call.args["index"]) if is_along_keys else None
    if node.target is not operator.setitem or len(node.args) != 3:
        return None
    _, index, new = node.args
    if not isinstance(index, tuple) or not isinstance(new, Node):
        return None
    everything = slice(None, None, None)
    is_short = index[0] is Ellipsis  # of both leading axes
    front, rest = ((everything,) * 2, index[1:]) if is_short else (index[:2], index[2:])
    if front != (everything, everything) or len(rest) not in (1, 2):
        return None
    is_whole = rest[1:] == (everything,) or (len(rest) == 1 and not is_short)
    return (node, new, rest[0]) if is_whole and isinstance(rest[0], Node) else None


def _nothing_between(
    info: GraphInfo, first: Node, second: Node, caches: Sequence[torch.Tensor]
) -> bool:
    """Return whether no node between the write of new keys and the write of new values reads one of
    the caches."""
    held = set(map(compat.storage_key, caches))
    lo, hi = info.positions[first], info.positions[second]
    if any(lo < write.position < hi for write in info.writes):
        return False
    between = [node for node, position in info.positions.items() if lo < position < hi]
    read = (info.tensor(operand) for node in between for operand in node.all_input_nodes)
    return not any(compat.is_fake(value) and compat.storage_key(value) in held for value in read)


def _advice(info: GraphInfo, match: Site) -> dict[str, Any]:
    query = info.value(match.call.args["query"])
    has_one_row = same_shape((query.shape[0], query.shape[2]), (1, 1))
    is_on_gpu = op_folder.engine_for(query.device, query.dtype) != "reference"
    return cached.advice(is_one_row=has_one_row and is_on_gpu)


def _sentence(info: GraphInfo, match: Site) -> str:
    query, cache = info.value(match.call.args["query"]), info.value(match.caches[0].node)
    name = op_folder.engine_for(query.device, query.dtype)
    bound = "the query's position" if match.shown.mask is None else "the mask's last key"
    return (
        f"attention over a cache of {cache.shape[2]} keys -> memeff::kv_cache_attention, which "
        f"reads up to {bound}; engine {name}: {op_folder.ENGINES[name]}"
        + ("; one token: Inductor tunes its kernels" if _advice(info, match) else "")
    )
