"""A compiler pass of your own: `x * sigmoid(x)` becomes `silu(x)`, which keeps one tensor less."""

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from memeff_compile import Decline, Done, Editor, GraphInfo, GraphPass

aten = torch.ops.aten


class UseSilu(GraphPass):
    name = "use_silu"

    def find(self, info: GraphInfo) -> Iterator[tuple[Node, Node, Node]]:
        for node in info.visit(info.gm.graph.nodes):  # what fails here costs this node alone
            call = info.call(node)  # one spelling of `a * b`, `torch.mul(a, b)`, `a.mul(b)`
            if call is not None and call.op is aten.mul.Tensor:
                x, gate = call.args["self"], call.args["other"]
                inner = info.call(gate)
                if inner and inner.op is aten.sigmoid.default and inner.args["self"] is x:
                    yield node, gate, x

    def places(self, match: tuple[Node, Node, Node]) -> Sequence[Node]:
        return match[:2]

    def check(self, info: GraphInfo, match: tuple[Node, Node, Node]) -> Decline | None:
        node, gate, x = match
        is_written = info.written_between([x, gate], gate, node) is not None
        return Decline("mutated", "x is written to in between") if is_written else None

    def rewrite(self, info: GraphInfo, match: tuple[Node, Node, Node], editor: Editor) -> Done:
        with editor.at(match[0]):
            editor.replace(match[0], editor.call(aten.silu.default, match[2]))
        return Done(match[0], "x * sigmoid(x) -> silu(x)")
