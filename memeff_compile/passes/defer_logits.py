"""Decide whether a graph can return deferred logits, and plan the rewrite.

Deferred logits are computed when they are first read. Two passes use this module. The pass
`fuse_linear_cross_entropy` uses the module for logits that a model returns together with its
loss. The pass in this file uses the module for the logits of a training graph without a loss. User
code then calls a loss function on the deferred logits outside of the graph. In this call, the op
memeff::linear_cross_entropy computes the loss from the hidden states, without building the logits
(`memeff_compile/logits/outside_loss.py`).

A Hugging Face model returns its logits together with the loss. If the graph returned ordinary
logits, they would stay in memory. Because the logits require a gradient, autograd would also create
zeros of the same size. These zeros are the gradient of returned logits that no other loss reads.
The backward pass would add the zeros to the gradient from the loss. So the rewritten graph returns
the hidden states (N x D) instead, and the backend makes deferred logits from them. `out.logits` has
the usual shape, dtype and gradient, but its values are computed only when code reads them.

    before: logits = linear(h, W);  loss = cross_entropy(logits, y);  return loss, logits
    after:  loss = memeff.linear_cross_entropy(h, W, y);              return loss, h

The same rewrite of a graph without a loss:

    before: logits = linear(h, W);  return logits
    after:  return h

Logits are not deferred in these cases:

- the output projection is inside an activation checkpoint;
- the graph is captured for export;
- the output projection's weight is not a direct input of the graph;
- FSDP frees the weight after the forward pass.

Logits without a loss are also not deferred in these cases:

- the graph itself reads or writes the logits;
- gradients are off;
- the linear layer has at most four times as many outputs as inputs (it may then be a hidden layer,
  not the output projection);
- a graph break follows the graph, so the code after the break gets ordinary logits.

If a pass declines to defer logits, the compilation report (`memeff_compile.last_report()`) names
the reason.
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
    """The pass that defers the logits of a training graph without a loss.

    The rewritten graph returns hidden states. Deferred logits are computed from the hidden states
    when they are first read.
    """

    name = "defer_logits"

    def find(self, info: GraphInfo) -> Iterable[outputs.Returned | Decline]:
        """Yield one match for each output projection whose logits the graph returns and uses for
        nothing else.

        Also yield a note for each linear layer that is too narrow to count as an output projection.
        """
        found = [m for m in outputs.returned_logits(info) if outputs.is_unused(info, m)]
        return [*found, *narrow_heads(info)]

    def check(self, info: GraphInfo, match: outputs.Returned) -> Decline | None:
        return outputs.check_returned(info, match)

    def places(self, match: outputs.Returned) -> Sequence[Node]:
        return [match.head]

    def rewrite(self, info: GraphInfo, match: outputs.Returned, editor: Editor) -> Done:
        """Make the graph return hidden states instead of logits."""
        for step in (s for o in match.outputs for s in o.chain.steps):
            compat.hold_constant(step.symbol)
        plan, _ = outputs.rewrite(info, match.outputs, editor)
        sentence = f"{outputs.stale_sentence(match.outputs[0])}. {OUTSIDE_SENTENCE}"
        return Done(match.head, sentence, [], plan, "deferred", "logits_deferred")

    def dead(self, match: outputs.Returned) -> Sequence[Node]:
        steps = (step.node for output in match.outputs for step in output.chain.steps)
        casts = match.outputs[0].chain.head.casts
        return [match.head, *dict.fromkeys(steps), *casts]
