"""Recognize output projections whose classes DTensor splits over ranks, and insert nodes that
combine the ranks' results.

In a captured graph, such an output projection looks, for example, like this:

    x = DTensor.from_local(h, mesh, (Replicate,))
    l = linear(x, W)
    z = l.redistribute(placements=(Replicate,)).to_local()

Here, `h` are the hidden states, which are equal on all ranks. The weight W is split by Shard(0):
each rank has the weight's rows for some of the classes. `z` are the logits of all classes.

All ranks of a group must make the same edits, because a collective would hang otherwise. So this
module bases its decisions only on facts that are equal on all ranks: layouts, and the sizes of
complete tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from ... import compat
from ...kernels import linear_cross_entropy as op_folder
from ...kernels.linear_cross_entropy import Split
from ..graph.base import Decline
from ..graph.editor import Editor
from ..graph.graph_info import GraphInfo, node_name

HINT = (
    "split the head by its classes, as ColwiseParallel does, or leave the loss to the model's own "
    "code"
)


def sentence(split: Split, numbers: Sequence[int], count: int) -> str:
    """Return the compilation report's sentence about an output projection split over ranks.

    The sentence names the classes of this rank. The ranks exchange numbers for each row (token).
    The sentence also says how often they do so, and how many numbers per row they exchange.
    """
    shard = split.shard
    last = shard.first + shard.columns - 1
    gathers = "one all-gather" if count == 1 else f"{count} all-gathers"
    each = " and ".join(map(str, sorted(set(numbers))))
    return (
        f" on {shard.ranks} ranks, classes {shard.first} to {last} of {shard.classes} here; "
        f"{gathers} of {each} numbers per row"
    )


def moved(node: Node) -> Node | None:
    """If a call sends data between ranks, or takes this rank's shard of a tensor, return the call's
    operand, otherwise return None.
    """
    if node_name(node) not in ("redistribute", "to_local", *_CLOSURES) or not node.args:
        return None
    source: Any = node.args[0]
    return source if compat.is_dtensor(compat.example_value(source)) else None


_CLOSURES = (
    "prim_redistribute",
    "prim_to_local",
)  # before torch 2.13, the call's arguments are inside


def lost(node: Node) -> Decline | None:
    """Return the reason why logits are incomplete after a node that exchanges data between ranks.

    Incomplete logits lack classes or rows. Return None if the logits are complete.
    """
    source: Any = node.args[0]
    before, after = compat.example_value(source), compat.example_value(node)
    if compat.is_dtensor(after):
        laid_out, kept = after, _is_by_classes(after)
    else:
        cells = getattr(node.target, "__closure__", None) or ()
        is_plain = not (node.args[1:] or node.kwargs or any(cell.cell_contents for cell in cells))
        laid_out, kept = before, is_plain and is_everywhere(before)
    if kept:
        return None
    said = f"each rank's logits are laid out as {op_folder.layout(laid_out)} where "
    said += f"`{node_name(node)}` is called, neither whole nor split by classes alone"
    return _declined(said, node)


def is_everywhere(value: Any) -> bool:
    """Return whether every rank has the complete tensor."""
    return all(place.is_replicate() for place in value.placements)


def _is_by_classes(logits: Any) -> bool:
    """Return whether each rank has the logits of all rows (tokens), for all or some of the
    classes."""
    from torch.distributed.tensor import Shard

    places = [p for p in logits.placements if not p.is_replicate()]
    last = logits.dim() - 1
    return all(type(p) is Shard and p.dim % logits.dim() == last for p in places)


def split_of(info: GraphInfo, head: Any) -> Split | Decline | None:
    """Return how an output projection is split over ranks, or the reason why its split is not
    supported.

    If the projection is not split, return None."""
    operands = [compat.example_value(n) for n in (head.hidden, head.weight, head.bias) if n]
    if not any(map(compat.is_dtensor, operands)):
        return None
    if head.parts:
        return _declined("the head is tensor parallel and has an adapter", head.node)
    if not all(map(compat.is_dtensor, operands)):
        return _declined("the head is tensor parallel, and not all of its operands are", head.node)
    hidden, weight, *bias = operands
    placeholder = info.root_placeholder(head.weight)
    real = None if placeholder is None else compat.example_input(placeholder)
    if not compat.is_dtensor(real):
        return _declined("the tensor parallel head's weight is made inside the graph", head.node)
    if head.transposed:
        return _declined("the tensor parallel head's weight is stored as (D, V)", head.node)
    found = op_folder.split_of(real)
    if isinstance(found, str):
        return _declined(f"the weight of the tensor parallel head {found}", head.node)
    if not is_everywhere(hidden) or any(b.placements != weight.placements for b in bias):
        said = f"hidden states laid out as {op_folder.layout(hidden)}"
        said += "".join(f" and a bias as {op_folder.layout(b)}" for b in bias)
        return _declined(f"{said} meet a head as {op_folder.layout(weight)}", head.node)
    return found


def _declined(said: str, node: Node) -> Decline:
    return Decline("tensor_parallel_head", said, HINT, node)


def here(editor: Editor, head: Any, node: Node, summed: int | None = None) -> Node:
    """Return a node for this rank's shard of `node`, an operand of the output projection.

    Insert the node before the projection, unless an earlier call has inserted it."""

    def build() -> Node:
        with editor.at(head.node):
            return editor.call(op_folder.part_of_rank, node, summed)

    return editor.shared((op_folder.part_of_rank, head.node, node), build)


def on_every_rank(value: Tensor, like: Any) -> Tensor:
    """Wrap `value`, which is already equal on all ranks, in a replicated DTensor.

    The DTensor has the device mesh of `like`.
    """
    from torch.distributed.tensor import DTensor, Replicate

    places = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(value, like.device_mesh, places, run_check=False)
