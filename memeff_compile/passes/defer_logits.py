"""Decide whether a logits output can be returned as a deferred tensor, and plan it.

Two callers use this module. The fused loss plans logits that the model returns together with the
loss. The pass in this file plans logits of a training graph without a loss: the user's code
computes the loss outside the graph, and there the deferred logits call the fused op
(`memeff_compile/logits/outside_loss.py`).

A Hugging Face model returns its logits with the loss. Without this plan, the logits would stay in
memory as a graph output that needs a gradient, and the backward pass would add a tensor of zeros of
the same size. So the fused loss returns the hidden states (N x D) instead, and the backend wraps
the hidden states: ``out.logits`` has the right shape, dtype and gradient, and is computed when it
is read.

    before: logits = linear(h, W);  loss = cross_entropy(logits, y);  return loss, logits
    after:  loss = memeff.linear_cross_entropy(h, W, y);              return loss, h   (+ a plan)

Without a loss: logits = linear(h, W); return logits   ->   return h   (+ a plan)

Logits are not deferred if the weight is not a direct input of the graph, if FSDP frees it after the
forward pass, in checkpoint bodies, and in export. Logits without a loss are also not deferred if
the graph uses or writes to them, if gradients are off, if the head is no wider than a layer inside
a model, or if a graph break follows. The report gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from .. import compat
from .graph.base import Decline, Done, GraphPass
from .graph.editor import Editor
from .graph.graph_info import GraphInfo
from .losses import outputs
from .losses.unfused import narrow_heads

OUTSIDE_SENTENCE = (
    "This graph has no loss: one that is computed from out.logits outside (cross_entropy, "
    "log_softmax with gather or nll_loss) uses the fused op and does not read them"
)


class DeferLogits(GraphPass):
    """Defers the logits of a training graph that has no loss."""

    name = "defer_logits"

    def find(self, info: GraphInfo) -> Iterable[outputs.Returned | Decline]:
        """Yield one match for each head whose logits are only returned, and a note for each narrow
        head."""
        found = [m for m in outputs.returned_logits(info) if outputs.is_unused(info, m)]
        return [*found, *narrow_heads(info)]

    def check(self, info: GraphInfo, match: outputs.Returned) -> Decline | None:
        return outputs.check_returned(info, match)

    def places(self, match: outputs.Returned) -> Sequence[Node]:
        return [match.head]

    def rewrite(self, info: GraphInfo, match: outputs.Returned, editor: Editor) -> Done:
        """Return hidden states instead of the logits."""
        for step in (s for o in match.outputs for s in o.chain.steps):
            compat.hold_constant(step.symbol)
        plan, _ = outputs.rewrite(info, match.outputs, editor)
        sentence = f"{outputs.stale_sentence(match.outputs[0])}. {OUTSIDE_SENTENCE}"
        return Done(match.head, sentence, [], plan, "deferred", "logits_deferred")

    def dead(self, match: outputs.Returned) -> Sequence[Node]:
        steps = (step.node for output in match.outputs for step in output.chain.steps)
        casts = match.outputs[0].chain.head.casts
        return [match.head, *dict.fromkeys(steps), *casts]
