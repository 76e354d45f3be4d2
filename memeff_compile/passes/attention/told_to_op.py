"""Rewrite attention into memeff::attention, whose arguments can describe more masks than those of
scaled_dot_product_attention.

scaled_dot_product_attention takes every mask as a tensor, except a causal mask (`is_causal`).

    before: mask = (arange(S) <= arange(S)[:, None]) & attention_mask[:, None, None, :]
            out = scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)
    after:  out = memeff.attention(q, k, v, key_mask, ahead=0)

The arguments of memeff::attention describe the mask:

- bounds on the key's position relative to the query's;
- one table that tells which keys are visible;
- one pair of id tables (a query sees a key if their ids are equal).

A softcap is an argument too. The pass uses these arguments only if every query then sees the same
keys as with the mask. If the mask may hide all keys from a query, memeff::attention must return the
original graph's result for this query. If that is not possible, the pass declines.

The arguments cannot describe some masks, for example a graph input or a mask that adds numbers. For
such a mask, the op's kernel reads the mask itself at run time, tile by tile. A kernel determines,
once for all layers, which tiles of the mask hide all keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ... import compat
from ...kernels import attention as op_folder
from ...kernels.checks import short
from ...kernels.device import where_it_runs
from ...report import format_bytes
from ..graph.base import Decline
from ..graph.canonical import aten, named, read_one
from ..graph.editor import Editor
from ..graph.graph_info import GraphInfo
from .mask_algebra import TRUE, Formula, Linear, Size, axis, both, reads_in, substituted
from .mask_forms import Form, key_table
from .mask_reader import Mask, handed_over
from .mask_tables import Table, behind, place_for
from .sites import Site, have_one_size

FEWEST_QUERIES = 16  # with fewer queries, as in a decoding step, a tile would be nearly empty
# Scores below this disappear when they are added to the number that masks them.
_SAME_AT_LEAST = 2.0**100

_MOST_STEPS_TO_AN_INPUT = 40


@dataclass(frozen=True)
class Said:
    """The arguments of memeff::attention that describe a mask."""

    ahead: Size | None = None  # how far ahead of a query a key may be; None for no bound
    behind: Size | None = None  # how far before a query a key may be; None for no bound
    key_mask: Table | None = None  # which keys count
    ids: tuple[Table, Table] | None = None  # tables that must be equal for a query and its key
    softcap: float = 0.0  # the cap of the scores; 0 for no cap
    empty_rows: str = "zeros"  # the result of a query without keys: "zeros" or "mean"
    reads_mask: bool = False  # whether the op takes the mask itself, and no other argument


def said_for(info: GraphInfo, site: Site, form: Form, mask: Mask | None) -> Said | Decline | str:
    """Return the arguments of memeff::attention that describe a mask, or the reason why no
    arguments describe it.

    The reason is a `Decline` if the mask may hide all keys from some query, otherwise a string.
    """
    if not form.is_sayable:
        return "neither PyTorch's call nor memeff::attention can express it"
    ahead = form.causal
    behind = None if form.window is None else form.window - 1
    if not all(info.says(size) for size in (ahead, behind) if size is not None):
        return "its bounds are not known from the inputs of the graph"
    tables = _tables(info, site, form)
    if tables is None:
        return "its inputs may be written to, or it is on another device"
    empty_rows = _empty_rows(info, site, form, mask)
    if isinstance(empty_rows, Decline):
        return empty_rows
    key_mask, ids = tables
    return Said(ahead, behind, key_mask, ids, site.softcap, empty_rows)


def _tables(
    info: GraphInfo, site: Site, form: Form
) -> tuple[Table | None, tuple[Table, Table] | None] | None:
    """Return memeff::attention's tables for a mask: flags of visible keys, ids of queries and keys.

    A query sees a key only if their ids are equal. A table is None if the mask does not need the
    table. Return None if the graph cannot compute one of these tables before the attention."""
    query, key = site.query.value, site.key.value
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]

    def table(content: Formula | Linear, along: int, dtype: torch.dtype) -> Table | None:
        place = place_for(info, content)
        if place is None:
            return None
        anchor, level = place
        sizes = (batch, queries if along == 2 else keys)
        devices = {compat.example_value(read.node).device for read in reads_in(content)}
        if devices - {query.device} or not all(level.says(size) for size in sizes):
            return None
        return Table(content, along, sizes, query.device, anchor, level, dtype)

    key_mask, ids = None, None
    counted = key_table(form, 4)
    if counted != TRUE:
        key_mask = table(counted, 3, torch.bool)
        if key_mask is None:
            return None
    for mine, theirs in _equalities(form):
        of_queries = table(mine, 2, torch.int64)
        # The keys' table may be the queries', at the same index.
        same = substituted(theirs, {0: axis(0), 2: axis(2), 3: axis(2)}) == mine
        is_one = same and compat.statically_true(queries == keys)
        of_keys = of_queries if is_one else table(theirs, 3, torch.int64)
        if of_queries is None or of_keys is None:
            return None
        ids = of_queries, of_keys
    return key_mask, ids


def _equalities(form: Form) -> list[tuple[Formula | Linear, Formula | Linear]]:
    """Return the pairs of ids (of query and key) that must be equal for a query to see a key.

    A condition on the query alone becomes such a pair, too. The query's id is then the condition (0
    or 1), and every key has the id 1.
    """
    found: list[tuple[Formula | Linear, Formula | Linear]] = [(i.query, i.key) for i in form.ids]
    if form.queries:
        found.append((both(*form.queries), Linear(1)))
    return found


def _empty_rows(info: GraphInfo, site: Site, form: Form, mask: Mask | None) -> str | Decline:
    """Return the original graph's result for a query without any visible key.

    If the pass does not know this result, or the op cannot compute it, return a `Decline` that
    names the reason.
    """
    if not form.empty or mask is None:
        return "zeros"
    if not site.between:
        if all(value == -math.inf for value in mask.added):
            return "zeros"  # PyTorch's kernels, for masks of truth values and of minus infinity
        return _unknown_rows("some kernels give them the mean of all values and others do not")
    lowest = mask.added if site.fill is None else frozenset({site.fill})
    if len(lowest) != 1:
        return _unknown_rows("keys are masked by several numbers")
    (number,) = lowest
    if number == -math.inf:
        return _unknown_rows("the original gives them nan")
    if site.masked_in is None:
        return _unknown_rows("the scores are cast to a dtype of a smaller range")
    if site.fill is not None and info.value(site.node).requires_grad:
        return _unknown_rows("their scores are replaced by a number, which has no gradient")
    # Scores added to a number of this dtype are rounded away where its neighbours are far enough.
    spacing = torch.finfo(site.masked_in).eps * 2.0 ** (math.frexp(number)[1] - 1)
    if site.fill is None and not spacing / 2 > _SAME_AT_LEAST:
        return _unknown_rows(f"{number:g} added in {short(site.masked_in)} leaves scores visible")
    return "mean"


def _unknown_rows(why: str) -> Decline:
    return Decline("empty_rows", f"some query attends to nothing, or may, and {why}")


def why_not_here(info: GraphInfo, site: Site) -> str:
    """Return the reason why memeff::attention does not support an attention call, or is slow for
    this call; otherwise return an empty string.
    """
    query, key, value = (operand.value for operand in site.operands)
    if not _fits(site, query, key, value):
        return "memeff::attention needs four axes, heads of one size, and one batch"
    if info.has_checkpoint_policy:
        return "the checkpoint has a policy (context_fn) that may name PyTorch's own calls"
    return why_not_fast(site, query, info.value(site.node).dtype)


def why_not_fast(site: Site, query: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the reason why memeff::attention would be slow on the device of `query`, or an empty
    string."""
    device = where_it_runs(query.device)
    if device.type == "cpu":
        return _why_not_on_a_cpu(site, dtype)
    if device.type != "cuda":
        return f"no fast kernel is known on {device.type}"
    if compat.size_hint(query.shape[2]) < FEWEST_QUERIES:
        return f"fewer than {FEWEST_QUERIES} queries are a step of decoding"
    depth = query.shape[3]
    return op_folder.served(query.device, dtype, depth if isinstance(depth, int) else 0)


