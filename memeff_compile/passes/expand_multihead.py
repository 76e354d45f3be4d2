"""Replace the node of nn.MultiheadAttention by linear layers and scaled_dot_product_attention.

    before: out, weights = multi_head_attention_forward(x, x, x, ..., need_weights=True)
    after:  q, k, v = linear(x, w, b).unflatten(-1, (3, H, D)).permute(...).unbind(0)
            attended = scaled_dot_product_attention(q, k, v)
            out = linear(attended.permute(2, 0, 1, 3).flatten(2), w_out, b_out)

PyTorch has two implementations of nn.MultiheadAttention. With `need_weights=True`, the default,
the first implementation builds the attention scores and weights, even if no node reads them. With
`need_weights=False`, the second implementation calls scaled_dot_product_attention. If an
attention mask and a padding mask are given, the second implementation builds a separate mask per
head.

If no node reads the attention weights, this pass inserts nodes like those of the second
implementation. The pass uses one mask for all heads, so that the pass `recover_attention` can
read the mask. If the rewrite would save neither memory nor time, the pass does not change the node.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import compat
from ..kernels.device import where_it_runs
from .attention.mask_algebra import negated
from .attention.mask_forms import Form, form_of
from .attention.mask_reader import reader_of
from .attention.sites import dropout_active, subclass, weights_used
from .attention.torch_kernels import kernels_chosen, why_no_kernel
from .graph.base import Decline, Done, GraphPass, mutated
from .graph.canonical import aten, call_of
from .graph.editor import Editor, EditRefused
from .graph.graph_info import GraphInfo, kind_among, same_shape


@dataclass(frozen=True)
class Mask:
    """A mask argument of nn.MultiheadAttention."""

    node: Node  # the mask as it is passed to the function
    taken: Node | None  # true for hidden keys; None for a mask of other numbers
    # the nodes that computed the mask from `taken`, as nn.MultiheadAttention does
    made_by: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Multihead:
    """A call of multi_head_attention_forward: its arguments by name, the node of its output, and
    its masks."""

    node: Node
    output: Node
    given: Mapping[str, Any]
    attention: Mask | None
    padding: Mask | None

    @property
    def builds_weights(self) -> bool:
        """Return whether the call runs the slower one of PyTorch's implementations, which builds
        attention scores and weights.
        """
        return bool(self.given["need_weights"])

    @property
    def masks(self) -> list[Mask]:
        """Return those of the call's two mask arguments that are not None."""
        return [mask for mask in (self.attention, self.padding) if mask is not None]


class ExpandMultihead(GraphPass):
    """The pass that replaces nn.MultiheadAttention's single node by linear layers and an attention
    call. The kernel that PyTorch chooses for the attention call determines which buffers the
    rewrite avoids."""

    name = "expand_multihead"

    def find(self, info: GraphInfo) -> Iterable[Multihead]:
        """Yield every call of multi_head_attention_forward whose rewrite saves memory or time.

        The rewrite replaces the call by linear layers and scaled_dot_product_attention.
        """
        for node in info.visit(info.gm.graph.nodes):
            match = _read(info, node)
            if match is not None and _gains(info, match):
                yield match

    def check(self, info: GraphInfo, match: Multihead) -> Decline | None:
        found = (
            _unserved(match)
            or kernels_chosen(info)
            or _changed_mask(info, match)
            or _no_fused_kernel(info, match)
        )
        return None if found is None else found.counted(match.node)

    def places(self, match: Multihead) -> Sequence[Node]:
        return (match.node,)

    def rewrite(self, info: GraphInfo, match: Multihead, editor: Editor) -> Done:
        sentence = (
            "multi_head_attention_forward -> linear, scaled_dot_product_attention, linear; "
            + "; ".join(_gains(info, match))
        )
        compat.hold_constant(match.given["dropout_p"])  # a symbol where everything is dynamic
        with editor.at(match.node):
            result = _Expansion(info, editor, match).result()
        editor.replace(match.output, result)
        return Done(match.node, sentence, sites=1)

    def dead(self, match: Multihead) -> Sequence[Node]:
        """Return the original call, the nodes that unpack the call's results, and the nodes that
        only the call used.
        """
        masks = [node for mask in match.masks for node in mask.made_by]
        operands = {match.given[name] for name in ("query", "key", "value")}
        turned = [node for node in operands if _turned_from(node) is not None]
        return [match.node, *match.node.users, *masks, *turned]


