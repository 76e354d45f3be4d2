"""dense masks and expanded keys -> is_causal and enable_gqa: attention gets its fast kernels back.

    before: mask = le(arange(S)[None, :], arange(S)[:, None]).expand(B, 1, S, S)
            k, v = repeat_kv(k), repeat_kv(v)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    after:  out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

The mask's part of the graph is read as a formula over batch, query and key index (mask_reader,
mask_algebra, mask_forms), not matched node by node, and a call is changed only where the formula is
proved to be what the call says instead, for all sizes the graph is compiled for. What PyTorch's
call cannot say (padding, packed sequences, windows, softcaps) memeff::attention can, where it has a
kernel (masked_attention). Everything else is named in the report and left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from .. import compat
from ..kernels.device import gpu, was_measured, where_it_runs
from .attention.mask_algebra import negated
from .attention.mask_forms import Form, form_of
from .attention.mask_reader import Mask, MaskReader
from .attention.sites import Site, find_sites
from .attention.told_to_op import Said, said_for, sentence, why_not_here, write
from .graph.base import Decline, Done, GraphPass
from .graph.canonical import Call, aten, read
from .graph.editor import Editor, EditRefused
from .graph.graph_info import GraphInfo, node_name, written_by

_LARGEST_HEAD = 256
_READER = "mask_reader"


@dataclass(frozen=True)
class Plan:
    """What to do with one site.

    Args:
        causal: The new call's is_causal.
        limit: Keys from this one on are never attended to and cut off; None keeps all.
        bases: Keys and values before they were repeated, or None where they stay as they are.
        sentence: What is done, for the report.
        said: What memeff::attention is told, where PyTorch's call cannot say it.
    """

    causal: bool
    limit: Any
    bases: tuple[Node, Node] | None
    sentence: str
    said: Said | None = None


@dataclass
class Match:
    """Sites with the same answer: plans to carry out, or one reason against all of them."""

    sites: list[Site] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    decline: Decline | None = None


class RecoverAttention(GraphPass):
    """The pass. Which buffers go depends on the kernels that PyTorch chooses."""

    name = "recover_attention"

    # --- find -------------------------------------------------------------------------------------

    def find(self, info: GraphInfo) -> Iterable[Match | Decline]:
        """Yield one match for all sites that get the same answer."""
        matches: dict[tuple[str, ...], Match] = {}
        for site in find_sites(info):
            answer = site if isinstance(site, Decline) else plan_for(info, site)
            if answer is None:
                continue
            node = site.node
            assert node is not None
            match = matches.setdefault(self._group(info, answer, node), Match())
            if isinstance(answer, Decline):
                match.decline = match.decline or answer
                match.sites.append(Site(node, node, node, node))
            else:
                assert isinstance(site, Site)
                match.sites.append(site)
                match.plans.append(answer)
        for match in matches.values():
            if match.decline is not None:
                match.decline = _for_sites(match.decline, match.sites)
        yield from matches.values()

    def _group(self, info: GraphInfo, answer: Plan | Decline, node: Node) -> tuple[str, ...]:
        code = answer.code if isinstance(answer, Decline) else ""
        return code, answer.sentence, self.skipped(info, node)

    # --- check ------------------------------------------------------------------------------------

    def check(self, info: GraphInfo, match: Match) -> Decline | None:
        """Return why the sites must be left alone, or None."""
        return match.decline

    def places(self, match: Match) -> Sequence[Node]:
        """Return the sites."""
        return [site.node for site in match.sites]

    # --- rewrite ----------------------------------------------------------------------------------

    def rewrite(self, info: GraphInfo, match: Match, editor: Editor) -> Done:
        """Replace each site by one call without a dense mask."""
        for site, plan in zip(match.sites, match.plans, strict=True):
            for number in site.numbers:
                compat.hold_constant(number)
            with editor.at(site.node):
                result = _insert(info, editor, site, plan)
                editor.replace(site.node, _laid_out_as(editor, site.node, result))
        return Done(match.sites[0].node, match.plans[0].sentence, sites=len(match.sites))

    def dead(self, match: Match) -> Sequence[Node]:
        """Return the sites, and what only computed their masks and repeated their keys."""
        found: set[Node] = set()
        for site, plan in zip(match.sites, match.plans, strict=True):
            found |= {site.node, *site.between}
            stack = [site.mask] if site.mask is not None else []
            if plan.bases is not None:
                stack += [n for n in (site.key, site.value) if n not in plan.bases]
            while stack:
                node = stack.pop()
                if node not in found and _is_pure(node) and node not in (plan.bases or ()):
                    found.add(node)
                    stack.extend(node.all_input_nodes)
        return list(found)


def _for_sites(decline: Decline, sites: Sequence[Site]) -> Decline:
    return Decline(decline.code, decline.sentence, decline.hint, sites[0].node, len(sites))


# --- what to do -----------------------------------------------------------------------------------


def plan_for(info: GraphInfo, site: Site) -> Plan | Decline | None:
    """Return what to do with a site, why not, or None where there is nothing to gain."""
    for operand in (*site.operands, *([site.mask] if site.mask is not None else [])):
        value = compat.example_value(operand)
        if not compat.is_fake(value):
            kind = type(value).__name__
            return Decline(
                f"subclass_operand({kind})",
                f"an operand of the attention is a {kind}, which this pass does not look into",
                node=site.node,
            )
    asked = _asked(info, site)
    if isinstance(asked, Decline):
        return asked
    form, mask = asked
    masking = None if site.softcap else _masking(info, site, form)
    if masking is None:
        return _as_op(info, site, form, mask)
    return _as_call(info, site, *masking)


def _as_call(
    info: GraphInfo, site: Site, causal: bool, limit: Any, said: list[str]
) -> Plan | Decline | None:
    """Return the plan of a call without a mask, why not, or None where that is nothing new."""
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
    if chooses_kernels(info):
        return _kernels_chosen(site)
    if site.between:
        said = ["matmul, softmax, matmul -> scaled_dot_product_attention", *said]
    if bases is not None:
        said = [*said, "keys and values are not expanded (enable_gqa=True)"]
    elif expansion is not None:
        said = [*said, f"keys and values stay expanded: {expansion.sentence}"]
    return Plan(causal, limit, bases, "; ".join([*said, *_speed(info, site, "grouped_heads")]))


def _as_op(info: GraphInfo, site: Site, form: Form, mask: Mask | None) -> Plan | Decline:
    """Return the plan of a call of memeff::attention, or why there is none."""
    reason = why_not_here(info, site) if form.is_sayable else ""
    if reason:
        return _kept(site, form, reason)
    said = said_for(info, site, form, mask)
    if isinstance(said, str):
        return _kept(site, form, said)
    if isinstance(said, Decline):
        return replace(said, node=site.node)
    if chooses_kernels(info):
        return _kernels_chosen(site)
    bases, expansion = _bases(info, site)
    shown = "" if site.mask is None else f"mask {_sizes(info.tensor(site.mask))}"
    parts = [sentence(info, site, said, form, shown)]
    if bases is not None:
        parts.append("keys and values are not expanded")
    elif expansion is not None:
        parts.append(f"keys and values stay expanded: {expansion.sentence}")
    parts += _speed(info, site, "attention")
    return Plan(False, None, bases, "; ".join(parts), said)


def _kernels_chosen(site: Site) -> Decline:
    return Decline(
        "kernels_chosen",
        "the code chooses the kernels of attention itself (sdpa_kernel)",
        "leave the choice to PyTorch, which knows what the new call may use",
        site.node,
    )


def _masking(info: GraphInfo, site: Site, form: Form) -> tuple[bool, Any, list[str]] | None:
    """Return is_causal, where to cut the keys off, and what to say of the mask; None where
    PyTorch's call cannot say it.
    """
    queries, keys = _length(info, site.query), _length(info, site.key)
    if site.mask is None:
        if not site.causal or compat.statically_true(keys == queries):
            return site.causal, None, []
        if compat.statically_true(queries == 1) or not compat.statically_true(keys > queries):
            return site.causal, None, []
        return True, queries, ["no query reaches the keys beyond the last query: they are cut off"]
    shown = f"mask {_sizes(info.tensor(site.mask))}"
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


def _length(info: GraphInfo, node: Node) -> Any:
    tensor = info.tensor(node)
    assert tensor is not None
    return tensor.shape[-2]


def _sizes(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"({' x '.join(str(compat.size_hint(size)) for size in tensor.shape)}, {kind})"


def _asked(info: GraphInfo, site: Site) -> tuple[Form, Mask | None] | Decline:
    """Return what a site asks of query and key, and the mask that says it, if one does."""
    if site.mask is None:
        return Form(causal=0 if site.causal else None), None
    query, key = info.tensor(site.query), info.tensor(site.key)
    assert query is not None
    assert key is not None
    shape = (*query.shape[:-1], key.shape[-2])
    mask = reader_of(info).mask(site.mask, shape)
    if mask is None:
        return Decline(
            "mask_is_bias",
            "the mask adds to the scores something else than zero or minus infinity, or may",
            node=site.node,
        )
    if site.takes_away:
        mask = replace(mask, formula=negated(mask.formula))
    return form_of(mask.formula, shape), mask


def reader_of(info: GraphInfo) -> MaskReader:
    """Return the one reader of this level of the graph: a mask shared by layers is read once."""
    reader = info.notes.get(_READER)
    if reader is None:
        parent = None if info.parent is None else reader_of(info.parent)
        reader = info.notes[_READER] = MaskReader(info, parent)
    found: MaskReader = reader
    return found


def _kept(site: Site, form: Form, reason: str) -> Decline:
    """Return the reason for leaving what was read as it is."""
    hint = ""
    if form.rest:
        code = "unread_mask"
    elif site.softcap:
        code = "softcap"
    elif form.is_packed:
        code = "packed_mask"
    elif form.length:
        code = "cache_length"
    elif form.padding:
        code = "padding_mask"
        hint = "a batch without padding needs no attention_mask"
    elif form.window is not None:
        code = "window_mask"
    elif form.empty:
        code = "empty_rows"
    else:
        code = "offset_causal"
    said = " and ".join(form.conditions)
    heads = []
    if site.softcap:
        heads.append("the scores are capped by tanh, which PyTorch's kernels do not")
    if said:
        empty = " (some query attends to nothing, or may)" if code == "empty_rows" else ""
        heads.append(f"the mask is {said}{empty}")
    return Decline(code, f"{'; '.join(heads)}: kept, {reason}", hint, site.node)


# --- repeated keys and values ---------------------------------------------------------------------


def _bases(info: GraphInfo, site: Site) -> tuple[tuple[Node, Node] | None, Decline | None]:
    """Return keys and values before their heads were repeated, or why they stay repeated."""
    if site.grouped:
        return None, None
    key, value = _unrepeated(info, site.key), _unrepeated(info, site.value)
    if key is None or value is None:
        return None, None
    (key_base, key_first), (value_base, value_first) = key, value
    if not _same_heads(info, key_base, value_base) or not _same_heads(info, site.query, site.key):
        return None, None
    for base, first in ((key_base, key_first), (value_base, value_first)):
        write = info.written_between([base], first, site.node)
        if write is not None:
            return None, Decline(
                "mutated", f"`{node_name(write)}` writes to them in between", node=site.node
            )
    return (key_base, value_base), None


def _same_heads(info: GraphInfo, key: Node, value: Node) -> bool:
    left, right = info.tensor(key), info.tensor(value)
    assert left is not None
    assert right is not None
    return compat.statically_true(left.shape[1] == right.shape[1])


def _unrepeated(info: GraphInfo, node: Node) -> tuple[Node, Node] | None:
    """Return what ``repeat_kv`` repeated over the heads and the first node of it, or None."""
    result = info.tensor(node)
    if result is None or result.dim() != 4:
        return None
    current = _through(node, (aten.contiguous.default, aten.clone.default))
    call = _one_call(current)
    if call is None:
        return None
    if call.op is aten.repeat_interleave.self_int:
        return _interleaved(info, current, call)
    if call.op.overloadpacket not in (aten.reshape, aten.view, aten.flatten):
        return None
    expanded = call.args["self"]
    call = _one_call(expanded)
    if call is None or call.op.overloadpacket is not aten.expand:
        return None
    added = call.args["self"]
    call = _one_call(added)
    if call is None or call.op is not aten.unsqueeze.default or call.args["dim"] not in (2, -3):
        return None
    base = call.args["self"]
    before, wide = info.tensor(base), info.tensor(expanded)
    if before is None or wide is None or before.dim() != 4 or wide.dim() != 5:
        return None
    batch, heads, length, size = before.shape
    repeats = wide.shape[2]
    expected = (batch, heads, repeats, length, size)
    merged = (batch, heads * repeats, length, size)
    if not _equal(wide.shape, expected) or not _equal(result.shape, merged):
        return None
    return base, added


def _interleaved(info: GraphInfo, node: Node, call: Call) -> tuple[Node, Node] | None:
    base, repeats = call.args["self"], call.args["repeats"]
    before, result = info.tensor(base), info.tensor(node)
    if before is None or result is None or before.dim() != 4 or not isinstance(repeats, int):
        return None
    if call.args["dim"] not in (1, -3):
        return None
    batch, heads, length, size = before.shape
    if not _equal(result.shape, (batch, heads * repeats, length, size)):
        return None
    return base, node


def _through(node: Node, ops: Sequence[OpOverload]) -> Node:
    call = _one_call(node)
    while call is not None and call.op in ops and isinstance(call.args["self"], Node):
        node = call.args["self"]
        call = _one_call(node)
    return node


def _one_call(node: Any) -> Call | None:
    reading = read(node) if isinstance(node, Node) else None
    return reading[0] if reading is not None and len(reading) == 1 else None


def _equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(
        compat.statically_true(a == b) for a, b in zip(found, expected, strict=True)
    )


# --- devices --------------------------------------------------------------------------------------


def why_not_grouped(info: GraphInfo, site: Site) -> str:
    """Return why the call without a mask would be slow on unexpanded keys, or an empty string.

    On a CPU PyTorch's one fused kernel takes them, in every floating dtype, at the speed of
    expanded ones or better. On a GPU the flash and cuDNN kernels do: 16 bits, heads of one size up
    to 256 in steps of 8; the memory-efficient kernel does not, and what is left is slow.
    """
    query, key, value, result = _tensors(info, site)
    device = where_it_runs(query.device).type
    if device == "cpu":
        return ""
    if device != "cuda":
        return f"no kernel for grouped heads is known on {device}"
    if result.dtype not in (torch.bfloat16, torch.float16):
        return f"PyTorch has no fused kernel for grouped heads in {_dtype(result)} on a GPU"
    size = key.shape[-1]
    if not _equal((query.shape[-1], value.shape[-1]), (size, size)):
        return "PyTorch's fused kernels for grouped heads need heads of one size"
    if not isinstance(size, int) or size > _LARGEST_HEAD or size % 8:
        return "PyTorch's fused kernels for grouped heads take sizes up to 256 in steps of 8"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "the flash kernels are switched off"
    found = gpu(query.device)
    if not found.is_nvidia:
        return "no kernel for grouped heads is known on GPUs other than NVIDIA's"
    if not found.runs_kernels:
        return "PyTorch's fused kernels for grouped heads need compute capability 8.0"
    return ""


def why_not_fused(info: GraphInfo, site: Site) -> str:
    """Return why a chain would not become one kernel, or an empty string."""
    query, _, value, result = _tensors(info, site)
    device = where_it_runs(query.device).type
    if device == "cpu":
        return ""
    if device != "cuda":
        return f"no fused kernel is known on {device}"
    if result.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"PyTorch has no fused kernel in {_dtype(result)} on a GPU"
    size = query.shape[-1]
    if not isinstance(size, int) or size > _LARGEST_HEAD or size % 8 or value.shape[-1] != size:
        return "PyTorch's fused kernels take heads of one size up to 256, in steps of 8"
    return ""


def _tensors(info: GraphInfo, site: Site) -> list[torch.Tensor]:
    """Return query, key, value and result."""
    found = [info.tensor(node) for node in (*site.operands, site.node)]
    return [tensor for tensor in found if tensor is not None]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _speed(info: GraphInfo, site: Site, op: str) -> list[str]:
    """Say so where nobody has measured the new call against the original."""
    query = info.tensor(site.query)
    assert query is not None
    return [] if was_measured(query.device, op) else ["speed not measured on this GPU"]


def chooses_kernels(info: GraphInfo) -> bool:
    """Return whether the graph switches attention's kernels itself, here or around this body."""
    is_chosen = any("sdpa_kernel" in node_name(n) for n in info.gm.graph.nodes)
    return is_chosen or (info.parent is not None and chooses_kernels(info.parent))


