"""Conditions that every pass checks before it replaces attention over a KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ... import compat
from ..graph.base import Decline, GraphPass
from ..graph.canonical import Call, aten, read_one
from ..graph.graph_info import GraphInfo, node_name

MAX_CHAIN = 8  # how many steps a search goes from the operands of attention to the cache


@dataclass
class CachedSite:
    """An attention call whose keys and values come from a KV cache, and the nodes that only this
    call uses."""

    node: Node
    call: Call
    owned: list[Node] = field(default_factory=list, kw_only=True)


class CachedPass(GraphPass):
    """The base class of passes that rewrite attention over KV caches, one call at a time."""

    def places(self, match: CachedSite) -> Sequence[Node]:
        return [match.node]

    def dead(self, match: CachedSite) -> Sequence[Node]:
        return match.owned


def attention_calls(info: GraphInfo) -> Iterator[tuple[Node, Call]]:
    """Yield every call of scaled_dot_product_attention in the graph."""
    for node in info.visit(info.gm.graph.nodes):
        call = read_one(node) if "scaled_dot_product" in node_name(node) else None
        if call is not None and call.op is aten.scaled_dot_product_attention.default:
            yield node, call


def advice(*, is_one_row: bool) -> dict[str, Any]:
    """Return Inductor settings for the graph: they turn autotuning on if the left operand of each
    matrix product has only one row.

    Such products spend most of their time on reading the weight. The GPU vendor's libraries read
    weights at three quarters of the memory bandwidth; kernels that Inductor generates and autotunes
    are faster.
    """
    return {"coordinate_descent_tuning": True} if is_one_row else {}


def unserved_setting(info: GraphInfo, match: CachedSite, without_causal: str) -> Decline | None:
    """Return the reason why this package's cache ops do not support an attention call over a KV
    cache, or None.

    `without_causal` is the remedy that the reason names for a call with `is_causal=True`.
    """
    node, args, value = match.node, match.call.args, info.tensor(match.node)
    if value is None or value.requires_grad:
        return Decline(
            "needs_gradient",
            "attention over the cache takes part in a backward pass, and the op has none",
            "generate under torch.no_grad() or torch.inference_mode()",
        )
    device = value.device.type
    if any(name == device and on for name, _, on in info.regions[node].autocast):
        said = "attention runs under autocast, which casts its operands"
        return Decline("autocast", said, "cast the model instead")
    if compat.known_number(args["dropout_p"]) != 0 or args["is_causal"]:
        name = "is_causal" if args["is_causal"] else "dropout_p"
        return Decline(
            f"attention_setting({name})",
            f"attention over the cache has {name}={args[name]!r}",
            "generate in eval mode" if name == "dropout_p" else without_causal,
        )
    if args["scale"] is not None and compat.known_number(args["scale"]) is None:
        said = "the scale of attention varies from call to call"
        return Decline("attention_setting(scale)", said, "give a number")
    return None


def held_scale(call: Call) -> float | None:
    """Return the scale of an attention call as a number; add guards, so that Dynamo compiles again
    if scale or dropout changes.
    """
    for name in ("dropout_p", "scale"):
        compat.hold_constant(call.args[name])  # symbols where everything is dynamic
    scale = compat.known_number(call.args["scale"])
    return None if scale is None else float(scale)
