"""Copy captured graphs so that they run op by op, either unchanged or in float64.

`memeff.verify` compares the rewritten graph with the original one. Both graphs are copied before
the backend passes the rewritten graph to the compiler (by default Inductor). The copies run with
PyTorch's operations, in the model's arithmetic or with every floating-point value in float64. In
float64, rounding is negligible, and two equivalent graphs agree to many digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import checkpoint

from .. import compat
from ..compat import HigherOrderOperator, pytree
from ..logits.recipe import DeferredOutput
from ..options import Options
from ..passes.graph.graph_info import GraphInfo, ambient_region, levels_of

WIDER: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
"""The dtype that replaces each dtype in the wide run."""

_CASTS = ("float", "half", "bfloat16", "double")
_AUTOCAST = ("_enter_autocast", "_exit_autocast")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class CannotWidenError(Exception):
    """The error for an operation that returns a narrower dtype than that of its operands."""


@dataclass(frozen=True)
class KeptGraph:
    """A copy of a captured graph that remains usable after compilation."""

    module: GraphModule  # the copy, with its own copies of the graphs inside it
    names: tuple[str, ...]  # readable name of each input ("lm_head.weight", "input_ids")
    is_parameter: tuple[bool, ...]  # which inputs are parameters
    is_written: tuple[bool, ...]  # which inputs the graph may write to
    dtypes: frozenset[torch.dtype]  # floating dtypes of the values in the graph
    obstacle: str  # why the graph cannot be run next to the compiled one, or ""


def keep(gm: GraphModule, options: Options) -> KeptGraph:
    """Copy a graph during its compilation; the copy does not keep tensors of its inputs alive."""
    by_ops = replace(options, inner="eager")  # the copy runs so, whatever the graph becomes
    info = GraphInfo(gm, by_ops, ambient_region())
    inputs = info.placeholders
    written = [target for write in info.writes for target in write.targets]
    nodes = [node for level in levels_of(gm) for node in level.graph.nodes]
    values = [compat.example_value(node) for node in nodes]
    return KeptGraph(
        module=_copied(gm),
        names=tuple(compat.readable_source(node) or node.name for node in inputs),
        is_parameter=tuple(isinstance(compat.example_input(node), nn.Parameter) for node in inputs),
        is_written=tuple(any(info.may_share_memory(t, node) for t in written) for node in inputs),
        dtypes=frozenset(
            leaf.dtype
            for leaf in pytree.tree_leaves(values)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ),
        obstacle=_obstacle(gm, nodes, bool(written)),
    )


def _obstacle(gm: GraphModule, nodes: Sequence[Node], writes: bool) -> str:
    for node in nodes:
        if node.op == "call_module":
            return "the graph holds modules, whose parameters cannot be set aside"
        default = getattr(node.target, "default", None)
        schema = getattr(node.target, "_schema", None) or getattr(default, "_schema", None)
        module = str(getattr(node.target, "__module__", ""))
        is_collective = schema is not None and schema.name.split("::")[0] in _COLLECTIVES
        is_collective = is_collective or module.startswith("torch.distributed")
        if node.op == "call_function" and is_collective:
            return "the graph talks to other processes, which may not run it a second time"
    held = (getattr(gm, str(node.target), None) for node in nodes if node.op == "get_attr")
    if writes and any(isinstance(each, Tensor) for each in held):
        return "the graph holds tensors of its own and writes in place"
    return ""


def _copied(gm: GraphModule, *, wide: bool = False) -> GraphModule:
    """Copy a graph and its nested graphs.

    With `wide`, float64 replaces narrower floating-point dtypes in the copies' casts, and in calls
    that create tensors. The copies then have no autocast regions."""
    graph = compat.copy_graph(gm)
    graph.set_codegen(CodeGen())
    for node in list(graph.nodes):
        node.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
        if wide:
            _widen_node(node)
    for node in reversed(list(graph.nodes)):
        if wide and getattr(node.target, "__name__", "") in _AUTOCAST:
            graph.erase_node(node)
    copied = GraphModule(gm, graph)
    for node in graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            setattr(copied, str(node.target), _copied(body, wide=wide))
    return copied


def _widen_node(node: Node) -> None:
    """Replace narrower floating dtypes by float64 in casts and in calls that create tensors."""
    if node.op not in ("call_function", "call_method"):
        return
    if node.op == "call_method" and node.target in _CASTS:
        node.target, node.args, node.kwargs = "to", (node.args[0], torch.float64), {}
        return
    node.args = map_aggregate(node.args, _wider)
    node.kwargs = map_aggregate(node.kwargs, _wider)


def _wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def run_op_by_op(graph: KeptGraph, args: Sequence[Any], *, wide: bool = False) -> tuple[Any, ...]:
    """Run a copied graph with PyTorch's operations.

    With `wide`, the graph runs in float64 on float64 arguments, and casts and autocast are
    ignored. If the result of an operation is not in float64, raise CannotWidenError.
    """
    module = _copied(graph.module, wide=True) if wide else graph.module
    return tuple(_OpByOp(module, wide=wide).run(*args))


def wide_outputs(plan: Sequence[DeferredOutput]) -> list[DeferredOutput]:
    """Return the descriptions of a graph's deferred logits (logits that are computed when first
    read) for a run in float64.

    In the returned descriptions, float64 replaces narrower dtypes."""
    found = []
    for entry in plan:
        steps = tuple((name, _wider(value)) for name, value in entry.recipe.steps)
        dtype = _wider(entry.recipe.compute_dtype)
        recipe = replace(entry.recipe, compute_dtype=dtype, steps=steps)
        found.append(replace(entry, recipe=recipe, loss=None))
    return found


class _OpByOp(Interpreter):
    """Runs one graph op by op; a separate `_OpByOp` runs each graph nested in this graph."""

    def __init__(self, module: GraphModule, *, wide: bool) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors of the user's reach the user as they are
        self.wide = wide

    def run_node(self, n: Node) -> Any:
        """Run one node; in a float64 run, convert a narrower result to float64."""
        result = super().run_node(n)
        if not self.wide or n.op not in ("call_function", "call_method", "get_attr"):
            return result
        operands = pytree.tree_leaves([self.env.get(operand) for operand in n.all_input_nodes])
        is_narrowing = any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in operands)

        def widen(tensor: Tensor) -> Tensor:
            if tensor.dtype not in WIDER:
                return tensor
            if is_narrowing and tensor.numel():
                raise CannotWidenError(f"{n.name} gives {tensor.dtype} for float64 operands")
            return tensor.to(WIDER[tensor.dtype])

        return pytree.tree_map_only(Tensor, widen, result)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call. For an activation checkpoint, run the checkpointed graph op by op, under
        `torch.utils.checkpoint`.
        """
        name = target.name() if isinstance(target, HigherOrderOperator) else ""
        if name == "tag_activation_checkpoint":
            body, *given = args
            return checkpoint(
                lambda *inputs: _OpByOp(body, wide=self.wide).run(*inputs),
                *given,
                use_reentrant=False,
            )
        return super().call_function(target, args, kwargs)
