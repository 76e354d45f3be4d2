"""Find the last matrix product of a block in an activation checkpoint.

The backward pass need not compute this product again. A checkpoint around a block runs the block
again in the backward pass, up to the last tensor that autograd saves. In eager PyTorch, the last
product of a block saves its operands before it runs. So the recomputation stops before the product
and does not compute it again. A compiled block saves its tensors after all of its operations. So
the backward pass computes the last product a second time although no code reads the result.

For this reason, the graph of a compiled block in an activation checkpoint is split before the
block's last product. The product and the additions, views and casts after it run op by op. The
product calls the same matrix library as in compiled code.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ... import compat
from ...kernels.device import gpu
from ...report import Record
from .canonical import aten, call_of, named, read
from .cuts import candidates, crossed_by_tensors, enters_autocast
from .graph_info import GraphInfo
from .repeated_layers import FASTEST

SHORTEST = {"cuda": 0.1e-3, "cpu": 1e-3}
"""Seconds of a product, at `FASTEST`, from which it runs apart: the operations of its own cost the
host about 0.05 ms in both directions on a GPU machine, while the GPU computes."""

_SAVES_NOTHING = named(
    "add.Tensor sub.Tensor view.default reshape.default flatten.using_ints unflatten.int "
    "unsqueeze.default squeeze.dim transpose.int permute.default contiguous.default "
    "to.dtype detach.default"
)


def last_product(info: GraphInfo) -> Node | None:
    """Return the node before which a graph is split, or None.

    The returned node is a linear layer's product. The nodes after the returned node save no tensor
    for the backward pass. Graphs with in-place writes or autocast regions are not split. A graph
    that another graph contains as an activation checkpoint is not split either.
    """
    if info.options.inner == "eager" or info.options.preset == "off" or info.parent is not None:
        return None
    if not (info.needs_grad and compat.is_under_checkpoint()) or info.writes:
        return None
    if compat.is_to_be_saved() or compat.inputs_from_other_graphs(info.gm):
        return None
    nodes = candidates(info)
    if any(enters_autocast(node) for node in nodes):
        return None
    for place in reversed(range(len(nodes))):
        node = nodes[place]
        call = call_of(node, aten.linear.default)
        if call is not None:
            is_first = not any(map(_computes, nodes[:place]))
            is_cut = not is_first and _is_worth_it(info, node, call.args["weight"])
            return node if is_cut and node in crossed_by_tensors(info, nodes) else None
        if not _saves_nothing(node):
            return None
    return None


def _saves_nothing(node: Node) -> bool:
    """Return whether autograd saves no tensor for a node."""
    if node.op == "get_attr":
        return False
    calls = read(node)
    return calls is not None and all(call.op in _SAVES_NOTHING for call in calls)


def _computes(node: Node) -> bool:
    return isinstance(compat.example_value(node), torch.Tensor) and not _saves_nothing(node)


def _is_worth_it(info: GraphInfo, node: Node, weight: object) -> bool:
    """Return whether splitting the graph before a linear layer's product saves time.

    After the split, a checkpoint's backward pass does not compute the product again. The weight
    must be a plain tensor, the result must require a gradient, and the product must take long
    enough."""
    result = info.tensor(node)
    held = compat.example_input(weight) if isinstance(weight, Node) else None
    if result is None or not result.requires_grad or not isinstance(held, torch.Tensor):
        return False
    if type(held) not in (torch.Tensor, torch.nn.Parameter) or held.dim() != 2:
        return False
    device = "cuda" if held.is_cuda else "cpu"
    speed = FASTEST[device] * (1 if held.is_cuda else torch.get_num_threads())
    if held.is_cuda and gpu(held.device).kind == "blackwell":
        speed = FASTEST["blackwell"]
    rows = math.prod(map(compat.size_hint, result.shape[:-1]))
    return 2 * rows * held.numel() / speed >= SHORTEST[device]


def said(node: Node) -> Record:
    """Return an entry for the compilation report: the last matrix product of a checkpointed block
    runs in a separate partition of the graph."""
    sentence = (
        f"`{node.name}`, the last product of a block in a checkpoint, runs outside of the compiled "
        "graph, so that the checkpoint does not compute it a second time"
    )
    return Record("backend", "note", "last_product_apart", sentence)


def undecided(error: Exception) -> Record:
    """Return an entry for the compilation report: the graph is not split, because the search for
    the last matrix product of a checkpointed block raised an error."""
    why = f"the last product was not found: {type(error).__name__}: {error}"
    hint = "This is a bug of memeff_compile; the graph runs whole. Please report it."
    return Record("backend", "internal_error", "last_product_failed", why, hint)