def _read(info: GraphInfo, node: Node) -> Multihead | None:
    if node.op != "call_function" or node.target is not F.multi_head_attention_forward:
        return None
    outputs = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    if len(outputs) != 1 or info.tensor(outputs[0]) is None:
        return None
    bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if any(isinstance(given[name], Node) for name in _PLAIN):
        return None  # a size or flag that is known at run time only
    padding = _read_mask(info, given["key_padding_mask"])
    attention = _read_mask(info, given["attn_mask"])
    if given["is_causal"] and padding is None and not given["need_weights"]:
        attention = None  # PyTorch follows the hint, whatever the mask contains
    return Multihead(node, outputs[0], given, attention, padding)


_PLAIN = (
    *("embed_dim_to_check", "num_heads", "add_zero_attn", "training", "need_weights"),
    *("use_separate_proj_weight", "is_causal"),
)


def _read_mask(info: GraphInfo, node: Any) -> Mask | None:
    """Describe a mask argument; nn.MultiheadAttention turns a boolean mask into numbers: zero and
    minus infinity.
    """
    tensor = info.tensor(node)
    if tensor is None:
        return None
    if tensor.dtype == torch.bool:
        return Mask(node, node)
    if node.op != "call_method" or node.target not in ("masked_fill_", "masked_fill"):
        return Mask(node, None)
    zeros, taken, *fill = node.args
    truth = info.tensor(taken)
    is_ours = (
        call_of(zeros, aten.zeros_like.default) is not None
        and list(zeros.users) == [node]
        and fill == [-math.inf]
        and truth is not None
        and truth.dtype == torch.bool
        and same_shape(truth.shape, tensor.shape)
    )
    return Mask(node, taken, (node, zeros)) if is_ours else Mask(node, None)


def _turned_from(node: Node) -> Node | None:
    """If `node` swaps the batch and length axes of its input, return this input, otherwise None."""
    if (call := call_of(node, aten.transpose.int)) is None:
        return None
    source: Node = call.args["self"]
    return source if {call.args["dim0"] % 3, call.args["dim1"] % 3} == {0, 1} else None


def _gains(info: GraphInfo, match: Multihead) -> list[str]:
    """Return phrases that name the advantages of rewriting a multi_head_attention_forward call.

    If the rewrite has no advantage over the original call, return no phrases.
    """
    said, form = [], _form(info, match)
    is_readable = form is not None and not form.rest
    is_on_gpu = where_it_runs(info.value(match.output).device).type == "cuda"
    if match.builds_weights:
        said.append(f"the attention weights ({_scores(info, match)}), unread, are not built")
    if match.attention is not None and match.padding is not None:
        if info.value(match.attention.node).dim() == 2:
            said.append("one mask for all heads in the place of one per head")
    elif match.attention is not None and (match.builds_weights or is_readable):
        said.append("the mask is left to recover_attention")
    elif match.padding is not None and (match.builds_weights or is_on_gpu):
        said.append("the padding is left to recover_attention")
    return said


def _lengths(info: GraphInfo, match: Multihead) -> tuple[Any, Any]:
    """Return the numbers of queries and keys, for inputs with or without a batch dimension."""
    query, key = info.value(match.given["query"]), info.value(match.given["key"])
    return query.shape[0], key.shape[0]


def _scores(info: GraphInfo, match: Multihead) -> str:
    query = info.value(match.given["query"])
    batch = query.shape[1] if query.dim() == 3 else 1
    sizes = (batch, match.given["num_heads"], *_lengths(info, match))
    return " x ".join(str(compat.size_hint(size)) for size in sizes)


def _form(info: GraphInfo, match: Multihead) -> Form | None:
    """Return the attention mask as a condition on query and key index, or None if the mask reader
    cannot describe the mask."""
    mask = match.attention
    if mask is None or info.value(mask.node).dim() != 2:
        return None
    shape = _lengths(info, match)
    read = reader_of(info).mask(mask.taken or mask.node, shape)
    if read is None:
        return None
    return form_of(read.formula if mask.taken is None else negated(read.formula), shape)


def _may_be_empty(info: GraphInfo, match: Multihead) -> bool:
    """Return whether the mask may hide all keys from some query."""
    if not match.masks:
        return False
    form = _form(info, match) if match.padding is None else None
    return form is None or not form.is_plain or form.window is not None