def _why_not_on_a_cpu(site: Site, dtype: torch.dtype) -> str:
    if not site.between:
        return "PyTorch's kernel for the CPU takes the mask as it is"
    if dtype != torch.bfloat16:
        return (
            f"on a CPU in {short(dtype)} memeff::attention was measured at 2.1 to 3.5 times the "
            "time of products and a softmax"
        )
    if compat.multiplies_bf16():
        return "on a CPU that multiplies bfloat16 itself memeff::attention has not been measured"
    return ""


def why_not_read(info: GraphInfo, site: Site) -> str:
    """Return the reason why memeff::attention cannot read the mask of an attention call at run
    time, or an empty string."""
    if site.between or site.mask is None:
        return "memeff::attention reads masks for calls of scaled_dot_product_attention alone"
    mask = info.value(site.mask)
    if mask.requires_grad:
        return "the mask needs a gradient, which memeff::attention does not give"
    if mask.device != site.query.value.device:
        return "the mask is on another device"
    if any(level.may_be_written(node) for level, node in _levels_of(info, site.mask)):
        return "something may write to the mask"
    return why_not_here(info, site)


def why_not_added(info: GraphInfo, site: Site) -> str:
    """Return the reason why memeff::attention should not add the mask of an attention call to the
    scores at run time, or an empty string.

    A bias that the graph computes and adds (ALiBi, T5) usually hides no key, so no tile could be
    skipped.
    """
    if _input_behind(info, site.mask) is None:
        return "the graph computes the mask to add, and PyTorch's kernels add it as fast"
    return ""


