"""What PyTorch's own kernels of attention take, who chooses them, and how their results lie.

A call of scaled_dot_product_attention is written only where one of its fused kernels would serve
it, and what comes out is laid out as it was wherever something behind it may see the difference.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ... import compat
from ...kernels.device import gpu, where_it_runs
from ..graph.canonical import aten, read
from ..graph.editor import Editor, EditRefused
from ..graph.graph_info import GraphInfo, node_name, same_shape
from .sites import Site

_LARGEST_HEAD = 256


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


def chooses_kernels(info: GraphInfo) -> bool:
    """Return whether the graph switches attention's kernels itself, here or around this body."""
    is_chosen = any("sdpa_kernel" in node_name(n) for n in info.gm.graph.nodes)
    return is_chosen or (info.parent is not None and chooses_kernels(info.parent))


def laid_out_as(editor: Editor, old: Node, new: Node) -> Node:
    """Copy the result where its layout differs and something behind it may depend on the layout."""
    before, after = compat.example_value(old), compat.example_value(new)
    if same_shape(before.stride(), after.stride()) or not _depends_on_layout(old):
        return new
    if before.is_contiguous():
        return editor.call(aten.contiguous.default, new)
    copied = editor.call(aten.contiguous.default, editor.call(aten.transpose.int, new, 1, 2))
    copied = editor.call(aten.transpose.int, copied, 1, 2)
    if not same_shape(before.stride(), compat.example_value(copied).stride()):
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