def _unserved(match: Multihead) -> Decline | None:
    """Return the reason (a Decline) why other nodes cannot replace a call of nn.MultiheadAttention,
    or None.

    The reasons are an operand that is a tensor subclass or is transformed by torch.func, keys or
    values that the module adds, attention weights that a node reads, and active dropout.
    """
    kind, given = kind_among(match.node.all_input_nodes), match.given
    if kind:
        return subclass(kind)
    held = [given[name] for name in ("bias_k", "bias_v", "static_k", "static_v")]
    if given["add_zero_attn"] or any(node is not None for node in held):
        own = "(add_bias_kv, add_zero_attn, static_k, static_v)"
        said = f"the module adds its own keys or values {own}"
        return Decline("keys_of_its_own", said, "leave them out")
    for user in match.node.users if match.builds_weights else ():
        if user is match.output:
            continue
        onward = list(user.users) if user.target is operator.getitem else [user]
        if onward:
            return weights_used(onward[0], "call the module with need_weights=False")
    if not given["training"] or compat.known_number(given["dropout_p"]) == 0:
        return None
    return dropout_active(None, "train with a dropout of 0")


def _changed_mask(info: GraphInfo, match: Multihead) -> Decline | None:
    """Return a Decline (the reason for no rewrite) if the graph wrote to an attention mask after
    creating the mask, or if a mask requires a gradient.
    """
    for mask in match.masks:
        if mask.made_by and mask.taken is not None:
            write = info.written_between([mask.node, mask.taken], mask.node, match.node)
            if write is not None:
                return mutated(write, "a mask before attention reads it")
    for mask in match.masks:
        tensor = info.tensor(mask.node)
        if match.builds_weights and tensor is not None and tensor.requires_grad:
            return Decline(
                "mask_is_bias",
                "the mask is a bias that needs a gradient, which PyTorch's fused kernels have not "
                "on every device",
                "call the module with need_weights=False to choose them all the same",
            )
    return None


def _no_fused_kernel(info: GraphInfo, match: Multihead) -> Decline | None:
    """Return a Decline (a reason against the rewrite) if the inserted scaled_dot_product_attention
    would not run as one fused kernel.

    If the call in `match`, which the rewrite replaces, does not build the attention weights, always
    return None."""
    size = match.given["embed_dim_to_check"] // match.given["num_heads"]
    reason = why_no_kernel(info, info.value(match.output), size, size)
    return Decline("no_fused_kernel", reason) if reason and match.builds_weights else None