def _input_behind(info: GraphInfo, node: Any) -> Node | None:
    """Return the graph input of which a node is a view, or None if the node is computed in the
    graph."""
    while isinstance(node, Node) and (node := _levels_of(info, node)[-1][1]).op != "placeholder":
        info = next(level for level in info.outward() if node.graph is level.gm.graph)
        call = read_one(node)
        if call is None or call.op.overloadpacket not in _VIEWS:
            return None
        node = call.args["self"]
    return node if isinstance(node, Node) else None


_VIEWS = named(
    "alias clone contiguous detach expand permute reshape select slice squeeze to transpose "
    "unsqueeze view"
)


def _levels_of(info: GraphInfo, node: Node) -> list[tuple[GraphInfo, Node]]:
    """Return `node`, and the nodes with the same value in surrounding graphs, each with its graph.

    If `node` is an input of an activation checkpoint's body, the next entry is the node that the
    surrounding graph passes as this input. If that node is also such an input, the list continues
    in the same way."""
    found = [(info, node)]
    while node.op == "placeholder" and info.parent is not None:
        outer = info.argument_of(node)
        if outer is None:
            break
        info, node = info.parent, outer
        found.append((info, node))
    return found


def handed_in(info: GraphInfo, mask: Node | None) -> bool:
    """Return whether the mask is an input of this graph partition, and an earlier partition
    computed it.
    """
    source = _input_behind(info, mask)
    return source is not None and handed_over(source) is not None