# --- the new call ---------------------------------------------------------------------------------


def _insert(info: GraphInfo, editor: Editor, site: Site, plan: Plan) -> Node:
    """Insert the new call in the dtype in which the site computes, autocast or not."""
    old = info.tensor(site.node)
    assert old is not None
    query = info.current(site.query)
    key, value = map(info.current, plan.bases or (site.key, site.value))
    if plan.limit is not None:
        end = plan.limit
        if not isinstance(end, int):
            end = editor.call(aten.sym_size.int, query, -2)
        key, value = (editor.call(aten.slice.Tensor, node, -2, 0, end) for node in (key, value))
    operands = []
    for node in (query, key, value):
        tensor = compat.example_value(node)
        is_same = tensor.dtype == old.dtype
        operands.append(node if is_same else editor.call(aten.to.dtype, node, old.dtype))
    if plan.said is not None:
        return write(editor, site, plan.said, operands)
    return editor.call(
        aten.scaled_dot_product_attention.default,
        *operands,
        None,
        0.0,
        plan.causal,
        scale=site.scale,
        enable_gqa=site.grouped or plan.bases is not None,
    )


def _laid_out_as(editor: Editor, old: Node, new: Node) -> Node:
    """Copy the result where its layout differs and something behind it may depend on the layout."""
    before, after = compat.example_value(old), compat.example_value(new)
    if _equal(before.stride(), after.stride()) or not _depends_on_layout(old):
        return new
    if before.is_contiguous():
        return editor.call(aten.contiguous.default, new)
    copied = editor.call(aten.contiguous.default, editor.call(aten.transpose.int, new, 1, 2))
    copied = editor.call(aten.transpose.int, copied, 1, 2)
    if not _equal(before.stride(), compat.example_value(copied).stride()):
        raise EditRefused(f"{old.name} would change its layout")
    return copied