class _Expansion:
    """Inserts the nodes that replace a call of multi_head_attention_forward. The new nodes compute
    in the dtype of the original call, also under autocast.
    """

    def __init__(self, info: GraphInfo, editor: Editor, match: Multihead) -> None:
        self.info, self.editor, self.match = info, editor, match
        self.call, self.item = editor.call, editor.item
        self.output = info.value(match.output)
        self.is_batched = info.value(match.given["query"]).dim() == 3
        self.heads: int = match.given["num_heads"]
        self.width: int = match.given["embed_dim_to_check"]

    def result(self) -> Node:
        """Insert linear layers and scaled_dot_product_attention, which replace the original call.

        The original call is multi_head_attention_forward. Return the node that replaces its output.
        """
        query, key, value = self._projected()
        keep = self._mask()
        attended = self.call(aten.scaled_dot_product_attention.default, query, key, value, keep)
        if self.match.builds_weights and keep is not None and _may_be_empty(self.info, self.match):
            attended = self.call(aten.mul.Tensor, attended, self._nothing_is_nan(keep))
        # The original's layout: the longer axis first, then the batch.
        flat = self.call(aten.permute.default, attended, [2, 0, 1, 3])
        flat = self.call(aten.flatten.using_ints, flat, 2, 3)
        if not self.is_batched:
            flat = self.call(aten.select.int, flat, 1, 0)
        flat = self.call(aten.contiguous.default, flat)
        names = ("out_proj_weight", "out_proj_bias")
        out = self.call(aten.linear.default, flat, *map(self._given, names))
        if not same_shape(compat.example_value(out).stride(), self.output.stride()):
            raise EditRefused(f"{self.match.output.name} would change its layout")
        return out

    def _given(self, name: str) -> Node | None:
        node: Node | None = self.match.given[name]
        return None if node is None else self._cast(self.info.current(node))

    def _cast(self, node: Node) -> Node:
        return self.editor.cast(node, self.output.dtype)

    def _projected(self) -> list[Node]:
        """Return query, key and value as (batch, heads, length, head size)."""
        given = self.match.given
        sources = query, key, value = [given[name] for name in ("query", "key", "value")]
        shares = (3,) if query is key is value else (1, 2) if key is value else (1, 1, 1)
        if given["use_separate_proj_weight"]:
            shares, weights = (1, 1, 1), [self._given(f"{x}_proj_weight") for x in "qkv"]
        else:
            weights = self._split(self._given("in_proj_weight"), *shares)
        biases = self._split(self._given("in_proj_bias"), *shares)
        found: list[Node] = []
        for source, weight, bias, parts in zip(sources, weights, biases, shares, strict=False):
            found += self._projection(source, weight, bias, parts)
        return found

    def _split(self, packed: Node | None, *shares: int) -> list[Node | None]:
        """Split a packed weight or bias of query, key and value into parts.

        Each number in `shares` says how many of the three a part contains."""
        if packed is None or len(shares) == 1:
            return [packed] * len(shares)
        sizes = [share * self.width for share in shares]
        pieces = self.call(aten.split_with_sizes.default, packed, sizes)
        return [self.item(pieces, place) for place in range(len(shares))]

    def _projection(
        self, source: Node, weight: Node | None, bias: Node | None, parts: int
    ) -> list[Node]:
        """Insert one linear layer, and return its result split into tensors (batch, heads, length,
        head size)."""
        x, batch = self._batch_first(source)
        x = self.call(aten.linear.default, self._cast(x), weight, bias)
        sizes = [parts, self.heads, self.width // self.heads]
        x = self.call(aten.unflatten.int, x, 2, sizes)
        x = self.call(aten.permute.default, x, [2, batch, 3, 1 - batch, 4])
        pieces = self.call(aten.unbind.int, x)
        return [self.item(pieces, place) for place in range(parts)]

    def _batch_first(self, source: Node) -> tuple[Node, int]:
        """Return the 3D tensor that the first linear layer gets, and the index of its batch axis, 0
        or 1.

        With `batch_first`, nn.MultiheadAttention swaps the batch and length axes of its inputs.
        This pass applies the first linear layer before the swap, so the swap needs no copy.
        """
        node = self.info.current(source)
        if not self.is_batched:
            return self.call(aten.unsqueeze.default, node, 0), 0
        turned = _turned_from(node)
        return (node, 1) if turned is None else (turned, 0)

    def _mask(self) -> Node | None:
        """Return the mask of the attention call, or None. A boolean mask is true for visible keys;
        other masks contain numbers that are added to the scores."""
        masks = self.match.masks
        if not masks:
            return None
        taken = [(mask, mask.taken) for mask in masks if mask.taken is not None]
        if len(taken) == len(masks):
            wide = [self._four_axes(*each) for each in taken]
            either = wide[0] if len(wide) == 1 else self.call(aten.bitwise_or.Tensor, *wide)
            return self.call(aten.bitwise_not.default, either)
        added = [self._cast(self._four_axes(mask, self._as_numbers(mask))) for mask in masks]
        return added[0] if len(added) == 1 else self.call(aten.add.Tensor, *added)

    def _as_numbers(self, mask: Mask) -> Node:
        node = self.info.current(mask.node)
        if mask.made_by or mask.taken is None:
            return node
        zeros = self.call(aten.zeros_like.default, node, dtype=self.output.dtype)
        return self.call(aten.masked_fill.Scalar, zeros, node, -math.inf)

    def _four_axes(self, mask: Mask, node: Node) -> Node:
        """Return a mask with four axes, which broadcasts to the attention scores."""
        node = self.info.current(node)
        rank = compat.example_value(node).dim()
        is_attention = mask is self.match.attention
        if is_attention and rank == 3:  # one for each sequence and head
            return self.call(aten.unflatten.int, node, 0, [-1, self.heads])
        for place in (0, 0) if is_attention else (1, 1) if rank == 2 else (0, 0, 0):
            node = self.call(aten.unsqueeze.default, node, place)
        return node

    def _nothing_is_nan(self, mask: Node) -> Node:
        """Return factors for the result: nan for queries from which the mask hides all keys,
        otherwise 1. The original softmax, over only minus infinities, gives nan for such queries.
        """
        if compat.example_value(mask).dtype != torch.bool:
            mask = self.call(aten.gt.Scalar, mask, -math.inf)
        counts = self.call(aten.any.dim, mask, -1, True)
        factor = self.call(aten.where.Scalar, counts, 1.0, math.nan)
        return self._cast(factor)