def _fits(site: Site, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    if not have_one_size(query, key, value):
        return False
    heads, of_keys = query.shape[1], key.shape[1]
    return compat.statically_true(heads % of_keys == 0 if site.grouped else heads == of_keys)


def write(editor: Editor, site: Site, said: Said, operands: list[Node]) -> Node:
    """Insert the call of memeff::attention; return its result."""
    if said.reads_mask:
        nodes = [None, None, None, *_mask_and_tiles(editor, site)]
    else:
        tables = [said.key_mask, *(said.ids or (None, None))]
        nodes = [None if table is None else table.written(editor) for table in tables]
    bounds = {"ahead": said.ahead, "behind": said.behind}
    told = {name: None if size is None else editor.size(size) for name, size in bounds.items()}
    how = {"scale": site.scale, "softcap": said.softcap, "empty_rows": said.empty_rows}
    return editor.item(editor.call(op_folder.attention, *operands, *nodes, **told, **how), 0)


def _mask_and_tiles(editor: Editor, site: Site) -> tuple[Node, Node]:
    """Return two nodes: the mask with four axes, and a tensor with a code per tile (all, some or no
    keys hidden).

    The tiles are those of the mask. Layers with the same mask and dtype use the same two nodes.
    """
    assert site.mask is not None
    level, node = _levels_of(editor.info, site.mask)[-1]
    owner = editor
    while owner.info is not level:
        owner = owner.around()
    mask, result = map(compat.example_value, (site.mask, site.node))
    # Autocast would hand the mask to PyTorch's kernels in its own dtype.
    is_cast = mask.dtype.is_floating_point and editor.info.regions[site.node].autocast
    dtype = result.dtype if is_cast else mask.dtype
    node = owner.info.current(node)

    def whole() -> Node:
        with owner.at(behind(owner, node)):
            return _with_four_axes(owner, owner.cast(node, dtype))

    def codes() -> Node:
        with owner.at(behind(owner, whole_mask)):
            return owner.call(op_folder.attention_mask_tiles, whole_mask)

    whole_mask = owner.shared(("mask", node, dtype), whole)
    tiles = owner.shared(("mask_tiles", node, dtype), codes)
    return editor.bring_in(whole_mask), editor.bring_in(tiles)


def _with_four_axes(editor: Editor, node: Node) -> Node:
    """Return a mask over batch, heads, queries and keys; axes that were expanded have size 1."""
    while compat.example_value(node).dim() < 4:
        node = editor.call(aten.unsqueeze.default, node, 0)
    for place, stride in enumerate(compat.example_value(node).stride()):
        size = compat.example_value(node).shape[place]
        if compat.statically_true(stride == 0) and not compat.statically_true(size == 1):
            node = editor.call(aten.slice.Tensor, node, place, 0, 1)
    return node


def sentence_of_mask(info: GraphInfo, site: Site, shown: str) -> str:
    """Return the compilation report's sentence for a mask tensor that memeff::attention reads.

    The kernel reads the tensor at run time."""
    query, result = site.query.value, info.value(site.node)
    engine = op_folder.engine_for(query.device, result.dtype, query.shape[3])
    return (
        f"{shown} is read when the kernel runs -> memeff::attention, engine {engine}; empty tiles "
        "are skipped, full ones not looked up"
    )


def sentence(info: GraphInfo, site: Site, said: Said, form: Form, shown: str) -> str:
    """Return the compilation report's sentence about attention rewritten into memeff::attention.

    The sentence names the arguments that replace the mask, and the tensors that are no longer
    built."""
    query, key, result = site.query.value, site.key.value, info.value(site.node)
    ids = said.ids[0] if said.ids else None
    told = ["softcap" if said.softcap else "", _told("key table", said.key_mask), _told("ids", ids)]
    engine = op_folder.engine_for(query.device, result.dtype, query.shape[3])
    conditions = " and ".join(form.conditions)
    masked = f"{shown} is {conditions}" if shown and conditions else ""
    heads = filter(None, [site.chain if site.between else "", masked])
    given = f" ({', '.join(filter(None, told))})" if any(told) else ""
    gets = "zeros" if said.empty_rows == "zeros" else "the mean of all values"
    parts = [
        f"{'; '.join(heads)} -> memeff::attention{given}, engine {engine}",
        _not_built(info, site, query, key),
        f"a query that attends to nothing gets {gets}, as before" if form.empty else "",
    ]
    return "; ".join(filter(None, parts))


def _not_built(info: GraphInfo, site: Site, query: torch.Tensor, key: torch.Tensor) -> str:
    b, h, m, n = symbols = sympy.symbols("B H M N", integer=True, positive=True)
    sizes = [compat.size_hint(size) for size in (*query.shape[:3], key.shape[2])]
    if site.between:
        dtype = info.value(site.product).dtype
        formula, what = op_folder.bytes_before(b, h, m, n, dtype=dtype), "scores"
    else:
        mask = info.tensor(site.mask)
        if mask is None or handed_in(info, site.mask):
            return ""
        formula, what = op_folder.mask_bytes(b, m, n, dtype=mask.dtype), "mask"
    verb = "are" if site.between else "is"
    number = int(formula.subs(dict(zip(symbols, sizes, strict=True))))
    return f"the {what}, {formula} bytes ({format_bytes(number)}), {verb} not built"


def name_of(info: GraphInfo, node: Node) -> str:
    """Return the name of the graph input of which a node is a view, or "" if there is none."""
    source = _input_behind(info, node)
    level = next((each for each in info.outward() if source in each.positions), info)
    root = None if source is None else level.root_placeholder(source)
    return "" if root is None else compat.readable_source(root)


def _told(name: str, table: Table | None) -> str:
    """Return the compilation report's text for a table that replaces a mask; "" without a table.

    A table contains the flags of visible keys, or the ids of queries or keys. A query sees a key
    only if their ids are equal. The text is the table's name. If the table is computed from one or
    two graph inputs, the text also names these inputs."""
    if table is None:
        return ""
    sources = sorted({s for read in reads_in(table.content) for s in _inputs(table, read.node)})
    if not sources or len(sources) > 2:
        return name
    return f"{name} from {' and '.join(f'`{source}`' for source in sources)}"


def _inputs(table: Table, node: Node) -> set[str]:
    """Return the names of the graph inputs from which a given node is computed."""
    found: set[str] = set()
    level = table.level
    seen: set[Node] = set()
    stack = [node]
    while stack and len(seen) < _MOST_STEPS_TO_AN_INPUT:
        current = stack.pop()
        if current not in seen and current.op != "placeholder":
            stack.extend(current.all_input_nodes)
        elif current not in seen and current.graph is level.gm.graph:
            root = level.root_placeholder(current)
            if root is not None and level.tensor(current) is not None:
                found.add(compat.readable_source(root))
        seen.add(current)
    return found - {""}
