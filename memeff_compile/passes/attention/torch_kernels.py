"""Facts about PyTorch's attention kernels: which calls they support, which kernel PyTorch chooses,
and the layout of the chosen kernel's result.

The passes insert a call of scaled_dot_product_attention only if one of PyTorch's fused kernels
supports the call. If a later node may depend on the memory layout of the result, the passes copy
the result into the original layout.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...kernels.checks import short
from ...kernels.device import gpu, where_it_runs
from ..graph.base import Decline
from ..graph.canonical import aten, named, read
from ..graph.editor import Editor, EditRefused
from ..graph.graph_info import GraphInfo, node_name, same_shape
from .sites import Site

_LARGEST_HEAD = 256


def why_not_grouped(info: GraphInfo, site: Site) -> str:
    """Return the reason why an attention call without a mask would be slow with grouped heads, or
    "".

    With grouped heads, keys and values have fewer heads than queries and are not repeated.

    - On a CPU, PyTorch has one fused kernel. This kernel supports grouped heads in every
      floating-point dtype, and is then as fast as with repeated keys and values.
    - On a GPU, the flash and cuDNN kernels support grouped heads in 16 bits. Queries, keys and
      values must have the same head size, a multiple of 8 up to 256. The memory-efficient kernel
      does not support grouped heads, and the unfused kernel is slow.
    """
    query, key, value = (operand.value for operand in site.operands)
    result = info.value(site.node)
    device = where_it_runs(query.device).type
    if device == "cpu":
        return ""
    if device != "cuda":
        return f"no kernel for grouped heads is known on {device}"
    if result.dtype not in (torch.bfloat16, torch.float16):
        return f"PyTorch has no fused kernel for grouped heads in {short(result.dtype)} on a GPU"
    size = key.shape[-1]
    if not same_shape((query.shape[-1], value.shape[-1]), (size, size)):
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
    """Return the reason why no fused kernel of PyTorch can compute the attention at `site`, or "".

    In the graph, this attention is still written as matrix products and a softmax.
    """
    sizes = (operand.value.shape[-1] for operand in (site.query, site.value))
    return why_no_kernel(info, info.value(site.node), *sizes)


def why_no_kernel(info: GraphInfo, result: torch.Tensor, size: Any, value_size: Any) -> str:
    """Return the reason why no fused kernel supports the given head sizes on the result's device,
    or ""."""
    if info.checkpoints_for_nothing:
        return "PyTorch compiles no fused kernel into a checkpoint whose graph has no gradient"
    device = where_it_runs(result.device).type
    if device == "cpu":
        is_trained = result.requires_grad and info.options.inner == "inductor"
        if is_trained and result.dtype == torch.float64 and _has_narrow_statistics():
            return "Inductor cannot differentiate this PyTorch's CPU kernel in float64"
        return ""
    if device != "cuda":
        return f"no fused kernel is known on {device}"
    if result.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"PyTorch has no fused kernel in {short(result.dtype)} on a GPU"
    if not isinstance(size, int) or size > _LARGEST_HEAD or size % 8 or value_size != size:
        return "PyTorch's fused kernels take heads of one size up to 256, in steps of 8"
    return ""


@functools.cache
def _has_narrow_statistics() -> bool:
    """Return whether PyTorch's attention on a CPU computes the log-sum-exp in float32 for float64
    inputs, as torch 2.11 does."""
    query = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    statistics = aten._scaled_dot_product_flash_attention_for_cpu.default(query, query, query)[1]
    return bool(statistics.dtype != query.dtype)


def kernels_chosen(
    info: GraphInfo,
    node: Node | None = None,
    hint: str = "leave the choice to PyTorch, which knows what the new call may use",
) -> Decline | None:
    """Return a Decline (the reason for no rewrite) if user code itself selects PyTorch's attention
    kernels, otherwise None."""
    nodes = (node for level in info.outward() for node in level.gm.graph.nodes)
    if not any("sdpa_kernel" in node_name(each) for each in nodes):
        return None
    sentence = "the code chooses the kernels of attention itself (sdpa_kernel)"
    return Decline("kernels_chosen", sentence, hint, node)


def laid_out_as(editor: Editor, old: Node, new: Node) -> Node:
    """Copy the new result into the old result's memory layout if a later node may depend on this
    layout.

    If the layouts are equal, or if no later node depends on the old layout, return the new result
    unchanged.
    """
    before, after = compat.example_value(old), compat.example_value(new)
    if same_shape(before.stride(), after.stride()) or not _depends_on_layout(old):
        return new
    if before.is_contiguous():
        return editor.call(aten.contiguous.default, new)
    # The axes from the widest stride to the narrowest: copied in this order, a result lies so.
    order = sorted(range(before.dim()), key=lambda place: -compat.size_hint(before.stride(place)))
    copied = editor.call(aten.contiguous.default, editor.call(aten.permute.default, new, order))
    back = [order.index(place) for place in range(len(order))]
    copied = editor.call(aten.permute.default, copied, back)
    # Along an axis of size one the stride has no meaning.
    strides = zip(before.stride(), compat.example_value(copied).stride(), strict=True)
    wide = [not compat.statically_true(size == 1) for size in before.shape]
    pairs = [pair for pair, counts in zip(strides, wide, strict=True) if counts]
    if not all(same_shape([ours], [theirs]) for ours, theirs in pairs):
        raise EditRefused(f"{old.name} would change its layout")
    return copied


_KEEPS_LAYOUT = named(
    "transpose permute unsqueeze squeeze slice select alias detach expand to clone"
)

# Ops whose result has the same memory layout for every layout of their input.
_BLIND_TO_LAYOUT = named("contiguous reshape flatten linear matmul mm bmm addmm")


def _depends_on_layout(node: Node) -> bool:
    """Return whether a view, or code outside of the graph, may depend on the memory layout of a
    result."""
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