_KEEPS_LAYOUT = {
    aten.transpose,
    aten.permute,
    aten.unsqueeze,
    aten.squeeze,
    aten.slice,
    aten.select,
    aten.alias,
    aten.detach,
    aten.expand,
    aten.to,
    aten.clone,
}


_BLIND_TO_LAYOUT = {
    aten.contiguous,
    aten.reshape,
    aten.flatten,
    aten.linear,
    aten.matmul,
    aten.mm,
    aten.bmm,
    aten.addmm,
}
"""Ops whose result lies in memory as it does whatever their input's layout."""


def _depends_on_layout(node: Node) -> bool:
    """Return whether a view, or the world outside the graph, may see the layout of a result."""
    return any(_sees_layout(user) for user in node.users)


def _sees_layout(user: Node) -> bool:
    reading = read(user)
    if user.op == "output" or reading is None:
        return True
    for call in reading:
        packet = call.op.overloadpacket
        if packet in _BLIND_TO_LAYOUT:
            return False
        if packet not in _KEEPS_LAYOUT and torch.Tag.pointwise not in call.op.tags:
            return True
    return _depends_on_layout(user)


def _is_pure(node: Node) -> bool:
    """Return whether a node may be erased when nobody uses it."""
    if node.op not in ("call_function", "call_method") or written_by(node):
        return False
    if not isinstance(compat.example_value(node), torch.Tensor):
        return False
    reading = read(node)
    return reading is not None and not any(
        torch.Tag.nondeterministic_seeded in call.op.tags for call in reading
    )
