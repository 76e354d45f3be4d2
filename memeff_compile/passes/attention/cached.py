"""What every pass asks of a call of attention over a cache before its op takes the place."""

from __future__ import annotations

from torch.fx import Node

from ... import compat
from ..graph.base import Decline
from ..graph.canonical import Call
from ..graph.graph_info import GraphInfo


def unserved_setting(
    info: GraphInfo, node: Node, call: Call | None, without_causal: str
) -> Decline | None:
    """Return why a call of attention over a cache is none that the ops can serve, or None.

    ``without_causal`` is the way out where the call has is_causal.
    """
    assert call is not None
    args, value = call.args, info.tensor(node)
    if value is None or value.requires_grad:
        return Decline(
            "needs_gradient",
            "attention over the cache takes part in a backward pass, and the op has none",
            "generate under torch.no_grad() or torch.inference_mode()",
        )
    device = value.device.type
    if any(name == device and on for name, _, on in info.regions[node].autocast):
        return Decline(
            "autocast",
            "attention runs under autocast, which casts its operands",
            "cast the model instead",
        )
    if compat.known_number(args["dropout_p"]) != 0 or args["is_causal"]:
        name = "is_causal" if args["is_causal"] else "dropout_p"
        return Decline(
            f"attention_setting({name})",
            f"attention over the cache has {name}={args[name]!r}",
            "generate in eval mode" if name == "dropout_p" else without_causal,
        )
    if args["scale"] is not None and compat.known_number(args["scale"]) is None:
        return Decline(
            "attention_setting(scale)",
            "the scale of attention varies from call to call",
            "give a number",
        )
    return None


def held_scale(call: Call) -> float | None:
    """Return the scale as a number, and hold it and the dropout to what they are."""
    for name in ("dropout_p", "scale"):
        compat.hold_constant(call.args[name])  # symbols where everything is dynamic
    scale = compat.known_number(call.args["scale"])
    return None if scale is None else float(scale)
